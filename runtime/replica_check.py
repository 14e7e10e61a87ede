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
        groups = [np.flatnonzero(first == one).tolist() for one in np.unique(first)]
        group = next(group for group in groups if len(set(sums[group])) > 1)
        odd = odd_ones(group, sums)
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
    """arrays -> [replica, fsdp, pipeline, tensor, n] checksums, the same on every device."""

    def local(arrays: list[jax.Array]) -> jax.Array:
        # Replicated arrays are cast to varying: each device computes the sums of its own copy.
        sums = jnp.stack([digest(_varying(a))[0] for a in arrays])
        return sums.reshape(*[1] * len(MESH_AXES), -1)

    specs = [s.sharding.spec for s in shapes]
    of_each = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=P(*MESH_AXES), check_vma=True
    )
    return compile_program(jax.jit(of_each, out_shardings=NamedSharding(mesh, P())), shapes)


def odd_ones(group: list[int], sums: np.ndarray) -> list[int]:
    """Return the devices that differ from the majority of a group; all if there is none."""
    common, count = Counter(sums[group].tolist()).most_common(1)[0]
    return [i for i in group if sums[i] != common] if 2 * count > len(group) else group


def _varying(a: jax.Array) -> jax.Array:
    """Type an array as differing along every mesh axis. No data moves."""
    missing = tuple(axis for axis in MESH_AXES if axis not in jax.typeof(a).mat.varying)
    return jax.lax.pcast(a, missing, to="varying") if missing else a
