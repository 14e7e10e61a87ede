"""Measure tokens per second of text generation on one device.

    ./run.sh python benchmark.py decode

A 12-layer model, dense and with experts, generates one text and eight at a time. The time per token
should hardly grow with the position, nor with the length of the cache.
"""

import itertools
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import model
import train
import utils
import weights
from benchmarks.common import ONE_DEVICE, STEPS, median_seconds, no_flags, timed
from inference import decode, sampling
from utils import Config


def decoding_config(experts: int, **sizes: int) -> Config:
    """Return a float32 model, 12 layers, 768 wide: dense, or with 8 of `experts` per token."""
    full = {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "kv_lora_rank": 256, "intermediate_size": 2048, "moe_intermediate_size": 256,
        "decoder_sparse_step": 1, "n_routed_experts": experts, "num_experts_per_tok": 8,
        "compute_dtype": "float32",
    }  # fmt: skip
    return Config(mesh=utils.Mesh(**ONE_DEVICE), model=utils.Model(**full | sizes))


class Decoder:
    """A model with random weights that generates texts."""

    def __init__(self, config: Config, sequences: int, max_length: int):
        mesh, declared = train.make_mesh(config), model.declare(config)
        self.config, self.sequences = config, sequences
        options = sampling.SamplingOptions(temperature=0.0)
        self.generator = sampling.Generator(config, mesh, sequences, max_length, [-1], options)
        self.weights = self.generator.convert_weights(weights.initialize(declared, mesh, 0))
        self.generator.reset(range(sequences), 0)

    def steps(self, position: int) -> Iterator[float]:
        """Yield the seconds of successive tokens after `position` others, of any content."""
        token_B = jnp.zeros(self.generator.B, jnp.int32)
        for i in itertools.count(position):
            position_B = np.full(self.generator.B, i, np.int32)
            seconds, token_B = timed(self.generator.decode_one, self.weights, token_B, position_B)
            yield seconds

    def bytes_read(self, position: int) -> int:
        """Return bytes of the weights and the cache that a token needs.

        No two texts choose the same expert, which is the worst case.
        """
        m, reads = self.config.model, 0
        for w in jax.tree.leaves(model.declare(self.config)):
            reads += w.size * min(1.0, w.active * (self.sequences if w.active < 1 else 1))
        values = (
            m.num_hidden_layers * self.sequences * position * decode.values_per_token(self.config)
        )
        return round(4 * (reads + values))


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
    titles = ("model", "texts", "tokens/s", "ms", f"at {far}", f"cache {long}", "roofline ms")
    table = Table(*titles)
    for name, config in configs.items():
        for texts in batches:
            smaller, larger = (Decoder(config, texts, length) for length in lengths)
            turns = zip(smaller.steps(near), larger.steps(near), larger.steps(far), strict=True)
            seconds = [*itertools.islice(turns, STEPS + 2)][2:]
            base_s, long_s, far_s = map(statistics.median, zip(*seconds, strict=True))
            table.add_row(
                name,
                str(texts),
                f"{texts / base_s:.1f}",
                f"{1e3 * base_s:.1f}",
                f"{far_s / long_s:.2f} x",
                f"{long_s / base_s:.2f} x",
                f"{1e3 * smaller.bytes_read(near) / bandwidth:.1f}",
            )
    Console(width=120).print(table)
    print(
        f"ms: time of a token after {near} others with a cache of {short}. Ratios: after {far} "
        f"over after {near}; a cache of {long} over {short}. Roofline: the weights and the cache "
        f"that a token needs, read once from memory at {bandwidth / 1e9:.1f} GB/s."
    )


def main(arguments: list[str]) -> None:
    no_flags(arguments, __doc__)
    configs = {"dense": decoding_config(0), "8 of 64 experts": decoding_config(64)}
    compare(configs, batches=(1, 8), lengths=(256, 4096), near=10, far=1000)
