"""Record what a run measures: metrics.jsonl, the console and, if enabled, wandb and TensorBoard.

Process 0 writes `metrics.jsonl`, one object per line. Both kinds have `step` (steps done):

- A step has the keys TRAIN. `loss/balance` and `loss/z` include their factors; `mfu` is null on an
  unknown chip; `skipped` counts skipped steps since the run began. With a mixture there are also
  `data/NAME/sequences` and `data/NAME/epochs` since the run began. MEASURED depends on the machine.
  All other values are equal in two runs that are bit-identical.
- An evaluation has the keys EVALUATION. `loss/val` of a mixture is the weighted mean of
  `loss/val/NAME`. `loss/val_balance` is the mean over MoE layers without its factor, so that 1 is a
  perfectly even load. `moe/tokens_per_expert` has one list per MoE layer.

The sinks, wandb and TensorBoard, receive copies. wandb sends them from a process of its own, and
the writer of TensorBoard writes them in a thread.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn

import utils
from runtime import cli
from runtime.console import console, is_primary, log
from runtime.errors import one_line
from runtime.jsonl import plain, truncate
from runtime.storage import write_atomically

TRAIN = (
    *("step", "tokens", "loss/train", "loss/cross_entropy", "loss/balance", "loss/z"),
    *("grad_norm", "lr", "tokens_per_s", "step_s", "data_wait_s", "mfu", "skipped"),
)
MIXED = ("data/", "loss/val/")  # prefixes of the keys of single datasets
MEASURED = ("tokens_per_s", "step_s", "data_wait_s", "mfu")
EVALUATION = (
    *("step", "loss/val", "bits_per_byte", "loss/val_balance"),
    *("moe/tokens_per_expert", "moe/dropped"),
)
LINE_EVERY_S = 10.0  # between lines of steps, above the bar of a terminal
WANDB_S = 30.0  # timeout of wandb at the start and at the end of a run
ABANDON_S = 2.0  # timeout of `abandon_wandb`
BUFFER_BYTES = 64 << 20  # for records while the disk is full, about 100,000


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
        """Continue the records of the run in `folder` after `step` steps: later ones are removed,
        as these steps run again.
        """
        self._steps, self._clock = config.train.steps, clock
        self._first = self._shown = None
        self._file = self._progress = None
        self._sinks, self._is_full = [], False
        self._open = contextlib.ExitStack()
        if not is_primary():
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl", "skipped.jsonl"):
            truncate(folder / name, step)
        if config.wandb.project:
            self._sinks.append(Sink("wandb", partial(Wandb, config, folder), abandon_wandb))
        if config.run.tensorboard:
            connect = partial(TensorBoard, folder / "tensorboard", step)
            self._sinks.append(Sink("TensorBoard", connect))
        for sink in self._sinks:
            self._open.callback(sink.close)
        file = (folder / "metrics.jsonl").open("ab", BUFFER_BYTES)
        self._file = self._open.enter_context(file)
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
            self._file.flush()  # what a full disk did not take
            os.fsync(self._file.fileno())

    def _recorded(self, record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Write the record on process 0; return it as JSON values."""
        present = {name for name in record if not name.startswith(MIXED)}
        assert present == set(names), present ^ set(names)
        record = plain(record)
        if self._file is not None:
            self._write(json.dumps(record) + "\n")
        for sink in self._sinks:
            sink.write(record)
        return record

    def _write(self, text: str) -> None:
        """Write text. What a full disk does not take stays in the buffer until the next flush."""
        try:
            self._file.write(text.encode())
            self._file.flush()
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                log(f"warning: records are kept in memory, {self._file.name} takes none: {error}")
            self._is_full = True

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
        with contextlib.suppress(OSError):
            self._open.close()


# --- wandb and TensorBoard ------------------------------------------------------------------------


def check_packages(config: utils.Config) -> None:
    """Raise ConfigError if a package is missing that the config needs."""
    if config.wandb.project:
        cli.check_packages("--wandb.project", "wandb", "wandb")
    if config.run.tensorboard:
        cli.check_packages("--run.tensorboard", "tensorboardX", "tensorboardX")


class Sink:
    """One destination of records, on which training does not depend: after its first failure of any
    kind, which is one warning, it receives no more.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], abandon: Callable[[], None] = lambda: None
    ):
        """
        connect  returns an object with write(record) and close()
        abandon  called in another thread after a failure, as it may hang
        """
        self._name, self._writer, self._abandon = name, None, abandon
        with self._failing():
            self._writer = connect()

    def write(self, record: dict[str, Any]) -> None:
        if self._writer:
            with self._failing():
                self._writer.write(record)

    def close(self) -> None:
        if self._writer:
            with self._failing():
                self._writer.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            log(
                f"warning: {self._name} receives no more records of this start: "
                f"{type(error).__name__}: {one_line(error)}. The run continues, and metrics.jsonl "
                "has all of them."
            )
            thread = threading.Thread(target=self._abandon, daemon=True)
            thread.start()
            thread.join(ABANDON_S)


class Wandb:
    """A wandb run. A later start in the same folder continues it under the same id.

    wandb is online if WANDB_MODE, `wandb offline` and its credentials (WANDB_API_KEY, `wandb
    login`, netrc, an identity token) allow it. Offline, each start is a folder with this id, and
    `wandb sync` joins them in order of time. wandb ignores the steps that are repeated after a
    resume; their values are the same.
    """

    def __init__(self, config: utils.Config, folder: Path):
        import wandb

        self._histogram = wandb.Histogram
        identity = folder / "wandb_id"
        if not identity.exists():
            write_atomically(identity, secrets.token_hex(4))
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        self._run = wandb.init(
            project=config.wandb.project,
            name=config.run.name,
            id=identity.read_text(encoding="utf-8"),
            dir=folder,
            config=dataclasses.asdict(config),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=WANDB_S, finish_timeout=WANDB_S
            ),
        )
        where = self._run.url if mode == "online" else f"{mode}, in {self._run.dir}"
        log(f"wandb: {where}")

    def write(self, record: dict[str, Any]) -> None:
        """Log numbers as they are, and tokens per expert as one histogram per layer."""
        sent = {name: value for name, value in record.items() if not isinstance(value, list)}
        for layer, tokens in enumerate(record.get("moe/tokens_per_expert", [])):
            bins = np.asarray(tokens), np.arange(len(tokens) + 1)
            sent[f"moe/tokens_per_expert/{layer}"] = self._histogram(np_histogram=bins)
        self._run.log(sent, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def abandon_wandb() -> None:
    """Remove wandb's exit handler, which waits for its process even if that has died."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()


class TensorBoard:
    """TensorBoard events, one file per start."""

    def __init__(self, folder: Path, step: int):
        """step  steps done. TensorBoard discards later records of earlier starts."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(folder),
            purge_step=step + 1 if step else 0,
            filename_suffix=f".{os.getpid()}.{step}",  # the package adds only second and host
            flush_secs=10,
        )

    def write(self, record: dict[str, Any]) -> None:
        """Write numbers as scalars, and tokens per expert as one histogram per layer."""
        step = record["step"]
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, step)
        for layer, tokens in enumerate(record.get("moe/tokens_per_expert", [])):
            upper = np.arange(1.0, len(tokens) + 1)  # bin i is expert i
            sums = [float(np.dot(tokens, (upper - 0.5) ** power)) for power in (0, 1, 2)]
            name = f"moe/tokens_per_expert/{layer}"
            self._writer.add_histogram_raw(name, 0.0, upper[-1], *sums, upper, tokens, step)

    def close(self) -> None:
        self._writer.close()
