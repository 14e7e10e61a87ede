"""A few MB of what tests/tokens_same.py compares at length."""

import zipfile

import numpy as np
import pytest

import tokens_same
from data.manifest import read_manifest
from data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(documents, folder of their shards)"""
    documents = tokens_same.mixed(3)
    out = tmp_path_factory.mktemp("same") / "out"
    tokens_same.prepared(documents, out, tokens_same.Flags())
    return documents, out


def compared(documents, out):
    return tokens_same.compared(documents, tokens_same.read_back(out), load_tokenizer("sample"))


def test_ids_in_shards_are_those_of_tiktoken_called_directly(written):
    found = compared(*written)
    assert found.differ == []
    assert found.documents > 300 and found.in_chunks == 2 and found.beyond_latin > 1e5
    assert len(read_manifest(written[1] / "train").shards) > 1


def test_a_wrong_id_and_a_missing_document_are_seen(written):
    documents, out = written
    coded = [*tokens_same.read_back(out)]
    tokenizer = load_tokenizer("sample")
    wrong = [[*ids[:-1], ids[-1] ^ 1] if n == 7 else ids for n, ids in enumerate(coded)]
    assert tokens_same.compared(documents, wrong, tokenizer).differ == [7]
    assert tokens_same.compared(documents, coded[:-1], tokenizer).differ == [len(coded) - 1]
    assert tokens_same.compared(documents[:-1], coded, tokenizer).differ == [len(coded) - 1]


def test_one_bit_of_a_shard_is_one_document(written, tmp_path):
    documents, out = written
    shard = out / "train" / "shard_00000_001.npy"
    before = shard.read_bytes()
    ids = np.load(shard)
    [at, *_] = np.flatnonzero((ids[:-1] != 4095) & (ids[:-1] != 4094))
    ids[at] ^= 1
    np.save(shard, ids)
    assert len(compared(documents, out).differ) == 1
    shard.write_bytes(before)
    assert compared(documents, out).differ == []


def test_the_command_prints_no_difference_and_fails_where_there_is_one(capsys, monkeypatch):
    monkeypatch.setattr(tokens_same, "mixed", lambda mb, wheels: ["one", "д" * 5] * 20)
    assert tokens_same.main([]) == 0
    assert "40 documents (0 in several chunks), 0.0 MB" in capsys.readouterr().out
    monkeypatch.setattr(tokens_same, "directly", lambda tokenizer, text: [1])
    assert tokens_same.main([]) == 1
    assert "40 documents differ from tiktoken" in capsys.readouterr().out


def test_text_of_wheels_is_read_and_nothing_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "a-1.whl", "w") as wheel:
        for name, content in (("b.po", "msgstr 'я'"), ("a.py", "x = 1"), ("c.mo", "no")):
            wheel.writestr(name, content)
    assert [*tokens_same.of_wheels(tmp_path)] == ["x = 1", "msgstr 'я'"]
    texts = tokens_same.mixed(20, tmp_path)
    assert "x = 1" in texts and texts == tokens_same.mixed(20, tmp_path)
