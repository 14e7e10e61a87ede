"""Text to shards: the written tokens are decoded and compared with the text."""

import base64
import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import regex
import tiktoken

import prepared
from data import encode, prepare, sources, train_tokenizer
from data.encode import Encoder, resize
from data.hf_tokenizer import BYTES
from data.manifest import INDEX, read_manifest
from data.readers import Chunk, Document
from data.settings import Prepare, in_validation
from data.sources import documents
from data.tokenizer import SAMPLE_PATTERN, encoding, load_tokenizer, table_sha256
from dataset import Dataset
from prepared import files_of, texts_of, tokens_of

ROOT = Path(__file__).resolve().parent.parent
TRICKY = "<|endoftext|> é 漢字 🙂 \x00\t\r\n  x=1\n\n\n    return 1234567 <|fim_prefix|>  "


run = prepared.prepare


@pytest.fixture
def texts(tmp_path):
    """40 small files in two folders, one of them empty, and a hidden one."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for number in range(40):
        name = f"sub/{number}.txt" if number % 3 else f"{number}.txt"
        (folder / name).write_text(f"text {number} " * (number + 1))
    (folder / "tricky.md").write_bytes(TRICKY.encode())
    (folder / "empty.txt").touch()
    (folder / ".hidden.txt").write_text("not read")
    return folder


# The tokenizer


def test_the_sample_tokenizer_has_4096_ids_and_the_last_is_end_of_text():
    tokenizer = load_tokenizer("sample")
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (4096, 4095)
    assert tokenizer.decode([4095]) == "<|endoftext|>"
    tokens = [tokenizer.decode_single_token_bytes(i) for i in range(4095)]
    assert tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert len(set(tokens)) == 4095


def test_the_sample_tokenizer_decodes_what_it_encodes():
    tokenizer = load_tokenizer("sample")
    characters = np.random.default_rng(0).integers(1, 0xD800, 20_000)
    for text in (TRICKY, "".join(map(chr, characters)), " " * 300_000, "a" * 300_000, ""):
        assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_the_sample_tokenizer_needs_a_token_for_2_6_bytes_of_a_held_out_file():
    found = documents(Prepare(source="python-stdlib", out=""))
    texts = [text for d, text in found if in_validation(d.name, d.position, 0.05)]
    tokens = map(len, load_tokenizer("sample").encode_ordinary_batch(texts))
    # Of the median file: each Python holds out others, and one may be a long table of numbers.
    assert np.median([len(text.encode()) / n for text, n in zip(texts, tokens, strict=True)]) > 2.6


def test_the_table_hash_sees_the_pattern_the_ranks_and_end_of_text():
    table = {bytes([byte]): byte for byte in range(256)}
    swapped = table | {b"a": table[b"b"], b"b": table[b"a"]}
    more = table | {b"ab": 256}
    special = {"<|endoftext|>": 256}
    pattern = tiktoken.Encoding("x", pat_str=".", mergeable_ranks=table, special_tokens=special)
    found = [table_sha256(encoding(t)) for t in (table, swapped, more)] + [table_sha256(pattern)]
    assert len(set(found)) == 4
    assert found[0] == table_sha256(encoding(dict(table)))


def test_a_tokenizer_that_is_not_the_one_of_the_data_is_refused():
    sha256 = table_sha256(load_tokenizer("sample"))
    assert load_tokenizer("sample", sha256).n_vocab == 4096
    with pytest.raises(ValueError, match=f"table sha256 {sha256}, and the data was made with 00"):
        load_tokenizer("sample", "00")


def test_an_unknown_tokenizer_is_refused_with_the_names_that_there_are():
    with pytest.raises(ValueError, match=r"--tokenizer gpt9 is unknown: .*gpt2.*cl100k_base"):
        load_tokenizer("gpt9")


def test_a_tokenizer_that_cannot_be_downloaded_is_refused_with_an_alternative(
    tmp_path, monkeypatch
):
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"p50k_edit could not be downloaded .*--tokenizer sample"):
        load_tokenizer("p50k_edit")


# Training it


def reference_bpe(words, size):
    """All pairs counted anew for each merge; of equally frequent ones the one of lower ids."""
    spelled = {bytes([byte]): character for character, byte in BYTES.items()}
    tokens = sorted(spelled, key=spelled.get)
    ids = {token: id for id, token in enumerate(tokens)}
    words = {tuple(bytes([b]) for b in word.encode()): n for word, n in words.items()}
    while len(tokens) < size:
        pairs = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        tokens.append(best[0] + best[1])
        ids[tokens[-1]] = len(ids)
        merged = Counter()
        for word, count in words.items():
            parts = []
            for part in word:
                if parts and (parts[-1], part) == best:
                    parts[-1] += part
                else:
                    parts.append(part)
            merged[tuple(parts)] += count
        words = merged
    return [bytes([byte]) for byte in range(256)] + tokens[256:]


def test_train_makes_the_same_tokens_as_counting_all_pairs_anew():
    text = Path(json.__file__).read_text()
    words = Counter(regex.findall(SAMPLE_PATTERN, text))
    assert train_tokenizer.train([text], 500) == reference_bpe(words, 500)


def test_train_ends_when_the_text_has_no_more_pairs():
    assert train_tokenizer.train(["ab"], 4096)[256:] == [b"ab"]


def test_the_tokenizer_learns_from_training_files_only(tmp_path, monkeypatch, capsys):
    held_out = [n for n in range(100) if in_validation(f"{n}.py", 0, 0.05)]
    assert 2 <= len(held_out) <= 10
    texts = ["zq" * 50 if n in held_out else "hello" for n in range(100)]
    found = [(Document(f"{n}.py", 0, ()), text) for n, text in enumerate(texts)]
    monkeypatch.setattr(train_tokenizer, "documents", lambda config: iter(found))
    out = tmp_path / "ranks"
    train_tokenizer.main(["--out", str(out), "--vocab-size", "260"])
    learned = [line.split()[0] for line in out.read_bytes().splitlines()[256:]]
    assert [base64.b64decode(token) for token in learned] == [b"el", b"hel", b"lo"]
    line = f"held-out files: {len(held_out)}, {100 * len(held_out)} bytes, 1.000 bytes per token"
    assert line in capsys.readouterr().out


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--vocab-size 256 is too small"):
        train_tokenizer.main(["--out", str(tmp_path / "ranks"), "--vocab-size", "256"])


# What is written


def test_shards_hold_every_document_in_order_of_path_split_by_the_stated_rule(texts, tmp_path):
    run(texts, tmp_path / "out", "--val-share", 0.3)
    expected = {"train": [], "val": []}
    names = [p.relative_to(texts).as_posix() for p in texts.rglob("*.*") if p.stat().st_size]
    for name in sorted(set(names) - {".hidden.txt"}):
        digest = hashlib.sha256(f"{name}:0".encode()).digest()[:8]
        side = "val" if int.from_bytes(digest, "big") / 2**64 < 0.3 else "train"
        expected[side].append((texts / name).read_bytes().decode())
    assert len(expected["train"]) + len(expected["val"]) == 41
    assert 5 < len(expected["val"]) < 20
    for side, documents_of_side in expected.items():
        assert texts_of(tmp_path / "out" / side) == documents_of_side


def test_the_manifest_says_what_the_shards_hold(texts, tmp_path):
    run(texts, tmp_path / "out", "--val-share", 0.3, "--shard-tokens", 500)
    for split in ("train", "val"):
        folder = tmp_path / "out" / split
        manifest = read_manifest(folder)
        ids, found = tokens_of(folder), texts_of(folder)
        assert manifest.begin_of_text is manifest.template is None
        assert manifest.subset == split
        assert (manifest.tokenizer, manifest.vocab_size, manifest.end_of_text) == (
            "sample",
            4096,
            4095,
        )
        assert manifest.tokenizer_sha256 == table_sha256(load_tokenizer("sample"))
        assert (manifest.dtype, ids.dtype) == ("uint16", np.uint16)
        assert (manifest.tokens, manifest.documents) == (len(ids), len(found))
        assert manifest.text_bytes == sum(len(text.encode()) for text in found)
        assert manifest.command == (
            f"python data/prepare.py --source {texts} --val-share 0.3 --shard-tokens 500"
        )
        assert not {"out", "workers", "overwrite", "left_out"} & manifest.settings.keys()
        assert [s.tokens for s in manifest.shards[:-1]] == [500] * (len(manifest.shards) - 1)
        assert 0 < manifest.shards[-1].tokens <= 500
        for shard in manifest.shards:
            content = (folder / shard.name).read_bytes()
            assert shard.bytes == len(content)
            assert shard.crc32c == f"{google_crc32c.value(content):08x}"
        assert {path.name for path in folder.iterdir()} == {
            INDEX,
            *(s.name for s in manifest.shards),
        }


def test_the_size_of_shards_does_not_change_the_tokens(texts, tmp_path):
    for size in (7, 1000):
        run(texts, tmp_path / str(size), "--shard-tokens", size)
    small, large = (tokens_of(tmp_path / str(size) / "train") for size in (7, 1000))
    np.testing.assert_array_equal(small, large)
    assert Dataset(tmp_path / "7" / "train", 16).windows == (len(large) - 1) // 16


def test_a_special_token_in_the_text_is_text_and_ends_no_document(tmp_path):
    source = tmp_path / "one.txt"
    source.write_bytes(TRICKY.encode())
    run(source, tmp_path / "out", "--val-share", 0)
    assert (tokens_of(tmp_path / "out" / "train") == 4095).sum() == 1
    assert texts_of(tmp_path / "out" / "train") == [TRICKY]


def test_a_run_of_a_million_spaces_is_encoded_by_patterns_that_step_back():
    encoder = Encoder(Prepare(source="", out=""))
    encoder.tokenizer = tiktoken.Encoding(
        "x",
        pat_str=r"\S+|\s+(?!\S)|\s",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
    text = " " * 1_000_000 + "x"
    document = Document("x.txt", 0, [Chunk(text[:70]), Chunk(text[70:])])
    assert [len(chunk.text) for chunk in resize(document.chunks)] == [400_000, 400_000, 200_001]
    ids, weights, sizes = zip(*encoder.encode(document), strict=True)
    ids = np.concatenate(ids)
    assert bytes(ids[:-1].astype(np.uint8)) == text.encode() and ids[-1] == 256
    assert (set(weights), sum(sizes)) == ({None}, 1_000_001)


def test_a_vocabulary_beyond_16_bits_is_written_in_32(texts, tmp_path, monkeypatch):
    table = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 2**16}
    large = tiktoken.Encoding("x", pat_str=".", mergeable_ranks=table, special_tokens=special)
    monkeypatch.setattr(encode, "load_tokenizer", lambda name: large)
    encode.encoder_of.cache_clear()
    run(texts, tmp_path / "out", "--val-share", 0)
    ids = tokens_of(tmp_path / "out" / "train")
    assert ids.dtype == np.uint32
    assert read_manifest(tmp_path / "out" / "train").dtype == "uint32"
    assert (ids == 2**16).sum() == 41
    encode.encoder_of.cache_clear()


# Sources


def test_the_standard_library_is_read_without_tests_and_generated_files(tmp_path, monkeypatch):
    kept = ["abc.py", "json/decoder.py", "unittest/mock.py", "testing.py"]
    left = ["test/a.py", "lib2to3/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d/e.py"]
    left += ["dist-packages/f.py", "__pycache__/g.py", "_sysconfigdata__linux_x86_64.py"]
    left += ["abc.pyc", "json/data.txt"]
    for name in kept + left:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    config = Prepare(source="python-stdlib", out="")
    with monkeypatch.context() as patched:
        patched.setattr(sources.sysconfig, "get_path", lambda name: tmp_path)
        [[*parts]] = sources.open_source(config).splits
    assert [part.name for part in parts] == sorted(kept)
    names = [document.name for document, _ in documents(config)]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not any(re.search(r"(^|/)(tests?|idle_test|site-packages)/", name) for name in names)


def test_json_lines_give_a_document_per_line_from_the_field_that_is_named(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"body": "three"}\n')
    (folder / "a.jsonl").write_text('{"body": "one"}\n\n{"body": ""}\n{"body": "two", "n": 1}\n')
    config = Prepare(source=str(folder), out="", text_field="body")
    assert [(d.name, d.position, text) for d, text in documents(config)] == [
        ("a.jsonl", 0, "one"),
        ("a.jsonl", 30, "two"),
        ("b.jsonl", 0, "three"),
    ]


def test_glob_chooses_the_files_of_a_folder(texts):
    config = Prepare(source=str(texts), out="", glob="*.md")
    assert [(d.name, text) for d, text in documents(config)] == [("tricky.md", TRICKY)]


# What is refused


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--val-share", "1.5"], "--val-share 1.5 is not a share"),
        (["--val-share", "-0.1"], "--val-share -0.1 is not a share"),
        (["--shard-tokens", "0"], "--shard-tokens 0 is too small"),
        (["--max-tokens", "-1"], "--max-tokens -1 is too small"),
        (["--workers", "-1"], "--workers -1 is too small"),
        (["--glob", "*.nothing"], "holds no file"),
        (["--out", "gs://bucket"], "--out gs://bucket names no folder of a bucket"),
        (["--add-bos"], "--add-bos needs a tokenizer that names its bos_token"),
        (["--chat"], "--chat reads conversations"),
    ],
)
def test_an_invalid_setting_is_refused(texts, tmp_path, flags, pattern):
    with pytest.raises(ValueError, match=pattern):
        run(texts, tmp_path / "out", *flags)
    assert not list((tmp_path / "out").rglob(INDEX))


def test_a_source_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere holds no file .*Use --source python-stdlib"):
        run(tmp_path / "nowhere", tmp_path / "out")


# Prepared again


def test_what_is_already_prepared_is_left_as_it_is(texts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    run(texts, out, "--val-share", 0.3)
    before = files_of(out)
    capsys.readouterr()
    monkeypatch.setattr(prepare, "tokenize_split", None)  # calling it would be a TypeError
    run(texts, out, "--val-share", 0.3)
    assert capsys.readouterr().out.startswith(f"{out} is already prepared")
    assert files_of(out) == before


@pytest.mark.parametrize("change", ["setting", "content", "tokenizer"])
def test_what_was_prepared_with_other_settings_is_replaced_only_by_overwrite(
    texts, tmp_path, change
):
    out = tmp_path / "out"
    run(texts, out, "--val-share", 0.3)
    share, name = 0.3, {"setting": "val_share", "content": "files_sha256"}.get(change)
    if change == "setting":
        share = 0.4
    elif change == "content":
        (texts / "0.txt").write_text("a longer text than before")
    else:
        name = "tokenizer_sha256"
        index = out / "val" / INDEX
        content = json.loads(index.read_text())
        content["settings"][name] = "00"
        index.write_text(json.dumps(content))
    before = files_of(out)
    with pytest.raises(
        ValueError, match=rf"made with another {name}\. Use another --out, or --over"
    ):
        run(texts, out, "--val-share", share)
    assert files_of(out) == before
    run(texts, out, "--val-share", share, "--overwrite")
    run(texts, tmp_path / "fresh", "--val-share", share)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_an_interrupted_preparation_leaves_no_index_of_the_one_it_replaces(
    texts, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    run(texts, out, "--val-share", 0.3)
    monkeypatch.setattr(prepare, "tokenize_split", None)  # calling it is a TypeError
    with pytest.raises(TypeError):
        run(texts, out, "--val-share", 0.3, "--overwrite")
    assert files_of(out).keys() == {"splits/settings.json"}


def test_one_subset_can_be_prepared_without_touching_the_other(texts, tmp_path):
    out = tmp_path / "out"
    run(texts, out, "--val-share", 1)
    val = files_of(out)
    assert {name.split("/")[0] for name in val} == {"val"}
    run(texts, out, "--val-share", 0, "--glob", "*.md")
    both = files_of(out)
    assert {name: both[name] for name in val} == val
    assert texts_of(out / "train") == [TRICKY]


def test_a_share_that_would_replace_one_finished_subset_is_refused(texts, tmp_path):
    out = tmp_path / "out"
    run(texts, out, "--val-share", 0)
    before = files_of(out)
    with pytest.raises(ValueError, match=r"train/index.json was made with another val_share"):
        run(texts, out, "--val-share", 0.3)
    assert files_of(out) == before


# As a command


def test_the_command_prepares_in_processes_of_its_own_and_refuses_in_one_line(texts, tmp_path):
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", texts]
    out = tmp_path / "out"
    done = subprocess.run(
        [*command, "--out", out, "--workers", "2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{out}/train: " in done.stdout
    assert "prepared in " in done.stdout
    refused = subprocess.run(
        [*command, "--out", out, "--val-share", "2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: --val-share 2.0 is not a share: expected 0 to 1. Use --val-share 0.05.\n"
    )


def test_the_fix_in_an_error_message_works_in_the_same_folder(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = [json.dumps({"body": f"row {n}"}) + "\n" for n in range(200)]
    path.write_text("".join(lines) + "{")
    split = ["--split-mb", "0.001", "--val-share", "0"]
    with pytest.raises(ValueError, match="--text-field"):
        run(path, out, *split)
    with pytest.raises(ValueError, match="--skip-bad"):
        run(path, out, *split, "--text-field", "body")
    assert len(list(out.glob("train/splits/0*.json"))) > 2
    run(path, out, *split, "--text-field", "body", "--skip-bad")
    assert texts_of(out / "train") == [f"row {n}" for n in range(200)]
    with pytest.raises(ValueError, match="is not a line of JSON"):  # and not finished without it
        run(path, out, *split, "--text-field", "body")


def test_an_out_that_cannot_be_a_folder_is_refused_in_one_line(texts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/.*Not a directory"):
        run(texts, tmp_path / "file" / "out")
