"""What is read: stretches for a cluster, files in a bucket, and what is left out."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest

import buckets
from buckets import Prefix, Refused, Unanswered
from data import prepare, sources
from data.settings import Prepare
from data.sources import pieces, unit_pieces, units
from manifest import INDEX, read_manifest

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TEXTS = [f"{number} é漢字 " * (1 + number * 7 % 23) for number in range(60)]


@pytest.fixture
def folder(tmp_path):
    """All kinds of files, some long, some empty."""
    made = tmp_path / "source"
    made.mkdir()
    (made / "a.txt").write_text("one é")
    (made / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
    (made / "c.txt").touch()
    (made / "d.txt").write_text("".join(TEXTS))
    rows = pyarrow.table({"text": [*TEXTS, ""], "other": [b"1" * 99] * (len(TEXTS) + 1)})
    pyarrow.parquet.write_table(rows, made / "e.parquet", row_group_size=13)
    pyarrow.parquet.write_table(rows.slice(0, 9), made / "f.parquet")
    pyarrow.parquet.write_table(rows.slice(0, 0), made / "g.parquet")
    (made / "h.txt").write_text("last")
    return made


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 32)
    monkeypatch.setattr(sources, "READ_BYTES", 7)
    monkeypatch.setattr(sources, "ROWS", 4)


# --- stretches ------------------------------------------------------------------------------------


def test_a_bad_line_leaves_stretches_as_short_as_they_were(tmp_path):
    lines = [json.dumps({"text": f"line {n}"}).encode() + b"\n" for n in range(5_000)]
    for line in (lines[2_500], b"\xff\n"):
        lines[2_500] = line
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"".join(lines))
        cut = list(units(Prepare(source=str(path), out="", skip_bad=True), 1_000))
        assert max(unit.size for unit in cut) < 1_100 and len(cut) > 100


def test_a_file_that_is_empty_and_damaged_is_in_a_stretch_too(folder):
    (folder / "z.parquet").touch()
    *_, last = units(Prepare(source=str(folder), out=""), 100)
    assert last.files[-1].name == "z.parquet"
    [alone] = units(Prepare(source=str(folder), out="", glob="z.*"), 100)
    assert [file.name for file in alone.files] == ["z.parquet"]


@pytest.mark.parametrize("size", [1, 100, 700, 10**9])
def test_stretches_have_every_piece_once_and_in_order(folder, small, size):
    config = Prepare(source=str(folder), out="")
    whole, cut = list(pieces(config)), list(units(config, size))
    assert [p for unit in cut for p in unit_pieces(config, unit, None)] == whole
    assert all(a.end == b.begin for a, b in itertools.pairwise(cut))
    assert (len(cut) == 1) == (size == 10**9)
    assert size > 100 or len(cut) > 40
    for after in whole[:: max(1, len(whole) // 20)]:
        again = units(config, size, after.place)
        rest = [p for unit in again for p in unit_pieces(config, unit, after.place)]
        assert rest == whole[whole.index(after) + 1 :]


def test_a_stretch_is_about_as_long_as_was_asked_for(folder, small):
    config = Prepare(source=str(folder), out="")
    for unit in units(config, 1_000):
        text = sum(len(p.text.encode()) for p in unit_pieces(config, unit, None))
        assert text < 2_000 and unit.size < 2_500


def test_a_row_group_is_cut_into_so_many_parts_at_most(folder, monkeypatch):
    monkeypatch.setattr(sources, "GROUP_PARTS", 2)
    config = Prepare(source=str(folder / "e.parquet"), out="")
    assert len(list(units(config, 1))) == 10  # of five groups


# --- in a bucket ----------------------------------------------------------------------------------


@pytest.fixture
def url(folder, bucket):
    for path in folder.iterdir():
        Prefix(f"{bucket.url}/source").write(path.name, path.read_bytes())
    for name in ("source/.hidden", "source2/x.txt", "source/sub/x.txt", "source/sub/.h/x.txt"):
        Prefix(bucket.url).write(name, b"in the bucket")
    return f"{bucket.url}/source"


def texts(config):
    return [(document.name, document.text) for document in sources.documents(config)]


def test_files_in_a_bucket_are_read_as_those_of_a_folder(folder, url, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "x.txt").write_text("in the bucket")
    for glob in ("**/*", "*.jsonl", "**/*.txt", "sub/*"):
        there, here = (Prepare(source=s, out="", glob=glob) for s in (url, str(folder)))
        assert list(pieces(there)) == list(pieces(here))
        assert sources.source_bytes(there) == sources.source_bytes(here)
    for name in ("b.jsonl", "e.parquet"):
        one = Prepare(source=f"{url}/{name}", out="")
        assert texts(one) == texts(Prepare(source=str(folder / name), out=""))
    config = Prepare(source=url, out="")
    found = list(pieces(config))
    for number in range(0, len(found), 40):
        assert list(pieces(config, after=found[number].place)) == found[number + 1 :]


def test_of_parquet_in_a_bucket_only_the_text_is_read(bucket, tmp_path):
    rows = [str(number) * 50 for number in range(1_000)]
    table = pyarrow.table({"text": rows, "other": [b"%d" % n * 2_000 for n in range(1_000)]})
    how = {"compression": "NONE", "use_dictionary": False, "row_group_size": 500}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **how)
    content = (tmp_path / "a.parquet").read_bytes()
    Prefix(f"{bucket.url}/x").write("a.parquet", content)
    asked, read = [], Prefix.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefix, "read", lambda *given: asked.append(given) or read(*given))
        found = texts(Prepare(source=f"{bucket.url}/x", out=""))
    assert [text for _, text in found] == rows
    assert sum(end - begin for _, _, begin, end in asked) < len(content) // 5
    assert len(asked) < 10


@pytest.mark.parametrize("kind", [503, "cut response"])
def test_a_bucket_that_fails_once_is_asked_again(folder, url, bucket, kind):
    expected = texts(Prepare(source=str(folder), out="", glob="*.*"))
    fault = bucket.fault(kind, on="read", times=3)
    assert texts(Prepare(source=url, out="", glob="*.*")) == expected
    assert fault.done == 3


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("name", ["e.parquet", "b.jsonl", "d.txt"])
def test_a_bucket_that_stays_away_is_no_damage_of_the_source(
    url, bucket, monkeypatch, name, skip_bad
):
    monkeypatch.setattr(buckets, "RETRY_S", 0.3)
    config = Prepare(source=f"{url}/{name}", out="", skip_bad=skip_bad)
    for status, kind in ((503, Unanswered), (403, Refused)):
        fault = bucket.fault(status, on="read")
        with pytest.raises(kind, match=name):
            list(pieces(config))
        fault.stopped.set()


def test_a_source_in_a_bucket_is_prepared_and_known_by_its_checksums(folder, url, tmp_path):
    how = ["--val-share", "0", "--workers", "1", "--glob", "*.*"]
    for source, out in ((url, "a"), (folder, "b")):
        prepare.main(["--source", str(source), "--out", str(tmp_path / out), *how])
    a, b = (read_manifest(tmp_path / out / "train") for out in ("a", "b"))
    assert a.identity == b.identity and a.documents == b.documents
    Prefix(url).write("a.txt", b"two!!!")
    with pytest.raises(ValueError, match="was made with another files_sha256"):
        prepare.main(["--source", url, "--out", str(tmp_path / "a"), *how])


def test_a_prefix_without_files_is_refused(bucket):
    with pytest.raises(ValueError, match=r"holds no file .*either in a bucket"):
        list(pieces(Prepare(source=f"{bucket.url}/nothing", out="")))


# --- what is left out -----------------------------------------------------------------------------


@pytest.fixture
def bad(tmp_path):
    """With what is left out of it."""
    made = tmp_path / "bad"
    made.mkdir()
    (made / "a.jsonl").write_bytes(
        b'{"text": "a1"}\n{"text"\n[]\n{"text": 1}\n{"text": "\xff"}\n{"text": "a2"}\n'
    )
    (made / "b.txt").write_bytes(b"b" * 100 + b"\xff")
    (made / "c.txt").write_text("c")
    (made / "d.parquet").write_bytes(b"words")
    table = pyarrow.table({"text": [f"{number:04} words" for number in range(600)]})
    how = {"compression": "NONE", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, made / "e.parquet", row_group_size=200, **how)
    whole = (made / "e.parquet").read_bytes()
    (made / "e.parquet").write_bytes(whole.replace(b"0300 words", b"0300 wordr"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["f1", None]}), made / "f.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"other": ["g"]}), made / "g.parquet")
    return made, {
        "Parquet files that cannot be read": 1,
        "Parquet files without the column of text": 1,
        "Parquet row groups that cannot be read": 1,
        "files that are not UTF-8": 1,
        "lines that are no JSON": 2,
        "rows without text": 3,
    }


KEPT = ["a1", "a2", "c", *(f"{n:04} words" for n in [*range(200), *range(400, 600)]), "f1"]


@pytest.mark.parametrize("size", [1, 300, 10**9])
def test_what_is_bad_is_left_out_also_of_stretches(bad, monkeypatch, size):
    monkeypatch.setattr(sources, "ROWS", 64)
    folder, left_out = bad
    config = Prepare(source=str(folder), out="", skip_bad=True)
    found = list(pieces(config))
    assert [piece.text for piece in found if not piece.left_out] == KEPT
    kinds = [piece.left_out for piece in found if piece.left_out]
    assert {kind: kinds.count(kind) for kind in kinds} == left_out
    cut = [p for unit in units(config, size) for p in unit_pieces(config, unit, None)]
    assert cut == found
    for number, piece in enumerate(found, start=1):
        assert list(pieces(config, after=piece.place)) == found[number:]


def test_what_is_left_out_is_told_and_in_the_manifest_and_known_again(bad, tmp_path, capsys):
    folder, left_out = bad
    how = ["--source", str(folder), "--out", str(tmp_path / "out"), "--val-share", "0.3"]
    with pytest.raises(ValueError, match=r"a.jsonl:2 is not a line of JSON.*--skip-bad"):
        prepare.main(how)
    prepare.main([*how, "--skip-bad", "--overwrite"])
    told = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
    assert f"left out: {told}\n" in capsys.readouterr().out
    for split in ("train", "val"):
        manifest = read_manifest(tmp_path / "out" / split)
        assert manifest.settings["left_out"] == left_out
        assert manifest.command.endswith("--skip-bad")
    prepare.main([*how, "--skip-bad"])
    assert "already prepared" in capsys.readouterr().out


def test_a_source_of_which_nothing_is_left_is_refused_with_what_was_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 3)
    how = ["--source", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--skip-bad"]
    with pytest.raises(ValueError, match=r"no document .* \(3 rows without text left out\)"):
        prepare.main(how)
    assert not list((tmp_path / "out").rglob(INDEX))


# --- the odd --------------------------------------------------------------------------------------


def test_a_document_longer_than_a_shard_is_written_over_several(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 3_000)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("end")
    how = ["--source", str(tmp_path), "--glob", "*.txt", "--val-share", "0"]
    prepare.main([*how, "--out", str(tmp_path / "out"), "--shard-tokens", "500"])
    manifest = read_manifest(tmp_path / "out" / "train")
    assert manifest.documents == 2 and len(manifest.shards) > 5
