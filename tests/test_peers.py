"""How the processes of a job find each other, and how each learns of another's end.

Each "process" here is a thread with connections of its own.
"""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import peers
from faults import Fault
from peers import Peers, Place
from processes import free_port

HOST = socket.gethostname()


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def job(address):
    """(count, silence_s) -> all of a job's peers, joined."""
    made = []

    def joined(count, silence_s=60.0):
        with ThreadPoolExecutor(count) as pool:
            places = [Place(address, count, number) for number in range(count)]
            made.extend(pool.map(lambda where: Peers(where, silence_s, 60.0), places))
        return made

    yield joined
    for one in made:
        one.close()


def started(address, numbers, count, start_s=0.5, counts=None):
    """What each of these processes raises."""

    def start(number):
        try:
            Peers(Place(address, (counts or {}).get(number, count), number), 60.0, start_s)
        except (Fault, ValueError) as error:
            return error

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(start, numbers))


def comes_true(asked, within_s=30.0):
    ends = time.monotonic() + within_s
    while not asked():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.fixture
def without_beats(monkeypatch):
    """Only what is told at once comes."""
    monkeypatch.setattr(peers, "LONGEST_BEAT_S", 1e4)


def test_all_know_all_and_what_each_is_doing_when_it_matters(job, without_beats):
    a, b, c = job(3, silence_s=1e5)
    for one in (a, b, c):
        assert sorted(one.records) == [0, 1, 2]
        assert {r.name for r in one.records.values()} == {f"process {n} ({HOST})" for n in range(3)}
    b.tell(doing="step 7", asked="SIGTERM")
    for one in (a, c):
        comes_true(lambda one=one: one.records[1].doing == "step 7")
        assert one.records[1].asked == "SIGTERM"
    assert not (a.lost() or b.lost() or c.lost())


def test_what_is_not_urgent_comes_with_the_next_beat(job):
    a, b = job(2, silence_s=0.5)
    b.mine.doing = "step 8"
    comes_true(lambda: a.records[1].doing == "step 8")


def test_those_that_did_not_come_are_named_by_all_that_did(address):
    words = (
        rf"^process 1 of 3 did not come within 0.4 s .*; here are process 0 \({HOST}\), process 2"
    )
    for error in started(address, [0, 2], 3, 0.4):
        assert isinstance(error, Fault)
        with pytest.raises(Fault, match=words):
            raise error
    [error] = started(address, [0], 3)
    assert "processes 1, 2 of 3 did not come" in str(error)


def test_a_first_process_that_is_not_there_is_named_by_its_address(address):
    [error] = started(address, [1], 2)
    assert isinstance(error, Fault)
    assert f"process 0 at JAX_COORDINATOR_ADDRESS {address} did not answer within" in str(error)


def test_a_number_given_twice_is_refused_everywhere(address):
    errors = started(address, [0, 1, 1], 3, 60.0)
    assert [type(error) for error in errors] == [ValueError] * 3
    assert {str(e) for e in errors} == {
        f"JAX_PROCESS_ID 1 is given twice, on {HOST} and {HOST}. Give each its own."
    }


def test_counts_that_differ_are_refused_everywhere(address):
    errors = started(address, [0, 1], 3, 60.0, counts={1: 2})
    assert [type(error) for error in errors] == [ValueError] * 2
    assert "has JAX_NUM_PROCESSES 2, and process 0" in str(errors[1])


def test_a_port_that_is_taken_is_refused(address):
    with socket.create_server(("", int(address.split(":")[1]))):
        [error] = started(address, [0], 2)
    assert isinstance(error, ValueError) and "another run has it" in str(error)


def test_strangers_that_connect_are_left_out(address, monkeypatch):
    monkeypatch.setattr(peers, "HELLO_S", 0.3)
    host, port = address.split(":")
    found = []
    first = threading.Thread(
        target=lambda: found.append(Peers(Place(address, 2, 0), 60.0, 60.0)), daemon=True
    )
    first.start()
    strangers = []
    for text in (b"", b"GET / HTTP/1.1\n", b'{"number": 1}\n', b"[1]\n"):
        connection = None
        while connection is None:
            try:
                connection = socket.create_connection((host, int(port)))
            except ConnectionRefusedError:
                time.sleep(0.01)
        connection.sendall(text)
        strangers.append(connection)
    found.append(Peers(Place(address, 2, 1), 60.0, 60.0))
    first.join()
    assert all(sorted(one.records) == [0, 1] for one in found)
    for one in (*strangers, *found):
        one.close()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_whose_connection_ends_is_lost_at_once(job, victim, without_beats):
    all_three = job(3, silence_s=1e5)
    all_three[victim].tell(doing="step 5", point=1)
    others = [one for one in all_three if one.number != victim]
    comes_true(lambda: all(one.records[victim].doing == "step 5" for one in others))
    for line in all_three[victim]._lines.values():
        line.close()
    for one in others:
        expected = f"process {victim} ({HOST}) is lost: its connection closed, last at step 5"
        comes_true(lambda one=one, expected=expected: expected in one.lost())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_silent_is_lost_after_a_time_and_told_so_when_it_wakes(
    job, victim, monkeypatch
):
    both = job(2, silence_s=0.5)
    silent, other = both[victim], both[1 - victim]
    send = silent._send
    monkeypatch.setattr(silent, "_send", lambda: None)
    comes_true(other.lost)
    assert "not heard of for 0.5 s" in other.lost()[0]
    monkeypatch.setattr(silent, "_send", send)
    silent.tell(doing="something")
    if victim == 1:  # the hub tells what it thinks
        comes_true(lambda: silent.mine.lost)
    assert other.lost(), "who is lost stays lost"


def test_time_in_which_a_process_did_not_run_is_not_anothers_silence(job, monkeypatch):
    a, b = job(2, silence_s=2.0)
    comes_true(lambda: a._silent_s[1] < 1)
    real, slept = time.monotonic, [0.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: real() + slept[0])
    slept[0] = 1e6
    for _ in range(3):
        before = a._silent_s[1]
        comes_true(lambda before=before: a._silent_s[1] != before)
    assert not a.lost() and not b.lost()


def test_a_process_that_ended_is_not_lost(job):
    a, b = job(2)
    b.tell(ended=0)
    comes_true(lambda: a.records[1].ended == 0)
    b.close()
    time.sleep(0.3)
    assert not a.lost() and not a.failed()


def test_a_process_that_failed_says_why(job, without_beats):
    a, b, c = job(3, silence_s=1e5)
    b.tell(ended=2, text="error: no such thing")
    for one in (a, c):
        comes_true(one.failed)
        assert one.failed()[0].text == "error: no such thing"
    assert not b.failed()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", None, "0"), "without JAX_NUM_PROCESSES"),
        (("a:1", "2", None), "without JAX_NUM_PROCESSES"),
        (("a", "2", "0"), "expected host:port and two numbers"),
        (("a:1", "two", "0"), "expected host:port and two numbers"),
        (("a:1", "2", "2"), "JAX_PROCESS_ID 2 is not below JAX_NUM_PROCESSES 2"),
    ],
)
def test_a_place_that_is_none_is_refused(monkeypatch, given, message):
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    for name, value in zip(names, given, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        peers.place()


def test_a_worker_of_a_pod_knows_its_place(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.3")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    assert peers.place() == Place("10.0.0.2:8476", 2, 1)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2")
    assert peers.place() is None


def test_without_a_coordinator_there_is_no_place(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    assert peers.place() is None
