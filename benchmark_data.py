"""What reading shards costs a run; a part of benchmark.py.

    ./run.sh python benchmark.py data            from a disk and an emulated bucket, all of it
    ./run.sh python benchmark.py data --help     its flags

Batches alone, as the loop asks for them, from shards on a disk and from an emulated bucket whose
every answer comes `--delay_ms` later; a run of configs/tiny.toml from that bucket, and the part of
its steps in which it waits for a batch; and how long it takes until the first batch is there, from
few shards and from many with the same tokens.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import metrics
from benchmark import spread
from data.shards import ShardWriter
from data.tokenizer import load_tokenizer, table_sha256
from dataset import Dataset
from loop import prefetch
from manifest import DOCUMENT_RULE, INDEX, Manifest, index_text
from metrics import say
from mixture import Mixture

ROOT = Path(__file__).resolve().parent
LENGTHS = 256, 1024  # of sequences
ROWS, HOST_ROWS = 4, 2  # of a batch, where requests are counted
WANTED_DISK, WANTED_BUCKET = 25e6, 3e6  # tokens/s
WANTED_WAIT, WANTED_OPEN_MS = 0.01, 30  # of a step's time; to open many shards


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `benchmark.py data`."""

    tokens: int = 100_000_000  # in the shards on the disk
    bucket_tokens: int = 40_000_000  # in those in the bucket
    shards: int = 10
    many: int = 1_000  # shards with the same tokens, to compare the start with
    rows: int = 256  # of a batch
    rounds: int = 5
    delay_ms: float = 30.0  # added to each answer of the bucket
    steps: int = 60  # of the run


def main(arguments: list[str]) -> None:
    flags = tyro.cli(Flags, args=arguments, prog="benchmark.py data")
    table = Table("what", "median (least to most)", "wanted")
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        for row in measured(flags, Path(folder)):
            table.add_row(*row)
    Console(width=120).print(table)


def measured(flags: Flags, folder: Path) -> Iterator[tuple[str, ...]]:
    """Rows of the table."""
    say(f"{flags.tokens:,} tokens are written to {flags.shards} and to {flags.many} shards")
    few = written(folder / "few", flags.tokens, flags.shards)
    many = written(folder / "many", flags.tokens, flags.many)
    for T in LENGTHS:
        what = f"M tokens/s from a disk, {flags.rows} rows of {T}"
        yield row(what, speeds(few, T, flags), WANTED_DISK)
    yield from starts(few, many, flags)
    small = written(folder / "small", flags.bucket_tokens, flags.shards)
    with emulated(flags) as bucket:
        url = uploaded(bucket, small)
        for order in ("windows", "blocks"):
            for T in LENGTHS:
                what = f"M tokens/s from the bucket, {flags.rows} rows of {T}, order {order}"
                found = speeds(url, T, flags, order)
                yield row(what, found, WANTED_BUCKET)
            yield requests(url, order, flags)
        yield waits(url, flags, folder)


def row(what: str, found: list[float], wanted: float) -> tuple[str, ...]:
    return what, spread(value / 1e6 for value in found), f"at least {wanted / 1e6:g}"


