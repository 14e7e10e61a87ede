"""A small training state, saved by checkpoint.Checkpoints, for files that ask of checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import utils

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


def saved(folder, *steps, keep=3, keep_every_steps=0):
    checkpoints = checkpoint.Checkpoints(folder, keep, keep_every_steps=keep_every_steps)
    for step in steps:
        checkpoints.save(step, state_on(mesh_of(2, 2, 2), seed=step), CONFIG)
    checkpoints.wait()
    return checkpoints
