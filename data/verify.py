"""Compare token shards with their checksums: python data/verify.py --folder data/sample

A run compares nothing but sizes, so use this after a copy, before a long run, or when a loss is
strange. On a disk the files are read; a bucket lists the checksums that it has of its objects.
FOLDER has an index.json, or folders with one.

    python data/verify.py --folder gs://bucket/corpus
"""

import base64
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import faults
from buckets import Prefix, is_bucket
from data.progress import progress
from data.shards import folder_at
from manifest import INDEX, file_crc32c, read_manifest
from token_files import Files, open_files

WORKERS = 8  # files that are read at once


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Compare all token shards of a folder with their checksums."""

    folder: str  # with an index.json, or with folders that have one; also gs://BUCKET/...


def main(arguments: list[str] | None = None) -> None:
    flags = tyro.cli(Flags, args=arguments)
    kinds = [kind for f in folders(flags.folder) for kind in open_files(f, read_manifest(f))]
    shards = [shard for kind in kinds for shard in kind.shards]
    total, damaged = sum(shard.bytes for shard in shards), []
    with progress(total) as bar, ThreadPoolExecutor(WORKERS) as pool:
        results = (result for kind in kinds for result in compared(kind, pool))
        for shard, result in zip(shards, results, strict=True):
            bar.update(shard.bytes)
            damaged += [result] if result else []
    done = f"{len(shards):,} files, {total / 1e9:,.3f} GB"
    if damaged:
        print("\n".join(damaged))
        raise ValueError(f"{len(damaged)} files are damaged, listed above; compared were {done}.")
    print(f"{flags.folder} is whole: {done}")


def folders(given: str) -> list[str]:
    """The folder itself, or those in it, that have an index.json."""
    given = given.rstrip("/")
    names = [name for name in folder_at(given).found() if f"/{name}".endswith(f"/{INDEX}")]
    if not names:
        raise ValueError(
            f"--folder {given} has no {INDEX}, nor has a folder in it: there are no finished "
            "shards. Give one that data/prepare.py has made."
        )
    return sorted(f"{given}/{name}".removesuffix(f"/{INDEX}") for name in names)


def compared(files: Files, pool: ThreadPoolExecutor) -> Iterator[str | None]:
    """What is wrong with each file, in words; None where nothing is."""
    listed = Prefix(files.folder).found() if is_bucket(files.folder) else {}
    there = {name: base64.b64decode(found.crc32c).hex() for name, found in listed.items()}
    sizes = files.sizes()

    def wrong(file: int) -> str | None:
        shard, path = files.shards[file], files.path(file)
        try:
            files.check_size(file, sizes)
            crc32c = there[shard.name] if listed else file_crc32c(Path(path))
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be read: {error}"
        altered = "altered, with another checksum"
        return None if crc32c == shard.crc32c else str(files.error(file, altered))

    return pool.map(wrong, range(len(files.shards)))


if __name__ == "__main__":
    faults.command_line(main)
