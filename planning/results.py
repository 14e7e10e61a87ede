"""Results of capacity planning as data: predictions, compiled steps, searches, plans."""

import math
from dataclasses import dataclass
from typing import Any

import utils
from hardware import Chip, MeshShape
from planning import rates
from utils import GIB, Config

# Share of a chip's memory that a step may fill. Predictions are within 10 % of what a compiler
# plans, and a runtime reserves some memory for itself.
USABLE = 0.85

# Settings that a search chooses.
MESH_FLAGS = ("mesh.fsdp", "mesh.pipeline", "mesh.context", "mesh.tensor")
SEARCHED_FLAGS = (
    *MESH_FLAGS,
    "mesh.virtual",
    "pipeline.split_backward",
    "train.microbatches",
    "train.remat",
    "fsdp.gather",
    "model.experts_layout",
)

# Recomputed is what train.remat does not save. Bubble is what runs in ticks without a task.
FLOPS_KINDS = ("forward", "backward", "recomputed", "bubble")

CHIP_PARTS = ("compute", "memory")  # of the seconds of a step; the others are those of links


def usable_bytes(chip: Chip | None) -> float:
    return math.inf if chip is None else USABLE * chip.memory_bytes


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


@dataclass(frozen=True)
class Traffic:
    """Collectives of one cause in a step."""

    cause: str
    axes: tuple[str, ...]  # mesh axes of more than one rank
    kind: str
    result_bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave the chip if each rank sends all parts but one."""
        if self.kind == "collective-permute":
            return self.result_bytes
        whole = self.result_bytes * (self.ranks if self.kind == "reduce-scatter" else 1)
        return whole * (self.ranks - 1) / self.ranks * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Compiled:
    """What the compiler planned for one chip."""

    memory_bytes_per_chip: int  # arguments + temporaries + results that are not arguments
    argument_bytes: int
    temporary_bytes: int
    flops_per_chip: float  # matrix products; the body of a loop counts once per trip
    model_flops_per_chip: float  # FLOPs of a step without waste: see cost.model_flops
    collective_bytes_per_chip: dict[str, float]  # bytes of results, by mesh axes
    collectives: list[dict[str, Any]]  # the same, a row for each hlo.Collective
    compile_s: float
    compiler: str
    evaluation_bytes: int = 0  # memory of an evaluation, with the state; 0 if not compiled
    sampling_bytes: int = 0
    kernels: dict[str, float] | None = None  # of a GPU: kernel_time.Estimate


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a step on one chip. Times are None for an unknown chip."""

    parameters: int
    active_parameters: int
    tokens_per_step: int
    attention: str  # the kernel: see device_kernels/choice.py
    memory_bytes_per_chip: int
    flops_per_chip: int
    model_flops_per_chip: float  # FLOPs of a step without waste: see cost.model_flops
    collective_bytes_per_chip: dict[str, float]  # bytes of results, by mesh axes
    bubble: float  # idle share of the slots of a pipeline rank
    memory: dict[str, int]
    flops: dict[str, dict[str, int]]  # by part, and by FLOPS_KINDS
    traffic: list[Traffic]
    seconds: dict[str, float] | None  # products, memory, and the links of each group of axes
    mfu_flops_per_token: float  # numerator of MFU: see hardware.py
    evaluation_bytes: int  # memory of an evaluation, with the state of training
    sampling_bytes: int  # the same of samples
    peak_flops: float  # of a chip in the compute dtype; 0 if unknown
    unrolled: bool  # whether the layers are: see train.layers
    chip: Chip | None
    chips: int

    @property
    def fits(self) -> bool:
        return self.most_bytes <= usable_bytes(self.chip)

    @property
    def most_bytes(self) -> int:
        """The memory of a step, an evaluation or samples, whichever needs most."""
        return max(self.memory_bytes_per_chip, self.evaluation_bytes, self.sampling_bytes)

    @property
    def chip_s(self) -> float | None:
        """The time of a step whose communication is all hidden behind computation."""
        return self.seconds and sum(self.seconds[part] for part in CHIP_PARTS)

    @property
    def step_s(self) -> float | None:
        """The time of a step in which communication and computation never overlap."""
        return self.seconds and sum(self.seconds.values())

    def over(self, compiled: Compiled) -> dict[str, float]:
        """Return predicted over compiled: memory, FLOPs, the time of kernels (of a GPU), and bytes
        along axes that carry 1 % or more.
        """
        ratios = {
            "memory": self.memory_bytes_per_chip / compiled.memory_bytes_per_chip,
            "FLOPs": self.flops_per_chip / compiled.flops_per_chip,
        }
        if compiled.kernels:
            ratios["time"] = self.chip_s / compiled.kernels["seconds"]
        by_axes = compiled.collective_bytes_per_chip
        return ratios | {
            axes: self.collective_bytes_per_chip.get(axes, 0.0) / size
            for axes, size in by_axes.items()
            if size >= 0.01 * sum(by_axes.values())
        }

    def line(self) -> str:
        """Format memory and step time in one line."""
        memory = f"plan: {self.memory_bytes_per_chip / GIB:.3g} GiB per device"
        others = {"an evaluation": self.evaluation_bytes, "sampling": self.sampling_bytes}
        others = [f"{size / GIB:.3g} in {name}" for name, size in others.items() if size]
        memory += f" ({', '.join(others)})" * bool(others)
        if self.seconds is None:
            return f"{memory}; no step time, for no figures of this device are known"
        fits = self.most_bytes <= self.chip.memory_bytes
        times = " to ".join(dict.fromkeys(f"{s:.3g}" for s in (self.chip_s, self.step_s)))
        return (
            f"{memory}{' of' if fits else ', which does not fit: it has'} "
            f"{self.chip.memory_bytes / GIB:.0f}; {times} s per step "
            f"({rates.accuracy(self.chip, self.unrolled)})"
        )

    def tokens_per_s(self, step_s: float) -> float:
        return self.tokens_per_step / step_s

    def mfu(self, step_s: float) -> float:
        """Model FLOP/s over the peak of all chips, by hardware.MFU_RULE."""
        return self.tokens_per_s(step_s) * self.mfu_flops_per_token / (self.chips * self.peak_flops)


@dataclass(frozen=True)
class Candidate:
    """One configuration of the chips."""

    config: Config
    predicted: Prediction

    @property
    def order(self) -> tuple[float, int]:
        """The smallest is best: step time (FLOPs if the chip is unknown), then memory."""
        p = self.predicted
        return p.step_s or p.flops_per_chip, p.memory_bytes_per_chip

    @property
    def flags(self) -> dict[str, Any]:
        """The settings that a search chooses."""
        return {flag: utils.get(self.config, flag) for flag in SEARCHED_FLAGS}


@dataclass(frozen=True)
class SearchResult:
    best: list[Candidate]  # the best candidate of each mesh that fits, best mesh first
    rejected: dict[MeshShape, str]  # mesh -> why it is rejected
    tried: int


@dataclass(frozen=True)
class Plan(Candidate):
    """Everything that plan.py reports."""

    name: str  # of the config
    chip: Chip | None
    tokens: float  # of the whole run
    command: str  # that trains with this plan
    price_per_hour: float = 0.0  # of a chip
    compiled: Compiled | None = None
    search: SearchResult | None = None

    @property
    def chip_name(self) -> str:
        return self.chip.name if self.chip else "cpu"
