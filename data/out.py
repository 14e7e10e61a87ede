"""Small files by name below OUT, on a disk as in a bucket."""

import contextlib
import os
import secrets
from pathlib import Path

from buckets import Found, Prefix, is_bucket
from data.shards import PARTIAL


class DiskFolder:
    """A folder with the methods of buckets.Prefix that a preparation uses."""

    def __init__(self, url: str):
        self.url = url

    def found(self, below: str = "") -> dict[str, Found]:
        """All files whose names begin with `below`, by their names in the folder."""
        root, found = Path(self.url), {}
        for path in (root / below.rpartition("/")[0]).rglob("*"):
            name = path.relative_to(root).as_posix()
            if name.startswith(below) and path.is_file():
                with contextlib.suppress(FileNotFoundError):  # another preparation removed it
                    found[name] = Found(path.stat().st_size, "")
        return found

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return (Path(self.url) / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """The file has its old content or this one, whenever the machine stops."""
        path = Path(self.url) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def remove(self, names: list[str]) -> None:
        for name in names:
            (Path(self.url) / name).unlink(missing_ok=True)


def folder_at(url: str) -> DiskFolder | Prefix:
    return Prefix(url) if is_bucket(url) else DiskFolder(url)
