"""Runs on every mesh: equal losses, bit-identical replicas, no bad step applied.

A step is compiled once per mesh (`runs`) and serves many tests.

Letters: E experts, V vocabulary.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import model
import optimizer
import train
import weights
from benchmarks.common import with_values
from common import (
    RUN,
    RUN_MESHES,
    batch_of,
    canonical,
    config_of,
    jitted_step,
    mesh_of,
    mostly_long,
    on_mesh,
)
from conftest import ROOT
from runtime import cli

STEPS = 20
SEQUENCES = 8  # of 16 tokens
MICROBATCHES = {
    "1x1x1": 2,
    "8x1x1": 1,
    "2x2x2": 4,
    "1x4x2": 8,
    "2x2x2_virtual": 2,
    "2x1x2x2_virtual": 2,
}


class Run(NamedTuple):
    """Twenty steps on one mesh."""

    config: object
    losses: np.ndarray  # [STEPS], as trained on
    norms: np.ndarray  # [STEPS], of gradients, before clipping
    counts: np.ndarray  # [STEPS, blocks, E]
    states: list  # canonical weights after each step
    replicas: list  # (leaf, copies [devices, ...]) after 10 steps
    dropped: int


def run_config(name, bias_speed=0.0):
    """Return the run on a named mesh; only mesh and microbatches differ."""
    shape, virtual = RUN_MESHES[name]
    train = {"microbatches": MICROBATCHES[name], "global_batch_size": SEQUENCES}
    return config_of(
        shape,
        virtual=virtual,
        train=train | {"steps": STEPS, "remat": "full"},
        # A long warmup: Adam's first steps follow the sign of a gradient, even of a rounding error.
        optimizer={"lr": 1e-3, "warmup_steps": STEPS},
        z_loss=1e-3,
        router_bias_update_speed=bias_speed,
        **RUN,
    )


def batch(config, step):
    """Return learnable text: low ids are more likely.

    Of the seeds tried, one whose routing is decisive: no token's second and third best experts are
    within 1e-5 of each other, with the bias and without. Where rounding decides, another mesh may
    choose another expert, and such runs part.
    """
    made = batch_of(config, seed=1000 + step)
    V = config.model.vocab_size
    skewed = {name: made[name].astype(np.int64) ** 3 // V**2 for name in ("tokens", "targets")}
    return made | {name: ids.astype(np.int32) for name, ids in skewed.items()}


@functools.cache
def step_of(name, bias_speed=0.0):
    config, mesh = run_config(name, bias_speed), mesh_of(run_config(name))
    return config, mesh, jitted_step(config, model.declare(config), mesh)


def copies(tree):
    """Yield (name, data of all devices) for each group of devices with equal data."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        groups = {}
        for shard in leaf.addressable_shards:
            groups.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for group in groups.values():
            yield jax.tree_util.keystr(path), group


@functools.cache
def run(name, bias_speed=0.0):
    config, mesh, step = step_of(name, bias_speed)
    state = train.initial_state(config, model.declare(config), mesh)
    report, states, replicas = [], [], []
    for number in range(STEPS):
        state, new = step(state, on_mesh(config, mesh, batch(config, number)))
        report.append(jax.device_get(new))
        states.append(canonical(config, state.weights))
        if number == 9:
            replicas = list(copies((state.weights, state.optimizer)))
    counts = [t["stats"].tokens_per_expert.reshape(config.model.blocks, -1) for t in report]
    return Run(
        config,
        np.array([t["stats"].loss for t in report]),
        np.array([t["grad_norm"] for t in report]),
        np.array(counts),
        states,
        replicas,
        sum(int(t["stats"].dropped) for t in report),
    )


OTHERS = mostly_long(list(RUN_MESHES)[1:], "2x2x2_virtual")


@pytest.mark.slow
def test_the_run_that_compares_meshes_learns_and_drops_nothing():
    one = run("1x1x1")
    assert one.losses[0] - one.losses[-1] > 0.5
    assert one.dropped == 0
    assert one.counts.sum() == STEPS * 4 * SEQUENCES * 16 * 2


