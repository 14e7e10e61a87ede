"""Run commands in processes, some at a time."""

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runtime.errors import Exit, Stopped

POLL_S = 1.0


def run_all(
    slots: Sequence[int],
    missing: Callable[[set[Any]], Iterable[Any]],
    start: Callable[[Any, int], subprocess.Popen[bytes]],
    ended: Callable[[Any, int], None],
    seconds: float = math.inf,
) -> None:
    """Run tasks, one at a time in each slot, until none is missing or `seconds` have passed.

    Processes that still run receive SIGTERM then, and after an error or a request to stop.

    missing  from the running tasks to those that may start
    start    starts a task in a slot
    ended    receives a task and its exit code, negative for a signal
    Raises   Stopped after Ctrl-C or SIGTERM
    """

    def stop(number: int, _: Any) -> None:
        code = Exit.INTERRUPTED if number == signal.SIGINT else Exit.TERMINATED
        raise Stopped("stopped. Start the same command again to resume.", code)

    running: dict[int, tuple[Any, subprocess.Popen[bytes]]] = {}
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, stop))
        stack.callback(lambda: [process.wait() for _, process in running.values()])
        stack.callback(lambda: [process.terminate() for _, process in running.values()])
        while time.monotonic() < deadline:
            for slot in [s for s, (_, process) in running.items() if process.poll() is not None]:
                task, process = running.pop(slot)
                ended(task, process.returncode)
            free = [slot for slot in slots if slot not in running]
            for slot, task in zip(free, missing({t for t, _ in running.values()}), strict=False):
                running[slot] = task, start(task, slot)
            if not running:
                return
            time.sleep(POLL_S)
