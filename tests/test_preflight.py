"""What commonly breaks a job of several hosts is found before it starts, each with its fix."""

import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import socket
import sys
import time
from types import SimpleNamespace

import pytest

from runtime import preflight
from runtime.errors import Exit, JobFailed, TransientError


@pytest.fixture(autouse=True)
def plain_host(monkeypatch, tmp_path):
    """A host on which nothing is wrong."""
    for name in (*preflight.MEGASCALE, "http_proxy", "https_proxy", "grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(preflight, "TPU_LOCK", tmp_path / "libtpu_lockfile")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: f"10.0.0.{len(name)}")


def test_a_host_without_problems_passes():
    preflight.check_host("10.0.0.2", 1)


def test_a_tpu_that_another_process_holds_is_refused():
    preflight.TPU_LOCK.touch()
    preflight.check_host("10.0.0.2", 1)
    with preflight.TPU_LOCK.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"libtpu_lockfile: .*End the process that uses"):
            preflight.check_host("10.0.0.2", 1)


def test_processes_of_one_host_try_the_lock_at_once():
    preflight.TPU_LOCK.touch()
    with preflight.TPU_LOCK.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another process does in check_host
        preflight.check_host("10.0.0.2", 1)


def test_a_job_on_cpus_ignores_the_lock(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    preflight.TPU_LOCK.touch()
    with preflight.TPU_LOCK.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        preflight.check_host("10.0.0.2", 1)


def test_a_lock_of_another_user_is_refused(monkeypatch):
    def refused(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(preflight.TPU_LOCK), "open", refused)
    with pytest.raises(ValueError, match=r"libtpu_lockfile: Permission denied.*sudo"):
        preflight.check_host("10.0.0.2", 1)


@pytest.mark.parametrize(
    ("names", "replicas", "refused"),
    [(1, 0, True), (2, 2, True), (3, 1, True), (3, 2, False), (3, 0, False)],
)
def test_variables_of_slices_that_are_stale_or_set_in_part_are_refused(
    monkeypatch, names, replicas, refused
):
    for name in preflight.MEGASCALE[:names]:
        monkeypatch.setenv(name, "2")
    if refused:
        with pytest.raises(ValueError, match=r"MEGASCALE.* is set\. For several TPU slices"):
            preflight.check_host("10.0.0.2", replicas)
    else:
        preflight.check_host("10.0.0.2", replicas)


@pytest.mark.parametrize(
    ("direct", "refused"),
    [("", True), ("10.0.0.3", True), ("localhost,10.0.0.2", False), (" .0.2 ", False)],
)
def test_a_proxy_between_the_processes_is_refused(monkeypatch, direct, refused):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", direct)
    if refused:
        with pytest.raises(ValueError, match=r"https_proxy is set\. Set no_proxy=10\.0\.0\.2"):
            preflight.check_host("10.0.0.2", 1)
    else:
        preflight.check_host("10.0.0.2", 1)


def test_a_host_name_that_other_hosts_cannot_reach_is_refused_on_cpus(monkeypatch):
    own = socket.gethostname()
    addresses = {own: "127.0.1.1", "h0": "10.0.0.2", "localhost": "127.0.0.1"}
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ValueError, match=rf"{own} is 127\.0\.1\.1, .*/etc/hosts"):
        preflight.check_host("h0", 1)
    preflight.check_host("localhost", 1)  # all processes are on this machine
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    preflight.check_host("h0", 1)


def test_several_problems_are_one_error_with_a_line_for_each(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv(preflight.MEGASCALE[0], "x")
    with pytest.raises(ValueError) as refused:
        preflight.check_host("10.0.0.2", 1)
    assert len(str(refused.value).splitlines()) == 3


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port}: .*in use.*Use another port"):
            preflight.check_coordinator(f"127.0.0.1:{port}", 0, 1)
        preflight.check_coordinator(f"127.0.0.1:{port}", 1, 1)
    preflight.check_coordinator(f"127.0.0.1:{port}", 0, 1)


