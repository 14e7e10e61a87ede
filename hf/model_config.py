"""Conversion between Hugging Face's config.json and [model], which share most names."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import utils
from utils import Config, ConfigError

V2, V3, OWN = "deepseek_v2", "deepseek_v3", "latent_moe"
CLASSES = {V2: "DeepseekV2ForCausalLM", V3: "DeepseekV3ForCausalLM", OWN: "LatentMoeForCausalLM"}
ALIASES = {"kimi_k2": V3}  # the same model under another name
LATENT_EPSILON = 1e-6  # in the norms of latents; fixed in V2 and V3

# Settings with the same name and meaning in config.json.
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
REQUIRED_WITH_EXPERTS = (
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("routed_scaling_factor", "n_group", "topk_group"),
)
OPTIONAL = ("q_lora_rank", "rms_norm_eps", "n_shared_experts")  # absent: our default
OTHER = ("scoring_func", "norm_topk_prob", "rope_theta", "tie_word_embeddings")
# Settings that only the project's own modelling file reads.
OWN_FIELDS = (
    *("first_k_dense_replace", "decoder_sparse_step"),
    *("rope_in_moe_layers", "latent_rms_norm_eps"),
)


def unsupported(m: utils.Model) -> list[str]:
    """Return the properties of a model that the classes of transformers cannot represent."""
    moe, latent = m.moe_layers, m.latent_rms_norm_eps or m.rms_norm_eps
    softmax = moe and m.scoring_func == "softmax"
    reasons = {
        "a dense layer between layers with experts (model.decoder_sparse_step "
        f"{m.decoder_sparse_step})": moe and m.dense_layers and m.blocks > 1,
        "layers without rotary embedding (model.rope_in_moe_layers)": moe
        and not m.rope_in_moe_layers,
        f"{latent} in the norms of latents (model.latent_rms_norm_eps, or else "
        f"model.rms_norm_eps), not {LATENT_EPSILON}": latent != LATENT_EPSILON,
        "a single expert (model.n_routed_experts 1)": moe and m.n_routed_experts < 2,
        "normalized softmax scores (model.norm_topk_prob)": softmax and m.norm_topk_prob,
        f"softmax scores with groups of experts (model.n_group {m.n_group})": softmax
        and m.n_group > 1,
        f"softmax scores with model.hidden_size {m.hidden_size} not divisible by "
        f"model.num_attention_heads {m.num_attention_heads}": softmax
        and m.hidden_size % m.num_attention_heads,
        # V2 views rotary pairs as complex numbers, which start at even offsets.
        "softmax scores with an odd model.qk_nope_head_dim or model.kv_lora_rank": softmax
        and (m.qk_nope_head_dim % 2 or m.kv_lora_rank % 2),
    }
    return [reason for reason, applies in reasons.items() if applies]


def kind_of(m: utils.Model) -> str:
    """Return the model type of transformers whose class computes this model, if one does."""
    return V2 if m.moe_layers and m.scoring_func == "softmax" else V3


def to_hf(config: Config, kind: str, dtype: str, end_of_text: int) -> dict[str, Any]:
    """Return the config.json of a model."""
    m, layers = config.model, config.model.num_hidden_layers
    names = REQUIRED + REQUIRED_WITH_EXPERTS + OPTIONAL + OTHER + OWN_FIELDS * (kind == OWN)
    table = {name: getattr(m, name) for name in names}
    length, yarn = config.train.seq_len, None
    if m.rope_scaling.factor > 1:
        length = int(m.rope_scaling.original_max_position_embeddings * m.rope_scaling.factor)
        yarn = {"type": "yarn"} | dataclasses.asdict(m.rope_scaling)
    table |= {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "moe_layer_freq": 1,
        "num_key_value_heads": m.num_attention_heads,
        "q_lora_rank": m.q_lora_rank or None,
        "topk_method": "greedy" if m.scoring_func == "softmax" else "noaux_tc",
        # transformers validates rope_scaling, so the modelling file reads another name.
        "yarn" if kind == OWN else "rope_scaling": yarn,
        "rope_interleave": True,
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
    }
    if kind == OWN:
        file = "modeling_latent_moe"
        return table | {
            "auto_map": {
                "AutoConfig": f"{file}.LatentMoeConfig",
                "AutoModelForCausalLM": f"{file}.{CLASSES[OWN]}",
            }
        }
    return table | {
        "first_k_dense_replace": layers - m.blocks if m.moe_layers else layers,
        "n_shared_experts": max(1, m.n_shared_experts),
    }


class HfModel(NamedTuple):
    """A model as its config.json describes it."""

    model: utils.Model
    kind: str
    interleaved: bool  # the layout of rotary pairs
    max_length: int  # tokens
    scale_block: tuple[int, int] | None  # float8 values with one scale
    skipped_layers: int  # multi-token prediction layers, which are not imported


def from_hf(table: Mapping[str, Any], path: Path) -> HfModel:
    """Return the model of a config.json, with capacity for all tokens at every expert.

    Raises  ConfigError for another architecture, a missing key, or an unsupported setting.
    """
    named = table.get("model_type", "")
    kind = ALIASES.get(named, named)
    if kind not in CLASSES:
        what = ", ".join(table.get("architectures") or ["no architecture"])
        raise ConfigError(
            f"{path} has model_type {named!r} ({what}). Supported are "
            f"{', '.join([*CLASSES, *ALIASES])}."
        )
    layers = _field(table, "num_hidden_layers", path)
    prefix = table.get("first_k_dense_replace") or 0
    has_experts = prefix < layers and bool(table.get("n_routed_experts"))
    default = "softmax" if kind == V2 else "sigmoid"
    table = {
        **table,
        "scoring_func": table.get("scoring_func") or default,
        "norm_topk_prob": bool(table.get("norm_topk_prob", kind != V2)),
    }
    _check_supported(table, kind, has_experts, path)
    if kind == V2:  # with one group, as it then chooses among all experts
        table |= {"n_group": 1, "topk_group": 1}
    needed = REQUIRED + (REQUIRED_WITH_EXPERTS if has_experts else ())
    values = {name: _field(table, name, path) for name in needed}
    values |= {n: table[n] for n in OPTIONAL + REQUIRED_WITH_EXPERTS if table.get(n)}
    if not table.get("n_shared_experts", 1):
        values["n_shared_experts"] = 0
    if has_experts:
        all_tokens = values["n_routed_experts"] / values["num_experts_per_tok"]
        values |= {"capacity_factor": all_tokens, "eval_capacity_factor": all_tokens}
    values |= {
        "n_routed_experts": values["n_routed_experts"] if has_experts else 0,
        "first_k_dense_replace": prefix if has_experts else 0,
        "decoder_sparse_step": 1,
        "scoring_func": table["scoring_func"],
        "norm_topk_prob": table["norm_topk_prob"],
        "latent_rms_norm_eps": LATENT_EPSILON,
        "router_bias_update_speed": 0.0,
        "tie_word_embeddings": bool(table.get("tie_word_embeddings", False)),
    }
    values |= _rope(table, path)
    if kind == OWN:
        values |= {name: _field(table, name, path) for name in OWN_FIELDS}
    quantized = table.get("quantization_config") or {}
    return HfModel(
        _section(utils.Model, values),
        kind,
        bool(table.get("rope_interleave", True)),
        table.get("max_position_embeddings") or 4096,
        tuple(quantized.get("weight_block_size") or (128, 128)) if quantized else None,
        table.get("num_nextn_predict_layers") or 0,
    )


def _section(cls: type, values: Mapping[str, Any]) -> Any:
    """Return a section of the config. JSON may have 1 for the float 1.0."""
    floats = {f.name for f in dataclasses.fields(cls) if f.type is float}
    return cls(**{name: float(v) if name in floats else v for name, v in values.items()})


def _field(table: Mapping[str, Any], name: str, path: Path) -> Any:
    if table.get(name) is None:
        raise ConfigError(f"{path} lacks {name}, which determines what the weights compute.")
    return table[name]


def _rope(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    names = ("rope_scaling", "rope_parameters", "yarn")  # transformers prefers the first
    scaling = next((table[name] for name in names if table.get(name)), {})
    values = {"rope_theta": scaling.get("rope_theta") or table.get("rope_theta") or 10000.0}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return values
    if kind != "yarn" or scaling.get("attention_factor") or not scaling.get("truncate", True):
        raise ConfigError(
            f"{path} has an unsupported rotary embedding: {scaling}. Supported are the default and "
            "yarn, without attention_factor and with truncate."
        )
    defaults = {"mscale": 0.0, "mscale_all_dim": 0.0, "beta_fast": 32.0, "beta_slow": 1.0}
    known = defaults | {name: value for name, value in scaling.items() if value is not None}
    fields = [f.name for f in dataclasses.fields(utils.RopeScaling)]
    found = {name: _field(known, name, path) for name in fields}
    return values | {"rope_scaling": _section(utils.RopeScaling, found)}


def _check_supported(table: Mapping[str, Any], kind: str, has_experts: bool, path: Path) -> None:
    """Raises ConfigError for settings that this project does not implement."""
    v2_experts = has_experts and kind == V2
    scoring_func = {V2: "softmax", V3: "sigmoid"}.get(kind, table["scoring_func"])
    heads, quantized = table.get("num_attention_heads"), table.get("quantization_config") or {}
    is_unsupported = {
        "hidden_act": table.get("hidden_act", "silu") != "silu",
        "attention_bias": table.get("attention_bias"),
        "mlp_bias": table.get("mlp_bias"),
        "moe_layer_freq": table.get("moe_layer_freq", 1) != 1,
        "num_key_value_heads": table.get("num_key_value_heads") not in (None, heads),
        # The class decides what is computed, not the config.
        "scoring_func": has_experts and table["scoring_func"] != scoring_func,
        "norm_topk_prob": v2_experts and table["norm_topk_prob"],
        "topk_method": v2_experts
        and (table.get("n_group") or 1) > 1
        and table.get("topk_method") != "greedy",
        "quantization_config": quantized and quantized.get("quant_method") != "fp8",
    }
    for name, is_so in is_unsupported.items():
        if is_so:
            raise ConfigError(
                f"{path} has {name} {table.get(name)!r}, which is not supported with model_type "
                f"{table['model_type']}."
            )
