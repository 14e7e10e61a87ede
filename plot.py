"""Draws a run from its metrics.jsonl: validation loss, load loss, tokens per expert; and schedules.

python plot.py --run runs/tiny             -> runs/tiny/plots/*.png
python plot.py --run runs/a runs/b         -> runs/a+b/plots/*.png, one over the other
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter

import buckets
import faults
import metrics
import run_folder
import utils
from schedule import Schedule

# Told apart by colour-blind readers as well: Okabe and Ito's set.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = {
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),  # run i is drawn in "Ci"
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#666666",
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "legend.frameon": False,
}


class Recorded:
    """What one run's folder holds, as arrays over its steps and its evaluations.

    Raises  ValueError where there is nothing to draw.
    """

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no metrics.jsonl. Give the folder of a run, as runs/tiny."
            )
        records = metrics.read(path)
        train = [record for record in records if "loss/train" in record]
        val = [record for record in records if "loss/val" in record]
        if not train or not val:
            raise ValueError(
                f"{path} holds {len(train)} steps and {len(val)} evaluations, and a picture needs "
                "one of each. Let the run go on to its first evaluation (--eval.every_steps)."
            )
        self.name = folder.resolve().name
        self.tokens_per_step = train[-1]["tokens"] / train[-1]["step"]
        self.steps = _column(train, "step")
        self.tokens = self.steps * self.tokens_per_step
        self.val_tokens = _column(val, "step") * self.tokens_per_step
        self.train = _column(train, "loss/cross_entropy")  # which validation loss compares with
        self.val = _column(val, "loss/val")
        # Over what a perfectly even load costs; None where that is 0.
        factor = _balance_factor(folder / "config.toml")
        self.balance = _column(train, "loss/balance") / factor if factor > 0 else None
        self.val_balance = _column(val, "loss/val_balance")
        # [evaluations, MoE layers, experts], of a layer's routed tokens
        tokens = np.array([record["moe/tokens_per_expert"] for record in val], float)
        tokens = tokens.reshape(len(val), -1, tokens.shape[-1] if tokens.size else 1)
        self.share = tokens / np.maximum(tokens.sum(-1, keepdims=True), 1.0)


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """A gap where a value was not finite or not there."""
    return np.array([np.nan if r[name] is None else r[name] for r in records], float)


def _balance_factor(path: Path) -> float:
    """Of the balance loss, times MoE layers; 0 where the config is not known."""
    if not path.is_file():
        return 0.0
    m = vars(utils.Model()) | tomllib.loads(path.read_text()).get("model", {})
    return m["blocks"] * m["moe_layers"] * m["balance_loss"]


def _axes_of_time(axes: list[Axes], runs: list[Recorded]) -> None:
    """Tokens below, and steps above where all runs take as many tokens in a step."""
    per_step = runs[0].tokens_per_step
    same = all(run.tokens_per_step == per_step for run in runs)
    for ax in axes:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        if same:
            above = ax.secondary_xaxis(
                "top", functions=(lambda x: x / per_step, lambda x: x * per_step)
            )
            above.set_xlabel("steps", fontsize=8.0)
            above.tick_params(labelsize=8)
        else:
            ax.spines.top.set_visible(False)


def _figure(rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    size = (7.0, 4.4) if rows == columns == 1 else (1.0 + 3.4 * columns, 0.6 + 2.7 * rows)
    figure = Figure(figsize=size, layout="constrained")
    shape = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    return figure, list(shape.flat)


def _marker(run: Recorded) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.5} if len(run.val) <= 40 else {}


def validation_loss(runs: list[Recorded]) -> Figure:
    """Cross-entropy on held-out text over tokens; faint, in training."""
    lines = [(r.train, r.val, f"{r.name}: {r.val[-1]:.3f} at the end") for r in runs]
    return _losses(runs, lines, "Validation loss", "cross-entropy (nats per token)")


def load_loss(runs: list[Recorded]) -> Figure:
    """Balance loss without its factor, mean over MoE layers, over tokens; 1 is perfectly even."""
    lines = [(r.balance, r.val_balance, r.name) for r in runs]
    return _losses(runs, lines, "Load loss, at evaluations", "balance loss (1 = even)", even=1.0)


def _losses(
    runs: list[Recorded], lines: list[tuple], title: str, ylabel: str, even: float | None = None
) -> Figure:
    """Draws (loss in training or None, at evaluations, label) of each run; dashed, an even load."""
    figure, [ax] = _figure()
    for i, (run, (trained, evaluated, label)) in enumerate(zip(runs, lines, strict=True)):
        if trained is not None:
            ax.plot(run.tokens, trained, f"C{i}", alpha=0.25, lw=0.8)
        ax.plot(run.val_tokens, evaluated, f"C{i}", lw=1.8, label=label, **_marker(run))
    if even is not None:
        ax.axhline(even, color="#444444", lw=1.0, ls="--", label="perfectly even")
    if any(trained is not None for trained, _, _ in lines):
        ax.plot([], [], color="#888888", alpha=0.5, lw=0.8, label="in training")
    ax.set(xlabel="tokens", ylabel=ylabel, title=title)
    ax.legend()
    _axes_of_time([ax], runs)
    return figure


def tokens_per_expert(runs: list[Recorded]) -> Figure:
    """Share of routed tokens over tokens: a panel per MoE layer, a line per expert.

    Several runs are drawn as the band between their least and most loaded expert.
    """
    layers = max(run.share.shape[1] for run in runs)
    columns = min(layers, 4)
    figure, axes = _figure(-(-layers // columns), columns)
    for ax in axes[layers:]:
        ax.set_visible(False)
    for layer, ax in enumerate(axes[:layers]):
        for i, run in enumerate(runs):
            if layer < run.share.shape[1]:
                _draw_layer(ax, run, layer, f"C{i}" if len(runs) > 1 else None)
        ax.set_title(f"MoE layer {layer}")
        ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        if layer + columns >= layers:
            ax.set_xlabel("tokens")
            ax.tick_params(labelbottom=True)
        if layer % columns == 0:
            ax.set_ylabel("share of tokens")
    axes[0].set_ylim(bottom=0.0)  # all have the same, from what all have drawn
    _axes_of_time(axes[:layers], runs)
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) <= 16:
        title = "expert" if len(runs) == 1 else "least and most\nloaded expert"
        figure.legend(handles, labels, title=title, loc="outside right upper", fontsize=8.0)
    figure.suptitle("Tokens per expert, at evaluations (dashed: even)")
    return figure


def _draw_layer(ax: Axes, run: Recorded, layer: int, color: str | None) -> None:
    x, share, marker = run.val_tokens, run.share[:, layer], _marker(run)
    ax.axhline(1.0 / share.shape[1], color="#444444", lw=1.0, ls="--", zorder=3)
    if color is not None:
        ax.fill_between(x, share.min(1), share.max(1), color=color, alpha=0.2, lw=0)
        ax.plot(x, share.max(1), color, lw=1.3, label=run.name, **marker)
        ax.plot(x, share.min(1), color, lw=1.3, **marker)
        return
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, share.shape[1]))
    for expert, shade in enumerate(shades):
        ax.plot(x, share[:, expert], color=shade, lw=1.1, label=f"{expert}", **marker)


def plot_runs(folders: list[Path], out: Path, again: bool = True) -> list[Path]:
    """Draws the runs in `folders` over each other into `out`, and returns the files.

    Runs without experts have a validation loss only.

    again   also those pictures that are there already.
    Raises  ValueError where there is nothing to draw.
    """
    runs = [Recorded(folder) for folder in folders]
    pictures = [validation_loss]
    if any(run.share.size for run in runs):
        pictures += [load_loss, tokens_per_expert]
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{picture.__name__}.png" for picture in pictures]
    with matplotlib.rc_context(STYLE):
        for picture, file in zip(pictures, files, strict=True):
            if again or not file.exists():
                unfinished = file.with_suffix(".new")
                picture(runs).savefig(unfinished, dpi=150, format="png")
                unfinished.replace(file)
    return files


def plot_run(folder: Path, again: bool = True) -> list[Path]:
    """Draws the run in `folder` into its `plots/`."""
    return plot_runs([folder], folder / "plots", again)


# --- a schedule -----------------------------------------------------------------------------------


def _colour(schedule: Schedule, way: str, chunk: int) -> tuple[float, ...]:
    """Forward is blue and backward orange; later chunks are darker."""
    shade = 0.3 + 0.35 * chunk / max(schedule.virtual - 1, 1)
    return matplotlib.colormaps[{"fwd": "Blues", "bwd": "Oranges"}[way]](shade)


def _draw_tasks(axes: Axes, schedule: Schedule, ranks: list[int]) -> None:
    """A box per task with its microbatch in it: forward in the upper half of a rank's row."""
    height = 0.45
    for row, rank in enumerate(ranks):
        for tick in range(schedule.ticks):
            for way, chunk, microbatch in schedule.tasks_at(tick, rank):
                y = row - height if way == "fwd" else row
                face = _colour(schedule, way, chunk)
                axes.add_patch(Rectangle((tick, y), 1, height, facecolor=face, edgecolor="white"))
                axes.text(tick + 0.5, y + height / 2, microbatch, ha="center", va="center", size=8)
    axes.set(xlim=(0, schedule.ticks), ylim=(len(ranks) - 0.4, -0.6), xlabel="tick")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])


