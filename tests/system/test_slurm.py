"""launch/slurm.sh with the daemons of Slurm on two simulated hosts; jobs are stand_in.py."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import simulated_hosts
from simulated_hosts import SHARED, wait_for, write_script

PROGRAMS = ("slurmctld", "slurmd", "sbatch")
LONG_S = 300  # generous, since other programs can slow the machine down

# Without munge, accounts and cgroups. Jobs share the nodes, so that tests need not wait.
CONF = """
ClusterName=tests
SlurmctldHost=h0
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=10
KillOnBadExit=1
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
StateSaveLocation=/run/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={shared}/slurm/slurmctld.log
SlurmdSpoolDir=/run/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile={shared}/slurm/slurmd-%n.log
NodeName=h[0-1] CPUs=4
PartitionName=all Nodes=h[0-1] Default=YES OverSubscribe=FORCE:8
"""


class Slurm:
    """Two nodes that share a tree; commands reach the first by ssh, as those of a user."""

    def __init__(self, net: simulated_hosts.Network):
        self.net, self.tree = net, net.shared / "tree"
        self.conf = {"SLURM_CONF": f"{SHARED}/slurm/slurm.conf"}
        (net.shared / "slurm").mkdir()
        (net.shared / "slurm" / "slurm.conf").write_text(CONF.format(shared=SHARED))
        daemons = ["mkdir /run/slurmctld; slurmctld; slurmd", "slurmd"]
        for host, started in zip(net.hosts, daemons, strict=True):
            host(f"export SLURM_CONF={self.conf['SLURM_CONF']}; {started}")
        wait_for(lambda: self("sinfo -h -o %D%t") == "2idle", 30)

    def __call__(self, command: str, folder: str = "tree", **more: str) -> str:
        """Return the stdout of a bash command on the first host."""
        variables = " ".join(f"{n}={shlex.quote(v)}" for n, v in (self.conf | more).items())
        text = f"cd {SHARED}/{folder} && export {variables} && {command}"
        done = self.net.ssh(self.net.hosts[0], text)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self, *words: str, options: str = "", folder: str = "tree", **more: str) -> "Job":
        command = f"sbatch --parsable {options} launch/slurm.sh {shlex.join(words)}"
        number = self(command, folder, **more)
        return Job(self, number, self.net.shared / folder / f"slurm-{number}.log")

    def stand_in(self, name: str, steps: int, options: str = "", peer_seconds=30, **more) -> "Job":
        """Start a job in its own tree, since stand_in.py saves in its folder."""
        subprocess.run(["cp", "-r", self.tree, self.net.shared / name], check=True)
        command = f"python tests/stand_in.py --peer-seconds {peer_seconds} --steps {steps}"
        return self.start(*command.split(), options=options, folder=name, **more)


class Job:
    def __init__(self, slurm: Slurm, number: str, log: Path):
        self.slurm, self.number, self._log = slurm, number, log

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of scontrol, such as JobState or Restarts."""
        return re.search(rf"\b{name}=(\S+)", self.slurm(f"scontrol show job {self.number}"))[1]

    def wait_for_log(self, text: str) -> None:
        wait_for(lambda: text in self.log, LONG_S)

    def wait_for_end(self) -> tuple[str, str]:
        """Wait until the job has ended for good; return its state and exit code."""
        wait_for(lambda: self.field("JobState") not in ("PENDING", "RUNNING", "COMPLETING"), LONG_S)
        return self.field("JobState"), self.field("ExitCode").split(":")[0]

    def wait_for_requeue(self) -> None:  # and start it at once instead of after two minutes
        wait_for(lambda: self.field("Restarts") != "0", LONG_S)
        wait_for(lambda: self.field("JobState") != "COMPLETING", LONG_S)
        if self.field("JobState") == "PENDING":
            self.slurm(f"scontrol update JobId={self.number} StartTime=now")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with simulated_hosts.network_with_ssh(2, tmp_path_factory.mktemp("hosts"), *PROGRAMS) as net:
        tree = simulated_hosts.checkout(net.shared / "tree")
        (tree / ".venv").symlink_to("/mnt/venv")
        yield Slurm(net)


