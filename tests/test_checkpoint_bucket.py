"""Checkpoints in a bucket: as in a folder, with requests that fail or change on the way."""

import functools
import gc
import shutil
import types

import gcsfs.retry
import jax
import pytest
from google.cloud import storage
from orbax.checkpoint._src.serialization import tensorstore_utils

import checkpoint
from checkpoint import Checkpoints, Damaged
from common import mostly_long
from runtime import buckets, checkpoint_directory, stored_array
from runtime.checkpoint_directory import COMMIT
from runtime.errors import Exit, code_of
from saved_state import (
    CONFIG,
    abstract,
    assert_newest,
    assert_same,
    mesh_of,
    opened,
    saved,
    seconds,
    state_on,
    wait_for_late_writes,
)

STEP_2 = "run/checkpoints/2"

# Writes that fail when Orbax no longer waits for them find its event loop closed, and only warn.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def folder(bucket, monkeypatch):
    """A folder for which each client repeats a request a few times, and at once."""
    retries = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "20ms"}
    for name in ("_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"):
        monkeypatch.setitem(getattr(tensorstore_utils, name), "gcs_request_retries", retries)
    monkeypatch.setattr(stored_array, "READ_RETRIES", retries)
    asyncio = gcsfs.retry.asyncio
    at_once = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 1000))
    monkeypatch.setattr(gcsfs.retry, "asyncio", at_once)
    monkeypatch.setattr(buckets, "RETRY_S", 0.5)
    gc.freeze()  # the collection below, of what this test leaves, need not search all else
    yield f"{bucket.url}/run/checkpoints"
    gc.collect()  # what late writes leave is collected here, and not in another test
    gc.unfreeze()


@pytest.fixture(scope="module")
def states():
    return {step: state_on(mesh_of(2, 2, 2), seed=step) for step in (1, 2, 3)}


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """{name: content} of the files of checkpoints 1 and 2, which were written to a disk."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, 1, 2).close()
    return {
        f"run/checkpoints/{file.relative_to(folder)}": file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def steps_1_2(bucket, folder, contents):
    for name, content in contents.items():
        put(bucket, name, content)
    return folder


@functools.cache
def client():
    return storage.Client(project=None)


def blob(bucket, name):
    return client().bucket(bucket.name).blob(name)


def put(bucket, name, content):
    blob(bucket, name).upload_from_string(content)


def names_in(bucket, below="run/checkpoints/"):
    return {b.name for b in client().list_blobs(bucket.name, prefix=below)}


def steps_in(bucket):
    return sorted({name.split("/")[2] for name in names_in(bucket)} - {"probe-0"})


def test_a_state_is_restored_bit_for_bit_on_every_mesh(bucket, folder):
    with opened(folder, keep=1) as checkpoints:
        with pytest.raises(ValueError, match=r"no such folder"):
            Checkpoints(f"{folder}-of-another")
        assert checkpoints.newest({}) is None
        for step in (1, 2):
            checkpoints.save(step, state_on(mesh_of(2, 2, 2), step), CONFIG)
        for shape, virtual in (((8, 1, 1), 1), ((1, 4, 2), 2), ((1, 1, 1), 1)):
            assert_newest(checkpoints, 2, state_on(mesh_of(*shape), 2, virtual))
        assert checkpoints.record(2)["config"]["model"] == CONFIG["model"]
    assert steps_in(bucket) == ["2"]
    expected = state_on(mesh_of(8, 1, 1), 2)
    with opened(folder) as reader:
        part = {"weights": expected["weights"]}
        assert_same(reader.good(None, abstract(part))[1], part)
        matrix = reader.arrays(2)["weights.first.matrix"].whole()
        assert (matrix == expected["weights"].first["matrix"]).all()


# --- what a save keeps on the devices -------------------------------------------------------------


def live_bytes():
    """Bytes of the devices' buffers, without those of pinned host memory."""
    on_device = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for x in jax.live_arrays()
        if not x.is_deleted() and x.sharding.memory_kind == jax.devices()[0].default_memory().kind
        for shard in x.addressable_shards
    }
    return sum(on_device.values())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 1)])
def test_a_save_keeps_no_second_state_on_the_devices(bucket, folder, shape):
    """Also not after the next step, which donates the state while Orbax still writes the last."""
    mesh = mesh_of(*shape)
    state, expected = state_on(mesh, 1), state_on(mesh, 1)
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    step = add.lower(state).compile()
    with opened(folder, keep=2) as checkpoints:
        gc.collect()
        before = live_bytes()
        write = bucket.fault("delay", on="write", path="*/1/state/*", seconds=20)
        checkpoints.save(1, state, CONFIG)
        during = live_bytes()
        state = jax.block_until_ready(step(state))
        assert write.happened.wait(60)
        after_a_step = live_bytes()
        assert checkpoints.steps() == [] and not checkpoints.failed()
        bucket.clear_faults()
        assert_newest(checkpoints, 1, expected)
    assert during <= 1.05 * before and after_a_step <= 1.05 * before


