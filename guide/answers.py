"""Functions for the answers of problems. They call the project's own code.

The answer of a problem is a Python expression over these names.
"""

import dataclasses
import io
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: F401  answers use it
from pages import PageError, Problem

import model
import utils
from data import readers
from data.tokenizer import load_tokenizer, token_bytes
from dataset import permute  # noqa: F401  answers use it
from planning.results import Traffic
from runtime import cli
from schedule import Schedule
from utils import MESH_AXES
from weights import Weight

ROOT = Path(__file__).resolve().parent.parent


def config_of(name: str, fsdp: int = 1, pipeline: int = 1, tensor: int = 1, virtual: int = 1):
    """Return configs/NAME.toml on a mesh."""
    config = cli.load(ROOT / "configs" / f"{name}.toml")
    mesh = utils.Mesh(fsdp=fsdp, pipeline=pipeline, tensor=tensor, virtual=virtual)
    return dataclasses.replace(config, mesh=mesh)


def weights_of(config: utils.Config) -> dict[str, object]:
    """Return {name: Weight} of a config."""
    import jax

    return {w.name: w for w in jax.tree.leaves(model.declare(config))}


def global_shape(name: str, weight: str, *mesh: int) -> tuple[int, ...]:
    """Return the shape of a weight of configs/NAME.toml, without its stacked dimensions."""
    w = weights_of(config_of(name, *mesh))[weight]
    return w.shape[-2:]


def slice_shape(name: str, weight: str, *mesh: int) -> tuple[int, ...]:
    """Return the last two dimensions of the slice that a device holds."""
    config = config_of(name, *mesh)
    w, ranks = weights_of(config)[weight], dict(zip(MESH_AXES, config.mesh.shape, strict=True))
    slices = [math.prod(ranks[axis] for axis in axes) for axes in w.dim_axes]
    return tuple(size // n for size, n in zip(w.shape, slices, strict=True))[-2:]


def slices_of(weight: Weight, config: utils.Config, device: Mapping[str, int]) -> list[list[int]]:
    """Return [first, end) of each dimension of the slice that a device holds.

    device  its coordinate on each mesh axis.
    """
    ranks, found = dict(zip(MESH_AXES, config.mesh.shape, strict=True)), []
    for size, axes in zip(weight.shape, weight.dim_axes, strict=True):
        position, slices = 0, 1
        for axis in axes:  # the first axis is the outermost
            position, slices = position * ranks[axis] + device[axis], slices * ranks[axis]
        found.append([size // slices * position, size // slices * (position + 1)])
    return found


def gathered_bytes(name: str, weight: str, *mesh: int, bytes_per_number: int = 2) -> int:
    """Return the bytes that a device holds of a matrix after its gather over fsdp."""
    rows, columns = slice_shape(name, weight, *mesh)
    return rows * columns * config_of(name, *mesh).mesh.fsdp * bytes_per_number


def sent_bytes(kind: str, result_bytes: int, ranks: int) -> float:
    """Return the bytes that a device sends in a collective on a ring."""
    return Traffic("", (), kind, result_bytes, ranks).sent_bytes


def layer_collectives(part: str, backward: bool = False) -> Counter[str]:
    """Count the collectives of a compiled part of a dense layer of the 1B model, on 2 tensor ranks.

    part      mlp or attention.
    backward  whether the gradients of weights and input are computed as well.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import sharded_model
    import train

    config = config_of("jaxformer_1b", tensor=2)
    mesh = train.make_mesh(config, jax.devices()[:2])
    declared = model.declare(config).blocks.dense  # stacked [virtual, stage, block, layer, ...]
    options = sharded_model.forward_options(config, mesh, None)
    here = model.LayerPosition(*[jnp.int32(0)] * 3)

    def layer(w: model.DenseLayer, x_btD: jax.Array) -> jax.Array:
        if part == "mlp":
            return model.mlp(w.mlp, x_btD, options, here)
        return model.attention(w.attention, x_btD, None, options, here, rope=True)[0]

    def with_gradients(w: model.DenseLayer, x: jax.Array, gradient: jax.Array) -> object:
        y, pull_back = jax.vjp(sharded, w, x)
        return y, pull_back(gradient)

    def spec(w: Weight) -> P:
        return P(*("tensor" if "tensor" in axes else None for axes in w.dim_axes[4:]))

    specs, tokens = jax.tree.map(spec, declared), P(None, "tensor")
    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[4:], jnp.float32), declared)
    x = jax.ShapeDtypeStruct((4, config.train.seq_len, config.model.hidden_size), jnp.float32)
    run, arguments = (with_gradients, (w, x, x)) if backward else (sharded, (w, x))
    text = jax.jit(run).lower(*arguments).compile().as_text()
    return Counter(re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)\(", text))


tokenizer = load_tokenizer("sample")


def merges(text: str) -> list[tuple[str, ...]]:
    """Return the pieces of a text after each join of byte-pair encoding, from single bytes on.

    The text is one match of the tokenizer's pattern. The pair of the lowest rank is joined first.
    """
    ranks = {token_bytes(tokenizer, i): i for i in range(tokenizer.n_vocab - 1)}
    pieces = [bytes([byte]) for byte in text.encode()]
    steps = [tuple(piece.decode() for piece in pieces)]
    while True:
        pairs = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(pieces)]
        if not pairs or min(pairs) == math.inf:
            return steps
        at = pairs.index(min(pairs))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        steps.append(tuple(piece.decode() for piece in pieces))


def line_starts(content: bytes, begins: Sequence[int]) -> list[int]:
    """Return the byte at which the reader of each split of a file starts."""
    return [readers.seek_line(io.BytesIO(content), begin) for begin in begins]


def bubble(pipeline: int, virtual: int, microbatches: int) -> Fraction:
    return Schedule(pipeline, virtual, microbatches).bubble


def namespace() -> dict[str, object]:
    """Return the names that an answer may use."""
    return {name: value for name, value in globals().items() if not name.startswith("_")}


def evaluate(problem: Problem) -> object:
    """Return the answer of a problem. Raises PageError if it does not evaluate."""
    try:
        return eval(problem.answer, namespace())
    except Exception as error:
        raise PageError(
            f"the answer of problem {problem.number} in {problem.page}.md does not evaluate: "
            f"{problem.answer}: {type(error).__name__}: {error}"
        ) from error
