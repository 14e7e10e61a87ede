"""Configs, meshes, batches and weights for tests of the sharded model.

A "canonical tree" is a nested dict of arrays, as in reference.py and hf_case.weights. Its blocks
are stacked [blocks, ...] in the order of execution, on every mesh.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import model
import reference
import sharded_model
import train
import utils
import vocabulary
from hf_case import model_with
from inference import decode
from optimizer import learning_rates

# All widths differ, so that swapped dimensions do not fit. Capacity factor E / K drops nothing.
SIZES = {
    "vocab_size": 500, "hidden_size": 48, "blocks": 4, "num_attention_heads": 4,
    "kv_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28,
    "rope_theta": 100.0, "intermediate_size": 72, "moe_intermediate_size": 56,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.7,
    "capacity_factor": 4.0, "aux_loss_alpha": 0.1, "compute_dtype": "float32",
}  # fmt: skip


# As without the flags of conftest.py, with which two programs may round products differently.
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}


def jitted_step(config, declared, mesh):
    """Return (state, batch) -> (next state, report), with the learning rates of the config."""
    step, rates = train.jitted_step(config, declared, mesh), learning_rates(config)
    return lambda state, batch: step(state, batch, rates)


# One model and its meshes (shape, virtual) for several files, so that the compilation cache serves
# all but the first.
RUN = {"tie_word_embeddings": False, "capacity_factor": 0.0}
RUN_MESHES = {
    "1x1x1": ((1, 1, 1), 1),
    "8x1x1": ((8, 1, 1), 1),
    "2x2x2_virtual": ((2, 2, 2), 2),
    "2x1x2x2_virtual": ((2, 1, 2, 2), 2),
    "1x2x1x2x2": ((1, 2, 1, 2, 2), 1),
}


def config_of(
    shape=(1, 1, 1), virtual=1, gather="step", segments=False, train=None, optimizer=None, **fields
):
    """Return a tiny config on a mesh of `shape`, with `fields` of the model.

    shape  [replica] fsdp pipeline tensor, or all five of MESH_AXES.
    """
    small = {"microbatches": 4, "global_batch_size": 16, "seq_len": 16, "loss_chunk_tokens": 16}
    if len(shape) < 5:
        shape = (*(1, *shape)[-4:-1], 1, shape[-1])
    mesh = utils.Mesh(**dict(zip(utils.MESH_AXES, shape, strict=True)), virtual=virtual)
    return utils.Config(
        mesh=mesh,
        fsdp=utils.Fsdp(gather=gather),
        model=model_with(utils.Model(), **(SIZES | fields)),
        train=utils.Train(**(small | (train or {}))),
        optimizer=utils.Optimizer(**(optimizer or {})),
        data=utils.Data(segments=segments),
    )


def mesh_of(config):
    """Return the config's mesh over the first devices."""
    devices = np.array(jax.devices()[: math.prod(config.mesh.shape)])
    return jax.sharding.Mesh(devices.reshape(config.mesh.shape), utils.MESH_AXES)


def batch_of(config, seed=0):
    """Return [B, T] tokens, targets, loss weights (some 0) and segments for reference.py."""
    random = np.random.default_rng(seed)
    shape = (config.train.global_batch_size, config.train.seq_len)
    ids = random.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
    starts = random.random(shape) < 0.2
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_weights": (random.random(shape) * (random.random(shape) < 0.8)).astype(np.float32),
        "segments": np.cumsum(starts, axis=1, dtype=np.int32),
    }


def on_mesh(config, mesh, batch):
    """Put [B, T] arrays on the mesh as a model.Batch [M, B / M, T]."""
    M = config.train.microbatches
    parts = {name: a.reshape(M, -1, *a.shape[1:]) for name, a in batch.items()}
    return jax.device_put(model.Batch(**parts), jax.NamedSharding(mesh, sharded_model.BATCH_SPEC))


def full_logits(config, declared, mesh):
    """Return the jitted (weights, batch [M, B, T]) -> [M, B, T, V] of the production forward pass.

    Padding ids have -inf.
    """

    def make(outer, data, h_bTD):
        h_nD = h_bTD.reshape(-1, h_bTD.shape[-1])
        logits_nv = vocabulary.local_logits(outer.output, h_nD, config.model.vocab_size)
        logits_nV = lax.all_gather(
            logits_nv, utils.VOCABULARY_AXES, axis=1, tiled=True, to="invarying"
        )
        return logits_nV.reshape(*h_bTD.shape[:2], -1)

    return jax.jit(sharded_model.after_layers(config, declared, mesh, make))


def to_dict(node):
    """Convert nested dataclasses of arrays to nested dicts of NumPy arrays."""
    if node is None:
        return None
    if isinstance(node, dict):
        return {name: to_dict(child) for name, child in node.items()}
    if dataclasses.is_dataclass(node):
        return {name: to_dict(getattr(node, name)) for name in children(node)}
    return np.asarray(node)


def children(node):
    fields = dataclasses.fields(node)
    return [f.name for f in fields if f.metadata.get("pytree_node", True)]


