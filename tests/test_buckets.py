"""Objects of an emulated bucket, asked for with what can go wrong."""

import fsspec
import pytest
from gcsfs.retry import HttpError
from google.api_core.exceptions import Forbidden, NotFound, TooManyRequests, Unauthorized
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google.cloud import storage

import buckets
from buckets import Found, Prefix, Refused, Unanswered

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
    assert prefix.found().keys() == {"a", "b/c", "b/d", "bb"}
    assert prefix.found(records_only=True).keys() == {"a", "bb"}
    assert prefix.found("b/").keys() == {"b/c", "b/d"}
    assert prefix.found()["b/c"] == Found(27, buckets.crc32c(b"b/c" * 9))
    assert prefix.read("b/d") == b"b/d" * 9
    prefix.move("b/d", "e")
    prefix.remove(["a", "b/c", "never there"])
    assert prefix.found().keys() == {"bb", "e"} and prefix.read("e") == b"b/d" * 9
    assert Prefix(bucket.url).found().keys() == {"run/bb", "run/e", "run2"}


def test_more_objects_than_a_page_of_a_list_are_found(prefix, monkeypatch):
    list_blobs = storage.Client.list_blobs
    monkeypatch.setattr(
        storage.Client, "list_blobs", lambda *a, **how: list_blobs(*a, page_size=2, **how)
    )
    for i in range(5):
        prefix.write(f"{i}", b"")
    assert prefix.found().keys() == set("01234")


def test_what_another_client_wrote_is_seen_by_the_one_that_orbax_asks(bucket, prefix):
    prefix.write("a", b"")
    files = fsspec.filesystem("gcs")
    assert [name.rpartition("/")[2] for name in files.ls(prefix.url)] == ["a"]
    prefix.write("b", b"")
    assert [name.rpartition("/")[2] for name in files.ls(prefix.url)] == ["a", "b"]


def test_what_is_not_there_is_a_file_that_is_not_there(prefix):
    with pytest.raises(FileNotFoundError, match=r"gs://bucket-\d+/run/x is not there"):
        prefix.read("x")


ASK = {
    "list": lambda prefix: prefix.found(),
    "read": lambda prefix: prefix.read("x"),
    "upload": lambda prefix: prefix.write("x", b"new"),
    "copy": lambda prefix: prefix.move("x", "y"),
    "delete": lambda prefix: prefix.remove(["x"]),
}


@pytest.mark.parametrize("on", ASK)
@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_what_passes_is_bridged(bucket, prefix, on, kind):
    prefix.write("x", b"old")
    fault = bucket.fault(kind, on=on, times=1)
    ASK[on](prefix)
    assert fault.done == 1


@pytest.mark.parametrize("on", ASK)
@pytest.mark.parametrize("kind", [503, "cut request"])
def test_what_does_not_pass_is_a_fault(bucket, prefix, on, kind, monkeypatch):
    prefix.write("x", b"old")
    monkeypatch.setattr(buckets, "RETRY_S", 0.2)
    bucket.fault(kind, on=on)
    with pytest.raises(Unanswered, match=r"gs://bucket-\d+/run/x? ?did not answer as it should"):
        ASK[on](prefix)


@pytest.mark.parametrize("on", ASK)
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "gcloud auth application-default login, or give the machine a service account"),
        (403, "Grant who runs this roles/storage.objectUser and"),
    ],
)
def test_what_is_refused_says_what_to_do(bucket, prefix, on, status, words):
    prefix.write("x", b"old")
    bucket.fault(status, on=on)
    with pytest.raises(Refused, match=words) as refused:
        ASK[on](prefix)
    assert "\n" not in str(refused.value)


def test_a_bucket_that_is_not_there_is_said(bucket, prefix):
    bucket.fault(404)
    with pytest.raises(Refused, match=r"There is no bucket bucket-\d+\. Make it, or give another"):
        prefix.found()


AWAY = TransportError("no route to the server of tokens")
CAUSED = RefreshError("wrapped")
CAUSED.__cause__ = AWAY


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Forbidden("by the library"), "Grant who runs this"),
        (HttpError({"code": 403, "message": "by gcsfs"}), "Grant who runs this"),
        (OSError("Forbidden: https://storage, by gcsfs"), "Grant who runs this"),
        (ValueError("PERMISSION_DENIED: by tensorstore"), "Grant who runs this"),
        (Unauthorized("by the library"), "no credentials that are taken"),
        (HttpError({"code": 401, "message": "by gcsfs"}), "no credentials that are taken"),
        (ValueError("UNAUTHENTICATED: by tensorstore"), "no credentials that are taken"),
        (DefaultCredentialsError("there are none"), "no credentials that are taken"),
        (RefreshError("invalid_grant"), "no credentials that are taken"),
        (NotFound("by the library"), "There is no bucket b. Make it"),
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
def test_what_no_other_request_helps_is_told_from_what_may_pass(error, words):
    """In the words of each client; a server of tokens that is away has refused nobody."""
    why = buckets.refusal("gs://b/run", error)
    assert (why is None) if words is None else (words in why)


@pytest.mark.parametrize("on", ["read", "upload"])
def test_a_bit_that_flips_on_the_way_is_seen(bucket, prefix, on):
    prefix.write("x", b"old" * 100)
    bucket.fault(f"flip {'request' if on == 'upload' else 'response'}", on=on)
    with pytest.raises(OSError):
        ASK[on](prefix)
