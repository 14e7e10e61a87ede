"""Verify the checksums of token shards: python data/verify.py --folder gs://bucket/corpus

A run compares only file sizes, so use this after a copy, before a long run, or after a suspicious
loss. Files on a disk are read; a bucket lists the checksums of its objects.
"""

import base64
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# A script has its own folder on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.manifest import INDEX, Shard, file_crc32c, read_manifest
from data.progress import progress
from data.token_files import Files, open_files
from runtime import cli, errors, storage
from utils import ConfigError

WORKERS = 8  # files read concurrently


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Verify the checksums of all token shards of a folder."""

    folder: str  # with an index.json, or with folders that have one; also gs://BUCKET/...


def main(arguments: list[str] | None = None) -> None:
    flags = cli.parse_flags(Flags, arguments)
    kinds = [kind for f in folders(flags.folder) for kind in open_files(f, read_manifest(f))]
    shards = [shard for files in kinds for shard in files.shards]
    total, damaged = sum(shard.bytes for shard in shards), []
    with progress(total) as bar, ThreadPoolExecutor(WORKERS) as pool:
        for files in kinds:
            check = functools.partial(damage, files, files.storage.files())
            for shard, result in zip(files.shards, pool.map(check, files.shards), strict=True):
                bar.update(shard.bytes)
                damaged += [result] if result else []
    count = f"{len(shards):,} files, {total / 1e9:,.3f} GB"
    if damaged:
        print("\n".join(damaged))
        raise ConfigError(
            f"{len(damaged)} files are damaged, listed above; compared {count}. Copy or prepare "
            "them again."
        )
    print(f"{flags.folder} is complete: {count}")


def folders(folder: str) -> list[str]:
    """Return the folder itself and those in it that have an index.json."""
    folder = folder.rstrip("/")
    names = [name for name in storage.at(folder).files() if f"/{name}".endswith(f"/{INDEX}")]
    if not names:
        raise ConfigError(
            f"--folder {folder} has no {INDEX}, nor has a folder in it. Use a folder that "
            "data/prepare.py has finished."
        )
    return sorted(f"{folder}/{name}".removesuffix(f"/{INDEX}") for name in names)


def damage(files: Files, listed: dict[str, storage.FileInfo], shard: Shard) -> str | None:
    """Return a message if the file is damaged."""
    try:
        files.check_size(shard, listed)
        listed_crc32c = base64.b64decode(listed[shard.name].crc32c).hex()
        crc32c = listed_crc32c or file_crc32c(files.storage, shard.name)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{files.folder}/{shard.name} cannot be read: {error}"
    altered = "altered, with another checksum"
    return None if crc32c == shard.crc32c else str(files.error(shard, altered))


if __name__ == "__main__":
    errors.run_command(main)
