"""What a training step costs, measured; ratios come from one run, since machines are noisy.

    ./run.sh python benchmark.py reference            a small mixture of experts on 8 CPU devices
    ./run.sh python benchmark.py mesh                 configs/tiny.toml on one device and on eight
    ./run.sh python benchmark.py decode               tokens of text per second, beside transformers
    ./run.sh python benchmark.py checkpoint           steps with a save over steps without
    ./run.sh python benchmark.py data                 batches alone, from a disk and a bucket
    ./run.sh python benchmark.py tokenize             text to tokens, beside tiktoken alone
    ./run.sh python benchmark.py links                three layouts over links from fast to slow
    ./run.sh python benchmark.py peer                 training, beside PyTorch and transformers
    ./run.sh python benchmark.py recipe               losses of recipes with the same tokens
    ./run.sh python benchmark.py step --config FILE   any config, on the devices there are
    ./run.sh python benchmark.py gpu [ROW ..]         four models on one GPU (benchmark_gpu.py)

`step`, `checkpoint` and `links` take main.py's flags; `gpu`, `checkpoint`, `data`, `tokenize`,
`links`, `peer` and `recipe` have flags of their own, which --help tells. Compiled FLOPs are the
matrix products in the compiled program, loops counted with their trip counts; model FLOPs those of
a program without waste, and without its optimizer (see cost.model_flops).
"""

import dataclasses
import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import chips
import faults
import flops
import model
import passes
import pipeline
import train
import utils
import weights
from planning import cost, hlo
from utils import Config

ROOT = Path(__file__).resolve().parent
PARTS = (
    "gpu",
    "peer",
    "recipe",
    "checkpoint",
    "data",
    "tokenize",
    "links",
)  # files that take from this one, imported late
STEPS = 8  # timed ones, after one that is not
ONE_DEVICE = {"fsdp": 1, "pipeline": 1, "tensor": 1, "virtual": 1}  # sizes of a mesh


def one_cpu_device(cores: int) -> dict[str, str]:
    """Environment in which jax computes with one device of a CPU.

    It waits for no other device, so run.sh's many threads only take each other's time; and XLA's
    newer fusions (YNN), which several devices gain from, cost it a fifth.
    """
    flags = "--xla_force_host_platform_device_count=1 --xla_cpu_experimental_ynn_fusion_type="
    return {"PJRT_NPROC": str(cores), "XLA_FLAGS": flags}


