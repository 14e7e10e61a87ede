import itertools
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import benchmark_recipe as recipe
import utils
from benchmark_recipe import Measured, Spread, Trial
from conftest import ROOT
from hosts import wait_for

# Instead of main.py: half of its steps, then the other half when it is started again.
STAND_IN = """
import json, os, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(flags["--run.dir"], flags["--run.name"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "id").write_text(str(os.getpid()))
(folder / "starts.jsonl").open("a").write(json.dumps(
    {"commit": COMMIT, "changed": False, "versions": {"jax": "1.2.3"}}) + "\\n")
if float(flags["--optimizer.lr"]) > HIGHEST:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss/val": None}) + "\\n")
        file.write(json.dumps({"step": 6, "loss/train": None, "grad_norm": None}) + "\\n")
    sys.exit(2)
begun = (folder / "metrics.jsonl").exists()
with (folder / "metrics.jsonl").open("a") as file:
    step = 8 if begun else 4
    loss = 3 + abs(float(flags["--optimizer.lr"]) - 7e-3) + (8 - step) / 8
    file.write(json.dumps({"step": step, "loss/val": loss}) + "\\n")
if not begun and SLOW:
    time.sleep(60)
if not begun:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "loss/val": loss - 0.5}) + "\\n")
if CODE:
    print("what went before\\nno such data\\n")
sys.exit(CODE)
"""


def run_of(loss, steps=128):
    return Measured(np.array([steps / 2, steps]), np.array([loss + 1, loss]))


def made(size, name, best, noise=0.0):
    """All runs of a recipe whose loss is least at a learning rate; and in which order of rates."""
    runs, rates = {}, []
    while new := [t for t in recipe.wanted(runs, size, name) if t not in runs]:
        for trial in new:
            loss = 3 + math.log2(trial.lr / best) ** 2 + noise * trial.seed
            runs[trial] = run_of(loss)
            rates.append(trial.lr)
    return runs, rates


@pytest.mark.parametrize(
    ("best", "later", "chosen"),
    [
        (4e-3, [2.8e-3, 3.3e-3], 4e-3),  # both neighbours alike: the lower
        (5.5e-3, [5.7e-3, 4.8e-3], 5.7e-3),
        (8e-3, [0.016, 5.7e-3], 8e-3),
        (0.1, [0.016, 0.032], 0.032),
        (1e-3, [1e-3, 5e-4], 1e-3),
    ],
)
def test_every_recipe_has_as_many_tries_and_the_best_has_the_other_seeds(best, later, chosen):
    runs, rates = made("5M", "adamw", best)
    assert rates[:5] == [4e-3, 8e-3, 2e-3, *later]
    assert rates[5:] == [chosen] * (len(recipe.SEEDS) - 1)
    assert len(rates) == recipe.runs_of(("5M", "adamw"))
    assert recipe.best_rate(runs, "5M", "adamw") == chosen


def test_the_largest_size_tries_what_its_width_makes_of_a_smaller_ones_best():
    assert recipe.wanted({}, "20M", "adamw") == []
    smaller, _ = made("5M", "adamw", 5.5e-3)
    assert recipe.best_rate(smaller, "5M", "adamw") == 5.7e-3
    tried = [trial.lr for trial in recipe.wanted(smaller, "20M", "adamw")]
    assert tried == [2.9e-3, 5.7e-3, 1.4e-3]
    runs = smaller | {
        Trial("20M", "adamw", rate, 0): run_of(loss)
        for rate, loss in zip(tried, (3.2, 3.1, 3.3), strict=True)
    }
    beyond = recipe.wanted(runs, "20M", "adamw")[-1]
    assert beyond == Trial("20M", "adamw", 0.011, 0)
    runs |= {beyond: run_of(3.15)}
    seeds = [t for t in recipe.wanted(runs, "20M", "adamw") if t not in runs]
    assert seeds == [Trial("20M", "adamw", 5.7e-3, seed) for seed in recipe.SEEDS[1:]]
    assert len(tried) + 1 + len(seeds) == recipe.runs_of(("20M", "adamw"))


def test_what_is_compared_has_the_rate_of_the_other_and_waits_for_it():
    other = next(name for name, r in recipe.RECIPES.items() if r.like == "muon")
    assert recipe.wanted({}, "5M", other) == []
    runs, _ = made("5M", "muon", 4e-3)
    wanted = recipe.wanted(runs, "5M", other)
    assert wanted == [Trial("5M", other, 4e-3, seed) for seed in recipe.SEEDS]
    assert len(wanted) == recipe.runs_of(("5M", other))


def test_a_recipe_beside_one_that_is_not_tuned_has_the_rate_of_that_ones_other(monkeypatch):
    other = next(name for name, r in recipe.RECIPES.items() if r.like == "muon")
    second = recipe.Recipe("something else", (), other)
    monkeypatch.setitem(recipe.RECIPES, "second", second)
    runs, _ = made("5M", "muon", 4e-3)
    wanted = recipe.wanted(runs, "5M", "second")
    assert wanted == [Trial("5M", "second", 4e-3, seed) for seed in recipe.SEEDS]


