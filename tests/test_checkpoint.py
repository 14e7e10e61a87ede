"""Save, verify and restore on 8 devices; onto other meshes; from two processes; with what fails."""

import ast
import contextlib
import errno
import gc
import itertools
import json
import os
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import checkpoint
import common
import model
import train
from checkpoint import Checkpoints, Damaged, StoredArray
from common import config_of
from conftest import ROOT
from model import Transformer
from processes import environments, run_all
from runtime import array_digests, checkpoint_directory, resume, run_directory
from runtime.checkpoint_directory import COMMIT
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
    values,
    wait_for_late_writes,
)
from utils import ConfigError

# Writes that fail when Orbax no longer waits for them find its event loop closed, and only warn.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MESHES = [(2, 2, 2), (8, 1, 1), (1, 4, 2), (1, 1, 1)]


@pytest.fixture(scope="module")
def steps_1_2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, 1, 2).close()
    return folder


@pytest.fixture
def folder(steps_1_2, tmp_path):
    """Checkpoints of steps 1 and 2, to be changed."""
    return shutil.copytree(steps_1_2, tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def states():
    return {step: state_on(mesh_of(2, 2, 2), seed=step) for step in (1, 2)}


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


def record_of(folder, step):
    return json.loads((folder / str(step) / "config" / checkpoint.RECORD).read_text())


def rewrite(folder, step, change):
    """Change the record of a step, with the right checksum."""
    record = record_of(folder, step)
    del record["crc32"]
    change(record)
    text = json.dumps(record | {"crc32": checkpoint._crc32(record)})
    (folder / str(step) / "config" / checkpoint.RECORD).write_text(text)


# --- what is restored -----------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("shape", MESHES)
def test_a_state_is_restored_bit_for_bit_on_every_mesh(steps_1_2, shape, virtual):
    expected = state_on(mesh_of(*shape), seed=2, virtual=virtual)
    with opened(steps_1_2) as reader:
        assert_same(reader.restore(2, abstract(expected)), expected)
        part = {"weights": expected["weights"]}
        step, found = reader.good(None, abstract(part))
        assert step == 2
        assert_same(found, part)


def stacked(canonical, shape):
    """Place layers one by one: all of a stage, stage by stage, and then the next virtual stage."""
    out, layers = np.empty(shape, canonical.dtype), iter(canonical)
    for v, p, k in itertools.product(*map(range, shape[:3])):
        out[v, p, k] = next(layers)
    assert next(layers, None) is None
    return out


@pytest.mark.long
def test_a_training_state_keeps_bits_and_digests_over_meshes_and_virtual_stages(tmp_path):
    meshes = [((2, 2, 2), 1), ((8, 1, 1), 1), ((1, 4, 2), 2), ((1, 1, 1), 1), ((1, 2, 2), 2)]
    meshes.append(((2, 2, 2), 2))
    random, reference = np.random.default_rng(0), {}
    with opened(tmp_path, keep=9) as checkpoints:
        for step, (shape, virtual) in enumerate(meshes):
            config = config_of(shape, virtual=virtual, blocks=8)
            shapes = train.abstract_state(config, model.declare(config), common.mesh_of(config))
            named = {
                jax.tree_util.keystr(path, simple=True, separator="."): s
                for path, s in jax.tree_util.tree_leaves_with_path(shapes)
            }
            is_stacked = {name: ".blocks." in f".{name}" for name in named}
            for name, s in named.items() if step == 0 else ():
                dims = (8, *s.shape[3:]) if is_stacked[name] else s.shape
                reference[name] = np.asarray(random.standard_normal(dims)).astype(s.dtype)
            expected = {
                name: stacked(x, named[name].shape) if is_stacked[name] else x
                for name, x in reference.items()
            }
            if step == 0:
                leaves = [jax.device_put(expected[n], s.sharding) for n, s in named.items()]
                state = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
            else:
                state = checkpoints.restore(step - 1, shapes)
            for x, (name, s) in zip(jax.tree.leaves(state), named.items(), strict=True):
                assert (x.sharding, x.dtype) == (s.sharding, s.dtype)
                np.testing.assert_array_equal(np.asarray(x), expected[name], strict=True)
            checkpoints.save(step, state, CONFIG)
            checkpoints.wait()
            found = {n: tuple(e["digest"]) for n, e in record_of(tmp_path, step)["arrays"].items()}
            assert found == {name: array_digests.of_numpy(x) for name, x in reference.items()}
    assert "optimizer.1.mu.blocks.moe.moe.router" in reference
    with opened(tmp_path) as reader:
        found = reader.restore(0, {"weights": shapes.weights})
        assert_same(found["weights"], state.weights)


STAGES = [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (4, 2)]  # virtual, stages


def test_an_array_of_blocks_is_read_in_parts_in_full_and_for_every_number_of_stages(tmp_path):
    kernel = values()["kernel"]
    for v, p in STAGES:
        blocks = {"kernel": state_on(mesh_of(1, p, 1), virtual=v)["weights"].blocks["kernel"]}
        with opened(tmp_path / f"{v}-{p}", keep=1) as checkpoints:
            tree = {"w": Transformer(first={}, blocks=blocks, last={})}
            checkpoints.save(1, tree, CONFIG)
            checkpoints.wait()
            [array] = checkpoints.arrays(1).values()
        assert (array.shape, array.dtype) == (kernel.shape, np.float32)
        np.testing.assert_array_equal(array.whole(), kernel)
        for dims in range(4):
            parts = dict(array.parts(dims))
            assert sorted(parts) == list(np.ndindex(kernel.shape[:dims]))
            assert all((part == kernel[index]).all() for index, part in parts.items())
        for other_v, other_p in STAGES:
            expected = state_on(mesh_of(1, other_p, 1), virtual=other_v)["weights"].blocks["kernel"]
            like = jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=expected.sharding)
            assert_same(array.onto(like, like.shape[:3]), expected)


