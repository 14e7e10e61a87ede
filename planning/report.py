"""A plan as tables, as JSON and as a picture."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

import chips
import flops
import utils
from chips import Chip
from planning import search
from planning.compiler import Compiled
from planning.cost import Prediction
from planning.search import Candidate, Found
from utils import GIB

if TYPE_CHECKING:  # imported late below, so that a plan without pictures starts fast
    from matplotlib.axes import Axes

FLOPS_RULE = (
    "FLOPs are 2 per multiplication and addition of matrix products: of attention its whole "
    "rectangle, or the blocks of it that splash computes; every capacity slot, the padded "
    "vocabulary. Backward is twice forward, and with splash what its kernels make anew; recomputed "
    "is what train.remat does not keep; bubble is what a pipeline rank runs without a task."
)
TIME_RULE = (
    "Time is FLOPs at the chip's peak, and bytes at the memory's and the links' full bandwidth. "
    "How often results go through memory is an estimate (see cost.memory_traffic). At best all are "
    "at work at once; without overlap the links wait for the chip and the chip for them."
)


@dataclass(frozen=True)
class Plan:
    """What is told."""

    name: str  # of the config
    config: utils.Config
    chip: Chip | None
    predicted: Prediction
    compiled: Compiled | None
    found: Found | None
    tokens: float  # of the whole run


# --- text -----------------------------------------------------------------------------------------


def print_compiled(plan: Plan, console: Console) -> None:
    console.print(compiled_table(plan))
    console.print(kinds_table(plan.compiled))


def print_predicted(plan: Plan, console: Console) -> None:
    for part in (header, memory_table, flops_table, traffic_table, time_table):
        console.print(part(plan))
    if plan.found:
        console.print(search_table(plan.found))
        console.print(out_lines(plan.found), markup=False)
        console.print(f"flags: {search.flags_of(plan.config)}", markup=False, soft_wrap=True)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def saving(one: tuple[str, int]) -> str:
    return f"{one[0]} ({gib(one[1])})"


def new_table(title: str, *columns: str) -> Table:
    """The first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def noted(table: Table, note: str) -> Group:
    """A table with a paragraph below it."""
    return Group(table, f"  {note}\n") if note else Group(table)


def header(plan: Plan) -> str:
    p, c = plan.predicted, plan.config
    where = plan.chip.name if plan.chip else "cpu"
    lines = [
        f"{plan.name}: {p.parameters:,} parameters, {p.active_parameters:,} active per token",
        f"{p.chips} x {where}, mesh (fsdp, pipeline, tensor) = {c.mesh.shape}, virtual "
        f"{c.mesh.virtual}, {c.train.microbatches} microbatches, remat {c.train.remat}, gather "
        f"{c.fsdp.gather}, attention {p.attention}",
        f"{p.tokens_per_step:,} tokens per step; pipeline bubble {p.bubble:.1%}",
    ]
    if plan.chip and plan.chip.is_tpu and p.chips not in chips.TOPOLOGIES[plan.chip.dims]:
        lines.append(
            f"No usual slice of {plan.chip.name} has {p.chips} chips: see chips.TOPOLOGIES."
        )
    return "\n".join(lines)


