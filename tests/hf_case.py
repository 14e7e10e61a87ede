"""Sizes, weights and tokens on which this model and Hugging Face transformers must agree.

`hf_tensors` names and arranges the weights as transformers does; it shares no code with hf/.
Letters as in model.py.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import utils

LOGITS_FILE = Path(__file__).with_name("hf_reference.npz")


def model_with(model: utils.Model, **fields) -> utils.Model:
    """Return the model with other fields; YaRN is given as `rope_factor` and so on.

    Layers may be given as `prefix_layers`, `blocks`, and `dense_layers`, `moe_layers` of a block.
    """
    prefix = fields.pop("prefix_layers", model.first_k_dense_replace)
    blocks, moe = (fields.pop(name, getattr(model, name)) for name in ("blocks", "moe_layers"))
    step = fields.pop("dense_layers", model.dense_layers) + moe
    if not moe:
        fields["n_routed_experts"] = 0
    layers = {"num_hidden_layers": prefix + blocks * step, "first_k_dense_replace": prefix}
    fields = layers | {"decoder_sparse_step": step} | fields
    names = {f"rope_{f.name}": f.name for f in dataclasses.fields(utils.RopeScaling)}
    scaling = {names[name]: fields.pop(name) for name in [*fields] if name in names}
    scaling = dataclasses.replace(model.rope_scaling, **scaling)
    return dataclasses.replace(model, rope_scaling=scaling, **fields)


# All widths differ, so that swapped dimensions do not fit. Capacity factor E / K drops nothing.
SIZES = {
    "vocab_size": 96, "hidden_size": 40, "blocks": 4, "dense_layers": 0, "moe_layers": 1,
    "num_attention_heads": 12, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 14,
    "v_head_dim": 9, "rope_theta": 100.0, "rope_factor": 1.0, "intermediate_size": 44,
    "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.7, "capacity_factor": 4.0, "rms_norm_eps": 1e-6,
    "latent_rms_norm_eps": 1e-6,  # transformers' own, whatever its config says
    "compute_dtype": "float32",
}  # fmt: skip
# Of 7 rotary pairs (6, 2), two (two, one) are unchanged and three (two, one) partly slowed.
YARN = {
    "rope_factor": 8.0, "rope_original_max_position_embeddings": 64, "rope_beta_fast": 4.0,
    "rope_beta_slow": 0.5, "rope_mscale": 0.7, "rope_mscale_all_dim": 1.3,
}  # fmt: skip
GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}


@dataclass(frozen=True)
class Case:
    model: dict  # fields of utils.Model
    seed: int  # one whose routing is decisive: see make_hf_reference.py
    interleaved: bool = False  # rotary pairs are neighbours in transformers, halves here


def case(seed, prefix, query, shared, interleaved=False, **more):
    fields = {"prefix_layers": prefix, "q_lora_rank": query, "n_shared_experts": shared}
    other = {"tie_word_embeddings": False, "norm_topk_prob": True}
    return Case(SIZES | other | fields | more, seed, interleaved)


CASES = {
    "moe": case(0, prefix=0, query=0, shared=1),
    "prefix_two_shared": case(1, prefix=3, query=0, shared=2),
    "prefix_query_latent_two_shared": case(0, prefix=3, query=22, shared=2),
    "interleaved_tied": case(0, 3, 22, 1, interleaved=True, tie_word_embeddings=True),
    "weights_not_normalized": case(2, prefix=0, query=0, shared=1, norm_topk_prob=False),
    "yarn_groups": case(1, prefix=3, query=22, shared=1, rms_norm_eps=0.02, **YARN, **GROUPS),
    "yarn_no_mscale": case(0, 0, 0, 1, interleaved=True, **YARN | {"rope_mscale_all_dim": 0.0}),
}


def tokens(vocabulary, sequences=2, length=16):
    """Return [B, T] token ids below `vocabulary`, always the same."""
    ids = np.random.default_rng(7).integers(0, vocabulary, (sequences, length))
    return ids.astype(np.int32)


def weights(model, seed, dtype=np.float32):
    """Return random weights; norms are not 1, the router and its bias are large."""
    make = Maker(np.random.default_rng(seed), dtype)
    table = -(-model.vocab_size // 256) * 256, model.hidden_size
    prefix = model.first_k_dense_replace
    tied = model.tie_word_embeddings
    return {
        "embedding": make.normal((), *table, std=1.0),
        "prefix": make.dense(model, (prefix,)) if prefix else None,
        "blocks": {
            run.name: (make.expert if run.experts else make.dense)(
                model, (model.blocks, *[run.layers] * run.stacked)
            )
            for run in model.runs
        },
        "final_norm": make.norm((), model.hidden_size),
        "output": None if tied else make.normal((), *table, std=model.hidden_size**-0.5),
    }


@dataclass(frozen=True)
class Maker:
    """Draws the weights of a stack of layers; `stack` is the leading shape of each."""

    random: np.random.Generator
    dtype: type

    def normal(self, stack, *shape, std):
        return (std * self.random.standard_normal(stack + shape)).astype(self.dtype)

    def norm(self, stack, *width):
        return (1 + 0.2 * self.random.standard_normal((*stack, *width))).astype(self.dtype)

    def norms(self, model, stack):
        """The norms of a layer's input and output."""
        names = {"before": ["norm"], "after": ["norm_after"], "both": ["norm", "norm_after"]}
        found = {name: self.norm(stack, model.hidden_size) for name in names[model.norms]}
        return {"norm": None, "norm_after": None} | found

    def dense(self, model, stack):
        attention, norms = self.attention(model, stack), self.norms(model, stack)
        mlp = norms | self.swiglu(stack, model.hidden_size, model.intermediate_size)
        return {"attention": attention, "mlp": mlp}

    def expert(self, model, stack):
        return {"attention": self.attention(model, stack), "moe": self.moe(model, stack)}

    def attention(self, model, stack):
        if model.attention == "gqa":
            return self.grouped(model, stack)
        D, N, C = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
        H, R, W = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        return self.norms(model, stack) | {
            "query": self.query(model, stack),
            "kv_down": self.normal(stack, D, C + R, std=D**-0.5),
            "kv_norm": self.norm(stack, C),
            "kv_up": self.normal(stack, C, N, H + W, std=C**-0.5),
            "out": self.normal(stack, N, W, D, std=(N * W) ** -0.5),
        }

    def grouped(self, model, stack):
        D, N, A = model.hidden_size, model.num_attention_heads, model.head_dim
        Y, biased, normed = model.num_key_value_heads, model.attention_bias, model.qk_norm
        all_heads = normed and model.qk_norm_all_heads
        of_query = (N, A) if all_heads else (A,)
        return {
            "key_value": {
                "key": self.normal(stack, D, Y, A, std=D**-0.5),
                "value": self.normal(stack, D, Y, A, std=D**-0.5),
                "key_bias": self.normal(stack, Y, A, std=0.3) if biased else None,
                "value_bias": self.normal(stack, Y, A, std=0.3) if biased else None,
                "norm": self.norm(stack, Y, A) if all_heads else None,
            },
            **self.norms(model, stack),
            "query": self.normal(stack, D, N, A, std=D**-0.5),
            "query_bias": self.normal(stack, N, A, std=0.3) if biased else None,
            "query_norm": self.norm(stack, *of_query) if normed else None,
            "key_norm": self.norm(stack, A) if normed and not all_heads else None,
            "out": self.normal(stack, N, A, D, std=(N * A) ** -0.5),
            "out_bias": self.normal(stack, D, std=0.3) if model.attention_out_bias else None,
            "sinks": self.normal(stack, N, std=1.0) if model.attention_sinks else None,
        }

    def query(self, model, stack):
        D, Q, N = model.hidden_size, model.q_lora_rank, model.num_attention_heads
        A, names = model.qk_nope_head_dim + model.qk_rope_head_dim, {}
        if Q:
            names["down"] = self.normal(stack, D, Q, std=D**-0.5)
            names["norm"] = self.norm(stack, Q)
        return names | {"up": self.normal(stack, Q or D, N, A, std=(Q or D) ** -0.5)}

    def swiglu(self, stack, D, F):
        return {
            "gate": self.normal(stack, D, F, std=D**-0.5),
            "up": self.normal(stack, D, F, std=D**-0.5),
            "down": self.normal(stack, F, D, std=F**-0.5),
        }

    def moe(self, model, stack):
        D, E, G = model.hidden_size, model.n_routed_experts, model.moe_intermediate_size
        shared, biased = model.n_shared_experts, model.experts_bias
        w = self.norms(model, stack) | {
            "router": self.normal(stack, D, E, std=2 * D**-0.5),
            "bias": self.normal(stack, E, std=0.1),
            "router_bias": self.normal(stack, E, std=0.3) if biased else None,
            "output_bias": self.normal(stack, E, D, std=0.3) if biased else None,
            "experts": self.swiglu((*stack, E), D, G),
            "shared": self.swiglu(stack, D, shared * G) if shared else None,
        }
        for name in ("gate_bias", "up_bias"):
            w["experts"][name] = self.normal((*stack, E), G, std=0.3) if biased else None
        return w