def test_numpy_arrays_are_saved_in_chunks_and_read_in_parts_with_a_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1 << 11)
    random = np.random.default_rng(0)
    arrays = {
        "weights.experts": random.standard_normal((3, 4, 20, 30), np.float32),
        "weights.norm": random.standard_normal(24, np.float32),
        "weights.bias": random.standard_normal((1, 5), np.float32),
    }
    stack = {"weights.experts": 2, "weights.norm": 0, "weights.bias": 1}
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, arrays, CONFIG, stacked=stack)
        checkpoints.wait()
        found = checkpoints.arrays(0)
    assert found["weights.experts"]._chunk[2:4] == (1, 1)
    assert found["weights.experts"]._chunk[4:] != (20, 30)
    for name, x in arrays.items():
        for dims in range(min(x.ndim, 3) + 1):
            parts = dict(found[name].parts(dims))
            assert sorted(parts) == list(np.ndindex(x.shape[:dims]))
            assert all((part == x[index]).all() for index, part in parts.items())
        np.testing.assert_array_equal(found[name].whole(), x, strict=True)
    value = arrays["weights.experts"][2, 1, 7, :2].tobytes()
    [file] = [file for file in tmp_path.rglob("d/*") if value in file.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(value)] ^= 1
    file.write_bytes(content)
    with opened(tmp_path) as reader:
        array = reader.arrays(0)["weights.experts"]
        for dims in range(3):
            with pytest.raises(Damaged, match="not those that were saved"):
                list(array.parts(dims))


def test_imported_weights_are_not_resumed(tmp_path):
    weights = {f"weights.{name}": x for name, x in values().items()}
    with opened(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(0, weights, CONFIG, stacked=dict.fromkeys(weights, 0))
        with pytest.raises(
            ValueError, match=r"holds weights alone.*--run.init_from .*/run --run.name run-2"
        ):
            checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))
    assert names_in(tmp_path / "run" / "checkpoints") == ["0"]


def test_config_and_start_are_those_of_the_step(tmp_path):
    with opened(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, CONFIG)
        checkpoints.made_by = {"host": "here"}
        checkpoints.save(2, {"x": jnp.ones(3)}, CONFIG | {"tokens": {"train": "aa"}})
        checkpoints.wait()
        assert [checkpoints.record(step)["made_by"] for step in (1, 2)] == [None, {"host": "here"}]
        assert checkpoints.record(1)["config"] == json.loads(json.dumps(CONFIG))
        assert checkpoints.record(2)["config"]["tokens"] == {"train": "aa"}
        resume.check_compatible(
            checkpoints.record(1)["config"], CONFIG, run_directory.at("absent"), 1
        )


