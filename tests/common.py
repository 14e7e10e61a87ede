"""Configs, meshes, batches and weights that tests of the sharded model share.

A "canonical tree" is the nested dict of arrays that reference.py takes and hf_case.weights makes:
blocks stacked [blocks, ...] in the order in which they run, whatever the mesh.
"""

import dataclasses
import math

import jax
import numpy as np

import model
import passes
import utils
from planning import hlo

# Widths all differ, so an exchanged dimension cannot fit. The capacity factor E / K drops nothing.
SIZES = {
    "vocabulary": 500,
    "width": 48,
    "blocks": 4,
    "heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "rope_theta": 100.0,
    "hidden": 72,
    "expert_hidden": 56,
    "experts": 8,
    "experts_per_token": 2,
    "routed_scaling_factor": 1.7,
    "capacity_factor": 4.0,
    "eval_capacity_factor": 4.0,
    "balance_loss": 0.1,
    "compute_dtype": "float32",
}

# One model that several files initialize on the same meshes, (shape, virtual), so that the
# compilation cache serves all but the first.
RUN = {"tied": False}
RUN_MESHES = {
    "1x1x1": ((1, 1, 1), 1),
    "8x1x1": ((8, 1, 1), 1),
    "2x2x2": ((2, 2, 2), 1),
    "1x4x2": ((1, 4, 2), 1),
    "2x2x2_virtual": ((2, 2, 2), 2),
    "2x1x2x2_virtual": ((2, 1, 2, 2), 2),
}


def config_of(
    shape=(1, 1, 1), virtual=1, gather="step", segments=False, train=None, optimizer=None, **fields
):
    """A tiny run on a mesh of `shape`; `fields` are those of the model."""
    small = {"microbatches": 4, "sequences": 16, "sequence_length": 16, "loss_chunk_tokens": 16}
    replica, fsdp, pipeline, tensor = (1, *shape)[-4:]
    mesh = utils.Mesh(replica=replica, fsdp=fsdp, pipeline=pipeline, tensor=tensor, virtual=virtual)
    return utils.Config(
        mesh=mesh,
        fsdp=utils.Fsdp(gather=gather),
        model=utils.Model(**(SIZES | fields)),
        train=utils.Train(**(small | (train or {}))),
        optimizer=utils.Optimizer(**(optimizer or {})),
        data=utils.Data(segments=segments),
    )


def mesh_of(config):
    """The first devices as the config's mesh."""
    devices = np.array(jax.devices()[: math.prod(config.mesh.shape)])
    return jax.sharding.Mesh(devices.reshape(config.mesh.shape), utils.MESH_AXES)


def batch_of(config, seed=0):
    """[B, T] tokens, targets, loss weights (some are 0) and documents, as reference.py takes."""
    random = np.random.default_rng(seed)
    shape = (config.train.sequences, config.train.sequence_length)
    ids = random.integers(0, config.model.vocabulary, (shape[0], shape[1] + 1)).astype(np.int32)
    starts = random.random(shape) < 0.2
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_weights": (random.random(shape) * (random.random(shape) < 0.8)).astype(np.float32),
        "segments": np.cumsum(starts, axis=1, dtype=np.int32),
    }


def on_mesh(config, mesh, batch):
    """A batch of [B, T] arrays as model.Batch [M, B / M, T] on the mesh."""
    M = config.train.microbatches
    parts = {name: a.reshape(M, -1, *a.shape[1:]) for name, a in batch.items()}
    return jax.device_put(model.Batch(**parts), jax.NamedSharding(mesh, passes.BATCH_SPEC))


def to_dict(node):
    """Nested dataclasses of arrays as nested dicts of NumPy arrays."""
    if node is None:
        return None
    if dataclasses.is_dataclass(node):
        return {name: to_dict(getattr(node, name)) for name in children(node)}
    return np.asarray(node)


def children(node):
    fields = dataclasses.fields(node)
    return [f.name for f in fields if f.metadata.get("pytree_node", True)]


def canonical(config, transformer):
    """A model.Transformer of arrays as a canonical tree."""
    tree = to_dict(transformer)
    blocks = jax.tree.map(lambda a: a.reshape(config.model.blocks, *a.shape[3:]), tree["blocks"])
    return {
        "embedding": tree["first"]["embedding"],
        "prefix": tree["first"]["prefix"],
        "blocks": blocks,
        "final_norm": tree["last"]["norm"],
        "output": tree["last"]["output"],
    }


def like(declared, tree):
    """The arrays of nested dicts in the classes and shapes of a tree of declared weights."""
    if isinstance(declared, dict | None):
        return tree
    if hasattr(declared, "spec"):
        return np.asarray(tree).reshape(declared.shape)
    return type(declared)(
        **{name: like(getattr(declared, name), tree[name]) for name in children(declared)}
    )


def put(mesh, declared, arrays):
    """The arrays on the mesh, laid out as declared."""
    return jax.tree.map(
        lambda w, a: jax.device_put(a, jax.NamedSharding(mesh, w.spec)), declared, arrays
    )


def transformer_of(config, mesh, tree):
    """A canonical tree as a model.Transformer on the mesh."""
    declared = model.declare(config)
    by_class = {
        "first": {"prefix": tree["prefix"], "embedding": tree["embedding"]},
        "blocks": tree["blocks"],
        "last": {"norm": tree["final_norm"], "output": tree["output"]},
    }
    return put(mesh, declared, like(declared, by_class))


def relative_error(found, expected):
    """max |found - expected| / max |expected|; 0 where both are zero everywhere."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    difference = np.abs(found - expected).max(initial=0.0)
    return difference if difference == 0 else difference / max(np.abs(expected).max(), 1e-30)


def errors(found, expected):
    """The relative error of each leaf of a canonical tree, by its name."""
    both = jax.tree.map(relative_error, found, expected)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): error
        for path, error in jax.tree_util.tree_leaves_with_path(both)
    }


def collective_bytes(text, branch_share=None):
    """Bytes of the results of collectives, by kind, over all executions."""
    return hlo.executed(text, hlo.collective_cost, branch_share)
