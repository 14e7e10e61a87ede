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
its own: what crashes is one row, and the peak of memory, which jax cannot reset, is that row's.
Beside jax, flax, optax, numpy and what these bring, nothing needs to be installed.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding

import chips
import flops
import model
import passes
import train
import utils
import weights
from benchmark import Program, compiled, product_flops_per_s, random_batch, with_values
from benchmark import reference_config as small_config
from planning import cost, timeline
from utils import GIB, Config

ROOT = Path(__file__).resolve().parent
WARMUP_STEPS, TIMED_STEPS = 2, 8
EXPECTED_SHARE = 0.2  # of a GPU's peak, to say how long a row takes that was never run
H100 = chips.CHIPS["h100"]

Record = dict[str, Any]


# --- the rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How a model is trained on one GPU of 80 GB: all of its rows fit there, by the plan."""

    sequences: int  # of a microbatch
    microbatches: int
    best: str  # remat of the row that is expected to be fastest


MODELS = {
    "dense_124m": Size(16, 8, "none"),
    "dense_1b": Size(8, 8, "none"),
    "moe_1b": Size(8, 8, "none"),
    "moe_124m": Size(16, 8, "none"),
}
REMAT = {"none": "none", "names": ",".join(utils.REMAT_NAMES), "full": "full"}
GATES = ("machine", "check")  # where one fails, the others say nothing


def row_names() -> list[str]:
    """In the order in which they are worth the minutes."""
    best = [f"{name}-{size.best}" for name, size in MODELS.items()]
    others = [f"{name}-{remat}" for name in MODELS for remat in REMAT]
    profiles = [f"{name}-profile" for name in ("dense_1b", "moe_1b", "dense_124m", "moe_124m")]
    order = [*GATES, *best, *profiles[:2], *others, *profiles]
    return list(dict.fromkeys(order))


def config_of(row: str, toy: bool) -> Config:
    """The model of a row MODEL-REMAT or MODEL-profile, as it is trained on one GPU."""
    name, _, remat = row.rpartition("-")
    size = MODELS[name]
    sequences = size.sequences * size.microbatches
    config = with_values(
        utils.load(ROOT / "configs" / f"{name}.toml"),
        mesh={"fsdp": 1, "pipeline": 1, "tensor": 1, "virtual": 1},
        model={"compute_dtype": "bfloat16"},
        train={
            "sequences": sequences,
            "microbatches": size.microbatches,
            "remat": REMAT[size.best if remat == "profile" else remat],
        },
        eval={"sequences": sequences},
    )
    return toy_of(config) if toy else config


def toy_of(config: Config) -> Config:
    """The same in sizes that a CPU runs at once."""
    return with_values(
        config,
        model={
            "vocabulary": 500, "width": 32, "blocks": 2, "heads": 2, "kv_lora_rank": 16,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "hidden": 64,
            "expert_hidden": 16, "experts": 8,
        },
        train={"sequences": 4, "microbatches": 2, "sequence_length": 32, "loss_chunk_tokens": 64},
        eval={"sequences": 4},
    )  # fmt: skip


def expected_s(row: str, before: list[Record]) -> float:
    """Seconds of a row, its start and compilation with it: as before with a margin, else a guess.

    before  records of this row.
    """
    if before:
        last = before[-1]
        return last["wall_s"] * (2 if last["status"] == "time" else 1.2)
    if row in GATES:
        return {"machine": 40.0, "check": 90.0}[row]
    config = config_of(row, toy=False)
    t = config.train
    work = t.sequences * t.sequence_length * step_flops(config)
    return 75 + (WARMUP_STEPS + TIMED_STEPS) * work / (EXPECTED_SHARE * H100.flops)


def step_flops(config: Config, square: bool = False) -> float:
    """Model FLOPs per token as MFU counts them; with attention's whole square, or half of it."""
    length = config.train.sequence_length
    # By the rule attention counts as half of T, so as all of it where T is doubled.
    counted = 2 * length if square else length
    return flops.palm_flops_per_token(config.model, model.declare(config), counted)


# --- measuring, in the process of a row -----------------------------------------------------------


