"""A run without jax: its processes meet, watch over each other, take steps, save and end as those
of main.py do, with the same code and exit codes, within a second.

    python tests/stand_in.py --steps 20 [--seconds 0.2] [--peer-seconds 30] [any other words]
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import faults
import peers
from watch import Watch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--peer-seconds", type=float, default=30.0)
    given, others = parser.parse_known_args()
    job = peers.Peers(peers.place(), given.peer_seconds, 60.0)
    with Watch(600.0, None, job) as watch:
        print(f"process {job.number} of {job.count} was given {json.dumps(others)}", flush=True)
        watch.ready()
        saved = Path(f"stand_in_{job.number}")
        for step in range(int(saved.read_text()) if saved.exists() else 0, given.steps):
            watch.doing(f"step {step + 1}")
            time.sleep(given.seconds)
            print(
                f"step {step + 1}/{given.steps}  loss {8 / (step + 1):.4f}  - tokens/s", flush=True
            )
            saved.write_text(str(step + 1))
            if watch.reached():
                raise watch.stopped(f"step {step + 1} is saved")
        watch.doing("the end")


if __name__ == "__main__":
    faults.command_line(main)
