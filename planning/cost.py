"""What a training step costs one chip, from shapes: FLOPs, traffic over the mesh, memory, time.

Nothing is traced and no device is touched. `attention`, `mlp` and `moe` say what a layer
multiplies, what it sends, what its backward pass can keep, and what it works on;
`flops_by_part`, `traffic` and `memory` add that up over the layers of a chip and over the schedule,
and `predict` divides it by what the chip can do.

Letters as in model.py: UPPER case is a whole dimension, lower case this chip's slice.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

import flops
import model
import passes
import utils
import weights
from attention import chosen, computed_share
from chips import Chip, platform_of
from utils import EXPERT_AXES, GIB, LANES, MESH_AXES, VOCABULARY_AXES
from weights import Weight

FLOAT = 4  # bytes of float32: weights at rest, gradients, moments, softmax
MOMENTS = 2  # of AdamW, each as large as the weights
GAPS = 0.03  # of what comes and goes in a step: unused between buffers; see tests/compiled.json

# When the backward pass needs a result again: unless a name is kept, or one of these.
ALWAYS, NEVER = "", None


@dataclass(frozen=True)
class Product:
    """Matrix products of a layer on one microbatch."""

    part: str  # as in flops.executed_flops_per_step
    flops: int  # forward; backward is twice that
    again: str | None  # computed again unless this name of train.remat is kept
    anew: int = 0  # FLOPs that the backward pass computes again whatever is kept


@dataclass(frozen=True)
class Send:
    """A collective of a layer on one microbatch, and its transpose in the backward pass."""

    cause: str
    axes: tuple[str, ...]
    forward: tuple[str, int]  # kind, bytes of the result
    backward: tuple[str, int]
    again: str | None  # as in Product


@dataclass(frozen=True)
class Layer:
    """What one layer does with one microbatch on one chip."""

    products: list[Product] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)  # bytes of each name of train.remat
    residuals: int = 0  # bytes that the backward pass finds where nothing is computed again
    working: int = 0  # bytes that it works on at once, beside weights and what is kept

    def __add__(self, other: "Layer") -> "Layer":
        return Layer(
            self.products + other.products,
            self.sends + other.sends,
            dict(Counter(self.kept) + Counter(other.kept)),
            self.residuals + other.residuals,
            max(self.working, other.working),
        )


class Sizes:
    """The letters of a config on one chip."""

    def __init__(self, c: utils.Config, platform: str):
        m, mesh, t = c.model, c.mesh, c.train
        self.kernel, self.share = chosen(c, platform), computed_share(c, platform)  # of attention
        self.b = t.sequences // (t.microbatches * mesh.fsdp)
        self.T, self.t = t.sequence_length, t.sequence_length // mesh.tensor
        self.D, self.n = m.width, m.heads // mesh.tensor
        self.H, self.R, self.W = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
        self.A, self.Q, self.C = self.H + self.R, m.q_lora_rank, m.kv_lora_rank
        self.f, self.x = m.hidden // mesh.tensor, m.shared_experts * m.expert_hidden // mesh.tensor
        self.E, self.K, self.G = m.experts, m.experts_per_token, m.expert_hidden
        self.v = m.padded_vocabulary // (mesh.pipeline * mesh.tensor)
        self.slots = model.expert_slots(m, self.b * self.t, m.capacity_factor)
        self.byte = 4 if m.compute_dtype == "float32" else 2  # of an activation
        self.bT, self.bt = self.b * self.T, self.b * self.t  # tokens


# --- layers ---------------------------------------------------------------------------------------


def gather(cause: str, s: Sizes, width: int, again: str | None) -> Send:
    """[b, t, width] -> [b, T, width] over tensor."""
    whole, own = (tokens * width * s.byte for tokens in (s.bT, s.bt))
    return Send(cause, ("tensor",), ("all-gather", whole), ("reduce-scatter", own), again)


def scatter(cause: str, s: Sizes, width: int, again: str | None) -> Send:
    """Parts of [b, T, width] -> their sum [b, t, width] over tensor."""
    whole, own = (tokens * width * s.byte for tokens in (s.bT, s.bt))
    return Send(cause, ("tensor",), ("reduce-scatter", own), ("all-gather", whole), again)


def norm_residuals(s: Sizes, width: int, tokens: int) -> int:
    """What rms_norm's backward finds: its input and output in float32, and numbers per token."""
    return (2 * tokens * width + 4 * tokens + width) * FLOAT


