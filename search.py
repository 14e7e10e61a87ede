"""Which mesh, schedule, recomputation and gathering a number of chips is best used with.

Every mesh that the model divides over is tried with every number of virtual stages and microbatches
and both ways to gather; of the things that `train.remat` may keep, the most that fits. Ranked by
the time of a step in which nothing overlaps, then by memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cost
import utils
from chips import Chip
from utils import Config

# Of a chip's memory: predictions are within 10 % of what a compiler plans.
USABLE = 0.9
MESH_FLAGS = ("mesh.fsdp", "mesh.pipeline", "mesh.tensor")
FREE = (*MESH_FLAGS, "mesh.virtual", "train.microbatches", "train.remat", "fsdp.gather")


@dataclass(frozen=True)
class Candidate:
    """One way to use the chips."""

    config: Config
    predicted: cost.Prediction

    @property
    def rank(self) -> tuple[float, int]:
        """Smallest is best."""
        return self.predicted.serial_step_s or 0.0, self.predicted.memory_bytes_per_chip


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    best: list[Candidate]  # of each mesh, best mesh first
    out: dict[tuple[int, int, int], str]  # mesh -> why it is out
    tried: int
    nearest: Candidate | None  # the least memory, where nothing fits


def changed(config: Config, values: dict[str, Any]) -> Config:
    """The config with {"section.key": value} put in.

    Raises  ValueError for what utils.check refuses.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    config = dataclasses.replace(
        config,
        **{
            section: dataclasses.replace(getattr(config, section), **keys)
            for section, keys in sections.items()
        },
    )
    utils.check(config)
    return config


def value_of(config: Config, flag: str) -> Any:
    section, key = flag.split(".")
    return getattr(getattr(config, section), key)


