"""Whole runs: what they leave, how they continue, and what stops them before they start."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import re
import shutil
import signal
import socket
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import checkpoint
import faulty_run
import main
import metrics
import model
import optimizer
import sharded_model
import train
import utils
from common import config_of, mesh_of
from conftest import ROOT
from dataset import Mixture, open_training
from inference import sampling
from planning import cost
from processes import environments, run_all
from runtime import cli, distributed, errors, jsonl, resume, run_directory
from runtime.errors import Exit, Stopped
from tiny_run import FLAGS, Killed, arrays, losses, start


@pytest.fixture(scope="module")
def stopped_and_resumed(data, runs):
    """A run killed two steps after its checkpoint, and continued."""

    def kill(loop, step, report):
        if step == 5:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(main.Loop, "_stop_if_diverged", kill)
        start(data, runs, "resumed")
    return start(data, runs, "resumed")


def test_a_run_leaves_its_config_metrics_samples_checkpoints_and_plots(whole):
    records = jsonl.read(whole / "metrics.jsonl")
    steps = [r for r in records if "loss/train" in r]
    evaluations = [r for r in records if "loss/val" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in evaluations] == [0, 3, 6]
    assert all(set(r) == set(metrics.TRAIN) for r in steps)
    [start] = [json.loads(line) for line in (whole / "starts.jsonl").read_text().splitlines()]
    with contextlib.closing(checkpoint.Checkpoints(whole / "checkpoints")) as saved:
        made_by = [saved.record(step)["made_by"] for step in (3, 6)]
        assert made_by == [start, start] and start["step"] == 0
    assert np.array(evaluations[0]["moe/tokens_per_expert"]).sum(1).tolist() == [16 * 32 * 2] * 4
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    recorded = [(s["step"], s["prompt"]) for s in samples]
    assert recorded == [(step, prompt) for step in (2, 4, 6) for prompt in ("def", "import")]
    assert {p.name for p in (whole / "plots").iterdir()} == {
        "validation_loss.png", "load_loss.png", "tokens_per_expert.png", "wall_time.png"
    }  # fmt: skip
    assert {p.name for p in (whole / "checkpoints").iterdir()} >= {"3", "6"}
    assert cli.load(whole / "config.toml").model.hidden_size == 32


def test_losses_add_up_to_what_is_trained_on(whole):
    for r in jsonl.read(whole / "metrics.jsonl"):
        if "loss/train" in r:
            parts = r["loss/cross_entropy"] + r["loss/balance"] + r["loss/z"]
            assert r["loss/train"] == pytest.approx(parts, rel=1e-6)


def test_a_run_stopped_and_resumed_ends_with_the_bits_of_one_that_was_not(
    whole, stopped_and_resumed
):
    both = [jsonl.read(folder / "metrics.jsonl") for folder in (stopped_and_resumed, whole)]
    for one, other in zip(*both, strict=True):
        same = one.keys() - metrics.MEASURED
        assert {k: one[k] for k in same} == {k: other[k] for k in other.keys() - metrics.MEASURED}
    starts = (stopped_and_resumed / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 3]
    samples = [(folder / "samples.jsonl").read_bytes() for folder in (stopped_and_resumed, whole)]
    assert samples[0] == samples[1]
    for resumed, expected in zip(arrays(stopped_and_resumed, 6), arrays(whole, 6), strict=True):
        np.testing.assert_array_equal(resumed, expected)


@pytest.mark.long
def test_a_stopped_run_saves_at_once_and_catches_up_when_it_resumes(whole, data, runs, monkeypatch):
    """After step 3 an evaluation is due, after step 4 samples; neither is waited for."""
    for last in (3, 4):
        with monkeypatch.context() as patch, pytest.raises(Stopped) as stopped:

            def ask(loop, step, report, last=last):
                if step == last:
                    loop.stop.request("SIGTERM")

            patch.setattr(main.Loop, "_stop_if_diverged", ask)
            start(data, runs, "stopped")
        assert stopped.value.code == 143
        assert (runs / "stopped" / "checkpoints" / str(last)).is_dir()
        records = jsonl.read(runs / "stopped" / "metrics.jsonl")
        assert records[-1]["step"] == last and "loss/train" in records[-1]
    resumed = start(data, runs, "stopped")
    assert recorded(resumed) == recorded(whole)
    for found, expected in zip(arrays(resumed, 6), arrays(whole, 6), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "flags", "message"),
    [
        ("_stop_if_diverged", "--checkpoint.every_steps 0", "Nothing is saved, as --checkpoint"),
        ("_evaluate_and_sample", "", "No step is saved yet. Start the run again"),
    ],
)
def test_a_stopped_run_without_a_checkpoint_says_so(at, flags, message, data, runs, monkeypatch):
    def ask(loop, *_):
        loop.stop.request("SIGTERM")

    monkeypatch.setattr(main.Loop, at, ask)
    with pytest.raises(Stopped, match=message) as stopped:
        start(data, runs, f"unsaved{at}", *flags.split())
    assert stopped.value.code == 143


@pytest.mark.long
def test_a_request_during_a_step_waits_for_this_step_alone(data, runs, monkeypatch):
    """The next one is not begun before: it would have to end, too."""
    wait = main.Loop._wait

    def ask(loop):
        if loop.running and loop.running[0] == 5:
            loop.stop.request("SIGTERM")
        wait(loop)

    monkeypatch.setattr(main.Loop, "_wait", ask)
    with pytest.raises(Stopped):
        start(data, runs, "asked")
    assert jsonl.read(runs / "asked" / "metrics.jsonl")[-1]["step"] == 5
    assert (runs / "asked" / "checkpoints" / "5").is_dir()


def recorded(folder):
    """Records and samples, without what was measured."""
    records = jsonl.read(folder / "metrics.jsonl")
    kept = [{k: v for k, v in r.items() if k not in metrics.MEASURED} for r in records]
    return kept, (folder / "samples.jsonl").read_bytes()


@pytest.mark.long
def test_a_run_continues_on_another_mesh_with_the_same_data(data, runs, whole):
    start(data, runs, "moved", "--train.steps", "3")
    mesh = "--mesh.fsdp 4 --mesh.pipeline 2 --mesh.tensor 1 --mesh.virtual 2 --train.microbatches 2"
    moved = start(data, runs, "moved", *mesh.split())
    np.testing.assert_allclose(losses(moved), losses(whole), rtol=1e-4)


def test_a_finished_run_started_again_prints_its_result_and_trains_nothing(
    whole, data, runs, monkeypatch, capsys
):
    before = (whole / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(main, "Loop", None)
    start(data, runs, "whole")
    printed = capsys.readouterr().out
    assert "6 steps, validation loss" in printed and f"generate.py --run {whole}" in printed
    assert re.search(
        r": \d\.\d\d bits per byte of text. Guesses need \d.* \(by frequency\)", printed
    )
    assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_finished_run_without_plots_draws_the_missing_ones(whole, data, runs, monkeypatch):
    monkeypatch.setattr(main, "Loop", None)
    files = sorted((whole / "plots").iterdir())
    files[1].unlink()
    kept = files[0].stat().st_mtime_ns
    start(data, runs, "whole")
    assert sorted((whole / "plots").iterdir()) == files
    assert files[0].stat().st_mtime_ns == kept, "a picture that is there is not drawn again"
    shutil.rmtree(whole / "plots")
    start(data, runs, "whole")
    assert sorted((whole / "plots").iterdir()) == files


def test_more_steps_keep_the_schedule_of_the_first_start(whole, data, runs):
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", "whole"]
    config = cli.parse([*flags, "--train.steps", "9", "--optimizer.schedule_steps", "0"])
    assert resume.resolve(config).optimizer.schedule_steps == 6


@pytest.mark.parametrize("name", ["whole", "a"])
def test_steps_after_a_schedule_that_ends_at_0_are_refused(whole, data, runs, name):
    schedule = ["--optimizer.min_lr_ratio", "0", "--optimizer.schedule_steps", "6"]
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", name, *schedule, "--train.steps"]
    message = r"steps 9, and the learning rate is 0 after 6 .*Use --train.steps 6.*--run.init_from "
    with pytest.raises(ValueError, match=rf"{message}.*/{name} "):
        resume.with_schedule(cli.parse([*flags, "9"]), 6)
    config = cli.parse([*flags, "6"])
    assert optimizer.learning_rate(optimizer.schedule(config), np.int32(5)) == 0
    assert resume.with_schedule(config, 6).train.steps == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run.name none --run.resume must", "has no checkpoint to resume from"),
        ("--run.name whole --run.resume never", "has checkpoints, which a new run would overwrite"),
        ("--run.name whole --model.v_head_dim 8 --data.seed 1", "seed 0 -> 1, model.v_head_dim 16"),
        ("--run.name a --model.num_attention_heads 3", "Use --model.num_attention_heads 4"),
        ("--run.name whole --checkpoint.every_steps 0", "a run without saves cannot resume from"),
        ("--run.name a --model.num_hidden_layers 6", "Use --model.num_hidden_layers 8"),
        ("--run.name a --mesh.virtual 2 --train.microbatches 1", "Use --train.microbatches 2"),
        ("--run.name a --mesh.fsdp 8", "is 32 devices, and there are 8"),
        ("--run.name a --data.train absent", "absent"),
        (
            "--run.name a --model.vocab_size 512",
            "512 covers only ids below 512. Use --model.vocab_size 4096",
        ),
        ("--run.name a --train.seq_len 1000000", "1000000 is longer than the data"),
        ("--run.name a --model.attention_kernel splash", "Use --train.seq_len 128, or"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_in_one_line_with_the_fix(whole, data, runs, flags, message):
    extra = flags.split()
    if "--mesh.fsdp" in extra:
        extra += [
            "--train.global_batch_size",
            "32",
            "--eval.sequences",
            "32",
            "--model.hidden_size",
            "64",
        ]
    with pytest.raises(ValueError, match=message) as refused:
        start(data, runs, "a", *extra)
    assert "\n" not in str(refused.value)
    assert not (runs / "a").exists()


@pytest.mark.long
def test_a_run_logs_its_plan_first_and_measurements_last(data, runs, capsys):
    folder = start(data, runs, "recorded", "--train.steps", "3", "--eval.every_steps", "0")
    lines = capsys.readouterr().out.splitlines()
    plan = cost.predict(cli.load(folder / "config.toml"), None).line()
    recorded = [i for i, line in enumerate(lines) if line == plan]
    first = next(i for i, line in enumerate(lines) if line.startswith("step 1/3"))
    assert recorded[0] < first < recorded[1] and lines[recorded[1] + 1].startswith("measured: ")
    found = re.fullmatch(
        r"measured: (\S+) GiB per device \(planned by the compiler\); (\S+) s per step \(median\)",
        lines[recorded[1] + 1],
    )
    seconds = [r["step_s"] for r in jsonl.read(folder / "metrics.jsonl") if "step_s" in r]
    assert float(found[2]) == pytest.approx(np.median(seconds[1:]), rel=0.01)
    predicted = float(re.match(r"plan: (\S+) GiB", plan)[1])
    assert float(found[1]) == pytest.approx(predicted, rel=0.25)


@pytest.mark.long
def test_a_run_stops_after_so_many_steps_in_a_row_that_are_not_finite(data, runs, capsys):
    flags = "--optimizer.lr 1e38 --optimizer.warmup_steps 0 --train.max_skipped_in_row 2"
    with pytest.raises(ValueError, match="2 steps in a row had a loss or gradient norm"):
        start(data, runs, "lost", *flags.split())
    assert "warning: --optimizer.lr 1e+38 is far from what was tuned" in capsys.readouterr().out
    records = jsonl.read(runs / "lost" / "metrics.jsonl")
    last = records[-1]
    assert last["skipped"] >= 2 and None in (last["loss/train"], last["grad_norm"])


@pytest.mark.slow
def test_a_run_whose_save_fails_ends_with_the_reason_and_resumes(data, runs, capsys):
    flags = "--train.steps 5 --checkpoint.every_steps 2 --eval.every_steps 0 --sample.prompts"
    rename = os.rename

    def full(source, to, *how, **where):
        if str(to).endswith("/4"):
            raise OSError(28, "No space left on device")
        return rename(source, to, *how, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", full)
        reason = r"the checkpoints in .*full/checkpoints cannot be used .*No space left on device"
        with pytest.raises(ValueError, match=reason):
            start(data, runs, "full", *flags.split())
    folder = start(data, runs, "full", *flags.split())
    assert "continues after step 2" in capsys.readouterr().out
    assert [r["step"] for r in jsonl.read(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 5]
    (folder / "checkpoints").rename(folder / "elsewhere")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"5 steps and no checkpoint"):
        start(data, runs, "full", *flags.split())
    assert (folder / "metrics.jsonl").read_bytes() == before


class TpuAt:
    """The attributes of a TPU device that placement on a mesh reads."""

    platform, device_kind, core_on_chip, slice_index = "tpu", "TPU v4", 0, 0

    def __init__(self, number, coords):
        self.id, self.coords, self.process_index = number, coords, number // 4


@pytest.mark.parametrize("shape", [(16, 2, 2), (2, 16, 2), (32, 1, 2), (64, 1, 1)], ids=str)
def test_an_axis_of_two_fits_on_a_cube_of_64_chips(shape):
    """Each axis of the torus is 4 long, and none of them is the mesh axis's own."""
    places = itertools.product(range(4), repeat=3)
    devices = [TpuAt(i, (x, y, z)) for i, (z, y, x) in enumerate(places)]
    fsdp, pipeline, tensor = shape
    mesh = utils.Mesh(fsdp=fsdp, pipeline=pipeline, tensor=tensor)
    placed = train.make_mesh(utils.Config(mesh=mesh), devices).devices
    assert placed.shape == (1, *shape) and len({d.id for d in placed.flat}) == 64
    if tensor == 2:  # neighbours
        for one, other in placed.reshape(-1, 2):
            assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1


