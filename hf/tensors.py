"""Names and layouts of the weights in Hugging Face's checkpoints.

The layers are the same but for two things. torch stores a matrix as [outputs, inputs]. The rotary
pairs of DeepSeek are interleaved, (2i, 2i + 1), and ours are halves, (i, i + R/2): columns are
permuted.

Letters as in model.py.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import jax
import numpy as np

import model
import utils
from hf.families import FAMILIES, GEMMA3, V2, V3
from utils import Config

OUTSIDE_LAYERS = {
    "first.embedding": "model.embed_tokens.weight",
    "last.norm": "model.norm.weight",
    "last.output": "lm_head.weight",
}
TensorShape = tuple[str, np.dtype, tuple[int, ...]]  # name, type and shape


class WeightMapping(NamedTuple):
    """One of our weight arrays, and the Hugging Face tensors that are stacked in it."""

    name: str  # ours, for example blocks.moe.moe.experts.gate
    shape: tuple[int, ...]
    stack_dims: int  # leading dimensions that number the tensors
    tensor_names: dict[tuple[int, ...], str]  # by index in the stack; empty: no such tensor
    input_dims: int = 0  # contracted dimensions of a matrix; 0: the same values in both
    rotary: int = 0  # R, if the last R columns are rotary
    rows: int = 0  # V, if the rows are padded
    offset: float = 0.0  # what the tensor lacks
    columns: slice | None = None  # of a tensor of all experts that are these values

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def unstacked_shape(self) -> tuple[int, ...]:
        return self.shape[self.stack_dims :]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        shape, n = self.unstacked_shape, self.input_dims
        if self.columns:
            return *shape[:-1], shape[-1] * self.columns.step
        if n:
            return math.prod(shape[n:]), math.prod(shape[:n])
        return (self.rows, *shape[1:]) if self.rows else (math.prod(shape),)

    def to_hf(self, w: np.ndarray) -> np.ndarray:
        """Convert one array of the stack to the tensor, or to these columns of it."""
        if self.columns:
            return w
        if self.rotary:
            w = w[..., self._columns()]
        if self.input_dims:
            return w.reshape(math.prod(w.shape[: self.input_dims]), -1).T
        w = w - self.offset if self.offset else w
        return w[: self.rows] if self.rows else w.reshape(-1)

    def from_hf(self, w: np.ndarray) -> np.ndarray:
        """Convert a tensor to one array of the stack; padding rows are zeros."""
        if self.columns:
            return w[..., self.columns]
        if not self.rows:
            w = (w.T if self.input_dims else w).reshape(self.unstacked_shape)
        w = w + self.offset if self.offset else w
        if self.rotary:
            w = w[..., np.argsort(self._columns())]
        padding = self.unstacked_shape[0] - self.rows
        return np.pad(w, [(0, padding), (0, 0)]) if self.rows else w

    def _columns(self) -> np.ndarray:
        """Return our column number of each of the tensor's columns."""
        columns, first = np.arange(self.shape[-1]), self.shape[-1] - self.rotary
        return np.concatenate([columns[:first], columns[first:].reshape(2, -1).T.ravel()])


def weight_mappings(config: Config, kind: str, interleaved: bool = True) -> list[WeightMapping]:
    """Return the mapping of every weight; `interleaved` is the layout of their rotary pairs."""
    declared = jax.tree.leaves(model.declare(on_one_device(config)))
    return [_mapping(w.name, w.shape, config.model, kind, interleaved) for w in declared]


def on_one_device(config: Config) -> Config:
    """Return the config of the merged model on one device."""
    one = utils.Mesh(fsdp=1, pipeline=1, tensor=1)
    return dataclasses.replace(config, mesh=one, lora=utils.Lora())


def tensor_shapes(
    mappings: list[WeightMapping], m: utils.Model, kind: str, dtype: np.dtype
) -> list[TensorShape]:
    """Return the tensors of a checkpoint, layer by layer.

    DeepSeek's classes require a shared expert, which is zeros in a model without one, and an output
    matrix, which is the embedding in a model with tied ones.
    """
    out = []
    for mapping in mappings:
        own_dtype = np.dtype(np.float32) if mapping.name.endswith("moe.bias") else dtype
        if not (mapping.columns and mapping.columns.start):  # the first part names the tensor
            out += [(name, own_dtype, mapping.hf_shape) for name in mapping.tensor_names.values()]
        if mapping.name == "first.embedding" and m.tie_word_embeddings and kind in (V2, V3):
            out.append((OUTSIDE_LAYERS["last.output"], dtype, mapping.hf_shape))
    if kind in (V2, V3) and m.moe_layers and not m.n_shared_experts:
        D, F = m.hidden_size, m.moe_intermediate_size
        routers = [name for name, *_ in out if name.endswith(".mlp.gate.weight")]
        for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            new = f".mlp.shared_experts.{part}_proj."
            out += [(name.replace(".mlp.gate.", new), dtype, shape) for name in routers]

    def layer(tensor: TensorShape) -> int:
        if tensor[0].startswith("model.layers."):
            return int(tensor[0].split(".")[2])
        return -1 if tensor[0] == OUTSIDE_LAYERS["first.embedding"] else m.num_hidden_layers

    return sorted(out, key=layer)


def _mapping(
    name: str, shape: tuple[int, ...], m: utils.Model, kind: str, interleaved: bool
) -> WeightMapping:
    # Gemma stores what the scale of a norm differs from 1 by.
    offset = float(kind == GEMMA3 and "norm" in name.rpartition(".")[2])
    if name in OUTSIDE_LAYERS:
        rows = 0 if name == "last.norm" else m.vocab_size
        return WeightMapping(name, shape, 0, {(): OUTSIDE_LAYERS[name]}, rows=rows, offset=offset)
    where, part, in_layer = name.split(".", 2)
    [run] = [run for run in (*m.prefix, *m.runs) if run.name == part]
    if where == "blocks":
        shape = (m.blocks, *shape[3:])  # [virtual, stage, block, ...] in the model
    pattern, _, columns = FAMILIES[kind].names.get(in_layer, "").partition("[")
    per_expert = in_layer.startswith("moe.experts.") and not columns
    stack_dims = (where == "blocks") + run.stacked + per_expert
    is_matrix = len(shape) - stack_dims > 1 and not in_layer.endswith(("_bias", "norm"))
    is_rotary = interleaved and in_layer in ("attention.query.up", "attention.kv_down")
    if in_layer == "attention.query.up" and not m.q_lora_rank:
        pattern = "self_attn.q_proj.weight"
    tensor_names = {}
    if pattern:
        for index in itertools.product(*map(range, shape[:stack_dims])):
            layer = index[-1 - per_expert] if run.stacked else 0
            if where == "blocks":
                layer += m.first_k_dense_replace + index[0] * m.period + run.first
            tensor_names[index] = f"model.layers.{layer}.{pattern.format(*index[-1:])}"
    if columns:
        begin, _, step = columns.removesuffix("]").split(":")
        columns = slice(int(begin or 0), None, int(step))
        return WeightMapping(name, shape, stack_dims, tensor_names, columns=columns)
    input_dims = is_matrix * (2 if in_layer == "attention.out" else 1)
    rotary = is_rotary * m.qk_rope_head_dim
    return WeightMapping(name, shape, stack_dims, tensor_names, input_dims, rotary, offset=offset)
