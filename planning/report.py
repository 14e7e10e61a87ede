"""A plan as tables, as JSON and as a picture."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

import attention
import chips
import flops
import utils
from chips import Chip
from planning import search
from planning.compiler import Compiled
from planning.cost import Prediction, Traffic
from planning.search import Candidate, Found
from utils import GIB

if TYPE_CHECKING:  # imported late below, so that a plan without pictures starts fast
    from matplotlib.axes import Axes

FLOPS_RULE = (
    "FLOPs are 2 per multiplication and addition of matrix products: of attention its whole "
    "rectangle, or the blocks of it that a kernel computes; every capacity slot, the padded "
    "vocabulary. Backward is twice forward, and what kernels of attention make anew; recomputed is "
    "what train.remat does not keep; bubble is what a pipeline rank runs without a task."
)
TIME_RULE = (
    "Time is FLOPs at the chip's peak, and bytes at the memory's and the links' full bandwidth. At "
    "best all are at work at once; without overlap the links wait for the chip and it for them."
)
TRAFFIC_RULE = (
    "What goes through memory is what kernels would read and write, as compilers fuse operations, "
    "and as if no cache kept anything from one to the next."
)
COMPILED_TRAFFIC_RULE = (
    "What goes through memory is what the compiled kernels read and write, as if no cache kept "
    "anything from one to the next."
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

    @property
    def where(self) -> str:
        return self.chip.name if self.chip else "cpu"


# --- text -----------------------------------------------------------------------------------------


def print_compiled(plan: Plan, console: Console) -> None:
    console.print(compiled_table(plan))
    console.print(kinds_table(plan.compiled))
    if size := plan.compiled.memory_traffic_bytes:
        as_compiled = plan.predicted.with_memory_traffic(size)
        title = "Time of a step, by what its kernels read and write"
        console.print(times(plan, as_compiled, title, COMPILED_TRAFFIC_RULE))


def print_predicted(plan: Plan, console: Console) -> None:
    for part in (header, memory_table, flops_table, traffic_table, time_table):
        console.print(part(plan))
    if plan.found:
        console.print(search_table(plan.found))
        console.print(out_lines(plan.found), markup=False)
        console.print(f"flags: {search.flags_of(plan.config)}", markup=False, soft_wrap=True)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def saving(flag: str, size: int) -> str:
    return f"{flag} ({gib(size)})"


Rows = Sequence[Sequence[str]]


def table(
    title: str, columns: Sequence[str], *sections: Rows, note: str = "", words: Sequence[str] = ()
) -> Group:
    """A table with lines between its sections, and a paragraph below it.

    words   columns of text beside the first; the others are numbers
    """
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        made.add_column(column, justify="left" if column in (columns[0], *words) else "right")
    for rows in sections:
        for row in rows:
            made.add_row(*row)
        made.add_section()
    return Group(made, f"  {note}\n") if note else Group(made)


def header(plan: Plan) -> str:
    p, c = plan.predicted, plan.config
    lines = [
        f"{plan.name}: {p.parameters:,} parameters, {p.active_parameters:,} active per token",
        f"{p.chips} x {plan.where}, mesh {c.mesh}, virtual "
        f"{c.mesh.virtual}, {c.train.microbatches} microbatches, remat {c.train.remat}, gather "
        f"{c.fsdp.gather}, attention {attention.told(c, chips.platform_of(plan.chip))}",
        f"{p.tokens_per_step:,} tokens per step; pipeline bubble {p.bubble:.1%}",
    ]
    if plan.chip and plan.chip.is_tpu and p.chips not in chips.TOPOLOGIES[plan.chip.dims]:
        lines.append(
            f"No usual slice of {plan.chip.name} has {p.chips} chips: see chips.TOPOLOGIES."
        )
    return "\n".join(lines)


def memory_table(plan: Plan) -> Group:
    p = plan.predicted
    whole = p.memory_bytes_per_chip
    parts = sorted(p.memory.items(), key=lambda item: -item[1])
    rows = [(part, f"{size / GIB:.3f}", f"{size / whole:.1%}") for part, size in parts]
    note = verdict(plan.config, plan.chip, p) if plan.chip else ""
    columns = ("part", "GiB", "share")
    return table("Memory per chip", columns, rows, [("sum", f"{whole / GIB:.3f}", "")], note=note)


def verdict(config: utils.Config, chip: Chip, p: Prediction) -> str:
    """Whether it fits."""
    usable, need = search.usable_bytes(chip), p.memory_bytes_per_chip
    of = f"{gib(usable)} usable of {gib(chip.memory_bytes)}"
    if need <= usable:
        return f"fits: {need / usable:.0%} of {of}"
    saves = ", ".join(saving(*one) for one in search.savings(config, chip, False)[:3])
    return f"does not fit: {gib(need - usable)} more than {of}. What saves most: {saves or 'none'}"


def flops_table(plan: Plan) -> Group:
    p = plan.predicted
    ways = ("forward", "backward", "recomputed", "bubble")
    counts = {part: [found[way] for way in ways] for part, found in p.flops.items()}
    parts = sorted((part for part in counts if any(counts[part])), key=lambda k: -sum(counts[k]))
    counts["sum"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    per_token = p.chips / p.tokens_per_step / 1e6
    rows = [
        (part, *(f"{n * per_token:,.1f}" for n in (*counts[part], sum(counts[part]))))
        for part in (*parts, "sum")
    ]
    ratio = p.flops_per_chip / p.model_flops_per_chip
    note = f"{ratio:.3f} times the model's FLOPs, in which the optimizer has no part. {FLOPS_RULE}"
    return table("MFLOPs per token", ("part", *ways, "sum"), rows[:-1], rows[-1:], note=note)


def traffic_table(plan: Plan) -> Group:
    def row(axes: str, cause: str, kind: str, sends: list[Traffic]) -> tuple[str, ...]:
        sizes = (sum(t.result_bytes for t in sends), sum(t.sent_bytes for t in sends))
        return axes, cause, kind, *(f"{size / 1e6:,.1f}" for size in sizes)

    sends = sorted(plan.predicted.traffic, key=lambda t: ("+".join(t.axes), -t.result_bytes))
    small = 0.001 * sum(t.result_bytes for t in sends)
    rows = [row("+".join(t.axes), t.cause, t.kind, [t]) for t in sends if t.result_bytes >= small]
    if less := [t for t in sends if t.result_bytes < small]:
        rows.append(row("", f"{len(less)} smaller ones", "", less))
    columns = ("mesh axes", "cause", "kind", "MB of results", "MB sent")
    sums = [row("sum", "", "", sends)]
    return table("Collectives per chip and step", columns, rows, sums, words=columns[:3])


def time_table(plan: Plan) -> Group | str:
    if not plan.chip:
        return "No times: no figures of this chip are known.\n"
    return times(plan, plan.predicted, "Time of a step", TRAFFIC_RULE)


def times(plan: Plan, p: Prediction, title: str, traffic_rule: str) -> Group:
    causes = sorted(p.seconds.items(), key=lambda item: -item[1])
    rows = [(resource(name), f"{1e3 * seconds:,.3g}") for name, seconds in causes]
    steps = []
    for label, seconds in (("at best", p.step_s), ("without overlap", p.serial_step_s)):
        rate = p.tokens_per_s(seconds)
        told = f"{label}: {rate:,.0f} tokens/s, MFU {p.mfu(seconds):.1%}, "
        told += f"{duration(plan.tokens / rate)} to {plan.tokens:.3g} tokens"
        steps.append((told, f"{1e3 * seconds:,.3g}"))
    note = f"Bound by {resource(p.bound_by)}. {TIME_RULE} {traffic_rule} {flops.MFU_RULE}"
    return table(title, ("at work", "ms"), rows, steps, note=note)


def resource(name: str) -> str:
    return name if name in ("compute", "memory") else f"the links along {name}"


def duration(seconds: float) -> str:
    """In days, or hours where they are fewer than two."""
    return f"{seconds / 86400:.1f} days" if seconds > 172800 else f"{seconds / 3600:.1f} hours"


def compiled_table(plan: Plan) -> Group:
    p, c = plan.predicted, plan.compiled
    r = p.over(dataclasses.asdict(c))
    by_axes, ours = c.collective_bytes_per_chip, p.collective_bytes_per_chip
    sums = sum(ours.values()), sum(by_axes.values())
    found = [
        ("memory, GiB", GIB, p.memory_bytes_per_chip, c.memory_bytes_per_chip, r["memory"]),
        ("TFLOPs", 1e12, p.flops_per_chip, c.flops_per_chip, r["FLOPs"]),
        *(
            (f"collectives along {axes}, GB", 1e9, ours.get(axes, 0.0), size, r.get(axes))
            for axes, size in sorted(by_axes.items(), key=lambda item: -item[1])
        ),
        ("collectives, GB", 1e9, *sums, sums[0] / sums[1] if sums[1] else None),
    ]
    if c.memory_traffic_bytes:
        through = sum(p.memory_traffic.values()), c.memory_traffic_bytes
        found.append(("through memory, GB", 1e9, *through, r["memory traffic"]))
    rows = [
        (name, f"{a / unit:,.3f}", f"{b / unit:,.3f}", "" if ratio is None else f"{ratio:.3f}")
        for name, unit, a, b, ratio in found
    ]
    calls = ", ".join(f"{name} {n:,.0f}" for name, n in c.custom_calls.items()) or "none"
    note = (
        f"Compiled FLOPs are {c.flops_per_chip / c.model_flops_per_chip:.3f} times the model's. "
        f"Compiled in {c.compile_s:.0f} s; the program itself is {gib(c.program_bytes)}. Kernels "
        f"that are not counted: {calls}."
    )
    if plan.chip and not plan.chip.is_tpu:
        note += (
            " Where there is a GPU, XLA also times kernels to choose from, and cuDNN's may ask for "
            "memory of their own: neither is in this."
        )
    if not plan.chip and plan.config.model.compute_dtype == "bfloat16":
        note += " A CPU's compiler holds and sends bfloat16 as float32, twice as large."
    columns = ("per chip", "predicted", "compiled", "ratio")
    return table(f"As compiled by {c.compiler}", columns, rows, note=note)


def kinds_table(compiled: Compiled) -> Group:
    """What the compiled program sends, and whether the chip computes meanwhile."""
    hows = ("all", "asynchronous", "overlapped")
    sums: Counter = Counter()
    for row in compiled.collectives:
        for how in hows:
            sums[row["axes"], row["kind"], how] += row["bytes"] * row.get(how, True)
    least = 5e-4 * sum(compiled.collective_bytes_per_chip.values())
    rows = [
        (axes, kind, *(f"{sums[axes, kind, how] / 1e9:,.3f}" for how in hows))
        for axes, kind in dict.fromkeys(key[:2] for key in sums)
        if sums[axes, kind, "all"] >= least
    ]
    columns = ("mesh axes", "kind", *hows)
    return table("Compiled collectives, GB", columns, rows, words=["kind"])


def search_table(found: Found) -> Group:
    title = f"Meshes that fit: {len(found.best)}, best of {found.tried} ways to use them"
    times = ("ms at best", "no overlap")
    columns = ("mesh", "virtual", "microbatches", "gather", "experts", "GiB", *times, "remat")
    rows = []
    for candidate in found.best:
        c, p = candidate.config, candidate.predicted
        experts = c.model.experts_layout if c.model.moe_layers else ""
        use = c.mesh.virtual, c.train.microbatches, c.fsdp.gather, experts
        use = *use, f"{candidate.memory / GIB:.2f}"
        times = (f"{1e3 * s:,.0f}" if s else "" for s in (p.step_s, p.serial_step_s))
        remat = c.train.remat.replace(",", ", ")
        rows.append((mesh_name(c.mesh.shape[c.mesh.replica == 1 :]), *map(str, use), *times, remat))
    return table(title, columns, rows, words=["remat"])


def mesh_name(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def out_lines(found: Found) -> str:
    """Why the other meshes are out: one of each kind of reason, and how many there are."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for mesh, reason in found.out.items():
        kind = re.sub(r"\d+(\.\d+)?", "", reason.split(":")[0])
        kinds.setdefault(kind, []).append((mesh_name(mesh), reason))
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
        "chip": plan.where,
        "chips": p.chips,
        "flags": flags_json(plan.config),
        "tokens": plan.tokens,
        "fits": plan.chip and p.memory_bytes_per_chip <= search.usable_bytes(plan.chip),
        "predicted": predicted_json(p),
    }
    if c:
        compiled = dataclasses.asdict(c)
        found |= {"compiled": compiled, "compile_s": c.compile_s, "ratios": p.over(compiled)}
    if plan.found:
        names = ("memory_bytes_per_chip", "step_s", "serial_step_s", "bound_by")
        found["search"] = [
            {"flags": flags_json(one.config)} | {n: getattr(one.predicted, n) for n in names}
            for one in plan.found.best
        ]
        found["out"] = {"x".join(map(str, mesh)): why for mesh, why in plan.found.out.items()}
    return found


