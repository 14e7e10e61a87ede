"""The families of models, by `model_type`: class in transformers, names of weights, settings."""

from dataclasses import dataclass, field
from typing import Any

from utils import FULL_ATTENTION, SLIDING_ATTENTION, Model

V2, V3, OWN = "deepseek_v2", "deepseek_v3", "latent_moe"
LLAMA, MISTRAL, QWEN2, QWEN3 = "llama", "mistral", "qwen2", "qwen3"
MIXTRAL, QWEN3_MOE, GPT_OSS = "mixtral", "qwen3_moe", "gpt_oss"
GEMMA3, OLMO2, OLMO3, SMOLLM3 = "gemma3_text", "olmo2", "olmo3", "smollm3"
ALIASES = {"kimi_k2": V3}  # the same model under another name


@dataclass(frozen=True)
class Family:
    """A class of transformers. Settings that all families have are those of hf/model_config.py."""

    hf_class: str
    # Our name in a layer -> Hugging Face's. {} is the number of an expert. A slice follows a tensor
    # of all experts: of its columns, which are ours. No tensor is transposed then.
    names: dict[str, str]
    settings: dict[str, str]  # our name in [model] -> the name in config.json
    fixed: dict[str, Any]  # settings of [model] that all models of the class have
    defaults: dict[str, Any] = field(default_factory=dict)  # of absent settings of config.json

    @property
    def patterned(self) -> bool:
        """Whether config.json says which layers have a window."""
        return self.fixed["layer_types"] is None


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
BIASES = {f"{n}_bias": theirs.replace("weight", "bias") for n, theirs in GROUPED.items()}
NORMS = {
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
}
NORMS_ALL_HEADS = NORMS | {"attention.key_value.norm": "self_attn.k_norm.weight"}
NORMS_AFTER = {
    "attention.norm_after": "post_attention_layernorm.weight",
    "mlp.norm_after": "post_feedforward_layernorm.weight",
}
NORMS_OF_BOTH = NORMS | NORMS_AFTER | {"mlp.norm": "pre_feedforward_layernorm.weight"}
OSS = BIASES | {
    "attention.out_bias": "self_attn.o_proj.bias",
    "attention.sinks": "self_attn.sinks",
    "moe.norm": "post_attention_layernorm.weight",
    "moe.router": "mlp.router.weight",
    "moe.router_bias": "mlp.router.bias",
    "moe.experts.gate": "mlp.experts.gate_up_proj[0::2]",
    "moe.experts.up": "mlp.experts.gate_up_proj[1::2]",
    "moe.experts.down": "mlp.experts.down_proj[::1]",
    "moe.experts.gate_bias": "mlp.experts.gate_up_proj_bias[0::2]",
    "moe.experts.up_bias": "mlp.experts.gate_up_proj_bias[1::2]",
    "moe.output_bias": "mlp.experts.down_proj_bias[::1]",
}
DEEPSEEK_V2 = DENSE | LATENT | MOE | projections("moe.shared", "mlp.shared_experts")
DEEPSEEK_V3 = DEEPSEEK_V2 | {"moe.bias": "mlp.gate.e_score_correction_bias"}
MIXTRAL_MOE = MOE | {
    "moe.router": "block_sparse_moe.gate.weight",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}

# --- settings -------------------------------------------------------------------------------------


def same(*names: str) -> dict[str, str]:
    """Return settings with the same name and meaning in config.json."""
    return {name: name for name in names}


