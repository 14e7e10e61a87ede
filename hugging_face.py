"""What Hugging Face calls the model: its configs, and its names and layouts of the weights.

A layer here is the layer there but for two things. torch keeps a matrix as [outputs, inputs]. And
its rotary pairs lie side by side, (2i, 2i + 1), where here they are (i, i + R/2): columns change
places, no number changes.

Letters as in model.py.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import model
import utils
from utils import Config

V2, V3, OWN = "deepseek_v2", "deepseek_v3", "latent_moe"
CLASSES = {V2: "DeepseekV2ForCausalLM", V3: "DeepseekV3ForCausalLM", OWN: "LatentMoeForCausalLM"}
ALIKE = {"kimi_k2": V3}  # the same mathematics under another name
LATENT_EPSILON = 1e-6  # of the latents' norms, which V2 and V3 fix

# Ours in a layer -> theirs; what has no dot in it there is the layer's own.
NAMES = {
    "attention.norm": "input_layernorm",
    "attention.query.down": "self_attn.q_a_proj",
    "attention.query.norm": "self_attn.q_a_layernorm",
    "attention.query.up": "self_attn.q_b_proj",  # q_proj without a latent
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.norm": "post_attention_layernorm",
    "moe.router": "mlp.gate",
    "moe.bias": "mlp.gate.e_score_correction_bias",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
    "moe.experts.gate": "mlp.experts.{}.gate_proj",
    "moe.experts.up": "mlp.experts.{}.up_proj",
    "moe.experts.down": "mlp.experts.{}.down_proj",
}
ENDS = {
    "first.embedding": "model.embed_tokens.weight",
    "last.norm": "model.norm.weight",
    "last.output": "lm_head.weight",
}


# --- weights --------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """An array of a checkpoint: tensors of Hugging Face's, stacked."""

    name: str  # as blocks.moe.moe.experts.gate
    shape: tuple[int, ...]
    stacked: int  # dimensions that tell tensors apart
    names: dict[
        tuple[int, ...], str
    ]  # theirs, by the place in the stack; none where they have no such weight
    inputs: int  # dimensions of one that are summed over; 0 where theirs is the same array
    rotary: int  # R, where the last columns are rotary; else 0
    rows: int  # of the tokenizer's vocabulary, where there are pads behind; else 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of one of the stack."""
        return self.shape[self.stacked :]

    @property
    def shape_there(self) -> tuple[int, ...]:
        if self.inputs:
            return math.prod(self.one[self.inputs :]), math.prod(self.one[: self.inputs])
        return (self.rows, *self.one[1:]) if self.rows else self.one

    def to_theirs(self, w: np.ndarray) -> np.ndarray:
        """One of the stack as it is there."""
        if self.rotary:
            w = w[..., _columns(self.one[-1], self.rotary)]
        if self.inputs:
            return w.reshape(math.prod(self.one[: self.inputs]), -1).T
        return w[: self.rows] if self.rows else w

    def to_ours(self, w: np.ndarray) -> np.ndarray:
        """The inverse of `to_theirs`; pads are zeros."""
        if self.inputs:
            w = w.T.reshape(self.one)
        if self.rotary:
            w = w[..., np.argsort(_columns(self.one[-1], self.rotary))]
        return np.pad(w, [(0, self.one[0] - self.rows), (0, 0)]) if self.rows else w


def _columns(width: int, rotary: int) -> np.ndarray:
    """Our column for each of theirs."""
    columns, first = np.arange(width), width - rotary
    return np.concatenate([columns[:first], columns[first:].reshape(2, -1).T.ravel()])


def leaves(config: Config, kind: str, interleaved: bool = True) -> list[Leaf]:
    """All weights of a model of this kind.

    interleaved  rotary pairs lie side by side there.
    """
    declared = jax.tree.leaves(model.declare(alone(config)))
    return [_leaf(w.name, w.shape, config.model, kind, interleaved) for w in declared]


def alone(config: Config) -> Config:
    """The config on one device."""
    return dataclasses.replace(config, mesh=utils.Mesh(fsdp=1, pipeline=1, tensor=1))


