"""Dropless experts with grouped products, against a product of every expert with every token."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dropless
import experts
import utils
from common import config_of, mesh_of
from device_kernels import choice, grouped
from planning import hlo, jaxpr
from utils import EXPERT_AXES, MESH_AXES, SEQUENCE_AXES

B, T, D, G, E, K = 4, 24, 32, 16, 4, 2


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(found, true):
    return np.abs(found - true).max() / np.abs(true).max()


def reference(h_btD, choice_btK, weight_btK, gate, up, down):
    def one(e):
        hidden_btG = jax.nn.silu(h_btD @ gate[e]) * (h_btD @ up[e])
        return (hidden_btG @ down[e]) * jnp.where(choice_btK == e, weight_btK, 0).sum(
            -1, keepdims=True
        )

    return sum(map(one, range(E)))


def choices(loads):
    """Return choices [B, T, K] of distinct experts, of which the first is drawn with `loads`."""
    random = np.random.default_rng(5)
    first = random.choice(E, (B, T), p=loads)
    second = random.choice([e for e in range(E) if loads[e]], (B, T))
    second = np.where(second == first, (first + 1) % E, second)
    return np.stack([first, second], -1).astype(np.int32)


UNEVEN = choices([0.05, 0.9, 0, 0.05])
EVEN = choices([0.25] * 4)
OF_TWO = np.broadcast_to(np.int32([1, 0]), (B, T, K))  # all choices may be of one rank


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1, 1, 1), "sharded"),
        ((2, 1, 1), "expert_parallel"),
        ((2, 1, 2), "expert_parallel"),
        ((2, 1, 2), "sharded"),
    ],
)
def test_values_and_gradients_are_those_of_every_expert_on_every_token(shape, layout):
    parallel = layout == "expert_parallel"
    over_G = P() if parallel else P(None, None, "tensor")
    over_E = P(EXPERT_AXES)
    tokens = P("fsdp", SEQUENCE_AXES)
    w_specs = (over_E,) * 3 if parallel else (over_G, over_G, P(None, "tensor"))
    m = dataclasses.replace(utils.Model(), n_routed_experts=E, num_experts_per_tok=K)

    def local(h_btD, choice_btK, weight_btK, factor_btD, *w):
        w = experts.Experts(parallel, *w, None, None)
        y_btD = dropless.dropless_experts(w, h_btD, (choice_btK, weight_btK), m, "triton")
        return y_btD, lax.psum((y_btD * factor_btD).sum(), MESH_AXES)

    specs = (tokens,) * 4 + w_specs
    run = jax.shard_map(
        local, mesh=mesh_of(config_of(shape)), in_specs=specs,
        out_specs=(P(("replica", "fsdp", "pipeline"), SEQUENCE_AXES), P()),
    )  # fmt: skip

    def loss(weights, choice_btK, run):
        h_btD, weight_btK, *w = weights
        y_btD, total = run(h_btD, choice_btK, weight_btK, factor_btD, *w)
        return total, y_btD

    def plain(h_btD, choice_btK, weight_btK, factor_btD, *w):
        y_btD = reference(h_btD, choice_btK, weight_btK, *w)
        return y_btD, (y_btD * factor_btD).sum()

    factor_btD = draw(0, B, T, D)
    weights = [draw(1, B, T, D), draw(2, B, T, K) + 2]
    weights += [draw(3, E, D, G), draw(4, E, D, G), draw(5, E, G, D)]
    step = jax.jit(jax.grad(lambda w, c: loss(w, c, run), has_aux=True))
    with jax.default_matmul_precision("highest"):
        for choice_btK in (UNEVEN, EVEN, OF_TWO):
            found = step(weights, choice_btK)
            true = jax.grad(lambda w: loss(w, choice_btK, plain), has_aux=True)(weights)  # noqa: B023
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
                assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize(("kernel", "widths"), [("triton", (144, 80)), ("megablox", (136, 24))])
def test_a_kernel_multiplies_rows_with_the_matrix_of_their_tile(kernel, widths):
    """Blocks reach over the ends of both widths. The last tile is of no expert."""
    tile = grouped.tile_rows(kernel, 0)
    expert_i, first_e = np.int32([0, 2, 2, 3]), np.int32([0, 1, 1, 3])
    tiles = grouped.Tiles(jnp.asarray(expert_i), jnp.asarray(first_e))
    x_pD, w_eDZ = draw(0, 4 * tile, widths[0]), draw(1, 3, *widths)
    d_y_pZ = draw(2, 4 * tile, widths[1])
    x_pD[3 * tile :] = d_y_pZ[3 * tile :] = np.nan  # must reach no result

    def both(x_pD, w_eDZ):
        run = jax.tree_util.Partial(grouped.product, grouped.kernel_of(kernel, tile, 0), tiles)
        y_pZ, back = jax.vjp(run, x_pD, w_eDZ)
        return y_pZ, *back(d_y_pZ)

    y_pZ, d_x_pD, d_w_eDZ = jax.jit(both)(x_pD, w_eDZ)
    rows = np.arange(3 * tile)
    chosen = w_eDZ[expert_i[rows // tile]]
    x_pD, d_y_pZ = x_pD[rows], d_y_pZ[rows]
    assert relative_error(y_pZ[rows], np.einsum("pD,pDZ->pZ", x_pD, chosen)) < 1e-5
    assert relative_error(d_x_pD[rows], np.einsum("pZ,pDZ->pD", d_y_pZ, chosen)) < 1e-5
    for e in range(3):
        own = expert_i[rows // tile] == e
        found, true = d_w_eDZ[e], x_pD[own].T @ d_y_pZ[own]
        assert np.abs(found - true).max() <= 1e-5 * np.abs(d_w_eDZ).max()


def test_the_first_pass_has_all_choices_of_one_rank_and_some_more_than_the_mean_of_several():
    def passes(load, choices, experts_of_rank):
        return dropless.divide_into_passes("triton", load, choices, experts_of_rank)

    # 16,384 tokens of 6 experts out of 32: 24 tiles of each, and at most one more.
    alone = passes(3072, (16384, 6), 32)
    assert alone[1:4] == (128, (6 * 16384 + 32 * 127) // 128, 0)
    assert grouped.counted_rows(alone.kernel.rows.__name__) == 32 * 24.5 * 128
    # One of 8 ranks with the same tokens each: 5/4 of the tiles, and one more for each expert.
    assert passes(8 * 3072, (8 * 16384, 6), 4)[1:4] == (128, 4 * 192 * 5 // 4 + 4, 964 // 4)
    # Few tokens: an expert without a choice has no tile.
    assert passes(3 * 2 / 64, (3, 2), 64)[1:4] == (16, 6, 0)


# --- counts ---------------------------------------------------------------------------------------


def test_the_planner_counts_tiles_of_even_loads():
    kernel = grouped.kernel_of("triton", 16, 80)
    shapes = [(6 * 16, D), (E, D, 2 * G), (6,), (E + 1,)]
    dtypes = [jnp.float32] * 2 + [jnp.int32] * 2
    args = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]

    def run(x_pD, w_eDZ, *tiles):
        y_pZ, back = jax.vjp(
            lambda x, w: grouped.product(kernel, grouped.Tiles(*tiles), x, w), x_pD, w_eDZ
        )
        return back(y_pZ)

    program = jaxpr.Reader(jaxpr.Sizes(), 1.0).read(jax.make_jaxpr(run)(*args))
    assert [int(op.flops[0]) for op, _ in jaxpr.costs(program.ops)] == [2 * 80 * D * 2 * G] * 3


@pytest.mark.parametrize(
    "call",
    [
        "%p.1 = bf16[96,64]{1,0} custom-call(%x, %w, %t), "
        'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/jvp(moe)/experts/'
        'grouped_80_rows/grouped_rows/pallas_call"}',
        "%tgmm.1 = bf16[4,32,64]{2,1,0} custom-call(%t, %x, %y), "
        'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp())/'
        'grouped_80_rows/jit(tgmm)/pallas_call"}',
    ],
)
def test_compiled_kernels_count_as_the_planner_counts_them(call):
    arrays = {"x": "bf16[96,32]", "w": "bf16[4,32,64]", "y": "bf16[96,64]", "t": "s32[6]"}
    lines = [f"  %{name} = {kind}{{0}} parameter(0)" for name, kind in arrays.items()]
    text = "\n".join(["ENTRY %main (a: f32[]) -> f32[] {", *lines, f"  ROOT {call}", "}"])
    assert hlo.dot_flops(text) == 2 * 80 * 32 * 64


# --- the choice of a kernel -----------------------------------------------------------------------


def config(shape=(1, 1, 1), **fields):
    fields = {"hidden_size": 32, "moe_intermediate_size": 48, "capacity_factor": 0.0} | fields
    return config_of(shape, **{"compute_dtype": "bfloat16"} | fields)


OLD = "it needs an NVIDIA GPU of compute capability 8.0 or later"


@pytest.mark.parametrize(
    ("kernel", "fields", "platform", "why"),
    [
        ("triton", {}, "gpu8.0", ""),
        ("triton", {}, "tpu", "these devices have megablox"),
        ("megablox", {}, "tpuv3", "it needs a TPU v4 or later"),
        ("triton", {}, "gpu7.5", OLD),
        ("triton", {"compute_dtype": "float32"}, "gpu9.0", "it does not support float32"),
        ("triton", {"hidden_size": 40}, "gpu9.0", "widths 40 and 48 are not multiples of 16"),
        (
            "triton",
            {"shape": (1, 1, 2), "experts_layout": "sharded"},
            "gpu9.0",
            "widths 32 and 24 are not multiples of 16",
        ),
    ],
)
def test_a_kernel_is_chosen_if_it_can_run_and_the_error_says_why_not(kernel, fields, platform, why):
    chosen, asked = config(**fields), config(experts_kernel=kernel, **fields)
    if not why:
        for one in (chosen, asked):
            assert choice.choose_experts_kernel(one, platform) == kernel
            assert choice.describe_experts(one, platform) == kernel
        tiles = config(experts_kernel="tiles", **fields)
        assert choice.describe_experts(tiles, platform) == "tiles"
        return
    if not platform.startswith("tpu"):
        assert choice.describe_experts(chosen, platform) == f"tiles ({kernel}: {why})"
    with pytest.raises(utils.ConfigError, match=re.escape(f"experts_kernel {kernel}: {why}. Use")):
        choice.choose_experts_kernel(asked, platform)


def test_cpus_and_tpus_have_tiles_unless_a_kernel_is_selected_and_a_capacity_needs_neither():
    assert choice.describe_kernels(config(), "cpu") == "attention xla, dropless experts tiles"
    assert choice.describe_experts(config(), "tpu") == "tiles"
    for kernel, platform in (("triton", "cpu"), ("megablox", "tpu")):
        chosen = config(experts_kernel=kernel, moe_intermediate_size=32)
        assert choice.choose_experts_kernel(chosen, platform) == kernel
    only_evaluation = choice.describe_kernels(config(capacity_factor=1.0), "cpu")
    assert only_evaluation == "attention xla, dropless experts in evaluation tiles"
    dense = config(capacity_factor=1.0, eval_capacity_factor=1.0)
    assert choice.describe_kernels(dense, "cpu") == "attention xla"
