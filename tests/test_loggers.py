"""wandb and TensorBoard receive the records, and nothing that they do ends or delays a run."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import wandb
from tensorboardX.proto.event_pb2 import Event, SessionLog

import main
import metrics
import tiny_run
import utils
from conftest import ROOT
from runtime import buckets, cli, goodput, jsonl, loggers, run_directory
from test_metrics import evaluation, step

WANDB = utils.Config(train=utils.Train(steps=4), wandb=utils.Wandb(project="test"))
EVENTS = utils.Config(train=utils.Train(steps=4), run=utils.Run(tensorboard=True))
NO_MORE = "receives no more records of this start"


@pytest.fixture
def no_login(tmp_path, monkeypatch):
    """A user who has not logged in, and a wandb that reads its settings anew."""
    wandb.teardown()
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    yield
    wandb.teardown()


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


# --- one sink -------------------------------------------------------------------------------------


class Writer:
    """A writer that a test can make block or fail."""

    def __init__(self, fail_at=None, wait=None):
        self.written, self.fail_at, self.wait, self.closed = [], fail_at, wait, False

    def write(self, record):
        if self.wait:
            self.wait.wait()
        if record["step"] == self.fail_at:
            raise OSError("the disk\nis full")
        self.written.append(record["step"])

    def close(self):
        self.closed = True


def test_a_sink_receives_all_records_in_order_before_it_is_closed():
    writer = Writer()
    sink = loggers.Sink("x", lambda: writer)
    for number in range(100):
        sink.put({"step": number})
    sink.close()
    assert writer.written == list(range(100)) and writer.closed


def test_a_sink_that_fails_is_one_warning_and_receives_no_more(capsys):
    writer = Writer(fail_at=2)
    sink = loggers.Sink("x", lambda: writer)
    for number in (1, 2, 3):
        sink.put({"step": number})
    sink._thread.join()
    sink.put({"step": 4})
    sink.close()
    assert writer.written == [1]
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: x {NO_MORE}: OSError: the disk is full. ")


def test_a_sink_that_hangs_does_not_delay_a_step_nor_the_end(monkeypatch, capsys):
    monkeypatch.setattr(loggers, "BACKLOG_RECORDS", 5)
    release, abandoned = threading.Event(), threading.Event()
    sink = loggers.Sink("x", lambda: Writer(wait=release), abandoned.set)
    began = time.monotonic()
    for number in range(20):
        sink.put({"step": number})
    sink.close()
    assert time.monotonic() - began < 5 and abandoned.is_set()
    release.set()
    assert capsys.readouterr().out.count(NO_MORE) == 1


def test_the_end_of_a_run_waits_for_a_sink_for_a_limited_time(monkeypatch, capsys):
    monkeypatch.setattr(loggers, "CLOSE_S", 0.2)
    release = threading.Event()
    sink = loggers.Sink("x", lambda: Writer(wait=release))
    sink.put({"step": 1})
    sink.close()
    release.set()
    assert "did not take the last records within" in capsys.readouterr().out


def test_a_package_that_is_missing_is_an_error_before_the_run(monkeypatch):
    for config, package in ((WANDB, "wandb"), (EVENTS, "tensorboardX")):
        loggers.check_packages(config)
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
        with pytest.raises(ValueError, match=f"Install it with pip install {package}, or remove"):
            loggers.check_packages(config)
        loggers.check_packages(utils.Config())


def test_neither_package_is_imported_unless_enabled(tmp_path):
    code = (
        "import sys, pathlib, metrics, utils\n"
        f"with metrics.Metrics(utils.Config(), pathlib.Path({str(tmp_path)!r})): pass\n"
        "assert not {'wandb', 'tensorboardX'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- wandb ----------------------------------------------------------------------------------------


def test_wandb_is_offline_without_credentials_and_keeps_its_identity(tmp_path, no_login, capsys):
    for start in (2, 1):  # the second start resumes before the last step of the first
        with metrics.Metrics(WANDB, tmp_path, step=start) as out:
            out.train(step(start + 1))
            out.evaluation(evaluation(start + 1))
    identity = (tmp_path / "wandb_id").read_text()
    # by the files' names: wandb numbers the folders of runs that start within one second
    runs = [file.name for file in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]
    assert runs and set(runs) == {f"run-{identity}.wandb"}
    printed = capsys.readouterr().out
    assert "wandb: offline" in printed and "warning" not in printed


def test_wandb_decides_by_its_own_credentials_whether_a_run_is_online(
    tmp_path, no_login, monkeypatch
):
    modes = []

    def init(mode, **_):
        modes.append(mode)
        raise wandb.errors.CommError("stop here")

    monkeypatch.setattr(wandb, "init", init)
    netrc, key = tmp_path / "netrc", "0123456789abcdef" * 3
    for expected, host, environment in (
        ("offline", None, {}),
        ("online", "api.wandb.ai", {}),
        ("offline", "api.wandb.ai", {"WANDB_MODE": "offline"}),
        ("offline", "elsewhere.example", {}),
        ("online", None, {"WANDB_API_KEY": key}),
    ):
        netrc.write_text(f"machine {host}\n  login user\n  password {key}\n" if host else "")
        netrc.chmod(0o600)
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            wandb.teardown()
            with metrics.Metrics(WANDB, tmp_path / "run"):
                pass
        assert modes.pop() == expected, (host, environment)


def test_a_server_that_does_not_answer_is_one_warning(tmp_path, no_login, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(loggers, "CLOSE_S", 8.0)
    wandb.teardown()
    with metrics.Metrics(WANDB, tmp_path) as out:
        out.train(step(1))
    assert [r["step"] for r in jsonl.read(tmp_path / "metrics.jsonl")] == [1]
    printed = capsys.readouterr().out
    assert printed.count(f"warning: wandb {NO_MORE}") == 1, printed


def children(process):
    """Process ids by the name of each child."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    found = [pid for file in files for pid in file.read_text().split()]
    return {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in found}


