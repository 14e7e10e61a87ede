"""Safetensors folders, read and written a tensor at a time: whatever their size, one is in memory.

A file is the length of its header (8 bytes, little-endian); the header, JSON of each tensor's type,
shape and place; and the tensors' bytes. A folder has one, `model.safetensors`, or parts with an
index that says which part a tensor is in. The package safetensors writes a file at once, and reads
float8 with torch alone.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}
ALIGNED = 8  # bytes that a header is a multiple of


class Tensor(NamedTuple):
    """A tensor, and where its bytes are."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # in the file

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
    """The tensors of a folder by name; of them only what the headers say is read.

    Raises  ValueError when files are missing or cut short, or hold other types than TYPES.
    """
    if (folder / INDEX).is_file():
        files = _parts(folder / INDEX)
    elif (folder / WHOLE).is_file():
        files = [WHOLE]
    else:
        raise ValueError(
            f"{folder} has neither {WHOLE} nor {INDEX}. Give a folder whose weights are "
            "safetensors, as save_pretrained writes them."
        )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(files)} files that {INDEX} names, first "
            f"{missing[0]}. Fetch the folder again."
        )
    return {name: tensor for file in files for name, tensor in _read_header(folder / file)}


def _parts(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError):
        raise ValueError(f"{index} does not say which files there are. Fetch it again.") from None


def _read_header(path: Path) -> list[tuple[str, Tensor]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if length < size else b"")
        except ValueError:
            raise ValueError(
                f"{path} is no safetensors file, or cut short within its header: it has {size} "
                "bytes. Fetch it again."
            ) from None
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise ValueError(
            f"{path} is cut short: it has {size} bytes, and its header tells of {end}. Fetch it "
            "again."
        )
    other = {entry["dtype"] for entry in header.values()} - TYPES.keys()
    if other:
        raise ValueError(
            f"{path} holds numbers of type {', '.join(sorted(other))}. What can be read is "
            f"{', '.join(TYPES)}."
        )
    return [
        (
            name,
            Tensor(path, TYPES[e["dtype"]], tuple(e["shape"]), 8 + length + e["data_offsets"][0]),
        )
        for name, e in header.items()
    ]


def make_folder(
    folder: Path, shapes: Iterable[tuple[str, np.dtype, tuple[int, ...]]], part_bytes: int
) -> dict[str, Tensor]:
    """Files with room for all these tensors, in this order, which are then to be written.

    part_bytes  most bytes of a file, but for one tensor that alone has more.
    """
    names = {dtype: name for name, dtype in TYPES.items()}
    parts: list[dict[str, dict]] = [{}]
    end = 0
    for name, dtype, shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        if end and end + size > part_bytes:
            parts.append({})
            end = 0
        parts[-1][name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    whole = len(parts) == 1
    made, weight_map = {}, {}
    for number, header in enumerate(parts, 1):
        path = folder / (WHOLE if whole else f"model-{number:05}-of-{len(parts):05}.safetensors")
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % ALIGNED)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
        made |= dict(_room(path, header, 8 + len(text)))
        weight_map |= dict.fromkeys(header, path.name)
    if not whole:
        total = sum(tensor.bytes for tensor in made.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return made


def _room(path: Path, header: dict[str, dict], start: int) -> Iterable[tuple[str, Tensor]]:
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    with path.open("r+b") as file:
        file.truncate(start + end)
    for name, entry in header.items():
        at = start + entry["data_offsets"][0]
        yield name, Tensor(path, TYPES[entry["dtype"]], tuple(entry["shape"]), at)
