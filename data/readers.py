"""Read the documents of a part of a source: text, JSON lines, JSON arrays, Parquet, hub data sets.

fsspec opens files, on a disk or in a bucket, and unpacks them. Whatever is large is streamed: a row
has at most RECORD_BYTES, and a file of text is one document of any length.
"""

import codecs
import contextlib
import functools
import io
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import buckets
from data.settings import Prepare
from faults import Fault

HUGGING_FACE = "hf:"
TEXT, JSON_LINES, JSON_ARRAY, PARQUET, HUB = "text", "JSON lines", "JSON array", "Parquet", "hub"
ROWS = {JSON_LINES, JSON_ARRAY, PARQUET, HUB}
RECORD_BYTES = 64_000_000  # of a row at most
READ_BYTES = 1 << 20
READ_AHEAD_BYTES = 8 << 20  # of a file in a bucket, as each request takes its time
END_BYTES = 1 << 16  # at both ends of a file, whose checksum is a part of its identity
BATCH_ROWS = 256  # of a Parquet file that are read at a time
BOM = b"\xef\xbb\xbf"


class Bad(ValueError):
    """Something of a source that cannot be used; --skip-bad leaves it out."""

    def __init__(self, text: str, kind: str):
        super().__init__(text, kind)  # both, or it could not be sent to another process
        self.kind = kind  # what people call several of them

    def __str__(self) -> str:
        return self.args[0]


class Part(NamedTuple):
    """What a split has of a file."""

    name: str  # of the file: its path below --source
    path: str  # as it is opened
    kind: str
    compression: str = ""
    begin: int = 0  # byte, row group, or number of a data file of the hub
    end: int | None = None  # before which it ends; None is the end of the file
    size: int = 0  # bytes
    identity: str = ""  # of the file


class Piece(NamedTuple):
    """Text that is tokenized by itself."""

    text: str
    weight: int | None = None  # of the loss on it; None where all weights are 1
    special: bool = False  # the name of a special token


class Document(NamedTuple):
    name: str  # of the file
    position: int  # in it: a byte or the number of a row
    pieces: Iterable[Piece]
    begins: bool = True  # False: it has begun in the part before
    ends: bool = True  # False: it goes on in the next part
    read: int = 0  # bytes of the part, up to its end


class Row(NamedTuple):
    position: int
    where: Any  # its place in a message, by str()
    value: Any  # what it holds, or Bad
    read: int  # bytes of the part, up to its end


ToPieces = Callable[[Any, Any], list[Piece]]  # of a row at a place; raises Bad


def documents(
    part: Part, config: Prepare, to_pieces: ToPieces | None = None, *, left_out: Counter[str]
) -> Iterator[Document]:
    """The documents of a part, empty ones too.

    to_pieces  of a row; None takes the text of --text-field
    left_out   counts what cannot be used, with --skip-bad
    Raises     Bad without it; buckets.Refused, buckets.Unanswered, Fault.
    """
    to_pieces = to_pieces or functools.partial(text_pieces, field=config.text_field)
    check_same(part)
    try:
        with reading(part):
            if part.kind == TEXT:
                yield text_document(part, config)
                return
            for row in READERS[part.kind](part, config):
                try:
                    pieces = pieces_of(row, to_pieces)
                except Bad as error:
                    if not config.skip_bad:
                        raise
                    left_out[error.kind] += 1
                else:
                    yield Document(part.name, row.position, pieces, read=row.read)
    except Bad as error:
        if not config.skip_bad:
            raise
        left_out[error.kind] += 1


def pieces_of(row: Row, to_pieces: ToPieces) -> list[Piece]:
    if isinstance(row.value, Bad):
        raise row.value
    pieces = to_pieces(row.value, row.where)
    if sum(len(piece.text) for piece in pieces) > RECORD_BYTES:
        raise too_long(row.where)
    return pieces


def too_long(where: Any) -> Bad:
    return Bad(
        f"{where} is a record of more than {RECORD_BYTES // 1_000_000} MB. Cut it, or leave it out "
        "with --skip-bad.",
        f"records of more than {RECORD_BYTES // 1_000_000} MB",
    )


