"""Predictions against compilers: those recorded in compiled.json, and the one of this machine."""

import dataclasses
import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import hardware
import make_compiled
import model
import pipeline
import sharded_model
import train
import utils
from benchmarks import gpu
from common import RUN, RUN_MESHES, config_of, mesh_of
from optimizer import learning_rates
from planning import cost, hlo, rates, results, trace

V4, H100 = hardware.CHIPS["v4"], hardware.CHIPS["h100"]
RECORDED = make_compiled.recorded()
JAXFORMER = make_compiled.config_of("jaxformer")
ALL_NAMES = ",".join(utils.REMAT_NAMES)
# Together they have all axes, kernels, optimizers and kinds of layers; system/test_planning.py
# compares the others.
COMPARED = [
    "llama-muon-context-8-full-layer v4",
    "jaxformer v4",
    "jaxformer-prefix-untied-gathered-4x2x4 v5p",
    "moe-dropless-full-interleaved v4",
    "small-none-8x1x1 v4",
    "gpu-dense-124m h100",
    "gpu-dense-muon-8x1x1 h100",
    "gpu-moe-names-2x2x2-interleaved h100",
]
BOUNDS = {"memory": 0.1, "time": 0.25}  # the others are exact but for rounding
# Whose kernels take longer than planned: scores in memory, and weights that each layer gathers.
SLOWER = ("gpu-dense-124m-xla", "gpu-moe-full-layer-16x1x1")
SECTIONS = {
    field.name: section
    for section in ("train", "mesh", "fsdp", "model")
    for field in dataclasses.fields(getattr(JAXFORMER, section))
}


def sizes(config, **values):
    """The config with fields of some sections replaced."""
    return utils.changed(config, {f"{SECTIONS[name]}.{name}": v for name, v in values.items()})


def step_of(platform="tpu", **values):
    return cost.Step(sizes(JAXFORMER, **values), platform)


def test_all_programs_are_recorded_in_the_form_that_is_written():
    wanted = {f"{n} {chip}" for n in make_compiled.CASES for chip in make_compiled.chips_of(n)}
    assert set(RECORDED) == wanted and len(wanted) > 50
    assert make_compiled.text_of(RECORDED) == make_compiled.RECORDED.read_text()


def assert_predicted(key):
    name, chip = key.split()
    found = make_compiled.ratios(name, chip, RECORDED[key])
    bounds = BOUNDS | {"time": 0.3} if name in SLOWER else BOUNDS
    assert not {part: r for part, r in found.items() if abs(r - 1) > bounds.get(part, 0.005)}
    config = make_compiled.config_of(name)
    assert math.prod(config.mesh.shape) == 1 or found.keys() - {"memory", "FLOPs", "time"}
    predicted = cost.predict(config, hardware.chip_named(chip))
    assert predicted.model_flops_per_chip == RECORDED[key]["model_flops_per_chip"]


@pytest.mark.parametrize("key", COMPARED)
def test_predictions_match_what_compilers_planned(key):
    assert_predicted(key)


def test_collectives_of_a_v4_and_an_h100_overlap_with_compute():
    """train.compiler_options hides them where there is any compute; GPUs do so by default."""
    every = ("all-gather", "all-to-all", "reduce-scatter")
    for cases, kinds, least in (("jaxformer v4", every[:2], 0.95), ("h100", every, 0.6)):
        found = [r for key in RECORDED if key.endswith(cases) for r in RECORDED[key]["collectives"]]
        for kind in kinds:
            rows = [row for row in found if row["kind"] == kind]
            hidden = sum(row["bytes"] * row["overlapped"] for row in rows)
            assert hidden > least * sum(row["bytes"] for row in rows) > 0


def assert_planned_as_compiled(config, bound):
    mesh, declared = mesh_of(config), model.declare(config)
    state = train.abstract_state(config, declared, mesh)
    batch = sharded_model.abstract_batch(config, mesh)
    step = train.jitted_step(config, declared, mesh)
    text = step.lower(state, batch, learning_rates(config)).compile().as_text()
    predicted = cost.predict(config, None)
    share = pipeline.branch_share(sharded_model.schedule_of(config))
    assert predicted.flops_per_chip == pytest.approx(float(hlo.dot_flops(text, share)), rel=bound)
    ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    compiled = Counter()
    for found, size in hlo.collectives(text, ranks, share).items():
        compiled["+".join(found.axes)] += float(size)
    for axes, size in compiled.items():
        if size > 0.02 * max(compiled.values()):
            assert predicted.collective_bytes_per_chip[axes] == pytest.approx(size, rel=bound), axes


