"""List a source and cut it into splits, each of which is tokenized by itself (data/encode.py).

The splits depend on the source and the settings alone. A split is a group of small files, one file,
a range of bytes of a large file of text or JSON lines, row groups of a Parquet file, or a data file
of a data set of the hub. A compressed file is never cut.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import buckets
from data import readers
from data.readers import HUB, JSON_ARRAY, JSON_LINES, PARQUET, TEXT, Part
from data.settings import Prepare

STDLIB = "python-stdlib"
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HEAD_BYTES = 1 << 16  # of a file, from which its kind is known
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
EXPANDS = 4  # times as many bytes of text as of a compressed file, about
# Names of data that is read as text nowhere, unless by --as text.
OTHER_FORMATS = re.compile(
    r"\.(csv|tsv|arrow|feather|orc|avro|h5|npy|npz|zip|tar|tgz|7z|pdf|docx?|odt|epub|bin|pt|"
    r"safetensors|msgpack|db|so|exe|png|jpe?g|gif|webp|mp[34]|wav)"
)
KNOWN = (
    "text in UTF-8; JSON lines (.jsonl, .ndjson, .json); a JSON array (.json); Parquet (.parquet); "
    "each also as .gz, .bz2, .xz or .zst"
)


class SourceFile(NamedTuple):
    name: str  # path below --source
    path: str  # as it is opened
    size: int
    identity: str  # checksum of its ends; of an object in a bucket its CRC32C


class Source(NamedTuple):
    splits: list[tuple[Part, ...]]
    settings: dict[str, Any]  # what decides the splits beside the settings of the preparation
    left_out: str  # files that are not read, in words


def open_source(config: Prepare) -> Source:
    """Raises ValueError where there is nothing to read, or a file of an unknown kind."""
    if config.source.startswith(readers.HUGGING_FACE):
        count = readers.hub(config).num_shards
        parts = [Part(config.hf_split, config.source, HUB, begin=n) for n in range(count)]
        return Source([(part,) for part in parts], {"files": count}, "")
    files = sorted(in_bucket(config) if buckets.is_bucket(config.source) else on_disk(config))
    if not files:
        raise ValueError(
            f"--source {config.source} holds no file (--glob {config.glob}): expected {STDLIB}, a "
            f"folder, a file, either in a bucket, or {readers.HUGGING_FACE}NAME. Use --source "
            f"{STDLIB}, which every machine has."
        )
    chosen, left_out = by_kind(files, config)
    size = int(min(config.split_mb * 2**20, 2**62))
    parts = [part for file, part in chosen for part in cut(file, part, size, config)]
    listing = [(file.name, file.size, file.identity) for file, _ in chosen]
    settings = {
        "files": len(listing),
        "files_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
    }
    if config.source == STDLIB:
        settings["python"] = sys.version.split()[0]
    return Source(list(grouped(parts, size)), settings, left_out)


# --- files ----------------------------------------------------------------------------------------


def on_disk(config: Prepare) -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib") if config.source == STDLIB else config.source)
    if config.source == STDLIB:
        found = library(root)
    elif root.is_file():
        root, found = root.parent, iter([root])
    else:
        chosen = matcher(config.glob)
        found = (path for path in walk(root) if chosen(path.relative_to(root).as_posix()))
    for path in found:
        name = path.relative_to(root).as_posix()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield SourceFile(name, str(path), size, readers.ends_checksum(file, size))


def walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Files below a folder that are not hidden. Symbolic links are followed.

    Raises  ValueError for a link to a folder above it, or to nothing.
    """
    if not folder.is_dir():
        return
    stat = folder.stat()
    here = (stat.st_dev, stat.st_ino)
    if here in above:
        raise ValueError(f"{folder} is a link to a folder above it. Remove it, or use --glob.")
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from walk(path, (*above, here))
        elif path.is_file():
            yield path
        elif path.is_symlink():
            raise ValueError(f"{path} is a link to {os.readlink(path)}, which is not there.")


def library(root: Path) -> Iterator[Path]:
    """Python files but tests, installed packages, and what each build of Python generates for
    itself.
    """
    for folder, below, names in os.walk(root):
        below[:] = set(below) - NOT_SOURCE
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def in_bucket(config: Prepare) -> Iterator[SourceFile]:
    """The object that --source names, or those below it."""
    root, _, last = config.source.rstrip("/").rpartition("/")
    if root == buckets.SCHEME.rstrip("/"):  # a whole bucket
        root, last = config.source.rstrip("/"), ""
    chosen, below = matcher(config.glob), f"{last}/" if last else ""
    for name, (size, crc32c) in buckets.Prefix(root).found(last).items():
        inside = PurePosixPath(name).name if name == last else name.removeprefix(below)
        below_it = name.startswith(below) and chosen(inside) and not name.endswith("/")
        if (name == last or below_it) and "/." not in f"/{inside}":
            yield SourceFile(inside, f"{root}/{name}", size, crc32c)


def matcher(glob: str) -> Any:
    from fsspec.utils import glob_translate

    return re.compile(glob_translate(glob)).match


# --- kinds ----------------------------------------------------------------------------------------


