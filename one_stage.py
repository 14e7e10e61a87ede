"""Gradients without a pipeline: a scan over microbatches, in which the layers are unrolled.

It runs the functions that pipeline.py describes. One stage needs no schedule: forward and backward
of a microbatch are one `jax.vjp`, whose residuals are values between the two. Weights and gradients
of each block are arrays of their own. The pipeline's loop over blocks slices weights from stacks,
and stores residuals and gradients into stacks, all through memory: on GPUs that is a tenth to a
seventh of a step (docs/measured.md). In return the program grows with the number of blocks.
"""

from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
from jax import lax

from pipeline import Functions, Parameters, Tree, index, zeros
from utils import DATA_AXES, MESH_AXES
from weights import trained, vary, varying


def forward_backward(
    functions: Functions, w: Parameters, data: Tree
) -> tuple[Parameters, Tree, Tree]:
    """Return partial gradients of the sum of all losses, and statistics summed over microbatches.

    Arguments and results are those of pipeline.forward_backward.
    """
    numbers = range(len(jax.tree.leaves(w.blocks)[0]))
    w = w._replace(blocks=[jax.tree.map(itemgetter(i), w.blocks) for i in numbers])
    declared = functions.declared._replace(blocks=[functions.declared.blocks for _ in numbers])

    def gradients(data: Tree) -> tuple[Parameters, tuple]:
        values, vjp, stats = jax.vjp(partial(losses, functions, data), w, w.outer, has_aux=True)
        # Each loss by itself: a sum would make the last one vary along all axes, and its gradient
        # would be summed over them.
        grads, d_outer = vjp(jax.tree.map(lambda a: vary(jnp.ones_like(a), varying(a)), values))
        grads, d_outer = trained(declared, grads), trained(declared.outer, d_outer)
        # In float32, as a matrix of `first` and `last` has two gradients.
        wide = partial(jax.tree.map, lambda a: a.astype(jnp.float32))
        outer = jax.tree.map(jnp.add, wide(grads.outer), wide(d_outer))
        return grads._replace(outer=outer), stats

    def body(sums: tuple, data: Tree) -> tuple[tuple, None]:
        return jax.tree.map(lambda a, new: a + new.astype(a.dtype), sums, gradients(data)), None

    shapes, (block_stats, last_stats) = jax.eval_shape(gradients, index(data, 0))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), shapes)
    start = zeros(shapes), (zeros(block_stats), zeros(last_stats, axes=DATA_AXES))
    with jax.named_scope("steady"):
        (grads, (block_stats, last_stats)), _ = lax.scan(body, start, data)
    return grads._replace(blocks=stacked(grads.blocks)), stacked(block_stats), last_stats


def losses(functions: Functions, data: Tree, w: Parameters, outer: Tree) -> tuple[tuple, tuple]:
    """Return the losses of a microbatch, of each block and of `last`, and their statistics.

    w      has a list of blocks.
    outer  those of w, for `last`.
    """
    block = jax.jit(functions.block)  # is traced once for all blocks of the same structure
    block_losses, block_stats = [], []
    with jax.named_scope("first"):
        x = vary(functions.first(w.outer, data))
    for number, one in enumerate(w.blocks):
        one, x = in_order(one, x) if lax.axis_size(MESH_AXES) > 1 else (one, x)
        (x, loss), stats = block(one, data, jnp.int32(number), x)
        block_losses.append(loss)
        block_stats.append(stats)
    with jax.named_scope("last"):
        last_loss, last_stats = functions.last(outer, data, lax.psum(x, "pipeline"))
    return (block_losses, last_loss), (block_stats, last_stats)


@jax.custom_vjp
def in_order(w: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
    """Return w and x. Backward, both gradients are complete before one of them is used.

    XLA for GPUs otherwise delays the gradients of weights to compute them beside collectives, and
    keeps what they need of all blocks.
    """
    return w, x


in_order.defvjp(lambda w, x: ((w, x), None), lambda _, grads: lax.optimization_barrier(grads))


def stacked(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)
