"""What a training step costs one chip: FLOPs, traffic over the mesh, memory, time.

The model is described once, by the functions that run it: layers, embedding and loss are traced
(trace.py) and read (jaxpr.py); weights tell by their declarations what is gathered and reduced; the
optimizer is asked for its state. How often each runs is the schedule's arithmetic. A new layer of
einsums, scans and collectives is planned without another line.

What no trace can tell is a rule, each in one place: what libtpu makes of a sum over a whole slice
(`sums_everywhere`), what the pipeline's executor sends, holds and moves (`_executor_sends`,
`memory`, `memory_traffic`), what compilers fuse (fusion.py), how fast links are (`link_seconds`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding

import attention
import flops
import model
import passes
import train
import weights
from chips import Chip, platform_of
from planning import jaxpr, trace
from planning.fusion import Fused
from planning.trace import Piece
from utils import GIB, MESH_AXES, Config
from weights import Weight

FLOAT = 4  # bytes of float32: weights at rest, gradients, softmax
GAPS = 0.03  # of what comes and goes in a step: unused between buffers; see tests/compiled.json


# --- over layers and schedule ---------------------------------------------------------------------


@cache
def declared(config: Config) -> model.Transformer:
    """The weights of a config's model and mesh."""
    return model.declare(config)


@cache
def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


