"""The launcher on simulated hosts, with real ssh and tmux. Most runs are stand_in.py."""

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import simulated_hosts
import tiny_run
from simulated_hosts import FOLDER, SHARED, WAIT_S, wait_for

STAND_IN = ["python", "tests/stand_in.py", "--peer-seconds", "4", "--steps"]


class Cluster:
    """Hosts, a tree to launch from, and the launcher."""

    def __init__(self, net, tree):
        self.net, self.tree, self.all = net, tree, net.hosts
        self.pair = net.hosts[:2]
        self.file = net.hosts_file(self.pair)

    def __call__(self, *words, file=None, **more):
        """Run ./launcher.sh WORDS, on two hosts unless `file` names others."""
        command = [str(self.tree / "launcher.sh"), "--hosts", file or self.file, *words]
        environment = os.environ | {"PATH": f"{self.net.bin}:{os.environ['PATH']}"} | more
        how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(command, env=environment, cwd=self.tree, **how)

    def start(self, *words, **more):
        done = self(*words, **more)
        assert done.returncode == 0 and "hosts are up" in done.stderr, done.stderr

    def start_steps(self, *options):
        """Start stand_in.py on two hosts, and wait until both take steps."""
        self.start(*options, "--", *STAND_IN, "2000")
        for n, host in enumerate(self.pair):
            wait_for(lambda h=host, n=n: re.search(r"step \d+/", self.log(h, n)))

    def status(self, **more):
        """Return the exit code, the line of each host, and the reported problems."""
        done = self("status", **more)
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
        return done.returncode, {name.split("@")[-1]: rest for name, rest in lines}, done.stderr

    def wait_for_status(self, host, text):
        """Wait until status prints `text` for a host; return the problems."""

        def reported():
            _, lines, problems = self.status()
            return problems if text in lines.get(host.address, "") else None

        return wait_for(reported)

    def wait_for_end(self, hosts, timeout_s=WAIT_S):
        """Wait until no launch runs on these hosts."""
        for host in hosts:
            wait_for(lambda h=host: not h("tmux ls 2>/dev/null", check=False), timeout_s)

    def wait_for_silence(self):
        wait_for(lambda: not any(host.processes() for host in self.all))

    def log(self, host, number, name="train"):
        # A process that has just been started may have no log yet.
        return host(f"cat {FOLDER}/.launch/{name}/{number}/log", check=False)

    def kill(self, number):
        self.all[number](f"kill -9 $(cat {FOLDER}/.launch/train/{number}/pid)")


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


TYPED = ["a b", "it's", '"q" $HOME `id` \\', "new\nline", "!x", "*", "", "ä"]
SHOW = "import os, sys, time; print(sys.argv[1:], os.environ['KEY'], os.environ['RUN_OWNER'])"
NOISE = {  # what a login shell reads before it runs a command
    "bash": (".bashrc", "echo noise; printf 'running\\nup 5 s'; echo noise >&2\n"),
    "tcsh": (".tcshrc", "echo noise; echo running; setenv PATH /mnt/bin:$PATH\n"),
    "fish": (".config/fish/config.fish", "echo noise; echo running\n"),
}


def test_arguments_and_secrets_reach_the_command_also_when_it_restarts(two):
    secret = two.net.folder / "secret.env"
    secret.write_text("KEY=se'cr et$1\n")
    options = ["--env", str(secret), "--keep-alive", "1", "--pause", "0"]
    command = ["python", "-u", "-c", f"{SHOW}; time.sleep(1); sys.exit(75)", *TYPED]
    two.start(*options, "--", *command, RUN_OWNER="a person")
    assert not any("cr et" in line for host in two.pair for line in host.processes())
    two.wait_for_end(two.pair)
    for number, host in enumerate(two.pair):
        assert two.log(host, number).count(f"{TYPED} se'cr et$1 a person") == 2
        assert host(f"stat -c %a {FOLDER}/.launch/train/{number}/secrets") == "600"


def test_any_login_shell_works_even_one_that_prints_at_its_start(two):
    simulated_hosts.require(*NOISE)
    used = dict(zip(NOISE, two.all, strict=False))
    file = two.net.hosts_file(used.values(), "shells.txt")
    for shell, host in used.items():
        name, text = NOISE[shell]
        use = f"sed 's#^\\(root:.*:\\)[^:]*$#\\1{shutil.which(shell)}#' passwd.before >/etc/passwd"
        host("cat .bashrc >before && cat /etc/passwd >passwd.before")
        host(f"mkdir -p $(dirname {name}) && printf '%s' {shlex.quote(text)} >>{name} && {use}")
    try:
        show = "import sys, time; print(sys.argv[1:]); time.sleep(99)"
        two.start("--", "python", "-u", "-c", show, *TYPED, file=file)
        code, lines, problems = two.status(file=file)
        assert code == 0 and not problems
        assert all(line.startswith("up ") for line in lines.values()), lines
        for number, host in enumerate(used.values()):
            wait_for(lambda h=host, n=number: str(TYPED) in two.log(h, n))
        again = two("--", *STAND_IN, "1", file=file)
        assert again.returncode == 2 and "train is already running on" in again.stderr
        done = two("stop", file=file)
        assert done.returncode == 0 and done.stdout.count("ended with 143") == 3, done.stderr
    finally:
        for shell, host in used.items():
            host(f"rm -f {NOISE[shell][0]}; cat before >.bashrc; cat passwd.before >/etc/passwd")


