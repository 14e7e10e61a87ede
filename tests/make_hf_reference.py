"""Write hf_reference.npz: logits of Hugging Face's DeepseekV3ForCausalLM for hf_case.py's cases.

Needs torch and transformers: `python tests/make_hf_reference.py`.
The file in the repository was made with torch 2.13.0 (CPU) and transformers 5.23.0.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hf_case
import utils
from hf_case import model_with

# Rounding changes a score by about 1e-6, which could change a choice with a smaller margin.
SMALLEST_MARGIN = 5e-4


def config(case):
    """Return the transformers config of `case.model`."""
    m = model_with(utils.Model(), **case.model)
    return DeepseekV3Config(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        num_hidden_layers=m.first_k_dense_replace + m.blocks,
        first_k_dense_replace=m.first_k_dense_replace,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_attention_heads,
        q_lora_rank=m.q_lora_rank or None,
        kv_lora_rank=m.kv_lora_rank,
        qk_nope_head_dim=m.qk_nope_head_dim,
        qk_rope_head_dim=m.qk_rope_head_dim,
        v_head_dim=m.v_head_dim,
        rope_parameters=rope_parameters(m),
        rope_interleave=case.interleaved,
        intermediate_size=m.intermediate_size,
        moe_intermediate_size=m.moe_intermediate_size,
        n_routed_experts=m.n_routed_experts,
        n_shared_experts=m.n_shared_experts,
        num_experts_per_tok=m.num_experts_per_tok,
        n_group=m.n_group,
        topk_group=m.topk_group,
        norm_topk_prob=m.norm_topk_prob,
        routed_scaling_factor=m.routed_scaling_factor,
        rms_norm_eps=m.rms_norm_eps,
        tie_word_embeddings=m.tie_word_embeddings,
        num_mtp_layers=0,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def rope_parameters(m):
    if m.rope_scaling.factor == 1:
        return {"rope_type": "default", "rope_theta": m.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": m.rope_theta,
        "factor": m.rope_scaling.factor,
        "original_max_position_embeddings": m.rope_scaling.original_max_position_embeddings,
        "beta_fast": m.rope_scaling.beta_fast,
        "beta_slow": m.rope_scaling.beta_slow,
        "mscale": m.rope_scaling.mscale,
        "mscale_all_dim": m.rope_scaling.mscale_all_dim,
    }


def rotary_columns(case):
    """Return our column of each rotary column; theirs has pair i in columns 2i and 2i + 1."""
    R = case.model["qk_rope_head_dim"]
    return np.arange(R).reshape(2, R // 2).T.ravel() if case.interleaved else np.arange(R)


def linear(prefix, matrices):
    """Name and transpose matrices: torch stores [outputs, inputs], and names end in `_proj`."""
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
    matrices["o"] = w["out"].reshape(-1, case.model["hidden_size"])
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
    m = model_with(utils.Model(), **case.model)
    layers = [take(weights["prefix"], i) for i in range(m.first_k_dense_replace)]
    layers += [take(weights["blocks"]["moe"], i) for i in range(m.blocks)]
    output = weights["embedding"] if m.tie_word_embeddings else weights["output"]
    names = {
        "model.embed_tokens.weight": weights["embedding"][: m.vocab_size],
        "model.norm.weight": weights["final_norm"],
        "lm_head.weight": output[: m.vocab_size],
    }
    for i, layer in enumerate(layers):
        names |= {f"model.layers.{i}.{k}": v for k, v in layer_names(layer, case).items()}
    return {k: torch.from_numpy(np.array(v, order="C")) for k, v in names.items()}


def margin(gate, logits):
    """Return the least margin over tokens between the last chosen group or expert and the next."""
    ranking = logits.sigmoid() + gate.e_score_correction_bias
    groups = ranking.unflatten(-1, (gate.num_group, -1))
    scores = groups.topk(2).values.sum(-1)
    lost, last = next_and_last(scores, gate.topk_group)
    seen = groups.where((scores >= last[:, None])[..., None], -torch.inf)
    next_expert, last_expert = next_and_last(seen.flatten(1), gate.top_k)
    return float(torch.cat([last - lost, last_expert - next_expert]).min())


def next_and_last(scores, k):
    """Return the score after the k highest, -inf if there is none, and the lowest of those k."""
    ranked = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).sort(descending=True).values
    return ranked[:, k], ranked[:, k - 1]


@torch.no_grad()
def logits(case):
    """Return logits [B, T, V] in float32. Raises ValueError if a choice of experts is too close."""
    model = DeepseekV3ForCausalLM(config(case)).float().eval()
    weights = hf_case.weights(model_with(utils.Model(), **case.model), case.seed)
    model.load_state_dict(state_dict(weights, case), strict=True)
    margins = []
    for layer in model.model.layers[case.model["prefix_layers"] :]:
        layer.mlp.gate.register_forward_hook(
            lambda gate, _, result: margins.append(margin(gate, result[0]))
        )
    ids = torch.from_numpy(hf_case.tokens(case.model["vocab_size"]).astype(np.int64))
    result = model(input_ids=ids, use_cache=False).logits.numpy()
    if min(margins) < SMALLEST_MARGIN:
        raise ValueError(
            f"two experts are {min(margins):.1e} apart for seed {case.seed}, so rounding could "
            f"select either; the minimum is {SMALLEST_MARGIN}. Give the case another seed."
        )
    return result


def main():
    arrays = {name: logits(case) for name, case in hf_case.CASES.items()}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    np.savez_compressed(hf_case.LOGITS_FILE, versions=versions, **arrays)
    print(f"{hf_case.LOGITS_FILE.name}: {len(arrays)} cases, {versions}")


if __name__ == "__main__":
    main()
