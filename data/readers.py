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
import math
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from fsspec.compression import compr

import buckets
from data.settings import Prepare
from faults import Fault

HUGGING_FACE = "hf:"
TEXT, JSON_LINES, JSON_ARRAY, PARQUET, HUB = "text", "JSON lines", "JSON array", "Parquet", "hub"
RECORD_BYTES = 64_000_000  # of a row at most
READ_BYTES = 1 << 20
REQUEST_BYTES = 8 << 20  # of a file in a bucket
END_BYTES = 1 << 16  # at both ends of a file, whose checksum is a part of its identity
BATCH_ROWS = 256  # of a Parquet file that are read at a time
SHARD_ROWS = 1 << 40  # more than a data file of the hub has
BOM = b"\xef\xbb\xbf"


class Bad(ValueError):
    """(what cannot be used, what several of them are called); --skip-bad leaves it out."""

    def __str__(self) -> str:
        return self.args[0]


class Part(NamedTuple):
    """What a split has of a file."""

    name: str  # of the file: its path below --source
    path: str  # as it is opened
    kind: str = ""  # unknown
    compression: str | None = None
    begin: int = 0  # byte, or number of a data file of the hub
    end: float = math.inf  # byte before which it ends
    size: int = 0  # bytes
    identity: str = ""  # of the file: checksum of its ends; in a bucket its CRC32C


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
    ends: bool = True  # False: it continues in the next part
    read: int = 0  # bytes of the part, up to its end, as far as that is known


class Place(NamedTuple):
    """Where a row is, for messages: its line is counted when one is written."""

    part: Part
    position: int

    def __str__(self) -> str:
        if self.part.kind != JSON_LINES:
            return f"{self.part.path}, row {self.position % SHARD_ROWS + 1},"
        line = 1
        with opened(self.part) as (file, _):
            for left in range(self.position, 0, -READ_BYTES):
                line += file.read(min(READ_BYTES, left)).count(b"\n")
        return f"{self.part.path}:{line}"


ToPieces = Callable[[Any, Any], list[Piece]]  # of a row and its place; raises Bad
Rows = Iterator[tuple[int, Any, int]]  # (position, value or line of JSON, bytes that were read)


def documents(
    part: Part, config: Prepare, to_pieces: ToPieces | None = None, *, left_out: Counter[str]
) -> Iterator[Document]:
    """The documents of a part, empty ones too.

    to_pieces  of a row; None takes the text of --text-field
    left_out   counts what cannot be used, with --skip-bad
    Raises     Bad without it; buckets.Refused, buckets.Unanswered, Fault.
    """
    to_pieces = to_pieces or functools.partial(text_pieces, field=config.text_field)
    try:
        with reading(part):
            check_same(part)
            if part.kind == TEXT:
                if config.skip_bad:  # or half of it would be written before it is found to be bad
                    deque(decoded(part), maxlen=0)
                pieces = (Piece(text) for text in decoded(part))
                begins, ends = part.begin == 0, part.end == math.inf
                yield Document(part.name, 0, pieces, begins, ends, part.size)
                return
            for position, row, read in READERS[part.kind](part, config):
                # To count lines takes time, and nobody sees the messages of what is left out.
                where = part.path if config.skip_bad else Place(part, position)
                try:
                    pieces = pieces_of(row, where, to_pieces)
                except Bad as error:
                    skip(error, config, left_out)
                else:
                    yield Document(part.name, position, pieces, read=read)
    except Bad as error:
        skip(error, config, left_out)


def skip(error: Bad, config: Prepare, left_out: Counter[str]) -> None:
    if not config.skip_bad:
        raise error
    left_out[error.args[1]] += 1


@contextlib.contextmanager
def opened(part: Part, request_bytes: int = REQUEST_BYTES) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(the file unpacked, the file as it is stored)."""
    if buckets.is_bucket(part.path):
        file = buckets.filesystem().open(part.path, "rb", cache_type="none")
    else:
        file = io.FileIO(part.path)
    # The reader of Parquet knows which ranges it needs.
    stored = file if part.kind == PARQUET else io.BufferedReader(file, request_bytes)
    is_zstd = part.compression == "zstd"  # also what was packed with --long=31
    how = {"options": {zstd().DecompressionParameter.window_log_max: 31}} if is_zstd else {}
    with stored, compr[part.compression](stored, mode="rb", **how) as unpacked:
        yield unpacked, stored


def zstd() -> Any:
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        from backports import zstd
    return zstd


@functools.cache
def damages() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    import ijson
    import pyarrow

    unpacking = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd().ZstdError)
    return (*unpacking, UnicodeDecodeError, ijson.JSONError, pyarrow.ArrowException)


@contextlib.contextmanager
def reading(part: Part) -> Iterator[None]:
    """Raise Bad for a damaged file; of a bucket what buckets.told does."""
    try:
        with buckets.told(part.path) if buckets.is_bucket(part.path) else contextlib.nullcontext():
            yield
    except (buckets.Refused, buckets.Unanswered):
        raise
    except FileNotFoundError as error:
        raise ValueError(f"{part.path} is not there any more, or not on this machine.") from error
    except damages() as error:
        raise damaged(part, buckets.one_line(error)) from error


def damaged(part: Part, why: str, fix: str = "Bring a whole copy") -> Bad:
    return Bad(
        f"{part.path} cannot be read as {part.kind or 'any kind'} ({why}). {fix}, or leave it out "
        "with --glob or --skip-bad.",
        "files that cannot be read",
    )


def size_and_checksum(path: str) -> tuple[int, str]:
    """Of a file. The checksum is of its first and last END_BYTES, in which most edits show."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        crc = zlib.crc32(file.read(END_BYTES))
        file.seek(max(file.tell(), size - END_BYTES))
        return size, f"{zlib.crc32(file.read(END_BYTES), crc):08x}"


