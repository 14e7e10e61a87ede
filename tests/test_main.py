"""Whole runs: what they leave, how they continue, and what stops them before they start."""

import contextlib
import dataclasses
import io
import re
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import checkpoint
import fit
import loop
import main
import metrics
import model
import optimizer
import report
import sharded_model
import train
import utils
from common import config_of, mesh_of
from conftest import ROOT
from dataset import open_training
from devices import chips
from planning import cost
from runtime import cli, jsonl, phases, resume, run_directory
from runtime.errors import Stopped
from tiny_run import FLAGS, Killed, arrays, start


@pytest.fixture(scope="module")
def interrupted(data, runs):
    """What was seen of a run of three starts: a request stopped it after step 3, before its
    evaluation, and it was killed after step 5.
    """
    folder, compare, measured = runs / "more", loop.Loop._check_replicas, loop.Loop.measured
    seen = SimpleNamespace(folder=folder, compared=[], printed=io.StringIO())

    def compared(self, state, step):
        seen.compared.append(step)
        compare(self, state, step)

    def measured_once_saved(self):
        seen.saved_in_time = (folder / "checkpoints" / "6").is_dir()
        return measured(self)

    def ask(reports, step, report):
        if step == 3:
            reports.job.stop.request("SIGTERM")

    def kill(reports, step, report):
        if step == 5:
            raise Killed

    flags = "--run.check_replicas_every", "4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_check_replicas", compared)
        patch.setattr(loop.Loop, "measured", measured_once_saved)
        with patch.context() as first, pytest.raises(Stopped) as stopped:
            first.setattr(loop.Reports, "_stop_if_diverged", ask)
            start(data, runs, "more", *flags)
        seen.code, seen.when_stopped = stopped.value.code, jsonl.read(folder / "metrics.jsonl")
        seen.saved_when_stopped = (folder / "checkpoints" / "3").is_dir()
        with patch.context() as second, pytest.raises(Killed):
            second.setattr(loop.Reports, "_stop_if_diverged", kill)
            start(data, runs, "more", *flags)
        with contextlib.redirect_stdout(seen.printed):
            start(data, runs, "more", *flags)
    return seen


def test_a_run_leaves_its_config_metrics_samples_checkpoints_and_plots(whole):
    records = jsonl.read(whole / "metrics.jsonl")
    steps = [r for r in records if "loss/train" in r]
    evaluations = [r for r in records if "loss/val" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in steps] == [256 * r["step"] for r in steps]
    assert [r["step"] for r in evaluations] == [0, 3, 6]
    for r in steps:
        assert set(r) == set(metrics.TRAIN) and r["loss/z"] == 0 < r["loss/balance"]
        parts = r["loss/cross_entropy"] + r["loss/balance"] + r["loss/z"]
        assert r["loss/train"] == pytest.approx(parts, rel=1e-6)
    [begun] = jsonl.read(whole / "starts.jsonl")
    with contextlib.closing(checkpoint.Checkpoints(whole / "checkpoints")) as saved:
        made_by = [saved.record(step)["made_by"] for step in (3, 6)]
        assert made_by == [begun, begun] and begun["step"] == 0
    assert np.array(evaluations[0]["moe/tokens_per_expert"]).sum(1).tolist() == [16 * 32 * 2] * 4
    recorded = [(s["step"], s["prompt"]) for s in jsonl.read(whole / "samples.jsonl")]
    assert recorded == [(step, prompt) for step in (4, 6) for prompt in ("def", "import")]
    names = "gradient_norm learning_rate load_loss tokens_per_expert tokens_per_second "
    names = f"{names}validation_loss".split()
    assert sorted(p.stem for p in (whole / "plots").iterdir()) == names
    assert {p.name for p in (whole / "checkpoints").iterdir()} >= {"3", "6"}
    assert cli.load(whole / "config.toml").model.hidden_size == 32
    assert not (whole / "skipped.jsonl").exists()


