"""Format a plan as tables, as JSON and as a picture."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

import hardware
from attention_kernels.choice import describe_kernel
from planning.results import (
    FLOPS_KINDS,
    MEASURED_OVER_PLAN,
    Compiled,
    MeshShape,
    Plan,
    Prediction,
    SearchResult,
    Traffic,
    gib,
    usable_bytes,
)
from utils import GIB

if TYPE_CHECKING:  # imported late below, so that a plan without pictures starts fast
    from matplotlib.axes import Axes

FLOPS_RULE = (
    "FLOPs are 2 per multiply-add of matrix products. They include every capacity slot, the padded "
    "vocabulary, and all of attention's scores, or the blocks that a kernel computes. Backward is "
    "twice forward plus what attention kernels recompute. Recomputed is what train.remat does not "
    "save. Bubble is what a pipeline rank runs without a task."
)
TIME_RULE = (
    "Times are FLOPs at the chip's peak, and bytes at the full bandwidth of memory and links. At "
    "best, all of them overlap. Without overlap, communication and computation alternate. Memory "
    "traffic is what {kernels}, as if no cache kept anything between kernels."
)


# --- text -----------------------------------------------------------------------------------------


def print_predicted(plan: Plan, console: Console) -> None:
    for part in (header, memory_table, flops_table, traffic_table):
        console.print(part(plan))
    if plan.chip:
        kernels = "kernels would read and write after fusion"
        console.print(time_table(plan, plan.predicted, "Time of a step", kernels))
    else:
        console.print("No times: no figures of this chip are known.\n")
    if plan.search:
        console.print(search_table(plan.search))
        if plan.search.rejected:
            console.print(rejected_lines(plan.search), soft_wrap=True)
        console.print(f"flags: {plan.command_line}", markup=False, soft_wrap=True)


def print_compiled(plan: Plan, console: Console) -> None:
    console.print(compiled_table(plan))
    console.print(collectives_table(plan.compiled))
    if size := plan.compiled.memory_traffic_bytes:
        seconds = plan.predicted.seconds | {"memory": size / plan.chip.memory_bandwidth}
        as_compiled = dataclasses.replace(plan.predicted, seconds=seconds)
        title = "Time of a step, with the memory traffic of the compiled kernels"
        console.print(time_table(plan, as_compiled, title, "the compiled kernels read and write"))


Rows = Iterable[Sequence[str]]


def table(
    title: str, columns: Sequence[str], *sections: Rows, note: str = "", text: Sequence[str] = ()
) -> Group:
    """Return a table with a line between its sections, and a paragraph below it.

    text   columns of text besides the first; the others are numbers.
    """
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        made.add_column(column, justify="left" if column in (columns[0], *text) else "right")
    for rows in sections:
        for row in rows:
            made.add_row(*row)
        made.add_section()
    return Group(made, f"  {note}\n") if note else Group(made)


def header(plan: Plan) -> str:
    p, c = plan.predicted, plan.config
    kernel = describe_kernel(c, hardware.platform_of(plan.chip))
    lines = [
        f"{plan.name}: {p.parameters:,} parameters, {p.active_parameters:,} active per token",
        f"{p.chips} x {plan.chip_name}, mesh {c.mesh}, virtual {c.mesh.virtual}, "
        f"{c.train.microbatches} microbatches, remat {c.train.remat}, gather {c.fsdp.gather}, "
        f"attention {kernel}",
        f"{p.tokens_per_step:,} tokens per step; pipeline bubble {p.bubble:.1%}",
    ]
    if plan.chip and plan.chip.is_tpu and p.chips not in hardware.TOPOLOGIES[plan.chip.dims]:
        lines.append(
            f"No usual slice of {plan.chip.name} has {p.chips} chips: see hardware.TOPOLOGIES."
        )
    return "\n".join(lines)


def memory_table(plan: Plan) -> Group:
    p = plan.predicted
    total = p.memory_bytes_per_chip
    parts = sorted(p.memory.items(), key=lambda item: -item[1])
    rows = [(part, f"{size / GIB:.3f}", f"{size / total:.1%}") for part, size in parts]
    sums = [("sum", f"{total / GIB:.3f}", "")]
    return table("Memory per chip", ("part", "GiB", "share"), rows, sums, note=memory_verdict(plan))


def memory_verdict(plan: Plan) -> str:
    if not plan.chip:
        return ""
    usable, need = usable_bytes(plan.chip), plan.predicted.memory_bytes_per_chip
    limit = f"{gib(usable)} usable of {gib(plan.chip.memory_bytes)}"
    if plan.predicted.fits:
        return f"fits: {need / usable:.0%} of {limit}"
    return f"does not fit: {gib(need - usable)} more than {limit}. --search finds what fits"


def flops_table(plan: Plan) -> Group:
    p = plan.predicted
    counts = {part: [*found.values()] for part, found in p.flops.items()}
    parts = sorted((part for part in counts if any(counts[part])), key=lambda k: -sum(counts[k]))
    counts["sum"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    per_token = p.chips / p.tokens_per_step / 1e6
    rows = [
        (part, *(f"{n * per_token:,.1f}" for n in (*counts[part], sum(counts[part]))))
        for part in (*parts, "sum")
    ]
    ratio = p.flops_per_chip / p.model_flops_per_chip
    note = f"{ratio:.3f} times the model's FLOPs, which exclude the optimizer. {FLOPS_RULE}"
    return table("MFLOPs per token", ("part", *FLOPS_KINDS, "sum"), rows[:-1], rows[-1:], note=note)


def traffic_table(plan: Plan) -> Group:
    def row(name: tuple[str, str, str], sends: list[Traffic]) -> tuple[str, ...]:
        sizes = sum(t.result_bytes for t in sends), sum(t.sent_bytes for t in sends)
        return *name, *(f"{size / 1e6:,.1f}" for size in sizes)

    sends = sorted(plan.predicted.traffic, key=lambda t: ("+".join(t.axes), -t.result_bytes))
    least = 0.001 * sum(t.result_bytes for t in sends)
    rows = [row(("+".join(t.axes), t.cause, t.kind), [t]) for t in sends if t.result_bytes >= least]
    columns = ("mesh axes", "cause", "kind", "MB of results", "MB sent")
    sums = [row(("sum of all", "", ""), sends)]
    return table("Collectives per chip and step", columns, rows, sums, text=columns[:3])


def time_table(plan: Plan, p: Prediction, title: str, kernels: str) -> Group:
    busy = sorted(p.seconds.items(), key=lambda item: -item[1])
    rows = [(resource(name), f"{1e3 * seconds:,.3g}") for name, seconds in busy]
    steps = []
    for label, seconds in (("at best", p.step_s), ("without overlap", p.serial_step_s)):
        rate = p.tokens_per_s(seconds)
        line = f"{label}: {rate:,.0f} tokens/s, MFU {p.mfu(seconds):.1%}, "
        line += f"{duration(plan.tokens / rate)} to {plan.tokens:.3g} tokens"
        steps.append((line, f"{1e3 * seconds:,.3g}"))
    if p.chip.name in MEASURED_OVER_PLAN:
        low, high = (p.step_s * factor for factor in MEASURED_OVER_PLAN[p.chip.name])
        label = f"as steps of four models took: MFU {p.mfu(high):.1%} to {p.mfu(low):.1%}"
        steps.append((label, f"{1e3 * low:,.3g} to {1e3 * high:,.3g}"))
    rule = TIME_RULE.format(kernels=kernels)
    note = f"Bound by {resource(p.bound_by)}. {rule} {hardware.MFU_RULE}"
    return table(title, ("resource", "ms"), rows, steps, note=note)


def resource(name: str) -> str:
    return name if name in ("compute", "memory") else f"the links along {name}"


def duration(seconds: float) -> str:
    """Format in days, or in hours below two days."""
    return f"{seconds / 86400:.1f} days" if seconds > 172800 else f"{seconds / 3600:.1f} hours"


def compiled_table(plan: Plan) -> Group:
    p, c = plan.predicted, plan.compiled
    by_axes, ours = c.collective_bytes_per_chip, p.collective_bytes_per_chip
    found = [
        ("memory, GiB", GIB, p.memory_bytes_per_chip, c.memory_bytes_per_chip),
        ("TFLOPs", 1e12, p.flops_per_chip, c.flops_per_chip),
        *(
            (f"collectives along {axes}, GB", 1e9, ours.get(axes, 0.0), size)
            for axes, size in sorted(by_axes.items(), key=lambda item: -item[1])
        ),
        ("collectives, GB", 1e9, sum(ours.values()), sum(by_axes.values())),
    ]
    if c.memory_traffic_bytes:
        through = sum(p.memory_traffic.values()), c.memory_traffic_bytes
        found.append(("memory traffic, GB", 1e9, *through))
    rows = [
        (name, f"{a / unit:,.3f}", f"{b / unit:,.3f}", f"{a / b:.3f}" if b else "")
        for name, unit, a, b in found
    ]
    calls = ", ".join(f"{name} {n:,.0f}" for name, n in c.custom_calls.items()) or "none"
    note = (
        f"Compiled FLOPs are {c.flops_per_chip / c.model_flops_per_chip:.3f} times the model's. "
        f"Compiled in {c.compile_s:.0f} s; the program itself is {gib(c.program_bytes)}. Kernels "
        f"whose FLOPs are not counted: {calls}."
    )
    if plan.chip and not plan.chip.is_tpu:
        note += (
            " Not included: on a real GPU, XLA also autotunes kernels, and cuDNN may allocate "
            "memory of its own."
        )
    if not plan.chip and plan.config.model.compute_dtype == "bfloat16":
        note += " A CPU's compiler stores and sends bfloat16 as float32, twice as large."
    columns = ("per chip", "predicted", "compiled", "ratio")
    return table(f"As compiled by {c.compiler}", columns, rows, note=note)


def collectives_table(compiled: Compiled) -> Group:
    """Bytes of the compiled collectives, by whether they overlap with computation."""
    columns = ("mesh axes", "kind", "asynchronous", "overlapped", "GB")
    rows = []
    for row in compiled.collectives:
        how = ("yes" if row[column] else "no" for column in columns[2:4])
        rows.append((row["axes"], row["kind"], *how, f"{row['bytes'] / 1e9:,.3f}"))
    return table("Compiled collectives", columns, rows, text=columns[1:4])


def search_table(found: SearchResult) -> Group:
    title = f"Meshes that fit: {len(found.best)}, best of {found.tried} candidates"
    columns = ("mesh", "virtual", "microbatches", "gather", "experts", "GiB")
    rows = []
    for candidate in found.best:
        c, p = candidate.config, candidate.predicted
        experts = c.model.experts_layout if c.model.moe_layers else ""
        settings = c.mesh.virtual, c.train.microbatches, c.fsdp.gather, experts
        sizes = f"{candidate.memory / GIB:.2f}"
        times = (f"{1e3 * s:,.0f}" if s else "" for s in (p.step_s, p.serial_step_s))
        remat = c.train.remat.replace(",", ", ")
        rows.append((mesh_name(c.mesh.shape[1:]), *map(str, settings), sizes, *times, remat))
    return table(title, (*columns, "ms at best", "no overlap", "remat"), rows, text=["remat"])


def mesh_name(mesh: MeshShape) -> str:
    return " x ".join(map(str, mesh))


def rejected_lines(found: SearchResult) -> str:
    """One rejected mesh of each kind of reason, with how many others there are."""
    kinds = defaultdict(list)
    for mesh, reason in found.rejected.items():
        kinds[re.sub(r"[\d.]+", "", reason.partition(":")[0])].append(mesh)
    lines = []
    for mesh, *others in kinds.values():
        more = f" (and {len(others)} like it)" if others else ""
        lines.append(f"out: {mesh_name(mesh)}{more}: {found.rejected[mesh]}")
    return "\n".join(lines)


# --- JSON -----------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan. `predicted` and `compiled` use the same names for the same figures."""
    p, c = plan.predicted, plan.compiled
    found: dict[str, Any] = {
        "chip": plan.chip_name,
        "chips": p.chips,
        "flags": plan.flags,
        "tokens": plan.tokens,
        "fits": p.fits if plan.chip else None,
        "predicted": predicted_json(p),
    }
    if c:
        found |= {"compiled": dataclasses.asdict(c), "compile_s": c.compile_s, "ratios": p.over(c)}
    if plan.search:
        names = ("memory_bytes_per_chip", "step_s", "serial_step_s", "bound_by")
        found["search"] = [
            {"flags": one.flags} | {name: getattr(one.predicted, name) for name in names}
            for one in plan.search.best
        ]
        rejected = plan.search.rejected.items()
        found["out"] = {"x".join(map(str, mesh)): reason for mesh, reason in rejected}
    return found


