"""wandb and TensorBoard receive the records, and no failure of theirs ends a run."""

import struct
import sys
from types import SimpleNamespace

import pytest
import wandb
from tensorboardX.proto.event_pb2 import Event, SessionLog

import metrics
import utils
from test_metrics import evaluation, step

WANDB = utils.Config(train=utils.Train(steps=4), wandb=utils.Wandb(project="test"))
EVENTS = utils.Config(train=utils.Train(steps=4), run=utils.Run(tensorboard=True))
NO_MORE = "receives no more records of this start"


def events(folder):
    """The events of all files in the order of their names, which is that of their starts."""
    found = []
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            [size] = struct.unpack("Q", content[:8])  # then 4 bytes of checksum, data, 4 more
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def test_a_sink_receives_records_until_it_fails_which_is_one_warning(capsys):
    class Writer:
        def __init__(self):
            self.written = []

        def write(self, record):
            if record["step"] == 2:
                raise OSError("the disk\nis full")
            self.written.append(record["step"])

        def close(self):
            self.written.append("closed")

    writer = Writer()
    sink = metrics.Sink("x", lambda: writer)
    for number in range(100):
        sink.write({"step": number})
    sink.close()
    assert writer.written == [0, 1]
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: x {NO_MORE}: OSError: the disk is full. ")
    metrics.Sink("y", lambda: 1 / 0).write({"step": 0})
    assert f"warning: y {NO_MORE}: ZeroDivisionError" in capsys.readouterr().out


def test_a_package_that_is_missing_is_an_error_before_a_run_that_needs_it(monkeypatch):
    for config, package in ((WANDB, "wandb"), (EVENTS, "tensorboardX")):
        metrics.check_packages(config)
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
        with pytest.raises(ValueError, match=f"{package}, which is not .* pip install {package}"):
            metrics.check_packages(config)
    metrics.check_packages(utils.Config())


# --- wandb ----------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The runs that are made, by a user who has not logged in: what each is made with and given."""
    made = []
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))

    def init(**options):
        made.append(run := SimpleNamespace(**options, logged=[], url="https://wandb"))
        run.log = lambda values, step=None: run.logged.append((step, values))
        run.finish = lambda: run.logged.append("finished")
        return run

    wandb.teardown()
    monkeypatch.setattr(wandb, "init", init)
    yield made
    wandb.teardown()


def test_wandb_has_the_records_of_each_step_under_one_identity(tmp_path, runs, capsys):
    for start in (2, 1):  # the second start resumes before the last step of the first
        with metrics.Metrics(WANDB, tmp_path, step=start) as out:
            out.train(step(start + 1))
            out.evaluation(evaluation(start + 1))
    for run, number in zip(runs, (3, 2), strict=True):
        assert (run.id, run.mode) == ((tmp_path / "wandb_id").read_text(), "offline")
        assert (run.project, run.resume, run.dir) == ("test", "allow", tmp_path)
        (at, train), (also_at, val), finished = run.logged
        assert at == also_at == number and finished == "finished"
        assert train == step(number) and val["loss/val"] == 3.5
        assert val["moe/tokens_per_expert/0"].histogram == [3, 1]
    assert "warning" not in capsys.readouterr().out


# --- TensorBoard ----------------------------------------------------------------------------------


def test_tensorboard_has_the_numbers_of_each_record_and_a_histogram_per_layer(tmp_path):
    """A later start discards what it records again."""
    for start in (0, 2):
        with metrics.Metrics(EVENTS, tmp_path, step=start) as out:
            out.train(step(start + 1, mfu=None, **{"loss/train": 2.5}))
            out.evaluation(evaluation(start + 1))
    found = events(tmp_path / "tensorboard")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    starts = [event for event in found if event.session_log.status == SessionLog.START]
    assert [event.step for event in starts] == [0, 3]
    values = {v.tag: v for event in found for v in event.summary.value if event.step == 1}
    numbers = {*metrics.TRAIN, *metrics.EVALUATION} - {"step", "mfu", "moe/tokens_per_expert"}
    assert values.keys() == numbers | {"moe/tokens_per_expert/0", "moe/tokens_per_expert/1"}
    assert values["loss/train"].simple_value == 2.5 and values["loss/val"].simple_value == 3.5
    histogram = values["moe/tokens_per_expert/0"].histo
    assert (list(histogram.bucket), list(histogram.bucket_limit)) == ([3, 1], [1, 2])
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 2, 4, 3)
