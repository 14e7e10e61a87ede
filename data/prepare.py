"""Text to token shards: python data/prepare.py --source python-stdlib --out data/sample

Writes OUT/train and OUT/val, each with shard_00000.npy, shard_00001.npy, ... and an index.json,
which is written last: a folder without one is not finished. What comes out depends on the source
and the settings, not on the number of worker processes. dataset.py reads it.

    python data/prepare.py --source chat.jsonl --chat --out data/chat

Conversations (data/chat.py) get loss weights beside their tokens, shard_00000.weights.npy: 1 for
answers and 0 for the rest, so that training and validation count answers only.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import chat
from data.tokenizer import Tokenizer, load_tokenizer, table_sha256
from dataset import DOCUMENT_RULE, INDEX, Manifest, Shard, file_crc32c, prefetch, read_manifest

STDLIB = "python-stdlib"
HUGGING_FACE = "hf:"
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BATCH_CHARACTERS = 1_000_000  # sent to a worker at a time: large against the cost of sending
# tiktoken's patterns run out of stack on a run of white space of about a million characters.
PIECE_CHARACTERS = 400_000
LINE_EVERY_S = 10.0
NOT_CONTENT = ("out", "workers", "overwrite")  # settings that do not decide what is written


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turn text into token shards for training and validation."""

    source: str  # python-stdlib, a file or folder of text or .jsonl, or hf:NAME
    out: str  # folder to write train/ and val/ into
    tokenizer: str = "sample"  # sample, a name of tiktoken's, or path of a tokenizer.json
    val_share: float = 0.05  # share of documents for validation, evenly spaced in their order
    shard_tokens: int = 100_000_000  # tokens in each shard but the last
    max_tokens: int = 0  # stop after the document that reaches this many; 0 takes all
    workers: int = 0  # processes that tokenize; 0 is one per core
    glob: str = "**/*"  # files of a folder to read; hidden ones are never read
    text_field: str = "text"  # field of a JSON line or Hugging Face row that holds the text
    chat: bool = False  # lines or rows are conversations, of which only the answers are learned
    hf_name: str = ""  # configuration of the Hugging Face dataset; empty takes its default
    hf_split: str = "train"  # split of the Hugging Face dataset to read
    overwrite: bool = False  # replace what OUT holds, even if it is finished


@dataclass(frozen=True)
class Document:
    name: str  # relative path; with :LINE for a line of a file
    text: str
    source_bytes: int  # read for it; 0 where that is not known
    pieces: tuple[chat.Piece, ...] = ()  # of a conversation: its text, cut where weights change


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(Prepare, args=arguments)
    check(config)
    tokenizer = load_tokenizer(config.tokenizer)
    settings = describe(config)
    if already_prepared(config, settings, tokenizer):
        print(
            f"{config.out} is already prepared with these settings; --overwrite prepares it again"
        )
        return
    began = time.perf_counter()
    writers = tokenize(config, tokenizer)
    for writer in writers.values():
        writer.flush()
    check_not_empty(config, writers)
    for split, writer in writers.items():
        writer.finish(manifest(config, tokenizer, settings, writer))
        answers = f" ({writer.learned_tokens:,} of answers)" if config.chat else ""
        print(
            f"{Path(config.out) / split}: {writer.documents:,} documents, {writer.tokens:,} "
            f"tokens{answers}, {writer.text_bytes / writer.learned_tokens:.2f} bytes per token, "
            f"{len(writer.manifest_shards)} shards"
        )
    seconds = time.perf_counter() - began
    print(f"prepared in {seconds:.1f} s with the tokenizer {config.tokenizer}")


def check(config: Prepare) -> None:
    """Raises ValueError for a setting out of range."""
    if not 0 <= config.val_share <= 1:
        raise ValueError(
            f"--val-share {config.val_share} is not a share: expected 0 to 1. Use --val-share 0.05."
        )
    for name, least in (("shard_tokens", 1), ("max_tokens", 0), ("workers", 0)):
        value = getattr(config, name)
        if value < least:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} {value} is too small: expected at least {least}. Leave it out."
            )
    if config.chat and not config.source.startswith(HUGGING_FACE):
        others = [path for path in source_files(config)[1] if path.suffix != ".jsonl"]
        if others:
            raise ValueError(
                f"--chat reads conversations, a line of JSON each, and --source {config.source} "
                f"has {others[0]}. Use --source chat.jsonl, or --glob '**/*.jsonl' for a folder; "
                "without --chat it is plain text."
            )


