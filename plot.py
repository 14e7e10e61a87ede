"""Plot the records of runs: losses, tokens per expert and wall time.

python plot.py --run runs/tiny             -> runs/tiny/plots/*.png
python plot.py --run runs/a runs/b         -> runs/a+b/plots/*.png, with both runs in each plot
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from runtime import buckets, cli, errors, goodput, jsonl, run_directory
from runtime.files import write_atomically
from utils import ConfigError

# Okabe and Ito's set, which colour-blind readers can distinguish.
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


class RunRecords:
    """The records of one run, as arrays over steps and over evaluations.

    Raises  ConfigError without a step or an evaluation.
    """

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        records = jsonl.read(path)
        train = [record for record in records if "loss/train" in record]
        val = [record for record in records if "loss/val" in record]
        if not train or not val:
            raise ConfigError(
                f"{path} has {len(train)} steps and {len(val)} evaluations; plots need both. "
                "Continue the run to its first evaluation (--eval.every_steps)."
            )
        self.name = folder.resolve().name
        self.tokens_per_step = train[-1]["tokens"] / train[-1]["step"]
        self.steps = _column(train, "step")
        self.tokens = self.steps * self.tokens_per_step
        self.val_tokens = _column(val, "step") * self.tokens_per_step
        self.train = _column(train, "loss/cross_entropy")  # the counterpart of validation loss
        self.val = _column(val, "loss/val")
        # Relative to the loss of a perfectly even load; None if that is 0.
        m = cli.load(folder / "config.toml").model
        factor = m.blocks * m.moe_layers * m.aux_loss_alpha
        self.balance = _column(train, "loss/balance") / factor if factor > 0 else None
        self.val_balance = _column(val, "loss/val_balance")
        # [evaluations, MoE layers, experts], of a layer's routed tokens
        tokens = np.array([record["moe/tokens_per_expert"] for record in val], float)
        tokens = tokens.reshape(len(val), -1, tokens.shape[-1] if tokens.size else 1)
        self.share = tokens / np.maximum(tokens.sum(-1, keepdims=True), 1.0)


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return one key of all records; NaN, a gap in the plot, for null."""
    return np.array([np.nan if r[name] is None else r[name] for r in records], float)


def _axes_of_time(axes: list[Axes], runs: list[RunRecords]) -> None:
    """Label the x axes: tokens below; steps above if the runs have equal batches."""
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


def _marker(run: RunRecords) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.5} if len(run.val) <= 40 else {}


def validation_loss(runs: list[RunRecords]) -> Figure:
    """Plot cross-entropy on held-out text over tokens; training loss is faint."""
    lines = [(r.train, r.val, f"{r.name}: {r.val[-1]:.3f} at the end") for r in runs]
    return _losses(runs, lines, "Validation loss", "cross-entropy (nats per token)")


def load_loss(runs: list[RunRecords]) -> Figure:
    """Plot the balance loss, mean over MoE layers, without its factor; 1 is an even load."""
    lines = [(r.balance, r.val_balance, r.name) for r in runs]
    return _losses(runs, lines, "Load loss, at evaluations", "balance loss (1 = even)", even=1.0)


def _losses(
    runs: list[RunRecords], lines: list[tuple], title: str, ylabel: str, even: float | None = None
) -> Figure:
    """Plot (training loss or None, loss at evaluations, label) of each run, and `even` dashed."""
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


def tokens_per_expert(runs: list[RunRecords]) -> Figure:
    """Plot each expert's share of routed tokens, one panel per MoE layer.

    Several runs are plotted as the band between the least and the most loaded expert.
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
    axes[0].set_ylim(bottom=0.0)  # shared by all panels
    _axes_of_time(axes[:layers], runs)
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) <= 16:
        title = "expert" if len(runs) == 1 else "least and most\nloaded expert"
        figure.legend(handles, labels, title=title, loc="outside right upper", fontsize=8.0)
    figure.suptitle("Tokens per expert, at evaluations (dashed: even)")
    return figure


def _draw_layer(ax: Axes, run: RunRecords, layer: int, color: str | None) -> None:
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


def wall_time(starts: list[tuple[str, list[dict[str, Any]]]]) -> Figure:
    """Plot the time of each kind (runtime/goodput.py), a bar per run.

    starts  (name, lines of goodput.jsonl) of each run
    """
    figure = Figure(figsize=(7.0, 1.6 + 0.3 * len(starts)), layout="constrained")
    ax = figure.subplots()
    spent = [goodput.seconds(lines) for _, lines in starts]
    kinds = list(dict.fromkeys(kind for each in spent for kind in each))
    longest_s = max(sum(each.values()) for each in spent)
    unit, size = ("hours", 3600) if longest_s >= 3600 else ("seconds", 1)
    colors = matplotlib.colormaps["tab20"](np.linspace(0.0, 1.0, 20))
    left = np.zeros(len(starts))
    for i, kind in enumerate(kinds):
        width = np.array([each.get(kind, 0.0) for each in spent]) / size
        if width.max() * size > 1e-3 * longest_s:
            ax.barh(range(len(starts)), width, left=left, color=colors[i % 20], label=kind)
        left += width
    ax.set_yticks(range(len(starts)), [name for name, _ in starts])
    ax.invert_yaxis()
    ax.set(xlabel=unit, title="Wall time")
    figure.legend(loc="outside right upper", fontsize=8.0)
    return figure


def plot_runs(folders: list[Path], out: Path, overwrite: bool = True) -> list[Path]:
    """Write plots of all these runs together into `out`, and return their files.

    Expert load is not plotted for dense models, nor wall time without goodput.jsonl.

    overwrite  also plots that exist
    Raises     ConfigError for a run without a step or an evaluation
    """
    runs = [RunRecords(folder) for folder in folders]
    pictures = [(validation_loss, runs)]
    if any(run.share.size for run in runs):
        pictures += [(load_loss, runs), (tokens_per_expert, runs)]
    starts = [(run.name, goodput.read(f)) for run, f in zip(runs, folders, strict=True)]
    if starts := [(name, lines) for name, lines in starts if lines]:
        pictures.append((wall_time, starts))
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{picture.__name__}.png" for picture, _ in pictures]
    with matplotlib.rc_context(STYLE):
        for (picture, of), file in zip(pictures, files, strict=True):
            if overwrite or not file.exists():
                picture(of).savefig(image := io.BytesIO(), dpi=150, format="png")
                write_atomically(file, image.getvalue())
    return files


def plot_run(folder: Path, overwrite: bool = True) -> list[Path]:
    """Plot one run into its `plots/`."""
    return plot_runs([folder], folder / "plots", overwrite)


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Plot runs from their metrics.jsonl."""

    run: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FOLDER...")
    ]  # one run, or several in the same plots
    out: Path | None = None  # folder for the PNGs; RUN/plots, or A+B/plots beside the runs


def main() -> None:
    arguments = tyro.cli(Arguments)
    if not arguments.run:
        raise ConfigError("--run names no folder. Give one or more, as --run runs/tiny.")
    if not arguments.out and any(buckets.is_bucket(run) for run in arguments.run):
        raise ConfigError("--run is in a bucket. Give a folder for the plots, as --out plots.")
    folders = []
    for run in map(run_directory.at, arguments.run):
        if not (run.files / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{run} has no metrics.jsonl. Give the folder of a run, as runs/tiny."
            )
        folders.append(run.files)
    together = folders[0].parent / "+".join(folder.resolve().name for folder in folders)
    for file in plot_runs(folders, arguments.out or together / "plots"):
        print(file)


if __name__ == "__main__":
    errors.run_command(main)
