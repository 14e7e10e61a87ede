"""The architecture: embedding, latent attention, dense and expert feed-forward, blocks, loss.

Every layer is a function of (weights, activations) that runs inside `shard_map`: it sees this
rank's slices, and every collective is a line in it. Conventions are DeepSeek-V3's
(arXiv:2412.19437). When a layer runs is not known here: see passes.py and pipeline.py.

Letters. UPPER case is a whole dimension, lower case this rank's slice of it:
    B sequences        T query positions     S key positions      D width
    V vocabulary, padded                     M microbatches       n tokens of this rank (b * t)
    N heads            H head width without position              R rotary width, A = H + R
    W value width      Q query latent        C key-value latent
    F hidden width     E experts             K experts per token  G hidden width of an expert
    Z groups of experts
Words: `slots` is room at an expert, `part_x` a value that ranks still have to add up.
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
from utils import BATCH_AXES, EXPERT_AXES, MESH_AXES, VOCABULARY_AXES
from weights import Size, normal, ones, vary, varying, weight, zeros

# First values of what is added to the residual stream, over 1/sqrt(inputs): layers begin as a small
# change of the embedding, which is learned first (0.4 nats after 120 steps of a tiny model).
RESIDUAL = 0.1

# --- weights --------------------------------------------------------------------------------------

# guide: weights


def table() -> Any:
    """Embedding or output: rows over pipeline and tensor, so that no stage is heavier than another
    (arXiv:2411.05288).
    """
    return weight("V/pipeline+tensor D/fsdp", normal("D"), group="embedding")


@flax.struct.dataclass
class Query:
    """Queries straight from the residual stream."""

    up: jax.Array = weight("D/fsdp N/tensor A", normal("D"), matrix="D x N A")


@flax.struct.dataclass
class LowRankQuery:
    """Queries through a latent (arXiv:2405.04434, equations 12-13)."""

    down: jax.Array = weight("D/fsdp Q", normal("D"), matrix="D x Q")
    norm: jax.Array = weight("Q", ones, decay=False, float32=True)
    up: jax.Array = weight("Q/fsdp N/tensor A", normal("Q"), matrix="Q x N A")


@flax.struct.dataclass
class Attention:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1); kv_down makes the latent (C) and
    the rotary key (R).
    """

    query: Query | LowRankQuery
    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    kv_down: jax.Array = weight("D/fsdp C+R", normal("D"), matrix="D x C+R")
    kv_norm: jax.Array = weight("C", ones, decay=False, float32=True)
    kv_up: jax.Array = weight("C/fsdp N/tensor H+W", normal("C"), matrix="C x N H+W")
    out: jax.Array = weight("N/tensor W D/fsdp", normal("N W", RESIDUAL), matrix="N W x D")


@flax.struct.dataclass
class Mlp:
    """Gated feed-forward network (arXiv:2002.05202, equation 6)."""

    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    gate: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    up: jax.Array = weight("D/fsdp F/tensor", normal("D"), matrix="D x F")
    down: jax.Array = weight("F/tensor D/fsdp", normal("F", RESIDUAL), matrix="F x D")


@flax.struct.dataclass
class SpreadExperts:
    """Routed experts, each whole on one rank of the fsdp x tensor plane."""

    # jax takes the structures of two dataclasses for the same whose fields are, and what was traced
    # with one for the other's: a field that is not the same keeps them apart.
    layout: str = flax.struct.field(pytree_node=False, default="spread", kw_only=True)
    gate: jax.Array = weight("E/fsdp+tensor D G", normal("D"), matrix="D x G", active=("K", "E"))
    up: jax.Array = weight("E/fsdp+tensor D G", normal("D"), matrix="D x G", active=("K", "E"))
    down: jax.Array = weight(
        "E/fsdp+tensor G D", normal("G", RESIDUAL), matrix="G x D", active=("K", "E")
    )


@flax.struct.dataclass
class GatheredExperts:
    """Routed experts stored like other weights: cut over fsdp and tensor, gathered over fsdp before
    use.
    """

    layout: str = flax.struct.field(pytree_node=False, default="gathered", kw_only=True)
    gate: jax.Array = weight("E D/fsdp G/tensor", normal("D"), matrix="D x G", active=("K", "E"))
    up: jax.Array = weight("E D/fsdp G/tensor", normal("D"), matrix="D x G", active=("K", "E"))
    down: jax.Array = weight(
        "E G/tensor D/fsdp", normal("G", RESIDUAL), matrix="G x D", active=("K", "E")
    )


