"""Checkpoints in a bucket: as in a folder, with requests that fail or change on the way."""

import gc
import types

import gcsfs.retry
import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils

import checkpoint
from checkpoint import Checkpoints, Damaged
from runtime import storage
from runtime.errors import Exit, code_of
from runtime.run_directory import COMMIT
from runtime.storage import AccessDenied, BucketFolder, Unavailable
from saved_state import (
    CONFIG,
    abstract,
    assert_newest,
    assert_same,
    mesh_of,
    opened,
    saved,
    state,
    state_on,
    wait_for_late_writes,
)

# Writes that fail when Orbax no longer waits for them find its event loop closed, and only warn.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def folder(bucket, monkeypatch):
    """A folder for which each client repeats a request a few times, and at once."""
    retries = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "20ms"}
    for name in ("_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"):
        monkeypatch.setitem(getattr(tensorstore_utils, name), "gcs_request_retries", retries)
    monkeypatch.setattr(BucketFolder, "tensorstore_context", {"gcs_request_retries": retries})
    asyncio = gcsfs.retry.asyncio
    at_once = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 1000))
    monkeypatch.setattr(gcsfs.retry, "asyncio", at_once)
    monkeypatch.setattr(storage, "RETRY_S", 0.5)
    gc.freeze()  # the collection below, of what this test leaves, need not search all else
    yield f"{bucket.url}/run/checkpoints"
    gc.collect()  # what late writes leave is collected here, and not in another test
    gc.unfreeze()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: content} of checkpoints 1 and 2, which were written to a disk."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, 1, 2).close()
    found = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


@pytest.fixture
def steps_1_2(folder, files):
    for name, content in files.items():
        BucketFolder(folder).write(name, content)
    return folder


def steps_in(folder):
    return sorted({name.split("/")[0] for name in BucketFolder(folder).files()} - {"probe-0"})


def test_a_state_is_restored_bit_for_bit_on_another_mesh_and_from_a_copy(folder, tmp_path):
    with opened(folder, keep=1) as checkpoints:
        with pytest.raises(ValueError, match=r"no such folder"):
            Checkpoints(f"{folder}-of-another")
        assert checkpoints.newest({}) is None
        for step in (1, 2):
            checkpoints.save(step, state(step), CONFIG)
        assert_newest(checkpoints, 2, state_on(mesh_of(1, 4, 2), 2, 2))
    assert steps_in(folder) == ["2"]
    for name in BucketFolder(folder).files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(BucketFolder(folder).read(name))
    for copy in (folder, tmp_path):
        with opened(copy) as reader:
            assert_newest(reader, 2, state_on(mesh_of(8, 1, 1), 2))


# --- saves that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "path", "expected"),
    [
        (404, "*", AccessDenied),
        (503, "*/2/state/*/d/*", Unavailable),
        (429, f"*/2/config/{checkpoint.RECORD}", Unavailable),
        (403, f"*/2/{COMMIT}", AccessDenied),
    ],
)
def test_a_save_that_fails_ends_the_run(bucket, folder, kind, path, expected):
    checkpoints = saved(folder, 1)
    fault = bucket.fault(kind, on="write", path=path)
    with pytest.raises(expected, match="gs://") as failure:
        checkpoints.save(2, state(2), CONFIG)
        checkpoints.wait()
    assert fault.done and "\n" not in str(failure.value)
    assert code_of(failure.value) == (Exit.CONFIG if expected is AccessDenied else Exit.RETRY)
    checkpoints.close()
    if path == "*":
        with pytest.raises(expected, match="gs://"):
            Checkpoints(folder, 1)
    bucket.clear_faults()
    wait_for_late_writes(lambda: len(bucket.log))
    with opened(folder, keep=3) as again:
        assert_newest(again, 1, state(1))
        again.save(2, state(2), CONFIG)
        assert_newest(again, 2, state(2))
    assert steps_in(folder) == ["1", "2"]


@pytest.mark.parametrize("kind", [503, "cut response"])
def test_transient_failures_are_retried(bucket, folder, kind, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 20.0)
    paths = ("*/state/*/d/*", "*/state/d/*", f"*/config/{checkpoint.RECORD}", f"*/2/{COMMIT}")
    with opened(folder, keep=1) as checkpoints:
        faults = [bucket.fault(kind, on="write", path=path, times=2) for path in paths]
        checkpoints.save(2, state(2), CONFIG)
        checkpoints.wait()
        faults += [bucket.fault(kind, on="read", path=path, times=2) for path in paths[:3]]
        faults += [bucket.fault(kind, on="list", times=2)]
        assert_newest(checkpoints, 2, state(2))
    assert all(fault.done == 2 for fault in faults), [fault.done for fault in faults]


# --- restores that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "on", "path"),
    [
        ("cut response", "list", "run/checkpoints/"),
        (403, "read", f"*/{checkpoint.RECORD}"),
        (403, "read", "*/state/*"),
        (503, "any", "*/2/state/d/*"),
    ],
)
def test_a_failed_request_is_not_damage(bucket, steps_1_2, capsys, kind, on, path):
    fault = bucket.fault(kind, on=on, path=path)
    refused = pytest.raises(AccessDenied if kind == 403 else Unavailable, match="gs://")
    with refused, opened(steps_1_2, keep=3) as checkpoints:
        checkpoints.newest(abstract(state(2)))
    assert fault.done
    bucket.clear_faults()
    assert steps_in(steps_1_2) == ["1", "2"] and "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("times", [1, 99])
def test_a_bit_that_flips_during_a_read_is_never_restored(bucket, steps_1_2, times):
    fault = bucket.fault("flip response", on="read", path="*/checkpoints/2*/d/*", times=times)
    with opened(steps_1_2) as reader:
        try:
            step, found = reader.newest(abstract(state(2)))
        except (Damaged, Unavailable):
            assert times > 1
        else:
            assert times > 1 or step == 2  # it is read again
            assert_same(found, state(step))
    assert fault.done
