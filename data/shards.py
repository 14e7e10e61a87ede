"""Token shards and what is kept of unfinished ones, so that a killed preparation goes on.

A shard grows in SHARD.npy.partial and has its own name when it is full. `progress.json` says what
was written up to some piece of the source; what was written behind it is cut off again when the
preparation goes on, which then writes the same bits. An index.json in each folder is written last.
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizer import Tokenizer, table_sha256
from manifest import BLOCK_BYTES, DOCUMENT_RULE, INDEX, Manifest, Shard, checksums, shard_of

PROGRESS = "progress.json"
PARTIAL = ".partial"
WEIGHTS = ".weights"
FULL = errno.ENOSPC, errno.EDQUOT


class FullDisk(OSError):
    """Of a node of a cluster; its `filename` is `no_space` there."""


class Growing:
    """A .npy file of one dimension, written as its elements come."""

    def __init__(self, path: Path, dtype: np.dtype, kept: int = 0):
        """kept  elements that are there already, and after which all is cut off.

        Raises  ValueError where there are fewer.
        """
        self.path, self.dtype, self.length = path, dtype, kept
        self._partial = path.with_name(path.name + PARTIAL)
        if kept and not self._partial.exists():
            raise gone(self._partial, "it is missing")
        found = self._partial.stat().st_size if kept else 0
        self._file = self._partial.open("r+b" if kept else "w+b")
        end = self._header() + kept * dtype.itemsize
        if kept and found < end:
            self._file.close()
            raise gone(self._partial, f"it has {found} bytes of {end}")
        self._file.truncate(end)
        self._file.seek(end)

    def _header(self) -> int:
        """Where it ends, which is the same for every length."""
        self._file.seek(0)
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, described)
        return self._file.tell()

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self.dtype, copy=False).data)
        self.length += len(values)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def finish(self, block_bytes: int) -> Shard:
        """Gives it its own name."""
        self._header()
        self.sync()
        self.close()
        crc32c, blocks = checksums(self._partial, block_bytes)
        size = self._partial.stat().st_size
        shard = Shard(self.path.name, self.length, size, crc32c, blocks=blocks)
        os.replace(self._partial, self.path)
        return shard


def reopen(path: Path) -> None:
    """What was unfinished and has been filled since is unfinished again."""
    if path.exists():
        os.replace(path, path.with_name(path.name + PARTIAL))


@dataclass
class ShardWriter:
    """Cuts a stream of tokens, and of their loss weights, into shards of `shard_tokens`."""

    folder: Path
    shard_tokens: int
    dtype: np.dtype
    weighted: bool = False
    block_bytes: int = BLOCK_BYTES
    documents: int = 0
    text_bytes: int = 0  # of the text with weight 1
    tokens: int = 0
    learned_tokens: int = 0  # with weight 1
    manifest_shards: list[Shard] = field(default_factory=list)
    growing: Growing | None = None
    growing_weights: Growing | None = None

    def add(
        self, ids: np.ndarray, text_bytes: int, weight: int | None = None, ends: bool = True
    ) -> None:
        """Appends a piece, which ends its document or does not.

        weight  of the loss on its tokens, where the writer is `weighted`
        """
        self.documents += ends
        self.text_bytes += text_bytes
        self.tokens += len(ids)
        self.learned_tokens += len(ids) if weight is None else len(ids) * weight
        while len(ids):
            room = self.shard_tokens - self.unfinished
            self.append(ids[:room], weight)
            ids = ids[room:]
            if self.unfinished == self.shard_tokens:
                self.flush()

    @property
    def unfinished(self) -> int:
        """Tokens in the shard that is being written."""
        return self.growing.length if self.growing else 0

    def append(self, ids: np.ndarray, weight: int | None) -> None:
        """To the shard that is being written, which has room for them."""
        if self.growing is None:
            self.open()
        self.growing.append(ids)
        if self.weighted:
            self.growing_weights.append(np.full(len(ids), weight, np.uint8))

    def open(self, kept: int = 0) -> None:
        path = self.path(len(self.manifest_shards))
        self.growing = Growing(path, self.dtype, kept)
        if self.weighted:
            self.growing_weights = Growing(weights_of(path), np.dtype(np.uint8), kept)

    def path(self, number: int) -> Path:
        return self.folder / f"shard_{number:05d}.npy"

    def flush(self) -> None:
        """Ends the shard that is being written, if there is one."""
        if self.growing is None:
            return
        weights = self.growing_weights.finish(self.block_bytes) if self.weighted else None
        shard = self.growing.finish(self.block_bytes)
        self.manifest_shards.append(dataclasses.replace(shard, weights=weights))
        self.growing = self.growing_weights = None

    def settle(self) -> None:
        """Waits until `manifest_shards` are written, where others do that."""

    def close(self) -> None:
        """Leaves what is unfinished as it is."""
        for file in self._open_files():
            with contextlib.suppress(OSError):  # a full disk: what was not stored is made again
                file.close()
        self.growing = self.growing_weights = None

    def _open_files(self) -> Iterator[Growing]:
        return (file for file in (self.growing, self.growing_weights) if file)

    def state(self) -> dict[str, Any]:
        """All that `restore` needs beside the files, which are on the disk when it returns."""
        for file in self._open_files():
            file.sync()
        return {
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "tokens": self.tokens,
            "learned_tokens": self.learned_tokens,
            "unfinished": self.unfinished,
            "shards": [dataclasses.asdict(shard) for shard in self.manifest_shards],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to that state: what was written after it is written again.

        Raises  ValueError where the unfinished shard is not as it was then.
        """
        self.manifest_shards = [shard_of(shard) for shard in state["shards"]]
        for name in ("documents", "text_bytes", "tokens", "learned_tokens"):
            setattr(self, name, state[name])
        if state["unfinished"]:
            self.go_on(state["unfinished"])

    def go_on(self, kept: int) -> None:
        """With the unfinished shard, after so many tokens."""
        full = self.path(len(self.manifest_shards))
        for path in (full, weights_of(full)):
            reopen(path)
        self.open(kept)

    def manifest(self, name: str, tokenizer: Tokenizer, **fields: Any) -> Manifest:
        """Of what was written, with the tokenizer of this name.

        fields  of Manifest, those that the writer does not know
        """
        return Manifest(
            split=self.folder.name,
            tokenizer=name,
            tokenizer_sha256=table_sha256(tokenizer),
            vocabulary=tokenizer.n_vocab,
            end_of_text=tokenizer.eot_token,
            document_rule=DOCUMENT_RULE,
            dtype=self.dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            shards=self.manifest_shards,
            block_bytes=self.block_bytes,
            **fields,
        )

    def finish(self, manifest: Manifest) -> None:
        """Writes index.json, which says that the folder is whole."""
        replace(self.folder / INDEX, index_text(manifest))


