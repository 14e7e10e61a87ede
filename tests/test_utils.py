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
        (["--config", "absent.toml"], "absent.toml cannot be read"),
        (["--train.sequences", "9"], "9 is not a multiple .*Use --train.sequences 16"),
        (["--train.sequence_length", "255"], "Use --train.sequence_length 256"),
        (["--eval.sequences", "12"], "Use --eval.sequences 16"),
        (["--mesh.virtual", "0"], "--mesh.virtual 0 is below 1"),
        (["--optimizer.lr", "-1"], "--optimizer.lr -1.0 is below 0"),
        (["--model.experts_per_token", "9"], "is more than --model.experts 8. Use 8 or less"),
        (["--model.moe_layers", "2"], "Use --model.moe_layers 1"),
        (["--model.qk_rope_head_dim", "7"], "Use 8"),
        (["--model.capacity_factor", "0"], "--model.capacity_factor 0.0 .*above 0"),
        (["--model.attention", "splash", "--train.sequence_length", "200"], "Use .* 256, or"),
        (["--train.remat", "attention,everything"], "everything.*none, full, or.*latents"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_answered_with_its_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        utils.parse(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidht = 3", "unknown key widht in .model.: did you mean width?"),
        ("[modle]\nwidth = 3", "unknown section .modle.: did you mean model?"),
        ("[model]\nwidth = '3'", "model.width = '3' is not int"),
        ("[model]\nscores = 'relu'", "--model.scores 'relu' is not one of 'sigmoid', 'softmax'"),
        ("[model", "cannot be read"),
    ],
)
def test_a_wrong_file_is_answered_with_its_mend(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        utils.parse(["--config", file_with(tmp_path, text)])


def test_what_a_user_caused_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.delenv("TRACEBACK", raising=False)

    def fails():
        raise ValueError("use another")

    with pytest.raises(SystemExit) as stopped:
        utils.command_line(fails)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: use another\n"


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
