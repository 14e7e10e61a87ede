"""Splash attention, the Pallas kernel for TPUs in JAX.

Letters: b sequences of this rank, T query and S key positions, n heads of this rank.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from device_kernels.adapter import SPLASH_BACKWARD, Inputs, Kernel, call, private, swapped
from utils import LANES
from weights import vary, varying

TILE = 512  # positions of a tile, at most
# Positions up to which the host makes the mask. That takes minutes for 131,072.
HOST_MASK = 8192


def splash(inputs: Inputs) -> jax.Array:
    """Attention by splash. Queries and keys may be wider than values, and have more heads."""
    q, k, v, segments, scale, window, sinks, places = inputs
    T, S = q.shape[1], k.shape[1]
    assert T % LANES == 0, "see choice.choose_kernel"
    extra, chunk = () if segments is None else (segments,), 0
    if places is not None:
        own = [jnp.take(s, places, axis=1) for s in extra]
        extra, chunk = (places, *own, *extra), T // 2
    elif T > HOST_MASK:
        extra, chunk = (vary(jnp.arange(T, dtype=jnp.int32), varying(q)), *extra), T
    # The kernel has no scale. Scaling bfloat16 queries rounds them once more.
    kernel = splash_kernel(q.shape[2], T, S, window, chunk)
    return call(kernel, sinks, q * scale, k, v, *extra)


def tile_size(T: int, window: int = 0) -> int:
    """Return the positions of a tile: the largest multiple of LANES up to TILE that divides T.

    It is at most a quarter of a window. A query's tile reads its window and its own positions, so
    that a quarter more is computed than the window has.
    """
    largest = min(TILE, max(LANES, window // 4)) if window else TILE
    return next(size for size in range(largest // LANES * LANES, 0, -LANES) if T % size == 0)


def tiles_to_run(places: jax.Array, axis: int, size: int, S: int, window: int) -> tuple:
    """Return the tile that each step along an axis fetches, and which tiles run.

    Each [1, tiles of queries, tiles of keys].
    """
    rows, first = places.reshape(-1, size), jnp.arange(0, S, size, dtype=jnp.int32)[None, :]
    run = first <= rows[:, -1:]
    if window:
        run &= first + size > rows[:, :1] - window + 1
    # A step that does not run fetches what the next one in its row or column needs.
    end = run.shape[axis]
    index = jnp.where(run, lax.broadcasted_iota(jnp.int32, run.shape, axis), end)
    following = lax.cummin(index, axis=axis, reverse=True) % end
    small = jnp.int8 if end <= 127 else jnp.int16
    return following[None].astype(small), run[None].astype(jnp.int8)


@cache  # one object per size, so that equal programs compare as equal
def splash_kernel(n: int, T: int, S: int, window: int, chunk: int = 0) -> Kernel:
    """Return the kernel for n query heads. Inside it heads come before positions.

    window  positions that a query attends to; 0 for all earlier ones.
    chunk   neighbouring positions of the queries. The positions [T] come after q, k and v. Which
            tiles are computed is data then, so one program serves all ranks of context. If 0, the
            queries have all positions.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    placed = chunk > 0
    size = tile_size(chunk or T, window)  # a tile is in one chunk
    names = "q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq"
    tiles = library.BlockSizes(**{f"block_{name}": size for name in names})

    def visible(query: jax.Array, key: jax.Array) -> jax.Array:
        return (key <= query) & (key > query - window) if window else key <= query

    def make(extra: tuple[jax.Array, ...], **options: bool) -> Any:
        if placed:
            places = extra[0]
            rows, columns = (
                MaskInfo(fetched, None, runs, None, places)
                for fetched, runs in (tiles_to_run(places, i, size, S, window) for i in (1, 0))
            )
            return library.SplashAttentionKernel(
                rows,
                rows,
                columns,
                block_sizes=tiles,
                is_mqa=False,
                mask_value=library.DEFAULT_MASK_VALUE,
                attn_logits_soft_cap=None,
                residual_checkpoint_name=None,
                mask_function=visible,
                **options,
            )
        shape = T, S
        one = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
        mask = masks.MultiHeadMask([one] * n)
        return library.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=tiles, **options
        )

    def ids(segments: tuple[jax.Array, ...]) -> Any:
        return library.SegmentIds(segments[0], segments[-1]) if segments else None

    def splash_plain(q: Any, k: Any, v: Any, *extra: jax.Array, interpret: bool) -> Any:
        kernel = make(extra, save_residuals=False, interpret=interpret)
        run = jax.vmap(lambda q, k, v, *segments: kernel(q, k, v, ids(segments)))
        return swapped(run(*swapped(q, k, v), *extra[placed:]))

    def splash_forward(q: Any, k: Any, v: Any, *extra: jax.Array, interpret: bool) -> Any:
        kernel = make(extra, save_residuals=True, interpret=interpret)

        def one(q, k, v, *segments):
            out, (logsumexp,) = kernel(q, k, v, ids(segments))
            return out, logsumexp

        out, logsumexp = jax.vmap(one)(*swapped(q, k, v), *extra[placed:])
        return *swapped(out), logsumexp

    def splash_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, *others: jax.Array, interpret: bool
    ) -> Any:
        logsumexp, *extra = others
        # JAX has no public backward pass. This is the rule of its own custom_vjp.
        kernel = make(tuple(extra), save_residuals=False, interpret=interpret)
        infos = kernel.dq_mask_info, kernel.dkv_mask_info
        sinks = None

        def one(grad, q, k, v, out, logsumexp, *segments):
            residuals = (q, k, v, ids(segments), sinks, out, logsumexp, *infos)
            return private(SPLASH_BACKWARD)(**kernel.kwargs, res=residuals, do=grad)[3:6]

        return swapped(*jax.vmap(one)(*swapped(grad, q, k, v, out), logsumexp, *extra[placed:]))

    return Kernel(splash_plain, splash_forward, splash_backward)
