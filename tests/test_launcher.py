"""The launcher on simulated hosts, with real ssh and tmux.

Most runs are stand_in.py, which connects and ends as main.py does; a few train.
"""

import getpass
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import simulated_hosts
import tiny_run
from processes import FAST, ROOT
from simulated_hosts import FOLDER, SHARED, WAIT_S, wait_for, write_script

SCRIPTS = ("launcher.sh", "debug_tpu.sh", "setup_tpu.sh", "launch/worker.sh")
STAND_IN = ["python", "tests/stand_in.py", "--steps"]


class Cluster:
    """Hosts, a tree to launch from, and the launcher."""

    def __init__(self, net: simulated_hosts.Network, tree: Path):
        self.net, self.tree, self.bin = net, tree, net.bin
        self.all, self.two = net.hosts, net.hosts_file(net.hosts[:2])

    def __call__(self, *words: str, file: str | None = None, limit_s: float = 300, **more: str):
        """Run ./launcher.sh WORDS, on two hosts unless `file` or --tpu names others."""
        target = [] if "--tpu" in words else ["--hosts", file or self.two]
        return subprocess.run(
            [str(self.tree / "launcher.sh"), *target, *words],
            env=os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"} | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            cwd=self.tree,
        )

    def start(self, *words: str, **more: str) -> None:
        done = self(*words, **more)
        assert done.returncode == 0, done.stderr
        assert "hosts are up" in done.stderr

    def status(self, **more: str) -> tuple[int, dict[str, list[str]], str]:
        """Return the exit code, the line of each host, and the reported problems."""
        done = self("status", **more)
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
        return done.returncode, {name.split("@")[-1]: rest for name, rest in lines}, done.stderr

    def wait_for_status(self, host: simulated_hosts.Host, text: str) -> tuple[int, str]:
        """Wait until status prints `text` for a host; return the exit code and the problems."""

        def reported():
            code, lines, problems = self.status()
            return (code, problems) if text in lines.get(host.address, "") else None

        return wait_for(reported)

    def wait_for_steps(self) -> None:
        """Wait until the processes on two hosts take steps."""
        for number, host in enumerate(self.all[:2]):
            wait_for(lambda h=host, n=number: re.search(r"step \d+/", self.log(h, n)))

    def wait_for_end(
        self, hosts: Sequence[simulated_hosts.Host], timeout_s: float = WAIT_S
    ) -> None:
        """Wait until no launch runs on these hosts."""
        for host in hosts:
            wait_for(lambda h=host: not h("tmux ls 2>/dev/null", check=False), timeout_s)

    def log(self, host: simulated_hosts.Host, number: int, name: str = "train") -> str:
        # A process that has just been started may have no log yet.
        return host(f"cat {FOLDER}/.launch/{name}/{number}/log", check=False)

    def pid(self, number: int) -> str:
        return self.all[number](f"cat {FOLDER}/.launch/train/{number}/pid")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with simulated_hosts.network_with_ssh(4, folder) as net:
        yield Cluster(net, simulated_hosts.checkout(folder / FOLDER))


@pytest.fixture
def two(cluster):
    """The cluster; after the test no process and no file of it remains on the hosts."""
    yield cluster
    for host in cluster.all:
        host(
            f"kill -9 -1; rm -rf {FOLDER}/.launch {FOLDER}/.venv* {FOLDER}/stand_in_* /mnt/bin/*"
            f" big starts away; mkdir -p {FOLDER} && cd {FOLDER} && ln -s /mnt/venv .venv"
        )
        host(f"cd {FOLDER} && git reset -q --hard", check=False)  # if the tree was sent


