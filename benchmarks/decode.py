"""Measure tokens per second of text generation on one device, and compare with transformers.

    ./run.sh python benchmark.py decode

A 12-layer model, dense and with experts, generates one text and eight at a time. The time per token
should hardly grow with the position, nor with the length of the cache. With the packages of
requirements-hf.txt, transformers generates the same texts with the same weights.
"""

import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import model
import train
import utils
import weights
from benchmarks.common import (
    ONE_DEVICE,
    STEPS,
    export_initial_weights,
    median_seconds,
    no_flags,
    timed,
)
from inference import decode, sampling
from utils import Config

TOKENS = 32  # generated after a prompt
TURNS = 4  # timed turns, after a warm-up turn


def decoding_config(experts: int, **sizes: int) -> Config:
    """Return a float32 model, 12 layers, 768 wide: dense, or with 8 of `experts` per token."""
    full = {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "kv_lora_rank": 256, "intermediate_size": 2048, "moe_intermediate_size": 256,
        "decoder_sparse_step": 1, "n_routed_experts": experts, "num_experts_per_tok": 8,
        "compute_dtype": "float32",
    }  # fmt: skip
    return Config(mesh=utils.Mesh(**ONE_DEVICE), model=utils.Model(**full | sizes))


class Project:
    """A model of this project that generates texts."""

    def __init__(self, config: Config, sequences: int, max_length: int):
        mesh, declared = train.make_mesh(config), model.declare(config)
        self.config, self.sequences = config, sequences
        options = sampling.SamplingOptions(temperature=0.0)
        self.generator = sampling.Generator(config, mesh, sequences, max_length, -1, options)
        self.weights = self.generator.convert_weights(weights.initialize(declared, mesh, 0))
        self.generator.reset(range(sequences), 0)

    def steps(self, position: int) -> Iterator[float]:
        """Yield the seconds of successive tokens after `position` others, of any content."""
        token_B = jnp.zeros(self.generator.B, jnp.int32)
        for i in itertools.count(position):
            position_B = np.full(self.generator.B, i, np.int32)
            seconds, token_B = timed(self.generator.decode_one, self.weights, token_B, position_B)
            yield seconds

    def generate(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Return the seconds of each token but the first, generated as in generate.py."""
        self.generator.reset(range(self.sequences), 0)
        generated = self.generator.generate(self.weights, prompts, tokens)
        return differences([time.perf_counter() for _ in generated])

    def bytes_read(self, position: int) -> int:
        """Return bytes of the weights and the cache that a token needs.

        No two texts choose the same expert, which is the worst case.
        """
        m, reads = self.config.model, 0
        for w in jax.tree.leaves(model.declare(self.config)):
            reads += w.size * min(1.0, w.active * (self.sequences if w.active < 1 else 1))
        values = m.num_hidden_layers * self.sequences * position * decode.values_per_token(m)
        return round(4 * (reads + values))


class Transformers:
    """The same model in transformers, exported from a checkpoint by convert.py."""

    def __init__(self, config: Config):
        import torch  # late: optional, of requirements-hf.txt
        import transformers

        self.torch = torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
        with tempfile.TemporaryDirectory() as folder:
            path = export_initial_weights(config, Path(folder))
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32
            )
        self.description = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, "
            f"{type(self.model).__name__}, {torch.get_num_threads()} threads"
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Return the seconds of each token but the first, with greedy decoding."""
        ids, clock = self.torch.tensor(prompts), Clock()
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
        return differences(clock.times[1:])  # the first is the prompt's


class Clock:
    """A streamer for transformers that records when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def differences(times: Iterable[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def compare(
    configs: dict[str, Config],
    batches: tuple[int, ...],
    lengths: tuple[int, int],
    near: int,
    far: int,
) -> None:
    """Print the speed of each model near position 0 and far from it, with both cache lengths.

    They take turns, so that a disturbance of the machine slows all of them.
    """
    size = 2**27  # bytes
    total, ones = jax.jit(jnp.sum), jnp.ones(size // 4, jnp.float32)
    bandwidth = size / median_seconds(lambda: total(ones))
    short, long = lengths
    columns = ["model", "texts", "tokens/s", "ms", f"at {far}", f"cache {long}", "roofline ms"]
    has_transformers = all(map(importlib.util.find_spec, ("torch", "transformers")))
    columns += ["text tokens/s", "transformers", "over it"] * has_transformers
    table = Table(*columns)
    for name, config in configs.items():
        other = Transformers(config) if has_transformers else None
        for texts in batches:
            ours, larger = (Project(config, texts, length) for length in lengths)
            turns = zip(ours.steps(near), larger.steps(near), larger.steps(far), strict=True)
            seconds = [*itertools.islice(turns, STEPS + 2)][2:]
            base_s, long_s, far_s = map(statistics.median, zip(*seconds, strict=True))
            row = [
                name,
                str(texts),
                f"{texts / base_s:.1f}",
                f"{1e3 * base_s:.1f}",
                f"{far_s / long_s:.2f} x",
                f"{long_s / base_s:.2f} x",
                f"{1e3 * ours.bytes_read(near) / bandwidth:.1f}",
            ]
            if other:
                row += compare_texts(ours, other, near)
            table.add_row(*row)
    Console(width=120).print(table)
    print(
        f"ms: time of a token after {near} others with a cache of {short}. Ratios: after {far} "
        f"over after {near}; a cache of {long} over {short}. Roofline: the weights and the cache "
        f"that a token needs, read once from memory at {bandwidth / 1e9:.1f} GB/s."
    )
    if has_transformers:
        print(
            f"Text: {TOKENS} greedy tokens after {near}, by both in turns with as many threads, "
            f"without the first token. {other.description}."
        )
    else:
        print(
            "transformers is not installed, so there is no comparison with it: "
            "./run.sh uv pip install -r requirements-hf.txt"
        )


def compare_texts(ours: Project, other: Transformers, near: int) -> list[str]:
    """Return tokens/s of both, and their ratio, for TOKENS tokens after prompts of `near`."""
    texts, rng = ours.sequences, np.random.default_rng(0)
    prompts = rng.integers(ours.config.model.vocab_size, size=(texts, near)).tolist()
    taken = [[one.generate(prompts, TOKENS) for one in (ours, other)] for _ in range(TURNS + 1)]
    ours_s, other_s = np.median(taken[1:], axis=(0, 2))
    return [f"{texts / ours_s:.1f}", f"{texts / other_s:.1f}", f"{other_s / ours_s:.2f} x"]


def main(arguments: list[str]) -> None:
    no_flags(arguments, __doc__)
    configs = {"dense": decoding_config(0), "8 of 64 experts": decoding_config(64)}
    compare(configs, batches=(1, 8), lengths=(256, 4096), near=10, far=1000)
