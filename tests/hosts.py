"""Hosts of the tests' own on this machine, which the scripts reach by real ssh.

Each host is a set of namespaces: its network with an address of its own, its name, its processes,
its /tmp, /run and /home on disks of limited size. It has an sshd, and root's home is /home/me. What
hosts share is in /mnt: `shared`, as a file system of a cluster is, and the environment of this
checkout. When this process ends, however it does, so do the hosts with all that runs there.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from processes import ROOT

TOOLS = ("sshd", "tmux", "ip", "unshare", "nsenter", "setpriv", "git")
# Of Debian, where a package has another name than its program.
PACKAGES = {"sshd": "openssh-server", "ip": "iproute2", "sbatch": "slurm-client"}
SHARED = "/mnt/shared"
FOLDER = "tree"  # of the tree on the hosts, in root's home
DISK_MB = 1300
SOON_S = 120.0  # on a machine that has other work, which can be slow at times

INSIDE = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind {keys}/boot_id /proc/sys/kernel/random/boot_id
hostname {name}
mkdir -p /mnt
mount -t tmpfs -o size=1m tmpfs /mnt
mkdir /mnt/shared /mnt/venv /mnt/bin /mnt/cache
mount --bind {cache} /mnt/cache
mount --bind {shared} /mnt/shared
mount --bind -o ro {venv} /mnt/venv
mount -t tmpfs -o size=64m tmpfs /run
mkdir -p /run/sshd
cp {keys}/* /run/sshd
mount -t tmpfs -o size={disk}m tmpfs /tmp
mount -t tmpfs -o size={disk}m tmpfs /home
mkdir -p /home/me/{folder}
ln -s /mnt/venv /home/me/{folder}/.venv
echo 'PATH=/mnt/bin:$PATH' >/home/me/.bashrc
sed 's#^root:[^:]*:0:0:[^:]*:[^:]*:#root:x:0:0:root:/home/me:#' /etc/passwd >/run/passwd
mount --bind /run/passwd /etc/passwd
cp /run/sshd/names /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
exec {sshd} -D -e -f /run/sshd/config
"""

# Only the first SetEnv of a file counts.
CACHE = "JAX_COMPILATION_CACHE_DIR=/mnt/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0"
SSHD = """
HostKey /run/sshd/host_key
AuthorizedKeysFile /run/sshd/key.pub
Port {port}
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SetEnv PATH=/mnt/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin XLA_FLAGS="{flags}" {cache}
"""


