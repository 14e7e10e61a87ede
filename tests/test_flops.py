"""Counts against sizes written out by hand."""

import dataclasses
import math

import pytest

import flops
import utils

# Every size is different, so that a swapped one cannot go unseen.
MODEL = utils.Model(
    vocabulary=500,
    width=40,
    blocks=3,
    dense_layers=2,
    moe_layers=1,
    prefix_layers=1,
    heads=5,
    kv_lora_rank=12,
    qk_nope_head_dim=7,
    qk_rope_head_dim=6,
    v_head_dim=9,
    hidden=56,
    expert_hidden=24,
    experts=8,
    experts_per_token=2,
    shared_experts=3,
    capacity_factor=1.5,
    eval_capacity_factor=2.0,
)


def attention_shapes(model):
    d, n, c = model.width, model.heads, model.kv_lora_rank
    h, r, w = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    query = [(d, n, h + r)]
    if model.q_lora_rank:
        query = [(d, model.q_lora_rank), (model.q_lora_rank,), (model.q_lora_rank, n, h + r)]
    return [(d,), *query, (d, c + r), (c,), (c, n, h + w), (n, w, d)]


def moe_shapes(model):
    d, e, g = model.width, model.experts, model.expert_hidden
    experts = [(e, d, g), (e, d, g), (e, g, d)]
    shared = [(d, model.shared_experts * g)] * 3
    return [(d,), (d, e), (e,), *experts, *shared]


def all_shapes(model):
    d, f = model.width, model.hidden
    mlp = [(d,), (d, f), (d, f), (f, d)]
    block = (attention_shapes(model) + mlp) * model.dense_layers
    block += (attention_shapes(model) + moe_shapes(model)) * model.moe_layers
    ends = [(512, d), (d,)] + ([] if model.tied else [(512, d)])
    return ends + (attention_shapes(model) + mlp) * model.prefix_layers + block * model.blocks


@pytest.mark.parametrize("q_lora_rank", [0, 11])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe_layers", [0, 1])
def test_parameters_are_the_sizes_of_the_tree(q_lora_rank, tied, moe_layers):
    model = dataclasses.replace(MODEL, q_lora_rank=q_lora_rank, tied=tied, moe_layers=moe_layers)
    counts = flops.parameters(model)
    total = sum(math.prod(shape) for shape in all_shapes(model))
    assert counts["total"] == total
    assert counts["active"] == total - moe_layers * 3 * (8 - 2) * 3 * 40 * 24
    parts = {name: count for name, count in counts.items() if name not in ("total", "active")}
    assert sum(parts.values()) == total


def test_the_reference_run_has_a_billion_parameters_and_a_third_of_them_active():
    model = utils.Model(
        vocabulary=100277,
        width=768,
        blocks=8,
        dense_layers=5,
        moe_layers=1,
        heads=12,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=128,
        v_head_dim=64,
        hidden=2048,
        expert_hidden=2048,
        experts=16,
        experts_per_token=2,
        shared_experts=1,
    )
    counts = flops.parameters(model)
    attention = 768 + 768 * 128 + 128 + 128 * 12 * 192 + 768 * 256 + 128 + 128 * 12 * 128
    attention += 12 * 64 * 768
    swiglu = 3 * 768 * 2048
    dense = attention + 768 + swiglu
    moe = attention + 768 + 768 * 16 + 16 + 17 * swiglu
    total = 100352 * 768 + 768 + 40 * dense + 8 * moe
    assert counts["total"] == total
    assert counts["active"] == total - 8 * 14 * swiglu


def test_mfu_counts_the_output_matrix_once_and_half_of_the_attention():
    model = dataclasses.replace(MODEL, blocks=1, dense_layers=1, moe_layers=0, prefix_layers=0)
    active = sum(math.prod(shape) for shape in all_shapes(model))
    attention = 6 * 1 * 5 * 100 * (7 + 6 + 9) / 2
    assert flops.palm_flops_per_token(model, 100) == 6 * active + attention
    untied = dataclasses.replace(model, tied=False)
    assert flops.palm_flops_per_token(untied, 100) == 6 * active + attention


def test_mfu_counts_only_the_experts_that_a_token_passes():
    more = dataclasses.replace(MODEL, experts=16)
    idle = flops.palm_flops_per_token(more, 64) - flops.palm_flops_per_token(MODEL, 64)
    assert idle == 6 * 3 * (40 * 8 + 8)  # only the routers' columns and biases


def config(**train):
    defaults = {"sequences": 8, "sequence_length": 64, "microbatches": 2}
    return utils.Config(
        model=MODEL,
        mesh=utils.Mesh(fsdp=2, pipeline=1, tensor=2),
        train=utils.Train(**(defaults | train)),
    )


def test_executed_flops_are_the_matrix_products_of_the_step():
    t, d, layers = 8 * 64, 40, 1 + 3 * 3
    projections = [(t, d, 5 * 13), (t, d, 18), (t, 12, 5 * 16), (t, 45, d)]
    scores = [(t * 5, 13, 64), (t * 5, 64, 9)]
    mlp = [(t, d, 56), (t, d, 56), (t, 56, d)]
    slots = 2 * 2 * 2 * 8 * 24  # fsdp, tensor, microbatches, experts, 1.5 * 2 * 64 / 8
    experts = [(slots, d, 24), (slots, d, 24), (slots, 24, d)]
    shared = [(t, d, 72), (t, d, 72), (t, 72, d)]
    forward = layers * (projections + scores) + 7 * mlp + 3 * [(t, d, 8), *experts, *shared]
    forward = sum(2 * math.prod(product) for product in [*forward, (t, d, 512)])
    assert flops.executed_flops_per_step(config())["total"] == 3 * forward


def test_capacity_is_rounded_up_on_every_rank_and_microbatch():
    whole = config(microbatches=2)
    assert flops.expert_slots(whole, 1.0) == 2 * 64 * 8
    assert flops.expert_slots(whole, 1.01) == 2 * 2 * 2 * 8 * 17  # ceil(1.01 * 2 * 64 / 8)


def test_evaluation_counts_forward_only_with_its_own_capacity():
    train = flops.executed_flops_per_step(config())
    forward = flops.executed_flops_per_step(config(), forward_only=True)
    assert forward["mlp"] * 3 == train["mlp"]
    assert forward["experts"] * 3 * 1.5 == train["experts"] * 2.0
    assert forward["total"] == sum(count for part, count in forward.items() if part != "total")


def test_a_dense_model_executes_no_experts():
    dense = dataclasses.replace(config(), model=dataclasses.replace(MODEL, moe_layers=0))
    counts = flops.executed_flops_per_step(dense)
    assert counts["experts"] == counts["router"] == counts["shared_experts"] == 0
