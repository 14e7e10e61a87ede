"""Run the stages of a model over pipeline ranks, forward and backward, in a scan for each phase.

    python pipeline.py --pipeline 4 --virtual 2 --microbatches 8     prints schedule.py's tasks

The executor runs three functions, whatever they compute:

    first(outer, data)         -> x                 before the first stage (embedding)
    block(w, data, number, x)  -> (x, loss), stats  one block of a stage; `number` is its index in
                                                    the model
    last(outer, data, x)       -> loss, stats       after the last stage (cross-entropy)

`data` is one microbatch, `outer` the weights outside the stages. A stage is a scan over its blocks.
schedule.py defines ticks and tasks. All ranks run the same operations in every tick, and mask the
results outside their tasks, so no collective is in divergent control flow. Warmup ticks run a
forward, steady ticks a forward and a backward, cooldown ticks a backward. A step takes M(F + B) +
(pipeline - 1)(F + B)/virtual. Without pipelining only the steady scan remains: gradient
accumulation.

With `split_backward` gradients of matrices are tasks of their own, which every rank has in the same
ticks, and a step takes M(F + B + W) + (pipeline - 1)(F + B)/virtual. `Executor.split` multiplies
these gradients by 1, in which they are linear: `jax.linearize` computes all else, and returns a
function that computes them later. A second ring holds what it needs besides the first.

The backward pass of a block needs its weights and data, which are indexed again, and its residuals,
which wait in a ring of slots, as leaves of the VJP objects that `jax.vjp` returns
(https://docs.jax.dev/en/latest/301/vjp-objects.html). `jax.checkpoint` inside the block decides
what the residuals are. Gradients accumulate in place, in float32.

Letters as in model.py: b sequences and t positions of this rank, D model width, M microbatches.
`rank` is the position on the pipeline axis, a chunk a model chunk (virtual stage) of a rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from runtime import errors
from schedule import PHASES, Schedule
from utils import DATA_AXES, MESH_AXES
from weights import PRODUCT_GRADIENT, Tree, filled, trained, vary


class Parameters(NamedTuple):
    """Weights of the three functions, or their gradients.

    `first` and `last` share `outer`, so that a matrix that both use has one gradient.
    """

    outer: Tree
    blocks: Tree  # [blocks of this rank, ...], chunk by chunk


class Functions(NamedTuple):
    """The functions of the executor; their arguments are in the docstring of this file.

    Arrays vary along all mesh axes, except the results of `last`, which vary along the batch axes.
    """

    first: Callable[[Tree, Tree], jax.Array]
    block: Callable[[Tree, Tree, jax.Array, jax.Array], tuple[tuple[jax.Array, jax.Array], Tree]]
    last: Callable[[Tree, Tree, jax.Array], tuple[jax.Array, Tree]]
    declared: Parameters  # the weights.Weight of each array; those not trained have no gradient
    # Of jax.checkpoint: what a split backward pass saves for the gradients of matrices.
    saved: Callable[..., bool] = jax.checkpoint_policies.save_only_these_names(PRODUCT_GRADIENT)


class Carry(NamedTuple):
    """The state between ticks. An evaluation has neither ring nor gradients."""

    x: jax.Array  # [b, t, D] from the previous rank
    d_x: jax.Array | None  # [b, t, D] from the next rank
    ring: Callable | None  # VJP object of block_vjp, with leaves [slots, blocks per chunk, ...]
    grads: Parameters | None
    block_stats: Tree  # [blocks of this rank, ...]
    last_stats: Tree  # of an evaluation [M, ...]
    waiting: list[jax.Array] | None = None  # [slots, blocks per chunk, ...], for weight tasks


class WeightGradients(NamedTuple):
    """The function of a block's gradients of matrices, without its arrays."""

    structure: Any  # of the function, whose leaves are the arrays
    # Of each leaf: its number among the leaves of (inputs of the block, residuals). None: it waits.
    known: tuple[int | None, ...]

    def __call__(self, known: list[jax.Array], waiting: list[jax.Array]) -> Tree:
        """Return the gradients, with None for what is no matrix."""
        new = iter(waiting)
        leaves = [next(new) if i is None else known[i] for i in self.known]
        return self.structure.unflatten(leaves)(vary(jnp.ones(())))


