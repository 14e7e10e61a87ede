"""transformers computes our logits from exported folders, and its folders are imported exactly.

Needs requirements-hf.txt.
"""

import json
import math
import shutil

import numpy as np
import pytest

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.slow,
    # Deprecations within torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import attention  # noqa: E402
import convert  # noqa: E402
import dataset  # noqa: E402
import utils  # noqa: E402
from common import mostly_long  # noqa: E402
from conftest import ROOT  # noqa: E402
from data.tokenizer import load_tokenizer  # noqa: E402
from hf import model_config, modeling_latent_moe, safetensors_files  # noqa: E402
from hf_case import model_with  # noqa: E402
from hf_run import (  # noqa: E402
    PUBLISHED,
    SIZES,
    SMALL,
    logits,
    make_run,
    opened,
    stored,
    their_logits,
)
from runtime import cli  # noqa: E402

T = 512
CASES = {
    "plain, top-1": {"num_experts_per_tok": 1},
    "query latent, 2 shared, prefix": {
        "q_lora_rank": 10,
        "n_shared_experts": 2,
        "prefix_layers": 1,
    },
    "3 shared, top-6, untied": {
        "n_shared_experts": 3,
        "num_experts_per_tok": 6,
        "tie_word_embeddings": False,
    },
    "groups, top-3, YaRN, query latent": {
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "rope_factor": 8.0,
        "rope_original_max_position_embeddings": 64,
        "q_lora_rank": 7,
    },
    "no shared, dense first": {"n_shared_experts": 0, "dense_layers": 2, "blocks": 1},
    "softmax": {"scoring_func": "softmax", "norm_topk_prob": False, "qk_nope_head_dim": 10},
    "softmax, groups by their best expert": {
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "qk_nope_head_dim": 10,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
    "dense": {"dense_layers": 1, "moe_layers": 0, "q_lora_rank": 5},
}
CONFIGS = sorted(ROOT.glob("configs/*.toml"))


def tokens(vocabulary, texts=2):
    # With seed 1 the fourth and fifth best experts of one token of moonlight's are 6e-8 apart, less
    # than rounding, which chooses between them.
    return np.random.default_rng(2).integers(0, vocabulary, (texts, T)).astype(np.int32)


def export(run, out, own=False):
    convert.main(["export", "--run", str(run), "--out", str(out), *["--remote_code"] * own])
    return out


@pytest.mark.parametrize("name", CASES)
def test_logits_of_an_exported_folder_are_ours(name, tmp_path):
    make_run(tmp_path / "run", **CASES[name])
    ids = tokens(SIZES["vocab_size"])
    found = opened(export(tmp_path / "run", tmp_path / "out"))
    wanted = "DeepseekV2ForCausalLM" if "softmax" in name else "DeepseekV3ForCausalLM"
    assert type(found).__name__ == wanted
    np.testing.assert_allclose(their_logits(found, ids), logits(tmp_path / "run", ids), atol=1e-4)


def scaled_down(m):
    """The model of a config in small: the same layers, blocks, switches and odd ratios."""
    small = {
        name: value
        for name, value in SIZES.items()
        if name not in ("blocks", "dense_layers", "num_experts_per_tok", "routed_scaling_factor")
    }
    small |= {"blocks": 2, "qk_rope_head_dim": 2 * math.ceil(m.qk_rope_head_dim / 16)}
    small |= {"q_lora_rank": m.q_lora_rank // 8, "num_key_value_heads": 1, "head_dim": 10}
    small |= {"n_routed_experts": max(m.n_routed_experts // 2, m.num_experts_per_tok)}
    return model_with(m, **small)


@pytest.mark.parametrize(
    "name", mostly_long([file.stem for file in CONFIGS], "jaxformer_1b", "qwen3_moe_1b")
)
def test_logits_by_the_modelling_file_are_ours_for_every_config(name, tmp_path):
    config = cli.load(ROOT / "configs" / f"{name}.toml")
    make_run(tmp_path / "run", model=scaled_down(config.model))
    ids = tokens(SIZES["vocab_size"])
    found = opened(export(tmp_path / "run", tmp_path / "out", own=True), own=True)
    assert type(found).__name__ == "LatentMoeForCausalLM"
    np.testing.assert_allclose(their_logits(found, ids), logits(tmp_path / "run", ids), atol=1e-4)


def test_logits_by_the_modelling_file_are_ours_with_every_option(tmp_path):
    fields = {
        "prefix_layers": 1, "dense_layers": 2, "rope_in_moe_layers": False, "q_lora_rank": 9,
        "scoring_func": "softmax", "norm_topk_prob": False, "rms_norm_eps": 1e-3,
        "n_group": 2, "rope_factor": 8.0,
        "rope_original_max_position_embeddings": 64, "rope_mscale": 0.7,
        "rope_mscale_all_dim": 0.0, "tie_word_embeddings": False,
    }  # fmt: skip
    make_run(tmp_path / "run", **fields)
    ids = tokens(SIZES["vocab_size"])
    found = opened(export(tmp_path / "run", tmp_path / "out", own=True), own=True)
    np.testing.assert_allclose(their_logits(found, ids), logits(tmp_path / "run", ids), atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_mscale_all_dim": 0.0},
        {"rope_mscale": 0.7, "rope_mscale_all_dim": 0.3},
        {"rope_original_max_position_embeddings": 64},  # the first pair is below 0
        # and the last above all
        {"rope_original_max_position_embeddings": 64, "rope_beta_slow": 1e-6},
        {"rope_original_max_position_embeddings": 6},  # the first is the last
    ],
)
def test_the_modelling_file_has_the_rotary_frequencies_of_the_model(fields):
    m = model_with(utils.Model(), qk_rope_head_dim=6, rope_theta=1e3, rope_factor=8.0, **fields)
    table = model_config.to_hf(utils.Config(model=m), model_config.OWN, "float32", 0)
    turns, factor, scores = modeling_latent_moe.frequencies(
        modeling_latent_moe.LatentMoeConfig(**table)
    )
    np.testing.assert_allclose(turns, attention.rope_frequencies(m, 6), rtol=1e-6)
    assert factor == pytest.approx(attention.rope_magnitude(m))
    assert scores == pytest.approx(attention.softmax_scale(m, 1))


@pytest.mark.long
def test_a_trained_run_has_the_same_loss_and_text_in_transformers(whole, tmp_path, capsys):
    import generate
    import validate

    out = export(whole, tmp_path / "out", own=True)
    found = opened(out, own=True)
    capsys.readouterr()
    validate.main(["--run", str(whole), "--json"])
    found_here = json.loads(capsys.readouterr().out)
    assert found_here["moe/dropped"] == 0
    data = dataset.open_validation(cli.load(whole / "config.toml")).parts[""]
    rows = data.eval_rows(np.arange(16), sequences=16)
    with torch.no_grad():
        theirs = found(torch.from_numpy(rows["tokens"]).long()).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(
            theirs, torch.from_numpy(rows["targets"]).long().flatten()
        )
    assert found_here["loss/val"] == pytest.approx(float(loss), abs=1e-4)

    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    text = (ROOT / "model.py").read_text() + "<|endoftext|> \u00e9\u4e2d\U0001f600\n\n   x"
    ours = load_tokenizer("sample")
    assert tokenizer(text)["input_ids"] == ours.encode_ordinary(text)
    assert tokenizer.eos_token_id == ours.eot_token == found.generation_config.eos_token_id
    # Texts of different lengths at once, with pads before the short one, in the cache of latents.
    prompts = ["def", "import jax\nimport"]
    given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    made = found.generate(**given, max_new_tokens=12, do_sample=False)[:, -12:].tolist()
    for prompt, theirs in zip(prompts, made, strict=True):
        flags = ["--run", str(whole), "--prompt", prompt, "--temperature", "0", "--tokens", "12"]
        generate.main(flags)
        written = capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")
        ends = [ours.eot_token, tokenizer.pad_token_id]
        assert ours.decode([i for i in theirs if i not in ends]) == written


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of a published config, scaled down, as published, and the model in torch."""
    made = {}

    def of(name):
        if name in made:
            return made[name]
        folder = tmp_path_factory.mktemp("published") / name
        folder.mkdir()
        table = PUBLISHED[name] | SMALL
        table["first_k_dense_replace"] = min(2, table["first_k_dense_replace"])
        if table["q_lora_rank"]:
            table["q_lora_rank"] = 20
        if table["rope_scaling"]:
            length = {"original_max_position_embeddings": 128}
            table["rope_scaling"] = table["rope_scaling"] | length
        known = {"num_nextn_predict_layers": 0}
        if table["model_type"] == "kimi_k2":  # which transformers has under V3's name
            known["model_type"] = "deepseek_v3"
        (folder / "config.json").write_text(json.dumps(table | known))
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(folder)
        found = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for where, w in (*found.named_parameters(), *found.named_buffers()):
                if "norm" in where:
                    w.add_(0.1 * torch.randn_like(w))
                elif "e_score" in where:
                    w.add_(0.1 * torch.rand_like(w))
                elif "inv_freq" not in where:
                    w.normal_(0, w.shape[-1] ** -0.5)
        found.save_pretrained(folder, max_shard_size="200KB")
        (folder / "config.json").write_text(json.dumps(table))  # as it is published
        made[name] = folder, found
        return made[name]

    return of


@pytest.mark.parametrize("name", mostly_long(PUBLISHED, "deepseek-v3"))
def test_a_published_model_is_imported_and_exported_with_the_same_bits(name, published, tmp_path):
    folder, found = published(name)
    convert.main(["import", "--folder", str(folder), "--out", str(tmp_path / "run")])
    ids = tokens(SMALL["vocab_size"])
    np.testing.assert_allclose(their_logits(found, ids), logits(tmp_path / "run", ids), atol=1e-4)
    export(tmp_path / "run", tmp_path / "back")
    before, after = (safetensors_files.read_folder(f) for f in (folder, tmp_path / "back"))
    assert before.keys() == after.keys() and len({t.file for t in before.values()}) > 1
    assert all(np.array_equal(before[name].read(), after[name].read()) for name in before)
    again = opened(tmp_path / "back")
    assert type(again) is type(found)
    np.testing.assert_array_equal(their_logits(found, ids), their_logits(again, ids))


def test_rotary_pairs_that_are_not_interleaved_are_read_as_they_are(published, tmp_path):
    folder, found = published("moonlight-16b-a3b")
    folder = shutil.copytree(folder, tmp_path / "halves")
    table = json.loads((folder / "config.json").read_text()) | {"rope_interleave": False}
    (folder / "config.json").write_text(json.dumps(table))
    convert.main(["import", "--folder", str(folder), "--out", str(tmp_path / "run")])
    ids = tokens(SMALL["vocab_size"])
    expected = their_logits(opened(folder), ids)
    np.testing.assert_allclose(expected, logits(tmp_path / "run", ids), atol=1e-4)
    assert np.abs(expected - their_logits(found, ids)).max() > 0.1


def test_a_folder_saved_by_transformers_is_read_and_trains(tmp_path):
    make_run(tmp_path / "run", q_lora_rank=9, dense_layers=1, rope_factor=8.0)
    found = opened(export(tmp_path / "run", tmp_path / "out", own=True), own=True)
    ids = tokens(SIZES["vocab_size"])
    found.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved", own=True)
    np.testing.assert_array_equal(their_logits(again, ids), their_logits(found, ids))
    convert.main(["import", "--folder", str(tmp_path / "saved"), "--out", str(tmp_path / "back")])
    assert all(
        np.array_equal(array[:4097], stored(tmp_path / "back")[name][:4097])
        for name, array in stored(tmp_path / "run").items()
    )
    # Trainer would otherwise take the loss for a sum over all that it accumulates.
    assert not found.accepts_loss_kwargs
    given = torch.from_numpy(ids).long()
    labels = given.masked_fill(given % 3 == 0, -100)
    out = found(given, labels=labels)
    of_each = out.logits.log_softmax(-1)[:, :-1].gather(-1, given[:, 1:, None])[..., 0]
    torch.testing.assert_close(out.loss, -of_each[given[:, 1:] % 3 != 0].mean())
    out.loss.backward()
    without = [name for name, w in found.named_parameters() if w.grad is None]
    assert all(name.endswith("e_score_correction_bias") for name in without)


def test_text_is_the_same_without_the_cache(tmp_path):
    for name, fields in {"v3": {}, "own": {"dense_layers": 1, "rope_in_moe_layers": False}}.items():
        make_run(tmp_path / name, **fields)
        own = name == "own"
        found = opened(export(tmp_path / name, tmp_path / f"{name} out", own), own)
        given = torch.from_numpy(tokens(SIZES["vocab_size"]))[:, :9].long()
        mask = torch.ones_like(given)
        ways = [
            found.generate(
                given, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=cached
            )
            for cached in (True, False)
        ]
        assert torch.equal(*ways)


def test_the_modelling_file_takes_the_cache_by_its_old_and_its_new_name(tmp_path):
    make_run(tmp_path / "run", dense_layers=1)
    found = opened(export(tmp_path / "run", tmp_path / "out", own=True), own=True)
    given = torch.from_numpy(tokens(SIZES["vocab_size"]))[:, :9].long()
    with torch.no_grad():
        expected = found(given).logits[:, -1]
        for name in ("cache", "past_key_values"):
            _, cache = found(given[:, :8], use_cache=True).to_tuple()
            last = found(given[:, 8:], **{name: cache}).logits[:, -1]
            torch.testing.assert_close(last, expected, atol=1e-4, rtol=0)


def test_bfloat16_and_float16_folders_are_opened_and_read(tmp_path):
    make_run(tmp_path / "run", dense_layers=1)
    flags = ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "bfloat16")]
    convert.main(["export", *flags, "--dtype", "bfloat16", "--remote_code"])
    ids = torch.from_numpy(tokens(SIZES["vocab_size"])).long()[:, :32]
    found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bfloat16", trust_remote_code=True
    ).eval()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found.dtype == torch.bfloat16 and found.state_dict()[bias].dtype == torch.float32
    assert found(ids).logits.isfinite().all()
    found.half().save_pretrained(tmp_path / "float16")
    convert.main(["import", "--folder", str(tmp_path / "float16"), "--out", str(tmp_path / "back")])
    first = stored(tmp_path / "back")["weights.first.embedding"][: SIZES["vocab_size"]]
    expected = found.get_input_embeddings().weight.detach().float().numpy()
    assert np.array_equal(first, expected)
