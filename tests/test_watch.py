"""Signals, limits and lost processes; threads stand for processes where there are several."""

import os
import random
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import watch
from faults import Exit, Stopped
from peers import Peers, Place
from processes import free_port
from watch import Watch


@pytest.fixture
def ends(monkeypatch):
    """The exit codes that processes end with; what ends one ends only the thread here."""
    codes = []

    def end(code):
        codes.append(int(code))
        raise SystemExit

    monkeypatch.setattr(watch.os, "_exit", end)
    monkeypatch.setattr(watch, "_wait_for_ever", sys.exit)
    hook = threading.excepthook
    quiet = lambda raised: None if raised.exc_type is SystemExit else hook(raised)  # noqa: E731
    monkeypatch.setattr(threading, "excepthook", quiet)
    monkeypatch.setattr(watch, "TICK_S", 0.02)
    return codes


@pytest.fixture
def watches(ends, monkeypatch):
    """(count) -> the watches of as many processes, joined."""
    monkeypatch.setattr(watch, "_on_abort", lambda function: None)
    address = f"127.0.0.1:{free_port()}"
    made = []

    def several(count, silence_s=60.0):
        with ThreadPoolExecutor(count) as pool:
            places = [Place(address, count, number) for number in range(count)]
            others = list(pool.map(lambda where: Peers(where, silence_s, 60.0), places))
            made.extend(Watch(60.0, peers=each) for each in others)
            list(pool.map(Watch.__enter__, made))  # outside the main thread: no signals
        return made

    yield several
    left = [one for one in made if not one._closed.is_set()]
    with ThreadPoolExecutor(max(1, len(left))) as pool:
        list(pool.map(lambda one: one.__exit__(None, None, None), left))


def comes_true(asked, within_s=30.0):
    until = time.monotonic() + within_s
    while not asked():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_run_at_the_next_point_and_a_second_one_at_once(ends, number, code):
    with Watch(60.0) as one:
        one.ready()
        assert not one.reached()
        one.doing("step 3")
        os.kill(os.getpid(), number)
        comes_true(lambda: one._asked)
        assert one.reached() and one.reached(), "it stays so"
        with pytest.raises(
            Stopped, match=f"{number.name}: stopped, and all is well. Started"
        ) as stopped:
            raise one.stopped("all is well")
        assert stopped.value.code == code and not ends
        os.kill(os.getpid(), number)
        comes_true(lambda: ends == [code])


def test_a_signal_before_there_is_anything_to_save_ends_at_once(ends, capfd):
    with Watch(60.0) as one:
        one.doing("compile")
        os.kill(os.getpid(), signal.SIGTERM)
        comes_true(lambda: ends == [143])
    assert "SIGTERM at compile: ends; there is nothing to save" in capfd.readouterr().err


