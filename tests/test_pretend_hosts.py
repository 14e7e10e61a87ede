"""Hosts on this machine whose links are set; all but the first tests need root (see hosts.py)."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hosts
import pretend_hosts
from conftest import ROOT

# What a shell starts behind itself ignores SIGINT, and so would all that the tests start.
HOLD = """
import signal, tempfile, time
from pathlib import Path
from pretend_hosts import Network
signal.signal(signal.SIGINT, signal.default_int_handler)
with tempfile.TemporaryDirectory() as folder, Network(2, Path(folder)) as network:
    network.delay(1e-3)
    print(*(host.process for host in network.hosts), flush=True)
    time.sleep(600)
"""


def test_without_root_or_a_tool_the_mend_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(ValueError, match="no pretend hosts: root on Linux is needed"),
        pretend_hosts.Network(2, tmp_path),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda tool, path: tool != "tc" and which("sh"))
    assert pretend_hosts.missing() == "there is no tc: apt-get install iproute2"


def test_what_a_tool_refuses_is_one_error_with_its_words():
    with pytest.raises(ValueError, match=r"makes no pretend hosts: ls /none said .*privileged"):
        pretend_hosts.run("ls", "/none")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    hosts.need_hosts()
    with pretend_hosts.Network(3, tmp_path_factory.mktemp("pretend")) as made:
        yield made


def said(host, *words):
    return subprocess.run(host.command(*words), capture_output=True, text=True).stdout.split()


def test_each_host_has_a_name_that_all_know(network):
    for host in network.hosts:
        assert said(host, "hostname") == [host.name]
        for other in network.hosts:
            assert said(host, "getent", "hosts", other.name)[0] == other.address


def test_links_carry_as_much_as_they_are_told_to(network):
    network.throttle(50)
    assert 25 < network.bandwidth(0.5) < 52
    network.throttle(0)
    assert network.bandwidth(0.5) > 200


def test_what_is_sent_comes_later_by_the_delay_and_whole(network):
    network.delay(10e-3)
    assert 20e-3 < network.round_trip_s(5) < 60e-3
    assert network.bandwidth(0.5) > 1  # also frames that the kernel has not cut up arrive
    network.delay(0)
    assert network.round_trip_s(5) < 10e-3


def test_what_comes_in_is_limited_as_what_goes_out(network):
    """Two hosts that send to a third share its link."""
    network.throttle(20)
    *senders, receiver = network.hosts
    lines = [network._connected(sender, receiver) for sender in senders]
    with ThreadPoolExecutor(4) as pool:
        rates = [pool.submit(pretend_hosts._receive, far) for _, far in lines]
        for near, _ in lines:
            pool.submit(pretend_hosts._send, near, 1.0)
        assert 10 < sum(rate.result() for rate in rates) * 8e-6 < 25
    network.throttle(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_behind_however_it_ends(number):
    hosts.need_hosts()
    made = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with made:
        holders = made.stdout.readline().split()
        assert len(holders) == 2 and all(Path(f"/proc/{int(n)}").exists() for n in holders)
        assert not {"bridge", "port0"} & {name for _, name in socket.if_nameindex()}
        made.send_signal(number)
    ends = time.monotonic() + 10
    while any(Path(f"/proc/{int(n)}").exists() for n in holders):
        assert time.monotonic() < ends
        time.sleep(0.05)
