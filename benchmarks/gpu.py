"""Measure training steps of four models on one GPU, row by row.

    ./run.sh python benchmark.py gpu                  the rows not measured yet, for 9.5 minutes
    ./run.sh python benchmark.py gpu dense_1b-full    this row, after `machine` and `check`
    ./run.sh python benchmark.py gpu --list           all rows in their order, and what each decides
    ./run.sh python benchmark.py gpu --toy            all rows in toy sizes, on any device

machine  versions, and the FLOP/s of a bfloat16 product.
check    loss and gradients of a small model, compared with float32 on the CPU.

The other rows are MODEL-VARIANT: steps with the tokens of configs/MODEL.toml. `none` has no
rematerialization. The others are `none` with one change: that of SETTINGS, N sequences in a
microbatch (microbatchN), or Triton's matrix products in place of cuBLAS's (triton). `profile` is
the time of a step of `none` by layer and kernel.

The first rows decide most. Each has a limit, which fits nine of them into 9.5 minutes. A row that
its limit stops starts anew in the next call, and the last row may take all the time that is left. A
finished row is appended to a file of JSON lines and does not run again. Each row runs in
its own process: a crash ends one row only, and the peak of memory, which JAX cannot reset, is that
of the row. The rows need no package beyond jax, flax, optax and their dependencies.

The table has the step time, the MFU and the memory beside those of the plan (planning/cost.py), and
the memory that the compiler planned. All MFU are shares of the peak in bfloat16.
"""

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hardware
import memory
import model
import sharded_model
import train
import utils
import weights
from benchmarks import common
from benchmarks.common import ROOT, Program
from hardware import Chip
from planning import compiler, cost, timeline
from planning.results import Prediction
from runtime import cli, jsonl, provenance
from utils import GIB, Config, ConfigError, changed

WARMUP_STEPS, TIMED_STEPS = 2, 8
TIMED_S, LEAST_STEPS = 15, 4  # slow steps are fewer: they stop after this time, but not before 4
# Sequences of a microbatch. The rows -microbatchN have those that the first measured steps had.
MODELS = {"dense_124m": 64, "dense_1b": 32, "moe_1b": 16, "moe_124m": 32}
SETTINGS = {
    "scanned": {"train.layers": "scanned"},
    "fp8": {"model.matmul_dtype": "float8"},
    "dropless": {"model.capacity_factor": 0.0},
    "capacity": {"model.capacity_factor": 1.5},
    "names": {"train.remat": ",".join(utils.REMAT_NAMES)},
    "full": {"train.remat": "full"},
}
XLA_FLAGS = {
    "profile": "--xla_gpu_enable_command_buffer=",  # kernels in CUDA graphs lack operation names
    "triton": "--xla_gpu_enable_triton_gemm=true",
}
GATES = ("machine", "check")  # a failure makes the other rows meaningless


class Row(NamedTuple):
    """What a row decides, and how long it may take while other rows follow.

    Nothing follows without `machine` and `check`, so they may take longer.
    """

    decides: str
    limit_s: int = 120


# The most valuable rows first. All fit 80 GB by the plan.
ROWS = {
    "machine": Row("does the GPU reach its usual FLOP/s?", 20),
    "check": Row("does a step compute what the CPU does? If not, nothing else counts", 45),
    "dense_1b-none": Row("MFU of a large dense model beside the plan", 75),
    "dense_124m-none": Row("MFU of a small dense model beside the plan", 55),
    "moe_1b-none": Row("MFU of a mixture of experts beside the plan", 75),
    "dense_1b-scanned": Row("what unrolled layers gain: compare with dense_1b-none", 75),
    "dense_1b-fp8": Row("what FP8 products gain: compare with dense_1b-none", 75),
    "moe_1b-dropless": Row("grouped experts: compare with batched ones, moe_1b-none", 75),
    "dense_1b-profile": Row("the largest thing that is not a matrix product, dense", 75),
    "moe_1b-profile": Row("the same with experts"),
    "dense_1b-triton": Row("whether cuBLAS's products are faster: compare with dense_1b-none"),
    "dense_1b-microbatch8": Row("what large microbatches gain: compare with dense_1b-none (32)"),
    "dense_124m-microbatch16": Row("the same: compare with dense_124m-none (64)"),
    "moe_1b-microbatch8": Row("the same: compare with moe_1b-none (16)"),
    "dense_124m-fp8": Row("what FP8 products gain: compare with dense_124m-none"),
    "moe_1b-scanned": Row("what unrolled layers gain: compare with moe_1b-none"),
    "moe_124m-none": Row("MFU of a small mixture of experts beside the plan"),
    "moe_124m-capacity": Row("batched experts: compare with grouped ones, moe_124m-none"),
    "dense_1b-full": Row("what recomputing all costs: compare with dense_1b-none"),
    "dense_1b-names": Row("what saving every named value gains: compare with dense_1b-full"),
    "moe_1b-full": Row("what recomputing all costs: compare with moe_1b-none"),
    "moe_1b-names": Row("what saving every named value gains: compare with moe_1b-full"),
}