def shapes(
    leaves: list[Leaf], m: utils.Model, kind: str, dtype: np.dtype
) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """Name, type and shape of each tensor of a folder, layer after layer.

    The classes of transformers want a shared expert: a model without any has one of zeros there.
    """
    out = []
    for leaf in leaves:
        of_one = np.dtype(np.float32) if leaf.name.endswith("moe.bias") else dtype
        out += [(name, of_one, leaf.shape_there) for name in leaf.names.values()]
    if kind != OWN and m.moe_layers and not m.shared_experts:
        norms = [name for name, *_ in out if name.endswith(".mlp.gate.weight")]
        for part, shape in (
            ("gate", (m.expert_hidden, m.width)),
            ("up", (m.expert_hidden, m.width)),
            ("down", (m.width, m.expert_hidden)),
        ):
            ending = f".mlp.shared_experts.{part}_proj.weight"
            out += [(name.replace(".mlp.gate.weight", ending), dtype, shape) for name in norms]
    last = [ENDS["last.norm"], ENDS["last.output"]]

    def layer(tensor: tuple[str, np.dtype, tuple[int, ...]]) -> int:
        parts = tensor[0].split(".")
        return int(parts[2]) if parts[1] == "layers" else m.layers if tensor[0] in last else -1

    return sorted(out, key=layer)


def _leaf(name: str, shape: tuple[int, ...], m: utils.Model, kind: str, interleaved: bool) -> Leaf:
    if name in ENDS:
        rows = 0 if name == "last.norm" else m.vocabulary
        return Leaf(name, shape, 0, {(): ENDS[name]}, 0, 0, rows)
    where, part, in_layer = name.split(".", 2)
    if where == "blocks":
        shape = (m.blocks, *shape[3:])  # [virtual, stage, block, ...] in the model
    stacked = 1 + (part == "dense") + ("experts" in in_layer.split("."))
    matrix = len(shape) - stacked > 1
    inputs = 0 if not matrix else 2 if in_layer.endswith("attention.out") else 1
    is_rotary = interleaved and in_layer in ("attention.query.up", "attention.kv_down")
    pattern = NAMES[in_layer]
    if in_layer == "attention.query.up" and not m.q_lora_rank:
        pattern = "self_attn.q_proj"
    ending = "" if in_layer == "moe.bias" else ".weight"
    names = {}
    for index in itertools.product(*map(range, shape[:stacked])):
        theirs = pattern.format(index[-1])
        names[index] = f"model.layers.{_layer(part, index, m)}.{theirs}{ending}"
    if kind == V2 and in_layer == "moe.bias":
        names = {}
    return Leaf(name, shape, stacked, names, inputs, is_rotary * m.qk_rope_head_dim, 0)


def _layer(part: str, index: tuple[int, ...], m: utils.Model) -> int:
    """The number of a layer, as they run."""
    if part == "prefix":
        return index[0]
    first = m.prefix_layers + index[0] * (m.dense_layers + m.moe_layers)
    return first + (index[1] if part == "dense" else m.dense_layers)


# --- configs --------------------------------------------------------------------------------------

# Their field for each of ours that says the same.
FIELDS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "hidden": "intermediate_size",
}
MOE_FIELDS = {
    "expert_hidden": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "routed_scaling_factor": "routed_scaling_factor",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
}
# The same where a file may leave it out, which means our default.
MAY_LACK = {
    "q_lora_rank": "q_lora_rank",
    "norm_epsilon": "rms_norm_eps",
    "shared_experts": "n_shared_experts",
}
# Words of our own, in configs that come with a modelling file.
OWN_FIELDS = (
    "prefix_layers",
    "blocks",
    "dense_layers",
    "moe_layers",
    "rope_in_moe_layers",
    "latent_norm_epsilon",
)
YARN = {
    "rope_factor": "factor",
    "rope_original_length": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
}