def test_losses_are_compared_seed_by_seed():
    adamw, _ = made("5M", "adamw", 4e-3, noise=0.5)
    muon = {Trial(t.size, "muon", t.lr, t.seed): run_of(r.last - 0.25) for t, r in adamw.items()}
    a, b = (recipe.row_of(adamw | muon, "5M", name) for name in ("adamw", "muon"))
    assert a.loss == pytest.approx((3.5, 0.5 / math.sqrt(3)))
    assert b.less_than(a) == pytest.approx((-0.25, 0.0))


def test_steps_to_anothers_loss_are_compared_seed_by_seed():
    steps = np.array([64.0, 128.0])
    rows = []
    for losses in ([(4.5, 3.0), (4.5, 3.4)], [(3.5, 2.5), (3.5, 3.1)]):
        runs = {seed: Measured(steps, np.array(loss)) for seed, loss in enumerate(losses)}
        rows.append(recipe.Row("5M", "", 4e-3, 1, runs))
    a, b = rows  # b is where a ends after 96 and 80 steps
    assert b.share_to(a) == pytest.approx((0.6875, 0.0625))
    assert a.share_to(b) is None  # never as low
    apart = recipe.Row("5M", "", 4e-3, 1, {7: run_of(2.0)})
    assert apart.share_to(a) is None


def test_rows_without_a_common_seed_have_no_difference():
    runs, _ = made("5M", "muon", 4e-3)
    other = next(name for name, r in recipe.RECIPES.items() if r.like == "muon")
    runs = {t: run for t, run in runs.items() if t.seed == 0}
    runs[Trial("5M", other, 4e-3, 1)] = run_of(2.5)
    [row] = [line for line in recipe.table(runs).splitlines() if "2.5000" in line]
    assert "| 2.5000 | Muon for matrices |  |" in row


def test_a_best_rate_that_is_the_last_of_those_tried_is_told():
    for best, told in ((4e-3, "| 0.004 |"), (0.1, "| 0.032 (highest"), (1e-4, "| 0.0005 (lowest")):
        assert told in recipe.table(made("5M", "adamw", best)[0])


def test_steps_to_a_loss_lie_on_the_line_between_evaluations():
    run = Measured(np.array([16, 32, 48]), np.array([5.0, 4.0, 3.5]))
    assert recipe.steps_to(run, 5.5) == 16
    assert recipe.steps_to(run, 4.25) == pytest.approx(28)
    assert recipe.steps_to(run, 3.5) == 48
    assert recipe.steps_to(run, 3.4) is None


def test_one_value_has_no_error():
    assert Spread.of([3.0]).text(2) == "3.00"
    assert Spread.of([3.0, 5.0]).text(2) == "4.00 ± 1.00"


def test_flags_of_every_trial_are_a_config_whose_model_grows_with_its_width():
    for size, (name, what) in itertools.product(recipe.SIZES, recipe.RECIPES.items()):
        if what.commit:  # its code is no longer here
            continue
        trial = Trial(size, name, 3e-3, 7)
        config = utils.parse(["--config", str(ROOT / recipe.CONFIG), *trial.flags()])
        assert config.train.seed == config.data.seed == 7 and config.optimizer.lr == 3e-3
        assert config.model.width == recipe.SIZES[size][0]
        assert config.model.width / config.model.heads == 40
        assert trial.name == f"{size}-{name}-0.003-7"


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    def put(slow=False, code=0, commit="c0ffee", highest=1.0):
        text = STAND_IN
        told = {"SLOW": slow, "CODE": code, "COMMIT": commit, "HIGHEST": highest}
        for name, value in told.items():
            text = text.replace(name, repr(value))
        (tmp_path / "main.py").write_text(text)

    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    monkeypatch.setattr(recipe, "POLL_S", 0.05)
    monkeypatch.setattr(recipe, "SEEDS", (0, 1))
    put()
    return SimpleNamespace(
        put=put, file=tmp_path / "runs.jsonl", folder=tmp_path / "runs", root=tmp_path
    )


def test_runs_are_made_recorded_once_and_not_made_again(stand_in, capfd):
    rows = [("5M", "adamw")]
    recipe.make(rows, stand_in.file, stand_in.folder, 60.0)
    lines = [json.loads(line) for line in stand_in.file.read_text().splitlines()]
    assert [line["lr"] for line in lines[3:]] == [0.016, 5.7e-3, 8e-3]
    assert {line["lr"] for line in lines[:3]} == {2e-3, 4e-3, 8e-3}
    assert lines[0]["commit"] == "c0ffee" and lines[0]["loss"][-1][0] == 8
    for part in ("PJRT_NPROC=1", "main.py --config configs/ladder.toml --model.width 160"):
        assert part in lines[0]["command"]
    before = stand_in.file.read_bytes()
    recipe.make(rows, stand_in.file, stand_in.folder, 60.0)
    assert stand_in.file.read_bytes() == before
    assert "6/6" in capfd.readouterr().out


