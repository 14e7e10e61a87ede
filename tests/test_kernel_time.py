"""The kernels of a program for GPUs, with their bytes and their time."""

import dataclasses

import pytest

import hardware
from planning import kernel_time
from test_hlo import read

FLOAT, HALF = 4 * 64 * 32, 2 * 64 * 32  # bytes of [64, 32]


def test_kernels_count_once_per_trip_with_the_slices_that_they_read_and_write():
    chip = hardware.CHIPS["h100"]
    found = kernel_time.estimate(read("gpu_kernels"), chip)
    product = 2 * (64 * 4096 + 4096 * 32) + FLOAT
    # A trip reads its slice of the sums, x and a number, writes the slice, and adds 1 to that.
    trip, comparison = 3 * FLOAT + 4 + 3 * 4, 2 * 4 + 1
    moved = product + (3 * FLOAT + HALF) + 5 * trip + 6 * comparison
    kernels = 2 + 5 * 2 + 6
    assert (found.moved_bytes, found.kernels) == (moved, kernels)
    rate, launch_s = kernel_time.MEMORY * chip.memory_bandwidth, kernel_time.LAUNCH_S
    assert found.seconds == pytest.approx(moved / rate + kernels * launch_s)
    slow = dataclasses.replace(chip, flops=1e12)  # where the product takes longer than its bytes
    product_s = 2 * 64 * 4096 * 32 / (kernel_time.COMPUTE * slow.flops)
    seconds = product_s + (moved - product) / rate + kernels * launch_s
    assert kernel_time.estimate(read("gpu_kernels"), slow).seconds == pytest.approx(seconds)


def test_products_of_float32_take_the_rate_of_float32():
    text = read("gpu_kernels").replace("bf16[64,4096]", "f32[64,4096]")
    chip = dataclasses.replace(hardware.CHIPS["h100"], float32_flops=1e9)
    product_s = 2 * 64 * 4096 * 32 / (kernel_time.COMPUTE * chip.float32_flops)
    assert kernel_time.estimate(text, chip).seconds == pytest.approx(product_s, rel=0.01)
