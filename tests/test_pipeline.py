"""The executor against plain differentiation of a toy model: results, residuals, programs.

Letters: M microbatches, B sequences, D width, V outputs. The batch is sharded over FSDP ranks.
"""

import dataclasses
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import one_stage
import pipeline
from common import OPTIMIZED
from planning import hlo
from schedule import Schedule
from utils import BATCH_AXES, DATA_AXES, MESH_AXES, TOKEN_AXES
from weights import matmul, vary

B, D, V, FSDP = 4, 5, 12, 2
PER_CHUNK = 2  # blocks in a chunk


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
    product = matmul("bd,de->be", direction, w["matrix"])
    y = x + gain[:, None] * jnp.cos(number) * jnp.tanh(product + w["bias"][None])
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


@dataclasses.dataclass
class Declared:
    """What the executor reads of a weights.Weight."""

    trained: bool
    matrix: tuple | None = None


TRAINED, MATRIX = Declared(True), Declared(True, ((-2,), (-1,)))
DECLARED = pipeline.Parameters(Outer(*[TRAINED] * 3), {"matrix": MATRIX, "bias": TRAINED})
FUNCTIONS = pipeline.Functions(first, block, last, DECLARED)
RECOMPUTED = FUNCTIONS._replace(block=jax.checkpoint(block))


def inputs_of(schedule, per_chunk=PER_CHUNK):
    """Return (weights, data) of all ranks."""
    random, blocks = np.random.default_rng(0), schedule.stages * per_chunk
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    outer = Outer(draw(D, D), draw(D, V), draw(D))
    w = pipeline.Parameters(outer, {"matrix": draw(blocks, D, D), "bias": draw(blocks, D)})
    return w, Data(*(draw(schedule.microbatches, B, *shape) for shape in ((D,), (V,), ())))


def plain_loss(w, data):
    """Return (loss, results) of one microbatch, without an executor."""
    x, losses, sums = jnp.tanh(data.inputs @ w.outer.first + w.outer.shift[None]), 0.0, []
    for i in range(len(w.blocks["bias"])):
        here = jax.tree.map(lambda a, i=i: a[i], w.blocks)
        x, loss = formula(here, data.gain, jnp.float32(i), x)
        losses, sums = losses + loss, [*sums, jnp.sum(x)]
    error = jnp.sum(((x - w.outer.shift[None]) @ w.outer.last - data.targets) ** 2)
    return losses + error, (error, jnp.stack(sums))


WEIGHT_SPECS = pipeline.Parameters(Outer(P(), P(None, "pipeline"), P()), P(None, "pipeline"))


def on_ranks(schedule, local, out_specs):
    """Run `local`, of one rank, on global arrays with blocks in model order."""

    def global_function(w, data):
        stack = (schedule.virtual, schedule.pipeline, -1)
        blocks = jax.tree.map(lambda a: a.reshape(*stack, *a.shape[1:]), w.blocks)
        return mapped(w._replace(blocks=blocks), data)

    def local_blocks_in_a_row(w, data):
        blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), w.blocks)
        return local(vary(w._replace(blocks=blocks)), data)

    devices = np.array(jax.devices()[: FSDP * schedule.pipeline])
    mesh = jax.sharding.Mesh(devices.reshape(1, FSDP, schedule.pipeline, 1, 1), MESH_AXES)
    in_specs = WEIGHT_SPECS, P(None, BATCH_AXES)
    mapped = jax.shard_map(
        local_blocks_in_a_row, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
    )
    return jax.jit(global_function)


def train(schedule, functions=FUNCTIONS, unrolled=False):
    """(weights, data) -> gradients, statistics of blocks and of `last`; those of an evaluation."""

    def of_blocks(tree):
        shape = schedule.virtual, 1, -1
        tree = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), tree)
        return lax.psum(tree, TOKEN_AXES)

    def local(w, data):
        if unrolled:
            grads, stats, results = one_stage.forward_backward(functions, w, data)
        else:
            grads, stats, results = pipeline.forward_backward(functions, w, data, schedule)
        axes = Outer(MESH_AXES, TOKEN_AXES, MESH_AXES)
        outer = Outer(*(lax.psum(g, a) for g, a in zip(grads.outer, axes, strict=True)))
        grads = pipeline.Parameters(outer, of_blocks(grads.blocks))
        evaluated, by_microbatch = pipeline.forward(functions, w, data, schedule)
        results = lax.psum((results, by_microbatch), DATA_AXES)
        return grads, of_blocks(stats), of_blocks(evaluated), results

    stacked = P(None, "pipeline")
    return on_ranks(schedule, local, (WEIGHT_SPECS, stacked, stacked, P()))


def flat(tree):
    """[virtual, pipeline, blocks per chunk, ...] -> [blocks, ...]."""
    return jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[3:]), tree)


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 5e-6 * np.abs(b).max()


@pytest.mark.parametrize("unrolled", [True, False])
def test_gradients_of_bfloat16_weights_accumulate_in_float32(unrolled):
    wide = partial(jax.tree.map, lambda a: a.astype(jnp.float32))
    cast = (lambda w, *rest, f=f: f(wide(w), *rest) for f in FUNCTIONS[:3])
    w, data = inputs_of(schedule := Schedule(1, 1, 3))
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    run = train(schedule, pipeline.Functions(*cast, DECLARED), unrolled)
    assert {g.dtype for g in jax.tree.leaves(jax.eval_shape(run, w, data)[0])} == {
        np.dtype("float32")
    }


