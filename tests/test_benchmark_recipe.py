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

from benchmarks import recipe
from benchmarks.recipe import Losses, Mean, Trial
from conftest import FAST, ROOT
from runtime import cli
from simulated_hosts import wait_for

# Instead of main.py: the first half of its steps, and the second half after a restart.
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
    return Losses(np.array([steps / 2, steps]), np.array([loss + 1, loss]))


def tuned(size, name, best, noise=0.0):
    """Return all runs of a recipe with this best learning rate, and the rates in their order."""
    runs, rates = {}, []
    while new := [t for t in recipe.needed(runs, size, name) if t not in runs]:
        for trial in new:
            loss = 3 + math.log2(trial.lr / best) ** 2 + noise * trial.seed
            runs[trial] = run_of(loss)
            rates.append(trial.lr)
    return runs, rates


@pytest.mark.parametrize(
    ("best", "later", "chosen"),
    [
        (4e-3, [2.8e-3, 3.3e-3], 4e-3),  # equal neighbors: the lower
        (5.5e-3, [5.7e-3, 4.8e-3], 5.7e-3),
        (8e-3, [0.016, 5.7e-3], 8e-3),
        (0.1, [0.016, 0.032], 0.032),
        (1e-3, [1e-3, 5e-4], 1e-3),
    ],
)
def test_every_recipe_tries_five_rates_and_the_best_has_the_other_seeds(best, later, chosen):
    runs, rates = tuned("5M", "adamw", best)
    assert rates[:5] == [4e-3, 8e-3, 2e-3, *later]
    assert rates[5:] == [chosen] * (len(recipe.SEEDS) - 1)
    assert recipe.best_rate(runs, "5M", "adamw") == chosen


def test_the_largest_size_starts_with_the_best_rate_of_a_smaller_one_scaled_by_width():
    assert recipe.needed({}, "20M", "adamw") == []
    smaller, _ = tuned("5M", "adamw", 5.5e-3)
    assert recipe.best_rate(smaller, "5M", "adamw") == 5.7e-3
    tried = [trial.lr for trial in recipe.needed(smaller, "20M", "adamw")]
    assert tried == [2.9e-3, 5.7e-3, 1.4e-3]
    runs = smaller | {
        Trial("20M", "adamw", rate, 0): run_of(loss)
        for rate, loss in zip(tried, (3.2, 3.1, 3.3), strict=True)
    }
    beyond = recipe.needed(runs, "20M", "adamw")[-1]
    assert beyond == Trial("20M", "adamw", 0.011, 0)
    runs |= {beyond: run_of(3.15)}
    seeds = [t for t in recipe.needed(runs, "20M", "adamw") if t not in runs]
    assert seeds == [Trial("20M", "adamw", 5.7e-3, seed) for seed in recipe.SEEDS[1:]]


def test_a_recipe_uses_the_rate_of_its_baseline_and_waits_for_it():
    assert recipe.needed({}, "5M", "muon-wsd-decay-1") == []
    runs, _ = tuned("5M", "muon", 4e-3)
    needed = recipe.needed(runs, "5M", "muon-wsd-decay-1")
    assert needed == [Trial("5M", "muon-wsd-decay-1", 4e-3, seed) for seed in recipe.SEEDS]


def test_losses_are_compared_seed_by_seed():
    adamw, _ = tuned("5M", "adamw", 4e-3, noise=0.5)
    muon = {Trial(t.size, "muon", t.lr, t.seed): run_of(r.last - 0.25) for t, r in adamw.items()}
    a, b = (recipe.row_of(adamw | muon, "5M", name) for name in ("adamw", "muon"))
    assert a.loss == pytest.approx((3.5, 0.5 / math.sqrt(3)))
    assert b.less_than(a) == pytest.approx((-0.25, 0.0))


def test_steps_to_the_loss_of_another_are_compared_seed_by_seed():
    steps = np.array([64.0, 128.0])
    rows = []
    for losses in ([(4.5, 3.0), (4.5, 3.4)], [(3.5, 2.5), (3.5, 3.1)]):
        runs = {seed: Losses(steps, np.array(loss)) for seed, loss in enumerate(losses)}
        rows.append(recipe.Row("5M", "", 4e-3, 1, runs))
    a, b = rows  # b is where a ends after 96 and 80 steps
    assert b.share_to(a) == pytest.approx((0.6875, 0.0625))
    assert a.share_to(b) is None  # never as low
    apart = recipe.Row("5M", "", 4e-3, 1, {7: run_of(2.0)})
    assert apart.share_to(a) is None


def test_rows_without_a_common_seed_have_no_difference():
    runs, _ = tuned("5M", "muon", 4e-3)
    runs = {t: run for t, run in runs.items() if t.seed == 0}
    runs[Trial("5M", "muon-wsd-decay-1", 4e-3, 1)] = run_of(2.5)
    [row] = [line for line in recipe.table(runs).splitlines() if "2.5000" in line]
    assert "| 2.5000 | Muon for matrices |  |" in row


