"""Write hf_reference.npz: logits of Hugging Face's DeepseekV3ForCausalLM for hf_case.py's cases.

Needs torch and transformers, which nothing else here does: `python tests/make_hf_reference.py`.
The file in the repository was made with torch 2.13.0 (CPU) and transformers 5.23.0.
"""

from types import SimpleNamespace

import numpy as np
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import hf_case

# Rounding moves a score by about 1e-6: a choice closer than that could fall the other way.
SMALLEST_MARGIN = 5e-4


def config(case):
    """The configuration of transformers that says the same as `case.model`."""
    m = SimpleNamespace(**case.model)
    return DeepseekV3Config(
        vocab_size=m.vocabulary,
        hidden_size=m.width,
        num_hidden_layers=m.prefix_layers + m.blocks,
        first_k_dense_replace=m.prefix_layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.heads,
        q_lora_rank=m.q_lora_rank or None,
        kv_lora_rank=m.kv_lora_rank,
        qk_nope_head_dim=m.qk_nope_head_dim,
        qk_rope_head_dim=m.qk_rope_head_dim,
        v_head_dim=m.v_head_dim,
        rope_parameters=rope_parameters(m),
        rope_interleave=case.interleaved,
        intermediate_size=m.hidden,
        moe_intermediate_size=m.expert_hidden,
        n_routed_experts=m.experts,
        n_shared_experts=m.shared_experts,
        num_experts_per_tok=m.experts_per_token,
        n_group=m.expert_groups,
        topk_group=m.groups_per_token,
        norm_topk_prob=m.normalize_weights,
        routed_scaling_factor=m.routed_scaling_factor,
        rms_norm_eps=m.norm_epsilon,
        tie_word_embeddings=m.tied,
        num_mtp_layers=0,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def rope_parameters(m):
    if m.rope_factor == 1:
        return {"rope_type": "default", "rope_theta": m.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": m.rope_theta,
        "factor": m.rope_factor,
        "original_max_position_embeddings": m.rope_original_length,
        "beta_fast": m.rope_beta_fast,
        "beta_slow": m.rope_beta_slow,
        "mscale": m.rope_mscale,
        "mscale_all_dim": m.rope_mscale_all_dim,
    }


def rotary_columns(case):
    """Where each rotary column there is found here; there, pair i is columns 2i and 2i + 1."""
    R = case.model["qk_rope_head_dim"]
    return np.arange(R).reshape(2, R // 2).T.ravel() if case.interleaved else np.arange(R)


def linear(prefix, matrices):
    """torch keeps a matrix as [outputs, inputs]; there each name ends in `_proj`."""
    return {f"{prefix}.{name}_proj.weight": w.T for name, w in matrices.items()}


def attention_names(w, case):
    H, C = case.model["qk_nope_head_dim"], case.model["kv_lora_rank"]
    columns = rotary_columns(case)
    up = w["query"]["up"]
    up = np.concatenate([up[..., :H], up[..., H:][..., columns]], axis=-1).reshape(len(up), -1)
    down = np.concatenate([w["kv_down"][:, :C], w["kv_down"][:, C:][:, columns]], axis=-1)
    matrices = {"q": up}
    names = {"input_layernorm.weight": w["norm"], "self_attn.kv_a_layernorm.weight": w["kv_norm"]}
    if "down" in w["query"]:
        matrices = {"q_a": w["query"]["down"], "q_b": up}
        names["self_attn.q_a_layernorm.weight"] = w["query"]["norm"]
    matrices["kv_b"] = w["kv_up"].reshape(C, -1)
    matrices["o"] = w["out"].reshape(-1, case.model["width"])
    names["self_attn.kv_a_proj_with_mqa.weight"] = down.T
    return names | linear("self_attn", matrices)


def mlp_names(w):
    matrices = {name: w[name] for name in ("gate", "up", "down")}
    return {"post_attention_layernorm.weight": w["norm"]} | linear("mlp", matrices)


def moe_names(w):
    gate_up = np.concatenate([w["experts"]["gate"], w["experts"]["up"]], axis=2)
    return {
        "post_attention_layernorm.weight": w["norm"],
        "mlp.gate.weight": w["router"].T,
        "mlp.gate.e_score_correction_bias": w["bias"],
        "mlp.experts.gate_up_proj": gate_up.transpose(0, 2, 1),
        "mlp.experts.down_proj": w["experts"]["down"].transpose(0, 2, 1),
    } | linear("mlp.shared_experts", w["shared"])


def take(tree, i):
    """Layer i of a stack of layers."""
    return {k: take(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}


def layer_names(layer, case):
    feed_forward = mlp_names(layer["mlp"]) if "mlp" in layer else moe_names(layer["moe"])
    return attention_names(layer["attention"], case) | feed_forward


def state_dict(weights, case):
    """The weights of this repository under the names and in the layouts of transformers."""
    m = SimpleNamespace(**case.model)
    layers = [take(weights["prefix"], i) for i in range(m.prefix_layers)]
    layers += [take(weights["blocks"]["moe"], i) for i in range(m.blocks)]
    output = weights["embedding"] if m.tied else weights["output"]
    names = {
        "model.embed_tokens.weight": weights["embedding"][: m.vocabulary],
        "model.norm.weight": weights["final_norm"],
        "lm_head.weight": output[: m.vocabulary],
    }
    for i, layer in enumerate(layers):
        names |= {f"model.layers.{i}.{k}": v for k, v in layer_names(layer, case).items()}
    return {k: torch.from_numpy(np.array(v, order="C")) for k, v in names.items()}


def margin(gate, logits):
    """The least distance, over tokens, between the last choice and what is next, of groups and of
    experts.
    """
    ranking = logits.sigmoid() + gate.e_score_correction_bias
    groups = ranking.unflatten(-1, (gate.num_group, -1))
    scores = groups.topk(2).values.sum(-1)
    lost, last = next_and_last(scores, gate.topk_group)
    seen = groups.where((scores >= last[:, None])[..., None], -torch.inf)
    next_expert, last_expert = next_and_last(seen.flatten(1), gate.top_k)
    return float(torch.cat([last - lost, last_expert - next_expert]).min())


def next_and_last(scores, k):
    """The score after the k highest, -inf if there is none, and the last of these."""
    ranked = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).sort(descending=True).values
    return ranked[:, k], ranked[:, k - 1]


@torch.no_grad()
def logits(case):
    """[B, T, vocabulary] in float32, after checking that no choice of experts is a close one."""
    model = DeepseekV3ForCausalLM(config(case)).float().eval()
    weights = hf_case.weights(SimpleNamespace(**case.model), case.seed)
    model.load_state_dict(state_dict(weights, case), strict=True)
    margins = []
    for layer in model.model.layers[case.model["prefix_layers"] :]:
        layer.mlp.gate.register_forward_hook(
            lambda gate, _, result: margins.append(margin(gate, result[0]))
        )
    ids = torch.from_numpy(hf_case.tokens(case.model["vocabulary"]).astype(np.int64))
    result = model(input_ids=ids, use_cache=False).logits.numpy()
    if min(margins) < SMALLEST_MARGIN:
        raise ValueError(
            f"two experts are {min(margins):.1e} apart for seed {case.seed}, where rounding could "
            f"choose either; at least {SMALLEST_MARGIN} is wanted. Give the case another seed."
        )
    return result


def main():
    arrays = {name: logits(case) for name, case in hf_case.CASES.items()}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    np.savez_compressed(hf_case.LOGITS_FILE, versions=versions, **arrays)
    print(f"{hf_case.LOGITS_FILE.name}: {len(arrays)} cases, {versions}")


if __name__ == "__main__":
    main()
