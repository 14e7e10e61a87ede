"""A process that hangs is ended, with the stacks of its threads."""

import os
import threading
from types import SimpleNamespace

import pytest

from runtime import watchdog
from runtime.errors import Exit
from runtime.watchdog import Watchdog


def test_a_phase_that_exceeds_its_limit_ends_the_process_with_all_stacks(monkeypatch, capfd):
    codes, ended = [], threading.Event()  # the process does not end here, so there may be several
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code) or ended.set())
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    dog = Watchdog(0.05)
    dog.phase("save of step 7")
    with dog:
        assert ended.wait(60)
    assert set(codes) == {Exit.RETRY}
    printed = capfd.readouterr().err
    assert "save of step 7 exceeds" in printed and "--run.stall_minutes" in printed
    assert "test_watchdog.py" in printed and printed.count("hread") > 1


def test_phases_that_end_in_time_do_not_end_the_process_and_suspend_does_not_count(monkeypatch):
    dog, now = Watchdog(1.2), SimpleNamespace(s=0.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended"))

    def watch(*ticks_s):
        """See these seconds pass, without a thread."""
        left_s = [*ticks_s]

        def wait(_):
            if not left_s:
                return True
            now.s += left_s.pop(0)
            return False

        dog._closed = SimpleNamespace(wait=wait)
        dog._watch()

    for name, ticks_s in (("step 1", [0.5]), ("step 2", [0.5, 0.5]), ("save of step 2", [0.5])):
        dog.phase(name)
        watch(*ticks_s)
    dog.phase("step 3")
    watch(3600.0)  # the machine sleeps
    assert dog.longest_s == pytest.approx({"start": 0, "step": 1.0, "save": 0.5})
