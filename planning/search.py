"""Search for the best mesh, schedule, rematerialization and weight gathering on a number of chips.

Every mesh that the model can be sharded over is tried, with every number of virtual stages and
microbatches, both ways to gather weights, both layouts of experts, and remat policies that save
from everything to nothing. Pipelines are tried with a split backward pass, too. Candidates that fit
are ranked by the time of a step without overlap, then by memory.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from rich.console import Console
from rich.progress import track

import utils
from hardware import Chip, divisors, meshes, platform_of
from planning import cost
from planning.results import (
    MESH_FLAGS,
    SEARCHED_FLAGS,
    Candidate,
    MeshShape,
    SearchResult,
    gib,
    usable_bytes,
)
from runtime import cli
from utils import Config, ConfigError, TooLarge, get

# Settings on which `remat_policies` does not depend, with a value.
SAME_POLICIES = {"mesh.virtual": 1, "train.remat": "full", "fsdp.gather": "step"}
SAME_POLICIES |= {"pipeline.split_backward": False}


def changed(config: Config, values: dict[str, Any]) -> Config:
    """Return the config with other settings, checked as a run does."""
    config = utils.changed(config, values)
    cli.check(config)
    return config


def search(
    config: Config,
    chip: Chip | None,
    chips: int,
    fixed: frozenset[str] = frozenset(),
    quick: bool = False,
) -> SearchResult:
    """Find the best candidate of each mesh of `chips` chips.

    fixed   flags of SEARCHED_FLAGS that keep the config's value.
    quick   without a progress bar, by rough predictions, and without meshes that are likely slower
            (`is_slower`).
    Raises  ConfigError if the model cannot be sharded over any mesh, or fits on none.
    """
    sizes = tuple(get(config, flag) if flag in fixed else 0 for flag in MESH_FLAGS)
    shapes = meshes(config, chips, sizes)
    replica = ["mesh.replica"] * (config.mesh.replica > 1)
    given = " ".join(f"--{flag} {get(config, flag)}" for flag in (*replica, *sorted(fixed)))
    if not shapes:
        raise ConfigError(
            f"--chips {chips} does not match {given}. Use a number of chips that these ranks "
            "divide, or omit the mesh flags to search for a mesh."
        )
    best, least, rejected, tried = [], {}, {}, 0
    shapes.sort(key=lambda mesh: (-mesh[0], mesh[2], mesh[1] > 1 < mesh[3], -mesh[1]))
    console = Console(stderr=True, quiet=quick)
    for mesh in track(shapes, "meshes", console=console, transient=True):
        if quick and is_slower(best, mesh):
            continue
        candidates, reason = candidates_on(config, chip, mesh, fixed, quick)
        tried += len(candidates)
        if not candidates:
            rejected[mesh] = reason
        elif (chosen := best_of(candidates)).predicted.fits:
            best.append(chosen)
        else:
            least[mesh] = chosen.predicted.most_bytes
            rejected[mesh] = f"needs {gib(least[mesh])} of {gib(usable_bytes(chip))} at least"
    if not best:
        mesh = min(least, key=least.get) if least else next(iter(rejected))
        closest = utils.Mesh(**dict(zip(utils.MESH_AXES[1:], mesh, strict=True)))
        raise (TooLarge if least else ConfigError)(
            f"--chips {chips}{f' {given}' * bool(given)}: the model fits on no mesh. Use another "
            "number of chips, omit flags, or use a smaller --train.global_batch_size. The closest "
            f"is {closest}: {rejected[mesh]}"
        )
    return SearchResult(sorted(best, key=lambda one: one.order), rejected, tried)


def is_slower(found: list[Candidate], mesh: MeshShape) -> bool:
    """Return whether an axis of a mesh has as many ranks as made another mesh of `found` slower.

    fsdp communicates least, so that is a mesh with half of the ranks on the axis, and more on fsdp.
    """
    orders = {one.config.mesh.shape[1:]: one.order for one in found}
    for shape, order in orders.items():
        for axis in range(1, len(shape)):
            more = [shape[0] // 2, *shape[1:]]
            more[axis] *= 2
            if mesh[axis] >= more[axis] and orders.get(tuple(more), order) > order:
                return True
    return False


def fastest(config: Config, chip: Chip, chips: int) -> tuple[Candidate, int]:
    """Return the best candidate for settings that are left open, and how many were tried.

    Raises  ConfigError as `search`.
    """
    fixed = frozenset(SEARCHED_FLAGS) - (left_open := utils.left_open(config))
    if "train.remat" in left_open:
        config = utils.changed(config, {"train.remat": "none"})
    result = search(config, chip, chips, fixed, quick=True)
    for rough in result.best:
        exact = candidate(rough.config, chip, rough.config.train.remat)
        if exact.predicted.fits:
            return exact, result.tried
    for rough in result.best:  # other settings on the same mesh
        candidates, _ = candidates_on(config, chip, rough.config.mesh.shape[1:], fixed)
        exact = best_of(candidates)
        if exact.predicted.fits:
            return exact, result.tried
    raise TooLarge(
        f"The closest is {result.best[0].config.mesh}: needs {gib(exact.predicted.most_bytes)} of "
        f"{gib(usable_bytes(chip))} at least"
    )


def candidates_on(
    config: Config,
    chip: Chip | None,
    mesh: MeshShape,
    fixed: frozenset[str],
    rough: bool = False,
) -> tuple[list[Candidate], str]:
    """Return all candidates on a mesh, each with its best remat policy, and the error of the first
    impossible one.
    """
    candidates, reason = [], ""
    faster: list[dict[str, Any]] = []  # choices that fit
    for values in choices_on(config, mesh, fixed):
        if rough and values | {"fsdp.gather": "step"} in faster:
            continue  # a gather per layer is hardly faster
        try:
            chosen = changed(config, values)
            keep = "train.remat" in fixed
            one = candidate(chosen, chip, config.train.remat if keep else "none", rough)
            if not keep and not one.predicted.fits:  # else nothing is faster
                policies = partial(remat_policies, changed(chosen, SAME_POLICIES), chip, rough)
                least = policies()[-2] if chosen.pipeline.split_backward else "full"
                one = candidate(chosen, chip, least, rough)  # else nothing fits
                if one.predicted.fits:
                    names = [p for p in policies()[1:-1] if p != least]
                    others = [candidate(chosen, chip, p, rough) for p in names]
                    one = best_of([*others, one])
            candidates.append(one)
            faster += [values] if one.predicted.fits else []
        except ConfigError as error:
            reason = reason or str(error)
    return candidates, reason


def candidate(config: Config, chip: Chip | None, remat: str, rough: bool = False) -> Candidate:
    config = changed(config, {"train.remat": remat})
    return Candidate(config, cost.predict(config, chip, shared=True, rough=rough))


def choices_on(config: Config, mesh: MeshShape, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield {flag: value} of everything to try on a mesh, without train.remat."""
    fsdp, pipeline, context, _ = mesh
    blocks, sequences = config.model.blocks, config.train.global_batch_size // config.mesh.replica
    virtual = divisors(blocks // pipeline) if pipeline > 1 and blocks % pipeline == 0 else [1]
    choices = {
        "mesh.virtual": virtual,
        "pipeline.split_backward": [False, True] if pipeline > 1 else [False],
        "train.microbatches": divisors(sequences // fsdp) if sequences % fsdp == 0 else [1],
        "fsdp.gather": ["step", "layer"] if fsdp * context > 1 else ["step"],
        "model.experts_layout": [config.model.experts_layout],
    }
    if config.model.moe_layers and math.prod(mesh) > pipeline:  # else both layouts are the same
        choices["model.experts_layout"] = ["expert_parallel", "sharded"]
    for flag in fixed & choices.keys():
        choices[flag] = [get(config, flag)]
    for values in itertools.product(*choices.values()):
        choice = dict(zip((*MESH_FLAGS, *choices), (*mesh, *values), strict=True))
        if choice["mesh.virtual"] == 1 or choice["train.microbatches"] % pipeline == 0:
            yield choice


def best_of(candidates: list[Candidate]) -> Candidate:
    """Return the fastest candidate that fits, or the smallest if none fits."""
    if fit := [one for one in candidates if one.predicted.fits]:
        return min(fit, key=lambda one: one.order)
    return min(candidates, key=lambda one: one.predicted.most_bytes)


@cache
def remat_policies(config: Config, chip: Chip | None, rough: bool = False) -> list[str]:
    """Return policies that save from everything to nothing.

    Each omits one more residual: the one that saves least time for its bytes.
    """
    step = cost.Step(config, platform_of(chip), True, rough)
    saved, held = Counter(), Counter()
    for layer, count in step.block:
        for name in utils.REMAT_NAMES:
            saved[name] += count * cost.recompute_seconds(step, chip, layer, name)
            held[name] += count * (step.saved(layer, name) - step.saved(layer, "full"))
    names = [name for name in held if held[name]]
    names.sort(key=lambda name: -saved[name] / held[name])
    some = [names[:n] for n in range(len(names), 0, -1)]
    return ["none", *(",".join(n for n in utils.REMAT_NAMES if n in kept) for kept in some), "full"]
