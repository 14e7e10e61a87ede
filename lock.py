"""One writer per run folder: a second run there is refused with who holds it.

    with lock.held(folder, on_lost) as holding: ...

A folder holds a file `lock`, JSON of who writes: host, process, command, how long it has run and a
counter that a thread raises every `beat_s`. On one machine flock decides, which ends with its
process. Machines that share a folder may not share flock, so what another machine wrote is watched:
a counter that moves within `lease_s` is a run that lives. In a bucket the object `lock` is a lease:
each beat writes it anew if it is still the generation that was written last, and who finds it waits
until it has not changed for `lease_s`. Clocks of machines are never compared: they differ and jump.
"""

import contextlib
import fcntl
import json
import os
import random
import secrets
import shlex
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from buckets import one_line, refusal, transient
from faults import Fault

BEAT_S = 5.0
LEASE_S = 30.0
OPEN: weakref.WeakSet["Lock"] = weakref.WeakSet()


@contextlib.contextmanager
def held(
    folder: str | os.PathLike[str],
    on_lost: Callable[[str], None],
    beat_s: float = BEAT_S,
    lease_s: float = LEASE_S,
) -> Iterator[None]:
    """Holds the folder for this job while the block runs.

    Every process of the job enters it, after multihost.start and before anything is written:
    process 0 takes the lock, and all raise its error.

    on_lost  called once with what happened, from a thread of process 0, if the lock is no longer
             this job's: another run may write within `beat_s`, so nothing may be written from then
             on. It must end the job soon, as with os._exit.
    Raises   ValueError when another run of this machine holds it or it cannot be had; Fault when
             one of another machine does, or the bucket does not answer for `lease_s`.
    """
    import multihost  # late: a process that takes a lock for itself alone needs no jax
    from metrics import is_primary

    lock = None
    with multihost.shared_errors():
        if is_primary():
            lock = take(folder, on_lost, beat_s, lease_s)
    try:
        yield
    finally:
        if lock:
            lock.close()


def take(
    folder: str | os.PathLike[str],
    on_lost: Callable[[str], None],
    beat_s: float = BEAT_S,
    lease_s: float = LEASE_S,
) -> "Lock":
    """As `held`, for one process alone; its `close` gives the folder back."""
    kind = BucketLock if os.fspath(folder).startswith("gs://") else FileLock
    lock = kind(os.fspath(folder), on_lost, beat_s, lease_s)
    OPEN.add(lock)
    try:
        lock.take()
    except BaseException:
        lock.leave()
        raise
    lock.thread.start()
    return lock


def say(text: str) -> None:
    from metrics import say  # late, as above

    say(text)


# --- who holds it ---------------------------------------------------------------------------------


def machine() -> str:
    """Where flock is seen: the host, and its boot, as another machine may have the same name."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def age(seconds: Any) -> str:
    """As people say it; of what no run wrote, that it is not known."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e10:
        return "an unknown time"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def who(record: dict[str, Any]) -> str:
    """The holder in words."""
    return f"process {record.get('pid', 'unknown')} on host {record.get('host', 'unknown')}"


def parsed(text: str | bytes) -> dict[str, Any]:
    """A record; empty where nobody holds it or what is there is not one."""
    with contextlib.suppress(ValueError):
        record = json.loads(text)
        return record if isinstance(record, dict) else {}
    return {}


def moment(record: dict[str, Any]) -> tuple[Any, Any]:
    """Another one after each beat."""
    return record.get("token"), record.get("beats")


