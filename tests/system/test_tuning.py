"""Runs that learn from answers alone, and tokenizers beside those of transformers."""

import json
import math
import re

import jax
import numpy as np
import pytest

import checkpoint
import dataset
import model
import reference
import train
import validate
from common import canonical
from data import train_tokenizer
from data.tokenizer import load_tokenizer, token_bytes
from dataset import Dataset
from hf_run import write_sentencepiece
from runtime import cli, jsonl, run_directory
from test_chat import (
    CHATML,
    LLAMA3,
    TALK,
    WEIGHTS,
    alone,
    folder,
    joined,
    run,
    says,
    source,
    talk,
    talker,
    write,
)
from test_hf_tokenizer import SPECIAL, pair, pieces, texts
from tiny_run import start

__all__ = ["folder", "pair", "pieces", "source", "talker", "texts"]  # fixtures


def test_fifty_short_conversations_are_tuned_on(whole, runs, tmp_path):
    """The commands that the messages name, one after the other."""
    source = write(tmp_path / "chat.jsonl", [{"prompt": f"{n}?", "answer": "1"} for n in range(50)])
    run(source, tmp_path / "packed")
    flags = [f"--data.{name}={tmp_path}/packed/{name}" for name in ("train", "val")]
    with pytest.raises(ValueError, match=r"longer than the data.* --row-tokens 128, which pads"):
        dataset.open_validation(cli.parse([*flags, "--train.seq_len", "128"]))
    run(source, tmp_path / "rows", "--row-tokens", 32)
    flags = [flag.replace("packed", "rows") for flag in flags]
    more = r"more than the (\d) windows.*Use --eval.sequences (\1) or"
    with pytest.raises(ValueError, match=more):
        dataset.open_validation(cli.parse([*flags, "--train.seq_len", "32"]))
    extra = f"--run.init_from {whole} --train.steps 2 --eval.sequences 2 --sample.prompts"
    steps = jsonl.read(start(flags, runs, "fifty", *extra.split()) / "metrics.jsonl")
    assert steps[-1]["loss/val"] < steps[0]["loss/val"]
    none = start(flags[:1], runs, "unseen", *extra.replace("sequences 2", "sequences 0").split())
    assert not any("loss/val" in record for record in jsonl.read(none / "metrics.jsonl"))
    assert not list((none / "plots").glob("*val*"))


def mean_over_answers(tree, batch, config, folder):
    """Of the reference's losses of single tokens, by the weights as the files have them."""
    ids, weights = joined(folder), joined(folder, WEIGHTS)
    starts = {tuple(ids[i : i + 32]): i + 1 for i in range(0, len(ids) - 32, 32)}
    counted = np.stack([weights[starts[tuple(row)] :][:32] for row in batch["tokens"]]) == 1
    assert 0.1 < counted.mean() < 0.9
    alone = jax.jit(lambda tree, tokens: reference.logits(tree, tokens, config.model))
    log_p = jax.nn.log_softmax(np.asarray(alone(tree, batch["tokens"])))
    losses = -np.take_along_axis(np.asarray(log_p), batch["targets"][..., None], -1)[..., 0]
    return losses[counted].mean()


def test_training_and_validation_are_means_over_answers(whole, folder, runs, capsys):
    flags = [f"--data.{name}={folder / name}" for name in ("train", "val")]
    validate.main(["--run", str(whole), "--json", flags[1]])
    found = json.loads(capsys.readouterr().out)
    config = cli.load(whole / "config.toml")
    shapes = train.abstract_state(config, model.declare(config), train.make_mesh(config)).weights
    tree = canonical(config, checkpoint.load_weights(run_directory.at(whole), 6, shapes)[1])
    batch = Dataset(folder / "val", 32).eval_rows(np.arange(16), 16)
    expected = mean_over_answers(tree, batch, config, folder / "val")
    assert found["loss/val"] == pytest.approx(expected, rel=2e-5)
    extra = "--train.steps 1 --checkpoint.every_steps 0 --sample.prompts"
    run_folder = start(flags, runs, "answers", *extra.split())
    [_, first, evaluation] = jsonl.read(run_folder / "metrics.jsonl")
    config = cli.load(run_folder / "config.toml")
    state = train.initial_state(config, model.declare(config), train.make_mesh(config))
    batch = alone(folder / "train", 32, batch_size=8).rows(0, np.arange(8))
    tree = canonical(config, state.weights)
    expected = mean_over_answers(tree, batch, config, folder / "train")
    assert first["loss/cross_entropy"] == pytest.approx(expected, rel=2e-5)
    assert first["tokens"] == 8 * 32 and math.isfinite(evaluation["loss/val"])


