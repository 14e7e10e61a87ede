"""What a process of a run is doing, for how long, and whether it has to stop: by a signal, a limit,
or because another process is lost.

A thread of its own sees signals at once, whatever the main thread waits for, and ends the process
where a collective, a compiler or a disk that hangs would raise nothing.
"""

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import NoReturn

from faults import Exit, Stopped, code_of, line, of_the_runtime
from peers import Peers

TICK_S = 0.5  # between looks at what changes without a signal
GRACE_S = 5.0  # in which a process may end by itself when another ended with an error
SAVE_S = 30.0  # that a save may take though the others took less
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Watch:
    """Of one run, from its start to its end.

    with Watch(...) as watch:
        watch.doing("restore")
        ...
        watch.ready()
        ...
        watch.doing("step 12")
        ...
        if watch.reached():
            ... save
            raise watch.stopped("...")

    Without `peers` the process is alone. Where there are others, one that ends with an error says
    it, and ends at once: what it waits for at exit would not come.
    """

    def __init__(self, stall_s: float, limit_s: float | None = None, peers: Peers | None = None):
        """stall_s  in which whatever is being done has to end.
        limit_s  from now on, before which the run has to have stopped.
        """
        self._stall_s, self._limit_s, self._peers = stall_s, limit_s, peers
        self._name = f"{peers.mine.name}: " if peers else ""
        self._started = time.monotonic()
        self._doing, self._spent_s = "start", 0.0
        self._longest_s = {"save": 0.0}  # of each kind of work, by its first word
        self.write_s = 0.0  # that the longest save took until it was whole, behind the steps
        self._lock = threading.Condition(threading.RLock())
        self._asked: tuple[str, int] | None = None  # why to stop, and the exit code
        self._signals = 0  # that this process itself was sent
        self._point: int | None = None  # that it is on the way to; None before `ready`
        self._grace_s = GRACE_S
        self._ending = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> "Watch":
        self._woken, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake = wake
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, _nothing) for n in SIGNALS}
            self._wakeup = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        if self._peers:
            self._peers.changed = self._heard
            _on_abort(self._aborted)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watch")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._peers and error is not None and not isinstance(error, Stopped):
            self._failed(error)
        if self._peers:
            self._wait_for_all()
        self._closed.set()
        self._wake.send(b"\0")
        self._thread.join()
        if self._peers:
            self._peers.close()
        if hasattr(self, "_handlers"):
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._woken.close()
        self._wake.close()

    def _wait_for_all(self) -> None:
        """At the end, still watched: jax would wait for a process that is lost for minutes."""
        self.doing("the end")
        self._peers.tell(ended=0)
        with self._lock:
            while not self._peers.all_ended():
                self._lock.wait(1.0)

    # --- what the main thread says and asks -------------------------------------------------------

    def doing(self, what: str) -> None:
        """From now on the process is at this; the first word is its kind."""
        with self._lock:
            kind = self._doing.split()[0]
            self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), self._spent_s)
            self._doing, self._spent_s = what, 0.0
            if self._peers:
                self._peers.mine.doing = what

    def ready(self) -> None:
        """From now on a stop waits for `reached`; before, there is nothing to save."""
        with self._lock:
            self._point = 0

    def reached(self) -> bool:
        """Whether to save and stop here.

        Every process calls this at the same points of the run. All stop at the same one: when one
        is asked to stop, each says which point it is on the way to, and the farthest is it. No
        process can be past that, since collectives between points wait for all.
        """
        with self._lock:
            if self._asked and self._point == self._agreed():
                return True
            self._point += 1
            return False

    def _agreed(self) -> int:
        while self._peers:
            points = [record.point for record in self._peers.records.values()]
            if None not in points:
                return max(points)
            self._lock.wait()  # meanwhile the process is ended if one of them is lost
        return self._point

    def stopped(self, saved: str) -> Stopped:
        """What to raise when all that could be saved is; `saved` says what that is."""
        why, code = self._asked
        return Stopped(f"{why}: stopped, and {saved}. Started again, the run goes on", code)

    # --- the thread that watches ------------------------------------------------------------------

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.is_set():
            if select.select([self._woken], [], [], TICK_S)[0]:
                for number in self._woken.recv(64):
                    if number in SIGNALS:
                        self._signalled(signal.Signals(number))
            now = time.monotonic()
            # A process that did not run, as one of a laptop that slept, did not stall.
            self._tick(min(now - last, 2 * TICK_S))
            last = now

    def _tick(self, passed_s: float) -> None:
        with self._lock:
            self._spent_s += passed_s
            stalled = self._spent_s > self._stall_s
            late = self._limit_s is not None and self._left_s() < 0 and not self._asked
        if self._peers:
            self._look_at_peers(passed_s)
        if stalled:
            faulthandler.dump_traceback(2)
            minutes = f"{self._stall_s / 60:.3g}"
            self.end(
                Exit.AGAIN,
                f"{self._doing} did not end within {minutes} minutes (--run.stall_minutes); what "
                f"each thread was at stands above{self._others()}",
            )
        if late:
            self.ask("--run.time_limit", Exit.TERMINATED)

    def _left_s(self) -> float:
        """Before the run has to begin to stop: it ends what it is at, and saves."""
        kinds = self._longest_s
        save = max(SAVE_S, kinds["save"], self.write_s)
        between = kinds.get("evaluation", 0.0) + kinds.get("samples", 0.0) + save
        needed = 1.2 * (max(kinds.get("step", 0.0), between) + save)
        return self._limit_s - (time.monotonic() - self._started) - needed

    def _others(self) -> str:
        if not self._peers:
            return ""
        others = [f"{r.name} at {r.doing}" for r in self._peers.records.values()]
        return f"; {', '.join(others)}"

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            self.end(128 + number, f"{number.name} again: ends at once")
        self.ask(number.name, 128 + number)

    def ask(self, why: str, code: int) -> None:
        """All processes stop at the next point; at once where nothing is to be saved yet."""
        with self._lock:
            if self._point is None:
                self.end(code, f"{why} at {self._doing}: ends; there is nothing to save")
            self._stop(why, code)
            self._say(f"{why}: ends after this {self._doing.split()[0]}")

    def _stop(self, why: str, code: int) -> None:
        with self._lock:
            if not self._asked:
                self._asked = why, int(code)
                if self._peers:
                    self._peers.tell(asked=why, asked_code=int(code), point=self._point or 0)
                self._lock.notify_all()

    def _heard(self) -> None:
        """Records of other processes came."""
        with self._lock:
            for record in self._peers.records.values():
                if record.asked:
                    self._stop(record.asked, record.asked_code)
            self._lock.notify_all()

    def _look_at_peers(self, passed_s: float) -> None:
        if self._peers.lost():
            self._end_as_others()
        elif self._peers.failed():
            self._grace_s -= passed_s
            if self._grace_s < 0:
                self._end_as_others()

    # --- ends -------------------------------------------------------------------------------------

    def end(self, code: int, text: str) -> NoReturn:
        """Ends the process, from any thread."""
        if not self._ending.acquire(blocking=False):
            _wait_for_ever()  # another thread ends it
        try:
            self._say(text)
            if self._peers:
                self._peers.tell(ended=int(code), text=text)
        finally:
            os._exit(code)

    def _say(self, text: str) -> None:
        """On stderr, which may be a pipe that nobody reads any more, or a full disk."""
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._name}{text}", file=sys.stderr, flush=True)

    def end_again(self, text: str) -> NoReturn:
        """Ends the process because of something outside."""
        self.end(Exit.AGAIN, text)

    def _end_as_others(self) -> None:
        """Ends the process if another is lost or failed, by name."""
        here = f"This process was at {self._doing}"
        if lost := self._peers.lost():
            self.end(Exit.AGAIN, f"{'; '.join(lost)}. {here}")
        for record in self._peers.failed():
            self.end(record.ended, f"{record.name} ended: {record.text}. {here}")

    def _failed(self, error: BaseException) -> NoReturn:
        """Ends a process that raised; where a collective did, another process may be the cause."""
        code = code_of(error)
        if of_the_runtime(error):
            self._say(line(error))
            self._peers.wait_for_an_end()
            self._end_as_others()
        if code == Exit.BUG or of_the_runtime(error):
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exception(error)
        self.end(code, line(error))

    def _aborted(self) -> None:
        """jax's service ends a process when another is lost, and leaves no time to Python."""
        faulthandler.dump_traceback(2)
        self._peers.wait_for_an_end()
        self._end_as_others()
        self.end(Exit.AGAIN, f"jax gave this process up at {self._doing}: see above")


def _wait_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handles signals in Python, where the watch has read them already."""


_handlers = []  # kept, as what machine code may call must stay


def _on_abort(function: object) -> None:
    """Calls function() where machine code gives up with SIGABRT: Python's own handlers would run
    too late.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: function())
    _handlers.append(handler)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