Record = dict[str, Any]


def config_of(row: str, toy: bool) -> Config:
    """Return the config of a row MODEL-VARIANT, or a toy one."""
    name, _, variant = row.rpartition("-")
    config = toy_config() if toy else cli.load(ROOT / "configs" / f"{name}.toml")
    former = re.fullmatch(r"microbatch(\d+)", variant)
    sequences = 2 if toy else config.train.global_batch_size
    microbatches = 2 if toy else sequences // (int(former[1]) if former else MODELS[name])
    # Unrolled, so that a step that does not fit is out of memory, and not another row's.
    values = {"model.compute_dtype": "bfloat16", "train.remat": "none", "train.layers": "unrolled"}
    values |= SETTINGS.get(variant, {})
    return on_one_device(changed(config, values), sequences, microbatches)


def toy_config() -> Config:
    """Return a smaller configs/tiny.toml, so that each row takes seconds."""
    config = cli.load(ROOT / "configs/tiny.toml")
    small = {"model.num_hidden_layers": 2 * config.model.decoder_sparse_step, "train.seq_len": 32}
    small |= {"model.capacity_factor": 1.5}  # as the measured models have
    return changed(config, small | {"optimizer.name": "adamw", "optimizer.lr": 1e-3})


def on_one_device(config: Config, sequences: int, microbatches: int) -> Config:
    sizes = {"train.global_batch_size": sequences, "train.microbatches": microbatches}
    return changed(config, common.ONE_DEVICE | sizes | {"eval.sequences": sequences})


# --- measuring, in the process of a row -----------------------------------------------------------


def measure(row: str, toy: bool, folder: Path) -> Iterator[Record]:
    """Yield the fields of a row as soon as they are known. Traces stay in the folder."""
    device = accelerator(toy)
    chip = hardware.chip_of_kind(device.device_kind)
    driver, cuda = smi_value("driver_version"), device.client.platform_version
    yield {"chip": device.device_kind, "driver": driver, "cuda": cuda}
    yield provenance.describe_start(step=0)
    if row == "machine":
        yield machine(chip, 256 if toy else 8192)
    elif row == "check":
        yield from check(device, toy)
    else:
        config = config_of(row, toy)
        platform = sharded_model.platform(train.make_mesh(config, [device]))
        plan = cost.predict(config, chip, platform)
        planned = {"planned_bytes": plan.memory_bytes_per_chip, "planned_step_s": plan.step_s}
        planned |= {"planned_mfu": plan.chip and plan.mfu(plan.step_s)}
        yield planned | {"attention": plan.attention}
        program = common.compile_step(config)
        compiler_bytes = memory.planned_bytes(program.step)
        yield {"compile_s": program.compile_s, "compiler_bytes": compiler_bytes}
        yield profile(program, folder / row) if "profile" in row else time_steps(program, plan)


def accelerator(toy: bool) -> jax.Device:
    """Return the GPU, or with --toy the first device."""
    device = jax.devices()[0]
    if not toy and device.platform != "gpu":
        raise ConfigError(
            f"benchmark.py gpu needs an NVIDIA GPU, and jax finds only {device.device_kind}. Use "
            "benchmark.py step on such devices, or try this benchmark with --toy."
        )
    return device


def machine(chip: Chip | None, size: int) -> Record:
    """Measure products of random bfloat16 matrices."""
    with monitor() as medians:
        rate = common.matmul_flops_per_s(size, jnp.bfloat16, in_flight=20)
    share = f", {rate / chip.flops:.0%} of the peak" if chip else ""
    text = f"{rate / 1e12:.4g} TFLOP/s in {size} x {size} x {size} bfloat16 products{share}"
    return {"flops_per_s": rate, "smi": medians, "text": text}


