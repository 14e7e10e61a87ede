"""Functions for the answers of problems and the formulas of facts. They call the project's code.

Answers and formulas are Python expressions over the names of this file.
"""

# ruff: noqa: F401  they use all imports

import dataclasses
import functools
import io
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from pages import ROOT, PageError

import attention
import dataset
import depth
import hardware
import model
import optimizer
import rope
import routing
import sharded_model
import train
import utils
from data import readers
from data.settings import Prepare
from data.tokenizer import load_tokenizer, token_bytes
from dropless import divide_load, sort_choices
from experts import assign_slots, expert_capacity
from hf import model_config, tensors
from hf.families import FAMILIES
from inference import decode
from planning import collectives, cost, rates, search
from planning.results import MESH_FLAGS, Prediction, Traffic, usable_bytes
from runtime import cli, jsonl
from schedule import Schedule
from utils import GIB, MESH_AXES
from weights import Weight

MEASURED, EXPERIMENTS = (
    (ROOT / "docs" / name).read_text() for name in ("measured.md", "experiments.md")
)


def ladder(depth: int, dense: bool) -> dict[str, Any]:
    """Return the best run of a depth in docs/ladder.jsonl, of the three rates of dense models."""
    series = {"optimizer": "muon", "depth": depth, "steps": 128, "batch": 16, "decay": 2.0}
    runs = [r for r in jsonl.read(ROOT / "docs/ladder.jsonl") if r["seed"] == 0]
    tried = {r["lr"] for r in runs if r["series"] == series | {"dense": True}}
    mine = [r for r in runs if r["series"] == series | {"dense": dense} and r["lr"] in tried]
    return min(mine, key=lambda r: r["loss"])


def config_of(name: str, fsdp: int = 1, pipeline: int = 1, tensor: int = 1, virtual: int = 1):
    """Return configs/NAME.toml on a mesh."""
    config = cli.load(ROOT / "configs" / f"{name}.toml")
    mesh = utils.Mesh(fsdp=fsdp, pipeline=pipeline, tensor=tensor, virtual=virtual)
    return dataclasses.replace(config, mesh=mesh)


def weights_of(config: utils.Config) -> dict[str, object]:
    """Return {name: Weight} of a config."""
    return {w.name: w for w in jax.tree.leaves(model.declare(config))}


def weight_of_1b(weight: str) -> tuple[Weight, tuple[int, ...]]:
    """Return a weight of configs/jaxformer_1b.toml on (8, 2, 2), and the shape of its slices."""
    config = config_of("jaxformer_1b", 8, 2, 2)
    w, mesh = weights_of(config)[weight], AbstractMesh(config.mesh.shape, MESH_AXES)
    return w, NamedSharding(mesh, w.spec).shard_shape(w.shape)


def global_shape(weight: str) -> tuple[int, ...]:
    """Return the last two dimensions of a weight of the 1B model on (8, 2, 2)."""
    return weight_of_1b(weight)[0].shape[-2:]


def slice_shape(weight: str) -> tuple[int, ...]:
    """Return the last two dimensions of the slice of it that a device holds."""
    return weight_of_1b(weight)[1][-2:]


def gathered_bytes(weight: str, bytes_per_number: int = 2) -> int:
    """Return the bytes that a device holds of a matrix after its gather over 8 fsdp ranks."""
    return math.prod(slice_shape(weight)) * 8 * bytes_per_number


@functools.cache
def plan(gather: str = "step") -> Prediction:
    """Return the plan of the 1B model on 32 TPU v4, with weights gathered per step or layer."""
    config = config_of("jaxformer_1b", 8, 2, 2)
    config = dataclasses.replace(config, fsdp=utils.Fsdp(gather=gather))
    return cost.predict(config, hardware.chip_named("v4"))


def sent_over(plan: Prediction, *axes: str) -> float:
    """Return the bytes that a device sends along these axes in a step."""
    return sum(traffic.sent_bytes for traffic in plan.traffic if traffic.axes == axes)


