"""Compare token shards with their checksums: python data/verify.py --folder data/sample

A run compares nothing but sizes, so use this after a copy, before a long run, or when a loss is
strange. On a disk the files are read; a bucket is asked for the checksums that it has of its
objects. FOLDER has an index.json, or folders with one.

    python data/verify.py --folder gs://bucket/corpus
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import faults
from buckets import Prefix
from data.shards import found as in_bucket_form
from manifest import INDEX, file_crc32c, in_bucket, read_manifest
from token_files import Layout, sizes

LINE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Compare all token shards of a folder with their checksums."""

    folder: str  # with an index.json, or with folders that have one; also gs://BUCKET/...
    workers: int = 8  # files that are read at once


def main(arguments: list[str] | None = None) -> None:
    flags = tyro.cli(Flags, args=arguments)
    if flags.workers < 1:
        raise ValueError(f"--workers {flags.workers} is below 1. Use --workers 8.")
    files = [
        (layout, number)
        for folder in folders(flags.folder)
        for layout in layouts(folder)
        for number in range(len(layout.shards))
    ]
    total = sum(layout.shards[number].bytes for layout, number in files)
    began = time.monotonic()
    damaged = [text for text in compared(files, flags.workers, total) if text]
    seconds = max(time.monotonic() - began, 1e-9)
    done = f"{len(files):,} files, {total / 1e9:,.3f} GB in {seconds:,.1f} s"
    if damaged:
        print("\n".join(damaged))
        raise ValueError(f"{len(damaged)} files are damaged, listed above; compared were {done}.")
    print(f"{flags.folder} is whole: {done}")


def folders(given: str) -> list[str]:
    """The folder itself, or those in it, that have an index.json."""
    given = given.rstrip("/")
    if in_bucket(given):
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


def compared(files: list[tuple[Layout, int]], workers: int, total: int) -> Iterator[str | None]:
    """What is wrong with each file, with progress."""
    done, began = 0, time.monotonic()
    next_line_s = began + LINE_EVERY_S
    with (
        Progress(disable=not Console().is_terminal) as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        task = progress.add_task("bytes compared", total=total)
        for (layout, number), result in zip(files, pool.map(wrong, files), strict=True):
            done += layout.shards[number].bytes
            progress.update(task, completed=done)
            if progress.disable and (now := time.monotonic()) > next_line_s:
                left_s = (now - began) * (total - done) / done
                print(f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB, {left_s:,.0f} s left")
                next_line_s = now + LINE_EVERY_S
            yield result


def wrong(file: tuple[Layout, int]) -> str | None:
    """In words; None where it is as it should be."""
    layout, number = file
    shard, path = layout.shards[number], layout.path(number)
    if error := layout.wrong_size(number, sizes(layout, shard.name)):
        return str(error)
    if in_bucket(path):
        whole = Prefix(layout.folder).found(shard.name)[shard.name] == in_bucket_form(shard)
    else:
        try:
            whole = file_crc32c(Path(path)) == shard.crc32c
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None if whole else str(layout.damaged(number))


if __name__ == "__main__":
    faults.command_line(main)
