"""A digest knows every bit and its place, and nothing of mesh, layout or who computes it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import digests

RANDOM = np.random.default_rng(0)
KINDS = {
    "float32": RANDOM.standard_normal((6, 5, 8), np.float32),
    "bfloat16": RANDOM.standard_normal((4, 7), np.float32).astype(jnp.bfloat16),
    "float16": RANDOM.standard_normal(33, np.float32).astype(np.float16),
    "int32": RANDOM.integers(-(2**31), 2**31, (3, 4), np.int32),
    "uint8": RANDOM.integers(0, 256, 9, np.uint8),
    "bool": np.array([True, False, True]),
    "scalar": np.int32(-5),
    "not a number": np.array([np.nan, -0.0, 0.0, np.inf], np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "of several pieces": RANDOM.integers(0, 2**31, (3, digests.PIECE), np.int32),
}


def on_devices(x):
    traced_anew = jax.jit(lambda x: digests.digest(x))
    return tuple(np.asarray(traced_anew(x)).tolist())


def test_the_hash_is_murmur3s():
    """fmix32(0) and fmix32(1), as other implementations have them."""
    found = digests.mix(np.array([0, 1], np.uint32))
    assert found.tolist() == [0, 0x514E28B7]


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_devices_find_the_same_for_every_type(kind):
    x = np.asarray(KINDS[kind])
    assert digests.of_numpy(x) == on_devices(x)
    assert digests.of_numpy(np.asfortranarray(x)) == digests.of_numpy(x)


def test_an_element_of_eight_bytes_is_two_words():
    x = RANDOM.standard_normal((3, 5))
    assert digests.of_numpy(x) == digests.of_numpy(x.view(np.uint32).reshape(3, 5, 2))


def test_a_digest_does_not_depend_on_mesh_or_layout():
    x = {"a": KINDS["float32"][:4], "b": KINDS["int32"], "c": KINDS["scalar"]}
    expected = {name: digests.of_numpy(np.asarray(a)) for name, a in x.items()}
    for shape in ((2, 2, 2), (4, 1, 1), (1, 1, 8), (1, 1, 1)):
        mesh = jax.make_mesh(shape, ("x", "y", "z"), devices=jax.devices()[: np.prod(shape)])
        for spec in (P("x", None, "z"), P(None, None, ("z", "y")), P()):
            specs = {"a": spec, "b": P(), "c": P()}
            put = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in x.items()}
            assert digests.of_arrays(put) == expected


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "uint8", "scalar"])
def test_every_bit_that_flips_changes_both_sums(kind):
    x = np.atleast_1d(np.asarray(KINDS[kind])).reshape(-1)[:40]
    before, words = digests.of_numpy(x), digests.WORDS[x.dtype.itemsize]
    for place, bit in itertools.product(range(x.size), range(8 * x.dtype.itemsize)):
        changed = x.copy()
        changed.view(words)[place] ^= words(1 << bit)
        assert all(a != b for a, b in zip(digests.of_numpy(changed), before, strict=True))


def test_two_elements_that_change_places_change_the_digest_unless_they_are_equal():
    for x in (np.arange(24, dtype=np.int32), KINDS["float32"].reshape(-1)[:24]):
        before = digests.of_numpy(x)
        for one, other in itertools.combinations(range(x.size), 2):
            changed = x.copy()
            changed[[one, other]] = changed[[other, one]]
            assert digests.of_numpy(changed) != before
    same = np.array([3, 1, 3], np.int32)
    assert digests.of_numpy(same[::-1]) == digests.of_numpy(same)


def test_the_same_numbers_in_another_shape_or_a_shifted_row_have_another_digest(monkeypatch):
    """Places above 2^32 are told apart by their row."""
    assert digests._rows((5, 1 << 20, 1 << 12)) == 1 and digests._rows((1 << 16, 1 << 16)) == 0
    assert digests._rows((2, 1 << 20, 1 << 20)) == 2 and digests._rows(()) == 0
    monkeypatch.setattr(digests, "_rows", lambda shape: 1)
    x = KINDS["int32"]
    assert digests.of_numpy(x) == on_devices(x) != digests.of_numpy(np.roll(x, 1, axis=0))
