"""The files of a run's checkpoints, in a folder or in a bucket: whole, unfinished, damaged.

A checkpoint `<step>` is whole when it has its name, which in a folder it is given by one rename
when all is written; in a bucket, which cannot rename, when it has COMMIT, which is written last.
Before that, the size and checksum of each file go into CHECKSUMS: CRC-32 in a folder, in a bucket
the CRC32C that it tells of its objects. A copy from one to the other is checked by what it has.
One process writes; any may read.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
from etils import epath

import buckets

CHECKSUMS = "checksums.json"
SPOILED = "damaged.txt"  # why a checkpoint is, where that is known
COMMIT = "commit_success.txt"  # Orbax's name
UNFINISHED = ".orbax-checkpoint-tmp"  # end of the name of a folder that is still being written
PROBE_BYTES = 1 << 12
DATA_LOSS = "DATA_LOSS: "  # tensorstore's word for what fails its own checksums
PIECE_BYTES = 1 << 24  # of a file, which may be larger than memory


class Damaged(ValueError):
    """A checkpoint's values are not those that were saved."""


class Unreadable(Damaged):
    """What one process has to read is not what was written; the others may not know."""


def opened(path: str | os.PathLike[str]) -> "Folder":
    return BucketFolder(str(path)) if buckets.is_bucket(path) else Folder(Path(path).absolute())


def _pieces(file: epath.Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _crc32c(file: epath.Path) -> list[int | str]:
    size, crc = 0, google_crc32c.Checksum()
    for piece in _pieces(file):
        size += len(piece)
        crc.update(piece)
    return [size, buckets.encoded(crc)]


def _crc32(file: epath.Path) -> list[int | str]:
    size = crc = 0
    for piece in _pieces(file):
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry)
        else:
            yield entry