def attention(s: Sizes) -> Layer:
    """Multi-head latent attention: [b, t, D] -> [b, t, D], the latents gathered between."""
    sent = (s.Q or s.D) + s.C + s.R
    down = s.D * (s.C + s.R + s.Q)
    up = (s.Q or s.D) * s.n * s.A + s.C * s.n * (s.H + s.W)
    projections = "attention_projections"
    products = [
        # The norms' backward needs their input, whatever is kept.
        Product(projections, 2 * s.bt * down, ALWAYS),
        Product(projections, 2 * s.bT * up, ALWAYS),
        Product(projections, 2 * s.bT * s.n * s.W * s.D, "attention_out"),
    ]
    sends = [
        gather("attention latents", s, sent, "latents"),
        scatter("attention output", s, s.D, "attention_out"),
    ]
    kept = {
        "latents": s.bT * sent * s.byte,
        "attention": s.bT * s.n * s.W * s.byte,
        "attention_out": s.bt * s.D * s.byte,
    }
    residuals = (
        sum(norm_residuals(s, width, s.bt) for width in (s.D, s.C, s.Q) if width)
        + s.bt * s.D * s.byte
        + s.bT * (s.C + (s.Q or s.D)) * s.byte
        + heads(s)
    )
    scores = splash_scores if s.kernel == "splash" else xla_scores
    return Layer(products, sends, kept, residuals) + scores(s)


def heads(s: Sizes) -> int:
    """Bytes of queries, keys, values, and what they make."""
    return 2 * s.bT * s.n * (s.A + s.W) * s.byte


def xla_scores(s: Sizes) -> Layer:
    """Scores and what they make of values, as whole rectangles."""
    rectangle = s.b * s.n * s.T * s.T
    products = [
        Product("attention_scores", 2 * rectangle * s.A, ALWAYS),
        Product("attention_scores", 2 * rectangle * s.W, "attention"),
    ]
    return Layer(
        products,
        residuals=rectangle * (FLOAT + s.byte) + 2 * s.b * s.n * s.T * FLOAT,
        # Backward, softmax holds scores and their gradient in float32 beside the probabilities.
        working=rectangle * (2 * FLOAT + s.byte) + heads(s),
    )


def splash_scores(s: Sizes) -> Layer:
    """The same by blocks, those passed over that are masked whole.

    Its backward pass is two kernels, of keys and values and of queries: each makes the scores and
    the probabilities' gradient of its own.
    """
    pairs = round(s.b * s.n * s.T * s.T * s.share)
    anew = 2 * pairs * (2 * s.A + s.W)
    logsumexp = s.b * s.n * s.T * FLOAT
    return Layer(
        [Product("attention_scores", 2 * pairs * (s.A + s.W), "attention", anew)],
        kept={"attention": logsumexp},
        residuals=logsumexp,
        working=heads(s) + LANES * logsumexp,  # as its forward kernel writes it
    )


def swiglu(part: str, cause: str, s: Sizes, hidden: int) -> Layer:
    """[b, T, D] -> [b, t, D]; its gathered input is `mlp_in`."""
    one = 2 * s.bT * s.D * hidden
    products = [Product(part, 2 * one, "hidden"), Product(part, one, NEVER)]
    sends = [gather(f"{cause} input", s, s.D, "mlp_in"), scatter(f"{cause} output", s, s.D, NEVER)]
    kept = {"mlp_in": s.bT * s.D * s.byte, "hidden": 2 * s.bT * hidden * s.byte}
    residuals = s.bT * (s.D + 6 * hidden) * s.byte
    return Layer(products, sends, kept, residuals, s.bT * (2 * s.D + 3 * hidden) * s.byte)


def mlp(s: Sizes) -> Layer:
    """The feed-forward of a dense layer, with its norm."""
    return swiglu("mlp", "mlp", s, s.f) + Layer(residuals=norm_residuals(s, s.D, s.bt))


