"""Compare the speed of data/prepare.py with that of tiktoken alone.

    ./run.sh python benchmark.py tokenize                       the tokenizer of the sample data
    ./run.sh python benchmark.py tokenize --tokenizer cl100k_base --mb 40

Both tokenize the same text in turns, with one process and with two. tiktoken gets texts in memory,
in batches or one by one, and its ids are discarded. The preparation is the complete command, which
reads JSON lines and writes shards. Its start (imports, tokenizer, workers) does not grow with the
text and is reported separately. For that, the command runs on a part of the text and on all of it,
and the difference is its speed.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tiktoken
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, parse_flags, spread
from data.encode import CHUNK_CHARACTERS
from data.manifest import INDEX, read_manifest
from data.settings import Prepare
from data.sources import STDLIB, documents
from data.tokenizer import load_tokenizer
from runtime.console import log
from utils import ConfigError

PREPARE = "data/prepare.py"
BATCH_CHARACTERS = 1_000_000  # of a tiktoken batch
SPLIT_MB = "1"  # small, so that a part of the text keeps two workers busy
PART = 8  # one part in so many measures the start of a preparation
TARGET = 0.85  # of tiktoken's speed
PROCESSES = (1, 2)
# A batch keeps the ids of all its texts until it is done.
METHODS: dict[str, Callable[[tiktoken.Encoding, list[str]], Iterable[list[int]]]] = {
    "encode_ordinary_batch": lambda encoding, batch: encoding.encode_ordinary_batch(
        batch, num_threads=1
    ),
    "encode_ordinary": lambda encoding, batch: map(encoding.encode_ordinary, batch),
}
Key = tuple[str, int]  # method or PREPARE, number of processes


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py tokenize`."""

    source: str = ""  # as for data/prepare.py; empty: standard library, then installed packages
    mb: float = 48  # of text, if the source has as much
    rounds: int = 5  # each measures everything once
    tokenizer: str = "sample"  # sample, or the name of a tiktoken encoding


# --- text -----------------------------------------------------------------------------------------


def texts(source: str) -> Iterator[str]:
    """Yield the documents of a source; by default Python files that every machine has."""
    yield from (text for _, text in documents(Prepare(source=source or STDLIB, out="")))
    if not source:
        for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            yield path.read_text(errors="replace")


def write_text(flags: Flags, whole: Path, part: Path) -> tuple[int, int]:
    """Write JSON lines to `whole`, and the first ones to `part`; return (documents, bytes)."""
    limit, size, number = flags.mb * 1e6, 0, 0
    with whole.open("w") as all_lines, part.open("w") as first_lines:
        for text in filter(None, texts(flags.source)):
            if size >= limit:
                break
            line = json.dumps({"text": text}) + "\n"
            all_lines.write(line)
            if size < limit / PART:
                first_lines.write(line)
            size, number = size + len(text.encode(errors="replace")), number + 1
    return number, size


@functools.cache
def batches(file: Path) -> list[list[str]]:
    """Return batches of chunks of texts, cut as the preparation cuts them."""
    found: list[list[str]] = [[]]
    size = 0
    for _, text in documents(Prepare(source=str(file), out="")):
        for start in range(0, len(text), CHUNK_CHARACTERS):
            if size >= BATCH_CHARACTERS:
                found.append([])
                size = 0
            found[-1].append(text[start : start + CHUNK_CHARACTERS])
            size += len(found[-1][-1])
    return found


# --- measuring ------------------------------------------------------------------------------------


def tiktoken_rate(tokenizer: str, file: Path, method: str) -> float:
    """Return tokens per second of tiktoken with one thread, in this process."""
    encoding, chunks = load_tokenizer(tokenizer), batches(file)
    start = time.perf_counter()
    tokens = sum(sum(map(len, METHODS[method](encoding, batch))) for batch in chunks)
    return tokens / (time.perf_counter() - start)


def prepare(tokenizer: str, file: Path, workers: int) -> tuple[int, float]:
    """Return (tokens, seconds) of data/prepare.py."""
    with tempfile.TemporaryDirectory(dir=file.parent) as out:
        command = [sys.executable, ROOT / PREPARE, "--source", file, "--out", out]
        command += ["--tokenizer", tokenizer, "--workers", str(workers), "--split-mb", SPLIT_MB]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        splits = [read_manifest(index.parent) for index in Path(out).glob(f"*/{INDEX}")]
    # tiktoken alone makes no end-of-text tokens.
    return sum(split.tokens - split.documents for split in splits), seconds


