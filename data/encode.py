"""Tokenize one split of a source into shards of its own, and a record of them.

What comes out depends on the split and the settings alone, so it does not matter which process or
machine does it, in which order, or how often. The record is written last.
"""

import contextlib
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from data import chat, readers
from data.out import folder_at
from data.readers import Document, Part, Piece
from data.settings import Prepare, in_validation
from data.shards import ShardWriter
from data.tokenizer import begin_of_text, load_tokenizer, special_id, token_bytes
from manifest import Shard, shard_of

# tiktoken's patterns run out of stack on a run of white space of about a million characters.
PIECE_CHARACTERS = 400_000


@dataclass
class Side:
    """What is for training, or for validation."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0  # of the text with weight 1
    learned_tokens: int = 0  # with weight 1
    shards: list[Shard] = field(default_factory=list)

    def __add__(self, other: "Side") -> "Side":
        names = [item.name for item in dataclasses.fields(Side)]
        return Side(*(getattr(self, name) + getattr(other, name) for name in names))


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
    for side in ("train", "val"):
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
    cut: int | None = (
        None  # tokens that are for training, and the rest for validation; None: by rule
    )


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
            ids, size = self.ids(piece), 0 if piece.weight == 0 else piece_bytes(piece)
            if not begun and self.begin not in (None, *ids[:1]):
                yield np.array([self.begin]), None if piece.weight is None else 0, 0
            weight, begun = piece.weight, True
            yield np.asarray(ids), weight, size
        if begun and document.ends:
            yield np.array([self.tokenizer.eot_token]), weight, 0

    def ids(self, piece: Piece) -> np.ndarray | list[int]:
        if piece.special:
            return [special_id(self.tokenizer, piece.text)]
        if isinstance(self.tokenizer, tiktoken.Encoding):
            # As encode_ordinary, without a Python object for each. Half a surrogate pair, which
            # that replaces, is an error here.
            with contextlib.suppress(UnicodeEncodeError):
                return self.tokenizer.encode_to_numpy(piece.text, disallowed_special=())
        return self.tokenizer.encode_ordinary(piece.text)

    def bytes_of(self, ids: Any) -> int:
        return sum(len(token_bytes(self.tokenizer, int(i))) for i in ids)


coder_of = functools.lru_cache(4)(Coder)  # a worker loads a tokenizer once


def piece_bytes(piece: Piece) -> int:
    return 0 if piece.special else len(piece.text.encode(errors="replace"))


def cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of PIECE_CHARACTERS at most, and of so many where more of the same weight follows."""
    rest = Piece("")
    for piece in pieces:
        if piece[1:] != rest[1:] or piece.special:
            if rest.text:
                yield rest
            rest = piece
        else:
            rest = rest._replace(text=rest.text + piece.text)
        while len(rest.text) > PIECE_CHARACTERS:
            yield rest._replace(text=rest.text[:PIECE_CHARACTERS])
            rest = rest._replace(text=rest.text[PIECE_CHARACTERS:])
    if rest.text:
        yield rest


class SplitWriter(contextlib.ExitStack):
    """The shards of a split, and what is counted of them."""

    def __init__(self, job: Job, coder: Coder):
        super().__init__()
        self.job, self.coder = job, coder
        self.sides = {"train": Side(), "val": Side()}
        self.writers: dict[str, ShardWriter] = {}

    def add(self, document: Document) -> None:
        job, side = self.job, None
        is_val = in_validation(document.name, document.position, job.config.val_share)
        for ids, weight, size in self.coder.coded(document):
            if job.cut is None:
                side = self.put("val" if is_val else "train", ids, weight, size)
                continue
            room = max(0, job.cut - self.sides["train"].tokens)
            first = size if room >= len(ids) else min(size, self.coder.bytes_of(ids[:room]))
            if len(ids[:room]):
                side = self.put("train", ids[:room], weight, first)
            if len(ids[room:]):
                side = self.put("val", ids[room:], weight, size - first)
        if side:  # it is not empty
            side.documents += document.ends

    def put(self, name: str, ids: np.ndarray, weight: int | None, size: int) -> Side:
        side, job, config = self.sides[name], self.job, self.job.config
        if name not in self.writers:
            stem = f"{job.stem}_{job.split:05d}"
            how = config.shard_tokens, self.coder.dtype, config.chat
            writer = ShardWriter(f"{config.out}/{name}", stem, *how)
            self.writers[name] = self.enter_context(writer)
        self.writers[name].add(ids, weight)
        side.tokens += len(ids)
        side.learned_tokens += len(ids) if weight is None else weight * len(ids)
        side.text_bytes += size
        return side

    @property
    def is_full(self) -> bool:
        return 0 < self.job.limit <= sum(side.tokens for side in self.sides.values())


def tokenize_split(job: Job, told: Callable[[int], None] = lambda read: None) -> Record:
    """told  is called with the bytes that were read, again and again.

    Raises  what data/readers.py does; OSError of a full disk.
    """
    config, coder = job.config, coder_of(job.config)
    left_out: Counter[str] = Counter()
    with SplitWriter(job, coder) as writer:
        for part in job.parts:
            read = 0
            for document in readers.documents(part, config, coder.to_pieces, left_out=left_out):
                writer.add(document)
                told(document.read - read)
                read = document.read
                if document.ends and writer.is_full:
                    break
            told(part.size - read)
            if writer.is_full:
                break
    for name, shards in writer.writers.items():
        writer.sides[name].shards = shards.shards
    record = Record(job.split, job.settings, **writer.sides, left_out=dict(left_out))
    if job.record:
        text = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
        folder_at(config.out).write(job.record, text.encode())
    return record