def test_flops_and_traffic_are_those_of_the_compiled_program():
    assert_planned_as_compiled(config_of(*RUN_MESHES["2x2x2_virtual"], **RUN), 0.02)


def kept_bytes(config, kernel):
    """What one block leaves for its backward pass beside weights and data, as jax does it."""

    def visit(run):
        def one_block(x):
            known = run.block_inputs(*[jnp.int32(0)] * 3)
            return jax.tree.leaves(run.block_vjp(known, x)[1])

        return jax.eval_shape(one_block, run.empty_x())

    found = trace.with_executor(config, kernel, sharded_model.remat(config, False), visit)
    return sum(a.size * a.dtype.itemsize for a in found)


def planned_bytes(config, platform):
    step = cost.Step(config, platform)
    return step.held(step.block)


PAIRS = [",".join(utils.REMAT_NAMES[n : n + 2]) for n in range(0, len(utils.REMAT_NAMES), 2)]


@pytest.mark.parametrize(
    "chip, kernel, policies",
    [
        (V4, "splash", ["full", "none", ALL_NAMES, *PAIRS]),
        (H100, "cudnn", ["full", "none", "attention"]),
        (H100, "triton", ["none", "attention"]),
        (H100, "xla", ["none", "attention"]),
    ],
)
def test_a_block_saves_the_residuals_that_jax_saves(chip, kernel, policies):
    for remat in policies:
        config = sizes(JAXFORMER, remat=remat, attention_kernel=kernel)
        planned = planned_bytes(config, hardware.platform_of(chip))
        assert planned == pytest.approx(kept_bytes(config, kernel), rel=0.005), remat


def split_of(config):
    return utils.changed(config, {"pipeline.split_backward": True})


@pytest.mark.parametrize("remat", ["none", "latents,attention"])
def test_what_a_split_backward_pass_saves_is_what_jax_saves(remat):
    config = split_of(config_of((2, 2, 2), train={"remat": remat}))

    def visit(run):
        ring, _ = run.empty_ring(x := run.empty_x())
        return run.empty_waiting(x, ring)[0]

    found = trace.with_executor(config, "xla", sharded_model.remat(config, False), visit)
    parts = cost.predict(config, None).memory
    assert parts["saved for weight tasks"] == sum(a.size * a.dtype.itemsize for a in found)


def test_the_bubble_of_a_split_backward_pass_has_no_products_of_gradients_of_matrices():
    config = config_of((1, 4, 1), n_routed_experts=0)
    flops, by_input = (cost.predict(c, None).flops_per_chip for c in (config, split_of(config)))
    matrices = [w for w in jax.tree.leaves(model.declare(config).blocks) if w.matrix is not None]
    elements = sum(w.size for w in matrices) // 4  # of a rank
    tokens = config.train.global_batch_size // config.train.microbatches * config.train.seq_len
    assert flops - by_input == 3 * 2 * tokens * elements


def novel(w, x_btD, options, position):
    """A recurrence that sends along fsdp and tensor, with names inside of its loop and after it."""
    with jax.named_scope("novel"):
        h_bTD = lax.all_gather(model.rms_norm(x_btD, w.norm, 1e-6), "tensor", axis=1, tiled=True)

        def trip(h_bTD, _):
            h_bTf = jnp.tanh(model.matmul("bTD,Df->bTf", h_bTD, w.gate))
            h_bTf = checkpoint_name(h_bTf, "inside") * model.matmul("bTD,Df->bTf", h_bTD, w.up)
            return model.matmul("bTf,fD->bTD", h_bTf, w.down), None

        h_bTD, _ = lax.scan(trip, h_bTD, None, length=3)
        y_btD = lax.psum_scatter(h_bTD, "tensor", scatter_dimension=1, tiled=True)
        y_BtD = lax.all_gather(y_btD * y_btD, "fsdp", axis=0, tiled=True)
        y_btD = checkpoint_name(y_btD * jnp.sin(y_BtD.sum(0, keepdims=True)), "outside")
    return x_btD + y_btD


