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
from common import RUN, RUN_MESHES, canonical, config_of, mesh_of, put
from utils import MESH_AXES
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


@flax.struct.dataclass
class InOtherOrder:
    """Toy with its weights in another order, and a new one."""

    expert: jax.Array = weight("E/fsdp+tensor D F", normal("D F"), active=("K", "E"))
    another: jax.Array = weight("D/fsdp F/tensor", normal("D"))
    matrix: jax.Array = weight("D/fsdp F/tensor", normal("D"))


def toy():
    return weights.declare(Toy, SIZE, inner=weights.declare(Inner, SIZE))


def mesh(shape):
    return mesh_of(config_of(shape))


def test_a_layout_gives_shape_and_spec():
    declared = toy()
    assert declared.matrix.shape == (16, 24)
    assert weights.specs(declared) == Toy(
        inner=Inner(down=P("tensor", "fsdp")),
        matrix=P("fsdp", "tensor"),
        norm=P(None),
        table=P(("pipeline", "tensor"), "fsdp"),
        expert=P(("fsdp", "tensor"), None, None),
        bias=P(None),
    )


def test_a_weight_is_gathered_along_the_dimension_sharded_over_fsdp_alone():
    declared = toy()
    dims = {name: getattr(declared, name).gathered_dim for name in ("matrix", "norm", "expert")}
    assert dims == {"matrix": -2, "norm": None, "expert": None}
    assert (declared.table.gathered_dim, declared.inner.down.gathered_dim) == (-1, -1)


def test_stacking_prepends_dimensions_and_keeps_the_gathered_dimension():
    stacked = weights.stacked(toy(), "stage/pipeline block", SIZE)
    assert stacked.expert.shape == (2, 3, 8, 16, 24)
    assert stacked.expert.spec == P("pipeline", None, ("fsdp", "tensor"), None, None)
    assert stacked.matrix.gathered_dim == toy().matrix.gathered_dim
    assert stacked.norm.axes == ("pipeline",)
    assert stacked.norm.decay is False, "two dimensions more make no matrix of it"


def test_an_unknown_mesh_axis_in_a_layout_is_an_error():
    with pytest.raises(AssertionError, match="data"):
        weights._parse_layout("D/data F/tensor")


def test_weights_are_named_by_their_path():
    declared = weights.named(toy())
    assert (declared.norm.name, declared.inner.down.name) == ("norm", "inner.down")


@pytest.mark.parametrize(
    ("ranks", "letter", "size", "works"),
    [
        ((8, 1, 1), "D", 12, 16),
        ((1, 1, 8), "F", 20, 24),
        ((4, 1, 2), "E", 12, 16),
        ((1, 3, 1), "V", 512, 513),
    ],
)
def test_a_size_that_does_not_divide_is_an_error_with_one_that_does(ranks, letter, size, works):
    by_axis = dict(zip(MESH_AXES, (1, *ranks), strict=True))

    def check(size):
        sizes = SIZE | {letter: SIZE[letter]._replace(size=size)}
        tree = weights.declare(Toy, sizes, inner=weights.declare(Inner, sizes))
        weights.check_divisible(tree, by_axis)

    flag = SIZE[letter].flag
    with pytest.raises(ValueError, match=rf"--{flag} {size} .*Use --{flag} {works}\b"):
        check(size)
    check(works)


def test_the_suggested_value_works_for_all_dimensions_that_it_sets():
    @flax.struct.dataclass
    class Two:
        wide: jax.Array = weight("D X/tensor", normal("D"))
        once: jax.Array = weight("D G/fsdp", normal("D"))

    def check(value):
        sizes = SIZE | {
            "G": Size(value, "model.intermediate_size"),
            "X": Size(6 * value, "model.intermediate_size", 6),
        }
        ranks = dict(zip(MESH_AXES, (1, 3, 1, 8), strict=True))
        weights.check_divisible(weights.declare(Two, sizes), ranks)

    message = "size 31 .*wide has 6 times as many.*size 36, or --mesh.tensor 2.$"
    with pytest.raises(ValueError, match=message):
        check(31)
    works = [value for value in range(31, 37) if not refused(check, value)]
    assert works == [36], "the smallest that works"


def refused(function, *arguments):
    try:
        function(*arguments)
    except ValueError:
        return True
    return False


def test_the_error_for_a_fixed_size_suggests_ranks_only():
    sizes = SIZE | {"V": Size(6, "model.vocab_size", fixed="5 (padded)")}
    tree = weights.declare(Toy, sizes, inner=weights.declare(Inner, sizes))
    message = (
        r"--model.vocab_size 5 \(padded\) is not divisible by --mesh.pipeline 4 x --mesh.tensor 4 "
        r".*slice. Use --mesh.pipeline 2 --mesh.tensor 1.$"
    )
    with pytest.raises(ValueError, match=message):
        weights.check_divisible(tree, {"fsdp": 1, "pipeline": 4, "tensor": 4})
    weights.check_divisible(tree, {"fsdp": 1, "pipeline": 2, "tensor": 1})


