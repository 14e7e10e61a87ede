"""What nodes of a cluster do for data/cluster.py: tokenize a stretch, write a shard.

Tasks know nothing of Ray, and done again they do the same. Nodes import this file by its name.
"""

import dataclasses
import functools
import importlib.metadata
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from buckets import Prefix, is_bucket
from data import out
from data.encode import cached_tokenizer, encode_piece
from data.settings import Prepare
from data.shards import FULL, PARTIAL, FullDisk, Growing, gone, no_space, reopen, weights_of
from data.sources import Place, Unit, describe, unit_pieces
from manifest import BLOCK_BYTES, Shard, file_crc32c

ROOT = Path(__file__).resolve().parent.parent
DECIDING = ("ray", "tiktoken", "tokenizers", "numpy", "pyarrow")  # packages that decide the bits


# --- what a node is -------------------------------------------------------------------------------


class Node(NamedTuple):
    """What one says of itself."""

    host: str
    versions: dict[str, str]  # of what decides the bits
    source: str  # sha256 of the listing of its files, or what keeps it from being read


def about_node(config: Prepare) -> Node:
    try:
        source = describe(config)["files_sha256"]
    except (ValueError, OSError) as error:
        source = str(error)
    return Node(platform.node(), versions(), source)


@functools.cache
def versions() -> dict[str, str]:
    """Of what decides the bits."""
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in DECIDING}
    found |= {
        f"data/{path.name}": file_crc32c(path) for path in sorted((ROOT / "data").glob("*.py"))
    }
    return found | {"manifest.py": file_crc32c(ROOT / "manifest.py")}


def compare_versions(host: str, here: dict[str, str], there: dict[str, str]) -> None:
    """`here` of who asks. Raises ValueError where a node would make other bits."""
    names = [n for n in sorted(here.keys() | there.keys()) if here.get(n) != there.get(n)]
    differ = [f"{name} {there.get(name)}, here {here.get(name)}" for name in names]
    if differ:
        raise ValueError(
            f"node {host} has {'; '.join(differ)}, and its tokens might be others. Bring "
            "this checkout and its environment there, or take the node out."
        )


def compare(here: Node, there: Node) -> None:
    """Raises ValueError where a node would make other bits, or sees another source."""
    compare_versions(there.host, here.versions, there.versions)
    if there.source != here.source:
        raise ValueError(
            f"node {there.host} does not see the source as it is here ({there.source}). Use a "
            "source that all machines share, or one in a bucket."
        )


# --- tokens ---------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """Of the pieces of a stretch, in order: all that the driver is told."""

    lengths: np.ndarray  # tokens of each, int64 [pieces]; so are the next two
    text_bytes: np.ndarray
    source_bytes: np.ndarray
    weights: np.ndarray  # int8 [pieces]; -1 for none
    ends: np.ndarray  # bool [pieces]
    places: np.ndarray  # int64 [pieces, 4]
    left_out: dict[int, str]  # by number of the piece


def encode_unit(
    config: Prepare, unit: Unit, after: Place | None, asked: dict[str, str]
) -> tuple[Counts, np.ndarray]:
    """A task: the stretch's counts and its tokens.

    asked   versions of the driver's machine: this node may have joined after it compared them.
    Raises  ValueError where they differ here.
    """
    compare_versions(platform.node(), asked, versions())
    tokenizer = cached_tokenizer(config.tokenizer)
    coded = [encode_piece(tokenizer, piece) for piece in unit_pieces(config, unit, after)]
    ids = [piece.ids for piece in coded] or [np.empty(0, np.uint16)]
    counts = Counts(
        lengths=np.array([len(piece.ids) for piece in coded], np.int64),
        text_bytes=np.array([piece.text_bytes for piece in coded], np.int64),
        source_bytes=np.array([piece.source_bytes for piece in coded], np.int64),
        weights=np.array([-1 if p.weight is None else p.weight for p in coded], np.int8),
        ends=np.array([piece.ends for piece in coded], bool),
        places=np.array([piece.place for piece in coded], np.int64).reshape(-1, len(Place())),
        left_out={n: piece.left_out for n, piece in enumerate(coded) if piece.left_out},
    )
    return counts, np.concatenate(ids)


# --- shards ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Where tasks write the shards of a split."""

    folder: str  # OUT/SPLIT
    dtype: np.dtype
    weighted: bool

    def files(self, path: Path) -> list[tuple[Path, np.dtype]]:
        """Of a shard."""
        weights = [(weights_of(path), np.dtype(np.uint8))] if self.weighted else []
        return [(path, self.dtype), *weights]


# Of a stretch: the number among those that a task is given, begin, end, and loss weight.
Part = tuple[int, int, int, int | None]


def write(
    target: Target, name: str, kept: int, parts: list[Part], full: bool, *stretches: np.ndarray
) -> Shard | None:
    """A task: the shard, or as much as there is of it, goes on after `kept` tokens. Done again, it
    does the same.
    """
    disk = Path(tempfile.gettempdir() if is_bucket(target.folder) else target.folder)
    try:
        return stored(target, name, kept, parts, full, stretches)
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f"node {platform.node()}: {no_space(disk)}"
        raise FullDisk(error.errno, error.strerror, where) from error


def stored(
    target: Target,
    name: str,
    kept: int,
    parts: list[Part],
    full: bool,
    stretches: tuple[np.ndarray, ...],
) -> Shard | None:
    if not is_bucket(target.folder):
        return written(target, Path(target.folder) / name, kept, parts, full, stretches)
    objects = Prefix(target.folder)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        for file, _ in target.files(path) if kept else ():
            try:
                objects.fetch(unfinished(file.name, kept), file.with_name(file.name + PARTIAL))
            except FileNotFoundError as error:
                raise gone(f"{target.folder}/{file.name}", "its beginning is missing") from error
        shard = written(target, path, kept, parts, full, stretches)
        if shard:
            files = {file.name: file for file in out.files_of([shard])}
            paths = {each: path.with_name(each) for each in files}
            expected = {each: out.of(file) for each, file in files.items()}
        else:
            length = kept + sum(stop - start for _, start, stop, _ in parts)
            here = [file.with_name(file.name + PARTIAL) for file, _ in target.files(path)]
            paths = {unfinished(file.name.removesuffix(PARTIAL), length): file for file in here}
            expected = {each: out.found_of(file) for each, file in paths.items()}
        objects.send(paths, expected)
        return shard


def unfinished(name: str, length: int) -> str:
    """Of an object with the first tokens of a shard. Another one for each length, as progress.json
    may know of the one before.
    """
    return f"{name}.{length}{PARTIAL}"


def written(
    target: Target,
    path: Path,
    kept: int,
    parts: list[Part],
    full: bool,
    stretches: tuple[np.ndarray, ...],
) -> Shard | None:
    done = []
    for file, dtype in target.files(path):
        if kept:
            reopen(file)
        growing = Growing(file, dtype, kept)
        for number, start, stop, weight in parts:
            ids = stretches[number][start:stop]
            growing.append(ids if file == path else np.full(len(ids), weight, np.uint8))
        if full:
            done.append(growing.finish(BLOCK_BYTES))
        else:
            growing.sync()
            growing.close()
    return dataclasses.replace(done[0], weights=(done[1:] or [None])[0]) if full else None
