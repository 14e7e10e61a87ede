"""Incremental decoding against the reference, which computes all positions at once."""

import jax
import numpy as np
import pytest

import hf_case
import memory
import model
import reference
from common import (
    batch_of,
    config_of,
    decoded_logits,
    full_logits,
    mesh_of,
    on_mesh,
    relative_error,
    transformer_of,
)
from inference import decode

CASES = {  # shape, model
    "latent": (
        (4, 1, 2),
        {"q_lora_rank": 24, "prefix_layers": 1, "tie_word_embeddings": False, "n_group": 2,
         "latent_rms_norm_eps": 0.1, "no_rope_layer_interval": 2, **hf_case.YARN,
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


SLIDING, FULL = "sliding_attention", "full_attention"
RINGS = {  # of 8 positions
    "mla": {"sliding_window": 8},
    "gqa": {"sliding_window": 5, "attention": "gqa", "head_dim": 10, "num_key_value_heads": 2},
}
APPENDED = [[3, 16, 9, 1], [16, 2, 0, 12], *[[1, 1, 1, 1]] * 9, [16, 5, 11, 0], *[[1] * 4] * 26]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("kind", RINGS)
def test_rings_that_wrap_give_the_logits_of_training_for_rows_of_any_length(
    kind, shape, monkeypatch
):
    monkeypatch.setattr(decode, "KEY_BLOCK", 8)
    layers = {"prefix_layers": 1, "num_hidden_layers": 7, "dense_layers": 1, "moe_layers": 0}
    fields = RINGS[kind] | layers | {"layer_types": (SLIDING, SLIDING, FULL)}
    train = {"global_batch_size": 4, "microbatches": 1, "seq_len": 48}
    config = config_of(shape, train=train, **fields)
    mesh, data = mesh_of(config), batch_of(config, 1)
    w, tokens = transformer_of(config, mesh, hf_case.weights(config.model, 3)), data["tokens"]
    expected = full_logits(config, model.declare(config), mesh)(w, on_mesh(config, mesh, data))[0]

    here = decode.decoding_config(config, shape[0], shape[2])
    w = decode.weight_converter(decode.abstract_weights(here, model.declare(here), mesh))(w)
    extend = jax.jit(decode.extend(here, model.declare(here), mesh), donate_argnums=1)
    cache = decode.empty_cache(decode.abstract_cache(here, mesh, *tokens.shape))
    found, length = np.full(expected.shape, np.nan), np.zeros(4, np.int32)
    for counts in APPENDED:
        count = np.minimum(counts, tokens.shape[1] - length).astype(np.int32)
        new = np.zeros((4, 16 if max(counts) > 1 else 1), np.int32)
        for row, (n, start) in enumerate(zip(count, length, strict=True)):
            new[row, :n] = tokens[row, start : start + n]
        columns = np.broadcast_to(np.arange(new.shape[1], dtype=np.int32), new.shape)
        logits, cache = extend(w, cache, new, length, count, columns)
        for row, (n, start) in enumerate(zip(count, length, strict=True)):
            found[row, start : start + n] = logits[row, :n]
        length += count
    assert (length == 48).all()
    seen = np.isfinite(expected)
    assert relative_error(found[seen], expected[seen]) <= 1e-5


def test_five_layers_of_six_with_a_window_of_512_need_a_quarter_of_the_cache_of_8192_positions():
    def size(**fields):
        config = config_of(num_hidden_layers=12, dense_layers=1, moe_layers=0, **fields)
        return memory.bytes_of(decode.abstract_cache(config, mesh_of(config), 2, 8192))

    types = (*[SLIDING] * 5, FULL)
    assert size(sliding_window=512, layer_types=types) <= 0.25 * size()
    assert size(sliding_window=4096) == size() / 2
    assert size(sliding_window=9000, layer_types=types) == size()
