"""The architecture: embedding, attention, dense and expert feed-forward, blocks, loss.

Every layer is a function of (weights, activations) that runs inside `shard_map`. Its activations
are this rank's slices. Its weights are already gathered over fsdp, by sharded_model.gather_params.
Each collective over other axes is a line in the layer. The conventions are those of DeepSeek-V3
(arXiv:2412.19437), with Llama's rotary pairs. The order in which layers run is in sharded_model.py
and pipeline.py.

Letters. UPPER case is the global dimension, lower case this rank's slice of it:
    B sequences        T query positions     S key positions      D model width
    V vocabulary, padded                     M microbatches       n tokens of this rank (b * t)
    N query heads      Y heads of keys and values                 A width of queries and keys
    W value width      F hidden width        G hidden width of an expert
    E experts          K experts per token   Z expert groups      X hidden width of shared experts
    J capacity slots of an expert for the tokens of one rank
n is the heads of this rank in names with a head width. A value whose name starts with `partial_` is
still to be reduced over ranks.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import utils
import weights
from attention import Attention, attend, kind_of
from utils import BATCH_AXES, EXPERT_AXES, MESH_AXES, VOCABULARY_AXES, ConfigError
from weights import (
    RESIDUAL_SCALE,
    Size,
    float32_product,
    matmul,
    normal,
    ones,
    rms_norm,
    vary,
    varying,
    weight,
    zeros,
)

# --- weights --------------------------------------------------------------------------------------

# guide: weights


def vocab_table() -> Any:
    """The embedding or output matrix. Its rows are sharded over pipeline and tensor, so that all
    stages hold the same share (arXiv:2411.05288).
    """
    return weight("V/pipeline+tensor D/fsdp", normal("D"), group="embedding")


@flax.struct.dataclass
class Mlp:
    """Gated feed-forward network (arXiv:2002.05202, equation 6)."""

    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    gate: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    up: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    down: jax.Array = weight("F/tensor D/fsdp", normal("F", RESIDUAL_SCALE), matrix="F x D")


@flax.struct.dataclass
class ExpertParallelExperts:
    """Routed experts under expert parallelism: each is complete on one rank of fsdp x tensor."""

    # JAX treats two dataclasses with equal fields as one structure, and reuses what it traced with
    # one for the other. A static field with different values keeps them apart.
    layout: str = flax.struct.field(pytree_node=False, default="expert_parallel", kw_only=True)
    gate: jax.Array = weight("E/fsdp+tensor D G", normal("D"), matrix="D x G", active=("K", "E"))
    up: jax.Array = weight("E/fsdp+tensor D G", normal("D"), matrix="D x G", active=("K", "E"))
    down: jax.Array = weight(
        "E/fsdp+tensor G D", normal("G", RESIDUAL_SCALE), matrix="G x D", active=("K", "E")
    )


@flax.struct.dataclass
class ShardedExperts:
    """Routed experts sharded like other weights, over fsdp and tensor, and gathered before use."""

    layout: str = flax.struct.field(pytree_node=False, default="sharded", kw_only=True)
    gate: jax.Array = weight("E D/fsdp G/tensor", normal("D"), matrix="D x G", active=("K", "E"))
    up: jax.Array = weight("E D/fsdp G/tensor", normal("D"), matrix="D x G", active=("K", "E"))
    down: jax.Array = weight(
        "E G/tensor D/fsdp", normal("G", RESIDUAL_SCALE), matrix="G x D", active=("K", "E")
    )


@flax.struct.dataclass
class SharedExperts:
    """The shared experts of all tokens, as one gated network of their summed width X."""

    gate: jax.Array = weight("D/fsdp X/tensor", normal("D"), matrix="D x X")
    up: jax.Array = weight("D/fsdp X/tensor", normal("D"), matrix="D x X")
    down: jax.Array = weight("X/tensor D/fsdp", normal("X", RESIDUAL_SCALE), matrix="X x D")


@flax.struct.dataclass
class Moe:
    """Mixture of experts (arXiv:2412.19437, section 2.1.2).

    bias changes which experts a token chooses, and not their weights.
    """

    experts: ExpertParallelExperts | ShardedExperts
    shared: SharedExperts | None
    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    router: jax.Array = weight("D E", normal("D"), float32=True)
    bias: jax.Array = weight("E", zeros, decay=False, trained=False, float32=True)


@flax.struct.dataclass
class DenseLayer:
    attention: Attention
    mlp: Mlp


@flax.struct.dataclass
class MoeLayer:
    attention: Attention
    moe: Moe


@flax.struct.dataclass
class Block:
    """Stacked dense layers, then at most one layer with experts."""

    dense: DenseLayer | None
    moe: MoeLayer | None


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


# guide: end


def sizes(config: utils.Config) -> Mapping[str, Size]:
    """Return the global size of each letter of a layout, with the flag that sets it."""
    m, mesh = config.model, config.mesh
    flags = {
        "D": "hidden_size",
        "N": "num_attention_heads",
        "F": "intermediate_size",
        "G": "moe_intermediate_size",
        "E": "n_routed_experts",
        "K": "num_experts_per_tok",
        "prefix": "first_k_dense_replace",
    }
    out = {letter: Size(getattr(m, flag), f"model.{flag}") for letter, flag in flags.items()}
    chunks = mesh.virtual * mesh.pipeline
    if m.blocks % chunks:
        layers = m.first_k_dense_replace + -(-m.blocks // chunks) * chunks * m.decoder_sparse_step
        fit = [str(n) for n in range(1, m.blocks + 1) if m.blocks % (n * mesh.virtual) == 0]
        raise ConfigError(
            f"--model.num_hidden_layers {m.num_hidden_layers} is {m.blocks} blocks of "
            f"{m.decoder_sparse_step}, which are not divisible by --mesh.pipeline {mesh.pipeline} "
            f"x --mesh.virtual {mesh.virtual}. Use --model.num_hidden_layers {layers}, or "
            f"--mesh.pipeline {' or '.join(fit) or '1 --mesh.virtual 1'}."
        )
    out |= kind_of(m).sizes(m)
    padded = f"{m.vocab_size} (the tokenizer's; {m.padded_vocab_size} with padding)"
    return out | {
        "V": Size(m.padded_vocab_size, "model.vocab_size", fixed=padded),
        "X": Size(
            m.n_shared_experts * m.moe_intermediate_size,
            "model.moe_intermediate_size",
            m.n_shared_experts,
        ),
        "virtual": Size(mesh.virtual, "mesh.virtual"),
        "stage": Size(mesh.pipeline, "mesh.pipeline"),
        "block": Size(m.blocks // chunks, "model.num_hidden_layers"),
        "dense": Size(m.dense_layers, "model.decoder_sparse_step"),
    }


def declare(config: utils.Config) -> Transformer:
    """Return the model's tree of Weights.

    Blocks are stacked [virtual, stage, block]. Row-major order is the order of the layers.

    Raises  ConfigError for a size that cannot be sharded over the mesh.
    """
    m, size = config.model, sizes(config)
    attention = kind_of(m).declare(config, size)
    dense = DenseLayer(attention=attention, mlp=weights.declare(Mlp, size))
    block = Block(
        dense=weights.stacked(dense, "dense", size) if m.dense_layers else None,
        moe=MoeLayer(attention, declare_moe(config, size)) if m.moe_layers else None,
    )
    prefix = weights.stacked(dense, "prefix", size) if m.first_k_dense_replace else None
    last = weights.declare(OutputLayers, size)
    tree = Transformer(
        first=weights.declare(InputLayers, size, prefix=prefix),
        blocks=weights.stacked(block, "virtual stage/pipeline block", size),
        last=last.replace(output=None) if m.tie_word_embeddings else last,
    )
    tree = weights.named(tree)
    weights.check_divisible(tree, dict(zip(MESH_AXES, config.mesh.shape, strict=True)))
    return tree


def declare_moe(config: utils.Config, size: Mapping[str, Size]) -> Moe:
    experts = weights.declare(
        ExpertParallelExperts if uses_expert_parallelism(config) else ShardedExperts, size
    )
    shared = weights.declare(SharedExperts, size) if config.model.n_shared_experts else None
    return weights.declare(Moe, size, experts=experts, shared=shared)


def uses_expert_parallelism(config: utils.Config) -> bool:
    """Whether each expert lives on one rank of fsdp x tensor, and is not sharded itself."""
    if config.model.experts_layout == "auto":
        return config.model.n_routed_experts % (config.mesh.fsdp * config.mesh.tensor) == 0
    return config.model.experts_layout == "expert_parallel"


# --- layers ---------------------------------------------------------------------------------------


@flax.struct.dataclass
class Batch:
    """This rank's sequences: [M, b, T] each, or [b, T] for one microbatch."""

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
    capacity_factor: float  # capacity of an expert, over K n / E; 0: dropless
    dropout: float = 0.0
    attention_kernel: str = "xla"  # see attention_kernels/choice.py
    ordered: bool = False  # whether collectives wait for loops: runtime/collective_order.py
    # What decoding replaces: activations of all positions on every tensor rank, attention over a
    # cache, and experts read where they are.
    sequence_parallel: bool = True
    attend_to: Callable | None = None  # as attend_to_window
    run_experts: Callable | None = None  # (weights, h, choices, routing weights) -> sum


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
    # Each batch and tensor rank draws its own mask. Pipeline ranks differ by their layer.
    for number in (*position, branch, lax.axis_index(BATCH_AXES), lax.axis_index("tensor")):
        key = jax.random.fold_in(key, number)
    kept = jax.random.bernoulli(key, 1 - options.dropout, y_btD.shape)
    return jnp.where(kept, y_btD / (1 - options.dropout), 0)


