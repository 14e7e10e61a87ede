"""Orbax checkpoints: save, find, verify, restore onto any mesh. Knows nothing of the loop.

A checkpoint is a folder `<step>` that appears when all of it is written, on a disk or in a bucket
(checkpoint_folder.py): every array whole (cut into chunks as its shards were, so any mesh can read
it), the run's config, and the size and checksum of each file, which `latest` checks before anything
is read. Beside the config stand a digest of each array, taken on the devices before it was written
and compared where it is restored (digests.py), the start that wrote it (starts.py), and a format
number. Blocks are stored in the order in which they run, [blocks, ...], whatever mesh they were
trained on: `stored_shapes`.

A save that fails is told and leaves the others as they are; the next one is tried when it is due.
"""

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import checkpoint_managers

import buckets
import checkpoint_folder
import digests
import multihost
from checkpoint_folder import Damaged, Unreadable
from faults import Fault
from metrics import say
from model import Transformer

# What a checkpoint holds and where; one with a higher number is not read. No later format may
# change what is told of files in CHECKSUMS, nor where its own number stands. (Code of before there
# were buckets does not know their checksums, and takes a copy of such a checkpoint for damaged.)
FORMAT = 1
OWN = ("format", "made_by", "digests")  # keys that stand beside the config's sections
FILE_BYTES = 256 << 20  # of a file of arrays: as much of a checkpoint is in memory once more
CHUNK_BYTES = 64 << 20  # of an array that is written from a file, and may be larger than memory
MOST_NAMED = 10  # arrays in one message
LATE_S = 60  # in which a thread ends that writes when another has failed
GOOD_S = 60  # in which all processes, having written, say that they could
# The two points at which Orbax's threads of all processes meet while they save.
MEETINGS = ("async_write_complete", "async_commit_complete")
_meetings = itertools.count()  # a name for each save, the same on every process


