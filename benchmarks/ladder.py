"""Measure the rules of depth.py: train models of several depths with several settings.

    ./run.sh python benchmark.py ladder              the missing runs, then the table; 5 hours
    ./run.sh python benchmark.py ladder --hours 0    the table of the runs that are there

Each run is `main.py --depth N` on one core, one per core at a time. One that was interrupted
resumes from its checkpoint. docs/ladder.jsonl has a line for each finished run.

A series differs in nothing but the learning rate. It starts with three, a factor of 2 apart. Each
further one is twice or half the best one if that is at an end, and else the
geometric mean of the best one and its better neighbor. The best one of five, and that of depth.py,
run with two other seeds.
"""

import functools
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

import depth
from benchmarks.common import ROOT
from runtime import cli, jsonl, processes
from runtime.console import log
from utils import ConfigError

RECORDS = ROOT / "docs/ladder.jsonl"
RUNS = ROOT / "runs/ladder"
SEQ_LEN, TRIES, SEEDS = 256, 5, (0, 1, 2)
START = {"muon": 2.5, "adamw": 0.9}  # first learning rate times width
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
ENVIRONMENT["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false"
)


@dataclass(frozen=True)
class Series:
    """Settings of runs with several learning rates."""

    optimizer: str
    depth: int
    steps: int
    batch: int = 16  # sequences of SEQ_LEN tokens
    decay: float = 2.0  # product of learning rate, weight decay and steps
    dense: bool = False

    @functools.cache  # noqa: B019  there are few
    def rule(self) -> float:
        """Return the learning rate that depth.py gives."""
        return depth.parse(self.flags()).optimizer.lr

    def flags(self) -> list[str]:
        """Return the flags of main.py that all runs of the series have."""
        return [
            *("--depth", str(self.depth), *["--dense"] * self.dense),
            *("--optimizer.name", self.optimizer, "--train.seq_len", str(SEQ_LEN)),
            *("--train.global_batch_size", str(self.batch), "--train.steps", str(self.steps)),
        ]


@dataclass(frozen=True)
class Run:
    series: Series
    lr: float
    seed: int

    @property
    def name(self) -> str:
        s = self.series
        kind = "dense" if s.dense else "depth"
        return (
            f"{s.optimizer}-{kind}{s.depth}-{s.steps}x{s.batch}-{s.decay:g}-{self.lr:g}-{self.seed}"
        )

    def flags(self) -> list[str]:
        decay = depth.two_digits(self.series.decay / (self.lr * self.series.steps))
        return [
            *self.series.flags(),
            *("--optimizer.lr", str(self.lr), "--optimizer.weight_decay", str(decay)),
            *("--train.seed", str(self.seed), "--data.seed", str(self.seed)),
        ]


