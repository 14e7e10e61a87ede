"""The steps of a run, and what is between them: records, evaluation, samples, saves, stops.

How a step works is not known here: see train.py.
"""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import checkpoint
import chips
import faults
import flops
import metrics
import multihost
import run_folder
import train
import utils
from checkpoint import Checkpoints
from faults import Exit, Failed, Fault
from generate import Sampler
from metrics import Metrics, is_primary, say
from mixture import Mixture
from model import Batch, Transformer
from replicas import Replicas
from stop import StopRequest
from train import State
from utils import Config
from validate import Validation
from watchdog import Watchdog

AHEAD_STEPS = 4  # whose batches are made while a step runs

Result = TypeVar("Result")

# Where what is due after a step is recorded, and by which key of its records that is seen.
RECORDED = (("metrics.jsonl", "loss/val"), ("samples.jsonl", "text"))


def folder_of(config: Config) -> run_folder.Folder:
    folder, name = config.run.dir, config.run.name
    in_bucket = folder.startswith("gs:")
    return run_folder.at(f"{folder.rstrip('/')}/{name}" if in_bucket else Path(folder) / name)


def checkpoint_config(config: Config, data: Mixture) -> dict[str, Any]:
    """What a checkpoint says of its run: the config, and which tokens it was trained on."""
    m = data.manifest
    tokens = {"train": data.identity, "tokenizer": m.tokenizer, "end_of_text": m.end_of_text}
    if m.begin_of_text is not None:
        tokens["begin_of_text"] = [m.begin_of_text]
    tokens["tokenizer_sha256"] = m.tokenizer_sha256
    return dataclasses.asdict(config) | {"tokens": tokens}


def sampler(config: Config, mesh: Mesh, data: Mixture) -> Sampler | None:
    """What samples are made with; None on all processes where there are no prompts, or where one of
    them has no memory for it.
    """
    if not config.sample.prompts:
        return None
    try:
        with multihost.shared_errors():
            return Sampler(config, mesh, data)
    except (ValueError, Failed) as error:
        if faults.code_of(error) == Exit.BUG:
            raise
        say(f"no samples: {error}")
        return None


