"""Declared weights: layouts, initial values, counts, and the reduction of gradients.

Letters of the toy: D width, F hidden width, E experts, K experts per token.
"""

import functools
import math
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import model
import weights
from common import RUN, RUN_MESHES, canonical, config_of, mesh_of
from utils import MESH_AXES, WEIGHT_AXES, ConfigError
from weights import Size, normal, ones, weight, zeros

SIZE = {
    "D": Size(16, "model.hidden_size"),
    "F": Size(24, "model.intermediate_size"),
    "E": Size(8, "model.n_routed_experts"),
    "K": Size(2, "model.num_experts_per_tok"),
    "V": Size(512, "model.vocab_size"),
    "stage": Size(2, "mesh.pipeline"),
    "block": Size(3, "model.num_hidden_layers"),
}


@flax.struct.dataclass
class Toy:
    """One weight of each kind of layout."""

    inner: object
    matrix: jax.Array = weight("D/fsdp F/tensor", normal("D"))
    norm: jax.Array = weight("D", ones, decay=False, float32=True)
    table: jax.Array = weight("V/pipeline+tensor D/fsdp", normal("D", 0.1), group="embedding")
    expert: jax.Array = weight("E/fsdp+tensor D F", normal("D F"), active=("K", "E"))
    bias: jax.Array = weight("E", zeros, trained=False)


@flax.struct.dataclass
class Inner:
    down: jax.Array = weight("F/tensor D/fsdp", normal("F"))


def toy():
    return weights.declare(Toy, SIZE, inner=weights.declare(Inner, SIZE))


def mesh(shape):
    return mesh_of(config_of(shape))


def test_a_layout_gives_shape_spec_name_and_the_dimension_that_is_gathered():
    declared = weights.named(weights.stacked(toy(), "stage/pipeline block", SIZE))
    assert declared.expert.shape == (2, 3, 8, 16, 24)
    assert weights.specs(declared) == Toy(
        inner=Inner(down=P("pipeline", None, "tensor", ("fsdp", "context"))),
        matrix=P("pipeline", None, ("fsdp", "context"), "tensor"),
        norm=P("pipeline", None, None),
        table=P("pipeline", None, ("pipeline", "tensor"), ("fsdp", "context")),
        expert=P("pipeline", None, ("fsdp", "context", "tensor"), None, None),
        bias=P("pipeline", None, None),
    )
    # Gathered is only a dimension that is sharded over fsdp alone.
    dims = {w.name: w.gathered_dim for w in jax.tree.leaves(declared)}
    gathered = {"matrix": -2, "table": -1, "inner.down": -1}
    assert dims == {"norm": None, "expert": None, "bias": None} | gathered


def test_the_suggested_value_works_for_all_dimensions_that_it_sets():
    @flax.struct.dataclass
    class Two:
        wide: jax.Array = weight("D X/tensor", normal("D"))
        once: jax.Array = weight("D G/fsdp", normal("D"))

    def check(value):
        flag, ranks = "model.intermediate_size", dict(zip(MESH_AXES, (1, 3, 1, 1, 8), strict=True))
        sizes = SIZE | {"G": Size(value, flag), "X": Size(6 * value, flag, 6)}
        weights.check_divisible(weights.declare(Two, sizes), ranks)

    message = r"size 31 .*wide has 6 times as many.*size 36, or --mesh.tensor 2.$"
    with pytest.raises(ConfigError, match=message):
        check(31)
    for value in range(32, 36):  # 36 is the smallest that works
        with pytest.raises(ConfigError, match=r"Use --model.intermediate_size 36"):
            check(value)
    check(36)


# --- initial values ----------------------------------------------------------------------------


@functools.cache
def first_values(name, seed=0):
    shape, virtual = RUN_MESHES[name]
    config = config_of(shape, virtual=virtual, **RUN)
    w = weights.initialize(model.declare(config), mesh_of(config), seed)
    return canonical(config, w)


@pytest.mark.parametrize("name", ["2x2x2_virtual", "2x1x2x2_virtual"])
def test_initial_values_are_bit_identical_on_every_mesh(name):
    one, other = first_values("1x1x1"), first_values(name)
    same = jax.tree.map(np.array_equal, one, other)
    assert len(jax.tree.leaves(same)) == len(jax.tree.leaves(model.declare(config_of(**RUN))))
    assert jax.tree.all(same), same


def test_initial_values_differ_between_seeds_weights_and_layers():
    one, other = (first_values("1x1x1", seed) for seed in (0, 1))
    blocks, others = one["blocks"], other["blocks"]
    gate, up = (blocks["dense"]["mlp"][name] for name in ("gate", "up"))
    out, other_out = (blocks[kind]["attention"]["out"] for kind in ("dense", "moe"))
    other_seed = others["dense"]["mlp"]["gate"]
    # The last two have the same name in other layers of the block.
    for a, b in [(gate, other_seed), (gate, up), (gate[0], gate[1]), (out, other_out)]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05


def test_the_initial_scale_uses_the_global_contracted_dimensions():
    values = first_values("2x2x2_virtual")["blocks"]
    D, C, N, W, G = 48, 32, 4, 28, 56
    attention, experts = values["dense"]["attention"], values["moe"]["moe"]["experts"]
    expected = [
        (attention["kv_down"], 1, D),
        (attention["kv_up"], 1, C),
        (attention["out"], weights.RESIDUAL_SCALE, N * W),
        (experts["gate"], 1, D),
        (experts["down"], weights.RESIDUAL_SCALE, G),
    ]
    for value, scale, inputs in expected:
        assert abs(value.std() * math.sqrt(inputs) / scale - 1) < 0.05
    assert (attention["norm"] == 1).all()
    assert not values["moe"]["moe"]["bias"].any()


