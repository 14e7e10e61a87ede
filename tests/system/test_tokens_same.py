"""A few MB of what tests/tokens_same.py compares at length."""

import re
import subprocess
import sys
import zipfile

import numpy as np

import tokens_same
from conftest import ROOT
from data.manifest import read_manifest
from data.tokenizer import load_tokenizer


def test_ids_in_shards_are_those_of_tiktoken_and_any_difference_is_seen(tmp_path):
    tokenizer, documents, out = load_tokenizer("sample"), tokens_same.mixed(3), tmp_path / "out"
    tokens_same.write_shards(documents, out, tokens_same.Flags())
    coded = [*tokens_same.read_back(out)]
    summary, differ = tokens_same.compared(documents, coded, tokenizer)
    assert differ == [] and "(2 in several chunks), " in summary and len(documents) > 300
    assert float(re.search(r"\(([\d.]+) MB of letters beyond", summary)[1]) > 0.1
    assert len(read_manifest(out / "train").shards) > 1
    last = len(coded) - 1
    assert tokens_same.compared(documents, coded[:-1], tokenizer)[1] == [last]
    assert tokens_same.compared(documents[:-1], coded, tokenizer)[1] == [last]
    shard = out / "train" / "shard_00000_001.npy"
    ids, ends = np.load(shard), tokenizer.eot_token
    [at, *_] = np.flatnonzero((ids[:-1] != ends) & (ids[:-1] ^ 1 != ends))
    ids[at] ^= 1  # one bit is one document
    np.save(shard, ids)
    assert len(tokens_same.compared(documents, tokens_same.read_back(out), tokenizer)[1]) == 1


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


def test_a_preparation_refuses_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", tmp_path, "--out", "out"]
    refused = subprocess.run([*command, "--val-share", "2"], capture_output=True, text=True)
    line = "error: --val-share 2.0 is not a share: expected 0 to 1. Use --val-share 0.05.\n"
    assert (refused.returncode, refused.stderr) == (2, line)