@cache
def batch_cuts(sequences: int) -> tuple[tuple[int, int], ...]:
    """(sequences of a microbatch and rank, ranks of fsdp)."""
    return tuple((b, f) for f in divisors(sequences) for b in divisors(sequences // f))


class Step:
    """A config's pieces on one chip, and how often each runs in a step."""

    def __init__(self, config: Config, platform: str, shared: bool = False):
        """shared  traces serve other batch sizes and numbers of stages too, as a search needs."""
        t, mesh = config.train, config.mesh
        self.config, self.declared = config, declared(Config(model=config.model, mesh=mesh))
        self.platform = platform
        self.schedule, self.M = passes.schedule_of(config), t.microbatches
        self.kernel = attention.chosen(config, platform)
        self.share = attention.computed_share(config, platform)
        self.b = t.sequences // (t.microbatches * mesh.batch)
        self.bT, self.bt = self.b * t.sequence_length, self.b * t.sequence_length // mesh.tensor
        self.byte = jnp.dtype(config.model.compute_dtype).itemsize
        self.x_bytes = self.bt * config.model.width * self.byte
        self.v = trace.local_rows(config)
        self.held = held(Config(model=config.model, mesh=mesh))
        whole = dataclasses.replace(mesh, virtual=1)  # no layout of the optimizer depends on it
        alone = Config(model=config.model, mesh=whole, optimizer=config.optimizer)
        self.optimizer_bytes = optimizer_bytes(alone)
        self.matrices = matrices(alone)
        self.per_layer = config.fsdp.gather == "layer"
        self.ranks = dict(zip(MESH_AXES, mesh.shape, strict=True))
        self.alone = frozenset(axis for axis, ranks in self.ranks.items() if ranks == 1)
        self.chips = math.prod(mesh.shape)
        self.per_chunk = config.model.blocks // (mesh.pipeline * mesh.virtual)
        # Blocks that a chip runs forward, and as many backward: those of its tasks, and all.
        self.useful = self.schedule.work * self.per_chunk
        self.run = (self.schedule.work + mesh.pipeline - 1) * self.per_chunk
        self._trace(shared)

    def _trace(self, shared: bool) -> None:
        c = self.config
        # Of the loss's chunks of tokens, a shared trace has two where there are more.
        chunks = model.chunks(self.bT, c.train.loss_chunk_tokens)
        few = shared and chunks > 2 and 2 * self.b % chunks == 0
        self.last_b = 2 * self.b // chunks if few else self.b
        self.last_M = self.M * self.b // self.last_b
        replica = dataclasses.replace(c.mesh, replica=1)
        stage = dataclasses.replace(replica, pipeline=1)
        one = dataclasses.replace(stage, fsdp=1)
        last = trace.one_microbatch(c, one if shared else replica, self.last_b)
        cut = self.b, c.mesh.fsdp
        cuts, self.rows = (cut,), (self.v,)
        if shared:
            cuts = batch_cuts(c.train.sequences)
            self.rows = tuple(trace.local_rows(last) // n for n in divisors(c.model.blocks))
        for mesh in (one, stage) if shared else (stage,):
            alone = trace.one_microbatch(c, mesh, trace.PRIME if shared else self.b)
            found = trace.pieces(alone, self.kernel, self.share, cuts)
            if not found.sized_by_fsdp:
                break
        self.column = cuts.index(cut)
        self.block, self.prefix, self.first = found.block, found.prefix, found.first
        self.last = trace.after(last, self.kernel, self.rows)

    def number(self, count: np.ndarray | int) -> int:
        """Of a count for each way to cut the batch, that of this step's."""
        return int(count if np.ndim(count) == 0 else count[self.column])

    def of_last(self, count: np.ndarray | int) -> int:
        """Of a count for each number of rows of the vocabulary, that of this step's."""
        return int(count if np.ndim(count) == 0 else count[self.rows.index(self.v)])

    def remat(self, piece: Piece, names: str = "") -> jaxpr.Remat:
        return piece.remat(names or self.config.train.remat)

    def kept(self, piece: Piece, names: str = "") -> int:
        """Bytes that a layer leaves for its backward pass."""
        return self.number(self.remat(piece, names).bytes)

    def alive(self, piece: Piece) -> int:
        """Bytes that a layer's backward pass holds beside weights and what is kept."""
        return self.number(piece.alive(self.config.train.remat))

    @cached_property
    def kept_of_prefix(self) -> int:
        """Bytes that all layers of the prefix leave for their backward pass."""
        return sum(self.kept(layer) * count for layer, count in self.prefix)

    @cached_property
    def block_elements(self) -> int:
        """Elements of one block's weights, whole along fsdp."""
        blocks = self.config.mesh.virtual * self.per_chunk  # of this chip
        return sum(h.whole for h in self.held if h.place == "block") // blocks


def one(count: np.ndarray | int) -> int:
    """Of a count that is for one size alone."""
    return int(np.reshape(count, -1)[0])


class Held(NamedTuple):
    """A weight on one chip, in elements."""

    own: int  # at rest
    whole: int  # along fsdp
    gathered: bool  # before use
    byte: int  # of an element in use
    place: str  # block, prefix or end
    replicated: tuple[str, ...]  # mesh axes that it is the same along


@cache
def held(config: Config) -> list[Held]:
    """What each chip has of the weights of a config's model and mesh."""
    w = declared(config)
    ranks = dict(zip(MESH_AXES, config.mesh.shape, strict=True))
    byte = jnp.dtype(config.model.compute_dtype).itemsize
    parts = {"block": w.blocks, "prefix": w.first.prefix}
    parts["end"] = w.first.replace(prefix=None), w.last

    def one(w: Weight, place: str) -> Held:
        own, gathered = w.size // math.prod(ranks[a] for a in w.axes), w.gathered_dim is not None
        replicated = tuple(axis for axis in MESH_AXES if axis not in w.axes)
        whole = own * ranks["fsdp"] if gathered else own
        return Held(own, whole, gathered, FLOAT if w.float32 else byte, place, replicated)

    return [one(w, place) for place, part in parts.items() for w in jax.tree.leaves(part)]


class Runs(NamedTuple):
    """How often a layer runs in a step on one chip: forward, what remat does not keep, backward."""

    piece: Piece
    times: int
    idle: int = 0  # in the bubble, for nothing
    anew: int = 0  # forward once more, before it runs backward


def runs(step: Step) -> list[Runs]:
    """Of layers; those of the prefix run with the embedding, on every rank of pipeline."""
    idle = step.run - step.useful
    found = [Runs(piece, step.useful * n, idle=idle * n) for piece, n in step.block]
    anew = 0 if step.schedule.at_once else step.M
    return found + [Runs(piece, step.M * n, anew=anew * n) for piece, n in step.prefix]


def flops_by_part(step: Step) -> dict[str, dict[str, int]]:
    """{part: {forward, backward, recomputed, bubble}} of matrix products.

    Recomputed: what train.remat does not keep. Bubble: what a chip runs in ticks in which the
    schedule has no task for it.
    """
    parts: dict[str, dict[str, int]] = {}

    def add(ops: Any, way: str, times: int, number: Callable = step.number) -> None:
        for op, n in ops:
            count = op.flops is not None and number(op.flops) * n * times
            if count:
                ways = ("forward", "backward", "recomputed", "bubble")
                parts.setdefault(op.part, dict.fromkeys(ways, 0))[way] += count

    for r in runs(step):
        again = step.remat(r.piece).costs
        add(r.piece.forward, "forward", r.times)
        add(r.piece.backward, "backward", r.times)
        add(again, "recomputed", r.times)
        add(r.piece.forward, "recomputed", r.anew)
        add((*r.piece.forward, *r.piece.backward, *again), "bubble", r.idle)
    for op, n in jaxpr.costs(step.last.ops):
        add([(op, n)], "backward" if op.transposed else "forward", step.last_M, step.of_last)
    if step.matrices:
        add(jaxpr.costs(step.matrices.ops), "backward", 1, one)
    return parts


def model_flops(step: Step) -> float:
    """FLOPs of a chip's share of a step without any waste: no recomputation, no bubble, the prefix
    once; every capacity slot and the padded vocabulary. Backward is twice forward.
    """

    def forward(ops: Any, number: Callable = step.number) -> int:
        return sum(
            number(op.flops) * n for op, n in ops if op.flops is not None and not op.transposed
        )

    last = step.last_M * forward(jaxpr.costs(step.last.ops), step.of_last)
    ranks = step.config.mesh.pipeline  # each of which runs the prefix
    layers = (r.times * forward(r.piece.forward) / (ranks if r.anew else 1) for r in runs(step))
    return 3 * (last + sum(layers))


@cache
def matrices(config: Config) -> jaxpr.Program | None:
    """What a chip does with matrices in the optimizer's step; None where they have AdamW, too."""
    if config.optimizer.matrices == "adamw":
        return None
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared(config))
    rule = train.optimizer(config, declared(config), trace.abstract_mesh(config))
    with jax.numpy_dtype_promotion("standard"):
        update = jax.make_jaxpr(rule.update)(w, jax.eval_shape(rule.init, w), w)
    [over_mesh] = (e for e in update.jaxpr.eqns if e.primitive.name == "shard_map")
    inner = over_mesh.params["jaxpr"]
    closed = core.ClosedJaxpr(inner, ())
    return jaxpr.Reader(jaxpr.Sizes(1, ((1, 1),)), 1.0).read(closed)


@cache
def optimizer_bytes(config: Config) -> int:
    """Of one chip's state of the optimizer, which is laid out as the weights are."""
    mesh = trace.abstract_mesh(config)

    def slice_of(w: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, w.spec).shard_shape(w.shape), jnp.float32)

    own = jax.tree.map(slice_of, declared(config))
    state = jax.eval_shape(train.optimizer(config, declared(config)).init, own)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))


