"""FP8 products beside exact ones, what they save for the backward pass, and a sharded step.

Letters: K contracted, N the width of the result, n rows.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import experts
import float8
import hardware
import model
import sharded_model
import utils
import weights
from common import batch_of, canonical, config_of, mesh_of, on_mesh
from planning import cost, kernel_time, rates

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # largest relative error of a number
HALF_STEP = {E4M3: 2.0**-10, E5M2: 2.0**-17}  # of the smallest numbers


def rounded(x, dtype):
    """Return x as its numbers in FP8 and its scale represent it, in float64."""
    scale = np.exp2(np.floor(np.log2(np.abs(x).max() / LARGEST[dtype])) + 1)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-20, 1.0, 447.0, 1e9])
def test_quantized_numbers_are_near_and_none_is_beyond_the_largest(dtype, size):
    x = np.random.default_rng(0).standard_normal((64, 48)) * np.logspace(-6, 0, 48) * size
    x = x.astype(np.float32)
    x8, scale = float8.quantize(jnp.asarray(x), dtype)
    assert x8.dtype == dtype and np.log2(scale) % 1 == 0
    largest = np.abs(np.asarray(x8, np.float64)).max()
    assert LARGEST[dtype] / 2.3 < largest <= LARGEST[dtype]
    error = np.abs(np.asarray(x8, np.float64) * float(scale) - x)
    bound = np.maximum(ROUNDING[dtype] * np.abs(x), HALF_STEP[dtype] * float(scale))
    assert (error <= bound * (1 + 1e-6)).all() and (error > bound / 2).any()


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    x8, scale = float8.quantize(jnp.zeros((4, 3)), E4M3)
    assert not np.asarray(x8, np.float32).any() and np.isfinite(scale)
    w = jnp.ones((3, 5))
    for value in (np.inf, -np.inf, np.nan):
        x = jnp.zeros((1, 4, 3)).at[0, 1, 2].set(value)
        [y] = float8.matmul(x, (w,))
        assert not np.isfinite(y).any()


@functools.cache
def products():
    """Return arrays and, for two matrices, FP8 products and gradients, in float64."""
    random = np.random.default_rng(1)
    x, a, b, g, h = (
        (size * random.standard_normal(shape)).astype(np.float32)
        for size, *shape in (
            (900, 2, 16, 24), (0.1, 24, 40), (3, 24, 32), (1e-4, 2, 16, 40), (1e-6, 2, 16, 32)
        )
    )  # fmt: skip
    y, vjp = jax.vjp(jax.jit(float8.matmul), x, (a, b))
    results = jax.tree.map(lambda v: np.asarray(v, np.float64), (y, *vjp((g, h))))
    return (x, a, b, g, h), results


def expected(x, a, b, g, h):
    """Return the products and gradients of two matrices, in float64."""
    rows = [v.reshape(-1, v.shape[-1]).astype(np.float64) for v in (x, g, h)]
    x_nK, g_nN, h_nN = rows
    a, b = a.astype(np.float64), b.astype(np.float64)
    y = (x_nK @ a, x_nK @ b)
    return y, g_nN @ a.T + h_nN @ b.T, (x_nK.T @ g_nN, x_nK.T @ h_nN)


def test_products_and_gradients_are_those_of_the_rounded_arrays():
    """e4m3 for activations and weights, e5m2 for gradients; sums in float32."""
    (x, a, b, g, h), results = products()
    arrays = [rounded(v, E4M3) for v in (x, a, b)] + [rounded(v, E5M2) for v in (g, h)]
    for result, exact in zip(*map(jax.tree.leaves, (results, expected(*arrays))), strict=True):
        np.testing.assert_allclose(
            result.reshape(exact.shape), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max()
        )


def test_products_and_gradients_are_near_the_exact_ones():
    """Within the rounding of both factors, of each term of a sum."""
    arrays, results = products()
    relative = [ROUNDING[E4M3] * 2.1] * 2 + [(ROUNDING[E4M3] + ROUNDING[E5M2]) * 1.1] * 3
    bounds = jax.tree.leaves(expected(*map(np.abs, arrays)))
    exact = jax.tree.leaves(expected(*arrays))
    for result, y, bound, share in zip(
        jax.tree.leaves(results), exact, bounds, relative, strict=True
    ):
        error = np.abs(result.reshape(y.shape) - y)
        assert (error <= share * bound).all()
        # Independent errors of the terms cancel in part.
        assert 0.02 < np.linalg.norm(error) / np.linalg.norm(y) < 0.07


@pytest.mark.parametrize(
    ("remat", "saved"),
    [
        ("none", {(32, 24): 1, (32, 40): 1}),
        ("mlp_in,hidden", {(32, 24): 1}),
        ("full", {}),
    ],
)
def test_inputs_of_products_are_saved_in_float8_alone(remat, saved):
    """Nothing as wide as they are is saved besides, but gate and up, whose gradient needs them."""
    (x, a, *_), _ = products()
    wrapped = jax.checkpoint(
        lambda x, gate, up, down: model.gated(
            jnp.tanh(x), (gate, up), down, experts.Activation(), quantized=True
        ),
        policy=sharded_model.policy(remat),
    )
    _, vjp = jax.vjp(wrapped, x, a, a, a.T)
    residuals = [r for r in jax.tree.leaves(vjp) if r.size > 1]
    found = {r.shape: 1 for r in residuals if r.dtype == np.uint8}
    assert found == saved
    wide = [r.shape for r in residuals if r.dtype == jnp.float32 and r.shape != a.shape]
    given = [(2, 16, 24), (24, 40), (40, 24)]
    others = [shape for shape in wide if shape not in given]
    assert len(others) == (0 if remat == "full" else 2)


DENSE = {"n_routed_experts": 0, "n_shared_experts": 0, "blocks": 1}


def gradients(shape, layers, **fields):
    rows = {"microbatches": 2, "global_batch_size": 8, "layers": layers}
    config = config_of(shape, train=rows, **DENSE, **fields)
    mesh, declared = mesh_of(config), model.declare(config)
    run = jax.jit(sharded_model.loss_and_gradients(config, declared, mesh))
    data = on_mesh(config, mesh, batch_of(config))
    grads, stats = run(weights.initialize(declared, mesh, 0), data, jnp.int32(0))
    return float(stats.loss), canonical(config, grads)


def distance(one, other):
    """Return the largest relative distance of two trees' arrays."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs if b.any())


