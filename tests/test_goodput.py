"""The wall time of a run, over all its starts, is assigned to kinds that sum to all of it."""

import json
import time

import pytest

import checkpoint
import main
from runtime import cli, goodput, jsonl
from tiny_run import Killed, start

STEP = {"loss/train": 1.0, "data_wait_s": 1.0, "step_s": 5.0}


class Clock:
    """Stands in for the time module; both clocks move by `pass_s` only."""

    def __init__(self, monkeypatch):
        self.now, self.wall_error_s = 1000.0, 0.0
        monkeypatch.setattr(goodput.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(goodput.time, "time", lambda: 1e9 + self.now + self.wall_error_s)
        monkeypatch.setattr(goodput, "IMPORTS_S", 3.0)

    def pass_s(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def phases(clock, times, *named):
    for name, seconds in named:
        times.phase(name)
        clock.pass_s(seconds)


def line(begin=0.0, end=100.0, repeated_s=0.0, ended=False, step=4, **seconds):
    seconds = {"steps": 0.0} | seconds
    numbers = {"begin": begin, "end": end, "repeated_s": repeated_s, "step": step}
    return numbers | {"ended": ended, "seconds": seconds}


def test_every_second_of_a_start_is_of_the_kind_of_its_phase(clock):
    times = goodput.PhaseTimes(60.0)
    clock.pass_s(1)
    named = [("opening of the data", 2), ("restore", 4), ("compile", 8), ("batch of step 1", 0.5)]
    phases(clock, times, *named, ("step 1", 16), ("save of step 1", 32), ("step 2", 64))
    expected = {"start": 6, "restore": 4, "compile": 8, "data wait": 0.5, "saves": 32, "steps": 80}
    assert times.seconds() == expected
    assert sum(expected.values()) == clock.now - 1000 + goodput.IMPORTS_S


def test_the_line_of_a_start_is_written_at_intervals_and_replaced(clock, tmp_path):
    times = goodput.PhaseTimes(60.0)
    account = goodput.GoodputLog(tmp_path, times, 0)
    for step in range(1, 6):
        phases(clock, times, (f"step {step}", 4))
        account.after_step(step)
    [found] = goodput.read(tmp_path)
    assert (found["step"], found["seconds"]["steps"], found["ended"]) == (3, 12, False)
    account.write(ended=True)
    [found] = goodput.read(tmp_path)
    assert (found["step"], found["seconds"]["steps"], found["ended"]) == (5, 20, True)
    assert found["end"] - found["begin"] == 23


def test_steps_that_a_kill_lost_are_repeated_once_and_the_rest_is_down(clock, tmp_path):
    """Killed after 7 steps, of which 6 were in the file; resumed from step 4, twice."""
    times = goodput.PhaseTimes(60.0)
    account = goodput.GoodputLog(tmp_path, times, 0)
    phases(clock, times, *((f"step {step}", 5) for step in range(1, 7)))
    account.after_step(6)
    account.write()
    records = [{"step": step} | STEP for step in range(1, 8)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    clock.pass_s(5 + 50)
    for _ in range(2):  # the second start is killed before it cuts the records
        times = goodput.PhaseTimes(60.0)
        account = goodput.GoodputLog(tmp_path, times, 4)
    jsonl.truncate(tmp_path / "metrics.jsonl", 4)
    phases(clock, times, ("step 5", 5), ("step 6", 5))
    account.write(ended=True)
    first, second, third = lines = goodput.read(tmp_path)
    assert (first["repeated_s"], second["repeated_s"], third["repeated_s"]) == (0, 8, 0)
    spent = goodput.seconds(lines)
    assert spent == {"steps": 32, "start": 9, "repeated": 8, "down": 52}


def test_a_new_run_in_a_folder_without_records_repeats_nothing(clock, tmp_path):
    account = goodput.GoodputLog(tmp_path, goodput.PhaseTimes(60.0), 0)
    account.write()
    assert goodput.read(tmp_path)[0]["repeated_s"] == 0


@pytest.mark.parametrize(
    ("gap_s", "ended", "down_s"),
    [
        (60.0, False, 60.0),
        (-3600.0, False, 0.0),  # the clock was set back
        (20 * 365 * 86400.0, False, 0.0),  # or was at its first second
        (60.0, True, 0.0),  # later steps of a run that had ended
    ],
)
def test_a_clock_that_jumps_adds_no_time(gap_s, ended, down_s):
    before = line(steps=100.0, ended=ended)
    spent = goodput.seconds([before, line(begin=100.0 + gap_s, end=200.0 + gap_s, steps=100.0)])
    assert spent == {"steps": 200.0, "repeated": 0, "down": down_s}


def test_repeated_steps_are_not_more_than_all_steps():
    spent = goodput.seconds([line(steps=10.0, repeated_s=50.0)])
    assert (spent["steps"], spent["repeated"]) == (0.0, 10.0)


def test_a_line_that_was_cut_off_is_skipped(tmp_path):
    good = line(steps=1.0)
    (tmp_path / "goodput.jsonl").write_text(json.dumps(good) + '\n{"begin": 1.0, "en')
    assert goodput.read(tmp_path) == [good]


def test_the_summary_is_one_line_with_the_largest_rest_first():
    lines = [line(steps=3500.0, compile=100.0, repeated_s=20.0), line(begin=190.0, saves=0.1)]
    text = "goodput: 94.3% of 1.0 h in steps that count; compile 2.7%, down 2.4%, repeated 0.5%"
    assert goodput.summary(lines) == text
    assert "100.0% of 2.0 min in steps that count" in goodput.summary([line(steps=120.0)])


def test_a_file_that_cannot_be_written_is_one_warning(clock, tmp_path, capsys):
    account = goodput.GoodputLog(tmp_path / "missing", goodput.PhaseTimes(60.0), 0)
    account.write()
    assert capsys.readouterr().out.count("warning:") == 1


def test_only_process_0_writes(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(goodput.console, "is_primary", lambda: False)
    goodput.GoodputLog(tmp_path, goodput.PhaseTimes(60.0), 0).write(ended=True)
    assert not any(tmp_path.iterdir())


def test_the_age_of_this_process_is_plausible():
    assert 0 < goodput._process_age_s() < 24 * 3600


@pytest.mark.long
def test_a_run_that_was_killed_accounts_for_all_its_starts(data, runs, monkeypatch, capsys):
    """Ends with an error after step 5, and resumes from step 3."""
    began = time.time()
    read_report = main.Loop._read_report

    def killed(self):
        read_report(self)
        if self.goodput_log._line["step"] == 5:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(main.Loop, "_read_report", killed)
        with pytest.raises(Killed):
            start(data, runs, "goodput")
    save, at_save = checkpoint.Checkpoints.save, []

    def seen(self, *given, **named):
        at_save.append(goodput.read(runs / "goodput")[-1]["step"])
        return save(self, *given, **named)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", seen)
    folder = start(data, runs, "goodput", "--run.tensorboard")
    passed_s = time.time() - began
    assert at_save == [6]  # what is sent to a bucket before a save is up to date
    first, second = lines = goodput.read(folder)
    assert (first["step"], first["ended"], second["step"], second["ended"]) == (5, False, 6, True)
    assert second["repeated_s"] > 0 and first["repeated_s"] == 0
    spent = goodput.seconds(lines)
    kinds = {"start", "restore", "compile", "data wait", "evaluation", "samples", "saves"}
    assert kinds < spent.keys() and min(spent.values()) >= 0
    assert sum(spent.values()) <= passed_s + 2 * goodput.IMPORTS_S
    records = jsonl.read(folder / "metrics.jsonl")
    steps_s = sum(r["step_s"] - r["data_wait_s"] for r in records if "step_s" in r)
    assert spent["steps"] == pytest.approx(steps_s, rel=0.5)
    printed = capsys.readouterr().out
    assert goodput.summary(lines) in printed.splitlines()
    assert (folder / "plots" / "wall_time.png").exists()
    assert any((folder / "tensorboard").iterdir())
    assert cli.load(folder / "config.toml").run.tensorboard
