"""List the files of a source and divide them into splits (tokenized by data/encode.py).

The splits depend on the source and the settings alone. A split is a group of small files, one
file, or a part of a large one: a byte range of text or JSON lines, or row groups of Parquet. Of a
hub data set each data file is a split. A compressed file is never divided.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fsspec.utils import glob_translate

from data import readers
from data.readers import HUB, JSON_ARRAY, JSON_LINES, PARQUET, TEXT, FilePart, InputError
from data.settings import Prepare
from runtime import storage
from utils import ConfigError

STDLIB = "python-stdlib"
HIDDEN = r"\..*"
# Of the standard library: tests, installed packages, and what each build of Python generates.
NOT_SOURCE = rf"{HIDDEN}|tests?|idle_test|(site|dist)-packages|__pycache__|_sysconfigdata.*"
HEAD_BYTES = 1 << 16  # of a file, to detect its kind
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
EXPANSION = 4  # estimated bytes of text per byte of a compressed file
MOST_UNREAD = 0.2  # of the bytes of a folder with rows; a README or a license has less
TEXTS, LINES = (".txt", ".md", ".rst", ".tex", ".py"), (".jsonl", ".ndjson")
KINDS = {".parquet": PARQUET, ".csv": "", ".tsv": "", **dict.fromkeys(TEXTS, TEXT)}


class Source(NamedTuple):
    splits: list[tuple[FilePart, ...]]
    settings: dict[str, Any]  # what determines the splits besides the preparation's settings
    left_out: str  # message about files that are not read


def open_source(config: Prepare) -> Source:
    """Raises ConfigError for a source without files, or with a file of unknown kind."""
    if config.source.startswith(readers.HUGGING_FACE):
        numbers = range(readers.hub(config).num_shards)
        name = f"{config.source}, file"
        splits = [(FilePart(config.hf_split, f"{name} {n}", HUB, begin=n),) for n in numbers]
        return Source(splits, {"files": len(splits)}, "")
    files = sorted(in_bucket(config) if storage.is_remote(config.source) else on_disk(config))
    if not files:
        raise ConfigError(
            f"--source {config.source} holds no file (--glob {config.glob}): expected a file, a "
            f"folder, either in a bucket, {readers.HUGGING_FACE}NAME, or {STDLIB}. Use --source "
            f"{STDLIB}, which every machine has."
        )
    files, left_out = select_kinds([detect_kind(file, config) for file in files], config)
    size = max(1 + len(readers.BOM), int(config.split_mb * 2**20))
    parts = itertools.chain.from_iterable(divide(file, size, config) for file in files)
    listing = json.dumps([(file.name, file.size, file.identity) for file in files])
    digest = hashlib.sha256(listing.encode()).hexdigest()
    splits = group(parts, size)
    settings = {"files": len(files), "files_sha256": digest, "splits": len(splits)}
    return Source(splits, settings, left_out)


def on_disk(config: Prepare) -> Iterator[FilePart]:
    root, exclude, glob = Path(config.source), HIDDEN, config.glob
    if config.source == STDLIB:
        root, exclude, glob = Path(sysconfig.get_path("stdlib")), NOT_SOURCE, "**/*.py"
    matches = re.compile(glob_translate(glob)).match
    for path in walk(root, re.compile(exclude)):
        name = path.name if path == root else path.relative_to(root).as_posix()
        if path == root or matches(name):
            size, checksum = readers.size_and_checksum(str(path))
            yield FilePart(name, str(path), size=size, identity=checksum)


def walk(path: Path, exclude: re.Pattern[str], above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield a file, or the files below a folder whose names do not match `exclude`.

    Follows symbolic links. Raises ConfigError for a broken link or one to a folder above it.
    """
    if path.is_dir():
        here = path.resolve()
        if here in above:
            raise ConfigError(f"{path} is a link to a folder above it. Remove it.")
        for below in path.iterdir():
            if not exclude.fullmatch(below.name):
                yield from walk(below, exclude, (*above, here))
    elif path.is_file():
        yield path
    elif path.is_symlink():
        raise ConfigError(
            f"{path} is a link to {os.readlink(path)}, which does not exist. Remove it."
        )


def in_bucket(config: Prepare) -> Iterator[FilePart]:
    """Yield the object that --source names, or those below it."""
    scheme, _, path = config.source.partition("://")
    bucket, _, source = path.strip("/").partition("/")
    root, folder = f"{scheme}://{bucket}", f"{source}/" if source else ""
    matches = re.compile(glob_translate(config.glob)).match
    for path, (size, crc32c) in storage.at(root).files(source).items():
        name = PurePosixPath(path).name if path == source else path.removeprefix(folder)
        below = path.startswith(folder) and not path.endswith("/") and "/." not in f"/{name}"
        if path == source or (below and matches(name)):
            yield FilePart(name, f"{root}/{path}", size=size, identity=crc32c)


