"""Predictions against compilers: those recorded in compiled.json, and the one of this machine."""

import dataclasses
import importlib.metadata
import importlib.util
import math
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
from common import config_of, mesh_of, mostly_long
from hf_case import model_with
from planning import compiler, cost, fusion, hlo, results, targets, trace

V4, H100 = hardware.CHIPS["v4"], hardware.CHIPS["h100"]
RECORDED = make_compiled.recorded()
LIBTPU = importlib.util.find_spec("libtpu") is not None


# --- TPU and GPU programs -------------------------------------------------------------------------


def test_steps_are_recorded_for_two_tpus_and_a_gpu():
    both, gpu = make_compiled.CASES, make_compiled.GPU_CASES
    wanted = {f"{name} {chip}" for name in both for chip in ("v4", "v5p")}
    assert set(RECORDED) == wanted | {f"{name} h100" for name in gpu}
    assert len(both) >= 12 and len(gpu) >= 6


@pytest.mark.parametrize("key", RECORDED)
def test_predictions_match_what_compilers_planned(key):
    name, chip = key.split()
    found = make_compiled.ratios(name, chip, RECORDED[key])
    bounds = {"memory": 0.10, "memory traffic": 0.15}
    assert not {p: r for p, r in found.items() if abs(r - 1) > bounds.get(p, 0.005)}
    one = math.prod(make_compiled.config_of(name)[1].mesh.shape) == 1
    assert one or len(found) > 2  # some axis carries traffic
    predicted = cost.predict(make_compiled.config_of(name)[1], hardware.chip_named(chip))
    assert predicted.model_flops_per_chip == RECORDED[key]["model_flops_per_chip"]


@pytest.mark.long
@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["small-none-8x1x1", "dense-full-8x1x4"])
def test_libtpu_still_plans_what_is_recorded(name):
    topology, config = make_compiled.config_of(name)
    compiled, _ = compiler.compile_step(config, V4, topology)
    before = RECORDED[f"{name} v4"]
    assert compiled.flops_per_chip == pytest.approx(before["flops_per_chip"], rel=0.001)
    for axes, size in before["collective_bytes_per_chip"].items():
        assert compiled.collective_bytes_per_chip[axes] == pytest.approx(size, rel=0.02)
    if importlib.metadata.version("libtpu") == targets.LIBTPU:
        assert compiled.memory_bytes_per_chip == pytest.approx(
            before["memory_bytes_per_chip"], rel=0.02
        )
    assert compiled.model_flops_per_chip == before["model_flops_per_chip"]
    gathers = [row for row in compiled.collectives if row["kind"] == "all-gather"]
    assert any(row["asynchronous"] for row in gathers), "see train.compiler_options"


@pytest.mark.skipif(bool(targets.missing(H100)), reason="no compiler for GPUs is installed")
def test_the_compiler_for_gpus_still_plans_what_is_recorded():
    name = "gpu-dense-124m"
    compiled, text = compiler.compile_step(make_compiled.config_of(name)[1], H100, "")
    before = RECORDED[f"{name} h100"]
    for what in ("flops_per_chip", "memory_bytes_per_chip", "memory_traffic_bytes"):
        assert getattr(compiled, what) == pytest.approx(before[what], rel=0.02), what
    assert compiled.custom_calls == {} and "__cudnn$fmhaSoftmaxBackward" in text


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
def test_a_v4_overlaps_gathers_and_exchanges(kind):
    """train.compiler_options hides collectives behind compute where there is any."""

    def share(name, how):
        rows = [r for r in RECORDED[f"{name} v4"]["collectives"] if r["kind"] == kind]
        return sum(r["bytes"] for r in rows if r[how]) / max(1, sum(r["bytes"] for r in rows))

    with_any = [name for name in make_compiled.CASES if share(name, "kind")]
    assert len(with_any) > 6 and all(share(name, "asynchronous") > 0.6 for name in with_any)
    assert share("jaxformer", "overlapped") > 0.95


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "reduce-scatter"])
def test_an_h100_overlaps_collectives_by_default(kind):
    rows = [r for key in RECORDED if "h100" in key for r in RECORDED[key]["collectives"]]
    rows = [r for r in rows if r["kind"] == kind]
    assert sum(r["bytes"] * r["overlapped"] for r in rows) > 0.6 * sum(r["bytes"] for r in rows) > 0


# --- the program of this machine's compiler -------------------------------------------------------

