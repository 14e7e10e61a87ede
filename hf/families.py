"""The families of models, by `model_type`: their class in transformers, and names of weights."""

from typing import NamedTuple

V2, V3, OWN = "deepseek_v2", "deepseek_v3", "latent_moe"
LLAMA, MISTRAL, QWEN2, QWEN3 = "llama", "mistral", "qwen2", "qwen3"
MIXTRAL, QWEN3_MOE = "mixtral", "qwen3_moe"
ALIASES = {"kimi_k2": V3}  # the same model under another name


class Family(NamedTuple):
    """`names` has our name within a layer -> Hugging Face's; {} is the number of an expert."""

    hf_class: str
    names: dict[str, str]


def projections(ours: str, theirs: str, names: tuple[str, ...] = ("gate", "up", "down")) -> dict:
    return {f"{ours}.{name}": f"{theirs}.{name}_proj.weight" for name in names}


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
FAMILIES = {
    LLAMA: Family("LlamaForCausalLM", DENSE | GROUPED),
    MISTRAL: Family("MistralForCausalLM", DENSE | GROUPED),
    MIXTRAL: Family("MixtralForCausalLM", DENSE | GROUPED | MIXTRAL_MOE),
    QWEN2: Family("Qwen2ForCausalLM", DENSE | GROUPED | BIASES),
    QWEN3: Family("Qwen3ForCausalLM", DENSE | GROUPED | NORMS),
    QWEN3_MOE: Family("Qwen3MoeForCausalLM", DENSE | GROUPED | NORMS | MOE),
    V2: Family("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    V3: Family("DeepseekV3ForCausalLM", DEEPSEEK_V3),
    OWN: Family("LatentMoeForCausalLM", DEEPSEEK_V3 | GROUPED | BIASES | NORMS),
}
GROUPED_FAMILIES = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)


def family_of(model_type: str) -> str:
    """Return the key of FAMILIES for a model_type of config.json, or the type itself."""
    return ALIASES.get(model_type, model_type)