def select_kinds(files: list[FilePart], config: Prepare) -> tuple[list[FilePart], str]:
    """Return (files to read, message about the others). Files with rows exclude plain text.

    Raises  ConfigError for a file of unknown kind, for text with --chat, and for more text beside
            files with rows than a README and a license have.
    """
    with_rows = any(file.kind in readers.READERS for file in files)
    wanted = set(readers.READERS) if with_rows else {TEXT}
    if config.kind == "auto" and all(".json" in file.name.lower() for file in files):
        wanted.discard(TEXT)  # a JSON object per file is text only beside files of code
    others = [file for file in files if file.kind not in wanted]
    if others and not (with_rows or config.skip_bad):
        raise ConfigError(
            f"{others[0].path} is of unknown kind ({len(others)} of {len(files)} files). Supported "
            "are text in UTF-8; JSON lines (.jsonl, .ndjson, .json), an object per line; a JSON "
            "array (.json); Parquet; each also as .gz, .bz2, .xz or .zst. Leave others out by "
            "--glob or --skip-bad, or read all files as text by --as text."
        )
    if config.chat and not with_rows:
        raise ConfigError(
            f"--chat reads conversations, one per line of JSON or row, not {files[0].path}. Use "
            "--source chat.jsonl, or --glob '**/*.jsonl'."
        )
    unread = sum(file.size for file in others if file.kind == TEXT)
    if unread > MOST_UNREAD * sum(file.size for file in files) and not config.skip_bad:
        first = next(file for file in others if file.kind == TEXT)
        raise ConfigError(
            f"{config.source} has files with rows and files of plain text, such as {first.name}. "
            "One call reads one kind. Choose it by --glob, as --glob '**/*.jsonl' or --glob "
            "'**/*.txt', and prepare the other into another folder (docs/data.md, mixtures). "
            "--skip-bad leaves plain text out."
        )
    names = ", ".join(file.name for file in others[:5]) + ", .." * (len(others) > 5)
    why = "are left out, as they are plain text beside files with rows, or of unknown kind"
    left_out = f"{len(others)} files {why}: {names}" if others else ""
    return [file for file in files if file.kind in wanted], left_out


def detect_kind(file: FilePart, config: Prepare) -> FilePart:
    """Set kind and compression, from the name or else from the content."""
    path = PurePosixPath(file.name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    suffix = PurePosixPath(path.stem).suffix if compression else path.suffix
    file = file._replace(compression=compression)
    if config.kind == TEXT or config.source == STDLIB:
        return file._replace(kind=TEXT)
    if suffix in KINDS:
        return file._replace(kind=KINDS[suffix])
    try:
        with readers.damage_as_input_error(file), readers.open_part(file, HEAD_BYTES) as content:
            return file._replace(kind=kind_of(content.read(HEAD_BYTES), suffix))
    except InputError:
        if not config.skip_bad:
            raise
        return file._replace(kind=JSON_LINES if "json" in suffix else TEXT)  # counted when read


def kind_of(content: bytes, suffix: str) -> str:
    """Return the kind of a file that starts with these bytes."""
    text = content.removeprefix(readers.BOM).lstrip()
    if content.startswith(b"PAR1"):
        return PARQUET
    if suffix in (".json", *LINES) or not suffix[1:].isalpha():  # not .rs, .toml, ..
        if text.startswith(b"[") and ("json" in suffix or text[1:].lstrip().startswith(b"{")):
            return JSON_ARRAY
        if suffix in LINES or is_json_line(text):
            return JSON_LINES
    return "" if b"\0" in content else TEXT


def is_json_line(text: bytes) -> bool:
    """Return whether text begins with an object on one line, perhaps longer than was read."""
    line, line_end, _ = text.partition(b"\n")
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(line), dict)
    return line.startswith(b"{") and not line_end and len(line) > HEAD_BYTES // 2


def divide(file: FilePart, size: int, config: Prepare) -> Iterator[FilePart]:
    """Yield parts of `size` bytes. With --skip-bad a text stays whole, to be left out whole."""
    kinds = (JSON_LINES, PARQUET) if config.skip_bad else (JSON_LINES, PARQUET, TEXT)
    divisible = file.kind in kinds and not file.compression
    begins = range(0, max(1, file.size), size if divisible else file.size + 1)
    for begin, end in itertools.pairwise([*begins, math.inf]):
        yield file._replace(begin=begin, end=end, size=int(min(end, file.size)) - begin)


def group(parts: Iterable[FilePart], size: int) -> list[tuple[FilePart, ...]]:
    """Group neighbours, up to `size` bytes of text."""
    groups: list[list[FilePart]] = []
    total = 0
    for part in parts:
        text = part.size * (EXPANSION if part.compression else 1)
        if not groups or total + text > size:
            groups.append([])
            total = 0
        groups[-1].append(part)
        total += text
    return [tuple(parts) for parts in groups]
