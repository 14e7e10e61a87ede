"""Rotary embedding of queries and keys (arXiv:2104.09864), and its extensions to longer contexts.

Letters as in model.py: b sequences, T positions, n heads, R rotary width, A width of a head.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

import utils
from utils import Rope


def rope_frequencies(m: Rope | utils.Model, R: int) -> jax.Array:
    """Return [R/2] angles between neighbouring positions: theta^(-2i/R) for pair i.

    YaRN (arXiv:2309.00071, section 3.2) divides the frequency by `factor` for pairs that rotate
    less than `beta_slow` times in the original context. It keeps those that rotate more than
    `beta_fast` times, and interpolates in between, linearly in i. Llama 3 (arXiv:2407.21783)
    interpolates linearly in the rotations, between `low_freq_factor` and `high_freq_factor`.
    """
    theta, scaling = m.rope_theta, m.rope_scaling
    half = R // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.factor == 1:
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor

    def pair(rotations: float) -> float:
        """The i, as a real number, that rotates this often in the original context."""
        positions = scaling.original_max_position_embeddings / (rotations * math.tau)
        return R * math.log(positions) / (2 * math.log(theta))

    if scaling.rope_type == "llama3":
        rotations = scaling.original_max_position_embeddings * frequency / math.tau
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        slowed = (high - rotations) / (high - low)
    else:
        first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:  # as in DeepSeek's code, with which the published weights were trained
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, R - 1)
        slowed = (jnp.arange(half, dtype=jnp.float32) - first) / (last - first or 0.001)
    slowed = jnp.clip(slowed, 0.0, 1.0)
    return frequency * (1 - slowed) + frequency / scaling.factor * slowed


def yarn_mscale(m: Rope | utils.Model, mscale: float) -> float:
    """1 + mscale / 10 * log(factor): YaRN's sqrt(1/t) (arXiv:2309.00071, section 3.4)."""
    if m.rope_scaling.rope_type != "yarn":
        return 1.0
    return 1 + 0.1 * mscale * math.log(m.rope_scaling.factor)


def rope_magnitude(m: Rope | utils.Model) -> float:
    """The factor on rotated queries and keys."""
    yarn = m.rope_scaling
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(m, yarn.mscale) / yarn_mscale(m, yarn.mscale_all_dim)
    return yarn_mscale(m, 1.0)


def softmax_scale(m: Rope | utils.Model, width: float) -> float:
    """The factor on attention scores: 1 / sqrt(width), times YaRN's 1/t."""
    return width**-0.5 * yarn_mscale(m, m.rope_scaling.mscale_all_dim) ** 2


def rotate(
    x_bTnR: jax.Array, m: Rope | utils.Model, position_bT: jax.Array, sign: float = 1.0
) -> jax.Array:
    """Rotate each pair (i, i + R/2) by position * frequency (arXiv:2104.09864).

    In float32, because bfloat16 cannot hold large positions.

    position_bT  of each token, or [1, T] for all sequences.
    """
    frequency = rope_frequencies(m, x_bTnR.shape[-1])
    angle_bTi = position_bT.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    angle = angle_bTi[:, :, None, :]
    x32, magnitude = x_bTnR.astype(jnp.float32), rope_magnitude(m)
    a, b = jnp.split(x32 if magnitude == 1 else x32 * magnitude, 2, axis=-1)
    cos, sin = jnp.cos(angle), sign * jnp.sin(angle)
    rotated = a * cos - b * sin, b * cos + a * sin
    return jnp.concatenate(rotated, axis=-1).astype(x_bTnR.dtype)


def rotate_last(x_bTnA: jax.Array, m: Rope, position_bT: jax.Array, R: int) -> jax.Array:
    """Rotate the last R columns in place; the gradient is rotated back, in place too."""

    def put(x: jax.Array, position: jax.Array, sign: float) -> jax.Array:
        part = rotate(x[..., -R:], m, position, sign)
        return lax.dynamic_update_slice_in_dim(x, part, x.shape[-1] - R, 3)

    run = jax.custom_vjp(lambda x, position: put(x, position, 1.0))
    run.defvjp(
        lambda x, position: (put(x, position, 1.0), position),
        lambda position, g: (put(g, position, -1.0), None),
    )
    return run(x_bTnA, position_bT)