def over_compiled(column: int) -> list[float]:
    """Return a column of ratios of "Predicted over compiled" in docs/measured.md."""
    document = MEASURED.partition("## Predicted over compiled")[2]
    lines = document.partition("\n## ")[0].splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| ")]
    table = [row for row in rows if len(row) == 8 and re.match(r" [\d.]+", row[3])]
    return [float(x) for row in table for x in re.findall(r"\d\.\d+", row[column])]


def sent_bytes(kind: str, result_bytes: int, ranks: int) -> float:
    """Return the bytes that a device sends in a collective on a ring."""
    return Traffic("", (), kind, result_bytes, ranks).sent_bytes


def layer_collectives(part: str, backward: bool = False) -> Counter[str]:
    """Count the collectives of a compiled part of a dense layer of the 1B model, on 2 tensor ranks.

    part      mlp or attention.
    backward  whether the gradients of weights and input are computed as well.
    """
    config = config_of("jaxformer_1b", tensor=2)
    mesh = train.make_mesh(config, jax.devices()[:2])
    declared = model.declare(config).blocks["dense"]  # stacked [virtual, stage, block, layer, ...]
    options = sharded_model.forward_options(config, mesh, None)
    here = model.LayerPosition(*[jnp.int32(0)] * 3)

    def layer(w: model.DenseLayer, x_btD: jax.Array) -> jax.Array:
        if part == "mlp":
            return model.mlp(w.mlp, x_btD, options, here)
        positions = jnp.arange(config.train.seq_len, dtype=jnp.int32)[None]
        context = attention.Context(positions, segments=None)
        return model.attention(w.attention, x_btD, context, options, here, config.model.runs[0])[0]

    def run(w: model.DenseLayer, x: jax.Array, gradient: jax.Array) -> object:
        if not backward:
            return sharded(w, x)
        y, pull_back = jax.vjp(sharded, w, x)
        return y, pull_back(gradient)

    def spec(w: Weight) -> PartitionSpec:
        along = ("tensor" if "tensor" in axes else None for axes in w.dim_axes[4:])
        return PartitionSpec(*along)

    specs, tokens = jax.tree.map(spec, declared), PartitionSpec(None, "tensor")
    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
    w = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[4:], jnp.float32), declared)
    x = jax.ShapeDtypeStruct((4, config.train.seq_len, config.model.hidden_size), jnp.float32)
    text = jax.jit(run).lower(w, x, x).compile().as_text()
    return Counter(re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)\(", text))


def listed(counts: Mapping[str, int]) -> str:
    """Return counts as text, in the order of their names: 2 all-gathers and 1 all-reduce."""
    words = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(counts.items())]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


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


def rope_score(query_at: int, key_at: int) -> float:
    """Return the score of a query and a key of the 1B model at two positions, to 3 digits."""
    m, rng = config_of("jaxformer_1b").model, np.random.default_rng(0)
    heads = jnp.asarray(rng.normal(size=(1, 2, 1, m.qk_rope_head_dim)), jnp.float32)
    query, key = rope.rotate(heads, m, jnp.array([[query_at, key_at]]))[0, :, 0]
    return round(float(jnp.dot(query, key, precision="highest")), 3)


def rope_frequencies() -> np.ndarray:
    """Return the radians by which a position turns each rotary pair of the 1B model."""
    m = config_of("jaxformer_1b").model
    return np.asarray(rope.rope_frequencies(m, m.qk_rope_head_dim), np.float64)


def model_of(name: str) -> utils.Model:
    """Return the model of configs/NAME.toml, or of a published config."""
    published = json.loads((ROOT / "tests/published.json").read_text())
    if name not in published:
        return config_of(name).model
    return model_config.from_hf(published[name], Path(name, "config.json")).model


def cached_values(name: str) -> int:
    """Return the numbers that a layer of a model caches of a token."""
    m = model_of(name)
    return sum(array.heads * array.width for array in attention.kind_of(m).cache(m, 1))


def plain_values(name: str) -> int:
    """Return what it would cache with a key and a value for each query head."""
    m = model_of(name)
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


def flops_share(name: str, T: int, *parts: str) -> float:
    """Return the share of parts, by how their names begin, in a dense layer's forward FLOPs."""
    costs = layer_costs(name, T)
    chosen = sum(flops for part, _, flops in costs if part.startswith(parts))
    return chosen / sum(flops for _, _, flops in costs)


