"""A preparation: begun anew or gone on with, written, told and finished.

Who tokenizes is left to data/prepare.py, processes of this machine, and data/cluster.py, a cluster.
"""

import collections
import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data import chat, out, settings, sources
from data.encode import Encoded, token_dtype
from data.settings import NOT_CONTENT, Prepare, in_validation
from data.shards import FULL, FullDisk, ShardWriter, no_space
from data.sources import Place
from data.tokenizer import Tokenizer, load_tokenizer, table_sha256
from manifest import BLOCK_BYTES, INDEX, Manifest, shard_of

LINE_EVERY_S = 10.0
UNREADABLE = (UnicodeError, json.JSONDecodeError, LookupError, TypeError, AttributeError)


def carry_out(config: Prepare, kind: Callable[..., "Work"], where: Callable[..., out.Out]) -> None:
    """Prepares what is not prepared yet.

    kind   of Work; and `where` it writes.
    Raises ValueError, Fault.
    """
    settings.check(config)
    sources.check(config)
    tokenizer = load_tokenizer(config.tokenizer)
    asked = sources.describe(config)
    decides = made(asked, tokenizer)
    with contextlib.closing(where(config)) as place:
        # Who only finds that all is there writes nothing, and needs no lock.
        if already_prepared(config, place, decides) and not place.has_progress():
            return told_prepared(place)
        with place.held():
            if already_prepared(config, place, decides):
                place.forget()  # killed when all was there, but for this
                told_prepared(place)
            else:
                began = time.perf_counter()
                with contextlib.closing(kind(config, place, asked, tokenizer)) as work:
                    work.run()
                    work.finish()
                seconds = time.perf_counter() - began
                print(f"prepared in {seconds:.1f} s with the tokenizer {config.tokenizer}")


def splits(config: Prepare) -> list[str]:
    """What is written: train and val, or one of them where the other has no share."""
    used = {"train": config.val_share < 1, "val": config.val_share > 0}
    return [split for split in used if used[split]]


