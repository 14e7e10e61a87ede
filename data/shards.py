"""Write token shards: flat .npy files of token ids, with files of loss weights where they differ.

A shard is collected in memory. On a disk it is written under a temporary name and then has its own;
in a bucket an upload is complete or nothing, and the bucket's checksum is compared.
"""

import contextlib
import io
import os
import secrets
from pathlib import Path

import google_crc32c
import numpy as np

from buckets import Found, Prefix, is_bucket
from manifest import Shard

PARTIAL = ".partial"


class DiskFolder:
    """A folder with the methods of buckets.Prefix that a preparation uses."""

    def __init__(self, url: str):
        self.root = Path(url)

    def found(self, below: str = "") -> dict[str, Found]:
        """All files whose names begin with `below`, by their names in the folder."""
        found = {}
        for path in (self.root / below.rpartition("/")[0]).rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if name.startswith(below) and path.is_file():
                with contextlib.suppress(FileNotFoundError):  # another preparation removed it
                    found[name] = Found(path.stat().st_size, "")
        return found

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """The file has its old content or this one, whenever the machine stops."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same file: to each its own.
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def remove(self, names: list[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)


def folder_at(url: str) -> DiskFolder | Prefix:
    return Prefix(url) if is_bucket(url) else DiskFolder(url)


class ShardWriter:
    """Cuts a stream of tokens into shards STEM_000.npy, STEM_001.npy, .. of a folder on a disk or
    in a bucket.
    """

    def __init__(
        self, folder: str, stem: str, shard_tokens: int, dtype: np.dtype, weighted: bool = False
    ):
        """weighted  with the loss weight of each token, in STEM_000.weights.npy."""
        self.folder, self.stem, self.shard_tokens = folder_at(folder), stem, shard_tokens
        self.dtype, self.weighted = dtype, weighted
        self.shards: list[Shard] = []
        self._ids, self._weights = bytearray(), bytearray()  # of the shard that is collected
        self._room = shard_tokens

    def add(self, ids: np.ndarray, weight: int | None = None) -> None:
        """weight  of the loss on all of these tokens, where the writer is `weighted`."""
        while len(ids):
            some, ids = ids[: self._room], ids[self._room :]
            self._ids += some.astype(self.dtype).tobytes()
            if self.weighted:
                self._weights += bytes([weight]) * len(some)
            self._room -= len(some)
            if not self._room:
                self.finish()

    def finish(self) -> None:
        """Write the tokens that are no shard yet, if there are any."""
        if self._ids:
            stem, weights = f"{self.stem}_{len(self.shards):03d}", None
            if self.weighted:
                weights = self._write(f"{stem}.weights.npy", self._weights, np.dtype(np.uint8))
            self.shards.append(self._write(f"{stem}.npy", self._ids, self.dtype, weights))
        self._ids, self._weights, self._room = bytearray(), bytearray(), self.shard_tokens

    def _write(
        self, name: str, elements: bytearray, dtype: np.dtype, weights: Shard | None = None
    ) -> Shard:
        header, tokens = io.BytesIO(), len(elements) // dtype.itemsize
        described = {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(header, described)
        content = header.getvalue() + elements
        self.folder.write(name, content)
        return Shard(name, tokens, len(content), f"{google_crc32c.value(content):08x}", weights)
