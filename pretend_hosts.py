"""Pretend hosts: several on this machine, each with a name, an address and a link of its own, whose
bandwidth and delay are set while programs run.

A host is a set of Linux namespaces: its network, its name, its mounts. Links end at a bridge in a
further one, so that nothing of this machine's own network is touched. Namespaces last as long as a
process is in them, and all of these end with the thread that made them, however that ends.
"""

import collections
import contextlib
import ctypes
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = {"ip": "iproute2", "tc": "iproute2"} | dict.fromkeys(
    ("unshare", "nsenter", "setpriv"), "util-linux"
)
# Where these may be.
ENVIRONMENT = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
ENDS = ("setpriv", "--pdeathsig", "KILL")  # a process with the thread that started it
NET = 0x40000000  # CLONE_NEWNET
SILENCE_S = 20.0  # in which a link has to carry something while it is measured

# Without the sysctl a connection that waited for a computation begins slowly again, and the delay
# of a link would be paid many times over.
INSIDE = """
set -e
hostname {name}
mount --bind {names} /etc/hosts
mount --bind {boot_id} /proc/sys/kernel/random/boot_id
ip link set lo up
echo 0 >/proc/sys/net/ipv4/tcp_slow_start_after_idle
echo ready
exec sleep infinity
"""


def missing() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "root on Linux is needed for hosts that are namespaces"
    for tool, package in TOOLS.items():
        if not shutil.which(tool, path=ENVIRONMENT["PATH"]):
            return f"there is no {tool}: apt-get install {package}"
    return ""


def run(*command: str) -> None:
    """Raises ValueError with what the command said where it fails."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"this machine makes no pretend hosts: {' '.join(command)} said {done.stderr.strip()!r}"
            ". In a container it has to be a privileged one."
        )


@contextlib.contextmanager
def network_of(process: int) -> Iterator[None]:
    """This thread is in the network of a process; sockets that it makes meanwhile stay there."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{process}/ns/net") as other:
        for place in (other, own):
            if setns(place.fileno(), NET):
                raise OSError(ctypes.get_errno(), "setns")
            if place is other:
                try:
                    yield
                finally:
                    setns(own.fileno(), NET)


