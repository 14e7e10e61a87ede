"""One writer per run folder, on a disk and in a bucket. tests/system has runs of processes."""

import contextlib
import errno
import os
import socket
import sys

import pytest

from runtime import storage, writer_lock
from runtime.storage import BucketFolder

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def take(folder, owner="me", take_over=False):
    """An open lock; `close` gives it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_OWNER", owner)
        stack = contextlib.ExitStack()
        stack.check = stack.enter_context(writer_lock.held(folder, take_over))
        return stack


def refused(folder, **how):
    with pytest.raises(ValueError, match="is in use by another run") as error:
        take(folder, **how)
    return str(error.value)


# --- a folder on a disk ---------------------------------------------------------------------------


def test_a_second_run_on_a_disk_is_refused_until_the_first_ends(tmp_path):
    with take(tmp_path, "somebody"):
        text = refused(tmp_path, owner="somebody", take_over=True)  # a living run on this machine
        assert f"owner somebody, process {os.getpid()} on host {socket.gethostname()}, " in text
    take(tmp_path).close()


def test_a_file_system_without_flock_is_a_warning(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(writer_lock.fcntl, "flock", unsupported)
    with take(tmp_path), take(tmp_path):
        out = capsys.readouterr().out
    assert out.count("has no flock, so a second run is not prevented: [Errno 37]") == 2


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/run cannot be used .* use another --run.dir"):
        take(tmp_path / "file" / "run")


def test_a_lock_file_of_a_run_that_has_ended_is_free(tmp_path):
    (tmp_path / "lock").write_text("owner you, process 1")
    with take(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"owner me, process {os.getpid()} on ")


# --- a bucket -------------------------------------------------------------------------------------


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.2)
    return f"{bucket.url}/run"


def test_another_owner_is_refused_until_the_run_ends(bucket, url):
    with take(url) as first:
        text = refused(url, owner="you")
        assert f"{url} is in use by another run (owner me, process {os.getpid()} on host" in text
        assert "--run.name run-2, or --run.take_over if" in text
        first.check()
    assert "delete run/lock 200" in bucket.log and not BucketFolder(url).files()
    take(url, owner="you").close()


@pytest.mark.parametrize("owner", ["me", "you"])
def test_a_run_that_was_replaced_stops_and_leaves_the_lock_of_the_other(
    bucket, url, owner, monkeypatch, capsys
):
    first = take(url)
    monkeypatch.setattr(sys, "argv", ["another run"])
    with take(url, owner, take_over=owner != "me") as second:
        assert "taking over from owner me, process" in capsys.readouterr().out
        with pytest.raises(writer_lock.Replaced, match=f"{url} was taken over by owner {owner}, "):
            first.check()
        first.close()
        second.check()
        assert "delete run/lock 200" not in bucket.log


def test_a_run_that_was_slower_to_start_is_refused(url, monkeypatch):
    """Both read before either writes, so the later write does not meet its precondition."""
    write, faster = BucketFolder.write, []

    def slower(*how):
        monkeypatch.setattr(BucketFolder, "write", write)
        faster.append(take(url, "you"))
        return write(*how)

    monkeypatch.setattr(BucketFolder, "write", slower)
    assert "owner you" in refused(url)
    faster[0].check()
    faster[0].close()  # not by a collection in a thread of the emulated bucket


def test_a_lock_is_this_runs_own_if_only_the_response_was_lost(bucket, url, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 20.0)  # the second try comes also on a busy machine
    BucketFolder(url).write("lock", b"owner me, process 1 on host h")  # of a killed run
    fault = bucket.fault("cut response", on="upload", times=1)
    with take(url) as stack:
        assert fault.done == 1
        assert [line[-3:] for line in bucket.log if "upload" in line] == ["200", "200", "412"]
        stack.check()
    assert "delete run/lock 200" in bucket.log


def test_a_bucket_without_credentials_or_that_does_not_exist_is_refused(bucket, monkeypatch):
    with pytest.raises(ValueError, match=r"There is no bucket bucket-404\. Create it"):
        take("gs://bucket-404/run")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    monkeypatch.setattr(storage, "client", storage.client.__wrapped__)
    with pytest.raises(ValueError, match="gcloud auth application-default login"):
        take("gs://bucket/run")


def test_a_lock_that_cannot_be_removed_stays_that_of_its_owner(bucket, url):
    with take(url):
        bucket.fault(503, on="delete")
    bucket.clear_faults()
    assert "owner me" in refused(url, owner="you")
    take(url).close()
