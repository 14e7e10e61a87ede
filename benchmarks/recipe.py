"""Compare the validation loss of training recipes after the same tokens.

    ./run.sh python benchmark.py recipe                     make the missing runs, then the table
    ./run.sh python benchmark.py recipe muon --sizes 1M 5M  some of them
    ./run.sh python benchmark.py recipe --hours 0           the table and the picture alone

Each run is main.py with configs/ladder.toml on one core. One run per core proceeds at a time. A run
that was interrupted resumes from its checkpoint. docs/experiments.jsonl has one line for each run
with its losses and its command. The table goes to docs/experiments.md, and the picture to
docs/experiments.png.

A tuned recipe tries the same number of learning rates at each size, with the first seed, and starts
with START. Each further rate is the geometric mean of the best rate and its better neighbor. If the
best rate is the lowest or the highest one, the next rate is half or twice as high. The best rate
also runs with the other seeds. At the largest size, where runs are long, a recipe starts with the
best rate of the next smaller size scaled by 1 / width, and twice and half of that. One more rate
follows by the same rule. A recipe with a baseline uses the learning rate of that baseline. A seed
sets the initial weights and the order of the data.
"""

import itertools
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmarks.common import ROOT, one_cpu_device, parse_flags
from runtime import cli, files, jsonl
from runtime.console import log
from utils import ConfigError

CONFIG = "configs/ladder.toml"
RECORDS = ROOT / "docs/experiments.jsonl"
RUNS = ROOT / "runs/recipe"
START = (4e-3, 8e-3, 2e-3)
FACTORS = (1, 2, 1 / 2)  # on the rate that the best one of a smaller size predicts
SEEDS = (0, 1, 2)
POLL_S = 1.0
MARKS = ("<!-- ladder -->", "<!-- end of ladder -->")
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **one_cpu_device(cores=1)}


class Size(NamedTuple):
    """Differences from configs/ladder.toml, and how many learning rates are tried."""

    width: int
    heads: int
    latent: int
    tries: int = 5
    smaller: str = ""  # the size whose best learning rates predict those of this one


SIZES = {
    "1M": Size(80, 2, 32),
    "5M": Size(160, 4, 64),
    "20M": Size(320, 8, 128, len(FACTORS) + 1, "5M"),
}


class Recipe(NamedTuple):
    """Differences from configs/ladder.toml."""

    label: str
    flags: tuple[str, ...] = ()
    baseline: str = ""  # the recipe it is compared with, whose learning rate it uses


MUON = ("--optimizer.name", "muon")
WSD = ("--optimizer.schedule", "wsd", "--optimizer.decay_share", "0.4")
WSD += ("--optimizer.min_lr_ratio", "0", "--optimizer.weight_decay", "1")
# In the order of the table. docs/experiments.md has the results of those that did not pay.
RECIPES = {
    "adamw": Recipe("AdamW"),
    "muon": Recipe("Muon for matrices", MUON),
    "muon-wsd-decay-1": Recipe("Muon, wsd and weight decay 1", (*MUON, *WSD), "muon"),
}


@dataclass(frozen=True)
class Trial:
    """One run."""

    size: str
    recipe: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.recipe}-{self.lr:g}-{self.seed}"

    def flags(self) -> list[str]:
        width, heads, latent, *_ = SIZES[self.size]
        model = {"hidden_size": width, "num_attention_heads": heads, "kv_lora_rank": latent}
        model |= {"intermediate_size": 2 * width, "moe_intermediate_size": width}
        flags = [word for key, value in model.items() for word in (f"--model.{key}", str(value))]
        flags += [*RECIPES[self.recipe].flags, "--optimizer.lr", f"{self.lr:g}"]
        return [*flags, "--train.seed", str(self.seed), "--data.seed", str(self.seed)]


class Losses(NamedTuple):
    """Validation losses of a run."""

    steps: np.ndarray  # increasing; the last is the end of the run
    loss: np.ndarray

    @property
    def last(self) -> float:
        return float(self.loss[-1])


Runs = Mapping[Trial, Losses]


# --- which runs are needed ------------------------------------------------------------------------


