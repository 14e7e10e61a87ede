"""Conversations to tokens and loss weights, by value."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from tokenizers import AddedToken, Tokenizer

import dataset
import generate
import validate
from data import chat, verify
from data.encode import Encoder, encoder_of, resize
from data.hf_tokenizer import Special
from data.manifest import INDEX, read_manifest
from data.readers import Chunk, Document
from data.settings import Prepare, in_validation
from data.tokenizer import NO_SPECIAL, load_tokenizer, text_of
from dataset import Dataset
from hf.tokenizer_export import write_hugging_face
from prepared import prepare
from prepared import tokens_of as joined
from runtime import cli
from test_dataset import alone

TOKENIZER = load_tokenizer("sample")
END_OF_TEXT = "<|endoftext|>"
WEIGHTS = ".weights"


def says(role, content):
    return {"role": role, "content": content}


def rows():
    """160 conversations: of one and two turns, some with a system or ending with a question."""
    two, more = [says("user", ""), says("assistant", "!")], [says("user", "And then?")]
    for n in range(0, 160, 4):
        name = "answer" if n % 8 else "completion"
        asked = [says("user", f"What is {n} + {3 * n}?\n"), says("assistant", f" {4 * n}, é.\n\n")]
        yield {"messages": asked, "id": n}
        yield {"messages": [says("system", "Be brief."), *asked, *two]}
        yield {"messages": asked + more}
        yield {"prompt": f"Count to {n}", name: " ".join(map(str, range(n % 9 + 1)))}


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
    prepare(source, out, "--chat", *flags)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source") / "chat.jsonl", rows())


@pytest.fixture(scope="module")
def folder(source):
    """OUT, in shards that end in the middle of a conversation."""
    run(source, source.parent / "chat", "--val-share", 0.25, "--shard-tokens", 997)
    return source.parent / "chat"


def learned_text(folder, tokenizer=TOKENIZER):
    ids, weights = joined(folder), joined(folder, WEIGHTS)
    return tokenizer.decode(ids[weights == 1].tolist())


@pytest.mark.parametrize("split", ["train", "val"])
def test_what_has_weight_1_is_the_answers_and_their_ends_and_nothing_else(folder, split):
    lengths = [len(json.dumps(row)) + 1 for row in rows()]
    positions = itertools.accumulate(lengths, initial=0)
    is_val = [in_validation("chat.jsonl", position, 0.25) for position in positions]
    here = [row for row, val in zip(rows(), is_val, strict=False) if val == (split == "val")]
    ids, weights = joined(folder / split), joined(folder / split, WEIGHTS)
    assert weights.shape == ids.shape and set(weights) == {0, 1}
    assert learned_text(folder / split) == "".join(map(answers, here))
    prompts = TOKENIZER.decode(ids[weights == 0].tolist())
    for said in itertools.chain(*(row.get("messages", ()) for row in here)):
        assert said["role"] == "assistant" or said["content"] in prompts
    assert prompts.count("<|assistant|>\n") == sum(answers(r).count("<|end|>") for r in here)


def test_no_token_has_a_part_of_a_prompt_and_of_an_answer():
    encoder = Encoder(Prepare(source="", out="", chat=True))
    table = {bytes([b]): b for b in range(256)} | {b"ab": 256}
    merges_across = {"pat_str": r"(?s).+", "special_tokens": {END_OF_TEXT: 257}}
    encoder.tokenizer = tiktoken.Encoding("x", mergeable_ranks=table, **merges_across)
    parts = [Chunk("ab", 0), Chunk("a", 0), Chunk("b\n", 1), Chunk("a", 0)]
    coded = [*encoder.encode(Document("x", 0, parts))]
    expected = [([256, 97], 0), ([98, 10], 1), ([97], 0), ([257], 0)]
    assert [(ids.tolist(), weight) for ids, weight, _ in coded] == expected
    assert sum(size for *_, size in coded) == 2  # bytes of what is learned


def test_the_manifest_names_template_weights_and_what_is_learned(folder, source):
    for split in ("train", "val"):
        manifest, weights = read_manifest(folder / split), joined(folder / split, WEIGHTS)
        text = learned_text(folder / split).replace(END_OF_TEXT, "")
        assert manifest.text_bytes == len(text.encode())
        assert manifest.learned_tokens == weights.sum() < manifest.tokens == len(weights)
        assert manifest.template == manifest.settings["template"] == "plain"
        assert f"--source {source} --val-share 0.25 --shard-tokens 997 --chat" in manifest.command
        assert len(manifest.shards) > 1
        for shard in manifest.shards:
            assert shard.weights.name == shard.name.replace(".npy", ".weights.npy")
    verify.main(["--folder", str(folder)])
    bare = [dataclasses.replace(shard, weights=None) for shard in manifest.shards]
    assert dataclasses.replace(manifest, shards=bare).identity != manifest.identity
    # Bits per byte are of the text whose tokens have a loss.
    data = SimpleNamespace(shares=[1.0], parts={"": SimpleNamespace(manifest=manifest)})
    found = validate.with_perplexity({"loss/val": 2.0}, data)
    bits = 2 / math.log(2) * manifest.learned_tokens / manifest.text_bytes
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    stored = alone(folder / "train", 32).stored()  # in a checkpoint
    assert stored["tokens"]["chat_template"] == chat.PLAIN


def test_a_preparation_with_another_template_or_a_lost_file_is_noticed(
    source, tmp_path, monkeypatch, capsys
):
    out, flags = tmp_path / "out", ("--val-share", 0)
    run(source, out, *flags)
    (out / "train" / "shard_00000_000.weights.npy").unlink()
    capsys.readouterr()
    for said in ("prepared in", "is already prepared"):
        run(source, out, *flags)
        assert said in capsys.readouterr().out
    monkeypatch.setattr(chat, "template_of", lambda *_: chat.Template("other", NO_SPECIAL))
    with pytest.raises(ValueError, match=r"made with another chat_template.*--overwrite"):
        run(source, out, *flags, "--chat-template", "tokenizer")


def test_a_batch_has_the_weights_of_its_targets(folder):
    ids, weights = joined(folder / "train"), joined(folder / "train", WEIGHTS)
    data = alone(folder / "train", 32, batch_size=8, seed=5)
    for step in (3, 0, 9):
        windows, found = data.windows_of(step, np.arange(8)), data.rows(step, np.arange(8))
        at = 32 * windows[:, None] + 1 + np.arange(32)
        np.testing.assert_array_equal(found["targets"], ids[at])
        np.testing.assert_array_equal(found["loss_weights"], weights[at])


def test_damaged_files_of_weights_are_refused_by_name(folder, tmp_path):
    shutil.copytree(folder / "train", tmp_path, dirs_exist_ok=True)
    (tmp_path / "shard_00000_001.weights.npy").unlink()
    with pytest.raises(ValueError, match=r"_001.weights.npy is missing.*--chat --out"):
        Dataset(tmp_path, 32)
    content = json.loads((tmp_path / INDEX).read_text())
    content["shards"][1]["weights"]["tokens"] -= 1
    for _ in range(2):  # weights of another length, and none
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(ValueError, match="do not cover all tokens"):
            Dataset(tmp_path, 32)
        content["shards"][1].pop("weights", None)


def test_evaluation_windows_without_an_answer_are_refused(tmp_path):
    source = write(tmp_path / "chat.jsonl", [{"prompt": "a b c d " * 400, "answer": "e"}])
    run(source, tmp_path, "--val-share", 1)
    flags = ["--data.val", str(tmp_path / "val"), "--train.seq_len", "32"]
    with pytest.raises(ValueError, match=r"hold prompts alone, .*more of its \d+ windows"):
        dataset.open_validation(cli.parse([*flags, "--eval.sequences", "16"]))


def padded(folder, names):
    """The tokens and weights of conversations, each padded to 64 tokens by ends of text."""
    ids, weights = (np.concatenate([joined(folder / n, k) for n in names]) for k in ("", WEIGHTS))
    ends = np.flatnonzero(ids == TOKENIZER.eot_token)[:-1] + 1
    for one, counted in zip(np.split(ids, ends), np.split(weights, ends), strict=True):
        pad = (0, -len(one) % 64)
        yield np.pad(one, pad, constant_values=TOKENIZER.eot_token), np.pad(counted, pad)


@pytest.mark.parametrize(("share", "subsets"), [(0.25, ["train"]), (0.02, ["train", "val"])])
def test_with_row_tokens_each_row_is_one_conversation(share, subsets, source, tmp_path):
    """Documents are divided by their hash, or for a small share by the position of their rows."""
    flags = "--val-share", share, "--shard-tokens", 997
    run(source, tmp_path / "packed", *flags)
    run(source, tmp_path / "rows", *flags, "--row-tokens", 64)
    tokens, weights = map(np.concatenate, zip(*padded(tmp_path / "packed", subsets), strict=True))
    data = [Dataset(tmp_path / "rows" / name, 64) for name in subsets]
    batches = [one.batch(np.arange(one.windows)) for one in data]
    found = {name: np.concatenate([b[name].reshape(-1) for b in batches]) for name in batches[0]}
    np.testing.assert_array_equal(found["tokens"], tokens)
    np.testing.assert_array_equal(found["loss_weights"], [*weights[1:], 0])
    assert sum(one.manifest.learned_tokens for one in data) == weights.sum()
    with pytest.raises(ValueError, match=r"with --row-tokens 64, .*Use --train.seq_len 64"):
        Dataset(tmp_path / "rows" / subsets[0], 96)


CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{ '<|head|>' + m['role'] + '<|tail|>\\n\\n' + m['content'] | trim + '<|eot|>' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{% endif %}"""
# With the tag by which transformers finds answers.
SAID = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
MARKED = CHATML.replace(SAID, "{%- generation -%}\n" + SAID + "{%- endgeneration -%}")
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|tail|>", "<|eot|>", "<|bos|>"]
TALK = [
    ("system", "Be brief.\n"),
    ("user", "What does <|im_end|> mean? <|eot|>"),
    ("assistant", "It ends a <|im_end|> turn."),
    ("user", "<|eot|>"),
    ("assistant", "More."),
]