def time_steps(program: Program, plan: Prediction) -> Record:
    """Measure the median step after the warm-up steps. Raises ConfigError for non-finite losses."""
    seconds, losses = [], []
    with monitor() as medians:
        for taken, report in itertools.islice(program.steps(), WARMUP_STEPS + TIMED_STEPS):
            seconds.append(taken)
            losses.append(float(report["stats"].loss))
            timed = seconds[WARMUP_STEPS:]
            if len(timed) >= LEAST_STEPS and sum(timed) > TIMED_S:
                break
    if not all(map(math.isfinite, losses)):
        raise ConfigError(f"the loss of these steps is not finite: {losses}")
    step_s = statistics.median(timed)
    return {
        "step_s": step_s,
        "tokens_per_s": plan.tokens_per_s(step_s),
        "mfu": plan.chip and plan.mfu(step_s),
        "memory_bytes": memory.peak_bytes(program.mesh, program.step)[0],
        "steps_s": seconds,
        "losses": losses,
        "smi": medians,
    }


def profile(program: Program, folder: Path) -> Record:
    """Trace one step; return the time by layer and the largest kernels of each layer."""
    steps = program.steps()
    for _ in range(WARMUP_STEPS):
        next(steps)
    with jax.profiler.trace(folder, create_perfetto_trace=True):
        next(steps)
    file = max(folder.rglob("perfetto_trace.json.gz"))  # the newest: its folders are dated
    taken = timeline.name_layers(file, program.step.as_text())
    lines = [f"{taken.total():.4g} s of kernels in a step; open {file} in ui.perfetto.dev"]
    shares, kernels = {}, {}
    for layer, parts in timeline.shares(taken).items():
        shares[layer], kernels[layer] = sum(parts.values()), dict([*parts.items()][:3])
        largest = ", ".join(f"{name} {part:.1%}" for name, part in kernels[layer].items())
        lines.append(f"  {shares[layer]:6.1%}  {layer:26}{largest}")
    return {"busy_s": taken.total(), "shares": shares, "kernels": kernels, "text": "\n".join(lines)}


# --- the check ------------------------------------------------------------------------------------

# Largest allowed error of a weight's gradient relative to its norm, and of the loss. On one CPU,
# bfloat16 differs from float32 by 0.026 and 1e-5, and FP8 products by 0.2 and 4e-5.
BOUNDS = {"float32": (1e-3, 1e-5), "bfloat16": (0.1, 1e-3), "float8": (0.3, 1e-2)}
# Dropless experts have their kernel in bfloat16. No capacity drops a token either.
CHECKED = {
    "float32": {},
    "bfloat16": {"model.compute_dtype": "bfloat16", "model.capacity_factor": 0.0},
}
CHECKED["float8"] = CHECKED["bfloat16"] | {"model.matmul_dtype": "float8"}


def check(device: jax.Device, toy: bool) -> Iterator[Record]:
    """Compare loss and gradients of a small model on the device with float32 on the CPU.

    In float32 they differ by rounding only. bfloat16 is what is timed, with its own kernels, and
    with FP8 products where the device has them.
    """
    config = on_one_device(toy_config() if toy else common.reference_config(), 4, 2)
    # Every token uses every expert: otherwise rounding could change the routing and hide an error.
    all_experts = {"model.num_experts_per_tok": config.model.n_routed_experts}
    all_experts |= {"model.capacity_factor": 1.0, "model.compute_dtype": "float32"}
    config = changed(config, all_experts)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        initial = weights.initialize(model.declare(config), train.make_mesh(config, [cpu]), 0)
    expected, lines = gradients(config, cpu, initial), ["against float32 on the CPU"]
    chip, platform = hardware.chip_of_kind(device.device_kind), hardware.platform_of_device(device)
    for dtype, values in CHECKED.items():
        typed = changed(config, values)
        try:
            hardware.uses_float8(typed, platform, chip)
        except ConfigError as error:
            lines.append(str(error))
            continue
        errors = relative_errors(gradients(typed, device, initial), expected)
        loss_error = errors.pop("loss")
        yield {f"{dtype}_loss_error": loss_error, f"{dtype}_gradient_errors": errors}
        lines.append(check_errors(dtype, loss_error, errors))
    yield {"text": "\n  ".join(lines)}


def check_errors(dtype: str, loss_error: float, errors: dict[str, float]) -> str:
    """Describe the errors in a line. Raises ConfigError for nan and for errors beyond BOUNDS."""
    gradient_bound, loss_bound = BOUNDS[dtype]
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    text = f"{dtype}: loss off by {loss_error:.1e}, gradients by {errors[worst]:.1e} ({worst})"
    if not (errors[worst] < gradient_bound and loss_error < loss_bound):
        raise ConfigError(
            f"{text}, where {loss_bound:.0e} and {gradient_bound:.0e} are allowed: this device "
            "does not compute what the CPU does in float32. Fix this before you measure."
        )
    return text