class Lock:
    """What both kinds share: the record and the heartbeat."""

    def __init__(
        self,
        folder: str,
        on_lost: Callable[[str], None],
        beat_s: float,
        lease_s: float,
    ):
        assert beat_s * 3 <= lease_s, (beat_s, lease_s)
        self.folder = folder.rstrip("/")
        self.path = f"{self.folder}/lock"
        self.beat_s, self.lease_s, self._on_lost = beat_s, lease_s, on_lost
        self.lost = False
        self._pid, self._began, self._beats = os.getpid(), time.monotonic(), 0
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="lock", daemon=True)

    def take(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Lets go of what only this process has, as after a fork."""

    def release(self) -> None:
        raise NotImplementedError

    def beat(self) -> None:
        raise NotImplementedError

    def record(self) -> bytes:
        """Of this holder now, longer with each."""
        return json.dumps(
            {
                "host": socket.gethostname(),
                "pid": self._pid,
                "command": " ".join(shlex.join(sys.argv).split())[:300],
                "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),  # for people; never compared
                "machine": machine(),
                "token": self._token,
                "age_s": round(time.monotonic() - self._began, 1),
                "beats": self._beats,
            }
        ).encode()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.beat_s) and not self.lost:
                self._beats += 1
                self.beat()
        except Exception as error:  # a bug here must not leave a run that only seems to hold it
            self.lose(f"its heartbeat failed: {error!r}")
            raise

    def lose(self, why: str) -> None:
        self.lost = True
        self._on_lost(
            f"{self.path} is no longer this run's: {why}. This run stops, so that two do not write "
            "there. Look whether another run goes on; if not, start this one again."
        )

    def close(self) -> None:
        """Gives the folder back; in a process that was forked off the run, nothing."""
        if self._pid != os.getpid():
            return
        self._stop.set()
        if self.thread.ident and self.thread is not threading.current_thread():
            self.thread.join()
        OPEN.discard(self)
        if not self.lost:
            self.release()
        self.leave()

    def refusal(self, record: dict[str, Any]) -> ValueError | Fault:
        """`record` of who holds it. Of another machine it may be a job that is about to end, as it
        lost this one's predecessor here: starting again can help.
        """
        kind = ValueError if record.get("machine") == machine() else Fault
        pid = record.get("pid", "PROCESS")
        other = f"--run.name, as --run.name {os.path.basename(self.folder)}-2"
        running = f"running for {age(record.get('age_s'))}: {record.get('command', 'unknown')}"
        return kind(
            f"{self.folder} is being written by another run, {who(record)}, "
            f"{running}. Two would overwrite each other's files. Wait for it, or end it (kill "
            f"{pid} there), or use another {other}."
        )

    def moves(self, record: dict[str, Any], first: Any, seen: Callable[[], Any]) -> bool:
        """Whether what `seen` gives, just now `first`, is another within the lease's time."""
        began = time.monotonic()
        say(
            f"{self.folder} was held by {who(record)}; waiting up to {self.lease_s:g} s to see "
            "whether it lives"
        )
        while time.monotonic() < began + self.lease_s:
            time.sleep(min(self.beat_s, self.lease_s / 10))
            if seen() != first:
                return True
        return False


def _forked() -> None:
    """A child must not keep the lock when the run is gone."""
    for lock in list(OPEN):
        lock.leave()


os.register_at_fork(after_in_child=_forked)


# --- a folder of files ----------------------------------------------------------------------------


class FileLock(Lock):
    """flock, and a counter for machines that do not see it."""

    _file = -1

    def take(self) -> None:
        try:
            os.makedirs(self.folder, exist_ok=True)
            alone = self._open()
            before = self._read()
            if before and (not alone or before.get("machine") != machine()):
                self._watch(before)
            self._write()
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be written: {error.strerror or error}. Give a "
                "--run.dir that can be written, with space left."
            ) from error

    def _open(self) -> bool:
        """Whether flock says that nobody else on this machine has it; False where there is none."""
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self.refusal(self._who_has_it()) from None
            except OSError:
                return False  # a file system without it
            if self._is_there():
                return True
            os.close(self._file)  # removed since it was opened

    def _who_has_it(self) -> dict[str, Any]:
        """It may have got the lock and not written yet."""
        for _ in range(10):
            if record := self._read():
                return record
            time.sleep(0.1)
        return {}

    def _watch(self, before: dict[str, Any]) -> None:
        if self.moves(before, moment(before), lambda: moment(self._read())):
            raise self.refusal(self._read() or before)
        self._write()
        time.sleep(2 * self.beat_s)  # of several that watched the last to write has it
        now = self._read()
        if now.get("token") != self._token:
            raise self.refusal(now)

    def _read(self) -> dict[str, Any]:
        """Opened anew each time, as network file systems look for news only then."""
        with contextlib.suppress(FileNotFoundError):
            return parsed(Path(self.path).read_bytes())
        return {}

    def _is_there(self) -> bool:
        """Whether the file that this process has is the one that others find."""
        mine = os.fstat(self._file)
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self.path)
            return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)
        return False

    def _write(self, content: bytes | None = None) -> None:
        content = self.record() if content is None else content
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))
        os.fsync(self._file)

    def beat(self) -> None:
        try:
            if not self._is_there():
                return self.lose("the file was removed or replaced")
            now = self._read()
            if now.get("token") != self._token:
                return self.lose(f"{who(now)} has taken it" if now else "another had it meanwhile")
            self._write()
        except OSError as error:  # flock holds all the same; the next beat tries again
            if self._beats % 100 == 1:
                say(f"warning: {self.path} cannot be kept up to date: {error}")

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._write(b"")  # not removed: who has opened it would lock a file that is gone

    def leave(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


# --- a bucket -------------------------------------------------------------------------------------


class BucketLock(Lock):
    """A lease: an object that is written anew by its holder, and by nobody else while it is."""

    def __init__(self, folder: str, *how: Any):
        super().__init__(folder, *how)
        self._bucket, _, self._name = self.path.removeprefix("gs://").partition("/")
        self._client = self._blobs = None
        self._generation = 0  # written last by this process
        self._renewed = time.monotonic()  # when what wrote it was begun

    def take(self) -> None:
        self._client = self._opened()
        self._blobs = self._client.bucket(self._bucket)
        while not self._create():
            generation, record = self._asked(self._look)
            if record.get("token") == self._token:  # written, and the answer was lost
                self._generation = generation
                return
            if not generation:
                continue  # given back just now
            if self.moves(record, generation, lambda: self._asked(self._look)[0]):
                generation, record = self._asked(self._look)
                if generation:
                    raise self.refusal(record)
                continue
            self._generation = generation

    def _create(self) -> bool:
        """Writes it over the generation that is known; False if there is another."""
        from google.api_core import exceptions

        self._renewed = time.monotonic()
        try:
            self._asked(self._renew)
        except exceptions.PreconditionFailed:
            self._generation = 0
            return False
        return True

    def _opened(self) -> Any:
        from google.auth import exceptions
        from google.cloud import storage  # late: only buckets need it

        try:
            return storage.Client(project=None)
        except exceptions.GoogleAuthError as error:
            why = refusal(self.path, error)
            raise ValueError(why) if why else Fault(one_line(error)) from error

    def _renew(self) -> None:
        began, blob = time.monotonic(), self._blobs.blob(self._name)
        how = self._once() | {"content_type": "application/json"}
        blob.upload_from_string(self.record(), if_generation_match=self._generation, **how)
        self._generation, self._renewed = int(blob.generation), began

    def _once(self) -> dict[str, Any]:
        """How a request is made: it has failed before the lease could have run out."""
        left_s = self._renewed + self.lease_s - self.beat_s - time.monotonic()
        each_s = min(self.lease_s / 3, max(self.beat_s, left_s)) / 2
        return {"retry": None, "timeout": (each_s, each_s)}  # to connect, to answer

    def _look(self) -> tuple[int, dict[str, Any]]:
        """(generation, record); 0 and nothing where there is none."""
        from google.api_core import exceptions

        blob = self._blobs.blob(self._name)
        try:
            content = blob.download_as_bytes(**self._once())
        except exceptions.NotFound:
            return 0, {}
        return int(blob.generation), parsed(content)

    def _asked(self, what: Callable[[], Any]) -> Any:
        """what(), tried again for the time of a lease; in words what cannot be mended by that."""
        from google.api_core import exceptions

        until, pause_s = time.monotonic() + self.lease_s, self.beat_s / 10
        while True:
            try:
                return what()
            except exceptions.PreconditionFailed:
                raise
            except transient() as error:
                if why := refusal(self.path, error):
                    raise ValueError(why) from error
                if time.monotonic() + pause_s > until:
                    raise Fault(
                        f"{self.path} did not answer for {self.lease_s:g} s: {one_line(error)}. "
                        "Start the run again when the bucket can be reached."
                    ) from error
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, self.beat_s)

    def beat(self) -> None:
        """Tries until it is written, or another has it, or another could have it soon."""
        from google.api_core import exceptions

        pause_s = self.beat_s / 10
        while not self._stop.is_set():
            try:
                return self._renew()
            except exceptions.PreconditionFailed as error:
                met = one_line(error)
                if not self._found_own():
                    return
            except transient() as error:
                met = one_line(error)
            if time.monotonic() > self._renewed + self.lease_s - self.beat_s:
                told_s = self.lease_s - self.beat_s
                return self.lose(f"it could not be renewed for {told_s:g} s: {met}")
            self._stop.wait(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, self.beat_s)

    def _found_own(self) -> bool:
        """Whether what stands there was written by this process, whose answer was lost."""
        with contextlib.suppress(*transient()):
            generation, now = self._look()
            if now.get("token") != self._token:
                self.lose(f"{who(now)} has taken it" if generation else "the object was removed")
                return False
            self._generation = generation
        return True

    def release(self) -> None:
        with contextlib.suppress(*transient()):
            blob = self._blobs.blob(self._name)
            return blob.delete(if_generation_match=self._generation, **self._once())
        say(f"{self.path} could not be given back; the next run waits {self.lease_s:g} s for it")

    def leave(self) -> None:
        if self._client and self._pid == os.getpid():
            self._client.close()