def test_runs_that_are_cut_short_are_ended_and_go_on_in_the_next_call(stand_in):
    stand_in.put(slow=True)
    recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 4.0)
    assert not stand_in.file.exists()
    stand_in.put(commit="decaf")
    recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 60.0)
    starts = (stand_in.folder / "5M-adamw-0.004-0" / "starts.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in stand_in.file.read_text().splitlines()]
    assert len(starts) == 2 and len(lines) == 6
    of_rate = {line["lr"]: line["commit"] for line in lines}
    assert of_rate[4e-3] == ["c0ffee", "decaf"] and of_rate[0.016] == "decaf"


def test_a_rate_with_which_a_run_is_lost_has_an_infinite_loss_and_others_are_tried(stand_in):
    stand_in.put(highest=7e-3)
    recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 60.0)
    runs = recipe.read(stand_in.file)
    lost = runs[Trial("5M", "adamw", 8e-3, 0)]
    assert lost.steps.tolist() == [4, 6] and lost.last == math.inf
    losses = recipe.tried(runs, "5M", "adamw")
    assert len(losses) == 5 and recipe.best_rate(runs, "5M", "adamw") == 4e-3
    assert len(runs) == 6 and "| 0.004 | 5 | 2 |" in recipe.table(runs)


def test_a_run_that_fails_is_told_with_its_log_and_is_not_recorded(stand_in):
    stand_in.put(code=3)
    told = r"ended with exit code 3: no such data\nAll of it is in .*5M-adamw-0.00\d-0\.log"
    with pytest.raises(ValueError, match=told):
        recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 60.0)
    assert not stand_in.file.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["adamm"], "'adamm' is none of adamw, adamw-wsd-decay-1, .*, muon-ahead. Use"),
        (["--sizes", "7B"], "'7B' is none of 1M, 5M, 20M"),
    ],
)
def test_a_recipe_or_size_that_is_none_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        recipe.main(arguments)


@pytest.mark.parametrize("flags", [[], ["--times"], ["--hours", "0"]])
def test_a_recipe_whose_code_is_gone_names_the_commit_that_has_it(monkeypatch, flags):
    gone = recipe.RECIPES["muon"]._replace(commit="c0ffee")
    monkeypatch.setitem(recipe.RECIPES, "muon", gone)
    with pytest.raises(ValueError, match="Check out c0ffee"):
        recipe.main(["muon", *flags])


HERE = [name for name, tried in recipe.RECIPES.items() if not tried.commit]


@pytest.mark.parametrize(
    ("names", "expected"), [([], recipe.DRAWN), (["muon-wsd"], ["muon-wsd"]), (["all"], HERE)]
)
def test_without_a_name_the_recipes_of_the_picture_are_made(monkeypatch, tmp_path, names, expected):
    asked = []
    monkeypatch.setattr(recipe, "make", lambda rows, *_: asked.extend(rows))
    monkeypatch.setattr(recipe.signal, "signal", lambda *_: None)
    recipe.main([*names, "--runs", str(tmp_path / "runs.jsonl"), "--folder", str(tmp_path)])
    assert asked == recipe.all_of(expected, recipe.SIZES)


def test_what_ends_the_harness_ends_its_runs(stand_in):
    """SIGTERM, to the command as it is called."""
    stand_in.put(slow=True)
    code = (
        f"import benchmark_recipe as r, pathlib; r.ROOT = pathlib.Path({str(stand_in.root)!r})\n"
        f"r.main(['adamw', '--sizes', '5M', '--runs', {str(stand_in.file)!r}, "
        f"'--folder', {str(stand_in.folder)!r}])"
    )
    harness = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    begun = min(len(recipe.cores()), len(recipe.START))
    wait_for(lambda: len([*stand_in.folder.glob("*/metrics.jsonl")]) == begun)
    harness.terminate()
    assert harness.wait(30) == 128 + signal.SIGTERM
    for file in stand_in.folder.glob("*/id"):
        assert not Path("/proc", file.read_text()).exists()


def test_the_table_that_is_told_is_that_of_the_recorded_runs(tmp_path):
    runs = recipe.read(ROOT / "experiments.jsonl")
    assert recipe.table(runs) in (ROOT / "EXPERIMENTS.md").read_text()
    recipe.draw(runs, tmp_path / "a" / "recipe.png")
    assert (tmp_path / "a" / "recipe.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_the_ladder_is_one_of_main(data, tmp_path, monkeypatch):
    """Its own program, with its own flags, but for a size that is done at once."""
    monkeypatch.setattr(recipe, "SIZES", {"small": (16, 2, 8)})
    small = ["--train.steps", "2", "--eval.every_steps", "1", "--eval.sequences", "32", *data]
    own = Trial.flags
    monkeypatch.setattr(Trial, "flags", lambda trial: own(trial) + small)
    trial = Trial("small", "muon", 4e-3, 1)
    process = recipe.started(trial, tmp_path, recipe.cores()[0])
    recipe.record(trial, tmp_path, tmp_path / "runs.jsonl", process.wait())
    run = recipe.read(tmp_path / "runs.jsonl")[trial]
    assert run.steps.tolist() == [1, 2] and 5 < run.last < 9
