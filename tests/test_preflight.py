"""What is looked at before jax starts, on several hosts."""

import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

import peers
import preflight
from conftest import ROOT
from peers import Place
from processes import free_port


def together(count=2, command=(), more=None, first=0.0):
    """What each process of a job says that is started through preflight.py, and its exit code."""
    address, started = f"127.0.0.1:{free_port()}", []
    for number in range(count):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
        environment = os.environ | place | {"JAX_PROCESS_ID": str(number)}
        environment |= (more or {}).get(number, {})
        words = command or (sys.executable, "-c", "print('it runs')")
        started.append(
            subprocess.Popen(
                [sys.executable, ROOT / "preflight.py", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        time.sleep(first)
    return [(process.communicate(timeout=200)[0], process.wait()) for process in started]


def test_processes_that_are_alike_become_the_command_and_say_that_they_are_up(tmp_path):
    up = [tmp_path / "0", tmp_path / "1"]
    said = together(more={n: {"UP_FILE": str(file)} for n, file in enumerate(up)})
    assert said == [("it runs\n", 0)] * 2
    assert all(file.exists() for file in up)


def test_alone_a_command_is_not_kept_waiting(monkeypatch):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_CO", "SLURM"))}
    command = [sys.executable, ROOT / "preflight.py", "no-such-command"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: no-such-command cannot be run: No such file or directory\n"


def test_run_sh_starts_a_jobs_command_through_it_and_others_as_they_are(tmp_path):
    def said(*command, **more):
        environment = os.environ | {"JAX_COORDINATOR_ADDRESS": "nowhere", "JAX_NUM_PROCESSES": "2"}
        environment |= {"JAX_PROCESS_ID": "0", "UP_FILE": str(tmp_path / "up")} | more
        done = subprocess.run(
            [ROOT / "run.sh", *command], env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    script = ("python", "-c", "print('it runs')")
    code, _, error = said(*script)
    assert code == 2 and "expected host:port" in error and not (tmp_path / "up").exists()
    assert said(*script, PREFLIGHT="0")[:2] == (0, "it runs\n")
    assert said(*script, JAX_COORDINATOR_ADDRESS="")[:2] == (0, "it runs\n")
    (tmp_path / "up").unlink()
    assert said("echo", "it runs")[:2] == (0, "it runs\n")
    assert (tmp_path / "up").exists()


def test_what_is_wrong_on_one_host_ends_all_with_its_mend():
    said = together(3, more={1: {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}})
    for text, code in said:
        assert code == 2 and "it runs" not in text
        assert "process 1 (" in text
        assert "MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID is set, as for several TPU slices" in text
        assert "unset MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID" in text


@pytest.mark.parametrize("given", [["--mesh.replica", "2"], ["--mesh.replica=2"]])
def test_what_several_slices_need_is_not_refused_where_there_are_some(monkeypatch, given):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    assert any("MEGASCALE" in line for line in preflight.wrong_here(["python", "main.py"]))
    told = preflight.wrong_here(["python", "main.py", *given])
    assert not any("MEGASCALE" in line for line in told)


def test_a_process_that_does_not_come_is_named_with_the_port(monkeypatch):
    monkeypatch.setattr(preflight, "START_S", 0.3)
    port = free_port()
    words = rf"process 1 of 2 did not come .* Is port {port} open between the hosts\?"
    with pytest.raises(preflight.Fault, match=words):
        preflight.meet(Place(f"127.0.0.1:{port}", 2, 0), ["true"])


def told(skew_s=0.0, **facts):
    """Of two processes, the second with other facts."""
    same = {"commit": "abc", "package jax": "0.10.2", "command": "python main.py"}
    return {
        "process 0 (a)": {"time": 100.0, "facts": same},
        "process 1 (b)": {"time": 100.0 + skew_s, "facts": same | facts},
    }


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"skew_s": 42.0}, "the clock of process 1 (b) is 42 s ahead of that of process 0 (a)"),
        ({"skew_s": -42.0}, "the clock of process 1 (b) is 42 s behind"),
        ({"commit": "def"}, "commit differs: abc on process 0 (a), def on process 1 (b). Send all"),
        (
            {"package jax": "0.11"},
            "package jax differs: 0.10.2 on process 0 (a), 0.11 on process 1",
        ),
        ({"package x": "1"}, "package x differs: none on process 0 (a), 1 on process 1 (b). Make"),
        ({"command": "x"}, "command differs: python main.py on process 0 (a), x on process 1 (b)"),
        ({"c.toml": "12"}, "c.toml differs: none on process 0 (a), 12 on process 1 (b). Send all"),
    ],
)
def test_each_difference_between_hosts_is_a_line(given, line):
    [found] = preflight.differences(told(**given))
    assert found.startswith(line)


def test_what_is_alike_is_no_difference():
    assert not list(preflight.differences(told(skew_s=preflight.LARGEST_SKEW_S)))


def test_facts_have_the_commit_changes_packages_and_the_config_file(tmp_path, monkeypatch):
    config = tmp_path / "c.toml"
    config.write_text("[train]")
    facts = preflight.facts(["python", "main.py", "--config", str(config)])
    assert facts["package jax"] and facts["Python"] == sys.version.split()[0]
    assert facts["command"] == f"python main.py --config {config}"
    config.write_text("[train]\n")
    other = preflight.facts(["python", "main.py", "--config", str(config)])
    assert {name for name in facts if facts[name] != other[name]} == {str(config)}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.facts(["x"])["commit"] == ""
    assert len(json.dumps(facts)) < 20_000


def test_a_host_without_disk_is_told(monkeypatch):
    monkeypatch.setattr(preflight, "LEAST_FREE_BYTES", 2**60)
    lines = list(preflight.wrong_here([]))
    assert all("GiB are free for" in line and "Remove what" in line for line in lines) and lines


def test_a_lock_that_another_process_has_on_the_tpu_is_told(monkeypatch, tmp_path):
    lock = tmp_path / "libtpu_lockfile"
    monkeypatch.setattr(preflight, "TPU_LOCK", lock)
    assert not list(preflight._tpu_lock())
    lock.touch()
    assert not list(preflight._tpu_lock()), "what nobody holds is in no one's way"
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        [line] = preflight._tpu_lock()
    assert line.startswith(f"{lock} is held by process {os.getpid()}, which uses the TPU")


def test_a_lock_on_the_tpu_that_another_user_left_is_told(monkeypatch, tmp_path):
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    monkeypatch.setattr(preflight, "TPU_LOCK", lock)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(type(lock), "open", refuse)
    [line] = preflight._tpu_lock()
    assert f"is of user {os.getuid()}" in line and line.endswith(f"sudo rm {lock}")


def test_one_that_is_started_again_alone_makes_all_start_again():
    """It meets for the preflight, and finds one that waits for the start of its run."""
    address = f"127.0.0.1:{free_port()}"
    ends = """
import sys, peers
from faults import command_line
command_line(lambda: peers.Peers(peers.Place(sys.argv[1], 2, int(sys.argv[2])), 9, 30, sys.argv[3]))
"""
    for hub, other in (("run", "preflight"), ("preflight", "run")):
        both = [
            subprocess.Popen(
                [sys.executable, "-c", ends, address, number, stage],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, stage in (("0", hub), ("1", other))
        ]
        for process in both:
            text = process.communicate(timeout=200)[1]
            assert process.returncode == 75 and "one of them was started again" in text


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n7", "n7"),
        ("n7,n9", "n7"),
        ("gpu[007-009,12],x1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("a-b[1-2]", "a-b1"),
    ],
)
def test_a_task_of_slurm_knows_its_place_as_jax_does(monkeypatch, nodes, first):
    from jax._src.clusters.slurm_cluster import SlurmCluster

    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    slurm = {"JOB_ID": "123456", "STEP_NODELIST": nodes, "NTASKS": "4", "PROCID": "3"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place = peers.place()
    assert place == Place(SlurmCluster.get_coordinator_address(None, None), 4, 3)
    assert place.address.startswith(f"{first}:")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert peers.place() is None