# --- what a save keeps on the devices -------------------------------------------------------------


def test_a_state_may_be_donated_right_after_save(tmp_path):
    state, expected = state_on(mesh_of(2, 2, 2), 3), state_on(mesh_of(2, 2, 2), 3)
    zero = jax.jit(lambda tree: jax.tree.map(lambda x: x - x, tree), donate_argnums=0)
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state, CONFIG)
        jax.block_until_ready(zero(state))
        assert state["weights"].first["matrix"].is_deleted()
        checkpoints.wait()
        assert_same(checkpoints.restore(3, abstract(expected)), expected)


# --- damage ---------------------------------------------------------------------------------------


def cut_short(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


HARMS = [cut_short, flipped, Path.unlink]


@pytest.mark.parametrize("harm", HARMS)
def test_no_damaged_file_results_in_a_wrong_state_or_a_traceback(
    steps_1_2, tmp_path, states, capsys, harm
):
    """Orbax writes some files that no restore reads; without COMMIT a checkpoint is unfinished."""
    files = [f.relative_to(steps_1_2 / "2") for f in (steps_1_2 / "2").rglob("*") if f.is_file()]
    bad = set()
    for name in files:
        folder = shutil.copytree(steps_1_2, tmp_path / "both")
        harm(folder / "2" / name)
        alone = shutil.copytree(folder / "2", tmp_path / "alone" / "2").parent
        capsys.readouterr()
        with opened(folder, keep=3) as checkpoints:
            step, state = checkpoints.newest(abstract(states[2]))
        assert_same(state, states[step])
        out, names = capsys.readouterr().out, names_in(folder)
        if step == 2:
            assert (out, names) == ("", ["1", "2"])
        elif harm is Path.unlink and name == Path(COMMIT):
            assert out == f"warning: removed {folder}/2, which was not complete\n"
            assert names == ["1"]
        else:
            bad.add(name)
            assert out.startswith(f"warning: the checkpoint of step 2 in {folder} is damaged: ")
            assert out.count("\n") == 1 and names == ["1", "damaged-2"]
            for keep in (3, None):
                with opened(alone, keep) as checkpoints, pytest.raises(ValueError) as refusal:
                    checkpoints.newest(abstract(states[2]))
                assert type(refusal.value) is ConfigError and names_in(alone) == ["2"]
                expected = f"every checkpoint in {alone} is damaged (steps [2])"
                assert str(refusal.value).startswith(expected) and "\n" not in str(refusal.value)
        shutil.rmtree(folder)
        shutil.rmtree(alone)
    of_arrays = {name for name in files if name.parts[:2] == ("state", "d")}
    assert bad > {Path("config", checkpoint.RECORD), Path("state/manifest.ocdbt"), *of_arrays}
    assert any("ocdbt.process_0" in name.parts for name in bad)  # large values


def test_no_bit_of_what_tensorstore_reads_first_results_in_a_wrong_state(folder, states):
    """Its errors name a status, or none."""
    [node], manifest = (folder / "2/state/d").iterdir(), folder / "2/state/manifest.ocdbt"
    found = set()
    with opened(folder) as reader:
        for file, every in ((manifest, 1), (node, 29)):
            good = file.read_bytes()
            for position in range(0, len(good), every):
                content = bytearray(good)
                content[position] ^= 1 << position % 8
                file.write_bytes(content)
                with pytest.raises(Damaged) as damage:
                    reader.restore(2, abstract(states[2]))
                found.add(re.search("is damaged: (.*?) ", str(damage.value))[1])
            file.write_bytes(good)
        assert_newest(reader, 2, states[2])
    assert found >= {"DATA_LOSS:", "Error"}


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", "", '{"format": 2, "crc32": 0}', "\x00"])
def test_a_record_that_is_not_what_was_written_is_damage(folder, states, capsys, text):
    (folder / "2" / "config" / checkpoint.RECORD).write_text(text)
    with opened(folder) as reader:
        assert reader.newest(abstract(states[1]))[0] == 1
        for read in (reader.record, reader.arrays):
            with pytest.raises(Damaged, match=rf"step 2 .* {checkpoint.RECORD} is not what was"):
                read(2)
    assert f"step 2 in {folder} is damaged: {checkpoint.RECORD}" in capsys.readouterr().out


def other_values(record):
    record["arrays"]["weights.last.norm"]["digest"][0] ^= 1


def other_stages(record):
    record["arrays"]["weights.blocks.kernel"]["stages"] = [2, 2, 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_values, "weights.last.norm does not have the values that were saved"),
        (other_stages, r"DATA_LOSS: it has float32\[1, 2, 4, 3, 16\]"),
    ],
)
def test_arrays_that_are_not_those_of_the_record_are_damage(folder, states, capsys, change, reason):
    rewrite(folder, 2, change)
    part = {"weights": abstract(state_on(mesh_of(8, 1, 1)))["weights"]}
    damaged = rf"checkpoint of step 2 in {folder} is damaged: {reason}. Use another step"
    before = sorted(folder.rglob("*"))
    with opened(folder) as reader:
        with pytest.raises(Damaged, match=damaged):
            reader.good(2, part)
        step, state = reader.good(None, part)
        assert step == 1
        assert_same(state["weights"], state_on(mesh_of(8, 1, 1), 1)["weights"])
    assert sorted(folder.rglob("*")) == before
    capsys.readouterr()
    with opened(folder, keep=3) as checkpoints:
        assert_newest(checkpoints, 1, states[1])
        assert capsys.readouterr().out.count("damaged") == 1
        assert names_in(folder) == ["1", "damaged-2"]
        checkpoints.save(2, states[2], CONFIG)
        assert_newest(checkpoints, 2, states[2])
    assert names_in(folder) == ["1", "2", "damaged-2"]


