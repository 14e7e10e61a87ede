"""Save, verify, restore on 8 devices; onto other meshes; from two processes; with what can fail."""

import contextlib
import errno
import gc
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import checkpoint_folder
import common
import digests
import model
import resume
import train
from common import config_of
from processes import free_port
from saved_state import CONFIG, abstract, assert_same, mesh_of, saved, state_on


def largest_file(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


@pytest.mark.parametrize("shape", [(2, 2, 2), (8, 1, 1), (1, 4, 2), (1, 1, 1)])
def test_a_state_comes_back_bit_for_bit_on_every_mesh(tmp_path, shape):
    checkpoints = saved(tmp_path, 7)
    expected = state_on(mesh_of(*shape), seed=7)
    assert_same(checkpoints.restore(7, abstract(expected)), expected)
    checkpoints.close()


def test_the_config_comes_back_with_its_step(tmp_path):
    checkpoints = saved(tmp_path, 1)
    assert checkpoints.config(1)["model"] == CONFIG["model"]
    resume.what_must_match(checkpoints.config(1), CONFIG)
    checkpoints.close()


def test_a_state_may_be_donated_right_after_save(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, 1)
    state, expected = state_on(mesh_of(2, 2, 2), 3), state_on(mesh_of(2, 2, 2), 3)
    checkpoints.save(3, state, CONFIG)
    zero = jax.jit(lambda tree: jax.tree.map(lambda x: x - x, tree), donate_argnums=0)
    jax.block_until_ready(zero(state))
    assert state["weights"]["matrix"].is_deleted()
    checkpoints.wait()
    assert_same(checkpoints.restore(3, abstract(expected)), expected)
    checkpoints.close()


def test_the_newest_ones_are_kept_and_a_saved_step_stays_as_it_is(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=2)
    checkpoints.save(3, state_on(mesh_of(2, 2, 2), seed=9), CONFIG)
    assert checkpoints.latest() == 3
    expected = state_on(mesh_of(2, 2, 2), seed=3)
    assert_same(checkpoints.restore(3, abstract(expected)), expected)
    checkpoints.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["2", "3"]


def test_steps_that_are_a_multiple_are_kept_beside_the_newest(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, 5, 6, 7, keep=2, keep_every_steps=3).close()
    assert sorted(int(entry.name) for entry in tmp_path.iterdir()) == [3, 6, 7]


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    clock, jump = time.time, itertools.cycle([-1e6, 1e6, 3e5])
    checkpoints = checkpoint.Checkpoints(tmp_path, 2)
    for step in (1, 2, 3, 4):
        offset = next(jump)
        monkeypatch.setattr(time, "time", lambda offset=offset: clock() + offset)
        checkpoints.save(step, state_on(mesh_of(2, 2, 2), seed=step), CONFIG)
        checkpoints.wait()
    checkpoints.close()
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 2)) as again:
        assert again.latest() == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "4"]


def test_a_step_before_the_newest_is_refused_and_not_left_out_in_silence(tmp_path):
    checkpoints = saved(tmp_path, 5)
    with pytest.raises(ValueError, match=r"step 3 cannot be saved in .* has step 5 already"):
        checkpoints.save(3, state_on(mesh_of(2, 2, 2)), CONFIG)
    checkpoints.close()


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path / "new", 1)
    assert checkpoints.latest() is None
    checkpoints.close()


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_the_older_one_is_taken(tmp_path, capsys, harm):
    saved(tmp_path, 1, 2).close()
    file = largest_file(tmp_path / "2" / "state")
    harm(file)
    checkpoints = checkpoint.Checkpoints(tmp_path, 3)
    assert checkpoints.latest() == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: checkpoint {tmp_path / '2'} is damaged and skipped: state/")
    assert file.name in line
    expected = state_on(mesh_of(2, 2, 2), seed=1)
    assert_same(checkpoints.restore(1, abstract(expected)), expected)
    checkpoints.close()