def flags_of(config: Config) -> str:
    """The flags that a search chooses, as a command line takes them."""
    return " ".join(f"--{flag} {value_of(config, flag)}" for flag in FREE)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes(chips: int) -> list[tuple[int, int, int]]:
    """All (fsdp, pipeline, tensor) of so many chips."""
    return [
        (chips // (pipeline * tensor), pipeline, tensor)
        for pipeline in divisors(chips)
        for tensor in divisors(chips // pipeline)
    ]


def usable_bytes(chip: Chip | None) -> float:
    return math.inf if chip is None else USABLE * chip.memory_bytes


def search(
    config: Config,
    chip: Chip | None,
    chips: int,
    fixed: frozenset[str] = frozenset(),
    progress: Callable[[list], Any] = iter,
) -> Found:
    """The best way to use each mesh of so many chips.

    fixed     flags of FREE that keep the config's value.
    progress  wraps the list of meshes that is gone through.
    Raises    ValueError where the model divides over no mesh.
    """
    best, out, tried, least = [], {}, 0, None
    for mesh in progress(meshes(chips)):
        if any(
            f in fixed and value_of(config, f) != n for f, n in zip(MESH_FLAGS, mesh, strict=True)
        ):
            continue
        candidates, reason = [], ""
        for values in ways(config, mesh, fixed):
            try:
                candidate = with_most_kept(config, chip, values, "train.remat" in fixed)
            except ValueError as error:
                reason = reason or str(error)
                continue
            tried += 1
            candidates.append(candidate)
        fit = [c for c in candidates if c.predicted.memory_bytes_per_chip <= usable_bytes(chip)]
        if fit:
            best.append(min(fit, key=lambda c: c.rank))
            continue
        if candidates:
            small = min(candidates, key=lambda c: c.predicted.memory_bytes_per_chip)
            if least is None or (
                small.predicted.memory_bytes_per_chip < least.predicted.memory_bytes_per_chip
            ):
                least = small
            need = small.predicted.memory_bytes_per_chip / 2**30
            reason = f"needs {need:.1f} GiB of {usable_bytes(chip) / 2**30:.1f} GiB at least"
        out[mesh] = reason
    if not best and least is None:
        raise ValueError(no_mesh(config, chips, out))
    best.sort(key=lambda c: c.rank)
    return Found(best, out, tried, None if best else least)


def ways(
    config: Config, mesh: tuple[int, int, int], fixed: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """What to try on a mesh: {flag: value} without train.remat."""
    fsdp, pipeline, _ = mesh
    blocks, sequences = config.model.blocks, config.train.sequences
    virtual = divisors(blocks // pipeline) if pipeline > 1 and blocks % pipeline == 0 else [1]
    microbatches = divisors(sequences // fsdp) if sequences % fsdp == 0 else [1]
    choices = {"mesh.virtual": virtual, "train.microbatches": microbatches}
    choices["fsdp.gather"] = ["step", "layer"] if fsdp > 1 else ["step"]
    for flag in fixed & choices.keys():
        choices[flag] = [value_of(config, flag)]
    for v in choices["mesh.virtual"]:
        for m in choices["train.microbatches"]:
            if v > 1 and m % pipeline:
                continue
            for gather in choices["fsdp.gather"]:
                yield dict(zip(MESH_FLAGS, mesh, strict=True)) | {
                    "mesh.virtual": v,
                    "train.microbatches": m,
                    "fsdp.gather": gather,
                }


def with_most_kept(
    config: Config, chip: Chip | None, values: dict[str, Any], keep_remat: bool
) -> Candidate:
    """The candidate whose backward pass finds the most that fits; the smallest if none does."""
    config = changed(config, values)
    policies = [config.train.remat] if keep_remat else remat_policies(config, chip)
    for policy in policies:
        config = changed(config, {"train.remat": policy})
        step = cost.Step(config)
        if sum(cost.memory(step).values()) <= usable_bytes(chip):
            break
    return Candidate(config, cost.predict(config, chip))


def remat_policies(config: Config, chip: Chip | None) -> list[str]:
    """From all to nothing kept, what saves the least time for its bytes dropped first."""
    step = cost.Step(changed(config, {"train.remat": "full"}))
    worth: dict[str, float] = {}
    for layer, count in step.block:
        for name, size in layer.kept.items():
            saved = cost.seconds_again(step, chip, layer, name)
            worth[name] = worth.get(name, 0.0) + (saved / size if count and size else 0.0)
    order = sorted((name for name in worth if worth[name]), key=lambda name: -worth[name])
    kept = [order[:n] for n in range(len(order), 0, -1)]
    return ["none", *(",".join(n for n in utils.REMAT_NAMES if n in some) for some in kept), "full"]


def no_mesh(config: Config, chips: int, out: dict[tuple[int, int, int], str]) -> str:
    """What to say where the model divides over no mesh of so many chips."""
    near = [n for n in sorted(range(1, 2 * chips + 65), key=lambda n: abs(n - chips)) if n != chips]
    works = [n for n in near if divides(config, n)][:2]
    reason = f" For one, (fsdp, pipeline, tensor) = {next(iter(out))}: {next(iter(out.values()))}"
    return (
        f"--chips {chips}: the model divides over no mesh of so many. Use --chips "
        f"{' or '.join(map(str, sorted(works)))}.{reason if out else ''}"
    )


def divides(config: Config, chips: int) -> bool:
    """Whether the model can be cut over any mesh of so many chips."""
    for mesh in meshes(chips):
        for values in ways(config, mesh, frozenset()):
            try:
                cost.Step(changed(config, values))
            except ValueError:
                continue
            return True
    return False


def savings(config: Config, chip: Chip | None) -> list[tuple[str, int]]:
    """Flags that make the config smaller, with the bytes per chip that each saves; most first."""
    m, t = config.model, config.train
    now = cost.predict(config, chip).memory_bytes_per_chip
    tries: dict[str, Any] = {
        "train.remat": "full",
        "fsdp.gather": "layer",
        "train.microbatches": 2 * t.microbatches,
        "train.sequences": t.sequences // 2,
        "train.sequence_length": t.sequence_length // 2,
        "train.loss_chunk_tokens": max(1, t.loss_chunk_tokens // 2),
        "mesh.fsdp": 2 * config.mesh.fsdp,
        "mesh.tensor": 2 * config.mesh.tensor,
        "mesh.pipeline": 2 * config.mesh.pipeline,
        "model.blocks": m.blocks // 2,
    }
    found = []
    for flag, value in tries.items():
        try:
            then = cost.predict(changed(config, {flag: value}), chip).memory_bytes_per_chip
        except ValueError:
            continue
        if then < now:
            found.append((f"--{flag} {value}", now - then))
    return sorted(found, key=lambda pair: -pair[1])