class Speed(NamedTuple):
    tokens_per_s: float
    start_s: float = 0.0  # before the first token


def without_start(part: tuple[int, float], whole: tuple[int, float]) -> Speed:
    """Return the speed on the text beyond the part, from (tokens, seconds) of both.

    Raises ConfigError if the whole took no longer.
    """
    tokens, seconds = (b - a for a, b in zip(part, whole, strict=True))
    if min(tokens, seconds) <= 0:
        raise ConfigError(
            f"preparing {whole[0]:,} tokens took no longer than {part[0]:,}, because the start "
            f"takes most of the time. Measure more text: --mb {Flags.mb:.0f}, or more of --source."
        )
    return Speed(tokens / seconds, part[1] - part[0] * seconds / tokens)


def measure(
    flags: Flags, whole: Path, part: Path, pool: ProcessPoolExecutor
) -> Iterator[dict[Key, Speed]]:
    """Yield the speeds of each round. Every second round runs in the opposite order."""

    def alone(method: str, processes: int) -> Speed:
        calls = [(flags.tokenizer, whole, method)] * processes
        return Speed(sum(pool.map(tiktoken_rate, *zip(*calls, strict=True))))

    # A warm-up: both processes of the pool read the text, and the files are in memory.
    alone("encode_ordinary", 2)
    prepare(flags.tokenizer, part, 2)
    keys = [*itertools.product((*METHODS, PREPARE), PROCESSES)]
    for number in range(flags.rounds):
        speeds = {}
        for method, n in keys[::-1] if number % 2 else keys:
            if method == PREPARE:
                taken = [prepare(flags.tokenizer, file, n) for file in (part, whole)]
                speeds[method, n] = without_start(*taken)
            else:
                speeds[method, n] = alone(method, n)
        yield {key: speeds[key] for key in keys}


def table(rounds: list[dict[Key, Speed]]) -> Table:
    found = Table("processes", "of", "M tokens/s", "preparation over it")
    for n, method in itertools.product(PROCESSES, (*METHODS, PREPARE)):
        rates = [speeds[method, n].tokens_per_s for speeds in rounds]
        cells = [str(n), method, spread(rate / 1e6 for rate in rates)]
        if method != PREPARE:
            ours = [speeds[PREPARE, n].tokens_per_s for speeds in rounds]
            cells.append(spread(a / b for a, b in zip(ours, rates, strict=True)))
        found.add_row(*cells)
    return found


def parse(arguments: list[str]) -> Flags:
    """Raise ConfigError for what cannot be measured."""
    flags = parse_flags(Flags, arguments, __doc__)
    for name in ("mb", "rounds"):
        if getattr(flags, name) <= 0:
            raise ConfigError(
                f"--{name} {getattr(flags, name)} leaves nothing to measure. Use --{name} "
                f"{getattr(Flags, name)}."
            )
    if not isinstance(load_tokenizer(flags.tokenizer), tiktoken.Encoding):
        raise ConfigError(
            f"--tokenizer {flags.tokenizer} is not a tokenizer of tiktoken, with which this "
            "benchmark compares. Use --tokenizer sample."
        )
    return flags


def main(arguments: list[str]) -> None:
    flags, rounds = parse(arguments), []
    with tempfile.TemporaryDirectory(prefix="tokenize-") as folder:
        whole, part = Path(folder) / "whole.jsonl", Path(folder) / "part.jsonl"
        number, size = write_text(flags, whole, part)
        log(
            f"{size / 1e6:.1f} MB in {number:,} documents, tokenizer {flags.tokenizer}, "
            f"{os.cpu_count()} cores"
        )
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            for speeds in measure(flags, whole, part, pool):
                rounds.append(speeds)
                rates = (f"{m} {n}: {s.tokens_per_s / 1e6:.2f}" for (m, n), s in speeds.items())
                log(f"round {len(rounds)} of {flags.rounds}, M tokens/s: {', '.join(rates)}")
    Console(width=120).print(table(rounds))
    starts = [spread(speeds[PREPARE, n].start_s for speeds in rounds) for n in PROCESSES]
    print(
        f"Medians of {len(rounds)} rounds (minimum to maximum). Ratios are within a round; the "
        f"target is at least {TARGET}. The preparation starts in {starts[0]} s with one worker and "
        f"in {starts[1]} s with two."
    )
