"""Benchmarks that start processes, read an emulated bucket, or compile several programs."""

import contextlib
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import common, decode, experts, gpu, mesh, peer, reference
from benchmarks import data as data_benchmark
from benchmarks.common import with_values
from conftest import ROOT
from planning import cost
from runtime import cli
from test_benchmark import TINY

# --- programs in this process ---------------------------------------------------------------------


def test_mesh_and_reference_compare_programs(capsys, monkeypatch):
    """With a step that only counts. A real one takes long to compile."""

    def count(state, batch, schedule):
        return state.replace(step=state.step + 1), {"tokens": batch.tokens.sum()}

    jitted = common.jax.jit(count, donate_argnums=0)
    monkeypatch.setattr(common.train, "jitted_step", lambda *_: jitted)
    monkeypatch.setattr(common.train, "planned_bytes", lambda *_: 2**20)
    monkeypatch.setattr(common.Program, "flops_ratio", lambda self: 1.25)
    mesh.main([])
    assert "tokens/s of 8 devices over 1: " in capsys.readouterr().out
    monkeypatch.setattr(reference, "step_seconds", lambda programs: [2.0, 1.0, 4.0, 8.0])
    monkeypatch.setattr(common.Program, "model_flops", 50 * 10**9)
    monkeypatch.setattr(reference, "matmul_flops_per_s", lambda *_, **__: 100e9)
    reference.main([])
    text = " ".join(capsys.readouterr().out.split())
    assert "compiled over model FLOPs 1.250 (bound 1.15 x 1.125 = 1.294)" in text
    assert "reaches 50% of the 100.0 GFLOP/s of a 2048 x 2048 x 2048" in text


def test_experts_compares_dropless_with_capacity(capsys, monkeypatch):
    sizes = "--model.moe_intermediate_size 16 --model.n_routed_experts 8 --factors 0 0.5"
    monkeypatch.setattr(experts, "step_seconds", lambda programs: [3.0, 2.0])
    experts.main([*TINY, *sizes.split()])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0][:4] == ["dropless", "3.000", "1.500", "0.00%"]
    assert rows[1][:3] == ["0.5", "2.000", "1.000"] and float(rows[1][3].rstrip("%")) > 40
    assert float(rows[0][4]) > float(rows[1][4]) > 0  # FLOPs


def test_generation_is_timed_near_and_far_with_a_short_and_a_long_cache(capsys):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    sizes |= {"kv_lora_rank": 32, "vocab_size": 256, "intermediate_size": 64}
    configs = {"moe": decode.decoding_config(64, **sizes, moe_intermediate_size=16)}
    decode.compare(configs, batches=(2,), lengths=(256, 512), near=3, far=300)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    [row] = [line for line in lines if line[1:2] == ["moe"]]
    texts, tokens_per_s, ms, *ratios = [float(c) for c in row if c.replace(".", "").isdigit()]
    assert texts == 2 and tokens_per_s * ms / 1e3 == pytest.approx(2, rel=0.1)
    assert len(ratios) == 3 and min(ratios[:2]) > 0


# --- data -----------------------------------------------------------------------------------------


def test_data_measures_disk_and_bucket_and_the_waiting_of_a_run(tmp_path, bucket, monkeypatch):
    """With a run that has ended. Clients of this process keep the address of the first bucket."""
    flags = data_benchmark.Flags(
        tokens=40_000, bucket_tokens=40_000, shards=2, many=5, rows=4, rounds=1, steps=3
    )

    def train(command, **_):
        run = tmp_path / "runs" / "waits"
        run.mkdir(parents=True)
        steps = [{"data_wait_s": wait, "step_s": 2.0} for wait in (1.0, 0.1, 0.3)]
        data_benchmark.jsonl.append(run / "metrics.jsonl", [*steps, {"loss/val": 3.0}])
        assert str(tmp_path / "runs") in command

    with data_benchmark.emulated_bucket(dataclasses.replace(flags, delay_ms=0.0)) as other:
        assert other.startswith("gs://")  # of a process that ends with the benchmark
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    emulated = lambda flags: contextlib.nullcontext(bucket.url)  # noqa: E731
    monkeypatch.setattr(data_benchmark, "emulated_bucket", emulated)
    monkeypatch.setattr(data_benchmark.subprocess, "run", train)
    rows = [*data_benchmark.measure(flags, tmp_path)]
    assert len(rows) == 13  # two ways to read a disk and to open shards, and a bucket
    assert rows[-1][1] == "10.00 (5.00 to 15.00)"  # of the steps after the first


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

    config = gpu.config_of("dense_124m-none", toy=True)
    program = common.compile_step(config)  # of both rows
    monkeypatch.setattr(common, "compile_step", lambda config: program)
    steps = measured("dense_124m-none")
    assert len(steps["steps_s"]) == len(steps["losses"]) == 10
    assert steps["step_s"] == pytest.approx(np.median(steps["steps_s"][2:]))
    tokens = config.train.global_batch_size * config.train.seq_len
    assert steps["tokens_per_s"] == pytest.approx(tokens / steps["step_s"])
    assert steps["planned_bytes"] == cost.predict(config, None, "cpu").memory_bytes_per_chip
    assert steps["compiler_bytes"] > 0 and steps["memory_bytes"] > 0 and steps["compile_s"] > 0
    assert f"{steps['step_s']:.4f}" in gpu.describe(steps)

    profile = measured("dense_124m-profile")
    shares = profile["shares"]
    assert sum(shares.values()) == pytest.approx(1) and profile["busy_s"] > 0
    for layer in ("attention forward", "attention backward", "mlp backward", "loss backward"):
        assert shares[layer] > 0.001
    assert shares.get("other", 0) < 0.05
    for layer, kernels in profile["kernels"].items():
        assert 0 < sum(kernels.values()) <= shares[layer] + 1e-9


def test_a_row_that_is_stopped_in_time_has_its_error(tmp_path):
    found = gpu.run_row("machine", True, tmp_path, 0.2)
    assert found == {"status": "time", "error": "stopped after 0 s"}


# --- links ----------------------------------------------------------------------------------------


def test_a_process_answers_with_the_seconds_of_steps(tmp_path):
    (tmp_path / "alone.toml").write_text(cli.to_toml(cli.parse(TINY)))
    command = [sys.executable, "benchmark.py", "links", "work", str(tmp_path / "alone.toml")]
    done = subprocess.run(command, cwd=ROOT, input="step\nstep\n", capture_output=True, text=True)
    seconds = [*map(json.loads, done.stdout.splitlines())]
    assert len(seconds) == 2 and min(seconds) > 0


# --- peer -----------------------------------------------------------------------------------------


@pytest.mark.huggingface
def test_both_train_in_turns_from_the_same_first_loss(capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    sizes |= {"q_lora_rank": 0, "kv_lora_rank": 32, "compute_dtype": "float32"}
    sizes |= {"first_k_dense_replace": 1}
    batch = {"global_batch_size": 2, "seq_len": 32, "microbatches": 2}
    config = with_values(peer.config_of_both("moe"), model=sizes, train=batch)
    peer.compare(config, peer.Flags(turns=2, compile=False))  # compares the losses
    text = capsys.readouterr().out
    assert "this project over the better of the others: " in text
    assert "DeepseekV3ForCausalLM, eager" in text
