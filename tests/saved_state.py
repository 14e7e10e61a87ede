"""A small training state, saved by checkpoint.Checkpoints, and faults of saves."""

import contextlib
import dataclasses
import functools
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import utils
from model import Transformer
from runtime import run_directory

AXES = ("fsdp", "pipeline", "tensor")
CONFIG = dataclasses.asdict(utils.Config())
SPECS = Transformer(
    first={"matrix": P("fsdp", "tensor"), "prefix": None},
    blocks={"kernel": P(None, "pipeline", None, None, ("fsdp",))},
    last={"norm": P()},
)
LAYERS = 8


def mesh_of(*shape):
    return jax.make_mesh(shape, AXES, devices=jax.devices()[: int(np.prod(shape))])


def values(seed=0):
    """Return the weights in their canonical shapes."""
    random = np.random.default_rng(seed)
    shapes = {"matrix": (64, 96), "kernel": (LAYERS, 3, 16), "norm": (24,)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def state_on(mesh, seed=0, virtual=1):
    """Return a state whose blocks are [virtual, stage, block, ...], as those of a training run."""
    found, stages = values(seed), (virtual, mesh.shape["pipeline"])
    kernel = found["kernel"].reshape(*stages, LAYERS // stages[0] // stages[1], 3, 16)
    weights = Transformer(
        first={"matrix": found["matrix"], "prefix": None},
        blocks={"kernel": kernel},
        last={"norm": found["norm"]},
    )

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    weights = jax.tree.map(put, weights, SPECS)
    with jax.numpy_dtype_promotion("standard"):
        adam, rest = optax.adam(1e-3).init(weights)
    adam = adam._replace(count=put(jnp.int32(seed), P()), mu=jax.tree.map(lambda x: x * x, weights))
    return {"weights": weights, "optimizer": (adam, rest), "step": put(jnp.int32(seed), P())}


@functools.cache
def state(step):
    """What `saved` saves as this step. It must not be donated."""
    return state_on(mesh_of(2, 2, 2), seed=step)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(other.data))


def assert_newest(checkpoints, step, state):
    found_step, found = checkpoints.newest(abstract(state))
    assert found_step == step
    assert_same(found, state)


def saved(folder, *steps):
    checkpoints = checkpoint.Checkpoints(folder, keep=3)
    for step in steps:
        checkpoints.save(step, state(step), CONFIG)
    checkpoints.wait()
    return checkpoints


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


@contextlib.contextmanager
def opened(folder, keep=None, every=0):
    with contextlib.closing(checkpoint.Checkpoints(folder, keep, every)) as checkpoints:
        yield checkpoints


def wait_for_late_writes(look):
    """Wait until `look` returns the same twice: a failed save leaves writes that go on."""
    before, now = None, look()
    while before != now:
        time.sleep(0.5)
        before, now = now, look()


# --- faults of saves ------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk():
    """Writes fail in all threads, except the first bytes of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "PROBE_BYTES", 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def failing(error):
    """Orbax cannot rename a folder, which it does last, in a thread."""

    def fails(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(epath.Path("x")), "rename", fails)
        yield


FAULTS = {  # (what fails, the exception's type, the end of its message)
    "disk full": (full_disk, ValueError, "File too large"),
    "rename refused": (lambda: failing(OSError("no rename")), ValueError, "no rename"),
    "an error in a thread": (lambda: failing(KeyError("rename")), KeyError, "rename"),
}