def _named(tree: Any) -> dict[str, Any]:
    """{"blocks.moe.router": leaf, ...}: the same names whatever containers hold the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _part(wanted: dict[str, Any]) -> ocp.args.PyTreeRestore:
    """To restore these arrays and leave the others where they are."""
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    return ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)


def _without_copy() -> ocp.type_handlers.TypeHandlerRegistry:
    handlers = ocp.type_handlers
    return handlers.create_type_handler_registry(
        (jax.Array, handlers.ArrayHandler()),
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),
    )


def _in_chunks(arrays: dict[str, np.ndarray], stacked: Mapping[str, int]) -> ocp.args.PyTreeSave:
    def one(name: str) -> ocp.SaveArgs:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=tuple(range(stacked[name])))

    how = {name: one(name) for name in arrays}
    return ocp.args.PyTreeSave(arrays, save_args=how, ocdbt_target_data_file_size=FILE_BYTES)


def _told_by_all(text: str) -> str:
    """What any process has to report, in one line, the same on all; empty where none has."""
    if jax.process_count() == 1:
        return text
    texts = [found.decode() for found in multihost.gather(text.encode())]
    return "; ".join(f"process {rank}: {text}" for rank, text in enumerate(texts) if text)


def _join_orbax() -> None:
    """Waits for what still writes when a save has failed elsewhere."""
    for thread in threading.enumerate():
        of_orbax = type(thread).__module__.startswith("orbax.") or thread.name == "async_save"
        if of_orbax and thread is not threading.current_thread():
            threading.Thread.join(thread, LATE_S)


def _ends(text: str, problem: str) -> Exception:
    """What a run ends with that cannot write: a bucket that does not answer may, when it is started
    again; all else a person has to mend.
    """
    text = f"{text} ({problem})" if problem else text
    if buckets.Unanswered.__name__ in problem:
        return Fault(f"{text}. Start the run again when the bucket answers.")
    return ValueError(
        f"{text}. Make room or give back the right to write there, or give a --run.dir that can "
        "be written, and start the run again."
    )


def _line(error: BaseException | None) -> str:
    if error is None:
        return ""
    text, _, _ = f"{type(error).__name__}: {error}".partition(" [source locations=")
    return " ".join(text.split())


class Checkpoints:
    """The checkpoints of one run. Every process makes one and calls the same methods in order."""

    def __init__(
        self,
        folder: str | Path,
        keep: int | None = None,
        stacked: Mapping[str, int] | None = None,
        keep_every_steps: int = 0,
    ):
        """Opens `folder` to write, keeping the newest `keep` and each step that is a multiple of
        `keep_every_steps`; without `keep`, to read only.

        stacked  what is saved are numpy arrays that lie in files: they are written from there, in
                 chunks that have one of so many dimensions of each name's array, and not copied.
        A run that is writing keeps all its files while others read.

        Raises  ValueError when `keep` is 0, nothing can be read, or the folder cannot be made.
        """
        if keep is not None and keep < 1:
            raise ValueError(
                f"--checkpoint.keep {keep} would remove each checkpoint as soon as it is there. "
                f"Use 1 or more, or --checkpoint.every_steps 0 to save none."
            )
        self._files = checkpoint_folder.opened(folder)
        self.folder = self._files.path
        self.made_by: dict[str, Any] | None = None  # the start that is told in what is saved
        self._writes, self._keep = keep is not None, (keep, keep_every_steps)
        self._stacked = stacked
        self._saving: int | None = None  # saved and not yet waited for
        self._meeting, self._met = 0, set()
        self._problem = ""  # of the last save that failed
        self._whole = self._seen = 0  # newest step on disk: as all agree; as process 0 just saw
        self._spoiled: set[int] = set()  # steps that were found damaged and are not asked again
        self.longest_s = self._begun = 0.0  # of the saves so far, as process 0 knows
        self._opened: ocp.CheckpointManager | None = None
        if not self._writes and not self._files.exists():
            raise ValueError(
                f"there are no checkpoints in {self.folder}: no such folder. Give the folder of a "
                f"run that was trained with --checkpoint.every_steps above 0."
            )
        problem = self._not_writable(tell=True) if self._writes else ""
        try:
            if not problem:
                self._opened = self._open()
        except OSError as error:
            problem = _line(error)
        if problem:
            raise _ends(f"checkpoints cannot be written to {self.folder}", problem)

    def _open(self) -> ocp.CheckpointManager:
        with self._files.asked():
            return ocp.CheckpointManager(
                self.folder,
                options=self._options(),
                item_names=("state", "config"),
                item_handlers={"state": self._handler(), "config": ocp.JsonCheckpointHandler()},
            )

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:  # the last one went with a save that failed
            self._opened = self._open()
        return self._opened

    def _handler(self) -> ocp.CheckpointHandler:
        # Weights hardly become smaller, and the cores of a CPU host are busy with the steps.
        how = {"use_compression": False}
        if self._stacked is not None:
            how["type_handler_registry"] = _without_copy()
        return ocp.PyTreeCheckpointHandler(**how)

    def _options(self) -> ocp.CheckpointManagerOptions:
        if not self._writes:
            return ocp.CheckpointManagerOptions(create=False)
        newest, every = self._keep
        policies = [checkpoint_managers.LatestN(newest)]
        if every:
            policies.append(checkpoint_managers.EveryNSteps(every))
        return ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_checksums, barrier_sync_fn=self._meet
            ),
        )

    def _not_writable(self, tell: bool = False, before: Callable[[], None] = lambda: None) -> str:
        """Why some process cannot write here now, as all tell it; empty where all can.

        Asked before Orbax is: there, who fails alone leaves the others waiting for it.
        """
        problem = ""
        try:
            self._files.make()
            self._remove_unfinished(tell)  # first, as it may be what fills the disk
            if jax.process_index() == 0:
                before()
            self._files.try_to_write(jax.process_index())
        except OSError as error:
            problem = _line(error)
        return _told_by_all(problem)

    def _remove_unfinished(self, tell: bool = False) -> None:
        for name in self._files.unfinished() if jax.process_index() == 0 else []:
            if tell:
                say(f"warning: {self.folder / name} was not finished when its run stopped; removed")
            self._files.remove(name)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Where Orbax's threads of all processes wait for each other, with the same key.

        A thread that fails would leave out MEETINGS, and those who are there wait in vain. So it
        comes late, and who was in time raises. At the end of each save process 0 looks whether it
        came to a checkpoint.
        """
        wait = partial(ocp.multihost.get_barrier_sync_fn(), timeout_ms=timeout_ms)
        if threading.current_thread() is threading.main_thread():
            wait(key=key)
            return
        name = next((name for name in MEETINGS if name in key), None)
        if name is None and "set_value_start" in key:
            _join_orbax()
            for missed in [name for name in MEETINGS if name not in self._met]:
                wait(key=f"{missed} {self._meeting}")
        elif name:
            self._met.add(name)
            wait(key=f"{name} {self._meeting}")
            if name == MEETINGS[0]:  # all have come; now all who could write
                wait(key=f"good {self._meeting}", timeout_ms=GOOD_S * 1000)
            return
        wait(key=key)
        if jax.process_index() == 0 and "set_value_end" in key:
            self._look()

    def _look(self) -> None:
        """Runs in Orbax's thread on process 0, when a save has ended, well or not."""
        self.longest_s = max(self.longest_s, time.monotonic() - self._begun)
        try:
            if self._files.is_whole(self._saving):
                self._seen = self._saving
            else:
                self._remove_unfinished()
        except OSError:  # told by who waits for the save
            return

    def _write_checksums(self) -> None:
        """Runs in Orbax's thread on process 0, when all files are there, and before the rename."""
        self._files.write_checksums(self._saving)

    def save(
        self,
        step: int,
        state: Any,
        config: dict[str, Any],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies `state` off the devices and returns; the files are written behind the training.

        state   tree of jax arrays in canonical shapes, which may be donated right after; with
                `stacked` of numpy arrays, which have to stay until `wait` returns.
        config  tree of what JSON can hold.
        before  called on process 0 before anything is written; if it raises OSError, nothing is.
        A step that is saved already stays as it is. What goes wrong with the files is told, now or
        when the next save is due, and is no error: see `stop_if_old`, `must_have`.

        Raises  ValueError when there is a later step.
        """
        assert self._writes
        self.wait()
        if problem := self._not_writable(before=before):
            self._tell_failed(step, problem)
            return
        self._saving, self._meeting, self._met = step, next(_meetings), set()
        self._begun = time.monotonic()
        try:
            there = self._files.steps()
            if step in there:
                self._saving, self._whole = None, max(self._whole, step)
                return
            later = [other for other in there if other > step]
            if not later:
                self._manager.save(step, args=self._items(_named(state), config), force=True)
        except self._files.failures as error:
            if jax.process_count() > 1:  # the others are somewhere in the save
                raise Fault(f"the save of step {step} failed here alone: {_line(error)}") from error
            self._end(error)
            return
        if later:
            self._saving = None
            raise ValueError(
                f"step {step} cannot be saved in {self.folder}, which has step {later[-1]} "
                f"already: the newest is where a run continues. Continue that run, or start "
                f"another with --run.name."
            )

    def _items(self, named: dict[str, Any], config: dict[str, Any]) -> ocp.args.Composite:
        if self._stacked is None:
            args = ocp.args.PyTreeSave(named, ocdbt_target_data_file_size=FILE_BYTES)
            found = digests.of_arrays(named)
        else:
            args = _in_chunks(named, self._stacked)
            found = {name: digests.of_numpy(x) for name, x in named.items()}
        own = {"format": FORMAT, "made_by": self.made_by, "digests": found}
        return ocp.args.Composite(state=args, config=ocp.args.JsonSave(config | own))

    def wait(self) -> None:
        """Returns when the last save is on disk, or told to have failed."""
        if self._saving is None:
            return
        error = None
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as caught:  # whatever ended Orbax's threads
            error = caught
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """All processes agree on what became of the last save: process 0 gave it its name, or not.

        A manager that failed has forgotten steps and remembers errors: another takes its place.
        """
        step, self._saving = self._saving, None
        error = self._files.outside(error)
        if error is None and jax.process_index() == 0:
            try:
                if not self._files.is_whole(step):
                    error = OSError("it is not there")
            except OSError as found:
                error = found
        problem = _told_by_all(_line(error))
        if not problem:
            self._whole = step
            return
        self._close_manager()
        whole = False
        if jax.process_index() == 0:
            try:
                whole = self._files.is_whole(step)
                self._remove_unfinished()
            except OSError as found:
                problem += f"; {_line(found)}"
        whole = bool(multihost_utils.broadcast_one_to_all(np.asarray(whole)))
        if whole:
            self._whole = step
            say(f"warning: checkpoint of step {step} is written, and then: {problem}")
        else:
            self._tell_failed(step, problem)

    def _tell_failed(self, step: int, problem: str) -> None:
        self._problem = problem
        say(
            f"warning: checkpoint of step {step} could not be written: {problem}. The newest is "
            f"{self._newest()}; the next save is tried when it is due."
        )

    def newest_whole(self) -> str:
        """In words; waits for the last save."""
        self.wait()
        return self._newest()

    def _newest(self) -> str:
        return f"of step {self._whole}" if self._whole else "none"

    def _close_manager(self) -> None:
        """Ends its threads. Each error that it remembers is raised once, and was told."""
        manager, self._opened = self._opened, None
        for _ in range(4):
            try:
                if manager is not None:
                    manager.close()
                return
            except Exception:  # whatever ended Orbax's threads
                continue

    def age_steps(self, step: int) -> int:
        """Steps since the newest checkpoint that is whole on disk, or since the run began. Only
        process 0 knows at once; does not wait.
        """
        return step - max(self._whole, self._seen)

    def stop_if_old(self, step: int, most: int) -> None:
        """Raises ValueError, or Fault where a bucket did not answer, when the newest checkpoint is
        more than `most` steps old. Waits for a save only when it otherwise would be.
        """
        if step - self._whole > most:
            self.wait()
        if step - self._whole > most:
            raise _ends(
                f"stopped after step {step}: no checkpoint could be written for more than {most} "
                f"steps (--checkpoint.max_age_steps), and the newest in {self.folder}, from which "
                f"the run goes on, is {self._newest()}",
                self._problem,
            )

    def must_have(self, step: int) -> None:
        """Waits for the last save. Raises as `stop_if_old` when it came to no checkpoint."""
        self.wait()
        if self._whole != step:
            raise _ends(
                f"the checkpoint of step {step} could not be written to {self.folder}, and the "
                f"newest there is {self._newest()}",
                self._problem,
            )

    def latest(self) -> int | None:
        """The newest step whose files are as they were written; None without any checkpoint.

        A damaged one is named, and put aside as `damaged-<step>` by a run that writes, so that the
        step can be saved again.

        Raises  ValueError when there are checkpoints and all are damaged.
        """
        self.wait()
        steps = self._files.steps()[::-1]
        asked = (step for step in steps if step not in self._spoiled)
        newest = next((step for step in asked if self._is_good(step)), None)
        if steps and newest is None:
            mend = "start another run with --run.name" if self._writes else "give another run"
            raise ValueError(
                f"every checkpoint in {self.folder} is damaged (steps {steps}), so the run cannot "
                f"be continued. Bring back a good copy, or {mend}."
            )
        if self._writes:
            # Those of other values wait until this one's are known to be good.
            self._put_aside([s for s in steps if s > newest and s not in self._spoiled])
        return newest

    def newest(
        self,
        abstract: Any,
        must_match: Callable[[dict[str, Any]], None] = lambda config: None,
    ) -> tuple[int, Any] | None:
        """(step, state) of the newest checkpoint whose files and values are as they were saved;
        None without any checkpoint. What is damaged is told and put aside as by `latest`.

        abstract    as `restore` takes it, or a function of the step that gives it.
        must_match  raises for a config with which this run does not go on.
        """
        while (step := self.latest()) is not None:
            try:
                must_match(self.config(step))
                like = abstract(step) if callable(abstract) else abstract
                state = self._restored(step, like)
            except Damaged as error:
                say(f"warning: {error}")
                self._spoiled.add(step)
                continue
            if self._writes:
                self._put_aside(sorted(self._spoiled))
                self._spoiled.clear()
            self._whole = step
            return step, state
        return None

    def _restored(self, step: int, like: Any) -> Any:
        """As `restore`; what one process alone cannot read, it reads again, or ends all."""
        try:
            return self.restore(step, like)
        except Unreadable as error:
            if jax.process_count() == 1:
                return self.restore(step, like)  # a bit may have flipped on the way
            if self._writes:  # the others wait for this one in Orbax
                self._files.spoil(step, str(error))
            raise Fault(f"{error}. Started again, the run takes the one before.") from error

    def _is_good(self, step: int) -> bool:
        """One process reads, and all follow it: they must not restore different steps."""
        good = True
        if jax.process_index() == 0:
            damage = self._files.damage(step)
            good = damage is None
            if not good:
                folder = self.folder / str(step)
                say(f"warning: checkpoint {folder} is damaged and skipped: {damage}")
        good = bool(multihost_utils.broadcast_one_to_all(np.asarray(good)))
        if not good and not self._writes:
            self._spoiled.add(step)  # a run that writes puts it aside
        return good

    def _put_aside(self, steps: list[int]) -> None:
        """Only ever beside a good one: a folder without checkpoints would be a new run."""
        for step in steps if jax.process_index() == 0 else []:
            self._files.put_aside(step)
        multihost_utils.sync_global_devices("put aside")
        with self._files.asked():
            self._manager.reload()

    def config(self, step: int) -> dict[str, Any]:
        """The config that was saved with a step."""
        return {name: value for name, value in self._told(step).items() if name not in OWN}

    def start_of(self, step: int) -> dict[str, Any] | None:
        """The start that saved a step; None where an older version of the code did."""
        return self._told(step).get("made_by")

    def _told(self, step: int) -> dict[str, Any]:
        """All that stands beside the arrays of a step.

        Raises  ValueError for a step of a later format.
        """
        self._must_exist(step)
        told = self._read(step, config=ocp.args.JsonRestore()).config
        found = told.get("format", 0)
        if found > FORMAT:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} was written by a newer version of "
                f"this code (format {found}, and this one knows {FORMAT}). Use that version."
            )
        return told

    def names(self, step: int) -> frozenset[str]:
        """Of the arrays that are stored of a step."""
        self._must_exist(step)
        return frozenset(self._stored(step))

    def _stored(self, step: int) -> dict[str, Any]:
        """Shapes and types of the arrays of a step."""
        with self._files.asked(step):
            return self._manager.item_metadata(step).state.tree

    def _read(self, step: int, **items: Any) -> ocp.args.Composite:
        with self._files.asked(step):
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
            if any(found[name] is None for name in items):  # Orbax, where it does not see a folder
                raise ValueError(f"{' and '.join(items)} of step {step} cannot be read")
            return found

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, on the devices and in the layout that `abstract` says.

        abstract  tree of `jax.ShapeDtypeStruct` with shardings, of any mesh; of one that was opened
                  to read only, it may be a part of what was saved.
        Raises    ValueError that names arrays which are missing, or have another shape or type;
                  Damaged, those whose values are not the ones that were saved.
        """
        told = self._told(step)
        wanted = _named(abstract)
        self._must_hold(step, wanted)
        found = self._read(step, state=_part(wanted)).state
        self._must_be_as_saved(step, found, told.get("digests", {}))
        return jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in wanted])

    def _must_be_as_saved(
        self, step: int, found: dict[str, Any], saved: dict[str, list[int]]
    ) -> None:
        """`saved` is empty where an older version of the code saved."""
        names = [name for name in found if name in saved]
        have = digests.of_arrays({name: found[name] for name in names}) if names else {}
        differ = [name for name in names if list(have[name]) != saved[name]]
        if differ:
            others = [s for s in self._files.steps() if s != step]
            raise Damaged(
                f"the checkpoint of step {step} in {self.folder} is damaged: the values of "
                f"{_listed(differ)} are not those that were saved. Give another of steps "
                f"{others}, or bring back a good copy."
            )

    def _must_exist(self, step: int) -> None:
        steps = self._files.steps()
        if step not in steps:
            raise ValueError(
                f"there is no checkpoint of step {step} in {self.folder}: it has steps {steps}. "
                f"Give one of these."
            )

    def good_step(self, step: int | None, flag: str = "--run") -> int:
        """This step, or the newest good one if None.

        flag    that named the run's folder.
        Raises  ValueError where there is none, or it is damaged.
        """
        if step is not None:
            self.must_be_good(step)
            return step
        newest = self.latest()
        if newest is None:
            raise ValueError(
                f"{flag} {self.folder.parent} has no checkpoint yet. Let the run go on to its "
                f"first (--checkpoint.every_steps), or give another {flag}."
            )
        return newest

    def good(self, step: int | None, abstract: Any, flag: str = "--run") -> tuple[int, Any]:
        """(step, state) of this step, or of the newest good one if None; as `good_step`, and its
        values are compared too.
        """
        found = None if step is not None else self.newest(abstract)
        if found is None:
            step = self.good_step(step, flag)
            found = step, self.restore(step, abstract)
        return found

    def arrays(self, step: int) -> dict[str, ts.TensorStore]:
        """The arrays of a step by name, on disk, for who reads parts of them without a device."""
        self._told(step)
        scheme = "" if buckets.is_bucket(self.folder) else "file://"
        folder = f"{scheme}{self.folder / str(step) / 'state'}/"

        def opened(name: str) -> Any:
            kvstore = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
            return ts.open({"driver": "zarr", "kvstore": kvstore})

        # All at once: they share a context, and wait for the same files.
        found = {name: opened(name) for name in self._stored(step)}
        with self._files.asked(step):
            return {name: future.result() for name, future in found.items()}

    def must_be_good(self, step: int) -> None:
        """Raises ValueError when there is no such step, or its files are not as they were
        written.
        """
        self._must_exist(step)
        if not self._is_good(step):
            steps = [other for other in self._files.steps() if other != step]
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is damaged. Give another of "
                f"steps {steps}, or bring back a good copy."
            )

    def _must_hold(self, step: int, wanted: dict[str, Any]) -> None:
        """Orbax itself would cast float32 to what is asked for."""
        stored = self._stored(step)
        have = {name: (x.shape, np.dtype(x.dtype).name) for name, x in stored.items()}
        want = {name: (x.shape, np.dtype(x.dtype).name) for name, x in wanted.items()}
        if self._writes and all(name.startswith("weights.") for name in have):
            raise ValueError(
                f"{self.folder / str(step)} holds weights alone, as they were imported, and no "
                f"training to continue. Begin a run with them: --init {self.folder.parent} "
                f"--run.name {self.folder.parent.name}-2."
            )
        names = sorted(have.keys() | want.keys() if self._writes else want.keys())
        differ = [
            f"{name} is {have.get(name, 'absent')} there and {want.get(name, 'absent')} in this run"
            for name in names
            if have.get(name) != want.get(name)
        ]
        if differ:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} is of another model: {_listed(differ)}. "
                f"Give the config it was saved with ({self.folder.parent / 'config.toml'})."
            )

    def close(self) -> None:
        """Waits for the last save: a process that ends before it leaves half a checkpoint."""
        self.wait()
        self._close_manager()
        if self._writes and jax.process_index() == 0:
            with contextlib.suppress(OSError):  # a late write may have left something again
                self._remove_unfinished()


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - MOST_NAMED} more" * (len(texts) > MOST_NAMED)
    return ", ".join(texts[:MOST_NAMED]) + more


