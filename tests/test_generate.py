"""The generate command on the checkpoint of a trained run."""

import io
import json
from types import SimpleNamespace

import pytest

import generate
import train
import utils
import validate
from data.tokenizer import load_tokenizer
from inference import sampling
from runtime import cli

LINES = ["import jax", "def test_a", "return"]


@pytest.fixture
def printed(whole, capsys):
    """What generate.py prints for the tiny run."""

    def run(*flags):
        generate.main(["--run", str(whole), *flags])
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(LINES))
    return ["--prompts", str(path), "--temperature", "0", "--tokens", "9"]


def test_a_completion_does_not_depend_on_the_batch_or_the_mesh(printed, file):
    alone = "".join(
        printed("--prompt", line, "--temperature", "0", "--tokens", "9") for line in LINES
    )
    assert all(line in alone for line in LINES)
    assert printed(*file) == printed(*file, "--batch", "2") == alone
    assert printed(*file, "--mesh.fsdp", "4", "--mesh.tensor", "2") == alone


@pytest.mark.long
def test_a_sampled_completion_does_not_depend_on_the_batch(printed, file):
    warm = [*file[:2], "--tokens", "9", "--seed", "3", "--top_k", "50", "--top_p", "0.9"]
    assert printed(*warm) == printed(*warm, "--batch", "2")
    assert printed(*warm) != printed(*warm, "--seed", "4")


def test_the_command_holds_a_conversation(printed, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import jax\ndef test\n\n"))
    flags = ["--temperature", "0", "--tokens", "5"]
    found = printed("--interactive", *flags)
    assert printed("--prompt", "import jax\n", *flags).removeprefix("import jax\n") in found
    assert len(found) > 10  # of two answers, of five tokens each


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x = 1\n" * 32], "tokens, and the model was trained on 32"),
        (["--prompts", "absent"], "--prompts absent cannot be read"),
        ([], "give exactly one of --prompt TEXT, --prompts FILE"),
        (["--prompt", "a", "--interactive"], "give exactly one of"),
        (
            ["--prompt", "a", "--mesh.pipeline", "2"],
            "--mesh.pipeline 2: generation runs without pipeline",
        ),
        (["--prompt", "a", "--top_p", "0"], "--top_p 0.0 is not in"),
        (["--prompt", "a", "--tokens", "0"], "--tokens 0 is below 1"),
        (["--prompt", "a", "--warmth", "1"], "unknown flag --warmth"),
        (["--prompt", "a", "--step", "4"], "there is no checkpoint of step 4"),
    ],
)
def test_invalid_flags_and_prompts_are_refused(flags, message, whole):
    with pytest.raises(ValueError, match=message):
        generate.main(["--run", str(whole), *flags])


def test_a_token_without_an_embedding_is_refused(whole, tmp_path, capsys):
    """Of 4,096 ids of the tokenizer, the model is said to have 4,000."""
    tokenizer, few = load_tokenizer("sample"), ["--model.vocab_size", "4000"]
    tokens = (tokenizer.decode([i]) for i in range(4000, 4095))
    text = next(text for text in tokens if max(tokenizer.encode_ordinary(text)) >= 4000)
    with pytest.raises(ValueError, match=r"a token of id 40\d\d, and the model .* below 4000"):
        generate.main(["--run", str(whole), *few, "--prompt", text])
    (tmp_path / "asked").write_text(json.dumps({"prompt": "", "choices": [text, "a"], "answer": 0}))
    with pytest.raises(ValueError, match="below 4000"):
        validate.main(["--run", str(whole), *few, "--questions", str(tmp_path / "asked")])
    config = utils.changed(cli.load(whole / "config.toml"), {"sample.prompts": (text,)})
    config, mesh = utils.changed(config, {"model.vocab_size": 4000}), train.make_mesh(config)
    manifest = SimpleNamespace(
        tokenizer="sample", tokenizer_sha256=None, begin_of_text=None, end_of_text=0
    )
    assert sampling.make_sampler(config, mesh, manifest) is None
    assert "no samples: the text has a token of id 40" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_is_named(whole, tmp_path):
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        generate.main(["--run", str(tmp_path), "--prompt", "a"])
