"""The model token by token, with a cache of latents.

Of an earlier position a layer keeps its latent and its rotary key, C + R numbers for all of its
heads. Keys and values are not made of them: the matrix that would is multiplied into query and
output (arXiv:2405.04434, section 2.1.2). New positions, one of each sequence or a whole prompt, go
through the layers of model.py with these differences: every tensor rank has all of them, as one
position cannot be cut; no choice of an expert is dropped; and weights are whole along fsdp from the
start, where decoding would gather them for every token.

Letters as in model.py; T new positions of a sequence, S positions that the cache has room for,
A = C + R, n tokens of this rank and m of all fsdp ranks.
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
from model import (
    Attention,
    DenseLayer,
    GatheredExperts,
    Mlp,
    Moe,
    SpreadExperts,
    Transformer,
    latents,
    local_rows,
    matmul,
    rms_norm,
    rotate,
    route,
    score_scale,
    slice_logits,
    swiglu,
)
from pipeline import index
from utils import BATCH_AXES, EXPERT_AXES, VOCABULARY_AXES, Config
from weights import Weight, vary, varying

BLOCK = 256  # positions of the cache that attention takes at once
MASKED = -1e30  # a score that is not seen; finite, so that a block with nothing to see stays finite
CACHE_SPEC = P(None, BATCH_AXES)


# --- weights and cache ----------------------------------------------------------------------------


def config_of(config: Config, fsdp: int, tensor: int) -> Config:
    """The config on a mesh to decode on, where whole experts are spread if they divide it."""
    mesh = utils.Mesh(fsdp=fsdp, pipeline=1, tensor=tensor)
    m = dataclasses.replace(config.model, experts_layout="auto")
    return dataclasses.replace(config, mesh=mesh, model=m)


def abstract_weights(config: Config, declared: Transformer, mesh: Mesh) -> Transformer:
    """Shape, type and layout of each weight to decode with: whole along fsdp, but for experts
    spread over fsdp x tensor; blocks are [blocks, ...].
    """
    dtype, declared = jnp.dtype(config.model.compute_dtype), heads_first(declared, _declared_so)

    def one(w: Any, stack: int = 0) -> jax.ShapeDtypeStruct:
        shape = (math.prod(w.shape[:stack]), *w.shape[stack:]) if stack else w.shape
        # Of one rank along pipeline nothing is cut, and a type that says so needs no casts.
        kept = [tuple(a for a in axes if a != "pipeline") for axes in w.cuts[-len(shape) :]]
        spec = P(*(None if axes in ((), ("fsdp",)) else axes for axes in kept))
        layout = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if w.float32 else dtype, sharding=layout)

    blocks = jax.tree.map(partial(one, stack=3), declared.blocks)
    first, last = (jax.tree.map(one, part) for part in (declared.first, declared.last))
    return Transformer(first=first, blocks=blocks, last=last)


def heads_first(w: Any, moved: Callable[[Any, tuple[int, ...]], Any]) -> Any:
    """The tree with each kv_up [..., C, N, H + W] as [..., N, H + W, C], in which order it is
    multiplied: else the loop over layers would turn it around for every token.

    moved  makes it, from the old one and where each of its dimensions was.
    """

    def one(a: Any) -> Any:
        if not isinstance(a, Attention):
            return a
        *stack, C, N, X = range(len(a.kv_up.shape))
        return a.replace(kv_up=moved(a.kv_up, (*stack, N, X, C)))

    return jax.tree.map(one, w, is_leaf=lambda a: isinstance(a, Attention))


def _declared_so(w: Weight, order: tuple[int, ...]) -> Weight:
    cuts, sizes = (tuple(of[dim] for dim in order) for of in (w.cuts, w.sizes))
    return dataclasses.replace(w, cuts=cuts, sizes=sizes)


def ready(config: Config, declared: Transformer, mesh: Mesh) -> Callable[[Any], Transformer]:
    """Weights of any mesh of the same devices in the same order -> those to decode with."""
    leaves, structure = jax.tree.flatten(abstract_weights(config, declared, mesh))

    def change(w: Any) -> Transformer:
        given = jax.tree.leaves(heads_first(w, jnp.transpose))
        # Leaves, as spread and gathered experts are of two classes.
        pairs = zip(given, leaves, strict=True)
        return structure.unflatten([a.reshape(to.shape).astype(to.dtype) for a, to in pairs])

    return jax.jit(change, out_shardings=structure.unflatten([a.sharding for a in leaves]))


def empty_cache(config: Config, mesh: Mesh, sequences: int, room: int) -> jax.Array:
    """[layers, B, S, A] zeros."""
    m = config.model
    shape = (m.layers, sequences, whole_blocks(room), values_per_token(m))
    return jnp.zeros(shape, m.compute_dtype, device=NamedSharding(mesh, CACHE_SPEC))


def whole_blocks(room: int) -> int:
    """S: positions of a cache that has at least this room."""
    return -(-room // BLOCK) * BLOCK


def values_per_token(m: utils.Model) -> int:
    """Of one layer's cache."""
    return m.kv_lora_rank + m.qk_rope_head_dim


