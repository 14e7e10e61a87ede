"""Checkpoints in a bucket: as in a folder, with whatever goes wrong on the way there and back."""

import contextlib
import gc
import types

import gcsfs.retry
import pytest
from google.cloud import storage
from orbax.checkpoint._src.serialization import tensorstore_utils

import buckets
import checkpoint
import checkpoint_folder
from checkpoint_folder import CHECKSUMS, COMMIT
from faults import Fault
from saved_state import CONFIG, abstract, assert_same, mesh_of, saved, state_on

STEP_2 = "run/checkpoints/2"

# Writes that fail when Orbax no longer waits for them find its event loop closed, and only say so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def folder(bucket, monkeypatch):
    """Where each client makes a request again a few times, and at once."""
    retries = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "20ms"}
    for name in ("_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"):
        monkeypatch.setitem(getattr(tensorstore_utils, name), "gcs_request_retries", retries)
    asyncio = gcsfs.retry.asyncio
    at_once = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 1000))
    monkeypatch.setattr(gcsfs.retry, "asyncio", at_once)
    monkeypatch.setattr(buckets, "RETRY_S", 0.5)
    yield f"{bucket.url}/run/checkpoints"
    gc.collect()  # what late writes leave is collected here, and not in another test


def objects(bucket, below=""):
    """{name: blob} of a bucket."""
    with contextlib.closing(storage.Client(project=None)) as client:
        return {blob.name: blob for blob in client.list_blobs(bucket.name, prefix=below)}


def steps_in(bucket):
    names = {name.split("/")[2] for name in objects(bucket, "run/checkpoints/")}
    return sorted(names - {"probe-0"})


@pytest.mark.parametrize("shape", [(2, 2, 2), (8, 1, 1), (1, 4, 2), (1, 1, 1)])
def test_a_state_comes_back_bit_for_bit_on_every_mesh(folder, shape):
    checkpoints = saved(folder, 7)
    expected = state_on(mesh_of(*shape), seed=7)
    assert_same(checkpoints.newest(abstract(expected))[1], expected)
    assert checkpoints.config(7)["model"] == CONFIG["model"]
    checkpoints.close()
    with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
        part = {"weights": abstract(expected)["weights"]}
        assert_same(reader.good(None, part)[1], {"weights": expected["weights"]})
        matrix = reader.arrays(7)["weights.matrix"][...].read().result()
        assert (matrix == expected["weights"]["matrix"]).all()


def test_the_newest_and_each_multiple_are_kept(bucket, folder):
    saved(folder, 1, 2, 3, 4, 5, keep=2, keep_every_steps=3).close()
    assert steps_in(bucket) == ["3", "4", "5"]


def test_a_folder_without_checkpoints_has_none(folder):
    with pytest.raises(ValueError, match=r"there are no checkpoints in gs://"):
        checkpoint.Checkpoints(folder)
    with contextlib.closing(checkpoint.Checkpoints(folder, 1)) as checkpoints:
        assert checkpoints.latest() is None


def test_what_was_not_finished_is_named_and_removed(bucket, folder, capsys):
    saved(folder, 1, 2).close()
    objects(bucket)[f"{STEP_2}/{COMMIT}"].delete()
    with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
        assert reader.latest() == 1
    assert "2" in steps_in(bucket)
    with contextlib.closing(checkpoint.Checkpoints(folder, 2)) as checkpoints:
        assert checkpoints.latest() == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"warning: {folder}/2 was not finished when its run stopped; removed"
    assert steps_in(bucket) == ["1"]


