"""Read and write checkpoints of safetensors files, one tensor in memory at a time.

A file is the length of its header (8 bytes, little-endian); the header, JSON of each tensor's type,
shape and offsets; and the tensors' bytes. A checkpoint is one file, `model.safetensors`, or several
with an index that maps tensors to files. The package safetensors writes all of a file at once, and
reads float8 only with torch.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from runtime.files import check_not_pointer
from utils import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}


class Tensor(NamedTuple):
    """The location of a tensor in a file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        count = math.prod(self.shape)
        return np.fromfile(self.file, self.dtype, count, offset=self.start).reshape(self.shape)

    def write(self, array: np.ndarray) -> None:
        assert array.shape == self.shape and array.dtype == self.dtype
        with self.file.open("r+b") as file:
            file.seek(self.start)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name. Reads the headers only.

    Raises  ConfigError for files that are missing or truncated, types other than TYPES, or a tensor
            that two files have with different values.
    """
    if (folder / SINGLE).is_file():  # has precedence, as in transformers
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        files = _indexed_files(folder / INDEX)
    else:
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}. Give a folder whose weights are "
            "safetensors files, as save_pretrained writes them."
        )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(files)} files in {INDEX}, first "
            f"{missing[0]}. Download the folder again."
        )
    found = {}
    for name in files:
        part = _tensors(folder / name, *_read_header(folder / name))
        for twice in found.keys() & part.keys():
            if not np.array_equal(found[twice].read(), part[twice].read()):
                raise ConfigError(
                    f"{folder} has two tensors {twice} with other values, in "
                    f"{found[twice].file.name} and {name}. Download the folder again."
                )
        found |= part
    return found


def _indexed_files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError):
        raise ConfigError(f"{index} has no valid weight_map. Download it again.") from None


def _read_header(path: Path) -> tuple[dict[str, dict], int]:
    """Return the header of a file, and the offset of the tensors' bytes."""
    size = path.stat().st_size
    check_not_pointer(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if length < size else b"")
        except ValueError:
            raise ConfigError(
                f"{path} is not a safetensors file, or its header is truncated: it has {size} "
                "bytes. Download it again."
            ) from None
    header.pop("__metadata__", None)
    end = 8 + length + _data_bytes(header)
    if size < end:
        raise ConfigError(
            f"{path} is truncated: it has {size} bytes, and its header describes {end}. Download "
            "it again."
        )
    other = {entry["dtype"] for entry in header.values()} - TYPES.keys()
    if other:
        raise ConfigError(
            f"{path} has tensors of type {', '.join(sorted(other))}. Supported are "
            f"{', '.join(TYPES)}."
        )
    return header, 8 + length


def _data_bytes(header: dict[str, dict]) -> int:
    return max((entry["data_offsets"][1] for entry in header.values()), default=0)


def _tensors(path: Path, header: dict[str, dict], start: int) -> dict[str, Tensor]:
    return {
        name: Tensor(path, TYPES[e["dtype"]], tuple(e["shape"]), start + e["data_offsets"][0])
        for name, e in header.items()
    }


def make_folder(
    folder: Path, shapes: Iterable[tuple[str, np.dtype, tuple[int, ...]]], file_bytes: int
) -> dict[str, Tensor]:
    """Allocate files for these tensors, in this order; the caller writes the values.

    file_bytes  maximum size of a file; a larger tensor has a file of its own.
    """
    names = {dtype: name for name, dtype in TYPES.items()}
    headers: list[dict[str, dict]] = [{}]
    end = 0
    for name, dtype, shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        if end and end + size > file_bytes:
            headers.append({})
            end = 0
        entry = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        headers[-1][name] = entry
        end += size
    found: dict[str, Tensor] = {}
    count = len(headers)
    for number, header in enumerate(headers, 1):
        name = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + _data_bytes(header))
        found |= _tensors(folder / name, header, 8 + len(text))
    if count > 1:
        weight_map = {name: tensor.file.name for name, tensor in found.items()}
        total = sum(tensor.bytes for tensor in found.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return found
