"""What depends on the vocabulary: embedding, logits and loss.

The rows of the embedding and of the output matrix are sharded over pipeline and tensor, so that all
stages hold the same share (arXiv:2411.05288).

Letters. UPPER case is the global dimension, lower case this rank's slice of it:
    B sequences    T positions                    D model width    V vocabulary, padded
    n tokens, b * T, or those of one chunk        c chunks of tokens
A value whose name starts with `partial_` is still to be reduced over ranks.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from device_kernels.cross_entropy import LEAST, cross_entropy
from utils import VOCABULARY_AXES
from weights import Tree, float32_product, matmul, normal, vary, varying, weight


def vocab_table() -> Any:
    """Declare the embedding or output matrix."""
    return weight("V/pipeline+tensor D/fsdp", normal("D"), group="embedding")


# --- embedding ------------------------------------------------------------------------------------


def local_rows(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the row of each id in this rank's vocabulary slice, and whether the slice has it."""
    row = ids - lax.axis_index(VOCABULARY_AXES) * rows
    return jnp.clip(row, 0, rows - 1), (row >= 0) & (row < rows)


@jax.custom_vjp
def lookup(table_vD: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the row of each id [..., D], with zeros for ids of other ranks.

    The gradient of a row is a sum in float32: a common token occurs thousands of times in a batch,
    and a bfloat16 sum stops growing at 256 times its parts.
    """
    row, held = local_rows(ids, table_vD.shape[0])
    return jnp.where(held[..., None], table_vD[row], 0)


def _lookup_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple:
    table_vD, ids = saved
    row, held = local_rows(ids, table_vD.shape[0])
    row = jnp.where(held, row, table_vD.shape[0])
    zero = vary(jnp.zeros(table_vD.shape, jnp.float32), varying((table_vD, grad)))
    d_table_vD = zero.at[row].add(grad.astype(jnp.float32), mode="drop")
    return d_table_vD.astype(table_vD.dtype), None


lookup.defvjp(lambda table_vD, ids: (lookup(table_vD, ids), (table_vD, ids)), _lookup_backward)


@jax.named_scope("embedding")
def embed(table_vD: jax.Array, tokens_bT: jax.Array) -> jax.Array:
    """Look up rows of the embedding -> [b, t, D], the same on every pipeline rank.

    Each rank holds a slice of the vocabulary, and adds zeros for other ids.

    Collectives  psum(pipeline) and psum_scatter(tensor) of [b, T, D].
    """
    partial_bTD = lax.psum(lookup(table_vD, tokens_bT), "pipeline")
    return lax.psum_scatter(partial_bTD, "tensor", scatter_dimension=1, tiled=True)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


# --- loss -----------------------------------------------------------------------------------------


@jax.named_scope("loss")
def local_logits(table_vD: jax.Array, h_nD: jax.Array, vocabulary: int) -> jax.Array:
    """Return this rank's columns of the logits, float32, with -inf for padding ids."""
    # In float32, because a logit of 20 in bfloat16 is off by up to 0.06, and so is its loss.
    logits_nv = float32_product("nD,vD->nv", h_nD, table_vD)
    return jnp.where(local_ids(len(table_vD))[None, :] < vocabulary, logits_nv, -jnp.inf)


def local_ids(rows: int) -> jax.Array:
    """Return the token ids of this rank's vocabulary slice, which has `rows` ids."""
    return lax.axis_index(VOCABULARY_AXES) * rows + jnp.arange(rows, dtype=jnp.int32)


@jax.named_scope("loss")
def target_logits(logits_nv: jax.Array, targets_n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logit of each token's target and logsumexp(logits) [n], float32.

    Their difference is the cross-entropy. They have no gradient: chunked_loss has its own.

    Collectives  pmax and two psums (pipeline x tensor) of [n].
    """
    own = lax.platform_dependent(logits_nv, targets_n, cuda=one_pass, default=two_passes)
    largest_n, sum_n, target_n = own
    top_n = lax.pmax(largest_n, VOCABULARY_AXES)
    sum_n = lax.psum(sum_n * jnp.exp(largest_n - top_n), VOCABULARY_AXES)
    return lax.psum(target_n, VOCABULARY_AXES), jnp.log(sum_n) + top_n


Statistics = tuple[jax.Array, jax.Array, jax.Array]


def two_passes(logits_nv: jax.Array, targets_n: jax.Array) -> Statistics:
    """Return each token's largest logit, the sum of exp(logit - largest), and its target's logit.

    Those of this rank's slice of the vocabulary; the last is 0 if the slice does not have it.
    """
    largest_n = jnp.maximum(logits_nv.max(-1), LEAST)
    sum_n = jnp.exp(logits_nv - largest_n[:, None]).sum(-1)
    return largest_n, sum_n, jnp.where(is_target(logits_nv, targets_n), logits_nv, 0).sum(-1)


def one_pass(logits_nv: jax.Array, targets_n: jax.Array) -> Statistics:
    """Return `two_passes` from one reduction, as logits of GPUs are read from memory each time.

    Source  arXiv:1805.02867. On CPUs, whose compiler does not vectorize it, it takes twice as long.
    """

    def combine(a: Statistics, b: Statistics) -> Statistics:
        largest = jnp.maximum(a[0], b[0])
        sums = a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)
        return largest, sums, a[2] + b[2]

    target_nv = jnp.where(is_target(logits_nv, targets_n), logits_nv, 0)
    of_one = jnp.maximum(logits_nv, LEAST), jnp.ones_like(logits_nv), target_nv
    of_one = vary(of_one, varying(of_one))
    none = vary((jnp.float32(LEAST), jnp.float32(0), jnp.float32(0)), varying(of_one))
    return tuple(lax.reduce(of_one, none, combine, (1,)))


def is_target(logits_nv: jax.Array, targets_n: jax.Array) -> jax.Array:
    return local_ids(logits_nv.shape[1])[None, :] == targets_n[:, None]


class LossOptions(NamedTuple):
    """What is known of a loss when it is traced."""

    vocabulary: int  # size without padding
    z_factor: float
    fused: bool  # whether the gradient is that of a kernel: see device_kernels/choice.py
    trained: bool  # whether the table has a gradient


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_loss(
    options: LossOptions, table_vD: jax.Array, *chunks_cn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return cross-entropy + z_factor * z-loss, and both sums [2].

    Only the logits of one chunk of tokens exist at a time. The gradient is computed with the value,
    chunk by chunk, so that logits are neither residuals nor recomputed.

    chunks_cn  h_cnD, targets_cn and weights_cn.
    """

    def sums_of(chunk: tuple[jax.Array, ...]) -> jax.Array:
        h_nD, targets_n, weights_n = chunk
        logits_nv = local_logits(table_vD, h_nD, options.vocabulary)
        return weighted_sums(*target_logits(logits_nv, targets_n), weights_n)

    sums = lax.map(sums_of, chunks_cn).sum(0)
    return sums[0] + options.z_factor * sums[1], sums


def weighted_sums(target_n: jax.Array, logsumexp_n: jax.Array, weights_n: jax.Array) -> jax.Array:
    """Return the weighted sums [2] of cross-entropy and logsumexp^2 over tokens."""
    losses_n = logsumexp_n - target_n
    return jnp.stack([(weights_n * losses_n).sum(), (weights_n * logsumexp_n**2).sum()])


def logits_gradient(
    options: LossOptions, table_vD: jax.Array, *chunk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of logits [n, v], in the dtype of h_nD, and the weighted sums [2].

    chunk  h_nD, targets_n and weights_n.
    """
    h_nD, targets_n, weights_n = chunk
    vocabulary, z_factor, *_ = options
    if options.fused:
        with jax.named_scope("loss"):
            arrays = float32_product("nD,vD->nv", h_nD, table_vD), targets_n, weights_n
            arrays = vary(arrays, varying(arrays))
            d_logits_nv, *own = cross_entropy(vocabulary, z_factor, h_nD.dtype, *arrays)
            # Over the one rank that has the vocabulary: no data moves.
            target_n, logsumexp_n = lax.psum(own, VOCABULARY_AXES)
            return d_logits_nv, weighted_sums(target_n, logsumexp_n, weights_n)
    logits_nv = local_logits(table_vD, h_nD, vocabulary)
    target_n, logsumexp_n = target_logits(logits_nv, targets_n)
    with jax.named_scope("transpose(loss)"):  # as JAX names operations of a backward pass
        p_nv = jnp.exp(logits_nv - logsumexp_n[:, None])
        d_logsumexp_n = weights_n * (1 + 2 * z_factor * logsumexp_n)
        d_target_nv = jnp.where(is_target(logits_nv, targets_n), weights_n[:, None], 0)
        d_logits_nv = (d_logsumexp_n[:, None] * p_nv - d_target_nv).astype(h_nD.dtype)
    return d_logits_nv, weighted_sums(target_n, logsumexp_n, weights_n)


def _chunked_loss_forward(
    options: LossOptions, table_vD: jax.Array, *chunks_cn: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, jax.Array]]:
    def body(d_table_vD: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, tuple]:
        h_nD, *_ = chunk
        d_logits_nv, sums = logits_gradient(options, table_vD, *chunk)
        with jax.named_scope("transpose(loss)"):
            if options.trained:
                d_table_vD += float32_product("nv,nD->vD", d_logits_nv, h_nD)
            return d_table_vD, (sums, matmul("nv,vD->nD", d_logits_nv, table_vD))

    zero = None
    if options.trained:
        zero = vary(jnp.zeros(table_vD.shape, jnp.float32), varying(table_vD))
    d_table_vD, (sums, d_h_cnD) = lax.scan(body, zero, chunks_cn)
    sums = sums.sum(0)
    if options.trained:
        d_table_vD = d_table_vD.astype(table_vD.dtype)
    return (sums[0] + options.z_factor * sums[1], sums), (d_table_vD, d_h_cnD)


def _chunked_loss_backward(options: LossOptions, grads: tuple, d_out: tuple) -> tuple:
    scale = d_out[0]  # d_out[1] is of the sums, which are only reported
    scaled = (None if g is None else g * scale.astype(g.dtype) for g in grads)
    return *scaled, None, None


chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


@cache
def num_chunks(tokens: int, most: int) -> int:
    """Return the number of chunks of at most `most` tokens.

    It is the smallest one, or one at most a quarter larger that divides the tokens evenly.
    """
    smallest = -(-tokens // most)
    larger = range(smallest, smallest + smallest // 4 + 1)
    return next((count for count in larger if tokens % count == 0), smallest)


def in_chunks(arrays_n: Tree, most: int) -> Tree:
    """[n, ...] -> [chunks, at most `most`, ...] of each leaf, with zeros after the last token."""

    def one(x_n: jax.Array) -> jax.Array:
        tokens, *rest = x_n.shape
        count = num_chunks(tokens, most)
        size = -(-tokens // count)
        if padding := count * size - tokens:
            zeros = vary(jnp.zeros((padding, *rest), x_n.dtype), varying(x_n))
            x_n = jnp.concatenate([x_n, zeros])
        return x_n.reshape(count, size, *rest)

    return jax.tree.map(one, arrays_n)
