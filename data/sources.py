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
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fsspec.utils import glob_translate

import buckets
from data import readers
from data.readers import HUB, JSON_ARRAY, JSON_LINES, PARQUET, TEXT, Bad, Part, opened, reading
from data.settings import Prepare

STDLIB = "python-stdlib"
HIDDEN = r"\..*"
# Of the standard library: tests, installed packages, and what each build of Python generates.
NOT_SOURCE = rf"{HIDDEN}|tests?|idle_test|(site|dist)-packages|__pycache__|_sysconfigdata.*"
HEAD_BYTES = 1 << 16  # of a file, from which its kind is known
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
EXPANDS = 4  # times as many bytes of text as of a compressed file, about
TEXTS, LINES = (".txt", ".md", ".rst", ".tex", ".py"), (".jsonl", ".ndjson")
KINDS = {".parquet": PARQUET, ".csv": "", ".tsv": "", **dict.fromkeys(TEXTS, TEXT)}


class Source(NamedTuple):
    splits: list[tuple[Part, ...]]
    settings: dict[str, Any]  # what decides the splits beside the settings of the preparation
    left_out: str  # files that are not read, in words


def open_source(config: Prepare) -> Source:
    """Raises ValueError where there is nothing to read, or a file of an unknown kind."""
    if config.source.startswith(readers.HUGGING_FACE):
        numbers = range(readers.hub(config).num_shards)
        parts = [Part(config.hf_split, f"{config.source}, file {n}", HUB, begin=n) for n in numbers]
        return Source([(part,) for part in parts], {"files": len(parts)}, "")
    files = sorted(in_bucket(config) if buckets.is_bucket(config.source) else on_disk(config))
    if not files:
        raise ValueError(
            f"--source {config.source} holds no file (--glob {config.glob}): expected a file, a "
            f"folder, either in a bucket, {readers.HUGGING_FACE}NAME, or {STDLIB}. Use --source "
            f"{STDLIB}, which every machine has."
        )
    files, left_out = of_known_kinds([with_kind(file, config) for file in files], config)
    size = max(1 + len(readers.BOM), int(config.split_mb * 2**20))
    parts = itertools.chain.from_iterable(cut(file, size, config) for file in files)
    listing = json.dumps([(file.name, file.size, file.identity) for file in files])
    digest = hashlib.sha256(listing.encode()).hexdigest()
    splits = grouped(parts, size)
    settings = {"files": len(files), "files_sha256": digest, "splits": len(splits)}
    return Source(splits, settings, left_out)


def on_disk(config: Prepare) -> Iterator[Part]:
    root, without, glob = Path(config.source), HIDDEN, config.glob
    if config.source == STDLIB:
        root, without, glob = Path(sysconfig.get_path("stdlib")), NOT_SOURCE, "**/*.py"
    chosen = re.compile(glob_translate(glob)).match
    for path in walk(root, re.compile(without)):
        name = path.name if path == root else path.relative_to(root).as_posix()
        if path == root or chosen(name):
            size, checksum = readers.size_and_checksum(str(path))
            yield Part(name, str(path), size=size, identity=checksum)


