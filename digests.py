"""A digest of an array's values: the same on every mesh, layout and machine.

Two sums modulo 2^32, over all elements, of a hash of (the element's bits, its place in the whole
array). Integers wrap, so neither the order of summation nor the cut matters. Each hash is one to
one in the bits at any place: whatever happens to a single element changes both sums. Two elements
that differ and change places, or any other error, go unseen once in 2^64.

Source: the hash is the finalizer of MurmurHash3 for 32 bits (Appleby 2011, public domain).
"""

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Digest = tuple[int, int]
SEED, STEP = np.uint32(0x9E3779B9), np.uint32(0x85EBCA77)  # any two odd numbers
PIECE = 1 << 17  # elements of a NumPy array that are hashed at a time
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}  # by the bytes of an element


def mix(x: Any) -> Any:
    """fmix32: one to one, and a bit of x moves every bit of the result. Of either kind of array."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _hashes(bits: Any, row: Any, column: Any) -> tuple[Any, Any]:
    """Of elements at (row, column), all uint32."""
    place = mix(column ^ mix(row + SEED))
    return mix(bits ^ place), mix(bits + mix(place + STEP))


def _rows(shape: tuple[int, ...]) -> int:
    """How many dimensions count rows: what follows them has places that 32 bits can number."""
    return next(n for n in range(len(shape) + 1) if math.prod(shape[n:]) <= 1 << 32)


def digest(x: jax.Array) -> jax.Array:
    """The two sums of an array on devices, as uint32 [2]. To be traced."""
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    x = jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])  # 8 bytes: two words, at the end
    bits, rows = x.astype(jnp.uint32), _rows(x.shape)

    def place(dims: range) -> jax.Array:
        number = jnp.zeros(x.shape, jnp.uint32)
        for dim in dims:
            index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
            number = number * np.uint32(x.shape[dim]) + index
        return number

    both = _hashes(bits, place(range(rows)), place(range(rows, x.ndim)))
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32) for h in both])


@functools.cache
def _jitted(layout: NamedSharding | None) -> Any:
    """One program for all arrays of a tree; every process has its result."""

    def every(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([digest(x) for x in arrays])

    return jax.jit(every, out_shardings=layout)


def of_arrays(arrays: Mapping[str, jax.Array]) -> dict[str, Digest]:
    """The digest of each, computed where they lie."""
    values = list(arrays.values())
    layout = values[0].sharding
    layout = NamedSharding(layout.mesh, P()) if isinstance(layout, NamedSharding) else None
    sums = np.asarray(_jitted(layout)(values)).tolist()
    return {name: (one, other) for name, (one, other) in zip(arrays, sums, strict=True)}


def of_numpy(x: np.ndarray) -> Digest:
    """As `digest`, of an array in memory or in a file, a piece at a time."""
    x = np.ascontiguousarray(x) if x.ndim else x.reshape(1)
    words = x.reshape(-1).view(WORDS[x.dtype.itemsize])
    shape = (*x.shape, 2) if x.dtype.itemsize == 8 else x.shape
    columns = math.prod(shape[_rows(shape) :])

    def piece(start: int) -> tuple[int, int]:
        place = np.arange(start, min(start + PIECE, words.size), dtype=np.uint64)
        row, column = np.divmod(place, np.uint64(columns))
        bits = words[start : start + PIECE].astype(np.uint32)
        both = _hashes(bits, row.astype(np.uint32), column.astype(np.uint32))
        return tuple(int(h.sum(dtype=np.uint64)) for h in both)

    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(piece, range(0, words.size, PIECE)))
    one, other = (sum(part) % (1 << 32) for part in zip(*sums, strict=True)) if sums else (0, 0)
    return one, other