Losses = dict[Run, float]  # validation loss at the end
# Most useful first, as a night may be too short. Each is (series, learning rates to try).
PLAN = [
    *((Series("muon", n, 128), TRIES) for n in (2, 3)),
    (Series("muon", 2, 512), TRIES),
    # Equal tokens in other batches, and equal tokens with other weight decay.
    *((Series("muon", 2, 512 * 16 // b, b), 3) for b in (8, 32)),
    *((Series("adamw", n, 128), TRIES) for n in (2, 3)),
    (Series("muon", 4, 128), TRIES),
    *((Series("muon", 2, 512, decay=d), 1) for d in (0.6, 6.0)),
    *((Series("muon", n, 128, dense=True), 3) for n in (2, 4)),
    (Series("muon", 6, 128), TRIES),
    (Series("adamw", 4, 128), TRIES),
    (Series("muon", 3, 512), TRIES),
    *((Series("muon", 3, 512 * 16 // b, b), 3) for b in (8, 32)),
    (Series("adamw", 2, 512), TRIES),
    # Equal compute.
    (Series("muon", 2, 2048), 3),
    (Series("muon", 3, 896), 1),
    (Series("muon", 4, 384), 3),
    *((Series("muon", 3, 512, decay=d), 1) for d in (0.6, 6.0)),
    (Series("adamw", 3, 512), 3),
    (Series("adamw", 6, 128), 3),
]


def next_rate(losses: dict[float, float]) -> float:
    """Return the learning rate to try after those whose losses are given."""
    rates = sorted(losses)
    i = rates.index(min(rates, key=losses.__getitem__))
    if i in (0, len(rates) - 1):
        return depth.two_digits(rates[i] * (2 if i else 0.5))
    neighbor = min(rates[i - 1], rates[i + 1], key=losses.__getitem__)
    return depth.two_digits(math.sqrt(rates[i] * neighbor))


def needed(losses: Losses, series: Series, tries: int) -> Iterator[Run]:
    """Yield the runs of a series that are known to be needed."""
    done = {run.lr: loss for run, loss in losses.items() if (run.series, run.seed) == (series, 0)}
    first = START[series.optimizer] / (depth.HEAD * series.depth)
    rates = [depth.two_digits(first * factor) for factor in (1, 0.5, 2)][:tries]
    yield from (Run(series, rate, 0) for rate in rates)
    if not done.keys() >= set(rates):
        return
    if len(done) < tries:
        yield Run(series, next_rate(done), 0)
    elif tries == TRIES:
        best = min(done, key=done.__getitem__)
        both = (best, series.rule())
        yield from (Run(series, rate, seed) for rate in dict.fromkeys(both) for seed in SEEDS)


def make(seconds: float, cores: list[int]) -> None:
    """Make the missing runs, one per core. After `seconds` the others save and stop."""
    RUNS.mkdir(parents=True, exist_ok=True)

    def missing(running: set[Run]) -> Iterator[Run]:
        losses = read()
        todo = dict.fromkeys(run for series in PLAN for run in needed(losses, *series))
        return (run for run in todo if run not in losses.keys() | running)

    processes.run_all(cores, missing, start, record, seconds)


def start(run: Run, core: int) -> subprocess.Popen[bytes]:
    log(f"{run.name} starts on core {core}")
    every = str(max(1, run.series.steps // 8))
    output = ["--run.dir", str(RUNS), "--run.name", run.name, "--eval.every_steps", every]
    output += ["--checkpoint.every_steps", every, "--sample.prompts"]
    with (RUNS / f"{run.name}.log").open("ab") as file:
        command = ["taskset", "-c", str(core), sys.executable, "main.py", *run.flags(), *output]
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=file
        )


def record(run: Run, code: int) -> None:
    """Append a run that has ended. One that diverged has a loss of null."""
    folder = RUNS / run.name
    records = jsonl.read(folder / "metrics.jsonl")
    log_text = (RUNS / f"{run.name}.log").read_text(encoding="utf-8", errors="replace")
    diverged = code == 2 and "steps in a row" in log_text.splitlines()[-1]
    if code and not diverged:
        raise ConfigError(
            f"{run.name} ended with exit code {code}. See {RUNS / run.name}.log, fix the cause and "
            "start this command again. It resumes."
        )
    curve = [[r["step"], round(r["loss/val"], 5)] for r in records if r.get("loss/val") is not None]
    begun = jsonl.read(folder / "starts.jsonl")[-1]
    line = asdict(run) | {"loss": None if diverged else curve[-1][1], "curve": curve}
    line |= {"flags": run.flags(), "commit": begun["commit"], "changed": begun["changed"]}
    jsonl.append(RECORDS, [line])
    log(f"{run.name} ends with a loss of {line['loss']}")


def read() -> Losses:
    """Return the recorded runs. A run that diverged has an infinite loss."""
    return {
        Run(Series(**line["series"]), line["lr"], line["seed"]): line["loss"] or math.inf
        for line in jsonl.read(RECORDS)
    }


def parabola(first: dict[float, float], rule: float) -> tuple[str, str]:
    """Fit a parabola to losses against the logarithm of the rate, by least squares.

    Returns  the rate at its minimum, and the loss of `rule` above that; empty without three losses
    """
    found = {math.log(rate): loss for rate, loss in first.items() if math.isfinite(loss)}
    if len(found) < 3:
        return "", ""
    fitted = np.polyfit([*found], [*found.values()], 2)
    best = -fitted[1] / (2 * fitted[0])
    above = np.polyval(fitted, math.log(rule)) - np.polyval(fitted, best)
    return f"{math.exp(best):.2g}", f"{above:+.4f}"


def table(losses: Losses) -> str:
    """Return a Markdown row for each series that has a run."""
    columns = ["series", "tokens", "losses by learning rate", "best", "best of a parabola"]
    columns += ["by depth.py", "above the parabola's best", "above the best, as run"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for s, _ in PLAN:
        runs = {run: loss for run, loss in losses.items() if run.series == s}
        if not runs:
            continue
        first = {run.lr: loss for run, loss in runs.items() if run.seed == 0}
        best = min(first, key=first.__getitem__)
        rule = s.rule()
        pairs = [(Run(s, rule, seed), Run(s, best, seed)) for seed in SEEDS]
        above = [runs[a] - runs[b] for a, b in pairs if a in runs and b in runs]
        difference = f"{statistics.fmean(above):+.4f}" if above else ""
        name = f"{s.optimizer}, {'dense ' * s.dense}depth {s.depth}, {s.steps} steps"
        name += f", decay {s.decay:g}" * (s.decay != Series.decay)
        each = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(first.items()))
        tokens = s.steps * s.batch * SEQ_LEN
        fitted, above_fitted = parabola(first, rule)
        cells = [name, f"{tokens:,}", each, f"{best:g}", fitted, f"{rule:g}", above_fitted]
        rows.append(f"| {' | '.join(cells)} | {difference} |")
    return "\n".join(rows)


@dataclass(frozen=True, kw_only=True)
class Flags:
    hours: float = 12.0  # after which unfinished runs save a checkpoint and stop
    cores: tuple[int, ...] = tuple(sorted(os.sched_getaffinity(0)))  # one run on each


def main(arguments: list[str]) -> None:
    flags = cli.parse_flags(Flags, arguments, description=__doc__)
    make(3600 * flags.hours, list(flags.cores))
    print(table(read()))
