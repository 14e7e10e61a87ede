"""Samples of models whose answers are known: each prompt goes on from its own end.

Letters: M microbatches, B sequences, T positions, S positions asked for, V vocabulary.
"""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import generate
import passes
import train
import utils
from data.tokenizer import load_tokenizer
from dataset import read_manifest

PROMPTS = ("def", "import jax", "")
MESHES = {"1x1x1": utils.Mesh(fsdp=1, pipeline=1, tensor=1), "2x2x2_virtual": utils.Mesh(virtual=2)}


@pytest.fixture(scope="module")
def manifest(data):
    return read_manifest(Path(data[1]))


@pytest.fixture(scope="module")
def tokenizer(manifest):
    return load_tokenizer(manifest.tokenizer, manifest.tokenizer_sha256)


def sampled(monkeypatch, manifest, logits, mesh="1x1x1", steps=(7,), length=16, **sample):
    """Texts of PROMPTS after each of `steps`, where logits(tokens [M, B, S]) is the model."""

    def of_positions(config, declared, mesh):
        return lambda w, batch, at: logits(jnp.take_along_axis(batch.tokens, at, axis=-1))

    monkeypatch.setattr(passes, "logits", of_positions)
    config = utils.Config(
        mesh=MESHES[mesh],
        train=utils.Train(sequence_length=length),
        sample=utils.Sample(prompts=PROMPTS, **sample),
    )
    data = SimpleNamespace(manifest=manifest)
    sampler = generate.Sampler(config, None, train.make_mesh(config), data)
    told = [sampler(None, step) for step in steps]
    assert [[s["prompt"] for s in samples] for samples in told] == [list(PROMPTS)] * len(steps)
    assert all(
        s["step"] == step for samples, step in zip(told, steps, strict=True) for s in samples
    )
    return [[s["text"] for s in samples] for samples in told]


def counting(tokens_MBS):
    """After a token comes the next id, and after the last one the first."""
    return jax.nn.one_hot((tokens_MBS + 1) % 4096, 4096)


def following(tokenizer, manifest, prompt, count):
    last = (tokenizer.encode_ordinary(prompt) or [manifest.end_of_text])[-1]
    ids = [(last + 1 + i) % 4096 for i in range(count)]
    return tokenizer.decode([i for i in ids if i < tokenizer.n_vocab])


@pytest.mark.parametrize("mesh", MESHES)
def test_without_temperature_each_prompt_goes_on_with_the_likeliest_token(
    mesh, monkeypatch, manifest, tokenizer
):
    [texts] = sampled(monkeypatch, manifest, counting, mesh, tokens=4, temperature=0.0)
    assert texts == [following(tokenizer, manifest, prompt, 4) for prompt in PROMPTS]


def test_a_sample_ends_with_its_document(monkeypatch, manifest, tokenizer):
    end = tokenizer.encode_ordinary("def")[-1] + 2

    def ending(tokens_MBS):
        return counting(jnp.where(tokens_MBS == end, manifest.end_of_text - 1, tokens_MBS))

    [texts] = sampled(monkeypatch, manifest, ending, tokens=4, temperature=0.0)
    lengths = [2, 4, 4]
    pairs = zip(PROMPTS, lengths, strict=True)
    assert texts == [following(tokenizer, manifest, prompt, count) for prompt, count in pairs]


def test_a_prompt_that_leaves_no_room_is_cut_at_its_start(monkeypatch, manifest, tokenizer):
    assert len(tokenizer.encode_ordinary(PROMPTS[1])) > 1
    [texts] = sampled(monkeypatch, manifest, counting, length=4, tokens=3, temperature=0.0)
    assert texts == [following(tokenizer, manifest, prompt, 3) for prompt in PROMPTS]


def test_samples_are_drawn_by_temperature_the_same_again_at_the_same_step(monkeypatch, manifest):
    def even(tokens_MBS):
        return jnp.zeros((*tokens_MBS.shape, 4096))

    one, other, again = sampled(monkeypatch, manifest, even, steps=(1, 2, 1), temperature=1.0)
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True)) and len(set(one)) == len(PROMPTS)
