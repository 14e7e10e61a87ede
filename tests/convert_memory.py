"""Measure the peak memory of convert.py for a checkpoint of a config, with random weights.

    ./run.sh python tests/convert_memory.py --config configs/jaxformer_1b.toml

The checkpoint is in chunks of at most 64 MiB, as an import writes it. With `--chunk_mib 0` each
array is one chunk, as one device saves it. Prints JSON: MiB above the imports' memory, and seconds.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint
import utils
from data.tokenizer import SAMPLE, load_tokenizer, table_sha256
from hf import model_config, tensors
from runtime import cli

RUN = """
import pathlib, re, convert
# Not ru_maxrss, which starts at the value of the parent process.
status = pathlib.Path("/proc/self/status")
peak = lambda: int(re.search("VmHWM:[^0-9]*([0-9]+)", status.read_text())[1])
before = peak()
convert.main({arguments!r})
print((peak() - before) // 1024)
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    config: Path
    chunk_mib: int = 64  # of an array's chunks in the checkpoint; 0: an array is one chunk


def make_run(config: utils.Config, run: Path, cut: bool = True) -> int:
    """Make a run with a checkpoint of random weights; return its number of parameters."""
    run.mkdir()
    (run / "config.toml").write_text(cli.to_toml(config))
    mappings = tensors.weight_mappings(config, model_config.OWN)
    random = np.random.default_rng(0)
    tokenizer = load_tokenizer(SAMPLE)
    tokens = {"tokenizer": SAMPLE, "tokenizer_sha256": table_sha256(tokenizer)}
    tokens["end_of_text"] = tokenizer.eot_token
    arrays = {}
    for mapping in mappings:
        array = np.memmap(run / mapping.name, np.float32, "w+", shape=mapping.shape)
        for part in array if mapping.stack_dims else [array]:
            part[:] = random.standard_normal(part.shape, np.float32)
        arrays[f"weights.{mapping.name}"] = array
    stacked = {f"weights.{mapping.name}": mapping.stack_dims * cut for mapping in mappings}
    with closing(checkpoint.Checkpoints(run / "checkpoints", keep=1)) as saved:
        kept = dataclasses.asdict(config) | {"tokens": tokens}
        saved.save(1, arrays, kept, stacked=stacked)
    for mapping in mappings:
        (run / mapping.name).unlink()
    return sum(mapping.size for mapping in mappings)


def measured(flags: Flags) -> dict[str, float]:
    config = cli.load(flags.config)
    if not flags.chunk_mib:
        checkpoint.CHUNK_BYTES = 1 << 50
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder, "run"), Path(folder, "out")
        parameters = make_run(config, run, bool(flags.chunk_mib))
        arguments = ["export", "--run", str(run), "--out", str(out)]
        arguments += ["--remote_code"] if model_config.unsupported(config.model) else []
        started = time.monotonic()
        text = subprocess.run(
            [sys.executable, "-c", RUN.format(arguments=arguments)],
            cwd=Path(__file__).resolve().parent.parent,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        files = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        print(text, file=sys.stderr)
        return {
            "parameters": parameters,
            "MiB": int(text.split()[-1]),
            "MiB written": files >> 20,
            "s": round(time.monotonic() - started),
        }


if __name__ == "__main__":
    print(json.dumps(measured(tyro.cli(Flags, description=__doc__))))
