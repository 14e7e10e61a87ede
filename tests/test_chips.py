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


@pytest.mark.parametrize(
    "name, count, sides", [("v4", 32, "2x4x4"), ("v5p", 8, "2x2x2"), ("v5e", 32, "4x8")]
)
def test_a_number_of_chips_has_a_usual_slice(name, count, sides):
    assert chips.topology(chips.CHIPS[name], count) == sides


def test_a_number_of_chips_without_a_slice_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--chips 24: .* 16, 32, .*--topology 2x4x4"):
        chips.topology(chips.CHIPS["v4"], 24)


def test_a_ring_uses_a_link_each_way_and_hosts_are_joined_by_the_network():
    v4, h100 = chips.CHIPS["v4"], chips.CHIPS["h100"]
    assert v4.axis_bandwidth(2, 1) == v4.link_bandwidth
    assert v4.axis_bandwidth(4, 1) == 2 * v4.link_bandwidth
    assert v4.axis_bandwidth(16, 1) == 4 * v4.link_bandwidth
    assert v4.axis_bandwidth(4096, 1) == 6 * v4.link_bandwidth
    assert v4.detour(4) == 1
    assert v4.detour(4096) == pytest.approx(3 * 16 / 4)
    assert h100.detour(64) == 1
    assert h100.axis_bandwidth(8, 1) == h100.link_bandwidth
    assert h100.axis_bandwidth(2, 8) == h100.network_bandwidth