@pytest.mark.huggingface
def test_transformers_opens_a_written_tokenizer_and_gives_the_same_ids(pair, texts):
    import transformers

    tokenizer, folder = pair
    found = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert found(text)["input_ids"] == tokenizer.encode_ordinary(text), repr(text[:50])
    assert found.eos_token_id == tokenizer.eot_token
    assert (found.unk_token, found.model_max_length) == (None, 128)
    ids = tokenizer.encode_ordinary("x , y.")
    assert found.decode(ids) == tokenizer.decode(ids)
    split = transformers.AutoTokenizer.from_pretrained(folder, split_special_tokens=False)
    asked = tokenizer.encode(SPECIAL, allowed_special=tokenizer.special_tokens_set)
    assert split(SPECIAL)["input_ids"] == asked


@pytest.mark.huggingface
def test_sentencepiece_gives_the_ids_of_transformers(pieces, texts):
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(pieces)), AutoTokenizer.from_pretrained(pieces)
    assert (ours.special.bos, ours.special.adds_bos, ours.eot_token) == (1, True, 2)
    for text in [*texts, " one space", "  two", "\u2581", "été 漢字"]:
        if not re.search("</?s>|<unk>", text):  # theirs recognizes special tokens
            assert theirs(text)["input_ids"] == [1, *ours.encode_ordinary(text)], repr(text[:50])


@pytest.mark.huggingface
def test_transformers_opens_a_trained_tokenizer_and_gives_its_ids(tmp_path):
    from transformers import AutoTokenizer

    source, out = write(tmp_path / "rows.jsonl", [{"text": "a row of text"}] * 9), tmp_path / "bpe"
    flags = ["--source", str(source), "--val-share", "0", "--vocab-size", "270", "--out", str(out)]
    train_tokenizer.main(flags)
    ours, theirs = load_tokenizer(str(out)), AutoTokenizer.from_pretrained(out)
    assert theirs("a row of 12 \u00e9")["input_ids"] == ours.encode_ordinary("a row of 12 \u00e9")
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (0, 0, ours.n_vocab)
    found = theirs.apply_chat_template([says("user", "a"), says("assistant", "b")], tokenize=False)
    assert found == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.huggingface
@pytest.mark.parametrize("template", [CHATML, LLAMA3, "segment", "first", "always"])
def test_ids_of_conversations_are_those_of_transformers(tmp_path, talker, template):
    """The names are schemes of SentencePiece with the template of Mistral."""
    from transformers import AutoTokenizer

    if template in (CHATML, LLAMA3):
        opened = talker(template)
        # What looks special in a message is special for transformers.
        plain = [(role, re.sub(r"<\|\w+\|>", f"mark {i}", c)) for i, (role, c) in enumerate(TALK)]
    else:
        opened = tmp_path / "pieces"
        write_sentencepiece(opened, template, chat_template=MISTRAL)
        plain = [("user", "one  é"), ("assistant", "two"), ("user", " three"), ("assistant", "4\n")]
    ids, weights, tokenizer = talk(tmp_path, opened, plain)
    theirs = AutoTokenizer.from_pretrained(opened)
    expected = theirs.apply_chat_template([says(*turn) for turn in plain], return_dict=False)
    assert ids[:-1].tolist() == list(expected) and ids[-1] == tokenizer.eot_token
    learned = b"".join(token_bytes(tokenizer, i) for i in ids[:-1][weights[:-1] == 1].tolist())
    if opened.name == "pieces":
        assert learned.decode() == " two</s> 4\n</s>"
    for role, content in plain:
        assert (content.strip() in learned.decode()) == (role == "assistant")