def experts(s: Sizes, spread: bool, tensor: int) -> Layer:
    """The routed experts: E * slots rows of this chip's tokens go out and come back."""
    rows = s.E * s.slots
    box, hidden, one = rows * s.D * s.byte, rows * s.G * s.byte, 2 * rows * s.D * s.G
    inside = box if spread else box * tensor  # where the experts are
    axes = EXPERT_AXES if spread else ("tensor",)
    there, back = ("all-gather", inside), ("reduce-scatter", box)
    if spread:
        there = back = ("all-to-all", box)
    sends = [
        Send("expert dispatch", axes, there, back, "expert_in"),
        Send("expert return", axes, back, there, "expert_out"),
    ]
    out = s.bt * s.K * s.D * s.byte
    products = [Product("experts", 2 * one, "expert_hidden"), Product("experts", one, "expert_out")]
    kept = {"expert_in": inside, "expert_hidden": 2 * hidden, "expert_out": out}
    # Beside the hidden layer: numbers of slots and choices, and each choice's result.
    residuals = inside + 6 * hidden + out + rows * FLOAT + s.bt * s.K * FLOAT
    return Layer(products, sends, kept, residuals, 2 * inside + 3 * hidden + out)


def moe(s: Sizes, c: utils.Config) -> Layer:
    """Router, routed and shared experts."""
    layer = experts(s, model.spread_experts(c), c.mesh.tensor)
    if s.x:
        layer += swiglu("shared_experts", "shared experts", s, s.x)
    router = Layer(
        [Product("router", 2 * s.bt * s.D * s.E, ALWAYS)],
        residuals=norm_residuals(s, s.D, s.bt)
        + s.bt * s.D * FLOAT
        + s.bt * s.E * (3 * FLOAT + 1)
        + s.bt * s.K * (2 * FLOAT + s.byte)
        + 4 * s.bt * FLOAT
        + s.b * s.E * FLOAT,
    )
    return router + layer


# --- over layers and schedule ---------------------------------------------------------------------


class Step:
    """A config's layers on one chip, and how often each runs in a step."""

    def __init__(self, config: utils.Config, platform: str):
        m, mesh = config.model, config.mesh
        self.config, self.sizes = config, Sizes(config, platform)
        self.declared = model.declare(config)
        self.schedule = passes.schedule_of(config)
        s = self.sizes
        self.dense, self.moe = attention(s) + mlp(s), attention(s) + moe(s, config)
        self.block = [(self.dense, m.dense_layers), (self.moe, m.moe_layers)]
        self.in_blocks = {id(w) for w in jax.tree.leaves(self.declared.blocks)}
        self.in_prefix = {id(w) for w in jax.tree.leaves(self.declared.first.prefix)}
        self.ranks = dict(zip(MESH_AXES, mesh.shape, strict=True))
        self.chips = math.prod(mesh.shape)
        self.M = config.train.microbatches
        self.per_chunk = m.blocks // (mesh.pipeline * mesh.virtual)
        # Blocks that a chip runs forward, and as many backward: those of its tasks, and all.
        self.useful = self.schedule.work * self.per_chunk
        self.run = (self.schedule.work + mesh.pipeline - 1) * self.per_chunk

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes anything again."""
        return self.config.train.remat != "none"

    def again(self, name: str | None) -> int:
        """1 if what `name` says of a result makes the backward pass compute it again."""
        names = self.config.train.remat.split(",")
        return int(self.recomputes and name is not NEVER and name not in names)

    def kept(self, layer: Layer) -> int:
        """Bytes that one layer leaves for its backward pass."""
        if not self.recomputes:
            return layer.residuals
        s, names = self.sizes, self.config.train.remat.split(",")
        x = s.bt * s.D * s.byte
        return x + sum(size for name, size in layer.kept.items() if name in names)

    def alive(self, layer: Layer) -> int:
        """Bytes that a layer's backward pass holds beside weights and what is kept: what it works
        on, or all that it computed again for it.
        """
        again = layer.residuals - self.kept(layer) if self.recomputes else 0
        return max(layer.working, again)

    def elements(self, w: Weight, gathered: bool = False) -> int:
        """Elements of a weight on this chip, at rest or whole along fsdp."""
        axes = [a for i, axes in enumerate(w.cuts) for a in axes]
        if gathered and w.gathered_dim is not None:
            axes.remove("fsdp")
        return w.size // math.prod(self.ranks[axis] for axis in axes)

    @property
    def block_elements(self) -> int:
        """Elements of one block's weights, whole along fsdp."""
        blocks = self.config.mesh.virtual * self.per_chunk  # of this chip
        leaves = jax.tree.leaves(self.declared.blocks)
        return sum(self.elements(w, gathered=True) for w in leaves) // blocks

    def gathered_per_layer(self, w: Weight) -> bool:
        """Whether a weight is gathered each time that its layer runs, and not once per step."""
        layers = id(w) in self.in_blocks or id(w) in self.in_prefix
        return self.config.fsdp.gather == "layer" and layers


