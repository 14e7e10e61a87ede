"""Training on one device and on a mesh with every axis: equal losses, no bad step applied.

A step is compiled once per mesh (`step_of`) and serves many tests.

Letter: V vocabulary.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import depth
import fit
import hardware
import model
import optimizer
import sharded_model
import train
import utils
import weights
from common import RUN, RUN_MESHES, batch_of, canonical, config_of, jitted_step, mesh_of, on_mesh
from planning import cost

STEPS = 20
SEQUENCES = 8  # of 16 tokens
MICROBATCHES = {"1x1x1": 2, "8x1x1": 1, "2x2x2_virtual": 2, "2x1x2x2_virtual": 2, "1x2x1x2x2": 1}
SPEED = 1e-3  # of the router bias


def run_config(name):
    """Return the run on a named mesh, which differs in mesh and microbatches, and with more than
    one device also in detecting spikes, of which there are none.
    """
    shape, virtual = RUN_MESHES[name]
    rows = {"microbatches": MICROBATCHES[name], "global_batch_size": SEQUENCES, "steps": STEPS}
    config = config_of(
        shape,
        virtual=virtual,
        train=rows | {"remat": "full", "skip_spikes": 0.0 if name == "1x1x1" else 9.0},
        # A long warmup: Adam's first steps follow the sign of a gradient, even of a rounding error.
        optimizer={"lr": 1e-3, "warmup_steps": STEPS},
        z_loss=1e-3,
        router_bias_update_speed=SPEED,
        **RUN,
    )
    return utils.changed(config, {"data.seed": 1})  # which the initial weights do not depend on


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
def step_of(name):
    config, mesh = run_config(name), mesh_of(run_config(name))
    return config, mesh, jitted_step(config, model.declare(config), mesh)


def copies(tree):
    """Yield (name, data of all devices) for each group of devices with equal data."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        groups = {}
        for shard in leaf.addressable_shards:
            groups.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for group in groups.values():
            yield jax.tree_util.keystr(path), group


def begun(name):
    """Return (config, the initial state, a function that takes a step on a batch of arrays)."""
    config, mesh, step = step_of(name)
    state = train.initial_state(config, model.declare(config), mesh)
    return config, state, lambda state, arrays: step(state, on_mesh(config, mesh, arrays))


@functools.cache
def run(name):
    """Return (reports of all steps, weights before the first and after each, the last state)."""
    config, state, step = begun(name)
    reports, states = [], [canonical(config, state.weights)]
    for number in range(STEPS):
        state, report = step(state, batch(config, number))
        reports.append(jax.device_get(report))
        states.append(canonical(config, state.weights))
    return reports, states, state


