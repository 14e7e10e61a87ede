"""The text of a run's batches, as it is printed."""

import re

import numpy as np
import pytest

from data import show
from data.tokenizer import load_tokenizer
from dataset import open_training
from runtime import cli


@pytest.fixture
def run(data, tmp_path):
    """A folder as a run leaves it, with its config alone."""
    flags = [*data, "--train.seq_len", "32", "--train.global_batch_size", "8"]
    (tmp_path / "config.toml").write_text(cli.to_toml(cli.parse([*flags, "--data.seed", "3"])))
    return tmp_path


def shown(capsys, *flags):
    show.main([*map(str, flags)])
    return capsys.readouterr().out


def test_the_windows_of_a_step_are_printed_with_their_places(run, capsys):
    config = cli.load(run / "config.toml")
    opened = open_training(config)
    out = shown(capsys, "--run", run, "--step", 12)
    places = re.findall(r"^--- window (\d+): tokens (\d+) to (\d+) of (\S+)$", out, re.MULTILINE)
    numbers = opened.windows_of(11, np.arange(8)).tolist()
    assert [int(place[0]) for place in places] == numbers
    codec = load_tokenizer("sample")
    for (number, first, last, file), text in zip(
        places, re.split(r"^--- window .*\n", out, flags=re.MULTILINE)[1:], strict=True
    ):
        assert int(first) == 32 * int(number) and int(last) == int(first) + 32
        ids = np.load(file)[int(first) : int(last) + 1].tolist()
        assert text == codec.decode(ids) + "\n"
    tokens = opened.rows(11, np.arange(8))["tokens"]
    assert codec.decode(tokens[3].tolist()) in out


def test_single_windows_are_printed_in_the_order_asked_for(run, capsys):
    out = shown(capsys, "--run", run, "--windows", 17, 3)
    assert re.findall(r"^--- window (\d+)", out, re.MULTILINE) == ["17", "3"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "Use one, as --step 1"),
        ("--step 1 --windows 2", "Use one, as --step 1"),
        ("--step 0", "a --step from 1, or --windows. Use one, as --step 1"),
        ("--windows 3 100000000", "--windows 100000000 is not a window of .* from 0 to"),
        ("--windows -1", "--windows -1 is not a window"),
        ("--run absent --step 1", "--run absent does not exist. Give the folder of a run"),
    ],
)
def test_what_is_not_there_is_answered_in_one_line(run, flags, message):
    with pytest.raises(ValueError, match=message) as refused:
        show.main(["--run", str(run), *flags.split()])
    assert "\n" not in str(refused.value)