class Loop:
    """One run, from its state to its last step."""

    def __init__(
        self,
        config: Config,
        declared: Transformer,
        mesh: Mesh,
        data: tuple[Mixture, Mixture],
        saved: Checkpoints | None,
        watchdog: Watchdog,
        stop: StopRequest,
    ):
        self.config, self.mesh, self.saved = config, mesh, saved
        self.watchdog, self.stop = watchdog, stop
        self.train_data, val = data
        self.named = folder_of(config)
        self.folder = self.named.files
        self.validation = Validation(config, declared, mesh, val)
        self.sample = sampler(config, mesh, self.train_data)
        self.shapes = train.abstract_state(config, declared, mesh)
        self.replicas = None
        if config.run.check_replicas_every:
            self.replicas = Replicas(self.shapes, mesh)
        watchdog.phase("compile")
        started = time.perf_counter()
        step = train.jitted_step(config, declared, mesh)
        self.step = train.compiled(step, self.shapes, train.abstract_batch(config, mesh))
        say(f"the step is compiled, in {time.perf_counter() - started:.0f} s")
        self.tracing = False
        # (steps done, its report, seconds that its batch was waited for) of the step that runs
        self.running: tuple[int, dict[str, Any], float] | None = None
        self.ended_at: float | None = None  # when it was done, while its report is not read
        self.done_at = 0.0  # when the report of the step before was there
        self.taken_s: list[float] = []  # of each step, without what is between steps
        per_token = flops.palm_flops_per_token(config.model, declared, config.train.sequence_length)
        chip = chips.chip_of_kind(mesh.devices.flat[0].device_kind)
        self.flops_per_token = per_token
        self.peak = chip and chip.flops * mesh.devices.size

    def run(self, state: State) -> State:
        """All steps from `state` on."""
        self.first = first = int(state.step)
        for file in (self.folder / name for name in ("samples.jsonl", "skipped.jsonl")):
            if is_primary() and file.exists():
                metrics.cut(file, first)
        with Metrics(self.config, self.folder, first, dataclasses.asdict(self.config)) as recorder:
            source = batches(self.config, self.mesh, self.train_data, first)
            try:
                return self._steps(state, first, source, recorder)
            finally:
                source.close()

    def _steps(self, state: State, first: int, source: Iterator[Batch], recorder: Metrics) -> State:
        """The report of a step is read while the next one runs, but for steps after which something
        is due: that begins with all reports read. A step begins when the one before is done, so
        that a request to stop waits for one step at most.
        """
        last = self.config.train.steps
        self._stop_if_asked(state, first, recorder)
        self._evaluate_and_sample(state, first, recorder, *self._missing(first))
        self.done_at = time.perf_counter()
        for number in range(first, last):
            self._wait()
            self._stop_if_asked(state, number, recorder)
            self._profile(number, recorder)
            self.watchdog.phase(f"batch of step {number + 1}")
            asked = time.perf_counter()
            batch = next(source)
            waited = time.perf_counter() - asked
            self.watchdog.phase(f"step {number + 1}")
            state, report = self.step(state, batch)
            self._read_report(recorder)  # of the step before
            self.running = number + 1, report, waited
            if any(self._due(number + 1)):
                self._read_report(recorder)
                if number + 1 < last:  # the last one ends the run anyway
                    self._stop_if_asked(state, number + 1, recorder)
                self._between_steps(state, number + 1, recorder)
                self.done_at = time.perf_counter()  # the next step's time is its own
        self._read_report(recorder)
        self._profile(last, recorder)
        return state

    def _wait(self) -> None:
        """Waits for the step that runs, if one does."""
        if self.running and self.ended_at is None:
            jax.block_until_ready(self.running[1])
            self.ended_at = time.perf_counter()

    def _read_report(self, recorder: Metrics) -> None:
        """Waits for the step that runs, if one does, and records it."""
        if self.running is None:
            return
        self._wait()
        (step, report, waited_s), self.running = self.running, None
        report = jax.device_get(report)
        step_s, self.done_at, self.ended_at = self.ended_at - self.done_at, self.ended_at, None
        self.taken_s.append(step_s)
        recorder.train(self._record(step, report, step_s, waited_s))
        for text in self.train_data.used_up(step):
            say(text)
        if report["skipped_in_row"]:
            self._tell_left_out(step, report)
        self._stop_if_lost(step, report)
        if self.saved:
            c = self.config.checkpoint
            self.saved.stop_if_old(step, c.max_age_steps or 10 * c.every_steps)

    def _record(
        self, step: int, report: dict[str, Any], step_s: float, waited_s: float
    ) -> dict[str, Any]:
        t, stats = self.config.train, report["stats"]
        tokens = t.sequences * t.sequence_length
        rate = tokens / step_s
        return {
            "step": step,
            "tokens": step * tokens,
            "loss/train": float(stats.loss),
            "loss/cross_entropy": float(stats.cross_entropy),
            "loss/balance": float(stats.balance),
            "loss/z": float(stats.z),
            "grad_norm": float(report["grad_norm"]),
            "lr": float(report["lr"]),
            "tokens_per_s": rate,
            "step_s": step_s,
            "data_wait_s": waited_s,
            "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
            "skipped": int(report["skipped"]),
            "checkpoint/age_steps": self.saved and self.saved.age_steps(step),
        } | self.train_data.progress(step)

    def _tell_left_out(self, step: int, report: dict[str, Any]) -> None:
        """A line on the console, and one in skipped.jsonl with the windows of the step's batch."""
        rows = np.arange(self.config.train.sequences)
        loss, norm = float(report["stats"].loss), float(report["grad_norm"])
        median = float(report.get("median", math.inf))  # infinite where there is none
        why = "spike" if report.get("spike") else "not finite"
        name, beside = "skipped.jsonl", f" after a median of {median:.4g}"
        say(
            f"step {step} is not applied ({why}): loss {loss:.4f}, gradient norm {norm:.4g}"
            f"{beside if why == 'spike' else ''}; the windows of its batch are in "
            f"{self.named.path(name)}"
        )
        record = {"step": step, "why": why, "loss": loss, "grad_norm": norm, "median": median}
        record["windows"] = self.train_data.windows_of(step - 1, rows).tolist()
        metrics.append(self.folder / name, [record])

    def _stop_if_lost(self, step: int, report: dict[str, Any]) -> None:
        t = self.config.train
        if report["skipped_in_row"] < t.max_skipped_in_row:
            return
        why, mend = "had a loss or gradient norm that was not finite", "Lower --optimizer.lr"
        if t.skip_spikes:
            why += f", or a norm above {t.skip_spikes} (--train.skip_spikes) times the median,"
            mend += f", give a larger --train.skip_spikes, as {2 * t.skip_spikes}"
        raise ValueError(
            f"stopped after step {step}: {t.max_skipped_in_row} steps in a row {why} and were not "
            f"applied (--train.max_skipped_in_row). {mend}, or look at the data, as with python "
            f"data/show.py --run {self.named} --step {step}; the last checkpoint is in "
            f"{self.named.checkpoints}."
        )

    def _must_agree(self, state: State, step: int) -> None:
        """Raises Fault, in every process, where devices differ in what they should hold alike."""
        told = self.replicas(state)
        if told:
            raise Fault(
                f"stopped after step {step}: {told}, and should not: a device failed in memory or "
                "arithmetic (--run.check_replicas_every). This state is not saved; the last "
                f"checkpoint in {self.named.checkpoints} stays. Start the run again, and "
                "without that device's host if it is named again."
            )

    def _due(self, step: int) -> tuple[bool, bool, bool, bool]:
        """Whether to evaluate, to sample, to save and to compare replicas after `step` steps."""

        def due(every: int) -> bool:
            return step == self.config.train.steps or (every > 0 and step % every == 0)

        evaluate, sample = due(self.config.eval.every_steps), due(self.config.sample.every_steps)
        save, every = due(self.config.checkpoint.every_steps), self.config.run.check_replicas_every
        return evaluate, sample, save, self.replicas is not None and (save or step % every == 0)

    def _missing(self, step: int) -> tuple[bool, bool]:
        """Whether to evaluate and to sample before anything else: where a new run begins with other
        weights, or the run was stopped after its step and before what was due then.
        """
        if step == 0:
            return bool(self.config.run.init), False
        due = np.array(self._due(step)[:2])
        if is_primary():
            done = [metrics.has(self.folder / name, step, key) for name, key in RECORDED]
            due &= ~np.array(done)
        return tuple(multihost_utils.broadcast_one_to_all(due).tolist())

    def _between_steps(self, state: State, step: int, recorder: Metrics) -> None:
        """What is due after `step` steps."""
        evaluate, sample, save, compare = self._due(step)
        if compare:  # first: what is saved has been compared
            self._must_agree(state, step)
        self._evaluate_and_sample(state, step, recorder, evaluate, sample)
        if save:  # last: what was recorded up to a checkpoint is not recorded again
            self._save(state, step, recorder)

    def _evaluate_and_sample(
        self, state: State, step: int, recorder: Metrics, evaluate: bool, sample: bool
    ) -> None:
        if evaluate:
            self.watchdog.phase(f"evaluation after step {step}")
            recorder.evaluation({"step": step} | self.validation(state.weights))
        if sample and self.sample is not None:
            self.watchdog.phase(f"samples after step {step}")
            self._write_samples(self.sample(state.weights, step))

    def _save(self, state: State, step: int, recorder: Metrics) -> None:
        if self.saved is None:
            return
        self.watchdog.phase(f"save of step {step}")
        self.stop.save_s = self.saved.longest_s

        def records_first() -> None:
            recorder.sync()
            self.named.send()

        self.saved.save(
            step,
            checkpoint.reshaped(state, checkpoint.stored_shapes(self.shapes)),
            checkpoint_config(self.config, self.train_data),
            before=records_first,
        )

    def _stop_if_asked(self, state: State, step: int, recorder: Metrics) -> None:
        """Saves and raises Stopped, in all processes, where the run has to stop."""
        if not self.stop.reached():
            return
        self._read_report(recorder)
        if step > self.first:
            if self.replicas:
                self._must_agree(state, step)
            self._save(state, step, recorder)
        if self.saved is None:
            raise self.stop.stopped("nothing is saved, by --checkpoint.every_steps 0")
        self.watchdog.phase("save at the end")
        raise self.stop.stopped(f"the newest checkpoint is {self.saved.newest_whole()}")

    def _write_samples(self, samples: list[dict[str, Any]]) -> None:
        for sample in samples:
            say(f"step {sample['step']}  {sample['prompt']!r} -> {sample['text']!r}")
        metrics.append(self.folder / "samples.jsonl", samples)

    def _profile(self, number: int, recorder: Metrics) -> None:
        """Starts or ends the trace of `profile.steps` steps."""
        p, folder = self.config.profile, self.folder / "profile"
        if p.steps and number == p.first_step:
            self._read_report(recorder)  # the trace begins with the next step
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
            self.tracing = True
        # A run that resumed in between has begun none.
        if self.tracing and number == min(p.first_step + p.steps, self.config.train.steps):
            self._read_report(recorder)
            jax.profiler.stop_trace()
            self.tracing = False
            try:
                from planning import timeline  # late: training needs nothing else of it

                for file in folder.rglob("perfetto_trace.json.gz"):
                    timeline.name_layers(file, self.step.as_text())
            except Exception as error:  # the trace is there, and training does not need it
                say(f"warning: layers are not named in the trace: {error!r}")
            name = self.named.path(folder.name)
            say(
                f"trace of steps {p.first_step} to {number - 1}: {name} (open "
                "perfetto_trace.json.gz in Perfetto)"
            )

    def measured(self) -> str:
        """Memory and step time as they were, beside the plan that was printed at the start."""
        memory, source = train.peak_bytes(self.mesh, self.step)
        later = self.taken_s[1:] or self.taken_s
        seconds = f"; {statistics.median(later):.3g} s per step (median)" if later else ""
        return f"measured: {memory / utils.GIB:.3g} GiB per device ({source}){seconds}"


def batches(config: Config, mesh: Mesh, data: Mixture, first_step: int) -> Iterator[Batch]:
    """The batch of each step from `first_step` on, made ahead by threads."""
    t = config.train

    def batch(step: int) -> Batch:
        rows = partial(data.rows, step)
        return train.put_batch(mesh, t.microbatches, rows, (t.sequences, t.sequence_length))

    return prefetch(batch, range(first_step, t.steps))


def prefetch(
    function: Callable[[Any], Result], found: Iterable[Any], depth: int = AHEAD_STEPS
) -> Iterator[Result]:
    """function(x) for each x, in order, computed up to `depth` ahead, each in a thread.

    An error of the function is raised where its result would have come. close() of the iterator
    drops what is under way and ends the threads.
    """
    pool = ThreadPoolExecutor(depth, thread_name_prefix="prefetch")
    pending: collections.deque[Future[Result]] = collections.deque()
    try:
        for x in found:
            pending.append(pool.submit(function, x))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
