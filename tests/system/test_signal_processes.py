"""Requests to stop, and lost processes, in jobs of several (tests/stand_in.py)."""

import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from processes import environments
from runtime.errors import Exit
from simulated_hosts import wait_for


class Job:
    """Processes of tests/stand_in.py, each in a folder of its own."""

    def __init__(self, folder, count, *words):
        self.logs = [folder / f"{number}.log" for number in range(count)]
        command = [sys.executable, find_spec("stand_in").origin, *words]
        self.processes = []
        for log, environment in zip(self.logs, environments(count, 1), strict=True):
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=folder)
                )

    def __enter__(self):
        """Return when all take steps."""
        for log in self.logs:
            wait_for(lambda log=log: re.search("^step 1/", log.read_text(), re.MULTILINE))
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_one_process_stops_all_at_the_same_step(tmp_path, number):
    with Job(tmp_path, 3, "--steps", "2000", "--seconds", "0.05") as job:
        for _ in range(2):  # as schedulers do
            job.processes[2].send_signal(number)
            time.sleep(0.2)
        assert [process.wait(60) for process in job.processes] == [143] * 3
    last = {re.search(r"stopped. Step (\d+) is saved", log.read_text())[1] for log in job.logs}
    assert len(last) == 1
    assert {(tmp_path / f"stand_in_{index}").read_text() for index in range(3)} == last


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_freezes_ends_the_other_with_a_code_that_restarts(
    tmp_path, victim, number
):
    with Job(tmp_path, 2, "--steps", "2000", "--peer-seconds", "6") as job:
        job.processes[victim].send_signal(number)
        assert job.processes[1 - victim].wait(60) in (Exit.RETRY, -signal.SIGABRT)
    printed = job.logs[1 - victim].read_text()
    if victim == 1:
        assert re.search(r"stopped sending heartbeats\):\n1\n", printed), printed
    else:
        assert "coordination service" in printed or "CoordinationService/Heartbeat" in printed
