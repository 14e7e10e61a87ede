import argparse
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import hardware
import model
import weights
from benchmarks import common, gpu
from conftest import ROOT
from planning import cost, timeline
from runtime import jsonl

# Packages that a machine with a GPU may lack. rich is not here: flax imports it.
ABSENT = (
    *("tyro", "google.cloud", "google_crc32c", "datasets", "wandb", "orbax", "tensorstore"),
    *("tiktoken", "matplotlib"),
)
ROWS = ("check", "dense_124m-none", "dense_124m-profile")
# All rows in one process, and one program for both rows of a model, which saves most of the time.
MEASURE = """
import pathlib, sys
from benchmarks import common, gpu
from runtime import jsonl
folder, compile_step, programs = pathlib.Path(sys.argv[1]), common.compile_step, []
def compile_once(config):
    programs[:] = programs or [compile_step(config)]
    return programs[0]
common.compile_step = compile_once
for row in sys.argv[2:]:
    fields = {}
    for part in gpu.measure(row, True, folder):
        fields |= part
    jsonl.append(folder / "rows.jsonl", [{"row": row, "status": "ok"} | fields])
"""


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory):
    """The environment of a process in which the packages ABSENT cannot be imported."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    )
    return os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture(scope="module")
def measured(without_packages, tmp_path_factory):
    """(records by row, folder of traces) in toy sizes on this CPU."""
    folder = tmp_path_factory.mktemp("toy")
    command = [sys.executable, "-c", MEASURE, str(folder), *ROWS]
    run = subprocess.run(command, cwd=ROOT, env=without_packages, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return {r["row"]: r for r in jsonl.read(folder / "rows.jsonl")}, folder


def test_the_command_runs_a_row_in_a_process_without_optional_packages(without_packages, tmp_path):
    imports = [sys.executable, "-c", "import tyro"]
    assert subprocess.run(imports, env=without_packages, capture_output=True).returncode
    child = [sys.executable, "benchmark.py", "gpu", "machine", "--toy", "--child"]
    command = [*child, str(tmp_path / "machine.jsonl")]
    run = subprocess.run(command, cwd=ROOT, env=without_packages, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    parts = jsonl.read(tmp_path / "machine.jsonl")
    record = {name: value for part in parts for name, value in part.items()}
    assert "TFLOP/s in 256 x 256 x 256 bfloat16 products" in record["text"]
    for name in ("chip", "driver", "cuda", "versions", "commit", "smi"):
        assert name in record


@pytest.mark.long
def test_a_step_is_the_median_of_eight_and_the_rates_follow_from_it(measured):
    found = measured[0]["dense_124m-none"]
    config = gpu.config_of("dense_124m-none", toy=True)
    assert len(found["steps_s"]) == len(found["losses"]) == 10
    timed = sorted(found["steps_s"][2:])
    assert found["step_s"] == pytest.approx((timed[3] + timed[4]) / 2)
    tokens = config.train.global_batch_size * config.train.seq_len
    assert found["tokens_per_s"] == pytest.approx(tokens / found["step_s"])
    assert found["planned_bytes"] == cost.predict(config, None, "cpu").memory_bytes_per_chip
    assert found["compiler_bytes"] > 0 and found["memory_bytes"] > 0 and found["compile_s"] > 0
    assert found["mfu"] is None  # this CPU has no known peak
    assert "nan" in gpu.describe(found) and f"{found['step_s']:.4f}" in gpu.describe(found)


@pytest.mark.long
def test_the_check_reports_the_error_of_each_weight(measured):
    found = measured[0]["check"]
    assert found["float32_loss_error"] == 0  # both are this CPU
    errors = found["bfloat16_gradient_errors"]
    assert "blocks.moe.moe.experts.gate" in errors and "first.embedding" in errors
    assert 1e-4 < max(errors.values()) < 0.1


@pytest.mark.long
def test_shares_of_layers_sum_to_one(measured):
    found = measured[0]["dense_124m-profile"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["busy_s"] > 0
    for layer in ("attention forward", "attention backward", "mlp backward", "loss backward"):
        assert found["shares"][layer] > 0.001
    assert found["shares"].get("other", 0) < 0.05
    for layer, kernels in found["kernels"].items():
        assert 0 < sum(kernels.values()) <= found["shares"][layer] + 1e-9


@pytest.mark.long
def test_the_trace_has_the_names_of_layers(measured):
    [file] = (measured[1] / "dense_124m-profile").rglob("perfetto_trace.json.gz")
    names = [event.get("name", "") for event in timeline.read(file)["traceEvents"]]
    assert any(name.startswith("steady/attention ") for name in names)


def test_real_sizes_are_refused_without_a_gpu():
    device = common.jax.devices()[0]
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*--toy"):
        gpu.accelerator(toy=False)
    assert gpu.accelerator(toy=True) == device


# --- rows that fail, and time ---------------------------------------------------------------------


def stand_in(statuses):
    """Return a function instead of run_row, and the list of rows that it is called with."""
    called = []

    def run(row, toy, folder, limit_s):
        called.append(row)
        return {"text": "fine", "error": "broken", "status": statuses.get(row, "ok")}

    return run, called


def flags(tmp_path, *names, **values):
    parsed = gpu.parse([*names, f"--out={tmp_path / 'x' / 'gpu.jsonl'}"])
    return argparse.Namespace(**vars(parsed) | {"minutes": 1e6} | values)


def test_a_failed_row_does_not_end_the_others(tmp_path, capsys):
    run, called = stand_in({"dense_124m-none": "failed", "dense_1b-none": "memory"})
    assert gpu.run_rows(flags(tmp_path), run) == []
    assert called == list(gpu.ROWS)
    text = capsys.readouterr().out
    assert "failed: broken" in text and "out of memory" in text


@pytest.mark.parametrize("gate", gpu.GATES)
def test_a_failed_check_ends_the_others_unless_forced(tmp_path, gate):
    run, called = stand_in({gate: "failed"})
    with pytest.raises(ValueError, match=f"row {gate} did not pass.*--force"):
        gpu.run_rows(flags(tmp_path), run)
    assert called[-1] == gate
    gpu.run_rows(flags(tmp_path, "dense_1b-full", force=True), run)
    assert called[-1] == "dense_1b-full"


def test_failed_rows_run_again_and_finished_ones_do_not(tmp_path, capsys):
    run, called = stand_in({"dense_1b-none": "memory", "dense_1b-full": "failed"})
    names = ("dense_124m-none", "dense_1b-none", "dense_1b-full")
    gpu.run_rows(flags(tmp_path, *names), run)
    called.clear(), capsys.readouterr()
    gpu.run_rows(flags(tmp_path, *names), run)
    assert called == ["dense_1b-full"]
    assert capsys.readouterr().out.count("fine") == 3  # machine, check and a row, from the file


def test_rows_of_another_gpu_do_not_count_as_finished(tmp_path, monkeypatch):
    run, called = stand_in({})
    gpu.run_rows(flags(tmp_path, "dense_124m-none"), run)
    monkeypatch.setattr(gpu, "smi", lambda *fields: {"name": "NVIDIA H200"})
    gpu.run_rows(flags(tmp_path, "dense_124m-none"), run)
    assert called == ["machine", "check", "dense_124m-none"] * 2


def test_without_time_no_row_starts_and_the_command_to_continue_is_printed(tmp_path, capsys):
    arguments = ["--minutes", "0", "--out", str(tmp_path / "gpu.jsonl"), "dense_1b-full"]
    gpu.main(arguments)
    text = capsys.readouterr().out
    assert "not run in the time limit: machine check dense_1b-full" in text
    assert f"python benchmark.py gpu --minutes 0 --out {tmp_path}/gpu.jsonl dense_1b-full\n" in text
    assert not (tmp_path / "gpu.jsonl").exists()


def test_a_stopped_row_remains_and_starts_anew(tmp_path):
    run, called = stand_in({"check": "time"})
    assert gpu.run_rows(flags(tmp_path, "dense_1b-full"), run) == ["check", "dense_1b-full"]
    assert called == ["machine", "check"]
    run, called = stand_in({})
    assert gpu.run_rows(flags(tmp_path, "dense_1b-full"), run) == []
    assert called == ["check", "dense_1b-full"]


def test_a_row_is_stopped_in_time(tmp_path):
    start = time.monotonic()
    found = gpu.run_row("machine", True, tmp_path, 0.2)
    assert found == {"status": "time", "error": "stopped after 0 s"}
    assert time.monotonic() - start < 5


def test_the_error_of_a_failed_process_is_in_its_record(tmp_path):
    found = gpu.run_row("no_such-none", True, tmp_path, 300)
    assert found["status"] == "failed" and "there is no row no_such-none" in found["error"]


def test_exit_code_and_log_give_the_status():
    assert gpu.status_of(0, "", 9) == {"status": "ok"}
    full = (
        "Traceback\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\nFor simplicity"
    )
    assert gpu.status_of(1, full, 9)["status"] == "memory"
    autotuned = "W RESOURCE_EXHAUSTED while autotuning\nerror: the loss is not finite"
    found = gpu.status_of(2, autotuned, 9)
    assert found == {"status": "failed", "error": "exit code 2: error: the loss is not finite"}
    assert gpu.status_of(-11, "Fatal", 9)["error"] == "SIGSEGV: Fatal"
    assert gpu.status_of(-6, "", 9)["error"] == "SIGABRT: nothing in its log"


def test_out_of_memory_is_reported_with_the_plan():
    record = {"status": "memory", "planned_bytes": 85 * 2**30, "error": "much"}
    assert gpu.describe(record) == "out of memory: the plan needs 85.0 GiB. much"


def test_an_unknown_row_is_refused():
    with pytest.raises(
        ValueError, match=r"no row dense_1b_full\. Use some of machine, .*dense_1b-full"
    ):
        gpu.parse(["dense_1b_full"])
    assert gpu.parse([]).names == gpu.ROWS


# --- rows and their sizes -------------------------------------------------------------------------


def test_the_row_of_each_model_without_rematerialization_comes_first():
    assert gpu.ROWS[:2] == gpu.GATES and len(set(gpu.ROWS)) == len(gpu.ROWS) == 18
    assert gpu.ROWS[2:6] == tuple(f"{name}-none" for name in gpu.MODELS)


@pytest.mark.parametrize("name", gpu.MODELS)
def test_every_row_fits_one_gpu_of_80_gb_by_the_plan(name):
    chip = hardware.CHIPS["h100"]
    for kind in ("none", "names", "full"):
        found = cost.predict(gpu.config_of(f"{name}-{kind}", toy=False), chip)
        assert found.memory_bytes_per_chip < 0.9 * 0.92 * chip.memory_bytes, kind


def test_the_124m_models_have_equally_many_active_parameters():
    dense, experts = (
        weights.count(model.declare(gpu.config_of(f"{name}_124m-full", toy=False)))
        for name in ("dense", "moe")
    )
    assert experts[1] == pytest.approx(dense[1], rel=0.005) and experts[0] > 1.7 * dense[0]


# --- the check ------------------------------------------------------------------------------------


def test_one_wrong_gradient_of_many_is_found():
    expected = {"large": 1e6 * np.ones(5), "small": np.ones(5), "bias": np.zeros(5)}
    errors = gpu.gradient_errors(expected | {"small": 1.5 * np.ones(5)}, expected)
    assert errors == {"large": 0, "small": 0.5, "bias": 0}
    with pytest.raises(ValueError, match=r"small.*allowed"):
        gpu.check_errors("bfloat16", 0.0, errors)
    assert gpu.gradient_errors(expected | {"bias": expected["small"]}, expected)["bias"] == math.inf


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 0.0), (0.0, math.nan), (0.5, 0.0)])
def test_nan_and_large_errors_do_not_pass_the_check(loss, gradient):
    with pytest.raises(ValueError, match="does not compute what the CPU does"):
        gpu.check_errors("bfloat16", loss, {"a": 0.0, "b": gradient})


# --- nvidia-smi -----------------------------------------------------------------------------------


def test_clocks_and_power_are_medians_of_the_samples(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    seen = tmp_path / "seen"  # the first sample has another clock
    program.write_text(
        f"#!/bin/sh\n[ -e {seen} ] && mhz=1980 || mhz=1000\n: > {seen}\n"
        'echo "$mhz, 2619, 690.5, [N/A], 7000"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu.monitor() as found:
        time.sleep(1.5)
    memory = {"clocks.mem": 2619, "memory.used": 7000}
    assert found == {"clocks.sm": 1980, "power.draw": 690.5} | memory


def test_without_nvidia_smi_there_are_no_samples(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with gpu.monitor() as found:
        pass
    assert found == {} == gpu.smi("name")