def cut_short(file):
    content = file.read_bytes()
    file.unlink()  # another name of it stays as it is
    file.write_bytes(content[: len(content) // 2])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 1] = bytes(
        byte ^ 4 for byte in content[len(content) // 2 :][:1]
    )
    file.unlink()
    file.write_bytes(content)


def test_no_harm_to_any_file_of_a_checkpoint_leads_to_a_wrong_state_or_no_state(tmp_path, capsys):
    """Also to those that have no checksum, which are Orbax's own and not needed."""
    saved(tmp_path / "good", 1, 2).close()
    newest = tmp_path / "good" / "2"
    files = sorted(file.relative_to(newest) for file in newest.rglob("*") if file.is_file())
    assert len(files) > 15
    shapes, mesh = abstract(state_on(mesh_of(2, 2, 2))), mesh_of(2, 2, 2)
    expected = {step: state_on(mesh, seed=step) for step in (1, 2)}
    for name, harm in itertools.product(files, (cut_short, flipped, Path.unlink)):
        folder = tmp_path / "harmed"
        shutil.copytree(tmp_path / "good", folder, copy_function=os.link)
        harm(folder / "2" / name)
        capsys.readouterr()
        with contextlib.closing(checkpoint.Checkpoints(folder, 3)) as checkpoints:
            step, state = checkpoints.newest(shapes)
        assert_same(state, expected[step])
        told = f"{folder / '2'} is damaged and skipped" in capsys.readouterr().out
        has_checksum = (
            name.parts[0] in ("state", "config") or name.name == checkpoint_folder.CHECKSUMS
        )
        assert (step == 1) == told == (has_checksum and (newest / name).stat().st_size > 0), name
        shutil.rmtree(folder)


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", ""])
def test_checksums_that_name_no_file_are_damage(tmp_path, text, capsys):
    saved(tmp_path, 1, 2).close()
    (tmp_path / "2" / checkpoint_folder.CHECKSUMS).write_text(text)
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 3)) as checkpoints:
        assert checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))[0] == 1
    told = capsys.readouterr().out
    assert f"{tmp_path / '2'} is damaged and skipped: {checkpoint_folder.CHECKSUMS}" in told


def told_of(folder, step):
    return json.loads((folder / str(step) / "config" / "metadata").read_text())


def save_wrong(monkeypatch, checkpoints, step, *names):
    """A save of which these arrays are on disk with other values than they had on the devices."""
    honest = digests.of_arrays

    def other(arrays):
        return {n: (a ^ (n in names), b) for n, (a, b) in honest(arrays).items()}

    with monkeypatch.context() as patch:
        patch.setattr(digests, "of_arrays", other)
        checkpoints.save(step, state_on(mesh_of(2, 2, 2), seed=step), CONFIG)
    checkpoints.wait()


def test_values_that_are_not_those_that_were_saved_are_damage_though_all_files_are_good(
    tmp_path, monkeypatch, capsys
):
    checkpoints = saved(tmp_path, 1)
    save_wrong(monkeypatch, checkpoints, 2, "weights.norm", "step")
    expected = state_on(mesh_of(8, 1, 1), seed=1)
    part = {"weights": abstract(expected)["weights"]}
    values = (
        r"step 2 in .* is damaged: the values of {} are not those that were saved. Give .*\[1\]"
    )
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as reader:
        assert reader.latest() == 2
        reader.must_be_good(2)
        with pytest.raises(ValueError, match=values.format("weights.norm")):
            reader.good(2, part)
        step, state = reader.good(None, part)
        assert step == 1
        assert_same(state, {"weights": expected["weights"]})
    capsys.readouterr()
    step, state = checkpoints.newest(abstract(expected))
    assert step == 1
    assert_same(state, expected)
    [line] = capsys.readouterr().out.splitlines()
    assert re.search("warning: .*" + values.format("(step, weights.norm|weights.norm, step)"), line)
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
    assert checkpoints.newest(abstract(expected))[0] == 2
    checkpoints.close()
    assert (tmp_path / "damaged-2").is_dir()


