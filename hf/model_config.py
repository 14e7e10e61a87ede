"""Conversion between Hugging Face's config.json and [model], which share most names."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import utils
from hf.families import (
    ALIASES,
    FAMILIES,
    GROUPED_FAMILIES,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OWN,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    V2,
    V3,
    family_of,
)
from utils import Config, ConfigError

Ids = int | list[int]  # one token or several

CLASSES = {kind: family.hf_class for kind, family in FAMILIES.items()}
LATENT_EPSILON = 1e-6  # in the norms of latents; fixed in V2 and V3

# Settings with the same name and meaning in config.json.
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    "num_attention_heads",
)
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GROUPED = ("num_key_value_heads", "head_dim")
EXPERTS = (
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("routed_scaling_factor", "n_group", "topk_group"),
)
OPTIONAL = ("q_lora_rank", "rms_norm_eps", "n_shared_experts")  # absent: our default
OTHER = ("rope_theta", "tie_word_embeddings")
# Settings that only the project's own modelling file reads.
OWN_FIELDS = (
    *("first_k_dense_replace", "decoder_sparse_step", "attention", "head_dim", "qk_norm"),
    *("rope_in_moe_layers", "latent_rms_norm_eps"),
)
# Settings that no weight holds, and training does not change.
NO_WEIGHT = (
    *("max_position_embeddings", "bos_token_id", "pad_token_id", "initializer_range"),
    *("attention_dropout", "router_aux_loss_coef"),
)
# The name of n_routed_experts. transformers 5 saves both under the first.
EXPERTS_NAME = {MIXTRAL: "num_local_experts", QWEN3_MOE: "num_experts"}
SCALING = {  # settings of rope_scaling beside its factor and original length, by type
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
DROPLESS = {"capacity_factor": 0.0, "eval_capacity_factor": 0.0}


# --- to config.json -------------------------------------------------------------------------------


def kind_of(m: utils.Model) -> str:
    """Return the model type of transformers whose class computes this model, if one does."""
    if m.attention == "gqa":
        if m.moe_layers:
            return QWEN3_MOE if m.qk_norm else MIXTRAL
        if m.attention_bias:
            return QWEN2
        return QWEN3 if m.qk_norm else MISTRAL if m.sliding_window else LLAMA
    return V2 if m.moe_layers and m.scoring_func == "softmax" else V3


def unsupported(m: utils.Model) -> list[str]:
    """Return the settings of a model that the classes of transformers cannot represent."""
    settings = _unsupported_grouped(m) if m.attention == "gqa" else _unsupported_latent(m)
    return [f"model.{name} {utils.get(m, name)}" for name, is_so in settings.items() if is_so]


def _unsupported_latent(m: utils.Model) -> dict[str, Any]:
    moe, scaling = m.moe_layers, m.rope_scaling
    softmax = moe and m.scoring_func == "softmax"
    epsilon = "latent_rms_norm_eps" if m.latent_rms_norm_eps else "rms_norm_eps"
    return {
        "decoder_sparse_step": moe and m.dense_layers and m.blocks > 1,  # dense between experts
        "rope_in_moe_layers": moe and not m.rope_in_moe_layers,
        "sliding_window": m.sliding_window,
        "rope_scaling.rope_type": scaling.factor > 1 and scaling.rope_type != "yarn",
        epsilon: getattr(m, epsilon) != LATENT_EPSILON,
        "n_routed_experts": moe and m.n_routed_experts < 2,
        "norm_topk_prob": softmax and m.norm_topk_prob,
        "topk_method": moe
        and m.n_group > 1
        and m.topk_method != ("group_limited_greedy" if softmax else "noaux_tc"),
        "hidden_size": softmax and m.hidden_size % m.num_attention_heads,
        # V2 views rotary pairs as complex numbers, which start at even offsets.
        "qk_nope_head_dim": softmax and m.qk_nope_head_dim % 2,
        "kv_lora_rank": softmax and m.kv_lora_rank % 2,
    }


def _unsupported_grouped(m: utils.Model) -> dict[str, Any]:
    kind, moe, scaling = kind_of(m), m.moe_layers, m.rope_scaling
    yarn = scaling.factor > 1 and scaling.rope_type == "yarn"
    return {
        "attention_bias": m.attention_bias and kind != QWEN2,
        "qk_norm": m.qk_norm and kind not in (QWEN3, QWEN3_MOE),
        "sliding_window": m.sliding_window and kind not in (MISTRAL, MIXTRAL),
        "rope_scaling.mscale_all_dim": yarn and scaling.mscale_all_dim,
        "hidden_size": kind == LLAMA and m.hidden_size % m.num_attention_heads,
        "first_k_dense_replace": moe and m.first_k_dense_replace,
        "decoder_sparse_step": moe and kind == MIXTRAL and m.decoder_sparse_step > 1,
        "rope_in_moe_layers": moe and not m.rope_in_moe_layers,
        "scoring_func": moe and m.scoring_func != "softmax",
        "norm_topk_prob": kind == MIXTRAL and not m.norm_topk_prob,
        "n_shared_experts": moe and m.n_shared_experts,
        "n_group": moe and m.n_group > 1,
        "routed_scaling_factor": moe and m.routed_scaling_factor != 1,
    }


def to_hf(config: Config, kind: str, dtype: str, end_of_text: Ids) -> dict[str, Any]:
    """Return the config.json of a model."""
    m, scaling, length = config.model, None, config.train.seq_len
    if (s := m.rope_scaling).factor > 1:
        length = int(s.original_max_position_embeddings * s.factor)
        names = ("rope_type", "factor", "original_max_position_embeddings", *SCALING[s.rope_type])
        scaling = {name: getattr(s, name) for name in names}
    table = _grouped_to_hf if kind in GROUPED_FAMILIES else _latent_to_hf
    return {name: getattr(m, name) for name in (*REQUIRED, "rms_norm_eps", *OTHER)} | {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
        **table(m, kind, scaling),
    }


def _latent_to_hf(m: utils.Model, kind: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    grouped, layers = m.attention == "gqa", m.num_hidden_layers
    greedy = m.scoring_func == "softmax" and m.n_group == 1
    yarn = scaling and {"type": "yarn"} | scaling
    names = (*LATENT, *EXPERTS, *OPTIONAL, "scoring_func", "norm_topk_prob")
    table = {name: getattr(m, name) for name in names} | {
        "moe_layer_freq": 1,
        "num_key_value_heads": m.num_key_value_heads if grouped else m.num_attention_heads,
        "q_lora_rank": m.q_lora_rank or None,
        "topk_method": "greedy" if greedy else m.topk_method,
        "rope_interleave": True,
        "attention_bias": grouped and m.attention_bias,
        "num_nextn_predict_layers": 0,
    }
    if kind == OWN:
        file = "modeling_latent_moe"
        return (
            table
            | {name: getattr(m, name) for name in OWN_FIELDS}
            | {
                # transformers validates rope_scaling, so the modelling file reads another name.
                "yarn": yarn,
                # Not sliding_window, for which transformers would choose another cache.
                "attention_window": m.sliding_window,
                "auto_map": {
                    "AutoConfig": f"{file}.LatentMoeConfig",
                    "AutoModel": f"{file}.LatentMoeModel",
                    "AutoModelForCausalLM": f"{file}.{CLASSES[OWN]}",
                },
            }
        )
    return table | {
        "rope_scaling": yarn,
        "first_k_dense_replace": layers - m.blocks if m.moe_layers else layers,
        "n_shared_experts": max(1, m.n_shared_experts),
    }


def _grouped_to_hf(m: utils.Model, kind: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    if scaling:
        # Without the second the first has no effect, and these classes have no factor on scores.
        scaling = {name: v for name, v in scaling.items() if not name.startswith("mscale")}
    table = {name: getattr(m, name) for name in GROUPED} | {
        "rope_scaling": scaling,
        "attention_bias": False,
        "sliding_window": m.sliding_window or None,
    }
    if kind == MIXTRAL:
        table["intermediate_size"] = m.moe_intermediate_size
    if kind in EXPERTS_NAME:
        table |= {EXPERTS_NAME[kind]: m.n_routed_experts}
        table |= {"num_experts_per_tok": m.num_experts_per_tok}
    if kind == QWEN3_MOE:
        names = "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"
        table |= {name: getattr(m, name) for name in names} | {"mlp_only_layers": []}
    return table


def with_base(table: dict[str, Any], base: Mapping[str, Any], tuned_length: int) -> dict[str, Any]:
    """Return a config.json with what no weight holds from that of the imported base."""
    kept = {name: base[name] for name in NO_WEIGHT if base.get(name) is not None}
    length = max(kept.get("max_position_embeddings", 0), tuned_length)
    return table | kept | ({"max_position_embeddings": length} if base else {})


# --- from config.json -----------------------------------------------------------------------------


class HfModel(NamedTuple):
    """A model as its config.json describes it."""

    model: utils.Model
    kind: str
    interleaved: bool  # the layout of rotary pairs
    max_length: int  # tokens
    scale_block: tuple[int, int] | None  # float8 values with one scale
    skipped_layers: int  # multi-token prediction layers, which are not imported


def from_hf(table: Mapping[str, Any], path: Path) -> HfModel:
    """Return the model of a config.json, whose experts are dropless.

    Raises  ConfigError for another architecture, a missing key, or an unsupported setting.
    """
    named = table.get("model_type", "")
    kind = family_of(named)
    if kind not in CLASSES:
        what = ", ".join(table.get("architectures") or ["no architecture"])
        raise ConfigError(
            f"{path} has model_type {named!r} ({what}). Supported are "
            f"{', '.join([*CLASSES, *ALIASES])}."
        )
    values = {name: _field(table, name, path) for name in REQUIRED} | {
        "decoder_sparse_step": 1,
        "router_bias_update_speed": 0.0,
        "tie_word_embeddings": bool(table.get("tie_word_embeddings", False)),
    }
    grouped, quantized = kind in GROUPED_FAMILIES, table.get("quantization_config") or {}
    values |= (_grouped_from_hf if grouped else _latent_from_hf)(table, kind, path)
    values |= _rope(table, path, 1e6 if kind == MIXTRAL else 1e4)
    return HfModel(
        _section(utils.Model, values),
        kind,
        not grouped and bool(table.get("rope_interleave", True)),
        table.get("max_position_embeddings") or 4096,
        tuple(quantized.get("weight_block_size") or (128, 128)) if quantized else None,
        (table.get("num_nextn_predict_layers") or 0) * (kind == V3),
    )


def _latent_from_hf(table: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    prefix = table.get("first_k_dense_replace") or 0
    has_experts = prefix < table["num_hidden_layers"] and bool(table.get("n_routed_experts"))
    default = "softmax" if kind == V2 else "sigmoid"
    table = {
        **table,
        "scoring_func": table.get("scoring_func") or default,
        "norm_topk_prob": bool(table.get("norm_topk_prob", kind != V2)),
    }
    _check_latent(table, kind, has_experts, path)
    if kind == V2 and table.get("topk_method", "greedy") == "greedy":  # among all experts
        table |= {"n_group": 1, "topk_group": 1}
    by_best_expert = table.get("topk_method") == "group_limited_greedy"
    needed = LATENT + (EXPERTS if has_experts else ())
    values = {name: _field(table, name, path) for name in needed}
    values |= {name: table[name] for name in OPTIONAL + EXPERTS if table.get(name)}
    values |= {
        "n_routed_experts": values["n_routed_experts"] if has_experts else 0,
        "first_k_dense_replace": prefix if has_experts else 0,
        "scoring_func": table["scoring_func"],
        "norm_topk_prob": table["norm_topk_prob"],
        "latent_rms_norm_eps": LATENT_EPSILON,
        "topk_method": "group_limited_greedy" if by_best_expert else "noaux_tc",
        **(DROPLESS if has_experts else {}),
    }
    if not table.get("n_shared_experts", 1):
        values["n_shared_experts"] = 0
    if kind == OWN:
        old = {"attention": "mla", "head_dim": 64, "qk_norm": False}
        values |= {name: _field({**old, **table}, name, path) for name in OWN_FIELDS}
        values["sliding_window"] = table.get("attention_window", 0)
        if values["attention"] == "gqa":
            names = "num_key_value_heads", "attention_bias"
            values |= {name: table[name] for name in names}
    return values


def _grouped_from_hf(table: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    """Absent settings have the defaults of the class in transformers."""
    _check_grouped(table, kind, path)
    heads, mixtral = table["num_attention_heads"], kind == MIXTRAL
    window = table.get("sliding_window", 4096 * (kind == MISTRAL)) or 0
    values = {
        "attention": "gqa",
        "num_key_value_heads": table.get("num_key_value_heads") or heads,
        "head_dim": table.get("head_dim") or table["hidden_size"] // heads,
        "qk_norm": kind in (QWEN3, QWEN3_MOE),
        "attention_bias": kind == QWEN2,
        # Other classes ignore it; for Qwen see _check_grouped.
        "sliding_window": window if kind in (MISTRAL, MIXTRAL) else 0,
        "rms_norm_eps": table.get("rms_norm_eps", 1e-5 if mixtral else 1e-6),
        "n_routed_experts": 0,
    }
    if kind in EXPERTS_NAME:
        name = EXPERTS_NAME[kind]
        table = {name: table.get(EXPERTS_NAME[MIXTRAL]), **table}
        width = "intermediate_size" if mixtral else "moe_intermediate_size"
        values |= {
            "n_routed_experts": _field(table, name, path),
            "num_experts_per_tok": _field(table, "num_experts_per_tok", path),
            "moe_intermediate_size": _field(table, width, path),
            "scoring_func": "softmax",
            "norm_topk_prob": mixtral or bool(table.get("norm_topk_prob", False)),
            "decoder_sparse_step": 1 if mixtral else table.get("decoder_sparse_step", 1),
            "n_shared_experts": 0,
            **DROPLESS,
        }
    return values


def _check_latent(table: Mapping[str, Any], kind: str, has_experts: bool, path: Path) -> None:
    """Raises ConfigError for settings that this project does not implement."""
    # The class decides what is computed, not the config.
    scoring_func = {V2: "softmax", V3: "sigmoid"}.get(kind, table["scoring_func"])
    methods = {V2: ("greedy", "group_limited_greedy"), V3: ("noaux_tc",)}
    methods[OWN] = ("noaux_tc", "greedy", "group_limited_greedy")
    method = table.get("topk_method") or methods[kind][0]
    key_heads, latent = table.get("num_key_value_heads"), table.get("attention", "mla") == "mla"
    is_unsupported = {
        "attention_bias": kind != OWN and table.get("attention_bias"),
        "moe_layer_freq": table.get("moe_layer_freq", 1) != 1,
        "num_key_value_heads": latent and key_heads not in (None, table["num_attention_heads"]),
        "scoring_func": has_experts and table["scoring_func"] != scoring_func,
        "norm_topk_prob": has_experts and kind == V2 and table["norm_topk_prob"],
        "topk_method": has_experts and method not in methods[kind],
    }
    _refuse(is_unsupported, table, path)


def _check_grouped(table: Mapping[str, Any], kind: str, path: Path) -> None:
    """Raises ConfigError for settings that this project does not implement."""
    qwen, layers = kind in (QWEN2, QWEN3, QWEN3_MOE), table["num_hidden_layers"]
    scaling = table.get("rope_scaling") or table.get("rope_parameters") or {}
    types = set(table.get("layer_types") or ())
    is_unsupported = {
        "attention_bias": kind != QWEN2 and table.get("attention_bias"),
        # A window in some layers only.
        "use_sliding_window": qwen and table.get("use_sliding_window"),
        "layer_types": len(types) > 1
        or (qwen and types - {"full_attention"})
        or (kind in (MISTRAL, MIXTRAL) and types - {"sliding_attention"}),
        "mlp_only_layers": table.get("mlp_only_layers"),
        "rope_scaling": scaling.get("mscale") or scaling.get("mscale_all_dim"),
        "decoder_sparse_step": kind == QWEN3_MOE and layers % table.get("decoder_sparse_step", 1),
    }
    _refuse(is_unsupported, table, path)


def _refuse(is_unsupported: dict[str, Any], table: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError for these settings, and for those that no class may have."""
    quantized = table.get("quantization_config") or {}
    is_unsupported |= {
        "hidden_act": table.get("hidden_act", "silu") != "silu",
        "mlp_bias": table.get("mlp_bias"),
        "is_causal": table.get("is_causal") is False,
        "quantization_config": quantized and quantized.get("quant_method") != "fp8",
    }
    for name, is_so in is_unsupported.items():
        if is_so:
            raise ConfigError(
                f"{path} has {name} {table.get(name)!r}, which is not supported with model_type "
                f"{table['model_type']}."
            )