def test_a_coordinator_that_does_not_answer_is_named_after_the_limit():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(
        TransientError, match=rf"127\.0\.0\.1:{port}: .*refused.*Does it run, and is the port"
    ):
        preflight.check_coordinator(f"127.0.0.1:{port}", 1, 0.5)
    assert time.monotonic() - began >= 0.5


def test_a_disk_that_is_almost_full_is_refused(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/no/such/folder")  # as a job's may be that was removed
    preflight.check_disk()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**28))
    with pytest.raises(ValueError, match=r"has 0\.25 GiB free, and needs 1\."):
        preflight.check_disk()


# --- what differs between hosts -------------------------------------------------------------------


def compared(monkeypatch, *others, skew_s=0.0):
    """Raises what process 0 would, beside processes with these facts."""
    given = [preflight.facts(), *others]
    sent = []

    def gather(data):
        sent.append(data)
        if len(sent) == 2:  # names and clocks
            clocks = [json.dumps([f"process {i} (h{i})", time.time()]) for i in range(len(given))]
            clocks[-1] = json.dumps([f"process {len(given) - 1} (h9)", time.time() + skew_s])
            return [clock.encode() for clock in clocks]
        texts = [json.dumps(facts, sort_keys=True).encode() for facts in given]
        return texts if len(sent) == 3 else [preflight.hashlib.sha256(t).digest() for t in texts]

    preflight.compare("process 0 (h0)", gather)
    return sent


def test_equal_hosts_exchange_digests_only(monkeypatch):
    sent = compared(monkeypatch, preflight.facts())
    assert len(sent) == 2 and len(sent[0]) == 32


def test_differences_are_named_with_both_values_and_hosts(monkeypatch):
    other = preflight.facts() | {"package numpy": "1.0", "commit": "0123-dirty"}
    with pytest.raises(JobFailed) as failed:
        compared(monkeypatch, preflight.facts(), other)
    numpy = importlib.metadata.version("numpy")
    assert failed.value.code == Exit.CONFIG
    line = f"package numpy differs: {numpy} on process 0 (h0), 1.0 on process 2 (h9)"
    assert line in str(failed.value) and "process 1" not in str(failed.value)
    assert "commit differs: " in str(failed.value) and "0123-dirty on" in str(failed.value)


@pytest.mark.parametrize("skew_s", [60.0, -60.0])
def test_clocks_that_differ_are_named(skew_s, monkeypatch):
    named = re.escape(f"the clock of process 1 (h9) is {skew_s:+.0f} s off that of process 0")
    with pytest.raises(JobFailed, match=named):
        compared(monkeypatch, preflight.facts(), skew_s=skew_s)
    compared(monkeypatch, preflight.facts(), skew_s=5.0)


def test_facts_have_the_commit_its_changes_the_config_and_all_packages(monkeypatch, tmp_path):
    config = tmp_path / "own.toml"
    config.write_text("[train]\n")
    monkeypatch.setattr(sys, "argv", ["main.py", "--config", str(config)])
    found = preflight.facts()
    assert {"command", "Python", "commit", "package jax", "package jaxlib", str(config)} <= set(
        found
    )
    assert found["command"] == f"main.py --config {config}"
    config.write_text("[model]\n")
    assert preflight.facts()[str(config)] != found[str(config)]
    monkeypatch.setattr(sys, "argv", ["main.py", f"--config={config}"])
    assert str(config) in preflight.facts()


def test_a_package_without_a_name_does_not_end_the_checks(monkeypatch, tmp_path):
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert any(d.metadata["Name"] is None for d in importlib.metadata.distributions())
    assert "package jax" in preflight.facts()
    monkeypatch.chdir(tmp_path)  # no repository
    assert os.listdir(tmp_path) and "commit" in preflight.facts()
