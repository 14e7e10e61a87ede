"""The architecture: embedding, latent attention, dense and expert feed-forward, blocks, loss.

Every layer is a function of (weights, activations) that runs inside `shard_map`. Its activations
are this rank's slices. Its weights are already gathered over fsdp, by sharded_model.gather_params.
Each collective over other axes is a line in the layer. The conventions are those of DeepSeek-V3
(arXiv:2412.19437), with Llama's rotary pairs. The order in which layers run is in sharded_model.py
and pipeline.py.

Letters. UPPER case is the global dimension, lower case this rank's slice of it:
    B sequences        T query positions     S key positions      D model width
    V vocabulary, padded                     M microbatches       n tokens of this rank (b * t)
    N heads            H head width without position              R rotary width
    A = H + R          W value width         U = H + W            Q query latent
    C key-value latent                       F hidden width       G hidden width of an expert
    E experts          K experts per token   Z expert groups      X hidden width of shared experts
    J capacity slots of an expert for the tokens of one rank
n is the heads of this rank in names with a head width. A value whose name starts with `partial_` is
still to be reduced over ranks.
"""

import math
import re
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
from attention import attend
from utils import BATCH_AXES, EXPERT_AXES, MESH_AXES, VOCABULARY_AXES, ConfigError
from weights import Size, normal, ones, vary, varying, weight, zeros

# Scale of the initial values of each projection into the residual stream, times 1/sqrt(fan-in).
# Layers begin as a small change of the embedding, which trains first: 0.4 nats better after 120
# steps of a tiny model.
RESIDUAL_SCALE = 0.1

# --- weights --------------------------------------------------------------------------------------

# guide: weights


def vocab_table() -> Any:
    """The embedding or output matrix. Its rows are sharded over pipeline and tensor, so that all
    stages hold the same share (arXiv:2411.05288).
    """
    return weight("V/pipeline+tensor D/fsdp", normal("D"), group="embedding")


@flax.struct.dataclass
class Query:
    """Query projection without a latent."""

    up: jax.Array = weight("D/fsdp N/tensor A", normal("D"), matrix="D x N A")


@flax.struct.dataclass
class LowRankQuery:
    """Query projection through a latent (arXiv:2405.04434, equations 12-13)."""

    down: jax.Array = weight("D/fsdp Q", normal("D"), matrix="D x Q")
    norm: jax.Array = weight("Q", ones, decay=False, float32=True)
    up: jax.Array = weight("Q/fsdp N/tensor A", normal("Q"), matrix="Q x N A")


