"""Context parallelism: each rank of the axis `context` holds some positions of every sequence.

The sequence is cut into 2c chunks, and rank r of c holds chunks r and 2c - 1 - r (zigzag order), so
that a causal mask leaves every rank the same number of scores. Attention gathers what is small:
latents, or keys and values of this rank's heads. All else sees its own positions alone.

Letters as in model.py: T positions of this rank, S those of the complete sequence.

Sources  arXiv:2411.01783 (all-gather, and zigzag order), arXiv:2407.21783, section 3.3.2.
"""

import jax
import jax.numpy as jnp
from jax import lax

from weights import vary


def places(S: int) -> jax.Array | None:
    """Return the positions [T] of this rank in increasing order; None if it has all of them."""
    c, r = lax.axis_size("context"), lax.axis_index("context")
    if c == 1:
        return None
    h = S // (2 * c)
    chunk = jnp.arange(h, dtype=jnp.int32)
    return jnp.concatenate([r * h + chunk, (2 * c - 1 - r) * h + chunk])


def own(x: jax.Array, axis: int) -> jax.Array:
    """Return this rank's positions of an array that all ranks hold."""
    at = places(x.shape[axis])
    return x if at is None else jnp.take(x, at, axis=axis)


def complete(x: jax.Array, axis: int) -> jax.Array:
    """Return the inverse of `own`, the same on all ranks.  Collectives: psum(context)."""
    at = places(x.shape[axis] * lax.axis_size("context"))
    x = vary(x, ("context",))
    if at is None:
        return lax.psum(x, "context")  # over one rank: no data moves
    x = jnp.moveaxis(x, axis, 0)
    zeros = jnp.zeros_like(x, shape=(x.shape[0] * lax.axis_size("context"), *x.shape[1:]))
    return jnp.moveaxis(lax.psum(zeros.at[at].set(x), "context"), 0, axis)


@jax.custom_vjp
def gather_positions(x_bT: jax.Array) -> jax.Array:
    """[b, T, ...] of this rank -> [b, S, ...] of the sequence, in order.

    Collectives  all_gather(context), and backward psum_scatter(context) in float32.
    """
    return _gather(x_bT)[0]


def _gather(x_bT: jax.Array) -> tuple[jax.Array, None]:
    c, (b, T, *rest) = lax.axis_size("context"), x_bT.shape
    if c == 1:
        return x_bT, None
    # Not gather_positions itself, in which a remat policy could not see the all_gather.
    ranks = lax.all_gather(x_bT.reshape(b, 2, T // 2, *rest), "context", axis=1)
    ordered = jnp.concatenate([ranks[:, :, 0], ranks[:, ::-1, 1]], axis=1)
    return ordered.reshape(b, c * T, *rest), None


def _scatter(_: None, grad_bS: jax.Array) -> tuple[jax.Array]:
    c, (b, S, *rest) = lax.axis_size("context"), grad_bS.shape
    if c == 1:
        return (grad_bS,)
    chunks = grad_bS.astype(jnp.float32).reshape(b, 2 * c, S // (2 * c), -1)
    ranks = jnp.stack([chunks[:, :c], chunks[:, : c - 1 : -1]], axis=2).swapaxes(0, 1)
    # Of rows, as in weights._scatter.
    grad = lax.psum_scatter(ranks.reshape(b * S, -1), "context", scatter_dimension=0, tiled=True)
    return (grad.reshape(b, S // c, *rest).astype(grad_bS.dtype),)


gather_positions.defvjp(_gather, _scatter)
