"""Incremental decoding with a cache of earlier positions.

The layers are those of model.py. `ForwardOptions` replaces attention, by attention over a cache,
and the experts, by a loop over those that tokens choose. What is cached is the attention's own
choice (attention.py). Layers with a window cache the last positions only, in a ring: position p is
in slot p % S. New positions are one token per sequence, or a prompt.

Differences from training: a tensor rank has all new positions, as one position cannot be divided;
no token is dropped by an expert; weights are gathered over fsdp once, not per step.

Letters as in model.py; T new positions of a sequence, S positions of the cache, A width of cached
keys, C of cached values, n tokens. Each of y heads of keys and values has g query heads.
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

import lora
import model
import utils
from attention import MASKED, Attention, CacheArray, kind_of
from dropless import add_distinct, sort_choices
from experts import Activation, Experts, read_rows
from model import ForwardOptions, LayerPosition, Transformer, gated
from pipeline import index
from utils import BATCH_AXES, VOCABULARY_AXES, WEIGHT_AXES, Config, LayerRun
from vocabulary import local_logits, lookup, scaled
from weights import Weight, matmul, rms_norm, vary, varying

KEY_BLOCK = 256  # cached positions that attention processes at once
Cache = tuple[jax.Array, ...]  # each [layers, B, S, heads, width]
Caches = dict[int, Cache]  # by window, of the layers with it; 0 is full attention


# --- weights and cache ----------------------------------------------------------------------------


def decoding_config(config: Config, fsdp: int, tensor: int) -> Config:
    """Return the config on a mesh to decode on, with expert parallelism where experts divide it."""
    mesh = utils.Mesh(fsdp=fsdp, pipeline=1, tensor=tensor)
    m = dataclasses.replace(config.model, experts_layout="auto")
    return dataclasses.replace(config, mesh=mesh, model=m, lora=utils.Lora())  # merged


def abstract_weights(config: Config, declared: Transformer, mesh: Mesh) -> Transformer:
    """Return shape, type and layout of each weight to decode with; blocks are [blocks, ...].

    Weights are replicated over fsdp, but for the experts under expert parallelism.
    """
    dtype, declared = jnp.dtype(config.model.compute_dtype), in_decoding_order(declared)

    def one(w: Any, stack: int = 0) -> jax.ShapeDtypeStruct:
        shape = (math.prod(w.shape[:stack]), *w.shape[stack:]) if stack else w.shape
        # Nothing varies over axes of one rank; a spec without them needs no casts.
        kept = [() if axes == WEIGHT_AXES else axes for axes in w.dim_axes[-len(shape) :]]
        kept = [tuple(a for a in axes if a not in ("pipeline", "context")) for axes in kept]
        spec = P(*(axes or None for axes in kept))
        layout = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if w.float32 else dtype, sharding=layout)

    blocks = jax.tree.map(partial(one, stack=3), declared.blocks)
    first, last = (jax.tree.map(one, part) for part in (declared.first, declared.last))
    return Transformer(first=first, blocks=blocks, last=last)


def in_decoding_order(w: Any) -> Any:
    """Transpose the weights, or arrays, that the attention's DECODING_ORDER names.

    The loop over layers would otherwise transpose them for every token.
    """

    def one(a: Any) -> Any:
        orders = getattr(a, "DECODING_ORDER", {})
        new = {name: _transpose(getattr(a, name), order) for name, order in orders.items()}
        return a.replace(**new) if new else a

    return jax.tree.map(one, w, is_leaf=lambda a: hasattr(a, "DECODING_ORDER"))


def _transpose(w: Weight | jax.Array, order: tuple[int, ...]) -> Weight | jax.Array:
    order = (*range(len(w.shape) - len(order)), *order)
    if not isinstance(w, Weight):
        return jnp.transpose(w, order)
    axes, sizes = (tuple(of[dim] for dim in order) for of in (w.dim_axes, w.sizes))
    return dataclasses.replace(w, dim_axes=axes, sizes=sizes)


def weight_converter(abstract: Transformer) -> Callable:
    """Return the function that converts weights to those of `abstract_weights`.

    It takes weights on any mesh of the same devices in the same order, and merges adapters.
    """
    leaves, structure = jax.tree.flatten(abstract)

    def convert(w: Any) -> Transformer:
        # By leaves, because the experts may have another layout.
        w = in_decoding_order(lora.merged(w))
        pairs = zip(jax.tree.leaves(w), leaves, strict=True)
        return structure.unflatten([a.reshape(to.shape).astype(to.dtype) for a, to in pairs])

    return jax.jit(convert, out_shardings=structure.unflatten([a.sharding for a in leaves]))


def layers_by_window(m: utils.Model) -> dict[int, list[int]]:
    """Return the numbers of the layers with each window; 0 is full attention."""
    windows = [run.window for run in (*m.prefix, *m.runs * m.blocks) for _ in range(run.layers)]
    return {one: [i for i, w in enumerate(windows) if w == one] for one in sorted({*windows})}


def abstract_cache(
    config: Config, mesh: Mesh, sequences: int, length: int
) -> dict[int, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the caches of texts of this length.

    S is the length, or a window that is shorter, rounded up to a multiple of KEY_BLOCK.
    """
    m = config.model

    def one(array: CacheArray, window: int, layers: list[int]) -> jax.ShapeDtypeStruct:
        S = -(-min(length, window or length) // KEY_BLOCK) * KEY_BLOCK
        shape = (len(layers), sequences, S, array.heads, array.width)
        layout = NamedSharding(mesh, array.spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(m.compute_dtype), sharding=layout)

    arrays, groups = kind_of(m).cache(m, config.mesh.tensor), layers_by_window(m)
    return {window: tuple(one(a, window, groups[window]) for a in arrays) for window in groups}


def empty_cache(abstract: Any) -> Caches:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), abstract)


