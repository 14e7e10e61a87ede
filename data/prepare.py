"""Convert text to token shards: python data/prepare.py --source python-stdlib --out data/sample

Writes OUT/train and OUT/val, each with shards and an index.json, which is written last: a folder
without it is unfinished. data/sources.py divides the source into splits, data/encode.py tokenizes
each split on its own, and the index lists their shards in order. So the result does not depend on
the number of processes or machines. A restart skips the splits that have a record.

    python data/prepare.py --source books.jsonl.zst --out data/books
    python data/prepare.py --source chat.jsonl --chat --out data/chat
    python data/prepare.py --source gs://bucket/books --out gs://bucket/data/books --ray local

Processes of this machine tokenize the splits, or with --ray a cluster (data/cluster.py).
Conversations (data/chat.py) get loss weights beside their tokens: 1 for answers, 0 elsewhere.
"""

import contextlib
import dataclasses
import errno
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

# A script has its own folder on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import settings, sources
from data.encode import Encoder, Job, Record, Subset, record_of, tokenize_split
from data.manifest import DOCUMENT_RULE, INDEX, Manifest, Shard, files_of, index_text, read_manifest
from data.progress import progress
from data.settings import NOT_CONTENT, VALIDATION_RULE, Prepare
from data.shards import ShardWriter
from data.tokenizer import table_sha256
from runtime import cli, storage
from runtime.errors import TransientError
from utils import ConfigError

STATE = "splits"  # folder of records
# What a person can fix: a full disk, or a path that cannot be written.
FIXABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


def main(arguments: list[str] | None = None) -> None:
    config = cli.parse_flags(Prepare, arguments, separator="-")
    settings.check(config)
    try:
        Preparation(config).run()
    except OSError as error:
        if error.errno not in FIXABLE:
            raise
        raise ConfigError(
            f"{error}. Free some space or use another path, and start again: finished splits are "
            "kept."
        ) from error


