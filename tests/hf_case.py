"""Sizes, weights and tokens on which this model and Hugging Face transformers must agree.

NumPy only, so that the script that runs torch and the tests that do not can both import it.
Letters as in model.py.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import utils

LOGITS_FILE = Path(__file__).with_name("hf_reference.npz")


def model_with(model: utils.Model, **fields) -> utils.Model:
    """Return the model with other fields.

    Layers may be given as `prefix_layers`, `blocks`, and per block `dense_layers` and `moe_layers`
    (0 or 1); YaRN as `rope_factor` and so on.
    """
    prefix = fields.pop("prefix_layers", model.first_k_dense_replace)
    blocks, moe = (fields.pop(name, getattr(model, name)) for name in ("blocks", "moe_layers"))
    step = fields.pop("dense_layers", model.dense_layers) + moe
    if not moe:
        fields["n_routed_experts"] = 0
    fields = {
        "num_hidden_layers": prefix + blocks * step,
        "first_k_dense_replace": prefix,
        "decoder_sparse_step": step,
    } | fields
    names = {f"rope_{f.name}": f.name for f in dataclasses.fields(utils.RopeScaling)}
    scaling = {names[name]: fields.pop(name) for name in [*fields] if name in names}
    scaling = dataclasses.replace(model.rope_scaling, **scaling)
    return dataclasses.replace(model, rope_scaling=scaling, **fields)


# All widths differ, so that swapped dimensions do not fit. Capacity factor E / K drops nothing.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "blocks": 4,
    "dense_layers": 0,
    "moe_layers": 1,
    "num_attention_heads": 12,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 14,
    "v_head_dim": 9,
    "rope_theta": 100.0,
    "rope_factor": 1.0,
    "intermediate_size": 44,
    "moe_intermediate_size": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "capacity_factor": 4.0,
    "rms_norm_eps": 1e-6,
    "latent_rms_norm_eps": 1e-6,  # transformers' own, whatever its config says
    "compute_dtype": "float32",
}


# Of 7 rotary pairs (6, 2), two (two, one) are unchanged and three (two, one) partly slowed.
YARN = {
    "rope_factor": 8.0,
    "rope_original_max_position_embeddings": 64,
    "rope_beta_fast": 4.0,
    "rope_beta_slow": 0.5,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 1.3,
}
GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}


@dataclass(frozen=True)
class Case:
    """One comparison: fields of `utils.Model`, and the layout of rotary pairs in transformers."""

    model: dict
    seed: int  # one whose routing is decisive: see make_hf_reference.py
    interleaved: bool = False  # rotary pairs are neighbours there, halves here


def case(seed, prefix, query, shared, interleaved=False, **more):
    fields = {"prefix_layers": prefix, "q_lora_rank": query, "n_shared_experts": shared}
    other = {"tie_word_embeddings": False, "norm_topk_prob": True}
    return Case(SIZES | other | fields | more, seed, interleaved)


CASES = {
    "moe": case(0, prefix=0, query=0, shared=1),
    "moe_two_shared": case(0, prefix=0, query=0, shared=2),
    "moe_query_latent": case(0, prefix=0, query=22, shared=1),
    "moe_query_latent_two_shared": case(0, prefix=0, query=22, shared=2),
    "prefix": case(2, prefix=3, query=0, shared=1),
    "prefix_two_shared": case(1, prefix=3, query=0, shared=2),
    "prefix_query_latent": case(0, prefix=3, query=22, shared=1),
    "prefix_query_latent_two_shared": case(0, prefix=3, query=22, shared=2),
    "interleaved_tied": case(
        0, prefix=3, query=22, shared=1, interleaved=True, tie_word_embeddings=True
    ),
    "weights_not_normalized": case(2, prefix=0, query=0, shared=1, norm_topk_prob=False),
    "yarn_groups": case(1, prefix=3, query=22, shared=1, rms_norm_eps=0.02, **YARN, **GROUPS),
    "yarn_no_mscale": case(
        0, prefix=0, query=0, shared=1, interleaved=True, **YARN | {"rope_mscale_all_dim": 0.0}
    ),
}


def tokens(vocabulary, sequences=2, length=16):
    """Return [B, T] token ids below `vocabulary`, always the same."""
    ids = np.random.default_rng(7).integers(0, vocabulary, (sequences, length))
    return ids.astype(np.int32)


def weights(model, seed, dtype=np.float32):
    """Return random weights for `model`, a `utils.Model` or any object with its fields.

    Matrices are normal / sqrt(inputs), norms are not 1, router and bias are large.
    """
    make = Maker(np.random.default_rng(seed), dtype)
    padded = -(-model.vocab_size // 256) * 256
    stack = (model.blocks, model.dense_layers)
    return {
        "embedding": make.normal((), padded, model.hidden_size, std=1.0),
        "prefix": make.dense(model, (model.first_k_dense_replace,))
        if model.first_k_dense_replace
        else None,
        "blocks": {
            "dense": make.dense(model, stack) if model.dense_layers else None,
            "moe": make.expert(model, (model.blocks,)) if model.moe_layers else None,
        },
        "final_norm": make.norm((), model.hidden_size),
        "output": None
        if model.tie_word_embeddings
        else make.normal((), padded, model.hidden_size, std=model.hidden_size**-0.5),
    }


@dataclass(frozen=True)
class Maker:
    """Draws the weights of a stack of layers; `stack` is the leading shape of each."""

    random: np.random.Generator
    dtype: type

    def normal(self, stack, *shape, std):
        return (std * self.random.standard_normal(stack + shape)).astype(self.dtype)

    def norm(self, stack, width):
        return (1 + 0.2 * self.random.standard_normal((*stack, width))).astype(self.dtype)

    def dense(self, model, stack):
        attention = self.attention(model, stack)
        mlp = {"norm": self.norm(stack, model.hidden_size)}
        return {
            "attention": attention,
            "mlp": mlp | self.swiglu(stack, model.hidden_size, model.intermediate_size),
        }

    def expert(self, model, stack):
        return {"attention": self.attention(model, stack), "moe": self.moe(model, stack)}

    def attention(self, model, stack):
        if model.attention == "gqa":
            return self.grouped(model, stack)
        D, N, C = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
        H, R, W = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        return {
            "norm": self.norm(stack, D),
            "query": self.query(model, stack),
            "kv_down": self.normal(stack, D, C + R, std=D**-0.5),
            "kv_norm": self.norm(stack, C),
            "kv_up": self.normal(stack, C, N, H + W, std=C**-0.5),
            "out": self.normal(stack, N, W, D, std=(N * W) ** -0.5),
        }

    def grouped(self, model, stack):
        D, N, A = model.hidden_size, model.num_attention_heads, model.head_dim
        Y, biased, normed = model.num_key_value_heads, model.attention_bias, model.qk_norm
        return {
            "key_value": {
                "key": self.normal(stack, D, Y, A, std=D**-0.5),
                "value": self.normal(stack, D, Y, A, std=D**-0.5),
                "key_bias": self.normal(stack, Y, A, std=0.3) if biased else None,
                "value_bias": self.normal(stack, Y, A, std=0.3) if biased else None,
            },
            "norm": self.norm(stack, D),
            "query": self.normal(stack, D, N, A, std=D**-0.5),
            "query_bias": self.normal(stack, N, A, std=0.3) if biased else None,
            "query_norm": self.norm(stack, A) if normed else None,
            "key_norm": self.norm(stack, A) if normed else None,
            "out": self.normal(stack, N, A, D, std=(N * A) ** -0.5),
        }

    def query(self, model, stack):
        D, Q, N = model.hidden_size, model.q_lora_rank, model.num_attention_heads
        A = model.qk_nope_head_dim + model.qk_rope_head_dim
        if Q == 0:
            return {"up": self.normal(stack, D, N, A, std=D**-0.5)}
        return {
            "down": self.normal(stack, D, Q, std=D**-0.5),
            "norm": self.norm(stack, Q),
            "up": self.normal(stack, Q, N, A, std=Q**-0.5),
        }

    def swiglu(self, stack, D, F):
        return {
            "gate": self.normal(stack, D, F, std=D**-0.5),
            "up": self.normal(stack, D, F, std=D**-0.5),
            "down": self.normal(stack, F, D, std=F**-0.5),
        }

    def moe(self, model, stack):
        D, E, G = model.hidden_size, model.n_routed_experts, model.moe_intermediate_size
        shared = model.n_shared_experts
        return {
            "norm": self.norm(stack, D),
            "router": self.normal(stack, D, E, std=2 * D**-0.5),
            "bias": self.normal(stack, E, std=0.1),
            "experts": self.swiglu((*stack, E), D, G),
            "shared": self.swiglu(stack, D, shared * G) if shared else None,
        }