CPU_CASES = {
    "2x2x2, groups, YaRN": config_of(
        (2, 2, 2), n_shared_experts=2, n_group=4, topk_group=2, rope_factor=8.0
    ),
    "2x1x4 sharded experts, per layer": config_of(
        (2, 1, 4), gather="layer", experts_layout="sharded", train={"remat": "full"}
    ),
    "1x2x2 interleaved, prefix, query latent, names": config_of(
        (1, 2, 2),
        virtual=2,
        prefix_layers=1,
        q_lora_rank=24,
        tie_word_embeddings=False,
        train={"remat": "latents,attention_out,hidden,expert_in"},
    ),
    "2x1x2 prefix per layer, names": config_of(
        (2, 1, 2), gather="layer", prefix_layers=2, train={"remat": "latents,hidden"}
    ),
    "2 replicas of 2x1x2": config_of((2, 2, 1, 2), n_shared_experts=1),
    "2x1x4 dropless, names": config_of(
        (2, 1, 4), capacity_factor=0.0, train={"remat": "latents,hidden,expert_in"}
    ),
    "2x2x2 dropless, sharded experts": config_of(
        (2, 2, 2), capacity_factor=0.0, experts_layout="sharded", train={"remat": "full"}
    ),
}


def compiled_text(config):
    mesh, declared = mesh_of(config), model.declare(config)
    shapes = (
        train.abstract_state(config, declared, mesh),
        sharded_model.abstract_batch(config, mesh),
        train.abstract_schedule(mesh),
    )
    lowered = train.jitted_step(config, declared, mesh).lower(*shapes)
    return lowered.compile().as_text()


def assert_planned_as_compiled(config, bound):
    text, predicted = compiled_text(config), cost.predict(config, None)
    share = pipeline.branch_share(sharded_model.schedule_of(config))
    assert predicted.flops_per_chip == pytest.approx(float(hlo.dot_flops(text, share)), rel=bound)
    ranks = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    compiled: dict[str, float] = {}
    for found, size in hlo.collectives(text, ranks, share).items():
        axes = "+".join(found.axes)
        compiled[axes] = compiled.get(axes, 0.0) + float(size)
    most = max(compiled.values())
    for axes, size in compiled.items():
        if size > 0.02 * most:
            assert predicted.collective_bytes_per_chip[axes] == pytest.approx(size, rel=bound), axes


OFTEN = "2x2x2, groups, YaRN", "2x1x4 sharded experts, per layer", "2x1x4 dropless, names"


@pytest.mark.parametrize("name", mostly_long(CPU_CASES, *OFTEN))
def test_flops_and_traffic_are_those_of_the_compiled_program(name):
    assert_planned_as_compiled(CPU_CASES[name], 0.02)


@pytest.mark.parametrize("name", ["2x1x4 dropless, names", "2x2x2 dropless, sharded experts"])
def test_a_search_predicts_dropless_experts_as_alone(name):
    shared, own = (cost.predict(CPU_CASES[name], V4, shared=s) for s in (True, False))
    assert shared.flops_per_chip == own.flops_per_chip
    assert shared.memory_bytes_per_chip == own.memory_bytes_per_chip


def kept_bytes(config, kernel):
    """What one block leaves for its backward pass beside weights and data, as jax does it."""
    found = []

    def visit(run):
        def one_block(x):
            known = run.block_inputs(*[jnp.int32(0)] * 3)
            return run.residuals(run.block_vjp(known, x)[1], known)

        found.extend(jax.eval_shape(one_block, run.empty_x()))

    trace.with_executor(config, kernel, sharded_model.remat(config), visit)
    return sum(a.size * a.dtype.itemsize for a in found)


def planned_bytes(config, platform):
    step = cost.Step(config, platform)
    return sum(step.saved(layer) * count for layer, count in step.block)


POLICIES = ["full", "none", ",".join(utils.REMAT_NAMES), *utils.REMAT_NAMES]


@pytest.mark.parametrize(
    "chip, kernel", [(V4, "splash"), (H100, "cudnn"), (H100, "triton"), (H100, "xla")]
)
@pytest.mark.parametrize("remat", POLICIES)
def test_a_block_saves_the_residuals_that_jax_saves(remat, chip, kernel):
    config = sizes(make_compiled.config_of("jaxformer")[1], remat=remat, attention_kernel=kernel)
    platform = hardware.platform_of(chip)
    expected = kept_bytes(config, kernel)
    assert planned_bytes(config, platform) == pytest.approx(expected, rel=0.005)


