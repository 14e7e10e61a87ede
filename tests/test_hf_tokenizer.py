"""Tokenizers as Hugging Face's files: written from tiktoken's, and read, by value."""

import hashlib
import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from conftest import ROOT
from data import encode
from data.encode import encoder_of
from data.hf_tokenizer import HuggingFace
from data.manifest import read_manifest
from data.tokenizer import (
    encode_continuation,
    keep_files,
    load_tokenizer,
    table_sha256,
    text_of,
    text_tokens,
    token_bytes,
)
from hf.tokenizer_export import write_hugging_face
from hf_run import write_moonshot, write_sentencepiece
from inference.sampling import ENDED
from prepared import prepare, tokens_of
from runtime import run_directory

SAMPLE = load_tokenizer("sample")
ENDS = SAMPLE.eot_token
SPECIAL = "a<|endoftext|>b <|fim_prefix|>"


def made_up():
    """An encoding with which each step to Hugging Face's files would show if it were wrong."""
    table = {bytes([byte]): byte for byte in range(256)}
    # abc is joined of bc, whose rank is higher; nothing leads to xyz; there are holes.
    table |= {b"bc": 290, b"ab": 300, b"abc": 280, b"xyz": 281, b"aa": 282, b"aaaa": 284}
    table |= {b"ca": 283, b"11": 285, b"1111": 286}  # of digits no four are together
    # Leaves out spaces within a line and signs.
    pattern = r"(?i:[a-z])+|\p{N}{1,3}+|\s+$|\|"
    special = {"<|endoftext|>": 270, "<|also|>": 270, "<|more|>": 310}
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=table, special_tokens=special)


def random_texts(alphabet, count, length):
    random = np.random.default_rng(0)
    lengths = random.integers(0, length, count)
    return ["".join(np.asarray(alphabet)[random.integers(0, len(alphabet), n)]) for n in lengths]


@pytest.fixture(scope="module")
def texts():
    files = [*ROOT.glob("*.py"), *Path(sysconfig.get_path("stdlib"), "json").glob("*.py")]
    found = [file.read_text() for file in sorted(files)]
    points = [*range(1, 0x300), *range(0x4E00, 0x4E80), *range(0x1F600, 0x1F640), 0x3000, 0x2028]
    found += random_texts([chr(point) for point in points], 300, 60)
    spaces = [" ", "  ", "\n", "\r\n", "\t", "\r", "\xa0", "\x85", "\v", "a", "1", "'s", "'S", "."]
    found += random_texts(spaces, 300, 30)
    found += random_texts([*"aaabbccxyz1 \n!|", "<|endoftext|>"], 400, 30)
    found += random_texts([*"中文混合Englishisa 12'sS,\n\r", "𠀀", "é", "É"], 300, 30)
    found += [sign * n for sign in " \na1=漢" for n in (1, 2, 3, 5000)]
    return [*found, "", SPECIAL, "👨‍👩‍👧‍👦 e\u0301 ﬁ ß İ"]


@pytest.fixture(scope="module", params=["sample", "made up", "kimi"])
def pair(request, tmp_path_factory):
    """(a tokenizer, the folder of its files)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_moonshot(folder / "kimi", chat_template="{{ x }}")
    made = {"sample": SAMPLE, "made up": made_up(), "kimi": load_tokenizer(str(folder / "kimi"))}
    tokenizer = made[request.param]
    write_hugging_face(tokenizer, folder, 128)
    return tokenizer, folder


@pytest.fixture
def folder(tmp_path):
    """Of the sample tokenizer's files, to be changed."""
    write_hugging_face(SAMPLE, tmp_path / "tokenizer", 128)
    return tmp_path / "tokenizer"


def change(file, **fields):
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | fields))


