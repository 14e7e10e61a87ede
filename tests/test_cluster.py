"""A Ray cluster writes the bits of one process, also where its workers and nodes are killed."""

import contextlib
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from buckets import Prefix
from conftest import ROOT
from data import cluster, prepare
from data.prepare import main
from manifest import INDEX
from prepared import files_of
from test_map import flags, source, whole  # noqa: F401

pytestmark = [
    pytest.mark.ray,
    # Clients leave connections to be closed when they are collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Ray leaves its processes' pipes so.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

# Ray's own lines: (raylet) ..., 2026-01-31 ...
RAYS = re.compile(r"(\x1b\[\d+m)?(\(\w[^)]*\)|\[?\d{4}-\d\d-\d\d[ T])")
KILLS = 10
PATIENCE_S = 300
# Prepares where each split takes so long.
CHILD = """
import sys, time
from data import cluster, prepare
from faults import command_line

seconds, *arguments = sys.argv[1:]

def slow(*given):
    from data import cluster
    time.sleep(float(seconds))
    return cluster.on_node(*given)

cluster.on_node = slow
command_line(lambda: prepare.main(arguments))
"""


class Nodes:
    """A cluster of three nodes with a CPU each, beside the head, which has none."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.how = {"object_store_memory": 80 << 20, "include_dashboard": False}
        self.all = Cluster(initialize_head=True, head_node_args=self.how | {"num_cpus": 0})
        self.address, self.working = self.all.address, []
        for _ in range(3):
            self.add()

    def add(self):
        self.working.append(self.all.add_node(num_cpus=1, **self.how))

    def kill_node(self, chance):
        """And has another take its place."""
        self.all.remove_node(self.working.pop(chance.randrange(3)), allow_graceful=False)
        self.add()

    def kill_worker(self, chance):
        """One that does a task; whether there was one."""
        found = [worker for node in self.working for worker in workers_of(node)]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)
        return bool(found)

    def renew(self):
        """Workers have the environment of the time when their node began."""
        for node in self.working:
            self.all.remove_node(node)
        self.working = []
        for _ in range(3):
            self.add()


def workers_of(node):
    [raylet] = node.all_processes["raylet"]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            name = (entry / "cmdline").read_bytes()
            if parent == raylet.process.pid and name.startswith(b"ray::slow"):
                yield int(entry.name)


@pytest.fixture(scope="module")
def nodes():
    made = Nodes()
    yield made
    made.all.shutdown()


def started(nodes, seconds, arguments, before=""):
    command = [sys.executable, "-c", before + CHILD, str(seconds), *arguments]
    command += ["--ray", nodes.address]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process):
    told, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return told


def records(out):
    return len(list(out.glob("splits/0*.json")))


def test_workers_and_nodes_that_die_change_no_bit(nodes, source, whole, tmp_path):  # noqa: F811
    out, chance, splits = tmp_path / "out", random.Random(0), records(source.parent / "whole")
    process, kills = started(nodes, 0.7, flags(source, out)), 0
    while process.poll() is None and kills < KILLS:
        if records(out) < splits * kills / (KILLS + 1):
            time.sleep(0.02)
        elif kills % 3 == 1:
            nodes.kill_node(chance)
            kills += 1
        else:
            kills += nodes.kill_worker(chance)
    ended(process)
    assert kills == KILLS
    assert files_of(out) == whole


def test_a_driver_that_dies_is_gone_on_with_by_any_way(nodes, source, whole, tmp_path):  # noqa: F811
    for way in ("processes", "cluster"):
        out = tmp_path / way
        process, end = started(nodes, 0.1, flags(source, out)), time.monotonic() + PATIENCE_S
        while records(out) < 4:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.kill()
        process.communicate()
        assert not list(out.rglob(INDEX))
        if way == "processes":
            prepare.main(flags(source, out, "--workers", "2"))
        else:
            assert " splits with " in ended(started(nodes, 0, flags(source, out)))
        assert files_of(out) == whole


def test_a_cluster_that_loses_all_nodes_waits_for_others(nodes, source, whole, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    process = started(nodes, 0.3, flags(source, out))
    while records(out) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    for node in nodes.working:
        nodes.all.remove_node(node, allow_graceful=False)
    nodes.working = []
    time.sleep(3)
    assert process.poll() is None
    for _ in range(3):
        nodes.add()
    ended(process)
    assert files_of(out) == whole


def test_a_limit_and_an_end_for_validation_are_as_in_one_process(nodes, source, tmp_path):  # noqa: F811
    for number, more in enumerate((["--max-tokens", "40000"], ["--val-share", "0.001"])):
        one, other = tmp_path / f"one{number}", tmp_path / f"other{number}"
        main(flags(source / "a.jsonl", one, *more))
        ended(started(nodes, 0, flags(source / "a.jsonl", other, *more)))
        assert files_of(one) == files_of(other)


def test_a_cluster_writes_to_a_bucket_and_goes_on_there(nodes, source, whole, bucket):  # noqa: F811
    nodes.renew()
    url, out = f"{bucket.url}/source", f"{bucket.url}/data/books"
    for path in source.iterdir():
        Prefix(url).write(path.name, path.read_bytes())
    process, end = started(nodes, 0.1, flags(url, out)), time.monotonic() + PATIENCE_S
    while len(Prefix(out).found("splits/0")) < 4:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.1)
    process.kill()
    process.communicate()
    bucket.fault(503, on="upload", path="data/*", times=3)
    assert " splits with " in ended(started(nodes, 0, flags(url, out)))
    objects = Prefix(out)
    there = {name: objects.read(name) for name in objects.found() if name.endswith(".npy")}
    assert there == {n: c for n, c in whole.items() if n.endswith(".npy")}


# --- what is refused ------------------------------------------------------------------------------


def test_what_a_task_refuses_is_the_line_of_one_process(nodes, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 9_000 + '{"text"\n')
    arguments = flags(tmp_path / "a.jsonl", tmp_path / "out")
    _, errors = (process := started(nodes, 0, arguments)).communicate(timeout=PATIENCE_S)
    with pytest.raises(ValueError) as raised:
        main(arguments)
    assert process.returncode == 2
    assert errors.splitlines()[-1] == f"error: {raised.value}"
    assert f"{tmp_path}/a.jsonl:9001 is not a line of JSON" in errors


def test_a_cluster_that_is_not_there_is_said_in_one_line(tmp_path):
    arguments = [*flags(ROOT / "README.md", tmp_path / "out"), "--ray", "127.0.0.1:1"]
    command = [sys.executable, ROOT / "data" / "prepare.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: there is no Ray cluster at --ray 127")


def test_a_node_that_would_make_other_bits_is_refused():
    versions = cluster.versions("/")
    assert {"python", "tiktoken", "data/encode.py", "manifest.py"} <= versions.keys()
    with pytest.raises(ValueError, match=rf"node {platform.node()} has another tiktoken than"):
        cluster.on_node(None, versions | {"tiktoken": "0.0"})


def test_an_out_that_machines_do_not_share_is_refused(nodes, source, tmp_path, monkeypatch):  # noqa: F811
    before = "from data import cluster\nfrom data.shards import DiskFolder\n"
    before += "cluster.folder_at = lambda url: DiskFolder(url + '-elsewhere')\n"
    process = started(nodes, 0, flags(source, tmp_path / "out"), before)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "and it is not here: --out is no folder that all machines share" in errors