def gradients(config: Config, device: jax.Device, initial: model.Transformer) -> dict[str, Any]:
    """Return the gradient of each weight by its name, and the loss."""
    declared, mesh = model.declare(config), train.make_mesh(config, [device])
    with jax.default_device(device):
        loss = sharded_model.loss_and_gradients(config, declared, mesh)
        run = jax.jit(loss, compiler_options=train.compiler_options(mesh))
        w = jax.device_put(jax.device_get(initial), device)
        grads, stats = jax.device_get(run(w, common.random_batch(config, mesh), jnp.int32(0)))
    trained = weights.trained(declared, declared)
    names = [declaration.name for declaration in jax.tree.leaves(trained)]
    return dict(zip(names, jax.tree.leaves(grads), strict=True)) | {"loss": stats.loss}


def relative_errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return |found - expected| / |expected| by name; 0 if both are 0."""
    errors = {}
    for name, true in expected.items():
        error, norm = float(np.linalg.norm(found[name] - true)), float(np.linalg.norm(true))
        errors[name] = error / norm if norm else math.inf if error else 0.0
    return errors


# --- nvidia-smi -----------------------------------------------------------------------------------

SMI_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")  # MHz, W


def smi(*fields: str, loop_ms: int = 0) -> subprocess.Popen:
    """Start a query of the first GPU that jax may use: a line of values, or one per `loop_ms`."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}"]
    command += ["--format=csv,noheader,nounits", *[f"--loop-ms={loop_ms}"] * bool(loop_ms)]
    found = command if shutil.which("nvidia-smi") else ["true"]  # which prints nothing
    return subprocess.Popen(found, stdout=subprocess.PIPE, text=True)


def smi_value(field: str) -> str | None:
    return smi(field).communicate()[0].strip() or None


@contextlib.contextmanager
def monitor() -> Iterator[dict[str, float]]:
    """Yield a dictionary that has the medians of SMI_FIELDS after the block."""
    medians, sampling = {}, smi(*SMI_FIELDS, loop_ms=200)
    try:
        yield medians
    finally:
        sampling.terminate()
        rows = [line.split(", ") for line in sampling.communicate()[0].splitlines()]
    # The last line may be cut, and a GPU may not know a value.
    for name, cells in zip(SMI_FIELDS, itertools.zip_longest(*rows, fillvalue=""), strict=False):
        if numbers := [float(cell) for cell in cells if re.fullmatch(r"[\d.]+", cell)]:
            medians[name] = statistics.median(numbers)


# --- a row in its own process ---------------------------------------------------------------------


def run_row(row: str, toy: bool, folder: Path, limit_s: float) -> Record:
    """Run a row in a child process; return its fields and its status.

    status  ok; memory: it did not fit; time: stopped after limit_s; failed: any other error
    folder  gets ROW.log, and ROW.jsonl with the fields measured so far
    """
    fields, log = folder / f"{row}.jsonl", folder / f"{row}.log"
    fields.write_text("", encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmark.py"), "gpu", row, "--child", str(fields)]
    command += ["--toy"] * toy
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ  # as run.sh sets it
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        environment["JAX_PLATFORMS"] += ",cpu"  # for the check
    if flag := XLA_FLAGS.get(row.rpartition("-")[2]):
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}"
    code = None
    with log.open("w", encoding="utf-8") as file, contextlib.suppress(subprocess.TimeoutExpired):
        run = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=limit_s)
        code = run.returncode
    found = {name: value for part in jsonl.read(fields) for name, value in part.items()}
    return found | status_of(code, log.read_text(encoding="utf-8", errors="replace"), limit_s)


def status_of(code: int | None, log: str, limit_s: float) -> Record:
    """Return the status of a child process and its error.

    code  exit code, negative for a signal, None if it was stopped
    """
    if code == 0:
        return {"status": "ok"}
    if code is None:
        return {"status": "time", "error": f"stopped after {limit_s:.0f} s"}
    error = compiler.failure(code, log)
    is_memory = re.search("RESOURCE_EXHAUSTED|out of memory", error, re.IGNORECASE)
    return {"status": "memory" if is_memory else "failed", "error": error}


# --- all rows -------------------------------------------------------------------------------------

HEADER = (
    "row                       step s    plan  tokens/s    MFU   plan   GiB  plan compiler compiled"
    "   MHz     W"
)


KEY = ("toy", "gpu", "settings")


def key_of(row: str, toy: bool, gpu: str | None) -> list:
    """Return the values of KEY, which tell whether a record is of the same run."""
    settings = "" if row in GATES else repr(config_of(row, toy))
    return [toy, gpu, zlib.crc32(settings.encode())]


