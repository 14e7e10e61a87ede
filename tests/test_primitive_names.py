"""Names of JAX's primitives that policies and plans compare with are names that JAX still uses."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import AxisType, PartitionSpec

import sharded_model
from planning import jaxpr

# Primitives of this project.
OWN = {"foreign_kernel"}
# No public function makes it alone; JAX inserts it in transposed programs.
INSERTED = {"all_gather_invariant"}


def names_in(traced):
    """Return the names of all primitives of a jaxpr, also within others."""
    found = {eqn.primitive.name for eqn in traced.eqns}
    for eqn in traced.eqns:
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found |= names_in(inner) if hasattr(inner, "eqns") else set()
    return found


def examples():
    """Return the names of primitives that jax.extend does not list, by tracing their functions."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def collectives(x):
        y = lax.psum_scatter(lax.pcast(x, "x", to="varying"), "x", tiled=True)
        return lax.psum(y, "x")

    def local(x):
        key = jax.random.wrap_key_data(jax.random.key_data(jax.random.key(0)))
        product = lax.ragged_dot(x[:, None], x[None, None], jnp.array([8]))
        kernel = pallas.pallas_call(lambda a, b: None, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return lax.split(x, (4, 4)), jax.random.uniform(key), product, kernel(x)

    P = PartitionSpec
    sharded = jax.shard_map(collectives, mesh=mesh, in_specs=P(), out_specs=P())
    x = jnp.zeros(8)
    return names_in(jax.make_jaxpr(sharded)(x).jaxpr) | names_in(jax.make_jaxpr(local)(x).jaxpr)


def test_names_of_primitives_are_those_of_jax():
    known = {p.name for p in vars(primitives).values() if isinstance(p, core.Primitive)}
    used = sharded_model.COSTLY | jaxpr.FUSED | jaxpr.READS | {*jaxpr.COLLECTIVES, *jaxpr.OPAQUE}
    used |= {*jaxpr.IN_PLACE}
    unknown = used - known - examples() - OWN - INSERTED
    assert not unknown, "renamed by JAX"
