"""End a process that hangs, with the stack of every thread."""

import faulthandler
import os
import sys
import threading
import time

from faults import Exit

TICK_S = 0.5


class Watchdog:
    """A context that ends the process, with exit code 75, when a phase exceeds its limit."""

    def __init__(self, limit_s: float):
        self._default_s = self._limit_s = limit_s  # of a phase that has no limit of its own
        self.name, self._spent_s = "start", 0.0  # of the phase that runs
        self.longest_s: dict[str, float] = {}  # of each kind of phase, which is its first word
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()

    def phase(self, name: str, limit_s: float | None = None) -> None:
        with self._lock:
            kind = self.name.split()[0]
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), self._spent_s)
            self.name, self._spent_s = name, 0.0
            self._limit_s = self._default_s if limit_s is None else limit_s

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(TICK_S):
            passed_s, last = time.monotonic() - last, time.monotonic()
            with self._lock:
                self._spent_s += min(passed_s, 2 * TICK_S)  # a machine that slept did not hang
                if self._spent_s > self._limit_s:
                    self._end()

    def _end(self) -> None:
        try:
            faulthandler.dump_traceback(2)
            limit = f"{self._limit_s / 60:.3g} minutes (--run.stall_minutes)"
            print(f"{self.name} exceeds {limit}: see the stacks above", file=sys.stderr, flush=True)
        finally:
            os._exit(Exit.AGAIN)
