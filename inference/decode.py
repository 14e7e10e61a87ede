"""Incremental decoding with a cache of latents.

A layer caches the latent and the rotary key of each earlier position: C + R values for all heads.
Keys and values are not materialized. The matrix that would expand them is absorbed into query and
output (arXiv:2405.04434, section 2.1.2). New positions are one token per sequence, or a prompt.

Differences from training, model.py: a tensor rank has all new positions, as one position cannot be
divided; no token is dropped by an expert; weights are gathered over fsdp once, not per step.

Letters as in model.py; T new positions of a sequence, S positions of the cache, A = C + R,
n tokens of this rank, m tokens of all fsdp ranks.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import utils
from attention import MASKED
from model import (
    Attention,
    DenseLayer,
    ExpertParallelExperts,
    Mlp,
    Moe,
    ShardedExperts,
    Transformer,
    latents,
    local_logits,
    local_rows,
    matmul,
    rms_norm,
    rotate,
    route,
    softmax_scale,
    swiglu,
)
from pipeline import index
from utils import BATCH_AXES, EXPERT_AXES, VOCABULARY_AXES, Config
from weights import Weight, vary, varying

BLOCK = 256  # cached positions that attention processes at once
CACHE_SPEC = P(None, BATCH_AXES)
Experts = ExpertParallelExperts | ShardedExperts


# --- weights and cache ----------------------------------------------------------------------------


def decoding_config(config: Config, fsdp: int, tensor: int) -> Config:
    """Return the config on a mesh to decode on, with expert parallelism where experts divide it."""
    mesh = utils.Mesh(fsdp=fsdp, pipeline=1, tensor=tensor)
    m = dataclasses.replace(config.model, experts_layout="auto")
    return dataclasses.replace(config, mesh=mesh, model=m)


def abstract_weights(config: Config, declared: Transformer, mesh: Mesh) -> Transformer:
    """Return shape, type and layout of each weight to decode with; blocks are [blocks, ...].

    Weights are replicated over fsdp, but for the experts under expert parallelism.
    """
    dtype, declared = jnp.dtype(config.model.compute_dtype), heads_first(declared, _transpose)

    def one(w: Any, stack: int = 0) -> jax.ShapeDtypeStruct:
        shape = (math.prod(w.shape[:stack]), *w.shape[stack:]) if stack else w.shape
        # With one pipeline rank nothing varies over pipeline; a spec without it needs no casts.
        kept = [tuple(a for a in axes if a != "pipeline") for axes in w.dim_axes[-len(shape) :]]
        spec = P(*(None if axes in ((), ("fsdp",)) else axes for axes in kept))
        layout = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if w.float32 else dtype, sharding=layout)

    blocks = jax.tree.map(partial(one, stack=3), declared.blocks)
    first, last = (jax.tree.map(one, part) for part in (declared.first, declared.last))
    return Transformer(first=first, blocks=blocks, last=last)


def heads_first(w: Any, transpose: Callable[[Any, tuple[int, ...]], Any]) -> Any:
    """Transpose each kv_up [..., C, N, H + W] to [..., N, H + W, C].

    Decoding contracts it in this order; the loop over layers would transpose it for every token.
    """

    def one(a: Any) -> Any:
        if not isinstance(a, Attention):
            return a
        *stack, C, N, X = range(len(a.kv_up.shape))
        return a.replace(kv_up=transpose(a.kv_up, (*stack, N, X, C)))

    return jax.tree.map(one, w, is_leaf=lambda a: isinstance(a, Attention))


def _transpose(w: Weight, order: tuple[int, ...]) -> Weight:
    cuts, sizes = (tuple(of[dim] for dim in order) for of in (w.dim_axes, w.sizes))
    return dataclasses.replace(w, dim_axes=cuts, sizes=sizes)


def weight_converter(abstract: Transformer) -> Callable:
    """Return the function that converts weights to those of `abstract_weights`.

    It takes weights on any mesh of the same devices in the same order.
    """
    leaves, structure = jax.tree.flatten(abstract)

    def convert(w: Any) -> Transformer:
        # By leaves, because the two layouts of experts are two classes.
        pairs = zip(jax.tree.leaves(heads_first(w, jnp.transpose)), leaves, strict=True)
        return structure.unflatten([a.reshape(to.shape).astype(to.dtype) for a, to in pairs])

    return jax.jit(convert, out_shardings=structure.unflatten([a.sharding for a in leaves]))


def abstract_cache(config: Config, mesh: Mesh, sequences: int, length: int) -> jax.ShapeDtypeStruct:
    """Return the cache [layers, B, S, A] for texts of this length; S is a multiple of BLOCK."""
    m, S = config.model, -(-length // BLOCK) * BLOCK
    shape = (m.num_hidden_layers, sequences, S, values_per_token(m))
    layout = NamedSharding(mesh, CACHE_SPEC)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(m.compute_dtype), sharding=layout)


def bytes_per_device(arrays: Any) -> int:
    """Return the bytes of a tree of arrays, which may be abstract, on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(arrays)
    )


