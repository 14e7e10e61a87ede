"""What a run needs, before it is booked: memory, FLOPs, traffic and time of a step per chip.

    ./run.sh python plan.py --config configs/moe_1b.toml --chip v4 --chips 32
    ./run.sh python plan.py --config configs/moe_1b.toml --chip v4 --chips 32 --search --png moe.png
    ./run.sh python plan.py --config configs/jaxformer_1b.toml --chip v4 --compile

Without a device, in seconds (planning/cost.py); with --compile also as the chip's own compiler
plans it, in a minute or two (planning/compiler.py); with --search for every mesh
(planning/search.py). Takes main.py's flags as well.
"""

import dataclasses
import gc
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

import attention
import chips
import faults
import utils
from chips import Chip
from planning import compiler, cost, report, search, targets
from planning.compiler import Compiled
from planning.report import Plan, gib
from planning.search import Found

Switch = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of plan.py beside those of main.py."""

    config: Path | None = None  # TOML file with other defaults, as for main.py
    chip: str = "v4"  # TPU v4, v5e, v5p, v6e, GPU a100, h100, h200 (see chips.py), or cpu
    chips: int = 0  # 0: as many as the mesh has; for another number the best mesh is found
    topology: str = ""  # sides of the TPU slice to compile for, as 2x4x4; empty: the usual one
    tokens: float = 0  # of the whole run, for its days; 0: those of train.steps
    search: Switch = False  # rank all meshes, schedules, remat, gathering, layouts of experts
    compile: Switch = False  # also build the step with the chip's compiler; needs no chip
    json: Switch = False  # print JSON instead of tables
    png: Path | None = None  # draw memory by part and time by cause there
    hlo: Path | None = None  # keep the text of the compiled program there
    svg: Path | None = None  # draw the compiled program's graph by layer there


def main(arguments: list[str] | None = None) -> None:
    """Print a plan, what is predicted before minutes go into compiling; and draw it if asked."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags, rest = tyro.cli(
        Flags, args=arguments, return_unknown_args=True, use_underscores=True, description=__doc__
    )
    plan = make(flags, rest)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    if not flags.json:
        report.print_predicted(plan, console)
    if flags.compile:
        plan = dataclasses.replace(plan, compiled=build(flags, plan.config, plan.chip))
    if flags.json:
        print(json.dumps(report.as_json(plan), indent=1, allow_nan=False))
    elif plan.compiled:
        report.print_compiled(plan, console)
    if flags.png:
        report.draw(plan, flags.png)
    for path in (flags.png, flags.hlo, flags.svg):
        if path and not flags.json:
            print(f"written: {path}")
    check_memory(plan)


def make(flags: Flags, rest: list[str]) -> Plan:
    """The plan that the flags ask for, not compiled yet.

    rest    main.py's flags.
    Raises  ValueError for what the user can mend.
    """
    check(flags)
    named = ["--config", str(flags.config)] if flags.config else []
    own = tuple(field.name for field in dataclasses.fields(Flags))
    config = utils.parse([*named, *rest], own, checked=False)
    chip = chips.chip_named(flags.chip)
    if flags.topology and not (chip and chip.is_tpu):
        raise ValueError(f"--topology is of a TPU's slice, and --chip is {flags.chip}.")
    config = utils.for_platform(config, chips.platform_of(chip))
    attention.chosen(config, chips.platform_of(chip))
    if flags.compile:
        targets.check(chip)
    given = frozenset(a.partition("=")[0].removeprefix("--").replace("-", "_") for a in rest)
    fixed = frozenset(search.FREE) & given
    count = flags.chips or math.prod(config.mesh.shape)
    found = None
    if flags.search or count != math.prod(config.mesh.shape):
        found = searched(config, chip, count, fixed, flags)
        config = found.best[0].config
    utils.check(config)
    predicted = cost.predict(config, chip)
    tokens = flags.tokens or config.train.steps * predicted.tokens_per_step
    name = str(flags.config or "defaults")
    return Plan(name, config, chip, predicted, None, found, tokens)


def check(flags: Flags) -> None:
    """Raises ValueError for flags that do not go together, and files that cannot be written."""
    for name in ("hlo", "svg", "topology"):
        if getattr(flags, name) and not flags.compile:
            raise ValueError(f"--{name} goes with --compile. Use --compile --{name} ...")
    for name in ("png", "svg", "hlo"):
        if path := getattr(flags, name):
            check_writable(name, path)
    if flags.chips < 0 or not 0 <= flags.tokens < math.inf:
        raise ValueError("--chips and --tokens are counts. Use 0 or more.")


def check_memory(plan: Plan) -> None:
    """Raises ValueError for a compiled step that is larger than its chip: libtpu refuses such a one
    itself, and the compiler for GPUs does not.
    """
    if not (plan.compiled and plan.chip):
        return
    need, have = plan.compiled.memory_bytes_per_chip, plan.chip.memory_bytes
    if need > have:
        raise ValueError(
            f"the compiled step needs {gib(need)} and a {plan.chip.name} has {gib(have)}: "
            f"{gib(need - have)} are missing.{advice(plan.config, plan.chip)}"
        )


def advice(config: utils.Config, chip: Chip) -> str:
    """How to make it smaller on as many chips; empty where no flag does."""
    saves = search.savings(config, chip, same_chips=True)
    return f" Of single flags {report.saving(*saves[0])} saves most." if saves else ""


def check_writable(name: str, path: Path) -> None:
    """Before minutes are spent on what goes there."""
    if name != "hlo" and path.suffix != f".{name}":
        raise ValueError(
            f"--{name} {path} does not end in .{name}. Use --{name} {path.with_suffix('.' + name)}."
        )
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"--{name} {path} cannot be written: {error.strerror}. Name another file."
        ) from None
    if not existed:
        path.unlink()


def searched(
    config: utils.Config, chip: Chip | None, count: int, fixed: frozenset[str], flags: Flags
) -> Found:
    """The search over meshes of so many chips.

    Raises  ValueError where no mesh has so many chips, or none has the memory.
    """

    def progress(items: list) -> Iterable:
        console = Console(stderr=True)
        quiet = flags.json or not console.is_terminal
        return track(items, "meshes", console=console, transient=True, disable=quiet)

    found = search.search(config, chip, count, fixed, progress)
    if found.best:
        return found
    least, usable = found.smallest, search.usable_bytes(chip)
    raise ValueError(
        f"the config fits on no mesh of {count} {chip.name}: at best {gib(least.memory - usable)} "
        f"per chip are missing. Needed are {gib(least.memory)}, and usable {gib(usable)} "
        f"({search.USABLE:.0%} of {gib(chip.memory_bytes)}), with "
        f"{search.flags_of(least.config)}.{advice(least.config, chip)}"
    )


def build(flags: Flags, config: utils.Config, chip: Chip | None) -> Compiled:
    """The compiled step, its text and graph kept where they are asked for."""
    topology = flags.topology or (
        chips.topology(chip, math.prod(config.mesh.shape[1:])) if chip and chip.is_tpu else ""
    )
    compiled, text = compiler.compile_step(config, chip, topology, flags.hlo)
    if flags.svg:
        import passes
        import pipeline
        from planning import graph

        share = pipeline.branch_share(passes.schedule_of(config))
        graph.draw(text, flags.svg, config.run.name, share)
    return compiled


if __name__ == "__main__":
    gc.disable()  # traces are many objects that are all kept: looking for garbage takes a fifth
    faults.command_line(main)