# Sources


def documents(config: Prepare) -> Iterator[Document]:
    """All documents of the source, in an order that no machine changes; empty ones are left out."""
    if config.source.startswith(HUGGING_FACE):
        found = hugging_face(config)
    else:
        root, files = source_files(config)
        found = (d for file in files for d in read_file(root, file, config))
    return (document for document in found if document.text)


def source_files(config: Prepare) -> tuple[Path, list[Path]]:
    """The folder and its files, sorted by relative path."""
    if config.source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if is_source(path.relative_to(root))]
    else:
        root = Path(config.source)
        found = [root] if root.is_file() else root.glob(config.glob)
        root = root.parent if root.is_file() else root
        # Without hidden ones.
        files = [p for p in found if p.is_file() and "/." not in f"/{p.relative_to(root)}"]
    if not files:
        raise ValueError(
            f"--source {config.source} holds no file (--glob {config.glob}): expected {STDLIB}, a "
            f"folder, a file, or {HUGGING_FACE}NAME. Use --source {STDLIB}, which every machine "
            "has."
        )
    return root, sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_source(path: Path) -> bool:
    """False for tests, installed packages, and what each build of Python generates for itself."""
    return not NOT_SOURCE.intersection(path.parts) and not path.name.startswith("_sysconfigdata")


def read_file(root: Path, path: Path, config: Prepare) -> Iterator[Document]:
    """A file of JSON lines is a document per line; any other file is one."""
    name = path.relative_to(root).as_posix()
    with path.open("rb") as content:
        if path.suffix != ".jsonl":
            data = content.read()
            yield Document(name, decode(data, path), len(data))
            return
        for number, line in enumerate(content, start=1):
            if line.strip():
                place = f"{path}:{number}"
                row = json_row(line, place)
                yield document(f"{name}:{number}", row, place, len(line), config)


def decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}), and the tokens must stand for real "
            "text. Convert it, or leave it out with --glob '**/*.txt'."
        ) from error


def json_row(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{place} is not a line of JSON ({error}): expected one object per line. Mend the line."
        ) from error


def document(name: str, row: Any, place: str, source_bytes: int, config: Prepare) -> Document:
    """Of a JSON line or Hugging Face row."""
    if not config.chat:
        return Document(name, row_text(row, place, config.text_field), source_bytes)
    messages = chat.conversation(row, place)
    return Document(name, chat.text(messages), source_bytes, tuple(chat.pieces(messages)))


def row_text(row: Any, place: str, text_field: str) -> str:
    texts = {k: v for k, v in row.items() if isinstance(v, str)} if isinstance(row, dict) else {}
    if text_field not in texts:
        raise ValueError(
            f"{place} has no text in the field {text_field!r}; fields with text: "
            f"{', '.join(texts) or 'none'}. Name one with --text-field."
        )
    return texts[text_field]


def hugging_face(config: Prepare) -> Iterator[Document]:
    """The rows of a Hugging Face dataset, streamed; a row's name is its split and number."""
    import datasets  # takes seconds to import, and no other source needs it

    name = config.source.removeprefix(HUGGING_FACE)
    try:
        rows = datasets.load_dataset(
            name, config.hf_name or None, split=config.hf_split, streaming=True
        )
    # Unreachable or no such dataset; no such configuration or split.
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--source {config.source} cannot be opened ({reason}). Check the name, --hf-name, "
            f"--hf-split and the network."
        ) from error
    for number, row in enumerate(rows):
        place = f"{config.source} row {number}"
        yield document(f"{config.hf_split}:{number}", row, place, 0, config)


def in_validation(number: int, share: float = Prepare.val_share) -> bool:
    """Whether document `number` (from 0) is one of a share spread evenly over their order.

    With documents in order of path, every folder gives its share to both sides.
    """
    exact = Fraction(str(share))
    return math.floor((number + 1) * exact) > math.floor(number * exact)


VALIDATION_RULE = (
    "document number n, from 0 and in order (files by path), is for validation if "
    "floor((n + 1) * val_share) > floor(n * val_share): the 20th, 40th, ... for 0.05"
)


def describe(config: Prepare) -> dict[str, Any]:
    """What decides the documents and their order: settings; files' names, sizes and times."""
    settings = {name: value for name, value in vars(config).items() if name not in NOT_CONTENT}
    settings["validation_rule"] = VALIDATION_RULE
    if settings.pop("chat"):  # folders of text have neither
        settings["template"] = [chat.TEMPLATE, *map(list, chat.example())]
    if config.source == STDLIB:
        settings["python"] = sys.version.split()[0]
    if not config.source.startswith(HUGGING_FACE):
        root, files = source_files(config)
        stats = [(path.relative_to(root).as_posix(), path.stat()) for path in files]
        listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        settings["files"] = len(files)
        settings["files_sha256"] = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return settings


