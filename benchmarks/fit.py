"""Compile what main.py chooses for machines that are not here, and compare it with a whole search.

    ./run.sh python benchmark.py fit                       all depths on all machines; half an hour
    ./run.sh python benchmark.py fit --depths 12 --machines rtx4090:1
    ./run.sh python benchmark.py fit --search                  plans, beside those of a whole search

A machine is CHIP:COUNT. The memory is that of the largest of step, evaluation and sampling.
"""

import time
from dataclasses import dataclass

import depth
import fit
import hardware
import utils
from planning import compiler, search
from runtime import cli
from runtime.console import log
from utils import GIB, Config, ConfigError

MACHINES = ("v5e:1", "v5e:8", "v4:32", "rtx4090:1", "a100-40gb:1", "h100:8")
VOCABULARY = ("--model.vocab_size", "50257")  # GPT-2's


@dataclass(frozen=True, kw_only=True)
class Flags:
    depths: tuple[int, ...] = (2, 6, 12)
    machines: tuple[str, ...] = MACHINES
    dense: bool = False
    search: bool = False  # plan, and do not compile


def config_of(layers: int, dense: bool, chip: hardware.Chip) -> Config:
    words = ["--depth", str(layers), *["--dense"] * dense, *VOCABULARY]
    config = utils.changed(depth.parse(words), dict(utils.AUTO))
    return utils.for_platform(config, hardware.platform_of(chip))


def row(layers: int, machine: str, flags: Flags) -> str:
    """Return a row of the table."""
    name, _, count = machine.partition(":")
    if not count.isdigit() or (chip := hardware.chip_named(name)) is None:
        raise ConfigError(f"--machines {machine} is no CHIP:COUNT. Write it as rtx4090:1.")
    began = time.process_time()
    config = fit.for_chip(config_of(layers, flags.dense, chip), chip, int(count))
    chosen = (
        f"| {layers} | {machine} | {time.process_time() - began:.1f} | {config.mesh.shape[1:]} "
    )
    chosen += f"| {config.train.microbatches} | {config.train.remat} | {config.fsdp.gather} |"
    if flags.search:
        fixed = frozenset({"model.experts_layout"})
        best = search.search(config, chip, int(count), fixed).best[0].predicted
        step_s = search.candidate(config, chip, config.train.remat).predicted.step_s
        return f"{chosen} {step_s:.4g} | {best.step_s:.4g} |"
    compiled, _ = compiler.compile_step(config, chip)
    parts = compiled.memory_bytes_per_chip, compiled.evaluation_bytes, compiled.sampling_bytes
    sizes = " | ".join(f"{size / GIB:.2f}" for size in parts)
    fits = "fits" if max(parts) <= chip.memory_bytes else "does not fit"
    return f"{chosen} {sizes} | {chip.memory_bytes / GIB:.1f} | {fits} |"


def main(arguments: list[str]) -> None:
    flags = cli.parse_flags(Flags, arguments, description=__doc__)
    ends = "step, s | of a search" if flags.search else "step, GiB | evaluation | sampling | of |"
    log(f"| depth | machine | s to choose | mesh | microbatches | remat | gather | {ends} |")
    log("|---" * (9 if flags.search else 12) + "|")
    for layers in flags.depths:
        for machine in flags.machines:
            log(row(layers, machine, flags))
