"""Texts of models whose answers are known, and of a trained run's checkpoint.

Letters: B sequences, T positions, P positions asked for, V vocabulary.
"""

import io
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decode
import generate
import loop
import model
import resume
import run_folder
import train
import utils
from data.tokenizer import load_tokenizer
from manifest import read_manifest

PROMPTS = ("def", "import jax", "")
MESHES = {"1x1x1": utils.Mesh(fsdp=1, pipeline=1, tensor=1), "2x2x2_virtual": utils.Mesh(virtual=2)}


@pytest.fixture(scope="module")
def manifest(data):
    return read_manifest(Path(data[1]))


@pytest.fixture(scope="module")
def tokenizer(manifest):
    return load_tokenizer(manifest.tokenizer, manifest.tokenizer_sha256)


def sampled(monkeypatch, manifest, logits, mesh="1x1x1", steps=(7,), length=16, **sample):
    """Texts of PROMPTS after each of `steps`, where logits(tokens [B, P]) is the model."""

    def extend(config, declared, mesh):
        def of_tokens(w, cache, tokens_BT, start_B, at_BP):
            return logits(jnp.take_along_axis(tokens_BT, at_BP, axis=-1)), cache

        return of_tokens

    monkeypatch.setattr(decode, "extend", extend)
    config = utils.Config(
        mesh=MESHES[mesh],
        train=utils.Train(sequence_length=length),
        sample=utils.Sample(prompts=PROMPTS, **sample),
    )
    sampler = generate.Sampler(config, train.make_mesh(config), SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(sampler.writer, "ready", lambda w: w)
    told = [sampler(None, step) for step in steps]
    assert [[s["prompt"] for s in samples] for samples in told] == [list(PROMPTS)] * len(steps)
    assert all(
        s["step"] == step for samples, step in zip(told, steps, strict=True) for s in samples
    )
    return [[s["text"] for s in samples] for samples in told]


def counting(tokens_BP):
    """After a token comes the next id, and after the last one the first."""
    return jax.nn.one_hot((tokens_BP + 1) % 4096, 4096)


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

    def ending(tokens_BP):
        return counting(jnp.where(tokens_BP == end, manifest.end_of_text - 1, tokens_BP))

    [texts] = sampled(monkeypatch, manifest, ending, tokens=4, temperature=0.0)
    lengths = [2, 4, 4]
    pairs = zip(PROMPTS, lengths, strict=True)
    assert texts == [following(tokenizer, manifest, prompt, count) for prompt, count in pairs]


def test_a_prompt_that_leaves_no_room_is_cut_at_its_start(monkeypatch, manifest, tokenizer):
    assert len(tokenizer.encode_ordinary(PROMPTS[1])) > 1
    [texts] = sampled(monkeypatch, manifest, counting, length=4, tokens=3, temperature=0.0)
    assert texts == [following(tokenizer, manifest, prompt, 3) for prompt in PROMPTS]


def test_samples_are_drawn_by_temperature_the_same_again_at_the_same_step(monkeypatch, manifest):
    def even(tokens_BP):
        return jnp.zeros((*tokens_BP.shape, 4096))

    one, other, again = sampled(monkeypatch, manifest, even, steps=(1, 2, 1), temperature=1.0)
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True)) and len(set(one)) == len(PROMPTS)


def test_samples_that_cannot_be_had_are_left_out_and_that_is_said(manifest, monkeypatch, capsys):
    config = utils.Config(mesh=utils.Mesh(fsdp=4, pipeline=2, tensor=1))
    data, mesh = SimpleNamespace(manifest=manifest), train.make_mesh(config)
    narrow = utils.Model(width=12)  # divides over 4 ranks of fsdp, not over 8
    assert loop.sampler(utils.Config(mesh=config.mesh, model=narrow), mesh, data) is None
    assert (
        "no samples: --model.width 12 cannot be cut over --mesh.fsdp 8" in capsys.readouterr().out
    )
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**20, "bytes_in_use": 0})
    full = SimpleNamespace(devices=mesh.devices, axis_types=mesh.axis_types, local_devices=[device])
    assert loop.sampler(config, full, data) is None
    assert "GiB, and 0.00 are free" in capsys.readouterr().out


# --- drawing --------------------------------------------------------------------------------------


def drawn(probabilities, **how):
    """How often each token is drawn, of 2,000 texts."""
    rows = jnp.broadcast_to(jnp.log(jnp.array(probabilities)), (2000, len(probabilities)))
    numbers = jnp.arange(2000)
    key, at = jax.random.key(0), jnp.zeros(2000, jnp.int32)
    found = generate.draw(rows, key, numbers, at, generate.Drawing(**how))
    return np.bincount(found, minlength=len(probabilities)) / 2000


