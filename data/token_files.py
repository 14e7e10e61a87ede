"""Read elements of token shards by position, from a disk or a bucket.

Files on a disk are memory-mapped. From a bucket the byte ranges of a batch are requested together.
A least-recently-used cache keeps pages of files that nearby windows need soon. A page begins at a
multiple of its size.

Opening a folder checks that all files exist with the right size; data/verify.py verifies checksums.
"""

import functools
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.manifest import INDEX, Manifest, Shard, prepare_command
from runtime import storage
from runtime.storage import Range
from utils import ConfigError

HEADER_UNIT = 64  # bytes; the header of a .npy file is a multiple of it
MAX_MAPPED = 256  # files, because each uses a file descriptor
CACHED_PAGES = 64  # per folder in a bucket; more if a batch needs more


class Span(NamedTuple):
    """Elements begin .. end-1 of a file."""

    file: int  # index of the file
    begin: int
    end: int


@dataclass(eq=False)
class Files:
    """The files of a folder with its tokens, or those with its loss weights."""

    folder: str
    manifest: Manifest
    shards: list[Shard]
    dtype: np.dtype
    page_bytes: int | None  # of a read of a bucket, which is cached; None: exact ranges, no cache

    def __post_init__(self) -> None:
        self.storage = storage.at(self.folder)
        self._mapped = functools.lru_cache(MAX_MAPPED)(self._map)
        self._cache: dict[Range, bytes] = {}  # least recently used first
        self._lock = threading.Lock()

    def offset(self, shard: Shard, element: int) -> int:
        """Return the byte at which an element begins."""
        return shard.bytes - (shard.tokens - element) * self.dtype.itemsize

    def check(self) -> None:
        """Raise ConfigError if a file is missing or has another size."""
        listed = self.storage.files()
        for shard in self.shards:
            self.check_size(shard, listed)

    def check_size(self, shard: Shard, listed: dict[str, storage.FileInfo]) -> None:
        header = self.offset(shard, 0)
        if shard.name not in listed:
            raise self.error(shard, "missing")
        if (size := listed[shard.name].size) != shard.bytes:
            what = "truncated" if size < shard.bytes else "altered"
            raise self.error(shard, f"{what}, with {size} bytes")
        if header <= 0 or header % HEADER_UNIT:
            what = f"not {shard.tokens} elements of {self.dtype.name} and a header"
            raise self.error(shard, what)

    def error(self, shard: Shard, what: str) -> ConfigError:
        return ConfigError(
            f"{self.folder}/{shard.name} is {what}: {INDEX} beside it expects {shard.bytes} bytes "
            f"with checksum {shard.crc32c}. Copy the file again, or run "
            f"{prepare_command(self.folder, self.manifest)} --overwrite."
        )

    def read(self, spans: list[Span]) -> list[np.ndarray]:
        if self.storage.path:
            return [self._mapped(self.shards[n])[begin:end] for n, begin, end in spans]
        ranges = [self._ranges(span) for span in spans]
        try:
            contents = self._contents({range: None for each in ranges for range in each})
        except FileNotFoundError:
            self.check()  # names the file
            raise
        elements = []
        for (file, begin, end), own in zip(spans, ranges, strict=True):
            content = b"".join(contents[range] for range in own)
            offset = self.offset(self.shards[file], begin) - own[0][1]
            elements.append(np.frombuffer(content, self.dtype, end - begin, offset))
        return elements

    def _map(self, shard: Shard) -> np.ndarray:
        path, begin = f"{self.folder}/{shard.name}", self.offset(shard, 0)
        try:
            return np.asarray(np.memmap(path, self.dtype, "r", begin, (shard.tokens,)))
        except (OSError, ValueError) as error:  # ValueError: the file is shorter than before
            self.check()
            raise ConfigError(f"{path} cannot be read: {error}. Copy the file again.") from error

    def _ranges(self, span: Span) -> list[Range]:
        shard, size = self.shards[span.file], self.page_bytes
        begin, end = self.offset(shard, span.begin), self.offset(shard, span.end)
        if size is None:
            return [(shard.name, begin, end)]
        begins = range(begin // size * size, end, size)
        return [(shard.name, n, min(n + size, shard.bytes)) for n in begins]

    def _contents(self, ranges: Collection[Range]) -> dict[Range, bytes]:
        if self.page_bytes is None:
            return self._request([*ranges])
        with self._lock:  # concurrent batches need the same pages
            self._cache |= self._request([r for r in ranges if r not in self._cache])
            contents = {range: self._cache.pop(range) for range in ranges}
            self._cache |= contents  # most recently used
            while len(self._cache) > max(CACHED_PAGES, len(contents)):
                del self._cache[next(iter(self._cache))]
        return contents

    def _request(self, ranges: list[Range]) -> dict[Range, bytes]:
        return dict(zip(ranges, self.storage.read_ranges(ranges), strict=True))


def open_files(folder: str, manifest: Manifest, page_bytes: int | None = None) -> list[Files]:
    """Return the files with tokens, then those with loss weights if there are any."""
    weights = [shard.weights for shard in manifest.shards if shard.weights]
    kinds = [(manifest.shards, np.dtype(manifest.dtype)), (weights, np.dtype("uint8"))]
    return [Files(folder, manifest, *kind, page_bytes) for kind in kinds if kind[0]]
