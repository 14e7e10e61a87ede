"""Export and import without Hugging Face's code: exact, in bounded parts, or refused by name.

make_hf_reference.py opens folders of hf_case.hf_tensors with transformers, whose logits are those
of reference.py with these weights (test_reference.py).
"""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import convert
import generate
import hf_case
import utils
from conftest import ROOT
from data import chat
from data.tokenizer import load_tokenizer
from hf import export_checkpoint, import_checkpoint, model_config, safetensors_files
from hf_case import hf_tensors, model_with, write_folder
from hf_run import (
    PUBLISHED,
    SIZES,
    make_run,
    run_arrays,
    stored,
    weights_of,
    write_moonshot,
    write_sentencepiece,
)
from runtime import cli

FILE_BYTES = 100_000  # of exported files, so that there are several


def export(run, out, *flags):
    with mock.patch.object(export_checkpoint, "FILE_BYTES", FILE_BYTES):
        convert.main(["export", "--run", str(run), "--out", str(out), *flags])
    return safetensors_files.read_folder(out)


def import_(folder, out, *flags):
    convert.main(["import", "--folder", str(folder), "--out", str(out), *flags])
    found = cli.load(out / "config.toml").model
    assert found.compute_dtype == "auto"  # float32 on a CPU
    return utils.changed(found, {"compute_dtype": utils.Model().compute_dtype})


