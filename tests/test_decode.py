"""Incremental decoding against the reference, which computes all positions at once."""

import numpy as np
import pytest

import hf_case
import reference
from common import batch_of, config_of, decoded_logits
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
    "two layers with experts, a window and positions, and one without any of the last two": (
        (2, 1, 1),
        {"layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
         "sliding_window": 5, "no_rope_layer_interval": 3, "num_hidden_layers": 6,
         "dense_layers": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_the_logits_of_the_reference(name, monkeypatch):
    monkeypatch.setattr(decode, "KEY_BLOCK", 8)  # several blocks
    shape, fields = CASES[name]
    config = config_of(shape, train={"global_batch_size": 8, "seq_len": 24}, **fields)
    tree, tokens = hf_case.weights(config.model, 3), batch_of(config, 1)["tokens"]
    expected = np.asarray(reference.logits(tree, tokens, config.model))
    found = decoded_logits(config, tree, tokens)
    real = np.isfinite(expected)
    assert (real == np.isfinite(found)).all() and real.any()
    assert np.abs(np.where(real, found, 0) - np.where(real, expected, 0)).max() < 1e-4
