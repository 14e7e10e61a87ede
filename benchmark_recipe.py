"""Which recipe reaches a lower loss with the same tokens; a part of benchmark.py.

    ./run.sh python benchmark.py recipe             makes the runs of the picture that are missing,
                                                    then table and picture
    ./run.sh python benchmark.py recipe all         all runs, or name some: muon-wsd muon-decay-1
    ./run.sh python benchmark.py recipe --hours 0   table and picture of the runs there are
    ./run.sh python benchmark.py recipe --times     seconds of a step of each, in turns
    ./run.sh python benchmark.py recipe --help      its flags

Every run is main.py on configs/ladder.toml, on one core, with as many beside it as there are cores.
Its loss is a line of experiments.jsonl with the command that made it, and a run that was cut short
goes on from its checkpoint. A recipe that is tuned has as many learning rates as any of its size,
with the first seed: those of START, then each one halfway to the better neighbour of the best, or
beyond it at an end; the best of them has the other seeds. At the largest size, whose runs are long,
there are four: what 1 / width makes of the best of the size before, twice and half of that, then
one more by the same rule. Others take the rate of the recipe they are compared with.
Seeds are of weights and of the order of the data, and what is compared has the same ones.
"""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import metrics
import utils
from benchmark import compiled, one_cpu_device, step_seconds

ROOT = Path(__file__).resolve().parent
CONFIG = "configs/ladder.toml"
RECORDED = ROOT / "experiments.jsonl"
START = (4e-3, 8e-3, 2e-3)
AROUND = (1, 2, 1 / 2)  # times what a smaller size has best
SEEDS = (0, 1, 2)
TRIED_AT = ("1M",)  # where Muon is tried with something else
BASE = "adamw"
DRAWN = ("adamw", "muon", "muon-wsd-decay-1")
POLL_S = 1.0
MARKS = ("<!-- ladder -->", "<!-- end of ladder -->")
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **one_cpu_device(cores=1)}


class Size(NamedTuple):
    """What differs from configs/ladder.toml, and how many learning rates are tried."""

    width: int
    heads: int
    latent: int
    tries: int = 5
    like: str = ""  # the smaller size whose best rates are where its own begin


SIZES = {
    "1M": Size(80, 2, 32),
    "5M": Size(160, 4, 64),
    "20M": Size(320, 8, 128, len(AROUND) + 1, "5M"),
}


class Recipe(NamedTuple):
    """What differs from configs/ladder.toml."""

    what: str
    flags: tuple[str, ...]
    like: str = ""  # the recipe whose learning rate it takes, and that it is compared with
    sizes: tuple[str, ...] = tuple(SIZES)
    commit: str = ""  # the last whose code has it, of one that did not pay


def like_muon(
    what: str, *flags: str, sizes: tuple[str, ...] = TRIED_AT, commit: str = ""
) -> Recipe:
    """Muon with something else, at the rate that Muon is tuned to."""
    return Recipe(f"Muon, {what}", (*MUON, *flags), "muon", sizes, commit)


