"""One writer per run folder: on one machine, between machines, in a bucket; with real processes.

Nothing is timed tightly: a lease is some seconds, and what is waited for may take minutes.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import faults
import lock
from conftest import ROOT
from faults import Fault
from processes import free_port

PATIENCE_S = 120
QUICK = {"beat_s": 0.1, "lease_s": 3.0}

# Takes the lock as a run does, says so, and holds it until a line arrives or the pipe is closed.
HOLDER = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import faults, lock
def run():
    with lock.held(sys.argv[1], print, float(sys.argv[2]), float(sys.argv[3])):
        exec(sys.argv[4])
        print("held", flush=True)
        sys.stdin.readline()
faults.command_line(run)
"""


class Holder:
    """Another process that asks for the folder; `doing` once it has it."""

    def __init__(self, folder, doing="", beat_s=0.1, lease_s=3.0):
        arguments = [str(folder), str(beat_s), str(lease_s), doing]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", HOLDER, *arguments]
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)

    def __enter__(self):
        for line in self.process.stdout:
            if line == "held\n":
                return self
        raise AssertionError(self.process.communicate()[1])

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and its children
        self.process.communicate()

    def refused(self):
        """What it said instead."""
        said = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 2, said
        [line] = said[1].splitlines()
        return line

    def kill(self):
        self.process.kill()
        self.process.wait()


class Lost:
    """An on_lost that remembers."""

    def __init__(self):
        self.messages, self._event = [], threading.Event()

    def __call__(self, message):
        self.messages.append(message)
        self._event.set()

    def wait(self):
        assert self._event.wait(PATIENCE_S)
        [message] = self.messages
        return message


def nobody(message):
    raise AssertionError(message)


def take(folder, on_lost=nobody, **how):
    return lock.take(folder, on_lost, **{**QUICK, **how})


def until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def beats(folder):
    return json.loads((folder / "lock").read_text())["beats"]


def record(**other):
    known = {"host": "a", "pid": 12, "command": "main.py --run.name x", "machine": "a 1"}
    return known | {"token": "t", "age_s": 7500, "beats": 1} | other


# --- one machine ----------------------------------------------------------------------------------


def test_a_second_run_is_refused_in_one_line_while_the_first_lives_and_not_after(tmp_path):
    folder = tmp_path / "run"
    with Holder(folder) as first:
        line = Holder(folder).refused()
        assert line.startswith(f"error: {folder} is being written by another run, process ")
        assert f"process {first.process.pid} on host {os.uname().nodename}, running for " in line
        assert f" s: -c {folder} 0.1" in line and line.endswith("--run.name run-2.")
        with pytest.raises(ValueError, match="is being written by another run"):
            take(folder)
        first.process.stdin.write("\n")
        first.process.stdin.flush()
        assert first.process.wait(PATIENCE_S) == 0
        take(folder).close()


def test_a_stopped_run_holds_its_folder_and_a_killed_one_does_not(tmp_path, capsys):
    child = "import subprocess; subprocess.Popen(['sleep', '600'], close_fds=False)"
    fork = "import os, time; os.fork() or time.sleep(600)"
    with Holder(tmp_path, f"{child}\n{fork}") as first:  # neither keeps the lock when it is gone
        first.process.send_signal(signal.SIGSTOP)
        at = beats(tmp_path)
        time.sleep(0.5)
        assert beats(tmp_path) == at
        with pytest.raises(ValueError, match=f"process {first.process.pid} on host"):
            take(tmp_path)
        first.kill()
        mine = take(tmp_path)
        assert "waiting" not in capsys.readouterr().out
        mine.close()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_child_that_leaves_the_block_gives_nothing_back(tmp_path, bucket, kind):
    folder = tmp_path if kind == "folder" else f"{bucket.url}/run"
    fork = "import os\nif os.fork() == 0: raise SystemExit\nos.wait()"
    with Holder(folder, fork) as first:
        with pytest.raises(ValueError, match=f"process {first.process.pid} on host"):
            take(folder, lease_s=PATIENCE_S)
        assert "delete run/lock 200" not in bucket.log


def test_a_run_whose_lock_is_removed_is_told(tmp_path):
    lost = Lost()
    mine = take(tmp_path, lost)
    (tmp_path / "lock").unlink()
    assert "the file was removed or replaced. This run stops" in lost.wait()
    other = take(tmp_path)
    mine.close()
    until(lambda: beats(tmp_path) > 1)
    other.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/run/lock cannot be written: .* Give a --run.dir"):
        take(tmp_path / "file" / "run")
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run/lock cannot be written: Is a directory"):
        take(tmp_path / "run")


def test_what_is_no_record_is_nobody(tmp_path):
    for text in ("", "{", "[1]", "null", "\x00\xff"):
        (tmp_path / "lock").write_text(text)
        take(tmp_path).close()
        assert (tmp_path / "lock").read_text() == ""


