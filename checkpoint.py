"""Save, find, verify and restore checkpoints.

Orbax writes the arrays in the layout of the devices, in the background. Beside them, RECORD holds
the config, the start that wrote it (runtime/provenance.py), and the shape and digest of each array.
The devices compute the digests (runtime/array_digests.py); Orbax stores no checksums of arrays.

An array of blocks is stored as on the devices: [virtual, stage, block, ...]. In row-major order
this is the order of layers, so its canonical shape is [layers, ...]. A restore reads with
tensorstore the rows that each device of the new mesh needs. Each process reads its own rows: if one
fails, the others do not wait at a barrier, as in Orbax's restore.

If a save fails on any process, all processes end with the reason.
"""

import contextlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import tree_leaves_with_path as leaves_with_path

import lora
from model import Transformer
from runtime import array_digests, distributed, run_directory, storage
from runtime.console import is_primary, log
from runtime.errors import JobFailed, listed, one_line
from runtime.run_directory import CheckpointDirectory
from runtime.stored_array import Damaged, StoredArray, is_damage, open_arrays
from utils import ConfigError

FORMAT = 2  # of RECORD; every format has the fields `format` and `crc32`
RECORD = "record.json"
FILE_BYTES = 256 << 20  # size of Orbax's files; it holds one in memory while writing
CHUNK_BYTES = 64 << 20  # of an array that is saved from a file, which may exceed the memory
READ_AT_ONCE = 8  # arrays
POLL_S = 0.2  # interval of checks whether a save is complete


# --- the arrays of a checkpoint -------------------------------------------------------------------


