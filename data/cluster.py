"""The shards of data/prepare.py from a Ray cluster, bit for bit.

    ./run.sh ray start --head                                on one machine
    ./run.sh ray start --address HEAD:6379                   on the others
    python data/cluster.py --address HEAD:6379 --source gs://bucket/books --out gs://bucket/data

    python data/cluster.py --local 3 --source books --out data/books      a cluster of 3 nodes, here

This checkout must be at the same path on every machine, and so must a source and an OUT that are in
no bucket. The source is cut into stretches (`units` of data/sources.py), and each is a task: it
returns its tokens, which stay on its node, and how long each document is, which is all that comes
here. Here it is decided which split and which shard each token is for, by the rules of prepare.py,
and the tasks that write shards fetch their tokens from the nodes that have them.

What is under way, and what is not on its way to a shard and stored yet, are a shard's tokens at
most: where half of that is placed, the unfinished shards are written as far as they are, beside
progress.json. So a node that dies takes no more than a shard's tokens with it, which Ray makes
again, and this process no more when it dies. To hold tokens until their shard is full would cost
less writing, and with few documents for validation would hold many shards of both.
Stretches have at most half a shard together, so many CPUs want large shards; where one has less
than 50 thousand tokens Ray sends them through here. A long file of text or of JSON lines is read
here once, to see where it can be cut; many files, or Parquet, are not.
"""

import collections
import functools
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

# Run as a script, this folder is on the path and the one above it is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from buckets import is_bucket
from data import out, work
from data.encode import Encoded
from data.settings import Prepare
from data.shards import PARTIAL, PROGRESS, ShardWriter, index_text
from data.sources import HUGGING_FACE, STDLIB, Place, units
from data.tasks import ROOT, Counts, Target, about_node, compare, encode_unit, versions, write
from data.tokenizer import is_path
from faults import Fault
from manifest import INDEX, Manifest, Shard

UNIT_BYTES = 8 << 20  # of text in a task at most
CONNECT_S = 10.0  # to the head
NODE_S = 120.0  # for a node to start a worker and say what it is
WAIT_S = 30.0  # for a task, before it is looked whether there is a node at all
NODELESS_S = 900.0  # for one to join
TRIES = 20  # of a task whose worker or node dies
STORE_BYTES = 512 << 20  # for tokens on each node of a local cluster


@dataclass(frozen=True, kw_only=True)
class Cluster(Prepare):
    """Turn text into token shards for training and validation, with a Ray cluster."""

    address: str = ""  # of the cluster's head, HOST:6379; empty: the one that runs here
    local: int = 0  # nodes of a cluster that is started here, for this; 0 starts none


def main(arguments: list[str] | None = None) -> None:
    config = tyro.cli(Cluster, args=arguments)
    check(config)
    with connected(config):
        check_nodes(config)
        work.carry_out(config, OnCluster, at)


def for_tasks(config: Cluster) -> Prepare:
    """With paths that are the same in a worker's own folder."""
    fields = {name: getattr(config, name) for name in Prepare.__dataclass_fields__}
    if config.source != STDLIB and not is_bucket(config.source):
        fields["source"] = str(Path(config.source).resolve())
    if is_path(config.tokenizer):
        fields["tokenizer"] = str(Path(config.tokenizer).resolve())
    return Prepare(**fields)


def check(config: Cluster) -> None:
    """Raises ValueError for what a cluster cannot do."""
    if config.workers or config.staging:
        flag = "--workers" if config.workers else "--staging"
        raise ValueError(
            f"{flag} is for data/prepare.py: a cluster has as many workers as CPUs, and nothing in "
            f"a staging folder. Leave {flag} out."
        )
    if config.source.startswith(HUGGING_FACE):
        raise ValueError(
            f"--source {config.source} is streamed, and cannot be cut for a cluster. Give its "
            "Parquet files, as gs://bucket/folder, or use data/prepare.py."
        )
    if config.local < 0 or (config.local and config.address):
        raise ValueError(
            f"--local {config.local} starts a cluster here, of 1 node or more, and --address joins "
            "one that runs. Give one of them, as --local 3."
        )


# --- the cluster ----------------------------------------------------------------------------------


