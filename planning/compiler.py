"""The training step as its compiler builds it, on a machine without the devices.

For a TPU or a GPU that is not here (planning/targets.py), or pretended devices of a CPU. The step
is the one of train.py. It is compiled in a child process, for a compiler that aborts takes its
process with it: `compile_step` starts the child, `python -m planning.compiler REQUEST`.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chips
import faults
import utils
from chips import Chip
from planning import targets

# libtpu's own text of a program, for what jax's text of it cannot be made from.
DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false "
    "--xla_jf_dump_llo_pass_label_regex=NOTHING"
)


@dataclass(frozen=True)
class Compiled:
    """What the compiler planned for one chip."""

    memory_bytes_per_chip: int  # arguments + temporaries + results that are not arguments
    argument_bytes: int
    temporary_bytes: int
    program_bytes: int  # of the program itself, beside the above
    flops_per_chip: float  # of matrix products, loops counted with their trips
    model_flops_per_chip: float  # as executed without waste: see cost.model_flops
    collective_bytes_per_chip: dict[str, float]  # by mesh axes, by the size of results
    collectives: list[dict[str, Any]]  # the same, a row for each hlo.Collective
    memory_traffic_bytes: float | None  # of GPUs: what kernels read and write
    custom_calls: dict[str, float]  # how often each opaque kernel runs
    compile_s: float
    compiler: str


# --- the parent -----------------------------------------------------------------------------------


def compile_step(
    config: utils.Config, chip: Chip | None, topology: str, hlo_file: Path | None = None
) -> tuple[Compiled, str]:
    """The compiled step of this config, and the text of the program.

    chip       None for the CPU's devices, of which as many are pretended as the mesh has.
    topology   sides of a TPU's slice, as 2x4x4.
    hlo_file   also keep the text there.

    Raises  ValueError for what the user can mend, and for a compiler that failed or stopped.
    """
    targets.check(chip)
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        name = f"{chip.name}:{topology}".strip(":") if chip else "cpu"
        (Path(folder) / "config.toml").write_text(utils.to_toml(config))
        asked = {"chip": chip.name if chip else "cpu", "topology": topology}
        request.write_text(json.dumps(asked))
        run_child(request, name, targets.environment(chip))
        if not (Path(folder) / "program.hlo").exists():
            # jax cannot read back some programs of a newer libtpu: let that write its own text.
            dump = Path(folder) / "dump"
            flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {DUMP_FLAGS.format(folder=dump)}"
            run_child(request, f"{name}, again for its text", {"LIBTPU_INIT_ARGS": flags.strip()})
        text = (Path(folder) / "program.hlo").read_text()
        found = json.loads((Path(folder) / "compiled.json").read_text())
    if hlo_file:
        hlo_file.parent.mkdir(parents=True, exist_ok=True)
        hlo_file.write_text(text)
    return Compiled(**found, **counted(config, chip, text)), text


def run_child(request: Path, name: str, environment: dict[str, str]) -> None:
    """Compile in a child process, with the seconds it takes shown meanwhile.

    Raises  ValueError with what it said, if it fails.
    """
    from rich.console import Console

    command = [sys.executable, "-m", "planning.compiler", str(request)]
    log = request.with_name("log")
    with log.open("w") as out:
        child = subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parent.parent,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment() | environment,
        )
        try:
            console = Console(stderr=True)
            with console.status(f"compiling for {name}") as status:
                started = time.perf_counter()
                while child.poll() is None:
                    time.sleep(0.2)
                    status.update(f"compiling for {name}: {time.perf_counter() - started:.0f} s")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode:
        raise ValueError(f"compiling for {name} failed: {reason(child.returncode, log)}")


def child_environment() -> dict[str, str]:
    """The environment in which nothing looks for a device: compilers are named."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    count = "--xla_force_host_platform_device_count="  # the child pretends as many as it needs
    return os.environ | {
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(count)),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud's metadata server who we are
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process fails on its lock file
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # the time to compile is reported
    }


def reason(returncode: int, log: Path) -> str:
    """Why a child ended, in a line: what it raised, or the last line before it was stopped."""
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    if returncode < 0:
        failed = [line for line in lines if "Check failed" in line or line.startswith("F")]
        last = (failed or lines or [""])[-1]
        return f"the compiler stopped with {signal.Signals(-returncode).name}: {last[:300]}"
    return (lines or [f"exit code {returncode}"])[-1][:500]


def counted(config: utils.Config, chip: Chip | None, text: str) -> dict[str, Any]:
    """What is counted in a program's text."""
    import passes
    import pipeline
    from planning import cost, hlo

    share = pipeline.branch_share(passes.schedule_of(config))
    mesh = dict(zip(utils.MESH_AXES, config.mesh.shape, strict=True))
    by_axis: dict[str, float] = {}
    rows = []
    for found, size in sorted(hlo.collectives(text, mesh, share).items()):
        axes = "+".join(found.axes)
        by_axis[axes] = by_axis.get(axes, 0.0) + float(size)
        rows.append(found._asdict() | {"axes": axes, "bytes": float(size)})
    through = sum(hlo.memory_bytes(text, share).values()) if chip and not chip.is_tpu else None
    return {
        "flops_per_chip": float(hlo.dot_flops(text, share)),
        "model_flops_per_chip": cost.model_flops(cost.Step(config, chips.platform_of(chip))),
        "collective_bytes_per_chip": by_axis,
        "collectives": rows,
        "memory_traffic_bytes": through and float(through),
        "custom_calls": {k: float(n) for k, n in hlo.custom_calls(text, share).items()},
    }


# --- the child ------------------------------------------------------------------------------------


def build(request: Path) -> None:
    """Compile what the request asks for; the figures and the text are left beside it."""
    folder = request.parent
    config = utils.load(folder / "config.toml")
    asked = json.loads(request.read_text())
    chip = chips.chip_named(asked["chip"])
    devices = targets.devices(
        chip, asked["topology"], math.prod(config.mesh.shape), config.mesh.replica
    )

    import jax

    import model
    import train

    declared, mesh = model.declare(config), train.make_mesh(config, devices)
    started = time.perf_counter()
    shapes = train.abstract_state(config, declared, mesh), train.abstract_batch(config, mesh)
    try:
        compiled = train.jitted_step(config, declared, mesh).lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:  # as where the chip has too little memory
        raise ValueError(str(error).splitlines()[0]) from None
    seconds = time.perf_counter() - started
    plan = compiled.memory_analysis()
    found = {
        "memory_bytes_per_chip": train.planned_bytes(compiled),
        "argument_bytes": plan.argument_size_in_bytes,
        "temporary_bytes": plan.temp_size_in_bytes,
        "program_bytes": plan.generated_code_size_in_bytes,
        "compile_s": seconds,
        "compiler": targets.compiler_of(chip),
    }
    figures = folder / "compiled.json"
    if not figures.exists():  # of two compilations the first is timed: the other writes a dump
        figures.write_text(json.dumps(found))
    text = program_text(compiled, folder / "dump")
    if text:
        (folder / "program.hlo").write_text(text)


def program_text(compiled: Any, dump: Path) -> str | None:
    """The optimized program; None where jax cannot read it and nothing was dumped."""
    dumped = sorted(dump.glob("*-hlo.txt")) if dump.is_dir() else []
    if dumped:
        return max((path.read_text() for path in dumped), key=len)
    import jax

    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None


if __name__ == "__main__":
    faults.command_line(lambda: build(Path(sys.argv[1])))
