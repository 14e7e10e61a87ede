"""metrics.jsonl, and what a run prints."""

import io
import json
import re
import resource

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import metrics
import utils
from runtime import console, jsonl

CONFIG = utils.Config(train=utils.Train(steps=4))


def step(number, **changed):
    values = dict.fromkeys(metrics.TRAIN, 0.5)
    return values | {"step": number, "tokens": 10 * number, "skipped": 0} | changed


def evaluation(number, **changed):
    tokens = {"moe/tokens_per_expert": [[3, 1], [2, 2]], "moe/dropped": 0.25}
    losses = {"loss/val": 3.5, "bits_per_byte": 2.5, "loss/val_balance": 1.125}
    return {"step": number} | losses | tokens | changed


def lines(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_every_step_and_evaluation_is_a_line_of_json_as_soon_as_it_is_known(tmp_path):
    strange = {"loss/train": jnp.float32(jnp.nan), "grad_norm": float("inf"), "mfu": None}
    plain = dict.fromkeys(strange)
    with metrics.Metrics(CONFIG, tmp_path / "run") as out:
        out.train(step(1))
        out.evaluation(evaluation(1))
        assert lines(tmp_path / "run") == [step(1), evaluation(1)]
        out.train(step(2, lr=np.float32(0.25), skipped=jnp.int32(1), **strange))
        out.evaluation(evaluation(2, **{"moe/tokens_per_expert": jnp.ones((2, 2), jnp.int32)}))
        with pytest.raises(AssertionError, match="loss/tran"):
            out.train(step(3) | {"loss/tran": 1.0})
    train, val = lines(tmp_path / "run")[2:]
    assert train == step(2, lr=0.25, skipped=1, **plain)
    assert val["moe/tokens_per_expert"] == [[1, 1], [1, 1]]


def test_records_that_a_full_disk_refuses_are_written_when_it_has_space(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with metrics.Metrics(CONFIG, tmp_path) as out:
        out.train(step(1))
        full = (tmp_path / "metrics.jsonl").stat().st_size + 9
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, before[1]))
        try:
            out.train(step(2))
            out.evaluation(evaluation(2))
            with pytest.raises(OSError, match="File too large"):
                out.sync()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert jsonl.read(tmp_path / "metrics.jsonl") == [step(1)]
        out.sync()  # as before a save
        assert lines(tmp_path) == [step(1), step(2), evaluation(2)]
    assert capsys.readouterr().out.count("warning: records are kept in memory") == 1


def test_a_resumed_run_records_no_step_twice_and_a_new_one_keeps_no_old_line(tmp_path):
    with metrics.Metrics(CONFIG, tmp_path) as out:
        out.evaluation(evaluation(0))
        for number in (1, 2, 3):
            out.train(step(number))
            out.evaluation(evaluation(number))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')  # the run was killed here
    with metrics.Metrics(CONFIG, tmp_path, step=2) as out:
        out.train(step(3, lr=0.125))
    kept = [evaluation(0), step(1), evaluation(1), step(2), evaluation(2), step(3, lr=0.125)]
    assert lines(tmp_path) == kept
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    with metrics.Metrics(CONFIG, tmp_path):
        assert lines(tmp_path) == []


def test_a_truncated_line_loses_no_other_record(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "te')
    jsonl.append(path, [{"step": 3}])
    jsonl.append(path, [{"step": 4}])
    assert [record["step"] for record in jsonl.read(path)] == [1, 3, 4]
    jsonl.truncate(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


# --- the console ---------------------------------------------------------------------------------


def test_evaluations_and_some_steps_are_printed_with_the_time_left(tmp_path, capsys):
    now = iter([100.0, 104.0, 4000.0, 4001.0])
    known = {"loss/train": 2.5, "tokens_per_s": 12345.6, "mfu": 0.4567}
    dense = {"moe/tokens_per_expert": [], "loss/val_balance": None, "moe/dropped": None}
    with metrics.Metrics(CONFIG, tmp_path, clock=lambda: next(now)) as out:
        out.train(step(1, mfu=None))
        out.train(step(2))  # within LINE_EVERY_S
        out.evaluation(evaluation(2))
        out.evaluation(evaluation(2, **dense))
        out.train(step(3, skipped=3, **known))
        out.train(step(4))
    first, moe, dense, third, last = capsys.readouterr().out.splitlines()
    assert first == "step 1/4  loss 0.5000  0 tokens/s"
    assert moe == "step 2/4  validation loss 3.5000  balance 1.125  dropped 25.00%"
    assert dense == "step 2/4  validation loss 3.5000"
    assert third == "step 3/4  loss 2.5000  12,346 tokens/s  MFU 45.7%  3 skipped  0:32:30 left"
    assert last.startswith("step 4/4 ")


def test_a_terminal_shows_every_step_and_lines_above_it(tmp_path, monkeypatch):
    screen = Console(file=(terminal := io.StringIO()), force_terminal=True, width=100)
    for where in (metrics, console):
        monkeypatch.setattr(where, "console", screen)
    with metrics.Metrics(CONFIG, tmp_path) as out:
        out.train(step(1))
        console.log("a sample: [bold]def")
        out.train(step(2))
        out.train(step(4))
    # The bar is erased (\x1b[2K) and drawn again, with its text; a line in its place stays.
    kept = re.findall(r"\x1b\[2K(a sample: \[bold\]def|step ./4  loss)", terminal.getvalue())
    assert kept == ["step 1/4  loss", "a sample: [bold]def", "step 4/4  loss"]