# --- initial values ----------------------------------------------------------------------------


@functools.cache
def first_values(name, seed=0):
    shape, virtual = RUN_MESHES[name]
    config = config_of(shape, virtual=virtual, **RUN)
    w = weights.initialize(model.declare(config), mesh_of(config), seed)
    return canonical(config, w)


@pytest.mark.parametrize("name", list(RUN_MESHES)[1:])
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
    assert gate.shape == up.shape
    correlations = [
        (gate, others["dense"]["mlp"]["gate"]),
        (gate, up),
        (gate[0], gate[1]),
        (out, other_out),  # of the same name in another layer of the block
    ]
    for a, b in correlations:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05


def test_initial_values_do_not_depend_on_other_weights_or_their_order():
    named = [weights.named(tree) for tree in (toy(), weights.declare(InOtherOrder, SIZE))]
    one, other = (weights.initialize(tree, mesh((2, 2, 2)), 7) for tree in named)
    np.testing.assert_array_equal(one.matrix, other.matrix)
    np.testing.assert_array_equal(one.expert, other.expert)
    assert np.abs(np.asarray(other.another) - np.asarray(one.matrix)).max() > 0.1


@pytest.mark.parametrize("name", ["1x1x1", "2x2x2"])
def test_the_initial_scale_uses_the_global_contracted_dimensions(name):
    values = first_values(name)["blocks"]
    D, C, N, W, G = 48, 32, 4, 28, 56
    attention, experts = values["dense"]["attention"], values["moe"]["moe"]["experts"]
    expected = [
        (attention["kv_down"], 1, D),
        (attention["kv_up"], 1, C),
        (attention["out"], model.RESIDUAL_SCALE, N * W),
        (experts["gate"], 1, D),
        (experts["down"], model.RESIDUAL_SCALE, G),
    ]
    for value, scale, inputs in expected:
        assert abs(value.std() * math.sqrt(inputs) / scale - 1) < 0.05
    assert (attention["norm"] == 1).all()
    assert not values["moe"]["moe"]["bias"].any()


# --- counts ------------------------------------------------------------------------------------


def test_total_and_active_parameters_are_counted():
    total, active = weights.count(toy())
    others = 16 * 24 + 16 + 512 * 16 + 8 + 24 * 16
    assert total == others + 8 * 16 * 24
    assert active == others + 2 * 16 * 24


def test_parameters_of_a_model_match_a_count_by_hand():
    D, N, Q, C, H, R, W, F, G, E, K = 48, 4, 24, 32, 20, 12, 28, 72, 56, 8, 2
    attention = D + D * Q + Q + Q * N * (H + R) + D * (C + R) + C + C * N * (H + W) + N * W * D
    dense = attention + D + 3 * D * F
    experts, shared = 3 * D * G, 2 * 3 * D * G
    moe = attention + D + D * E + E + shared
    ends = 512 * D + D
    config = config_of(
        (2, 2, 2), q_lora_rank=Q, dense_layers=2, prefix_layers=3, n_shared_experts=2
    )
    total, active = weights.count(model.declare(config))
    assert total == ends + 3 * dense + 4 * (2 * dense + moe + E * experts)
    assert active == ends + 3 * dense + 4 * (2 * dense + moe + K * experts)


# --- gather and reduction -----------------------------------------------------------------------


def values_of(declared, dtype=np.float32):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda w: random.standard_normal(w.shape).astype(dtype), declared)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (8, 1, 1)], ids=str)
def test_gathered_weights_are_complete_along_fsdp_and_sharded_along_other_axes(shape):
    declared, here = toy(), mesh(shape)
    whole = Toy(
        inner=Inner(down=P("tensor", None)),
        matrix=P(None, "tensor"),
        norm=P(None),
        table=P(("pipeline", "tensor"), None),
        expert=P(("fsdp", "tensor"), None, None),
        bias=P(None),
    )

    def local(w):
        # The result of one rank: that of a gather varies by type only.
        first = jax.lax.axis_index("fsdp") == 0
        gathered = weights.gather(declared, w)
        return jax.tree.map(
            lambda w, a: (
                a if w.gathered_dim is None else jax.lax.psum(jnp.where(first, a, 0), "fsdp")
            ),
            declared,
            gathered,
        )

    specs = (weights.specs(declared),)
    run = jax.jit(jax.shard_map(local, mesh=here, in_specs=specs, out_specs=whole))
    values = values_of(declared)
    found = run(put(here, declared, values))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, values))


