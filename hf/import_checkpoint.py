"""Import of a checkpoint of Hugging Face transformers: its config, tensors and tokenizer."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import hf_tokenizer
from data.progress import progress
from data.tokenizer import RANKS, begin_of_text, keep_files, load_tokenizer, table_sha256
from hf import model_config
from hf.families import V2, V3
from hf.model_config import HfModel
from hf.safetensors_files import Tensor
from hf.tensors import OUTSIDE_LAYERS, WeightMapping
from runtime.errors import listed
from utils import ConfigError

PREFIX = "model."  # of all weights but the output matrix
SCALE = "_scale_inv"  # suffix of the scales of a float8 tensor
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the parts of a tensor in MXFP4
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # by the low three bits of a code


class Packed(NamedTuple):
    """A tensor of all experts in MXFP4 (Open Compute Project, Microscaling formats 1.0).

    32 neighbours of an output's inputs share an exponent, and two of them a byte.
    """

    blocks: Tensor  # [experts, outputs, inputs / 32, 16]
    scales: Tensor  # [experts, outputs, inputs / 32], above 127

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, _ = self.blocks.shape
        return experts, blocks * 32, outputs

    def read(self) -> np.ndarray:
        codes = self.blocks.read()
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 32)
        values = FP4[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
        exponents = self.scales.read().astype(np.int32)[..., None] - 127
        return np.ldexp(values, exponents).reshape(*codes.shape[:2], -1).swapaxes(1, 2)


def read_config(folder: Path) -> tuple[HfModel, dict[str, Any]]:
    """Return the model of a folder, and its config.json."""
    file = folder / "config.json"
    if not file.is_file():
        fix = "Give the folder of a model."
        if (folder / "adapter_config.json").is_file():
            fix = "It is an adapter. Merge it into its base model (merge_and_unload of peft)."
        raise ConfigError(f"--folder {folder} has no config.json. {fix}")
    table = hf_tokenizer.read_settings(file)
    return model_config.from_hf(table, file), table


def with_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the prefix that a model saved without its output matrix lacks."""
    if any(name.startswith(PREFIX) for name in tensors):
        return tensors
    return {n if n.startswith("lm_head.") else f"{PREFIX}{n}": t for n, t in tensors.items()}


def with_packed(tensors: dict[str, Tensor]) -> dict[str, Tensor | Packed]:
    """Return the tensors, of which two that are the parts of one in MXFP4 are this one."""
    found: dict[str, Tensor | Packed] = {}
    for name, tensor in tensors.items():
        other = tensors.get(name.removesuffix(BLOCKS) + SCALES) if name.endswith(BLOCKS) else None
        if other and tensor.shape == (*other.shape, 16):
            found[name.removesuffix(BLOCKS)] = Packed(tensor, other)
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors):
            found[name] = tensor
    return found


def with_ties(hf_model: HfModel, tensors: Mapping[str, Tensor]) -> HfModel:
    """Return the model with an output matrix of its own if its files have one that differs from the
    embedding. transformers then ignores `tie_word_embeddings`, too. A tied model of DeepSeek's
    classes has the same matrix twice (hf/tensors.py).
    """
    m, kind = hf_model.model, hf_model.kind
    output, embedding = (tensors.get(OUTSIDE_LAYERS[n]) for n in ("last.output", "first.embedding"))
    if not (output and embedding) or not (m.tie_word_embeddings or kind in (V2, V3)):
        return hf_model
    tied = output.shape == embedding.shape and np.array_equal(output.read(), embedding.read())
    return hf_model._replace(model=dataclasses.replace(m, tie_word_embeddings=tied))