def values_per_token(m: utils.Model) -> int:
    """Return the width A of one layer's cache."""
    return m.kv_lora_rank + m.qk_rope_head_dim


# --- layers ---------------------------------------------------------------------------------------


class Past(NamedTuple):
    """Cached values of the earlier positions."""

    cache_LbSA: jax.Array
    start_b: jax.Array  # cached positions of each sequence; the first new one has this number


# guide: cached_attention
@jax.named_scope("attention")
def attention(
    w: Attention, x_bTD: jax.Array, past: Past, layer: jax.Array, m: utils.Model, rope: bool
) -> tuple[jax.Array, jax.Array]:
    """Return x + attention over cached and new positions, and the values to cache, [b, T, A].

    Collectives  psum(tensor) of [b, T, D].
    """
    position_bT = positions(past, x_bTD.shape[1])
    rotated = partial(rotate, m=m, position_bT=position_bT) if rope else lambda x: x
    query_bTQ, latent_bTC, key_bTR = latents(w, x_bTD, m)
    new_bTA = jnp.concatenate([latent_bTC, rotated(key_bTR[:, :, None])[:, :, 0]], axis=-1)
    q_bTnX = matmul("bTQ,QnX->bTnX", query_bTQ, w.query.up)
    q_bTnH, q_bTnR = jnp.split(q_bTnX, [m.qk_nope_head_dim], axis=-1)
    to_key_nHC, to_value_nWC = jnp.split(w.kv_up, [m.qk_nope_head_dim], axis=1)
    q_bTnC = matmul("bTnH,nHC->bTnC", q_bTnH, to_key_nHC)
    q_bTnA = jnp.concatenate([q_bTnC, rotated(q_bTnR)], axis=-1) * softmax_scale(m)
    y_bTnC = attend(q_bTnA, new_bTA, past, layer, m.kv_lora_rank)
    y_bTnW = matmul("bTnC,nWC->bTnW", y_bTnC, to_value_nWC)
    # Contracts one dimension: with two, XLA transposes the weights for every token.
    y_bTX, out_XD = lax.collapse(y_bTnW, 2), lax.collapse(w.out, 0, 2)
    partial_bTD = matmul("bTX,XD->bTD", y_bTX, out_XD)
    return x_bTD + lax.psum(partial_bTD, "tensor"), new_bTA


def positions(past: Past, T: int) -> jax.Array:
    return past.start_b[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]


class Softmax(NamedTuple):
    """Running softmax over blocks of scores (arXiv:1805.02867)."""

    max_bTn: jax.Array
    sum_bTn: jax.Array
    y_bTnC: jax.Array

    def update(self, q_bTnA: jax.Array, keys_bsA: jax.Array, visible_bTs: jax.Array) -> "Softmax":
        """Add a block of keys, whose first C columns are the values."""
        score_bTns = matmul("bTnA,bsA->bTns", q_bTnA, keys_bsA).astype(jnp.float32)
        score_bTns = jnp.where(visible_bTs[:, :, None, :], score_bTns, MASKED)
        max_bTn = jnp.maximum(self.max_bTn, score_bTns.max(-1))
        p_bTns = jnp.exp(score_bTns - max_bTn[..., None])
        scale_bTn = jnp.exp(self.max_bTn - max_bTn)
        values_bsC = keys_bsA[..., : self.y_bTnC.shape[-1]]
        new_bTnC = matmul("bTns,bsC->bTnC", p_bTns.astype(values_bsC.dtype), values_bsC)
        y_bTnC = self.y_bTnC * scale_bTn[..., None] + new_bTnC.astype(jnp.float32)
        return Softmax(max_bTn, self.sum_bTn * scale_bTn + p_bTns.sum(-1), y_bTnC)