def index(tree: Tree, *position: jax.Array | int) -> Tree:
    """Return leaf[position] of every leaf."""

    def one(a: jax.Array) -> jax.Array:
        start = (*position, *[0] * (a.ndim - len(position)))
        sizes = (1,) * len(position) + a.shape[len(position) :]
        return lax.dynamic_slice(a, start, sizes).reshape(a.shape[len(position) :])

    return jax.tree.map(one, tree)


def store(tree: Tree, values: Tree, *position: jax.Array | int) -> Tree:
    """Return the tree with leaf[position] = value for every leaf."""

    def one(a: jax.Array, value: jax.Array) -> jax.Array:
        start = (*position, *[0] * (a.ndim - len(position)))
        return lax.dynamic_update_slice(a, value.reshape((1,) * len(position) + value.shape), start)

    return jax.tree.map(one, tree, values)


def add_where(valid: jax.Array, tree: Tree, values: Tree, *position: jax.Array | int) -> Tree:
    """Return the tree with leaf[position] += value if `valid`, in the dtype of `tree`.

    Masked rather than multiplied by 0, because values outside a task may be infinite or nan.
    """
    old = index(tree, *position)
    new = jax.tree.map(lambda a, v: a + jnp.where(valid, v, 0).astype(a.dtype), old, values)
    return store(tree, new, *position)


def zeros(shapes: Tree, *sizes: int, axes: tuple[str, ...] = MESH_AXES) -> Tree:
    """Return zeros [*sizes, ...] for every leaf, varying along `axes`."""
    return vary(jax.tree.map(lambda a: jnp.zeros((*sizes, *a.shape), a.dtype), shapes), axes)