def check_tensors(
    folder: Path, hf_model: HfModel, mappings: list[WeightMapping], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ConfigError unless names, shapes and scales of the tensors are those of the model."""
    expected = {name: mapping for mapping in mappings for name in mapping.tensor_names.values()}
    missing = [name for name in expected if name not in tensors]
    scales = {f"{name}{SCALE}" for name in expected}  # read with their tensors
    others = tensors.keys() - expected.keys() - scales
    extra = [name for name in tensors if name in others and not _is_unused(name, hf_model)]
    problems, fix = [], "Download the folder again."
    if missing:
        lacks = f"lacks {len(missing)} of {len(expected)} tensors of its config"
        problems.append(f"{lacks}: {listed(missing)}")
    if extra:
        problems.append(f"has {len(extra)} tensors that are not in its config: {listed(extra)}")
        fix = "They belong to another model, or to another layout of it."
    if problems:
        raise ConfigError(f"{folder} {'. It '.join(problems)}. {fix}")
    for name, mapping in expected.items():
        tensor, scale = tensors[name], tensors.get(f"{name}{SCALE}")
        if tensor.shape != mapping.hf_shape:
            raise ConfigError(
                f"{folder}: {name} is {tensor.shape}, and by the config {mapping.hf_shape}. The "
                "config belongs to another model."
            )
        needed = None
        if tensor.dtype.itemsize == 1:  # float8
            sizes = zip(tensor.shape, hf_model.scale_block or (), strict=False)
            needed = tuple(-(-n // size) for n, size in sizes)
        if (shape := scale and scale.shape) != needed:
            raise ConfigError(
                f"{folder}: {name}{SCALE} is {shape or 'absent'}, and {tensor.dtype} in blocks of "
                f"{hf_model.scale_block} needs {needed or 'none'}: quantization_config does not "
                "match the tensors. Download the folder again."
            )


def _is_unused(name: str, hf_model: HfModel) -> bool:
    """Return whether a tensor is redundant: frequencies, tied output, skipped layers."""
    first = hf_model.model.num_hidden_layers
    skipped = tuple(f"model.layers.{first + i}." for i in range(hf_model.skipped_layers))
    tied = hf_model.model.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq") or name.startswith(skipped)


def read_arrays(
    hf_model: HfModel, mappings: list[WeightMapping], tensors: Mapping[str, Tensor], scratch: Path
) -> dict[str, np.ndarray]:
    """Return our weight arrays by name, float32, memory-mapped from files in `scratch`."""
    arrays = {}
    with progress(sum(mapping.size * 4 for mapping in mappings)) as bar:
        for mapping in mappings:
            file = scratch / mapping.name
            with file.open("wb") as reserved:
                reserved.truncate(mapping.size * 4)
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    # Otherwise a write to the map would end the process by SIGBUS on a full disk.
                    os.posix_fallocate(reserved.fileno(), 0, mapping.size * 4)
            array = np.memmap(file, np.float32, "r+", shape=mapping.shape)  # zeros
            for index, name in mapping.tensor_names.items():
                array[index] = mapping.from_hf(read_float32(tensors, name, hf_model.scale_block))
                bar.update(array[index].nbytes)
            array.flush()
            arrays[f"weights.{mapping.name}"] = np.memmap(
                file, np.float32, "r", shape=mapping.shape
            )
    return arrays


def read_float32(
    tensors: Mapping[str, Tensor], name: str, block: tuple[int, int] | None
) -> np.ndarray:
    """Read a tensor; float8 values are multiplied by the scale of their block."""
    w = tensors[name].read().astype(np.float32)
    scale = tensors.get(f"{name}{SCALE}")
    if scale is None:
        return w
    rows, columns = (np.arange(n) // size for n, size in zip(w.shape, block, strict=True))
    return w * scale.read().astype(np.float32)[rows[:, None], columns[None, :]]


def copy_settings(folder: Path, out: Path) -> None:
    """Keep what no weight holds, such as the context length and the sampling, for export."""
    out.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            shutil.copy(folder / name, out)


def copy_tokenizer(folder: Path, out: Path, end_of_text: Any) -> dict[str, Any]:
    """Copy a folder's tokenizer to `out`, and describe it for the checkpoint's config.

    end_of_text  eos_token_id of config.json, for a folder without a tokenizer.
    """
    if not any((folder / name).is_file() for name in (hf_tokenizer.TABLE, RANKS)):
        return {"tokenizer": "", "end_of_text": [*np.ravel(end_of_text).tolist(), None][0]}
    keep_files(f"{folder}/", out)
    tokenizer = load_tokenizer(str(out))
    begin = begin_of_text(tokenizer, always=False)
    return {
        "tokenizer": str(out),
        "tokenizer_sha256": table_sha256(tokenizer),
        "end_of_text": tokenizer.eot_token,
    } | ({} if begin is None else {"begin_of_text": [begin]})
