"""What commonly breaks a job of several hosts, before jax starts: a line each, with the mend.

    python preflight.py COMMAND [ARGUMENT..]

run.sh starts a job's commands through this. Each process looks at its own host, then all meet at
process 0, on the port that jax will use, so that this port is known to be free and reachable. There
each tells what it found and what it is about to run; all see the same, and all end if something is
wrong. Otherwise the process becomes COMMAND.

Exit code: 2 where something has to be mended; 75 where a process did not come.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
from faults import Fault, command_line
from peers import Peers, Place

START_S = 300.0  # in which all processes have to have come
LEAST_FREE_BYTES = 2**30  # for logs, compiled programs, records
LARGEST_SKEW_S = 10.0  # between clocks, by which leases and tokens of buckets are given
TPU_LOCK = Path("/tmp/libtpu_lockfile")
GIT_S = 10.0


def wrong_here(command: list[str]) -> Iterator[str]:
    """What has to be mended on this host, to run this there."""
    for folder in (Path.cwd(), Path(os.environ.get("TMPDIR", "/tmp"))):
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            yield (
                f"{free / 2**30:.2f} GiB are free for {folder}, and {LEAST_FREE_BYTES / 2**30:g} "
                "are needed. Remove what is not needed there."
            )
    names = sorted(name for name in os.environ if name.startswith("MEGASCALE_"))
    if names and not any(word.partition("=")[0] == "--mesh.replica" for word in command):
        yield (
            f"{', '.join(names)} is set, as for several TPU slices, and the command has no "
            f"--mesh.replica. Give it, or unset {' '.join(names)}"
        )
    yield from _tpu_lock()


def _tpu_lock() -> Iterator[str]:
    """libtpu refuses to start where another process holds this file, or another user left it."""
    try:
        with TPU_LOCK.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except PermissionError:
        yield (
            f"{TPU_LOCK} is of user {TPU_LOCK.stat().st_uid}: if none of their processes uses the "
            f"TPU, sudo rm {TPU_LOCK}"
        )
    except BlockingIOError:
        yield f"{TPU_LOCK} is held by {_holder(TPU_LOCK)}, which uses the TPU. End that process."


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # number: FLOCK ADVISORY WRITE process device:device:inode ..
            if fields[1] == "FLOCK" and fields[5].endswith(f":{path.stat().st_ino}"):
                return f"process {fields[4]}"
    return "another process"


def facts(command: list[str]) -> dict[str, Any]:
    """What must be the same on all hosts, by name."""
    found = {"commit": _git("rev-parse", "HEAD"), "Python": platform.python_version()}
    found["changed files"] = _short(_git("diff", "HEAD"))
    found["command"] = " ".join(command)
    for flag, file in itertools.pairwise(command):
        if flag == "--config" and Path(file).is_file():
            found[file] = _short(Path(file).read_text())
    installed = importlib.metadata.distributions()
    packages = {f"package {d.metadata['Name'].lower()}": d.version for d in installed}
    return found | dict(sorted(packages.items()))


def _git(*arguments: str) -> str:
    """What git says here; empty where it cannot."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=GIT_S)
        return run.stdout.strip()
    return ""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12] if text else ""


def differences(told: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each fact in which a process is not as the first; `told` by the processes' names.

    All were told at the same moment, when the last process had come, so clocks can be compared.
    """
    (first, here), *others = told.items()
    for other, there in others:
        if abs(skew := there["time"] - here["time"]) > LARGEST_SKEW_S:
            yield (
                f"the clock of {other} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} "
                f"that of {first}. Set it, as with chronyd or systemd-timesyncd."
            )
        names = here["facts"] | there["facts"]
        unlike = [n for n in names if here["facts"].get(n) != there["facts"].get(n)]
        for name in unlike[:8]:
            mine, theirs = (f["facts"].get(name) or "none" for f in (here, there))
            yield f"{name} differs: {mine} on {first}, {theirs} on {other}. {_mend(name)}"


def _mend(name: str) -> str:
    if name.startswith("package ") or name == "Python":
        return "Make .venv there anew: remove it, and ./run.sh true."
    if name == "command":
        return "Give all hosts the same."
    return "Send all the same tree, as ./launcher.sh start does."


def meet(where: Place, command: list[str]) -> None:
    """Returns when all processes of the job have met and nothing is wrong with any.

    Raises  ValueError with a line for each thing that is; Fault where a process did not come.
    """
    found = {"wrong": list(wrong_here(command)), "facts": facts(command)}
    try:
        job = Peers(where, silence_s=30.0, start_s=START_S, stage="preflight")
    except Fault as fault:
        port = where.address.rpartition(":")[2]
        raise Fault(f"{fault}. Is port {port} open between the hosts?") from fault
    with contextlib.closing(job):
        job.tell(ended=0, text=json.dumps(found | {"time": time.time()}))
        while not job.all_ended():
            time.sleep(0.02)
        if where.number == 0:
            job.tell(doing="compared")  # what all said reaches all before connections are closed
        records = sorted(job.records.items())
    if gone := job.lost():
        raise Fault("; ".join(gone))
    told = {record.name: json.loads(record.text) for _, record in records if record.text}
    lines = [f"{name}: {line}" for name, one in told.items() for line in one["wrong"]]
    if lines := [*lines, *differences(told)]:
        raise ValueError("\n  ".join(["before the start:", *lines]))


def main(command: list[str]) -> None:
    if where := peers.place():
        meet(where, command)
    if file := os.environ.get("UP_FILE"):  # of who waits for it
        Path(file).touch()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise ValueError(f"{command[0]} cannot be run: {error.strerror}") from error


if __name__ == "__main__":
    command_line(lambda: main(sys.argv[1:]))