def test_a_step_on_a_mesh_is_near_that_of_one_device_and_differs_from_float32():
    """Ranks have scales of their own, which change the rounding of small numbers alone."""
    loss, one = gradients((1, 1, 1), "unrolled", matmul_dtype="float8")
    sharded_loss, sharded = gradients((2, 1, 2), "scanned", matmul_dtype="float8")
    exact_loss, exact = gradients((1, 1, 1), "unrolled")
    assert abs(loss - sharded_loss) < 1e-3 * loss
    assert 1e-6 < abs(loss - exact_loss) < 1e-2 * loss
    assert distance(sharded, one) < 0.05 < distance(one, exact) < 0.2


@pytest.mark.parametrize(
    ("platform", "chip", "runs"),
    [
        ("cpu", None, True),
        ("gpu9.0", "h100", True),
        ("gpu10.0", None, True),
        ("gpu8.9", "l4", True),
        ("gpu8.9", None, True),
        ("gpu8.0", "a100", False),
        ("gpu8.6", None, False),
        ("gpugfx942", "mi300x", False),
        ("gpugfx942", None, False),
        ("tpu", "v6e", False),
        ("tpu", "v7x", True),
        ("tpu", None, False),
    ],
)
def test_float8_is_refused_where_the_hardware_has_none(platform, chip, runs):
    chip = chip and hardware.CHIPS[chip]
    assert not hardware.uses_float8(config_of(), platform, chip)
    config = config_of(matmul_dtype="float8")
    if runs:
        assert hardware.uses_float8(config, platform, chip)
        return
    name = chip.name if chip else platform
    with pytest.raises(utils.ConfigError, match=f"no FP8 products on {name}.*matmul_dtype compute"):
        hardware.uses_float8(config, platform, chip)
    if chip:
        with pytest.raises(utils.ConfigError, match="no FP8 products on"):
            cost.predict(config, chip)


def test_the_plan_has_products_in_float8_at_their_own_rate():
    h100, sizes = hardware.CHIPS["h100"], {"compute_dtype": "bfloat16", "n_shared_experts": 0}
    before = cost.predict(config_of(**sizes), h100)
    exact = cost.predict(config_of(**sizes | {"compute_dtype": "float32"}), h100)
    assert (before.peak_flops, exact.peak_flops) == (h100.flops, h100.float32_flops)
    plan = cost.predict(config_of(**sizes, matmul_dtype="float8"), h100)
    assert plan.flops_per_chip == before.flops_per_chip
    flops = sum(plan.flops["mlp float8"].values())
    rows, D, F, layers = 16 * 16, 48, 72, 4
    assert flops == 3 * 2 * 3 * rows * D * F * layers
    saved = flops / (rates.COMPUTE * h100.flops) - flops / (
        kernel_time.FLOAT8_COMPUTE * h100.float8_flops
    )
    assert before.seconds["compute"] - plan.seconds["compute"] == pytest.approx(saved)


def test_a_compiled_product_counts_at_the_rate_of_its_operands():
    text = """ENTRY %main (x: f8e4m3fn[8192,2048], w: f8e5m2[2048,2048]) -> bf16[8192,2048] {
  %x = f8e4m3fn[8192,2048]{1,0} parameter(0)
  %w = f8e5m2[2048,2048]{1,0} parameter(1)
  ROOT %y = (bf16[8192,2048]{1,0}, s8[4096]{0}) custom-call(%x, %w), """
    text += 'custom_call_target="__cublas$lt$matmul$f8", "lhs_contracting_dimensions":["1"]\n}\n'
    wide = re.sub(r"f8e\w+", "bf16", text)
    h100, flops = hardware.CHIPS["h100"], 2 * 8192 * 2048 * 2048
    for program, rate in ((text, 0.581 * h100.float8_flops), (wide, 0.647 * h100.flops)):
        busy_s = kernel_time.estimate(program, h100).seconds - kernel_time.LAUNCH_S
        assert busy_s == pytest.approx(flops / rate)
