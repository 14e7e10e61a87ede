"""Conversations to tokens and loss weights, by value, and runs that learn from answers alone."""

import dataclasses
import json
import math
import re

import google_crc32c
import jax
import numpy as np
import pytest
import tiktoken

import checkpoint
import dataset
import main
import model
import reference
import train
import validate
from common import canonical
from data import chat, prepare
from data.encode import Encoder, encoder_of
from data.hf_tokenizer import Special
from data.manifest import INDEX, read_manifest
from data.readers import Chunk, Document
from data.settings import Prepare, in_validation
from data.tokenizer import load_tokenizer, token_bytes
from dataset import Dataset
from hf.tokenizer_export import write_hugging_face
from hf_run import write_sentencepiece
from runtime import cli, jsonl, run_directory
from test_dataset import alone
from tiny_run import start

TOKENIZER = load_tokenizer("sample")
END_OF_TEXT = "<|endoftext|>"


def says(role, content):
    return {"role": role, "content": content}


def rows():
    """160 conversations: of one and two turns, with and without a system, some ending with a
    question, some in the form with a prompt.
    """
    for n in range(160):
        asked = [says("user", f"What is {n} + {3 * n}?\n"), says("assistant", f" {4 * n}, é.\n\n")]
        if n % 4 == 1:
            asked = [says("system", "Be brief."), *asked, says("user", ""), says("assistant", "!")]
        if n % 4 == 2:
            asked = [*asked, says("user", "And then?")]
        if n % 4 == 3:
            name = "answer" if n % 8 == 3 else "completion"
            yield {"prompt": f"Count to {n}", name: " ".join(map(str, range(n % 9 + 1)))}
        else:
            yield {"messages": asked, "id": n}


