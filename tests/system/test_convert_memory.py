"""The peak memory of an export, of a checkpoint in chunks as an import writes it."""

import dataclasses
import subprocess
import sys
from contextlib import closing

import numpy as np

import checkpoint
from conftest import ROOT
from data.tokenizer import SAMPLE, load_tokenizer, table_sha256
from hf import model_config, tensors
from runtime import cli

RUN = """
import pathlib, re, sys, convert
# Not ru_maxrss, which starts at the value of the parent process.
status = pathlib.Path("/proc/self/status")
peak = lambda: int(re.search("VmHWM:[^0-9]*([0-9]+)", status.read_text())[1])
before = peak()
convert.main(["export", "--run", sys.argv[1], "--out", sys.argv[2], "--remote_code"])
print(peak() - before)
"""


def test_export_takes_little_memory(tmp_path):
    config, run = cli.load(ROOT / "configs" / "dense_124m.toml"), tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(cli.to_toml(config))
    mappings = tensors.weight_mappings(config, model_config.OWN)
    arrays = {f"weights.{m.name}": np.ones(m.shape, np.float32) for m in mappings}
    tokenizer = load_tokenizer(SAMPLE)
    tokens = {"tokenizer": SAMPLE, "tokenizer_sha256": table_sha256(tokenizer)}
    kept = dataclasses.asdict(config) | {"tokens": tokens | {"end_of_text": tokenizer.eot_token}}
    with closing(checkpoint.Checkpoints(run / "checkpoints", keep=1)) as saved:
        stacked = {f"weights.{m.name}": m.stack_dims for m in mappings}
        saved.save(1, arrays, kept, stacked=stacked)
    command = [sys.executable, "-c", RUN, str(run), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert written > 400e6 and int(done.stdout.split()[-1]) * 2**10 <= 600e6
