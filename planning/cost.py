"""Predict the cost of a training step on one chip: FLOPs, mesh traffic, memory and time.

The model is described once, by the functions that run it. Layers, embedding and loss are traced
(trace.py) and analyzed (jaxpr.py). The declarations of weights determine what is gathered and
reduced, and the optimizer's own functions determine its state. The schedule's arithmetic gives the
number of executions. A new layer of einsums, scans and collectives needs no change here.

What a trace does not show is a rule, each in one place:

- `is_all_reduce`: libtpu's reduce-scatter over a whole slice.
- `traffic`, `memory`: the pipeline's executor.
- rates.py and collectives.py: the speed of chips and of links.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import float8
import hardware
import model
import optimizer
import sharded_model
import utils
import vocabulary
import weights
from device_kernels.choice import choose_experts_kernel, choose_kernel, window_shares
from hardware import Chip, divisors, platform_of
from inference import decode
from memory import bytes_of
from planning import collectives, jaxpr, rates, trace
from planning.results import FLOPS_KINDS, Prediction, Traffic
from planning.trace import TracedFunction
from utils import MESH_AXES, WEIGHT_AXES, Config, ConfigError
from weights import Weight

FLOAT = 4  # bytes of float32: weights at rest, gradients, softmax
GAPS = 0.03  # unused share between temporary buffers, as in tests/compiled.json
# Of unrolled layers XLA keeps some results that it could recompute: this share of the saved ones.
KEPT = 0.25


# --- over layers and schedule ---------------------------------------------------------------------


@cache
def declared(config: Config) -> model.Transformer:
    """Return the weights of a config's model and mesh."""
    return model.declare(config)


