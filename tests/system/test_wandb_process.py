"""The wandb package itself, with its own process: offline, and without a server."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT
from runtime import jsonl

NO_MORE = "warning: wandb receives no more records of this start"

RUN = """
import pathlib, sys
import metrics
from runtime import loggers
from test_loggers import WANDB
from test_metrics import step

loggers.CLOSE_S = 8.0
with metrics.Metrics(WANDB, pathlib.Path(sys.argv[1])) as out:
    for n in range(1, 42):
        out.train(step(n))
print("ended", flush=True)
"""
NO_SERVER = {"WANDB_API_KEY": "0123456789abcdef" * 3, "WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize("more", [{}, NO_SERVER], ids=("offline", "no server"))
def test_a_run_ends_with_wandb_offline_or_without_its_server(more, tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | more
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    environment |= {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    log = tmp_path / "log"
    with log.open("w") as file:  # not a pipe, which a child would keep open
        how = {"cwd": tmp_path, "stdout": file, "stderr": subprocess.STDOUT, "timeout": 120}
        code = subprocess.run(command, env=environment, **how).returncode
    printed = log.read_text()
    assert code == 0 and "ended" in printed and "Traceback" not in printed, printed
    assert printed.count(NO_MORE) == bool(more), printed
    assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 41
    if not more:
        name = f"run-{(tmp_path / 'wandb_id').read_text()}.wandb"
        [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
        assert file.name == name and "wandb: offline" in printed
