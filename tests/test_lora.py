"""Adapters and a base in 4 bits: a sharded step beside the merged model on one device, and runs."""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import experts
import hf_case
import lora
import matrix
import model
import reference
import sharded_model
import train
import utils
import weights
from common import (
    batch_of,
    config_of,
    jitted_step,
    mesh_of,
    on_mesh,
    relative_error,
    step_of,
    transformer_of,
)
from utils import ConfigError

RANK, ALPHA, BOUND = 3, 6.0, 2e-5


def adapted(config, base="float32", targets=("attention", "mlp", "experts")):
    rule = {"rank": RANK, "alpha": ALPHA, "targets": targets, "base": base}
    return utils.changed(config, {f"lora.{name}": value for name, value in rule.items()})


def path_of(path):
    return jax.tree_util.keystr(path, simple=True, separator=".")


def by_name(tree):
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def merged(tree, adapters, scale=ALPHA / RANK):
    """Return a canonical tree with the change of each matrix, by its name, added."""

    def one(path, w):
        if (name := path_of(path)) not in adapters:
            return w
        a, b = adapters[name]
        rank, rows = a.shape[-1], 2 if name.endswith(".out") else 1
        batch = a.ndim - rows - 1
        a = a.reshape(*a.shape[:batch], -1, rank)
        b = b.reshape(*b.shape[:batch], rank, -1)
        change = jnp.einsum("...ir,...ro->...io", a, b, precision="highest")
        return w + scale * change.reshape(w.shape)

    return jax.tree_util.tree_map_with_path(one, tree)


def canonical_name(name):
    return name.removeprefix("first.").removesuffix(".a").removesuffix(".b")


def weights_of(config, tree):
    """Return weights of a config with adapters, on its mesh, and the adapters by name.

    tree  canonical, of the base
    """
    mesh, declared, random = mesh_of(config), model.declare(config), np.random.default_rng(7)
    plain = transformer_of(utils.changed(config, {"lora.rank": 0}), mesh, tree)
    drawn = {}

    def part(w):
        a = drawn[w.name] = random.standard_normal(w.shape).astype(np.float32) * 0.1
        return jax.device_put(a, jax.NamedSharding(mesh, w.spec))

    def one(w, base):
        if isinstance(w, matrix.Adapted):
            return matrix.Adapted(frozen(w.base, base), part(w.a), part(w.b), w.scale)
        return frozen(w, base)

    def frozen(w, base):
        if not isinstance(w, matrix.Quantized):
            return base.astype(w.dtype)
        values = lora.quantize(np.asarray(base))
        layouts = (jax.NamedSharding(mesh, leaf.spec) for leaf in (w.codes, w.scales))
        return matrix.Quantized(*map(jax.device_put, values, layouts))

    w = jax.tree.map(one, declared, plain, is_leaf=matrix.is_matrix)
    return w, in_pairs(drawn)


def in_pairs(arrays):
    """Return [A, B] in the canonical order of blocks, by the name of their matrix, from by_name."""
    found = {}
    for name, a in arrays.items():
        a = a.reshape(-1, *a.shape[3:]) if name.startswith("blocks.") else a
        found.setdefault(canonical_name(name), []).append(np.asarray(a))
    return found


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 36,
}
CASES = {
    "one device, unrolled": config_of(
        blocks=2, prefix_layers=1, q_lora_rank=16, train={"layers": "unrolled"}
    ),
    "interleaved, tiles": config_of(
        (2, 2, 2), virtual=2, prefix_layers=1, capacity_factor=0.0, train={"microbatches": 4}
    ),
    "gather of each layer": config_of(
        (2, 1, 2), blocks=2, gather="layer", experts_layout="sharded", tie_word_embeddings=False,
        train={"remat": "full"},
    ),
    "heads of several ranks, bfloat16": config_of(
        (2, 1, 4), blocks=2, attention="gqa", num_key_value_heads=2, head_dim=16,
        attention_bias=True, capacity_factor=0.0,
    ),
    "nf4": config_of((2, 2, 2), blocks=2, n_shared_experts=2, **WIDE),
    "nf4, each layer": config_of(
        (2, 1, 2), blocks=2, gather="layer", capacity_factor=0.0, **WIDE
    ),
}  # fmt: skip


@functools.cache
def tree_of(fields):
    return hf_case.weights(fields, seed=3)