def obstacles(m: utils.Model) -> list[str]:
    """What of a model the classes of transformers cannot say."""
    moe, latent = m.moe_layers, m.latent_norm_epsilon or m.norm_epsilon
    softmax = moe and m.scores == "softmax"
    wrong = (
        (
            moe and m.dense_layers and m.blocks > 1,
            f"a dense layer between layers with experts (model.dense_layers {m.dense_layers}, "
            f"model.blocks {m.blocks})",
        ),
        (moe and not m.rope_in_moe_layers, "no position in some layers (model.rope_in_moe_layers)"),
        (
            latent != LATENT_EPSILON,
            f"{latent} in the norms of latents (model.latent_norm_epsilon, or else "
            f"model.norm_epsilon), not {LATENT_EPSILON}",
        ),
        (moe and m.experts < 2, "a single expert (model.experts 1)"),
        (softmax and m.normalize_weights, "softmax scores normalized (model.normalize_weights)"),
        (
            softmax and m.expert_groups > 1,
            f"softmax scores in groups of experts (model.expert_groups {m.expert_groups})",
        ),
        (
            softmax and m.width % m.heads,
            f"softmax scores, and model.width {m.width} no multiple of model.heads {m.heads}",
        ),
        (
            # V2 takes rotary pairs for complex numbers, which begin at even places.
            softmax and (m.qk_nope_head_dim % 2 or m.kv_lora_rank % 2),
            "softmax scores, and model.qk_nope_head_dim or model.kv_lora_rank odd",
        ),
    )
    return [text for is_so, text in wrong if is_so]


def kind_of(m: utils.Model) -> str:
    """The class of transformers that computes the same, where one does."""
    return V2 if m.moe_layers and m.scores == "softmax" else V3