def experts_config(experts: int, K: int) -> utils.Model:
    """Return a model with one group of experts, whose weights of a token sum to 1."""
    m = config_of("tiny").model
    return dataclasses.replace(m, n_routed_experts=experts, num_experts_per_tok=K)


def route_by_hand(scores: Sequence[float], biases: Sequence[float], K: int) -> list[float]:
    """Return the experts of a token with these scores, the best first, and then their weights."""
    E = len(scores)
    logits = np.log(scores) - np.log1p(-np.array(scores))
    w = SimpleNamespace(router=jnp.eye(E), router_bias=None, bias=jnp.asarray(biases, jnp.float32))
    h_btD = jnp.asarray(logits, jnp.float32)[None, None]
    _, choice, weight = routing.route(w, h_btD, experts_config(E, K))
    return [*choice.ravel().tolist(), *(round(x, 3) for x in weight.ravel().tolist())]


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


def intensity(chip: str) -> float:
    """Return the bfloat16 operations of a chip for each byte through its memory."""
    found = hardware.chip_named(chip)
    return found.flops / found.memory_bandwidth


def least_tokens(chip: str, D: int, F: int) -> int:
    """Return from how many tokens on a bfloat16 product with a D x F matrix is bound by FLOPs."""
    least = intensity(chip)
    return math.ceil(least * D * F / (D * F - least * (D + F)))


def flops_per_token(name: str) -> float:
    config = config_of(name)
    return hardware.palm_flops_per_token(config.model, model.declare(config), config.train.seq_len)


@functools.cache
def plans() -> dict[str, dict[str, float]]:
    """Return plans of the 1B model on 32 TPU v4, by mesh, with the other settings of its config."""
    config, chip, found = config_of("jaxformer_1b"), hardware.chip_named("v4"), {}
    for mesh in hardware.meshes(config, 32):
        values = dict(zip(MESH_FLAGS, mesh, strict=True))
        try:
            plan = cost.predict(search.changed(config, values), chip)
        except utils.ConfigError:
            continue
        links = {n: s for n, s in plan.seconds.items() if n not in ("compute", "memory")}
        fsdp, pipeline, _, tensor = mesh
        found[f"{fsdp}, {pipeline}, {tensor}"] = {
            "gib": plan.memory_bytes_per_chip / GIB,
            "compute": plan.seconds["compute"],
            "memory": plan.seconds["memory"],
            "links": sum(links.values()),
            "bubble": plan.bubble,
            "serial": plan.step_s,
        }
    return found


# --- when an axis waits for its links -------------------------------------------------------------


class Machine(NamedTuple):
    """Chips, and the ranks of three meshes: fsdp over all, tensor of neighbors, pipeline apart."""

    chip: str
    chips: int
    tensor: int
    pipeline: int
    beside: int = 1  # tensor ranks beside the pipeline


MACHINES = {
    "v4": Machine("v4", 64, 4, 4),
    "v5e": Machine("v5e", 16, 4, 4),
    "h100": Machine("h100", 8, 8, 4),
    "h100s": Machine("h100", 64, 8, 8, 8),
    # An RTX 4090 in each, with a link of 10 Gbit/s.
    "pcs": Machine("name=pc,flops=165,memory=24,bandwidth=1008,link=1.25", 2, 2, 2),
}