@dataclass(frozen=True)
class Traffic:
    """Collectives of one cause in a step."""

    cause: str
    axes: tuple[str, ...]  # of more than one rank
    kind: str
    result_bytes: int  # by the size of their results
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave the chip when each rank passes on all parts but its own."""
        if self.kind == "collective-permute":
            return self.result_bytes
        whole = self.result_bytes * (self.ranks if self.kind == "reduce-scatter" else 1)
        return whole * (self.ranks - 1) / self.ranks * (2 if self.kind == "all-reduce" else 1)


def traffic(step: Step, chip: Chip | None) -> list[Traffic]:
    """What is sent in a step, by cause, as the chip's compiler sends it."""
    found: Counter = Counter()

    def add(cause: str, axes: tuple[str, ...], kind: str, result: int, times: int = 1) -> None:
        axes = tuple(a for a in MESH_AXES if a in axes and step.ranks[a] > 1)
        ranks = math.prod(step.ranks[a] for a in axes)
        if kind == "reduce-scatter" and sums_everywhere(step, chip, axes):
            kind, result = "all-reduce", result * ranks
        if axes and result * times:
            found[cause, axes, kind] += result * times

    def sends(ops: Any, times: int, way: str = "", number: Callable = step.number) -> None:
        for op, n in ops:
            if op.send:
                # What types the embedding as differing along all axes has no scope.
                cause, size = op.send.cause or "embedding", number(op.send.bytes)
                add(cause + way, op.send.axes, op.send.kind, size, n * times)

    for r in runs(step):
        sends(r.piece.forward, r.times + r.anew + r.idle)
        sends(step.remat(r.piece).costs, r.times + r.idle)
        sends(r.piece.backward, r.times + r.idle, ", backward")
    sends(step.first.forward, step.M)
    sends(step.first.remat("full").costs, step.M)
    sends(step.first.backward, step.M, ", backward")
    for op, n in jaxpr.costs(step.last.ops):
        sends([(op, n)], step.last_M, ", backward" if op.transposed else "", step.of_last)
    if step.matrices:
        sends(jaxpr.costs(step.matrices.ops), 1, number=one)
    _executor_sends(step, add)
    _weights(step, add, sums_everywhere(step, chip, ("fsdp",)))
    return [
        Traffic(cause, axes, kind, size, math.prod(step.ranks[a] for a in axes))
        for (cause, axes, kind), size in found.items()
    ]


