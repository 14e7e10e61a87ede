"""Read the documents of a file part: text, JSON lines, JSON arrays, Parquet, hub data sets.

fsspec opens files, on a disk or in a bucket, and decompresses them. Large files are streamed: a
line of JSON has at most RECORD_BYTES, and a file of text is one document of any length.
"""

import codecs
import contextlib
import functools
import io
import itertools
import json
import lzma
import math
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import ijson
import pyarrow.parquet
from fsspec.compression import compr

from data.settings import Prepare
from runtime import storage
from runtime.errors import TransientError, one_line
from utils import ConfigError

try:
    from compression import zstd  # Python 3.14
except ImportError:
    from backports import zstd

HUGGING_FACE = "hf:"
TEXT, JSON_LINES, JSON_ARRAY, PARQUET, HUB = "text", "JSON lines", "JSON array", "Parquet", "hub"
RECORD_BYTES = 64_000_000  # limit of a line of JSON
READ_BYTES = 1 << 20
REQUEST_BYTES = 8 << 20  # per read of a file in a bucket
END_BYTES = 1 << 16  # at both ends of a file, covered by its checksum
BATCH_ROWS = 256  # per read of a Parquet file
SHARD_ROWS = 1 << 40  # more than a data file of the hub has
BOM = b"\xef\xbb\xbf"
# What reading a damaged file raises.
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
FORMAT_ERRORS = (UnicodeDecodeError, ijson.JSONError, pyarrow.ArrowException)


class InputError(ConfigError):
    """Unusable input, which --skip-bad leaves out. Arguments: message, category to count it in."""

    def __str__(self) -> str:
        return self.args[0]


class FilePart(NamedTuple):
    """A file or a byte range of one. Several of them are a split."""

    name: str  # path of the file below --source
    path: str  # to open the file
    kind: str = ""  # empty if unknown
    compression: str | None = None
    begin: int = 0  # byte, or number of a data file of the hub
    end: float = math.inf  # byte
    size: int = 0  # bytes
    identity: str = ""  # of the file: checksum of its ends; in a bucket its CRC32C


class Chunk(NamedTuple):
    """A part of a document that is tokenized on its own."""

    text: str
    weight: int = 1  # of the loss
    special: bool = False  # the text is the name of a special token


class Document(NamedTuple):
    name: str  # of the file
    position: int  # in the file: a byte or a row number
    chunks: Iterable[Chunk]
    begins: bool = True  # False: it began in an earlier part
    ends: bool = True  # False: it continues in the next part


# Converts a row. Raises InputError, whose message has no location.
ToChunks = Callable[[Any], list[Chunk]]
Rows = Iterator[tuple[int, Any]]  # (position, value or line of JSON)


def documents(
    part: FilePart, config: Prepare, to_chunks: ToChunks | None = None, *, left_out: Counter[str]
) -> Iterator[Document]:
    """Yield the documents of a part, including empty ones.

    to_chunks  converts a row; None takes the text of --text-field
    left_out   counts unusable input, with --skip-bad
    Raises     InputError without it; storage.AccessDenied, storage.Unavailable, TransientError.
    """
    to_chunks = to_chunks or functools.partial(text_of_field, field=config.text_field)
    try:
        with damage_as_input_error(part):
            check_unchanged(part)
            if part.kind == TEXT:
                if config.skip_bad:  # find errors before any of the document is written
                    deque(decode(part), maxlen=0)
                chunks = (Chunk(text) for text in decode(part))
                yield Document(part.name, 0, chunks, part.begin == 0, part.end == math.inf)
                return
            for position, row in READERS[part.kind](part, config):
                try:
                    yield Document(part.name, position, chunks_of(row, to_chunks))
                except InputError as error:
                    why, category = error.args
                    if not config.skip_bad:
                        raise InputError(location(part, position) + why, category) from error
                    left_out[category] += 1
    except InputError as error:
        if not config.skip_bad:
            raise
        left_out[error.args[1]] += 1