def first_rates(runs: Runs, size: str, recipe: str) -> tuple[float, ...]:
    """Return the learning rates to try first; none if a smaller size must be tuned before.

    The best rate is assumed to scale as 1 / width (arXiv:2203.03466).
    """
    if not (smaller := SIZES[size].smaller):
        return START
    if not (best := best_rate(runs, smaller, recipe)):
        return ()
    ratio = SIZES[smaller].width / SIZES[size].width
    return tuple(_rounded(best * ratio * factor) for factor in FACTORS)


def next_rate(losses: Mapping[float, float]) -> float:
    """Return the learning rate to try after those whose last losses are given."""
    rates = sorted(losses)
    i = rates.index(min(rates, key=losses.__getitem__))
    if i == 0:
        return _rounded(rates[0] / 2)
    if i == len(rates) - 1:
        return _rounded(rates[-1] * 2)
    neighbor = min(rates[i - 1], rates[i + 1], key=losses.__getitem__)
    return _rounded(math.sqrt(rates[i] * neighbor))


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def tried(runs: Runs, size: str, recipe: str) -> dict[float, float]:
    """Return learning rate -> last loss, with the first seed."""
    return {
        trial.lr: run.last
        for trial, run in runs.items()
        if (trial.size, trial.recipe, trial.seed) == (size, recipe, SEEDS[0])
    }


def best_rate(runs: Runs, size: str, recipe: str) -> float | None:
    """Return the best learning rate, or None until the recipe or its baseline is tuned."""
    while baseline := RECIPES[recipe].baseline:
        recipe = baseline
    losses = tried(runs, size, recipe)
    tuned = len(losses) >= SIZES[size].tries
    return min(losses, key=losses.__getitem__) if tuned else None


def needed(runs: Runs, size: str, recipe: str) -> list[Trial]:
    """Return the runs of a recipe that are known to be needed, including the recorded ones."""
    trials = []
    if not RECIPES[recipe].baseline:
        losses = tried(runs, size, recipe)
        rates = dict.fromkeys((*first_rates(runs, size, recipe), *losses))
        if losses and len(losses) == len(rates) < SIZES[size].tries:
            rates[next_rate(losses)] = None
        trials = [Trial(size, recipe, rate, SEEDS[0]) for rate in rates]
    if best := best_rate(runs, size, recipe):
        trials += [Trial(size, recipe, best, seed) for seed in SEEDS]
    return list(dict.fromkeys(trials))


# --- make them ------------------------------------------------------------------------------------


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def make(rows: Sequence[tuple[str, str]], records: Path, folder: Path, seconds: float) -> None:
    """Make the missing runs of rows (size, recipe), one per core.

    After `seconds` the unfinished runs save a checkpoint and stop.
    """
    running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            ended = [core for core, (_, process) in running.items() if process.poll() is not None]
            for core in ended:
                trial, process = running.pop(core)
                record(trial, folder, records, process.returncode)
                log(f"{trial.name} ends with a loss of {read(records)[trial].last:.4f}")
            runs = read(records)
            trials = dict.fromkeys(trial for row in rows for trial in needed(runs, *row))
            begun = runs.keys() | {trial for trial, _ in running.values()}
            new = [trial for trial in trials if trial not in begun]
            free = [core for core in cores() if core not in running]
            for core, trial in zip(free, new, strict=False):
                log(f"{trial.name} starts on core {core}")
                running[core] = trial, start(trial, folder, core)
            if not running:
                return
            time.sleep(POLL_S)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()