def answers(row):
    """The learned text of a line, computed without the code under test."""
    if "prompt" in row:
        return row.get("answer", row.get("completion")) + "<|end|>" + END_OF_TEXT
    said = [m["content"] + "<|end|>" for m in row["messages"] if m["role"] == "assistant"]
    return "".join(said) + END_OF_TEXT * (row["messages"][-1]["role"] == "assistant")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source, out, *flags):
    prepare.main(
        ["--source", str(source), "--out", str(out), "--workers", "1", "--chat", *map(str, flags)]
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source") / "chat.jsonl", rows())


@pytest.fixture(scope="module")
def folder(source):
    """OUT, in shards that end in the middle of a conversation."""
    run(source, source.parent / "chat", "--val-share", 0.25, "--shard-tokens", 997)
    return source.parent / "chat"


def joined(folder, kind=""):
    names = [s.name.replace(".npy", f"{kind}.npy") for s in read_manifest(folder).shards]
    return np.concatenate([np.load(folder / name) for name in names])


# What is written


def test_the_plain_template_is_text_divided_where_the_weight_changes():
    messages = [("system", "s"), ("user", "u"), ("assistant", "a\n"), ("user", ""), ("user", "v")]
    assert [chunk[:2] for chunk in chat.plain(messages)] == [
        ("<|system|>\ns<|end|>\n<|user|>\nu<|end|>\n<|assistant|>\n", 0),
        ("a\n<|end|>", 1),
        ("\n<|user|>\n<|end|>\n<|user|>\nv<|end|>", 0),
    ]


@pytest.mark.parametrize("split", ["train", "val"])
def test_what_has_weight_1_is_the_answers_and_their_ends_and_nothing_else(folder, split):
    here, position = [], 0
    for row in rows():
        if in_validation("chat.jsonl", position, 0.25) == (split == "val"):
            here.append(row)
        position += len(json.dumps(row)) + 1
    ids, weights = joined(folder / split), joined(folder / split, ".weights")
    assert (weights.dtype, weights.shape) == (np.uint8, ids.shape)
    assert set(weights) == {0, 1}
    assert TOKENIZER.decode(ids[weights == 1].tolist()) == "".join(map(answers, here))
    prompts = TOKENIZER.decode(ids[weights == 0].tolist())
    for row in here:
        for said in row.get("messages", []):
            assert said["role"] == "assistant" or said["content"] in prompts
    assert prompts.count("<|assistant|>\n") == sum(answers(r).count("<|end|>") for r in here)


def encode_parts(tokenizer, parts):
    """(ids, weights, bytes of what is learned) of a conversation of these parts."""
    encoder = Encoder(Prepare(source="", out="", chat=True))
    encoder.tokenizer = tokenizer
    coded = [*encoder.encode(Document("x", 0, [Chunk(*part) for part in parts]))]
    ids = np.concatenate([ids for ids, *_ in coded])
    weights = np.concatenate([np.full(len(ids), weight) for ids, weight, _ in coded])
    return ids, weights, sum(size for *_, size in coded)


def test_no_token_has_a_part_of_a_prompt_and_of_an_answer():
    prompt, rest = "<|user|>\nx<|end|>\n<|assistant|>\n", "\n\n y"
    ids, weights, text_bytes = encode_parts(TOKENIZER, ((prompt, 0), (rest, 1)))
    asked = TOKENIZER.encode_ordinary(prompt)
    assert ids.tolist() == [*asked, *TOKENIZER.encode_ordinary(rest), 4095]
    assert weights.tolist() == [0] * len(asked) + [1] * (len(ids) - len(asked))
    assert text_bytes == 4
    byte_pairs = tiktoken.Encoding(
        "x",
        pat_str=r"(?s).+",  # one that would merge across
        mergeable_ranks={bytes([b]): b for b in range(256)} | {b"ab": 256},
        special_tokens={END_OF_TEXT: 257},
    )
    ids, weights, _ = encode_parts(byte_pairs, (("a", 0), ("b", 1), ("a", 0)))
    assert (ids.tolist(), weights.tolist()) == ([97, 98, 97, 257], [0, 1, 0, 0])


def test_the_manifest_names_template_weights_and_what_is_learned(folder, source):
    for split in ("train", "val"):
        manifest = read_manifest(folder / split)
        ids, weights = joined(folder / split), joined(folder / split, ".weights")
        learned = TOKENIZER.decode(ids[weights == 1].tolist()).replace(END_OF_TEXT, "")
        assert manifest.text_bytes == len(learned.encode())
        assert manifest.learned_tokens == weights.sum() < manifest.tokens == len(ids)
        assert manifest.template == manifest.settings["template"] == "plain"
        assert f"--source {source} --val-share 0.25 --shard-tokens 997 --chat" in manifest.command
        assert len(manifest.shards) > 1
        for shard in manifest.shards:
            content = (folder / split / shard.weights.name).read_bytes()
            assert shard.weights.name == shard.name.replace(".npy", ".weights.npy")
            assert (shard.weights.tokens, shard.weights.bytes) == (shard.tokens, len(content))
            assert shard.weights.crc32c == f"{google_crc32c.value(content):08x}"


def test_the_index_of_plain_text_has_no_fields_of_weights(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    prepare.main(["--source", str(tmp_path / "a.txt"), "--out", str(tmp_path), "--val-share", "0"])
    index = json.loads((tmp_path / "train" / INDEX).read_text())
    assert index.keys() == {
        *("subset", "tokenizer", "tokenizer_sha256", "vocab_size", "end_of_text", "document_rule"),
        *("dtype", "documents", "tokens", "text_bytes", "shards", "command", "settings"),
    }
    assert index["shards"][0].keys() == {"name", "tokens", "bytes", "crc32c"}
    assert index["settings"]["template"] is None


def test_a_preparation_with_another_template_or_a_lost_file_is_noticed(
    source, folder, tmp_path, monkeypatch, capsys
):
    out, flags = tmp_path / "out", ("--val-share", 0)
    run(source, out, *flags)
    capsys.readouterr()
    run(source, out, *flags)
    assert "is already prepared" in capsys.readouterr().out
    (out / "train" / "shard_00000_000.weights.npy").unlink()
    run(source, out, *flags)
    assert "prepared in" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"made with another chat_template.*--overwrite"):
        monkeypatch.setattr(chat, "template_of", lambda *_: chat.Template("other", chat.plain))
        run(source, out, *flags, "--chat-template", "tokenizer")


# Batches


def test_a_batch_has_the_weights_of_its_targets(folder):
    ids, weights = joined(folder / "train"), joined(folder / "train", ".weights")
    data = alone(folder / "train", 32, batch_size=8, seed=5)
    starts = {tuple(ids[i * 32 :][:32]): i * 32 for i in range(data.windows)}
    for step in (3, 0, 9):
        found = data.rows(step, np.arange(8))
        again = alone(folder / "train", 32, batch_size=8, seed=5).rows(step, np.array([6, 1]))
        assert found["loss_weights"].dtype == np.float32
        np.testing.assert_array_equal(again["loss_weights"], found["loss_weights"][[6, 1]])
        for row, targets, own in zip(
            found["tokens"], found["targets"], found["loss_weights"], strict=True
        ):
            at = starts[tuple(row)] + 1
            np.testing.assert_array_equal(targets, ids[at : at + 32])
            np.testing.assert_array_equal(own, weights[at : at + 32])


def copied(folder, tmp_path):
    for path in (folder / "train").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def lose(path):
    path.unlink()


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("harm", "what"), [(lose, "missing"), (shorten, "trunc")])
def test_damaged_files_of_weights_are_refused_by_name(folder, tmp_path, harm, what):
    here = copied(folder, tmp_path)
    harm(here / "shard_00000_001.weights.npy")
    with pytest.raises(ValueError, match=rf"shard_00000_001.weights.npy is {what}.*--chat --out"):
        data = Dataset(here, 32)
        data.eval_rows(np.arange(data.windows), data.windows)


