"""Elements of a folder's files by number, from a disk or a bucket, each block compared before use.

A folder (manifest.py) has a checksum for each block of its files. On a disk a file is mapped, and
a block compared when something in it is first asked for; that it was good is remembered beside the
file, until this changes. From a bucket blocks are fetched by range into a cache on disk, which
holds so many bytes and drops what was not asked for the longest. So a run starts without reading
the shards, no host holds them all, and nothing damaged is given out.
"""

import contextlib
import json
import mmap
import os
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np

from manifest import CRC_DIGITS, INDEX, Manifest, Shard, digits, in_bucket, prepare_command

CHECKED = ".checked"  # beside a file: which of its blocks were good
REMEMBER_S = 10.0  # between two writes of that
HEADER_UNIT = 64  # bytes, of which the header of a .npy file is a multiple
MOST_MAPPED = 256  # files: each takes one of the descriptors that a process may have
FETCHES = 8  # under way at once
READ_BYTES = 1 << 24  # at a time, of a block that is a whole file
ABANDONED_S = 600.0  # after which what nobody has written to is nobody's
TRIES = 3  # of fetching a block that does not arrive as it was
# As the cache calls it: identity of the folder, file, number and checksum of the block.
BLOCK_FILE = re.compile(r"[0-9a-f]{16}/.+\.\d{5,}\.[0-9a-f]{8}(\.[0-9a-f]{8}\.partial)?")


class Span(NamedTuple):
    """Elements of a file."""

    file: int  # its number
    begin: int
    end: int


class Files(Protocol):
    """The files of one kind of a folder: those with its tokens, or with their loss weights."""

    def elements(self, span: Span) -> np.ndarray:
        """Raises ValueError where they are not what index.json says."""

    def wanted(self, spans: Iterable[Span]) -> "list[Block]":
        """What has to be fetched for them: nothing on a disk."""


class Request(NamedTuple):
    """What is asked of files for a step, and for the steps after it."""

    files: Files
    now: list[Span]
    soon: list[Span]


def expect(requests: Iterable[Request]) -> None:
    """Begins to fetch all that a step needs, so that no block of it waits for another; and of what
    comes soon as much as the cache has room for.

    Raises  ValueError where it has too little for the step.
    """
    now, soon = [], []
    for files, of_now, of_soon in requests:
        now += files.wanted(of_now)
        soon += files.wanted(of_soon)
    for block in (now or soon)[:1]:  # all files of a run have one cache
        block.files.cache.expect(now, soon)