def start(trial: Trial, folder: Path, core: int) -> subprocess.Popen[bytes]:
    """Start main.py on one core. Its output goes to a log beside its run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*trial.flags(), "--run.dir", str(folder), "--run.name", trial.name]
    with (folder / f"{trial.name}.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "main.py", "--config", CONFIG, *flags],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=output,
            stderr=output,
        )
    # Not with preexec_fn, which would fork a process that has JAX's threads.
    os.sched_setaffinity(process.pid, {core})
    return process


def record(trial: Trial, folder: Path, records: Path, code: int) -> None:
    """Append a run that has ended. A run stopped by non-finite steps gets a last loss of null.

    Raises ConfigError if it failed otherwise.
    """
    run = folder / trial.name
    metrics = jsonl.read(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    last = metrics[-1] if metrics else {}
    diverged = code and any(last.get(key, 0.0) is None for key in ("loss/train", "grad_norm"))
    if code and not diverged:
        path = folder / f"{trial.name}.log"
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        raise ConfigError(
            f"{trial.name} ended with exit code {code}: {''.join(lines[-1:]).strip()}\n"
            f"The complete log is {path}. Fix the cause and start this command again. It resumes."
        )
    losses = [(r["step"], r["loss/val"]) for r in metrics if "loss/val" in r]
    starts = jsonl.read(run / "starts.jsonl")
    line = {
        **asdict(trial),
        "loss": [[step, loss and round(loss, 5)] for step, loss in losses],
        "command": command(trial),
        "commit": one_or_all(start["commit"] for start in starts),
        "changed": any(start["changed"] for start in starts),
        "jax": one_or_all(start["versions"]["jax"] for start in starts),
    }
    if diverged:
        line["loss"].append([last["step"], None])
    jsonl.append(records, [line])


def command(trial: Trial) -> str:
    """Return the shell command that repeats a run, on core 0."""
    environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    python = [".venv/bin/python", "main.py", "--config", CONFIG, *trial.flags()]
    return shlex.join(["env", *environment, "taskset", "-c", "0", *python])


def one_or_all(values: Iterable[str]) -> str | list[str]:
    """Return the value, or a list if a resumed run has several."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else distinct


def read(records: Path) -> dict[Trial, Losses]:
    """Return the recorded runs, the last of equal ones. A loss of null becomes infinite."""
    runs = {}
    for line in jsonl.read(records) if records.exists() else []:
        numbers = [[step, math.inf if loss is None else loss] for step, loss in line["loss"]]
        trial = Trial(**{name: line[name] for name in Trial.__annotations__})
        runs[trial] = Losses(*np.array(numbers).T)
    return runs


# --- results --------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A mean and its standard error, which is nan for one value."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), error)

    def text(self, digits: int) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


@dataclass(frozen=True)
class Row:
    """One recipe at one size: the recorded seeds at its best learning rate."""

    size: str
    recipe: str
    lr: float
    tries: int
    runs: dict[int, Losses]

    @property
    def loss(self) -> Mean:
        return Mean.of([run.last for run in self.runs.values()])

    def less_than(self, other: "Row") -> Mean | None:
        """Return the difference of the last losses over common seeds, or None without any."""
        both = self.runs.keys() & other.runs.keys()
        less = [self.runs[seed].last - other.runs[seed].last for seed in both]
        return Mean.of(less) if less else None

    def share_to(self, other: "Row") -> Mean | None:
        """Return the share of the other's steps after which its last loss is reached.

        The mean is over common seeds. None if there is none, or if one run never reaches the loss.
        """
        shares = []
        for seed in self.runs.keys() & other.runs.keys():
            reached = steps_to(self.runs[seed], other.runs[seed].last)
            if reached is None:
                return None
            shares.append(reached / other.runs[seed].steps[-1])
        return Mean.of(shares) if shares else None


def steps_to(run: Losses, loss: float) -> float | None:
    """Return the first step with a loss this low, interpolated linearly between evaluations."""
    for i in np.flatnonzero(run.loss <= loss)[:1]:
        if i == 0:
            return float(run.steps[0])
        return float(np.interp(loss, run.loss[[i, i - 1]], run.steps[[i, i - 1]]))
    return None


def row_of(runs: Runs, size: str, recipe: str) -> Row | None:
    """Return None if the recipe has no run or is not tuned."""
    if (rate := best_rate(runs, size, recipe)) is None:
        return None
    trials = {seed: Trial(size, recipe, rate, seed) for seed in SEEDS}
    own = {seed: runs[trial] for seed, trial in trials.items() if trial in runs}
    tries = 1 if RECIPES[recipe].baseline else len(tried(runs, size, recipe))
    return Row(size, recipe, rate, tries, own) if own else None


