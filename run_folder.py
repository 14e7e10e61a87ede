"""A run's folder: on a disk, or in a bucket, of whose records this process has a copy.

    folder = run_folder.at("gs://bucket/runs/tiny")
    folder.files / "metrics.jsonl"   here they are read and written
    folder.checkpoints               these lie in the bucket alone
    folder.send()

A folder on a disk is its own copy. To a bucket the records are sent before each checkpoint, so that
a run that goes on finds those of all steps up to it, and all files when the run ends.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from etils import epath

import buckets
import checkpoint_folder
from faults import Fault
from metrics import say

CHECKPOINTS = "checkpoints"
LOCK = "lock"


def at(url: str | os.PathLike[str]) -> "Folder":
    """The folder of a run, the same one each time; what stands in a bucket is fetched at first.

    Raises buckets.Refused, a ValueError, and buckets.Unanswered, a Fault.
    """
    text = os.fspath(url)
    if not text.startswith("gs:"):
        return Folder(text)
    text = text.rstrip("/")
    bucket, *names = text.removeprefix(buckets.SCHEME).split("/")
    if not buckets.is_bucket(text) or not bucket or not names or {"", ".", ".."} & {*names}:
        raise ValueError(f"{text} names no folder of a bucket. Give one as gs://bucket/runs/tiny.")
    return _in_bucket(text)


class Folder:
    """Of one run; as text what people call it."""

    def __init__(self, url: str):
        self._url = url
        self.files = Path(url)
        self.name = self.files.name
        self.checkpoints: epath.PathLike = self.files / CHECKPOINTS

    def __str__(self) -> str:
        return self._url

    def path(self, name: str) -> str:
        """What people call a file of it."""
        return str(self.files / name)

    def is_same(self, other: "Folder") -> bool:
        return self.files.resolve() == other.files.resolve()

    def exists(self) -> bool:
        return self.files.is_dir()

    def has_checkpoints(self) -> bool:
        """Whether there is a folder for them, be it empty."""
        return checkpoint_folder.opened(self.checkpoints).exists()

    def saved_steps(self) -> list[int]:
        """Of the checkpoints, good or not."""
        return checkpoint_folder.opened(self.checkpoints).steps()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For who writes: the copy is that of now when the block begins, and is sent, with all
        files, when it ends.

        Raises as `at` does, and Fault if it cannot be sent.
        """
        yield

    def send(self) -> None:
        """Sends the records that have changed. Raises OSError."""


def _temporary(url: str) -> Path:
    """A new folder for the copy. Those of killed processes, which left theirs, are removed."""
    of_url = f"run-{hashlib.sha256(url.encode()).hexdigest()[:12]}-"
    for old in Path(tempfile.gettempdir()).glob(f"{of_url}*"):
        process = old.name.removeprefix(of_url).partition("-")[0]
        if process.isdigit() and not _lives(int(process)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{of_url}{os.getpid()}-"))


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@cache
def _in_bucket(url: str) -> "BucketFolder":
    return BucketFolder(url)


class BucketFolder(Folder):
    def __init__(self, url: str):
        super().__init__(url)
        self._made = _temporary(url)
        self.files = self._made / self.name
        self.checkpoints = f"{url}/{CHECKPOINTS}"
        self._objects = buckets.Prefix(url)
        self._there: dict[str, buckets.Found] = {}  # in the bucket, as this process knows
        atexit.register(self._forget, os.getpid())
        self._fetch()

    def path(self, name: str) -> str:
        return f"{self}/{name}"

    def is_same(self, other: Folder) -> bool:
        return str(self) == str(other)

    def exists(self) -> bool:
        return bool(self._there) or self.has_checkpoints()

    def _fetch(self) -> None:
        found = self._objects.found(records_only=True)
        # Some programs leave objects whose names end as folders do.
        self._there = {n: x for n, x in found.items() if n != LOCK and n and not n.endswith("/")}
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()
        for name in self._there:
            (self.files / name).write_bytes(self._objects.read(name))

    def send(self) -> None:
        self._send(entry for entry in self.files.iterdir() if entry.is_file())

    @contextmanager
    def in_step(self) -> Iterator[None]:
        self._fetch()
        try:
            yield
        except Exception:
            try:
                self._send_all()
            except Fault as fault:
                say(f"warning: {fault}")
            raise
        self._send_all()

    def _send_all(self) -> None:
        try:
            self._send(entry for entry in sorted(self.files.rglob("*")) if entry.is_file())
        except OSError as error:
            atexit.unregister(self._forget)
            raise Fault(
                f"the newest records could not be sent: {error}. They are kept in {self.files}."
            ) from error

    def _send(self, files: Iterable[Path]) -> None:
        for file in files:
            name, content = str(file.relative_to(self.files)), file.read_bytes()
            new = buckets.Found(len(content), buckets.crc32c(content))
            if self._there.get(name) != new:
                self._objects.write(name, content)
                self._there[name] = new

    def _forget(self, process: int) -> None:
        if os.getpid() == process:
            shutil.rmtree(self._made, ignore_errors=True)
