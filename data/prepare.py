"""Text to token shards: python data/prepare.py --source python-stdlib --out data/sample

Writes OUT/train and OUT/val, each with shards and an index.json, which is written last: a folder
without one is not finished. The source is cut into splits (data/sources.py), each is tokenized by
itself (data/encode.py), and the index lists what their records say, in the order of the splits. So
the same bits come out whoever does it, and a preparation that was stopped goes on when it is
started again: splits that have a record are not done again.

    python data/prepare.py --source books.jsonl.zst --out data/books
    python data/prepare.py --source chat.jsonl --chat --out data/chat
    python data/prepare.py --source gs://bucket/books --out gs://bucket/data/books --ray local

Splits are tokenized by processes of this machine, or with --ray by a cluster (data/cluster.py).
Conversations (data/chat.py) get loss weights beside their tokens: 1 for answers and 0 for the rest,
so that training and validation count answers only.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import settings, sources
from data.encode import Coder, Job, Record, Side, record_of, tokenize_split
from data.out import folder_at
from data.settings import NOT_CONTENT, VALIDATION_RULE, Prepare
from data.shards import PARTIAL
from data.tokenizer import table_sha256
from faults import Fault
from manifest import DOCUMENT_RULE, INDEX, Manifest, files_of, index_text, read_manifest

LINE_EVERY_S = 10.0
TELL_S = 0.5  # between two looks at how far the processes are
ABANDONED_S = 600.0  # after which an unfinished file that nobody writes to is removed
FULL = errno.ENOSPC, errno.EDQUOT
STATE = "splits"  # the folder of records and settings


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(Prepare, args=arguments)
    settings.check(config)
    try:
        Preparation(config).run()
    except OSError as error:
        if error.errno not in FULL:
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
        # Files are known by names and contents, wherever they lie.
        but = (*NOT_CONTENT, *["source"] * ("files_sha256" in self.source.settings))
        decides = {k: v for k, v in vars(config).items() if k not in but}
        decides |= self.source.settings | {
            "validation_rule": VALIDATION_RULE,
            "tokenizer_sha256": table_sha256(self.coder.tokenizer),
            "end_of_text": self.coder.tokenizer.eot_token,
            "template": self.coder.template and self.coder.template.text,
        }
        self.settings = json.loads(json.dumps(decides))
        text = json.dumps(self.settings, sort_keys=True)
        self.hash = hashlib.sha256(text.encode()).hexdigest()

    def run(self) -> None:
        if self.source.left_out:
            print(self.source.left_out)
        if self.config.overwrite:
            self.out.remove([f"{side}/{INDEX}" for side in self.sides])
            self.out.remove([*self.ours()])
        elif self.is_finished():
            print(
                f"{self.config.out} is already prepared with these settings; --overwrite prepares "
                "it again"
            )
            return
        self.check_settings()
        began = time.perf_counter()
        records = self.first_tokens(self.tokenized())
        left_out = sum((Counter(record.left_out) for record in records), Counter())
        if not (total := sum(record.tokens for record in records)):
            raise ValueError(f"--source {self.config.source} has no text{told(left_out)}.")
        shared_out = sum(record.val.tokens for record in records) / total
        share = self.config.val_share
        if shared_out < share / 2 or 1 - shared_out < (1 - share) / 2:
            records = self.by_position(records, total)
        found = {side: sum((getattr(r, side) for r in records), Side()) for side in self.sides}
        for name, side in found.items():
            self.finish(name, side, left_out)
        self.sweep(found, [record.split for record in records])
        if left_out:
            print(f"left out{told(left_out)}")
        seconds = time.perf_counter() - began
        print(f"prepared in {seconds:.1f} s with the tokenizer {self.config.tokenizer}")

    # --- what is there

    def is_finished(self) -> bool:
        """Raises ValueError where a side is finished, and made otherwise: a run may need it."""
        whole = True
        for side in self.sides:
            if f"{side}/{INDEX}" not in self.out.found(f"{side}/"):
                whole = False
                continue
            found = read_manifest(f"{self.config.out}/{side}")
            self.must_be_made_alike(f"{side}/{INDEX}", found.settings, "a run may depend on it")
            whole = whole and self.has(side, found.shards)
        return whole

    def has(self, side: str, shards: list[Any]) -> bool:
        """Whether their files are there, by size: data/verify.py compares checksums."""
        there = self.files(side)
        return all(there.get(file.name) == file.bytes for file in files_of(shards))

    def files(self, side: str) -> dict[str, int]:
        found = self.out.found(f"{side}/").items()
        return {name.removeprefix(f"{side}/"): item.size for name, item in found}

    def check_settings(self) -> None:
        """Raises ValueError where OUT has splits that were made with other settings."""
        name = f"{self.state}/settings.json"
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(self.out.read(name))
            return self.must_be_made_alike(name, found, "splits of both would mix")
        self.out.write(name, (json.dumps(self.settings, indent=1) + "\n").encode())

    def must_be_made_alike(self, name: str, found: dict[str, Any], why: str) -> None:
        names = (found.keys() | self.settings.keys()) - {"left_out"}  # what came of the others
        differ = sorted(n for n in names if found.get(n) != self.settings.get(n))
        if differ:
            raise ValueError(
                f"{self.config.out}/{name} was made with another {', '.join(differ)}, and {why}. "
                "Use another --out, or --overwrite to replace it."
            )

    def record_name(self, split: int) -> str:
        return f"{self.state}/{split:05d}.json"

    def records(self) -> dict[int, Record]:
        """Of splits whose shards are there."""
        there = {side: self.files(side) for side in self.sides}
        names, found = self.out.found(f"{self.state}/"), {}
        for split in range(len(self.source.splits)):
            if (name := self.record_name(split)) in names:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    record = record_of(self.out.read(name))
                    files = [(s, f) for s in there for f in files_of(getattr(record, s).shards)]
                    whole = all(there[s].get(f.name) == f.bytes for s, f in files)
                    if whole and record.settings == self.hash:
                        found[split] = record
        return found

    # --- splits

    def job(self, split: int, limit: int, **how: Any) -> Job:
        how = {"record": self.record_name(split)} | how
        return Job(self.config, split, self.source.splits[split], self.hash, limit, **how)

    def tokenized(self) -> list[Record]:
        """Of all splits, or of the first that have --max-tokens, in order."""
        config, done = self.config, self.records()
        if done:
            tokens = sum(record.tokens for record in done.values())
            print(f"{config.out}: {len(done)} splits with {tokens:,} tokens are done")
        report = Report(self, done)
        missing = [n for n in range(len(self.source.splits)) if n not in done]
        jobs = [self.job(n, config.max_tokens) for n in missing]
        with report.progress, contextlib.closing(self.results(jobs, report)) as results:
            while not self.is_enough(done) and (record := next(results, None)):
                done[record.split] = record
                report.add(record)
        return [done[n] for n in range(len(done)) if n in done]

    def is_enough(self, done: dict[int, Record]) -> bool:
        tokens = 0
        for split in range(len(self.source.splits)):
            if split not in done:
                return False
            if 0 < self.config.max_tokens <= (tokens := tokens + done[split].tokens):
                return True
        return True

    def results(self, jobs: list[Job], report: "Report") -> Iterator[Record]:
        if self.config.ray:
            from data import cluster  # late: ray is needed for it alone

            return cluster.results(self.config, jobs, report.tell)
        workers = self.config.workers or len(os.sched_getaffinity(0))
        if min(workers, len(jobs)) <= 1:
            return (tokenize_split(job, report.read) for job in jobs)
        return by_processes(jobs, min(workers, len(jobs)), report)

    def first_tokens(self, records: list[Record]) -> list[Record]:
        """The first that have --max-tokens, the last cut after the document that reaches it."""
        kept, tokens = [], 0
        for record in records:
            if 0 < self.config.max_tokens <= tokens:
                break
            rest = self.config.max_tokens - tokens
            if kept and 0 < rest < record.tokens:
                record = tokenize_split(self.job(record.split, rest, record="", stem="cut"))
            kept.append(record)
            tokens += record.tokens
        return kept

    def by_position(self, records: list[Record], total: int) -> list[Record]:
        """Cut at a token: documents are too few, or too unlike, to be shared out. Splits that have
        what is for the other side are done again.
        """
        share = self.config.val_share
        print(f"too few documents to share them out: the last {share:.3g} of all tokens are val")
        cut, at = total - max(1, round(share * total)), 0
        jobs, kept = [], {}
        for record in records:
            room = min(max(cut - at, 0), record.tokens)
            at += record.tokens
            if room == record.train.tokens and (room in (0, record.tokens)):
                kept[record.split] = record
            else:
                how = {"record": "", "stem": "moved", "cut": room}
                jobs.append(self.job(record.split, record.tokens, **how))
        report = Report(self, kept)
        with report.progress, contextlib.closing(self.results(jobs, report)) as results:
            for record in results:
                kept[record.split] = record
                report.add(record)
        return [kept[split] for split in sorted(kept)]

    # --- the end

    def finish(self, name: str, side: Side, left_out: Counter[str]) -> None:
        """Writes index.json, which says that the side is whole."""
        config, tokenizer = self.config, self.coder.tokenizer
        if not side.tokens:
            raise ValueError(
                f"no document of --source {config.source} is for {name}{told(left_out)}. Use "
                "another --val-share, or 0 for no validation set."
            )
        manifest = Manifest(
            split=name,
            tokenizer=config.tokenizer,
            tokenizer_sha256=table_sha256(tokenizer),
            vocabulary=tokenizer.n_vocab,
            end_of_text=tokenizer.eot_token,
            document_rule=DOCUMENT_RULE,
            dtype=self.coder.dtype.name,
            documents=side.documents,
            tokens=side.tokens,
            text_bytes=side.text_bytes,
            shards=side.shards,
            command=command(config),
            settings=self.settings
            | ({"left_out": dict(sorted(left_out.items()))} if config.skip_bad else {}),
            template=self.settings["template"],
            learned_tokens=side.learned_tokens if config.chat else None,
            begin_of_text=self.coder.begin,
        )
        self.out.write(f"{name}/{INDEX}", index_text(manifest).encode())
        answers = f" ({side.learned_tokens:,} of answers)" if config.chat else ""
        bytes_per_token = side.text_bytes / max(side.learned_tokens, 1)
        print(
            f"{config.out}/{name}: {side.documents:,} documents, {side.tokens:,} tokens{answers}, "
            f"{bytes_per_token:.2f} bytes per token, {len(side.shards)} shards"
        )

    def ours(self) -> Iterator[str]:
        """Files in OUT that preparations made, but indexes."""
        for side in self.sides:
            for name in self.files(side):
                if "/" not in name and name.startswith(("shard_", "cut_", "moved_")):
                    yield f"{side}/{name}"
        yield from self.out.found(f"{self.state}/")

    def sweep(self, found: dict[str, Side], splits: list[int]) -> None:
        """Removes shards that the indexes do not list, records of splits that they do not have,
        and what killed preparations left.
        """
        kept = {f"{name}/{file.name}" for name in found for file in files_of(found[name].shards)}
        kept |= {f"{self.state}/settings.json", *map(self.record_name, splits)}
        for name in self.ours():
            if name.endswith(PARTIAL):
                path = Path(self.config.out) / name
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > ABANDONED_S:
                        path.unlink()
            elif name not in kept:
                self.out.remove([name])


def told(left_out: Counter[str]) -> str:
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


# --- processes ------------------------------------------------------------------------------------


def by_processes(jobs: list[Job], workers: int, report: "Report") -> Iterator[Record]:
    """As splits end. What is under way ends early where the iterator is closed."""
    # Fresh processes rather than forks: a fork copies locks of threads that it does not copy.
    context = multiprocessing.get_context("spawn")
    read, stop = context.Value("q"), context.Event()
    pool = ProcessPoolExecutor(workers, context, start_worker, (read, stop))
    pending: set[Future[Record]] = set()
    left = iter(jobs)
    try:
        while True:
            while len(pending) < 2 * workers and (job := next(left, None)):
                pending.add(pool.submit(in_worker, job))
            if not pending:
                return
            done, pending = wait(pending, TELL_S, FIRST_COMPLETED)
            report.tell(read.value)
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise Fault(
            "a process that tokenizes was killed, perhaps for want of memory. Start this again, "
            "with fewer --workers: splits that are done are kept."
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


class Stopped(Exception):
    """Nobody waits for the split."""


told_by_worker: Callable[[int], None]


def start_worker(read: Any, stop: Any) -> None:
    """In a new process: it ends with its parent, which may be killed."""
    global told_by_worker
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    def tell(count: int) -> None:
        if stop.is_set():
            raise Stopped
        with read.get_lock():
            read.value += count

    told_by_worker = tell
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    threading.Thread(target=watch, daemon=True).start()


def in_worker(job: Job) -> Record:
    return tokenize_split(job, told_by_worker)


# --- what the user sees ---------------------------------------------------------------------------


class Report:
    """A progress bar in a terminal; elsewhere a line every LINE_EVERY_S."""

    def __init__(self, preparation: Preparation, done: dict[int, Record]):
        sizes = [sum(part.size for part in parts) for parts in preparation.source.splits]
        self.total, self.before = sum(sizes), sum(sizes[split] for split in done)
        self.splits, self.done, self.tokens, self.bytes = len(sizes), len(done), 0, 0
        self.began = time.monotonic()
        self.next_line_s = self.began + LINE_EVERY_S
        columns = TextColumn("{task.description}"), BarColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, *times, disable=not Console().is_terminal)
        self.task = self.progress.add_task("starting", total=self.total or None)

    def add(self, record: Record) -> None:
        self.done += 1
        self.tokens += record.tokens
        self.tell(self.bytes)

    def read(self, count: int) -> None:
        self.tell(self.bytes + count)

    def tell(self, read: int = 0) -> None:
        """read  bytes since this preparation started."""
        self.bytes, now = max(read, self.bytes), time.monotonic()
        if self.progress.disable and now < self.next_line_s:
            return
        seconds, done = now - self.began, self.before + self.bytes
        text = (
            f"{self.done:,} of {self.splits:,} splits, {self.tokens / 1e6:,.1f} M tokens, "
            f"{self.tokens / 1e6 / max(seconds, 1e-9):.2f} M tokens/s"
        )
        self.progress.update(self.task, completed=done, description=text)
        if self.progress.disable:
            if self.bytes and self.total:
                left_s = seconds * (self.total - done) / self.bytes
                text += f", {min(done / self.total, 1):.0%}, {max(left_s, 0):,.0f} s left"
            print(text, flush=True)
            self.next_line_s = now + LINE_EVERY_S


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
