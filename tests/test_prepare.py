"""Text to shards: the written tokens are decoded and compared with the text."""

import hashlib
import json
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tiktoken

import prepared
from data import encode, prepare, sources
from data.encode import Encoder, resize
from data.manifest import INDEX, read_manifest
from data.readers import Chunk, Document
from data.settings import Prepare
from data.tokenizer import SAMPLE_PATTERN, encoding, load_tokenizer, table_sha256
from prepared import files_of, texts_of, tokens_of

TRICKY = "<|endoftext|> é 漢字 🙂 \x00\t\r\n  x=1\n\n\n    return 1234567 <|fim_prefix|>  "
SAMPLE = load_tokenizer("sample")
BYTE_TABLE = {bytes([byte]): byte for byte in range(256)}
run = prepared.prepare


@pytest.fixture
def texts(tmp_path):
    """40 small files in two folders, one of them empty, and a hidden one."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for number in range(40):
        name = f"{'sub/' * (number % 3 > 0)}{number}.txt"
        (folder / name).write_text(f"text {number} " * (number + 1))
    (folder / "tricky.md").write_bytes(TRICKY.encode())
    (folder / "empty.txt").touch()
    (folder / ".hidden.txt").write_text("not read")
    return folder


def test_the_sample_tokenizer_has_all_bytes_and_decodes_what_it_encodes():
    last = SAMPLE.n_vocab - 1
    assert SAMPLE.eot_token == last and SAMPLE.decode([last]) == "<|endoftext|>"
    tokens = [SAMPLE.decode_single_token_bytes(i) for i in range(last)]
    assert tokens[:256] == [*BYTE_TABLE] and len(set(tokens)) == last
    characters = np.random.default_rng(0).integers(1, 0xD800, 20_000)
    code = Path(json.__file__).read_text()
    for text in (TRICKY, "".join(map(chr, characters)), " " * 300_000, "a" * 300_000, code):
        assert SAMPLE.decode(SAMPLE.encode_ordinary(text)) == text
    assert len(SAMPLE.encode_ordinary(code)) < len(code) / 1.5


def encoding_of(pattern, end=256):
    fields = {"mergeable_ranks": BYTE_TABLE, "special_tokens": {"<|endoftext|>": end}}
    return tiktoken.Encoding("x", pat_str=pattern, **fields)


def test_the_table_hash_sees_the_pattern_the_ranks_and_end_of_text():
    swapped = BYTE_TABLE | {b"a": BYTE_TABLE[b"b"], b"b": BYTE_TABLE[b"a"]}
    tables = [encoding(table) for table in (BYTE_TABLE, swapped, BYTE_TABLE | {b"ab": 256})]
    tables += [encoding_of("."), encoding_of(SAMPLE_PATTERN, 257)]
    assert len({*map(table_sha256, tables)}) == 5
    assert table_sha256(tables[0]) == table_sha256(encoding_of(SAMPLE_PATTERN))


def test_a_tokenizer_that_cannot_be_used_is_refused_with_the_fix(tmp_path, monkeypatch):
    sha256 = table_sha256(SAMPLE)
    assert load_tokenizer("sample", sha256).n_vocab == SAMPLE.n_vocab
    with pytest.raises(ValueError, match=f"table sha256 {sha256}, and the data was made with 00"):
        load_tokenizer("sample", "00")
    with pytest.raises(ValueError, match=r"--tokenizer gpt9 is unknown: .*gpt2.*cl100k_base"):
        load_tokenizer("gpt9")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"p50k_edit could not be downloaded .*--tokenizer sample"):
        load_tokenizer("p50k_edit")


def test_shards_hold_every_document_and_manifests_describe_them(texts, tmp_path):
    flags = "--val-share 0.3 --shard-tokens 500"
    run(texts, tmp_path / "out", *flags.split())
    expected = {"train": [], "val": []}
    names = [p.relative_to(texts).as_posix() for p in texts.rglob("*.*") if p.stat().st_size]
    for name in sorted(set(names) - {".hidden.txt"}):
        digest = hashlib.sha256(f"{name}:0".encode()).digest()[:8]
        side = "val" if int.from_bytes(digest, "big") / 2**64 < 0.3 else "train"
        expected[side].append((texts / name).read_bytes().decode())
    assert len(expected["train"]) > 20 and len(expected["val"]) > 5
    for split, documents in expected.items():
        folder = tmp_path / "out" / split
        manifest = read_manifest(folder)
        ids = [[*SAMPLE.encode_ordinary(text), SAMPLE.eot_token] for text in documents]
        ids = np.concatenate(ids).astype(np.uint16)
        np.testing.assert_array_equal(tokens_of(folder), ids, strict=True)
        assert (manifest.subset, manifest.tokenizer) == (split, "sample")
        assert (manifest.vocab_size, manifest.end_of_text) == (SAMPLE.n_vocab, SAMPLE.eot_token)
        assert manifest.tokenizer_sha256 == table_sha256(SAMPLE) and manifest.dtype == "uint16"
        assert (manifest.tokens, manifest.documents) == (len(ids), len(documents))
        assert manifest.text_bytes == sum(len(text.encode()) for text in documents)
        assert manifest.command == f"python data/prepare.py --source {texts} {flags}"
        assert not {"out", "workers", "overwrite", "left_out"} & manifest.settings.keys()
        assert [s.tokens for s in manifest.shards[:-1]] == [500] * (len(manifest.shards) - 1)
        for shard in manifest.shards:
            content = (folder / shard.name).read_bytes()
            assert shard.bytes == len(content)
            assert shard.crc32c == f"{google_crc32c.value(content):08x}"
        shards = {s.name for s in manifest.shards}
        assert {path.name for path in folder.iterdir()} == {INDEX, *shards}
    index = json.loads((folder / INDEX).read_text())  # without fields of weights
    assert index["shards"][0].keys() == {"name", "tokens", "bytes", "crc32c"}
    assert not index.keys() & {"template", "learned_tokens", "begin_of_text"}


def test_a_run_of_a_million_spaces_is_encoded_by_patterns_that_step_back():
    encoder = Encoder(Prepare(source="", out=""))
    encoder.tokenizer = encoding_of(r"\S+|\s+(?!\S)|\s")
    text = " " * 1_000_000 + "x"
    document = Document("x.txt", 0, [Chunk(text[:70]), Chunk(text[70:])])
    assert [len(chunk.text) for chunk in resize(document.chunks)] == [400_000, 400_000, 200_001]
    ids, _, sizes = zip(*encoder.encode(document), strict=True)
    assert np.concatenate(ids).tolist() == [*text.encode(), 256] and sum(sizes) == 1_000_001


def test_a_vocabulary_beyond_16_bits_is_written_in_32(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "load_tokenizer", lambda name: encoding_of(".", 2**16))
    encode.encoder_of.cache_clear()
    run(texts, tmp_path / "out", "--val-share", 0)
    ids = tokens_of(tmp_path / "out" / "train")
    assert read_manifest(tmp_path / "out" / "train").dtype == ids.dtype == "uint32"
    assert (ids == 2**16).sum() == 41
    encode.encoder_of.cache_clear()


def test_a_limit_of_tokens_takes_the_first_documents_and_reads_no_later_split(
    texts, tmp_path, monkeypatch
):
    read, real = [], prepare.tokenize_split
    monkeypatch.setattr(prepare, "tokenize_split", lambda *job: read.append(job) or real(*job))
    flags = ["--val-share", "0", "--split-mb", "0.0002", "--max-tokens", "300"]
    run(texts, tmp_path / "out", *flags)
    out, names = tmp_path / "out" / "train", sorted(texts.glob("[0-9]*.txt"))
    assert texts_of(out) == [path.read_text() for path in names][: len(texts_of(out))]
    assert 300 <= read_manifest(out).tokens < 500
    assert len(read) < 10  # each has a document or two


def test_the_standard_library_is_read_without_tests_and_generated_files(tmp_path, monkeypatch):
    kept = ["abc.py", "json/decoder.py", "testing.py", "unittest/mock.py"]
    left = """test/a.py lib2to3/tests/b.py idlelib/idle_test/c.py site-packages/d/e.py
        dist-packages/f.py __pycache__/g.py _sysconfigdata__linux_x86_64.py abc.pyc json/data.txt"""
    for name in kept + left.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: tmp_path)
    splits = sources.open_source(Prepare(source="python-stdlib", out="")).splits
    assert [part.name for split in splits for part in split] == kept


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--val-share", "1.5"], "--val-share 1.5 is out of range.* at least 0 and at most 1, or"),
        (
            ["--shard-tokens", "0"],
            "--shard-tokens 0 is out of range. Use an integer at least 1, or",
        ),
        (["--split-mb", "0"], "--split-mb 0.0 is out of range"),
        (["--glob", "*.nothing"], "holds no file"),
        (["--source", "nowhere"], r"nowhere holds no file .*Use --source python-stdlib"),
        (["--out", "gs://bucket"], "--out gs://bucket names no folder of a bucket"),
        (["--out", "TEXTS/0.txt/out"], r"Not a directory: .*0.txt/out"),
        (["--add-bos"], "--add-bos needs a tokenizer that names its bos_token"),
        (["--chat"], "--chat reads conversations"),
        (["--row-tokens", "64"], r"--row-tokens pads conversations. Add --chat"),
    ],
)
def test_an_invalid_setting_is_refused(texts, tmp_path, flags, pattern):
    with pytest.raises(ValueError, match=pattern):
        run(texts, tmp_path / "out", *(flag.replace("TEXTS", str(texts)) for flag in flags))
    assert not list((tmp_path / "out").rglob(INDEX))


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


def test_what_is_prepared_is_kept_and_replaced_only_by_overwrite(
    texts, tmp_path, monkeypatch, capsys
):
    out, share = tmp_path / "out", ["--val-share", "0.3"]
    run(texts, out, *share)
    before = files_of(out)
    monkeypatch.setattr(prepare, "tokenize_split", None)  # calling it is a TypeError
    capsys.readouterr()
    run(texts, out, *share)
    assert capsys.readouterr().out.startswith(f"{out} is already prepared")
    (texts / "0.txt").write_text("a longer text than before")
    with pytest.raises(ValueError, match=r"another files_sha256\. Use another --out, or --over"):
        run(texts, out, *share)
    assert files_of(out) == before
    with pytest.raises(TypeError):
        run(texts, out, *share, "--overwrite")
    assert not files_of(out)  # no index of what is replaced
    monkeypatch.undo()
    run(texts, out, *share)
    run(texts, tmp_path / "fresh", *share)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_one_subset_can_be_prepared_without_touching_the_other(texts, tmp_path):
    out = tmp_path / "out"
    run(texts, out, "--val-share", 1)
    val = files_of(out)
    assert {name.split("/")[0] for name in val} == {"val"}
    run(texts, out, "--val-share", 0, "--glob", "*.md")
    both = files_of(out)
    assert {name: both[name] for name in val} == val
    assert texts_of(out / "train") == [TRICKY]
    with pytest.raises(ValueError, match=r"train/index.json was made with another .*val_share"):
        run(texts, out, "--val-share", 0.3)
    assert files_of(out) == both
