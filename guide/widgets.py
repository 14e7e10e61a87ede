"""Make what the pages of the guide show, and what its scripts are compared with.

Sphinx and the browser run without the packages of a run, so site_data computes this before them.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import answers
import check
import facts
import figures
import jax
import numpy as np
import pages
import tables
from answers import Schedule

import dataset
import hardware
from utils import MESH_AXES

WORDS = (" return", " function", " self", " yield", " numpy", " tokenization", "def", " isinstance")
SEEDS = EPOCHS = range(4)  # of the permutations that a reader can choose


def site_data() -> dict[str, Any]:
    """Return the values that guide/extension.py inserts, and the cases of guide/browser.py."""
    asked = [problem for problem in pages.problems().values() if problem.answer]
    return {
        "facts": facts.check(pages.used("fact")),
        "answers": {p.number: check.describe(answers.evaluate(p.answer)) for p in asked},
        "figures": {name: figures.draw(name) for name in pages.used("figure")},
        "tables": {name: tables.TABLES[name]() for name in pages.used("table")},
        "widgets": {
            "mesh": mesh(),
            "plan": answers.plans(),
            "roofline": roofline(),
            "cache": cache(),
            "merges": {word: answers.merges(word) for word in WORDS},
            "permutation": permutation_keys(),
        },
        "cases": {
            "schedules": [*schedules()],
            "permutations": [*permutations()],
            "routings": [*routings()],
            "singular_values": [*singular_values()],
        },
    }


# --- data of widgets ------------------------------------------------------------------------------


def mesh() -> dict[str, Any]:
    """Return the slices of some weights of configs/tiny.toml on (2, 2, 2)."""
    devices = [*np.ndindex(2, 2, 2)]
    on_mesh = jax.make_mesh((1, 2, 2, 1, 2), MESH_AXES, devices=jax.devices()[: len(devices)])
    weights, found = answers.weights_of(answers.config_of("tiny", 2, 2, 2)), {}
    for name, letters in {
        "first.embedding": "V D",
        "blocks.dense.attention.kv_down": "stage D C+R",
        "blocks.dense.attention.out": "stage N W D",
        "blocks.dense.mlp.gate": "stage D F",
        "blocks.dense.mlp.down": "stage F D",
        "blocks.dense.mlp.norm": "stage D",
        "blocks.moe.moe.experts.gate": "stage E D G",
        "blocks.moe.moe.router": "stage D E",
    }.items():
        weight, dims = weights[name], letters.split()
        kept = [*range(len(weight.shape))][-len(dims) :]
        if dims[0] == "stage":
            kept[0] = 1  # weights of blocks are stacked: [virtual, stage, block, layer, ...]
        sharding = jax.sharding.NamedSharding(on_mesh, weight.spec)
        held = sharding.devices_indices_map(weight.shape)
        slices = [
            [held[device][dim].indices(weight.shape[dim])[:2] for dim in kept]
            for device in on_mesh.devices.flat
        ]
        found[name] = {
            "shape": [weight.shape[dim] for dim in kept],
            "dims": dims,
            "layout": tables.layout(dims, [weight.dim_axes[dim] for dim in kept]),
            "slices": slices,
        }
    return {"devices": devices, "weights": found}


def roofline() -> dict[str, dict[str, float]]:
    names = {"TPU v4": "v4", "TPU v5p": "v5p", "TPU v6e": "v6e", "A100": "a100", "H100": "h100"}
    chips = {shown: hardware.chip_named(name) for shown, name in names.items()}
    return {
        shown: {"flops": chip.flops, "bandwidth": chip.memory_bandwidth}
        for shown, chip in chips.items()
    }


def cache() -> dict[str, dict[str, int]]:
    """Return layers and cached numbers of a token of some models. Two are published."""
    return {
        name: {
            "layers": answers.model_of(name).num_hidden_layers,
            "cached": answers.cached_values(name),
            "plain": answers.plain_values(name),
        }
        for name in (*figures.CACHES, "deepseek-v3", "kimi-k2")
    }


def permutation_keys() -> dict[str, list[str]]:
    """Return {"seed epoch": round keys}, for a widget that has no numpy."""
    found = {}
    for seed, epoch in itertools.product(SEEDS, EPOCHS):
        sequence = np.random.SeedSequence([seed, epoch])
        keys = sequence.generate_state(dataset.FEISTEL_ROUNDS, np.uint64)
        found[f"{seed} {epoch}"] = [str(key) for key in keys]
    return found


# --- cases, to compare with scripts of guide/static -----------------------------------------------


def schedules() -> Iterator[tuple[list[int], str]]:
    """Yield ([pipeline, virtual, microbatches], ticks, bubble and tasks as JSON)."""
    for sizes in itertools.product(range(1, 9), range(1, 5), range(1, 33)):
        pipeline, virtual, microbatches = sizes
        if virtual == 1 or microbatches % pipeline == 0:
            s = Schedule(*sizes)
            slots = sum((end - first) * sum(kinds) for first, end, *kinds in s.phases)
            found = [s.ticks, [slots - 2 * s.tasks_per_rank, slots]]
            found += [s.tasks_at(tick, rank) for rank in range(pipeline) for tick in range(s.ticks)]
            yield sizes, json.dumps(found, separators=(",", ":"))


def permutations() -> Iterator[tuple[list[int], str]]:
    """Yield ([size, seed, epoch], order as JSON)."""
    for size, seed, epoch in itertools.product((1, 2, 3, 5, 17, 64, 100, 257), SEEDS, EPOCHS):
        order = dataset.permute(np.arange(size), size, seed, epoch)
        yield (size, seed, epoch), json.dumps(order.tolist(), separators=(",", ":"))


def routings() -> Iterator[tuple[list[Any], str]]:
    """Yield ([choices, experts, capacity, tile], slots and number of tiles as JSON)."""
    rng = np.random.default_rng(0)
    for number in range(200):
        if number % 20 == 0:  # JAX compiles for each size
            experts, K = int(rng.integers(2, 9)), int(rng.integers(1, 3))
            tokens, capacity, tile = (int(n) for n in rng.integers(1, (33, 9, 6)))
        popular = rng.dirichlet(np.ones(experts))
        choices = [
            rng.choice(experts, K, replace=False, p=popular * 0.9 + 0.1 / experts).tolist()
            for _ in range(tokens)
        ]
        slots = answers.assigned(choices, experts, capacity)
        found = [slots, answers.tiles_of(choices, experts, tile)]
        yield (choices, experts, capacity, tile), json.dumps(found, separators=(",", ":"))


def singular_values() -> Iterator[tuple[float, str]]:
    """Yield (singular value, the value after five steps to nine digits, as JSON)."""
    for value in np.geomspace(1e-3, 1, 50):
        yield value, f'"{answers.polynomial(value):#.9g}"'