def to_json(config: Config, kind: str, dtype: str, end_of_text: int) -> dict[str, Any]:
    """config.json of a model, in the words of the published ones."""
    m = config.model
    layers = m.prefix_layers + m.blocks * (m.dense_layers + m.moe_layers)
    fields = FIELDS | MOE_FIELDS | MAY_LACK
    table = {theirs: getattr(m, ours) for ours, theirs in fields.items()}
    extended = m.rope_factor > 1
    yarn = {theirs: getattr(m, ours) for ours, theirs in YARN.items()}
    table |= {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers - m.blocks if m.moe_layers else layers,
        "moe_layer_freq": 1,
        "num_key_value_heads": m.heads,
        "q_lora_rank": m.q_lora_rank or None,
        "n_shared_experts": m.shared_experts if kind == OWN else max(1, m.shared_experts),
        "scoring_func": m.scores,
        "norm_topk_prob": m.normalize_weights,
        "topk_method": "greedy" if m.scores == "softmax" else "noaux_tc",
        "rope_theta": m.rope_theta,
        # transformers reads more into rope_scaling than a modelling file wants.
        "yarn" if kind == OWN else "rope_scaling": {"type": "yarn"} | yarn if extended else None,
        "rope_interleave": True,
        "max_position_embeddings": int(m.rope_original_length * m.rope_factor)
        if extended
        else config.train.sequence_length,
        "tie_word_embeddings": m.tied,
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
        table |= {name: getattr(m, name) for name in OWN_FIELDS}
        table["auto_map"] = {
            "AutoConfig": f"{file}.LatentMoeConfig",
            "AutoModelForCausalLM": f"{file}.{CLASSES[OWN]}",
        }
    return table


class Found(NamedTuple):
    """What a config.json says."""

    model: utils.Model
    kind: str
    interleaved: bool
    length: int  # tokens of the longest text
    block: tuple[int, int] | None  # of float8 numbers with one scale
    skipped: int  # layers that predict more than one token ahead


def from_json(table: Mapping[str, Any], where: Path) -> Found:
    """The model that a config.json is of, where all its experts have room for all tokens.

    Raises  ValueError for another architecture, and for what the model here has not.
    """
    named = table.get("model_type", "")
    kind = ALIKE.get(named, named)
    if kind not in CLASSES:
        what = ", ".join(table.get("architectures") or ["no architecture"])
        raise ValueError(
            f"{where} is of model_type {named!r} ({what}). What can be read is "
            f"{', '.join([*CLASSES, *ALIKE])}."
        )
    layers = _field(table, "num_hidden_layers", where)
    prefix = table.get("first_k_dense_replace") or 0
    has_experts = prefix < layers and bool(table.get("n_routed_experts"))
    _refuse(table, kind, has_experts, where)
    if kind == V2:  # which then chooses among all
        table = {**table, "n_group": 1, "topk_group": 1}
    needed = FIELDS | (MOE_FIELDS if has_experts else {})
    values = {ours: _field(table, theirs, where) for ours, theirs in needed.items()}
    may_lack = MAY_LACK | MOE_FIELDS
    values |= {ours: table[theirs] for ours, theirs in may_lack.items() if table.get(theirs)}
    if table.get("n_shared_experts", 1) in (0, None):
        values["shared_experts"] = 0
    if has_experts:
        room = values["experts"] / values["experts_per_token"]
        values |= {"capacity_factor": room, "eval_capacity_factor": room}
    values |= {
        "prefix_layers": prefix if has_experts else 0,
        "blocks": layers - prefix if has_experts else layers,
        "dense_layers": 0 if has_experts else 1,
        "moe_layers": 1 if has_experts else 0,
        "scores": _scores(table, kind),
        "normalize_weights": _normalizes(table, kind),
        "latent_norm_epsilon": LATENT_EPSILON,
        "router_bias_speed": 0.0,
        "tied": bool(table.get("tie_word_embeddings", False)),
    }
    values |= _rope(table, where)
    if kind == OWN:
        values |= {name: _field(table, name, where) for name in OWN_FIELDS}
    for name, value in values.items():
        if isinstance(value, int) and type(getattr(utils.Model, name)) is float:
            values[name] = float(value)
    quantized = table.get("quantization_config") or {}
    return Found(
        utils.Model(**values),
        kind,
        bool(table.get("rope_interleave", True)),
        table.get("max_position_embeddings") or 4096,
        tuple(quantized.get("weight_block_size") or (128, 128)) if quantized else None,
        table.get("num_nextn_predict_layers") or 0,
    )


def _field(table: Mapping[str, Any], name: str, where: Path) -> Any:
    if table.get(name) is None:
        raise ValueError(f"{where} lacks {name}, on which depends what its weights compute.")
    return table[name]


def _scores(table: Mapping[str, Any], kind: str) -> str:
    return table.get("scoring_func") or ("softmax" if kind == V2 else "sigmoid")


def _normalizes(table: Mapping[str, Any], kind: str) -> bool:
    return bool(table.get("norm_topk_prob", kind != V2))


def _rope(table: Mapping[str, Any], where: Path) -> dict[str, Any]:
    named = ("rope_scaling", "rope_parameters", "yarn")  # the first wins in transformers
    scaling = next((table[name] for name in named if table.get(name)), {})
    theta = scaling.get("rope_theta") or table.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    values = {"rope_theta": theta}
    if kind == "default":
        return values
    if kind != "yarn" or scaling.get("attention_factor") or not scaling.get("truncate", True):
        raise ValueError(
            f"{where} has rotary positions that cannot be had here: {scaling}. Known are the "
            "default and yarn, without attention_factor and with truncate."
        )
    lacks = {"mscale": 0.0, "mscale_all_dim": 0.0, "beta_fast": 32.0, "beta_slow": 1.0}
    known = lacks | {name: value for name, value in scaling.items() if value is not None}
    return values | {ours: _field(known, theirs, where) for ours, theirs in YARN.items()}


def _refuse(table: Mapping[str, Any], kind: str, has_experts: bool, where: Path) -> None:
    """Raises ValueError for settings that the model here has not."""
    groups = (table.get("n_group") or 1) > 1
    scores = {V2: "softmax", V3: "sigmoid", OWN: _scores(table, kind)}[kind]
    quantized = table.get("quantization_config") or {}
    wrong = {
        "hidden_act": table.get("hidden_act", "silu") != "silu",
        "attention_bias": table.get("attention_bias"),
        "mlp_bias": table.get("mlp_bias"),
        "moe_layer_freq": table.get("moe_layer_freq", 1) != 1,
        "num_key_value_heads": table.get("num_key_value_heads")
        not in (None, table.get("num_attention_heads")),
        # What the class computes, whatever the config says.
        "scoring_func": has_experts and _scores(table, kind) != scores,
        "norm_topk_prob": has_experts and kind == V2 and _normalizes(table, kind),
        "topk_method": has_experts
        and kind == V2
        and groups
        and table.get("topk_method") != "greedy",
        "quantization_config": quantized and quantized.get("quant_method") != "fp8",
    }
    for name, is_so in wrong.items():
        if is_so:
            raise ValueError(
                f"{where} says {name} {table.get(name)!r}, which the model here cannot do with "
                f"model_type {table['model_type']}."
            )
