"""Flags and TOML files become a config, or a one-line error that says what to do."""

import dataclasses
import re

import pytest

import utils
from conftest import ROOT
from runtime import cli


def file_with(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_overrides_the_file_and_the_file_the_default(tmp_path):
    path = file_with(
        tmp_path, "[model]\nhidden_size = 96\nnum_attention_heads = 2\n[optimizer]\nlr = 1\n"
    )
    config = cli.parse(
        ["--config", path, "--model.num_attention_heads", "6", "--sample.prompts", "a", "b c"]
    )
    assert (config.model.hidden_size, config.model.num_attention_heads, config.model.blocks) == (
        96,
        6,
        4,
    )
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    assert config.sample.prompts == ("a", "b c")
    assert cli.parse([f"--config={path}"]).model.num_attention_heads == 2


def test_a_config_written_as_toml_reads_back_unchanged(tmp_path):
    config = cli.parse(
        [
            "--run.name",
            'a "quoted" name',
            "--model.no_tie_word_embeddings",
            "--model.dropout",
            "0.1",
        ]
    )
    assert cli.load(file_with(tmp_path, cli.to_toml(config))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.hiden_size", "3"],
         "unknown flag --model.hiden_size: did you mean --model.hidden_size?"),
        (["stray"], "'stray' follows no flag that takes a value"),
        (["--model.tie_word_embeddings", "maybe"],
         "--model.tie_word_embeddings 'maybe' is no switch value"),
        (["--model.no_tie_word_embeddings", "True"], "'True' follows no flag"),
        (["--config", "absent.toml"], "absent.toml cannot be read"),
        (["--train.global_batch_size", "9"],
         "9 is not divisible .*Use --train.global_batch_size 16"),
        (["--mesh.replica", "3"], "is not divisible by .* x --mesh.fsdp x --mesh.replica = "),
        (["--train.seq_len", "255"], "Use --train.seq_len 256"),
        (["--eval.sequences", "-1"], "--eval.sequences -1 is below 0. Use 0 or more"),
        (["--mesh.virtual", "0"], "--mesh.virtual 0 is below 1"),
        (["--optimizer.lr", "-1"], "--optimizer.lr -1.0 is below 0"),
        (["--model.num_experts_per_tok", "9"],
         "is more than --model.n_routed_experts 8. Use 8 or less"),
        (["--model.n_group", "3"], "3 with --model.n_routed_experts 8: .*Use --model.n_group 2"),
        (["--model.n_group", "8"], "and 2 experts or more.*Use --model.n_group 4"),
        (["--model.topk_group", "2"], "is more than --model.n_group 1. Use 1 or less"),
        (["--model.n_group", "4", "--model.num_experts_per_tok", "3"],
         "3 is more than .*2 in each group. Use --model.topk_group 2"),
        (["--model.attention", "gqa", "--model.num_key_value_heads", "3"],
         "4 is not divisible by .*3.*Use --model.num_key_value_heads 1"),
        (["--model.attention", "gqa", "--model.head_dim", "7"], "head_dim 7 is odd.*Use 8"),
        (["--model.attention", "gqa", "--model.num_key_value_heads", "0"], "0 is below 1"),
        (["--model.sliding_window", "-1"], "--model.sliding_window -1 is below 0"),
        (["--model.rope_scaling.factor", "2", "--model.rope_scaling.rope_type", "llama3",
          "--model.rope_scaling.high_freq_factor", "1"], "must be above 0 and below .*1.0 and 4"),
        (["--model.rope_scaling.factor", "0.5"],
         "--model.rope_scaling.factor 0.5 is below 1.*Use 1.0"),
        (["--model.rope_scaling.factor", "2", "--model.rope_scaling.beta_slow", "0"],
         "above 0.*beta_slow 1.0"),
        (["--model.rope_scaling.factor", "2", "--model.rope_scaling.beta_fast", "0.5"],
         "at most .*beta_fast 0.5"),
        (["--model.rope_scaling.factor", "2", "--model.rope_theta", "1"],
         "Use --model.rope_theta 10000"),
        (["--model.num_hidden_layers", "7"], "Use --model.num_hidden_layers 8"),
        (["--model.qk_rope_head_dim", "7"], "Use 8"),
        (["--run.peer_seconds", "0"], "0.0 must be above 0. Use 30.0"),
        (["--run.time_limit", "soon"], "'soon' is not a time"),
        (["--train.skip_spikes", "0.5"], "0.5 would skip .*1 or more. Use 5.0, or 0.0"),
        (["--optimizer.beta2", "1"], "--optimizer.beta2 1.0 must be below 1.* Use 0.95"),
        (["--optimizer.muon_beta", "1.5"], "--optimizer.muon_beta 1.5 must"),
        (["--train.skip_spikes", "-1"], "--train.skip_spikes -1.0 is below 0"),
        (["--model.capacity_factor", "-1"], "--model.capacity_factor -1.0 is below 0"),
        (["--model.attention_kernel", "splash", "--train.seq_len", "200"], "Use .* 256, or"),
        (["--train.remat", "attention,everything"], "everything.*none, full, or.*latents"),
    ],
)  # fmt: skip
def test_the_error_for_a_wrong_flag_has_the_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        cli.parse(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[model]\nhiden_size = 3",
            "unknown key hiden_size in .model.: did you mean model.hidden_size?",
        ),
        ("[train]\nhidden_size = 3", "unknown key hidden_size in .train.: did you mean model.h"),
        ("hidden_size = 3", "unknown key hidden_size: did you mean model.hidden_size?"),
        ("[modle]\nhidden_size = 3", "unknown section .modle.: did you mean model?"),
        ("[modle]", "unknown key modle"),
        ("[model]\nhidden_size = '3'", "model.hidden_size = '3' is not int"),
        (
            "[model]\nscoring_func = 'relu'",
            "model.scoring_func = 'relu' is not one of 'sigmoid', 'softmax'",
        ),
        ("[sample]\nprompts = [1]", r"sample.prompts = \(1,\) is not tuple.*like \[\"def\"\]"),
        ("[model", "cannot be read"),
    ],
)
def test_the_error_for_a_wrong_file_has_the_fix(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        cli.parse(["--config", file_with(tmp_path, text)])


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\nhidden_size = 96\n")
    assert cli.load(path).model.hidden_size == 96


def test_a_table_in_a_section_is_read_from_files_and_flags(tmp_path):
    path = file_with(tmp_path, "[model.rope_scaling]\nfactor = 40\n")
    assert cli.load(path).model.rope_scaling.factor == 40.0
    config = cli.parse(["--config", path, "--model.rope_scaling.mscale", "0.5"])
    assert (config.model.rope_scaling.factor, config.model.rope_scaling.mscale) == (40.0, 0.5)


def test_only_settings_that_allow_zero_accept_it():
    with pytest.raises(ValueError, match=r"--train.steps 0 is below 1"):
        cli.parse(["--train.steps", "0"])
    assert cli.parse(["--profile.steps", "0"]).profile.steps == 0


@pytest.mark.parametrize(
    ("written", "tied"),
    [
        ("", True),
        ("--model.tie_word_embeddings", True),
        ("--model.no_tie_word_embeddings", False),
        ("--model.no-tie-word-embeddings", False),
        *[(f"--model.tie_word_embeddings {word}", True) for word in ("True", "true", "1")],
        *[(f"--model.tie_word_embeddings {word}", False) for word in ("False", "false", "0")],
        ("--model.tie_word_embeddings=True", True),
        ("--model.tie_word_embeddings=False", False),
        ("--model.tie_word_embeddings False --model.tie_word_embeddings", True),
    ],
)
def test_a_switch_works_with_or_without_a_value(written, tied):
    config = cli.parse([*written.split(), "--model.hidden_size", "96", "--data.segments", "1"])
    assert (config.model.tie_word_embeddings, config.model.hidden_size, config.data.segments) == (
        tied,
        96,
        True,
    )


def test_every_switch_takes_a_value_in_either_spelling():
    switches = [name for name, field in utils.fields_of().items() if field.type is bool]
    assert len(switches) >= 5
    for name in switches:
        section, key = name.split(".")
        for flag in (f"--{name}", f"--{name}".replace("_", "-")):
            for value in (True, False):
                for arguments in ([flag, str(value)], [f"{flag}={value}"]):
                    config = cli.parse(arguments)
                    assert getattr(getattr(config, section), key) is value, arguments


def test_a_value_that_reads_like_a_switch_stays_a_value():
    config = cli.parse(
        ["--sample.prompts", "False", "a=b", "--run.name=x=1", "--model.tie_word_embeddings=0"]
    )
    assert (config.sample.prompts, config.run.name) == (("False", "a=b"), "x=1")
    assert config.model.tie_word_embeddings is False


def refusal(arguments):
    with pytest.raises(ValueError) as refused:
        cli.parse(arguments)
    return str(refused.value)


def test_the_error_for_a_setting_without_a_section_lists_the_sections():
    assert "did you mean --model.rope_theta?" in refusal(["--rope_theta", "1"])
    assert "did you mean --train.seed or --data.seed?" in refusal(["--seed", "1"])


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("model", {"scoring_func": "relu"},
         "--model.scoring_func 'relu' is not one of 'sigmoid', 'softmax'"),
        ("run", {"resume": "no"}, "--run.resume 'no' is not one of 'auto', 'never', 'must'"),
        ("model", {"hidden_size": "256"},
         "--model.hidden_size '256' is not int. Write it like 256"),
        ("model", {"hidden_size": 256.0}, "--model.hidden_size 256.0 is not int"),
        ("model", {"tie_word_embeddings": 0},
         "--model.tie_word_embeddings 0 is not bool. Write it like true"),
        ("mesh", {"fsdp": True}, "--mesh.fsdp True is not int"),
        ("sample", {"prompts": "def"}, "--sample.prompts 'def' is not tuple"),
        ("data", {"train": None}, "--data.train None is not str"),
    ],
)  # fmt: skip
def test_a_config_built_in_python_is_checked_like_a_file(section, fields, message):
    made = dataclasses.replace(getattr(utils.Config(), section), **fields)
    with pytest.raises(ValueError, match=message):
        cli.check(dataclasses.replace(utils.Config(), **{section: made}))
    cli.check(utils.Config(optimizer=utils.Optimizer(lr=1)))