@pytest.fixture
def talker(tmp_path):
    """A folder of a tokenizer with special tokens; the template is a test's own."""
    folder = tmp_path / "talker"
    write_hugging_face(TOKENIZER, folder, 128)
    table = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    table.save(str(folder / "tokenizer.json"))

    def made(template):
        encoder_of.cache_clear()  # it has the template of before
        path = folder / "tokenizer_config.json"
        found = json.loads(path.read_text()) | {"chat_template": template, "bos_token": "<|bos|>"}
        found["split_special_tokens"] = False  # as models of others have it
        path.write_text(json.dumps(found))
        return folder

    return made


def talk(tmp_path, folder, messages):
    """(ids, weights, tokenizer) of one conversation with the tokenizer's template."""
    source = write(tmp_path / "talk.jsonl", [{"messages": [says(*m) for m in messages]}])
    flags = ["--chat-template", "tokenizer", "--tokenizer", folder, "--val-share", 0]
    run(source, tmp_path / "out", *flags, "--overwrite")
    train = tmp_path / "out" / "train"
    return joined(train), joined(train, WEIGHTS), load_tokenizer(str(folder))


def test_ids_that_no_document_has_need_no_embedding(tmp_path, talker):
    """Only the template of a tokenizer may write its six special tokens beyond the table."""
    source = write(tmp_path / "chat.jsonl", [{"prompt": "<|head|>", "answer": "<|eot|>"}] * 9)
    for template, more in (("plain", 0), (LLAMA3, 6)):
        named = ["--chat-template", "plain" if template == "plain" else "tokenizer"]
        out, ids = tmp_path / str(more), TOKENIZER.n_vocab + more
        run(source, out, "--tokenizer", talker(template), *named, "--val-share", 0)
        assert joined(out / "train").max() < read_manifest(out / "train").vocab_size == ids
        Dataset(out / "train", 32, vocab_size=ids)
        with pytest.raises(ValueError, match=f"token ids up to {ids - 1} "):
            Dataset(out / "train", 32, vocab_size=ids - 1)


