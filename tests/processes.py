"""Start the processes of a job on this machine with CPU devices; a small model for them."""

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600  # of one process

# A program of a test runs a few times, so XLA need not optimize its code. Sums and collectives are
# the same.
FAST = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
# The older code generator takes a third of the time to compile. Later versions do not have it.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FAST += ("--xla_cpu_use_fusion_emitters=false",)

# A mesh changes only rounding here: experts are dropless and the balancing bias is constant.
SMALL_MODEL = """
--model.hidden_size 32 --model.num_attention_heads 2 --model.kv_lora_rank 16
--model.intermediate_size 64 --model.moe_intermediate_size 32
--model.qk_nope_head_dim 16 --model.qk_rope_head_dim 8 --model.v_head_dim 16
--model.compute_dtype float32 --model.capacity_factor 0
--model.router_bias_update_speed 0 --train.seq_len 32
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def with_flags(given: str, flags: tuple[str, ...]) -> str:
    """Return the given flags, and those of `flags` whose name is not among them."""
    names = {flag.split("=")[0] for flag in given.split()}
    return " ".join([*given.split(), *(f for f in flags if f.split("=")[0] not in names)])


def environments(count: int, devices: int, **more: str) -> list[dict[str, str]]:
    """Return the environment of each process of a job; `devices` are those of one process."""
    flags = with_flags(os.environ.get("XLA_FLAGS", ""), FAST).split()
    flags = [f for f in flags if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    shared = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"} | more
    # Each process compiles the same programs, so cache small ones too.
    shared["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if count > 1:
        shared["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
        shared["JAX_NUM_PROCESSES"] = str(count)
        return [shared | {"JAX_PROCESS_ID": str(number)} for number in range(count)]
    return [shared]


def start(command: Sequence[str], environment: dict[str, str], log: IO[str]) -> subprocess.Popen:
    """Start a Python process whose output goes to `log`."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )


def run_all(places: list[dict[str, str]], *command: str) -> tuple[list[int], list[str]]:
    """Run processes with these environments at once. Return (exit codes, output of each)."""
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in places]
        started = [start(command, *each) for each in zip(places, logs, strict=True)]
        try:
            codes = [process.wait(LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()  # no effect on a process that has ended
        for log in logs:
            log.seek(0)
        return codes, [log.read() for log in logs]


# Source text for a child that defines `kind` and `number`. killing(name, function) wraps a
# function: if `name` is `kind`, the child kills itself after the `number`-th call.
KILLS_ITSELF = """
done = 0

def killing(name, function):
    def counted(*given, **named):
        global done
        result = function(*given, **named)
        if name == kind:
            done += 1
            if done == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
        return result
    return counted
"""
