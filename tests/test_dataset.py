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
from dataset import (
    Dataset,
    Mixture,
    check_eval,
    check_same_tokenizer,
    open_datasets,
    permute,
    striped,
)
from train import prefetch
from utils import Config, Data, Eval, Model, Train


def make_folder(folder, ids, *, shard_tokens=10**9, dtype="uint16", **fields):
    """A finished folder of shards that hold these ids."""
    writer = ShardWriter(str(folder), "shard", shard_tokens, np.dtype(dtype))
    writer.add(np.asarray(ids, dtype))
    writer.flush()
    values = {
        "subset": folder.name,
        "tokenizer": "sample",
        "tokenizer_sha256": "aa",
        "vocab_size": 1000,
        "end_of_text": 999,
        "document_rule": DOCUMENT_RULE,
        "dtype": dtype,
        "documents": 1,
        "tokens": len(ids),
        "text_bytes": 0,
        "shards": writer.shards,
        "command": "python data/prepare.py --source books",
        "settings": {},
    }
    (folder / INDEX).write_text(index_text(Manifest(**(values | fields))))
    return folder


def alone(folder, T, batch_size=1, **how):
    """A run's data from one folder."""
    return Mixture({"": Dataset(folder, T, batch_size=batch_size, **how)}, [1.0], batch_size)


@pytest.fixture
def folder(tmp_path):
    """103 tokens in shards of 7: 20 windows of 5 and two tokens over."""
    return make_folder(tmp_path / "data" / "train", np.arange(103), shard_tokens=7)


# Order of windows for seed 0, epoch 0: a run that resumes relies on it.
GOLDEN = [0, 10, 3, 7, 6, 1, 9, 8, 4, 2, 5, 11]


# The order


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_permute_is_a_bijection_for_every_size(epoch):
    for size in [*range(1, 200), 1000, 4095, 4096, 4097, 65537]:
        order = permute(np.arange(size), size, 3, epoch)
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_permute_keeps_the_order_of_earlier_runs():
    assert permute(np.arange(12), 12, 0, 0).tolist() == GOLDEN
    assert permute(np.array([5]), 12, 0, 0).tolist() == [GOLDEN[5]]


def test_permute_scatters_neighbours_and_differs_for_every_seed_and_epoch():
    size = 10_000
    orders = [permute(np.arange(size), size, *key) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 10


def test_permute_reaches_an_index_beyond_32_bits():
    size = 10**12
    few = permute(np.arange(size - 1000, size), size, 0, 0)
    assert len(np.unique(few)) == 1000
    assert few.min() >= 0
    assert few.max() < size
    assert few.max() > 2**32


# Order of blocks for 2 rows, chunks of 3 windows, seed 0, epoch 0.
GOLDEN_STRIPED = [6, 2, 7, 0, 8, 1, 10, 3, 11, 4, 9, 5, 13, 12]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 5), (4, 1), (4, 8), (3, 7), (50, 50)])
def test_striped_is_a_bijection_for_every_size(epoch, rows, length):
    for size in [*range(1, 80), 1000, 4097]:
        order = striped(np.arange(size), size, rows, length, 3, epoch)
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_striped_keeps_the_order_of_earlier_runs():
    assert striped(np.arange(14), 14, 2, 3, 0, 0).tolist() == GOLDEN_STRIPED
    assert striped(np.array([8]), 14, 2, 3, 0, 0).tolist() == [GOLDEN_STRIPED[8]]


def test_in_striped_order_each_row_of_a_batch_reads_one_chunk_to_its_end():
    rows, length, size = 4, 10, 4 * 10 * 6 + 17
    order = striped(np.arange(size), size, rows, length, 1, 0)
    full = order[: 4 * 10 * 6].reshape(6, length, rows)  # group, step, row
    chunks = full // length
    assert (chunks == chunks[:, :1]).all()
    assert sorted(chunks[:, 0].ravel()) == [*range(24)]
    assert (np.diff(chunks[:, 0].ravel()) != 1).any()
    inside = [tuple(full[g, :, r] % length) for g in range(6) for r in range(rows)]
    assert len(set(inside)) > 5 and tuple(range(length)) not in inside


def test_another_seed_or_epoch_stripes_otherwise():
    size = 4 * 10 * 50
    keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
    orders = [striped(np.arange(size), size, 4, 10, *key) for key in keys]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 0.05 * size


# Batches


