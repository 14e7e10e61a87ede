"""Compare a run that resumes on one mesh after another with a run that stays on the first.

    ./run.sh python tests/mesh_chain.py

Each mesh is a start of main.py with its own devices, processes, virtual stages and microbatches. It
leaves a checkpoint for the next start. Prints a table. Exit code 1 unless all of these hold:

- the losses of all steps and evaluations are equal, within --tolerance;
- a state that is restored and saved again has the same bytes in every array;
- each step had the same sequences.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from processes import ROOT, SMALL_MODEL, environments, run_all

sys.path.insert(0, str(ROOT))

from runtime import jsonl

MODEL = f"""
{SMALL_MODEL} --model.num_hidden_layers 16 --train.global_batch_size 16 --optimizer.warmup_steps 2
--eval.sequences 16 --checkpoint.keep 99 --sample.prompts
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    steps: int = 4  # on each mesh
    tolerance: float = 1e-4  # of losses
    folder: Path | None = None  # for runs; a temporary one if not given


@dataclass(frozen=True)
class Link:
    """One mesh of the run that moves."""

    shape: tuple[int, int, int]
    virtual: int = 1
    microbatches: int = 2
    processes: int = 1

    @property
    def devices(self) -> int:
        """Of each process."""
        return math.prod(self.shape) // self.processes

    @property
    def flags(self) -> list[str]:
        sizes = dict(zip(("fsdp", "pipeline", "tensor"), self.shape, strict=True))
        sizes = {f"mesh.{name}": size for name, size in (sizes | {"virtual": self.virtual}).items()}
        sizes["train.microbatches"] = self.microbatches
        return [word for name, size in sizes.items() for word in (f"--{name}", str(size))]


CHAIN = (
    Link((2, 2, 2)),
    Link((8, 1, 1)),
    Link((1, 4, 2), virtual=2, microbatches=4),
    Link((4, 1, 2), processes=2),
    Link((1, 1, 1)),
)


# --- in the processes of the runs -----------------------------------------------------------------


def child(folder: Path, arguments: list[str]) -> None:
    """A run that saves what it restored a second time, and notes which sequences it was given."""
    import numpy as np

    import checkpoint
    import main
    from dataset import Mixture, Rows
    from runtime import errors
    from train import State

    run, rows = main.Loop.run, Mixture.rows
    file = folder / f"rows-{time.time_ns()}-{os.environ.get('JAX_PROCESS_ID', 0)}.jsonl"

    def saved_again(self: main.Loop, state: State) -> State:
        if int(state.step):
            again = checkpoint.Checkpoints(folder / "again", keep=99)
            again.save(int(state.step), state, {})
            again.close()
        return run(self, state)

    def noted(self: Mixture, step: int, numbers: np.ndarray) -> Rows:
        found = rows(self, step, numbers)
        with file.open("a") as out:
            for i, number in enumerate(numbers):
                text = b"".join(a[i].tobytes() for _, a in sorted(found.items()))
                digest = hashlib.sha256(text).hexdigest()
                out.write(json.dumps([step + 1, int(number), digest]) + "\n")
        return found

    main.Loop.run, Mixture.rows = saved_again, noted
    errors.run_command(lambda: main.run(main.parse(arguments)))


# --- outside --------------------------------------------------------------------------------------