class Step:
    """The traced functions of a config on one chip, and how often each runs in a step."""

    def __init__(self, config: Config, platform: str, shared: bool = False, rough: bool = False):
        """shared  use traces that serve other batch sizes too, for a search.
        rough   also for a loop over tiles of dropless experts.

        Such a trace has the grouped products of dropless experts as one batched product of an even
        load, without the padding of tiles. A loop over tiles reads the weights in each, so it is
        traced for each batch size unless `rough`.
        """
        m, t, mesh = config.model, config.train, config.mesh
        self.experts_kernel = choose_experts_kernel(config, platform)
        if m.moe_layers and not m.capacity_factor:
            even = t.seq_len * m.num_experts_per_tok % m.n_routed_experts == 0
            shared = shared and even and (rough or self.experts_kernel != "tiles")
        # JAX indexes the choices of a trace's tokens with 32 bits.
        choices = trace.PRIME * mesh.fsdp * t.seq_len * m.num_experts_per_tok
        shared = shared and choices < 2**31
        of_weights = Config(model=config.model, lora=config.lora, mesh=mesh)
        sharded_model.check_split(config)
        self.config, self.declared = config, declared(of_weights)
        self.platform = platform
        self.schedule, self.M = sharded_model.schedule_of(config), t.microbatches
        self.kernel = choose_kernel(config, platform)
        self.unrolled = sharded_model.is_unrolled(config, platform)
        self.b = t.global_batch_size // (t.microbatches * mesh.batch)
        self.T = t.seq_len // mesh.context
        self.bT = self.b * self.T
        self.byte = jnp.dtype(config.model.compute_dtype).itemsize
        self.x_bytes = self.bT // mesh.tensor * config.model.hidden_size * self.byte
        self.weights = local_weights(of_weights)
        unstaged = dataclasses.replace(mesh, virtual=1)  # the optimizer's layout ignores virtual
        alone = dataclasses.replace(of_weights, mesh=unstaged, optimizer=config.optimizer)
        self.optimizer_bytes = optimizer_bytes(alone)
        self.update = update(alone)
        self.per_layer = config.fsdp.gather == "layer"
        self.ranks = dict(zip(MESH_AXES, mesh.shape, strict=True))
        self.chips = math.prod(mesh.shape)
        self.chunk_blocks = config.model.blocks // (mesh.pipeline * mesh.virtual)
        # Blocks that a chip runs forward, and as many backward: those of its tasks, and all.
        self.useful = self.schedule.tasks_per_rank * self.chunk_blocks
        self.run = (self.schedule.tasks_per_rank + mesh.pipeline - 1) * self.chunk_blocks
        self._trace(shared, rough)
        self.executions = list(executions(self))

    def _trace(self, shared: bool, rough: bool) -> None:
        kernel = "batched" if shared else self.experts_kernel
        c = utils.changed(self.config, {"model.experts_kernel": kernel})
        # What runs after the last stage is the same on any number of fsdp ranks.
        mesh = dataclasses.replace(c.mesh, replica=1, fsdp=1 if shared else c.mesh.fsdp)
        batches = tuple(divisors(c.train.global_batch_size)) if shared else (self.b,)
        self.column, lasts = batches.index(self.b), batches
        chunks = vocabulary.num_chunks(self.bT, c.train.loss_chunk_tokens)
        self.last_b = self.b
        if shared and (chunks == 1 or rough):  # one trace of one chunk for all batch sizes
            lasts = tuple(self._chunk(b) for b in batches)
            self.last_b = lasts[self.column]
            whole = utils.changed(c, {"train.loss_chunk_tokens": trace.PRIME * c.train.seq_len})
            self.last_config = trace.one_microbatch(whole, mesh, trace.PRIME)
        else:  # a shared trace has two of the loss's chunks of tokens, if there are more
            if shared and chunks > 2 and 2 * self.b % chunks == 0 and self.bT % chunks == 0:
                self.last_b = 2 * self.b // chunks
            self.last_config = trace.one_microbatch(c, mesh, self.last_b)
        self.last_M = self.M * self.b // self.last_b
        self._last = partial(trace.output_program, self.last_config, self.platform, lasts)
        self.last = self._last()
        mesh = dataclasses.replace(c.mesh, replica=1, pipeline=1)
        shares = window_shares(c, self.platform)

        def stage(c: Config) -> tuple[trace.Layers, trace.Layers, TracedFunction]:
            alone = trace.one_microbatch(c, mesh, trace.PRIME if shared else self.b)
            return trace.stage_functions(alone, self.kernel, shares, batches)

        self.block, self.prefix, self.first = stage(c)
        self._stage = lambda changes: stage(utils.changed(c, changes))

    def _chunk(self, b: int) -> int:
        """Return the sequences of one of the loss's chunks of tokens of b sequences."""
        t = self.config.train
        chunks = vocabulary.num_chunks(b * self.T, t.loss_chunk_tokens)
        return b // chunks if b % chunks == 0 else b

    def evaluation_peak(self) -> int:
        """Return the peak bytes of one layer, or of the loss, in an evaluation."""
        m = self.config.model
        factor = m.eval_capacity_factor if m.moe_layers else m.capacity_factor
        block, prefix, _ = self._stage({"model.capacity_factor": factor})
        last = self._last(trained=False)
        layers = max(self.count(layer.forward_peak) for layer, _ in (*block, *prefix))
        return max(layers, self.count(last.peak))

    def count(self, counts: np.ndarray | int) -> int:
        """Select this step's count from those of a trace for several batch sizes."""
        if isinstance(counts, int):
            return counts
        return int(counts[self.column if len(counts) > 1 else 0])

    def axes_of(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of more than one rank, in the order of the mesh."""
        return tuple(a for a in MESH_AXES if a in axes and self.ranks[a] > 1)

    def size_of(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.ranks[a] for a in axes)

    def saved(self, layer: TracedFunction, names: str = "") -> int:
        """Return the bytes that a layer saves for its backward pass."""
        return self.count(layer.remat(names or self.config.train.remat).bytes)

    @property
    def waiting(self) -> int:
        """The bytes that a block saves for its weight tasks, besides its residuals."""
        if not self.schedule.split_backward:
            return 0
        remat = self.config.train.remat
        return sum(self.count(layer.waiting(remat)) * count for layer, count in self.block)

    def alive(self, layer: TracedFunction) -> int:
        """Return the peak bytes of a layer's backward pass besides weights and residuals."""
        return self.count(layer.alive(self.config.train.remat))

    def held(self, layers: trace.Layers) -> int:
        """Return the bytes that layers save for their backward pass."""
        return sum(self.saved(layer) * count for layer, count in layers)


class LocalWeight(NamedTuple):
    """A weight on one chip, in elements."""

    own: int  # at rest
    gathered: int  # in use, after the gather along WEIGHT_AXES
    byte: int  # bytes of an element in use
    part: str  # block, prefix or end
    bytes: int  # at rest
    trained: bool
    replicated: tuple[str, ...]  # mesh axes that it is replicated over


@cache
def local_weights(config: Config) -> list[LocalWeight]:
    """Return the weights of one chip, for a config's model and mesh."""
    w = declared(config)
    ranks = dict(zip(MESH_AXES, config.mesh.shape, strict=True))
    byte = jnp.dtype(config.model.compute_dtype).itemsize
    parts = {"block": w.blocks, "prefix": w.first.prefix}
    parts["end"] = w.first.replace(prefix=None), w.last

    def local(w: Weight, part: str) -> LocalWeight:
        own = w.size // math.prod(ranks[a] for a in w.axes)
        whole = (
            own if w.gathered_dim is None else own * math.prod(ranks[axis] for axis in WEIGHT_AXES)
        )
        replicated = tuple(axis for axis in MESH_AXES if axis not in w.axes)
        rest = own * jnp.dtype(w.dtype).itemsize
        used = FLOAT if w.float32 else 1 if w.dtype == "uint8" else byte
        return LocalWeight(own, whole, used, part, rest, w.trained, replicated)

    return [local(w, part) for part, tree in parts.items() for w in jax.tree.leaves(tree)]


def executions(step: Step) -> Iterator[tuple[jaxpr.Op, str, int]]:
    """Yield (operation, kind, executions) of products and collectives of a step on one chip.

    kind  forward, backward, recomputed, bubble, bubble backward, or optimizer. The bubble is what
          ticks without a task run. Every pipeline rank runs the prefix, and before its backward
          pass runs it forward again.
    """
    idle, rerun = step.run - step.useful, 0 if step.schedule.single_stage else step.M
    remat, split = step.config.train.remat, step.schedule.split_backward
    layers = [(layer, remat, n * step.useful, n * idle, 0) for layer, n in step.block]
    layers += [(layer, remat, n * step.M, 0, n * rerun) for layer, n in step.prefix]
    for layer, names, useful, idle, rerun in (*layers, (step.first, "full", step.M, 0, 0)):
        again = layer.remat(names).costs
        for ops, kind, times in (
            (layer.forward, "forward", useful),
            (layer.backward, "backward", useful),
            (again, "recomputed", useful),
            (layer.forward, "recomputed", rerun),
            (layer.forward, "bubble", idle),
            (again, "bubble", idle),
            (layer.backward_of_input if split else layer.backward, "bubble backward", idle),
        ):
            yield from ((op, kind, n * times) for op, n in ops)
    for op, n in jaxpr.costs(step.last.ops):
        yield op, "backward" if op.transposed else "forward", n * step.last_M
    for op, n in jaxpr.costs(step.update.ops):
        yield op, "optimizer", n


def flops_by_part(step: Step) -> dict[str, dict[str, int]]:
    """Return {part: {kind: FLOPs}} of matrix products. The optimizer's count as backward."""
    parts: dict[str, dict[str, int]] = {}
    columns = {"bubble backward": "bubble", "optimizer": "backward"}
    for op, kind, times in step.executions:
        if op.flops is not None and (flops := step.count(op.flops) * times):
            part = parts.setdefault(op.part, dict.fromkeys(FLOPS_KINDS, 0))
            part[columns.get(kind, kind)] += flops
    return parts


def model_flops(step: Step) -> float:
    """Return the FLOPs of a chip's share of a step without waste.

    There is no recomputation and no bubble, and the prefix runs once. Every capacity slot, all
    tiles of an even load, and the padded vocabulary count. Backward is twice forward.
    """
    products = [(op, times) for op, kind, times in step.executions if kind == "forward"]
    # Every pipeline rank runs all of the prefix.
    others = step.config.mesh.pipeline - 1
    prefix = [(op, step.M * n * times) for layer, n in step.prefix for op, times in layer.forward]
    forward, repeated = (
        sum(step.count(op.flops) * times for op, times in runs if op.flops is not None)
        for runs in (products, prefix)
    )
    return 3 * (forward - repeated * others / step.config.mesh.pipeline)


@cache
def update(config: Config) -> jaxpr.Program:
    """Return the update of the weights in a step. Its products are in a shard_map, if any."""
    all_w = declared(config)
    w = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), weights.trained(all_w, all_w)
    )
    rule = optimizer.make_optimizer(config, all_w, trace.abstract_mesh(config))
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(rule.update)(w, jax.eval_shape(rule.init, w), w)
    return jaxpr.Reader(jaxpr.Sizes(), 1.0).read(closed)


