"""Print and draw a pipeline schedule: the command `python pipeline.py`.

python pipeline.py --pipeline 4 --virtual 2 --microbatches 8
python pipeline.py --pipeline 4 --microbatches 8 --rank 2 --json
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from runtime import cli
from schedule import PHASES, Schedule
from utils import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Print which rank runs which stage on which microbatch, tick by tick."""

    pipeline: int = 4  # ranks that the layers are sharded over
    virtual: int = 1  # model chunks per rank; above 1 is interleaved 1F1B
    microbatches: int = 8  # microbatches of a step
    split_backward: bool = False  # as --pipeline.split_backward of main.py
    rank: int | None = None  # print only this rank
    json: bool = False  # print tasks, ticks and bubble as JSON
    png: Path | None = None  # also draw a timeline into this file


def ways(schedule: Schedule) -> list[str]:
    """Return the kinds of tasks: of weights, too, if the backward pass is split."""
    return ["fwd", "bwd", *["wgt"] * schedule.split_backward]


def grid(schedule: Schedule, ranks: Sequence[int]) -> list[str]:
    """Return a line per rank and kind of task, of microbatch and chunk letter in each tick."""
    letters = [chr(ord("a") + n) if n < 26 else f"c{n}" for n in range(schedule.virtual)]
    rows = {"tick": [str(tick) for tick in range(schedule.ticks)]}
    for rank in ranks:
        rows |= {f"rank {rank} {way}": ["."] * schedule.ticks for way in ways(schedule)}
        for tick in range(schedule.ticks):
            for way, chunk, microbatch in schedule.tasks_at(tick, rank):
                rows[f"rank {rank} {way}"][tick] = f"{microbatch}{letters[chunk]}"
    width = 1 + max(len(cell) for cells in rows.values() for cell in cells)
    return [
        f"{name:12}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows.items()
    ]


def text(schedule: Schedule, ranks: Sequence[int]) -> str:
    """Return the grid over ticks, the task list of each rank, the ticks, and the bubble."""
    title = (
        f"{schedule.pipeline} ranks of {schedule.virtual} model chunks (a, b, ...), "
        f"{schedule.microbatches} microbatches (0, 1, ...)"
    )
    tasks = [f"rank {rank}: {' '.join(schedule.tasks(rank))}" for rank in ranks]
    ticks = ", ".join(f"{b - a} {PHASES[tuple(kinds)]}" for a, b, *kinds in schedule.phases)
    idle, kinds = schedule.pipeline - 1, len(ways(schedule))
    slots = schedule.tasks_per_rank + idle
    formula = "(pipeline - 1) / (microbatches * virtual + pipeline - 1)"
    if split := schedule.split_backward:
        formula = "2 (pipeline - 1) / (3 microbatches * virtual + 2 (pipeline - 1))"
    summary = [
        f"ticks    {schedule.ticks}: {ticks}",
        f"bubble   {schedule.bubble} = {float(schedule.bubble):.1%} of the time, counted: a rank "
        f"uses {schedule.tasks_per_rank} of {slots} forward slots, and as many backward slots"
        f"{', and all weight slots' * split}",
        f"formula  {formula} = {Fraction(2 * idle, kinds * schedule.tasks_per_rank + 2 * idle)}",
        "A tick lasts one forward of a model chunk in warmup, one backward in cooldown, and both "
        f"in the steady phase{', with the gradients of weights if it is named so' * split}.",
    ]
    return "\n".join([title, *grid(schedule, ranks), "", *tasks, "", *summary])


def main(arguments: list[str] | None = None) -> None:
    """Print the schedule as text or JSON, and draw it if requested.

    Raises  ConfigError for a rank that does not exist.
    """
    flags = cli.parse_flags(Flags, arguments)
    schedule = Schedule(flags.pipeline, flags.virtual, flags.microbatches, flags.split_backward)
    ranks = range(flags.pipeline) if flags.rank is None else [flags.rank]
    if ranks[0] not in range(flags.pipeline):
        raise ConfigError(
            f"--rank {flags.rank} does not exist: --pipeline {flags.pipeline} has ranks 0 to "
            f"{flags.pipeline - 1}. Use --rank {flags.pipeline - 1}."
        )
    if flags.png:
        cli.check_writable("png", flags.png)
        draw_schedule(schedule, ranks, flags.png)
    if flags.json:
        tasks = [schedule.tasks(rank) for rank in ranks]
        figures = {"tasks": tasks, "ticks": schedule.ticks, "bubble": float(schedule.bubble)}
        print(json.dumps(figures))
    else:
        print(text(schedule, ranks))


def _color(schedule: Schedule, direction: str, chunk: int) -> tuple[str, float]:
    """Return color and opacity: forward is blue and backward orange; later chunks are darker."""
    color = f"C{ways(schedule).index(direction)}"
    return color, 0.4 + 0.5 * chunk / max(schedule.virtual - 1, 1)


def _draw_tasks(axes: Any, schedule: Schedule, ranks: Sequence[int]) -> None:
    """Draw a box per task with its microbatch: forward in the upper part of a rank's row."""
    height = 0.9 / len(ways(schedule))
    for row, rank in enumerate(ranks):
        for tick in range(schedule.ticks):
            for direction, chunk, microbatch in schedule.tasks_at(tick, rank):
                y = row - 0.45 + (ways(schedule).index(direction) + 0.5) * height
                face = _color(schedule, direction, chunk)
                axes.barh(y, 1, height, left=tick, color=face, edgecolor="white")
                axes.text(tick + 0.5, y, microbatch, ha="center", va="center", size=8)
    axes.set(xlim=(0, schedule.ticks), ylim=(len(ranks) - 0.4, -0.6), xlabel="tick")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])


def draw_schedule(schedule: Schedule, ranks: Sequence[int], path: Path) -> None:
    """Draw a timeline, with a legend of the colors."""
    from matplotlib.figure import Figure  # late, so that printing starts fast
    from matplotlib.patches import Patch

    inches = min(2 + 0.35 * schedule.ticks, 60)
    figure = Figure(figsize=(inches, 1.6 + 0.7 * len(ranks)), layout="constrained")
    _draw_tasks(figure.subplots(), schedule, ranks)
    title = f"{schedule.microbatches} microbatches through {schedule.stages} stages: "
    figure.suptitle(f"{title}{schedule.ticks} ticks, bubble {schedule.bubble}", size=10)
    patches = [
        Patch(color=_color(schedule, direction, chunk), label=f"{name}, chunk {chunk}")
        for direction, name in zip(ways(schedule), ("forward", "backward", "weights"), strict=False)
        for chunk in range(schedule.virtual)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