def test_a_model_is_exported_with_the_template_it_was_tuned_with(tmp_path, talker):
    tokenizer = load_tokenizer(str(talker(CHATML)))
    (tmp_path / "talker" / "chat_template.jinja").write_text(LLAMA3)
    of_file = load_tokenizer(str(talker(None)))
    for opened, trained, expected in (
        (tokenizer, None, CHATML),
        (tokenizer, LLAMA3, LLAMA3),
        (tokenizer, chat.PLAIN, chat.PLAIN_JINJA),
        (TOKENIZER, None, None),
        (of_file, None, LLAMA3),
    ):
        write_hugging_face(opened, tmp_path / "out", 128, trained)
        config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
        assert config.get("chat_template") == expected


def test_a_prompt_for_the_plain_template_is_the_text_before_an_answer():
    said = [says(role, content) for role, content in TALK]
    render = chat.compile_template(chat.PLAIN_JINJA).render
    whole = "\n".join(f"<|{role}|>\n{content}<|end|>" for role, content in TALK)
    assert render(messages=said) == whole
    assert render(messages=said, add_generation_prompt=True) == whole + "\n<|assistant|>\n"


@pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA3])
def test_text_of_a_message_never_becomes_a_special_token(tmp_path, talker, template):
    ids, weights, tokenizer = talk(tmp_path, talker(template), TALK)
    special, llama = tokenizer.special.ids, template == LLAMA3
    end = "<|eot|>" if llama else "<|im_end|>"
    assert (ids == special[end]).sum() == len(TALK)
    text = text_of(tokenizer, ids[:-1].tolist())
    assert text.count("<|im_end|>") == 2 + (0 if llama else len(TALK))
    learned = text_of(tokenizer, ids[:-1][weights[:-1] == 1].tolist())
    assert learned == f"It ends a <|im_end|> turn.{end}\nMore.{end}\n"
    assert (ids == special["<|bos|>"]).sum() == llama
    assert read_manifest(tmp_path / "out" / "train").template == template