# --- a layer that the planner does not know -------------------------------------------------------


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


def novel_config(remat):
    train = {"remat": remat, "microbatches": 2}
    return config_of((2, 1, 2), moe_layers=0, dense_layers=2, train=train)


@pytest.mark.parametrize("remat", ["none", "full", "inside", "outside,attention", "inside,outside"])
def test_a_new_layer_needs_no_change_of_the_planner(remat, monkeypatch):
    monkeypatch.setattr(model, "mlp", novel)
    trace.stage_functions.cache_clear()
    config = novel_config(remat)
    assert planned_bytes(config, "cpu") == pytest.approx(kept_bytes(config, "xla"), rel=0.01)
    if remat in ("none", "full", "inside"):  # each compiles for seconds
        assert_planned_as_compiled(config, 0.005)
    predicted = cost.predict(config, None)
    assert set(predicted.flops["novel"]) == {"forward", "backward", "recomputed", "bubble"}
    assert (predicted.flops["novel"]["recomputed"] > 0) == (remat != "none")
    causes = {(t.cause, t.axes) for t in predicted.traffic}
    assert {("novel", ("fsdp",)), ("novel, backward", ("fsdp",))} <= causes
    shared = cost.predict(config, None, shared=True)  # what it sends grows with fsdp's ranks
    assert shared.collective_bytes_per_chip == predicted.collective_bytes_per_chip
    trace.stage_functions.cache_clear()


def test_an_operation_of_unknown_cost_is_refused(monkeypatch):
    def chosen(w, x_btD, options, position):
        products = partial(model.matmul, "btD,Df->btf", x_btD)
        part = lax.cond(position.layer > 1, lambda: products(w.gate), lambda: products(w.up))
        return x_btD + model.matmul("btf,fD->btD", part, w.down)

    monkeypatch.setattr(model, "mlp", chosen)
    trace.stage_functions.cache_clear()
    with pytest.raises(ValueError, match="has a cond, whose cost a trace does not show"):
        cost.predict(novel_config("full"), None)
    trace.stage_functions.cache_clear()


# --- arithmetic -----------------------------------------------------------------------------------


def sizes(config, **values):
    """The config with fields of some sections replaced."""
    for section in ("train", "mesh", "fsdp", "model"):
        part = getattr(config, section)
        names = {f.name for f in dataclasses.fields(part)} & values.keys()
        part = dataclasses.replace(part, **{name: values[name] for name in names})
        config = dataclasses.replace(config, **{section: part})
    return config


JAXFORMER = make_compiled.config_of("jaxformer")[1]


def test_a_program_without_pipeline_or_recomputation_runs_the_model_flops():
    config = sizes(JAXFORMER, fsdp=32, pipeline=1, tensor=1, remat="none", attention_kernel="xla")
    predicted = cost.predict(config, H100)
    assert predicted.flops_per_chip == pytest.approx(predicted.model_flops_per_chip, rel=1e-3)
    assert predicted.bubble == 0


def test_splash_skips_the_blocks_above_the_diagonal_and_recomputes_scores():
    config = sizes(JAXFORMER, fsdp=32, pipeline=1, tensor=1, remat="none")
    plain = sizes(config, attention_kernel="xla")
    xla, splash = (cost.predict(c, V4).flops["attention scores"] for c in (plain, config))
    assert splash["forward"] == 0.75 * xla["forward"]  # of 2 x 2 blocks 3
    # Beside the gradients twice the scores, and once more the probabilities' gradient: 192 and 64
    # wide.
    again = splash["forward"] * (2 * 192 + 64) / (192 + 64)
    assert splash["backward"] == 2 * splash["forward"] + again
    assert xla["backward"] == 2 * xla["forward"] and xla["recomputed"] == 0


def test_cudnn_skips_the_tiles_above_the_diagonal_and_recomputes_scores():
    config = sizes(JAXFORMER, fsdp=8, pipeline=1, tensor=1, remat="none")
    plain = sizes(config, attention_kernel="xla")
    xla, cudnn = (cost.predict(c, H100).flops["attention scores"] for c in (plain, config))
    assert cudnn["forward"] == 36 / 64 * xla["forward"]  # of 8 x 8 tiles
    # Beside the gradients the scores, 192 wide, where values are 64 wide.
    again = cudnn["forward"] * 192 / (192 + 64)
    assert cudnn["backward"] == 2 * cudnn["forward"] + again


