"""Runs whose disk, processes, numbers or devices fail."""

import os
import signal
import socket

import numpy as np
import pytest

from dataset import open_training
from processes import environments, run_all
from runtime import cli, jsonl
from runtime.errors import Exit
from tiny_run import FLAGS, losses, start


def test_a_run_whose_save_fails_ends_with_the_reason_and_resumes(data, runs, capsys):
    flags = "--train.steps 5 --checkpoint.every_steps 2 --eval.every_steps 0 --optimizer.lr 0.06"
    flags, rename = [*flags.split(), "--sample.prompts"], os.rename

    def full(source, to, *how, **where):
        if str(to).endswith("/4"):
            raise OSError(28, "No space left on device")
        return rename(source, to, *how, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", full)
        reason = r"the checkpoints in .*full/checkpoints cannot be used .*No space left on device"
        with pytest.raises(ValueError, match=reason):
            start(data, runs, "full", *flags)
    assert "warning: --optimizer.lr 0.06 is far from what was tuned" in capsys.readouterr().out
    folder = start(data, runs, "full", *flags)
    assert "continues after step 2" in capsys.readouterr().out
    assert [r["step"] for r in jsonl.read(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 5]
    (folder / "checkpoints").rename(folder / "elsewhere")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"5 steps and no checkpoint"):
        start(data, runs, "full", *flags)
    assert (folder / "metrics.jsonl").read_bytes() == before


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


KILLED_AT_THE_END = """
import os, pathlib, signal, sys, time
import jax
import main
from runtime import errors

leave, other_leaves = jax.distributed.shutdown, pathlib.Path(sys.argv[1])

def shutdown():
    if os.environ["JAX_PROCESS_ID"] == "0":
        other_leaves.touch()
        return leave()
    while not other_leaves.exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

jax.distributed.shutdown = shutdown
errors.run_command(lambda: main.run(main.parse(sys.argv[2:])))
"""


def test_a_process_that_is_killed_after_the_last_step_is_named(data, tmp_path):
    flags = "--run.dir", str(tmp_path), "--train.steps", "1", "--run.peer_seconds", "6"
    program = "-c", KILLED_AT_THE_END, str(tmp_path / "leaves")
    places = environments(2, 4)
    codes, logged = run_all(places, *program, *FLAGS, *data, *flags, "--sample.prompts")
    assert codes == [-signal.SIGABRT, -signal.SIGKILL], logged
    assert "validation loss" in logged[0]
    assert "stopped sending heartbeats):\n1\n" in logged[0], logged[0]


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
