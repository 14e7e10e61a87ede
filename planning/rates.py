"""Predict how long a chip is busy with a step, at rates that measured steps reached.

Products run at a share of the chip's peak FLOP/s. The bytes of their operands and results, and of
the state that the optimizer updates, pass at a share of the bandwidth of its memory. That share is
low because other operations read and write values between the products. A model of a step's kernels
belongs in the place of `chip_seconds`.
"""

from hardware import Chip
from planning import kernel_time

# docs/measured.md, section GPUs: shares of the figures in hardware.py. `COMPUTE` is its row
# `machine`, 681 TFLOP/s in large products. `MEMORY` is fitted to its table, whose rows
# tests/test_cost.py repeats; its layers are scanned. Chips without measured steps have these rates,
# too. `UNROLLED` is fitted to kernel_time.py for the same models with unrolled layers, which leave
# less between the products; those steps were not measured.
CHIP = "h100"
COMPUTE = 0.69  # of the peak FLOP/s
MEMORY, UNROLLED = 0.40, 0.76  # of the bandwidth of the memory
ERROR = 0.04  # largest relative error of the steps that set the rates


def accuracy(chip: Chip, unrolled: bool) -> str:
    """Return how far predictions are off for the steps that set the rates."""
    known = f"within {ERROR:.0%} for the four steps of one H100 that set the rates"
    if unrolled:
        known = (
            f"not measured; within {ERROR:.0%} of an estimate from the kernels of three H100 steps"
        )
    if chip.name == CHIP:
        return known
    return f"not measured on a {chip.name}; with the rates of an {CHIP}, {known}"


def chip_seconds(
    chip: Chip,
    float32: bool,
    unrolled: bool,
    flops: float,
    moved_bytes: float,
    float8_flops: float = 0.0,
) -> dict[str, float]:
    """Return how long a chip computes, and how long it waits for its memory besides.

    flops         of all products.
    moved_bytes   bytes of the operands and results of products, and of the updated state. Operands
                  in FP8 count in their compute dtype, in which they are read to be quantized.
    float8_flops  of the products in FP8.
    """
    share = UNROLLED if unrolled else MEMORY
    peak = chip.float32_flops if float32 else chip.flops
    compute_s = (flops - float8_flops) / (COMPUTE * peak)
    if float8_flops:
        compute_s += float8_flops / (kernel_time.FLOAT8_COMPUTE * chip.float8_flops)
    return {
        "compute": compute_s,
        "memory": moved_bytes / (share * chip.memory_bandwidth),
    }