def test_a_template_needs_no_special_tokens_and_the_longest_of_its_own_is_taken():
    text = "{% for m in messages %}<a>{{ m.content }}.{% endfor %}"
    text += "{{ '' if add_generation_prompt is defined else '!' }}"  # it always is
    talk = [("user", "a"), ("assistant", "b")]
    found = chat.render(Special({}, {}, None, False, text, []), talk)
    assert [*resize(found)] == [Chunk("<a>a.", 0), Chunk("<a>b.", 1)]
    found = chat.render(Special({"<a": 0, "<a>": 1}, {}, None, False, text, []), talk)
    expected = [("<a>", 0, True), ("a.", 0, False), ("<a>", 1, True), ("b.", 1, False)]
    assert [*resize(found)] == [Chunk(*fields) for fields in expected]


@pytest.mark.parametrize("template", [chat.PLAIN, CHATML, LLAMA3])
def test_a_prompt_has_the_ids_of_training_and_ends_where_the_answer_begins(
    tmp_path, talker, template
):
    """With marks that are text for plain left out: it refuses them."""
    said = [(role, text.replace("|", "!")) for role, text in TALK]
    folder, own = talker(template), "plain" if template == chat.PLAIN else "tokenizer"
    source = write(tmp_path / "talk.jsonl", [{"messages": [says(*m) for m in said]}])
    run(source, tmp_path / "out", "--chat-template", own, "--tokenizer", folder, "--val-share", 0)
    ids, weights = (joined(tmp_path / "out" / "train", kind).tolist() for kind in ("", WEIGHTS))
    found = chat.template_of_run(template, tokenizer := load_tokenizer(str(folder)))
    encoder = Encoder(Prepare(source="", out="", tokenizer=str(folder)))
    for asked in (2, 4):
        chunks = chat.render(found.special, said[:asked], prompt=True)
        parts = encoder.encode(Document("", 0, chunks, ends=False))
        prompt = [int(i) for part, *_ in parts for i in part]
        assert prompt == ids[: len(prompt)] and weights[len(prompt)] == 1
        assert (sum(weights[: len(prompt)]) > 0) == (asked == 4)
    assert (found.text, tokenizer.special.chat_template) == (template, template)


# As templates of models that reason: earlier messages begin after what they thought.
REASONING = CHATML.replace(
    "m.content", "(m.content if loop.last else m.content.split('</think>')[-1])"
)