@dataclass(frozen=True)
class Layout:
    """Where elements and blocks of the files of a folder lie."""

    folder: str
    manifest: Manifest
    shards: list[Shard]
    dtype: np.dtype

    def header(self, file: int) -> int:
        """Bytes before the first element."""
        shard = self.shards[file]
        return shard.bytes - shard.tokens * self.dtype.itemsize

    def block_bytes(self, file: int) -> int:
        return self.manifest.block_bytes or max(self.shards[file].bytes, 1)

    def blocks(self, span: Span) -> range:
        """Those in which these elements lie."""
        header, size = self.header(span.file), self.block_bytes(span.file)
        begin, end = (header + n * self.dtype.itemsize for n in (span.begin, span.end))
        return range(begin // size, -(-end // size))

    def bytes_of(self, file: int, block: int) -> tuple[int, int]:
        """The first, and the one behind the last."""
        size = self.block_bytes(file)
        return block * size, min((block + 1) * size, self.shards[file].bytes)

    def checksum(self, file: int, block: int) -> str:
        shard = self.shards[file]
        if shard.blocks is None:
            return shard.crc32c
        return shard.blocks[CRC_DIGITS * block : CRC_DIGITS * (block + 1)]

    def path(self, file: int) -> str:
        return f"{self.folder}/{self.shards[file].name}"

    def check_sizes(self, found: dict[str, int]) -> None:
        """Raises ValueError where a file is not there, or not of the size that it must have."""
        for file in range(len(self.shards)):
            if error := self.wrong_size(file, found):
                raise error

    def wrong_size(self, file: int, found: dict[str, int]) -> ValueError | None:
        shard, index = self.shards[file], f"{self.folder}/{INDEX}"
        if shard.name not in found:
            return self.missing(file)
        if (size := found[shard.name]) != shard.bytes:
            what = "truncated" if size < shard.bytes else "altered"
            return ValueError(
                f"{self.path(file)} is {what}: {index} expects {shard.bytes} bytes with checksum "
                f"{shard.crc32c}, found {size}. {self.mend}, or copy the file again."
            )
        if self.header(file) <= 0 or self.header(file) % HEADER_UNIT:
            return ValueError(
                f"{index} does not describe {shard.name}: a header and {shard.tokens} elements "
                f"of {self.dtype.name} are not {shard.bytes} bytes. {self.mend}."
            )
        return None

    def missing(self, file: int) -> ValueError:
        return ValueError(
            f"{self.path(file)} is missing: {self.folder}/{INDEX} expects checksum "
            f"{self.shards[file].crc32c}. {self.mend}, or bring the file back."
        )

    def damaged(self, file: int, block: int, crc32c: str) -> ValueError:
        begin, end = self.bytes_of(file, block)
        return ValueError(
            f"{self.path(file)} is altered: {self.folder}/{INDEX} expects checksum "
            f"{self.checksum(file, block)} of bytes {begin} to {end - 1}, found {crc32c}. "
            f"{self.mend}, or copy the file again."
        )

    @property
    def mend(self) -> str:
        return f"Run {prepare_command(self.folder, self.manifest)} --overwrite"


def crc32c(content: bytes) -> str:
    return digits(google_crc32c.value(content))


def sizes(layout: Layout) -> dict[str, int]:
    """Bytes of those of its files that are there."""
    if in_bucket(layout.folder):
        from buckets import Prefix  # late: only buckets need it

        return {name: found.size for name, found in Prefix(layout.folder).found().items()}
    names = {shard.name for shard in layout.shards}
    with os.scandir(layout.folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.name in names}


# --- on a disk ------------------------------------------------------------------------------------


class DiskFiles:
    """Mapped into memory when they are first asked for."""

    def __init__(self, layout: Layout):
        self.layout = layout
        layout.check_sizes(sizes(layout))
        self._files: list[Mapped | None] = [None] * len(layout.shards)
        self._mapped: deque[Mapped] = deque()
        self._compared: set[Mapped] = set()  # since it was last remembered
        self._remembered_at = time.monotonic()

    def wanted(self, spans: Iterable[Span]) -> "list[Block]":
        return []

    def elements(self, span: Span) -> np.ndarray:
        try:
            file = self._files[span.file]
            if file is None:
                file = self._files[span.file] = Mapped(self.layout, span.file)
            if file.array is None:
                self._map(file)
            compared = file.compare(self.layout.blocks(span))
        except FileNotFoundError as error:
            raise self.layout.missing(span.file) from error
        except OSError as error:
            path = self.layout.path(span.file)
            raise ValueError(f"{path} cannot be read: {error}. Mend that, or copy it.") from error
        if compared:
            self._compared.add(file)
            if time.monotonic() - self._remembered_at >= REMEMBER_S:
                self.remember()
        return file.array[span.begin : span.end]

    def remember(self) -> None:
        """What was found good since the last time, so that another start need not compare it."""
        for file in self._compared:
            file.remember()
        self._compared.clear()
        self._remembered_at = time.monotonic()

    def _map(self, file: "Mapped") -> None:
        file.map()
        self._mapped.append(file)
        if len(self._mapped) > MOST_MAPPED:
            self._mapped.popleft().array = None


class Mapped:
    """One of them."""

    def __init__(self, layout: Layout, file: int):
        self.layout, self.file = layout, file
        self.path = Path(layout.path(file))
        self.array: np.ndarray | None = None  # its elements, while it is mapped
        blocks = -(-layout.shards[file].bytes // layout.block_bytes(file))
        self._good = bytearray(blocks)
        self._record = self.path.with_name(self.path.name + CHECKED)
        self._seen = self._state()  # when these blocks were good
        self._recall()

    def map(self) -> None:
        self._is_as_seen()
        header = self.layout.header(self.file)
        with self.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array = np.frombuffer(content, self.layout.dtype, offset=header)

    def compare(self, blocks: range) -> bool:
        """Whether one had to be. Raises ValueError where it is damaged."""
        if self._good.count(1, blocks.start, blocks.stop) == len(blocks):
            return False
        for block in blocks:
            if not self._good[block]:
                found = range_crc32c(self.path, *self.layout.bytes_of(self.file, block))
                if found != self.layout.checksum(self.file, block):
                    raise self.layout.damaged(self.file, block, found)
                self._good[block] = 1
        return True

    def _state(self) -> dict[str, int | str]:
        """What must be as it was for blocks to count as good."""
        found = self.path.stat()
        checksums = self.layout.shards[self.file].blocks or self.layout.shards[self.file].crc32c
        return {
            "bytes": found.st_size,
            "mtime_ns": found.st_mtime_ns,
            "inode": found.st_ino,
            "checksums": crc32c(checksums.encode()),
        }

    def _is_as_seen(self) -> bool:
        """Whether no other file took its place; if one did, none of its blocks was compared."""
        if (state := self._state()) == self._seen:
            return True
        self._seen, self._good = state, bytearray(len(self._good))
        return False

    def _recall(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(self._record.read_bytes())
            good = bytes.fromhex(record.pop("good"))
            if record == self._seen and len(good) == len(self._good) and max(good) <= 1:
                self._good = bytearray(a | b for a, b in zip(self._good, good, strict=True))

    def remember(self) -> None:
        """Several processes may."""
        with contextlib.suppress(OSError):  # a folder that cannot be written is as good
            if self._is_as_seen():
                self._recall()
                record = self._seen | {"good": self._good.hex()}
                replace(self._record, json.dumps(record).encode())


def range_crc32c(path: Path, begin: int, end: int) -> str:
    """Of the file's bytes from the first of these to the one before the second."""
    crc = 0
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (content := file.read(min(READ_BYTES, end - begin))):
            crc = google_crc32c.extend(crc, content)
            begin += len(content)
    return digits(crc)


def replace(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes it."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


# --- in a bucket ----------------------------------------------------------------------------------


class Block(NamedTuple):
    """One of a file in a bucket."""

    files: "BucketFiles"
    file: int
    number: int

    @property
    def bytes(self) -> int:
        begin, end = self.files.layout.bytes_of(self.file, self.number)
        return end - begin


class Cache:
    """Blocks on a disk, the last that were asked for; those of earlier runs too.

    Processes of a host may share its folder: each removes what is beyond its own `limit_bytes`, and
    fetches again what another removed.
    """

    def __init__(self, folder: str | Path, limit_bytes: int):
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        self._held: OrderedDict[Block, Future[Path]] = OrderedDict()  # least recent first
        self._left = left_in(self.folder)  # by earlier runs
        self._bytes = sum(self._left.values())  # of both
        self.fetched = 0  # requests for a block, since this was made
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")

    def expect(self, now: Sequence[Block], soon: Sequence[Block]) -> None:
        """Begins to fetch what is not there: all of `now`, and of `soon` what has room beside it.

        Raises  ValueError where `now` has none.
        """
        wanted = dict.fromkeys(now)
        need = sum(block.bytes for block in wanted)
        if need > self.limit_bytes:
            raise ValueError(
                f"--data.cache_gb {self.limit_bytes / 1e9:.3g} is too small: the {len(wanted)} "
                f"blocks of one step that this process reads are {need / 1e9:.3g} GB. Use "
                f"--data.cache_gb {2 * need / 1e9:.2g}, or --data.order blocks for a new run."
            )
        for block in soon:
            if block not in wanted and (need := need + block.bytes) <= self.limit_bytes:
                wanted[block] = None
        with self._lock:
            for block in wanted:
                if failed(self._held.get(block)):
                    self._drop(block)
                if block in self._held:
                    self._held.move_to_end(block)
                else:
                    self._bytes += block.bytes - self._left.pop(self._path(block), 0)
                    self._held[block] = self._pool.submit(self._fetch, block)
            while self._bytes > self.limit_bytes:
                self._drop_one()

    def close(self) -> None:
        """Drops what waits to be fetched: an exit would wait for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def content(self, block: Block, begin: int, end: int) -> np.ndarray:
        """Its bytes from the first of these to the one before the second; fetched again where they
        were removed since.
        """
        while True:
            with self._lock:
                future = self._held.get(block)
            if future is None:
                self.expect([block], [])
                continue
            try:
                return np.fromfile(future.result(), np.uint8, end - begin, offset=begin)
            except CancelledError:
                continue
            except FileNotFoundError:
                with self._lock:
                    if self._held.get(block) is future:
                        self._drop(block)

    def _drop_one(self) -> None:
        """What an earlier run left, or else what was not asked for the longest."""
        if self._left:
            path = next(iter(self._left))
            self._bytes -= self._left.pop(path)
            path.unlink(missing_ok=True)
        else:
            self._drop(next(iter(self._held)))

    def _drop(self, block: Block) -> None:
        future = self._held.pop(block)
        self._bytes -= block.bytes
        if not future.cancel():
            future.add_done_callback(lambda _: self._path(block).unlink(missing_ok=True))

    def _path(self, block: Block) -> Path:
        layout = block.files.layout
        name = f"{layout.shards[block.file].name}.{block.number:05d}"
        return (
            self.folder / block.files.name / f"{name}.{layout.checksum(block.file, block.number)}"
        )

    def _fetch(self, block: Block) -> Path:
        """Where it lies; nothing is fetched where an earlier run left it."""
        path, layout = self._path(block), block.files.layout
        expected = layout.checksum(block.file, block.number)
        with contextlib.suppress(OSError):
            if range_crc32c(path, 0, block.bytes) == expected:
                return path
        for _ in range(TRIES):
            with self._lock:
                self.fetched += 1
            content = block.files.fetch(block)
            if (found := crc32c(content)) == expected:
                break
        else:
            raise layout.damaged(block.file, block.number, found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, content)
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written ({error}): what is read of a bucket is kept there, up "
                f"to --data.cache_gb {self.limit_bytes / 1e9:.3g}. Free the disk, or use less or "
                "another --data.cache."
            ) from error
        return path


def failed(future: Future[Path] | None) -> bool:
    return future is not None and future.done() and future.exception() is not None


def left_in(folder: Path) -> dict[Path, int]:
    """Bytes of the blocks there, the oldest first; without those that are being written, and what
    is nobody's block.
    """
    found = []
    for path in folder.glob("*/*"):
        if not BLOCK_FILE.fullmatch(f"{path.parent.name}/{path.name}"):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            stat = path.stat()
            written = path.name.endswith(".partial") and time.time() - stat.st_mtime < ABANDONED_S
            if not written:
                found.append((stat.st_mtime, path, stat.st_size))
    return {path: size for _, path, size in sorted(found)}


class BucketFiles:
    """Fetched by blocks through a cache."""

    def __init__(self, layout: Layout, cache: Cache):
        from buckets import Prefix  # late: only buckets need it

        self.layout, self.cache = layout, cache
        self.name = layout.manifest.identity[:16]
        self._objects = Prefix(layout.folder)
        layout.check_sizes(sizes(layout))

    def fetch(self, block: Block) -> bytes:
        begin, end = self.layout.bytes_of(block.file, block.number)
        try:
            return self._objects.read(self.layout.shards[block.file].name, begin, end)
        except FileNotFoundError as error:
            raise self.layout.missing(block.file) from error

    def wanted(self, spans: Iterable[Span]) -> list[Block]:
        return [
            Block(self, span.file, number) for span in spans for number in self.layout.blocks(span)
        ]

    def elements(self, span: Span) -> np.ndarray:
        layout, item = self.layout, self.layout.dtype.itemsize
        begin, end = (layout.header(span.file) + n * item for n in (span.begin, span.end))
        parts = []
        for block in self.wanted([span]):
            first, behind = layout.bytes_of(span.file, block.number)
            here = max(begin, first) - first, min(end, behind) - first
            parts.append(self.cache.content(block, *here))
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return content.view(layout.dtype)


def open_files(layout: Layout, cache: Cache | None) -> Files:
    """cache  for those of a bucket."""
    if in_bucket(layout.folder):
        assert cache, layout.folder
        return BucketFiles(layout, cache)
    return DiskFiles(layout)
