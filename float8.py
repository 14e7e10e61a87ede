"""Products in FP8 with their gradients: e4m3 for activations and weights, e5m2 for gradients.

All three products of a weight, y = x w and the gradients of x and w, multiply FP8 numbers and
accumulate in float32. A tensor has one scale, from its own largest element (tensorwise current
scaling), on each rank by itself. A scale is a power of two, so scaling itself rounds nothing:

- Of a number the relative error is at most 2^-4 in e4m3 and 2^-3 in e5m2, if it is above 2^-13 in
  e4m3 or 2^-28 in e5m2 of the largest one. The absolute error of smaller ones is at most that of
  these.
- Two meshes, whose ranks have other scales, round alike but for such small numbers. No collective
  is needed.

Source  Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv:2209.05433).

Letters. K contracted, N the width of the result, n rows: b * T.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RESIDUAL = "float8"  # name of the residuals: sharded_model.policy
SCOPE = "float8"  # named scope of the products

Scaled = tuple[jax.Array, jax.Array]  # FP8 numbers, and the scale that they are multiplied by


def quantize(x: jax.Array, dtype: jnp.dtype) -> Scaled:
    """Round x to FP8 numbers and a scale, float32: scale * numbers is about x.

    The scale is the least power of two with which no number is above the largest of the format. It
    is not finite if x is not.
    """
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(amax / float(jnp.finfo(dtype).max))
    scale = jnp.where(jnp.isfinite(amax), jnp.ldexp(jnp.float32(1), exponent), amax)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def scaled_product(a: Scaled, b: Scaled, dims: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Contract one dimension of each matrix, into `dtype`."""
    precision = "highest" if dtype == jnp.float32 else None
    dims = (((dims[0],), (dims[1],)), ((), ()))
    # XLA for GPUs turns this pattern into one product of the FP8 arrays, with both scales.
    a, b = (x8.astype(dtype) * scale.astype(dtype) for x8, scale in (a, b))
    with jax.named_scope(SCOPE):
        return lax.dot_general(a, b, dims, precision=precision)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, ws: Sequence[jax.Array], name: str = RESIDUAL) -> tuple[jax.Array, ...]:
    """Return x @ w of each w, for which x is quantized once.

    x      [b, T, K]
    ws     matrices [K, N]
    name   of the quantized x, for `train.remat`
    Returns [b, T, N] each, in the dtype of x.
    """
    return _forward(x, ws, name)[0]


def _forward(x: jax.Array, ws: Sequence[jax.Array], name: str) -> tuple[Any, Any]:
    x8 = _named(quantize(_rows(x), E4M3), name)
    w8s = [quantize(w, E4M3) for w in ws]
    ys = (scaled_product(x8, w8, (1, 0), x.dtype) for w8 in w8s)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys), (x8, w8s)


def _backward(name: str, residuals: Any, grads: Sequence[jax.Array]) -> Any:
    x8, w8s = residuals
    g8s, dtype = [quantize(_rows(g), E5M2) for g in grads], grads[0].dtype
    terms = (scaled_product(g8, w8, (1, 1), dtype) for g8, w8 in zip(g8s, w8s, strict=True))
    d_ws = tuple(scaled_product(x8, g8, (0, 0), dtype) for g8 in g8s)
    return sum(terms).reshape(*grads[0].shape[:-1], -1), d_ws


def _named(x: Scaled, name: str) -> Scaled:
    """Return x under the names with which a remat policy saves it."""
    # As integers: jax.checkpoint rounds the floating-point residuals that it saves to their number
    # of bits, which in e4m3 makes numbers above 240 infinite.
    bits = lax.bitcast_convert_type(x[0], jnp.uint8), x[1]
    bits, scale = checkpoint_name(checkpoint_name(bits, RESIDUAL), name)
    return lax.bitcast_convert_type(bits, E4M3), scale


def _rows(x: jax.Array) -> jax.Array:
    return lax.collapse(x, 0, x.ndim - 1)


matmul.defvjp(_forward, _backward)
