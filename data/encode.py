"""Tokenize one split of a source into its own shards, and a record of them, which is written last.

The result depends on the split and the settings alone. It does not matter which process or machine
tokenizes a split, in which order, or how often.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from data import chat, readers
from data.manifest import Shard, shard_of
from data.readers import Chunk, Document, FilePart
from data.settings import Prepare, in_validation
from data.shards import ShardWriter
from data.tokenizer import begin_of_text, encode_continuation, load_tokenizer, token_bytes
from runtime import storage

# tiktoken's patterns overflow the stack on a run of about a million spaces.
CHUNK_CHARACTERS = 400_000
SUBSETS = ("train", "val")


@dataclass
class Subset:
    """Shards for training or for validation, and their totals."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0  # of the text with weight 1
    learned_tokens: int = 0  # with weight 1
    shards: list[Shard] = field(default_factory=list)

    def __add__(self, other: "Subset") -> "Subset":
        return Subset(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Record:
    """The result of a split."""

    split: int
    made_with: dict[str, Any]  # the settings that determine the result
    train: Subset
    val: Subset
    left_out: dict[str, int]  # unusable input by category, with --skip-bad

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.val.tokens


def record_of(content: bytes) -> Record:
    """Raises ValueError, TypeError or KeyError for malformed content."""
    fields = json.loads(content)
    for name in SUBSETS:
        shards = [shard_of(shard) for shard in fields[name].pop("shards")]
        fields[name] = Subset(**fields[name], shards=shards)
    return Record(**fields)


class Job(NamedTuple):
    """A split to tokenize."""

    config: Prepare
    split: int
    parts: tuple[FilePart, ...]
    settings: dict[str, Any]  # those that determine the result
    limit: int  # stop after the document that reaches this many tokens; 0: no limit
    record: str  # name of the record below OUT; empty: write none
    stem: str = "shard"  # of the names of shards
    train_tokens: int | None = None  # later tokens are for validation; None: by VALIDATION_RULE


class Encoder:
    """Converts documents to tokens and loss weights."""

    def __init__(self, config: Prepare):
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.bos = begin_of_text(self.tokenizer, config.add_bos)
        self.dtype = np.dtype(np.uint16 if self.tokenizer.n_vocab <= 2**16 else np.uint32)
        self.template, self.to_chunks, self.row_tokens = None, None, config.row_tokens
        if config.chat:
            self.template = chat.template_of(config.chat_template, self.tokenizer)
            self.to_chunks = functools.partial(chat.to_chunks, template=self.template)
        # Ids of documents are below it. Only chat templates of tokenizers write special tokens.
        self.vocab_size = self.tokenizer.n_vocab
        if not (config.chat and config.chat_template == "tokenizer"):
            text_vocab = getattr(self.tokenizer, "text_vocab", self.vocab_size)
            self.vocab_size = max(text_vocab, 1 + self.tokenizer.eot_token, 1 + (self.bos or 0))

    def encode(self, document: Document) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yield (ids, loss weight, bytes of text with weight 1) of BOS, chunks and end of text, and
        of padding by ends of text.

        Each chunk is tokenized on its own, so no token spans a prompt and an answer. Special tokens
        in the text are plain text, so no document can end another one.
        """
        length, weight, previous = 1, 1, None if document.begins else Chunk("")
        for chunk in resize(document.chunks):
            ids = self.ids(chunk, previous)
            text = "" if chunk.special or chunk.weight == 0 else chunk.text
            if previous is None and self.bos not in (None, *ids[:1]):
                yield np.array([self.bos]), 0, 0
                length += 1
            weight, previous, length = chunk.weight, chunk, length + len(ids)
            yield np.asarray(ids), weight, len(text.encode(errors="replace"))
        if previous is not None and document.ends:
            yield np.array([self.tokenizer.eot_token]), weight, 0
            if self.row_tokens:
                yield np.full(-length % self.row_tokens, self.tokenizer.eot_token), 0, 0

    def ids(self, chunk: Chunk, previous: Chunk | None) -> np.ndarray | list[int]:
        if chunk.special:
            return [self.tokenizer.special.ids[chunk.text]]
        if isinstance(self.tokenizer, tiktoken.Encoding):
            # Equals encode_ordinary, without one Python object per token. Half a surrogate pair is
            # an error here; encode_ordinary replaces it.
            with contextlib.suppress(UnicodeEncodeError):
                return self.tokenizer.encode_to_numpy(chunk.text, disallowed_special=())
        if previous is None:
            return self.tokenizer.encode_ordinary(chunk.text)
        return encode_continuation(self.tokenizer, chunk.text, after_special=previous.special)


encoder_of = functools.lru_cache(4)(Encoder)  # a worker loads a tokenizer once


def resize(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join neighbours of equal weight, and split the result every CHUNK_CHARACTERS."""
    for (weight, special), group in itertools.groupby(chunks, lambda chunk: chunk[1:]):
        if special:
            yield from group
            continue
        rest = ""
        for chunk in group:
            rest += chunk.text
            while len(rest) > CHUNK_CHARACTERS:
                yield Chunk(rest[:CHUNK_CHARACTERS], weight)
                rest = rest[CHUNK_CHARACTERS:]
        if rest:
            yield Chunk(rest, weight)


class SplitWriter:
    """Writes the shards of a split and counts their content."""

    def __init__(self, job: Job, encoder: Encoder):
        self.job, self.encoder, config = job, encoder, job.config
        stem, options = f"{job.stem}_{job.split:05d}", (encoder.dtype, config.chat)
        self.writers = {
            name: ShardWriter(f"{config.out}/{name}", stem, config.shard_tokens, *options)
            for name in SUBSETS
        }
        self.subsets = {name: Subset(shards=self.writers[name].shards) for name in SUBSETS}

    def add(self, document: Document) -> None:
        is_val = in_validation(document.name, document.position, self.job.config.val_share)
        subset = Subset()
        for ids, weight, size in self.encoder.encode(document):
            count = 0 if is_val else len(ids)  # for training
            if self.job.train_tokens is not None:
                count = max(0, self.job.train_tokens - self.subsets["train"].tokens)
            train_size = size
            if count < len(ids):
                text = b"".join(token_bytes(self.encoder.tokenizer, int(i)) for i in ids[:count])
                train_size = min(size, len(text))
            parts = (ids[:count], train_size), (ids[count:], size - train_size)
            for name, (part, part_size) in zip(SUBSETS, parts, strict=True):
                if len(part):
                    subset = self.subsets[name]
                    self.writers[name].add(part, weight)
                    subset.tokens += len(part)
                    subset.learned_tokens += weight * len(part)
                    subset.text_bytes += part_size
        subset.documents += document.ends  # where the document ends, unless it is empty

    @property
    def is_full(self) -> bool:
        return 0 < self.job.limit <= sum(subset.tokens for subset in self.subsets.values())


def tokenize_split(job: Job) -> Record:
    """Write the shards and the record of a split. Raises OSError and as readers.documents."""
    config, encoder = job.config, encoder_of(job.config)
    writer, left_out = SplitWriter(job, encoder), Counter()
    for part in itertools.takewhile(lambda _: not writer.is_full, job.parts):
        for document in readers.documents(part, config, encoder.to_chunks, left_out=left_out):
            if writer.is_full:
                break
            writer.add(document)
    for shards in writer.writers.values():
        shards.flush()
    record = Record(job.split, job.settings, **writer.subsets, left_out=dict(left_out))
    if job.record:
        text = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
        storage.at(config.out).write(job.record, text.encode())
    return record
