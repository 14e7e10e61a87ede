"""One bit, flipped on one device, is found and named; nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
import train
from common import config_of, mesh_of
from faulty_run import flipped
from runtime import array_digests, replica_check

MESHES = [(2, 2, 2), (1, 1, 8), (8, 1, 1), (1, 4, 2), (4, 2, 1)]
NORM, STEP = "weights.last.norm", "step"  # on every device; the second is a scalar


@functools.cache
def made(shape):
    """(state, its comparison) on a mesh of this shape."""
    config = config_of(
        shape,
        train={"skip_spikes": 5.0, "microbatches": 8},
        num_attention_heads=8,
        hidden_size=64,
        intermediate_size=64,
    )
    mesh = mesh_of(config)
    shapes = train.abstract_state(config, model.declare(config), mesh)
    random = np.random.default_rng(0)

    def draw(a):
        return jax.device_put(random.standard_normal(a.shape).astype(a.dtype), a.sharding)

    return jax.tree.map(draw, shapes), replica_check.ReplicaChecker(shapes, mesh)


def with_flipped(state, name, position, bit=0, element=0):
    """The state with one bit of one array flipped on one device, and nowhere else."""

    def one(path, a):
        here = jax.tree_util.keystr(path, simple=True, separator=".") == name
        return flipped(a, jax.devices()[position], bit, element) if here else a

    return jax.tree_util.tree_map_with_path(one, state)


def leaf(state, name):
    named = jax.tree_util.tree_leaves_with_path(state)
    return next(
        a for path, a in named if jax.tree_util.keystr(path, simple=True, separator=".") == name
    )


def holders(a, position):
    """How many devices hold the slice that this one does."""
    slices = a.sharding.devices_indices_map(a.shape)
    return [str(s) for s in slices.values()].count(str(slices[jax.devices()[position]]))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_an_intact_state_passes_and_every_array_that_has_copies_is_compared(shape):
    state, compare = made(shape)
    assert compare(state) is None
    leaves = jax.tree_util.tree_leaves_with_path(state)
    several = [path for path, a in leaves if holders(a, 0) > 1]
    assert len(compare.names) == len(several) >= 8
    assert {NORM, STEP, "norms", "skipped", "optimizer.1.count"} <= set(compare.names)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(
    ("name", "bit", "element"), [(NORM, 0, 0), (NORM, 31, 63), (STEP, 0, 0), ("norms", 22, 127)]
)
def test_a_device_with_one_flipped_bit_is_named(shape, name, bit, element):
    state, compare = made(shape)
    for position in (0, 5):
        text = compare(with_flipped(state, name, position, bit, element))
        here = f"device {position} (process 0, host {compare.hosts[0]})"
        assert text == f"{name} on {here} differs from 7 other devices"
    assert compare(state) is None


def test_two_copies_that_differ_are_both_named():
    state, compare = made((2, 2, 2))
    name = next(n for n in compare.names if holders(leaf(state, n), 5) == 2)
    text = compare(with_flipped(state, name, 5))
    slices = leaf(state, name).sharding.devices_indices_map(leaf(state, name).shape)
    both = [d.id for d in jax.devices() if slices[d] == slices[jax.devices()[5]]]
    one, other = (f"device {n} (process 0, host {compare.hosts[0]})" for n in both)
    assert 5 in both and text == f"{name} differs between {one}, {other}"


def test_the_copy_that_differs_from_the_majority_is_named():
    state, compare = made((2, 2, 2))
    name = next(n for n in compare.names if holders(leaf(state, n), 5) == 4)
    text = compare(with_flipped(state, name, 5))
    assert text.startswith(f"{name} on device 5 (process 0, ")
    assert text.endswith("differs from 3 other devices")


def test_all_copies_are_named_without_a_majority():
    sums = np.array([7, 7, 8, 8, 7, 9])
    assert replica_check.odd_ones([0, 1, 2, 3], sums) == [0, 1, 2, 3]
    assert replica_check.odd_ones([0, 1, 2, 4], sums) == [2]
    assert replica_check.odd_ones([0, 2, 5], sums) == [0, 2, 5]


def test_many_arrays_that_differ_are_counted():
    state, compare = made((8, 1, 1))
    for name in compare.names[:7]:
        state = with_flipped(state, name, 3)
    text = compare(state)
    assert text.count("device 3") == replica_check.MAX_NAMED and text.endswith(
        "so do 2 more arrays"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16, jnp.uint8])
def test_any_flipped_bit_of_an_array_changes_its_checksum(dtype):
    size, bits = (3, 5, 7), 8 * jnp.dtype(dtype).itemsize
    random = np.random.default_rng(0)
    raw = random.integers(0, 2**bits, size, dtype=np.uint64).astype(f"uint{bits}")
    summed = jax.jit(array_digests.digest)

    def of(raw):
        return int(summed(jax.lax.bitcast_convert_type(raw, dtype))[0])

    found = {of(raw)}
    for element in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 4, 6)):
        for bit in range(bits):
            other = raw.copy()
            other[element] ^= 1 << bit
            found.add(of(other))
    assert len(found) == 1 + 4 * bits
    raw[0, 0, 0] = raw[2, 4, 6] + 1
    other = raw.copy()
    other[0, 0, 0], other[2, 4, 6] = raw[2, 4, 6], raw[0, 0, 0]
    assert of(other) != of(raw), "the same elements in other places are another array"


def test_nothing_is_compiled_after_the_comparison_is_made(caplog):
    state, _ = made((2, 2, 2))
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    compare = replica_check.ReplicaChecker(shapes, state.step.sharding.mesh)
    other = with_flipped(state, NORM, 2)
    with jax.log_compiles():
        assert compare(state) is None and compare(other) is not None
        assert not [r for r in caplog.records if "ompil" in r.getMessage()]
        jax.jit(lambda x: x * 3 + 1)(np.float32(1))
        assert [r for r in caplog.records if "ompil" in r.getMessage()], "what is looked for"


def test_slices_that_one_device_holds_are_not_read():
    mesh = mesh_of(config_of((8, 1, 1)))
    cut = jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    whole = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P()))
    compare = replica_check.ReplicaChecker({"cut": cut, "whole": whole}, mesh)
    assert compare.names == ["whole"]
    assert compare.sums.memory_analysis().argument_size_in_bytes == 64 * 4
    assert replica_check.ReplicaChecker({"cut": cut}, mesh)({"cut": None}) is None
