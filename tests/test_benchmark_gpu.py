"""benchmark.py gpu without a GPU: which rows run, and how their results are judged."""

import argparse
import itertools
import math
import re
import types

import numpy as np
import pytest

import hardware
import model
import train
import weights
from benchmarks import common, gpu
from planning import cost
from runtime import cli


def test_real_sizes_are_refused_without_a_gpu_and_so_are_unknown_rows():
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*--toy"):
        gpu.accelerator(toy=False)
    assert gpu.accelerator(toy=True) == common.jax.devices()[0]
    with pytest.raises(ValueError, match=r"no row dense_1b_full\. Use some of machine, .*1b-full"):
        gpu.parse(["dense_1b_full"])
    assert gpu.parse([]).names == [*gpu.ROWS]


def test_the_list_has_what_each_row_decides(capsys):
    gpu.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*gpu.ROWS]
    compared = [name for line in lines for name in re.findall(r"\w+-\w+", line.split("  ")[-1])]
    assert len(compared) > 8 and set(compared) <= gpu.ROWS.keys()


# --- rows that fail, and time ---------------------------------------------------------------------


@pytest.fixture
def run_rows(tmp_path, monkeypatch):
    """A function that runs rows that end with these statuses, and the list of rows that it ran."""
    called, limits = [], {}

    def rows(*names, statuses=None, **values):
        def run(row, toy, folder, limit_s):
            called.append(row)
            limits[row] = limit_s
            return {"text": "fine", "error": "broken", "status": (statuses or {}).get(row, "ok")}

        parsed = gpu.parse([*names, f"--out={tmp_path / 'x' / 'gpu.jsonl'}"])
        return gpu.run_rows(argparse.Namespace(**vars(parsed) | {"minutes": 1e6} | values), run)

    rows.limits = limits
    return rows, called


def test_a_failed_row_does_not_end_the_others_and_runs_again_alone(run_rows, capsys):
    rows, called = run_rows
    assert rows(statuses={"dense_124m-none": "failed", "dense_1b-none": "memory"}) == []
    assert called == list(gpu.ROWS)
    text = capsys.readouterr().out
    assert "failed: broken" in text and "out of memory" in text
    called.clear()
    rows("dense_124m-none", "dense_1b-none", "dense_1b-full")
    assert called == ["dense_124m-none"]
    assert capsys.readouterr().out.count("fine") == 4  # machine, check and a row, from the file


def test_a_row_of_other_settings_runs_again(run_rows, monkeypatch):
    rows, called = run_rows
    rows("dense_1b-full", "dense_1b-none")
    called.clear()
    monkeypatch.setitem(gpu.SETTINGS, "full", {"train.remat": "attention"})
    rows("dense_1b-full", "dense_1b-none")
    assert called == ["dense_1b-full"]


def test_a_failed_check_ends_the_others_unless_forced(run_rows):
    rows, called = run_rows
    with pytest.raises(ValueError, match=r"row check did not pass.*--force"):
        rows(statuses={"check": "failed"})
    assert called == ["machine", "check"]
    rows("dense_1b-full", statuses={"check": "failed"}, force=True)
    assert called[-1] == "dense_1b-full"


def test_a_check_that_is_stopped_starts_anew_before_the_others(run_rows):
    rows, called = run_rows
    assert rows("dense_1b-full", statuses={"check": "time"}) == ["check", "dense_1b-full"]
    assert rows("dense_1b-full") == []
    assert called == ["machine", "check", "check", "dense_1b-full"]


def test_a_row_that_its_limit_stops_is_followed_by_the_others(run_rows):
    rows, called = run_rows
    slow, names = {"dense_1b-none": "time"}, ("dense_1b-none", "dense_1b-full")
    assert rows(*names, statuses=slow) == ["dense_1b-none"]
    assert called == ["machine", "check", *names]
    assert rows.limits["dense_1b-none"] == gpu.ROWS["dense_1b-none"].limit_s
    assert rows.limits["check"] > 1e6  # nothing follows without it
    assert rows(*names) == []
    assert rows.limits["dense_1b-none"] > 1e6  # alone
    rows("moe_1b-none", "moe_1b-full", minutes=0.01)
    assert 0 < rows.limits["moe_1b-none"] <= 0.6  # of the whole call


def test_the_call_ends_before_the_first_row_without_time(tmp_path, capsys):
    gpu.main(["--minutes", "0", "--out", str(tmp_path / "gpu.jsonl"), "dense_1b-full"])
    text = capsys.readouterr().out
    assert "not run in the time limit: machine check dense_1b-full" in text
    assert f"python benchmark.py gpu --minutes 0 --out {tmp_path}/gpu.jsonl dense_1b-full\n" in text
    assert not (tmp_path / "gpu.jsonl").exists()