def by_kind(files: list[SourceFile], config: Prepare) -> tuple[list[tuple[SourceFile, Part]], str]:
    """(files with all of each as a part, what is left out in words).

    Where some files hold rows, as JSON lines or Parquet do, plain text beside them, as a README, is
    not read. Raises ValueError for a kind that is not known, and for text with --chat.
    """
    parts = [(file, part_of(file, config)) for file in files]
    rows = any(part.kind in readers.ROWS for _, part in parts)
    unknown = [file.path for file, part in parts if not part.kind]
    if unknown and not (rows or config.skip_bad):
        raise ValueError(
            f"{unknown[0]} is of no kind that is known{more(unknown)}. Known are {KNOWN}. Leave "
            "others out by --glob or --skip-bad, or read all files as text by --as text."
        )
    if not rows and config.kind == "auto" and all(".json" in file.name.lower() for file in files):
        raise ValueError(
            f"{files[0].path} is one JSON object{more([file.path for file in files])}: expected an "
            "object per line, or an array of them. Convert it, or read it as text by --as text."
        )
    if config.chat and not rows:
        raise ValueError(
            f"--chat reads conversations, a line of JSON or a row each, and --source "
            f"{config.source} has {files[0].path}. Use --source chat.jsonl, or --glob "
            "'**/*.jsonl' for a folder; without --chat it is plain text."
        )
    wanted = readers.ROWS if rows else {TEXT}
    chosen = [(file, part) for file, part in parts if part.kind in wanted]
    others = [file.name for file, part in parts if part.kind not in wanted]
    if not others:
        return chosen, ""
    what = "plain text or of an unknown kind, beside files with rows" if rows else "of unknown kind"
    return chosen, f"{len(others)} files are left out, as they are {what}: {listed(others)}"


def more(paths: list[str]) -> str:
    return f", nor are {len(paths) - 1} others" * (len(paths) > 1)


def listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + ", .." * (len(names) > 5)


def part_of(file: SourceFile, config: Prepare) -> Part:
    """All of a file. Its kind is what its name says, or else its content; "" is unknown."""
    path = PurePosixPath(file.name.lower())
    compression = COMPRESSIONS.get(path.suffix, "")
    suffix = PurePosixPath(path.stem).suffix if compression else path.suffix
    part = Part(file.name, file.path, TEXT, compression, size=file.size, identity=file.identity)
    if config.kind == TEXT or config.source == STDLIB:
        return part
    if suffix == ".parquet":
        kind = PARQUET
    elif OTHER_FORMATS.fullmatch(suffix):
        kind = ""
    elif suffix in (".json", ".jsonl", ".ndjson") or not suffix[1:].isalpha():
        kind = kind_of(head(part), named=suffix in (".jsonl", ".ndjson"))
    else:  # .rs, .tcl, ..
        named = suffix in (".txt", ".md", ".rst", ".tex", ".py")
        kind = TEXT if named or b"\0" not in head(part) else ""
    return part._replace(kind=kind)


def head(part: Part) -> bytes:
    """The first bytes of its text; none where it cannot be unpacked, which its reader says."""
    with contextlib.suppress(readers.Bad), readers.reading(part), readers.opened(part) as (file, _):
        return file.read(HEAD_BYTES)
    return b""


def kind_of(content: bytes, named: bool) -> str:
    """Of content whose name does not say it; `named` as JSON lines."""
    text = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if content.startswith(b"PAR1"):
        return PARQUET
    if text.startswith(b"["):
        return JSON_ARRAY
    first = text.split(b"\n", 1)[0].strip()
    with contextlib.suppress(ValueError):
        if text.startswith(b"{") and (
            len(text) == len(first) >= HEAD_BYTES // 2 or json.loads(first)
        ):
            return JSON_LINES
    if named:
        return JSON_LINES
    return "" if b"\0" in content else TEXT


# --- splits ---------------------------------------------------------------------------------------


def cut(file: SourceFile, part: Part, size: int, config: Prepare) -> Iterator[Part]:
    """A file in parts of about `size` bytes, where it is larger and can be cut."""
    if part.kind == PARQUET and file.size > size:
        yield from readers.row_group_parts(part, size, config)
    elif part.kind in (TEXT, JSON_LINES) and file.size > size and not part.compression:
        begins = [*range(0, file.size, size), None]
        for begin, end in itertools.pairwise(begins):
            yield part._replace(begin=begin, end=end, size=(end or file.size) - begin)
    else:
        yield part


def grouped(parts: Iterable[Part], size: int) -> Iterator[tuple[Part, ...]]:
    """Neighbours together, up to `size` bytes of text."""
    group: list[Part] = []
    total = 0
    for part in parts:
        text = part.size * (EXPANDS if part.compression else 1)
        if group and total + text > size:
            yield tuple(group)
            group, total = [], 0
        group.append(part)
        total += text
    if group:
        yield tuple(group)


# --- whole documents ------------------------------------------------------------------------------


class Document(NamedTuple):
    name: str
    position: int
    text: str


def documents(config: Prepare) -> Iterator[Document]:
    """All documents with text, for who wants them whole."""
    left_out: Counter[str] = Counter()
    uncut = dataclasses.replace(config, split_mb=math.inf)
    for part in itertools.chain(*open_source(uncut).splits):
        for found in readers.documents(part, config, left_out=left_out):
            if text := "".join(piece.text for piece in found.pieces):
                yield Document(found.name, found.position, text)
