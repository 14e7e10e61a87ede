"""Training on other meshes than tests/test_training.py and tests/test_muon.py use."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

import checkpoint
import model
import sharded_model
import train
import utils
from common import canonical, config_of, jitted_step, mesh_of, on_mesh
from test_muon import (
    LAYOUTS,
    assert_plan_matches_the_program,
    assert_updates_match_the_reference,
    muon_config,
)
from test_training import MICROBATCHES, assert_trains_as_one_device, batch

OTHERS = ("8x1x1", "2x1x2x2_virtual")


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_trains_as_one_device(name):
    assert_trains_as_one_device(name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OTHERS)
def test_updates_of_muon_match_the_reference_and_the_plan(name, layout):
    assert_updates_match_the_reference(name, layout)
    assert_plan_matches_the_program(name, layout)


def test_momenta_with_different_layouts_in_memory_are_exchanged():
    """XLA for CPUs refused this step, without an error of this code (found by tests/fuzz.py)."""
    widths = {"hidden_size": 16, "intermediate_size": 40, "moe_intermediate_size": 16}
    widths |= {"kv_lora_rank": 24, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
    layers = {"blocks": 2, "dense_layers": 0, "prefix_layers": 2, "n_routed_experts": 12}
    rows = {"microbatches": 1, "global_batch_size": 8, "seq_len": 8}
    config = config_of((2, 2, 1, 2), train=rows, optimizer={"name": "muon"}, **widths, **layers)
    mesh, declared = mesh_of(config), model.declare(config)
    state = train.abstract_state(config, declared, mesh)
    step, s = train.jitted_step(config, declared, mesh), train.abstract_schedule(mesh)
    assert step.lower(state, sharded_model.abstract_batch(config, mesh), s).compile()


# --- five steps with Muon ------------------------------------------------------------------------

STEPS = 5


@functools.cache
def muon_step(name):
    rows = {"microbatches": MICROBATCHES[name], "global_batch_size": 8, "steps": STEPS}
    values = {f"train.{key}": value for key, value in rows.items()} | {"train.remat": "full"}
    values |= {"optimizer.lr": 3e-3, "optimizer.warmup_steps": 1}
    config = utils.changed(muon_config(name, z_loss=1e-3), values)
    return config, mesh_of(config), jitted_step(config, model.declare(config), mesh_of(config))


@functools.cache
def muon_run(name):
    """Return (weights after five steps, state)."""
    config, mesh, step = muon_step(name)
    state = train.initial_state(config, model.declare(config), mesh)
    for number in range(STEPS):
        state, report = step(state, on_mesh(config, mesh, batch(config, number)))
    assert report["skipped"] == 0
    return canonical(config, state.weights), state


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["2x2x2_virtual", "2x1x2x2_virtual"])
def test_five_steps_with_muon_end_at_the_weights_of_one_device(name):
    assert_close(muon_run("1x1x1")[0], muon_run(name)[0])


def test_a_checkpoint_of_muon_restores_onto_another_mesh(tmp_path):
    """Weights, momentum and the next step match those of the saved run. A step that is not finite
    changes neither.
    """
    before, saved_state = muon_run("2x2x2_virtual")
    after, momenta = [], [np.ravel(a) for a in jax.tree.leaves(saved_state.optimizer)]
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 1)) as saved:
        saved.save(STEPS, saved_state, dataclasses.asdict(muon_step("2x2x2_virtual")[0]))
        saved.wait()
        for name in ("2x2x2_virtual", "2x1x2x2_virtual"):
            config, mesh, step = muon_step(name)
            shapes = train.abstract_state(config, model.declare(config), mesh)
            state, good = saved.restore(STEPS, shapes), batch(config, STEPS)
            bad = good | {"loss_weights": np.full_like(good["loss_weights"], np.nan)}
            skipped, _ = step(saved.restore(STEPS, shapes), on_mesh(config, mesh, bad))
            for same in (state, skipped):
                found = canonical(config, same.weights)
                jax.tree.map(np.testing.assert_array_equal, found, before)
                for a, b in zip(jax.tree.leaves(same.optimizer), momenta, strict=True):
                    np.testing.assert_array_equal(np.ravel(a), b)
            state, _ = step(state, on_mesh(config, mesh, good))
            after.append(canonical(config, state.weights))
    assert_close(*after)
