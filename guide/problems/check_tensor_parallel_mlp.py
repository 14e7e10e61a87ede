"""The test of problem 3.5."""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec


def expected(x, up, down):
    return jax.nn.relu(x @ up) @ down


def value_and_gradients(mlp):
    def loss(*arrays):
        y = mlp(*arrays)
        return jnp.sum(y**2), y

    grads, y = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [y, *grads]


answer = check.load_answer()
P, SHAPES = PartitionSpec, ((3, 8), (8, 12), (12, 8))
keys = jax.random.split(jax.random.key(0), 3)
arrays = [jax.random.normal(k, shape) for k, shape in zip(keys, SHAPES, strict=True)]
true = value_and_gradients(expected)
for ranks in (1, 2, 4):
    mesh = jax.make_mesh((ranks,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:ranks])
    specs = (P(), P(None, "tensor"), P("tensor", None))
    sharded = jax.shard_map(answer.mlp, mesh=mesh, in_specs=specs, out_specs=P())
    try:
        found = value_and_gradients(sharded)
    except ValueError as error:
        if "replicat" not in str(error):
            raise
        print("not right: the result differs between tensor ranks. Which sum is missing?")
        sys.exit(1)
    names = ("value", "gradient of x", "gradient of up", "gradient of down")
    for name, a, b in zip(names, found, true, strict=True):
        if not np.allclose(a, b, rtol=1e-4, atol=1e-4):
            print(f"not right: on {ranks} ranks the {name} differs from that of one device.")
            sys.exit(1)
print("right: values and gradients on 1, 2 and 4 ranks.")
