"""Orbax checkpoints: save, find, verify, restore onto any mesh. Knows nothing of the loop.

A checkpoint is a folder `<step>` that appears by one rename when all of it is written: every array
whole (cut into chunks as its shards were, so any mesh can read it), the run's config, and the size
and CRC-32 of each file, which `latest` checks before anything is read. Blocks are stored in the
order in which they run, [blocks, ...], whatever mesh they were trained on: `stored_shapes`.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import checkpoint_managers

from metrics import say
from model import Transformer

CHECKSUMS = "checksums.json"
FILE_BYTES = 256 << 20
CHUNK_BYTES = 64 << 20  # of an array that is written from a file, and may be larger than memory
UNFINISHED = ".orbax-checkpoint-tmp"  # end of the name of a folder that is still being written


def _checksum(file: epath.Path) -> list[int]:
    """[bytes, CRC-32], read in pieces, because a file may be larger than memory."""
    size = crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 24):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry)
        else:
            yield entry


def _checksums(folder: epath.Path) -> dict[str, list[int]]:
    """Of every file in the items' folders, by path. Beside these Orbax still writes its own log."""
    items = [entry for entry in folder.iterdir() if entry.is_dir()]
    files = sorted(file for item in items for file in _files(item))
    with ThreadPoolExecutor(4) as pool:
        return {
            str(file.relative_to(folder)): found
            for file, found in zip(files, pool.map(_checksum, files), strict=True)
        }


