"""Export and import without Hugging Face's code: exact, from any mesh, in bounded memory.

test_transformers.py compares with its code.
"""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import convert
import convert_memory
import generate
from conftest import ROOT
from data import chat
from data.tokenizer import encode_continuation, load_tokenizer, token_bytes
from hf import export_checkpoint, import_checkpoint, model_config, safetensors_files
from hf_run import PUBLISHED, SIZES, make_run, stored, write_moonshot, write_sentencepiece
from runtime import cli

MODELS = {
    "v3": {
        "prefix_layers": 1,
        "q_lora_rank": 10,
        "n_shared_experts": 2,
        "tie_word_embeddings": False,
    },
    "v3, dense then one with experts": {"dense_layers": 3, "blocks": 1},
    "v3, dense": {"dense_layers": 1, "moe_layers": 0},
    "v2": {
        "prefix_layers": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "qk_nope_head_dim": 10,
    },
    "own": {
        "prefix_layers": 1,
        "dense_layers": 2,
        "rope_in_moe_layers": False,
        "n_shared_experts": 0,
    },
}

V2 = {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False}
YARN = PUBLISHED["deepseek-v3"]["rope_scaling"]


def export(run, out, *flags):
    convert.main(["export", "--run", str(run), "--out", str(out), *flags])
    return safetensors_files.read_folder(out)


def import_(folder, out, *flags):
    convert.main(["import", "--folder", str(folder), "--out", str(out), *flags])


def settings(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """A run with random weights, and the folder that it was exported to, by name of the model."""
    made, folder = {}, tmp_path_factory.mktemp("runs")

    def of(name):
        if name not in made:
            run, out = folder / name, folder / f"{name} exported"
            make_run(run, **MODELS[name])
            export(run, out, "--part_gib", "0.0001", *["--remote_code"] * (name == "own"))
            made[name] = run, out
        return made[name]

    return of


@pytest.fixture
def copied(runs_of, tmp_path):
    """A copy of the folder of v3, to be damaged."""
    return shutil.copytree(runs_of("v3")[1], tmp_path / "damaged")


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_run_that_is_imported_has_every_bit(name, runs_of, tmp_path):
    run, out = runs_of(name)
    import_(out, tmp_path / "back")
    own = ["--remote_code"] * (name == "own")
    before, after = (
        safetensors_files.read_folder(out),
        export(tmp_path / "back", tmp_path / "out", *own),
    )
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].read(), after[name].read()) for name in before)
    assert settings(out) == settings(tmp_path / "out")
    old, new = (cli.load(folder / "config.toml").model for folder in (run, tmp_path / "back"))
    is_own, prefix, step = name == "own", old.first_k_dense_replace, old.decoder_sparse_step
    expected = {"compute_dtype": "bfloat16", "router_bias_update_speed": 0.0}
    if not is_own:
        prefix, step = (prefix + step - 1, 1) if old.moe_layers else (0, 1)
        expected["latent_rms_norm_eps"] = 1e-6
    expected |= {"first_k_dense_replace": prefix, "decoder_sparse_step": step}
    if old.moe_layers:
        expected |= {"capacity_factor": 0.0, "eval_capacity_factor": 0.0}
    assert dataclasses.replace(old, **expected) == new
    if prefix != old.first_k_dense_replace:  # other arrays
        return
    before, after = stored(run), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    for leaf, array in before.items():
        # Padding rows are not exported, and imported as zeros.
        rows = SIZES["vocab_size"] if leaf.endswith(("embedding", "output")) else len(array)
        assert array.shape == after[leaf].shape and not after[leaf][rows:].any()
        assert np.array_equal(array[:rows], after[leaf][:rows])


