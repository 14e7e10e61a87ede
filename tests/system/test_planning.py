"""Plans beside compilers in processes of their own, and searches that take long."""

import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

import hardware
import make_compiled
import plan
from common import config_of
from conftest import ROOT
from planning import compiler, cost, targets
from test_cost import COMPARED, RECORDED, assert_planned_as_compiled, assert_predicted
from test_plan import JAXFORMER, SHARED
from utils import changed

V4, V5E, H100 = (hardware.CHIPS[name] for name in ("v4", "v5e", "h100"))
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@pytest.mark.parametrize("key", sorted(RECORDED.keys() - COMPARED))
def test_all_other_predictions_match_what_compilers_planned(key):
    assert_predicted(key)


FULL = {"train": {"remat": "full"}}
NAMES = {"train": {"remat": "latents,attention_out,hidden,expert_in"}}
GROUPS = {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "rope_factor": 8.0}
PREFIX = {"prefix_layers": 1, "q_lora_rank": 24, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((2, 1, 4), FULL | {"gather": "layer", "experts_layout": "sharded"}),
        ((1, 2, 2), NAMES | PREFIX | {"virtual": 2}),
        ((2, 2, 1, 2), GROUPS),
    ],
)
def test_flops_and_traffic_of_other_meshes_are_those_of_the_compiled_program(shape, fields):
    assert_planned_as_compiled(config_of(shape, **fields), 0.02)


def test_a_config_that_the_compiler_refuses_is_reported():
    message = r"failed: --model.num_attention_heads 4 is not divisible by"
    with pytest.raises(ValueError, match=message):
        compiler.compile_step(config_of((1, 1, 8)), None, "")


def test_a_plan_is_compiled_for_more_devices_than_this_process_has_and_has_ratios(capsys, tmp_path):
    sizes = """--model.hidden_size=32 --model.num_hidden_layers=2 --model.num_attention_heads=2
        --model.kv_lora_rank=16 --model.intermediate_size=64 --model.n_routed_experts=0
        --model.decoder_sparse_step=1 --model.qk_nope_head_dim=16 --model.qk_rope_head_dim=8
        --model.v_head_dim=16 --train.seq_len=32 --model.compute_dtype=float32
        --mesh.fsdp=4 --mesh.pipeline=2 --mesh.tensor=2 --train.microbatches=4
        --train.global_batch_size=16"""
    hlo = tmp_path / "step.hlo"
    plan.main([*sizes.split(), "--chip=cpu", "--compile", "--hlo", str(hlo), "--json"])
    found = json.loads(capsys.readouterr().out)
    compiled = found["compiled"]
    assert set(compiled) >= SHARED and found["fits"] is None
    assert compiled["compile_s"] > 0
    parts = compiled["argument_bytes"] + compiled["temporary_bytes"]
    assert parts <= compiled["memory_bytes_per_chip"] < 1.1 * parts
    assert compiled["model_flops_per_chip"] == found["predicted"]["model_flops_per_chip"]
    assert abs(found["ratios"]["FLOPs"] - 1) < 0.05
    assert abs(found["ratios"]["tensor"] - 1) < 0.1
    assert hlo.read_text().startswith("HloModule")


@needs_libtpu
@pytest.mark.parametrize("chip", make_compiled.CHIPS)
def test_libtpu_still_plans_what_is_recorded(chip):
    name = "small-none-8x1x1"
    config = make_compiled.config_of(name)
    compiled, _ = compiler.compile_step(config, hardware.CHIPS[chip], "2x2x2")
    before = RECORDED[f"{name} {chip}"]
    assert compiled.flops_per_chip == pytest.approx(before["flops_per_chip"], rel=0.001)
    for axes, size in before["collective_bytes_per_chip"].items():
        assert compiled.collective_bytes_per_chip[axes] == pytest.approx(size, rel=0.02)
    if importlib.metadata.version("libtpu") == targets.LIBTPU:
        memory = before["memory_bytes_per_chip"]
        assert compiled.memory_bytes_per_chip == pytest.approx(memory, rel=0.02)
    assert compiled.model_flops_per_chip == before["model_flops_per_chip"]
    gathers = [row for row in compiled.collectives if row["kind"] == "all-gather"]
    assert any(row["overlapped"] for row in gathers) == (chip == "v4"), "see train.compiler_options"


