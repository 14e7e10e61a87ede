"""Counts against sizes written out by hand."""

import dataclasses
import math

import pytest

import flops
import model
import utils
import weights

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


def declared(fields):
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    return model.declare(utils.Config(model=fields, mesh=one))


def per_token(fields, length):
    return flops.palm_flops_per_token(fields, declared(fields), length)


@pytest.mark.parametrize("q_lora_rank", [0, 11])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe_layers", [0, 1])
def test_parameters_are_the_sizes_of_the_tree(q_lora_rank, tied, moe_layers):
    fields = dataclasses.replace(MODEL, q_lora_rank=q_lora_rank, tied=tied, moe_layers=moe_layers)
    total = sum(math.prod(shape) for shape in all_shapes(fields))
    active = total - moe_layers * 3 * (8 - 2) * 3 * 40 * 24
    assert weights.count(declared(fields)) == (total, active)


def test_mfu_counts_the_output_matrix_once_and_half_of_the_attention():
    model = dataclasses.replace(MODEL, blocks=1, dense_layers=1, moe_layers=0, prefix_layers=0)
    active = sum(math.prod(shape) for shape in all_shapes(model))
    attention = 6 * 1 * 5 * 100 * (7 + 6 + 9) / 2
    assert per_token(model, 100) == 6 * active + attention
    untied = dataclasses.replace(model, tied=False)
    assert per_token(untied, 100) == 6 * active + attention


def test_mfu_counts_only_the_experts_that_a_token_passes():
    more = dataclasses.replace(MODEL, experts=16)
    idle = per_token(more, 64) - per_token(MODEL, 64)
    assert idle == 6 * 3 * (40 * 8 + 8)  # only the routers' columns and biases
