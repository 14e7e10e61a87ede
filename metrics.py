"""Record what a run measures: metrics.jsonl, the console and, if enabled, wandb and TensorBoard.

Process 0 writes `metrics.jsonl`, one object per line. Both kinds have `step` (steps done):

- A step has the keys TRAIN. `loss/balance` and `loss/z` include their factors; `mfu` is null on an
  unknown chip; `skipped` counts skipped steps since the run began. With a mixture there are also
  `data/NAME/sequences` and `data/NAME/epochs` since the run began. MEASURED depends on the machine.
  All other values are equal in two runs that are bit-identical.
- An evaluation has the keys EVALUATION. `loss/val` of a mixture is the weighted mean of
  `loss/val/NAME`. `loss/val_balance` is the mean over MoE layers without its factor, so that 1 is a
  perfectly even load. `moe/tokens_per_expert` has one list per MoE layer.

runtime/loggers.py sends the same records to wandb and TensorBoard, without any effect on the run.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

import utils
from runtime import loggers
from runtime.console import console, is_primary, log
from runtime.jsonl import plain, truncate

TRAIN = (
    *("step", "tokens", "loss/train", "loss/cross_entropy", "loss/balance", "loss/z"),
    *("grad_norm", "lr", "tokens_per_s", "step_s", "data_wait_s", "mfu", "skipped"),
)
MIXED = ("data/", "loss/val/")  # prefixes of the keys of single datasets
MEASURED = ("tokens_per_s", "step_s", "data_wait_s", "mfu")
EVALUATION = ("step", "loss/val", "loss/val_balance", "moe/tokens_per_expert", "moe/dropped")
LINE_EVERY_S = 10.0  # between lines of steps, above the bar of a terminal


def summary(record: dict[str, Any], steps: int, left_s: float | None) -> str:
    """Return the console line of a step."""
    parts = [f"step {record['step']}/{steps}", f"loss {_number(record['loss/train'], '.4f')}"]
    parts.append(f"{_number(record['tokens_per_s'], ',.0f')} tokens/s")
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record["skipped"]:
        parts.append(f"{record['skipped']} skipped")
    if left_s is not None:
        hours, rest = divmod(round(left_s), 3600)
        parts.append(f"{hours}:{rest // 60:02}:{rest % 60:02} left")
    return "  ".join(parts)


def evaluation_summary(record: dict[str, Any], steps: int) -> str:
    """Return the console line of an evaluation; a dense model has no load."""
    text = f"step {record['step']}/{steps}  validation loss {_number(record['loss/val'], '.4f')}"
    if not record["moe/tokens_per_expert"]:
        return text
    balance = _number(record["loss/val_balance"], ".3f")
    return f"{text}  balance {balance}  dropped {_number(record['moe/dropped'], '.2%')}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class Metrics:
    """A context that records the steps and evaluations of a run."""

    def __init__(
        self,
        config: utils.Config,
        folder: Path,
        step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Continue the records of the run in `folder` after `step` steps."""
        self._steps, self._clock = config.train.steps, clock
        self._first = self._shown = None
        self._file = self._progress = None
        self._sinks = []
        self._open = contextlib.ExitStack()
        if not is_primary():
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists():
            truncate(path, step)
        self._sinks = loggers.open_sinks(config, folder, step)
        for sink in self._sinks:
            self._open.callback(sink.close)
        self._file = self._open.enter_context(path.open("ab", buffering=0))
        self._unwritten = b""
        if console.is_terminal:
            columns = BarColumn(), TextColumn("{task.description}")
            self._progress = self._open.enter_context(Progress(*columns, console=console))
            self._task = self._progress.add_task("", total=self._steps, completed=step)

    def train(self, record: dict[str, Any]) -> None:
        """Record a step, with exactly the keys TRAIN."""
        self._show(self._recorded(record, TRAIN))

    def evaluation(self, record: dict[str, Any]) -> None:
        """Record an evaluation, with exactly the keys EVALUATION."""
        log(evaluation_summary(self._recorded(record, EVALUATION), self._steps))

    def sync(self) -> None:
        """Flush the records to disk. Raises OSError if the disk does not take them."""
        if self._file is not None:
            self._write("")
            if self._unwritten:
                raise OSError(f"{self._file.name} takes no records")
            os.fsync(self._file.fileno())

    def _recorded(self, record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Write the record on process 0; return it as JSON values."""
        found = {name for name in record if not name.startswith(MIXED)}
        assert found == set(names), found ^ set(names)
        record = plain(record)
        if self._file is not None:
            self._write(json.dumps(record) + "\n")
        for sink in self._sinks:
            sink.put(record)
        return record

    def _write(self, text: str) -> None:
        """Write text. What a full disk does not take is kept and written with the next line."""
        warned = bool(self._unwritten)
        self._unwritten += text.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not warned:
                log(f"warning: records are kept in memory, {self._file.name} takes none: {error}")

    def _show(self, record: dict[str, Any]) -> None:
        """Update the progress bar of a terminal; print the first line, the last and some others."""
        now, step = self._clock(), record["step"]
        text = summary(record, self._steps, self._left_s(now, step))
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        if self._shown is None or step >= self._steps or now - self._shown >= LINE_EVERY_S:
            log(text)
            self._shown = now

    def _left_s(self, now: float, step: int) -> float | None:
        """Estimate the time left, without the first step of this start, which is slower."""
        if self._first is None:
            self._first = (now, step)
        first, first_step = self._first
        if step == first_step:
            return None
        return (now - first) / (step - first_step) * max(self._steps - step, 0)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(OSError):  # logged by _write
            self.sync()
        self._open.close()
