"""Predict memory, FLOPs, traffic and time of a training step: capacity planning without devices.

    ./run.sh python plan.py --config configs/moe_1b.toml --chip v4 --chips 32
    ./run.sh python plan.py --config configs/moe_1b.toml --chip v4 --chips 32 --search
    ./run.sh python plan.py --config configs/jaxformer_1b.toml --chip v4 --compile

A prediction takes seconds (planning/cost.py). --search ranks all meshes (planning/search.py).
--compile also builds the step with the chip's own compiler, in one or two minutes
(planning/compiler.py). plan.py takes main.py's flags as well.
"""

import dataclasses
import gc
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import dataset
import depth
import fit
import hardware
import utils
from device_kernels.choice import choose_experts_kernel, choose_kernel
from planning import compiler, cost, report, search, targets
from planning.results import SEARCHED_FLAGS, Plan, gib
from runtime import cli, errors
from utils import ConfigError, setting


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of plan.py besides those of main.py."""

    config: Path | None = None  # TOML file with other defaults, as for main.py
    # a name in hardware.py, as v4, h100 or rtx4090; figures, as
    # name=mycard,flops=165,memory=24,bandwidth=1008,link=32 (TFLOP/s, GiB, GB/s); or cpu
    chip: str = "v4"
    # 0: those of the mesh, or one; a mesh that is not set, or has another number, is chosen
    chips: int = setting(0, at_most=2**17)
    topology: str = ""  # TPU slice to compile for, as 2x4x4; empty: the usual one
    tokens: float = 0  # tokens of the whole run, for its duration; 0: those of train.steps
    price_per_hour: float = 0.0  # of one chip, in any currency
    search: bool = False  # rank all meshes, schedules, remat policies, gathering, expert layouts
    compile: bool = False  # also build the step with the chip's compiler; needs no chip
    json: bool = False  # print JSON instead of tables
    hlo: Path | None = None  # write the text of the compiled program to this file


def main(arguments: list[str] | None = None) -> None:
    """Print the prediction before compiling, which takes minutes, and then the compiled step."""
    flags, rest = cli.parse_known(Flags, arguments, __doc__)
    plan = make_plan(flags, rest)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    if not flags.json:
        report.print_predicted(plan, console)
    if flags.compile:
        compiled, text = compiler.compile_step(plan.config, plan.chip, flags.topology)
        plan = dataclasses.replace(plan, compiled=compiled)
        if flags.hlo:
            flags.hlo.write_text(text, encoding="utf-8")
    if flags.json:
        print(json.dumps(report.as_json(plan), indent=1, allow_nan=False))
    elif plan.compiled:
        console.print(report.compiled_table(plan))
    check_memory(plan)


def make_plan(flags: Flags, rest: list[str]) -> Plan:
    """Return the plan before compilation.

    rest    main.py's flags.
    Raises  ConfigError for flags and configs that cannot be planned.
    """
    check_flags(flags)
    named = ["--config", str(flags.config)] if flags.config else []
    config = depth.parse_open([*named, *rest], Flags, checked=False)
    before = config.mesh.context <= 1  # without the flag there is no context
    config, note = with_vocabulary(config)
    chip = hardware.chip_named(flags.chip)
    if flags.topology and not (chip and chip.is_tpu):
        raise ConfigError(f"--topology is for TPU slices, but --chip is {flags.chip}. Omit it.")
    config = utils.for_platform(config, hardware.platform_of(chip))
    usual = {name: utils.get(utils.Config(), name) for name in utils.left_open(config)}
    for choose in (choose_kernel, choose_experts_kernel):
        choose(utils.changed(config, usual), hardware.platform_of(chip))
    hardware.uses_float8(config, hardware.platform_of(chip), chip)
    if flags.compile:
        targets.check(chip)
    given = frozenset(cli.flag_names(cli.split_auto(rest)[0]))
    config = utils.changed(config, {"mesh.replica": config.mesh.replica or 1})
    left_open, result = utils.left_open(config), None
    set_ranks = math.prod(utils.get(config, name) for name in fit.MESH if name not in left_open)
    count = flags.chips or set_ranks
    mesh_is_open = not left_open.isdisjoint(fit.MESH)
    if left_open and not flags.search and (mesh_is_open or count == set_ranks):
        config = fit.for_chip(config, chip, count)
    elif flags.search or count != set_ranks:
        config = utils.changed(config, usual)  # as a search begins with some value
        result = search.search(config, chip, count, frozenset(SEARCHED_FLAGS) & given)
        config = result.best[0].config
    cli.check(config)
    predicted = cost.predict(config, chip)
    if not predicted.unrolled:  # as chosen, or because the unrolled step does not fit
        config = utils.changed(config, {"train.layers": "scanned"})
    tokens = flags.tokens or config.train.steps * predicted.tokens_per_step
    name = str(flags.config or " ".join(rest) or "defaults") + note
    chosen = {flag: utils.get(config, flag) for flag in SEARCHED_FLAGS if flag not in given}
    chosen = {
        flag: value
        for flag, value in chosen.items()
        if value is not False and (flag, value, before) != ("mesh.context", 1, True)
    }
    words = [word for flag, value in chosen.items() for word in (f"--{flag}", str(value))]
    command = shlex.join(["./run.sh", "python", "main.py", *named, *rest, *words])
    price = flags.price_per_hour
    return Plan(config, predicted, name, chip, tokens, command, price, search=result)


def with_vocabulary(config: utils.Config) -> tuple[utils.Config, str]:
    """Return the config with the vocabulary of its data, and a note if that cannot be read."""
    try:
        return dataset.with_vocabulary(config), ""
    except ConfigError as error:
        made = utils.changed(config, {"model.vocab_size": 50257})
        return made, f" with the vocabulary of GPT-2, as {str(error).partition(':')[0]}"


def check_flags(flags: Flags) -> None:
    """Raise ConfigError for flags that do not go together, and files that cannot be written."""
    for name in ("hlo", "topology"):
        if getattr(flags, name) and not flags.compile:
            raise ConfigError(f"--{name} goes with --compile. Use --compile --{name} ...")
    if flags.hlo:
        cli.check_writable("hlo", flags.hlo)


def check_memory(plan: Plan) -> None:
    """Raise ConfigError for a compiled step that exceeds the memory of its chip.

    libtpu refuses such a step itself. The compiler for GPUs does not.
    """
    if not (plan.compiled and plan.chip):
        return
    c, have = plan.compiled, plan.chip.memory_bytes
    sizes = {"step": c.memory_bytes_per_chip, "evaluation": c.evaluation_bytes}
    name, need = max((sizes | {"sampling": c.sampling_bytes}).items(), key=lambda item: item[1])
    if need > have:
        raise ConfigError(
            f"the compiled {name} needs {gib(need)} and a {plan.chip.name} has {gib(have)}: "
            f"{gib(need - have)} are missing. Use --train.remat full, --fsdp.gather layer, more "
            "--train.microbatches, or more chips."
        )


if __name__ == "__main__":
    gc.disable()  # traces are many objects that all stay alive: collection takes a fifth
    errors.run_command(main)
