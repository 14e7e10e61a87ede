"""debug_tpu.sh on hosts of the tests' own; setup_tpu.sh with a stand-in for apt-get."""

import os
import subprocess

import pytest

import simulated_hosts
from conftest import ROOT
from simulated_hosts import FOLDER, wait_for, write_script


@pytest.fixture
def net(tmp_path_factory):
    with simulated_hosts.network_with_ssh(4, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def tmux(tmp_path):
    """Runs tmux on a server of the test's own."""
    environment = {k: v for k, v in os.environ.items() if k != "TMUX"}
    environment["TMUX_TMPDIR"] = str(tmp_path)

    def tmux(*words, **more):
        command = ["tmux", *words] if words[0][0] != "/" else words
        run = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, env=environment | more, **run)

    yield tmux
    tmux("kill-server")


def debug(tmux, file, bin, *words):
    path = f"{bin}:{os.environ['PATH']}"
    return tmux(str(ROOT / "debug_tpu.sh"), "--hosts", str(file), *words, PATH=path)


def panes(tmux, window):
    return tmux("list-panes", "-t", f"=debug:{window}", "-F", "#{pane_dead}").stdout.split()


def test_a_command_runs_on_all_hosts_at_once_and_keys_go_to_all(net, tmux):
    file, bin = net.hosts_file(net.hosts), net.bin
    show = "echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS $1 >~/place"
    printed = debug(tmux, file, bin, "--folder", FOLDER, "--dry-run", "--", "bash", "-c", show)
    assert printed.returncode == 0 and printed.stdout.count("ssh://") == 8
    write_script(net.shared / "tpu-info", "echo tpu-info >~/monitor; exec sleep 99\n")
    net.hosts[2]("ln -s /mnt/shared/tpu-info /mnt/bin/tpu-info")
    words = ["--folder", FOLDER, "--detach", "--", "bash", "-c", show, "-", "a 'b"]
    done = debug(tmux, file, bin, *words)
    assert done.returncode == 0, done.stderr
    assert panes(tmux, "command") == panes(tmux, "monitor") == ["0"] * 4
    at = f"of 4 at {net.hosts[0].address}:8476 a 'b"
    for number, host in enumerate(net.hosts):
        wait_for(lambda h=host, n=number: h("cat place", check=False) == f"{n} {at}")
    tmux("send-keys", "-t", "=debug:command.0", "hostname >~/typed", "Enter")
    for host in net.hosts:
        wait_for(lambda h=host: h("cat typed", check=False) == h.name)
        monitor = "tpu-info" if host is net.hosts[2] else "top"
        wait_for(lambda h=host, m=monitor: any(m in p for p in h.processes()))
    again = debug(tmux, file, bin, "--detach")
    assert again.returncode == 2 and "end it with tmux kill-session -t debug" in again.stderr
    tmux("kill-session", "-t", "debug")
    for host in net.hosts:
        wait_for(lambda h=host: not h.processes())


def test_there_is_a_pane_for_each_of_any_number_of_hosts(tmux, tmp_path):
    simulated_hosts.require("tmux")
    write_script(tmp_path / "ssh", "exec sleep 99\n")
    file = tmp_path / "hosts.txt"
    file.write_text("".join(f"h{number}\n" for number in range(40)))
    assert debug(tmux, file, tmp_path, "--detach").returncode == 0
    assert panes(tmux, "command") == panes(tmux, "monitor") == ["0"] * 40


# --- setup_tpu.sh ---------------------------------------------------------------------------------


def test_packages_that_are_missing_are_installed_and_others_are_not(tmp_path):
    bin, calls = tmp_path / "bin", tmp_path / "calls"
    path = simulated_hosts.path_with(bin, "bash env curl flock")

    def packages():
        command = [ROOT / "setup_tpu.sh", "--packages"]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True)

    write_script(bin / "uv", "")
    refused = packages()
    assert refused.returncode == 2
    assert "no apt-get. Install these packages: git tmux" in refused.stderr
    write_script(bin / "apt-get", f'echo "apt-get $*" >>{calls}\n')
    write_script(bin / "sudo", 'shift; "$@"\n')
    assert packages().returncode == 0
    assert calls.read_text() == "apt-get update -qq\napt-get install -y -qq git tmux\n"
    for name in ("git", "tmux"):
        write_script(bin / name, "")
    calls.unlink()
    assert packages().returncode == 0 and not calls.exists()
