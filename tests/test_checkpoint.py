"""Save, verify and restore on 8 devices of one process, onto other meshes; with what fails."""

import contextlib
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import checkpoint
from checkpoint import Checkpoints, Damaged
from runtime import run_directory
from runtime.run_directory import COMMIT
from saved_state import (
    CONFIG,
    FAULTS,
    abstract,
    assert_newest,
    assert_same,
    mesh_of,
    names_in,
    opened,
    saved,
    state,
    state_on,
    values,
    wait_for_late_writes,
)
from utils import ConfigError

# Writes that fail when Orbax no longer waits for them find its event loop closed, and only warn.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def steps_1_2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, 1, 2).close()
    return folder


@pytest.fixture
def folder(steps_1_2, tmp_path):
    """Checkpoints of steps 1 and 2, to be changed."""
    return shutil.copytree(steps_1_2, tmp_path / "checkpoints")


def rewrite(folder, step, change):
    """Change the record of a step, with the right checksum."""
    file = folder / str(step) / "config" / checkpoint.RECORD
    record = json.loads(file.read_text())
    del record["crc32"]
    change(record)
    file.write_text(json.dumps(record | {"crc32": checkpoint._crc32(record)}))


# --- what is restored -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "virtual"), [((2, 2, 2), 1), ((8, 1, 1), 2), ((1, 2, 4), 4), ((1, 1, 1), 1)]
)
def test_a_state_is_restored_bit_for_bit_on_every_mesh(steps_1_2, shape, virtual):
    expected = state_on(mesh_of(*shape), seed=2, virtual=virtual)
    with opened(steps_1_2) as reader:
        assert_same(reader.restore(2, abstract(expected)), expected)
        part = {"weights": expected["weights"]}
        step, found = reader.newest(abstract(part))
        assert step == 2
        assert_same(found, part)
        kernel = reader.arrays(2)["weights.blocks.kernel"]
        assert all((x == values(2)["kernel"][i]).all() for i, x in kernel.parts(1))


def test_imported_arrays_are_saved_in_chunks_read_in_parts_with_a_digest_and_not_resumed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1 << 11)
    random = np.random.default_rng(0)
    shapes = {"weights.experts": (3, 4, 20, 30), "weights.norm": (24,), "weights.bias": (1, 5)}
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    stack = {"weights.experts": 2, "weights.norm": 0, "weights.bias": 1}
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, arrays, CONFIG, stacked=stack)
        checkpoints.wait()
        found = checkpoints.arrays(0)
    assert found["weights.experts"]._chunk[2:4] == (1, 1)
    assert found["weights.experts"]._chunk[4:] != (20, 30)
    for name, x in arrays.items():
        np.testing.assert_array_equal(found[name].whole(), x, strict=True)
        for dims in range(min(x.ndim, 3) + 1):
            parts = dict(found[name].parts(dims))
            assert sorted(parts) == list(np.ndindex(x.shape[:dims]))
            assert all((part == x[index]).all() for index, part in parts.items())
    value = arrays["weights.experts"][2, 1, 7, :2].tobytes()
    [file] = [file for file in tmp_path.rglob("d/*") if value in file.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(value)] ^= 1
    file.write_bytes(content)
    with opened(tmp_path, keep=1) as checkpoints:
        array = checkpoints.arrays(0)["weights.experts"]
        for dims in range(3):
            with pytest.raises(Damaged, match="not those that were saved"):
                list(array.parts(dims))
        with pytest.raises(ConfigError, match=r"alone, as imported.*--run.init_from"):
            checkpoints.newest({})


def test_config_and_start_are_those_of_the_step_and_the_config_may_be_refused(tmp_path):
    x, config = {"x": jnp.ones(3)}, CONFIG | {"tokens": {"train": "aa"}}
    with opened(tmp_path, keep=2) as checkpoints:
        checkpoints.made_by = {"host": "here"}
        checkpoints.save(2, x, config)
        checkpoints.wait()
        record = checkpoints.record(2)
        assert record["made_by"] == {"host": "here"}
        assert record["config"] == json.loads(json.dumps(config))

        def refuse(config, step):
            raise ValueError(f"{config['tokens']} of step {step}")

        chosen = {frozenset("x"): abstract(x)}.get
        assert_same(checkpoints.newest(chosen)[1], x)
        with pytest.raises(ValueError, match=r"^\{'train': 'aa'\} of step 2"):
            checkpoints.newest(chosen, refuse)


