"""Mixtures. The tokens of each folder here are consecutive numbers from its BEGINS on."""

import dataclasses

import numpy as np
import pytest

import dataset
import validate
from data import show
from dataset import PERIOD, Dataset, Mixture, parse_mixture, shares
from runtime import cli
from test_dataset import alone, make_folder
from utils import Config, Data, Eval, Model, Train

SIZES = {"a": 103, "b": 53, "c": 203}  # tokens: 20, 10 and 40 windows of 5
WEIGHTS = [0.5, 0.2, 0.3]
BEGINS = {"a": 0, "b": 300, "c": 500}


@pytest.fixture
def folders(tmp_path):
    found = {}
    for name, size in SIZES.items():
        ids = BEGINS[name] + np.arange(size)
        found[name] = make_folder(tmp_path / name / "train", ids, shard_tokens=30)
        make_folder(tmp_path / name / "val", ids[:40])
    return found


def mixed(folders, batch_size=8, weights=WEIGHTS, **how):
    parts = {name: Dataset(folder, 5, **how) for name, folder in folders.items()}
    return Mixture(parts, weights, batch_size)


def named(tokens):
    """Which dataset each window is from, and its number there."""
    first = tokens[:, 0]
    which = np.where(first >= 500, "c", np.where(first >= 300, "b", "a"))
    return [(str(n), (int(x) - BEGINS[str(n)]) // 5) for n, x in zip(which, first, strict=True)]


def test_each_dataset_has_its_share_of_any_windows_in_the_order_it_has_alone(folders):
    data, rows = mixed(folders, seed=2), np.arange(8)
    found = [window for step in range(60) for window in named(data.rows(step, rows)["tokens"])]
    sources = [name for name, _ in found]
    for begin, length in ((0, 10), (13, 50), (150, 300)):
        part = sources[begin : begin + length]
        for name, weight in zip(SIZES, WEIGHTS, strict=True):
            assert abs(part.count(name) - weight * length) < 2, (begin, length, name)
    for name, folder in folders.items():
        own = [window for of, window in found if of == name]
        alone = Dataset(folder, 5, seed=2).windows_at(np.arange(len(own)))
        assert own == alone.tolist()
    again = mixed(folders, seed=2)  # a batch is a function of the step and the rows
    for step in (39, 0, 17):
        for part in (rows[:3], rows[[6, 1]]):
            windows = [found[8 * step + row] for row in part]
            assert named(again.rows(step, part)["tokens"]) == windows


def test_the_order_continues_across_the_end_of_a_period(folders):
    data, rows = mixed(folders), np.arange(8)
    step = 3 * PERIOD // 8 - 2
    used = [data._used(s) for s in (step, step + 4)]
    found = [w for s in range(step, step + 4) for w in named(data.rows(s, rows)["tokens"])]
    for (name, folder), begin, end in zip(folders.items(), *used, strict=True):
        own = [window for of, window in found if of == name]
        assert own == Dataset(folder, 5).windows_at(np.arange(begin, end)).tolist()
    assert sum(used[0]) == step * 8


def test_shares_are_whole_and_the_nearest_to_the_weights():
    for weights in ([1], [0.7, 0.3], [3, 1, 1e-4], [1, 2, 3, 5, 8]):
        counts = shares(weights)
        assert counts.sum() == PERIOD
        assert np.abs(counts - np.array(weights) / sum(weights) * PERIOD).max() < 1
    assert shares([3, 1, 1e-4]).tolist() == [49151, 16383, 2]  # 0.71 and 0.64 are rounded up


def test_progress_counts_sequences_and_epochs_and_a_message_ends_each_epoch(folders):
    data = mixed(folders)
    assert data.progress(0) == {f"data/{n}/{k}": 0 for n in SIZES for k in ("sequences", "epochs")}
    metrics = data.progress(10)
    assert sum(metrics[f"data/{name}/sequences"] for name in SIZES) == 80
    assert metrics["data/b/epochs"] == metrics["data/b/sequences"] / 10
    texts = [text for step in range(1, 16) for text in data.finished_epochs(step)]
    assert f"epoch 1 of {folders['b']} is over, of 10 windows" in texts
    for name in SIZES:
        whole = int(data.progress(15)[f"data/{name}/epochs"])
        assert len([text for text in texts if f"of {folders[name]} is over" in text]) == whole
    own = alone(folders["b"], 5, batch_size=4)
    assert [step for step in range(1, 9) if own.finished_epochs(step)] == [3, 5, 8]
    assert own.progress(5) == {}


def test_windows_have_numbers_of_their_own(folders):
    data, rows = mixed(folders), np.arange(8)
    numbers = data.windows_of(3, rows)
    assert data.windows == 70
    for number, expected in zip(numbers, named(data.rows(3, rows)["tokens"]), strict=True):
        part, own = data.dataset_of(int(number))
        assert (next(n for n, d in data.parts.items() if d is part), own) == expected
        where = show.location(part, own)
        assert where.startswith(f"tokens {5 * own % 30} to ") and part.folder in where


def test_identity_is_of_tokens_and_shares(folders):
    one = mixed(folders).identity
    assert mixed(folders).identity == one
    assert mixed(folders, weights=[5, 2, 3]).identity == one
    assert mixed(folders, weights=[0.4, 0.3, 0.3]).identity != one
    assert mixed(dict(reversed(folders.items())), weights=WEIGHTS[::-1]).identity != one


def test_an_entry_is_a_name_a_weight_and_a_folder_and_others_are_refused(folders, tmp_path):
    found = parse_mixture(["web 0.7 gs://bucket/web/", " code 3 data/my code "])
    assert found == {"web": (0.7, "gs://bucket/web"), "code": (3.0, "data/my code")}
    for text in ("", "web", "web data/web", "web 0.7", "web 0 data", "web -1 data", "web nan data"):
        with pytest.raises(ValueError, match=r"is not NAME WEIGHT FOLDER.*--data.mixture 'web 0.7"):
            parse_mixture([text])
    with pytest.raises(ValueError, match=r"'a 2 y' is not .* with a name of its own"):
        parse_mixture(["a 1 x", "a 2 y"])
    with pytest.raises(ValueError, match="gives c the weight 1e-07, which is less than one of"):
        mixed(folders, weights=[1, 1, 1e-7])
    other = make_folder(tmp_path / "d" / "train", np.arange(50), tokenizer_sha256="bb")
    with pytest.raises(ValueError, match=f"{other} was made with another tokenizer"):
        mixed(folders | {"d": other}, weights=[*WEIGHTS, 1])


def config_of(tmp_path, **data):
    texts = tuple(f"{n} {w} {tmp_path / n}" for n, w in zip(SIZES, WEIGHTS, strict=True))
    return Config(
        data=Data(mixture=texts, seed=4, **data),
        train=Train(global_batch_size=8, seq_len=5),
        eval=Eval(sequences=7),
        model=Model(vocab_size=1000),
    )


def test_the_mixture_of_a_run_follows_its_config(folders, tmp_path):
    train, val = dataset.open_datasets(config_of(tmp_path, order="blocks"))
    assert train.shares == pytest.approx(WEIGHTS, abs=1e-4)
    assert [data.order for data in train.parts.values()] == ["blocks"] * 3
    assert [data.order for data in val.parts.values()] == ["windows"] * 3
    assert [data.batch_size for data in train.parts.values()] == [4, 2, 2]
    assert list(val.parts) == list(SIZES) and val.shares == pytest.approx(WEIGHTS, abs=1e-4)
    too_many = dataclasses.replace(config_of(tmp_path), eval=Eval(sequences=8))
    with pytest.raises(ValueError, match=r"--eval.sequences 8 is more than the 7 windows"):
        dataset.open_datasets(too_many)


def test_flags_that_a_mixture_leaves_without_effect_are_refused(tmp_path):
    file = tmp_path / "mixed.toml"
    file.write_text('[data]\nmixture = ["a 1 x", "b 2 y"]\n')
    for flag in ("--data.val", "--data.train"):
        with pytest.raises(ValueError, match=f"{flag} has no effect with a mixture"):
            cli.parse(["--config", str(file), f"{flag}=z"])
    alone = cli.parse(["--config", str(file), "--data.mixture", "--data.val", "z"]).data
    assert (alone.mixture, alone.val) == ((), "z")


def test_values_of_a_mixture_are_weighted_means_and_its_bits_are_over_its_bytes(folders, tmp_path):
    val = dataset.open_validation(config_of(tmp_path))
    for name, data in val.parts.items():
        data.manifest = dataclasses.replace(data.manifest, text_bytes=80 if name == "b" else 40)
    losses = {"loss/val/a": 1.0, "loss/val/b": 2.0, "loss/val/c": 4.0}
    found = validate.with_perplexity({"loss/val": 2.1} | losses, val)
    mean = 0.5 * 1.0 + 0.2 * 2.0 + 0.3 * 4.0
    expected = mean / np.log(2) / (0.5 + 0.2 * 2 + 0.3)
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-4)
    records = [{"loss": loss, "many": [loss, 0], "none": None} for loss in losses.values()]
    found = validate.weighted_mean(val.shares, records)
    assert found["loss"] == pytest.approx(mean, rel=1e-4) and found["none"] is None
    assert found["many"] == pytest.approx([mean, 0], rel=1e-4)