def missing(*more: str) -> str:
    """Why there can be no hosts here that have TOOLS and `more`; empty where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts of the tests' own need root on Linux"
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    absent = [tool for tool in (*TOOLS, *more) if not shutil.which(tool)]
    packages = " ".join(PACKAGES.get(tool, tool) for tool in absent)
    return f"apt-get install {packages}: there is no {absent[0]}" if absent else ""


def run(*command: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=True, **options)


class Host:
    """One of them, known to the others and to this machine by its address and its name."""

    def __init__(self, net: "Net", number: int):
        self.name, self.address, self.port = f"h{number}", f"{net.prefix}.{number + 1}", 22
        self._outside = f"{net.name}h{number}"
        self.process: subprocess.Popen | None = None

    def start(self, net: "Net", shared: Path) -> None:
        keys = net.folder / self.name
        keys.mkdir()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "host_key"))
        for shared_file in ("key.pub", "names"):
            shutil.copy(net.folder / shared_file, keys)
        flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
        cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
        cache.mkdir(parents=True, exist_ok=True)
        # The kernel makes one for each boot of a machine; XLA and lock.py tell hosts apart by it.
        (keys / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (keys / "config").write_text(SSHD.format(port=self.port, flags=flags, cache=CACHE))
        script = INSIDE.format(
            name=self.name,
            shared=shared,
            cache=cache,
            venv=(ROOT / ".venv").resolve(),
            keys=keys,
            disk=DISK_MB,
            folder=FOLDER,
            sshd=shutil.which("sshd"),
        )
        apart = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child"]
        with (keys / "sshd.log").open("w") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *apart, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.init = self._child()
        inside = ("nsenter", "-t", self.init, "--net", "ip")
        run("ip", "link", "add", self._outside, "type", "veth", "peer", "eth0", "netns", self.init)
        run("ip", "link", "set", self._outside, "master", net.name, "up")
        run(*inside, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")

    def _child(self) -> str:
        """The first process of the host, in its namespaces; its id is as this machine sees it."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return wait_for(lambda: path.read_text().strip())

    def __call__(self, command: str, check: bool = True) -> str:
        """What a shell on the host says, not by its network."""
        inside = ["nsenter", "-t", self.init, "-a", "env", "HOME=/home/me", "bash", "-c"]
        text = f"cd && PATH=/mnt/bin:$PATH && {command}"
        done = subprocess.run([*inside, text], capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def connect(self, up: bool) -> None:
        """Plugs its network in, or out."""
        run("ip", "link", "set", self._outside, "up" if up else "down")

    def processes(self) -> list[str]:
        """All but sshd and its connections, and what asks."""
        lines = self("ps -eww -o pid,args --no-headers").splitlines()
        own = ("sshd", "/usr/sbin/sshd", "ps -eww", "bash -c cd && ")
        return [line for line in lines if not line.split(maxsplit=1)[1].startswith(own)]


class Net:
    """A bridge with hosts on it; this machine is on it too."""

    def __init__(self, folder: Path, count: int):
        self.folder, number = folder, os.getpid() % 16384
        self.name = f"jx{number}"
        self.prefix = f"100.{64 + number // 256}.{number % 256}"  # of addresses that nobody owns
        self.hosts = [Host(self, n) for n in range(count)]
        self.shared = folder / "shared"

    def __enter__(self) -> "Net":
        self.shared.mkdir()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        lines = [f"{host.address} {host.name}\n" for host in self.hosts]
        (self.folder / "names").write_text("127.0.0.1 localhost\n" + "".join(lines))
        run("ip", "link", "add", self.name, "type", "bridge")
        run("ip", "addr", "add", f"{self.prefix}.254/24", "dev", self.name)
        try:
            run("ip", "link", "set", self.name, "up")
            for host in self.hosts:
                host.start(self, self.shared)
            self._ssh()
            for host in self.hosts:
                wait_for(lambda host=host: self.answers(host))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _ssh(self) -> None:
        """An ssh first on the PATH, which uses the tests' own key and known hosts."""
        bin = self.folder / "bin"
        bin.mkdir()
        (self.folder / "ssh_config").write_text(
            f"Host *\n  User root\n  IdentityFile {self.folder / 'key'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder / 'known'}\n  StrictHostKeyChecking yes\n"
        )
        known = [
            f"{h.address} {(self.folder / h.name / 'host_key.pub').read_text()}" for h in self.hosts
        ]
        (self.folder / "known").write_text("".join(known))
        script(bin / "ssh", f'exec {shutil.which("ssh")} -F {self.folder / "ssh_config"} "$@"\n')

    def answers(self, host: Host) -> bool:
        ssh = [str(self.folder / "bin" / "ssh"), host.address, "true"]
        return subprocess.run(ssh, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            if host.process:
                host.process.kill()
                host.process.wait()
        run("ip", "link", "del", self.name)

    def file(self, hosts: Sequence[Host], name: str = "hosts.txt") -> str:
        path = self.folder / name
        path.write_text(
            "# made by the tests\n\n" + "".join(f"root@{h.address}  # {h.name}\n" for h in hosts)
        )
        return str(path)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def wait_for(asked, within_s: float = SOON_S):
    """What asked() is, once that is true."""
    ends = time.monotonic() + within_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            if found := asked():
                return found
        assert time.monotonic() < ends, f"not within {within_s} s"
        time.sleep(0.1)


def tools(folder: Path, names: str) -> str:
    """A folder for a PATH that has these programs alone."""
    folder.mkdir()
    for name in names.split():
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def checkout(folder: Path) -> Path:
    """A repository with this one's files as they lie here, committed: what is sent is a commit."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.stdout.split("\0")):
        source, to = ROOT / name, folder / name
        if source.is_file() and not source.is_symlink():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to)
    run("git", "init", "-q", ".", cwd=folder)
    commit(folder, "as it is")
    return folder


def commit(folder: Path, text: str) -> str:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    run("git", "add", "-A", cwd=folder)
    run("git", *who, "commit", "-q", "-m", text, cwd=folder)
    return run("git", "rev-parse", "HEAD", cwd=folder).stdout.strip()


def need_hosts(*more: str) -> None:
    """Skips a test where there can be no hosts, with these tools too; with REQUIRE_HOSTS=1 it fails
    there, and with 0 it is skipped everywhere.
    """
    if os.environ.get("REQUIRE_HOSTS") == "0":
        pytest.skip("REQUIRE_HOSTS=0: hosts are not asked for")
    if why := missing(*more):
        if os.environ.get("REQUIRE_HOSTS") == "1":
            pytest.fail(f"REQUIRE_HOSTS=1, and {why}")
        pytest.skip(why)


@contextlib.contextmanager
def net_of(folder: Path, count: int, *more: str) -> Iterator[Net]:
    need_hosts(*more)
    with Net(folder, count) as net:
        yield net
