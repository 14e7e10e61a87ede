"""What commonly breaks a job of several hosts is found before it starts, each with its fix."""

import contextlib
import fcntl
import importlib.metadata
import json
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
    proxies = "http_proxy", "https_proxy", "grpc_proxy", "no_proxy"
    for name in (*preflight.MEGASCALE, *proxies, "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight, "TPU_LOCK", tmp_path / "libtpu_lockfile")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: f"10.0.0.{len(name)}")


def refused(message):
    """Expect this ConfigError, or none."""
    return pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()


def test_a_tpu_that_another_process_holds_is_refused(monkeypatch):
    preflight.check_host("10.0.0.2", 1)
    preflight.TPU_LOCK.touch()
    preflight.check_host("10.0.0.2", 1)
    held = r"libtpu_lockfile: .*End the process that uses"
    # Processes of one host try the lock at once, and those on CPUs do not.
    for how, platform, message in (
        (fcntl.LOCK_EX, "", held),
        (fcntl.LOCK_SH, "", ""),
        (fcntl.LOCK_EX, "cpu", ""),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        with preflight.TPU_LOCK.open() as file, refused(message):
            fcntl.flock(file, how)
            preflight.check_host("10.0.0.2", 1)

    def denied(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(type(preflight.TPU_LOCK), "open", denied)
    with refused(r"libtpu_lockfile: Permission denied.*sudo"):
        preflight.check_host("10.0.0.2", 1)


def test_variables_of_slices_that_are_stale_or_set_in_part_are_refused(monkeypatch):
    message = r"MEGASCALE.* is set\. For several TPU slices"
    for names, replicas, is_refused in ((1, 0, True), (3, 1, True), (3, 2, False)):
        for name in preflight.MEGASCALE[:names]:
            monkeypatch.setenv(name, "2")
        with refused(message if is_refused else ""):
            preflight.check_host("10.0.0.2", replicas)


def test_a_proxy_between_the_processes_is_refused(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    message = r"https_proxy is set\. Set no_proxy=10\.0\.0\.2"
    for direct, is_refused in (("10.0.0.3", 1), ("x,10.0.0.2", 0), (" .0.2 ", 0)):
        monkeypatch.setenv("no_proxy", direct)
        with refused(message if is_refused else ""):
            preflight.check_host("10.0.0.2", 1)
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv(preflight.MEGASCALE[0], "x")
    with refused("\n.*\n"):  # a line for each problem
        preflight.check_host("10.0.0.2", 1)


def test_a_host_name_that_other_hosts_cannot_reach_is_refused_on_cpus(monkeypatch):
    own = socket.gethostname()
    addresses = {own: "127.0.1.1", "h0": "10.0.0.2", "localhost": "127.0.0.1"}
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with refused(rf"{own} is 127\.0\.1\.1, .*/etc/hosts"):
        preflight.check_host("h0", 1)
    preflight.check_host("localhost", 1)  # all processes are on this machine


def test_a_port_that_is_taken_or_does_not_answer_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with refused(rf"127\.0\.0\.1:{port}: .*in use.*Use another port"):
            preflight.check_coordinator(f"127.0.0.1:{port}", 0, 1)
        preflight.check_coordinator(f"127.0.0.1:{port}", 1, 1)
    preflight.check_coordinator(f"127.0.0.1:{port}", 0, 1)
    silent = rf"127\.0\.0\.1:{port}: .*refused.*Does it run, and is the port"
    with pytest.raises(TransientError, match=silent):
        preflight.check_coordinator(f"127.0.0.1:{port}", 1, 0.5)


def test_a_disk_that_is_almost_full_is_refused(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/no/such/folder")  # as a job's may be that was removed
    preflight.check_disk()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**28))
    with refused(r"has 0\.25 GiB free, and needs 1\."):
        preflight.check_disk()


# --- what differs between hosts -------------------------------------------------------------------


@pytest.fixture
def facts(monkeypatch):
    """Of this process, read once, which takes a second."""
    found = preflight.facts()
    monkeypatch.setattr(preflight, "facts", lambda: found)
    return found


def compared(*others, skew_s=0.0):
    """Raise what process 0 would, beside processes with these facts."""

    def gather(data):
        skews = [0.0] * (len(others) - 1) + [skew_s]
        named = enumerate(zip(skews, others, strict=True), 1)
        return [
            data,
            *(
                json.dumps([f"process {i} (h{i})", time.time() + s, f]).encode()
                for i, (s, f) in named
            ),
        ]

    preflight.compare("process 0 (h0)", gather)


def test_equal_hosts_start_and_clocks_that_differ_are_named(facts):
    compared(facts, skew_s=5.0)
    for skew_s in (60.0, -60.0):
        named = re.escape(f"the clock of process 1 (h1) is {skew_s:+.0f} s off that of process 0")
        with pytest.raises(JobFailed, match=named):
            compared(facts, skew_s=skew_s)


def test_differences_are_named_with_both_values_and_hosts(facts):
    other = facts | {"package numpy": "1.0", "commit": "0123-dirty"}
    with pytest.raises(JobFailed) as failed:
        compared(facts, other)
    numpy = importlib.metadata.version("numpy")
    assert failed.value.code == Exit.CONFIG
    line = f"package numpy differs: {numpy} on process 0 (h0), 1.0 on process 2 (h2)"
    assert line in str(failed.value) and "process 1" not in str(failed.value)
    assert "commit differs: " in str(failed.value) and "0123-dirty on" in str(failed.value)


def test_facts_have_the_commit_its_changes_the_config_and_all_packages(monkeypatch, tmp_path):
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)  # a package without a name does not end the checks
    assert any(d.metadata.get("Name") is None for d in importlib.metadata.distributions())
    config = tmp_path / "own.toml"
    config.write_text("[train]\n")
    monkeypatch.setattr(sys, "argv", ["main.py", "--config", str(config)])
    found = preflight.facts()
    assert {"Python", "commit", "package jax", "package jaxlib", str(config)} <= set(found)
    assert found["command"] == f"main.py --config {config}"
    config.write_text("[model]\n")
    monkeypatch.setattr(sys, "argv", ["main.py", f"--config={config}"])
    monkeypatch.chdir(tmp_path)  # no repository
    other = preflight.facts()
    assert other[str(config)] != found[str(config)] and "commit" in other