class Work:
    """A preparation: begun anew, or gone on with from where `progress.json` says."""

    def __init__(
        self, config: Prepare, place: out.Out, asked: dict[str, Any], tokenizer: Tokenizer
    ):
        self.config, self.out, self.asked, self.tokenizer = config, place, asked, tokenizer
        decides = made(asked, tokenizer) | {"block_bytes": BLOCK_BYTES}
        self._made = json.loads(json.dumps(decides))
        self.writers = {split: self.writer(place.files / split) for split in splits(config)}
        self.place: Place | None = None  # of the last piece that was written
        self.ended = True  # its document
        self.source_bytes = self._stored = 0
        self.left_out: collections.Counter[str] = collections.Counter()
        with self._told_full():
            if not self._restored():
                self.out.forget()
                self.store()  # before the first shard, so that none is there without it
                for split in self.writers:
                    self.out.clear(split)

    def writer(self, folder: Path) -> ShardWriter:
        dtype = np.dtype(token_dtype(self.tokenizer))
        return ShardWriter(folder, self.config.shard_tokens, dtype, weighted=self.config.chat)

    def stream(self) -> Iterator[Encoded]:
        """Every piece behind `self.place`, in order. close() ends what is under way."""
        raise NotImplementedError

    @property
    def documents(self) -> int:
        return sum(writer.documents for writer in self.writers.values())

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers.values())

    def _restored(self) -> bool:
        """Whether there was something to go on with: a piece, at least.

        Raises  ValueError where it was made with other settings or is not as it was left.
        """
        text = None if self.config.overwrite else self.out.progress()
        if text is None:
            return False
        try:
            state = json.loads(text)
            if state["place"] is None:
                return False
            self._restore(state)
        except UNREADABLE as error:
            raise ValueError(
                f"{self.out.progress_name} cannot be read ({error!r}), so what was prepared cannot "
                "be gone on with. Begin anew with --overwrite."
            ) from error
        print(
            f"{self.config.out}: goes on after {self.documents:,} documents, "
            f"{self.tokens / 1e6:,.1f} M tokens"
        )
        return True

    def _restore(self, state: dict[str, Any]) -> None:
        why = "shards of both would mix"
        must_be_made_alike(self.out.progress_name, state["made"], self._made, why)
        self.place, self.ended = Place(*state["place"]), state["ended"]
        self.source_bytes = state["source_bytes"]
        self.left_out.update(state.get("left_out", {}))
        found = {split: state["splits"][split] for split in self.writers}
        for split, of_split in found.items():
            self.out.check(split, [shard_of(shard) for shard in of_split["shards"]])
        for split, writer in self.writers.items():
            self.out.unfinish(split)
            writer.restore(found[split])
        self._stored = self.tokens

    def store(self) -> None:
        """So that another process can go on from here."""
        state = {
            "made": self._made,
            "place": self.place,
            "ended": self.ended,
            "source_bytes": self.source_bytes,
            "left_out": self.left_out,
            "splits": {split: writer.state() for split, writer in self.writers.items()},
        }
        self.out.store(json.dumps(state) + "\n", self.writers.values())
        self._stored = self.tokens

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def run(self) -> None:
        """Every document, ended by end-of-text, written to the shards of its split.

        What is under way and what is not stored yet are a shard's tokens at most.
        """
        config, report = self.config, Report(self)
        with self._told_full(report), contextlib.closing(self.stream()) as stream, report.progress:
            for found in () if self._enough() else stream:
                split = "val" if in_validation(self.documents, config.val_share) else "train"
                self.writers[split].add(found.ids, found.text_bytes, found.weight, found.ends)
                self.place, self.ended = found.place, found.ends or bool(found.left_out)
                self.source_bytes += found.source_bytes
                if found.left_out:
                    self.left_out[found.left_out] += 1
                report.tell()
                if self._enough():
                    break
                if self.tokens - self._stored >= config.shard_tokens // 2:
                    self.store()
            for writer in self.writers.values():
                writer.flush()
            for writer in self.writers.values():
                writer.settle()

    def _enough(self) -> bool:
        return self.ended and 0 < self.config.max_tokens <= self.tokens

    @contextlib.contextmanager
    def _told_full(self, report: "Report | None" = None) -> Iterator[None]:
        """A full disk as a line that says how much is needed."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            need = report.left_bytes() if report else None
            more = f"About {need:,} bytes more are needed" if need else "More room is needed"
            what = error.filename if isinstance(error, FullDisk) else no_space(self.out.files)
            raise ValueError(
                f"{what}. {more}. Make room, and start this again: it goes on where it was."
            ) from error

    # --- what is finished

    def finish(self) -> None:
        """Writes index.json of each split, when all is there."""
        self._check_not_empty()
        with self._told_full():
            for split, writer in self.writers.items():
                self.out.finish(writer, self.manifest(writer))
                answers = f" ({writer.learned_tokens:,} of answers)" if self.config.chat else ""
                print(
                    f"{self.out.url}/{split}: {writer.documents:,} documents, {writer.tokens:,} "
                    f"tokens{answers}, {writer.text_bytes / writer.learned_tokens:.2f} bytes per "
                    f"token, {len(writer.manifest_shards)} shards"
                )
            self.out.forget()
        if self.left_out:
            print(f"left out: {self.told_left_out()}")

    def told_left_out(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in sorted(self.left_out.items()))

    def manifest(self, writer: ShardWriter) -> Manifest:
        config = self.config
        left_out = {"left_out": dict(sorted(self.left_out.items()))} if config.skip_bad else {}
        return writer.manifest(
            config.tokenizer,
            self.tokenizer,
            command=command(config),
            settings=self.asked | left_out,
            template=chat.TEMPLATE if config.chat else None,
            learned_tokens=writer.learned_tokens if config.chat else None,
        )

    def _check_not_empty(self) -> None:
        for split, writer in self.writers.items():
            if not writer.documents:
                left_out = f" ({self.told_left_out()} left out)" if self.left_out else ""
                raise ValueError(
                    f"no document of --source {self.config.source} is for {split}: all "
                    f"{self.documents} are on the other side of --val-share "
                    f"{self.config.val_share}{left_out}. Use --val-share 0.5, or 0 for no "
                    "validation set."
                )


def command(config: Prepare) -> str:
    """The command line without --out."""
    words = ["python", "data/prepare.py"]
    for item in dataclasses.fields(Prepare):
        value = getattr(config, item.name)
        if value != item.default and item.name not in NOT_CONTENT:
            flag = f"--{item.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def told_prepared(place: out.Out) -> None:
    print(f"{place.url} is already prepared with these settings; --overwrite prepares it again")


def already_prepared(config: Prepare, place: out.Out, asked: dict[str, Any]) -> bool:
    """True when OUT is finished and nothing that decides its content has changed.

    Raises  ValueError when a part of it is finished but was made otherwise: a run may depend on it.
    """
    if config.overwrite:
        return False
    whole = True
    for split in splits(config):
        found = place.manifest(split)
        if found is None:
            whole = False
            continue
        must_be_made_alike(f"{place.url}/{split}/{INDEX}", found.settings | ends_of(found), asked)
        files = list(out.files_of(found.shards))
        whole = whole and place.has(split, found.shards) == files
    return whole


def ends_of(found: Manifest) -> dict[str, Any]:
    return {"tokenizer_sha256": found.tokenizer_sha256, "end_of_text": found.end_of_text}


def made(asked: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides what is written."""
    ends = {"tokenizer_sha256": table_sha256(tokenizer), "end_of_text": tokenizer.eot_token}
    return asked | ends


