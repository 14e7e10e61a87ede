"""End a process that hangs, with the stack of every thread."""

import faulthandler
import os
import sys
import threading
import time

from runtime.errors import Exit

TICK_S = 0.5


class Watchdog:
    """A context that ends the process with exit code 75 if a phase exceeds its limit."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self.name, self._spent_s = "start", 0.0  # of the current phase
        self.longest_s: dict[str, float] = {}  # by kind, the first word of a phase
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """Begin a phase."""
        with self._lock:
            kind = self.name.split()[0]
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), self._spent_s)
            self.name, self._spent_s = name, 0.0

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            passed_s, last = now - last, now
            with self._lock:
                self._spent_s += min(passed_s, 2 * TICK_S)  # time in suspend does not count
                if self._spent_s > self._limit_s:
                    self._end()

    def _end(self) -> None:
        try:
            faulthandler.dump_traceback(2)
            limit = f"{self._limit_s / 60:.3g} minutes (--run.stall_minutes)"
            print(f"{self.name} exceeds {limit}: see the stacks above", file=sys.stderr, flush=True)
        finally:
            os._exit(Exit.RETRY)