def test_a_new_commit_removes_old_files_of_the_tree_and_keeps_all_other_files(two):
    a, own = two.all[0], "runs/x own.txt"
    (two.tree / "old.txt").write_text("old")
    simulated_hosts.commit(two.tree, "with a file")
    two.start("--", "sleep", "0.1")
    a(f"cd {FOLDER} && mkdir -p runs && touch {own} && ls old.txt")
    (two.tree / "old.txt").unlink()
    commit = simulated_hosts.commit(two.tree, "without it")
    two.start("--", "sleep", "0.1")
    a(f"cd {FOLDER} && ls {own} && ! test -e old.txt")
    assert a(f"git -C {FOLDER} rev-parse HEAD") == commit
    a(f"echo mine >>{FOLDER}/LICENSE")
    (two.tree / "LICENSE").write_text("other")
    simulated_hosts.commit(two.tree, "another license")
    assert "LICENSE" in refused(two, two.file, f"root@{a.address} failed")
    assert a(f"tail -n 1 {FOLDER}/LICENSE") == "mine"
    a(f"git -C {FOLDER} checkout -q LICENSE && rm {FOLDER}/own.txt")


def refused(cluster, file, message):
    """A start that names what is wrong with one host, after which nothing runs on any."""
    done = cluster("--", *STAND_IN, "500", file=file)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    cluster.wait_for_silence()
    return done.stderr


def test_a_host_that_ssh_cannot_reach_is_named_and_nothing_starts(two, tmp_path):
    a, b = two.pair
    (tmp_path / "hosts.txt").write_text(f"{a.address}\nno-such-host.invalid\n")
    message = "no-such-host.invalid failed: ssh: Could not resolve hostname"
    assert a.address not in refused(two, str(tmp_path / "hosts.txt"), message)
    known = two.net.folder / "known"
    text = known.read_text()
    key_of_a = text.splitlines()[0].split(" ", 1)[1]
    known.write_text(f"{a.address} {key_of_a}\n{b.address} {key_of_a}\n")
    try:
        error = refused(two, two.file, f"Host key for {b.address} has changed")
    finally:
        known.write_text(text)
    assert a.address not in error


def test_a_host_that_fails_alone_is_named_and_the_others_are_stopped(two):
    a, b = two.pair
    b(f"mv {FOLDER}/.venv away")
    for program, message in (
        ("python3", "python3 is not Python 3.11 to 3.14"),
        ("tmux", "the other hosts were stopped"),
    ):
        b(f"printf '#!/bin/sh\\nexit 1\\n' >/mnt/bin/{program} && chmod +x /mnt/bin/{program}")
        error = refused(two, two.file, f"root@{b.address} failed")
        assert message in error and a.address not in error
        b(f"rm -rf /mnt/bin/{program} {FOLDER}/.venv && ln -s /mnt/venv {FOLDER}/.venv")
    b("fallocate -l 1200M big")
    done = two("--", *STAND_IN, "5")
    assert done.returncode == 1 and "GiB free, and needs 1." in done.stderr
    two.wait_for_end(two.pair)
    assert all("ended with 2" in two.log(host, n) for n, host in enumerate(two.pair))


def test_a_run_whose_connections_are_cut_continues_and_a_restart_resumes_it(two):
    two.start_steps()
    a, b = two.pair

    def step():
        return int(two.status()[1][a.address].split()[3].split("/")[0])

    for host in two.pair:
        host("pkill -f 'sshd: root'", check=False)
    two.net.connect(b, False)
    time.sleep(1)
    two.net.connect(b, True)
    first = step()
    wait_for(lambda: step() > first)
    logs = two("logs", a.address).stdout
    assert f"{a.address}: step " in logs and b.address not in logs
    assert "2 hosts are up" in two("restart").stderr
    before = a(f"cat {FOLDER}/.launch/train/0/log.before")
    last = int(re.findall(r"step (\d+)/2000", before)[-1])
    wait_for(lambda: f"step {last + 1}/2000" in two.log(a, 0))
    b("tmux kill-server")
    wait_for(lambda: "ended with 143" in two.log(a, 0) and not b.processes())


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_or_a_full_disk_is_named_with_its_host(two, victim):
    two.start_steps()
    lost, other = two.all[victim], two.all[1 - victim]
    lost("dd if=/dev/zero of=big bs=1M", check=False)
    code, _, problems = two.status()
    assert code == 1 and f"root@{lost.address}: its disk is full: " in problems
    two.kill(victim)
    problems = two.wait_for_status(other, "ended with 134")
    assert f"root@{lost.address}: ended with 137: it was killed" in problems
    assert f"{FOLDER}/.launch/train/{1 - victim}/log" in problems
    assert f"root@{other.address}: it lost process {victim}, on root@{lost.address}" in problems


