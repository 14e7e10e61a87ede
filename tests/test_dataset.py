"""Batches by value: tokens of the small folders here are their own positions in the data."""

import dataclasses
import itertools
import json
import threading

import numpy as np
import pytest

import dataset
from data.manifest import DOCUMENT_RULE, INDEX, Manifest, index_text, read_manifest
from data.shards import ShardWriter
from dataset import Dataset, Mixture, open_datasets, permute, striped
from train import prefetch
from utils import Config, Data, Eval, Model, Train


def make_folder(folder, ids, *, shard_tokens=10**9, dtype="uint16", weights=None, **fields):
    """A finished folder of shards that hold these ids, with loss weights if they are given."""
    writer = ShardWriter(str(folder), "shard", shard_tokens, np.dtype(dtype), weights is not None)
    of_each = itertools.repeat(None) if weights is None else weights
    for each, weight in zip(ids, of_each, strict=False):
        writer.add(np.array([each]), weight)
    writer.flush()
    of_tokenizer = ("sample", "aa", 1000, 999, DOCUMENT_RULE)
    of_shards = (dtype, 1, len(ids), 0, writer.shards, "python data/prepare.py --source books", {})
    manifest = Manifest(folder.name, *of_tokenizer, *of_shards)
    (folder / INDEX).write_text(index_text(dataclasses.replace(manifest, **fields)))
    return folder


def alone(folder, T, batch_size=1, **how):
    """A run's data from one folder."""
    return Mixture({"": Dataset(folder, T, batch_size=batch_size, **how)}, [1.0], batch_size)


@pytest.fixture
def folder(tmp_path):
    """103 tokens in shards of 7: 20 windows of 5 and two tokens over."""
    return make_folder(tmp_path / "data" / "train", np.arange(103), shard_tokens=7)


# For seed 0, epoch 0: a run that resumes relies on it. STRIPED  2 rows, blocks of 3 windows.
PERMUTED = [0, 10, 3, 7, 6, 1, 9, 8, 4, 2, 5, 11]
STRIPED = [6, 2, 7, 0, 8, 1, 10, 3, 11, 4, 9, 5, 13, 12]


@pytest.mark.parametrize("rows, length", [(0, 0), (1, 1), (1, 5), (4, 1), (3, 7), (50, 50)])
def test_both_orders_are_bijections_for_every_size(rows, length):
    for epoch, size in itertools.product((0, 7), [*range(1, 80), 1000, 4095, 4096, 4097]):
        how, index = ((rows, length) if rows else ()), np.arange(size)
        order = (striped if rows else permute)(index, size, *how, 3, epoch)
        np.testing.assert_array_equal(np.sort(order), index)


def test_both_keep_the_order_of_earlier_runs_and_permute_reaches_beyond_32_bits():
    assert permute(np.arange(12), 12, 0, 0).tolist() == PERMUTED
    assert permute(np.array([5]), 12, 0, 0).tolist() == [PERMUTED[5]]
    assert striped(np.arange(14), 14, 2, 3, 0, 0).tolist() == STRIPED
    assert striped(np.array([8]), 14, 2, 3, 0, 0).tolist() == [STRIPED[8]]
    few = permute(np.arange(10**12 - 1000, 10**12), 10**12, 0, 0)
    assert len(np.unique(few)) == 1000 and few.min() >= 0 and 2**32 < few.max() < 10**12


