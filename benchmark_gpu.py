"""Training steps on one GPU, row by row, for somebody who has it for minutes.

    ./run.sh python benchmark.py gpu                  the rows not measured yet, for 9 minutes
    ./run.sh python benchmark.py gpu dense_1b-full    this row, once `machine` and `check` passed
    ./run.sh python benchmark.py gpu --list           the rows there are
    ./run.sh python benchmark.py gpu --toy            all of it in toy sizes, on whatever is there

machine        versions, and a bfloat16 product's FLOP/s
check          loss and gradients of a small model here against float32 on the CPU
MODEL-REMAT    a step with none, names (all of utils.REMAT_NAMES) or full rematerialisation
MODEL-profile  where the time of its best step goes, by layer and kernel

A row is added to a file of JSON lines when it ends, and is not run again. It runs in a process of
its own: what crashes is one row, and the peak of memory, which jax cannot reset, is that row's. A
row that is stopped when the minutes are over starts anew the next time.
Beside jax, flax, optax, numpy and what these bring, nothing needs to be installed.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import benchmark
import chips
import model
import passes
import train
import utils
import weights
from benchmark import Program, flops_per_token, with_values
from chips import Chip
from metrics import read
from planning import cost, timeline
from utils import GIB, Config

ROOT = Path(__file__).resolve().parent
WARMUP_STEPS, TIMED_STEPS = 2, 8

Record = dict[str, Any]


# --- the rows -------------------------------------------------------------------------------------

MICROBATCHES = 8
MODELS = {"dense_124m": 16, "dense_1b": 8, "moe_1b": 8, "moe_124m": 16}  # sequences of a microbatch
REMAT = {"none": "none", "profile": "none", "names": ",".join(utils.REMAT_NAMES), "full": "full"}
GATES = ("machine", "check")  # where one fails, the others say nothing
# In the order in which they are worth the minutes; all fit 80 GB, by the plan.
ROWS = (*GATES, *(f"{name}-{kind}" for kind in REMAT for name in MODELS))


def config_of(row: str, toy: bool) -> Config:
    """What is trained in a row MODEL-REMAT or MODEL-profile; with --toy it is configs/tiny.toml."""
    name, _, kind = row.rpartition("-")
    config = utils.load(ROOT / "configs" / f"{'tiny' if toy else name}.toml")
    sequences, microbatches = (2, 2) if toy else (MODELS[name] * MICROBATCHES, MICROBATCHES)
    config = with_values(config, model={"compute_dtype": "bfloat16"}, train={"remat": REMAT[kind]})
    return on_one_device(config, sequences, microbatches)


def on_one_device(config: Config, sequences: int, microbatches: int) -> Config:
    return with_values(
        config,
        mesh=benchmark.ONE_DEVICE,
        train={"sequences": sequences, "microbatches": microbatches},
        eval={"sequences": sequences},
    )


# --- measuring, in the process of a row -----------------------------------------------------------


def measure(row: str, toy: bool, folder: Path) -> Iterator[Record]:
    """The row's fields, some as soon as they are known; traces are kept in the folder."""
    device = accelerator(toy)
    chip = chips.chip_of_kind(device.device_kind)
    yield versions(device)
    if row == "machine":
        yield machine(chip, 256 if toy else 8192)
    elif row == "check":
        yield from check(device, toy)
    else:
        config = config_of(row, toy)
        found = cost.predict(config, chip, passes.platform(train.make_mesh(config, [device])))
        yield {
            "model": vars(config.model),
            "train": vars(config.train),
            "parameters": found.parameters,
            "active_parameters": found.active_parameters,
            "attention": found.attention,
            "planned_bytes": found.memory_bytes_per_chip,
            "planned_step_s": found.step_s,
        }
        program = benchmark.compiled(config)
        compiler_bytes = train.planned_bytes(program.step)
        yield {"compile_s": program.compile_s, "compiler_bytes": compiler_bytes}
        yield profile(program, folder / row) if "profile" in row else timed(program, chip)


def accelerator(toy: bool) -> jax.Device:
    """The GPU; with --toy the first device there is."""
    device = jax.devices()[0]
    if not toy and device.platform != "gpu":
        raise ValueError(
            f"benchmark.py gpu needs an NVIDIA GPU, and jax sees {device.device_kind} alone. Use "
            "benchmark.py step on such devices, or --toy to try this program on them."
        )
    return device


