"""A process that hangs is ended, with the stacks of its threads."""

import os
import threading
import time

import pytest

from runtime import watchdog
from runtime.errors import Exit
from runtime.watchdog import Watchdog


class Clock:
    """Stands for `time` in runtime/watchdog.py: it stands still until a test advances it."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now

    def jump(self, seconds: float) -> None:
        """Let the watchdog see this much time pass, in one step."""
        self.wait_for_reads(1)  # the watchdog's thread runs
        self.now += seconds
        self.wait_for_reads(self.reads + 2)  # before the second read the first was acted on

    def advance(self, seconds: float) -> None:
        """Advance by steps that the watchdog does not take for sleep of the machine."""
        for _ in range(round(seconds / watchdog.TICK_S)):
            self.jump(watchdog.TICK_S)

    def wait_for_reads(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while self.reads < count:
            assert time.monotonic() < deadline, "the watchdog does not read the clock"
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(watchdog, "time", clock := Clock())
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    return clock


@pytest.fixture
def ended(monkeypatch):
    """Exit codes. The process does not end here, so there may be several."""
    monkeypatch.setattr(os, "_exit", (codes := []).append)
    return codes


def test_a_phase_that_exceeds_its_limit_ends_the_process_with_all_stacks(ended, clock, capfd):
    with Watchdog(0.1) as dog:
        dog.phase("save of step 7")
        clock.advance(0.2)
    assert set(ended) == {Exit.RETRY}
    printed = capfd.readouterr().err
    assert "save of step 7 exceeds" in printed and "--run.stall_minutes" in printed
    assert "test_watchdog.py" in printed and printed.count("hread") > 1


def test_phases_that_end_in_time_do_not_end_the_process_and_suspend_does_not_count(ended, clock):
    with Watchdog(0.2) as dog:
        for name, seconds in (("step 1", 0.05), ("step 2", 0.15), ("save of step 2", 0.1)):
            dog.phase(name)
            clock.advance(seconds)
        dog.phase("step 3")
        clock.jump(3600)  # the machine sleeps
    assert not ended
    assert dog.longest_s == pytest.approx({"start": 0, "step": 0.15, "save": 0.1})


def test_a_closed_watchdog_cannot_end_the_process_any_more(clock, monkeypatch):
    entered, left = threading.Event(), threading.Event()

    def end(self):
        entered.set()
        time.sleep(0.2)
        left.set()

    monkeypatch.setattr(Watchdog, "_end", end)
    with Watchdog(0.01):
        clock.wait_for_reads(1)  # its thread runs
        clock.now += 1
        assert entered.wait(60)
    assert left.is_set()
