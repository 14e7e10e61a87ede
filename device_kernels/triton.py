"""The Pallas-Triton attention kernel for NVIDIA GPUs in JAX.

Letters: b sequences of this rank, T positions, n heads of this rank.
"""

import dataclasses
import math
import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from device_kernels import adapter
from device_kernels.adapter import Inputs, Kernel, call, private, repeat_heads
from device_kernels.chunks import in_chunks


def triton(inputs: Inputs) -> jax.Array:
    """Attention by the kernel, with segments.

    It has one head width, so values are zero-padded, and as many heads of keys as of queries.
    """
    q, k, v, segments, scale, window, sinks, places = inputs
    assert not window, "see choice.choose_kernel"
    k, v = repeat_heads(q, k, v)
    padded = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - v.shape[-1])])
    extra, kernel = () if segments is None else (segments,), triton_kernel(scale, q.shape[-1])
    if places is not None:
        assert segments is None, "see choice.choose_kernel"
        extra = (places,)
        kernel = in_chunks(kernel, triton_kernel(scale, q.shape[-1], causal=False))
    out = call(kernel, sinks, q, k, padded, *extra)
    return out[..., : v.shape[-1]]


@cache
def triton_kernel(scale: float, width: int, causal: bool = True) -> Kernel:
    """Return the kernel for heads of a width."""
    with warnings.catch_warnings():  # jax 0.12 deprecates it in favor of the package tokamax
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as library

    # Tiles of the forward pass that fit in shared memory, even where it has only 100 KiB.
    size = adapter.GPU_TILE if width <= 64 else adapter.GPU_TILE // 2
    tiles = dataclasses.replace(library.BlockSizes.get_default(), block_q=size, block_k=size)
    options = {
        "sm_scale": scale,
        "causal": causal,
        "block_sizes": tiles,
        "backward_pass_impl": "triton",
        "num_warps": None,
        "num_stages": 2,
        "grid": None,
        "debug": False,
    }

    def triton_plain(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        return triton_forward(q, k, v, *segments, interpret=interpret)[:1]

    def triton_forward(q: Any, k: Any, v: Any, *segments: jax.Array, interpret: bool) -> Any:
        return library.mha(
            q, k, v, *(segments or [None]), interpret=interpret, return_residuals=True, **options
        )

    def triton_backward(grad: Any, *residuals: jax.Array, interpret: bool) -> Any:
        # JAX has no public backward pass, as with splash.
        q, k, v, out, logsumexp, *segments = residuals
        gradients = private(adapter.TRITON_BACKWARD)(
            interpret=interpret,
            return_residuals=False,
            res=(q, k, v, *(segments or [None]), out, logsumexp),
            do=grad,
            **options,
        )
        return gradients[:3]

    return Kernel(triton_plain, triton_forward, triton_backward, math.log(2))