# --- what needs no hosts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_usage_and_rejects_unknown_options(name):
    usage = subprocess.run([ROOT / name, "--help"], capture_output=True, text=True)
    assert usage.returncode == 0 and f"./{name}" in usage.stdout and "set -euo" not in usage.stdout
    refused = subprocess.run([ROOT / name, "--speed", "9"], capture_output=True, text=True)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "--help" in refused.stderr and "--speed" in refused.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_a_symbolic_link_starts_finds_its_tree(tmp_path, name):
    (tmp_path / "tree").symlink_to(ROOT)
    (tmp_path / "first").symlink_to(f"tree/{name}")  # relative to the link
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "second").symlink_to("../first")
    environment = os.environ | {"CDPATH": "/"}
    command = ["bin/second", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and f"./{name}" in done.stdout, done.stderr
    assert not done.stderr


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, [], "cannot read --hosts hosts.txt. Give a file with one host per line"),
        ("# none\n\n", [], "lists no host"),
        ("a  # b\n a;b \n", [], "line 2: a;b is not [user@]host[:port]"),
        ("a b", [], "line 1: a b is not [user@]host[:port]"),
        ("ok\n\nok:22\n", [], "line 3: ok is listed twice"),
        (
            "ok",
            ["--name", "a.b"],
            "--name a.b is no name for a tmux session. Use letters, digits, - and _ only",
        ),
        ("ok", ["--name"], "--name needs a value"),
        ("ok", ["--keep-alive", "often", "--", "x"], "--keep-alive often is not a number"),
        ("ok", [], "no command. Give one after --"),
        ("ok", ["--"], "no command after --"),
        ("ok", ["begin"], "unknown verb begin"),
        ("ok", ["status", "now"], "unexpected argument now after status"),
        ("ok", ["logs", "other"], "no host other. The hosts are ok"),
        ("ok", ["--env", "none", "--", "x"], "cannot read --env none"),
        ("ok", ["--env", "bad.env", "--", "x"], "bad.env, line 2 is not VARIABLE=VALUE"),
        (
            "ok",
            ["--env", "open.env", "--", "x"],
            "open.env, line 1: the value does not end with its quote",
        ),
        (
            "ok",
            ["--env", "after.env", "--", "x"],
            "after.env, line 1: the value does not end with its quote",
        ),
        ("ok", ["--commit", "none", "--", "x"], "--commit none is not a commit of this repository"),
    ],
)
def test_bad_input_is_refused_with_one_line(tmp_path, text, words, message):
    if text is not None:
        (tmp_path / "hosts.txt").write_text(text)
    (tmp_path / "bad.env").write_text("KEY=x\nexport WANDB_API_KEY secret\n")
    (tmp_path / "open.env").write_text('KEY="secret\nmore"\n')
    (tmp_path / "after.env").write_text("KEY='secret' secret\n")
    command = [ROOT / "launcher.sh", "--hosts", "hosts.txt", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "secret" not in done.stderr


def test_without_hosts_the_error_names_the_three_ways_to_give_them():
    done = subprocess.run([ROOT / "launcher.sh", "status"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Use --hosts FILE, or --tpu NAME --zone ZONE, or run this in a Slurm job" in done.stderr


LOST = """F0000 client.h:80] The following tasks are unhealthy (stopped sending heartbeats):
{}
The tasks have crashed.
"""
UNREACHED = "E0000 client.cc:1] Failed to send RPC to coordination service.\n"
ENDED = "worker.sh: 2026-01-01T00:00:00Z process 0 ended with {}\n"


@pytest.mark.parametrize(
    ("log", "lost"),
    [
        (LOST.format("3, 12") + ENDED.format(134), "3,12"),
        (UNREACHED + UNREACHED + ENDED.format(134), "0"),
        (LOST.format("3") + ENDED.format(134) + "step 1/1  loss 2\n" + ENDED.format(0), "-"),
        (LOST.format("3") + ENDED.format(134) + ENDED.format(137), "-"),
        (LOST.format("3") + ENDED.format(134) + LOST.format("5") + ENDED.format(134), "5"),
    ],
)
def test_status_names_only_processes_that_the_last_start_lost(tmp_path, log, lost):
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "worker.sh", tmp_path / "launch")
    state = tmp_path / ".launch" / "no-session" / "0"
    state.mkdir(parents=True)
    (state / "log").write_text(log)
    (state / "state").write_text("ended with 134\n")
    command = [tmp_path / "launch" / "worker.sh", "status", "no-session", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\t")[5] == lost


# --- starting -------------------------------------------------------------------------------------


def test_arguments_reach_the_command_unchanged_and_secrets_only_by_a_file(two):
    typed = ["a b", "it's", '"q" $HOME `id` \\', "new\nline", "*", "", "ä"]
    secret = two.tree / "wandb.env"
    secret.write_text("# a comment\nWANDB_API_KEY=se'cr et$1\n")
    show = "import os, sys; print(sys.argv[1:], os.environ['WANDB_API_KEY'], flush=True)"
    show += "; import time; time.sleep(99)"
    two.start("--env", str(secret), "--", "python", "-c", show, *typed)
    for number, host in enumerate(two.all[:2]):
        wait_for(lambda host=host, n=number: f"{typed} se'cr et$1" in two.log(host, n))
        mode = host(f"stat -c %a {FOLDER}/.launch/train/{number}/secrets")
        assert mode == "600"
        assert any("time.sleep(99)" in line for line in host.processes())
        assert not any("cr et" in line for line in host.processes())
    assert "cr et" not in two("--dry-run", "--env", str(secret), "--", "x").stdout


VARIABLES = r"""# a comment
PLAIN=a b
  export EXPORTED=x
EMPTY=
NOTHING=   # a comment
COMMENT=a#b # a comment
EQUALS=a=b==
DOLLAR=$HOME/`id`\n
DOUBLE="a # b  "  # a comment
ESCAPED="\"\$x\\ \n $HOME"
SINGLE='$HOME "a" \ #'
INSIDE=it's "q"
SPACES=   a	
LAST=ä"""
VALUES = {
    "PLAIN": "a b",
    "EXPORTED": "x",
    "EMPTY": "",
    "NOTHING": "",
    "COMMENT": "a#b",
    "EQUALS": "a=b==",
    "DOLLAR": r"$HOME/`id`\n",
    "DOUBLE": "a # b  ",
    "ESCAPED": r'"$x\ \n $HOME',
    "SINGLE": r'$HOME "a" \ #',
    "INSIDE": 'it\'s "q"',
    "SPACES": "a",
    "LAST": "ä",
}
SHOW = """import json, os
names = "{}".split()
print("values", json.dumps({{name: os.environ.get(name) for name in names}}), flush=True)"""


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_file_of_variables_is_read_as_bash_reads_quotes_and_comments(two, ends):
    file = two.tree / "variables.env"
    start = "\ufeff" if ends == "\r\n" else ""  # as editors of Windows write it
    file.write_bytes((start + VARIABLES.replace("\n", ends)).encode())
    two.start("--env", str(file), "--", "python", "-c", SHOW.format(" ".join(VALUES)))
    found = wait_for(lambda: re.search("^values (.*)$", two.log(two.all[0], 0), re.M))
    assert json.loads(found[1]) == VALUES


NOISE = {  # what a login shell reads before it runs a command
    "bash": (".bashrc", "echo noise; printf 'running\\nup 5 s'; echo noise >&2\n"),
    "tcsh": (".tcshrc", "echo noise; echo running; setenv PATH /mnt/bin:$PATH\n"),
    "fish": (".config/fish/config.fish", "echo noise; echo running\n"),
}


def test_any_login_shell_works_even_one_that_prints_at_its_start(two):
    simulated_hosts.require(*NOISE)
    used = two.all[: len(NOISE)]
    file = two.net.hosts_file(used, "shells.txt")
    for host, (shell, (name, text)) in zip(used, NOISE.items(), strict=True):
        (two.net.shared / shell).write_text(text)
        use = f"sed 's#^\\(root:.*:\\)[^:]*$#\\1{shutil.which(shell)}#' /etc/passwd"
        host("cat .bashrc >before && cat /etc/passwd >passwd.before")
        host(f"mkdir -p $(dirname {name}) && cat {SHARED}/{shell} >>{name}")
        host(f"{use} >passwd.new && cat passwd.new >/etc/passwd")
    try:
        typed = ["a b", "it's", '"q" $HOME `id` \\', "new\nline", "!x", "*", "", "ä"]
        show = "import sys; print(sys.argv[1:], flush=True); import time; time.sleep(99)"
        two.start("--", "python", "-c", show, *typed, file=file)
        code, lines, problems = two.status(file=file)
        assert code == 0 and not problems
        assert all(line.startswith("up ") for line in lines.values()), lines
        for number, host in enumerate(used):
            wait_for(lambda h=host, n=number: str(typed) in two.log(h, n))
        again = two("--", *STAND_IN, "1", file=file)
        assert again.returncode == 2 and "train is already running on" in again.stderr
        done = two("stop", file=file)
        assert done.returncode == 0 and done.stdout.count("ended with 143") == 3, done.stderr
    finally:
        for host, (name, _) in zip(used, NOISE.values(), strict=True):
            host(f"rm -f {name}; cat before >.bashrc; cat passwd.before >/etc/passwd")


def test_a_job_keeps_its_owner_when_it_restarts(two):
    command = ["bash", "-c", 'echo "owner=$RUN_OWNER"; sleep 1; exit 75']
    default = f"{getpass.getuser()}@{os.uname().nodename}:train:{two.all[0].address}"
    for more, owner in (({}, default), ({"RUN_OWNER": "a person"}, "a person")):
        two.start("--keep-alive", "1", "--pause", "0", "--", *command, **more)
        two.wait_for_end(two.all[:2])
        for number, host in enumerate(two.all[:2]):
            found = re.findall("^owner=(.*)$", two.log(host, number), re.M)
            assert found == [owner] * 2  # the start and the restart
    host = two.all[0]
    start = "./launch/worker.sh start alone 0 -- bash -c 'echo owner=$RUN_OWNER; sleep 1'"
    host(f"cd {FOLDER} && {start}")
    assert two.log(host, 0, "alone").splitlines()[0] == "owner=root@h0:alone"


def test_a_second_start_under_a_running_name_is_refused_with_the_fix(two):
    two.start("--", *STAND_IN, "500")
    again = two("--", *STAND_IN, "1")
    assert again.returncode == 2
    one, other = (host.address for host in two.all[:2])
    assert f"train is already running on root@{one} root@{other}. " in again.stderr
    assert "./launcher.sh status" in again.stderr and "./launcher.sh stop" in again.stderr
    code, lines, _ = two.status()
    assert code == 0 and all(" up " in f" {line}" for line in lines.values())
    two.start("--name", "beside", "--port", "8500", "--", *STAND_IN, "1")


def test_a_dry_run_prints_every_command_and_runs_none(two):
    done = two("--dry-run", "--keep-alive", "3", "--", "python", "main.py", "a b")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert sum("run.sh true" in line for line in lines) == 2
    assert sum("AGAIN=3" in line and "a b" in line for line in lines) == 2
    assert sum(line.startswith("git pack-objects") for line in lines) == 2
    assert all(not host(f"ls {FOLDER}/.launch 2>/dev/null", check=False) for host in two.all[:2])


def test_a_new_commit_removes_old_files_of_the_tree_and_keeps_all_other_files(two):
    (two.tree / "old.txt").write_text("old")
    simulated_hosts.commit(two.tree, "with a file")
    two.start("--", "sleep", "0.1")
    a = two.all[0]
    own = "runs/x/1 data/y/2 own.txt"
    a(f"cd {FOLDER} && mkdir -p runs/x data/y && touch {own} && ls old.txt")
    (two.tree / "old.txt").unlink()
    dirty = two("--", "sleep", "0.1")
    assert dirty.returncode == 2 and "files have uncommitted changes" in dirty.stderr
    commit = simulated_hosts.commit(two.tree, "without it")
    two.start("--", "sleep", "0.1")
    a(f"cd {FOLDER} && ls {own} && ! test -e old.txt")
    assert a(f"git -C {FOLDER} rev-parse HEAD") == commit
    a(f"echo mine >>{FOLDER}/LICENSE")
    (two.tree / "LICENSE").write_text("other")
    simulated_hosts.commit(two.tree, "another license")
    refused = two("--", "sleep", "0.1")
    assert refused.returncode == 1 and f"root@{a.address} failed" in refused.stderr
    assert "LICENSE" in refused.stderr and a(f"tail -n 1 {FOLDER}/LICENSE") == "mine"
    a(f"git -C {FOLDER} checkout -q LICENSE && rm {FOLDER}/own.txt")


def refused(cluster, file, message):
    """A start that names what is problems with one host, after which nothing runs on any."""
    done = cluster("--", *STAND_IN, "500", file=file)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    wait_for(lambda: not any(host.processes() for host in cluster.all))
    return done.stderr


def test_a_host_that_ssh_cannot_reach_is_named_and_nothing_starts(two, tmp_path):
    a, b = two.all[:2]
    file = tmp_path / "hosts.txt"
    file.write_text(f"{a.address}\nno-such-host.invalid\n")
    error = refused(two, str(file), "no-such-host.invalid failed: ssh: Could not resolve hostname")
    assert a.address not in error
    b("mv /run/sshd/key.pub /run/sshd/key.away && touch /run/sshd/key.pub")
    try:
        refused(two, two.two, f"root@{b.address} failed: root@{b.address}: Permission denied")
    finally:
        b("mv /run/sshd/key.away /run/sshd/key.pub")
    known = two.net.folder / "known"
    text = known.read_text()
    key_of_a = text.splitlines()[0].split(" ", 1)[1]
    known.write_text(f"{a.address} {key_of_a}\n{b.address} {key_of_a}\n")
    try:
        error = refused(two, two.two, f"Host key for {b.address} has changed")
    finally:
        known.write_text(text)
    assert "ssh-keygen -R HOST" in error and a.address not in error


def test_a_host_that_fails_alone_is_named_and_the_others_are_stopped(two):
    a, b = two.all[:2]
    b("printf '#!/bin/sh\nexit 1\n' >/mnt/bin/tmux && chmod +x /mnt/bin/tmux")
    try:
        error = refused(two, two.two, f"root@{b.address} failed")
    finally:
        b("rm /mnt/bin/tmux")
    assert "the other hosts were stopped" in error and a.address not in error


def test_a_host_with_another_python_or_without_disk_is_named_and_nothing_starts(two):
    a, b = two.all[:2]
    b(f"mv {FOLDER}/.venv away")
    b("printf '#!/bin/sh\\nexit 1\\n' >/mnt/bin/python3 && chmod +x /mnt/bin/python3")
    error = refused(two, two.two, f"root@{b.address} failed: ")
    assert "python3 is not Python 3.11 to 3.14" in error and a.address not in error
    b(f"rm -rf /mnt/bin/python3 {FOLDER}/.venv && mv away {FOLDER}/.venv")
    b("fallocate -l 1200M big")
    done = two("--", *STAND_IN, "5")
    assert done.returncode == 1 and "process 1 (h1): /home/me/tree has" in done.stderr
    assert "GiB free, and needs 1." in done.stderr
    two.wait_for_end((a, b))
    for number, host in enumerate((a, b)):
        assert "ended with 2" in two.log(host, number) and "step 1" not in two.log(host, number)
    b("rm big")


# --- what happens to hosts ------------------------------------------------------------------------


def test_a_run_continues_when_connections_are_cut_and_status_still_finds_it(two):
    two.start("--", *STAND_IN, "2000")
    a, b = two.all[:2]
    two.wait_for_steps()
    for host in (a, b):
        host("pkill -f 'sshd: root'", check=False)
    two.net.connect(b, False)
    time.sleep(1)
    two.net.connect(b, True)
    code, lines, _ = two.status()
    assert code == 0, lines
    step = int(lines[a.address].split()[3].split("/")[0])
    later = wait_for(lambda: int(two.status()[1][a.address].split()[3].split("/")[0]) > step)
    assert later
    logs = two("logs", a.address)
    assert logs.returncode == 0 and f"{a.address}: step " in logs.stdout
    assert b.address not in logs.stdout


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_is_named_with_its_host_and_the_exit_codes_of_all(two, victim):
    two.start("--", *STAND_IN, "2000", "--peer-seconds", "4")
    two.wait_for_steps()
    lost, other = two.all[victim], two.all[1 - victim]
    lost(f"kill -9 {two.pid(victim)}")
    code, problems = two.wait_for_status(other, "ended with 134")
    assert code == 1
    assert f"root@{lost.address}: ended with 137: it was killed" in problems
    assert f"root@{other.address}: ended with 134: another process was lost" in problems
    assert f"{FOLDER}/.launch/train/{1 - victim}/log" in problems
    assert f"root@{other.address}: it lost process {victim}, on root@{lost.address}" in problems


def test_a_host_whose_network_is_cut_is_named(two):
    two.start("--", *STAND_IN, "2000", "--peer-seconds", "4")
    a, b = two.all[:2]
    two.wait_for_steps()
    two.net.connect(b, False)
    try:
        two.wait_for_end((a, b))
        code, lines, problems = two.status()
        assert code == 1 and lines[b.address].startswith("no answer")
        assert f"root@{b.address}: no answer" in problems
        assert f"it lost process 1, on root@{b.address}" in problems
    finally:
        two.net.connect(b, True)
    wait_for(lambda: two.net.answers(b))
    _, problems = two.wait_for_status(b, "ended with 134")
    assert f"root@{b.address}: it lost process 0, on root@{a.address}" in problems


def test_a_host_whose_disk_is_full_is_named_before_and_after_it_ends(two):
    two.start("--", *STAND_IN, "2000", "--peer-seconds", "6")
    two.wait_for_steps()
    b = two.all[1]
    b("dd if=/dev/zero of=big bs=1M", check=False)
    code, _, problems = two.status()
    assert code == 1 and f"root@{b.address}: its disk is full: " in problems
    b(f"kill -9 {two.pid(1)}")
    _, problems = two.wait_for_status(b, "ended with 137")
    assert f"root@{b.address}: ended with 137" in problems
    b("rm big")


def test_a_run_ends_when_its_tmux_is_killed(two):
    two.start("--", *STAND_IN, "2000")
    two.wait_for_steps()
    two.all[1]("tmux kill-server")
    two.wait_for_status(two.all[0], "ended with 143")
    wait_for(lambda: not two.all[1].processes())


def test_a_restart_stops_a_run_and_resumes_it(two):
    two.start("--", *STAND_IN, "500")
    two.wait_for_steps()
    done = two("restart")
    assert done.returncode == 0 and "2 hosts are up" in done.stderr, done.stderr
    a = two.all[0]
    before = a(f"cat {FOLDER}/.launch/train/0/log.before")
    last = int(re.findall(r"step (\d+)/500", before)[-1])
    wait_for(lambda: f"step {last + 1}/500" in two.log(a, 0))
    assert "step 1/500" not in two.log(a, 0)


# --- keeping alive, and the end -------------------------------------------------------------------


def test_only_a_failure_that_a_restart_can_fix_restarts_and_at_most_n_times(two):
    starts = {75: 3, 134: 3, 137: 3, 143: 3, 1: 1, 2: 1, 130: 1, 132: 1, 0: 1}
    names = {"one": [75, 134, 137, 143], "two": [1, 2, 130, 132], "three": [0]}
    for name, codes in names.items():
        file = two.net.hosts_file(two.all[: len(codes)], f"{name}.txt")
        end = f"codes=({' '.join(map(str, codes))}); exit ${{codes[JAX_PROCESS_ID]}}"
        command = ["bash", "-c", f"echo >>~/starts-{name}; sleep 1; {end}"]
        options = ["--name", name, "--keep-alive", "2", "--pause", "0"]
        two.start(*options, "--", *command, file=file)
    two.wait_for_end(two.all)
    for name, codes in names.items():
        for code, host in zip(codes, two.all, strict=False):
            assert host(f"wc -l <starts-{name} && rm starts-{name}") == str(starts[code]), code
    assert "ended with 0" in two("--name", "three", "status", file=file).stdout


def test_a_stop_ends_a_process_that_waits_for_a_restart_or_is_not_up_yet(two):
    keep = ["--keep-alive", "9", "--pause", "600"]
    two.start(*keep, "--", *STAND_IN, "2000", "--peer-seconds", "4")
    two.wait_for_steps()
    two.all[1](f"kill -9 {two.pid(1)}")
    two.wait_for_status(two.all[1], "ended with 137, restart in 300 s (1 of 9)")
    assert two("stop").returncode == 1  # for the run had not ended well
    wait_for(lambda: not any(host.processes() for host in two.all))
    a = two.all[0]
    place = "JAX_COORDINATOR_ADDRESS=h0:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0"
    waits = f"./launch/worker.sh start train 0 {place} -- {' '.join(STAND_IN)} 5"
    a(f"cd {FOLDER} && (setsid {waits} </dev/null >/dev/null 2>&1 &)")
    one = two.net.hosts_file([a], "one.txt")
    wait_for(lambda: "process 0 of 2 connects" in two.log(a, 0))
    assert "starting" in two.status(file=one)[1][a.address]
    assert two("stop", file=one).returncode == 0
    wait_for(lambda: not any(host.processes() for host in two.all))


def test_a_second_stop_kills_a_process_that_ignores_the_first(two):
    two.start("--", "bash", "-c", "trap '' TERM; while true; do sleep 0.2; done")
    first = two("stop", "--wait", "1")
    assert first.returncode == 1
    assert first.stdout.count("it has not ended yet; a second stop kills it") == 2
    second = two("stop", "--wait", "30")
    assert second.returncode == 1 and second.stdout.count("ended with 137") == 2


def test_setup_can_run_twice_and_sums_over_the_devices_of_all_hosts(two):
    for _ in range(2):
        done = two("setup")
        assert done.returncode == 0, done.stderr
        assert "sees 8 devices (cpu) of 2 processes, 4 of them here" in done.stdout
        assert "a sum of ones over all devices is 8" in done.stdout
        assert "gcloud auth application-default login" in done.stdout


# --- a TPU, by a gcloud that is a stand-in --------------------------------------------------------

GCLOUD = """
fail() { echo "ERROR: (gcloud) $*" >&2; exit 1; }
case "$*" in
"auth list --filter=status:ACTIVE --format=value(account)") [[ $LOGGED_OUT ]] || echo me@example ;;
"compute tpus tpu-vm describe node --zone=z1 --format=value(networkEndpoints[].ipAddress)")
  echo "{a};{b}" ;;
"compute tpus tpu-vm describe "*) fail "NOT_FOUND: there is no $5" ;;
"compute tpus queued-resources describe waiting --zone=z1 --format=value(state.state,"*)
  printf 'WAITING_FOR_RESOURCES\tnode\n' ;;
"compute tpus queued-resources describe queued --zone=z1 --format=value(state.state,"*nodeId*)
  printf 'ACTIVE\tnode\n' ;;
"compute tpus queued-resources "*) fail "NOT_FOUND: there is no $5" ;;
"compute tpus tpu-vm ssh node --zone=z1 --quiet --worker="[01]" --command="*)
  number=${8#--worker=}
  IFS=";" read -ra workers <<<"{a};{b}"
  exec ssh "${workers[$number]}" "${9#--command=}" ;;
*) fail "unexpected: $*" ;;
esac
"""


def test_gcloud_finds_a_tpu_or_its_queued_resource_and_runs_commands_on_it(two):
    tpu = ["--tpu", "node", "--zone", "z1"]
    path = simulated_hosts.path_with(
        two.net.folder / "tools", "bash env readlink dirname basename mktemp rm"
    )
    without = two(*tpu, "status", PATH=path)
    assert without.returncode == 2 and "gcloud is not installed" in without.stderr
    a, b = (host.address for host in two.all[:2])
    write_script(two.bin / "gcloud", GCLOUD.replace("{a}", a).replace("{b}", b))
    logged_out = two(*tpu, "status", LOGGED_OUT="1")
    assert logged_out.returncode == 2 and "Run gcloud auth login" in logged_out.stderr
    for words, message in (
        (["--tpu", "node"], "--tpu node needs a zone"),
        (["--tpu", "none", "--zone", "z1"], "no TPU and no queued resource none in z1: ERROR"),
        (
            ["--tpu", "waiting", "--zone", "z1"],
            "the queued resource waiting is WAITING_FOR_RESOURCES. Start",
        ),
    ):
        done = two(*words, "status")
        assert done.returncode == 2 and message in done.stderr
    two.start("--tpu", "queued", "--zone", "z1", "--", *STAND_IN, "500", "a b")
    done = two(*tpu, "status")
    assert done.returncode == 0 and done.stdout.count(" up ") == 2
    assert two(*tpu, "stop").returncode == 0


def test_in_a_slurm_job_the_launcher_uses_its_hosts(two):
    lines = [host.address for host in two.all[:3]]
    write_script(
        two.bin / "scontrol",
        f'[[ $* == "show hostnames n[1-3]" ]] && echo "{chr(10).join(lines)}"\n',
    )
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "PATH": f"{two.bin}:{os.environ['PATH']}"}
    command = [two.tree / "launcher.sh", "--folder", FOLDER, "status"]
    done = subprocess.run(command, env=os.environ | job, capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == lines


# --- training -------------------------------------------------------------------------------------

# The run `whole` of conftest.py, on another mesh and with more steps.
STEPS, SAVES = 10, 3
CHANGES = f"""
--mesh.fsdp 8 --mesh.pipeline 1 --mesh.tensor 1 --train.microbatches 1 --train.steps {STEPS}
--checkpoint.every_steps {SAVES} --eval.every_steps 0 --run.peer_seconds 10
--data.train {SHARED}/data/train --data.val {SHARED}/data/val --run.dir {SHARED}/runs
"""
LONG_S = 900  # generous, since other programs can slow the machine down


def train(name: str, *flags: str) -> list[str]:
    flags = (*tiny_run.FLAGS, *CHANGES.split(), "--run.name", name, "--sample.prompts", *flags)
    return ["python", "main.py", *flags]


def wait_for_checkpoint(two: Cluster, name: str, step: int) -> Path:
    path = two.net.shared / "runs" / name / "checkpoints" / str(step)
    return wait_for(lambda: path if path.exists() else None, LONG_S)


def wait_for_success(two: Cluster, count: int = 2) -> None:
    two.wait_for_end(two.all[:count], LONG_S)
    for number, host in enumerate(two.all[:count]):
        log = two.log(host, number)
        assert "ended with 0" in log.splitlines()[-1], log


@pytest.fixture(scope="module")
def undisturbed(cluster, data):
    """A run on two hosts with 4 devices each; only its ssh connections are cut."""
    source = Path(data[1]).parent
    subprocess.run(["cp", "-r", source, cluster.net.shared / "data"], check=True)
    cluster.start("--", *train("whole"))
    for host in cluster.all[:2]:
        host("pkill -f 'sshd: root'", check=False)
    code, _, problems = cluster.status()
    assert code == 0, problems
    wait_for_success(cluster)
    return cluster.net.shared / "runs" / "whole"


def test_two_hosts_train_as_one_process_does(two, undisturbed, whole):
    one = tiny_run.losses(whole)
    assert len(one) == 6 and len(tiny_run.losses(undisturbed)) == STEPS
    assert tiny_run.losses(undisturbed)[:6] == pytest.approx(one, abs=1e-4)


# The first mesh has one device per host: the pipeline and the tensor axis both cross hosts. fsdp
# crosses hosts in `undisturbed`. The axes of the others are partly inside a host.
MESHES = [(4, (1, 2, 2)), (2, (1, 2, 2)), (2, (2, 2, 2)), (4, (2, 2, 2)), (4, (8, 1, 1))]


@pytest.mark.long
@pytest.mark.parametrize(("count", "shape"), MESHES, ids=str)
def test_a_mesh_spans_hosts(two, undisturbed, whole, count, shape):
    name = f"mesh-{count}-{'-'.join(map(str, shape))}"
    env = two.tree / "devices.env"
    devices = f"--xla_force_host_platform_device_count={math.prod(shape) // count}"
    env.write_text(f"XLA_FLAGS={' '.join([devices, *FAST])}\n")
    fsdp, pipeline, tensor = shape
    mesh = f"--mesh.fsdp {fsdp} --mesh.pipeline {pipeline} --mesh.tensor {tensor}"
    flags = f"{mesh} --train.steps 3 --checkpoint.every_steps 0".split()
    file = two.net.hosts_file(two.all[:count], f"{count}.txt")
    two.start("--env", str(env), "--", *train(name, *flags), file=file)
    wait_for_success(two, count)
    losses = tiny_run.losses(two.net.shared / "runs" / name)
    assert len(losses) == 3 and losses == pytest.approx(tiny_run.losses(whole)[:3], abs=1e-4)


@pytest.mark.long
def test_a_run_that_restarts_after_a_kill_ends_with_the_bits_of_an_undisturbed_one(
    two, undisturbed
):
    two.start("--keep-alive", "3", "--pause", "1", "--", *train("again"))
    wait_for_checkpoint(two, "again", SAVES)
    two.all[1](f"kill -9 {two.pid(1)}")
    wait_for_success(two)
    log = two.log(two.all[0], 0)
    assert re.search("ended with (134|75)", log) and "continues after step" in log
    code, _, problems = two.status()
    assert code == 0, problems  # none of the processes that an earlier start lost
    runs = undisturbed, two.net.shared / "runs" / "again"
    assert tiny_run.losses(runs[0]) == tiny_run.losses(runs[1])
    for one, other in zip(*(tiny_run.arrays(run, STEPS) for run in runs), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.long
def test_a_stop_ends_all_processes_with_a_checkpoint(two, undisturbed):
    two.start("--", *train("stopped", "--train.steps", "500"))
    folder = wait_for_checkpoint(two, "stopped", SAVES).parent.parent
    done = two("stop")
    assert done.returncode == 0 and done.stdout.count("ended with 143") == 2
    wait_for(lambda: not any(host.processes() for host in two.all))
    log = two.log(two.all[0], 0)
    step = re.search(r"SIGTERM: stopped. The newest checkpoint is .*?(\d+)", log)[1]
    assert (folder / "checkpoints" / step).is_dir() and SAVES < int(step) < 500
    assert (folder / "lock").read_text() == ""  # released
