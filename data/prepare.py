"""Text to token shards: python data/prepare.py --source python-stdlib --out data/sample

Writes OUT/train and OUT/val, each with shard_00000.npy, shard_00001.npy, ... and an index.json,
which is written last: a folder without one is not finished. What comes out depends on the source
and the settings, not on the number of worker processes, nor on kills: a preparation that was
stopped goes on when it is started again. dataset.py reads it.

    python data/prepare.py --source chat.jsonl --chat --out data/chat

Conversations (data/chat.py) get loss weights beside their tokens, shard_00000.weights.npy: 1 for
answers and 0 for the rest, so that training and validation count answers only.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import chat, sources
from data.shards import PROGRESS, ShardWriter, clear, replace
from data.sources import NOT_CONTENT, Piece, Place, Prepare, in_validation, pieces
from data.tokenizer import Tokenizer, load_tokenizer, table_sha256
from dataset import DOCUMENT_RULE, INDEX, Manifest, prefetch, read_manifest

BATCH_CHARACTERS = 1_000_000  # sent to a worker at a time: large against the cost of sending
LINE_EVERY_S = 10.0


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(Prepare, args=arguments)
    sources.check(config)
    tokenizer = load_tokenizer(config.tokenizer)
    settings = sources.describe(config)
    if already_prepared(config, settings, tokenizer):
        (Path(config.out) / PROGRESS).unlink(missing_ok=True)
        print(
            f"{config.out} is already prepared with these settings; --overwrite prepares it again"
        )
        return
    began = time.perf_counter()
    work = Work(config, settings, tokenizer)
    with contextlib.closing(work):
        work.run()
        check_not_empty(config, work.writers)
        for split, writer in work.writers.items():
            writer.finish(manifest(config, tokenizer, settings, writer))
            answers = f" ({writer.learned_tokens:,} of answers)" if config.chat else ""
            print(
                f"{Path(config.out) / split}: {writer.documents:,} documents, {writer.tokens:,} "
                f"tokens{answers}, {writer.text_bytes / writer.learned_tokens:.2f} bytes per "
                f"token, {len(writer.manifest_shards)} shards"
            )
        work.progress.unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    print(f"prepared in {seconds:.1f} s with the tokenizer {config.tokenizer}")


def folders(config: Prepare) -> list[Path]:
    """What is written: OUT/train and OUT/val, or one of them where the other has no share."""
    used = {"train": config.val_share < 1, "val": config.val_share > 0}
    return [Path(config.out) / split for split in used if used[split]]


class Work:
    """A preparation: begun anew, or gone on with from where `progress.json` says."""

    def __init__(self, config: Prepare, settings: dict[str, Any], tokenizer: Tokenizer):
        self.config, self.progress = config, Path(config.out) / PROGRESS
        self._made = json.loads(json.dumps(made(settings, tokenizer)))
        dtype = np.dtype(token_dtype(tokenizer))
        self.writers = {
            folder.name: ShardWriter(folder, config.shard_tokens, dtype, weighted=config.chat)
            for folder in folders(config)
        }
        self.place: Place | None = None  # of the last piece that was written
        self.ended = True  # its document
        self.source_bytes = self._stored = 0
        if not self._restored():
            self.progress.unlink(missing_ok=True)
            for writer in self.writers.values():
                clear(writer.folder)

    @property
    def documents(self) -> int:
        return sum(writer.documents for writer in self.writers.values())

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers.values())

    def _restored(self) -> bool:
        """Whether there was something to go on with.

        Raises  ValueError where it was made with other settings, or files are missing.
        """
        if self.config.overwrite or not self.progress.exists():
            return False
        state = read_progress(self.progress)
        must_be_made_alike(self.progress, state["made"], self._made, "can go on only so")
        for split, writer in self.writers.items():
            (writer.folder / INDEX).unlink(missing_ok=True)
            writer.restore(state["splits"][split])
        self.place, self.ended = Place(*state["place"]), state["ended"]
        self.source_bytes, self._stored = state["source_bytes"], self.tokens
        print(
            f"{self.config.out}: goes on after {self.documents:,} documents, "
            f"{self.tokens / 1e6:,.1f} M tokens"
        )
        return True

    def store(self) -> None:
        """So that another process can go on from here."""
        state = {
            "made": self._made,
            "place": self.place,
            "ended": self.ended,
            "source_bytes": self.source_bytes,
            "splits": {split: writer.state() for split, writer in self.writers.items()},
        }
        replace(self.progress, json.dumps(state) + "\n")
        self._stored = self.tokens

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def run(self) -> None:
        """Every document, ended by end-of-text, written to the shards of its split.

        What is under way and what is not stored yet are a shard's tokens at most.
        """
        config, report = self.config, Report(self)
        with contextlib.closing(encoded(config, self.place)) as stream, report.progress:
            for found in () if self._enough() else stream:
                split = "val" if in_validation(self.documents, config.val_share) else "train"
                self.writers[split].add(found.ids, found.text_bytes, found.weights, found.ends)
                self.place, self.ended = found.place, found.ends
                self.source_bytes += found.source_bytes
                report.tell()
                if self._enough():
                    break
                if self.tokens - self._stored >= config.shard_tokens // 2:
                    self.store()
        for writer in self.writers.values():
            writer.flush()

    def _enough(self) -> bool:
        return self.ended and 0 < self.config.max_tokens <= self.tokens


def read_progress(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}), so what was prepared cannot be gone on with. Begin "
            "anew with --overwrite."
        ) from error


# Tokens


class Encoded(NamedTuple):
    """A piece as it is written."""

    ids: np.ndarray
    weights: np.ndarray | None  # uint8; None where all are 1
    text_bytes: int  # of the text with weight 1
    source_bytes: int
    place: Place
    ends: bool  # its document


def encoded(config: Prepare, after: Place | None = None) -> Iterator[Encoded]:
    """Every piece, in order; enough are under way to keep all workers busy, no more."""
    workers = config.workers or os.cpu_count() or 1
    depth = 2 * workers
    characters = min(BATCH_CHARACTERS, config.shard_tokens // 2 // (depth + 1))
    found = batches(pieces(config, after), characters)
    encode_batch = functools.partial(encode, config.tokenizer)
    if workers == 1:
        results = map(encode_batch, found)
    else:
        # Fresh processes rather than forks: a fork copies locks of threads that it does not copy.
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        results = prefetch(encode_batch, found, depth, pool)
    for batch in results:
        yield from batch


def batches(found: Iterable[Piece], least: int) -> Iterator[list[Piece]]:
    """Pieces grouped to `least` characters."""
    batch, characters = [], 0
    for piece in found:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= least:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(tokenizer: str, batch: list[Piece]) -> list[Encoded]:
    """Runs in a worker, which loads the tokenizer once."""
    return [encode_piece(cached_tokenizer(tokenizer), piece) for piece in batch]


def token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    return np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32


cached_tokenizer = functools.cache(load_tokenizer)


def encode_piece(tokenizer: Tokenizer, piece: Piece) -> Encoded:
    """Its tokens, and end-of-text, with the piece's weight, after the last of a document.

    Each piece is tokenized by itself, so that no token has a part of a prompt and of an answer.
    What looks like a special token in the text is text: no document can end another one.
    """
    ids = tokenizer.encode_ordinary(piece.text)
    if piece.ends:
        ids.append(tokenizer.eot_token)
    weights = None if piece.weight is None else np.full(len(ids), piece.weight, np.uint8)
    text_bytes = 0 if piece.weight == 0 else len(piece.text.encode(errors="replace"))
    where = piece.source_bytes, piece.place, piece.ends
    return Encoded(np.fromiter(ids, token_dtype(tokenizer), len(ids)), weights, text_bytes, *where)


# What is finished


def manifest(
    config: Prepare, tokenizer: Tokenizer, settings: dict[str, Any], writer: ShardWriter
) -> Manifest:
    return Manifest(
        split=writer.folder.name,
        tokenizer=config.tokenizer,
        tokenizer_sha256=table_sha256(tokenizer),
        vocabulary=tokenizer.n_vocab,
        end_of_text=tokenizer.eot_token,
        document_rule=DOCUMENT_RULE,
        dtype=writer.dtype.name,
        documents=writer.documents,
        tokens=writer.tokens,
        text_bytes=writer.text_bytes,
        shards=writer.manifest_shards,
        command=command(config),
        settings=settings,
        template=chat.TEMPLATE if config.chat else None,
        learned_tokens=writer.learned_tokens if config.chat else None,
    )


def command(config: Prepare) -> str:
    """The command line without --out."""
    words = ["python", "data/prepare.py"]
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value != item.default and item.name not in NOT_CONTENT:
            flag = f"--{item.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def already_prepared(config: Prepare, settings: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """True when OUT is finished and nothing that decides its content has changed.

    Raises  ValueError when a part of it is finished but was made otherwise: a run may depend on it.
    """
    if config.overwrite:
        return False
    asked = made(settings, tokenizer)
    finished = [folder for folder in folders(config) if (folder / INDEX).is_file()]
    whole = finished == folders(config)
    for folder in finished:
        found = read_manifest(folder)
        must_be_made_alike(folder / INDEX, found.settings | ends_of(found), asked)
        # By size; the checksums are for whoever reads them.
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.npy")}
        files = [file for s in found.shards for file in (s, s.weights) if file]
        whole = whole and all(sizes.get(file.name) == file.bytes for file in files)
    return whole


def ends_of(found: Manifest) -> dict[str, Any]:
    return {"tokenizer_sha256": found.tokenizer_sha256, "end_of_text": found.end_of_text}


def made(settings: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides what is written."""
    ends = {"tokenizer_sha256": table_sha256(tokenizer), "end_of_text": tokenizer.eot_token}
    return settings | ends


