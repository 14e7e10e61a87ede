"""Each family of grouped-query models: what transformers computes is ours, in both directions.

Needs requirements-hf.txt.
"""

import json

import numpy as np
import pytest

pytestmark = [
    pytest.mark.huggingface,
    # Deprecations within torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import convert  # noqa: E402
from hf_run import greedy, logits, opened, their_logits  # noqa: E402

T = 512
SIZES = {
    "vocab_size": 997, "hidden_size": 36, "intermediate_size": 76, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rope_theta": 5000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
GEMMA3 = {
    "head_dim": 10,
    "sliding_window": 40,
    "query_pre_attn_scalar": 14,
    "rope_local_base_freq": 300.0,
}
OSS = {
    "head_dim": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 33,
    "swiglu_limit": 0.8,
}
CASES = {
    "llama, scaled": ("llama", {"head_dim": 10, "rope_scaling": LLAMA3}),
    "llama, tied, multi-head": (
        "llama",
        {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"head_dim": 12, "sliding_window": None, "rms_norm_eps": 1e-5}),
    "qwen2, yarn": ("qwen2", {"num_attention_heads": 2, "rope_scaling": YARN}),
    "qwen3, tied": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "qwen3_moe, dense layers": (
        "qwen3_moe",
        {"head_dim": 8, "num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": False,
         "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    ),
    # 8 layers are 2 before a block of 6.
    "gemma3_text, linear": (
        "gemma3_text",
        GEMMA3 | {"num_hidden_layers": 8, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3_text, untied": (
        "gemma3_text",
        GEMMA3 | {"layer_types": SLIDING + FULL + SLIDING, "tie_word_embeddings": False},
    ),
    "gemma3_text, no window": ("gemma3_text", GEMMA3 | {"layer_types": FULL * 3}),
    "gpt_oss, yarn": (
        "gpt_oss", OSS | {"num_hidden_layers": 4, "rope_scaling": YARN | {"truncate": False}}
    ),
    "gpt_oss, one block": (
        "gpt_oss",
        OSS | {"head_dim": 6, "swiglu_limit": 7.0, "rope_scaling": YARN | {"truncate": True}},
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-5}),
    "olmo2, multi-head": (
        "olmo2", {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
    ),
    "olmo3, yarn": (
        "olmo3", {"num_hidden_layers": 5, "sliding_window": 43, "rope_scaling": YARN},
    ),
    "olmo3": ("olmo3", {"layer_types": FULL + SLIDING * 2, "sliding_window": 17}),
    "smollm3": ("smollm3", {"num_hidden_layers": 6, "pad_token_id": 0}),
    "smollm3, tied": (
        "smollm3", {"head_dim": 10, "no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "mixtral, window": (
        "mixtral",
        {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 41},
    ),
}  # fmt: skip


def published(name, folder):
    """Return a model with random weights, and save it as transformers does."""
    kind, fields = CASES[name]
    folder.mkdir()
    table = SIZES | {"eos_token_id": 2} | fields | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(table))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    found = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for where, w in found.named_parameters():
            if "norm" in where or "bias" in where:
                w.add_(0.2 * torch.randn_like(w))
            else:
                w.normal_(0, w.shape[-1] ** -0.5)
    found.save_pretrained(folder, max_shard_size="200KB")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_imported_and_exported_with_the_same_logits(name, tmp_path):
    folder = tmp_path / "published"
    found = published(name, folder)
    convert.main(["import", "--folder", str(folder), "--out", str(tmp_path / "run")])
    ids = np.random.default_rng(2).integers(0, SIZES["vocab_size"], (2, T)).astype(np.int32)
    expected = their_logits(found, ids)
    for shape in ((1, 1, 1), (2, 1, 2)):
        np.testing.assert_allclose(logits(tmp_path / "run", ids, shape), expected, atol=1e-4)
        # 64 tokens after texts that are longer than the windows.
        tokens = greedy(tmp_path / "run", ids[:, :49], 64, shape)
        text = np.concatenate([ids[:, :49], tokens], axis=1)
        np.testing.assert_array_equal(their_logits(found, text)[:, 48:-1].argmax(-1), tokens)
    convert.main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "back")])
    again = opened(tmp_path / "back")
    # Without a window Mistral's model is Llama's.
    expected_class = "LlamaForCausalLM" if name == "mistral" else type(found).__name__
    assert type(again).__name__ == expected_class
    np.testing.assert_array_equal(their_logits(again, ids), expected)