def flags_json(config: utils.Config) -> dict[str, Any]:
    return {flag: search.value_of(config, flag) for flag in search.FREE}


def predicted_json(p: Prediction) -> dict[str, Any]:
    """Rates are at best and, as serial_, without overlap."""
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

MOST_BARS = 12


def draw(plan: Plan, path: Path) -> None:
    """Memory by part and time by cause, one bar per mesh."""
    from matplotlib.figure import Figure  # imported late, so that printing starts fast

    every = plan.found.best if plan.found else [Candidate(plan.config, plan.predicted)]
    shown = every[:MOST_BARS]
    names = [mesh_name(m.shape[m.replica == 1 :]) for m in (c.config.mesh for c in shown)]
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
    title = f"{Path(plan.name).stem} on {plan.predicted.chips} x {plan.where}"
    if len(every) > len(shown):
        title += f", best {len(shown)} of {len(every)} meshes"
    figure.suptitle(title, size=11)
    figure.savefig(path, dpi=150)


def milliseconds(p: Prediction) -> dict[str, float]:
    """By cause; compute and memory are at work at once, so the longer of them counts."""
    if p.seconds is None:
        return {}
    named = {"compute": "compute", "memory": "memory, beyond compute"}
    found = p.seconds | {"memory": max(0.0, p.seconds["memory"] - p.seconds["compute"])}
    return {named.get(k, f"links along {k}"): 1e3 * seconds for k, seconds in found.items()}


def stack(axes: "Axes", names: list[str], bars: list[dict[str, float]]) -> None:
    """Stacked bars with a legend of what is large enough to see."""
    import numpy as np

    from plot import COLORS

    keys = list(dict.fromkeys(k for bar in bars for k in bar))
    most = max(sum(bar.values()) for bar in bars)
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