def test_tokens_are_drawn_as_often_as_is_asked():
    given = [0.5, 0.25, 0.15, 0.1]
    assert drawn(given, temperature=1.0) == pytest.approx(given, abs=0.03)
    sharp = np.array(given) ** 2 / np.sum(np.array(given) ** 2)
    assert drawn(given, temperature=0.5) == pytest.approx(sharp, abs=0.03)
    assert drawn(given, temperature=1.0, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    # The third is reached by 0.75 and needed for 0.8.
    assert drawn(given, temperature=1.0, top_p=0.8) == pytest.approx(
        [5 / 9, 2.5 / 9, 1.5 / 9, 0], abs=0.03
    )
    assert drawn(given, temperature=1.0, top_p=0.01).tolist() == [1, 0, 0, 0]
    assert drawn(given, temperature=0.0).tolist() == [1, 0, 0, 0]


# --- a checkpoint on the command line -------------------------------------------------------------

LINES = ["import jax", "def test_a", "class A:", "return"]


@pytest.fixture
def written(whole, capsys):
    """What generate.py prints for the tiny run."""

    def run(*flags):
        generate.main(["--run", str(whole), *flags])
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(LINES))
    return ["--prompts", str(path), "--temperature", "0", "--tokens", "9"]


def test_a_batch_gives_each_prompt_the_text_that_it_has_alone_on_every_mesh(written, file):
    alone = "".join(
        written("--prompt", line, "--temperature", "0", "--tokens", "9") for line in LINES
    )
    assert all(line in alone for line in LINES)
    assert written(*file) == written(*file, "--batch", "3") == alone
    assert written(*file, "--mesh.fsdp", "4", "--mesh.tensor", "2") == alone


def test_drawn_texts_do_not_depend_on_the_batch_either(written, file):
    warm = [*file[:2], "--tokens", "9", "--seed", "3", "--top_k", "50", "--top_p", "0.9"]
    assert written(*warm) == written(*warm, "--batch", "3")
    assert written(*warm) != written(*warm, "--seed", "4")


def test_a_conversation_goes_on_from_all_before(whole, tokenizer, monkeypatch):
    monkeypatch.setattr(generate, "MOST_AT_ONCE", 8)  # longer texts are read in parts
    one = ["--mesh.fsdp=1", "--mesh.pipeline=1", "--mesh.tensor=1", "--train.microbatches=1"]
    config = resume.config_of(run_folder.at(whole), one, generate.Flags)
    mesh = train.make_mesh(config)
    shapes = train.abstract_state(config, model.declare(config), mesh).weights
    _, w, _ = resume.weights_of(run_folder.at(whole), None, shapes)
    writer = generate.Writer(config, mesh, 2, 32, 4095, generate.Drawing(0.0))
    w = writer.ready(w)
    parts = [tokenizer.encode_ordinary(text) for text in ("import jax", "def test_a(x):", "x")]

    def written(*turns):
        """Ids that each turn adds to two texts, which are read together."""
        writer.start([0, 1], 0)
        return [np.array([*writer.write(w, turn, 4)]).T.tolist() for turn in turns]

    (first, other), (second, _) = written([parts[0], parts[1]], [parts[2], parts[2]])
    assert written([parts[0] + first + parts[2], parts[1]]) == [[second, other]]
    # A text that fills its room ends alone: with 31 of 32 positions taken there are two tokens.
    full, beside = written([(parts[1] * 9)[:31], parts[0]])[0]
    assert full[2:] == [generate.ENDED] * 2 and generate.ENDED not in full[:2]
    assert beside == first


def test_the_command_holds_a_conversation(written, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import jax\ndef test\n\n"))
    flags = ["--temperature", "0", "--tokens", "5"]
    told = written("--interactive", *flags)
    assert written("--prompt", "import jax\n", *flags).removeprefix("import jax\n") in told
    assert len(told) > 10  # of two answers, of five tokens each


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x = 1\n" * 32], "tokens, and the model was trained on 32"),
        (["--prompts", "absent"], "--prompts absent cannot be read"),
        ([], "nothing to continue, or too much: give one of"),
        (["--prompt", "a", "--interactive"], "nothing to continue, or too much"),
        (["--prompt", "a", "--mesh.pipeline", "2"], "text is made without a pipeline"),
        (["--prompt", "a", "--top_p", "0"], "--top_p 0.0 is no probability"),
        (["--prompt", "a", "--tokens", "0"], "--tokens 0 is below 1"),
        (["--prompt", "a", "--warmth", "1"], "unknown flag --warmth"),
        (["--prompt", "a", "--step", "4"], "there is no checkpoint of step 4"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(flags, message, whole):
    with pytest.raises(ValueError, match=message):
        generate.main(["--run", str(whole), *flags])


def test_a_run_without_a_checkpoint_is_named(whole, tmp_path):
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        generate.main(["--run", str(tmp_path), "--prompt", "a"])