# One rank, few and odd microbatches, more and fewer chunks than ranks.
SIZES = [(1, 1, 3), (2, 1, 1), (2, 3, 4), (4, 1, 5), (4, 2, 8)]


@pytest.mark.parametrize(
    ("sizes", "unrolled"), [((1, 1, 3), True), *((sizes, False) for sizes in SIZES)], ids=str
)
def test_training_and_evaluation_match_plain_differentiation(sizes, unrolled):
    schedule, functions = Schedule(*sizes), RECOMPUTED if sizes == (4, 2, 8) else FUNCTIONS
    w, data = inputs_of(schedule)
    grads, stats, evaluated, (results, by_microbatch) = train(schedule, functions, unrolled)(
        w, data
    )
    one = jax.grad(plain_loss, has_aux=True)
    expected, (errors, sums) = jax.jit(jax.vmap(one, in_axes=(None, 0)))(w, data)
    expected = jax.tree.map(lambda g: g.sum(0), expected)
    assert_same(grads._replace(blocks=flat(grads.blocks)), expected)
    for block_stats in (flat(stats), flat(evaluated)):
        assert (block_stats["calls"] == schedule.microbatches * FSDP).all()
        assert_same(block_stats["sum"], sums.sum(0))
    assert_same(results, {"loss": errors.sum(), "first": data.gain.sum()})
    assert_same(by_microbatch, {"loss": errors, "first": data.gain.sum(1)})


def block_products(schedule, text):
    """Return the FLOPs of a program's products of blocks; the unit is one product of a chunk."""
    b, M = B // FSDP, schedule.microbatches
    ends = (
        M * 3 * (D * D + D * V // schedule.pipeline)
    )  # two passes and one gradient; two gradients
    total = hlo.dot_flops(text, pipeline.branch_share(schedule))
    return (total / (2 * b) - ends) / (PER_CHUNK * D * D)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 3, 4), (4, 1, 5), (4, 2, 8)], ids=str)
def test_a_split_backward_pass_gives_the_same_bits_and_no_product_of_matrices_in_the_bubble(sizes):
    schedule, found, flops = Schedule(*sizes), [], []
    for one in (schedule, dataclasses.replace(schedule, split_backward=True)):
        # Without the evaluation, whose products would count.
        def local(w, data, one=one):
            found = pipeline.forward_backward(FUNCTIONS, w, data, one)
            return jax.tree.map(lambda a: vary(a).reshape(1, *a.shape), found)

        lowered = on_ranks(one, local, P(MESH_AXES)).lower(*inputs_of(one))
        compiled = lowered.compile(OPTIMIZED)
        found.append(compiled(*inputs_of(one)))
        flops.append(block_products(one, compiled.as_text()))
    # The compiler of jax 0.12 rounds products of two programs differently, with any options.
    rounding = 1e-6 if jax.__version_info__ >= (0, 12) else 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rounding, atol=rounding), *found)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(found))
    tasks, ticks = schedule.tasks_per_rank, schedule.tasks_per_rank + schedule.pipeline - 1
    assert flops == [pytest.approx(3 * ticks), pytest.approx(2 * ticks + tasks)]


def waiting_of(functions, schedule):
    """Return the shapes of what a block saves for its weight tasks, in each slot."""
    shapes = []

    def local(w, data):
        run = pipeline.Executor(functions, w, data, schedule)
        ring, _ = run.empty_ring(x := run.empty_x())
        shapes.extend(a.shape for a in run.empty_waiting(x, ring)[0])
        return lax.psum(jnp.zeros(()), ())

    jax.eval_shape(on_ranks(schedule, local, P()), *inputs_of(schedule))
    assert all(shape[:2] == (schedule.pipeline, PER_CHUNK) for shape in shapes)
    return [shape[2:] for shape in shapes]


def test_only_gradients_of_products_wait_for_the_gradients_of_matrices():
    schedule = Schedule(2, 2, 4, split_backward=True)
    assert waiting_of(FUNCTIONS, schedule) == [(B // FSDP, D)]


def ring_of(functions, schedule):
    """Return the shapes of the residuals of one block, in each slot."""
    shapes = []

    def local(w, data):
        run = pipeline.Executor(functions, w, data, schedule)
        ring, _ = run.empty_ring(run.empty_x())
        shapes.extend(a.shape for a in jax.tree.leaves(ring))
        return lax.psum(jnp.zeros(()), ())

    jax.eval_shape(on_ranks(schedule, local, P()), *inputs_of(schedule))
    assert all(shape[:2] == (schedule.ring_slots, PER_CHUNK) for shape in shapes)
    return [shape[2:] for shape in shapes]


def test_the_ring_holds_residuals_but_no_weights_and_no_data():
    kept, b = ring_of(FUNCTIONS, Schedule(2, 2, 4)), B // FSDP
    assert (b, D) in kept
    assert not {(D, D), (D,), (b, V), (b,)} & set(kept)
    assert ring_of(RECOMPUTED, Schedule(2, 2, 4)) == [(b, D)], "only the input of a block"


def test_the_program_grows_with_neither_blocks_nor_microbatches():
    texts = []
    for M, blocks in ((4, 2), (4, 8), (16, 2)):
        schedule = Schedule(2, 2, M)
        text = str(jax.make_jaxpr(train(schedule))(*inputs_of(schedule, blocks)))
        texts.append(re.sub(r"\d+|\s+", "_", text))  # without sizes
    assert len(texts[0]) > 10_000 and texts[0] == texts[1] == texts[2]