def must_be_made_alike(
    path: str, found: dict[str, Any], asked: dict[str, Any], why: str = "a run may depend on it"
) -> None:
    names = (found.keys() | asked.keys()) - {"left_out"}  # what came of the others
    differ = sorted(name for name in names if found.get(name) != asked.get(name))
    if differ:
        raise ValueError(
            f"{path} was made with another {', '.join(differ)}, and {why}. Use another --out, or "
            "--overwrite to replace it."
        )


# --- what the user sees ---------------------------------------------------------------------------


class Report:
    """A progress bar in a terminal; elsewhere a line every LINE_EVERY_S."""

    def __init__(self, work: Work):
        self.work, config = work, work.config
        self.max_tokens = config.max_tokens
        self.total = config.max_tokens or sources.source_bytes(config)  # tokens, or else bytes
        self.began, self.began_tokens = time.monotonic(), work.tokens
        self.next_line_s = self.began + LINE_EVERY_S
        columns = TextColumn("{task.description}"), BarColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, *times, disable=not Console().is_terminal)
        done = self._done()
        self.task = self.progress.add_task("starting", total=self.total, completed=done)
        self.began_done = done

    def _done(self) -> int:
        return self.work.tokens if self.max_tokens else self.work.source_bytes

    def left_bytes(self) -> int | None:
        """Of shards that are still to be written, if the rest of the source is as what was read."""
        work, done = self.work, self._done()
        if not self.total or not done:
            return None
        tokens = work.tokens * max(self.total - done, 0) / done
        [writer, *_] = work.writers.values()
        return int(tokens * (writer.dtype.itemsize + writer.weighted))

    def tell(self) -> None:
        now, done = time.monotonic(), self._done()
        if self.progress.disable and now < self.next_line_s:
            return
        speed = (self.work.tokens - self.began_tokens) / max(now - self.began, 1e-9)
        text = (
            f"{self.work.documents:,} documents, {self.work.tokens / 1e6:,.1f} M tokens, "
            f"{speed / 1e6:.2f} M tokens/s"
        )
        self.progress.update(self.task, completed=done, description=text)
        if self.progress.disable:
            if self.total:
                left_s = (now - self.began) * (self.total - done) / max(done - self.began_done, 1)
                text += f", {min(done / self.total, 1):.0%}, {max(left_s, 0):,.0f} s left"
            print(text, flush=True)
            self.next_line_s = now + LINE_EVERY_S