def folders(config: Prepare) -> list[Path]:
    """What is written: OUT/train and OUT/val, or one of them where the other has no share."""
    used = {"train": config.val_share < 1, "val": config.val_share > 0}
    return [Path(config.out) / split for split in used if used[split]]


# Tokens


def tokenize(config: Prepare, tokenizer: Tokenizer) -> dict[str, "ShardWriter"]:
    """Every document, ended by end-of-text, written to the shards of its split."""
    dtype = np.dtype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)
    writers = {}
    for folder in folders(config):
        clear(folder)
        writers[folder.name] = ShardWriter(folder, config.shard_tokens, dtype)
    report = Report(config)
    with contextlib.closing(encoded(config)) as stream, report.progress:
        for number, found in enumerate(stream):
            split = "val" if in_validation(number, config.val_share) else "train"
            writers[split].add(found.ids.astype(dtype), found.text_bytes, found.weights)
            report.add(len(found.ids), found.source_bytes)
            if config.max_tokens and report.tokens >= config.max_tokens:
                break
    return writers


class Encoded(NamedTuple):
    """A document as it is written."""

    ids: np.ndarray
    weights: np.ndarray | None  # uint8; None where all are 1
    text_bytes: int  # of the text with weight 1
    source_bytes: int


def encoded(config: Prepare) -> Iterator[Encoded]:
    """Every document, in order; enough are under way to keep all workers busy, no more."""
    found, encode_batch = batches(documents(config)), functools.partial(encode, config.tokenizer)
    workers = config.workers or os.cpu_count() or 1
    if workers == 1:
        results = map(encode_batch, found)
    else:
        # Fresh processes rather than forks: a fork copies locks of threads that it does not copy.
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        results = prefetch(encode_batch, found, 2 * workers, pool)
    for batch in results:
        yield from batch