def _named(tree: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return {"weights.blocks.moe.router": (leaf, stages), ...}.

    stages  [virtual, stage, block] for an array of blocks, () for any other
    """
    leaves = {}
    for path, part in leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Transformer)):
        for rest, x in leaves_with_path(part):
            stacked = isinstance(part, Transformer) and rest[0].name == "blocks"
            name = jax.tree_util.keystr((*path, *rest), simple=True, separator=".")
            leaves[name] = x, tuple(x.shape[:3]) if stacked else ()
    return leaves


def _canonical(x: Any, stages: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return canonical shape and type."""
    shape = (math.prod(stages), *x.shape[3:]) if stages else tuple(x.shape)
    return shape, np.dtype(x.dtype).name


# --- the checkpoints of a run ---------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run. All processes call the same methods in the same order."""

    def __init__(self, folder: str | Path, keep: int | None = None, keep_every_steps: int = 0):
        """Open `folder` to write, or without `keep` to read only.

        keep              number of newest checkpoints that are kept, at least 1
        keep_every_steps  multiples of this step are kept, too
        Raises            ConfigError if the folder cannot be used;
                          TransientError if a bucket does not respond
        """
        self._files = CheckpointDirectory(folder)
        self._storage, self.folder = self._files.folder, self._files.folder.url
        self._run = self.folder.rpartition("/")[0]
        self._writes, self._keep, self._keep_every = keep is not None, keep, keep_every_steps
        self.made_by: dict[str, Any] | None = None  # the start, for RECORD
        self.longest_s = 0.0  # longest time of a save until its files were complete, on process 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="complete checkpoints")
        self._saving: Future[None] | None = None  # of `_complete`
        self._error: Exception | None = None  # of the last save; `wait` shares it
        self._writer: ocp.AsyncCheckpointer | None = None
        if self._writes:
            with self._shared():
                for name in self._files.unfinished() if is_primary() else []:
                    log(f"warning: removed {self.folder}/{name}, which was not complete")
                    self._files.remove(name)
                self._files.try_to_write(jax.process_index())
        elif not self._from_first(self._storage.exists):
            raise ConfigError(
                f"there are no checkpoints in {self.folder}: no such folder. Give the folder of a "
                "run that was trained with --checkpoint.every_steps above 0."
            )

    @contextlib.contextmanager
    def _shared(self) -> Iterator[None]:
        """Run a block. If it fails on one process, all raise the reason."""
        with distributed.shared_errors():
            try:
                yield
            except OSError as error:
                raise self._storage.explained(error) from error

    def _from_first(self, function: Callable[[], Any]) -> Any:
        """Call the function on process 0 and return its result, as JSON values, on all."""
        with self._shared():
            result = function() if is_primary() else None
        return json.loads(distributed.gather(json.dumps(result).encode())[0])

    def save(
        self,
        step: int,
        state: Any,
        config: dict[str, Any],
        before: Callable[[], None] = lambda: None,
        stacked: Mapping[str, int] | None = None,
    ) -> None:
        """Copy `state` to host memory and return. Orbax writes it in the background.

        A checkpoint of this step is not replaced.

        state    tree of jax arrays, which may be donated afterwards; or of NumPy arrays in files,
                 which must exist until `wait` returns
        config   tree of JSON values
        before   called on process 0 before anything is written
        stacked  number of leading dimensions of each NumPy array that are split into chunks
        Raises   as `wait`; ConfigError if a later step is saved
        """
        self.wait()
        with self._shared():
            if is_primary():
                before()
            self._files.try_to_write(jax.process_index())
        steps = self.steps()
        if step in steps:
            return
        if steps and steps[-1] > step:
            raise ConfigError(
                f"step {step} cannot be saved in {self.folder}, which has step {steps[-1]}: a run "
                "resumes from the newest step. Resume that run, or use another --run.name."
            )
        named = _named(state)
        record = _record(named, self.made_by, config)
        began, self._writer = time.monotonic(), self._writer or _writer(stacked is not None)
        args = _arguments({name: x for name, (x, _) in named.items()}, stacked, record)
        try:
            self._writer.save(f"{self.folder}/{step}", args=args)
            self._saving = self._thread.submit(self._complete, began)
        except Exception as error:
            self._error = self._storage.explained(error)  # `wait` raises it, on all processes

    def failed(self) -> bool:
        """Return whether the last save has failed here so far."""
        if self._saving and self._saving.done() and (error := self._saving.exception()):
            self._error = self._error or self._storage.explained(error)
        return self._error is not None

    def _complete(self, began: float) -> None:
        """Wait until the files of the save are complete, and remove old checkpoints."""
        self._writer.wait_until_finished()
        if not is_primary():
            return
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        try:
            for step in self._files.steps()[: -self._keep]:
                if not self._keep_every or step % self._keep_every:
                    self._files.remove(str(step))
        except OSError as error:  # the next start removes it
            log(f"warning: an old checkpoint in {self.folder} was not removed: {error}")

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises  the reason if any process could not write: ConfigError or TransientError
        """
        is_complete = jax.process_count() == 1  # as soon as the thread has ended
        while self._saving or self._error:
            try:
                with distributed.shared_errors():
                    if is_complete and not self._error:
                        self._saving.exception()  # waits
                    if self.failed():
                        raise self._error
            except Exception as error:
                self._error = error  # so that no process waits in `close`
                raise
            if is_complete:
                self._saving = None
                return
            is_complete = self._from_first(self._saving.done)
            if not is_complete:
                time.sleep(POLL_S)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        return self._from_first(self._files.steps)

    def newest(
        self,
        abstract: Any,
        check_config: Callable[[dict[str, Any], int], None] = lambda config, step: None,
        only: int | None = None,
    ) -> tuple[int, Any] | None:
        """Return (step, state) of the newest undamaged checkpoint; None without checkpoints.

        A damaged checkpoint is logged. A run that writes quarantines it as `damaged-<step>`.

        abstract      as in `restore`, or a function that returns it for the names of saved arrays
        check_config  raises for the config of a run that cannot be continued from a step
        only          the step to restore instead of the newest
        Raises        ConfigError if all checkpoints are damaged; Damaged if `only` is
        """
        self.wait()
        steps, damaged = self.steps() if only is None else [only], []
        for step in reversed(steps):
            try:
                record = self.record(step)
                check_config(record["config"], step)
                like = abstract(frozenset(record["arrays"])) if callable(abstract) else abstract
                state = self.restore(step, like)
            except Damaged as error:
                if step == only:
                    raise
                log(f"warning: {error}; it is skipped")
                damaged.append(step)
                continue
            if self._writes:  # only now: a folder without any checkpoint would start a new run
                with self._shared():
                    for other in damaged if is_primary() else []:
                        self._files.quarantine(other)
            return step, state
        if steps:
            raise ConfigError(
                f"every checkpoint in {self.folder} is damaged (steps {steps}). Restore a good "
                "copy, or start a new run with --run.name."
            )
        return None

    def step_or_newest(self, step: int | None) -> int:
        """Return `step`, or the newest if None. Raises ConfigError without checkpoints."""
        steps = [step] if step is not None else self.steps()
        if not steps:
            raise ConfigError(
                f"{self._run} has no checkpoint yet. Let the run continue to its first "
                "(--checkpoint.every_steps), or give another run."
            )
        return steps[-1]

    def record(self, step: int) -> dict[str, Any]:
        """Return RECORD of a step, read by process 0.

        Raises  ConfigError if the step is missing or has another format; Damaged
        """

        def read() -> dict[str, Any] | None:
            if step not in (steps := self._files.steps()):
                raise ConfigError(
                    f"there is no checkpoint of step {step} in {self.folder}: it has steps "
                    f"{steps}. Use one of these."
                )
            try:
                record = json.loads(self._storage.read(f"{step}/config/{RECORD}"))
                return record if record.pop("crc32") == _crc32(record) else None
            except (storage.AccessDenied, storage.Unavailable):
                raise
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                return None

        record = self._from_first(read)
        if record is None:
            raise self._damaged(step, f"{RECORD} is not what was written")
        if record["format"] != FORMAT:
            raise ConfigError(
                f"the checkpoint of step {step} in {self.folder} was written by another version of "
                f"this code: its format is {record['format']}, and this version reads {FORMAT}."
            )
        return record

    def _damaged(self, step: int, why: str) -> Damaged:
        return Damaged(
            f"the checkpoint of step {step} in {self.folder} is damaged: {why}. Use another step, "
            "or restore a good copy"
        )

    def arrays(self, step: int) -> dict[str, StoredArray]:
        """Return the arrays of a step by name, to read parts of them without devices.

        Adapters are merged with their base.

        Raises  ConfigError if the base is not the one that the run started from
        """
        record = self.record(step)
        with self._reading(step):
            own = open_arrays(f"{self.folder}/{step}/state", record["arrays"])
        if not (base := record["config"].get("base")):
            return own
        _, arrays = open_base(base["run"], base["step"], base["digest"])
        return own | lora.merge_arrays(arrays, own, base)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Run a block that reads arrays of a step. Raises Damaged, or `explained` errors."""
        try:
            yield
        except (Damaged, storage.AccessDenied, storage.Unavailable):
            raise
        except Exception as error:  # tensorstore raises ValueError or a bare Exception
            text = one_line(error)
            if is_damage(error):
                raise self._damaged(step, text) from error
            if isinstance(error, ValueError) or type(error) is Exception:
                raise self._storage.explained(OSError(text)) from error
            raise

    def restore(self, step: int, abstract: Any) -> Any:
        """Return the state of a step, on the devices and in the shardings of `abstract`.

        abstract  tree of `jax.ShapeDtypeStruct` with shardings, of any mesh and any number of
                  virtual stages. It may be a part of the saved tree if opened to read only.
        Raises    ConfigError with the arrays that are missing or of another shape or type; Damaged
        """
        entries, wanted = self.record(step)["arrays"], _named(abstract)
        self.check_arrays(step, entries, wanted)
        if not wanted:
            return abstract
        try:
            restored = self._restored(step, entries, wanted)
        except Damaged:  # a bit may have flipped in transit: read once more
            restored = self._restored(step, entries, wanted)
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in wanted])

    def _restored(
        self, step: int, entries: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        restored, problem = {}, ""
        with distributed.shared_errors():
            try:
                with self._reading(step), ThreadPoolExecutor(READ_AT_ONCE) as pool:
                    wanted_entries = {name: entries[name] for name in wanted}
                    stored = open_arrays(f"{self.folder}/{step}/state", wanted_entries)
                    arrays = pool.map(lambda name: stored[name].onto(*wanted[name]), wanted)
                    restored = dict(zip(wanted, arrays, strict=True))
            except Damaged as error:  # raised below, on all processes
                problem = str(error)
        for text in distributed.gather(problem.encode()):
            if text:
                raise Damaged(text.decode())
        digests = _digests({name: (restored[name], stages) for name, (_, stages) in wanted.items()})
        differ = [name for name in restored if digests[name] != tuple(entries[name]["digest"])]
        if differ:
            raise self._damaged(step, f"{listed(differ)} does not have the values that were saved")
        return restored

    def check_arrays(
        self, step: int, entries: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> None:
        """Raise ConfigError with the arrays that are missing or of another shape or type."""
        if self._writes and all(name.startswith("weights.") for name in entries):
            raise ConfigError(
                f"{self.folder}/{step} holds weights alone, as imported. Start a run with them: "
                f"--run.init_from {self._run} --run.name {self._run.rpartition('/')[2]}-2."
            )
        have = {name: (tuple(e["shape"]), e["dtype"]) for name, e in entries.items()}
        want = {name: _canonical(*described) for name, described in wanted.items()}
        names = sorted(have.keys() | want.keys() if self._writes else want.keys())
        differ = [
            f"{name} is {have.get(name, 'absent')} there and {want.get(name, 'absent')} in this run"
            for name in names
            if have.get(name) != want.get(name)
        ]
        if differ:
            raise ConfigError(
                f"checkpoint {self.folder}/{step} is of another model: {listed(differ)}. Use the "
                f"config it was saved with ({self._run}/config.toml)."
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        # `close` waits for the other processes, which call it only after an error of all processes.
        alone = not jax.distributed.is_initialized()
        if kind is None or isinstance(error, JobFailed) or (alone and issubclass(kind, Exception)):
            self.close()

    def close(self) -> None:
        """Wait for the last save, unless it failed, and end the threads."""
        if self._error is None:
            self.wait()
        self._thread.shutdown(wait=self._error is None)
        if self._writer and self._error is None:
            self._writer.close()


def _crc32(record: Any) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


# --- what is written ------------------------------------------------------------------------------


def _digests(named: Mapping[str, Any]) -> dict[str, array_digests.Digest]:
    """Return the digest of each array in its canonical shape."""
    arrays = {name: x for name, (x, _) in named.items()}
    if all(isinstance(x, jax.Array) for x in arrays.values()):
        return array_digests.of_arrays(arrays, {n: len(s) or 1 for n, (_, s) in named.items()})
    return {name: array_digests.of_numpy(x) for name, x in arrays.items()}


def _record(
    named: Mapping[str, Any], made_by: dict[str, Any] | None, config: dict[str, Any]
) -> dict[str, Any]:
    digests, arrays = _digests(named), {}
    for name, (x, stages) in named.items():
        shape, dtype = _canonical(x, stages)
        arrays[name] = {"shape": shape, "dtype": dtype, "stages": stages, "digest": digests[name]}
    record = {"format": FORMAT, "made_by": made_by, "config": config, "arrays": arrays}
    record = json.loads(json.dumps(record))
    return record | {"crc32": _crc32(record)}


def _writer(from_files: bool) -> ocp.AsyncCheckpointer:
    """
    from_files  the arrays are NumPy arrays, which are not copied

    A copy to pinned host memory frees the devices' buffers for donation, also on simulated devices.
    There is no compression: weights hardly compress.
    """
    options = {"use_compression": False, "enable_pinned_host_transfer": True}
    if from_files:
        handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        # Without the second, which has nothing to do, Orbax logs a warning.
        handlers = (np.ndarray, handler), (jax.Array, ocp.type_handlers.ArrayHandler())
        options["type_handler_registry"] = ocp.type_handlers.create_type_handler_registry(*handlers)
    state = ocp.PyTreeCheckpointHandler(**options)
    config = ocp.JsonCheckpointHandler(filename=RECORD)
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(state=state, config=config))


def _arguments(
    arrays: dict[str, Any], stacked: Mapping[str, int] | None, record: dict[str, Any]
) -> ocp.args.Composite:
    def chunks(name: str) -> ocp.SaveArgs:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=tuple(range(stacked[name])))

    save_args = None if stacked is None else {name: chunks(name) for name in arrays}
    state = ocp.args.PyTreeSave(arrays, save_args=save_args, ocdbt_target_data_file_size=FILE_BYTES)
    return ocp.args.Composite(state=state, config=ocp.args.JsonSave(record))


def load_weights(
    run: run_directory.RunDirectory, step: int | None, shapes: Transformer
) -> tuple[int, Transformer, dict[str, Any]]:
    """Return (step, weights in these shapes and shardings, config) of a run's checkpoint.

    step    None for the newest undamaged one
    Raises  ConfigError if it is missing or damaged
    """
    with Checkpoints(run.checkpoints) as saved:
        saved.step_or_newest(step)  # raises without checkpoints
        named = _named(plain := {"weights": shapes})
        # Adapters are merged with their base as they are read.
        step, state = saved.newest(
            lambda names: {} if any(n.endswith(".a") for n in names) else plain, only=step
        )
        config = saved.record(step)["config"]
        if not state:
            arrays = saved.arrays(step)
            entries = {n: {"shape": a.shape, "dtype": a.dtype.name} for n, a in arrays.items()}
            saved.check_arrays(step, entries, named)
            leaves = [arrays[name].onto(*wanted) for name, wanted in named.items()]
            state = jax.tree.unflatten(jax.tree.structure(plain), leaves)
        return step, state["weights"], config


def open_base(
    folder: str, step: int, known: str = ""
) -> tuple[dict[str, Any], Mapping[str, StoredArray]]:
    """Return the record and the arrays of the base of adapters.

    step    0 for the newest
    known   its digest, if adapters were trained on it
    Raises  ConfigError if it is not there, or has another digest
    """
    run = run_directory.at(folder)
    with Checkpoints(run.checkpoints) as saved:
        record = saved.record(step := saved.step_or_newest(step or None))
        if known and lora.digest(record["arrays"]) != known:
            raise ConfigError(
                f"the weights of {folder} at step {step} are not those that the adapters were "
                "trained on (run.init_from). Restore that run, or train new adapters."
            )
        return record | {"step": step}, saved.arrays(step)