def test_a_bit_that_flips_once_while_it_is_read_is_read_again(folder, states, monkeypatch, capsys):
    read, flips = StoredArray.read, iter([True])

    def flipping(self, *given):
        found = read(self, *given)
        if next(flips, False):
            found.view(np.uint8).reshape(-1)[0] ^= 1
        return found

    monkeypatch.setattr(StoredArray, "read", flipping)
    with opened(folder, keep=3) as checkpoints:
        assert_newest(checkpoints, 2, states[2])
    assert next(flips, None) is None and capsys.readouterr().out == ""


@pytest.mark.parametrize("number", [checkpoint.FORMAT + 1, checkpoint.FORMAT - 1])
def test_a_checkpoint_of_another_format_is_refused_and_stays(folder, states, number):
    rewrite(folder, 2, lambda record: record.update(format=number))
    before = sorted(folder.rglob("*"))
    refused = rf"^the checkpoint of step 2 in {folder} was written .* its format is {number}, "
    for keep in (3, None):
        with opened(folder, keep) as checkpoints:
            newest = lambda _, c=checkpoints: c.newest(abstract(states[2]))  # noqa: E731
            for read in (checkpoints.record, checkpoints.arrays, newest):
                with pytest.raises(ValueError, match=refused) as refusal:
                    read(2)
                assert not isinstance(refusal.value, Damaged)
    assert sorted(folder.rglob("*")) == before


# --- what cannot be read now ----------------------------------------------------------------------


