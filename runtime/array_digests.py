"""Digests of the values of arrays, independent of mesh, layout and machine.

A digest is two sums modulo 2^32, over all elements, of a hash of (bits of the element, its position
in the array). Integer addition wraps, so neither order nor sharding matters. At any position each
hash is a bijection of the bits: a change of one element changes both sums. Any other error, such as
two exchanged elements, is missed with a probability of 2^-64.

Source: the hash is the finalizer of MurmurHash3 for 32 bits (Appleby 2011, public domain).

ReplicaChecker compares the copies of an array that several devices hold. A device that once
computes or stores a wrong value need not produce a number that is not finite. From then on its
copies differ from those of other devices, while the loss looks normal.

Letters: n arrays of which several devices hold the same slice.
"""

import functools
import math
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import distributed
from runtime.errors import compile_lowered
from utils import MESH_AXES

Digest = tuple[int, int]
SEED, STEP = np.uint32(0x9E3779B9), np.uint32(0x85EBCA77)  # any two odd numbers
BATCH = 1 << 17  # elements of a NumPy array per batch
MAX_NAMED = 5  # arrays in one message
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


# --- copies of an array on several devices --------------------------------------------------------


class ReplicaChecker:
    """state -> a description of the devices whose copies differ; None if all agree.

    Each device reads its slices of the n arrays once. All processes call the constructor, which
    compiles the program, and each call.

    Collectives  all_gather of 4 bytes per array and device
    """

    def __init__(self, shapes: Any, mesh: Mesh):
        """shapes  the state as jax.ShapeDtypeStruct with shardings on this mesh"""
        self.devices = mesh.devices.flatten()
        self.hosts = [name.decode() for name in distributed.gather(socket.gethostname().encode())]
        arrays = _named(shapes)
        firsts = {name: _firsts(a, self.devices) for name, a in arrays.items()}
        self.names = [name for name, first in firsts.items() if len(set(first)) < len(first)]
        if self.names:
            # [n, devices]: the first device with the same slice of this array
            self.first = np.array([firsts[name] for name in self.names])
            self.sums = _compiled([arrays[name] for name in self.names], mesh)

    def __call__(self, state: Any) -> str | None:
        if not self.names:
            return None
        arrays = _named(state)
        sums = jax.device_get(self.sums([arrays[name] for name in self.names]))
        sums = sums.reshape(len(self.devices), -1).T
        wrong = np.flatnonzero((sums != np.take_along_axis(sums, self.first, 1)).any(1))
        texts = [self._difference(i, sums[i]) for i in wrong[:MAX_NAMED]]
        more = f"; so do {len(wrong) - MAX_NAMED} more arrays" * (len(wrong) > MAX_NAMED)
        return "; ".join(texts) + more or None

    def _difference(self, array: int, sums: np.ndarray) -> str:
        """Describe one array whose copies differ, by the first such slice."""
        name, first = self.names[array], self.first[array]
        groups = [np.flatnonzero(first == one) for one in np.unique(first)]
        group = next(group for group in groups if len({*sums[group]}) > 1)
        common, count = Counter(sums[group].tolist()).most_common(1)[0]
        # Without a majority all of them are named.
        odd = group[sums[group] != common] if 2 * count > len(group) else group
        devices = ", ".join(
            f"device {d.id} (process {d.process_index}, host {self.hosts[d.process_index]})"
            for d in self.devices[odd]
        )
        if len(odd) == len(group):
            return f"{name} differs between {devices}"
        return f"{name} on {devices} differs from {len(group) - len(odd)} other devices"


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _firsts(array: jax.ShapeDtypeStruct, devices: np.ndarray) -> list[int]:
    """Return, for each device, the position of the first that holds the same slice."""
    slices, seen = array.sharding.devices_indices_map(array.shape), {}
    return [seen.setdefault(str(slices[device]), i) for i, device in enumerate(devices)]


def _compiled(shapes: list[jax.ShapeDtypeStruct], mesh: Mesh) -> Any:
    """arrays -> [*mesh, n] checksums, the same on every device."""

    def local(arrays: list[jax.Array]) -> jax.Array:
        # Replicated arrays are cast to varying: each device computes the sums of its own copy.
        sums = jnp.stack([digest(_varying(a))[0] for a in arrays])
        return sums.reshape(*[1] * len(MESH_AXES), -1)

    specs = [s.sharding.spec for s in shapes]
    of_each = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=P(*MESH_AXES), check_vma=True
    )
    return compile_lowered(jax.jit(of_each, out_shardings=NamedSharding(mesh, P())).lower(shapes))


def _varying(a: jax.Array) -> jax.Array:
    """Type an array as differing along every mesh axis. No data moves."""
    missing = tuple(axis for axis in MESH_AXES if axis not in jax.typeof(a).mat.varying)
    return jax.lax.pcast(a, missing, to="varying") if missing else a