def test_a_host_whose_network_is_cut_is_named(two):
    two.start_steps()
    a, b = two.pair
    two.net.connect(b, False)
    try:
        two.wait_for_end(two.pair)
        _, _, problems = two.status()
        assert f"root@{b.address}: no answer" in problems
        assert f"it lost process 1, on root@{b.address}" in problems
    finally:
        two.net.connect(b, True)
    wait_for(lambda: two.net.answers(b))
    problems = two.wait_for_status(b, "ended with 134")
    assert f"root@{b.address}: it lost process 0, on root@{a.address}" in problems


def test_only_a_failure_that_a_restart_can_fix_restarts_and_at_most_n_times(two):
    starts = {75: 3, 134: 3, 137: 3, 143: 3, 1: 1, 2: 1, 130: 1, 0: 1}
    names = {"one": [75, 134, 137, 143], "two": [1, 2, 130, 0]}
    file = two.net.hosts_file(two.all, "all.txt")
    for name, codes in names.items():
        end = f"codes=({' '.join(map(str, codes))}); exit ${{codes[JAX_PROCESS_ID]}}"
        command = ["bash", "-c", f"echo >>~/starts-{name}; sleep 1; {end}"]
        options = ["--name", name, "--keep-alive", "2", "--pause", "0"]
        two.start(*options, "--", *command, file=file)  # both beside each other
    two.wait_for_end(two.all)
    for name, codes in names.items():
        for code, host in zip(codes, two.all, strict=True):
            assert host(f"wc -l <starts-{name} && rm starts-{name}") == str(starts[code]), code
    assert "ended with 0" in two("--name", "two", "status", file=file).stdout


def test_a_stop_ends_a_process_that_waits_or_is_not_up_yet_and_a_second_one_kills(two):
    two.start_steps("--keep-alive", "9", "--pause", "600")
    two.kill(1)
    two.wait_for_status(two.all[1], "ended with 137, restart in 300 s (1 of 9)")
    assert two("stop").returncode == 1  # for the run had not ended well
    two.wait_for_silence()
    a = two.all[0]
    place = "JAX_COORDINATOR_ADDRESS=h0:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0"
    waits = f"./launch/worker.sh start train 0 {place} -- {' '.join(STAND_IN)} 5"
    a(f"cd {FOLDER} && (setsid {waits} </dev/null >/dev/null 2>&1 &)")
    one = two.net.hosts_file([a], "one.txt")
    wait_for(lambda: "process 0 of 2 connects" in two.log(a, 0))
    assert "starting" in two.status(file=one)[1][a.address]
    assert two("stop", file=one).returncode == 0
    two.wait_for_silence()
    two.start("--", "bash", "-c", "trap '' TERM; while true; do sleep 0.2; done")
    for wait, message in (("1", "it has not ended yet; a second stop"), ("30", "ended with 137")):
        done = two("stop", "--wait", wait)
        assert done.returncode == 1 and done.stdout.count(message) == 2


def test_setup_can_run_twice_and_sums_over_the_devices_of_all_hosts(two):
    for _ in range(2):
        done = two("setup")
        assert done.returncode == 0, done.stderr
        assert "sees 8 devices (cpu) of 2 processes, 4 of them here" in done.stdout
        assert "a sum of ones over all devices is 8" in done.stdout


# The run `whole` of conftest.py, on another mesh and with more steps.
STEPS, SAVES = 10, 3
CHANGES = f"""
--mesh.fsdp 8 --mesh.pipeline 1 --mesh.tensor 1 --train.microbatches 1 --train.steps {STEPS}
--checkpoint.every_steps {SAVES} --eval.every_steps 0 --run.peer_seconds 10 --run.name run
--data.train {SHARED}/data/train --data.val {SHARED}/data/val --run.dir {SHARED}/runs
--sample.prompts
"""
LONG_S = 900  # generous, since other programs can slow the machine down


def test_two_hosts_train_as_one_process_does_although_one_is_killed(two, data, whole):
    subprocess.run(["cp", "-r", Path(data[1]).parent, two.net.shared / "data"], check=True)
    command = ["python", "main.py", *tiny_run.FLAGS, *CHANGES.split()]
    two.start("--keep-alive", "3", "--pause", "1", "--", *command)
    run = two.net.shared / "runs" / "run"
    wait_for((run / "checkpoints" / str(SAVES)).exists, LONG_S)
    two.kill(1)
    two.wait_for_end(two.pair, LONG_S)
    for number, host in enumerate(two.pair):
        log = two.log(host, number)
        assert re.search("ended with (134|137|75)", log), log
        assert "ended with 0" in log.splitlines()[-1], log
    assert "continues after step" in two.log(two.all[0], 0)
    code, _, problems = two.status()
    assert code == 0, problems  # none of the processes that an earlier start lost
    one, found = tiny_run.losses(whole), tiny_run.losses(run)
    assert len(one) == 6 and len(found) == STEPS and found[:6] == pytest.approx(one, abs=1e-4)
