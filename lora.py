"""Low-rank adapters of frozen matrices (LoRA), and frozen matrices in 4 bits (QLoRA).

A run with --lora.rank r starts from the weights of --run.init_from, the base, and freezes them. A
matrix W that --lora.targets names becomes `Adapted`: its product with x is

    x W + alpha / r * (x A) B        A [inputs, r], B [r, outputs]

of which only A and B have gradients and state of the optimizer (arXiv:2106.09685, section 4.1). B
starts as zeros, so the first step sees the base.

With --lora.base nf4 each frozen matrix is `Quantized`: 4 bits for each element, and a scale for
each block of neighbours in its last dimension (arXiv:2305.14314, section 3). It is gathered in this
form, and a layer expands it when it multiplies.

Checkpoints hold what is trained, and name the base by a digest of its arrays.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import utils
from matrix import NF4, Adapted, Quantized, expanded, is_matrix, is_quantized
from utils import Config, ConfigError
from weights import Size, Tree, Weight

# Words of the paths of matrices, by what --lora.targets calls them.
TARGETS = {"attention": ("attention",), "mlp": ("mlp", "shared"), "experts": ("experts",)}
BLOCK = 64  # neighbours that share a scale, or the largest power of two that divides the dimension
LEAST_BLOCK = 16  # with fewer the scales would take more than a bit for each element
SCALE = "bfloat16"


# --- declaring ------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raise ConfigError for settings of [lora] that cannot be trained."""
    lora, others = config.lora, dataclasses.replace(config.lora, rank=0)
    problem = ""
    if not lora.rank:
        if others != utils.Lora():
            problem = "other settings of [lora] have no effect with it. Use --lora.rank 16, say"
    elif not config.run.init_from:
        problem = "adapters need a trained base. Name its run, as --run.init_from runs/base"
    elif config.run.init_optimizer:
        problem = "adapters start without the base's optimizer. Omit --run.init_optimizer"
    elif config.model.matmul_dtype == "float8":
        problem = "adapters have no products in FP8. Use --model.matmul_dtype compute"
    if problem:
        raise ConfigError(f"--lora.rank {lora.rank}: {problem}.")
    if lora.rank:
        check_targets(config)


def check_targets(config: Config) -> None:
    """Raise ConfigError for targets that the model does not have."""
    m, there = config.model, {"attention"}
    if m.dense_layers or m.first_k_dense_replace or (m.moe_layers and m.n_shared_experts):
        there.add("mlp")
    if m.moe_layers:
        there.add("experts")
    if missing := [target for target in config.lora.targets if target not in there]:
        raise ConfigError(
            f"--lora.targets {' '.join(missing)}: the model has no such matrices. Use some of "
            f"{' '.join(target for target in TARGETS if target in there)}."
        )


def adapted(config: Config, declared: Tree) -> Tree:
    """Return the tree of Weights with all frozen, and adapters at the targets.

    Raises  ConfigError if the model has no matrix of a target.
    """
    check_targets(config)
    lora = config.lora
    words = {word for target in lora.targets for word in TARGETS[target]}

    def one(w: Weight) -> Any:
        is_target = bool(w.matrix) and not words.isdisjoint(w.name.split(".")[:-1])
        return _with_adapter(w, lora) if is_target else _frozen(w, lora.base)

    return jax.tree.map(one, declared)


def _frozen(w: Weight, base: str) -> Any:
    """Return the declaration of a frozen weight: in NF4, in bfloat16, or as it is in compute."""
    dtype = "float32" if w.float32 or base == "float32" else SCALE
    w = dataclasses.replace(w, trained=False, frozen=True, dtype=dtype)
    fits = w.matrix and w.sizes[-1].size % LEAST_BLOCK == 0
    return _quantized(w) if base == "nf4" and fits else w


