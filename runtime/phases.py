"""Phases of a run: end one that hangs, and measure the goodput.

goodput = time in steps that are in the final weights / time from the first start to the last end
(Google, https://github.com/AI-Hypercomputer/ml-goodput-measurement). The remaining time is divided
by the phase. `start` holds connections, opening of the data and initial weights; `saves` the time
for which they block the loop; `repeated` the steps that a kill lost and that ran again; `down` the
time between two starts, with the imports.

`goodput.jsonl` has one line per start, written every WRITE_S seconds, before saves and at the end.
The time from the last write to a kill counts as `down`. A gap between starts counts as 0 after the
run's end, and if it is negative or above MAX_DOWN_S: a clock was set, or the run paused.
"""

import faulthandler
import itertools
import os
import sys
import threading
import time
from pathlib import Path

from runtime import console, jsonl
from runtime.errors import Exit

TICK_S = 0.5
KINDS = {  # by the first word of a phase; other words are kinds themselves
    "opening": "start",
    "initial": "start",
    "step": "steps",
    "batch": "data wait",
    "save": "saves",
}
WRITE_S, MAX_DOWN_S = 10.0, 7 * 24 * 3600.0


class Phases:
    """A context that sums the wall time of phases by kind, and watches the current phase in a
    thread: if it exceeds the limit, the process ends with exit code 75 and all stacks.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self.name, self._watched_s = "start", 0.0  # of the current phase
        self.longest_s: dict[str, float] = {}  # by the first word of a phase
        self._seconds, self._since = {"steps": 0.0}, time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> "Phases":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """Begin a phase."""
        with self._lock:
            word = self.name.split()[0]
            self.longest_s[word] = max(self.longest_s.get(word, 0.0), self._watched_s)
            self._seconds, self._since = self.seconds(), time.monotonic()
            self.name, self._watched_s = name, 0.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind until now."""
        kind = KINDS.get(word := self.name.split()[0], word)
        spent_s = self._seconds.get(kind, 0.0) + time.monotonic() - self._since
        return self._seconds | {kind: spent_s}

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            passed_s, last = now - last, now
            with self._lock:
                self._watched_s += min(passed_s, 2 * TICK_S)  # time in suspend does not count
                if self._watched_s > self._limit_s:
                    self._end()

    def _end(self) -> None:
        try:
            faulthandler.dump_traceback(2)
            limit = f"{self._limit_s / 60:.3g} minutes (--run.stall_minutes)"
            print(f"{self.name} exceeds {limit}: see the stacks above", file=sys.stderr, flush=True)
        finally:
            os._exit(Exit.RETRY)


class GoodputLog:
    """A context with the line of this start in goodput.jsonl, written by process 0."""

    def __init__(self, folder: Path, phases: Phases, step: int):
        """step  steps done; later steps in metrics.jsonl will be repeated"""
        self._file, self._phases, self._failed = folder / "goodput.jsonl", phases, False
        self._before = read(folder) if console.is_primary() else []
        # Steps after `step` that the last line counts; their data wait is of another kind.
        last, records = self._before[-1]["step"] if self._before else 0, folder / "metrics.jsonl"
        lost = [r for r in jsonl.read(records) if "step_s" in r and step < r["step"] <= last]
        lost_s = sum(max(0.0, r["step_s"] - r["data_wait_s"]) for r in lost)
        begin = time.time() - sum(phases.seconds().values())
        self._line = {"begin": begin, "step": step, "repeated_s": lost_s}
        self.write()

    def __enter__(self) -> "GoodputLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Write the line; the run has ended, unless an error did."""
        if kind is None or issubclass(kind, Exception):
            self.write(ended=kind is None)

    def after_step(self, step: int) -> None:
        """Update the line, and write it if the last write was WRITE_S seconds ago."""
        self._line["step"] = step
        if time.monotonic() - self._written_at > WRITE_S:
            self.write()

    def write(self, ended: bool = False) -> None:
        """ended  the run has finished its last step"""
        self._written_at = time.monotonic()
        self._line |= {"end": time.time(), "seconds": self._phases.seconds(), "ended": ended}
        try:
            if console.is_primary():
                jsonl.write(self._file, [*self._before, self._line])
        except OSError as error:
            if not self._failed:
                console.log(f"warning: {self._file} cannot be written: {error}")
            self._failed = True


def read(folder: Path) -> list[dict]:
    """Return the lines, oldest start first."""
    return jsonl.read(folder / "goodput.jsonl")


def total_seconds(lines: list[dict]) -> dict[str, float]:
    """Return the seconds of each kind over these starts."""
    kinds = (kind for line in lines for kind in line["seconds"])
    spent = {kind: sum(line["seconds"].get(kind, 0.0) for line in lines) for kind in kinds}
    spent["repeated"] = min(sum(line["repeated_s"] for line in lines), spent["steps"])
    spent["steps"] -= spent["repeated"]
    gaps = [b["begin"] - a["end"] for a, b in itertools.pairwise(lines) if not a["ended"]]
    return spent | {"down": sum(gap for gap in gaps if 0 < gap < MAX_DOWN_S)}


def summary(lines: list[dict]) -> str:
    """Return one line with the goodput and the shares of the other kinds, largest first."""
    spent = total_seconds(lines)
    total_s, steps_s = sum(spent.values()), spent.pop("steps")
    rest = sorted((s / total_s, kind) for kind, s in spent.items())[::-1]
    unit, size = next(((u, s) for u, s in (("h", 3600), ("min", 60)) if total_s >= s), ("s", 1))
    others = ", ".join(f"{kind} {share:.1%}" for share, kind in rest if share >= 5e-4)
    share = f"{steps_s / total_s:.1%} of {total_s / size:.1f} {unit}"
    return f"goodput: {share} in steps that count; {others}"