def test_a_heartbeat_that_breaks_is_told(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    lost = Lost()
    mine = take(tmp_path, lost)
    monkeypatch.setattr(mine, "beat", lambda: 1 // 0)
    assert "its heartbeat failed: ZeroDivisionError" in lost.wait()
    mine.thread.join(PATIENCE_S)
    assert seen[0].exc_type is ZeroDivisionError
    mine.close()


# --- several machines, and clocks -----------------------------------------------------------------


def test_another_machines_run_that_beats_is_refused_and_one_that_does_not_is_not(tmp_path, capsys):
    file = tmp_path / "lock"
    over, moving = threading.Event(), record()
    file.write_text(json.dumps(moving))

    def beat():
        while not over.wait(0.1):
            moving["beats"] += 1
            file.write_text(json.dumps(moving))

    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(Fault, match=r"process 12 on host a, running for 2 h: main.py --"):
            take(tmp_path, lease_s=PATIENCE_S)
    finally:
        over.set()
        other.join()
    took = time.monotonic()
    mine = take(tmp_path, lease_s=1.0)
    assert time.monotonic() - took >= 1.0
    told = capsys.readouterr().out.splitlines()
    waits = f"{tmp_path} was held by process 12 on host a; waiting up to"
    ends = "to see whether it lives"
    assert told == [f"{waits} {PATIENCE_S} s {ends}", f"{waits} 1 s {ends}"]
    mine.close()


def test_of_two_that_watched_the_last_to_write_has_it(tmp_path, monkeypatch):
    file = tmp_path / "lock"
    file.write_text(json.dumps(record()))
    write = lock.FileLock._write

    def overtaken(self, content=None):
        write(self, content)
        file.write_text(json.dumps(record(token="u", pid=13)))

    monkeypatch.setattr(lock.FileLock, "_write", overtaken)
    with pytest.raises(Fault, match="process 13 on host a"):
        take(tmp_path, lease_s=1.0)


def test_a_run_that_another_machine_took_over_is_told(tmp_path):
    lost = Lost()
    mine = take(tmp_path, lost)
    (tmp_path / "lock").write_text(json.dumps(record()))
    assert "process 12 on host a has taken it" in lost.wait()
    mine.close()
    assert json.loads((tmp_path / "lock").read_text()) == record()


def test_a_run_that_another_had_and_gave_back_meanwhile_is_told(tmp_path):
    lost = Lost()
    mine = take(tmp_path, lost)
    (tmp_path / "lock").write_text("")
    assert "another had it meanwhile" in lost.wait()
    mine.close()


def test_without_flock_the_counter_decides(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    mine = take(tmp_path)
    with pytest.raises(ValueError, match=f"process {os.getpid()} on host"):
        take(tmp_path, lease_s=PATIENCE_S)
    mine.close()
    take(tmp_path).close()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_clocks_that_jump_change_nothing(tmp_path, monkeypatch, request, kind):
    folder = tmp_path if kind == "folder" else f"{request.getfixturevalue('bucket').url}/run"
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + random.choice([-1e5, -60, 0, 60, 1e5]))
    mine = take(folder)
    with pytest.raises(ValueError, match=r"running for \d s: "):
        take(folder, lease_s=PATIENCE_S)
    mine.close()
    take(folder).close()


def test_ages_are_as_people_say_them_and_never_nonsense():
    told = {3.4: "3 s", 119: "119 s", 150: "2 min", 7500: "2 h", 5e5: "6 days"}
    assert {seconds: lock.age(seconds) for seconds in told} == told
    assert {lock.age(bad) for bad in (-1, 1e12, float("nan"), None, "x")} == {"an unknown time"}


# --- buckets --------------------------------------------------------------------------------------


def uploads(bucket):
    return bucket.log.count("upload run/lock 200")


def test_a_bucket_has_one_writer_and_is_free_when_it_ends(bucket, capsys):
    folder = f"{bucket.url}/run"
    mine = take(folder)
    with pytest.raises(
        ValueError, match=rf"run is being written .* {os.getpid()} on host .* run-2"
    ):
        take(folder, lease_s=PATIENCE_S)
    mine.close()
    assert "waiting up to 120 s" in capsys.readouterr().out
    assert "delete run/lock 200" in bucket.log
    take(folder).close()
    assert "waiting" not in capsys.readouterr().out


def test_of_two_that_begin_in_a_bucket_at_once_one_has_it(bucket):
    held, refused, ready = [], [], threading.Barrier(2)

    def begin():
        ready.wait()
        try:
            held.append(take(f"{bucket.url}/run", lease_s=PATIENCE_S))
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (len(held), len(refused)) == (1, 1)
    held[0].close()


def test_a_killed_runs_bucket_is_free_when_its_lease_has_run_out(bucket, capsys):
    folder = f"{bucket.url}/run"
    with Holder(folder) as first:
        before = uploads(bucket)
        until(lambda: uploads(bucket) > before + 2)
        assert "is being written by another run" in Holder(folder, lease_s=PATIENCE_S).refused()
        first.kill()
        took = time.monotonic()
        mine = take(folder, lease_s=2.0)
        assert time.monotonic() - took >= 2.0
    told = f"run was held by process {first.process.pid} on host {os.uname().nodename}; waiting up"
    assert f"{told} to 2 s" in capsys.readouterr().out
    mine.close()


def test_a_run_that_lost_its_lease_is_told_and_leaves_the_other_alone(bucket):
    folder, lost = f"{bucket.url}/run", Lost()
    mine = take(folder, lost, lease_s=PATIENCE_S)
    away = bucket.fault("delay", on="upload", times=1)  # its renewal is on its way for long
    assert away.happened.wait(PATIENCE_S)
    other = take(folder, lease_s=1.0)
    away.stopped.set()
    assert f"process {os.getpid()} on host" in lost.wait()
    assert lost.messages[0].endswith("start this one again.")
    mine.close()
    before = uploads(bucket)
    until(lambda: uploads(bucket) > before + 2)
    assert not [line for line in bucket.log if line.startswith("delete")]
    other.close()


def test_a_lock_that_is_removed_from_a_bucket_is_lost(bucket):
    lost = Lost()
    mine = take(f"{bucket.url}/run", lost)
    mine._blobs.blob("run/lock").delete()
    assert "the object was removed" in lost.wait()
    mine.close()


@pytest.mark.parametrize("kind", [503, 429, 401, "cut request", "cut response"])
def test_renewals_that_fail_now_and_then_lose_nothing(bucket, kind):
    mine = take(f"{bucket.url}/run", lease_s=PATIENCE_S)
    faults = [bucket.fault(kind, on="upload", after=after, times=1) for after in (0, 1, 3)]
    faults.append(bucket.fault(kind, on="read", times=1))
    until(lambda: all(fault.done for fault in faults[:3]))
    before = uploads(bucket)
    until(lambda: uploads(bucket) > before + 2)
    mine.close()
    assert not mine.lost and "delete run/lock 200" in bucket.log


def test_a_lease_that_cannot_be_renewed_is_lost_before_it_runs_out(bucket):
    lost = Lost()
    mine = take(f"{bucket.url}/run", lost, beat_s=0.5)
    began = time.monotonic()
    bucket.fault(503, on="write")
    assert "could not be renewed for 2.5 s: 503" in lost.wait()
    assert time.monotonic() - began > 1.5  # and not at the first that failed
    mine.close()
    assert not [line for line in bucket.log if line.startswith("delete")]


def test_a_lease_of_which_nothing_can_be_read_is_lost_too(bucket):
    lost = Lost()
    mine = take(f"{bucket.url}/run", lost, beat_s=0.3, lease_s=1.5)
    bucket.fault(503, on="read")
    bucket.fault("cut response", on="upload", times=1)  # written, and it is not known by whom
    assert "could not be renewed for 1.2 s: 412" in lost.wait()
    mine.close()


def test_a_create_whose_answer_was_lost_is_ones_own(bucket, capsys):
    fault = bucket.fault("cut response", on="upload", times=1)
    take(f"{bucket.url}/run").close()
    assert fault.done == 1
    assert "waiting" not in capsys.readouterr().out


def test_a_lock_that_cannot_be_given_back_is_told(bucket, capsys):
    mine = take(f"{bucket.url}/run")
    bucket.fault(503, on="delete")
    mine.close()
    assert "could not be given back; the next run waits 3 s for it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "gcloud auth application-default login, or give the machine a service account"),
        (403, "Grant who runs this roles/storage.objectUser and"),
        (404, "There is no bucket bucket-"),
    ],
)
def test_a_bucket_that_refuses_is_said_in_one_line_with_the_mend(bucket, status, words):
    bucket.fault(status)
    with pytest.raises(ValueError, match=r"run/lock cannot be used\. ") as refused:
        take(f"{bucket.url}/run")
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_bucket_without_credentials_says_how_to_get_them(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    with pytest.raises(ValueError, match="gcloud auth application-default login") as refused:
        take("gs://bucket/run")
    assert "\n" not in str(refused.value)


def test_a_bucket_that_does_not_answer_is_a_fault_and_not_a_mistake(bucket):
    bucket.fault(503)
    with pytest.raises(Fault, match=r"did not answer for 1 s: 503 .* Start the run again"):
        take(f"{bucket.url}/run", lease_s=1.0)


# --- a job of several processes -------------------------------------------------------------------

TWO = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import conftest, jax, faults, lock
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[1]))
def run():
    for folder in sys.argv[3:]:
        with lock.held(folder, print):
            print("holds", folder, flush=True)
faults.command_line(run)
"""


def test_all_processes_of_a_job_raise_what_the_first_met(tmp_path):
    mine, port = take(tmp_path / "taken"), str(free_port())
    folders = [str(tmp_path / "free"), str(tmp_path / "taken")]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(rank), port, *folders],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [2, 2], said
    for out, errors in said:
        assert folders[0] in out and folders[1] not in out  # gloo writes between the words
        assert "error: process 0 (" in errors
        assert f"): {folders[1]} is being written by another run" in errors
    mine.close()
    assert Path(folders[0], "lock").read_text() == ""


def test_the_command_line_ends_with_2_and_the_message(tmp_path, capsys):
    mine = take(tmp_path)

    def run():
        with lock.held(tmp_path, nobody):
            raise AssertionError

    with pytest.raises(SystemExit) as ended:
        faults.command_line(run)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is being written")
    mine.close()
