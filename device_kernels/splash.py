"""Splash attention, the Pallas kernel for TPUs in JAX.

Letters: b sequences of this rank, T positions, n heads of this rank.
"""

from functools import cache
from typing import Any

import jax

from device_kernels.adapter import SPLASH_BACKWARD, Inputs, Kernel, call, private, swapped
from utils import LANES

TILE = 512  # positions of a tile, at most


def splash(inputs: Inputs) -> jax.Array:
    """Attention by splash. Queries and keys may be wider than values, and have more heads."""
    q, k, v, segments, scale, window, sinks = inputs
    T = k.shape[1]
    assert q.shape[1] == T and T % LANES == 0, "see choice.choose_kernel"
    # The kernel has no scale. Scaling bfloat16 queries rounds them once more.
    extra = () if segments is None else (segments,)
    return call(splash_kernel(q.shape[2], T, window), sinks, q * scale, k, v, *extra)


def tile_size(T: int, window: int = 0) -> int:
    """Return the positions of a tile: the largest multiple of LANES up to TILE that divides T.

    It is at most a quarter of a window. A query's tile reads its window and its own positions, so
    that a quarter more is computed than the window has.
    """
    largest = min(TILE, max(LANES, window // 4)) if window else TILE
    return next(size for size in range(largest // LANES * LANES, 0, -LANES) if T % size == 0)


@cache  # one object per size, so that equal programs compare as equal
def splash_kernel(n: int, T: int, window: int) -> Kernel:
    """Return the kernel for n query heads and T positions. Inside it heads come before positions.

    window  positions that a query attends to; 0 for all earlier ones.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sizes = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    tiles = library.BlockSizes(**{f"block_{name}": tile_size(T, window) for name in sizes})

    def make(**options: bool) -> Any:
        shape = T, T
        one = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
        mask = masks.MultiHeadMask([one] * n)
        return library.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=tiles, **options
        )

    def ids(segments: tuple[jax.Array, ...]) -> Any:
        return library.SegmentIds(*segments, *segments) if segments else None

    def splash_plain(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        kernel = make(save_residuals=False, interpret=interpret)
        run = jax.vmap(lambda q, k, v, *segments: kernel(q, k, v, ids(segments)))
        return swapped(run(*swapped(q, k, v), *segments))

    def splash_forward(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        kernel = make(save_residuals=True, interpret=interpret)

        def one(q, k, v, *segments):
            out, (logsumexp,) = kernel(q, k, v, ids(segments))
            return out, logsumexp

        out, logsumexp = jax.vmap(one)(*swapped(q, k, v), *segments)
        return *swapped(out), logsumexp

    def splash_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, *others: jax.Array, interpret: bool
    ) -> Any:
        # JAX has no public backward pass. This is the rule of its own custom_vjp.
        kernel = make(save_residuals=False, interpret=interpret)
        infos = kernel.dq_mask_info, kernel.dkv_mask_info
        sinks = None

        def one(grad, q, k, v, out, logsumexp, *segments):
            residuals = (q, k, v, ids(segments), sinks, out, logsumexp, *infos)
            return private(SPLASH_BACKWARD)(**kernel.kwargs, res=residuals, do=grad)[3:6]

        return swapped(*jax.vmap(one)(*swapped(grad, q, k, v, out), *others))

    return Kernel(splash_plain, splash_forward, splash_backward)
