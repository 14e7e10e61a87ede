"""Pre-flight checks of a job on several hosts. Each failure is reported with its fix."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from runtime.errors import Exit, JobFailed, TransientError
from utils import ConfigError

MIN_FREE_GIB = 1  # for logs, compiled programs, records
MAX_SKEW_S = 10.0  # between clocks; buckets check the times of leases and tokens
TPU_LOCK = Path("/tmp/libtpu_lockfile")
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")


def check_host(host: str, replicas: int) -> None:
    """Raise ConfigError with what prevents this host from connecting to process 0 on `host`."""
    env, name, lines = os.environ, socket.gethostname(), ["this host cannot run the job:"]
    on_cpu = env.get("JAX_PLATFORMS") == "cpu"
    with contextlib.suppress(FileNotFoundError):
        # libtpu does not start while another process locks this file. The lock is shared, so that
        # the processes of one host may all try it at once.
        try:
            if not on_cpu:
                with TPU_LOCK.open("rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (PermissionError, BlockingIOError) as error:
            fix = "End the process that uses the TPU; if there is none, remove the file with sudo"
            lines += [f"{TPU_LOCK}: {error.strerror}. {fix}"]
    names = [n for n in MEGASCALE if n in env]
    if names and (replicas == 1 or len(names) < len(MEGASCALE)):
        fix = "For several TPU slices set the others and --mesh.replica; for one slice unset it"
        lines += [f"of {', '.join(MEGASCALE)} {', '.join(names)} is set. {fix}"]
    # gRPC reads these, and would connect the processes through the proxy.
    proxy = next((n for n in ("grpc_proxy", "https_proxy", "http_proxy") if env.get(n)), None)
    direct = f"{env.get('no_grpc_proxy', '')},{env.get('no_proxy', '')}".split(",")
    if host and proxy and not any(end.strip() and host.endswith(end.strip()) for end in direct):
        lines += [f"{proxy} is set. Set no_proxy={host} too, or unset {proxy}"]
    with contextlib.suppress(OSError):  # the name may not be resolvable yet
        own, first = socket.gethostbyname(name), socket.gethostbyname(host or "localhost")
        # Collectives of CPUs use the address that a host's own name resolves to.
        local = own.startswith("127.") and not first.startswith("127.")
        if local and on_cpu:
            lines += [f"{name} is {own}, where other hosts cannot reach it. Edit /etc/hosts"]
    if lines[1:]:
        raise ConfigError("\n  ".join(lines))


def check_coordinator(coordinator: str, index: int, limit_s: float) -> None:
    """Wait until process 0 accepts connections; on process 0, check that its port is free.

    Raises  ConfigError if the port is in use; TransientError if process 0 does not respond in time
    """
    host, _, port = coordinator.rpartition(":")
    ends = time.monotonic() + limit_s
    while True:
        try:
            if index == 0:
                return socket.create_server(("", int(port))).close()
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            text = f"process 0 at {coordinator}: {error}."
            if index == 0:
                raise ConfigError(f"{text} Use another port, or end the program there.") from error
            if time.monotonic() > ends:
                fix = "Does it run, and is the port open between hosts?"
                raise TransientError(f"{text} {fix}") from error
        time.sleep(0.2)


def check_disk() -> None:
    """Raise ConfigError if a disk is almost full."""
    for folder in (os.getcwd(), tempfile.gettempdir()):
        if (free := shutil.disk_usage(folder).free / 2**30) < MIN_FREE_GIB:
            raise ConfigError(f"{folder} has {free:.2f} GiB free, and needs {MIN_FREE_GIB}.")


def compare(name: str, gather: Callable[[bytes], list[bytes]]) -> None:
    """Raise JobFailed, on all processes, if they differ in `facts` or clocks."""
    lines, own = [], facts()
    gather(b"")  # returns when all processes are here, to read the clocks at once
    texts = gather(json.dumps([name, time.time(), own]).encode())
    (first, time_s, mine), *others = map(json.loads, texts)
    for other, other_s, theirs in others:
        if abs(other_s - time_s) > MAX_SKEW_S:
            lines.append(f"the clock of {other} is {other_s - time_s:+.0f} s off that of {first}")
        for n in [n for n in mine | theirs if mine.get(n) != theirs.get(n)][:8]:
            here, there = (" ".join(facts.get(n, "none").split()) for facts in (mine, theirs))
            lines.append(f"{n} differs: {here} on {first}, {there} on {other}")
    if lines:
        fix = "Set the clocks, and start all hosts with the same command and code: ./launcher.sh"
        text = "\n  ".join(["the processes do not start alike:", *lines, fix])
        raise JobFailed(text, Exit.CONFIG)


def facts() -> dict[str, str]:
    """Return what must be the same on all hosts, by name."""
    values = {"command": " ".join(sys.argv), "Python": platform.python_version()}
    git = "git describe --always --dirty --abbrev=12; git diff HEAD | sha256sum"
    values["commit"] = subprocess.run(git, shell=True, capture_output=True, text=True).stdout
    for word in (word.removeprefix("--config=") for word in sys.argv[1:]):
        if word.endswith(".toml") and Path(word).is_file():
            values[word] = hashlib.sha256(Path(word).read_bytes()).hexdigest()
    return values | {f"package {name}": v for name, v in packages().items()}


def packages() -> dict[str, str]:
    """Return the version of each installed package."""
    named = {d.metadata.get("Name"): d for d in importlib.metadata.distributions()}
    # An interrupted installation leaves a package without a name.
    return {name.lower(): package.version for name, package in named.items() if name}
