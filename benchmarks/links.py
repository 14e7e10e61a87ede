"""Time FSDP and pipeline layouts over links from fast to slow.

    ./run.sh python benchmark.py links               needs root on Linux, with ip and tc of iproute2
    ./run.sh python benchmark.py links --png links.png

The flags of main.py are accepted too, except for the mesh. One model trains on four simulated hosts
(tests/simulated_hosts.py), each a process with one device: with FSDP, with 1F1B, and with
interleaved 1F1B. FSDP sends all weights and gradients; a pipeline sends the activations between
stages. The layouts take turns, so that a disturbance of the machine slows all of them.

The plan's time without overlap accompanies each measured time. It is that of planning/cost.py, at
the FLOP/s of a host while all hosts compute and the TCP bandwidth of the links. A second table has
the seconds of each kind of collective over each link.

The hosts share the cores of this machine, and the ticks of a pipeline without a task take as long
as others. Neither order nor ratios are those of accelerators, which compute concurrently and idle
in the bubble.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import utils
from benchmarks.common import (
    ONE_DEVICE,
    ROOT,
    compile_step,
    median_seconds,
    parse_flags,
    with_values,
)
from hardware import Chip
from planning import cost
from runtime import cli, distributed
from runtime.console import log
from runtime.errors import Exit, TransientError
from utils import GIB, Config, ConfigError

sys.path.append(str(ROOT / "tests"))
from simulated_hosts import Host, Network

HOSTS = 4
PORT = 8476  # of the first process of the first job; the other jobs use the next ports
ALONE = "alone"  # the computation of one host, without communication
LAYOUTS = {
    "FSDP": ONE_DEVICE | {"fsdp": HOSTS},
    "1F1B": ONE_DEVICE | {"pipeline": HOSTS},
    "interleaved": ONE_DEVICE | {"pipeline": HOSTS, "virtual": 2},
}
# 6M parameters, and so few tokens that a link of 1 Gbit/s sends the weights of a step about as fast
# as two cores compute it.
MODEL = (
    "--model.num_hidden_layers 8 --model.decoder_sparse_step 1 --model.n_routed_experts 0 "
    "--model.hidden_size 256 --model.intermediate_size 688 "
    "--model.vocab_size 512 --model.compute_dtype float32 --train.global_batch_size 32 "
    "--train.seq_len 32 --train.microbatches 8 --eval.sequences 32"
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py links` beside those of main.py."""

    mbit: tuple[float, ...] = (0, 1000, 300, 100, 30)  # Mbit/s of the links; 0: not throttled
    delay_ms: tuple[float, ...] = (1, 5)  # one way, added to links that are not throttled
    steps: int = 3  # timed, of each layout over each link
    png: Path | None = None  # draw seconds against bandwidth to this file


