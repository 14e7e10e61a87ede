"""Arrays of a checkpoint, read with tensorstore: rows, slices or chunks."""

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from runtime import array_digests, storage
from utils import ConfigError

# Prefixes of tensorstore's errors about damaged content. Errors of INVALID_ARGUMENT have no prefix
# but contain UNDECODABLE. After any other error, reading again may succeed.
DAMAGE = ("NOT_FOUND: ", "DATA_LOSS: ", "FAILED_PRECONDITION: ", "OUT_OF_RANGE: ")
UNDECODABLE = "Error decoding "


class Damaged(ConfigError):
    """The content of a checkpoint is not what was saved."""


def is_damage(error: Exception) -> bool:
    """Return whether an error of tensorstore means that the content is damaged."""
    return str(error).startswith(DAMAGE) or UNDECODABLE in str(error)


def open_arrays(folder: str, entries: Mapping[str, Any]) -> dict[str, "StoredArray"]:
    """Open arrays of a folder that Orbax wrote, by name.

    entries  the description of each array in RECORD (checkpoint.py)
    """
    base = f"{'' if storage.is_remote(folder) else 'file://'}{folder}/"
    context = ts.Context(storage.at(folder).tensorstore_context)

    def spec(name: str) -> dict[str, Any]:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        return {"driver": "zarr", "kvstore": kvstore}

    futures = {n: ts.open(spec(n), open=True, read=True, context=context) for n in entries}
    return {name: StoredArray(entries[name], f.result()) for name, f in futures.items()}


class StoredArray:
    """An array of a checkpoint, in its canonical shape. Reads raise tensorstore's errors.

    entry  its description in RECORD
    store  the array in its stored shape
    """

    def __init__(self, entry: Mapping[str, Any], store: ts.TensorStore):
        self.shape, self.dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
        self.digest = tuple(entry["digest"])
        stages = tuple(entry["stages"])
        stored = (*stages, *self.shape[1:]) if stages else self.shape
        if (store.shape, store.dtype.numpy_dtype) != (stored, self.dtype):
            raise ValueError(f"DATA_LOSS: it has {store.dtype.name}{list(store.shape)}")
        self._stages = stages or (1, 1, *(self.shape[:1] or (1,)))
        missing = 0 if stages else 2 if self.shape else 3  # dimensions of _stages
        self._chunk = (1,) * missing + (store.chunk_layout.read_chunk.shape or ())
        self._store = store[(ts.newaxis,) * missing]

    def read(self, rows: np.ndarray, rest: tuple[slice, ...]) -> np.ndarray:
        """Return [len(rows), ...]: rows of the first dimension, slices of the others."""
        return self._store[(*np.unravel_index(rows, self._stages), *rest)].read().result()

    def whole(self) -> np.ndarray:
        """Return the array."""
        rows = np.arange(math.prod(self._stages))
        return self.read(rows, (slice(None),) * (len(self.shape) - 1)).reshape(self.shape)

    def parts(self, dims: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield (index, values) of each element of the first `dims` dimensions, chunk by chunk.

        Raises  Damaged, after the last one, if the digest of the values is not that in RECORD
        """
        digests = []
        for index, values in self._parts(dims) if dims else [((), self.whole())]:
            first = np.ravel_multi_index(index, self.shape[:dims]) if dims else 0
            digests.append(array_digests.of_numpy(values, self.shape, int(first) * values.size))
            yield index, values
        if array_digests.total(digests) != self.digest:
            raise Damaged("its values are not those that were saved")

    def _parts(self, dims: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        lead, chunk = dims + 2, self._chunk
        starts = map(range, itertools.repeat(0), self._store.shape[:lead], chunk)
        for start in itertools.product(*starts):
            index = tuple(slice(a, a + n) for a, n in zip(start, chunk, strict=False))
            values = self._store[index].read().result()
            for inner in np.ndindex(values.shape[:lead]):
                v, p, k, *more = map(sum, zip(start, inner, strict=True))
                yield (int(np.ravel_multi_index((v, p, k), self._stages)), *more), values[inner]

    def onto(self, like: jax.ShapeDtypeStruct, stages: tuple[int, ...]) -> jax.Array:
        """Return the array on devices, in the shape and sharding of `like`, stacked by `stages`."""

        @cache  # for devices that hold the same slice
        def read(index: tuple[tuple[int | None, int | None], ...]) -> np.ndarray:
            slices, lead = tuple(slice(*bounds) for bounds in index), len(stages) or 1
            rows = np.arange(math.prod(self._stages)).reshape(stages or self.shape[:1])
            rows = rows[slices[:lead]]
            values = self.read(rows.reshape(-1), slices[lead:])
            return values.reshape(rows.shape + values.shape[1:])

        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: read(tuple((s.start, s.stop) for s in index))
        )
