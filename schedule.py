"""When each stage runs, as arithmetic: no pipelining, 1F1B and interleaved 1F1B in one formula.

A model is cut into `stages = pipeline * virtual` stages; stage `chunk * pipeline + rank` lives on
`rank`. Forward work of a rank is numbered 0, 1, ..., and backward work likewise; a number says
which chunk and microbatch, and in which tick:

    forward  k runs at tick  rank + k
    backward k runs at tick  stages - 1 + (pipeline - 1 - rank) + k

A rank does at most one forward and one backward in a tick, and what it sends in a tick its
neighbour needs in the next one. Only + - * // % are used, so every function of ticks, numbers,
chunks and microbatches takes Python integers and traced ones alike.

Source: interleaved 1F1B, arXiv:2104.04473, section 2.2.
"""

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Schedule:
    """The ticks of one training step on every pipeline rank.

    Raises  ValueError for sizes that no schedule can have.
    """

    pipeline: int  # ranks
    virtual: int  # chunks per rank
    microbatches: int  # M

    def __post_init__(self) -> None:
        for flag, size in (
            ("--mesh.pipeline", self.pipeline),
            ("--mesh.virtual", self.virtual),
            ("--train.microbatches", self.microbatches),
        ):
            if size < 1:
                raise ValueError(
                    f"{flag} {size} is not a size: it must be 1 or more. Use {flag} 1."
                )
        if self.virtual > 1 and self.microbatches % self.pipeline:
            works = -(-self.microbatches // self.pipeline) * self.pipeline
            raise ValueError(
                f"--train.microbatches {self.microbatches} is not a multiple of --mesh.pipeline "
                f"{self.pipeline}: with --mesh.virtual {self.virtual} microbatches pass through "
                f"the chunks in groups of one per rank. Use --train.microbatches {works}, or "
                f"--mesh.virtual 1."
            )

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def work(self) -> int:
        """Forward tasks of one rank; it has as many backward tasks."""
        return self.microbatches * self.virtual

    @property
    def ticks(self) -> int:
        return self.work + self.stages + self.pipeline - 2

    @property
    def phases(self) -> list[tuple[int, int, bool, bool]]:
        """(first tick, tick after the last, any forward, any backward): at most three, in order."""
        steady, cooldown = self.stages - 1, self.work + self.pipeline - 1
        phases = [
            (0, steady, True, False),
            (steady, cooldown, True, True),
            (cooldown, self.ticks, False, True),
        ]
        return [phase for phase in phases if phase[0] < phase[1]]

    @property
    def bubble(self) -> Fraction:
        """Idle share of the slots, counted: a rank has one per tick and direction of its phase."""
        slots = sum((stop - start) * (fwd + bwd) for start, stop, fwd, bwd in self.phases)
        return Fraction(slots - 2 * self.work, slots)

    @property
    def slots(self) -> int:
        """Length of the ring in which forward k leaves its residuals at k % slots.

        Rank 0 keeps those of chunk 0 for 2 * stages - 2 ticks, and stores in the last of them
        before it reads. A rank never stores more often than there are forward ticks.
        """
        return min(2 * self.stages - 1, self.work + self.pipeline - 1)

    def forward_number(self, tick, rank):
        """Number of the forward task at a tick; below 0 or from `work` on, the rank idles."""
        return tick - rank

    def backward_number(self, tick, rank):
        """Number of the backward task at a tick; below 0 or from `work` on, the rank idles."""
        return tick - (self.stages - 1) - (self.pipeline - 1 - rank)

    def is_task(self, number):
        """Whether a number is a task, and not an idle slot."""
        return (number >= 0) & (number < self.work)

    def forward_task(self, number):
        """(chunk, microbatch); the number of an idle slot wraps around, to point at real data."""
        k = number % self.work
        chunk = k % self.stages // self.pipeline
        return chunk, k // self.stages * self.pipeline + k % self.pipeline

    def backward_task(self, number):
        """(chunk, microbatch); chunks in the opposite order of forward_task."""
        chunk, microbatch = self.forward_task(number)
        return self.virtual - 1 - chunk, microbatch

    def task_number(self, chunk, microbatch):
        """The forward number of (chunk, microbatch): forward_task inverted."""
        group, position = microbatch // self.pipeline, microbatch % self.pipeline
        return group * self.stages + chunk * self.pipeline + position

    def enters(self, tick):
        """Whether rank 0 takes a new microbatch into its first chunk."""
        number = self.forward_number(tick, 0)
        return (self.forward_task(number)[0] == 0) & self.is_task(number)

    def ends(self, tick):
        """Whether the last rank has just taken a microbatch through its last chunk."""
        number = self.forward_number(tick, self.pipeline - 1)
        return (self.forward_task(number)[0] == self.virtual - 1) & self.is_task(number)

    def leaves(self, tick):
        """Whether rank 0 takes a microbatch backward through its first chunk."""
        number = self.backward_number(tick, 0)
        return (self.backward_task(number)[0] == 0) & self.is_task(number)

    def tasks_at(self, tick: int, rank: int) -> list[tuple[str, int, int]]:
        """(`fwd` or `bwd`, chunk, microbatch) of what a rank does in a tick: forward first."""
        forward, backward = self.forward_number(tick, rank), self.backward_number(tick, rank)
        found = []
        if self.is_task(forward):
            found.append(("fwd", *self.forward_task(forward)))
        if self.is_task(backward):
            found.append(("bwd", *self.backward_task(backward)))
        return found

    def tasks(self, rank: int) -> list[str]:
        """`fwd_<stage>__<microbatch>` and `bwd_...` in the order in which a rank runs them."""
        return [
            f"{way}_{chunk * self.pipeline + rank}__{microbatch}"
            for tick in range(self.ticks)
            for way, chunk, microbatch in self.tasks_at(tick, rank)
        ]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Print which rank runs which stage on which microbatch, tick by tick."""

    pipeline: int = 4  # ranks that share out the layers
    virtual: int = 1  # chunks of layers per rank; above 1 is interleaved 1F1B
    microbatches: int = 8  # parts that a step is cut into
    rank: int | None = None  # only this rank
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # tasks, ticks and bubble as JSON
    png: Path | None = None  # also draw a timeline into this file


def chosen_ranks(flags: Flags) -> list[int]:
    """The ranks that were asked for.

    Raises  ValueError for a rank that is not there.
    """
    if flags.rank is None:
        return list(range(flags.pipeline))
    if not 0 <= flags.rank < flags.pipeline:
        raise ValueError(
            f"--rank {flags.rank} is not there: --pipeline {flags.pipeline} has the ranks 0 to "
            f"{flags.pipeline - 1}. Use --rank {flags.pipeline - 1}."
        )
    return [flags.rank]


def chunk_name(chunk: int) -> str:
    """a, b, ..., z, then c26, c27, ..."""
    return chr(ord("a") + chunk) if chunk < 26 else f"c{chunk}"


def grid(schedule: Schedule, ranks: list[int]) -> list[str]:
    """One line per rank and direction, one column per tick: microbatch and chunk letter."""
    widest = f"{schedule.microbatches}{chunk_name(schedule.virtual - 1)}"
    width = 1 + max(len(widest), len(str(schedule.ticks)))

    def line(name: str, cells: list[str]) -> str:
        return f"{name:12}" + "".join(f"{cell:>{width}}" for cell in cells)

    lines = [line("tick", [str(tick) for tick in range(schedule.ticks)])]
    for rank in ranks:
        ticks = [schedule.tasks_at(tick, rank) for tick in range(schedule.ticks)]
        for way in ("fwd", "bwd"):
            done = [[f"{m}{chunk_name(c)}" for w, c, m in tick if w == way] for tick in ticks]
            lines.append(line(f"rank {rank} {way}", [(names or ["."])[0] for names in done]))
    return lines


def summary(schedule: Schedule) -> list[str]:
    """Ticks, and the bubble as counted beside the formula."""
    names = {(True, False): "warmup", (True, True): "steady", (False, True): "cooldown"}
    ticks = ", ".join(f"{b - a} {names[fwd, bwd]}" for a, b, fwd, bwd in schedule.phases)
    idle = schedule.pipeline - 1
    slots = schedule.work + idle
    return [
        f"ticks    {schedule.ticks}: {ticks}",
        f"bubble   {schedule.bubble} = {float(schedule.bubble):.1%} of the time, counted: a rank "
        f"fills {schedule.work} of {slots} forward slots, and as many of its backward slots",
        "formula  (pipeline - 1) / (microbatches * virtual + pipeline - 1) = "
        f"{Fraction(idle, slots)}",
        "A tick lasts one forward of a chunk in warmup, one backward in cooldown, and both in the "
        "steady phase.",
    ]


def text(schedule: Schedule, ranks: list[int]) -> str:
    """The grid over ticks, the task list of each rank, and the summary."""
    title = (
        f"{schedule.pipeline} ranks of {schedule.virtual} chunks (a, b, ...), "
        f"{schedule.microbatches} microbatches (0, 1, ...)"
    )
    tasks = [f"rank {rank}: {' '.join(schedule.tasks(rank))}" for rank in ranks]
    return "\n".join([title, *grid(schedule, ranks), "", *tasks, "", *summary(schedule)])


def colour(schedule: Schedule, way: str, chunk: int) -> tuple[float, ...]:
    """Forward is blue and backward orange; later chunks are darker."""
    import matplotlib

    shade = 0.3 + 0.35 * chunk / max(schedule.virtual - 1, 1)
    return matplotlib.colormaps[{"fwd": "Blues", "bwd": "Oranges"}[way]](shade)


def draw_tasks(axes, schedule: Schedule, ranks: list[int]) -> None:
    """A box per task with its microbatch in it: forward in the upper half of a rank's row."""
    from matplotlib.patches import Rectangle

    height = 0.45
    for row, rank in enumerate(ranks):
        for tick in range(schedule.ticks):
            for way, chunk, microbatch in schedule.tasks_at(tick, rank):
                y = row - height if way == "fwd" else row
                face = colour(schedule, way, chunk)
                axes.add_patch(Rectangle((tick, y), 1, height, facecolor=face, edgecolor="white"))
                axes.text(tick + 0.5, y + height / 2, microbatch, ha="center", va="center", size=8)
    axes.set(xlim=(0, schedule.ticks), ylim=(len(ranks) - 0.4, -0.6), xlabel="tick")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])