def check_same(part: Part) -> None:
    """Raise ValueError where a file on a disk is not the one that was listed."""
    on_disk = part.identity and not buckets.is_bucket(part.path)
    if on_disk and size_and_checksum(part.path)[1] != part.identity:
        raise ValueError(f"{part.path} changed since it was listed. Start this again.")


def line_start(file: IO[bytes], byte: int) -> int:
    """Go to the first line that begins at a byte or behind it, or to the end of the file."""
    if byte == 0:
        file.seek(0)
        return len(BOM) if file.read(len(BOM)) == BOM else file.seek(0)
    file.seek(byte - 1)
    while (data := file.readline(READ_BYTES)) and not data.endswith(b"\n"):
        pass
    return file.tell()


def decoded(part: Part) -> Iterator[str]:
    """The text of a part, which goes from a begin of a line to another. Raises Bad."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with reading(part), opened(part) as (file, _):
        end = part.end if part.end == math.inf else line_start(file, int(part.end))
        at = line_start(file, part.begin)
        data = BOM  # any that is not empty
        while data:
            data = file.read(min(READ_BYTES, end - at))
            kept = len(decoder.getstate()[0])
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                why = f"byte {at - kept + error.start} is not UTF-8"
                raise damaged(part, why, "Convert it to UTF-8") from error
            at += len(data)


def pieces_of(row: Any, where: Any, to_pieces: ToPieces) -> list[Piece]:
    """Of a row, or of a line of JSON, which is bytes. Raises Bad."""
    if isinstance(row, bytes):
        check_size(len(row), where)
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise Bad(
                f"{where} is not a line of JSON ({error}): expected one object per line. Correct "
                "the line, or leave it out with --skip-bad.",
                "lines that are no JSON",
            ) from error
    pieces = to_pieces(row, where)
    check_size(sum(len(piece.text) for piece in pieces), where)
    return pieces


def check_size(size: int, where: Any) -> None:
    if size > RECORD_BYTES:
        what = f"of more than {RECORD_BYTES // 1_000_000} MB"
        raise Bad(f"{where} is a record {what}. Cut it, or use --skip-bad.", f"records {what}")


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


def json_lines(part: Part, config: Prepare) -> Rows:
    """The lines that are not blank and begin in the part. A long one is cut at RECORD_BYTES + 1."""
    with opened(part) as (file, stored):
        at = line_start(file, part.begin)
        while at < part.end and (line := file.readline(RECORD_BYTES + 1)):
            if line.strip():
                yield at, line, stored.tell() - part.begin
            at += len(line)
            if len(line) > RECORD_BYTES:
                at = line_start(file, at)


def json_array(part: Part, config: Prepare) -> Rows:
    import ijson  # late: other kinds need not wait for it

    with opened(part) as (file, stored):
        line_start(file, 0)  # behind a byte order mark
        for number, row in enumerate(ijson.items(file, "item")):
            yield number, row, stored.tell()


def parquet(part: Part, config: Prepare) -> Rows:
    """The rows of the row groups that begin in the part, a few at a time."""
    import pyarrow.parquet  # late: other kinds need not wait for it

    with opened(part) as (file, _):
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        metadata, number = table.metadata, 0
        columns = [metadata.schema.column(n) for n in range(metadata.num_columns)]
        texts = {column.path for column in columns if column.logical_type.type == "STRING"}
        # Without the column all are read, for the message that names those with text.
        wanted = [config.text_field] if config.text_field in texts and not config.chat else None
        for n in range(metadata.num_row_groups):
            group = metadata.row_group(n)
            begin = group.column(0).data_page_offset if columns else 0
            if not part.begin <= begin < part.end:
                number += group.num_rows
                continue
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[n], columns=wanted):
                for row in batch.to_pylist():
                    yield number, row, begin - part.begin
                    number += 1


@functools.lru_cache(1)
def hub(config: Prepare) -> Any:
    """A data set of the hub, streamed. Raises ValueError where it cannot be opened."""
    import datasets  # takes seconds to import

    name, subset = config.source.removeprefix(HUGGING_FACE), config.hf_name or None
    try:
        return datasets.load_dataset(name, subset, split=config.hf_split, streaming=True)
    # Unreachable or no such data set, configuration or split; RuntimeError: it needs a script.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--source {config.source} cannot be opened ({buckets.one_line(error)}). Check the "
            "name, --hf-name, --hf-split and the network."
        ) from error


def hub_rows(part: Part, config: Prepare) -> Rows:
    """The rows of one of its data files."""
    data = hub(config)
    try:
        for number, row in enumerate(data.shard(data.num_shards, part.begin)):
            yield part.begin * SHARD_ROWS + number, row, 0
    except OSError as error:
        raise Fault(f"{config.source} cannot be read: {error}. Start this again.") from error


READERS = {JSON_LINES: json_lines, JSON_ARRAY: json_array, PARQUET: parquet, HUB: hub_rows}