# --- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(part: Part, cache_type: str = "readahead") -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(the file unpacked, the file as it is stored)."""
    from fsspec.compression import compr  # late: configs are read without it

    with contextlib.ExitStack() as stack:
        if buckets.is_bucket(part.path):
            how = {"block_size": READ_AHEAD_BYTES, "cache_type": cache_type}
            stored = stack.enter_context(buckets.filesystem().open(part.path, "rb", **how))
            if cache_type != "none":
                stored = stack.enter_context(io.BufferedReader(stored, READ_BYTES))
        else:
            stored = stack.enter_context(open(part.path, "rb"))
        unpack = compr[part.compression] if part.compression else None
        yield (stack.enter_context(unpack(stored, mode="rb")) if unpack else stored), stored


@functools.cache
def unreadable() -> tuple[type[Exception], ...]:
    """What reading and unpacking a damaged file raises."""
    try:
        from compression.zstd import ZstdError  # Python 3.14
    except ImportError:
        from backports.zstd import ZstdError
    return OSError, EOFError, zlib.error, lzma.LZMAError, ZstdError


@contextlib.contextmanager
def reading(part: Part) -> Iterator[None]:
    """Raise Bad for a damaged file; of a bucket what buckets.told does."""
    remote = buckets.is_bucket(part.path)
    try:
        with buckets.told(part.path) if remote else contextlib.nullcontext():
            yield
    except (buckets.Refused, buckets.Unanswered):
        raise
    except FileNotFoundError as error:
        raise ValueError(f"{part.path} is not there any more, or not on this machine.") from error
    except unreadable() as error:
        raise Bad(
            f"{part.path} cannot be read ({error}). Bring a whole copy, or leave it out with "
            "--glob or --skip-bad.",
            "files that cannot be read",
        ) from error


def ends_checksum(file: IO[bytes], size: int) -> str:
    """Of the first and the last END_BYTES of a file: copies have the same, and few edits do."""
    crc = zlib.crc32(file.read(END_BYTES))
    if size > END_BYTES:
        file.seek(max(END_BYTES, size - END_BYTES))
        crc = zlib.crc32(file.read(END_BYTES), crc)
    return f"{crc:08x}"


def check_same(part: Part) -> None:
    """Raise ValueError where a file on a disk is not the one that was listed."""
    if part.kind == HUB or buckets.is_bucket(part.path) or not part.identity:
        return
    with reading(part), open(part.path, "rb") as file:
        if ends_checksum(file, os.fstat(file.fileno()).st_size) != part.identity:
            raise ValueError(f"{part.path} changed since it was listed. Start this again.")


def skip_bom(file: IO[bytes]) -> int:
    """Bytes of a byte order mark, behind which the file is then."""
    if file.read(len(BOM)) == BOM:
        return len(BOM)
    file.seek(0)
    return 0


# --- text -----------------------------------------------------------------------------------------


def text_document(part: Part, config: Prepare) -> Document:
    """A file is one document. A part of it goes from a begin of a line to another."""
    if config.skip_bad:  # or half of it would be written before it is found to be bad
        for _ in decoded(part):
            pass
    return Document(
        part.name,
        0,
        (Piece(text) for text in decoded(part)),
        begins=part.begin == 0,
        ends=part.end is None,
        read=part.size,
    )