@pytest.mark.parametrize("fault", ["one without", "other length"])
def test_an_index_with_weights_of_some_tokens_is_refused(folder, tmp_path, fault):
    here = copied(folder, tmp_path)
    index = json.loads((here / INDEX).read_text())
    if fault == "one without":
        del index["shards"][1]["weights"]
    else:
        index["shards"][1]["weights"]["tokens"] -= 1
    (here / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="loss weights do not cover all tokens"):
        Dataset(here, 32)


def test_other_weights_are_other_data(folder):
    manifest = read_manifest(folder / "train")
    bare = [dataclasses.replace(shard, weights=None) for shard in manifest.shards]
    assert dataclasses.replace(manifest, shards=bare).identity != manifest.identity


def test_evaluation_windows_without_an_answer_are_refused(tmp_path):
    long = {"prompt": "a b c d " * 400, "answer": "e"}
    source = write(tmp_path / "chat.jsonl", [long])
    run(source, tmp_path, "--val-share", 1)
    flags = ["--data.val", str(tmp_path / "val"), "--train.seq_len", "32"]
    with pytest.raises(ValueError, match=r"hold prompts alone, .*more of its \d+ windows"):
        dataset.open_validation(cli.parse([*flags, "--eval.sequences", "16"]))


def padded(folder, names):
    """The tokens and weights of conversations, each padded to 64 tokens by ends of text."""
    ids, weights = (np.concatenate([joined(folder / n, kind) for n in names]) for kind in KINDS)
    ends = np.flatnonzero(ids == TOKENIZER.eot_token)[:-1] + 1
    for one, counted in zip(np.split(ids, ends), np.split(weights, ends), strict=True):
        pad = (0, -len(one) % 64)
        yield np.pad(one, pad, constant_values=TOKENIZER.eot_token), np.pad(counted, pad)


KINDS = "", ".weights"


