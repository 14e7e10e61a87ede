"""Flags and TOML files: what a user writes becomes a config, or one line with the mend."""

import dataclasses
import re

import pytest

import utils
from conftest import ROOT


def file_with(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    path = file_with(tmp_path, "[model]\nwidth = 96\nheads = 2\n[optimizer]\nlr = 1\n")
    config = utils.parse(["--config", path, "--model.heads", "6", "--sample.prompts", "a", "b c"])
    assert (config.model.width, config.model.heads, config.model.blocks) == (96, 6, 4)
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    assert config.sample.prompts == ("a", "b c")
    assert utils.parse([f"--config={path}"]).model.heads == 2


def test_a_config_written_as_toml_reads_back_as_itself(tmp_path):
    config = utils.parse(
        ["--run.name", 'a "quoted" name', "--model.no_tied", "--model.dropout", "0.1"]
    )
    assert utils.load(file_with(tmp_path, utils.to_toml(config))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.widht", "3"], "unknown flag --model.widht: did you mean --model.width?"),
        (["stray"], "'stray' follows no flag that takes it"),
        (["--model.tied", "maybe"], "--model.tied 'maybe' is not a switch's value"),
        (["--model.no_tied", "True"], "'True' follows no flag"),
        (["--config", "absent.toml"], "absent.toml cannot be read"),
        (["--train.sequences", "9"], "9 is not a multiple .*Use --train.sequences 16"),
        (["--mesh.replica", "3"], "is not a multiple of .* x --mesh.fsdp x --mesh.replica = "),
        (["--train.sequence_length", "255"], "Use --train.sequence_length 256"),
        (["--eval.sequences", "12"], "Use --eval.sequences 16"),
        (["--mesh.virtual", "0"], "--mesh.virtual 0 is below 1"),
        (["--optimizer.lr", "-1"], "--optimizer.lr -1.0 is below 0"),
        (["--model.experts_per_token", "9"], "is more than --model.experts 8. Use 8 or less"),
        (["--model.expert_groups", "3"], "3 with --model.experts 8: .*Use --model.expert_groups 2"),
        (["--model.expert_groups", "8"], "have 2 experts or more.*Use --model.expert_groups 4"),
        (["--model.groups_per_token", "2"], "is more than --model.expert_groups 1. Use 1 or less"),
        (["--model.expert_groups", "4", "--model.experts_per_token", "3"],
         "3 is more than .*2 in each group. Use --model.groups_per_token 2"),
        (["--model.rope_factor", "0.5"], "--model.rope_factor 0.5 is below 1.*Use 1.0"),
        (["--model.rope_factor", "2", "--model.rope_beta_slow", "0"], "above 0.*beta_slow 1.0"),
        (["--model.rope_factor", "2", "--model.rope_beta_fast", "0.5"], "not above the second"),
        (["--model.rope_factor", "2", "--model.rope_theta", "1"], "Use --model.rope_theta 10000"),
        (["--model.moe_layers", "2"], "Use --model.moe_layers 1"),
        (["--model.qk_rope_head_dim", "7"], "Use 8"),
        (["--run.peer_seconds", "0"], "0.0 ends every run at once. Use 30.0, or more"),
        (["--run.time_limit", "soon"], "'soon' is no time"),
        (["--train.skip_spikes", "0.5"], "0.5 would leave out .*1 or more. Use 5.0, or 0.0"),
        (["--optimizer.beta2", "1"], "--optimizer.beta2 1.0 keeps all.*below 1. Use 0.95"),
        (["--optimizer.muon_beta", "1.5"], "--optimizer.muon_beta 1.5 keeps"),
        (["--train.skip_spikes", "-1"], "--train.skip_spikes -1.0 is below 0"),
        (["--model.capacity_factor", "0"], "--model.capacity_factor 0.0 .*above 0"),
        (["--model.attention", "splash", "--train.sequence_length", "200"], "Use .* 256, or"),
        (["--train.remat", "attention,everything"], "everything.*none, full, or.*latents"),
        (["--train.remat", "attnetion"], "attnetion' cannot .*did you mean attention.*full"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_answered_with_its_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        utils.parse(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidht = 3", "unknown key widht in .model.: did you mean model.width?"),
        ("[train]\nwidth = 3", "unknown key width in .train.: did you mean model.width?"),
        ("width = 3", "unknown key width: did you mean model.width?"),
        ("[modle]\nwidth = 3", "unknown section .modle.: did you mean model?"),
        ("[model]\nwidth = '3'", "model.width = '3' is not int"),
        ("[model]\nscores = 'relu'", "model.scores = 'relu' is not one of 'sigmoid', 'softmax'"),
        ("[sample]\nprompts = [1]", r"sample.prompts = \(1,\) is not tuple.*like \[\"def\"\]"),
        ("[model", "cannot be read"),
    ],
)
def test_a_wrong_file_is_answered_with_its_mend(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        utils.parse(["--config", file_with(tmp_path, text)])


@pytest.mark.parametrize(
    ("written", "tied"),
    [
        ("", True),
        ("--model.tied", True),
        ("--model.no_tied", False),
        ("--model.no-tied", False),
        *[(f"--model.tied {word}", True) for word in ("True", "true", "1")],
        *[(f"--model.tied {word}", False) for word in ("False", "false", "0")],
        ("--model.tied=True", True),
        ("--model.tied=False", False),
        ("--model.tied False --model.tied", True),
    ],
)
def test_a_switch_is_taken_alone_or_with_its_value(written, tied):
    config = utils.parse([*written.split(), "--model.width", "96", "--data.segments", "1"])
    assert (config.model.tied, config.model.width, config.data.segments) == (tied, 96, True)


def test_every_switch_takes_a_value_in_either_spelling():
    switches = [name for name, field in utils._names().items() if field.type is bool]
    assert len(switches) >= 5
    for name in switches:
        section, key = name.split(".")
        for flag in (f"--{name}", f"--{name}".replace("_", "-")):
            for value in (True, False):
                for arguments in ([flag, str(value)], [f"{flag}={value}"]):
                    config = utils.parse(arguments)
                    assert getattr(getattr(config, section), key) is value, arguments


def test_a_value_that_reads_like_a_switch_stays_a_value():
    config = utils.parse(["--sample.prompts", "False", "a=b", "--run.name=x=1", "--model.tied=0"])
    assert (config.sample.prompts, config.run.name) == (("False", "a=b"), "x=1")
    assert config.model.tied is False


# As the config.json files of DeepSeek-V3, DeepSeek-V2-Lite, Moonlight and Kimi K2 have them, and
# DeepseekV3Config's own.
PUBLISHED = {
    "hidden_size": "model.width",
    "intermediate_size": "model.hidden",
    "moe_intermediate_size": "model.expert_hidden",
    "num_attention_heads": "model.heads",
    "n_routed_experts": "model.experts",
    "num_experts_per_tok": "model.experts_per_token",
    "norm_topk_prob": "model.normalize_weights",
    "n_group": "model.expert_groups",
    "topk_group": "model.groups_per_token",
    "original_max_position_embeddings": "model.rope_original_length",
    "scoring_func": "model.scores",
    "rms_norm_eps": "model.norm_epsilon",
    "tie_word_embeddings": "model.tied",
    "vocab_size": "model.vocabulary",
    "aux_loss_alpha": "model.balance_loss",
    "torch_dtype": "model.compute_dtype",
    "max_position_embeddings": "train.sequence_length",
}


def refusal(arguments):
    with pytest.raises(ValueError) as refused:
        utils.parse(arguments)
    return str(refused.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_name_of_hugging_faces_is_answered_with_ours(tmp_path, name):
    ours = PUBLISHED[name]
    for flag in (f"--model.{name}", f"--{name}", f"--model.{name}".replace("_", "-")):
        assert f"is --{ours} here" in refusal([flag, "1"])
    for text in (f"[model]\n{name} = 1", f"{name} = 1"):
        assert f"is {ours} here" in refusal(["--config", file_with(tmp_path, text)])


def test_a_name_for_several_settings_is_answered_with_all(tmp_path):
    flags = re.findall(r"--model\.rope_\w+", refusal(["--model.rope_scaling", "1"]))
    file = refusal(["--config", file_with(tmp_path, "[rope_scaling]\nfactor = 40")])
    assert re.findall(r"model\.rope_\w+", file) == [flag[2:] for flag in flags[1:]]
    yarn = [f"--{name}" for name in utils._names() if name.startswith("model.rope_")]
    assert set(flags[1:]) == {*yarn} - {"--model.rope_theta", "--model.rope_in_moe_layers"}


def test_every_setting_named_for_hugging_faces_exists_and_no_name_is_both():
    ours = {name for names in utils.HUGGING_FACE.values() for name in names.split(" and ")}
    assert ours <= set(utils._names())
    theirs = utils.HUGGING_FACE.keys() | utils.NOT_HERE
    assert len(theirs) == len(utils.HUGGING_FACE) + len(utils.NOT_HERE)
    assert not theirs & {name.split(".")[1] for name in utils._names()}


@pytest.mark.parametrize(
    "name", ["num_nextn_predict_layers", "attention_bias", "initializer_range"]
)
def test_what_the_model_does_not_have_is_said_and_not_guessed(tmp_path, name):
    message = f"the model has no setting for Hugging Face's {name}. Leave it out."
    assert message in refusal([f"--model.{name}", "1"])
    assert message in refusal([f"--{name}=1"])
    assert message in refusal(["--config", file_with(tmp_path, f"[model]\n{name} = 1")])


def test_a_setting_without_its_section_is_answered_with_all_that_have_it():
    assert "did you mean --model.rope_theta?" in refusal(["--rope_theta", "1"])
    assert "did you mean --train.seed or --data.seed?" in refusal(["--seed", "1"])


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("model", {"scores": "relu"}, "--model.scores 'relu' is not one of 'sigmoid', 'softmax'"),
        ("run", {"resume": "no"}, "--run.resume 'no' is not one of 'auto', 'never', 'must'"),
        ("model", {"width": "256"}, "--model.width '256' is not int. Write it like 256"),
        ("model", {"width": 256.0}, "--model.width 256.0 is not int"),
        ("model", {"tied": 0}, "--model.tied 0 is not bool. Write it like true"),
        ("mesh", {"fsdp": True}, "--mesh.fsdp True is not int"),
        ("sample", {"prompts": "def"}, "--sample.prompts 'def' is not tuple"),
        ("data", {"train": None}, "--data.train None is not str"),
    ],
)  # fmt: skip
def test_a_config_built_in_python_is_checked_like_a_file(section, fields, message):
    made = dataclasses.replace(getattr(utils.Config(), section), **fields)
    with pytest.raises(ValueError, match=message):
        utils.check(dataclasses.replace(utils.Config(), **{section: made}))
    utils.check(utils.Config(optimizer=utils.Optimizer(lr=1)))


@pytest.mark.parametrize(
    ("text", "s"), [("11h30m", 41400), ("90m", 5400), ("45s", 45), ("1h1s", 3601)]
)
def test_a_time_is_written_in_hours_minutes_and_seconds(text, s):
    assert utils.seconds(text) == s


@pytest.mark.parametrize("text", ["", "11", "h", "30m11h", "1.5h", "-1h", "1d"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match=r"--run.time_limit .* is no time. Write .* as 11h30m"):
        utils.seconds(text)


def test_every_field_has_its_help():
    for section in dataclasses.fields(utils.Config):
        for field in dataclasses.fields(section.default_factory):
            assert field.default is not dataclasses.MISSING, (section.name, field.name)


def test_help_shows_the_comment_beside_each_setting(capsys):
    with pytest.raises(SystemExit):
        utils.parse(["--help"])
    text = "".join(capsys.readouterr().out.replace("│", " ").split())
    source = (ROOT / "utils.py").read_text()
    body = source[source.index("class Mesh:") : source.index("class Config:")]
    comments = re.findall(r"# (.*)", body)
    assert len(comments) > 60
    missing = [c for c in comments if "".join(c.split()) not in text]
    assert not missing
