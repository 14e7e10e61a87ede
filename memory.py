"""Memory of a device: what compiled programs need, and what there is."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

import hardware

# Programs of a run.
STEP, EVALUATION, SAMPLING = "the training step", "an evaluation", "sampling"


def usable_bytes(mesh: Mesh) -> float:
    """Return the memory of a device that JAX may allocate; 0 if it is not known."""
    device = mesh.local_devices[0]
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return limit
    chip = hardware.chip_of_kind(device.device_kind)
    return chip.allocatable_bytes if chip else 0


def bytes_of(shapes: Any) -> int:
    """Return the bytes on one device of arrays, or of their shapes and layouts."""
    shards = ((a.sharding.shard_shape(a.shape), a.dtype) for a in jax.tree.leaves(shapes))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def planned_bytes(program: Any) -> int:
    """Return the memory of one device that the compiler planned for a program.

    It is the sum of arguments, temporaries, and results that do not alias an argument.
    """
    plan = program.memory_analysis()
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + results


def peak_bytes(mesh: Mesh, step: Any) -> tuple[int, str]:
    """Return the peak memory of one device, and the source of the number."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "at its fullest"
    return planned_bytes(step), "planned by the compiler"
