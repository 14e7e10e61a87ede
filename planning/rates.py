"""Predict how long a chip is busy with a step, at rates that measured steps reached.

Products run at a share of the chip's peak FLOP/s. The bytes of their operands and results, and of
the state that the optimizer updates, pass at a share of the bandwidth of its memory. That share is
low because other operations read and write values between the products. A model of a step's kernels
belongs in the place of `chip_seconds`.
"""

from hardware import Chip

# docs/measured.md, section GPUs: shares of the figures in hardware.py. `COMPUTE` is its row
# `machine`, 681 TFLOP/s in large products. `MEMORY` is fitted to its table, whose rows
# tests/test_cost.py repeats. Chips without measured steps have these rates, too.
CHIP = "h100"
COMPUTE = 0.69  # of the peak FLOP/s
MEMORY = 0.40  # of the bandwidth of the memory
ERROR = 0.04  # largest relative error of the measured steps, as predicted with these rates


def accuracy(chip: Chip) -> str:
    """Return how far predictions are off for steps that were measured."""
    text = f"within {ERROR:.0%} for the four steps of one H100 that set the rates"
    if chip.name == CHIP:
        return text
    return f"not measured on a {chip.name}; with the rates of an {CHIP}, {text}"


def chip_seconds(chip: Chip, float32: bool, flops: float, moved_bytes: float) -> dict[str, float]:
    """Return how long a chip computes, and how long it waits for its memory besides.

    moved_bytes  bytes of the operands and results of products, and of the updated state.
    """
    return {
        "compute": flops / (COMPUTE * (chip.float32_flops if float32 else chip.flops)),
        "memory": moved_bytes / (MEMORY * chip.memory_bandwidth),
    }
