import math

import pytest

import hardware
from planning import collectives

V4, H100 = hardware.CHIPS["v4"], hardware.CHIPS["h100"]


def seconds(chip, kind, *groups, count=None):
    ranks = math.prod(n for n, _ in groups)
    return collectives.collective_s(chip, kind, 8e9, groups, count or ranks)


@pytest.mark.parametrize(
    ("ranks", "slice_of", "sides"),
    [
        (2, (4, 4, 4), ((2, 1),)),
        (64, (4, 4, 4), ((4, 2), (4, 2), (4, 2))),
        (32, (2, 4, 4), ((4, 1), (4, 1), (2, 1))),
        (256, (16, 16), ((16, 2), (16, 2))),  # rings along sides of sixteen
    ],
)
def test_ranks_lie_on_sides_of_the_slice_that_are_rings_where_cubes_are_whole(
    ranks, slice_of, sides
):
    assert collectives.sides_of(len(slice_of), ranks, slice_of) == sides


def test_a_slice_is_the_usual_one_or_nearest_to_a_cube():
    assert collectives.slice_sides(3, 32) == (2, 4, 4)
    assert math.prod(collectives.slice_sides(3, 24)) == 24
    assert collectives.slice_sides(3, 7) == (1, 1, 7)


def test_a_collective_on_a_torus_takes_as_long_as_its_links():
    link = V4.link_bandwidth
    assert seconds(V4, "all-gather", (2, 1), count=64) == 8e9 / 2 / link
    assert seconds(V4, "all-gather", (4, 1), count=64) == 8e9 * 3 / 4 / (2 * link)
    assert seconds(V4, "all-gather", (4, 1), count=32) == 8e9 * 3 / 4 / link
    assert seconds(V4, "all-reduce", (4, 1)) == 2 * seconds(V4, "reduce-scatter", (4, 1))
    assert seconds(V4, "collective-permute", (4, 1), count=64) == 8e9 / link


def test_an_all_to_all_is_bound_by_the_middle_of_a_long_side():
    # Half of the bytes of each half of 16 x 256 chips cross 2 x 256 links.
    half = 4096 / 2 * 8e9 / 2 / (2 * 256)
    assert seconds(V4, "all-to-all", (4096, 1)) == pytest.approx(half / V4.link_bandwidth)


def test_gpus_of_one_host_use_nvlink_and_others_the_network():
    nvlink, network = H100.link_bandwidth, H100.network_bandwidth
    assert seconds(H100, "all-gather", (8, 1)) == 8e9 * 7 / 8 / nvlink
    assert seconds(H100, "all-gather", (2, 8)) == 8e9 / 2 / network
    # Each of 4 ranks of a host fetches a quarter of the data of the other host.
    assert seconds(H100, "all-gather", (2, 8), (4, 1)) == 8e9 / 2 / 4 / network
    assert seconds(H100, "all-gather", (32, 1)) == 8e9 * 7 / 8 / nvlink  # no faster than inside
    assert seconds(H100, "all-to-all", (32, 1)) == 8e9 * 24 / 32 / network
    assert seconds(H100, "collective-permute", (4, 2)) == 8e9 / nvlink
    assert seconds(H100, "collective-permute", (4, 4)) == 8e9 / network
    # fsdp and tensor of a mesh (2, 4, 2): devices 0, 1, 8 and 9, on two hosts.
    assert seconds(H100, "all-to-all", (2, 8), (2, 1)) == 8e9 / 2 / network


def test_between_slices_a_ring_sends_all_but_its_own_share_and_an_all_reduce_twice_that():
    for slices, share in ((2, 1 / 2), (4, 3 / 4)):
        gather = collectives.between_slices_s(V4, "all-gather", 1e9, slices)
        assert gather == pytest.approx(share * 1e9 / V4.network_bandwidth)
        reduce = collectives.between_slices_s(V4, "all-reduce", 1e9, slices)
        assert reduce == pytest.approx(2 * gather)
    with pytest.raises(ValueError, match=r"TPU v3 has one slice. Use --mesh\.replica 1"):
        collectives.between_slices_s(hardware.CHIPS["v3"], "all-reduce", 1e9, 2)
