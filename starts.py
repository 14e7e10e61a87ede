"""Where a run came from: who started it, with which code, on what. Nothing depends on it."""

import datetime
import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from metrics import is_primary, say

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin"),
)
GIT_S = 10.0  # in which git answers, or is not asked


def of_now(step: int) -> dict[str, Any]:
    """What is known of a start that begins after `step` steps."""
    kinds = [device.device_kind for device in jax.devices()]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": list(sys.argv),
        **_commit(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "versions": {"python": platform.python_version()} | _versions(),
    }


def record(folder: Path, step: int) -> dict[str, Any]:
    """The same, also as a line of the run's starts.jsonl."""
    start = of_now(step)
    if is_primary():
        try:
            with (folder / "starts.jsonl").open("a") as file:
                file.write(json.dumps(start) + "\n")
        except OSError as error:
            say(f"warning: this start is not told in {folder / 'starts.jsonl'}: {error}")
    return start


def _commit() -> dict[str, Any]:
    """The code's commit, and whether the code (no text, nor what was measured) differs from it;
    null where git cannot tell.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=True,
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        other = [f":!*.{kind}" for kind in ("md", "jsonl", "png")]
        changed = git("status", "--porcelain", "-uno", "--", ".", *other)
        return {"commit": commit, "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed": None}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