@flax.struct.dataclass
class Attention:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    kv_down projects to the key-value latent (C) and the rotary key (R).
    """

    query: Query | LowRankQuery
    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    kv_down: jax.Array = weight("D/fsdp C+R", normal("D"), matrix="D x C+R")
    kv_norm: jax.Array = weight("C", ones, decay=False, float32=True)
    kv_up: jax.Array = weight("C/fsdp N/tensor H+W", normal("C"), matrix="C x N H+W")
    out: jax.Array = weight("N/tensor W D/fsdp", normal("N W", RESIDUAL_SCALE), matrix="N W x D")


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
        "Q": "q_lora_rank",
        "C": "kv_lora_rank",
        "F": "intermediate_size",
        "G": "moe_intermediate_size",
        "E": "n_routed_experts",
        "K": "num_experts_per_tok",
        "H": "qk_nope_head_dim",
        "R": "qk_rope_head_dim",
        "W": "v_head_dim",
        "prefix": "first_k_dense_replace",
    }
    out = {letter: Size(getattr(m, flag), f"model.{flag}") for letter, flag in flags.items()}
    chunks = mesh.virtual * mesh.pipeline
    if m.blocks % chunks:
        layers = m.first_k_dense_replace + -(-m.blocks // chunks) * chunks * m.decoder_sparse_step
        raise ConfigError(
            f"--model.num_hidden_layers {m.num_hidden_layers} is {m.blocks} blocks of "
            f"{m.decoder_sparse_step}, which are not divisible by --mesh.pipeline {mesh.pipeline} "
            f"x --mesh.virtual {mesh.virtual}. Use --model.num_hidden_layers {layers}."
        )
    for letter in ("H+R", "C+R", "H+W"):
        out[letter] = Size(sum(out[part].size for part in letter.split("+")), out[letter[0]].flag)
    padded = f"{m.vocab_size} (the tokenizer's; {m.padded_vocab_size} with padding)"
    return out | {
        "A": out["H+R"],
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
    query = weights.declare(LowRankQuery if m.q_lora_rank else Query, size)
    attention = weights.declare(Attention, size, query=query)
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
    capacity_factor: float | None  # capacity of an expert, over K n / E; None drops no token
    dropout: float = 0.0
    attention_kernel: str = "xla"  # see attention.choose_kernel


def matmul(formula: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply as einsum, in the arguments' dtype; float32 at full precision on every device.

    The first two dimensions of x are flattened into one. Where the gradient of a weight sums over
    two dimensions, XLA for CPUs would first write transposed copies of both operands.
    """
    precision = "highest" if x.dtype == jnp.float32 else None
    x_dims, w_dims, y_dims = re.split(",|->", formula)
    if y_dims[:2] != x_dims[:2] or set(x_dims[:2]) & set(w_dims):
        return jnp.einsum(formula, x, w, precision=precision)
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    y = jnp.einsum(f"{x_dims[1:]},{w_dims}->{y_dims[1:]}", flat, w, precision=precision)
    return y.reshape(*x.shape[:2], *y.shape[1:])


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467), in float32 for the sum."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x32 * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


def gather_sequence(x_btD: jax.Array, name: str) -> jax.Array:
    """[b, t, .] -> [b, T, .], under a name for profiles.  Collectives: all_gather(tensor)."""
    with jax.named_scope(name):
        return lax.all_gather(x_btD, "tensor", axis=1, tiled=True)


def scatter_sequence(partial_bTD: jax.Array, name: str) -> jax.Array:
    """Partial sums [b, T, D] -> this rank's slice [b, t, D] of the sum, under a name.

    Collectives  psum_scatter(tensor).
    """
    with jax.named_scope(name):
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


# guide: rope
def rope_frequencies(m: utils.Model) -> jax.Array:
    """Return [R/2] angles between neighbouring positions: theta^(-2i/R) for pair i.

    YaRN (arXiv:2309.00071, section 3.2) divides the frequency by `factor` for pairs that rotate
    less than `beta_slow` times in the original context. It keeps those that rotate more than
    `beta_fast` times, and interpolates in between, linearly in i.
    """
    R, theta, yarn = m.qk_rope_head_dim, m.rope_theta, m.rope_scaling
    half = R // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if yarn.factor == 1:
        return frequency

    def pair(rotations: float) -> float:
        """The i, as a real number, that rotates this often in the original context."""
        positions = yarn.original_max_position_embeddings / (rotations * math.tau)
        return R * math.log(positions) / (2 * math.log(theta))

    # Rounded and bounded as in DeepSeek's code, with which the published weights were trained.
    first, last = math.floor(pair(yarn.beta_fast)), math.ceil(pair(yarn.beta_slow))
    first, last = max(first, 0), min(last, R - 1)
    slowed = (jnp.arange(half, dtype=jnp.float32) - first) / (last - first or 0.001)
    slowed = jnp.clip(slowed, 0.0, 1.0)
    return frequency * (1 - slowed) + frequency / yarn.factor * slowed


def yarn_mscale(m: utils.Model, mscale: float) -> float:
    """1 + mscale / 10 * log(factor): YaRN's sqrt(1/t) (arXiv:2309.00071, section 3.4)."""
    return 1 + 0.1 * mscale * math.log(m.rope_scaling.factor)


def rope_magnitude(m: utils.Model) -> float:
    """The factor on rotated queries and keys."""
    yarn = m.rope_scaling
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(m, yarn.mscale) / yarn_mscale(m, yarn.mscale_all_dim)
    return yarn_mscale(m, 1.0)