def flops_by_part(step: Step) -> dict[str, dict[str, int]]:
    """{part: {forward, backward, recomputed, bubble}} of matrix products.

    Backward is twice forward. Recomputed: what train.remat does not keep. Bubble: what a chip runs
    in ticks in which the schedule has no task for it.
    """
    ways = ("forward", "backward", "recomputed", "bubble")
    parts: dict[str, dict[str, int]] = {}

    def add(part: str, **more: int) -> None:
        found = parts.setdefault(part, dict.fromkeys(ways, 0))
        for way, count in more.items():
            found[way] += count

    for layer, count in step.block:
        for p in layer.products:
            again, each = step.again(p.again), p.flops * count
            anew = p.anew * count
            idle = (step.run - step.useful) * ((3 + again) * each + anew)
            add(
                p.part,
                forward=step.useful * each,
                backward=2 * step.useful * each,
                recomputed=step.useful * (again * each + anew),
                bubble=idle,
            )
    m, s = step.config.model, step.sizes
    for p in step.dense.products:  # of the prefix, whose forward runs anew before its backward
        each, anew = (step.M * m.prefix_layers * count for count in (p.flops, p.anew))
        again = 1 + step.again(p.again)
        add(p.part, forward=each, backward=2 * each, recomputed=again * each + anew)
    each = step.M * 2 * s.bT * s.D * s.v
    add("output", forward=each, backward=2 * each)
    return parts


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

    def layer_sends(layer: Layer, forward: int, backward: int) -> None:
        for send in layer.sends:
            kind, size = send.forward
            add(send.cause, send.axes, kind, size, forward + backward * step.again(send.again))
            add(f"{send.cause}, backward", send.axes, *send.backward, backward)

    m, M = step.config.model, step.M
    for layer, count in step.block:
        layer_sends(layer, step.run * count, step.run * count)
    layer_sends(step.dense, 2 * M * m.prefix_layers, M * m.prefix_layers)
    _ends(step, add)
    _weights(step, add, sums_everywhere(step, chip, ("fsdp",)))
    return [
        Traffic(cause, axes, kind, size, math.prod(step.ranks[a] for a in axes))
        for (cause, axes, kind), size in found.items()
    ]


def sums_everywhere(step: Step, chip: Chip | None, axes: tuple[str, ...]) -> bool:
    """Whether a reduce-scatter becomes an all-reduce, as libtpu makes one over a whole slice."""
    whole = math.prod(step.ranks[a] for a in axes) == step.chips
    return chip is not None and chip.is_tpu and whole


def _ends(step: Step, add: Callable[..., None]) -> None:
    """Collectives of the pipeline, the embedding and the loss."""
    s, M = step.sizes, step.M
    own, whole = s.bt * s.D * s.byte, s.bT * s.D * s.byte
    ticks = step.schedule.work + step.schedule.pipeline - 1
    # A cooldown of one tick is no loop, and compilers leave out its send, which nobody reads.
    sends = 2 * ticks - (step.schedule.stages == 2)
    add("pipeline sends", ("pipeline",), "collective-permute", own, sends)
    times = M * (2 if step.config.model.prefix_layers else 1)
    add("embedding", ("pipeline",), "all-reduce", whole, times)
    add("embedding", ("tensor",), "reduce-scatter", own, times)
    add("embedding, backward", ("pipeline",), "all-reduce", own, M)
    add("embedding, backward", ("tensor",), "all-gather", whole, M)
    add("last stage to all", ("pipeline",), "all-reduce", own, M)
    add("loss input", ("tensor",), "all-gather", whole, M)
    add("loss input, backward", ("tensor",), "reduce-scatter", own, M)
    add("loss input, backward", ("pipeline",), "all-reduce", s.bt * s.D * FLOAT, M)
    # The largest logit, the sum of exponentials, and the target's logit.
    add("vocabulary reductions", VOCABULARY_AXES, "all-reduce", 3 * s.bT * FLOAT, M)