def cut_short(blob):
    blob.upload_from_string(blob.download_as_bytes()[: blob.size // 2])


def flipped(blob):
    content = bytearray(blob.download_as_bytes())
    content[len(content) // 2] ^= 4
    blob.upload_from_string(bytes(content))


def removed(blob):
    blob.delete()


@pytest.mark.parametrize("harm", [cut_short, flipped, removed])
def test_no_harm_to_any_object_leads_to_a_wrong_state_or_no_state(bucket, folder, harm, capsys):
    """Those without a checksum are Orbax's own; without COMMIT a checkpoint was not finished."""
    saved(folder, 1, 2).close()
    mesh = mesh_of(2, 2, 2)
    expected = {step: state_on(mesh, seed=step) for step in (1, 2)}
    good = {name: blob.download_as_bytes() for name, blob in objects(bucket, STEP_2).items()}
    assert len(good) > 8
    for name, content in good.items():
        harm(objects(bucket)[name])
        capsys.readouterr()
        inner = name.removeprefix(f"{STEP_2}/")
        checked = inner == CHECKSUMS or "/" in inner
        with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
            step = reader.latest()
            if not checked:
                assert_same(reader.restore(step, abstract(expected[step])), expected[step])
        told = f"checkpoint {folder}/2 is damaged and skipped" in capsys.readouterr().out
        gone = harm is removed and inner == COMMIT
        assert told == checked and (step == 1) == (checked or gone), name
        blob = storage.Client(project=None).bucket(bucket.name).blob(name)
        blob.upload_from_string(content)
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        assert checkpoints.newest(abstract(expected[2]))[0] == 2


def test_a_damaged_one_is_put_aside_and_its_step_saved_again(bucket, folder):
    saved(folder, 1, 2).close()
    flipped(objects(bucket)[f"{STEP_2}/state/manifest.ocdbt"])
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        assert checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))[0] == 1
        assert steps_in(bucket) == ["1", "damaged-2"]
        checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
        assert checkpoints.latest() == 2
    assert steps_in(bucket) == ["1", "2", "damaged-2"]


@pytest.mark.parametrize("moved", [0, 1, 5])
def test_one_that_was_half_put_aside_is_unfinished(bucket, folder, moved):
    saved(folder, 1, 2).close()
    flipped(objects(bucket)[f"{STEP_2}/state/manifest.ocdbt"])
    fault = bucket.fault(403, on="copy", after=moved)
    with (
        pytest.raises(buckets.Refused),
        contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints,
    ):
        checkpoints.latest()
    assert fault.done == 1
    bucket.mend()
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        assert checkpoints.latest() == 1
        assert steps_in(bucket) == ["1", "damaged-2"]


# --- saves that fail ------------------------------------------------------------------------------

KINDS = [403, 404, 429, 503, "cut request", "cut response"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("*", kind) for kind in KINDS),
        *(("*/state/d/*", kind) for kind in (403, 503, "cut response")),
        *(("*/2/config/metadata", kind) for kind in (404, "cut request")),
        *((f"*/2/{COMMIT}", kind) for kind in (429, "cut response")),
    ],
)
def test_a_save_that_fails_is_told_and_the_next_one_works(bucket, folder, capfd, kind, path):
    checkpoints = saved(folder, 1, keep=2)
    state = state_on(mesh_of(2, 2, 2), seed=2)
    fault = bucket.fault(kind, on="write", path=path)
    checkpoints.save(2, state, CONFIG)
    checkpoints.wait()
    assert fault.done
    told = [x for x in capfd.readouterr().out.splitlines() if x.startswith("warning")]
    whole = f"{STEP_2}/{COMMIT}" in objects(bucket)
    if whole:  # the answer was cut, and what was asked for is done
        assert kind == "cut response"
    else:
        [line] = told
        assert line.startswith("warning: checkpoint of step 2 could not be written: "), line
        assert "The newest is of step 1" in line and checkpoints.age_steps(3) == 2
    bucket.mend()
    with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
        found, expected = reader.newest(abstract(state))
        assert_same(expected, state_on(mesh_of(2, 2, 2), seed=found))
        assert found == 1 + whole
    checkpoints.save(3, state_on(mesh_of(2, 2, 2), seed=3), CONFIG)
    checkpoints.must_have(3)
    assert_same(checkpoints.newest(abstract(state))[1], state_on(mesh_of(2, 2, 2), seed=3))
    checkpoints.close()
    assert steps_in(bucket) == (["2", "3"] if whole else ["1", "3"])


