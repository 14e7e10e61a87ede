"""Parameters and model FLOPs, counted from shapes.

Two counts that are never mixed: `palm_flops_per_token` is what MFU divides by, and
`executed_flops_per_step` is what a program without any waste executes.
"""

import math

import utils

MFU_RULE = (
    "MFU = tokens/s * model FLOPs per token / bf16 peak; model FLOPs by appendix B of "
    "arXiv:2204.02311: 6 per active parameter (embedding lookup not counted), causal attention as "
    "half of its rectangle, no recomputation."
)


def _attention_matrices(model: utils.Model) -> int:
    """Elements of query, key-value and output projections of one layer."""
    query_in = model.q_lora_rank or model.width
    query_down = model.width * model.q_lora_rank
    query_up = query_in * model.heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    kv_down = model.width * (model.kv_lora_rank + model.qk_rope_head_dim)
    kv_up = model.kv_lora_rank * model.heads * (model.qk_nope_head_dim + model.v_head_dim)
    out = model.heads * model.v_head_dim * model.width
    return query_down + query_up + kv_down + kv_up + out


def _swiglu(model: utils.Model, hidden: int) -> int:
    """Elements of gate, up and down."""
    return 3 * model.width * hidden


def _layer_counts(model: utils.Model) -> tuple[int, int]:
    """Layers with a dense feed-forward, and layers with experts."""
    return model.prefix_layers + model.blocks * model.dense_layers, model.blocks * model.moe_layers


def parameters(model: utils.Model) -> dict[str, int]:
    """Parameters by part, `total`, and `active`: total without the experts a token passes by.

    The vocabulary counts as padded, and the balancing bias of the router counts as a parameter.
    """
    dense, moe = _layer_counts(model)
    norms = 2 * model.width + model.q_lora_rank + model.kv_lora_rank
    expert = _swiglu(model, model.expert_hidden)
    matrix = model.padded_vocabulary * model.width
    parts = {
        "embedding": matrix,
        "output": 0 if model.tied else matrix,
        "attention": model.layers * _attention_matrices(model),
        "mlp": dense * _swiglu(model, model.hidden),
        "router": moe * model.width * model.experts,
        "router_bias": moe * model.experts,
        "experts": moe * model.experts * expert,
        "shared_experts": moe * model.shared_experts * expert,
        "norms": model.layers * norms + model.width,
    }
    total = sum(parts.values())
    idle = moe * (model.experts - model.experts_per_token) * expert
    return parts | {"total": total, "active": total - idle}


def palm_flops_per_token(model: utils.Model, sequence_length: int) -> float:
    """6 * active parameters + 3 * layers * heads * T * (query width + value width).

    The lookup in an untied embedding multiplies nothing; a tied one counts, as the output matrix.
    Attention is 12 * layers * heads * head width * T of the source, of which a causal one is half,
    and with its own widths for queries and values.

    Source  Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    counts = parameters(model)
    multiplied = counts["active"] - (0 if model.tied else counts["embedding"])
    widths = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    return 6.0 * multiplied + 3.0 * model.layers * model.heads * sequence_length * widths


def expert_slots(config: utils.Config, capacity_factor: float) -> int:
    """Rows of one MoE layer's experts in a step: ranks * M * E * ceil(capacity * K * tokens / E).

    tokens are those of one rank in one microbatch; ranks those of fsdp and tensor.
    """
    model, train, mesh = config.model, config.train, config.mesh
    ranks = mesh.fsdp * mesh.tensor
    tokens = train.sequences * train.sequence_length // (train.microbatches * ranks)
    slots = math.ceil(capacity_factor * model.experts_per_token * tokens / model.experts)
    return ranks * train.microbatches * model.experts * slots


def executed_flops_per_step(
    config: utils.Config, forward_only: bool = False, scores: float = 1.0
) -> dict[str, int]:
    """FLOPs of one step's matrix products on all devices, by part and `total`, without waste.

    Every capacity slot, the padded vocabulary; no recomputation, no bubble, prefix layers once.
    Backward is twice forward. `forward_only` is the evaluation of as many sequences, with its own
    capacity factor.

    scores  share of attention's rectangle that is computed: see attention.computed_share.
    """
    model, length = config.model, config.train.sequence_length
    tokens = config.train.sequences * length
    dense, moe = _layer_counts(model)
    widths = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    factor = model.eval_capacity_factor if forward_only else model.capacity_factor
    expert = _swiglu(model, model.expert_hidden)
    products = {
        "attention_projections": tokens * model.layers * _attention_matrices(model),
        "attention_scores": scores * tokens * model.layers * model.heads * length * widths,
        "mlp": tokens * dense * _swiglu(model, model.hidden),
        "router": tokens * moe * model.width * model.experts,
        "experts": moe * expert_slots(config, factor) * expert if moe else 0,
        "shared_experts": tokens * moe * model.shared_experts * expert,
        "output": tokens * model.width * model.padded_vocabulary,
    }
    passes = 1 if forward_only else 3
    parts = {name: round(2 * passes * count) for name, count in products.items()}
    return parts | {"total": sum(parts.values())}
