"""Requests to stop: in one process here, and in several (tests/stand_in.py)."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from processes import environments
from runtime.errors import Exit
from runtime.signals import StopRequest
from runtime.watchdog import Watchdog
from simulated_hosts import wait_for


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, Exit.TERMINATED),
        (signal.SIGHUP, Exit.TERMINATED),
        (signal.SIGUSR1, Exit.TERMINATED),
        (signal.SIGINT, Exit.INTERRUPTED),
    ],
)
def test_a_signal_stops_a_single_process_at_the_next_safe_point(number, code, capfd):
    # A shell has what it starts in the background ignore SIGINT.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest(Watchdog(60)) as stop:
            assert not stop.reached()
            os.kill(os.getpid(), number)
            assert stop.reached() and stop.reached()
            stopped = stop.stopped("The newest checkpoint is of step 3.")
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert stopped.code == code
    assert str(stopped).endswith(": stopped. The newest checkpoint is of step 3.")
    assert f"{number.name}: the run stops after this start\n" in capfd.readouterr().err


def test_a_second_sigterm_changes_nothing():
    with StopRequest(Watchdog(60)) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.stopped("x").code == Exit.TERMINATED and str(stop.stopped("x"))[:7] == "SIGTERM"


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(Watchdog(60)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.reached()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_time_limit_leaves_time_for_a_step_and_a_save():
    dog = Watchdog(60)
    dog.longest_s = {"step": 100.0, "save": 40.0, "compile": 9999.0}
    for limit_s, stops in ((200.0, False), (1.2 * 140 - 1, True)):
        with StopRequest(dog, limit_s) as stop:
            assert stop.reached() == stops
    assert stop.stopped("x").code == Exit.TERMINATED and "--run.time_limit" in str(
        stop.stopped("x")
    )
    with StopRequest(dog, 5000.0) as stop:  # the first evaluation compiles, as the step did
        assert not stop.reached() and stop.reached("evaluation")
    dog.longest_s |= {"compile": 90.0, "samples": 30.0}
    for phases, stops in (("evaluation",), False), (("evaluation", "samples"), True):
        with StopRequest(dog, 1.2 * (110 + 40)) as stop:
            assert stop.reached(*phases) == stops
    dog.longest_s |= {"evaluation": 300.0}
    with StopRequest(dog, 200.0) as stop:
        assert stop.reached()


# --- several processes ----------------------------------------------------------------------------

SECOND_INTERRUPT = """
import signal, time
# A shell has what it starts in the background ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from runtime.signals import StopRequest
from runtime.watchdog import Watchdog
with StopRequest(Watchdog(60)) as stop:
    print("ready", flush=True)
    while not stop.reached():
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep(60)
"""


def test_a_second_sigterm_does_not_end_a_save_and_a_second_interrupt_does():
    process = subprocess.Popen(
        [sys.executable, "-c", SECOND_INTERRUPT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "saving\n"
        for number in (signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT


class Job:
    """Processes of tests/stand_in.py, each in a folder of its own."""

    def __init__(self, folder, count, *words):
        self.logs = [folder / f"{number}.log" for number in range(count)]
        command = [sys.executable, ROOT / "tests" / "stand_in.py", *words]
        self.processes = []
        for log, environment in zip(self.logs, environments(count, 1), strict=True):
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=folder)
                )

    def steps(self, least=1):
        """Returns when all take steps."""
        for log in self.logs:
            wait_for(lambda log=log: re.search(rf"^step {least}/", log.read_text(), re.M))

    def codes(self, within_s=60):
        ends = time.monotonic() + within_s
        try:
            return [process.wait(max(0.1, ends - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_one_process_stops_all_at_the_same_step(tmp_path, number):
    job = Job(tmp_path, 3, "--steps", "2000", "--seconds", "0.05")
    job.steps()
    for _ in range(2):  # as schedulers do
        job.processes[2].send_signal(number)
        time.sleep(0.2)
    assert job.codes() == [143] * 3
    last = {re.search(r"stopped. Step (\d+) is saved", log.read_text())[1] for log in job.logs}
    assert len(last) == 1
    saved = {(tmp_path / f"stand_in_{index}").read_text() for index in range(3)}
    assert saved == last


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_freezes_ends_the_other_with_a_code_that_restarts(
    tmp_path, victim, number
):
    job = Job(tmp_path, 2, "--steps", "2000", "--peer-seconds", "6")
    job.steps()
    started = time.monotonic()
    job.processes[victim].send_signal(number)
    other = job.processes[1 - victim]
    try:
        assert other.wait(60) in (Exit.RETRY, -signal.SIGABRT)
        assert time.monotonic() - started < 6 + 5
    finally:
        job.processes[victim].kill()
    printed = job.logs[1 - victim].read_text()
    if victim == 1:
        assert re.search(r"stopped sending heartbeats\):\n1\n", printed), printed
    else:
        assert "coordination service" in printed or "CoordinationService/Heartbeat" in printed
    job.processes[victim].wait()
