"""The validate command on the checkpoint of a trained run."""

import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import dataset
import reference
import validate
from common import canonical
from dataset import Dataset
from runtime import cli, errors, jsonl
from tiny_run import load


def recorded(folder, step):
    records = jsonl.read(folder / "metrics.jsonl")
    [found] = [r for r in records if r["step"] == step and "loss/val" in r]
    return found


@pytest.fixture
def printed(whole, capsys):
    """What the command prints for the run with these flags."""

    def run(*flags):
        capsys.readouterr()
        validate.main(["--run", str(whole), *flags])
        return capsys.readouterr().out

    return run


def test_a_checkpoint_has_exactly_the_validation_that_its_run_recorded(whole, printed):
    files = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    found = json.loads(printed("--json"))
    assert found["step"] == 6
    assert recorded(whole, 6).items() <= found.items()
    assert found["perplexity"] == math.exp(found["loss/val"])
    assert files == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}, "nothing written"
    record = recorded(whole, 3)
    first, loss, perplexity, bits, balance, dropped = printed("--step", "3").splitlines()
    assert re.fullmatch("step 3 on 16 windows of 32 tokens of .*val", first)
    assert loss == f"loss           {record['loss/val']:.4f} nats per token"
    assert perplexity == f"perplexity     {math.exp(record['loss/val']):.2f}"
    assert bits.startswith("bits per byte  ") and dropped.startswith("dropped        0.00% ")
    assert balance.startswith(f"balance        {record['loss/val_balance']:.3f} ")


def test_other_shards_have_the_loss_of_the_one_device_reference(whole, printed, data):
    """Eleven windows, which do not fill the last of two batches, of 8 sequences."""
    config, _, _, w = load(whole)
    found = json.loads(printed("--json", "--data.val", data[1], "--eval.sequences", "11"))
    shards = Dataset(data[1], 32)
    run = jax.jit(reference.loss, static_argnums=2)
    expected = run(canonical(config, w), shards.eval_rows(np.arange(11), 11), config.model)[1]
    assert found["loss/val"] == pytest.approx(float(expected["cross_entropy"]), rel=2e-5)
    assert np.sum(found["moe/tokens_per_expert"], 1).tolist() == [16 * 32 * 2] * 4
    stored = vars(shards.manifest)
    bits = found["loss/val"] / math.log(2) * stored["tokens"] / stored["text_bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_the_dropped_share_is_of_the_choices_of_all_layers(whole):
    config, declared, mesh, _ = load(whole)
    validation = validate.Validation(config, declared, mesh, dataset.open_validation(config))
    counts = np.ones((1, 1, 4, config.model.n_routed_experts))
    stats = {"cross_entropy": 1.0, "balance": 1.0, "tokens_per_expert": counts, "dropped": 8}
    validation.program = lambda w, batch: SimpleNamespace(**stats)
    choices = 16 * 32 * 2 * 4  # windows, tokens, experts of a token, layers
    assert validation(None)["moe/dropped"] == 8 / choices


def test_guesses_are_uniform_or_by_the_frequency_of_each_token(whole):
    val = dataset.open_validation(config := cli.load(whole / "config.toml"))
    ids = val.parts[""].eval_rows(np.arange(16), 16)["targets"].reshape(-1)
    per_byte = val.manifest.tokens / val.manifest.text_bytes
    alone = -np.mean(np.log2([np.mean(ids == i) for i in ids]))  # of each token, by all of them
    expected = {"uniform": 12 * per_byte, "by frequency": alone * per_byte}
    assert validate.guesses(config, val) == pytest.approx(expected)


def test_a_loss_that_is_not_finite_has_no_perplexity_and_only_learned_tokens_count():
    manifest = SimpleNamespace(tokens=4, learned_tokens=2, text_bytes=8)
    text = SimpleNamespace(parts={"": SimpleNamespace(manifest=manifest)}, shares=[1.0])
    found = validate.with_perplexity({"loss/val": 1e4}, text)
    assert found["perplexity"] == math.inf
    assert found["bits_per_byte"] == pytest.approx(1e4 / math.log(2) / 4)
    assert math.isnan(validate.with_perplexity({"loss/val": math.nan}, text)["bits_per_byte"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run absent", r"--run absent does not exist. Give the folder of a run"),
        ("--step 4", r"no checkpoint of step 4 .* has steps \[3, 6\]. Use one"),
        ("--model.vocab_size 512", "512 covers only ids below 512.*Use --model.vocab_size 4096"),
        ("--model.hidden_size 64", r"of another model: weights\..* Use the config .*config.toml"),
        ("--eval.sequence 8", "unknown flag --eval.sequence.*did you mean --eval.sequences"),
        ("--eval.sequences 0", "--eval.sequences 0 is no evaluation. Use --eval.sequences 64"),
        ("--config configs/tiny.toml", "--config cannot be combined with --run"),
    ],
)
def test_invalid_flags_are_refused_in_one_line(whole, flags, message, monkeypatch, capsys):
    extra = flags.split()
    run = [] if "--run" in extra else ["--run", str(whole)]
    monkeypatch.setattr(sys, "argv", ["validate.py", *run, *extra])
    monkeypatch.setattr(validate, "Validation", None)  # before anything is compiled
    with pytest.raises(SystemExit) as refused:
        errors.run_command(validate.main)
    assert refused.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_run_without_a_good_checkpoint_is_refused(whole, tmp_path):
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    checkpoints = tmp_path / "checkpoints"
    with pytest.raises(ValueError, match=r"no such folder. .*--checkpoint.every_steps above 0"):
        validate.main(["--run", str(tmp_path)])
    checkpoints.mkdir()
    with pytest.raises(ValueError, match=r"has no checkpoint yet. .*--checkpoint.every_steps"):
        validate.main(["--run", str(tmp_path)])
    shutil.copytree(whole / "checkpoints", checkpoints, dirs_exist_ok=True)
    # All files: which of them hold weights varies between runs.
    for file in [path for path in (checkpoints / "3" / "state").rglob("d/*") if path.is_file()]:
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step 3 .* is damaged: .* Use another step"):
        validate.main(["--run", str(tmp_path), "--step", "3"])
