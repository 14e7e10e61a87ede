"""Runs with random weights, written without a device; what they compute; published configs."""

import dataclasses
import json
import math
from contextlib import closing
from pathlib import Path

import jax
import numpy as np

import checkpoint
import hugging_face
import model
import passes
import resume
import run_folder
import train
import utils
from data.tokenizer import SAMPLE, load_tokenizer, table_sha256

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
# Widths all differ, so an exchanged dimension cannot fit; odd ones among them.
SIZES = {
    "vocabulary": 4097, "width": 48, "blocks": 2, "dense_layers": 0, "heads": 3,
    "kv_lora_rank": 24, "qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 13,
    "rope_theta": 1000.0, "hidden": 72, "expert_hidden": 20, "experts": 8, "experts_per_token": 2,
    "routed_scaling_factor": 1.7, "compute_dtype": "float32",
}  # fmt: skip
# A published config, scaled down.
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "vocab_size": 1000,
}  # fmt: skip


def config_of(folder: Path, **fields) -> utils.Config:
    m = utils.Model(**SIZES | fields)
    config = utils.Config(
        mesh=utils.Mesh(fsdp=1, pipeline=1, tensor=1),
        model=m,
        train=utils.Train(sequences=1, microbatches=1, sequence_length=64),
        eval=utils.Eval(sequences=1),
        run=utils.Run(name=folder.name, dir=str(folder.parent)),
    )
    utils.check(config)
    return config


def random_weights(leaf: hugging_face.Leaf, random: np.random.Generator) -> np.ndarray:
    """Matrices that keep the scale of what they multiply, norms around 1, a small bias."""
    numbers = random.standard_normal(leaf.shape, np.float32)
    if leaf.name.endswith("bias"):
        return 0.05 * numbers * bool(leaf.names)  # V2 has none
    if "norm" in leaf.name:
        return 1 + 0.1 * numbers
    inputs = leaf.one[-1] if leaf.rows else math.prod(leaf.one[: leaf.inputs])
    return inputs**-0.5 * numbers


def make_run(folder: Path, seed: int = 0, **fields) -> utils.Config:
    """A run's folder with one checkpoint, of step 3."""
    config, random = config_of(folder, **fields), np.random.default_rng(seed)
    kind = hugging_face.kind_of(config.model)
    leaves = hugging_face.leaves(config, kind)
    tokenizer = load_tokenizer(SAMPLE)
    tokens = {"tokenizer": SAMPLE, "tokenizer_sha256": table_sha256(tokenizer)}
    told = dataclasses.asdict(config) | {"tokens": tokens | {"end_of_text": tokenizer.eot_token}}
    arrays = {f"weights.{leaf.name}": random_weights(leaf, random) for leaf in leaves}
    stacked = {f"weights.{leaf.name}": leaf.stacked for leaf in leaves}
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(utils.to_toml(config))
    with closing(checkpoint.Checkpoints(folder / "checkpoints", 1, stacked)) as saved:
        saved.save(3, arrays, told)
    return config


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a run's newest checkpoint, as they are on disk."""
    with closing(checkpoint.Checkpoints(folder / "checkpoints")) as saved:
        arrays = saved.arrays(saved.good_step(None))
        return {
            name: array.read().result()
            for name, array in arrays.items()
            if name.startswith("weights.")
        }


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Of ids [B, T] on one device, without pads of the vocabulary."""
    config = utils.load(folder / "config.toml")
    B, T = ids.shape
    of_model = dataclasses.replace(
        config.model, compute_dtype="float32", capacity_factor=99.0, eval_capacity_factor=99.0
    )
    config = dataclasses.replace(
        config,
        model=of_model,
        mesh=utils.Mesh(fsdp=1, pipeline=1, tensor=1),
        train=dataclasses.replace(
            config.train, sequences=B, microbatches=1, sequence_length=T, loss_chunk_tokens=T
        ),
    )
    declared, mesh = model.declare(config), train.make_mesh(config)
    shapes = train.abstract_state(config, declared, mesh).weights
    _, w, _ = resume.weights_of(run_folder.at(folder), None, shapes)
    zeros = np.zeros((1, B, T), np.int32)
    batch = model.Batch(ids[None], ids[None], np.ones((1, B, T), np.float32), zeros)
    places = np.broadcast_to(np.arange(T, dtype=np.int32), (1, B, T))
    run = jax.jit(passes.logits(config, declared, mesh))
    return np.asarray(run(w, batch, places))[0, :, :, : config.model.vocabulary]
