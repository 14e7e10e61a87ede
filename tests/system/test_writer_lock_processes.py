"""One writer per run folder, with real processes."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT
from processes import environments, run_all
from runtime import writer_lock

# Takes the lock as a run does, runs the third argument, and holds the lock until its input ends.
HOLDER = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from runtime import errors, writer_lock
def run():
    with writer_lock.held(sys.argv[1]):
        exec(sys.argv[2])
        print("held", flush=True)
        sys.stdin.readline()
errors.run_command(run)
"""


@contextlib.contextmanager
def holder(folder, code=""):
    """Another process that has the folder, and runs `code` then."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, "-c", HOLDER, str(folder), code]
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            assert "held\n" in iter(process.stdout.readline, "")
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children


def refusal(folder):
    with pytest.raises(ValueError, match="is in use by another run") as error:  # noqa: SIM117
        with writer_lock.held(folder):
            pass
    return str(error.value)


def test_a_suspended_run_keeps_its_lock_and_a_killed_one_with_living_children_does_not(tmp_path):
    executed = "import subprocess; subprocess.Popen(['sleep', '600'], close_fds=False)"
    forked = (  # the parent continues when the child runs
        "import os, time\n"
        "read, write = os.pipe()\n"
        "os.fork() or (os.write(write, b'.'), time.sleep(600))\n"
        "os.read(read, 1)"
    )
    with holder(tmp_path, f"{executed}\n{forked}") as first:
        first.send_signal(signal.SIGSTOP)
        assert f"process {first.pid} on host" in refusal(tmp_path)
        first.kill()
        first.wait()
        with writer_lock.held(tmp_path):
            pass


def test_a_forked_child_that_ends_does_not_release_the_lock_of_a_bucket(bucket, monkeypatch):
    folder = f"{bucket.url}/run"
    with holder(folder, "import os\nif os.fork() == 0: raise SystemExit\nos.wait()") as first:
        monkeypatch.setenv("RUN_OWNER", "another")
        assert f"process {first.pid} on host" in refusal(folder)


# A job of several processes

TWO = """
import sys
import conftest
from runtime import distributed, errors, writer_lock
def run():
    with distributed.job():
        for folder in sys.argv[1:]:
            with writer_lock.held(folder) as check:
                check()
                print("has", folder, flush=True)
errors.run_command(run)
"""


def test_process_0_takes_the_lock_and_all_processes_raise_its_error(tmp_path, bucket):
    folders = [f"{bucket.url}/run", str(tmp_path / "taken")]
    with writer_lock.held(folders[1]):
        places = environments(2, 4, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
        codes, outputs = run_all(places, "-c", TWO, *folders)
    assert codes == [2, 2], outputs
    for text in outputs:
        assert folders[0] in text and f"has {folders[1]}" not in text
        assert "process 0 (" in text and f"): {folders[1]} is in use by another run" in text
    lines = [line for line in bucket.log if "upload" in line or "delete" in line]
    assert lines == ["upload run/lock 200", "delete run/lock 200"]