@pytest.mark.parametrize("name", OTHERS)
def test_losses_of_a_run_are_the_same_on_every_mesh(name):
    one, other = run("1x1x1"), run(name)
    assert np.abs(one.losses - other.losses).max() <= 1e-4
    np.testing.assert_allclose(one.norms, other.norms, rtol=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_gradient_norm_of_the_first_step_is_that_of_the_whole_model_on_every_mesh(name):
    one, other = run("1x1x1"), run(name)
    np.testing.assert_allclose(one.norms[0], other.norms[0], rtol=2e-5)


def routing_differences(one, other):
    """Return a lower bound of the choices that differ: each changes two counts by one."""
    return int(np.abs(one.counts - other.counts).sum()) // 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["2x2x2_virtual"])
def test_losses_with_the_router_bias_agree_until_routing_differs(name, capsys):
    one, other = run("1x1x1", 1e-3), run(name, 1e-3)
    assert np.abs(one.losses - other.losses).max() <= 1e-3
    differ, choices = routing_differences(one, other), int(one.counts.sum())
    with capsys.disabled():
        print(f"\nrouting decisions that differ, 1x1x1 and {name}: {differ} of {choices}")
    assert differ <= choices // 1000


@pytest.mark.parametrize("name", OTHERS)
def test_every_replica_of_every_weight_has_the_same_bits_after_10_steps(name):
    replicas = run(name).replicas
    assert max(len(group) for _, group in replicas) == 8
    for leaf, group in replicas:
        for copy in group[1:]:
            np.testing.assert_array_equal(group[0], copy, err_msg=leaf)


def test_the_router_bias_moves_by_the_sign_of_mean_load_minus_load():
    one = run("1x1x1", 1e-3)
    bias = np.zeros((4, 8), np.float32)
    for counts, state in zip(one.counts, one.states, strict=True):
        bias = bias + np.float32(1e-3) * np.sign(counts.mean(-1, keepdims=True) - counts).astype(
            np.float32
        )
        np.testing.assert_array_equal(state["blocks"]["moe"]["moe"]["bias"], bias)
    assert np.abs(bias).max() > 5e-3


def test_the_router_bias_does_not_move_if_its_speed_is_0():
    assert not run("2x2x2_virtual").states[-1]["blocks"]["moe"]["moe"]["bias"].any()


# --- one step ----------------------------------------------------------------------------------


def flat(config, state):
    return jax.device_get((canonical(config, state.weights), state.optimizer))


# Each with the program of a test above.
@pytest.mark.parametrize(("name", "bias_speed"), [("1x1x1", 1e-3), ("2x2x2_virtual", 0.0)])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(name, bias_speed):
    config, mesh, step = step_of(name, bias_speed)
    good, bad = batch(config, 0), batch(config, 1)
    bad["loss_weights"] = bad["loss_weights"].copy()
    bad["loss_weights"][5, 3] = np.nan
    state, report = step(
        train.initial_state(config, model.declare(config), mesh), on_mesh(config, mesh, good)
    )
    before = flat(config, state)
    assert (report["skipped"], report["skipped_in_row"]) == (0, 0)
    for number in (1, 2):
        state, report = step(state, on_mesh(config, mesh, bad))
        assert np.isnan(report["stats"].loss)
        assert (report["skipped"], report["skipped_in_row"], state.step) == (
            number,
            number,
            number + 1,
        )
        jax.tree.map(np.testing.assert_array_equal, flat(config, state), before)
    state, report = step(state, on_mesh(config, mesh, good))
    assert (report["skipped"], report["skipped_in_row"], state.skipped, state.skipped_in_row) == (
        2,
        0,
        2,
        0,
    )
    after = canonical(config, state.weights)
    assert not np.array_equal(after["embedding"], before[0]["embedding"])
    bias = after["blocks"]["moe"]["moe"]["bias"] - before[0]["blocks"]["moe"]["moe"]["bias"]
    assert (np.abs(bias).max() > 5e-4) == (bias_speed > 0)


# --- spikes ------------------------------------------------------------------------------------


def detected(factor, norms):
    """Return (applied, spike, median) of train.detect_spike for each norm in turn."""
    ring, found = np.full(train.NORMS, np.inf, np.float32), []
    detect = jax.jit(functools.partial(train.detect_spike, factor))
    for norm in np.asarray(norms, np.float32):
        applied, ring, report = detect(ring, norm, np.isfinite(norm))
        found.append((bool(applied), bool(report["spike"]), float(report["median"])))
    return found, np.asarray(ring)


def test_a_spike_is_a_norm_above_the_factor_times_the_median_of_applied_steps():
    random = np.random.default_rng(0)
    norms = np.exp(random.standard_normal(400)).astype(np.float32)
    norms[[3, 50, 51, 200]] = 1000, np.nan, np.inf, 1e30
    report, ring = detected(2.5, norms)
    kept = []
    for norm, (applied, spike, median) in zip(norms, report, strict=True):
        last = kept[-128:]
        expected = np.median(last) if len(last) >= 16 else np.inf
        assert median == pytest.approx(expected, rel=1e-6)
        assert spike == (np.isfinite(norm) and norm > 2.5 * expected)
        assert applied == (np.isfinite(norm) and not spike)
        if applied:
            kept.append(norm)
    np.testing.assert_array_equal(ring, kept[-128:])
    spikes = [spike for _, spike, _ in report]
    assert report[3][0] and sum(spikes) > 20 and spikes[200] and not spikes[51]


def test_a_norm_that_rises_for_good_is_skipped_until_the_run_stops():
    report, _ = detected(3, [1.0] * 20 + [10.0] * 200)
    assert [applied for applied, _, _ in report] == [True] * 20 + [False] * 200


def test_without_skip_spikes_state_and_report_have_no_norms():
    config, mesh, _ = step_of("1x1x1")
    shapes = train.abstract_state(config, model.declare(config), mesh)
    arrays = jax.tree.leaves((shapes.weights, shapes.optimizer))
    assert shapes.norms is None and len(jax.tree.leaves(shapes)) == len(arrays) + 3
    assert train.detect_spike(0.0, None, np.float32(1), np.True_) == (np.True_, None, {})


@pytest.mark.long
def test_a_spike_changes_only_the_counters_and_skip_spikes_no_other_step():
    config, mesh, _ = step_of("2x2x2")
    on = dataclasses.replace(config.train, skip_spikes=3.0)
    on = dataclasses.replace(config, train=on)
    step = jitted_step(on, model.declare(config), mesh)
    known = run("2x2x2")

    def taken(state, number):
        state, report = step(state, on_mesh(config, mesh, batch(config, number)))
        return state, report, (flat(config, state), np.asarray(state.norms))

    def with_norms(state, norms):
        ring = np.full(train.NORMS, np.inf, np.float32)
        ring[len(ring) - len(norms) :] = norms
        return state.replace(norms=jax.device_put(ring, state.norms.sharding))

    low = np.float32(1e-3)
    state, *_ = taken(train.initial_state(on, model.declare(config), mesh), 0)
    state, report, before = taken(with_norms(state, [low] * 15), 1)  # too few
    assert (report["skipped"], report["spike"], report["median"]) == (0, False, np.inf)
    assert report["grad_norm"] == known.norms[1]
    np.testing.assert_array_equal(before[1][-2:], [low, report["grad_norm"]])
    jax.tree.map(np.testing.assert_array_equal, before[0][0], known.states[1])
    for number in (1, 2):
        state, report, after = taken(state, 2)
        assert (report["skipped"], report["skipped_in_row"], report["spike"]) == (
            number,
            number,
            True,
        )
        assert report["median"] == low and np.isfinite(report["stats"].loss)
        jax.tree.map(np.testing.assert_array_equal, after, before)
    state, report, after = taken(with_norms(state, [report["grad_norm"]] * 16), 2)
    assert (report["skipped"], report["skipped_in_row"], report["spike"]) == (2, 0, False)
    assert state.step == 5


def test_a_step_learns_only_from_weighted_targets_and_is_finite_without_any():
    config, mesh, step = step_of("1x1x1", 1e-3)
    one = batch(config, 0)
    prompts = one["loss_weights"] == 0
    assert 0.1 < prompts.mean() < 0.4
    other = one | {"targets": np.where(prompts, one["targets"] // 2, one["targets"])}
    nothing = one | {"loss_weights": np.zeros_like(one["loss_weights"])}
    after = []
    for made in (one, other, nothing):
        state = train.initial_state(config, model.declare(config), mesh)
        state, report = step(state, on_mesh(config, mesh, made))
        after.append((flat(config, state), report))
    jax.tree.map(np.testing.assert_array_equal, after[0][0], after[1][0])
    (weights, slots), report = after[2]
    assert (report["stats"].cross_entropy, report["stats"].z, report["skipped"]) == (0, 0, 0)
    assert report["stats"].loss == report["stats"].balance > 0
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((weights, slots)))


def updated(config, grads, w):
    """Return updates of the production optimizer, without learning rate, and its state."""
    rule = optimizer.make_optimizer(config, model.declare(config))

    def update(grads, w):
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(grads, rule.init(w), w)

    return jax.jit(update)(grads, w)


def drawn(config, seed=0):
    random = np.random.default_rng(seed)
    draw = lambda w: random.standard_normal(w.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, model.declare(config))


@pytest.mark.parametrize(
    ("matrices", "width", "rate", "report"),
    [
        (
            "adamw",
            48,
            0.1,
            "lr 0.1 is far .* adamw and .*hidden_size 48 .* 0.00057 and 0.057, as .* 0.0057",
        ),
        ("adamw", 1600, 0.01, "lr 0.01 is far .* .* 5.7e-05 and 0.0057, as .* 0.00057"),
        ("muon", 48, 1e-4, "lr 0.0001 is far .* muon .* 0.0016 and 0.16, as --optimizer.lr 0.016"),
        ("muon", 48, 0.15, None),
        ("muon", 1600, 0.15, "is far"),
    ],
)
def test_a_learning_rate_far_outside_the_tuned_range_causes_a_warning_with_the_range(
    matrices, width, rate, report
):
    config = config_of(optimizer={"name": matrices, "lr": rate}, hidden_size=width)
    found = optimizer.learning_rate_warning(config)
    assert re.search(report, found) if report else found == ""


@pytest.mark.parametrize(("rate", "warned"), [(1e-3, True), (1e-4, False)])
def test_a_rate_of_pretraining_causes_a_warning_if_trained_weights_are_tuned(rate, warned):
    config = config_of(optimizer={"name": "adamw", "lr": rate}, hidden_size=576)
    tuned = optimizer.learning_rate_warning(with_values(config, run={"init_from": "runs/a"}))
    assert ("in the range of pretraining" in tuned and "configs/tune.toml" in tuned) == warned


def test_example_configs_have_learning_rates_in_the_tuned_range():
    tune = with_values(cli.load(ROOT / "configs/tune.toml"), run={"init_from": "runs/a"})
    assert optimizer.learning_rate_warning(tune) == ""
    for path in sorted({*(ROOT / "configs").glob("*.toml")} - {ROOT / "configs/tune.toml"}):
        assert optimizer.learning_rate_warning(cli.load(path)) == "", path


@pytest.mark.parametrize("embeddings", [False, True])
def test_weight_decay_applies_to_matrices_and_if_enabled_to_embeddings(embeddings):
    optimizer = {"weight_decay": 0.3, "decay_embeddings": embeddings}
    config = config_of(
        optimizer=optimizer, q_lora_rank=24, prefix_layers=1, tie_word_embeddings=False
    )
    w, declared = drawn(config), weights.named(model.declare(config))
    updates, _ = updated(config, jax.tree.map(np.zeros_like, w), w)
    last_names = {w.name.split(".")[-1] for w in jax.tree.leaves(declared)}
    kept = {"norm", "kv_norm", "bias"} | (set() if embeddings else {"embedding", "output"})
    assert last_names == kept | {"embedding", "output", *MATRICES}
    leaves = map(jax.tree.leaves, (declared, w, updates))
    for declaration, old, update in zip(*leaves, strict=True):
        share = 0 if declaration.name.split(".")[-1] in kept else np.float32(0.3)
        np.testing.assert_array_equal(update, share * old, err_msg=declaration.name)


MATRICES = {"gate", "up", "down", "kv_down", "kv_up", "out", "router"}


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_gradients_are_clipped_to_the_global_norm(clip):
    """Adam's first moment after one step is (1 - beta1) times the clipped gradient."""
    config = config_of(optimizer={"clip_norm": clip})
    grads = drawn(config)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in jax.tree.leaves(grads)))
    _, slots = updated(config, grads, grads)
    (adam,) = (slot for slot in slots if hasattr(slot, "mu"))
    for moment, grad in zip(jax.tree.leaves(adam.mu), jax.tree.leaves(grads), strict=True):
        expected = 0.1 * grad * (clip / norm if clip else 1)
        np.testing.assert_allclose(moment, expected, rtol=1e-5)


# --- memory -------------------------------------------------------------------------------------


def test_peak_memory_is_that_of_the_device_or_else_of_the_compiler():
    plan = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=90,
        alias_size_in_bytes=80,
        temp_size_in_bytes=7,
    )
    step = SimpleNamespace(memory_analysis=lambda: plan)
    for stats, expected in (
        ({"peak_bytes_in_use": 5}, (5, "at its fullest")),
        (None, (117, "planned by the compiler")),
    ):
        device = SimpleNamespace(memory_stats=lambda stats=stats: stats)
        assert train.peak_bytes(SimpleNamespace(local_devices=[device]), step) == expected
