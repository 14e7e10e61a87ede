"""Train a model: read the settings, connect the processes, resume, run the loop, report.

    ./run.sh python main.py --config configs/tiny.toml --run.name longer --train.steps 500
    ./run.sh python main.py --config configs/tune.toml --run.init_from runs/tiny --run.name chat

Every setting is a flag and a key of the TOML file (utils.py, or --help). A run is a directory
DIR/NAME; DIR may be gs://BUCKET/FOLDER. docs/usage.md lists its files.

`--run.init_from` starts a new run from the newest weights of another run, on any mesh. Optimizer
state, schedule and step count are new.
"""

import dataclasses
import itertools
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import attention
import checkpoint
import hardware
import model
import optimizer
import sharded_model
import train
import utils
import weights
from checkpoint import Checkpoints
from data.tokenizer import keep_files
from dataset import Mixture, open_datasets
from inference.sampling import as_log, make_sampler
from metrics import Metrics
from model import Batch, Transformer
from runtime import (
    cli,
    distributed,
    errors,
    files,
    goodput,
    jsonl,
    loggers,
    provenance,
    resume,
    run_directory,
    writer_lock,
)
from runtime.console import is_primary, log
from runtime.errors import JobFailed, TransientError
from runtime.goodput import GoodputLog, PhaseTimes
from runtime.replica_check import ReplicaChecker
from runtime.signals import StopRequest
from train import State
from utils import Config, ConfigError
from validate import Validation, result

# (file, key) of the records that show that an evaluation, and samples, of a step are done.
RECORDED = (("metrics.jsonl", "loss/val"), ("samples.jsonl", "text"))