def _quantized(w: Weight) -> Quantized:
    *others, last = w.sizes
    block = math.gcd(last.size, BLOCK)

    def part(name: str, per: int, dtype: str, parameters: float) -> Weight:
        size = last._replace(size=last.size // per, fixed=f"{last.size} in blocks of {block}")
        sizes, name = (*others, size), f"{w.name}.{name}"
        return dataclasses.replace(w, name=name, sizes=sizes, dtype=dtype, parameters=parameters)

    return Quantized(part("codes", 2, "uint8", 2.0), part("scales", block, SCALE, 0.0))


def _with_adapter(w: Weight, lora: utils.Lora) -> Adapted:
    n = len(w.sizes)
    rows, columns = ([dim % n for dim in side] for side in w.matrix)
    batch = [dim for dim in range(n) if dim not in rows + columns]
    rank = Size(lora.rank, "lora.rank")
    inputs = math.prod(w.sizes[dim].size for dim in rows)

    def side(name: str, dims: list[int], at: int, init: Callable) -> Weight:
        """Return A or B, with dimensions of the matrix and the rank as dimension `at`."""
        sizes, axes = [w.sizes[d] for d in dims], [w.dim_axes[d] for d in dims]
        sizes.insert(at, rank)
        axes.insert(at, ())
        return dataclasses.replace(
            w,
            name=f"{w.name}.{name}",
            sizes=tuple(sizes),
            dim_axes=tuple(axes),
            init=init,
            group="rest",
            matrix=None,
        )

    # As PEFT's, and torch's of a layer without adapters.
    limit = inputs**-0.5

    def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -limit, limit)

    a = side("a", [*batch, *rows], len(batch) + len(rows), uniform)
    b = side("b", [*batch, *columns], len(batch), lambda key, shape: jnp.zeros(shape))
    return Adapted(_frozen(w, lora.base), a, b, lora.alpha / lora.rank)


# --- the base -------------------------------------------------------------------------------------


