"""Text to token shards: python data/prepare.py --source python-stdlib --out data/sample

Writes OUT/train and OUT/val, each with shard_00000.npy, shard_00001.npy, ... and an index.json,
which is written last: a folder without one is not finished. What comes out depends on the source
and the settings, not on the number of worker processes, nor on kills: a preparation that was
stopped goes on when it is started again. dataset.py reads it.

    python data/prepare.py --source chat.jsonl --chat --out data/chat

Conversations (data/chat.py) get loss weights beside their tokens, shard_00000.weights.npy: 1 for
answers and 0 for the rest, so that training and validation count answers only.

    python data/prepare.py --source gs://bucket/books --out gs://bucket/data/books

Both may lie in a bucket (data/out.py says how shards come there). data/cluster.py writes the same
with a cluster.
"""

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import tyro

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import out, work
from data.encode import Encoded, encode
from data.settings import Prepare
from data.sources import Piece, Place, pieces
from dataset import prefetch

BATCH_CHARACTERS = 1_000_000  # sent to a worker at a time: large against the cost of sending


def main(arguments: list[str] | None = None) -> None:
    work.carry_out(tyro.cli(Prepare, args=arguments), Work, out.at)


class Work(work.Work):
    """Tokenized by processes of this machine."""

    def stream(self) -> Iterator[Encoded]:
        return encoded(self.config, self.place)


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
        spawned = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, spawned, initializer=end_with_parent)
        results = prefetch(encode_batch, found, depth, pool)
    for batch in results:
        yield from batch


def end_with_parent() -> None:
    """A worker of a preparation that is killed would wait for it for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
