"""Unusual folders of models: imported with the logits of transformers, or refused by name."""

import json

import numpy as np
import pytest

pytestmark = [pytest.mark.huggingface, pytest.mark.slow]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

import convert  # noqa: E402
from hf.model_config import CLASSES  # noqa: E402
from hf_run import logits, their_logits  # noqa: E402
from utils import ConfigError  # noqa: E402

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500.0,
    "max_position_embeddings": 128, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
SINGLE, FIRST, SECOND = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
QUERY, NORM, HEAD = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def model(kind="llama", **fields):
    """Return (config.json, tensors) of a model with random weights."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SIZES | fields)
    made = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, w in made.named_parameters():
            if "norm" in name or "bias" in name:
                w.add_(0.2 * torch.randn_like(w))
            else:
                w.normal_(0, w.shape[-1] ** -0.5)
    tensors = {name: w.clone().contiguous() for name, w in made.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors[HEAD]
    return SIZES | fields | {"model_type": kind, "architectures": [CLASSES[kind]]}, tensors


def write(folder, table, files, index=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    for name, tensors in files.items():
        save_file({k: w.clone() for k, w in tensors.items()}, folder / name, {"format": "pt"})
    if index:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)


def halves(tensors):
    names = sorted(tensors)
    half = len(names) // 2
    return [{n: tensors[n] for n in part} for part in (names[:half], names[half:])]


def settings(kind="llama", made=None, **edit):
    """A case: other settings in config.json."""

    def make(folder):
        table, tensors = model(kind, **made or {})
        write(folder, table | edit, {SINGLE: tensors})

    return make


def weights(change, kind="llama", **fields):
    """A case: `change` returns other tensors."""

    def make(folder):
        table, tensors = model(kind, **fields)
        write(folder, table, {SINGLE: change(tensors)})

    return make


def sharded(change):
    """A case: change(first, second) returns the files, and what else the index maps."""

    def make(folder):
        table, tensors = model()
        first, second = halves(tensors)
        index = dict.fromkeys(first, FIRST) | dict.fromkeys(second, SECOND)
        files, more = change(first, second)
        write(folder, table, files, index | more)

    return make


def noise(w):
    return torch.randn_like(w)


def bare(tensors):
    return {name.removeprefix("model."): w for name, w in tensors.items()}


def without(*names):
    return lambda tensors: {n: w for n, w in tensors.items() if not n.endswith(names)}


def adding(**more):
    """Add tensors, whose names have __ for a dot."""
    return lambda tensors: tensors | {n.replace("__", "."): w for n, w in more.items()}


def third_layer(tensors):
    more = {n.replace("layers.1.", "layers.2."): w for n, w in tensors.items() if ".1." in n}
    return tensors | more


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EQUAL = {
    "plain": settings(),
    "single file beside an index": sharded(
        lambda a, b: (
            {FIRST: a, SECOND: b, SINGLE: {n: w + 0.3 * noise(w) for n, w in (a | b).items()}},
            {},
        )
    ),
    "index omits a tensor": sharded(lambda a, b: ({FIRST: a, SECOND: b}, {})),
    "index names the wrong file": sharded(lambda a, b: ({FIRST: a, SECOND: b}, {NORM: FIRST})),
    "same tensor in two files": sharded(
        lambda a, b: ({FIRST: a, SECOND: b | {min(a): a[min(a)]}}, {})
    ),
    "tied, same output": weights(
        lambda t: t | {HEAD: t["model.embed_tokens.weight"]}, tie_word_embeddings=True
    ),
    "tied, other output": weights(
        lambda t: t | {HEAD: noise(t["model.embed_tokens.weight"])}, tie_word_embeddings=True
    ),
    "tied, no prefix": weights(bare, tie_word_embeddings=True),
    "float16": weights(lambda t: {n: w.half() for n, w in t.items()}),
    "bfloat16": weights(lambda t: {n: w.bfloat16() for n, w in t.items()}),
    "frequencies": weights(adding(model__rotary_emb__inv_freq=torch.ones(4))),
    "llama with a window": settings(sliding_window=7),
    "llama with layer types": settings(sliding_window=7, layer_types=["sliding_attention"] * 2),
    "mistral with layer types": settings(
        "mistral", {"sliding_window": 7}, layer_types=["sliding_attention"] * 2
    ),
    "mistral without a window": settings("mistral", {"sliding_window": None}),
    "qwen2 with an unused window": settings("qwen2", sliding_window=7, use_sliding_window=False),
    "rope parameters": settings(rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "yarn without original context": settings(rope_scaling=YARN),
    "llama3 without original context": settings(rope_scaling=LLAMA3),
    "original context outside": settings(
        original_max_position_embeddings=32,
        rope_scaling=YARN | {"original_max_position_embeddings": 64},
    ),
    "settings of other families": settings(
        final_logit_softcapping=5.0,
        attention_multiplier=0.5,
        partial_rotary_factor=0.5,
        query_pre_attn_scalar=3,
    ),
}
REFUSED = {
    "two files with other values": (
        sharded(lambda a, b: ({FIRST: a, SECOND: b | {min(a): noise(a[min(a)])}}, {})),
        r"two tensors lm_head.weight with other values",
    ),
    "no output matrix": (weights(without(HEAD)), r"lacks 1 of 21 tensors .*lm_head.weight"),
    "untied, no prefix, no output": (
        weights(lambda t: bare(without(HEAD)(t))),
        r"lacks 1 of .*lm_head",
    ),
    "a foreign prefix": (
        weights(lambda t: {f"base_model.model.{n}": w for n, w in t.items()}),
        r"has 21 tensors that are not in its config: model.base_model.model.",
    ),
    "float64": (weights(lambda t: {n: w.double() for n, w in t.items()}), "of type F64"),
    "int8": (weights(lambda t: t | {QUERY: (t[QUERY] * 50).to(torch.int8)}), "of type I8"),
    "scale without a quantization": (
        weights(lambda t: t | {f"{QUERY}_scale_inv": torch.full((2, 2), 3.0)}),
        "quantization_config does not match",
    ),
    "weight_scale": (
        weights(lambda t: t | {f"{QUERY}_scale": torch.tensor(3.0)}),
        "q_proj.weight_scale. They belong to another model",
    ),
    "scale of no tensor": (
        weights(adding(model__norm__foo_scale_inv=torch.ones(2, 2))),
        "model.norm.foo_scale_inv",
    ),
    "bias in the file only": (
        weights(adding(model__layers__0__self_attn__q_proj__bias=torch.ones(32))),
        "q_proj.bias",
    ),
    "bias of the output": (weights(adding(lm_head__bias=torch.ones(101))), "lm_head.bias"),
    "no bias in the file": (weights(without("bias"), "qwen2"), r"lacks 6 .*k_proj.bias"),
    "another layer": (weights(third_layer), r"has 9 tensors .*layers.2"),
    "another layer, called a prediction layer": (
        weights(third_layer, num_nextn_predict_layers=1),
        r"has 9 tensors .*layers.2",
    ),
    "awq": (settings(quantization_config={"quant_method": "awq"}), "quantization_config .*awq"),
    "attention bias": (settings(made={"attention_bias": True}), "attention_bias True"),
    "bias of the feed-forward": (settings(made={"mlp_bias": True}), "mlp_bias True"),
    "another activation": (settings(hidden_act="gelu"), "hidden_act 'gelu'"),
    "attention in both directions": (settings(is_causal=False), "is_causal False"),
    "mistral, full attention": (
        settings("mistral", {"sliding_window": 7}, layer_types=["full_attention"] * 2),
        "layer_types .*full_attention",
    ),
    "a window in some layers": (
        settings("qwen2", use_sliding_window=True, sliding_window=7),
        "use_sliding_window True",
    ),
    "linear scaling": (
        settings(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "unsupported rotary embedding",
    ),
    "yarn with an attention factor": (
        settings(rope_scaling=YARN | {"attention_factor": 2.0}),
        "unsupported rotary embedding",
    ),
    "smaller vocabulary": (
        settings(vocab_size=100),
        r"is \(101, 32\), and by the config \(100, 32\)",
    ),
}


def import_(folder, run):
    convert.main(["import", "--folder", str(folder), "--out", str(run), "--train.seq_len", "64"])


@pytest.mark.parametrize("name", EQUAL)
def test_an_unusual_folder_has_the_logits_of_transformers(name, tmp_path):
    EQUAL[name](tmp_path / "folder")
    import_(tmp_path / "folder", tmp_path / "run")
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 64)).astype(np.int32)
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32
    )
    expected = their_logits(opened.eval(), ids)
    np.testing.assert_allclose(logits(tmp_path / "run", ids), expected, atol=2e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_of_another_model_is_refused_by_name(name, tmp_path):
    make, message = REFUSED[name]
    make(tmp_path / "folder")
    with pytest.raises(ConfigError, match=message):
        import_(tmp_path / "folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.json", SINGLE, "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    settings()(tmp_path / "folder")
    (tmp_path / "folder" / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=f"{name} is a pointer of Git LFS"):
        import_(tmp_path / "folder", tmp_path / "run")


def test_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no config.json. It is an adapter. Merge it"):
        import_(tmp_path, tmp_path / "run")