def at_an_end(runs: Runs, row: Row) -> str:
    """Report a best rate beyond which a better one may exist."""
    rates = tried(runs, row.size, row.recipe)
    if RECIPES[row.recipe].baseline or min(rates) < row.lr < max(rates):
        return ""
    return " (lowest tried)" if row.lr == min(rates) else " (highest tried)"


def table(runs: Runs) -> str:
    """Return the Markdown table of RECIPES."""
    lines = [
        "| size | recipe | lr | lrs tried | seeds | validation loss | beside | difference | "
        "steps to AdamW's loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, name in itertools.product(SIZES, RECIPES):
        if not (row := row_of(runs, size, name)):
            continue
        baseline = (RECIPES[name].baseline or "adamw") if name != "adamw" else ""
        other, adamw = baseline and row_of(runs, size, baseline), row_of(runs, size, "adamw")
        difference = row.less_than(other) if other else None
        share = row.share_to(adamw) if baseline and adamw else None
        cells = [
            size,
            RECIPES[name].label,
            f"{row.lr:g}{at_an_end(runs, row)}",
            str(row.tries),
            str(len(row.runs)),
            row.loss.text(4),
            RECIPES[baseline].label if baseline else "",
            difference.text(4) if difference else "",
            share.text(3) if share else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table(runs: Runs, path: Path) -> None:
    """Replace the table between MARKS."""
    before, mark, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert mark and end, f"{path} lacks {' or '.join(MARKS)}"
    files.write_atomically(path, f"{before}{mark}\n{table(runs)}\n{end}{after}")


def draw(runs: Runs, path: Path) -> None:
    """Draw validation loss against tokens: the mean of the seeds, and its standard error."""
    from matplotlib import rc_context  # late: runs are made without it
    from matplotlib.figure import Figure

    from plot import STYLE

    panels = {size: [row for n in RECIPES if (row := row_of(runs, size, n))] for size in SIZES}
    panels = {size: rows for size, rows in panels.items() if rows}
    train = cli.load(ROOT / CONFIG).train
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * max(1, len(panels)), 3.8), layout="constrained")
        for i, (size, rows) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), i + 1)
            for row in rows:
                steps = next(iter(row.runs.values())).steps
                x = steps * train.global_batch_size * train.seq_len / 1e6
                losses = np.stack([run.loss for run in row.runs.values()])
                mean = losses.mean(0)
                error = losses.std(0, ddof=min(1, len(losses) - 1)) / math.sqrt(len(losses))
                shown = x > x[-1] / 8  # the first losses are alike
                label = f"{RECIPES[row.recipe].label}, lr {row.lr:g}"
                [line] = axes.plot(x[shown], mean[shown], label=label)
                low, high = (mean - error)[shown], (mean + error)[shown]
                axes.fill_between(x[shown], low, high, color=line.get_color(), alpha=0.25, lw=0)
            axes.set(title=f"{size} parameters", xlabel="tokens (millions)")
            axes.set_ylabel("validation loss" if i == 0 else "")
            axes.legend(fontsize="small")
        figure.savefig(path, dpi=150)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py recipe`."""

    recipes: tyro.conf.Positional[tuple[str, ...]] = tuple(RECIPES)
    sizes: tuple[str, ...] = tuple(SIZES)
    hours: float = 6.0  # after which runs stop, to resume in the next call; 0 makes no run


def main(arguments: list[str]) -> None:
    flags = parse_flags(Flags, arguments, __doc__)
    if unknown := set(flags.recipes) - set(RECIPES):
        raise ConfigError(
            f"{unknown.pop()!r} is not a recipe of this code. Use some of {', '.join(RECIPES)}. "
            f"{RECORDS.name} has the command and the commit of each finished experiment."
        )
    if unknown := set(flags.sizes) - SIZES.keys():
        raise ConfigError(f"{unknown.pop()!r} is not a size. Use some of {', '.join(SIZES)}.")
    if flags.hours:
        # As an exception, so that the runs end with this process.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        rows = [*itertools.product(flags.sizes, flags.recipes)]
        make(rows, RECORDS, RUNS, 3600 * flags.hours)
    runs = read(RECORDS)
    print(table(runs))
    write_table(runs, ROOT / "docs/experiments.md")
    draw(runs, ROOT / "docs/experiments.png")