def memory_table(plan: Plan) -> Group:
    p = plan.predicted
    table = new_table("Memory per chip", "part", "GiB", "share")
    for part, size in sorted(p.memory.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{size / GIB:.3f}", f"{size / p.memory_bytes_per_chip:.1%}")
    table.add_section()
    table.add_row("sum", f"{p.memory_bytes_per_chip / GIB:.3f}", "")
    return noted(table, verdict(plan.config, plan.chip, p) if plan.chip else "")


def verdict(config: utils.Config, chip: Chip, p: Prediction) -> str:
    """Whether it fits."""
    usable, need = search.usable_bytes(chip), p.memory_bytes_per_chip
    of = f"{gib(usable)} usable of {gib(chip.memory_bytes)}"
    if need <= usable:
        return f"fits: {need / usable:.0%} of {of}"
    saves = ", ".join(saving(one) for one in search.savings(config, chip, False)[:3])
    return f"does not fit: {gib(need - usable)} more than {of}. What saves most: {saves or 'none'}"


def flops_table(plan: Plan) -> Group:
    p = plan.predicted
    ways = ("forward", "backward", "recomputed", "bubble")
    table = new_table("MFLOPs per token", "part", *ways, "sum")
    per_token = p.chips / p.tokens_per_step / 1e6
    for part, found in sorted(p.flops.items(), key=lambda item: -sum(item[1].values())):
        if any(found.values()):
            counts = [*(found[way] for way in ways), sum(found.values())]
            table.add_row(part, *(f"{n * per_token:,.1f}" for n in counts))
    table.add_section()
    sums = [sum(found[way] for found in p.flops.values()) for way in ways]
    table.add_row("sum", *(f"{n * per_token:,.1f}" for n in (*sums, sum(sums))))
    ratio = p.flops_per_chip / p.model_flops_per_chip
    return noted(table, f"{ratio:.3f} times the FLOPs of a program without waste. {FLOPS_RULE}")


def traffic_table(plan: Plan) -> Table:
    p = plan.predicted
    title = "Collectives per chip and step"
    table = new_table(title, "mesh axes", "cause", "kind", "MB of results", "MB sent")
    for column in (1, 2):
        table.columns[column].justify = "left"
    rows = sorted(p.traffic, key=lambda t: ("+".join(t.axes), -t.result_bytes))
    small = 0.001 * sum(t.result_bytes for t in rows)
    for sent in rows:
        if sent.result_bytes >= small:
            axes = "+".join(sent.axes)
            sizes = (f"{sent.result_bytes / 1e6:,.1f}", f"{sent.sent_bytes / 1e6:,.1f}")
            table.add_row(axes, sent.cause, sent.kind, *sizes)
    less = [t for t in rows if t.result_bytes < small]
    if less:
        sizes = (sum(t.result_bytes for t in less), sum(t.sent_bytes for t in less))
        table.add_row("", f"{len(less)} smaller ones", "", *(f"{s / 1e6:,.1f}" for s in sizes))
    table.add_section()
    sums = (sum(t.result_bytes for t in rows), sum(t.sent_bytes for t in rows))
    table.add_row("sum", "", "", *(f"{s / 1e6:,.1f}" for s in sums))
    return table


def time_table(plan: Plan) -> Group | str:
    p = plan.predicted
    if not plan.chip:
        return "No times: no figures of this chip are known.\n"
    table = new_table("Time of a step", "at work", "ms")
    for name, seconds in sorted(p.seconds.items(), key=lambda item: -item[1]):
        table.add_row(resource(name), f"{1e3 * seconds:,.3g}")
    table.add_section()
    for label, seconds in (("at best", p.step_s), ("without overlap", p.serial_step_s)):
        rate = p.tokens_per_s(seconds)
        table.add_row(
            f"{label}: {rate:,.0f} tokens/s, MFU {p.mfu(seconds):.1%}, "
            f"{duration(plan.tokens / rate)} to {plan.tokens:.3g} tokens",
            f"{1e3 * seconds:,.3g}",
        )
    return noted(table, f"Bound by {resource(p.bound_by)}. {TIME_RULE} {flops.MFU_RULE}")


def resource(name: str) -> str:
    return name if name in ("compute", "memory") else f"the links along {name}"


def duration(seconds: float) -> str:
    """In days, or hours where they are fewer than two."""
    return f"{seconds / 86400:.1f} days" if seconds > 172800 else f"{seconds / 3600:.1f} hours"


def compiled_table(plan: Plan) -> Group:
    p, c = plan.predicted, plan.compiled
    r = p.over(dataclasses.asdict(c))
    table = new_table(f"As compiled by {c.compiler}", "per chip", "predicted", "compiled", "ratio")

    def row(name: str, unit: float, predicted: float, compiled: float, ratio: float | None) -> None:
        cells = (f"{predicted / unit:,.3f}", f"{compiled / unit:,.3f}")
        table.add_row(name, *cells, "" if ratio is None else f"{ratio:.3f}")

    row("memory, GiB", GIB, p.memory_bytes_per_chip, c.memory_bytes_per_chip, r["memory"])
    row("TFLOPs", 1e12, p.flops_per_chip, c.flops_per_chip, r["FLOPs"])
    sums = [sum(x.collective_bytes_per_chip.values()) for x in (p, c)]
    for axes, size in sorted(c.collective_bytes_per_chip.items(), key=lambda item: -item[1]):
        predicted = p.collective_bytes_per_chip.get(axes, 0.0)
        row(f"collectives along {axes}, GB", 1e9, predicted, size, r.get(axes))
    row("collectives, GB", 1e9, *sums, sums[0] / sums[1] if sums[1] else None)
    calls = ", ".join(f"{name} {n:,.0f}" for name, n in c.custom_calls.items()) or "none"
    note = (
        f"Compiled FLOPs are {c.flops_per_chip / c.model_flops_per_chip:.3f} times the model's. "
        f"Compiled in {c.compile_s:.0f} s; the program itself is {gib(c.program_bytes)}. Kernels "
        f"that are not counted: {calls}."
    )
    if not plan.chip and plan.config.model.compute_dtype == "bfloat16":
        note += " A CPU's compiler holds and sends bfloat16 as float32, twice as large."
    return noted(table, note)


def kinds_table(compiled: Compiled) -> Table:
    """What the compiled program sends, and whether the chip computes meanwhile."""
    kinds = ("asynchronous", "overlapped")
    table = new_table("Compiled collectives, GB", "mesh axes", "kind", "all", *kinds)
    table.columns[1].justify = "left"
    sums: dict[tuple[str, str], list[float]] = {}
    for row in compiled.collectives:
        found = sums.setdefault((row["axes"], row["kind"]), [0.0, 0.0, 0.0])
        for i, counts in enumerate((True, *(row[kind] for kind in kinds))):
            found[i] += row["bytes"] if counts else 0.0
    for (axes, kind), found in sums.items():
        if found[0] >= 5e-4 * sum(compiled.collective_bytes_per_chip.values()):
            table.add_row(axes, kind, *(f"{size / 1e9:,.3f}" for size in found))
    return table


def search_table(found: Found) -> Table:
    title = f"Meshes that fit: {len(found.best)}, best of {found.tried} ways to use them"
    times = ("ms at best", "no overlap")
    table = new_table(title, "mesh", "virtual", "microbatches", "gather", "GiB", *times, "remat")
    table.columns[-1].justify = "left"
    for candidate in found.best:
        c, p = candidate.config, candidate.predicted
        times = [f"{1e3 * s:,.0f}" if s else "" for s in (p.step_s, p.serial_step_s)]
        table.add_row(
            " x ".join(map(str, c.mesh.shape)),
            str(c.mesh.virtual),
            str(c.train.microbatches),
            c.fsdp.gather,
            f"{p.memory_bytes_per_chip / GIB:.2f}",
            *times,
            c.train.remat.replace(",", ", "),
        )
    return table


def out_lines(found: Found) -> str:
    """Why the other meshes are out: one of each kind of reason, and how many there are."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for mesh, reason in found.out.items():
        kind = re.sub(r"\d+(\.\d+)?", "", reason.split(":")[0])
        kinds.setdefault(kind, []).append((" x ".join(map(str, mesh)), reason))
    lines = []
    for same in kinds.values():
        mesh, reason = same[0]
        more = f" (and {len(same) - 1} like it)" if len(same) > 1 else ""
        lines.append(f"out: {mesh}{more}: {reason}")
    return "\n".join(lines)


# --- JSON -----------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it; `predicted` and `compiled` share the names of what both count."""
    p, c = plan.predicted, plan.compiled
    found: dict[str, Any] = {
        "chip": plan.chip.name if plan.chip else "cpu",
        "chips": p.chips,
        "flags": {flag: search.value_of(plan.config, flag) for flag in search.FREE},
        "tokens": plan.tokens,
        "fits": plan.chip and p.memory_bytes_per_chip <= search.usable_bytes(plan.chip),
        "predicted": predicted_json(p),
    }
    if c:
        found |= {
            "compiled": dataclasses.asdict(c),
            "compile_s": c.compile_s,
            "ratios": p.over(dataclasses.asdict(c)),
        }
    if plan.found:
        found["search"] = [candidate_json(candidate) for candidate in plan.found.best]
        out = {"x".join(map(str, mesh)): reason for mesh, reason in plan.found.out.items()}
        found["out"] = out
    return found


def predicted_json(p: Prediction) -> dict[str, Any]:
    found = {
        field.name: getattr(p, field.name)
        for field in dataclasses.fields(p)
        if field.name not in ("chip", "traffic")
    }
    found["traffic"] = [
        dataclasses.asdict(t) | {"axes": "+".join(t.axes), "sent_bytes": t.sent_bytes}
        for t in p.traffic
    ]
    times = ("bound_by", "step_s", "serial_step_s")
    return found | {name: getattr(p, name) for name in times} | rates_json(p)


def rates_json(p: Prediction) -> dict[str, float]:
    """At best and, as serial_, without overlap."""
    found = {}
    for prefix, seconds in (("", p.step_s), ("serial_", p.serial_step_s)):
        if seconds is not None:
            found |= {
                f"{prefix}tokens_per_s": p.tokens_per_s(seconds),
                f"{prefix}mfu": p.mfu(seconds),
            }
    return found


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    c, p = candidate.config, candidate.predicted
    return {
        "flags": {flag: search.value_of(c, flag) for flag in search.FREE},
        "memory_bytes_per_chip": p.memory_bytes_per_chip,
        "step_s": p.step_s,
        "serial_step_s": p.serial_step_s,
        "bound_by": p.bound_by,
    }


# --- picture --------------------------------------------------------------------------------------

MOST_BARS = 12


def draw(plan: Plan, path: Path) -> None:
    """Memory by part and time by cause, one bar per mesh."""
    from matplotlib.figure import Figure  # imported late, so that printing starts fast

    here = [Candidate(plan.config, plan.predicted)]
    shown = plan.found.best[:MOST_BARS] if plan.found else here
    names = [" x ".join(map(str, c.config.mesh.shape)) for c in shown]
    figure = Figure(figsize=(max(7.0, 2.5 + 0.9 * len(shown)), 7.5), layout="constrained")
    memory, times = figure.subplots(2, 1)
    stack(memory, names, [{k: v / GIB for k, v in c.predicted.memory.items()} for c in shown])
    memory.set_ylabel("GiB per chip")
    if plan.chip:
        limit = search.usable_bytes(plan.chip) / GIB
        if limit < 3 * memory.get_ylim()[1]:
            memory.axhline(limit, color="black", linestyle="--", linewidth=1)
            memory.text(0, limit, f" usable of a {plan.chip.name}", va="bottom", size=8)
    if plan.compiled:
        memory.plot(0, plan.compiled.memory_bytes_per_chip / GIB, "k_", markersize=40)
        memory.text(0, plan.compiled.memory_bytes_per_chip / GIB, " compiled", va="bottom", size=8)
    stack(times, names, [milliseconds(c.predicted) for c in shown])
    times.set_ylabel("ms per step, one after the other")
    times.set_xlabel("mesh: fsdp x pipeline x tensor")
    if not plan.chip:
        times.text(0.5, 0.5, "no figures of this chip", transform=times.transAxes, ha="center")
    chip = plan.chip.name if plan.chip else "cpu"
    title = f"{Path(plan.name).stem} on {plan.predicted.chips} x {chip}"
    if plan.found and len(plan.found.best) > len(shown):
        title += f", best {len(shown)} of {len(plan.found.best)} meshes"
    figure.suptitle(title, size=11)
    figure.savefig(path, dpi=150)


def milliseconds(p: Prediction) -> dict[str, float]:
    """By cause; compute and memory are at work at once, so the longer of them counts."""
    if p.seconds is None:
        return {}
    found = {k: 1e3 * s for k, s in p.seconds.items() if k not in ("compute", "memory")}
    compute, memory = (1e3 * p.seconds[k] for k in ("compute", "memory"))
    return {"compute": compute, "memory, beyond compute": max(0.0, memory - compute)} | {
        f"links along {k}": v for k, v in found.items()
    }


def stack(axes: "Axes", names: list[str], bars: list[dict[str, float]]) -> None:
    """Stacked bars with a legend of what is large enough to see."""
    import numpy as np

    from plot import COLORS

    keys = list(dict.fromkeys(k for bar in bars for k in bar))
    most = max((sum(bar.values()) for bar in bars), default=0.0)
    bottom = np.zeros(len(bars))
    for i, key in enumerate(keys):
        heights = np.array([bar.get(key, 0.0) for bar in bars])
        seen = key if heights.max() > 0.005 * most else None
        face = COLORS[i % len(COLORS)]
        hatch = "//" if i >= len(COLORS) else None
        axes.bar(range(len(bars)), heights, 0.7, bottom, color=face, label=seen, hatch=hatch)
        bottom += heights
    axes.set_xticks(range(len(names)), names, rotation=0 if len(names) < 8 else 30)
    axes.spines[["top", "right"]].set_visible(False)
    if keys:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
