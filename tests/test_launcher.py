"""The launcher on hosts of the tests' own (hosts.py), by real ssh and tmux.

Most runs are stand_in.py, which connects and ends as main.py does; a few train.
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import hosts
import tiny_run
from conftest import ROOT
from hosts import FOLDER, SHARED, wait_for

STAND_IN = ["python", "tests/stand_in.py", "--steps"]


class Cluster:
    """Hosts, a tree to launch from, and the launcher."""

    def __init__(self, net: hosts.Net, tree: Path):
        self.net, self.tree, self.bin = net, tree, net.folder / "bin"
        self.all, self.two = net.hosts, net.file(net.hosts[:2])

    def __call__(self, *words: str, file: str | None = None, limit_s: float = 300, **more: str):
        """What ./launcher.sh WORDS does; on two hosts, if no others are named."""
        where = [] if "--tpu" in words else ["--hosts", file or self.two]
        return subprocess.run(
            [str(self.tree / "launcher.sh"), *where, *words],
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
        """(exit code, the line of each host, what is wrong)"""
        done = self("status", **more)
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
        return done.returncode, {name.split("@")[-1]: rest for name, rest in lines}, done.stderr

    def comes(self, host: hosts.Host, text: str) -> tuple[int, str]:
        """(exit code, what is wrong), once status says `text` of this host."""

        def said():
            code, lines, wrong = self.status()
            return (code, wrong) if text in lines.get(host.address, "") else None

        return wait_for(said)

    def steps(self) -> None:
        """Returns once the processes on two hosts take steps."""
        for number, host in enumerate(self.all[:2]):
            wait_for(lambda h=host, n=number: re.search(r"step \d+/", self.log(h, n)))

    def log(self, host: hosts.Host, number: int, name: str = "train") -> str:
        return host(f"cat {FOLDER}/.launch/{name}/{number}/log")

    def pid(self, number: int) -> str:
        return self.all[number](f"cat {FOLDER}/.launch/train/{number}/pid")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with hosts.net_of(folder, 4) as net:
        yield Cluster(net, hosts.checkout(folder / FOLDER))


@pytest.fixture
def two(cluster):
    """The cluster, on whose hosts nothing is left after the test."""
    yield cluster
    cluster("stop", "--wait", "20", file=cluster.net.file(cluster.all, "all.txt"))
    for host in cluster.all:
        wait_for(lambda host=host: not host.processes())
        host(
            f"rm -rf {FOLDER}/.launch {FOLDER}/.venv {FOLDER}/stand_in_* /mnt/bin/* big starts away"
        )
        host(f"mkdir -p {FOLDER} && cd {FOLDER} && ln -s /mnt/venv .venv")
        host(f"cd {FOLDER} && git reset -q --hard", check=False)  # where there is a tree as yet


# --- what needs no hosts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["launcher.sh", "debug_tpu.sh", "setup_tpu.sh", "worker.sh"])
def test_each_script_tells_its_use_and_refuses_what_it_does_not_know(name):
    told = subprocess.run([ROOT / name, "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and f"./{name}" in told.stdout and "set -euo" not in told.stdout
    refused = subprocess.run([ROOT / name, "--speed", "9"], capture_output=True, text=True)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "--help" in refused.stderr and "--speed" in refused.stderr


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, [], "cannot be read: give a file with a host in each line"),
        ("# none\n\n", [], "names no host"),
        ("a  # b\n a;b \n", [], "line 2: a;b is not [user@]host[:port]"),
        ("a b", [], "line 1: a b is not [user@]host[:port]"),
        ("ok\n\nok:22\n", [], "line 3: ok is there twice"),
        ("ok", ["--name", "a.b"], "tmux takes letters, digits, - and _ only"),
        ("ok", ["--name"], "--name needs a value"),
        ("ok", ["--keep-alive", "often", "--", "x"], "--keep-alive often is not a number"),
        ("ok", [], "what is to be run? Give it after --"),
        ("ok", ["--"], "what is to be run follows --"),
        ("ok", ["begin"], "there is no verb begin"),
        ("ok", ["status", "now"], "status takes no now"),
        ("ok", ["logs", "other"], "no host is named other: there are ok"),
        ("ok", ["--env", "none", "--", "x"], "--env none cannot be read"),
        ("ok", ["--env", "bad.env", "--", "x"], "a line is VARIABLE=VALUE"),
        ("ok", ["--commit", "none", "--", "x"], "--commit none is none of this repository"),
    ],
)
def test_bad_input_is_refused_with_one_line(tmp_path, text, words, message):
    if text is not None:
        (tmp_path / "hosts.txt").write_text(text)
    (tmp_path / "bad.env").write_text("KEY=x\nexport WANDB_API_KEY secret\n")
    command = [ROOT / "launcher.sh", "--hosts", "hosts.txt", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "secret" not in done.stderr


def test_without_hosts_the_three_ways_to_name_them_are_said():
    done = subprocess.run([ROOT / "launcher.sh", "status"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Give --hosts FILE, or --tpu NAME --zone ZONE, or be in a Slurm job" in done.stderr


def test_where_there_can_be_no_hosts_tests_are_skipped_unless_they_are_required(monkeypatch):
    monkeypatch.setattr(hosts, "missing", lambda: "there is no sshd")
    ends = (pytest.skip.Exception, pytest.fail.Exception)
    for required, expected in zip(("", "1"), ends, strict=True):
        monkeypatch.setenv("REQUIRE_HOSTS", required)
        with pytest.raises(ends, match="there is no sshd") as told:
            hosts.need_hosts()
        assert told.type is expected
    monkeypatch.setattr(hosts, "missing", lambda: "")
    monkeypatch.setenv("REQUIRE_HOSTS", "0")
    with pytest.raises(pytest.skip.Exception, match="not asked for"):
        hosts.need_hosts()


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
    shutil.copy(ROOT / "worker.sh", tmp_path)
    state = tmp_path / ".launch" / "no-session" / "0"
    state.mkdir(parents=True)
    (state / "log").write_text(log)
    (state / "state").write_text("ended with 134\n")
    command = [tmp_path / "worker.sh", "status", "no-session", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\t")[5] == lost


# --- starting -------------------------------------------------------------------------------------


def test_words_reach_the_command_as_typed_and_secrets_by_a_file_alone(two):
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


def test_a_name_that_is_running_is_refused_with_what_to_do(two):
    two.start("--", *STAND_IN, "500")
    again = two("--", *STAND_IN, "1")
    assert again.returncode == 2
    one, other = (host.address for host in two.all[:2])
    assert f"train is already running on root@{one} root@{other}: " in again.stderr
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


def test_files_that_are_not_the_trees_stay_and_old_ones_of_the_tree_go(two):
    (two.tree / "old.txt").write_text("old")
    hosts.commit(two.tree, "with a file")
    two.start("--", "sleep", "0.1")
    a = two.all[0]
    own = "runs/x/1 data/y/2 own.txt"
    a(f"cd {FOLDER} && mkdir -p runs/x data/y && touch {own} && ls old.txt")
    (two.tree / "old.txt").unlink()
    dirty = two("--", "sleep", "0.1")
    assert dirty.returncode == 2 and "files differ from the last commit" in dirty.stderr
    commit = hosts.commit(two.tree, "without it")
    two.start("--", "sleep", "0.1")
    a(f"cd {FOLDER} && ls {own} && ! test -e old.txt")
    assert a(f"git -C {FOLDER} rev-parse HEAD") == commit
    a(f"echo mine >>{FOLDER}/LICENSE")
    (two.tree / "LICENSE").write_text("other")
    hosts.commit(two.tree, "another license")
    refused = two("--", "sleep", "0.1")
    assert refused.returncode == 1 and f"root@{a.address} failed" in refused.stderr
    assert "LICENSE" in refused.stderr and a(f"tail -n 1 {FOLDER}/LICENSE") == "mine"
    a(f"git -C {FOLDER} checkout -q LICENSE && rm {FOLDER}/own.txt")


def refused(cluster, file, message):
    """A start that names what is wrong with one host, after which nothing runs on any."""
    done = cluster("--", *STAND_IN, "500", file=file)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    wait_for(lambda: not any(host.processes() for host in cluster.all))
    return done.stderr


def test_a_host_that_ssh_does_not_reach_is_named_and_nothing_starts(two, tmp_path):
    a, b = two.all[:2]
    file = tmp_path / "hosts.txt"
    file.write_text(f"{a.address}\nno-such-host.invalid\n")
    told = refused(two, str(file), "no-such-host.invalid failed: ssh: Could not resolve hostname")
    assert a.address not in told
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
        told = refused(two, two.two, f"Host key for {b.address} has changed")
    finally:
        known.write_text(text)
    assert "ssh-keygen -R HOST" in told and a.address not in told


def test_a_host_that_fails_alone_is_named_and_the_others_are_stopped(two):
    a, b = two.all[:2]
    b("printf '#!/bin/sh\nexit 1\n' >/mnt/bin/tmux && chmod +x /mnt/bin/tmux")
    try:
        told = refused(two, two.two, f"root@{b.address} failed")
    finally:
        b("rm /mnt/bin/tmux")
    assert "the others were stopped" in told and a.address not in told


def test_a_host_with_another_python_or_without_disk_is_named_and_nothing_starts(two):
    a, b = two.all[:2]
    b(f"mv {FOLDER}/.venv away")
    b("printf '#!/bin/sh\\nexit 1\\n' >/mnt/bin/python3 && chmod +x /mnt/bin/python3")
    told = refused(two, two.two, f"root@{b.address} failed: ")
    assert "python3 is not Python 3.11 or newer" in told and a.address not in told
    b(f"rm -rf /mnt/bin/python3 {FOLDER}/.venv && mv away {FOLDER}/.venv")
    b("fallocate -l 1200M big")
    done = two("--", *STAND_IN, "5")
    assert done.returncode == 1 and "process 1 (h1): /home/me/tree has" in done.stderr
    assert "GiB free, and needs 1." in done.stderr
    for number, host in enumerate((a, b)):
        wait_for(lambda host=host: not host("tmux ls 2>/dev/null", check=False))
        assert "ended with 2" in two.log(host, number) and "step 1" not in two.log(host, number)
    b("rm big")


# --- what happens to hosts ------------------------------------------------------------------------


def test_a_run_continues_when_connections_are_cut_and_status_finds_it_again(two):
    two.start("--", *STAND_IN, "2000")
    a, b = two.all[:2]
    two.steps()
    for host in (a, b):
        host("pkill -f 'sshd: root'", check=False)
    b.connect(False)
    time.sleep(1)
    b.connect(True)
    code, lines, _ = two.status()
    assert code == 0, lines
    step = int(lines[a.address].split()[3].split("/")[0])
    later = wait_for(lambda: int(two.status()[1][a.address].split()[3].split("/")[0]) > step)
    assert later
    told = two("logs", a.address)
    assert told.returncode == 0 and f"{a.address}: step " in told.stdout
    assert b.address not in told.stdout


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_is_named_with_its_host_and_the_exit_codes_of_all(two, victim):
    two.start("--", *STAND_IN, "2000", "--peer-seconds", "6")
    two.steps()
    lost, other = two.all[victim], two.all[1 - victim]
    lost(f"kill -9 {two.pid(victim)}")
    code, wrong = two.comes(other, "ended with 134")
    assert code == 1
    assert f"root@{lost.address}: ended with 137: it was killed" in wrong
    assert f"root@{other.address}: ended with 134: another process was lost" in wrong
    assert f"{FOLDER}/.launch/train/{1 - victim}/log" in wrong
    assert f"root@{other.address}: it lost process {victim}, on root@{lost.address}" in wrong


def test_a_host_whose_network_is_cut_is_named(two):
    two.start("--", *STAND_IN, "2000", "--peer-seconds", "4")
    a, b = two.all[:2]
    two.steps()
    b.connect(False)
    try:
        code, wrong = two.comes(b, "no answer")
        assert code == 1 and f"root@{b.address}: no answer" in wrong
        _, wrong = two.comes(a, "ended with 134")
        assert f"it lost process 1, on root@{b.address}" in wrong
    finally:
        b.connect(True)
    wait_for(lambda: two.net.answers(b))
    _, wrong = two.comes(b, "ended with 134")
    assert f"root@{b.address}: it lost process 0, on root@{a.address}" in wrong


def test_a_host_whose_disk_is_full_is_named_also_when_it_ends(two):
    two.start("--", *STAND_IN, "2000", "--peer-seconds", "6")
    two.steps()
    b = two.all[1]
    b("dd if=/dev/zero of=big bs=1M", check=False)
    code, _, wrong = two.status()
    assert code == 1 and f"root@{b.address}: its disk is full: " in wrong
    b(f"kill -9 {two.pid(1)}")
    _, wrong = two.comes(b, "ended with 137")
    assert f"root@{b.address}: ended with 137" in wrong
    b("rm big")


def test_a_killed_tmux_takes_its_run_along(two):
    two.start("--", *STAND_IN, "2000")
    two.steps()
    two.all[1]("tmux kill-server")
    two.comes(two.all[0], "ended with 143")
    wait_for(lambda: not two.all[1].processes())


def test_a_restart_stops_a_run_and_resumes_it(two):
    two.start("--", *STAND_IN, "500")
    two.steps()
    done = two("restart")
    assert done.returncode == 0 and "2 hosts are up" in done.stderr, done.stderr
    a = two.all[0]
    before = a(f"cat {FOLDER}/.launch/train/0/log.before")
    last = int(re.findall(r"step (\d+)/500", before)[-1])
    wait_for(lambda: f"step {last + 1}/500" in two.log(a, 0))
    assert "step 1/500" not in two.log(a, 0)


# --- keeping alive, and the end -------------------------------------------------------------------


def test_only_what_starting_again_can_help_is_started_again_and_only_so_often(two):
    keep = ["--keep-alive", "2", "--pause", "1"]
    expected = {75: 3, 134: 3, 137: 3, 143: 3, 1: 1, 2: 1, 130: 1, 132: 1, 0: 1}
    for codes in (list(expected)[:4], list(expected)[4:8], list(expected)[8:]):
        file = two.net.file(two.all[: len(codes)], f"{len(codes)}.txt")
        ends = f"codes=({' '.join(map(str, codes))}); exit ${{codes[JAX_PROCESS_ID]}}"
        two.start(*keep, "--", "bash", "-c", f"echo >>~/starts; sleep 1; {ends}", file=file)
        for code, host in zip(codes, two.all, strict=False):
            wait_for(lambda host=host: not host("tmux ls 2>/dev/null", check=False))
            assert host("wc -l <starts && rm starts") == str(expected[code]), code
    assert "ended with 0" in two.status(file=file)[1][two.all[0].address]


def test_a_stop_ends_what_waits_to_be_started_again_and_what_is_not_up_yet(two):
    keep = ["--keep-alive", "9", "--pause", "600"]
    two.start(*keep, "--", *STAND_IN, "2000", "--peer-seconds", "6")
    two.steps()
    two.all[1](f"kill -9 {two.pid(1)}")
    two.comes(two.all[1], "ended with 137, again in 300 s (1 of 9)")
    assert two("stop").returncode == 1  # for the run had not ended well
    wait_for(lambda: not any(host.processes() for host in two.all))
    a = two.all[0]
    place = "JAX_COORDINATOR_ADDRESS=h0:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0"
    waits = f"./worker.sh start train 0 {place} -- {' '.join(STAND_IN)} 5"
    a(f"cd {FOLDER} && (setsid {waits} </dev/null >/dev/null 2>&1 &)")
    one = two.net.file([a], "one.txt")
    wait_for(lambda: "process 0 of 2 connects" in two.log(a, 0))
    assert "starting" in two.status(file=one)[1][a.address]
    assert two("stop", file=one).returncode == 0
    wait_for(lambda: not any(host.processes() for host in two.all))


def test_a_second_stop_kills_what_the_first_did_not_end_in_time(two):
    two.start("--", "bash", "-c", "trap '' TERM; while true; do sleep 0.2; done")
    first = two("stop", "--wait", "1")
    assert first.returncode == 1
    assert first.stdout.count("it has not ended; a second stop ends it at once") == 2
    second = two("stop", "--wait", "30")
    assert second.returncode == 1 and second.stdout.count("ended with 137") == 2


def test_setup_prepares_all_hosts_and_sums_over_the_devices_of_all_also_again(two):
    for _ in range(2):
        done = two("setup")
        assert done.returncode == 0, done.stderr
        assert "sees 8 devices (cpu) of 2 processes, 4 of them here" in done.stdout
        assert "a one from each adds up to 8" in done.stdout
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


def test_a_tpu_or_its_queued_resource_is_found_and_run_on_by_gcloud(two):
    tpu = ["--tpu", "node", "--zone", "z1"]
    path = hosts.tools(two.net.folder / "tools", "bash env dirname basename mktemp rm sed")
    without = two(*tpu, "status", PATH=path)
    assert without.returncode == 2 and "needs gcloud, which is not installed" in without.stderr
    a, b = (host.address for host in two.all[:2])
    hosts.script(two.bin / "gcloud", GCLOUD.replace("{a}", a).replace("{b}", b))
    logged_out = two(*tpu, "status", LOGGED_OUT="1")
    assert logged_out.returncode == 2 and "gcloud auth login" in logged_out.stderr
    for words, message in (
        (["--tpu", "node"], "--tpu node needs its zone"),
        (["--tpu", "none", "--zone", "z1"], "no TPU and no queued resource none in z1: ERROR"),
        (["--tpu", "waiting", "--zone", "z1"], "waiting is WAITING_FOR_RESOURCES, not ACTIVE"),
    ):
        done = two(*words, "status")
        assert done.returncode == 2 and message in done.stderr
    two.start("--tpu", "queued", "--zone", "z1", "--", *STAND_IN, "500", "a b")
    done = two(*tpu, "status")
    assert done.returncode == 0 and done.stdout.count(" up ") == 2
    assert two(*tpu, "stop").returncode == 0


def test_in_a_slurm_job_its_hosts_are_taken(two):
    lines = [host.address for host in two.all[:3]]
    hosts.script(
        two.bin / "scontrol",
        f'[[ $* == "show hostnames n[1-3]" ]] && echo "{chr(10).join(lines)}"\n',
    )
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "PATH": f"{two.bin}:{os.environ['PATH']}"}
    command = [two.tree / "launcher.sh", "--folder", FOLDER, "status"]
    done = subprocess.run(command, env=os.environ | job, capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == lines


# --- training -------------------------------------------------------------------------------------

# The tiny run of other files, which is one process with 8 devices, on another mesh and for longer.
STEPS, SAVES = 16, 4
OTHERWISE = f"""
--mesh.fsdp 8 --mesh.pipeline 1 --mesh.tensor 1 --train.microbatches 1 --train.steps {STEPS}
--checkpoint.every_steps {SAVES} --eval.every_steps 0 --run.peer_seconds 10
--data.train {SHARED}/data/train --data.val {SHARED}/data/val --run.dir {SHARED}/runs
"""
LONG_S = 900  # that a run may take on a machine that has other work


def train(name: str) -> list[str]:
    given = [*tiny_run.FLAGS, *OTHERWISE.split(), "--run.name", name, "--sample.prompts"]
    return ["python", "main.py", *given]


def checkpoint_of(two: Cluster, name: str, step: int) -> Path:
    path = two.net.shared / "runs" / name / "checkpoints" / str(step)
    return wait_for(lambda: path if path.exists() else None, LONG_S)


def ends_well(two: Cluster) -> None:
    for number, host in enumerate(two.all[:2]):
        wait_for(lambda host=host: not host("tmux ls 2>/dev/null", check=False), LONG_S)
        said = two.log(host, number)
        assert "ended with 0" in said.splitlines()[-1], said


@pytest.fixture(scope="module")
def undisturbed(cluster, data):
    """A run on two hosts with 4 devices each, from which connections were cut."""
    source = Path(data[1]).parent
    subprocess.run(["cp", "-r", source, cluster.net.shared / "data"], check=True)
    cluster.start("--", *train("whole"))
    for host in cluster.all[:2]:
        host("pkill -f 'sshd: root'", check=False)
    code, _, wrong = cluster.status()
    assert code == 0, wrong
    ends_well(cluster)
    return cluster.net.shared / "runs" / "whole"


def test_two_hosts_train_as_one_process_does(two, undisturbed, whole):
    one = tiny_run.losses(whole)
    assert len(one) == 6 and len(tiny_run.losses(undisturbed)) == STEPS
    assert tiny_run.losses(undisturbed)[:6] == pytest.approx(one, abs=1e-4)


FOUR_HEADS = "--model.heads 4 --train.steps 3 --checkpoint.every_steps 0 --eval.every_steps 0"


@pytest.fixture(scope="module")
def four_heads(data, runs):
    """A run of one process, with a head for each of up to four tensor ranks."""
    return tiny_run.start(data, runs, "four", *FOUR_HEADS.split(), "--sample.prompts")


# With ALL_MESHES=1 both numbers of hosts train on all three meshes.
MESHES = [
    (2, (2, 2, 2)),
    (4, (1, 2, 4)),
    (2, (8, 1, 1)),
    (2, (1, 2, 4)),
    (4, (2, 2, 2)),
    (4, (8, 1, 1)),
]


@pytest.mark.parametrize(
    ("count", "shape"), MESHES if os.environ.get("ALL_MESHES") == "1" else MESHES[:2], ids=str
)
def test_a_mesh_is_cut_across_hosts(two, undisturbed, four_heads, count, shape):
    name = f"mesh-{count}-{'-'.join(map(str, shape))}"
    devices = two.tree / "devices.env"
    flags = (
        f"--xla_force_host_platform_device_count={8 // count} --xla_backend_optimization_level=0"
    )
    devices.write_text(f"XLA_FLAGS={flags}\n")
    fsdp, pipeline, tensor = shape
    mesh = f"--mesh.fsdp {fsdp} --mesh.pipeline {pipeline} --mesh.tensor {tensor}"
    short = f"{mesh} {FOUR_HEADS}"
    file = two.net.file(two.all[:count], f"{count}.txt")
    two.start("--env", str(devices), "--", *train(name), *short.split(), file=file)
    for number, host in enumerate(two.all[:count]):
        wait_for(lambda host=host: not host("tmux ls 2>/dev/null", check=False), LONG_S)
        assert "ended with 0" in two.log(host, number).splitlines()[-1], two.log(host, number)
    found = tiny_run.losses(two.net.shared / "runs" / name)
    assert len(found) == 3 and found == pytest.approx(tiny_run.losses(four_heads), abs=1e-4)


def test_a_run_that_is_kept_alive_ends_with_the_bits_of_an_undisturbed_one(two, undisturbed):
    two.start("--keep-alive", "3", "--pause", "1", "--", *train("again"))
    checkpoint_of(two, "again", SAVES)
    two.all[1](f"kill -9 {two.pid(1)}")
    ends_well(two)
    log = two.log(two.all[0], 0)
    assert re.search("ended with (134|75)", log) and "continues after step" in log
    code, _, wrong = two.status()
    assert code == 0, wrong  # what an earlier start lost is no trouble of this one
    same(undisturbed, two.net.shared / "runs" / "again")


def test_a_stop_ends_all_with_a_checkpoint_and_leaves_nothing(two, undisturbed):
    two.start("--", *train("stopped"))
    folder = checkpoint_of(two, "stopped", SAVES).parent.parent
    done = two("stop")
    assert done.returncode == 0 and done.stdout.count("ended with 143") == 2
    wait_for(lambda: not any(host.processes() for host in two.all))
    said = two.log(two.all[0], 0)
    step = re.search(r"SIGTERM: stopped, and the newest checkpoint is .*?(\d+)", said)[1]
    assert (folder / "checkpoints" / step).is_dir() and SAVES < int(step) < STEPS
    assert (folder / "lock").read_text() == ""  # given back


def same(one: Path, other: Path) -> None:
    assert tiny_run.losses(one) == tiny_run.losses(other)
    both = tiny_run.arrays(one, STEPS), tiny_run.arrays(other, STEPS)
    for mine, theirs in zip(*both, strict=True):
        assert mine.tobytes() == theirs.tobytes()
