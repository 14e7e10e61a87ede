"""Compile and time training steps, and other functions that several benchmarks share."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import hardware
import memory
import model
import pipeline
import sharded_model
import train
import utils
from optimizer import LearningRates, learning_rates
from planning import cost, hlo
from runtime import cli
from utils import Config, changed

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8  # timed steps, after a warm-up step
ONE_DEVICE = dict.fromkeys(["mesh.fsdp", "mesh.pipeline", "mesh.tensor", "mesh.virtual"], 1)


# --- configs and flags ----------------------------------------------------------------------------


def reference_config() -> Config:
    """Return configs/reference.toml with AdamW, which other projects have too."""
    config = cli.load(ROOT / "configs" / "reference.toml")
    return changed(config, {"optimizer.name": "adamw", "optimizer.lr": 1e-3})


@dataclass(frozen=True)
class NoFlags:
    """Of a benchmark without flags."""


# --- training steps -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A compiled training step, and what it runs on."""

    config: Config
    declared: model.Transformer
    mesh: Mesh
    step: Any
    rates: LearningRates
    compile_s: float

    def steps(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield (seconds, report) of successive steps, without end. The first ones are slower."""
        state = train.initial_state(self.config, self.declared, self.mesh)
        batch = random_batch(self.config, self.mesh)
        while True:
            seconds, (state, report) = timed(self.step, state, batch, self.rates)
            yield seconds, report

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.train.seq_len

    @property
    def model_flops(self) -> int:
        """Model FLOPs of a step on all devices."""
        step = cost.Step(self.config, sharded_model.platform(self.mesh))
        return round(cost.model_flops(step) * self.mesh.size)

    def flops_ratio(self) -> float:
        """Return compiled over model FLOPs."""
        share = pipeline.branch_share(sharded_model.schedule_of(self.config))
        return float(hlo.dot_flops(self.step.as_text(), share)) * self.mesh.size / self.model_flops


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile each program of this block, even if it is in the cache on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax reads the setting at its first compilation alone
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def compile_step(config: Config) -> Program:
    """Compile the step of train.py."""
    config = utils.for_platform(config, hardware.platform_of_device(jax.devices()[0]))
    cli.check(config)
    declared, mesh = model.declare(config), train.make_mesh(config)
    state = train.abstract_state(config, declared, mesh)
    rates = jax.device_put(learning_rates(config), NamedSharding(mesh, P()))
    with without_compilation_cache():
        start = time.perf_counter()
        batch = sharded_model.abstract_batch(config, mesh)
        step = train.compile_step(config, declared, mesh, state, batch, rates)
        compile_s = time.perf_counter() - start
    return Program(config, declared, mesh, step, rates, compile_s)


def random_batch(config: Config, mesh: Mesh) -> model.Batch:
    """Return a batch of random tokens. The cost of a step does not depend on them."""
    shapes = sharded_model.abstract_batch(config, mesh)
    M, B, T = shapes.tokens.shape
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.model.vocab_size, (M, B, T + 1), dtype=np.int32)
    ones, zeros = np.ones((M, B, T), np.float32), np.zeros((M, B, T), np.int32)
    batch = model.Batch(ids[..., :-1], ids[..., 1:], loss_weights=ones, segments=zeros)
    return jax.device_put(batch, train.shardings_of(shapes))


# --- measuring ------------------------------------------------------------------------------------


def timed(function: Callable, *arguments: Any) -> tuple[float, Any]:
    """Return the seconds until the result of a call is computed, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start, result


def median_seconds(function: Callable[[], Any]) -> float:
    """Return the median of STEPS calls, after a warm-up call."""
    return statistics.median([timed(function)[0] for _ in range(STEPS + 1)][1:])


def step_seconds(programs: list[Program]) -> list[float]:
    """Return median seconds per step of each program.

    The programs take turns, so that a disturbance of the machine slows all of them.
    """
    turns = zip(*(program.steps() for program in programs), strict=True)
    seconds = [[seconds for seconds, _ in turn] for turn in itertools.islice(turns, STEPS + 1)]
    return np.median(seconds[1:], axis=0).tolist()


def print_steps(programs: dict[str, Program]) -> list[float]:
    """Print a row for each program; return median seconds per step."""
    titles = "step s", "tokens/s", "GFLOP/s", "compiled/model FLOPs", "MiB per device", "compile s"
    table = Table("program", *titles)
    seconds = step_seconds([*programs.values()])
    for (name, program), s in zip(programs.items(), seconds, strict=True):
        rates = f"{s:.3f}", f"{program.tokens / s:,.0f}", f"{program.model_flops / s / 1e9:.1f}"
        size = f"{memory.planned_bytes(program.step) / 2**20:.0f}"
        compiled = f"{program.flops_ratio():.3f}", size, f"{program.compile_s:.1f}"
        table.add_row(name, *rates, *compiled)
    Console(width=120).print(table)
    print("GFLOP/s of model FLOPs on all devices together.")
    return seconds


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the text `median (minimum to maximum)`."""
    values = [*values]
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def matmul_flops_per_s(size: int, dtype: Any, in_flight: int) -> float:
    """Return the median FLOP/s of products of two square random matrices.

    in_flight  products started before each wait. Several keep a GPU busy between them; on a CPU
               they would run concurrently.
    """
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    product = jax.jit(jnp.matmul)
    seconds = median_seconds(lambda: [product(a, b) for _ in range(in_flight)])
    return 2 * size**3 * in_flight / seconds
