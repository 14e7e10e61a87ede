"""The emulated bucket serves the three clients that a run has, and fails as it is child."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import requests
from google.api_core import exceptions
from google.auth.exceptions import InvalidOperation
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

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


# --- as a bucket ----------------------------------------------------------------------------------


def test_google_cloud_storage_writes_reads_lists_copies_and_deletes(bucket, objects):
    for name in ("run/a", "run/b", "run/deep/c", "other"):
        put(objects, name)
    assert get(objects, "run/a") == CONTENT
    assert get(objects, "run/a", start=5, end=9) == CONTENT[5:10]
    assert get(objects, "run/a", start=-7) == CONTENT[-7:]
    listed = objects.client.list_blobs(objects, prefix="run/", delimiter="/", page_size=1)
    assert [blob.name for blob in listed] == ["run/a", "run/b"]
    assert listed.prefixes == {"run/deep/"}
    objects.copy_blob(objects.blob("run/a"), objects, "run/copy", retry=None)
    assert get(objects, "run/copy") == CONTENT
    objects.blob("run/a").delete(retry=None)
    assert not objects.blob("run/a").exists()
    assert "copy run/copy 200" in bucket.log and "delete run/a 200" in bucket.log


def test_a_chunked_upload_is_complete_and_named_in_each_chunk(bucket, objects):
    content = np.random.default_rng(1).bytes(700_000)
    with objects.blob("large").open("wb", chunk_size=1 << 18) as file:
        file.write(content)
    assert get(objects, "large") == content
    assert bucket.log[:3] == ["start large 200", "upload large 308", "upload large 308"]


def test_a_generation_that_is_not_the_newest_is_refused(objects):
    first = put(objects, "x", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        put(objects, "x", if_generation_match=0)
    second = put(objects, "x", b"second", if_generation_match=first.generation)
    stale = {"if_generation_match": first.generation, "retry": None}
    with pytest.raises(exceptions.PreconditionFailed):
        put(objects, "x", if_generation_match=first.generation)
    with pytest.raises(exceptions.PreconditionFailed):
        objects.blob("x").delete(**stale)
    with pytest.raises(exceptions.PreconditionFailed):
        objects.copy_blob(objects.blob("x"), objects, "x", if_generation_match=0, retry=None)
    with pytest.raises(exceptions.PreconditionFailed):
        get(objects, "x", if_generation_match=first.generation)
    read = objects.blob("x")
    assert read.download_as_bytes() == b"second"
    assert read.generation == int(second.generation)
    read.delete(if_generation_match=second.generation)


def test_the_precondition_of_a_chunked_upload_is_checked_at_its_end(bucket, objects):
    url = f"{bucket.environment['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{bucket.name}/o"
    start = requests.post(f"{url}?uploadType=resumable&name=x&ifGenerationMatch=0", json={})
    put(objects, "x")
    place = start.headers["Location"].replace("&ifGenerationMatch=0", "")  # as gcsfs does
    assert requests.put(place, data=b"late").status_code == 412
    assert get(objects, "x") == CONTENT


def test_of_many_that_create_an_object_at_once_one_does(bucket):
    threads, made = 8, []
    ready = threading.Barrier(threads)

    def create(number):
        client = storage.Client()
        ready.wait()
        try:
            put(client.bucket(bucket.name), "x", str(number), if_generation_match=0)
            made.append(number)
        except exceptions.PreconditionFailed:
            pass
        client.close()

    workers = [threading.Thread(target=create, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    [winner] = made
    with_client = storage.Client()
    assert get(with_client.bucket(bucket.name), "x") == str(winner).encode()
    with_client.close()


def test_a_range_that_begins_at_the_end_is_refused(bucket, objects):
    put(objects, "x")
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        get(objects, "x", start=len(CONTENT))
    assert get(objects, "x", start=len(CONTENT) - 1, end=len(CONTENT) + 9) == CONTENT[-1:]


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_tensorstore_writes_reads_and_lists_through_ocdbt(bucket, driver):
    import tensorstore as ts

    kvstore = {"driver": "ocdbt", "base": f"{bucket.url}/run/state", "path": "weights/"}
    array = np.arange(600, dtype=np.float32).reshape(20, 30)
    spec = {"driver": driver, "kvstore": kvstore}
    new = ts.open(spec, create=True, dtype=ts.float32, shape=[20, 30]).result()
    new.write(array).result()
    new[3:5].write(0 * array[3:5]).result()
    array[3:5] = 0
    context = ts.Context()  # nothing is remembered of the writing
    again = ts.open(spec, context=context).result().read().result()
    np.testing.assert_array_equal(again, array)
    keys = ts.KvStore.open(f"{bucket.url}/run/").result().list().result()
    assert b"state/manifest.ocdbt" in keys


def test_tensorstore_sees_generations_parts_of_lists_and_missing_objects(bucket):
    import tensorstore as ts

    keys = ts.KvStore.open(f"{bucket.url}/run/").result()
    first = keys.write("x", CONTENT).result()
    missing = keys.read("y").result()
    assert missing.state == "missing"
    refused = keys.write("x", b"no", if_equal=missing.stamp.generation).result()
    assert refused.generation != first.generation
    assert keys.read("x").result().value == CONTENT
    assert keys.read("x").result().stamp.generation == first.generation
    keys.write("x", b"second", if_equal=first.generation).result()
    unchanged = keys.read("x", if_not_equal=keys.read("x").result().stamp.generation).result()
    assert unchanged.state == "unspecified"
    for name in "abcd":
        keys.write(name, b"").result()
    assert keys.list(ts.KvStore.KeyRange("b", "d")).result() == [b"b", b"c"]
    keys.delete_range(ts.KvStore.KeyRange("a", "c")).result()
    assert sorted(keys.list().result()) == [b"c", b"d", b"x"]


def test_epath_writes_reads_lists_renames_copies_and_deletes(bucket):
    from etils import epath

    run = epath.Path(bucket.url) / "run"
    run.mkdir(parents=True, exist_ok=True)
    assert not run.exists()  # a folder is there when something is in it
    (run / "a").write_bytes(CONTENT)
    (run / "deep" / "b").write_text("text")
    assert run.is_dir() and (run / "a").read_bytes() == CONTENT
    with (run / "a").open("rb") as file:
        file.seek(5)
        assert file.read(4) == CONTENT[5:9]
    assert sorted(entry.name for entry in run.iterdir()) == ["a", "deep"]
    (run / "a").copy(run / "copy")
    (run / "deep").rename(run / "renamed")
    assert (run / "copy").read_bytes() == CONTENT
    assert (run / "renamed" / "b").read_text() == "text" and not (run / "deep").exists()
    (run / "copy").unlink()
    run.rmtree()
    assert not run.exists()
    assert sorted({line.split()[0] for line in bucket.log}) == [
        *("delete", "list", "look", "move", "read", "start", "upload")
    ]


def test_other_processes_see_the_bucket(bucket, objects):
    put(objects, "x")
    program = (
        "from google.cloud import storage; import sys; "
        f"print(len(storage.Client().bucket('{bucket.name}').blob('x').download_as_bytes()))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(child.stdout) == len(CONTENT)


def test_the_environment_is_as_it_was():
    assert "STORAGE_EMULATOR_HOST" not in os.environ
    assert "GOOGLE_AUTH_TOKEN_FOR_TESTING" not in os.environ


# --- as one that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, InvalidOperation),  # needs new credentials, and there are none
        (403, exceptions.Forbidden),
        (404, exceptions.NotFound),
        (429, exceptions.TooManyRequests),
        (500, exceptions.InternalServerError),
        (503, exceptions.ServiceUnavailable),
    ],
)
def test_a_status_is_answered_and_nothing_done(bucket, objects, status, error):
    uploads, reads = bucket.fault(status, on="upload"), bucket.fault(status, on="read")
    with pytest.raises(error):
        put(objects, "x")
    with pytest.raises(error):
        get(objects, "x")
    assert (uploads.done, reads.done) == (1, 1)
    assert not objects.blob("x").exists()
    assert bucket.log[0] == f"upload x {status}"


def test_the_third_and_fourth_upload_of_a_folder_fail_and_no_other(bucket, objects):
    fault = bucket.fault(503, on="upload", path="run/checkpoints/*", after=2, times=2)
    failed = []
    for number in range(6):
        put(objects, f"run/samples/{number}")
        try:
            put(objects, f"run/checkpoints/{number}")
        except exceptions.ServiceUnavailable:
            failed.append(number)
    assert failed == [2, 3]
    assert (fault.seen, fault.done) == (6, 2)


def test_every_write_fails_until_the_fault_ends(bucket, objects):
    put(objects, "x")
    bucket.fault(503, on="write")
    with pytest.raises(exceptions.ServiceUnavailable):
        put(objects, "y")
    with pytest.raises(exceptions.ServiceUnavailable):
        objects.blob("x").delete(retry=None)
    assert get(objects, "x") == CONTENT
    bucket.clear_faults()
    put(objects, "y")


def test_a_request_that_is_cut_did_not_arrive(bucket, objects):
    bucket.fault("cut request", on="upload", times=1)
    with pytest.raises(requests.exceptions.ConnectionError):
        put(objects, "x", os.urandom(1 << 20))
    assert not objects.blob("x").exists()


def test_an_answer_that_is_cut_was_of_something_done(bucket, objects):
    bucket.fault("cut response", on="upload", times=1)
    with pytest.raises(requests.exceptions.RequestException):
        put(objects, "x")
    bucket.fault("cut response", on="read", times=1)
    with pytest.raises(requests.exceptions.RequestException):
        get(objects, "x")
    assert get(objects, "x") == CONTENT


def test_a_bit_that_flips_is_found_by_checksums_alone(bucket, objects):
    with_no_checksum = {"checksum": None}
    bucket.fault("flip request", on="upload", times=2)
    with pytest.raises(exceptions.BadRequest, match="CRC32C"):
        put(objects, "x")
    put(objects, "x", **with_no_checksum)
    stored = get(objects, "x")
    changed = np.bitwise_xor(np.frombuffer(stored, np.uint8), np.frombuffer(CONTENT, np.uint8))
    assert np.bitwise_count(changed).sum() == 1
    put(objects, "x")
    bucket.fault("flip response", on="read", times=2)
    with pytest.raises(DataCorruption):
        get(objects, "x")
    assert get(objects, "x", **with_no_checksum) != CONTENT
    assert get(objects, "x") == CONTENT


def test_a_delay_ends_after_its_time_or_on_request(bucket, objects):
    put(objects, "x")
    bucket.fault("delay", on="read", seconds=0.5, times=1)
    began = time.monotonic()
    assert get(objects, "x") == CONTENT
    assert time.monotonic() - began >= 0.5
    fault = bucket.fault("delay", on="read", seconds=600)
    reader = threading.Thread(target=get, args=(objects, "x"))
    reader.start()
    assert fault.happened.wait(60)
    fault.stopped.set()
    reader.join(60)
    assert not reader.is_alive()


def test_tensorstore_and_gcsfs_try_again(bucket):
    import tensorstore as ts
    from etils import epath

    fault = bucket.fault(503, on="upload", times=2)
    (epath.Path(bucket.url) / "x").write_text("text")
    assert fault.done == 2
    fault = bucket.fault(503, on="read", times=1)
    assert ts.KvStore.open(bucket.url + "/").result().read("x").result().value == b"text"
    assert fault.done == 1
