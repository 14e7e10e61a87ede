"""One writer per run folder, on a disk and in a bucket, with real processes."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from conftest import ROOT
from processes import free_port
from runtime import buckets, errors, writer_lock
from runtime.buckets import Prefix
from runtime.errors import TransientError

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Takes the lock as a run does, runs the third argument, and holds the lock until its input ends.
HOLDER = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from runtime import errors
from runtime import writer_lock
def run():
    with writer_lock.held(sys.argv[1], "take_over" in sys.argv) as held:
        exec(sys.argv[2])
        print("held", flush=True)
        sys.stdin.readline()
        held.check()
errors.run_command(run)
"""


class Holder:
    """Another process that has the folder, and runs `code` then."""

    def __init__(self, folder, code="", **environment):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", HOLDER, str(folder), code]
        self.process = subprocess.Popen(
            command, text=True, start_new_session=True, env=os.environ | environment, **pipes
        )

    def __enter__(self):
        for line in self.process.stdout:
            if line == "held\n":
                return self
        raise AssertionError(self.process.communicate()[1])

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and its children
        self.process.communicate()

    def end(self):
        """(exit code, standard error) of a process that ends in an orderly way."""
        errors = self.process.communicate("\n", timeout=120)[1]
        return self.process.returncode, errors

    def kill(self):
        self.process.kill()
        self.process.wait()


