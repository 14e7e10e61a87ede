"""Splits tokenized by a Ray cluster, for `data/prepare.py --ray`.

    ./run.sh ray start --head                                on one machine
    ./run.sh ray start --address HEAD:6379                   on the others
    python data/prepare.py --ray HEAD:6379 --source gs://bucket/books --out gs://bucket/data

A split is a task: a node reads it, and writes its shards and its record to OUT. This checkout, and
a source or an OUT that is in no bucket, must be at the same path on every machine.
"""

import functools
import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from buckets import one_line
from data.encode import Job, Record, tokenize_split
from data.settings import Prepare
from data.shards import folder_at
from faults import Fault
from manifest import file_crc32c

ROOT = Path(__file__).resolve().parent.parent
DECIDING = ("ray", "tiktoken", "tokenizers", "numpy", "pyarrow", "jinja2")  # what decides the bits
CONNECT_S = 10.0  # to the head
WAIT_S = 5.0  # between two looks at what is done
TRIES = 20  # of a task whose worker or node dies


def results(config: Prepare, jobs: list[Job]) -> Iterator[Record]:
    """As splits end, in any order.

    Raises  ValueError where there is no cluster, or a node would make other bits; Fault where a
    task is lost too often; what tokenize_split raises.
    """
    ray = imported()
    connect(config.ray)
    try:
        task = ray.remote(max_retries=TRIES)(on_node)
        asked = versions(os.getcwd())
        pending = {task.remote(job, asked): job for job in jobs}
        while pending:
            done, _ = ray.wait([*pending], num_returns=len(pending), timeout=WAIT_S)
            for ref in done:
                job, record = pending.pop(ref), got(ref)
                if not folder_at(config.out).found(job.record):
                    raise ValueError(
                        f"a node wrote {config.out}/{job.record}, and it is not here: --out is no "
                        "folder that all machines share. Use one, or one in a bucket."
                    )
                yield record
    finally:
        ray.shutdown()


def on_node(job: Job, asked: dict[str, str]) -> Record:
    """The task. Raises ValueError where this node would make other bits."""
    here = versions(asked["folder"])
    differ = [n for n in sorted(asked.keys() | here.keys()) if asked.get(n) != here.get(n)]
    if differ:
        raise ValueError(
            f"node {platform.node()} has another {', '.join(differ)} than the machine that asks. "
            "Bring this checkout and its environment there, or take the node out."
        )
    os.chdir(here["folder"])
    return tokenize_split(job)


@functools.cache
def versions(folder: str) -> dict[str, str]:
    """Of what decides the bits; and the folder to work in, where there is one."""
    found = {"python": platform.python_version()}
    found |= {"folder": folder} if Path(folder).is_dir() else {}
    found |= {name: importlib.metadata.version(name) for name in DECIDING}
    files = [*sorted((ROOT / "data").glob("*.py")), ROOT / "manifest.py"]
    return found | {path.relative_to(ROOT).as_posix(): file_crc32c(path) for path in files}


def got(ref: Any) -> Record:
    """What a task returned. Raises what it raised."""
    ray = imported()
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)  # what the task raised
        if cause and not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        raise Fault(
            f"the cluster did not do a task in {TRIES} tries ({one_line(error)}). Start this "
            "again: splits that are done are kept."
        ) from error


def connect(address: str) -> None:
    """To the cluster at HOST:PORT; local starts one on this machine."""
    ray = imported()
    try:
        if address != "local":  # Ray would wait for minutes where nothing answers
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"there is no Ray cluster at --ray {address} ({one_line(error)}). Start one with "
            "./run.sh ray start --head, or use --ray local."
        ) from error
    if ray.cluster_resources().get("CPU", 0) < 1:
        raise ValueError(
            "the cluster has no node with a CPU. Let one join: ./run.sh ray start --address "
            f"{address}."
        )


@functools.cache
def imported() -> Any:
    """Raises ValueError where ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--ray needs Ray. Run uv pip install --python .venv/bin/python -r "
            "requirements-ray.txt, or without uv ./run.sh python -m pip install -r "
            "requirements-ray.txt."
        ) from error
    return ray
