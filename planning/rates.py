"""Predict how long a chip is busy with a step, at rates that measured steps reached.

Products run at a share of the chip's peak FLOP/s. The bytes of their operands and results, and of
the state that the optimizer updates, pass at a share of the bandwidth of its memory. That share is
low because other operations read and write values between the products. A model of a step's kernels
belongs in the place of `chip_seconds`.
"""

from dataclasses import dataclass

from hardware import Chip


@dataclass(frozen=True)
class Rates:
    """What steps reached of the figures of their chip in hardware.py."""

    compute: float  # share of the peak FLOP/s
    memory: float  # share of the bandwidth of the memory
    error: float  # largest relative error of the measured steps, as predicted with these rates
    rows: str  # these steps


# docs/measured.md, section GPUs. `compute` is its row `machine`: 681 TFLOP/s in large products.
# `memory` is fitted to its table, whose rows tests/test_cost.py repeats.
RATES = {"h100": Rates(0.69, 0.40, 0.04, "the four steps of one H100 that set the rates")}
NEAREST = "h100"  # whose rates serve chips without measured steps


def rates_of(chip: Chip) -> Rates:
    return RATES.get(chip.name, RATES[NEAREST])


def accuracy(chip: Chip) -> str:
    """Return how far predictions are off for steps that were measured."""
    rates = rates_of(chip)
    found = f"within {rates.error:.0%} for {rates.rows}"
    if chip.name in RATES:
        return found
    return f"not measured on a {chip.name}; with the rates of an {NEAREST}, {found}"


def chip_seconds(chip: Chip, float32: bool, flops: float, moved_bytes: float) -> dict[str, float]:
    """Return how long a chip computes, and how long it waits for its memory besides.

    moved_bytes  bytes of the operands and results of products, and of the updated state.
    """
    reached, peak = rates_of(chip), chip.float32_flops if float32 else chip.flops
    return {
        "compute": flops / (reached.compute * peak),
        "memory": moved_bytes / (reached.memory * chip.memory_bandwidth),
    }