@pytest.mark.parametrize("subsets", [["train"], ["val"], ["train", "val"]])
def test_with_row_tokens_each_row_is_one_conversation(subsets, source, tmp_path):
    """Documents are divided by their hash, or for a small share by the position of their rows."""
    share = 0.02 if len(subsets) == 2 else 0.25
    flags = "--val-share", share, "--shard-tokens", 997
    run(source, tmp_path / "packed", *flags)
    run(source, tmp_path / "rows", *flags, "--row-tokens", 64)
    expected = [
        np.concatenate(part) for part in zip(*padded(tmp_path / "packed", subsets), strict=True)
    ]
    batches = [Dataset(tmp_path / "rows" / name, 64) for name in subsets]
    batches = [data.batch(np.arange(data.windows)) for data in batches]
    found = {name: np.concatenate([b[name].reshape(-1) for b in batches]) for name in batches[0]}
    np.testing.assert_array_equal(found["tokens"], expected[0])
    np.testing.assert_array_equal(found["loss_weights"], [*expected[1][1:], 0])
    learned = [read_manifest(tmp_path / "rows" / name).learned_tokens for name in subsets]
    assert sum(learned) == expected[1].sum()
    with pytest.raises(ValueError, match=r"with --row-tokens 64, .*Use --train.seq_len 64"):
        Dataset(tmp_path / "rows" / subsets[0], 96)


def test_row_tokens_are_of_conversations(source, tmp_path):
    with pytest.raises(ValueError, match=r"--row-tokens pads conversations. Add --chat"):
        prepare.main(["--source", str(source), "--out", str(tmp_path), "--row-tokens", "64"])


@pytest.mark.slow
def test_fifty_short_conversations_are_tuned_on(whole, runs, tmp_path):
    """The commands that the messages name, one after the other."""
    source = write(tmp_path / "chat.jsonl", [{"prompt": f"{n}?", "answer": "1"} for n in range(50)])
    run(source, tmp_path / "packed")
    flags = [f"--data.{name}={tmp_path}/packed/{name}" for name in ("train", "val")]
    with pytest.raises(ValueError, match=r"longer than the data.* --row-tokens 128, which pads"):
        dataset.open_validation(cli.parse([*flags, "--train.seq_len", "128"]))
    run(source, tmp_path / "rows", "--row-tokens", 32)
    flags = [flag.replace("packed", "rows") for flag in flags]
    with pytest.raises(
        ValueError, match=r"more than the (\d) windows.*Use --eval.sequences (\1) or"
    ):
        dataset.open_validation(cli.parse([*flags, "--train.seq_len", "32"]))
    extra = f"--run.init_from {whole} --train.steps 2 --eval.sequences 2 --sample.prompts"
    steps = jsonl.read(start(flags, runs, "fifty", *extra.split()) / "metrics.jsonl")
    assert steps[-1]["loss/val"] < steps[0]["loss/val"]
    none = start(flags[:1], runs, "unseen", *extra.replace("sequences 2", "sequences 0").split())
    assert not any("loss/val" in record for record in jsonl.read(none / "metrics.jsonl"))
    assert not list((none / "plots").glob("*val*"))


# What is learned


@pytest.fixture(scope="module")
def flags(folder):
    return ["--data.train", str(folder / "train"), "--data.val", str(folder / "val")]


def mean_over_answers(tree, batch, config, folder):
    """Of the reference's losses of single tokens, by the weights as the files have them."""
    ids, weights = joined(folder), joined(folder, ".weights")
    every = range(0, len(ids) - 32, 32)
    starts = {tuple(ids[i : i + 32]): i + 1 for i in every}
    counted = np.stack([weights[starts[tuple(row)] :][:32] for row in batch["tokens"]]) == 1
    assert 0.2 < counted.mean() < 0.8
    alone = jax.jit(lambda tree, tokens: reference.logits(tree, tokens, config.model))
    logits = np.asarray(alone(tree, batch["tokens"]), np.float64)
    top = logits.max(-1)
    log_z = np.log(np.exp(logits - top[..., None]).sum(-1)) + top
    losses = log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return losses[counted].mean()