class connected:
    """Within, this process drives the cluster. Raises ValueError where there is none."""

    def __init__(self, config: Cluster):
        self.config = config
        self._local = None

    def __enter__(self) -> None:
        ray = imported()
        address = self.config.address or "auto"
        if self.config.local:
            address = self._started()
        try:
            if address != "auto":
                reached(address)
            ray.init(address, log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, ValueError) as error:
            self.__exit__()
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"there is no Ray cluster at --address {address} ({reason}). Start one with "
                "./run.sh ray start --head, or use --local 3."
            ) from error

    def _started(self) -> str:
        from ray.cluster_utils import Cluster as LocalCluster

        cpus = max(1, (os.cpu_count() or 1) // self.config.local)
        self._local = LocalCluster(initialize_head=True, head_node_args=node(0))
        for _ in range(self.config.local):
            self._local.add_node(**node(cpus))
        return self._local.address

    def __exit__(self, *_: object) -> None:
        imported().shutdown()
        if self._local:
            self._local.shutdown()


def reached(address: str) -> None:
    """Raises OSError, ValueError where nothing answers, which Ray would wait minutes for."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}


@functools.cache
def imported() -> Any:
    """Raises ValueError where ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "data/cluster.py needs Ray. Run uv pip install --python .venv/bin/python -r "
            "requirements-ray.txt, or without uv ./run.sh python -m pip install -r "
            "requirements-ray.txt."
        ) from error
    return ray


def check_nodes(config: Cluster) -> None:
    """Prints what the cluster is. Raises ValueError where its nodes differ in what decides bits."""
    ray = imported()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    working = working_nodes()
    cpus = sum(found["Resources"]["CPU"] for found in working)
    print(f"cluster: {len(working)} nodes with {cpus:g} CPUs")
    if not working:
        raise ValueError(
            "the cluster has no node with a CPU. Let one join: "
            "./run.sh ray start --address HEAD:6379."
        )
    ask, given = ray.remote(max_retries=1)(about_node), for_tasks(config)
    here = about_node(given)
    for found in working:
        where = NodeAffinitySchedulingStrategy(found["NodeID"], soft=False)
        try:
            told = ray.get(ask.options(scheduling_strategy=where).remote(given), timeout=NODE_S)
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"node {found['NodeManagerAddress']} cannot run this ({one_line(error)}). Bring "
                f"this checkout to {ROOT} there, with its environment, or take the node out."
            ) from error
        compare(here, told)


def working_nodes() -> list[dict[str, Any]]:
    alive = [found for found in imported().nodes() if found["Alive"]]
    return [found for found in alive if found["Resources"].get("CPU", 0) >= 1]


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


# --- tokens ---------------------------------------------------------------------------------------


class Span:
    """Tokens of a stretch that are on some node: what an array is to who writes on one machine."""

    def __init__(self, ref: Any, start: int, stop: int):
        self.ref, self.start, self.stop = ref, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> "Span":
        start, stop, _ = part.indices(len(self))
        return Span(self.ref, self.start + start, self.start + stop)


def spans(counts: Counts, ref: Any) -> Iterator[Encoded]:
    """The pieces of a stretch, with spans for their tokens."""
    columns = (array.tolist() for array in counts[:-1])
    stop = 0
    for number, (length, text, source, weight, ends, place) in enumerate(
        zip(*columns, strict=True)
    ):
        start, stop = stop, stop + length
        ids, kind = Span(ref, start, stop), counts.left_out.get(number, "")
        known = None if weight < 0 else weight
        yield Encoded(ids, known, text, source, Place(*place), ends, kind)


