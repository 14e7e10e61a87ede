"""Save, verify, restore on 8 devices; onto other meshes; from two processes."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import model
import resume
import train
import utils
from common import config_of

AXES = ("fsdp", "pipeline", "tensor")
CONFIG = dataclasses.asdict(utils.Config())
SPECS = {"matrix": P("fsdp", "tensor"), "norm": P(), "blocks": P("pipeline", None, ("fsdp",))}


def mesh_of(*shape):
    return jax.make_mesh(shape, AXES)


def arrays(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"matrix": (16, 24), "norm": (24,), "blocks": (4, 3, 8)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def state_on(mesh, seed=0):
    weights = {
        name: jax.device_put(value, NamedSharding(mesh, SPECS[name]))
        for name, value in arrays(seed).items()
    }
    weights["prefix"] = None
    whole = NamedSharding(mesh, P())
    with jax.numpy_dtype_promotion("standard"):
        adam, rest = optax.adam(1e-3).init(weights)
    adam = adam._replace(count=jax.device_put(jnp.int32(seed), whole))
    step = jax.device_put(jnp.int32(seed), whole)
    return {"weights": weights, "optimizer": (adam, rest), "step": step}


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def saved(folder, *steps, keep=3):
    checkpoints = checkpoint.Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, state_on(mesh_of(2, 2, 2), seed=step), CONFIG)
    checkpoints.wait()
    return checkpoints


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
    half = tmp_path / ("2" + checkpoint.UNFINISHED)
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
    (tmp_path / "3").rename(tmp_path / ("3" + checkpoint.UNFINISHED))
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
    with pytest.raises(ValueError, match=r"cannot be written to .* Give a --run.dir"):
        checkpoint.Checkpoints(tmp_path / "file" / "checkpoints", 1)


def test_to_keep_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--checkpoint.keep 0 would remove .* Use 1 or more"):
        checkpoint.Checkpoints(tmp_path, 0)


TWO_PROCESSES = """
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
checkpoints.close()
"""


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_processes_save_and_agree_on_what_is_damaged(tmp_path):
    root = Path(checkpoint.__file__).parent
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {[str(root), str(root / 'tests')]}",
    ]
    command[-1] += "\nimport conftest\n" + TWO_PROCESSES
    port = free_port()
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
    assert reader.latest() == 3
    expected = state_on(mesh_of(8, 1, 1), seed=1)
    assert_same(reader.restore(3, abstract(expected)), expected)
    reader.close()


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
        ("data", "train", "other"),
        ("data", "seed", 1),
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