# guide: attention
@jax.named_scope("attention")
def attention(
    w: Attention,
    x_btD: jax.Array,
    context: Any,
    options: ForwardOptions,
    position: LayerPosition,
    rope: bool,
) -> tuple[jax.Array, Any]:
    """x + attention of x, and what decoding caches.

    x_btD    [B/replica+fsdp, T/tensor, D]; so is the result.
    context  segments [b, T] or None (attend_to_window), or the cache (decode.attend_to_cache).
    Collectives  all_gather(tensor) of the kind's inputs [b, T, X]; psum_scatter(tensor) of
                 [b, T, D].
    """
    m, parallel = options.model, options.sequence_parallel
    inputs_btX = w.inputs(rms_norm(x_btD, w.norm, m.rms_norm_eps), m)
    inputs_bTX = checkpoint_name(gather_sequence(inputs_btX, "latents", parallel), "latents")
    attend_to = options.attend_to or attend_to_window
    y_bTnW, cached = attend_to(w, inputs_bTX, context, options, position.layer, rope)
    # n is contracted: each tensor rank holds the partial sum of its heads.
    partial_bTD = matmul("bTX,XD->bTD", lax.collapse(y_bTnW, 2), lax.collapse(w.out, 0, 2))
    y_btD = checkpoint_name(scatter_sequence(partial_bTD, "output", parallel), "attention_out")
    return x_btD + dropout(y_btD, options, position, 0), cached


def attend_to_window(
    w: Attention,
    inputs_bTX: jax.Array,
    segments_bT: jax.Array | None,
    options: ForwardOptions,
    layer: jax.Array,
    rope: bool,
) -> tuple[jax.Array, None]:
    """Attend within the sequences of a batch."""
    m = options.model
    heads = w.heads(inputs_bTX, m, None, rope)
    kernel = options.attention_kernel
    # attend names its own residuals "attention".
    y_bTnW = attend(*heads, segments_bT, kernel, w.scale(m), m.sliding_window)
    return y_bTnW, None


# guide: end


