"""The processes of one job: who is there, what each is doing, who is lost, and when all stop.

Process 0 is the hub. Every other process keeps a connection to it, over which it sends its record
and gets those of all. A process that is killed closes its connection and is lost at once; one that
is frozen, or whose host vanishes, is lost when it was silent for some time. The collectives of jax
raise, hang or abort the process then, and name nobody.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from faults import Exit, Fault

POD_PORT = 8476  # of the coordinator on a TPU pod, as jax has it
RETRY_S = 0.2
HELLO_S = 10.0  # in which who connects has to say who it is
SEND_S = 5.0
LONGEST_BEAT_S = 5.0


class Place(NamedTuple):
    """Of this process in a job."""

    address: str  # host:port of process 0
    count: int  # of processes
    number: int  # of this one


def place() -> Place | None:
    """What JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say; without them what a
    TPU pod or Slurm does; None where the process is alone.

    Raises  ValueError when some are missing, or are no numbers that fit.
    """
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return _in_pod() or _in_slurm()
    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    given = [os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
    if None in given:
        raise ValueError(
            "JAX_COORDINATOR_ADDRESS is set without JAX_NUM_PROCESSES and JAX_PROCESS_ID. Set "
            "all three, or none."
        )
    host, _, port = address.rpartition(":")
    if not (all(word.isdigit() for word in (*given, port)) and host):
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS {address}, JAX_NUM_PROCESSES {given[0]}, JAX_PROCESS_ID "
            f"{given[1]}: expected host:port and two numbers, as 10.0.0.2:1234, 4 and 0."
        )
    count, number = map(int, given)
    if number >= count:
        raise ValueError(
            f"JAX_PROCESS_ID {number} is not below JAX_NUM_PROCESSES {count}. Processes are "
            f"numbered from 0 to {count - 1}."
        )
    return Place(address, count, number)


def _in_pod() -> Place | None:
    """On a TPU pod, what its workers know."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    number = os.environ.get("TPU_WORKER_ID", "")
    if len(hosts) < 2 or not number.isdigit():
        return None
    return Place(f"{hosts[0]}:{POD_PORT}", len(hosts), int(number))


