"""Text to token shards: python data/prepare.py --source python-stdlib --out data/sample

Writes OUT/train and OUT/val, each with shards and an index.json, which is written last: a folder
without one is not finished. The source is cut into splits (data/sources.py), each is tokenized by
itself (data/encode.py), and the index lists what their records say, in the order of the splits. So
the same bits come out whoever does it. Started again, splits that have a record are skipped.

    python data/prepare.py --source books.jsonl.zst --out data/books
    python data/prepare.py --source chat.jsonl --chat --out data/chat
    python data/prepare.py --source gs://bucket/books --out gs://bucket/data/books --ray local

Splits are tokenized by processes of this machine, or with --ray by a cluster (data/cluster.py).
Conversations (data/chat.py) get loss weights beside their tokens, 1 for answers and 0 elsewhere.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
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
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import tyro

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import settings, sources
from data.encode import Coder, Job, Record, Side, record_of, tokenize_split
from data.progress import progress
from data.settings import NOT_CONTENT, VALIDATION_RULE, Prepare
from data.shards import PARTIAL, folder_at
from data.tokenizer import table_sha256
from faults import Fault
from manifest import DOCUMENT_RULE, INDEX, Manifest, Shard, files_of, index_text, read_manifest

TELL_S = 0.5  # between two looks at how far the processes are
SLOTS = 4096  # for the bytes that each process has read, by the number of the process
ABANDONED_S = 600.0  # after which an unfinished file that nobody writes to is removed
STATE = "splits"  # the folder of records and settings


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(Prepare, args=arguments)
    settings.check(config)
    try:
        Preparation(config).run()
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise ValueError(f"{error.filename}: {error.strerror}. Use another path.") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"there is no space left for {config.out} ({error}). Make room, and start this again: "
            "splits that are done are kept."
        ) from error


class Preparation:
    """Of one OUT."""

    def __init__(self, config: Prepare):
        """Raises ValueError for a source or a tokenizer that does not serve."""
        self.config, self.coder, self.out = config, Coder(config), folder_at(config.out)
        self.source = sources.open_source(config)
        share = config.val_share
        self.sides = [side for side, used in (("train", share < 1), ("val", share > 0)) if used]
        # A side that is prepared alone leaves the other as it is.
        self.state = STATE if len(self.sides) == 2 else f"{self.sides[0]}/{STATE}"
        self.own = f"{self.state}/settings.json"
        # Files are known by their contents. What was read without --skip-bad is the same with it.
        but = (*NOT_CONTENT, "skip_bad", *["source"] * ("files_sha256" in self.source.settings))
        decides = {k: v for k, v in vars(config).items() if k not in but}
        decides |= self.source.settings | {
            "validation_rule": VALIDATION_RULE,
            "tokenizer_sha256": table_sha256(self.coder.tokenizer),
            "end_of_text": self.coder.tokenizer.eot_token,
            "begin_of_text": self.coder.begin,
            "template": self.coder.template and self.coder.template.text,
        }
        self.settings = json.loads(json.dumps(decides))
        text = json.dumps(self.settings, sort_keys=True)
        self.hash = hashlib.sha256(text.encode()).hexdigest()

    def run(self) -> None:
        config = self.config
        if self.source.left_out:
            print(self.source.left_out)
        if config.overwrite:
            self.out.remove([f"{side}/{INDEX}" for side in self.sides])
            self.out.remove(self.ours())
        if self.is_finished():
            print(
                f"{config.out} is already prepared with these settings; --overwrite prepares it "
                "again"
            )
            return
        self.out.write(self.own, (json.dumps(self.settings, indent=1) + "\n").encode())
        began, done = time.perf_counter(), self.records()
        if done:
            tokens = sum(record.tokens for record in done.values())
            print(f"{config.out}: {len(done)} splits with {tokens:,} tokens are done")
        missing = [n for n in range(len(self.source.splits)) if n not in done]
        jobs = [self.job(n, config.max_tokens) for n in missing]
        records = self.first_tokens(self.tokenized(jobs, done))
        left_out = sum((Counter(record.left_out) for record in records), Counter())
        if not (total := sum(record.tokens for record in records)):
            raise ValueError(f"--source {config.source} has no text{described(left_out)}.")
        shared_out = sum(record.val.tokens for record in records) / total
        if shared_out < config.val_share / 2 or 1 - shared_out < (1 - config.val_share) / 2:
            records = self.by_position(records, total)
        found = {side: sum((getattr(r, side) for r in records), Side()) for side in self.sides}
        for name, side in found.items():
            self.finish(name, side, left_out)
        self.sweep(found, records)
        if left_out:
            print(f"left out{described(left_out)}")
        seconds = time.perf_counter() - began
        print(f"prepared in {seconds:.1f} s with the tokenizer {config.tokenizer}")

    def is_finished(self) -> bool:
        """Whether all sides are whole. Raises ValueError where something was made with other
        settings.
        """
        there, whole = self.files(), []
        for side in self.sides:
            if f"{side}/{INDEX}" in there:
                manifest = read_manifest(f"{self.config.out}/{side}")
                self.must_be_made_alike(f"{side}/{INDEX}", manifest.settings)
                left_out = manifest.settings.get("left_out") and not self.config.skip_bad
                whole.append(has(there, side, manifest.shards) and not left_out)
        if whole or self.out.found(f"{self.state}/0"):  # a record
            with contextlib.suppress(FileNotFoundError):
                self.must_be_made_alike(self.own, json.loads(self.out.read(self.own)))
        return len(whole) == len(self.sides) and all(whole)

    def must_be_made_alike(self, name: str, found: dict[str, Any]) -> None:
        names = (found.keys() | self.settings.keys()) - {"left_out"}  # what came of the others
        if differ := sorted(n for n in names if found.get(n) != self.settings.get(n)):
            raise ValueError(
                f"{self.config.out}/{name} was made with another {', '.join(differ)}. Use another "
                "--out, or --overwrite to replace what is there."
            )

    def files(self) -> dict[str, int]:
        """Bytes of what OUT has for the sides."""
        found = [self.out.found(f"{side}/") for side in self.sides]
        return {name: item.size for each in found for name, item in each.items()}

    def record_name(self, split: int) -> str:
        return f"{self.state}/{split:05d}.json"

    def records(self) -> dict[int, Record]:
        """Of splits whose shards are there, by size: data/verify.py compares checksums."""
        there, names, found = self.files(), self.out.found(f"{self.state}/"), {}
        for split in range(len(self.source.splits)):
            if (name := self.record_name(split)) in names:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    record = record_of(self.out.read(name))
                    whole = all(has(there, s, getattr(record, s).shards) for s in self.sides)
                    whole = whole and (self.config.skip_bad or not record.left_out)
                    if whole and record.settings == self.hash:
                        found[split] = record
        return found

    def job(self, split: int, limit: int, **how: Any) -> Job:
        how = {"record": self.record_name(split)} | how
        return Job(self.config, split, self.source.splits[split], self.hash, limit, **how)

    def tokenized(self, jobs: list[Job], done: dict[int, Record]) -> list[Record]:
        """The records of jobs, and those that are `done`, in order; with --max-tokens as many as
        are needed.
        """
        sizes = [sum(part.size for part in parts) for parts in self.source.splits]
        before = sum(sizes) - sum(sizes[job.split] for job in jobs)
        tokens = sum(record.tokens for record in done.values())
        with (
            progress(sum(sizes), before) as bar,
            contextlib.closing(self.results(jobs, bar.update)) as results,
        ):
            while not self.is_enough(done) and (record := next(results, None)):
                done[record.split] = record
                tokens += record.tokens
                text = f"{len(done)} of {len(sizes)} splits, {tokens:,} tokens"
                bar.set_postfix_str(text, refresh=False)
                bar.update(sizes[record.split] if self.config.ray else 0)
        return [done[split] for split in sorted(done)]

    def is_enough(self, done: dict[int, Record]) -> bool:
        """Whether the first splits have --max-tokens."""
        if not (rest := self.config.max_tokens):
            return False
        for split in itertools.takewhile(done.__contains__, range(len(self.source.splits))):
            rest -= done[split].tokens
        return rest <= 0

    def results(self, jobs: list[Job], on_read: Callable[[int], None]) -> Iterator[Record]:
        """As splits end. on_read  is called with bytes that were read."""
        if self.config.ray:
            from data import cluster  # late: ray is needed for it alone

            return cluster.results(self.config, jobs)
        workers = min(self.config.workers or len(os.sched_getaffinity(0)), len(jobs))
        if workers <= 1:
            return (tokenize_split(job, on_read) for job in jobs)
        return by_processes(jobs, workers, on_read)

    def first_tokens(self, records: list[Record]) -> list[Record]:
        """The first that have --max-tokens, the last cut after the document that reaches it."""
        kept, rest = [], self.config.max_tokens or math.inf
        for record in records:
            if rest <= 0:
                break
            if kept and rest < record.tokens:
                record = tokenize_split(self.job(record.split, int(rest), record="", stem="cut"))
            kept.append(record)
            rest -= record.tokens
        return kept

    def by_position(self, records: list[Record], total: int) -> list[Record]:
        """Cut at a token: documents are too few, or too unlike, to be shared out. Splits that have
        what is for the other side are done again.
        """
        share = self.config.val_share
        print(f"too few documents to share them out: the last {share:.3g} of all tokens are val")
        room = total - max(1, round(share * total))
        jobs, kept = [], {}
        for record in records:
            cut = min(max(room, 0), record.tokens)
            room -= record.tokens
            if cut == record.train.tokens and cut in (0, record.tokens):
                kept[record.split] = record
            else:
                how = {"record": "", "stem": "moved", "cut": cut}
                jobs.append(self.job(record.split, record.tokens, **how))
        return self.tokenized(jobs, kept)

    def finish(self, name: str, side: Side, left_out: Counter[str]) -> None:
        """Writes index.json, which says that the side is whole."""
        config, tokenizer = self.config, self.coder.tokenizer
        if not side.tokens:
            raise ValueError(
                f"no document of --source {config.source} is for {name}{described(left_out)}. Use "
                "another --val-share, or 0 for no validation set."
            )
        others = {"left_out": dict(sorted(left_out.items()))} if config.skip_bad else {}
        counted = vars(side) if config.chat else vars(side) | {"learned_tokens": None}
        manifest = Manifest(
            split=name,
            tokenizer=config.tokenizer,
            tokenizer_sha256=self.settings["tokenizer_sha256"],
            vocabulary=tokenizer.n_vocab,
            end_of_text=tokenizer.eot_token,
            document_rule=DOCUMENT_RULE,
            dtype=self.coder.dtype.name,
            command=command(config),
            settings=self.settings | others,
            template=self.settings["template"],
            begin_of_text=self.coder.begin,
            **counted,
        )
        self.out.write(f"{name}/{INDEX}", index_text(manifest).encode())
        answers = f" ({side.learned_tokens:,} of answers)" if config.chat else ""
        bytes_per_token = side.text_bytes / max(side.learned_tokens, 1)
        print(
            f"{config.out}/{name}: {side.documents:,} documents, {side.tokens:,} tokens{answers}, "
            f"{bytes_per_token:.2f} bytes per token, {len(side.shards)} shards"
        )

    def ours(self) -> list[str]:
        """Files in OUT that preparations made, but indexes."""
        own = re.compile(r"(train|val)/(shard|cut|moved)_[^/]+")
        return [n for n in self.files() if own.fullmatch(n)] + [*self.out.found(f"{self.state}/")]

    def sweep(self, found: dict[str, Side], records: list[Record]) -> None:
        """Removes shards that the indexes do not list, records of splits that they do not have,
        and what killed preparations left.
        """
        kept = {f"{name}/{file.name}" for name in found for file in files_of(found[name].shards)}
        kept |= {self.record_name(record.split) for record in records}
        kept.add(self.own)
        for name in set(self.ours()) - kept:
            path = Path(self.config.out, name)
            with contextlib.suppress(FileNotFoundError):  # another preparation was faster
                age_s = time.time() - path.stat().st_mtime if name.endswith(PARTIAL) else math.inf
                self.out.remove([name] if age_s > ABANDONED_S else [])


def has(there: dict[str, int], side: str, shards: list[Shard]) -> bool:
    """Whether all files of shards are there."""
    return all(there.get(f"{side}/{file.name}") == file.bytes for file in files_of(shards))


def described(left_out: Counter[str]) -> str:
    """What was left out, behind a word."""
    return ": " * bool(left_out) + ", ".join(f"{n:,} {kind}" for kind, n in left_out.items())


def command(config: Prepare) -> str:
    """The command line without --out."""
    words = ["python", "data/prepare.py"]
    for item in dataclasses.fields(Prepare):
        value = getattr(config, item.name)
        if value != item.default and item.name not in NOT_CONTENT:
            flag = f"--{'as' if item.name == 'kind' else item.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def by_processes(jobs: list[Job], workers: int, on_read: Callable[[int], None]) -> Iterator[Record]:
    """As splits end. What is under way ends early where the iterator is closed."""
    # Fresh processes rather than forks: a fork copies locks of threads that it does not copy.
    context = multiprocessing.get_context("spawn")
    # Without locks, which a worker that is killed would keep.
    read, stop = context.RawArray("q", SLOTS), context.RawValue("b")
    pool = ProcessPoolExecutor(workers, context, start_worker, (read, stop))
    before = 0
    try:
        pending = {pool.submit(in_worker, job) for job in jobs}
        while pending:
            done, pending = wait(pending, TELL_S)
            now = sum(read)
            on_read(now - before)
            before = now
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise Fault(
            "a process that tokenizes was killed, perhaps for want of memory. Start this again, "
            "with fewer --workers: splits that are done are kept."
        ) from error
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


count_read: Callable[[int], None]


def start_worker(read: Any, stop: Any) -> None:
    """In a new process: it ends with its parent, which may be killed."""
    global count_read
    parent, slot = multiprocessing.parent_process(), os.getpid() % SLOTS

    def watch() -> None:
        parent.join()
        os._exit(1)

    def tell(count: int) -> None:
        if stop.value:
            raise CancelledError
        read[slot] += count

    count_read = tell
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    threading.Thread(target=watch, daemon=True).start()


def in_worker(job: Job) -> Record:
    return tokenize_split(job, count_read)


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