def take(folder, owner="me", take_over=False):
    """An open lock; `close` gives it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_OWNER", owner)
        stack = contextlib.ExitStack()
        stack.held = stack.enter_context(writer_lock.held(folder, take_over))
        return stack


def refused(folder, **how):
    with pytest.raises(ValueError, match="is in use by another run") as error:
        take(folder, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- a folder on a disk ---------------------------------------------------------------------------


def test_a_second_run_is_refused_in_one_line_that_describes_the_first(tmp_path):
    folder = tmp_path / "run"
    with Holder(folder, RUN_OWNER="somebody") as first:
        code, errors = Holder(folder).end()
        process = f"process {first.process.pid} on host {socket.gethostname()}, started 2"
        assert code == 2 and errors.startswith(f"error: {folder} is in use by another run")
        assert f"(owner somebody, {process}" in errors and f": -c {folder})" in errors
        assert errors.endswith("--run.name run-2.\n") and "take_over" not in errors
        assert refused(folder, take_over=True)  # a living run on this machine
        assert first.end() == (0, "")
        take(folder).close()


def test_a_suspended_run_keeps_its_lock_and_a_killed_one_with_living_children_does_not(tmp_path):
    executed = "import subprocess; subprocess.Popen(['sleep', '600'], close_fds=False)"
    forked = (  # the parent continues when the child runs
        "import os, time\n"
        "read, write = os.pipe()\n"
        "os.fork() or (os.write(write, b'.'), time.sleep(600))\n"
        "os.read(read, 1)"
    )
    with Holder(tmp_path, f"{executed}\n{forked}") as first:
        first.process.send_signal(signal.SIGSTOP)
        assert f"process {first.process.pid} on host" in refused(tmp_path)
        first.kill()
        take(tmp_path).close()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_forked_child_that_ends_does_not_release_the_lock(tmp_path, bucket, kind):
    folder = tmp_path if kind == "folder" else f"{bucket.url}/run"
    with Holder(folder, "import os\nif os.fork() == 0: raise SystemExit\nos.wait()") as first:
        assert f"process {first.process.pid} on host" in refused(folder)


def test_a_file_system_without_flock_is_a_warning(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(writer_lock.fcntl, "flock", unsupported)
    with take(tmp_path), take(tmp_path):
        out = capsys.readouterr().out
    assert out.count("has no flock, so a second run is not prevented: [Errno 37]") == 2


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/run cannot be written: .* Use another --run.dir"):
        take(tmp_path / "file" / "run")
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run cannot be written: .*Is a directory"):
        take(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00\xff"])
def test_a_lock_file_without_a_record_is_free_and_names_no_owner(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with take(tmp_path):
        (tmp_path / "lock").write_text(text)
        assert "(owner unknown, process unknown on host unknown" in refused(tmp_path)
    with take(tmp_path, "me"):
        assert json.loads((tmp_path / "lock").read_text())["owner"] == "me"


# --- a bucket -------------------------------------------------------------------------------------


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 1.0)
    return f"{bucket.url}/run"


def test_another_owner_is_refused_until_the_run_ends(bucket, url):
    first = take(url)
    text = refused(url, owner="you")
    assert f"{url} is in use by another run (owner me, process {os.getpid()} on host" in text
    assert f"on host {socket.gethostname()}, started 2" in text
    assert text.endswith("--run.name run-2, or --run.take_over if that run is gone.")
    first.held.check()
    first.close()
    assert "delete run/lock 200" in bucket.log and not Prefix(url).list_objects()
    take(url, owner="you").close()


def test_the_same_owner_takes_over_from_a_killed_run_at_once(url, monkeypatch, capsys):
    monkeypatch.delenv("RUN_OWNER", raising=False)
    with Holder(url) as first:
        first.kill()
    assert refused(url)
    user = os.environ.get("USER", os.getuid())
    with take(url, owner=""):  # as if it was not set
        out = capsys.readouterr().out
        host = socket.gethostname()
        assert f"taking over from owner {user}@{host}, process {first.process.pid} on" in out
    take(url).close()


@pytest.mark.parametrize("owner", ["me", "you"])
def test_a_run_that_was_replaced_stops_and_leaves_the_lock_of_the_other(bucket, url, owner):
    with Holder(url, RUN_OWNER="me") as first:
        second = take(url, owner, take_over=owner != "me")
        code, errors = first.end()
        assert code == 2
        assert errors.startswith(f"error: {url} was taken over by owner {owner}, process ")
        second.held.check()
        assert not [line for line in bucket.log if line == "delete run/lock 200"]
        second.close()


def test_a_run_whose_lock_is_removed_stops(url):
    with take(url) as stack:
        Prefix(url).remove(["lock"])
        with pytest.raises(writer_lock.Replaced, match="was taken over by owner unknown"):
            stack.held.check()


@pytest.mark.parametrize("owners", [("me", "you"), ("me", "me")])
def test_two_runs_that_start_at_once_leave_one_writer(bucket, url, owners, monkeypatch):
    """Both read before either writes, so the later write does not meet its precondition."""
    before, both_read, stacks, errors = Prefix.read_with_generation, threading.Barrier(2), [], []
    records = iter([{"owner": owner, "pid": number} for number, owner in enumerate(owners)])
    monkeypatch.setattr(writer_lock, "_record", lambda: next(records))
    monkeypatch.setattr(writer_lock, "_described", str)

    def read(self, name):
        try:
            return before(self, name)
        finally:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_read.wait()
                both_read.abort()  # later reads do not wait

    def start():
        stack = contextlib.ExitStack()
        try:
            stack.held = stack.enter_context(writer_lock.held(url))
            stacks.append(stack)
        except ValueError as error:
            errors.append(error)

    monkeypatch.setattr(Prefix, "read_with_generation", read)
    threads = [threading.Thread(target=start) for _ in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sum(line.endswith("run/lock 412") for line in bucket.log) == 1
    for stack in stacks:
        try:
            stack.held.check()
        except writer_lock.Replaced as error:
            errors.append(error)
    assert (len(stacks), len(errors)) == (1 if owners[1] == "you" else 2, 1)
    for stack in stacks:
        stack.close()


@pytest.mark.parametrize("exists", [False, True])
def test_a_lock_is_this_runs_own_if_only_the_response_was_lost(bucket, url, exists, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)  # the second try comes also on a busy machine
    if exists:
        take(url).pop_all()  # a killed run of the same owner
    fault = bucket.fault("cut response", on="upload", times=1)
    with take(url) as stack:
        assert fault.done == 1
        answers = [line[-3:] for line in bucket.log if "upload" in line]
        assert answers == ["200"] * exists + ["200", "412"]
        stack.held.check()
    assert "delete run/lock 200" in bucket.log


@pytest.mark.parametrize("content", [b"", b"[1]", b"\x00\xff"])
def test_an_object_that_holds_no_record_is_refused_and_may_be_taken_over(url, content):
    Prefix(url).write("lock", content)
    assert "(owner unknown, process unknown on host unknown" in refused(url)
    take(url, take_over=True).close()


@pytest.mark.parametrize("on", ["read", "upload", "look"])
@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, ValueError, "gcloud auth application-default login, or attach a service account"),
        (403, ValueError, "Grant this account roles/storage.objectUser and"),
        (503, TransientError, r"a request for .* failed: .*503"),
    ],
)
def test_a_bucket_that_fails_is_reported_in_one_line(bucket, url, on, status, kind, words):
    bucket.fault(status, on=on, path="*/lock")
    with pytest.raises(kind, match=words) as error, take(url) as stack:
        stack.held.check()
    assert "\n" not in str(error.value)
    assert errors.code_of(error.value) == (75 if status == 503 else 2)


def test_a_bucket_without_credentials_is_refused_with_the_command_that_gets_them(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    monkeypatch.setattr(buckets, "client", buckets.client.__wrapped__)
    with pytest.raises(ValueError, match="gcloud auth application-default login") as error:
        take("gs://bucket/run")
    assert "\n" not in str(error.value)


def test_a_bucket_that_does_not_exist_is_reported(bucket):
    with pytest.raises(ValueError, match=r"There is no bucket bucket-404\. Create it"):
        take("gs://bucket-404/run")


@pytest.mark.parametrize("on", ["read", "upload", "look", "delete"])
def test_a_transient_failure_changes_nothing(bucket, url, on, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)  # the first pause is up to 1 s
    fault = bucket.fault(503, on=on, times=1)
    with take(url) as stack:
        stack.held.check()
    assert fault.done == 1 and not Prefix(url).list_objects()


def test_a_lock_that_cannot_be_removed_is_still_of_the_same_owner(bucket, url):
    with take(url):
        fault = bucket.fault(503, on="delete")
    fault.stopped.set()
    assert "owner me" in refused(url, owner="you")
    take(url).close()


# --- a job of several processes -------------------------------------------------------------------

TWO = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import conftest, jax
from runtime import errors
from runtime import writer_lock
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[1]))
def run():
    for folder in sys.argv[3:]:
        with writer_lock.held(folder) as held:
            held.check()
            print("has", folder, flush=True)
errors.run_command(run)
"""


def test_process_0_takes_the_lock_and_all_processes_raise_its_error(tmp_path, bucket, url):
    port, folders = str(free_port()), [url, str(tmp_path / "taken")]
    with take(folders[1]):
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", TWO]
        workers = [
            subprocess.Popen([*command, str(rank), port, *folders], text=True, **pipes)
            for rank in range(2)
        ]
        try:
            outputs = [worker.communicate(timeout=120) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert [worker.returncode for worker in workers] == [2, 2], outputs
    for out, err in outputs:
        assert url in out and folders[1] not in out  # gloo prints between the words
        assert "error: process 0 (" in err
        assert f"): {folders[1]} is in use by another run" in err
    lines = [line for line in bucket.log if "upload" in line or "delete" in line]
    assert lines == ["upload run/lock 200", "delete run/lock 200"]
