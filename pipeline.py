"""Run the stages of a model over pipeline ranks: forward and backward of every microbatch, in three
scans.

    python pipeline.py --pipeline 4 --virtual 2 --microbatches 8     print the schedule, whose
    arithmetic is schedule.py's

The executor is given three functions and does not know what they compute:

    first(ends, data)          -> x                 before the first stage (embedding)
    block(w, data, number, x)  -> (x, loss), stats  one block of a stage; `number` counts blocks
                                                    through the whole model
    last(ends, data, x)        -> loss, stats       after the last stage (cross-entropy)

`data` is one microbatch. A stage is a scan over its blocks. All ranks run the same operations in
every tick, and what falls outside their tasks is masked, so no collective stands in divergent
control flow: the ticks of warmup are forward only, those of the steady phase one forward and one
backward, those of cooldown backward only, and the time is M(F + B) + (pipeline - 1)(F + B)/virtual.
Without pipelining only the steady scan is left, which is gradient accumulation.

What the backward of a block needs is split in two. Weights and data are put back by index; the
rest, the residuals that `jax.checkpoint` inside the block decides on, waits in a ring of slots.
Gradients are added up in float32, in place.

Letters: b sequences, t positions of this rank, D width. `rank` is the position on the pipeline
axis.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import faults
from schedule import Schedule
from utils import BATCH_AXES
from weights import vary

Tree = Any


# (any forward, any backward) in a phase's ticks -> its name in profiles.
PHASES = {(True, False): "warmup", (True, True): "steady", (False, True): "cooldown"}


class Functions(NamedTuple):
    """What the executor runs; see the head of this file for the types.

    Arrays are typed as differing along all mesh axes, but for what `last` returns, which differs
    along the batch axes alone.
    """

    first: Callable[[Tree, Tree], jax.Array]
    block: Callable[[Tree, Tree, jax.Array, jax.Array], tuple[tuple[jax.Array, jax.Array], Tree]]
    last: Callable[[Tree, Tree, jax.Array], tuple[jax.Array, Tree]]


class Parameters(NamedTuple):
    """Weights, or gradients of weights, of the three functions; those of blocks are [blocks of this
    rank, ...], chunk by chunk.

    `first` and `last` are given the same `ends`, so that a matrix that both use has one gradient.
    """

    ends: Tree
    blocks: Tree


class Carry(NamedTuple):
    """What goes from tick to tick."""

    x: jax.Array  # [b, t, D] from the rank before
    d_x: jax.Array  # [b, t, D] from the rank after
    ring: Tree  # [slots, blocks per chunk, ...] residuals
    grads: Parameters
    block_stats: Tree  # [blocks of this rank, ...]
    last_stats: Tree


def index(tree: Tree, *position: jax.Array | int) -> Tree:
    """tree[position] of every leaf."""

    def one(a: jax.Array) -> jax.Array:
        start = (*position, *[0] * (a.ndim - len(position)))
        sizes = (1,) * len(position) + a.shape[len(position) :]
        return lax.dynamic_slice(a, start, sizes).reshape(a.shape[len(position) :])

    return jax.tree.map(one, tree)


def store(tree: Tree, values: Tree, *position: jax.Array | int) -> Tree:
    """tree[position] = values, for every leaf."""

    def one(a: jax.Array, value: jax.Array) -> jax.Array:
        start = (*position, *[0] * (a.ndim - len(position)))
        return lax.dynamic_update_slice(a, value.reshape((1,) * len(position) + value.shape), start)

    return jax.tree.map(one, tree, values)


def add_where(valid: jax.Array, tree: Tree, values: Tree, *position: jax.Array | int) -> Tree:
    """tree[position] += values where `valid`, in the dtype of `tree`.

    A mask and not a product: in an idle slot the values may be anything.
    """
    old = index(tree, *position)
    new = jax.tree.map(lambda a, v: a + jnp.where(valid, v, 0).astype(a.dtype), old, values)
    return store(tree, new, *position)


def zeros_like_results(
    function: Callable, *args: Tree, axes: tuple[str, ...] | None = None
) -> Tree:
    """Zeros of the shapes that function(*args) returns, typed as differing along all axes, or along
    `axes`.
    """
    shapes = jax.eval_shape(function, *args)
    make = vary if axes is None else partial(vary, axes=axes)
    return make(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))


@dataclass(frozen=True)
class Executor:
    """The tasks of one rank, for one step's weights and data ([M, ...] leaves)."""

    functions: Functions
    w: Parameters
    data: Tree
    schedule: Schedule

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index("pipeline")

    @property
    def per_chunk(self) -> int:
        return jax.tree.leaves(self.w.blocks)[0].shape[0] // self.schedule.virtual

    def is_last_rank(self) -> jax.Array:
        return self.rank == self.schedule.pipeline - 1

    def microbatch(self, m: jax.Array) -> Tree:
        return index(self.data, m)

    def empty_x(self) -> jax.Array:
        return zeros_like_results(lambda: self.functions.first(self.w.ends, self.microbatch(0)))

    # --- one block

    def known(self, chunk: jax.Array, i: jax.Array, m: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        """What block i of a chunk needs but its input: weights, data, its number in the model."""
        number = (chunk * self.schedule.pipeline + self.rank) * self.per_chunk + i
        return index(self.w.blocks, chunk * self.per_chunk + i), self.microbatch(m), number

    def block_vjp(self, known: Tree, x: jax.Array) -> tuple[jax.Array, Callable, Tree]:
        (y, _), vjp, stats = jax.vjp(
            lambda known, x: self.functions.block(*known, x), known, x, has_aux=True
        )
        return y, vjp, stats

    def kept(self, vjp: Callable, known: Tree) -> list[jax.Array]:
        """The residuals that are not in `known`; a backward function is a pytree of them."""
        held = {id(a) for a in jax.tree.leaves(known)}
        # A leaf that is no array stands for an argument that the backward pass does not need.
        return [a for a in jax.tree.leaves(vjp) if isinstance(a, jax.Array) and id(a) not in held]

    def restored(self, template: tuple, known: Tree, kept: list[jax.Array]) -> Callable:
        """The backward function of a block, out of what `known` and `kept` hold."""
        vjp, old = template
        old, new = [*jax.tree.leaves(old), *self.kept(vjp, old)], [*jax.tree.leaves(known), *kept]
        value = {id(a): b for a, b in zip(old, new, strict=True)}
        return jax.tree.map(lambda a: value.get(id(a), a), vjp)

    def probe(self, x: jax.Array) -> tuple[Tree, Tree, tuple]:
        """(an empty ring, empty statistics, the backward function of a block and its `known`, to be
        restored with other values).
        """
        found = {}

        def one_block(x: jax.Array) -> tuple[list[jax.Array], Tree]:
            known = self.known(jnp.int32(0), jnp.int32(0), jnp.int32(0))
            _, vjp, stats = self.block_vjp(known, x)
            found["template"] = vjp, known
            return self.kept(vjp, known), stats

        kept, stats = jax.eval_shape(one_block, x)
        blocks = self.schedule.virtual * self.per_chunk
        ring = stack_of_zeros(kept, self.schedule.slots, self.per_chunk)
        return ring, stack_of_zeros(stats, blocks), found["template"]

    # --- one task

    def first_vjp(self, m: jax.Array) -> tuple[jax.Array, Callable]:
        """`first` of a microbatch, and its backward function, of `ends` alone."""
        return jax.vjp(
            lambda ends: vary(self.functions.first(ends, self.microbatch(m))), self.w.ends
        )

    def forward_input(self, tick: jax.Array, chunk: jax.Array, x: jax.Array) -> jax.Array:
        """What enters this rank's chunk: on rank 0, in the first chunk, a new microbatch."""
        # Rank 0's microbatch on every rank: all take the same branch and meet in its collectives.
        _, m = self.schedule.forward_task(self.schedule.forward_number(tick, 0))
        with jax.named_scope("first"):
            new = lax.cond(
                self.schedule.enters(tick),
                lambda: vary(self.functions.first(self.w.ends, self.microbatch(m))),
                lambda: vary(jnp.zeros_like(x)),
            )
        return jnp.where((self.rank == 0) & (chunk == 0), new, x)

    def forward(self, tick: jax.Array, carry: Carry) -> tuple[Carry, Callable | None]:
        """One chunk forward, its residuals into the ring; where the same tick goes back through it,
        also the backward function of `first`, which then runs once for both.
        """
        number = self.schedule.forward_number(tick, self.rank)
        chunk, m = self.schedule.forward_task(number)
        valid, slot = self.schedule.is_task(number), number % self.schedule.slots

        def body(state: tuple, i: jax.Array) -> tuple[tuple, None]:
            x, ring, stats = state
            known = self.known(chunk, i, m)
            x, vjp, new = self.block_vjp(known, x)
            ring = store(ring, vary(self.kept(vjp, known)), slot, i)
            return (x, ring, add_where(valid, stats, new, chunk * self.per_chunk + i)), None

        if self.schedule.at_once:
            with jax.named_scope("first"):
                x, first_vjp = self.first_vjp(m)
        else:
            x, first_vjp = self.forward_input(tick, chunk, carry.x), None
        numbers = jnp.arange(self.per_chunk, dtype=jnp.int32)
        (x, ring, stats), _ = lax.scan(body, (x, carry.ring, carry.block_stats), numbers)
        return carry._replace(x=x, ring=ring, block_stats=stats), first_vjp

    def loss(self, tick: jax.Array, carry: Carry) -> Carry:
        """Loss and its gradient of what the last stage made in this tick, if it made anything."""
        last = self.schedule.pipeline - 1
        _, m = self.schedule.forward_task(self.schedule.forward_number(tick, last))

        def with_loss(grads: Tree, stats: Tree) -> tuple[jax.Array, Tree, Tree]:
            y = lax.psum(jnp.where(self.is_last_rank(), carry.x, 0), "pipeline")
            data = self.microbatch(m)
            value_and_grad = jax.value_and_grad(self.functions.last, argnums=(0, 2), has_aux=True)
            (_, new), (d_ends, d_y) = value_and_grad(self.w.ends, data, y)
            grads = jax.tree.map(lambda g, d: g + d.astype(g.dtype), grads, d_ends)
            return vary(d_y), grads, jax.tree.map(jnp.add, stats, new)

        with jax.named_scope("last"):
            d_y, grads, stats = lax.cond(
                self.schedule.ends(tick),
                with_loss,
                lambda grads, stats: (vary(jnp.zeros_like(carry.x)), grads, stats),
                carry.grads.ends,
                carry.last_stats,
            )
        chunk, _ = self.schedule.backward_task(self.schedule.backward_number(tick, self.rank))
        ends_here = self.is_last_rank() & (chunk == self.schedule.virtual - 1)
        return carry._replace(
            d_x=jnp.where(ends_here, d_y, carry.d_x),
            grads=carry.grads._replace(ends=grads),
            last_stats=stats,
        )

    def backward(
        self, tick: jax.Array, carry: Carry, template: tuple, first_vjp: Callable | None
    ) -> Carry:
        """One chunk backward, its blocks in reverse; then `first`, where it is time for that."""
        number = self.schedule.backward_number(tick, self.rank)
        chunk, m = self.schedule.backward_task(number)
        valid = self.schedule.is_task(number)
        slot = self.schedule.task_number(chunk, m) % self.schedule.slots

        def body(state: tuple, i: jax.Array) -> tuple[tuple, None]:
            d_x, grads = state
            known = self.known(chunk, i, m)
            vjp = self.restored(template, known, index(carry.ring, slot, i))
            # A block's own loss enters as the constant 1.
            (d_w, *_), d_x = vjp((d_x, vary(jnp.where(valid, 1.0, 0.0))))
            return (d_x, add_where(valid, grads, d_w, chunk * self.per_chunk + i)), None

        d_x = jnp.where(valid, carry.d_x, 0)
        numbers = jnp.arange(self.per_chunk, dtype=jnp.int32)
        (d_x, blocks), _ = lax.scan(body, (d_x, carry.grads.blocks), numbers, reverse=True)
        ends = self.first_grads(tick, d_x, carry.grads.ends, first_vjp)
        return carry._replace(d_x=d_x, grads=carry.grads._replace(blocks=blocks, ends=ends))

    def first_grads(
        self, tick: jax.Array, d_x: jax.Array, grads: Tree, first_vjp: Callable | None
    ) -> Tree:
        """Gradients of `first` added, when rank 0 has just gone back through the first chunk."""
        _, m = self.schedule.backward_task(self.schedule.backward_number(tick, 0))

        def backward(grads: Tree) -> Tree:
            vjp = self.first_vjp(m)[1] if first_vjp is None else first_vjp
            (new,) = vjp(jnp.where(self.rank == 0, d_x, 0))
            return jax.tree.map(lambda g, d: g + d.astype(g.dtype), grads, new)

        with jax.named_scope("first_backward"):
            return lax.cond(self.schedule.leaves(tick), backward, lambda grads: grads, grads)


def stack_of_zeros(tree: Tree, *sizes: int) -> Tree:
    """Zeros [*sizes, ...] for every leaf, typed as differing along all axes."""
    return vary(jax.tree.map(lambda a: jnp.zeros((*sizes, *a.shape), a.dtype), tree))


def send(x: jax.Array, ranks: int, step: int) -> jax.Array:
    """x from the rank `step` places back.  Sends ppermute(pipeline) of x, where there is another
    rank.
    """
    if ranks == 1:
        return x
    return lax.ppermute(x, "pipeline", [(rank, (rank + step) % ranks) for rank in range(ranks)])


def branch_share(schedule: Schedule) -> Callable[[str], list[float] | None]:
    """Name of a conditional in the compiled program -> how often each of its branches runs (the
    false one first).
    """
    when = {"first": schedule.enters, "last": schedule.ends, "first_backward": schedule.leaves}
    ticks = {PHASES[phase[2:]]: range(*phase[:2]) for phase in schedule.phases}

    def share(name: str) -> list[float] | None:
        parts = name.split("/")
        found = [(phase, role) for phase in ticks for role in when if {phase, role} <= set(parts)]
        if len(found) != 1:
            return None
        phase, role = found[0]
        runs = sum(bool(when[role](t)) for t in ticks[phase]) / len(ticks[phase])
        return [1 - runs, runs]

    return share


def forward_backward(
    functions: Functions, w: Parameters, data: Tree, schedule: Schedule
) -> tuple[Parameters, Tree, Tree]:
    """Gradients of the sum of all losses over all microbatches, and statistics summed over them.

    w     of this rank, whole along fsdp or not, as the functions want them; typed as differing
          along all mesh axes.
    data  [M, ...] leaves.
    -> this rank's part of the gradients, float32; [blocks of this rank, ...] statistics of blocks;
    those of `last`.
    Sends  ppermute(pipeline) of [b, t, D] forward and backward in each tick, psum(pipeline) of it
           once per microbatch.
    """
    run = Executor(functions, w, data, schedule)
    x = run.empty_x()
    ring, block_stats, template = run.probe(x)
    zero = jax.tree.map(lambda a: vary(jnp.zeros(a.shape, jnp.float32)), w)
    last = lambda x: functions.last(w.ends, run.microbatch(0), x)[1]  # noqa: E731
    last_stats = zeros_like_results(last, x, axes=BATCH_AXES)
    carry = Carry(x, x, ring, zero, block_stats, last_stats)

    def tick(forward: bool, backward: bool, carry: Carry, t: jax.Array) -> tuple[Carry, None]:
        first_vjp = None
        if forward:
            carry, first_vjp = run.forward(t, carry)
        if forward and backward:
            carry = run.loss(t, carry)
        if backward:
            carry = run.backward(t, carry, template, first_vjp)
        # What a rank sends in a tick, its neighbour needs in the next.
        if forward:
            carry = carry._replace(x=send(carry.x, schedule.pipeline, 1))
        if backward:
            carry = carry._replace(d_x=send(carry.d_x, schedule.pipeline, -1))
        return carry, None

    for start, stop, forward, backward in schedule.phases:
        ticks = jnp.arange(start, stop, dtype=jnp.int32)
        with jax.named_scope(PHASES[forward, backward]):
            carry, _ = lax.scan(partial(tick, forward, backward), carry, ticks)
    return carry.grads, carry.block_stats, carry.last_stats


def forward(
    functions: Functions, w: Parameters, data: Tree, schedule: Schedule, axes: tuple[str, ...]
) -> tuple[Tree, Tree]:
    """Forward only: [blocks of this rank, ...] statistics of blocks, summed, and [M, ...] those of
    `last` for each microbatch.

    axes   the mesh axes along which what `last` returns differs.

    Sends  ppermute(pipeline) of [b, t, D] in each tick, psum(pipeline) of it once per microbatch.
    """
    run = Executor(functions, w, data, schedule)
    x = run.empty_x()
    block = lambda x: functions.block(*run.known(*jnp.zeros(3, jnp.int32)), x)[1]  # noqa: E731
    stats = stack_of_zeros(jax.eval_shape(block, x), schedule.virtual * run.per_chunk)
    last = lambda x: functions.last(w.ends, run.microbatch(0), x)[1]  # noqa: E731
    one = jax.eval_shape(last, x)
    out = jax.tree.map(lambda a: jnp.zeros((schedule.microbatches, *a.shape), a.dtype), one)

    def chunk_forward(x: jax.Array, stats: Tree, t: jax.Array) -> tuple[jax.Array, Tree]:
        number = schedule.forward_number(t, run.rank)
        chunk, m = schedule.forward_task(number)

        def body(state: tuple, i: jax.Array) -> tuple[tuple, None]:
            x, stats = state
            (x, _), new = functions.block(*run.known(chunk, i, m), x)
            valid = schedule.is_task(number)
            return (x, add_where(valid, stats, new, chunk * run.per_chunk + i)), None

        numbers = jnp.arange(run.per_chunk, dtype=jnp.int32)
        return lax.scan(body, (run.forward_input(t, chunk, x), stats), numbers)[0]

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
        x, stats, out = carry
        x, stats = chunk_forward(x, stats, t)
        _, m = schedule.forward_task(schedule.forward_number(t, schedule.pipeline - 1))

        def with_last(out: Tree) -> Tree:
            y = lax.psum(jnp.where(run.is_last_rank(), x, 0), "pipeline")
            return store(out, functions.last(w.ends, run.microbatch(m), y)[1], m)

        out = lax.cond(schedule.ends(t), with_last, lambda out: out, out)
        return (send(x, schedule.pipeline, 1), stats, out), None

    carry = (x, stats, vary(out, axes))
    ticks = jnp.arange(schedule.work + schedule.pipeline - 1, dtype=jnp.int32)
    (_, stats, out), _ = lax.scan(tick, carry, ticks)
    return stats, out


# --- the schedule, printed ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Print which rank runs which stage on which microbatch, tick by tick."""

    pipeline: int = 4  # ranks that share out the layers
    virtual: int = 1  # chunks of layers per rank; above 1 is interleaved 1F1B
    microbatches: int = 8  # parts that a step is cut into
    rank: int | None = None  # only this rank
    json: bool = False  # tasks, ticks and bubble as JSON
    png: Path | None = None  # also draw a timeline into this file


def chosen_ranks(flags: Flags) -> list[int]:
    """The ranks that were asked for.

    Raises  ValueError for a rank that is not there.
    """
    if flags.rank is None:
        return list(range(flags.pipeline))
    if not 0 <= flags.rank < flags.pipeline:
        raise ValueError(
            f"--rank {flags.rank} is not there: --pipeline {flags.pipeline} has the ranks 0 to "
            f"{flags.pipeline - 1}. Use --rank {flags.pipeline - 1}."
        )
    return [flags.rank]


def chunk_name(chunk: int) -> str:
    """a, b, ..., z, then c26, c27, ..."""
    return chr(ord("a") + chunk) if chunk < 26 else f"c{chunk}"


def grid(schedule: Schedule, ranks: list[int]) -> list[str]:
    """One line per rank and direction, one column per tick: microbatch and chunk letter."""
    widest = f"{schedule.microbatches}{chunk_name(schedule.virtual - 1)}"
    width = 1 + max(len(widest), len(str(schedule.ticks)))

    def line(name: str, cells: list[str]) -> str:
        return f"{name:12}" + "".join(f"{cell:>{width}}" for cell in cells)

    lines = [line("tick", [str(tick) for tick in range(schedule.ticks)])]
    for rank in ranks:
        ticks = [schedule.tasks_at(tick, rank) for tick in range(schedule.ticks)]
        for way in ("fwd", "bwd"):
            done = [[f"{m}{chunk_name(c)}" for w, c, m in tick if w == way] for tick in ticks]
            lines.append(line(f"rank {rank} {way}", [(names or ["."])[0] for names in done]))
    return lines


def summary(schedule: Schedule) -> list[str]:
    """Ticks, and the bubble as counted beside the formula."""
    ticks = ", ".join(f"{b - a} {PHASES[fwd, bwd]}" for a, b, fwd, bwd in schedule.phases)
    idle = schedule.pipeline - 1
    slots = schedule.work + idle
    return [
        f"ticks    {schedule.ticks}: {ticks}",
        f"bubble   {schedule.bubble} = {float(schedule.bubble):.1%} of the time, counted: a rank "
        f"fills {schedule.work} of {slots} forward slots, and as many of its backward slots",
        "formula  (pipeline - 1) / (microbatches * virtual + pipeline - 1) = "
        f"{Fraction(idle, slots)}",
        "A tick lasts one forward of a chunk in warmup, one backward in cooldown, and both in the "
        "steady phase.",
    ]


def text(schedule: Schedule, ranks: list[int]) -> str:
    """The grid over ticks, the task list of each rank, and the summary."""
    title = (
        f"{schedule.pipeline} ranks of {schedule.virtual} chunks (a, b, ...), "
        f"{schedule.microbatches} microbatches (0, 1, ...)"
    )
    tasks = [f"rank {rank}: {' '.join(schedule.tasks(rank))}" for rank in ranks]
    return "\n".join([title, *grid(schedule, ranks), "", *tasks, "", *summary(schedule)])


def main(arguments: list[str] | None = None) -> None:
    """Print the schedule as text or JSON, and draw it if asked."""
    import tyro  # late: training needs no flags of this file

    flags = tyro.cli(Flags, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    schedule = Schedule(flags.pipeline, flags.virtual, flags.microbatches)
    ranks = chosen_ranks(flags)
    if flags.png:
        import plot  # late, so that printing starts fast

        plot.draw_schedule(schedule, ranks, flags.png)
    if flags.json:
        tasks = [schedule.tasks(rank) for rank in ranks]
        found = {"tasks": tasks, "ticks": schedule.ticks, "bubble": float(schedule.bubble)}
        print(json.dumps(found))
    else:
        print(text(schedule, ranks))


if __name__ == "__main__":
    faults.command_line(main)
