"""The directory of a run, on a disk or in a bucket. For a bucket, this process has a local copy.

    directory = run_directory.at("gs://bucket/runs/tiny")
    directory.files / "metrics.jsonl"   local copy, to read and write
    directory.checkpoints               in the bucket only
    directory.upload()                  uploads changed files, before each save

`upload` appends to the object of a file that has grown, and replaces it after any other change. An
upload is atomic, so a run that is killed leaves a prefix of its records. Each upload requires the
generation that it replaces: a request that is repeated or delayed has no effect.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from etils import epath

from runtime import buckets, checkpoint_directory, writer_lock
from runtime.console import log
from runtime.errors import TransientError
from utils import Config, ConfigError

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"  # folder of a tokenizer that was given by its path
HF = "hf"  # folder with config.json and generation_config.json of the imported base
WRITE_TRIES = 3


def at(url: str | os.PathLike[str]) -> "RunDirectory":
    """Return the directory of a run. For a bucket, download its files at the first call.

    Raises  buckets.AccessDenied, a ConfigError; buckets.Unavailable, a TransientError
    """
    text = os.fspath(url).rstrip("/")
    if not text.startswith("gs:"):
        return RunDirectory(text)
    bucket, *names = text.removeprefix(buckets.SCHEME).split("/")
    if not buckets.is_bucket(text) or not bucket or not names or {"", ".", ".."} & {*names}:
        raise ConfigError(f"{text} names no folder of a bucket. Give one as gs://bucket/runs/tiny.")
    return _in_bucket(text)


def of(config: Config) -> "RunDirectory":
    """Return the directory of the run with this config."""
    return at(os.path.join(config.run.dir, config.run.name))


class RunDirectory:
    """The directory of one run; str() is its path or URL."""

    lock: writer_lock.Lock | None = None  # in the run that writes here

    def __init__(self, url: str):
        self._url = url
        self.files = Path(url)
        self.name = self.files.name
        self.checkpoints: epath.PathLike = self.files / CHECKPOINTS

    def __str__(self) -> str:
        return self._url

    def exists(self) -> bool:
        return self.files.is_dir()

    def has_checkpoints(self) -> bool:
        """Return whether the folder of checkpoints exists. It may be empty."""
        return checkpoint_directory.open_directory(self.checkpoints).exists()

    def saved_steps(self) -> list[int]:
        """Return the steps of complete checkpoints, damaged or not."""
        return checkpoint_directory.open_directory(self.checkpoints).steps()

    def folder(self, name: str) -> Path:
        """Return the local path of a folder of a few files, which may not exist."""
        return self.files / name

    def tokenizer(self, name: str) -> str:
        """Return the path of the run's own tokenizer, or else the name in its checkpoint."""
        own = self.folder(TOKENIZER)
        return str(own) if own.is_dir() else name

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Download the files at the start of the block, and upload all of them at its end. Only
        process 0, which holds the lock, enters it.

        Raises  as `at` and `upload`; TransientError if an upload fails
        """
        yield

    def upload(self, files: Iterable[Path] | None = None) -> None:
        """Upload changed files, by default the records. Raises writer_lock.Replaced and OSError."""


class _Uploaded(NamedTuple):
    """The last known content of an object."""

    size: int
    crc32: int
    generation: int


class BucketRunDirectory(RunDirectory):
    def __init__(self, url: str):
        super().__init__(url)
        self._temporary = Path(tempfile.mkdtemp(prefix="run-"))
        self.files = self._temporary / self.name
        self.checkpoints = f"{url}/{CHECKPOINTS}"
        self._objects = buckets.Prefix(url)
        atexit.register(self._delete_copy, os.getpid())
        self._download()

    def exists(self) -> bool:
        return any(self.files.iterdir()) or self.has_checkpoints()

    def _download(self) -> None:
        found = self._objects.list_objects(records_only=True)
        other = {writer_lock.NAME, ""}  # some programs create "" for a folder
        names = [n for n in found if n not in other and not n.endswith(buckets.PART)]
        with ThreadPoolExecutor(buckets.AT_ONCE) as pool:
            contents = list(pool.map(self._objects.read_with_generation, names))
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()
        self._uploaded: dict[str, _Uploaded] = {}
        for name, (content, generation) in zip(names, contents, strict=True):
            (self.files / name).write_bytes(content)
            self._uploaded[name] = _Uploaded(len(content), crc32(content), generation)

    def folder(self, name: str) -> Path:
        local = self.files / name
        if not local.exists():
            for file in self._objects.list_objects(f"{name}/"):
                local.mkdir(exist_ok=True)
                (self.files / file).write_bytes(self._objects.read(file))
        return local

    @contextmanager
    def synced(self) -> Iterator[None]:
        self._download()
        try:
            yield
        except Exception:
            try:
                self._upload_all()
            except (TransientError, ConfigError) as error:
                log(f"warning: {error}")
            raise
        self._upload_all()

    def _upload_all(self) -> None:
        try:
            self.upload(self.files.rglob("*"))
        except OSError as error:
            atexit.unregister(self._delete_copy)
            raise TransientError(
                f"the newest records could not be uploaded: {error}. They are kept in {self.files}."
            ) from error

    def upload(self, files: Iterable[Path] | None = None) -> None:
        if self.lock:
            self.lock.check()
        for file in sorted(filter(Path.is_file, files or self.files.iterdir())):
            name, content = str(file.relative_to(self.files)), file.read_bytes()
            old = self._uploaded.pop(name, None)  # unknown until the write succeeds
            new = len(content), crc32(content)
            same = old and old[:2] == new
            self._uploaded[name] = old if same else _Uploaded(*new, self._write(name, content, old))

    def _write(self, name: str, content: bytes, old: _Uploaded | None) -> int:
        """Upload what is new, and return the object's generation.

        Changed can also mean that this write succeeded and its response was lost.
        """
        if old and old.size and crc32(content[: old.size]) == old.crc32:
            with suppress(buckets.Changed):
                return self._objects.append(name, content[old.size :], old.generation)
        for _ in range(WRITE_TRIES):
            with suppress(buckets.Changed):
                return self._objects.write(name, content, self._objects.generation(name))
        raise buckets.Unavailable(f"{self}/{name} is being changed by another program.")

    def _delete_copy(self, process: int) -> None:
        if os.getpid() == process:
            shutil.rmtree(self._temporary, ignore_errors=True)


_in_bucket = cache(BucketRunDirectory)