class OnCluster(work.Work):
    """Tokenized by a cluster."""

    config: Cluster

    def writer(self, folder: Path) -> "RemoteWriter":
        of = super().writer(folder)
        where = self.out.url if is_bucket(self.out.url) else str(Path(self.out.url).resolve())
        target = Target(f"{where}/{folder.name}", of.dtype, of.weighted)
        return RemoteWriter(folder, of.shard_tokens, of.dtype, of.weighted, target=target)

    def stream(self) -> Iterator[Encoded]:
        """Stretches under way have half a shard's tokens at most, if each byte were one."""
        ray = imported()
        encode = ray.remote(num_returns=2, max_retries=TRIES)(encode_unit)
        depth, most = 2 * int(ray.cluster_resources()["CPU"]), self.config.shard_tokens // 2
        size = max(1, min(UNIT_BYTES, most // (depth + 1)))
        pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
        config, under_way = for_tasks(self.config), 0
        for unit in units(config, size, self.place):
            while pending and (under_way + unit.size > most or len(pending) > depth):
                done, counts, ids = pending.popleft()
                under_way -= done
                yield from spans(got(counts), ids)
            pending.append((unit.size, *encode.remote(config, unit, self.place, versions())))
            under_way += unit.size
        while pending:
            _, counts, ids = pending.popleft()
            yield from spans(got(counts), ids)


def got(ref: Any) -> Any:
    """What a task returned. Raises what it raised, and Fault where TRIES workers died of it or
    there has been no node for NODELESS_S.
    """
    ray = imported()
    try:
        without_s = 0.0
        while not ray.wait([ref], timeout=WAIT_S)[0]:
            without_s = 0.0 if working_nodes() else without_s + WAIT_S
            if without_s >= NODELESS_S:
                raise Fault(
                    f"the cluster has had no node with a CPU for {without_s:g} s. Let one join, "
                    "and start this again: it goes on where it was."
                )
            if without_s:
                print(f"waits for a node to join: there is none with a CPU since {without_s:g} s")
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)  # what the task raised, or what became of its tokens
        if cause and not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        raise Fault(
            f"the cluster did not do a task in {TRIES} tries ({one_line(error)}). Start this "
            "again: it goes on where it was."
        ) from error


# --- shards ---------------------------------------------------------------------------------------


class RemoteWriter(ShardWriter):
    """Remembers which tokens are for the shard that is being written; tasks write them."""

    def __init__(self, *given: Any, target: Target):
        super().__init__(*given)
        self._target = target
        self._kept = 0  # tokens that are in its unfinished file
        self._length = 0  # tokens in all, with these:
        self._spans: list[tuple[Span, int | None]] = []

    @property
    def unfinished(self) -> int:
        return self._length

    def append(self, ids: Span, weight: int | None) -> None:
        self._length += len(ids)
        if self._spans:
            last, of_last = self._spans[-1]
            if last.ref is ids.ref and last.stop == ids.start and of_last == weight:
                last.stop = ids.stop
                return
        self._spans.append((ids, weight))

    def flush(self) -> None:
        """Starts a task for the shard, whose place in the manifest its promise takes."""
        if self._length:
            self.manifest_shards.append(self._write(full=True))
            self._kept = self._length = 0

    def _write(self, full: bool) -> Any:
        refs = list({id(span.ref): span.ref for span, _ in self._spans}.values())
        numbers = {id(ref): number for number, ref in enumerate(refs)}
        parts = [(numbers[id(span.ref)], span.start, span.stop, w) for span, w in self._spans]
        self._spans = []
        name = self.path(len(self.manifest_shards)).name
        task = imported().remote(max_retries=TRIES, scheduling_strategy="SPREAD")(write)
        return task.remote(self._target, name, self._kept, parts, full, *refs)

    def state(self) -> dict[str, Any]:
        """Waits for all tasks, so that no tokens are needed any more."""
        if self._spans:
            got(self._write(full=False))
            self._kept = self._length
        self.settle()
        return super().state()

    def settle(self) -> None:
        self.manifest_shards = [
            shard if isinstance(shard, Shard) else got(shard) for shard in self.manifest_shards
        ]

    def go_on(self, kept: int) -> None:
        self._kept = self._length = kept

    def close(self) -> None:
        self._spans = []


def at(config: Cluster) -> out.Out:
    return WithoutStaging(config.out) if config.out.startswith("gs:") else out.Out(config.out)


class WithoutStaging(out.InBucket):
    """A bucket that has progress.json and unfinished shards too: no machine is needed to go on."""

    def __init__(self, url: str):
        super().__init__(url, "")
        self.files = Path()

    @property
    def progress_name(self) -> str:
        return f"{self.url}/{PROGRESS}"

    def progress(self) -> bytes | None:
        try:
            return self._objects.read(PROGRESS)
        except FileNotFoundError:
            self.check_not_begun("beside them")
            return None

    def has_progress(self) -> bool:
        return PROGRESS in self._objects.found(PROGRESS)

    def store(self, text: str, writers: Iterable[ShardWriter]) -> None:
        self._objects.write(PROGRESS, text.encode())
        for writer in writers:
            self._remove_unfinished(writer.folder.name, f".{writer.unfinished}{PARTIAL}")

    def _remove_unfinished(self, split: str, but: str = "-") -> None:
        names = self._objects.found(f"{split}/shard_")
        self._objects.remove(n for n in names if n.endswith(PARTIAL) and not n.endswith(but))

    def check(self, split: str, shards: list[Shard]) -> None:
        out.Out.check(self, split, shards)

    def clear(self, split: str) -> None:
        self.unfinish(split)
        self._objects.remove(self._objects.found(f"{split}/shard_"))

    def finish(self, writer: ShardWriter, manifest: Manifest) -> None:
        split = writer.folder.name
        self.check(split, manifest.shards)
        self._remove_unfinished(split)
        self._objects.write(f"{split}/{INDEX}", index_text(manifest).encode())

    def forget(self) -> None:
        self._objects.remove([PROGRESS])


if __name__ == "__main__":
    from faults import command_line

    command_line(main)
