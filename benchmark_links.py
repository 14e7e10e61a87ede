"""What pipelining is for: steps of one model over links from fast to slow; a part of benchmark.py.

    ./run.sh python benchmark.py links               needs root on Linux, with ip and tc of iproute2
    ./run.sh python benchmark.py links --png links.png
    ./run.sh python benchmark.py links --help        its flags; main.py's go too, but for the mesh

On four pretend hosts (pretend_hosts.py), each a process with one device: FSDP alone, 1F1B, and
interleaved 1F1B. FSDP sends all weights and gradients, a pipeline the activations between stages.
A step of each follows a step of the others, so that what slows the machine slows them all.

Beside each time stand two predictions without overlap, whose arithmetic is that of the plan
(cost.py) at the FLOP/s of a host: those of a stage that every host runs by itself, all at once. One
is the plan's own: all that it counts of sends, at the bandwidth of the links, of which all that is
known is how fast TCP is. The other has the same bytes and the number of collectives in the compiled
program, each kind at the pace that was measured of it over these links.

The hosts share this machine's cores, and what a pipeline computes in ticks without a task takes as
long as any other work: so neither order nor ratios are those of accelerators, which compute all at
once and wait in the bubble.
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
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

import multihost
import passes
import pipeline
import utils
from benchmark import Program, compiled, with_values
from chips import Chip
from faults import Exit, Fault
from metrics import say
from plan import check_writable
from planning import cost, hlo
from pretend_hosts import Host, Network
from utils import GIB, MESH_AXES, Config

ROOT = Path(__file__).resolve().parent
HOSTS = 4
PORT = 8476  # of a job's first process, and the next jobs'
ALONE = "alone"
ONE = {"fsdp": 1, "pipeline": 1, "tensor": 1, "virtual": 1}
LAYOUTS = {
    "FSDP": ONE | {"fsdp": HOSTS},
    "1F1B": ONE | {"pipeline": HOSTS},
    "interleaved": ONE | {"pipeline": HOSTS, "virtual": 2},
}
# 6M parameters, and so few tokens that a link of 1 Gbit/s needs about as long for the weights of a
# step as two cores for its arithmetic.
MODEL = (
    "--model.blocks 8 --model.width 256 --model.hidden 688 --model.moe_layers 0 "
    "--model.vocabulary 512 --model.compute_dtype float32 --train.sequences 32 "
    "--train.sequence_length 32 --train.microbatches 8 --eval.sequences 32"
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py links` beside those of main.py."""

    mbit: tuple[float, ...] = (0, 1000, 300, 100, 30)  # Mbit/s of the links; 0: not throttled
    delay_ms: tuple[float, ...] = (1, 5)  # one way, added to links that are not throttled
    steps: int = 3  # timed, of each layout over each link
    png: Path | None = None  # draw seconds against bandwidth there
    json: Path | None = None  # write what was measured there


