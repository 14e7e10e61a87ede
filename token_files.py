"""Elements of token shards by number, from a disk or from a bucket.

On a disk the files are memory-mapped. From a bucket byte ranges are read through gcsfs, ahead of
their use, into a least-recently-used cache in memory. A file that is missing or of another size is
refused when a folder is opened; data/verify.py compares the contents with their checksums.
"""

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from manifest import INDEX, Manifest, Shard, in_bucket, prepare_command

HEADER_UNIT = 64  # bytes, of which the header of a .npy file is a multiple
MOST_MAPPED = 256  # files: each takes one of the descriptors that a process may have
CACHE_BYTES = 1 << 29  # of what is read from buckets; more where a single step needs more
READERS = 2  # threads: one for a step, one for the steps after it


class Span(NamedTuple):
    """Elements of a file."""

    file: int  # its number
    begin: int
    end: int


class Range(NamedTuple):
    """Bytes of an object in a bucket."""

    path: str
    begin: int
    end: int


class Files(Protocol):
    """The files of one kind of a folder: those with its tokens, or with their loss weights."""

    def elements(self, span: Span) -> np.ndarray: ...

    def ranges(self, span: Span) -> list[Range]:
        """What has to be read from a bucket for these elements: nothing on a disk."""


@dataclass(frozen=True)
class Layout:
    """Where the elements of the files of a folder lie."""

    folder: str
    manifest: Manifest
    shards: list[Shard]
    dtype: np.dtype

    def path(self, file: int) -> str:
        return f"{self.folder}/{self.shards[file].name}"

    def offset(self, file: int, element: int) -> int:
        """Of its first byte, behind the header."""
        shard = self.shards[file]
        return shard.bytes - (shard.tokens - element) * self.dtype.itemsize

    def wrong_size(self, file: int, found: dict[str, int]) -> ValueError | None:
        """What is wrong with a file, by the sizes of those that are there."""
        shard, index = self.shards[file], f"{self.folder}/{INDEX}"
        if shard.name not in found:
            return self.missing(file)
        if (size := found[shard.name]) != shard.bytes:
            what = "truncated" if size < shard.bytes else "altered"
            return ValueError(
                f"{self.path(file)} is {what}: {index} expects {shard.bytes} bytes with checksum "
                f"{shard.crc32c}, found {size}. {self.fix}, or copy the file again."
            )
        if (header := self.offset(file, 0)) <= 0 or header % HEADER_UNIT:
            return ValueError(
                f"{index} does not describe {shard.name}: a header and {shard.tokens} elements "
                f"of {self.dtype.name} are not {shard.bytes} bytes. {self.fix}."
            )
        return None

    def missing(self, file: int) -> ValueError:
        return ValueError(
            f"{self.path(file)} is missing: {self.folder}/{INDEX} expects checksum "
            f"{self.shards[file].crc32c}. {self.fix}, or bring the file back."
        )

    def damaged(self, file: int) -> ValueError:
        return ValueError(
            f"{self.path(file)} is altered: its checksum is not {self.shards[file].crc32c}, as "
            f"{self.folder}/{INDEX} expects. {self.fix}, or copy the file again."
        )

    @property
    def fix(self) -> str:
        return f"Run {prepare_command(self.folder, self.manifest)} --overwrite"


def sizes(layout: Layout, name: str = "") -> dict[str, int]:
    """Bytes of the files that are there, by name; of one of them, or of all."""
    if in_bucket(layout.folder):
        from buckets import Prefix  # late: only buckets need it

        return {name: found.size for name, found in Prefix(layout.folder).found(name).items()}
    names = {name} if name else {shard.name for shard in layout.shards}
    with os.scandir(layout.folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.name in names}


