"""Where the text comes from: files, JSON lines, Parquet, Hugging Face datasets; in pieces.

A source is an endless-looking stream of pieces in an order that no machine changes. Each has a
place, from which the stream goes on in another process without reading what came before: only the
file, line or row group it lies in. Pieces are bounded, so that no document has to fit in memory
but those that are one line or row.
"""

import codecs
import hashlib
import json
import math
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data import chat

STDLIB = "python-stdlib"
HUGGING_FACE = "hf:"
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
NOT_CONTENT = ("out", "workers", "overwrite")  # settings that do not decide what is written
# tiktoken's patterns run out of stack on a run of white space of about a million characters.
PIECE_CHARACTERS = 400_000
READ_BYTES = 1 << 20
ROWS = 256  # of a Parquet file that are read at a time


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turn text into token shards for training and validation."""

    source: str  # python-stdlib, a file or folder of text, .jsonl or .parquet, or hf:NAME
    out: str  # folder to write train/ and val/ into
    tokenizer: str = "sample"  # sample, a name of tiktoken's, or path of a tokenizer.json
    val_share: float = 0.05  # share of documents for validation, evenly spaced in their order
    shard_tokens: int = 100_000_000  # tokens in each shard but the last
    max_tokens: int = 0  # stop after the document that reaches this many; 0 takes all
    workers: int = 0  # processes that tokenize; 0 is one per core
    glob: str = "**/*"  # files of a folder to read; hidden ones are never read
    text_field: str = "text"  # field of a JSON line, Parquet or Hugging Face row with the text
    chat: bool = False  # lines or rows are conversations, of which only the answers are learned
    hf_name: str = ""  # configuration of the Hugging Face dataset; empty takes its default
    hf_split: str = "train"  # split of the Hugging Face dataset to read
    overwrite: bool = False  # begin anew, even where OUT is finished or can be gone on with


class Place(NamedTuple):
    """Of a piece in the source."""

    file: int = 0  # number of the file, in their order
    row: int = 0  # number of the line or row in it
    offset: int = 0  # of that line, in bytes
    piece: int = 0  # number in its document


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    name: str  # of the document: relative path; with :LINE for a line of a file
    place: Place
    text: str
    weight: int | None  # of the loss on its tokens; None where all are 1
    ends: bool  # the document
    source_bytes: int  # read for it; 0 where that is not known


class Row(NamedTuple):
    """A document that is read at once."""

    name: str
    place: Place
    parts: list[chat.Piece]  # text, and its loss weight
    source_bytes: int


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
        others = [path for path in source_files(config)[1] if path.suffix not in ROW_FILES]
        if others:
            raise ValueError(
                f"--chat reads conversations, a line of JSON or a row each, and --source "
                f"{config.source} has {others[0]}. Use --source chat.jsonl, or --glob "
                "'**/*.jsonl' for a folder; without --chat it is plain text."
            )


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


# --- files ----------------------------------------------------------------------------------------


def source_bytes(config: Prepare) -> int | None:
    """Of all that is to be read; None where nobody knows."""
    if config.source.startswith(HUGGING_FACE):
        return None
    return sum(path.stat().st_size for path in source_files(config)[1])


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


# --- pieces ---------------------------------------------------------------------------------------


def pieces(config: Prepare, after: Place | None = None) -> Iterator[Piece]:
    """All pieces of the source, or those behind a place; empty documents are left out."""
    begin = after or Place()
    if config.source.startswith(HUGGING_FACE):
        found = of_rows(hugging_face(config, begin))
    else:
        found = of_files(config, begin)
    return (piece for piece in found if after is None or piece.place > after)


def of_files(config: Prepare, begin: Place) -> Iterator[Piece]:
    root, files = source_files(config)
    for number, path in enumerate(files[begin.file :], start=begin.file):
        name = path.relative_to(root).as_posix()
        start = begin if number == begin.file else Place(file=number)
        if rows := ROW_FILES.get(path.suffix):
            yield from of_rows(rows(name, path, start, config))
        else:
            with path.open("rb") as content:
                yield from of_text(name, path, number, content)


def of_rows(rows: Iterable[Row]) -> Iterator[Piece]:
    for row in rows:
        size = row.source_bytes
        for number, (text, weight, ends) in enumerate(cut(row.parts)):
            place = row.place._replace(piece=number)
            yield Piece(row.name, place, text, weight, ends, size if number == 0 else 0)


def of_text(name: str, path: Path, file: int, content: BinaryIO) -> Iterator[Piece]:
    """A file that is one document: of any length, as it is read piece by piece."""
    done = 0
    for number, (text, weight, ends) in enumerate(cut((t, None) for t in decoded(content, path))):
        read, done = content.tell() - done, content.tell()
        yield Piece(name, Place(file, piece=number), text, weight, ends, read)


def cut(parts: Iterable[tuple[str, int | None]]) -> Iterator[tuple[str, int | None, bool]]:
    """(text, loss weight, whether it is the last) of PIECE_CHARACTERS at most, and so many where
    more of the same weight follows.
    """
    last: tuple[str, int | None] | None = None
    rest, weight = "", None

    def whole() -> Iterator[tuple[str, int | None]]:
        nonlocal rest, weight
        for text, of_text in parts:
            if rest and of_text != weight:
                yield rest, weight
                rest = ""
            rest, weight = rest + text, of_text
            while len(rest) > PIECE_CHARACTERS:
                yield rest[:PIECE_CHARACTERS], weight
                rest = rest[PIECE_CHARACTERS:]
        if rest:
            yield rest, weight

    for piece in whole():
        if last:
            yield *last, False
        last = piece
    if last:
        yield *last, True


def decoded(content: BinaryIO, path: Path) -> Iterator[str]:
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = content.read(READ_BYTES)
        kept = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text (byte {done - kept + error.start}), and the tokens must "
                "stand for real text. Convert it, or leave it out with --glob '**/*.txt'."
            ) from error
        if text:
            yield text
        if not data:
            return
        done += len(data)


# --- rows -----------------------------------------------------------------------------------------


def json_lines(name: str, path: Path, begin: Place, config: Prepare) -> Iterator[Row]:
    """A document per line that is not blank."""
    with path.open("rb") as content:
        content.seek(begin.offset)
        offset = begin.offset
        for number, line in enumerate(content, start=begin.row):
            place, here = Place(begin.file, number, offset), f"{path}:{number + 1}"
            offset += len(line)
            if line.strip():
                parts = text_parts(json_row(line, here), here, config)
                yield Row(f"{name}:{number + 1}", place, parts, len(line))


def json_row(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{place} is not a line of JSON ({error}): expected one object per line. Mend the line."
        ) from error


def text_parts(row: Any, place: str, config: Prepare) -> list[tuple[str, int | None]]:
    """Of a JSON line, Parquet or Hugging Face row."""
    if not config.chat:
        return [(row_text(row, place, config.text_field), None)]
    return chat.pieces(chat.conversation(row, place))


def row_text(row: Any, place: str, text_field: str) -> str:
    texts = {k: v for k, v in row.items() if isinstance(v, str)} if isinstance(row, dict) else {}
    if text_field not in texts:
        raise ValueError(
            f"{place} has no text in the field {text_field!r}; fields with text: "
            f"{', '.join(texts) or 'none'}. Name one with --text-field."
        )
    return texts[text_field]


def parquet(name: str, path: Path, begin: Place, config: Prepare) -> Iterator[Row]:
    """A document per row; of a row group only the text is read, a few rows at a time."""
    import pyarrow.parquet  # late: other sources need not wait for it

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = None if config.chat else [text_column(path, file.schema_arrow, config)]
        total, size, first = file.metadata.num_rows, path.stat().st_size, 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            number, first = first, first + rows
            if first <= begin.row:
                continue
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    own = size * (number + 1) // total - size * number // total
                    parts = text_parts(row, f"{path}:{number}", config)
                    yield Row(f"{name}:{number}", Place(begin.file, number), parts, own)
                    number += 1


def text_column(path: Path, schema: Any, config: Prepare) -> str:
    """Raises ValueError where there is no such column of text."""
    import pyarrow

    kinds = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    texts = [field.name for field in schema if any(kind(field.type) for kind in kinds)]
    if config.text_field not in texts:
        raise ValueError(
            f"{path} has no column of text called {config.text_field!r}; columns of text: "
            f"{', '.join(texts) or 'none'}. Name one with --text-field."
        )
    return config.text_field


def hugging_face(config: Prepare, begin: Place) -> Iterator[Row]:
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
    for number, row in enumerate(rows.skip(begin.row), start=begin.row):
        here = f"{config.source} row {number}"
        parts = text_parts(row, here, config)
        yield Row(f"{config.hf_split}:{number}", Place(row=number), parts, 0)


ROW_FILES = {".jsonl": json_lines, ".parquet": parquet}


# --- whole documents ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def documents(config: Prepare) -> Iterator[Document]:
    """For who wants them whole."""
    texts: list[str] = []
    for piece in pieces(config):
        texts.append(piece.text)
        if piece.ends:
            yield Document(piece.name, "".join(texts))
            texts = []