def link_intensity(machine: str, axis: str) -> float:
    """Return the operations that a chip can do for each byte that it sends over an axis."""
    chip, chips, tensor, pipeline, _ = MACHINES[machine]
    found = hardware.chip_named(chip)
    if axis == "pipeline":
        groups = ((pipeline, chips // pipeline),)
        return found.flops * collectives.collective_s(
            found, "collective-permute", 1.0, groups, chips
        )
    ranks = chips if axis == "fsdp" else tensor
    seconds = collectives.collective_s(found, "all-gather", 1.0, ((ranks, 1),), chips)
    return found.flops * seconds * ranks / (ranks - 1)


def fsdp_bytes(machine: str) -> int:
    """Return the bytes for a parameter over fsdp: weights, and gradients once or, on TPUs, twice.

    libtpu makes an all-reduce of a reduce-scatter over a complete slice.
    """
    return 2 + 4 * (1 + hardware.chip_named(MACHINES[machine].chip).is_tpu)


def pipeline_bytes(ranks: int, virtual: int = 1, tensor: int = 1) -> float:
    """Return the bytes for a number of a microbatch's activations, of a step of this pipeline.

    Sends both ways for each chunk, and all-reduces of embedding, its gradient, the last output
    (bfloat16) and its gradient (float32), as the vocabulary is sharded over the ranks. The
    embedding is summed before it is divided over tensor.
    """
    return 4 * virtual + (16 + 4 * tensor) * (ranks - 1) / ranks


def least(machine: str, axis: str) -> float:
    """Return from where on an axis is bound by operations, for layers of 12 D^2 parameters.

    fsdp      tokens of a rank in a step
    tensor    width D
    pipeline  width times layers of a rank, in one chunk
    """
    _, chips, tensor, pipeline, beside = MACHINES[machine]
    of_alpha = {
        "fsdp": fsdp_bytes(machine) / 6 * (chips - 1) / chips,
        "tensor": (tensor - 1) / 4.5,
        "pipeline": pipeline_bytes(pipeline, tensor=beside) / 72,
    }
    return of_alpha[axis] * link_intensity(machine, axis)


@functools.cache
def llama_plan(machine: str, mesh: Sequence[int]) -> tuple[utils.Config, Prediction]:
    """Return configs/llama_1b.toml on a mesh, with AdamW and no recomputation, and its plan.

    A microbatch has one sequence for each rank of fsdp.

    mesh  ranks of fsdp, pipeline and tensor
    """
    config, found = config_of("llama_1b", *mesh), hardware.chip_named(MACHINES[machine].chip)
    each = config.train.global_batch_size // mesh[0]
    changes = {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "train.remat": "none"}
    changes |= {"fsdp.gather": "step", "train.microbatches": each}
    return config, cost.predict(utils.changed(config, changes), found)


def links_over_compute(machine: str, axis: str, mesh: Sequence[int]) -> tuple[float, float]:
    """Return the time of an axis's links over that of the operations, at the figures of the chip.

    By the inequality and by the planner, for llama_plan.
    """
    config, plan = llama_plan(machine, mesh)
    layer = sum(size for _, size, flops in layer_costs("llama_1b", 1) if flops)
    width = layer / (12 * config.model.hidden_size)  # of a layer with 12 D^2 parameters
    offered = {
        "fsdp": plan.tokens_per_step / mesh[0],
        "tensor": width,
        "pipeline": width * config.model.num_hidden_layers / mesh[1],
    }
    by_plan = plan.seconds[axis] / (plan.model_flops_per_chip / plan.chip.flops)
    return least(machine, axis) / offered[axis], by_plan


def depth_config(layers: int) -> utils.Config:
    """Return the config of `--depth`, with the vocabulary of the sample's tokenizer."""
    config = depth.fill(utils.Config(), {"model.vocab_size"}, layers)
    return utils.changed(config, {"model.vocab_size": tokenizer.n_vocab})


def hf_mappings(name: str) -> dict[str, tensors.WeightMapping]:
    """Return the mappings of configs/NAME.toml to Hugging Face's names, by our names."""
    config = config_of(name)
    kind = model_config.kind_of(config.model)
    return {mapping.name: mapping for mapping in tensors.weight_mappings(config, kind)}


def lost_share(interval_s: float, save_s: float, failure_s: float) -> float:
    """Return the share of time that is lost to saves and failures.

    save_s      seconds by which a save delays training
    failure_s   mean seconds between two failures; each loses half an interval on average
    """
    return save_s / interval_s + interval_s / (2 * failure_s)


def evaluate(expression: str) -> Any:
    """Return the value of an answer or formula. Raises PageError if it does not evaluate."""
    try:
        return eval(expression, globals())
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise PageError(f"{expression} does not evaluate: {cause}. Fix it.") from error
