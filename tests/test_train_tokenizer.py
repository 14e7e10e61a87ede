"""Tokenizers trained on a source: their files, what they encode, and what is refused."""

import json

import numpy as np
import pytest

from data import chat
from data.manifest import read_manifest
from data.settings import in_validation
from data.tokenizer import encode_special, load_tokenizer, text_of
from data.train_tokenizer import CHATML, TrainTokenizer, main, texts
from prepared import files_of, prepare, tokens_of

WORDS = "def add(left, right):\n    return left + right  # 1234 \u00e9 <|im_end|>\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rows = [{"text": f"{WORDS}row {n} is here"} for n in range(400)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(source, out, *flags):
    main(["--source", str(source), "--out", str(out), "--vocab-size", "296", *map(str, flags)])
    return load_tokenizer(str(out))


@pytest.fixture(scope="module")
def trained(source):
    out = source.parent / "trained"
    return run(source, out), out


def test_the_same_source_gives_the_same_bytes(source, trained, tmp_path):
    run(source, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(trained[1])


def test_any_text_has_ids_and_special_tokens_in_it_stay_text(trained):
    tokenizer, _ = trained
    assert tokenizer.n_vocab == tokenizer.text_vocab == 296
    assert len(tokenizer.encode_ordinary(WORDS)) < len(WORDS.encode())
    for text in (WORDS, "".join(map(chr, range(1, 3000))), "<|endoftext|><|im_start|>"):
        ids = tokenizer.encode_ordinary(text)
        assert text_of(tokenizer, ids) == text and min(ids) > 2
    special = [tokenizer.special.ids[name] for name in ("<|im_start|>", "<|endoftext|>")]
    assert encode_special(tokenizer, "<|im_start|><|endoftext|>") == special
    assert tokenizer.encode_ordinary("<|im_end|>") != encode_special(tokenizer, "<|im_end|>")
    digits = tokenizer.encode_ordinary("1234")
    assert len(digits) == 4, "each digit is a token"


def test_data_are_prepared_with_the_tokenizer_and_its_template(trained, tmp_path):
    tokenizer, folder = trained
    row = {"prompt": "What is <|im_end|>?", "answer": "A mark."}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    flags = "--tokenizer", folder, "--chat", "--chat-template", "tokenizer", "--val-share", 0
    prepare(tmp_path / "chat.jsonl", tmp_path / "out", *flags)
    ids, manifest = tokens_of(tmp_path / "out" / "train"), read_manifest(tmp_path / "out" / "train")
    assert (manifest.template, manifest.vocab_size) == (CHATML, 296)
    assert (ids == tokenizer.special.ids["<|im_end|>"]).sum() == 2
    assert tokenizer.eot_token == ids[-1] == tokenizer.special.ids["<|endoftext|>"]
    assert tokenizer.special.ends == [tokenizer.eot_token, tokenizer.special.ids["<|im_end|>"]]


def test_validation_documents_and_what_follows_a_limit_are_not_read(source):
    def read(**flags):
        return [*texts(TrainTokenizer(source=str(source), out="", **flags))]

    lines = (source / "rows.jsonl").read_text().splitlines(keepends=True)
    positions = np.cumsum([0, *map(len, lines)])[:-1].tolist()
    rows = zip(lines, positions, strict=True)
    kept = [json.loads(line)["text"] for line, p in rows if not in_validation("rows.jsonl", p, 0.3)]
    assert read(val_share=0.3) == kept and 200 < len(kept) < 350
    assert len(read(val_share=0.0)) == 400
    assert read(val_share=0.3, max_documents=7) == kept[:7]
    assert read(val_share=0.3, max_bytes=3 * len(kept[0])) == kept[:3]


def test_a_template_of_ones_own_brings_its_special_tokens(source, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}[END]{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else '' }}<|tail|>"
    )
    flags = "--chat-template", tmp_path / "own.jinja", "--special-tokens", "[END]"
    tokenizer = run(source, tmp_path / "own", *flags)
    assert {"<|assistant|>", "<|tail|>", "[END]"} <= tokenizer.special.ids.keys()
    assert tokenizer.special.ids["[END]"] in tokenizer.special.ends
    assert not run(source, tmp_path / "none", "--chat-template", "none").special.chat_template


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "258"], "--vocab-size 258 is too small for 256 bytes and 3 .*least 259"),
        (["--chat-template", "absent"], "--chat-template: .*absent'. Use chatml or none, or a fi"),
        (["--out", "gs://bucket/bpe"], "is in a bucket. Use a new folder"),
        (["--text-field", "words"], "rows.jsonl:1 has no text in the field 'words'"),
        (["--val-share", "1"], "has no text for training"),
        (["--max-bytes", "0"], "--max-bytes 0 is out of range"),
    ],
)
def test_unusable_flags_are_refused(source, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        run(source, tmp_path / "out", *flags)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_an_empty_source_and_a_finished_or_blocked_folder_are_refused(source, trained, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty.txt has no text for training"):
        run(tmp_path / "empty.txt", tmp_path / "out", "--val-share", "0")
    before = files_of(trained[1])
    with pytest.raises(ValueError, match=r"trained has a tokenizer.json, .*Use a new folder"):
        run(source, trained[1])
    assert files_of(trained[1]) == before
    with pytest.raises(ValueError, match=r"--out cannot be written.*Use another folder"):
        run(source, tmp_path / "empty.txt")


def test_what_ends_an_answer_follows_from_the_template(trained):
    special = trained[0].special
    assert chat.end_of_answer(special) == ([special.ids["<|im_end|>"]], "")
    plain = special._replace(ids={}, chat_template=chat.PLAIN_JINJA)
    assert chat.end_of_answer(plain) == ([], "<|end|>")
    eos = "{% for m in messages %}{{ m.content + eos_token + '<|im_end|>' }}{% endfor %}"
    assert chat.end_of_answer(special._replace(chat_template=eos))[0] == [0]
