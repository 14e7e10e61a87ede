"""Complete steps of training, and evaluations: see test_collective_order.py."""

import jax
import pytest

import fuzz
import model
import sharded_model
import train
from common import config_of, mesh_of
from optimizer import learning_rates
from test_collective_order import unordered

MUON = {
    "prefix_layers": 2,
    "train": {"microbatches": 1, "global_batch_size": 4},
    "optimizer": {"name": "muon"},
}
DROPLESS = {"prefix_layers": 1, "capacity_factor": 0.0, "train": {"remat": "full"}}
CASES = {
    "muon": config_of((2, 1, 2), gather="layer", **MUON),
    "dropless": config_of((1, 2, 2), 2, "layer", tie_word_embeddings=False, **DROPLESS),
    # The first loop, whose experts gather tokens, does not need the output matrix.
    "dropless, gathered per step": fuzz.config(fuzz.draw_base(93)),
    # The gradient of the last norm is summed over the same ranks as in the last loop, which does
    # not change it.
    "pipeline alone": config_of((1, 4, 1), tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_collective_waits_for_the_loops_before_it(name):
    c = CASES[name]
    mesh, declared = mesh_of(c), model.declare(c)
    state, batch = train.abstract_state(c, declared, mesh), sharded_model.abstract_batch(c, mesh)
    arguments = state, batch, learning_rates(c)
    step = train.jitted_step(c, declared, mesh).lower(*arguments).compile()
    assert not unordered(step.as_text())
    evaluate = jax.jit(sharded_model.evaluate(c, declared, mesh))
    assert not unordered(evaluate.lower(state.weights, batch).compile().as_text())
