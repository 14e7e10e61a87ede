"""Memory of a device: what programs need, what there is, and what to change if it is short.

Programs are compiled before the first step, so a run that does not fit ends before it begins. What
the runtime allocates besides can still be too much later. Both end in the same line.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

import hardware
from runtime.errors import is_out_of_memory, one_line
from utils import GIB, Config, ConfigError

# Programs of a run.
STEP, EVALUATION, SAMPLING = "the training step", "an evaluation", "sampling"


class OutOfMemory(ConfigError):
    """A program needs more memory than a device has."""


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


def check(config: Config, mesh: Mesh, needed: Mapping[str, float]) -> None:
    """Raise OutOfMemory if a device has not what a program needs.

    needed  program -> bytes, with those of the training state
    """
    name, most = max(needed.items(), key=lambda item: item[1])
    if 0 < usable_bytes(mesh) < most:
        raise OutOfMemory(explain(config, mesh, name, most))


@contextlib.contextmanager
def explained(config: Config, mesh: Mesh) -> Iterator[None]:
    """Raise OutOfMemory for the error of a compiler or a device that lacks memory."""
    try:
        yield
    except Exception as error:  # of several types
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explain(config, mesh, cause=one_line(error))) from error


def explain(
    config: Config, mesh: Mesh, name: str = STEP, needed: float = 0, cause: str = ""
) -> str:
    """Return what was needed, what the device has, and settings that would fit.

    needed  bytes; 0 if no program is known to need too much
    cause   message of a compiler or a device
    """
    usable, kind = usable_bytes(mesh), mesh.local_devices[0].device_kind
    has = f"JAX may allocate {usable / GIB:.3g} of a {kind}" if usable else f"a {kind} has less"
    need = f"{name} needs {needed / GIB:.3g} GiB per device, and {has}"
    text = f"out of memory: {need if needed else cause or need}. "
    try:
        from planning import advice  # late: it traces the model

        return text + advice.settings(config, mesh, name, needed, usable)
    except Exception as error:  # training does not depend on the planner
        return f"{text}Use more --train.microbatches or --train.remat full (no plan: {error})."
