"""Cross-entropy with its gradient as one Pallas-Triton kernel, for NVIDIA GPUs.

Letters: n tokens, v token ids, all of the vocabulary.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from device_kernels.adapter import foreign_p

LEAST = -1e30  # below any logit; unlike -inf it can be subtracted from itself
# Ids that a program loads at once, and its warps. More than 32 registers in each of 1,024 threads
# leave one program, and so one row of logits, to a multiprocessor: see `cross_entropy`.
BLOCK, WARPS = 8192, 32


def cross_entropy(
    vocabulary: int, z_factor: float, dtype: Any, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradient of logits, and of each token its target's logit and logsumexp [n].

    The gradient [n, v], in `dtype`, is that of the sum over tokens of weight * (logsumexp - target
    + z_factor * logsumexp^2). Logits are float32, and those from `vocabulary` on are padding.

    XLA reads logits from memory for the logsumexp and again for the gradient. Here one program does
    both for a row, and the second time reads it from the L2 cache, which holds a row for each
    multiprocessor: 26 MB of 50 on an H100 for 50,432 ids. It reads backward, so that the end of a
    row that is too long for that is still in the cache.

    arrays  logits_nv, targets_n and weights_n.
    Source  arXiv:1805.02867, algorithm 3, here for each position of a block by itself.
    """
    function = row_kernel(vocabulary, z_factor, jnp.dtype(dtype).name)
    return tuple(foreign_p.bind(*arrays, function=function))


@cache
def row_kernel(vocabulary: int, z_factor: float, dtype: str) -> Any:
    """Return the kernel as a function of arrays without varying-axes types, for `foreign_p`."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    def cross_entropy_kernel(
        logits_nv: Any, targets_n: Any, weights_n: Any, interpret: bool
    ) -> list[Any]:
        n, v = logits_nv.shape
        blocks = pallas.cdiv(v, BLOCK)

        def row(
            logits: Any, target: Any, weight: Any, d_logits: Any, target_logit: Any, logsumexp: Any
        ) -> None:
            def read(i: Any, policy: str) -> tuple[Any, Any, Any]:
                """Return slice, ids and logits of a block."""
                at, ids = pallas.ds(i * BLOCK, BLOCK), i * BLOCK + jnp.arange(BLOCK)
                # A mask at `vocabulary`, which may be odd, would split loads into single numbers.
                x = triton.load(logits.at[at], mask=ids < v, eviction_policy=policy)
                return at, ids, jnp.where(ids < vocabulary, x, LEAST)

            def add(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
                largest, total = state
                *_, x = read(i, "evict_last")
                ratio = jnp.exp(-jnp.abs(x - largest))
                total = jnp.where(x > largest, total * ratio + 1, total + ratio)
                return jnp.maximum(x, largest), total

            none = jnp.full(BLOCK, LEAST, jnp.float32), jnp.zeros(BLOCK, jnp.float32)
            largest, total = lax.fori_loop(0, blocks, add, none)
            top = jnp.max(largest)
            log_z = jnp.log(jnp.sum(total * jnp.exp(largest - top))) + top
            target_logit[0], logsumexp[0] = logits[target[0]], log_z
            d_log_z = weight[0] * (1 + 2 * z_factor * log_z)

            def write(i: Any, _: None) -> None:
                at, ids, x = read(blocks - 1 - i, "evict_first")
                d_target = jnp.where(ids == target[0], weight[0], 0)
                d = d_log_z * jnp.exp(x - log_z) - d_target
                triton.store(d_logits.at[at], d.astype(dtype), mask=ids < v)

            lax.fori_loop(0, blocks, write, None)

        of_row = pallas.BlockSpec((None, v), lambda i: (i, 0))
        of_token = pallas.BlockSpec((1,), lambda i: (i,))
        per_token = jax.ShapeDtypeStruct((n,), jnp.float32)
        return pallas.pallas_call(
            row,
            grid=(n,),
            in_specs=[of_row, of_token, of_token],
            out_specs=[of_row, of_token, of_token],
            out_shape=[jax.ShapeDtypeStruct((n, v), dtype), per_token, per_token],
            compiler_params=triton.CompilerParams(num_warps=WARPS),
            interpret=interpret,
            name="cross_entropy",
        )(logits_nv, targets_n, weights_n)

    return cross_entropy_kernel
