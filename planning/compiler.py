"""Compile the training step of train.py on a machine without its devices.

The devices are a TPU slice or GPUs (planning/targets.py), or simulated devices of the CPU. A child
process compiles, because a compiler that aborts ends its process: `compile_step` starts
`python -m planning.compiler FOLDER CHIP TOPOLOGY`.
"""

import json
import math
import os
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
from planning import cost, hlo, targets
from planning.results import Compiled
from runtime import cli, errors
from utils import ConfigError

# Makes libtpu write its own text of a program, for programs that JAX cannot read back.
DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false "
    "--xla_jf_dump_llo_pass_label_regex=NOTHING"
)


# --- the parent -----------------------------------------------------------------------------------


def compile_step(config: utils.Config, chip: Chip | None, topology: str) -> tuple[Compiled, str]:
    """Return the compiled step of a config, and the text of the program.

    chip       None for as many simulated CPU devices as the mesh has.
    topology   sides of a TPU slice, as 2x4x4.

    Raises  ConfigError for what the user can fix, and for a compiler that failed or stopped.
    """
    targets.check(chip)
    with tempfile.TemporaryDirectory() as name:
        folder, arguments = Path(name), [name, chip.name if chip else "cpu", topology]
        (folder / "config.toml").write_text(cli.to_toml(config), encoding="utf-8")
        run_child(arguments, targets.environment(chip))
        if not (folder / "program.hlo").exists():
            # JAX cannot read back some programs of a newer libtpu: libtpu writes its own text.
            dump = DUMP_FLAGS.format(folder=folder / "dump")
            flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}"
            run_child(arguments, {"LIBTPU_INIT_ARGS": flags.strip()})
        text = (folder / "program.hlo").read_text(encoding="utf-8")
        found = json.loads((folder / "compiled.json").read_text(encoding="utf-8"))
    return Compiled(**found, **count_costs(config, chip, text)), text


def run_child(arguments: list[str], environment: dict[str, str]) -> None:
    """Call build(*arguments) in a child process.

    Raises  ConfigError with the child's error, if it fails.
    """
    label = ":".join(arguments[1:]).strip(":")
    with Console(stderr=True).status(f"compiling for {label}"):
        child = subprocess.run(
            [sys.executable, "-m", "planning.compiler", *arguments],
            cwd=targets.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=child_environment() | environment,
        )
    if child.returncode:
        error = failure(child.returncode, child.stdout)
        raise ConfigError(f"compiling for {label} failed: {error}")


def child_environment() -> dict[str, str]:
    """Return the environment of a child that does not search for devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # The child sets its own number of devices, and needs no flags for CPUs. libtpu aborts on most.
    left_out = (
        "--xla_force_host_platform_device_count=",
        "--xla_cpu_",
        "--xla_disable_hlo_passes=simplify-while-loops",
    )
    return os.environ | {
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(left_out)),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no queries to a cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process fails on its lock file
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # the compile time is reported
    }


def failure(returncode: int, log: str) -> str:
    """Return why a child failed, in one line: its error, or the last line before it stopped."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if reported := [line for line in lines if line.startswith("error: ")]:
        return reported[-1].removeprefix("error: ")
    if returncode < 0:
        failed = [line for line in lines if "Check failed" in line or line.startswith("F")]
        last = (failed or lines or [""])[-1]
        return f"the compiler stopped with {signal.Signals(-returncode).name}: {last[:300]}"
    return (lines or [f"exit code {returncode}"])[-1][:500]


def count_costs(config: utils.Config, chip: Chip | None, text: str) -> dict[str, Any]:
    """Return the fields of Compiled that are counted in a program's text."""
    share = pipeline.branch_share(sharded_model.schedule_of(config))
    mesh = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    by_axes: Counter = Counter()
    rows = []
    for found, size in sorted(hlo.collectives(text, mesh, share).items()):
        axes = "+".join(found.axes)
        by_axes[axes] += float(size)
        rows.append(found._asdict() | {"axes": axes, "bytes": float(size)})
    return {
        "flops_per_chip": float(hlo.dot_flops(text, share)),
        "model_flops_per_chip": cost.model_flops(cost.Step(config, hardware.platform_of(chip))),
        "collective_bytes_per_chip": dict(by_axes),
        "collectives": rows,
    }


# --- the child ------------------------------------------------------------------------------------


def build(folder: Path, chip_name: str, topology: str) -> None:
    """Compile the step of config.toml in a folder, and write figures and text beside it."""
    import jax

    import model
    import train

    config = cli.load(folder / "config.toml")
    chip, count = hardware.chip_named(chip_name), math.prod(config.mesh.shape)
    devices = targets.devices(chip, topology, count, config.mesh.replica)
    declared, mesh = model.declare(config), train.make_mesh(config, devices)
    state = train.abstract_state(config, declared, mesh)
    arguments = state, sharded_model.abstract_batch(config, mesh), train.abstract_schedule(mesh)
    started = time.perf_counter()
    try:
        compiled = train.jitted_step(config, declared, mesh).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:  # such as a step that exceeds the chip's memory
        raise ConfigError(str(error).splitlines()[0]) from None
    seconds = time.perf_counter() - started
    figures, plan = folder / "compiled.json", compiled.memory_analysis()
    found = {
        "memory_bytes_per_chip": train.planned_bytes(compiled),
        "argument_bytes": plan.argument_size_in_bytes,
        "temporary_bytes": plan.temp_size_in_bytes,
        "compile_s": seconds,
        "compiler": targets.compiler_of(chip),
    }
    if not figures.exists():  # a second compilation, which writes a dump, is not timed
        figures.write_text(json.dumps(found), encoding="utf-8")
    if text := program_text(compiled, folder / "dump"):
        (folder / "program.hlo").write_text(text, encoding="utf-8")


def program_text(compiled: Any, dump: Path) -> str | None:
    """Return the optimized program; None if JAX cannot read it and libtpu wrote no dump."""
    import jax

    if dumped := list(dump.glob("*-hlo.txt")):
        return max((path.read_text(encoding="utf-8") for path in dumped), key=len)
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None


if __name__ == "__main__":
    errors.run_command(lambda: build(Path(sys.argv[1]), *sys.argv[2:]))