def attend(
    q_bTnA: jax.Array, new_bTA: jax.Array, past: Past, layer: jax.Array, C: int
) -> jax.Array:
    """Return softmax(q keys^T) latents, [b, T, n, C], over new and cached positions.

    Reads the cache in blocks up to the longest text; time does not depend on the cache's size.
    """
    b, T, n, A = q_bTnA.shape

    def block(i: jax.Array, softmax: Softmax) -> Softmax:
        block_bsA = lax.dynamic_slice(past.cache_LbSA, (layer, 0, i * BLOCK, 0), (1, b, BLOCK, A))
        key_s = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        visible_b1s = key_s[None, None, :] < past.start_b[:, None, None]
        return softmax.update(q_bTnA, block_bsA[0], visible_b1s)

    zero = jnp.zeros((b, T, n), jnp.float32)
    start = Softmax(zero + MASKED, zero, jnp.zeros((b, T, n, C), jnp.float32))
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    softmax = vary(start.update(q_bTnA, new_bTA, causal), varying((q_bTnA, past.cache_LbSA)))
    blocks = -(-past.start_b.max() // BLOCK)
    softmax = lax.fori_loop(0, blocks, block, softmax)
    return (softmax.y_bTnC / softmax.sum_bTn[..., None]).astype(q_bTnA.dtype)


# guide: end


@jax.named_scope("mlp")
def mlp(w: Mlp, x_bTD: jax.Array, m: utils.Model) -> jax.Array:
    """x + down(silu(gate x) * up x).

    Collectives  psum(tensor) of [b, T, D].
    """
    h_bTD = rms_norm(x_bTD, w.norm, m.rms_norm_eps)
    return x_bTD + lax.psum(swiglu(h_bTD, w.gate, w.up, w.down), "tensor")


@jax.named_scope("moe")
def moe(w: Moe, experts: Experts, block: jax.Array, x_bTD: jax.Array, m: utils.Model) -> jax.Array:
    """x + shared experts of x + sum over each token's K experts of weight * expert(x).

    experts      of all blocks, stacked.
    Collectives  psum(tensor) of [b, T, D]; with expert parallelism, all_gather(fsdp) of all tokens
                 and psum_scatter(fsdp) of the output of this rank's experts.
    """
    b, T, D = x_bTD.shape
    h_bTD = rms_norm(x_bTD, w.norm, m.rms_norm_eps)
    _, *choice = route(w, h_bTD, m)
    h_nD, choice_nK, weight_nK = (a.reshape(b * T, -1) for a in (h_bTD, *choice))
    if isinstance(experts, ExpertParallelExperts):
        gather = partial(lax.all_gather, axis_name="fsdp", tiled=True)
        first = lax.axis_index(EXPERT_AXES) * experts.gate.shape[1]
        tokens = gather(h_nD), gather(choice_nK) - first, gather(weight_nK)
        partial_mD = apply_experts(experts, block, *tokens, m.n_routed_experts)
        partial_nD = lax.psum_scatter(partial_mD, "fsdp", tiled=True)
    else:
        partial_nD = apply_experts(experts, block, h_nD, choice_nK, weight_nK, m.n_routed_experts)
    partial_bTD = partial_nD.reshape(b, T, D).astype(x_bTD.dtype)
    if w.shared is not None:
        partial_bTD += swiglu(h_bTD, w.shared.gate, w.shared.up, w.shared.down)
    return x_bTD + lax.psum(partial_bTD, "tensor")


def apply_experts(
    w: Experts,
    block: jax.Array,
    h_nD: jax.Array,
    choice_nK: jax.Array,
    weight_nK: jax.Array,
    experts: int,
) -> jax.Array:
    """Sum weight * expert(h) over each token's choices among a block's experts, in float32.

    choice_nK  relative to this rank's first expert; experts of other ranks are skipped.
    experts    number of experts of all ranks.
    Choices are sorted by expert and divided into tiles of one expert each. A loop over the tiles
    reads the weights of chosen experts only, once per tile.
    """
    n, K = choice_nK.shape
    own = w.gate.shape[1]
    # About twice an even share. A few tokens are one tile, so an expert's weights are read once.
    tile = max(min(n, 8), 1 << max(0, (2 * n * K // experts).bit_length() - 1))
    choice_r = choice_nK.reshape(-1)
    choice_r = jnp.where((choice_r >= 0) & (choice_r < own), choice_r, own)
    order_r = jnp.argsort(choice_r, stable=True).astype(jnp.int32)
    numbers = jnp.arange(own + 1, dtype=choice_r.dtype)
    start_e = (choice_r[None, :] < numbers[:, None]).sum(1, dtype=jnp.int32)
    tiles_e = -(-jnp.diff(start_e) // tile)
    stop_e = jnp.cumsum(tiles_e)  # tiles up to and including expert e
    order_r = jnp.concatenate([order_r, jnp.zeros_like(order_r, shape=tile)])
    weight_r = weight_nK.reshape(-1)

    def body(i: jax.Array, y_nD: jax.Array) -> jax.Array:
        e = (stop_e <= i).sum(dtype=jnp.int32)
        row = start_e[e] + (i - stop_e[e] + tiles_e[e]) * tile
        rows = lax.dynamic_slice(order_r, (row,), (tile,))
        is_own_t = row + jnp.arange(tile, dtype=jnp.int32) < start_e[e + 1]
        one = index(w, block, e)
        y_tD = swiglu(h_nD[rows // K][None], one.gate, one.up, one.down)[0]
        weight_t = jnp.where(is_own_t, weight_r[rows], 0)
        return y_nD.at[rows // K].add(y_tD.astype(jnp.float32) * weight_t[:, None])

    zero = vary(jnp.zeros(h_nD.shape, jnp.float32), varying((h_nD, w, choice_r)))
    return lax.fori_loop(0, stop_e[-1], body, zero)


# --- the model ------------------------------------------------------------------------------------


def apply_layers(
    w: Transformer, x_bTD: jax.Array, past: Past, m: utils.Model
) -> tuple[jax.Array, jax.Array]:
    """Return x after all layers, and the values to cache, [L, b, T, A]."""

    def dense_layers(x_bTD: jax.Array, w: DenseLayer, first: jax.Array, *block: jax.Array) -> tuple:
        """Apply the stacked dense layers w[*block]; the number of the first is `first`."""

        # Indexed once, where it is used: a slice of a slice would be copied.
        def dense(x_bTD: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            one = index(w, *block, i)
            x_bTD, new = attention(one.attention, x_bTD, past, first + i, m, rope=True)
            return mlp(one.mlp, x_bTD, m), new

        return lax.scan(dense, x_bTD, jnp.arange(w.mlp.norm.shape[len(block)], dtype=jnp.int32))

    def block(x_bTD: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer, new = m.first_k_dense_replace + i * m.decoder_sparse_step, []
        if blocks.dense is not None:
            x_bTD, new_dense = dense_layers(x_bTD, blocks.dense, layer, i)
            new.append(new_dense)
        if blocks.moe is not None:
            moe_layer, layer = blocks.moe, layer + m.dense_layers
            experts = moe_layer.moe.experts  # indexed where one is chosen
            one = index(moe_layer.replace(moe=moe_layer.moe.replace(experts=None)), i)
            x_bTD, new_moe = attention(one.attention, x_bTD, past, layer, m, m.rope_in_moe_layers)
            x_bTD = moe(one.moe, experts, i, x_bTD, m)
            new.append(new_moe[None])
        return x_bTD, jnp.concatenate(new)

    blocks, new = w.blocks, []
    if w.first.prefix is not None:
        x_bTD, new_prefix = dense_layers(x_bTD, w.first.prefix, jnp.int32(0))
        new.append(new_prefix)
    x_bTD, new_blocks = lax.scan(block, x_bTD, jnp.arange(m.blocks, dtype=jnp.int32))
    new.append(lax.collapse(new_blocks, 0, 2))
    return x_bTD, jnp.concatenate(new)


def extend(config: Config, declared: Transformer, mesh: Mesh) -> Callable[..., Any]:
    """Return a function that appends tokens to the cache and computes the logits after them.

    Arguments: weights of `weight_converter`, cache [L, B, S, A], tokens [B, T], the first position
    of each row [B], and the columns of `tokens` after which logits are computed [B, P]. Results:
    logits [B, P, V] in float32, -inf for padding rows of the vocabulary, and the cache. A row
    shorter than T is padded; later tokens overwrite the padding before it is visible.
    """
    m = config.model

    def local(
        w: Transformer, cache: jax.Array, tokens_bT: jax.Array, start_b: jax.Array, at_bP: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        past = Past(cache, start_b)
        with jax.named_scope("embedding"):
            row_bT, held_bT = local_rows(tokens_bT, len(w.first.embedding))
            partial_bTD = jnp.where(held_bT[:, :, None], w.first.embedding[row_bT], 0)
            x_bTD = lax.psum(partial_bTD, VOCABULARY_AXES)
        y_bTD, new_LbTA = apply_layers(w, x_bTD, past, m)
        # Once, after all layers: a loop that reads and writes the cache would copy it each time.
        rows = jnp.arange(len(tokens_bT), dtype=jnp.int32)[:, None]
        columns = positions(past, tokens_bT.shape[1])
        cache = cache.at[:, rows, columns].set(new_LbTA, mode="drop")
        with jax.named_scope("loss"):
            y_bPD = jnp.take_along_axis(y_bTD, at_bP[:, :, None], axis=1)
            h_bPD = rms_norm(y_bPD, w.last.norm, m.rms_norm_eps)
            table = w.first.embedding if w.last.output is None else w.last.output
            logits_nv = local_logits(table, lax.collapse(h_bPD, 0, 2), m.vocab_size)
        return logits_nv.reshape(*at_bP.shape, -1), cache

    batch = P(BATCH_AXES)
    specs = jax.tree.map(lambda a: a.sharding.spec, abstract_weights(config, declared, mesh))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, CACHE_SPEC, batch, batch, batch),
        out_specs=(P(BATCH_AXES, None, VOCABULARY_AXES), CACHE_SPEC),
        check_vma=True,
    )
