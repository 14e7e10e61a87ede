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
    utils.Model(), vocab_size=500, hidden_size=40, blocks=3, dense_layers=2, moe_layers=1,
    prefix_layers=1, num_attention_heads=5, kv_lora_rank=12, qk_nope_head_dim=7, qk_rope_head_dim=6,
    v_head_dim=9, intermediate_size=56, moe_intermediate_size=24, n_routed_experts=8,
    num_experts_per_tok=2, n_shared_experts=3, capacity_factor=1.5, eval_capacity_factor=2.0,
)  # fmt: skip


def test_a_chip_is_found_by_its_name_and_by_its_device_kind():
    assert hardware.chip_of_kind("NVIDIA H200").flops == 989e12
    assert hardware.chip_of_kind("TPU v5 lite").flops == 197e12
    assert hardware.chip_of_kind("cpu") is hardware.chip_named("CPU") is None
    kinds = [kind for chip in hardware.CHIPS.values() for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)
    assert hardware.chip_named("V4") is hardware.CHIPS["v4"]


def test_a_number_of_chips_has_a_usual_slice_or_is_refused_with_the_nearest():
    usual = {("v4", 32): "2x4x4", ("v5p", 8): "2x2x2", ("v5e", 32): "4x8"}
    for (name, count), sides in usual.items():
        assert hardware.topology(hardware.CHIPS[name], count) == sides
    with pytest.raises(ValueError, match=r"--chips 24 .* 16, 32, .*--topology 2x4x4"):
        hardware.topology(hardware.CHIPS["v4"], 24)


def all_shapes(m):
    d, n, c, f = m.hidden_size, m.num_attention_heads, m.kv_lora_rank, m.intermediate_size
    h, r, w = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
    e, g = m.n_routed_experts, m.moe_intermediate_size
    query = [(d, n, h + r)]
    if q := m.q_lora_rank:
        query = [(d, q), (q,), (q, n, h + r)]
    attention = [(d,), *query, (d, c + r), (c,), (c, n, h + w), (n, w, d)]
    dense = [*attention, (d,), (d, f), (d, f), (f, d)]
    moe = [*attention, (d,), (d, e), (e,), (e, d, g), (e, d, g), (e, g, d)]
    moe += [(d, m.n_shared_experts * g)] * 3
    block = dense * m.dense_layers + moe * m.moe_layers
    outer = [(512, d), (d,)] + [(512, d)] * (not m.tie_word_embeddings)
    return outer + dense * m.first_k_dense_replace + block * m.blocks


def declared(fields):
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    return model.declare(utils.Config(model=fields, mesh=one))


def per_token(fields, length):
    return hardware.palm_flops_per_token(fields, declared(fields), length)


@pytest.mark.parametrize(("q_lora_rank", "tied", "moe_layers"), [(0, True, 1), (11, False, 0)])
def test_parameters_are_the_sizes_of_the_tree(q_lora_rank, tied, moe_layers):
    """A vocabulary of 500 is padded to 512, and one of 512 is not."""
    fields = {"q_lora_rank": q_lora_rank, "tie_word_embeddings": tied, "moe_layers": moe_layers}
    fields = model_with(MODEL, vocab_size=500 if tied else 512, **fields)
    total = sum(math.prod(shape) for shape in all_shapes(fields))
    active = total - moe_layers * 3 * (8 - 2) * 3 * 40 * 24
    assert weights.count(declared(fields)) == (total, active)


def test_mfu_counts_the_output_matrix_once_half_of_the_attention_and_experts_that_are_passed():
    one = model_with(MODEL, blocks=1, dense_layers=1, moe_layers=0, prefix_layers=0)
    active = sum(math.prod(shape) for shape in all_shapes(one))
    attention = 6 * 1 * 5 * 100 * (7 + 6 + 9) / 2
    assert per_token(one, 100) == 6 * active + attention
    untied = dataclasses.replace(one, tie_word_embeddings=False)
    assert per_token(untied, 100) == 6 * active + attention
    more = dataclasses.replace(MODEL, n_routed_experts=16)
    idle = per_token(more, 64) - per_token(MODEL, 64)
    assert idle == 6 * 3 * (40 * 8 + 8)  # only the routers' columns and biases
