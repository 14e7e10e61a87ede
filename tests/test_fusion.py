"""Bytes of kernels in small programs, against counts written out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from planning import fusion, jaxpr

N = 64  # floats of a row: more than a sum that is no kernel of its own
ROW, SQUARE = 4 * N, 4 * N * N  # bytes
RANKS = {"one": 1, "two": 2}


def fused(function, *shapes, axes=()):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = jax.make_jaxpr(function, axis_env=[(axis, RANKS[axis]) for axis in axes])(*args)
    program = jaxpr.Reader(jaxpr.Sizes(1, ((1, 1),)), 1.0).read(traced)
    return fusion.Fused(program.ops, frozenset(["one"]), program.outputs)


def moved(function, *shapes, **options):
    return int(fused(function, *shapes, **options).bytes[0])


def test_elementwise_operations_between_two_products_are_one_kernel():
    found = moved(lambda x, w: (2 * jnp.tanh(x @ w) + x) @ w, (N, N), (N, N))
    assert found == (3 + 3 + 3) * SQUARE


def test_a_loop_of_unknown_length_moves_nothing():
    def looped(x, w):
        return lax.while_loop(lambda y: y[0, 0] < 1, jnp.tanh, x @ w)

    assert moved(looped, (N, N), (N, N)) == 3 * SQUARE  # of the product


def test_operands_of_two_results_are_read_once():
    assert moved(lambda x, y: (jnp.tanh(x + y), x * y), (N, N), (N, N)) == (2 + 2) * SQUARE


def test_kernels_that_read_the_same_are_one_unless_one_waits_for_the_other():
    def both(x):
        sums = x.sum(1)
        return sums, jnp.tanh(x), x * sums[:, None]

    first = SQUARE + ROW + SQUARE  # the sum and tanh
    assert moved(both, (N, N)) == first + (SQUARE + ROW + SQUARE)


def test_kernels_do_not_wait_for_each_other():
    def crossed(x, y):
        a, b = x.sum(1), y.sum(1)
        return x * b[:, None], y * a[:, None]

    # One of the two is read for its sum, and again once the other's sum is there.
    assert moved(crossed, (N, N), (N, N)) == (3 + 2) * SQUARE + 4 * ROW


def test_unused_operations_are_removed():
    def half(x):
        x @ x
        return jnp.tanh(jnp.split(x, 2, axis=1)[0])

    assert moved(half, (N, N)) == SQUARE


def test_dropout_makes_its_bits_where_they_are_read():
    def dropped(x):
        return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)

    assert moved(dropped, (N, N)) == pytest.approx(2 * SQUARE, rel=0.01)


@pytest.mark.parametrize(("summed", "sums"), [(2, 0), (fusion.FEW + 1, 2)])
def test_a_few_numbers_are_added_where_the_sum_is_read(summed, sums):
    found = moved(lambda x: jnp.tanh(x.sum(1)), (N, summed))
    assert found == 4 * N * summed + ROW + sums * ROW


def test_a_slice_reads_only_its_part():
    assert moved(lambda x: jnp.tanh(x[:, : N // 4]), (N, N)) == SQUARE // 2
    rows = moved(lambda x: jnp.tanh(x[jnp.arange(8)]), (N, N))
    assert rows == 8 * ROW + 8 * ROW
    both = moved(lambda x: (jnp.tanh(x), jnp.tanh(x[:, : N // 4])), (N, N))
    assert both == SQUARE + SQUARE + SQUARE // 4
    often = moved(lambda x: jnp.tanh(x[jnp.zeros(4 * N, int)]), (N, N))
    assert often == SQUARE + 4 * SQUARE


def test_views_and_the_order_of_dimensions_cost_nothing():
    plain = moved(lambda x, w: x @ w, (N, N), (N, N))
    turned = moved(lambda x, w: (x.T.reshape(N, 1, N)[:, 0] @ w).T, (N, N), (N, N))
    assert turned == plain == 3 * SQUARE


def test_an_update_moves_what_it_updates():
    found = moved(lambda x, row: lax.dynamic_update_slice(x, row, (3, 0)), (N, N), (1, N))
    assert found == 2 * ROW


def test_a_loop_moves_what_its_body_moves_as_often_as_it_runs():
    def trip(x, _):
        return jnp.tanh(x), None

    found = moved(lambda x: lax.scan(trip, x, None, length=5)[0], (N, N))
    assert found == 5 * 2 * SQUARE


def test_a_collective_costs_memory_traffic_only_along_axes_of_several_ranks():
    for axis, through in (("one", 2), ("two", 6)):
        found = moved(lambda x, axis=axis: 2 * lax.psum(jnp.tanh(x), axis), (N, N), axes=[axis])
        assert found == through * SQUARE


@pytest.mark.parametrize(("dim", "more"), [(0, 0), (1, 2)])
def test_interleaved_parts_of_ranks_are_reordered(dim, more):
    found = moved(lambda x: lax.all_gather(x, "two", axis=dim, tiled=True), (N, N), axes=["two"])
    assert found == (1 + 2 + 2 * more) * SQUARE
    found = moved(lambda x: lax.all_to_all(x, "two", 0, dim, tiled=True), (N, N), axes=["two"])
    assert found == (2 + more) * SQUARE


def test_storing_and_slicing_values_of_products_moves_more():
    kernels = fused(lambda x, w: jnp.tanh(x @ w) * 2, (N, N), (N, N))
    product, doubled = (kernels.maker[v] for v in kernels.made_by)
    assert kernels.stored(product.outputs[0]) == 2 and kernels.stored(doubled.outputs[0]) == 1
    x, w = product.inputs
    assert kernels.sliced(x) == kernels.sliced(w) == 2
    assert kernels.sliced(product.outputs[0]) == 0
