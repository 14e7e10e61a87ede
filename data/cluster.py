"""Tokenize splits on a Ray cluster, for `data/prepare.py --ray`.

    ./run.sh ray start --head                                on one machine
    ./run.sh ray start --address HEAD:6379                   on the others
    python data/prepare.py --ray HEAD:6379 --source gs://bucket/books --out gs://bucket/data

Each split is a task: a node reads it, and writes its shards and its record to OUT. This checkout
must have the same path on every machine; so must a source or an OUT outside a bucket.
"""

import functools
import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

from data.encode import Job, Record, tokenize_split
from data.manifest import file_crc32c
from data.settings import Prepare
from runtime import storage
from runtime.errors import TransientError, one_line
from utils import ConfigError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
except ImportError as error:
    raise ConfigError(
        "--ray needs Ray. Run ./run.sh uv pip install -r requirements-ray.txt."
    ) from error

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ray", "tiktoken", "tokenizers", "numpy", "pyarrow", "jinja2")  # affect the result
CONNECT_S = 10.0  # timeout of the connection to the head
RETRIES = 20  # of a task whose worker or node dies


def results(config: Prepare, jobs: list[Job]) -> Iterator[Record]:
    """Yield the records of jobs, in order.

    Raises  ConfigError if there is no cluster, or a node has other versions; TransientError if a
            task is lost too often; the errors of tokenize_split.
    """
    connect(config.ray)
    try:
        task, expected = ray.remote(max_retries=RETRIES)(on_node), versions(os.getcwd())
        for job, ref in [(job, task.remote(job, expected)) for job in jobs]:
            record = ray.get(ref)
            if not storage.at(config.out).files(job.record):
                raise ConfigError(
                    f"a node wrote {config.out}/{job.record}, which does not exist here. Use an "
                    "--out that all machines share, or one in a bucket."
                )
            yield record
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)  # the task's own exception
        if cause and not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        raise TransientError(
            f"the cluster lost a task {RETRIES} times ({one_line(error)}). Start again: finished "
            "splits are kept."
        ) from error
    finally:
        ray.shutdown()


def on_node(job: Job, expected: dict[str, str]) -> Record:
    """Run the task. Raises ConfigError if this node has other versions, and so other results."""
    here = versions(expected["folder"])
    names = sorted(expected.keys() | here.keys())
    if differ := [name for name in names if expected.get(name) != here.get(name)]:
        raise ConfigError(
            f"node {platform.node()} has another {', '.join(differ)} than the machine that started "
            "this. Copy this checkout and its environment there, or remove the node."
        )
    os.chdir(here["folder"])
    return tokenize_split(job)


@functools.cache
def versions(folder: str) -> dict[str, str]:
    """Return versions of everything that affects the result, and the working directory."""
    environment = {"python": platform.python_version()}
    environment |= {"folder": folder} if Path(folder).is_dir() else {}
    environment |= {name: importlib.metadata.version(name) for name in PACKAGES}
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "data").glob("*.py"))
    return environment | {name: file_crc32c(storage.at(ROOT), name) for name in files}


def connect(address: str) -> None:
    """Connect to the cluster at HOST:PORT; local starts one on this machine."""
    try:
        if address != "local":  # Ray itself times out after minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at --ray {address} ({one_line(error)}). Start one with "
            "./run.sh ray start --head, or use --ray local."
        ) from error
    if ray.cluster_resources().get("CPU", 0) < 1:
        raise ConfigError(
            f"the cluster has no node with a CPU. Add one: ./run.sh ray start --address {address}."
        )
