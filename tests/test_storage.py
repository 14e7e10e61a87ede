"""Files on a disk and in an emulated bucket, and the errors of its clients."""

import base64

import fsspec
import pytest
from gcsfs.retry import HttpError
from google.api_core.exceptions import Forbidden, NotFound, Unauthorized
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google_crc32c import Checksum

from runtime import run_directory, storage
from runtime.run_directory import COMMIT
from runtime.storage import AccessDenied, Changed, FileInfo, Unavailable

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def remote(bucket, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.2)
    return storage.at(f"{bucket.url}/run/")


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path):
    """An empty folder; beside it is one whose name begins with its own."""
    near = tmp_path if request.param == "disk" else request.getfixturevalue("bucket").url
    storage.at(f"{near}/run2").write("x", b"")
    return storage.at(f"{near}/run")


def test_files_are_written_found_read_moved_and_removed(folder):
    assert not folder.exists() and folder.names() == []
    for name in ("a", "b/c", "b/d", "bb"):
        folder.write(name, name.encode() * 9)
    assert folder.names() == ["a", "b/", "bb"]
    assert folder.exists() and folder.exists("b/c") and not folder.exists("b/e")
    assert folder.files().keys() == {"a", "b/c", "b/d", "bb"}
    assert folder.files("b").keys() == {"b/c", "b/d", "bb"}
    assert folder.files("b/")["b/c"].size == 27
    assert folder.read("b/d") == b"b/d" * 9
    with folder.open_file("b/d") as file:
        assert file.seek(3) == 3 and file.read(4) == b"b/db"
    folder.move("b", "e", first="d")
    folder.remove(["a", "never there"])
    assert folder.files().keys() == {"bb", "e/c", "e/d"} and folder.read("e/d") == b"b/d" * 9
    folder.remove_folder("e")
    assert folder.names() == ["bb"]
    for read in (folder.read, lambda name: folder.open_file(name).read()):
        with pytest.raises(FileNotFoundError, match=r"run(/|%2F)x"):
            read("x")


def test_a_file_has_its_old_content_or_the_new_one(tmp_path, monkeypatch):
    folder = storage.at(tmp_path)
    folder.write("a/b.json", b"old")
    monkeypatch.setattr("os.fsync", lambda fd: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        folder.write("a/b.json", b"new")
    assert folder.read("a/b.json") == b"old"
    assert [*folder.files()] == ["a/b.json"]  # and no unfinished file


def test_a_bucket_lists_checksums_and_gcsfs_keeps_no_listing(remote):
    remote.write("x", b"content")
    checksum = base64.b64encode(Checksum(b"content").digest()).decode()
    assert remote.files() == {"x": FileInfo(7, checksum)}
    files = fsspec.filesystem("gs")
    assert len(files.ls(remote.url)) == 1
    remote.write("y", b"")
    assert len(files.ls(remote.url)) == 2


def test_unknown_storage_is_refused():
    with pytest.raises(ValueError, match=r"s3://b/x is in no known storage. Use .*, or gs://"):
        storage.at("s3://b/x")


def test_only_the_version_that_a_request_requires_is_changed(remote):
    first = remote.write("x", b"1", storage.ABSENT)
    second = remote.write("x", b"2", first)
    assert remote.read_with_version("x") == (b"2", second)
    assert first != second and remote.read_with_version("y") == (b"", storage.ABSENT)
    for request in (
        lambda: remote.write("x", b"3", storage.ABSENT),
        lambda: remote.write("x", b"3", first),
        lambda: remote.remove(["x"], first),
    ):
        with pytest.raises(Changed):
            request()
    assert remote.read("x") == b"2"
    remote.remove(["x"], second)
    assert not remote.exists("x")


ASK = {
    "list": lambda folder: folder.files(),
    "read": lambda folder: folder.read("x"),
    "upload": lambda folder: folder.write("x", b"new"),
    "copy": lambda folder: folder.move("a", "b", first="x"),
    "delete": lambda folder: folder.remove(["x"]),
}


@pytest.mark.parametrize("on", ASK)
def test_a_transient_failure_is_retried_and_a_lasting_one_reported_in_one_line(
    bucket, remote, on, monkeypatch
):
    for name in ("x", "a/x"):
        remote.write(name, b"old" * 100)
    faults = [
        ("cut request", Unavailable, r"a request for gs://bucket-\d+/run(/x|/a/x)? failed"),
        (403, AccessDenied, "Grant this account roles/storage.objectUser and"),
    ]
    if flips := {"read": "flip response", "upload": "flip request"}.get(on):
        faults.append((flips, Unavailable, "a request for .*/run/x failed"))
    for kind, error, words in faults:
        bucket.fault(kind, on=on)
        with pytest.raises(error, match=words) as raised:
            ASK[on](remote)
        assert "\n" not in str(raised.value)
        bucket.clear_faults()
    monkeypatch.setattr(storage, "RETRY_S", 20.0)  # the first pause is up to 1 s
    fault = bucket.fault(503, on=on, times=1)
    ASK[on](remote)
    assert fault.done == 1


def test_a_quarantine_that_stops_on_its_way_leaves_an_unfinished_checkpoint(bucket, remote):
    half = f"3{run_directory.UNFINISHED}"
    for name in (f"1/{COMMIT}", f"2/{COMMIT}", "2/a", "2/z", f"{half}/a", f"damaged-2/{COMMIT}"):
        remote.write(name, b"")
    checkpoints = run_directory.CheckpointDirectory(remote.url)
    assert checkpoints.steps() == [1, 2] and checkpoints.is_complete(2)
    bucket.fault(403, on="copy", after=1)
    with pytest.raises(AccessDenied):
        checkpoints.quarantine(2)
    assert checkpoints.steps() == [1] and checkpoints.unfinished() == ["2", half]
    for name in checkpoints.unfinished():
        checkpoints.remove(name)
    assert remote.files().keys() == {f"1/{COMMIT}", f"damaged-2/{COMMIT}"}


AWAY = TransportError("no route to the server of tokens")
CAUSED = RefreshError("wrapped")
CAUSED.__cause__ = AWAY


def test_lasting_errors_are_distinguished_from_transient_ones():
    """In the words of each client; a server of tokens that is away has refused nobody."""
    for error, words in (
        (Forbidden("by the library"), "Grant this account"),
        (HttpError({"code": 403, "message": "by gcsfs"}), "Grant this account"),
        (OSError("Forbidden: https://storage, by gcsfs"), "Grant this account"),
        (ValueError("PERMISSION_DENIED: by tensorstore"), "Grant this account"),
        (Unauthorized("by the library"), "no valid credentials"),
        (ValueError("UNAUTHENTICATED: by tensorstore"), "no valid credentials"),
        (DefaultCredentialsError("there are none"), "no valid credentials"),
        (NotFound("by the library"), "There is no bucket b. Create it"),
        (AWAY, "may pass"),
        (CAUSED, "may pass"),
        (RefreshError(AWAY), "may pass"),
        (RefreshError("busy", retryable=True), "may pass"),
        (HttpError({"code": 503, "message": "busy"}), "may pass"),
        (ValueError("UNAVAILABLE: by tensorstore"), "may pass"),
        (OSError("said of Forbidden: in the middle"), "may pass"),
    ):
        assert words in (storage.refusal("b", error) or "may pass"), error
