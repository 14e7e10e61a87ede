"""Which runs the ladder needs, and what its table has."""

import json
import math

import pytest

from benchmarks import ladder
from benchmarks.ladder import Run, Series

SERIES = Series("muon", 2, 128)


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({0.01: 3.0, 0.02: 2.9, 0.04: 3.1}, 0.014),  # between the best and its better neighbor
        ({0.01: 3.2, 0.02: 2.9, 0.04: 3.1}, 0.028),
        ({0.01: 2.8, 0.02: 2.9, 0.04: 3.1}, 0.005),  # beyond the best, at an end
        ({0.01: 3.2, 0.02: 2.9, 0.04: 2.8}, 0.08),
    ],
)
def test_the_next_learning_rate_is_near_the_best(losses, rate):
    assert ladder.next_rate(losses) == rate


def test_five_rates_are_tried_and_the_best_and_that_of_the_depth_have_all_seeds():
    def loss(rate):
        return 3 + abs(rate - 0.03)

    losses = {}
    while new := [run for run in ladder.needed(losses, SERIES, ladder.TRIES) if run not in losses]:
        losses |= {run: loss(run.lr) for run in new}
    first = {run.lr for run in losses if run.seed == 0}
    best = min(first, key=loss)
    assert best == 0.028 and len(first - {SERIES.rule()}) >= ladder.TRIES - 1
    for rate in (best, SERIES.rule()):
        assert {run.seed for run in losses if run.lr == rate} == {0, 1, 2}
    assert not [run for run in losses if run.seed and run.lr not in (best, SERIES.rule())]


def test_a_record_is_read_as_its_run_and_one_that_diverged_is_the_worst(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "RECORDS", tmp_path / "ladder.jsonl")
    assert ladder.read() == {}
    runs = {
        Run(SERIES, 0.02, 0): 3.5,
        Run(SERIES, SERIES.rule(), 0): 3.6,
        Run(SERIES, 1.0, 0): None,
    }
    lines = [
        {"series": vars(r.series), "lr": r.lr, "seed": r.seed, "loss": x} for r, x in runs.items()
    ]
    ladder.RECORDS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ladder.read()
    assert found.keys() == runs.keys() and max(found.values()) == float("inf")
    row = ladder.table(found).splitlines()[-1]
    assert row.startswith("| muon, depth 2, 128 steps | 524,288 | ")
    assert row.endswith(f"| 0.02 |  | {SERIES.rule():g} |  | +0.1000 |"), "two finite losses"


def test_a_parabola_of_losses_has_its_minimum():
    losses = {rate: 3 + 0.2 * math.log(rate / 0.03) ** 2 for rate in (0.01, 0.02, 0.05, 0.08)}
    best, above = ladder.parabola(losses | {1.0: math.inf}, 0.06)
    assert (best, above) == ("0.03", f"{0.2 * math.log(2) ** 2:+.4f}")


def test_flags_of_a_run_keep_the_product_of_rate_decay_and_steps():
    flags = Run(Series("adamw", 4, 512, decay=6.0, dense=True), 0.002, 1).flags()
    found = dict(zip(flags[3::2], flags[4::2], strict=True))
    assert flags[:3] == ["--depth", "4", "--dense"]
    assert 0.002 * 512 * float(found["--optimizer.weight_decay"]) == pytest.approx(6, rel=0.03)
    assert found["--train.seed"] == found["--data.seed"] == "1"
