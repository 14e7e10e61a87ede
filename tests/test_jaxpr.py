"""What is read in small traces, against counts written out by hand."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import AxisType

import sharded_model
from planning import jaxpr, trace

ONE = jaxpr.Sizes()
N = 16  # floats of a row


def read(function, *shapes, sizes=ONE):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jaxpr.Reader(sizes, 1.0).read(jax.make_jaxpr(function)(*args))


def flops(ops):
    return total(jaxpr.costs(ops))


def total(costs):
    return sum(int(op.flops[0]) * n for op, n in costs)


def test_products_in_loops_and_calls_count_as_often_as_they_run():
    def trip(x, _):
        return jax.jit(lambda x: x @ x)(x), None

    program = read(lambda x: lax.scan(trip, x, None, length=5)[0] @ x, (N, N))
    assert flops(program.ops) == 6 * 2 * N**3


def test_one_trace_serves_every_batch():
    prime = 10007
    sizes = jaxpr.Sizes(prime, (1, 4, 64))
    program = read(lambda w, x: (x @ w).sum(0), (N, 8), (prime, N), sizes=sizes)
    [(op, _)] = jaxpr.costs(program.ops)
    assert op.flops.tolist() == [2 * b * N * 8 for b in (1, 4, 64)]
    assert program.inputs[0].bytes.tolist() == [4 * N * 8] * 3
    assert program.inputs[1].bytes.tolist() == [4 * b * N for b in (1, 4, 64)]


def forward_and_backward(function):
    program = read(lambda w, x, g: jax.vjp(function, w, x)[1](g), (N, N), (N, N), (N, N))
    w, _, gradient = program.inputs
    found = trace.TracedFunction(program, frozenset([w]), frozenset([gradient]))
    forward, backward = found.passes
    return jaxpr.Program(program.inputs, ops=forward), backward, found.residuals, {w}


@pytest.mark.parametrize(
    ("policy", "kept", "products"),
    [
        (jax.checkpoint_policies.nothing_saveable, 1, 2),  # x; the third product is not needed
        (jax.checkpoint_policies.save_only_these_names("one"), 2, 1),  # and "one"
        (jax.checkpoint_policies.everything_saveable, None, 0),
    ],
)
def test_what_is_not_saved_is_recomputed_as_far_as_it_is_needed(policy, kept, products):
    def chain(w, x):  # three products
        return jnp.tanh(jnp.tanh(checkpoint_name(x @ w, "one")) @ w) @ w

    forward, backward, needed, known = forward_and_backward(chain)
    assert flops(backward) == 6 * 2 * N**3
    found = jaxpr.remat(forward, needed, known, policy)
    assert total(found.costs) == products * 2 * N**3
    if kept:
        assert int(found.bytes[0]) == kept * 4 * N * N


def peak(function, *shapes):
    return int(read(function, *shapes).peak[0]) // (4 * N * N)


def test_the_peak_is_the_largest_sum_of_live_values():
    # Beside the argument and the result: what a product makes, and the next one beside it.
    assert peak(lambda x: ((x @ x) @ x) @ x, (N, N)) == 2
    # Elementwise results are made where they are read, and in place of what they are made of.
    assert peak(lambda x: jnp.sin(jnp.tanh(x @ x) * 2) @ x, (N, N)) == 1
    # Two that wait for each other.
    assert peak(lambda x: ((x @ x) @ (x @ x)) @ x, (N, N)) == 3
    # The carry of a loop is overwritten.
    loop = lambda x: lax.scan(lambda x, _: (x @ x, None), x, None, length=9)[0]  # noqa: E731
    assert peak(lambda x: loop(x @ x) @ x, (N, N)) <= 3


# --- names of primitives, which JAX may change ----------------------------------------------------

OWN = {"foreign_kernel"}  # a primitive of this project
# No public function makes it alone; JAX inserts it in transposed programs.
INSERTED = {"all_gather_invariant"}


def examples():
    """Return the names of primitives that jax.extend does not list, by tracing their functions."""

    def collectives(x):
        y = lax.psum_scatter(lax.pcast(x, "x", to="varying"), "x", tiled=True)
        return lax.psum(y, "x")

    def local(x):
        key = jax.random.wrap_key_data(jax.random.key_data(jax.random.key(0)))
        product = lax.ragged_dot(x[:, None], x[None, None], jnp.array([8]))
        kernel = pallas.pallas_call(lambda a, b: None, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return lax.split(x, (4, 4)), jax.random.uniform(key), product, kernel(x)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(collectives, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    traced = (str(jax.make_jaxpr(function)(jnp.zeros(8))) for function in (sharded, local))
    return {name for text in traced for name in re.findall(r"= ([\w-]+)", text)}


def test_names_of_primitives_are_those_of_jax():
    known = {p.name for p in vars(primitives).values() if isinstance(p, core.Primitive)}
    used = sharded_model.COSTLY | jaxpr.FUSED | jaxpr.READS
    used |= {*jaxpr.COLLECTIVES, *jaxpr.OPAQUE, *jaxpr.IN_PLACE}
    unknown = used - known - examples() - OWN - INSERTED
    assert not unknown, "renamed by JAX"