def predicted_json(p: Prediction) -> dict[str, Any]:
    """Rates are at best and, with the prefix serial_, without overlap."""
    found = {name: value for name, value in vars(p).items() if name not in ("chip", "traffic")}
    found["traffic"] = [
        vars(t) | {"axes": "+".join(t.axes), "sent_bytes": t.sent_bytes} for t in p.traffic
    ]
    found |= {name: getattr(p, name) for name in ("bound_by", "step_s", "serial_step_s")}
    for prefix in ("", "serial_") if p.seconds else ():
        step_s = found[f"{prefix}step_s"]
        found[f"{prefix}tokens_per_s"] = p.tokens_per_s(step_s)
        found[f"{prefix}mfu"] = p.mfu(step_s)
    return found


# --- picture --------------------------------------------------------------------------------------


def draw(plan: Plan, path: Path) -> None:
    """Draw memory by part and time by resource, one bar for each of the 12 best meshes."""
    from matplotlib.figure import Figure  # imported late, so that printing starts fast

    shown = plan.search.best[:12] if plan.search else [plan]
    names = [mesh_name(c.config.mesh.shape[1:]) for c in shown]
    figure = Figure(figsize=(max(7.0, 2.5 + 0.9 * len(shown)), 7.5), layout="constrained")
    memory, times = figure.subplots(2, 1)
    draw_bars(memory, names, [{k: v / GIB for k, v in c.predicted.memory.items()} for c in shown])
    memory.set_ylabel("GiB per chip")
    if plan.chip:
        limit = usable_bytes(plan.chip) / GIB
        if limit < 3 * memory.get_ylim()[1]:
            memory.axhline(limit, color="black", linestyle="--", linewidth=1)
            memory.text(0, limit, f" usable of a {plan.chip.name}", va="bottom", size=8)
    draw_bars(times, names, [milliseconds(c.predicted) for c in shown])
    times.set_ylabel("ms per step, without overlap")
    times.set_xlabel("mesh: fsdp x pipeline x tensor")
    title = f"{Path(plan.name).stem} on {plan.predicted.chips} x {plan.chip_name}"
    figure.suptitle(title, size=11)
    figure.savefig(path, dpi=150)