@cache
def optimizer_bytes(config: Config) -> int:
    """Return the bytes of one chip's optimizer state, which has the layout of the weights."""
    mesh = trace.abstract_mesh(config)

    def shard(w: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, w.spec).shard_shape(w.shape), jnp.float32)

    w = declared(config)
    own = jax.tree.map(shard, weights.trained(w, w))
    state = jax.eval_shape(optimizer.make_optimizer(config, w, mesh).init, own)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))


# --- traffic --------------------------------------------------------------------------------------


def traffic(step: Step, chip: Chip | None) -> list[Traffic]:
    """Return the collectives of a step by cause, as the chip's compiler emits them."""
    sizes: Counter = Counter()

    def add(cause: str, axes: tuple[str, ...], kind: str, result: int, times: int = 1) -> None:
        axes = step.axes_of(axes)
        if kind == "reduce-scatter" and is_all_reduce(step, chip, axes):
            kind, result = "all-reduce", result * step.size_of(axes)
        elif kind == "reduce-scatter" and chip is not None and chip.is_tpu and len(axes) > 1:
            # libtpu exchanges half of what it leaves, as seen on two axes of a v4 and a v5p.
            sizes[cause, axes, "collective-permute"] += result // 2 * times
        if axes and result * times:
            sizes[cause, axes, kind] += result * times

    for op, kind, times in step.executions:
        if op.send:
            # Making the embedding vary over all axes is outside of every named scope.
            cause = op.part or "embedding"
            cause += ", backward" if kind.endswith("backward") else ""
            size, (axes, what) = step.count(op.send.bytes), (op.send.axes, op.send.kind)
            keys = axes == ("context",) and what == "reduce-scatter"  # cast to the compute dtype
            if keys and is_all_reduce(step, chip, axes):  # libtpu casts before the sum
                size = size * step.byte // FLOAT
            add(cause, axes, what, size, times)
    ticks = step.schedule.tasks_per_rank + step.schedule.pipeline - 1
    # A cooldown of one tick is no loop to compilers for chips. They remove its send, which nothing
    # reads. On CPUs it stays a loop, by a flag of run.sh.
    sends = 2 * ticks - (step.schedule.stages == 2 and chip is not None)
    add("pipeline sends", ("pipeline",), "collective-permute", step.x_bytes, sends)
    add("last stage to all", ("pipeline",), "all-reduce", step.x_bytes, step.M)
    _weight_sends(step, add, is_all_reduce(step, chip, WEIGHT_AXES))
    return [
        Traffic(cause, axes, kind, size, step.size_of(axes))
        for (cause, axes, kind), size in sizes.items()
    ]


