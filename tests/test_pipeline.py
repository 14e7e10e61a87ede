"""The executor against plain differentiation of a toy model: results, residuals, programs.

Letters: M microbatches, B sequences, D width, V outputs.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipeline
from schedule import Schedule
from utils import BATCH_AXES, MESH_AXES, TOKEN_AXES
from weights import vary

B, D, V = 4, 5, 12
PER_CHUNK = 2  # blocks in a chunk
# (pipeline, virtual, M): one rank, few and odd microbatches, more and fewer chunks than ranks.
SCHEDULES = [
    (1, 1, 1),
    (1, 1, 3),
    (1, 3, 2),
    (2, 1, 1),
    (2, 1, 5),
    (2, 2, 2),
    (2, 3, 6),
    (4, 1, 1),
    (4, 1, 3),
    (4, 2, 8),
    (4, 3, 4),
]


class Data(NamedTuple):
    inputs: jax.Array  # [M, B, D]
    targets: jax.Array  # [M, B, V]
    gain: jax.Array  # [M, B], that every block uses


class Outer(NamedTuple):
    """The weights of `first` and `last`, and one that both use."""

    first: jax.Array  # [D, D]
    last: jax.Array  # [D, V]
    shift: jax.Array  # [D]


def first(outer, data):
    return vary(jnp.tanh(data.inputs @ outer.first + outer.shift[None]))


def formula(w, gain, number, x):
    """The result depends on loss, number and data; it is NaN where x is zero."""
    direction = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    y = x + gain[:, None] * jnp.cos(number) * jnp.tanh(direction @ w["matrix"] + w["bias"][None])
    return y, 0.1 * jnp.sum(y**4)


def block(w, data, number, x):
    gain, number = vary(lax.stop_gradient((data.gain, number.astype(jnp.float32))))
    y, loss = formula(w, gain, number, x)
    return (y, loss), {"calls": jnp.int32(1), "sum": jnp.sum(y)}


def last(outer, data, y):
    """The matrix is sharded over pipeline, as the vocabulary."""
    columns = outer.last.shape[1]
    start = lax.axis_index("pipeline") * columns
    targets = lax.dynamic_slice_in_dim(data.targets, start, columns, axis=1)
    outputs = (y - outer.shift[None]) @ outer.last
    loss = lax.psum(jnp.sum((outputs - targets) ** 2), ("pipeline", "tensor"))
    return loss, {"loss": loss, "first": lax.psum(jnp.sum(data.gain), "tensor")}


FUNCTIONS = pipeline.Functions(first, block, last)


def weights_of(blocks):
    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    return pipeline.Parameters(
        Outer(draw(D, D), draw(D, V), draw(D)),
        {"matrix": draw(blocks, D, D), "bias": draw(blocks, D)},
    )


def data_of(M):
    random = np.random.default_rng(1)
    draw = lambda *shape: random.standard_normal((M, B, *shape)).astype(np.float32)  # noqa: E731
    return Data(draw(D), draw(V), draw())


def plain_loss(w, data):
    """Return (loss, results) of one microbatch, without an executor."""
    x, losses, sums = jnp.tanh(data.inputs @ w.outer.first + w.outer.shift[None]), 0.0, []
    for i in range(len(w.blocks["bias"])):
        here = jax.tree.map(lambda a, i=i: a[i], w.blocks)
        x, loss = formula(here, data.gain, jnp.float32(i), x)
        losses, sums = losses + loss, [*sums, jnp.sum(x)]
    error = jnp.sum(((x - w.outer.shift[None]) @ w.outer.last - data.targets) ** 2)
    return losses + error, (error, jnp.stack(sums))


def plain(w, data):
    """Return gradients of the sum over microbatches, [M] errors and [M, blocks] sums."""
    one = jax.grad(plain_loss, has_aux=True)
    grads, results = jax.jit(jax.vmap(one, in_axes=(None, 0)))(w, data)
    return jax.tree.map(lambda g: g.sum(0), grads), results


def mesh_of(ranks, fsdp):
    devices = np.array(jax.devices()[: fsdp * ranks]).reshape(1, fsdp, ranks, 1)
    return jax.sharding.Mesh(devices, MESH_AXES)


WEIGHT_SPECS = pipeline.Parameters(Outer(P(), P(None, "pipeline"), P()), P(None, "pipeline"))
DATA_SPEC = P(None, BATCH_AXES)


def per_chunk(tree, schedule):
    """[blocks of a rank, ...] -> [virtual, 1, blocks per chunk, ...]."""
    return jax.tree.map(lambda a: a.reshape(schedule.virtual, 1, -1, *a.shape[1:]), tree)


def on_ranks(schedule, local, out_specs, fsdp=1):
    """Run `local`, of one rank, on global arrays with blocks in model order."""

    def global_function(w, data):
        stack = (schedule.virtual, schedule.pipeline, -1)
        blocks = jax.tree.map(lambda a: a.reshape(*stack, *a.shape[1:]), w.blocks)
        return mapped(w._replace(blocks=blocks), data)

    def local_blocks_in_a_row(w, data):
        blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), w.blocks)
        return local(vary(w._replace(blocks=blocks)), data)

    mapped = jax.shard_map(
        local_blocks_in_a_row,
        mesh=mesh_of(schedule.pipeline, fsdp),
        in_specs=(WEIGHT_SPECS, DATA_SPEC),
        out_specs=out_specs,
        check_vma=True,
    )
    return jax.jit(global_function)


def train(schedule, functions=FUNCTIONS, fsdp=1):
    """(weights, data) -> gradients, statistics of blocks, statistics of `last`."""

    def local(w, data):
        grads, stats, results = pipeline.forward_backward(functions, w, data, schedule)
        blocks = lax.psum(per_chunk(grads.blocks, schedule), TOKEN_AXES)
        outer = Outer(
            lax.psum(grads.outer.first, MESH_AXES),
            lax.psum(grads.outer.last, TOKEN_AXES),
            lax.psum(grads.outer.shift, MESH_AXES),
        )
        whole = pipeline.Parameters(outer, blocks)
        stats = lax.psum(per_chunk(stats, schedule), TOKEN_AXES)
        return whole, stats, lax.psum(results, BATCH_AXES)

    return on_ranks(schedule, local, (WEIGHT_SPECS, P(None, "pipeline"), P()), fsdp)


def flat(tree):
    """[virtual, pipeline, blocks per chunk, ...] -> [blocks, ...]."""
    return jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[3:]), tree)


def assert_same(found, expected):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        b = np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= 5e-6, f"{jax.tree_util.keystr(path)}: {error}"


def assert_trains_as_plain(sizes, functions=FUNCTIONS, fsdp=1):
    schedule = Schedule(*sizes)
    w, data = weights_of(schedule.stages * PER_CHUNK), data_of(schedule.microbatches)
    grads, stats, results = train(schedule, functions, fsdp)(w, data)
    expected, (errors, sums) = plain(w, data)
    assert_same(grads._replace(blocks=flat(grads.blocks)), expected)
    assert (flat(stats["calls"]) == schedule.microbatches * fsdp).all()
    assert_same(flat(stats["sum"]), sums.sum(0))
    assert_same(results["loss"], errors.sum())
    assert_same(results["first"], data.gain.sum())


@pytest.mark.parametrize("sizes", SCHEDULES, ids=lambda sizes: "P{}v{}M{}".format(*sizes))
def test_gradients_and_statistics_match_plain_differentiation(sizes):
    assert_trains_as_plain(sizes)


def test_gradients_match_plain_differentiation_with_the_batch_sharded_over_fsdp():
    assert_trains_as_plain((2, 2, 4), fsdp=2)


@pytest.mark.parametrize("sizes", [(1, 1, 2), (4, 2, 8)], ids=str)
def test_gradients_do_not_change_when_blocks_are_recomputed(sizes):
    assert_trains_as_plain(sizes, FUNCTIONS._replace(block=jax.checkpoint(block)))


def test_a_block_on_the_data_of_an_idle_slot_gives_nan():
    w = jax.tree.map(lambda a: a[0], weights_of(1).blocks)
    y, loss = formula(w, jnp.ones(B), jnp.float32(0), jnp.zeros((B, D)))
    assert np.isnan(y).all() and np.isnan(loss), "the tests above would not see an unmasked slot"


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 1, 3), (4, 1, 1), (2, 3, 4), (4, 2, 8)], ids=str)
def test_evaluation_returns_the_results_of_microbatches_in_order(sizes):
    schedule = Schedule(*sizes)
    w, data = weights_of(schedule.stages * PER_CHUNK), data_of(schedule.microbatches)

    def local(w, data):
        stats, results = pipeline.forward(FUNCTIONS, w, data, schedule)
        stats = lax.psum(per_chunk(stats, schedule), TOKEN_AXES)
        return stats, lax.psum(results, BATCH_AXES)

    stats, results = on_ranks(schedule, local, (P(None, "pipeline"), P()))(w, data)
    _, (errors, sums) = plain(w, data)
    assert_same(results["loss"], errors)
    assert_same(results["first"], data.gain.sum(1))
    assert_same(flat(stats["sum"]), sums.sum(0))
    assert (flat(stats["calls"]) == schedule.microbatches).all()


def ring_of(functions, schedule):
    """Return the shapes of the residuals of one block, in each slot."""
    found = []

    def local(w, data):
        run = pipeline.Executor(functions, w, data, schedule)
        ring, _, _ = run.probe(run.empty_x())
        found.extend(a.shape for a in jax.tree.leaves(ring))
        return lax.psum(jnp.zeros(()), ())

    w, data = weights_of(schedule.stages * PER_CHUNK), data_of(schedule.microbatches)
    jax.eval_shape(on_ranks(schedule, local, P()), w, data)
    assert all(shape[:2] == (schedule.ring_slots, PER_CHUNK) for shape in found)
    return [shape[2:] for shape in found]


def test_the_ring_holds_residuals_but_no_weights_and_no_data():
    kept = ring_of(FUNCTIONS, Schedule(2, 2, 4))
    assert (B, D) in kept
    assert not {(D, D), (D,), (B, V), (B,)} & set(kept)


def test_the_ring_holds_only_the_input_of_a_recomputed_block():
    functions = FUNCTIONS._replace(block=jax.checkpoint(block))
    assert ring_of(functions, Schedule(2, 2, 4)) == [(B, D)]


def program(schedule, blocks_per_chunk):
    """Return the traced training step, without sizes."""
    w, data = weights_of(schedule.stages * blocks_per_chunk), data_of(schedule.microbatches)
    return re.sub(r"\d+|\s+", "_", str(jax.make_jaxpr(train(schedule))(w, data)))


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_program_grows_with_neither_blocks_nor_microbatches(virtual):
    small, more_blocks, more_microbatches = (
        program(Schedule(2, virtual, M), blocks) for M, blocks in ((4, 2), (4, 8), (16, 2))
    )
    assert len(small) > 10_000
    assert small == more_blocks
    assert small == more_microbatches


@pytest.mark.parametrize("sizes", SCHEDULES, ids=str)
def test_first_and_last_run_once_for_each_microbatch_and_direction(sizes):
    schedule = Schedule(*sizes)
    share = pipeline.branch_share(schedule)
    runs = dict.fromkeys(("first", "last", "first_backward"), 0.0)
    for start, stop, forward, backward in schedule.phases:
        for role in runs:
            name = f"jit(step)/{pipeline.PHASES[forward, backward]}/while/body/{role}/cond"
            never, once = share(name)
            assert never + once == 1
            runs[role] += (stop - start) * once
    assert runs == pytest.approx(dict.fromkeys(runs, schedule.microbatches))
    assert share("jit(step)/while/body/cond") is None


def test_a_loss_that_is_not_reduced_is_an_error_at_trace_time():
    def forgotten(outer, data, y):
        w = outer.last
        loss = jnp.sum((y @ w - data.targets[:, : w.shape[1]]) ** 2)
        return loss, {"loss": loss, "first": lax.psum(jnp.sum(data.gain), "tensor")}

    step = train(Schedule(2, 1, 2), FUNCTIONS._replace(last=forgotten))
    with pytest.raises((TypeError, ValueError), match=r"var(ying|iance)|vma|manual axes"):
        jax.eval_shape(step, weights_of(4), data_of(2))
