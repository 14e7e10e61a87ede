"""Where the text comes from: files, JSON lines, Parquet, Hugging Face datasets; in pieces.

A source is a stream of pieces in the same order on every machine. Each has a place, behind which
another process can go on: of what came before it reads at most the row group that the place lies
in. Pieces are bounded, so that only a line or row has to fit in memory. Files may lie in a bucket,
of which what is asked for is read, and nothing is kept.
"""

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import buckets
from data import chat
from data.settings import NOT_CONTENT, VALIDATION_RULE, Prepare

STDLIB = "python-stdlib"
HUGGING_FACE = "hf:"
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# tiktoken's patterns run out of stack on a run of white space of about a million characters.
PIECE_CHARACTERS = 400_000
READ_BYTES = 1 << 20
READ_AHEAD_BYTES = 8 << 20  # of text in a bucket, as each request takes its time
ROWS = 256  # of a Parquet file that are read at a time
GROUP_PARTS = 16  # into which a row group is cut for the nodes of a cluster


class Bad(ValueError):
    """Something of a source that cannot be used; --skip-bad leaves it out."""

    def __init__(self, text: str, kind: str):
        super().__init__(text, kind)  # both, or it could not be sent to another process
        self.kind = kind  # what people call several of them

    def __str__(self) -> str:
        return self.args[0]


class SourceFile(NamedTuple):
    name: str  # relative path
    path: str  # as people call it
    size: int
    changed: int | str  # when, in ns; of an object in a bucket its CRC32C

    @property
    def kind(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self) -> BinaryIO:
        if not buckets.is_bucket(self.path):
            return open(self.path, "rb")
        return io.BufferedReader(buckets.Reader(self.path, self.size), READ_AHEAD_BYTES)


class Place(NamedTuple):
    """Of a piece in the source."""

    file: int = 0  # number of the file, in their order
    row: int = 0  # number of the line or row in it
    offset: int = 0  # of that line, or of the piece in a file of text, in bytes
    piece: int = 0  # number in its document


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    name: str  # of the document: relative path; with :LINE for a line of a file
    place: Place
    text: str
    weight: int | None  # of the loss on its tokens; None where all are 1
    ends: bool  # the document
    source_bytes: int  # read for it; 0 where that is not known
    left_out: str = ""  # kind of what stands here and cannot be used, with --skip-bad


class Row(NamedTuple):
    """A document that is read at once."""

    name: str
    place: Place
    parts: list[chat.Piece]  # text, and its loss weight
    source_bytes: int
    left_out: str = ""


def check(config: Prepare) -> None:
    """Raises ValueError where --chat does not fit the source."""
    if config.chat and not config.source.startswith(HUGGING_FACE):
        others = [file.path for file in source_files(config) if file.kind not in ROW_FILES]
        if others:
            raise ValueError(
                f"--chat reads conversations, a line of JSON or a row each, and --source "
                f"{config.source} has {others[0]}. Use --source chat.jsonl, or --glob "
                "'**/*.jsonl' for a folder; without --chat it is plain text."
            )


def describe(config: Prepare) -> dict[str, Any]:
    """What decides the documents and their order: settings; files' names, sizes and times, or
    checksums in a bucket.
    """
    names = Prepare.__dataclass_fields__.keys() - {*NOT_CONTENT}
    settings = {name: value for name, value in vars(config).items() if name in names}
    settings["validation_rule"] = VALIDATION_RULE
    if settings.pop("chat"):  # folders of text have neither
        settings["template"] = [chat.TEMPLATE, *map(list, chat.example())]
    if not config.skip_bad:  # as folders were made before there was this
        del settings["skip_bad"]
    if config.source == STDLIB:
        settings["python"] = sys.version.split()[0]
    if not config.source.startswith(HUGGING_FACE):
        files = source_files(config)
        listing = [(file.name, file.size, file.changed) for file in files]
        settings["files"] = len(files)
        settings["files_sha256"] = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return settings


# --- files ----------------------------------------------------------------------------------------