def walk(path: Path, without: re.Pattern[str], above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """A file, or those below a folder but what is called as `without`. Symbolic links are followed.

    Raises  ValueError for a link to a folder above it, or to nothing.
    """
    if path.is_dir():
        here = path.resolve()
        if here in above:
            raise ValueError(f"{path} is a link to a folder above it. Remove it.")
        for below in path.iterdir():
            if not without.fullmatch(below.name):
                yield from walk(below, without, (*above, here))
    elif path.is_file():
        yield path
    elif path.is_symlink():
        raise ValueError(f"{path} is a link to {os.readlink(path)}, which is not there. Remove it.")


def in_bucket(config: Prepare) -> Iterator[Part]:
    """The object that --source names, or those below it."""
    bucket, _, source = config.source.removeprefix(buckets.SCHEME).strip("/").partition("/")
    root, folder = f"{buckets.SCHEME}{bucket}", f"{source}/" if source else ""
    chosen = re.compile(glob_translate(config.glob)).match
    for found, (size, crc32c) in buckets.Prefix(root).found(source).items():
        name = PurePosixPath(found).name if found == source else found.removeprefix(folder)
        below = found.startswith(folder) and not found.endswith("/") and "/." not in f"/{name}"
        if found == source or (below and chosen(name)):
            yield Part(name, f"{root}/{found}", size=size, identity=crc32c)


def of_known_kinds(files: list[Part], config: Prepare) -> tuple[list[Part], str]:
    """(files to read, in words which are left out, as is plain text beside files with rows).

    Raises  ValueError for a kind that is not known, and for text with --chat.
    """
    with_rows = any(file.kind in readers.READERS for file in files)
    wanted = set(readers.READERS) if with_rows else {TEXT}
    if config.kind == "auto" and all(".json" in file.name.lower() for file in files):
        wanted.discard(TEXT)  # but an object each, which only code beside it makes a text
    others = [file for file in files if file.kind not in wanted]
    if others and not (with_rows or config.skip_bad):
        raise ValueError(
            f"{others[0].path} is of no kind that is known ({len(others)} of {len(files)} files). "
            "Known are text in UTF-8; JSON lines (.jsonl, .ndjson, .json), an object per line; a "
            "JSON array (.json); Parquet; each also as .gz, .bz2, .xz or .zst. Leave others out by "
            "--glob or --skip-bad, or read all files as text by --as text."
        )
    if config.chat and not with_rows:
        raise ValueError(
            f"--chat reads conversations, a line of JSON or a row each, and not "
            f"{files[0].path}. Use --source chat.jsonl, or --glob '**/*.jsonl'."
        )
    names = ", ".join(file.name for file in others[:5]) + ", .." * (len(others) > 5)
    why = "are left out, as they are plain text beside files with rows, or of an unknown kind"
    left_out = f"{len(others)} files {why}: {names}" if others else ""
    return [file for file in files if file.kind in wanted], left_out


def with_kind(file: Part, config: Prepare) -> Part:
    """Its kind is what its name says, or else its content."""
    path = PurePosixPath(file.name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    suffix = PurePosixPath(path.stem).suffix if compression else path.suffix
    file = file._replace(compression=compression)
    if config.kind == TEXT or config.source == STDLIB:
        return file._replace(kind=TEXT)
    if suffix in KINDS:
        return file._replace(kind=KINDS[suffix])
    try:
        with reading(file), opened(file, HEAD_BYTES) as (text, _):
            return file._replace(kind=kind_of(text.read(HEAD_BYTES), suffix))
    except Bad:
        if not config.skip_bad:
            raise
        return file._replace(kind=JSON_LINES if "json" in suffix else TEXT)  # a reader counts it


def kind_of(content: bytes, suffix: str) -> str:
    """Of the first bytes of a file."""
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
    """Whether text begins with an object in one line, or with more of one than was read."""
    line, line_end, _ = text.partition(b"\n")
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(line), dict)
    return line.startswith(b"{") and not line_end and len(line) > HEAD_BYTES // 2


def cut(file: Part, size: int, config: Prepare) -> Iterator[Part]:
    """In parts of `size` bytes, where it can be cut. A text that may be bad is left out whole."""
    kinds = (JSON_LINES, PARQUET) if config.skip_bad else (JSON_LINES, PARQUET, TEXT)
    can_be_cut = file.kind in kinds and not file.compression
    begins = range(0, max(1, file.size), size if can_be_cut else file.size + 1)
    for begin, end in itertools.pairwise([*begins, math.inf]):
        yield file._replace(begin=begin, end=end, size=int(min(end, file.size)) - begin)


def grouped(parts: Iterable[Part], size: int) -> list[tuple[Part, ...]]:
    """Neighbours together, up to `size` bytes of text."""
    groups: list[list[Part]] = []
    total = 0
    for part in parts:
        text = part.size * (EXPANDS if part.compression else 1)
        if not groups or total + text > size:
            groups.append([])
            total = 0
        groups[-1].append(part)
        total += text
    return [tuple(group) for group in groups]


def documents(config: Prepare) -> Iterator[tuple[readers.Document, str]]:
    """All documents that have text, with it, of files that are not cut."""
    uncut = dataclasses.replace(config, split_mb=2**40)
    for part in itertools.chain(*open_source(uncut).splits):
        for document in readers.documents(part, config, left_out=Counter()):
            if text := "".join(piece.text for piece in document.pieces):
                yield document, text
