"""Runs that start from another run's weights (--run.init_from)."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import checkpoint
import dataset
import main
import model
import train
import utils
from common import canonical
from conftest import ROOT
from data import manifest
from runtime import cli, jsonl, resume, run_directory
from saved_state import CONFIG
from tiny_run import FLAGS, arrays, losses, start
from utils import ConfigError
from validate import Validation

# As in other files, so that its programs are compiled once.
OTHER_MESH = "--mesh.fsdp 4 --mesh.pipeline 2 --mesh.tensor 1 --mesh.virtual 2"
NEWEST = run_directory.at("absent"), 1
SHORT = "--train.steps 2 --checkpoint.every_steps 1 --eval.every_steps 0 --sample.prompts"


def copy(run, to):
    """The folder with all that a run is started with."""
    shutil.copytree(run / "checkpoints", to / "checkpoints")
    shutil.copy(run / "config.toml", to)
    return to


@pytest.fixture(scope="module")
def source(whole, tmp_path_factory):
    folder = copy(whole, tmp_path_factory.mktemp("source"))
    (folder / run_directory.HF).mkdir()
    (folder / run_directory.HF / "config.json").write_text('{"bos_token_id": 7}')
    return folder


@pytest.fixture(scope="module")
def started(data, runs, source):
    """(folder, what it logged) of two steps from the last weights of `whole`."""
    logged = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "log", logged.append)
        folder = start(data, runs, "started", "--run.init_from", str(source), *SHORT.split())
    return folder, logged


def test_a_run_keeps_the_settings_of_the_imported_base_for_its_export(started):
    file = started[0] / run_directory.HF / "config.json"
    assert file.read_text() == '{"bos_token_id": 7}'


def evaluations(folder):
    return [r for r in jsonl.read(folder / "metrics.jsonl") if "loss/val" in r]


def test_a_run_starts_with_the_final_loss_of_the_other_and_a_new_schedule(started, whole):
    folder, _ = started
    first, last = evaluations(folder)
    assert first == evaluations(whole)[-1] | {"step": 0}
    assert (last["step"], len(losses(folder))) == (2, 2)
    rates = [
        [r["lr"] for r in jsonl.read(run / "metrics.jsonl") if "lr" in r][:2]
        for run in (folder, whole)
    ]
    assert rates[0] == rates[1]


def test_a_run_logs_and_records_its_initial_weights(started, source, data, runs, capsys):
    folder, logged = started
    assert f"{folder}: a new run, weights from {source} at step 6" in logged
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", "started"]
    for more in ([], ["--run.init_from", str(source)]):
        config = resume.resolve(main.parse([*flags, *more]))
        assert (config.run.init_from, config.run.init_from_step) == (str(source), 6)
    assert "warning" not in capsys.readouterr().out
    config = resume.resolve(main.parse([*flags, "--run.init_from", "elsewhere"]))
    assert config.run.init_from == str(source)
    assert "warning: --run.init_from elsewhere is not read" in capsys.readouterr().out
    kept = cli.load(folder / "config.toml").run
    assert (kept.init_from, kept.init_from_step) == (str(source), 6)


def test_a_run_resumes_with_the_same_bits_without_the_other_run(started, source, data, tmp_path):
    whole = started[0]
    stopped = Path(shutil.copytree(whole, tmp_path / "started"))
    shutil.rmtree(stopped / "checkpoints" / "2")  # as killed before its end
    away = source.rename(tmp_path / "away")
    try:
        resumed = start(data, tmp_path, "started", "--run.init_from", str(source), *SHORT.split())
    finally:
        away.rename(source)
    assert losses(resumed) == losses(whole)
    assert evaluations(resumed) == evaluations(whole)
    for one, other in zip(arrays(resumed, 2), arrays(whole, 2), strict=True):
        np.testing.assert_array_equal(one, other)
    assert cli.load(resumed / "config.toml").run.init_from_step == 6


def config_with(data, runs, *flags):
    config = main.parse([*FLAGS, *data, "--run.dir", str(runs), "--run.name", "new", *flags])
    return train.for_devices(config, jax.devices())[0]


def begin(config):
    """(config that names the step, state) that a run begins with."""
    declared, mesh = model.declare(config), train.make_mesh(config)
    data = dataset.open_datasets(config)
    config, w = main.load_initial(config, declared, mesh, data[0])
    return config, main.start_state(config, declared, mesh, None, w), (declared, mesh, data[1])


def test_another_mesh_starts_with_the_same_weights_and_a_new_optimizer_state(
    whole, source, data, runs, tmp_path
):
    flags = ["--run.init_from", str(source), *OTHER_MESH.split(), "--train.microbatches", "2"]
    config, state, rest = begin(config_with(data, tmp_path, *flags))
    found = Validation(config, *rest)(state.weights)
    assert found["loss/val"] == pytest.approx(evaluations(whole)[-1]["loss/val"], abs=1e-5)
    there = cli.load(source / "config.toml")
    shapes = train.abstract_state(there, model.declare(there), train.make_mesh(there)).weights
    expected = canonical(there, checkpoint.load_weights(run_directory.at(source), 6, shapes)[1])
    jax.tree.map(np.testing.assert_array_equal, canonical(config, state.weights), expected)
    others = dataclasses.replace(state, weights=None)
    assert not any(np.any(np.asarray(a)) for a in jax.tree.leaves(others))


def test_the_newest_undamaged_checkpoint_is_loaded(source, data, tmp_path, capsys):
    run = copy(source, tmp_path / "run")
    (run / "checkpoints" / "6" / "config" / checkpoint.RECORD).unlink()
    config = begin(config_with(data, tmp_path, "--run.init_from", str(run)))[0]
    assert config.run.init_from_step == 3
    assert f"warning: the checkpoint of step 6 in {run}" in capsys.readouterr().out
    (run / "checkpoints" / "3" / "config" / checkpoint.RECORD).unlink()
    with pytest.raises(ValueError, match=r"is damaged \(steps \[3, 6\]\)"):
        start(data, tmp_path, "refused", "--run.init_from", str(run))
    assert not (tmp_path / "refused").exists()


def test_a_step_may_be_named(source, data, tmp_path):
    flags = ["--run.init_from", str(source), "--run.init_from_step"]
    assert begin(config_with(data, tmp_path, *flags, "3"))[0].run.init_from_step == 3
    with pytest.raises(ValueError, match=r"no checkpoint of step 4 .* has steps \[3, 6\]"):
        begin(config_with(data, tmp_path, *flags, "4"))


# [model]


def test_without_a_config_the_model_section_is_that_of_the_other_run(source, tmp_path):
    theirs = cli.load(source / "config.toml").model
    for spelled in (["--run.init_from", str(source)], [f"--run.init_from={source}"]):
        config = main.parse([*spelled, "--run.dir", str(tmp_path), "--model.dropout", "0.1"])
        assert config.model == dataclasses.replace(theirs, dropout=0.1)
        assert (config.run.init_from, config.train) == (str(source), utils.Train())
    file = tmp_path / "own.toml"
    file.write_text("[model]\nhidden_size = 96\n")
    config = main.parse(
        ["--run.init_from", str(source), "--run.dir", str(tmp_path), "--config", str(file)]
    )
    assert config.model == utils.Model(hidden_size=96)
    flags = ["--run.init_from", str(source), "--run.dir", str(tmp_path)]
    assert main.parse([*flags, "--config", str(ROOT / "configs/tune.toml")]).model == theirs
    assert main.parse(["--run.dir", str(tmp_path)]).model == utils.Model()


def test_a_resumed_run_keeps_its_model_when_the_other_run_is_gone(started, source, runs):
    folder = started[0]
    flags = ["--run.dir", str(runs), "--run.name", folder.name, "--run.init_from"]
    for init in (str(source), "gone"):
        assert main.parse([*flags, init]).model == cli.load(folder / "config.toml").model


def test_help_describes_init_from(capsys):
    with pytest.raises(SystemExit):
        main.parse(["--help"])
    printed = capsys.readouterr().out
    assert "--run.init_from FOLDER" in printed


def test_settings_that_weights_do_not_depend_on_may_differ():
    free = {
        "capacity_factor": 3.0,
        "eval_capacity_factor": 3.0,
        "experts_layout": "sharded",
        "aux_loss_alpha": 0.5,
        "router_bias_update_speed": 0.5,
        "z_loss": 0.5,
        "dropout": 0.5,
        "compute_dtype": "float32",
        "attention_kernel": "xla",
    }
    other = dataclasses.replace(utils.Model(), **free)
    resume.check_same_model(Path("a"), utils.Model(), other)
    for name in utils.fields_of(utils.Model).keys() - free.keys():
        with pytest.raises(ValueError, match=f"another model: model.{name} .* there and None here"):
            resume.check_same_model(Path("a"), other, utils.changed(other, {name: None}))


# What is refused


def test_another_model_is_refused_by_its_first_ten_fields(source, data, runs):
    with pytest.raises(
        ValueError, match=r"another model: model.hidden_size 32 there and 64 here. Leave"
    ):
        start(data, runs, "new", "--run.init_from", str(source), "--model.hidden_size", "64")
    names = [field.name for field in dataclasses.fields(utils.Model)][:12]
    other = dataclasses.replace(utils.Model(), **dict.fromkeys(names))
    with pytest.raises(ValueError) as refused:
        resume.check_same_model(source, utils.Model(), other)
    assert str(refused.value).count("there and None here") == 10
    assert " and 2 more. " in str(refused.value)
    assert not (runs / "new").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "config.json",
            r"It is a model of Hugging Face. Import it first: python convert.py import",
        ),
        ("adapter_config.json", r"It is an adapter. Merge it into its base model"),
    ],
)
def test_weights_of_hugging_face_are_refused_with_the_command_that_imports_them(
    name, message, tmp_path
):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"--run.init_from .* has no config.toml. {message}"):
        resume.config_file(run_directory.at(str(tmp_path)), "--run.init_from")


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("absent", r"--run.init_from .*absent does not exist. Give the folder of a run, as --run"),
        (".", r"--run.init_from .* has no config.toml. Give the folder"),
        ("no_checkpoints", r"no such folder. .*--checkpoint.every_steps above 0"),
        ("no_steps", r"no_steps has no checkpoint yet. .*or give another"),
        ("new", r"--run.init_from .*new is this run's own folder, .*Use another --run.name"),
    ],
)
def test_a_folder_without_usable_weights_is_refused(source, data, tmp_path, init, message):
    for name in ("no_checkpoints", "no_steps", "new"):
        (tmp_path / name).mkdir()
        shutil.copy(source / "config.toml", tmp_path / name)
    (tmp_path / "no_steps" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=message) as refused:
        start(data, tmp_path, "new", "--run.init_from", str(tmp_path / init))
    assert "\n" not in str(refused.value)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["config.toml"]


def test_data_of_another_tokenizer_is_refused(source, data, tmp_path):
    flags = []
    for flag, folder in zip(data[::2], data[1::2], strict=True):
        here = Path(shutil.copytree(folder, tmp_path / Path(folder).name))
        index = here / manifest.INDEX
        other = {"tokenizer": "other", "tokenizer_sha256": "00"}
        index.write_text(json.dumps(json.loads(index.read_text()) | other))
        flags += [flag, str(here)]
    message = r"with the tokenizer sample .*with other \(00\).*prepare.py --tokenizer sample"
    with pytest.raises(ValueError, match=message):
        start(flags, tmp_path, "new", "--run.init_from", str(source))
    assert not (tmp_path / "new").exists()


# --- settings of a run that resumes ---------------------------------------------------------------


def changed_section(section, **fields):
    return {section: CONFIG[section] | fields}


def changed(section, **fields):
    return CONFIG | changed_section(section, **fields)


def test_settings_that_do_not_change_the_result_may_change():
    now = changed("mesh", fsdp=8, pipeline=1, tensor=1, virtual=2)
    now |= changed_section("train", steps=9, microbatches=8, remat="full", loss_chunk_tokens=64)
    now |= changed_section("model", eval_capacity_factor=4.0, experts_layout="sharded")
    now |= changed_section("data", val="elsewhere") | changed_section("run", name="x", dir="y")
    now |= changed_section("eval", every_steps=1) | changed_section("checkpoint", keep=9)
    resume.check_compatible(CONFIG, now, *NEWEST)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "hidden_size", 512),
        ("model", "capacity_factor", 1.0),
        ("data", "seed", 1),
        ("data", "order", "blocks"),
        ("data", "segments", True),
        ("train", "global_batch_size", 16),
        ("train", "seq_len", 128),
        ("train", "seed", 1),
        ("optimizer", "lr", 0.5),
        ("optimizer", "schedule_steps", 7),
    ],
)
def test_settings_that_change_the_result_are_refused_by_name(section, field, value):
    old = CONFIG[section][field]
    with pytest.raises(ValueError) as refusal:
        resume.check_compatible(CONFIG, changed(section, **{field: value}), *NEWEST)
    assert f"with these: {section}.{field} {old!r} -> {value!r}. Use" in str(refusal.value)


def test_shards_may_move_but_not_change():
    old = CONFIG | {"tokens": {"train": "aa"}}
    moved = changed("data", train="gs://bucket/elsewhere") | {"tokens": old["tokens"]}
    resume.check_compatible(old, moved, *NEWEST)
    with pytest.raises(ValueError, match=r"tokens.train 'aa' -> 'bb'"):
        resume.check_compatible(old, moved | {"tokens": {"train": "bb"}}, *NEWEST)


def test_every_field_that_differs_is_named():
    now = changed("model", hidden_size=512) | changed_section("data", seed=3)
    with pytest.raises(ValueError, match=r"data.seed 0 -> 3, model.hidden_size .* Use"):
        resume.check_compatible(CONFIG, now, *NEWEST)


def test_another_rounding_is_a_warning(capsys):
    resume.check_compatible(changed("model", compute_dtype="float32"), CONFIG, *NEWEST)
    warning = "warning: the run resumes with another model.compute_dtype 'float32'"
    assert warning in capsys.readouterr().out


# --- another decay --------------------------------------------------------------------------------

WSD = "--optimizer.schedule wsd --optimizer.warmup_steps 1 --optimizer.min_lr_ratio 0"
EVERY_2 = f"{WSD} --optimizer.decay_share 0.5 --checkpoint.every_steps 2 --checkpoint.keep 9"


def of_steps(steps):
    """Flags of a wsd run, whose second half decays."""
    flags = f"{EVERY_2} --eval.sequences 0 --train.steps {steps} --optimizer.schedule_steps {steps}"
    return [*flags.split(), "--sample.prompts"]


@pytest.fixture(scope="module")
def decayed(data, runs):
    """A wsd run of 6 steps, of which the last 3 decay."""
    return start(data, runs, "decayed", *of_steps(6))


def test_a_wsd_run_is_extended_from_before_its_decay_with_the_bits_of_a_longer_run(
    decayed, data, runs, tmp_path, monkeypatch
):
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", "decayed", *of_steps(6)]
    named = f"--run.init_from {decayed} --run.init_from_step 2 --run.init_optimizer True"
    for more in (["--train.steps", "10"], of_steps(10)):
        with pytest.raises(ConfigError, match=f"checkpoint of step 2 is before .* {named}"):
            resume.resolve(main.parse([*flags, *more]))
    whole = start(data, tmp_path, "whole", *of_steps(10))
    options = [*of_steps(10), *named.split()]

    def fail(self, step, *arguments, **named):
        raise ConfigError(f"step {step} is not saved")

    with monkeypatch.context() as patch:  # as killed before the first save
        patch.setattr(checkpoint.Checkpoints, "save", fail)
        with pytest.raises(ConfigError, match="step 4 is not saved"):
            start(data, tmp_path, "longer", *options)
    assert len(losses(tmp_path / "longer")) == 2
    longer = start(data, tmp_path, "longer", *options)
    assert losses(longer) == losses(whole)[2:]
    assert cli.load(longer / "config.toml").optimizer.schedule_steps == 10
    for one, other in zip(arrays(longer, 10), arrays(whole, 10), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_is_extended_in_its_own_folder_before_its_decay(decayed, data, tmp_path):
    (tmp_path / "own").mkdir()
    copy(decayed, tmp_path / "own" / "decayed")
    for step in ("4", "6"):
        shutil.rmtree(tmp_path / "own" / "decayed" / "checkpoints" / step)
    folder = ["--run.dir", str(tmp_path / "own"), "--run.name", "decayed"]
    config = main.parse([*FLAGS, *data, *folder, *of_steps(10)])
    assert resume.resolve(config).optimizer.schedule_steps == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run.init_from_step 4", "optimizer.schedule_steps 6 -> 10. Use the old values"),
        ("--run.init_from_step 2 --optimizer.lr 0.1", r"optimizer.lr 0.001 -> 0.1"),
        ("--run.init_from_step 2 --optimizer.warmup_steps 2", "optimizer.schedule_steps 6 -> 10"),
        ("--run.init_from_step 3", r"no checkpoint of step 3 in .*: it has steps \[2, 4, 6\]"),
        ("--run.init_from_step 0", "continues a checkpoint of another run: name both"),
        ("--run.init_from_step 2 --data.seed 7", "data.seed 0 -> 7"),
    ],
)
def test_only_the_decay_may_change_and_only_before_it(flags, message, decayed, data, tmp_path):
    named = f"--run.init_from {decayed} --run.init_optimizer True {flags}"
    with pytest.raises(ConfigError, match=message):
        start(data, tmp_path, "refused", *of_steps(10), *named.split())
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
