"""Runs with random weights, their logits, and published configs."""

import base64
import dataclasses
import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import checkpoint
import hf_case
import model
import reference
import train
import utils
from common import full_logits
from conftest import ROOT
from data.tokenizer import SAMPLE, load_tokenizer, table_sha256
from hf_case import model_with
from inference import decode, sampling
from runtime import cli, run_directory

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
# Widths all differ, so an exchanged dimension cannot fit; odd ones among them.
SIZES = {
    "vocab_size": 4097, "hidden_size": 48, "blocks": 2, "dense_layers": 0, "num_attention_heads": 3,
    "kv_lora_rank": 24, "qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 13,
    "rope_theta": 1000.0, "intermediate_size": 72, "moe_intermediate_size": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7, "compute_dtype": "float32",
}  # fmt: skip


def run_arrays(tree: dict) -> dict[str, np.ndarray]:
    """Return the weights of hf_case.weights by their names in a checkpoint."""
    tree = {
        "first": {"embedding": tree["embedding"], "prefix": tree["prefix"]},
        "blocks": tree["blocks"],
        "last": {"norm": tree["final_norm"], "output": tree["output"]},
    }
    leaves = jax.tree_util.tree_leaves_with_path({"weights": tree})
    return {jax.tree_util.keystr(path, simple=True, separator="."): a for path, a in leaves}


def weights_of(m: utils.Model, seed: int = 0) -> dict:
    """Random weights; softmax scores have no bias, as in all classes of transformers."""
    tree = hf_case.weights(m, seed)
    for run in m.runs:
        if run.experts and m.scoring_func == "softmax":
            tree["blocks"][run.name]["moe"]["bias"][:] = 0
    return tree


def make_run(folder: Path, seed=0, model=None, more_tokens=None, **fields) -> utils.Config:
    """Make a run with one checkpoint, of step 3. more_tokens  of its config, as main.py adds."""
    config = utils.Config(
        mesh=utils.Mesh(fsdp=1, pipeline=1, tensor=1),
        model=model or model_with(utils.Model(), **SIZES | fields),
        train=utils.Train(global_batch_size=1, microbatches=1, seq_len=64),
        eval=utils.Eval(sequences=1),
        run=utils.Run(name=folder.name, dir=str(folder.parent)),
    )
    cli.check(config)
    tokenizer = load_tokenizer(SAMPLE)
    tokens = {"tokenizer": SAMPLE, "tokenizer_sha256": table_sha256(tokenizer)}
    tokens |= {"end_of_text": tokenizer.eot_token} | (more_tokens or {})
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(cli.to_toml(config))
    with closing(checkpoint.Checkpoints(folder / "checkpoints", 1)) as saved:
        arrays = run_arrays(weights_of(config.model, seed))
        kept = dataclasses.asdict(config) | {"tokens": tokens}
        saved.save(3, arrays, kept, stacked=dict.fromkeys(arrays, 0))
    return config


def write_moonshot(folder, **settings):
    """Write a tiktoken.model as Kimi-K2 and Moonlight have it, with a small table."""
    folder.mkdir(exist_ok=True)
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += ["中".encode(), b"is", "中文".encode(), b"lish", b"glish", b"English"]
    tokens += [b"En", b" a", "混合".encode(), b"12", b"123"]
    lines = [b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>"}
    added = {str(len(tokens) + i): {"content": name, "special": True} for i, name in names.items()}
    fields = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    fields |= {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | settings))
    return len(tokens)


def write_sentencepiece(folder, scheme, **settings):
    """Write a tokenizer.json as Llama 2, Mistral and Mixtral have it, with a small table.

    scheme  where a space is put: "first" or "always" of Metaspace, or "segment", as older files do:
            before a text and after each special token.
    """
    folder.mkdir(exist_ok=True)
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    learned.train([str(ROOT / "README.md")], trainer)
    table = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*names, *(token for token in table["vocab"] if token.isascii() or "\u2581" in token)]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in table["merges"] if "".join(pair) in tokens]
    known = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    found = Tokenizer(models.BPE(vocab=vocab, merges=merges, **known))
    replaced = normalizers.Replace(" ", "\u2581")
    if scheme == "segment":
        found.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
    else:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    space = decoders.Replace("\u2581", " ")
    found.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    found.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
    fields |= {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fields["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | settings))


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a run's newest checkpoint, as they are on disk."""
    with closing(checkpoint.Checkpoints(folder / "checkpoints")) as saved:
        arrays = saved.arrays(saved.step_or_newest(None)).items()
        return {name: array.whole() for name, array in arrays if name.startswith("weights.")}


def on_mesh(folder: Path, ids: np.ndarray, shape: tuple[int, int, int]) -> tuple:
    """Return config, declared weights, mesh and weights of a run, for ids [B, T]."""
    B, T = ids.shape
    sizes = {"global_batch_size": B, "microbatches": 1, "seq_len": T, "loss_chunk_tokens": T}
    values = {f"train.{name}": size for name, size in sizes.items()}
    values |= {"model.compute_dtype": "float32", "model.capacity_factor": 0.0}
    values |= dict(zip(("mesh.fsdp", "mesh.pipeline", "mesh.tensor"), shape, strict=True))
    config = utils.changed(cli.load(folder / "config.toml"), values)
    devices = jax.devices()[: math.prod(shape)]
    declared, mesh = model.declare(config), train.make_mesh(config, devices)
    shapes = train.abstract_state(config, declared, mesh).weights
    return (
        config,
        declared,
        mesh,
        checkpoint.load_weights(run_directory.at(folder), None, shapes)[1],
    )


def logits(folder: Path, ids: np.ndarray, shape: tuple[int, int, int] = (1, 1, 1)) -> np.ndarray:
    """Of ids [B, T] on a mesh, without pads of the vocabulary."""
    config, declared, mesh, w = on_mesh(folder, ids, shape)
    B, T = ids.shape
    zeros = np.zeros((1, B, T), np.int32)
    batch = model.Batch(ids[None], ids[None], np.ones((1, B, T), np.float32), zeros)
    run = full_logits(config, declared, mesh)
    return np.asarray(run(w, batch))[0, :, :, : config.model.vocab_size]


def greedy(folder: Path, ids: np.ndarray, count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The most likely tokens after ids [B, T], [B, count]."""
    config, _, mesh, w = on_mesh(folder, ids, shape)
    config = decode.decoding_config(config, config.mesh.fsdp, config.mesh.tensor)
    length = ids.shape[1] + count
    options = sampling.SamplingOptions(0.0)
    generator = sampling.Generator(config, mesh, len(ids), length, [-2], options)
    generator.reset(range(len(ids)), 0)
    w = generator.convert_weights(w)
    return np.array([*generator.generate(w, ids.tolist(), count)]).T


def reference_logits(m: utils.Model, tree: dict, ids: np.ndarray) -> np.ndarray:
    """The same by reference.py, of weights of hf_case.weights."""
    found = jax.jit(lambda w: reference.logits(w, ids, m))(tree)
    return np.asarray(found)[..., : m.vocab_size]


def opened(folder: Path, own: bool = False) -> Any:
    """The model in torch; no weight may be missing or unexpected."""
    import torch  # late: only tests marked huggingface have it
    import transformers

    found, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=own, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return found.eval()


def their_logits(found: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return found(torch.from_numpy(ids).long()).logits.numpy()
