"""Figures of chips, and counts of parameters and FLOPs against sizes written out by hand."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

import hardware
import model
import utils
import weights
from device_kernels import choice
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
    assert hardware.chip_named("NVIDIA GeForce RTX 4090") is hardware.CHIPS["rtx4090"]


def test_figures_are_those_without_sparsity_and_in_their_units():
    for chip in hardware.CHIPS.values():
        assert not chip.float8_flops or chip.float8_flops == pytest.approx(2 * chip.flops, rel=0.02)
        assert chip.float32_flops <= chip.flops <= 3000 * hardware.TERA
        assert 7 * utils.GIB < chip.memory_bytes <= 192 * utils.GIB
        assert chip.network_bandwidth <= chip.link_bandwidth < chip.memory_bandwidth / 4
        assert chip.is_tpu or chip.capability


FIGURES = "name=own, flops=165,memory=24,bandwidth=1008,link=32"


def test_a_chip_that_is_not_known_is_given_by_its_figures():
    chip = hardware.chip_named(FIGURES)
    assert (chip.name, chip.flops, chip.float32_flops) == ("own", 165e12, 165e12)
    assert (chip.memory_bytes, chip.memory_bandwidth) == (24 * 2**30, 1008e9)
    assert chip.link_bandwidth == chip.network_bandwidth == 32e9
    assert hardware.platform_of(chip) == "gpu8.0" and not chip.is_tpu and not chip.float8_flops
    more = f"{FIGURES},float32=82,float8=330,network=1.5,capability=8.9"
    chip = hardware.chip_named(more)
    assert (chip.float32_flops, chip.float8_flops, chip.network_bandwidth) == (82e12, 330e12, 1.5e9)
    assert hardware.platform_of(chip) == "gpu8.9"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rtx9090", "is not known. Use one of v2, v3, .*rtx4090, .*cpu, or give .*flops=165"),
        (FIGURES.replace(",link=32", ""), "link is missing. Use for example --chip name=mycard"),
        (f"{FIGURES},fp8=330", "fp8 is none of name, capability, flops, memory"),
        (f"{FIGURES},", "an empty word is none of"),
        (FIGURES.replace("24", "24GB"), "memory 24GB is not a positive number"),
        (f"{FIGURES},float8=-1", "float8 -1 is not a positive number"),
        (FIGURES.replace("own", "h100"), "name h100 is that of a known chip"),
        (f"{FIGURES},capability=ada", "capability ada is not a compute capability"),
    ],
)
def test_wrong_names_and_figures_are_refused_with_an_example(name, problem):
    with pytest.raises(utils.ConfigError, match=f"--chip {name}.*{problem}"):
        hardware.chip_named(name)


def test_a_device_has_the_platform_of_its_chip():
    for chip in hardware.CHIPS.values():
        device = SimpleNamespace(
            platform="tpu" if chip.is_tpu else "gpu",
            device_kind=chip.kinds[0],
            compute_capability=chip.capability,
        )
        assert hardware.platform_of_device(device) == hardware.platform_of(chip)
    for kind in ("cpu", "tpu"):
        device = SimpleNamespace(platform=kind, device_kind="unknown")
        assert hardware.platform_of_device(device) == kind
    for old in ("v2", "v3"):
        assert hardware.platform_of(hardware.CHIPS[old]) in choice.OLD_TPUS


def config_in(dtype):
    return utils.Config(model=utils.Model(compute_dtype=dtype))


@pytest.mark.parametrize(
    ("platform", "dtype"),
    [
        ("cpu", "float32"),
        ("gpu7.0", "float32"),
        ("gpu7.5", "float32"),
        ("gpu8.0", "bfloat16"),
        ("gpu12.1", "bfloat16"),
        ("gpugfx942", "bfloat16"),
        ("tpu", "bfloat16"),
    ],
)
def test_the_automatic_dtype_is_one_that_the_device_multiplies_in(platform, dtype):
    assert utils.for_platform(config_in("auto"), platform).model.compute_dtype == dtype


def test_a_run_reports_a_device_without_figures_or_without_bfloat16():
    def notes(kind, capability="", dtype="bfloat16", platform="gpu"):
        device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
        return " ".join(hardware.notes(config_in(dtype), device))

    assert notes("NVIDIA L4", "8.9") == hardware.MFU_RULE
    assert notes("host", platform="cpu") == ""
    unknown = notes("NVIDIA RTX 9000", "8.6")
    assert unknown == (
        f"no MFU: hardware.py has no figures of 'NVIDIA RTX 9000'. plan.py takes them, as in "
        f"{hardware.EXAMPLE}"
    )
    assert hardware.chip_named(hardware.EXAMPLE.removeprefix("--chip "))
    assert "Tesla T4 has no bfloat16" in notes("Tesla T4", "7.5")
    assert "bfloat16" not in notes("Tesla T4", "7.5", "float32")


def test_the_peak_is_that_of_the_compute_dtype():
    h100, t4 = hardware.CHIPS["h100"], hardware.CHIPS["t4"]
    assert h100.peak("float32") == h100.float32_flops < h100.peak("bfloat16") == h100.flops
    assert t4.peak("float32") == t4.peak("bfloat16")


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


@pytest.mark.parametrize(
    ("name", "multiprocessors", "gigahertz", "per_clock"),
    [
        ("a10g", 80, 1.71, 512),
        ("l4", 58, 2.04, 1024),
        ("rtx3090", 82, 1.695, 512),
        ("rtx4090", 128, 2.52, 512),
        ("rtx5090", 170, 2.407, 512),
        ("rtx6000-ada", 142, 2.505, 1024),
        ("l40s", 142, 2.52, 1024),
        ("a100", 108, 1.41, 2048),
        ("h100", 132, 1.83, 4096),
    ],
)
def test_figures_are_multiprocessors_by_clock_by_flops_per_clock(
    name, multiprocessors, gigahertz, per_clock
):
    """A multiprocessor has 256 FLOPs per clock in float32 (A100: 128), in bfloat16 `per_clock`,
    and in FP8 twice that."""
    chip, clocks = hardware.CHIPS[name], multiprocessors * gigahertz * 1e9
    assert chip.flops == pytest.approx(clocks * per_clock, rel=0.02)
    assert chip.float32_flops == pytest.approx(clocks * (128 if name == "a100" else 256), rel=0.1)
    assert chip.float8_flops in (0, pytest.approx(2 * clocks * per_clock, rel=0.02))
