"""How fast text becomes tokens; a part of benchmark.py.

    ./run.sh python benchmark.py tokenize                          sample's tokenizer
    ./run.sh python benchmark.py tokenize --tokenizer cl100k_base --mb 40
    ./run.sh python benchmark.py tokenize --help                   its flags

tiktoken alone, in one process and in two at once, and data/prepare.py with one worker and with two,
on the same text, in turns. Alone it is called with batches of texts and with one text after the
other, which are in memory, and its ids are thrown away; the preparation is the whole command, which
reads JSON lines and writes shards. What it takes to start (imports, tokenizer, workers) does not
grow with the text and is told apart: the command runs on a part of the text and on all of it, and
the difference is its speed.
"""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken
import tyro
from rich.console import Console
from rich.table import Table

from benchmark import spread
from data.encode import PIECE_CHARACTERS
from data.settings import Prepare
from data.sources import STDLIB, documents
from data.tokenizer import load_tokenizer
from manifest import INDEX, read_manifest

PREPARE = Path(__file__).with_name("data") / "prepare.py"
OURS = "data/prepare.py"
BATCH_CHARACTERS = 1_000_000  # that tiktoken is given at a time
SPLIT_MB = "1"  # so that a part of the text too keeps two workers busy
PART = 8  # of the text, one in so many is prepared to learn what a start takes
LEAST = 0.85  # of tiktoken alone that the preparation should reach
PROCESSES = (1, 2)
# A batch's ids are kept until all of it is done, and a text's are not.
WAYS: dict[str, Callable[[tiktoken.Encoding, list[str]], Iterable[list[int]]]] = {
    "encode_ordinary_batch": lambda encoding, batch: encoding.encode_ordinary_batch(
        batch, num_threads=1
    ),
    "encode_ordinary": lambda encoding, batch: map(encoding.encode_ordinary, batch),
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py tokenize`."""

    source: str = ""  # as of data/prepare.py; empty: the standard library, then installed packages
    mb: float = 48  # of text that is taken, where there is as much
    rounds: int = 5  # each measures everything once
    tokenizer: str = "sample"  # sample, or a name of tiktoken's


class Speed(NamedTuple):
    """Of making tokens, also by the CPU seconds of all processes, which other work moves less."""

    per_s: float
    per_cpu_s: float
    start_s: float = 0  # before the first token


@dataclass(frozen=True)
class Round:
    """What one round found, by way and number of processes or workers."""

    speeds: dict[tuple[str, int], Speed]

    def ratio(self, way: str, processes: int, of: str = "per_s") -> float:
        ours, theirs = self.speeds[OURS, processes], self.speeds[way, processes]
        return getattr(ours, of) / getattr(theirs, of)

    def __str__(self) -> str:
        told = (f"{way} {n}: {found.per_s / 1e6:.2f}" for (way, n), found in self.speeds.items())
        return f"M tokens/s of {', '.join(told)}"


# --- text -----------------------------------------------------------------------------------------


def texts(source: str) -> Iterator[str]:
    """Documents of a source, or Python files that every machine with this environment has."""
    yield from (text for _, text in documents(Prepare(source=source or STDLIB, out="")))
    if not source:
        for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            yield path.read_text(errors="replace")


def write_text(flags: Flags, whole: Path, part: Path) -> tuple[int, int]:
    """(documents, bytes) of `whole`, as JSON lines; `part` has the first of them."""
    limit, done, number = flags.mb * 1e6, 0, 0
    with whole.open("w") as all_lines, part.open("w") as first_lines:
        for text in filter(None, texts(flags.source)):
            if done >= limit:
                break
            line = json.dumps({"text": text}) + "\n"
            all_lines.write(line)
            if done < limit / PART:
                first_lines.write(line)
            done, number = done + len(text.encode(errors="replace")), number + 1
    return number, done


@functools.cache
def batches(file: Path) -> list[list[str]]:
    """Pieces of texts as the preparation cuts them, some together."""
    found: list[list[str]] = []
    room = 0
    for _, text in documents(Prepare(source=str(file), out="")):
        for begin in range(0, len(text), PIECE_CHARACTERS):
            if room <= 0:
                found.append([])
                room = BATCH_CHARACTERS
            found[-1].append(text[begin : begin + PIECE_CHARACTERS])
            room -= len(found[-1][-1])
    return found


# --- what is measured -----------------------------------------------------------------------------


together: Any = None  # where processes wait for each other; of this process


def will_wait(barrier: Any) -> None:
    global together
    together = barrier


def alone(tokenizer: str, file: Path, way: str, waits: bool) -> Speed:
    """Of bare tiktoken with one thread, in this process."""
    encoding, found, tokens = load_tokenizer(tokenizer), batches(file), 0
    if waits:
        together.wait()
    start, cpu = time.perf_counter(), time.process_time()
    for batch in found:
        tokens += sum(map(len, WAYS[way](encoding, batch)))
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return Speed(tokens / seconds, tokens / cpu_s)


class Taken(NamedTuple):
    """By one preparation."""

    tokens: int
    seconds: float
    cpu_s: float  # of it and its workers


def prepared(tokenizer: str, file: Path, workers: int) -> Taken:
    """By data/prepare.py from its start to its end."""
    with tempfile.TemporaryDirectory(dir=file.parent) as out:
        command = [sys.executable, PREPARE, "--source", file, "--out", out]
        command += ["--tokenizer", tokenizer, "--workers", str(workers), "--split-mb", SPLIT_MB]
        start, cpu = time.perf_counter(), children_s()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, cpu_s = time.perf_counter() - start, children_s() - cpu
        splits = [read_manifest(index.parent) for index in Path(out).glob(f"*/{INDEX}")]
    # End-of-text is no token of text: tiktoken alone does not make it.
    tokens = sum(split.tokens - split.documents for split in splits)
    return Taken(tokens, seconds, cpu_s)


def children_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def steady(part: Taken, whole: Taken) -> Speed:
    """What the whole took more than a part of it, and so without the start.

    Raises  ValueError where it took no more.
    """
    tokens, seconds, cpu_s = (b - a for a, b in zip(part, whole, strict=True))
    if min(tokens, seconds, cpu_s) <= 0:
        raise ValueError(
            f"preparing {whole.tokens:,} tokens took no longer than {part.tokens:,}, as the start "
            f"takes most of it. Measure more text: --mb {Flags.mb:.0f}, or more of --source."
        )
    return Speed(tokens / seconds, tokens / cpu_s, part.seconds - part.tokens * seconds / tokens)


class Measured:
    """Rounds of a text."""

    def __init__(self, tokenizer: str, whole: Path, part: Path, pool: ProcessPoolExecutor):
        self.tokenizer, self.whole, self.part, self.pool = tokenizer, whole, part, pool

    def alone(self, way: str, processes: int) -> Speed:
        """The speeds of all together, whichever ends first."""
        one = functools.partial(alone, self.tokenizer, self.whole, way)
        found = [*self.pool.map(one, [processes > 1] * processes)]
        each = [speed.per_cpu_s for speed in found]
        return Speed(sum(speed.per_s for speed in found), statistics.harmonic_mean(each))

    def speed(self, way: str, processes: int) -> Speed:
        if way != OURS:
            return self.alone(way, processes)
        part, whole = (prepared(self.tokenizer, f, processes) for f in (self.part, self.whole))
        return steady(part, whole)

    def rounds(self, number: int) -> Iterator[Round]:
        """In one order and then in the other, so that a machine that becomes slower is fair."""
        # Not timed: the text and the table are read in both processes, and files from the disk.
        self.alone("encode_ordinary", 2)
        prepared(self.tokenizer, self.part, 2)
        order = [*itertools.product((*WAYS, OURS), PROCESSES)]
        for i in range(number):
            found = {key: self.speed(*key) for key in (order if i % 2 == 0 else order[::-1])}
            yield Round({key: found[key] for key in order})


def table(rounds: list[Round]) -> Table:
    """What was found."""
    found = Table("processes", "of", "M tokens/s", "preparation over it", "by CPU seconds")
    for n, way in itertools.product(PROCESSES, (*WAYS, OURS)):
        cells = [str(n), way, spread(r.speeds[way, n].per_s / 1e6 for r in rounds)]
        if way != OURS:
            cells += [spread(r.ratio(way, n, of) for r in rounds) for of in ("per_s", "per_cpu_s")]
        found.add_row(*cells)
    return found


def start(rounds: list[Round], workers: int) -> str:
    return spread(r.speeds[OURS, workers].start_s for r in rounds)


# --- the command ----------------------------------------------------------------------------------


def parse(arguments: list[str]) -> Flags:
    """Raises ValueError for what cannot be measured."""
    flags = tyro.cli(Flags, args=arguments, description=__doc__)
    for name, default in (("mb", 48), ("rounds", 5)):
        if getattr(flags, name) <= 0:
            raise ValueError(
                f"--{name} {getattr(flags, name)} leaves nothing to measure. Use --{name} "
                f"{default}."
            )
    if not isinstance(load_tokenizer(flags.tokenizer), tiktoken.Encoding):
        raise ValueError(
            f"--tokenizer {flags.tokenizer} is none of tiktoken's, beside which the preparation is "
            "measured. Use --tokenizer sample."
        )
    return flags


def main(arguments: list[str]) -> None:
    """benchmark.py tokenize."""
    flags, rounds = parse(arguments), []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tokenize-") as folder, contextlib.ExitStack() as stack:
        whole, part = Path(folder) / "whole.jsonl", Path(folder) / "part.jsonl"
        number, size = write_text(flags, whole, part)
        print(
            f"{size / 1e6:.1f} MB in {number:,} documents, tokenizer {flags.tokenizer}, "
            f"{os.cpu_count()} cores",
            flush=True,
        )
        pool = ProcessPoolExecutor(2, context, will_wait, (context.Barrier(2),))
        measured = Measured(flags.tokenizer, whole, part, stack.enter_context(pool))
        for found in measured.rounds(flags.rounds):
            rounds.append(found)
            print(f"{len(rounds)} of {flags.rounds}: {found}", flush=True)
    Console(width=120).print(table(rounds))
    print(
        f"Medians of {len(rounds)} rounds (least to most); ratios are of each round, and at least "
        f"{LEAST} is wanted. Other work moves those by CPU seconds less. The preparation starts in "
        f"{start(rounds, 1)} s with one worker, {start(rounds, 2)} with two."
    )
