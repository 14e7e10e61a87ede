"""Simulated hosts and their end."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import simulated_hosts
from conftest import ROOT
from simulated_hosts import wait_for

HOLD = """
import sys, tempfile, time
from pathlib import Path
sys.path.append(sys.argv[1])
from simulated_hosts import Network
with tempfile.TemporaryDirectory() as folder, Network(2, Path(folder)) as network:
    print(*(host.process for host in network.hosts), flush=True)
    time.sleep(600)
"""


def test_an_error_names_what_is_missing_and_skips_unless_hosts_are_required(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = "cannot simulate hosts: root on Linux is required"
    with pytest.raises(ValueError, match=message), simulated_hosts.Network(2, tmp_path):
        pass
    for required, outcome in (("", pytest.skip.Exception), ("1", pytest.fail.Exception)):
        monkeypatch.setenv("REQUIRE_HOSTS", required)
        with pytest.raises(outcome, match="root on Linux"):
            simulated_hosts.require()


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    simulated_hosts.require()
    with simulated_hosts.Network(3, tmp_path_factory.mktemp("network")) as network:
        yield network


def output(host, *words):
    command = host.command(*words)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_commands_on_a_host_end_when_they_are_killed(network, tmp_path):
    host = network.hosts[0]
    command = host.command("sh", "-c", "touch here; exec sleep 600", folder=tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        wait_for((tmp_path / "here").exists)
        assert "600" in output(host, "ps", "-eo", "args")
        process.kill()
    wait_for(lambda: "600" not in output(host, "ps", "-eo", "args"))


def test_no_process_or_device_remains_when_the_program_is_killed():
    simulated_hosts.require()
    command = [sys.executable, "-c", HOLD, str(Path(simulated_hosts.__file__).parent)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        processes = [Path(f"/proc/{int(n)}") for n in program.stdout.readline().split()]
        assert len(processes) == 2 and all(process.exists() for process in processes)
        assert not {"bridge", "port0"} & {name for _, name in socket.if_nameindex()}
        program.kill()
    wait_for(lambda: not any(process.exists() for process in processes), 10)
