"""Flags and TOML files become a config, or a one-line error that says what to do."""

import dataclasses
import re

import pytest

import utils
from conftest import ROOT
from runtime import cli

ROPE = "model.rope_scaling.factor 2 --model.rope_scaling"


def file_with(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_the_former_setting_of_positions_keeps_its_meaning_or_is_refused(tmp_path):
    def loaded(**model):
        lines = [f"{name} = {value}" for name, value in model.items()]
        return cli.load(file_with(tmp_path, "\n".join(["[model]", *lines]))).model

    false, true = {"rope_in_moe_layers": "false"}, {"rope_in_moe_layers": "true"}
    assert loaded(**false).no_rope_layer_interval == utils.Model().decoder_sparse_step
    assert loaded(**false, decoder_sparse_step=1).no_rope_layer_interval == 1
    assert loaded(**true, first_k_dense_replace=1).no_rope_layer_interval == 0
    # No layer has experts.
    dense = loaded(**false, n_routed_experts=0, first_k_dense_replace=1)
    assert dense.no_rope_layer_interval == 0
    # Intervals count the first layers, which had positions.
    for first in (1, 2):
        with pytest.raises(utils.ConfigError, match=r"toml: rope_in_moe_layers = false .*version"):
            loaded(**false, first_k_dense_replace=first)


def test_a_flag_overrides_the_file_and_the_file_the_default(tmp_path):
    text = "[model]\nhidden_size = 96\nnum_attention_heads = 2\n[optimizer]\nlr = 1\n"
    path = file_with(tmp_path, f"{text}[model.rope_scaling]\nfactor = 40\n")
    flags = "--model.num_attention_heads 6 --model.rope_scaling.mscale 0.5 --sample.prompts a b"
    config = cli.parse(["--config", path, *flags.split()])
    m = config.model
    assert (m.hidden_size, m.num_attention_heads, m.blocks) == (96, 6, 4)
    assert (m.rope_scaling.factor, m.rope_scaling.mscale) == (40.0, 0.5)
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    assert config.sample.prompts == ("a", "b")
    assert cli.parse([f"--config={path}"]).model.num_attention_heads == 2


def test_a_config_written_as_toml_reads_back_unchanged_even_with_a_byte_order_mark(tmp_path):
    flags = ["--model.tie_word_embeddings=False", "--data.segments", "True", "--model.z_loss=0.1"]
    config = cli.parse(["--run.name", 'a "quoted" name', *flags])
    assert (config.model.tie_word_embeddings, config.data.segments) == (False, True)
    assert cli.load(file_with(tmp_path, "\ufeff" + cli.to_toml(config))) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("model.hiden_size 3", "unknown flag --model.hiden_size: did you mean --model.hidden_size"),
        ("data.segments maybe", "'maybe' follows no flag that .* switch only the flag"),
        ("config absent.toml", "absent.toml cannot be read"),
        ("train.global_batch_size 9", "not divisible .*Use --train.global_batch_size 16"),
        ("mesh.replica 3", "is not divisible by .* x --mesh.fsdp x --mesh.replica = "),
        ("train.seq_len 258 --mesh.tensor 4", "Use --train.seq_len 260"),
        ("train.seq_len 255", "Use --train.seq_len 256"),
        ("eval.sequences -1", "-1 is out of range. Use an integer at least 0, or the default 64"),
        ("optimizer.lr -1", "--optimizer.lr -1.0 is out .* Use a finite number at least 0, or"),
        ("model.num_experts_per_tok 9", "is above 8, .* with 8 in each group. Use 8 or less"),
        ("model.n_group 3", "experts 8 is not divisible by .*, or another --model.n_group"),
        ("model.n_group 8", "is above 4, half of --model.n_routed_experts. Use 4"),
        ("model.topk_group 2", "is above 1, the --model.n_group. Use 1 or less"),
        ("model.n_group 4 --model.num_experts_per_tok 3", "above 2, .*2 in each group. Use 2"),
        ("model.attention gqa --model.num_key_value_heads 3", "Use .*heads 6, or another --model"),
        ("model.attention gqa --model.head_dim 7", "the pairs of rotary.*Use .*head_dim 8."),
        (f"{ROPE}.low_freq_factor 9", "is not below .*Use 1.0 and 4.0"),
        (f"{ROPE}.beta_slow 0", "Use a finite number above 0, or the default 1.0"),
        ("model.num_hidden_layers 7", "Use --model.num_hidden_layers 8"),
        ("model.layer_types sliding_attention", "needs --model.sliding_window"),
        (
            "model.layer_types full_attention full_attention full_attention",
            "multiple of 6 layers, after which --model.decoder_sparse_step 2 and "
            "--model.layer_types of 3 repeat. Use --model.num_hidden_layers 12",
        ),
        ("model.attention_out_bias", "no effect without --model.attention gqa"),
        ("model.attention_sinks", "no effect without --model.attention gqa"),
        ("model.query_pre_attn_scalar 9", "no effect without --model.attention gqa"),
        ("model.qk_norm_all_heads --model.qk_norm", "no effect without --model.attention gqa"),
        ("model.attention gqa --model.qk_norm_all_heads", "no effect without --model.qk_norm"),
        (
            "model.sliding_window 8 --model.layer_types full_attention",
            "sliding_window has no effect without sliding_attention among --model.layer_types",
        ),
        ("model.rope_local_base_freq 9", "no effect without --model.sliding_window"),
        (
            "model.experts_bias --model.n_routed_experts 0",
            "no effect without --model.n_routed_experts",
        ),
        ("model.embedding_multiplier 0", "Use a finite number above 0, or the default 1.0"),
        ("model.no_rope_layer_interval 2 --model.first_k_dense_replace 2", "these layers differ"),
        ("data.positions document", "needs --data.segments"),
        ("run.peer_seconds 0", "0.0 is out of range. Use a finite number above 0, or"),
        ("run.time_limit soon", "'soon' is not a time"),
        ("train.skip_spikes 0.5", "0.5 is out .*at least 1, or the default 0.0"),
        ("optimizer.beta2 1", "at least 0 and below 1, or the default 0.95"),
        ("model.attention_kernel splash --train.seq_len 200", "the blocks of splash .*Use .* 256"),
        ("train.steps 0", "--train.steps 0 .*at least 1, or the default 300"),
        ("seed 1", "did you mean --train.seed or --data.seed?"),
        ("learning_rate 1", "did you mean --optimizer.lr"),  # a name of other programs
        ("train.remat attention,everything", "everything.*none, full, or.*latents"),
    ],
)
def test_the_error_for_a_wrong_flag_has_the_fix(flags, message):
    with pytest.raises(ValueError, match=message):
        cli.parse(f"--{flags}".split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nhiden_size = 3", "key model.hiden_size: did you mean model.hidden_size?"),
        ("hidden_size = 3", "unknown key hidden_size: did you mean model.hidden_size?"),
        ("[modle]\nhidden_size = 3", "key modle.hidden_size: did you mean model.hidden_size?"),
        ("[model]\nhidden_size = '3'", "model.hidden_size = '3' is not int"),
        ("[model]\nscoring_func = 'relu'", "'relu' is not one of 'sigmoid', 'softmax'"),
        ("max_iters = 1", "did you mean train.steps"),
        ("[run]\nname = 'a'\nname = 'b'", "Cannot overwrite a value .at line 3"),
        ("[sample]\nprompts = [1]", r"sample.prompts = \(1,\) is not tuple.*like \[\"def\"\]"),
        ("[model", "cannot be read"),
    ],
)
def test_the_error_for_a_wrong_file_has_the_fix(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        cli.parse(["--config", file_with(tmp_path, text)])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.scoring_func", "relu", "'relu' is not one of 'sigmoid', 'softmax'"),
        ("model.hidden_size", "256", "--model.hidden_size '256' is not int. Write it like 256"),
        ("model.tie_word_embeddings", 0, "_embeddings 0 is not bool. Write it like true"),
        ("mesh.fsdp", True, "--mesh.fsdp True is not int"),
        ("sample.prompts", "def", "--sample.prompts 'def' is not tuple"),
    ],
)
def test_a_config_built_in_python_is_checked_like_a_file(name, value, message):
    with pytest.raises(ValueError, match=message):
        cli.check(utils.changed(utils.Config(), {name: value}))
    cli.check(utils.Config(optimizer=utils.Optimizer(lr=1)))


def test_a_duration_has_hours_minutes_and_seconds():
    for text, s in {"11h30m": 41400, "90m": 5400, "45s": 45, "1h1s": 3601}.items():
        assert cli.seconds(text) == s
    for text in ("", "11", "h", "30m11h", "1.5h", "-1h", "1d"):
        with pytest.raises(ValueError, match=r"--run.time_limit .* is not a time. Write .* 11h30m"):
            cli.seconds(text)


def test_every_setting_has_a_default_value_and_no_name_of_another_program():
    for name, setting in utils.settings_of().items():
        assert setting.default is not dataclasses.MISSING, name
    assert set(cli.FOREIGN) <= set(utils.settings_of())
    others = set(" ".join(cli.FOREIGN.values()).split())
    assert not {name.rpartition(".")[2] for name in utils.settings_of()} & others


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


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    (tmp_path / "a.toml").write_text('[data]\ntrain = "~/x"\n[sample]\nprompts = ["~/y"]\n')
    found = cli.parse(["--config", str(tmp_path / "a.toml"), "--run.dir=~/runs"], checked=False)
    assert (found.data.train, found.run.dir) == ("/home/a/x", "/home/a/runs")
    assert found.sample.prompts == ("~/y",)