def test_a_checkpoint_records_the_template_of_its_data(flags):
    config = cli.parse([*flags, "--train.seq_len", "32"])
    tokens = dataset.open_training(config).stored()["tokens"]
    assert tokens["chat_template"] == chat.PLAIN


def test_validation_is_the_mean_over_answers_and_its_bits_are_per_byte_of_them(
    whole, folder, flags, capsys
):
    capsys.readouterr()
    validate.main(["--run", str(whole), "--json", *flags[2:]])
    found = json.loads(capsys.readouterr().out)
    config = cli.load(whole / "config.toml")
    shapes = train.abstract_state(config, model.declare(config), train.make_mesh(config)).weights
    tree = canonical(config, checkpoint.load_weights(run_directory.at(whole), 6, shapes)[1])
    batch = Dataset(folder / "val", 32).eval_rows(np.arange(16), 16)
    expected = mean_over_answers(tree, batch, config, folder / "val")
    assert found["loss/val"] == pytest.approx(expected, rel=2e-5)
    ids, weights = joined(folder / "val"), joined(folder / "val", ".weights")
    text = TOKENIZER.decode(ids[weights == 1].tolist()).replace(END_OF_TEXT, "")
    bits = found["loss/val"] / math.log(2) * weights.sum() / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


@pytest.mark.slow
def test_a_run_trains_on_the_mean_over_answers(flags, folder, runs):
    extra = "--train.steps 1 --checkpoint.every_steps 0 --sample.prompts"
    run_folder = start(flags, runs, "answers", *extra.split())
    [_, first, evaluation] = jsonl.read(run_folder / "metrics.jsonl")
    config = cli.load(run_folder / "config.toml")
    state = main.start_state(config, model.declare(config), train.make_mesh(config), None)
    batch = alone(folder / "train", 32, batch_size=8).rows(0, np.arange(8))
    tree = canonical(config, state.weights)
    expected = mean_over_answers(tree, batch, config, folder / "train")
    assert first["loss/cross_entropy"] == pytest.approx(expected, rel=2e-5)
    assert first["tokens"] == 8 * 32 and math.isfinite(evaluation["loss/val"])


# The tokenizer's own template


CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{ '<|head|>' + m['role'] + '<|tail|>\\n\\n' + m['content'] | trim + '<|eot|>' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{% endif %}"""
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|tail|>", "<|eot|>", "<|bos|>"]
TALK = [
    ("system", "Be brief."),
    ("user", "What does <|im_end|> mean? <|eot|>"),
    ("assistant", "It ends a <|im_end|> turn."),
    ("user", "And\n"),
    ("assistant", "More."),
]


@pytest.fixture
def talker(tmp_path):
    """A folder of a tokenizer with special tokens; the template is a test's own."""
    from tokenizers import AddedToken, Tokenizer

    folder = tmp_path / "talker"
    write_hugging_face(TOKENIZER, folder, 128)
    table = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    table.save(str(folder / "tokenizer.json"))

    def made(template, **settings):
        encoder_of.cache_clear()  # it has the template of before
        path = folder / "tokenizer_config.json"
        found = json.loads(path.read_text()) | {"chat_template": template, **settings}
        found["split_special_tokens"] = False  # as models of others have it
        path.write_text(json.dumps(found))
        return folder

    return made


def talk(tmp_path, folder, messages):
    source = write(tmp_path / "talk.jsonl", [{"messages": [says(*m) for m in messages]}])
    flags = ["--chat-template", "tokenizer", "--tokenizer", folder, "--val-share", 0]
    run(source, tmp_path / "out", *flags, "--overwrite")
    train_folder = tmp_path / "out" / "train"
    return joined(train_folder), joined(train_folder, ".weights"), load_tokenizer(str(folder))


SEVENTH = CHATML.replace("m.content", "m.content + ('<|eot|>' if loop.index == 7 else '')")


def test_ids_that_no_document_has_need_no_embedding(tmp_path, talker):
    """Of six special tokens beyond the table, CHATML has the first two."""
    source = write(tmp_path / "chat.jsonl", [{"prompt": "<|head|>", "answer": "<|eot|>"}] * 9)
    for n, (template, ids) in enumerate({"plain": 4096, CHATML: 4098, LLAMA3: 4102}.items()):
        flags = ["--chat-template", "plain" if template == "plain" else "tokenizer"]
        folder = talker(template, bos_token="<|bos|>")
        run(source, tmp_path / str(n), "--tokenizer", folder, *flags, "--val-share", 0)
        manifest = read_manifest(tmp_path / str(n) / "train")
        assert joined(tmp_path / str(n) / "train").max() < manifest.vocab_size == ids
        Dataset(tmp_path / str(n) / "train", 32, vocab_size=ids)
        with pytest.raises(ValueError, match=f"token ids up to {ids - 1} "):
            Dataset(tmp_path / str(n) / "train", 32, vocab_size=ids - 1)
    with pytest.raises(ValueError, match=r"writes <\|eot\|> in a conversation, and not in"):
        talk(tmp_path, talker(SEVENTH), [("user", "a"), ("assistant", "b")] * 4)


def exported_template(tokenizer, out, template=None):
    write_hugging_face(tokenizer, out, 128, template)
    return json.loads((out / "tokenizer_config.json").read_text()).get("chat_template")


def test_a_model_is_exported_with_the_template_it_was_tuned_with(tmp_path, talker):
    tokenizer = load_tokenizer(str(talker(CHATML)))
    assert exported_template(tokenizer, tmp_path / "untuned") == CHATML
    assert exported_template(tokenizer, tmp_path / "tuned", LLAMA3) == LLAMA3
    assert exported_template(tokenizer, tmp_path / "plain", chat.PLAIN) == chat.PLAIN_JINJA
    assert exported_template(TOKENIZER, tmp_path / "sample") is None
    found = json.loads((tmp_path / "talker" / "tokenizer_config.json").read_text())
    del found["chat_template"]
    (tmp_path / "talker" / "tokenizer_config.json").write_text(json.dumps(found))
    (tmp_path / "talker" / "chat_template.jinja").write_text(LLAMA3)
    tokenizer = load_tokenizer(str(tmp_path / "talker"))
    assert exported_template(tokenizer, tmp_path / "of a file") == LLAMA3


def test_the_plain_template_writes_the_same_text_for_hugging_face():
    messages = [{"role": role, "content": content} for role, content in TALK]
    render = chat.compile_template(chat.PLAIN_JINJA).render
    whole = "".join(chunk.text for chunk in chat.plain(TALK))
    assert render(messages=messages) == whole
    prompt = render(messages=messages, add_generation_prompt=True)
    assert prompt == whole + "\n<|assistant|>\n"
    longer = "".join(chunk.text for chunk in chat.plain([*TALK, ("assistant", "Yes.")]))
    assert longer == prompt + "Yes.<|end|>"


@pytest.mark.huggingface
@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_ids_are_those_of_transformers_but_what_looks_special_in_a_message(
    tmp_path, talker, template
):
    from transformers import AutoTokenizer

    folder = talker(template, bos_token="<|bos|>", eos_token="<|endoftext|>")
    plain = [(role, re.sub(r"<\|\w+\|>", "marks", content)) for role, content in TALK]
    ids, weights, tokenizer = talk(tmp_path, folder, plain)
    theirs = AutoTokenizer.from_pretrained(folder)
    given = [{"role": role, "content": content} for role, content in plain]
    expected = theirs.apply_chat_template(given, return_dict=False)
    text = theirs.apply_chat_template(given, tokenize=False)
    assert tokenizer.decode(ids[:-1].tolist()) == text
    assert ids[:-1].tolist() == list(expected) and ids[-1] == tokenizer.eot_token
    learned = tokenizer.decode(ids[:-1][weights[:-1] == 1].tolist())
    assert all(content.strip() in learned for role, content in plain if role == "assistant")
    assert not any(content.strip() in learned for role, content in plain if role != "assistant")


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.huggingface
@pytest.mark.parametrize("scheme", ["segment", "first", "always"])
def test_ids_of_sentencepiece_are_those_of_transformers(tmp_path, scheme):
    from transformers import AutoTokenizer

    write_sentencepiece(tmp_path / "pieces", scheme, chat_template=MISTRAL)
    plain = [("user", "one  é"), ("assistant", "two"), ("user", " three"), ("assistant", "4\n")]
    ids, weights, tokenizer = talk(tmp_path, tmp_path / "pieces", plain)
    given = [{"role": role, "content": content} for role, content in plain]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "pieces")
    expected = theirs.apply_chat_template(given, return_dict=False)
    assert ids[:-1].tolist() == list(expected) and ids[-1] == tokenizer.eot_token
    learned = b"".join(token_bytes(tokenizer, i) for i in ids[:-1][weights[:-1] == 1].tolist())
    assert learned.decode() == " two</s> 4\n</s>"


