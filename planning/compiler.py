"""Compile the training step of train.py on a machine without its devices.

The devices are a TPU slice or GPUs (planning/targets.py), or simulated devices of the CPU. A child
process compiles, because a compiler that aborts ends its process: `compile_step` starts
`python -m planning.compiler FOLDER CHIP TOPOLOGY`.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

import hardware
import pipeline
import sharded_model
import utils
from hardware import Chip
from planning import cost, hlo, kernel_time, targets
from planning.results import Compiled
from runtime import cli, errors
from utils import ConfigError

# libtpu writes its own text of a program, because JAX cannot read some of them back.
DUMP_FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false "
    "--xla_jf_dump_llo_pass_label_regex=NOTHING"
)

# --- the parent -----------------------------------------------------------------------------------


def compile_step(
    config: utils.Config, chip: Chip | None, topology: str = ""
) -> tuple[Compiled, str]:
    """Return the compiled step of a config, and the text of the program.

    chip       None for as many simulated CPU devices as the mesh has.
    topology   sides of a TPU slice, as 2x4x4; the default is the usual one.

    Raises  ConfigError for what the user can fix, and for a compiler that failed or stopped.
    """
    targets.check(chip)
    if chip and chip.is_tpu and not topology:
        topology = hardware.topology(chip, math.prod(config.mesh.shape[1:]))
    name = chip.name if chip else "cpu"
    task = f"compiling for {name}:{topology}".rstrip(":")
    with tempfile.TemporaryDirectory() as path, Console(stderr=True).status(task):
        folder = Path(path)
        (folder / "config.toml").write_text(cli.to_toml(config), encoding="utf-8")
        child = subprocess.run(
            [sys.executable, "-m", "planning.compiler", folder, name, topology],
            cwd=targets.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=child_environment(chip, folder),
        )
        if child.returncode:
            raise ConfigError(f"{task} failed: {failure(child.returncode, child.stdout)}")
        text = (folder / "program.hlo").read_text(encoding="utf-8")
        figures = json.loads((folder / "compiled.json").read_text(encoding="utf-8"))
    return Compiled(**figures, **count_costs(config, chip, text)), text


def child_environment(chip: Chip | None, folder: Path) -> dict[str, str]:
    """Return the environment of a child that does not search for devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # The child sets its own number of devices, and needs no flags for CPUs. libtpu aborts on most.
    left_out = (
        "--xla_force_host_platform_device_count=",
        "--xla_cpu_",
        "--xla_disable_hlo_passes=simplify-while-loops",
    )
    path = os.environ.get("PYTHONPATH", "")
    libtpu = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {DUMP_FLAGS.format(folder)}".strip()
    return os.environ | {
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(left_out)),
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": libtpu,
        "TPU_SKIP_MDS_QUERY": "1",  # no queries to a cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process fails on its lock file
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # the compile time is reported
        # Only for GPUs: JAX's CUDA plugin warns if it finds no driver.
        "PYTHONPATH": path if chip is None or chip.is_tpu else f"{targets.GPU_FOLDER}:{path}",
    }


def failure(returncode: int, log: str) -> str:
    """Return why a process failed, in one line: its last error, else the last line of its log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    error = re.compile(r"error: |[\w.]+(Error|Exception)\b|F\d+ |.*Check failed")
    errors = [line for line in lines if error.match(line)]
    last = (errors or lines or [f"exit code {returncode}"])[-1].removeprefix("error: ")[:500]
    if returncode > 0:
        return last
    return f"the process stopped with {signal.Signals(-returncode).name}: {last}"


def count_costs(config: utils.Config, chip: Chip | None, text: str) -> dict[str, Any]:
    """Return the fields of Compiled that are counted in a program's text."""
    share = pipeline.branch_share(sharded_model.schedule_of(config))
    mesh = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    by_axes: Counter = Counter()
    rows = []
    for collective, size in sorted(hlo.collectives(text, mesh, share).items()):
        axes = "+".join(collective.axes)
        by_axes[axes] += float(size)
        rows.append(collective._asdict() | {"axes": axes, "bytes": float(size)})
    of_gpu = chip is not None and not chip.is_tpu
    return {
        "kernels": kernel_time.estimate(text, chip, share)._asdict() if of_gpu else None,
        "flops_per_chip": float(hlo.dot_flops(text, share)),
        "model_flops_per_chip": cost.model_flops(cost.Step(config, hardware.platform_of(chip))),
        "collective_bytes_per_chip": dict(by_axes),
        "collectives": rows,
    }


# --- the child ------------------------------------------------------------------------------------


def build(folder: Path, chip_name: str, topology: str) -> None:
    """Compile the step of config.toml in a folder, and write figures and text beside it."""
    import jax

    import memory
    import model
    import train
    from inference import sampling
    from optimizer import learning_rates

    config = cli.load(folder / "config.toml")
    chip, count = hardware.chip_named(chip_name), math.prod(config.mesh.shape)
    devices = targets.devices(chip, topology, count, config.mesh.replica)
    declared, mesh = model.declare(config), train.make_mesh(config, devices)
    state = train.abstract_state(config, declared, mesh)
    arguments = state, sharded_model.abstract_batch(config, mesh), learning_rates(config)
    started = time.perf_counter()
    try:
        compiled = train.jitted_step(config, declared, mesh).lower(*arguments).compile()
        seconds = time.perf_counter() - started
        dumped = [path.read_text(encoding="utf-8") for path in folder.glob("*-hlo.txt")]
        text = max(dumped, key=len, default="") or compiled.as_text()
        others = {"evaluation_bytes": 0, "sampling_bytes": 0}  # with the rest of the state
        size, rest = memory.planned_bytes, memory.bytes_of(state)
        if config.eval.sequences:
            batch = sharded_model.abstract_batch(train.evaluation_config(config), mesh)
            program = train.jitted_evaluation(config, declared, mesh)
            program = program.lower(state.weights, batch).compile()
            others["evaluation_bytes"] = size(program) + rest - memory.bytes_of(state.weights)
        with contextlib.suppress(ConfigError):  # a run trains without samples on such a mesh
            if config.sample.prompts:
                generator = sampling.for_samples(config, mesh, config.train.seq_len, [])
                others["sampling_bytes"] = size(generator.lower(1).compile()) + rest
    # For example a step that exceeds the chip's memory, or a program that this JAX cannot read.
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    plan = compiled.memory_analysis()
    figures = {
        "memory_bytes_per_chip": memory.planned_bytes(compiled),
        "argument_bytes": plan.argument_size_in_bytes,
        "temporary_bytes": plan.temp_size_in_bytes,
        "compile_s": seconds,
        "compiler": targets.compiler_of(chip),
        **others,
    }
    (folder / "compiled.json").write_text(json.dumps(figures), encoding="utf-8")
    (folder / "program.hlo").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    errors.run_command(lambda: build(Path(sys.argv[1]), *sys.argv[2:]))