def swiglu(h_bTD: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate h) * up h) (arXiv:2002.05202): this tensor rank's partial sum over F."""
    # Both products are named, and not their combination, whose gradient needs both of them.
    gate_bTf = checkpoint_name(matmul("bTD,Df->bTf", h_bTD, gate), "hidden")
    up_bTf = checkpoint_name(matmul("bTD,Df->bTf", h_bTD, up), "hidden")
    return matmul("bTf,fD->bTD", jax.nn.silu(gate_bTf) * up_bTf, down)


# guide: mlp
@jax.named_scope("mlp")
def mlp(w: Mlp, x_btD: jax.Array, options: ForwardOptions, position: LayerPosition) -> jax.Array:
    """x + down(silu(gate x) * up x).

    x_btD  [B/replica+fsdp, T/tensor, D]; so is the result.
    Collectives  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    parallel = options.sequence_parallel
    h_btD = rms_norm(x_btD, w.norm, options.model.rms_norm_eps)
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input", parallel), "mlp_in")
    partial_bTD = swiglu(h_bTD, w.gate, w.up, w.down)
    return x_btD + dropout(scatter_sequence(partial_bTD, "output", parallel), options, position, 1)


# guide: end


class Routing(NamedTuple):
    """Routing statistics of this rank's tokens in one MoE layer."""

    # Sum over sequences of sum_e f_e P_e (arXiv:2412.19437, equation 17); differentiable.
    partial_balance: jax.Array
    tokens_per_expert: jax.Array  # [E] int32, before any is dropped
    dropped: jax.Array  # int32: choices beyond an expert's capacity


@jax.named_scope("router")
def route(w: Moe, h_btD: jax.Array, m: utils.Model) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose each token's K experts and their weights (arXiv:2412.19437, equations 12-16).

    In float32, because a rounding error can change the choice.

    Returns  share_btE (scores that sum to 1), choice_btK int32, weight_btK.
    """
    logits_btE = matmul("btD,DE->btE", h_btD.astype(jnp.float32), w.router)
    scores_btE = (
        jax.nn.sigmoid(logits_btE) if m.scoring_func == "sigmoid" else jax.nn.softmax(logits_btE)
    )
    bias_E = jnp.expand_dims(w.bias, (0, 1))
    ranking_btE = lax.stop_gradient(scores_btE + bias_E)
    if m.topk_group < m.n_group:
        ranking_btE = best_groups(ranking_btE, m)
    _, choice_btK = lax.top_k(ranking_btE, m.num_experts_per_tok)
    weight_btK = jnp.take_along_axis(scores_btE, choice_btK, axis=-1)
    if m.norm_topk_prob:
        weight_btK /= weight_btK.sum(-1, keepdims=True) + 1e-20
    share_btE = scores_btE / scores_btE.sum(-1, keepdims=True)
    return share_btE, choice_btK, weight_btK * m.routed_scaling_factor


def best_groups(ranking_btE: jax.Array, m: utils.Model) -> jax.Array:
    """Set the ranking outside each token's best groups to -inf.

    A group ranks by the sum of its two best experts (arXiv:2412.19437, section 2.1.2), or by its
    best one (arXiv:2405.04434, section 2.2.2).
    """
    ranking_btZe = ranking_btE.reshape(*ranking_btE.shape[:2], m.n_group, -1)
    counted = 1 if m.topk_method == "group_limited_greedy" else 2
    counted_btZk, _ = lax.top_k(ranking_btZe, counted)
    _, best_btk = lax.top_k(counted_btZk.sum(-1), m.topk_group)
    groups = jnp.arange(m.n_group, dtype=best_btk.dtype)[None, None, :, None]
    seen_btZ = (best_btk[:, :, None, :] == groups).any(-1)
    return jnp.where(seen_btZ[..., None], ranking_btZe, -jnp.inf).reshape(ranking_btE.shape)


@jax.named_scope("balance")
def balance(
    share_btE: jax.Array, choice_btK: jax.Array, m: utils.Model
) -> tuple[jax.Array, jax.Array]:
    """Return the partial sum over sequences of sum_e f_e P_e, and [E] choices of each expert.

    f is E / K times the share of the sequence's tokens that chose e, without gradient. The loss is
    linear in P, so the partial sums of ranks add up (arXiv:2412.19437, equations 17-20).

    Collectives  psum(tensor) of [b, E] integers.
    """
    experts = jnp.arange(m.n_routed_experts, dtype=choice_btK.dtype)[None, None, None, :]
    count_bE = (choice_btK[..., None] == experts).sum((1, 2), dtype=jnp.int32)
    T = share_btE.shape[1] * lax.axis_size("tensor")
    f_bE = lax.psum(count_bE, "tensor").astype(jnp.float32) * (
        m.n_routed_experts / (m.num_experts_per_tok * T)
    )
    partial_P_bE = share_btE.sum(1) / T
    return (f_bE * partial_P_bE).sum(), count_bE.sum(0)


def assign_slots(choice_btK: jax.Array, experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Assign each choice a capacity slot of its expert, by position and then sequence.

    No later token displaces an earlier one. A stable sort and two scatters of integers:
    O(n K log n K).

    choice_btK  indices of experts.
    Returns     slot_nK, e * capacity + the place at expert e, or experts * capacity for a dropped
                choice; choice_s [experts * capacity], the choice (n * K + k) in each slot, or
                n * K for an empty one.
    """
    b, t, K = choice_btK.shape
    by_position = choice_btK.swapaxes(0, 1).reshape(-1)
    order = jnp.argsort(by_position, stable=True)
    expert = by_position[order]
    start = jnp.searchsorted(expert, jnp.arange(experts, dtype=expert.dtype)).astype(jnp.int32)
    place = jnp.arange(expert.size, dtype=jnp.int32) - start[expert]
    slot = jnp.where(place < capacity, expert * capacity + place, experts * capacity)
    slot_tbK = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True).reshape(t, b, K)
    slot_nK = slot_tbK.swapaxes(0, 1).reshape(b * t, K)
    numbers = jnp.arange(b * t * K, dtype=jnp.int32)
    empty = vary(jnp.full(experts * capacity, b * t * K, jnp.int32), varying(slot))
    return slot_nK, empty.at[slot_nK.reshape(-1)].set(numbers, mode="drop")


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """x[index], with zeros where `index` is past the end.

    back  [rows of x, any]: where each row is in the result; past the end for nowhere. It makes the
          backward pass a gather. A scatter would run one row after the other on a CPU.
    """
    return read_rows(x, index)


