"""The files of a run's checkpoints, on a disk or in a bucket: complete, unfinished, quarantined.

Orbax writes COMMIT last: a folder `<step>` is complete if it has this file. A checkpoint is removed
by removing COMMIT first. Methods raise OSError; in a bucket, as `buckets.translated_errors`.
"""

import os
import shutil
from pathlib import Path

from runtime import buckets

COMMIT = "commit_success.txt"  # as Orbax documents it
UNFINISHED = ".orbax-checkpoint-tmp"  # part of the name of a folder that Orbax is writing
PROBE_BYTES = 1 << 12


def open_directory(path: str | os.PathLike[str]) -> "CheckpointDirectory":
    if buckets.is_bucket(path):
        return BucketCheckpointDirectory(str(path))
    return CheckpointDirectory(path)


class CheckpointDirectory:
    """On a disk that all processes share."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = str(Path(path).absolute())

    def exists(self, name: str = "") -> bool:
        """Return whether the folder, or `name` in it, exists.

        Unlike `os.path.exists`, raise if the disk cannot be read.
        """
        try:
            os.stat(f"{self.path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.exists() else []

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints."""
        return sorted(int(n) for n in self._names() if n.isdigit() and self.is_complete(int(n)))

    def is_complete(self, step: int) -> bool:
        return self.exists(f"{step}/{COMMIT}")

    def unfinished(self) -> list[str]:
        """Return the folders whose write or removal is not complete, or was interrupted."""
        steps = {str(step) for step in self.steps()}
        return [n for n in self._names() if UNFINISHED in n or (n.isdigit() and n not in steps)]

    def try_to_write(self, process: int) -> None:
        """Raise what a save by this process would raise."""
        os.makedirs(self.path, exist_ok=True)
        probe = Path(self.path, f"probe-{process}")
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        Path(self.path, name, COMMIT).unlink(missing_ok=True)
        shutil.rmtree(f"{self.path}/{name}")

    def quarantine(self, step: int) -> None:
        """Rename a checkpoint to `damaged-<step>`, so that the step can be saved again."""
        shutil.rmtree(f"{self.path}/damaged-{step}", ignore_errors=True)
        os.rename(f"{self.path}/{step}", f"{self.path}/damaged-{step}")

    def read(self, name: str) -> bytes:
        return Path(self.path, name).read_bytes()


class BucketCheckpointDirectory(CheckpointDirectory):
    """In a bucket, which has objects and no folders."""

    def __init__(self, url: str):
        self.path, self._objects = url, buckets.Prefix(url)

    def exists(self, name: str = "") -> bool:
        return bool(self._objects.list_objects(name))

    def _names(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._objects.list_objects()})

    def steps(self) -> list[int]:
        names = [name.split("/") for name in self._objects.list_objects()]
        return sorted(int(n[0]) for n in names if n[1:] == [COMMIT] and n[0].isdigit())

    def try_to_write(self, process: int) -> None:
        self._objects.write(f"probe-{process}", bytes(PROBE_BYTES))  # remains, like a folder

    def remove(self, name: str) -> None:
        self._objects.remove([f"{name}/{COMMIT}"])
        self._objects.remove(self._objects.list_objects(f"{name}/"))

    def quarantine(self, step: int) -> None:
        self._objects.remove(self._objects.list_objects(f"damaged-{step}/"))
        names = self._objects.list_objects(f"{step}/")
        # COMMIT first, so that a partly moved checkpoint is unfinished.
        for name in sorted(names, key=lambda name: name != f"{step}/{COMMIT}"):
            self._objects.move(name, f"damaged-{name}")

    def read(self, name: str) -> bytes:
        return self._objects.read(name)