def test_exit_code_and_log_give_the_status():
    full = "Traceback\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\nFor more"
    autotuned = "W RESOURCE_EXHAUSTED while autotuning\nerror: the loss is not finite"
    for code, log, status, error in (
        (0, "", "ok", ""),
        (None, "", "time", "stopped after 9 s"),
        (1, full, "memory", "RESOURCE_EXHAUSTED"),
        (2, autotuned, "failed", "the loss is not finite"),
        (-6, "", "failed", "stopped with SIGABRT"),
    ):
        found = gpu.status_of(code, log, 9)
        assert found["status"] == status and error in found.get("error", "")


# --- rows and their sizes -------------------------------------------------------------------------


def test_every_row_fits_one_gpu_of_80_gb_by_the_plan():
    chip = hardware.CHIPS["h100"]
    for row in [*gpu.ROWS][2:]:
        cli.check(gpu.config_of(row, toy=False))
        if row.endswith(("-none", "-fp8", "-dropless")):  # the largest
            found = cost.predict(gpu.config_of(row, toy=False), chip)
            assert found.memory_bytes_per_chip < 0.9 * 0.92 * chip.memory_bytes, row
    dense, experts = (
        weights.count(model.declare(gpu.config_of(f"{name}_124m-none", toy=False)))
        for name in ("dense", "moe")
    )
    assert experts[1] == pytest.approx(dense[1], rel=0.005) and experts[0] > 1.7 * dense[0]


def test_a_row_has_the_settings_and_flags_of_its_name(monkeypatch):
    def values(row):
        train = gpu.config_of(row, toy=False).train
        return train.layers, train.remat, train.global_batch_size // train.microbatches

    assert values("dense_1b-none") == values("dense_1b-triton") == ("unrolled", "none", 32)
    assert values("dense_1b-scanned") == ("scanned", "none", 32)
    assert values("dense_1b-microbatch8") == ("unrolled", "none", 8)
    assert values("dense_1b-full") == ("unrolled", "full", 32)
    assert gpu.config_of("dense_1b-fp8", toy=False).model.matmul_dtype == "float8"
    assert gpu.config_of("moe_1b-none", toy=False).model.capacity_factor == 1.5
    assert gpu.config_of("moe_1b-dropless", toy=True).model.capacity_factor == 0

    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    assert train.compiler_options(mesh) == {"xla_gpu_enable_triton_gemm": False}
    monkeypatch.setenv("XLA_FLAGS", gpu.XLA_FLAGS["triton"])
    assert not train.compiler_options(mesh)


def test_the_first_rows_end_within_the_time_of_a_call():
    first = itertools.islice(gpu.ROWS.items(), 9)
    limits = {row: value.limit_s for row, value in first}
    assert [*limits][:2] == list(gpu.GATES)
    assert {"dense_1b-fp8", "moe_1b-dropless", "dense_1b-profile"} <= limits.keys()
    assert sum(limits.values()) <= 60 * gpu.parse([]).minutes < 600


def test_slow_steps_are_fewer(monkeypatch):
    plan = types.SimpleNamespace(tokens_per_s=lambda s: 6 / s, chip=None)
    monkeypatch.setattr(gpu.memory, "peak_bytes", lambda mesh, step: (7, ""))
    report = {"stats": types.SimpleNamespace(loss=1.0)}
    for seconds, count in ((1, 10), (3, 8), (9, 6)):
        one = types.SimpleNamespace(mesh=None, step=None)
        one.steps = lambda seconds=seconds: itertools.repeat((seconds, report))
        found = gpu.time_steps(one, plan)
        assert len(found["steps_s"]) == len(found["losses"]) == count
        assert found["step_s"] == seconds and found["tokens_per_s"] == 6 / seconds


# --- the check ------------------------------------------------------------------------------------


def test_one_wrong_gradient_of_many_and_nan_do_not_pass_the_check():
    expected = {"large": 1e6 * np.ones(5), "small": np.ones(5), "bias": np.zeros(5)}
    errors = gpu.relative_errors(expected | {"small": 1.5 * np.ones(5)}, expected)
    assert errors == {"large": 0, "small": 0.5, "bias": 0}
    assert gpu.relative_errors(expected | {"bias": expected["small"]}, expected)["bias"] == math.inf
    assert "loss off by 0.0e+00" in gpu.check_errors("bfloat16", 0.0, {"a": 0.0, "b": 0.01})
    for loss, gradient in ((0.0, 0.5), (math.nan, 0.0), (0.0, math.nan), (0.5, 0.0)):
        with pytest.raises(ValueError, match="does not compute what the CPU does"):
            gpu.check_errors("bfloat16", loss, {"a": 0.0, "b": gradient})


def test_a_gpu_without_fp8_products_is_checked_without_them(monkeypatch):
    monkeypatch.setattr(gpu, "gradients", lambda *_: {"loss": 1.0, "gate": np.ones(5)})
    kind = {"device_kind": "NVIDIA A100-SXM4-80GB", "platform": "gpu", "compute_capability": "8.0"}
    found = [*gpu.check(types.SimpleNamespace(**kind), toy=True)]
    assert any("bfloat16_loss_error" in part for part in found)
    assert not any("float8_loss_error" in part for part in found)
    assert "float8: no FP8 products on a100" in found[-1]["text"]