def test_one_chip_sends_nothing():
    predicted = cost.predict(sizes(JAXFORMER, fsdp=1, pipeline=1, tensor=1), V4)
    assert predicted.collective_bytes_per_chip == {} and predicted.traffic == []


def test_parts_sum_to_the_totals():
    p = cost.predict(JAXFORMER, V4)
    assert sum(p.memory.values()) == p.memory_bytes_per_chip
    assert sum(sum(ways.values()) for ways in p.flops.values()) == p.flops_per_chip
    assert sum(p.collective_bytes_per_chip.values()) == sum(t.result_bytes for t in p.traffic)
    assert p.seconds["compute"] == p.flops_per_chip / V4.flops
    assert p.seconds["memory"] == sum(p.memory_traffic.values()) / V4.memory_bandwidth


def test_a_step_takes_at_least_its_longest_part_and_at_most_their_sum():
    p = cost.predict(JAXFORMER, V4)
    assert p.step_s == max(p.seconds.values()) == p.seconds[p.bound_by]
    assert p.step_s <= p.serial_step_s <= sum(p.seconds.values())
    per_token = p.mfu_flops_per_token / (p.chips * V4.flops)
    assert p.mfu(p.step_s) == pytest.approx(p.tokens_per_step / p.step_s * per_token)


def test_an_unknown_chip_is_planned_as_its_platform_runs():
    found = [cost.predict(JAXFORMER, None, platform) for platform in (None, "gpu9", "tpu")]
    assert [p.attention for p in found] == ["xla", "cudnn", "splash"]
    assert cost.predict(JAXFORMER, V4).memory == found[2].memory


def test_an_unknown_chip_gets_no_times():
    p = cost.predict(JAXFORMER, None)
    assert p.seconds is p.step_s is p.serial_step_s is p.bound_by is None
    assert "no figures" in p.line()
    assert "bound by" in cost.predict(JAXFORMER, V4).line()


def test_saving_more_residuals_costs_memory_and_saves_flops():
    policies = ["full", "latents", "latents,attention", ",".join(utils.REMAT_NAMES), "none"]
    found = [cost.predict(sizes(JAXFORMER, remat=policy), V4) for policy in policies]
    memory = [p.memory_bytes_per_chip for p in found]
    counts = [p.flops_per_chip for p in found]
    assert memory == sorted(memory) and len(set(memory)) == len(memory)
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[-1]


@pytest.mark.parametrize(
    "kind, result, sent",
    [
        ("all-gather", 8.0, 7.0),
        ("reduce-scatter", 1.0, 7.0),
        ("all-reduce", 8.0, 14.0),
        ("all-to-all", 8.0, 7.0),
        ("collective-permute", 8.0, 8.0),
    ],
)
def test_bytes_sent_follow_from_the_size_of_the_result(kind, result, sent):
    assert results.Traffic("", ("fsdp",), kind, result, 8).sent_bytes == sent


def test_a_collective_uses_the_links_of_its_ranks():
    step = cost.Step(sizes(JAXFORMER, fsdp=2, pipeline=4, tensor=2), "gpu")
    near = results.Traffic("", ("tensor",), "reduce-scatter", 10**9, 2)
    far = results.Traffic("", ("fsdp", "tensor"), "all-to-all", 10**9, 4)
    assert cost.link_seconds(step, H100, near) == 10**9 / H100.link_bandwidth
    assert cost.link_seconds(step, H100, far) == 10**9 / 2 / H100.network_bandwidth


def test_recomputed_values_are_alive_in_the_backward_pass():
    full, none = (cost.Step(sizes(JAXFORMER, remat=p), "tpu") for p in ("full", "none"))
    for (layer, _), (same, _) in zip(full.block, none.block, strict=True):
        assert full.alive(layer) > none.alive(same)


def test_all_layers_of_a_prefix_are_alive_in_its_backward_pass():
    many = model_with(JAXFORMER.model, prefix_layers=40)
    config = sizes(dataclasses.replace(JAXFORMER, model=many), remat="none")
    step = cost.Step(config, "tpu")
    [(layer, count)] = step.prefix
    assert count == 40 and cost.memory(step)["prefix layers"] > 40 * step.saved(layer)


