"""Simulated hosts on this machine, each with its own name, address and network link.

A host is a set of Linux namespaces, with its own boot id, by which XLA distinguishes hosts. The
links meet at a switch in another namespace, and can be unplugged. With `with_ssh` each host also
runs sshd and has its own disks. All hosts and their processes end when the thread that created them
ends for any reason.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from processes import FAST, ROOT
from utils import ConfigError

PROGRAMS = ("ip", "unshare", "nsenter", "setpriv")
SSH_PROGRAMS = ("sshd", "tmux", "git")
PACKAGES = {"sshd": "openssh-server", "sbatch": "slurm-client", "ip": "iproute2"}
PACKAGES |= dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
ENVIRONMENT = os.environ | {"PATH": PATH}

# Kills a process when the thread that started it ends.
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
NAMESPACES = ("--net", "--uts", "--mount-proc", "--ipc", "--pid", "--fork", "--kill-child")
WAIT_S = 120.0  # generous, since other programs can slow the machine down

SHARED = "/mnt/shared"
FOLDER = "tree"  # the repository on a host with ssh, in root's home
DISK_MB = 1300

SETUP = """
set -e
hostname {name}
mount --bind {folder}/names /etc/hosts
mount --bind {folder}/{name}/boot_id /proc/sys/kernel/random/boot_id
ip link set lo up
"""
SSH_SETUP = """
mkdir -p /mnt
mount -t tmpfs -o size=1m tmpfs /mnt
mkdir /mnt/shared /mnt/venv /mnt/bin /mnt/cache
mount --bind {cache} /mnt/cache
mount --bind {folder}/shared /mnt/shared
mount --bind -o ro {venv} /mnt/venv
mount -t tmpfs -o size=64m tmpfs /run
mkdir /run/sshd
mount --bind {folder}/{name} /run/sshd
mount -t tmpfs -o size={disk_mb}m tmpfs /tmp
mount -t tmpfs -o size={disk_mb}m tmpfs /home
mkdir -p /home/me/{tree}
ln -s /mnt/venv /home/me/{tree}/.venv
echo 'PATH=/mnt/bin:$PATH' >/home/me/.bashrc
sed 's#^root:[^:]*:0:0:[^:]*:[^:]*:#root:x:0:0:root:/home/me:#' /etc/passwd >/run/passwd
mount --bind /run/passwd /etc/passwd
"""
# sshd uses the first SetEnv alone.
SSHD_CONFIG = f"""
HostKey /run/sshd/host_key
AuthorizedKeysFile /run/sshd/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SetEnv PATH=/mnt/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
XLA_FLAGS="--xla_force_host_platform_device_count=4 {" ".join(FAST)}" \
JAX_COMPILATION_CACHE_DIR=/mnt/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
"""


def missing(*programs: str) -> str:
    """Return why hosts with these programs cannot be simulated here; empty if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "root on Linux is required"
    absent = [name for name in (*PROGRAMS, *programs) if not shutil.which(name, path=PATH)]
    packages = dict.fromkeys(PACKAGES.get(name, name) for name in absent)
    return f"{absent[0]} is not installed: apt-get install {' '.join(packages)}" if absent else ""