def test_a_best_rate_at_an_end_of_those_tried_is_marked():
    for best, cell in ((4e-3, "| 0.004 |"), (0.1, "| 0.032 (highest"), (1e-4, "| 0.0005 (lowest")):
        assert cell in recipe.table(tuned("5M", "adamw", best)[0])


def test_steps_to_a_loss_are_interpolated_between_evaluations():
    run = Losses(np.array([16, 32, 48]), np.array([5.0, 4.0, 3.5]))
    assert recipe.steps_to(run, 5.5) == 16
    assert recipe.steps_to(run, 4.25) == pytest.approx(28)
    assert recipe.steps_to(run, 3.5) == 48
    assert recipe.steps_to(run, 3.4) is None


def test_one_value_has_no_standard_error():
    assert Mean.of([3.0]).text(2) == "3.00"
    assert Mean.of([3.0, 5.0]).text(2) == "4.00 ± 1.00"


def test_flags_of_every_trial_are_a_config_whose_model_grows_with_its_width():
    for size, name in itertools.product(recipe.SIZES, recipe.RECIPES):
        trial = Trial(size, name, 3e-3, 7)
        config = cli.parse(["--config", str(ROOT / recipe.CONFIG), *trial.flags()])
        assert config.train.seed == config.data.seed == 7 and config.optimizer.lr == 3e-3
        assert config.model.hidden_size == recipe.SIZES[size].width
        assert config.model.hidden_size / config.model.num_attention_heads == 40
        assert trial.name == f"{size}-{name}-0.003-7"


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    def write(slow=False, code=0, commit="c0ffee", highest=1.0):
        text = STAND_IN
        values = {"SLOW": slow, "CODE": code, "COMMIT": commit, "HIGHEST": highest}
        for name, value in values.items():
            text = text.replace(name, repr(value))
        (tmp_path / "main.py").write_text(text)

    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    monkeypatch.setattr(recipe, "POLL_S", 0.05)
    monkeypatch.setattr(recipe, "SEEDS", (0, 1))
    write()
    return SimpleNamespace(
        write=write, file=tmp_path / "runs.jsonl", folder=tmp_path / "runs", root=tmp_path
    )


def test_runs_are_recorded_and_not_repeated(stand_in):
    rows = [("5M", "adamw")]
    recipe.make(rows, stand_in.file, stand_in.folder, 60.0)
    lines = [json.loads(line) for line in stand_in.file.read_text().splitlines()]
    assert [line["lr"] for line in lines[3:]] == [0.016, 5.7e-3, 8e-3]
    assert {line["lr"] for line in lines[:3]} == {2e-3, 4e-3, 8e-3}
    assert lines[0]["commit"] == "c0ffee" and lines[0]["loss"][-1][0] == 8
    for part in ("PJRT_NPROC=1", "main.py --config configs/ladder.toml --model.hidden_size 160"):
        assert part in lines[0]["command"]
    before = stand_in.file.read_bytes()
    recipe.make(rows, stand_in.file, stand_in.folder, 60.0)
    assert stand_in.file.read_bytes() == before


def test_interrupted_runs_resume_in_the_next_call(stand_in):
    stand_in.write(slow=True)
    recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 3.0)
    assert not stand_in.file.exists()
    stand_in.write(commit="decaf")
    recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 60.0)
    starts = (stand_in.folder / "5M-adamw-0.004-0" / "starts.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in stand_in.file.read_text().splitlines()]
    assert len(starts) == 2 and len(lines) == 6
    of_rate = {line["lr"]: line["commit"] for line in lines}
    assert of_rate[4e-3] == ["c0ffee", "decaf"] and of_rate[0.016] == "decaf"


def test_a_diverged_run_has_an_infinite_loss_and_other_rates_are_tried(stand_in):
    stand_in.write(highest=7e-3)
    recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 60.0)
    runs = recipe.read(stand_in.file)
    diverged = runs[Trial("5M", "adamw", 8e-3, 0)]
    assert diverged.steps.tolist() == [4, 6] and diverged.last == math.inf
    losses = recipe.tried(runs, "5M", "adamw")
    assert len(losses) == 5 and recipe.best_rate(runs, "5M", "adamw") == 4e-3
    assert len(runs) == 6 and "| 0.004 | 5 | 2 |" in recipe.table(runs)