@pytest.mark.long
def test_a_run_of_any_mesh_is_exported(whole, tmp_path):
    tensors = export(whole, tmp_path / "out", "--remote_code", "--step", "3")
    before = convert.Checkpoints(whole / "checkpoints")
    gate = before.arrays(3)["weights.blocks.moe.moe.experts.gate"]
    gate = gate.whole()
    before.close()
    for block, expert in ((0, 0), (1, 7), (3, 5)):  # layers 2 * block + 1
        name = f"model.layers.{2 * block + 1}.mlp.experts.{expert}.gate_proj.weight"
        assert np.array_equal(tensors[name].read(), gate[block, expert].T)
    import_(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "checkpoints" / "0").is_dir()


def test_bfloat16_is_rounded_and_the_bias_is_not(runs_of, tmp_path):
    run, out = runs_of("v3")
    whole, half = (
        safetensors_files.read_folder(out),
        export(run, tmp_path / "half", "--dtype=bfloat16"),
    )
    for name, tensor in half.items():
        exact = name.endswith("e_score_correction_bias")
        expected = whole[name].read()
        if not exact:
            expected = expected.astype(jnp.bfloat16)
        assert tensor.read().dtype == expected.dtype and np.array_equal(tensor.read(), expected)
    assert settings(tmp_path / "half")["torch_dtype"] == "bfloat16"


def test_pads_and_a_model_without_shared_experts_are_mapped(tmp_path):
    make_run(tmp_path / "run", n_shared_experts=0)
    tensors = export(tmp_path / "run", tmp_path / "out")
    assert tensors["model.embed_tokens.weight"].shape == (SIZES["vocab_size"], SIZES["hidden_size"])
    shared = [tensor for name, tensor in tensors.items() if "shared" in name]
    assert len(shared) == 3 * SIZES["blocks"] and not any(t.read().any() for t in shared)
    assert settings(tmp_path / "out")["n_shared_experts"] == 1
    assert "lm_head.weight" not in tensors and settings(tmp_path / "out")["tie_word_embeddings"]


def test_parts_have_a_bounded_size_and_layers_in_order(runs_of):
    tensors = safetensors_files.read_folder(runs_of("v3")[1])
    parts = {}
    for name, tensor in tensors.items():
        parts.setdefault(tensor.file.name, []).append((name, tensor.bytes))
    assert len(parts) > 5
    for part in parts.values():
        assert len(part) == 1 or sum(size for _, size in part) <= 0.0001 * 2**30
    layers = [int(name.split(".")[2]) for name in tensors if ".layers." in name]
    assert layers == sorted(layers)
    index = json.loads((runs_of("v3")[1] / safetensors_files.INDEX).read_text())
    assert index["weight_map"] == {name: t.file.name for name, t in tensors.items()}
    assert index["metadata"]["total_size"] == sum(t.bytes for t in tensors.values())


def test_the_folder_has_a_model_card_and_the_modelling_file(whole, tmp_path, capsys):
    export(whole, tmp_path / "out", "--remote_code")
    assert "trust_remote_code=True" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    [last] = [line for line in card.splitlines() if line.startswith("| 6 |")]
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    loss = [r["loss/val"] for r in records if r.get("loss/val") is not None][-1]
    assert last == f"| 6 | {loss:.4f} |"
    assert "kv_lora_rank = 16" in card and "trust_remote_code=True" in card
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == load_tokenizer("sample").eot_token
    copied = tmp_path / "out" / "modeling_latent_moe.py"
    assert copied.read_text() == (ROOT / "hf/modeling_latent_moe.py").read_text()


def test_an_imported_run_can_start_a_run_and_is_not_resumed(runs_of, data, tmp_path):
    import main

    import_(runs_of("v3")[1], tmp_path / "back", *data)
    config = cli.load(tmp_path / "back" / "config.toml")
    with pytest.raises(
        ValueError, match=r"weights alone, .*--run.init_from .*back --run.name back-2"
    ):
        main.run(config)