@dataclass(frozen=True)
class Executor:
    """The tasks of one rank, on the weights and data ([M, ...] leaves) of a step."""

    functions: Functions
    w: Parameters
    data: Tree
    schedule: Schedule

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index("pipeline")

    @property
    def blocks_per_chunk(self) -> int:
        return jax.tree.leaves(self.w.blocks)[0].shape[0] // self.schedule.virtual

    def is_last_rank(self) -> jax.Array:
        return self.rank == self.schedule.pipeline - 1

    def microbatch(self, m: jax.Array) -> Tree:
        return index(self.data, m)

    def empty_x(self) -> jax.Array:
        first = partial(self.functions.first, self.w.outer)
        return zeros(jax.eval_shape(lambda: first(self.microbatch(0))))

    def empty_last_stats(self, x: jax.Array, *sizes: int) -> Tree:
        """Return zeros [*sizes, ...] like the statistics of `last`."""
        last = partial(self.functions.last, self.w.outer)
        shapes = jax.eval_shape(lambda x: last(self.microbatch(0), lax.psum(x, "pipeline"))[1], x)
        return zeros(shapes, *sizes, axes=DATA_AXES)

    # --- one block

    def block_inputs(self, chunk: jax.Array, i: jax.Array, m: jax.Array) -> tuple:
        """Return the inputs of block i of a chunk, except x: weights, data, index in the model."""
        number = (chunk * self.schedule.pipeline + self.rank) * self.blocks_per_chunk + i
        w = index(self.w.blocks, chunk * self.blocks_per_chunk + i)
        return w, self.microbatch(m), number

    def block_vjp(self, inputs: tuple, x: jax.Array) -> tuple[jax.Array, Callable, Tree]:
        """Return y, the VJP object without its inputs, and statistics.

        The leaves of the object are the residuals that the ring stores. Before it is called,
        `inputs` become its args_res[0] again. (From jax 0.12 on, saveable_args leaves them out.)
        """
        (y, _), vjp, stats = jax.vjp(
            lambda inputs, x: self.functions.block(*inputs, x), inputs, x, has_aux=True
        )
        vjp.args_res[0] = None
        return y, vjp, stats

    def empty_ring(self, x: jax.Array) -> tuple[Callable, Tree]:
        """Trace one block, and return the ring and the statistics of all blocks, both zeros."""

        def one_block(x: jax.Array) -> tuple[Callable, Tree]:
            return self.block_vjp(self.block_inputs(*jnp.zeros(3, jnp.int32)), x)[1:]

        vjp, stats = jax.eval_shape(one_block, x)
        ring = zeros(vjp, self.schedule.ring_slots, self.blocks_per_chunk)
        return ring, zeros(stats, self.schedule.virtual * self.blocks_per_chunk)

    # --- gradients of matrices by themselves

    def matrices(self, tree: Tree, are: bool) -> Tree:
        """Return a tree like the blocks, with None for all but the matrices, or for them."""
        blocks = self.functions.declared.blocks
        return jax.tree.map(lambda w, a: a if (w.matrix is not None) == are else None, blocks, tree)

    def split(
        self, inputs: tuple, vjp: Callable, gradient: tuple
    ) -> tuple[Tree, jax.Array, list[jax.Array], WeightGradients]:
        """Run a block backward without the gradients of its matrices.

        vjp      from the ring, without its inputs.
        Returns  other gradients, the gradient of x, and what those of the matrices need.
        """
        known = {id(a): i for i, a in enumerate(jax.tree.leaves((inputs, vjp)))}
        vjp.args_res[0] = inputs

        def backward(one: jax.Array) -> tuple[Tree, tuple]:
            (d_w, *_), d_x = vjp(gradient)
            d_w = trained(self.functions.declared.blocks, d_w)
            of_matrices = jax.tree.map(lambda g: g * one.astype(g.dtype), self.matrices(d_w, True))
            return of_matrices, (self.matrices(d_w, False), d_x)

        backward = jax.checkpoint(backward, policy=self.functions.saved, prevent_cse=False)
        _, later, (d_w, d_x) = jax.linearize(backward, vary(jnp.ones(())), has_aux=True)
        leaves, structure = jax.tree.flatten(later)
        places = tuple(known.get(id(a)) for a in leaves)
        waiting = [a for a, place in zip(leaves, places, strict=True) if place is None]
        return d_w, d_x, waiting, WeightGradients(structure, places)

    def empty_waiting(self, x: jax.Array, ring: Callable) -> tuple[list, WeightGradients]:
        """Trace one block's backward pass, and return the ring of what waits, zeros."""
        traced = []

        def one_block(x: jax.Array) -> list[jax.Array]:
            inputs = self.block_inputs(*jnp.zeros(3, jnp.int32))
            *_, waiting, later = self.split(inputs, index(ring, 0, 0), (x, vary(jnp.ones(()))))
            traced.append(later)
            return waiting

        shapes = jax.eval_shape(one_block, x)
        return zeros(shapes, self.schedule.pipeline, self.blocks_per_chunk), traced[0]

    def start(self) -> tuple[Carry, WeightGradients | None]:
        """Return the state before the first tick, zeros, and the function of weight tasks."""
        x = self.empty_x()
        ring, block_stats = self.empty_ring(x)
        with_gradient = trained(self.functions.declared, self.w)
        grads = jax.tree.map(lambda a: vary(jnp.zeros(a.shape, jnp.float32)), with_gradient)
        split = self.schedule.split_backward
        waiting, later = self.empty_waiting(x, ring) if split else (None, None)
        return Carry(x, x, ring, grads, block_stats, self.empty_last_stats(x), waiting), later

    # --- one task

    def first_vjp(self, m: jax.Array) -> tuple[jax.Array, Callable]:
        """Return `first` of a microbatch, and its backward function with respect to `outer`."""
        return jax.vjp(
            lambda outer: vary(self.functions.first(outer, self.microbatch(m))), self.w.outer
        )

    def forward_input(self, tick: jax.Array, chunk: jax.Array, x: jax.Array) -> jax.Array:
        """Return the input of this rank's chunk: a new microbatch for the first chunk of rank 0."""
        # The microbatch of rank 0 on every rank: all ranks take the same branch, with collectives.
        _, m = self.schedule.forward_task(self.schedule.forward_number(tick, 0))
        with jax.named_scope("first"):
            new = lax.cond(
                self.schedule.starts_forward(tick),
                lambda: vary(self.functions.first(self.w.outer, self.microbatch(m))),
                lambda: vary(jnp.zeros_like(x)),
            )
        return jnp.where((self.rank == 0) & (chunk == 0), new, x)

    def forward(self, tick: jax.Array, carry: Carry) -> tuple[Carry, Callable | None]:
        """Run one chunk forward, and store its residuals in the ring, if there is one.

        In training a single stage also returns the backward function of `first`, which then runs
        once.
        """
        number = self.schedule.forward_number(tick, self.rank)
        chunk, m = self.schedule.forward_task(number)
        valid, slot = self.schedule.is_task(number), number % self.schedule.ring_slots

        def body(state: tuple, i: jax.Array) -> tuple[tuple, None]:
            x, ring, stats = state
            inputs = self.block_inputs(chunk, i, m)
            if ring is None:
                (x, _), new = self.functions.block(*inputs, x)
            else:
                x, vjp, new = self.block_vjp(inputs, x)
                # As leaves, because the VJP objects of two traces are trees of two structures.
                slots = store(jax.tree.leaves(ring), vary(jax.tree.leaves(vjp)), slot, i)
                ring = jax.tree.structure(ring).unflatten(slots)
            return (x, ring, add_where(valid, stats, new, chunk * self.blocks_per_chunk + i)), None

        if self.schedule.single_stage and carry.ring is not None:
            with jax.named_scope("first"):
                x, first_vjp = self.first_vjp(m)
        else:
            x, first_vjp = self.forward_input(tick, chunk, carry.x), None
        numbers = jnp.arange(self.blocks_per_chunk, dtype=jnp.int32)
        (x, ring, stats), _ = lax.scan(body, (x, carry.ring, carry.block_stats), numbers)
        return carry._replace(x=x, ring=ring, block_stats=stats), first_vjp

    def loss(self, tick: jax.Array, carry: Carry) -> Carry:
        """Compute loss and gradient of the last stage's output, if this tick has one."""
        last = self.schedule.pipeline - 1
        _, m = self.schedule.forward_task(self.schedule.forward_number(tick, last))

        def with_loss(grads: Tree, stats: Tree) -> tuple[jax.Array, Tree, Tree]:
            y = lax.psum(jnp.where(self.is_last_rank(), carry.x, 0), "pipeline")
            data = self.microbatch(m)
            last = self.functions.last
            value_and_grad = jax.value_and_grad(last, (0, 2), has_aux=True, allow_int=True)
            (_, new), (d_outer, d_y) = value_and_grad(self.w.outer, data, y)
            d_outer = trained(self.functions.declared.outer, d_outer)
            grads = jax.tree.map(lambda g, d: g + d.astype(g.dtype), grads, d_outer)
            return vary(d_y), grads, jax.tree.map(jnp.add, stats, new)

        with jax.named_scope("last"):
            d_y, grads, stats = lax.cond(
                self.schedule.ends_forward(tick),
                with_loss,
                lambda grads, stats: (vary(jnp.zeros_like(carry.x)), grads, stats),
                carry.grads.outer,
                carry.last_stats,
            )
        chunk, _ = self.schedule.backward_task(self.schedule.backward_number(tick, self.rank))
        ends_here = self.is_last_rank() & (chunk == self.schedule.virtual - 1)
        return carry._replace(
            d_x=jnp.where(ends_here, d_y, carry.d_x),
            grads=carry.grads._replace(outer=grads),
            last_stats=stats,
        )

    def backward(self, tick: jax.Array, carry: Carry, first_vjp: Callable | None) -> Carry:
        """Run one chunk backward, its blocks in reverse, and then `first` if it is due."""
        number = self.schedule.backward_number(tick, self.rank)
        chunk, m = self.schedule.backward_task(number)
        valid = self.schedule.is_task(number)
        slot = self.schedule.task_number(chunk, m) % self.schedule.ring_slots

        def body(state: tuple, i: jax.Array) -> tuple[tuple, None]:
            d_x, grads, rings = state
            inputs = self.block_inputs(chunk, i, m)
            vjp = index(carry.ring, slot, i)
            # The gradient with respect to a block's own loss is 1.
            gradient = d_x, vary(jnp.where(valid, 1.0, 0.0))
            if self.schedule.split_backward:
                d_w, d_x, waiting, _ = self.split(inputs, vjp, gradient)
                rings = store(rings, vary(waiting), number % self.schedule.pipeline, i)
            else:
                vjp.args_res[0] = inputs
                (d_w, *_), d_x = vjp(gradient)
                d_w = trained(self.functions.declared.blocks, d_w)
            return (d_x, self.add_blocks(valid, grads, d_w, chunk, i), rings), None

        state = jnp.where(valid, carry.d_x, 0), carry.grads.blocks, carry.waiting
        numbers = jnp.arange(self.blocks_per_chunk, dtype=jnp.int32)
        (d_x, blocks, waiting), _ = lax.scan(body, state, numbers, reverse=True)
        outer = self.first_grads(tick, d_x, carry.grads.outer, first_vjp)
        grads = carry.grads._replace(blocks=blocks, outer=outer)
        return carry._replace(d_x=d_x, grads=grads, waiting=waiting)

    def add_blocks(
        self, valid: jax.Array | bool, grads: Tree, d_w: Tree, chunk: jax.Array, i: jax.Array
    ) -> Tree:
        """Add gradients of block i of a chunk. None in d_w adds nothing."""
        none = partial(jax.tree.map, is_leaf=lambda d: d is None)
        own = none(lambda d, g: d if d is None else g, d_w, grads)
        return filled(add_where(valid, own, d_w, chunk * self.blocks_per_chunk + i), grads)

    def weight_gradients(self, tick: jax.Array, carry: Carry, later: WeightGradients) -> Carry:
        """Compute the gradients of a chunk's matrices. Every rank has one."""
        number = self.schedule.weight_number(tick)
        chunk, m = self.schedule.backward_task(number)
        place = self.schedule.task_number(chunk, m) % self.schedule.ring_slots

        def body(grads: Tree, i: jax.Array) -> tuple[Tree, None]:
            known = jax.tree.leaves((self.block_inputs(chunk, i, m), index(carry.ring, place, i)))
            d_w = later(known, index(carry.waiting, number % self.schedule.pipeline, i))
            return self.add_blocks(True, grads, d_w, chunk, i), None

        numbers = jnp.arange(self.blocks_per_chunk, dtype=jnp.int32)
        with jax.named_scope("weight_gradients"):
            blocks, _ = lax.scan(body, carry.grads.blocks, numbers, reverse=True)
        return carry._replace(grads=carry.grads._replace(blocks=blocks))

    def first_grads(
        self, tick: jax.Array, d_x: jax.Array, grads: Tree, first_vjp: Callable | None
    ) -> Tree:
        """Add the gradients of `first`, if rank 0 has just run its first chunk backward."""
        _, m = self.schedule.backward_task(self.schedule.backward_number(tick, 0))

        def backward(grads: Tree) -> Tree:
            vjp = self.first_vjp(m)[1] if first_vjp is None else first_vjp
            (new,) = vjp(jnp.where(self.rank == 0, d_x, 0))
            new = trained(self.functions.declared.outer, new)
            return jax.tree.map(lambda g, d: g + d.astype(g.dtype), grads, new)

        with jax.named_scope("first_backward"):
            return lax.cond(self.schedule.ends_backward(tick), backward, lambda grads: grads, grads)


