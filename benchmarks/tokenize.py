"""Compare the speed of data/prepare.py with that of tiktoken alone.

    ./run.sh python benchmark.py tokenize                       the tokenizer of the sample data
    ./run.sh python benchmark.py tokenize --tokenizer cl100k_base --source books

Both tokenize the same text in turns, with one process and with two. tiktoken gets texts in memory,
in batches, and its ids are discarded. The preparation is the complete command, which reads JSON
lines and writes shards. Its start (imports, tokenizer, workers) is reported separately: the time of
a preparation of one short text.
"""

import functools
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tiktoken
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, check_positive, parse_flags, spread
from data.manifest import INDEX, read_manifest
from data.settings import Prepare
from data.sources import STDLIB, documents
from data.tokenizer import load_tokenizer
from runtime.console import log
from utils import ConfigError

BATCH_TEXTS = 64  # of a tiktoken batch, which keeps the ids of all its texts until it is done
SPLIT_MB = "1"  # small, so that two workers stay busy until the end
TARGET = 0.85  # of tiktoken's speed
PROCESSES = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py tokenize`."""

    source: str = ""  # as for data/prepare.py; empty: standard library, then installed packages
    mb: float = 48  # of text, if the source has as much
    rounds: int = 5  # each measures everything once
    tokenizer: str = "sample"  # sample, or the name of a tiktoken encoding


@dataclass(frozen=True)
class Round:
    """Speeds of one number of processes, measured one after the other."""

    tiktoken: float  # tokens/s
    preparation: float  # tokens/s after the start
    start_s: float


def texts(source: str) -> Iterator[str]:
    """Yield the documents of a source; by default Python files that every machine has."""
    yield from (text for _, text in documents(Prepare(source=source or STDLIB, out="")))
    if not source:
        for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            yield path.read_text(encoding="utf-8", errors="replace")


def write_text(flags: Flags, file: Path) -> int:
    """Write JSON lines, and return the bytes of their texts."""
    size = 0
    with file.open("w", encoding="utf-8") as lines:
        for text in filter(None, texts(flags.source)):
            if size >= flags.mb * 1e6:
                break
            lines.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode(errors="replace"))
    return size


@functools.cache
def read_text(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def tiktoken_rate(tokenizer: str, file: Path) -> float:
    """Return tokens/s of tiktoken with one thread, in this process."""
    encoding, found = load_tokenizer(tokenizer), read_text(file)
    start, tokens = time.perf_counter(), 0
    for i in range(0, len(found), BATCH_TEXTS):
        ids = encoding.encode_ordinary_batch(found[i : i + BATCH_TEXTS], num_threads=1)
        tokens += sum(map(len, ids))
    return tokens / (time.perf_counter() - start)


def prepare(tokenizer: str, file: Path, workers: int) -> tuple[int, float]:
    """Return (tokens, seconds) of data/prepare.py."""
    with tempfile.TemporaryDirectory(dir=file.parent) as out:
        command = [sys.executable, ROOT / "data/prepare.py", "--source", file, "--out", out]
        command += ["--tokenizer", tokenizer, "--workers", str(workers), "--split-mb", SPLIT_MB]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        subsets = [read_manifest(index.parent) for index in Path(out).glob(f"*/{INDEX}")]
    # tiktoken alone makes no end-of-text tokens.
    return sum(subset.tokens - subset.documents for subset in subsets), seconds


def measure(flags: Flags, file: Path, pool: ProcessPoolExecutor, processes: int) -> Round:
    """Raises ConfigError if the start takes most of the time."""
    calls = [(flags.tokenizer, file)] * processes
    alone = sum(pool.map(tiktoken_rate, *zip(*calls, strict=True)))
    short = file.with_name("short.jsonl")
    short.write_text(json.dumps({"text": "short"}) + "\n", encoding="utf-8")
    start_s = prepare(flags.tokenizer, short, processes)[1]
    tokens, seconds = prepare(flags.tokenizer, file, processes)
    if seconds < 2 * start_s:
        raise ConfigError(
            f"the start takes {start_s:.1f} of the {seconds:.1f} s of a preparation. Measure more "
            f"text: --mb {Flags.mb:.0f}, or more of --source."
        )
    return Round(alone, tokens / (seconds - start_s), start_s)


def table(rounds: dict[int, list[Round]]) -> Table:
    titles = ("processes", "tiktoken, M tokens/s", "preparation", "ratio", "start, s")
    found = Table(*titles, title="medians (minimum to maximum); ratios are within a round")
    for processes, rows in rounds.items():
        found.add_row(
            str(processes),
            spread(row.tiktoken / 1e6 for row in rows),
            spread(row.preparation / 1e6 for row in rows),
            spread(row.preparation / row.tiktoken for row in rows),
            spread(row.start_s for row in rows),
        )
    return found


def parse(arguments: list[str]) -> Flags:
    """Raise ConfigError for what cannot be measured."""
    flags = parse_flags(Flags, arguments, __doc__)
    check_positive(flags, "mb", "rounds")
    if not isinstance(load_tokenizer(flags.tokenizer), tiktoken.Encoding):
        raise ConfigError(
            f"--tokenizer {flags.tokenizer} is not a tokenizer of tiktoken, with which this "
            "benchmark compares. Use --tokenizer sample."
        )
    return flags


def main(arguments: list[str]) -> None:
    flags = parse(arguments)
    rounds: dict[int, list[Round]] = {processes: [] for processes in PROCESSES}
    with tempfile.TemporaryDirectory(prefix="tokenize-") as folder:
        file = Path(folder) / "text.jsonl"
        size = write_text(flags, file)
        log(f"{size / 1e6:.1f} MB, tokenizer {flags.tokenizer}, {os.cpu_count()} cores")
        with ProcessPoolExecutor(max(PROCESSES), multiprocessing.get_context("spawn")) as pool:
            pool.map(read_text, [file] * max(PROCESSES))
            for number, processes in itertools.product(range(flags.rounds), PROCESSES):
                rounds[processes].append(found := measure(flags, file, pool, processes))
                log(f"round {number + 1} of {flags.rounds}, {processes} processes: {found}")
    Console(width=120).print(table(rounds))
    print(f"The target is a ratio of at least {TARGET}.")