def test_a_failed_run_is_an_error_with_the_end_of_its_log_and_is_not_recorded(stand_in):
    stand_in.write(code=3)
    message = (
        r"ended with exit code 3: no such data\nThe complete log is .*5M-adamw-0.00\d-0\.log. Fix"
    )
    with pytest.raises(ValueError, match=message):
        recipe.make([("5M", "adamw")], stand_in.file, stand_in.folder, 60.0)
    assert not stand_in.file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adamm"], "'adamm' is not a recipe of this code. Use some of adamw, muon, muon-wsd-"),
        (["muon-heads"], r"Use some of .*experiments.jsonl has the command and the commit"),
        (["--sizes", "7B"], "'7B' is not a size. Use some of 1M, 5M, 20M"),
    ],
)
def test_unknown_recipes_and_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        recipe.main(arguments)


@pytest.fixture
def own_docs(stand_in, monkeypatch):
    """The harness writes to a folder of its own."""
    (stand_in.root / "docs").mkdir()
    (stand_in.root / "configs").mkdir()
    (stand_in.root / recipe.CONFIG).write_bytes((ROOT / recipe.CONFIG).read_bytes())
    begin, end = recipe.MARKS
    (stand_in.root / "docs/experiments.md").write_text(f"Before\n{begin}\nold\n{end}\n")
    monkeypatch.setattr(recipe, "RECORDS", stand_in.file)
    monkeypatch.setattr(recipe, "RUNS", stand_in.folder)
    monkeypatch.setattr(recipe.signal, "signal", lambda *_: None)
    return stand_in.root / "docs"


def test_the_command_makes_its_runs_and_writes_table_and_picture(own_docs, stand_in, monkeypatch):
    runs, _ = tuned("5M", "adamw", 4e-3)
    made = []

    def make(rows, records, folder, seconds):
        made.extend(rows)
        for t, run in runs.items():
            loss = [[int(step), loss] for step, loss in zip(*run, strict=True)]
            line = {"size": t.size, "recipe": t.recipe, "lr": t.lr, "seed": t.seed, "loss": loss}
            recipe.jsonl.append(records, [line])

    monkeypatch.setattr(recipe, "make", make)
    recipe.main(["adamw", "--sizes", "5M", "1M"])
    assert made == [("5M", "adamw"), ("1M", "adamw")]
    table = recipe.table(recipe.read(stand_in.file))
    assert "| 5M | AdamW | 0.004 |" in table
    text = (own_docs / "experiments.md").read_text()
    assert text == f"Before\n{recipe.MARKS[0]}\n{table}\n{recipe.MARKS[1]}\n"
    assert (own_docs / "experiments.png").read_bytes().startswith(b"\x89PNG")
    made.clear()
    recipe.main(["--hours", "0"])
    assert not made


def test_the_end_of_the_command_ends_its_runs(stand_in):
    """By SIGTERM."""
    stand_in.write(slow=True)
    paths = [str(path) for path in (stand_in.root, stand_in.file, stand_in.folder)]
    code = (
        "from benchmarks import recipe as r; import pathlib\n"
        f"r.ROOT, r.RECORDS, r.RUNS = map(pathlib.Path, {paths})\n"
        "r.main(['adamw', '--sizes', '5M'])"
    )
    harness = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    begun = min(len(recipe.cores()), len(recipe.START))
    wait_for(lambda: len([*stand_in.folder.glob("*/metrics.jsonl")]) == begun)
    harness.terminate()
    assert harness.wait(30) == 128 + signal.SIGTERM
    for file in stand_in.folder.glob("*/id"):
        assert not Path("/proc", file.read_text()).exists()


def test_the_table_in_docs_is_that_of_the_recorded_runs():
    runs = recipe.read(ROOT / "docs" / "experiments.jsonl")
    assert recipe.table(runs) in (ROOT / "docs" / "experiments.md").read_text()


def test_a_trial_is_a_run_of_main(data, tmp_path, monkeypatch):
    """With its own flags, and a size that takes seconds."""
    monkeypatch.setattr(recipe, "SIZES", {"small": recipe.Size(16, 2, 8)})
    environment = recipe.ENVIRONMENT
    fast = {"XLA_FLAGS": " ".join([environment["XLA_FLAGS"], *FAST])}
    monkeypatch.setattr(recipe, "ENVIRONMENT", environment | fast)
    small = "--model.num_hidden_layers 1 --model.decoder_sparse_step 1 --model.n_routed_experts 0 "
    small += "--train.steps 2 --train.global_batch_size 8 "
    small += "--train.seq_len 32 --train.microbatches 1 --eval.every_steps 1 --eval.sequences 8"
    own = Trial.flags
    monkeypatch.setattr(Trial, "flags", lambda trial: [*own(trial), *small.split(), *data])
    trial = Trial("small", "muon", 4e-3, 1)
    process = recipe.start(trial, tmp_path, recipe.cores()[0])
    recipe.record(trial, tmp_path, tmp_path / "runs.jsonl", process.wait())
    run = recipe.read(tmp_path / "runs.jsonl")[trial]
    assert run.steps.tolist() == [1, 2] and 5 < run.last < 9
