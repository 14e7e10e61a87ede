"""How fast text is made, on one device; a part of benchmark.py.

    ./run.sh python benchmark.py decode

A 12-layer model, dense and with experts, writes one text and eight at once. Time per token should
hardly grow with the position, and not with the room of the cache. With the packages of
requirements-hf.txt, transformers writes the same texts with the same weights.
"""

import dataclasses
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import checkpoint
import convert
import decode
import generate
import model
import train
import utils
import weights
from benchmark import ONE_DEVICE, STEPS
from utils import Config

TOKENS = 32  # that are written behind a prompt
TURNS = 4  # timed ones of each, after one that is not


def decoding_config(experts: int, **sizes: int) -> Config:
    """12 layers, 768 wide, float32: dense, or with 8 of `experts` for each token."""
    layers = {"moe_layers": 0, "experts": 1, "experts_per_token": 1}
    if experts:
        layers = {"dense_layers": 0, "experts": experts, "experts_per_token": 8}
    full = {
        "vocabulary": 32000, "width": 768, "blocks": 12, "heads": 12, "kv_lora_rank": 256,
        "hidden": 2048, "expert_hidden": 256, "compute_dtype": "float32",
    }  # fmt: skip
    return Config(mesh=utils.Mesh(**ONE_DEVICE), model=utils.Model(**full | layers | sizes))


@dataclass
class Decoding:
    """A model that writes, and how long a token takes it."""

    config: Config
    sequences: int
    room: int

    def __post_init__(self) -> None:
        mesh, declared = train.make_mesh(self.config), model.declare(self.config)
        how = generate.Drawing(temperature=0.0)
        self.writer = generate.Writer(self.config, mesh, self.sequences, self.room, -1, how)
        self.weights = self.writer.ready(weights.initialize(declared, mesh, 0))
        self.writer.start(range(self.sequences), 0)

    def steps(self, position: int) -> Iterator[float]:
        """Seconds of one token after the other, behind `position` others of whatever content."""
        drawn = jnp.zeros(self.writer.B, jnp.int32)
        for at in itertools.count(position):
            start = time.perf_counter()
            at_B = np.full(self.writer.B, at, np.int32)
            drawn = jax.block_until_ready(self.writer.next(self.weights, drawn, at_B))
            yield time.perf_counter() - start

    def write(self, texts: list[list[int]], tokens: int) -> list[float]:
        """Seconds of each token but the first of each text, as generate.py writes it."""
        self.writer.start(range(self.sequences), 0)
        times = [time.perf_counter() for _ in self.writer.write(self.weights, texts, tokens)]
        return gaps(times)

    def bytes_read(self, position: int) -> int:
        """Of the weights that a token needs if no two texts choose the same expert, and of the
        cache.
        """
        declared, m = model.declare(self.config), self.config.model
        reads = sum(
            w.size * min(1.0, w.active * (self.sequences if w.active < 1 else 1))
            for w in jax.tree.leaves(declared)
        )
        values = m.layers * self.sequences * position * decode.values_per_token(m)
        return round(4 * (reads + values))


# --- transformers ---------------------------------------------------------------------------------


class Theirs:
    """The same model in transformers, through a checkpoint and convert.py."""

    def __init__(self, config: Config):
        import torch  # late: optional, of requirements-hf.txt
        import transformers

        self.torch = torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA computes with
        with tempfile.TemporaryDirectory() as folder:
            out = exported(config, Path(folder))
            self.model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        self.what = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, "
            f"{type(self.model).__name__}, {torch.get_num_threads()} threads"
        )

    def write(self, texts: list[list[int]], tokens: int) -> list[float]:
        """Seconds of each token but the first of each text, the likeliest ones."""
        ids, clock = self.torch.tensor(texts), Clock()
        with self.torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                streamer=clock,
            )
        return gaps(clock.times[1:])  # it is given the prompt as well