@jax.custom_vjp
def add_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Sum over j of x[index[:, j]]: the transpose of take_rows.

    back  [rows of x]: the row of the result that each row is added to.
    """
    return read_rows(x, index).sum(1)


def read_rows(x: jax.Array, index: jax.Array, **options: Any) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0, **options)


take_rows.defvjp(
    lambda x, index, back: (read_rows(x, index), back),
    lambda back, grad: (read_rows(grad, back).sum(1), None, None),
)
add_rows.defvjp(
    lambda x, index, back: (read_rows(x, index).sum(1), back),
    lambda back, grad: (read_rows(grad, back), None, None),
)


def expert_parallel_swiglu(
    w: ExpertParallelExperts, buffer_EJD: jax.Array, weight_EJ: jax.Array
) -> jax.Array:
    """Run each capacity slot through its expert, times its routing weight.

    Collectives  all_to_all(fsdp x tensor) of the dispatch buffer, there and back, and of routing
                 weights.
    """
    exchange = partial(lax.all_to_all, axis_name=EXPERT_AXES, tiled=True)
    with jax.named_scope("dispatch"):  # -> [E/ranks, ranks * J, ...]
        buffer_eJD, weight_eJ = (
            exchange(a, split_axis=0, concat_axis=1) for a in (buffer_EJD, weight_EJ)
        )
    y_eJD = expert_swiglu(concatenate_gate_up(w), w.down, buffer_eJD, weight_eJ)
    with jax.named_scope("return"):
        return exchange(y_eJD, split_axis=1, concat_axis=0)


def sharded_experts_swiglu(
    w: ShardedExperts, buffer_EJD: jax.Array, weight_EJ: jax.Array
) -> jax.Array:
    """Run each capacity slot through its expert, times its routing weight.

    Collectives  all_gather(tensor) and psum_scatter(tensor) of the dispatch buffer, all_gather of
                 routing weights.
    """
    with jax.named_scope("dispatch"):
        buffer_EJD = lax.all_gather(buffer_EJD, "tensor", axis=1, tiled=True)
        weight_EJ = lax.all_gather(weight_EJ, "tensor", axis=1, tiled=True)
    partial_EJD = expert_swiglu(concatenate_gate_up(w), w.down, buffer_EJD, weight_EJ)
    with jax.named_scope("return"):
        return lax.psum_scatter(partial_EJD, "tensor", scatter_dimension=1, tiled=True)


def concatenate_gate_up(w: ExpertParallelExperts | ShardedExperts) -> jax.Array:
    """Return [e, D, 2G]. One product reads its input once, as its gradient does.

    It is a copy, which pays off where an expert has more than about 4 G rows.
    """
    return jnp.concatenate([w.gate, w.up], axis=-1)


@jax.named_scope("experts")
def expert_swiglu(
    gate_up_EDZ: jax.Array, down_EGD: jax.Array, buffer_EJD: jax.Array, weight_EJ: jax.Array
) -> jax.Array:
    """SwiGLU of each expert; under ShardedExperts the partial sum over this rank's G."""
    buffer_EJD, weight_EJ = checkpoint_name((buffer_EJD, weight_EJ), "expert_in")
    both_EJZ = checkpoint_name(matmul("EJD,EDZ->EJZ", buffer_EJD, gate_up_EDZ), "expert_hidden")
    return matmul("EJG,EGD->EJD", weighted_swiglu(both_EJZ, weight_EJ), down_EGD)


def weighted_swiglu(both: jax.Array, weight: jax.Array) -> jax.Array:
    """weight * silu(gate) * up, where `both` [..., 2G] has gate and up side by side."""
    gate, up = jnp.split(both, 2, axis=-1)
    hidden = jax.nn.silu(gate) * up
    # float32, for the sum over G in the gradient of a weight.
    return (hidden.astype(jnp.float32) * weight[..., None]).astype(hidden.dtype)