def test_a_template_with_the_generation_tag_of_transformers_is_accepted(tmp_path, talker):
    said = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    marked = "{%- generation -%}\n" + said + "{%- endgeneration -%}"
    assert said in CHATML
    found = []
    for template in (CHATML, CHATML.replace(said, marked)):
        ids, weights, _ = talk(tmp_path, talker(template), TALK)
        found.append((ids.tolist(), weights.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_text_of_a_message_never_becomes_a_special_token(tmp_path, talker, template):
    folder = talker(template, bos_token="<|bos|>", eos_token="<|endoftext|>")
    ids, weights, tokenizer = talk(tmp_path, folder, TALK)
    chatml = template == CHATML
    ends = tokenizer.special.ids["<|im_end|>" if chatml else "<|eot|>"]
    assert (ids == ends).sum() == len(TALK)
    text = tokenizer.decode(ids[:-1].tolist())
    assert text.count("<|im_end|>") == (len(TALK) if chatml else 0) + 2
    answers = ["It ends a <|im_end|> turn.", "More."]
    tail = "<|im_end|>\n" if chatml else "<|eot|>\n"
    learned = tokenizer.decode(ids[:-1][weights[:-1] == 1].tolist())
    assert learned == "".join(answer + tail for answer in answers)
    assert (ids == tokenizer.special.ids["<|bos|>"]).sum() == (not chatml)
    assert read_manifest(tmp_path / "out" / "train").template == template


def test_a_template_needs_no_special_tokens_and_always_has_add_generation_prompt():
    text = "{% for m in messages %}{{ m.content }}.{% endfor %}"
    text += "{{ '' if add_generation_prompt is defined else '!' }}"
    found = chat.render(Special({}, {}, None, False, text, []), [("user", "a"), ("assistant", "b")])
    assert found == [Chunk("a.", 0), Chunk("b.", 1)]


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not keep messages"),
        (
            "{% for m in messages %}{{ m.content if loop.last else '' }}.{% endfor %}",
            "changes earlier turns",
        ),
        (
            "{% for m in messages %}<{{ m.content }}>{% endfor %}"
            "{% if add_generation_prompt %}<think>{% endif %}",
            "ends a prompt with .*<think>.*, and an answer does not begin so",
        ),
        ("{{ raise_exception('roles must alternate') }}", "refuses .*roles must alternate"),
        ("{% nonsense %}", "refuses .*nonsense"),
        ("{{ 1 + '1' }}", "refuses .*unsupported operand"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "refuses the conversation"),
    ],
)
def test_a_template_whose_answers_cannot_be_located_is_refused(tmp_path, talker, template, pattern):
    with pytest.raises(ValueError, match=rf"talk.jsonl:1: the chat template {pattern}"):
        talk(tmp_path, talker(template), TALK)