def versions(device: jax.Device) -> Record:
    """What a number is to be reported with."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "chip": device.device_kind,
        "driver": smi("driver_version").get("driver_version"),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "cuda": device.client.platform_version,
        "commit": output(git).strip() or None,
    }


def machine(chip: Chip | None, size: int) -> Record:
    """A bfloat16 product of random matrices beside the chip's peak."""
    with watched() as seen:
        rate = benchmark.product_flops_per_s(size, jnp.bfloat16, in_row=20)
    share = f", {rate / chip.flops:.0%} of the peak" if chip else ""
    text = f"{rate / 1e12:.4g} TFLOP/s in {size} x {size} x {size} bfloat16 products{share}"
    return {"flops_per_s": rate, "smi": seen, "text": text}


def timed(program: Program, chip: Chip | None) -> Record:
    """The median step after two that are not counted, and what follows from it."""
    with watched() as seen:
        steps = itertools.islice(program.steps(), WARMUP_STEPS + TIMED_STEPS)
        taken, reports = zip(*steps, strict=True)
    losses = [float(report["stats"].loss) for report in reports]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the loss of these steps is not finite: {losses}")
    step_s = statistics.median(taken[WARMUP_STEPS:])
    rate = program.tokens / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": rate,
        "mfu": chip and rate * flops_per_token(program.config) / chip.flops,
        "mfu_whole_square": chip and rate * flops_per_token(program.config, True) / chip.flops,
        "memory_bytes": train.peak_bytes(program.mesh, program.step)[0],
        "steps_s": taken,
        "losses": losses,
        "smi": seen,
    }


def profile(program: Program, folder: Path) -> Record:
    """Time by layer in one traced step, and the largest kernels in each; the trace is kept."""
    steps = program.steps()
    for _ in range(WARMUP_STEPS):
        next(steps)
    with jax.profiler.trace(folder, create_perfetto_trace=True):
        next(steps)
    file = max(folder.rglob("perfetto_trace.json.gz"))  # the last: folders in it are dated
    text = program.step.as_text()
    taken = timeline.operation_s(file, text)
    timeline.name_layers(file, text)
    shares, largest = timeline.shares(taken), timeline.largest(taken)
    lines = [f"{taken.total():.4g} s of kernels in a step; {file} opens in ui.perfetto.dev"]
    for place, share in shares.items():
        kernels = ", ".join(f"{name} {part:.1%}" for name, part in largest[place].items())
        lines.append(f"  {share:6.1%}  {place:26}{kernels}")
    return {"busy_s": taken.total(), "shares": shares, "kernels": largest, "text": "\n".join(lines)}


# --- the check ------------------------------------------------------------------------------------

# Largest error of a gradient over its norm, weight by weight, and of the loss. Between bfloat16 and
# float32 on one CPU they are 0.026 and 6e-6.
BOUNDS = {"float32": (1e-3, 1e-5), "bfloat16": (0.1, 1e-3)}


def check(device: jax.Device, toy: bool) -> Iterator[Record]:
    """Loss and gradients of a small model on the device against float32 on the CPU.

    In float32 they differ by rounding alone; bfloat16 is what is timed, with kernels of its own.
    """
    config = utils.load(ROOT / "configs/tiny.toml") if toy else benchmark.reference_config()
    config = on_one_device(config, 4, 2)
    # Every token goes to every expert: rounding can choose no other, which would hide an error.
    routed = {"experts_per_token": config.model.experts, "capacity_factor": 1.0}
    config = with_values(config, model=routed | {"compute_dtype": "float32"})
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        start = weights.initialize(model.declare(config), train.make_mesh(config, [cpu]), 0)
    loss, expected = gradients(config, cpu, start)
    lines = []
    for dtype in BOUNDS:
        here = with_values(config, model={"compute_dtype": dtype})
        found_loss, found = gradients(here, device, start)
        off, errors = abs(found_loss / loss - 1), gradient_errors(found, expected)
        yield {f"{dtype}_loss_error": off, f"{dtype}_gradient_errors": errors}
        lines.append(compared(dtype, off, errors))
    yield {"text": "\n  ".join(["against float32 on the CPU", *lines])}