def files_of(shards: Iterable[Shard]) -> Iterator[Shard]:
    """All files of shards: with loss weights each has two."""
    return (file for shard in shards for file in (shard, shard.weights) if file)


def index_text(manifest: Manifest) -> str:
    """What index.json says."""
    fields = dataclasses.asdict(manifest, dict_factory=without_none)
    return json.dumps(fields, indent=1) + "\n"


def gone(path: Path | str, why: str) -> ValueError:
    return ValueError(
        f"{path} is not as {PROGRESS} says: {why}, so what was prepared cannot be gone on with. "
        "Bring the file back, or begin anew with --overwrite."
    )


def no_space(folder: Path) -> str:
    """A full disk, in words."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    return f"{folder} has no space left ({shutil.disk_usage(there).free:,} bytes are free)"


def weights_of(shard: Path) -> Path:
    return shard.with_name(f"{shard.stem}{WEIGHTS}.npy")


def replace(path: Path, text: str) -> None:
    """The file has its old content or this one, whenever the machine stops."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """So that the index of a folder without loss weights says nothing of them."""
    return {name: value for name, value in items if value is not None}


def clear(folder: Path) -> None:
    """Makes the folder, and removes what an earlier preparation wrote there, index.json first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    for pattern in ("shard_*.npy", f"shard_*.npy{PARTIAL}", f"{INDEX}{PARTIAL}"):
        for path in folder.glob(pattern):
            path.unlink()
