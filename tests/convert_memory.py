"""Most memory that convert.py takes for a checkpoint of this config, with random weights.

    ./run.sh python tests/convert_memory.py --config configs/jaxformer_1b.toml

The checkpoint is in chunks of at most 64 MiB, as an import writes it, or with `--chunk_mib 0` an
array is one, as one device saves it. Prints JSON: MiB above what the imports take, and seconds.
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
import hugging_face
import utils
from data.tokenizer import SAMPLE, load_tokenizer, table_sha256

RUN = """
import pathlib, re, convert
# Not ru_maxrss, which begins with what the process that started this one had.
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
    """A run's folder with a checkpoint of random weights -> parameters."""
    run.mkdir()
    (run / "config.toml").write_text(utils.to_toml(config))
    leaves, random = hugging_face.leaves(config, hugging_face.OWN), np.random.default_rng(0)
    tokenizer = load_tokenizer(SAMPLE)
    tokens = {"tokenizer": SAMPLE, "tokenizer_sha256": table_sha256(tokenizer)}
    tokens["end_of_text"] = tokenizer.eot_token
    arrays = {}
    for leaf in leaves:
        array = np.memmap(run / leaf.name, np.float32, "w+", shape=leaf.shape)
        for part in array if leaf.stacked else [array]:
            part[:] = random.standard_normal(part.shape, np.float32)
        arrays[f"weights.{leaf.name}"] = array
    stacked = {f"weights.{leaf.name}": leaf.stacked * cut for leaf in leaves}
    with closing(checkpoint.Checkpoints(run / "checkpoints", 1, stacked)) as saved:
        saved.save(1, arrays, dataclasses.asdict(config) | {"tokens": tokens})
    for leaf in leaves:
        (run / leaf.name).unlink()
    return sum(leaf.size for leaf in leaves)


def measured(flags: Flags) -> dict[str, float]:
    config = utils.load(flags.config)
    if not flags.chunk_mib:
        checkpoint.CHUNK_BYTES = 1 << 50
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder, "run"), Path(folder, "out")
        parameters = make_run(config, run, bool(flags.chunk_mib))
        arguments = ["export", "--run", str(run), "--out", str(out)]
        arguments += ["--remote_code"] if hugging_face.obstacles(config.model) else []
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