def draw_schedule(schedule: Schedule, ranks: list[int], path: Path) -> None:
    """A timeline as a picture, with a legend of the colours.

    Raises  ValueError for a file that is not named as a picture of this kind.
    """
    if path.suffix != ".png":
        raise ValueError(
            f"--png {path} does not end in .png. Use --png {path.with_suffix('.png')}."
        )
    inches = min(2 + 0.35 * schedule.ticks, 60)
    figure = Figure(figsize=(inches, 1.6 + 0.7 * len(ranks)), layout="constrained")
    _draw_tasks(figure.subplots(), schedule, ranks)
    title = f"{schedule.microbatches} microbatches through {schedule.stages} stages: "
    figure.suptitle(f"{title}{schedule.ticks} ticks, bubble {schedule.bubble}", size=10)
    patches = [
        Patch(color=_colour(schedule, way, chunk), label=f"{name}, chunk {chunk}")
        for way, name in (("fwd", "forward"), ("bwd", "backward"))
        for chunk in range(schedule.virtual)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draws runs from their metrics.jsonl."""

    run: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FOLDER...")]  # one is drawn alone
    out: Path | None = None  # folder for the PNGs; RUN/plots, or A+B/plots beside the runs


def main() -> None:
    arguments = tyro.cli(Arguments)
    if not arguments.run:
        raise ValueError("--run names no folder. Give one or more, as --run runs/tiny.")
    if not arguments.out and any(buckets.is_bucket(run) for run in arguments.run):
        raise ValueError("--run is in a bucket. Say where the pictures go, as --out plots.")
    runs = [run_folder.at(run) for run in arguments.run]
    for run in runs:
        if not (run.files / "metrics.jsonl").exists():
            raise ValueError(f"{run} has no metrics.jsonl. Give the folder of a run, as runs/tiny.")
    folders = [run.files for run in runs]
    together = folders[0].parent / "+".join(folder.resolve().name for folder in folders)
    for file in plot_runs(folders, arguments.out or together / "plots"):
        print(file)


if __name__ == "__main__":
    faults.command_line(main)
