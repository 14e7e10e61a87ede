"""Compare rematerialization policies and virtual stages on 8 CPU devices, and one device.

    ./run.sh python benchmark.py reference

The model is the mixture of experts of configs/reference.toml. Compiled FLOPs are those of the
matrix products in the compiled program, with loops counted as often as they run. Model FLOPs are
those of a program without waste and without its optimizer.
"""

import jax.numpy as jnp

import weights
from benchmarks.common import (
    ONE_DEVICE,
    NoFlags,
    compile_step,
    matmul_flops_per_s,
    print_steps,
    reference_config,
)
from runtime import cli
from utils import changed

POLICIES = ("none", "full", "latents,attention,hidden,expert_hidden")
FIRST = "remat none"


def main(arguments: list[str]) -> None:
    cli.parse_flags(NoFlags, arguments, __doc__)
    configs = {
        f"remat {p.replace(',', ', ')}": changed(reference_config(), {"train.remat": p})
        for p in POLICIES
    }
    configs[f"{FIRST}, 2 virtual stages"] = changed(configs[FIRST], {"mesh.virtual": 2})
    configs[f"{FIRST}, 1 device"] = changed(configs[FIRST], ONE_DEVICE)
    programs = {name: compile_step(config) for name, config in configs.items()}
    first = programs[FIRST]
    print(f"{weights.count(first.declared)[0]:,} parameters, mesh {first.config.mesh}")
    seconds = print_steps(programs)
    print(f"tokens/s of 8 devices over 1: {seconds[-1] / seconds[0]:.2f}")
    rate, product = first.model_flops / min(seconds[:-1]), matmul_flops_per_s(2048, jnp.float32, 1)
    print(
        f"The best step reaches {rate / product:.0%} of the {product / 1e9:.1f} GFLOP/s of a "
        "2048 x 2048 x 2048 float32 product."
    )
