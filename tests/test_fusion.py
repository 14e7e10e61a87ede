"""Bytes of kernels in small programs, against counts written out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from planning import fusion, jaxpr

N = 64  # floats of a row: more than a sum that is no kernel of its own
ROW, SQUARE = 4 * N, 4 * N * N  # bytes
RANKS = {"one": 1, "two": 2}


def fused(function, shapes, axes=()):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = jax.make_jaxpr(function, axis_env=[(axis, RANKS[axis]) for axis in axes])(*args)
    program = jaxpr.Reader(jaxpr.Sizes(1, ((1, 1),)), 1.0).read(traced)
    return fusion.Fused(program.ops, frozenset(["one"]), program.outputs)


def moved(function, shapes=((N, N),), axes=()):
    return int(fused(function, shapes, axes).bytes[0])


def looped(x, w):
    return lax.while_loop(lambda y: y[0, 0] < 1, jnp.tanh, x @ w)


def joined(x):
    sums = x.sum(1)
    return sums, jnp.tanh(x), x * sums[:, None]


def crossed(x, y):
    a, b = x.sum(1), y.sum(1)
    return x * b[:, None], y * a[:, None]


def half(x):
    x @ x
    return jnp.tanh(jnp.split(x, 2, axis=1)[0])


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


def five_trips(x):
    return lax.scan(lambda x, _: (jnp.tanh(x), None), x, None, length=5)[0]


ONE, TWO = [(N, N)], [(N, N)] * 2
CASES = {  # function, shapes, bytes
    "elementwise operations between two products are one kernel": (
        lambda x, w: (2 * jnp.tanh(x @ w) + x) @ w, TWO, (3 + 3 + 3) * SQUARE,
    ),
    "a loop of unknown length moves nothing": (looped, TWO, 3 * SQUARE),  # of the product
    "operands of two results are read once": (
        lambda x, y: (jnp.tanh(x + y), x * y), TWO, (2 + 2) * SQUARE,
    ),
    # The sum and tanh, and what waits for the sum.
    "kernels that read the same are one": (joined, ONE, (2 * SQUARE + ROW) * 2),
    # One of the two is read for its sum, and again once the other's sum is there.
    "kernels do not wait for each other": (crossed, TWO, (3 + 2) * SQUARE + 4 * ROW),
    "unused operations are removed": (half, ONE, SQUARE),
    "dropout makes its bits where they are read": (
        dropped, ONE, pytest.approx(2 * SQUARE, rel=0.01),
    ),
    "a slice reads its part": (lambda x: jnp.tanh(x[:, : N // 4]), ONE, SQUARE // 2),
    "rows are read alone": (lambda x: jnp.tanh(x[jnp.arange(8)]), ONE, 2 * 8 * ROW),
    "a slice of what is read is free": (
        lambda x: (jnp.tanh(x), jnp.tanh(x[:, : N // 4])), ONE, 2 * SQUARE + SQUARE // 4,
    ),
    "a few numbers are added where the sum is read": (
        lambda x: jnp.tanh(x.sum(1)), [(N, 2)], 4 * N * 2 + ROW,
    ),
    "a sum of more is a kernel": (
        lambda x: jnp.tanh(x.sum(1)), [(N, fusion.FEW + 1)], 4 * N * (fusion.FEW + 1) + 3 * ROW,
    ),
    "views and the order of dimensions cost nothing": (
        lambda x, w: (x.T.reshape(N, 1, N)[:, 0] @ w).T, TWO, 3 * SQUARE,
    ),
    "an update moves what it updates": (
        lambda x, row: lax.dynamic_update_slice(x, row, (3, 0)), [(N, N), (1, N)], 2 * ROW,
    ),
    "a loop moves what its body moves as often as it runs": (five_trips, ONE, 5 * 2 * SQUARE),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_fused_kernels(name):
    function, shapes, expected = CASES[name]
    assert moved(function, shapes) == expected


def test_a_collective_costs_memory_traffic_only_along_axes_of_several_ranks():
    for axis, through in (("one", 2), ("two", 6)):
        found = moved(lambda x, axis=axis: 2 * lax.psum(jnp.tanh(x), axis), axes=[axis])
        assert found == through * SQUARE


@pytest.mark.parametrize(("dim", "more"), [(0, 0), (1, 2)])
def test_interleaved_parts_of_ranks_are_reordered(dim, more):
    found = moved(lambda x: lax.all_gather(x, "two", axis=dim, tiled=True), axes=["two"])
    assert found == (1 + 2 + 2 * more) * SQUARE
    found = moved(lambda x: lax.all_to_all(x, "two", 0, dim, tiled=True), axes=["two"])
    assert found == (2 + more) * SQUARE


def test_storing_and_slicing_values_of_products_moves_more():
    kernels = fused(lambda x, w: jnp.tanh(x @ w) * 2, TWO)
    product, doubled = (kernels.maker[v] for v in kernels.made_by)
    assert kernels.stored(product.outputs[0]) == 2 and kernels.stored(doubled.outputs[0]) == 1
    x, w = product.inputs
    assert kernels.sliced(x) == kernels.sliced(w) == 2
    assert kernels.sliced(product.outputs[0]) == 0