def test_signals_are_python_s_own_again_afterwards():
    before = [signal.getsignal(number) for number in watch.SIGNALS]
    with Watch(60.0):
        assert [signal.getsignal(number) for number in watch.SIGNALS] != before
    assert [signal.getsignal(number) for number in watch.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_does_not_end_is_ended_with_the_stack_of_every_thread(ends, capfd):
    def waits_for_ever():
        until = time.monotonic() + 30
        while not ends and time.monotonic() < until:
            time.sleep(0.01)

    with Watch(0.3) as one:
        one.doing("step 4")
        waits_for_ever()
    said = capfd.readouterr().err
    assert ends == [Exit.AGAIN]
    assert "waits_for_ever" in said and "Current thread" in said
    assert "step 4 did not end within 0.005 minutes (--run.stall_minutes)" in said


def test_what_goes_on_is_not_ended(ends):
    with Watch(0.5) as one:
        for number in range(40):
            one.doing(f"step {number}")
            time.sleep(0.03)
    assert not ends


def test_time_in_which_the_process_did_not_run_is_no_stall(ends, monkeypatch):
    """As where a laptop slept; or a clock jumped."""
    real, slept = time.monotonic, [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: real() + slept[0])
    with Watch(5.0) as one:
        one.doing("step 1")
        slept[0] = 1e6
        time.sleep(0.3)
        assert 0 < one._spent_s < 2
    assert not ends


def test_a_time_limit_stops_the_run_while_there_is_time_for_a_step_and_a_save(ends):
    with Watch(60.0, limit_s=100.0) as one:
        one.ready()
        one._longest_s = {"step": 30.0, "save": 2.0}
        one._tick(0.0)
        assert not one._asked and 27 < one._left_s() < 28.1, "a save may yet take SAVE_S"
        one.write_s = 35.0
        assert 15 < one._left_s() < 16.1
        one._longest_s["evaluation"] = 80.0
        one._tick(0.0)
        assert one._asked == ("--run.time_limit", 143) and one.reached()
    assert not ends


def test_the_longest_of_each_kind_of_work_is_known():
    with Watch(60.0) as one:
        one.doing("step 1")
        time.sleep(0.2)
        one._tick(0.2)
        one.doing("save of step 1")
        one.doing("step 2")
        one.doing("step 3")
        assert 0.2 <= one._longest_s["step"] < 5 and one._longest_s["save"] < 0.2


@pytest.mark.parametrize("seed", range(12))
def test_all_processes_stop_at_the_same_point_whoever_is_asked_and_when(watches, seed):
    """The barrier stands for the collectives of a step: none ends it before all have begun it."""
    count, chance = 3, random.Random(seed)
    all_of_them = watches(count)
    step = threading.Barrier(count)
    asked_at = {chance.randrange(count): chance.uniform(0, 0.3)}
    asked_at[chance.randrange(count)] = chance.uniform(0, 0.3)  # often two at once
    waits = [random.Random(f"{seed}/{n}") for n in range(count)]

    def trains(number):
        one = all_of_them[number]
        for step_number in range(10_000):
            if one.reached():
                return step_number, "before"
            time.sleep(waits[number].uniform(0, 0.01))
            step.wait(60)
            if one.reached():
                return step_number, "after"
            time.sleep(waits[number].uniform(0, 0.01))

    for one in all_of_them:
        one.ready()
    for number, at_s in asked_at.items():
        threading.Timer(at_s, all_of_them[number].ask, ("SIGTERM", 143)).start()
    with ThreadPoolExecutor(count) as pool:
        ends = list(pool.map(trains, range(count)))
    assert ends[0] is not None and len(set(ends)) == 1
    assert {one.stopped("").code for one in all_of_them} == {143}


def test_a_first_signal_is_no_second_one_where_another_process_had_one(watches, ends):
    a, b = watches(2)
    for one in (a, b):
        one.ready()
    a._signalled(signal.SIGTERM)
    comes_true(lambda: b._asked)
    b._signalled(signal.SIGTERM)
    assert not ends and a.reached() and b.reached()
    with pytest.raises(SystemExit):
        b._signalled(signal.SIGTERM)
    assert ends == [143]


def test_a_word_that_nobody_takes_does_not_keep_a_process_from_ending(ends, monkeypatch):
    def broken(*_, **__):
        raise BrokenPipeError

    with Watch(60.0) as one, monkeypatch.context() as patch:
        one.ready()
        patch.setattr("builtins.print", broken)
        one.ask("SIGTERM", 143)
        assert one.reached()
        with pytest.raises(SystemExit):
            one.end(75, "lost")
    assert ends == [75]


def test_a_process_that_was_not_ready_stops_with_the_others(watches):
    a, b = watches(2)
    a.ready()
    a.ask("SIGTERM", 143)
    comes_true(lambda: b._asked)
    b.ready()
    assert a.reached() and b.reached()


def test_a_lost_process_ends_the_others_by_name(watches, ends, capfd):
    a, b = watches(2)
    a.doing("step 9")
    for line in b._peers._lines.values():
        line.close()
    comes_true(lambda: len(ends) == 2)
    assert ends == [Exit.AGAIN] * 2
    said = capfd.readouterr().err
    lost = f"process 1 ({socket.gethostname()}) is lost: its connection closed, last at start"
    assert f"process 0 ({socket.gethostname()}): {lost}. This process was at step 9" in said


def test_a_process_that_fails_ends_the_others_with_its_code_and_words(
    watches, ends, capfd, monkeypatch
):
    a, b = watches(2)
    a._grace_s = 0.1
    with pytest.raises(SystemExit):
        b.__exit__(ValueError, ValueError("no room at --model.x"), None)
    comes_true(lambda: len(ends) == 2)
    assert ends == [Exit.MEND] * 2
    said = capfd.readouterr().err
    assert f"process 1 ({socket.gethostname()}) ended: error: no room at --model.x" in said


@pytest.mark.parametrize("own", [True, False])
def test_a_collective_that_raised_is_told_by_who_was_lost_if_any(watches, ends, own, capfd):
    a, b = watches(2, silence_s=0.5)
    if not own:
        for line in b._peers._lines.values():
            line.close()
    error = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    with pytest.raises(SystemExit):
        a.__exit__(ValueError, error, None)
        raise SystemExit  # the watch was first
    comes_true(lambda: ends)
    assert ends[0] == Exit.AGAIN
    assert ("is lost" in capfd.readouterr().err) != own


def test_a_process_that_is_done_waits_for_the_others_and_is_ended_if_one_is_lost(watches, ends):
    made = watches(3)
    a, b, c = made
    made.remove(a)  # it leaves by itself
    done = threading.Thread(target=a.__exit__, args=(None, None, None), daemon=True)
    done.start()
    comes_true(lambda: b._peers.records[0].ended == 0)
    time.sleep(0.2)
    assert done.is_alive() and not ends
    for line in c._peers._lines.values():
        line.close()
    comes_true(lambda: len(ends) == 2)
    assert ends == [Exit.AGAIN] * 2
