"""Attention of a rank of context by a kernel that knows only full and causal squares.

Rank r of c has the queries of chunks r and 2c - 1 - r of 2c, and the keys of all. That is a causal
square for each of its chunks, and 2c - 1 full squares on every rank. Results of squares over the
same queries are merged by their logsumexp (arXiv:2310.01889). Backward, each square takes the
logsumexp and the result of the complete row, so its gradients add up.

Letters: b sequences, h positions of a chunk, n heads of this rank.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from device_kernels.adapter import Kernel

FULL = "full_square"  # scope of kernels without a mask, for planning/hlo.py
Square = tuple[Any, Any]  # which of this rank's two chunks of queries, and which chunk of keys


def read(a: Any, chunk: Any, h: int, axis: int = 1) -> Any:
    return lax.dynamic_slice_in_dim(a, chunk * h, h, axis)


def write(a: Any, part: Any, chunk: Any, h: int, axis: int = 1) -> Any:
    return lax.dynamic_update_slice_in_dim(a, part, chunk * h, axis)


def squares(places: Any, S: int) -> tuple[int, list[Square], Square]:
    """Return h, the causal squares, and the full ones as arrays [2c - 1]."""
    h = places.shape[0] // 2
    low, high = places[0] // h, places[h] // h
    number = jnp.arange(S // h - 1, dtype=jnp.int32)
    is_low = number < low
    queries, keys = jnp.where(is_low, 0, 1), jnp.where(is_low, number, number - low)
    return h, [(0, low), (1, high)], (queries, keys)


def merged(base: float, old: tuple[Any, Any], new: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return result and log-sum-exp over the keys of both; base is the logarithm of its base."""
    (out, sums), (new_out, new_sums) = old, new
    total = jnp.logaddexp(sums * base, new_sums * base) / base

    def part(out: Any, sums: Any) -> Any:
        return jnp.exp((sums - total) * base).swapaxes(1, 2)[..., None] * out

    return part(out, sums) + part(new_out.astype(jnp.float32), new_sums), total


@cache
def in_chunks(causal: Kernel, full: Kernel) -> Kernel:
    """Return the kernel of q, k, v and the positions [T] of this rank's queries."""

    def forward(q: Any, k: Any, v: Any, places: Any, interpret: bool) -> Any:
        h, diagonal, rest = squares(places, k.shape[1])

        def run(kernel: Kernel, square: Square) -> Any:
            i, j = square
            rows = read(q, i, h), read(k, j, h), read(v, j, h)
            with jax.named_scope(FULL if kernel is full else "causal_square"):
                return kernel.forward(*rows, interpret=interpret)

        def body(state: tuple[Any, Any], square: Square) -> tuple[tuple[Any, Any], None]:
            out, sums = state
            i, _ = square
            one = merged(
                causal.logarithm, (read(out, i, h), read(sums, i, h, 2)), run(full, square)
            )
            return (write(out, one[0], i, h), write(sums, one[1], i, h, 2)), None

        outs, sums = zip(*(run(causal, square) for square in diagonal), strict=True)
        state = jnp.concatenate(outs, 1).astype(jnp.float32), jnp.concatenate(sums, 2)
        (out, sums), _ = lax.scan(body, state, rest)
        return out.astype(q.dtype), sums

    def plain(*inputs: Any, interpret: bool) -> Any:
        return forward(*inputs, interpret=interpret)[:1]

    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, places: Any, interpret: bool
    ) -> Any:
        h, diagonal, rest = squares(places, k.shape[1])

        def add(kernel: Kernel, grads: tuple, square: Square) -> tuple[tuple, None]:
            i, j = square
            rows = [read(a, at, h) for a, at in ((grad, i), (q, i), (k, j), (v, j), (out, i))]
            with jax.named_scope(FULL if kernel is full else "causal_square"):
                new = kernel.backward(*rows, read(sums, i, h, 2), interpret=interpret)
            old = [(g, read(g, at, h), at) for g, at in zip(grads, (i, j, j), strict=True)]
            return tuple(
                write(g, part + n.astype(jnp.float32), at, h)
                for (g, part, at), n in zip(old, new, strict=True)
            ), None

        grads = tuple(jnp.zeros(a.shape, jnp.float32) for a in (q, k, v))
        for square in diagonal:
            grads, _ = add(causal, grads, square)
        grads, _ = lax.scan(partial(add, full), grads, rest)
        return [g.astype(a.dtype) for g, a in zip(grads, (q, k, v), strict=True)]

    for mine, other in zip((plain, forward, backward), causal[:3], strict=True):
        mine.__name__ = other.__name__  # by which the planner counts
    return Kernel(plain, forward, backward, causal.logarithm)
