"""What the launchers refuse, print and send. tests/system/test_launcher_hosts.py has real hosts."""

import base64
import getpass
import os
import re
import shutil
import subprocess

import pytest

import simulated_hosts
from processes import ROOT
from simulated_hosts import write_script

SCRIPTS = ("launcher.sh", "debug_tpu.sh", "setup_tpu.sh", "launch/worker.sh", "launch/slurm.sh")


def run(*command, cwd=ROOT, **variables):
    environment = os.environ | variables
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_usage_also_by_a_link_and_rejects_unknown_options(name, tmp_path):
    (tmp_path / "tree").symlink_to(ROOT)
    (tmp_path / "first").symlink_to(f"tree/{name}")  # relative to the link
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "second").symlink_to("../first")
    usage = run("bin/second", "--help", cwd=tmp_path, CDPATH="/")
    assert usage.returncode == 0 and f"./{name}" in usage.stdout and not usage.stderr
    assert "set -euo" not in usage.stdout and "SBATCH --" not in usage.stdout
    refused = run(ROOT / name, "--speed", "9")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "--help" in refused.stderr and "--speed" in refused.stderr


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, "", "cannot read --hosts hosts.txt"),
        ("# none\n\n", "", "lists no host"),
        ("a  # b\n a;b \n", "", "line 2: a;b is not [user@]host[:port]"),
        ("ok\n\nok:22\n", "", "line 3: ok is listed twice"),
        ("ok", "--name a.b", "--name a.b is no name for a tmux session"),
        ("ok", "--name", "--name needs a value"),
        ("ok", "--keep-alive often -- x", "--keep-alive often is not a number"),
        ("ok", "", "no command. Give one after --"),
        ("ok", "begin", "unknown verb begin"),
        ("ok", "status now", "unexpected argument now after status"),
        ("ok", "logs other", "no host other. The hosts are ok"),
        ("ok", "--env none -- x", "cannot read --env none"),
        ("ok", "--env bad.env -- x", "bad.env, line 2 is not VARIABLE=VALUE"),
        ("ok", "--env open.env -- x", "open.env, line 1: the value does not end with its quote"),
        ("ok", "--env after.env -- x", "after.env, line 1: the value does not end with its quote"),
        ("ok", "--commit none -- x", "--commit none is not a commit of this repository"),
    ],
)
def test_bad_input_is_refused_with_one_line(tmp_path, text, words, message):
    if text is not None:
        (tmp_path / "hosts.txt").write_text(text)
    (tmp_path / "bad.env").write_text("KEY=x\nexport WANDB_API_KEY secret\n")
    (tmp_path / "open.env").write_text('KEY="secret\nmore"\n')
    (tmp_path / "after.env").write_text("KEY='secret' secret\n")
    done = run(ROOT / "launcher.sh", "--hosts", "hosts.txt", *words.split(), cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "secret" not in done.stderr


def test_the_job_of_slurm_refuses_bad_input_with_one_line(tmp_path):
    for words, job, message in (
        ("", {}, "no command. Give one"),
        ("python main.py", {}, "not a Slurm job. Use sbatch launch/slurm.sh python main.py"),
        ("x", {"SLURM_JOB_ID": "1"}, "has no run.sh. Give sbatch --chdir"),
    ):
        done = run(ROOT / "launch" / "slurm.sh", *words.split(), cwd=tmp_path, **job)
        assert done.returncode == 2 and message in done.stderr
        assert len(done.stderr.splitlines()) == 1


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
    done = run(tmp_path / "launch" / "worker.sh", "status", "no-session", "0")
    assert done.returncode == 0 and done.stdout.split("\t")[5] == lost


class Launcher:
    """A repository with the launcher alone, and programs that record or answer for the hosts."""

    def __init__(self, folder):
        self.folder, self.tree, self.bin = folder, folder / "tree", folder / "bin"
        (self.tree / "launch").mkdir(parents=True)
        self.bin.mkdir()
        (folder / "link").symlink_to("tree/launcher.sh")
        for name in ("launcher.sh", "launch/hosts.sh"):
            shutil.copy(ROOT / name, self.tree / name)
        simulated_hosts.run("git", "init", "-q", cwd=self.tree)
        self.commit = simulated_hosts.commit(self.tree, "the launcher")
        (folder / "hosts.txt").write_text("# two\nme@h0:22\n\nh1  # the last line ends here")
        call = f"call=$(mktemp {folder}/call.XXXX)\nprintf '%s' \"${{!#}}\" >$call; cat >$call.in\n"
        write_script(self.bin / "ssh", call)

    def __call__(self, *words, **variables):
        variables = {"PATH": f"{self.bin}:{os.environ['PATH']}"} | variables
        return run("./link", *words, cwd=self.folder, **variables)

    def on_hosts(self, *words, **variables):
        return self("--hosts", str(self.folder / "hosts.txt"), *words, **variables)

    def received(self, part):
        """Return (the command, its stdin) of each call of ssh whose command has this part."""
        for call in self.folder.glob("call.????"):
            encoded = re.search(r"<<<(\S+)\)", call.read_text())[1]
            text = base64.b64decode(encoded).decode()
            if part in text:
                yield text, call.with_suffix(f"{call.suffix}.in").read_text()


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


VARIABLES = {  # a line of the file, and what the run gets
    "# a comment": "",
    "  export EXPORTED=x": "EXPORTED=x\n",
    "EMPTY=": "EMPTY=\n",
    "COMMENT=a#b # a comment": "COMMENT=a#b\n",
    r"DOLLAR=$HOME/`id`\n": "DOLLAR=$HOME/`id`\\n\n",
    'DOUBLE="a # b  "  # a comment': "DOUBLE=a # b  \n",
    r'ESCAPED="\"\$x\\ \n $HOME"': 'ESCAPED="$x\\ \\n $HOME\n',
    "SINGLE='$HOME \"a\" \\ #'": 'SINGLE=$HOME "a" \\ #\n',
    "LAST=ä": "LAST=ä\n",
}


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_file_of_variables_is_read_as_bash_reads_quotes_and_comments(launcher, ends):
    file = launcher.folder / "variables.env"
    start = "\ufeff" if ends == "\r\n" else ""  # as editors of Windows write it
    file.write_bytes((start + ends.join(VARIABLES)).encode())
    done = launcher.on_hosts("--env", str(file), "--", "x")
    assert done.returncode == 0 and "2 hosts are up" in done.stderr, done.stderr
    starts = list(launcher.received("worker.sh start"))
    assert [given for _, given in starts] == ["".join(VARIABLES.values())] * 2
    assert not any("EXPORTED" in text for text, _ in starts)  # secrets are in no command line


def test_a_dry_run_prints_every_command_and_runs_none(launcher):
    secret = launcher.folder / "wandb.env"
    secret.write_text("WANDB_API_KEY=secret\n")
    words = ["--keep-alive", "3", "--env", str(secret), "--", "python", "main.py", "a b"]
    done = launcher.on_hosts("--dry-run", *words)
    assert done.returncode == 0 and not list(launcher.received("")) and "secret" not in done.stdout
    lines = done.stdout.splitlines()
    assert sum("run.sh true" in line for line in lines) == 2
    assert sum("AGAIN=3" in line and "a b" in line for line in lines) == 2
    assert sum(line.startswith("git pack-objects") for line in lines) == 2
    for number, host in enumerate(("ssh://me@h0:22", "ssh://h1")):
        [start] = [line for line in lines if f"JAX_PROCESS_ID={number} " in line]
        assert host in start and "JAX_COORDINATOR_ADDRESS=h0:8476 JAX_NUM_PROCESSES=2" in start
        assert f"RUN_OWNER={getpass.getuser()}@{os.uname().nodename}:train:h0" in start
    done = launcher.on_hosts("--dry-run", "--", "x", RUN_OWNER="somebody")
    assert done.stdout.count("RUN_OWNER=somebody") == 2


def test_files_with_uncommitted_changes_are_not_sent_by_default(launcher):
    (launcher.tree / "launcher.sh").write_text((ROOT / "launcher.sh").read_text() + "# more\n")
    done = launcher.on_hosts("--dry-run", "--", "x")
    assert done.returncode == 2 and "files have uncommitted changes" in done.stderr
    assert launcher.commit in launcher.on_hosts("--dry-run", "--commit", "HEAD", "--", "x").stdout


def test_hosts_are_those_of_a_slurm_job_or_the_error_names_all_ways_to_give_them(launcher):
    done = launcher("status")
    assert done.returncode == 2
    assert "Use --hosts FILE, or --tpu NAME --zone ZONE, or run" in done.stderr
    names = '[[ $* == "show hostnames n[1-2]" ]] && printf "n1\\nn2\\n"\n'
    write_script(launcher.bin / "scontrol", names)
    done = launcher("--dry-run", "status", SLURM_JOB_NODELIST="n[1-2]")
    assert [f"ssh://n{n}" in line for n, line in enumerate(done.stdout.splitlines(), 1)] == [1, 1]


GCLOUD = """
fail() { echo "ERROR: (gcloud) $*" >&2; exit 1; }
case "$*" in
"auth list --filter=status:ACTIVE --format=value(account)") [[ $LOGGED_OUT ]] || echo me@example ;;
"compute tpus tpu-vm describe node --zone=z1 --format=value(networkEndpoints[].ipAddress)")
  echo "10.0.0.1;10.0.0.2" ;;
"compute tpus tpu-vm describe "*) fail "NOT_FOUND: there is no $5" ;;
"compute tpus queued-resources describe waiting --zone=z1 --format=value(state.state,"*)
  printf 'WAITING_FOR_RESOURCES\tnode\n' ;;
"compute tpus queued-resources describe queued --zone=z1 --format=value(state.state,"*nodeId*)
  printf 'ACTIVE\tnode\n' ;;
"compute tpus queued-resources "*) fail "NOT_FOUND: there is no $5" ;;
"compute tpus tpu-vm ssh node --zone=z1 --quiet --worker="[01]" --command="*) exec ssh "$9" ;;
*) fail "unexpected: $*" ;;
esac
"""


def test_gcloud_finds_a_tpu_or_its_queued_resource_and_runs_commands_on_it(launcher):
    tools = "bash env readlink dirname basename mktemp rm"
    path = simulated_hosts.path_with(launcher.folder / "tools", tools)
    without = launcher("--tpu", "node", "--zone", "z1", "status", PATH=path)
    assert without.returncode == 2 and "gcloud is not installed" in without.stderr
    write_script(launcher.bin / "gcloud", GCLOUD)
    for words, logged_out, message in (
        ("node --zone z1", "1", "Run gcloud auth login"),
        ("node", "", "--tpu node needs a zone"),
        ("none --zone z1", "", "no TPU and no queued resource none in z1: ERROR"),
        ("waiting --zone z1", "", "the queued resource waiting is WAITING_FOR_RESOURCES. Start"),
    ):
        done = launcher("--tpu", *words.split(), "status", LOGGED_OUT=logged_out)
        assert done.returncode == 2 and message in done.stderr
    for name in ("node", "queued"):
        done = launcher("--tpu", name, "--zone", "z1", "--name", name, "--", "x")
        assert done.returncode == 0, done.stderr
        starts = [text for text, _ in launcher.received(f"worker.sh start {name}")]
        assert sorted(text.partition("JAX_PROCESS_ID=")[2][0] for text in starts) == ["0", "1"]
        assert all(f":{name}:node" in text for text in starts)
