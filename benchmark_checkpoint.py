"""What saving costs a run; a part of benchmark.py.

    ./run.sh python benchmark.py checkpoint                      configs/tiny.toml, saves 30 s apart
    ./run.sh python benchmark.py checkpoint --config configs/dense_124m.toml            120 s apart
    ./run.sh python benchmark.py checkpoint --help               its flags; main.py's go too

The steps between two saves are timed with a save before the first of them and without, in turns.
A save is written behind these steps; if it is not on disk after the last of them, the wait for it
counts too, so that steps without a save have all of the machine.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

import checkpoint
import model
import train
import utils
import weights
from benchmark import random_batch, spread
from checkpoint import Checkpoints
from metrics import say
from utils import Config

WARM = 3  # steps before any is timed; as many then tell how long one takes
MOST = 1.05  # times as long that steps with a save may take


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py checkpoint` beside those of main.py."""

    config: Path = Path("configs/tiny.toml")  # TOML file, as for main.py
    interval_s: float = 0  # between saves; 0: 30, of dense_124m 120
    rounds: int = 0  # of steps with a save and without; 0: 5, of dense_124m 3
    folder: Path | None = None  # a temporary one for checkpoints is made there


@dataclass(frozen=True)
class Default:
    """What is measured of a config where no flag says it."""

    interval_s: float = 30
    rounds: int = 5
    on_cpu: str = ""  # flags with which a CPU makes a step within seconds


DEFAULTS = {
    "dense_124m": Default(
        120,
        3,
        "--train.sequences 4 --train.sequence_length 256 --train.microbatches 1 "
        "--eval.sequences 4 --model.compute_dtype float32",
    )
}


@dataclass(frozen=True)
class Stretch:
    """The steps between two saves."""

    saved: bool
    steps: int
    seconds: float  # of all of it
    cpu_s: float  # that this process took of all cores meanwhile
    call_s: float = 0  # until save() returned
    write_s: float = 0  # until the checkpoint was on disk
    wait_s: float = 0  # for that, after the last step

    def __str__(self) -> str:
        text = f"{self.seconds:.2f} s, {self.cpu_s:.2f} of CPU"
        if not self.saved:
            return f"without a save {text}"
        return (
            f"with a save {text}; {self.call_s:.2f} s in save(), {self.wait_s:.2f} s at the end, "
            f"on disk after {self.write_s:.2f} s"
        )


class Training:
    """A run without its data and records, saved as loop.py saves it."""

    def __init__(self, config: Config, folder: Path):
        config = utils.for_platform(config, jax.default_backend())
        declared, mesh = model.declare(config), train.make_mesh(config)
        self.config, self.mesh, self.done = config, mesh, 0
        self.parameters, _ = weights.count(declared)
        self.shapes = train.abstract_state(config, declared, mesh)
        step = train.jitted_step(config, declared, mesh)
        self.step = step.lower(self.shapes, train.abstract_batch(config, mesh)).compile()
        self.state = train.initial_state(config, declared, mesh)
        self.batch = random_batch(config, mesh)
        self.folder, self.saved = folder, Checkpoints(folder, config.checkpoint.keep)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state, report = self.step(self.state, self.batch)
            jax.device_get(report)
        jax.block_until_ready(self.state)
        self.done += steps

    def save(self) -> None:
        arrays = checkpoint.reshaped(self.state, checkpoint.stored_shapes(self.shapes))
        self.saved.save(self.done, arrays, dataclasses.asdict(self.config))

    def stretch(self, steps: int, saved: bool) -> Stretch:
        step, start, cpu = self.done, time.perf_counter(), time.process_time()
        if saved:
            self.saved.longest_s = 0  # of this save alone
            self.save()
        called = time.perf_counter()
        self.train(steps)
        trained = time.perf_counter()
        if saved:
            self.saved.must_have(step)
        end, cpu_s = time.perf_counter(), time.process_time() - cpu
        taken = Stretch(saved, steps, end - start, cpu_s)
        if not saved:
            return taken
        call_s, wait_s, write_s = called - start, end - trained, self.saved.longest_s
        return dataclasses.replace(taken, call_s=call_s, write_s=write_s, wait_s=wait_s)

    def stretches(self, interval_s: float, rounds: int) -> Iterator[Stretch]:
        """Each round has one with a save and one without, in one order and then in the other."""
        self.train(WARM)
        self.stretch(1, saved=True)  # compiles what a save needs
        start = time.perf_counter()
        self.train(WARM)
        steps = max(1, round(interval_s * WARM / (time.perf_counter() - start)))
        for number in range(rounds):
            for saved in (number % 2 == 1, number % 2 == 0):
                yield self.stretch(steps, saved)

    def checkpoint_bytes(self) -> int:
        """Of the newest one's files."""
        newest = self.folder / str(max(int(f.name) for f in self.folder.iterdir()))
        return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def ratios(stretches: list[Stretch], of: str = "seconds") -> list[float]:
    """Of each round, the time with a save over the time without."""
    with_, without = ([getattr(s, of) for s in stretches if s.saved == k] for k in (True, False))
    return [a / b for a, b in zip(with_, without, strict=True)]


