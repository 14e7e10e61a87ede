"""The architecture: attention, dense and expert feed-forward, and blocks of these layers.

Every layer is a function of (weights, activations) that runs inside `shard_map`. Its activations
are this rank's slices. Its weights are already gathered over fsdp, by sharded_model.gather_params.
Each collective over other axes is a line in the layer, or in experts.py and dropless.py, which have
the dispatch of tokens to experts. vocabulary.py has embedding and loss. The conventions are those
of DeepSeek-V3 (arXiv:2412.19437), with Llama's rotary pairs. The order in which layers run is in
sharded_model.py and pipeline.py.

Letters. UPPER case is the global dimension, lower case this rank's slice of it:
    B sequences       T positions                       D model width       M microbatches
    N query heads     Y heads of keys and values        A width of queries and keys
    W value width     F hidden width                    X inputs of the heads: attention.py
    O values of all heads side by side, N * W
    E experts         K experts per token               V vocabulary, padded
    G hidden width of an expert                         I hidden width of all shared experts
A value whose name starts with `partial_` is still to be reduced over ranks.

Words with one meaning each:
    block         a group of consecutive layers, as Block declares it
    tile          rows or positions that are multiplied at once: dropless.py, device_kernels/
    model chunk   a virtual stage of a pipeline rank: schedule.py, where it is `chunk`
    chunk         in the loss, tokens whose logits exist at once: vocabulary.py
    schedule      of a pipeline; an optimizer has learning rates
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import flax
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import float8
import lora
import matrix
import utils
import weights
from attention import Attention, SoftmaxAttention, kind_of, norm_weight, with_norms
from dropless import dropless_experts
from experts import (
    Activation,
    Experts,
    SharedExperts,
    capacity_experts,
    uses_expert_parallelism,
)
from routing import Routing, balance, route
from utils import BATCH_AXES, MESH_AXES, SEQUENCE_AXES, ConfigError, LayerRun
from vocabulary import vocab_table
from weights import RESIDUAL_SCALE, Size, matmul, normal, ones, rms_norm, weight, zeros

# --- weights --------------------------------------------------------------------------------------


class FeedForward(Protocol):
    """What a layer uses of a kind of feed-forward network."""

    @classmethod
    def declare(cls, config: utils.Config, size: Mapping[str, Size]) -> Self:
        """Return the Weights."""

    def add(
        self, x_btD: jax.Array, options: "ForwardOptions", position: "LayerPosition"
    ) -> tuple[jax.Array, Routing | None]:
        """Return x + the output, [b, t, D], and the routing if it has experts."""


@flax.struct.dataclass
class Mlp:
    """Gated feed-forward network (arXiv:2002.05202, equation 6)."""

    norm: jax.Array | None = norm_weight()
    gate: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    up: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    down: jax.Array = weight("F/tensor D/fsdp", normal("F", RESIDUAL_SCALE), matrix="F x D")
    norm_after: jax.Array | None = norm_weight()

    @classmethod
    def declare(cls, config: utils.Config, size: Mapping[str, Size]) -> "Mlp":
        return with_norms(weights.declare(cls, size), config.model)

    def add(
        self, x_btD: jax.Array, options: "ForwardOptions", position: "LayerPosition"
    ) -> tuple[jax.Array, None]:
        return mlp(self, x_btD, options, position), None


@flax.struct.dataclass
class Moe:
    """Mixture of experts (arXiv:2412.19437, section 2.1.2).

    bias changes which experts a token chooses, and not their weights. The other biases are those of
    gpt-oss (arXiv:2508.10925): of the router, and of the experts' outputs.
    """

    experts: Experts
    shared: SharedExperts | None
    norm: jax.Array | None = norm_weight()
    router: jax.Array = weight("D E", normal("D"), float32=True)
    bias: jax.Array = weight("E", zeros, decay=False, trained=False, float32=True)
    router_bias: jax.Array | None = weight("E", zeros, decay=False, float32=True)
    output_bias: jax.Array | None = weight("E D/fsdp", zeros, decay=False, active=("K", "E"))
    norm_after: jax.Array | None = norm_weight()

    @classmethod
    def declare(cls, config: utils.Config, size: Mapping[str, Size]) -> "Moe":
        m, parallel = config.model, uses_expert_parallelism(config)
        experts = weights.declare(Experts, size, layout=int(parallel), expert_parallel=parallel)
        experts = weights.kept(experts, gate_bias=m.experts_bias, up_bias=m.experts_bias)
        shared = weights.declare(SharedExperts, size) if m.n_shared_experts else None
        w = weights.declare(cls, size, experts=experts, shared=shared)
        w = weights.kept(w, router_bias=m.experts_bias, output_bias=m.experts_bias)
        return with_norms(w, m)

    def add(
        self, x_btD: jax.Array, options: "ForwardOptions", position: "LayerPosition"
    ) -> tuple[jax.Array, Routing | None]:
        return moe(self, x_btD, options, position)


FEED_FORWARDS: dict[str, type[FeedForward]] = {"mlp": Mlp, "moe": Moe}


@flax.struct.dataclass
class DenseLayer:
    attention: Attention
    mlp: FeedForward

    @property
    def feed_forward(self) -> FeedForward:
        return self.mlp


@flax.struct.dataclass
class MoeLayer:
    attention: Attention
    moe: FeedForward

    @property
    def feed_forward(self) -> FeedForward:
        return self.moe


# Weights of the layers of a block, by the name of their run: a stack, but for a single layer with
# experts (utils.LayerRun.stacked).
Block = dict[str, DenseLayer | MoeLayer]


@flax.struct.dataclass
class InputLayers:
    """Weights used before the first stage."""

    prefix: DenseLayer | None
    embedding: jax.Array = vocab_table()


@flax.struct.dataclass
class OutputLayers:
    """Weights used after the last stage. A tied model has no `output`."""

    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    output: jax.Array | None = vocab_table()


class EmbeddingAndHead(NamedTuple):
    """The weights outside the stages, together, so that a tied embedding has one gradient."""

    first: InputLayers
    last: OutputLayers

    @property
    def output(self) -> jax.Array:
        return self.first.embedding if self.last.output is None else self.last.output


@flax.struct.dataclass
class Transformer:
    first: InputLayers
    blocks: Block
    last: OutputLayers


def sizes(config: utils.Config, run: LayerRun) -> Mapping[str, Size]:
    """Return the global size of each letter of a run's layouts, with the flag that sets it."""
    m, mesh = config.model, config.mesh
    flags = {
        "D": "hidden_size",
        "N": "num_attention_heads",
        "F": "intermediate_size",
        "G": "moe_intermediate_size",
        "E": "n_routed_experts",
        "K": "num_experts_per_tok",
    } | kind_of(m, run).FLAGS
    out = {letter: Size(getattr(m, flag), f"model.{flag}") for letter, flag in flags.items()}
    stages = mesh.virtual * mesh.pipeline
    if m.blocks % stages:
        layers = m.first_k_dense_replace + -(-m.blocks // stages) * stages * m.period
        fit = [str(n) for n in range(1, m.blocks + 1) if m.blocks % (n * mesh.virtual) == 0]
        raise ConfigError(
            f"--model.num_hidden_layers {m.num_hidden_layers} is {m.blocks} blocks of "
            f"{m.period}, which are not divisible by --mesh.pipeline {mesh.pipeline} "
            f"x --mesh.virtual {mesh.virtual}. Use --model.num_hidden_layers {layers}, or "
            f"--mesh.pipeline {' or '.join(fit) or '1 --mesh.virtual 1'}."
        )
    padded = f"{m.vocab_size} (the tokenizer's; {m.padded_vocab_size} with padding)"
    return out | {
        "V": Size(m.padded_vocab_size, "model.vocab_size", fixed=padded),
        "I": Size(
            m.n_shared_experts * m.moe_intermediate_size,
            "model.moe_intermediate_size",
            m.n_shared_experts,
        ),
        "virtual": Size(mesh.virtual, "mesh.virtual"),
        "stage": Size(mesh.pipeline, "mesh.pipeline"),
        "block": Size(m.blocks // stages, "model.num_hidden_layers"),
    }


def declare(config: utils.Config) -> Transformer:
    """Return the model's tree of Weights.

    Blocks are stacked [virtual, stage, block]. Row-major order is the order of the layers.

    Raises  ConfigError for a size that cannot be sharded over the mesh.
    """
    m, runs = config.model, {}
    for run in m.layer_runs:
        size = sizes(config, run) | {"layer": Size(run.layers, "model.num_hidden_layers")}
        layer, word = (MoeLayer, "moe") if run.experts else (DenseLayer, "mlp")
        parts = kind_of(m, run), FEED_FORWARDS[word]
        one = layer(*(part.declare(config, size) for part in parts))
        runs[run.name] = weights.stacked(one, "layer", size) if run.stacked else one
    prefix = runs.pop("prefix", None)
    last = weights.declare(OutputLayers, size)
    tree = Transformer(
        first=weights.declare(InputLayers, size, prefix=prefix),
        blocks=weights.stacked(runs, "virtual stage/pipeline block", size),
        last=last.replace(output=None) if m.tie_word_embeddings else last,
    )
    words = [
        run.attention for run in m.layer_runs if not issubclass(kind_of(m, run), SoftmaxAttention)
    ]
    if words and config.mesh.context > 1:
        raise ConfigError(
            f"layers of {words[0]} need all positions on a rank. Use --mesh.context 1."
        )
    tree = weights.named(tree)
    if config.lora.rank:
        tree = lora.adapted(config, tree)
    weights.check_divisible(tree, dict(zip(MESH_AXES, config.mesh.shape, strict=True)))
    return tree


# --- arguments of layers --------------------------------------------------------------------------


@flax.struct.dataclass
class Batch:
    """This rank's sequences: [M, b, T] each, or [b, T] for one microbatch; segments have S."""

    tokens: jax.Array
    targets: jax.Array
    loss_weights: jax.Array  # float32; 0 excludes a target from the loss
    segments: jax.Array  # index of the document within the window
    microbatch: jax.Array | None = None  # microbatch index: [M], or a scalar


class LayerPosition(NamedTuple):
    """The step, microbatch and layer from which a dropout key is derived."""

    step: jax.Array
    microbatch: jax.Array
    layer: jax.Array


class ForwardOptions(NamedTuple):
    """Options of a forward pass."""

    model: utils.Model
    seed: int
    capacity_factor: float  # see experts.expert_capacity; 0: dropless
    dropout: float = 0.0
    attention_kernel: str = "xla"  # this and the next two: see device_kernels/choice.py
    experts_kernel: str = "tiles"
    fused_loss: bool = False
    ordered: bool = False  # whether collectives wait for loops: runtime/collective_order.py
    quantized: bool = False  # whether feed-forward layers multiply in FP8: float8.py
    # What decoding replaces: activations of all positions on every tensor rank, attention over a
    # cache, and experts read where they are.
    sequence_parallel: bool = True
    attend_to: Callable | None = None  # decode.attend_to_cache
    run_experts: Callable | None = None  # decode.run_experts


# --- layers ---------------------------------------------------------------------------------------


def gather_sequence(x_btD: jax.Array, name: str, parallel: bool = True) -> jax.Array:
    """[b, t, .] -> [b, T, .], under a name for profiles.

    parallel     whether the sequence is sharded over tensor.
    Collectives  all_gather(tensor).
    """
    if not parallel:
        return x_btD
    with jax.named_scope(name):
        return lax.all_gather(x_btD, "tensor", axis=1, tiled=True)


def scatter_sequence(partial_bTD: jax.Array, name: str, parallel: bool = True) -> jax.Array:
    """Partial sums [b, T, D] -> this rank's slice [b, t, D] of the sum, under a name.

    parallel     whether the sequence is sharded over tensor.
    Collectives  psum_scatter(tensor), or psum(tensor) of a sequence that is not sharded.
    """
    with jax.named_scope(name):
        if not parallel:
            return lax.psum(partial_bTD, "tensor")
        return lax.psum_scatter(partial_bTD, "tensor", scatter_dimension=1, tiled=True)


def dropout(
    y_btD: jax.Array, options: ForwardOptions, position: LayerPosition, branch: int
) -> jax.Array:
    """Dropout (arXiv:1207.0580), scaled to keep the mean.

    The key is derived here, from integers, so that no mask is a residual of the backward pass.
    """
    if not options.dropout:
        return y_btD
    key = jax.random.key(options.seed)
    # Ranks with other data draw other masks. Pipeline ranks differ by their layer.
    for number in (*position, branch, lax.axis_index(BATCH_AXES), lax.axis_index(SEQUENCE_AXES)):
        key = jax.random.fold_in(key, number)
    kept = jax.random.bernoulli(key, 1 - options.dropout, y_btD.shape)
    return jnp.where(kept, y_btD / (1 - options.dropout), 0)


@jax.named_scope("attention")
def attention(
    w: Attention,
    x_btD: jax.Array,
    context: Any,
    options: ForwardOptions,
    position: LayerPosition,
    run: LayerRun,
) -> tuple[jax.Array, Any]:
    """x + attention of x, and what decoding caches.

    x_btD    [B/replica+fsdp, T/context+tensor, D]; so is the result.
    context  attention.Context, or what options.attend_to takes instead, if it is set.
    Collectives  all_gather(tensor) of the kind's inputs [b, T, X]; psum_scatter(tensor) of
                 [b, T, D].
    """
    m, parallel = options.model, options.sequence_parallel
    inputs_btX = w.inputs(normed(x_btD, w.norm, m), m)
    inputs_bTX = checkpoint_name(gather_sequence(inputs_btX, "latents", parallel), "latents")
    if options.attend_to is None:
        y_bTnW, cached = w.mix(inputs_bTX, context, m, run, options.attention_kernel), None
    else:
        y_bTnW, cached = options.attend_to(w, inputs_bTX, context, m, position.layer, run)
    # o is contracted: each tensor rank holds the partial sum of its heads.
    out_oD = matrix.of_side(w.out, "a", lambda rows: lax.collapse(rows, 0, 2))
    partial_bTD = matmul("bTo,oD->bTD", lax.collapse(y_bTnW, 2), out_oD)
    y_btD = checkpoint_name(scatter_sequence(partial_bTD, "output", parallel), "attention_out")
    if w.out_bias is not None:
        y_btD += jnp.expand_dims(w.out_bias, (0, 1))
    return x_btD + dropout(normed(y_btD, w.norm_after, m), options, position, 0), cached


@jax.named_scope("mlp")
def mlp(w: Mlp, x_btD: jax.Array, options: ForwardOptions, position: LayerPosition) -> jax.Array:
    """x + down(act(gate x, up x)).

    x_btD  [B/replica+fsdp, T/context+tensor, D]; so is the result.
    Collectives  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    h_btD = normed(x_btD, w.norm, options.model)
    y_btD = normed(feed_forward(w, h_btD, options), w.norm_after, options.model)
    return x_btD + dropout(y_btD, options, position, 1)


def feed_forward(w: Mlp | SharedExperts, h_btD: jax.Array, options: ForwardOptions) -> jax.Array:
    """`gated` of all positions, divided among tensor ranks by hidden width.

    Collectives  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    parallel = options.sequence_parallel
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input", parallel), "mlp_in")
    act = Activation.of(options.model)
    y_bTD = gated(h_bTD, (w.gate, w.up), w.down, act, options.quantized)
    return scatter_sequence(y_bTD, "output", parallel)


def gated(
    h_bTD: jax.Array, gate_up: Any, down: jax.Array, act: Activation, quantized: bool = False
) -> jax.Array:
    """down(act(gate h, up h)): this tensor rank's partial sum over F.

    quantized  whether its products are in FP8.
    """
    gate_bTf, up_bTf = products(h_bTD, gate_up, quantized, "mlp_in")
    # Both products are named, and not their combination, whose gradient needs both of them.
    gate_bTf, up_bTf = checkpoint_name((gate_bTf, up_bTf), "hidden")
    [partial_bTD] = products(act(gate_bTf, up_bTf), (down,), quantized)
    return partial_bTD


def products(
    x_bTi: jax.Array, ws: tuple[jax.Array, ...], quantized: bool, name: str = float8.RESIDUAL
) -> tuple[jax.Array, ...]:
    """Return x @ w for each matrix w [i, o], in FP8 or in the dtype of x.

    name  of x in FP8 in `train.remat`
    """
    if quantized:
        return float8.matmul(x_bTi, ws, name)
    return tuple(matmul("bTi,io->bTo", x_bTi, w) for w in ws)


@jax.named_scope("moe")
def moe(
    w: Moe, x_btD: jax.Array, options: ForwardOptions, position: LayerPosition
) -> tuple[jax.Array, Routing | None]:
    """x + the shared experts of x + sum over each token's K experts of weight * expert(x).

    x_btD  [B/replica+fsdp, T/context+tensor, D]; so is the result.
    Collectives  those of capacity_experts or dropless_experts, and of feed_forward.
    """
    m = options.model
    h_btD = normed(x_btD, w.norm, m)
    share_btE, *choices = route(w, h_btD, m)
    if options.run_experts is not None:
        y_btD, routing = options.run_experts(w.experts, h_btD, choices), None
    else:
        partial_balance, tokens_per_expert = balance(share_btE, choices[0], m)
        if options.capacity_factor:
            factor = options.capacity_factor
            y_btD, dropped = capacity_experts(w.experts, h_btD, choices, m, factor)
        else:
            y_btD = dropless_experts(w.experts, h_btD, choices, m, options.experts_kernel)
            dropped = jnp.zeros_like(tokens_per_expert[0])
        routing = Routing(partial_balance, tokens_per_expert, dropped)
    if w.output_bias is not None:
        choice_btK, weight_btK = choices
        chosen_btKE = jax.nn.one_hot(choice_btK, m.n_routed_experts) * weight_btK[..., None]
        y_btD += matmul("btE,ED->btD", chosen_btKE.sum(2).astype(y_btD.dtype), w.output_bias)
    if w.shared is not None:
        with jax.named_scope("shared"):
            y_btD += feed_forward(w.shared, h_btD, options)
    return x_btD + dropout(normed(y_btD, w.norm_after, m), options, position, 1), routing


def normed(x_btD: jax.Array, scale_D: jax.Array | None, m: utils.Model) -> jax.Array:
    """RMSNorm, or x where `--model.norms` has no norm."""
    return x_btD if scale_D is None else rms_norm(x_btD, scale_D, m.rms_norm_eps)


def layer(
    w: DenseLayer | MoeLayer,
    x_btD: jax.Array,
    context: Any,
    options: ForwardOptions,
    position: LayerPosition,
    run: LayerRun,
) -> tuple[jax.Array, tuple[Any, Routing | None]]:
    """Return x after the layer, what decoding caches, and the routing if it has experts."""
    x_btD, cached = attention(w.attention, x_btD, context, options, position, run)
    x_btD, routing = w.feed_forward.add(x_btD, options, position)
    return x_btD, (cached, routing)


def stacked_layers(
    w: Any, x_btD: jax.Array, first: jax.Array, layer: Callable
) -> tuple[jax.Array, tuple[Any, Routing | None]]:
    """Run layers with stacked weights, or indices of them. Return what `layer` does, stacked.

    first  number of the first layer in the model.
    layer  `layer`, as (weights, x, number of the layer).
    """

    def body(x_btD: jax.Array, one: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
        w, i = one
        return layer(w, x_btD, first + i)

    numbers = jnp.arange(len(jax.tree.leaves(w)[0]), dtype=jnp.int32)
    return lax.scan(body, x_btD, (w, numbers))


def block(
    w: Mapping[str, Any],
    x_btD: jax.Array,
    number: jax.Array,
    m: utils.Model,
    layers: Mapping[str, Callable],
) -> tuple[jax.Array, Any, Routing | None]:
    """Run the layers of a block.

    w, layers  weights and `layer` by the name of the run, as (weights, x, number of the layer).
    Returns    x, what decoding caches of each layer, and the routing, which has a dimension for
               layers with experts if there are several.
    """
    cached, routings = [], []
    for run in m.runs:
        first = m.first_k_dense_replace + number * m.period + run.first
        if run.stacked:
            x_btD, (new, routing) = stacked_layers(w[run.name], x_btD, first, layers[run.name])
        else:
            x_btD, (new, routing) = layers[run.name](w[run.name], x_btD, first)
            new = with_dimension(new)
            routing = with_dimension(routing) if m.moe_layers > 1 else routing
        cached.append(new)
        routings += [routing] if routing is not None else []
    routing = concatenated(routings) if len(routings) > 1 else (*routings, None)[0]
    return x_btD, concatenated(cached), routing


def with_dimension(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[None], tree)


def concatenated(parts: list) -> Any:
    """Concatenate the arrays of trees along their first dimension."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