# --- the same weights in a folder of transformers -------------------------------------------------

TYPES = {"float32": "F32", "uint8": "U8", "float64": "F64", "float8_e4m3fn": "F8_E4M3"}


def config_json(case):
    """Return the config.json of a case, for DeepseekV3ForCausalLM."""
    m = model_with(utils.Model(), **case.model)
    rope = {"rope_type": "default", "rope_theta": m.rope_theta}
    if m.rope_scaling.factor > 1:
        names = ("original_max_position_embeddings", "factor", "beta_fast", "beta_slow")
        rope |= {name: getattr(m.rope_scaling, name) for name in (*names, "mscale")}
        rope |= {"rope_type": "yarn", "mscale_all_dim": m.rope_scaling.mscale_all_dim}
    names = """vocab_size hidden_size num_hidden_layers first_k_dense_replace num_attention_heads
        kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size
        moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok n_group
        topk_group norm_topk_prob routed_scaling_factor rms_norm_eps tie_word_embeddings"""
    return {name: getattr(m, name) for name in names.split()} | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": m.num_attention_heads,
        "q_lora_rank": m.q_lora_rank or None,
        "rope_parameters": rope,
        "rope_interleave": case.interleaved,
        "num_mtp_layers": 0,
    }


def linear(prefix, matrices):
    """Name and transpose matrices: torch stores [outputs, inputs], and names end in `_proj`."""
    return {f"{prefix}.{name}_proj.weight": w.T for name, w in matrices.items()}