def _damage(folder: epath.Path) -> str | None:
    """What is wrong with the files of a finished checkpoint, in words; None if nothing is."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
        found = _checksums(folder)
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} or a file named there cannot be read ({error})"
    for name, (size, crc) in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != [size, crc]:
            have_size, have_crc = found[name]
            wanted = f"expected {size} bytes with CRC-32 {crc:08x}"
            return f"{name}: {wanted}, found {have_size} with {have_crc:08x}"
    return None


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


class Checkpoints:
    """The checkpoints of one run. Every process makes one and calls the same methods in order."""

    def __init__(
        self, folder: str | Path, keep: int | None = None, stacked: Mapping[str, int] | None = None
    ):
        """Opens `folder` to write, keeping the newest `keep`; without `keep`, to read only.

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
        self.folder = epath.Path(folder).absolute()
        self._writes = keep is not None
        self._stacked = stacked
        self._saving = -1
        if not self._writes and not self.folder.is_dir():
            raise ValueError(
                f"there are no checkpoints in {self.folder}: no such folder. Give the folder of a "
                f"run that was trained with --checkpoint.every_steps above 0."
            )
        self._name_unfinished()
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=self._options(keep),
                item_names=("state", "config"),
                item_handlers={
                    "state": self._handler(),
                    "config": ocp.JsonCheckpointHandler(),
                },
            )
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to {self.folder}: {error}. Give a --run.dir that "
                f"can be written."
            ) from error

    def _handler(self) -> ocp.CheckpointHandler:
        if self._stacked is not None:
            return ocp.PyTreeCheckpointHandler(type_handler_registry=_without_copy())
        # Only the second restores a part, and only the first is asked to save.
        return ocp.StandardCheckpointHandler() if self._writes else ocp.PyTreeCheckpointHandler()

    def _options(self, keep: int | None) -> ocp.CheckpointManagerOptions:
        if keep is None:
            return ocp.CheckpointManagerOptions(create=False)
        return ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.LatestN(keep),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )

    def _name_unfinished(self) -> None:
        if self._writes and self.folder.is_dir():
            for entry in sorted(self.folder.iterdir()):
                if UNFINISHED in entry.name:
                    say(f"warning: {entry} was not finished when its run stopped; removed")

    def _write_checksums(self) -> None:
        """Runs in Orbax's thread on process 0, when all files are there and before the rename."""
        named = str(self._saving)
        [folder] = [f for f in self.folder.iterdir() if f.name in (named, named + UNFINISHED)]
        (folder / CHECKSUMS).write_text(json.dumps(_checksums(folder)))

    def save(self, step: int, state: Any, config: dict[str, Any]) -> None:
        """Copies `state` off the devices and returns; the files are written behind the training.

        state   tree of jax arrays in canonical shapes, which may be donated right after; with
                `stacked` of numpy arrays, which have to stay until `wait` returns.
        config  tree of what JSON can hold.
        A step that is saved already stays as it is.

        Raises  ValueError when there is a later step.
        """
        assert self._writes
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        named = _named(state)
        args = ocp.args.StandardSave(named)
        if self._stacked is not None:
            args = _in_chunks(named, self._stacked)
        items = ocp.args.Composite(state=args, config=ocp.args.JsonSave(config))
        if not self._manager.save(step, args=items):
            raise ValueError(
                f"step {step} cannot be saved in {self.folder}, which has step "
                f"{self._manager.latest_step()} already: the newest is where a run continues. "
                f"Continue that run, or start another with --run.name."
            )

    def wait(self) -> None:
        """Returns when the last save is on disk; raises what went wrong with it."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def latest(self) -> int | None:
        """The newest step whose files are as they were written; None without any checkpoint.

        A damaged one is named, and put aside as `damaged-<step>` by a run that writes, so that the
        step can be saved again.

        Raises  ValueError when there are checkpoints and all are damaged.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True)
        newest = next((step for step in steps if self._is_good(step)), None)
        if steps and newest is None:
            mend = "start another run with --run.name" if self._writes else "give another run"
            raise ValueError(
                f"every checkpoint in {self.folder} is damaged (steps {steps}), so the run cannot "
                f"be continued. Bring back a good copy, or {mend}."
            )
        if self._writes:
            self._put_aside([step for step in steps if step > newest])
        return newest

    def _is_good(self, step: int) -> bool:
        """One process reads, and all follow it: they must not restore different steps."""
        good = True
        if jax.process_index() == 0:
            folder = self.folder / str(step)
            damage = _damage(folder)
            good = damage is None
            if not good:
                say(f"warning: checkpoint {folder} is damaged and skipped: {damage}")
        return bool(multihost_utils.broadcast_one_to_all(np.asarray(good)))

    def _put_aside(self, steps: list[int]) -> None:
        """Only ever beside a good one: a folder without checkpoints would be a new run."""
        for step in steps if jax.process_index() == 0 else []:
            aside = self.folder / f"damaged-{step}"
            if aside.exists():
                aside.rmtree()
            (self.folder / str(step)).rename(aside)
        multihost_utils.sync_global_devices("put aside")
        self._manager.reload()

    def config(self, step: int) -> dict[str, Any]:
        """The config that was saved with a step."""
        self._must_exist(step)
        items = ocp.args.Composite(config=ocp.args.JsonRestore())
        return self._manager.restore(step, args=items).config

    def names(self, step: int) -> frozenset[str]:
        """Of the arrays that are stored of a step."""
        self._must_exist(step)
        return frozenset(self._manager.item_metadata(step).state.tree)

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, on the devices and in the layout that `abstract` says.

        abstract  tree of `jax.ShapeDtypeStruct` with shardings, of any mesh; of one that was opened
                  to read only, it may be a part of what was saved.
        Raises    ValueError that names an array which is missing, or has another shape or type.
        """
        self._must_exist(step)
        wanted = _named(abstract)
        self._must_hold(step, wanted)
        args = ocp.args.StandardRestore(wanted) if self._writes else _part(wanted)
        items = ocp.args.Composite(state=args)
        found = self._manager.restore(step, args=items).state
        return jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in wanted])

    def _must_exist(self, step: int) -> None:
        steps = sorted(self._manager.all_steps())
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

    def arrays(self, step: int) -> dict[str, ts.TensorStore]:
        """The arrays of a step by name, on disk, for who reads parts of them without a device."""
        self._must_exist(step)
        folder = f"file://{self.folder / str(step) / 'state'}/"
        if "://" in str(self.folder):
            folder = folder.removeprefix("file://")

        def opened(name: str) -> Any:
            kvstore = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
            return ts.open({"driver": "zarr", "kvstore": kvstore})

        # All at once: they share a context, and wait for the same files.
        found = {name: opened(name) for name in self._manager.item_metadata(step).state.tree}
        return {name: future.result() for name, future in found.items()}

    def must_be_good(self, step: int) -> None:
        """Raises ValueError when there is no such step, or its files are not as they were
        written.
        """
        self._must_exist(step)
        if not self._is_good(step):
            steps = [other for other in sorted(self._manager.all_steps()) if other != step]
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is damaged. Give another of "
                f"steps {steps}, or bring back a good copy."
            )

    def _must_hold(self, step: int, wanted: dict[str, Any]) -> None:
        """Orbax itself would cast float32 to what is asked for."""
        stored = self._manager.item_metadata(step).state.tree
        have = {name: (x.shape, np.dtype(x.dtype).name) for name, x in stored.items()}
        want = {name: (x.shape, np.dtype(x.dtype).name) for name, x in wanted.items()}
        if self._writes and all(name.startswith("weights.") for name in have):
            raise ValueError(
                f"{self.folder / str(step)} holds weights alone, as they were imported, and no "
                f"training to continue. Begin a run with them: --init {self.folder.parent} "
                f"--run.name {self.folder.parent.name}-2."
            )
        for name in sorted(have.keys() | want.keys() if self._writes else want.keys()):
            if have.get(name) != want.get(name):
                raise ValueError(
                    f"checkpoint {self.folder / str(step)} is of another model: {name} is "
                    f"{have.get(name, 'absent')} there and {want.get(name, 'absent')} in this run. "
                    f"Give the config it was saved with ({self.folder.parent / 'config.toml'})."
                )

    def close(self) -> None:
        """Waits for the last save: a process that ends before it leaves half a checkpoint."""
        self.wait()
        self._manager.close()


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

    def change(arrays: Any) -> Any:
        return jax.tree.map(lambda a, like: a.reshape(like.shape), arrays, shapes)

    return jax.jit(change, out_shardings=jax.tree.map(lambda s: s.sharding, shapes))(arrays)
