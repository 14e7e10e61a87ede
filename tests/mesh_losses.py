"""Train configs/tiny.toml on several meshes, each with several numbers of microbatches.

    ./run.sh python tests/mesh_losses.py            about 8 minutes on two cores

AdamW in float32, without the router's balancing bias: everything else is the config's. Prints for
each run the largest difference of its losses from those of one device with one microbatch, and the
first step at which a token chose another expert, by the numbers of tokens per expert. Exit code 1
if a difference exceeds its bound.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dataset  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402
import utils  # noqa: E402
from common import jitted_step  # noqa: E402
from runtime import cli  # noqa: E402

MESHES = [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)]
MICROBATCHES = (1, 4, 8)
BOUNDS = {5: 1e-5, 20: 1e-4}  # {steps: of the losses of so many steps}
FLAGS = """
--model.compute_dtype float32 --model.router_bias_update_speed 0 --optimizer.name adamw
--optimizer.lr 1e-3 --train.steps 20 --train.global_batch_size 32 --train.seq_len 64
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    config: Path = ROOT / "configs" / "tiny.toml"
    capacity_factor: float = 0.0  # of experts; 0 is dropless
    warmup_steps: int = 40  # of the learning rate


def train_losses(config: utils.Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses [steps] and the tokens per expert [steps, blocks, E]."""
    mesh, declared = train.make_mesh(config), model.declare(config)
    step = jitted_step(config, declared, mesh)
    state = train.initial_state(config, declared, mesh)
    losses, counts = [], []
    for batch in train.batches(config, mesh, dataset.open_training(config).rows, 0):
        state, report = step(state, batch)
        losses.append(float(report["stats"].loss))
        tokens = np.asarray(report["stats"].tokens_per_expert)
        counts.append(tokens.reshape(config.model.blocks, -1))
    jax.clear_caches()
    return np.array(losses), np.array(counts)


def main(flags: Flags) -> int:
    arguments = ["--config", str(flags.config), *FLAGS.split()]
    arguments += ["--model.capacity_factor", str(flags.capacity_factor)]
    base = cli.parse([*arguments, "--optimizer.warmup_steps", str(flags.warmup_steps)])
    first, failed = None, False
    steps = "  ".join(f"{n:>2} steps" for n in BOUNDS)
    print(f"mesh      microbatches  last loss  {steps}  another expert")
    for shape in MESHES:
        for count in MICROBATCHES:
            sizes = dict(zip(("fsdp", "pipeline", "tensor"), shape, strict=True))
            config = dataclasses.replace(
                base,
                mesh=utils.Mesh(**sizes),
                train=dataclasses.replace(base.train, microbatches=count),
            )
            began, (losses, counts) = time.monotonic(), train_losses(config)
            first = first or (losses, counts)
            worst = {n: np.abs(losses - first[0])[:n].max() for n in BOUNDS}
            [differing] = np.nonzero((counts != first[1]).any((1, 2)))
            other = f"step {differing[0] + 1}" if differing.size else "none"
            failed |= any(not worst[n] <= bound for n, bound in BOUNDS.items())
            seconds = time.monotonic() - began
            cells = "  ".join(f"{error:8.1e}" for error in worst.values())
            row = f"{shape!s:9} {count:12}  {losses[-1]:9.6f}  {cells}  {other:>14}"
            print(f"{row}  {seconds:.0f} s", flush=True)
    print("some differ" if failed else "all agree")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Flags, description=__doc__)))