def test_orders_scatter_neighbours_and_differ_for_every_seed_and_epoch():
    keys, index = [(0, 0), (0, 1), (1, 0), (1, 1)], np.arange(10_000)
    orders = [permute(index, 10_000, *key) for key in keys]
    for order in orders:
        assert abs(np.corrcoef(order, index)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    stripes = [striped(index[:2000], 2000, 4, 10, *key) for key in keys]
    for of_all, most in ((orders, 10), (stripes, 100)):
        for one, other in itertools.combinations(of_all, 2):
            assert (one == other).sum() < most


def test_in_striped_order_each_row_of_a_batch_reads_one_block_to_its_end():
    rows, length, size = 4, 10, 4 * 10 * 6 + 17
    full = striped(np.arange(size), size, rows, length, 1, 0)[: 4 * 10 * 6]
    full = full.reshape(6, length, rows)  # group, step, row
    blocks = full // length
    assert (blocks == blocks[:, :1]).all()
    assert sorted(blocks[:, 0].ravel()) == [*range(24)]
    assert (np.diff(blocks[:, 0].ravel()) != 1).any()
    inside = [tuple(full[g, :, r] % length) for g in range(6) for r in range(rows)]
    assert len(set(inside)) > 5 and tuple(range(length)) not in inside


def test_the_order_is_selectable_and_windows_is_the_default(folder, monkeypatch):
    monkeypatch.setattr(dataset, "PAGE_BYTES", 40)  # blocks of 4 windows
    rows, how = np.arange(2), {"batch_size": 2, "seed": 1}
    for data in (alone(folder, 5, **how), alone(folder, 5, order="windows", **how)):
        assert data.windows_of(0, rows).tolist() == permute(rows, 20, 1, 0).tolist()
    blocks = alone(folder, 5, order="blocks", **how)
    steps = [blocks.rows(step, rows)["tokens"][:, 0] // 5 for step in range(10)]
    assert (np.array(steps[:4]) // 4 == steps[0] // 4).all()
    assert sorted(np.concatenate(steps)) == [*range(20)]


def test_windows_are_tokens_in_a_row_over_the_edges_of_shards(folder):
    for T, windows in ((16, 6), (6, 17)):  # the last one of 17 ends with the data
        data = Dataset(folder, T)
        batch = data.batch(np.arange(windows))
        assert data.windows == windows
        np.testing.assert_array_equal(batch["tokens"].ravel(), np.arange(T * windows))
        np.testing.assert_array_equal(batch["targets"].ravel(), np.arange(T * windows) + 1)


def test_a_batch_has_the_types_and_shapes_of_its_contract(folder, tmp_path):
    batch = alone(folder, 5, batch_size=8).rows(2, np.array([1, 6, 3]))
    ids = dict.fromkeys(("tokens", "targets", "segments"), ((3, 5), "int32"))
    found = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert found == ids | {"loss_weights": ((3, 5), "float32")}
    assert (batch["loss_weights"] == 1).all() and (batch["segments"] == 0).all()
    large = [70_000, 5, 99_999, 2**31 - 1]
    folder = make_folder(tmp_path / "large", large, dtype="uint32", vocab_size=2**31)
    assert Dataset(folder, 3).batch(np.array([0]))["targets"].tolist() == [large[1:]]


def test_a_batch_is_a_function_of_the_step_and_of_neither_processes_nor_reads_before(folder):
    forward = alone(folder, 5, batch_size=8, seed=2)
    seen = [forward.rows(step, np.arange(8)) for step in range(12)]
    for step in reversed(range(12)):
        resumed = alone(folder, 5, batch_size=8, seed=2)
        windows = 5 * resumed.windows_of(step, np.arange(8))
        np.testing.assert_array_equal(seen[step]["tokens"][:, 0], windows)
        for rows in ([7], [0, 2, 4, 6], [5, 3, 1]):
            for name, array in resumed.rows(step, np.array(rows)).items():
                np.testing.assert_array_equal(array, seen[step][name][rows])


def test_a_step_may_begin_in_one_epoch_and_end_in_the_next(folder):
    data = alone(folder, 5, batch_size=3)
    steps = [data.rows(step, np.arange(3))["tokens"][:, 0] // 5 for step in range(20)]
    epochs = np.concatenate(steps).reshape(3, 20)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(20), (3, 1)))
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()


def test_segments_count_the_documents_that_ended_before_a_token(tmp_path):
    folder = make_folder(tmp_path / "train", [999, 1, 2, 999, 999, 3, 4, 5, 999, 6, 7])
    batch = Dataset(folder, 5, segments=True).batch(np.arange(2))
    assert batch["tokens"].tolist() == [[999, 1, 2, 999, 999], [3, 4, 5, 999, 6]]
    assert batch["segments"].tolist() == [[0, 1, 1, 1, 2], [0, 0, 0, 0, 1]]
    assert not Dataset(folder, 5).batch(np.arange(2))["segments"].any()


def test_evaluation_windows_are_spread_evenly_and_the_same_for_every_seed(folder):
    def firsts(rows, count, **how):
        batch = Dataset(folder, 5, **how).eval_rows(np.array(rows), count)
        return (batch["tokens"][:, 0] // 5).tolist()

    assert firsts(range(6), 6) == firsts(range(6), 6, seed=1) == [0, 3, 6, 10, 13, 16]
    assert firsts([4, 1], 6) == [13, 3] and firsts(range(20), 20) == [*range(20)]


def test_identity_depends_on_tokens_and_tokenizer_alone(tmp_path):
    def identity(name, ids, **fields):
        return read_manifest(make_folder(tmp_path / name, ids, **fields)).identity

    same = identity("a", [1, 2, 3])
    assert identity("b", [1, 2, 3], command="another") == same
    assert same not in (identity("c", [1, 2, 4]), identity("d", [1, 2, 3], tokenizer_sha256="bb"))


@pytest.mark.parametrize(
    "text, message",
    [
        *((text, "") for text in ("{", "[]", "{}", '{"shards": [{"name": "x"}]}', "\ud800")),
        ({"tokens": 104}, "tokens is not the sum of the shards' tokens"),
        ({"dtype": "uint32"}, r"is not 7 elements of uint32 and a header: .* 142 bytes .* --overw"),
    ],
)
def test_an_index_that_is_incomplete_or_contradicts_itself_is_refused(folder, text, message):
    path = folder / INDEX
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    index = "" if "header" in message else "train/index.json cannot be read as the index.*"
    with pytest.raises(ValueError, match=index + message):
        Dataset(folder, 5)


def test_missing_and_truncated_files_are_refused_by_name_with_the_fix(folder, tmp_path):
    path, crc32c = folder / "shard_002.npy", read_manifest(folder).shards[2].crc32c
    path.write_bytes(path.read_bytes()[:-2])
    sizes = f"truncated, with 140 bytes: .* 142 bytes with checksum {crc32c}"
    with pytest.raises(ValueError, match=f"shard_002.npy is {sizes}"):
        Dataset(folder, 5)
    path.unlink()
    fix = f"{crc32c}.*python data/prepare.py --source books --out {folder.parent} --overwrite"
    with pytest.raises(ValueError, match=f"shard_002.npy is missing: .*{fix}"):
        Dataset(folder, 5)
    fix = f"data/prepare.py --source python-stdlib --out {tmp_path}/sample"
    with pytest.raises(ValueError, match=f"sample/train/index.json does not exist.*{fix}"):
        Dataset(tmp_path / "sample" / "train", 5)


def test_the_datasets_of_a_run_follow_its_config_and_are_checked_before_it_begins(folder, tmp_path):
    val = make_folder(tmp_path / "data" / "val", np.arange(50))
    config = Config(
        data=Data(train=str(folder), val=str(val), seed=4, segments=True),
        train=Train(global_batch_size=3, seq_len=5),
        eval=Eval(sequences=9),
        model=Model(vocab_size=1000),
    )
    assert Dataset(folder, 102, vocab_size=1000).windows == 1
    train, val = open_datasets(config)
    expected = alone(folder, 5, batch_size=3, seed=4).rows(7, np.arange(3))
    np.testing.assert_array_equal(train.rows(7, np.arange(3))["tokens"], expected["tokens"])
    assert train.parts[""].segments and val.parts[""].segments and val.windows == 9
    other = make_folder(tmp_path / "other" / "val", np.arange(50), tokenizer_sha256="bb")
    elsewhere = dataclasses.replace(config.data, val=str(other))
    for change, pattern in (
        ({"eval": Eval(sequences=10)}, "--eval.sequences 10 .* Use --eval.sequences 9"),
        ({"model": Model(vocab_size=999)}, r"_size 999 .* Use --model.vocab_size 1000"),
        ({"train": Train(seq_len=103)}, r"103 is longer .* Use --train.seq_len 102"),
        ({"data": elsewhere}, f"{other} was made with another tokenizer"),
    ):
        with pytest.raises(ValueError, match=pattern):
            open_datasets(dataclasses.replace(config, **change))


def test_prefetch_gives_results_in_order_and_an_error_where_its_result_would_have_come():
    results = prefetch(lambda step: 12 // (7 - step), itertools.count())
    assert [*itertools.islice(results, 7)] == [1, 2, 2, 3, 4, 6, 12]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_prefetch_works_ahead_by_its_depth_in_threads_that_end_when_it_is_closed():
    before, calls = set(threading.enumerate()), {}
    together, last = threading.Barrier(4), threading.Event()

    def function(step):
        calls[step] = threading.current_thread()
        if step < 4:
            together.wait(60)  # four threads are at work
        if step == 4:
            last.set()

    results = prefetch(function, itertools.count(), depth=4)
    next(results)
    assert last.wait(60)  # while the first result is used, the four after it are computed
    assert calls.keys() == {0, 1, 2, 3, 4} and not before & {*calls.values()}
    results.close()
    assert not set(threading.enumerate()) - before