@flax.struct.dataclass
class SharedExperts:
    """The experts that every token passes through, as one gated network, X wide in all."""

    gate: jax.Array = weight("D/fsdp X/tensor", normal("D"), matrix="D x X")
    up: jax.Array = weight("D/fsdp X/tensor", normal("D"), matrix="D x X")
    down: jax.Array = weight("X/tensor D/fsdp", normal("X", RESIDUAL), matrix="X x D")


@flax.struct.dataclass
class Moe:
    """Mixture of experts (arXiv:2412.19437, section 2.1.2); `bias` moves the choice of experts, not
    their weights.
    """

    experts: SpreadExperts | GatheredExperts
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
    """`dense_layers` dense layers, stacked, then at most one layer with experts."""

    dense: DenseLayer | None
    moe: MoeLayer | None


@flax.struct.dataclass
class First:
    """What runs before the first stage."""

    prefix: DenseLayer | None
    embedding: jax.Array = table()


@flax.struct.dataclass
class Last:
    """What runs after the last stage; without `output` the embedding is used."""

    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    output: jax.Array | None = table()


class Ends(NamedTuple):
    """What runs before and after the stages, together: one gradient for a tied embedding."""

    first: First
    last: Last

    @property
    def output(self) -> jax.Array:
        return self.first.embedding if self.last.output is None else self.last.output


@flax.struct.dataclass
class Transformer:
    first: First
    blocks: Block
    last: Last


# guide: end