def test_gradients_of_gathered_bfloat16_weights_are_summed_in_float32():
    here = mesh((8, 1, 1))
    declared = toy().matrix
    # In bfloat16 256 + 1 is 256; the sum of all is 260.
    cotangent = np.float32([256] + [0.5] * 6 + [1])[:, None, None] * np.ones(
        (1, 16, 24), np.float32
    )

    def local(w, cotangent):
        _, vjp = jax.vjp(lambda w: weights.gather(declared, w), w)
        return vjp(weights.vary(cotangent[0].astype(jnp.bfloat16), ("tensor",)))[0]

    run = jax.shard_map(
        local, mesh=here, in_specs=(declared.spec, P("fsdp")), out_specs=declared.spec
    )
    arguments = jnp.zeros((16, 24), jnp.bfloat16), cotangent
    found = jax.jit(run)(*arguments)
    assert found.dtype == jnp.bfloat16
    assert (np.asarray(found, np.float32) == 260).all()
    # A CPU sums bfloat16 in float32 anyway; the program shows what other devices do.
    program = str(jax.make_jaxpr(run)(*arguments))
    assert re.findall(r"(\w+)\[[\d,]*\]\S* = reduce_scatter", program) == ["f32"]


def test_weights_are_cast_except_those_declared_float32():
    declared = toy()
    found = weights.cast(declared, values_of(declared), jnp.bfloat16)
    assert {found.matrix.dtype, found.expert.dtype, found.inner.down.dtype} == {
        jnp.dtype("bfloat16")
    }
    assert found.norm.dtype == jnp.float32


@pytest.mark.parametrize("dim, shape", [(1, (3, 16)), (0, (16, 3)), (1, (3, 16, 5))], ids=str)
def test_each_rank_receives_its_slice_of_a_sum(dim, shape):
    parts = np.random.default_rng(0).integers(-9, 9, (8, *shape)).astype(np.float32)
    cut = P(*("fsdp" if d == dim else None for d in range(len(shape))))

    def local(part):
        return weights._scatter(part[0], dim)

    run = jax.shard_map(local, mesh=mesh((8, 1, 1)), in_specs=P("fsdp"), out_specs=cut)
    np.testing.assert_array_equal(jax.jit(run)(parts), parts.sum(0))


@pytest.mark.parametrize(
    ("ranks", "size", "layouts"),
    [(8, 1024, ["0, 1", "0, 1", "1, 0"]), (8, 1000, ["0, 1"] * 2), (1, 1000, [])],
    ids=["registers full", "not full", "one rank"],
)
def test_a_gradient_is_scattered_in_one_layout_and_returned_in_that_of_its_weight(
    ranks, size, layouts
):
    """Dimensions of [F, D/fsdp] from the fastest-varying: F where it is summed."""
    sizes = {"D": Size(size, "model.hidden_size"), "F": Size(3, "model.intermediate_size")}
    declared = weights.named(weights.declare(Last, sizes))
    mesh = mesh_of(config_of((ranks, 1, 1)))
    over_mesh = jax.shard_map(
        lambda part: weights.reduce_gradients(declared, weights.vary(part), gathered=True),
        mesh=mesh,
        in_specs=P(),
        out_specs=weights.specs(declared),
    )
    part = jax.ShapeDtypeStruct((3, size), jnp.float32)
    text = jax.jit(over_mesh).lower(Last(part)).as_text()
    found = re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[(.*?)\]>", text)
    assert found == layouts


@flax.struct.dataclass
class Last:
    down: jax.Array = weight("F D/fsdp", normal("F"))


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1), (2, 2, 2), (2, 2, 1, 2)], ids=str)
def test_gradients_are_summed_over_every_rank_with_a_partial_sum(shape, gathered):
    """The partial sum of a rank is a power of two, so a sum shows which ranks are in it."""
    declared, here = toy(), mesh(shape)

    def local():
        rank = jnp.zeros((), jnp.int32)
        for axis in MESH_AXES:
            rank = rank * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
        part = jnp.exp2(rank.astype(jnp.float32))

        def parts(w):
            slice_of = [n // math.prod(here.shape[a] for a in c) for n, c in sizes(w)]
            return weights.vary(jnp.full(slice_of, part))

        def sizes(w):
            for size, axes in zip(w.shape, w.dim_axes, strict=True):
                yield size, () if gathered and axes == ("fsdp",) else axes

        return weights.reduce_gradients(declared, jax.tree.map(parts, declared), gathered)

    spec = weights.specs(declared)
    found = jax.jit(jax.shard_map(local, mesh=here, in_specs=(), out_specs=spec))()
    for w, grad in zip(jax.tree.leaves(declared), jax.tree.leaves(found), strict=True):
        scattered = gathered and w.gathered_dim is not None
        own = [a for a in w.axes if not (a == "fsdp" and scattered)]
        for shard in grad.addressable_shards:
            place = dict(zip(MESH_AXES, np.argwhere(here.devices == shard.device)[0], strict=True))
            assert (np.asarray(shard.data) == sum_over(here, place, own)).all(), w.name


def sum_over(here, place, own):
    """Return 2^rank summed over the ranks at `place` along the axes `own`."""
    total = 0
    for rank, position in enumerate(np.ndindex(here.devices.shape)):
        at = dict(zip(MESH_AXES, position, strict=True))
        total += 2**rank if all(at[axis] == place[axis] for axis in own) else 0
    return total
