"""The settings that serve the devices and not the result, chosen for the devices that are there.

These are utils.AUTO: the mesh, microbatches, rematerialization, and when weights are gathered. Each
is chosen unless it is set. With figures of the device, the planner takes what fits and is fastest.
Simulated devices get a mesh that has every axis. Equal devices always get the same settings, in
every process of a job and in every start of a run.

Where what was set or chosen does not fit in memory, the error names settings that would. Programs
are compiled before the first step, so most runs that do not fit end before they begin.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

import hardware
import memory
import model
import sharded_model
import utils
from hardware import Chip
from runtime import cli
from runtime.errors import is_out_of_memory, one_line
from train import slice_of
from utils import GIB, Config, ConfigError, TooLarge, changed, get

MESH = tuple(f"mesh.{axis}" for axis in utils.MESH_AXES)
USUAL = utils.Train().microbatches
MAX_DEVICES = 4096  # devices that are considered to say how many would do


def for_devices(config: Config, devices: Sequence[jax.Device]) -> tuple[Config, str]:
    """Complete the config for the devices: compute dtype, and what utils.AUTO leaves open.

    The mesh has as many devices as the model and the batch allow.

    Returns  (config, one line about the choice and idle devices; empty if nothing was open).
    Raises   ConfigError if nothing fits the settings that are set.
    """
    config = utils.for_platform(config, hardware.platform_of_device(devices[0]))
    sharded_model.check_split(config)
    left_open = utils.left_open(config)
    if not left_open:
        return config, idle_text(config, len(devices))
    slices = len({slice_of(device) for device in devices})
    if "mesh.replica" in left_open:
        config = changed(config, {"mesh.replica": slices})
    problems = []
    for count in counts(config, len(devices), slices):
        try:
            config, why = choose(config, devices[0], count)
        except TooLarge:
            raise
        except ConfigError as error:
            problems.append(str(error))
            continue
        text = f"{describe(config, left_open)}: {why}"
        idle = idle_text(config, len(devices))
        return config, f"{text}; {idle}" if idle else text
    processes = f" of {jax.process_count()} processes" * (jax.process_count() > 1)
    raise ConfigError(
        f"no settings fit {len(devices)} x {devices[0].device_kind}{processes}. "
        f"{problems[0] if problems else set_mesh_problem(config, len(devices))}"
    )


def for_chip(config: Config, chip: Chip | None, count: int) -> Config:
    """Return the config with what is left open chosen for this many chips of one slice.

    chip  None for simulated devices
    Raises  ConfigError if nothing fits the settings that are set
    """
    config = changed(config, {"mesh.replica": config.mesh.replica or 1})
    if chip is None:
        return by_rule(config, count, simulated=True)
    return by_plan(config, chip, count)[0]


def counts(config: Config, devices: int, slices: int) -> list[int]:
    """Return the numbers of devices to try, the largest first.

    The mesh must include devices of every process, so several processes use all.
    """
    set_ranks = math.prod(get(config, name) or 1 for name in MESH)
    whole = all(get(config, name) for name in MESH)
    least = devices if jax.process_count() > 1 else 1
    step = math.lcm(set_ranks, slices)
    return [n for n in range(devices, least - 1, -1) if n % step == 0 and (n == step or not whole)]


def set_mesh_problem(config: Config, devices: int) -> str:
    ranks = " ".join(f"--{name} {get(config, name)}" for name in MESH if get(config, name) > 1)
    return f"{devices} devices cannot be divided by {ranks}. Use fewer ranks, or set none of them."


def idle_text(config: Config, devices: int) -> str:
    used = math.prod(config.mesh.shape)
    return (
        f"warning: the mesh has {used} of {devices} devices; the others stay idle. Use other "
        "numbers of layers, heads or sequences, or a larger mesh."
    ) * (used < devices)


def describe(config: Config, names: frozenset[str]) -> str:
    """Describe the settings that were chosen, by their flags."""
    shown = [name for name in utils.AUTO if name in names]
    ones = {"mesh.replica", "mesh.context", "mesh.virtual"}  # are shown if they are not 1
    shown = [name for name in shown if name not in ones or get(config, name) > 1]
    return "chosen: " + " ".join(f"--{name} {get(config, name)}" for name in shown)


def choose(config: Config, device: jax.Device, count: int) -> tuple[Config, str]:
    """Return the config on this number of devices, and why it is chosen."""
    chip = hardware.chip_of_kind(device.device_kind)
    if device.platform == "cpu":
        made = by_rule(config, count, simulated=True)
        return made, "as many axes as possible have ranks"
    if chip is None:
        why = f"no figures of {device.device_kind} are known, so this takes least memory"
        return by_rule(config, count), why
    try:
        return by_plan(config, chip, count)
    except ConfigError:
        raise
    except Exception as error:  # training does not depend on the planner
        problem = f"{type(error).__name__}: {error}"
        why = f"the planner failed ({problem}), so this takes least memory"
        return by_rule(config, count), why


def by_plan(config: Config, chip: Chip, count: int) -> tuple[Config, str]:
    """Return the fastest config that fits by the plan, and its memory and time."""
    from planning import search  # late: it traces the model

    try:
        best, tried = search.fastest(config, chip, count)
    except TooLarge as error:
        need = smallest_number(config, chip, count)
        text = f"By the plan it fits {need} of them." if need else "More of them do not help."
        raise TooLarge(f"{count} x {chip.name} are too few. {text} {error}") from None
    p = best.predicted
    return best.config, (
        f"the fastest of {tried} that were planned, with {p.memory_bytes_per_chip / GIB:.3g} "
        f"of {chip.memory_bytes / GIB:.0f} GiB and {p.step_s:.3g} s per step"
    )


def smallest_number(config: Config, chip: Chip, count: int) -> int | None:
    """Return how many times `count` doubles until what takes least memory fits; None: never."""
    from planning import cost

    while (count := 2 * count) <= MAX_DEVICES:
        try:
            least = by_rule(config, count)
        except ConfigError:
            continue
        if "fsdp.gather" in utils.left_open(config):
            least = changed(least, {"fsdp.gather": "layer"})
        if cost.predict(least, chip).fits:
            return count
    return None


def by_rule(config: Config, count: int, simulated: bool = False) -> Config:
    """Return a config without a plan.

    simulated  devices of a CPU: the mesh whose largest axis is smallest, to exercise every axis,
               and the usual microbatches. Else most ranks along fsdp, then along tensor, as these
               communicate least, and what takes least memory.
    """
    problem = ""
    for values in choices(config, count, simulated):
        one = changed(config, {name: values[name] for name in utils.left_open(config)})
        if not (found := why_not(one)):
            return one
        problem = problem or found
    raise ConfigError(problem or set_mesh_problem(config, count))


def choices(config: Config, count: int, simulated: bool) -> Iterator[dict[str, Any]]:
    """Yield values of utils.AUTO for this many devices that agree with what is set, best first."""
    replica, set_count = config.mesh.replica, config.train.microbatches
    remat = "none" if simulated or config.pipeline.split_backward else "full"
    shapes = hardware.meshes(config, count, config.mesh.shape[1:])
    shapes.sort(key=lambda shape: (max(shape) if simulated else 0, -shape[0], -shape[-1]))
    for shape in shapes:
        sequences = config.train.global_batch_size // (replica * shape[0])
        counts = [set_count] if set_count else hardware.divisors(sequences)
        counts = sorted(counts, key=lambda n: abs(n - USUAL) if simulated else -n)
        for virtual, microbatches in itertools.product((2, 1) if shape[1] > 1 else (1,), counts):
            if config.mesh.virtual in (0, virtual):
                values = replica, *shape, virtual, microbatches, remat, "step"
                yield dict(zip(utils.AUTO, values, strict=True))


def why_not(config: Config) -> str | None:
    """Return why the config does not fit its mesh, or None if it does."""
    try:
        cli.check(config)
        model.declare(config)
        sharded_model.schedule_of(config)
        sharded_model.check_split(config)
    except ConfigError as error:
        return str(error)
    return None


# --- memory ---------------------------------------------------------------------------------------


class OutOfMemory(ConfigError):
    """A program needs more memory than a device has."""


def check_memory(config: Config, mesh: Mesh, needed: Mapping[str, float]) -> None:
    """Raise OutOfMemory if a program needs more than JAX may allocate.

    needed  program -> bytes, with those of the training state
    """
    name, most = max(needed.items(), key=lambda item: item[1])
    if 0 < memory.usable_bytes(mesh) < most:
        raise OutOfMemory(explain(config, mesh, name, most))


@contextlib.contextmanager
def explained(config: Config, mesh: Mesh) -> Iterator[None]:
    """Raise OutOfMemory for the error of a compiler or a device that lacks memory."""
    try:
        yield
    except Exception as error:  # of several types
        if not is_out_of_memory(error):
            raise
        name, cause = getattr(error, "program", memory.STEP), one_line(error).rstrip(".")
        raise OutOfMemory(explain(config, mesh, name, cause=cause)) from error


def explain(
    config: Config, mesh: Mesh, name: str = memory.STEP, needed: float = 0, cause: str = ""
) -> str:
    """Return what was needed, what the device has, and settings that would fit.

    needed  bytes; 0 if no program is known to need too much
    cause   message of a compiler or a device
    """
    usable, kind = memory.usable_bytes(mesh), mesh.local_devices[0].device_kind
    has = f"JAX may allocate {usable / GIB:.3g} GiB on {kind}"
    need = f"{name} needs {needed / GIB:.3g} GiB per device, and {has}"
    text = f"out of memory: {need if needed else f'{name}: {cause}'}. "
    try:
        from planning import advice  # late: it traces the model

        return text + advice.settings(config, mesh, name, needed, usable)
    except Exception as error:  # training does not depend on the planner
        return f"{text}Use more --train.microbatches or --train.remat full (no plan: {error})."