def decoded(part: Part) -> Iterator[str]:
    """Raises Bad."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with reading(part), opened(part) as (file, _):
        at = first_line(file, part.begin)
        for data in (*bytes_until(file, at, part.end), b""):
            kept = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise Bad(
                    f"{part.path} is not UTF-8 text (byte {at - kept + error.start}), and the "
                    "tokens must stand for real text. Convert it, or leave it out with --glob "
                    "'**/*.txt' or --skip-bad.",
                    "files that are not UTF-8",
                ) from error
            at += len(data)
            if text:
                yield text


def first_line(file: IO[bytes], begin: int) -> int:
    """Go to the first line that begins at a byte or behind it, or to the end of the file."""
    if begin == 0:
        return skip_bom(file)
    file.seek(begin - 1)
    at = begin - 1
    while data := file.readline(READ_BYTES):
        at += len(data)
        if data.endswith(b"\n"):
            break
    return at


def bytes_until(file: IO[bytes], at: int, end: int | None) -> Iterator[bytes]:
    """From byte `at` to the first line that begins at `end` or behind it."""
    data = b""
    if end is not None and at >= end:
        return
    while end is None or at < end - 1:
        data = file.read(READ_BYTES if end is None else min(READ_BYTES, end - 1 - at))
        if not data:
            return
        yield data
        at += len(data)
    while at < end or not data.endswith(b"\n"):
        data = file.readline(READ_BYTES)
        if not data:
            return
        yield data
        at += len(data)


# --- rows -----------------------------------------------------------------------------------------


def text_pieces(row: Any, where: Any, field: str) -> list[Piece]:
    """The text of a field, named as data.text where it lies in another. Raises Bad."""
    found = row
    for key in [field] if isinstance(row, dict) and field in row else field.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, str):
        return [Piece(found)]
    raise Bad(
        f"{where} has no text in the field {field!r}; fields with text: "
        f"{', '.join(fields_with_text(row)) or 'none'}. Name one with --text-field, or choose the "
        "files with rows by --glob.",
        "rows without text",
    )


def fields_with_text(row: Any, above: str = "") -> Iterator[str]:
    for name, value in row.items() if isinstance(row, dict) else ():
        if isinstance(value, str):
            yield above + name
        elif not above:
            yield from fields_with_text(value, f"{name}.")


class Line:
    """A line's place in a message: its number is counted where it is asked for."""

    def __init__(self, part: Part, number: int):
        self.part, self.number = part, number  # of the line in the part, from 1 on

    def __str__(self) -> str:
        before = 0
        if self.part.begin:
            with opened(self.part) as (file, _):
                left = first_line(file, self.part.begin)
                file.seek(0)
                while left and (data := file.read(min(READ_BYTES, left))):
                    before, left = before + data.count(b"\n"), left - len(data)
        return f"{self.part.path}:{before + self.number}"


def json_lines(part: Part, config: Prepare) -> Iterator[Row]:
    """A row for each line that is not blank and begins in the part."""
    with opened(part) as (file, stored):
        at, number = first_line(file, part.begin), 0
        while part.end is None or at < part.end:
            position, line = at, file.readline(RECORD_BYTES + 1)
            if not line:
                return
            at, number, whole = at + len(line), number + 1, line
            while len(whole) > RECORD_BYTES and not whole.endswith(b"\n"):
                if not (whole := file.readline(RECORD_BYTES + 1)):
                    break
                at += len(whole)
            if line.strip():
                where = Line(part, number)
                value = too_long(where) if len(line) > RECORD_BYTES else json_row(line, where)
                read = stored.tell() if part.compression else at - part.begin
                yield Row(position, where, value, read)


def json_row(line: bytes, where: Any) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Bad(
            f"{where} is not a line of JSON ({error}): expected one object per line. Correct the "
            "line, or leave it out with --skip-bad.",
            "lines that are no JSON",
        )