def parse(arguments: list[str] | None = None) -> Config:
    """Return the config from flags and --config, as `cli.parse` does.

    With --run.init_from and no [model] in --config, [model] defaults to that of the other run, or,
    when this run resumes, to its own. A mesh that neither flags nor --config set is
    utils.UNSET_MESH.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    config, model = cli.parse(arguments, checked=False), None
    if config.run.init_from:
        source = run_directory.of(config)
        if not source.saved_steps():
            source = run_directory.at(config.run.init_from)
        if (file := source.files / "config.toml").is_file():
            model = cli.load(file).model
    if cli.sets_mesh(arguments):
        return cli.parse(arguments, model=model)
    config = cli.parse(arguments, checked=False, model=model)
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    cli.check(dataclasses.replace(config, mesh=one))  # what does not depend on the mesh
    return dataclasses.replace(config, mesh=utils.UNSET_MESH)


def restore(
    run: run_directory.RunDirectory,
    saved: Checkpoints,
    shapes: State,
    settings: dict[str, Any],
    step: int | None = None,
) -> State | None:
    """Return the state of a step, or of the newest undamaged checkpoint, in these shapes and
    layouts; None without checkpoints.

    --train.skip_spikes may change between starts: gradient norms that are not stored start empty,
    and stored ones that are not needed are discarded.
    """
    replicated = shapes.step.sharding
    norms = jax.ShapeDtypeStruct((train.NORMS,), np.float32, sharding=replicated)

    def stored_shapes(names: frozenset[str]) -> State:
        return shapes.replace(norms=norms if "norms" in names else None)

    def check(config: dict[str, Any], step: int) -> None:
        resume.check_compatible(config, settings, run, step)

    if step is None:
        _, state = saved.newest(stored_shapes, check) or (0, None)
    else:
        record = saved.record(step)
        check(record["config"], step)
        state = saved.restore(step, stored_shapes(frozenset(record["arrays"])))
    if state is None:
        return None
    norms = train.initial_norms(replicated) if state.norms is None else state.norms
    return state.replace(norms=norms if shapes.norms else None)


def load_initial(
    config: Config, declared: Transformer, mesh: Mesh, data: Mixture
) -> tuple[Config, Transformer | State]:
    """Load the weights, or the state, of --run.init_from. Return the config with their step too."""
    source, step = run_directory.at(config.run.init_from), config.run.init_from_step or None
    shapes = train.abstract_state(config, declared, mesh)
    if config.run.init_optimizer:
        settings = dataclasses.asdict(config) | data.stored()
        with closing(Checkpoints(source.checkpoints)) as saved:
            return config, restore(source, saved, shapes, settings, step)
    step, w, settings = checkpoint.load_weights(source, step, shapes.weights)
    resume.check_same_tokenizer(source, settings["tokens"], data.folder, data.manifest)
    return utils.changed(config, {"run.init_from_step": step}), w


def run(config: Config) -> None:
    """Start or resume a run and train to its last step. Every process of the job calls this."""
    r = config.run
    limit_s = cli.seconds(r.time_limit) if r.time_limit else None
    with (
        PhaseTimes(60 * r.stall_minutes) as watchdog,
        distributed.job(r.peer_seconds, config.mesh.replica),
        StopRequest(watchdog, limit_s) as stop,
        ExitStack() as stack,
    ):
        watchdog.phase("opening of the data")
        with distributed.shared_errors():
            config, idle_devices = train.for_devices(config, jax.devices())
            loggers.check_packages(config)
            config = resume.resolve(config)
            declared, mesh = model.declare(config), train.make_mesh(config)
            sharded_model.schedule_of(config)
            data, directory = open_datasets(config), run_directory.of(config)
            is_new, w = not directory.saved_steps(), None
        if idle_devices:
            log(idle_devices)
        watchdog.phase("initial weights" if is_new and not r.init_from else "restore")
        if r.init_from and is_new:
            config, w = load_initial(config, declared, mesh, data[0])
        directory.lock = stack.enter_context(writer_lock.held(str(directory), r.take_over))
        stack.enter_context(directory.synced() if is_primary() else nullcontext())
        _train(config, declared, mesh, data, watchdog, stop, w)


def _resumable(saved: Checkpoints | None) -> str:
    """Describe what a stopped run has saved."""
    if saved is None:
        return "Nothing is saved, as --checkpoint.every_steps is 0."
    saved.wait()
    if not (steps := saved.steps()):
        return "No step is saved yet. Start the run again."
    return f"The newest checkpoint is of step {steps[-1]}. Start the run again to resume."


def _train(
    config: Config,
    declared: Transformer,
    mesh: Mesh,
    data: tuple[Mixture, Mixture | None],
    watchdog: PhaseTimes,
    stop: StopRequest,
    w: Transformer | State | None,
) -> None:
    """Restore the state, run the loop and draw the plots; `w` as in `start_state`."""
    directory, c, plan_line = run_directory.of(config), config.checkpoint, plan(config, mesh)
    saved = goodput_log = state = None
    if c.every_steps:
        saved = Checkpoints(directory.checkpoints, c.keep, keep_every_steps=c.keep_every_steps)
    try:
        if saved:
            shapes = train.abstract_state(config, declared, mesh)
            settings = dataclasses.asdict(config) | data[0].stored()
            state = restore(directory, saved, shapes, settings)
        if state is None and isinstance(w, State):
            state = w
        finished = state is not None and int(state.step) >= config.train.steps
        if not finished:
            state = start_state(config, declared, mesh, state, w)
            start = provenance.record(directory.files, int(state.step))
            goodput_log = GoodputLog(directory.files, watchdog, int(state.step))
            if is_primary():
                keep_sources(config, data[0], is_new=w is not None)
            log(plan_line)
            if stop.reached():
                raise stop.stopped(_resumable(saved))
            loop = Loop(config, declared, mesh, data, saved, watchdog, stop, goodput_log)
            if saved:
                saved.made_by = start
            loop.run(state)
            watchdog.phase("save at the end")
            if saved:
                saved.wait()
            log(f"{plan_line}\n{loop.measured()}" if loop.peak else loop.measured())
    except Exception as error:
        # `close` waits for the other processes, which call it only after an error of all processes.
        if saved and (not jax.distributed.is_initialized() or isinstance(error, JobFailed)):
            saved.close()
        if goodput_log:
            goodput_log.write()
        raise
    if saved:
        saved.close()
    watchdog.phase("pictures")
    if is_primary():
        if goodput_log:
            goodput_log.write(ended=True)
        if lines := goodput.read(directory.files):
            log(goodput.summary(lines))
        if config.eval.sequences and (directory.files / "metrics.jsonl").exists():
            import plot  # late, so that a run starts fast

            plot.plot_run(directory.files, overwrite=not finished)
        log(f"{'finished before.' if finished else ''}\n{result(config, data[1])}".lstrip())


def keep_sources(config: Config, data: Mixture, is_new: bool) -> None:
    """Copy to the run what its export needs: the tokenizer's files, and if it `is_new` and starts
    from another run, the settings of the imported base.
    """
    directory = run_directory.of(config)
    keep_files(data.manifest.tokenizer, directory.folder(run_directory.TOKENIZER))
    if is_new:
        base = run_directory.at(config.run.init_from).folder(run_directory.HF)
        if base.is_dir():
            shutil.copytree(base, directory.folder(run_directory.HF), dirs_exist_ok=True)
    directory.upload(directory.files.rglob("*"))


def plan(config: Config, mesh: Mesh) -> str:
    """Return one line with the memory and time that a step is predicted to take."""
    chip = hardware.chip_of_kind(mesh.devices.flat[0].device_kind)
    try:
        from planning import cost  # late: training needs nothing else of it

        return cost.predict(config, chip, sharded_model.platform(mesh)).line()
    except Exception as error:  # training does not depend on the prediction
        return f"no plan: {type(error).__name__}: {error}"


def start_state(
    config: Config,
    declared: Transformer,
    mesh: Mesh,
    state: State | None,
    w: Transformer | State | None = None,
) -> State:
    """Log what is about to run, write config.toml, and return the state of the first step.

    state  the restored state; None for a new run
    w      initial weights, or state, of a new run; None to initialize them
    """
    directory, m = run_directory.of(config), config.model
    total, active = weights.count(declared)
    kernel = attention.describe_kernel(config, sharded_model.platform(mesh))
    stages = f" with {config.mesh.virtual} virtual stages" * (config.mesh.virtual > 1)
    log(
        f"{total:,} parameters, {active:,} active; {m.num_hidden_layers} layers; mesh "
        f"{config.mesh}{stages} on {mesh.devices.size} x {mesh.devices.flat[0].device_kind}, "
        f"attention {kernel}; {config.train.global_batch_size} x {config.train.seq_len} tokens per "
        "step"
    )
    if hardware.chip_of_kind(mesh.devices.flat[0].device_kind):
        log(hardware.MFU_RULE)
    if warning := optimizer.learning_rate_warning(config):
        log(warning)
    if is_primary():
        try:
            directory.files.mkdir(parents=True, exist_ok=True)
            kept = utils.changed(config, {"run.take_over": False})  # is of this start only
            text = cli.to_toml(kept)
            files.write_atomically(directory.files / "config.toml", text)
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be written: {error}. Use a --run.dir that can be written."
            ) from error
    if state is None:
        source = f", weights from {config.run.init_from} at step {config.run.init_from_step}"
        log(f"{directory}: a new run{source if w else ''}")
        return train.initial_state(config, declared, mesh, w)
    of = f" of {config.run.init_from}" if state is w else ""
    log(f"{directory}: continues after step {int(state.step)}{of}")
    return state


# --- the loop -------------------------------------------------------------------------------------


class Loop:
    """The training loop: from a state to the last step, with evaluations, samples and saves."""

    def __init__(
        self,
        config: Config,
        declared: Transformer,
        mesh: Mesh,
        data: tuple[Mixture, Mixture | None],
        saved: Checkpoints | None,
        watchdog: PhaseTimes,
        stop: StopRequest,
        goodput_log: GoodputLog,
    ):
        self.config, self.mesh, self.saved = config, mesh, saved
        self.watchdog, self.stop, self.goodput_log = watchdog, stop, goodput_log
        self.train_data, val = data
        self.directory = run_directory.of(config)
        self.validation = val and Validation(config, declared, mesh, val)
        self.sample = make_sampler(config, mesh, self.train_data.manifest)
        shapes = train.abstract_state(config, declared, mesh)
        self.replicas = ReplicaChecker(shapes, mesh) if config.run.check_replicas_every else None
        watchdog.phase("compile")
        log("compiling the step, which takes a minute or so the first time")
        started = time.perf_counter()
        step = train.jitted_step(config, declared, mesh)
        self.schedule, batch = train.schedule_on(mesh, config), sharded_model.abstract_batch
        self.step = errors.compile_program(step, shapes, batch(config, mesh), self.schedule)
        log(f"the step is compiled, in {time.perf_counter() - started:.0f} s")
        self.tracing = False
        # (steps done, report, seconds of waiting for its batch) of the step that is running
        self.running: tuple[int, dict[str, Any], float] | None = None
        self.ended_at: float | None = None  # end of this step, until its report is read
        self.done_at = 0.0  # when the loop was ready for this step
        self.taken_s: list[float] = []  # of each step, without evaluations, samples and saves
        t = config.train
        self.flops_per_token = hardware.palm_flops_per_token(config.model, declared, t.seq_len)
        chip = hardware.chip_of_kind(mesh.devices.flat[0].device_kind)
        self.peak = chip and chip.flops * mesh.devices.size

    def run(self, state: State) -> State:
        """Run all steps after `state`."""
        self.first = int(state.step)
        for name in ("samples.jsonl", "skipped.jsonl"):
            if is_primary() and (file := self.directory.files / name).exists():
                jsonl.truncate(file, self.first)
        with Metrics(self.config, self.directory.files, self.first) as self.recorder:
            source = train.batches(self.config, self.mesh, self.train_data.rows, self.first)
            with closing(source):
                return self._steps(state, source)

    def _steps(self, state: State, source: Iterator[Batch]) -> State:
        """Run the steps. The report of a step is read while the next one runs, except before
        evaluations, samples, saves and comparisons. A step is started when the previous one has
        ended, so that a request to stop waits for one step, or two with several processes.
        """
        last = self.config.train.steps
        missing = self._missing(self.first)
        self._stop_if_requested(state, self.first, missing)
        self._evaluate_and_sample(state, self.first, *missing)
        self.done_at = time.perf_counter()
        for number in range(self.first, last):
            self._wait()
            self._stop_if_requested(state, number)
            self._profile(number)
            self.watchdog.phase(f"batch of step {number + 1}")
            wait_began = time.perf_counter()
            batch = next(source)
            waited_s = time.perf_counter() - wait_began
            self.watchdog.phase(f"step {number + 1}")
            state, report = self.step(state, batch, self.schedule)
            self._read_report()  # of the previous step
            self.running = number + 1, report, waited_s
            if any(self._due(number + 1)):
                self._read_report()
                if number + 1 < last:  # the last step ends the run anyway
                    self._stop_if_requested(state, number + 1, self._due(number + 1)[:2])
                self._between_steps(state, number + 1)
                self.done_at = time.perf_counter()  # not counted in the next step's time
        self._read_report()
        self._profile(last)
        return state

    def _wait(self) -> None:
        """Wait until the running step, if any, has ended."""
        if self.running and self.ended_at is None:
            jax.block_until_ready(self.running[1])
            self.ended_at = time.perf_counter()

    def _read_report(self) -> None:
        """Wait until the running step, if any, has ended, and record it."""
        if self.running is None:
            return
        self._wait()
        (step, report, waited_s), self.running = self.running, None
        report = jax.device_get(report)
        step_s, self.done_at, self.ended_at = self.ended_at - self.done_at, self.ended_at, None
        self.taken_s.append(step_s)
        self.recorder.train(self._record(step, report, step_s, waited_s))
        self.goodput_log.after_step(step)
        for text in self.train_data.finished_epochs(step):
            log(text)
        if report["skipped_in_row"]:
            self._record_skipped(step, report)
        self._stop_if_diverged(step, report)
        if self.saved and self.saved.failed():
            self.stop.request("the checkpoint could not be written")  # on all processes

    def _record(
        self, step: int, report: dict[str, Any], step_s: float, waited_s: float
    ) -> dict[str, Any]:
        t, stats = self.config.train, report["stats"]
        tokens = t.global_batch_size * t.seq_len
        tokens_per_s = tokens / step_s
        return {
            "step": step,
            "tokens": step * tokens,
            "loss/train": float(stats.loss),
            "loss/cross_entropy": float(stats.cross_entropy),
            "loss/balance": float(stats.balance),
            "loss/z": float(stats.z),
            "grad_norm": float(report["grad_norm"]),
            "lr": float(report["lr"]),
            "tokens_per_s": tokens_per_s,
            "step_s": step_s,
            "data_wait_s": waited_s,
            "mfu": tokens_per_s * self.flops_per_token / self.peak if self.peak else None,
            "skipped": int(report["skipped"]),
        } | self.train_data.progress(step)

    def _record_skipped(self, step: int, report: dict[str, Any]) -> None:
        """Log a skipped step, and append it to skipped.jsonl with the windows of its batch."""
        loss, norm = float(report["stats"].loss), float(report["grad_norm"])
        median = float(report.get("median", math.inf))  # infinite if there is none yet
        why = "spike" if report.get("spike") else "not finite"
        after = f" after a median of {median:.4g}" * (why == "spike")
        log(
            f"step {step} is not applied ({why}): loss {loss:.4f}, gradient norm {norm:.4g}{after}"
            f"; the windows of its batch are in {self.directory}/skipped.jsonl"
        )
        record = {"step": step, "why": why, "loss": loss, "grad_norm": norm, "median": median}
        rows = np.arange(self.config.train.global_batch_size)
        record["windows"] = self.train_data.windows_of(step - 1, rows).tolist()
        jsonl.append(self.directory.files / "skipped.jsonl", [record])

    def _stop_if_diverged(self, step: int, report: dict[str, Any]) -> None:
        t = self.config.train
        if report["skipped_in_row"] < t.max_skipped_in_row:
            return
        why, fix = "had a loss or gradient norm that was not finite", "Lower --optimizer.lr"
        if t.skip_spikes:
            why += f", or a norm above {t.skip_spikes} (--train.skip_spikes) times the median,"
            fix += f", use a larger --train.skip_spikes, as {2 * t.skip_spikes}"
        raise ConfigError(
            f"stopped after step {step}: {t.max_skipped_in_row} steps in a row {why} and were not "
            f"applied (--train.max_skipped_in_row). {fix}, or inspect the data: python "
            f"data/show.py --run {self.directory} --step {step}; the last checkpoint is in "
            f"{self.directory.checkpoints}."
        )

    def _check_replicas(self, state: State, step: int) -> None:
        """Raise TransientError, on every process, if copies of an array differ between devices."""
        if difference := self.replicas(state):
            raise TransientError(
                f"stopped after step {step}: {difference}, and should not: a device failed in "
                "memory or arithmetic (--run.check_replicas_every). This state is not saved; the "
                f"last checkpoint in {self.directory.checkpoints} stays. Start the run again; if "
                "the same device is named again, leave out its host."
            )

    def _due(self, step: int) -> tuple[bool, bool, bool, bool]:
        """Return whether to evaluate, sample, save and compare replicas after `step` steps."""

        def due(every: int) -> bool:
            return step == self.config.train.steps or (every > 0 and step % every == 0)

        c, every = self.config, self.config.run.check_replicas_every
        evaluate = self.validation is not None and due(c.eval.every_steps)
        sample, save = due(c.sample.every_steps), due(c.checkpoint.every_steps)
        return evaluate, sample, save, self.replicas is not None and (save or step % every == 0)

    def _missing(self, step: int) -> tuple[bool, bool]:
        """Return whether to evaluate and to sample before the first step.

        After a resume, what was due at this step and is not recorded is done now.
        """
        if step == 0:
            return self.validation is not None, False
        due = np.array(self._due(step)[:2])
        if is_primary():
            done = [jsonl.has(self.directory.files / name, step, key) for name, key in RECORDED]
            due &= ~np.array(done)
        return tuple(multihost_utils.broadcast_one_to_all(due).tolist())

    def _between_steps(self, state: State, step: int) -> None:
        evaluate, sample, save, compare = self._due(step)
        if compare:  # first, so that only a compared state is saved
            self._check_replicas(state, step)
        self._evaluate_and_sample(state, step, evaluate, sample)
        if save:  # last, so that what is recorded up to a checkpoint is not recorded again
            self._save(state, step)

    def _evaluate_and_sample(self, state: State, step: int, evaluate: bool, sample: bool) -> None:
        if evaluate:
            self.watchdog.phase(f"evaluation after step {step}")
            self.recorder.evaluation({"step": step} | self.validation(state.weights))
        if sample and self.sample is not None:
            self.watchdog.phase(f"samples after step {step}")
            samples = self.sample(state.weights, step)
            for s in samples:
                log(as_log(s))
            jsonl.append(self.directory.files / "samples.jsonl", samples)

    def _save(self, state: State, step: int) -> None:
        if self.saved is None:
            return
        self.watchdog.phase(f"save of step {step}")
        self.stop.save_s = self.saved.longest_s
        self.goodput_log.write()  # before the records are uploaded

        def records_first() -> None:
            self.recorder.sync()
            self.directory.upload()

        settings = dataclasses.asdict(self.config) | self.train_data.stored()
        self.saved.save(step, state, settings, before=records_first)

    def _stop_if_requested(self, state: State, step: int, follows: Sequence[bool] = ()) -> None:
        """Save and raise Stopped, on all processes, after a request to stop, or if the time limit
        does not suffice for what follows: (whether an evaluation, whether samples).
        """
        if not self.stop.reached(*itertools.compress(("evaluation", "samples"), follows)):
            return
        self._read_report()
        if self.saved:
            self.saved.wait()  # raises, on all processes, if one could not write
        if step > self.first:
            if self.replicas:
                self._check_replicas(state, step)
            self._save(state, step)
        self.watchdog.phase("save at the end")
        raise self.stop.stopped(_resumable(self.saved))

    def _profile(self, number: int) -> None:
        """Start or end the trace of `profile.steps` steps."""
        p, folder = self.config.profile, self.directory.files / "profile"
        if p.steps and number == p.first_step:
            self._read_report()  # the trace begins with the next step
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
            self.tracing = True
        # A run that resumed between these steps has started no trace.
        if self.tracing and number == min(p.first_step + p.steps, self.config.train.steps):
            self._read_report()
            jax.profiler.stop_trace()
            self.tracing = False
            try:
                from planning import timeline  # late: training needs nothing else of it

                for file in folder.rglob("perfetto_trace.json.gz"):
                    timeline.name_layers(file, self.step.as_text())
            except Exception as error:  # the trace is complete without these names
                log(f"warning: layers are not named in the trace: {error!r}")
            log(
                f"trace of steps {p.first_step} to {number - 1}: "
                f"{self.directory}/{folder.name} (open perfetto_trace.json.gz in Perfetto)"
            )

    def measured(self) -> str:
        """Return one line with the measured memory and step time."""
        memory, source = train.peak_bytes(self.mesh, self.step)
        later = self.taken_s[1:] or self.taken_s
        seconds = f"; {statistics.median(later):.3g} s per step (median)" if later else ""
        return f"measured: {memory / utils.GIB:.3g} GiB per device ({source}){seconds}"


if __name__ == "__main__":
    errors.run_command(lambda: run(parse()))