def test_a_stopped_run_saves_at_once_and_catches_up_when_it_resumes(interrupted):
    assert interrupted.code == 143 and interrupted.saved_when_stopped
    last = interrupted.when_stopped[-1]
    assert last["step"] == 3 and "loss/train" in last
    assert [line["step"] for line in jsonl.read(interrupted.folder / "starts.jsonl")] == [0, 3, 3]
    assert "continues after step 3" in interrupted.printed.getvalue()
    assert interrupted.compared == [3, 4, 4, 6], "replicas, at intervals and before each save"


def test_a_run_stopped_killed_and_resumed_ends_with_the_bits_of_one_that_was_not(
    whole, interrupted
):
    both = [jsonl.read(folder / "metrics.jsonl") for folder in (interrupted.folder, whole)]
    for one, other in zip(*both, strict=True):
        same = one.keys() - metrics.MEASURED
        assert {k: one[k] for k in same} == {k: other[k] for k in other.keys() - metrics.MEASURED}
    samples = [(folder / "samples.jsonl").read_bytes() for folder in (interrupted.folder, whole)]
    assert samples[0] == samples[1]
    for resumed, expected in zip(arrays(interrupted.folder, 6), arrays(whole, 6), strict=True):
        np.testing.assert_array_equal(resumed, expected)


def test_a_run_logs_its_plan_first_then_samples_and_measurements_last(interrupted):
    """When the last save is complete."""
    assert interrupted.saved_in_time
    text, folder = interrupted.printed.getvalue(), interrupted.folder
    plan = cost.predict(cli.load(folder / "config.toml"), None).line()
    sample = text.index("\nstep 6, a completion of 'import':\n    import")
    assert text.index(f"{plan}\n") < text.index("\nstep 4/6") < sample
    measured = r"\nmeasured: (\S+) GiB per device \(planned by the compiler\); (\S+) s per step"
    found = re.search(measured, text[sample:])
    seconds = [r["step_s"] for r in jsonl.read(folder / "metrics.jsonl") if "step_s" in r]
    assert float(found[2]) == pytest.approx(np.median(seconds[4:]), rel=0.01)
    predicted = float(re.match(r"plan: (\S+) GiB", plan)[1])
    assert float(found[1]) == pytest.approx(predicted, rel=0.25)


def test_a_run_that_was_killed_accounts_for_all_its_starts(interrupted):
    lines = phases.read(interrupted.folder)
    assert [(line["step"], line["ended"]) for line in lines] == [(3, 0), (5, 0), (6, 1)]
    assert [line["repeated_s"] > 0 for line in lines] == [False, False, True]
    spent = phases.total_seconds(lines)
    kinds = {"start", "restore", "compile", "data wait", "evaluation", "samples", "saves"}
    assert kinds < spent.keys() and min(spent.values()) >= 0
    records = jsonl.read(interrupted.folder / "metrics.jsonl")
    steps_s = sum(r["step_s"] - r["data_wait_s"] for r in records if "step_s" in r)
    assert spent["steps"] == pytest.approx(steps_s, rel=0.5)
    assert phases.summary(lines) in interrupted.printed.getvalue().splitlines()


def test_a_finished_run_started_again_prints_its_result_and_draws_a_missing_picture(
    whole, data, runs, monkeypatch, capsys
):
    before, files = (whole / "metrics.jsonl").read_bytes(), sorted((whole / "plots").iterdir())
    files[1].unlink()
    monkeypatch.setattr(main, "Loop", None)
    start(data, runs, "whole")
    printed = capsys.readouterr().out
    assert "6 steps, validation loss" in printed and f"generate.py --run {whole}" in printed
    expected = r": \d\.\d\d bits per byte of text. Guesses need \d.* \(by frequency\)"
    assert re.search(expected, printed)
    assert (whole / "metrics.jsonl").read_bytes() == before
    assert sorted((whole / "plots").iterdir()) == files


def test_a_report_that_fails_is_a_warning_of_a_run(whole, data, runs, monkeypatch, capsys):
    monkeypatch.setattr(main, "Loop", None)
    monkeypatch.setattr(report, "of_run", None)
    start(data, runs, "whole")
    printed = capsys.readouterr().out
    assert "warning: no report, or an old one: TypeError: 'NoneType'" in printed
    assert "6 steps, validation loss" in printed


