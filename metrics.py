"""What a run tells: lines of JSON always, wandb if asked, and the console. Only process 0 tells.

`metrics.jsonl` holds one object per line, of two kinds, both with `step` (steps done):
- of a step: TRAIN. Losses as they are added to the total (`loss/balance` and `loss/z` with their
  factors), `mfu` null where the chip is unknown, `skipped` steps not applied since the run began,
  `checkpoint/age_steps` since the newest checkpoint that is whole on disk, or since the run began,
  null where none are saved. MEASURED depends on the machine: in two runs that are the same to the
  bit, all else is;
  with a mixture also `data/NAME/sequences` and `data/NAME/epochs` of each dataset, since the run
  began;
- of an evaluation: EVALUATION. `loss/val` of a mixture is the mean by its weights of
  `loss/val/NAME`, which it has too. `loss/val_balance` is without its factor and the mean over MoE
  layers, so that 1 is a perfectly even load; `moe/tokens_per_expert` holds a list per MoE layer.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import utils

TRAIN = (
    *("step", "tokens", "loss/train", "loss/cross_entropy", "loss/balance", "loss/z"),
    *("grad_norm", "lr", "tokens_per_s", "step_s", "data_wait_s", "mfu", "skipped"),
    "checkpoint/age_steps",
)
MIXED = ("data/", "loss/val/")  # what names of a mixture's datasets begin with
MEASURED = ("tokens_per_s", "step_s", "data_wait_s", "mfu", "checkpoint/age_steps")
EVALUATION = ("step", "loss/val", "loss/val_balance", "moe/tokens_per_expert", "moe/dropped")
PLAIN_EVERY_S = 10.0  # between lines on a console that is not a terminal

console = Console()


def is_primary() -> bool:
    """Whether this process writes. Asks jax only where there are several: asking starts devices."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line, above the progress display where there is one. A full log loses it."""
    if is_primary():
        with contextlib.suppress(OSError):
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: arrays as lists, nan and infinity as null."""
    text = json.dumps(value, default=lambda array: np.asarray(array).tolist())
    return json.loads(text, parse_constant=lambda name: None)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, without lines that were cut off in writing."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def has(path: Path, step: int, key: str) -> bool:
    """Whether a record of `step` steps with this key is there."""
    return path.exists() and any(r["step"] == step and key in r for r in read(path))


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Adds lines to a file beside metrics.jsonl, on disk when this returns; only process 0 does.
    What a full disk does not take is lost, and told.
    """
    if not is_primary():
        return
    try:
        with path.open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # what a full disk cut off
            file.writelines((json.dumps(plain(r)) + "\n").encode() for r in records)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        say(f"warning: {path} takes no more records: {error}")