def milliseconds(p: Prediction) -> dict[str, float]:
    """Return the time by resource. Compute and memory overlap, so the longer of the two counts."""
    if p.seconds is None:
        return {}
    names = {"compute": "compute", "memory": "memory, beyond compute"}
    found = p.seconds | {"memory": max(0.0, p.seconds["memory"] - p.seconds["compute"])}
    return {names.get(k, f"links along {k}"): 1e3 * seconds for k, seconds in found.items()}


def draw_bars(axes: "Axes", names: list[str], bars: list[dict[str, float]]) -> None:
    """Draw stacked bars, with a legend of the parts that are large enough to see."""
    import numpy as np

    from plot import COLORS

    keys = list(dict.fromkeys(k for bar in bars for k in bar))
    most = max(sum(bar.values()) for bar in bars)
    bottom = np.zeros(len(bars))
    for i, key in enumerate(keys):
        heights = np.array([bar.get(key, 0.0) for bar in bars])
        label = key if heights.max() > 0.005 * most else None
        face = COLORS[i % len(COLORS)]
        hatch = "//" if i >= len(COLORS) else None
        axes.bar(range(len(bars)), heights, 0.7, bottom, color=face, label=label, hatch=hatch)
        bottom += heights
    axes.set_xticks(range(len(names)), names, rotation=0 if len(names) < 8 else 30)
    axes.spines[["top", "right"]].set_visible(False)
    if keys:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