@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_what_passes_is_bridged(bucket, folder, kind, capfd, monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_S", 20.0)
    checkpoints = saved(folder, 1)
    faults = [
        bucket.fault(kind, on="write", path=path, times=2)
        for path in ("*/state/d/*", "*/config/metadata", f"*/{CHECKSUMS}", f"*/{COMMIT}")
    ]
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
    checkpoints.must_have(2)
    assert all(fault.done == 2 for fault in faults)
    checkpoints.close()


@pytest.mark.parametrize(
    "path",
    ["*/state/*/d/*", "*/state/d/*", "*/state/manifest.ocdbt", "*/metadata", f"*/{CHECKSUMS}"],
)
@pytest.mark.parametrize("kind", ["flip request", "flip response"])
def test_a_bit_that_flips_on_the_way_never_comes_back(bucket, folder, kind, path, capfd):
    checkpoints = saved(folder, 1)
    state = state_on(mesh_of(2, 2, 2), seed=2)
    fault = bucket.fault(kind, on="write", path=path)
    checkpoints.save(2, state, CONFIG)
    checkpoints.wait()
    assert fault.done
    bucket.mend()
    checkpoints.close()
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        step, found = checkpoints.newest(abstract(state))
        assert_same(found, state_on(mesh_of(2, 2, 2), seed=step))
        assert checkpoints.config(step)["model"] == CONFIG["model"]


# --- restores that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
@pytest.mark.parametrize("on", ["list", "read", "look"])
def test_what_cannot_be_read_now_is_no_damage(bucket, folder, kind, on, capsys):
    saved(folder, 1, 2).close()
    before = objects(bucket)
    fault = bucket.fault(kind, on=on)
    with (
        pytest.raises(Fault, match="gs://"),
        contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints,
    ):
        checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))
    assert fault.done
    bucket.mend()
    assert objects(bucket).keys() == before.keys()
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "kind"), [(1, 503), (20, "cut request"), (50, 503), (90, "cut request"), (130, 503)]
)
def test_a_bucket_that_is_away_from_some_moment_on_ends_a_start_by_a_fault(
    bucket, folder, first, kind
):
    """And never without the newest checkpoint, as if there were none."""
    saved(folder, 1, 2).close()
    shapes = abstract(state_on(mesh_of(2, 2, 2)))
    fault = bucket.fault(kind, after=first)
    try:
        with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
            step, state = checkpoints.newest(shapes)
    except Fault:
        assert fault.done
    else:
        assert step == 2 and not fault.done, "the bucket was away while it was asked"
        assert_same(state, state_on(mesh_of(2, 2, 2), seed=2))
    bucket.mend()
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        assert checkpoints.newest(shapes)[0] == 2


@pytest.mark.parametrize("first", [4, 10, 16, 30])
def test_a_request_that_is_not_answered_in_time_hides_no_checkpoint(bucket, folder, first):
    """gcsfs takes it for a folder that is not there, and Orbax so for no checkpoint."""
    saved(folder, 1, 2).close()
    shapes = abstract(state_on(mesh_of(2, 2, 2)))
    fault = bucket.fault(403, on="look", after=first, times=2)
    try:
        with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
            step, state = checkpoints.newest(shapes)
    except (Fault, buckets.Refused):
        assert fault.done
    else:
        assert step == 2
        assert_same(state, state_on(mesh_of(2, 2, 2), seed=2))


@pytest.mark.parametrize("path", ["*/d/*", "*manifest.ocdbt", "*/metadata", f"*/{CHECKSUMS}"])
def test_a_bit_that_flips_once_on_the_way_back_spoils_nothing(bucket, folder, path):
    saved(folder, 1, 2).close()
    fault = bucket.fault("flip response", on="read", path=f"{STEP_2}{path}", times=1)
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        try:
            step, state = checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))
        except Fault:
            pass
        else:
            assert step == 2
            assert_same(state, state_on(mesh_of(2, 2, 2), seed=2))
            assert checkpoints.config(2)["model"] == CONFIG["model"]
    assert fault.done and steps_in(bucket) == ["1", "2"]


