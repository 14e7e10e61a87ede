"""The grid of a sweep, the names of its runs, which of them are finished, and their processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import dataset
import sweep
from runtime import cli, processes
from runtime.errors import Exit, Stopped
from tiny_run import FLAGS


def test_a_grid_is_taken_from_flags_and_the_others_are_those_of_main():
    given = (
        "--grid.optimizer.lr 0.1 1e-2 --config a.toml --grid.train-seed=0 1 -- --sample.prompts a b"
    )
    grid, rest = sweep.take_grid([*given.replace("train-", "train.").split(), "--dense"])
    assert grid == {"optimizer.lr": ["0.1", "1e-2"], "train.seed": ["0", "1"]}
    assert rest == ["--config", "a.toml", "--sample.prompts", "a", "b", "--dense"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", r"--grid.optimizer.lr needs values, all different, as --grid.optimizer.lr 0.01 0.02"),
        ("--grid.train.seed", r"--grid.train.seed needs values"),
        ("--grid.train.seed 1 2 1", r"--grid.train.seed needs values, all different"),
        ("--grid.train.sed 1", r"unknown flag --grid.train.sed: did you mean --grid.train.seed\?"),
        ("--grid.run.name a b", r"unknown flag --grid.run.name"),
        ("--grid.optimizer.lr 0.1 -1", r"--optimizer.lr -1.0 is out of range"),
        ("--grid.data.train a/b a_b --model.vocab_size 9", r"two runs would have the name tiny-tr"),
        ("--grid.train.seed 1 --optimizer.lrr 1", r"unknown flag --optimizer.lrr: did you mean"),
    ],
)
def test_a_wrong_grid_is_refused_in_one_line_before_a_run_starts(flags, message, monkeypatch):
    monkeypatch.setattr(processes, "run_all", None)
    monkeypatch.setattr(sys, "argv", ["sweep.py", *flags.split()])
    with pytest.raises(ValueError, match=message) as refused:
        sweep.main()
    assert "\n" not in str(refused.value)


def test_a_run_is_named_by_its_point_and_gets_its_flags_last():
    grid = {"optimizer.lr": ["0.1", "0.2"], "train.seed": ["3"], "data.seed": ["4"]}
    runs = sweep.runs_of(grid, ["--run.name", "a", "--optimizer.lr", "9"])
    assert list(runs) == [f"a-lr-0.{n}-train.seed-3-data.seed-4" for n in (1, 2)]
    flags, config = runs["a-lr-0.2-train.seed-3-data.seed-4"]
    assert flags[:4] == ["--run.name", "a", "--optimizer.lr", "9"]
    assert (config.optimizer.lr, config.train.seed, config.data.seed) == (0.2, 3, 4)
    assert config.run.name == flags[-1] == "a-lr-0.2-train.seed-3-data.seed-4"


def test_a_run_is_finished_with_the_same_settings_and_all_steps(whole, data, runs):
    def finished(*flags):
        given = [*FLAGS, *data, "--run.dir", str(runs), "--run.name", "whole", *flags]
        return sweep.is_finished(dataset.with_vocabulary(cli.parse(given)))

    assert finished() and finished("--optimizer.schedule_steps", "0", "--eval.sequences", "8")
    assert finished("--model.vocab_size", "0", "--model.compute_dtype", "auto")
    assert not finished("--train.steps", "7") and not finished("--run.name", "none")
    with pytest.raises(ValueError, match=r"other settings .*optimizer.lr 0.001 -> 0.002"):
        finished("--optimizer.lr", "0.002")


def sleep(seconds, _):
    code = f"import time; time.sleep({seconds}); raise SystemExit({seconds * 10:.0f})"
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def test_tasks_run_in_slots_and_a_request_or_the_end_of_the_time_stops_them(monkeypatch):
    monkeypatch.setattr(processes, "POLL_S", 0.02)
    waiting, codes, most = iter([0.1, 0.2, 0.3]), {}, []

    def missing(running):
        most.append(len(running))
        return waiting

    processes.run_all(range(2), missing, sleep, codes.__setitem__)
    assert codes == {0.1: 1, 0.2: 2, 0.3: 3} and max(most) == 2
    started = []

    def start(task, slot):
        started.append(sleep(task, slot))
        return started[-1]

    processes.run_all([0], lambda running: {60} - running, start, codes.__setitem__, seconds=0.1)
    assert started.pop().returncode == -signal.SIGTERM
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(Stopped, match=re.escape("Start the same command again")) as stopped:
        processes.run_all([0], lambda running: {60} - running, start, codes.__setitem__)
    assert stopped.value.code == Exit.TERMINATED and time.monotonic() - began < 30
    assert started.pop().returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