def measure(row: str, toy: bool, folder: Path) -> Iterator[Record]:
    """The row's fields, some as soon as they are known.

    folder  where a profile is kept.
    """
    device = accelerator(toy)
    yield versions(device)
    if row == "machine":
        yield from machine(device, 256 if toy else 8192)
    elif row == "check":
        yield from check(device, toy)
    else:
        config = config_of(row, toy)
        yield planned(config, device)
        program, cached = compiled_or_cached(config)
        yield {
            "compile_s": program.compile_s,
            "compile_cached": cached,
            "compiler_bytes": train.planned_bytes(program.step),
        }
        yield from profile(program, folder, row) if "profile" in row else timed(program, device)


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
    driver = smi_now("driver_version").get("driver_version")
    return {
        "chip": device.device_kind,
        "driver": driver,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "cuda": device.client.platform_version,
        "commit": output(git).strip() or None,
    }


def machine(device: jax.Device, size: int) -> Iterator[Record]:
    """A bfloat16 product of random matrices beside the chip's peak."""
    before = smi_now(*SMI_FIELDS)
    with watched() as during:
        rate = product_flops_per_s(size, jnp.bfloat16, in_row=20)
    chip = chips.chip_of_kind(device.device_kind)
    share = f", {rate / chip.flops:.0%} of the peak" if chip else ""
    text = f"{rate / 1e12:.4g} TFLOP/s in {size} x {size} x {size} bfloat16 products{share}"
    yield {"flops_per_s": rate, "smi_before": before, "smi_during": during, "text": text}


def planned(config: Config, device: jax.Device) -> Record:
    """What planning/cost.py says of the step, known before it is compiled."""
    chip = chips.chip_of_kind(device.device_kind)
    found = cost.predict(config, chip, device.platform)
    return {
        "planned_bytes": found.memory_bytes_per_chip,
        "planned_step_s": found.step_s,
        "planned_serial_step_s": found.serial_step_s,
        "planned_flops": found.flops_per_chip,
        "model_flops": found.model_flops_per_chip,
        "attention": found.attention,
        "parameters": found.parameters,
        "active_parameters": found.active_parameters,
        "sequences": config.train.sequences,
        "microbatches": config.train.microbatches,
        "sequence_length": config.train.sequence_length,
        "remat": config.train.remat,
    }


def compiled_or_cached(config: Config) -> tuple[Program, bool]:
    """The compiled step, and whether it came from the compilation cache."""
    heard: list[str] = []

    def listen(event: str, **_: Any) -> None:
        heard.append(event)

    jax.monitoring.register_event_listener(listen)
    program = compiled(config)
    jax.monitoring.unregister_event_listener(listen)
    return program, "/jax/compilation_cache/cache_hits" in heard


def timed(program: Program, device: jax.Device) -> Iterator[Record]:
    """The median step after two that are not counted, and what follows from it."""
    before = smi_now(*SMI_FIELDS)
    taken, losses = [], []
    state, batch = program.state(), random_batch(program.config, program.mesh)
    with contextlib.ExitStack() as stack:
        for number in range(WARMUP_STEPS + TIMED_STEPS):
            if number == WARMUP_STEPS:
                during = stack.enter_context(watched())
            start = time.perf_counter()
            state, report = jax.block_until_ready(program.step(state, batch))
            taken.append(time.perf_counter() - start)
            losses.append(float(report["stats"].loss))
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the loss of these steps is not finite: {losses}")
    yield rates(program, device, statistics.median(taken[WARMUP_STEPS:])) | {
        "steps_s": taken,
        "losses": losses,
        "memory_bytes": train.peak_bytes(program.mesh, program.step)[0],
        "smi_before": before,
        "smi_during": during,
    }


def rates(program: Program, device: jax.Device, step_s: float) -> Record:
    """Tokens per second, and MFU where the chip's peak is known."""
    chip, per_s = chips.chip_of_kind(device.device_kind), program.tokens / step_s
    found = {"step_s": step_s, "tokens_per_s": per_s}
    for name, square in (("mfu", False), ("mfu_whole_square", True)):
        found[name] = chip and per_s * step_flops(program.config, square) / chip.flops
    return found