# What a class computes if its family does not say otherwise.
USUAL = {
    name: getattr(Model(), name)
    for name in (
        *("layer_types", "no_rope_layer_interval", "rope_local_base_freq", "qk_norm_all_heads"),
        *("attention_out_bias", "attention_sinks", "query_pre_attn_scalar", "norms", "hidden_act"),
        *("embedding_multiplier", "swiglu_limit", "experts_bias", "sliding_window"),
    )
}
GROUPED_FIXED = USUAL | {"attention": "gqa", "attention_bias": False, "qk_norm": False}
GROUPED_FIXED_EXPERTS = {
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "n_shared_experts": 0,
    "n_group": 1,
    "routed_scaling_factor": 1.0,
}
# Settings of which a model without experts makes no use.
OF_EXPERTS = GROUPED_FIXED_EXPERTS.keys() | {
    *("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "topk_group"),
    *("topk_method", "experts_bias"),
}
WINDOW = same("sliding_window")
MIXTRAL_SETTINGS = WINDOW | {
    "num_experts_per_tok": "num_experts_per_tok",
    "n_routed_experts": "num_local_experts",
    "moe_intermediate_size": "intermediate_size",
}
LATENT_SETTINGS = same(
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("n_shared_experts", "n_group", "topk_group", "topk_method", "scoring_func"),
    *("norm_topk_prob", "routed_scaling_factor"),
)
OWN_SETTINGS = LATENT_SETTINGS | same(
    *("decoder_sparse_step", "attention", "head_dim", "qk_norm", "no_rope_layer_interval"),
    *("latent_rms_norm_eps", "attention_bias"),
)
# Not sliding_window, for which transformers would choose another cache.
OWN_SETTINGS["sliding_window"] = "attention_window"
LATENT_FIXED = USUAL | {"attention": "mla", "latent_rms_norm_eps": 1e-6}
LATENT_DEFAULTS = {"q_lora_rank": 0, "n_shared_experts": 1, "first_k_dense_replace": 0}
# Of folders that were exported before there was grouped-query attention.
OWN_DEFAULTS = {"attention": "mla", "head_dim": 64, "qk_norm": False, "attention_window": 0}
OWN_DEFAULTS["no_rope_layer_interval"] = 0
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


OF_OLMO = {"norms": "after", "qk_norm": True, "qk_norm_all_heads": True}
OLMO_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
# A setting that is None depends on the size of the model: hf/model_config.py.
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
        {"n_routed_experts": "num_experts"}
        | same("num_experts_per_tok", "moe_intermediate_size")
        | same("norm_topk_prob", "decoder_sparse_step"),
        {"qk_norm": True},
        {"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    GPT_OSS: grouped(
        "GptOssForCausalLM",
        OSS,
        MIXTRAL_SETTINGS | same("swiglu_limit"),
        dict.fromkeys(("attention_bias", "attention_out_bias", "attention_sinks"), True)
        | {"experts_bias": True, "layer_types": None},
        {"sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True}
        | {"head_dim": 64, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION)}
        | {"rms_norm_eps": 1e-5, "rope_theta": 150000.0},
    ),
    GEMMA3: grouped(
        "Gemma3ForCausalLM",
        NORMS_OF_BOTH,
        WINDOW | same("query_pre_attn_scalar", "rope_local_base_freq"),
        {"norms": "both", "qk_norm": True, "hidden_act": "gelu_pytorch_tanh"}
        | {"layer_types": None, "embedding_multiplier": None},
        {"sliding_window": 4096, "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4}
        | {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
        | {"layer_types": (SLIDING_ATTENTION,) * 5 + (FULL_ATTENTION,), "rope_theta": 1e6},
    ),
    OLMO2: grouped("Olmo2ForCausalLM", NORMS_ALL_HEADS | NORMS_AFTER, {}, OF_OLMO, OLMO_DEFAULTS),
    OLMO3: grouped(
        "Olmo3ForCausalLM",
        NORMS_ALL_HEADS | NORMS_AFTER,
        WINDOW | same("rope_local_base_freq"),
        OF_OLMO | {"layer_types": None},
        # rope_local_base_freq 0 is that of the other layers
        OLMO_DEFAULTS
        | {"sliding_window": 4096, "rope_local_base_freq": 0.0}
        | {"layer_types": (SLIDING_ATTENTION,) * 3 + (FULL_ATTENTION,)},
    ),
    SMOLLM3: grouped(
        "SmolLM3ForCausalLM",
        {},
        same("no_rope_layer_interval"),
        defaults={"no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
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
        {name: value for name, value in USUAL.items() if name not in OWN_SETTINGS},
        LATENT_DEFAULTS | SIGMOID | OWN_DEFAULTS,
    ),
}
MOE_FAMILIES = (MIXTRAL, QWEN3_MOE, GPT_OSS)  # of the grouped ones
FULL_FAMILIES = (QWEN2, QWEN3, QWEN3_MOE, SMOLLM3)  # whose windows are not supported
GROUPED_FAMILIES = tuple(kind for kind in FAMILIES if kind not in (V2, V3, OWN))
