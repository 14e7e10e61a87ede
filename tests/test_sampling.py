"""Sampling from models whose output is known, and generation from a trained checkpoint.

Letters: B sequences, T positions, P positions with logits, V vocabulary.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_case
import reference
import train
import utils
from common import config_of, mesh_of, transformer_of
from data.manifest import read_manifest
from data.tokenizer import load_tokenizer
from inference import decode, sampling
from tiny_run import load

PROMPTS = ("def", "import jax", "")


@pytest.fixture(scope="module")
def manifest(data):
    return read_manifest(Path(data[1]))


@pytest.fixture(scope="module")
def tokenizer(manifest):
    return load_tokenizer(manifest.tokenizer, manifest.tokenizer_sha256)


def sampled(monkeypatch, manifest, logits, tokens, length=16):
    """The most likely texts of PROMPTS, where logits(tokens [B, P]) is the model."""

    def extend(config, declared, mesh):
        def of_tokens(w, cache, tokens_BT, start_B, count_B, at_BP):
            return logits(jnp.take_along_axis(tokens_BT, at_BP, axis=-1)), cache

        return of_tokens

    monkeypatch.setattr(decode, "extend", extend)
    config = utils.Config(
        mesh=utils.Mesh(virtual=2),
        train=utils.Train(seq_len=length),
        sample=utils.Sample(prompts=PROMPTS, tokens=tokens, temperature=0.0),
    )
    sampler = sampling.Sampler(config, train.make_mesh(config), manifest)
    sampler.generator.ends.insert(0, 4094)  # another token that ends a text, and that none has
    monkeypatch.setattr(sampler, "convert_weights", lambda w: w)
    samples = sampler(None, 7)
    assert [(s["step"], s["prompt"]) for s in samples] == [(7, prompt) for prompt in PROMPTS]
    return [s["text"] for s in samples]


def counting(tokens_BP):
    """Logits of the next id; the first id follows the last."""
    return jax.nn.one_hot((tokens_BP + 1) % 4096, 4096)


def test_temperature_0_samples_the_most_likely_token_until_a_document_ends(
    monkeypatch, manifest, tokenizer
):
    end = tokenizer.encode_ordinary("def")[-1] + 2

    def ending(tokens_BP):
        return counting(jnp.where(tokens_BP == end, manifest.end_of_text - 1, tokens_BP))

    def expected(*counts):
        lasts = [(tokenizer.encode_ordinary(p) or [manifest.end_of_text])[-1] for p in PROMPTS]
        ids = [[(n + 1 + i) % 4096 for i in range(k)] for n, k in zip(lasts, counts, strict=True)]
        return [tokenizer.decode([i for i in each if i < tokenizer.n_vocab]) for each in ids]

    assert sampled(monkeypatch, manifest, ending, 4) == expected(2, 4, 4)
    assert len(tokenizer.encode_ordinary(PROMPTS[1])) > 1, "a long prompt is cut at its start"
    assert sampled(monkeypatch, manifest, counting, 3, length=4) == expected(3, 3, 3)


def test_a_run_trains_without_samples_that_do_not_fit_its_mesh(manifest, capsys):
    config = utils.Config(mesh=utils.Mesh(fsdp=4, pipeline=2, tensor=1))
    mesh = train.make_mesh(config)
    narrow = utils.changed(config, {"model.hidden_size": 12})  # divides over 4 ranks, not over 8
    assert sampling.make_sampler(narrow, mesh, manifest) is None
    assert "no samples: --model.hidden_size 12 is not divisible" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, np.array([100, 25, 9, 4]) / 138),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        # The first two have 0.75, so the third is needed for 0.8.
        ({"temperature": 1.0, "top_p": 0.8}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
)
def test_tokens_are_sampled_by_temperature_top_k_and_top_p(options, expected):
    rows = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1])), (2000, 4))
    numbers, at = jnp.arange(2000), jnp.zeros(2000, jnp.int32)
    options = sampling.SamplingOptions(**options)
    tokens = sampling.sample_tokens(rows, jax.random.key(0), numbers, at, options)
    found = np.bincount(tokens, minlength=4) / 2000
    assert found == pytest.approx(expected, abs=0.03)
    assert ((found == 0) == (np.array(expected) == 0)).all()


def test_a_conversation_has_all_earlier_text_as_context(whole, tokenizer, monkeypatch):
    monkeypatch.setattr(sampling, "MAX_PREFILL_TOKENS", 8)  # longer texts take several passes
    config, _, mesh, w = load(whole, "--mesh.fsdp=1", "--mesh.pipeline=1", "--mesh.tensor=1")
    generator = sampling.Generator(config, mesh, 2, 32, [4095], sampling.SamplingOptions(0.0))
    w = generator.convert_weights(w)
    parts = [tokenizer.encode_ordinary(text) for text in ("import jax", "def test_a(x):", "x")]

    def generated(*turns):
        """The ids generated after each turn of two texts."""
        generator.reset([0, 1], 0)
        return [np.array([*generator.generate(w, turn, 4)]).T.tolist() for turn in turns]

    (first, other), (second, _) = generated([parts[0], parts[1]], [parts[2], parts[2]])
    assert generated([parts[0] + first + parts[2], parts[1]]) == [[second, other]]
    # A text ends at the maximum length: after 31 of 32 positions there are two tokens.
    full, beside = generated([(parts[1] * 9)[:31], parts[0]])[0]
    assert full[2:] == [sampling.ENDED] * 2 and sampling.ENDED not in full[:2]
    assert beside == first


def test_a_rewound_generator_continues_as_a_fresh_one(monkeypatch):
    """With rings of 8 positions, a window of 5, and 12 positions that are appended at once."""
    monkeypatch.setattr(decode, "KEY_BLOCK", 8)
    monkeypatch.setattr(sampling, "MAX_PREFILL_TOKENS", 12)
    types = ("sliding_attention", "full_attention")
    fields = {"layer_types": types, "sliding_window": 5, "dense_layers": 1, "moe_layers": 0}
    config = config_of((1, 1, 1), num_hidden_layers=4, **fields)
    mesh, tree = mesh_of(config), hf_case.weights(config.model, 3)
    given = decode.decoding_config(config, 1, 1), mesh, 1, 64, [-2]
    generator = sampling.Generator(*given, sampling.SamplingOptions(0.0))
    w = generator.convert_weights(transformer_of(config, mesh, tree))
    text = np.random.default_rng(0).integers(0, 96, 40).tolist()

    def continued(ids):
        return [int(new_B[0]) for new_B in generator.generate(w, [ids], 4)]

    def fresh(ids):
        generator.reset([0], 0)
        return continued(ids)

    wanted = fresh(text)
    logits = reference.logits(tree, np.array([text + wanted]), config.model)
    assert logits[0, -5:-1].argmax(-1).tolist() == wanted
    for first, length, kept in ((40, 36, 36), (40, 35, 0), (6, 2, 2)):
        generator.reset([0], 0)
        generator.prefill(w, [text[:first]])
        assert generator.rewind(length) == kept
        found = continued(text[kept:length] + [7] * 3)
        assert found == fresh(text[:length] + [7] * 3)
    # What the cache lost before a rewind is not there after it.
    generator.reset([0], 0)
    generator.prefill(w, [text])
    generator.rewind(37)
    generator.prefill(w, [[7]])
    assert generator.rewind(34) == 0
    assert continued(text[:34]) == fresh(text[:34])


def test_a_sample_is_logged_as_text_whose_control_characters_a_terminal_does_not_obey():
    sample = {"step": 6, "prompt": "def ", "text": "é():\n\tx\x1b[2J\r"}
    expected = "step 6, a completion of 'def ':\n    def é():\n    \tx\\x1b[2J\\r"
    assert sampling.as_log(sample) == expected
