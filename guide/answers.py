"""Functions for the answers of problems. They call the project's own code.

The answer of a problem is a Python expression over these names.
"""

import dataclasses
import functools
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

import jax
import jax.numpy as jnp
import numpy as np
from pages import PageError, Problem

import attention
import hardware
import model
import optimizer
import utils
from data import readers
from data.tokenizer import load_tokenizer, token_bytes
from dataset import permute  # noqa: F401  answers use it
from experts import assign_slots, divide_load, expert_capacity, sort_choices
from hf import model_config, tensors
from hf.families import FAMILIES
from inference import decode
from planning import collectives, cost, search
from planning.results import MESH_FLAGS, Traffic, usable_bytes
from routing import route
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


def equal_scores(first: tuple[int, int], others: Sequence[tuple[int, int]]) -> list[str]:
    """Return whether the scores of a query and a key at these positions equal that of `first`."""
    m, rng = config_of("jaxformer_1b").model, np.random.default_rng(0)
    query, key = jnp.asarray(rng.normal(size=(2, m.qk_rope_head_dim)), jnp.float32)

    def score(positions: tuple[int, int]) -> float:
        rotated = [
            attention.rotate(x[None, None, None], m, jnp.array([[at]])).ravel()
            for x, at in zip((query, key), positions, strict=True)
        ]
        return round(float(jnp.dot(*rotated, precision="highest")), 3)

    return ["yes" if score(one) == score(first) else "no" for one in others]


def rope_scores(distances: Sequence[int]) -> list[float]:
    """Return the mean of cos(distance * frequency) over the rotary pairs of the 1B model."""
    m = config_of("jaxformer_1b").model
    frequency = np.asarray(attention.rope_frequencies(m, m.qk_rope_head_dim), np.float64)
    return [float(np.cos(distance * frequency).mean()) for distance in distances]


def cached_values(name: str) -> int:
    """Return the numbers that a layer of configs/NAME.toml caches of a token."""
    return decode.values_per_token(config_of(name))


def plain_values(name: str) -> int:
    """Return what it would cache with a key and a value for each query head."""
    m = config_of(name).model
    return m.num_attention_heads * sum(attention.kind_of(m).widths(m))


def layer_costs(name: str, T: int) -> list[tuple[str, int, int]]:
    """Return (part, parameters, forward FLOPs of a token) of a dense layer of configs/NAME.toml.

    All T keys are counted, as attention without a kernel computes them.
    """
    m, found = config_of(name).model, []
    for weight_name, w in weights_of(config_of(name)).items():
        if weight_name.startswith("blocks.dense."):
            size = math.prod(w.shape[4:])
            found.append((weight_name[13:], size, 2 * size if w.matrix else 0))
    wide, narrow = attention.kind_of(m).widths(m)
    for part, width in (("scores", wide), ("sums over values", narrow)):
        found.append((part, 0, 2 * m.num_attention_heads * width * T))
    return found


def scores_share(name: str, T: int) -> float:
    """Return the share of scores and sums over values in the forward FLOPs of a dense layer."""
    costs = layer_costs(name, T)
    return sum(flops for _, _, flops in costs[-2:]) / sum(flops for _, _, flops in costs)


def experts_config(experts: int, K: int) -> utils.Model:
    """Return a model with one group of experts, whose weights of a token sum to 1."""
    m = config_of("tiny").model
    return dataclasses.replace(m, n_routed_experts=experts, num_experts_per_tok=K)


def route_by_hand(scores: Sequence[float], biases: Sequence[float], K: int) -> list[float]:
    """Return the experts of a token with these scores, the best first, and then their weights."""
    E = len(scores)
    logits = np.log(scores) - np.log1p(-np.array(scores))
    h_btD = jnp.asarray(logits, jnp.float32)[None, None]
    router, bias = jnp.eye(E), jnp.asarray(biases, jnp.float32)
    _, choice, weight = route(router, bias, h_btD, experts_config(E, K))
    return [*choice.ravel().tolist(), *(round(x, 3) for x in weight.ravel().tolist())]


def slots(factor: float, tokens: int = 2048, experts: int = 16, K: int = 2) -> int:
    return expert_capacity(experts_config(experts, K), tokens, factor)


def enough_tiles(tokens: int, K: int, experts: int, tile: int) -> int:
    return tokens * K // tile + experts


# Compiled once for each size, and not operation by operation.
ASSIGN_SLOTS = jax.jit(assign_slots, static_argnums=(1, 2))
SORT_CHOICES = jax.jit(sort_choices, static_argnums=(1, 2, 3))


def assigned(choice: Sequence[Sequence[int]], experts: int, capacity: int) -> list[list[int]]:
    """Return the slot of each choice [tokens, K] of one sequence; -1 for a dropped one."""
    slot_nK, _ = ASSIGN_SLOTS(np.asarray(choice, np.int32)[None], experts, capacity)
    found = np.asarray(slot_nK)
    return np.where(found == experts * capacity, -1, found).tolist()


