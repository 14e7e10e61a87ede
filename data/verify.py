"""Reads all token shards of a folder and compares them: python data/verify.py --folder data/sample

A run compares each block of a shard when it first uses it. This reads all of them, on a disk or in
a bucket, and names those that are damaged: before a long run, after a copy, or when a run met one.
FOLDER has an index.json, or folders with one.

    python data/verify.py --folder gs://bucket/corpus/train --workers 16
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import faults
from dataset import prefetch
from manifest import INDEX, in_bucket, read_manifest
from token_files import Layout, crc32c, range_crc32c, sizes

LINE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Read all token shards of a folder, and compare them with their checksums."""

    folder: str  # with an index.json, or with folders that have one; also gs://BUCKET/...
    workers: int = 8  # blocks that are read at once


class Block(NamedTuple):
    layout: Layout
    file: int
    number: int

    @property
    def range(self) -> tuple[int, int]:
        return self.layout.bytes_of(self.file, self.number)


def main(arguments: list[str] | None = None) -> None:
    flags = tyro.cli(Flags, args=arguments)
    if flags.workers < 1:
        raise ValueError(f"--workers {flags.workers} is below 1. Use --workers 8.")
    damaged, blocks = [], []
    for layout in (layout for folder in folders(flags.folder) for layout in layouts(folder)):
        found = sizes(layout)
        for file in range(len(layout.shards)):
            if error := layout.wrong_size(file, found):
                damaged.append(str(error))
            else:
                blocks += blocks_of(layout, file)
    began, total = time.monotonic(), sum(end - begin for begin, end in (b.range for b in blocks))
    damaged += [text for text in compared(blocks, flags.workers, total) if text]
    seconds = max(time.monotonic() - began, 1e-9)
    done = (
        f"{len(blocks):,} blocks, {total / 1e9:,.3f} GB in {seconds:,.1f} s "
        f"({total / 1e9 / seconds:.2f} GB/s)"
    )
    if damaged:
        for text in damaged:
            print(text)
        raise ValueError(f"{len(damaged)} are damaged, listed above; read were {done}.")
    print(f"{flags.folder} is whole: {done}")


def folders(given: str) -> list[str]:
    """The folder itself, or those in it, that have an index.json."""
    given = given.rstrip("/")
    if in_bucket(given):
        from buckets import Prefix

        names = [name for name in Prefix(given).found() if f"/{name}".endswith(f"/{INDEX}")]
    else:
        names = [path.relative_to(given).as_posix() for path in Path(given).rglob(INDEX)]
    found = sorted(name.removesuffix(INDEX).rstrip("/") for name in names)
    if not found:
        raise ValueError(
            f"--folder {given} has no {INDEX}, nor has a folder in it: there are no finished "
            "shards. Give one that data/prepare.py has made."
        )
    return [f"{given}/{name}".rstrip("/") for name in found]


def layouts(folder: str) -> list[Layout]:
    """Of its tokens, and of its loss weights."""
    manifest = read_manifest(folder)
    weights = [shard.weights for shard in manifest.shards if shard.weights]
    kinds = [(manifest.shards, manifest.dtype), (weights, "uint8")]
    return [Layout(folder, manifest, shards, np.dtype(dtype)) for shards, dtype in kinds if shards]


def blocks_of(layout: Layout, file: int) -> list[Block]:
    numbers = range(-(-layout.shards[file].bytes // layout.block_bytes(file)))
    return [Block(layout, file, number) for number in numbers]


def compared(blocks: list[Block], workers: int, total: int) -> Iterator[str | None]:
    """What is wrong with each block, with progress."""
    done, began = 0, time.monotonic()
    next_line_s = began + LINE_EVERY_S
    with Progress(disable=not Console().is_terminal) as progress:
        task = progress.add_task("bytes compared", total=total)
        results = prefetch(wrong, blocks, 2 * workers, ThreadPoolExecutor(workers))
        for block, result in zip(blocks, results, strict=True):
            begin, end = block.range
            done += end - begin
            progress.update(task, completed=done)
            if progress.disable and (now := time.monotonic()) > next_line_s:
                left_s = (now - began) * (total - done) / done
                print(f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB, {left_s:,.0f} s left")
                next_line_s = now + LINE_EVERY_S
            yield result


def wrong(block: Block) -> str | None:
    """In words; None where it is as it should be."""
    layout, (begin, end) = block.layout, block.range
    path = layout.path(block.file)
    try:
        if in_bucket(path):
            from buckets import Prefix

            name = layout.shards[block.file].name
            found = crc32c(Prefix(layout.folder).read(name, begin, end))
        else:
            found = range_crc32c(Path(path), begin, end)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        if in_bucket(path):  # it is away, and no block can be read
            raise
        return f"{path} cannot be read: {error}"
    if found != layout.checksum(block.file, block.number):
        return str(layout.damaged(block.file, block.number, found))
    return None


if __name__ == "__main__":
    faults.command_line(main)