def test_an_imported_run_writes_text_with_its_tokenizer(runs_of, tmp_path, capsys):
    import_(runs_of("v3")[1], tmp_path / "back")
    printed = capsys.readouterr().out
    assert f"generate.py --run {tmp_path / 'back'}" in printed
    (tmp_path / "back").rename(tmp_path / "moved")
    flags = ["--prompt", "def ", "--tokens", "3", "--temperature", "0"]
    generate.main(["--run", str(tmp_path / "moved"), "--model.compute_dtype", "float32", *flags])
    assert capsys.readouterr().out.startswith("def ")


def test_an_imported_run_ends_its_texts_as_published_and_is_exported_so(
    copied, tmp_path, capsys, monkeypatch
):
    printed = []

    def recorded(tokenizer, token):
        printed.append(token)
        return token_bytes(tokenizer, token)

    def summary(name):
        import_(copied, tmp_path / name)
        flags = ["--prompt", "def ", "--tokens", "9", "--temperature", "0"]
        capsys.readouterr()
        generate.main(["--run", str(tmp_path / name), "--model.compute_dtype", "float32", *flags])
        return capsys.readouterr().err

    monkeypatch.setattr(generate, "token_bytes", recorded)
    assert "9 tokens: " in summary("one")
    third = printed[2]
    ends = [load_tokenizer(str(copied)).eot_token, third]
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert f"{printed.index(third)} tokens: " in summary("several")
    export(tmp_path / "several", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == ends


FACTS = {"max_position_embeddings": 8192, "bos_token_id": 7, "pad_token_id": 5}


def of_a_base(copied):
    """Give a folder facts that no weight holds. Return its generation_config.json."""
    change(copied, **FACTS)
    generation = {"bos_token_id": 7, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    generation |= {"pad_token_id": 5, "eos_token_id": load_tokenizer(str(copied)).eot_token}
    (copied / "generation_config.json").write_text(json.dumps(generation))
    return generation


def has_facts(folder, generation):
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert {name: settings(folder)[name] for name in FACTS} == FACTS
    assert json.loads((folder / "generation_config.json").read_text()) == generation
    assert tokenizer["model_max_length"] == 8192


@pytest.mark.parametrize("flags", [[], ["--remote_code"]])
def test_an_exported_folder_keeps_what_no_weight_holds_of_the_imported_one(flags, copied, tmp_path):
    generation = of_a_base(copied)
    import_(copied, tmp_path / "run", "--train.seq_len", "64")
    export(tmp_path / "run", tmp_path / "out", *flags)
    has_facts(tmp_path / "out", generation)


def test_the_card_of_a_model_with_a_chat_template_shows_a_chat(tmp_path):
    make_run(tmp_path / "run", more_tokens={"chat_template": chat.PLAIN})
    export(tmp_path / "run", tmp_path / "out", "--remote_code")
    assert "apply_chat_template" in (tmp_path / "out" / "README.md").read_text()


def test_a_run_that_was_tuned_with_a_template_is_exported_with_it(tmp_path):
    make_run(tmp_path / "run", more_tokens={"chat_template": chat.PLAIN})
    export(tmp_path / "run", tmp_path / "out", "--remote_code")
    exported = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert exported["chat_template"] == chat.PLAIN_JINJA


def test_a_folder_with_a_tiktoken_model_is_imported_and_exported(copied, tmp_path):
    (copied / "tokenizer.json").unlink()
    count = write_moonshot(copied)
    import_(copied, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer" / "tiktoken.model").is_file()
    export(tmp_path / "run", tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).eot_token == count + 1


def test_a_folder_with_sentencepiece_is_imported_continues_lines_and_is_exported(
    copied, tmp_path, monkeypatch
):
    write_sentencepiece(copied, "segment")
    import_(copied, tmp_path / "run")
    given = []

    def recorded(self, w, texts, tokens):
        given.append(texts)
        return generate_texts(self, w, texts, tokens)

    generate_texts = generate.Generator.generate
    monkeypatch.setattr(generate.Generator, "generate", recorded)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\n"))
    flags = ["--interactive", "--tokens", "3", "--model.compute_dtype", "float32"]
    generate.main(["--run", str(tmp_path / "run"), *flags])
    tokenizer = load_tokenizer(str(copied))
    first, second = tokenizer.encode_ordinary("one\n"), encode_continuation(tokenizer, "two\n")
    assert given == [[[1, *first]], [second]] and second != tokenizer.encode_ordinary("two\n")
    export(tmp_path / "run", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).is_file()
    exported = load_tokenizer(str(tmp_path / "out"))
    assert exported.content == tokenizer.content and exported.special.adds_bos


@pytest.mark.long
def test_export_takes_little_memory():
    config = ROOT / "configs" / "dense_124m.toml"
    found = convert_memory.measured(convert_memory.Flags(config=config))
    assert found["parameters"] > 100e6 and found["MiB written"] > 400
    assert found["MiB"] * 2**20 <= 600e6


# --- published models -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    table = PUBLISHED[name]
    found = model_config.from_hf(table, Path("config.json"))
    m = found.model
    assert (
        m.num_hidden_layers == table["num_hidden_layers"]
        and m.dense_layers == 0
        and m.moe_layers == 1
    )
    assert m.first_k_dense_replace == table["first_k_dense_replace"] and not m.tie_word_embeddings
    assert m.capacity_factor == m.eval_capacity_factor == 0  # dropless
    assert m.q_lora_rank == (table["q_lora_rank"] or 0)
    assert (m.n_group, m.topk_group) == (table["n_group"], table["topk_group"])
    assert m.latent_rms_norm_eps == 1e-6 and m.rms_norm_eps == table["rms_norm_eps"]
    yarn = table["rope_scaling"]
    assert m.rope_scaling.factor == (yarn["factor"] if yarn else 1)
    assert not yarn or m.rope_scaling.mscale_all_dim == yarn["mscale_all_dim"]
    assert (m.scoring_func, m.norm_topk_prob) == (table["scoring_func"], table["norm_topk_prob"])
    assert found.interleaved and found.skipped_layers == table.get("num_nextn_predict_layers", 0)


def test_float8_blocks_are_scaled_and_prediction_layers_are_left_out(runs_of, tmp_path, capsys):
    _, exported = runs_of("v3")
    folder, plain = tmp_path / "float8", safetensors_files.read_folder(exported)
    folder.mkdir()
    table = settings(exported) | {"num_nextn_predict_layers": 1}
    table["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (folder / "config.json").write_text(json.dumps(table))
    name = "model.layers.1.self_attn.o_proj.weight"
    small = np.dtype(jnp.float8_e4m3fn)
    rows, columns = plain[name].shape
    assert rows % 16 == 0 and columns % 8, "the last block is not whole"
    scales = (-(-rows // 16), -(-columns // 8))
    ahead = f"model.layers.{table['num_hidden_layers']}.eh_proj.weight"
    others = {n: (t.dtype, t.shape) for n, t in plain.items() if n != name}
    shapes = others | {
        name: (small, plain[name].shape),
        f"{name}_scale_inv": (np.dtype(np.float32), scales),
        ahead: (np.dtype(np.float32), (2, 2)),
    }
    tensors = safetensors_files.make_folder(folder, [(n, *s) for n, s in shapes.items()], 2**30)
    for other in others:
        tensors[other].write(plain[other].read())
    scale = np.arange(1, 1 + np.prod(scales), dtype=np.float32).reshape(scales)
    numbers = (3 * plain[name].read()).astype(small)
    tensors[name].write(numbers)
    tensors[f"{name}_scale_inv"].write(scale)
    for says, text in (
        (None, r"o_proj.weight_scale_inv is \(.*blocks of None"),
        ({"quant_method": "fp8"}, r"o_proj.weight_scale_inv is \(.*\(128, 128\) needs \(1, 1\)"),
    ):
        change(folder, quantization_config=says)
        refused(folder, text, tmp_path)
    change(folder, **table)
    import_(folder, tmp_path / "run")
    assert "left out: 1 multi-token prediction layers" in capsys.readouterr().out
    found = stored(tmp_path / "run")["weights.blocks.moe.attention.out"][0]
    expected = np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            expected[i, j] = float(numbers[i, j]) * scale[i // 16, j // 8]
    assert np.array_equal(found.reshape(columns, rows).T, expected)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dense_layers": 1}, "a dense layer between layers with experts"),
        ({"rope_in_moe_layers": False}, "model.rope_in_moe_layers"),
        ({"scoring_func": "softmax"}, "model.norm_topk_prob"),
        ({"rms_norm_eps": 1e-5}, "model.latent_rms_norm_eps"),
        ({"n_routed_experts": 1, "num_experts_per_tok": 1}, "model.n_routed_experts 1"),
        ({"scoring_func": "softmax", "norm_topk_prob": False, "n_group": 2}, "model.n_group 2"),
        (
            {"scoring_func": "softmax", "norm_topk_prob": False, "hidden_size": 49},
            "model.hidden_size 49",
        ),
        ({"scoring_func": "softmax", "norm_topk_prob": False}, "model.qk_nope_head_dim"),
    ],
)
def test_a_model_that_transformers_does_not_support_is_refused(fields, named, tmp_path):
    make_run(tmp_path / "run", **fields)
    with pytest.raises(ValueError, match=f"{named}.*--remote_code"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "run", tmp_path / "out", "--remote_code")


def test_a_bias_of_softmax_scores_is_refused(tmp_path):
    make_run(tmp_path / "run", qk_nope_head_dim=10)  # with a bias
    file = tmp_path / "run" / "config.toml"
    text = file.read_text().replace('scoring_func = "sigmoid"', 'scoring_func = "softmax"')
    file.write_text(text.replace("norm_topk_prob = true", "norm_topk_prob = false"))
    with pytest.raises(ValueError, match=r"moe.bias that is not zero .*Use --remote_code"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_than_its_config_is_named(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("intermediate_size = 20", "intermediate_size = 22"))
    with pytest.raises(ValueError, match=r"of another model than its config.*48, 20\) there and"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_deepseek_v2_has_one_group():
    m = read_model(**V2, n_group=8, topk_method="greedy", topk_group=None)
    assert (m.n_group, m.topk_group) == (1, 1)


def test_deepseek_v2_236b_has_groups_that_rank_by_their_best_expert():
    m = read_model(**V2, n_group=4, topk_method="group_limited_greedy", topk_group=2)
    assert (m.n_group, m.topk_group, m.topk_method) == (4, 2, "group_limited_greedy")
    assert not model_config.unsupported(m)
    other = dataclasses.replace(m, topk_method="noaux_tc")
    assert any("noaux_tc" in reason for reason in model_config.unsupported(other))


def test_nothing_is_overwritten(runs_of, tmp_path):
    run, out = runs_of("v3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for command in (export, import_):
        source = run if command is export else out
        with pytest.raises(ValueError, match=r"--out .*full is not empty"):
            command(source, tmp_path / "full")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing_and_can_run_again(
    stop, runs_of, tmp_path, monkeypatch
):
    run, out = runs_of("v3")
    is_full = isinstance(stop, OSError)
    expected, text = (ValueError, "was not written: .*No space") if is_full else (stop, None)
    (tmp_path / "export").mkdir()
    for command, source in ((export, run), (import_, out)):
        to = tmp_path / command.__name__
        is_new = not to.exists()
        with monkeypatch.context() as patch:
            target = export_checkpoint if command is export else import_checkpoint
            name = "write_json" if command is export else "read_float32"
            patch.setattr(target, name, mock.Mock(side_effect=stop))
            with pytest.raises(expected, match=text):
                command(source, to)
        assert not list(to.glob("*")) and to.exists() != is_new
        command(source, to)


def test_an_out_that_cannot_be_made_is_named(runs_of, tmp_path):
    run, out = runs_of("v3")
    (tmp_path / "file").touch()
    for command, source in ((export, run), (import_, out)):
        with pytest.raises(ValueError, match=r"--out .*file.new was not written"):
            command(source, tmp_path / "file" / "new")


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_an_invalid_file_size_is_refused(size, runs_of, tmp_path):
    with pytest.raises(ValueError, match=f"--part_gib {float(size)} is not a valid file size"):
        export(runs_of("v3")[0], tmp_path / "out", f"--part_gib={size}")


def change(folder, **values):
    (folder / "config.json").write_text(json.dumps(settings(folder) | values))


def refused(folder, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        import_(folder, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*")), "something was left"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model_type": "gpt2", "architectures": ["Gpt2"]}, r"'gpt2' \(Gpt2\).*llama.*deepseek_v3"),
        ({"model_type": None}, "has model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"model_type": "deepseek_v2"}, "scoring_func 'sigmoid'"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob True"),
        (V2 | {"n_group": 4, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rotary embedding: .*linear"),
        ({"rope_scaling": YARN | {"attention_factor": 1.5}}, "rotary embedding: .*1.5"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rotary embedding: .*False"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"kv_lora_rank": 30}, r"is \(.*\), and by the config \(.*\)"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused(values, text, copied, tmp_path):
    change(copied, **values)
    refused(copied, text, tmp_path)


def test_flags_override_settings_that_weights_do_not_depend_on(copied, tmp_path):
    import_(copied, tmp_path / "run", "--model.capacity_factor", "1.5", "--optimizer.lr", "0.1")
    config = cli.load(tmp_path / "run" / "config.toml")
    assert (config.model.capacity_factor, config.model.eval_capacity_factor) == (1.5, 0.0)
    assert config.optimizer.lr == 0.1
    with pytest.raises(ValueError, match=r"--folder .*damaged is of another model: model.rope_the"):
        import_(copied, tmp_path / "other", "--model.rope_theta", "5.0")


def read_model(**values):
    """The model of DeepSeek-V3's config.json with other values; ... is left out."""
    table = PUBLISHED["deepseek-v3"] | values
    table = {name: value for name, value in table.items() if value is not ...}
    return model_config.from_hf(table, Path("config.json")).model


def test_rotary_positions_are_read_where_transformers_reads_them():
    written = {**YARN, "rope_type": "yarn", "rope_theta": 7.0}
    assert read_model(rope_scaling=..., rope_parameters=written).rope_scaling.factor == 40
    assert read_model(rope_scaling=..., rope_theta=..., rope_parameters=written).rope_theta == 7
    assert read_model(rope_parameters={"rope_type": "default"}).rope_scaling.factor == 40
    few = {name: YARN[name] for name in ("type", "factor", "original_max_position_embeddings")}
    for less in (few, dict.fromkeys(YARN) | few):
        m = read_model(rope_scaling=less)
        assert (m.rope_scaling.beta_fast, m.rope_scaling.beta_slow) == (32, 1)
        assert m.rope_scaling.mscale == m.rope_scaling.mscale_all_dim == 0
    with pytest.raises(ValueError, match="lacks factor"):
        read_model(rope_scaling=YARN | {"factor": None})
    original = "original_max_position_embeddings"
    fallback = {"rope_scaling": YARN | {original: None}, "max_position_embeddings": 77}
    assert read_model(**fallback).rope_scaling.original_max_position_embeddings == 77


@pytest.mark.parametrize("name", ["routed_scaling_factor", "n_group", "topk_group"])
def test_a_key_whose_default_differs_is_required(name):
    with pytest.raises(ValueError, match=f"lacks {name}"):
        read_model(**{name: ...})


def test_a_model_without_experts_has_no_scores(tmp_path):
    make_run(tmp_path / "run", dense_layers=1, moe_layers=0, scoring_func="softmax")
    export(tmp_path / "run", tmp_path / "out")
    import_(tmp_path / "out", tmp_path / "back")


def test_missing_and_extra_tensors_are_named(copied, tmp_path):
    layers = settings(copied)["num_hidden_layers"]
    change(copied, num_hidden_layers=layers + 1)
    names = r"lacks 38 of .*: model.layers.3.*, \.\.\.\. Download"
    refused(copied, names, tmp_path)
    change(copied, num_hidden_layers=layers, n_routed_experts=7)
    extra = r"has 6 tensors .*: model.layers.1.mlp.experts.7.*"
    refused(copied, extra, tmp_path)
    change(copied, num_hidden_layers=layers - 1, n_routed_experts=8)
    refused(copied, r"has 38 tensors .*: model.layers.2.*, \.\.\.\. They", tmp_path)
    change(copied, num_hidden_layers=layers)
    for part in copied.glob("*.safetensors"):
        part.write_bytes(
            part.read_bytes().replace(b"2.mlp.experts.0.up_proj", b"2.mlp.experts.fused_all")
        )
    other = (
        r"lacks 1 of .*: model.layers.2.mlp.experts.0.up_proj.weight. It has 1 .*experts.fused_all"
    )
    refused(copied, other, tmp_path)


def test_redundant_tensors_are_ignored(runs_of, tmp_path):
    folder = shutil.copytree(runs_of("v2")[1], tmp_path / "more")  # tied
    embedding = safetensors_files.read_folder(folder)["model.embed_tokens.weight"].read()
    (tmp_path / "part").mkdir()
    added = {
        "lm_head.weight": embedding,
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    shapes = [(name, w.dtype, w.shape) for name, w in added.items()]
    part = safetensors_files.make_folder(tmp_path / "part", shapes, 2**30)
    for name, tensor in part.items():
        tensor.write(added[name])
    shutil.copy(tmp_path / "part" / safetensors_files.SINGLE, folder / "more.safetensors")
    index = json.loads((folder / safetensors_files.INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(added, "more.safetensors")
    (folder / safetensors_files.INDEX).write_text(json.dumps(index))
    import_(folder, tmp_path / "run")
    other = safetensors_files.read_folder(folder)["lm_head.weight"]
    other.write(1 + embedding)
    import_(folder, tmp_path / "untied")
    assert not cli.load(tmp_path / "untied" / "config.toml").model.tie_word_embeddings


def test_an_import_on_a_full_disk_is_refused_and_leaves_nothing(runs_of, small_disk):
    disk, _ = small_disk
    refused(runs_of("v3")[1], r"run was not written: .*No space left on device", disk)
    assert not any(disk.iterdir())


def test_damaged_files_are_named(copied, tmp_path):
    first, second, *_ = sorted(copied.glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    refused(copied, f"{first.name} is truncated: it has {len(whole) - 1} bytes", tmp_path)
    first.write_bytes(whole[:20])
    refused(copied, f"{first.name} is not a safetensors file", tmp_path)
    first.write_bytes(whole.replace(b'"F32"', b'"I32"'))
    refused(copied, f"{first.name} has tensors of type I32", tmp_path)
    first.write_bytes(whole)
    second.unlink()
    refused(copied, f"lacks 1 of the .* files .* first {second.name}", tmp_path)
    (copied / safetensors_files.INDEX).write_text("version https://git-lfs")
    refused(copied, f"{safetensors_files.INDEX} has no valid weight_map", tmp_path)
    (copied / safetensors_files.INDEX).unlink()
    refused(copied, "has neither model.safetensors nor", tmp_path)
    (copied / "config.json").write_text("{")
    refused(copied, "config.json is not JSON", tmp_path)
    (copied / "config.json").unlink()
    refused(copied, "has no config.json", tmp_path)


def test_a_run_without_checkpoint_is_named(runs_of, tmp_path):
    run, _ = runs_of("v3")
    (tmp_path / "run").mkdir()
    shutil.copy(run / "config.toml", tmp_path / "run")
    with pytest.raises(ValueError, match="no such folder"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match=r"--run .*none does not exist"):
        export(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ValueError, match="there is no checkpoint of step 9"):
        export(run, tmp_path / "out", "--step", "9")


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
