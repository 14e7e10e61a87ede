"""wandb with its own process, which can die, or find no server."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from runtime import jsonl

NO_MORE = "warning: wandb receives no more records of this start"

# A run of 41 records, to whose wandb process something may happen after the first.
RUN = """
import os, pathlib, signal, sys, time
import metrics
from test_loggers import WANDB
from test_metrics import step
from test_wandb_process import children

metrics.WANDB_S = float(sys.argv[3])
folder, number, service = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 0
with metrics.Metrics(WANDB, folder) as out:
    out.train(step(1))
    while number and not any(folder.glob("wandb/*/*.wandb")):
        time.sleep(0.1)
    if number:
        time.sleep(1.0)
        os.kill(service := children(os.getpid())["wandb-core"], number)
    for n in range(2, 42):
        out.train(step(n))
        time.sleep(0.02)
print("ended; wandb-core is", service, flush=True)
"""


def children(process):
    """Process ids by the name of each child."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    found = [pid for file in files for pid in file.read_text().split()]
    return {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in found}


@pytest.mark.parametrize(
    ("number", "more"),
    [
        (0, {}),
        (signal.SIGKILL, {}),
        (0, {"WANDB_API_KEY": "0123456789abcdef" * 3, "WANDB_BASE_URL": "http://127.0.0.1:9"}),
    ],
    ids=("offline", "dies", "no server"),
)
def test_a_run_ends_whatever_becomes_of_its_wandb_process(number, more, tmp_path):
    healthy = not number and not more
    limit_s = "50" if healthy else "4"
    command = [sys.executable, "-c", RUN, str(tmp_path), str(int(number)), limit_s]
    folders = ROOT, ROOT / "tests", ROOT / "tests" / "system"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | more
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment |= {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    log = tmp_path / "log"
    with log.open("w") as file:  # not a pipe, which a stopped child would keep open
        how = {"cwd": tmp_path, "stdout": file, "stderr": subprocess.STDOUT, "timeout": 240}
        code = subprocess.run(command, env=environment, **how).returncode
    printed = log.read_text()
    assert code == 0 and "ended" in printed and "Traceback" not in printed, printed
    if number:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(printed.split()[-1]), signal.SIGKILL)
    assert printed.count(NO_MORE) == (not healthy), printed
    assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 41
    if healthy:
        name = f"run-{(tmp_path / 'wandb_id').read_text()}.wandb"
        [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
        assert file.name == name and "wandb: offline" in printed