def unknown_cost(w, x_btD, options, position):
    products = partial(model.matmul, "btD,Df->btf", x_btD)
    part = lax.cond(position.layer > 1, lambda: products(w.gate), lambda: products(w.up))
    return x_btD + model.matmul("btf,fD->btD", part, w.down)


@pytest.fixture
def with_mlp(monkeypatch):
    """Replace the dense layer, and return a config on two axes with another remat policy."""

    def made(layer, remat):
        monkeypatch.setattr(model, "mlp", layer)
        trace.stage_functions.cache_clear()
        train = {"remat": remat, "microbatches": 2}
        return config_of((2, 1, 2), moe_layers=0, dense_layers=2, train=train)

    yield made
    trace.stage_functions.cache_clear()


@pytest.mark.parametrize("remat", ["none", "full", "inside", "outside,attention"])
def test_a_new_layer_needs_no_change_of_the_planner(remat, with_mlp):
    config = with_mlp(novel, remat)
    assert planned_bytes(config, "cpu") == pytest.approx(kept_bytes(config, "xla"), rel=0.01)
    if remat == "inside":  # it compiles for seconds
        assert_planned_as_compiled(config, 0.005)
    predicted = cost.predict(config, None)
    assert set(predicted.flops["novel"]) == {"forward", "backward", "recomputed", "bubble"}
    assert (predicted.flops["novel"]["recomputed"] > 0) == (remat != "none")
    causes = {(t.cause, t.axes) for t in predicted.traffic}
    assert {("novel", ("fsdp",)), ("novel, backward", ("fsdp",))} <= causes
    shared = cost.predict(config, None, shared=True)  # what it sends grows with fsdp's ranks
    assert shared.collective_bytes_per_chip == predicted.collective_bytes_per_chip


def test_an_operation_of_unknown_cost_is_refused(with_mlp):
    with pytest.raises(ValueError, match="has a cond, whose cost a trace does not show"):
        cost.predict(with_mlp(unknown_cost, "full"), None)


def test_a_program_without_pipeline_or_recomputation_runs_the_model_flops():
    config = sizes(JAXFORMER, fsdp=32, pipeline=1, tensor=1, remat="none", attention_kernel="xla")
    predicted = cost.predict(config, H100)
    assert predicted.flops_per_chip == pytest.approx(predicted.model_flops_per_chip, rel=1e-3)
    assert predicted.bubble == 0
    alone = cost.predict(sizes(config, fsdp=1), V4)
    assert alone.collective_bytes_per_chip == {} and alone.traffic == []
    assert alone.memory["weights"] == 4 * alone.parameters  # at rest they are float32
    wide = cost.predict(sizes(config, fsdp=1, compute_dtype="float32"), V4)
    assert wide.seconds["compute"] == pytest.approx(6 * alone.seconds["compute"])


@pytest.mark.parametrize(
    "chip, computed, again",
    [
        # Of 2 x 2 blocks 3. Beside the gradients twice the scores, and once more the
        # probabilities' gradient: 192 and 64 wide.
        (V4, 3 / 4, (2 * 192 + 64) / (192 + 64)),
        # Of 8 x 8 tiles. Beside the gradients the scores, 192 wide, where values are 64 wide.
        (H100, 36 / 64, 192 / (192 + 64)),
    ],
)
def test_kernels_skip_blocks_above_the_diagonal_and_recompute_scores(chip, computed, again):
    config = sizes(JAXFORMER, fsdp=8, pipeline=1, tensor=1, remat="none")
    plain = sizes(config, attention_kernel="xla")
    xla, own = (cost.predict(c, chip).flops["attention scores"] for c in (plain, config))
    assert own["forward"] == computed * xla["forward"]
    assert own["backward"] == (2 + again) * own["forward"]
    assert xla["backward"] == 2 * xla["forward"] and xla["recomputed"] == 0


