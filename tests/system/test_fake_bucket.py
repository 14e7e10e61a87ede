"""The emulated bucket serves the clients that a run has, and fails on request."""

import contextlib
import os
import threading

import numpy as np
import pytest
import requests
from google.api_core import exceptions
from google.cloud import storage

CONTENT = np.random.default_rng(0).bytes(3000) + b"\r\n--\r\n\n"


@pytest.fixture
def objects(bucket):
    """Of the bucket, by google-cloud-storage, which here tries everything once."""
    client = storage.Client()
    yield client.bucket(bucket.name)
    client.close()


def put(objects, name, content=CONTENT, **how):
    blob = objects.blob(name)
    blob.upload_from_string(content, retry=None, timeout=60, **how)
    return blob


def get(objects, name, **how):
    return objects.blob(name).download_as_bytes(retry=None, timeout=60, **how)


def test_a_generation_that_is_not_the_newest_is_refused(objects):
    first = put(objects, "x", if_generation_match=0)
    second = put(objects, "x", b"second", if_generation_match=first.generation)
    stale = {"if_generation_match": first.generation, "retry": None}
    copy = lambda **how: objects.copy_blob(objects.blob("x"), objects, "x", **how)  # noqa: E731
    for request in (
        lambda: put(objects, "x", if_generation_match=0),
        lambda: put(objects, "x", if_generation_match=first.generation),
        lambda: objects.blob("x").delete(**stale),
        lambda: copy(**stale),
        lambda: get(objects, "x", if_generation_match=first.generation),
    ):
        with pytest.raises(exceptions.PreconditionFailed):
            request()
    read = objects.blob("x")
    assert read.download_as_bytes() == b"second"
    assert read.generation == int(second.generation)
    read.delete(if_generation_match=second.generation)


def test_a_chunked_upload_is_named_in_each_chunk_and_checked_at_its_end(bucket, objects):
    content = np.random.default_rng(1).bytes(700_000)
    with objects.blob("large").open("wb", chunk_size=1 << 18) as file:
        file.write(content)
    assert get(objects, "large") == content
    assert bucket.log[:3] == ["start large 200", "upload large 308", "upload large 308"]
    url = f"{bucket.environment['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{bucket.name}/o"
    start = requests.post(f"{url}?uploadType=resumable&name=x&ifGenerationMatch=0", json={})
    put(objects, "x")
    place = start.headers["Location"].replace("&ifGenerationMatch=0", "")  # as gcsfs does
    assert requests.put(place, data=b"late").status_code == 412
    assert get(objects, "x") == CONTENT


def test_the_third_and_fourth_upload_of_a_folder_fail_and_no_other(bucket, objects):
    fault = bucket.fault(503, on="upload", path="run/checkpoints/*", after=2, times=2)
    for number in range(6):
        put(objects, f"run/samples/{number}")
        with contextlib.suppress(exceptions.ServiceUnavailable):
            put(objects, f"run/checkpoints/{number}")
    assert (fault.seen, fault.done) == (6, 2)
    stored = objects.client.list_blobs(objects, prefix="run/checkpoints/", page_size=1)
    assert [blob.name[-1] for blob in stored] == ["0", "1", "4", "5"]


def test_a_request_that_is_cut_did_not_arrive_and_a_cut_answer_was_of_something_done(
    bucket, objects
):
    bucket.fault("cut request", on="upload", times=1)
    with pytest.raises(requests.exceptions.ConnectionError):
        put(objects, "x", os.urandom(1 << 20))
    assert not objects.blob("x").exists()
    bucket.fault("cut response", on="upload", times=1)
    with pytest.raises(requests.exceptions.RequestException):
        put(objects, "x")
    bucket.fault("cut response", on="read", times=1)
    with pytest.raises(requests.exceptions.RequestException):
        get(objects, "x")
    assert get(objects, "x") == CONTENT


def test_one_bit_flips_and_a_delay_ends_on_request(bucket, objects):
    bucket.fault("flip request", on="upload", times=1)
    put(objects, "x", checksum=None)
    stored = get(objects, "x")
    changed = np.bitwise_xor(np.frombuffer(stored, np.uint8), np.frombuffer(CONTENT, np.uint8))
    assert np.bitwise_count(changed).sum() == 1
    bucket.fault("flip response", on="read", times=1)
    assert get(objects, "x", checksum=None) != stored
    fault = bucket.fault("delay", on="read", seconds=600)
    reader = threading.Thread(target=get, args=(objects, "x"))
    reader.start()
    assert fault.happened.wait(60)
    fault.stopped.set()
    reader.join(60)
    assert not reader.is_alive()
