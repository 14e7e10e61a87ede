"""Allow one writer per run directory.

    with writer_lock.held(folder, take_over) as lock:
        lock.check()  # before each write

On a disk, this is `flock` on FOLDER/lock. The file's content is for error messages only.

In a bucket, the object FOLDER/lock names the owner of the run: the environment variable RUN_OWNER,
which a launcher keeps when it restarts a job, else user@host. The same owner, for example after a
crash, replaces the object at once. Another owner is refused until the run ends, or until it uses
--run.take_over. Each write of the object requires the generation that was read before. `check`
compares it again, so a run that was replaced stops before it writes.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from runtime import buckets, distributed
from runtime.console import is_primary, log
from utils import ConfigError

NAME = "lock"
_files: list[IO[bytes]] = []  # locked by this process


class Replaced(ConfigError):
    """Another run has taken over the folder. Starting this one again would be refused."""


@dataclass
class Lock:
    """A lock that is held. On a disk, and in processes other than 0, its methods do nothing."""

    objects: buckets.Prefix | None = None
    generation: int = 0  # of the object that this run wrote
    process: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raise Replaced if another run has taken over. Also raises as buckets.Prefix."""
        if self.objects and self.objects.generation(NAME) != self.generation:
            owner = _described(_read(self.objects)[0])
            raise Replaced(f"{self.objects.url} was taken over by {owner}. This run stops.")

    def release(self) -> None:
        # If the lock cannot be removed, other owners need --run.take_over.
        with contextlib.suppress(buckets.Changed, buckets.Unavailable, buckets.AccessDenied):
            if self.objects and self.process == os.getpid():  # not in a forked child
                self.objects.remove([NAME], self.generation)


@contextlib.contextmanager
def held(folder: str | os.PathLike[str], take_over: bool = False) -> Iterator[Lock]:
    """Hold the lock while the block runs. All processes of the job enter it.

    Raises  on all processes, if process 0 does not get the lock: ConfigError, buckets.Unavailable
    """
    lock, url = Lock(), os.fspath(folder).rstrip("/")
    with contextlib.ExitStack() as stack:
        with distributed.shared_errors():
            if is_primary() and buckets.is_bucket(url):
                lock = _object_lock(buckets.Prefix(url), _record(), take_over)
                stack.callback(lock.release)
            elif is_primary():
                stack.enter_context(_flock(url))
        yield lock


def _record() -> dict[str, Any]:
    host, user = os.uname().nodename, os.environ.get("USER", os.getuid())
    return {
        "owner": os.environ.get("RUN_OWNER") or f"{user}@{host}",
        "host": host,
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(" ".join(sys.argv).split())[:300],
    }


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError):
        return {}


def _described(record: dict[str, Any]) -> str:
    text = "owner {owner}, process {pid} on host {host}, started {started}: {command}"
    return text.format(**dict.fromkeys(_record(), "unknown") | record)


def _refusal(folder: str, record: dict[str, Any]) -> ConfigError:
    more = ", or --run.take_over if that run is gone" if buckets.is_bucket(folder) else ""
    return ConfigError(
        f"{folder} is in use by another run ({_described(record)}). Two runs would overwrite each "
        f"other's files. Wait for it, end it, or use --run.name {os.path.basename(folder)}-2{more}."
    )


@contextlib.contextmanager
def _flock(folder: str) -> Iterator[None]:
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(f"{folder}/{NAME}", "ab+", buffering=0)  # noqa: SIM115  Python sets O_CLOEXEC
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}. Use another --run.dir.") from error
    with file:
        _files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _refusal(folder, _parsed(file.read())) from None
        except OSError as error:
            log(f"warning: {folder} has no flock, so a second run is not prevented: {error}")
        with contextlib.suppress(OSError):  # a full disk; the lock works without the record
            file.truncate(0)
            file.write(json.dumps(_record()).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


# A forked child's copy of the file would keep the lock after the run has ended.
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])


def _read(objects: buckets.Prefix) -> tuple[dict[str, Any], int]:
    with contextlib.suppress(FileNotFoundError):
        content, generation = objects.read_with_generation(NAME)
        return _parsed(content), generation
    return {}, 0


def _object_lock(objects: buckets.Prefix, own: dict[str, Any], take_over: bool) -> Lock:
    while True:
        other, generation = _read(objects)
        if other == own:  # written by a request of this run whose response was lost
            return Lock(objects, generation)
        if generation and other.get("owner") != own["owner"] and not take_over:
            raise _refusal(objects.url, other)
        if generation:
            log(f"{objects.url}: taking over from {_described(other)}")
        with contextlib.suppress(buckets.Changed):  # another run was faster: read again
            return Lock(objects, objects.write(NAME, json.dumps(own).encode(), generation))