@pytest.mark.parametrize("name", CASES)
def test_a_step_matches_the_merged_model_on_one_device(name):
    base = next((base for base in ("nf4", "bfloat16") if base in name), "float32")
    config = adapted(CASES[name], base)
    tree, batch = tree_of(config.model), batch_of(config)
    w, adapters = weights_of(config, tree)
    grads, stats = step_of(config)(w, on_mesh(config, mesh_of(config), batch))
    batch["segments"] = np.zeros_like(batch["segments"])
    tree = as_stored(config, tree)

    def loss(adapters):
        return reference.loss(merged(tree, adapters), batch, config.model)[0]

    expected_loss, expected = jax.value_and_grad(loss)(adapters)
    assert relative_error(stats.loss, expected_loss) <= BOUND
    found = in_pairs(by_name(grads))
    assert found.keys() == expected.keys(), "only adapters have gradients"
    for path, pair in expected.items():
        for mine, other in zip(found[path], pair, strict=True):
            assert relative_error(mine, other) <= BOUND, path


def as_stored(config, tree):
    """Return a canonical tree with the values that it has in --lora.base."""
    plain = model.declare(utils.changed(config, {"lora.rank": 0}))
    matrices = {canonical_name(w.name) for w in jax.tree.leaves(plain) if w.matrix}

    def one(path, w):
        name = path_of(path)
        if config.lora.base == "nf4" and name in matrices and w.shape[-1] % 16 == 0:
            return nearest(w)
        kept = "norm", "norm_after", ".bias", "router", "router_bias", "sinks"  # float32
        kept = config.lora.base == "float32" or name.endswith(kept)
        return w if kept else np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32)

    return jax.tree_util.tree_map_with_path(one, tree)


def nearest(w):
    """Return the nearest numbers of NF4, by definition: slow."""
    block = next(n for n in (64, 32, 16) if w.shape[-1] % n == 0)
    blocks = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, block)
    scale = np.asarray(jnp.asarray(np.abs(blocks).max(-1, keepdims=True), jnp.bfloat16), np.float32)
    numbers = scale[..., None] * matrix.NF4
    choice = np.abs(blocks[..., None] - numbers).argmin(-1)[..., None]
    return np.take_along_axis(numbers, choice, -1)[..., 0].reshape(w.shape)


def test_the_numbers_of_four_bits_are_quantiles_of_a_normal_distribution():
    """Eight quantiles from 0 up and seven down, evenly spaced in probability up to OFFSET, over
    the largest (arXiv:2305.14314, section 3)."""
    offset = 0.9677083
    quantile = statistics.NormalDist().inv_cdf
    up = [quantile(p) for p in np.linspace(0.5, offset, 9)]
    down = [-quantile(p) for p in np.linspace(0.5, offset, 8)]
    expected = np.unique([*up, *down]) / up[-1]
    assert np.abs(matrix.NF4 - expected).max() < 1e-5


def test_numbers_in_four_bits_are_the_nearest():
    w = np.random.default_rng(0).standard_normal((3, 5, 192)).astype(np.float32)
    w[0, 0, :64] = 0
    codes, scales = lora.quantize(w)
    assert codes.dtype == np.uint8 and codes.shape == (3, 5, 96) and scales.shape == (3, 5, 3)
    found = np.asarray(matrix.Quantized(*map(jnp.asarray, (codes, scales))).expanded(jnp.float32))
    assert np.array_equal(found, nearest(w))