# --- layers ---------------------------------------------------------------------------------------


class Past(NamedTuple):
    """What layers read of earlier positions."""

    cache_LbSA: jax.Array
    start_b: jax.Array  # positions that it has of each sequence; new ones are behind these


# guide: cached_attention
@jax.named_scope("attention")
def attention(
    w: Attention, x_bTD: jax.Array, past: Past, layer: jax.Array, m: utils.Model, rope: bool
) -> tuple[jax.Array, jax.Array]:
    """x + attention over earlier positions and new ones, and [b, T, A] what the cache is to keep of
    these.

    Sends  psum(tensor) of [b, T, D].
    """
    position_bT = positions(past, x_bTD.shape[1])
    turn = partial(rotate, m=m, position_bT=position_bT) if rope else lambda x: x
    query_bTQ, latent_bTC, key_bTR = latents(w, x_bTD, m)
    new_bTA = jnp.concatenate([latent_bTC, turn(key_bTR[:, :, None])[:, :, 0]], axis=-1)
    q_bTnX = matmul("bTQ,QnX->bTnX", query_bTQ, w.query.up)
    q_bTnH, q_bTnR = jnp.split(q_bTnX, [m.qk_nope_head_dim], axis=-1)
    to_key_nHC, to_value_nWC = jnp.split(w.kv_up, [m.qk_nope_head_dim], axis=1)
    q_bTnC = matmul("bTnH,nHC->bTnC", q_bTnH, to_key_nHC)
    q_bTnA = jnp.concatenate([q_bTnC, turn(q_bTnR)], axis=-1) * score_scale(m)
    y_bTnC = attend(q_bTnA, new_bTA, past, layer, m.kv_lora_rank)
    y_bTnW = matmul("bTnC,nWC->bTnW", y_bTnC, to_value_nWC)
    # As one dimension: of two, XLA turns the weights around for every token.
    y_bTX, out_XD = lax.collapse(y_bTnW, 2), lax.collapse(w.out, 0, 2)
    part_bTD = matmul("bTX,XD->bTD", y_bTX, out_XD)
    return x_bTD + lax.psum(part_bTD, "tensor"), new_bTA


def positions(past: Past, T: int) -> jax.Array:
    return past.start_b[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]


class Softmax(NamedTuple):
    """Of scores that come block by block, with the largest so far (arXiv:1805.02867)."""

    top_bTn: jax.Array
    sum_bTn: jax.Array
    y_bTnC: jax.Array

    def and_of(self, q_bTnA: jax.Array, keys_bsA: jax.Array, seen_bTs: jax.Array) -> "Softmax":
        score_bTns = matmul("bTnA,bsA->bTns", q_bTnA, keys_bsA).astype(jnp.float32)
        score_bTns = jnp.where(seen_bTs[:, :, None, :], score_bTns, MASKED)
        top_bTn = jnp.maximum(self.top_bTn, score_bTns.max(-1))
        p_bTns = jnp.exp(score_bTns - top_bTn[..., None])
        old_bTn = jnp.exp(self.top_bTn - top_bTn)
        values_bsC = keys_bsA[..., : self.y_bTnC.shape[-1]]
        part_bTnC = matmul("bTns,bsC->bTnC", p_bTns.astype(values_bsC.dtype), values_bsC)
        y_bTnC = self.y_bTnC * old_bTn[..., None] + part_bTnC.astype(jnp.float32)
        return Softmax(top_bTn, self.sum_bTn * old_bTn + p_bTns.sum(-1), y_bTnC)