def run(*command: str, **options: Any) -> str:
    """Run a command and return its stdout. Raises ConfigError with its stderr if it fails."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, **options)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


class Host:
    """A set of namespaces, which last as long as their first process."""

    def __init__(self, name: str, address: str = ""):
        self.name, self.address = name, address
        self._unshare: subprocess.Popen | None = None

    def start(self, script: str, log: Path) -> None:
        """Run a bash script as the first process. Raises ConfigError if namespaces are refused."""
        with log.open("w") as stderr:
            self._unshare = subprocess.Popen(
                [*WITH_PARENT, "unshare", *NAMESPACES, "bash", "-c", script],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        if self._unshare.stdout.readline() != "ready\n":
            reason = f"{log.read_text().strip()}. A container must be privileged."
            raise ConfigError(f"cannot create the simulated host {self.name}: {reason}")
        children = f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children"
        self.process = int(Path(children).read_text())  # the first process, as seen from here

    def stop(self) -> None:
        if self._unshare:
            with self._unshare:
                self._unshare.kill()

    def command(self, *words: str, folder: Path | str = "/") -> list[str]:
        """Return the command that runs `words` here; it ends with the thread that starts it."""
        enter = ("nsenter", "-t", str(self.process), "-a", f"--wd={folder}")
        return [*WITH_PARENT, *enter, *WITH_PARENT, *words]

    def in_network(self, command: str) -> None:
        """Run an `ip` command in the network of this host."""
        run("nsenter", "-t", str(self.process), "--net", *command.split())

    def __call__(self, command: str, check: bool = True) -> str:
        """Return the stdout of a bash command in root's home; the network is not used."""
        words = self.command("bash", "-c", f"cd && PATH=/mnt/bin:$PATH && {command}")
        home = ENVIRONMENT | {"HOME": "/home/me"}
        done = subprocess.run(words, env=home, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def processes(self) -> list[str]:
        """Return `PID COMMAND` of each process except sshd, its connections and this query."""
        lines = self("ps -eww -o pid,args --no-headers").splitlines()
        own = ("sshd", "/usr/sbin/sshd", "ps -eww", "bash -c cd && ")
        return [line for line in lines if not line.split(maxsplit=1)[1].startswith(own)]


class Network:
    """Hosts h0, h1, .. with addresses 10.0.0.1, .2, .., and the switch that connects them.

    Hosts with ssh have the folder `shared` at /mnt/shared; the `ssh` in `bin` reaches them.
    """

    def __init__(self, count: int, folder: Path, with_ssh: bool = False):
        self.hosts = [Host(f"h{n}", f"10.0.0.{n + 1}") for n in range(count)]
        self.folder, self.shared, self.bin = folder, folder / "shared", folder / "bin"
        self._ports = {host: f"port{n}" for n, host in enumerate(self.hosts)}  # of the switch
        self._switch, self._with_ssh = Host("switch"), with_ssh

    def __enter__(self) -> "Network":
        """Raises ConfigError if hosts cannot be simulated here."""
        if reason := missing(*(SSH_PROGRAMS if self._with_ssh else ())):
            raise ConfigError(f"cannot simulate hosts: {reason}.")
        names = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        (self.folder / "names").write_text("\n".join(names) + "\n")
        if self._with_ssh:
            self._write_keys()
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            self._start(self._switch)
            self._switch.in_network("ip link add bridge type bridge")
            self._switch.in_network("ip addr add 10.0.0.254/24 dev bridge")
            self._switch.in_network("ip link set bridge up")
            for host, port in self._ports.items():
                self._start(host)
                peer = f"peer name eth0 netns {host.process}"
                self._switch.in_network(f"ip link add {port} type veth {peer}")
                self._switch.in_network(f"ip link set {port} master bridge up")
                host.in_network(f"ip addr add {host.address}/24 dev eth0")
                host.in_network("ip link set eth0 up")
            if self._with_ssh:
                self._write_ssh()
                for host in self.hosts:
                    wait_for(lambda host=host: self.answers(host))
            stack.pop_all()
        return self

    def _start(self, host: Host) -> None:
        folder = self.folder / host.name
        folder.mkdir(exist_ok=True)
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        setup, command = SETUP, "sleep infinity"
        if self._with_ssh and host is not self._switch:
            setup += SSH_SETUP
            command = f"{shutil.which('sshd', path=PATH)} -D -e -f /run/sshd/sshd_config"
        places = {"folder": self.folder, "venv": (ROOT / ".venv").resolve(), "tree": FOLDER}
        places |= {"cache": os.environ.get("JAX_COMPILATION_CACHE_DIR"), "disk_mb": DISK_MB}
        setup = setup.format(name=host.name, **places)
        host.start(f"{setup}\necho ready\nexec {command}", folder / "log")

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for host in (*self.hosts, self._switch):
            host.stop()

    def connect(self, host: Host, up: bool) -> None:
        """Plug in the link of a host, or unplug it."""
        self._switch.in_network(f"ip link set {self._ports[host]} {'up' if up else 'down'}")

    def _write_keys(self) -> None:
        Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
        self.shared.mkdir()
        make_key = ("ssh-keygen", "-q", "-t", "ed25519", "-N")
        run(*make_key, "", "-f", str(self.folder / "key"))
        for host in self.hosts:
            folder = self.folder / host.name
            folder.mkdir()
            run(*make_key, "", "-f", str(folder / "host_key"))
            shutil.copy(self.folder / "key.pub", folder)
            (folder / "sshd_config").write_text(SSHD_CONFIG)

    def _write_ssh(self) -> None:
        """Write an `ssh` that runs on the switch, with its own key and known hosts."""
        self.bin.mkdir()
        known = self.folder / "known"
        keys = [(self.folder / host.name / "host_key.pub").read_text() for host in self.hosts]
        known.write_text("".join(f"{h.address} {k}" for h, k in zip(self.hosts, keys, strict=True)))
        (self.folder / "ssh_config").write_text(
            f"Host *\n  User root\n  IdentityFile {self.folder / 'key'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n"
        )
        ssh = f"{shutil.which('ssh')} -F {self.folder / 'ssh_config'}"
        enter = f"{shutil.which('nsenter')} --net=/proc/{self._switch.process}/ns/net"
        write_script(self.bin / "ssh", f'exec {enter} {ssh} "$@"\n')

    def ssh(self, host: Host, command: str) -> subprocess.CompletedProcess:
        ssh = [str(self.bin / "ssh"), host.address, command]
        return subprocess.run(ssh, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    def answers(self, host: Host) -> bool:
        return self.ssh(host, "true").returncode == 0

    def hosts_file(self, hosts: Sequence[Host], name: str = "hosts.txt") -> str:
        """Write a file for --hosts and return its path."""
        path = self.folder / name
        path.write_text("".join(f"root@{host.address}  # {host.name}\n" for host in hosts))
        return str(path)


def require(*programs: str) -> None:
    """Skip the test if these hosts cannot be simulated; with REQUIRE_HOSTS=1 the test fails."""
    if reason := missing(*programs):
        (pytest.fail if os.environ.get("REQUIRE_HOSTS") == "1" else pytest.skip)(reason)


@contextlib.contextmanager
def network_with_ssh(count: int, folder: Path, *programs: str) -> Iterator[Network]:
    """Start hosts with ssh and these programs, or skip the test."""
    require(*SSH_PROGRAMS, *programs)
    with Network(count, folder, with_ssh=True) as network:
        yield network


def wait_for(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Return the first true value of `condition()`. A file that is missing counts as false."""
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            if value := condition():
                return value
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.05)


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def path_with(folder: Path, programs: str) -> str:
    """Return a PATH with these programs alone."""
    folder.mkdir()
    for name in programs.split():
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def checkout(folder: Path) -> Path:
    """Create a repository with one commit of the files of this one, as they are now."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, names.split("\0")):
        source, copy = ROOT / name, folder / name
        if source.is_file() and not source.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    run("git", "init", "-q", ".", cwd=folder)
    commit(folder, "all files")
    return folder


def commit(folder: Path, message: str) -> str:
    author = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    run("git", "add", "-A", cwd=folder)
    run("git", *author, "commit", "-q", "-m", message, cwd=folder)
    return run("git", "rev-parse", "HEAD", cwd=folder)