def sums_everywhere(step: Step, chip: Chip | None, axes: tuple[str, ...]) -> bool:
    """Whether a reduce-scatter becomes an all-reduce, as libtpu makes one over a whole slice."""
    whole = math.prod(step.ranks[a] for a in axes) == step.chips // step.ranks["replica"]
    return chip is not None and chip.is_tpu and whole


def _executor_sends(step: Step, add: Callable[..., None]) -> None:
    """Collectives of the pipeline's ticks."""
    ticks = step.schedule.work + step.schedule.pipeline - 1
    # A cooldown of one tick is no loop, and compilers leave out its send, which nobody reads.
    sends = 2 * ticks - (step.schedule.stages == 2)
    add("pipeline sends", ("pipeline",), "collective-permute", step.x_bytes, sends)
    add("last stage to all", ("pipeline",), "all-reduce", step.x_bytes, step.M)


def _weights(step: Step, add: Callable[..., None], narrow: bool) -> None:
    """Collectives of weights and of their gradients.

    narrow  gradients of a gather per layer are summed in the type that they are computed in: what
            libtpu makes of a sum over a whole slice.
    """
    blocks = step.config.mesh.virtual * step.per_chunk  # of this chip
    prefix_passes = 2 if step.schedule.at_once else 3
    passes_of = {
        "block": (2 * step.run, step.run, blocks),
        "prefix": (prefix_passes * step.M, step.M, 1),
    }
    for h in step.held:
        per_layer = step.per_layer and h.place in passes_of
        forward, backward, parts = passes_of[h.place] if per_layer else (1, 1, 1)
        if h.gathered:
            add("weights", ("fsdp",), "all-gather", h.whole // parts * h.byte, forward)
            grad = h.byte if narrow and per_layer else FLOAT
            add("gradients", ("fsdp",), "reduce-scatter", h.own // parts * grad, backward)
        inside = tuple(axis for axis in h.replicated if axis != "replica")
        add("replicated gradients", inside, "all-reduce", h.own * FLOAT)
        add("gradients of replicas", ("replica",), "all-reduce", h.own * FLOAT)
    add("gradient norm", MESH_AXES, "all-reduce", FLOAT * len(step.held))


def memory(step: Step) -> dict[str, int]:
    """Bytes by part, at the fullest moment of a step."""
    parts: Counter = Counter()
    for h in step.held:
        used = h.own if step.per_layer and h.place != "end" else h.whole
        parts["weights"] += h.own * FLOAT
        parts["weights in use"] += used * h.byte
        parts["gradients"] += used * FLOAT
    parts["optimizer state"] = step.optimizer_bytes
    parts["batch"] = 4 * step.M * step.bT * FLOAT
    kept = sum(step.kept(layer) * count for layer, count in step.block)
    parts["saved activations"] = step.schedule.slots * step.per_chunk * kept
    if step.schedule.at_once:
        parts["saved activations"] += step.kept_of_prefix
    parts["pipeline buffers"] = 4 * step.x_bytes
    part, size = max(working(step).items(), key=lambda item: item[1])
    parts[part] = size
    lasting = parts["weights"] + parts["optimizer state"] + parts["batch"]
    parts["gaps"] = round(GAPS * (parts.total() - lasting))
    return dict(parts)


def working(step: Step) -> dict[str, int]:
    """Bytes that only one moment needs, by what happens in it."""
    kept = sum(step.kept(layer) * count for layer, count in step.block)
    # What the output matrix multiplies, and its gradient, of the chunks that were not looked at.
    more = 2 * (step.b - step.last_b) * step.x_bytes * step.ranks["tensor"] // step.b
    found = {
        "logits": step.of_last(step.last.peak) + more,
        # A block's weights and their gradients, its part of the ring, and one of its layers.
        "one layer": 2 * step.block_elements * step.byte
        + kept
        + max(step.alive(layer) for layer, _ in step.block),
    }
    if step.prefix:
        # All of the prefix's layers, where their forward pass runs anew before their backward pass.
        held = 0 if step.schedule.at_once else step.kept_of_prefix
        found["prefix layers"] = held + max(step.alive(layer) for layer, _ in step.prefix)
    return found


# --- prediction -----------------------------------------------------------------------------------


def memory_traffic(step: Step) -> dict[str, int]:
    """Bytes that go through a chip's memory in a step, by cause: what kernels read and write, as
    fusion.py tells them, and what the pipeline's executor and the optimizer do with the results.

    By rule: what a layer keeps is put into the ring of slots, and sliced out of it where a product
    reads it; a layer's weights are sliced out of their stack for each pass, and their gradients
    added to float32 ones; so are the table's, after each microbatch. A TPU's products read slices
    where they lie and add their results there. Weights are cast and gathered, and their gradients
    summed over fsdp, once in a step or in the layers: about as many bytes. The optimizer reads
    gradients twice, for their norm, and reads and writes weights and its state; Muon's kernels
    are counted as a layer's are.
    """
    c, apart = step.config, 0 if step.platform == "tpu" else 1
    found = Counter()
    for r in runs(step):
        forward, backward = through_layer(step, r.piece)
        found["layers, forward"] += forward * (r.times + r.anew + r.idle)
        found["layers, backward"] += backward * (r.times + r.idle)
    first = step.first.kernels("full", step.alone)
    found["embedding"] = step.M * sum(step.number(kernels.bytes) for kernels in first)
    found["loss"] = step.last_M * step.of_last(_fused(step.last, step.alone).bytes)
    table = step.v * c.model.width
    found["weights in use"] = apart * 4 * step.run * step.block_elements * step.byte
    # A TPU does not write what it adds, which the layers' and the loss's products are counted with.
    found["gradients"] = (2 * FLOAT + (1 if apart else -1) * step.byte) * (
        step.run * step.block_elements + 2 * step.M * table
    )
    here, whole = sum(h.own for h in step.held), sum(h.whole for h in step.held)
    kept = sum(step.kept(layer) * count for layer, count in step.block)
    found["zeros"] = whole * FLOAT + step.schedule.slots * step.per_chunk * kept
    found["gathering"] = sum(h.own * (FLOAT + h.byte) for h in step.held)
    found["gathering"] += sum((h.whole + h.own) * (h.byte + FLOAT) for h in step.held if h.gathered)
    found["optimizer"] = 4 * FLOAT * here + 2 * step.optimizer_bytes
    if step.matrices:
        found["optimizer"] += one(_fused(step.matrices, step.alone).bytes)
    return dict(found)


@cache
def _fused(program: jaxpr.Program, alone: frozenset[str]) -> Fused:
    return Fused(program.ops, alone, program.outputs)


def through_layer(step: Step, piece: Piece) -> tuple[int, int]:
    """Bytes through memory of a layer's (forward, backward) pass, with the ring's."""
    ahead, back = piece.kernels(step.config.train.remat, step.alone)
    remat = step.remat(piece)
    tpu = step.platform == "tpu"
    put = sum(v.bytes * n * (1 if tpu else ahead.stored(v)) for v, n in remat.kept.items())
    taken = sum(v.bytes * n * (0 if tpu else back.sliced(v)) for v, n in remat.kept.items())
    return step.number(ahead.bytes + put), step.number(back.bytes + taken)


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to need of one chip. Times are None where the chip is not known."""

    parameters: int
    active_parameters: int
    tokens_per_step: int
    attention: str  # as of attention.chosen
    memory_bytes_per_chip: int
    flops_per_chip: int
    model_flops_per_chip: float  # as executed without waste: see model_flops
    collective_bytes_per_chip: dict[str, float]  # by mesh axes, by the size of results
    bubble: float  # idle share of the slots of a pipeline rank
    memory: dict[str, int]
    flops: dict[str, dict[str, int]]
    traffic: list[Traffic]
    memory_traffic: dict[str, int]
    seconds: dict[str, float] | None  # compute, memory, and the links of each group of axes
    mfu_flops_per_token: float  # what MFU multiplies: see flops.py
    chip: Chip | None
    chips: int

    @property
    def bound_by(self) -> str | None:
        """What takes longest."""
        return self.seconds and max(self.seconds, key=self.seconds.__getitem__)

    @property
    def step_s(self) -> float | None:
        """The roofline: compute, memory and links all at work at once."""
        return self.seconds and max(self.seconds.values())

    @property
    def serial_step_s(self) -> float | None:
        """With no link at work while the chip computes."""
        if self.seconds is None:
            return None
        links = sum(s for name, s in self.seconds.items() if name not in ("compute", "memory"))
        return max(self.seconds["compute"], self.seconds["memory"]) + links

    def with_memory_traffic(self, size: float) -> "Prediction":
        """The same, with the time that so many bytes take through memory."""
        memory_s = size / self.chip.memory_bandwidth
        return dataclasses.replace(self, seconds=self.seconds | {"memory": memory_s})

    def over(self, compiled: Mapping[str, Any]) -> dict[str, float]:
        """Predicted over compiled: memory, FLOPs, bytes through memory where they are counted, and
        bytes along axes that carry 1 % or more.

        compiled  the fields of a compiler.Compiled.
        """
        found = {
            "memory": self.memory_bytes_per_chip / compiled["memory_bytes_per_chip"],
            "FLOPs": self.flops_per_chip / compiled["flops_per_chip"],
        }
        if through := compiled["memory_traffic_bytes"]:
            found["memory traffic"] = sum(self.memory_traffic.values()) / through
        by_axes = compiled["collective_bytes_per_chip"]
        return found | {
            axes: self.collective_bytes_per_chip.get(axes, 0.0) / size
            for axes, size in by_axes.items()
            if size >= 0.01 * sum(by_axes.values())
        }

    def line(self) -> str:
        """Memory and step time in a line."""
        memory = f"plan: {self.memory_bytes_per_chip / GIB:.3g} GiB per device"
        if self.seconds is None:
            return f"{memory}; no step time, for no figures of this device are known"
        if self.memory_bytes_per_chip > self.chip.memory_bytes:
            memory += ", which does not fit: it has"
        else:
            memory += " of"
        return (
            f"{memory} {self.chip.memory_bytes / GIB:.0f}; {self.step_s:.3g} s per step at "
            f"best, {self.serial_step_s:.3g} s if nothing overlaps; bound by {self.bound_by}"
        )

    def tokens_per_s(self, step_s: float) -> float:
        return self.tokens_per_step / step_s

    def mfu(self, step_s: float) -> float:
        """Model FLOP/s over the peak of all chips, by the rule of flops.MFU_RULE."""
        return self.tokens_per_s(step_s) * self.mfu_flops_per_token / (self.chips * self.chip.flops)


def predict(
    config: Config, chip: Chip | None, platform: str | None = None, shared: bool = False
) -> Prediction:
    """What a step of this config costs each of its mesh's chips.

    chip      None for one whose figures are not known: no times.
    platform  of such a one; the CPU if not said.
    shared    as in Step: then the slots of experts are rounded once, for all batch sizes.
    Raises    ValueError where the model cannot be cut over the mesh, or its attention not run.
    """
    step = Step(config, platform or platform_of(chip), shared)
    t = config.train
    flops_of = flops_by_part(step)
    held = memory(step)
    sends = traffic(step, chip)
    through = memory_traffic(step)
    by_axes: dict[str, float] = {}
    for sent in sends:
        axes = "+".join(sent.axes)
        by_axes[axes] = by_axes.get(axes, 0.0) + sent.result_bytes
    total = sum(sum(ways.values()) for ways in flops_of.values())
    parameters, active = weights.count(step.declared)
    return Prediction(
        parameters=parameters,
        active_parameters=active,
        tokens_per_step=t.sequences * t.sequence_length,
        attention=step.kernel,
        memory_bytes_per_chip=sum(held.values()),
        flops_per_chip=total,
        model_flops_per_chip=model_flops(step),
        collective_bytes_per_chip=by_axes,
        bubble=float(step.schedule.bubble),
        memory=held,
        flops=flops_of,
        traffic=sends,
        memory_traffic=through,
        seconds=chip and seconds(step, chip, total, sum(through.values()), sends),
        mfu_flops_per_token=flops.palm_flops_per_token(
            config.model, step.declared, t.sequence_length
        ),
        chip=chip,
        chips=step.chips,
    )


def seconds(
    step: Step, chip: Chip, flops_per_chip: int, memory_bytes: int, sends: list[Traffic]
) -> dict[str, float]:
    """How long each resource is at work in a step, at its peak."""
    found = {
        "compute": flops_per_chip / (chip.float32_flops if step.byte == FLOAT else chip.flops),
        "memory": memory_bytes / chip.memory_bandwidth,
    }
    for sent in sends:
        axes = "+".join(sent.axes)
        found[axes] = found.get(axes, 0.0) + link_seconds(step, chip, sent)
    return found


def seconds_again(step: Step, chip: Chip | None, piece: Piece, name: str) -> float:
    """Time to make again what `name` of train.remat keeps of a layer; where the chip is not known,
    in units of a FLOP.
    """
    found = 0.0
    for names, sign in (("full", 1), (name, -1)):
        for op, n in step.remat(piece, names).costs:
            if op.flops is not None:
                found += sign * n * step.number(op.flops) / (chip.flops if chip else 1)
            axes = op.send and tuple(
                a for a in MESH_AXES if a in op.send.axes and step.ranks[a] > 1
            )
            if chip and axes:
                ranks, size = math.prod(step.ranks[a] for a in axes), step.number(op.send.bytes)
                sent = Traffic(op.send.cause, axes, op.send.kind, n * size, ranks)
                found += sign * link_seconds(step, chip, sent)
    return found


def link_seconds(step: Step, chip: Chip, sent: Traffic) -> float:
    """At the full bandwidth of the links that the group's ranks have."""
    ranks, strides, stride = list(step.ranks.items()), {}, 1
    for axis, size in reversed(ranks):
        strides[axis] = stride
        stride *= size
    groups = tuple((step.ranks[axis], strides[axis]) for axis in sent.axes)
    whole = sent.result_bytes * (sent.ranks if sent.kind == "reduce-scatter" else 1)
    if chip.is_tpu and "replica" in sent.axes:
        return chip.between_slices_s(sent.kind, whole, sent.ranks)
    return chip.collective_s(sent.kind, whole, groups, step.chips)
