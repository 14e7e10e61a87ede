"""A run like main.py's in which something goes wrong; for tests that start it in a process.

    python tests/faulty_run.py FLAGS OF main.py

Two steps have a loss weight that is not a number, and after the last one a bit of a weight is
another on the last device than on the others.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import loop
import main
from dataset import Mixture
from runtime import errors

NAN_STEPS = (2, 4)  # steps as metrics.jsonl counts them
FLIPPED_AT = 6


def flipped(a, device, bit, element):
    """The array with one bit of one element flipped on this device, and nowhere else."""
    parts = []
    for shard in a.addressable_shards:
        part = np.array(shard.data)
        if shard.device == device:
            bits = part.reshape(-1).view(f"uint{8 * a.dtype.itemsize}")
            bits[element] ^= 1 << bit
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(a.shape, a.sharding, parts)


def rows_with_nan(self, step, rows, right=Mixture.rows):
    """In place of Mixture.rows: the first row of a batch has it, which the first devices hold."""
    found = right(self, step, rows)
    if step + 1 in NAN_STEPS:
        found["loss_weights"][np.asarray(rows) == 0, 3] = np.nan
    return found


def flipped_then_compared(self, state, step, right=loop.Loop._check_replicas):
    """In place of loop.Loop._check_replicas."""
    if step == FLIPPED_AT:
        last = state.weights.last
        norm = flipped(last.norm, self.job.mesh.devices.flat[-1], bit=3, element=1)
        state = state.replace(weights=state.weights.replace(last=last.replace(norm=norm)))
    right(self, state, step)


if __name__ == "__main__":
    Mixture.rows, loop.Loop._check_replicas = rows_with_nan, flipped_then_compared
    errors.run_command(lambda: main.run(main.parse()))
