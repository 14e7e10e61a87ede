"""Plots of made-up runs, checked in matplotlib's objects rather than in pixels."""

import json
import os
import sys

import numpy as np
import pytest

import plot
from runtime import jsonl

PNG = b"\x89PNG"


def write_run(folder, *, steps=6, every=2, layers=3, tokens_per_step=128, factor=0.5, extra=""):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        loss = {"loss/train": 8.0 / step, "loss/cross_entropy": 7.0 / step}
        balance = {"loss/balance": factor * layers * 1.25}
        lines.append({"step": step, "tokens": step * tokens_per_step} | loss | balance)
        if step % every == 0:
            tokens = [[layer + 1, 1, 2, 4] for layer in range(layers)]
            val = {
                "step": step,
                "loss/val": 7.5 / step,
                "loss/val_balance": 1.5 if layers else None,
            }
            lines.append(val | {"moe/tokens_per_expert": tokens, "moe/dropped": 0.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + extra)
    model = f"[model]\nnum_hidden_layers = {2 * layers}\naux_loss_alpha = {factor}\n"
    (folder / "config.toml").write_text(model)
    return folder


def test_a_run_has_three_plots(tmp_path):
    folder = write_run(tmp_path / "tiny")
    files = plot.plot_run(folder)
    names = ["validation_loss.png", "load_loss.png", "tokens_per_expert.png"]
    assert files == [folder / "plots" / name for name in names]
    assert all(file.read_bytes().startswith(PNG) for file in files)


class Killed(Exception):
    """What a program that is killed ends with here."""


def test_losses_and_balance_are_of_their_own_keys(tmp_path):
    folder = write_run(tmp_path / "tiny")
    records = jsonl.read(folder / "metrics.jsonl")
    run = plot.RunRecords(folder)
    for name, key in (("val", "loss/val"), ("val_balance", "loss/val_balance")):
        expected = [record[key] for record in records if "loss/val" in record]
        assert getattr(run, name).tolist() == expected
    cross_entropy = [r["loss/cross_entropy"] for r in records if "loss/train" in r]
    assert run.train.tolist() == cross_entropy


def test_a_plot_is_replaced_atomically(tmp_path, monkeypatch):
    """After a kill during the write there is the old plot or none; the next plot is complete."""
    folder = write_run(tmp_path / "tiny")

    def killed(source, to):
        raise Killed

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(Killed):
        plot.plot_run(folder)
    assert not list(folder.glob("plots/*.png"))
    monkeypatch.undo()
    whole = [file.read_bytes() for file in plot.plot_run(folder, overwrite=False)]
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(Killed):
        plot.plot_run(folder)
    assert [file.read_bytes() for file in plot.plot_run(folder, overwrite=False)] == whole


def test_without_overwrite_only_missing_plots_are_drawn(tmp_path):
    folder = write_run(tmp_path / "tiny")
    first, second, third = plot.plot_run(folder)
    second.unlink()
    third.write_bytes(b"old")
    before = first.stat().st_mtime_ns
    assert plot.plot_run(folder, overwrite=False) == [first, second, third]
    assert second.read_bytes().startswith(PNG)
    assert (first.stat().st_mtime_ns, third.read_bytes()) == (before, b"old")
    plot.plot_run(folder)
    assert third.read_bytes().startswith(PNG)


def test_tokens_per_expert_are_shares_of_each_layers_tokens(tmp_path):
    run = plot.RunRecords(write_run(tmp_path / "tiny"))
    assert run.share.shape == (3, 3, 4)
    np.testing.assert_allclose(run.share[0, 2], [0.3, 0.1, 0.2, 0.4])
    figure = plot.tokens_per_expert([run])
    panel = figure.axes[2]
    assert panel.get_title() == "MoE layer 2"
    drawn = {line.get_label(): line for line in panel.lines}
    np.testing.assert_allclose(drawn["3"].get_ydata(), [0.4] * 3)
    np.testing.assert_allclose(drawn["3"].get_xdata(), [256, 512, 768])


def test_balance_in_training_is_drawn_without_its_factor(tmp_path):
    run = plot.RunRecords(write_run(tmp_path / "tiny"))
    [ax] = plot.load_loss([run]).axes
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1.25] * 6)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1.5] * 3)