@pytest.mark.parametrize(
    ("text", "s"), [("11h30m", 41400), ("90m", 5400), ("45s", 45), ("1h1s", 3601)]
)
def test_a_duration_has_hours_minutes_and_seconds(text, s):
    assert cli.seconds(text) == s


@pytest.mark.parametrize("text", ["", "11", "h", "30m11h", "1.5h", "-1h", "1d"])
def test_an_invalid_duration_is_an_error(text):
    with pytest.raises(ValueError, match=r"--run.time_limit .* is not a time. Write .* as 11h30m"):
        cli.seconds(text)


def test_every_setting_has_a_default_value():
    for name, field in utils.fields_of().items():
        assert field.default is not dataclasses.MISSING, name


def test_help_shows_the_comment_of_each_setting(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    text = "".join(capsys.readouterr().out.replace("│", " ").split())
    source = (ROOT / "utils.py").read_text()
    body = source[source.index("class Mesh:") : source.index("class Config:")]
    comments = re.findall(r"# (.*)", body)
    assert len(comments) > 60
    missing = [c for c in comments if "".join(c.split()) not in text]
    assert not missing


@pytest.mark.parametrize(
    "name, ours",
    [
        ("n_embd", "model.hidden_size"),
        ("n_layer", "model.num_hidden_layers"),
        ("n_head", "model.num_attention_heads"),
        ("block_size", "train.seq_len"),
        ("batch_size", "train.global_batch_size"),
        ("learning_rate", "optimizer.lr"),
        ("max_iters", "train.steps"),
    ],
)
def test_names_of_other_programs_are_answered_with_ours(tmp_path, name, ours):
    with pytest.raises(utils.ConfigError, match=f"did you mean --{ours}"):
        cli.parse([f"--{name}", "1"])
    (tmp_path / "a.toml").write_text(f"{name} = 1\n")
    with pytest.raises(utils.ConfigError, match=f"did you mean {ours}"):
        cli.load(tmp_path / "a.toml")


def test_every_answer_to_a_foreign_name_is_a_setting():
    assert set(cli.FOREIGN.values()) <= set(cli.fields_of())
    assert not {name.rpartition(".")[2] for name in cli.fields_of()} & set(cli.FOREIGN)


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    (tmp_path / "a.toml").write_text('[data]\ntrain = "~/x"\n[sample]\nprompts = ["~/y"]\n')
    found = cli.parse(["--config", str(tmp_path / "a.toml"), "--run.dir=~/runs"], checked=False)
    assert (found.data.train, found.run.dir) == ("/home/a/x", "/home/a/runs")
    assert found.sample.prompts == ("~/y",)


@pytest.mark.parametrize("text", ["[run]\nname = 'a'\nname = 'b'", "[run]\n[data]\n[run]"])
def test_a_key_that_a_file_gives_twice_is_named_with_its_line(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(utils.ConfigError, match=r"a key twice: line 3, .*(name = 'b'|\[run\])"):
        cli.load(tmp_path / "a.toml")