def live_bytes():
    """Bytes of the devices' buffers, without those of pinned host memory."""
    kind = jax.devices()[0].default_memory().kind
    arrays = [x for x in jax.live_arrays() if not x.is_deleted() and x.sharding.memory_kind == kind]
    shards = [shard.data for x in arrays for shard in x.addressable_shards]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def test_a_save_keeps_no_second_state_on_the_devices_and_the_next_step_may_donate_it(
    tmp_path, monkeypatch
):
    path, donated = type(epath.Path("x")), state_on(mesh_of(2, 2, 2), 3)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    double, mkdir, go = double.lower(donated).compile(), path.mkdir, threading.Event()
    expected = state(3)

    def late(*given, **how):
        assert go.wait(60)
        return mkdir(*given, **how)

    with opened(tmp_path, keep=1) as checkpoints:
        gc.collect()
        before = live_bytes()
        monkeypatch.setattr(path, "mkdir", late)  # Orbax has not written anything
        checkpoints.save(3, donated, CONFIG)
        during = live_bytes()
        donated = jax.block_until_ready(double(donated))
        assert max(during, live_bytes()) <= 1.05 * before
        assert checkpoints.steps() == [] and not checkpoints.failed()
        go.set()
        assert_newest(checkpoints, 3, expected)


# --- damage ---------------------------------------------------------------------------------------


def cut_short(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [cut_short, flipped, Path.unlink])
def test_no_damaged_file_results_in_a_wrong_state_or_a_traceback(steps_1_2, tmp_path, capsys, harm):
    """Orbax writes some files that no restore reads; without COMMIT a checkpoint is unfinished."""
    files = [f.relative_to(steps_1_2 / "2") for f in (steps_1_2 / "2").rglob("*") if f.is_file()]
    bad, folder = set(), tmp_path / "checkpoints"
    for name in files:
        shutil.copytree(steps_1_2, folder)
        harm(folder / "2" / name)
        capsys.readouterr()
        with opened(folder, keep=3) as checkpoints:
            step, found = checkpoints.newest(abstract(state(2)))
        assert_same(found, state(step))
        out, names = capsys.readouterr().out, names_in(folder)
        if step == 2:
            assert (out, names) == ("", ["1", "2"])
        elif harm is Path.unlink and name == Path(COMMIT):
            assert names == ["1"]  # as of an incomplete one, below
        else:
            bad.add(name)
            assert out.startswith(f"warning: the checkpoint of step 2 in {folder} is damaged: ")
            assert out.count("\n") == 1 and names == ["1", "damaged-2"]
        shutil.rmtree(folder)
    of_arrays = {name for name in files if name.parts[:2] == ("state", "d")}
    assert bad > {Path("config", checkpoint.RECORD), Path("state/manifest.ocdbt"), *of_arrays}
    assert any("ocdbt.process_0" in name.parts for name in bad)  # large values


def test_a_record_that_is_not_what_was_written_is_damage(folder, capsys):
    file = folder / "2" / "config" / checkpoint.RECORD
    other = file.read_text().replace('"z_loss": 0.0', '"z_loss": 0.5')
    with opened(folder) as reader:
        for text in ("{}", "[]", "{", '{"format": 2, "crc32": 0}', "\x00", other):
            file.write_text(text)
            assert reader.newest(abstract(state(1)))[0] == 1
            with pytest.raises(Damaged, match=rf"step 2 .* {checkpoint.RECORD} is not what was"):
                reader.arrays(2)
            out = capsys.readouterr().out
            assert f"step 2 in {folder} is damaged: {checkpoint.RECORD}" in out
    flipped(folder / "1/state/manifest.ocdbt")
    for keep in (3, None):  # if all are damaged, none is renamed
        with opened(folder, keep) as checkpoints, pytest.raises(ConfigError) as refusal:
            checkpoints.newest(abstract(state(2)))
        assert type(refusal.value) is ConfigError and names_in(folder) == ["1", "2"]
        assert str(refusal.value).startswith(f"every checkpoint in {folder} is damaged (steps [1,")


