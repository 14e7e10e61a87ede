"""The kernels of a program for GPUs, with their bytes and their time."""

import dataclasses
from fractions import Fraction

import jax.numpy as jnp
import pytest
from jax import lax

import hardware
from planning import kernel_time
from test_hlo import compiled, read
from utils import ConfigError

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


def test_kernels_of_a_branch_count_by_the_share_of_its_executions():
    """None for an empty branch, and two for tanh(x @ w), in six trips."""

    def branching(x, w):
        def step(x, i):
            return lax.cond(i < 2, lambda x: jnp.tanh(x @ w), lambda x: x, x), None

        return lax.scan(step, x, jnp.arange(6))[0]

    text, chip = compiled(branching, (64, 32), (32, 32)), hardware.CHIPS["h100"]
    never, always, some = (
        kernel_time.estimate(text, chip, lambda name, share=share: (1 - share, share))
        for share in (Fraction(0), Fraction(1), Fraction(2, 6))
    )
    assert always.kernels - never.kernels == 6 * 2
    product = FLOAT + 4 * 32 * 32 + FLOAT
    assert always.moved_bytes - never.moved_bytes == 6 * (product + 2 * FLOAT)
    for part, least, most in zip(some, never, always, strict=True):
        assert part == pytest.approx(least + 2 / 6 * (most - least))
    with pytest.raises(ConfigError, match="it is unknown how often each runs"):
        kernel_time.estimate(text, chip)


def test_a_loop_of_unknown_length_is_refused_though_it_has_no_product():
    def halves(x):
        return lax.while_loop(lambda x: x.sum() > 5.0, lambda x: x / 2, x)

    with pytest.raises(ConfigError, match="no known trip count"):
        kernel_time.estimate(compiled(halves, (64, 32)), hardware.CHIPS["h100"])


def test_products_of_float32_take_the_rate_of_float32():
    text = read("gpu_kernels").replace("bf16[64,4096]", "f32[64,4096]")
    chip = dataclasses.replace(hardware.CHIPS["h100"], float32_flops=1e9)
    product_s = 2 * 64 * 4096 * 32 / (kernel_time.COMPUTE * chip.float32_flops)
    assert kernel_time.estimate(text, chip).seconds == pytest.approx(product_s, rel=0.01)