def test_where_no_checkpoint_has_the_values_that_were_saved_all_stay_and_none_is_taken(
    tmp_path, monkeypatch
):
    checkpoints = checkpoint.Checkpoints(tmp_path, 3)
    for step in (1, 2):
        save_wrong(monkeypatch, checkpoints, step, "weights.matrix")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"every checkpoint .* is damaged \(steps \[2, 1\]\)"):
            checkpoints.newest(abstract(state_on(mesh_of(2, 2, 2))))
    checkpoints.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def rewrite(folder, step, change):
    """Changes what is told beside the arrays, with checksums that are right."""
    told = change(told_of(folder, step))
    (folder / str(step) / "config" / "metadata").write_text(json.dumps(told))
    checkpoint_folder.Folder(folder).write_checksums(step)


def test_a_checkpoint_of_before_there_were_digests_is_restored(tmp_path, capsys):
    saved(tmp_path, 1).close()
    rewrite(tmp_path, 1, lambda told: {k: v for k, v in told.items() if k not in checkpoint.OWN})
    expected = state_on(mesh_of(1, 4, 2), seed=1)
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 3)) as checkpoints:
        assert_same(checkpoints.newest(abstract(expected))[1], expected)
        assert checkpoints.config(1) == json.loads(json.dumps(CONFIG))
        assert checkpoints.start_of(1) is None
    assert capsys.readouterr().out == ""


def test_a_checkpoint_of_a_later_format_is_refused_and_stays(tmp_path):
    saved(tmp_path, 1, 2).close()
    rewrite(tmp_path, 2, lambda told: told | {"format": checkpoint.FORMAT + 1})
    wanted = abstract(state_on(mesh_of(2, 2, 2)))
    for keep in (3, None):
        with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep)) as checkpoints:
            for ask in (checkpoints.config, checkpoints.arrays):
                with pytest.raises(
                    ValueError, match=r"newer version of this code \(format 2, .* 1"
                ):
                    ask(2)
            with pytest.raises(
                ValueError, match=r"step 2 .* newer version of this code .* Use that"
            ):
                checkpoints.newest(wanted)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def test_a_checkpoint_tells_what_wrote_it_and_the_config_does_not(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, 1)
    checkpoints.made_by = {"host": "here"}
    checkpoints.save(1, state_on(mesh_of(2, 2, 2)), CONFIG)
    checkpoints.wait()
    assert checkpoints.start_of(1) == {"host": "here"}
    assert checkpoints.config(1) == json.loads(json.dumps(CONFIG))
    resume.what_must_match(checkpoints.config(1), CONFIG)
    checkpoints.close()


def test_a_training_state_goes_from_mesh_to_mesh_with_the_same_bits_and_digests(tmp_path):
    random, before, told = np.random.default_rng(0), None, None
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 9)) as checkpoints:
        meshes = [((2, 2, 2), 1), ((8, 1, 1), 1), ((1, 4, 2), 2), ((1, 1, 1), 1)]
        for step, (shape, virtual) in enumerate(meshes):
            config = config_of(shape, virtual=virtual, blocks=8)
            shapes = train.abstract_state(config, model.declare(config), common.mesh_of(config))
            stored = checkpoint.stored_shapes(shapes)
            if step == 0:
                state = jax.tree.map(
                    lambda s: jax.device_put(
                        random.standard_normal(s.shape).astype(s.dtype), s.sharding
                    ),
                    shapes,
                )
            else:
                state = checkpoint.reshaped(checkpoints.restore(step - 1, stored), shapes)
            state = checkpoint.reshaped(state, stored)
            checkpoints.save(step, state, CONFIG)
            checkpoints.wait()
            values = [np.asarray(a) for a in jax.tree.leaves(state)]
            if before is not None:
                for a, b in zip(values, before, strict=True):
                    np.testing.assert_array_equal(a, b)
                assert told_of(tmp_path, step)["digests"] == told
            before, told = values, told_of(tmp_path, step)["digests"]
    assert len(told) == len(before) and "optimizer.1.mu.blocks.moe.moe.router" in told