def profile(program: Program, folder: Path, row: str) -> Iterator[Record]:
    """Time by layer in one traced step, and the largest kernels in each; the trace is kept."""
    state, batch = program.state(), random_batch(program.config, program.mesh)
    for _ in range(WARMUP_STEPS):
        state, report = program.step(state, batch)
    jax.block_until_ready(report)
    text, kept = program.step.as_text(), folder / f"{row}.perfetto.json.gz"
    with tempfile.TemporaryDirectory() as made:
        with jax.profiler.trace(made, create_perfetto_trace=True):
            jax.block_until_ready(program.step(state, batch))
        [file] = Path(made).rglob("perfetto_trace.json.gz")
        shutil.copy(file, kept)
    shares, largest = timeline.shares(kept, text), timeline.largest(kept, text)
    busy_s = sum(timeline.operation_s(kept, text).values())
    timeline.name_layers(kept, text)
    lines = [f"{busy_s:.4g} s of kernels in a step; {kept.name} opens in ui.perfetto.dev"]
    for place, share in shares.items():
        kernels = ", ".join(f"{name} {part:.1%}" for name, part in largest[place].items())
        lines.append(f"  {share:6.1%}  {place:26}{kernels}")
    yield {"busy_s": busy_s, "shares": shares, "kernels": largest, "text": "\n".join(lines)}


# --- the check ------------------------------------------------------------------------------------

# Largest error of a gradient over its norm, weight by weight, and of the loss. Between bfloat16 and
# float32 on one CPU they are 0.026 and 6e-6.
BOUNDS = {"float32": (1e-3, 1e-5), "bfloat16": (0.1, 1e-3)}


def check(device: jax.Device, toy: bool) -> Iterator[Record]:
    """Loss and gradients of a small model on the device against float32 on the CPU.

    In float32 they differ by rounding alone; bfloat16 is what is timed, with kernels of its own.
    """
    config = with_values(
        small_config(),
        mesh={"fsdp": 1, "pipeline": 1, "tensor": 1},
        train={"sequences": 4, "microbatches": 2},
        eval={"sequences": 4},
    )
    if toy:
        config = with_values(toy_of(config), model={"dense_layers": 0})
    # Every token goes to every expert: rounding can choose no other, which would hide an error.
    every = {"experts_per_token": config.model.experts, "capacity_factor": 1.0}
    config = with_values(config, model=every)
    cpu = one_device(jax.devices("cpu")[0])
    with jax.default_device(jax.devices("cpu")[0]):
        start = weights.initialize(model.declare(config), cpu, 0)
    loss, expected = gradients(config, cpu, start)
    lines = []
    for dtype, bounds in BOUNDS.items():
        here = with_values(config, model={"compute_dtype": dtype})
        found_loss, found = gradients(here, one_device(device), start)
        off, errors = abs(found_loss / loss - 1), gradient_errors(found, expected)
        yield {f"{dtype}_loss_error": off, f"{dtype}_gradient_errors": errors}
        lines.append(compared(dtype, off, errors, bounds))
    yield {"text": "\n  ".join(["against float32 on the CPU", *lines])}


def compared(
    dtype: str, loss_error: float, errors: dict[str, float], bounds: tuple[float, float]
) -> str:
    """The errors in a line.

    Raises  ValueError where they are not within the bounds, or are not numbers.
    """
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    text = (
        f"{dtype}: loss off by {loss_error:.1e}, gradients by {errors[worst]:.1e} at most ({worst})"
    )
    if not (errors[worst] < bounds[0] and loss_error < bounds[1]):
        raise ValueError(
            f"{text}, where {bounds[1]:.0e} and {bounds[0]:.0e} are allowed: this "
            "device does not compute what the CPU does in float32. What is measured here counts "
            "for nothing until it does."
        )
    return text


def one_device(device: jax.Device) -> Mesh:
    return Mesh(np.array([device]).reshape(1, 1, 1), utils.MESH_AXES)


