"""Dropless experts: exact under any routing, with few more rows than are chosen.

Letters as in model.py; r rows of tokens, e experts of this rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_case
import model
import utils
from common import check_step, config_of, mesh_of
from planning import hlo

# Added to the balancing bias of each expert, which changes choices and not their weights.
ROUTINGS = {
    "balanced": [0] * 8,
    "all tokens choose two experts": [0, 0, 100, 90, 0, 0, 0, 0],  # of the same rank
    "one expert has no token": [0, 0, -100, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_loss_and_gradients_match_the_reference_under_any_routing(routing):
    config = config_of(
        (2, 1, 2),
        train={"microbatches": 2, "remat": "latents,expert_in"},
        capacity_factor=0.0,
        experts_layout="expert_parallel",
    )
    tree = hf_case.weights(config.model, 3)
    bias = tree["blocks"]["moe"]["moe"]["bias"]
    bias += np.array(ROUTINGS[routing], bias.dtype)
    parts = check_step(config, tree)
    assert (parts["tokens_per_expert"] == 0).any() == (routing != "balanced")


def test_experts_multiply_few_more_rows_than_are_chosen():
    n, D, G, E, K = 2048, 32, 48, 64, 6

    def run(*inputs):
        y_rD = model.local_experts(model.divide_load(n * K / E, E), *inputs)
        return (y_rD**2).sum()  # not linear, so that its gradient needs y

    shapes = [(n, D), (n, K), (n, K), (E, D, 2 * G), (E, G, D)]
    dtypes = [jnp.float32, jnp.int32, *[jnp.float32] * 3]
    inputs = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]
    local = jax.shard_map(run, mesh=mesh_of(config_of()), in_specs=jax.P(), out_specs=jax.P())
    text = jax.jit(jax.grad(local, (0, 2, 3, 4))).lower(*inputs).compile().as_text()
    chosen = 3 * 2 * n * K * 3 * D * G  # three products of each direction
    assert chosen <= hlo.dot_flops(text) <= 1.1 * chosen

    # These FLOPs have no tiles beyond those of an even load, which run in a loop.
    random = np.random.default_rng(0)
    scores = random.normal(size=(n, E)) + 0.5 * random.normal(size=E)
    choice_rK = np.argsort(-scores)[:, :K].astype(np.int32)
    loads = np.bincount(choice_rK.ravel())
    assert loads.max() > 3 * loads.mean()
    load = model.divide_load(n * K / E, E)
    choices = model.sort_choices(jnp.asarray(choice_rK), E, load.batched, load.tile)
    rows = E * load.batched + int(choices.end(load.tiles)) * load.tile
    assert n * K < rows <= 1.2 * n * K


def test_a_tile_is_an_eighth_of_an_even_load_within_bounds():
    for load, rows in [(0.3, 8), (8, 8), (511, 32), (512, 64), (1 << 17, 512)]:
        assert model.divide_load(load, 8).tile == rows


def test_evaluation_is_dropless_by_default():
    assert utils.Model().eval_capacity_factor == 0