# --- the loop, without a model --------------------------------------------------------------------


def test_a_run_without_a_checkpoint_or_a_plan_says_so(tmp_path, monkeypatch):
    assert "Nothing is saved, as --checkpoint" in loop.resumable(None)
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
        assert "No step is saved yet. Start the run again" in loop.resumable(saved)
    monkeypatch.setattr(cost, "predict", None)
    planned = main.plan(config := utils.Config(), train.make_mesh(config))
    assert planned == "no plan: TypeError: 'NoneType' object is not callable"


def test_a_run_that_skips_too_many_steps_stops_with_the_reason(tmp_path):
    for factor, fix in (("0.0", "Lower --optimizer.lr, or"), ("4.0", "skip_spikes, as 8.0, or")):
        config = cli.parse(["--train.skip_spikes", factor, "--train.max_skipped_in_row", "3"])
        job = SimpleNamespace(config=config, directory=run_directory.at(tmp_path))
        reports = SimpleNamespace(job=job)
        loop.Reports._stop_if_diverged(reports, 8, {"skipped_in_row": 2})
        with pytest.raises(ValueError, match=f"{fix}.*data/show.py --run {tmp_path} --step 9"):
            loop.Reports._stop_if_diverged(reports, 9, {"skipped_in_row": 3})


def test_a_skipped_step_is_logged_and_recorded_with_its_windows(tmp_path, capsys, data):
    config, directory = cli.parse([*FLAGS, *data]), run_directory.at(tmp_path)
    dataset = open_training(config)
    job = SimpleNamespace(config=config, directory=directory, data=dataset)
    reports = SimpleNamespace(job=job)
    lost = {"stats": SimpleNamespace(loss=np.nan), "grad_norm": np.float32(9), "skipped_in_row": 1}
    spike = lost | {"stats": SimpleNamespace(loss=2.5), "spike": np.True_, "median": 0.5}
    loop.Reports._record_skipped(reports, 2, lost)
    loop.Reports._record_skipped(reports, 3, spike)
    one, other = jsonl.read(tmp_path / "skipped.jsonl")
    for step, record in ((2, one), (3, other)):
        assert record.pop("windows") == dataset.windows_of(step - 1, np.arange(8)).tolist()
    numbers = {"loss": None, "grad_norm": 9.0, "median": None}
    assert one == {"step": 2, "why": "not finite"} | numbers
    assert other == {"step": 3, "why": "spike"} | numbers | {"loss": 2.5, "median": 0.5}
    printed = capsys.readouterr().out
    assert "step 2 is not applied (not finite): loss nan, gradient norm 9;" in printed
    assert "(spike): loss 2.5000, gradient norm 9 after a median of 0.5; the" in printed