def json_array(part: Part, config: Prepare) -> Iterator[Row]:
    """A row for each element."""
    import ijson  # late: other kinds need not wait for it

    number = 0
    with opened(part) as (file, stored):
        skip_bom(file)
        try:
            for number, value in enumerate(ijson.items(file, "item", use_float=True), start=1):
                yield Row(number - 1, f"{part.path}, element {number},", value, stored.tell())
        except (ijson.JSONError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Bad(
                f"{part.path} is no JSON array behind its element {number} ({reason}). Bring a "
                "whole copy, or leave the rest out with --skip-bad.",
                "JSON arrays that are not whole",
            ) from error


# --- Parquet --------------------------------------------------------------------------------------


@contextlib.contextmanager
def parquet_file(part: Part) -> Iterator[Any]:
    """Raises Bad."""
    import pyarrow.parquet  # late: other kinds need not wait for it

    with opened(part, "none") as (file, _):
        with damaged_parquet(part, "files"):
            table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        yield table


@contextlib.contextmanager
def damaged_parquet(part: Part, what: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise Bad(
            f"{part.path} cannot be read as Parquet ({reason}). Bring a whole copy, or leave it "
            "out with --glob or --skip-bad.",
            f"Parquet {what} that cannot be read",
        ) from error


def row_group_parts(part: Part, size: int, config: Prepare) -> Iterator[Part]:
    """Of a Parquet file, each with row groups of about `size` bytes."""
    try:
        with reading(part), parquet_file(part) as table:
            metadata = table.metadata
            sizes = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
    except Bad:  # said by who reads it
        yield part
        return
    begin = total = 0
    for group, group_size in enumerate(sizes):
        if total and total + group_size > size:
            yield part._replace(begin=begin, end=group, size=total)
            begin, total = group, 0
        total += group_size
    yield part._replace(begin=begin, end=None, size=total)


def parquet(part: Part, config: Prepare) -> Iterator[Row]:
    """The rows of row groups, of which only the text is read, a few at a time."""
    with parquet_file(part) as table:
        metadata, schema = table.metadata, table.schema_arrow
        columns = None if config.chat else [text_column(part, schema, config.text_field)]
        groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        chosen = range(part.begin, len(groups) if part.end is None else part.end)
        total = max(1, sum(groups[n] for n in chosen))
        for group in chosen:
            number = sum(groups[:group])
            batches = table.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)
            while True:
                try:
                    with damaged_parquet(part, "row groups"):
                        batch = next(batches, None)
                        rows = batch.to_pylist() if batch else []
                except Bad as error:
                    yield Row(number, f"{part.path}:{number}", error, 0)
                    break
                if not batch:
                    break
                for row in rows:
                    read = part.size * (number + 1 - sum(groups[: part.begin])) // total
                    yield Row(number, f"{part.path}:{number}", row, read)
                    number += 1


def text_column(part: Part, schema: Any, field: str) -> str:
    """The column to read. Raises Bad where it is no text."""
    import pyarrow

    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    columns = {}
    for column in schema:
        columns[column.name] = column.type
        if pyarrow.types.is_struct(column.type):
            columns |= {f"{column.name}.{inner.name}": inner.type for inner in column.type}
    texts = [name for name, kind in columns.items() if any(test(kind) for test in is_text)]
    deeper = field.count(".") > 1 and field.partition(".")[0] in columns
    if field not in texts and not deeper:
        raise Bad(
            f"{part.path} has no column of text called {field!r}; columns of text: "
            f"{', '.join(texts) or 'none'}. Name one with --text-field.",
            "Parquet files without the column of text",
        )
    return field


# --- the hub --------------------------------------------------------------------------------------


@functools.lru_cache(1)
def hub(config: Prepare) -> Any:
    """A data set of the hub, streamed. Raises ValueError where it cannot be opened."""
    import datasets  # takes seconds to import

    name = config.source.removeprefix(HUGGING_FACE)
    try:
        return datasets.load_dataset(
            name, config.hf_name or None, split=config.hf_split, streaming=True
        )
    # Unreachable or no such data set, configuration or split; RuntimeError: it needs a script.
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--source {config.source} cannot be opened ({reason}). Check the name, --hf-name, "
            "--hf-split and the network."
        ) from error


def hub_rows(part: Part, config: Prepare) -> Iterator[Row]:
    """The rows of one of its data files."""
    data = hub(config)
    if data.num_shards <= part.begin:
        raise ValueError(f"{config.source} has {data.num_shards} data files, and had more before.")
    rows = iter(data.shard(data.num_shards, part.begin))
    for number in range(1 << 62):
        try:
            row = next(rows, None)
        except OSError as error:
            raise Fault(f"{config.source} cannot be read: {error}. Start this again.") from error
        if row is None:
            return
        position = (part.begin << 40) + number
        yield Row(position, f"{config.source}, file {part.begin}, row {number}", row, 0)


READERS = {JSON_LINES: json_lines, JSON_ARRAY: json_array, PARQUET: parquet, HUB: hub_rows}