def test_a_second_prompt_has_the_first_answer_as_the_template_rewrites_it(talker):
    folder = talker(REASONING)
    encoder = Encoder(Prepare(source="", out="", tokenizer=str(folder)))
    template = chat.template_of_run(None, encoder.tokenizer)
    one = [("user", "a"), ("assistant", "<think>hm</think>b")]
    context = SimpleNamespace(max_length=200)
    talk = generate.Conversation(context, None, encoder, template, 8, [], turns=[one])
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    expected += "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    table = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert talk.prompt("c")[0] == table.encode(expected, add_special_tokens=False).ids
    with pytest.raises(ValueError, match=r"does not keep messages .*Write no names of special"):
        talk.prompt("c<|im_end|>")


def test_the_template_of_a_run_is_that_of_its_data_then_of_its_tokenizer(talker):
    tokenizer = load_tokenizer(str(talker(CHATML)))
    for stored, opened, text in (
        (LLAMA3, tokenizer, LLAMA3),
        (chat.PLAIN, tokenizer, chat.PLAIN),
        (None, tokenizer, CHATML),
        (None, TOKENIZER, chat.PLAIN),
    ):
        found = chat.template_of_run(stored, opened)
        assert found.text == text and bool(found.marks) == (text == chat.PLAIN)
        assert found.special.chat_template == (chat.PLAIN_JINJA if found.marks else text)


LOOP = "{% for m in messages %}"
THINK = LOOP + "<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        (LOOP + "{{ m.content | upper }}{% endfor %}", "does not keep messages"),
        (LOOP + "{{ m.content if loop.last else '' }}.{% endfor %}", "changes earlier turns"),
        (THINK, "changes .*, or ends a prompt with text that an answer does not begin"),
        ("{{ raise_exception('roles must alternate') }}", "refuses .*roles must alternate"),
        ("{% nonsense %}", "refuses .*nonsense"),
        ("{{ 1 + '1' }}", "refuses .*unsupported operand"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "refuses the conversation"),
    ],
)
def test_a_template_whose_answers_cannot_be_located_is_refused(tmp_path, talker, template, pattern):
    with pytest.raises(ValueError, match=rf"talk.jsonl:1: the chat template {pattern}"):
        talk(tmp_path, talker(template), TALK)


def test_rows_of_sharegpt_and_of_a_hugging_face_dataset_are_conversations(tmp_path):
    turn = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    shared = [{"from": "system", "value": "s"}, *turn, *turn]
    same = [says("system", "s"), *[says("user", "a"), says("assistant", "b")] * 2]
    found = []
    for name, row in (("one", {"conversations": shared}), ("two", {"messages": same})):
        out = tmp_path / name
        out.mkdir()
        source = write(out / "train.jsonl", [row])
        run(source if name == "one" else f"hf:{out}", out, "--val-share", 0)
        found.append([joined(out / "train", k).tolist() for k in ("", WEIGHTS)])
    assert found[0] == found[1]
    assert learned_text(out / "train") == "b<|end|>b<|end|>" + END_OF_TEXT


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "id": 1}, r"has the fields text, id; expected \{\"messages\""),
        (["a"], "it has list"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"it has from \(list\)"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "a message has the role 'tool'"),
        ({"messages": "a"}, "it is not a conversation: it has the fields messages"),
        ({"prompt": 1, "answer": "a"}, r"it has role \(str\), content \(int\)"),
        ({"messages": ["a"]}, "no role and content that are text; it has str"),
        ({"messages": [{"role": "user"}]}, r"it has role \(str\)"),
        ({"messages": [says("assistant", None)]}, r"content \(NoneType\)"),
        ({"messages": [says("human", "a")]}, "role 'human': expected one of system, user, assist"),
        ({"messages": [says("user", "a"), says("assistant", " \n")]}, "an answer is empty"),
        ({"messages": [says("user", "a")]}, r"no message has the role assistant \(roles: user\)"),
        ({"prompt": "a<|end|>", "answer": "b"}, r"a message of the role user has <\|end\|>"),
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
    with pytest.raises(ValueError, match="needs a tokenizer with a chat_template"):
        run(tmp_path, tmp_path / "out", "--chat-template", "tokenizer")
    assert not (tmp_path / "out").exists()
    run(tmp_path, tmp_path / "out")
    assert "1 files are left out, as they are plain text" in capsys.readouterr().out