def layout_of(config: Config, name: str) -> Config:
    """The config on the mesh of a layout, whose microbatches have the same size on a device."""
    if name == ALONE:  # what a host computes, without the others: its part of the blocks
        return with_values(config, mesh=ONE, model={"blocks": config.model.blocks // HOSTS})
    mesh = LAYOUTS[name]
    microbatches = max(1, config.train.microbatches // mesh["fsdp"])
    return with_values(config, mesh=mesh, train={"microbatches": microbatches})


# --- a process of a job ---------------------------------------------------------------------------


def work(config: Config) -> None:
    """Tells its collectives once it is compiled, and answers each line of stdin: `step` with the
    seconds of a step, `paces` with those of collectives.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo writes to stdout, which is for answers
    try:
        multihost.start()
        if several := jax.process_count() > 1:
            multihost_utils.sync_global_devices("start")  # gloo waits 30 s to connect, and no more
        # Of several processes the first alone finds what was compiled before, and would wait.
        program = compiled(config, anew=several)
        print(json.dumps(messages(program)), file=answers)
        steps = program.steps()
        for line in sys.stdin:
            found = paces() if line == "paces\n" else next(steps)[0]
            print(json.dumps(found), file=answers)
    except Exception:
        traceback.print_exc()
        os._exit(Exit.BUG)  # at its end jax would wait for processes that wait for this one


def messages(program: Program) -> dict[str, float]:
    """How many collectives of each kind a step of this program has."""
    mesh = dict(zip(MESH_AXES, program.config.mesh.shape, strict=True))

    def one(instruction: hlo.Instruction, computation: Any) -> dict[str, int]:
        kinds = hlo.collective_cost(instruction, computation)
        return dict.fromkeys(kinds, 1) if kinds and hlo.group_axes(instruction, mesh) else {}

    share = pipeline.branch_share(passes.schedule_of(program.config))
    return hlo.executed(program.step.as_text(), one, share)


# What a host of all gives and, times the bytes of that, sends.
KINDS: dict[str, tuple[Callable, float]] = {
    "all-gather": (lambda a: lax.all_gather(a, "x", tiled=True), HOSTS - 1),
    "reduce-scatter": (
        lambda a: lax.psum_scatter(a, "x", tiled=True),
        (HOSTS - 1) / HOSTS,
    ),
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
    """One over all hosts in which each sends so many bytes; called once, so that it is compiled."""
    function, sent = KINDS[kind]
    mesh = jax.make_mesh((HOSTS,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    number = HOSTS * max(1, round(size / sent / 4 / HOSTS))
    spec = PartitionSpec("x")
    made = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))
    values = made((HOSTS * number,))

    # Whether results are the same on all does not matter here.
    def run(a: jax.Array) -> jax.Array:
        return function(a).sum(keepdims=True)

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    call = functools.partial(mapped, values)
    jax.block_until_ready(call())
    return call


def paces() -> dict[str, list[float]]:
    """Of each kind of collective the median seconds for each of SIZES."""

    def taken(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    calls = {kind: [collective(kind, size) for size in SIZES] for kind in KINDS}
    return {
        kind: [statistics.median(taken(call) for _ in range(REPEATS)) for call in both]
        for kind, both in calls.items()
    }


class Job:
    """A process on each host, which step together when they are asked to."""

    def __init__(self, name: str, config: Config, hosts: Sequence[Host], port: int, folder: Path):
        """port  of the first process, that the others find; 0: each is by itself."""
        self.name, file = name, folder / f"{name}.toml"
        file.write_text(utils.to_toml(config))
        self._logs = [folder / f"{name}.{host.name}.log" for host in hosts]
        self._processes: list[subprocess.Popen] = []
        command = (sys.executable, "benchmark.py", "links", "work", str(file))
        one = "--xla_force_host_platform_device_count=1"  # the last of a flag counts
        flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one}", "JAX_PLATFORMS": "cpu"}
        for number, host in enumerate(hosts):
            place = {
                "JAX_COORDINATOR_ADDRESS": f"{hosts[0].address}:{port}",
                "JAX_NUM_PROCESSES": str(len(hosts)),
                "JAX_PROCESS_ID": str(number),
            }
            with self._logs[number].open("w") as log:
                process = subprocess.Popen(
                    host.command(*command, folder=ROOT),
                    env=os.environ | flags | (place if port else {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._processes.append(process)

    def started(self) -> None:
        """Once all are compiled, they make a step, which is slower."""
        self.messages: dict[str, float] = self._answers()[0]
        self.step()

    def _answers(self) -> list:
        """Of each process. Raises Fault with its last words where one ended."""
        lines = [process.stdout.readline() for process in self._processes]
        for line, log in zip(lines, self._logs, strict=True):
            if not line:
                said = log.read_text().strip().splitlines()[-5:]
                raise Fault(f"a process of {self.name} ended: " + "\n".join(said))
        return [json.loads(line) for line in lines]

    def _asked(self, what: str) -> list:
        for process in self._processes:
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        return self._answers()

    def step(self) -> float:
        """Seconds, by the process that took longest."""
        return max(self._asked("step"))

    def paces(self) -> dict[str, list[float]]:
        return self._asked("paces")[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


# --- prediction -----------------------------------------------------------------------------------


class Expected(NamedTuple):
    """What is predicted of a layout: arithmetic, and what each host sends."""

    flops: float  # of a host
    sent: dict[str, float]  # bytes by kind of collective
    megabits: float  # seconds of all links by the plan, where they carry 1 Mbit/s
    messages: dict[str, float]  # collectives by kind

    @classmethod
    def of(cls, config: Config, messages: Mapping[str, float]) -> "Expected":
        """messages  of the compiled program: the plan has no delay, so does not count them."""
        chip = host_chip(1.0, 125_000.0)
        predicted = cost.predict(config, chip, "cpu")
        sent: Counter = Counter()
        for t in predicted.traffic:
            sent[t.kind] += t.sent_bytes
        links = predicted.serial_step_s - predicted.seconds["compute"]
        return cls(predicted.flops_per_chip, dict(sent), links, dict(messages))

    def planned_s(self, flops_per_s: float, mbit: float) -> float:
        """As plan.py says it of links of which the bandwidth is known."""
        return self.flops / flops_per_s + self.megabits / mbit

    def paced_s(self, flops_per_s: float, paces: Mapping[str, Sequence[float]]) -> float:
        """Each kind of collective at its pace."""
        seconds = self.flops / flops_per_s
        for kind, (small, large) in paces.items():
            byte_s = (large - small) / (SIZES[1] - SIZES[0])
            seconds += self.messages.get(kind, 0) * small + self.sent.get(kind, 0) * byte_s
        return seconds


def host_chip(flops_per_s: float, bandwidth: float) -> Chip:
    """A host as plan.py takes chips. Its memory is in the measured FLOP/s.

    bandwidth  bytes per second in one direction
    """
    links = {"link_bandwidth": bandwidth, "network_bandwidth": bandwidth}
    rates = {"flops": flops_per_s, "float32_flops": flops_per_s, "memory_bandwidth": math.inf}
    return Chip("host", (), memory_bytes=GIB, **rates, **links)


def crossing(mbit: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """The bandwidth at which both take as long, between two of those given: on straight lines in
    logarithms, and the fastest if there are several.
    """
    points = sorted(zip(mbit, one, other, strict=True), reverse=True)
    logs = [(math.log(m), math.log(a / b)) for m, a, b in points]
    for (x, d), (next_x, next_d) in itertools.pairwise(logs):
        if d * next_d <= 0 and d != next_d:
            return math.exp(x + (next_x - x) * d / (d - next_d))
    return None


# --- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What was measured over one link."""

    asked_mbit: float
    delay_ms: float
    mbit: float  # of data, by TCP
    round_trip_s: float
    paces: dict[str, list[float]]
    steps: dict[str, list[float]]  # seconds by layout, and alone

    @property
    def link(self) -> str:
        throttled = f"{self.asked_mbit:g} Mbit/s" if self.asked_mbit else "not throttled"
        return f"{throttled}, {self.delay_ms:g} ms" if self.delay_ms else throttled

    def seconds(self, layout: str) -> float:
        return statistics.median(self.steps[layout])


@dataclass(frozen=True)
class Found:
    rows: list[Row]
    expected: dict[str, Expected]  # by layout, and alone

    @property
    def flops_per_s(self) -> float:
        """Of a host, while all compute."""
        every = [seconds for row in self.rows for seconds in row.steps[ALONE]]
        return self.expected[ALONE].flops / statistics.median(every)

    def planned(self, mbit: float) -> dict[str, float]:
        rate = self.flops_per_s
        return {name: self.expected[name].planned_s(rate, mbit) for name in LAYOUTS}

    def paced(self, row: Row) -> dict[str, float]:
        rate = self.flops_per_s
        return {name: self.expected[name].paced_s(rate, row.paces) for name in LAYOUTS}

    @property
    def throttled(self) -> list[Row]:
        return [row for row in self.rows if not row.delay_ms]

    def crossings(self, one: str, other: str) -> list[float | None]:
        """Mbit/s as measured, as planned, and at the pace of collectives."""
        rows = self.throttled
        ways = (
            [{name: row.seconds(name) for name in LAYOUTS} for row in rows],
            [self.planned(row.mbit) for row in rows],
            [self.paced(row) for row in rows],
        )
        mbit = [row.mbit for row in rows]
        return [crossing(mbit, [w[one] for w in way], [w[other] for w in way]) for way in ways]


def measured(config: Config, flags: Flags, folder: Path) -> Found:
    """Of all links."""
    names = (ALONE, *LAYOUTS)
    configs = {name: layout_of(config, name) for name in names}
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(HOSTS, folder))
        jobs: dict[str, Job] = {}
        for number, name in enumerate(names):
            say(f"{name}: {HOSTS} processes start")
            port = PORT + number if name != ALONE else 0
            jobs[name] = Job(name, configs[name], network.hosts, port, folder)
            stack.callback(jobs[name].close)
            jobs[name].started()
        expected = {name: Expected.of(configs[name], jobs[name].messages) for name in names}
        rows = []
        asked = [(mbit, 0.0) for mbit in flags.mbit] + [(0.0, delay) for delay in flags.delay_ms]
        disable = not console.is_terminal
        for link in track(asked, "links", console=console, transient=True, disable=disable):
            rows.append(over(network, jobs, *link, flags.steps))
            say(line(rows[-1]))
    return Found(rows, expected)


def over(network: Network, jobs: dict[str, Job], mbit: float, delay_ms: float, steps: int) -> Row:
    """Steps in turns over links of this bandwidth and delay."""
    network.throttle(mbit)
    network.delay(delay_ms * 1e-3)
    link = network.bandwidth(), network.round_trip_s()
    paces = jobs["FSDP"].paces()
    turns = [{name: job.step() for name, job in jobs.items()} for _ in range(steps)]
    taken = {name: [turn[name] for turn in turns] for name in jobs}
    return Row(mbit, delay_ms, *link, paces, taken)


# --- told -----------------------------------------------------------------------------------------


def line(row: Row) -> str:
    taken = ", ".join(f"{name} {row.seconds(name):.2f}" for name in LAYOUTS)
    return f"{row.link}: {row.mbit:.0f} Mbit/s, {1e3 * row.round_trip_s:.2f} ms; {taken} s"


def fastest(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=seconds.__getitem__)


def table(found: Found) -> Table:
    titles = ("links", "Mbit/s", "ms", *LAYOUTS, "1F1B / FSDP", "fastest")
    made = Table(*titles, title="s per step: measured / by the plan / at the pace of collectives")
    for row in found.rows:
        seconds = {name: row.seconds(name) for name in LAYOUTS}
        # The plan has no delay.
        ways = [seconds, {} if row.delay_ms else found.planned(row.mbit), found.paced(row)]

        def three(told: Callable[[dict[str, float]], str], ways: list = ways) -> str:
            return " / ".join(told(way) if way else "-" for way in ways)

        made.add_row(
            row.link,
            f"{row.mbit:,.0f}",
            f"{1e3 * row.round_trip_s:.2f}",
            *(three(lambda way, name=name: f"{way[name]:.2f}") for name in LAYOUTS),
            three(lambda way: f"{way['1F1B'] / way['FSDP']:.2f}"),
            three(fastest),
        )
    return made


def lines(found: Found) -> Iterator[str]:
    """What the table says, and what it was made from."""
    yield (
        f"A host computes {found.flops_per_s / 1e9:.1f} GFLOP/s while all {HOSTS} do, on "
        f"{os.cpu_count()} cores. ms: there and back."
    )
    for name in LAYOUTS:
        e = found.expected[name]
        number = ", ".join(f"{n:.0f} {kind}" for kind, n in sorted(e.messages.items()))
        yield (
            f"{name}: {e.flops / 1e9:.1f} GFLOP and {sum(e.sent.values()) / 1e6:.1f} MB sent per "
            f"host and step, in {number}"
        )
    slow = min(found.throttled, key=lambda row: row.mbit)
    reached = {
        kind: (SIZES[1] - SIZES[0]) * 8e-6 / (large - small)
        for kind, (small, large) in slow.paces.items()
    }
    told = ", ".join(f"{kind} {rate / slow.mbit:.2f}" for kind, rate in reached.items())
    yield f"Of TCP's bandwidth collectives reach, where it is least: {told}"
    for one, other in (("FSDP", "1F1B"), ("FSDP", "interleaved"), ("interleaved", "1F1B")):
        by = [f"{mbit:,.0f}" if mbit else "none" for mbit in found.crossings(one, other)]
        yield (
            f"Below so many Mbit/s {other} is faster than {one}: measured {by[0]}, by the plan "
            f"{by[1]}, at the pace of collectives {by[2]}"
        )
    for row in found.rows:
        ratio = row.seconds("interleaved") / row.seconds("1F1B")
        paced = found.paced(row)
        if ratio > 1 and paced["interleaved"] > paced["1F1B"]:  # and not by noise
            yield f"{row.link}: interleaving loses by its sends: {ratio:.2f} times 1F1B's step"


def draw(found: Found, path: Path) -> None:
    """Seconds per step against bandwidth."""
    from matplotlib import rc_context  # late, so that all else runs without it
    from matplotlib.figure import Figure

    from plot import STYLE

    rows = sorted(found.throttled, key=lambda row: row.mbit)
    least, most = rows[0].mbit, rows[-1].mbit
    grid = [least * (most / least) ** (i / 99) for i in range(100)] if most > least else [least]
    planned = [found.planned(mbit) for mbit in grid]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.4), layout="constrained")
        axes = figure.subplots()
        mbit = [row.mbit for row in rows]
        for i, name in enumerate(LAYOUTS):
            axes.plot(mbit, [row.seconds(name) for row in rows], f"C{i}o", label=name)
            axes.plot(grid, [way[name] for way in planned], f"C{i}--", lw=1.0)
            axes.plot(mbit, [found.paced(row)[name] for row in rows], f"C{i}-", lw=1.2)
        axes.plot([], [], "k--", lw=1.0, label="by the plan")
        axes.plot([], [], "k-", lw=1.2, label="at the pace of collectives")
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s of each host", ylabel="s per step")
        axes.set_title(f"One model on {HOSTS} hosts, measured (dots) and predicted")
        axes.legend()
        figure.savefig(path, dpi=150)


