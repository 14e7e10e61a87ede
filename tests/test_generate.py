"""The generate command on the checkpoint of a trained run."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import generate
import train
import utils
import validate
from data import chat
from data.hf_tokenizer import Special
from data.manifest import read_manifest
from data.tokenizer import load_tokenizer
from inference import sampling
from runtime import cli


@pytest.fixture
def printed(whole, capsys):
    """What generate.py prints for the tiny run."""

    def run(*flags):
        generate.main(["--run", str(whole), *flags])
        return capsys.readouterr().out

    return run


def test_a_completion_depends_on_the_seed_and_not_on_the_batch(printed, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("import jax\ndef test_a\nreturn")
    flags = ["--prompts", str(file), "--tokens", "9", "--top_k", "50", "--top_p", "0.9"]
    found = printed(*flags, "--seed", "3")
    assert all(line in found for line in file.read_text().splitlines())
    mesh = ["--mesh.pipeline", "2"]  # a batch of 2 of the 3 prompts
    assert printed(*flags, "--seed", "3", "--batch", "2", *mesh) == found
    assert printed(*flags, "--seed", "4") != found


def test_the_command_holds_a_conversation(printed, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import jax\ndef test\n\n"))
    found = printed("--interactive", "--temperature", "0", "--tokens", "5")
    assert len(found) > 10 and found.count("\n") >= 2  # of two answers, of five tokens each


def test_a_conversation_begins_once_and_ends_when_the_context_is_full(monkeypatch, capsys):
    """With a tokenizer that puts a space before a text, as SentencePiece does."""
    space, texts = SimpleNamespace(encode_ordinary=lambda text: [5, *text.encode()]), []
    monkeypatch.setattr(generate, "encode_continuation", lambda _, text: [*text.encode()])

    class Generator:
        max_length, length = 12, np.zeros(1, int)

        def reset(self, numbers, seed):
            assert (list(numbers), seed) == ([0], 8)

        def generate(self, w, new, tokens):
            texts.append((new, tokens))
            self.length += len(new[0])
            return iter(())

    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\nabcdefgh\nc\n"))
    flags = generate.Flags(run="", interactive=True, seed=8, tokens=6)
    generate.converse(Generator(), None, space, [1], flags)
    assert texts == [([[1, 5, 97, 10]], 6), ([[98, 10]], 5)]
    assert "the context of 12 tokens is full" in capsys.readouterr().err


def test_a_character_of_several_tokens_is_printed_once_it_is_complete(capsys):
    printer, found = generate.Printer(tokenizer := load_tokenizer("sample")), []
    printer.begin("")
    for byte in (b"\xe2", b"\x82", b"\xac", b"\xe2", b"a"):
        printer.show([tokenizer.encode_single_token(byte)])
        found.append(capsys.readouterr().out)
    assert found == ["", "", "\u20ac", "", "\ufffda"]


def test_text_that_ends_an_answer_is_not_printed_where_its_tokens_are_split(capsys):
    tokenizer, printer = load_tokenizer("sample"), None
    for said, shown in (
        ("4<|end|> more", ["4", "", "", "", "", "", "", ""]),
        ("<|<|end", ["", "", "<|", "", "", "", "", "<|end"]),
    ):
        printer = generate.Printer(tokenizer, "<|end|>")
        rows = ([i] for i in map(tokenizer.encode_single_token, map(bytes, zip(said.encode()))))
        new = printer.stream(map(np.array, rows), [""])
        assert len(new) == min(len(said), 8)
        assert capsys.readouterr().out == "".join(shown) + "\n" and printer.text == "".join(shown)


LONG = ["--train.seq_len", "160", "--tokens", "6"]


@pytest.fixture
def conversation(whole, monkeypatch):
    """Start a chat of the tiny run, and return it instead of reading input."""

    def start(*flags):
        with monkeypatch.context() as patch:
            patch.setattr(generate, "talk", lambda *given: chats.append(given))
            generate.main(["--run", str(whole), "--chat", "--temperature", "0", *flags])
        return chats[-1][0]

    chats = []
    return start


def appended(talk, text):
    """The answer to a text, and how many tokens of its prompt were appended to the cache."""
    counts, run = [], talk.generator.generate
    talk.generator.generate = lambda w, texts, n: counts.append(len(texts[0])) or run(w, texts, n)
    talk.answer(text)
    talk.generator.generate = run
    return talk.turns[-1][-1][1], counts[0]


def test_a_chat_appends_to_the_cache_only_what_is_new(conversation, capsys):
    talk, fresh = conversation(*LONG), conversation(*LONG)
    first = appended(talk, "import jax")
    assert first == appended(fresh, "import jax") and "dropped" not in capsys.readouterr().err
    rewind = fresh.generator.rewind
    fresh.generator.rewind = lambda _: rewind(0)  # as if a ring had none of it any more
    (said, few), (same, many) = appended(talk, "def test"), appended(fresh, "def test")
    assert said == same and few < many - 10 and talk.turns == fresh.turns
    talk.turns, fresh.turns, fresh.cached = [], [], []  # the cache has more than what is shared
    assert appended(talk, "other")[0] == appended(fresh, "other")[0]
    assert talk.generator.length[0] == fresh.generator.length[0]


# Earlier answers lose their first character.
SHORTENED = """{% for m in messages %}[{{ m.role }}]
{%- if m.role == 'user' or loop.last %}{{ m.content }}{% else %}{{ m.content[1:] }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def test_a_chat_appends_what_follows_an_answer_that_the_template_rewrites(
    conversation, monkeypatch
):
    given = chat.Template(SHORTENED, Special({}, {}, None, False, SHORTENED, []))
    monkeypatch.setattr(chat, "template_of_run", lambda stored, tokenizer: given)
    talk, fresh = conversation(*LONG), conversation(*LONG)
    said, _ = appended(talk, "import jax")
    assert said == appended(fresh, "import jax")[0]
    text = talk.encoder.tokenizer.decode(talk.prompt("def test")[0])
    assert text == f"[user]import jax[assistant]{said[1:]}[user]def test[assistant]"
    fresh.cached = []
    (said, few), (same, many) = appended(talk, "def test"), appended(fresh, "def test")
    assert said == same and few < many


def test_a_chat_drops_its_oldest_turns_where_the_context_is_full(conversation, capsys):
    talk = conversation(*LONG, "--system", "Be brief.")
    messages = [f"message {n}" for n in range(8)]
    for message in messages:
        talk.answer(message)
    assert "the context is full: dropped 1 of the oldest turns" in capsys.readouterr().err
    assert 0 < len(talk.turns) < 8
    assert [turn[0][1] for turn in talk.turns] == messages[-len(talk.turns) :]
    ids, _ = talk.prompt("one more")
    text = talk.encoder.tokenizer.decode(ids)
    assert text.startswith("<|system|>\nBe brief.<|end|>\n<|user|>\nmessage")
    assert text.endswith("<|user|>\none more<|end|>\n<|assistant|>\n") and len(ids) <= 154


def test_a_chat_without_a_template_uses_plain_until_an_empty_line_or_the_end(
    whole, monkeypatch, capsys
):
    for text, answers in (("hi\n\nnot read\n", 1), ("hi\nyou\n", 2), ("hi<|end|>\na\n", 1)):
        monkeypatch.setattr("sys.stdin", stdin := io.StringIO(text))
        generate.main(["--run", str(whole), "--chat", *LONG])
        err = capsys.readouterr().err
        assert "1 x cpu, float32\nneither the run nor its tokenizer has a chat template" in err
        assert err.count("tokens: the first after") == answers
        assert ("a message of the role user has <|end|>" in err) == ("<|end|>" in text)
        assert stdin.read() == "not read\n" * ("not" in text)


def test_a_message_or_system_text_longer_than_the_context_is_refused(whole, monkeypatch, capsys):
    long = "def f(x): return x " * 30
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{long}\nhi\n"))
    flags = ["--run", str(whole), "--chat", *LONG]
    generate.main(flags)
    err = capsys.readouterr().err
    assert "the model was trained on 160 (train.seq_len). Write a shorter one" in err
    assert err.count("tokens: the first after") == 1
    with pytest.raises(
        ValueError, match=r"the message has \d+ tokens with the template and the sys"
    ):
        generate.main([*flags, "--system", long])


def test_a_template_with_a_special_end_of_an_answer_ends_at_that_token(conversation, monkeypatch):
    text = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    special = Special({"<end>": 77}, {}, None, adds_bos=False, chat_template=text, ends=[])
    given = chat.Template(text, special)
    monkeypatch.setattr(chat, "template_of_run", lambda stored, tokenizer: given)
    assert conversation(*LONG).generator.ends == [load_tokenizer("sample").eot_token, 77]


def test_a_special_token_in_a_prompt_is_one_only_with_the_flag(printed, monkeypatch):
    texts = []
    monkeypatch.setattr(generate, "complete", lambda *given: texts.append(given[4]))
    printed("--prompt", "a<|endoftext|>")
    printed("--prompt", "a<|endoftext|>", "--special")
    tokenizer = load_tokenizer("sample")
    assert texts[1] == [[*tokenizer.encode_ordinary("a"), tokenizer.eot_token]]
    assert texts[0] == [tokenizer.encode_ordinary("a<|endoftext|>")] != texts[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--chat", "--special"], "--special a prompt"),
        (["--chat", "--interactive"], "give exactly one of"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompts", "absent"], "--prompts absent cannot be read"),
        ([], "give exactly one of --prompt TEXT, --prompts FILE"),
        (["--prompt", "a", "--top_p", "0"], "0.0 is out of range.* above 0 and at most 1, or"),
        (["--prompt", "a", "--tokens", "0"], "--tokens 0 is out of range. Use .* at least 1, or"),
        (["--prompt", "a", "--warmth", "1"], "unknown flag --warmth"),
    ],
)
def test_invalid_flags_and_prompts_are_refused(flags, message, whole):
    with pytest.raises(ValueError, match=message):
        generate.main(["--run", str(whole), *flags])


def test_a_prompt_that_fills_the_context_is_refused():
    generate.check_texts([[1] * 31], ["a"], 32)
    with pytest.raises(ValueError, match="has 32 tokens, and the model was trained on 32"):
        generate.check_texts([[1] * 32], ["a"], 32)


def test_a_token_without_an_embedding_is_refused(whole, tmp_path, capsys):
    """Of 4,096 ids of the tokenizer, the model is said to have 4,000."""
    tokenizer, few = load_tokenizer("sample"), ["--model.vocab_size", "4000"]
    tokens = (tokenizer.decode([i]) for i in range(4000, 4095))
    text = next(text for text in tokens if max(tokenizer.encode_ordinary(text)) >= 4000)
    with pytest.raises(ValueError, match=r"a token of id 40\d\d, and the model .* below 4000"):
        generate.main(["--run", str(whole), *few, "--prompt", text])
    (tmp_path / "asked").write_text(json.dumps({"prompt": "", "choices": [text, "a"], "answer": 0}))
    with pytest.raises(ValueError, match="below 4000"):
        validate.main(["--run", str(whole), *few, "--questions", str(tmp_path / "asked")])
    config = cli.load(whole / "config.toml")
    config = utils.changed(config, {"sample.prompts": (text,), "model.vocab_size": 4000})
    manifest = read_manifest(Path(config.data.train))
    assert sampling.make_sampler(config, train.make_mesh(config), manifest) is None
    assert "no samples: the text has a token of id 40" in capsys.readouterr().out