def attend(
    q_bTnA: jax.Array, new_bTA: jax.Array, past: Past, layer: jax.Array, C: int
) -> jax.Array:
    """softmax(q keys^T) latents -> [b, T, n, C], over new positions, then the cache, block after
    block as far as there is text: time grows with the text and not with the room.
    """
    b, T, n, A = q_bTnA.shape

    def block(i: jax.Array, softmax: Softmax) -> Softmax:
        block_bsA = lax.dynamic_slice(past.cache_LbSA, (layer, 0, i * BLOCK, 0), (1, b, BLOCK, A))
        key_s = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen_b1s = key_s[None, None, :] < past.start_b[:, None, None]
        return softmax.and_of(q_bTnA, block_bsA[0], seen_b1s)

    zero = jnp.zeros((b, T, n), jnp.float32)
    start = Softmax(zero + MASKED, zero, jnp.zeros((b, T, n, C), jnp.float32))
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    softmax = vary(start.and_of(q_bTnA, new_bTA, causal), varying((q_bTnA, past.cache_LbSA)))
    blocks = -(-past.start_b.max() // BLOCK)
    softmax = lax.fori_loop(0, blocks, block, softmax)
    return (softmax.y_bTnC / softmax.sum_bTn[..., None]).astype(q_bTnA.dtype)


# guide: end


@jax.named_scope("mlp")
def mlp(w: Mlp, x_bTD: jax.Array, m: utils.Model) -> jax.Array:
    """x + down(silu(gate x) * up x).  Sends psum(tensor) of [b, T, D]."""
    h_bTD = rms_norm(x_bTD, w.norm, m.norm_epsilon)
    return x_bTD + lax.psum(swiglu(h_bTD, w.gate, w.up, w.down), "tensor")


@jax.named_scope("moe")
def moe(
    w: Moe,
    experts: SpreadExperts | GatheredExperts,
    block: jax.Array,
    x_bTD: jax.Array,
    m: utils.Model,
) -> jax.Array:
    """x + shared experts of x + sum over each token's K experts of weight * expert(x).

    experts  of all blocks, stacked.
    Sends  psum(tensor) of [b, T, D]; where experts are spread, also all_gather(fsdp) of all tokens
           and psum_scatter(fsdp) of what this rank's experts make of them.
    """
    b, T, D = x_bTD.shape
    h_bTD = rms_norm(x_bTD, w.norm, m.norm_epsilon)
    _, *choice = route(w, h_bTD, m)
    h_nD, choice_nK, weight_nK = (a.reshape(b * T, -1) for a in (h_bTD, *choice))
    if isinstance(experts, SpreadExperts):
        gather = partial(lax.all_gather, axis_name="fsdp", tiled=True)
        first = lax.axis_index(EXPERT_AXES) * experts.gate.shape[1]
        every = gather(h_nD), gather(choice_nK) - first, gather(weight_nK)
        part_mD = of_experts(experts, block, *every, m.experts)
        part_nD = lax.psum_scatter(part_mD, "fsdp", tiled=True)
    else:
        part_nD = of_experts(experts, block, h_nD, choice_nK, weight_nK, m.experts)
    part_bTD = part_nD.reshape(b, T, D).astype(x_bTD.dtype)
    if w.shared is not None:
        part_bTD += swiglu(h_bTD, w.shared.gate, w.shared.up, w.shared.down)
    return x_bTD + lax.psum(part_bTD, "tensor")


def of_experts(
    w: SpreadExperts | GatheredExperts,
    block: jax.Array,
    h_nD: jax.Array,
    choice_nK: jax.Array,
    weight_nK: jax.Array,
    experts: int,
) -> jax.Array:
    """Sum over each token's choices among a block's experts of weight * expert(h), float32.

    choice_nK  numbers counted from this rank's first expert: others are left out.
    experts    of all ranks.
    Choices are sorted by expert and cut into tiles of one expert each. A loop over as many as there
    are reads the weights of chosen experts alone; of several tokens that chose one, once per tile.
    """
    n, K = choice_nK.shape
    own = w.gate.shape[1]
    # About twice an even share; all of a few tokens, that an expert's weights are read once.
    tile = max(min(n, 8), 1 << max(0, (2 * n * K // experts).bit_length() - 1))
    choice_r = choice_nK.reshape(-1)
    choice_r = jnp.where((choice_r >= 0) & (choice_r < own), choice_r, own)
    order_r = jnp.argsort(choice_r, stable=True).astype(jnp.int32)
    numbers = jnp.arange(own + 1, dtype=choice_r.dtype)
    start_e = (choice_r[None, :] < numbers[:, None]).sum(1, dtype=jnp.int32)
    tiles_e = -(-jnp.diff(start_e) // tile)
    stop_e = jnp.cumsum(tiles_e)  # tiles up to and with an expert
    order_r = jnp.concatenate([order_r, jnp.zeros_like(order_r, shape=tile)])
    weight_r = weight_nK.reshape(-1)

    def body(i: jax.Array, y_nD: jax.Array) -> jax.Array:
        e = (stop_e <= i).sum(dtype=jnp.int32)
        row = start_e[e] + (i - stop_e[e] + tiles_e[e]) * tile
        rows = lax.dynamic_slice(order_r, (row,), (tile,))
        here = row + jnp.arange(tile, dtype=jnp.int32) < start_e[e + 1]
        one = index(w, block, e)
        y_tD = swiglu(h_nD[rows // K][None], one.gate, one.up, one.down)[0]
        weight_t = jnp.where(here, weight_r[rows], 0)
        return y_nD.at[rows // K].add(y_tD.astype(jnp.float32) * weight_t[:, None])

    zero = vary(jnp.zeros(h_nD.shape, jnp.float32), varying((h_nD, w, choice_r)))
    return lax.fori_loop(0, stop_e[-1], body, zero)


# --- the model ------------------------------------------------------------------------------------


def through_layers(
    w: Transformer, x_bTD: jax.Array, past: Past, m: utils.Model
) -> tuple[jax.Array, jax.Array]:
    """x after all layers, and [L, b, T, A] what the cache is to keep."""

    def stack(x_bTD: jax.Array, w: DenseLayer, layer: jax.Array, *at: jax.Array) -> tuple:
        """Through w[*at], which are stacked dense layers, the first of them number `layer`."""

        # Indexed in one step where it is used: slices of slices would be copied.
        def dense(x_bTD: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            one = index(w, *at, i)
            x_bTD, new = attention(one.attention, x_bTD, past, layer + i, m, rope=True)
            return mlp(one.mlp, x_bTD, m), new

        return lax.scan(dense, x_bTD, jnp.arange(w.mlp.norm.shape[len(at)], dtype=jnp.int32))

    def block(x_bTD: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer, new = m.prefix_layers + i * (m.dense_layers + m.moe_layers), []
        if blocks.dense is not None:
            x_bTD, of_dense = stack(x_bTD, blocks.dense, layer, i)
            new.append(of_dense)
        if blocks.moe is not None:
            moe_layer, layer = blocks.moe, layer + m.dense_layers
            experts = moe_layer.moe.experts  # indexed where one is chosen
            one = index(moe_layer.replace(moe=moe_layer.moe.replace(experts=None)), i)
            x_bTD, of_moe = attention(one.attention, x_bTD, past, layer, m, m.rope_in_moe_layers)
            x_bTD = moe(one.moe, experts, i, x_bTD, m)
            new.append(of_moe[None])
        return x_bTD, jnp.concatenate(new)

    blocks, new = w.blocks, []
    if w.first.prefix is not None:
        x_bTD, of_prefix = stack(x_bTD, w.first.prefix, jnp.int32(0))
        new.append(of_prefix)
    x_bTD, of_blocks = lax.scan(block, x_bTD, jnp.arange(m.blocks, dtype=jnp.int32))
    new.append(of_blocks.reshape(-1, *of_blocks.shape[2:]))
    return x_bTD, jnp.concatenate(new)


def extend(config: Config, declared: Transformer, mesh: Mesh) -> Callable[..., Any]:
    """(weights from `ready`, cache [L, B, S, A], tokens [B, T], start [B], at [B, P]) ->
    (logits [B, P, V] float32 of what follows, cache) with tokens put behind `start` positions.

    at  the places in `tokens` after which logits are wanted; those of pads of the vocabulary are
        -inf.
    A sequence shorter than T is padded: what comes next is written over its pads before it is seen.
    Raises  ValueError for a mesh with a pipeline.
    """
    m = config.model
    if config.mesh.pipeline > 1:
        raise ValueError(
            f"--mesh.pipeline {config.mesh.pipeline}: text is made on a mesh without a pipeline. "
            "Use --mesh.pipeline 1, with more ranks of --mesh.fsdp or --mesh.tensor."
        )

    def local(
        w: Transformer, cache: jax.Array, tokens_bT: jax.Array, start_b: jax.Array, at_bP: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        past = Past(cache, start_b)
        with jax.named_scope("embedding"):
            row_bT, held_bT = local_rows(tokens_bT, len(w.first.embedding))
            part_bTD = jnp.where(held_bT[:, :, None], w.first.embedding[row_bT], 0)
            x_bTD = lax.psum(part_bTD, VOCABULARY_AXES)
        y_bTD, new_LbTA = through_layers(w, x_bTD, past, m)
        # Once, after all layers: a cache that a loop reads and writes would be copied in each trip.
        rows = jnp.arange(len(tokens_bT), dtype=jnp.int32)[:, None]
        where = positions(past, tokens_bT.shape[1])
        cache = cache.at[:, rows, where].set(new_LbTA, mode="drop")
        with jax.named_scope("loss"):
            y_bPD = jnp.take_along_axis(y_bTD, at_bP[:, :, None], axis=1)
            h_bPD = rms_norm(y_bPD, w.last.norm, m.norm_epsilon)
            table = w.first.embedding if w.last.output is None else w.last.output
            b, wanted, D = h_bPD.shape
            logits_nv = slice_logits(table, h_bPD.reshape(b * wanted, D), m.vocabulary)
        return logits_nv.reshape(b, wanted, -1), cache

    batch = P(BATCH_AXES)
    specs = jax.tree.map(lambda a: a.sharding.spec, abstract_weights(config, declared, mesh))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, CACHE_SPEC, batch, batch, batch),
        out_specs=(P(BATCH_AXES, None, VOCABULARY_AXES), CACHE_SPEC),
        check_vma=True,
    )
