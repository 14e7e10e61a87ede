"""Plot the records of runs: losses, norms, speed, tokens per expert. Write reports of them.

python plot.py --run runs/tiny         -> runs/tiny/plots/*.png and runs/tiny/report.html
python plot.py --run runs/a runs/b     -> the same in runs/a+b, with both runs in each plot
python plot.py --runs runs             print a table of all runs below a folder
"""

import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

import report
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
    "legend.fontsize": 8.0,
}


class RunRecords:
    """The records of one run, as arrays over steps and over evaluations, which may be empty.

    Raises  ConfigError without a step.
    """

    def __init__(self, folder: Path):
        train, val = report.records_of(folder)
        if not train:
            raise ConfigError(
                f"{folder}/metrics.jsonl has no steps. Start the run again, or plot another one."
            )
        self.name = folder.resolve().name
        self.tokens_per_step = train[-1]["tokens"] / train[-1]["step"]
        self.steps = _column(train, "step")
        self.tokens = self.steps * self.tokens_per_step
        self.val_tokens = _column(val, "step") * self.tokens_per_step
        self.train = _column(train, "loss/cross_entropy")  # the counterpart of validation loss
        self.gradient_norm, self.lr = _column(train, "grad_norm"), _column(train, "lr")
        # The first step of a start is slower, as its buffers and kernels are new.
        first = [start["step"] + 1 for start in jsonl.read(folder / "starts.jsonl")]
        self.tokens_per_s = _column(train, "tokens_per_s")
        self.tokens_per_s[np.isin(self.steps, first)] = np.nan
        self.val = _column(val, "loss/val")
        # Relative to the loss of a perfectly even load; None if that is 0.
        m = cli.load(folder / "config.toml").model
        factor = m.blocks * m.moe_layers * m.aux_loss_alpha
        self.balance = _column(train, "loss/balance") / factor if factor > 0 else None
        self.val_balance = _column(val, "loss/val_balance")
        # [evaluations, MoE layers, experts], of a layer's routed tokens
        tokens = np.array([record["moe/tokens_per_expert"] for record in val], float)
        experts = tokens.shape[-1] if tokens.size else 1
        tokens = tokens.reshape(len(val), tokens.size // experts // max(1, len(val)), experts)
        self.share = tokens / np.maximum(tokens.sum(-1, keepdims=True), 1.0)


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return one key of all records; NaN, a gap in the plot, for null and for missing ones."""
    return np.array([np.nan if r.get(name) is None else r[name] for r in records], float)


def _figure(rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels over tokens, with common scales."""
    size = (5.2, 3.6) if rows == columns == 1 else (1.0 + 3.4 * columns, 0.6 + 2.7 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def _marker(run: RunRecords) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.5} if len(run.val) <= 40 else {}


def _add_legend(figure: Figure, ax: Axes) -> None:
    """Add a legend in the axes or, if it is long, below them."""
    handles, labels = ax.get_legend_handles_labels()
    if (lines := "\n".join(labels).count("\n") + 1) <= 5:
        ax.legend().set_in_layout(False)
    else:
        figure.set_figheight(figure.get_figheight() + 0.16 * lines)
        figure.legend(handles, labels, loc="outside lower center")


def validation_loss(runs: list[RunRecords]) -> Figure:
    """Plot cross-entropy on held-out text over tokens; training loss is faint."""
    ends = [f": {r.val[-1]:.3f} at the end" if len(r.val) else "" for r in runs]
    lines = [(r.train, r.val, r.name + end) for r, end in zip(runs, ends, strict=True)]
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
    _add_legend(figure, ax)
    return figure


OF_STEPS = {  # attribute of RunRecords, title, label and scale of the axis
    "training_loss": ("train", "Training loss", "cross-entropy (nats per token)", "linear"),
    "gradient_norm": ("gradient_norm", "Gradient norm before clipping", "norm", "log"),
    "learning_rate": ("lr", "Learning rate", "learning rate", "linear"),
    "tokens_per_second": ("tokens_per_s", "Speed", "tokens per second", "linear"),
}


def of_steps(runs: list[RunRecords], name: str) -> Figure | None:
    """Plot a value of every step over tokens; None if no run has recorded it."""
    attribute, title, ylabel, scale = OF_STEPS[name]
    values = [getattr(run, attribute) for run in runs]
    if scale == "log":
        values = [np.where(each > 0, each, np.nan) for each in values]
    if all(np.isnan(each).all() for each in values):
        return None
    figure, [ax] = _figure()
    for run, each in zip(runs, values, strict=True):
        ax.plot(run.tokens, each, lw=1.0, alpha=0.8, label=run.name)
    ax.set(xlabel="tokens", ylabel=ylabel, title=title, yscale=scale)
    if name == "tokens_per_second":
        ax.set_ylim(bottom=0.0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    if len(runs) > 1:
        _add_legend(figure, ax)
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


def plot_runs(folders: list[Path], out: Path | None = None, urls: Sequence[str] = ()) -> list[Path]:
    """Write plots and a report of all these runs together, and return their files.

    Left out are evaluations of runs without one, the balance of experts of dense models, and
    tokens per expert of several runs.

    out     for all files; by default RUN/plots and RUN, or A+B/plots and A+B beside the runs
    urls    paths or URLs of the runs, where their files are copies
    Raises  ConfigError for a run without a step
    """
    runs = [RunRecords(folder) for folder in folders]
    names, urls = [run.name for run in runs], urls or [*map(str, folders)]
    together = "+".join(names) if len(names) < 5 else f"{names[0]}+{len(names) - 1}"
    target = folders[0].parent / together if len(runs) > 1 else folders[0]
    names = names if len(set(names)) == len(names) else urls
    configs = [cli.load(folder / "config.toml") for folder in folders]
    for run, label in zip(runs, report.labels(names, configs), strict=True):
        run.name = textwrap.fill(label, 48)
    many = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, len(runs)))
    colors = COLORS if len(runs) <= len(COLORS) else [*map(tuple, many)]
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": matplotlib.cycler(color=colors)}):
        figures: dict[str, Figure | None] = {}
        if any(len(run.val) for run in runs):
            figures["validation_loss"] = validation_loss(runs)
        if any(run.share.size for run in runs):
            figures["load_loss"] = load_loss(runs)
            if len(runs) == 1:
                figures["tokens_per_expert"] = tokens_per_expert(runs[0])
        needed = [name for name in OF_STEPS if name != "training_loss" or not figures]
        figures |= {name: of_steps(runs, name) for name in needed}
        pictures = {}
        for name, figure in figures.items():
            if figure:
                figure.savefig(image := io.BytesIO(), dpi=200, format="png")
                pictures[name] = image.getvalue()
    if len(runs) > 1:
        named = dict(zip(names, folders, strict=True))
        page = report.of_runs(named, f"{len(runs)} runs: {together}", pictures)
    else:
        page = report.of_run(folders[0], urls[0], pictures)
    contents = {(out or target / "plots") / f"{name}.png": png for name, png in pictures.items()}
    contents[(out or target) / "report.html"] = page
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.write_atomically(file, content)
    return [*contents]


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Plot runs from their metrics.jsonl, write a report of them, or list them."""

    run: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FOLDER...")
    ] = ()  # one run, or several in the same plots
    # folder for the plots and the report; default: RUN, or A+B beside the runs
    out: Path | None = None
    runs: str | None = None  # print a table of all runs below this folder instead
    json: bool = False  # print JSON instead of the table


def main() -> None:
    arguments = cli.parse_flags(Arguments)
    if bool(arguments.run) == bool(arguments.runs):
        raise ConfigError(
            "Give the folders of one or more runs, as --run runs/tiny, or a folder of runs, as "
            "--runs runs."
        )
    if arguments.runs:
        rows = report.facts_of(report.runs_below(arguments.runs))
        print(json.dumps(rows) if arguments.json else report.aligned(report.table(rows)))
        return
    if not arguments.out and any(storage.is_remote(run) for run in arguments.run):
        raise ConfigError("--run is in a bucket. Give a folder for the plots, as --out plots.")
    runs = map(run_directory.at, arguments.run)
    folders = [resume.config_file(run, "--run").parent for run in runs]
    for file in plot_runs(folders, arguments.out, arguments.run):
        print(file)


if __name__ == "__main__":
    errors.run_command(main)