def test_what_is_written_gives_the_same_ids_and_texts(pair, texts):
    tokenizer, folder = pair
    found = HuggingFace(folder)
    for text in [*texts, "a\ud800b"]:  # half a surrogate pair
        ids = tokenizer.encode_ordinary(text)
        assert found.encode_ordinary(text) == ids, repr(text[:50])
        assert text_of(found, ids) == tokenizer.decode(ids)
    cut = list("漢字".encode()[:-1])
    assert text_of(found, cut) == tokenizer.decode(cut) == "漢\ufffd"
    assert (found.n_vocab, found.eot_token) == (tokenizer.n_vocab, tokenizer.eot_token)
    for i in set(range(tokenizer.n_vocab)) - {found.eot_token}:  # also holes
        assert token_bytes(found, i) == token_bytes(tokenizer, i), i
    if special := getattr(tokenizer, "special", None):
        assert (found.special.bos, found.special.chat_template) == (special.bos, "{{ x }}")
        assert not found.special.adds_bos


def test_a_file_that_was_read_is_copied_with_its_settings(folder, tmp_path):
    eos = {"content": "<|endoftext|>"}
    change(folder / "tokenizer_config.json", chat_template="{{ x }}", eos_token=eos)
    write_hugging_face(HuggingFace(folder), tmp_path / "copy", 64)
    assert HuggingFace(tmp_path / "copy").content == HuggingFace(folder).content
    files = [path / "tokenizer_config.json" for path in (folder, tmp_path / "copy")]
    ours, copied = (json.loads(file.read_text()) for file in files)
    assert copied == ours | {"model_max_length": 64}


def test_data_is_prepared_with_a_file_to_the_same_tokens(folder, tmp_path):
    flags = ["--glob", "c*.py", "--val-share", "0", "--tokenizer"]
    names = {"sample": "sample", "file": str(folder / "tokenizer.json"), "folder": str(folder)}
    for out, name in names.items():
        prepare(ROOT, tmp_path / out, *flags, name)
    ids = [tokens_of(tmp_path / out / "train").tolist() for out in names]
    assert ids[0] == ids[1] == ids[2]
    manifest = read_manifest(tmp_path / "folder" / "train")
    content = (folder / "tokenizer.json").read_bytes()
    assert manifest.tokenizer == name and manifest.end_of_text == ENDS
    assert manifest.tokenizer_sha256 == hashlib.sha256(content).hexdigest()
    change(folder / "tokenizer_config.json", eos_token="a")
    encoder_of.cache_clear()
    with pytest.raises(ValueError, match="was made with another end_of_text"):
        prepare(ROOT, tmp_path / "folder", *flags, name)


def of_run(folder):
    """What a checkpoint has of the tokenizer of a folder."""
    tokenizer = load_tokenizer(str(folder))
    found = {"tokenizer": str(folder), "tokenizer_sha256": table_sha256(tokenizer)}
    return found | {"end_of_text": tokenizer.eot_token}


def test_a_checkpoint_names_the_file_and_a_changed_or_lost_one_is_refused(folder, tmp_path):
    tokens, run = of_run(folder), run_directory.at(tmp_path / "run")
    tokenizer, begin, ends = text_tokens(tokens, run)
    assert begin == [] and ends == [ENDS]
    assert text_of(tokenizer, [97, ENDS, ENDED, ENDS + 1, 98]) == "a<|endoftext|>b"
    assert text_of(made_up(), [97, 256, 271, ENDED, 5000, 98]) == "ab"  # ids without a token
    table = folder / "tokenizer.json"
    table.write_text(table.read_text() + "\n")
    sha256 = tokens["tokenizer_sha256"]
    with pytest.raises(ValueError, match=f"and the data was made with {sha256}. Use the code, or"):
        text_tokens(tokens, run)
    table.unlink()
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        text_tokens(tokens, run)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="need the same file in the same place"):
        text_tokens(tokens, run)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer/tokenizer.json", "tokenizer/my.json"])