# --- damage ---------------------------------------------------------------------------------------


def cut_short(content):
    return content[: len(content) // 2]


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def removed(content):
    return None


@pytest.mark.slow
@pytest.mark.parametrize("harm", mostly_long([cut_short, flipped, removed], flipped))
def test_no_damaged_object_results_in_a_wrong_state(
    bucket, steps_1_2, contents, states, harm, capsys
):
    bad = set()
    for name, content in contents.items():
        if not name.startswith(STEP_2):
            continue
        harmed = harm(content)
        blob(bucket, name).delete() if harmed is None else put(bucket, name, harmed)
        capsys.readouterr()
        with opened(steps_1_2) as reader:
            step, state = reader.newest(abstract(states[2]))
        assert_same(state, states[step])
        out = capsys.readouterr().out
        if f"warning: the checkpoint of step 2 in {steps_1_2} is damaged" in out:
            bad.add(name.removeprefix(f"{STEP_2}/"))
        is_unfinished = harm is removed and name == f"{STEP_2}/{COMMIT}"
        assert (step == 1) == (bool(out) or is_unfinished)
        put(bucket, name, content)
    assert bad > {f"config/{checkpoint.RECORD}", "state/manifest.ocdbt"}
    with opened(steps_1_2) as reader:
        assert_newest(reader, 2, states[2])


def test_an_incomplete_checkpoint_is_removed(bucket, steps_1_2, states, capsys):
    folder = checkpoint_directory.open_directory(steps_1_2)
    assert folder.is_complete(2)
    blob(bucket, f"{STEP_2}/{COMMIT}").delete()
    assert folder.is_complete(1) and not folder.is_complete(2)
    with opened(steps_1_2) as reader:
        assert_newest(reader, 1, states[1])
    assert steps_in(bucket) == ["1", "2"]
    with opened(steps_1_2, keep=2) as checkpoints:
        assert_newest(checkpoints, 1, states[1])
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"warning: removed {steps_1_2}/2, which was not complete"
    assert steps_in(bucket) == ["1"]


@pytest.mark.parametrize("moved", [0, 1, 5])
def test_a_quarantine_that_fails_in_part_leaves_an_unfinished_checkpoint(
    bucket, steps_1_2, contents, states, moved
):
    put(bucket, f"{STEP_2}/state/manifest.ocdbt", b"")
    fault = bucket.fault(403, on="copy", after=moved)
    with pytest.raises(buckets.AccessDenied), opened(steps_1_2, keep=3) as checkpoints:
        checkpoints.newest(abstract(states[1]))
    assert fault.done == 1
    bucket.clear_faults()
    with opened(steps_1_2) as reader:
        assert reader.steps() == ([1] if moved else [1, 2])
    with opened(steps_1_2, keep=3) as checkpoints:
        assert_newest(checkpoints, 1, states[1])
        assert steps_in(bucket) == ["1", "damaged-2"]
        checkpoints.save(2, states[2], CONFIG)
        assert_newest(checkpoints, 2, states[2])
    assert steps_in(bucket) == ["1", "2", "damaged-2"]


def test_a_copy_of_a_bucket_on_a_disk_is_the_same_checkpoint(bucket, folder, states, tmp_path):
    saved(folder, 1, 2).close()
    for name in names_in(bucket):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        blob(bucket, name).download_to_filename(tmp_path / name)
    with opened(tmp_path / "run" / "checkpoints", keep=3) as checkpoints:
        assert_newest(checkpoints, 2, states[2])
        checkpoints.save(3, states[1], CONFIG)
        assert_newest(checkpoints, 3, states[1])
    shutil.rmtree(tmp_path / "run")


# --- saves that fail ------------------------------------------------------------------------------

PERSISTENT = {403: buckets.AccessDenied, 404: buckets.AccessDenied}
PERSISTENT |= dict.fromkeys([429, 503, "cut request"], buckets.Unavailable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *((kind, "*") for kind in PERSISTENT),
        *((kind, "*/checkpoints/2/*") for kind in PERSISTENT if kind != 404),
        (403, "*/2/state/*/d/*"),
        (503, "*/2/state/*/d/*"),
        (503, "*/2/state/d/*"),
        ("cut request", f"*/2/config/{checkpoint.RECORD}"),
        (429, f"*/2/{COMMIT}"),
        (403, f"*/2/{COMMIT}"),
    ],
)
def test_a_save_that_fails_ends_the_run(bucket, folder, states, kind, path):
    expected = PERSISTENT[kind]
    checkpoints = saved(folder, 1)
    fault = bucket.fault(kind, on="write", path=path)
    with pytest.raises(expected, match="gs://") as failure:
        checkpoints.save(2, states[2], CONFIG)
        checkpoints.wait()
    assert fault.done and "\n" not in str(failure.value)
    assert code_of(failure.value) == (
        Exit.CONFIG if expected is buckets.AccessDenied else Exit.RETRY
    )
    assert seconds(checkpoints.close) < 1
    if path == "*":
        with pytest.raises(expected, match="gs://"):
            Checkpoints(folder, 1)
    bucket.clear_faults()
    wait_for_late_writes(lambda: len(bucket.log))
    with opened(folder, keep=3) as again:
        assert_newest(again, 1, states[1])
        again.save(2, states[2], CONFIG)
        assert_newest(again, 2, states[2])
    assert steps_in(bucket) == ["1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_transient_failures_are_retried(bucket, folder, states, kind, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)
    paths = ("*/state/*/d/*", "*/state/d/*", f"*/config/{checkpoint.RECORD}", f"*/2/{COMMIT}")
    with opened(folder, keep=1) as checkpoints:
        faults = [bucket.fault(kind, on="write", path=path, times=2) for path in paths]
        checkpoints.save(2, states[2], CONFIG)
        checkpoints.wait()
        faults += [bucket.fault(kind, on="read", path=path, times=2) for path in paths[:3]]
        faults += [bucket.fault(kind, on="list", times=2)]
        assert_newest(checkpoints, 2, states[2])
    assert all(fault.done == 2 for fault in faults), [fault.done for fault in faults]


@pytest.mark.long
@pytest.mark.parametrize(
    "path", ["*/state/*/d/*", "*/state/d/*", "*/state/manifest.ocdbt", f"*/{checkpoint.RECORD}"]
)
@pytest.mark.parametrize("kind", ["flip request", "flip response"])
def test_a_bit_that_flips_during_a_write_is_never_restored(bucket, folder, states, kind, path):
    checkpoints = saved(folder, 1)
    fault = bucket.fault(kind, on="write", path=path)
    try:
        checkpoints.save(2, states[2], CONFIG)
        checkpoints.wait()
    except (buckets.AccessDenied, buckets.Unavailable):
        pass
    assert fault.done
    bucket.clear_faults()
    wait_for_late_writes(lambda: len(bucket.log))
    checkpoints.close()
    with opened(folder, keep=3) as checkpoints:
        step, found = checkpoints.newest(abstract(states[2]))
        assert_same(found, states[step])


# --- restores that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [400, 401, 403, 429, 503, "cut request", "cut response"])
@pytest.mark.parametrize("path", ["run/checkpoints/", f"*/{checkpoint.RECORD}", "*/state/*"])
def test_a_failed_request_is_not_damage(bucket, steps_1_2, states, capsys, kind, path):
    before = names_in(bucket)
    fault = bucket.fault(kind, on="list" if path.endswith("/") else "read", path=path)
    expected = buckets.AccessDenied if kind in (401, 403) else buckets.Unavailable
    for keep in (3, None):
        with pytest.raises(expected, match="gs://"), opened(steps_1_2, keep) as checkpoints:
            checkpoints.newest(abstract(states[2]))
    assert fault.done
    bucket.clear_faults()
    assert names_in(bucket) - {"run/checkpoints/probe-0"} == before
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize(("first", "kind"), [(1, 503), (8, "cut request"), (20, 503), (40, 503)])
def test_a_bucket_that_stops_responding_hides_no_checkpoint(bucket, steps_1_2, states, first, kind):
    fault = bucket.fault(kind, after=first)
    with pytest.raises(buckets.Unavailable), opened(steps_1_2, keep=3) as checkpoints:
        checkpoints.newest(abstract(states[2]))
    assert fault.done
    bucket.clear_faults()
    with opened(steps_1_2, keep=3) as checkpoints:
        assert_newest(checkpoints, 2, states[2])


@pytest.mark.parametrize("path", ["*/d/*", "*/state/manifest.ocdbt", f"*/{checkpoint.RECORD}"])
@pytest.mark.parametrize("times", [1, float("inf")])
def test_a_bit_that_flips_during_a_read_is_never_restored(bucket, steps_1_2, states, path, times):
    fault = bucket.fault("flip response", on="read", path=f"{STEP_2}{path}", times=times)
    with opened(steps_1_2) as reader:
        try:
            step, state = reader.newest(abstract(states[2]))
        except (Damaged, buckets.Unavailable):
            pass
        else:
            assert times > 1 or step == 2
            assert_same(state, states[step])
    assert fault.done