def assert_trains_as_one_device(name):
    """From the same weights, with the same losses; at the end the same bits in every copy."""
    (one, _, _), (other, states, last) = run("1x1x1"), run(name)
    config, mesh, _ = step_of("1x1x1")
    seeded = canonical(config, weights.initialize(model.declare(config), mesh, config.train.seed))
    jax.tree.map(np.testing.assert_array_equal, states[0], seeded)
    losses = [np.array([r["stats"].loss for r in reports]) for reports in (one, other)]
    norms = [np.array([r["grad_norm"] for r in reports]) for reports in (one, other)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(*norms, rtol=1e-3)
    assert norms[0][0] == pytest.approx(norms[1][0], rel=2e-5)
    assert losses[0][0] - losses[0][-1] > 0.5, "the run learns"
    groups = list(copies((last.weights, last.optimizer)))
    assert max(len(group) for _, group in groups) == 8
    for leaf, (first, *others) in groups:
        for copy in others:
            np.testing.assert_array_equal(first, copy, err_msg=leaf)


def test_a_run_on_a_mesh_with_every_axis_trains_as_one_device():
    assert_trains_as_one_device("2x2x2_virtual")


def test_the_router_bias_moves_by_the_sign_of_mean_load_minus_load():
    reports, states, _ = run("2x2x2_virtual")
    bias = np.zeros((4, 8), np.float32)
    for report, state in zip(reports, states[1:], strict=True):
        assert report["stats"].dropped == 0
        counts = report["stats"].tokens_per_expert.reshape(4, 8)
        assert counts.sum() == 4 * SEQUENCES * 16 * 2
        signs = np.sign(counts.mean(-1, keepdims=True) - counts)
        bias = bias + np.float32(SPEED) * signs.astype(np.float32)
        np.testing.assert_array_equal(state["blocks"]["moe"]["moe"]["bias"], bias)
    assert np.abs(bias).max() > 5e-3


def test_each_layer_of_a_pattern_moves_its_own_router_bias():
    """Blocks of two layers with experts that are alike, and a third."""
    types = ("sliding_attention", "sliding_attention", "full_attention")
    fields = {"layer_types": types, "sliding_window": 5, "dense_layers": 0, "num_hidden_layers": 6}
    config = config_of((1, 1, 1), router_bias_update_speed=SPEED, **fields)
    state = train.initial_state(config, model.declare(config), mesh_of(config))
    counts = np.random.default_rng(0).integers(0, 9, (1, 1, 6, 8)).astype(np.int32)
    w = train.balance_router(config, state.weights, jax.numpy.asarray(counts)).blocks
    first = np.asarray(w["moe"].moe.bias).reshape(2, 2, 8)
    bias = np.concatenate([first, np.asarray(w["moe_2"].moe.bias).reshape(2, 1, 8)], axis=1)
    expected = SPEED * np.sign(counts.mean(-1, keepdims=True) - counts)
    np.testing.assert_allclose(bias.reshape(6, 8), expected[0, 0], rtol=1e-6)


# --- one step ----------------------------------------------------------------------------------


def flat(config, state):
    return jax.device_get((canonical(config, state.weights), state.optimizer))


def counters(report):
    return int(report["skipped"]), int(report["skipped_in_row"])


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters():
    config, state, step = begun("2x2x2_virtual")
    good, bad = batch(config, 0), batch(config, 1)
    bad["loss_weights"] = bad["loss_weights"].copy()
    bad["loss_weights"][5, 3] = np.nan
    state, report = step(state, good)
    before = flat(config, state)
    assert counters(report) == (0, 0)
    for number in (1, 2):
        state, report = step(state, bad)
        assert np.isnan(report["stats"].loss)
        assert counters(report) == (number, number) and state.step == number + 1
        jax.tree.map(np.testing.assert_array_equal, flat(config, state), before)
    state, report = step(state, good)
    assert counters(report) == (state.skipped, state.skipped_in_row) == (2, 0)
    after = canonical(config, state.weights)
    assert not np.array_equal(after["embedding"], before[0]["embedding"])
    last = state.weights.last  # a loss that is finite, of which the gradient is not
    last = last.replace(norm=last.norm * np.float32(1e13))
    state = state.replace(weights=state.weights.replace(last=last))
    before = flat(config, state)
    state, report = step(state, good)
    assert np.isfinite(report["stats"].loss) and np.isinf(report["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, flat(config, state), before)


def test_a_step_learns_only_from_weighted_targets_and_is_finite_without_any():
    one = batch(config := run_config("1x1x1"), 0)
    prompts = one["loss_weights"] == 0
    assert 0.1 < prompts.mean() < 0.4
    other = one | {"targets": np.where(prompts, one["targets"] // 2, one["targets"])}
    nothing = one | {"loss_weights": np.zeros_like(one["loss_weights"])}
    after = []
    for made in (one, other, nothing):
        _, state, step = begun("1x1x1")
        state, report = step(state, made)
        after.append(flat(config, state))
    jax.tree.map(np.testing.assert_array_equal, after[0], after[1])
    assert (report["stats"].cross_entropy, report["stats"].z, report["skipped"]) == (0, 0, 0)
    assert report["stats"].loss == report["stats"].balance > 0
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(after[2]))


# --- spikes ------------------------------------------------------------------------------------


def detected(factor, norms):
    """Return (applied, spike, median) of train.detect_spike for each norm in turn."""
    ring, found = np.full(train.NORMS, np.inf, np.float32), []
    detect = jax.jit(functools.partial(train.detect_spike, factor))
    for norm in np.asarray(norms, np.float32):
        applied, ring, report = detect(ring, norm, np.isfinite(norm))
        found.append((bool(applied), bool(report["spike"]), float(report["median"])))
    return found


def test_a_spike_is_a_norm_above_the_factor_times_the_median_of_applied_steps():
    norms = np.exp(np.random.default_rng(0).standard_normal(400)).astype(np.float32)
    norms[[3, 50, 51, 200]] = 1000, np.nan, np.inf, 1e30
    found, kept = detected(2.5, norms), []
    for norm, (applied, spike, median) in zip(norms, found, strict=True):
        last = kept[-128:]
        expected = np.median(last) if len(last) >= 16 else np.inf
        assert median == pytest.approx(expected, rel=1e-6)
        assert spike == (np.isfinite(norm) and norm > 2.5 * expected)
        assert applied == (np.isfinite(norm) and not spike)
        kept += [norm] * applied
    spikes = [spike for _, spike, _ in found]
    assert found[3][0] and sum(spikes) > 20 and spikes[200] and not spikes[51]
    rising = detected(3, [1.0] * 20 + [10.0] * 200)  # for good: until the run stops
    assert [applied for applied, _, _ in rising] == [True] * 20 + [False] * 200


def test_a_spike_changes_only_the_counters():
    config, state, step = begun("2x2x2_virtual")

    def taken(state, norms):
        ring = np.full(train.NORMS, np.inf, np.float32)
        ring[len(ring) - len(norms) :] = norms
        state = state.replace(norms=jax.device_put(ring, state.norms.sharding))
        state, report = step(state, batch(config, 0))
        return state, report, flat(config, state)

    low = np.float32(1e-3)
    state, report, before = taken(state, [low] * 15)  # too few
    assert (counters(report), report["spike"], report["median"]) == ((0, 0), False, np.inf)
    np.testing.assert_array_equal(state.norms[-2:], [low, report["grad_norm"]])
    for number in (1, 2):
        state, report, after = taken(state, [low] * 16)
        assert (counters(report), report["spike"], report["median"]) == ((number,) * 2, True, low)
        assert np.isfinite(report["stats"].loss) and (state.norms[-16:] == low).all()
        jax.tree.map(np.testing.assert_array_equal, after, before)
    state, report, _ = taken(state, [report["grad_norm"]] * 16)
    assert (counters(report), report["spike"], state.step) == ((2, 0), False, 4)


# --- AdamW and its learning rate -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "rate", "source", "report"),
    [
        ("adamw", 48, 0.2, "", "lr 0.2 is far .* adamw .*size 48 .* between 0.00073 and 0.073"),
        ("muon", 48, 1e-4, "", "lr 0.0001 is far .* muon .* 0.0043 and 0.43, as .*lr 0.043"),
        ("muon", 1600, 0.15, "", "is far"),
        ("lion", 48, 1e9, "", None),  # has no tuned rate
        ("adamw", 576, 1e-3, "runs/a", "in the range of pretraining.*configs/tune.toml"),
        ("adamw", 576, 1e-4, "runs/a", None),
    ],
)  # fmt: skip
def test_a_learning_rate_far_outside_the_tuned_range_causes_a_warning(
    name, width, rate, source, report
):
    tuned = {"steps": depth.TUNED_STEPS, "global_batch_size": depth.TUNED_BATCH // 16}
    config = config_of(optimizer={"name": name, "lr": rate}, hidden_size=width, train=tuned)
    found = optimizer.learning_rate_warning(utils.changed(config, {"run.init_from": source}))
    assert re.search(report, found) if report else found == ""


@pytest.mark.parametrize(("clip", "embeddings"), [(0.5, False), (0.0, True)])
def test_adamw_is_that_of_its_paper(clip, embeddings):
    """arXiv:1711.05101, algorithm 2, after clipping by the global norm; two updates."""
    options = {"beta1": 0.8, "beta2": 0.7, "epsilon": 1e-3, "weight_decay": 0.05}
    config = config_of(
        optimizer=options | {"clip_norm": clip, "decay_embeddings": embeddings},
        q_lora_rank=24,
        prefix_layers=1,
        tie_word_embeddings=False,
    )
    declared, random = model.declare(config), np.random.default_rng(0)
    trained = weights.trained(declared, declared)
    w, *grads = (
        jax.tree.map(lambda d: random.normal(size=d.shape).astype(np.float32), trained)
        for _ in range(3)
    )
    names = [d.name.split(".")[-1] for d in jax.tree.leaves(trained)]
    fixed = {"norm", "kv_norm"} | (set() if embeddings else {"embedding", "output"})
    matrices = {"gate", "up", "down", "kv_down", "kv_up", "out", "router"}
    assert set(names) == fixed | matrices | {"embedding", "output"}
    rule = optimizer.make_optimizer(config, declared, None)
    apply, state, moments, squares = jax.jit(rule.update), rule.init(w), 0.0, 0.0
    for number, grad in enumerate(grads, 1):
        with jax.numpy_dtype_promotion("standard"):
            found, state = apply(grad, state, w)
        leaves = [leaf.astype(np.float64) for leaf in jax.tree.leaves(grad)]
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
        share = min(1, clip / norm) if clip else 1
        clipped = np.array([leaf * share for leaf in leaves], object)
        moments = 0.8 * moments + 0.2 * clipped
        squares = 0.7 * squares + 0.3 * clipped**2
        leaves = jax.tree.leaves(found), moments, squares, jax.tree.leaves(w), names
        for update, m, v, weight, name in zip(*leaves, strict=True):
            decayed = 0.0 if name in fixed else 0.05
            adam = (m / (1 - 0.8**number)) / (np.sqrt(v / (1 - 0.7**number)) + 1e-3)
            np.testing.assert_allclose(
                update, adam + decayed * weight, rtol=2e-4, atol=1e-5, err_msg=name
            )


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "fits", "scanned"),
    [("auto", True, False), ("auto", False, True), ("unrolled", False, False)],
)
def test_layers_are_scanned_if_the_unrolled_step_does_not_fit(
    layers, fits, scanned, monkeypatch, capsys
):
    config = utils.changed(config_of(blocks=3), {"train.layers": layers})
    declared, mesh = model.declare(config), mesh_of(config)
    chip = dataclasses.replace(hardware.CHIPS["h100"], memory_bytes=2**40 if fits else 2**10)
    monkeypatch.setattr(hardware, "chip_of_kind", lambda kind: chip)
    compiled = []  # a stand-in for the compiled step has the memory that its compiler planned
    plan = SimpleNamespace(argument_size_in_bytes=2**20, temp_size_in_bytes=0)
    plan.output_size_in_bytes = plan.alias_size_in_bytes = 0
    step = SimpleNamespace(memory_analysis=lambda: plan)
    jitted = SimpleNamespace(lower=lambda: None)
    monkeypatch.setattr(train, "jitted_step", lambda one, *_: compiled.append(one) or jitted)
    monkeypatch.setattr(train.errors, "compile_lowered", lambda _: step)
    assert train.compile_step(config, declared, mesh) is step
    assert sharded_model.is_unrolled(compiled[-1], "cpu") != scanned
    report = "needs 0.0 GiB of 0.0 per device, so the layers are scanned"
    assert (report in capsys.readouterr().out) == scanned


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mesh.pipeline": 1}, "bubble of a pipeline. Use --mesh.pipeline 2 or more"),
        ({"train.remat": "full"}, "keeps what remat recomputes. Use --train.remat none or names"),
        ({"fsdp.gather": "layer"}, "delays what a layer reduces. Use --fsdp.gather step"),
        ({"model.capacity_factor": 0.0}, "dropless experts.* Use --model.capacity_factor 1.5"),
        ({"model.matmul_dtype": "float8"}, "has no FP8. Use --model.matmul_dtype compute"),
    ],
)
def test_a_backward_pass_that_cannot_be_split_is_refused(values, message):
    config = utils.changed(config_of((2, 2, 1)), {"pipeline.split_backward": True})
    sharded_model.check_split(config)
    config = utils.changed(config, values)
    for refuse in (
        lambda: sharded_model.loss_and_gradients(config, model.declare(config), mesh_of(config)),
        lambda: cost.predict(config, None),
    ):
        with pytest.raises(utils.ConfigError, match=f"^--pipeline.split_backward .*{message}"):
            refuse()
    sharded_model.check_split(utils.changed(config, {"pipeline.split_backward": False}))


def test_unrolled_layers_are_refused_in_a_pipeline():
    config = utils.changed(config_of((1, 2, 1), blocks=2), {"train.layers": "unrolled"})
    assert "Use --mesh.pipeline 1 --mesh.virtual 1, or" in fit.why_not(config)