@jax.named_scope("shared")
def shared_experts(w: SharedExperts, h_btD: jax.Array, parallel: bool) -> jax.Array:
    """SwiGLU of the shared experts, which every token passes through.

    parallel     whether the sequence is sharded over tensor.
    Collectives  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input", parallel), "mlp_in")
    return scatter_sequence(swiglu(h_bTD, w.gate, w.up, w.down), "output", parallel)


def capacity_experts(
    w: ExpertParallelExperts | ShardedExperts,
    h_btD: jax.Array,
    choice_btK: jax.Array,
    weight_btK: jax.Array,
    m: utils.Model,
    factor: float,
) -> tuple[jax.Array, jax.Array]:
    """Sum weight * expert(h) over each token's choices within the capacity of their experts.

    Returns      the sum [b, t, D], and the number of choices that are dropped.
    Collectives  those of the two layouts of experts.
    """
    b, t, D = h_btD.shape
    J = expert_capacity(m, b * t, factor)
    slot_nK, choice_s = assign_slots(choice_btK, m.n_routed_experts, J)
    dropped = slot_nK.size - (slot_nK < m.n_routed_experts * J).sum(dtype=jnp.int32)
    buffer_sD = take_rows(h_btD.reshape(b * t, D), choice_s // m.num_experts_per_tok, slot_nK)
    # Weights travel with the tokens and multiply the hidden values. The gradient of a weight then
    # does not need the output of the expert.
    weight_s = take_rows(weight_btK.reshape(-1), choice_s, slot_nK.reshape(-1, 1))
    expert_parallel = isinstance(w, ExpertParallelExperts)
    experts = expert_parallel_swiglu if expert_parallel else sharded_experts_swiglu
    y_EJD = experts(
        w,
        buffer_sD.reshape(m.n_routed_experts, J, D),
        weight_s.reshape(m.n_routed_experts, J),
    )
    y_nD = add_rows(y_EJD.reshape(-1, D), slot_nK, choice_s // m.num_experts_per_tok)
    return y_nD.reshape(b, t, D), dropped


# --- dropless experts -----------------------------------------------------------------------------

OVERFLOW = "overflow"  # scope of tiles beyond those of an even load; the planner leaves it out


def dropless_experts(
    w: ExpertParallelExperts | ShardedExperts,
    h_btD: jax.Array,
    choice_btK: jax.Array,
    weight_btK: jax.Array,
    m: utils.Model,
) -> jax.Array:
    """Sum weight * expert(h) over each token's choices.

    Every rank of `axes` gets the tokens of all of them, and adds what its experts, or its slices of
    all experts, contribute. So no rank can receive more tokens than there are.

    Collectives  all_gather(axes) of tokens, choices and routing weights, and psum_scatter(axes) of
                 the result; axes are fsdp and tensor with expert parallelism, else tensor.
    """
    b, t, D = h_btD.shape
    expert_parallel = isinstance(w, ExpertParallelExperts)
    axes = EXPERT_AXES if expert_parallel else ("tensor",)
    with jax.named_scope("dispatch"):
        gather = partial(lax.all_gather, axis_name=axes, tiled=True)
        h_rD, choice_rK, weight_rK = (
            gather(a.reshape(b * t, -1)) for a in (h_btD, choice_btK, weight_btK)
        )
    h_rD = checkpoint_name(h_rD, "expert_in")
    if expert_parallel:
        choice_rK -= lax.axis_index(axes) * w.gate.shape[0]
    inputs = vary((h_rD, choice_rK, weight_rK, concatenate_gate_up(w), w.down))
    load = divide_load(choice_rK.size / m.n_routed_experts, w.gate.shape[0])
    partial_rD = local_experts(load, *inputs)
    with jax.named_scope("return"):
        return lax.psum_scatter(partial_rD, axes, tiled=True).reshape(b, t, D)


class Load(NamedTuple):
    """How the choices of an expert are divided."""

    batched: int  # its first choices, in one product with those of the other experts
    tile: int  # rows of a tile
    tiles: int  # of all experts, where all have as many choices


def divide_load(load: float, experts: int) -> Load:
    """Divide the choices of an expert, where all have the same number.

    Half of them are batched. A batch of more would be faster, and empty where loads are uneven. A
    tile is a power of two, at most an eighth of a load. A product of fewer than 8 rows is slow,
    and one of 512 fills any device.
    """
    batched = int(load / 2)
    tile = min(512, max(8, 1 << (max(1, int(load / 8)).bit_length() - 1)))
    return Load(batched, tile, int(experts * (load - batched)) // tile + experts)


class SortedChoices(NamedTuple):
    """Choices sorted by expert. A choice is a number n * K + k."""

    order_c: jax.Array  # choices by expert; those of other ranks come last
    first_e: jax.Array  # [experts + 1] position of each expert's first choice in `order_c`
    rest_e: jax.Array  # [experts] position of each expert's first choice in tiles
    last_e: jax.Array  # [experts] tiles up to and including each expert's

    def end(self, least: int) -> jax.Array:
        """Return the number of tiles, or `least` if that is more."""
        return jnp.maximum(least, self.last_e[-1])

    def read(self, begin: jax.Array, end: jax.Array, rows: int) -> jax.Array:
        """Return the choices at positions from begin to end [...], padded to [..., rows].

        The padding is the number of choices.
        """
        offset = jnp.expand_dims(jnp.arange(rows, dtype=jnp.int32), range(begin.ndim))
        position = begin[..., None] + offset
        c = self.order_c.size
        return jnp.where(position < end[..., None], read_rows(self.order_c, position), c)

    def tile(self, i: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """Return the expert of tile i and its choices [rows]. Tiles past the last are empty."""
        e = jnp.minimum((self.last_e <= i).sum(dtype=jnp.int32), self.last_e.size - 1)
        end = self.first_e[e + 1]
        tiles = (end - self.rest_e[e] + rows - 1) // rows
        begin = self.rest_e[e] + (i - self.last_e[e] + tiles) * rows
        return e, self.read(begin, jnp.where(i < self.last_e[-1], end, 0), rows)


def sort_choices(choice_rK: jax.Array, experts: int, skip: int, tile: int) -> SortedChoices:
    """Sort choices of this rank's experts, 0 to `experts` - 1, and ignore all others.

    skip  how many choices of each expert are in no tile.
    """
    choice_c = choice_rK.reshape(-1)
    choice_c = jnp.where((choice_c >= 0) & (choice_c < experts), choice_c, experts)
    order_c = jnp.argsort(choice_c, stable=True).astype(jnp.int32)
    numbers = jnp.arange(experts + 1, dtype=choice_c.dtype)
    first_e = jnp.searchsorted(choice_c[order_c], numbers).astype(jnp.int32)
    rest_e = jnp.minimum(first_e[:-1] + skip, first_e[1:])
    last_e = jnp.cumsum((first_e[1:] - rest_e + tile - 1) // tile)
    return SortedChoices(order_c, first_e, rest_e, last_e)


def add_distinct(y_rD: jax.Array, token_t: jax.Array, x_tD: jax.Array) -> jax.Array:
    """Add rows to those of distinct tokens in increasing order, and drop rows past the end."""
    distinct = {"indices_are_sorted": True, "unique_indices": True}
    return y_rD.at[token_t].add(x_tD, mode="drop", **distinct)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def read_tokens(rows: int, h_rD: jax.Array, token_et: jax.Array) -> jax.Array:
    """Return rows of h, and zeros where `token_et` is past the end. The tokens of an e differ."""
    return read_rows(h_rD, token_et)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_tokens(rows: int, y_etD: jax.Array, token_et: jax.Array) -> jax.Array:
    """Add each row of y to the row of its token: the transpose of read_tokens.

    One e after the other, because a GPU adds rows of the same token in any order.
    """

    def add(y_rD: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        y_tD, token_t = one
        return add_distinct(y_rD, token_t, y_tD), None

    zero = vary(jnp.zeros((rows, y_etD.shape[2]), y_etD.dtype), varying(y_etD))
    return lax.scan(add, zero, (y_etD, token_et))[0]


read_tokens.defvjp(
    lambda rows, h_rD, token_et: (read_rows(h_rD, token_et), token_et),
    lambda rows, token_et, grad: (add_tokens(rows, grad, token_et), None),
)
add_tokens.defvjp(
    lambda rows, y_etD, token_et: (add_tokens(rows, y_etD, token_et), token_et),
    lambda rows, token_et, grad: (read_rows(grad, token_et), None),
)


def batched_experts(
    J: int,
    choices: SortedChoices,
    h_rD: jax.Array,
    weight_rK: jax.Array,
    gate_up_eDZ: jax.Array,
    down_eGD: jax.Array,
) -> jax.Array:
    """Sum weight * expert(h) over the first J choices of each expert."""
    choice_eJ = choices.read(choices.first_e[:-1], choices.first_e[1:], J)
    token_eJ = choice_eJ // weight_rK.shape[1]
    weight_eJ = read_rows(weight_rK.reshape(-1), choice_eJ, unique_indices=True)
    rows = h_rD.shape[0]
    x_eJD = read_tokens(rows, h_rD, token_eJ)
    return add_tokens(rows, expert_swiglu(gate_up_eDZ, down_eGD, x_eJD, weight_eJ), token_eJ)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def local_experts(
    load: Load,
    h_rD: jax.Array,
    choice_rK: jax.Array,
    weight_rK: jax.Array,
    gate_up_eDZ: jax.Array,
    down_eGD: jax.Array,
) -> jax.Array:
    """Sum weight * expert(h) over the choices of these experts, 0 to e - 1.

    The first choices of each expert are one batched product. The others are tiles of one expert
    each. `load.tiles` of them run in any case, so compilers and the planner know them. A second
    loop runs only where these experts have more.
    """
    inputs = h_rD, choice_rK, weight_rK, gate_up_eDZ, down_eGD
    return _local_experts_forward(load, *inputs)[0]


@jax.named_scope("experts")
def _local_experts_forward(
    load: Load, h_rD: jax.Array, choice_rK: jax.Array, *weights: jax.Array
) -> tuple[jax.Array, tuple]:
    weight_rK, gate_up_eDZ, down_eGD = weights
    choices = sort_choices(choice_rK, down_eGD.shape[0], load.batched, load.tile)
    batched = partial(batched_experts, load.batched, choices)
    y_rD, pull_back = jax.vjp(batched, h_rD, *weights)

    def run(y_rD: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        e, choice_t = choices.tile(i, load.tile)
        token_t = choice_t // weight_rK.shape[1]
        both_tZ = matmul("tD,DZ->tZ", read_rows(h_rD, token_t), gate_up_eDZ[e])
        weighted_tG = weighted_swiglu(both_tZ, read_rows(weight_rK.reshape(-1), choice_t))
        y_tD = matmul("tG,GD->tD", weighted_tG, down_eGD[e])
        return add_distinct(y_rD, token_t, y_tD), both_tZ

    y_rD, both_itZ = lax.scan(run, y_rD, jnp.arange(load.tiles, dtype=jnp.int32))
    both_itZ = checkpoint_name(both_itZ, "expert_hidden")
    with jax.named_scope(OVERFLOW):
        end = choices.end(load.tiles)
        y_rD = lax.fori_loop(load.tiles, end, lambda i, y_rD: run(y_rD, i)[0], y_rD)
    return y_rD, (choices, h_rD, weights, pull_back, both_itZ)


@jax.named_scope("experts")
def _local_experts_backward(load: Load, saved: tuple, d_y_rD: jax.Array) -> tuple:
    choices, h_rD, (weight_rK, gate_up_eDZ, down_eGD), pull_back, both_itZ = saved

    def run(grads: tuple, i: jax.Array, both_tZ: jax.Array | None) -> tuple:
        d_h_rD, d_weight_c, d_gate_up_eDZ, d_down_eGD = grads
        e, choice_t = choices.tile(i, load.tile)
        token_t = choice_t // weight_rK.shape[1]
        x_tD, d_y_tD = read_rows(h_rD, token_t), read_rows(d_y_rD, token_t)
        if both_tZ is None:
            both_tZ = matmul("tD,DZ->tZ", x_tD, gate_up_eDZ[e])
        weight_t = read_rows(weight_rK.reshape(-1), choice_t)
        weighted_tG, to_inputs = jax.vjp(weighted_swiglu, both_tZ, weight_t)
        d_both_tZ, d_weight_t = to_inputs(matmul("tD,GD->tG", d_y_tD, down_eGD[e]))
        d_x_tD = matmul("tZ,DZ->tD", d_both_tZ, gate_up_eDZ[e])
        return (
            add_distinct(d_h_rD, token_t, d_x_tD),
            d_weight_c.at[choice_t].set(d_weight_t, mode="drop", unique_indices=True),
            d_gate_up_eDZ.at[e].add(float32_product("tD,tZ->DZ", x_tD, d_both_tZ)),
            d_down_eGD.at[e].add(float32_product("tG,tD->GD", weighted_tG, d_y_tD)),
        )

    d_h_rD, d_weight_rK, *d_w = pull_back(d_y_rD)
    # In float32, for the sum over tiles.
    grads = d_h_rD, d_weight_rK.reshape(-1), *(d.astype(jnp.float32) for d in d_w)
    tiles = jnp.arange(load.tiles, dtype=jnp.int32), both_itZ
    grads, _ = lax.scan(lambda grads, one: (run(grads, *one), None), grads, tiles)
    with jax.named_scope(OVERFLOW):
        end = choices.end(load.tiles)
        grads = lax.fori_loop(load.tiles, end, lambda i, grads: run(grads, i, None), grads)
    d_h_rD, d_weight_c, *d_w = grads
    d_w = (d.astype(h_rD.dtype) for d in d_w)
    return d_h_rD, None, d_weight_c.reshape(weight_rK.shape), *d_w


local_experts.defvjp(_local_experts_forward, _local_experts_backward)


# guide: moe
@jax.named_scope("moe")
def moe(
    w: Moe, x_btD: jax.Array, options: ForwardOptions, position: LayerPosition
) -> tuple[jax.Array, Routing | None]:
    """x + the shared experts of x + sum over each token's K experts of weight * expert(x).

    x_btD  [B/replica+fsdp, T/tensor, D]; so is the result.
    Collectives  those of capacity_experts or dropless_experts, and of shared_experts.
    """
    m = options.model
    h_btD = rms_norm(x_btD, w.norm, m.rms_norm_eps)
    share_btE, *choices = route(w, h_btD, m)
    if options.run_experts is None:
        y_btD, routing = routed_experts(w, h_btD, share_btE, *choices, options)
    else:
        y_btD, routing = options.run_experts(w.experts, h_btD, *choices), None
    if w.shared is not None:
        y_btD += shared_experts(w.shared, h_btD, options.sequence_parallel)
    return x_btD + dropout(y_btD, options, position, 1), routing


def routed_experts(
    w: Moe,
    h_btD: jax.Array,
    share_btE: jax.Array,
    choice_btK: jax.Array,
    weight_btK: jax.Array,
    options: ForwardOptions,
) -> tuple[jax.Array, Routing]:
    """Run each token's experts, dropless or within their capacity."""
    m, factor = options.model, options.capacity_factor
    partial_balance, tokens_per_expert = balance(share_btE, choice_btK, m)
    if factor:
        y_btD, dropped = capacity_experts(w.experts, h_btD, choice_btK, weight_btK, m, factor)
    else:
        y_btD = dropless_experts(w.experts, h_btD, choice_btK, weight_btK, m)
        dropped = jnp.zeros_like(tokens_per_expert[0])
    return y_btD, Routing(partial_balance, tokens_per_expert, dropped)