# --- saves that fail ------------------------------------------------------------------------------


class FullDisk:
    """Writes fail while it is so, in whatever thread, but the first few bytes of a file."""

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE), checkpoint_folder.PROBE_BYTES
        checkpoint_folder.PROBE_BYTES = 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, self.before[0][1]))

    def __exit__(self, *error):
        limits, checkpoint_folder.PROBE_BYTES = self.before
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def no_checksums():
    def full(*asked):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder.Folder, "_checksums", full)
        yield


@contextlib.contextmanager
def no_right_to_write():
    def refused(path, content):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(checkpoint_folder.epath.Path("x")), "write_bytes", refused)
        yield


@contextlib.contextmanager
def not_json():
    """An error in one of Orbax's threads, of a kind that no disk has."""
    CONFIG["strange"] = {"value": {1, 2}}
    yield
    del CONFIG["strange"]


@contextlib.contextmanager
def name_taken():
    """The last step of a save fails, after all is written."""

    def lost(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(checkpoint_folder.epath.Path("x")), "rename", lost)
        yield


FAULTS = {
    "disk full": (FullDisk, "File too large"),
    "disk full at the end": (no_checksums, "OSError: .* No space left on device"),
    "no right to write": (no_right_to_write, "PermissionError: .* Permission denied"),
    "an error in a thread": (not_json, "TypeError: .*not JSON serializable"),
    "no name": (name_taken, "OSError: .* Input/output error"),
}


# Writes that fail when Orbax no longer waits for them find its event loop closed, and only say so.
ignored = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def late_writes():
    """What they leave is collected here, and not in another test."""
    yield
    gc.collect()


@ignored
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_is_told_and_the_next_one_works(tmp_path, capfd, late_writes, fault):
    broken, reason = FAULTS[fault]
    checkpoints = saved(tmp_path, 1, keep=2)
    state = state_on(mesh_of(2, 2, 2), seed=2)
    for step in (2, 4):
        with broken():
            checkpoints.save(step, state, CONFIG)
            checkpoints.wait()
        line = next(x for x in capfd.readouterr().out.splitlines() if x.startswith("warning"))
        told = rf"warning: checkpoint of step {step} could not be written: .*{reason}"
        assert re.match(told, line), line
        assert f"The newest is of step {step - 1}" in line
        assert checkpoints.age_steps(step + 3) == 4
        found = [entry.name for entry in tmp_path.iterdir()]
        assert str(step - 1) in found and str(step) not in found
        with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as reader:
            reader.must_be_good(step - 1)
        checkpoints.save(step + 1, state, CONFIG)
        checkpoints.must_have(step + 1)
        assert checkpoints.age_steps(step + 1) == 0
        assert all(entry.name.isdigit() for entry in tmp_path.iterdir())
    assert checkpoints.latest() == 5
    assert_same(checkpoints.restore(5, abstract(state)), state)
    checkpoints.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "5"]


@ignored
def test_a_step_whose_save_failed_can_be_saved_at_once(tmp_path, late_writes):
    checkpoints = saved(tmp_path, 1)
    with FullDisk():
        checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
        with pytest.raises(ValueError, match=r"step 2 could not .* the newest there is of step 1"):
            checkpoints.must_have(2)
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
    checkpoints.must_have(2)
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB, where the system lets us have one; else files that cannot grow."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True).returncode == 0
    except OSError:
        mounted = False
    yield disk, mounted
    if mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@ignored
