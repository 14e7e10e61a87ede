"""The emulated bucket refuses stale generations as a real one does, and fails on request."""

import contextlib

import pytest
import requests
from google.api_core import exceptions
from google.cloud import storage

CONTENT = bytes(range(256)) * 9 + b"\r\n--\r\n\n"


@pytest.fixture
def objects(bucket):
    """Of the bucket, by google-cloud-storage, which here tries everything once."""
    client = storage.Client()
    yield client.bucket(bucket.name)
    client.close()


def put(objects, name, content=CONTENT, **how):
    blob = objects.blob(name)
    blob.upload_from_string(content, retry=None, timeout=60, **how)
    return blob.generation


def get(objects, name, **how):
    return objects.blob(name).download_as_bytes(retry=None, timeout=60, **how)


def test_a_generation_that_is_not_the_newest_is_refused(bucket, objects):
    first = put(objects, "x", if_generation_match=0)
    second = put(objects, "x", b"second", if_generation_match=first)
    stale = {"if_generation_match": first, "retry": None}
    for request in (
        lambda: put(objects, "x", if_generation_match=0),
        lambda: put(objects, "x", if_generation_match=first),
        lambda: objects.blob("x").delete(**stale),
        lambda: objects.copy_blob(objects.blob("x"), objects, "x", **stale),
        lambda: get(objects, "x", if_generation_match=first),
    ):
        with pytest.raises(exceptions.PreconditionFailed):
            request()
    read = objects.blob("x")
    assert read.download_as_bytes() == b"second" and read.generation == int(second)
    read.delete(if_generation_match=second)
    # A chunked upload is checked at its end.
    url = f"{bucket.environment['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{bucket.name}/o"
    start = requests.post(f"{url}?uploadType=resumable&name=x&ifGenerationMatch=0", json={})
    put(objects, "x")
    place = start.headers["Location"].replace("&ifGenerationMatch=0", "")  # as gcsfs does
    assert requests.put(place, data=b"late").status_code == 412
    assert get(objects, "x", start=5, end=9) == CONTENT[5:10]
    assert get(objects, "x", start=-7) == CONTENT[-7:]


def test_the_third_and_fourth_upload_of_a_folder_fail_and_no_other(bucket, objects):
    fault = bucket.fault("cut request", on="upload", path="run/checkpoints/*", after=2, times=2)
    for number in range(6):
        put(objects, f"run/samples/{number}")
        with contextlib.suppress(requests.exceptions.ConnectionError):
            put(objects, f"run/checkpoints/{number}")
    assert (fault.seen, fault.done) == (6, 2)
    stored = objects.client.list_blobs(objects, prefix="run/checkpoints/", page_size=1)
    assert [blob.name[-1] for blob in stored] == ["0", "1", "4", "5"]
    bucket.fault("cut response", on="upload")  # the object is written
    with pytest.raises(requests.exceptions.RequestException):
        put(objects, "x")
    bucket.clear_faults()
    assert get(objects, "x") == CONTENT
    bucket.fault("flip request", on="upload")
    put(objects, "x", checksum=None)
    differ = [(a ^ b).bit_count() for a, b in zip(get(objects, "x"), CONTENT, strict=True)]
    assert sum(differ) == 1