def send(x: jax.Array, ranks: int, step: int) -> jax.Array:
    """Return x of rank - step.  Collectives: ppermute(pipeline) of x, if there are other ranks."""
    if ranks == 1:
        return x
    return lax.ppermute(x, "pipeline", [(rank, (rank + step) % ranks) for rank in range(ranks)])


def branch_share(schedule: Schedule) -> Callable[[str], list[float] | None]:
    """Return a function: name of a conditional in the compiled program -> shares of its branches.

    The shares are of [false, true]; None for a name that is not a conditional of this file.
    """
    when = {
        "first": schedule.starts_forward,
        "last": schedule.ends_forward,
        "first_backward": schedule.ends_backward,
    }
    ticks = {PHASES[tuple(kinds)]: range(start, stop) for start, stop, *kinds in schedule.phases}

    def share(name: str) -> list[float] | None:
        parts = name.split("/")
        named = [(phase, role) for phase in ticks for role in when if {phase, role} <= set(parts)]
        if len(named) != 1:
            return None
        [(phase, role)] = named
        runs = sum(bool(when[role](t)) for t in ticks[phase]) / len(ticks[phase])
        return [1 - runs, runs]

    return share


def forward_backward(
    functions: Functions, w: Parameters, data: Tree, schedule: Schedule
) -> tuple[Parameters, Tree, Tree]:
    """Return partial gradients of the sum of all losses, and statistics summed over microbatches.

    w        weights of this rank, as the functions use them; varying along all mesh axes.
    data     [M, ...] leaves.
    Returns  gradients, float32, to be reduced over ranks; statistics of blocks [blocks of this
             rank, ...]; statistics of `last`.

    Collectives  ppermute(pipeline) of [b, t, D] forward and backward in each tick, psum(pipeline)
                 of it once per microbatch.
    """
    run = Executor(functions, w, data, schedule)
    carry, later = run.start()

    def tick(kinds: tuple[bool, ...], carry: Carry, t: jax.Array) -> tuple[Carry, None]:
        forward, backward, of_weights = kinds
        first_vjp = None
        if forward:
            carry, first_vjp = run.forward(t, carry)
        if forward and backward:
            carry = run.loss(t, carry)
        if backward:
            carry = run.backward(t, carry, first_vjp)
        if of_weights:
            carry = run.weight_gradients(t, carry, later)
        # The neighbour uses these in the next tick.
        if forward:
            carry = carry._replace(x=send(carry.x, schedule.pipeline, 1))
        if backward:
            carry = carry._replace(d_x=send(carry.d_x, schedule.pipeline, -1))
        return carry, None

    for start, stop, *kinds in schedule.phases:
        ticks = jnp.arange(start, stop, dtype=jnp.int32)
        with jax.named_scope(PHASES[tuple(kinds)]):
            carry, _ = lax.scan(partial(tick, tuple(kinds)), carry, ticks)
    return carry.grads, carry.block_stats, carry.last_stats