# --- the layout of what is saved ------------------------------------------------------------------


def stored_shapes(shapes: Any) -> Any:
    """Shape and layout of what a checkpoint holds of a state.

    shapes  the state as `jax.ShapeDtypeStruct`s: blocks are [virtual, stage, block, ...] in it, and
            [blocks, ...] in the result, in a row over pipeline. So are the optimizer's.
    """

    def unstacked(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        layout = NamedSharding(a.sharding.mesh, P("pipeline", *a.sharding.spec[3:]))
        shape = (math.prod(a.shape[:3]), *a.shape[3:])
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=layout)

    def one(x: Any) -> Any:
        is_weights = isinstance(x, Transformer)
        return x.replace(blocks=jax.tree.map(unstacked, x.blocks)) if is_weights else x

    return jax.tree.map(one, shapes, is_leaf=lambda x: isinstance(x, Transformer))


def reshaped(arrays: Any, shapes: Any) -> Any:
    """The same elements in the same order, in these shapes and layouts."""
    likes, tree = jax.tree.flatten(shapes)
    program = _reshape(tuple((like.shape, like.sharding) for like in likes))
    return tree.unflatten(program(tree.flatten_up_to(arrays)))


@cache
def _reshape(likes: tuple[tuple[tuple[int, ...], NamedSharding], ...]) -> Any:
    """One program for all saves: jit knows a function by its identity, and would compile anew."""
    shapes, layouts = zip(*likes, strict=True)

    def change(arrays: list[jax.Array]) -> list[jax.Array]:
        return [a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]

    return jax.jit(change, out_shardings=list(layouts))