def location(part: FilePart, position: int) -> str:
    """Return the file of a row, and its line, or its number where there are no lines."""
    if part.kind != JSON_LINES:
        return f"{part.path}, row {position % SHARD_ROWS + 1},"
    with open_part(part) as file:
        sizes = (min(READ_BYTES, left) for left in range(position, 0, -READ_BYTES))
        breaks = sum(file.read(size).count(b"\n") for size in sizes)
    return f"{part.path}:{breaks + 1}"


@contextlib.contextmanager
def open_part(part: FilePart, request_bytes: int = REQUEST_BYTES) -> Iterator[IO[bytes]]:
    """Open the decompressed file."""
    folder, name = storage.of_file(part.path)
    file = folder.open_file(name)
    # The Parquet reader requests exact ranges, so it needs no buffer.
    stored = file if part.kind == PARQUET else io.BufferedReader(file, request_bytes)
    options = {}
    if part.compression == "zstd":  # accept files that were compressed with --long=31
        options["options"] = {zstd.DecompressionParameter.window_log_max: 31}
    with stored, compr[part.compression](stored, mode="rb", **options) as decompressed:
        yield decompressed


@contextlib.contextmanager
def damage_as_input_error(part: FilePart) -> Iterator[None]:
    """Raise InputError for a damaged file, and the errors of runtime/storage.py for a bucket."""
    folder, name = storage.of_file(part.path)
    try:
        with folder.translated_errors(name):
            yield
    except (storage.AccessDenied, storage.Unavailable):
        raise
    except FileNotFoundError as error:
        raise ConfigError(
            f"{part.path} does not exist any more, or not on this machine. Restore it, or start "
            "again."
        ) from error
    except (*DECOMPRESSION_ERRORS, *FORMAT_ERRORS) as error:
        raise unreadable(part, one_line(error)) from error


def unreadable(part: FilePart, why: str, fix: str = "Copy the file again") -> InputError:
    return InputError(
        f"{part.path} cannot be read as {part.kind or 'any kind'} ({why}). {fix}, or leave it out "
        "with --glob or --skip-bad.",
        "files that cannot be read",
    )


def size_and_checksum(path: str) -> tuple[int, str]:
    """Return a file's size, and a checksum of its first and last END_BYTES.

    Raises  ConfigError for a pointer of Git LFS, whose text is no data.
    """
    with open(path, "rb") as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(END_BYTES)
        storage.check_not_pointer(path, head)
        file.seek(max(file.tell(), size - END_BYTES))
        return size, f"{zlib.crc32(file.read(END_BYTES), zlib.crc32(head)):08x}"


def check_unchanged(part: FilePart) -> None:
    """Raise ConfigError if a file on a disk changed after it was listed."""
    on_disk = part.identity and not storage.is_remote(part.path)
    if on_disk and size_and_checksum(part.path)[1] != part.identity:
        raise ConfigError(f"{part.path} changed since it was listed. Start again.")


def seek_line(file: IO[bytes], byte: int) -> int:
    """Seek to the first line that begins at or after a byte, or to the end of the file."""
    if byte == 0:
        file.seek(0)
        return len(BOM) if file.read(len(BOM)) == BOM else file.seek(0)
    file.seek(byte - 1)
    while (data := file.readline(READ_BYTES)) and not data.endswith(b"\n"):
        pass
    return file.tell()