def latent_tensors(w, model, interleaved):
    H, R, C = model.qk_nope_head_dim, model.qk_rope_head_dim, model.kv_lora_rank
    # Interleaved, pair i is in columns 2i and 2i + 1 there.
    columns = np.arange(R).reshape(2, R // 2).T.ravel() if interleaved else np.arange(R)
    up = w["query"]["up"]
    up = np.concatenate([up[..., :H], up[..., H:][..., columns]], axis=-1).reshape(len(up), -1)
    down = np.concatenate([w["kv_down"][:, :C], w["kv_down"][:, C:][:, columns]], axis=-1)
    matrices, names = {"q": up}, {"self_attn.kv_a_layernorm.weight": w["kv_norm"]}
    if "down" in w["query"]:
        matrices = {"q_a": w["query"]["down"], "q_b": up}
        names["self_attn.q_a_layernorm.weight"] = w["query"]["norm"]
    names["self_attn.kv_a_proj_with_mqa.weight"] = down.T
    matrices["kv_b"] = w["kv_up"].reshape(C, -1)
    return names | linear("self_attn", matrices)


def grouped_tensors(w, model):
    kv, names = w["key_value"], {}
    for letter, matrix, bias, norm in (
        ("q", w["query"], w["query_bias"], w["query_norm"]),
        ("k", kv["key"], kv["key_bias"], w["key_norm"]),
        ("v", kv["value"], kv["value_bias"], None),
    ):
        names |= linear("self_attn", {letter: matrix.reshape(model.hidden_size, -1)})
        names |= {} if bias is None else {f"self_attn.{letter}_proj.bias": bias.ravel()}
        names |= {} if norm is None else {f"self_attn.{letter}_norm.weight": norm}
    return names


def moe_tensors(w, kind):
    block, ends = "mlp", {part: f"{part}_proj" for part in ("gate", "up", "down")}
    if kind == "mixtral":
        block, ends = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    names = {f"{block}.gate.weight": w["router"].T}
    for part, end in ends.items():
        for e, matrix in enumerate(w["experts"][part]):
            names[f"{block}.experts.{e}.{end}.weight"] = matrix.T
    if kind in ("deepseek_v3", "latent_moe"):
        names[f"{block}.gate.e_score_correction_bias"] = w["bias"]
    return names | linear(f"{block}.shared_experts", w["shared"] or {})


def layer_tensors(w, model, kind, interleaved):
    attention, is_dense = w["attention"], "mlp" in w
    ffn = w["mlp"] if is_dense else w["moe"]
    names = {"input_layernorm.weight": attention["norm"]}
    names["post_attention_layernorm.weight"] = ffn["norm"]
    if model.attention == "gqa":
        names |= grouped_tensors(attention, model)
    else:
        names |= latent_tensors(attention, model, interleaved)
    names |= linear("self_attn", {"o": attention["out"].reshape(-1, model.hidden_size)})
    if is_dense:
        return names | linear("mlp", {name: ffn[name] for name in ("gate", "up", "down")})
    return names | moe_tensors(ffn, kind)


def take(tree, *index):
    """One layer of a stack of layers."""
    if isinstance(tree, dict):
        return {k: take(v, *index) for k, v in tree.items()}
    return tree if tree is None else tree[index]


def hf_tensors(model, tree, kind="deepseek_v3", interleaved=True):
    """Return the weights by their names in the files of a `model_type` of transformers."""
    V = model.vocab_size
    layers = [take(tree["prefix"], i) for i in range(model.first_k_dense_replace)]
    for b in range(model.blocks):
        for run in model.runs:
            stack = take(tree["blocks"][run.name], b)
            layers += [take(stack, i) for i in range(run.layers)] if run.stacked else [stack]
    names = {"model.embed_tokens.weight": tree["embedding"][:V]}
    for i, w in enumerate(layers):
        named = layer_tensors(w, model, kind, interleaved)
        names |= {f"model.layers.{i}.{k}": v for k, v in named.items()}
    names["model.norm.weight"] = tree["final_norm"]
    return names if tree["output"] is None else names | {"lm_head.weight": tree["output"][:V]}


def write_safetensors(path, tensors):
    """Write the length of a JSON header, the header, and the values."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, w in tensors.items():
        offsets = [end, end := end + w.nbytes]
        header[name] = {"dtype": TYPES[w.dtype.name], "shape": w.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    values = [w.tobytes() for w in tensors.values()]
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *values]))


def write_folder(folder, table, *parts, index=None):
    """Write config.json and the tensors, in one file or in several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    if len(parts) == 1:
        write_safetensors(folder / "model.safetensors", parts[0])
        return
    found = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        write_safetensors(folder / file, part)
        found |= dict.fromkeys(part, file)
    table = {"metadata": {}, "weight_map": found | (index or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
