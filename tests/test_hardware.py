"""Figures of chips, and counts of parameters and FLOPs against sizes written out by hand."""

import dataclasses
import math

import pytest

import hardware
import model
import utils
import weights
from hf_case import model_with

# Every size is different, so that a swapped one cannot go unseen.
MODEL = model_with(
    utils.Model(),
    vocab_size=500,
    hidden_size=40,
    blocks=3,
    dense_layers=2,
    moe_layers=1,
    prefix_layers=1,
    num_attention_heads=5,
    kv_lora_rank=12,
    qk_nope_head_dim=7,
    qk_rope_head_dim=6,
    v_head_dim=9,
    intermediate_size=56,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=3,
    capacity_factor=1.5,
    eval_capacity_factor=2.0,
)


def test_a_chip_is_found_by_its_device_kind():
    assert hardware.chip_of_kind("NVIDIA H200").flops == 989e12
    assert hardware.chip_of_kind("TPU v5 lite").flops == 197e12
    assert hardware.chip_of_kind("cpu") is None


def test_each_device_kind_is_of_one_chip():
    kinds = [kind for chip in hardware.CHIPS.values() for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)


def test_an_unknown_chip_is_an_error_that_lists_the_known_ones():
    assert hardware.chip_named("V4") is hardware.CHIPS["v4"]
    with pytest.raises(ValueError, match=r"--chip v7 is not known. Use one of v4, v5e, v5p, v6e"):
        hardware.chip_named("v7")
    assert hardware.chip_named("CPU") is None


@pytest.mark.parametrize(
    "name, count, sides", [("v4", 32, "2x4x4"), ("v5p", 8, "2x2x2"), ("v5e", 32, "4x8")]
)
def test_a_number_of_chips_has_a_usual_slice(name, count, sides):
    assert hardware.topology(hardware.CHIPS[name], count) == sides


def test_a_number_of_chips_without_a_slice_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match=r"--chips 24 .* 16, 32, .*--topology 2x4x4"):
        hardware.topology(hardware.CHIPS["v4"], 24)


# --- parameters and MFU ---------------------------------------------------------------------------


def attention_shapes(model):
    d, n, c = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    h, r, w = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    query = [(d, n, h + r)]
    if model.q_lora_rank:
        query = [(d, model.q_lora_rank), (model.q_lora_rank,), (model.q_lora_rank, n, h + r)]
    return [(d,), *query, (d, c + r), (c,), (c, n, h + w), (n, w, d)]


def moe_shapes(model):
    d, e, g = model.hidden_size, model.n_routed_experts, model.moe_intermediate_size
    experts = [(e, d, g), (e, d, g), (e, g, d)]
    shared = [(d, model.n_shared_experts * g)] * 3
    return [(d,), (d, e), (e,), *experts, *shared]


def all_shapes(model):
    d, f = model.hidden_size, model.intermediate_size
    mlp = [(d,), (d, f), (d, f), (f, d)]
    block = (attention_shapes(model) + mlp) * model.dense_layers
    block += (attention_shapes(model) + moe_shapes(model)) * model.moe_layers
    outer = [(512, d), (d,)] + ([] if model.tie_word_embeddings else [(512, d)])
    return (
        outer + (attention_shapes(model) + mlp) * model.first_k_dense_replace + block * model.blocks
    )


def declared(fields):
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    return model.declare(utils.Config(model=fields, mesh=one))


def per_token(fields, length):
    return hardware.palm_flops_per_token(fields, declared(fields), length)


@pytest.mark.parametrize("q_lora_rank", [0, 11])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe_layers", [0, 1])
def test_parameters_are_the_sizes_of_the_tree(q_lora_rank, tied, moe_layers):
    fields = model_with(
        MODEL, q_lora_rank=q_lora_rank, tie_word_embeddings=tied, moe_layers=moe_layers
    )
    total = sum(math.prod(shape) for shape in all_shapes(fields))
    active = total - moe_layers * 3 * (8 - 2) * 3 * 40 * 24
    assert weights.count(declared(fields)) == (total, active)


def test_mfu_counts_the_output_matrix_once_and_half_of_the_attention():
    model = model_with(MODEL, blocks=1, dense_layers=1, moe_layers=0, prefix_layers=0)
    active = sum(math.prod(shape) for shape in all_shapes(model))
    attention = 6 * 1 * 5 * 100 * (7 + 6 + 9) / 2
    assert per_token(model, 100) == 6 * active + attention
    untied = dataclasses.replace(model, tie_word_embeddings=False)
    assert per_token(untied, 100) == 6 * active + attention


def test_mfu_counts_only_the_experts_that_a_token_passes():
    more = dataclasses.replace(MODEL, n_routed_experts=16)
    idle = per_token(more, 64) - per_token(MODEL, 64)
    assert idle == 6 * 3 * (40 * 8 + 8)  # only the routers' columns and biases
