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

import checkpoint
import dataset
import model
import reference
import train
import validate
from common import canonical
from dataset import Dataset
from runtime import cli, errors, jsonl, run_directory

# Another order of the blocks in memory as well, and other ranks for every expert.
OTHER_MESH = "--mesh.fsdp 4 --mesh.pipeline 2 --mesh.tensor 1 --mesh.virtual 2"


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


def files(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def test_a_checkpoint_has_exactly_the_validation_that_its_run_recorded(whole, printed):
    before = files(whole)
    found = json.loads(printed("--json"))
    assert found["step"] == 6
    assert recorded(whole, 6).items() <= found.items()
    assert found["perplexity"] == math.exp(found["loss/val"])
    assert files(whole) == before, "validation writes nothing"


def test_an_older_checkpoint_is_reported_in_lines(whole, printed):
    record = recorded(whole, 3)
    first, *rest = printed("--step", "3").splitlines()
    assert first.startswith("step 3 on 16 windows of 32 tokens of ")
    assert first.endswith("val")
    found = dict(line.split("  ", 1) for line in rest)
    assert set(found) == {"loss", "perplexity", "bits per byte", "balance", "dropped"}
    assert found["loss"].split() == [f"{record['loss/val']:.4f}", "nats", "per", "token"]
    assert found["perplexity"].strip() == f"{math.exp(record['loss/val']):.2f}"
    assert found["balance"].split()[0] == f"{record['loss/val_balance']:.3f}"
    assert found["dropped"].split()[0] == "0.00%"


def test_another_mesh_gives_the_same_loss(whole, printed, monkeypatch):
    shapes, make = [], train.make_mesh
    monkeypatch.setattr(train, "make_mesh", lambda c: shapes.append(c.mesh.shape) or make(c))
    found = json.loads(printed("--json", *OTHER_MESH.split(), "--train.microbatches", "2"))
    assert shapes == [(1, 4, 2, 1)]
    assert found["loss/val"] == pytest.approx(recorded(whole, 6)["loss/val"], abs=1e-5)


@pytest.fixture(scope="module")
def weights(whole):
    """A canonical tree of the last checkpoint's weights, and their config."""
    config = cli.load(whole / "config.toml")
    declared, mesh = model.declare(config), train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    return config, canonical(config, checkpoint.load_weights(run_directory.at(whole), 6, shapes)[1])


@pytest.mark.parametrize(("windows", "run_rows"), [(8, 8), (5, 8), (11, 16)])
def test_other_shards_and_windows_have_the_loss_of_the_one_device_reference(
    windows, run_rows, printed, data, weights
):
    """Windows need not fill the last batch, of 8 sequences in 4 microbatches."""
    train_folder, flags = data[1], ["--eval.sequences", str(windows)]
    found = json.loads(printed("--json", "--data.val", train_folder, *flags))
    config, tree = weights
    shards = Dataset(train_folder, 32)
    batch = shards.eval_rows(np.arange(windows), windows)
    run = jax.jit(reference.loss, static_argnums=2)
    expected = float(run(tree, batch, config.model)[1]["cross_entropy"])
    assert found["loss/val"] == pytest.approx(expected, rel=2e-5)
    assert np.sum(found["moe/tokens_per_expert"], 1).tolist() == [run_rows * 32 * 2] * 4
    stored = vars(shards.manifest)
    bits = found["loss/val"] / math.log(2) * stored["tokens"] / stored["text_bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_guesses_are_uniform_or_by_the_frequency_of_each_token(whole, data):
    config = cli.load(whole / "config.toml")
    val = dataset.open_validation(config)
    ids = val.parts[""].eval_rows(np.arange(16), 16)["targets"].reshape(-1)
    per_byte = val.manifest.tokens / val.manifest.text_bytes
    alone = -np.mean(np.log2([np.mean(ids == i) for i in ids]))  # of each token, by all of them
    expected = {"uniform": 12 * per_byte, "by frequency": alone * per_byte}
    assert validate.guesses(config, val) == pytest.approx(expected)


def test_a_loss_that_is_not_finite_has_no_perplexity():
    manifest = SimpleNamespace(tokens=4, learned_tokens=None, text_bytes=8)
    text = SimpleNamespace(parts={"": SimpleNamespace(manifest=manifest)}, shares=[1.0])
    assert validate.with_perplexity({"loss/val": 1e4}, text)["perplexity"] == math.inf
    assert math.isnan(validate.with_perplexity({"loss/val": math.nan}, text)["bits_per_byte"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run absent", r"--run absent does not exist. Give the folder of a run"),
        ("--run {data}", r"has no config.toml. Give the folder of a run"),
        ("--step 4", r"no checkpoint of step 4 .* has steps \[3, 6\]. Use one"),
        ("--model.vocab_size 512", "512 covers only ids below 512.*Use --model.vocab_size 4096"),
        (
            "--model.hidden_size 64",
            r"is of another model: weights\..* Use the config .*config.toml",
        ),
        ("--eval.sequence 8", "unknown flag --eval.sequence.*did you mean --eval.sequences"),
        ("--steps 3", "unknown flag --steps.*did you mean"),
        ("--eval.sequences 0", "--eval.sequences 0 is no evaluation. Use --eval.sequences 64"),
        ("--config configs/tiny.toml", "--config cannot be combined with --run"),
        ("--data.val absent", "absent"),
        (
            "--mesh.fsdp 1 --mesh.tensor 16 --model.num_attention_heads 16",
            "16 is 32 devices, and there are 8",
        ),
    ],
)
def test_invalid_flags_are_refused_in_one_line_with_the_fix(
    whole, data, flags, message, monkeypatch, capsys
):
    extra = flags.format(data=data[1]).split()
    run = [] if "--run" in extra else ["--run", str(whole)]
    monkeypatch.setattr(sys, "argv", ["validate.py", *run, *extra])
    monkeypatch.setattr(validate, "Validation", None)  # before anything is compiled
    with pytest.raises(SystemExit) as refused:
        errors.run_command(validate.main)
    assert refused.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_run_without_a_checkpoint_is_refused(whole, tmp_path):
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    with pytest.raises(ValueError, match=r"no such folder. .*--checkpoint.every_steps above 0"):
        validate.main(["--run", str(tmp_path)])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"has no checkpoint yet. .*--checkpoint.every_steps"):
        validate.main(["--run", str(tmp_path)])


def test_a_requested_step_that_is_damaged_is_refused(whole, tmp_path):
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    copy = shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    # All files: which of them hold weights varies between runs.
    for file in [path for path in (copy / "3" / "state").rglob("d/*") if path.is_file()]:
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step 3 .* is damaged: .* Use another step"):
        validate.main(["--run", str(tmp_path), "--step", "3"])


def test_a_mesh_of_too_many_devices_is_refused_with_one_that_fits(whole, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    with pytest.raises(ValueError, match=r"is 8 devices, and there are 1. .*tensor 1") as refused:
        validate.main(["--run", str(whole)])
    assert "--mesh.fsdp 1 --mesh.pipeline 1 --mesh.tensor 1" in str(refused.value)