def forward(
    functions: Functions, w: Parameters, data: Tree, schedule: Schedule
) -> tuple[Tree, Tree]:
    """Run forward only, and return statistics.

    Returns  statistics of blocks [blocks of this rank, ...], summed over microbatches; those of
             `last` for each microbatch [M, ...].

    Collectives  ppermute(pipeline) of [b, t, D] in each tick, psum(pipeline) of it once per
                 microbatch.
    """
    run = Executor(functions, w, data, schedule)
    x = run.empty_x()
    block = lambda x: functions.block(*run.block_inputs(*jnp.zeros(3, jnp.int32)), x)[1]  # noqa: E731
    stats = zeros(jax.eval_shape(block, x), schedule.virtual * run.blocks_per_chunk)
    last_stats = run.empty_last_stats(x, schedule.microbatches)

    def tick(carry: Carry, t: jax.Array) -> tuple[Carry, None]:
        carry, _ = run.forward(t, carry)
        _, done = schedule.forward_task(schedule.forward_number(t, schedule.pipeline - 1))

        def with_last(stats: Tree) -> Tree:
            y = lax.psum(jnp.where(run.is_last_rank(), carry.x, 0), "pipeline")
            return store(stats, functions.last(w.outer, run.microbatch(done), y)[1], done)

        ends = schedule.ends_forward(t)
        last_stats = lax.cond(ends, with_last, lambda stats: stats, carry.last_stats)
        return carry._replace(x=send(carry.x, schedule.pipeline, 1), last_stats=last_stats), None

    ticks = jnp.arange(schedule.tasks_per_rank + schedule.pipeline - 1, dtype=jnp.int32)
    carry, _ = lax.scan(tick, Carry(x, None, None, None, stats, last_stats), ticks)
    return carry.block_stats, carry.last_stats


if __name__ == "__main__":
    from planning import schedule_report

    errors.run_command(schedule_report.main)