# guide: end


def expert_capacity(m: utils.Model, tokens: int, factor: float) -> int:
    """Return J = ceil(factor * K * tokens / E), at most `tokens`.

    tokens  of one rank in one microbatch. With expert parallelism an expert has J slots for each
            rank that sends to it.
    """
    return min(tokens, math.ceil(factor * m.num_experts_per_tok * tokens / m.n_routed_experts))


# guide: block
def dense_layer(
    w: DenseLayer,
    x_btD: jax.Array,
    context: Any,
    options: ForwardOptions,
    position: LayerPosition,
) -> tuple[jax.Array, Any]:
    """Return x after the layer, and what decoding caches."""
    x_btD, cached = attention(w.attention, x_btD, context, options, position, rope=True)
    return mlp(w.mlp, x_btD, options, position), cached


def moe_layer(
    w: MoeLayer,
    x_btD: jax.Array,
    context: Any,
    options: ForwardOptions,
    position: LayerPosition,
) -> tuple[jax.Array, tuple[Any, Routing | None]]:
    """Return x after the layer, what decoding caches, and the routing."""
    rope = options.model.rope_in_moe_layers
    x_btD, cached = attention(w.attention, x_btD, context, options, position, rope)
    x_btD, routing = moe(w.moe, x_btD, options, position)
    return x_btD, (cached, routing)