class Folder:
    """On a disk that every process sees. Every method may raise OSError."""

    # What writing and reading there raises, in Orbax too.
    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, path: str | os.PathLike[str]):
        self.path = epath.Path(path)

    @contextmanager
    def asked(self, step: int | None = None) -> Iterator[None]:
        """In which Orbax is asked for what lies there, of a step.

        Raises  Unreadable for content that is not what was written.
        """
        try:
            yield
        except ValueError as error:
            if DATA_LOSS not in str(error):
                raise
            why = buckets.one_line(error)
            raise Unreadable(
                f"the checkpoint of step {step} in {self.path} is damaged: {why}"
            ) from error

    def outside(self, error: BaseException | None) -> BaseException | None:
        """The same error, or, for what a bucket raised in Orbax, one that says what it is."""
        return error

    def exists(self) -> bool:
        return self.path.is_dir()

    def names(self) -> list[str]:
        """Of all checkpoints, whole or not, and of what else is there."""
        return [entry.name for entry in self.path.iterdir()] if self.exists() else []

    def steps(self) -> list[int]:
        """Of the checkpoints that are whole, damaged or not. Asked here and not of Orbax, which
        takes a folder for empty where looking into it fails.
        """
        return sorted(int(name) for name in self.names() if name.isdigit())

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def try_to_write(self, process: int) -> None:
        """Raises what a save by this process would raise."""
        probe = self.path / f"probe-{process}"
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def unfinished(self) -> list[str]:
        """Names of those that are being written, or were when their run stopped."""
        return sorted(entry.name for entry in self.path.iterdir() if UNFINISHED in entry.name)

    def remove(self, name: str) -> None:
        (self.path / name).rmtree()

    def is_whole(self, step: int) -> bool:
        return (self.path / str(step)).is_dir()

    def spoil(self, step: int, why: str) -> None:
        """Notes that a checkpoint is damaged, for the next start, which puts it aside."""
        (self.path / str(step) / SPOILED).write_text(why)

    def put_aside(self, step: int) -> None:
        """As `damaged-<step>`, so that the step can be saved again."""
        aside = self.path / f"damaged-{step}"
        if aside.exists():
            aside.rmtree()
        (self.path / str(step)).rename(aside)

    def write_checksums(self, step: int) -> None:
        """When all files are there, and before the checkpoint is whole."""
        named = (str(step), f"{step}{UNFINISHED}")
        [name] = [entry.name for entry in self.path.iterdir() if entry.name in named]
        text = json.dumps(self._checksums(name, _crc32))
        with open(self.path / name / CHECKSUMS, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a whole checkpoint, in words; None if nothing is."""
        try:
            if why := self._read(step, SPOILED):
                return why
            expected = dict(json.loads(self._read(step, CHECKSUMS) or "missing"))
            of_bucket = any(isinstance(crc, str) for _, crc in expected.values())
            found = self._checksums(str(step), _crc32c if of_bucket else _crc32)
        except (buckets.Refused, buckets.Unanswered):
            raise
        except (OSError, ValueError, TypeError) as error:
            return f"{CHECKSUMS} or a file named there cannot be read ({error})"
        if not expected:
            return f"{CHECKSUMS} names no file"
        for name, as_written in expected.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != as_written:
                return f"{name}: expected [bytes, checksum] {as_written}, found {found[name]}"
        return None

    def _read(self, step: int, name: str) -> str:
        """A file of a checkpoint; empty where it is not there."""
        file = self.path / str(step) / name
        return file.read_text() if file.exists() else ""

    def _checksums(
        self, name: str, of: Callable[[epath.Path], list[int | str]]
    ) -> dict[str, list[int | str]]:
        """Of every file in the items' folders, by path. Beside these Orbax still writes its own
        log.
        """
        folder = self.path / name
        items = [entry for entry in folder.iterdir() if entry.is_dir()]
        return self._of_all(folder, sorted(f for item in items for f in _files(item)), of)

    def _of_all(
        self,
        folder: epath.Path,
        files: Iterable[epath.Path],
        of: Callable[[epath.Path], list[int | str]],
    ) -> dict[str, list[int | str]]:
        files = list(files)
        with ThreadPoolExecutor(4) as pool:
            return {
                str(file.relative_to(folder)): found
                for file, found in zip(files, pool.map(of, files), strict=True)
            }


class BucketFolder(Folder):
    """In a bucket, which tells what it holds without being read. Raises what buckets.told does."""

    def __init__(self, url: str):
        super().__init__(url)
        self._objects = buckets.Prefix(url)
        self.failures = (*buckets.transient(), ValueError)  # the last of tensorstore

    @contextmanager
    def asked(self, step: int | None = None) -> Iterator[None]:
        """What the bucket lists is there: what fails in Orbax all the same is the bucket's."""
        try:
            with super().asked(step):
                yield
        except Damaged:
            raise
        except Exception as error:
            raise self._in_words(error) from error

    def _in_words(self, error: Exception) -> Exception:
        if isinstance(error, buckets.Refused | buckets.Unanswered):
            return error
        if why := buckets.refusal(str(self.path), error):
            return buckets.Refused(why)
        what = f"{type(error).__name__}: {buckets.one_line(error)}"
        return buckets.Unanswered(f"{self.path} did not answer as it should: {what}")

    def outside(self, error: BaseException | None) -> BaseException | None:
        return self._in_words(error) if isinstance(error, self.failures) else error

    def exists(self) -> bool:
        return bool(self._objects.found())

    def names(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._objects.found()})

    def steps(self) -> list[int]:
        names = [name.split("/") for name in self._objects.found()]
        return sorted(int(n[0]) for n in names if n[1:] == [COMMIT] and n[0].isdigit())

    def make(self) -> None:
        """Nothing: buckets have no folders."""

    def try_to_write(self, process: int) -> None:
        self._objects.write(f"probe-{process}", bytes(PROBE_BYTES))  # stays, as a folder would

    def unfinished(self) -> list[str]:
        names = [name.split("/") for name in self._objects.found() if "/" in name]
        steps = {first for first, *_ in names if first.isdigit()}
        return sorted(steps - {first for first, *rest in names if rest == [COMMIT]})

    def remove(self, name: str) -> None:
        self._objects.remove(self._objects.found(f"{name}/"))

    def is_whole(self, step: int) -> bool:
        return COMMIT in self._names(str(step))

    def spoil(self, step: int, why: str) -> None:
        self._objects.write(f"{step}/{SPOILED}", why.encode())

    def put_aside(self, step: int) -> None:
        self.remove(f"damaged-{step}")
        names = self._names(str(step))
        # First, so that one that is half moved is unfinished.
        for name in sorted(names, key=lambda name: name != COMMIT):
            self._objects.move(f"{step}/{name}", f"damaged-{step}/{name}")

    def write_checksums(self, step: int) -> None:
        text = json.dumps(self._checksums(str(step), _crc32c))
        self._objects.write(f"{step}/{CHECKSUMS}", text.encode())

    def _read(self, step: int, name: str) -> str:
        try:
            return self._objects.read(f"{step}/{name}").decode()
        except FileNotFoundError:
            return ""

    def _names(self, name: str) -> dict[str, buckets.Found]:
        found = self._objects.found(f"{name}/")
        return {key.removeprefix(f"{name}/"): object_ for key, object_ in found.items()}

    def _checksums(
        self, name: str, of: Callable[[epath.Path], list[int | str]]
    ) -> dict[str, list[int | str]]:
        found = {key: x for key, x in self._names(name).items() if "/" in key}
        if of is _crc32c:
            return {key: list(object_) for key, object_ in found.items()}
        folder = self.path / name
        with buckets.told(str(folder)):
            return self._of_all(folder, (folder / key for key in found), of)