def gradients(config: Config, place: Mesh, start: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradient of each weight by its name, on the device of `place`."""
    declared = model.declare(config)
    with jax.default_device(place.devices.flat[0]):
        w = jax.tree.map(
            lambda d, a: jax.device_put(np.asarray(a), NamedSharding(place, d.spec)),
            declared,
            start,
        )
        run = jax.jit(passes.loss_and_gradients(config, declared, place))
        grads, stats = jax.device_get(run(w, random_batch(config, place), jnp.int32(0)))
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return float(stats.loss), dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def gradient_errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """|found - expected| / |expected| by weight; 0 where both are 0, as of the router's bias."""

    def error(name: str) -> float:
        off, norm = map(np.linalg.norm, (found[name] - expected[name], expected[name]))
        if norm == 0:
            return 0.0 if off == 0 else math.inf
        return float(off / norm)

    return {name: error(name) for name in expected}


# --- nvidia-smi -----------------------------------------------------------------------------------

SMI_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")  # MHz, W


def smi(fields: tuple[str, ...]) -> list[str]:
    """The command that reads the first GPU that jax may use."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = f"--query-gpu={','.join(fields)}"
    return ["nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits"]


def smi_now(*fields: str) -> Record:
    """One reading; nothing where there is no nvidia-smi."""
    lines = output(smi(fields)).splitlines()
    return readings(fields, lines) if lines else {}


def readings(fields: tuple[str, ...], lines: list[str]) -> Record:
    """The median of what each field reads as a number, or its last text."""
    rows = [line.split(", ") for line in lines if line.count(", ") == len(fields) - 1]
    return {name: middle([row[i] for row in rows]) for i, name in enumerate(fields) if rows}


def middle(column: list[str]) -> float | str:
    numbers = [float(cell) for cell in column if re.fullmatch(r"[\d.]+", cell)]
    return statistics.median(numbers) if len(numbers) == len(column) else column[-1]


@contextlib.contextmanager
def watched() -> Iterator[Record]:
    """Fills the given record, at its end, with medians of what nvidia-smi read meanwhile."""
    found, lines, over = {}, [], threading.Event()

    def look() -> None:
        while not over.is_set():
            lines.extend(output(smi(SMI_FIELDS)).splitlines())
            over.wait(0.2)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.update(readings(SMI_FIELDS, lines))


def output(command: list[str]) -> str:
    """What a command prints; nothing where it is not there, or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# --- a row in a process of its own ----------------------------------------------------------------


def run_row(row: str, toy: bool, folder: Path, limit_s: float) -> Record:
    """Runs a row in a child process, and says how it ended.

    status  ok; memory: it did not fit; time: it was stopped after limit_s; failed: anything else.
    folder  gets ROW.log and ROW.jsonl, what it had measured until then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told, log = folder / f"{row}.jsonl", folder / f"{row}.log"
    told.write_text("")
    command = [sys.executable, str(ROOT / "benchmark.py"), "gpu", row, "--child", str(told)]
    command += ["--toy"] * toy
    code: int | None = None
    with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            command, stdout=file, stderr=file, env=environment(row), timeout=max(0.1, limit_s)
        ).returncode
    found: Record = {}
    for part in read(told):
        found |= part
    return found | ending(code, log.read_text(errors="replace"), limit_s)


def environment(row: str) -> dict[str, str]:
    """Of a child: as run.sh makes it, with the CPU beside the GPU, for the check."""
    made = dict(os.environ)
    made.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    made.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    made.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    if made.get("JAX_PLATFORMS") and "cpu" not in made["JAX_PLATFORMS"].split(","):
        made["JAX_PLATFORMS"] += ",cpu"
    if "profile" in row:  # kernels in CUDA graphs do not say which operation they are of
        flags = made.get("XLA_FLAGS", "")
        made["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    return made


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


@dataclass(frozen=True, kw_only=True)
class Flags:
    names: list[str] = dataclasses.field(default_factory=list)  # rows; none are all
    minutes: float = 9.0
    out: Path = Path()
    again: bool = False
    force: bool = False
    toy: bool = False


def session(flags: Flags, run: Callable[..., Record] = run_row) -> dict[str, float]:
    """Runs rows until they are done or the minutes are over; the rows that are left, and the
    seconds that each is expected to take.

    Raises  ValueError where `machine` or `check` failed, unless forced.
    """
    deadline = time.monotonic() + 60 * flags.minutes
    gpu = smi_now("name").get("name")
    before = [r for r in read(flags.out) if (r["toy"], r["gpu"]) == (flags.toy, gpu)]
    done = {r["row"]: r for r in before if r["status"] in ("ok", "memory")}
    left: dict[str, float] = {}
    rows = chosen(flags.names)
    print(HEADER, flush=True)
    for row in rows:
        if row in done and not flags.again:
            show(done[row])
            continue
        expected = expected_s(row, [r for r in before if r["row"] == row])
        limit = deadline - time.monotonic()
        if expected > limit or set(left) & set(GATES):
            left[row] = expected
            continue
        started = time.time()
        record = {"row": row, "toy": flags.toy, "gpu": gpu, "started": round(started)}
        record |= run(row, flags.toy, flags.out.with_suffix(""), limit)
        record["wall_s"] = time.time() - started
        add(flags.out, record)
        show(record)
        if row in GATES and record["status"] != "ok" and not flags.force:
            raise ValueError(
                f"row {row} did not pass, and what follows would mean nothing; see "
                f"{flags.out.with_suffix('') / row}.log. Mend that, or go on with --force."
            )
    return left


def chosen(names: list[str]) -> list[str]:
    """The rows by these names, after those that must pass first; all of them if none is named."""
    known = row_names()
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0)[0]
            raise ValueError(
                f"benchmark.py gpu {name}: there is no such row. Use {close}, or see --list."
            )
    return [row for row in known if not names or row in (*GATES, *names)]


def read(file: Path) -> list[Record]:
    """Records of a file of JSON lines, without a last one that was cut off."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def add(file: Path, record: Record) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


# --- the table ------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[int, Callable[[Record], str]]] = {
    "row": (-18, lambda r: r["row"]),
    "step s": (8, lambda r: f"{r['step_s']:.4f}"),
    "tokens/s": (9, lambda r: f"{r['tokens_per_s']:,.0f}"),
    "MFU": (6, lambda r: percent(r["mfu"])),
    "square": (6, lambda r: percent(r["mfu_whole_square"])),
    "GiB": (6, lambda r: f"{r['memory_bytes'] / GIB:.1f}"),
    "plan": (6, lambda r: f"{r['planned_bytes'] / GIB:.1f}"),
    "compiler": (8, lambda r: f"{r['compiler_bytes'] / GIB:.1f}"),
    "compile s": (9, lambda r: f"{r['compile_s']:.0f}" + " (cache)" * r["compile_cached"]),
    "MHz": (5, lambda r: whole(r["smi_during"].get("clocks.sm"))),
    "W": (5, lambda r: whole(r["smi_during"].get("power.draw"))),
}