def dense_layers(
    w: Any, x_btD: jax.Array, first: jax.Array, layer: Callable
) -> tuple[jax.Array, Any]:
    """Run layer(w[i], x, first + i) for each of the stacked weights, or of indices of them."""

    def body(x_btD: jax.Array, one: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
        w, i = one
        return layer(w, x_btD, first + i)

    numbers = jnp.arange(len(jax.tree.leaves(w)[0]), dtype=jnp.int32)
    return lax.scan(body, x_btD, (w, numbers))


def block(
    w: Block, x_btD: jax.Array, number: jax.Array, m: utils.Model, dense: Callable, moe: Callable
) -> tuple[jax.Array, Any, Routing | None]:
    """Run the dense layers of a block, then its layer with experts.

    dense, moe  dense_layer and moe_layer, as (weights, x, index of the layer).
    Returns     x, what decoding caches of each layer, and the routing.
    """
    layer = m.first_k_dense_replace + number * m.decoder_sparse_step
    cached, routing = [], None
    if w.dense is not None:
        x_btD, new = dense_layers(w.dense, x_btD, layer, dense)
        cached.append(new)
    if w.moe is not None:
        x_btD, (new, routing) = moe(w.moe, x_btD, layer + m.dense_layers)
        cached.append(jax.tree.map(lambda a: a[None], new))
    return x_btD, concatenated(cached), routing


def concatenated(parts: list) -> Any:
    """Concatenate the arrays of trees along their first dimension."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


# guide: end


# --- embedding and loss ---------------------------------------------------------------------------


def local_rows(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the row of each id in this rank's vocabulary slice, and whether the slice has it."""
    row = ids - lax.axis_index(VOCABULARY_AXES) * rows
    return jnp.clip(row, 0, rows - 1), (row >= 0) & (row < rows)


@jax.custom_vjp
def lookup(table_vD: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the row of each id [..., D], with zeros for ids of other ranks.

    The gradient of a row is a sum in float32: a common token occurs thousands of times in a batch,
    and a bfloat16 sum stops growing at 256 times its parts.
    """
    row, held = local_rows(ids, table_vD.shape[0])
    return jnp.where(held[..., None], table_vD[row], 0)


def _lookup_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple:
    table_vD, ids = saved
    row, held = local_rows(ids, table_vD.shape[0])
    row = jnp.where(held, row, table_vD.shape[0])
    zero = vary(jnp.zeros(table_vD.shape, jnp.float32), varying((table_vD, grad)))
    d_table_vD = zero.at[row].add(grad.astype(jnp.float32), mode="drop")
    return d_table_vD.astype(table_vD.dtype), None


lookup.defvjp(lambda table_vD, ids: (lookup(table_vD, ids), (table_vD, ids)), _lookup_backward)


# guide: embed
@jax.named_scope("embedding")
def embed(table_vD: jax.Array, tokens_bT: jax.Array) -> jax.Array:
    """Look up rows of the embedding -> [b, t, D], the same on every pipeline rank.

    Each rank holds a slice of the vocabulary, and adds zeros for other ids.

    Collectives  psum(pipeline) and psum_scatter(tensor) of [b, T, D].
    """
    partial_bTD = lax.psum(lookup(table_vD, tokens_bT), "pipeline")
    return lax.psum_scatter(partial_bTD, "tensor", scatter_dimension=1, tiled=True)


# guide: end


@jax.named_scope("loss")
def local_logits(table_vD: jax.Array, h_nD: jax.Array, vocabulary: int) -> jax.Array:
    """Return this rank's columns of the logits, float32, with -inf for padding ids."""
    # In float32, because a logit of 20 in bfloat16 is off by up to 0.06, and so is its loss.
    logits_nv = float32_product("nD,vD->nv", h_nD, table_vD)
    return jnp.where(local_ids(len(table_vD))[None, :] < vocabulary, logits_nv, -jnp.inf)


def local_ids(rows: int) -> jax.Array:
    """Return the token ids of this rank's vocabulary slice, which has `rows` ids."""
    return lax.axis_index(VOCABULARY_AXES) * rows + jnp.arange(rows, dtype=jnp.int32)


# guide: loss
@jax.named_scope("loss")
def cross_entropy(logits_nv: jax.Array, targets_n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return -log softmax(logits)[target] and log(Z) of each token [n], float32.

    Collectives  pmax and two psums (pipeline x tensor) of [n].
    """
    # The largest logit keeps exp from overflowing. It cancels out, so it needs no gradient.
    top_n = lax.pmax(lax.stop_gradient(logits_nv.max(-1)), VOCABULARY_AXES)
    Z_n = lax.psum(jnp.exp(logits_nv - top_n[:, None]).sum(-1), VOCABULARY_AXES)
    # Compared rather than indexed: the gradient of indexing scatters into zeros of all logits.
    is_target_nv = local_ids(logits_nv.shape[1])[None, :] == targets_n[:, None]
    picked_n = lax.psum(jnp.where(is_target_nv, logits_nv, 0).sum(-1), VOCABULARY_AXES)
    log_Z_n = jnp.log(Z_n) + top_n
    return log_Z_n - picked_n, log_Z_n


def weighted_losses(logits_nv: jax.Array, targets_n: jax.Array, weights_n: jax.Array) -> jax.Array:
    """Return [2] weighted sums over tokens: of the cross-entropy and of log(Z)^2."""
    loss_n, log_Z_n = cross_entropy(logits_nv, targets_n)
    return jnp.stack([(weights_n * loss_n).sum(), (weights_n * log_Z_n**2).sum()])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_loss(
    vocabulary: int,
    z_factor: float,
    table_vD: jax.Array,
    h_cnD: jax.Array,
    targets_cn: jax.Array,
    weights_cn: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return cross-entropy + z_factor * z-loss, and both sums [2].

    Only the logits of one chunk of tokens exist at a time. The gradient is computed with the value,
    chunk by chunk, so that logits are neither residuals nor recomputed.

    vocabulary  size without padding.
    """

    def body(_: None, chunk: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        h_nD, *rest = chunk
        return None, weighted_losses(local_logits(table_vD, h_nD, vocabulary), *rest)

    sums = lax.scan(body, None, (h_cnD, targets_cn, weights_cn))[1].sum(0)
    return sums[0] + z_factor * sums[1], sums


def _chunked_loss_forward(
    vocabulary: int, z_factor: float, table_vD: jax.Array, *chunks_cn: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    def loss(logits_nv: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = weighted_losses(logits_nv, *rest)
        return sums[0] + z_factor * sums[1], sums

    def body(d_table_vD: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        h_nD, *rest = chunk
        logits_nv = local_logits(table_vD, h_nD, vocabulary)
        (_, sums), d_logits_nv = jax.value_and_grad(loss, has_aux=True)(logits_nv, *rest)
        with jax.named_scope("transpose(loss)"):  # as JAX names operations of a backward pass
            d_logits_nv = d_logits_nv.astype(h_nD.dtype)
            d_table_vD += float32_product("nv,nD->vD", d_logits_nv, h_nD)
            return d_table_vD, (sums, matmul("nv,vD->nD", d_logits_nv, table_vD))

    zero = vary(jnp.zeros(table_vD.shape, jnp.float32), varying(table_vD))
    d_table_vD, (sums, d_h_cnD) = lax.scan(body, zero, chunks_cn)
    sums = sums.sum(0)
    return (sums[0] + z_factor * sums[1], sums), (d_table_vD.astype(table_vD.dtype), d_h_cnD)


def _chunked_loss_backward(vocabulary: int, z_factor: float, grads: tuple, d_out: tuple) -> tuple:
    scale = d_out[0]  # d_out[1] is of the sums, which are only reported
    return *((g * scale.astype(g.dtype)) for g in grads), None, None


chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


# guide: end


@cache
def num_chunks(tokens: int, most: int) -> int:
    """Return the number of chunks of at most `most` tokens.

    It is the smallest one, or one at most a quarter larger that divides the tokens evenly.
    """
    smallest = -(-tokens // most)
    larger = range(smallest, smallest + smallest // 4 + 1)
    return next((count for count in larger if tokens % count == 0), smallest)


def in_chunks(x_n: jax.Array, most: int) -> jax.Array:
    """[n, ...] -> [chunks, at most `most`, ...], with zeros after the last token."""
    tokens, *rest = x_n.shape
    count = num_chunks(tokens, most)
    size = -(-tokens // count)
    if padding := count * size - tokens:
        zeros = vary(jnp.zeros((padding, *rest), x_n.dtype), varying(x_n))
        x_n = jnp.concatenate([x_n, zeros])
    return x_n.reshape(count, size, *rest)
