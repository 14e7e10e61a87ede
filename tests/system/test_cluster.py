"""A Ray cluster writes the bits of one process, even if workers and nodes are killed."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from conftest import ROOT
from data import cluster, prepare
from prepared import files_of
from runtime.storage import BucketFolder
from simulated_hosts import wait_for

pytestmark = [
    pytest.mark.ray,
    # Clients close their connections when they are garbage collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Ray does not close the pipes of its processes.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

TIMEOUT_S = 300
# Prepares data in tasks that each take `seconds` longer. While a file hold.N lies beside --out, no
# task ends once there are N records.
CHILD = """
import sys, time
from pathlib import Path
from data import cluster, prepare
from runtime.errors import run_command

seconds, *arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--out") + 1])

def held():
    limits = [int(path.suffix[1:]) for path in out.parent.glob("hold.*")]
    return limits and len(list(out.glob("splits/0*.json"))) >= min(limits)

def slow(*given):
    from data import cluster
    time.sleep(float(seconds))
    while held():
        time.sleep(0.05)
    return cluster.on_node(*given)

cluster.on_node = slow
run_command(lambda: prepare.main(arguments))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster") / "source"
    folder.mkdir()
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    for name, part in {"a": text[:400_000:2], "b": text[1:400_000:2]}.items():
        rows = [{"text": part[i : i + 900]} for i in range(0, len(part), 900)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags(source, out, *more):
    where = "--source", str(source), "--out", str(out), "--split-mb", "0.02"
    return [*where, "--workers", "1", "--val-share", "0.2", "--shard-tokens", "9000", *more]


@pytest.fixture(scope="module")
def whole(source):
    """The files that one process writes."""
    prepare.main(flags(source, source.parent / "whole"))
    return files_of(source.parent / "whole")


class Nodes:
    """A cluster of nodes with one CPU each, and a head without a CPU."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.options = {"object_store_memory": 80 << 20, "include_dashboard": False}
        self.all = Cluster(initialize_head=True, head_node_args=self.options | {"num_cpus": 0})
        self.address, self.working = self.all.address, []
        self.add(3)

    def add(self, count):
        self.working += [self.all.add_node(num_cpus=1, **self.options) for _ in range(count)]

    def kill_nodes(self, count=1):
        for node in self.working[:count]:
            self.all.remove_node(node, allow_graceful=False)
        del self.working[:count]
        return True

    def kill_worker(self):
        """Kill a worker that runs a task; return whether there was one."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self.working]
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                name = (entry / "cmdline").read_bytes()
                if parent in raylets and name.startswith(b"ray::slow"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    return True
        return False


@pytest.fixture(scope="module")
def nodes(bucket_server):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bucket_server.environment.items():
            patch.setenv(name, value)  # a node passes its environment to its workers
        nodes = Nodes()
        yield nodes
        nodes.all.shutdown()


def start(nodes, seconds, arguments, before=""):
    command = [sys.executable, "-c", before + CHILD, str(seconds), *arguments]
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*command, "--ray", nodes.address], cwd=ROOT, text=True, **streams)


def finish(process, code=0):
    """Return what it printed, as an error if the expected exit code is one."""
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, errors
    return errors if code else output


def test_workers_and_nodes_that_die_change_no_bit(nodes, source, whole, tmp_path):
    out, hold = tmp_path / "out", tmp_path / "hold.8"
    hold.touch()  # or the tasks could end before the last kill
    process = start(nodes, 0.7, flags(source, out))
    for count, kill in enumerate((nodes.kill_worker, nodes.kill_nodes, nodes.kill_worker)):
        wait_for(lambda n=count: len(list(out.glob("splits/0*.json"))) >= 2 * n + 1, TIMEOUT_S)
        wait_for(kill)
    nodes.kill_nodes(2)  # all
    time.sleep(2)
    assert process.poll() is None
    nodes.add(3)
    hold.unlink()
    finish(process)
    assert files_of(out) == whole


def test_a_cluster_writes_to_a_bucket_and_resumes_there(nodes, source, whole, bucket):
    url, out = f"{bucket.url}/source", f"{bucket.url}/data/books"
    for path in source.iterdir():
        BucketFolder(url).write(path.name, path.read_bytes())
    process, end = start(nodes, 0.1, flags(url, out)), time.monotonic() + TIMEOUT_S
    while len(BucketFolder(out).files("splits/0")) < 4:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.1)
    process.kill()
    process.communicate()
    bucket.fault(503, on="upload", path="data/*", times=3)
    assert " splits with " in finish(start(nodes, 0, flags(url, out)))
    objects = BucketFolder(out)
    there = {name: objects.read(name) for name in objects.files() if name.endswith(".npy")}
    assert there == {n: c for n, c in whole.items() if n.endswith(".npy")}


def test_an_error_of_a_task_is_the_one_line_of_a_single_process(nodes, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 9_000 + '{"text"\n')
    arguments = flags(tmp_path / "a.jsonl", tmp_path / "out")
    errors = finish(start(nodes, 0, arguments), 2)
    with pytest.raises(ValueError, match=r"/a.jsonl:9001 is not a line of JSON") as raised:
        prepare.main(arguments)
    assert errors.splitlines()[-1] == f"error: {raised.value}"


def test_an_out_that_machines_do_not_share_is_refused(nodes, source, tmp_path):
    before = "import types\nfrom data import cluster\nfrom runtime.storage import DiskFolder\n"
    before += "there = lambda url: url if url == cluster.ROOT else f'{url}-elsewhere'\n"
    before += "cluster.storage = types.SimpleNamespace(at=lambda url: DiskFolder(there(url)))\n"
    errors = finish(start(nodes, 0, flags(source, tmp_path / "out"), before), 2)
    assert "which does not exist here. Use an --out that all machines share" in errors


def test_a_missing_cluster_is_one_line(tmp_path):
    elsewhere = SimpleNamespace(address="127.0.0.1:1")
    errors = finish(start(elsewhere, 0, flags(ROOT / "README.md", tmp_path / "out")), 2)
    assert errors.splitlines()[-1].startswith("error: there is no Ray cluster at --ray 127")


def test_a_node_with_other_versions_is_refused():
    versions = cluster.versions("/")
    assert {"python", "tiktoken", "data/encode.py", "data/manifest.py"} <= versions.keys()
    with pytest.raises(ValueError, match=rf"node {platform.node()} has another tiktoken than"):
        cluster.on_node(None, versions | {"tiktoken": "0.0"})