@contextlib.contextmanager
def unprivileged(folder):
    """Run a block as a user to whom permissions apply, also where the tests run as root."""
    is_root = os.geteuid() == 0
    for path in [folder, *folder.rglob("*")] if is_root else []:
        os.chown(path, 65534, -1)
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def public():
    """A folder that every user reaches, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    "name", ["", "2", "2/config", f"2/config/{checkpoint.RECORD}", "2/state", "2/state/d", "2/d/*"]
)
@pytest.mark.parametrize("keep", [3, None])
def test_a_file_without_read_permission_is_not_damage(
    steps_1_2, public, states, capsys, name, keep
):
    folder = shutil.copytree(steps_1_2, public / "checkpoints")
    before = sorted(folder.rglob("*"))
    paths = (folder / "2" / "state").glob("d/*") if "*" in name else [folder / name]
    with unprivileged(folder):
        for path in paths:
            path.chmod(0)
        with (
            pytest.raises(ValueError, match=r"(?i)permission") as refusal,
            opened(folder, keep) as c,
        ):
            c.newest(abstract(states[2]))
        assert not isinstance(refusal.value, Damaged) and "\n" not in str(refusal.value)
    assert sorted(folder.rglob("*")) == before
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("status", ["UNAVAILABLE", "UNKNOWN", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_failing_storage_is_not_damage(folder, states, monkeypatch, status):
    def fails(*_):
        raise ValueError(f"{status}: Error reading local file: Input/output error")

    monkeypatch.setattr(StoredArray, "read", fails)
    with (
        opened(folder, 3) as c,
        pytest.raises(ValueError, match=rf"cannot be used \(OSError: {status}") as e,
    ):
        c.newest(abstract(states[2]))
    assert not isinstance(e.value, Damaged) and names_in(folder) == ["1", "2"]


# --- saves that fail ------------------------------------------------------------------------------


class FullDisk:
    """Writes fail in all threads, except the first bytes of a file."""

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE), checkpoint_directory.PROBE_BYTES
        checkpoint_directory.PROBE_BYTES = 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, self.before[0][1]))

    def __exit__(self, *error):
        limits, checkpoint_directory.PROBE_BYTES = self.before
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def failing(method, error):
    """Orbax cannot do this to a path. It renames a folder last, in a thread."""

    def fails(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(epath.Path("x")), method, fails)
        yield


FAULTS = {
    "disk full": (FullDisk, ValueError, "File too large"),
    "rename refused": (
        lambda: failing("rename", OSError(errno.EIO, os.strerror(errno.EIO))),
        ValueError,
        r"cannot be used \(OSError: .* Input/output error.* Free disk space",
    ),
    "an error in a thread": (
        lambda: failing("rename", RuntimeError("of a thread")),
        RuntimeError,
        "^of a thread$",
    ),
}
# In one process, Orbax's other threads wait 5 minutes for the folder, and Python for them at exit.
OF_TWO_PROCESSES = FAULTS | {
    "no folder": (
        lambda: failing("mkdir", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        ValueError,
        "No space left on device",
    )
}


@pytest.fixture
def late_writes():
    """Collect what they leave here, and not in another test."""
    yield
    gc.collect()


def wait_until(condition, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_ends_the_run_with_its_reason(folder, states, late_writes, fault):
    broken, kind, reason = FAULTS[fault]
    checkpoints = Checkpoints(folder, keep=2)
    with broken():
        checkpoints.save(3, states[2], CONFIG)
        wait_until(checkpoints.failed)
        for call in (checkpoints.wait, lambda: checkpoints.save(4, states[2], CONFIG)):
            with pytest.raises(kind, match=reason):
                call()
    assert seconds(checkpoints.close) < 1
    assert not (folder / "3").exists()
    wait_for_late_writes(lambda: sorted(folder.rglob("*")))
    with opened(folder, keep=2) as again:
        assert_newest(again, 2, states[2])
        again.save(3, states[1], CONFIG)
        assert_newest(again, 3, states[1])
    assert names_in(folder) == ["2", "3"]


def test_wait_raises_the_reason_without_a_call_of_failed(folder, states, late_writes):
    checkpoints = Checkpoints(folder, keep=2)
    with FullDisk():
        checkpoints.save(3, states[2], CONFIG)
        with pytest.raises(ValueError, match="File too large"):
            checkpoints.wait()
    assert checkpoints.failed() and seconds(checkpoints.close) < 1


def test_a_folder_that_may_not_be_written_is_refused_at_once_and_before_each_save(public, states):
    (public / "checkpoints").mkdir()
    folder = public / "checkpoints"
    with unprivileged(folder):
        checkpoints = saved(folder, 1)
        folder.chmod(0o500)
        with pytest.raises(ValueError, match=r"cannot be used .*Permission denied"):
            checkpoints.save(2, states[2], CONFIG)
        checkpoints.close()
        with pytest.raises(ValueError, match=r"cannot be used .*Permission denied"):
            Checkpoints(folder, 1)
        folder.chmod(0o700)
    assert names_in(folder) == ["1"]


def test_a_full_disk_leaves_the_checkpoints_good(small_disk, late_writes):
    disk, enlarge = small_disk
    folder, made = disk / "checkpoints", []
    checkpoints = Checkpoints(folder, keep=99)
    with pytest.raises(ValueError, match="No space left on device"):
        for step in range(99):
            state = state_on(mesh_of(2, 2, 2), seed=step)
            checkpoints.save(step, state, CONFIG)
            checkpoints.wait()
            made.append(step)
    checkpoints.close()
    enlarge()
    wait_for_late_writes(lambda: sorted(folder.rglob("*")))
    with opened(folder, keep=99) as checkpoints:
        assert checkpoints.steps() == made and len(made) > 1
        for step in made:
            expected = state_on(mesh_of(2, 2, 2), seed=step)
            assert_same(checkpoints.restore(step, abstract(expected)), expected)
        checkpoints.save(99, state, CONFIG)
        checkpoints.wait()


# --- which checkpoints there are ------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept_and_a_saved_step_is_not_replaced(tmp_path, states):
    with opened(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 4):
            checkpoints.save(step, states[1], CONFIG)
        checkpoints.save(4, states[2], CONFIG)
        assert_newest(checkpoints, 4, states[1])
        for step in (1, 3):
            with pytest.raises(
                ValueError, match=rf"step {step} cannot be saved in .* has step 4: "
            ):
                checkpoints.save(step, states[1], CONFIG)
        checkpoints.wait()
        assert checkpoints.longest_s > 0
    assert names_in(tmp_path) == ["2", "4"]


def test_multiples_of_keep_every_steps_are_kept(tmp_path):
    with opened(tmp_path, keep=2, every=3) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, {"x": jnp.ones(3)}, CONFIG)
    assert names_in(tmp_path) == ["3", "6", "7", "8"]


def test_an_incomplete_checkpoint_is_skipped_by_a_reader_and_removed_by_a_run(
    folder, states, capsys
):
    half = folder / f"3{checkpoint_directory.UNFINISHED}-1"
    shutil.copytree(folder / "2", half)
    (folder / "2" / COMMIT).unlink()  # as where a run was killed while it removed it
    before = sorted(folder.rglob("*"))
    with opened(folder) as reader:
        assert reader.newest(abstract(states[1]))[0] == 1
    assert sorted(folder.rglob("*")) == before and capsys.readouterr().out == ""
    with opened(folder, keep=3) as checkpoints:
        assert checkpoints.newest(abstract(states[1]))[0] == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"warning: removed {folder}/{name}, which was not complete" for name in ("2", half.name)
    ]
    assert names_in(folder) == ["1"]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, capsys):
    """It is no checkpoint from the beginning of its removal on; the next start removes the rest."""

    def fails(*_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, CONFIG)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", fails)
            checkpoints.save(2, {"x": jnp.ones(3)}, CONFIG)
            checkpoints.wait()
            wait_until(lambda: "was not removed" in capsys.readouterr().out)
        assert checkpoints.steps() == [2] and names_in(tmp_path) == ["1", "2"]
    with opened(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [2] and names_in(tmp_path) == ["2"]


def test_a_folder_without_checkpoints_is_a_new_run_and_cannot_be_read(tmp_path):
    with opened(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        assert checkpoints.newest({}) is None
        assert checkpoints.steps() == []
        for find in (checkpoints.step_or_newest, lambda step: checkpoints.good(step, {})):
            with pytest.raises(ValueError, match=r"/run has no checkpoint yet"):
                find(None)
    with pytest.raises(ValueError, match="no such folder"):
        Checkpoints(tmp_path / "elsewhere")


def test_a_missing_step_is_refused(steps_1_2):
    with opened(steps_1_2) as reader:
        assert (reader.step_or_newest(None), reader.step_or_newest(1)) == (2, 1)
        for read in (reader.record, reader.arrays, lambda step: reader.good(step, {})):
            with pytest.raises(
                ValueError, match=r"^there is no checkpoint of step 3 .* it has steps \[1, 2\]"
            ):
                read(3)


def test_a_folder_that_cannot_be_created_and_keep_0_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be used .* use another --run.dir"):
        Checkpoints(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(ValueError, match=r"--checkpoint.keep 0 would remove .* Use 1 or more"):
        Checkpoints(tmp_path, 0)


# --- another model --------------------------------------------------------------------------------


def test_a_state_of_other_shapes_types_or_names_is_refused_by_name(steps_1_2, states):
    good = abstract(states[2])
    weights, norm = good["weights"], good["weights"].last["norm"]

    def with_norm(**last):
        return good | {"weights": weights.replace(last=last)}

    there = r"of another model: weights.last.norm is \(\(24,\), 'float32'\) there and "
    with opened(steps_1_2, keep=3) as checkpoints, opened(steps_1_2) as reader:
        for other in (norm.update(shape=(32,)), norm.update(dtype=jnp.bfloat16)):
            for c, like in itertools.product((checkpoints, reader), (with_norm(norm=other),)):
                with pytest.raises(ValueError, match=there):
                    c.newest(like)
                with pytest.raises(ValueError, match=there):
                    reader.restore(2, {"weights": like["weights"]})
        with pytest.raises(
            ValueError, match=r"weights.last.more is absent there and .* in this run"
        ):
            reader.restore(2, with_norm(norm=norm, more=norm))
        # A run that writes restores everything, or nothing.
        with pytest.raises(ValueError, match=there + "absent in this run"):
            checkpoints.newest(with_norm(norm=None))
        more = {f"more{i:02}": good["step"] for i in range(12)}
        with pytest.raises(ValueError, match=r"more00 is .*, more09 is .* and 2 more\. Use"):
            checkpoints.restore(2, good | more)
    assert names_in(steps_1_2) == ["1", "2"]


def test_the_state_may_depend_on_the_names_of_saved_arrays_and_the_config_may_be_refused(
    steps_1_2, states
):
    def refuse(config, step):
        raise ValueError(f"lr {config['optimizer']['lr']}")

    def chosen(names):
        assert "weights.last.norm" in names
        return abstract(states[2])

    with opened(steps_1_2, keep=3) as checkpoints:
        assert_same(checkpoints.newest(chosen)[1], states[2])
        with pytest.raises(ValueError, match=f"lr {CONFIG['optimizer']['lr']}"):
            checkpoints.newest(chosen, refuse)


# --- two processes --------------------------------------------------------------------------------

# A job as main.py starts it: an error that all processes raise is one line and an exit code.
JOB = """
import contextlib, shutil, sys, time
import conftest
import jax
import checkpoint
from runtime import errors
from runtime import distributed
from checkpoint import Checkpoints, StoredArray
from saved_state import CONFIG, abstract, assert_newest, assert_same, mesh_of, state_on
from test_checkpoint import OF_TWO_PROCESSES