class OnHost:
    """A CPU or GPU device of one of several hosts: XLA numbers the hosts in `slice_index`."""

    device_kind, core_on_chip = "host", 0

    def __init__(self, platform, number):
        self.platform, self.id = platform, number
        self.process_index = self.slice_index = number // 4


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_hosts_of_cpus_and_gpus_are_not_slices(platform):
    devices = [OnHost(platform, number) for number in range(8)]
    for shape in [(2, 2, 2), (1, 2, 4), (8, 1, 1)]:
        axes = dict(zip(("fsdp", "pipeline", "tensor"), shape, strict=True))
        placed = train.make_mesh(utils.Config(mesh=utils.Mesh(**axes)), devices).devices
        assert placed.shape == (1, *shape)
        assert [device.id for device in placed.flat] == list(range(8))


def test_a_slice_of_tpus_is_a_replica():
    devices = [TpuAt(i, (i % 4, i // 4 % 2, 0)) for i in range(16)]
    for device in devices:
        device.slice_index = device.id // 8
    with pytest.raises(ValueError, match=r"--mesh\.replica 1 is not a multiple of the 2 slices"):
        train.make_mesh(utils.Config(mesh=utils.Mesh(fsdp=4)), devices)
    mesh = utils.Mesh(replica=2)
    placed = train.make_mesh(utils.Config(mesh=mesh), devices).devices
    for number, replica in enumerate(placed):
        assert {device.slice_index for device in replica.flat} == {number}


TINY = ["--config", str(ROOT / "configs" / "tiny.toml")]


@pytest.mark.parametrize(
    ("platform", "count", "shape", "virtual"),
    [
        ("cpu", 1, (1, 1, 1), 1),
        ("cpu", 2, (2, 1, 1), 1),
        ("cpu", 3, (2, 1, 1), 1),
        ("cpu", 4, (2, 1, 2), 1),
        ("cpu", 6, (2, 1, 2), 1),
        ("cpu", 8, (2, 2, 2), 2),
        ("gpu", 1, (1, 1, 1), 1),
        ("gpu", 8, (2, 1, 4), 1),
    ],
)
def test_a_mesh_that_is_not_set_is_derived_from_the_devices(platform, count, shape, virtual):
    config = main.parse(TINY)
    assert config.mesh == utils.UNSET_MESH
    made, why = train.for_devices(config, [OnHost(platform, number) for number in range(count)])
    assert made.mesh.shape == (1, *shape) and made.mesh.virtual == virtual
    assert train.mesh_problem(made) is None
    assert str(shape) in why and f"of {count} {platform} devices" in why and "--mesh.fsdp" in why
    assert ("the most that divide" in why) == (count in (3, 6))
    assert made.model.compute_dtype == {"cpu": "float32", "gpu": "bfloat16"}[platform]


def test_a_mesh_that_is_set_is_kept_and_refused_if_it_does_not_fit(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[mesh]\ntensor = 1\n")
    devices = [OnHost("cpu", number) for number in range(3)]
    for words in (["--mesh.tensor=1"], [*TINY, "--mesh.tensor", "1"], [f"--config={file}"]):
        config = main.parse(words)
        assert config.mesh == utils.Mesh(tensor=1)
        made, why = train.for_devices(config, devices)
        assert made.mesh == config.mesh and not why
        more = [OnHost("cpu", number) for number in range(8)]
        assert train.for_devices(config, more)[1].startswith("warning: the mesh has 4 of 8 devices")
        with pytest.raises(ValueError, match="is 4 devices, and there are 3"):
            train.make_mesh(made, devices)


def test_a_mesh_that_does_not_fit_names_the_hosts_and_their_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    devices = [OnHost("gpu", number) for number in range(8)]
    with pytest.raises(ValueError, match=r"is 16 devices, and there are 8 on 2 hosts\. Use"):
        train.make_mesh(utils.Config(mesh=utils.Mesh(fsdp=4)), devices)
    with pytest.raises(ValueError, match=r"is 4 devices, and there are 8 on 2 hosts\. Use"):
        train.make_mesh(utils.Config(mesh=utils.Mesh(fsdp=1)), devices)


def test_on_several_hosts_no_device_stays_idle(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    devices = [OnHost("gpu", number) for number in range(8)]
    assert train.for_devices(main.parse(TINY), devices)[0].mesh.shape == (1, 2, 1, 4)
    with pytest.raises(ValueError, match=r"6 devices of 2 processes.*Use --train\.global_b\w+ 24"):
        train.for_devices(main.parse(TINY), devices[:6])


def test_settings_that_do_not_depend_on_the_mesh_are_checked_by_parse():
    with pytest.raises(ValueError, match=r"--train\.global_batch_size 6 is not divisible"):
        main.parse([*TINY, "--train.global_batch_size", "6"])


def test_a_process_reads_its_own_rows_once():
    config = cli.parse(["--mesh.fsdp", "2"])
    asked = []

    def rows(numbers):
        asked.append(numbers.tolist())
        array = np.repeat(numbers[:, None], 4, axis=1)
        return dict.fromkeys(("tokens", "targets", "loss_weights", "segments"), array)

    batch = train.put_batch(train.make_mesh(config), 2, rows, (8, 4))
    assert sorted(asked) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert np.asarray(batch.tokens)[:, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
@pytest.mark.parametrize(("warmup", "share"), [(40, 0.4), (5, 1.0), (8, 0.2), (9, 0.5), (0, 1.0)])
def test_a_schedule_whose_warmup_and_decay_overlap_reaches_its_minimum(schedule, warmup, share):
    flags = f"--train.steps 10 --optimizer.lr 1 --optimizer.schedule {schedule} "
    flags += f"--optimizer.warmup_steps {warmup} --optimizer.decay_share {share}"
    rate = optimizer.learning_rate(optimizer.schedule(cli.parse(flags.split())), np.arange(10))
    rate = rate.tolist()
    assert rate[-1] == pytest.approx(0.1)
    rise = min(warmup, 9)  # the warmup is not cut but for one step
    assert rate[:rise] == pytest.approx([(step + 1) / rise for step in range(rise)])
    highest = int(np.argmax(rate))
    assert rate[: highest + 1] == sorted(rate[: highest + 1]) and max(rate) > 0.7
    assert rate[highest:] == sorted(rate[highest:], reverse=True)


def test_64_bit_types_are_refused_in_one_line():
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ValueError, match=r"JAX_ENABLE_X64 is set.*Unset it"):
            train.make_mesh(utils.Config())
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(("status", "code"), [("INTERNAL", Exit.BUG), ("UNAVAILABLE", Exit.RETRY)])
def test_a_compiler_that_fails_is_a_bug_and_a_step_that_fails_is_not(status, code):
    class Program:
        def lower(self, *arguments):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError(f"{status}: during something")

    with pytest.raises(RuntimeError) as failed:
        errors.compile_program(Program(), 1)
    assert errors.code_of(failed.value) == code
    assert errors.code_of(jax.errors.JaxRuntimeError(f"{status}: of a step")) == Exit.RETRY


def test_a_planner_that_raises_does_not_end_a_run(monkeypatch):
    def fails(*arguments):
        raise ZeroDivisionError("in the planner")

    monkeypatch.setattr(cost, "predict", fails)
    config = utils.Config()
    planned = main.plan(config, train.make_mesh(config))
    assert planned == "no plan: ZeroDivisionError: in the planner"


def test_all_processes_or_none_sample(monkeypatch, capsys):
    """Another process has no memory for them."""

    @contextlib.contextmanager
    def shared():
        yield
        raise errors.JobFailed("process 1 (h1): they need 2.00 GiB, and 1.00 are free", Exit.CONFIG)

    monkeypatch.setattr(sampling, "Sampler", lambda *arguments: "a sampler")
    assert sampling.make_sampler(utils.Config(), None, None) == "a sampler"
    monkeypatch.setattr(distributed, "shared_errors", shared)
    assert sampling.make_sampler(utils.Config(), None, None) is None
    assert "no samples: process 1 (h1): they need 2.00 GiB" in capsys.readouterr().out


def rates(flags):
    """The learning rates of 20 steps."""
    config = cli.parse(f"--train.steps 20 --optimizer.lr 1 {flags}".split())
    return np.asarray(optimizer.learning_rate(optimizer.schedule(config), np.arange(20)))


def test_the_learning_rate_is_that_of_optax():
    rise, count = optax.linear_schedule(0.0, 1.0, 4), np.arange(1.0, 21.0, dtype=np.float32)
    fall = optax.linear_schedule(1.0, 0.1, 5)
    wsd = optax.join_schedules([rise, optax.constant_schedule(1.0), fall], [4, 15])
    flags = "--optimizer.warmup_steps 4 --optimizer.min_lr_ratio 0.1 --optimizer.decay_share 0.25"
    close = {"rtol": 1e-6, "atol": 1e-7}
    np.testing.assert_allclose(rates(f"{flags} --optimizer.schedule wsd"), wsd(count), **close)
    cosine = optax.join_schedules([rise, optax.cosine_decay_schedule(1.0, 16, 0.1)], [4])
    np.testing.assert_allclose(rates(flags), cosine(count), **close)
    shorter = optax.join_schedules([rise, optax.cosine_decay_schedule(1.0, 6, 0.1)], [4])
    flags += " --optimizer.schedule_steps 10"
    np.testing.assert_allclose(rates(flags), shorter(count), **close)


def test_another_schedule_is_the_same_program(data):
    """So a sweep of learning rates compiles once."""
    flags = [*FLAGS, *data, "--mesh.fsdp", "1", "--mesh.pipeline", "1", "--mesh.tensor", "1"]
    other = (
        "--optimizer.lr 3e-4 --optimizer.schedule wsd --optimizer.warmup_steps 2 --train.steps 9"
    )
    texts = []
    for more in ("", f"{other} --optimizer.min_lr_ratio 0 --optimizer.decay_share 0.5"):
        config = cli.parse([*flags, *more.split()])
        declared, mesh = model.declare(config), train.make_mesh(config)
        state = train.abstract_state(config, declared, mesh)
        batch = sharded_model.abstract_batch(config, mesh)
        step = train.jitted_step(config, declared, mesh)
        texts.append(step.lower(state, batch, train.schedule_on(mesh, config)).as_text())
    assert texts[0] == texts[1]


def in_two_processes(*command):
    """(exit codes, what each process logged) of a command that two start."""
    return run_all(environments(2, 4, JAX_DEFAULT_MATMUL_PRECISION="highest"), *command)


ALONE = """
import sys
import main
from runtime import errors
from runtime import distributed
distributed.CONNECT_S = 3
errors.run_command(lambda: main.run(main.parse(sys.argv[1:])))
"""


@pytest.mark.slow
def test_a_process_that_finds_no_others_ends_with_a_code_to_retry(data, tmp_path):
    """Of one job only the first process is started, of another only the second."""
    jobs = environments(2, 4), environments(2, 4)
    alone = [job[number] for number, job in enumerate(jobs)]
    flags = [*FLAGS, *data, "--run.dir", str(tmp_path)]
    codes, (first, second) = run_all(alone, "-c", ALONE, *flags)
    assert codes == [-signal.SIGABRT, Exit.RETRY]
    assert "process 0 of 2 connects to" in first and "DEADLINE_EXCEEDED" in first
    missing = f"error: process 0 at {alone[1]['JAX_COORDINATOR_ADDRESS']}: "
    assert missing in second and "Does it run, and is the port open" in second
    assert not any(tmp_path.iterdir())


KILLED_AT_THE_END = """
import os, pathlib, signal, sys, time
import jax
import main
from runtime import errors

leave, other_leaves = jax.distributed.shutdown, pathlib.Path(sys.argv[1])

def shutdown():
    if os.environ["JAX_PROCESS_ID"] == "0":
        other_leaves.touch()
        return leave()
    while not other_leaves.exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

jax.distributed.shutdown = shutdown
errors.run_command(lambda: main.run(main.parse(sys.argv[2:])))
"""


@pytest.mark.long
def test_a_process_that_is_killed_after_the_last_step_is_named(data, tmp_path):
    flags = "--run.dir", str(tmp_path), "--train.steps", "1", "--run.peer_seconds", "6"
    program = "-c", KILLED_AT_THE_END, str(tmp_path / "leaves")
    codes, logged = in_two_processes(*program, *FLAGS, *data, *flags, "--sample.prompts")
    assert codes == [-signal.SIGABRT, -signal.SIGKILL], logged
    assert "validation loss" in logged[0]
    assert "stopped sending heartbeats):\n1\n" in logged[0], logged[0]


# --- numerical faults ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_nan(data, runs, whole):
    """A run with two steps that are not finite, and one like it that was killed between its
    checkpoint and the second of them, and continued.
    """

    def kill(loop, step, report):
        if step == 5:
            raise Killed

    flags = "--sample.prompts", "--eval.every_steps", "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mixture, "rows", faulty_run.rows_with_nan)
        folder = start(data, runs, "nan", *flags)
        with pytest.MonkeyPatch.context() as killing, pytest.raises(Killed):
            killing.setattr(main.Loop, "_stop_if_diverged", kill)
            start(data, runs, "nan-resumed", *flags)
        assert len(skipped(runs / "nan-resumed")) == 2
        return folder, start(data, runs, "nan-resumed", *flags)


def skipped(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_steps_that_are_not_finite_are_skipped_counted_and_listed_with_their_windows(
    with_nan, whole
):
    folder, _ = with_nan
    records = jsonl.read(folder / "metrics.jsonl")
    assert [r["skipped"] for r in records if "skipped" in r] == [0, 1, 1, 2, 2, 2]
    assert [step for step, loss in enumerate(losses(folder), 1) if loss is None] == [2, 4]
    assert losses(folder)[0] == losses(whole)[0] and losses(folder)[5] != losses(whole)[5]
    windows = open_training(cli.load(folder / "config.toml")).windows_of
    none = {"why": "not finite", "loss": None, "grad_norm": None, "median": None}
    expected = [
        {"step": step} | none | {"windows": windows(step - 1, np.arange(8)).tolist()}
        for step in (2, 4)
    ]
    assert skipped(folder) == expected
    assert not (whole / "skipped.jsonl").exists()


@pytest.mark.long
def test_a_run_resumed_across_a_skipped_step_ends_with_the_same_bits(
    with_nan,
):
    folder, resumed = with_nan
    assert losses(resumed) == losses(folder) and skipped(resumed) == skipped(folder)
    for one, other in zip(arrays(resumed, 6), arrays(folder, 6), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def faulty_in_two_processes(data, runs, whole):
    flags = "--run.name faulty --sample.prompts --eval.every_steps 0 --run.check_replicas_every 2"
    flags = [*flags.split(), "--run.dir", str(runs)]
    return in_two_processes("tests/faulty_run.py", *FLAGS, *data, *flags)


@pytest.mark.long
def test_two_processes_skip_the_same_steps_as_one(faulty_in_two_processes, with_nan, runs):
    (folder, _), (_, logged) = with_nan, faulty_in_two_processes
    assert skipped(runs / "faulty") == skipped(folder), logged
    found, expected = losses(runs / "faulty"), losses(folder)
    assert [loss is None for loss in found] == [loss is None for loss in expected]
    np.testing.assert_allclose(*[[x or 0 for x in each] for each in (found, expected)], rtol=1e-6)
    for one, other in zip(arrays(runs / "faulty", 3), arrays(folder, 3), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert "step 2 is not applied (not finite)" in logged[0] and "is not applied" not in logged[1]


@pytest.mark.long
def test_a_device_that_differs_is_named_by_all_processes_and_its_state_is_not_saved(
    faulty_in_two_processes, runs
):
    codes, logged = faulty_in_two_processes
    host = socket.gethostname()
    for code, text in zip(codes, logged, strict=True):
        assert code == Exit.RETRY, logged
        assert "stopped after step 6: weights.last.norm on device " in text
        assert f"(process 1, host {host}) differs from 7 other devices" in text
    saved = [p.name for p in (runs / "faulty" / "checkpoints").iterdir() if p.name.isdigit()]
    assert saved == ["3"]


@pytest.mark.parametrize(
    ("before", "now"),
    [pytest.param(5.0, 5.0, marks=pytest.mark.long), (5.0, 0.0), (0.0, 5.0)],
)
def test_a_run_resumes_with_skip_spikes_turned_on_or_off(before, now, tmp_path):
    config = config_of((2, 2, 2))
    mesh, declared = mesh_of(config), model.declare(config)

    def shapes(factor):
        t = dataclasses.replace(config.train, skip_spikes=factor)
        return train.abstract_state(dataclasses.replace(config, train=t), declared, mesh)

    drawn = jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, 3, a.dtype), a.sharding), shapes(before)
    )
    saved = checkpoint.Checkpoints(tmp_path, keep=1)
    settings = dataclasses.asdict(config)
    saved.save(3, drawn, settings)
    found = main.restore(run_directory.at(tmp_path), saved, shapes(now), settings)
    saved.close()
    assert jax.tree.map(lambda a: a.sharding, found) == train.shardings_of(shapes(now))
    same = (found.weights, found.optimizer, found.step, found.skipped, found.skipped_in_row)
    assert all((np.asarray(a) == 3).all() for a in jax.tree.leaves(same))
    if now:
        assert (np.asarray(found.norms) == (3 if before else np.inf)).all()


@pytest.mark.parametrize(
    ("factor", "fix"),
    [
        (0.0, "Lower --optimizer.lr, or inspect"),
        (
            4.0,
            "above 4.0 .--train.skip_spikes. .* a larger --train.skip_spikes, as 8.0, or inspect",
        ),
    ],
)
def test_a_run_that_skips_too_many_steps_stops_with_the_reason(factor, fix, tmp_path):
    config = cli.parse(["--train.skip_spikes", str(factor), "--train.max_skipped_in_row", "3"])
    loop = SimpleNamespace(config=config, directory=run_directory.at(tmp_path))
    main.Loop._stop_if_diverged(loop, 8, {"skipped_in_row": 2})
    with pytest.raises(ValueError, match=fix) as stopped:
        main.Loop._stop_if_diverged(loop, 9, {"skipped_in_row": 3})
    assert f"data/show.py --run {tmp_path} --step 9; " in str(stopped.value)


def test_a_spike_is_logged_with_the_median_before_it(tmp_path, capsys, data):
    config = cli.parse([*FLAGS, *data])
    dataset = open_training(config)
    directory = run_directory.at(tmp_path)
    loop = SimpleNamespace(config=config, directory=directory, train_data=dataset)
    report = {"stats": SimpleNamespace(loss=2.5), "grad_norm": np.float32(9), "skipped_in_row": 1}
    report |= {"spike": np.True_, "median": np.float32(0.5)}
    main.Loop._record_skipped(loop, 3, report)
    [record] = skipped(tmp_path)
    assert record.pop("windows") == dataset.windows_of(2, np.arange(8)).tolist()
    expected = {"step": 3, "why": "spike", "loss": 2.5, "grad_norm": 9.0, "median": 0.5}
    assert record == expected
    recorded = "step 3 is not applied (spike): loss 2.5000, gradient norm 9 after a median of 0.5; "
    assert recorded in capsys.readouterr().out


@pytest.mark.long
def test_a_profiled_step_leaves_a_trace_with_its_layers_named(data, runs):
    flags = "--train.steps 3 --profile.first_step 1 --profile.steps 1 --checkpoint.every_steps 0"
    folder = start(data, runs, "profiled", *flags.split(), "--sample.prompts")
    [file] = (folder / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = " ".join(event["name"] for event in events if "hlo_op" in event.get("args", {}))
    for layer in ("attention", "mlp", "moe", "last"):
        assert layer in names


def test_a_run_that_resumes_within_the_traced_steps_ends_no_trace(tmp_path):
    config = cli.parse(["--profile.first_step", "1", "--profile.steps", "2"])
    loop = SimpleNamespace(config=config, directory=run_directory.at(tmp_path), tracing=False)
    main.Loop._profile(loop, 3)
    assert not loop.tracing and not list(tmp_path.iterdir())


def test_a_pipeline_that_does_not_divide_the_blocks_names_those_that_do():
    config = cli.parse(
        [*TINY, "--model.num_hidden_layers", "24", "--mesh.pipeline", "5"], checked=False
    )
    with pytest.raises(
        ValueError, match=r"layers 30, or --mesh.pipeline 1 or 2 or 3 or 4 or 6 or 12\."
    ):
        model.declare(config)


def test_the_example_configs_describe_runs_that_can_start():
    for path in sorted((ROOT / "configs").glob("*.toml")):
        config = cli.load(path)
        cli.check(config)
        model.declare(config)
        sharded_model.schedule_of(config)


@pytest.mark.parametrize(
    ("kind", "asked"), [("TPU v4", True), ("TPU v5 lite", False), ("NVIDIA H100 80GB HBM3", False)]
)
def test_only_a_v4_gets_options_for_asynchronous_collectives(kind, asked):
    mesh = SimpleNamespace(devices=np.array([[[SimpleNamespace(device_kind=kind)]]]))
    wanted = {"xla_enable_async_all_gather": True, "xla_tpu_enable_async_all_to_all": True}
    assert train.compiler_options(mesh) == (wanted if asked else None)
