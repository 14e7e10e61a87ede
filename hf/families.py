"""The families of models, by `model_type`: class in transformers, names of weights, settings."""

from dataclasses import dataclass, field
from typing import Any

V2, V3, OWN = "deepseek_v2", "deepseek_v3", "latent_moe"
LLAMA, MISTRAL, QWEN2, QWEN3 = "llama", "mistral", "qwen2", "qwen3"
MIXTRAL, QWEN3_MOE = "mixtral", "qwen3_moe"
ALIASES = {"kimi_k2": V3}  # the same model under another name


@dataclass(frozen=True)
class Family:
    """A class of transformers. Settings that all families have are those of hf/model_config.py."""

    hf_class: str
    names: dict[str, str]  # our name in a layer -> Hugging Face's; {} is the number of an expert
    settings: dict[str, str]  # our name in [model] -> the name in config.json
    fixed: dict[str, Any]  # settings of [model] that all models of the class have
    defaults: dict[str, Any] = field(default_factory=dict)  # of absent settings of config.json


# --- names of weights -----------------------------------------------------------------------------


def projections(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{n}": f"{theirs}.{n}_proj.weight" for n in ("gate", "up", "down")}


DENSE = {
    "attention.norm": "input_layernorm.weight",
    "attention.out": "self_attn.o_proj.weight",
    "mlp.norm": "post_attention_layernorm.weight",
    **projections("mlp", "mlp"),
}
MOE = {
    "moe.norm": "post_attention_layernorm.weight",
    "moe.router": "mlp.gate.weight",
    **projections("moe.experts", "mlp.experts.{}"),
}
LATENT = {
    "attention.query.down": "self_attn.q_a_proj.weight",
    "attention.query.norm": "self_attn.q_a_layernorm.weight",
    "attention.query.up": "self_attn.q_b_proj.weight",  # q_proj without a query latent
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up": "self_attn.kv_b_proj.weight",
}
GROUPED = {
    "attention.query": "self_attn.q_proj.weight",
    "attention.key_value.key": "self_attn.k_proj.weight",
    "attention.key_value.value": "self_attn.v_proj.weight",
}
BIASES = {
    "attention.query_bias": "self_attn.q_proj.bias",
    "attention.key_value.key_bias": "self_attn.k_proj.bias",
    "attention.key_value.value_bias": "self_attn.v_proj.bias",
}
NORMS = {
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
}
DEEPSEEK_V2 = DENSE | LATENT | MOE | projections("moe.shared", "mlp.shared_experts")
DEEPSEEK_V3 = DEEPSEEK_V2 | {"moe.bias": "mlp.gate.e_score_correction_bias"}
MIXTRAL_MOE = {
    "moe.norm": "post_attention_layernorm.weight",
    "moe.router": "block_sparse_moe.gate.weight",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}

# --- settings -------------------------------------------------------------------------------------


def same(*names: str) -> dict[str, str]:
    """Return settings with the same name and meaning in config.json."""
    return {name: name for name in names}


# What a class with grouped-query attention computes if its family does not say otherwise.
GROUPED_FIXED = {"attention": "gqa", "attention_bias": False, "qk_norm": False, "sliding_window": 0}
GROUPED_FIXED_EXPERTS = {
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "rope_in_moe_layers": True,
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "n_shared_experts": 0,
    "n_group": 1,
    "routed_scaling_factor": 1.0,
}
# Settings of which a model without experts makes no use.
OF_EXPERTS = GROUPED_FIXED_EXPERTS.keys() | {
    *("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "topk_group"),
    "topk_method",
}
WINDOW = same("sliding_window")
MIXTRAL_SETTINGS = WINDOW | {
    "num_experts_per_tok": "num_experts_per_tok",
    "n_routed_experts": "num_local_experts",
    "moe_intermediate_size": "intermediate_size",
}
QWEN3_MOE_SETTINGS = {"n_routed_experts": "num_experts"} | same(
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
)
LATENT_SETTINGS = same(
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("n_shared_experts", "n_group", "topk_group", "topk_method", "scoring_func"),
    *("norm_topk_prob", "routed_scaling_factor"),
)
OWN_SETTINGS = LATENT_SETTINGS | same(
    *("decoder_sparse_step", "attention", "head_dim", "qk_norm", "rope_in_moe_layers"),
    *("latent_rms_norm_eps", "attention_bias"),
)
# Not sliding_window, for which transformers would choose another cache.
OWN_SETTINGS["sliding_window"] = "attention_window"
LATENT_FIXED = {
    "attention": "mla",
    "sliding_window": 0,
    "latent_rms_norm_eps": 1e-6,
    "rope_in_moe_layers": True,
}
LATENT_DEFAULTS = {"q_lora_rank": 0, "n_shared_experts": 1, "first_k_dense_replace": 0}
# Of folders that were exported before there was grouped-query attention.
OWN_DEFAULTS = {"attention": "mla", "head_dim": 64, "qk_norm": False, "attention_window": 0}
SIGMOID = {"scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"}
SOFTMAX = {"scoring_func": "softmax", "norm_topk_prob": False, "topk_method": "greedy"}


def grouped(
    hf_class: str,
    names: dict[str, str],
    settings: dict[str, str] | None = None,
    fixed: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> Family:
    """Return a family of grouped-query attention."""
    settings = same("num_key_value_heads", "head_dim") | (settings or {})
    fixed = GROUPED_FIXED | GROUPED_FIXED_EXPERTS | (fixed or {})
    fixed = {name: value for name, value in fixed.items() if name not in settings}
    return Family(hf_class, DENSE | GROUPED | names, settings, fixed, defaults or {})


FAMILIES = {
    LLAMA: grouped("LlamaForCausalLM", {}),
    MISTRAL: grouped("MistralForCausalLM", {}, WINDOW, defaults={"sliding_window": 4096}),
    MIXTRAL: grouped(
        "MixtralForCausalLM",
        MIXTRAL_MOE,
        MIXTRAL_SETTINGS,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    QWEN2: grouped("Qwen2ForCausalLM", BIASES, fixed={"attention_bias": True}),
    QWEN3: grouped("Qwen3ForCausalLM", NORMS, fixed={"qk_norm": True}),
    QWEN3_MOE: grouped(
        "Qwen3MoeForCausalLM",
        NORMS | MOE,
        QWEN3_MOE_SETTINGS,
        {"qk_norm": True},
        {"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    V2: Family(
        "DeepseekV2ForCausalLM",
        DEEPSEEK_V2,
        LATENT_SETTINGS,
        LATENT_FIXED | {"scoring_func": "softmax", "norm_topk_prob": False},
        LATENT_DEFAULTS | SOFTMAX,
    ),
    V3: Family(
        "DeepseekV3ForCausalLM",
        DEEPSEEK_V3,
        LATENT_SETTINGS,
        LATENT_FIXED | {"scoring_func": "sigmoid"},
        LATENT_DEFAULTS | SIGMOID,
    ),
    OWN: Family(
        "LatentMoeForCausalLM",
        DEEPSEEK_V3 | GROUPED | BIASES | NORMS,
        OWN_SETTINGS,
        {},
        LATENT_DEFAULTS | SIGMOID | OWN_DEFAULTS,
    ),
}
GROUPED_FAMILIES = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