def _in_slurm() -> Place | None:
    """Of a task that srun started: the first host of the step, and a port that jax derives from the
    job in the same way, so that two jobs on one host do not meet.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    job, nodes, count, number = (os.environ.get(name, "") for name in names)
    if not (job.isdigit() and nodes and number.isdigit() and count.isdigit() and int(count) > 1):
        return None
    # As host7, host7,host9, or host[07-09,12],other.
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    host = first[1] + (first[2] or "")
    return Place(f"{host}:{61440 + int(job) % 4096}", int(count), int(number))


@dataclass
class Record:
    """What a process tells of itself; the hub sends all of them to all."""

    number: int
    host: str
    doing: str = "start"
    asked: str = ""  # why all should stop, if this process was told to
    asked_code: int = 0  # that it is to end with
    point: int | None = None  # that it is on the way to, once it has heard of that
    ended: int | None = None  # exit code
    text: str = ""  # what it ended with
    lost: str = ""  # how the hub lost it

    @property
    def name(self) -> str:
        return f"process {self.number} ({self.host})"

    @property
    def urgent(self) -> tuple[object, ...]:
        """What all have to know at once; the rest can wait for the next beat."""
        return self.asked, self.point, self.ended, self.lost


class Line:
    """A connection that carries objects, one JSON text in each line."""

    def __init__(self, connection: socket.socket, hello_s: float):
        """hello_s  in which the first object has to come."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A stopped process reads nothing, and who writes to it must not wait for it.
        wait = struct.pack("ll", int(SEND_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        connection.settimeout(hello_s)
        self._connection, self._file = connection, connection.makefile("r", encoding="utf-8")
        self._sending = threading.Lock()

    def send(self, value: object) -> None:
        """What cannot be sent is left out: who reads knows the connection's end."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall((json.dumps(value) + "\n").encode())

    def receive(self) -> dict[str, Any] | None:
        """None where the connection ended."""
        try:
            text = self._file.readline()
            self._connection.settimeout(None)
            return json.loads(text) if text.endswith("\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # also where another thread is reading
            self._connection.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._connection.close()


class Peers:
    """This process's view of the job, kept up to date by threads of its own."""

    def __init__(self, where: Place, silence_s: float, start_s: float, stage: str = "run"):
        """Returns when all processes of the job are there.

        silence_s  without a sign of a process, after which it is lost.
        start_s    in which all have to have come.
        stage      what they meet for. One that was started again may be at an earlier one.
        Raises     Fault that names those that have not come, or are at another stage; ValueError
                   where two have the same number, or do not agree on how many they are, or the
                   port is taken.
        """
        self.number, self.count, self._stage = where.number, where.count, stage
        self.mine = Record(where.number, socket.gethostname())
        self.records = {where.number: self.mine}
        self.changed: Callable[[], None] = lambda: None  # called when records came, in a thread
        self._silence_s, self._beat_s = silence_s, min(LONGEST_BEAT_S, silence_s / 5)
        self._sending = threading.RLock()
        self._lines: dict[int, Line] = {}  # of the hub to all others, of these to the hub
        (self._gather if where.number == 0 else self._find)(where.address, start_s)
        self._silent_s = dict.fromkeys(self._lines, 0.0)
        self._closed = threading.Event()
        self._left = threading.Event()  # a connection closed
        for number, line in self._lines.items():
            self._thread(self._read, number, line)
        self._thread(self._beat)

    def _thread(self, function: Callable[..., None], *arguments: object) -> None:
        name = f"peers {function.__name__}"
        threading.Thread(target=function, args=arguments, daemon=True, name=name).start()

    def tell(self, **what: object) -> None:
        """Sets fields of this process's record, and lets all know at once."""
        with self._sending:
            for name, value in what.items():
                setattr(self.mine, name, value)
            self._send()

    def lost(self) -> list[str]:
        """Each process that is lost, in words."""
        found = sorted(self.records.items())
        return [f"{r.name} is lost: {r.lost}, last at {r.doing}" for _, r in found if r.lost]

    def failed(self) -> list[Record]:
        """The other processes that ended with an error."""
        return [r for r in self.records.values() if r.ended and r.number != self.number]

    def all_ended(self) -> bool:
        """Whether every process ended, well or not. The first one stays until it knows that."""
        known = all(r.ended is not None or r.lost for r in self.records.values())
        return known or (self.number != 0 and self._left.is_set())

    def wait_for_an_end(self) -> None:
        """Returns when another process is lost or failed, or would be known to be."""
        ends = time.monotonic() + self._silence_s + 2 * self._beat_s
        while not (self.lost() or self.failed() or time.monotonic() > ends):
            if self._closed.wait(0.1):
                return

    def close(self) -> None:
        self._closed.set()
        for line in self._lines.values():
            line.close()

    # --- while they run ---------------------------------------------------------------------------

    def _send(self) -> None:
        """In the order in which it is known, or an older word could take a newer one back."""
        with self._sending:
            known = self.records.values() if self.number == 0 else [self.mine]
            value = {"all": [dataclasses.asdict(record) for record in known]}
            for line in self._lines.values():
                line.send(value)

    def _read(self, number: int, line: Line) -> None:
        while (got := line.receive()) is not None:
            self._silent_s[number] = 0.0
            news = False
            for record in (Record(**fields) for fields in got["all"]):
                before = self.records[record.number]
                if record.number == self.number:  # knows itself best, but that it is lost
                    before.lost = before.lost or record.lost
                else:
                    record.lost = record.lost or before.lost
                    news |= record.urgent != before.urgent
                    self.records[record.number] = record
            if news and self.number == 0:
                self._send()
            self.changed()
        self._lose(number, "its connection closed")
        self._left.set()
        self.changed()

    def _beat(self) -> None:
        """Sends and counts silence. Time in which this process itself did not run, as one that was
        stopped, is not another's silence.
        """
        last = time.monotonic()
        while not self._closed.wait(self._beat_s):
            self._send()
            now = time.monotonic()
            for number in self._silent_s:
                self._silent_s[number] += min(now - last, 2 * self._beat_s)
                if self._silent_s[number] > self._silence_s:
                    self._lose(number, f"not heard of for {self._silence_s:.3g} s")
            last = now

    def _lose(self, number: int, how: str) -> None:
        record = self.records[number]
        if not self._closed.is_set() and record.ended is None and not record.lost:
            record.lost = how
            self._send()
            self.changed()

    # --- how they find each other -----------------------------------------------------------------

    def _gather(self, address: str, start_s: float) -> None:
        """The hub listens on the coordinator's port until all have come. Then jax's own service
        listens there; connections that were made stay.
        """
        ends = time.monotonic() + start_s
        port = int(address.rpartition(":")[2])
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise ValueError(
                f"port {port} of JAX_COORDINATOR_ADDRESS {address} cannot be listened on "
                f"({error}): another run has it, or what is left of one. End that, or give "
                "another port."
            ) from error
        with server:
            while len(self._lines) < self.count - 1:
                server.settimeout(max(0.01, ends - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    self._refuse(self._missing(start_s), Exit.AGAIN)
                self._welcome(Line(connection, HELLO_S))
        self._send()

    def _missing(self, start_s: float) -> str:
        absent = [str(n) for n in range(self.count) if n not in self.records]
        here = ", ".join(record.name for _, record in sorted(self.records.items()))
        which = f"processes {', '.join(absent)}" if absent[1:] else f"process {absent[0]}"
        return (
            f"{which} of {self.count} did not come within {start_s:.3g} s (--run.start_minutes); "
            f"here are {here}"
        )

    def _welcome(self, line: Line) -> None:
        hello = line.receive()
        if not isinstance(hello, dict) or set(hello) != {"number", "host", "count", "stage"}:
            line.close()  # not one of ours, as who looks for open ports
            return
        number, host, count = hello["number"], hello["host"], hello["count"]
        before = self.records.get(number)
        self._lines[number if before is None else -1] = line
        if before is not None:
            both = f"{before.host} and {host}"
            self._refuse(f"JAX_PROCESS_ID {number} is given twice, on {both}. Give each its own.")
        self.records[number] = record = Record(number, host)
        if count != self.count:
            self._refuse(
                f"{record.name} has JAX_NUM_PROCESSES {count}, and {self.mine.name} has "
                f"{self.count}. Give all the same."
            )
        if hello["stage"] != self._stage:
            self._refuse(
                f"{record.name} begins its {hello['stage']}, and {self.mine.name} is at the start "
                f"of its {self._stage}: one of them was started again, and so have all to be",
                Exit.AGAIN,
            )

    def _refuse(self, text: str, code: Exit = Exit.MEND) -> NoReturn:
        """Tells those who came, and raises."""
        for line in self._lines.values():
            line.send({"refused": text, "code": code})
            line.close()
        raise _error(text, code)

    def _find(self, address: str, start_s: float) -> None:
        ends = time.monotonic() + start_s
        host, _, port = address.rpartition(":")
        where = host.strip("[]"), int(port)
        while True:
            left = ends - time.monotonic()
            try:
                line = Line(socket.create_connection(where, max(left, 0.01)), max(left, 0.01) + 30)
                break
            except OSError as error:
                if left <= 0:
                    raise Fault(
                        f"process 0 at JAX_COORDINATOR_ADDRESS {address} did not answer within "
                        f"{start_s:.3g} s (--run.start_minutes): {error}"
                    ) from error
                time.sleep(RETRY_S)
        hello = {"number": self.number, "host": self.mine.host, "count": self.count}
        line.send(hello | {"stage": self._stage})
        gone = f"process 0 at JAX_COORDINATOR_ADDRESS {address} went away at the start"
        answer = line.receive() or {"refused": gone, "code": Exit.AGAIN}
        if "refused" in answer:
            line.close()
            raise _error(answer["refused"], answer["code"])
        others = (Record(**fields) for fields in answer["all"])
        self.records |= {r.number: r for r in others if r.number != self.number}
        self._lines[0] = line


def _error(text: str, code: int) -> Exception:
    return Fault(text) if code == Exit.AGAIN else ValueError(text)
