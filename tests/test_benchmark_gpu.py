"""benchmark.py gpu without a GPU: which rows run, and how their results are judged."""

import argparse
import math

import numpy as np
import pytest

import hardware
import model
import weights
from benchmarks import common, gpu
from planning import cost


def test_real_sizes_are_refused_without_a_gpu_and_so_are_unknown_rows():
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*--toy"):
        gpu.accelerator(toy=False)
    assert gpu.accelerator(toy=True) == common.jax.devices()[0]
    with pytest.raises(ValueError, match=r"no row dense_1b_full\. Use some of machine, .*1b-full"):
        gpu.parse(["dense_1b_full"])
    assert gpu.parse([]).names == gpu.ROWS


# --- rows that fail, and time ---------------------------------------------------------------------


@pytest.fixture
def run_rows(tmp_path, monkeypatch):
    """A function that runs rows that end with these statuses, and the list of rows that it ran."""
    called = []

    def rows(*names, statuses=None, **values):
        def run(row, toy, folder, limit_s):
            called.append(row)
            return {"text": "fine", "error": "broken", "status": (statuses or {}).get(row, "ok")}

        parsed = gpu.parse([*names, f"--out={tmp_path / 'x' / 'gpu.jsonl'}"])
        return gpu.run_rows(argparse.Namespace(**vars(parsed) | {"minutes": 1e6} | values), run)

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


def test_a_failed_check_ends_the_others_unless_forced(run_rows):
    rows, called = run_rows
    with pytest.raises(ValueError, match=r"row check did not pass.*--force"):
        rows(statuses={"check": "failed"})
    assert called == ["machine", "check"]
    rows("dense_1b-full", statuses={"check": "failed"}, force=True)
    assert called[-1] == "dense_1b-full"


def test_without_time_no_row_starts_and_a_stopped_one_starts_anew(run_rows, tmp_path, capsys):
    rows, called = run_rows
    assert rows("dense_1b-full", statuses={"check": "time"}) == ["check", "dense_1b-full"]
    assert rows("dense_1b-full") == []
    assert called == ["machine", "check", "check", "dense_1b-full"]
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
    assert gpu.ROWS[:2] == gpu.GATES and len(set(gpu.ROWS)) == len(gpu.ROWS) == 18
    chip = hardware.CHIPS["h100"]
    for name in gpu.MODELS:
        for kind in ("none", "full"):
            found = cost.predict(gpu.config_of(f"{name}-{kind}", toy=False), chip)
            assert found.memory_bytes_per_chip < 0.9 * 0.92 * chip.memory_bytes, (name, kind)
    dense, experts = (
        weights.count(model.declare(gpu.config_of(f"{name}_124m-full", toy=False)))
        for name in ("dense", "moe")
    )
    assert experts[1] == pytest.approx(dense[1], rel=0.005) and experts[0] > 1.7 * dense[0]


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
