"""Requests to an emulated bucket, with the failures that buckets have."""

import base64

import fsspec
import pytest
from gcsfs.retry import HttpError
from google.api_core.exceptions import Forbidden, NotFound, TooManyRequests, Unauthorized
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google.cloud import storage
from google_crc32c import Checksum

from runtime import buckets
from runtime.buckets import AccessDenied, ObjectInfo, Prefix, Unavailable

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def prefix(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 2.0)
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


def test_more_objects_than_a_page_of_a_list_are_found(prefix, monkeypatch):
    list_blobs = storage.Client.list_blobs
    monkeypatch.setattr(
        storage.Client, "list_blobs", lambda *a, **how: list_blobs(*a, page_size=2, **how)
    )
    for i in range(5):
        prefix.write(f"{i}", b"")
    assert prefix.list_objects().keys() == set("01234")


def test_a_write_of_another_client_is_seen_by_gcsfs(bucket, prefix):
    prefix.write("a", b"")
    files = fsspec.filesystem("gcs")
    assert [name.rpartition("/")[2] for name in files.ls(prefix.url)] == ["a"]
    prefix.write("b", b"")
    assert [name.rpartition("/")[2] for name in files.ls(prefix.url)] == ["a", "b"]


def test_a_missing_object_is_a_file_not_found_error(prefix):
    with pytest.raises(FileNotFoundError, match=r"gs://bucket-\d+/run/x does not exist"):
        prefix.read("x")


ASK = {
    "list": lambda prefix: prefix.list_objects(),
    "read": lambda prefix: prefix.read("x"),
    "upload": lambda prefix: prefix.write("x", b"new"),
    "copy": lambda prefix: prefix.move("x", "y"),
    "delete": lambda prefix: prefix.remove(["x"]),
}


@pytest.mark.parametrize("on", ASK)
@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_a_transient_failure_is_retried(bucket, prefix, on, kind, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)  # the first pause is up to 1 s
    prefix.write("x", b"old")
    fault = bucket.fault(kind, on=on, times=1)
    ASK[on](prefix)
    assert fault.done == 1


@pytest.mark.parametrize("on", ASK)
@pytest.mark.parametrize("kind", [503, "cut request"])
def test_a_lasting_failure_is_unavailable(bucket, prefix, on, kind, monkeypatch):
    prefix.write("x", b"old")
    monkeypatch.setattr(buckets, "RETRY_S", 0.2)
    bucket.fault(kind, on=on)
    with pytest.raises(Unavailable, match=r"a request for gs://bucket-\d+/run/x? ?failed"):
        ASK[on](prefix)


@pytest.mark.parametrize("on", ASK)
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "gcloud auth application-default login, or attach a service account"),
        (403, "Grant this account roles/storage.objectUser and"),
    ],
)
def test_a_denied_request_is_an_error_with_the_fix(bucket, prefix, on, status, words):
    prefix.write("x", b"old")
    bucket.fault(status, on=on)
    with pytest.raises(AccessDenied, match=words) as refused:
        ASK[on](prefix)
    assert "\n" not in str(refused.value)


def test_a_missing_bucket_is_reported(bucket, prefix):
    bucket.fault(404)
    with pytest.raises(
        AccessDenied, match=r"There is no bucket bucket-\d+\. Create it, or use another"
    ):
        prefix.list_objects()


AWAY = TransportError("no route to the server of tokens")
CAUSED = RefreshError("wrapped")
CAUSED.__cause__ = AWAY


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Forbidden("by the library"), "Grant this account"),
        (HttpError({"code": 403, "message": "by gcsfs"}), "Grant this account"),
        (OSError("Forbidden: https://storage, by gcsfs"), "Grant this account"),
        (ValueError("PERMISSION_DENIED: by tensorstore"), "Grant this account"),
        (Unauthorized("by the library"), "no valid credentials"),
        (HttpError({"code": 401, "message": "by gcsfs"}), "no valid credentials"),
        (ValueError("UNAUTHENTICATED: by tensorstore"), "no valid credentials"),
        (DefaultCredentialsError("there are none"), "no valid credentials"),
        (RefreshError("invalid_grant"), "no valid credentials"),
        (NotFound("by the library"), "There is no bucket b. Create it"),
        (AWAY, None),
        (CAUSED, None),
        (RefreshError(AWAY), None),
        (RefreshError("busy", retryable=True), None),
        (HttpError({"code": 503, "message": "busy"}), None),
        (TooManyRequests("busy"), None),
        (ValueError("UNAVAILABLE: by tensorstore"), None),
        (OSError("said of Forbidden: in the middle"), None),
    ],
    ids=str,
)
def test_lasting_errors_are_distinguished_from_transient_ones(error, words):
    """In the words of each client; a server of tokens that is away has refused nobody."""
    why = buckets.refusal("gs://b/run", error)
    assert (why is None) if words is None else (words in why)


@pytest.mark.parametrize("on", ["read", "upload"])
def test_a_bit_that_flips_in_transit_is_detected(bucket, prefix, on):
    prefix.write("x", b"old" * 100)
    bucket.fault(f"flip {'request' if on == 'upload' else 'response'}", on=on)
    with pytest.raises(OSError):
        ASK[on](prefix)


@pytest.mark.parametrize(
    "details",
    [
        "[source locations='x.cc:1']",
        f"[tensorstore_spec='{'x' * 500}'] [source locations='x.cc:1']",
    ],
)
def test_a_long_error_keeps_its_beginning_and_its_cause(details):
    path = "d/" * 300
    error = ValueError(f"RESOURCE_EXHAUSTED: Error writing\n{path}: No space left {details}")
    text = buckets.one_line(error)
    assert text.startswith("RESOURCE_EXHAUSTED: Error writing d/") and len(text) == 300
    assert text.endswith("d/: No space left")
    assert buckets.one_line(OSError("a\n b")) == "a b"