def _weights(step: Step, add: Callable[..., None], narrow: bool) -> None:
    """Collectives of weights and of their gradients.

    narrow  gradients of a gather per layer are summed in the type that they are computed in: what
            libtpu makes of a sum over a whole slice.
    """
    declared = step.declared
    blocks = step.config.mesh.virtual * step.per_chunk  # of this chip
    for w in jax.tree.leaves(declared):
        byte = FLOAT if w.float32 else step.sizes.byte
        own, whole = step.elements(w), step.elements(w, gathered=True)
        if w.gathered_dim is not None:
            forward = backward = 1
            per_layer = step.gathered_per_layer(w)
            if per_layer and id(w) in step.in_blocks:
                own, whole = own // blocks, whole // blocks
                forward, backward = 2 * step.run, step.run
            elif per_layer:
                forward, backward = 3 * step.M, step.M
            add("weights", ("fsdp",), "all-gather", whole * byte, forward)
            grad = byte if narrow and per_layer else FLOAT
            add("gradients", ("fsdp",), "reduce-scatter", own * grad, backward)
        replicated = tuple(axis for axis in MESH_AXES if axis not in w.axes)
        add("replicated gradients", replicated, "all-reduce", step.elements(w) * FLOAT)
    add("gradient norm", MESH_AXES, "all-reduce", FLOAT * len(jax.tree.leaves(declared)))


def memory(step: Step) -> dict[str, int]:
    """Bytes by part, at the fullest moment of a step."""
    s, declared = step.sizes, step.declared
    parts: Counter = Counter()
    for w in jax.tree.leaves(declared):
        byte = FLOAT if w.float32 else s.byte
        held = step.elements(w, gathered=not step.gathered_per_layer(w))
        parts["weights"] += step.elements(w) * FLOAT
        parts["optimizer state"] += step.elements(w) * FLOAT * MOMENTS
        parts["weights in use"] += held * byte
        parts["gradients"] += held * FLOAT
    parts["batch"] = 4 * step.M * s.bT * FLOAT
    kept = sum(step.kept(layer) * count for layer, count in step.block)
    parts["saved activations"] = step.schedule.slots * step.per_chunk * kept
    parts["pipeline buffers"] = 4 * s.bt * s.D * s.byte
    part, size = max(working(step).items(), key=lambda item: item[1])
    parts[part] = size
    lasting = parts["weights"] + parts["optimizer state"] + parts["batch"]
    parts["gaps"] = round(GAPS * (parts.total() - lasting))
    return dict(parts)


def working(step: Step) -> dict[str, int]:
    """Bytes that only one moment needs, by what happens in it."""
    c, s = step.config, step.sizes
    tokens = s.bT // model.chunks(s.bT, c.train.loss_chunk_tokens)
    table = s.v * s.D
    kept = sum(step.kept(layer) * count for layer, count in step.block)
    alive = max(step.alive(layer) for layer, count in step.block if count)
    prefix = c.model.prefix_layers
    return {
        # Logits, their gradient, and where there are several chunks the sum of the table's.
        "logits": tokens * s.v * (FLOAT + s.byte)
        + s.bT * s.D * s.byte
        + (table * FLOAT if tokens < s.bT else 0),
        # A block's weights and their gradients, its part of the ring, and one of its layers.
        "one layer": 2 * step.block_elements * s.byte + kept + alive,
        # All of the prefix's layers, whose forward pass runs anew before its backward pass.
        "prefix layers": (prefix * step.kept(step.dense) + step.alive(step.dense) if prefix else 0),
    }


# --- prediction -----------------------------------------------------------------------------------

USES = {"forward": 2, "recomputed": 2, "backward": 3}  # of a layer's results: written and read