def test_a_full_disk_leaves_the_checkpoints_whole_and_has_room_again(
    small_disk, capfd, late_writes
):
    disk, mounted = small_disk
    checkpoints = saved(disk / "run" / "checkpoints", 1)
    filler = disk / "filler"
    if mounted:
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        os.truncate(filler, filler.stat().st_size - (6 << 12))  # room for the first files
    state = state_on(mesh_of(2, 2, 2), seed=2)
    for step in (2, 3):
        with contextlib.nullcontext() if mounted else FullDisk():
            checkpoints.save(step, state, CONFIG)
            checkpoints.wait()
        reason = "No space left on device" if mounted else "File too large"
        assert reason in capfd.readouterr().out
        assert checkpoints.age_steps(step) == step - 1
    with pytest.raises(ValueError, match=r"stopped after step 9: .* for more than 7 steps"):
        checkpoints.stop_if_old(9, 7)
    with contextlib.closing(checkpoint.Checkpoints(disk / "run" / "checkpoints")) as reader:
        assert reader.latest() == 1
    filler.unlink(missing_ok=True)
    checkpoints.save(4, state, CONFIG)
    checkpoints.stop_if_old(9, 7)  # waits, before it would stop
    checkpoints.must_have(4)
    checkpoints.close()


def test_nothing_waits_for_a_save_before_the_next_one_is_due(tmp_path, monkeypatch):
    Folder, slow = checkpoint_folder.Folder, threading.Event()
    write = Folder.write_checksums
    monkeypatch.setattr(Folder, "write_checksums", lambda *a: slow.wait(20) and write(*a))
    checkpoints = checkpoint.Checkpoints(tmp_path, 2)
    checkpoints.save(1, state_on(mesh_of(2, 2, 2)), CONFIG)
    for step in (2, 3):
        assert checkpoints.age_steps(step) == step
        checkpoints.stop_if_old(step, 3)
    slow.set()
    checkpoints.wait()
    assert checkpoints.age_steps(4) == 3
    checkpoints.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with no_right_to_write(), pytest.raises(ValueError, match=r"cannot be written to .*Permission"):
        checkpoint.Checkpoints(tmp_path, 1)


def test_another_models_checkpoint_is_refused_by_the_first_arrays_that_differ(tmp_path):
    checkpoints = saved(tmp_path, 1)
    good = abstract(state_on(mesh_of(2, 2, 2)))
    more = {f"more{i:02}": good["step"] for i in range(12)}
    with pytest.raises(
        ValueError, match=r"model: more00 is absent .*, more09 is .* and 2 more\. G"
    ):
        checkpoints.restore(1, good | more)
    checkpoints.close()


def test_a_step_whose_checkpoint_was_damaged_can_be_saved_again(tmp_path):
    saved(tmp_path, 1, 2).close()
    truncate(largest_file(tmp_path / "2" / "state"))
    checkpoints = checkpoint.Checkpoints(tmp_path, 3)
    assert checkpoints.latest() == 1
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=5), CONFIG)
    assert checkpoints.latest() == 2
    expected = state_on(mesh_of(2, 2, 2), seed=5)
    assert_same(checkpoints.restore(2, abstract(expected)), expected)
    checkpoints.close()
    assert (tmp_path / "damaged-2").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_however_often(tmp_path):
    saved(tmp_path, 1, 2).close()
    for step in ("1", "2"):
        (tmp_path / step / "config" / "metadata").unlink()
    for _ in range(2):
        checkpoints = checkpoint.Checkpoints(tmp_path, 3)
        with pytest.raises(ValueError, match=r"is damaged \(steps \[2, 1\]\).*--run.name"):
            checkpoints.latest()
        checkpoints.close()


def test_a_half_written_checkpoint_is_named_and_skipped(tmp_path, capsys):
    saved(tmp_path, 1, 2).close()
    half = tmp_path / ("2" + checkpoint_folder.UNFINISHED)
    (tmp_path / "2").rename(half)
    checkpoints = checkpoint.Checkpoints(tmp_path, 3)
    assert checkpoints.latest() == 1
    assert f"warning: {half} was not finished" in capsys.readouterr().out
    checkpoints.save(2, state_on(mesh_of(2, 2, 2), seed=2), CONFIG)
    assert checkpoints.latest() == 2
    checkpoints.close()
    assert not half.exists()


