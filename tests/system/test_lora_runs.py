"""Runs with adapters: resumed, merged, exported, and on a base that has changed."""

import shutil

import jax
import numpy as np
import pytest

import checkpoint
import convert
import lora
import main
import model
import train
import utils
import validate
from checkpoint import Checkpoints
from runtime import cli, jsonl, resume, run_directory
from tiny_run import losses, start
from utils import ConfigError

ADAPTERS = "--lora.rank 2 --lora.alpha 8 --lora.targets attention experts --optimizer.lr 2e-3"


def loaded(folder):
    """Return the weights of a run as commands load them, and its config."""
    run = run_directory.at(folder)
    config = utils.for_platform(resume.config_of(run, [], validate.Flags), "cpu")
    declared, mesh = model.declare(config), train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    return checkpoint.load_weights(run, None, shapes)[1], config


def validation_loss(folder):
    w, config = loaded(folder)
    declared, mesh = model.declare(config), train.make_mesh(config)
    val = main.open_datasets(config)[1]
    return validate.Validation(config, declared, mesh, val)(w)["loss/val"]


@pytest.fixture(scope="module")
def adapters(whole, data, runs):
    """A run with adapters, stopped after three of six steps and resumed on another mesh."""
    flags = [*ADAPTERS.split(), "--run.init_from", str(whole)]
    start(
        data, runs, "lora-adapters", *flags, "--train.steps", "3", "--optimizer.schedule_steps", "6"
    )
    mesh = ["--mesh.fsdp", "2", "--mesh.pipeline", "1", "--mesh.tensor", "2"]
    return start(data, runs, "lora-adapters", *flags, "--optimizer.schedule_steps", "6", *mesh)


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(adapters, whole, data, runs):
    flags = [*ADAPTERS.split(), "--run.init_from", str(whole)]
    other = start(data, runs, "lora-unstopped", *flags, "--optimizer.schedule_steps", "6")
    assert np.allclose(losses(adapters), losses(other), rtol=1e-5)


def test_checkpoints_hold_the_adapters_alone(adapters):
    with Checkpoints(adapters / "checkpoints") as saved:
        names = saved.record(6)["arrays"].keys()
    held = [name for name in names if name.startswith("weights.")]
    assert held and all(name.endswith((".a", ".b")) for name in held)
    assert not [name for name in held if ".mlp." in name]
    moments = [name for name in names if name.startswith("optimizer.") and "weights" in name]
    assert all(name.endswith((".a", ".b")) for name in moments)


def test_merged_weights_have_the_loss_of_a_run_that_learned(whole, data, runs):
    steps = "--train.steps 40 --optimizer.schedule_steps 40 --checkpoint.every_steps 40"
    flags = f"{ADAPTERS} --optimizer.lr 1e-2 {steps} --eval.every_steps 40 --sample.every_steps 0"
    folder = start(data, runs, "lora-longer", *flags.split(), "--run.init_from", str(whole))
    recorded = [r["loss/val"] for r in jsonl.read(folder / "metrics.jsonl") if "loss/val" in r]
    assert recorded[-1] < recorded[0] - 0.1
    assert validation_loss(folder) == pytest.approx(recorded[-1], rel=1e-5)


def test_an_export_has_the_merged_weights(adapters, tmp_path):
    out = tmp_path / "exported"
    convert.main(["export", "--run", str(adapters), "--out", str(out), "--remote_code"])
    convert.main(["import", "--folder", str(out), "--out", str(tmp_path / "imported")])
    merged, again = (loaded(folder)[0] for folder in (adapters, tmp_path / "imported"))
    for one, other in zip(jax.tree.leaves(merged), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, np.reshape(other, one.shape))


def test_a_run_can_start_from_merged_weights(adapters, data, runs):
    more = start(data, runs, "lora-after", "--run.init_from", str(adapters), "--train.steps", "1")
    first = next(r["loss/val"] for r in jsonl.read(more / "metrics.jsonl") if "loss/val" in r)
    assert first == pytest.approx(validation_loss(adapters), rel=1e-5)


def test_a_base_that_has_changed_is_refused(whole, data, runs, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(whole, base)
    flags = [*ADAPTERS.split(), "--run.init_from", str(base), "--optimizer.schedule_steps", "6"]
    folder = start(data, runs, "lora-moved", *flags, "--train.steps", "3")
    shutil.move(base, tmp_path / "elsewhere")
    flags[flags.index(str(base))] = str(tmp_path / "elsewhere")
    start(data, runs, "lora-moved", *flags, "--train.steps", "4")
    other = start(data, runs, "lora-other", "--train.seed", "5", "--train.steps", "6")
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.copytree(other, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"does not have the weights that the adapters of"):
        start(data, runs, "lora-moved", *flags, "--train.steps", "5")
    with pytest.raises(ConfigError, match=r"not those that the adapters were trained on"):
        loaded(folder)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--lora.alpha 8", "other settings of .lora. have no effect"),
        ("--lora.rank 2", "adapters need a trained base. Name its run"),
        ("--lora.rank 2 --run.init_from runs/x --model.matmul_dtype float8", "no products in FP8"),
        ("--lora.rank 2 --run.init_from runs/x --run.init_optimizer", "without the base's optim"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        lora.check(cli.parse(flags.split()))