@pytest.mark.parametrize("shard_tokens", [1, 3, 7, 50, 103, 200])
def test_every_token_but_the_first_and_the_last_few_is_a_target_once_per_epoch(
    tmp_path, shard_tokens
):
    folder = make_folder(tmp_path / "train", np.arange(103), shard_tokens=shard_tokens)
    data = alone(folder, 5, batch_size=4)
    assert data.windows == 20
    targets = [data.rows(step, np.arange(4))["targets"] for step in range(5)]
    np.testing.assert_array_equal(np.sort(np.concatenate(targets).ravel()), np.arange(1, 101))


def test_a_window_is_tokens_in_a_row_over_the_edges_of_shards(folder):
    batch = Dataset(folder, 16).batch(np.arange(6))
    np.testing.assert_array_equal(batch["tokens"], np.arange(96).reshape(6, 16))
    np.testing.assert_array_equal(batch["targets"], np.arange(1, 97).reshape(6, 16))


def test_the_last_window_is_complete_when_the_data_ends_with_it(tmp_path):
    data = Dataset(make_folder(tmp_path / "train", np.arange(11), shard_tokens=4), 5)
    assert data.windows == 2
    assert data.batch(np.array([1]))["targets"].tolist() == [[6, 7, 8, 9, 10]]


def test_a_batch_has_the_types_and_shapes_of_its_contract(folder):
    batch = alone(folder, 5, batch_size=8).rows(2, np.array([1, 6, 3]))
    types = {name: (array.dtype.name, array.shape) for name, array in batch.items()}
    assert types == {
        "tokens": ("int32", (3, 5)),
        "targets": ("int32", (3, 5)),
        "loss_weights": ("float32", (3, 5)),
        "segments": ("int32", (3, 5)),
    }
    assert (batch["loss_weights"] == 1).all()


def test_ids_beyond_16_bits_are_read_as_they_were_written(tmp_path):
    ids = np.array([70_000, 5, 99_999, 2**31 - 1])
    folder = make_folder(tmp_path / "train", ids, dtype="uint32", vocab_size=2**31)
    batch = Dataset(folder, 3).batch(np.array([0]))
    assert batch["targets"].tolist() == [[5, 99_999, 2**31 - 1]]


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [0, 2, 4, 6], [5, 3, 1]]])
def test_rows_do_not_depend_on_which_process_reads_them(folder, parts):
    whole = alone(folder, 5, batch_size=8, seed=1).rows(11, np.arange(8))
    for rows in parts:
        own = alone(folder, 5, batch_size=8, seed=1).rows(11, np.array(rows))
        for name, array in own.items():
            np.testing.assert_array_equal(array, whole[name][rows])


def test_a_batch_is_a_function_of_the_step_and_of_nothing_that_was_read_before(folder):
    forward = alone(folder, 5, batch_size=3, seed=2)
    seen = [forward.rows(step, np.arange(3))["tokens"] for step in range(30)]
    for step in reversed(range(30)):
        resumed = alone(folder, 5, batch_size=3, seed=2)
        np.testing.assert_array_equal(resumed.rows(step, np.arange(3))["tokens"], seen[step])


def test_a_step_may_begin_in_one_epoch_and_end_in_the_next(folder):
    data = alone(folder, 5, batch_size=3)
    firsts = [data.rows(step, np.arange(3))["tokens"][:, 0] // 5 for step in range(20)]
    windows = np.concatenate(firsts)
    first, second, third = windows[:20], windows[20:40], windows[40:]
    for epoch in (first, second, third):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(20))
    assert (first != second).any()
    assert (second != third).any()


def test_windows_of_gives_window_numbers_and_spans_gives_their_tokens(folder):
    data, rows = alone(folder, 5, batch_size=3, seed=2), np.array([2, 0])
    for step in (0, 6, 40):
        firsts = data.rows(step, rows)["tokens"][:, 0]
        np.testing.assert_array_equal(firsts, 5 * data.windows_of(step, rows))
    for number in range(20):  # tokens are their own positions, in shards of 7
        spans = data.parts[""].spans(np.array([number]))
        parts = [range(7 * i + begin, 7 * i + end) for i, begin, end in spans]
        assert [*itertools.chain(*parts)] == [*range(5 * number, 5 * number + 6)]
        assert all(parts)


def test_another_seed_gives_another_order(folder):
    one, other = (alone(folder, 5, batch_size=20, seed=seed) for seed in (0, 1))
    rows = np.arange(20)
    assert (one.rows(0, rows)["tokens"] != other.rows(0, rows)["tokens"]).any()


