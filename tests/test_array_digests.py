"""A digest depends on every bit and its position, and not on mesh, layout or what computes it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import array_digests

RANDOM = np.random.default_rng(0)
KINDS = {
    "float32": RANDOM.standard_normal((6, 5, 8), np.float32),
    "bfloat16": RANDOM.standard_normal((4, 7), np.float32).astype(jnp.bfloat16),
    "uint8": RANDOM.integers(0, 256, 9, np.uint8),
    "bool": np.array([True, False, True]),
    "scalar": np.int32(-5),
    "not a number": np.array([np.nan, -0.0, 0.0, np.inf], np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "of several batches": RANDOM.integers(0, 2**31, (3, array_digests.BATCH), np.int32),
}


def on_devices(x, merged=1):
    return tuple(np.asarray(jax.jit(lambda x: array_digests.digest(x, merged))(x)).tolist())


def test_numpy_and_devices_compute_the_same_for_every_type():
    for kind, x in KINDS.items():
        x = np.asarray(x)
        assert array_digests.of_numpy(x) == on_devices(x), kind
        assert array_digests.of_numpy(np.asfortranarray(x)) == array_digests.of_numpy(x)
    x = RANDOM.standard_normal((3, 5))  # an element of eight bytes is two words
    assert array_digests.of_numpy(x) == array_digests.of_numpy(x.view(np.uint32).reshape(3, 5, 2))
    # fmix32(0) and fmix32(1), as in other implementations of MurmurHash3
    assert array_digests.mix(np.array([0, 1], np.uint32)).tolist() == [0, 0x514E28B7]


def test_a_digest_does_not_depend_on_mesh_layout_or_stages():
    x = {"a": KINDS["float32"][:4], "c": KINDS["scalar"]}
    x["blocks"] = RANDOM.standard_normal((2, 2, 4, 3, 8), np.float32)
    expected = {name: array_digests.of_numpy(np.asarray(a)) for name, a in x.items()}
    expected["blocks"] = array_digests.of_numpy(x["blocks"].reshape(16, 3, 8))
    for shape, spec in (((2, 2, 2), P("x", None, ("z", "y"))), ((1, 1, 8), P())):
        mesh = jax.make_mesh(shape, ("x", "y", "z"))
        specs = {"a": spec, "c": P(), "blocks": P(None, "y", None, None, "z")}
        put = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in x.items()}
        assert array_digests.of_arrays(put, {"blocks": 3}) == expected


@pytest.mark.parametrize("kind", ["bfloat16", "of several batches", "eight bytes"])
def test_digests_of_parts_add_up(kind):
    x = RANDOM.standard_normal((6, 5)) if kind == "eight bytes" else KINDS[kind]
    for length in (1, 7, x[0].size, array_digests.BATCH - 1, x.size):
        if x.size // length < 300:
            starts = range(0, x.size, length)
            flat = x.reshape(-1)
            parts = [array_digests.of_numpy(flat[i : i + length], x.shape, i) for i in starts]
            assert array_digests.total(parts) == array_digests.of_numpy(x)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "uint8"])
def test_every_bit_that_flips_changes_both_sums(kind):
    x = KINDS[kind].reshape(-1)[:20]
    before, words = array_digests.of_numpy(x), array_digests.WORDS[x.dtype.itemsize]
    for place, bit in itertools.product(range(x.size), range(8 * x.dtype.itemsize)):
        changed = x.copy()
        changed.view(words)[place] ^= words(1 << bit)
        assert all(a != b for a, b in zip(array_digests.of_numpy(changed), before, strict=True))
    for place in range(1, x.size):  # exchanged elements
        changed = np.concatenate([x[place : place + 1], x[1:place], x[:1], x[place + 1 :]])
        assert array_digests.of_numpy(changed) != before


def test_positions_above_32_bits_are_counted_in_rows(monkeypatch):
    """The rows are the dimensions before those that 32 bits can number."""
    row_dims = array_digests._row_dims
    assert row_dims((5, 1 << 20, 1 << 12)) == 1 and row_dims((1 << 16, 1 << 16)) == 0
    x = RANDOM.integers(-(2**31), 2**31, (2, 3, 2, 5, 4), np.int32)
    merged = x.reshape(12, 5, 4)
    for rows in (1, 2):
        monkeypatch.setattr(array_digests, "_row_dims", lambda shape, rows=rows: rows)
        assert array_digests.of_numpy(merged) == on_devices(x, 3) == on_devices(merged)
        assert array_digests.of_numpy(merged) != array_digests.of_numpy(np.roll(merged, 1, axis=0))
    parts = [array_digests.of_numpy(row, merged.shape, 20 * i) for i, row in enumerate(merged)]
    assert array_digests.total(parts) == array_digests.of_numpy(merged)