def written(folder: Path, tokens: int, shards: int) -> Path:
    """Shards with ids of the sample tokenizer, drawn at random."""
    tokenizer, rng = load_tokenizer("sample"), np.random.default_rng(0)
    writer = ShardWriter(str(folder), "shard", -(-tokens // shards), np.dtype(np.uint16))
    for begin in range(0, tokens, 1 << 20):
        count = min(1 << 20, tokens - begin)
        writer.add(rng.integers(0, tokenizer.n_vocab, count, dtype=np.uint16))
    writer.finish()
    manifest = Manifest(
        split=folder.name,
        tokenizer="sample",
        tokenizer_sha256=table_sha256(tokenizer),
        vocabulary=tokenizer.n_vocab,
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
    (folder / INDEX).write_text(index_text(manifest))
    return folder


def opened(folder: Path | str, T: int, rows: int, seed: int = 0, order: str = "windows") -> Mixture:
    """As a run has it that reads no other folder."""
    data = Dataset(folder, T, sequences=rows, seed=seed, order=order)
    return Mixture({"": data}, [1.0], rows)


def speeds(folder: Path | str, T: int, flags: Flags, order: str = "windows") -> list[float]:
    """Tokens per second of each round: an epoch, or 200 batches if that has more."""
    found, rows = [], np.arange(flags.rows)
    for number in range(flags.rounds):
        data = opened(folder, T, flags.rows, number, order)
        steps = min(max(data.windows // flags.rows, 1), 200)
        began = time.perf_counter()
        for _ in prefetch(partial(data.rows, rows=rows), range(steps)):  # as a run does
            pass
        found.append(steps * flags.rows * T / (time.perf_counter() - began))
    return found


def requests(url: str, order: str, flags: Flags) -> tuple[str, ...]:
    """Of a host that reads HOST_ROWS of every batch."""
    data = opened(url, LENGTHS[0], ROWS, order=order)
    steps = min(data.windows // ROWS, 500)
    for step in range(steps):
        data.rows(step, np.arange(HOST_ROWS))
    what = f"requests per step, {HOST_ROWS} of {ROWS} rows of {LENGTHS[0]}, order {order}"
    return what, f"{data.parts[''].files[0].requests / steps:.3f}", ""


def starts(few: Path, many: Path, flags: Flags) -> Iterator[tuple[str, ...]]:
    """Opening alone, and until the first batch is there, in turns."""
    T, rows = LENGTHS[0], np.arange(flags.rows)
    opening: dict[Path, list[float]] = {few: [], many: []}
    batch: dict[Path, list[float]] = {few: [], many: []}
    for seed in range(4 * flags.rounds):
        for folder in (few, many):
            began = time.perf_counter()
            data = opened(folder, T, flags.rows, seed)
            opening[folder].append(time.perf_counter() - began)
            data.rows(0, rows)
            batch[folder].append(time.perf_counter() - began)
            del data  # or the next one's time has the end of this one in it
    for what, found in (("opened", opening), ("the first batch is there", batch)):
        for folder, shards in ((few, flags.shards), (many, flags.many)):
            wanted = f"at most {WANTED_OPEN_MS}" if found is opening and folder is many else ""
            milliseconds = spread(1e3 * s for s in found[folder])
            yield f"ms until {what}, {shards} shards", milliseconds, wanted


# --- the bucket -----------------------------------------------------------------------------------


@contextlib.contextmanager
def emulated(flags: Flags) -> Iterator[str]:
    """A bucket in another process, as it shares no core with the reader in earnest."""
    command = [sys.executable, str(ROOT / "tests" / "bucket.py"), f"{flags.delay_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            told = json.loads(server.stdout.readline())
            os.environ.update(told["environment"])
            yield told["url"]
        finally:
            server.terminate()


def uploaded(url: str, folder: Path) -> str:
    from buckets import Prefix  # late, as the environment says where it is

    there = Prefix(f"{url}/{folder.name}")
    for path in folder.glob("*.*"):
        there.write(path.name, path.read_bytes())
    return there.url


def waits(url: str, flags: Flags, folder: Path) -> tuple[str, ...]:
    """Of a run, from its second step on: the first waits for what no step before it could hide."""
    say(f"a run of configs/tiny.toml over {flags.steps} steps, which takes some minutes")
    where = {"run.dir": folder / "runs", "run.name": "waits"}
    where |= {"data.train": url, "data.val": url, "train.steps": flags.steps, "eval.sequences": 8}
    words = [word for name, value in where.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "main.py", "--config", "configs/tiny.toml", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = metrics.read(folder / "runs" / "waits" / "metrics.jsonl")
    steps = [record for record in records if "data_wait_s" in record][1:]
    shares = [record["data_wait_s"] / record["step_s"] for record in steps]
    whole = sum(r["data_wait_s"] for r in steps) / sum(r["step_s"] for r in steps)
    say(f"of all these steps' time {whole:.2%} is waiting for batches")
    shares = spread(100 * share for share in shares)
    return "% of a step in which a run waits", shares, f"at most {100 * WANTED_WAIT:g}"