def draw(schedule: Schedule, ranks: list[int], path: Path) -> None:
    """A timeline as a picture, with a legend of the colours.

    Raises  ValueError for a file that is not named as a picture of this kind.
    """
    if path.suffix != ".png":
        raise ValueError(
            f"--png {path} does not end in .png. Use --png {path.with_suffix('.png')}."
        )
    from matplotlib.figure import Figure  # imported late, so that printing starts fast
    from matplotlib.patches import Patch

    inches = min(2 + 0.35 * schedule.ticks, 60)
    figure = Figure(figsize=(inches, 1.6 + 0.7 * len(ranks)), layout="constrained")
    draw_tasks(figure.subplots(), schedule, ranks)
    title = f"{schedule.microbatches} microbatches through {schedule.stages} stages: "
    figure.suptitle(f"{title}{schedule.ticks} ticks, bubble {schedule.bubble}", size=10)
    names = {"fwd": "forward", "bwd": "backward"}
    patches = [
        Patch(color=colour(schedule, way, chunk), label=f"{name}, chunk {chunk}")
        for way, name in names.items()
        for chunk in range(schedule.virtual)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Print the schedule as text or JSON, and draw it if asked."""
    flags = tyro.cli(Flags, args=arguments)
    schedule = Schedule(flags.pipeline, flags.virtual, flags.microbatches)
    ranks = chosen_ranks(flags)
    if flags.png:
        draw(schedule, ranks, flags.png)
    if flags.json:
        tasks = [schedule.tasks(rank) for rank in ranks]
        found = {"tasks": tasks, "ticks": schedule.ticks, "bubble": float(schedule.bubble)}
        print(json.dumps(found))
    else:
        print(text(schedule, ranks))
