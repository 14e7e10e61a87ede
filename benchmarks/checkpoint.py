"""Measure how much saving checkpoints slows training.

    ./run.sh python benchmark.py checkpoint                     configs/tiny.toml
    ./run.sh python benchmark.py checkpoint --config configs/dense_124m.toml --interval_s 120

The flags of main.py are accepted too. A large model needs a small batch on a CPU, such as
`--train.global_batch_size 4 --train.seq_len 256 --train.microbatches 1 --eval.sequences 4
--model.compute_dtype float32`.

The steps between two saves run with a save before the first of them and without it, in turns. Orbax
writes the files in the background of these steps. If the checkpoint is not complete after the last
step, the wait for it counts too. The steps without a save therefore have the machine to themselves.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import jax

import train
import weights
from benchmarks.common import check_positive, compile_step, parse_flags, random_batch, spread
from checkpoint import Checkpoints
from runtime import cli
from runtime.console import log
from utils import Config

WARMUP_STEPS = 3  # and as many more to measure how long a step takes
TARGET = 1.05  # times as long, at most, for steps with a save


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py checkpoint` beside those of main.py."""

    config: Path = Path("configs/tiny.toml")  # TOML file, as for main.py
    interval_s: float = 30  # between saves
    rounds: int = 5  # of steps with a save and without


@dataclass(frozen=True)
class Interval:
    """The steps between two saves."""

    steps: int
    seconds: float
    cpu_s: float  # of this process on all cores
    call_s: float  # until save() returned
    write_s: float  # until the checkpoint was complete; 0 without a save
    wait_s: float  # for a complete checkpoint, after the last step


class Training:
    """A training loop without data and records that saves checkpoints as main.py does."""

    def __init__(self, config: Config, folder: Path):
        self.program = compile_step(config, cached=True)
        self.config, self.mesh = self.program.config, self.program.mesh
        self.state = train.initial_state(self.config, self.program.declared, self.mesh)
        self.batch = random_batch(self.config, self.mesh)
        self.folder, self.done = folder, 0
        self.checkpoints = Checkpoints(folder, self.config.checkpoint.keep)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state, report = self.program.step(self.state, self.batch, self.program.schedule)
            jax.device_get(report)
            if self.checkpoints.failed():  # as main.py does after each step
                self.checkpoints.wait()
        jax.block_until_ready(self.state)
        self.done += steps

    def interval(self, steps: int, saved: bool) -> Interval:
        start, cpu = time.perf_counter(), time.process_time()
        if saved:
            self.checkpoints.longest_s = 0  # of this save alone
            self.checkpoints.save(self.done, self.state, dataclasses.asdict(self.config))
        called = time.perf_counter()
        self.train(steps)
        trained = time.perf_counter()
        if saved:
            self.checkpoints.wait()
        end, cpu_s = time.perf_counter(), time.process_time() - cpu
        write_s = self.checkpoints.longest_s if saved else 0.0
        return Interval(steps, end - start, cpu_s, called - start, write_s, end - trained)

    def rounds(self, interval_s: float, rounds: int) -> Iterator[tuple[Interval, Interval]]:
        """Yield an interval with a save and one without. Rounds alternate their order."""
        self.train(WARMUP_STEPS)
        self.interval(1, saved=True)  # compiles what a save needs
        start = time.perf_counter()
        self.train(WARMUP_STEPS)
        steps = max(1, round(interval_s * WARMUP_STEPS / (time.perf_counter() - start)))
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {saved: self.interval(steps, saved) for saved in order}
            yield found[True], found[False]


def report(training: Training, rounds: list[tuple[Interval, Interval]]) -> str:
    mesh, t, (saves, others) = training.mesh, training.config.train, zip(*rounds, strict=True)
    ratios = spread((save.seconds / other.seconds for save, other in rounds), 3)
    cpu_ratios = spread((save.cpu_s / other.cpu_s for save, other in rounds), 3)
    newest = training.folder / str(max(int(path.name) for path in training.folder.iterdir()))
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return (
        f"{weights.count(training.program.declared)[0]:,} parameters on {mesh.size} x "
        f"{mesh.devices.flat[0].device_kind}, mesh {training.config.mesh}; "
        f"{t.global_batch_size} x {t.seq_len} tokens per step\n"
        f"between saves   {saves[0].steps} steps\n"
        f"without a save  {spread(one.seconds for one in others)} s\n"
        f"with a save     {spread(one.seconds for one in saves)} s\n"
        f"ratio           {ratios}, the target is at most {TARGET}\n"
        f"ratio of CPU    {cpu_ratios}, less affected by other work\n"
        f"in save()       {spread(one.call_s for one in saves)} s\n"
        f"complete after  {spread(one.write_s for one in saves)} s\n"
        f"waited for      {spread(one.wait_s for one in saves)} s after the last step\n"
        f"checkpoint      {size / 2**20:.1f} MiB\n"
        f"Medians of {len(saves)} rounds (minimum to maximum). Ratios are within a round."
    )


def parse(arguments: list[str]) -> tuple[Flags, Config]:
    """Raise ConfigError for what cannot be measured."""
    flags, rest = parse_flags(Flags, arguments, __doc__, others=True)
    check_positive(flags, "interval_s", "rounds")
    names = tuple(field.name for field in dataclasses.fields(Flags))
    return flags, cli.parse(["--config", str(flags.config), *rest], names)


def main(arguments: list[str]) -> None:
    flags, config = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        training, rounds = Training(config, Path(folder)), []
        with closing(training.checkpoints):
            for save, other in training.rounds(flags.interval_s, flags.rounds):
                rounds.append((save, other))
                times = f"{save.seconds:.2f} s with a save, {other.seconds:.2f} s without"
                log(f"round {len(rounds)} of {flags.rounds}: {save.steps} steps in {times}")
        print(report(training, rounds))
