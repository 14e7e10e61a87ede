"""The training loop: steps and their records, evaluations, samples, comparisons and saves."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hardware
import memory
import sharded_model
import train
import weights
from checkpoint import Checkpoints
from dataset import Mixture
from inference.sampling import as_log, make_sampler
from metrics import Metrics
from model import Transformer
from optimizer import learning_rates
from runtime import distributed, jsonl, run_directory
from runtime.array_digests import ReplicaChecker
from runtime.console import is_primary, log
from runtime.errors import TransientError, compile_lowered
from runtime.phases import GoodputLog, Phases
from runtime.signals import StopRequest
from train import State
from utils import GIB, Config, ConfigError
from validate import Validation

# (file, key) of the records that show that an evaluation, and samples, of a step are done.
RECORDED = (("metrics.jsonl", "loss/val"), ("samples.jsonl", "text"))


@dataclasses.dataclass(frozen=True)
class Job:
    """What the parts of a run share."""

    config: Config  # with all settings resolved
    declared: Transformer
    mesh: Mesh
    data: Mixture
    val: Mixture | None
    directory: run_directory.RunDirectory
    saved: Checkpoints | None  # None if --checkpoint.every_steps is 0
    settings: dict[str, Any]  # what checkpoints record: config, data, and the base of adapters
    watchdog: Phases
    stop: StopRequest


def resumable(saved: Checkpoints | None) -> str:
    """Describe what a stopped run has saved."""
    if saved is None:
        return "Nothing is saved, as --checkpoint.every_steps is 0."
    saved.wait()
    if not (steps := saved.steps()):
        return "No step is saved yet. Start the run again."
    return f"The newest checkpoint is of step {steps[-1]}. Start the run again to resume."


class Due(NamedTuple):
    """What follows a step. The order is that of the fields, except that `compare` is first."""

    evaluate: bool
    sample: bool
    save: bool = False
    compare: bool = False  # replicated arrays across devices


class Loop:
    """The training loop: from a state to the last step, with evaluations, samples and saves."""

    def __init__(self, job: Job, goodput_log: GoodputLog):
        """Compile the step."""
        self.job, self.goodput_log = job, goodput_log
        config, declared, mesh = job.config, job.declared, job.mesh
        self.validation = job.val and Validation(config, declared, mesh, job.val)
        self.sample = make_sampler(config, mesh, job.data.manifest)
        shapes = train.abstract_state(config, declared, mesh)
        self.replicas = ReplicaChecker(shapes, mesh) if config.run.check_replicas_every else None
        self.rates = jax.device_put(learning_rates(config), NamedSharding(mesh, P()))
        job.watchdog.phase("compile")
        self._compile(shapes)
        self.tracing = False

    def _compile(self, shapes: State) -> None:
        """Compile the step and, at the same time, evaluation and sampling.

        `needed` is then the memory of each, with the state of training.
        """
        job, w, lowered = self.job, shapes.weights, {}
        if self.validation:
            lowered[memory.EVALUATION, ""] = self.validation.lower(w)
        for part, program in (self.sample.lower(w) if self.sample else {}).items():
            lowered[memory.SAMPLING, part] = program
        names = ", ".join([memory.STEP, *dict.fromkeys(name for name, _ in lowered)])
        log(f"compiling {names}, which takes a minute or so the first time")
        started = time.perf_counter()
        with ThreadPoolExecutor(thread_name_prefix="compile") as pool:
            others = {
                key: pool.submit(compile_lowered, one, key[0]) for key, one in lowered.items()
            }
            batch = sharded_model.abstract_batch(job.config, job.mesh)
            # Here, as processes communicate in it.
            self.step = train.compile_step(
                job.config, job.declared, job.mesh, shapes, batch, self.rates
            )
            with distributed.shared_errors():
                programs = {key: future.result() for key, future in others.items()}
        log(f"compiled in {time.perf_counter() - started:.0f} s")
        state, size = memory.bytes_of(shapes), memory.planned_bytes
        of_weights = memory.bytes_of(w)  # which are arguments of some programs; the rest stays
        needed = self.needed = {memory.STEP: size(self.step)}
        if self.validation:
            self.validation.program = programs.pop((memory.EVALUATION, ""))
            needed[memory.EVALUATION] = size(self.validation.program) + state - of_weights
        if self.sample:
            found = {part: program for (_, part), program in programs.items()}
            self.sample.convert_weights = found.pop("weights")
            self.sample.generator.programs = found
            sizes = [size(self.sample.convert_weights) - of_weights, *map(size, found.values())]
            needed[memory.SAMPLING] = max(sizes) + state
        sizes = ", ".join(f"{n / GIB:.3g} for {name}" for name, n in needed.items())
        log(f"GiB per device as compiled: {sizes}")

    def run(self, state: State) -> None:
        """Run all steps after `state`.

        A step is started when the previous one has ended, so that a request to stop waits for one
        step, or two with several processes.
        """
        job, config = self.job, self.job.config
        self.first = first = int(state.step)
        with (
            Metrics(config, job.directory.files, first) as self.recorder,
            closing(train.batches(config, job.mesh, job.data.rows, first)) as batches,
        ):
            reports = self.reports = Reports(job, self.recorder, self.goodput_log)
            for done in range(first, config.train.steps + 1):
                reports.wait()
                due = self._missing(done) if done == first else self._due(done)
                if any(due):
                    reports.read()
                self._stop_if_requested(state, done, due)
                if any(due):
                    self._between_steps(state, done, due)
                    self._stop_if_requested(state, done)
                self._profile(done)
                if done == config.train.steps:
                    return
                job.watchdog.phase(f"batch of step {done + 1}")
                wait_began = time.perf_counter()
                batch = next(batches)
                waited_s = time.perf_counter() - wait_began
                job.watchdog.phase(f"step {done + 1}")
                state, report = self.step(state, batch, self.rates)
                reports.read()  # of the previous step, while this one runs
                reports.running = done + 1, report, waited_s

    def _due(self, step: int) -> Due:
        """Return what follows `step` steps. Everything follows the last step."""
        c, every = self.job.config, self.job.config.run.check_replicas_every

        def due(every: int) -> bool:
            return step == c.train.steps or (every > 0 and step % every == 0)

        evaluate = self.validation is not None and due(c.eval.every_steps)
        save = due(c.checkpoint.every_steps)
        compare = self.replicas is not None and (save or step % every == 0)
        return Due(evaluate, due(c.sample.every_steps), save, compare)

    def _missing(self, step: int) -> Due:
        """Return what precedes the first step.

        After a resume, what was due at this step and is not recorded is done now.
        """
        if step == 0:
            return Due(self.validation is not None, sample=False)
        due = np.array(self._due(step)[:2])
        if is_primary():
            files_of = self.job.directory.files
            due &= [not jsonl.has(files_of / name, step, key) for name, key in RECORDED]
        return Due(*multihost_utils.broadcast_one_to_all(due).tolist())

    def _between_steps(self, state: State, step: int, due: Due) -> None:
        if due.compare:  # first, so that only a compared state is saved
            self._check_replicas(state, step)
        if due.evaluate:
            self.job.watchdog.phase(f"evaluation after step {step}")
            self.recorder.evaluation({"step": step} | self.validation(state.weights))
        if due.sample and self.sample is not None:
            self.job.watchdog.phase(f"samples after step {step}")
            samples = self.sample(state.weights, step)
            for s in samples:
                log(as_log(s))
            jsonl.append(self.job.directory.files / "samples.jsonl", samples)
        if due.save:  # last, so that what is recorded up to a checkpoint is not recorded again
            self._save(state, step)
        self.reports.restart_clock()

    def _check_replicas(self, state: State, step: int) -> None:
        """Raise TransientError, on every process, if copies of an array differ between devices."""
        if difference := self.replicas(state):
            raise TransientError(
                f"stopped after step {step}: {difference}, and should not: a device failed in "
                "memory or arithmetic (--run.check_replicas_every). This state is not saved; the "
                f"last checkpoint in {self.job.directory.checkpoints} stays. Start the run again; "
                "if the same device is named again, leave out its host."
            )

    def _save(self, state: State, step: int) -> None:
        job = self.job
        if job.saved is None:
            return
        job.watchdog.phase(f"save of step {step}")
        job.stop.save_s = job.saved.longest_s
        self.goodput_log.write()  # before the records are uploaded

        def records_first() -> None:
            self.recorder.sync()
            job.directory.upload()

        kept = state.replace(weights=weights.own(job.declared, state.weights))
        job.saved.save(step, kept, job.settings, before=records_first)

    def _stop_if_requested(self, state: State, step: int, follows: Sequence[bool] = ()) -> None:
        """Save and raise Stopped, on all processes, after a request to stop, or if the time limit
        does not suffice for what follows: (whether an evaluation, whether samples, ...). After the
        last step the run ends anyway.
        """
        job, phases = self.job, itertools.compress(("evaluation", "samples"), follows)
        if step == job.config.train.steps or not job.stop.reached(*phases):
            return
        self.reports.read()
        if job.saved:
            job.saved.wait()  # raises, on all processes, if one could not write
        if step > self.first:
            if self.replicas:
                self._check_replicas(state, step)
            self._save(state, step)
        job.watchdog.phase("save at the end")
        raise job.stop.stopped(resumable(job.saved))

    def _profile(self, done: int) -> None:
        """Start or end the trace of `profile.steps` steps."""
        p, directory = self.job.config.profile, self.job.directory
        folder = directory.files / "profile"
        if p.steps and done == p.first_step:
            self.reports.read()  # the trace begins with the next step
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
            self.tracing = True
            self.reports.restart_clock()
        # A run that resumed between these steps has started no trace.
        if self.tracing and done == min(p.first_step + p.steps, self.job.config.train.steps):
            self.reports.read()
            jax.profiler.stop_trace()
            self.tracing = False
            try:
                from planning import timeline  # late: training needs nothing else of it

                for file in folder.rglob("perfetto_trace.json.gz"):
                    timeline.name_layers(file, self.step.as_text())
            except Exception as error:  # the trace is complete without these names
                log(f"warning: layers are not named in the trace: {error!r}")
            log(
                f"trace of steps {p.first_step} to {done - 1}: "
                f"{directory}/{folder.name} (open perfetto_trace.json.gz in Perfetto)"
            )
            self.reports.restart_clock()

    def measured(self) -> str:
        """Return one line with the measured memory and step time."""
        size, source = memory.peak_bytes(self.job.mesh, self.step)
        later = self.reports.taken_s[1:] or self.reports.taken_s
        seconds = f"; {statistics.median(later):.3g} s per step (median)" if later else ""
        return f"measured: {size / GIB:.3g} GiB per device ({source}){seconds}"


class Reports:
    """What the steps report. A report is read while the next step runs, if nothing is due."""

    def __init__(self, job: Job, recorder: Metrics, goodput_log: GoodputLog):
        self.job, self.recorder, self.goodput_log = job, recorder, goodput_log
        # (steps done, report, seconds of waiting for its batch) of the step that is running
        self.running: tuple[int, dict[str, Any], float] | None = None
        self.ended_at: float | None = None  # end of this step, until its report is read
        self.done_at = time.perf_counter()  # when the loop was ready for this step
        self.taken_s: list[float] = []  # of each step, without evaluations, samples and saves
        m, seq_len = job.config.model, job.config.train.seq_len
        chip = hardware.chip_of_kind(job.mesh.devices.flat[0].device_kind)
        self.flops_per_token = hardware.palm_flops_per_token(m, job.declared, seq_len)
        self.peak = chip and chip.peak(m.compute_dtype) * job.mesh.devices.size

    def wait(self) -> None:
        """Wait until the running step, if any, has ended."""
        if self.running and self.ended_at is None:
            jax.block_until_ready(self.running[1])
            self.ended_at = time.perf_counter()

    def restart_clock(self) -> None:
        """Do not count the time until now in the next step's time."""
        self.done_at = time.perf_counter()

    def read(self) -> None:
        """Wait until the running step, if any, has ended, and record it."""
        if self.running is None:
            return
        self.wait()
        (step, report, waited_s), self.running = self.running, None
        report = jax.device_get(report)
        step_s, self.done_at, self.ended_at = self.ended_at - self.done_at, self.ended_at, None
        self.taken_s.append(step_s)
        self.recorder.train(self._record(step, report, step_s, waited_s))
        self.goodput_log.after_step(step)
        for text in self.job.data.finished_epochs(step):
            log(text)
        if report["skipped_in_row"]:
            self._record_skipped(step, report)
        self._stop_if_diverged(step, report)
        if self.job.saved and self.job.saved.failed():
            self.job.stop.request("the checkpoint could not be written")  # on all processes

    def _record(
        self, step: int, report: dict[str, Any], step_s: float, waited_s: float
    ) -> dict[str, Any]:
        t, stats = self.job.config.train, report["stats"]
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
        } | self.job.data.progress(step)

    def _record_skipped(self, step: int, report: dict[str, Any]) -> None:
        """Log a skipped step, and append it to skipped.jsonl with the windows of its batch."""
        loss, norm = float(report["stats"].loss), float(report["grad_norm"])
        median = float(report.get("median", math.inf))  # infinite if there is none yet
        why = "spike" if report.get("spike") else "not finite"
        after = f" after a median of {median:.4g}" * (why == "spike")
        log(
            f"step {step} is not applied ({why}): loss {loss:.4f}, gradient norm {norm:.4g}{after}"
            f"; the windows of its batch are in {self.job.directory}/skipped.jsonl"
        )
        record = {"step": step, "why": why, "loss": loss, "grad_norm": norm, "median": median}
        rows = np.arange(self.job.config.train.global_batch_size)
        record["windows"] = self.job.data.windows_of(step - 1, rows).tolist()
        jsonl.append(self.job.directory.files / "skipped.jsonl", [record])

    def _stop_if_diverged(self, step: int, report: dict[str, Any]) -> None:
        t = self.job.config.train
        if report["skipped_in_row"] < t.max_skipped_in_row:
            return
        why, fix = "had a loss or gradient norm that was not finite", "Lower --optimizer.lr"
        if t.skip_spikes:
            why += f", or a norm above {t.skip_spikes} (--train.skip_spikes) times the median,"
            fix += f", use a larger --train.skip_spikes, as {2 * t.skip_spikes}"
        raise ConfigError(
            f"stopped after step {step}: {t.max_skipped_in_row} steps in a row {why} and were not "
            f"applied (--train.max_skipped_in_row). {fix}, or inspect the data: python "
            f"data/show.py --run {self.job.directory} --step {step}; the last checkpoint is in "
            f"{self.job.directory.checkpoints}."
        )