FOLDER, NAME, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])

def job():
    with distributed.job():
        is_this = jax.process_index() == RANK
        CASES[NAME](Checkpoints(FOLDER, keep=3), is_this)

def cannot_write(checkpoints, is_this):
    broken, *_ = OF_TWO_PROCESSES[NAME]
    state = state_on(mesh_of(2, 2, 2), seed=2)
    assert_newest(checkpoints, 2, state)
    began = time.monotonic()
    try:
        with broken() if is_this else contextlib.nullcontext():
            checkpoints.save(3, state, CONFIG)
            checkpoints.wait()
    finally:
        checkpoints.close()
        print(f"raised after {time.monotonic() - began:.1f} s", flush=True)

def cannot_read(checkpoints, is_this):
    read, state = StoredArray.read, state_on(mesh_of(1, 4, 2), seed=1, virtual=2)

    def lost(*given):
        raise ValueError("NOT_FOUND: no such chunk")

    def flipped(*given):
        found = read(*given)
        found.view("uint8").reshape(-1)[0] ^= 1
        return found

    def away(*given):
        raise ValueError("PERMISSION_DENIED: Error reading")

    for broken, error in (
        (lost, "NOT_FOUND: no such chunk"), (flipped, "does not have the values"), (away, None)
    ):
        StoredArray.read = broken if is_this else read
        try:
            checkpoints.restore(2, abstract(state))
        except checkpoint.Damaged as damaged:
            assert error and error in str(damaged), damaged
        except errors.JobFailed as failed:
            assert not error and "PERMISSION_DENIED" in str(failed), failed
        else:
            raise AssertionError(broken)
    first = []  # the reads of a restore of step 2 are its first

    def flipped_in_2(self, *given):
        is_2 = f"{FOLDER}/2/" in str(self._store.spec().to_json())
        return (flipped if is_2 else read)(self, *given)

    StoredArray.read = flipped_in_2 if is_this else read
    assert_newest(checkpoints, 1, state)
    StoredArray.read = read
    for seed in (2, 3):
        checkpoints.save(seed, state_on(mesh_of(1, 4, 2), seed=seed, virtual=2), CONFIG)
    other = state_on(mesh_of(4, 1, 2), seed=3)
    assert_newest(checkpoints, 3, other)
    checkpoints.close()

