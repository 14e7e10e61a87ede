"""Requests to stop: signals and the time limit, the same for all processes of a run.

In a job of several processes JAX's preemption service has SIGTERM, and agrees with the others on a
point at which all of them stop. Every other request becomes SIGTERM there.
"""

import contextlib
import os
import signal
import time
from types import FrameType

import jax
from jax.experimental import multihost_utils

from faults import Exit, Stopped
from watchdog import Watchdog


class StopRequest:
    """Whether the run has to stop; a context that handles SIGTERM, SIGINT, SIGHUP and SIGUSR1. A
    second SIGINT ends the process at once; all else after the first request changes nothing, as
    schedulers send several signals.

    if stop.reached():
        ...  # save
        raise stop.stopped("the newest checkpoint is of step 12")
    """

    def __init__(self, watchdog: Watchdog, limit_s: float | None = None):
        """limit_s  from now on, before which the run has to have stopped."""
        self._watchdog, self._limit_s, self._started = watchdog, limit_s, time.monotonic()
        self.save_s = 0.0  # that the longest save took until its files were complete
        self._several = jax.distributed.is_initialized()
        self._why, self._code, self._point, self._reached = "", Exit.TERMINATED, 0, False

    def __enter__(self) -> "StopRequest":
        self._before = {}
        numbers = [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM]
        for number in numbers[: 3 if self._several else 4]:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        if not (kind and issubclass(kind, Stopped)):  # or it ends, and others may still signal it
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        alone = number == signal.SIGINT and not self._several
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the next one, also where a program hangs
        self.request(signal.Signals(number).name, Exit.INTERRUPTED if alone else Exit.TERMINATED)

    def request(self, why: str, code: int = Exit.TERMINATED) -> None:
        """Stop all processes at the next safe point."""
        if self._why:
            return
        self._why, self._code = why, code
        with contextlib.suppress(OSError):
            kind = self._watchdog.name.split()[0]
            os.write(2, f"{why}: the run stops after this {kind}\n".encode())
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self) -> bool:
        """Whether to save and stop here. Every process calls this at the same points of a run."""
        if self._limit_s is not None and self._left_s() < 0:
            self.request("--run.time_limit")
        if not self._reached and self._several:  # JAX returns True at one point only
            self._reached = multihost_utils.reached_preemption_sync_point(self._point)
            self._point += 1
        return self._reached or (bool(self._why) and not self._several)

    def _left_s(self) -> float:
        """Until the run has to begin to stop, in time for what it is at, and a save."""
        longest = self._watchdog.longest_s
        save = max(30.0, longest.get("save", 0.0), self.save_s)  # the next may be slower
        work = max(longest.get(kind, 0.0) for kind in ("step", "evaluation", "samples"))
        work *= 1 + self._several  # these agree on a point that comes after the next one
        return self._limit_s - (time.monotonic() - self._started) - 1.2 * (work + save)

    def stopped(self, saved: str) -> Stopped:
        """What to raise when all that can be saved is; `saved` says what that is."""
        why = self._why or "SIGTERM"
        return Stopped(f"{why}: stopped, and {saved}. Start the run again to resume.", self._code)