def must_be_made_alike(
    path: Path, found: dict[str, Any], asked: dict[str, Any], why: str = "a run may depend on it"
) -> None:
    differ = sorted(k for k in found.keys() | asked.keys() if found.get(k) != asked.get(k))
    if differ:
        raise ValueError(
            f"{path} was made with another {', '.join(differ)}, and {why}. Use another --out, or "
            "--overwrite to replace it."
        )


def check_not_empty(config: Prepare, writers: dict[str, ShardWriter]) -> None:
    for split, writer in writers.items():
        if not writer.documents:
            others = sum(other.documents for other in writers.values())
            raise ValueError(
                f"no document of --source {config.source} is for {split}: all {others} are on the "
                f"other side of --val-share {config.val_share}. Use --val-share 0.5, or 0 for no "
                "validation set."
            )


# What the user sees


class Report:
    """A progress bar in a terminal; elsewhere a line every LINE_EVERY_S."""

    def __init__(self, work: Work):
        self.work, config = work, work.config
        self.max_tokens = config.max_tokens
        self.total = config.max_tokens or sources.source_bytes(config)  # tokens, or else bytes
        self.began, self.began_tokens = time.monotonic(), work.tokens
        self.next_line_s = self.began + LINE_EVERY_S
        columns = TextColumn("{task.description}"), BarColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, *times, disable=not Console().is_terminal)
        done = self._done()
        self.task = self.progress.add_task("starting", total=self.total, completed=done)
        self.began_done = done

    def _done(self) -> int:
        return self.work.tokens if self.max_tokens else self.work.source_bytes

    def tell(self) -> None:
        now, done = time.monotonic(), self._done()
        if self.progress.disable and now < self.next_line_s:
            return
        speed = (self.work.tokens - self.began_tokens) / max(now - self.began, 1e-9)
        text = (
            f"{self.work.documents:,} documents, {self.work.tokens / 1e6:,.1f} M tokens, "
            f"{speed / 1e6:.2f} M tokens/s"
        )
        self.progress.update(self.task, completed=done, description=text)
        if self.progress.disable:
            if self.total:
                left_s = (now - self.began) * (self.total - done) / max(done - self.began_done, 1)
                text += f", {min(done / self.total, 1):.0%}, {max(left_s, 0):,.0f} s left"
            print(text, flush=True)
            self.next_line_s = now + LINE_EVERY_S


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
