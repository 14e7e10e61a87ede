"""One tiny run that several files ask questions of, and how to start another like it.

The fixtures are in conftest.py: `whole` is this run, and it is made once.
"""

import dataclasses

import jax
import numpy as np

import checkpoint
import main
import model
import train
import utils
from processes import SMALL_MODEL
from runtime import cli, jsonl, run_directory

TEXT = f"""
{SMALL_MODEL} --model.num_hidden_layers 8 --optimizer.schedule_steps 6 --optimizer.warmup_steps 2
--train.steps 6 --eval.every_steps 3 --eval.sequences 16 --checkpoint.every_steps 3
--sample.every_steps 2 --sample.tokens 4 --sample.prompts def import
"""
FLAGS = TEXT.split()


class Killed(Exception):
    """What a run that is killed ends with here."""


def start(data, runs, name, *flags):
    """The folder of the run, which has ended; a run that is there already is continued."""
    config = cli.parse([*FLAGS, *data, "--run.dir", str(runs), "--run.name", name, *flags])
    main.run(config)
    return runs / name


def losses(folder):
    return [r["loss/train"] for r in jsonl.read(folder / "metrics.jsonl") if "loss/train" in r]


def arrays(folder, step):
    """Of a checkpoint, read back on one device; the folder may lie in a bucket."""
    folder = run_directory.at(folder)
    config = cli.load(folder.files / "config.toml")
    config = dataclasses.replace(config, mesh=utils.Mesh(fsdp=1, pipeline=1, tensor=1))
    shapes = train.abstract_state(config, model.declare(config), train.make_mesh(config))
    saved = checkpoint.Checkpoints(folder.checkpoints)
    state = saved.restore(step, shapes)
    saved.close()
    return [np.asarray(a) for a in jax.tree.leaves(state)]