def line(cells: list[str]) -> str:
    widths = [width for width, _ in COLUMNS.values()]
    return " ".join(
        f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
        for cell, width in zip(cells, widths, strict=True)
    )


HEADER = line(list(COLUMNS))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def whole(number: float | str | None) -> str:
    return f"{number:.0f}" if isinstance(number, float) else "-"


def show(record: Record) -> None:
    """Prints a row."""
    name = f"{record['row']:18} "
    if record["status"] == "memory":
        plan = record["planned_bytes"] / GIB if "planned_bytes" in record else math.nan
        text = f"{name}out of memory: the plan said it needs {plan:.1f} GiB. {record['error']}"
    elif record["status"] != "ok":
        text = f"{name}{record['status']}: {record['error']}"
    elif "text" in record:
        text = name + record["text"]
    else:
        text = line([cell(record) for _, cell in COLUMNS.values()])
    print(text, flush=True)


# --- the command line -----------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """benchmark.py gpu."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="ROW", help="rows to run; all if not given")
    parser.add_argument("--list", action="store_true", help="print the rows, in their order")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which it has ended; 9")
    parser.add_argument(
        "--out", type=Path, help="JSON lines; runs/benchmark/gpu.jsonl or toy.jsonl"
    )
    parser.add_argument("--again", action="store_true", help="also run rows that are in the file")
    parser.add_argument("--force", action="store_true", help="go on where the check failed")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on whatever device is there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # a row's process: its file
    given = vars(parser.parse_args(arguments))
    child, listed = given.pop("child"), given.pop("list")
    out = given.pop("out") or Path("runs/benchmark") / f"{'toy' if given['toy'] else 'gpu'}.jsonl"
    flags = Flags(**given, out=out)
    if listed:
        print("\n".join(row_names()))
    elif child:
        for part in measure(flags.names[0], flags.toy, child.parent):
            add(child, part)
    else:
        tell_left(session(flags), flags, arguments)


def tell_left(left: dict[str, float], flags: Flags, arguments: list[str]) -> None:
    """Prints where the records are, and how to go on."""
    print(f"records: {flags.out}; logs and traces: {flags.out.with_suffix('')}/")
    if left:
        again = " ".join(a for a in arguments if a != "--again")
        print(f"left, for want of time: {' '.join(left)}")
        longest = max(left, key=left.__getitem__)
        if left[longest] > 60 * flags.minutes:
            print(f"{longest} alone takes some --minutes {math.ceil(left[longest] / 60)}")
        print(f"go on with: ./run.sh python benchmark.py gpu {again}".rstrip())
