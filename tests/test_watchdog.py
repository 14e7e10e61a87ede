"""A process that hangs is ended, with the stacks of its threads."""

import os
import time

import pytest

import watchdog
from faults import Exit
from watchdog import Watchdog


@pytest.fixture
def ended(monkeypatch):
    """Exit codes. The process does not end here, so there may be several."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    return codes


def test_a_phase_that_exceeds_its_limit_ends_the_process_with_all_stacks(ended, capfd):
    with Watchdog(0.1) as dog:
        dog.phase("save of step 7")
        time.sleep(0.5)
    assert set(ended) == {Exit.AGAIN}
    printed = capfd.readouterr().err
    assert "save of step 7 exceeds" in printed and "--run.stall_minutes" in printed
    assert "test_watchdog.py" in printed and printed.count("hread") > 1


def test_a_phase_may_have_a_limit_of_its_own(ended):
    with Watchdog(0.1) as dog:
        dog.phase("compile", limit_s=60)
        time.sleep(0.3)
        assert not ended
        dog.phase("step 1")
        time.sleep(0.3)
    assert set(ended) == {Exit.AGAIN}


def test_phases_that_end_in_time_do_not_end_the_process(ended):
    with Watchdog(0.2) as dog:
        for step in range(20):
            dog.phase(f"step {step}")
            time.sleep(0.03)
    assert not ended


def test_time_in_which_the_machine_slept_does_not_count(ended, monkeypatch):
    real, slept = time.monotonic, [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: real() + slept[0])
    with Watchdog(0.5) as dog:
        dog.phase("step 1")
        time.sleep(0.1)
        slept[0] = 3600
        time.sleep(0.1)
    assert not ended


def test_the_longest_phase_of_each_kind_is_known(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    with Watchdog(60) as dog:
        for name, seconds in (("step 1", 0.05), ("step 2", 0.3), ("save of step 2", 0.1)):
            dog.phase(name)
            time.sleep(seconds)
        dog.phase("step 3")
    assert 0.2 < dog.longest_s["step"] < 1 and 0.03 < dog.longest_s["save"] < dog.longest_s["step"]
