"""Sizes, weights and tokens on which this model and Hugging Face transformers must agree.

NumPy only, so that the script that runs torch and the tests that do not can both import it.
Letters: B sequences, T positions, D width, N heads, H and R head width without and with position,
A = H + R, W value head width, Q query latent, C key-value latent, E experts, F and G hidden width
of dense layers and of experts.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOGITS_FILE = Path(__file__).with_name("hf_reference.npz")

# Widths all differ, so an exchanged dimension cannot fit. The capacity factor E / K drops nothing.
SIZES = {
    "vocabulary": 96,
    "width": 40,
    "blocks": 4,
    "dense_layers": 0,
    "moe_layers": 1,
    "heads": 12,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 14,
    "v_head_dim": 9,
    "rope_theta": 100.0,
    "rope_factor": 1.0,
    "hidden": 44,
    "expert_hidden": 28,
    "experts": 8,
    "experts_per_token": 2,
    "expert_groups": 1,
    "groups_per_token": 1,
    "routed_scaling_factor": 1.7,
    "capacity_factor": 4.0,
    "eval_capacity_factor": 4.0,
    "norm_epsilon": 1e-6,
    "latent_norm_epsilon": 1e-6,  # transformers' own, whatever its config says
    "compute_dtype": "float32",
}


# Of 7 rotary pairs (6, 2) two (two, one) stay as they are; three (two, one) are slowed in part.
YARN = {
    "rope_factor": 8.0,
    "rope_original_length": 64,
    "rope_beta_fast": 4.0,
    "rope_beta_slow": 0.5,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 1.3,
}
GROUPS = {"experts": 12, "experts_per_token": 3, "expert_groups": 3, "groups_per_token": 2}


@dataclass(frozen=True)
class Case:
    """One comparison: fields of `utils.Model`, and how transformers keeps its rotary pairs."""

    model: dict
    seed: int  # one whose routing is decisive: see make_hf_reference.py
    interleaved: bool = False  # rotary pairs are neighbours there, halves here


def case(seed, prefix, query, shared, interleaved=False, **more):
    fields = {"prefix_layers": prefix, "q_lora_rank": query, "shared_experts": shared}
    other = {"tied": False, "normalize_weights": True}
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
    "interleaved_tied": case(0, prefix=3, query=22, shared=1, interleaved=True, tied=True),
    "weights_not_normalized": case(2, prefix=0, query=0, shared=1, normalize_weights=False),
    "yarn_groups": case(1, prefix=3, query=22, shared=1, norm_epsilon=0.02, **YARN, **GROUPS),
    "yarn_no_mscale": case(
        0, prefix=0, query=0, shared=1, interleaved=True, **YARN | {"rope_mscale_all_dim": 0.0}
    ),
}


def tokens(vocabulary, sequences=2, length=16):
    """[B, T] token ids below `vocabulary`, always the same."""
    ids = np.random.default_rng(7).integers(0, vocabulary, (sequences, length))
    return ids.astype(np.int32)


def weights(model, seed, dtype=np.float32):
    """Random weights for the fields of `model` (a `utils.Model`, or any object with those fields).

    Matrices are normal / sqrt(inputs), norms are not 1, router and bias large enough to decide.
    """
    make = Maker(np.random.default_rng(seed), dtype)
    padded = -(-model.vocabulary // 256) * 256
    stack = (model.blocks, model.dense_layers)
    return {
        "embedding": make.normal((), padded, model.width, std=1.0),
        "prefix": make.dense(model, (model.prefix_layers,)) if model.prefix_layers else None,
        "blocks": {
            "dense": make.dense(model, stack) if model.dense_layers else None,
            "moe": make.expert(model, (model.blocks,)) if model.moe_layers else None,
        },
        "final_norm": make.norm((), model.width),
        "output": None
        if model.tied
        else make.normal((), padded, model.width, std=model.width**-0.5),
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
        mlp = {"norm": self.norm(stack, model.width)}
        return {"attention": attention, "mlp": mlp | self.swiglu(stack, model.width, model.hidden)}

    def expert(self, model, stack):
        return {"attention": self.attention(model, stack), "moe": self.moe(model, stack)}

    def attention(self, model, stack):
        D, N, C = model.width, model.heads, model.kv_lora_rank
        H, R, W = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        return {
            "norm": self.norm(stack, D),
            "query": self.query(model, stack),
            "kv_down": self.normal(stack, D, C + R, std=D**-0.5),
            "kv_norm": self.norm(stack, C),
            "kv_up": self.normal(stack, C, N, H + W, std=C**-0.5),
            "out": self.normal(stack, N, W, D, std=(N * W) ** -0.5),
        }

    def query(self, model, stack):
        D, Q, N = model.width, model.q_lora_rank, model.heads
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
        D, E, G = model.width, model.experts, model.expert_hidden
        shared = model.shared_experts
        return {
            "norm": self.norm(stack, D),
            "router": self.normal(stack, D, E, std=2 * D**-0.5),
            "bias": self.normal(stack, E, std=0.1),
            "experts": self.swiglu((*stack, E), D, G),
            "shared": self.swiglu(stack, D, shared * G) if shared else None,
        }