def sizes(config: utils.Config) -> Mapping[str, Size]:
    """Each letter of a layout: its whole size, and the flag that sets it."""
    m, mesh = config.model, config.mesh
    flags = {
        "D": "width",
        "N": "heads",
        "Q": "q_lora_rank",
        "C": "kv_lora_rank",
        "F": "hidden",
        "G": "expert_hidden",
        "E": "experts",
        "K": "experts_per_token",
        "H": "qk_nope_head_dim",
        "R": "qk_rope_head_dim",
        "W": "v_head_dim",
        "dense": "dense_layers",
        "prefix": "prefix_layers",
    }
    out = {letter: Size(getattr(m, flag), f"model.{flag}") for letter, flag in flags.items()}
    chunks = mesh.virtual * mesh.pipeline
    if m.blocks % chunks:
        raise ValueError(
            f"--model.blocks {m.blocks} cannot be cut over --mesh.pipeline {mesh.pipeline} x "
            f"--mesh.virtual {mesh.virtual}: every chunk must hold as many blocks. Use "
            f"--model.blocks {-(-m.blocks // chunks) * chunks}."
        )
    for letter in ("H+R", "C+R", "H+W"):
        out[letter] = Size(sum(out[part].size for part in letter.split("+")), out[letter[0]].flag)
    padded = f"{m.vocabulary} (the tokenizer's; {m.padded_vocabulary} with padding)"
    return out | {
        "A": out["H+R"],
        "V": Size(m.padded_vocabulary, "model.vocabulary", fixed=padded),
        "X": Size(m.shared_experts * m.expert_hidden, "model.expert_hidden", m.shared_experts),
        "virtual": Size(mesh.virtual, "mesh.virtual"),
        "stage": Size(mesh.pipeline, "mesh.pipeline"),
        "block": Size(m.blocks // chunks, "model.blocks"),
    }


def declare(config: utils.Config) -> Transformer:
    """The model's weights for these sizes, as Weights.

    Blocks are stacked [virtual, stage, block]: in row-major order that is the order in which the
    layers run.

    Raises ValueError where a size cannot be cut over the mesh.
    """
    m, size = config.model, sizes(config)
    query = weights.declare(LowRankQuery if m.q_lora_rank else Query, size)
    attention = weights.declare(Attention, size, query=query)
    dense = DenseLayer(attention=attention, mlp=weights.declare(Mlp, size))
    experts = weights.declare(SpreadExperts if spread_experts(config) else GatheredExperts, size)
    shared = weights.declare(SharedExperts, size) if m.shared_experts else None
    moe = MoeLayer(attention, weights.declare(Moe, size, experts=experts, shared=shared))
    block = Block(
        dense=weights.stacked(dense, "dense", size) if m.dense_layers else None,
        moe=moe if m.moe_layers else None,
    )
    prefix = weights.stacked(dense, "prefix", size) if m.prefix_layers else None
    last = weights.declare(Last, size)
    tree = Transformer(
        first=weights.declare(First, size, prefix=prefix),
        blocks=weights.stacked(block, "virtual stage/pipeline block", size),
        last=last.replace(output=None) if m.tied else last,
    )
    tree = weights.named(tree)
    weights.check_cuts(tree, dict(zip(MESH_AXES, config.mesh.shape, strict=True)))
    return tree


def spread_experts(config: utils.Config) -> bool:
    """Whether whole experts are spread over fsdp x tensor; where they do not divide that plane they
    are cut and gathered.
    """
    if config.model.experts_layout == "auto":
        return config.model.experts % (config.mesh.fsdp * config.mesh.tensor) == 0
    return config.model.experts_layout == "spread"


# --- layers ---------------------------------------------------------------------------------------


@flax.struct.dataclass
class Batch:
    """Sequences of this rank: [M, b, T] each, or [b, T] of one microbatch."""

    tokens: jax.Array
    targets: jax.Array
    loss_weights: jax.Array  # float32; 0 takes a target out of the loss
    segments: jax.Array  # number of the document within the window
    number: jax.Array | None = None  # [M], or of this microbatch


class At(NamedTuple):
    """Where in the run a layer is: what its dropout key is made from."""

    step: jax.Array
    microbatch: jax.Array
    layer: jax.Array


class How(NamedTuple):
    """How layers run in this pass."""

    model: utils.Model
    seed: int
    capacity_factor: float | None  # room at each expert, over K n / E; None is room for every token
    dropout: float = 0.0
    attention: str = "xla"  # implementation: see attention.chosen


def matmul(formula: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum in the arguments' dtype; float32 is multiplied as float32 on every device.

    Rows and positions are multiplied as one dimension: where the gradient of a weight would sum
    over two, XLA for CPUs writes transposed copies of both operands first.
    """
    precision = "highest" if x.dtype == jnp.float32 else None
    of_x, of_w, of_y = re.split(",|->", formula)
    rows, positions = of_x[:2]
    if of_y[:2] != of_x[:2] or rows in of_w or positions in of_w:
        return jnp.einsum(formula, x, w, precision=precision)
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    y = jnp.einsum(f"{of_x[1:]},{of_w}->{of_y[1:]}", flat, w, precision=precision)
    return y.reshape(*x.shape[:2], *y.shape[1:])


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467); float32, for the sum of squares."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x32 * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


def gather_sequence(x_btD: jax.Array, name: str) -> jax.Array:
    """[b, t, .] -> [b, T, .], named in profiles and plans.  Sends all_gather(tensor)."""
    with jax.named_scope(name):
        return lax.all_gather(x_btD, "tensor", axis=1, tiled=True)


def scatter_sequence(part_bTD: jax.Array, name: str) -> jax.Array:
    """Each tensor rank's part of a sum [b, T, D] -> the sum [b, t, D], named as well.  Sends
    psum_scatter(tensor).
    """
    with jax.named_scope(name):
        return lax.psum_scatter(part_bTD, "tensor", scatter_dimension=1, tiled=True)


def drop(y_btD: jax.Array, how: How, at: At, branch: int) -> jax.Array:
    """Dropout (arXiv:1207.0580), scaled so that the mean stays.

    The key is made here, from integers, so that nothing but them has to be kept for the backward
    pass.
    """
    if not how.dropout:
        return y_btD
    key = jax.random.key(how.seed)
    # Ranks that hold different data draw differently; pipeline ranks differ by their layer.
    for number in (*at, branch, lax.axis_index(BATCH_AXES), lax.axis_index("tensor")):
        key = jax.random.fold_in(key, number)
    kept = jax.random.bernoulli(key, 1 - how.dropout, y_btD.shape)
    return jnp.where(kept, y_btD / (1 - how.dropout), 0)


# guide: rope
def frequencies(m: utils.Model) -> jax.Array:
    """[R/2] angles from one position to the next: theta^(-2i/R) for pair i.

    With YaRN (arXiv:2309.00071, section 3.2), over rope_factor where a pair turns less often than
    rope_beta_slow in the original context, as they are where it turns more often than
    rope_beta_fast, and in between a mixture, linear in i.
    """
    R, theta = m.qk_rope_head_dim, m.rope_theta
    half = R // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if m.rope_factor == 1:
        return frequency

    def pair(turns: float) -> float:
        """i of the pair that turns so often in the original context."""
        return R * math.log(m.rope_original_length / (turns * math.tau)) / (2 * math.log(theta))

    # Rounded and bounded as DeepSeek's code does: a checkpoint was trained with just these.
    first, last = math.floor(pair(m.rope_beta_fast)), math.ceil(pair(m.rope_beta_slow))
    first, last = max(first, 0), min(last, R - 1)
    slowed = (jnp.arange(half, dtype=jnp.float32) - first) / (last - first or 0.001)
    slowed = jnp.clip(slowed, 0.0, 1.0)
    return frequency * (1 - slowed) + frequency / m.rope_factor * slowed


def temperature(m: utils.Model, mscale: float) -> float:
    """1 + mscale / 10 * log(rope_factor): YaRN's sqrt(1/t) (arXiv:2309.00071, section 3.4)."""
    return 1 + 0.1 * mscale * math.log(m.rope_factor)


def rotary_factor(m: utils.Model) -> float:
    """What queries and keys with position grow by."""
    if m.rope_mscale and m.rope_mscale_all_dim:
        return temperature(m, m.rope_mscale) / temperature(m, m.rope_mscale_all_dim)
    return temperature(m, 1.0)


def score_scale(m: utils.Model) -> float:
    """What scores are multiplied by: 1 / sqrt(H + R), and YaRN's 1/t."""
    width = m.qk_nope_head_dim + m.qk_rope_head_dim
    return width**-0.5 * temperature(m, m.rope_mscale_all_dim) ** 2


def rotate(x_bTnR: jax.Array, m: utils.Model, position_bT: jax.Array | None = None) -> jax.Array:
    """Rotary embedding (arXiv:2104.09864): pair (i, i + R/2) turned by position * frequency;
    float32 for large positions.

    position_bT  0, 1, ... if not given.
    """
    if position_bT is None:
        position_bT = jnp.arange(x_bTnR.shape[1])[None]
    frequency = frequencies(m)
    turns = position_bT.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    angle = turns[:, :, None, :]
    x32, factor = x_bTnR.astype(jnp.float32), rotary_factor(m)
    a, b = jnp.split(x32 if factor == 1 else x32 * factor, 2, axis=-1)
    turned = (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
    return jnp.concatenate(turned, axis=-1).astype(x_bTnR.dtype)


# guide: end


# guide: attention
def latents(
    w: Attention, x_btD: jax.Array, m: utils.Model
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What queries are made from, what keys and values are made from, and the rotary key."""
    h_btD = rms_norm(x_btD, w.norm, m.norm_epsilon)
    latent_btC, key_btR = jnp.split(
        matmul("btD,DC->btC", h_btD, w.kv_down), [m.kv_lora_rank], axis=-1
    )
    epsilon = m.latent_norm_epsilon or m.norm_epsilon
    latent_btC = rms_norm(latent_btC, w.kv_norm, epsilon)
    if not m.q_lora_rank:
        return h_btD, latent_btC, key_btR
    query_btQ = matmul("btD,DQ->btQ", h_btD, w.query.down)
    return rms_norm(query_btQ, w.query.norm, epsilon), latent_btC, key_btR


@jax.named_scope("attention")
def attention(
    w: Attention, x_btD: jax.Array, segments_bT: jax.Array | None, how: How, at: At, rope: bool
) -> jax.Array:
    """x + multi-head latent attention of x (arXiv:2405.04434, equations 9-19).

    x_btD  [B/fsdp, T/tensor, D]; so is the result.
    Sends  all_gather(tensor) of the latents [b, T, Q + C + R] (of x itself where queries have
           none), psum_scatter(tensor) of [b, T, D].
    """
    m = how.model
    query_btQ, latent_btC, key_btR = latents(w, x_btD, m)
    # The narrow latents travel, not what is made from them.
    sent = jnp.concatenate([query_btQ, latent_btC, key_btR], axis=-1)
    sent = checkpoint_name(gather_sequence(sent, "latents"), "latents")
    ends = [query_btQ.shape[-1], query_btQ.shape[-1] + m.kv_lora_rank]
    query_bTQ, latent_bTC, key_bTR = jnp.split(sent, ends, axis=-1)

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
    # Kept as "attention".
    y_bTnW = attend(q_bTnA, k_bTnA, v_bTnW, segments_bT, how.attention, score_scale(m))

    # n contracted: each tensor rank has its heads' part.
    part_bTD = matmul("bTnW,nWD->bTD", y_bTnW, w.out)
    y_btD = checkpoint_name(scatter_sequence(part_bTD, "output"), "attention_out")
    return x_btD + drop(y_btD, how, at, 0)


# guide: end


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """What SwiGLU (arXiv:2002.05202) multiplies by `down`."""
    return jax.nn.silu(gate) * up


def swiglu(h_bTD: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate h) * up h): this tensor rank's part of the sum over F."""
    # Both products are named, and not what is made of them: its gradient would need them again.
    gate_bTf = checkpoint_name(matmul("bTD,Df->bTf", h_bTD, gate), "hidden")
    up_bTf = checkpoint_name(matmul("bTD,Df->bTf", h_bTD, up), "hidden")
    return matmul("bTf,fD->bTD", gated(gate_bTf, up_bTf), down)


# guide: mlp
@jax.named_scope("mlp")
def mlp(w: Mlp, x_btD: jax.Array, how: How, at: At) -> jax.Array:
    """x + down(silu(gate x) * up x).

    x_btD  [B/fsdp, T/tensor, D]; so is the result.
    Sends  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    h_btD = rms_norm(x_btD, w.norm, how.model.norm_epsilon)
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input"), "mlp_in")
    part_bTD = swiglu(h_bTD, w.gate, w.up, w.down)
    return x_btD + drop(scatter_sequence(part_bTD, "output"), how, at, 1)


# guide: end


class Routing(NamedTuple):
    """What a MoE layer tells of its routing: this rank's tokens only."""

    # Sum over sequences of sum_e f_e P_e (arXiv:2412.19437, equation 17); differentiable.
    part_balance: jax.Array
    tokens_per_expert: jax.Array  # [E] int32, before any is dropped
    dropped: jax.Array  # int32: choices of an expert that had no room


@jax.named_scope("router")
def route(w: Moe, h_btD: jax.Array, m: utils.Model) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores, and each token's K experts with their weights (arXiv:2412.19437, equations 12-16).

    -> scores_btE that sum to 1, choice_btK int32, weight_btK.
    float32: a difference of a rounding error would choose another expert.
    """
    logits_btE = matmul("btD,DE->btE", h_btD.astype(jnp.float32), w.router)
    scores_btE = jax.nn.sigmoid(logits_btE) if m.scores == "sigmoid" else jax.nn.softmax(logits_btE)
    bias_E = jnp.expand_dims(w.bias, (0, 1))
    ranking_btE = lax.stop_gradient(scores_btE + bias_E)
    if m.groups_per_token < m.expert_groups:
        ranking_btE = best_groups(ranking_btE, m)
    _, choice_btK = lax.top_k(ranking_btE, m.experts_per_token)
    weight_btK = jnp.take_along_axis(scores_btE, choice_btK, axis=-1)
    if m.normalize_weights:
        weight_btK /= weight_btK.sum(-1, keepdims=True) + 1e-20
    share_btE = scores_btE / scores_btE.sum(-1, keepdims=True)
    return share_btE, choice_btK, weight_btK * m.routed_scaling_factor


def best_groups(ranking_btE: jax.Array, m: utils.Model) -> jax.Array:
    """The ranking in each token's best groups, and -inf in the others: a group is ranked by the sum
    of its two best experts (arXiv:2412.19437, section 2.1.2).
    """
    ranking_btZe = ranking_btE.reshape(*ranking_btE.shape[:2], m.expert_groups, -1)
    two_btZ2, _ = lax.top_k(ranking_btZe, 2)
    _, best_btk = lax.top_k(two_btZ2.sum(-1), m.groups_per_token)
    groups = jnp.arange(m.expert_groups, dtype=best_btk.dtype)[None, None, :, None]
    seen_btZ = (best_btk[:, :, None, :] == groups).any(-1)
    return jnp.where(seen_btZ[..., None], ranking_btZe, -jnp.inf).reshape(ranking_btE.shape)


@jax.named_scope("balance")
def balance(
    share_btE: jax.Array, choice_btK: jax.Array, m: utils.Model
) -> tuple[jax.Array, jax.Array]:
    """Sum over sequences of sum_e f_e P_e, and [E] choices of each expert (arXiv:2412.19437,
    equations 17-20).

    f, the share of a whole sequence's tokens that chose e, has no gradient; the loss is linear in
    P, so ranks add up their parts.
    Sends  psum(tensor) of [b, E] integers.
    """
    experts = jnp.arange(m.experts, dtype=choice_btK.dtype)[None, None, None, :]
    count_bE = (choice_btK[..., None] == experts).sum((1, 2), dtype=jnp.int32)
    T = share_btE.shape[1] * lax.axis_size("tensor")
    f_bE = lax.psum(count_bE, "tensor").astype(jnp.float32) * (
        m.experts / (m.experts_per_token * T)
    )
    part_P_bE = share_btE.sum(1) / T
    return (f_bE * part_P_bE).sum(), count_bE.sum(0)


def assign_slots(choice_btK: jax.Array, experts: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Give each choice a slot at its expert, by position, then sequence: no later token displaces
    an earlier one.

    choice_btK  numbers of experts.
    -> slot_nK  e * slots + place, or experts * slots for a choice that has no room;
       choice_s [experts * slots], the choice (n * K + k) that sits in a slot, or n * K for none.
    A stable sort and two scatters of integers: O(n K log n K).
    """
    b, t, K = choice_btK.shape
    by_position = choice_btK.swapaxes(0, 1).reshape(-1)
    order = jnp.argsort(by_position, stable=True)
    expert = by_position[order]
    start = jnp.searchsorted(expert, jnp.arange(experts, dtype=expert.dtype)).astype(jnp.int32)
    place = jnp.arange(expert.size, dtype=jnp.int32) - start[expert]
    slot = jnp.where(place < slots, expert * slots + place, experts * slots)
    slot_tbK = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True).reshape(t, b, K)
    slot_nK = slot_tbK.swapaxes(0, 1).reshape(b * t, K)
    numbers = jnp.arange(b * t * K, dtype=jnp.int32)
    empty = vary(jnp.full(experts * slots, b * t * K, jnp.int32), varying(slot))
    return slot_nK, empty.at[slot_nK.reshape(-1)].set(numbers, mode="drop")


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """x[index], zeros where `index` is past the end.

    back  [rows of x, J]: the places in the result where each row went, past the end for none. With
          it the backward pass is a gather too; without, it would be a scatter of rows, which runs
          one row after the other on a CPU.
    """
    return _rows(x, index)


@jax.custom_vjp
def add_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Sum over j of x[index[:, j]], which is what take_rows does backward, and the reverse.

    back  [rows of x]: the place in the result that each row is added to.
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


def spread_experts_swiglu(w: SpreadExperts, box_ECD: jax.Array, weight_EC: jax.Array) -> jax.Array:
    """Each slot through its expert, times its weight.

    Sends  all_to_all(fsdp x tensor) of the slots, there and back, and of their weights.
    """
    exchange = partial(lax.all_to_all, axis_name=EXPERT_AXES, tiled=True)
    with jax.named_scope("dispatch"):  # -> [E/ranks, ranks * slots, ...]
        box_eCD, weight_eC = (
            exchange(a, split_axis=0, concat_axis=1) for a in (box_ECD, weight_EC)
        )
    y_eCD = _experts(w, box_eCD, weight_eC)
    with jax.named_scope("return"):
        return exchange(y_eCD, split_axis=1, concat_axis=0)


def gathered_experts_swiglu(
    w: GatheredExperts, box_ECD: jax.Array, weight_EC: jax.Array
) -> jax.Array:
    """Each slot through its expert, times its weight.

    Sends  all_gather(tensor) and psum_scatter(tensor) of the slots, all_gather of their weights.
    """
    with jax.named_scope("dispatch"):
        box_ECD = lax.all_gather(box_ECD, "tensor", axis=1, tiled=True)
        weight_EC = lax.all_gather(weight_EC, "tensor", axis=1, tiled=True)
    part_ECD = _experts(w, box_ECD, weight_EC)
    with jax.named_scope("return"):
        return lax.psum_scatter(part_ECD, "tensor", scatter_dimension=1, tiled=True)


@jax.named_scope("experts")
def _experts(
    w: SpreadExperts | GatheredExperts, box_ECD: jax.Array, weight_EC: jax.Array
) -> jax.Array:
    box_ECD, weight_EC = checkpoint_name((box_ECD, weight_EC), "expert_in")
    # One product, which reads the slots once, as its gradient does. The weights side by side are a
    # copy, which that outweighs where an expert has more slots than about 4 G.
    both = matmul("ECD,EDG->ECG", box_ECD, jnp.concatenate([w.gate, w.up], axis=-1))
    gate_ECG, up_ECG = jnp.split(checkpoint_name(both, "expert_hidden"), 2, axis=-1)
    hidden_ECG = gated(gate_ECG, up_ECG)
    # float32, for the sum over G in the gradient of a weight.
    weighted_ECG = hidden_ECG.astype(jnp.float32) * weight_EC[..., None]
    return matmul("ECG,EGD->ECD", weighted_ECG.astype(hidden_ECG.dtype), w.down)


@jax.named_scope("shared")
def shared_experts(w: SharedExperts, h_btD: jax.Array) -> jax.Array:
    """The gated network that every token passes through.

    Sends  all_gather(tensor) and psum_scatter(tensor) of [b, T, D].
    """
    h_bTD = checkpoint_name(gather_sequence(h_btD, "input"), "mlp_in")
    return scatter_sequence(swiglu(h_bTD, w.gate, w.up, w.down), "output")


# guide: moe
@jax.named_scope("moe")
def moe(w: Moe, x_btD: jax.Array, how: How, at: At) -> tuple[jax.Array, Routing]:
    """x + the shared experts of x + sum over each token's K experts of weight * expert(x).

    x_btD  [B/fsdp, T/tensor, D]; so is the result.
    Sends  see the two layouts of experts, and shared_experts.
    """
    m = how.model
    b, t, D = x_btD.shape
    h_btD = rms_norm(x_btD, w.norm, m.norm_epsilon)
    share_btE, choice_btK, weight_btK = route(w, h_btD, m)
    part_balance, tokens_per_expert = balance(share_btE, choice_btK, m)

    slots = expert_slots(m, b * t, how.capacity_factor)
    slot_nK, choice_s = assign_slots(choice_btK, m.experts, slots)
    dropped = tokens_per_expert.sum() - (slot_nK < m.experts * slots).sum(dtype=jnp.int32)

    box_sD = take_rows(h_btD.reshape(b * t, D), choice_s // m.experts_per_token, slot_nK)
    # Weights go along, and are multiplied by where the hidden values are: so nobody needs what each
    # expert returned for the gradient of its weight.
    weight_s = take_rows(weight_btK.reshape(-1), choice_s, slot_nK.reshape(-1, 1))
    run = spread_experts_swiglu if isinstance(w.experts, SpreadExperts) else gathered_experts_swiglu
    box_ECD = run(
        w.experts, box_sD.reshape(m.experts, slots, D), weight_s.reshape(m.experts, slots)
    )
    y_nD = add_rows(box_ECD.reshape(-1, D), slot_nK, choice_s // m.experts_per_token)
    y_btD = y_nD.reshape(b, t, D)
    if w.shared is not None:
        y_btD += shared_experts(w.shared, h_btD)
    return x_btD + drop(y_btD, how, at, 1), Routing(part_balance, tokens_per_expert, dropped)


# guide: end


def expert_slots(m: utils.Model, tokens: int, factor: float | None) -> int:
    """ceil(factor * K * tokens / E): room at each expert for a rank's tokens; never more than its
    tokens, which is all of them.
    """
    if factor is None:
        return tokens
    return min(tokens, math.ceil(factor * m.experts_per_token * tokens / m.experts))


# guide: block
def dense_layer(
    w: DenseLayer, x_btD: jax.Array, segments_bT: jax.Array | None, how: How, at: At
) -> jax.Array:
    return mlp(w.mlp, attention(w.attention, x_btD, segments_bT, how, at, rope=True), how, at)


def moe_layer(
    w: MoeLayer, x_btD: jax.Array, segments_bT: jax.Array | None, how: How, at: At
) -> tuple[jax.Array, Routing]:
    x_btD = attention(w.attention, x_btD, segments_bT, how, at, how.model.rope_in_moe_layers)
    return moe(w.moe, x_btD, how, at)


def dense_layers(
    w: DenseLayer, x_btD: jax.Array, segments_bT: jax.Array | None, at: At, layer: Callable
) -> jax.Array:
    """Stacked dense layers, one after the other; `at.layer` is the first one's number."""

    def body(x_btD: jax.Array, one: tuple[DenseLayer, jax.Array]) -> tuple[jax.Array, None]:
        w, i = one
        return layer(w, x_btD, segments_bT, at=at._replace(layer=at.layer + i)), None

    numbers = jnp.arange(len(w.mlp.norm), dtype=jnp.int32)
    return lax.scan(body, x_btD, (w, numbers))[0]


# guide: end


# --- ends -----------------------------------------------------------------------------------------


def local_rows(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Row of each id in this rank's slice of the vocabulary, and whether the slice has it."""
    row = ids - lax.axis_index(VOCABULARY_AXES) * rows
    return jnp.clip(row, 0, rows - 1), (row >= 0) & (row < rows)


# guide: embed
@jax.named_scope("embedding")
def embed(table_vD: jax.Array, tokens_bT: jax.Array) -> jax.Array:
    """Rows of the embedding -> [b, t, D], the same on every pipeline rank.

    Sends  psum(pipeline) and psum_scatter(tensor) of [b, T, D]: each rank has a slice of the
           vocabulary.
    """
    row_bT, held_bT = local_rows(tokens_bT, table_vD.shape[0])
    part_bTD = lax.psum(jnp.where(held_bT[:, :, None], table_vD[row_bT], 0), "pipeline")
    return lax.psum_scatter(part_bTD, "tensor", scatter_dimension=1, tiled=True)


# guide: end


def slice_logits(table_vD: jax.Array, h_nD: jax.Array, vocabulary: int) -> jax.Array:
    """This rank's columns of the logits, float32; those of pad ids are -inf."""
    logits_nv = matmul("nD,vD->nv", h_nD, table_vD).astype(jnp.float32)
    return jnp.where(local_ids(table_vD)[None, :] < vocabulary, logits_nv, -jnp.inf)


def local_ids(table_vD: jax.Array) -> jax.Array:
    """The ids [v] whose rows this rank has."""
    rows = table_vD.shape[0]
    return lax.axis_index(VOCABULARY_AXES) * rows + jnp.arange(rows, dtype=jnp.int32)


# guide: loss
@jax.named_scope("loss")
def log_loss(
    table_vD: jax.Array, h_nD: jax.Array, targets_n: jax.Array, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """-log softmax(h table^T)[target] and log(Z) of each token [n], float32.

    Sends  pmax and two psums (pipeline x tensor) of [n].
    """
    logits_nv = slice_logits(table_vD, h_nD, vocabulary)
    # Any constant would do, so it needs no gradient; the largest logit keeps exp from overflowing.
    top_n = lax.pmax(lax.stop_gradient(logits_nv.max(-1)), VOCABULARY_AXES)
    Z_n = lax.psum(jnp.exp(logits_nv - top_n[:, None]).sum(-1), VOCABULARY_AXES)
    # Compared rather than indexed: the gradient of an index is a scatter into zeros of all logits.
    is_target_nv = local_ids(table_vD)[None, :] == targets_n[:, None]
    picked_n = lax.psum(jnp.where(is_target_nv, logits_nv, 0).sum(-1), VOCABULARY_AXES)
    log_Z_n = jnp.log(Z_n) + top_n
    return log_Z_n - picked_n, log_Z_n


def token_losses(
    table_vD: jax.Array,
    h_nD: jax.Array,
    targets_n: jax.Array,
    weights_n: jax.Array,
    vocabulary: int,
) -> jax.Array:
    """[2]: weighted sums over tokens of the loss and of log(Z)^2.  Sends as log_loss does."""
    loss_n, log_Z_n = log_loss(table_vD, h_nD, targets_n, vocabulary)
    return jnp.stack([(weights_n * loss_n).sum(), (weights_n * log_Z_n**2).sum()])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_loss(
    options: tuple[int, float],
    table_vD: jax.Array,
    h_cnD: jax.Array,
    targets_cn: jax.Array,
    weights_cn: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """cross-entropy + z_factor * z-loss, and both sums [2]; logits of one chunk of tokens exist at
    a time.

    options  (vocabulary without pads, z_factor).
    The gradient is made with the value, chunk by chunk: logits are neither kept nor computed twice.
    """
    vocabulary, z_factor = options

    def body(_: None, chunk: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        return None, token_losses(table_vD, *chunk, vocabulary)

    sums = lax.scan(body, None, (h_cnD, targets_cn, weights_cn))[1].sum(0)
    return sums[0] + z_factor * sums[1], sums


def _chunked_loss_forward(
    options: tuple[int, float],
    table_vD: jax.Array,
    h_cnD: jax.Array,
    targets_cn: jax.Array,
    weights_cn: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    vocabulary, z_factor = options

    def loss(table_vD: jax.Array, h_nD: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = token_losses(table_vD, h_nD, *rest, vocabulary)
        return sums[0] + z_factor * sums[1], sums

    def body(d_table_vD: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        (_, sums), (d_table, d_h) = jax.value_and_grad(loss, (0, 1), has_aux=True)(table_vD, *chunk)
        return d_table_vD + d_table.astype(jnp.float32), (sums, d_h)

    zero = vary(jnp.zeros(table_vD.shape, jnp.float32), varying(table_vD))
    d_table_vD, (sums, d_h_cnD) = lax.scan(body, zero, (h_cnD, targets_cn, weights_cn))
    sums = sums.sum(0)
    return (sums[0] + z_factor * sums[1], sums), (d_table_vD.astype(table_vD.dtype), d_h_cnD)


def _chunked_loss_backward(
    options: tuple[int, float],
    grads: tuple[jax.Array, jax.Array],
    d_out: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    scale = d_out[0]  # the sums are reported, not trained on
    return *((g * scale.astype(g.dtype)) for g in grads), None, None


chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


# guide: end


@cache
def chunks(tokens: int, most: int) -> int:
    """The fewest equal chunks of at most `most` tokens."""
    return next(c for c in range(max(1, -(-tokens // most)), tokens + 1) if tokens % c == 0)
