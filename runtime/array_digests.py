"""Digests of the values of arrays, independent of mesh, layout and machine.

A digest is two sums modulo 2^32, over all elements, of a hash of (bits of the element, its position
in the array). Integer addition wraps, so neither order nor sharding matters. At any position each
hash is a bijection of the bits: a change of one element changes both sums. Any other error, such as
two exchanged elements, is missed with a probability of 2^-64.

Source: the hash is the finalizer of MurmurHash3 for 32 bits (Appleby 2011, public domain).
"""

import functools
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Digest = tuple[int, int]
SEED, STEP = np.uint32(0x9E3779B9), np.uint32(0x85EBCA77)  # any two odd numbers
BATCH = 1 << 17  # elements of a NumPy array per batch
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}  # by bytes per element


def mix(x: Any) -> Any:
    """Return fmix32(x), a bijection in which every bit of x affects every bit of the result."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _hashes(bits: Any, row: Any, column: Any) -> tuple[Any, Any]:
    """Hash elements at (row, column), all uint32."""
    position = mix(column ^ mix(row + SEED))
    return mix(bits ^ position), mix(bits + mix(position + STEP))


def _row_dims(shape: tuple[int, ...]) -> int:
    """Return the number of leading dimensions that form rows of at most 2^32 elements."""
    return next(n for n in range(len(shape) + 1) if math.prod(shape[n:]) <= 1 << 32)


def digest(x: jax.Array, merged: int = 1) -> jax.Array:
    """Return the two sums of an array on devices, as uint32 [2], in a traced function.

    merged  number of leading dimensions that count as one, as in the reshaped array
    """
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    # Elements of 8 bytes become two words, in a new last dimension.
    x = jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])
    bits = x.astype(jnp.uint32)
    rows = _row_dims((math.prod(x.shape[:merged]), *x.shape[merged:]))
    rows += (merged - 1) * (rows > 0)

    def number(dims: range) -> jax.Array:
        total = jnp.zeros(x.shape, jnp.uint32)
        for dim in dims:
            index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
            total = total * np.uint32(x.shape[dim]) + index
        return total

    both = _hashes(bits, number(range(rows)), number(range(rows, x.ndim)))
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32) for h in both])


@functools.cache
def jitted(layout: NamedSharding | None, merged: tuple[int, ...]) -> Any:
    """Return one program for all arrays of a tree, with a replicated result."""

    def every(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([digest(x, n) for x, n in zip(arrays, merged, strict=True)])

    return jax.jit(every, out_shardings=layout)


def of_arrays(arrays: Mapping[str, jax.Array], merged: Mapping[str, int]) -> dict[str, Digest]:
    """Return the digest of each array, computed on its devices; `merged` as in `digest`."""
    values = list(arrays.values())
    layout = values[0].sharding
    layout = NamedSharding(layout.mesh, P()) if isinstance(layout, NamedSharding) else None
    dims = tuple(merged.get(name, 1) for name in arrays)
    sums = np.asarray(jitted(layout, dims)(values)).tolist()
    return dict(zip(arrays, map(tuple, sums), strict=True))


def of_numpy(x: np.ndarray, shape: tuple[int, ...] | None = None, start: int = 0) -> Digest:
    """Return the digest of a NumPy array, or of a part of it.

    shape, start  shape of the complete array, and the first element of x in it; `total` adds the
                  digests of the parts
    """
    shape = x.shape if shape is None else shape
    x = np.ascontiguousarray(x) if x.ndim else x.reshape(1)
    words = x.reshape(-1).view(WORDS[x.dtype.itemsize])
    if x.dtype.itemsize == 8:
        shape, start = (*shape, 2), 2 * start
    columns = math.prod(shape[_row_dims(shape) :])

    def batch(first: int) -> Digest:
        position = np.arange(first, min(first + BATCH, words.size), dtype=np.uint64)
        row, column = np.divmod(position + np.uint64(start), np.uint64(columns))
        bits = words[first : first + BATCH].astype(np.uint32)
        one, other = _hashes(bits, row.astype(np.uint32), column.astype(np.uint32))
        return int(one.sum(dtype=np.uint64)), int(other.sum(dtype=np.uint64))

    with ThreadPoolExecutor(4) as pool:
        return total(pool.map(batch, range(0, words.size, BATCH)))


def total(parts: Iterable[Digest]) -> Digest:
    """Add the digests of the parts of an array."""
    one, other = zip((0, 0), *parts, strict=True)
    return sum(one) % (1 << 32), sum(other) % (1 << 32)
