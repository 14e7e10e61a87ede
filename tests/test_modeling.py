"""The exported modelling file computes the logits of transformers' DeepSeek-V3 and reference.py."""

import numpy as np
import pytest

pytestmark = [
    pytest.mark.huggingface,
    # Deprecations within torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
pytest.importorskip("torch")
pytest.importorskip("transformers")

import convert  # noqa: E402
import hf_case  # noqa: E402
import utils  # noqa: E402
from hf_case import model_with  # noqa: E402
from hf_run import (  # noqa: E402
    SIZES,
    make_run,
    opened,
    reference_logits,
    their_logits,
    weights_of,
)

COMMON = {
    "prefix_layers": 1, "dense_layers": 1, "no_rope_layer_interval": 2, "vocab_size": 96,
    "rope_factor": 8.0, "rope_original_max_position_embeddings": 64, "n_group": 2,
}  # fmt: skip
OPTIONS = {
    "latent": COMMON | {
        "q_lora_rank": 9, "scoring_func": "softmax", "norm_topk_prob": False, "rms_norm_eps": 1e-3,
        "rope_mscale": 0.7, "rope_mscale_all_dim": 0.0, "tie_word_embeddings": False,
        "rope_beta_slow": 1e-6,  # the last pair of the ramp is above all
    },
    "grouped": COMMON | {
        "attention": "gqa", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14,
        "attention_bias": True, "qk_norm": True, "sliding_window": 7, "n_shared_experts": 2,
        "rope_original_max_position_embeddings": 6,  # the first pair of the ramp is the last
    },
    "grouped, llama3": {
        "attention": "gqa", "num_key_value_heads": 1, "head_dim": 10, "rope_rope_type": "llama3",
        "rope_factor": 8.0, "rope_original_max_position_embeddings": 64, "vocab_size": 96,
        "blocks": 1,
    },
}  # fmt: skip


def modelling_logits(m, seed, ids, folder):
    """Export a run with weights of this seed, and return the logits of the file in the folder."""
    make_run(folder / "run", seed=seed, model=m)
    flags = ["--run", str(folder / "run"), "--out", str(folder / "out"), "--remote_code"]
    convert.main(["export", *flags])
    found = opened(folder / "out", own=True)
    assert type(found).__name__ == "LatentMoeForCausalLM"
    return their_logits(found, ids)


def test_logits_are_those_of_transformers(tmp_path):
    case = hf_case.CASES["yarn_groups"]
    m = model_with(utils.Model(), **case.model)
    found = modelling_logits(m, case.seed, hf_case.tokens(m.vocab_size), tmp_path)
    with np.load(hf_case.LOGITS_FILE) as file:
        np.testing.assert_allclose(found, file["yarn_groups"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_those_of_the_reference_with_every_option(name, tmp_path):
    m = model_with(utils.Model(), **SIZES | OPTIONS[name])
    ids = hf_case.tokens(m.vocab_size)
    expected = reference_logits(m, weights_of(m, 3), ids)
    found = modelling_logits(m, 3, ids, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