def softmax_scale(m: utils.Model) -> float:
    """The factor on attention scores: 1 / sqrt(H + R), times YaRN's 1/t."""
    width = m.qk_nope_head_dim + m.qk_rope_head_dim
    return width**-0.5 * yarn_mscale(m, m.rope_scaling.mscale_all_dim) ** 2


def rotate(x_bTnR: jax.Array, m: utils.Model, position_bT: jax.Array | None = None) -> jax.Array:
    """Rotate each pair (i, i + R/2) by position * frequency (arXiv:2104.09864).

    In float32, because bfloat16 cannot hold large positions.

    position_bT  0, 1, ... if not given.
    """
    if position_bT is None:
        position_bT = jnp.arange(x_bTnR.shape[1])[None]
    frequency = rope_frequencies(m)
    angle_bTi = position_bT.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    angle = angle_bTi[:, :, None, :]
    x32, magnitude = x_bTnR.astype(jnp.float32), rope_magnitude(m)
    a, b = jnp.split(x32 if magnitude == 1 else x32 * magnitude, 2, axis=-1)
    rotated = (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
    return jnp.concatenate(rotated, axis=-1).astype(x_bTnR.dtype)


# guide: end


# guide: attention
def latents(
    w: Attention, x_btD: jax.Array, m: utils.Model
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the inputs of the query and key-value up-projections, and the rotary key."""
    h_btD = rms_norm(x_btD, w.norm, m.rms_norm_eps)
    latent_btC, key_btR = jnp.split(
        matmul("btD,DC->btC", h_btD, w.kv_down), [m.kv_lora_rank], axis=-1
    )
    epsilon = m.latent_rms_norm_eps or m.rms_norm_eps
    latent_btC = rms_norm(latent_btC, w.kv_norm, epsilon)
    if not m.q_lora_rank:
        return h_btD, latent_btC, key_btR
    query_btQ = matmul("btD,DQ->btQ", h_btD, w.query.down)
    return rms_norm(query_btQ, w.query.norm, epsilon), latent_btC, key_btR


@jax.named_scope("attention")
def attention(
    w: Attention,
    x_btD: jax.Array,
    segments_bT: jax.Array | None,
    options: ForwardOptions,
    position: LayerPosition,
    rope: bool,
) -> jax.Array:
    """x + multi-head latent attention of x (arXiv:2405.04434, equations 9-19).

    x_btD  [B/replica+fsdp, T/tensor, D]; so is the result.
    Collectives  all_gather(tensor) of [b, T, Q + C + R], or [b, T, D + C + R] without a query
                 latent; psum_scatter(tensor) of [b, T, D].
    """
    m = options.model
    query_btQ, latent_btC, key_btR = latents(w, x_btD, m)
    # The latents are gathered, because they are narrower than queries, keys and values.
    gathered = jnp.concatenate([query_btQ, latent_btC, key_btR], axis=-1)
    gathered = checkpoint_name(gather_sequence(gathered, "latents"), "latents")
    splits = [query_btQ.shape[-1], query_btQ.shape[-1] + m.kv_lora_rank]
    query_bTQ, latent_bTC, key_bTR = jnp.split(gathered, splits, axis=-1)

    q_bTnA = matmul("bTQ,QnA->bTnA", query_bTQ, w.query.up)
    kv_bTnU = matmul("bTC,CnU->bTnU", latent_bTC, w.kv_up)
    k_bTnH, v_bTnW = jnp.split(kv_bTnU, [m.qk_nope_head_dim], axis=-1)
    q_bTnH, q_bTnR = jnp.split(q_bTnA, [m.qk_nope_head_dim], axis=-1)
    key_bT1R = key_bTR[:, :, None, :]
    if rope:
        q_bTnR, key_bT1R = rotate(q_bTnR, m), rotate(key_bT1R, m)
    key_bTnR = jnp.broadcast_to(key_bT1R, (*k_bTnH.shape[:3], m.qk_rope_head_dim))
    q_bTnA = jnp.concatenate([q_bTnH, q_bTnR], axis=-1)
    k_bTnA = jnp.concatenate([k_bTnH, key_bTnR], axis=-1)
    # attend names its own residuals "attention".
    y_bTnW = attend(q_bTnA, k_bTnA, v_bTnW, segments_bT, options.attention_kernel, softmax_scale(m))

    # n is contracted: each tensor rank holds the partial sum of its heads.
    partial_bTD = matmul("bTnW,nWD->bTD", y_bTnW, w.out)
    y_btD = checkpoint_name(scatter_sequence(partial_bTD, "output"), "attention_out")
    return x_btD + dropout(y_btD, options, position, 0)


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
    h_btD = rms_norm(x_btD, w.norm, options.model.rms_norm_eps)
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input"), "mlp_in")
    partial_bTD = swiglu(h_bTD, w.gate, w.up, w.down)
    return x_btD + dropout(scatter_sequence(partial_bTD, "output"), options, position, 1)


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

    A group ranks by the sum of its two best experts (arXiv:2412.19437, section 2.1.2).
    """
    ranking_btZe = ranking_btE.reshape(*ranking_btE.shape[:2], m.n_group, -1)
    two_btZ2, _ = lax.top_k(ranking_btZe, 2)
    _, best_btk = lax.top_k(two_btZ2.sum(-1), m.topk_group)
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
    return _rows(x, index)


@jax.custom_vjp
def add_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Sum over j of x[index[:, j]]: the transpose of take_rows.

    back  [rows of x]: the row of the result that each row is added to.
    """
    return _rows(x, index).sum(1)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0)


take_rows.defvjp(
    lambda x, index, back: (_rows(x, index), back),
    lambda back, grad: (_rows(grad, back).sum(1), None, None),
)
add_rows.defvjp(
    lambda x, index, back: (_rows(x, index).sum(1), back),
    lambda back, grad: (_rows(grad, back), None, None),
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
    y_eJD = expert_swiglu(w, buffer_eJD, weight_eJ)
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
    partial_EJD = expert_swiglu(w, buffer_EJD, weight_EJ)
    with jax.named_scope("return"):
        return lax.psum_scatter(partial_EJD, "tensor", scatter_dimension=1, tiled=True)


@jax.named_scope("experts")
def expert_swiglu(
    w: ExpertParallelExperts | ShardedExperts, buffer_EJD: jax.Array, weight_EJ: jax.Array
) -> jax.Array:
    """SwiGLU of each expert; under ShardedExperts the partial sum over this rank's G."""
    buffer_EJD, weight_EJ = checkpoint_name((buffer_EJD, weight_EJ), "expert_in")
    # One product reads the buffer once, as its gradient does. Concatenating the weights is a copy,
    # which pays off where an expert has more than about 4 G slots.
    both = matmul("EJD,EDG->EJG", buffer_EJD, jnp.concatenate([w.gate, w.up], axis=-1))
    gate_EJG, up_EJG = jnp.split(checkpoint_name(both, "expert_hidden"), 2, axis=-1)
    hidden_EJG = jax.nn.silu(gate_EJG) * up_EJG
    # float32, for the sum over G in the gradient of a weight.
    weighted_EJG = hidden_EJG.astype(jnp.float32) * weight_EJ[..., None]
    return matmul("EJG,EGD->EJD", weighted_EJG.astype(hidden_EJG.dtype), w.down)


@jax.named_scope("shared")
def shared_experts(w: SharedExperts, h_btD: jax.Array) -> jax.Array:
    """SwiGLU of the shared experts, which every token passes through.

    Collectives  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input"), "mlp_in")
    return scatter_sequence(swiglu(h_bTD, w.gate, w.up, w.down), "output")


# guide: moe
@jax.named_scope("moe")
def moe(
    w: Moe, x_btD: jax.Array, options: ForwardOptions, position: LayerPosition
) -> tuple[jax.Array, Routing]:
    """x + the shared experts of x + sum over each token's K experts of weight * expert(x).

    x_btD  [B/replica+fsdp, T/tensor, D]; so is the result.
    Collectives  those of the two layouts of experts, and of shared_experts.
    """
    m = options.model
    b, t, D = x_btD.shape
    h_btD = rms_norm(x_btD, w.norm, m.rms_norm_eps)
    share_btE, choice_btK, weight_btK = route(w, h_btD, m)
    partial_balance, tokens_per_expert = balance(share_btE, choice_btK, m)

    J = expert_capacity(m, b * t, options.capacity_factor)
    slot_nK, choice_s = assign_slots(choice_btK, m.n_routed_experts, J)
    dropped = tokens_per_expert.sum() - (slot_nK < m.n_routed_experts * J).sum(dtype=jnp.int32)

    buffer_sD = take_rows(h_btD.reshape(b * t, D), choice_s // m.num_experts_per_tok, slot_nK)
    # Weights travel with the tokens and multiply the hidden values. The gradient of a weight then
    # does not need the output of the expert.
    weight_s = take_rows(weight_btK.reshape(-1), choice_s, slot_nK.reshape(-1, 1))
    expert_parallel = isinstance(w.experts, ExpertParallelExperts)
    experts = expert_parallel_swiglu if expert_parallel else sharded_experts_swiglu
    y_EJD = experts(
        w.experts,
        buffer_sD.reshape(m.n_routed_experts, J, D),
        weight_s.reshape(m.n_routed_experts, J),
    )
    y_nD = add_rows(y_EJD.reshape(-1, D), slot_nK, choice_s // m.num_experts_per_tok)
    y_btD = y_nD.reshape(b, t, D)
    if w.shared is not None:
        y_btD += shared_experts(w.shared, h_btD)
    routing = Routing(partial_balance, tokens_per_expert, dropped)
    return x_btD + dropout(y_btD, options, position, 1), routing


# guide: end


def expert_capacity(m: utils.Model, tokens: int, factor: float | None) -> int:
    """Return J = ceil(factor * K * tokens / E), at most `tokens`.

    tokens  of one rank in one microbatch. With expert parallelism an expert has J slots for each
            rank that sends to it.
    """
    if factor is None:
        return tokens
    return min(tokens, math.ceil(factor * m.num_experts_per_tok * tokens / m.n_routed_experts))


# guide: block
def dense_layer(
    w: DenseLayer,
    x_btD: jax.Array,
    segments_bT: jax.Array | None,
    options: ForwardOptions,
    position: LayerPosition,
) -> jax.Array:
    x_btD = attention(w.attention, x_btD, segments_bT, options, position, rope=True)
    return mlp(w.mlp, x_btD, options, position)


def moe_layer(
    w: MoeLayer,
    x_btD: jax.Array,
    segments_bT: jax.Array | None,
    options: ForwardOptions,
    position: LayerPosition,
) -> tuple[jax.Array, Routing]:
    rope = options.model.rope_in_moe_layers
    x_btD = attention(w.attention, x_btD, segments_bT, options, position, rope)
    return moe(w.moe, x_btD, options, position)


def dense_layers(
    w: DenseLayer,
    x_btD: jax.Array,
    segments_bT: jax.Array | None,
    position: LayerPosition,
    layer: Callable,
) -> jax.Array:
    """Run stacked dense layers; `position.layer` is the index of the first."""

    def body(x_btD: jax.Array, one: tuple[DenseLayer, jax.Array]) -> tuple[jax.Array, None]:
        w, i = one
        here = position._replace(layer=position.layer + i)
        return layer(w, x_btD, segments_bT, position=here), None

    numbers = jnp.arange(len(w.mlp.norm), dtype=jnp.int32)
    return lax.scan(body, x_btD, (w, numbers))[0]


# guide: end


# --- embedding and loss ---------------------------------------------------------------------------


def local_rows(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the row of each id in this rank's vocabulary slice, and whether the slice has it."""
    row = ids - lax.axis_index(VOCABULARY_AXES) * rows
    return jnp.clip(row, 0, rows - 1), (row >= 0) & (row < rows)


# guide: embed
@jax.named_scope("embedding")
def embed(table_vD: jax.Array, tokens_bT: jax.Array) -> jax.Array:
    """Look up rows of the embedding -> [b, t, D], the same on every pipeline rank.

    Each rank holds a slice of the vocabulary, and adds zeros for other ids.

    Collectives  psum(pipeline) and psum_scatter(tensor) of [b, T, D].
    """
    row_bT, held_bT = local_rows(tokens_bT, table_vD.shape[0])
    partial_bTD = lax.psum(jnp.where(held_bT[:, :, None], table_vD[row_bT], 0), "pipeline")
    return lax.psum_scatter(partial_bTD, "tensor", scatter_dimension=1, tiled=True)


# guide: end


def local_logits(table_vD: jax.Array, h_nD: jax.Array, vocabulary: int) -> jax.Array:
    """Return this rank's columns of the logits, float32, with -inf for padding ids."""
    logits_nv = matmul("nD,vD->nv", h_nD, table_vD).astype(jnp.float32)
    return jnp.where(local_ids(table_vD)[None, :] < vocabulary, logits_nv, -jnp.inf)


def local_ids(table_vD: jax.Array) -> jax.Array:
    """Return the token ids [v] of this rank's vocabulary slice."""
    rows = table_vD.shape[0]
    return lax.axis_index(VOCABULARY_AXES) * rows + jnp.arange(rows, dtype=jnp.int32)


# guide: loss
@jax.named_scope("loss")
def cross_entropy(
    table_vD: jax.Array, h_nD: jax.Array, targets_n: jax.Array, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """Return -log softmax(h table^T)[target] and log(Z) of each token [n], float32.

    Collectives  pmax and two psums (pipeline x tensor) of [n].
    """
    logits_nv = local_logits(table_vD, h_nD, vocabulary)
    # The largest logit keeps exp from overflowing. It cancels out, so it needs no gradient.
    top_n = lax.pmax(lax.stop_gradient(logits_nv.max(-1)), VOCABULARY_AXES)
    Z_n = lax.psum(jnp.exp(logits_nv - top_n[:, None]).sum(-1), VOCABULARY_AXES)
    # Compared rather than indexed: the gradient of indexing scatters into zeros of all logits.
    is_target_nv = local_ids(table_vD)[None, :] == targets_n[:, None]
    picked_n = lax.psum(jnp.where(is_target_nv, logits_nv, 0).sum(-1), VOCABULARY_AXES)
    log_Z_n = jnp.log(Z_n) + top_n
    return log_Z_n - picked_n, log_Z_n


def weighted_losses(
    table_vD: jax.Array,
    h_nD: jax.Array,
    targets_n: jax.Array,
    weights_n: jax.Array,
    vocabulary: int,
) -> jax.Array:
    """Return [2] weighted sums over tokens: of the cross-entropy and of log(Z)^2."""
    loss_n, log_Z_n = cross_entropy(table_vD, h_nD, targets_n, vocabulary)
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
        return None, weighted_losses(table_vD, *chunk, vocabulary)

    sums = lax.scan(body, None, (h_cnD, targets_cn, weights_cn))[1].sum(0)
    return sums[0] + z_factor * sums[1], sums


def _chunked_loss_forward(
    vocabulary: int, z_factor: float, table_vD: jax.Array, *chunks_cn: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    def loss(table_vD: jax.Array, h_nD: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = weighted_losses(table_vD, h_nD, *rest, vocabulary)
        return sums[0] + z_factor * sums[1], sums

    def body(d_table_vD: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        (_, sums), (d_table, d_h) = jax.value_and_grad(loss, (0, 1), has_aux=True)(table_vD, *chunk)
        return d_table_vD + d_table.astype(jnp.float32), (sums, d_h)

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
