"""Connect the processes of a job, share errors between them, and end them.

`jax.distributed` does the rest: its coordination service ends all processes when one is lost, and
its preemption service carries a request to stop to all of them (runtime/signals.py).
"""

import contextlib
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from runtime import errors, preflight
from runtime.errors import Exit, JobFailed, Stopped
from utils import ConfigError

JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
CONNECT_S = 300  # timeout of the connection of all processes; JAX's default
LAST_S = 4.0  # time for which process 0 stays after an error


class ProcessInfo(NamedTuple):
    """The arguments of `jax.distributed.initialize`."""

    coordinator: str  # host:port of process 0
    processes: int
    index: int
    devices: list[int] | None = None  # None: all local devices


def process_info() -> ProcessInfo | None:
    """Return the process of JAX_VARIABLES, else of a Slurm step; None without either.

    Raises  ConfigError if only some of the variables are set, or they are invalid
    """
    address, count, index = given = [os.environ.get(name, "") for name in JAX_VARIABLES]
    if not any(given):
        return _slurm_step()
    host, _, port = address.rpartition(":")
    valid = host and all(number.isdigit() for number in (port, count, index))
    if not valid or int(index) >= int(count):
        raise ConfigError(
            f"{', '.join(JAX_VARIABLES)} are {', '.join(word or 'not set' for word in given)}. Set "
            "all: host:port of process 0, the number of processes, and of this one, from 0 on."
        )
    return ProcessInfo(address, int(count), int(index))


def _slurm_step() -> ProcessInfo | None:
    """Return `process_info` of a task of srun. A step of one task is an interactive shell."""
    tasks, nodes = (os.environ.get(f"SLURM_STEP_{n}", "") for n in ("NUM_TASKS", "NODELIST"))
    if tasks in ("", "1"):
        return None
    listed = ["scontrol", "show", "hostnames", nodes]
    try:
        hosts = nodes and subprocess.run(listed, capture_output=True, text=True).stdout.split()
    except OSError as error:  # as in a container
        raise ConfigError(
            f"this is a step of Slurm, and scontrol, which names its hosts, cannot be started: "
            f"{error.strerror}. Mount Slurm's programs, or set {', '.join(JAX_VARIABLES)}."
        ) from None
    if not hosts:
        raise ConfigError(f"scontrol names no host for SLURM_STEP_NODELIST {nodes!r}. Use srun.")
    job, step, index, local = (
        int(os.environ[f"SLURM_{n}"]) for n in ("JOB_ID", "STEP_ID", "PROCID", "LOCALID")
    )
    port = 61440 + (job + step) % 4096  # outside Linux's range of client ports
    # A task that is alone on its host, or bound to a GPU by Slurm, uses all visible devices.
    bound = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    alone = tasks == os.environ["SLURM_STEP_NUM_NODES"]
    devices = None if alone or bound else [local]
    return ProcessInfo(f"{hosts[0]}:{port}", int(tasks), index, devices)


def on_tpu_vm() -> bool:
    """Return whether this is a TPU VM of GKE or GCE, where `jax.distributed` finds all workers."""
    has_tpu = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    wanted = has_tpu and os.environ.get("JAX_PLATFORMS") != "cpu"
    if not wanted and "JAX_FORCE_TPU_INIT" not in os.environ:
        return False
    if "TPU_WORKER_HOSTNAMES" in os.environ or "TPU_PROCESS_ADDRESSES" in os.environ:
        return True
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    attribute = f"http://{server}/computeMetadata/v1/instance/attributes/agent-worker-number"
    request = urllib.request.Request(attribute, headers={"Metadata-Flavor": "Google"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
        return True
    return False


def start(heartbeat_s: float = 30.0, replicas: int = 0) -> None:
    """Run pre-flight checks, and connect this process to the others of its job, if there are any.

    heartbeat_s  time without a heartbeat of a process after which JAX ends the others with SIGABRT
    replicas     `--mesh.replica`; 0 if the mesh is derived from the devices
    Raises       ConfigError or TransientError on this host; after the connection, JobFailed on all
    """
    info = process_info()
    if info or on_tpu_vm():
        options = {"heartbeat_timeout_seconds": round(heartbeat_s)}
        options["initialization_timeout"] = CONNECT_S
        preflight.check_host(info.coordinator.rpartition(":")[0] if info else "", replicas)
        if info:
            print("process {2} of {1} connects to {0}".format(*info), flush=True)
            preflight.check_coordinator(info.coordinator, info.index, CONNECT_S)
            # JAX's detection gives each Slurm task one GPU.
            options["cluster_detection_method"] = "deactivate"
        jax.distributed.initialize(*info or (), **options)
        with shared_errors():
            preflight.check_disk()
        preflight.compare(_name(), gather)
    if file := os.environ.get("UP_FILE"):  # worker.sh waits for it
        Path(file).touch()


def _name() -> str:
    return f"process {jax.process_index()} ({socket.gethostname()})"


def gather(data: bytes) -> list[bytes]:
    """Return the data of all processes, in the order of processes, on every process."""
    if not jax.distributed.is_initialized():
        return [data]
    sizes = np.atleast_1d(multihost_utils.process_allgather(np.int32(len(data))))
    padded = np.zeros(-(-max(1, *sizes) // 1024) * 1024, np.uint8)  # few shapes to compile
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def shared_errors() -> Iterator[None]:
    """Run a block, which must not communicate. If it raises on one process, raise on all."""
    raised = None
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        raised = error
    own = json.dumps([int(errors.code_of(raised)), _name(), str(raised)]) if raised else ""
    gathered = gather(own.encode())
    if failed := [json.loads(text) for text in gathered if text]:
        alike = len(failed) == len(gathered) and len({text for _, _, text in failed}) == 1
        text = failed[0][2] if alike else "; ".join(f"{who}: {text}" for _, who, text in failed)
        raise JobFailed(text, min(code for code, _, _ in failed)) from raised


@contextlib.contextmanager
def job(heartbeat_s: float = 30.0, replicas: int = 0) -> Iterator[None]:
    """Connect the processes as `start`, run the block in each, and disconnect them.

    After an error other than JobFailed the process ends at once: the other processes may never
    answer what Python waits for at exit.
    """
    try:
        start(heartbeat_s, replicas)
        yield
    except BaseException as error:
        if jax.distributed.is_initialized() and not isinstance(error, JobFailed):
            _end(error, heartbeat_s)
        raise
    finally:
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
            if not isinstance(sys.exception(), Stopped):  # after which more SIGTERMs may follow
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the preemption service handled it


def _end(error: BaseException, heartbeat_s: float) -> NoReturn:
    outside = errors.is_runtime_error(error)
    try:
        if errors.code_of(error) == Exit.BUG or outside:
            traceback.print_exception(error)
        print(f"{_name()}: {errors.line(error)}", flush=True)
        # If another process is lost, the coordination service names it and ends this one. The
        # service runs in process 0, and the others need it to end.
        time.sleep(heartbeat_s + LAST_S if outside else LAST_S * (jax.process_index() == 0))
    finally:
        os._exit(errors.code_of(error))