def test_the_order_is_selectable_and_windows_is_the_default(folder, monkeypatch):
    monkeypatch.setattr(dataset, "CHUNK_BYTES", 40)  # chunks of 4 windows
    rows = np.arange(2)
    plain, named = alone(folder, 5, batch_size=2), alone(folder, 5, batch_size=2, order="windows")
    blocks = alone(folder, 5, batch_size=2, order="blocks")
    for data in (plain, named):
        assert data.windows_of(0, rows).tolist() == permute(rows, 20, 0, 0).tolist()
    first = np.array([blocks.windows_of(step, rows) for step in range(4)])
    assert (first // 4 == first[0] // 4).all()
    steps = [blocks.rows(step, rows)["tokens"][:, 0] // 5 for step in range(10)]
    assert sorted(np.concatenate(steps)) == [*range(20)]


def test_segments_count_the_documents_that_ended_before_a_token(tmp_path):
    ids = [999, 1, 2, 999, 999, 3, 4, 5, 999, 6, 7]
    folder = make_folder(tmp_path / "train", ids)
    data = Dataset(folder, 5, segments=True)
    batch = data.batch(np.arange(2))
    assert batch["tokens"].tolist() == [[999, 1, 2, 999, 999], [3, 4, 5, 999, 6]]
    assert batch["segments"].tolist() == [[0, 1, 1, 1, 2], [0, 0, 0, 0, 1]]


def test_without_segments_a_window_is_one_document(tmp_path):
    folder = make_folder(tmp_path / "train", [999, 1, 999, 999, 2])
    assert Dataset(folder, 4).batch(np.array([0]))["segments"].tolist() == [[0, 0, 0, 0]]


def test_evaluation_windows_are_spread_evenly_and_the_same_for_every_seed(folder):
    for seed in (0, 1):
        batch = Dataset(folder, 5, seed=seed).eval_rows(np.arange(6), 6)
        assert (batch["tokens"][:, 0] // 5).tolist() == [0, 3, 6, 10, 13, 16]
    part = Dataset(folder, 5).eval_rows(np.array([4, 1]), 6)
    assert (part["tokens"][:, 0] // 5).tolist() == [13, 3]


def test_all_windows_may_be_evaluated_each_once(folder):
    batch = Dataset(folder, 5).eval_rows(np.arange(20), 20)
    np.testing.assert_array_equal(batch["tokens"], np.arange(100).reshape(20, 5))


def test_identity_depends_on_tokens_and_tokenizer_alone(tmp_path):
    def identity(name, ids, **fields):
        return read_manifest(make_folder(tmp_path / name, ids, **fields)).identity

    same = identity("a", [1, 2, 3])
    assert identity("b", [1, 2, 3], command="another") == same
    assert identity("c", [1, 2, 4]) != same
    assert identity("d", [1, 2, 3], tokenizer_sha256="bb") != same


# What is refused


def change_index(folder, **fields):
    path = folder / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_folder_without_an_index_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(ValueError, match=r"sample/train/index.json does not exist") as error:
        Dataset(tmp_path / "sample" / "train", 5)
    assert f"data/prepare.py --source python-stdlib --out {tmp_path}/sample" in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"shards": []}', '{"shards": [{"name": "x"}]}', "\ud800"]
)
def test_an_incomplete_index_is_refused(folder, text):
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"train/index.json cannot be read as the index"):
        Dataset(folder, 5)


def test_an_index_whose_token_count_is_not_that_of_its_shards_is_refused(folder):
    change_index(folder, tokens=104)
    with pytest.raises(ValueError, match="tokens is not the sum of the shards' tokens"):
        Dataset(folder, 5)


def test_another_document_rule_is_refused(folder):
    change_index(folder, document_rule="every document begins with end_of_text")
    with pytest.raises(ValueError, match=r"cannot be read as the index.*: document_rule is 'every"):
        Dataset(folder, 5)


def test_a_missing_shard_is_refused_by_name_with_its_checksum_and_the_fix(folder):
    shard = read_manifest(folder).shards[3]
    (folder / shard.name).unlink()
    with pytest.raises(ValueError, match=f"shard_003.npy is missing: .*{shard.crc32c}") as error:
        Dataset(folder, 5)
    assert (
        f"python data/prepare.py --source books --out {folder.parent} --overwrite"
        in error.value.args[0]
    )


def test_a_truncated_shard_is_refused_with_both_sizes(folder):
    path = folder / "shard_002.npy"
    path.write_bytes(path.read_bytes()[:-2])
    expected = read_manifest(folder).shards[2].crc32c
    pattern = f"shard_002.npy is truncated, with 140 bytes: .* 142 bytes with checksum {expected}"
    with pytest.raises(ValueError, match=pattern):
        Dataset(folder, 5)


def test_an_index_that_names_another_type_than_its_shards_have_is_refused(folder):
    change_index(folder, dtype="uint32")
    pattern = r"is not 7 elements of uint32 and a header: .* 142 bytes .* run .* --overwrite"
    with pytest.raises(ValueError, match=pattern):
        Dataset(folder, 5)


def test_a_vocabulary_larger_than_the_models_is_refused_with_one_that_works(folder):
    assert Dataset(folder, 5, vocab_size=1000).windows == 20
    with pytest.raises(ValueError, match=r"--model.vocab_size 999 .* Use --model.vocab_size 1000"):
        Dataset(folder, 5, vocab_size=999)


def test_a_sequence_longer_than_the_data_is_refused_with_one_that_fits(folder):
    assert Dataset(folder, 102).windows == 1
    with pytest.raises(ValueError, match=r"103 is longer .* Use --train.seq_len 102"):
        Dataset(folder, 103)


def test_more_evaluation_windows_than_there_are_is_refused(folder):
    with pytest.raises(ValueError, match=r"--eval.sequences 21 .* Use --eval.sequences 20"):
        check_eval(Dataset(folder, 5), 21)


def test_validation_data_of_another_tokenizer_is_refused(tmp_path, folder):
    other = make_folder(tmp_path / "other" / "val", np.arange(50), tokenizer_sha256="bb")
    check_same_tokenizer(Dataset(folder, 5), Dataset(folder, 5))
    with pytest.raises(ValueError, match=f"{other} was made with another tokenizer"):
        check_same_tokenizer(Dataset(folder, 5), Dataset(other, 5))


@pytest.fixture
def config(tmp_path, folder):
    val = make_folder(tmp_path / "data" / "val", np.arange(50))
    return Config(
        data=Data(train=str(folder), val=str(val), seed=4, segments=True),
        train=Train(global_batch_size=3, seq_len=5),
        eval=Eval(sequences=9),
        model=Model(vocab_size=1000),
    )


def test_the_datasets_of_a_run_follow_its_config(config, folder):
    train, val = open_datasets(config)
    expected = alone(folder, 5, batch_size=3, seed=4).rows(7, np.arange(3))
    np.testing.assert_array_equal(train.rows(7, np.arange(3))["tokens"], expected["tokens"])
    assert train.parts[""].segments and val.parts[""].segments
    assert val.windows == 9


def test_the_datasets_of_a_run_are_checked_before_it_begins(config, tmp_path):
    other = make_folder(tmp_path / "other" / "val", np.arange(50), tokenizer_sha256="bb")
    for change, pattern in (
        ({"eval": Eval(sequences=10)}, "--eval.sequences 10"),
        ({"model": Model(vocab_size=999)}, "--model.vocab_size 999"),
        ({"data": dataclasses.replace(config.data, val=str(other))}, "another tokenizer"),
    ):
        with pytest.raises(ValueError, match=pattern):
            open_datasets(dataclasses.replace(config, **change))


# Prefetching


def test_prefetch_gives_every_result_in_order():
    assert list(prefetch(lambda step: step * step, range(10), depth=3)) == [
        step * step for step in range(10)
    ]


def test_prefetch_works_ahead_by_its_depth_in_other_threads():
    calls, together = [], threading.Barrier(4)  # of the first and the three that are ahead

    def function(step):
        calls.append((step, threading.current_thread()))
        if step < 4:
            together.wait(60)

    results = prefetch(function, itertools.count(), depth=4)
    next(results)
    assert {0, 1, 2, 3} <= {step for step, _ in calls} <= {0, 1, 2, 3, 4}
    assert threading.current_thread() not in {thread for _, thread in calls}
    results.close()


def test_prefetch_raises_an_error_where_its_result_would_have_come():
    def function(step):
        if step == 2:
            raise ValueError("step 2 is broken")
        return step

    results = prefetch(function, itertools.count())
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 is broken"):
        next(results)


def test_closing_prefetch_ends_its_threads():
    before = set(threading.enumerate())
    results = prefetch(lambda step: step, itertools.count())
    next(results)
    assert set(threading.enumerate()) - before
    results.close()
    assert not set(threading.enumerate()) - before