# A run of 40 records that strikes wandb's process after the first, and ends by itself.
KILLS_ITSELF = """
import os, pathlib, sys, time
import metrics, utils
from runtime import loggers
from test_metrics import step
from test_loggers import WANDB, children

loggers.CLOSE_S, loggers.BACKLOG_RECORDS = 8.0, 20
with metrics.Metrics(WANDB, pathlib.Path(sys.argv[1])) as out:
    out.train(step(1))
    while not any(pathlib.Path(sys.argv[1]).glob("wandb/*/*.wandb")):
        time.sleep(0.1)
    time.sleep(1.0)
    service = children(os.getpid())["wandb-core"]
    os.kill(service, int(sys.argv[2]))
    for number in range(2, 42):
        out.train(step(number))
        time.sleep(0.02)
print("ended; wandb-core is", service, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_whose_wandb_process_dies_or_hangs_continues_and_ends(number, tmp_path, no_login):
    command = [sys.executable, "-c", KILLS_ITSELF, str(tmp_path), str(int(number))]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    log = tmp_path / "log"
    with log.open("w") as file:  # not a pipe, which a stopped child would keep open
        code = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": paths},
            cwd=tmp_path,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=120,
        ).returncode
    printed = log.read_text()
    assert code == 0 and "ended" in printed, printed
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(printed.split()[-1]), signal.SIGKILL)
    assert "Traceback" not in printed
    assert printed.count(f"warning: wandb {NO_MORE}") == 1, printed
    assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 41


def test_a_run_killed_while_it_writes_the_identity_of_its_wandb_run_has_none(tmp_path, monkeypatch):
    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        loggers.Wandb(WANDB, tmp_path)
    assert not (tmp_path / "wandb_id").exists()


# --- TensorBoard ----------------------------------------------------------------------------------


def test_tensorboard_has_the_numbers_of_each_record_and_a_histogram_per_layer(tmp_path):
    with metrics.Metrics(EVENTS, tmp_path) as out:
        out.train(step(1, mfu=None, **{"loss/train": 2.5}))
        out.evaluation(evaluation(1))
    found = events(tmp_path / "tensorboard")
    values = {v.tag: v for event in found for v in event.summary.value if event.step == 1}
    numbers = {*metrics.TRAIN, *metrics.EVALUATION} - {"step", "mfu", "moe/tokens_per_expert"}
    assert values.keys() == numbers | {"moe/tokens_per_expert/0", "moe/tokens_per_expert/1"}
    assert values["loss/train"].simple_value == 2.5 and values["loss/val"].simple_value == 3.5
    histogram = values["moe/tokens_per_expert/0"].histo
    assert (list(histogram.bucket), list(histogram.bucket_limit)) == ([3, 1], [1, 2])
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 2, 4, 3)


def test_a_start_of_tensorboard_discards_what_it_records_again(tmp_path):
    for start in (0, 2):
        with metrics.Metrics(EVENTS, tmp_path, step=start) as out:
            out.train(step(start + 1))
    found = [e.step for e in events(tmp_path / "tensorboard") if e.session_log.status]
    assert found == [0, 3] and SessionLog.START == 1
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


# The file that could not be written is closed when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_ends_tensorboard_and_not_the_run(small_disk, capsys):
    disk, _ = small_disk
    (disk / "fill").write_bytes(bytes(500 * 1024))
    [sink] = loggers.open_sinks(EVENTS, disk, 0)
    for number in range(1, 400):
        sink.put(step(number))
    sink.close()
    assert capsys.readouterr().out.count(f"warning: TensorBoard {NO_MORE}: OSError") == 1


@pytest.mark.long
def test_a_run_in_a_bucket_has_the_events_of_all_its_starts_and_its_goodput_there(data, bucket):
    flags = [*tiny_run.FLAGS, *data, "--run.dir", f"{bucket.url}/runs", "--run.name", "events"]
    for steps in (3, 6):  # of a new process, so with a new copy of the folder
        run_directory._in_bucket.cache_clear()
        main.run(cli.parse([*flags, "--run.tensorboard", "--train.steps", str(steps)]))
    names = list(buckets.Prefix(f"{bucket.url}/runs/events").list_objects())
    assert len([name for name in names if name.startswith("tensorboard/events.")]) == 2
    run_directory._in_bucket.cache_clear()
    there = run_directory.at(f"{bucket.url}/runs/events")
    assert [line["step"] for line in goodput.read(there.files)] == [3, 6]
