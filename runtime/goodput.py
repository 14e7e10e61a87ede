"""Goodput: the share of a run's wall time that is spent in steps that count.

goodput = time in steps that are in the final weights / time from the first start to the last end
(Google, https://github.com/AI-Hypercomputer/ml-goodput-measurement). The remaining time is divided
by the watchdog's phase. `start` holds imports, connections, opening of the data and initial
weights; `saves` the time for which they block the loop; `repeated` the steps that a kill lost and
that ran again; `down` the time between two starts.

`goodput.jsonl` has one line per start, written every WRITE_S seconds, before saves and at the end.
The time from the last write to a kill counts as `down`. A gap between starts counts as 0 after the
run's end, and if it is negative or above MAX_DOWN_S: a clock was set, or the run paused.
"""

import itertools
import os
import time
from pathlib import Path

from runtime import console, jsonl
from runtime.watchdog import Watchdog

KINDS = {  # by the first word of a phase; other words are kinds themselves
    "opening": "start",
    "initial": "start",
    "step": "steps",
    "batch": "data wait",
    "save": "saves",
}
WRITE_S, MAX_DOWN_S = 10.0, 7 * 24 * 3600.0


def _process_age_s() -> float:
    """Return the seconds since this process was started; 0 without /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


IMPORTS_S = _process_age_s()  # most of the imports are done when this module is imported


class PhaseTimes(Watchdog):
    """A watchdog that also sums the wall time of each kind of phase."""

    def __init__(self, limit_s: float):
        super().__init__(limit_s)
        self._seconds, self._since = {"steps": 0.0, "start": IMPORTS_S}, time.monotonic()

    def phase(self, name: str) -> None:
        self._seconds, self._since = self.seconds(), time.monotonic()
        super().phase(name)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind until now."""
        kind = KINDS.get(word := self.name.split()[0], word)
        spent_s = self._seconds.get(kind, 0.0) + time.monotonic() - self._since
        return self._seconds | {kind: spent_s}


class GoodputLog:
    """A context with the line of this start in goodput.jsonl, written by process 0."""

    def __init__(self, folder: Path, times: PhaseTimes, step: int):
        """step  steps done; later steps in metrics.jsonl will be repeated"""
        self._file, self._times, self._failed = folder / "goodput.jsonl", times, False
        self._before = read(folder) if console.is_primary() else []
        # Steps after `step` that the last line counts; their data wait is of another kind.
        last, records = self._before[-1]["step"] if self._before else 0, folder / "metrics.jsonl"
        lost = [r for r in jsonl.read(records) if "step_s" in r and step < r["step"] <= last]
        lost_s = sum(max(0.0, r["step_s"] - r["data_wait_s"]) for r in lost)
        begin = time.time() - sum(times.seconds().values())
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
        self._line |= {"end": time.time(), "seconds": self._times.seconds(), "ended": ended}
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


def seconds(lines: list[dict]) -> dict[str, float]:
    """Return the seconds of each kind over these starts."""
    kinds = (kind for line in lines for kind in line["seconds"])
    spent = {kind: sum(line["seconds"].get(kind, 0.0) for line in lines) for kind in kinds}
    spent["repeated"] = min(sum(line["repeated_s"] for line in lines), spent["steps"])
    spent["steps"] -= spent["repeated"]
    gaps = [b["begin"] - a["end"] for a, b in itertools.pairwise(lines) if not a["ended"]]
    return spent | {"down": sum(gap for gap in gaps if 0 < gap < MAX_DOWN_S)}


def summary(lines: list[dict]) -> str:
    """Return one line with the goodput and the shares of the other kinds, largest first."""
    spent = seconds(lines)
    total_s, steps_s = sum(spent.values()), spent.pop("steps")
    rest = sorted((s / total_s, kind) for kind, s in spent.items())[::-1]
    unit, size = next(((u, s) for u, s in (("h", 3600), ("min", 60)) if total_s >= s), ("s", 1))
    others = ", ".join(f"{kind} {share:.1%}" for share, kind in rest if share >= 5e-4)
    share = f"{steps_s / total_s:.1%} of {total_s / size:.1f} {unit}"
    return f"goodput: {share} in steps that count; {others}"