@pytest.mark.parametrize(("before", "now"), [(5.0, 0.0), (0.0, 5.0)])
def test_a_run_resumes_with_skip_spikes_turned_on_or_off(before, now, tmp_path):
    config = config_of((2, 1, 1), moe_layers=0, blocks=1)
    mesh, declared = mesh_of(config), model.declare(config)

    def shapes(factor):
        changed = utils.changed(config, {"train.skip_spikes": factor})
        return train.abstract_state(changed, declared, mesh)

    drawn = jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, 3, a.dtype), a.sharding), shapes(before)
    )
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as saved:
        saved.save(3, drawn, settings := dataclasses.asdict(config))
        found = main.restore(run_directory.at(tmp_path), saved, shapes(now), settings)
    assert jax.tree.map(lambda a: a.sharding, found) == train.shardings_of(shapes(now))
    same = (found.weights, found.optimizer, found.step, found.skipped, found.skipped_in_row)
    assert all((np.asarray(a) == 3).all() for a in jax.tree.leaves(same))
    assert found.norms is None if not now else np.isinf(found.norms).all()


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("none --run.resume must", "has no checkpoint to resume from"),
        ("whole --run.resume never", "has checkpoints, which a run with --run.resume never"),
        ("whole --model.v_head_dim 8 --data.seed 1", "seed 0 -> 1, model.v_head_dim 16"),
        ("whole --checkpoint.every_steps 0", "every_steps 0 cannot continue. Use another"),
        ("a --model.num_attention_heads 3", "Use --model.num_attention_heads 4"),
        ("a --mesh.virtual 2 --train.microbatches 1", "Use --train.microbatches 2"),
        ("a --mesh.fsdp 8 --train.global_batch_size 32 --model.hidden_size 64", "has 32 devices"),
        ("a --data.train absent", "absent"),
        ("a --model.vocab_size 512", "only ids below 512. Use --model.vocab_size 4096"),
        ("a --train.seq_len 1000000", "1000000 is longer than the data"),
        ("a --model.attention_kernel splash", "Use --train.seq_len 128"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_in_one_line_with_the_fix(whole, data, runs, flags, message):
    name, *extra = flags.split()
    with pytest.raises(ValueError, match=message) as refused:
        start(data, runs, name, *extra)
    assert "\n" not in str(refused.value)
    assert not (runs / "a").exists()


def test_what_the_devices_cannot_run_is_refused_before_data_are_read(runs, monkeypatch):
    monkeypatch.setattr(sharded_model, "platform", lambda mesh: "gpu8.0")
    with pytest.raises(ValueError, match=r"no FP8 products on gpu8\.0"):
        start(["--data.train", "missing"], runs, "a", "--model.matmul_dtype", "float8")


def test_more_steps_keep_the_schedule_of_the_first_start_unless_it_ends_at_0(whole, data, runs):
    flags = [*FLAGS, *data, "--run.dir", str(runs), "--run.name"]
    more = [*flags, "whole", "--train.steps", "9", "--optimizer.schedule_steps", "0"]
    assert resume.resolve(cli.parse(more)).optimizer.schedule_steps == 6
    schedule = "a --optimizer.min_lr_ratio 0 --optimizer.schedule_steps 6 --train.steps"
    flags += schedule.split()
    message = r"steps 9, and the learning rate is 0 after 6 .*Use --train.steps 6.*init_from .*/a "
    with pytest.raises(ValueError, match=message):
        resume.with_schedule(cli.parse([*flags, "9"]), 6)
    config = cli.parse([*flags, "6"])
    assert optimizer.learning_rate(optimizer.learning_rates(config), np.int32(5)) == 0
    assert resume.with_schedule(config, 6).train.steps == 6


def test_settings_that_do_not_depend_on_the_mesh_are_checked_without_one():
    with pytest.raises(ValueError, match=r"--model\.qk_rope_head_dim 3 is not divisible"):
        main.parse(["--model.qk_rope_head_dim", "3"])
    flags = ["--model.num_hidden_layers", "24", "--mesh.pipeline", "5"]
    with pytest.raises(ValueError, match=r"layers 30, or --mesh.pipeline 1 or 2 or 3 or 4 or 6 or"):
        model.declare(cli.parse(flags, checked=False))


def test_the_example_configs_describe_runs_that_can_start_with_a_tuned_learning_rate():
    for path in sorted((ROOT / "configs").glob("*.toml")):
        config = cli.load(path)
        assert fit.why_not(config) is None, path
        tunes = {"run.init_from": "runs/a"} if path.stem in ("tune", "llama_1b_32k") else {}
        assert optimizer.learning_rate_warning(utils.changed(config, tunes)) == "", path


# --- the mesh and its devices ---------------------------------------------------------------------


def test_an_axis_of_two_fits_on_a_cube_of_64_chips():
    """Each axis of the torus is 4 long, and none of them is the mesh axis's own."""
    mesh = utils.Mesh(fsdp=2, pipeline=16, tensor=2)
    placed = train.make_mesh(utils.Config(mesh=mesh), chips("tpu", 64)).devices
    assert placed.shape == mesh.shape and len({d.id for d in placed.flat}) == 64
    for one, other in placed.reshape(-1, 2):  # neighbours
        assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1


def test_a_slice_of_tpus_is_a_replica_and_hosts_of_cpus_and_gpus_are_not_slices():
    devices = chips("tpu", 16, slices=2)
    with pytest.raises(ValueError, match=r"--mesh\.replica 1 is not a multiple of the 2 slices"):
        train.make_mesh(utils.Config(mesh=utils.Mesh(fsdp=4)), devices)
    placed = train.make_mesh(utils.Config(mesh=utils.Mesh(replica=2)), devices).devices
    for number, replica in enumerate(placed):
        assert {device.slice_index for device in replica.flat} == {number}
    for platform, mesh in (("cpu", utils.Mesh()), ("gpu", utils.Mesh(fsdp=1, tensor=4))):
        placed = train.make_mesh(utils.Config(mesh=mesh), chips(platform, 8)).devices
        assert placed.shape == mesh.shape
        assert [device.id for device in placed.flat] == list(range(8))


def test_on_several_hosts_no_device_stays_idle(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for fsdp, need in ((4, 16), (1, 4)):
        with pytest.raises(ValueError, match=rf"has {need} devices, and this run has 8\. U"):
            train.make_mesh(utils.Config(mesh=utils.Mesh(fsdp=fsdp)), chips("gpu", 8))
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"JAX_ENABLE_X64 is set.*Unset it"):
        train.make_mesh(utils.Config())


def test_a_process_reads_its_own_rows_once():
    asked = []

    def rows(numbers):
        asked.append(numbers.tolist())
        array = np.repeat(numbers[:, None], 4, axis=1)
        return dict.fromkeys(("tokens", "targets", "loss_weights", "segments"), array)

    batch = train.put_batch(train.make_mesh(utils.Config()), 2, rows, (8, 4))
    assert sorted(asked) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert np.asarray(batch.tokens)[:, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- the learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "schedule", "flags", "rise", "begin", "length"),
    [
        (20, "wsd", "warmup_steps 4 --optimizer.decay_share 0.25", 4, 15, 5),
        (20, "cosine", "warmup_steps 4 --optimizer.schedule_steps 10", 4, 4, 6),
        # The warmup is not cut but for one step, and the decay begins after it.
        (10, "wsd", "warmup_steps 40 --optimizer.decay_share 0.4", 9, 9, 1),
        (10, "wsd", "warmup_steps 0 --optimizer.decay_share 1", 0, 0, 10),
    ],
)
def test_the_learning_rate_is_that_of_optax(steps, schedule, flags, rise, begin, length):
    flags = f"--optimizer.lr 1 --optimizer.schedule {schedule} --optimizer.{flags}"
    rates = optimizer.learning_rates(cli.parse(f"--train.steps {steps} {flags}".split()))
    wsd, cosine = optax.linear_schedule(1, 0.1, length), optax.cosine_decay_schedule(1, length, 0.1)
    parts = [optax.linear_schedule(0, 1, max(1, rise)), optax.constant_schedule(1.0)]
    parts.append(wsd if schedule == "wsd" else cosine)
    expected = optax.join_schedules(parts, [rise, begin])(np.arange(1.0, steps + 1))
    found = optimizer.learning_rate(rates, jax.numpy.arange(steps))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_another_schedule_is_the_same_program():
    """So a sweep of learning rates compiles once."""
    other = {"lr": 3e-4, "schedule": "wsd", "warmup_steps": 2, "min_lr_ratio": 0.0}
    texts = []
    for rule, steps in (({}, 300), (other, 9)):
        config = config_of(train={"steps": steps}, optimizer=rule, moe_layers=0, blocks=1)
        declared, mesh = model.declare(config), mesh_of(config)
        state = train.abstract_state(config, declared, mesh)
        batch = sharded_model.abstract_batch(config, mesh)
        step = train.jitted_step(config, declared, mesh)
        texts.append(step.lower(state, batch, optimizer.learning_rates(config)).as_text())
    assert texts[0] == texts[1]