# --- counts ------------------------------------------------------------------------------------


def test_total_and_active_parameters_match_a_count_by_hand():
    D, N, Q, C, H, R, W, F, G, E, K = 48, 4, 24, 32, 20, 12, 28, 72, 56, 8, 2
    attention = D + D * Q + Q + Q * N * (H + R) + D * (C + R) + C + C * N * (H + W) + N * W * D
    dense = attention + D + 3 * D * F
    experts, shared = 3 * D * G, 2 * 3 * D * G
    moe = attention + D + D * E + E + shared
    layers = {"q_lora_rank": Q, "dense_layers": 2, "prefix_layers": 3, "n_shared_experts": 2}
    total, active = weights.count(model.declare(config_of((2, 2, 2), **layers)))
    others = 512 * D + D + 3 * dense  # 500 ids, and padding
    assert total == others + 4 * (2 * dense + moe + E * experts)
    assert active == others + 4 * (2 * dense + moe + K * experts)


# --- gather and reduction -----------------------------------------------------------------------


def test_gradients_of_gathered_bfloat16_weights_are_summed_in_float32():
    declared = toy().matrix
    # In bfloat16 256 + 1 is 256; the sum of all is 260.
    parts = np.float32([256] + [0.5] * 6 + [1])
    cotangent = np.broadcast_to(parts[:, None, None], (8, 16, 24))

    def local(w, cotangent):
        _, vjp = jax.vjp(lambda w: weights.gather(declared, w), w)
        return vjp(weights.vary(cotangent[0].astype(jnp.bfloat16), ("tensor",)))[0]

    specs = {"in_specs": (declared.spec, P(WEIGHT_AXES)), "out_specs": declared.spec}
    run = jax.shard_map(local, mesh=mesh((1, 4, 1, 2, 1)), **specs)
    arguments = jnp.zeros((16, 24), jnp.bfloat16), cotangent
    gradient = jax.jit(run)(*arguments)
    assert gradient.dtype == jnp.bfloat16
    assert (np.asarray(gradient, np.float32) == 260).all()
    # A CPU sums bfloat16 in float32 anyway; the program shows what other devices do.
    program = str(jax.make_jaxpr(run)(*arguments))
    assert re.findall(r"(\w+)\[[\d,]*\]\S* = reduce_scatter", program) == ["f32"]


def test_weights_are_cast_except_those_declared_float32():
    declared = toy()
    values = jax.tree.map(lambda w: np.zeros(w.shape, np.float32), declared)
    cast = weights.cast(declared, values, jnp.bfloat16)
    assert cast.expert.dtype == cast.inner.down.dtype == jnp.bfloat16
    assert cast.norm.dtype == jnp.float32


@pytest.mark.parametrize(
    ("ranks", "size", "layouts"),  # registers full, not full; one rank
    [(8, 1024, ["0, 1", "0, 1", "1, 0"]), (8, 1000, ["0, 1"] * 2), (1, 1000, [])],
)
def test_a_gradient_is_scattered_in_one_layout_and_returned_in_that_of_its_weight(
    ranks, size, layouts
):
    """Dimensions of [F, D/fsdp] from the fastest-varying: F where it is summed."""
    declared = weights.declare(Inner, {"D": Size(size, ""), "F": Size(3, "")})

    def local(part):
        return weights.reduce_gradients(declared, weights.vary(part), gathered=True)

    specs = {"in_specs": P(), "out_specs": weights.specs(declared)}
    run = jax.jit(jax.shard_map(local, mesh=mesh((ranks, 1, 1)), **specs))
    text = run.lower(Inner(jax.ShapeDtypeStruct((3, size), jnp.float32))).as_text()
    constraints = re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[(.*?)\]>", text)
    assert constraints == layouts


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 2, 1, 2), (1, 2, 1, 2, 2)], ids=str)
def test_gradients_are_summed_over_every_rank_with_a_partial_sum(shape, gathered):
    """The partial sum of a rank is a power of two, so a sum shows which ranks are in it."""
    declared, here = toy(), mesh(shape)
    powers = 2.0 ** np.arange(8, dtype=np.float32).reshape(here.devices.shape)

    def axes_of(w):
        """Return the axes over which each dimension of the partial sums is sharded."""
        return [() if gathered and axes == WEIGHT_AXES else axes for axes in w.dim_axes]

    def local(power):
        def part(w):
            ranks = [math.prod(here.shape[axis] for axis in axes) for axes in axes_of(w)]
            sizes = [size // n for size, n in zip(w.shape, ranks, strict=True)]
            return weights.vary(jnp.full(sizes, power.reshape(())))

        return weights.reduce_gradients(declared, jax.tree.map(part, declared), gathered)

    specs = {"in_specs": P(*MESH_AXES), "out_specs": weights.specs(declared)}
    grads = jax.jit(jax.shard_map(local, mesh=here, **specs))(powers)
    for w, grad in zip(jax.tree.leaves(declared), jax.tree.leaves(grads), strict=True):
        own = [axis for axes in axes_of(w) for axis in axes]
        others = tuple(i for i, axis in enumerate(MESH_AXES) if axis not in own)
        sums = np.broadcast_to(powers.sum(others, keepdims=True), powers.shape)
        for shard in grad.addressable_shards:
            assert (np.asarray(shard.data) == sums[here.devices == shard.device]).all(), w.name