@pytest.mark.parametrize("path", ["*/d/*", "*manifest.ocdbt", "*/metadata", f"*/{CHECKSUMS}"])
def test_a_bit_that_flips_on_the_way_back_never_becomes_a_state(bucket, folder, path):
    saved(folder, 1, 2).close()
    fault = bucket.fault("flip response", on="read", path=f"{STEP_2}{path}")
    with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
        try:
            step, state = reader.newest(abstract(state_on(mesh_of(2, 2, 2))))
        except Fault:
            return
        assert_same(state, state_on(mesh_of(2, 2, 2), seed=step))
    assert fault.done


# --- a copy is checked by what it has -------------------------------------------------------------


def test_a_copy_on_a_disk_of_what_a_bucket_holds_is_checked(bucket, folder, tmp_path, capsys):
    saved(folder, 1, 2).close()
    for name, blob in objects(bucket, "run/checkpoints/").items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        blob.download_to_filename(file)
    copy = tmp_path / "run" / "checkpoints"
    shapes = abstract(state_on(mesh_of(2, 2, 2)))
    with contextlib.closing(checkpoint.Checkpoints(copy, 3)) as checkpoints:
        assert checkpoints.newest(shapes)[0] == 2
    file = copy / "2" / "state" / "_METADATA"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with contextlib.closing(checkpoint.Checkpoints(copy, 3)) as checkpoints:
        assert checkpoints.newest(shapes)[0] == 1
    assert "state/_METADATA: expected [bytes, checksum]" in capsys.readouterr().out


def test_a_copy_in_a_bucket_of_what_a_disk_holds_is_checked(bucket, folder, tmp_path, capsys):
    saved(tmp_path, 1, 2).close()
    client = storage.Client(project=None)
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        name = f"run/checkpoints/{file.relative_to(tmp_path)}"
        client.bucket(bucket.name).blob(name).upload_from_filename(file)
    shapes = abstract(state_on(mesh_of(2, 2, 2)))
    with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
        assert reader.newest(shapes)[0] == 2
    flipped(objects(bucket)[f"{STEP_2}/state/_METADATA"])
    with contextlib.closing(checkpoint.Checkpoints(folder)) as reader:
        assert reader.newest(shapes)[0] == 1
    assert "state/_METADATA: expected [bytes, checksum]" in capsys.readouterr().out


def test_a_bucket_that_refuses_is_said_in_one_line(bucket, folder):
    bucket.fault(403)
    with pytest.raises(ValueError, match=r"checkpoints cannot be written to gs://.*Grant who runs"):
        checkpoint.Checkpoints(folder, 1)


def test_a_run_whose_bucket_does_not_answer_is_to_be_started_again(bucket, folder):
    """And not to be mended by a person, as where a disk is full."""
    checkpoints = saved(folder, 1)
    bucket.fault(503)
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
    with pytest.raises(Fault, match="step 2 could not be written to gs://"):
        checkpoints.must_have(2)
    with pytest.raises(Fault, match="no checkpoint could be written for more than 7 steps"):
        checkpoints.stop_if_old(9, 7)
    with pytest.raises(Fault, match="checkpoints cannot be written to gs://"):
        checkpoint.Checkpoints(folder, 1)
    bucket.mend()
    checkpoints.close()


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (503, "*/d/*"),
        ("cut request", "*/config/metadata"),
        (429, f"*/2/{COMMIT}"),
        (503, f"*/{CHECKSUMS}"),
    ],
)
def test_a_last_save_that_fails_within_is_to_be_started_again_too(bucket, folder, kind, path):
    checkpoints = saved(folder, 1)
    bucket.fault(kind, on="write", path=path)
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
    with pytest.raises(Fault, match=r"step 2 could not be written .* did not answer as it should"):
        checkpoints.must_have(2)
    bucket.mend()
    checkpoints.close()


def test_a_checkpoint_that_one_process_could_not_read_is_put_aside_by_the_next_start(
    bucket, folder, capsys
):
    saved(folder, 1, 2).close()
    checkpoint_folder.opened(folder).spoil(2, "unreadable there")
    with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
        assert checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))[0] == 1
    assert "2 is damaged and skipped: unreadable there" in capsys.readouterr().out
    assert steps_in(bucket) == ["1", "damaged-2"]


def test_names_of_all_that_is_there(folder):
    saved(folder, 1, 2).close()
    assert checkpoint_folder.opened(folder).names() == ["1", "2", "probe-0"]
