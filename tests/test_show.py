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


def test_windows_are_printed_with_their_places(run, capsys):
    opened = open_training(cli.load(run / "config.toml"))
    line = r"^--- window (\d+): tokens (\d+) to (\d+) of (\S+)$\n"
    of_step = opened.windows_of(11, np.arange(8)).tolist()
    for flags, numbers in (("--step 12", of_step), ("--windows 17 3", [17, 3])):
        show.main(["--run", str(run), *flags.split()])
        _, *found = re.split(line, capsys.readouterr().out, flags=re.MULTILINE)
        assert [int(number) for number in found[::5]] == numbers
        for number, first, last, file, text in zip(*[iter(found)] * 5, strict=True):
            assert int(first) == 32 * int(number) and int(last) == int(first) + 32
            ids = np.load(file)[int(first) : int(last) + 1].tolist()
            assert text == load_tokenizer("sample").decode(ids) + "\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "Use one, as --step 1"),
        ("--step 0", "--step 0 is out of range. Use an integer at least 1, or omit it"),
        ("--windows 3 100000000", "--windows 100000000 is not a window of .* from 0 to"),
        ("--run absent --step 1", "--run absent does not exist. Give the folder of a run"),
    ],
)
def test_what_is_not_there_is_answered_in_one_line(run, flags, message):
    with pytest.raises(ValueError, match=message) as refused:
        show.main(["--run", str(run), *flags.split()])
    assert "\n" not in str(refused.value)