def test_who_only_reads_changes_nothing(tmp_path, capsys):
    saved(tmp_path, 1, 2, 3).close()
    (tmp_path / "3").rename(tmp_path / ("3" + checkpoint_folder.UNFINISHED))
    truncate(largest_file(tmp_path / "2" / "state"))
    before = sorted(tmp_path.rglob("*"))
    reader = checkpoint.Checkpoints(tmp_path)
    assert reader.latest() == 1
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ValueError, match="no such folder"):
        checkpoint.Checkpoints(tmp_path / "elsewhere")


def test_a_state_of_other_shape_type_or_names_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1)
    good = abstract(state_on(mesh_of(2, 2, 2)))
    norm = good["weights"]["norm"]
    for other in (norm.update(shape=(32,)), norm.update(dtype=jnp.bfloat16), None):
        wanted = good | {"weights": good["weights"] | {"norm": other}}
        with pytest.raises(ValueError, match=r"weights.norm is \(\(24,\), 'float32'\) there and"):
            checkpoints.restore(1, wanted)
    with pytest.raises(ValueError, match=r"another model: more is absent there"):
        checkpoints.restore(1, good | {"more": norm})
    checkpoints.close()


def test_who_only_reads_may_restore_a_part(tmp_path):
    saved(tmp_path, 1).close()
    expected = {"weights": state_on(mesh_of(4, 2, 1), seed=1)["weights"]}
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as reader:
        assert_same(reader.restore(1, abstract(expected)), expected)


def test_a_part_with_other_arrays_is_refused_by_name(tmp_path):
    saved(tmp_path, 1).close()
    part = {"weights": abstract(state_on(mesh_of(2, 2, 2)))["weights"]}
    norm = part["weights"]["norm"]
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as reader:
        for other in (norm.update(shape=(32,)), norm.update(dtype=jnp.bfloat16)):
            wanted = {"weights": part["weights"] | {"norm": other}}
            with pytest.raises(
                ValueError, match=r"weights.norm is \(\(24,\), 'float32'\) there and"
            ):
                reader.restore(1, wanted)
        with pytest.raises(ValueError, match=r"another model: weights.more is absent there"):
            reader.restore(1, {"weights": part["weights"] | {"more": norm}})


def test_a_run_that_writes_restores_all_or_nothing(tmp_path):
    checkpoints = saved(tmp_path, 1)
    good = abstract(state_on(mesh_of(2, 2, 2)))
    with pytest.raises(ValueError, match=r"step is \(\(\), 'int32'\) there and absent in this run"):
        checkpoints.restore(1, {"weights": good["weights"], "optimizer": good["optimizer"]})
    checkpoints.close()


def test_a_step_that_is_not_there_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for ask in (lambda: checkpoints.config(3), lambda: checkpoints.restore(3, {})):
        with pytest.raises(ValueError, match=r"no checkpoint of step 3 .* it has steps \[1, 2\]"):
            ask()
    checkpoints.close()


def test_a_step_that_is_damaged_or_not_there_is_not_good(tmp_path):
    saved(tmp_path, 1, 2).close()
    flip_a_bit(largest_file(tmp_path / "2" / "state"))
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as reader:
        reader.must_be_good(1)
        with pytest.raises(
            ValueError, match=r"step 2 in .* is damaged. Give another of steps \[1\]"
        ):
            reader.must_be_good(2)
        with pytest.raises(ValueError, match=r"no checkpoint of step 3 .* it has steps \[1, 2\]"):
            reader.must_be_good(3)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written to .* give a --run.dir"):
        checkpoint.Checkpoints(tmp_path / "file" / "checkpoints", 1)


def test_to_keep_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--checkpoint.keep 0 would remove .* Use 1 or more"):
        checkpoint.Checkpoints(tmp_path, 0)


