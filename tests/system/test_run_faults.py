"""Runs whose disk, processes, numbers or devices fail, and requests to stop jobs of several."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest

from dataset import open_training
from processes import environments, run_all
from runtime import cli, jsonl
from runtime.errors import Exit
from simulated_hosts import wait_for
from tiny_run import FLAGS, losses, start


def test_a_run_whose_save_fails_ends_with_the_reason_and_resumes(data, runs, capsys):
    flags = "--train.steps 5 --checkpoint.every_steps 2 --eval.every_steps 0 --optimizer.lr 0.9"
    flags, rename = [*flags.split(), "--sample.prompts"], os.rename

    def full(source, to, *how, **where):
        if str(to).endswith("/4"):
            raise OSError(28, "No space left on device")
        return rename(source, to, *how, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", full)
        reason = r"full/checkpoints cannot be used .*No space left on device"
        with pytest.raises(ValueError, match=reason):
            start(data, runs, "full", *flags)
    assert "warning: --optimizer.lr 0.9 is far from what was tuned" in capsys.readouterr().out
    folder = start(data, runs, "full", *flags)
    assert "continues after step 2" in capsys.readouterr().out
    assert [r["step"] for r in jsonl.read(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 5]


ALONE = """
import sys
import main
from runtime import errors
from runtime import distributed
distributed.CONNECT_S = 3
errors.run_command(lambda: main.run(main.parse(sys.argv[1:])))
"""


def test_a_process_that_finds_no_others_ends_with_a_code_to_retry(data, tmp_path):
    """Of one job only the first process is started, of another only the second."""
    jobs = environments(2, 4), environments(2, 4)
    alone = [job[number] for number, job in enumerate(jobs)]
    flags = [*FLAGS, *data, "--run.dir", str(tmp_path)]
    codes, (first, second) = run_all(alone, "-c", ALONE, *flags)
    assert codes == [-signal.SIGABRT, Exit.RETRY]
    assert "process 0 of 2 connects to" in first and "DEADLINE_EXCEEDED" in first
    missing = f"error: process 0 at {alone[1]['JAX_COORDINATOR_ADDRESS']}: "
    assert missing in second and "Does it run, and is the port open" in second
    assert not any(tmp_path.iterdir())


def test_two_processes_skip_the_same_bad_steps_and_name_a_device_that_differs(data, runs, whole):
    """Steps 2 and 4 are not finite, and after step 6 a device differs (tests/faulty_run.py)."""
    flags = "--run.name faulty --sample.prompts --eval.every_steps 0 --run.check_replicas_every 2"
    flags = [*FLAGS, *data, *flags.split(), "--run.dir", str(runs)]
    places = environments(2, 4, JAX_DEFAULT_MATMUL_PRECISION="highest")
    codes, logged = run_all(places, "tests/faulty_run.py", *flags)
    for code, text in zip(codes, logged, strict=True):
        assert code == Exit.RETRY, logged
        assert "stopped after step 6: weights.last.norm on device " in text
        assert f"(process 1, host {socket.gethostname()}) differs from 7 other devices" in text
    folder = runs / "faulty"
    saved = [p.name for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
    assert saved == ["3"]
    assert "step 2 is not applied (not finite)" in logged[0] and "is not applied" not in logged[1]
    records = jsonl.read(folder / "metrics.jsonl")
    assert [r["skipped"] for r in records if "skipped" in r] == [0, 1, 1, 2, 2, 2]
    assert [step for step, loss in enumerate(losses(folder), 1) if loss is None] == [2, 4]
    assert losses(folder)[0] == pytest.approx(losses(whole)[0], rel=1e-6)
    windows = open_training(cli.load(folder / "config.toml")).windows_of
    found = [(r["step"], r["windows"]) for r in jsonl.read(folder / "skipped.jsonl")]
    assert found == [(step, windows(step - 1, np.arange(8)).tolist()) for step in (2, 4)]


# --- without a model, in tests/stand_in.py ------------------------------------------------------


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


def test_a_request_to_one_process_stops_all_at_the_same_step(tmp_path):
    with Job(tmp_path, 3, "--steps", "2000", "--seconds", "0.05") as job:
        for _ in range(2):  # as schedulers do
            job.processes[2].send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert [process.wait(60) for process in job.processes] == [143] * 3
    last = {re.search(r"stopped. Step (\d+) is saved", log.read_text())[1] for log in job.logs}
    assert len(last) == 1
    assert {(tmp_path / f"stand_in_{index}").read_text() for index in range(3)} == last


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
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