def is_all_reduce(step: Step, chip: Chip | None, axes: tuple[str, ...]) -> bool:
    """Return whether libtpu makes an all-reduce of a reduce-scatter, as over a whole slice."""
    whole = step.size_of(axes) == step.chips // step.ranks["replica"]
    return chip is not None and chip.is_tpu and whole


def _weight_sends(step: Step, add: Callable[..., None], narrow: bool) -> None:
    """Add the collectives of weights and their gradients.

    narrow  gradients of a gather per layer are summed in their compute dtype, as libtpu does over
            a whole slice.
    """
    blocks = step.config.mesh.virtual * step.chunk_blocks  # on this chip
    prefix_passes = 2 if step.schedule.single_stage else 3
    passes_of = {
        "block": (2 * step.run, step.run, blocks),
        "prefix": (prefix_passes * step.M, step.M, 1),
    }
    for w in step.weights:
        per_layer = step.per_layer and w.part in passes_of
        forward, backward, parts = passes_of[w.part] if per_layer else (1, 1, 1)
        if w.gathered > w.own:
            add("weights", WEIGHT_AXES, "all-gather", w.gathered // parts * w.byte, forward)
        if not w.trained:
            continue
        if w.gathered > w.own:
            grad = w.byte if narrow and per_layer else FLOAT
            add("gradients", WEIGHT_AXES, "reduce-scatter", w.own // parts * grad, backward)
        inside = tuple(axis for axis in w.replicated if axis != "replica")
        add("replicated gradients", inside, "all-reduce", w.own * FLOAT)
        add("gradients of replicas", ("replica",), "all-reduce", w.own * FLOAT)
    add("gradient norm", MESH_AXES, "all-reduce", FLOAT * sum(w.trained for w in step.weights))


# --- memory ---------------------------------------------------------------------------------------


def memory(step: Step) -> dict[str, int]:
    """Return the bytes by part at the peak of a step."""
    parts: Counter = Counter()
    for w in step.weights:
        used = w.own if step.per_layer and w.part != "end" else w.gathered
        parts["weights"] += w.bytes
        # A frozen weight in the compute dtype, of which a rank holds all, is not copied.
        parts["weights in use"] += used * w.byte * (w.trained or used * w.byte != w.bytes)
        parts["gradients"] += used * FLOAT * w.trained
    parts["optimizer state"] = step.optimizer_bytes
    parts["batch"] = 4 * step.M * step.b * step.config.train.seq_len * FLOAT
    ring = step.schedule.ring_slots * step.chunk_blocks  # of residuals
    parts["saved activations"] = ring * step.held(step.block)
    if step.waiting:
        parts["saved for weight tasks"] = step.schedule.pipeline * step.chunk_blocks * step.waiting
    if step.schedule.single_stage:
        parts["saved activations"] += step.held(step.prefix)
    if step.unrolled and not sharded_model.recomputes(step.config) and step.kernel != "xla":
        parts["saved activations"] += round(KEPT * parts["saved activations"])
    if step.unrolled and step.M == 1:  # gradients take the place of what they need
        parts["gradients"] = max(0, parts["gradients"] - parts["saved activations"])
    parts["pipeline buffers"] = 4 * step.x_bytes
    phases, grads = _temporary(step), parts.pop("gradients")
    # The loss has its own gradient in its peak. With one microbatch it is the first that exists.
    first = "logits" if step.M == 1 and step.schedule.single_stage else None
    needed = {name: size + grads * (name != first) for name, size in phases.items()}
    part = max(needed, key=needed.__getitem__)
    parts |= {part: phases[part], "gradients": needed[part] - phases[part]}
    permanent = parts["weights"] + parts["optimizer state"] + parts["batch"]
    parts["gaps"] = round(GAPS * (parts.total() - permanent))
    return dict(parts)


def evaluation_memory(step: Step) -> int:
    """Return the bytes of an evaluation, with the state of training."""
    c = step.config
    if not c.eval.sequences:
        return 0
    in_use = sum(
        w.byte * (w.own if step.per_layer and w.part != "end" else w.gathered)
        for w in step.weights
        if w.trained or w.gathered > w.own
    )
    state = sum(w.bytes for w in step.weights) + step.optimizer_bytes
    rounds = -(-c.eval.sequences // c.train.global_batch_size)
    batch = 4 * rounds * step.M * step.b * c.train.seq_len * FLOAT
    temporary = in_use + 2 * step.x_bytes + step.evaluation_peak()
    return state + batch + round((1 + GAPS) * temporary)


def sampling_memory(step: Step) -> int:
    """Return the bytes of samples, with the state of training: copied weights and the cache.

    Temporaries are not included. They are small, as a pass has few tokens.
    """
    c, state = step.config, sum(w.bytes for w in step.weights) + step.optimizer_bytes
    if not c.sample.prompts:
        return 0
    prompts, ranks = len(c.sample.prompts), math.prod(c.mesh.shape[:-1])
    c = decode.decoding_config(c, ranks, c.mesh.tensor)
    rows = -(-prompts // ranks) * ranks
    try:
        declared, mesh = model.declare(c), trace.abstract_mesh(c)
        cache = decode.abstract_cache(c, mesh, rows, c.train.seq_len)
    except ConfigError:  # a run trains without samples if it cannot decode
        return 0
    return state + bytes_of((decode.abstract_weights(c, declared, mesh), cache))


def _temporary(step: Step) -> dict[str, int]:
    """Return the bytes that only one phase of a step needs, by phase."""
    # The output matrix's input and its gradient, for the chunks that the trace does not have.
    more = 2 * (step.b - step.last_b) * step.x_bytes * step.ranks["tensor"] // step.b
    # A block's weights and their gradients, its part of the ring, and one of its layers.
    blocks = step.config.mesh.virtual * step.chunk_blocks  # on this chip
    elements = sum(w.gathered for w in step.weights if w.part == "block") // blocks
    block = 2 * elements * step.byte + step.held(step.block)
    by_phase = {
        "logits": step.count(step.last.peak) + more,
        "one layer": block + max(step.alive(layer) for layer, _ in step.block),
    }
    if step.prefix:
        # All layers of the prefix, if their forward pass runs again before their backward pass.
        held = 0 if step.schedule.single_stage else step.held(step.prefix)
        by_phase["prefix layers"] = held + max(step.alive(layer) for layer, _ in step.prefix)
    return by_phase


# --- time -----------------------------------------------------------------------------------------


def moved_bytes(step: Step) -> int:
    """Return the bytes of the operands and results of products, and of what the optimizer updates.

    The optimizer reads weights, gradients and its state, and writes weights and state. A split
    backward pass also copies what its weight tasks read into a ring, and out of it.
    """
    total = sum(3 * FLOAT * w.own for w in step.weights if w.trained) + 2 * step.optimizer_bytes
    total += (step.run + step.useful) * step.waiting
    for op, _, times in step.executions:
        if op.flops is not None:
            total += times * step.count(op.moved_bytes)
    return total


def recompute_seconds(step: Step, chip: Chip | None, layer: TracedFunction, name: str) -> float:
    """Return the time to recompute what `name` of train.remat saves of a layer.

    The unit is one FLOP if the chip is unknown.
    """
    seconds = 0.0
    for names, sign in (("full", 1), (name, -1)):
        for op, n in layer.remat(names).costs:
            if op.flops is not None:
                seconds += sign * n * product_seconds(step, chip, op)
            elif chip and (axes := step.axes_of(op.send.axes)):
                result = n * step.count(op.send.bytes)
                sent = Traffic("", axes, op.send.kind, result, step.size_of(axes))
                seconds += sign * link_seconds(step, chip, sent)
    return seconds


def product_seconds(step: Step, chip: Chip | None, op: jaxpr.Op) -> float:
    """Return the time of a product, or its FLOPs if the chip is unknown."""
    flops, moved = step.count(op.flops), step.count(op.moved_bytes)
    if chip is None:
        return flops
    counts = flops, moved, flops * is_float8(op.part)
    return sum(rates.chip_seconds(chip, step.byte == FLOAT, step.unrolled, *counts).values())


def is_float8(part: str) -> bool:
    """Return whether products of a part are in FP8."""
    return part.split()[-1:] == [float8.SCOPE]


def link_seconds(step: Step, chip: Chip, sent: Traffic) -> float:
    """Return the time of collectives at the full bandwidth of the links of the group's ranks."""
    strides, stride = {}, 1
    for axis, size in reversed(step.ranks.items()):
        strides[axis] = stride
        stride *= size
    groups = tuple((step.ranks[axis], strides[axis]) for axis in sent.axes)
    whole = sent.result_bytes * (sent.ranks if sent.kind == "reduce-scatter" else 1)
    if chip.is_tpu and "replica" in sent.axes:
        return collectives.between_slices_s(chip, sent.kind, whole, sent.ranks)
    return collectives.collective_s(chip, sent.kind, whole, groups, step.chips)


# --- prediction -----------------------------------------------------------------------------------


def predict(
    config: Config,
    chip: Chip | None,
    platform: str | None = None,
    shared: bool = False,
    rough: bool = False,
) -> Prediction:
    """Predict the cost of a step on each chip of the config's mesh.

    chip      None for an unknown chip: no times.
    platform  platform of an unknown chip; the default is cpu.
    shared    see Step. Expert capacity is then rounded once, for all batch sizes.
    rough     see Step. Nor is an evaluation traced.
    Raises    ConfigError if the model does not divide over the mesh, or attention cannot run.
    """
    step = Step(config, platform or platform_of(chip), shared, rough)
    hardware.uses_float8(config, step.platform, chip)
    t, held = config.train, memory(step)
    too_large = chip and sum(held.values()) > chip.allocatable_bytes
    if too_large and step.unrolled and t.layers == "auto":  # as train.compile_step falls back
        scanned = utils.changed(config, {"train.layers": "scanned"})
        return predict(scanned, chip, platform, shared, rough)
    flops, sends = flops_by_part(step), traffic(step, chip)
    by_axes: Counter = Counter()
    for sent in sends:
        by_axes["+".join(sent.axes)] += float(sent.result_bytes)
    total = sum(sum(kinds.values()) for kinds in flops.values())
    in_float8 = sum(sum(kinds.values()) for part, kinds in flops.items() if is_float8(part))
    parameters, active = weights.count(step.declared)
    seconds: Counter | None = None
    if chip:
        counts = total, moved_bytes(step), in_float8
        seconds = Counter(rates.chip_seconds(chip, step.byte == FLOAT, step.unrolled, *counts))
        for sent in sends:
            seconds["+".join(sent.axes)] += link_seconds(step, chip, sent)
    return Prediction(
        parameters=parameters,
        active_parameters=active,
        tokens_per_step=t.global_batch_size * t.seq_len,
        attention=step.kernel,
        memory_bytes_per_chip=sum(held.values()),
        flops_per_chip=total,
        model_flops_per_chip=model_flops(step),
        collective_bytes_per_chip=dict(by_axes),
        bubble=float(step.schedule.bubble),
        memory=held,
        flops=flops,
        traffic=sends,
        seconds=seconds and dict(seconds),
        mfu_flops_per_token=hardware.palm_flops_per_token(config.model, step.declared, t.seq_len),
        evaluation_bytes=0 if rough else evaluation_memory(step),
        sampling_bytes=sampling_memory(step),
        peak_flops=chip.peak(config.model.compute_dtype) if chip else 0.0,
        unrolled=step.unrolled,
        chip=chip,
        chips=step.chips,
    )
