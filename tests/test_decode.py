"""Incremental decoding against the full forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_case
import model
import weights
from common import batch_of, config_of, full_logits, mesh_of, on_mesh
from inference import decode

MODELS = {
    "moe": {},
    "YaRN, query latent, prefix, untied": {
        "q_lora_rank": 24,
        "prefix_layers": 2,
        "tie_word_embeddings": False,
        "latent_rms_norm_eps": 0.1,
        "n_group": 2,
        **hf_case.YARN,
    },
    "no position in expert layers": {"rope_in_moe_layers": False, "dense_layers": 2},
    "softmax, cut experts, groups": {
        "scoring_func": "softmax",
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
    },
    "dense": {"moe_layers": 0},
}
EVERY = "YaRN, query latent, prefix, untied"
MESHES = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (4, 1, 2)]


def test_any_number_of_tokens_passes_through_its_chosen_experts():
    """Against every expert of every token, with choices that leave experts out or are all one."""
    config = config_of(n_routed_experts=8, num_experts_per_tok=3)
    mesh, m = mesh_of(config), config.model
    random = np.random.default_rng(0)
    w = model.ExpertParallelExperts(
        *(random.normal(size=(1, 8, *size)).astype(np.float32) for size in ((6, 5), (6, 5), (5, 6)))
    )
    for n in (1, 2, 5, 40):
        h = random.normal(size=(n, 6)).astype(np.float32)
        weight = random.random((n, 3)).astype(np.float32)
        for choice in (
            np.argsort(random.random((n, 8)), axis=1)[:, :3],
            np.broadcast_to([1, 2, 7], (n, 3)),
        ):
            choice = choice.astype(np.int32)
            run = jax.shard_map(
                lambda w, *given: decode.apply_experts(w, jnp.int32(0), *given, m.n_routed_experts),
                mesh=mesh,
                in_specs=jax.P(),
                out_specs=jax.P(),
            )
            every = np.einsum("nd,edg->neg", h, w.gate[0])
            every = every / (1 + np.exp(-every)) * np.einsum("nd,edg->neg", h, w.up[0])
            every = np.einsum("neg,egd->ned", every, w.down[0])
            expected = sum(
                weight[:, k, None]
                * np.take_along_axis(every, choice[:, k, None, None], axis=1)[:, 0]
                for k in range(3)
            )
            assert np.abs(np.asarray(jax.jit(run)(w, h, choice, weight)) - expected).max() < 1e-4


def pair(name, fields, shape):
    """Logits of the full forward pass; config, mesh and weights to decode with; tokens."""
    train = {"global_batch_size": 8, "microbatches": 1, "seq_len": 24}
    config = config_of(shape, train=train, **fields)
    mesh, declared = mesh_of(config), model.declare(config)
    w = weights.initialize(declared, mesh, 3)
    batch = batch_of(config, 1)
    whole = full_logits(config, declared, mesh)(w, on_mesh(config, mesh, batch))
    here = decode.decoding_config(config, shape[0], shape[2])
    converted = decode.weight_converter(decode.abstract_weights(here, model.declare(here), mesh))(w)
    return np.asarray(whole)[0], here, mesh, converted, batch["tokens"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(pytest.param(EVERY, shape, marks=pytest.mark.long) for shape in MESHES[:-1]),
        *((name, MESHES[-1]) for name in (EVERY, "dense")),
        *(
            pytest.param(name, MESHES[-1], marks=pytest.mark.long)
            for name in ("moe", "no position in expert layers", "softmax, cut experts, groups")
        ),
    ],
)
def test_decoding_gives_the_logits_of_the_full_forward_pass(name, shape, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK", 8)  # several blocks
    whole, config, mesh, w, tokens = pair(name, MODELS[name], shape)
    declared = model.declare(config)
    extend = jax.jit(decode.extend(config, declared, mesh), donate_argnums=1)
    B, T = tokens.shape
    cache = decode.empty_cache(decode.abstract_cache(config, mesh, B, T))
    assert [a.shape for a in cache] == [(config.model.num_hidden_layers, B, T, 1, 32 + 12)]
    length = np.array([5, 9, 1, 7, 11, 3, 12, 2], np.int32)  # of the prompts
    prompt = tokens[:, :12] * (np.arange(12) < length[:, None])
    every = np.broadcast_to(np.arange(12, dtype=np.int32), (B, 12))
    found = np.zeros_like(whole)
    logits, cache = extend(w, cache, prompt, np.zeros(B, np.int32), every)
    for row, n in enumerate(length):
        found[row, :n] = logits[row, :n]
    for _ in range(T - 1):
        at = np.minimum(length, T - 1)
        token = np.take_along_axis(tokens, at[:, None], axis=1)
        logits, cache = extend(w, cache, token, at, np.zeros((B, 1), np.int32))
        for row in range(B):
            found[row, at[row]] = logits[row, 0]
        length = length + 1
    real = np.isfinite(whole)
    assert (real == np.isfinite(found)).all() and real.any()
    assert np.abs(np.where(real, found, 0) - np.where(real, whole, 0)).max() < 1e-4