def _section(cls: type, values: Mapping[str, Any]) -> Any:
    """Return a section of the config. JSON may have 1 for the float 1.0."""
    floats = {f.name for f in dataclasses.fields(cls) if f.type is float}
    return cls(**{name: float(v) if name in floats else v for name, v in values.items()})


def _field(table: Mapping[str, Any], name: str, path: Path) -> Any:
    if table.get(name) is None:
        raise ConfigError(
            f"{path} lacks {name}, which determines what the weights compute. Download it again."
        )
    return table[name]


def _rope(table: Mapping[str, Any], path: Path, theta: float) -> dict[str, Any]:
    """Return rope_theta, with this default, and rope_scaling."""
    names = ("rope_scaling", "rope_parameters", "yarn")  # transformers prefers the first
    scaling = next((table[name] for name in names if table.get(name)), {})
    values = {"rope_theta": scaling.get("rope_theta") or table.get("rope_theta") or theta}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return values
    plain_yarn = not scaling.get("attention_factor") and scaling.get("truncate", True)
    if kind != "llama3" and not (kind == "yarn" and plain_yarn):
        raise ConfigError(
            f"{path} has an unsupported rotary embedding: {scaling}. Supported are the default, "
            "llama3, and yarn without attention_factor and with truncate."
        )
    known = {"mscale": 0.0, "mscale_all_dim": 0.0} if kind == "yarn" else {}
    known |= {name: value for name, value in scaling.items() if value is not None}
    # As in transformers, the outer setting has precedence, and the context is the default.
    original = "original_max_position_embeddings"
    if length := table.get(original) or known.get(original) or table.get("max_position_embeddings"):
        known[original] = length
    required = ("factor", original, *(SCALING[kind] if kind == "llama3" else ()))
    found = {name: _field(known, name, path) for name in required}
    found |= {name: known[name] for name in SCALING[kind] if name in known} | {"rope_type": kind}
    return values | {"rope_scaling": _section(utils.RopeScaling, found)}