@dataclass(frozen=True)
class Program:
    """A compiled training step, and what it runs on."""

    config: Config
    declared: model.Transformer
    mesh: Mesh
    step: Any
    compile_s: float

    def steps(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """(seconds, report) of one step after the other, without end; the first ones are slower."""
        state = train.initial_state(self.config, self.declared, self.mesh)
        batch = random_batch(self.config, self.mesh)
        while True:
            start = time.perf_counter()
            state, report = jax.block_until_ready(self.step(state, batch))
            yield time.perf_counter() - start, report

    @property
    def tokens(self) -> int:
        return self.config.train.sequences * self.config.train.sequence_length

    @property
    def model_flops(self) -> int:
        """Of a step, on all devices."""
        step = cost.Step(self.config, passes.platform(self.mesh))
        return round(cost.model_flops(step) * self.mesh.size)

    def flops_ratio(self) -> float:
        """Compiled over model FLOPs."""
        share = pipeline.branch_share(passes.schedule_of(self.config))
        return float(hlo.dot_flops(self.step.as_text(), share)) * self.mesh.size / self.model_flops


def compiled(config: Config, anew: bool = True) -> Program:
    """The step of train.py, compiled for this config.

    anew  also where it was compiled before, for the time that takes.
    """
    if anew:
        jax.config.update("jax_enable_compilation_cache", False)
    config = utils.for_platform(config, jax.default_backend())
    utils.check(config)
    declared, mesh = model.declare(config), train.make_mesh(config)
    state = train.abstract_state(config, declared, mesh)
    step = train.jitted_step(config, declared, mesh)
    start = time.perf_counter()
    step = step.lower(state, train.abstract_batch(config, mesh)).compile()
    return Program(config, declared, mesh, step, time.perf_counter() - start)


def random_batch(config: Config, mesh: Mesh) -> model.Batch:
    """Any tokens: what a step costs does not depend on them."""
    shapes = train.abstract_batch(config, mesh)
    M, B, T = shapes.tokens.shape
    ids = np.random.default_rng(0).integers(
        0, config.model.vocabulary, (M, B, T + 1), dtype=np.int32
    )
    ones, zeros = np.ones((M, B, T), np.float32), np.zeros((M, B, T), np.int32)
    batch = model.Batch(ids[..., :-1], ids[..., 1:], loss_weights=ones, segments=zeros)
    return jax.device_put(batch, train.shardings_of(shapes))


def step_seconds(programs: list[Program]) -> list[float]:
    """Median seconds of a step of each, in turns, so that what slows the machine slows them all."""
    turns = zip(*(program.steps() for program in programs), strict=True)
    taken = [[seconds for seconds, _ in turn] for turn in itertools.islice(turns, STEPS + 1)]
    return np.median(taken[1:], axis=0).tolist()


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Median, least and most of them."""
    values = [*values]
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def flops_per_token(config: Config, square: bool = False) -> float:
    """Model FLOPs as MFU counts them; with attention's whole square, or half of it."""
    # By the rule attention counts as half of T, so as all of it where T is doubled.
    length = config.train.sequence_length * (2 if square else 1)
    return flops.palm_flops_per_token(config.model, model.declare(config), length)


def product_flops_per_s(size: int, dtype: Any, in_row: int, timed: int = STEPS) -> float:
    """FLOP/s of a product of two square random matrices: the median of `timed` measurements.

    in_row  products that one measurement starts before it waits, so that a GPU is not idle between
            them; a CPU would run them beside each other.
    """
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    product = jax.jit(jnp.matmul)
    taken = []
    for _ in range(timed + 1):
        start = time.perf_counter()
        jax.block_until_ready([product(a, b) for _ in range(in_row)])
        taken.append((time.perf_counter() - start) / in_row)
    return 2 * size**3 / statistics.median(taken[1:])


def with_values(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with some fields of some sections replaced."""
    for name, values in sections.items():
        section = dataclasses.replace(getattr(config, name), **values)
        config = dataclasses.replace(config, **{name: section})
    return config


# --- step -----------------------------------------------------------------------------------------


def step(arguments: list[str]) -> None:
    """Prints what a step of any config costs."""
    program = compiled(utils.parse(arguments))
    [seconds] = step_seconds([program])
    devices, kind = program.mesh.size, program.mesh.devices.flat[0].device_kind
    rate, chip = program.tokens / seconds, chips.chip_of_kind(kind)
    achieved = rate * flops_per_token(program.config) / devices
    mfu = f"not known: no peak for {kind!r} in chips.py"
    if chip:
        mfu = f"{achieved / chip.flops:.1%} of {chip.flops / 1e12:.0f} TFLOP/s"
    memory, source = train.peak_bytes(program.mesh, program.step)
    total, active = weights.count(program.declared)
    print(f"{total:,} parameters, {active:,} active, on {devices} x {kind}")
    print(f"compile        {program.compile_s:.1f} s")
    print(f"step           {seconds:.4f} s (median of {STEPS})")
    print(f"tokens/s       {rate:,.0f}")
    print(f"per device     {achieved / 1e12:.3f} TFLOP/s")
    print(f"MFU            {mfu}")
    print(f"memory/device  {memory / utils.GIB:.2f} GiB ({source})")
    print(flops.MFU_RULE)


# --- reference ------------------------------------------------------------------------------------


def reference_config(**train: Any) -> Config:
    """configs/reference.toml with AdamW, which others have, too."""
    config = utils.load(ROOT / "configs" / "reference.toml")
    return with_values(config, optimizer={"matrices": "adamw", "lr": 1e-3}, train=train)


def reference() -> None:
    """Waste without rematerialisation against its bound, and speed with the best remat policy."""
    policies = ["none", "full", "latents,attention,hidden,expert_hidden"]
    programs = [compiled(reference_config(remat=policy)) for policy in policies]
    programs.append(compiled(with_values(programs[0].config, mesh={"virtual": 2})))
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
    print("GFLOP/s of model FLOPs, all devices together.")
    print(share_of_machine(max(rates), product_flops_per_s(2048, jnp.float32, in_row=1)))


def share_of_machine(best: float, machine: float) -> str:
    """A step's FLOP/s beside what a bare product makes here, on all cores."""
    return (
        f"Best {best / 1e9:.1f} GFLOP/s, {best / machine:.0%} of a 2048 x 2048 x 2048 float32 "
        f"product's {machine / 1e9:.1f} here."
    )


# --- mesh -----------------------------------------------------------------------------------------


def mesh() -> None:
    """One device against eight, waste of a dense model, and compile time against size."""
    tiny = utils.load(ROOT / "configs" / "tiny.toml")
    # Matrix products of the optimizer are not part of the model's FLOPs.
    tiny = with_values(
        tiny,
        mesh={"fsdp": 2, "pipeline": 2, "tensor": 2, "virtual": 2},
        model={"compute_dtype": "float32"},
        optimizer={"matrices": "adamw"},
    )
    one = with_values(tiny, mesh=ONE_DEVICE)
    programs = [compiled(one), compiled(tiny)]
    seconds = step_seconds(programs)
    for program, s in zip(programs, seconds, strict=True):
        print(
            f"mesh {program.config.mesh} virtual {program.config.mesh.virtual}: "
            f"{program.tokens / s:,.0f} tokens/s, compiled in {program.compile_s:.1f} s, "
            f"compiled over model FLOPs {program.flops_ratio():.3f}"
        )
    print(f"tokens/s of 8 devices over 1: {seconds[0] / seconds[1]:.2f}")
    for remat in ("none", "full"):
        dense = with_values(one, model={"moe_layers": 0, "dense_layers": 2}, train={"remat": remat})
        ratio = compiled(dense).flops_ratio()
        print(f"dense, no pipeline, remat {remat}: compiled over model FLOPs {ratio:.3f}")
    print("compile seconds on mesh (2, 2, 2):")
    for blocks, microbatches in ((4, 4), (16, 4), (4, 16), (16, 16)):
        evaluated = {"sequences": 2 * microbatches}
        trained = evaluated | {"microbatches": microbatches}
        sized = with_values(tiny, model={"blocks": blocks}, train=trained, eval=evaluated)
        taken_s = compiled(sized).compile_s
        print(f"  {blocks:2} blocks, {microbatches:2} microbatches: {taken_s:.1f}")


def decode() -> None:
    import benchmark_decode  # late: the other commands run without what makes text

    benchmark_decode.main()


def run() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
    elif name in PARTS:
        importlib.import_module(f"benchmark_{name}").main(rest)
    elif name == "step":
        step(rest)
    elif (
        command := {"reference": reference, "mesh": mesh, "decode": decode}.get(name)
    ) and not rest:
        command()
    else:
        raise ValueError(
            f"benchmark.py {' '.join(sys.argv[1:])} is not a command: use reference, mesh, "
            "decode, checkpoint, data, tokenize, links, peer, recipe, gpu with names of rows, or "
            "step with flags of main.py."
        )


if __name__ == "__main__":
    faults.command_line(run)