def run_rows(flags: argparse.Namespace, run: Callable[..., Record] = run_row) -> list[str]:
    """Run rows until they are done or the time is over; return the rows that remain.

    Records of other settings, as an earlier version had them, do not count.

    A row that its own limit stops remains, and the next one follows, except after GATES.
    Raises ConfigError if `machine` or `check` fails, unless --force is given.
    """
    deadline = time.monotonic() + 60 * flags.minutes
    gpu, folder = smi_value("name"), flags.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    rows, stopped = [row for row in ROWS if row in (*GATES, *flags.names)], []
    keys = {row: key_of(row, flags.toy, gpu) for row in rows}
    found = [r for r in jsonl.read(flags.out) if r["status"] in ("ok", "memory")]
    done = {r["row"]: r for r in found if keys.get(r["row"]) == [r.get(name) for name in KEY]}
    print(HEADER, flush=True)
    for i, row in enumerate(rows):
        left = [other for other in rows[i:] if other not in done]
        if not (record := done.get(row)):
            if (limit_s := deadline - time.monotonic()) <= 0:
                return stopped + left
            if len(left) > 1 and row not in GATES and not flags.toy:  # a CPU may be slow
                limit_s = min(limit_s, ROWS[row].limit_s)
            started = time.time()
            record = {"row": row} | dict(zip(KEY, keys[row], strict=True))
            record |= run(row, flags.toy, folder, limit_s)
            record["wall_s"] = time.time() - started
            jsonl.append(flags.out, [record])
        print(f"{row:23} {describe(record)}", flush=True)
        if record["status"] == "time":
            if row in GATES:
                return left
            stopped.append(row)
        if row in GATES and record["status"] != "ok" and not flags.force:
            raise ConfigError(
                f"row {row} did not pass, so the other rows would mean nothing. See "
                f"{folder / row}.log. Fix the cause, or continue with --force."
            )
    return stopped


def describe(record: Record) -> str:
    """Return the cells of a row under HEADER, or its text or error."""
    r = {"planned_bytes": math.nan} | {n: v for n, v in record.items() if v is not None}
    if r["status"] == "memory":
        return f"out of memory: the plan needs {r['planned_bytes'] / GIB:.1f} GiB. {r['error']}"
    if r["status"] != "ok":
        return f"{r['status']}: {r['error']}"
    if "text" in r:
        return r["text"]
    gib = [r[f"{name}_bytes"] / GIB for name in ("memory", "planned", "compiler")]
    plan_s, mfu, plan_mfu = (r.get(n, math.nan) for n in ("planned_step_s", "mfu", "planned_mfu"))
    mhz, watts = (r["smi"].get(name, math.nan) for name in ("clocks.sm", "power.draw"))
    return (
        f"{r['step_s']:8.4f} {plan_s:7.4f} {r['tokens_per_s']:9,.0f} {mfu:6.1%} {plan_mfu:6.1%}"
        f" {gib[0]:5.1f} {gib[1]:5.1f} {gib[2]:8.1f} {r['compile_s']:6.0f} s"
        f" {mhz:5.0f} {watts:5.0f}"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmark.py gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=[*ROWS], metavar="ROW", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the rows and what they decide")
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit, default 9.5")
    parser.add_argument("--out", type=Path, help="records; runs/benchmark/gpu.jsonl or toy.jsonl")
    parser.add_argument("--force", action="store_true", help="continue after a failed check")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # a row's process: its file
    flags = parser.parse_args(arguments)
    flags.out = flags.out or Path("runs/benchmark", "toy.jsonl" if flags.toy else "gpu.jsonl")
    if unknown := set(flags.names) - set(ROWS):
        raise ConfigError(
            f"there is no row {', '.join(sorted(unknown))}. Use some of {', '.join(ROWS)}."
        )
    return flags


def main(arguments: list[str]) -> None:
    flags = parse(arguments)
    if flags.list:
        for name, row in ROWS.items():
            print(f"{name:23} {row.limit_s:4} s  {row.decides}")
    elif flags.child:
        for fields in measure(flags.names[0], flags.toy, flags.child.parent):
            jsonl.append(flags.child, [fields])
    else:
        left = run_rows(flags)
        print(f"records: {flags.out}; logs and traces: {flags.out.with_suffix('')}/")
        if left:
            print(f"not run in the time limit: {' '.join(left)}")
            command = " ".join(["./run.sh python benchmark.py gpu", *arguments])
            print(f"continue with: {command}")
