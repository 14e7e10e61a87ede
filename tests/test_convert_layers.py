"""Import of families whose layers differ, by configs as published, and of experts in MXFP4.

The configs and the numbers of parameters were written down without access to the hub.

tests/system/test_families.py compares their logits with those of transformers.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import convert
import utils
from hf import model_config, safetensors_files, tensors
from hf_case import write_folder
from hf_run import make_run, stored
from utils import FULL_ATTENTION, SLIDING_ATTENTION

WINDOWS = ["sliding_attention"]
COMMON = {"max_position_embeddings": 32768, "attention_bias": False}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
PUBLISHED = {  # what each config.json has, and the number of its parameters
    "google/gemma-3-1b-it": ({
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "rope_theta": 1000000,
        "rope_local_base_freq": 10000, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_scaling": None,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    }, 999_885_952),
    "openai/gpt-oss-20b": ({
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rope_theta": 150000,
        "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "hidden_act": "silu",
        "rope_scaling": YARN
        | {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "mxfp4"},
    }, 20_914_757_184),
    "allenai/Olmo-3-1025-7B": ({
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "sliding_window": 4096, "rope_theta": 500000,
        "rms_norm_eps": 1e-6, "layer_types": [*WINDOWS * 3, "full_attention"] * 8,
        "rope_scaling": YARN
        | {"factor": 8.0, "attention_factor": 1.2079441541679836,
           "original_max_position_embeddings": 8192},
    }, 7_298_011_136),
    "allenai/OLMo-2-0425-1B": ({
        "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "rope_theta": 500000, "rms_norm_eps": 1e-6,
    }, 1_484_916_736),
    "HuggingFaceTB/SmolLM3-3B": ({
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "rope_theta": 5000000.0, "rms_norm_eps": 1e-6,
        "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * 36, "use_sliding_window": False, "mlp_bias": False,
    }, 3_075_098_624),
}  # fmt: skip
GEMMA3, OSS, OLMO3, OLMO2, SMOLLM3 = (COMMON | table for table, _ in PUBLISHED.values())


def read(table, **values):
    return model_config.from_hf(table | values, Path("config.json")).model


def ropes(m):
    """The base and the factor of the rotary embedding of each layer of the model, by its window."""
    runs = {run.window: run.rope for run in (*m.prefix, *m.runs) if run.rope}
    return {w: (rope.rope_theta, rope.rope_scaling.factor) for w, rope in runs.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_parameters(name):
    table, parameters = PUBLISHED[name]
    found = model_config.from_hf(COMMON | table, Path("config.json"))
    config = utils.Config(model=found.model)
    mappings = tensors.weight_mappings(config, found.kind)
    shapes = tensors.tensor_shapes(mappings, found.model, found.kind, np.dtype(np.float32))
    assert sum(math.prod(shape) for _, _, shape in shapes) == parameters
    assert model_config.kind_of(found.model) == found.kind
    assert not model_config.unsupported(found.model, found.kind)


def test_which_layers_have_a_window_and_which_rotary_embedding():
    m = read(GEMMA3)
    assert (m.first_k_dense_replace, m.blocks, m.period) == (2, 4, 6)
    # Layers 3 to 5 of 26, the 6th, and 7 and 8.
    assert [(run.layers, run.window) for run in m.runs] == [(3, 512), (1, 0), (2, 512)]
    assert ropes(m) == {512: (1e4, 1.0), 0: (1e6, 1.0)}
    assert m.embedding_multiplier == 1152**0.5
    m = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert ropes(m) == {512: (1e4, 1.0), 0: (1e6, 8.0)}
    assert ropes(read(OLMO3)) == {4096: (5e5, 1.0), 0: (5e5, 8.0)}
    by_layer = {
        "full_attention": YARN | {"factor": 2.0, "rope_theta": 7.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
    }
    m = read(OLMO3, rope_scaling=None, rope_parameters=by_layer)
    assert ropes(m) == {4096: (9.0, 1.0), 0: (7.0, 2.0)}
    both = dict.fromkeys(by_layer, by_layer["full_attention"])
    m = read(OLMO3, rope_scaling=None, rope_parameters=both)
    assert ropes(m) == {4096: (7.0, 2.0), 0: (7.0, 2.0)}
    assert ropes(read(OSS)) == {128: (150000.0, 32.0), 0: (150000.0, 32.0)}
    assert not read(OSS).rope_scaling.truncate
    # Without a list transformers has one of its own.
    del (table := dict(OLMO3))["layer_types"]
    assert read(table).layer_types == (SLIDING_ATTENTION,) * 3 + (FULL_ATTENTION,)
    # One block, where the rest of the layers cannot come before the blocks.
    five = {"num_hidden_layers": 5, "layer_types": OSS["layer_types"][:5]}
    assert (read(OSS, **five).blocks, len(read(OSS, **five).runs)) == (1, 5)
    uniform = {"layer_types": WINDOWS * 32}
    assert (read(OLMO3, **uniform).layer_types, read(OLMO3, **uniform).sliding_window) == ((), 4096)
    uniform = {"layer_types": ["full_attention"] * 32}
    assert (read(OLMO3, **uniform).layer_types, read(OLMO3, **uniform).sliding_window) == ((), 0)
    m = read(SMOLLM3)
    assert [(run.layers, bool(run.rope)) for run in m.runs] == [(3, True), (1, False)]
    assert read(SMOLLM3, no_rope_layers=[1] * 36).no_rope_layer_interval == 0
    few = {"num_hidden_layers": 3, "layer_types": None, "no_rope_layers": None}
    m = read(SMOLLM3, **few)
    assert (m.no_rope_layer_interval, m.first_k_dense_replace) == (0, 0)
    # A list has precedence over a pattern.
    listed = ["full_attention", "sliding_attention"] * 13
    assert read(GEMMA3, layer_types=listed).layer_types == tuple(listed[:2])
    # Without windows there is one rotary embedding.
    for table, layers, kind in ((GEMMA3, 26, "gemma3_text"), (OLMO3, 32, "olmo2")):
        m = read(table, layer_types=["full_attention"] * layers)
        assert m.rope_local_base_freq == 0
        assert model_config.kind_of(m) == kind
        assert not model_config.unsupported(m, kind)


def test_a_class_with_windows_gets_one_also_if_no_layer_has_it():
    config = utils.Config(model=read(OSS, layer_types=["full_attention"] * 24))
    table = model_config.to_hf(config, "gpt_oss", "float32", 0)
    assert (table["layer_types"], table["sliding_window"]) == (["full_attention"] * 24, 131072)


@pytest.mark.parametrize(
    ("table", "values", "text"),
    [
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3, {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3, {"model_type": "gemma3"}, r"'gemma3'.*gemma3_text"),
        (OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        (OSS, {"attention_bias": False}, "attention_bias False"),
        (OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*fp8"),
        (OLMO3, {"layer_types": ["chunked_attention"] * 32}, "layer_types .*chunked_attention"),
        (OLMO3, {"layer_types": [*WINDOWS, "full_attention"]}, "layer_types .*not supported"),
        (OLMO3, {"layer_types": WINDOWS * 33}, "layer_types .*not supported"),
        (OLMO3, {"layer_types": []}, r"layer_types \[\]"),
        (OLMO3, {"sliding_window": None}, "sliding_window 0"),
        (OLMO2, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 0] * 12}, "no_rope_layers"),
        (SMOLLM3, {"layer_types": WINDOWS * 36, "sliding_window": 9}, "layer_types .*sliding_"),
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window True"),
    ],
)  # fmt: skip
def test_what_a_family_has_that_is_not_supported_is_named(table, values, text):
    with pytest.raises(ValueError, match=text):
        read(table, **values)


def test_the_former_setting_of_positions_in_a_folder_keeps_its_meaning_or_is_refused():
    table = model_config.to_hf(utils.Config(), "latent_moe", "float32", 0)
    del table["no_rope_layer_interval"]
    assert read(table, rope_in_moe_layers=True).no_rope_layer_interval == 0
    table["rope_in_moe_layers"] = False
    assert read(table).no_rope_layer_interval == utils.Model().decoder_sparse_step
    dense = {"n_routed_experts": 0, "first_k_dense_replace": 2}
    assert read(table, **dense).no_rope_layer_interval == 0
    with pytest.raises(utils.ConfigError, match="rope_in_moe_layers False"):
        read(table, first_k_dense_replace=2)


# The numbers that 4 bits stand for: a sign, two bits of exponent, one of mantissa.
CODES = [
    (-1) ** (code >> 3) * ((code & 1) / 2 if not code >> 1 & 3 else
     2 ** ((code >> 1 & 3) - 1) * (1 + (code & 1) / 2))
    for code in range(16)
]  # fmt: skip


def test_experts_in_mxfp4_are_those_of_their_codes_and_exponents(tmp_path):
    m = read(
        OSS, vocab_size=101, hidden_size=96, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_local_experts=3,
        num_experts_per_tok=2, layer_types=OSS["layer_types"][:2],
    )  # fmt: skip
    make_run(tmp_path / "run", model=m)
    convert.main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    found = safetensors_files.read_folder(tmp_path / "out")
    arrays, random = (
        {name: tensor.read() for name, tensor in found.items()},
        np.random.default_rng(0),
    )
    expected = {}
    for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = arrays.pop(name).shape
        codes = random.integers(0, 16, (experts, outputs, inputs // 32, 32), dtype=np.uint8)
        scales = random.integers(120, 130, codes.shape[:-1], dtype=np.uint8)
        arrays[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        arrays[f"{name}_scales"] = scales
        values = np.array(CODES)[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
        expected[name] = values.reshape(experts, outputs, inputs).swapaxes(1, 2)
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    table["quantization_config"] = {"quant_method": "mxfp4"}
    write_folder(tmp_path / "packed", table, arrays)
    folder, out = str(tmp_path / "packed"), str(tmp_path / "back")
    convert.main(["import", "--folder", folder, "--out", out])
    back = stored(tmp_path / "back")
    for layer, run in enumerate(m.runs):
        both = expected[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = expected[f"model.layers.{layer}.mlp.experts.down_proj"]
        for part, w in {"gate": both[..., 0::2], "up": both[..., 1::2], "down": down}.items():
            np.testing.assert_array_equal(
                back[f"weights.blocks.{run.name}.moe.experts.{part}"][0], w
            )
    # Scales that would be spread over all blocks of an output, and none.
    scales, out = "model.layers.0.mlp.experts.down_proj_scales", str(tmp_path / "no")
    one, others = arrays[scales][..., :1], {n: a for n, a in arrays.items() if n != scales}
    for name, damaged in {"spread": others | {scales: one}, "less": others}.items():
        write_folder(tmp_path / name, table, damaged)
        with pytest.raises(ValueError, match=r"lacks 1 of .*experts.down_proj"):
            convert.main(["import", "--folder", str(tmp_path / name), "--out", out])