class Preparation:
    """Preparation of one OUT."""

    def __init__(self, config: Prepare):
        """Raises ConfigError for an unusable source or tokenizer."""
        self.config, self.encoder, self.out = config, Encoder(config), storage.at(config.out)
        self.source = sources.open_source(config)
        share = config.val_share
        self.subsets = [name for name, used in (("train", share < 1), ("val", share > 0)) if used]
        # Preparing one subset alone leaves the other as it is.
        self.state = STATE if len(self.subsets) == 2 else f"{self.subsets[0]}/{STATE}"
        # Contents identify files. Splits without unusable input are the same with --skip-bad.
        but = (*NOT_CONTENT, "skip_bad", *["source"] * ("files_sha256" in self.source.settings))
        but += ("row_tokens",) * (not config.row_tokens)  # which older preparations lack
        content = {k: v for k, v in vars(config).items() if k not in but}
        content |= self.source.settings | {
            "validation_rule": VALIDATION_RULE,
            "tokenizer_sha256": table_sha256(self.encoder.tokenizer),
            "end_of_text": self.encoder.tokenizer.eot_token,
            "begin_of_text": self.encoder.bos,
            "template": self.encoder.template and self.encoder.template.text,
        }
        self.settings = json.loads(json.dumps(content))

    def run(self) -> None:
        config = self.config
        if self.source.left_out:
            print(self.source.left_out)
        if config.overwrite:
            self.out.remove([f"{name}/{INDEX}" for name in self.subsets])
            self.out.remove(self.own_files())
        if self.is_finished():
            print(f"{config.out} is already prepared with these settings; see --overwrite")
            return
        start, done = time.perf_counter(), self.records()
        if done:
            tokens = sum(record.tokens for record in done.values())
            print(f"{config.out}: {len(done)} splits with {tokens:,} tokens are done")
        missing = [n for n in range(len(self.source.splits)) if n not in done]
        jobs = [self.job(n, config.max_tokens) for n in missing]
        records = self.tokenize(jobs, done, config.max_tokens or math.inf)
        left_out = sum((Counter(record.left_out) for record in records), Counter())
        if not (total := sum(record.tokens for record in records)):
            raise ConfigError(f"--source {config.source} has no text{list_of(left_out)}.")
        val_share = sum(record.val.tokens for record in records) / total
        if val_share < config.val_share / 2 or 1 - val_share < (1 - config.val_share) / 2:
            records = self.divide_by_position(records, total)
        totals = {n: sum((getattr(r, n) for r in records), Subset()) for n in self.subsets}
        for name, subset in totals.items():
            self.write_index(name, subset, left_out)
        self.clean_up(totals, records)
        if left_out:
            print(f"left out{list_of(left_out)}")
        seconds = time.perf_counter() - start
        print(f"prepared in {seconds:.1f} s with the tokenizer {config.tokenizer}")

    def is_finished(self) -> bool:
        """Return whether all subsets are complete. Raises ConfigError for other settings."""
        files, complete = self.files(), []
        for name in self.subsets:
            if f"{name}/{INDEX}" in files:
                manifest = read_manifest(f"{self.config.out}/{name}")
                self.check_settings(f"{name}/{INDEX}", manifest.settings)
                left_out = manifest.settings.get("left_out") and not self.config.skip_bad
                complete.append(has_all(files, name, manifest.shards) and not left_out)
        return len(complete) == len(self.subsets) and all(complete)

    def check_settings(self, file: str, theirs: dict[str, Any]) -> None:
        names = (theirs.keys() | self.settings.keys()) - {"left_out"}  # a result, not a setting
        if differ := sorted(n for n in names if theirs.get(n) != self.settings.get(n)):
            raise ConfigError(
                f"{self.config.out}/{file} was made with another {', '.join(differ)}. Use another "
                "--out, or --overwrite to replace what is there."
            )

    def files(self) -> dict[str, int]:
        """Return the bytes of each file of the subsets, by name."""
        listings = [self.out.files(f"{name}/") for name in self.subsets]
        return {name: file.size for files in listings for name, file in files.items()}

    def record_name(self, split: int) -> str:
        return f"{self.state}/{split:05d}.json"

    def records(self) -> dict[int, Record]:
        """Return the records of finished splits, whose shards exist with the right size.

        Raises  ConfigError for other settings.
        """
        files, records = self.files(), {}
        for name in self.out.files(f"{self.state}/"):
            try:
                record = record_of(self.out.read(name))
            except (ValueError, TypeError, KeyError):  # of another version
                continue
            self.check_settings(name, record.made_with)
            exist = all(has_all(files, s, getattr(record, s).shards) for s in self.subsets)
            if exist and (self.config.skip_bad or not record.left_out):
                records[record.split] = record
        return records

    def job(self, split: int, limit: int, **options: Any) -> Job:
        options = {"record": self.record_name(split)} | options
        return Job(self.config, split, self.source.splits[split], self.settings, limit, **options)

    def tokenize(
        self, jobs: list[Job], done: dict[int, Record], max_tokens: float = math.inf
    ) -> list[Record]:
        """Run jobs, and return their records and those in `done`, in order.

        The last one ends with the document that reaches max_tokens.
        """
        sizes = [sum(part.size for part in parts) for parts in self.source.splits]
        bar, records, tokens = progress(sum(sizes), sum(sizes[split] for split in done)), [], 0
        with bar, contextlib.closing(self.results(jobs)) as results:
            for split in sorted([*done, *(job.split for job in jobs)]):
                record, left = done.get(split) or next(results), max_tokens - tokens
                if records and left < record.tokens:
                    record = tokenize_split(self.job(split, int(left), record="", stem="cut"))
                records.append(record)
                tokens += record.tokens
                bar.set_postfix_str(f"{len(records)} splits, {tokens:,} tokens", refresh=False)
                bar.update(0 if split in done else sizes[split])
                if tokens >= max_tokens:
                    break
        return records

    def results(self, jobs: list[Job]) -> Iterator[Record]:
        """Return a generator of the records of jobs, in order."""
        if self.config.ray:
            from data import cluster  # late: only --ray needs ray

            return cluster.results(self.config, jobs)
        workers = min(self.config.workers or len(os.sched_getaffinity(0)), len(jobs))
        if workers <= 1:
            return (tokenize_split(job) for job in jobs)
        return run_in_processes(jobs, workers)

    def divide_by_position(self, records: list[Record], total: int) -> list[Record]:
        """Make the last tokens the validation set, where documents are too few or too unequal.

        Splits that have tokens of the wrong subset are tokenized again.
        """
        share = self.config.val_share
        print(f"too few documents to divide: the last {share:.3g} of all tokens are val")
        left = total - max(1, round(share * total))
        left -= left % (self.config.row_tokens or 1)
        jobs, kept = [], {}
        for record in records:
            count = min(max(left, 0), record.tokens)
            left -= record.tokens
            if count == record.train.tokens and count in (0, record.tokens):
                kept[record.split] = record
            else:
                options = {"record": "", "stem": "moved", "train_tokens": count}
                jobs.append(self.job(record.split, record.tokens, **options))
        return self.tokenize(jobs, kept)

    def write_index(self, name: str, subset: Subset, left_out: Counter[str]) -> None:
        """Write index.json, which marks the subset as complete."""
        config, tokenizer = self.config, self.encoder.tokenizer
        if not subset.tokens:
            raise ConfigError(
                f"no document of --source {config.source} is for {name}{list_of(left_out)}. Use "
                "another --val-share, or 0 for no validation set."
            )
        if config.row_tokens:  # the last row needs a target for its last token
            end = ShardWriter(f"{config.out}/{name}", "shard_end", 1, self.encoder.dtype, True)
            end.add(np.array([tokenizer.eot_token]), 0)
            subset.shards, subset.tokens = [*subset.shards, *end.shards], subset.tokens + 1
        more = {"left_out": dict(sorted(left_out.items()))} if config.skip_bad else {}
        counts = vars(subset) if config.chat else vars(subset) | {"learned_tokens": None}
        manifest = Manifest(
            subset=name,
            tokenizer=config.tokenizer,
            tokenizer_sha256=self.settings["tokenizer_sha256"],
            vocab_size=self.encoder.vocab_size,
            end_of_text=tokenizer.eot_token,
            document_rule=DOCUMENT_RULE,
            dtype=self.encoder.dtype.name,
            command=command(config),
            settings=self.settings | more,
            template=self.settings["template"],
            begin_of_text=self.encoder.bos,
            **counts,
        )
        self.out.write(f"{name}/{INDEX}", index_text(manifest).encode())
        answers = f" ({subset.learned_tokens:,} of answers)" if config.chat else ""
        bytes_per_token = subset.text_bytes / max(subset.learned_tokens, 1)
        print(
            f"{config.out}/{name}: {subset.documents:,} documents, {subset.tokens:,} tokens"
            f"{answers}, {bytes_per_token:.2f} bytes per token, {len(subset.shards)} shards"
        )

    def own_files(self) -> list[str]:
        """Return the files in OUT that preparations wrote, except indexes."""
        own = re.compile(r"(train|val)/(shard|cut|moved)_[^/]+")
        return [n for n in self.files() if own.fullmatch(n)] + [*self.out.files(f"{self.state}/")]

    def clean_up(self, totals: dict[str, Subset], records: list[Record]) -> None:
        """Remove unlisted shards, unused records, and temporary files of killed preparations."""
        kept = {f"{name}/{file.name}" for name in totals for file in files_of(totals[name].shards)}
        kept |= {self.record_name(record.split) for record in records}
        self.out.remove(sorted(set(self.own_files()) - kept))


