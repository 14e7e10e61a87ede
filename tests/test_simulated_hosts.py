"""Simulated hosts and their links; all but the first tests need root (see simulated_hosts.py)."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import simulated_hosts
from conftest import ROOT
from simulated_hosts import wait_for

# A process that a shell starts in the background ignores SIGINT, and so do its children.
HOLD = """
import signal, sys, tempfile, time
from pathlib import Path
sys.path.append("tests")
from simulated_hosts import Network
signal.signal(signal.SIGINT, signal.default_int_handler)
with tempfile.TemporaryDirectory() as folder, Network(2, Path(folder)) as network:
    network.delay(1e-3)
    print(*(host.process for host in network.hosts), flush=True)
    time.sleep(600)
"""


def test_an_error_names_what_is_missing_and_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(ValueError, match="cannot simulate hosts: root on Linux is required"),
        simulated_hosts.Network(2, tmp_path),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path: name != "tc" and which("sh"))
    assert simulated_hosts.missing() == "tc is not installed: apt-get install iproute2"


def test_a_command_that_fails_is_one_error_with_its_output():
    with pytest.raises(ValueError, match=r"^ls /none failed: .*No such file"):
        simulated_hosts.run("ls", "/none")


@pytest.mark.parametrize(
    ("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_without_hosts_tests_are_skipped_unless_they_are_required(monkeypatch, required, outcome):
    monkeypatch.setattr(simulated_hosts, "missing", lambda: "sshd is not installed")
    monkeypatch.setenv("REQUIRE_HOSTS", required)
    with pytest.raises(outcome, match="sshd is not installed"):
        simulated_hosts.require()


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    simulated_hosts.require()
    with simulated_hosts.Network(3, tmp_path_factory.mktemp("network")) as network:
        yield network


def output(host, *words):
    command = host.command(*words)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_each_host_has_its_own_boot_id_and_a_name_that_all_hosts_resolve(network):
    for host in network.hosts:
        assert output(host, "hostname") == [host.name]
        for other in network.hosts:
            assert output(host, "getent", "hosts", other.name)[0] == other.address
    ids = {output(host, "cat", "/proc/sys/kernel/random/boot_id")[0] for host in network.hosts}
    assert len(ids) == 3


def test_a_command_runs_in_its_folder_and_ends_when_it_is_killed(network, tmp_path):
    host = network.hosts[0]
    assert output(host, "pwd") == ["/"]
    command = host.command("sh", "-c", "touch here; exec sleep 600", folder=tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        wait_for((tmp_path / "here").exists)
        assert "600" in output(host, "ps", "-eo", "args")
        process.kill()
    wait_for(lambda: "600" not in output(host, "ps", "-eo", "args"))


def test_links_have_the_bandwidth_that_is_set(network):
    network.throttle(50)
    assert 25 < network.bandwidth(0.5) < 52
    network.throttle(0)
    assert network.bandwidth(0.5) > 200


def test_a_link_limits_what_its_host_receives(network):
    """Two hosts that send to a third share its link."""
    network.throttle(20)
    *senders, receiver = network.hosts
    connections = [network.connection(sender, receiver) for sender in senders]
    assert 10 < sum(simulated_hosts.send_all(connections, 1.0)) < 25
    network.throttle(0)


def test_packets_arrive_complete_after_the_delay(network):
    network.delay(10e-3)
    assert 20e-3 < network.round_trip_s(5) < 60e-3
    assert network.bandwidth(0.5) > 1  # frames that the kernel has not segmented arrive too
    network.delay(0)
    assert network.round_trip_s(5) < 10e-3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_or_device_remains_when_the_program_ends(number):
    simulated_hosts.require()
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        processes = [Path(f"/proc/{int(n)}") for n in program.stdout.readline().split()]
        assert len(processes) == 2 and all(process.exists() for process in processes)
        assert not {"bridge", "port0"} & {name for _, name in socket.if_nameindex()}
        program.send_signal(number)
    wait_for(lambda: not any(process.exists() for process in processes), 10)
