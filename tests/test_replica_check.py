"""One bit, flipped on one device, is found and named; nothing else is."""

import jax
import numpy as np
import pytest

import model
import train
from common import config_of, mesh_of
from faulty_run import flipped
from runtime import array_digests

NORM, STEP = "weights.last.norm", "step"  # on every device; the second is a scalar


def by_name(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): a for path, a in leaves}


@pytest.fixture(scope="module")
def made():
    """(state, its comparison) on a mesh with every axis."""
    config = config_of((2, 2, 2), train={"skip_spikes": 5.0})
    mesh = mesh_of(config)
    shapes = train.abstract_state(config, model.declare(config), mesh)
    random = np.random.default_rng(0)

    def draw(a):
        return jax.device_put(random.standard_normal(a.shape).astype(a.dtype), a.sharding)

    return jax.tree.map(draw, shapes), array_digests.ReplicaChecker(shapes, mesh)


def with_flipped(state, name, position, bit=0, element=0):
    """The state with one bit of one array flipped on one device, and nowhere else."""
    new = [
        flipped(a, jax.devices()[position], bit, element) if here == name else a
        for here, a in by_name(state).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(state), new)


def holders(a, position):
    """The devices that hold the slice that this one does."""
    slices = a.sharding.devices_indices_map(a.shape)
    return [d.id for d in jax.devices() if slices[d] == slices[jax.devices()[position]]]


def test_an_intact_state_passes_and_every_array_that_has_copies_is_compared(made):
    state, compare = made
    assert compare(state) is None
    several = {name for name, a in by_name(state).items() if len(holders(a, 0)) > 1}
    assert several == set(compare.names) and len(several) >= 8
    assert {NORM, STEP, "norms", "skipped", "optimizer.1.count"} <= several


@pytest.mark.parametrize(
    ("name", "bit", "element"), [(NORM, 0, 0), (NORM, 31, 47), (STEP, 0, 0), ("norms", 22, 127)]
)
def test_a_device_with_one_flipped_bit_is_named(made, name, bit, element):
    state, compare = made
    for position in (0, 5):
        text = compare(with_flipped(state, name, position, bit, element))
        here = f"device {position} (process 0, host {compare.hosts[0]})"
        assert text == f"{name} on {here} differs from 7 other devices"


def test_of_two_copies_that_differ_both_are_named_and_of_four_the_odd_one(made):
    state, compare = made
    found = {name: holders(a, 5) for name, a in by_name(state).items()}
    two, four = (next(n for n in compare.names if len(found[n]) == count) for count in (2, 4))
    both = ", ".join(f"device {n} (process 0, host {compare.hosts[0]})" for n in found[two])
    assert compare(with_flipped(state, two, 5)) == f"{two} differs between {both}"
    text = compare(with_flipped(state, four, 5))
    assert f"{four} on device 5 (" in text and text.endswith("differs from 3 other devices")


def test_many_arrays_that_differ_are_counted(made):
    state, compare = made
    for name in compare.names[:7]:
        state = with_flipped(state, name, 3)
    text = compare(state)
    assert text.count("device 3") == array_digests.MAX_NAMED
    assert text.endswith("so do 2 more arrays")
