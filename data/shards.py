"""Write token shards: flat .npy files of token ids, and of loss weights if these differ.

A shard is collected in memory and then written at once. A write to a disk is atomic: a temporary
file is renamed. An upload to a bucket is atomic too, and the bucket verifies its checksum.
"""

import dataclasses
import io

import google_crc32c
import numpy as np

from data.manifest import Shard
from runtime import storage


class ShardWriter:
    """Writes a stream of tokens as shards STEM_000.npy, STEM_001.npy, .. of one folder."""

    def __init__(
        self, folder: str, stem: str, shard_tokens: int, dtype: np.dtype, weighted: bool = False
    ):
        """weighted  write the loss weight of each token too, in STEM_000.weights.npy."""
        self.folder, self.stem, self.shard_tokens = storage.at(folder), stem, shard_tokens
        self.dtype, self.weighted = dtype, weighted
        self.shards: list[Shard] = []
        self._ids, self._weights = bytearray(), bytearray()  # of the current shard
        self._remaining = shard_tokens

    def add(self, ids: np.ndarray, weight: int = 1) -> None:
        """weight  of the loss on all of these tokens."""
        while len(ids):
            head, ids = ids[: self._remaining], ids[self._remaining :]
            self._ids += head.astype(self.dtype).tobytes()
            if self.weighted:
                self._weights += bytes([weight]) * len(head)
            self._remaining -= len(head)
            if not self._remaining:
                self.flush()

    def flush(self) -> None:
        """Write the tokens that no shard has yet."""
        if self._ids:
            stem, weights = f"{self.stem}_{len(self.shards):03d}", None
            if self.weighted:
                weights = self._write(f"{stem}.weights.npy", self._weights, np.dtype(np.uint8))
            shard = self._write(f"{stem}.npy", self._ids, self.dtype)
            self.shards.append(dataclasses.replace(shard, weights=weights))
        self._ids, self._weights, self._remaining = bytearray(), bytearray(), self.shard_tokens

    def _write(self, name: str, elements: bytearray, dtype: np.dtype) -> Shard:
        file, array = io.BytesIO(), np.frombuffer(elements, dtype)
        np.save(file, array)
        content = file.getvalue()
        self.folder.write(name, content)
        return Shard(name, len(array), len(content), f"{google_crc32c.value(content):08x}")