# --- attention over the cache ---------------------------------------------------------------------


class Past(NamedTuple):
    """Cached values of the earlier positions."""

    cache: Caches  # of this rank
    start_b: jax.Array  # cached positions of each sequence; the first new one has this number


def attend_to_cache(
    w: Attention,
    inputs_bTX: jax.Array,
    past: Past,
    m: utils.Model,
    layer: jax.Array,
    run: LayerRun,
) -> tuple[jax.Array, Cache]:
    """Return the heads [b, T, n, W], and the values to cache: [b, T, heads, width] each."""
    position_bT = positions(past, inputs_bTX.shape[1])
    q_bTnA, new = w.cached_heads(inputs_bTX, m, position_bT, run.rope)
    [*_, cached] = w.cache(m, lax.axis_size("tensor"))
    if len(groups := layers_by_window(m)) > 1:  # from the number in the model to that in the cache
        layer = (jnp.array(groups[run.window], jnp.int32) < layer).sum(dtype=jnp.int32)
    q_bTnA *= w.scale(m, run.rope)
    y_bTnC = attend(q_bTnA, new, past, layer, cached.values, run.window, w.sinks)
    return w.values(y_bTnC, m), new


def positions(past: Past, T: int) -> jax.Array:
    return past.start_b[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]


def slots(past: Past, count_b: jax.Array, window: int, T: int) -> jax.Array:
    """Return where the cache gets each of T new positions [b, T]; S, outside of it, for none."""
    position_bT = positions(past, T)
    if not window:
        return position_bT
    S = past.cache[window][0].shape[2]
    # The number of tokens from each one to the last valid one; not positive for padding.
    left_bT = past.start_b[:, None] + jnp.minimum(count_b, T)[:, None] - position_bT
    return jnp.where((left_bT > 0) & (left_bT <= S), position_bT % S, S)


class Softmax(NamedTuple):
    """Running softmax over blocks of scores (arXiv:1805.02867)."""

    max_bTyg: jax.Array
    sum_bTyg: jax.Array
    y_bTygC: jax.Array

    def update(self, q_bTygA: jax.Array, block: Cache, visible_bTs: jax.Array) -> "Softmax":
        """Add a block of positions. Its first array has keys, and its last begins with values."""
        keys_bsyA, values_bsyC = block[0], block[-1][..., : self.y_bTygC.shape[-1]]
        score_bTygs = matmul("bTygA,bsyA->bTygs", q_bTygA, keys_bsyA).astype(jnp.float32)
        score_bTygs = jnp.where(visible_bTs[:, :, None, None, :], score_bTygs, MASKED)
        max_bTyg = jnp.maximum(self.max_bTyg, score_bTygs.max(-1))
        p_bTygs = jnp.exp(score_bTygs - max_bTyg[..., None])
        scale_bTyg = jnp.exp(self.max_bTyg - max_bTyg)
        new_bTygC = matmul("bTygs,bsyC->bTygC", p_bTygs.astype(values_bsyC.dtype), values_bsyC)
        y_bTygC = self.y_bTygC * scale_bTyg[..., None] + new_bTygC.astype(jnp.float32)
        return Softmax(max_bTyg, self.sum_bTyg * scale_bTyg + p_bTygs.sum(-1), y_bTygC)


