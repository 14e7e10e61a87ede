"""The exported modelling file with caches, beams, masks, padding and texts in parts."""

import pytest

pytestmark = [
    pytest.mark.huggingface,
    # Deprecations within torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf.modeling_latent_moe import LatentMoeConfig, LatentMoeForCausalLM  # noqa: E402

SIZES = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "qk_norm": True,
    "attention_bias": True, "attention": "gqa", "q_lora_rank": 5, "kv_lora_rank": 10,
    "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7, "rms_norm_eps": 1e-6,
    "latent_rms_norm_eps": 0.0, "rope_theta": 100.0, "yarn": None, "n_routed_experts": 0,
    "first_k_dense_replace": 1, "decoder_sparse_step": 1, "rope_in_moe_layers": True,
    "eos_token_id": 49, "pad_token_id": 0, "tie_word_embeddings": True,
    "max_position_embeddings": 64, "use_cache": True,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 1.0,
}  # fmt: skip
KINDS = {
    "grouped, window": {"attention_window": 4},
    "grouped, experts": EXPERTS,
    "latent, dense": {"attention": "mla"},
    "latent, experts": {"attention": "mla", "rope_in_moe_layers": False} | EXPERTS,
}


@pytest.fixture(params=KINDS)
def model(request):
    torch.manual_seed(0)
    found = LatentMoeForCausalLM(LatentMoeConfig(**SIZES | KINDS[request.param]))
    return found.eval()


def text(batch=2, length=9):
    return torch.randint(1, 49, (batch, length), generator=torch.Generator().manual_seed(1))


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def generated(model, ids, **flags):
    fixed = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(3)
    return model.generate(ids, **fixed | flags)


def test_text_is_the_same_with_every_cache_and_with_none(model):
    ids, mask = text(), torch.ones(2, 9, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    expected = generated(model, ids, attention_mask=mask, use_cache=False)
    for kind in ("dynamic", "static"):
        flags = {"attention_mask": mask, "cache_implementation": kind}
        if kind == "static" and transformers.__version__ < "5" and model.config.attention == "mla":
            with pytest.raises(ValueError, match="holds keys and values of one width"):
                generated(model, ids, **flags)
        else:
            assert torch.equal(generated(model, ids, **flags), expected)
    for flags in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        one, other = (generated(model, text(), use_cache=u, **flags) for u in (True, False))
        assert torch.equal(one, other)


@torch.no_grad()
def test_masks_of_four_dimensions_are_used(model):
    ids = text()
    causal = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9).clone()
    causal[1, :, 2:, 1] = False
    added = torch.zeros(2, 1, 9, 9).masked_fill(~causal, torch.finfo(torch.float32).min)
    expected = model(ids, attention_mask=causal).logits
    close(model(ids, attention_mask=added).logits, expected)
    assert (model(ids).logits - expected)[1].abs().max() > 1e-3
    close(model(ids).logits[0], expected[0])


@torch.no_grad()
def test_padding_parts_and_embeddings_change_no_logit_of_a_text(model):
    ids, pad, mask = text(1), torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 12)
    expected = model(ids).logits
    mask[:, 9:] = 0
    close(model(torch.cat([ids, pad], 1), attention_mask=mask).logits[:, :9], expected)
    mask, place = mask.flip(1), torch.tensor([[0] * 3 + [*range(9)]])
    left = model(torch.cat([pad, ids], 1), attention_mask=mask, position_ids=place)
    close(left.logits[:, 3:], expected)
    # The cache has another name from transformers 5.24 on.
    for name in ("cache", "past_key_values"):
        past = None
        for first, last in ((0, 4), (4, 6), (6, 9)):
            out = model(ids[:, first:last], **{name: past}, use_cache=True)
            past = out.to_tuple()[1]
            close(out.logits, expected[:, first:last])
    close(model(ids, logits_to_keep=2).logits, expected[:, -2:])
    close(model(ids, logits_to_keep=torch.tensor([1, 5])).logits, expected[:, [1, 5]])
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