# Steps of 8 microbatches on one H100, with scanned layers and without rematerialization: sequences
# of a microbatch, and seconds (docs/measured.md, GPUs). moe_1b had other widths.
MEASURED = {
    "dense_124m": (16, 0.362),
    "dense_1b": (8, 1.069),
    "moe_1b": (8, 0.808),
    "moe_124m": (16, 0.445),
}


def test_predicted_times_are_as_far_from_measured_steps_as_reports_say():
    for name, (sequences, seconds) in MEASURED.items():
        measured = {"layers": "scanned", "microbatches": 8, "global_batch_size": 8 * sequences}
        measured |= {"loss_chunk_tokens": 2048, "capacity_factor": 1.5}
        if name == "moe_1b":
            measured |= {"moe_intermediate_size": 544, "intermediate_size": 2816}
        config = sizes(gpu.config_of(f"{name}-none", toy=False), **measured)
        assert abs(cost.predict(config, H100).step_s / seconds - 1) < rates.ERROR <= 0.25, name
    error = rates.ERROR
    assert f"within {error:.0%} " in rates.accuracy(H100, unrolled=False)
    assert "not measured on a v4" in rates.accuracy(V4, unrolled=False)
    assert "not measured; within" in rates.accuracy(H100, unrolled=True)


def test_parts_sum_to_the_totals():
    p = cost.predict(JAXFORMER, V4)
    assert sum(p.memory.values()) == p.memory_bytes_per_chip
    assert sum(sum(ways.values()) for ways in p.flops.values()) == p.flops_per_chip
    assert sum(p.collective_bytes_per_chip.values()) == sum(t.result_bytes for t in p.traffic)
    assert p.seconds["compute"] == p.flops_per_chip / (rates.COMPUTE * V4.flops)
    assert p.chip_s == p.seconds["compute"] + p.seconds["memory"]
    assert p.chip_s < p.step_s == sum(p.seconds.values())
    per_token = p.mfu_flops_per_token / (p.chips * V4.flops)
    assert p.mfu(p.step_s) == pytest.approx(p.tokens_per_step / p.step_s * per_token)
    least = int(p.memory_bytes_per_chip / 0.85) + 1
    chips = [dataclasses.replace(V4, memory_bytes=size) for size in (least, least - 10)]
    assert [dataclasses.replace(p, chip=chip).fits for chip in chips] == [True, False]


def test_an_unknown_chip_is_planned_as_its_platform_runs_and_gets_no_times():
    p, *others = (cost.predict(JAXFORMER, None, platform) for platform in (None, "gpu9", "tpu"))
    assert [found.attention for found in (p, *others)] == ["xla", "cudnn", "splash"]
    assert cost.predict(JAXFORMER, V4).memory == others[1].memory
    assert p.seconds is p.chip_s is p.step_s is None
    assert "no figures" in p.line()


def test_a_plan_has_scanned_layers_if_unrolled_ones_do_not_fit():
    config, chip = config_of(blocks=3), hardware.CHIPS["h100"]
    needed = cost.predict(config, chip).memory_bytes_per_chip
    for layers, fits, unrolled in (
        ("auto", True, True),
        ("auto", False, False),
        ("unrolled", False, True),
    ):
        one = utils.changed(config, {"train.layers": layers})
        size = int(needed / hardware.MEMORY_SHARE) + (1 if fits else -1000)
        assert cost.predict(one, dataclasses.replace(chip, memory_bytes=size)).unrolled == unrolled


def test_bytes_sent_follow_from_the_size_of_the_result():
    whole = {"all-gather": 7, "all-reduce": 14, "all-to-all": 7, "collective-permute": 8}
    for kind, sent in (whole | {"reduce-scatter": 7}).items():
        result = 1 if kind == "reduce-scatter" else 8
        assert results.Traffic("", ("fsdp",), kind, result, 8).sent_bytes == sent


def test_a_collective_uses_the_links_of_its_ranks():
    step = step_of("gpu", fsdp=2, pipeline=4, tensor=2)
    near = results.Traffic("", ("tensor",), "reduce-scatter", 10**9, 2)
    far = results.Traffic("", ("fsdp", "tensor"), "all-to-all", 10**9, 4)
    assert cost.link_seconds(step, H100, near) == 10**9 / H100.link_bandwidth
    assert cost.link_seconds(step, H100, far) == 10**9 / 2 / H100.network_bandwidth
