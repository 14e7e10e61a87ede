"""Training on other meshes than tests/test_training.py and tests/test_muon.py use."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

import checkpoint
import model
import pipeline
import sharded_model
import train
import utils
import weights
from common import (
    OPTIMIZED,
    batch_of,
    canonical,
    config_of,
    jitted_step,
    mesh_of,
    on_mesh,
)
from optimizer import learning_rates
from planning import cost, hlo
from test_muon import (
    LAYOUTS,
    assert_plan_matches_the_program,
    assert_updates_match_the_reference,
    muon_config,
)
from test_training import MICROBATCHES, assert_trains_as_one_device, batch

OTHERS = ("8x1x1", "2x1x2x2_virtual", "1x2x1x2x2")


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
    step, s = train.jitted_step(config, declared, mesh), learning_rates(config)
    assert step.lower(state, sharded_model.abstract_batch(config, mesh), s).compile()


GQA = {"attention": "gqa", "num_key_value_heads": 2, "n_routed_experts": 0}
NAMES = {"train": {"remat": "latents,attention,hidden"}}


@pytest.mark.parametrize(
    ("shape", "virtual", "fields"),
    [((1, 4, 1), 1, {}), ((2, 2, 2), 1, NAMES), ((1, 4, 2), 2, GQA | {"blocks": 8})],
)
def test_a_split_backward_pass_gives_the_same_bits(shape, virtual, fields):
    whole = config_of(shape, virtual, **fields)
    mesh, declared, found = mesh_of(whole), model.declare(whole), []
    w, data = weights.initialize(declared, mesh, 0), on_mesh(whole, mesh, batch_of(whole))
    for split in (False, True):
        config = utils.changed(whole, {"pipeline.split_backward": split})
        program = jax.jit(sharded_model.loss_and_gradients(config, declared, mesh))
        compiled = program.lower(w, data, np.int32(0)).compile(OPTIMIZED)
        found.append(compiled(w, data, np.int32(0)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    flops = hlo.dot_flops(
        compiled.as_text(), pipeline.branch_share(sharded_model.schedule_of(config))
    )
    planned = cost.Step(config, "cpu")
    assert sum(sum(kinds.values()) for kinds in cost.flops_by_part(planned).values()) == flops


def muon_run(name):
    """Return (config, mesh, the state after five steps with Muon)."""
    rows = {"microbatches": MICROBATCHES[name], "global_batch_size": 8, "steps": 5}
    values = {f"train.{key}": value for key, value in rows.items()} | {"train.remat": "full"}
    values |= {"optimizer.lr": 3e-3, "optimizer.warmup_steps": 1}
    config = utils.changed(muon_config(name, z_loss=1e-3), values)
    declared, mesh = model.declare(config), mesh_of(config)
    step, state = jitted_step(config, declared, mesh), train.initial_state(config, declared, mesh)
    for number in range(5):
        state, report = step(state, on_mesh(config, mesh, batch(config, number)))
    assert report["skipped"] == 0
    return config, mesh, state


def test_five_steps_with_muon_end_at_the_weights_of_one_device_and_restore_there(tmp_path):
    (config, _, state), (one, mesh, expected) = muon_run("2x1x2x2_virtual"), muon_run("1x1x1")
    trained = [canonical(config, s.weights) for s in (state, expected)]
    for a, b in zip(*map(jax.tree.leaves, trained), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, 1)) as saved:
        saved.save(5, state, dataclasses.asdict(config))
        saved.wait()
        restored = saved.restore(5, train.abstract_state(one, model.declare(one), mesh))
    jax.tree.map(np.testing.assert_array_equal, canonical(one, restored.weights), trained[0])
    for a, b in zip(*(jax.tree.leaves(s.optimizer) for s in (restored, state)), strict=True):
        np.testing.assert_array_equal(np.ravel(a), np.ravel(b))