def source_bytes(config: Prepare) -> int | None:
    """Of all that is to be read; None where nobody knows."""
    if config.source.startswith(HUGGING_FACE):
        return None
    return sum(file.size for file in source_files(config))


def source_files(config: Prepare) -> list[SourceFile]:
    """Sorted by relative path."""
    files = list(in_bucket(config) if buckets.is_bucket(config.source) else on_disk(config))
    if not files:
        raise ValueError(
            f"--source {config.source} holds no file (--glob {config.glob}): expected {STDLIB}, a "
            f"folder, a file, either in a bucket, or {HUGGING_FACE}NAME. Use --source {STDLIB}, "
            "which every machine has."
        )
    return sorted(files, key=lambda file: file.name)


def on_disk(config: Prepare) -> Iterator[SourceFile]:
    if config.source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = library(root)
    else:
        root = Path(config.source)
        found = [root] if root.is_file() else root.glob(config.glob)
        root = root.parent if root.is_file() else root
    for path in found:
        name = path.relative_to(root).as_posix()
        if path.is_file() and not is_hidden(name):
            stat = path.stat()
            yield SourceFile(name, str(path), stat.st_size, stat.st_mtime_ns)


def in_bucket(config: Prepare) -> Iterator[SourceFile]:
    """The object that --source names, or those below it."""
    from fsspec.utils import glob_translate

    root, _, last = config.source.rstrip("/").rpartition("/")
    if root == buckets.SCHEME.rstrip("/"):  # a whole bucket
        root, last = config.source.rstrip("/"), ""
    found = buckets.Prefix(root).found(last)
    chosen = re.compile(glob_translate(config.glob))
    below = f"{last}/" if last else ""
    for name, (size, crc32c) in found.items():
        inside = name.removeprefix(below)
        if name == last:
            inside = PurePosixPath(name).name
        elif not name.startswith(below) or not chosen.match(inside) or is_hidden(inside):
            continue
        if not name.endswith("/"):  # as some programs mark folders
            yield SourceFile(inside, f"{root}/{name}", size, crc32c)


def is_hidden(name: str) -> bool:
    return "/." in f"/{name}"


def library(root: Path) -> Iterator[Path]:
    """Python files but tests, installed packages, and what each build of Python generates for
    itself.
    """
    for folder, below, names in os.walk(root):
        below[:] = set(below) - NOT_SOURCE
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


# --- pieces ---------------------------------------------------------------------------------------


def pieces(config: Prepare, after: Place | None = None) -> Iterator[Piece]:
    """All pieces of the source, or those behind a place; empty documents are left out."""
    begin = after or Place()
    if config.source.startswith(HUGGING_FACE):
        found = of_rows(hugging_face(config, begin))
    else:
        found = of_files(config, source_files(config)[begin.file :], begin)
    return (piece for piece in found if after is None or piece.place > after)


def of_files(
    config: Prepare, files: list[SourceFile], begin: Place, end: Place | None = None
) -> Iterator[Piece]:
    """From a place on, in the first of these files, and before another."""
    for number, file in enumerate(files, start=begin.file):
        start = begin if number == begin.file else Place(file=number)
        if rows := ROW_FILES.get(file.kind):
            of_file = of_rows(before(end, rows(file, start, config)))
        else:
            of_file = of_text(file, start, config, end)
        yield from (piece for piece in of_file if piece.place >= start)


