"""Record when, where and with which code a run was started. Nothing depends on it."""

import datetime
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from runtime import jsonl
from runtime.preflight import packages

PACKAGES = "jax|jaxlib|jax-(cuda|rocm).*|flax|optax|orbax-checkpoint|numpy|libtpu"
# Variables that change programs, devices or communication, without what may be a secret.
VARIABLES = re.compile(
    "(JAX|XLA|LIBTPU|TPU|PJRT|TF|CUDA|NVIDIA|NCCL|NVTE|UCX|GLOO|MEGASCALE|OMP|MALLOC)_"
    "|PYTHON|LD_LIBRARY_PATH|LD_PRELOAD|GLIBC_TUNABLES"
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
GIT_TIMEOUT_S = 10.0


def describe_start(step: int) -> dict[str, Any]:
    """Describe a start that continues after `step` steps."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": list(sys.argv),
        **_commit(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": dict(sorted(Counter(device.device_kind for device in jax.devices()).items())),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if VARIABLES.match(name) and not SECRET.search(name)
        },
        "versions": {
            "python": platform.python_version(),
            **{n: v for n, v in sorted(packages().items()) if re.fullmatch(PACKAGES, n)},
        },
    }


def record(folder: Path, step: int) -> dict[str, Any]:
    """Describe this start, and append it to the run's starts.jsonl."""
    start = describe_start(step)
    jsonl.append(folder / "starts.jsonl", [start])
    return start


def _commit() -> dict[str, Any]:
    """Return the commit and whether code (not text or measurements) differs; null without git."""

    def git(*arguments: str) -> str:
        how = {"cwd": Path(__file__).parent.parent, "timeout": GIT_TIMEOUT_S, "text": True}
        command = ["git", *arguments]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, **how).strip()

    try:
        other = [":!*.md", ":!*.jsonl", ":!*.png"]
        changed = git("status", "--porcelain", "-uno", "--", ".", *other)
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed": None}