def canonical(config, transformer):
    """Convert a model.Transformer of arrays to a canonical tree."""
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
    """Convert nested dicts of arrays to the classes and shapes of declared weights."""
    if declared is None:
        return tree
    if isinstance(declared, dict):
        return {name: like(child, tree[name]) for name, child in declared.items()}
    if hasattr(declared, "spec"):
        return np.asarray(tree).reshape(declared.shape)
    return declared.replace(
        **{name: like(getattr(declared, name), tree.get(name)) for name in children(declared)}
    )


def put(mesh, declared, arrays):
    """Put arrays on the mesh in the declared layout."""
    return jax.tree.map(
        lambda w, a: jax.device_put(a, jax.NamedSharding(mesh, w.spec)), declared, arrays
    )


def transformer_of(config, mesh, tree):
    """Convert a canonical tree to a model.Transformer on the mesh."""
    declared = model.declare(config)
    by_class = {
        "first": {"prefix": tree["prefix"], "embedding": tree["embedding"]},
        "blocks": tree["blocks"],
        "last": {"norm": tree["final_norm"], "output": tree["output"]},
    }
    return put(mesh, declared, like(declared, by_class))


def relative_error(found, expected):
    """Return max |found - expected| / max |expected|, or 0 if both are zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    difference = np.abs(found - expected).max(initial=0.0)
    return difference if difference == 0 else difference / max(np.abs(expected).max(), 1e-30)


def errors(found, expected):
    """Return the relative error of each leaf of a canonical tree, by name.

    Gradients of router biases, which are not trained, are None in `found`.
    """
    is_none = lambda leaf: leaf is None  # noqa: E731
    both = jax.tree.map(
        lambda one, other: None if one is None else relative_error(one, other),
        found, expected, is_leaf=is_none,
    )  # fmt: skip
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): error
        for path, error in jax.tree_util.tree_leaves_with_path(both)
    }


@functools.cache
def step_of(config):
    """Return the jitted production step: (weights, batch) -> gradients, Stats."""
    run = sharded_model.loss_and_gradients(config, model.declare(config), mesh_of(config))
    return jax.jit(lambda w, batch: run(w, batch, jnp.int32(0)))


reference_step = jax.jit(jax.value_and_grad(reference.loss, has_aux=True), static_argnums=2)


def check_step(config, tree, bound=2e-5):
    """Compare loss, every gradient and the routing of a step with the one-device reference.

    Returns the parts of the reference's loss.
    """
    mesh, batch = mesh_of(config), batch_of(config)
    w, data = transformer_of(config, mesh, tree), on_mesh(config, mesh, batch)
    grads, stats = step_of(config)(w, data)
    if not config.data.segments:
        batch["segments"] = np.zeros_like(batch["segments"])
    (loss, parts), expected = reference_step(tree, batch, config.model)
    for part in ("cross_entropy", "balance", "z"):
        assert relative_error(getattr(stats, part), parts[part]) <= bound, part
    assert relative_error(stats.loss, loss) <= bound
    grads = canonical(config, grads)
    worst = {leaf: e for leaf, e in errors(grads, expected).items() if e > bound}
    assert not worst, f"relative errors of gradients: {worst}"
    padding = [grads[name][config.model.vocab_size :] for name in ("embedding", "output")
               if grads[name] is not None]  # fmt: skip
    assert all(rows.size and not rows.any() for rows in padding)
    check_routing(config, stats, parts)
    return parts


def check_routing(config, stats, parts):
    """Every choice of an expert is counted as in the reference, and none is dropped."""
    if config.model.moe_layers:
        counts = np.asarray(stats.tokens_per_expert)
        counts = counts.reshape(-1, config.model.n_routed_experts)
        assert counts.tolist() == parts["tokens_per_expert"].tolist()
    assert stats.dropped == 0


def decoded_logits(config, tree, tokens):
    """Return [B, T, V] of incremental decoding on the config's mesh, from a canonical tree.

    Prompts have up to half of the tokens, each another number. The others follow one by one.
    """
    here = decode.decoding_config(config, config.mesh.fsdp, config.mesh.tensor)
    declared, mesh = model.declare(here), mesh_of(here)
    w = transformer_of(here, mesh, tree)
    w = decode.weight_converter(decode.abstract_weights(here, declared, mesh))(w)
    extend = jax.jit(decode.extend(here, declared, mesh), donate_argnums=1)
    B, T = tokens.shape
    cache = decode.empty_cache(decode.abstract_cache(here, mesh, B, T))
    first = T // 2
    length = (1 + 5 * np.arange(B) % first).astype(np.int32)
    prompt = tokens[:, :first] * (np.arange(first) < length[:, None])
    every = np.broadcast_to(np.arange(first, dtype=np.int32), (B, first))
    logits, cache = extend(w, cache, prompt, np.zeros(B, np.int32), length, every)
    found = np.zeros((B, T, logits.shape[-1]), np.float32)
    found[:, :first] = logits  # those after a prompt are overwritten
    one, zero = np.ones(B, np.int32), np.zeros((B, 1), np.int32)
    for _ in range(T - length.min()):
        at = np.minimum(length, T - 1)
        token = np.take_along_axis(tokens, at[:, None], axis=1)
        logits, cache = extend(w, cache, token, at, one, zero)
        found[np.arange(B), at] = np.asarray(logits)[:, 0]
        length = length + 1
    return found