def test_a_run_keeps_its_tokenizer_when_the_file_is_lost(name, folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", folder / "my.json")
    tokens, run = of_run(tmp_path / name), run_directory.at(tmp_path / "run")
    for _ in range(2):  # a second start changes nothing
        keep_files(str(tmp_path / name), run.folder(run_directory.TOKENIZER))
        shutil.rmtree(folder, ignore_errors=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert text_tokens(tokens, run_directory.at(tmp_path / "moved")).ends == [ENDS]
    keep_files("sample", tmp_path / "kept")
    keep_files("lost/tokenizer.json", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_text_ends_at_any_id_that_the_files_name(folder, tmp_path):
    tokens, run = of_run(folder), run_directory.at(tmp_path / "run")
    for generation, config, more in (([7, ENDS, 9], 3, [7, 9]), (None, [3], [3]), (None, ENDS, [])):
        change(folder / "generation_config.json", eos_token_id=generation)
        change(folder / "config.json", eos_token_id=config)
        assert text_tokens(tokens, run).ends == [ENDS, *more]


def test_truncation_and_padding_of_a_file_are_ignored(folder):
    table = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table.enable_truncation(2)
    table.enable_padding(length=9)
    table.save(str(folder / "tokenizer.json"))
    found = HuggingFace(folder)
    assert [len(found.encode_ordinary(text)) for text in ("a", "a1b2c3")] == [1, 6]


MAP = "special_tokens_map.json"


@pytest.mark.parametrize(
    ("settings", "files", "expected"),
    [
        ({"eos_token": "b"}, {"config.json": {"eos_token_id": 3}}, 98),
        ({"eos_token": None}, {"config.json": {"eos_token_id": 3}}, 3),
        ({}, {"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {}}, 5),
        ({"eos_token": None}, {MAP: {"eos_token": {"content": "b"}}}, 98),
        ({"eos_token": "a"}, {MAP: {"eos_token": "b"}}, 97),
    ],
)
def test_the_end_of_text_is_what_the_files_beside_it_say(folder, settings, files, expected):
    for name, content in ({"tokenizer_config.json": settings} | files).items():
        (folder / name).write_text(json.dumps(content))
    assert HuggingFace(folder).eot_token == expected


WORDS = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
WORDS.decoder = decoders.WordPiece()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "{}", r'token None, .* Write .*"eos_token": "<\|endoftext\|>"'),
        ("tokenizer_config.json", '{"eos_token": "<eos>"}', "token <eos>, which is not a token"),
        ("tokenizer_config.json", "{", r"tokenizer_config.json is not JSON .*Correct it"),
        ("tokenizer.json", "{}", r"is not a tokenizer.json of Hugging Face"),
        ("tokenizer.json", WORDS.to_str(), "is neither byte-level nor"),
    ],
)
def test_an_unusable_folder_is_refused_with_what_is_missing(folder, file, content, message):
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(folder))


@pytest.fixture(params=["segment", "first", "always"])
def pieces(request, tmp_path):
    write_sentencepiece(tmp_path / "pieces", request.param)
    return tmp_path / "pieces"


def test_tokens_of_sentencepiece_are_the_bytes_of_the_text_after_one_space(pieces, texts):
    ours = load_tokenizer(str(pieces))
    for text in [*texts, "a<s>b</s>", "<0x0A>"]:
        if "\u2581" not in text:
            ids = ours.encode_ordinary(text)
            found = b"".join(token_bytes(ours, i) for i in ids).decode()
            assert found == f" {text}" or (found == text and text[:1] in ("", " "))
            assert not {0, 1, 2} & set(ids)  # special tokens stay text
            found = b"".join(token_bytes(ours, i) for i in encode_continuation(ours, text))
            assert found.decode() == text


def test_a_document_in_several_splits_and_chunks_begins_once(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 1000)
    text = "hidden layers\n" * 1000
    (tmp_path / "long.txt").write_text(text)
    encoder_of.cache_clear()
    flags = ["--tokenizer", pieces, "--split-mb", "0.005", "--val-share", "0"]
    prepare(tmp_path / "long.txt", tmp_path / "out", *flags)
    ids = tokens_of(tmp_path / "out" / "train").tolist()
    assert len(read_manifest(tmp_path / "out" / "train").shards) > 1
    assert (ids.count(1), ids.count(2), ids[0], ids[-1]) == (1, 1, 1, 2)
    assert text_of(load_tokenizer(str(pieces)), ids[1:-1]) == " " + text


def test_a_tiktoken_model_is_read_with_its_special_tokens(tmp_path):
    count = write_moonshot(tmp_path / "kimi")
    for name in (tmp_path / "kimi", tmp_path / "kimi" / "tiktoken.model"):
        found = load_tokenizer(str(name))
        special = found.special
        assert (found.n_vocab, found.eot_token, special.bos) == (count + 256, count + 1, count)
    assert special.ids["<|im_end|>"] == count + 2
    assert special.ids[f"<|reserved_token_{count + 9}|>"] == count + 9

    def cut(text):
        return [token_bytes(found, i).decode() for i in found.encode_ordinary(text)]

    assert cut("中文English混合") == ["中文", "English", "混合"]
    assert cut("1234567") == ["123", "4", "5", "6", "7"]
    assert "[EOS]" in "".join(cut("a[EOS]")) and count + 1 not in found.encode_ordinary("a[EOS]")
    added = {str(count + 2): {"content": "<|other|>"}}
    write_moonshot(tmp_path / "other", eos_token="<|other|>", added_tokens_decoder=added)
    assert table_sha256(load_tokenizer(str(tmp_path / "other"))) != table_sha256(found)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "_config.json with the token.* has QWenTokenizer"),
        ({"eos_token": "<|gone|>"}, r"a special eos_token. It has .* and <\|gone\|>"),
        ({}, "has a line that is not TOKEN RANK"),
    ],
)
def test_a_tiktoken_model_of_another_kind_is_refused(tmp_path, settings, pattern):
    write_moonshot(tmp_path / "kimi", **settings)
    if not settings:
        (tmp_path / "kimi" / "tiktoken.model").write_bytes(b"\x0a\x0esentencepiece")
    with pytest.raises(ValueError, match=pattern):
        load_tokenizer(str(tmp_path / "kimi"))


