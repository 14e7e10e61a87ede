"""Incremental decoding against the reference, which computes all positions at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_case
import model
import reference
from common import batch_of, config_of, decoded_logits, mesh_of
from inference import decode

CASES = {  # shape, model
    "latent": (
        (4, 1, 2),
        {"q_lora_rank": 24, "prefix_layers": 2, "tie_word_embeddings": False, "n_group": 2,
         "latent_rms_norm_eps": 0.1, "rope_in_moe_layers": False, **hf_case.YARN,
         "rope_mscale_all_dim": 0.0},
    ),
    "grouped, with a window, 2 ranks for each key head, sharded experts": (
        (2, 1, 4),
        {"attention": "gqa", "head_dim": 10, "num_key_value_heads": 2, "attention_bias": True,
         "qk_norm": True, "sliding_window": 7, "scoring_func": "softmax", "n_routed_experts": 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_the_logits_of_the_reference(name, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK", 8)  # several blocks
    shape, fields = CASES[name]
    config = config_of(shape, train={"global_batch_size": 8, "seq_len": 24}, **fields)
    tree, tokens = hf_case.weights(config.model, 3), batch_of(config, 1)["tokens"]
    expected = np.asarray(reference.logits(tree, tokens, config.model))
    found = decoded_logits(config, tree, tokens)
    real = np.isfinite(expected)
    assert (real == np.isfinite(found)).all() and real.any()
    assert np.abs(np.where(real, found, 0) - np.where(real, expected, 0)).max() < 1e-4


def test_any_number_of_tokens_passes_through_its_chosen_experts():
    """Against every expert of every token, with choices that leave experts out or are all one."""
    random, one, other = np.random.default_rng(0), (6, 5), (5, 6)
    w = model.ExpertParallelExperts(
        *(random.normal(size=(1, 8, *size)).astype(np.float32) for size in (one, one, other))
    )

    def run(w, *given):
        return decode.apply_experts(w, jnp.int32(0), *given, 8)

    mesh = mesh_of(config_of())
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))
    for n in (1, 5, 40):
        h = random.normal(size=(n, 6)).astype(np.float32)
        weight = random.random((n, 3)).astype(np.float32)
        every = np.einsum("nd,edg->neg", h, w.gate[0])
        every = every / (1 + np.exp(-every)) * np.einsum("nd,edg->neg", h, w.up[0])
        every = np.einsum("neg,egd->ned", every, w.down[0])
        spread = np.argsort(random.random((n, 8)), axis=1)[:, :3]
        for choice in (spread, np.broadcast_to([1, 2, 7], (n, 3))):
            picked = np.take_along_axis(every, choice[..., None], axis=1)
            found = np.asarray(run(w, h, choice.astype(np.int32), weight))
            assert np.abs(found - (weight[..., None] * picked).sum(1)).max() < 1e-4