@pytest.mark.parametrize(
    ("array", "change", "reason"),
    [
        ("last.norm", {"digest": [1, 2]}, "weights.last.norm does not have the values that were"),
        ("blocks.kernel", {"stages": [2, 2, 2]}, r"DATA_LOSS: it has float32\[1, 2, 4, 3, 16\]"),
    ],
)
def test_arrays_that_are_not_those_of_the_record_are_damage(folder, array, change, reason):
    rewrite(folder, 2, lambda record: record["arrays"][f"weights.{array}"].update(change))
    with opened(folder) as reader:
        part = {"weights": abstract(state(2))["weights"]}
        with pytest.raises(Damaged, match=rf"step 2 in {folder} is damaged: {reason}"):
            reader.newest(part, only=2)
        assert reader.newest(part)[0] == 1
    assert names_in(folder) == ["1", "2"]
    with opened(folder, keep=3) as checkpoints:
        assert_newest(checkpoints, 1, state(1))
        checkpoints.save(2, state(2), CONFIG)
        assert_newest(checkpoints, 2, state(2))
    assert names_in(folder) == ["1", "2", "damaged-2"]


def test_a_checkpoint_of_another_format_is_refused_and_stays(folder):
    rewrite(folder, 2, lambda record: record.update(format=3))
    refused = rf"^the checkpoint of step 2 in {folder} was written .* its format is 3, "
    with opened(folder, 3) as checkpoints:
        with pytest.raises(ConfigError, match=refused) as refusal:
            checkpoints.newest(abstract(state(2)))
        assert not isinstance(refusal.value, Damaged)
    assert names_in(folder) == ["1", "2"]


# --- what cannot be read now ----------------------------------------------------------------------


