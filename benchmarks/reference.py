"""Compare compiled with model FLOPs, and time rematerialization policies, on 8 CPU devices.

    ./run.sh python benchmark.py reference

The model is the mixture of experts of configs/reference.toml. Compiled FLOPs are those of the
matrix products in the compiled program, with loops counted as often as they run. Model FLOPs are
those of a program without waste and without its optimizer.
"""

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import train
import weights
from benchmarks.common import (
    compile_step,
    matmul_flops_per_s,
    no_flags,
    reference_config,
    step_seconds,
    with_values,
)

POLICIES = ("none", "full", "latents,attention,hidden,expert_hidden")


def main(arguments: list[str]) -> None:
    no_flags(arguments, __doc__)
    programs = [compile_step(reference_config(remat=policy)) for policy in POLICIES]
    programs.append(compile_step(with_values(programs[0].config, mesh={"virtual": 2})))
    print(f"{weights.count(programs[0].declared)[0]:,} parameters, mesh (2, 2, 2)")
    for program in (programs[0], programs[-1]):
        mesh, M = program.config.mesh, program.config.train.microbatches
        bubble = (M + (mesh.pipeline - 1) / mesh.virtual) / M
        print(
            f"remat none, virtual {mesh.virtual}: compiled over model FLOPs "
            f"{program.flops_ratio():.3f} (bound 1.15 x {bubble:.3f} = {1.15 * bubble:.3f})"
        )
    table = Table("remat", "virtual", "step s", "GFLOP/s", "memory/device MiB", "compile s")
    rates = []
    for program, s in zip(programs, step_seconds(programs), strict=True):
        rates.append(program.model_flops / s)
        table.add_row(
            program.config.train.remat,
            str(program.config.mesh.virtual),
            f"{s:.2f}",
            f"{rates[-1] / 1e9:.1f}",
            f"{train.planned_bytes(program.step) / 2**20:.0f}",
            f"{program.compile_s:.1f}",
        )
    Console(width=120).print(table)
    product = matmul_flops_per_s(2048, jnp.float32, in_flight=1)
    print(
        "GFLOP/s of model FLOPs on all devices together. The best step reaches "
        f"{max(rates) / product:.0%} of the {product / 1e9:.1f} GFLOP/s of a 2048 x 2048 x 2048 "
        "float32 product."
    )
