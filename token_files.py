"""Elements of token shards by number, from a disk or from a bucket.

On a disk the files are memory-mapped. From a bucket the byte ranges of a batch are requested
together through gcsfs; chunks that neighbours need soon after stay in a least-recently-used cache.
A file that is missing or of another size is refused when a folder is opened; data/verify.py
compares the contents with their checksums.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import buckets
from manifest import INDEX, Manifest, Shard, prepare_command

HEADER_UNIT = 64  # bytes, of which the header of a .npy file is a multiple
MOST_MAPPED = 256  # files: each takes one of the descriptors that a process may have
CACHED_CHUNKS = 64  # of a folder in a bucket; more where a batch needs more

Range = tuple[str, int, int]  # an object of a bucket, and bytes of it: begin, end


class Span(NamedTuple):
    """Elements of a file."""

    file: int  # its number
    begin: int
    end: int


@dataclass
class Files:
    """The files of one kind of a folder: those with its tokens, or with their loss weights."""

    folder: str
    manifest: Manifest
    shards: list[Shard]
    dtype: np.dtype

    def elements(self, spans: list[Span]) -> list[np.ndarray]:
        raise NotImplementedError

    def path(self, file: int) -> str:
        return f"{self.folder}/{self.shards[file].name}"

    def offset(self, file: int, element: int) -> int:
        """Of its first byte, behind the header."""
        shard = self.shards[file]
        return shard.bytes - (shard.tokens - element) * self.dtype.itemsize

    def sizes(self) -> dict[str, int]:
        """Bytes of the files that are there, by name."""
        if buckets.is_bucket(self.folder):
            return {name: f.size for name, f in buckets.Prefix(self.folder).found().items()}
        sizes = {}
        for file, shard in enumerate(self.shards):
            with contextlib.suppress(FileNotFoundError):
                sizes[shard.name] = os.stat(self.path(file)).st_size
        return sizes

    def check(self) -> None:
        """Raises ValueError where a file is missing or of another size; what a bucket raises."""
        sizes = self.sizes()
        for file in range(len(self.shards)):
            self.check_size(file, sizes)

    def check_size(self, file: int, sizes: dict[str, int]) -> None:
        shard = self.shards[file]
        size, header = sizes.get(shard.name), self.offset(file, 0)
        if size is None:
            raise self.error(file, "missing")
        if size != shard.bytes:
            what = "truncated" if size < shard.bytes else "altered"
            raise self.error(file, f"{what}, with {size} bytes")
        if header <= 0 or header % HEADER_UNIT:
            raise self.error(file, f"not {shard.tokens} elements of {self.dtype.name} and a header")

    def error(self, file: int, what: str) -> ValueError:
        shard = self.shards[file]
        return ValueError(
            f"{self.path(file)} is {what}: {self.folder}/{INDEX} expects {shard.bytes} bytes with "
            f"checksum {shard.crc32c}. Copy the file again, or run "
            f"{prepare_command(self.folder, self.manifest)} --overwrite."
        )


@dataclass
class DiskFiles(Files):
    """Memory-mapped when they are first used."""

    def __post_init__(self) -> None:
        self._mapped = functools.lru_cache(MOST_MAPPED)(self._map)

    def _map(self, file: int) -> np.ndarray:
        path, shape = self.path(file), (self.shards[file].tokens,)
        try:
            return np.asarray(np.memmap(path, self.dtype, "r", self.offset(file, 0), shape))
        except (OSError, ValueError) as error:  # ValueError: it has become shorter
            self.check()
            raise ValueError(f"{path} cannot be read: {error}. Copy the file again.") from error

    def elements(self, spans: list[Span]) -> list[np.ndarray]:
        return [self._mapped(file)[begin:end] for file, begin, end in spans]


@dataclass
class BucketFiles(Files):
    """Read as byte ranges of their objects.

    chunk_bytes  of a file that are read together, where neighbours are used soon after, or all
                 chunks can be kept; None reads what a batch needs alone, and keeps nothing.
    """

    chunk_bytes: int | None

    def __post_init__(self) -> None:
        self.requests = 0  # ranges that were requested
        self._cache: dict[Range, bytes] = {}  # least recently used first
        self._lock = threading.Lock()

    def elements(self, spans: list[Span]) -> list[np.ndarray]:
        places = [self._ranges(span) for span in spans]
        try:
            found = self._contents({range: None for ranges in places for range in ranges})
        except FileNotFoundError:
            self.check()  # names the file
            raise
        elements = []
        for (file, begin, end), ranges in zip(spans, places, strict=True):
            content = b"".join(found[range] for range in ranges)
            offset = self.offset(file, begin) - ranges[0][1]
            elements.append(np.frombuffer(content, self.dtype, end - begin, offset))
        return elements

    def _ranges(self, span: Span) -> list[Range]:
        path, size = self.path(span.file), self.chunk_bytes
        begin, end = (self.offset(span.file, n) for n in (span.begin, span.end))
        if size is None:
            return [(path, begin, end)]
        last = self.shards[span.file].bytes
        firsts = range(begin // size * size, end, size)
        return [(path, first, min(first + size, last)) for first in firsts]

    def _contents(self, wanted: Collection[Range]) -> dict[Range, bytes]:
        if self.chunk_bytes is None:
            return self._requested(wanted)
        with self._lock:  # batches that are made at the same time need the same chunks
            self._cache |= self._requested([r for r in wanted if r not in self._cache])
            found = {range: self._cache.pop(range) for range in wanted}
            self._cache |= found  # used last
            while len(self._cache) > max(CACHED_CHUNKS, len(found)):
                del self._cache[next(iter(self._cache))]
        return found

    def _requested(self, ranges: Collection[Range]) -> dict[Range, bytes]:
        """These, requested from the bucket at the same time.

        Raises  FileNotFoundError, buckets.Refused, buckets.Unanswered.
        """
        if not ranges:
            return {}
        paths, begins, ends = map(list, zip(*ranges, strict=True))
        self.requests += len(paths)
        with buckets.told(self.folder):
            contents = buckets.filesystem().cat_ranges(paths, begins, ends)
        found = dict(zip(ranges, contents, strict=True))
        for (path, begin, end), content in found.items():
            with buckets.told(path):
                if isinstance(content, Exception):
                    raise content
                if len(content) != end - begin:
                    raise OSError(f"{len(content)} of {end - begin} bytes came")
        return found


def open_files(folder: str, manifest: Manifest, chunk_bytes: int | None = None) -> list[Files]:
    """The files with the tokens; then those with their loss weights, where it has some."""
    weights = [shard.weights for shard in manifest.shards if shard.weights]
    kinds = [(manifest.shards, np.dtype(manifest.dtype)), (weights, np.dtype("uint8"))]
    if buckets.is_bucket(folder):
        return [BucketFiles(folder, manifest, *kind, chunk_bytes) for kind in kinds if kind[0]]
    return [DiskFiles(folder, manifest, *kind) for kind in kinds if kind[0]]
