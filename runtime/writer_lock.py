"""Allow one writer per run directory.

    with writer_lock.held(folder, take_over) as check:
        check()  # before each write

On a disk, this is `flock` on FOLDER/lock. The file's content is for error messages only.

In a bucket, the object FOLDER/lock names the owner of the run: the environment variable RUN_OWNER,
which a launcher keeps when it restarts a job, else user@host. The same owner, for example after a
crash, replaces the object at once. Another owner is refused until the run ends, or until it uses
--run.take_over. Each write of the object requires the version that was read before. `check`
compares it again, so a run that was replaced stops before it writes.
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from runtime import distributed, storage
from runtime.console import is_primary, log
from utils import ConfigError

NAME = "lock"
_files: list[IO[bytes]] = []  # locked by this process


class Replaced(ConfigError):
    """Another run has taken over the folder. Starting this one again would be refused."""


@contextlib.contextmanager
def held(url: str | os.PathLike[str], take_over: bool = False) -> Iterator[Callable[[], None]]:
    """Hold the lock while the block runs. All processes of the job enter it.

    Yield a function that raises Replaced if another run has taken over, or as storage.Folder. On a
    disk, and in processes other than 0, it does nothing.

    Raises  on all processes, if process 0 does not get the lock: ConfigError, storage.Unavailable
    """
    folder, check = storage.at(url), lambda: None
    with contextlib.ExitStack() as stack:
        with distributed.shared_errors():
            if is_primary() and folder.path:
                stack.enter_context(_flock(folder.path))
            elif is_primary():
                check = stack.enter_context(_lock_by_version(folder, take_over))
        yield check


def _owner() -> str:
    user = os.environ.get("USER", os.getuid())
    return os.environ.get("RUN_OWNER") or f"{user}@{os.uname().nodename}"


def _description() -> str:
    """Describe this run. This is the content of the lock."""
    started, command = time.strftime("%Y-%m-%d %H:%M:%S %z"), " ".join(" ".join(sys.argv).split())
    process = f"process {os.getpid()} on host {os.uname().nodename}"
    return f"owner {_owner()}, {process}, started {started}: {command[:300]}"


def _refusal(folder: str | Path, content: bytes, more: str = "") -> ConfigError:
    return ConfigError(
        f"{folder} is in use by another run ({content.decode(errors='replace')}). Two runs would "
        "overwrite each other's files. Wait for it, end it, or use --run.name "
        f"{os.path.basename(folder)}-2{more}."
    )


@contextlib.contextmanager
def _flock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("ab+", buffering=0)
    except OSError as error:
        raise storage.at(folder).explained(error) from error
    with file:
        _files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _refusal(folder, file.read()) from None
        except OSError as error:
            log(f"warning: {folder} has no flock, so a second run is not prevented: {error}")
        with contextlib.suppress(OSError):  # a full disk; the lock works without its content
            file.truncate(0)
            file.write(_description().encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


# A forked child's copy of the file would keep the lock after the run has ended.
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])


@contextlib.contextmanager
def _lock_by_version(folder: storage.BucketFolder, take_over: bool) -> Iterator[Callable[[], None]]:
    process, version = os.getpid(), _written(folder, take_over)

    def check() -> None:
        content, newest = folder.read_with_version(NAME)
        if newest != version:
            other = content.decode(errors="replace")
            raise Replaced(f"{folder.url} was taken over by {other}. This run stops.")

    try:
        yield check
    finally:
        # If the lock cannot be removed, other owners need --run.take_over.
        with contextlib.suppress(storage.Changed, storage.Unavailable, storage.AccessDenied):
            if process == os.getpid():  # not in a forked child
                folder.remove([NAME], version)


def _written(folder: storage.BucketFolder, take_over: bool) -> int:
    """Write the lock, unless it is of another owner, and return its version."""
    own = _description().encode()
    while True:
        content, version = folder.read_with_version(NAME)
        if content == own:  # written by a request of this run whose response was lost
            return version
        if version != storage.ABSENT:
            if not (content.startswith(f"owner {_owner()}, ".encode()) or take_over):
                raise _refusal(folder.url, content, ", or --run.take_over if that run is gone")
            log(f"{folder.url}: taking over from {content.decode(errors='replace')}")
        with contextlib.suppress(storage.Changed):  # another run was faster: read again
            return folder.write(NAME, own, version)
