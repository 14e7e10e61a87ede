"""Plot the records of runs: losses and tokens per expert.

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
from matplotlib.ticker import EngFormatter, PercentFormatter

from runtime import cli, errors, jsonl, resume, run_directory, storage
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


def _figure(rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels over tokens, with common scales."""
    size = (7.0, 4.4) if rows == columns == 1 else (1.0 + 3.4 * columns, 0.6 + 2.7 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes


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
    return figure


def tokens_per_expert(run: RunRecords) -> Figure:
    """Plot the share of routed tokens of each expert, one panel per MoE layer."""
    _, layers, experts = run.share.shape
    columns = min(layers, 4)
    figure, axes = _figure(-(-layers // columns), columns)
    colors = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, experts))
    for layer, ax in enumerate(axes[:layers]):
        ax.set_title(f"MoE layer {layer}")
        ax.axhline(1.0 / experts, color="#444444", lw=1.0, ls="--", zorder=3)
        for e, color in enumerate(colors):
            share = run.share[:, layer, e]
            ax.plot(run.val_tokens, share, color=color, lw=1.1, label=f"{e}", **_marker(run))
    for ax in axes[layers:]:
        ax.set_visible(False)
    for ax in axes[layers - columns : layers]:  # the lowest one of each column
        ax.tick_params(labelbottom=True)
    figure.supxlabel("tokens", fontsize="medium")
    figure.supylabel("share of tokens", fontsize="medium")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylim(bottom=0.0)
    if experts <= 16:
        lines = axes[0].get_legend_handles_labels()
        figure.legend(*lines, title="expert", loc="outside right upper", fontsize=8.0)
    figure.suptitle("Tokens per expert, at evaluations (dashed: even)")
    return figure


def plot_runs(folders: list[Path], out: Path | None = None) -> list[Path]:
    """Write plots of all these runs together, and return their files.

    The balance of experts is not plotted for dense models, nor tokens per expert for several runs.

    out     RUN/plots by default, or A+B/plots beside the runs
    Raises  ConfigError for a run without a step or an evaluation
    """
    runs = [RunRecords(folder) for folder in folders]
    together = folders[0].parent / "+".join(run.name for run in runs)
    out = out or (together if len(runs) > 1 else folders[0]) / "plots"
    out.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(STYLE):
        pictures = {"validation_loss": validation_loss(runs)}
        if any(run.share.size for run in runs):
            pictures["load_loss"] = load_loss(runs)
            if len(runs) == 1:
                pictures["tokens_per_expert"] = tokens_per_expert(runs[0])
        for name, picture in pictures.items():
            picture.savefig(image := io.BytesIO(), dpi=150, format="png")
            files.append(out / f"{name}.png")
            storage.write_atomically(files[-1], image.getvalue())
    return files


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Plot runs from their metrics.jsonl."""

    run: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FOLDER...")
    ]  # one run, or several in the same plots
    out: Path | None = None  # folder for the PNGs; RUN/plots, or A+B/plots beside the runs


def main() -> None:
    arguments = cli.parse_flags(Arguments)
    if not arguments.run:
        raise ConfigError("--run names no folder. Give one or more, as --run runs/tiny.")
    if not arguments.out and any(storage.is_remote(run) for run in arguments.run):
        raise ConfigError("--run is in a bucket. Give a folder for the plots, as --out plots.")
    runs = map(run_directory.at, arguments.run)
    folders = [resume.config_file(run, "--run").parent for run in runs]
    for file in plot_runs(folders, arguments.out):
        print(file)


if __name__ == "__main__":
    errors.run_command(main)