def before(end: Place | None, rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if end is not None and row.place >= end:
            return
        yield row


def of_rows(rows: Iterable[Row]) -> Iterator[Piece]:
    for row in rows:
        size = row.source_bytes
        if row.left_out:
            yield Piece(row.name, row.place, "", None, False, size, row.left_out)
        for number, (text, weight, ends) in enumerate(cut(row.parts)):
            place = row.place._replace(piece=number)
            yield Piece(row.name, place, text, weight, ends, size if number == 0 else 0)


def of_text(
    file: SourceFile, begin: Place, config: Prepare, end: Place | None = None
) -> Iterator[Piece]:
    """A file that is one document: of any length, as it is read piece by piece."""
    if config.skip_bad and begin.offset == 0 and (why := not_utf8(file)):
        yield Piece(file.name, begin, "", None, False, file.size, why.kind)
        return
    # What ends within the file ends where a piece of the whole file does.
    inside = end is not None and end.file == begin.file
    place = begin
    with file.open() as content:
        texts = decoded(content, file.path, begin.offset, end.offset if inside else None)
        for text, weight, last in cut((text, None) for text in texts):
            size = len(text.encode())
            yield Piece(file.name, place, text, weight, last and not inside, size)
            place = place._replace(offset=place.offset + size, piece=place.piece + 1)


def not_utf8(file: SourceFile) -> Bad | None:
    try:
        with file.open() as content:
            for _ in decoded(content, file.path):
                pass
    except Bad as error:
        return error
    return None


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


def decoded(content: BinaryIO, path: str, begin: int = 0, end: int | None = None) -> Iterator[str]:
    """The text between two bytes. Raises Bad."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), begin
    content.seek(begin)
    while True:
        data = content.read(READ_BYTES if end is None else min(READ_BYTES, end - done))
        kept = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise Bad(
                f"{path} is not UTF-8 text (byte {done - kept + error.start}), and the tokens must "
                "stand for real text. Convert it, or leave it out with --glob '**/*.txt' or "
                "--skip-bad.",
                "files that are not UTF-8",
            ) from error
        if text:
            yield text
        if not data:
            return
        done += len(data)


# --- rows -----------------------------------------------------------------------------------------


def row_of(
    name: str, place: Place, source_bytes: int, config: Prepare, read: Callable[[], list[Any]]
) -> Row:
    """A row, or what is said of one that is left out."""
    try:
        return Row(name, place, read(), source_bytes)
    except Bad as error:
        if not config.skip_bad:
            raise
        return Row(name, place, [], source_bytes, error.kind)


def json_lines(file: SourceFile, begin: Place, config: Prepare) -> Iterator[Row]:
    """A document per line that is not blank."""
    with file.open() as content:
        content.seek(begin.offset)
        offset = begin.offset
        for number, line in enumerate(content, start=begin.row):
            place, here = Place(begin.file, number, offset), f"{file.path}:{number + 1}"
            offset += len(line)
            if line.strip():

                def read(line: bytes = line, here: str = here) -> list[Any]:
                    return text_parts(json_row(line, here), here, config)

                yield row_of(f"{file.name}:{number + 1}", place, len(line), config, read)


def json_row(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise Bad(
            f"{place} is not a line of JSON ({error}): expected one object per line. Mend the "
            "line, or leave it out with --skip-bad.",
            "lines that are no JSON",
        ) from error


def text_parts(row: Any, place: str, config: Prepare) -> list[tuple[str, int | None]]:
    """Of a JSON line, Parquet or Hugging Face row. Raises Bad."""
    if not config.chat:
        return [(row_text(row, place, config.text_field), None)]
    try:
        return chat.pieces(chat.conversation(row, place))
    except ValueError as error:
        raise Bad(str(error), "rows that are no conversation") from error


def row_text(row: Any, place: str, text_field: str) -> str:
    texts = {k: v for k, v in row.items() if isinstance(v, str)} if isinstance(row, dict) else {}
    if text_field not in texts:
        raise Bad(
            f"{place} has no text in the field {text_field!r}; fields with text: "
            f"{', '.join(texts) or 'none'}. Name one with --text-field.",
            "rows without text",
        )
    return texts[text_field]


def parquet(file: SourceFile, begin: Place, config: Prepare) -> Iterator[Row]:
    """A document per row; of a row group only the text is read, a few rows at a time."""
    for number, total, row in parquet_rows(file, begin.row, config):
        size = file.size * (number + 1) // total - file.size * number // total

        def read(row: Any = row, here: str = f"{file.path}:{number}") -> list[Any]:
            if isinstance(row, Bad):
                raise row
            return text_parts(row, here, config)

        yield row_of(f"{file.name}:{number}", Place(begin.file, number), size, config, read)


def parquet_rows(
    file: SourceFile, begin: int, config: Prepare
) -> Iterator[tuple[int, int, Any | Bad]]:
    """(number, how many there are, content) from the row group on that has row `begin`; in place
    of a file, or of the rest of a row group, that cannot be read what that raised.
    """
    try:
        with parquet_file(file) as table:
            columns = None if config.chat else text_column(file.path, table.schema_arrow, config)
            total = table.metadata.num_rows
            for group, first, rows in row_groups(table.metadata):
                if first + rows > begin:
                    for number, row in group_rows(file, table, group, columns, first, begin):
                        yield number, total, row
    except Bad as error:
        yield 0, 1, error


def row_groups(metadata: Any) -> Iterator[tuple[int, int, int]]:
    """(number, first row, rows) of each."""
    first = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        yield group, first, rows
        first += rows


@contextlib.contextmanager
def told_of_parquet(file: SourceFile, what: str) -> Iterator[None]:
    """Raises Bad for what pyarrow meets in a damaged file."""
    import pyarrow  # late: other sources need not wait for it

    try:
        yield
    except (buckets.Refused, buckets.Unanswered):  # OSErrors too, and no damage
        raise
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise Bad(
            f"{file.path} cannot be read as Parquet ({reason}). Bring a whole copy, or leave it "
            "out with --glob or --skip-bad.",
            f"Parquet {what} that cannot be read",
        ) from error


@contextlib.contextmanager
def parquet_file(file: SourceFile) -> Iterator[Any]:
    """Raises Bad."""
    import pyarrow.parquet

    how = {"page_checksum_verification": True}
    remote = buckets.is_bucket(file.path)
    with contextlib.ExitStack() as stack:
        # Unbuffered, as pyarrow asks for what it needs: the footer, and columns of row groups.
        source = stack.enter_context(buckets.Reader(file.path, file.size)) if remote else file.path
        with told_of_parquet(file, "files"):
            table = stack.enter_context(pyarrow.parquet.ParquetFile(source, **how))
        yield table


def group_rows(
    file: SourceFile, table: Any, group: int, columns: list[str] | None, first: int, begin: int
) -> Iterator[tuple[int, Any | Bad]]:
    """(number, content) of the rows of a row group, from the batch on that has row `begin`."""
    batches, number = table.iter_batches(ROWS, row_groups=[group], columns=columns), first
    while True:
        try:
            with told_of_parquet(file, "row groups"):
                batch = next(batches, None)
                if batch is None:
                    return
                rows = batch.to_pylist() if number + len(batch) > begin else []
        except Bad as error:
            yield number, error
            return
        yield from enumerate(rows, start=number)
        number += len(batch)


def text_column(path: str, schema: Any, config: Prepare) -> list[str]:
    """Raises Bad where there is no such column of text."""
    import pyarrow

    kinds = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    texts = [field.name for field in schema if any(kind(field.type) for kind in kinds)]
    if config.text_field not in texts:
        raise Bad(
            f"{path} has no column of text called {config.text_field!r}; columns of text: "
            f"{', '.join(texts) or 'none'}. Name one with --text-field.",
            "Parquet files without the column of text",
        )
    return [config.text_field]


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

        def read(row: Any = row, here: str = here) -> list[Any]:
            return text_parts(row, here, config)

        yield row_of(f"{config.hf_split}:{number}", Place(row=number), 0, config, read)


ROW_FILES = {".jsonl": json_lines, ".parquet": parquet}


# --- stretches ------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A stretch of the source that is read by itself."""

    files: list[SourceFile]  # from number begin.file on
    begin: Place
    end: Place  # before which it ends
    size: int  # about so many bytes of text


def unit_pieces(config: Prepare, unit: Unit, after: Place | None) -> Iterator[Piece]:
    """The pieces of `pieces` that lie in a stretch, and behind a place."""
    found = of_files(config, unit.files, unit.begin, unit.end)
    return (piece for piece in found if after is None or piece.place > after)


def units(config: Prepare, size: int, after: Place | None = None) -> Iterator[Unit]:
    """The source, or what is behind a place, in stretches of about `size` bytes: several files,
    one, or a part of a long one. For that a long file of text or of lines is read, and of a Parquet
    file the footer.
    """
    files, begin, gathered = source_files(config), after or Place(), 0

    def unit(end: Place) -> Unit:
        last = end.file + (end > Place(end.file))  # a file that it ends within is needed
        return Unit(files[begin.file : last], begin, end, gathered)

    for number, file in enumerate(files[begin.file :], start=begin.file):
        start = begin if number == begin.file else Place(number)
        for place, part in stretches(file, start, size, config):
            if gathered and gathered + part > size:
                yield unit(start)
                begin, gathered = start, 0
            gathered, start = gathered + part, place
            if gathered >= size:
                yield unit(place)
                begin, gathered = place, 0
    if begin < Place(len(files)):
        yield unit(Place(len(files)))


def stretches(
    file: SourceFile, start: Place, size: int, config: Prepare
) -> Iterator[tuple[Place, int]]:
    """(where it ends, bytes of text) of parts of a file, in order; the last ends with the file."""
    end = Place(start.file + 1)
    if file.kind == ".parquet":
        cuts = parquet_cuts(file, start, size, config)
    elif file.size - start.offset <= size:
        cuts = iter([(end, file.size - start.offset)])
    elif file.kind == ".jsonl":
        cuts = line_cuts(file, start, size)
    elif config.skip_bad and not_utf8(file):  # it is left out as a whole
        cuts = iter([(end, file.size - start.offset)])
    else:
        cuts = text_cuts(file, start, size)
    return cuts


def line_cuts(file: SourceFile, start: Place, size: int) -> Iterator[tuple[Place, int]]:
    part = 0
    with file.open() as content:
        content.seek(start.offset)
        place = start
        for line in content:
            if part >= size:
                yield place, part
                part = 0
            part += len(line)
            place = Place(start.file, place.row + 1, place.offset + len(line))
    yield Place(start.file + 1), part


def text_cuts(file: SourceFile, start: Place, size: int) -> Iterator[tuple[Place, int]]:
    """Where pieces begin, every PIECE_CHARACTERS of the document."""
    pieces_each = max(1, size // PIECE_CHARACTERS)
    place, seen, position = start, 0, start.offset
    ends_at = pieces_each * PIECE_CHARACTERS  # in characters after `start`
    with file.open() as content:
        content.seek(start.offset)
        while data := content.read(READ_BYTES):
            # A character has one byte that does not go on with another.
            begins = np.flatnonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)
            while ends_at < seen + len(begins):
                offset, before = position + int(begins[ends_at - seen]), place.offset
                place = place._replace(offset=offset, piece=place.piece + pieces_each)
                yield place, offset - before
                ends_at += pieces_each * PIECE_CHARACTERS
            seen, position = seen + len(begins), position + len(data)
    yield Place(start.file + 1), position - place.offset


def parquet_cuts(
    file: SourceFile, start: Place, size: int, config: Prepare
) -> Iterator[tuple[Place, int]]:
    """Where row groups begin. Of a large one parts begin within it, GROUP_PARTS at most, as each
    reads what is before it.
    """
    try:
        with parquet_file(file) as table:
            groups = list(row_groups(table.metadata))
            sizes = [table.metadata.row_group(group).total_byte_size for group, *_ in groups]
    except Bad:  # said by who reads it
        yield Place(start.file + 1), file.size
        return
    for (_, first, rows), group_bytes in zip(groups, sizes, strict=True):
        parts = max(1, min(group_bytes // max(size, 1), GROUP_PARTS, rows))
        ends = [first + rows * part // parts for part in range(1, parts + 1)]
        for end in ends:
            if end > start.row and end < groups[-1][1] + groups[-1][2]:
                yield Place(start.file, end), group_bytes // parts
    yield Place(start.file + 1), sizes[-1] // parts if groups else 0


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