def batches(found: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents grouped to about BATCH_CHARACTERS."""
    batch, characters = [], 0
    for document in found:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(tokenizer: str, batch: list[Document]) -> list[Encoded]:
    """Runs in a worker, which loads the tokenizer once."""
    table = cached_tokenizer(tokenizer)
    coded = []
    for d in batch:
        if d.pieces:
            coded.append(Encoded(*encode_pieces(table, d.pieces), d.source_bytes))
        else:
            ids, text_bytes = encode_document(table, d.text)
            coded.append(Encoded(ids, None, text_bytes, d.source_bytes))
    return coded


cached_tokenizer = functools.cache(load_tokenizer)


def encode_document(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, int]:
    """(ids of the text and then end-of-text, bytes of the text)."""
    ids = np.append(encode_text(tokenizer, text), np.uint32(tokenizer.eot_token))
    return ids, byte_count(text)


def encode_pieces(
    tokenizer: Tokenizer, pieces: tuple[chat.Piece, ...]
) -> tuple[np.ndarray, np.ndarray, int]:
    """(ids of the pieces and then end-of-text, their loss weights, bytes of what has weight 1).

    Each piece is tokenized by itself, so that no token has a part of a prompt and of an answer.
    End-of-text ends the last piece, and has its weight.
    """
    ids = [encode_text(tokenizer, text) for text, _ in pieces]
    ids[-1] = np.append(ids[-1], np.uint32(tokenizer.eot_token))
    weights = np.repeat([np.uint8(weight) for _, weight in pieces], [len(part) for part in ids])
    text_bytes = sum(byte_count(text) for text, weight in pieces if weight)
    return np.concatenate(ids), weights, text_bytes


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """What looks like a special token in the text is text: no document can end another one."""
    starts = range(0, len(text), PIECE_CHARACTERS)
    pieces = [tokenizer.encode_ordinary(text[start : start + PIECE_CHARACTERS]) for start in starts]
    return np.fromiter((i for piece in pieces for i in piece), dtype=np.uint32)


def byte_count(text: str) -> int:
    return len(text.encode(errors="replace"))


# Shards


@dataclass
class ShardWriter:
    """Cuts a stream of tokens, and of their loss weights, into shards of `shard_tokens`."""

    folder: Path
    shard_tokens: int
    dtype: np.dtype
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    learned_tokens: int = 0  # with weight 1
    buffered: int = 0
    buffer: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)  # of what is buffered; or none
    manifest_shards: list[Shard] = field(default_factory=list)

    def add(self, ids: np.ndarray, text_bytes: int, weights: np.ndarray | None = None) -> None:
        """Append one document; all of a folder have weights, or none has."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.tokens += len(ids)
        self.learned_tokens += len(ids) if weights is None else int(weights.sum())
        while len(ids):
            room = self.shard_tokens - self.buffered
            self.buffer.append(ids[:room])
            self.buffered += len(ids[:room])
            ids = ids[room:]
            if weights is not None:
                self.weights.append(weights[:room])
                weights = weights[room:]
            if self.buffered == self.shard_tokens:
                self.flush()

    def flush(self) -> None:
        """Write what is buffered as one shard."""
        if not self.buffered:
            return
        name = f"shard_{len(self.manifest_shards):05d}"
        weights = self.write(f"{name}.weights.npy", self.weights) if self.weights else None
        shard = self.write(f"{name}.npy", self.buffer)
        self.manifest_shards.append(dataclasses.replace(shard, weights=weights))
        self.buffer, self.weights, self.buffered = [], [], 0

    def write(self, name: str, parts: list[np.ndarray]) -> Shard:
        """One file, under its own name only when it is whole."""
        path = self.folder / name
        partial = path.with_suffix(".npy.partial")
        with partial.open("wb") as file:
            np.save(file, np.concatenate(parts))
        crc32c = file_crc32c(partial)
        shard = Shard(path.name, self.buffered, partial.stat().st_size, crc32c)
        os.replace(partial, path)
        return shard

    def finish(self, manifest: Manifest) -> None:
        """Write index.json, which says that the folder is whole."""
        partial = self.folder / f"{INDEX}.partial"
        fields = dataclasses.asdict(manifest, dict_factory=without_none)
        partial.write_text(json.dumps(fields, indent=1) + "\n")
        os.replace(partial, self.folder / INDEX)


def without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """So that the index of a folder without loss weights is as it was before there were any."""
    return {name: value for name, value in items if value is not None}


def clear(folder: Path) -> None:
    """Make the folder, and remove what an earlier preparation wrote there, index.json first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    for pattern in ("shard_*.npy", "shard_*.npy.partial", f"{INDEX}.partial"):
        for path in folder.glob(pattern):
            path.unlink()


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
    ends = {"tokenizer_sha256": table_sha256(tokenizer), "end_of_text": tokenizer.eot_token}
    asked = settings | ends
    finished = [folder for folder in folders(config) if (folder / INDEX).is_file()]
    whole = finished == folders(config)
    for folder in finished:
        found = read_manifest(folder)
        made = found.settings | {name: getattr(found, name) for name in ends}
        differ = sorted(k for k in made.keys() | asked.keys() if made.get(k) != asked.get(k))
        if differ:
            raise ValueError(
                f"{folder / INDEX} was made with another {', '.join(differ)}, and a run may depend "
                "on it. Use another --out, or --overwrite to replace it."
            )
        # By size; the checksums are for whoever reads them.
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.npy")}
        files = [file for s in found.shards for file in (s, s.weights) if file]
        whole = whole and all(sizes.get(file.name) == file.bytes for file in files)
    return whole


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

    def __init__(self, config: Prepare):
        self.documents = self.tokens = self.source_bytes = 0
        self.max_tokens = config.max_tokens
        self.total = config.max_tokens or None  # of tokens; or of bytes, where that is known
        if not self.total and not config.source.startswith(HUGGING_FACE):
            self.total = sum(path.stat().st_size for path in source_files(config)[1])
        self.next_line_s = time.monotonic() + LINE_EVERY_S
        columns = TextColumn("{task.description}"), BarColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, *times, disable=not Console().is_terminal)
        self.task = self.progress.add_task("starting", total=self.total)

    def add(self, tokens: int, source_bytes: int) -> None:
        self.documents += 1
        self.tokens += tokens
        self.source_bytes += source_bytes
        done = self.tokens if self.max_tokens else self.source_bytes
        text = f"{self.documents:,} documents, {self.tokens / 1e6:,.1f} M tokens"
        self.progress.update(self.task, completed=done, description=text)
        if self.progress.disable and time.monotonic() > self.next_line_s:
            share = f", {min(done / self.total, 1):.0%}" if self.total else ""
            print(text + share, flush=True)
            self.next_line_s = time.monotonic() + LINE_EVERY_S


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