def begins(tmp_path, folder, *more):
    """(BOS of the manifest, ids) of two documents, the second of two chunks."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "bb"}\n')
    encoder_of.cache_clear()  # the tokenizer's files change here
    out, train = tmp_path / "out", tmp_path / "out" / "train"
    prepare(tmp_path / "rows.jsonl", out, "--tokenizer", folder, "--val-share", "0", *more)
    return read_manifest(train).begin_of_text, tokens_of(train).tolist()


def test_documents_begin_with_bos_if_the_tokenizer_or_add_bos_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 1)
    count = write_moonshot(tmp_path / "kimi")
    a, b, end = ord("a"), ord("b"), count + 1
    assert begins(tmp_path, tmp_path / "kimi") == (None, [a, end, b, b, end])
    both = count, [count, a, end, count, b, b, end]
    assert begins(tmp_path, tmp_path / "kimi", "--add-bos", "--overwrite") == both
    write_moonshot(tmp_path / "says", add_bos_token=True)
    assert begins(tmp_path, tmp_path / "says", "--overwrite") == both
    change(tmp_path / "says" / "tokenizer_config.json", add_bos_token=False)
    with pytest.raises(ValueError, match="made with another begin_of_text"):
        begins(tmp_path, tmp_path / "says")


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizer_json_says_by_its_post_processor_that_it_adds_bos(folder, tmp_path, special):
    table = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table.add_tokens([AddedToken("<s>", normalized=False, special=special)])
    bos = table.token_to_id("<s>")
    change(folder / "tokenizer_config.json", bos_token="<s>")
    table.save(str(folder / "tokenizer.json"))
    assert begins(tmp_path, folder)[0] is None
    table.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    table.save(str(folder / "tokenizer.json"))
    found, ids = begins(tmp_path, folder, "--overwrite")
    assert found == bos and [i for i, token in enumerate(ids) if token == bos] == [0, 3]
