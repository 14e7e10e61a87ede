from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tokenize
from benchmarks.tokenize import Round


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """40 of 60 texts as JSON lines."""
    out, folder = tmp_path_factory.mktemp("lines"), tmp_path_factory.mktemp("texts")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"def f{number}():\n    return 'é 漢字'\n" * 50)
    (folder / "03.txt").write_text("")
    size = (folder / "00.txt").stat().st_size
    flags = tokenize.Flags(source=str(folder), mb=40 * size / 1e6)
    assert 40 * size <= tokenize.write_text(flags, out / "text.jsonl") < 41 * size
    return out / "text.jsonl"


def token_count(file):
    encode = tokenize.load_tokenizer("sample").encode_ordinary
    return sum(map(len, map(encode, tokenize.read_text(file))))


def test_the_text_is_the_beginning_of_the_source_without_empty_documents(file):
    texts = tokenize.read_text(file)
    assert len(texts) == 40 and texts[3].startswith("def f4()")


def test_installed_packages_follow_the_standard_library():
    found = tokenize.texts("")
    library = [*tokenize.texts(tokenize.STDLIB)]
    assert [next(found) for _ in library] == library
    path = min(Path(np.__file__).parents[1].rglob("*.py"))
    assert next(found) == path.read_text()


def test_the_preparation_makes_every_token_and_leaves_no_files(file):
    before = sorted(file.parent.iterdir())
    tokens, seconds = tokenize.prepare("sample", file, 2)
    assert tokens == token_count(file) and seconds > 0
    assert sorted(file.parent.iterdir()) == before


def test_tiktoken_is_timed_over_all_tokens(file, monkeypatch):
    clock = iter([1.0, 3.0])
    monkeypatch.setattr(tokenize.time, "perf_counter", lambda: next(clock))
    assert tokenize.tiktoken_rate("sample", file) == token_count(file) / 2


def test_the_start_of_a_preparation_is_not_part_of_its_speed(file, tmp_path, monkeypatch):
    seconds = {"short.jsonl": 1.0, file.name: 3.0}
    monkeypatch.setattr(tokenize, "prepare", lambda _, f, workers: (100, seconds[f.name]))
    monkeypatch.setattr(tokenize, "tiktoken_rate", lambda *_: 50.0)
    with ThreadPoolExecutor(2) as pool:
        found = tokenize.measure(tokenize.Flags(), tmp_path / file.name, pool, 2)
        assert found == Round(100.0, 50.0, 1.0)  # both processes of tiktoken together
        seconds["short.jsonl"] = 2.0
        with pytest.raises(ValueError, match=r"the start takes 2.0 of the 3.0 s .*--mb 48"):
            tokenize.measure(tokenize.Flags(), tmp_path / file.name, pool, 2)


def test_ratios_are_within_a_round():
    rounds = {1: [Round(1e6, 2e6, 0.5), Round(4e6, 2e6, 0.5), Round(2e6, 2e6, 0.5)]}
    [ratio] = tokenize.table(rounds).columns[3].cells
    assert ratio == "1.00 (0.50 to 2.00)"


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