FAULTS_OF_ONE = """
import contextlib
from test_checkpoint import FullDisk, no_checksums, no_right_to_write

def once(fault, step, rank):
    with fault if jax.process_index() == rank else contextlib.nullcontext():
        checkpoints.save(step, state, CONFIG)
        checkpoints.wait()
    assert checkpoints.age_steps(step) > 0

checkpoint.GOOD_S = 3
once(no_checksums(), 4, rank=0)
once(no_right_to_write(), 5, rank=1)
once(FullDisk(), 6, rank=1)
checkpoints.save(7, state, CONFIG)
checkpoints.must_have(7)
once(FullDisk(), 8, rank=0)
checkpoints.save(8, state, CONFIG)
checkpoints.must_have(8)

class AfterWriting:
    armed = False

    def __enter__(self):
        AfterWriting.armed = True

    def __exit__(self, *error):
        AfterWriting.armed = False

def listener(event, value, **more):
    if AfterWriting.armed and event.endswith("commit_future_count"):
        raise OSError(5, "Input/output error")

jax.monitoring.register_scalar_listener(listener)
once(AfterWriting(), 9, rank=1)
"""

TWO_PROCESSES = (
    """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
import checkpoint
from test_checkpoint import CONFIG, abstract, mesh_of, state_on, truncate, largest_file
folder = Path(sys.argv[3])
checkpoints = checkpoint.Checkpoints(folder, 3)
for step in (1, 2):
    checkpoints.save(step, state_on(mesh_of(2, 2, 2), seed=step), CONFIG)
checkpoints.wait()
if jax.process_index() == 0:
    truncate(largest_file(folder / "2" / "state"))
assert checkpoints.latest() == 1
state = checkpoints.restore(1, abstract(state_on(mesh_of(1, 2, 4))))
checkpoints.save(3, state, CONFIG)
checkpoints.must_have(3)
"""
    + FAULTS_OF_ONE
    + """
checkpoints.close()
"""
)


def test_two_processes_agree_on_what_is_damaged_and_on_saves_that_fail_on_one(tmp_path):
    root = Path(checkpoint.__file__).parent
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {[str(root), str(root / 'tests')]}",
    ]
    command[-1] += "\nimport conftest\n" + TWO_PROCESSES
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [*command, str(rank), port, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    assert outputs[0].count("is damaged and skipped") == 1
    assert "damaged" not in outputs[1]
    reader = checkpoint.Checkpoints(tmp_path)
    assert reader.latest() == 8
    expected = state_on(mesh_of(8, 1, 1), seed=1)
    assert_same(reader.restore(8, abstract(expected)), expected)
    reader.close()
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"3", "7", "8", "damaged-2"}
    told = re.findall(r"checkpoint of step (\d) could not be written: (.*?) The newest", outputs[0])
    assert [step for step, _ in told] == ["4", "5", "6", "8", "9"], outputs[0]
    whys = ["No space left on device", "Permission denied", *["File too large"] * 2, "Input/output"]
    assert all(why in found for why, (_, found) in zip(whys, told, strict=True)), told
    assert all(f"process {rank}:" in why for rank, (_, why) in zip("01101", told, strict=True))