class Run:
    def __init__(self, folder: Path, name: str, data: Path, flags: Flags):
        self.folder, self.steps = folder / name, flags.steps
        self.folder.mkdir(parents=True)
        length = flags.steps * len(CHAIN)
        self.arguments = [*MODEL.split(), "--run.dir", str(folder), "--run.name", name]
        self.arguments += ["--optimizer.schedule_steps", str(length)]
        for flag in ("eval.every_steps", "checkpoint.every_steps"):
            self.arguments += [f"--{flag}", str(flags.steps)]
        for split in ("train", "val"):
            self.arguments += [f"--data.{split}", str(data / split)]

    def go(self, link: Link, last: int) -> None:
        """Up to so many steps."""
        command = __file__, "--child", str(self.folder), *self.arguments
        places = environments(link.processes, link.devices)
        codes, output = run_all(places, *command, *link.flags, "--train.steps", str(last))
        if any(codes):
            raise SystemExit(f"{link} ended with {codes}:\n{output[0]}")

    def losses(self, key: str) -> dict[int, float]:
        """By step."""

        records = jsonl.read(self.folder / "metrics.jsonl")
        return {r["step"]: r[key] for r in records if key in r}

    def rows(self) -> dict[tuple[int, int], str]:
        """By step and number in the batch, a hash of the sequence and all that belongs to it."""
        lines = [s for f in self.folder.glob("rows-*.jsonl") for s in f.read_text().splitlines()]
        return {(step, number): digest for step, number, digest in map(json.loads, lines)}

    def arrays(self, name: str, step: int) -> dict[str, bytes]:
        """Of the checkpoint of a step in this folder of the run."""
        import checkpoint

        with contextlib.closing(checkpoint.Checkpoints(self.folder / name)) as saved:
            arrays = saved.arrays(step)
            return {name: array.whole().tobytes() for name, array in arrays.items()}


def furthest(one: dict[int, float], other: dict[int, float], steps: range) -> float:
    """The largest difference; infinite where a step is missing or not finite."""
    found = [abs((one.get(s) or math.nan) - (other.get(s) or math.nan)) for s in steps]
    return max(math.inf if math.isnan(difference) else difference for difference in found)


def row(chain: Run, stays: Run, link: Link, first: int, tolerance: float) -> tuple[str, bool]:
    """A line of the table, of the steps after `first`, and whether all is as it should be."""
    last = first + chain.steps
    both = chain.losses("loss/train"), stays.losses("loss/train")
    loss = furthest(*both, range(first + 1, last + 1))
    validation = furthest(chain.losses("loss/val"), stays.losses("loss/val"), range(last, last + 1))
    one, other = (
        {k: v for k, v in run.rows().items() if first < k[0] <= last} for run in (chain, stays)
    )
    same_rows = sum(one.get(key) == digest for key, digest in other.items())
    good = max(loss, validation) <= tolerance and one == other
    arrays = "new"
    if first:
        saved, again = (chain.arrays(name, first) for name in ("checkpoints", "again"))
        same = sum(again.get(name) == value for name, value in saved.items())
        arrays, good = f"{same} of {len(saved)}", good and saved == again
    cells = (f"{first + 1} to {last}", f"{link.processes} x {link.devices}", link.shape)
    cells += (link.virtual, link.microbatches, f"{loss:.1e}", f"{validation:.1e}", arrays)
    cells += (f"{same_rows} of {len(other)}",)
    return f"| {' | '.join(map(str, cells))} |", good


TITLES = (
    *("steps", "processes x devices", "mesh", "virtual", "microbatches", "loss", "validation loss"),
    *("arrays restored as saved", "sequences"),
)


def main(flags: Flags) -> int:
    from data import prepare

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.folder or Path(temporary)
        data = folder / "data"
        source = ["--source", str(ROOT), "--glob", "*.py", "--val-share", "0.2"]
        with contextlib.redirect_stdout(None):
            prepare.main([*source, "--out", str(data)])
        stays, chain = (Run(folder, name, data, flags) for name in ("stays", "chain"))
        stays.go(CHAIN[0], flags.steps * len(CHAIN))
        for number, link in enumerate(CHAIN):
            chain.go(link, flags.steps * (number + 1))
        firsts = range(0, flags.steps * len(CHAIN), flags.steps)
        rows = [
            row(chain, stays, link, first, flags.tolerance)
            for link, first in zip(CHAIN, firsts, strict=True)
        ]
        losses = stays.losses("loss/train")
    print(f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *(r for r, _ in rows), sep="\n")
    good = all(good for _, good in rows)
    what = f"all within {flags.tolerance:g}, bits and sequences equal" if good else "a fault"
    values = list(losses.values())
    print(
        f"loss {values[0]:.4f} to {values[-1]:.4f} in {len(values)} steps; "
        f"{time.monotonic() - started:.0f} s: {what}"
    )
    return not good


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
    else:
        import tyro

        raise SystemExit(main(tyro.cli(Flags, description=__doc__)))
