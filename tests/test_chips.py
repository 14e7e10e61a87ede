import math

import pytest

import chips


def test_a_chip_is_known_by_the_name_that_jax_gives():
    assert chips.chip_of_kind("NVIDIA H200").flops == 989e12
    assert chips.chip_of_kind("TPU v5 lite").flops == 197e12
    assert chips.chip_of_kind("cpu") is None


def test_no_two_chips_are_called_the_same():
    kinds = [kind for chip in chips.CHIPS.values() for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)


def test_an_unknown_chip_is_refused_with_the_known_ones():
    assert chips.chip_named("V4") is chips.CHIPS["v4"]
    with pytest.raises(ValueError, match=r"--chip v7 is not known. Use one of v4, v5e, v5p, v6e"):
        chips.chip_named("v7")
    assert chips.chip_named("CPU") is None


@pytest.mark.parametrize(
    "name, count, sides", [("v4", 32, "2x4x4"), ("v5p", 8, "2x2x2"), ("v5e", 32, "4x8")]
)
def test_a_number_of_chips_has_a_usual_slice(name, count, sides):
    assert chips.topology(chips.CHIPS[name], count) == sides


def test_a_number_of_chips_without_a_slice_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--chips 24: .* 16, 32, .*--topology 2x4x4"):
        chips.topology(chips.CHIPS["v4"], 24)


V4, H100 = chips.CHIPS["v4"], chips.CHIPS["h100"]


def seconds(chip, kind, *groups, whole=8e9, count=None):
    ranks = math.prod(n for n, _ in groups)
    return chip.collective_s(kind, whole, groups, count or ranks)


@pytest.mark.parametrize(
    "ranks, slice_of, sides",
    [
        (2, (4, 4, 4), ((2, 1),)),
        (4, (4, 4, 4), ((4, 2),)),
        (8, (4, 4, 4), ((4, 2), (2, 1))),
        (64, (4, 4, 4), ((4, 2), (4, 2), (4, 2))),
        (4, (2, 4, 4), ((4, 1),)),
        (32, (2, 4, 4), ((4, 1), (4, 1), (2, 1))),
    ],
)
def test_ranks_lie_on_sides_of_the_slice_that_are_rings_where_cubes_are_whole(
    ranks, slice_of, sides
):
    assert chips.sides_of(3, ranks, slice_of) == sides


def test_a_flat_slice_has_rings_along_sides_of_sixteen():
    assert chips.sides_of(2, 256, (16, 16)) == ((16, 2), (16, 2))
    assert chips.sides_of(2, 32, (4, 8)) == ((8, 1), (4, 1))


def test_a_slice_is_the_usual_one_or_as_near_to_a_cube_as_can_be():
    assert chips.slice_sides(3, 32) == (2, 4, 4)
    assert math.prod(chips.slice_sides(3, 24)) == 24
    assert chips.slice_sides(3, 7) == (1, 1, 7)


def test_a_collective_on_a_torus_takes_as_long_as_its_links():
    link = V4.link_bandwidth
    assert seconds(V4, "all-gather", (2, 1), count=64) == 8e9 / 2 / link
    assert seconds(V4, "all-gather", (4, 1), count=64) == 8e9 * 3 / 4 / (2 * link)
    assert seconds(V4, "all-gather", (4, 1), count=32) == 8e9 * 3 / 4 / link
    assert seconds(V4, "all-reduce", (4, 1)) == 2 * seconds(V4, "reduce-scatter", (4, 1))
    assert seconds(V4, "collective-permute", (4, 1), count=64) == 8e9 / link


def test_an_all_to_all_is_bound_by_the_middle_of_a_long_side():
    # Half of what 16 x 256 chips on each side have crosses 2 x 256 links of that many.
    whole = 8e9
    half = 4096 / 2 * whole / 2 / (2 * 256)
    assert seconds(V4, "all-to-all", (4096, 1), whole=whole) == pytest.approx(
        half / V4.link_bandwidth
    )


def test_gpus_of_one_host_use_nvlink_and_others_the_network():
    nvlink, network = H100.link_bandwidth, H100.network_bandwidth
    assert seconds(H100, "all-gather", (8, 1)) == 8e9 * 7 / 8 / nvlink
    assert seconds(H100, "all-gather", (2, 8)) == 8e9 / 2 / network
    # Each of 4 ranks of a host fetches a quarter of what the other host has.
    assert seconds(H100, "all-gather", (2, 8), (4, 1)) == 8e9 / 2 / 4 / network
    assert seconds(H100, "all-gather", (32, 1)) == 8e9 * 7 / 8 / nvlink  # no faster than inside
    assert seconds(H100, "all-to-all", (32, 1)) == 8e9 * 24 / 32 / network
    assert seconds(H100, "collective-permute", (4, 2)) == 8e9 / nvlink
    assert seconds(H100, "collective-permute", (4, 4)) == 8e9 / network


def test_axes_with_another_between_them_reach_further():
    """fsdp and tensor of a mesh (2, 4, 2): devices 0, 1, 8 and 9, on two hosts."""
    assert seconds(H100, "all-to-all", (2, 8), (2, 1)) == 8e9 / 2 / H100.network_bandwidth


@pytest.mark.parametrize("slices, share", [(2, 1 / 2), (4, 3 / 4)])
def test_between_slices_a_ring_sends_all_but_its_own_part_once_and_sums_twice(slices, share):
    chip = chips.CHIPS["v4"]
    gather = chip.between_slices_s("all-gather", 1e9, slices)
    assert gather == pytest.approx(share * 1e9 / chip.network_bandwidth)
    assert chip.between_slices_s("all-reduce", 1e9, slices) == pytest.approx(2 * gather)