def test_a_tokenizer_without_a_template_is_refused(tmp_path, source):
    with pytest.raises(ValueError, match="needs a tokenizer with a chat_template"):
        run(source, tmp_path / "out", "--chat-template", "tokenizer")


def test_rows_of_sharegpt_are_conversations(tmp_path):
    turn = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    shared = [{"from": "system", "value": "s"}, *turn, *turn]
    same = [says("system", "s"), *[says("user", "a"), says("assistant", "b")] * 2]
    for name, row in (("one", {"conversations": shared}), ("two", {"messages": same})):
        run(write(tmp_path / "chat.json", [row]), tmp_path / name, "--val-share", 0)
    one, two = (joined(tmp_path / name / "train").tolist() for name in ("one", "two"))
    assert one == two
    row = {"conversations": [{"from": "tool", "value": "x"}, *turn]}
    with pytest.raises(ValueError, match=r"chat.json:1: a message has the role 'tool'"):
        run(write(tmp_path / "chat.json", [row]), tmp_path / "three")


# What is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "id": 1}, r"has the fields text, id; expected \{\"messages\""),
        ({}, "has the fields none"),
        (["a"], "it has list"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"it has from \(list\)"),
        ({"messages": "a"}, "it is not a conversation: it has the fields messages"),
        ({"prompt": "a"}, "it has the fields prompt"),
        ({"prompt": 1, "answer": "a"}, r"it has role \(str\), content \(int\)"),
        ({"messages": ["a"]}, "no role and content that are text; it has str"),
        ({"messages": [{"role": "user"}]}, r"it has role \(str\)"),
        ({"messages": [says("assistant", None)]}, r"content \(NoneType\)"),
        ({"messages": [says("human", "a")]}, "role 'human': expected one of system, user, assist"),
        ({"messages": [says("user", "a"), says("assistant", " \n")]}, "an answer is empty"),
        ({"prompt": "a", "completion": ""}, "an answer is empty"),
        ({"messages": [says("user", "a")]}, r"no message has the role assistant \(roles: user\)"),
        ({"messages": []}, r"\(roles: none\)"),
        ({"prompt": "a<|end|>", "answer": "b"}, r"a message of the role user has <\|end\|>"),
        ({"prompt": "a", "answer": "<|user|>"}, r"of the role assistant has <\|user\|>"),
    ],
)
def test_a_line_that_is_not_a_conversation_is_refused_by_file_and_line(tmp_path, row, message):
    source = write(tmp_path / "chat.jsonl", [{"prompt": "a", "answer": "b"}, row])
    with pytest.raises(ValueError) as refused:
        run(source, tmp_path / "out")
    assert str(refused.value).startswith(f"{source}:2: ")
    assert re.search(message, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "out").rglob(INDEX))


def test_a_source_of_text_is_refused_and_text_beside_rows_is_left_out(tmp_path, capsys):
    write(tmp_path / "chat.jsonl", rows())
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(ValueError, match=r"notes.txt.* Use --source chat.jsonl, or --glob"):
        run(tmp_path / "notes.txt", tmp_path / "out")
    with pytest.raises(ValueError, match=r"--chat reads conversations, .*py"):
        run("python-stdlib", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(tmp_path, tmp_path / "out")
    assert "1 files are left out, as they are plain text" in capsys.readouterr().out


def test_rows_of_a_hugging_face_dataset_may_be_conversations(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    write(folder / "train.jsonl", [{"messages": [says("user", "a"), says("assistant", "b")]}] * 3)
    run(f"hf:{folder}", tmp_path / "out", "--val-share", 0)
    ids, weights = (joined(tmp_path / "out" / "train", kind) for kind in ("", ".weights"))
    assert TOKENIZER.decode(ids[weights == 1].tolist()) == ("b<|end|>" + END_OF_TEXT) * 3