def layout_of(config: Config, name: str) -> Config:
    """Return the config on the mesh of a layout, with equal microbatches per device."""
    if name == ALONE:  # a host's part of the blocks
        layers = config.model.num_hidden_layers // HOSTS
        return with_values(config, mesh=ONE_DEVICE, model={"num_hidden_layers": layers})
    mesh = LAYOUTS[name]
    microbatches = max(1, config.train.microbatches // mesh["fsdp"])
    return with_values(config, mesh=mesh, train={"microbatches": microbatches})


# --- a process of a job ---------------------------------------------------------------------------


def work(config: Config) -> None:
    """Serve a job on one host: compile the step, then answer the lines of stdin.

    The answer to `step` is the seconds of a step, that to `collectives` their seconds.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # gloo writes to stdout, which is for answers
    try:
        distributed.start()
        if several := jax.process_count() > 1:
            multihost_utils.sync_global_devices("start")  # gloo connects for at most 30 s
        # Only the first of several processes would use the cache, and then wait for the others.
        program = compile_step(config, cached=not several)
        steps = program.steps()
        for line in sys.stdin:
            answer = collective_seconds() if line == "collectives\n" else next(steps)[0]
            print(json.dumps(answer), file=answers)
    except Exception:
        traceback.print_exc()
        os._exit(Exit.BUG)  # a normal exit of jax would wait for processes that wait for this one


# Each kind of collective, and the bytes that a host sends over the bytes of its operand.
KINDS: dict[str, tuple[Callable, float]] = {
    "all-gather": (lambda a: lax.all_gather(a, "x", tiled=True), HOSTS - 1),
    "reduce-scatter": (lambda a: lax.psum_scatter(a, "x", tiled=True), (HOSTS - 1) / HOSTS),
    "all-reduce": (lambda a: lax.psum(a, "x"), 2 * (HOSTS - 1) / HOSTS),
    "collective-permute": (
        lambda a: lax.ppermute(a, "x", [(i, (i + 1) % HOSTS) for i in range(HOSTS)]),
        1,
    ),
}
SIZES = 1 << 10, 1 << 20  # bytes that a host sends
REPEATS = 3


@functools.cache
def collective(kind: str, size: int) -> Callable[[], Any]:
    """Return a compiled collective over all hosts in which each one sends `size` bytes."""
    function, sent = KINDS[kind]
    # Not by jax.make_mesh, which takes hosts with different boot ids for slices and refuses them.
    mesh = Mesh(jax.devices()[:HOSTS], ("x",), axis_types=(AxisType.Auto,))
    number = HOSTS * max(1, round(size / sent / 4 / HOSTS))
    spec = PartitionSpec("x")
    ones = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))

    def run(a: jax.Array) -> jax.Array:
        return function(a).sum(keepdims=True)

    # Without check_vma: whether the results are equal on all hosts does not matter here.
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return functools.partial(mapped, ones((HOSTS * number,)))


def collective_seconds() -> dict[str, list[float]]:
    """Return the median seconds of each kind of collective for each of SIZES."""
    return {
        kind: [median_seconds(collective(kind, size), REPEATS) for size in SIZES] for kind in KINDS
    }


class Job:
    """A process on each host; the processes step together."""

    def __init__(self, name: str, config: Config, hosts: Sequence[Host], port: int, folder: Path):
        """port  of the first process, which the others connect to; 0: each host is alone"""
        self.name, file = name, folder / f"{name}.toml"
        file.write_text(cli.to_toml(config), encoding="utf-8")
        self._logs = [folder / f"{name}.{host.name}.log" for host in hosts]
        self._processes: list[subprocess.Popen] = []
        command = (sys.executable, "benchmark.py", "links", "work", str(file))
        one = "--xla_force_host_platform_device_count=1"  # the last value of a flag counts
        flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one}", "JAX_PLATFORMS": "cpu"}
        for number, host in enumerate(hosts):
            process = {
                "JAX_COORDINATOR_ADDRESS": f"{hosts[0].address}:{port}",
                "JAX_NUM_PROCESSES": str(len(hosts)),
                "JAX_PROCESS_ID": str(number),
            }
            with self._logs[number].open("w", encoding="utf-8") as errors:
                started = subprocess.Popen(
                    host.command(*command, folder=ROOT),
                    env=os.environ | flags | (process if port else {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self._processes.append(started)

    def _answers(self) -> list:
        """Return the answer of each process. Raises TransientError if one has ended."""
        lines = [process.stdout.readline() for process in self._processes]
        for line, file in zip(lines, self._logs, strict=True):
            if not line:
                end = file.read_text(encoding="utf-8").strip().splitlines()[-5:]
                raise TransientError(f"a process of {self.name} ended: " + "\n".join(end))
        return [json.loads(line) for line in lines]

    def _request(self, line: str) -> list:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended: _answers says why
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
        return self._answers()

    def step(self) -> float:
        """Return the seconds of a step on the slowest host."""
        return max(self._request("step"))

    def collective_seconds(self) -> dict[str, list[float]]:
        return self._request("collectives")[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


# --- prediction -----------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """The work of a host in a step of a layout."""

    flops: float
    sent_bytes: float
    megabits: float  # seconds of all sends over links of 1 Mbit/s

    @classmethod
    def of(cls, config: Config) -> "Prediction":
        plan = cost.predict(config, host_chip(1.0, 125_000.0), "cpu")
        links_s = plan.serial_step_s - plan.seconds["compute"]
        return cls(plan.flops_per_chip, sum(t.sent_bytes for t in plan.traffic), links_s)

    def seconds(self, flops_per_s: float, mbit: float) -> float:
        """Return the seconds of a step."""
        return self.flops / flops_per_s + self.megabits / mbit


def host_chip(flops_per_s: float, bandwidth: float) -> Chip:
    """Return a host as a chip. The measured FLOP/s include the time of its memory.

    bandwidth  bytes per second in one direction
    """
    links = {"link_bandwidth": bandwidth, "network_bandwidth": bandwidth}
    rates = {"flops": flops_per_s, "float32_flops": flops_per_s, "memory_bandwidth": math.inf}
    return Chip("host", (), memory_bytes=GIB, **rates, **links)


def crossing(mbit: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the bandwidth at which both take equally long, or None.

    Interpolates between measurements on a log-log scale. The fastest of several is returned.
    """
    points = sorted(zip(mbit, one, other, strict=True), reverse=True)
    logs = [(math.log(m), math.log(a / b)) for m, a, b in points]
    for (x, d), (next_x, next_d) in itertools.pairwise(logs):
        if d * next_d <= 0 and d != next_d:
            return math.exp(x + (next_x - x) * d / (d - next_d))
    return None


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Steps over links of one bandwidth and delay."""

    limit_mbit: float  # 0: not throttled
    delay_ms: float
    mbit: float  # measured, of data over TCP
    round_trip_s: float
    collectives: dict[str, list[float]]  # seconds by kind, for each of SIZES
    steps: dict[str, list[float]]  # seconds by layout, and ALONE

    @property
    def link(self) -> str:
        throttled = f"{self.limit_mbit:g} Mbit/s" if self.limit_mbit else "not throttled"
        return f"{throttled}, {self.delay_ms:g} ms" if self.delay_ms else throttled

    @property
    def seconds(self) -> dict[str, float]:
        """Median seconds per step by layout."""
        return {name: statistics.median(self.steps[name]) for name in LAYOUTS}


@dataclass(frozen=True)
class Result:
    measurements: list[Measurement]
    predictions: dict[str, Prediction]  # by layout, and ALONE

    @property
    def flops_per_s(self) -> float:
        """Of a host, while all hosts compute."""
        seconds = [s for one in self.measurements for s in one.steps[ALONE]]
        return self.predictions[ALONE].flops / statistics.median(seconds)

    def planned(self, mbit: float) -> dict[str, float]:
        rate = self.flops_per_s
        return {name: self.predictions[name].seconds(rate, mbit) for name in LAYOUTS}

    @property
    def throttled(self) -> list[Measurement]:
        """The measurements without added delay, by bandwidth."""
        return sorted((m for m in self.measurements if not m.delay_ms), key=lambda m: m.mbit)

    def crossings(self, one: str, other: str) -> list[float | None]:
        """Return the Mbit/s at which two layouts are equally fast: measured, planned."""
        found = self.throttled
        ways = [m.seconds for m in found], [self.planned(m.mbit) for m in found]
        mbit = [m.mbit for m in found]
        return [crossing(mbit, [w[one] for w in way], [w[other] for w in way]) for way in ways]


def measure(config: Config, flags: Flags, folder: Path) -> Result:
    names = (ALONE, *LAYOUTS)
    configs = {name: layout_of(config, name) for name in names}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(HOSTS, folder))
        jobs: dict[str, Job] = {}
        for number, name in enumerate(names):
            log(f"{name}: {HOSTS} processes start")
            port = PORT + number if name != ALONE else 0
            jobs[name] = Job(name, configs[name], network.hosts, port, folder)
            stack.callback(jobs[name].close)
            jobs[name].step()  # waits until all processes have compiled
        found = []
        links = [(mbit, 0.0) for mbit in flags.mbit] + [(0.0, delay) for delay in flags.delay_ms]
        for mbit, delay_ms in links:
            network.throttle(mbit)
            network.delay(delay_ms * 1e-3)
            link = network.bandwidth(), network.round_trip_s()
            collectives = jobs["FSDP"].collective_seconds()
            turns = [{name: job.step() for name, job in jobs.items()} for _ in range(flags.steps)]
            steps = {name: [turn[name] for turn in turns] for name in jobs}
            found.append(Measurement(mbit, delay_ms, *link, collectives, steps))
            times = ", ".join(f"{name} {s:.2f}" for name, s in found[-1].seconds.items())
            log(f"{found[-1].link}: {link[0]:.0f} Mbit/s, {1e3 * link[1]:.2f} ms; {times} s")
        return Result(found, {name: Prediction.of(configs[name]) for name in names})


# --- results --------------------------------------------------------------------------------------


def step_table(result: Result) -> Table:
    titles = ("links", "Mbit/s", "ms", *LAYOUTS, "1F1B / FSDP", "fastest")
    made = Table(*titles, title="seconds per step: measured / planned")
    for one in result.measurements:
        ways = [one.seconds] if one.delay_ms else [one.seconds, result.planned(one.mbit)]
        cells = [[f"{way[name]:.2f}" for way in ways] for name in LAYOUTS]
        cells.append([f"{way['1F1B'] / way['FSDP']:.2f}" for way in ways])
        cells.append([min(way, key=way.__getitem__) for way in ways])
        link = one.link, f"{one.mbit:,.0f}", f"{1e3 * one.round_trip_s:.2f}"
        made.add_row(*link, *map(" / ".join, cells))
    return made


def collective_table(result: Result) -> Table:
    small, large = (f"{size // 1024} KiB" for size in SIZES)
    made = Table("links", *KINDS, title=f"ms of a collective: {small} / {large} sent by each host")
    for one in result.measurements:
        cells = [" / ".join(f"{1e3 * s:,.1f}" for s in one.collectives[kind]) for kind in KINDS]
        made.add_row(one.link, *cells)
    return made


def lines(result: Result) -> Iterator[str]:
    """Describe the work of each layout, and what the tables show."""
    yield (
        f"A host computes {result.flops_per_s / 1e9:.1f} GFLOP/s while all {HOSTS} do, on "
        f"{os.cpu_count()} cores. ms: round trip. The plan has no delay."
    )
    for name in LAYOUTS:
        p = result.predictions[name]
        sent = f"{p.sent_bytes / 1e6:.1f} MB sent per host and step"
        yield f"{name}: {p.flops / 1e9:.1f} GFLOP and {sent}"
    for one, other in (("FSDP", "1F1B"), ("FSDP", "interleaved"), ("interleaved", "1F1B")):
        by = [f"{mbit:,.0f}" if mbit else "none" for mbit in result.crossings(one, other)]
        faster = f"Mbit/s below which {other} is faster than {one}"
        yield f"{faster}: measured {by[0]}, planned {by[1]}"


def draw(result: Result, path: Path) -> None:
    """Draw seconds per step against bandwidth."""
    from matplotlib import rc_context  # late: everything else runs without it
    from matplotlib.figure import Figure

    from plot import STYLE

    found = result.throttled
    mbit = [m.mbit for m in found]
    grid = [mbit[0] * (mbit[-1] / mbit[0]) ** (i / 99) for i in range(100)]
    planned = [result.planned(m) for m in grid]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.4), layout="constrained")
        axes = figure.subplots()
        for i, name in enumerate(LAYOUTS):
            axes.plot(mbit, [m.seconds[name] for m in found], f"C{i}o", label=name)
            axes.plot(grid, [way[name] for way in planned], f"C{i}--", lw=1.0)
        axes.plot([], [], "k--", lw=1.0, label="planned")
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s of each host", ylabel="s per step")
        axes.set_title(f"One model on {HOSTS} hosts, measured (dots) and planned (lines)")
        axes.legend()
        figure.savefig(path, dpi=150)


def parse(arguments: list[str]) -> tuple[Flags, Config]:
    """Raise ConfigError for what cannot be measured."""
    flags, rest = parse_flags(Flags, arguments, __doc__, others=True)
    if flags.steps < 1 or not flags.mbit or min(*flags.mbit, *flags.delay_ms, 0) < 0:
        raise ConfigError(
            "these flags leave nothing to measure. Use --steps 1 or more, and --mbit with at least "
            "one number, 0 for a link that is not throttled. No number may be negative."
        )
    if flags.png:
        cli.check_writable("png", flags.png)
    names = tuple(field.name for field in dataclasses.fields(Flags))
    config = cli.parse([*MODEL.split(), *rest], names, checked=False)
    if config.mesh != utils.Mesh():
        raise ConfigError("the layouts set the mesh. Remove the --mesh flags.")
    for name in (ALONE, *LAYOUTS):
        cli.check(layout_of(config, name))
    stages = HOSTS * max(mesh["virtual"] for mesh in LAYOUTS.values())
    layers = config.model.num_hidden_layers
    if layers % stages:
        raise ConfigError(
            f"--model.num_hidden_layers {layers} does not fill the {stages} stages of the "
            "interleaved layout equally. Use --model.num_hidden_layers "
            f"{-(-layers // stages) * stages}."
        )
    return flags, config


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["work"]:  # a process of a job
        return work(cli.load(arguments[1]))
    flags, config = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        result = measure(config, flags, Path(folder))
    Console(width=160).print(step_table(result), collective_table(result))
    print("\n".join(lines(result)))
    if flags.png:
        draw(result, flags.png)
