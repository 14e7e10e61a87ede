"""Conversion between Hugging Face's config.json and [model], which share most names."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import utils
from hf import families
from hf.families import FAMILIES, GROUPED_FAMILIES, OF_EXPERTS, OWN, V2, V3
from utils import FULL_ATTENTION, SLIDING_ATTENTION, Config, ConfigError

# Settings of all families, with the same name and meaning in config.json.
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    "num_attention_heads",
)
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}  # if absent
NULL_IS_0 = ("q_lora_rank", "first_k_dense_replace", "n_shared_experts", "sliding_window")
# Settings that no weight holds, and training does not change.
NO_WEIGHT = (
    *("max_position_embeddings", "bos_token_id", "pad_token_id", "initializer_range"),
    *("attention_dropout", "router_aux_loss_coef"),
)
NOT_IMPLEMENTED = (  # settings that are refused unless they are absent or false
    *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    *("mlp_bias", "mlp_only_layers"),
)
SCALING = {  # settings of rope_scaling beside its factor and original length, by type
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "linear": (),
}
TOPK_METHODS = {
    V2: ("greedy", "group_limited_greedy"),
    V3: ("noaux_tc",),
    OWN: ("greedy", "group_limited_greedy", "noaux_tc"),
}


# --- to config.json -------------------------------------------------------------------------------


def kind_of(m: utils.Model) -> str:
    """Return the model type of the class of transformers that computes this model, or most of it.

    Of several it is the first one of FAMILIES.
    """
    if m.attention == "gqa":
        return min(GROUPED_FAMILIES, key=lambda kind: len(unsupported(m, kind)))
    return V2 if m.moe_layers and m.scoring_func == "softmax" else V3


def unsupported(m: utils.Model, kind: str) -> list[str]:
    """Return the settings of a model that the class of a family cannot represent."""
    moe, latent, grouped = m.moe_layers, m.attention == "mla", kind in GROUPED_FAMILIES
    fixed = _fixed(kind, bool(moe), m.hidden_size)
    if latent and kind != OWN and not m.latent_rms_norm_eps:  # norms have a common epsilon
        fixed["rms_norm_eps"] = fixed.pop("latent_rms_norm_eps")
    scaling = m.rope_scaling.rope_type if m.rope_scaling.factor > 1 else None
    is_unsupported = {name: getattr(m, name) != value for name, value in fixed.items()} | {
        "rope_scaling.rope_type": scaling
        in {OWN: ("linear",)}.get(kind, ("linear", "llama3") * latent),
        "rope_scaling.mscale_all_dim": grouped
        and scaling == "yarn"
        and m.rope_scaling.mscale_all_dim,
        "hidden_size": kind in (families.LLAMA, families.GEMMA3, V2)
        and m.hidden_size % m.num_attention_heads,
        "n_routed_experts": grouped and bool(moe) != (kind in families.MOE_FAMILIES),
        "rope_scaling.truncate": kind == OWN and not m.rope_scaling.truncate,
    }
    if latent and moe and kind != OWN:
        is_unsupported |= {
            "decoder_sparse_step": m.dense_layers and m.blocks > 1,  # dense between experts
            "n_routed_experts": m.n_routed_experts < 2,
            "topk_method": m.n_group > 1 and m.topk_method not in TOPK_METHODS[kind],
            # V2 views rotary pairs as complex numbers, which start at even offsets.
            "qk_nope_head_dim": kind == V2 and m.qk_nope_head_dim % 2,
            "kv_lora_rank": kind == V2 and m.kv_lora_rank % 2,
        }
    found = {name: utils.get(m, name) for name, is_so in is_unsupported.items() if is_so}
    return [
        f"model.{name} {' '.join(value) if isinstance(value, tuple) else value}"
        for name, value in found.items()
    ]


def _fixed(kind: str, has_experts: bool, hidden_size: int) -> dict[str, Any]:
    """Return the settings of [model] that all models of a family have."""
    fixed = FAMILIES[kind].fixed
    if kind == families.GEMMA3:
        fixed = fixed | {"embedding_multiplier": hidden_size**0.5}
    return {
        name: value
        for name, value in fixed.items()
        if value is not None and (has_experts or name not in OF_EXPERTS)
    }


def to_hf(config: Config, kind: str, dtype: str, end_of_text: int | list[int]) -> dict[str, Any]:
    """Return the config.json of a model."""
    m, scaling, length = config.model, None, config.train.seq_len
    if (s := m.rope_scaling).factor > 1:
        length = int(s.original_max_position_embeddings * s.factor)
        names = ("rope_type", "factor", "original_max_position_embeddings", *SCALING[s.rope_type])
        scaling = {name: getattr(s, name) for name in names}
    table = {
        "architectures": [FAMILIES[kind].hf_class],
        "model_type": kind,
        "max_position_embeddings": length,
        "hidden_act": m.hidden_act,
        "attention_bias": kind == families.GPT_OSS,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
    }
    table |= {name: getattr(m, name) for name in (*REQUIRED, *DEFAULTS)}
    table |= {theirs: getattr(m, ours) for ours, theirs in FAMILIES[kind].settings.items()}
    if kind not in GROUPED_FAMILIES:
        return table | _latent_to_hf(m, kind, scaling and {"type": "yarn"} | scaling)
    if scaling:
        # Without the second the first has no effect, and these classes have no factor on scores.
        scaling = {name: v for name, v in scaling.items() if not name.startswith("mscale")}
    table |= {"rope_scaling": scaling, "sliding_window": m.sliding_window or None}
    if FAMILIES[kind].patterned:  # whose classes need a window, also if no layer has it
        table["sliding_window"] = m.sliding_window or length
    return table | _layers_to_hf(m, kind, scaling)


def _layers_to_hf(m: utils.Model, kind: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a family whose layers differ."""
    table: dict[str, Any] = {}
    numbers = range(m.num_hidden_layers)
    if kind == families.SMOLLM3:
        table["no_rope_layers"] = [int((i + 1) % m.no_rope_layer_interval > 0) for i in numbers]
    if FAMILIES[kind].patterned:
        types = m.layer_types or (SLIDING_ATTENTION if m.sliding_window else FULL_ATTENTION,)
        table["layer_types"] = [types[i % len(types)] for i in numbers]
    if kind in (families.GEMMA3, families.OLMO3):
        rope = {"rope_type": "default", "rope_theta": m.rope_theta} | (scaling or {})
        local = {"rope_type": "default", "rope_theta": m.rope_local_base_freq}
        local = local if m.rope_local_base_freq else rope
        table["rope_parameters"] = {FULL_ATTENTION: rope, SLIDING_ATTENTION: local}
    if kind == families.GEMMA3:
        scalar = m.query_pre_attn_scalar or m.head_dim
        table["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
        table["hidden_activation"] = m.hidden_act
    return table


def _latent_to_hf(m: utils.Model, kind: str, yarn: dict[str, Any] | None) -> dict[str, Any]:
    grouped, layers = m.attention == "gqa", m.num_hidden_layers
    greedy = m.scoring_func == "softmax" and m.n_group == 1
    table = {
        "moe_layer_freq": 1,
        "num_key_value_heads": m.num_key_value_heads if grouped else m.num_attention_heads,
        "q_lora_rank": m.q_lora_rank or None,
        "topk_method": "greedy" if greedy else m.topk_method,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }
    if kind == OWN:
        file = "modeling_latent_moe"
        return table | {
            # transformers validates rope_scaling, so the modelling file reads another name.
            "yarn": yarn,
            "auto_map": {
                "AutoConfig": f"{file}.LatentMoeConfig",
                "AutoModel": f"{file}.LatentMoeModel",
                "AutoModelForCausalLM": f"{file}.{FAMILIES[OWN].hf_class}",
            },
        }
    return table | {
        "rope_scaling": yarn,
        "first_k_dense_replace": layers - m.blocks if m.moe_layers else layers,
        "n_shared_experts": max(1, m.n_shared_experts),
        # vLLM ignores it for these classes, so the export has the output matrix too.
        "tie_word_embeddings": False,
    }


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
    kind = families.ALIASES.get(named, named)
    if kind not in FAMILIES:
        what = ", ".join(table.get("architectures") or ["no architecture"])
        raise ConfigError(
            f"{path} has model_type {named!r} ({what}). Supported are "
            f"{', '.join([*FAMILIES, *families.ALIASES])}."
        )
    given = {n: value for n, value in table.items() if value is not None or n in NULL_IS_0}
    table = DEFAULTS | FAMILIES[kind].defaults | given
    values = {name: _field(table, name, path) for name in (*REQUIRED, *DEFAULTS)}
    values |= {"decoder_sparse_step": 1, "n_routed_experts": 0, "router_bias_update_speed": 0.0}
    table, has_experts = _completed(table, kind)
    _check(table, kind, has_experts, path)
    table |= _layers(table, kind, has_experts, path)
    if table.get("topk_method") == "greedy":  # among all experts
        table |= {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"}
    for ours, theirs in FAMILIES[kind].settings.items():
        if has_experts or ours not in OF_EXPERTS:
            values[ours] = _field(table, theirs, path)
    if has_experts:
        values |= {"capacity_factor": 0.0, "eval_capacity_factor": 0.0}
    if kind == OWN and values["attention"] == "gqa":
        values["num_key_value_heads"] = table["num_key_value_heads"]
    values |= _fixed(kind, has_experts, table["hidden_size"]) | _rope(table, path)
    if kind in GROUPED_FAMILIES:
        values |= {n: table[n] for n in ("first_k_dense_replace", "layer_types") if n in table}
    quantized = table.get("quantization_config") or {}
    return HfModel(
        _section(utils.Model, values),
        kind,
        kind not in GROUPED_FAMILIES and bool(table.get("rope_interleave", True)),
        table.get("max_position_embeddings") or 4096,
        tuple(quantized.get("weight_block_size") or (128, 128)) if quantized else None,
        (table.get("num_nextn_predict_layers") or 0) * (kind == V3),
    )


def _completed(table: dict[str, Any], kind: str) -> tuple[dict[str, Any], bool]:
    """Return settings with what follows from others, and whether the model has experts."""
    table |= {name: table.get(name) or 0 for name in NULL_IS_0}
    if kind not in GROUPED_FAMILIES:
        has_experts = table["first_k_dense_replace"] < table["num_hidden_layers"]
        has_experts &= bool(table.get("n_routed_experts"))
        if table.get("rope_in_moe_layers") is False and has_experts:  # the former name
            table["no_rope_layer_interval"] = table["decoder_sparse_step"]
        return table, has_experts
    heads = table["num_attention_heads"]
    table["num_key_value_heads"] = table.get("num_key_value_heads") or heads
    table["head_dim"] = table.get("head_dim") or table["hidden_size"] // heads
    # transformers 5 saves Qwen's under Mixtral's name.
    table.setdefault("num_experts", table.get("num_local_experts"))
    return table, kind in families.MOE_FAMILIES


def _layers(table: Mapping[str, Any], kind: str, has_experts: bool, path: Path) -> dict[str, Any]:
    """Return the settings of layers that differ: the first ones are those before the blocks."""
    count, types = table["num_hidden_layers"], table.get("layer_types")
    if kind == families.SMOLLM3:
        interval = table["no_rope_layer_interval"]
        if rotated := table.get("no_rope_layers"):
            omitted = [i for i, rope in enumerate(rotated[:count], 1) if not rope]
            interval = (*omitted, 0)[0]
            if interval and omitted != [*range(interval, count + 1, interval)]:
                raise _unsupported(table, "no_rope_layers", path)
        interval *= interval <= count
        first = {"first_k_dense_replace": count % interval if interval else 0}
        return first | {"no_rope_layer_interval": interval, "layer_types": ()}
    if not FAMILIES[kind].patterned:
        return {"layer_types": ()}
    # Of Gemma, before there were layer_types, which have precedence.
    if (step := table.get("sliding_window_pattern")) and not isinstance(types, list):
        types = (*[SLIDING_ATTENTION] * (step - 1), FULL_ATTENTION)
    types = [types[i % len(types)] for i in range(count)]
    if set(types) == {FULL_ATTENTION}:
        return {"layer_types": (), "sliding_window": 0}
    period = next(n for n in range(1, count + 1) if types == [types[i % n] for i in range(count)])
    first = count % period
    if first and (has_experts or len(set(types[:first])) > 1):
        period, first = count, 0  # one block of all layers
    types = types[:period] if period > 1 else []
    return {"layer_types": tuple(types), "first_k_dense_replace": first}


def _check(table: Mapping[str, Any], kind: str, has_experts: bool, path: Path) -> None:
    """Raises ConfigError for settings that this project does not implement."""
    fixed, layers = FAMILIES[kind].fixed, table["num_hidden_layers"]
    patterned = FAMILIES[kind].patterned
    act = "hidden_activation" if kind == families.GEMMA3 else "hidden_act"
    grouped, full = kind in GROUPED_FAMILIES, kind in families.FULL_FAMILIES
    quantized = table.get("quantization_config") or {}
    scaling = table.get("rope_scaling") or table.get("rope_parameters") or {}
    given = table.get("layer_types", ())  # a list, or the tuple of the family
    types = set(given)
    is_unsupported = {name: table.get(name) for name in NOT_IMPLEMENTED} | {
        act: table.get(act, "silu") != fixed["hidden_act"],
        "swiglu_alpha": table.get("swiglu_alpha", 1.702) != 1.702,
        "sliding_window": patterned and SLIDING_ATTENTION in types and not table["sliding_window"],
        "rope_in_moe_layers": table.get("rope_in_moe_layers") is False
        and (has_experts and table["first_k_dense_replace"]),  # which an interval would count
        "is_causal": table.get("is_causal") is False,
        "quantization_config": quantized
        and quantized.get("quant_method") != ("mxfp4" if kind == families.GPT_OSS else "fp8"),
        "attention_bias": kind not in (families.QWEN2, OWN)
        and bool(table.get("attention_bias")) != (kind == families.GPT_OSS),
        # Experts or a window in some layers only.
        "moe_layer_freq": table.get("moe_layer_freq", 1) != 1,
        "decoder_sparse_step": kind == families.QWEN3_MOE and layers % table["decoder_sparse_step"],
        "use_sliding_window": full and table.get("use_sliding_window"),
        "layer_types": (not patterned and len(types) > 1)
        or (isinstance(given, list) and len(given) != layers)
        or types - {FULL_ATTENTION, SLIDING_ATTENTION}
        or (full and types - {FULL_ATTENTION})
        or (kind in (families.MISTRAL, families.MIXTRAL) and types - {SLIDING_ATTENTION}),
        "rope_scaling": grouped and (scaling.get("mscale") or scaling.get("mscale_all_dim")),
    }
    if not grouped and table.get("attention", "mla") == "mla":
        heads = table["num_attention_heads"]
        is_unsupported["num_key_value_heads"] = (table.get("num_key_value_heads") or heads) != heads
    if not grouped and has_experts:  # the class decides what is computed, not the config
        names = ("scoring_func", "norm_topk_prob")
        is_unsupported |= {name: table[name] != fixed.get(name, table[name]) for name in names}
        is_unsupported["topk_method"] = table["topk_method"] not in TOPK_METHODS[kind]
    for name, is_so in is_unsupported.items():
        if is_so:
            raise _unsupported(table, name, path)


def _unsupported(table: Mapping[str, Any], name: str, path: Path) -> ConfigError:
    return ConfigError(
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


def _rope(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return rope_theta and rope_scaling."""
    names = ("rope_scaling", "rope_parameters", "yarn")  # transformers prefers the first
    scaling = next((table[name] for name in names if table.get(name)), {})
    values, local = {}, {}
    if FULL_ATTENTION in scaling:  # by layer
        scaling, local = scaling[FULL_ATTENTION], scaling.get(SLIDING_ATTENTION) or {}
        if local.get("rope_type", "default") != "default" and local != scaling:
            raise _unsupported(table, "rope_parameters", path)
    values["rope_theta"] = scaling.get("rope_theta") or table["rope_theta"]
    if "rope_local_base_freq" in table:
        theta = local.get("rope_theta") or table["rope_local_base_freq"] or values["rope_theta"]
        is_same = not table["sliding_window"] or (local and local == scaling)
        values["rope_local_base_freq"] = 0.0 if is_same else theta
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return values
    factor = scaling.get("attention_factor")
    usual = 0.1 * math.log(scaling.get("factor") or 1) + 1  # what transformers computes without it
    if kind not in SCALING or (kind == "yarn" and factor and not math.isclose(factor, usual)):
        raise ConfigError(
            f"{path} has an unsupported rotary embedding: {scaling}. Supported are the default, "
            "linear, llama3, and yarn without an attention_factor of its own."
        )
    known = {"mscale": 0.0, "mscale_all_dim": 0.0} if kind == "yarn" else {}
    known |= {name: value for name, value in scaling.items() if value is not None}
    # As in transformers, the outer setting has precedence, and the context is the default.
    original = "original_max_position_embeddings"
    if length := table.get(original) or known.get(original) or table.get("max_position_embeddings"):
        known[original] = length
    required = ("factor", original, *(SCALING[kind] if kind == "llama3" else ()))
    fields = {name: _field(known, name, path) for name in required}
    fields |= {name: known[name] for name in SCALING[kind] if name in known} | {"rope_type": kind}
    return values | {"rope_scaling": _section(utils.RopeScaling, fields)}