MUON = ("--optimizer.matrices", "muon")
WSD = ("--optimizer.schedule", "wsd", "--optimizer.decay_share", "0.4")
WSD += ("--optimizer.min_lr_ratio", "0")
DECAY, DECAY_1, DECAY_3 = (("--optimizer.weight_decay", rate) for rate in ("0.3", "1", "3"))
CAUTIOUS = ("--optimizer.cautious_decay", "True")
RECIPES = {
    "adamw": Recipe("AdamW", ()),
    "adamw-wsd-decay-1": Recipe(
        "AdamW, wsd and weight decay 1", (*WSD, *DECAY_1), BASE, sizes=("5M",)
    ),
    "adamw-wsd-decay-3": Recipe(
        "AdamW, wsd and weight decay 3", (*WSD, *DECAY_3), BASE, sizes=("5M",)
    ),
    "muon": Recipe("Muon for matrices", MUON),
    "muon-short": like_muon("0.7 of the steps", "--train.steps", "89", sizes=("1M", "5M")),
    "muon-to-0": like_muon("lr decays to 0", "--optimizer.min_lr_ratio", "0"),
    "muon-wsd": like_muon("wsd, the last 0.4 to 0", *WSD),
    "muon-no-decay": like_muon("no weight decay", "--optimizer.weight_decay", "0"),
    "muon-decay-0.3": like_muon("weight decay 0.3", *DECAY),
    "muon-decay-1": like_muon("weight decay 1", *DECAY_1),
    "muon-wsd-decay": like_muon("wsd and weight decay 0.3", *WSD, *DECAY, sizes=tuple(SIZES)),
    "muon-wsd-decay-1": like_muon("wsd and weight decay 1", *WSD, *DECAY_1, sizes=tuple(SIZES)),
    "muon-wsd-decay-3": like_muon("wsd and weight decay 3", *WSD, *DECAY_3, sizes=("5M",)),
    "muon-capacity-2": like_muon("capacity factor 2", "--model.capacity_factor", "2"),
    "muon-bias-1e-3": like_muon("router bias 1e-3", "--model.router_bias_speed", "1e-3"),
    "muon-cautious": like_muon("cautious weight decay", *CAUTIOUS, commit="18a95eb"),
    "muon-cautious-0.3": like_muon(
        "cautious weight decay 0.3", *CAUTIOUS, *DECAY, commit="18a95eb"
    )._replace(like="muon-decay-0.3"),
    "muon-heads": like_muon("each head is a matrix", commit="7d23752"),
    "muon-zero": like_muon("residual outputs begin at 0", commit="adb276a"),
    "muon-scale-1": like_muon("residual outputs begin at full scale", commit="00d0494"),
    "muon-qk-norm": like_muon("queries and keys normed", commit="cff4554"),
    "muon-average": like_muon("running average of the weights, 0.9 a step", commit="90fd3b1"),
    "muon-ahead": like_muon("the token after the next is predicted, too", commit="365479d"),
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
        seed, size = str(self.seed), {"width": width, "heads": heads, "kv_lora_rank": latent}
        size |= {"hidden": 2 * width, "expert_hidden": width}
        flags = [word for name, value in size.items() for word in (f"--model.{name}", str(value))]
        flags += [*RECIPES[self.recipe].flags, "--optimizer.lr", f"{self.lr:g}"]
        return [*flags, "--train.seed", seed, "--data.seed", seed]


class Measured(NamedTuple):
    steps: np.ndarray  # after which validation loss was measured; the last is the run's end
    loss: np.ndarray

    @property
    def last(self) -> float:
        return float(self.loss[-1])


Runs = Mapping[Trial, Measured]


# --- which runs -----------------------------------------------------------------------------------


def first_rates(runs: Runs, size: str, recipe: str) -> tuple[float, ...]:
    """The learning rates to try before any loss is known; none while a smaller size, whose best is
    needed, is not tuned.

    The best rate is taken to go as 1 / width (arXiv:2203.03466).
    """
    if not (smaller := SIZES[size].like):
        return START
    if not (best := best_rate(runs, smaller, recipe)):
        return ()
    share = SIZES[smaller].width / SIZES[size].width
    return tuple(_rounded(best * share * factor) for factor in AROUND)


def next_rate(losses: Mapping[float, float]) -> float:
    """The learning rate to try after the first ones, and others, whose last losses are given."""
    rates = sorted(losses)
    at = rates.index(min(rates, key=lambda rate: losses[rate]))
    if at == 0:
        return _rounded(rates[0] / 2)
    if at == len(rates) - 1:
        return _rounded(rates[-1] * 2)
    better = min(rates[at - 1], rates[at + 1], key=lambda rate: losses[rate])
    return _rounded(math.sqrt(rates[at] * better))


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def tried(runs: Runs, size: str, recipe: str) -> dict[float, float]:
    """Learning rate -> last loss, with the first seed."""
    return {
        trial.lr: run.last
        for trial, run in runs.items()
        if (trial.size, trial.recipe, trial.seed) == (size, recipe, SEEDS[0])
    }


def best_rate(runs: Runs, size: str, recipe: str) -> float | None:
    """None while the recipe, or the one it takes its rate from, is not tuned."""
    while like := RECIPES[recipe].like:
        recipe = like
    losses = tried(runs, size, recipe)
    tuned = len(losses) >= SIZES[size].tries
    return min(losses, key=lambda rate: losses[rate]) if tuned else None


def wanted(runs: Runs, size: str, recipe: str) -> list[Trial]:
    """The recipe's runs that are known to be needed, whether they are there or not."""
    trials = []
    if not RECIPES[recipe].like:
        losses = tried(runs, size, recipe)
        rates = dict.fromkeys((*first_rates(runs, size, recipe), *losses))
        if losses and len(losses) == len(rates) < SIZES[size].tries:
            rates[next_rate(losses)] = None
        trials = [Trial(size, recipe, rate, SEEDS[0]) for rate in rates]
    if best := best_rate(runs, size, recipe):
        trials += [Trial(size, recipe, best, seed) for seed in SEEDS]
    return list(dict.fromkeys(trials))


def runs_of(row: tuple[str, str]) -> int:
    """How many runs a row will have."""
    size, name = row
    return len(SEEDS) + (SIZES[size].tries - 1) * (not RECIPES[name].like)


def all_of(names: Iterable[str], sizes: Iterable[str]) -> list[tuple[str, str]]:
    """(size, recipe) of every row of the table."""
    names = [*names]
    return [(size, name) for size in sizes for name in names if size in RECIPES[name].sizes]


# --- making them ----------------------------------------------------------------------------------


class Going(NamedTuple):
    trial: Trial
    process: subprocess.Popen[bytes]


def make(rows: Sequence[tuple[str, str]], recorded: Path, folder: Path, seconds: float) -> None:
    """The runs of rows that are missing, one on each core, until they are there or the time is
    over; then those that go on save.
    """
    going: dict[int, Going] = {}
    until = time.monotonic() + seconds
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    with bar:
        task = bar.add_task("", total=sum(map(runs_of, rows)))
        try:
            while time.monotonic() < until:
                for core in [
                    core for core, (_, process) in going.items() if process.poll() is not None
                ]:
                    trial, process = going.pop(core)
                    record(trial, folder, recorded, process.returncode)
                    bar.print(f"{trial.name}: {read(recorded)[trial].last:.4f}")
                runs = read(recorded)
                begun = runs.keys() | {trial for trial, _ in going.values()}
                new = [t for row in rows for t in wanted(runs, *row) if t not in begun]
                free = [core for core in cores() if core not in going]
                for core, trial in zip(free, dict.fromkeys(new), strict=False):
                    going[core] = Going(trial, started(trial, folder, core))
                bar.update(
                    task,
                    completed=sum(t in runs for row in rows for t in wanted(runs, *row)),
                    description=", ".join(trial.name for trial, _ in going.values()),
                )
                if not going:
                    return
                time.sleep(POLL_S)
        finally:
            for _, process in going.values():
                process.terminate()
            for _, process in going.values():
                process.wait()


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def started(trial: Trial, folder: Path, core: int) -> subprocess.Popen[bytes]:
    """main.py on one core; what it prints is in a log beside its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*trial.flags(), "--run.dir", str(folder), "--run.name", trial.name]
    with (folder / f"{trial.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "main.py", "--config", CONFIG, *flags],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
    # From here, as preexec_fn would fork a process that has jax's threads; the run has none yet.
    os.sched_setaffinity(process.pid, {core})
    return process


def record(trial: Trial, folder: Path, recorded: Path, code: int) -> None:
    """Adds a run that has ended to those recorded. One that was stopped for steps that were not
    finite has a last loss of null.

    Raises  ValueError where it failed otherwise.
    """
    own = folder / trial.name
    told = metrics.read(own / "metrics.jsonl") if (own / "metrics.jsonl").exists() else []
    last = told[-1] if told else {}
    lost = code and any(last.get(key, 0.0) is None for key in ("loss/train", "grad_norm"))
    if code and not lost:
        log = folder / f"{trial.name}.log"
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise ValueError(
            f"{trial.name} ended with exit code {code}: {''.join(last).strip()}\n"
            f"All of it is in {log}. Mend it, and start this again: it goes on."
        )
    losses = [(r["step"], r["loss/val"]) for r in told if "loss/val" in r]
    starts = metrics.read(own / "starts.jsonl")
    line = {
        **asdict(trial),
        "loss": [[step, loss and round(loss, 5)] for step, loss in losses],
        "command": command(trial),
        "commit": one_or_all(start["commit"] for start in starts),
        "changed": any(start["changed"] for start in starts),
        "jax": one_or_all(start["versions"]["jax"] for start in starts),
    }
    if lost:
        line["loss"].append([last["step"], None])
    metrics.append(recorded, [line])


def command(trial: Trial) -> str:
    """What makes the run again, on a core that is told to it."""
    environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    python = [".venv/bin/python", "main.py", "--config", CONFIG, *trial.flags()]
    return shlex.join(["env", *environment, "taskset", "-c", "0", *python])


def one_or_all(values: Iterable[str]) -> str | list[str]:
    """The value, or several where a run that was cut short went on with another."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else found


def read(recorded: Path) -> dict[Trial, Measured]:
    """The runs recorded; of one that is there twice, the last. A loss of null is infinite."""
    runs = {}
    for line in metrics.read(recorded) if recorded.exists() else []:
        numbers = [[step, math.inf if loss is None else loss] for step, loss in line["loss"]]
        steps, loss = np.array(numbers).T
        trial = Trial(**{name: line[name] for name in Trial.__annotations__})
        runs[trial] = Measured(steps, loss)
    return runs


# --- what came of them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One recipe at one size, with the seeds that are there."""

    size: str
    recipe: str
    lr: float
    tries: int
    runs: dict[int, Measured]

    @property
    def loss(self) -> "Spread":
        return Spread.of([run.last for run in self.runs.values()])

    def less_than(self, other: "Row") -> "Spread | None":
        """Difference of the last losses, seed by seed; None where they share no seed."""
        both = self.runs.keys() & other.runs.keys()
        less = [self.runs[seed].last - other.runs[seed].last for seed in both]
        return Spread.of(less) if less else None

    def share_to(self, other: "Row") -> "Spread | None":
        """Steps after which the loss is as low as the other's last, over the other's steps, seed
        by seed; None where one never is, or they share no seed.
        """
        shares = []
        for seed in self.runs.keys() & other.runs.keys():
            reached = steps_to(self.runs[seed], other.runs[seed].last)
            if reached is None:
                return None
            shares.append(reached / other.runs[seed].steps[-1])
        return Spread.of(shares) if shares else None


class Spread(NamedTuple):
    """A mean and its standard error, nan of one value."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), error)

    def text(self, digits: int) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


def steps_to(run: Measured, loss: float) -> float | None:
    """Steps after which the loss is first that low, on a line between evaluations."""
    for i in np.flatnonzero(run.loss <= loss)[:1]:
        if i == 0:
            return float(run.steps[0])
        return float(np.interp(loss, run.loss[[i, i - 1]], run.steps[[i, i - 1]]))
    return None


def row_of(runs: Runs, size: str, recipe: str) -> Row | None:
    """None where no run of it is there, or it is not tuned."""
    if (rate := best_rate(runs, size, recipe)) is None:
        return None
    found = {seed: runs.get(Trial(size, recipe, rate, seed)) for seed in SEEDS}
    there = {seed: run for seed, run in found.items() if run}
    own = not RECIPES[recipe].like
    tries = len(tried(runs, size, recipe)) if own else 1
    return Row(size, recipe, rate, tries, there) if there else None


def at_an_end(runs: Runs, row: Row) -> str:
    """Whether a better rate may lie beyond those that were tried."""
    rates = tried(runs, row.size, row.recipe)
    if RECIPES[row.recipe].like or min(rates) < row.lr < max(rates):
        return ""
    return " (lowest tried)" if row.lr == min(rates) else " (highest tried)"


def table(runs: Runs) -> str:
    """Markdown."""
    lines = [
        "| size | recipe | lr | lrs tried | seeds | validation loss | beside | difference | "
        "steps to AdamW's loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, name in all_of(RECIPES, SIZES):
        if not (row := row_of(runs, size, name)):
            continue
        like = RECIPES[name].like or BASE
        than, adamw = row_of(runs, size, like), row_of(runs, size, BASE)
        share = adamw and row.share_to(adamw)
        less = row.less_than(than) if than and like != name else None
        cells = [
            size,
            RECIPES[name].what,
            f"{row.lr:g}{at_an_end(runs, row)}",
            str(row.tries),
            str(len(row.runs)),
            row.loss.text(4),
            RECIPES[like].what if like != name else "",
            less.text(4) if less else "",
            share.text(3) if share and name != BASE else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tell(runs: Runs, path: Path) -> None:
    """Puts the table in the place of the one between two marks."""
    before, mark, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert mark and end, f"{path} has lost {' or '.join(MARKS)}"
    metrics.replace(path, f"{before}{mark}\n{table(runs)}\n{end}{after}")


def draw(runs: Runs, path: Path) -> None:
    """Validation loss against tokens, the mean of the seeds and a band of their standard error."""
    from matplotlib import rc_context  # late: runs are made without it
    from matplotlib.figure import Figure

    from plot import STYLE

    found = {size: [row for n in DRAWN if (row := row_of(runs, size, n))] for size in SIZES}
    found = {size: rows for size, rows in found.items() if rows}
    tokens = utils.load(ROOT / CONFIG).train
    per_step = tokens.sequences * tokens.sequence_length
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * max(1, len(found)), 3.8), layout="constrained")
        for i, (size, rows) in enumerate(found.items()):
            axes = figure.add_subplot(1, len(found), i + 1)
            for row in rows:
                x = next(iter(row.runs.values())).steps * per_step / 1e6
                losses = np.stack([run.loss for run in row.runs.values()])
                mean = losses.mean(0)
                error = losses.std(0, ddof=min(1, len(losses) - 1)) / math.sqrt(len(losses))
                shown = x > x[-1] / 8  # the first fall is all the same
                label = f"{RECIPES[row.recipe].what}, lr {row.lr:g}"
                [line] = axes.plot(x[shown], mean[shown], label=label)
                low, high = (mean - error)[shown], (mean + error)[shown]
                axes.fill_between(x[shown], low, high, color=line.get_color(), alpha=0.25, lw=0)
            axes.set(title=f"{size} parameters", xlabel="tokens (millions)")
            axes.set_ylabel("validation loss" if i == 0 else "")
            axes.legend(fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def times(rows: Sequence[tuple[str, str]]) -> None:
    """Prints seconds of a step of each recipe, in turns with the others of its size, on a device
    as a run has it.
    """
    os.environ.update(ENVIRONMENT)  # before the device is there
    os.sched_setaffinity(0, cores()[:1])
    for size in dict.fromkeys(size for size, _ in rows):
        names = [name for at, name in rows if at == size]
        programs = []
        for name in names:
            flags = Trial(size, name, START[0], SEEDS[0]).flags()
            programs.append(compiled(utils.parse(["--config", str(ROOT / CONFIG), *flags])))
        taken = step_seconds(programs)
        for name, seconds in zip(names, taken, strict=True):
            print(f"{size} {name:16} {seconds:.3f} s, {seconds / taken[0]:.3f} of {names[0]}'s")


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py recipe`."""

    recipes: tyro.conf.Positional[tuple[str, ...]] = DRAWN  # names, as muon-wsd; or all
    sizes: tuple[str, ...] = tuple(SIZES)  # 1M, 5M, 20M
    hours: float = 6.0  # after which runs are cut short, to go on in the next call; 0 makes none
    times: bool = False  # time steps instead
    # where they are recorded; table and picture in EXPERIMENTS.md are those of the default's
    runs: Path = RECORDED
    folder: Path = Path("runs/recipe")  # of runs that go on, and the picture of others


def main(arguments: list[str]) -> None:
    flags = tyro.cli(Flags, args=arguments, prog="benchmark.py recipe")
    here = [name for name, recipe in RECIPES.items() if not recipe.commit]
    names = here if "all" in flags.recipes else flags.recipes
    for some, known in ((names, RECIPES), (flags.sizes, SIZES)):
        if unknown := set(some) - known.keys():
            raise ValueError(f"{unknown.pop()!r} is none of {', '.join(known)}. Use some of them.")
    for name in names:
        if commit := RECIPES[name].commit:
            raise ValueError(
                f"The code of {name} is no longer here: it did not pay. Check out {commit}, or "
                "leave it out."
            )
    rows = all_of(names, flags.sizes)
    if flags.times:
        times(rows)
        return
    if flags.hours:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its runs
        make(rows, flags.runs, flags.folder.resolve(), 3600 * flags.hours)
    if runs := read(flags.runs):
        print(table(runs))
        picture = flags.folder / "recipe.png"
        if flags.runs == RECORDED:
            tell(runs, ROOT / "EXPERIMENTS.md")
            picture = ROOT / "experiments.png"  # which that shows
        draw(runs, picture)
        print(picture)