def compared(dtype: str, loss_error: float, errors: dict[str, float]) -> str:
    """The errors in a line.

    Raises  ValueError where they are not within BOUNDS, or are not numbers.
    """
    gradient_bound, loss_bound = BOUNDS[dtype]
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    text = f"{dtype}: loss off by {loss_error:.1e}, gradients by {errors[worst]:.1e} ({worst})"
    if not (errors[worst] < gradient_bound and loss_error < loss_bound):
        raise ValueError(
            f"{text}, where {loss_bound:.0e} and {gradient_bound:.0e} are allowed: this device "
            "does not compute what the CPU does in float32. Nothing measured counts until then."
        )
    return text


def gradients(
    config: Config, device: jax.Device, start: model.Transformer
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradient of each weight by its name, on the device."""
    declared, mesh = model.declare(config), train.make_mesh(config, [device])
    with jax.default_device(device):
        run = jax.jit(passes.loss_and_gradients(config, declared, mesh))
        w = jax.device_put(jax.device_get(start), device)
        grads, stats = jax.device_get(run(w, benchmark.random_batch(config, mesh), jnp.int32(0)))
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
    }
    return float(stats.loss), named


def gradient_errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """|found - expected| / |expected| by weight; 0 where both are 0, as of the router's bias."""
    errors = {}
    for name, true in expected.items():
        off, norm = float(np.linalg.norm(found[name] - true)), float(np.linalg.norm(true))
        errors[name] = off / norm if norm else math.inf if off else 0.0
    return errors


# --- nvidia-smi -----------------------------------------------------------------------------------

SMI_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")  # MHz, W


def smi(*fields: str) -> dict[str, str]:
    """What is read of the first GPU that jax may use; nothing where there is no nvidia-smi."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = f"--query-gpu={','.join(fields)}"
    text = output(["nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits"])
    return dict(zip(fields, text.strip().split(", "), strict=True)) if text else {}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Fills the given record, at its end, with medians of what nvidia-smi read meanwhile."""
    found, rows, over = {}, [], threading.Event()

    def look() -> None:
        while not over.is_set():
            rows.append(smi(*SMI_FIELDS))
            over.wait(0.2)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
    for name in SMI_FIELDS:
        cells = [row.get(name, "") for row in rows]
        if numbers := [float(cell) for cell in cells if re.fullmatch(r"[\d.]+", cell)]:
            found[name] = statistics.median(numbers)


def output(command: list[str]) -> str:
    """What a command prints; nothing where it is not there, or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return run.stdout
    return ""


# --- a row in a process of its own ----------------------------------------------------------------


def run_row(row: str, toy: bool, folder: Path, limit_s: float) -> Record:
    """Runs a row in a child process; what it measured, and how it ended.

    status  ok; memory: it did not fit; time: it was stopped after limit_s; failed: anything else.
    folder  gets ROW.log and ROW.jsonl, what it had measured until then.
    """
    told, log = folder / f"{row}.jsonl", folder / f"{row}.log"
    told.write_text("")
    command = [sys.executable, str(ROOT / "benchmark.py"), "gpu", row, "--child", str(told)]
    command += ["--toy"] * toy
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ  # as run.sh gives it
    if given.get("JAX_PLATFORMS") and "cpu" not in given["JAX_PLATFORMS"].split(","):
        given["JAX_PLATFORMS"] += ",cpu"  # for the check
    if "profile" in row:  # kernels in CUDA graphs do not say which operation they are of
        given["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    code = None
    with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        run = subprocess.run(command, stdout=file, stderr=file, env=given, timeout=limit_s)
        code = run.returncode
    found = {name: value for part in read(told) for name, value in part.items()}
    return found | ending(code, log.read_text(errors="replace"), limit_s)


def ending(code: int | None, log: str, limit_s: float) -> Record:
    """The status of a child, and why.

    code  its exit code, negative for a signal; None where it was stopped.
    """
    if code == 0:
        return {"status": "ok"}
    if code is None:
        return {"status": "time", "error": f"stopped after {limit_s:.0f} s"}
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |[\w.]+(Error|Exception)\b", line)]
    last = (errors or lines or ["nothing in its log"])[-1]
    if re.search("RESOURCE_EXHAUSTED|out of memory", last, re.IGNORECASE):
        return {"status": "memory", "error": last}
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return {"status": "failed", "error": f"{how}: {last}"}


# --- the session ----------------------------------------------------------------------------------


def session(flags: argparse.Namespace, run: Callable[..., Record] = run_row) -> list[str]:
    """Runs rows until they are done or the minutes are over; the rows that are left.

    Raises  ValueError where `machine` or `check` failed, unless forced.
    """
    deadline = time.monotonic() + 60 * flags.minutes
    gpu, folder = smi("name").get("name"), flags.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    records = read(flags.out) if flags.out.exists() else []
    kept = [r for r in records if (r["toy"], r["gpu"]) == (flags.toy, gpu)]
    done = {r["row"]: r for r in kept if r["status"] in ("ok", "memory") and not flags.again}
    left = []
    print(HEADER, flush=True)
    for row in (row for row in ROWS if row in (*GATES, *flags.names)):
        record, limit_s = done.get(row), deadline - time.monotonic()
        if not record and (left or limit_s <= 0):
            left.append(row)
            continue
        if not record:
            started = time.time()
            record = {"row": row, "toy": flags.toy, "gpu": gpu, "started": round(started)}
            record |= run(row, flags.toy, folder, limit_s)
            record["wall_s"] = time.time() - started
            add(flags.out, record)
        show(record)
        if record["status"] == "time":
            left.append(row)
        elif row in GATES and record["status"] != "ok" and not flags.force:
            raise ValueError(
                f"row {row} did not pass, and what follows would mean nothing; see "
                f"{folder / row}.log. Mend that, or go on with --force."
            )
    return left


def add(file: Path, record: Record) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


# --- the command line -----------------------------------------------------------------------------

HEADER = (
    "row                  step s  tokens/s    MFU square   GiB  plan compiler compile s   MHz     W"
)


def show(record: Record) -> None:
    """Prints a row."""
    r = {"planned_bytes": math.nan} | record
    if r["status"] == "memory":
        need = r["planned_bytes"] / GIB
        text = f"out of memory: the plan said it needs {need:.1f} GiB. {r['error']}"
    elif r["status"] != "ok":
        text = f"{r['status']}: {r['error']}"
    elif "text" in r:
        text = r["text"]
    else:
        gib = [r[f"{name}_bytes"] / GIB for name in ("memory", "planned", "compiler")]
        mfu = [r[name] or math.nan for name in ("mfu", "mfu_whole_square")]
        mhz, watts = (r["smi"].get(name, math.nan) for name in ("clocks.sm", "power.draw"))
        text = (
            f"{r['step_s']:8.4f} {r['tokens_per_s']:9,.0f} {mfu[0]:6.1%} {mfu[1]:6.1%}"
            f" {gib[0]:5.1f} {gib[1]:5.1f} {gib[2]:8.1f} {r['compile_s']:9.0f}"
            f" {mhz:5.0f} {watts:5.0f}"
        )
    print(f"{r['row']:18} {text}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=ROWS, metavar="ROW", help="all if not given")
    parser.add_argument("--list", action="store_true", help="print the rows, in their order")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which it has ended; 9")
    parser.add_argument("--out", type=Path, help="records; runs/benchmark/gpu.jsonl or toy.jsonl")
    parser.add_argument("--again", action="store_true", help="also run rows that are in the file")
    parser.add_argument("--force", action="store_true", help="go on where the check failed")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on whatever device is there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # a row's process: its file
    flags = parser.parse_args(arguments)
    flags.out = flags.out or Path("runs/benchmark", "toy.jsonl" if flags.toy else "gpu.jsonl")
    if unknown := set(flags.names) - set(ROWS):
        raise ValueError(
            f"there is no row {', '.join(sorted(unknown))}. Use some of {', '.join(ROWS)}."
        )
    return flags


def main(arguments: list[str]) -> None:
    """benchmark.py gpu."""
    flags = parse(arguments)
    if flags.list:
        print("\n".join(ROWS))
    elif flags.child:
        for part in measure(flags.names[0], flags.toy, flags.child.parent):
            add(flags.child, part)
    else:
        left = session(flags)
        print(f"records: {flags.out}; logs and traces: {flags.out.with_suffix('')}/")
        if left:
            again = " ".join(a for a in arguments if a != "--again")
            print(f"left, for want of time: {' '.join(left)}")
            print(f"go on with: ./run.sh python benchmark.py gpu {again}".rstrip())
