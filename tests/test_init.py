"""Runs that begin with another run's weights."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import main
import manifest
import metrics
import mixture
import model
import resume
import run_folder
import train
import utils
from common import canonical
from tiny_run import FLAGS, arrays, losses, start
from validate import Validation

# As in other files, so that its programs are compiled once.
OTHER_MESH = "--mesh.fsdp 4 --mesh.pipeline 2 --mesh.tensor 1 --mesh.virtual 2"
SHORT = "--train.steps 2 --checkpoint.every_steps 1 --eval.every_steps 0 --sample.prompts"


def copy(run, to):
    """The folder with all that a run is begun with."""
    shutil.copytree(run / "checkpoints", to / "checkpoints")
    shutil.copy(run / "config.toml", to)
    return to


@pytest.fixture(scope="module")
def source(whole, tmp_path_factory):
    return copy(whole, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def begun(data, runs, source):
    """(folder, what it said) of two steps from the last weights of `whole`."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "say", said.append)
        folder = start(data, runs, "begun", "--init", str(source), *SHORT.split())
    return folder, said


def evaluations(folder):
    return [r for r in metrics.read(folder / "metrics.jsonl") if "loss/val" in r]


def test_a_run_begins_with_the_loss_that_the_other_ended_with_and_a_new_schedule(begun, whole):
    folder, _ = begun
    first, last = evaluations(folder)
    assert first == evaluations(whole)[-1] | {"step": 0}
    assert (last["step"], len(losses(folder))) == (2, 2)
    rates = [
        [r["lr"] for r in metrics.read(run / "metrics.jsonl") if "lr" in r][:2]
        for run in (folder, whole)
    ]
    assert rates[0] == rates[1]


def test_a_run_tells_and_keeps_what_it_began_with(begun, source, data, runs, capsys):
    folder, said = begun
    assert f"{folder}: a new run, weights from {source} at step 6" in said
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", "begun"]
    for more in ([], ["--init", str(source)]):
        config = main.continued(main.parse([*flags, *more]))
        assert (config.run.init, config.run.init_step) == (str(source), 6)
    assert "warning" not in capsys.readouterr().out
    config = main.continued(main.parse([*flags, "--init", "elsewhere"]))
    assert config.run.init == str(source)
    assert "warning: --init elsewhere is not read" in capsys.readouterr().out
    kept = utils.load(folder / "config.toml").run
    assert (kept.init, kept.init_step) == (str(source), 6)


def test_a_run_begun_stopped_and_resumed_ends_with_the_same_bits_without_the_other(
    begun, source, data, tmp_path
):
    whole = begun[0]
    stopped = Path(shutil.copytree(whole, tmp_path / "begun"))
    shutil.rmtree(stopped / "checkpoints" / "2")  # as killed before its end
    away = source.rename(tmp_path / "away")
    try:
        resumed = start(data, tmp_path, "begun", "--init", str(source), *SHORT.split())
    finally:
        away.rename(source)
    assert losses(resumed) == losses(whole)
    assert evaluations(resumed) == evaluations(whole)
    for one, other in zip(arrays(resumed, 2), arrays(whole, 2), strict=True):
        np.testing.assert_array_equal(one, other)
    assert utils.load(resumed / "config.toml").run.init_step == 6


def config_with(data, runs, *flags):
    config = main.parse([*FLAGS, *data, "--run.dir", str(runs), "--run.name", "new", *flags])
    return train.for_devices(config, jax.devices())[0]


def begin(config):
    """(config that names the step, state) that a run begins with."""
    declared, mesh = model.declare(config), train.make_mesh(config)
    data = mixture.open_datasets(config)
    config, w = main.weights_from(config, declared, mesh, data[0])
    return config, main.begin(config, declared, mesh, None, w), (declared, mesh, data[1])


def test_another_mesh_begins_with_the_same_weights_and_an_optimizer_of_its_own(
    whole, source, data, runs, tmp_path
):
    flags = ["--init", str(source), *OTHER_MESH.split(), "--train.microbatches", "2"]
    config, state, rest = begin(config_with(data, tmp_path, *flags))
    found = Validation(config, *rest)(state.weights)
    assert found["loss/val"] == pytest.approx(evaluations(whole)[-1]["loss/val"], abs=1e-5)
    there = utils.load(source / "config.toml")
    shapes = train.abstract_state(there, model.declare(there), train.make_mesh(there)).weights
    expected = canonical(there, resume.weights_of(run_folder.at(source), 6, shapes)[1])
    jax.tree.map(np.testing.assert_array_equal, canonical(config, state.weights), expected)
    others = dataclasses.replace(state, weights=None)
    assert not any(np.any(np.asarray(a)) for a in jax.tree.leaves(others))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(
    source, data, tmp_path, capsys
):
    run = copy(source, tmp_path / "run")
    (run / "checkpoints" / "6" / "config" / "metadata").unlink()
    config = begin(config_with(data, tmp_path, "--init", str(run)))[0]
    assert config.run.init_step == 3
    assert f"{run / 'checkpoints' / '6'} is damaged and skipped" in capsys.readouterr().out
    (run / "checkpoints" / "3" / "config" / "metadata").unlink()
    with pytest.raises(ValueError, match=r"is damaged \(steps \[6, 3\]\).*or give another run"):
        start(data, tmp_path, "refused", "--init", str(run))
    assert not (tmp_path / "refused").exists()


