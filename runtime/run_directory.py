"""The directory of a run, on a disk or in a bucket, and the files of its checkpoints.

    directory = run_directory.at("gs://bucket/runs/tiny")
    directory.files / "metrics.jsonl"   to read and write
    directory.upload()                  uploads changed files, before each save

An upload is atomic, so a run that is killed leaves a prefix of its records. Each requires the
version that it replaces: a request that is repeated or delayed has no effect.

Orbax writes COMMIT last: the folder `<step>` of a checkpoint is complete if it has this file. A
checkpoint is removed by removing COMMIT first.
"""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from runtime import storage, writer_lock
from runtime.console import log
from runtime.errors import TransientError
from utils import Config, ConfigError

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"  # folder of a tokenizer that was given by its path
HF = "hf"  # folder with config.json and generation_config.json of the imported base
COMMIT = "commit_success.txt"  # as Orbax documents it
UNFINISHED = ".orbax-checkpoint-tmp"  # part of the name of a folder that Orbax is writing
PROBE_BYTES = 1 << 12


def at(url: str | os.PathLike[str]) -> "RunDirectory":
    """Return the directory of a run. For a bucket, download its files at the first call.

    Raises  storage.AccessDenied, a ConfigError; storage.Unavailable, a TransientError
    """
    text = os.fspath(url).rstrip("/")
    if not re.match(r"\w+:/", text):
        return RunDirectory(text)
    if not re.fullmatch(r"\w+:/(/[^/]+){2,}", text) or {".", ".."} & {*text.split("/")}:
        raise ConfigError(f"{text} names no folder of a bucket. Give one as gs://bucket/runs/tiny.")
    return _remote(text)


def of(config: Config) -> "RunDirectory":
    """Return the directory of the run with this config."""
    return at(os.path.join(config.run.dir, config.run.name))


class RunDirectory:
    """The directory of one run; str() is its path or URL.

    files        the local path of its files: for a bucket, of a copy of them
    checkpoints  path or URL of the folder of checkpoints
    check_lock   of the run that writes here (runtime/writer_lock.py), called before each upload
    """

    def __init__(self, url: str):
        self._url, self._folder = url, storage.at(url)
        self.name = os.path.basename(url)
        self.check_lock: Callable[[], None] = lambda: None
        if self._folder.path:
            self.files, self.checkpoints = self._folder.path, self._folder.path / CHECKPOINTS
            return
        self._temporary = Path(tempfile.mkdtemp(prefix="run-"))
        self.files, self.checkpoints = self._temporary / self.name, f"{url}/{CHECKPOINTS}"
        self._uploaded: dict[str, tuple[bytes, Any]] = {}  # hash of the content, version
        atexit.register(self._delete_copy, os.getpid())
        self._download()

    def __str__(self) -> str:
        return self._url

    def exists(self) -> bool:
        return self._folder.exists()

    def has_checkpoints(self) -> bool:
        """Return whether the folder of checkpoints exists. It may be empty."""
        return storage.at(self.checkpoints).exists()

    def saved_steps(self) -> list[int]:
        """Return the steps of complete checkpoints, damaged or not."""
        return CheckpointDirectory(self.checkpoints).steps()

    def folder(self, name: str) -> Path:
        """Return the local path of a folder of a few files, which may not exist."""
        local = self.files / name
        if not self._folder.path and not local.exists():
            for file in self._folder.files(f"{name}/"):
                local.mkdir(exist_ok=True)
                (self.files / file).write_bytes(self._folder.read(file))
        return local

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
        if self._folder.path:
            yield
            return
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

    def _download(self) -> None:
        names = [name for name in self._folder.names() if not name.endswith("/")]
        names = [name for name in names if name not in (writer_lock.NAME, "")]  # "" for a folder
        with ThreadPoolExecutor(storage.AT_ONCE) as pool:
            contents = list(pool.map(self._folder.read_with_version, names))
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()
        self._uploaded.clear()
        for name, (content, version) in zip(names, contents, strict=True):
            (self.files / name).write_bytes(content)
            self._uploaded[name] = hashlib.sha256(content).digest(), version

    def _upload_all(self) -> None:
        try:
            self.upload(self.files.rglob("*"))
        except OSError as error:
            atexit.unregister(self._delete_copy)
            raise TransientError(
                f"the newest records could not be uploaded: {error}. They are kept in {self.files}."
            ) from error

    def upload(self, files: Iterable[Path] | None = None) -> None:
        """Upload changed files, by default the records. Raises writer_lock.Replaced and OSError."""
        if self._folder.path:
            return
        self.check_lock()
        for file in sorted(filter(Path.is_file, files or self.files.iterdir())):
            name, content = file.relative_to(self.files).as_posix(), file.read_bytes()
            uploaded, version = self._uploaded.get(name, (b"", storage.ABSENT))
            if uploaded != (new := hashlib.sha256(content).digest()):
                try:
                    version = self._folder.write(name, content, version)
                except storage.Changed:  # also by this request, if its response was lost
                    version = self._folder.write(name, content)
                self._uploaded[name] = new, version

    def _delete_copy(self, process: int) -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(self._temporary, ignore_errors=True)


_remote = cache(RunDirectory)


# --- checkpoints ----------------------------------------------------------------------------------


class CheckpointDirectory:
    """The checkpoints of a run: complete, unfinished, quarantined. Methods raise as storage.Folder.

    On a disk, all processes share the folder.
    """

    def __init__(self, url: str | os.PathLike[str]):
        folder = storage.at(url)
        # Orbax needs an absolute path.
        self.folder = storage.at(folder.path.absolute()) if folder.path else folder

    def is_complete(self, step: int) -> bool:
        return self.folder.exists(f"{step}/{COMMIT}")

    def _names(self) -> list[str]:
        return [name.removesuffix("/") for name in self.folder.names() if name.endswith("/")]

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints."""
        return sorted(int(n) for n in self._names() if n.isdigit() and self.is_complete(int(n)))

    def unfinished(self) -> list[str]:
        """Return the folders whose write or removal is not complete, or was interrupted."""
        steps = {str(step) for step in self.steps()}
        return [n for n in self._names() if UNFINISHED in n or (n.isdigit() and n not in steps)]

    def try_to_write(self, process: int) -> None:
        """Raise what a save by this process would raise."""
        self.folder.write(probe := f"probe-{process}", bytes(PROBE_BYTES))
        if self.folder.path:  # in a bucket it remains, as the folder does on a disk
            self.folder.remove([probe])

    def remove(self, name: str) -> None:
        self.folder.remove([f"{name}/{COMMIT}"])
        self.folder.remove_folder(name)

    def quarantine(self, step: int) -> None:
        """Rename a checkpoint to `damaged-<step>`, so that the step can be saved again."""
        if (damaged := f"damaged-{step}") in self._names():
            self.folder.remove_folder(damaged)
        self.folder.move(str(step), damaged, first=COMMIT)
