"""The exported modelling file passes what transformers' common model tests check.

Equivalents of ModelTesterMixin and GenerationTesterMixin, which the wheel does not contain.
Needs requirements-hf.txt.
"""

import pytest

pytestmark = [
    pytest.mark.huggingface,
    # Deprecations within torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf.modeling_latent_moe import (  # noqa: E402
    LatentMoeConfig,
    LatentMoeForCausalLM,
    LatentMoeModel,
)

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
    "grouped, dense": {},
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
    flags = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    } | flags
    return model.generate(ids, **flags)


CACHES = ["dynamic", "static", "offloaded", "offloaded_static"]


@pytest.mark.parametrize("kind", CACHES)
def test_text_is_the_same_with_every_cache_and_with_none(kind, model):
    if "offloaded" in kind and not torch.cuda.is_available():
        pytest.skip("transformers offloads from a GPU only")
    if "static" in kind and transformers.__version__ < "5" and model.config.attention == "mla":
        with pytest.raises(ValueError, match="holds keys and values of one width"):
            generated(model, text(), cache_implementation=kind)
        return
    ids, mask = text(), torch.ones(2, 9, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    expected = generated(model, ids, attention_mask=mask, use_cache=False)
    found = generated(model, ids, attention_mask=mask, cache_implementation=kind)
    assert torch.equal(found, expected)


@torch.no_grad()
def test_beams_and_samples_are_the_same_with_the_cache(model):
    for flags in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            found.append(generated(model, text(), use_cache=use_cache, **flags))
        assert torch.equal(*found)


@torch.no_grad()
def test_hidden_states_and_attentions_are_returned(model):
    ids = text()
    plain = model(ids)
    out = model(ids, output_hidden_states=True, output_attentions=True)
    close(out.logits, plain.logits)
    assert plain.hidden_states is None and plain.attentions is None
    assert [h.shape for h in out.hidden_states] == [(2, 9, 24)] * 4
    close(model.lm_head(out.hidden_states[-1]), plain.logits)
    assert [a.shape for a in out.attentions] == [(2, 4, 9, 9)] * 3
    for weights in out.attentions:
        close(weights.sum(-1), torch.ones(2, 4, 9))
        assert not weights.triu(1).any()


def test_hidden_states_and_attentions_keep_their_gradients(model):
    out = model(text(), output_hidden_states=True, output_attentions=True)
    kept = [out.hidden_states[0], out.attentions[0]]
    for tensor in kept:
        tensor.retain_grad()
    out.logits[0, 1].sum().backward()
    assert all(tensor.grad is not None for tensor in kept)


@torch.no_grad()
def test_tuples_have_the_values_of_dictionaries(model):
    flags = {"output_hidden_states": True, "use_cache": False}
    found, expected = model(text(), return_dict=False, **flags), model(text(), **flags)
    close(found[0], expected.logits)
    close(found[1][-1], expected.hidden_states[-1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_same_with_checkpointing(reentrant, model):
    def gradients():
        model.zero_grad()
        model(text(), labels=text(), use_cache=True).loss.backward()
        return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}

    model.train()
    expected = gradients()
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    found = gradients()
    assert len(calls) == 2  # the second to recompute
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient)


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
def test_padding_on_the_left_or_right_changes_no_logit_of_text(model):
    ids, pad, mask = text(1), torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 12)
    expected = model(ids).logits
    mask[:, 9:] = 0
    close(model(torch.cat([ids, pad], 1), attention_mask=mask).logits[:, :9], expected)
    mask, place = mask.flip(1), torch.tensor([[0] * 3 + [*range(9)]])
    left = model(torch.cat([pad, ids], 1), attention_mask=mask, position_ids=place)
    close(left.logits[:, 3:], expected)


@torch.no_grad()
def test_a_text_in_parts_has_the_logits_of_the_whole(model):
    ids = text()
    expected, past = model(ids).logits, None
    for first, last in ((0, 4), (4, 6), (6, 9)):
        out = model(ids[:, first:last], past_key_values=past, use_cache=True)
        past = out.to_tuple()[1]
        close(out.logits, expected[:, first:last])
    close(model(ids, logits_to_keep=2).logits, expected[:, -2:])
    close(model(ids, logits_to_keep=torch.tensor([1, 5])).logits, expected[:, [1, 5]])


@torch.no_grad()
def test_embeddings_as_input_give_the_same(model):
    ids = text()
    embeddings = model.get_input_embeddings()(ids)
    close(model(inputs_embeds=embeddings).logits, model(ids).logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@torch.no_grad()
def test_the_base_class_opens_a_saved_folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    base, again = (c.from_pretrained(tmp_path).eval() for c in (LatentMoeModel, type(model)))
    ids = text()
    expected = model(ids, output_hidden_states=True)
    close(base(ids).last_hidden_state, expected.hidden_states[-1])
    close(again(ids).logits, expected.logits)


@torch.no_grad()
def test_the_vocabulary_can_be_resized(model):
    expected = model(text()).logits
    model.resize_token_embeddings(56)
    found = model(text()).logits
    assert found.shape[-1] == 56
    close(found[..., :50], expected)
    assert model.lm_head.weight is model.get_input_embeddings().weight