def test_a_step_may_be_named(source, data, tmp_path):
    flags = ["--init", str(source), "--run.init_step"]
    assert begin(config_with(data, tmp_path, *flags, "3"))[0].run.init_step == 3
    with pytest.raises(ValueError, match=r"no checkpoint of step 4 .* has steps \[3, 6\]"):
        begin(config_with(data, tmp_path, *flags, "4"))


# [model]


def test_without_a_config_the_model_is_that_of_the_other_run(source, runs, tmp_path, monkeypatch):
    theirs = utils.load(source / "config.toml").model
    for spelled in (["--init", str(source)], [f"--init={source}"], ["--run.init", str(source)]):
        config = main.parse([*spelled, "--run.dir", str(tmp_path), "--model.dropout", "0.1"])
        assert config.model == dataclasses.replace(theirs, dropout=0.1)
        assert (config.run.init, config.train) == (str(source), utils.Train())
    file = tmp_path / "own.toml"
    file.write_text("[model]\nwidth = 96\n")
    config = main.parse(["--init", str(source), "--run.dir", str(tmp_path), "--config", str(file)])
    assert config.model == utils.Model(width=96)
    assert main.parse(["--run.dir", str(tmp_path)]).model == utils.Model()


def test_a_run_that_continues_has_its_own_model_when_the_other_is_gone(begun, source, runs):
    folder = begun[0]
    flags = ["--run.dir", str(runs), "--run.name", folder.name, "--init"]
    for init in (str(source), "gone"):
        assert main.parse([*flags, init]).model == utils.load(folder / "config.toml").model


def test_help_tells_of_init(capsys):
    with pytest.raises(SystemExit):
        main.parse(["--help"])
    told = capsys.readouterr().out
    assert "--init FOLDER" in told and "--run.init" in told


def test_what_weights_do_not_depend_on_may_differ():
    free = {
        "capacity_factor": 3.0,
        "eval_capacity_factor": 3.0,
        "experts_layout": "gathered",
        "balance_loss": 0.5,
        "router_bias_speed": 0.5,
        "z_loss": 0.5,
        "dropout": 0.5,
        "compute_dtype": "float32",
        "attention": "xla",
    }
    other = dataclasses.replace(utils.Model(), **free)
    resume.same_model(Path("a"), utils.Model(), other)
    changed = {f.name for f in dataclasses.fields(utils.Model)} - free.keys()
    for name in changed:
        with pytest.raises(ValueError, match=f"another model: model.{name} .* there and None here"):
            resume.same_model(Path("a"), other, dataclasses.replace(other, **{name: None}))


# What is refused


def test_another_model_is_refused_by_its_first_ten_fields(source, data, runs):
    with pytest.raises(ValueError, match=r"another model: model.width 32 there and 64 here. Leave"):
        start(data, runs, "new", "--init", str(source), "--model.width", "64")
    names = [field.name for field in dataclasses.fields(utils.Model)][:12]
    other = dataclasses.replace(utils.Model(), **dict.fromkeys(names))
    with pytest.raises(ValueError) as refused:
        resume.same_model(source, utils.Model(), other)
    assert str(refused.value).count("there and None here") == 10
    assert " and 2 more. " in str(refused.value)
    assert not (runs / "new").exists()


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("absent", r"--init .*absent does not exist. Give the folder of a run, as --init"),
        (".", r"--init .* has no config.toml. Give the folder"),
        ("no_checkpoints", r"no such folder. .*--checkpoint.every_steps above 0"),
        ("no_steps", r"--init .* has no checkpoint yet. .*give another --init"),
        ("new", r"--init .*new is this run's own folder, .*Use another --run.name"),
    ],
)
def test_a_folder_that_no_run_can_begin_with_is_refused(source, data, tmp_path, init, message):
    for name in ("no_checkpoints", "no_steps", "new"):
        (tmp_path / name).mkdir()
        shutil.copy(source / "config.toml", tmp_path / name)
    (tmp_path / "no_steps" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=message) as refused:
        start(data, tmp_path, "new", "--init", str(tmp_path / init))
    assert "\n" not in str(refused.value)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["config.toml"]


def test_data_of_another_tokenizer_is_refused_and_an_unnamed_one_is_not(source, data, tmp_path):
    flags = []
    for flag, folder in zip(data[::2], data[1::2], strict=True):
        here = Path(shutil.copytree(folder, tmp_path / Path(folder).name))
        index = here / manifest.INDEX
        other = {"tokenizer": "other", "tokenizer_sha256": "00"}
        index.write_text(json.dumps(json.loads(index.read_text()) | other))
        flags += [flag, str(here)]
    message = r"knows the tokenizer sample .*made with other \(00\).*prepare.py --tokenizer sample"
    with pytest.raises(ValueError, match=message):
        start(flags, tmp_path, "new", "--init", str(source))
    assert not (tmp_path / "new").exists()
    found = manifest.read_manifest(tmp_path / "train")
    resume.same_tokenizer(source, {"train": "ab"}, str(tmp_path), found)