def settings(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def change(folder, **values):
    (folder / "config.json").write_text(json.dumps(settings(folder) | values))


def refused(folder, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        import_(folder, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*")), "something was left"


def same(found, expected):
    """Compare tensors of a folder, or arrays of a run, with their values by name."""
    assert found.keys() == expected.keys()
    for name, w in expected.items():
        value = found[name].read() if hasattr(found[name], "read") else found[name]
        np.testing.assert_array_equal(value, w, name)


def has_weights(run, m, tree):
    """Compare a run with weights, whose padding rows are imported as zeros."""
    expected = run_arrays(tree)
    for name in {"weights.first.embedding", "weights.last.output"} & expected.keys():
        w = expected[name]
        expected[name] = np.where(np.arange(len(w))[:, None] < m.vocab_size, w, 0)
    same(stored(run), expected)


SOFTMAX = {"scoring_func": "softmax", "norm_topk_prob": False}
GROUPED = {
    "attention": "gqa", "vocab_size": 997, "hidden_size": 36, "intermediate_size": 20,
    "blocks": 3, "dense_layers": 1, "moe_layers": 0, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "rope_theta": 500.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "moe_layers": 1, "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 0, "scoring_func": "softmax", "dense_layers": 0,
}  # fmt: skip
V3 = SIZES | {
    "prefix_layers": 1, "q_lora_rank": 10, "n_shared_experts": 2, "tie_word_embeddings": False,
    "latent_rms_norm_eps": 1e-6, "rope_factor": 8.0, "rope_original_max_position_embeddings": 64,
}  # fmt: skip
V2_GROUPS = SIZES | SOFTMAX | {
    "prefix_layers": 1, "qk_nope_head_dim": 10, "n_group": 4, "topk_group": 2,
    "topk_method": "group_limited_greedy", "rms_norm_eps": 0.02, "latent_rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
OPTIONS = {"prefix_layers": 1, "dense_layers": 2, "no_rope_layer_interval": 3}
KINDS = {  # the model type, and the model here
    "v3": ("deepseek_v3", V3),
    "v3, dense first": (
        "deepseek_v3", SIZES | {"dense_layers": 3, "blocks": 1, "n_shared_experts": 0}
    ),
    "v2": ("deepseek_v2", V2_GROUPS),
    "own": ("latent_moe", SIZES | OPTIONS | {"n_shared_experts": 0}),
    "own, grouped": (
        "latent_moe",
        GROUPED | EXPERTS | OPTIONS
        | {"attention_bias": True, "qk_norm": True, "sliding_window": 37, "n_shared_experts": 2},
    ),
    "llama": ("llama", GROUPED | {f"rope_{name}": value for name, value in LLAMA3.items()}),
    "mixtral": ("mixtral", GROUPED | EXPERTS | {"sliding_window": 41}),
    "qwen2": ("qwen2", GROUPED | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        GROUPED | EXPERTS | {"qk_norm": True, "dense_layers": 1, "norm_topk_prob": False},
    ),
}  # fmt: skip
WRITTEN = {  # what config.json has that does not come back in the model
    "v3": {"first_k_dense_replace": 1, "max_position_embeddings": 512, "num_key_value_heads": 3},
    "v3, dense first": {
        "first_k_dense_replace": 3, "n_shared_experts": 1, "tie_word_embeddings": False,
    },
    "llama": {"rope_scaling": LLAMA3, "max_position_embeddings": 512, "sliding_window": None},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_each_kind_is_exported_and_imported_with_every_bit(name, tmp_path):
    kind, fields = KINDS[name]
    m = model_with(utils.Model(), **fields)
    tree = weights_of(m)
    make_run(tmp_path / "run", model=m)
    own = ["--remote_code"] * (kind == "latent_moe")
    found = export(tmp_path / "run", tmp_path / "out", *own)
    expected = hf_tensors(m, tree, kind)
    if kind == "deepseek_v3" and m.moe_layers and not m.n_shared_experts:  # its class needs one
        none = np.zeros((m.moe_intermediate_size, m.hidden_size), np.float32)
        three = {"gate": none.T, "up": none.T, "down": none}
        expected |= hf_case.linear(f"model.layers.{m.dense_layers}.mlp.shared_experts", three)
    if kind.startswith("deepseek") and m.tie_word_embeddings:  # its classes in vLLM have no ties
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    same(found, expected)
    written = settings(tmp_path / "out")
    assert written["model_type"] == kind and written["hidden_size"] == m.hidden_size
    assert WRITTEN.get(name, {}).items() <= written.items()

    back = import_(tmp_path / "out", tmp_path / "back")
    after = {"router_bias_update_speed": 0.0, "compute_dtype": "bfloat16"}
    if m.attention == "mla" and not own:
        after["latent_rms_norm_eps"] = 1e-6
        dense = m.num_hidden_layers - m.blocks * m.moe_layers
        after |= {"first_k_dense_replace": dense * m.moe_layers, "decoder_sparse_step": 1}
        after["n_shared_experts"] = max(1, m.n_shared_experts)
    if m.moe_layers:
        after |= {"capacity_factor": 0.0, "eval_capacity_factor": 0.0}
    assert back == dataclasses.replace(m, **after)
    if back.decoder_sparse_step == m.decoder_sparse_step:  # otherwise other arrays
        has_weights(tmp_path / "back", m, tree)
    same(export(tmp_path / "back", tmp_path / "again", *own), expected)


@pytest.mark.parametrize("name", ["interleaved_tied", "yarn_groups", "prefix_two_shared"])
def test_a_folder_whose_logits_in_transformers_are_known_is_imported_exactly(name, tmp_path):
    case = hf_case.CASES[name]
    m = model_with(utils.Model(), **case.model)
    tree = weights_of(m, case.seed)
    tensors = hf_tensors(m, tree, interleaved=case.interleaved)
    write_folder(tmp_path / "folder", hf_case.config_json(case), tensors)
    found = import_(tmp_path / "folder", tmp_path / "run")
    other = {"capacity_factor": 0.0, "router_bias_update_speed": 0.0, "compute_dtype": "bfloat16"}
    assert found == dataclasses.replace(m, **other)
    has_weights(tmp_path / "run", m, tree)


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    """A run of V3, with metrics, and the folder of several files to which it was exported."""
    run, out = (tmp_path_factory.mktemp("v3") / name for name in ("run", "out"))
    make_run(run, **V3)
    records = [{"step": 2, "loss/val": 9.5}, {"step": 3, "loss/val": 8.25}, {"step": 4}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    export(run, out)
    return run, out


@pytest.fixture
def copied(v3, tmp_path):
    """A copy of the exported folder, to be changed."""
    return shutil.copytree(v3[1], tmp_path / "copied")


def test_bfloat16_is_rounded_without_the_bias_and_parts_are_bounded_and_in_order(v3, tmp_path):
    half = export(v3[0], tmp_path / "half", "--dtype=bfloat16")
    tensors, parts = safetensors_files.read_folder(v3[1]), {}
    for name, tensor in tensors.items():
        dtype = np.float32 if name.endswith("e_score_correction_bias") else jnp.bfloat16
        found = half[name].read()
        assert found.dtype == dtype and np.array_equal(found, tensor.read().astype(dtype))
        parts.setdefault(tensor.file.name, []).append(tensor.bytes)
    assert len(parts) > 5
    assert all(len(part) == 1 or sum(part) <= FILE_BYTES for part in parts.values())
    layers = [int(name.split(".")[2]) for name in tensors if ".layers." in name]
    assert layers == sorted(layers)
    index = settings(v3[1], safetensors_files.INDEX)
    assert index["weight_map"] == {name: t.file.name for name, t in tensors.items()}
    assert index["metadata"]["total_size"] == sum(t.bytes for t in tensors.values())


def test_the_folder_has_a_model_card_the_modelling_file_and_the_template_of_tuning(v3, tmp_path):
    export(v3[0], tmp_path / "own", "--remote_code", "--step", "3")
    card = (tmp_path / "own" / "README.md").read_text()
    assert "The validation loss after 3 steps was 8.2500 nats per token." in card
    assert "kv_lora_rank = 24" in card and "trust_remote_code=True" in card
    assert "'role': 'user'" not in card
    ends = settings(tmp_path / "own", "generation_config.json")["eos_token_id"]
    assert ends == load_tokenizer("sample").eot_token
    copied = tmp_path / "own" / "modeling_latent_moe.py"
    assert copied.read_text() == (ROOT / "hf/modeling_latent_moe.py").read_text()
    make_run(tmp_path / "run", more_tokens={"chat_template": chat.PLAIN})
    export(tmp_path / "run", tmp_path / "out", "--remote_code")
    assert settings(tmp_path / "out", "tokenizer_config.json")["chat_template"] == chat.PLAIN_JINJA
    assert "'role': 'user'" in (tmp_path / "out" / "README.md").read_text()


def test_an_exported_folder_keeps_what_no_weight_holds_of_the_imported_one(copied, tmp_path):
    facts = {"max_position_embeddings": 8192, "bos_token_id": 7, "pad_token_id": 5}
    change(copied, **facts)
    generation = {"bos_token_id": 7, "temperature": 0.6, "do_sample": True, "pad_token_id": 5}
    generation["eos_token_id"] = [load_tokenizer(str(copied)).eot_token, 9]  # texts end at both
    (copied / "generation_config.json").write_text(json.dumps(generation))
    import_(copied, tmp_path / "run", "--train.seq_len", "64")
    (tmp_path / "run").rename(tmp_path / "moved")
    for own in ([], ["--remote_code"]):
        out = tmp_path / f"out{len(own)}"
        export(tmp_path / "moved", out, *own)
        expected = facts | {"eos_token_id": generation["eos_token_id"]}
        assert {name: settings(out)[name] for name in expected} == expected
        assert settings(out, "generation_config.json") == generation
        assert settings(out, "tokenizer_config.json")["model_max_length"] == 8192


def test_a_folder_with_a_tiktoken_model_or_sentencepiece_is_imported_and_exported(copied, tmp_path):
    (copied / "tokenizer.json").unlink()
    count = write_moonshot(copied)
    import_(copied, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer" / "tiktoken.model").is_file()
    export(tmp_path / "run", tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).eot_token == count + 1
    (copied / "tiktoken.model").unlink()
    write_sentencepiece(copied, "segment")
    import_(copied, tmp_path / "pieces")
    export(tmp_path / "pieces", tmp_path / "exported")
    exported = load_tokenizer(str(tmp_path / "exported"))
    assert exported.content == load_tokenizer(str(copied)).content and exported.special.adds_bos
    assert (tmp_path / "exported" / "tokenizer_config.json").is_file()


def test_a_folder_without_tokenizer_makes_no_text_and_no_warning(copied, tmp_path, caplog):
    (copied / "tokenizer.json").write_text("{}")
    refused(copied, "is not a tokenizer.json", tmp_path)
    (copied / "tokenizer.json").unlink()
    import_(copied, tmp_path / "run")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with pytest.raises(ValueError, match="run has no tokenizer: the folder it was imported from"):
        generate.main(["--run", str(tmp_path / "run"), "--prompt", "def"])
    export(tmp_path / "run", tmp_path / "again")
    assert settings(tmp_path / "again")["eos_token_id"] == load_tokenizer("sample").eot_token


def test_float8_blocks_are_scaled_and_prediction_layers_are_left_out(tmp_path, capsys):
    case = hf_case.CASES["moe"]
    m = model_with(utils.Model(), **case.model)
    tree = weights_of(m)
    tensors, name = hf_tensors(m, tree, interleaved=False), "model.layers.1.self_attn.o_proj.weight"
    rows, columns = tensors[name].shape
    assert rows % 16 and columns % 8, "the last blocks are not whole"
    numbers = (3 * tensors[name]).astype(jnp.float8_e4m3fn)
    scale = np.arange(1, 1 + -(-rows // 16) * -(-columns // 8), dtype=np.float32)
    scale = scale.reshape(-(-rows // 16), -1)
    tensors |= {name: numbers, f"{name}_scale_inv": scale}
    tensors["model.layers.4.eh_proj.weight"] = np.ones((2, 2), np.float32)
    folder, table = tmp_path / "float8", hf_case.config_json(case) | {"num_nextn_predict_layers": 1}
    write_folder(folder, table, tensors)
    change(folder, quantization_config={"quant_method": "fp8"})
    refused(folder, r"o_proj.weight_scale_inv is \(.*\(128, 128\) needs \(1, 1\)", tmp_path)
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    change(folder, quantization_config=blocks)
    import_(folder, tmp_path / "run")
    assert "left out: 1 multi-token prediction layers" in capsys.readouterr().out
    i, j = np.indices((rows, columns))
    out = tree["blocks"]["moe"]["attention"]["out"]
    out[1] = (numbers.astype(np.float32) * scale[i // 16, j // 8]).T.reshape(out[1].shape)
    has_weights(tmp_path / "run", m, tree)


def test_redundant_tensors_are_ignored_and_an_output_matrix_that_differs_is_not(tmp_path):
    case = hf_case.CASES["interleaved_tied"]
    m = model_with(utils.Model(), **case.model)
    tensors = hf_tensors(m, weights_of(m, case.seed))
    embedding = tensors["model.embed_tokens.weight"]
    more = {"lm_head.weight": embedding}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    # A tensor that two files have, and one that the index has in another file.
    repeated = {"model.norm.weight": tensors["model.norm.weight"]}
    for name, output in {"tied": embedding, "untied": 1 + embedding}.items():
        parts = tensors, more | repeated | {"lm_head.weight": output}
        where = {"model.norm.weight": "model-00002-of-00002.safetensors"}
        write_folder(tmp_path / name, hf_case.config_json(case), *parts, index=where)
        found = import_(tmp_path / name, tmp_path / f"run-{name}")
        assert found.tie_word_embeddings == (name == "tied")
    has_weights(tmp_path / "run-tied", m, weights_of(m, case.seed))
    bare = {name.removeprefix("model."): w for name, w in tensors.items()}
    write_folder(tmp_path / "bare", hf_case.config_json(case), bare)
    import_(tmp_path / "bare", tmp_path / "run-bare")
    has_weights(tmp_path / "run-bare", m, weights_of(m, case.seed))


DEEPSEEK = PUBLISHED["deepseek-v3"]
YARN = DEEPSEEK["rope_scaling"]
V2 = SOFTMAX | {"model_type": "deepseek_v2"}
LLAMA = {
    "model_type": "llama", "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0,
}  # fmt: skip
MISTRAL, QWEN2 = LLAMA | {"model_type": "mistral"}, LLAMA | {"model_type": "qwen2"}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE |= {"moe_intermediate_size": 8}


def read(base, **values):
    """The model of a config.json with other values; ... is left out."""
    table = {name: value for name, value in (base | values).items() if value is not ...}
    return model_config.from_hf(table, Path("config.json"))


def read_v3(**values):
    return read(DEEPSEEK, **values).model


def test_published_configs_are_read():
    for table in PUBLISHED.values():
        found = read(table)
        for name in ("num_hidden_layers", "first_k_dense_replace", "n_group", "scoring_func"):
            assert getattr(found.model, name) == table[name], name
        assert found.model.rope_scaling.factor == (table["rope_scaling"] or {"factor": 1})["factor"]
        assert found.model.capacity_factor == found.model.eval_capacity_factor == 0  # dropless
        assert found.interleaved
        assert found.skipped_layers == table.get("num_nextn_predict_layers", 0)


def test_rotary_positions_are_read_where_transformers_reads_them():
    original, written = "original_max_position_embeddings", YARN | {"rope_theta": 7.0}
    assert read_v3(rope_scaling=..., rope_parameters=written).rope_scaling.factor == 40
    assert read_v3(rope_scaling=..., rope_theta=..., rope_parameters=written).rope_theta == 7
    few = {name: YARN[name] for name in ("type", "factor", original)}
    for less in (few, dict.fromkeys(YARN) | few):
        scaling = read_v3(rope_scaling=less).rope_scaling
        assert (scaling.beta_fast, scaling.beta_slow) == (32, 1)
        assert scaling.mscale == scaling.mscale_all_dim == 0
    for given in (YARN, LLAMA3):
        table = {"rope_scaling": given | {original: None}, "max_position_embeddings": 77}
        assert getattr(read_v3(**table).rope_scaling, original) == 77
        assert getattr(read_v3(**table, **{original: 32}).rope_scaling, original) == 32


def test_settings_that_are_absent_or_have_no_effect_are_read_as_each_class_does():
    v2 = {"model_type": "deepseek_v2", "scoring_func": ..., "norm_topk_prob": ...}
    m = read_v3(**v2, n_group=8, topk_method="greedy", topk_group=None)
    assert (m.scoring_func, m.norm_topk_prob, m.n_group, m.topk_group) == ("softmax", False, 1, 1)
    sliding = {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2}
    m = read(LLAMA, rope_theta=..., num_key_value_heads=..., **sliding).model
    assert (m.rope_theta, m.num_key_value_heads, m.head_dim, m.sliding_window) == (1e4, 4, 8, 0)
    assert read(MISTRAL, **sliding).model.sliding_window == 7
    assert read(MISTRAL).model.sliding_window == 4096
    assert read(MISTRAL, sliding_window=None).model.sliding_window == 0
    unused = {"sliding_window": 7, "use_sliding_window": False}
    assert read(QWEN2, **unused).model.sliding_window == 0
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    m = read(LLAMA, rope_theta=..., **experts).model
    assert (m.rope_theta, m.sliding_window, m.rms_norm_eps) == (1e6, 0, 1e-5)
    assert m.moe_intermediate_size == 48 and m.norm_topk_prob


@pytest.mark.parametrize(
    ("base", "values", "text"),
    [
        (DEEPSEEK, {"model_type": "gpt2", "architectures": ["G"]}, r"'gpt2' \(G\).*deepseek_v3"),
        (DEEPSEEK, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias True"),
        (DEEPSEEK, {"num_key_value_heads": 1}, "num_key_value_heads 1"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (DEEPSEEK, {"model_type": "deepseek_v2"}, "scoring_func 'sigmoid'"),
        (DEEPSEEK, V2 | {"norm_topk_prob": True}, "norm_topk_prob True"),
        (DEEPSEEK, V2 | {"n_group": 4, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (DEEPSEEK, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "embedding: .*dynamic"),
        (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.5}}, "rotary embedding: .*1.5"),
        (DEEPSEEK, {"rope_scaling": YARN | {"factor": None}}, "lacks factor"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*gptq"),
        (DEEPSEEK, {"hidden_size": None}, "lacks hidden_size"),
        (DEEPSEEK, {"n_group": ...}, "lacks n_group"),  # its default differs between classes
        (LLAMA, {"mlp_bias": True}, "mlp_bias True"),
        (LLAMA, {"is_causal": False}, "is_causal False"),
        (LLAMA, {"rope_scaling": YARN}, "rope_scaling .*mscale"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types .*full_attention"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 7}, "use_sliding_window True"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN3_MOE, {"decoder_sparse_step": 3}, "decoder_sparse_step 3"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused_by_its_setting(base, values, text):
    with pytest.raises(ValueError, match=text):
        read(base, **values)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dense_layers": 1}, "model.decoder_sparse_step 2"),
        ({"no_rope_layer_interval": 2}, "model.no_rope_layer_interval 2"),
        ({"rms_norm_eps": 1e-5}, "model.rms_norm_eps 1e-05"),
        ({"n_routed_experts": 1, "num_experts_per_tok": 1}, "model.n_routed_experts 1"),
        ({"sliding_window": 8}, "model.sliding_window 8"),
        (
            {"n_group": 2, "topk_method": "group_limited_greedy"},
            "model.topk_method group_limited_greedy",
        ),
        ({"scoring_func": "softmax"}, "model.norm_topk_prob"),
        (SOFTMAX | {"hidden_size": 49}, "model.hidden_size 49"),
        (SOFTMAX, "model.qk_nope_head_dim"),
        (GROUPED | EXPERTS | {"n_shared_experts": 1}, "model.n_shared_experts 1"),
        (GROUPED | {"attention_bias": True, "qk_norm": True}, "model.qk_norm True"),
    ],
)
def test_what_a_model_has_that_transformers_does_not_support_is_named(fields, named):
    m = model_with(utils.Model(), **SIZES | {"moe_layers": 1} | fields)
    assert any(named in reason for reason in model_config.unsupported(m, model_config.kind_of(m)))


def test_a_run_that_its_class_cannot_represent_is_refused(tmp_path):
    make_run(tmp_path / "run", qk_nope_head_dim=10)  # with a bias
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    softmax = text.replace('scoring_func = "sigmoid"', 'scoring_func = "softmax"')
    softmax = softmax.replace("norm_topk_prob = true", "norm_topk_prob = false")
    for changed, message in (
        (softmax, r"moe.bias that is not zero .*Use --remote_code"),
        (text.replace("size = 20", "size = 22"), r"of another model than its config"),
        (text.replace("types = []", 'types = ["full_attention"]'), "layer_types full_attention"),
        (text.replace("_interval = 0", "_interval = 1"), r"_interval 1, .*Use --remote_code"),
    ):
        assert changed != text
        file.write_text(changed)
        with pytest.raises(ValueError, match=message):
            export(tmp_path / "run", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_path_or_size_that_cannot_be_used_is_named(v3, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for command, source in zip((export, import_), v3, strict=True):
        with pytest.raises(ValueError, match=r"--out .*full is not empty"):
            command(source, tmp_path / "full")
        with pytest.raises(ValueError, match=r"--out .*file.new was not written"):
            command(source, tmp_path / "full" / "file" / "new")
    with pytest.raises(ValueError, match=r"--run .*none does not exist"):
        export(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ValueError, match="there is no checkpoint of step 9"):
        export(v3[0], tmp_path / "out", "--step", "9")


def test_an_interrupted_conversion_leaves_nothing_and_can_run_again(v3, tmp_path, monkeypatch):
    (tmp_path / "export").mkdir()
    for command, source in zip((export, import_), v3, strict=True):
        to = tmp_path / command.__name__
        is_new = not to.exists()
        with monkeypatch.context() as patch:
            target = export_checkpoint if command is export else import_checkpoint
            name = "write_json" if command is export else "read_float32"
            patch.setattr(target, name, mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                command(source, to)
        assert not list(to.glob("*")) and to.exists() != is_new
        command(source, to)


def test_an_import_on_a_full_disk_is_refused_and_leaves_nothing(v3, small_disk):
    refused(v3[1], r"run was not written: .*No space left on device", small_disk[0])
    assert not any(small_disk[0].iterdir())


def test_flags_override_settings_that_weights_do_not_depend_on(copied, tmp_path):
    import_(copied, tmp_path / "run", "--model.capacity_factor", "1.5", "--optimizer.lr", "0.1")
    config = cli.load(tmp_path / "run" / "config.toml")
    assert (config.model.capacity_factor, config.model.eval_capacity_factor) == (1.5, 0.0)
    assert config.optimizer.lr == 0.1
    with pytest.raises(ValueError, match=r"copied is of another model: model.rope_theta"):
        import_(copied, tmp_path / "other", "--model.rope_theta", "5.0")
    with pytest.raises(ValueError, match="unknown flag --model"):
        export(tmp_path / "run", tmp_path / "out", "--model.rope_theta", "5.0")


QUERY, NORM, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"
SQUARE = np.ones((2, 2), np.float32)


def renamed(tensors, old, new):
    return {name.replace(old, new): w for name, w in tensors.items()}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (lambda t: {n: w for n, w in t.items() if n != HEAD}, r"lacks 1 of 21 .*lm_head.weight"),
        (lambda t: renamed(t, "model.", "base_model.model."),
         r"lacks 20 of .* and 10 more\. It has 20 tensors .*: model.base_model.* 10 more\. They"),
        (lambda t: t | {QUERY: t[QUERY].astype(np.float64)}, "of type F64"),
        (lambda t: t | {f"{QUERY}_scale_inv": SQUARE}, "quantization_config does not match"),
        (lambda t: t | {f"{QUERY}_scale": SQUARE}, "weight_scale. They belong to another model"),
        (lambda t: t | {QUERY.replace("weight", "bias"): t[NORM]}, "q_proj.bias"),
        (lambda t: t | renamed(t, ".1.", ".2."), r"has 9 tensors .*layers.2"),
        (lambda t: t | {NORM: t[NORM][1:]}, r"is \(31,\), and by the config \(32,\)"),
    ],
)  # fmt: skip
def test_a_folder_with_the_tensors_of_another_model_is_refused_by_name(changed, text, tmp_path):
    m = read(LLAMA, num_nextn_predict_layers=1).model
    made = changed(hf_tensors(m, weights_of(m), "llama"))
    write_folder(tmp_path / "folder", LLAMA | {"num_nextn_predict_layers": 1}, made)
    refused(tmp_path / "folder", text, tmp_path)


def test_damaged_files_are_named(copied, tmp_path):
    first, second, *_ = sorted(copied.glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    refused(copied, f"{first.name} is truncated: it has {len(whole) - 1} bytes", tmp_path)
    first.write_bytes(whole[:20])
    refused(copied, f"{first.name} is not a safetensors file", tmp_path)
    first.write_bytes(whole)
    second.unlink()
    refused(copied, f"lacks 1 of the .* files .* first {second.name}", tmp_path)
    (copied / safetensors_files.INDEX).write_text("version")
    refused(copied, f"{safetensors_files.INDEX} has no valid weight_map", tmp_path)
    (copied / safetensors_files.INDEX).unlink()
    refused(copied, "has neither model.safetensors nor", tmp_path)
    (copied / "config.json").write_text("{")
    refused(copied, "config.json is not JSON", tmp_path)
    (copied / "config.json").unlink()
    refused(copied, "has no config.json. Give the folder", tmp_path)
    (copied / "adapter_config.json").write_text("{}")
    refused(copied, "has no config.json. It is an adapter. Merge it", tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, copied, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (copied / name).write_text(pointer)
    refused(copied, f"{name} is a pointer of Git LFS", tmp_path)
