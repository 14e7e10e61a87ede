"""Runs that start from another run's weights (--run.init_from), and settings of resumed ones."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import checkpoint
import dataset
import fit
import main
import model
import train
import utils
from common import canonical
from conftest import ROOT
from data import manifest
from runtime import cli, jsonl, resume, run_directory
from runtime.run_directory import COMMIT
from saved_state import CONFIG
from tiny_run import FLAGS, arrays, losses, start
from utils import ConfigError

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
    """Two steps from the last weights of `whole`."""
    return start(data, runs, "started", "--run.init_from", str(source), *SHORT.split())


def evaluations(folder):
    return [r for r in jsonl.read(folder / "metrics.jsonl") if "loss/val" in r]


def test_a_run_starts_with_the_final_loss_of_the_other_and_records_where_it_is_from(
    started, whole, source, data, runs, capsys
):
    first, last = evaluations(started)
    assert first == evaluations(whole)[-1] | {"step": 0}
    assert (last["step"], len(losses(started))) == (2, 2)
    mine, other = (
        [r["lr"] for r in jsonl.read(run / "metrics.jsonl") if "lr" in r][:2]
        for run in (started, whole)
    )
    assert mine == other  # a new schedule
    kept = started / run_directory.HF / "config.json"  # of an imported base, for its export
    assert kept.read_text() == '{"bos_token_id": 7}'
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", "started"]
    warning = "warning: --run.init_from elsewhere is not read"
    for more in ([], ["--run.init_from", "elsewhere"]):
        run = resume.resolve(main.parse([*flags, *more])).run
        assert (run.init_from, run.init_from_step) == (str(source), 6)
        assert (warning in capsys.readouterr().out) == bool(more)


def test_a_run_resumes_with_the_same_bits_without_the_other_run(started, source, data, tmp_path):
    stopped = Path(shutil.copytree(started, tmp_path / "started"))
    shutil.rmtree(stopped / "checkpoints" / "2")  # as killed before its end
    away = source.rename(tmp_path / "away")
    try:
        resumed = start(data, tmp_path, "started", "--run.init_from", str(source), *SHORT.split())
    finally:
        away.rename(source)
    assert losses(resumed) == losses(started)
    assert evaluations(resumed) == evaluations(started)
    for one, other in zip(arrays(resumed, 2), arrays(started, 2), strict=True):
        np.testing.assert_array_equal(one, other)
    assert cli.load(resumed / "config.toml").run.init_from_step == 6


def begin(data, runs, *flags):
    """(config that names the step, state) that a run begins with."""
    config = main.parse([*FLAGS, *data, "--run.dir", str(runs), "--run.name", "new", *flags])
    config, *_ = fit.for_devices(config, jax.devices())
    declared, mesh = model.declare(config), train.make_mesh(config)
    data = dataset.open_datasets(config)
    shapes = train.abstract_state(config, declared, mesh)
    config, w, _ = main.load_initial(config, shapes, {}, data[0])
    return config, train.initial_state(config, declared, mesh, w)


def test_another_mesh_starts_with_the_same_weights_and_a_new_optimizer_state(
    source, data, tmp_path
):
    flags = ["--run.init_from", str(source), *OTHER_MESH.split(), "--train.microbatches", "2"]
    config, state = begin(data, tmp_path, *flags)
    there = cli.load(source / "config.toml")
    shapes = train.abstract_state(there, model.declare(there), train.make_mesh(there)).weights
    expected = canonical(there, checkpoint.load_weights(run_directory.at(source), 6, shapes)[1])
    jax.tree.map(np.testing.assert_array_equal, canonical(config, state.weights), expected)
    others = dataclasses.replace(state, weights=None)
    assert not any(np.any(np.asarray(a)) for a in jax.tree.leaves(others))


def test_the_named_step_or_the_newest_undamaged_one_is_loaded(source, data, tmp_path, capsys):
    run = copy(source, tmp_path / "run")
    flags = ["--run.init_from", str(run)]
    step = [*flags, "--run.init_from_step"]
    assert begin(data, tmp_path, *step, "3")[0].run.init_from_step == 3
    with pytest.raises(ValueError, match=r"no checkpoint of step 4 .* has steps \[3, 6\]"):
        begin(data, tmp_path, *step, "4")
    (run / "checkpoints" / "6" / "config" / checkpoint.RECORD).unlink()
    assert begin(data, tmp_path, *flags)[0].run.init_from_step == 3
    assert f"warning: the checkpoint of step 6 in {run}" in capsys.readouterr().out


# --- [model] of the other run ---------------------------------------------------------------------


def test_without_a_config_the_model_section_is_that_of_the_other_run(
    started, source, runs, tmp_path
):
    theirs = cli.load(source / "config.toml").model
    here = ["--run.dir", str(tmp_path)]
    flags = [f"--run.init_from={source}", *here]
    config = main.parse([*flags, "--model.dropout", "0.1"])
    assert config.model == dataclasses.replace(theirs, dropout=0.1)
    assert (config.run.init_from, config.optimizer) == (str(source), utils.Optimizer())
    file = tmp_path / "own.toml"
    file.write_text("[model]\nhidden_size = 96\n")
    assert main.parse([*flags, "--config", str(file)]).model == utils.Model(hidden_size=96)
    assert main.parse([*flags, "--config", str(ROOT / "configs/tune.toml")]).model == theirs
    assert main.parse([*flags, "--depth", "3"]).model == theirs
    assert main.parse(here).model == utils.Model()
    # A run that resumes keeps its model also when the other run is gone.
    flags = ["--run.dir", str(runs), "--run.name", started.name, "--run.init_from", "gone"]
    assert main.parse(flags).model == cli.load(started / "config.toml").model


def test_settings_that_weights_do_not_depend_on_may_differ_and_all_others_are_named():
    names = ["capacity_factor", "eval_capacity_factor", "aux_loss_alpha", "z_loss", "dropout"]
    free = dict.fromkeys([*names, "router_bias_update_speed"], 0.5)
    free |= {"experts_layout": "sharded", "compute_dtype": "float32"}
    free |= {"attention_kernel": "xla", "experts_kernel": "tiles", "matmul_dtype": "float8"}
    other = dataclasses.replace(utils.Model(), **free)
    other = utils.changed(other, {"rope_scaling.factor": 4.0})
    resume.check_same_model(Path("a"), utils.Model(), other, longer=True)
    with pytest.raises(ValueError, match=r"rope_scaling.factor 1.0 there and 4.0 here"):
        resume.check_same_model(Path("a"), utils.Model(), other)
    free |= {
        name: 2.0 for name in utils.settings_of(utils.Model) if name.startswith("rope_scaling")
    }
    for name in utils.settings_of(utils.Model).keys() - free.keys():
        with pytest.raises(ValueError, match=f"another model: model.{name} .* there and None here"):
            resume.check_same_model(
                Path("a"), other, utils.changed(other, {name: None}), longer=True
            )


# --- what is refused ------------------------------------------------------------------------------


def test_a_folder_without_usable_weights_is_refused(source, data, tmp_path):
    for name in ("no_checkpoints", "no_steps", "new", "hf", "adapter"):
        (tmp_path / name).mkdir()
    for name in ("no_checkpoints", "no_steps", "new"):
        shutil.copy(source / "config.toml", tmp_path / name)
    (tmp_path / "no_steps" / "checkpoints").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for init, message in (
        ("absent", r"--run.init_from .*absent does not exist. Give the folder of a run, as --run"),
        (".", r"--run.init_from .* has no config.toml. Give the folder"),
        ("hf", r"It is of Hugging Face. Import it first: python convert.py import"),
        ("adapter", r"Import it first"),
        ("no_checkpoints", r"no such folder. .*--checkpoint.every_steps above 0"),
        ("no_steps", r"no_steps has no checkpoint yet. .*or give another"),
        ("new", r"--run.init_from .*new is this run's own folder, .*Use another --run.name"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(data, tmp_path, "new", "--run.init_from", str(tmp_path / init))
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["config.toml"]


def test_another_model_or_data_of_another_tokenizer_is_refused(source, data, tmp_path):
    init = "--run.init_from", str(source)
    with pytest.raises(ValueError, match=r"model: model.hidden_size 32 there and 64 here. Leave"):
        start(data, tmp_path, "new", *init, "--model.hidden_size", "64")
    flags = []
    for flag, folder in zip(data[::2], data[1::2], strict=True):
        here = Path(shutil.copytree(folder, tmp_path / Path(folder).name))
        index = here / manifest.INDEX
        other = {"tokenizer": "other", "tokenizer_sha256": "00"}
        index.write_text(json.dumps(json.loads(index.read_text()) | other))
        flags += [flag, str(here)]
    message = r"with the tokenizer sample .*with other \(00\).*prepare.py --tokenizer sample"
    with pytest.raises(ValueError, match=message):
        start(flags, tmp_path, "new", *init)
    assert not (tmp_path / "new").exists()


def test_a_run_that_would_remove_records_without_a_checkpoint_is_refused(tmp_path):
    def saving(every):
        here = {"run.dir": str(tmp_path), "run.name": "x", "train.steps": 6}
        return utils.changed(utils.Config(), here | {"checkpoint.every_steps": every})

    for before, now, folder, steps, refused in (
        (2, 2, False, 3, True),  # its checkpoints are not here
        (2, 2, True, 3, False),  # killed while its first one was written
        (2, 2, True, 4, True),  # its checkpoints were removed
        (2, 2, False, 1, False),  # killed before its first one was due
        (20, 20, False, 6, True),  # due after the last of 6 steps
        (2, 0, False, 1, True),  # saves none
        (2, 0, False, 0, False),  # an evaluation before the first step
        (None, 2, False, 2, True),  # without config.toml
    ):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        run = run_directory.of(saving(now))
        run.files.mkdir()
        if before is not None:
            (run.files / "config.toml").write_text(cli.to_toml(saving(before)))
        (run.files / "metrics.jsonl").write_text(f'{{"step": 0}}\n{{"step": {steps}}}\n')
        if folder:
            run.checkpoints.mkdir()
        refusal = pytest.raises(ConfigError, match=rf"of {steps} steps and no checkpoint")
        with refusal if refused else contextlib.nullcontext():
            resume.resolve(saving(now))


# --- settings of a run that resumes ---------------------------------------------------------------


def changed(section, **fields):
    return CONFIG | {section: CONFIG[section] | fields}


def test_settings_that_do_not_change_the_result_may_change_and_rounding_is_a_warning(capsys):
    for section, fields in {
        "mesh": {"fsdp": 8, "pipeline": 1, "tensor": 1, "virtual": 2},
        "train": {"steps": 9, "microbatches": 8, "remat": "full", "loss_chunk_tokens": 64},
        "model": {"eval_capacity_factor": 4.0, "experts_layout": "sharded"},
        "data": {"train": "gs://bucket/elsewhere", "val": "elsewhere"},
    }.items():
        old, now = (c | {"tokens": {"train": "aa"}} for c in (CONFIG, changed(section, **fields)))
        resume.check_compatible(old, now, *NEWEST)
    older = {section: dict(fields) for section, fields in CONFIG.items()}
    del older["optimizer"]["muon_beta"]  # a run from before that setting
    resume.check_compatible(older, CONFIG, *NEWEST)
    assert capsys.readouterr().out == ""
    resume.check_compatible(changed("model", compute_dtype="float32"), CONFIG, *NEWEST)
    warning = "warning: the run resumes with another model.compute_dtype 'float32'"
    assert warning in capsys.readouterr().out


def test_settings_that_change_the_result_are_refused_by_name():
    for section, field, value in (
        ("model", "capacity_factor", 1.0),
        ("data", "order", "blocks"),
        ("train", "seed", 1),
        ("optimizer", "lr", 0.5),
    ):
        expected = f"{section}.{field} {CONFIG[section][field]!r} -> {value!r}"
        now = changed(section, **{field: value}) | {"tokens": {"train": "bb"}}
        with pytest.raises(ConfigError, match=expected) as refusal:
            resume.check_compatible(CONFIG | {"tokens": {"train": "aa"}}, now, *NEWEST)
        assert "tokens.train 'aa' -> 'bb'" in str(refusal.value)


# --- another decay --------------------------------------------------------------------------------


def wsd(**fields):
    """A config whose second half of 6 steps decays."""
    own = {"schedule": "wsd", "warmup_steps": 1, "min_lr_ratio": 0.0, "schedule_steps": 6}
    return changed("optimizer", **own | {"decay_share": 0.5} | fields)


def test_only_the_decay_may_change_and_only_before_it(tmp_path):
    for step in (2, 4, 6):
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / str(step) / COMMIT).touch()
    run = run_directory.at(tmp_path / "run")
    longer = {"schedule_steps": 10}
    resume.check_compatible(wsd(), wsd(**longer), run, 2)
    fix = f"step 2 is before .* --run.init_from {run} --run.init_from_step 2 --run.init_optimizer"
    for now, step, message in (
        (longer, 4, f"optimizer.schedule_steps 6 -> 10. Use the old values.*{fix}"),
        (longer | {"warmup_steps": 2}, 2, "optimizer.schedule_steps 6 -> 10"),
        (longer | {"lr": 0.1}, 2, "optimizer.lr .* -> 0.1, optimizer.schedule_steps 6 -> 10"),
    ):
        with pytest.raises(ConfigError, match=message):
            resume.check_compatible(wsd(), wsd(**now), run, step)
    here = {"run.dir": str(tmp_path), "run.name": "run", "train.steps": 10}
    settings = here | {"optimizer": utils.Optimizer(**wsd()["optimizer"])}
    config = utils.changed(utils.Config(), settings)
    with pytest.raises(ConfigError, match=f"rate is 0 after 6 .*another --run.name.*{fix}"):
        resume.with_schedule(config, 10)
    config = utils.changed(utils.Config(), {"run.dir": str(tmp_path), "run.init_optimizer": True})
    with pytest.raises(ConfigError, match="continues a checkpoint of another run: name both"):
        resume.resolve(config)
