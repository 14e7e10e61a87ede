"""Measure the speed of reading shards from a disk and from an emulated bucket.

    ./run.sh python benchmark.py data

Reads batches alone, as the training loop does. Each response of the bucket is delayed by
`--delay_ms`. A run of configs/tiny.toml from that bucket shows the share of a step that it waits
for a batch. The time until the first batch compares few shards with many of the same tokens.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, parse_flags, spread
from data.manifest import DOCUMENT_RULE, INDEX, Manifest, index_text
from data.shards import ShardWriter
from data.tokenizer import load_tokenizer, table_sha256
from dataset import Dataset, Mixture
from runtime import jsonl
from runtime.console import log
from train import prefetch

LENGTHS = 256, 1024  # of sequences
BATCH_SIZE, HOST_ROWS = 4, 2  # when counting the requests of one of two hosts
# Targets
DISK_M_TOKENS_PER_S, BUCKET_M_TOKENS_PER_S, OPEN_MS, WAIT_PERCENT = 25, 3, 30, 1


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py data`."""

    tokens: int = 100_000_000  # in the shards on the disk
    bucket_tokens: int = 40_000_000  # in the shards in the bucket
    shards: int = 10
    many: int = 1_000  # shards with the same tokens, for the time to the first batch
    rows: int = 256  # of a batch
    rounds: int = 5
    delay_ms: float = 30.0  # added to each response of the bucket
    steps: int = 60  # of the run


def main(arguments: list[str]) -> None:
    flags = parse_flags(Flags, arguments, __doc__)
    table = Table("measurement", "median (minimum to maximum)", "target")
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        for row in measure(flags, Path(folder)):
            table.add_row(*row)
    Console(width=120).print(table)


