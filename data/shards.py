"""Write token shards: flat .npy files of token ids, with files of loss weights where they differ.

A shard is written under a temporary name and has its own when it is complete. In a bucket it is
uploaded when it is complete, and the bucket's checksum is compared.
"""

import base64
import contextlib
import dataclasses
import os
import secrets
import tempfile
from pathlib import Path

import numpy as np

from buckets import Found, Prefix, is_bucket
from manifest import Shard, file_crc32c

PARTIAL = ".partial"


class NpyFile:
    """A .npy file of one dimension that is written as its elements come."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self.path, self.dtype, self.length = folder / name, dtype, 0
        # Another process may write the same file: to each its own.
        self._partial = folder / f"{name}.{secrets.token_hex(4)}{PARTIAL}"
        self._file = self._partial.open("w+b")
        self._header()

    def _header(self) -> None:
        """The same number of bytes for every length."""
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, described)

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self.dtype, copy=False).data)
        self.length += len(values)

    def finish(self) -> Shard:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        crc32c, size = file_crc32c(self._partial), self._partial.stat().st_size
        os.replace(self._partial, self.path)
        return Shard(self.path.name, self.length, size, crc32c)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()
        self._partial.unlink(missing_ok=True)


class ShardWriter:
    """A context that cuts a stream of tokens into shards STEM_000.npy, STEM_001.npy, .. of a folder
    on a disk or in a bucket; an error leaves no unfinished file.
    """

    def __init__(
        self, folder: str, stem: str, shard_tokens: int, dtype: np.dtype, weighted: bool = False
    ):
        """weighted  with the loss weight of each token, in STEM_000.weights.npy."""
        self.folder, self.stem, self.shard_tokens = str(folder), stem, shard_tokens
        self.kinds = [("", dtype)] + [(".weights", np.dtype(np.uint8))] * weighted
        self.shards: list[Shard] = []
        self._open: list[NpyFile] = []
        self._staging: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "ShardWriter":
        if is_bucket(self.folder):
            self._staging = tempfile.TemporaryDirectory(prefix="shards-")
        else:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._local = Path(self._staging.name if self._staging else self.folder)
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for file in self._open:
                file.discard()
            if self._staging:
                self._staging.cleanup()

    def add(self, ids: np.ndarray, weight: int | None = None) -> None:
        """weight  of the loss on all of these tokens, where the writer is `weighted`."""
        while len(ids):
            if not self._open:
                stem = f"{self.stem}_{len(self.shards):03d}"
                self._open = [NpyFile(self._local, f"{stem}{k}.npy", d) for k, d in self.kinds]
            tokens, *weights = self._open
            room = self.shard_tokens - tokens.length
            tokens.append(ids[:room])
            for file in weights:
                file.append(np.full(len(ids[:room]), weight, np.uint8))
            ids = ids[room:]
            if tokens.length == self.shard_tokens:
                self._finish()

    def _finish(self) -> None:
        """The shard that is being written, if there is one."""
        if not self._open:
            return
        shard, *weights = files = [file.finish() for file in self._open]
        self._open = []
        if self._staging:
            paths = {file.name: self._local / file.name for file in files}
            Prefix(self.folder).send(paths, {file.name: found(file) for file in files})
            for path in paths.values():
                path.unlink()
        self.shards.append(dataclasses.replace(shard, weights=(weights or [None])[0]))


def found(file: Shard) -> Found:
    """What a bucket says of it."""
    return Found(file.bytes, base64.b64encode(bytes.fromhex(file.crc32c)).decode())