def test_a_prefix_without_a_pipeline_saves_its_residuals_and_does_not_run_again():
    """As long as what the blocks keep; it does not run again."""
    one_stage = sizes(JAXFORMER, fsdp=16, pipeline=1, virtual=1, remat="none")
    with_prefix = dataclasses.replace(one_stage, model=model_with(one_stage.model, prefix_layers=3))
    more, less = (cost.Step(config, "tpu") for config in (with_prefix, one_stage))
    [(layer, count)] = more.prefix
    saved = [cost.memory(step)["saved activations"] for step in (more, less)]
    assert saved[0] - saved[1] == count * more.saved(layer)
    for pipelined in (False, True):
        step = cost.Step(sizes(more.config, pipeline=2), "tpu") if pipelined else more
        [run] = (run for run in cost.runs(step) if run.layer is step.prefix[0][0])
        assert run.rerun == pipelined * run.times


def with_layout(layout, remat):
    m = dataclasses.replace(JAXFORMER.model, experts_layout=layout)
    return cost.Step(sizes(dataclasses.replace(JAXFORMER, model=m), remat=remat), "tpu")


@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
def test_remat_none_recomputes_only_elementwise_operations(layout):
    step = with_layout(layout, "none")
    for layer, _ in step.block + step.prefix:
        again = step.remat(layer)
        assert again.ops and not again.costs
        assert all(op.reads_fused or op.eqn.primitive.name in fusion.VIEWS for op in again.ops)


@pytest.mark.parametrize("layout", ["expert_parallel", "sharded"])
def test_saving_all_names_repeats_no_dispatch_to_experts(layout):
    step = with_layout(layout, ",".join(utils.REMAT_NAMES))
    for layer, _ in step.block:
        causes = {op.part for op, _ in step.remat(layer).costs if op.send}
        assert not causes & {"moe dispatch", "moe return"}


def test_recomputation_adds_memory_traffic_to_the_backward_pass():
    full, none = (cost.memory_traffic(with_layout("expert_parallel", r)) for r in ("full", "none"))
    assert full["layers, backward"] > 1.1 * none["layers, backward"]
    assert full["layers, forward"] < none["layers, forward"]  # which keeps more


def test_products_of_a_tpu_read_and_add_in_place():
    config = sizes(JAXFORMER, remat="none")
    tpu, gpu = (cost.memory_traffic(cost.Step(config, platform)) for platform in ("tpu", "gpu9"))
    assert tpu["weights in use"] == 0 < gpu["weights in use"]
    assert tpu["gradients"] < 0.7 * gpu["gradients"]
    assert tpu["layers, forward"] < gpu["layers, forward"]


def test_small_chunks_of_the_loss_read_the_table_often():
    steps = [cost.Step(sizes(JAXFORMER, loss_chunk_tokens=n), "tpu") for n in (4096, 128)]
    few, many = (cost.memory_traffic(step)["loss"] for step in steps)
    assert many > 2 * few


def test_float32_is_slower_than_bfloat16():
    fields = [
        {"attention_kernel": "xla", "compute_dtype": dtype} for dtype in ("float32", "bfloat16")
    ]
    models = [dataclasses.replace(JAXFORMER.model, **f) for f in fields]
    wide, narrow = (cost.predict(dataclasses.replace(JAXFORMER, model=m), V4) for m in models)
    assert wide.seconds["compute"] == 6 * narrow.seconds["compute"]


def test_a_reduce_scatter_is_an_all_reduce_only_over_a_whole_tpu_slice():
    whole = cost.Step(sizes(JAXFORMER, fsdp=32, pipeline=1, tensor=1), "tpu")
    part = cost.Step(JAXFORMER, "tpu")
    assert cost.is_all_reduce(whole, V4, ("fsdp",))
    assert not cost.is_all_reduce(whole, H100, ("fsdp",))
    assert not cost.is_all_reduce(part, V4, ("fsdp",))
    kinds = {t.kind for t in cost.traffic(whole, V4) if t.cause == "gradients"}
    assert kinds == {"all-reduce"}


def test_gathering_per_layer_trades_traffic_for_memory():
    step, layer = (
        cost.predict(sizes(JAXFORMER, gather=gather), V4) for gather in ("step", "layer")
    )
    assert layer.memory_bytes_per_chip < step.memory_bytes_per_chip
    traffic = [p.collective_bytes_per_chip["fsdp"] for p in (step, layer)]
    assert traffic[1] > 5 * traffic[0]
    assert math.isclose(step.flops_per_chip, layer.flops_per_chip)
