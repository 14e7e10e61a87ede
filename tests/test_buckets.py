"""Requests to an emulated bucket, and the errors of its clients."""

import base64

import pytest
from gcsfs.retry import HttpError
from google.api_core.exceptions import Forbidden, NotFound, Unauthorized
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google_crc32c import Checksum

from runtime import buckets, checkpoint_directory
from runtime.buckets import AccessDenied, Changed, ObjectInfo, Prefix, Unavailable
from runtime.checkpoint_directory import COMMIT

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def prefix(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 0.2)
    return Prefix(f"{bucket.url}/run/")


def test_objects_are_written_found_read_moved_and_removed(bucket, prefix):
    for name in ("a", "b/c", "b/d", "bb"):
        prefix.write(name, name.encode() * 9)
    Prefix(bucket.url).write("run2", b"")
    assert prefix.list_objects().keys() == {"a", "b/c", "b/d", "bb"}
    assert prefix.list_objects(records_only=True).keys() == {"a", "bb"}
    assert prefix.list_objects("b/").keys() == {"b/c", "b/d"}
    assert prefix.list_objects()["b/c"] == ObjectInfo(
        27, base64.b64encode(Checksum(b"b/c" * 9).digest()).decode()
    )
    assert prefix.read("b/d") == b"b/d" * 9
    prefix.move("b/d", "e")
    prefix.remove(["a", "b/c", "never there"])
    assert prefix.list_objects().keys() == {"bb", "e"} and prefix.read("e") == b"b/d" * 9
    assert Prefix(bucket.url).list_objects().keys() == {"run/bb", "run/e", "run2"}
    files = buckets.filesystem()
    assert len(files.ls(prefix.url)) == 2
    prefix.write("f", b"")
    assert len(files.ls(prefix.url)) == 3  # gcsfs keeps no listing
    with pytest.raises(FileNotFoundError, match=r"gs://bucket-\d+/run/x does not exist"):
        prefix.read("x")


def test_only_the_generation_that_a_request_requires_is_changed(prefix):
    first = prefix.write("x", b"1", if_generation_match=0)
    second = prefix.append("x", b"2", first)
    assert prefix.read_with_generation("x") == (b"12", second)
    assert prefix.generation("x") == second != first and prefix.generation("y") == 0
    for request in (
        lambda: prefix.write("x", b"3", 0),
        lambda: prefix.write("x", b"3", first),
        lambda: prefix.append("x", b"3", first),
        lambda: prefix.append("y", b"3", first),
        lambda: prefix.remove(["x"], first),
    ):
        with pytest.raises(Changed):
            request()
    assert prefix.read("x") == b"12"
    prefix.remove(["x"], second)
    assert prefix.generation("x") == 0


ASK = {
    "list": lambda prefix: prefix.list_objects(),
    "read": lambda prefix: prefix.read("x"),
    "upload": lambda prefix: prefix.write("x", b"new"),
    "copy": lambda prefix: prefix.move("x", "y"),
    "delete": lambda prefix: prefix.remove(["x"]),
}


@pytest.mark.parametrize("on", ASK)
def test_a_transient_failure_is_retried_and_a_lasting_one_reported_in_one_line(
    bucket, prefix, on, monkeypatch
):
    prefix.write("x", b"old" * 100)
    faults = [
        ("cut request", Unavailable, r"a request for gs://bucket-\d+/run/x? ?failed"),
        (403, AccessDenied, "Grant this account roles/storage.objectUser and"),
    ]
    if flips := {"read": "flip response", "upload": "flip request"}.get(on):
        faults.append((flips, Unavailable, "a request for .*/run/x failed"))
    for kind, error, words in faults:
        bucket.fault(kind, on=on)
        with pytest.raises(error, match=words) as raised:
            ASK[on](prefix)
        assert "\n" not in str(raised.value)
        bucket.clear_faults()
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)  # the first pause is up to 1 s
    fault = bucket.fault(503, on=on, times=1)
    ASK[on](prefix)
    assert fault.done == 1


def test_a_quarantine_that_stops_on_its_way_leaves_an_unfinished_checkpoint(bucket, prefix):
    half = f"3{checkpoint_directory.UNFINISHED}"
    for name in (f"1/{COMMIT}", f"2/{COMMIT}", "2/a", "2/z", f"{half}/a"):
        prefix.write(name, b"")
    folder = checkpoint_directory.open_directory(prefix.url)
    assert folder.steps() == [1, 2] and folder.is_complete(2) and folder.exists("2/a")
    bucket.fault(403, on="copy", after=1)
    with pytest.raises(AccessDenied):
        folder.quarantine(2)
    assert folder.steps() == [1] and not folder.exists("4") and folder.read(f"1/{COMMIT}") == b""
    assert folder.unfinished() == ["2", half]
    for name in folder.unfinished():
        folder.remove(name)
    assert prefix.list_objects().keys() == {f"1/{COMMIT}", f"damaged-2/{COMMIT}"}


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
        assert words in (buckets.refusal("gs://b/run", error) or "may pass"), error