def measure(flags: Flags, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (measurement, values, target)."""
    log(f"writing {flags.tokens:,} tokens to {flags.shards} and to {flags.many} shards")
    few = write_shards(folder / "few", flags.tokens, flags.shards)
    many = write_shards(folder / "many", flags.tokens, flags.many)
    for T in LENGTHS:
        yield rate_row("a disk", few, T, flags, DISK_M_TOKENS_PER_S)
    yield from start_rows(few, many, flags)
    small = write_shards(folder / "small", flags.bucket_tokens, flags.shards)
    with emulated_bucket(flags) as bucket:
        url = upload(bucket, small)
        for order in ("windows", "blocks"):
            for T in LENGTHS:
                yield rate_row("the bucket", url, T, flags, BUCKET_M_TOKENS_PER_S, order)
            yield requests_row(url, order)
        yield wait_row(url, flags, folder)


def write_shards(folder: Path, tokens: int, shards: int) -> Path:
    """Write random ids of the sample tokenizer."""
    tokenizer, rng = load_tokenizer("sample"), np.random.default_rng(0)
    writer = ShardWriter(str(folder), "shard", -(-tokens // shards), np.dtype(np.uint16))
    for start in range(0, tokens, 1 << 20):
        count = min(1 << 20, tokens - start)
        writer.add(rng.integers(0, tokenizer.n_vocab, count, dtype=np.uint16))
    writer.flush()
    manifest = Manifest(
        subset=folder.name,
        tokenizer="sample",
        tokenizer_sha256=table_sha256(tokenizer),
        vocab_size=tokenizer.n_vocab,
        end_of_text=tokenizer.eot_token,
        document_rule=DOCUMENT_RULE,
        dtype="uint16",
        documents=1,
        tokens=tokens,
        text_bytes=0,
        shards=writer.shards,
        command="",
        settings={},
    )
    (folder / INDEX).write_text(index_text(manifest), encoding="utf-8")
    return folder


def open_mixture(
    folder: Path | str, T: int, rows: int, seed: int = 0, order: str = "windows"
) -> Mixture:
    """Open a folder as a run does that reads no other one."""
    data = Dataset(folder, T, batch_size=rows, seed=seed, order=order)
    return Mixture({"": data}, [1.0], rows)


def rate_row(
    source: str, folder: Path | str, T: int, flags: Flags, target: float, order: str = "windows"
) -> tuple[str, str, str]:
    """Measure the rate of each round: an epoch, or 200 batches of a longer one."""
    found, rows = [], np.arange(flags.rows)
    for seed in range(flags.rounds):
        data = open_mixture(folder, T, flags.rows, seed, order)
        steps = min(max(data.windows // flags.rows, 1), 200)
        start = time.perf_counter()
        for _ in prefetch(partial(data.rows, rows=rows), range(steps)):  # as a run does
            pass
        found.append(steps * flags.rows * T / (time.perf_counter() - start) / 1e6)
    name = f"M tokens/s from {source}, {flags.rows} rows of {T}, order {order}"
    return name, spread(found), f"at least {target}"


def requests_row(url: str, order: str) -> tuple[str, str, str]:
    """Count the requests of a host that reads HOST_ROWS rows of every batch."""
    data = open_mixture(url, LENGTHS[0], BATCH_SIZE, order=order)
    steps = min(data.windows // BATCH_SIZE, 500)
    for step in range(steps):
        data.rows(step, np.arange(HOST_ROWS))
    name = f"requests per step, {HOST_ROWS} of {BATCH_SIZE} rows of {LENGTHS[0]}, order {order}"
    return name, f"{data.parts[''].files[0].requests / steps:.3f}", ""


def start_rows(few: Path, many: Path, flags: Flags) -> Iterator[tuple[str, str, str]]:
    """Time the opening, and the first batch, of both folders in turns."""
    T, rows = LENGTHS[0], np.arange(flags.rows)
    ms: dict[tuple[str, int], list[float]] = defaultdict(list)
    for seed in range(4 * flags.rounds):
        for folder, shards in ((few, flags.shards), (many, flags.many)):
            start = time.perf_counter()
            data = open_mixture(folder, T, flags.rows, seed)
            ms["opened", shards].append(1e3 * (time.perf_counter() - start))
            data.rows(0, rows)
            ms["the first batch", shards].append(1e3 * (time.perf_counter() - start))
            del data  # now: the next time must not include it
    for (name, shards), values in ms.items():
        target = f"at most {OPEN_MS}" if (name, shards) == ("opened", flags.many) else ""
        yield f"ms until {name}, {shards} shards", spread(values), target


# --- the bucket -----------------------------------------------------------------------------------


@contextlib.contextmanager
def emulated_bucket(flags: Flags) -> Iterator[str]:
    """Start a bucket in another process, as a real one shares no thread with the reader."""
    command = [sys.executable, str(ROOT / "tests" / "fake_bucket.py"), f"{flags.delay_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            bucket = json.loads(server.stdout.readline())
            os.environ.update(bucket["environment"])
            yield bucket["url"]
        finally:
            server.terminate()


def upload(url: str, folder: Path) -> str:
    from runtime.buckets import Prefix  # late: the environment has the bucket's address by now

    prefix = Prefix(f"{url}/{folder.name}")
    for path in folder.glob("*.*"):
        prefix.write(path.name, path.read_bytes())
    return prefix.url


def wait_row(url: str, flags: Flags, folder: Path) -> tuple[str, str, str]:
    """Train, and return the waiting share of the steps after the first.

    The first step waits for a batch that no earlier step could hide.
    """
    log(f"training configs/tiny.toml for {flags.steps} steps, which takes some minutes")
    settings = {"run.dir": folder / "runs", "run.name": "waits", "train.steps": flags.steps}
    settings |= {"data.train": url, "data.val": url, "eval.sequences": 8}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "main.py", "--config", "configs/tiny.toml", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = jsonl.read(folder / "runs" / "waits" / "metrics.jsonl")
    steps = [record for record in records if "data_wait_s" in record][1:]
    share = sum(r["data_wait_s"] for r in steps) / sum(r["step_s"] for r in steps)
    log(f"waiting for batches takes {share:.2%} of the time of all these steps")
    percents = spread(100 * record["data_wait_s"] / record["step_s"] for record in steps)
    return "% of a step that a run waits", percents, f"at most {WAIT_PERCENT}"
