"""A tiny run that several files of tests inspect, and functions to start and read such runs.

The fixture `whole` (conftest.py) is this run. It is made once.
"""

import contextlib

import jax
import numpy as np

import checkpoint
import main
import model
import train
import utils
import validate
from processes import SMALL_MODEL
from runtime import cli, jsonl, resume, run_directory

TEXT = f"""
{SMALL_MODEL} --model.num_hidden_layers 8 --optimizer.schedule_steps 6 --optimizer.warmup_steps 2
--train.steps 6 --eval.every_steps 3 --eval.sequences 16 --checkpoint.every_steps 3
--sample.every_steps 4 --sample.tokens 4 --sample.prompts def import
"""
FLAGS = TEXT.split()


class Killed(Exception):
    """Stands for a kill of the process."""


def start(data, runs, name, *flags):
    """Start or resume a run, and return its directory after its end."""
    config = cli.parse([*FLAGS, *data, "--run.dir", str(runs), "--run.name", name, *flags])
    main.run(config)
    return runs / name


def losses(folder):
    return [r["loss/train"] for r in jsonl.read(folder / "metrics.jsonl") if "loss/train" in r]


def load(folder, *flags):
    """Return (config with these flags, declaration, mesh, weights) of the newest checkpoint."""
    run = run_directory.at(folder)
    config = resume.config_of(run, flags, validate.Flags)
    declared, mesh = model.declare(config), train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    return config, declared, mesh, checkpoint.load_weights(run, None, shapes)[1]


def arrays(folder, step):
    """Return the arrays of a checkpoint, restored on one device. The run may be in a bucket."""
    folder = run_directory.at(folder)
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    config = utils.changed(cli.load(folder.files / "config.toml"), {"mesh": one})
    shapes = train.abstract_state(config, model.declare(config), train.make_mesh(config))
    with contextlib.closing(checkpoint.Checkpoints(folder.checkpoints)) as saved:
        return [np.asarray(a) for a in jax.tree.leaves(saved.restore(step, shapes))]