def lines(training: Training, stretches: list[Stretch]) -> Iterator[str]:
    """What was found."""
    mesh, t, saves = training.mesh, training.config.train, [s for s in stretches if s.saved]
    yield (
        f"{training.parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, "
        f"mesh {training.config.mesh}; {t.sequences} x {t.sequence_length} tokens per step"
    )
    yield f"between saves   {stretches[0].steps} steps"
    yield f"without a save  {spread(s.seconds for s in stretches if not s.saved)} s"
    yield f"with a save     {spread(s.seconds for s in saves)} s"
    yield f"ratio           {spread(ratios(stretches), 3)}, at most {MOST} is wanted"
    yield f"ratio of CPU    {spread(ratios(stretches, 'cpu_s'), 3)}, which other work moves less"
    yield f"in save()       {spread(s.call_s for s in saves)} s"
    yield f"on disk after   {spread(s.write_s for s in saves)} s"
    yield f"waited for      {spread(s.wait_s for s in saves)} s after the last step"
    yield f"checkpoint      {training.checkpoint_bytes() / 2**20:.1f} MiB"
    yield f"Medians of {len(saves)} rounds (least to most); ratios are of each round."


def parse(arguments: list[str]) -> tuple[Flags, Config]:
    """Raises ValueError for what cannot be measured."""
    flags, rest = tyro.cli(
        Flags, args=arguments, return_unknown_args=True, use_underscores=True, description=__doc__
    )
    default = DEFAULTS.get(flags.config.stem, Default())
    small = default.on_cpu.split() if jax.default_backend() == "cpu" else []
    own = tuple(field.name for field in dataclasses.fields(Flags))
    config = utils.parse(["--config", str(flags.config), *small, *rest], own)
    for name in ("interval_s", "rounds"):
        if getattr(flags, name) < 0:
            raise ValueError(
                f"--{name} {getattr(flags, name)} leaves nothing to measure. Use "
                f"--{name} {getattr(default, name)}."
            )
    flags = dataclasses.replace(
        flags,
        interval_s=flags.interval_s or default.interval_s,
        rounds=flags.rounds or default.rounds,
    )
    return flags, config


def main(arguments: list[str]) -> None:
    """benchmark.py checkpoint."""
    flags, config = parse(arguments)
    if flags.folder:
        flags.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="checkpoints-") as folder:
        training, stretches = Training(config, Path(folder)), []
        with closing(training.saved):
            for stretch in training.stretches(flags.interval_s, flags.rounds):
                stretches.append(stretch)
                say(f"{len(stretches)} of {2 * flags.rounds}: {stretch.steps} steps {stretch}")
        print("\n".join(lines(training, stretches)))
