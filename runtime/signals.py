"""Requests to stop: signals and the time limit, agreed on by all processes of a run.

In a job of several processes, JAX's preemption service handles SIGTERM: it agrees with the other
processes on a step at which all stop. Every other request is turned into SIGTERM there.
"""

import contextlib
import os
import signal
import time
from types import FrameType

import jax
from jax.experimental import multihost_utils

from runtime.errors import Exit, Stopped
from runtime.phases import Phases


class StopRequest:
    """A context that handles SIGTERM, SIGINT, SIGHUP and SIGUSR1 as requests to stop.

        if stop.reached():
            ...  # save
            raise stop.stopped("The newest checkpoint is of step 12.")

    A second SIGINT ends the process at once. Other signals after the first have no effect, because
    schedulers send several.
    """

    def __init__(self, phases: Phases, limit_s: float | None = None):
        """limit_s  time from now on within which the run must have stopped"""
        self._phases, self._limit_s, self._started = phases, limit_s, time.monotonic()
        self.save_s = 0.0  # longest time of a save until its files were complete
        self._several = jax.distributed.is_initialized()
        self._why, self._code, self._point, self._reached = "", Exit.TERMINATED, 0, False

    def __enter__(self) -> "StopRequest":
        self._before = {}
        numbers = [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM]
        for number in numbers[: 3 if self._several else 4]:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        if not (kind and issubclass(kind, Stopped)):  # after Stopped, more signals may follow
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        alone = number == signal.SIGINT and not self._several
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # so that a second one ends a hanging program
        self.request(signal.Signals(number).name, Exit.INTERRUPTED if alone else Exit.TERMINATED)

    def request(self, why: str, code: int = Exit.TERMINATED) -> None:
        """Stop all processes at the next safe point."""
        if self._why:
            return
        self._why, self._code = why, code
        with contextlib.suppress(OSError):
            kind = self._phases.name.split()[0]
            os.write(2, f"{why}: the run stops after this {kind}\n".encode())
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, *phases: str) -> bool:
        """Return whether to save and stop here. All processes call this at the same points.

        phases  evaluation or samples that follow here, for the time limit
        """
        if self._limit_s is not None and self._left_s(phases) < 0:
            self.request("--run.time_limit")
        if not self._reached and self._several:  # JAX returns True at one point only
            self._reached = multihost_utils.reached_preemption_sync_point(self._point)
            self._point += 1
        return self._reached or (bool(self._why) and not self._several)

    def _left_s(self, phases: tuple[str, ...]) -> float:
        """Return the time left until the run must begin to stop: one more phase, or these, and a
        save. The first evaluation and the first samples compile, so they count as the compilation
        of the step.
        """
        longest = self._phases.longest_s
        save = max(30.0, longest.get("save", 0.0), self.save_s)  # the next may be slower
        work = max(longest.get(kind, 0.0) for kind in ("step", "evaluation", "samples"))
        compile_s = longest.get("compile", 0.0)
        work = max(work, sum(longest.get(kind, compile_s) for kind in phases))
        work *= 1 + self._several  # several processes agree on the point after the next
        return self._limit_s - (time.monotonic() - self._started) - 1.2 * (work + save)

    def stopped(self, saved: str) -> Stopped:
        """Return the exception to raise after the save. `saved` says what can be resumed."""
        why = self._why or "SIGTERM"
        return Stopped(f"{why}: stopped. {saved}", self._code)
