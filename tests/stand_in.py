"""In place of main.py: processes connect, step, save, resume and end like it, without a model."""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from runtime import distributed, errors
from runtime.phases import Phases
from runtime.signals import StopRequest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--peer-seconds", type=float, default=30.0)
    options, others = parser.parse_known_args()
    with Phases(600.0) as watchdog, distributed.job(options.peer_seconds):
        index = jax.process_index()
        print(f"process {index} of {jax.process_count()} got {json.dumps(others)}", flush=True)
        saved = Path(f"stand_in_{index}")
        with StopRequest(watchdog) as stop:
            for step in range(int(saved.read_text()) if saved.exists() else 0, options.steps):
                watchdog.phase(f"step {step + 1}")
                time.sleep(options.seconds)
                distributed.gather(b"the collective of a step")
                print(f"step {step + 1}/{options.steps}  loss {8 / (step + 1):.4f}", flush=True)
                saved.write_text(str(step + 1))
                if stop.reached() and stop.reached():  # JAX reports it once; reached() remembers it
                    raise stop.stopped(f"Step {step + 1} is saved.")


if __name__ == "__main__":
    errors.run_command(main)