class Host:
    """A set of namespaces, held by a process that sleeps there."""

    def __init__(self, name: str, address: str = ""):
        self.name, self.address = name, address
        self._holder: subprocess.Popen | None = None
        self._shaped: set[str] = set()

    def start(self, script: str) -> None:
        """Raises ValueError where namespaces are refused."""
        self._holder = subprocess.Popen(
            [*ENDS, "unshare", "--net", "--uts", "--mount", "bash", "-c", script],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._holder.stdout.readline() != "ready\n":
            said = self._holder.stderr.read().strip()
            raise ValueError(
                f"this machine makes no pretend hosts: unshare said {said!r}. In a container it "
                "has to be a privileged one."
            )

    @property
    def process(self) -> int:
        """The number of the one that sleeps."""
        return self._holder.pid

    def stop(self) -> None:
        if self._holder:
            with self._holder:
                self._holder.kill()

    def command(self, *words: str, folder: Path | str = "/") -> list[str]:
        """That runs these words on the host, in a folder, until the thread here ends that does."""
        inside = ("nsenter", "-t", str(self.process), "--net", "--uts", "--mount")
        return [*ENDS, *inside, f"--wd={folder}", *words]

    def ip(self, *words: str) -> None:
        run("nsenter", "-t", str(self.process), "--net", "ip", *words)

    def shape(self, device: str, mbit: float) -> None:
        """What leaves by a device leaves at so many Mbit/s; 0: as fast as it goes."""
        tc = ("nsenter", "-t", str(self.process), "--net", "tc", "qdisc")
        if mbit:
            # What passes at once after a pause: ten full frames, or on a fast link those of 2 ms,
            # for a busy machine looks at its clock no more often. Nothing is dropped before 16 MB
            # wait.
            burst = max(16_000, round(mbit * 250))
            rate = ("rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "limit", "16m")
            run(*tc, "replace", "dev", device, "root", "tbf", *rate)
            self._shaped.add(device)
        elif device in self._shaped:
            run(*tc, "del", "dev", device, "root")
            self._shaped.remove(device)


class Network:
    """Hosts, and a switch that their links end at."""

    def __init__(self, count: int, folder: Path):
        """folder  for the file of all names, which is every host's /etc/hosts."""
        self.hosts = [Host(f"h{n}", f"10.0.0.{n + 1}") for n in range(count)]
        self.ports = [f"port{n}" for n in range(count)]  # of the switch
        self._switch, self._folder, self._relay = Host("switch"), folder, None

    def __enter__(self) -> "Network":
        """Raises ValueError with the mend where there can be none."""
        if why := missing():
            raise ValueError(f"this machine makes no pretend hosts: {why}.")
        names = self._folder / "names"
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        names.write_text("\n".join(lines) + "\n")
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            for host in (self._switch, *self.hosts):
                boot_id = self._folder / f"{host.name}.boot_id"
                boot_id.write_text(f"{uuid.uuid4()}\n")
                host.start(INSIDE.format(name=host.name, names=names, boot_id=boot_id))
            self._switch.ip("link", "add", "bridge", "type", "bridge")
            self._switch.ip("link", "set", "bridge", "up")
            for host, port in zip(self.hosts, self.ports, strict=True):
                ends = ("name", "eth0", "netns", str(host.process))
                self._switch.ip("link", "add", port, "type", "veth", "peer", *ends)
                self._switch.ip("link", "set", port, "master", "bridge", "up")
                host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
                host.ip("link", "set", "eth0", "up")
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._relayed(0)
        for host in (*self.hosts, self._switch):
            host.stop()

    def throttle(self, mbit: float) -> None:
        """Each host sends so many Mbit/s at most, and receives as many; 0: as fast as it goes."""
        for host, port in zip(self.hosts, self.ports, strict=True):
            host.shape("eth0", mbit)
            self._switch.shape(port, mbit)

    def delay(self, seconds: float) -> None:
        """What a host sends arrives so much later: with a relay in the place of the bridge."""
        self._relayed(0)
        where = ("nomaster",) if seconds else ("master", "bridge")
        for port in self.ports:
            self._switch.ip("link", "set", port, *where)
        self._relayed(seconds)

    def _relayed(self, seconds: float) -> None:
        if self._relay:
            self._relay.close()
        self._relay = Relay(self._switch.process, self.ports, seconds) if seconds else None

    # --- what the links do, measured --------------------------------------------------------------

    def _connected(self, sender: Host, receiver: Host) -> tuple[socket.socket, socket.socket]:
        with network_of(receiver.process):
            listening = socket.create_server((receiver.address, 0))
        with listening:
            with network_of(sender.process):
                near = socket.socket()
            near.connect(listening.getsockname())
            far, _ = listening.accept()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(SILENCE_S)
        return near, far

    def bandwidth(self, seconds: float = 1.0) -> float:
        """Mbit/s of data from each host to the next, all at once, as in a ring's collective."""
        ring = zip(self.hosts, self.hosts[1:] + self.hosts[:1], strict=True)
        lines = [self._connected(*pair) for pair in ring]
        with ThreadPoolExecutor(2 * len(lines)) as pool:
            rates = [pool.submit(_receive, far) for _, far in lines]
            for near, _ in lines:
                pool.submit(_send, near, seconds)
            return statistics.mean(rate.result() for rate in rates) * 8e-6

    def round_trip_s(self, times: int = 20) -> float:
        """Median seconds in which a byte is there and back."""
        near, far = self._connected(*self.hosts[:2])
        taken = []
        with near, far, ThreadPoolExecutor(1) as pool:
            pool.submit(_echo, far, times)
            for _ in range(times):
                start = time.perf_counter()
                near.sendall(b"?")
                near.recv(1)
                taken.append(time.perf_counter() - start)
        return statistics.median(taken)


def _send(connection: socket.socket, seconds: float) -> None:
    part, ends = bytes(1 << 16), time.perf_counter() + seconds
    with connection:
        while time.perf_counter() < ends:
            connection.sendall(part)


def _receive(connection: socket.socket) -> float:
    """Bytes per second after the first ones, until the other side closes."""
    size, room = 0, bytearray(1 << 18)
    with connection:
        connection.recv_into(room)
        start = end = time.perf_counter()
        while got := connection.recv_into(room):
            size, end = size + got, time.perf_counter()
    return size / (end - start)


def _echo(connection: socket.socket, times: int) -> None:
    for _ in range(times):
        connection.sendall(connection.recv(1))


# --- delay ----------------------------------------------------------------------------------------

ALL_FRAMES = 3  # ETH_P_ALL
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
HEADER = 10  # bytes of virtio_net_hdr
MOST = HEADER + 18 + 65_536  # of a frame that the sender has not cut up yet
QUEUE_BYTES = 1 << 26
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33


class Relay:
    """A switch in this process: each frame leaves a while after it came.

    Frames are read and written with the header in which the kernel says what it has put off, as
    checksums and cutting up: so they may be 64 KiB long, and few enough for Python.
    """

    def __init__(self, switch: int, ports: list[str], delay_s: float):
        self._delay_s, self._open = delay_s, True
        with network_of(switch):
            self._ports = [self._port(name) for name in ports]
        self._learned: dict[bytes, socket.socket] = {}
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @staticmethod
    def _port(name: str) -> socket.socket:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
            port.setsockopt(SOL_PACKET, option, 1)
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            port.setsockopt(socket.SOL_SOCKET, option, QUEUE_BYTES)
        port.bind((name, ALL_FRAMES))
        return port

    def _carry(self) -> None:
        waiting: collections.deque = collections.deque()
        while self._open:
            wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for port in select.select(self._ports, [], [], wait_s)[0]:
                waiting.append((time.monotonic() + self._delay_s, port, port.recv(MOST)))
            while waiting and waiting[0][0] <= time.monotonic():
                self._forward(*waiting.popleft()[1:])

    def _forward(self, came_by: socket.socket, frame: bytes) -> None:
        to, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self._learned[sender] = came_by
        known = self._learned.get(to)
        for port in [known] if known else [p for p in self._ports if p is not came_by]:
            port.send(frame)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for port in self._ports:
            port.close()
