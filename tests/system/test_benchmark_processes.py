"""Benchmarks that start processes or compile several programs."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import common, gpu, peer, reference
from conftest import ROOT
from planning import cost
from utils import changed

# --- programs in this process ---------------------------------------------------------------------


def test_reference_compares_programs(capsys, monkeypatch):
    """With a step that only counts. A real one takes long to compile."""

    def count(state, batch, schedule):
        return state.replace(step=state.step + 1), {"tokens": batch.tokens.sum()}

    jitted = common.jax.jit(count, donate_argnums=0)
    monkeypatch.setattr(common.train, "jitted_step", lambda *_: jitted)
    monkeypatch.setattr(common.memory, "planned_bytes", lambda *_: 2**20)
    monkeypatch.setattr(common.Program, "flops_ratio", lambda self: 1.25)
    monkeypatch.setattr(common, "step_seconds", lambda programs: [2.0, 1.0, 4.0, 8.0, 5.0])
    monkeypatch.setattr(common.Program, "model_flops", 50 * 10**9)
    monkeypatch.setattr(reference, "matmul_flops_per_s", lambda *_: 100e9)
    reference.main([])
    text = " ".join(capsys.readouterr().out.split())
    assert "1.000 │ 2,048 │ 50.0 │ 1.250 │ 1 │" in text
    assert "tokens/s of 8 devices over 1: 2.50" in text
    assert "reaches 50% of the 100.0 GFLOP/s of a 2048 x 2048 x 2048" in text


# --- gpu ------------------------------------------------------------------------------------------

# Packages that a machine with a GPU may lack. rich is not here: flax imports it.
ABSENT = {
    *("tyro", "google.cloud", "google_crc32c", "datasets", "wandb", "orbax", "tensorstore"),
    *("tiktoken", "matplotlib"),
}


def test_rows_are_measured_in_toy_sizes_without_optional_packages(tmp_path, monkeypatch):
    absent = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    (tmp_path / "sitecustomize.py").write_text(absent)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert subprocess.run([sys.executable, "-c", "import tyro"], capture_output=True).returncode
    machine = gpu.run_row("machine", True, tmp_path, 300)
    assert machine["status"] == "ok", machine
    assert "TFLOP/s in 256 x 256 x 256 bfloat16 products" in machine["text"]

    def measured(row):
        parts = gpu.measure(row, True, tmp_path)
        return {name: value for part in parts for name, value in part.items()} | {"status": "ok"}

    check = measured("check")
    assert check["float32_loss_error"] == 0  # both are this CPU
    errors = check["bfloat16_gradient_errors"]
    assert "blocks.moe.moe.experts.gate" in errors and "first.embedding" in errors
    assert 1e-4 < max(errors.values()) < 0.1
    float8, name = check["float8_gradient_errors"], "blocks.dense.mlp.gate"
    assert 2 * errors[name] < float8[name] <= max(float8.values()) < 0.3

    # Toy rows of different models have the same config.
    programs, compile_step = {}, common.compile_step

    def compile_once(config):
        if (key := repr(config)) not in programs:
            programs[key] = compile_step(config)
        return programs[key]

    monkeypatch.setattr(common, "compile_step", compile_once)
    config = gpu.config_of("dense_124m-none", toy=True)
    steps = measured("dense_124m-none")
    assert len(steps["steps_s"]) == len(steps["losses"]) == 10
    assert steps["step_s"] == pytest.approx(np.median(steps["steps_s"][2:]))
    tokens = config.train.global_batch_size * config.train.seq_len
    assert steps["tokens_per_s"] == pytest.approx(tokens / steps["step_s"])
    assert steps["planned_bytes"] == cost.predict(config, None, "cpu").memory_bytes_per_chip
    assert steps["compiler_bytes"] > 0 and steps["memory_bytes"] > 0 and steps["compile_s"] > 0
    assert f"{steps['step_s']:.4f}" in gpu.describe(steps)

    profile = measured("dense_1b-profile")
    shares = profile["shares"]
    assert sum(shares.values()) == pytest.approx(1) and profile["busy_s"] > 0
    for layer in ("attention forward", "attention backward", "mlp backward", "loss backward"):
        assert shares[layer] > 0.001
    assert shares.get("other", 0) < 0.05
    for layer, kernels in profile["kernels"].items():
        assert 0 < sum(kernels.values()) <= shares[layer] + 1e-9
    assert len(programs) == 1

    for row in gpu.ROWS:
        if row not in gpu.GATES and repr(gpu.config_of(row, toy=True)) not in programs:
            assert measured(row)["losses"][0] == pytest.approx(steps["losses"][0], rel=1e-2), row
    assert len(programs) == 6  # none, scanned, fp8, dropless, names, full


def test_a_row_that_is_stopped_in_time_has_its_error(tmp_path):
    found = gpu.run_row("machine", True, tmp_path, 0.2)
    assert found == {"status": "time", "error": "stopped after 0 s"}


# --- peer -----------------------------------------------------------------------------------------


@pytest.mark.huggingface
def test_both_train_in_turns_from_the_same_first_loss(capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    sizes |= {"q_lora_rank": 0, "kv_lora_rank": 32, "compute_dtype": "float32"}
    sizes |= {"first_k_dense_replace": 1}
    batch = {"train.global_batch_size": 2, "train.seq_len": 32, "train.microbatches": 2}
    values = {f"model.{name}": value for name, value in sizes.items()} | batch
    config = changed(peer.config_of_both("moe"), values)
    peer.compare(config, turns=2, compile=False)  # compares the losses
    text = capsys.readouterr().out
    assert "this project over the better of the others: " in text
    assert "DeepseekV3ForCausalLM, eager" in text
