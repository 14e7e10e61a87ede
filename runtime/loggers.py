"""Send records to wandb and TensorBoard, if enabled, without any effect on training.

metrics.jsonl has all records; these sinks receive copies. Each sink has its own thread, so that it
cannot delay a step. Its first failure of any kind is one warning; the sink then receives no more
records of this start, and the run continues.
"""

import contextlib
import dataclasses
import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import utils
from runtime.console import log
from runtime.files import write_atomically
from utils import ConfigError

BACKLOG_RECORDS = 10_000  # capacity of a sink's queue; a full queue is a failure
CLOSE_S = 60.0  # timeout of the last records at the end of the run
ABANDON_S = 2.0  # timeout of `abandon`


def check_packages(config: utils.Config) -> None:
    """Raise ConfigError if a package is missing that the config needs."""
    for enabled, flag, package in (
        (config.wandb.project, f"--wandb.project {config.wandb.project}", "wandb"),
        (config.run.tensorboard, "--run.tensorboard", "tensorboardX"),
    ):
        if enabled and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{flag} needs the package {package}, which is not installed. Install it with "
                f"pip install {package}, or remove {flag.split()[0]}."
            )


def open_sinks(config: utils.Config, folder: Path, step: int) -> list["Sink"]:
    """Return the enabled sinks, for the steps after `step` of the run in `folder`."""
    found = []
    if config.wandb.project:
        found.append(Sink("wandb", partial(Wandb, config, folder), abandon_wandb))
    if config.run.tensorboard:
        found.append(Sink("TensorBoard", partial(TensorBoard, folder / "tensorboard", step)))
    return found


class Sink:
    """One destination of records, and the thread that writes to it.

    The first failure, or BACKLOG_RECORDS that wait, is one warning. Later records are dropped.
    """

    def __init__(
        self, name: str, connect: Callable[[], Any], abandon: Callable[[], None] | None = None
    ):
        """
        connect  returns an object with write(record) and close(); the thread calls all three
        abandon  called in another thread at the end of the run if one of these failed
        """
        self.name, self._failed, self._abandon = name, False, abandon
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(BACKLOG_RECORDS)
        self._thread = threading.Thread(target=self._run, args=(connect,), daemon=True, name=name)
        self._thread.start()

    def put(self, record: dict[str, Any] | None) -> None:
        """Pass a record, or None at the end of the run, to the thread. Do not block."""
        if not self._failed:
            try:
                self._queue.put_nowait(record)
            except queue.Full:
                self._fail(f"it does not take records; {BACKLOG_RECORDS} wait")

    def close(self) -> None:
        """Wait at most CLOSE_S seconds for the remaining records."""
        self.put(None)
        self._thread.join(0.0 if self._failed else CLOSE_S)
        if self._thread.is_alive():
            self._fail(f"it did not take the last records within {CLOSE_S:.0f} s")
        if self._failed and self._abandon:
            thread = threading.Thread(target=self._abandon, daemon=True)
            thread.start()
            thread.join(ABANDON_S)

    def _run(self, connect: Callable[[], Any]) -> None:
        try:
            writer = connect()
            while not self._failed and (record := self._queue.get()) is not None:
                writer.write(record)
            writer.close()
        except Exception as error:  # of any kind: training does not depend on it
            self._fail(" ".join(f"{type(error).__name__}: {error}".split()))

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log(
                f"warning: {self.name} receives no more records of this start: {why}. The run "
                "continues, and metrics.jsonl has all of them."
            )


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
                console="off", silent=True, init_timeout=CLOSE_S / 2, finish_timeout=CLOSE_S / 2
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
    """Remove wandb's exit handler, which waits for its process even if that hangs."""
    import wandb

    with contextlib.suppress(Exception):  # the process may have died
        wandb.teardown()


class TensorBoard:
    """TensorBoard events, one file per start.

    Source  https://github.com/lanpa/tensorboardX. The thread of its SummaryWriter hides failures;
            the EventsWriter below it raises.
    """

    def __init__(self, folder: Path, step: int):
        """step  steps done. TensorBoard discards later records of earlier starts."""
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._summary, self._event = summary, event_pb2
        folder.mkdir(exist_ok=True)
        name = f".{os.getpid()}.{step}"  # the package itself adds only second and host
        self._writer = event_file_writer.EventsWriter(str(folder / "events"), name)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step + 1 if step else 0, session_log=start)

    def write(self, record: dict[str, Any]) -> None:
        """Write numbers as scalars, and tokens per expert as one histogram per layer."""
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._add(record["step"], summary=self._summary.scalar(name, value))
        for layer, tokens in enumerate(record.get("moe/tokens_per_expert", [])):
            upper = np.arange(1.0, len(tokens) + 1)  # bin i is expert i
            sums = [float(np.dot(tokens, (upper - 0.5) ** power)) for power in (0, 1, 2)]
            name = f"moe/tokens_per_expert/{layer}"
            histogram = self._summary.histogram_raw(name, 0.0, upper[-1], *sums, upper, tokens)
            self._add(record["step"], summary=histogram)
        self._writer.flush()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, **what))

    def close(self) -> None:
        self._writer.close()
