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

from runtime.storage import check_not_pointer
from utils import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
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

    def write(self, array: np.ndarray, columns: slice | None = None) -> None:
        """Write all values, or those of some columns."""
        if columns:
            whole = np.memmap(self.file, self.dtype, "r+", self.start, self.shape)
            whole[..., columns] = array
            return whole.flush()
        assert array.shape == self.shape and array.dtype == self.dtype
        with self.file.open("r+b") as file:
            file.seek(self.start)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name. Reads the headers only.

    Of a tensor in two files the last one counts, as in transformers.
    Raises  ConfigError for files that are missing or truncated, or types other than TYPES.
    """
    files, index = [SINGLE], folder / INDEX
    if not (folder / SINGLE).is_file():  # it has precedence, as in transformers
        if not index.is_file():
            raise ConfigError(
                f"{folder} has neither {SINGLE} nor {INDEX}. Give a folder whose weights are "
                "safetensors files, as save_pretrained writes them."
            )
        try:
            files = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError):
            raise ConfigError(f"{index} has no valid weight_map. Download it again.") from None
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(files)} files in {INDEX}, first "
            f"{missing[0]}. Download the folder again."
        )
    return {name: tensor for file in files for name, tensor in _read_header(folder / file).items()}


def _read_header(path: Path) -> dict[str, Tensor]:
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
    if other := {entry["dtype"] for entry in header.values()} - TYPES.keys():
        raise ConfigError(
            f"{path} has tensors of type {', '.join(sorted(other))}. Supported are "
            f"{', '.join(TYPES)}."
        )
    tensors = _tensors(path, header, 8 + length)
    end = max((tensor.start + tensor.bytes for tensor in tensors.values()), default=0)
    if size < end:
        raise ConfigError(
            f"{path} is truncated: it has {size} bytes, and its header describes {end}. Download "
            "it again."
        )
    return tensors


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
    sizes = [0]
    for name, dtype, shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        if sizes[-1] and sizes[-1] + size > file_bytes:
            headers.append({})
            sizes.append(0)
        begin, sizes[-1] = sizes[-1], sizes[-1] + size
        entry = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, sizes[-1]]}
        headers[-1][name] = entry
    tensors: dict[str, Tensor] = {}
    count = len(headers)
    for number, (header, size) in enumerate(zip(headers, sizes, strict=True), 1):
        name = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        tensors |= _tensors(folder / name, header, 8 + len(text))
    if count > 1:
        weight_map = {name: tensor.file.name for name, tensor in tensors.items()}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tensors
