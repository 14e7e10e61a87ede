import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tokenize


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(whole, part): 40 texts as JSON lines, and the first of them."""
    out, folder = tmp_path_factory.mktemp("lines"), tmp_path_factory.mktemp("texts")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"def f{number}():\n    return 'é 漢字'\n" * 50)
    (folder / "03.txt").write_text("")
    size = (folder / "00.txt").stat().st_size
    whole, part = out / "whole.jsonl", out / "part.jsonl"
    flags = tokenize.Flags(source=str(folder), mb=40 * size / 1e6)
    documents, found = tokenize.write_text(flags, whole, part)
    assert documents == 40 and 40 * size <= found < 41 * size
    return whole, part


def texts_of(file):
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def test_the_part_is_the_beginning_of_the_text(files):
    whole, part = map(texts_of, files)
    assert len(whole) == 40 and part == whole[:5]
    assert whole[3].startswith("def f4()")  # an empty document is left out


def test_installed_packages_follow_the_standard_library():
    found = tokenize.texts("")
    library = [*tokenize.texts(tokenize.STDLIB)]
    assert [next(found) for _ in library] == library
    path = min(Path(np.__file__).parents[1].rglob("*.py"))
    assert next(found) == path.read_text()


def test_both_methods_tokenize_all_the_text_in_batches(files, monkeypatch):
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 5000)
    batches = tokenize.batches.__wrapped__(files[0])
    texts = texts_of(files[0])
    assert [*itertools.chain(*batches)] == texts and len(batches) > 5
    assert all(sum(map(len, batch)) >= 5000 > sum(map(len, batch[:-1])) for batch in batches[:-1])
    encoding = tokenize.load_tokenizer("sample")
    for method in tokenize.METHODS.values():
        assert [*method(encoding, texts)] == [encoding.encode_ordinary(text) for text in texts]


def test_the_preparation_makes_every_token_and_leaves_no_files(files):
    whole = files[0]
    encode = tokenize.load_tokenizer("sample").encode_ordinary
    before = sorted(whole.parent.iterdir())
    tokens, seconds = tokenize.prepare("sample", whole, 2)
    assert tokens == sum(map(len, map(encode, texts_of(whole)))) and seconds > 0
    assert sorted(whole.parent.iterdir()) == before


def test_the_start_of_a_preparation_is_not_part_of_its_speed():
    part, whole = (100, 3.0), (900, 7.0)
    assert tokenize.without_start(part, whole) == tokenize.Speed(200, start_s=2.5)
    with pytest.raises(ValueError, match=r"preparing 100 tokens took no longer.*--mb 48"):
        tokenize.without_start(whole, part)


def test_rounds_alternate_their_order_and_ratios_are_within_a_round(files, monkeypatch):
    called = []

    def prepare(tokenizer, file, workers):
        called.append((file, workers))
        return (100, 1.0) if file == part else (300, 1.0 + workers)

    whole, part = files
    monkeypatch.setattr(tokenize, "prepare", prepare)
    monkeypatch.setattr(tokenize, "tiktoken_rate", lambda *_: 50.0)
    with ThreadPoolExecutor(2) as pool:
        rounds = [*tokenize.measure(tokenize.Flags(rounds=2), whole, part, pool)]
    assert called == [(part, 2), *((f, n) for n in (1, 2, 2, 1) for f in (part, whole))]
    for speeds in rounds:
        assert [*speeds] == [(m, n) for m in (*tokenize.METHODS, tokenize.PREPARE) for n in (1, 2)]
        assert speeds[tokenize.PREPARE, 1] == tokenize.Speed(200, 0.5)
        assert speeds["encode_ordinary", 2] == tokenize.Speed(100)  # both processes together
    columns = [[*column.cells] for column in tokenize.table(rounds).columns]
    assert columns[0] == ["1"] * 3 + ["2"] * 3
    assert columns[1] == [*tokenize.METHODS, tokenize.PREPARE] * 2
    ratios = ["4.00 (4.00 to 4.00)"] * 2 + [""] + ["1.00 (1.00 to 1.00)"] * 2 + [""]
    assert columns[3] == ratios


def test_tiktoken_is_timed_over_all_tokens(files, monkeypatch):
    clock = iter([1.0, 3.0])
    monkeypatch.setattr(tokenize.time, "perf_counter", lambda: next(clock))
    encode = tokenize.load_tokenizer("sample").encode_ordinary
    tokens = sum(map(len, map(encode, texts_of(files[1]))))
    assert tokenize.tiktoken_rate("sample", files[1], "encode_ordinary_batch") == tokens / 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mb", "0"], "--mb 0.0 leaves nothing to measure. Use --mb 48"),
        (["--rounds", "-1"], "--rounds -1 leaves nothing to measure. Use --rounds 5"),
    ],
)
def test_flags_that_leave_nothing_to_measure_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        tokenize.parse(flags)
    assert tokenize.parse([]) == tokenize.Flags()


def test_other_tokenizers_than_those_of_tiktoken_are_refused(monkeypatch):
    monkeypatch.setattr(tokenize, "load_tokenizer", lambda name: object())
    with pytest.raises(ValueError, match=r"--tokenizer a/b is not a tokenizer of tiktoken.*Use"):
        tokenize.parse(["--tokenizer", "a/b"])