def cut(path: Path, step: int) -> None:
    """Takes out what was recorded after `step` steps, which will be run and recorded again."""
    kept = [record for record in read(path) if 0 < step >= record["step"]]
    replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def replace(path: Path, text: str) -> None:
    """Writes the file at once: a run killed here has the old one or the new one."""
    new = path.with_suffix(".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def summary(record: dict[str, Any], steps: int, left_s: float | None) -> str:
    """One line for people."""
    parts = [f"step {record['step']}/{steps}", f"loss {_number(record['loss/train'], '.4f')}"]
    parts.append(f"{_number(record['tokens_per_s'], ',.0f')} tokens/s")
    parts.append(f"MFU {_number(record['mfu'], '.1%')}")
    if record["skipped"]:
        parts.append(f"{record['skipped']} skipped")
    if left_s is not None:
        hours, rest = divmod(round(left_s), 3600)
        parts.append(f"{hours}:{rest // 60:02}:{rest % 60:02} left")
    return "  ".join(parts)


def evaluation_summary(record: dict[str, Any], steps: int) -> str:
    """One line for people; without experts there is no load to tell of."""
    text = f"step {record['step']}/{steps}  validation loss {_number(record['loss/val'], '.4f')}"
    if not record["moe/tokens_per_expert"]:
        return text
    balance = _number(record["loss/val_balance"], ".3f")
    return f"{text}  balance {balance}  dropped {_number(record['moe/dropped'], '.2%')}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class Metrics:
    """Where the loop sends what it measured."""

    def __init__(
        self,
        config: utils.Config,
        folder: Path,
        step: int = 0,
        wandb_config: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Continues the records of the run in `folder` after `step` steps.

        wandb_config  what wandb shows as the run's settings.
        Raises        ValueError when wandb is asked for and cannot be had.
        """
        self._steps, self._clock = config.train.steps, clock
        self._first = self._shown = None
        self._file = self._wandb = self._progress = None
        self._open = contextlib.ExitStack()
        if not is_primary():
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists():
            cut(path, step)
        if config.wandb.project:
            self._wandb = start_wandb(config, folder, wandb_config or {})
            self._open.callback(self._wandb.finish)
        self._file = self._open.enter_context(path.open("ab", buffering=0))
        self._unwritten = b""
        if console.is_terminal:
            columns = BarColumn(), TextColumn("{task.description}")
            self._progress = self._open.enter_context(Progress(*columns, console=console))
            self._task = self._progress.add_task("", total=self._steps, completed=step)

    def train(self, record: dict[str, Any]) -> None:
        """Records a step: every name of TRAIN and no other."""
        self._show(self._recorded(record, TRAIN))

    def evaluation(self, record: dict[str, Any]) -> None:
        """Records an evaluation: every name of EVALUATION and no other."""
        say(evaluation_summary(self._recorded(record, EVALUATION), self._steps))

    def sync(self) -> None:
        """Returns when what was recorded is on disk. Raises OSError where that does not take it."""
        if self._file is not None:
            self._write("")
            if self._unwritten:
                raise OSError(f"{self._file.name} takes no records")
            os.fsync(self._file.fileno())

    def _recorded(self, record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """The record as JSON has it; written, where this process writes."""
        found = {name for name in record if not name.startswith(MIXED)}
        assert found == set(names), found ^ set(names)
        record = plain(record)
        if self._file is not None:
            self._write(json.dumps(record) + "\n")
        if self._wandb is not None:
            self._wandb.log(for_wandb(record), step=record["step"])
        return record

    def _write(self, text: str) -> None:
        """What a full disk does not take is kept, and written with the next line."""
        told = bool(self._unwritten)
        self._unwritten += text.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not told:
                say(f"warning: records are kept in memory, {self._file.name} takes none: {error}")

    def _show(self, record: dict[str, Any]) -> None:
        """The bar at every step; plain lines at the first and last, and some in between."""
        now, step = self._clock(), record["step"]
        text = summary(record, self._steps, self._left_s(now, step))
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif self._shown is None or step >= self._steps or now - self._shown >= PLAIN_EVERY_S:
            say(text)
            self._shown = now

    def _left_s(self, now: float, step: int) -> float | None:
        """From the steps after the first one seen, which is slower by its compilation."""
        if self._first is None:
            self._first = (now, step)
        first, first_step = self._first
        if step == first_step:
            return None
        return (now - first) / (step - first_step) * max(self._steps - step, 0)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the display and the files."""
        with contextlib.suppress(OSError):  # told when the records were written
            self.sync()
        self._open.close()


def for_wandb(record: dict[str, Any]) -> dict[str, Any]:
    """Numbers as they are; the tokens of a layer's experts as one histogram over the experts."""
    import wandb

    sent = {name: value for name, value in record.items() if not isinstance(value, list)}
    for layer, tokens in enumerate(record.get("moe/tokens_per_expert", [])):
        bins = np.asarray(tokens), np.arange(len(tokens) + 1)
        sent[f"moe/tokens_per_expert/{layer}"] = wandb.Histogram(np_histogram=bins)
    return sent


def start_wandb(config: utils.Config, folder: Path, settings: dict[str, Any]) -> Any:
    """A wandb run that a later start in `folder` continues; offline without WANDB_API_KEY."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"--wandb.project {config.wandb.project} needs the package wandb, which is not "
            f"installed. Install wandb, or leave out --wandb.project."
        ) from error
    identity = folder / "wandb_id"
    if not identity.exists():
        replace(identity, secrets.token_hex(4))
    online = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    mode = os.environ.get("WANDB_MODE", online)
    try:
        run = wandb.init(
            project=config.wandb.project,
            name=config.run.name,
            id=identity.read_text(),
            dir=folder,
            config=settings,
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True),
        )
    except (wandb.errors.Error, OSError) as error:
        raise ValueError(
            f"--wandb.project {config.wandb.project}: wandb could not start in mode {mode}: "
            f"{' '.join(str(error).split())}. Check WANDB_API_KEY and the network, set "
            f"WANDB_MODE=offline, or leave out --wandb.project."
        ) from error
    say(f"wandb: {run.url or f'{mode}, in {run.dir}'}")
    return run
