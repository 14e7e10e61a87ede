"""Where a preparation writes: OUT, a folder on a disk or a prefix of a bucket.

Shards for a bucket grow in a staging folder, each is sent when it is full, and what the bucket then
says of it is compared with it. Its local copy is removed only after that, and only when
progress.json, which stays in the staging folder, does not need it to go on. index.json is sent when
all shards are there. A preparation that is started again asks the bucket which of them are.
"""

import base64
import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import buckets
import lock
from buckets import Found
from data.settings import Prepare
from data.shards import PROGRESS, ShardWriter, clear, files_of, gone, index_text, replace
from faults import Exit
from manifest import INDEX, Manifest, Shard, file_crc32c, read_manifest

STAGING = "data/staging"
WORDS = lock.Words("preparation", "an --out", "--out, as --out {folder}-2")


def at(config: Prepare) -> "Out":
    return InBucket(config.out, config.staging) if config.out.startswith("gs:") else Out(config.out)


class Out:
    """A folder on a disk: what is written is where it belongs."""

    def __init__(self, url: str):
        self.url = url
        self.files = Path(url)  # where shards grow
        self._progress = self.files / PROGRESS

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs, another preparation of OUT is refused with who has it.

        Raises  ValueError, Fault as lock.take does.
        """
        how = {"beat_s": lock.BEAT_S, "lease_s": lock.LEASE_S, "words": WORDS}
        with contextlib.closing(lock.take(self.url, _lost, **how)):
            yield

    # --- what is finished

    def manifest(self, split: str) -> Manifest | None:
        """Of a split that is finished."""
        folder = self.files / split
        return read_manifest(folder) if (folder / INDEX).is_file() else None

    def has(self, split: str, shards: list[Shard]) -> list[Shard]:
        """Those of their files that are there, by size: checksums are for who reads them."""
        sizes = {path.name: path.stat().st_size for path in (self.files / split).glob("*.npy")}
        return [file for file in files_of(shards) if sizes.get(file.name) == file.bytes]

    def clear(self, split: str) -> None:
        """Removes what an earlier preparation wrote there, index.json first."""
        clear(self.files / split)

    def unfinish(self, split: str) -> None:
        (self.files / split / INDEX).unlink(missing_ok=True)

    def finish(self, writer: ShardWriter, manifest: Manifest) -> None:
        """Writes index.json, which says that the split is whole."""
        writer.finish(manifest)

    # --- how far it is

    def progress(self) -> bytes | None:
        return self._progress.read_bytes() if self._progress.exists() else None

    def has_progress(self) -> bool:
        return self._progress.exists()

    @property
    def progress_name(self) -> str:
        """As people call it."""
        return str(self._progress)

    def store(self, text: str, writers: Iterable[ShardWriter]) -> None:
        """Replaces progress.json, which covers what the writers have now."""
        self.files.mkdir(parents=True, exist_ok=True)
        replace(self._progress, text)

    def check(self, split: str, shards: list[Shard]) -> None:
        """Raises ValueError where shards that were finished are not there."""
        there = self.has(split, shards)
        for file in files_of(shards):
            if file not in there:
                raise gone(
                    f"{self.url}/{split}/{file.name}",
                    f"it is missing or has not {file.bytes} bytes",
                )

    def forget(self) -> None:
        """Removes progress.json, which nothing needs any more."""
        self._progress.unlink(missing_ok=True)

    def close(self) -> None:
        """Leaves what is unfinished as it is."""


def _lost(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(Exit.AGAIN)


class InBucket(Out):
    """A prefix of a bucket, with a staging folder."""

    def __init__(self, url: str, staging: str):
        bucket, _, below = url.removeprefix(buckets.SCHEME).strip("/").partition("/")
        if not buckets.is_bucket(url) or not bucket or not below:
            raise ValueError(
                f"--out {url} names no place in a bucket. Give one as gs://bucket/data/books."
            )
        super().__init__(f"{buckets.SCHEME}{bucket}/{below}")
        # A name for each prefix: of two that shared one, each would go on with the other's shards.
        self.files = Path(staging or STAGING) / quote(f"{bucket}/{below}", safe="")
        self._progress = self.files / PROGRESS
        self._objects = buckets.Prefix(self.url)
        self._sent: set[tuple[str, str]] = set()  # (split, name) that are known to be in the bucket
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._sending: Future[None] | None = None

    def manifest(self, split: str) -> Manifest | None:
        name = f"{split}/{INDEX}"
        return read_manifest(f"{self.url}/{split}") if name in self._objects.found(name) else None

    def has(self, split: str, shards: list[Shard]) -> list[Shard]:
        found = self._objects.found(f"{split}/")
        return [file for file in files_of(shards) if found.get(f"{split}/{file.name}") == of(file)]

    def clear(self, split: str) -> None:
        self.unfinish(split)
        self._objects.remove(self._objects.found(f"{split}/shard_"))
        clear(self.files / split)

    def unfinish(self, split: str) -> None:
        self._objects.remove([f"{split}/{INDEX}"])

    def finish(self, writer: ShardWriter, manifest: Manifest) -> None:
        self._collect()
        split = writer.folder.name
        self._send({(split, file.name): file for file in files_of(manifest.shards)})
        self._objects.write(f"{split}/{INDEX}", index_text(manifest).encode())

    def store(self, text: str, writers: Iterable[ShardWriter]) -> None:
        """Then sends what is new behind the next tokens, and removes what was sent before."""
        super().store(text, writers)
        self._collect()
        files = {(w.folder.name, f.name): f for w in writers for f in files_of(w.manifest_shards)}
        for key in files.keys() & self._sent:
            self._local(*key).unlink(missing_ok=True)
        self._sending = self._sender.submit(self._send, files)

    def _collect(self) -> None:
        """Waits for what is being sent. Raises what that raised."""
        if self._sending:
            self._sending.result()
            self._sending = None

    def _send(self, files: dict[tuple[str, str], Shard]) -> None:
        new = {"/".join(key): (key, file) for key, file in files.items() if key not in self._sent}
        paths = {name: self._local(*key) for name, (key, _) in new.items()}
        self._objects.send(paths, {name: of(file) for name, (_, file) in new.items()})
        self._sent |= {key for key, _ in new.values()}

    def _local(self, split: str, name: str) -> Path:
        return self.files / split / name

    def check(self, split: str, shards: list[Shard]) -> None:
        there = self.has(split, shards)
        self._sent |= {(split, file.name) for file in there}
        for file in files_of(shards):
            path = self._local(split, file.name)
            here = path.exists() and path.stat().st_size == file.bytes
            if file not in there and not here:
                raise gone(
                    f"{self.url}/{split}/{file.name}", f"it is neither there nor in {path.parent}"
                )

    def progress(self) -> bytes | None:
        text = super().progress()
        if text is None and PROGRESS in self._objects.found(PROGRESS):
            raise ValueError(
                f"{self.url} was begun by data/cluster.py, which keeps {PROGRESS} there. Go on "
                "with that, or begin anew with --overwrite."
            )
        if text is None:
            self.check_not_begun(f"in {self.files}")
        return text

    def check_not_begun(self, where: str) -> None:
        """Raises ValueError where the bucket has shards of a split that is not finished: who wrote
        them had stored how far it was before the first of them.
        """
        for split in ("train", "val"):
            names = self._objects.found(f"{split}/")
            if INDEX not in {name.rpartition("/")[2] for name in names} and names:
                raise ValueError(
                    f"{self.url}/{split} has shards and no {INDEX}, and {PROGRESS}, which says how "
                    f"far they are, is not {where}: another machine or --staging began it. Go on "
                    "there, or begin anew with --overwrite."
                )

    def forget(self) -> None:
        self._objects.remove([PROGRESS])
        shutil.rmtree(self.files, ignore_errors=True)

    def close(self) -> None:
        self._sender.shutdown(cancel_futures=True)


def of(file: Shard) -> Found:
    """What a bucket says of it."""
    return Found(file.bytes, base64.b64encode(bytes.fromhex(file.crc32c)).decode())


def found_of(path: Path) -> Found:
    """What a bucket says of this file."""
    return of(Shard(path.name, 0, path.stat().st_size, file_crc32c(path)))