def tiles_of(choice: Sequence[Sequence[int]], experts: int, tile: int) -> int:
    """Return how many tiles the choices [tokens, K] fill."""
    choices = SORT_CHOICES(np.asarray(choice, np.int32), experts, 0, tile)
    return int(choices.last_e[-1])


def dropless_rows(tokens: int, K: int, experts: int) -> float:
    """Return the rows that dropless experts multiply under even loads, over those chosen."""
    load = divide_load(tokens * K / experts, experts)
    return (experts * load.batched + load.tiles * load.tile) / (tokens * K)


def polynomial(value: float, steps: int = 5) -> float:
    """Return a singular value after Newton-Schulz steps, where the matrix has the norm 1."""
    for a, b, c in optimizer.NEWTON_SCHULZ[:steps]:
        value = a * value + b * value**3 + c * value**5
    return value


def polynomial_slope(steps: int) -> float:
    """Return the factor of Newton-Schulz steps on a singular value near 0."""
    return math.prod(a for a, _, _ in optimizer.NEWTON_SCHULZ[:steps])


def matrices_of_rank(matrices: int, ranks: int) -> int:
    return -(-matrices // ranks)


def below_two_errors(differences: Mapping[str, tuple[float, float]]) -> list[str]:
    return [name for name, (mean, error) in differences.items() if abs(mean) < 2 * error]


def intensity(chip: str) -> float:
    """Return the bfloat16 operations of a chip for each byte through its memory."""
    found = hardware.chip_named(chip)
    return found.flops / found.memory_bandwidth


def least_tokens(chip: str, D: int, F: int) -> int:
    """Return from how many tokens on a bfloat16 product with a D x F matrix is bound by FLOPs."""
    least = intensity(chip)
    return math.ceil(least * D * F / (D * F - least * (D + F)))


def gather_us(chip: str, ranks: int, size: int = 1_572_864) -> float:
    """Return the least microseconds of an all-gather over neighboring ranks."""
    found = hardware.chip_named(chip)
    return 1e6 * collectives.collective_s(found, "all-gather", size, ((ranks, 1),), ranks)


def least_ranks(parameters: float, chip: str) -> int:
    return math.ceil(16 * parameters / usable_bytes(hardware.chip_named(chip)))


def flops_per_token(name: str) -> float:
    config = config_of(name)
    return hardware.palm_flops_per_token(config.model, model.declare(config), config.train.seq_len)


def mfu(name: str, tokens_per_s: float, chip: str) -> float:
    return tokens_per_s * flops_per_token(name) / hardware.chip_named(chip).flops


@functools.cache
def plans() -> dict[str, dict[str, float]]:
    """Return plans of the 1B model on 32 TPU v4, by mesh, with the other settings of its config."""
    config, chip, found = config_of("jaxformer_1b"), hardware.chip_named("v4"), {}
    for mesh in search.meshes(32):
        values = dict(zip(MESH_FLAGS, mesh, strict=True))
        try:
            plan = cost.predict(search.changed(config, values), chip)
        except utils.ConfigError:
            continue
        links = {n: s for n, s in plan.seconds.items() if n not in ("compute", "memory")}
        found[", ".join(map(str, mesh))] = {
            "gib": plan.memory_bytes_per_chip / utils.GIB,
            "compute": plan.seconds["compute"],
            "memory": plan.seconds["memory"],
            "links": sum(links.values()),
            "bubble": plan.bubble,
            "serial": plan.step_s,
        }
    return found


def rotary_order(R: int) -> list[int]:
    """Return our column of each column of a checkpoint whose rotary pairs are neighbors."""
    mapping = tensors.WeightMapping("", (R,), 0, {}, rotary=R)
    return mapping.to_hf(np.arange(R)).tolist()


def hf_mappings(name: str) -> dict[str, tensors.WeightMapping]:
    """Return the mappings of configs/NAME.toml to Hugging Face's names, by our names."""
    config = config_of(name)
    kind = model_config.kind_of(config.model)
    return {mapping.name: mapping for mapping in tensors.weight_mappings(config, kind)}


def hf_shape(name: str, weight: str) -> tuple[int, ...]:
    return hf_mappings(name)[weight].hf_shape


def hf_class_of(name: str) -> list[str]:
    return [FAMILIES[model_config.kind_of(config_of(name).model)].hf_class]


def run_hours(name: str, tokens: float, share: float, chip: str = "v4", chips: int = 32) -> float:
    """Return the hours of a run with an MFU of `share`."""
    rate = chips * hardware.chip_named(chip).flops * share
    return tokens * flops_per_token(name) / rate / 3600


def steps_of(name: str, decay_share: float) -> int:
    """Return the step at which the learning rate begins to decay."""
    steps = config_of(name).train.steps
    return steps - round(decay_share * steps)


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
