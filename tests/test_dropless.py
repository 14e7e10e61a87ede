"""Dropless experts: exact under any routing on every mesh, with few more rows than are chosen.

Letters as in model.py; r rows of tokens, e experts of this rank.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_case
import model
import reference
import sharded_model
import utils
from common import (
    batch_of,
    canonical,
    config_of,
    errors,
    mesh_of,
    mostly_long,
    on_mesh,
    relative_error,
    transformer_of,
)
from planning import hlo

BOUND = 2e-5
MESHES = {  # shape, virtual, layout of experts
    "1x1x1": ((1, 1, 1), 1, "expert_parallel"),
    "8x1x1": ((8, 1, 1), 1, "expert_parallel"),
    "2x1x4": ((2, 1, 4), 1, "expert_parallel"),
    "1x2x4": ((1, 2, 4), 1, "sharded"),
    "2x2x2": ((2, 2, 2), 1, "sharded"),
    "2x2x2_virtual": ((2, 2, 2), 2, "expert_parallel"),
    "2x1x2x2_virtual": ((2, 1, 2, 2), 2, "sharded"),
}
REMAT = {"1x2x4": "full", "2x1x4": "latents,expert_in", "2x2x2_virtual": "hidden,expert_hidden"}
# Added to the balancing bias of each expert, which changes choices and not their weights.
ROUTINGS = {
    "balanced": [0] * 8,
    "all tokens choose two experts": [0, 0, 0, 100, 0, 90, 0, 0],
    "one expert has no token": [0, 0, -100, 0, 0, 0, 0, 0],
}


def dropless_config(name):
    shape, virtual, layout = MESHES[name]
    return config_of(
        shape,
        virtual=virtual,
        train={"microbatches": 2, "remat": REMAT.get(name, "none")},
        capacity_factor=0.0,
        experts_layout=layout,
        n_shared_experts=1,
    )


@functools.cache
def tree_of(routing):
    tree = hf_case.weights(dropless_config("1x1x1").model, 3)
    bias = tree["blocks"]["moe"]["moe"]["bias"]
    bias += np.array(ROUTINGS[routing], bias.dtype)
    return tree


@functools.cache
def step_of(name):
    config = dropless_config(name)
    run = sharded_model.loss_and_gradients(config, model.declare(config), mesh_of(config))
    return jax.jit(lambda w, data: run(w, data, jnp.int32(0)))


@functools.cache
def expected(routing):
    config = dropless_config("1x1x1")
    batch = batch_of(config)
    batch["segments"] = np.zeros_like(batch["segments"])
    run = jax.jit(jax.value_and_grad(reference.loss, has_aux=True), static_argnums=2)
    return run(tree_of(routing), batch, config.model)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", mostly_long(MESHES, "2x1x4", "2x2x2_virtual"))
def test_loss_and_gradients_match_the_reference_under_any_routing(name, routing):
    config, mesh = dropless_config(name), mesh_of(dropless_config(name))
    w = transformer_of(config, mesh, tree_of(routing))
    grads, stats = step_of(name)(w, on_mesh(config, mesh, batch_of(config)))
    (loss, parts), wanted = expected(routing)
    counts = np.asarray(stats.tokens_per_expert).reshape(config.model.blocks, -1)
    assert counts.tolist() == parts["tokens_per_expert"].tolist()
    if routing != "balanced":
        assert (counts == 0).any()
    assert stats.dropped == 0
    assert relative_error(stats.loss, loss) <= BOUND
    worst = {leaf: e for leaf, e in errors(canonical(config, grads), wanted).items() if e > BOUND}
    assert not worst, worst


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("own", [1, 5])
def test_every_choice_of_these_experts_is_in_the_batch_or_in_one_tile(own, rows):
    random = np.random.default_rng(rows)
    skip, tile, K = 5, 8, 3
    choice_rK = np.argsort(random.random((rows, 9)), axis=1)[:, :K].astype(np.int32) - 2
    choices = model.sort_choices(jnp.asarray(choice_rK), own, skip, tile)
    first, end = choices.first_e[:-1], choices.first_e[1:]
    found = list(zip(range(own), np.asarray(choices.read(first, end, skip)), strict=True))
    for i in range(int(choices.end(0)) + 2):  # two tiles after the last are empty
        e, choice_t = choices.tile(jnp.int32(i), tile)
        found.append((int(e), np.asarray(choice_t)))
    numbers = []
    for e, choice_t in found:
        inside = choice_t[choice_t < choice_rK.size]
        assert (choice_rK.reshape(-1)[inside] == e).all()
        assert (np.diff(inside // K) > 0).all()  # tokens, as add_distinct requires
        assert (choice_t[inside.size :] == choice_rK.size).all()  # padding comes last
        numbers += inside.tolist()
    wanted = np.flatnonzero((choice_rK >= 0).reshape(-1) & (choice_rK < own).reshape(-1))
    assert sorted(numbers) == wanted.tolist()


@pytest.mark.parametrize(("E", "K", "most"), [(8, 2, 1.15), (64, 6, 1.1)])
def test_experts_multiply_few_more_rows_than_are_chosen(E, K, most):
    n, D, G = 2048, 32, 48

    def run(*inputs):
        y_rD = model.local_experts(model.divide_load(n * K / E, E), *inputs)
        return (y_rD**2).sum()  # not linear, so that its gradient needs y

    shapes = [(n, D), (n, K), (n, K), (E, D, 2 * G), (E, G, D)]
    dtypes = [jnp.float32, jnp.int32, *[jnp.float32] * 3]
    inputs = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]
    mesh = mesh_of(config_of())
    local = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    text = jax.jit(jax.grad(local, (0, 2, 3, 4))).lower(*inputs).compile().as_text()
    chosen = 3 * 2 * n * K * 3 * D * G  # three products of each direction
    assert chosen <= hlo.dot_flops(text) <= most * chosen


@pytest.mark.parametrize("n", [512, 2048, 8192])
def test_uneven_loads_take_few_more_rows_too(n):
    """The FLOPs above have no tiles beyond those of an even load, which run in a loop."""
    E, K, random = 64, 6, np.random.default_rng(0)
    scores = random.normal(size=(n, E)) + 0.5 * random.normal(size=E)
    choice_rK = np.argsort(-scores)[:, :K].astype(np.int32)
    chosen = np.bincount(choice_rK.ravel())
    assert chosen.max() > 3 * chosen.mean()
    load = model.divide_load(n * K / E, E)
    choices = model.sort_choices(jnp.asarray(choice_rK), E, load.batched, load.tile)
    rows = E * load.batched + int(choices.end(load.tiles)) * load.tile
    assert n * K < rows <= 1.2 * n * K


@pytest.mark.parametrize(("load", "rows"), [(0.3, 8), (8, 8), (511, 32), (512, 64), (1 << 17, 512)])
def test_a_tile_is_an_eighth_of_an_even_load_within_bounds(load, rows):
    assert model.divide_load(load, 8).tile == rows


def test_evaluation_is_dropless_by_default():
    assert utils.Model().eval_capacity_factor == 0
