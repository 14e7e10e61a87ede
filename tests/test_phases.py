"""A phase that hangs ends the process; the wall time of all starts is assigned to kinds."""

import json
import os
import threading
from types import SimpleNamespace

import pytest

from runtime import jsonl, phases
from runtime.errors import Exit
from runtime.phases import GoodputLog, Phases

STEP = {"loss/train": 1.0, "data_wait_s": 1.0, "step_s": 5.0}


@pytest.fixture
def clock(monkeypatch):
    """Stands in for the time module: both clocks move when a test moves `now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(phases.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(phases.time, "time", lambda: 1e9 + clock.now)
    return clock


def spend(clock, times, *named):
    for name, seconds in named:
        times.phase(name)
        clock.now += seconds


def line(begin=0.0, end=100.0, repeated_s=0.0, ended=False, step=4, **seconds):
    seconds = {"steps": 0.0} | seconds
    numbers = {"begin": begin, "end": end, "repeated_s": repeated_s, "step": step}
    return numbers | {"ended": ended, "seconds": seconds}


def test_every_second_of_a_start_is_of_the_kind_of_its_phase(clock):
    times = Phases(60.0)
    clock.now += 1
    named = [("opening of the data", 2), ("restore", 4), ("compile", 8), ("batch of step 1", 0.5)]
    spend(clock, times, *named, ("step 1", 16), ("save of step 1", 32), ("step 2", 64))
    expected = {"start": 3, "restore": 4, "compile": 8, "data wait": 0.5, "saves": 32, "steps": 80}
    assert times.seconds() == expected
    assert sum(expected.values()) == clock.now - 1000


def test_the_line_of_a_start_is_written_at_intervals_and_replaced(clock, tmp_path):
    times = Phases(60.0)
    account = GoodputLog(tmp_path, times, 0)
    for step in range(1, 6):
        spend(clock, times, (f"step {step}", 4))
        account.after_step(step)
    [found] = phases.read(tmp_path)
    assert (found["step"], found["seconds"]["steps"], found["ended"]) == (3, 12, False)
    assert found["repeated_s"] == 0
    account.write(ended=True)
    with (tmp_path / "goodput.jsonl").open("a") as file:
        file.write('{"begin": 1.0, "en')  # a line that a kill cut off
    [found] = phases.read(tmp_path)
    assert (found["step"], found["seconds"]["steps"], found["ended"]) == (5, 20, True)
    assert found["end"] - found["begin"] == 20


def test_steps_that_a_kill_lost_are_repeated_once_and_the_rest_is_down(clock, tmp_path):
    """Killed after 7 steps, of which 6 were in the file; resumed from step 4, twice."""
    times = Phases(60.0)
    account = GoodputLog(tmp_path, times, 0)
    spend(clock, times, *((f"step {step}", 5) for step in range(1, 7)))
    account.after_step(6)
    account.write()
    records = [{"step": step} | STEP for step in range(1, 8)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    clock.now += 5 + 50
    for _ in range(2):  # the second start is killed before it cuts the records
        times = Phases(60.0)
        account = GoodputLog(tmp_path, times, 4)
    jsonl.truncate(tmp_path / "metrics.jsonl", 4)
    spend(clock, times, ("step 5", 5), ("step 6", 5))
    account.write(ended=True)
    lines = phases.read(tmp_path)
    assert [line["repeated_s"] for line in lines] == [0, 8, 0]
    assert phases.total_seconds(lines) == {"steps": 32, "start": 0, "repeated": 8, "down": 55}


def test_a_run_is_down_between_starts_but_not_after_its_end_or_before_its_begin():
    for gap_s, ended, down_s in ((60.0, False, 60.0), (-3600.0, False, 0.0), (60.0, True, 0.0)):
        after = line(begin=100.0 + gap_s, end=200.0 + gap_s, steps=100.0)
        spent = phases.total_seconds([line(steps=100.0, ended=ended), after])
        assert spent == {"steps": 200.0, "repeated": 0, "down": down_s}


def test_the_summary_is_one_line_with_the_largest_rest_first():
    lines = [line(steps=3500.0, compile=100.0, repeated_s=20.0), line(begin=190.0, saves=0.1)]
    text = "goodput: 94.3% of 1.0 h in steps that count; compile 2.7%, down 2.4%, repeated 0.5%"
    assert phases.summary(lines) == text
    spent = phases.total_seconds([line(steps=10.0, repeated_s=50.0)])
    assert (spent["steps"], spent["repeated"]) == (0.0, 10.0), "not more than all steps"


def test_a_file_that_cannot_be_written_is_one_warning(clock, tmp_path, capsys):
    account = GoodputLog(tmp_path / "missing", Phases(60.0), 0)
    account.write()
    assert capsys.readouterr().out.count("warning:") == 1


# --- a phase that hangs ---


def test_a_phase_that_exceeds_its_limit_ends_the_process_with_all_stacks(monkeypatch, capfd):
    codes, ended = [], threading.Event()  # the process does not end here, so there may be several
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code) or ended.set())
    monkeypatch.setattr(phases, "TICK_S", 0.01)
    dog = Phases(0.05)
    dog.phase("save of step 7")
    with dog:
        assert ended.wait(60)
    assert set(codes) == {Exit.RETRY}
    printed = capfd.readouterr().err
    assert "save of step 7 exceeds" in printed and "--run.stall_minutes" in printed
    assert "test_phases.py" in printed and printed.count("hread") > 1


def test_phases_that_end_in_time_do_not_end_the_process_and_suspend_does_not_count(monkeypatch):
    dog, now = Phases(1.2), SimpleNamespace(s=0.0)
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: now.s))
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
