"""Allow one writer per run directory.

    with writer_lock.held(folder, take_over) as lock:
        lock.check()  # before each write

On a disk, this is `flock` on FOLDER/lock. The file's content is for error messages only.

In a bucket, the object FOLDER/lock names the owner of the run: the environment variable RUN_OWNER,
which a launcher keeps when it restarts a job, else user@host. The same owner, for example after a
crash, replaces the object at once. Another owner is refused until the run ends, or until it uses
--run.take_over. Each write of the object requires the version that was read before. `check`
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
from pathlib import Path
from typing import IO, Any

from runtime import distributed, storage
from runtime.console import is_primary, log
from utils import ConfigError

NAME = "lock"
_files: list[IO[bytes]] = []  # locked by this process


class Replaced(ConfigError):
    """Another run has taken over the folder. Starting this one again would be refused."""


@dataclass
class Lock:
    """A lock that is held. On a disk, and in processes other than 0, its methods do nothing."""

    folder: storage.BucketFolder | None = None
    version: Any = None  # of the file that this run wrote
    process: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raise Replaced if another run has taken over. Also raises as storage.Folder."""
        if self.folder:
            content, version = self.folder.read_with_version(NAME)
            if version != self.version:
                owner = _described(_parsed(content))
                raise Replaced(f"{self.folder.url} was taken over by {owner}. This run stops.")

    def release(self) -> None:
        # If the lock cannot be removed, other owners need --run.take_over.
        with contextlib.suppress(storage.Changed, storage.Unavailable, storage.AccessDenied):
            if self.folder and self.process == os.getpid():  # not in a forked child
                self.folder.remove([NAME], self.version)


@contextlib.contextmanager
def held(url: str | os.PathLike[str], take_over: bool = False) -> Iterator[Lock]:
    """Hold the lock while the block runs. All processes of the job enter it.

    Raises  on all processes, if process 0 does not get the lock: ConfigError, storage.Unavailable
    """
    lock, folder = Lock(), storage.at(url)
    with contextlib.ExitStack() as stack:
        with distributed.shared_errors():
            if is_primary() and folder.path:
                stack.enter_context(_flock(folder.path))
            elif is_primary():
                lock = _lock_by_version(folder, _record(), take_over)
                stack.callback(lock.release)
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


def _refusal(folder: str | Path, record: dict[str, Any], more: str = "") -> ConfigError:
    return ConfigError(
        f"{folder} is in use by another run ({_described(record)}). Two runs would overwrite each "
        f"other's files. Wait for it, end it, or use --run.name {os.path.basename(folder)}-2{more}."
    )


@contextlib.contextmanager
def _flock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("ab+", buffering=0)
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


def _lock_by_version(folder: storage.BucketFolder, own: dict[str, Any], take_over: bool) -> Lock:
    while True:
        content, version = folder.read_with_version(NAME)
        other = _parsed(content)
        if other == own:  # written by a request of this run whose response was lost
            return Lock(folder, version)
        if version != storage.ABSENT:
            if other.get("owner") != own["owner"] and not take_over:
                raise _refusal(folder.url, other, ", or --run.take_over if that run is gone")
            log(f"{folder.url}: taking over from {_described(other)}")
        with contextlib.suppress(storage.Changed):  # another run was faster: read again
            return Lock(folder, folder.write(NAME, json.dumps(own).encode(), version))