@pytest.fixture(scope="module")
def limited(slurm):
    """A job with a time limit, started first since Slurm checks limits every 30 s alone."""
    return slurm.stand_in("limited", 250, options="--time=1")


@pytest.mark.parametrize(("how", "state"), [("--batch --signal=TERM", "FAILED"), ("", "CANCELLED")])
def test_a_stopped_job_has_saved_and_is_not_requeued(slurm, limited, how, state):
    job = slurm.stand_in(f"stopped{len(how)}", 900)
    job.wait_for_log("1: step 2/900")
    slurm(f"scancel {how} {job.number}")
    assert job.wait_for_end()[0] == state
    assert job.log.count("SIGTERM: stopped. Step") == 2, job.log
    assert job.field("Restarts") == "0"


def test_a_lost_process_is_named_and_ends_the_job_with_its_exit_code(slurm, limited):
    job = slurm.stand_in("killed", 900, peer_seconds=4, AGAIN="0")
    job.wait_for_log("1: step 2/900")
    slurm.net.hosts[1]("pkill -9 -f 'stand_in.py .*--steps 900'")
    assert job.wait_for_end() == ("FAILED", "137")
    assert "stopped sending heartbeats):\n0: 1\n" in job.log  # process 0 names process 1
    assert "ended with 137, not requeued: AGAIN=0 allows no further requeue" in job.log


def test_only_a_failure_that_a_restart_can_fix_is_requeued_and_at_most_n_times(slurm, limited):
    codes = dict.fromkeys((75, 134, 137, 139), True) | dict.fromkeys((0, 1, 2, 130), False)
    jobs = {}
    for code in codes:
        words = ["bash", "-c", f"echo started as $RUN_OWNER; exit {code}"]
        jobs[code] = slurm.start(*words, options="--nodes 1", AGAIN="1")
    for code, helps in codes.items():
        job, state = jobs[code], "FAILED" if code else "COMPLETED"
        if helps:
            job.wait_for_requeue()
        assert job.wait_for_end() == (state, str(code)), job.log
        # The lock of a run has the same owner before and after.
        assert job.log.count(f"0: started as tests:{job.number}\n") == 1 + helps
        assert ("AGAIN=1 allows no further requeue" in job.log) == helps


def test_the_environment_is_set_up_once_before_all_processes_and_each_has_its_cpus(slurm, limited):
    new = slurm.net.shared / "new"
    subprocess.run(["cp", "-r", slurm.tree, new], check=True)
    (new / ".venv").unlink()
    uv = "[[ $1 == pip ]] || mkdir -p .venv/bin && ln -sf /usr/bin/true .venv/bin/python\n"
    write_script(slurm.net.shared / "uv", uv)
    slurm.net.hosts[0](f"ln -s {SHARED}/uv /mnt/bin/uv")
    step = "scontrol show step $SLURM_JOB_ID.$SLURM_STEP_ID"
    words = ["bash", "-c", f"{step} | grep -o 'CPUs=[0-9]*'"]
    job = slurm.start(*words, options="--cpus-per-task 2", folder="new")
    assert job.wait_for_end() == ("COMPLETED", "0"), job.log
    lines = job.log.splitlines()
    assert lines[0].startswith("run.sh: setting up .venv") and lines[1].startswith("run.sh: set up")
    assert sorted(lines[2:]) == ["0: CPUs=4", "1: CPUs=4"]  # of both


def test_before_its_time_limit_a_job_saves_and_is_requeued(slurm, limited):
    limited.wait_for_requeue()
    slurm(f"scontrol update JobId={limited.number} TimeLimit=60")
    limited.wait_for_log("slurm.sh: ended with 143, requeued (1 of 20)")
    before = limited.log.split("slurm.sh: ended with 143, requeued")[0]
    saved = int(re.search(r"0: SIGTERM: stopped. Step (\d+) is saved", before)[1])
    limited.wait_for_log(f"0: step {saved + 1}/250")
    after = limited.log.removeprefix(before)
    assert re.search(r"0: step (\d+)/250", after)[1] == str(saved + 1)
