"""Plots of made-up runs, checked in matplotlib's objects rather than in pixels."""

import json
import os
import sys

import numpy as np
import pytest

import plot
from runtime import jsonl


def write_run(folder, *, every=2, layers=3, tokens_per_step=128, factor=0.5, extra=""):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, 7):
        loss = {"loss/train": 8.0 / step, "loss/cross_entropy": 7.0 / step}
        loss |= {"grad_norm": 2.0 / step, "lr": 0.01, "tokens_per_s": 100.0 * step, "mfu": None}
        balance = {"loss/balance": factor * layers * 1.25}
        lines.append({"step": step, "tokens": step * tokens_per_step} | loss | balance)
        if step % every == 0:
            tokens = [[layer + 1, 1, 2, 4] for layer in range(layers)]
            val = {"loss/val": 7.5 / step, "loss/val_balance": 1.5 if layers else None}
            val |= {"moe/tokens_per_expert": tokens, "moe/dropped": 0.0}
            lines.append({"step": step} | val)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + extra)
    model = f"[model]\nnum_hidden_layers = {2 * layers}\naux_loss_alpha = {factor}\n"
    (folder / "config.toml").write_text(model)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "tiny")


def test_a_run_has_its_plots_which_are_replaced_atomically(folder, monkeypatch):
    files = plot.plot_runs([folder])
    names = ["validation_loss", "load_loss", "tokens_per_expert", *list(plot.OF_STEPS)[1:]]
    pictures = [folder / "plots" / f"{name}.png" for name in names]
    assert files == [*pictures, folder / "report.html"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)
    files[0].write_bytes(b"old")
    monkeypatch.setattr(os, "replace", None)  # a kill before the file is complete
    with pytest.raises(TypeError):
        plot.plot_runs([folder])
    assert files[0].read_bytes() == b"old"


def test_tokens_per_expert_are_shares_of_each_layers_tokens(folder):
    run = plot.RunRecords(folder)
    assert run.share.shape == (3, 3, 4)
    np.testing.assert_allclose(run.share[0, 2], [0.3, 0.1, 0.2, 0.4])
    panel = plot.tokens_per_expert(run).axes[2]
    assert panel.get_title() == "MoE layer 2"
    [drawn] = [line for line in panel.lines if line.get_label() == "3"]
    np.testing.assert_allclose(drawn.get_xydata(), [[256, 0.4], [512, 0.4], [768, 0.4]])


def test_curves_are_of_their_own_keys_and_balance_without_its_factor(folder, tmp_path):
    run, records = plot.RunRecords(folder), jsonl.read(folder / "metrics.jsonl")
    columns = {"train": "loss/cross_entropy", "val": "loss/val", "val_balance": "loss/val_balance"}
    for name, key in columns.items():
        assert getattr(run, name).tolist() == [r[key] for r in records if key in r]
    [ax] = plot.load_loss([run]).axes
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1.25] * 6)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1.5] * 3)
    [ax] = plot.load_loss([plot.RunRecords(write_run(tmp_path / "zero", factor=0.0))]).axes
    assert [len(line.get_ydata()) for line in ax.lines] == [3, 2]  # evaluations, and the dashed one


def test_several_runs_are_drawn_over_each_other(folder, tmp_path, monkeypatch, capsys):
    """Without tokens per expert; of dense ones a validation loss only."""
    runs = folder, write_run(tmp_path / "b", tokens_per_step=64, layers=2)
    [ax] = plot.validation_loss([plot.RunRecords(run) for run in runs]).axes
    assert len(ax.lines) == 5 and ax.get_xlabel() == "tokens"  # one is of the legend
    monkeypatch.setattr(sys, "argv", ["plot.py", "--run", *map(str, runs)])
    plot.main()
    plots = tmp_path / "tiny+b" / "plots"
    assert capsys.readouterr().out.split()[0] == str(plots / "validation_loss.png")
    assert len(list(plots.iterdir())) == 5 and (tmp_path / "tiny+b" / "report.html").is_file()
    files = plot.plot_runs([write_run(tmp_path / "dense", layers=0)])
    assert {file.stem for file in files} & {
        "validation_loss",
        "load_loss",
        "tokens_per_expert",
    } == {"validation_loss"}


def test_a_loss_that_was_not_finite_is_a_gap_and_a_truncated_line_is_skipped(tmp_path):
    lost = {"step": 8, "loss/val": None, "loss/val_balance": None}
    lost |= {"moe/tokens_per_expert": [[1, 1, 1, 1]] * 3, "moe/dropped": None}
    extra = json.dumps(lost) + '\n{"step": 7, "tok'
    run = plot.RunRecords(write_run(tmp_path / "tiny", extra=extra))
    assert np.isnan(run.val[-1]) and run.steps[-1] == 6
    plot.validation_loss([run])


def test_values_of_steps_are_drawn_but_for_the_slow_first_step_of_each_start(folder, tmp_path):
    (folder / "starts.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
    longer = write_run(tmp_path / "longer", tokens_per_step=256)
    runs = [plot.RunRecords(folder), plot.RunRecords(longer)]
    values = [line.get_ydata() for line in plot.of_steps(runs, "tokens_per_second").axes[0].lines]
    np.testing.assert_array_equal(values[0], [np.nan, 200, 300, np.nan, 500, 600])
    np.testing.assert_array_equal(values[1], [100, 200, 300, 400, 500, 600])
    [ax] = plot.of_steps(runs, "gradient_norm").axes
    assert ax.get_yscale() == "log"
    assert [line.get_xydata()[-1].tolist() for line in ax.lines] == [[768, 2 / 6], [1536, 2 / 6]]
    runs[0].lr[:] = np.nan
    assert plot.of_steps(runs[:1], "learning_rate") is None


def test_a_run_without_an_evaluation_has_its_training_loss(tmp_path):
    files = plot.plot_runs([write_run(tmp_path / "young", every=100)])
    names = ["training_loss", "gradient_norm", "learning_rate", "tokens_per_second", "report"]
    assert [file.stem for file in files] == names
    plot.plot_runs([tmp_path / "young", write_run(tmp_path / "tiny")])


def test_a_folder_of_no_run_or_before_its_first_step_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot.py", "--run", str(tmp_path)])
    with pytest.raises(ValueError, match=r"has no config.toml. Give the folder of a run"):
        plot.main()
    (write_run(tmp_path / "new") / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"new/metrics.jsonl has no steps. Start the run again"):
        plot.plot_runs([tmp_path / "new"])
    for flags in ([], ["--run", "a", "--runs", "b"]):
        monkeypatch.setattr(sys, "argv", ["plot.py", *flags])
        with pytest.raises(ValueError, match="more runs, as --run runs/tiny, or a folder of runs"):
            plot.main()