def digest(entries: Mapping[str, Any]) -> str:
    """Return what identifies a base: a digest of the names and digests of its weights.

    entries  `arrays` of the record of its checkpoint (checkpoint.py)
    """
    named = {name: [e["shape"], e["digest"]] for name, e in entries.items()}
    named = {name: value for name, value in named.items() if name.startswith("weights.")}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def load_base(declared: Tree, mesh: Mesh, stored: Mapping[str, Any]) -> Tree:
    """Return the frozen weights, and None for others, from the arrays of the base's checkpoint.

    Each array is converted on the host, layer by layer, as the devices may have no space for all
    of them in float32.

    stored  StoredArray or MergedArray by name, as checkpoint.Checkpoints.arrays returns them
    """

    def one(w: Any) -> Any:
        leaves = [w.codes, w.scales] if isinstance(w, Quantized) else [w]
        if not leaves[0].frozen:
            return None
        name = leaves[0].name.removesuffix(".codes")
        source, dims = stored[f"weights.{name}"], int(name.startswith("blocks."))
        arrays = [np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
        rows = [a.reshape(-1, *a.shape[len(a.shape) - len(source.shape) + dims :]) for a in arrays]
        for index, values in source.parts(dims):
            parts = quantize(values) if isinstance(w, Quantized) else [values]
            for to, part in zip(rows, parts, strict=True):
                to[index if dims else slice(None)] = part
        on_devices = [
            jax.make_array_from_callback(a.shape, NamedSharding(mesh, leaf.spec), a.__getitem__)
            for a, leaf in zip(arrays, leaves, strict=True)
        ]
        return Quantized(*on_devices) if isinstance(w, Quantized) else on_devices[0]

    return jax.tree.map(one, declared, is_leaf=is_quantized)


def quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of a matrix [..., A], as in Quantized."""
    block = math.gcd(w.shape[-1], BLOCK)
    blocks = w.reshape(*w.shape[:-1], -1, block).astype(np.float32)
    scales = np.abs(blocks).max(-1).astype(jnp.dtype(SCALE))
    divisor = np.maximum(scales.astype(np.float32), np.finfo(np.float32).tiny)
    codes = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, blocks / divisor[..., None]).astype(np.uint8)
    low, high = np.split(codes, 2, axis=-1)
    return (low | high << 4).reshape(*w.shape[:-1], -1), scales


# --- merged ---------------------------------------------------------------------------------------


def merged(w: Tree) -> Tree:
    """Return base + scale * A B of each adapted matrix, and the other arrays, in float32."""

    def one(w: Any) -> jax.Array:
        if not isinstance(w, Adapted):
            return expanded(w, jnp.float32)
        base = expanded(w.base, jnp.float32).astype(jnp.float32)
        return base + w.scale * change(w.a, w.b, base.shape)

    return jax.tree.map(one, w, is_leaf=is_matrix)


def change(a: Any, b: Any, shape: tuple[int, ...]) -> Any:
    """Return A B in the shape of the matrix, [batch, rows, columns]; arrays of NumPy or JAX."""
    batch = shape[: a.ndim + b.ndim - 2 - len(shape)]
    rank = a.shape[-1]
    return (a.reshape(*batch, -1, rank) @ b.reshape(*batch, rank, -1)).reshape(shape)


class MergedArray(NamedTuple):
    """An array of a run with adapters, merged as it is read; as runtime.stored_array.StoredArray.

    It has the values that the run multiplied by: those of the base in its --lora.base.
    """

    base: Any  # stored arrays; a and b are None for an array without adapters
    base_dtype: str  # in the run: float32, bfloat16 or nf4
    scale: float
    a: Any = None
    b: Any = None
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def parts(self, dims: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield (index, values) of each element of the first `dims` dimensions."""
        sides = [whole(side) for side in (self.a, self.b) if side]
        for index, values in self.base.parts(dims):
            values = in_dtype(values, self.base_dtype)
            if sides:
                a, b = (side[index] for side in sides)
                values = values + self.scale * change(a, b, values.shape)
            yield index, values

    def whole(self) -> np.ndarray:
        """Return the array."""
        return whole(self)

    def onto(self, like: jax.ShapeDtypeStruct, _: tuple[int, ...]) -> jax.Array:
        """Return the array on devices, in the shape and sharding of `like`."""
        values = self.whole().reshape(like.shape)
        return jax.make_array_from_callback(like.shape, like.sharding, values.__getitem__)


def whole(array: Any) -> np.ndarray:
    """Return the values of a stored or merged array, compared with their digest."""
    [(_, values)] = array.parts(0)
    return values


def in_dtype(w: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values in float32 after a conversion to float32, bfloat16 or nf4."""
    if dtype == "nf4":
        return np.asarray(Quantized(*map(jnp.asarray, quantize(w))).expanded(jnp.float32))
    return w.astype(jnp.dtype(dtype)).astype(np.float32)


def described(config: Config, declared: Tree, step: int, arrays: Mapping[str, Any]) -> dict:
    """Return what a checkpoint records of its base, from which `merge_arrays` merges it.

    step, arrays  of the base's checkpoint, and `arrays` of its record
    """
    leaves = jax.tree.leaves(declared, is_leaf=is_quantized)
    quantized = {w.codes.name.removesuffix(".codes"): "nf4" for w in leaves if is_quantized(w)}
    others = {w.name: w.dtype for w in leaves if not is_quantized(w) and w.frozen}
    scale = config.lora.alpha / config.lora.rank
    found = {"run": config.run.init_from, "step": step, "digest": digest(arrays)}
    return found | {"scale": scale, "dtypes": quantized | others}


def merge_arrays(
    base: Mapping[str, Any], own: Mapping[str, Any], recorded: Mapping[str, Any]
) -> dict[str, MergedArray]:
    """Return the arrays of a model from those of its base and the adapters of a run.

    recorded  `described`
    """
    return {
        f"weights.{name}": MergedArray(
            base[f"weights.{name}"],
            dtype,
            recorded["scale"],
            own.get(f"weights.{name}.a"),
            own.get(f"weights.{name}.b"),
        )
        for name, dtype in recorded["dtypes"].items()
    }