def test_blocks_are_stored_in_the_order_in_which_they_run_on_every_mesh():
    """[virtual, stage, block, ...] is that order; the optimizer's arrays go with the weights."""
    for shape, virtual in (((2, 2, 2), 2), ((1, 4, 2), 1)):
        config = config_of(shape, virtual=virtual)
        shapes = train.abstract_state(config, model.declare(config), mesh_of(*shape))
        stored = checkpoint.stored_shapes(shapes)
        assert jax.tree.structure(stored) == jax.tree.structure(shapes)
        for old, new in ((shapes.weights, stored.weights), (moments(shapes), moments(stored))):
            before, after = old.blocks.moe.moe.router, new.blocks.moe.moe.router
            assert before.shape == (virtual, shape[1], 4 // virtual // shape[1], 48, 8)
            assert (after.shape, after.sharding.spec[0]) == ((4, 48, 8), "pipeline")
            assert new.first == old.first and new.last == old.last
        numbers = np.arange(4 * 48 * 8, dtype=np.float32)
        there = checkpoint.reshaped(numbers.reshape(before.shape), after)
        back = checkpoint.reshaped(there, before)
        assert (there.sharding, back.sharding) == (after.sharding, before.sharding)
        np.testing.assert_array_equal(np.asarray(there).reshape(-1), numbers)
        np.testing.assert_array_equal(np.asarray(back).reshape(-1), numbers)


def test_the_next_save_is_laid_out_by_the_same_program():
    like = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=NamedSharding(mesh_of(1, 1, 1), P()))
    for first in (0, 8):
        there = checkpoint.reshaped(np.arange(first, first + 8, dtype=np.float32), like)
        np.testing.assert_array_equal(there, np.arange(first, first + 8).reshape(4, 2))
    program = checkpoint._reshape(((like.shape, like.sharding),))
    assert program._cache_size() == 1


def moments(state):
    [adam] = (slot for slot in state.optimizer if hasattr(slot, "mu"))
    return adam.mu


def changed_section(section, **fields):
    return {section: CONFIG[section] | fields}


def changed(section, **fields):
    return CONFIG | changed_section(section, **fields)


def test_settings_that_only_say_how_or_where_may_change():
    now = changed("mesh", fsdp=8, pipeline=1, tensor=1, virtual=2)
    now |= changed_section("train", steps=9, microbatches=8, remat="full", loss_chunk_tokens=64)
    now |= changed_section("model", eval_capacity_factor=4.0, experts_layout="gathered")
    now |= changed_section("data", val="elsewhere") | changed_section("run", name="x", dir="y")
    now |= changed_section("eval", every_steps=1) | changed_section("checkpoint", keep=9)
    resume.what_must_match(CONFIG, now)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "width", 512),
        ("model", "capacity_factor", 1.0),
        ("data", "seed", 1),
        ("data", "order", "blocks"),
        ("data", "segments", True),
        ("train", "sequences", 16),
        ("train", "sequence_length", 128),
        ("train", "seed", 1),
        ("optimizer", "lr", 0.5),
        ("optimizer", "schedule_steps", 7),
    ],
)
def test_settings_that_make_another_run_are_refused_by_name(section, field, value):
    old = CONFIG[section][field]
    with pytest.raises(ValueError) as refusal:
        resume.what_must_match(CONFIG, changed(section, **{field: value}))
    assert f"with these: {section}.{field} {old!r} -> {value!r}. Give" in str(refusal.value)


def test_shards_may_move_and_may_not_be_others():
    old = CONFIG | {"tokens": {"train": "aa"}}
    moved = changed("data", train="gs://bucket/elsewhere") | {"tokens": old["tokens"]}
    resume.what_must_match(old, moved)
    before = old | {"data": old["data"] | {"cache_gb": 20.0}}  # of an older version
    resume.what_must_match(before, moved)
    with pytest.raises(ValueError, match=r"tokens.train 'aa' -> 'bb'"):
        resume.what_must_match(old, moved | {"tokens": {"train": "bb"}})


def test_every_field_that_differs_is_named():
    now = changed("model", width=512, heads=8) | {"data": CONFIG["data"] | {"seed": 3}}
    with pytest.raises(ValueError, match=r"data.seed 0 -> 3, model.heads .* model.width .* Give"):
        resume.what_must_match(CONFIG, now)


def test_another_rounding_or_a_field_new_to_the_code_is_only_warned_of(capsys):
    old = changed("model", compute_dtype="float32")
    del old["model"]["dropout"]
    resume.what_must_match(old, CONFIG)
    warned = capsys.readouterr().out
    assert "warning: the run continues with another model.compute_dtype 'float32'" in warned
    assert "model.dropout 'absent' -> 0.0" in warned