def decode(part: FilePart) -> Iterator[str]:
    """Yield the text of a part, from one line start to another. Raises InputError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with damage_as_input_error(part), open_part(part) as file:
        end = part.end if part.end == math.inf else seek_line(file, int(part.end))
        position = seek_line(file, part.begin)
        data = BOM  # any value that is not empty
        while data:
            data = file.read(min(READ_BYTES, end - position))
            kept = len(decoder.getstate()[0])
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                why = f"byte {position - kept + error.start} is not UTF-8"
                raise unreadable(part, why, "Convert it to UTF-8") from error
            position += len(data)


def chunks_of(row: Any, to_chunks: ToChunks) -> list[Chunk]:
    """Convert a row, which is a value or a line of JSON in bytes. Raises InputError."""
    if isinstance(row, bytes):
        if len(row) > RECORD_BYTES:
            what = f"of more than {RECORD_BYTES // 1_000_000} MB"
            fix = "Shorten it, or use --skip-bad."
            raise InputError(f" is a record {what}. {fix}", f"records {what}")
        try:
            row = json.loads(row.removeprefix(BOM).decode(errors="surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f" is not a line of JSON ({error}): expected an object in UTF-8 per line. Correct "
                "the line, or leave it out with --skip-bad.",
                "lines that are not JSON",
            ) from error
    return to_chunks(row)


def text_of_field(row: Any, field: str) -> list[Chunk]:
    """Return the text of a field; data.text is field text of field data. Raises InputError."""
    value = row
    for key in [field] if isinstance(row, dict) and field in row else field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bytes):  # a column of Parquet that is not declared as text
        with contextlib.suppress(UnicodeDecodeError):
            value = value.decode()
    if isinstance(value, str):
        return [Chunk(value)]
    what = "bytes that are not UTF-8" if isinstance(value, bytes) else type(value).__name__
    raise InputError(
        f" has no text in the field {field!r} ({what}); its fields: "
        f"{', '.join(row if isinstance(row, dict) else ()) or 'none'}. Set --text-field to the one "
        "with text (a.b for field b of field a), select the files with rows by --glob, or leave "
        "such rows out with --skip-bad.",
        "rows without text",
    )


def json_lines(part: FilePart, config: Prepare) -> Rows:
    """Yield the nonblank lines that begin in the part, truncated to RECORD_BYTES + 1."""
    with open_part(part) as file:
        position = seek_line(file, part.begin)
        while position < part.end and (line := file.readline(RECORD_BYTES + 1)):
            if line.strip():
                yield position, line
            position += len(line)
            if len(line) > RECORD_BYTES:
                position = seek_line(file, position)


def json_array(part: FilePart, config: Prepare) -> Rows:
    with open_part(part) as file:
        seek_line(file, 0)  # after a byte order mark
        yield from enumerate(ijson.items(file, "item"))


def parquet(part: FilePart, config: Prepare) -> Rows:
    """Yield the rows of the row groups that begin in the part."""
    with open_part(part) as file:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        metadata, number = table.metadata, 0
        paths = {metadata.schema.column(n).path for n in range(metadata.num_columns)}
        # If the column is missing, read all: the error lists them.
        wanted = [config.text_field] if config.text_field in paths and not config.chat else None
        for n in range(metadata.num_row_groups):
            group = metadata.row_group(n)
            if part.begin <= (group.column(0).data_page_offset if paths else 0) < part.end:
                batches = table.iter_batches(BATCH_ROWS, row_groups=[n], columns=wanted)
                rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                yield from enumerate(rows, number)
            number += group.num_rows


@functools.lru_cache(1)
def hub(config: Prepare) -> Any:
    """Open a data set of the hub for streaming. Raises ConfigError if this fails."""
    import datasets  # late: the import takes seconds

    name, subset = config.source.removeprefix(HUGGING_FACE), config.hf_name or None
    try:
        return datasets.load_dataset(name, subset, split=config.hf_split, streaming=True)
    # No network, or no such data set, configuration or split; RuntimeError: it needs a script.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--source {config.source} cannot be opened ({one_line(error)}). Check the "
            "name, --hf-name, --hf-split and the network."
        ) from error


def hub_rows(part: FilePart, config: Prepare) -> Rows:
    """Yield the rows of one data file."""
    data = hub(config)
    try:
        for number, row in enumerate(data.shard(data.num_shards, part.begin)):
            yield part.begin * SHARD_ROWS + number, row
    except OSError as error:
        raise TransientError(f"{config.source} cannot be read: {error}. Start again.") from error


READERS = {JSON_LINES: json_lines, JSON_ARRAY: json_array, PARQUET: parquet, HUB: hub_rows}
