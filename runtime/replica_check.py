"""Compare, by checksums, the copies of an array that several devices hold.

A device that once computes or stores a wrong value need not produce a number that is not finite.
From then on its copies differ from those of other devices, while the loss looks normal.

Letters: n arrays of which several devices hold the same slice.
"""

import socket
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import distributed
from runtime.array_digests import digest
from runtime.errors import compile_program
from utils import MESH_AXES

MAX_NAMED = 5  # arrays in one message


class ReplicaChecker:
    """state -> a description of the devices whose copies differ; None if all agree.

    Each device reads its slices of the n arrays once. All processes call the constructor, which
    compiles the program, and each call.

    Collectives  all_gather of 4 bytes per array and device
    """

    def __init__(self, shapes: Any, mesh: Mesh):
        """shapes  the state as jax.ShapeDtypeStruct with shardings on this mesh"""
        self.mesh, self.devices = mesh, mesh.devices.flatten()
        self.hosts = [name.decode() for name in distributed.gather(socket.gethostname().encode())]
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        firsts = [firsts_of(leaf.sharding, leaf.shape, self.devices) for _, leaf in leaves]
        several = [len(set(first)) < len(first) for first in firsts]
        self.which = np.flatnonzero(several).tolist()
        self.names = [
            jax.tree_util.keystr(leaves[i][0], simple=True, separator=".") for i in self.which
        ]
        if self.which:
            # [devices, n]: the first device with the same slice of this array
            self.first = np.array([firsts[i] for i in self.which]).T
            self.sums = self.compiled([leaves[i][1] for i in self.which])

    def compiled(self, shapes: list[jax.ShapeDtypeStruct]) -> Any:
        """arrays -> [replica, fsdp, pipeline, tensor, n] checksums, the same on every device."""

        def local(arrays: list[jax.Array]) -> jax.Array:
            # Replicated arrays are cast to varying: each device computes the sums of its own copy.
            sums = jnp.stack([digest(_varying(a))[0] for a in arrays])
            return sums.reshape(*[1] * len(MESH_AXES), -1)

        specs = [s.sharding.spec for s in shapes]
        of_each = jax.shard_map(
            local, mesh=self.mesh, in_specs=(specs,), out_specs=P(*MESH_AXES), check_vma=True
        )
        replicated = NamedSharding(self.mesh, P())
        return compile_program(jax.jit(of_each, out_shardings=replicated), shapes)

    def __call__(self, state: Any) -> str | None:
        if not self.which:
            return None
        leaves = jax.tree.leaves(state)
        sums = jax.device_get(self.sums([leaves[i] for i in self.which]))
        sums = sums.reshape(len(self.devices), -1)
        wrong = np.flatnonzero((sums != np.take_along_axis(sums, self.first, 0)).any(0))
        if not len(wrong):
            return None
        texts = [self.difference(array, sums[:, array]) for array in wrong[:MAX_NAMED]]
        more = f"; so do {len(wrong) - MAX_NAMED} more arrays" * (len(wrong) > MAX_NAMED)
        return "; ".join(texts) + more

    def difference(self, array: int, sums: np.ndarray) -> str:
        """Describe one array whose copies differ, by the first such slice."""
        first = self.first[:, array]
        groups = [np.flatnonzero(first == one).tolist() for one in np.unique(first)]
        group = next(group for group in groups if len(set(sums[group])) > 1)
        odd = odd_ones(group, sums)
        named = ", ".join(self.named(self.devices[i]) for i in odd)
        if len(odd) == len(group):
            return f"{self.names[array]} differs between {named}"
        return f"{self.names[array]} on {named} differs from {len(group) - len(odd)} other devices"

    def named(self, device: Any) -> str:
        process = device.process_index
        return f"device {device.id} (process {process}, host {self.hosts[process]})"


def firsts_of(sharding: NamedSharding, shape: tuple[int, ...], devices: np.ndarray) -> list[int]:
    """Return, for each device, the position of the first that holds the same slice."""
    slices = sharding.devices_indices_map(shape)
    seen: dict[str, int] = {}
    return [seen.setdefault(str(slices[device]), i) for i, device in enumerate(devices)]


def odd_ones(group: list[int], sums: np.ndarray) -> list[int]:
    """Return the devices that differ from the majority of a group; all if there is none."""
    common, count = Counter(sums[group].tolist()).most_common(1)[0]
    return [i for i in group if sums[i] != common] if 2 * count > len(group) else group


def _varying(a: jax.Array) -> jax.Array:
    """Type an array as differing along every mesh axis. No data moves."""
    missing = tuple(axis for axis in MESH_AXES if axis not in jax.typeof(a).mat.varying)
    return jax.lax.pcast(a, missing, to="varying") if missing else a
