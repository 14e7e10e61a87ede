"""Start the processes of a job, share errors between them, and end them.

JAX does the rest: `jax.distributed` connects the processes, its coordination service ends all of
them when one is lost, and its preemption service carries a request to stop to all (stop.py).
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
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

import faults
import preflight
from faults import Exit, Failed, Stopped

JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
CONNECT_S = 300  # within which all processes have to connect, as JAX's own default
LAST_S = 4.0  # that process 0 stays after an error


def process_info() -> tuple[str, int, int, list[int] | None] | None:
    """(host:port of process 0, number of processes, index of this one, its devices or None for all)
    as JAX_VARIABLES give them, else a Slurm step; None without either.

    Raises  ValueError where these are set in part, or do not describe a process.
    """
    address, count, index = given = [os.environ.get(name, "") for name in JAX_VARIABLES]
    if not any(given):
        return _slurm_step()
    numbers = address.rpartition(":")[2], count, index
    if not all(n.isdigit() for n in numbers) or int(index) >= int(count):
        raise ValueError(
            f"{', '.join(JAX_VARIABLES)} are {', '.join(word or 'not set' for word in given)}. Set "
            "all: host:port of process 0, the number of processes, and of this one, from 0 on."
        )
    return address, int(count), int(index), None


def _slurm_step() -> tuple[str, int, int, list[int] | None] | None:
    """Of a task that srun started beside others; an interactive shell is a step of one task."""
    tasks, nodes = (os.environ.get(f"SLURM_STEP_{n}", "") for n in ("NUM_TASKS", "NODELIST"))
    if tasks in ("", "1"):
        return None
    listed = ["scontrol", "show", "hostnames", nodes]
    hosts = nodes and subprocess.run(listed, capture_output=True, text=True).stdout.split()
    if not hosts:
        raise ValueError(f"scontrol names no host for SLURM_STEP_NODELIST {nodes!r}. Use srun.")
    job, step, index, local = (
        int(os.environ[f"SLURM_{n}"]) for n in ("JOB_ID", "STEP_ID", "PROCID", "LOCALID")
    )
    coordinator = f"{hosts[0]}:{61440 + (job + step) % 4096}"  # no port that Linux gives to clients
    # A task that is alone on its host, or that Slurm bound to a GPU, has all that it sees.
    bound = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    alone = tasks == os.environ["SLURM_STEP_NUM_NODES"]
    return coordinator, int(tasks), index, None if alone or bound else [local]


def on_tpu_vm() -> bool:
    """Whether this is a TPU VM of GKE or GCE, where `jax.distributed` finds all workers itself."""
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
    """Connect this process to the others of its job, if there are any, and run pre-flight checks.

    heartbeat_s  without a heartbeat of a process, after which JAX ends the others with SIGABRT.
    replicas     `--mesh.replica`; 0 where the mesh is made for the devices.
    Raises       ValueError or Fault on this host alone; Failed, once connected, on all.
    """
    info = process_info()
    if info or on_tpu_vm():
        how = {"heartbeat_timeout_seconds": round(heartbeat_s), "initialization_timeout": CONNECT_S}
        preflight.check_host(info[0].rpartition(":")[0] if info else "", replicas)
        if info:
            print("process {2} of {1} connects to {0}".format(*info), flush=True)
            preflight.check_coordinator(info[0], info[2], CONNECT_S)
            how["cluster_detection_method"] = "deactivate"  # it gives each Slurm task one GPU
        jax.distributed.initialize(*info or (), **how)
        with shared_errors():
            preflight.check_disk()
        preflight.compare(_name(), gather)
    if file := os.environ.get("UP_FILE"):  # worker.sh waits for it
        Path(file).touch()


def _name() -> str:
    return f"process {jax.process_index()} ({socket.gethostname()})"


def gather(data: bytes) -> list[bytes]:
    """What each process gives, in the order of processes; all processes get all of it."""
    if not jax.distributed.is_initialized():
        return [data]
    sizes = np.atleast_1d(multihost_utils.process_allgather(np.int32(len(data))))
    padded = np.zeros(-(-max(1, *sizes) // 1024) * 1024, np.uint8)  # few shapes to compile
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def shared_errors() -> Iterator[None]:
    """Run the block, which must not communicate; if it raises on one process, raise on all."""
    raised = None
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        raised = error
    own = json.dumps([int(faults.code_of(raised)), _name(), str(raised)]) if raised else ""
    given = gather(own.encode())
    if failed := [json.loads(text) for text in given if text]:
        alike = len(failed) == len(given) and len({text for _, _, text in failed}) == 1
        text = failed[0][2] if alike else "; ".join(f"{who}: {text}" for _, who, text in failed)
        raise Failed(text, min(code for code, _, _ in failed)) from raised


@contextlib.contextmanager
def job(heartbeat_s: float = 30.0, replicas: int = 0) -> Iterator[None]:
    """Connect the processes as `start`, run the block in each, and end them. After an error that is
    not Failed a process ends at once: what Python waits for at exit would not come.
    """
    try:
        start(heartbeat_s, replicas)
        yield
    except BaseException as error:
        if jax.distributed.is_initialized() and not isinstance(error, Failed):
            _end(error, heartbeat_s)
        raise
    finally:
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
            if not isinstance(sys.exception(), Stopped):  # which more SIGTERMs may follow
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the preemption service had it


def _end(error: BaseException, heartbeat_s: float) -> NoReturn:
    outside = faults.of_the_runtime(error)
    try:
        if faults.code_of(error) == Exit.BUG or outside:
            traceback.print_exception(error)
        print(f"{_name()}: {faults.line(error)}", flush=True)
        # Where another process is lost, the coordination service names it, and ends this one. It is
        # in process 0, which the others need to end by themselves.
        time.sleep(heartbeat_s + LAST_S if outside else LAST_S * (jax.process_index() == 0))
    finally:
        os._exit(faults.code_of(error))
