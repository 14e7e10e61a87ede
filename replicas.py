"""Whether devices that should hold the same hold the same: every bit of it, by checksums.

A device that computes or keeps a value wrongly once makes no number that is not finite, and what it
holds differs from the other copies from then on, while the loss goes on as if nothing were.

Letters: n arrays that several devices hold a slice of.
"""

import socket
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multihost
import train
from digests import WORDS, mix
from utils import MESH_AXES
from weights import vary

MOST_NAMED = 5  # arrays in one message


def checksum(a: jax.Array) -> jax.Array:
    """sum_i mix(bits_i ^ mix(i)) mod 2^32, a uint32, over the elements of this device's slice.

    One element that differs always gives another sum, since mix is a bijection; several give the
    same one in 2^32 cases.
    """
    bits = lax.bitcast_convert_type(a, WORDS[a.dtype.itemsize]).astype(jnp.uint32)
    number = jnp.zeros(a.shape, jnp.uint32)
    for dim, size in enumerate(a.shape):
        number = number * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, a.shape, dim)
    return mix(bits ^ mix(number)).sum(dtype=jnp.uint32)


class Replicas:
    """state -> which devices hold another value than others that should hold the same, in words;
    None where all agree.

    Reads  on each device, once, its slices of arrays that lie on several devices; a slice that only
           one device holds has nothing to be compared with, and is not read.
    Sends  4 bytes per such array and device, to all, so that every process sees every sum.
    Compiled once, when it is made; the processes make and call it together.
    """

    def __init__(self, shapes: Any, mesh: Mesh):
        """shapes  the state as jax.ShapeDtypeStruct with layouts on this mesh."""
        self.mesh, self.devices = mesh, mesh.devices.flatten()
        self.hosts = [name.decode() for name in multihost.gather(socket.gethostname().encode())]
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        firsts = [firsts_of(leaf.sharding, leaf.shape, self.devices) for _, leaf in leaves]
        several = [len(set(first)) < len(first) for first in firsts]
        self.which = np.flatnonzero(several).tolist()
        self.names = [
            jax.tree_util.keystr(leaves[i][0], simple=True, separator=".") for i in self.which
        ]
        if self.which:
            # [devices, n]: the first device that should hold the same of this array
            self.first = np.array([firsts[i] for i in self.which]).T
            self.sums = self.compiled([leaves[i][1] for i in self.which])

    def compiled(self, shapes: list[jax.ShapeDtypeStruct]) -> Any:
        """arrays -> [replica, fsdp, pipeline, tensor, n] checksums, the same on every device."""

        def local(arrays: list[jax.Array]) -> jax.Array:
            # Typed as the same along some axes, and whether they are is the question: from here on
            # each device has its own.
            sums = jnp.stack([checksum(vary(a)) for a in arrays])
            return sums.reshape(*[1] * len(MESH_AXES), -1)

        specs = [s.sharding.spec for s in shapes]
        of_each = jax.shard_map(
            local, mesh=self.mesh, in_specs=(specs,), out_specs=P(*MESH_AXES), check_vma=True
        )
        whole = NamedSharding(self.mesh, P())
        return train.compiled(jax.jit(of_each, out_shardings=whole), shapes)

    def __call__(self, state: Any) -> str | None:
        if not self.which:
            return None
        leaves = jax.tree.leaves(state)
        sums = jax.device_get(self.sums([leaves[i] for i in self.which]))
        sums = sums.reshape(len(self.devices), -1)
        wrong = np.flatnonzero((sums != np.take_along_axis(sums, self.first, 0)).any(0))
        if not len(wrong):
            return None
        told = [self.difference(array, sums[:, array]) for array in wrong[:MOST_NAMED]]
        more = f"; so do {len(wrong) - MOST_NAMED} more arrays" * (len(wrong) > MOST_NAMED)
        return "; ".join(told) + more

    def difference(self, array: int, sums: np.ndarray) -> str:
        """One array whose copies differ, in words; of several of its slices the first."""
        first = self.first[:, array]
        groups = [np.flatnonzero(first == one).tolist() for one in np.unique(first)]
        group = next(group for group in groups if len(set(sums[group])) > 1)
        odd = odd_ones(group, sums)
        named = ", ".join(self.place(self.devices[i]) for i in odd)
        if len(odd) == len(group):
            return f"{self.names[array]} differs between {named}"
        return f"{self.names[array]} on {named} differs from {len(group) - len(odd)} other devices"

    def place(self, device: Any) -> str:
        process = device.process_index
        return f"device {device.id} (process {process}, host {self.hosts[process]})"


def firsts_of(sharding: NamedSharding, shape: tuple[int, ...], devices: np.ndarray) -> list[int]:
    """For each device the first, as a position in `devices`, that holds the same slice."""
    slices = sharding.devices_indices_map(shape)
    seen: dict[str, int] = {}
    return [seen.setdefault(str(slices[device]), i) for i, device in enumerate(devices)]


def odd_ones(group: list[int], sums: np.ndarray) -> list[int]:
    """The devices of a group that differ from most of it; all, where no more than half agree."""
    common, count = Counter(sums[group].tolist()).most_common(1)[0]
    return [i for i in group if sums[i] != common] if 2 * count > len(group) else group
