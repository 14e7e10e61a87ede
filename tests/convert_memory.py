"""Measure the peak memory of convert.py for a checkpoint of a config, with random weights.

    ./run.sh python tests/convert_memory.py --config configs/jaxformer_1b.toml

The checkpoint is in chunks of at most 64 MiB, as an import writes it. With `--chunk_mib 0` each
array is one chunk, as one device saves it. Prints JSON: MiB above the imports' memory, and seconds.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint
import utils
from data.tokenizer import SAMPLE, load_tokenizer, table_sha256
from hf import model_config, tensors
from runtime import cli

ROOT = Path(__file__).resolve().parent.parent
RUN = """
import pathlib, re, convert
# Not ru_maxrss, which starts at the value of the parent process.
status = pathlib.Path("/proc/self/status")
peak = lambda: int(re.search("VmHWM:[^0-9]*([0-9]+)", status.read_text())[1])
before = peak()
convert.main({arguments!r})
print((peak() - before) // 1024)
"""


def make_run(config: utils.Config, run: Path, cut: bool) -> int:
    """Make a run with a checkpoint of random weights; return its number of parameters."""
    run.mkdir()
    (run / "config.toml").write_text(cli.to_toml(config))
    mappings = tensors.weight_mappings(config, model_config.OWN)
    random, tokenizer, arrays = np.random.default_rng(0), load_tokenizer(SAMPLE), {}
    tokens = {"tokenizer": SAMPLE, "tokenizer_sha256": table_sha256(tokenizer)}
    tokens["end_of_text"] = tokenizer.eot_token
    for mapping in mappings:
        array = np.memmap(run / mapping.name, np.float32, "w+", shape=mapping.shape)
        for part in array if mapping.stack_dims else [array]:
            part[:] = random.standard_normal(part.shape, np.float32)
        arrays[f"weights.{mapping.name}"] = array
    stacked = {f"weights.{mapping.name}": mapping.stack_dims * cut for mapping in mappings}
    with closing(checkpoint.Checkpoints(run / "checkpoints", keep=1)) as saved:
        saved.save(1, arrays, dataclasses.asdict(config) | {"tokens": tokens}, stacked=stacked)
    for mapping in mappings:
        (run / mapping.name).unlink()
    return sum(mapping.size for mapping in mappings)


def measured(file: Path, chunk_mib: int = 64) -> dict[str, float]:
    config = cli.load(file)
    if not chunk_mib:
        checkpoint.CHUNK_BYTES = 1 << 50
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder, "run"), Path(folder, "out")
        parameters, started = make_run(config, run, bool(chunk_mib)), time.monotonic()
        arguments = ["export", "--run", str(run), "--out", str(out)]
        arguments += ["--remote_code"] * bool(model_config.unsupported(config.model))
        command = [sys.executable, "-c", RUN.format(arguments=arguments)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        seconds, written = round(time.monotonic() - started), out.glob("*.safetensors")
        found = {"parameters": parameters, "MiB": int(done.stdout.split()[-1])}
        return found | {"MiB written": sum(f.stat().st_size for f in written) >> 20, "s": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--chunk_mib", type=int, default=64, help="0: an array is one chunk")
    flags = parser.parse_args()
    print(json.dumps(measured(flags.config, flags.chunk_mib)))
