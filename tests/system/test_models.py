"""Further models and meshes against the one-device reference: each option where it is sharded."""

import jax
import jax.numpy as jnp
import pytest

import hf_case
import model
import sharded_model
from common import (
    batch_of,
    canonical,
    check_step,
    config_of,
    errors,
    mesh_of,
    on_mesh,
    transformer_of,
)

GQA = {"attention": "gqa", "head_dim": 10, "capacity_factor": 0.0}
EIGHTS = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}  # for cuDNN
PATTERN = {"sliding_window": 5, "layer_types": ("sliding_attention",) * 2 + ("full_attention",)}
GEMMA = {
    "norms": "both",
    "qk_norm": True,
    "hidden_act": "gelu_pytorch_tanh",
    "embedding_multiplier": 4.9,
    "query_pre_attn_scalar": 15.0,
    "rope_local_base_freq": 100.0,
    "rope_rope_type": "linear",
}
OSS = (
    GQA
    | PATTERN
    | hf_case.YARN
    | {
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_sinks": True,
        "experts_bias": True,
        "swiglu_limit": 1.5,
        "scoring_func": "softmax",
        "n_shared_experts": 0,
        "dense_layers": 0,
        "num_hidden_layers": 6,
        "rope_truncate": False,
        "eval_capacity_factor": 0.0,
    }
)
CASES = {
    # Blocks of dense, experts, dense, experts, dense, experts. The third and last have no window.
    "pattern": config_of(
        (2, 2, 2), gather="layer", num_hidden_layers=12, dense_layers=1, **GQA, **PATTERN,
    ),
    # Blocks of two layers with experts and a window, of which the second has no position, and one
    # without a window, as the dense layer before the blocks.
    "pattern of experts": config_of(
        (2, 1, 2), num_hidden_layers=7, prefix_layers=1, dense_layers=0, capacity_factor=0.0,
        train={"layers": "scanned"}, layer_types=("full_attention",) + ("sliding_attention",) * 2,
        sliding_window=5, no_rope_layer_interval=3,
    ),
    "pattern, unrolled": config_of(
        num_hidden_layers=8, moe_layers=0, dense_layers=2, layer_types=("sliding_attention",) * 3
        + ("full_attention",), sliding_window=3, no_rope_layer_interval=4,
    ),
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
    # Every option of Gemma 3, of OLMo 3, and of gpt-oss with its experts in either layout.
    "gemma": config_of(
        (2, 2, 2), num_hidden_layers=8, prefix_layers=2, moe_layers=0, dense_layers=3,
        blocks=2, **GQA, **PATTERN, **GEMMA,
    ),
    "olmo": config_of(
        (2, 1, 4), num_hidden_layers=3, dense_layers=3, moe_layers=0, norms="after", qk_norm=True,
        qk_norm_all_heads=True, num_key_value_heads=2, rope_local_base_freq=500.0, segments=True,
        **GQA, **PATTERN, **hf_case.YARN,
    ),
    "gpt-oss": config_of((2, 2, 2), blocks=2, gather="layer", **OSS),
    "gpt-oss, sharded experts": config_of(
        (2, 1, 2), attention_kernel="splash", experts_layout="sharded",
        train={"seq_len": 128, "global_batch_size": 4, "microbatches": 2, "remat": "hidden"}, **OSS,
    ),
    # With context: each kernel, documents, windows, replicas, and the options of gpt-oss.
    "context": config_of((1, 1, 1, 8, 1), train={"microbatches": 1, "remat": "full"}),
    "context of gathered weights": config_of(
        (1, 2, 1, 2, 2), gather="layer", segments=True, q_lora_rank=24, prefix_layers=1,
        experts_layout="sharded", tie_word_embeddings=False, n_shared_experts=2, **hf_case.YARN,
    ),
    "context of four": config_of(
        (1, 1, 1, 4, 2), num_hidden_layers=12, dense_layers=1, segments=True,
        num_key_value_heads=1, qk_norm=True, **GQA, **PATTERN,
    ),
    "context of gpt-oss": config_of((2, 1, 1, 4, 1), blocks=2, **OSS),
    "splash in context": config_of(
        (1, 1, 1, 2, 2), segments=True, attention_kernel="splash", blocks=1, sliding_window=200,
        train={"seq_len": 512, "global_batch_size": 4, "microbatches": 2, "remat": "attention"},
    ),
    "cudnn in context": config_of(
        (1, 1, 1, 4, 1), attention_kernel="cudnn", blocks=1, **EIGHTS,
        train={"seq_len": 64, "global_batch_size": 4, "microbatches": 2, "remat": "none"},
    ),
    "triton in context": config_of(
        (1, 1, 1, 2, 2), attention_kernel="triton", blocks=1, attention_sinks=True,
        train={"seq_len": 512, "global_batch_size": 4, "microbatches": 2, "remat": "full"}, **GQA,
    ),
    "replicas": config_of(
        (2, 1, 2, 2), virtual=2, gather="layer", train={"remat": "latents,hidden"},
        num_key_value_heads=1, qk_norm=True, tie_word_embeddings=False, **GQA, **hf_case.YARN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_routing_match_the_one_device_reference(name):
    check_step(CASES[name], hf_case.weights(CASES[name].model, seed=3))


@pytest.mark.parametrize(("shape", "remat"), [((1, 1, 1), "none"), ((2, 1, 2), "full")], ids=str)
def test_unrolled_layers_have_the_dropout_of_scanned_ones(shape, remat):
    """Forward, and where the backward pass repeats it."""
    fields = {"prefix_layers": 1, "dense_layers": 1, "blocks": 2, "dropout": 0.3}

    def step(layers):
        config = config_of(
            shape, train={"microbatches": 2, "remat": remat, "layers": layers}, **fields
        )
        mesh = mesh_of(config)
        assert sharded_model.is_unrolled(config, "cpu") == (layers == "unrolled")
        run = jax.jit(sharded_model.loss_and_gradients(config, model.declare(config), mesh))
        w = transformer_of(config, mesh, hf_case.weights(config.model, seed=3))
        data = on_mesh(config, mesh, batch_of(config))
        (grads, stats), (_, later) = (run(w, data, jnp.int32(number)) for number in (3, 4))
        assert abs(stats.loss - later.loss) > 1e-3, "dropout differs between steps"
        return canonical(config, grads) | {"loss": stats.loss}

    found = errors(step("unrolled"), step("scanned"))
    assert not {leaf: error for leaf, error in found.items() if error > 2e-5}
