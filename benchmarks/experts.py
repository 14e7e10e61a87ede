"""Compare dropless experts with capacity dispatch: time, memory and FLOPs of a step, in turns.

    ./run.sh python benchmark.py experts
    ./run.sh python benchmark.py experts --factors 0 1.25 --config configs/tiny.toml

Other flags are those of main.py. The default is configs/reference.toml with its tokens in one
microbatch, on one device. Tokens are random, so that loads of experts are those of new weights.
"""

from dataclasses import dataclass

import pipeline
import sharded_model
import train
from benchmarks.common import (
    ONE_DEVICE,
    ROOT,
    compile_step,
    parse_flags,
    step_seconds,
    with_values,
)
from planning import hlo
from runtime import cli
from utils import ConfigError


@dataclass(frozen=True)
class Flags:
    factors: tuple[float, ...] = (0.0, 1.25, 1.5)  # capacity factors; 0 is dropless


def main(arguments: list[str]) -> None:
    flags, others = parse_flags(Flags, arguments, __doc__, others=True)
    if not flags.factors:
        raise ConfigError("--factors has no value. Use --factors 0 1.5.")
    if "--config" not in others:
        others = ["--config", str(ROOT / "configs" / "reference.toml"), *others]
        others += ["--train.microbatches", "1", *(f"--mesh.{a}={n}" for a, n in ONE_DEVICE.items())]
    config = cli.parse(others)
    if not config.model.moe_layers:
        raise ConfigError("the model has no experts. Use another --config.")
    configs = [with_values(config, model={"capacity_factor": f}) for f in flags.factors]
    programs = [compile_step(one) for one in configs]
    seconds = step_seconds(programs)
    print("The ratio is to the last row. Memory and FLOPs are those of a device.")
    print("capacity factor  s/step  ratio  dropped     GFLOP     MiB")
    for factor, program, took in zip(flags.factors, programs, seconds, strict=True):
        _, report = next(program.steps())
        dropped = float(report["stats"].dropped / report["stats"].tokens_per_expert.sum())
        share = pipeline.branch_share(sharded_model.schedule_of(program.config))
        flops = hlo.dot_flops(program.step.as_text(), share) / 1e9
        memory = train.planned_bytes(program.step) / 2**20
        print(
            f"{factor or 'dropless':>15}  {took:6.3f}  {took / seconds[-1]:5.3f}  {dropped:7.2%}"
            f"  {flops:8.4g}  {memory:6.0f}"
        )