class Clock:
    """A streamer of transformers that notes when it is given something."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def gaps(times: Iterable[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def exported(config: Config, folder: Path) -> Path:
    """A folder of transformers with the first weights of this config, made in `folder`."""
    run, out = folder / "run", folder / "exported"
    run.mkdir()
    (run / "config.toml").write_text(utils.to_toml(config))
    state = {"weights": weights.initialize(model.declare(config), train.make_mesh(config), 0)}
    told = dataclasses.asdict(config) | {"tokens": {"tokenizer": "", "end_of_text": 0}}
    with closing(checkpoint.Checkpoints(run / "checkpoints", keep=1)) as saved:
        saved.save(0, checkpoint.reshaped(state, checkpoint.stored_shapes(state)), told)
    convert.export_run(convert.Export(run=run, out=out))
    return out


def in_turns(writers: list[Any], texts: list[list[int]]) -> list[float]:
    """Median seconds of a token of each, in turns; the first turn is not timed."""
    turns = [[writer.write(texts, TOKENS) for writer in writers] for _ in range(TURNS + 1)]
    return np.median(turns[1:], axis=(0, 2)).tolist()


# --- the table ------------------------------------------------------------------------------------


def compare(
    configs: dict[str, Config],
    batches: tuple[int, ...],
    rooms: tuple[int, int],
    near: int,
    far: int,
) -> None:
    """Prints how fast each model writes: near the start and far from it, with little room and much,
    in turns, so that what slows the machine slows them all.
    """
    bandwidth, (little, much) = read_bytes_per_s(), rooms
    table = Table("model", "texts", "tokens/s", "ms", f"at {far}", f"room {much}", "roofline ms")
    has_theirs = all(map(importlib.util.find_spec, ("torch", "transformers")))
    if has_theirs:
        for column in ("text tokens/s", "transformers", "over it"):
            table.add_column(column)
    for name, config in configs.items():
        theirs = Theirs(config) if has_theirs else None
        for texts in batches:
            small, large = (Decoding(config, texts, room) for room in rooms)
            turns = zip(small.steps(near), large.steps(near), large.steps(far), strict=True)
            taken = [*itertools.islice(turns, STEPS + 2)][2:]
            base_s, roomy_s, far_s = (
                statistics.median(column) for column in zip(*taken, strict=True)
            )
            row = [
                name,
                str(texts),
                f"{texts / base_s:.1f}",
                f"{1e3 * base_s:.1f}",
                f"{far_s / roomy_s:.2f} x",
                f"{roomy_s / base_s:.2f} x",
                f"{1e3 * small.bytes_read(near) / bandwidth:.1f}",
            ]
            if theirs:
                shape = texts, near
                prompts = np.random.default_rng(0).integers(config.model.vocabulary, size=shape)
                ours_s, theirs_s = in_turns([small, theirs], prompts.tolist())
                row += [f"{texts / ours_s:.1f}", f"{texts / theirs_s:.1f}"]
                row += [f"{theirs_s / ours_s:.2f} x"]
            table.add_row(*row)
    Console(width=120).print(table)
    print(
        f"Time of a token behind {near} others with room for {little}; behind {far} over behind "
        f"{near}; room for {much} over room for {little}. Roofline: the weights that a token "
        f"needs, and its cache, through memory once, which reads {bandwidth / 1e9:.1f} GB/s here."
    )
    if has_theirs:
        print(
            f"Text: {TOKENS} likeliest tokens behind {near}, by both in turns, in as many threads; "
            f"the first is not counted. {theirs.what}."
        )
    else:
        print(
            "transformers is not installed, so there is no comparison with it: "
            "./run.sh python -m pip install -r requirements-hf.txt"
        )


def read_bytes_per_s(size: int = 2**27) -> float:
    """How fast memory is read in order: the median of a sum's."""
    a, add = jnp.ones(size // 4, jnp.float32), jax.jit(jnp.sum)
    taken = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        jax.block_until_ready(add(a))
        taken.append(time.perf_counter() - start)
    return size / statistics.median(taken[1:])


def main() -> None:
    """Prints the table of the two models."""
    configs = {"dense": decoding_config(0), "8 of 64 experts": decoding_config(64)}
    compare(configs, batches=(1, 8), rooms=(256, 4096), near=10, far=1000)