def has_all(files: dict[str, int], subset: str, shards: list[Shard]) -> bool:
    """Return whether all files of shards exist with the right size."""
    return all(files.get(f"{subset}/{file.name}") == file.bytes for file in files_of(shards))


def list_of(left_out: Counter[str]) -> str:
    """Return the counts as text that follows a word."""
    return ": " * bool(left_out) + ", ".join(f"{n:,} {kind}" for kind, n in left_out.items())


def command(config: Prepare) -> str:
    """Return the command line without --out."""
    words = ["python", "data/prepare.py"]
    for item in dataclasses.fields(Prepare):
        value = getattr(config, item.name)
        if value != item.default and item.name not in NOT_CONTENT:
            flag = f"--{'as' if item.name == 'kind' else item.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def run_in_processes(jobs: list[Job], workers: int) -> Iterator[Record]:
    """Yield the records of jobs in order."""
    # Spawn, because a fork copies locks but not the threads that hold them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker)
    try:
        yield from pool.map(tokenize_split, jobs)
    except BrokenProcessPool as error:
        raise TransientError(
            "a worker process was killed, perhaps for lack of memory. Start again, with fewer "
            "--workers: finished splits are kept."
        ) from error
    except (Exception, KeyboardInterrupt):
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:  # with enough tokens, the splits that are being tokenized are finished
        pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """Initialize a worker process, which exits when its parent dies."""

    def exit_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends workers
    threading.Thread(target=exit_with_parent, daemon=True).start()


if __name__ == "__main__":
    from runtime.errors import run_command

    run_command(main)
