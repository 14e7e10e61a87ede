"""Further models and meshes against the one-device reference: each option where it is sharded."""

import pytest

import hf_case
from common import check_step, config_of

GQA = {"attention": "gqa", "head_dim": 10, "capacity_factor": 0.0}
CASES = {
    "dense": config_of(
        (2, 2, 2), tie_word_embeddings=False, moe_layers=0, dense_layers=2, prefix_layers=2,
        blocks=2, train={"microbatches": 3, "global_batch_size": 12, "loss_chunk_tokens": 7},
    ),
    "pipeline of four": config_of(
        (1, 4, 1), train={"remat": "latents,hidden"}, dense_layers=2, capacity_factor=0.0,
        q_lora_rank=24,
    ),
    "splash": config_of(
        (2, 2, 2), virtual=2, segments=True, attention_kernel="splash", tie_word_embeddings=False,
        train={"seq_len": 128, "global_batch_size": 8, "microbatches": 2, "remat": "attention"},
    ),
    # A window in the kernel, with a head of keys for each two of queries on a rank.
    "splash with a window": config_of(
        (1, 1, 2), segments=True, attention_kernel="splash", sliding_window=40, blocks=1,
        train={"seq_len": 128, "global_batch_size": 4, "microbatches": 2, "remat": "none"},
        num_key_value_heads=2, **GQA,
    ),
    "replicas": config_of(
        (2, 1, 2, 2), virtual=2, gather="layer", train={"remat": "latents,hidden"},
        num_key_value_heads=1, qk_norm=True, tie_word_embeddings=False, **GQA, **hf_case.YARN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_routing_match_the_one_device_reference(name):
    check_step(CASES[name], hf_case.weights(CASES[name].model, seed=3))