class Stored:
    """An array of a checkpoint, as MergedArray reads it."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def parts(self, dims):
        for index in np.ndindex(self.shape[:dims]):
            yield index, self.values[index]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_arrays_are_merged_with_the_values_that_were_multiplied(dtype):
    random = np.random.default_rng(0)
    w, a, b = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((3, 2, 5, 64), (3, 2, 5, RANK), (3, RANK, 64))
    )
    w32 = {"nf4": nearest, "float32": np.asarray}.get(dtype, lambda w: w.astype(dtype))(w)
    change = np.einsum("ldhr,lro->ldho", a, b)
    expected = w32.astype(np.float32) + 0.5 * change
    found = lora.MergedArray(Stored(w), dtype, 0.5, Stored(a), Stored(b))
    assert np.allclose(found.whole(), expected, atol=1e-5)
    for index, values in found.parts(1):
        assert np.allclose(values, expected[index], atol=1e-5)


@pytest.mark.parametrize(
    ("target", "parts"),
    [("attention", {"attention"}), ("mlp", {"mlp", "shared"}), ("experts", {"experts"})],
)
def test_the_targets_alone_have_adapters_that_change_nothing_at_first(target, parts):
    config = adapted(config_of(blocks=1, dense_layers=1, n_shared_experts=1), targets=(target,))
    declared = model.declare(config)
    w = weights.initialize(declared, mesh_of(config), 0)
    found = jax.tree.leaves(w, is_leaf=matrix.is_matrix)
    adapters = [w for w in found if isinstance(w, matrix.Adapted)]
    assert all(np.asarray(w.a).any() and not np.asarray(w.b).any() for w in adapters)
    names = [w.name for w in jax.tree.leaves(weights.trained(declared, declared))]
    matrices = {w.name for w in jax.tree.leaves(declared) if w.matrix}
    assert {name[: -len(".a")] for name in names} == {
        name for name in matrices if parts & {*name.split(".")}
    }


def test_targets_that_are_unknown_or_not_there_are_refused():
    dense = config_of(moe_layers=0, dense_layers=1)
    with pytest.raises(ConfigError, match=r"targets experts: the model has no such .*attention"):
        model.declare(adapted(dense))
    with pytest.raises(
        ConfigError, match=r"targets q_proj: the model has no such.* attention mlp\."
    ):
        model.declare(adapted(dense, targets=("q_proj",)))


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_what_is_not_trained_has_neither_gradients_nor_state_of_the_optimizer(layers):
    sizes = {"hidden_size": 256, "capacity_factor": 0.0}
    plain = config_of(
        blocks=2, train={"layers": layers, "global_batch_size": 2, "microbatches": 2}, **sizes
    )
    config, mesh = adapted(plain), mesh_of(plain)

    def needed(config):
        declared = model.declare(config)
        shapes = train.abstract_state(config, declared, mesh)
        own, _ = weights.count(weights.trained(declared, declared))
        assert sum(a.size for a in jax.tree.leaves(shapes.optimizer) if a.ndim) == 2 * own
        run = jax.jit(sharded_model.loss_and_gradients(config, declared, mesh))
        batch = sharded_model.abstract_batch(config, mesh)
        memory = run.lower(shapes.weights, batch, jnp.int32(0)).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    frozen = 4 * weights.count(model.declare(plain))[0]
    assert needed(plain) - needed(config) > 0.8 * frozen  # the rest is for adapters


def test_adapters_of_experts_in_grouped_products_are_those_in_tiles():
    """Also in later passes, which an uneven load has."""
    random = np.random.default_rng(0)
    tokens, D, G, E = 96, 32, 16, 4
    m = dataclasses.replace(utils.Model(), n_routed_experts=E, num_experts_per_tok=2)

    def matrix_of(rows, columns):
        base, a, b = (
            jnp.asarray(random.standard_normal(shape), jnp.float32)
            for shape in ((E, rows, columns), (E, rows, RANK), (E, RANK, columns))
        )
        return matrix.Adapted(base, a, b, 0.5)

    w = experts.Experts(False, matrix_of(D, G), matrix_of(D, G), matrix_of(G, D), None, None)
    h = jnp.asarray(random.standard_normal((1, tokens, D)), jnp.float32)
    first = random.choice(E, (1, tokens), p=[0.9, 0.04, 0.03, 0.03])
    choice = jnp.asarray(np.stack([first, (first + 1) % E], -1), jnp.int32)
    share = jnp.asarray(random.random((1, tokens, 2)), jnp.float32)

    def gradients(kernel):
        def local(w, h, choice, share):
            return dropless.dropless_experts(w, h, (choice, share), m, kernel)

        spec = jax.P(utils.BATCH_AXES, utils.SEQUENCE_AXES)
        out = jax.P((*utils.BATCH_AXES, "pipeline"), utils.SEQUENCE_AXES)
        run = jax.shard_map(
            local, mesh=mesh_of(config_of()), in_specs=(jax.P(), *[spec] * 3), out_specs=out
        )
        loss = lambda *args: jnp.sum(jnp.sin(run(*args)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 3), allow_int=True))(
            w, h, choice, share
        )

    with jax.default_matmul_precision("highest"):
        found, expected = gradients("triton"), gradients("tiles")
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(mine, other) < 1e-5
    assert not np.asarray(found[1][0].gate.base).any()


def test_a_step_changes_the_adapters_alone():
    config = adapted(config_of((2, 1, 2), blocks=2, router_bias_update_speed=0.1), "bfloat16")
    declared, mesh = model.declare(config), mesh_of(config)
    w, _ = weights_of(config, tree_of(config.model))
    before = jax.device_get(w)
    state = train.initial_state(config, declared, mesh, w)
    step = jitted_step(config, declared, mesh)
    after = jax.device_get(step(state, on_mesh(config, mesh, batch_of(config)))[0].weights)
    for d, one, other in zip(*map(jax.tree.leaves, (declared, before, after)), strict=True):
        assert np.array_equal(one, other) != d.trained, d.name