def as_json(found: Found) -> dict[str, Any]:
    rows = [
        dataclasses.asdict(row)
        | {"planned": found.planned(row.mbit), "at_the_pace_of_collectives": found.paced(row)}
        for row in found.rows
    ]
    expected = {name: e._asdict() for name, e in found.expected.items()}
    return {"rows": rows, "expected": expected, "flops_per_s": found.flops_per_s}


def parse(arguments: list[str]) -> tuple[Flags, Config]:
    """Raises ValueError for what cannot be measured."""
    flags, rest = tyro.cli(
        Flags, args=arguments, return_unknown_args=True, use_underscores=True, description=__doc__
    )
    if flags.steps < 1 or not flags.mbit or min(*flags.mbit, *flags.delay_ms, 0) < 0:
        raise ValueError(
            "nothing can be measured so: use --steps 1 or more, --mbit with one number or more, 0 "
            "for a link that is not throttled, and no number below 0."
        )
    if flags.png:
        check_writable("png", flags.png)
    own = tuple(field.name for field in dataclasses.fields(Flags))
    config = utils.parse([*MODEL.split(), *rest], own, checked=False)
    if config.mesh != utils.Mesh():
        raise ValueError("the meshes are those of the layouts: leave --mesh out.")
    for name in (ALONE, *LAYOUTS):
        utils.check(layout_of(config, name))
    most = HOSTS * max(mesh["virtual"] for mesh in LAYOUTS.values())
    if config.model.blocks % most:
        raise ValueError(
            f"--model.blocks {config.model.blocks} cannot be cut into the {most} stages of the "
            f"interleaved layout. Use --model.blocks {-(-config.model.blocks // most) * most}."
        )
    return flags, config


def main(arguments: list[str]) -> None:
    """benchmark.py links."""
    if arguments[:1] == ["work"]:  # a process of a job
        return work(utils.load(arguments[1]))
    flags, config = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        found = measured(config, flags, Path(folder))
    Console(width=160).print(table(found))
    print("\n".join(lines(found)))
    if flags.png:
        draw(found, flags.png)
    if flags.json:
        flags.json.write_text(json.dumps(as_json(found), indent=1))