def memory_traffic(step: Step) -> dict[str, int]:
    """Bytes that go through a chip's memory in a step, by cause.

    An estimate, by rule: what the backward pass finds of a layer is written and read once in its
    forward pass, as often where it is computed again and not kept, and read, read and written once
    more in its backward pass; each pass over a block reads its weights, and a backward one adds to
    float32 gradients, as does each chunk of the loss; the optimizer reads gradients twice, and
    reads and writes weights and moments.
    """
    c, s = step.config, step.sizes

    def results(layer: Layer) -> int:
        again = layer.residuals - step.kept(layer) if step.recomputes else 0
        once = USES["forward"] + USES["backward"]
        return once * layer.residuals + USES["recomputed"] * max(0, again)

    here = sum(step.elements(w) for w in jax.tree.leaves(step.declared))
    prefix = step.M * c.model.prefix_layers
    chunks = step.M * model.chunks(s.bT, c.train.loss_chunk_tokens)
    table = s.v * s.D
    passes = 2 + step.recomputes
    return {
        "activations": step.run * sum(results(layer) * count for layer, count in step.block)
        + prefix * (results(step.dense) + USES["forward"] * step.dense.residuals),
        "weights in use": (passes * step.run * step.block_elements + 2 * chunks * table) * s.byte,
        "gradients": 2 * FLOAT * (step.run * step.block_elements + (chunks + step.M) * table),
        "logits": 5 * step.M * s.bT * s.v * (FLOAT + s.byte),
        "optimizer": 8 * FLOAT * here,
    }


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to need of one chip. Times are None where the chip is not known."""

    parameters: int
    active_parameters: int
    tokens_per_step: int
    attention: str  # xla or splash
    memory_bytes_per_chip: int
    flops_per_chip: int
    model_flops_per_chip: float  # as executed without waste: see flops.py
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

    def over(self, compiled: Mapping[str, Any]) -> dict[str, float]:
        """Predicted over compiled: memory, FLOPs, and bytes along axes that carry 1 % or more.

        compiled  the fields of a compiler.Compiled.
        """
        found = {
            "memory": self.memory_bytes_per_chip / compiled["memory_bytes_per_chip"],
            "FLOPs": self.flops_per_chip / compiled["flops_per_chip"],
        }
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


def predict(config: utils.Config, chip: Chip | None, platform: str | None = None) -> Prediction:
    """What a step of this config costs each of its mesh's chips.

    chip      None for one whose figures are not known: no times.
    platform  of such a one; the CPU if not said.
    Raises    ValueError where the model cannot be cut over the mesh, or its attention not run.
    """
    step = Step(config, platform or platform_of(chip))
    t, share = config.train, step.sizes.share
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
    chips = math.prod(config.mesh.shape)
    return Prediction(
        parameters=parameters,
        active_parameters=active,
        tokens_per_step=t.sequences * t.sequence_length,
        attention=step.sizes.kernel,
        memory_bytes_per_chip=sum(held.values()),
        flops_per_chip=total,
        model_flops_per_chip=flops.executed_flops_per_step(config, scores=share)["total"] / chips,
        collective_bytes_per_chip=by_axes,
        bubble=float(step.schedule.bubble),
        memory=held,
        flops=flops_of,
        traffic=sends,
        memory_traffic=through,
        seconds=chip and seconds(step, chip, total, sum(through.values()), sends),
        mfu_flops_per_token=flops.palm_flops_per_token(config.model, t.sequence_length),
        chip=chip,
        chips=chips,
    )


def seconds(
    step: Step, chip: Chip, flops_per_chip: int, memory_bytes: int, sends: list[Traffic]
) -> dict[str, float]:
    """How long each resource is at work in a step, at its peak."""
    found = {
        "compute": flops_per_chip
        / (chip.float32_flops if step.sizes.byte == FLOAT else chip.flops),
        "memory": memory_bytes / chip.memory_bandwidth,
    }
    for sent in sends:
        axes = "+".join(sent.axes)
        found[axes] = found.get(axes, 0.0) + link_seconds(step, chip, sent)
    return found


def seconds_again(step: Step, chip: Chip | None, layer: Layer, name: str) -> float:
    """Time to make again what `name` of train.remat keeps of a layer; where the chip is not known,
    in units of a FLOP.
    """
    found = sum(p.flops for p in layer.products if p.again == name) / (chip.flops if chip else 1)
    for send in layer.sends:
        axes = tuple(a for a in MESH_AXES if a in send.axes and step.ranks[a] > 1)
        if chip and axes and send.again == name:
            kind, size = send.forward
            ranks = math.prod(step.ranks[a] for a in axes)
            found += link_seconds(step, chip, Traffic(send.cause, axes, kind, size, ranks))
    return found


def link_seconds(step: Step, chip: Chip, sent: Traffic) -> float:
    """At the full bandwidth of the links that the group's ranks have."""
    ranks, strides, stride = list(step.ranks.items()), {}, 1
    for axis, size in reversed(ranks):
        strides[axis] = stride
        stride *= size
    groups = tuple((step.ranks[axis], strides[axis]) for axis in sent.axes)
    whole = sent.result_bytes * (sent.ranks if sent.kind == "reduce-scatter" else 1)
    return chip.collective_s(sent.kind, whole, groups, step.chips)