class DiskFiles:
    """Memory-mapped when they are first used."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._mapped = functools.lru_cache(MOST_MAPPED)(self._map)

    def _map(self, file: int) -> np.ndarray:
        shard, path = self.layout.shards[file], self.layout.path(file)
        try:
            offset, dtype = self.layout.offset(file, 0), self.layout.dtype
            return np.asarray(np.memmap(path, dtype, "r", offset, (shard.tokens,)))
        except FileNotFoundError as error:
            raise self.layout.missing(file) from error
        except (OSError, ValueError) as error:  # ValueError: it has become shorter
            raise ValueError(f"{path} cannot be read: {error}. Copy the file again.") from error

    def elements(self, span: Span) -> np.ndarray:
        return self._mapped(span.file)[span.begin : span.end]

    def ranges(self, span: Span) -> list[Range]:
        return []


class BucketFiles:
    """Read as byte ranges of their objects."""

    def __init__(self, layout: Layout, reader: "Reader", chunk_bytes: int | None):
        """chunk_bytes  of a file that are read together, where neighbours are used soon after;
        None reads what is asked for alone.
        """
        self.layout, self.reader, self.chunk_bytes = layout, reader, chunk_bytes

    def ranges(self, span: Span) -> list[Range]:
        layout, size = self.layout, self.chunk_bytes
        path = layout.path(span.file)
        begin, end = (layout.offset(span.file, n) for n in (span.begin, span.end))
        if size is None:
            return [Range(path, begin, end)]
        last = layout.shards[span.file].bytes
        firsts = range(begin // size * size, end, size)
        return [Range(path, first, min(first + size, last)) for first in firsts]

    def elements(self, span: Span) -> np.ndarray:
        ranges = self.ranges(span)
        try:
            content = b"".join(self.reader.content(range) for range in ranges)
        except FileNotFoundError as error:
            raise self.layout.missing(span.file) from error
        offset = self.layout.offset(span.file, span.begin) - ranges[0].begin
        return np.frombuffer(content, self.layout.dtype, span.end - span.begin, offset)


class Reader:
    """Reads byte ranges from buckets ahead of their use, and keeps those that were used last."""

    def __init__(self, limit_bytes: int = CACHE_BYTES):
        self.limit_bytes = limit_bytes
        self.requests = 0  # ranges that were asked for
        self._found: OrderedDict[Range, Future[bytes]] = OrderedDict()  # least recent first
        self._bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="read-ahead")

    def expect(self, now: Sequence[Range], soon: Iterable[Range] = ()) -> None:
        """Begin to read what a step needs, and what the next ones do as far as there is room."""
        needed = dict.fromkeys(now)
        later, total = {}, sum(range.end - range.begin for range in needed)
        for range in soon:
            if range not in needed and range not in later:
                if (total := total + range.end - range.begin) > self.limit_bytes:
                    break
                later[range] = None
        with self._lock:
            for wanted in (later, needed):  # what is needed now is used last
                self._begin(wanted)
            while self._bytes > self.limit_bytes and next(iter(self._found)) not in needed:
                self._drop(next(iter(self._found)))

    def _begin(self, wanted: Iterable[Range]) -> None:
        new = {}
        for range in wanted:
            future = self._found.get(range)
            if future and future.done() and future.exception():
                self._drop(range)
                future = None
            if future is None:
                self._found[range] = new[range] = Future()
                self._bytes += range.end - range.begin
            self._found.move_to_end(range)
        if new:
            self.requests += len(new)
            self._threads.submit(self._read, new)

    def _drop(self, range: Range) -> None:
        del self._found[range]
        self._bytes -= range.end - range.begin

    def _read(self, wanted: dict[Range, Future[bytes]]) -> None:
        from buckets import filesystem, told  # late: only buckets need it

        paths, begins, ends = map(list, zip(*wanted, strict=True))
        try:
            contents = filesystem().cat_ranges(paths, begins, ends)
        except Exception as error:
            contents = [error] * len(wanted)
        for (range, future), content in zip(wanted.items(), contents, strict=True):
            try:
                with told(range.path):
                    if isinstance(content, Exception):
                        raise content
                    if len(content) != range.end - range.begin:
                        raise OSError(f"{len(content)} of {range.end - range.begin} bytes came")
                future.set_result(content)
            except Exception as error:
                future.set_exception(error)

    def content(self, range: Range) -> bytes:
        """Its bytes; read now where nobody expected it, or it was dropped since.

        Raises  FileNotFoundError, buckets.Refused, buckets.Unanswered.
        """
        with self._lock:
            future = self._found.get(range)
        while future is None:
            self.expect([range])
            with self._lock:
                future = self._found.get(range)
        return future.result()

    def close(self) -> None:
        """Drop what waits to be read: an exit would wait for it."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def open_files(layout: Layout, reader: Reader | None, chunk_bytes: int | None) -> Files:
    """reader, chunk_bytes  for those of a bucket.

    Raises  ValueError where a file is missing or of another size; what a bucket raises.
    """
    found = sizes(layout)
    for file in range(len(layout.shards)):
        if error := layout.wrong_size(file, found):
            raise error
    if in_bucket(layout.folder):
        return BucketFiles(layout, reader or Reader(), chunk_bytes)
    return DiskFiles(layout)
