"""Requests to stop in one process; tests/system/test_run_faults.py has several."""

import os
import signal

import pytest

from runtime.errors import Exit
from runtime.phases import Phases
from runtime.signals import StopRequest


@pytest.fixture(autouse=True)
def handlers():
    """A shell has what it starts in the background ignore SIGINT."""
    numbers = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)],
)
def test_a_signal_stops_a_single_process_at_the_next_safe_point(number, code, capfd):
    with StopRequest(Phases(60)) as stop:
        assert not stop.reached()
        os.kill(os.getpid(), number)
        assert stop.reached() and stop.reached()
        stopped = stop.stopped("The newest checkpoint is of step 3.")
        second_ends_the_process = signal.getsignal(number) == signal.SIG_DFL
        assert second_ends_the_process == (number == signal.SIGINT)
    assert signal.getsignal(number) == signal.SIG_DFL
    assert stopped.code == code
    assert str(stopped).endswith(": stopped. The newest checkpoint is of step 3.")
    assert f"{number.name}: the run stops after this start\n" in capfd.readouterr().err


def test_a_second_sigterm_changes_nothing_nor_does_a_signal_that_nohup_ignores():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest(Phases(60)) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.reached()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        stopped = stop.stopped("x")
    assert stopped.code == Exit.TERMINATED and str(stopped).startswith("SIGTERM")


# The duration of an evaluation and of samples that have not run yet is that of the compilation.
@pytest.mark.parametrize(
    ("longest_s", "limit_s", "phases", "stops"),
    [
        ({"compile": 9999.0}, 1.2 * 140 - 1, (), True),
        ({"compile": 9999.0}, 5000.0, ("evaluation",), True),
        ({"compile": 90.0, "samples": 30.0}, 1.2 * 150, ("evaluation",), False),
        ({"compile": 90.0, "samples": 30.0}, 1.2 * 150, ("evaluation", "samples"), True),
        ({"evaluation": 300.0}, 200.0, (), True),
    ],
)
def test_the_time_limit_leaves_time_for_a_step_and_a_save(longest_s, limit_s, phases, stops):
    dog = Phases(60)
    dog.longest_s = {"step": 100.0, "save": 40.0} | longest_s
    stop = StopRequest(dog, limit_s)
    assert stop.reached(*phases) == stops
    assert stop.stopped("x").code == Exit.TERMINATED
    assert ("--run.time_limit" in str(stop.stopped("x"))) == stops
    stop.save_s = limit_s  # until the files of a save were complete
    assert stop.reached()
