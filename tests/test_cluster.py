"""A Ray cluster writes the bits of data/prepare.py, also where its workers and nodes are killed."""

import contextlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("ray")

from buckets import Prefix
from conftest import ROOT
from data import cluster, out, prepare
from data.cluster import Cluster
from data.settings import Prepare
from data.shards import PROGRESS
from data.sources import units
from data.tasks import Node, Target, compare, encode_unit, versions, write
from manifest import INDEX, read_manifest

pytestmark = [
    pytest.mark.ray,
    # Clients leave connections to be closed when they are collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Ray leaves its processes' pipes so.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

# Ray's own lines: (raylet) ..., 2026-01-31 ...
RAYS = re.compile(r"(\x1b\[\d+m)?(\(\w[^)]*\)|\[?\d{4}-\d\d-\d\d[ T])")
SHARD = 60_000
KILLS = 10
PATIENCE_S = 300
# Prepares with each of these lists of flags, one after another, and logs how many tokens a task
# makes, which takes so long.
CHILD = """
import sys, time
from data import cluster
from faults import command_line

log, seconds, *arguments = sys.argv[1:]

def logged(*given):
    from data import tasks
    counts, ids = tasks.encode_unit(*given)
    with open(log, "a") as file:
        file.write(f"{len(ids)}\\n")
    time.sleep(float(seconds))
    return counts, ids

cluster.encode_unit = logged
command_line(lambda: cluster.main(arguments))
"""


class Nodes:
    """A cluster of three nodes with a CPU each, beside the head, which has none."""

    def __init__(self):
        from ray.cluster_utils import Cluster as LocalCluster

        # Results of any size stay on their nodes, as those of real stretches do.
        system = {"max_direct_call_object_size": 1000}
        head = cluster.node(0) | {"_system_config": system, "object_store_memory": 80 << 20}
        self.all = LocalCluster(initialize_head=True, head_node_args=head)
        self.address, self.working = self.all.address, []
        for _ in range(3):
            self.add()

    def add(self):
        how = cluster.node(1) | {"object_store_memory": 80 << 20}
        self.working.append(self.all.add_node(**how))

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


def workers_of(node):
    [raylet] = node.all_processes["raylet"]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            name = (entry / "cmdline").read_bytes()
            if parent == raylet.process.pid and name.startswith(b"ray::logged"):
                yield int(entry.name)


@pytest.fixture(scope="module")
def nodes():
    made = Nodes()
    yield made
    made.all.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Lines, a long file of text, Parquet in row groups; about half a million tokens."""
    folder = tmp_path_factory.mktemp("cluster") / "source"
    folder.mkdir()
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    text = (text * (1 + 1_300_000 // len(text)))[:1_300_000]
    rows = [text[i : i + 3_000] for i in range(0, 500_000, 3_000)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "b.txt").write_text(text[500_000:1_000_000] + "é漢")
    rows = [text[i : i + 2_000] for i in range(1_000_000, 1_300_000, 2_000)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": rows}), folder / "c.parquet", row_group_size=40
    )
    return folder


def flags(source, out, *more):
    where = "--source", str(source), "--out", str(out), "--shard-tokens", str(SHARD)
    return [*where, "--val-share", "0.2", *map(str, more)]


def files_of(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(source):
    prepare.main([*flags(source, source.parent / "whole"), "--workers", "1"])
    return files_of(source.parent / "whole")


def started(nodes, log, seconds, arguments, before=""):
    command = [sys.executable, "-c", before + CHILD, str(log), str(seconds), *arguments]
    command += ["--address", nodes.address]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process):
    told, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return told


def lines(log):
    return list(map(int, log.read_text().split())) if log.exists() else []


def test_workers_and_nodes_that_die_change_no_bit_and_cost_a_shard_at_most(
    nodes, source, whole, tmp_path
):
    log, chance = tmp_path / "log", random.Random(0)
    tokens = sum(read_manifest(source.parent / "whole" / s).tokens for s in ("train", "val"))
    process, kills = started(nodes, log, 0.15, flags(source, tmp_path / "out")), 0
    while process.poll() is None and kills < KILLS:
        due = tokens * (kills + chance.random()) / (KILLS + 1)
        if sum(lines(log)) < due:
            time.sleep(0.02)
        elif kills % 3 == 1:
            nodes.kill_node(chance)
            kills += 1
        else:
            kills += nodes.kill_worker(chance)
    ended(process)
    assert kills == KILLS
    assert files_of(tmp_path / "out") == whole
    print(f"tokens made twice: {sum(lines(log)) - tokens:,} in {kills} kills")
    assert tokens < sum(lines(log)) <= tokens + KILLS * SHARD


def test_a_driver_that_dies_is_gone_on_with_by_either_program(nodes, source, whole, tmp_path):
    for program in ("cluster", "prepare"):
        out, log = tmp_path / program, tmp_path / f"{program}.log"
        process = started(nodes, log, 0.05, flags(source, out))
        end = time.monotonic() + PATIENCE_S
        while not (out / PROGRESS).exists() or sum(lines(log)) < 4 * SHARD:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.kill()
        process.communicate()
        assert not list(out.rglob(INDEX))
        if program == "prepare":
            prepare.main([*flags(source, out), "--workers", "1"])
        else:
            told = ended(started(nodes, log, 0, flags(source, out)))
            assert "cluster: 3 nodes with 3 CPUs" in told and "goes on after" in told
        assert files_of(out) == whole


def test_what_prepare_began_the_cluster_goes_on_with(nodes, source, whole, tmp_path, monkeypatch):
    store, done = prepare.Work.store, []

    def stopped(work):
        store(work)
        done.append(1)
        if len(done) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare.Work, "store", stopped)
        prepare.main([*flags(source, tmp_path), "--workers", "1"])
    assert "goes on after" in ended(started(nodes, tmp_path / "log", 0, flags(source, tmp_path)))
    (tmp_path / "log").unlink()
    assert files_of(tmp_path) == whole


def test_a_cluster_without_a_node_is_told_and_given_up(nodes, source, whole, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    limits = "from data import cluster\ncluster.WAIT_S, cluster.NODELESS_S = 1.0, 3.0\n"
    process = started(nodes, log, 0.3, flags(source, out), limits)
    while sum(lines(log)) < 2 * SHARD:
        assert process.poll() is None
        time.sleep(0.02)
    for node in nodes.working:
        nodes.all.remove_node(node, allow_graceful=False)
    told, errors = process.communicate(timeout=PATIENCE_S)
    nodes.working = []
    for _ in range(3):
        nodes.add()
    assert process.returncode == 75, errors
    assert "waits for a node to join: there is none with a CPU since 2 s" in told
    [line] = (line for line in errors.splitlines() if not RAYS.match(line))
    assert line.startswith("error: the cluster has had no node with a CPU for 3 s.")
    ended(started(nodes, log, 0, flags(source, out)))
    assert files_of(out) == whole


def test_a_node_whose_disk_is_full_is_named_and_nothing_is_lost(
    nodes, source, whole, tmp_path, small_disk
):
    folder, enlarge = small_disk
    arguments = flags(source, folder / "out")
    process = started(nodes, tmp_path / "log", 0, arguments)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, errors
    [line] = (line for line in errors.splitlines() if not RAYS.match(line))
    assert line.startswith(f"error: node {platform.node()}: {folder}/out/")
    assert " has no space left (" in line and "Make room, and start this again" in line
    enlarge()
    assert "goes on after" in ended(started(nodes, tmp_path / "log", 0, arguments))
    assert files_of(folder / "out") == whole


def test_conversations_limits_and_what_is_left_out_are_as_on_one_machine(nodes, tmp_path, capsys):
    rows = [{"prompt": f"{n} " * 40, "answer": f"{n + 1} " * (n % 60)} for n in range(1, 900)]
    text = "".join(json.dumps(row) + "\n" * (1 + row["prompt"].count("7")) for row in rows)
    (tmp_path / "chat.jsonl").write_text("{\n" + text)
    more = ["--chat", "--skip-bad", "--max-tokens", 40_000, "--shard-tokens", 4_000]
    for program in ("prepare", "cluster"):
        arguments = flags(tmp_path / "chat.jsonl", tmp_path / program, *more)
        if program == "prepare":
            prepare.main(arguments)
        else:
            told = ended(started(nodes, tmp_path / "log", 0, arguments))
    left_out = "left out: 1 lines that are no JSON, 2 rows that are no conversation"
    assert left_out in capsys.readouterr().out and left_out in told
    one, two = files_of(tmp_path / "prepare"), files_of(tmp_path / "cluster")
    assert one == two and len(one) > 15


def test_a_cluster_writes_straight_to_a_bucket_and_goes_on_from_there(
    nodes_at_bucket, source, whole, tmp_path, bucket
):
    nodes, url = nodes_at_bucket, f"{bucket.url}/books"
    source_url = f"{bucket.url}/source"
    for path in source.iterdir():
        Prefix(source_url).write(path.name, path.read_bytes())
    prepare.main([*flags(source_url, tmp_path / "whole"), "--workers", "1"])
    log = tmp_path / "log"
    process = started(nodes, log, 0.05, flags(source_url, url))
    end = time.monotonic() + PATIENCE_S
    while sum(lines(log)) < 4 * SHARD:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert PROGRESS in Prefix(url).found()
    Prefix(url).remove(["lock"])
    with pytest.raises(ValueError, match=r"begun by data/cluster.py, which keeps progress.json"):
        prepare.main([*flags(source_url, url), "--staging", str(tmp_path / "staging")])
    bucket.fault(503, on="upload", path="books/*", times=3)
    assert "goes on after" in ended(started(nodes, log, 0, flags(source_url, url)))
    objects = Prefix(url)
    there = {name: objects.read(name) for name in objects.found() if name != "lock"}
    assert there == files_of(tmp_path / "whole")
    assert {n: c for n, c in there.items() if n.endswith(".npy")} == {
        n: c for n, c in whole.items() if n.endswith(".npy")
    }


@pytest.fixture
def nodes_at_bucket(nodes, bucket):
    """Nodes whose workers know where the bucket is."""
    old, nodes.working = nodes.working, []
    for node in old:
        nodes.all.remove_node(node)
    for _ in range(3):
        nodes.add()
    return nodes


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_shard_whose_writing_is_done_again_is_the_same(tmp_path, bucket, where, weighted):
    """As Ray does it where the node of one that was done dies before it says so."""
    folder = str(tmp_path / "train") if where == "folder" else f"{bucket.url}/out/train"
    (tmp_path / "train").mkdir()
    target = Target(folder, np.dtype(np.uint16), weighted)
    a, b = np.arange(100, dtype=np.uint16), np.arange(50, dtype=np.uint16)
    found = []
    for _ in range(2):
        assert write(target, "shard_00000.npy", 0, [(0, 10, 90, 1)], False, a) is None
    for _ in range(2):
        parts = [(1, 0, 10, 0), (0, 3, 50, 1)]
        found.append(write(target, "shard_00000.npy", 80, parts, True, b, a))
    assert found[0] == found[1]
    expected = np.concatenate([a[10:90], a[:10], b[3:]])
    np.save(tmp_path / "expected.npy", expected)
    content = (tmp_path / "expected.npy").read_bytes()
    if where == "bucket":
        names = [file.name for file in out.files_of([found[0]])]
        there = {name: Prefix(folder).read(name) for name in names}
    else:
        there = files_of(tmp_path / "train")
    assert there["shard_00000.npy"] == content
    assert len(there) == 1 + weighted and (found[0].weights is not None) == weighted
    with pytest.raises(ValueError, match=r"shard_00001.*is not as progress.json says"):
        write(target, "shard_00001.npy", 80, [(0, 0, 5, 1)], True, a)


# --- what is refused ------------------------------------------------------------------------------


def test_what_a_task_refuses_is_the_line_of_one_machine(nodes, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 9_000 + '{"text"\n')
    arguments = flags(tmp_path / "a.jsonl", tmp_path / "out")
    process = started(nodes, tmp_path / "log", 0, arguments)
    _, errors = process.communicate(timeout=PATIENCE_S)
    with pytest.raises(ValueError) as raised:
        prepare.main([*arguments, "--workers", "1"])
    assert process.returncode == 2
    assert errors == f"error: {raised.value}\n"
    assert f"{tmp_path}/a.jsonl:9001 is not a line of JSON" in errors


def test_a_cluster_that_is_not_there_is_said_in_one_line(tmp_path):
    arguments = [*flags(ROOT, tmp_path / "out"), "--address", "127.0.0.1:1"]
    command = [sys.executable, ROOT / "data" / "cluster.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: there is no Ray cluster at --address")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": "hf:x"}, "cannot be cut for a cluster.*data/prepare.py"),
        ({"source": "x", "local": -1}, "--local -1 starts a cluster"),
        ({"source": "x", "local": 2, "address": "auto"}, "Give one of them"),
    ],
)
def test_a_setting_that_a_cluster_cannot_meet_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        cluster.check(Cluster(out="x", **fields))


def test_a_node_that_would_make_other_bits_or_sees_another_source_is_refused():
    here = Node("a", {"python": "3.11.7", "tiktoken": "0.14"}, "00")
    compare(here, here._replace(host="b"))
    with pytest.raises(ValueError, match=r"node b has python None, here 3.11.7; tiktoken 0.15, he"):
        compare(here, Node("b", {"tiktoken": "0.15"}, "00"))
    with pytest.raises(ValueError, match=r"node b does not see the source as it is here \(11\)"):
        compare(here, Node("b", here.versions, "11"))


def test_a_node_that_joined_later_is_compared_too(source):
    config = Prepare(source=str(source), out="")
    [unit, *_] = units(config, 10_000)
    counts, ids = encode_unit(config, unit, None, versions())
    assert counts.lengths.sum() == len(ids) > 0
    with pytest.raises(ValueError, match=rf"node {platform.node()} has tiktoken .*, here 0\.0"):
        encode_unit(config, unit, None, versions() | {"tiktoken": "0.0"})


def test_who_goes_on_in_a_bucket_touches_no_file_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / "shard_00000.npy"
    file.write_bytes(b"another corpus")
    target = Target("gs://bucket/train", np.dtype(np.uint16), False)
    writer = cluster.RemoteWriter(Path("train"), 100, target.dtype, False, target=target)
    writer.restore(writer.state() | {"unfinished": 7, "tokens": 7})
    assert writer.unfinished == 7
    assert file.read_bytes() == b"another corpus"


@pytest.mark.parametrize("flag", [["--workers", "2"], ["--staging", "x"]])
def test_flags_that_a_cluster_leaves_without_effect_are_refused(source, tmp_path, flag):
    with pytest.raises(ValueError, match=f"{flag[0]} is for data/prepare.py"):
        cluster.main(flags(source, tmp_path, *flag))
