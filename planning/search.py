"""Which mesh, schedule, recomputation and gathering a number of chips is best used with.

Every mesh that the model divides over is tried with every number of virtual stages and
microbatches, both ways to gather, both layouts of experts, and keeping from all to nothing of what
`train.remat` may keep. What fits is ranked by the time of a step in which nothing overlaps, then by
memory.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import model
import passes
import utils
from chips import Chip, platform_of
from planning import cost
from utils import GIB, Config

# Of a chip's memory: predictions are within 10 % of what a compiler plans, and a runtime keeps some
# for itself.
USABLE = 0.85
MESH_FLAGS = ("mesh.fsdp", "mesh.pipeline", "mesh.tensor")
FREE = (
    *MESH_FLAGS,
    "mesh.virtual",
    "train.microbatches",
    "train.remat",
    "fsdp.gather",
    "model.experts_layout",
)
MOST_CHIPS = 2**17

MeshShape = tuple[int, int, int]


@dataclass(frozen=True)
class Candidate:
    """One way to use the chips."""

    config: Config
    predicted: cost.Prediction

    @property
    def memory(self) -> int:
        return self.predicted.memory_bytes_per_chip

    @property
    def order(self) -> tuple[float, int]:
        """Smallest is best; FLOPs for a time where the chip is not known."""
        p = self.predicted
        return p.serial_step_s or p.flops_per_chip, self.memory


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    best: list[Candidate]  # of each mesh, best mesh first
    out: dict[MeshShape, str]  # mesh -> why it is out
    tried: int
    smallest: Candidate | None  # where nothing fits


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


def meshes(chips: int, replica: int = 1) -> list[MeshShape]:
    """All (fsdp, pipeline, tensor) of each of so many replicas, which have so many chips in all."""
    if chips % replica:
        return []
    each = chips // replica
    return [
        (each // (pipeline * tensor), pipeline, tensor)
        for pipeline in cost.divisors(each)
        for tensor in cost.divisors(each // pipeline)
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
    best, small, out, tried = [], [], {}, 0
    for mesh in progress(allowed(config, chips, fixed)):
        candidates, reason = candidates_on(config, chip, mesh, fixed)
        tried += len(candidates)
        fit = [c for c in candidates if c.memory <= usable_bytes(chip)]
        if fit:
            best.append(min(fit, key=lambda c: c.order))
        elif candidates:
            small.append(min(candidates, key=lambda c: c.memory))
            need, most = small[-1].memory / GIB, usable_bytes(chip) / GIB
            out[mesh] = f"needs {need:.1f} GiB of {most:.1f} GiB at least"
        else:
            out[mesh] = reason
    if not best and not small:
        raise ValueError(no_mesh(config, chips, fixed, out))
    best.sort(key=lambda c: c.order)
    smallest = None if best else min(small, key=lambda c: c.memory)
    if smallest:
        smallest = Candidate(smallest.config, cost.predict(smallest.config, chip))
    return Found(best, out, tried, smallest)


def allowed(config: Config, chips: int, fixed: frozenset[str]) -> list[MeshShape]:
    """Meshes of so many chips that keep the fixed sizes.

    Raises  ValueError where there are none.
    """
    if chips > MOST_CHIPS:
        raise ValueError(f"--chips {chips} is more than {MOST_CHIPS}. Use as many as there are.")
    sizes = {flag: value_of(config, flag) for flag in MESH_FLAGS if flag in fixed}
    found = [
        mesh
        for mesh in meshes(chips, config.mesh.replica)
        if all(mesh[MESH_FLAGS.index(flag)] == size for flag, size in sizes.items())
    ]
    if not found:
        if config.mesh.replica > 1:
            sizes["mesh.replica"] = config.mesh.replica
        given, needed = " ".join(f"--{f} {n}" for f, n in sizes.items()), math.prod(sizes.values())
        raise ValueError(
            f"--chips {chips} cannot be had with {given}. Use a multiple of {needed}, or leave "
            "the mesh flags out to have a mesh found."
        )
    return found


def candidates_on(
    config: Config, chip: Chip | None, mesh: MeshShape, fixed: frozenset[str]
) -> tuple[list[Candidate], str]:
    """All ways to use a mesh, and why the first one that cannot be had cannot."""
    candidates, reason = [], ""
    for values in ways(config, mesh, fixed):
        try:
            candidates.append(quickest(config, chip, values, fixed))
        except ValueError as error:
            reason = reason or str(error)
    return candidates, reason


def ways(config: Config, mesh: MeshShape, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    """What to try on a mesh: {flag: value} without train.remat."""
    fsdp, pipeline, _ = mesh
    blocks, sequences = config.model.blocks, config.train.sequences // config.mesh.replica
    virtual = cost.divisors(blocks // pipeline) if pipeline > 1 and blocks % pipeline == 0 else [1]
    microbatches = cost.divisors(sequences // fsdp) if sequences % fsdp == 0 else [1]
    choices = {"mesh.virtual": virtual, "train.microbatches": microbatches}
    choices["fsdp.gather"] = ["step", "layer"] if fsdp > 1 else ["step"]
    choices["model.experts_layout"] = [config.model.experts_layout]
    if config.model.moe_layers and math.prod(mesh) > pipeline:  # else they are the same
        choices["model.experts_layout"] = ["spread", "gathered"]
    for flag in fixed & choices.keys():
        choices[flag] = [value_of(config, flag)]
    for values in itertools.product(*choices.values()):
        way = dict(zip(MESH_FLAGS, mesh, strict=True)) | dict(zip(choices, values, strict=True))
        if way["mesh.virtual"] == 1 or way["train.microbatches"] % pipeline == 0:
            yield way


def quickest(
    config: Config, chip: Chip | None, values: dict[str, Any], fixed: frozenset[str]
) -> Candidate:
    """With what is best kept for the backward pass, of what fits; the smallest if nothing does."""
    config, found = changed(config, values), []
    keep = "train.remat" in fixed
    for policy in [config.train.remat] if keep else remat_policies(config, chip):
        with_policy = changed(config, {"train.remat": policy})
        found.append(Candidate(with_policy, cost.predict(with_policy, chip, shared=True)))
    fit = [candidate for candidate in found if candidate.memory <= usable_bytes(chip)]
    if fit:
        return min(fit, key=lambda candidate: candidate.order)
    return min(found, key=lambda candidate: candidate.memory)


def remat_policies(config: Config, chip: Chip | None) -> list[str]:
    """From all to nothing kept, what saves the least time for its bytes dropped first."""
    free = {"mesh.virtual": 1, "train.remat": "full", "fsdp.gather": "step"}
    return _remat_policies(changed(config, free), chip)


@cache
def _remat_policies(config: Config, chip: Chip | None) -> list[str]:
    step = cost.Step(config, platform_of(chip), shared=True)
    saved, held = Counter(), Counter()
    for layer, count in step.block:
        for name in utils.REMAT_NAMES:
            saved[name] += count * cost.seconds_again(step, chip, layer, name)
            held[name] += count * (step.kept(layer, name) - step.kept(layer, "full"))
    names = [name for name in held if held[name]]
    names.sort(key=lambda name: -saved[name] / held[name])
    kept = [names[:n] for n in range(len(names), 0, -1)]
    return ["none", *(",".join(n for n in utils.REMAT_NAMES if n in some) for some in kept), "full"]


def no_mesh(config: Config, chips: int, fixed: frozenset[str], out: dict[MeshShape, str]) -> str:
    """What to say where the model divides over no mesh of so many chips."""
    mesh, reason = next(iter(out.items()))
    said = f"For one, (fsdp, pipeline, tensor) = {mesh}: {reason}"
    given = " ".join(f"--{flag} {value_of(config, flag)}" for flag in sorted(fixed))
    if given and divides(config, chips, frozenset()):
        return f"with {given} the model divides over no mesh of {chips} chips. Leave it out. {said}"
    near = (n for d in range(1, chips + 64) for n in (chips - d, chips + d) if n > 0)
    works = sorted(itertools.islice((n for n in near if divides(config, n, fixed)), 2))
    return (
        f"--chips {chips}: the model divides over no mesh of so many. Use --chips "
        f"{' or '.join(map(str, works))}. {said}"
    )


def divides(config: Config, chips: int, fixed: frozenset[str]) -> bool:
    """Whether the model can be cut over any mesh of so many chips."""
    m, t = config.model, config.train
    for mesh in meshes(chips, config.mesh.replica):
        fsdp, pipeline, tensor = mesh
        parts = ((t.sequences, fsdp * config.mesh.replica), (m.blocks, pipeline), (m.heads, tensor))
        if any(size % ranks for size, ranks in parts):  # most are seen to be out at once
            continue
        for values in ways(config, mesh, fixed):
            try:
                model.declare(changed(config, values))
                passes.schedule_of(config)
            except ValueError:
                continue
            return True
    return False


def savings(config: Config, chip: Chip | None, same_chips: bool) -> list[tuple[str, int]]:
    """Flags that make the config smaller, with the bytes per chip that each saves; most first.

    same_chips  leave out those that take twice the chips.
    """
    m, t = config.model, config.train
    now = cost.predict(config, chip).memory_bytes_per_chip
    tries: dict[str, Any] = {
        "train.remat": "full",
        "fsdp.gather": "layer",
        "train.microbatches": 2 * t.microbatches,
        "train.sequences": t.sequences // 2,
        "train.sequence_length": t.sequence_length // 2,
        "train.loss_chunk_tokens": max(1, t.loss_chunk_tokens // 2),
        "model.blocks": m.blocks // 2,
    }
    if not same_chips:
        tries |= {flag: 2 * value_of(config, flag) for flag in MESH_FLAGS}
    found = []
    for flag, value in tries.items():
        try:
            then = cost.predict(changed(config, {flag: value}), chip).memory_bytes_per_chip
        except ValueError:
            continue
        if then < now:
            twice = " on twice the chips" if flag in MESH_FLAGS else ""
            found.append((f"--{flag} {value}{twice}", now - then))
    return sorted(found, key=lambda pair: -pair[1])