@contextlib.contextmanager
def unprivileged():
    """Yield a folder to a block in which permissions apply, also where the tests run as root."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as parent:  # every user reaches it, unlike those of pytest
        for path in (Path(parent), Path(parent, "checkpoints")) if is_root else ():
            path.mkdir(exist_ok=True)
            os.chown(path, 65534, -1)
        try:
            if is_root:
                os.seteuid(65534)
            yield Path(parent, "checkpoints")
        finally:
            if is_root:
                os.seteuid(0)


@pytest.mark.parametrize("name", ["2", f"2/config/{checkpoint.RECORD}", "2/state/d"])
def test_a_file_without_read_permission_is_not_damage(capsys, name):
    with unprivileged() as folder:
        saved(folder, 1, 2).close()
        (folder / name).chmod(0)
        denied = pytest.raises(ValueError, match=r"(?i)permission")
        with denied as refusal, opened(folder, keep=3) as checkpoints:
            checkpoints.newest(abstract(state(2)))
        assert not isinstance(refusal.value, Damaged) and "\n" not in str(refusal.value)
        (folder / name).chmod(0o700)
        assert names_in(folder) == ["1", "2"] and "damaged" not in capsys.readouterr().out


# --- saves that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_ends_the_run_with_its_reason(folder, fault):
    broken, kind, reason = FAULTS[fault]
    checkpoints = Checkpoints(folder, keep=2)
    with broken():
        checkpoints.save(3, state(2), CONFIG)
        end = time.monotonic() + 60
        while fault != "disk full" and not checkpoints.failed():  # `wait` raises also without this
            assert time.monotonic() < end
            time.sleep(0.01)
        for call in (checkpoints.wait, lambda: checkpoints.save(4, state(2), CONFIG)):
            with pytest.raises(kind, match=reason):
                call()
    assert checkpoints.failed()
    checkpoints.close()
    wait_for_late_writes(lambda: sorted(folder.rglob("*")))
    with opened(folder, keep=2) as again:
        assert_newest(again, 2, state(2))
        again.save(3, state(1), CONFIG)
        assert_newest(again, 3, state(1))
    assert names_in(folder) == ["2", "3"]
    gc.collect()  # what late writes leave is collected here, and not in another test


def test_a_folder_that_may_not_be_written_is_refused_at_once_and_before_each_save():
    denied = r"cannot be used .*Permission denied.* use another --run.dir"
    with unprivileged() as folder:
        checkpoints = saved(folder, 1)
        folder.chmod(0o500)
        with pytest.raises(ConfigError, match=denied):
            checkpoints.save(2, state(2), CONFIG)
        checkpoints.close()
        with pytest.raises(ConfigError, match=denied):
            Checkpoints(folder, 1)
        folder.chmod(0o700)
        assert names_in(folder) == ["1"]


# --- which checkpoints there are ------------------------------------------------------------------


def test_the_newest_and_some_older_checkpoints_are_kept_and_none_is_replaced(tmp_path):
    with opened(tmp_path, keep=2, every=3) as checkpoints:
        for step in (1, 2, 3, 4, 5, 8):
            checkpoints.save(step, state(1), CONFIG)
        checkpoints.save(8, state(2), CONFIG)
        assert_newest(checkpoints, 8, state(1))
        for step in (2, 7):
            with pytest.raises(ConfigError, match=rf"step {step} cannot be saved .* has step 8: "):
                checkpoints.save(step, state(1), CONFIG)
    assert names_in(tmp_path) == ["3", "5", "8"]


def test_an_incomplete_checkpoint_is_skipped_by_a_reader_and_removed_by_a_run(folder, capsys):
    half = folder / f"3{run_directory.UNFINISHED}-1"
    shutil.copytree(folder / "2", half)
    (folder / "2" / COMMIT).unlink()  # as where a run was killed while it removed it
    for keep, names in ((None, ["1", "2", half.name]), (3, ["1"])):
        with opened(folder, keep) as checkpoints:
            assert checkpoints.newest(abstract(state(1)))[0] == 1
        assert names_in(folder) == names
        warning = "warning: removed {}/{}, which was not complete\n"
        removed = [warning.format(folder, name) for name in ("2", half.name) if keep]
        assert capsys.readouterr().out == "".join(removed)


def test_missing_checkpoints_steps_and_folders_are_refused(tmp_path, steps_1_2):
    with opened(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        assert checkpoints.newest({}) is None
        with pytest.raises(ValueError, match=r"/run has no checkpoint yet"):
            checkpoints.step_or_newest(None)
    missing = pytest.raises(ValueError, match=r"no checkpoint of step 3 .* has steps \[1, 2\]")
    with missing, opened(steps_1_2) as reader:
        reader.newest({}, only=3)
    (tmp_path / "file").write_text("")
    for name, keep, message in (
        ("elsewhere", None, "no such folder"),
        ("file/checkpoints", 1, r"cannot be used .* use another --run.dir"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoints(tmp_path / name, keep)


# --- another model --------------------------------------------------------------------------------


def test_a_state_of_other_shapes_types_or_names_is_refused_by_name(steps_1_2):
    good = abstract(state(2))
    weights, norm = good["weights"], good["weights"].last["norm"]

    def with_norm(**last):
        return good | {"weights": weights.replace(last=last)}

    there = r"of another model: weights.last.norm is \(\(24,\), 'float32'\) there and "
    with opened(steps_1_2, keep=3) as checkpoints, opened(steps_1_2) as reader:
        for other in (norm.update(shape=(32,)), norm.update(dtype=jnp.bfloat16)):
            with pytest.raises(ConfigError, match=there):
                reader.newest(with_norm(norm=other))
        with pytest.raises(ValueError, match=r"last.more is absent there and .* in this run"):
            reader.restore(2, with_norm(norm=norm, more=norm))
        # A run that writes restores everything, or nothing.
        with pytest.raises(ValueError, match=there + "absent in this run"):
            checkpoints.newest(with_norm(norm=None))
        more = {f"more{i:02}": good["step"] for i in range(12)}
        with pytest.raises(ValueError, match=r"more00 is .*, more09 is .* and 2 more\. Use"):
            checkpoints.restore(2, good | more)
    assert names_in(steps_1_2) == ["1", "2"]
