"""Format a plan as tables and as JSON."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

import hardware
from device_kernels.choice import describe_kernels
from planning import kernel_time, rates
from planning.results import (
    CHIP_PARTS,
    FLOPS_KINDS,
    MeshShape,
    Plan,
    SearchResult,
    Traffic,
    gib,
    usable_bytes,
)
from utils import GIB

FLOPS_RULE = (
    "FLOPs are 2 per multiply-add of matrix products. They include capacity slots or the tiles of "
    "an even load, the padded vocabulary, and all of attention's scores, or the blocks that a "
    "kernel computes. Backward is twice forward plus what attention kernels recompute. Recomputed "
    "is what train.remat does not save. Bubble is what a pipeline rank runs without a task."
)
TIME_RULE = (
    "Compute is the FLOPs, and memory the operands and results of products and the updated state, "
    f"at {rates.COMPUTE:.0%} of the peak and {rates.MEMORY:.0%} of the bandwidth, or "
    f"{rates.UNROLLED:.0%} if layers are unrolled. Links have their full bandwidth, which was not "
    "measured."
)


# --- text -----------------------------------------------------------------------------------------


def print_predicted(plan: Plan, console: Console) -> None:
    for part in (header, memory_table, flops_table):
        console.print(part(plan))
    if plan.predicted.traffic:
        console.print(traffic_table(plan))
    if plan.chip:
        console.print(time_table(plan))
    else:
        console.print("No times: no figures of this chip are known.\n")
    if plan.search:
        console.print(search_table(plan.search))
        if plan.search.rejected:
            console.print(rejected_lines(plan.search), soft_wrap=True)
    console.print(f"run: {plan.command}", markup=False, soft_wrap=True)


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
    kernels = describe_kernels(c, hardware.platform_of(plan.chip))
    lines = [
        f"{plan.name}: {p.parameters:,} parameters, {p.active_parameters:,} active per token",
        f"{p.chips} x {plan.chip_name}, mesh {c.mesh}, virtual {c.mesh.virtual}, "
        f"{c.train.microbatches} microbatches, {'split backward, ' * c.pipeline.split_backward}"
        f"remat {c.train.remat}, gather {c.fsdp.gather}, layers "
        f"{'unrolled' if p.unrolled else 'scanned'}, {kernels}",
        f"{p.tokens_per_step:,} tokens per step; pipeline bubble {p.bubble:.1%}",
    ]
    if plan.chip and plan.chip.is_tpu and p.chips not in hardware.TOPOLOGIES[plan.chip.dims]:
        lines.append(
            f"No usual slice of {plan.chip.name} has {p.chips} chips: see hardware.TOPOLOGIES."
        )
    lines += hardware.bfloat16_warning(c, hardware.platform_of(plan.chip), plan.chip_name)
    return "\n".join(lines)


def memory_table(plan: Plan) -> Group:
    p = plan.predicted
    total = p.memory_bytes_per_chip
    parts = sorted(p.memory.items(), key=lambda item: -item[1])
    rows = [(part, f"{size / GIB:.3f}", f"{size / total:.1%}") for part, size in parts]
    sums = [("sum", f"{total / GIB:.3f}", "")]
    note = ""
    if plan.chip:
        usable = usable_bytes(plan.chip)
        limit = f"{gib(usable)} usable of {gib(plan.chip.memory_bytes)}"
        fits = "fits" if p.fits else "does not fit (--search finds what fits)"
        note = f"{fits}: {p.most_bytes / usable:.0%} of {limit}. "
    note += f"An evaluation needs {gib(p.evaluation_bytes)}, sampling {gib(p.sampling_bytes)}."
    return table("Memory per chip", ("part", "GiB", "share"), rows, sums, note=note)


def flops_table(plan: Plan) -> Group:
    p = plan.predicted
    per_token = p.chips / p.tokens_per_step / 1e6

    def row(name: str, counts: Iterable[int]) -> tuple[str, ...]:
        counts = [*counts]
        return name, *(f"{n * per_token:,.1f}" for n in (*counts, sum(counts)))

    parts = sorted(p.flops.items(), key=lambda item: -sum(item[1].values()))
    rows = [row(part, kinds.values()) for part, kinds in parts]
    columns = zip(*(kinds.values() for kinds in p.flops.values()), strict=True)
    sums = [row("sum", map(sum, columns))]
    ratio = p.flops_per_chip / p.model_flops_per_chip
    note = f"{ratio:.3f} times the model's FLOPs, which exclude the optimizer. {FLOPS_RULE}"
    return table("MFLOPs per token", ("part", *FLOPS_KINDS, "sum"), rows, sums, note=note)


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


def time_table(plan: Plan) -> Group:
    p = plan.predicted
    rows = [
        (name if name in CHIP_PARTS else f"the links along {name}", f"{1e3 * seconds:,.3g}")
        for name, seconds in sorted(p.seconds.items(), key=lambda item: -item[1])
    ]
    steps = []
    for seconds, part in {p.chip_s: "none", p.step_s: "all"}.items():
        rate = p.tokens_per_s(seconds)
        overlap = f"with {part} of the communication: " if p.step_s > p.chip_s else ""
        line = f"{overlap}{rate:,.0f} tokens/s, MFU {p.mfu(seconds):.1%}, "
        hours = plan.tokens / rate / 3600
        duration = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"
        money = f" for {hours * p.chips * plan.price_per_hour:,.2f}" * (plan.price_per_hour > 0)
        line += f"{duration} to {plan.tokens:.3g} tokens{money}"
        steps.append((line, f"{1e3 * seconds:,.3g}"))
    note = f"Accuracy: {rates.accuracy(p.chip, p.unrolled)}. {TIME_RULE} {hardware.MFU_RULE}"
    if plan.config.model.matmul_dtype == "float8":
        note += f" FP8 products reach {kernel_time.FLOAT8_COMPUTE:.0%} of their peak, not measured."
    return table("Time of a step", ("resource", "ms"), rows, steps, note=note)


def compiled_table(plan: Plan) -> Group:
    p, c = plan.predicted, plan.compiled
    by_axes, ours = c.collective_bytes_per_chip, p.collective_bytes_per_chip
    memory = {
        "memory, GiB": (p.memory_bytes_per_chip, c.memory_bytes_per_chip),
        "memory of an evaluation, GiB": (p.evaluation_bytes, c.evaluation_bytes),
        "memory of sampling, GiB": (p.sampling_bytes, c.sampling_bytes),
    }
    figures = [
        *((name, GIB, *sizes) for name, sizes in memory.items() if sizes[1]),
        ("TFLOPs", 1e12, p.flops_per_chip, c.flops_per_chip),
        *(
            (f"collectives along {axes}, GB", 1e9, ours.get(axes, 0.0), size)
            for axes, size in sorted(by_axes.items(), key=lambda item: -item[1])
        ),
        ("collectives, GB", 1e9, sum(ours.values()), sum(by_axes.values())),
    ]
    if c.kernels:
        figures.append(("ms without collectives", 1e-3, p.chip_s, c.kernels["seconds"]))
    rows = [
        (name, f"{a / unit:,.3f}", f"{b / unit:,.3f}", f"{a / b:.3f}" if b else "")
        for name, unit, a, b in figures
    ]
    hidden = sum(row["bytes"] for row in c.collectives if row["overlapped"])
    note = (
        f"The program computes during {hidden / 1e9:,.2f} GB of the collectives. Its FLOPs are "
        f"{c.flops_per_chip / c.model_flops_per_chip:.3f} times the model's. "
        f"Compiled in {c.compile_s:.0f} s."
    )
    if c.kernels:
        note += (
            f" Its {c.kernels['kernels']:,.0f} kernels move {c.kernels['moved_bytes'] / 1e9:,.0f} "
            f"GB. Each takes its products at {kernel_time.COMPUTE:.0%} of the peak or its bytes at "
            f"{kernel_time.MEMORY:.0%} of the bandwidth, and {kernel_time.LAUNCH_S * 1e6:.0f} us "
            "besides."
            " Not included: on a real GPU, XLA also autotunes kernels, and cuDNN may allocate "
            "memory of its own."
        )
    if not plan.chip and plan.config.model.compute_dtype == "bfloat16":
        note += " A CPU's compiler stores and sends bfloat16 as float32, twice as large."
    columns = ("per chip", "predicted", "compiled", "ratio")
    return table(f"As compiled by {c.compiler}", columns, rows, note=note)


def search_table(result: SearchResult) -> Group:
    title = f"Meshes that fit: {len(result.best)}, best of {result.tried} candidates"
    columns = ("mesh", "virtual", "microbatches", "gather", "experts", "GiB", "ms", "remat")
    rows = []
    for candidate in result.best:
        c, p = candidate.config, candidate.predicted
        experts = c.model.experts_layout if c.model.moe_layers else ""
        virtual = f"{c.mesh.virtual}{', split' * c.pipeline.split_backward}"
        settings = virtual, c.train.microbatches, c.fsdp.gather, experts
        sizes = f"{p.memory_bytes_per_chip / GIB:.2f}", f"{1e3 * p.step_s:,.0f}" if p.step_s else ""
        remat = c.train.remat.replace(",", ", ")
        rows.append((mesh_name(c.mesh.shape[1:]), *map(str, settings), *sizes, remat))
    note = "ms: a step with all of the communication."
    return table(title, columns, rows, text=["remat"], note=note)


def mesh_name(mesh: MeshShape) -> str:
    """Format as "2 x 1 x 4", (fsdp, pipeline, tensor), with context before tensor if above 1."""
    *outer, context, tensor = map(str, mesh)
    return " x ".join([*outer, *[f"context {context}"] * (context != "1"), tensor])


def rejected_lines(result: SearchResult) -> str:
    """One rejected mesh of each kind of reason, with how many others there are."""
    kinds = defaultdict(list)
    for mesh, reason in result.rejected.items():
        kinds[re.sub(r"[\d.]+", "", reason.partition(":")[0])].append(mesh)
    lines = []
    for mesh, *others in kinds.values():
        more = f" (and {len(others)} like it)" if others else ""
        lines.append(f"out: {mesh_name(mesh)}{more}: {result.rejected[mesh]}")
    return "\n".join(lines)


# --- JSON -----------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan. `predicted` and `compiled` use the same names for the same figures."""
    p, c = plan.predicted, plan.compiled
    predicted = vars(p) | {
        "chip": plan.chip_name,
        "traffic": [vars(t) | {"sent_bytes": t.sent_bytes} for t in p.traffic],
        "chip_s": p.chip_s,
        "step_s": p.step_s,
    }
    if p.chip:
        predicted |= {"tokens_per_s": p.tokens_per_s(p.step_s), "mfu": p.mfu(p.step_s)}
        predicted["accuracy"] = rates.accuracy(p.chip, p.unrolled)
    content: dict[str, Any] = {
        "flags": plan.flags,
        "tokens": plan.tokens,
        "fits": p.fits if plan.chip else None,
        "predicted": predicted,
    }
    if c:
        content |= {"compiled": dataclasses.asdict(c), "ratios": p.over(c)}
    if plan.search:
        content["search"] = [
            {
                "flags": one.flags,
                "memory_bytes_per_chip": one.predicted.memory_bytes_per_chip,
                "step_s": one.predicted.step_s,
            }
            for one in plan.search.best
        ]
        rejected = plan.search.rejected.items()
        content["out"] = {mesh_name(mesh): reason for mesh, reason in rejected}
    return content