def test_balance_in_training_is_left_out_where_its_factor_is_zero(tmp_path):
    run = plot.RunRecords(write_run(tmp_path / "tiny", factor=0.0))
    [ax] = plot.load_loss([run]).axes
    assert [len(line.get_ydata()) for line in ax.lines] == [3, 2]  # evaluations, and the dashed one


def test_axes_have_tokens_below_and_steps_above(tmp_path):
    [ax] = plot.validation_loss([plot.RunRecords(write_run(tmp_path / "tiny"))]).axes
    assert ax.get_xlabel() == "tokens"
    assert [child.get_xlabel() for child in ax.child_axes] == ["steps"]


def test_steps_are_not_on_the_axis_of_runs_with_other_batches(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", tokens_per_step=64)]
    [ax] = plot.validation_loss([plot.RunRecords(run) for run in runs]).axes
    assert ax.child_axes == []


def test_several_runs_are_drawn_over_each_other(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", tokens_per_step=64, layers=2)
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(sys, "argv", ["plot.py", "--run", *runs])
    plot.main()
    printed = capsys.readouterr().out.split()
    assert printed[0] == str(tmp_path / "a+b" / "plots" / "validation_loss.png")
    assert len(list((tmp_path / "a+b" / "plots").iterdir())) == 3


def test_a_dense_run_has_a_validation_loss_only(tmp_path):
    files = plot.plot_run(write_run(tmp_path / "dense", layers=0))
    assert [file.name for file in files] == ["validation_loss.png"]


def test_a_truncated_line_is_skipped(tmp_path):
    run = plot.RunRecords(write_run(tmp_path / "tiny", extra='{"step": 7, "tok'))
    assert run.steps[-1] == 6


def test_a_loss_that_was_not_finite_is_a_gap(tmp_path):
    lost = {"step": 8, "loss/val": None, "loss/val_balance": None}
    lost |= {"moe/tokens_per_expert": [[1, 1, 1, 1]] * 3, "moe/dropped": None}
    run = plot.RunRecords(write_run(tmp_path / "tiny", extra=json.dumps(lost) + "\n"))
    assert np.isnan(run.val[-1])
    plot.validation_loss([run])


def test_a_folder_without_metrics_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot.py", "--run", str(tmp_path)])
    with pytest.raises(ValueError, match=r"has no metrics.jsonl. Give the folder of a run"):
        plot.main()


def test_a_run_before_its_first_evaluation_is_refused(tmp_path):
    folder = write_run(tmp_path / "young", every=100)
    with pytest.raises(ValueError, match="6 steps and 0 evaluations"):
        plot.plot_run(folder)


def start_of(begin, steps_s, repeated_s=0.0, compile_s=7200.0):
    seconds = {"steps": steps_s, "compile": compile_s}
    line = {"begin": begin, "end": begin + steps_s + compile_s, "step": 4, "ended": False}
    return line | {"repeated_s": repeated_s, "seconds": seconds}


def widths(ax):
    """{kind: width of each bar} of a stacked chart."""
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in ax.containers}


def test_wall_time_of_a_run_is_one_bar_of_all_its_starts():
    lines = [start_of(0.0, 36000.0), start_of(46800.0, 18000.0, repeated_s=3600.0)]
    [ax] = plot.wall_time([("tiny", lines)]).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["tiny"]
    expected = {"steps": [14], "compile": [4], "repeated": [1], "down": [1]}
    assert widths(ax) == expected and ax.get_xlabel() == "hours"


def test_wall_time_of_several_runs_is_a_bar_each_and_of_short_ones_in_seconds():
    runs = [(name, [start_of(0.0, 60.0, compile_s=6.0)]) for name in ("a", "b")]
    [ax] = plot.wall_time(runs).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert widths(ax) == {"steps": [60, 60], "compile": [6, 6]} and ax.get_xlabel() == "seconds"


def test_a_run_with_goodput_has_a_picture_of_its_time(tmp_path):
    folder = write_run(tmp_path / "tiny")
    (folder / "goodput.jsonl").write_text(json.dumps(start_of(0.0, 60.0)) + "\n")
    assert plot.plot_run(folder)[-1] == folder / "plots" / "wall_time.png"