@pytest.mark.skipif(bool(targets.missing(H100)), reason="no compiler for GPUs is installed")
def test_the_compiler_for_gpus_still_plans_what_is_recorded():
    name = "gpu-dense-124m"
    compiled, text = compiler.compile_step(make_compiled.config_of(name), H100, "")
    before = RECORDED[f"{name} h100"]
    for what in ("flops_per_chip", "memory_bytes_per_chip"):
        assert getattr(compiled, what) == pytest.approx(before[what], rel=0.02), what
    planned = cost.predict(make_compiled.config_of(name), H100)
    for what in ("evaluation_bytes", "sampling_bytes"):
        assert getattr(planned, what) == pytest.approx(getattr(compiled, what), rel=0.1), what
    assert "__cudnn$fmhaSoftmaxBackward" in text


@pytest.mark.skipif(bool(targets.missing(H100)), reason="no compiler for GPUs is installed")
def test_all_products_of_feed_forward_layers_are_float8_calls_of_cublas():
    config = make_compiled.config_of("gpu-dense-124m")
    config = changed(config, {"model.matmul_dtype": "float8", "train.remat": "none"})
    _, text = compiler.compile_step(config, H100, "")
    calls = text.count('custom_call_target="__cublas$lt$matmul$f8"')
    assert calls == 3 * 3 * config.model.num_hidden_layers


LARGE = {"train": {"global_batch_size": 512, "seq_len": 1024}, "hidden_size": 1024}


@needs_libtpu
@pytest.mark.parametrize(
    ("shape", "fields", "chip", "topology", "message"),
    [
        ((3, 3, 3), {}, V4, "3x3x3", "refuses the topology v4:3x3x3: .* 2x2x1, 2x2x2, 2x2x4"),
        ((2, 1, 1), {}, V4, "1x1x1", "has 2 devices, and this run has 1"),
        ((1, 1, 1), LARGE | {"vocab_size": 50000}, V5E, "1x1", "_EXHAUSTED: .*exceeds available"),
    ],
)
def test_what_libtpu_cannot_compile_is_refused(shape, fields, chip, topology, message):
    with pytest.raises(ValueError, match=message):
        compiler.compile_step(config_of(shape, **fields), chip, topology)


def test_a_plan_for_another_number_of_chips_searches_the_best_mesh_and_starts_no_device():
    """A platform that does not exist is an error when jax searches devices."""
    flags = [*JAXFORMER, "--chip=v4", "--train.global_batch_size=32", "--json"]
    flags.append("--train.remat=full")  # so that a search tries less

    def planned(*more):
        command = [sys.executable, ROOT / "plan.py", *flags, *more]
        env = os.environ | {"JAX_PLATFORMS": "none_such"}
        return json.loads(subprocess.check_output(command, env=env))

    # 32 sequences are too few for 8 microbatches on the mesh of the file, which 4 chips lack.
    found = planned("--chips", "4")
    mesh = [found["flags"][f"mesh.{axis}"] for axis in ("fsdp", "pipeline", "tensor")]
    assert math.prod(mesh) == 4 == found["predicted"]["chips"] and len(found["search"]) > 3
    assert found["search"][0]["flags"] == found["flags"]
    again = planned(*(f"--{flag}={value}" for flag, value in found["flags"].items()))
    assert again["predicted"] == found["predicted"]


def test_a_config_that_fits_nowhere_reports_the_missing_memory():
    large = {"model.hidden_size": 8192, "model.num_hidden_layers": 384, "train.remat": "full"}
    large |= {"mesh.virtual": 1, "train.microbatches": 8}
    flags = [f"--{flag}={value}" for flag, value in large.items()]
    message = "--chips 8 .*fits on no mesh. Use another.*: needs .* GiB of 13.60 GiB at least"
    with pytest.raises(ValueError, match=message):
        plan.main([*JAXFORMER, "--chip=v5e", "--chips=8", *flags])
