"""A preparation that is killed goes on, and ends with the bits of one that was not."""

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from conftest import ROOT
from data import prepare, sources
from data.settings import Prepare
from data.shards import PROGRESS, Growing
from data.sources import pieces
from manifest import BLOCK_BYTES, INDEX, read_manifest
from processes import STRUCK

SHARD = 20_000
KILLS = 20
# Kills itself when this kind of work is done for the n-th time; tells how many tokens it made.
CHILD = """
import os, signal, sys
from data import out, prepare, shards

kind, number, log, *arguments = sys.argv[1:]
"""
CHILD += STRUCK
CHILD += """
def logged(tokenizer, batch, encode=prepare.encode):
    coded = encode(tokenizer, batch)
    with open(log, "a") as file:
        file.write(f"{sum(len(piece.ids) for piece in coded)}\\n")
    return coded

prepare.encode = logged
shards.ShardWriter.add = struck("piece", shards.ShardWriter.add)
shards.Growing.finish = struck("shard", shards.Growing.finish)
shards.Growing.sync = struck("sync", shards.Growing.sync)
shards.Growing.append = struck("append", shards.Growing.append)
prepare.Work.store = struck("store", prepare.Work.store)
out.Out.finish = struck("index", out.Out.finish)
prepare.main(arguments)
"""
# How often a kind may be done before the kill; a life does each about so often.
KINDS = {"piece": 250, "shard": 16, "sync": 50, "append": 250, "store": 16, "index": 2, "none": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Documents of at most 4 KB, of the project's own files; 30 shards and more."""
    folder = tmp_path_factory.mktemp("resume") / "source"
    folder.mkdir()
    files = sorted([*ROOT.glob("*.py"), *ROOT.glob("tests/*.py")])
    text = "".join(path.read_text() for path in files)
    text = (text * (1 + 2_400_000 // len(text)))[:2_400_000]
    rows = [text[i : i + 4_000] for i in range(0, len(text), 4_000)]
    for name, part in (("a", rows[:200]), ("b", rows[200:])):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def flags(source, out):
    where = "--source", str(source), "--out", str(out), "--workers", "1"
    return [*where, "--val-share", "0.2", "--shard-tokens", str(SHARD)]


def files_of(out):
    """All but the lock, which stays as an empty file."""
    files = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "lock")
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(source):
    prepare.main(flags(source, source.parent / "whole"))
    return files_of(source.parent / "whole")


def live(kind, number, log, arguments):
    command = [sys.executable, "-c", CHILD, kind, str(number), str(log), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_after_any_kill_the_bits_are_those_of_one_that_was_not_killed(source, whole, tmp_path):
    """And what is tokenized twice is a shard at most for each."""
    names = [name for name in whole if name.endswith(".npy")]
    assert len(names) >= 30 and len([n for n in names if n.startswith("val")]) > 3
    folders = [source.parent / "whole" / split for split in ("train", "val")]
    tokens = sum(read_manifest(folder).tokens for folder in folders)
    chance, kills, preparations = random.Random(0), 0, 0
    while kills < KILLS:
        preparations += 1
        out, log, here = tmp_path / f"{preparations}", tmp_path / f"{preparations}.log", 0
        while True:
            kind = [*KINDS][kills % (len(KINDS) - 1)] if kills < KILLS else "none"
            done = live(kind, chance.randint(1, KINDS[kind]), log, flags(source, out))
            if done.returncode != -signal.SIGKILL:
                break
            kills, here = kills + 1, here + 1
        assert done.returncode == 0, done.stderr
        assert files_of(out) == whole
        assert sum(map(int, log.read_text().split())) <= tokens + here * SHARD


def test_workers_end_with_a_preparation_that_is_killed(source, tmp_path):
    command = [sys.executable, ROOT / "data" / "prepare.py", "--source", "python-stdlib"]
    process = subprocess.Popen([*command, "--out", tmp_path, "--workers", "2"])
    children, end = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 60
    workers = []
    while len(workers) < 2 or not list(tmp_path.rglob("*.partial")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
        workers = children.read_text().split()
    process.kill()
    process.wait()
    while any(Path("/proc", worker).exists() for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.02)


# --- where a source goes on -----------------------------------------------------------------------

TEXTS = ["one", "", "two é 漢字 " * 9, "x" * 70, "   ", "last"]


def text_files(folder):
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)


def json_lines(folder):
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("\n" + "".join(lines[:4]))
    (folder / "b.jsonl").write_text("".join(lines[4:]))


def parquet(folder):
    table = pyarrow.table({"text": TEXTS, "other": [b"1"] * len(TEXTS)})
    pyarrow.parquet.write_table(table.slice(0, 5), folder / "a.parquet", row_group_size=2)
    pyarrow.parquet.write_table(table.slice(5), folder / "b.parquet")


@pytest.mark.parametrize("kind", [text_files, json_lines, parquet])
def test_a_source_goes_on_behind_every_piece(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 32)
    monkeypatch.setattr(sources, "READ_BYTES", 7)
    monkeypatch.setattr(sources, "ROWS", 2)
    kind(tmp_path)
    config = Prepare(source=str(tmp_path), out="")
    found = list(pieces(config))
    assert [d.text for d in sources.documents(config)] == [text for text in TEXTS if text]
    assert max(len(piece.text) for piece in found) == 32
    assert sum(p.source_bytes for p in found) <= sources.source_bytes(config)
    for number, piece in enumerate(found, start=1):
        assert list(pieces(config, after=piece.place)) == found[number:]


def test_lines_that_were_read_are_not_read_again(tmp_path, monkeypatch):
    json_lines(tmp_path)
    config = Prepare(source=str(tmp_path), out="")
    places, row, seen = [p.place for p in pieces(config)], sources.json_row, []
    monkeypatch.setattr(sources, "json_row", lambda line, at: seen.append(at) or row(line, at))
    list(pieces(config, after=places[2]))
    assert seen == [f"{tmp_path}/a.jsonl:5", f"{tmp_path}/b.jsonl:1", f"{tmp_path}/b.jsonl:2"]


def test_a_column_of_text_that_is_not_there_is_said_with_those_that_are(tmp_path):
    parquet(tmp_path)
    with pytest.raises(
        ValueError, match=r"a.parquet has no column of text called 'content'; .*: text"
    ):
        list(pieces(Prepare(source=str(tmp_path), out="", text_field="content")))


@pytest.mark.parametrize("harm", ["cut", "flipped", "text", "empty"])
def test_parquet_that_is_damaged_is_said_in_one_line(tmp_path, harm):
    path = tmp_path / "a.parquet"
    rows = pyarrow.table({"text": [f"{number} some words" for number in range(9_000)]})
    # As the text stands, so that a flipped bit is a word like another.
    how = {"compression": "NONE", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(rows, path, **how)
    whole = path.read_bytes()
    flipped = whole.replace(b"4000 some words", b"4000 some wordr")
    path.write_bytes({"cut": whole[:-9], "flipped": flipped, "text": b"words", "empty": b""}[harm])
    with pytest.raises(ValueError, match=r"a.parquet cannot be read as Parquet") as caught:
        list(pieces(Prepare(source=str(path), out="")))
    assert "\n" not in str(caught.value)


# --- what a preparation goes on with --------------------------------------------------------------


def begun(source, out, monkeypatch, *more):
    """One that is stopped after some shards."""
    with monkeypatch.context() as patch:
        store, done = prepare.Work.store, itertools.count(1)

        def stopped(work):
            store(work)
            if next(done) == 5:
                raise KeyboardInterrupt

        patch.setattr(prepare.Work, "store", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare.main([*flags(source, out), *more])
    assert (out / PROGRESS).exists() and not list(out.rglob(INDEX))


def test_one_that_was_begun_with_other_settings_is_not_replaced_without_being_asked(
    source, whole, tmp_path, monkeypatch
):
    begun(source, tmp_path, monkeypatch)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"json was made with another val_share.*overwrite"):
        prepare.main([*flags(source, tmp_path), "--val-share", "0.3"])
    assert files_of(tmp_path) == before
    prepare.main([*flags(source, tmp_path), "--overwrite"])
    assert files_of(tmp_path) == whole


@pytest.mark.parametrize("harm", ["missing", "cut", "unfinished"])
def test_what_is_not_as_it_was_left_is_not_gone_on_with(source, tmp_path, monkeypatch, harm):
    begun(source, tmp_path, monkeypatch)
    [partial] = (tmp_path / "train").glob("*.partial")
    harmed = partial if harm == "unfinished" else tmp_path / "train" / "shard_00000.npy"
    if harm == "missing":
        harmed.unlink()
    else:
        harmed.write_bytes(harmed.read_bytes()[:130])
    with pytest.raises(ValueError, match=f"{harmed.name} is not as progress.json says.*overwrite"):
        prepare.main(flags(source, tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "null", "\xff", '{"made": 1}', '{"splits": {}}'])
def test_progress_that_is_none_is_said_in_one_line(source, tmp_path, monkeypatch, text):
    begun(source, tmp_path, monkeypatch)
    state = tmp_path / PROGRESS
    for given in (text, json.dumps({"made": json.loads(state.read_text())["made"], "place": [0]})):
        state.write_bytes(given.encode("latin-1"))
        before = files_of(tmp_path)
        with pytest.raises(ValueError, match=r"progress.json cannot be read .*overwrite"):
            prepare.main(flags(source, tmp_path))
        assert files_of(tmp_path) == before


def test_one_that_is_begun_anew_does_not_go_on_with_what_was_there(
    source, whole, tmp_path, monkeypatch
):
    begun(source, tmp_path, monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(prepare.Work, "run", None)
        prepare.main([*flags(source, tmp_path), "--overwrite"])
    prepare.main(flags(source, tmp_path))
    assert files_of(tmp_path) == whole


def test_a_folder_is_finished_only_when_both_are(source, whole, tmp_path, monkeypatch):
    assert live("index", 1, tmp_path / "log", flags(source, tmp_path / "a")).returncode < 0
    assert (tmp_path / "a" / "train" / INDEX).exists()
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(prepare.Work, "run", None)
        prepare.main(flags(source, tmp_path / "a"))
    assert not list(tmp_path.rglob(INDEX))
    prepare.main(flags(source, tmp_path / "a"))
    assert files_of(tmp_path / "a") == whole


def test_a_document_that_was_begun_is_ended_though_there_are_enough_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 5_000)
    (tmp_path / "a.txt").write_text("some words " * 40_000)
    (tmp_path / "b.txt").write_text("not read")
    most = "--max-tokens", "10", "--val-share", "0", "--glob", "*.txt"
    begun(tmp_path, tmp_path / "a", monkeypatch, *most)
    for name in ("a", "b"):
        prepare.main([*flags(tmp_path, tmp_path / name), *most])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert read_manifest(tmp_path / "a" / "train").documents == 1


def test_a_file_that_goes_on_is_cut_where_it_was(tmp_path):
    file = Growing(tmp_path / "x.npy", np.dtype(np.uint16))
    file.append(np.arange(9))
    file.close()
    file = Growing(tmp_path / "x.npy", np.dtype(np.uint16), kept=3)
    file.append(np.array([7]))
    shard = file.finish(BLOCK_BYTES)
    np.save(tmp_path / "y.npy", np.array([0, 1, 2, 7], np.uint16))
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "y.npy").read_bytes()
    assert (shard.tokens, shard.bytes) == (4, (tmp_path / "y.npy").stat().st_size)


def test_it_is_told_where_one_goes_on(source, whole, tmp_path, monkeypatch, capsys):
    begun(source, tmp_path, monkeypatch)
    capsys.readouterr()
    prepare.main(flags(source, tmp_path))
    assert f"{tmp_path}: goes on after " in capsys.readouterr().out
    assert files_of(tmp_path) == whole
    prepare.main(flags(source, tmp_path))
    assert "already prepared" in capsys.readouterr().out


def test_max_tokens_ends_one_that_was_stopped_where_it_ends_another(source, tmp_path, monkeypatch):
    most = "--max-tokens", "110000"
    begun(source, tmp_path / "a", monkeypatch, *most)
    for name in ("a", "b"):
        prepare.main([*flags(source, tmp_path / name), *most])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_conversations_and_their_weights_go_on_too(tmp_path, monkeypatch):
    rows = [{"prompt": f"{n} " * 40, "answer": f"{n + 1} " * (n % 60)} for n in range(1, 400)]
    rows = [row for row in rows if row["answer"]]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = "--chat", "--shard-tokens", "5000"
    begun(tmp_path / "chat.jsonl", tmp_path / "a", monkeypatch, *more)
    for name in ("a", "b"):
        prepare.main([*flags(tmp_path / "chat.jsonl", tmp_path / name), *more])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert len(files_of(tmp_path / "a")) > 10
