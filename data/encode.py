"""Tokenize one split of a source into shards of its own, and a record of them.

What comes out depends on the split and the settings alone, so it does not matter which process or
machine does it, in which order, or how often. The record is written last.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import tiktoken

from data import chat, readers
from data.readers import Document, Part, Piece
from data.settings import Prepare, in_validation
from data.shards import ShardWriter, folder_at
from data.tokenizer import begin_of_text, load_tokenizer, token_bytes
from manifest import Shard, shard_of

# tiktoken's patterns run out of stack on a run of white space of about a million characters.
PIECE_CHARACTERS = 400_000
SIDES = ("train", "val")


@dataclass
class Side:
    """What is for training, or for validation."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0  # of the text with weight 1
    learned_tokens: int = 0  # with weight 1
    shards: list[Shard] = field(default_factory=list)

    def __add__(self, other: "Side") -> "Side":
        return Side(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Record:
    """What became of a split."""

    split: int
    settings: str  # hash of all that decides it
    train: Side
    val: Side
    left_out: dict[str, int]  # how many of each kind, with --skip-bad

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.val.tokens


def record_of(content: bytes) -> Record:
    """Raises ValueError, TypeError, KeyError for what is no record."""
    fields = json.loads(content)
    for side in SIDES:
        shards = [shard_of(shard) for shard in fields[side].pop("shards")]
        fields[side] = Side(**fields[side], shards=shards)
    return Record(**fields)


class Job(NamedTuple):
    """A split to tokenize."""

    config: Prepare
    split: int
    parts: tuple[Part, ...]
    settings: str
    limit: int  # stop after the document that reaches so many tokens; 0 takes all
    record: str  # name of the record below OUT; "" writes none
    stem: str = "shard"  # of the names of shards
    cut: int | None = None  # after so many tokens validation begins; None: by VALIDATION_RULE


class Coder:
    """Documents to tokens."""

    def __init__(self, config: Prepare):
        """Raises ValueError where the tokenizer does not serve."""
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.begin = begin_of_text(self.tokenizer, config.add_bos)
        self.dtype = np.dtype(np.uint16 if self.tokenizer.n_vocab <= 2**16 else np.uint32)
        self.template, self.to_pieces = None, None
        if config.chat:
            self.template = chat.template_of(config.chat_template, self.tokenizer)
            self.to_pieces = functools.partial(chat.to_pieces, template=self.template)

    def coded(self, document: Document) -> Iterator[tuple[np.ndarray, int | None, int]]:
        """(ids, loss weight, bytes of text with weight 1) of each piece, BOS and end-of-text.

        Each piece is tokenized by itself, so that no token has a part of a prompt and of an answer.
        What looks like a special token in the text is text: no document can end another one.
        """
        weight, begun = None, not document.begins
        for piece in cut(document.pieces):
            ids, text = self.ids(piece), "" if piece.special or piece.weight == 0 else piece.text
            if not begun and self.begin not in (None, *ids[:1]):
                yield np.array([self.begin]), None if piece.weight is None else 0, 0
            weight, begun = piece.weight, True
            yield np.asarray(ids), weight, len(text.encode(errors="replace"))
        if begun and document.ends:
            yield np.array([self.tokenizer.eot_token]), weight, 0

    def ids(self, piece: Piece) -> np.ndarray | list[int]:
        if piece.special:
            return [self.tokenizer.special.ids[piece.text]]
        if isinstance(self.tokenizer, tiktoken.Encoding):
            # As encode_ordinary, without a Python object for each. Half a surrogate pair, which
            # that replaces, is an error here.
            with contextlib.suppress(UnicodeEncodeError):
                return self.tokenizer.encode_to_numpy(piece.text, disallowed_special=())
        return self.tokenizer.encode_ordinary(piece.text)


coder_of = functools.lru_cache(4)(Coder)  # a worker loads a tokenizer once


def cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of PIECE_CHARACTERS at most, and of so many where more of the same weight follows."""
    for (weight, special), group in itertools.groupby(pieces, lambda piece: piece[1:]):
        if special:
            yield from group
            continue
        rest = ""
        for piece in group:
            rest += piece.text
            while len(rest) > PIECE_CHARACTERS:
                yield Piece(rest[:PIECE_CHARACTERS], weight)
                rest = rest[PIECE_CHARACTERS:]
        if rest:
            yield Piece(rest, weight)


class SplitWriter:
    """The shards of a split, and what is counted of them."""

    def __init__(self, job: Job, coder: Coder, on_read: Callable[[int], object]):
        self.job, self.coder, self.on_read, config = job, coder, on_read, job.config
        self.sides = {name: Side() for name in SIDES}
        stem, how = f"{job.stem}_{job.split:05d}", (config.shard_tokens, coder.dtype, config.chat)
        self.writers = {n: ShardWriter(f"{config.out}/{n}", stem, *how) for n in SIDES}

    def add(self, document: Document) -> None:
        job, side = self.job, None
        is_val = in_validation(document.name, document.position, job.config.val_share)
        for ids, weight, size in self.coder.coded(document):
            self.on_read(0)  # it may stop this
            if job.cut is None:
                side = self.put("val" if is_val else "train", ids, weight, size)
                continue
            room, first = max(0, job.cut - self.sides["train"].tokens), size
            if room < len(ids):
                text = b"".join(token_bytes(self.coder.tokenizer, int(i)) for i in ids[:room])
                first = min(size, len(text))
            if room:
                side = self.put("train", ids[:room], weight, first)
            if room < len(ids):
                side = self.put("val", ids[room:], weight, size - first)
        if side:  # it is not empty
            side.documents += document.ends

    def put(self, name: str, ids: np.ndarray, weight: int | None, size: int) -> Side:
        side = self.sides[name]
        self.writers[name].add(ids, weight)
        side.tokens += len(ids)
        side.learned_tokens += len(ids) if weight is None else weight * len(ids)
        side.text_bytes += size
        return side

    @property
    def is_full(self) -> bool:
        return 0 < self.job.limit <= sum(side.tokens for side in self.sides.values())


def tokenize_split(job: Job, on_read: Callable[[int], object] = lambda read: None) -> Record:
    """on_read  is called with the bytes that were read. Raises OSError, and as data/readers.py."""
    config, coder = job.config, coder_of(job.config)
    writer, left_out = SplitWriter(job, coder, on_read), Counter()
    for part in itertools.takewhile(lambda _: not writer.is_full, job.parts):
        read = 0
        for document in readers.documents(part, config, coder.to_pieces, left_out=left_out):
            if writer.is_full:
                break
            writer.add(document)
            on_read(document.read - read)
            read = document.read
        on_read(part.size - read)
    for name, side in writer.sides.items():
        writer.writers[name].finish()
        side.shards = writer.writers[name].shards
    record = Record(job.split, job.settings, **writer.sides, left_out=dict(left_out))
    if job.record:
        text = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
        folder_at(config.out).write(job.record, text.encode())
    return record