CASES = {"cannot read": cannot_read} | dict.fromkeys(OF_TWO_PROCESSES, cannot_write)
errors.run_command(job)
"""


def in_two_processes(folder, name, rank):
    places = environments(2, 4, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    return run_all(places, "-c", JOB, str(folder), name, str(rank))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_restore_the_previous_step_if_one_reads_damaged_values(folder, rank):
    codes, outputs = in_two_processes(folder, "cannot read", rank)
    assert codes == [0, 0], "\n".join(outputs)
    assert outputs[0].count("step 2 in") == 1 and "warning" not in outputs[1]
    assert names_in(folder) == ["1", "2", "3", "damaged-2"]
    with opened(folder) as reader:
        assert_newest(reader, 3, state_on(mesh_of(8, 1, 1), seed=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank"), [("disk full", 1), *((fault, 0) for fault in OF_TWO_PROCESSES)]
)
def test_all_processes_end_with_the_reason_why_one_cannot_write(folder, fault, rank):
    codes, outputs = in_two_processes(folder, fault, rank)
    code = 1 if fault == "an error in a thread" else 2
    assert codes == [code, code], "\n".join(outputs)
    for output in outputs:
        [reason] = [line for line in output.splitlines() if f"process {rank} (" in line]
        assert OF_TWO_PROCESSES[fault][2].split(".*")[-1].strip("^$") in reason
        assert float(re.search(r"raised after (.*) s", output)[1]) < 20
    assert {"1", "2"} <= set(names_in(folder)) and "3" not in names_in(folder)


# --- the code itself ------------------------------------------------------------------------------

FILES = ["array_digests", "buckets", "checkpoint_directory", "provenance", "replica_check"]
FILES += ["resume", "run_directory", "stored_array", "writer_lock"]
FILES = ["checkpoint.py", *(f"runtime/{name}.py" for name in FILES)]


def private_names(text):
    """Names with a leading underscore of modules, and of attributes of anything but self."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            names = [f"{ast.unparse(node.value)} .{node.attr}"]
        for name in names:
            parts = name.rpartition(" ")[2].split(".")
            if any(part.startswith("_") and not part.endswith("__") for part in parts):
                yield name.replace(" ", "")


def test_private_names_are_found():
    text = """
import jax._src.core, jax.numpy
from orbax.checkpoint._src import path
from jax import _private
import orbax.checkpoint as ocp
ocp._x, self._writer, self._writer._manager, jax.f(1)._value, x.__name__
"""
    assert sorted(private_names(text)) == [
        "jax._private",
        "jax._src.core",
        "jax.f(1)._value",
        "ocp._x",
        "orbax.checkpoint._src.path",
        "self._writer._manager",
    ]


@pytest.mark.parametrize("name", FILES)
def test_checkpoints_and_run_directories_use_no_private_name_of_a_library(name):
    assert list(private_names((ROOT / name).read_text())) == []
