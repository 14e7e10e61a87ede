"""A few MB of what tests/tokens_same.py compares at length."""

import zipfile

import tokens_same
from data.manifest import read_manifest
from data.tokenizer import load_tokenizer


def test_ids_in_shards_are_those_of_tiktoken_and_any_difference_is_seen(tmp_path):
    with zipfile.ZipFile(tmp_path / "a-1.whl", "w") as wheel:
        for name, content in (("b.po", "msgstr 'я'"), ("a.py", "x = 1"), ("c.mo", "no")):
            wheel.writestr(name, content)
    assert [*tokens_same.of_wheels(tmp_path)] == ["x = 1", "msgstr 'я'"]
    documents = tokens_same.mixed(3)
    assert len(documents) > 300
    coded = tokens_same.prepared_ids(documents, tmp_path / "out", "sample")
    assert len(read_manifest(tmp_path / "out" / "train").shards) > 1
    tokenizer, last = load_tokenizer("sample"), len(documents) - 1
    assert tokens_same.differing(documents, coded, tokenizer) == []
    assert tokens_same.differing(documents, coded[:-1], tokenizer) == [last]
    assert tokens_same.differing(documents[:-1], coded, tokenizer) == [last]
    coded[7][0] ^= 1
    assert tokens_same.differing(documents, coded, tokenizer) == [7]