def attend(
    q_bTnA: jax.Array,
    new: Cache,
    past: Past,
    layer: jax.Array,
    C: int,
    window: int,
    sinks_n: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q keys^T) values, [b, T, n, C], over new and cached positions.

    Reads the cache in blocks up to the longest text, or a ring once; time does not depend on the
    cache's size.

    window  positions that a query attends to, with its own; 0 for all earlier ones.
    """
    b, T, n, A = q_bTnA.shape
    y, cache = new[0].shape[2], past.cache[window]
    S = cache[0].shape[2]
    q_bTygA = q_bTnA.reshape(b, T, y, n // y, A)
    position_bT1 = positions(past, T)[:, :, None]

    def near(key_bTs: jax.Array) -> jax.Array:
        return key_bTs > position_bT1 - window if window else jnp.bool_(True)

    def block(i: jax.Array, softmax: Softmax) -> Softmax:
        begin = i * KEY_BLOCK
        cached = tuple(
            lax.dynamic_slice(a, (layer, 0, begin, 0, 0), (1, b, KEY_BLOCK, *a.shape[3:]))[0]
            for a in cache
        )
        key_b1s = begin + jnp.arange(KEY_BLOCK, dtype=jnp.int32)[None, None, :]
        # A slot has the last of its positions before the new ones; negative if none.
        last_b11 = past.start_b[:, None, None] - 1
        key_b1s = last_b11 - (last_b11 - key_b1s) % S
        return softmax.update(q_bTygA, cached, (key_b1s >= 0) & near(key_b1s))

    zero = jnp.zeros(q_bTygA.shape[:-1], jnp.float32)
    empty = zero + MASKED, zero
    if sinks_n is not None:  # a score without a value
        empty = zero + sinks_n.reshape(1, 1, y, n // y), zero + 1
    start = Softmax(*empty, jnp.zeros((*q_bTygA.shape[:-1], C), jnp.float32))
    causal = jnp.tril(jnp.ones((T, T), bool))[None] & near(position_bT1.swapaxes(1, 2))
    softmax = vary(start.update(q_bTygA, new, causal), varying((q_bTnA, past.cache)))
    blocks = jnp.minimum(-(-past.start_b.max() // KEY_BLOCK), S // KEY_BLOCK)
    softmax = lax.fori_loop(0, blocks, block, softmax)
    y_bTygC = softmax.y_bTygC / softmax.sum_bTyg[..., None]
    return y_bTygC.astype(q_bTnA.dtype).reshape(b, T, n, C)


# --- experts --------------------------------------------------------------------------------------


def run_experts(
    experts: Experts,
    m: utils.Model,
    place: tuple[jax.Array, ...],
    _: Experts,
    h_bTD: jax.Array,
    choices: tuple,
) -> jax.Array:
    """Sum weight * expert(h) over each token's choices; a rank sums in float32.

    experts      of all layers, stacked; the layer's own, which would be a copy, are not used.
    place        index of the layer in the stack.
    choices      choice_bTK and weight_bTK.
    Collectives  psum(tensor) of [b, T, D]; with expert parallelism, all_gather(fsdp) of all tokens
                 and psum_scatter(fsdp) of the output of this rank's experts.
    A loop over tiles of one expert each reads the weights of chosen experts only, once per tile.
    """
    h_nD, choice_nK, weight_nK = (lax.collapse(a, 0, 2) for a in (h_bTD, *choices))
    if experts.expert_parallel:
        gather = partial(lax.all_gather, axis_name="fsdp", tiled=True)
        h_nD, choice_nK, weight_nK = map(gather, (h_nD, choice_nK, weight_nK))
        # Relative to this rank's first expert; experts of other ranks are skipped.
        choice_nK -= lax.axis_index(("fsdp", "tensor")) * experts.gate.shape[len(place)]
    n, K = choice_nK.shape
    # About twice an even share. A few tokens are one tile, so an expert's weights are read once.
    share = 2 * n * K // m.n_routed_experts
    tile = max(min(n, 8), 1 << max(0, share.bit_length() - 1))
    choices = sort_choices(choice_nK, experts.gate.shape[len(place)], 0, tile)

    def body(i: jax.Array, y_nD: jax.Array) -> jax.Array:
        e, choice_t = choices.tile(i, tile)
        token_t = choice_t // K
        one = index(experts, *place, e)
        y_tD = gated(read_rows(h_nD, token_t)[None], one.inputs(), one.down, Activation.of(m))[0]
        weight_t = read_rows(weight_nK.reshape(-1), choice_t)
        y_tD = y_tD.astype(jnp.float32) * weight_t[:, None]
        return add_distinct(y_nD, token_t, y_tD)

    zero = vary(jnp.zeros(h_nD.shape, jnp.float32), varying((h_nD, experts, choice_nK)))
    partial_nD = lax.fori_loop(0, choices.last_e[-1], body, zero)
    if experts.expert_parallel:
        partial_nD = lax.psum_scatter(partial_nD, "fsdp", tiled=True)
    return lax.psum(partial_nD.astype(h_bTD.dtype), "tensor").reshape(h_bTD.shape)


# --- the model ------------------------------------------------------------------------------------


def apply_layers(
    w: Transformer, x_bTD: jax.Array, past: Past, m: utils.Model
) -> tuple[jax.Array, Cache]:
    """Return x after all layers, and the values to cache, [L, b, T, heads, width] each."""
    options = ForwardOptions(m, 0, 0.0, sequence_parallel=False, attend_to=attend_to_cache)

    # Weights are indexed once, where they are used: a slice of a slice would be copied.
    def layer_of(stack: Any, run: LayerRun, *block: jax.Array) -> Callable:
        def layer(i: Any, x_bTD: jax.Array, number: jax.Array) -> tuple[jax.Array, Any]:
            place, here = (*block, i) if run.stacked else block, options
            if run.experts:
                here = options._replace(
                    run_experts=partial(run_experts, stack.moe.experts, m, place)
                )
            position = LayerPosition(jnp.int32(0), jnp.int32(0), number)
            return model.layer(index(stack, *place), x_bTD, past, here, position, run)

        return layer

    def numbers(run: LayerRun) -> jax.Array | None:
        return jnp.arange(run.layers, dtype=jnp.int32) if run.stacked else None

    def block(x_bTD: jax.Array, i: jax.Array) -> tuple[jax.Array, Cache]:
        here = {run.name: numbers(run) for run in m.runs}
        layers = {run.name: layer_of(w.blocks[run.name], run, i) for run in m.runs}
        x_bTD, new, _ = model.block(here, x_bTD, i, m, layers)
        return x_bTD, new

    parts = []
    for run in m.prefix:
        layer = layer_of(w.first.prefix, run)
        x_bTD, (new, _) = model.stacked_layers(numbers(run), x_bTD, jnp.int32(0), layer)
        parts.append(new)
    x_bTD, new = lax.scan(block, x_bTD, jnp.arange(m.blocks, dtype=jnp.int32))
    parts.append(jax.tree.map(lambda a: lax.collapse(a, 0, 2), new))
    return x_bTD, model.concatenated(parts)


def extend(config: Config, declared: Transformer, mesh: Mesh) -> Callable[..., Any]:
    """Return a function that appends tokens to the cache and computes the logits after them.

    Arguments: weights of `weight_converter`, the cache, tokens [B, T], the first position of each
    row [B], how many of its tokens are not padding [B], and the columns of `tokens` after which
    logits are computed [B, P]. Results: logits [B, P, V] in float32, -inf for padding rows of the
    vocabulary, and the cache. Later tokens overwrite padding before it is visible; a ring, where
    it would overwrite what is visible, gets none.
    """
    m, groups = config.model, layers_by_window(config.model)

    def local(
        w: Transformer,
        cache: Caches,
        tokens_bT: jax.Array,
        start_b: jax.Array,
        count_b: jax.Array,
        at_bP: jax.Array,
    ) -> tuple[jax.Array, Caches]:
        past = Past(cache, start_b)
        with jax.named_scope("embedding"):
            x_bTD = lax.psum(lookup(w.first.embedding, tokens_bT), VOCABULARY_AXES)
            x_bTD = scaled(x_bTD, m.embedding_multiplier)
        y_bTD, new = apply_layers(w, x_bTD, past, m)
        # Once, after all layers: a loop that reads and writes the cache would copy it each time.
        rows = jnp.arange(len(tokens_bT), dtype=jnp.int32)[:, None]
        updated = {}
        for window, layers in groups.items():
            columns = slots(past, count_b, window, tokens_bT.shape[1])
            pairs = zip(cache[window], new, strict=True)
            pairs = ((a, b[jnp.array(layers)] if len(groups) > 1 else b) for a, b in pairs)
            updated[window] = tuple(a.at[:, rows, columns].set(b, mode="drop") for a, b in pairs)
        with jax.named_scope("loss"):
            y_bPD = jnp.take_along_axis(y_bTD, at_bP[:, :, None], axis=1)
            h_bPD = rms_norm(y_bPD, w.last.norm, m.rms_norm_eps)
            table = w.first.embedding if w.last.output is None else w.last.output
            logits_nv = local_logits(table, lax.collapse(h_bPD, 0, 2), m.vocab_size)
        return logits_nv.reshape(*at_bP.shape, -1), updated

    arrays = kind_of(m).cache(m, config.mesh.tensor)
    batch, cache = P(BATCH_AXES), dict.fromkeys(groups, tuple(array.spec for array in arrays))
    specs = jax.tree.map(lambda a: a.sharding.spec, abstract_weights(config, declared, mesh))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, cache, batch, batch, batch, batch),
        out_specs=(P(BATCH_AXES, None, VOCABULARY_AXES), cache),
        check_vma=True,
    )
