"""Exact counts of arXiv:2605.04333 section 2, and refusals with the nearest choice."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.sizing import ClosShape, most_hosts, size_fabric, split_t0
from phalanx.network.fabric.switch_catalogue import find_switches, unnamed_switch


def test_the_published_fabric_of_131072() -> None:
    fabric = size_fabric(131072, 800, unnamed_switch(512, 100), ClosShape(planes=8, tiers=2))
    assert (8 * fabric.t0, 8 * fabric.t1, fabric.switches) == (4096, 2048, 6144)
    assert (fabric.hops, fabric.paths, fabric.t0_down, fabric.t0_up) == (3, 2048, 256, 256)


@pytest.mark.parametrize(
    ("radix", "tiers", "hosts", "switches_per_plane"),
    [
        (64, 2, 2048, 96),
        (64, 3, 65536, 5120),
        (64, 4, 2097152, 229376),
        (128, 3, 524288, 20480),
        (144, 2, 10368, 216),
        (144, 3, 746496, 25920),
        (256, 2, 32768, 384),
        (512, 2, 131072, 768),
    ],
)
def test_a_full_clos(radix: int, tiers: int, hosts: int, switches_per_plane: int) -> None:
    shape = ClosShape(planes=1, tiers=tiers)
    assert most_hosts(radix, shape) == hosts
    fabric = size_fabric(hosts, 800, unnamed_switch(radix, 800), shape)
    assert fabric.switches_per_plane == switches_per_plane == (2 * tiers - 1) * (radix // 2) ** (tiers - 1)
    assert fabric.paths == (radix // 2) ** (tiers - 1)
    with pytest.raises(UserError, match="do not fit"):
        size_fabric(hosts + 1, 800, unnamed_switch(radix, 800), shape)


def test_one_tier_is_one_switch_per_plane() -> None:
    fabric = size_fabric(64, 800, unnamed_switch(64, 400), ClosShape(planes=2, tiers=1))
    assert (fabric.switches, fabric.hops, fabric.paths, fabric.t0_up) == (2, 1, 2, 0)


def test_oversubscription_gives_more_hosts_per_t0_and_never_more_than_asked() -> None:
    for radix in (64, 144, 320, 512):
        for ratio in (1.0, 1.5, 2.0, 3.0, 4.0):
            down, up = split_t0(radix, 2, ratio)
            assert down + up <= radix
            assert down / up <= ratio
            assert down / up > ratio - 0.2


def test_rails_come_in_groups() -> None:
    fabric = size_fabric(5000, 800, unnamed_switch(144, 800), ClosShape(planes=1, tiers=2, rails=8))
    assert fabric.t0 % 8 == 0
    assert fabric.t0 * fabric.t0_down >= 5000


def test_what_the_box_cannot_do_is_refused_with_the_reason() -> None:
    tomahawk = find_switches("Tomahawk 5 256x200G", where="x")[0]
    with pytest.raises(UserError) as error:
        size_fabric(131072, 800, tomahawk, ClosShape(planes=4, tiers=2))
    assert str(error.value) == (
        "fabric: 131,072 GPUs do not fit: 2 tiers of Tomahawk 5 256x200G join at most 32,768\n"
        "  at full bisection it is 2·(256/2)^2 = 32,768\n"
        "  use 3 tiers, which join up to 4,194,304"
    )


@pytest.mark.parametrize(
    ("hosts", "gbps", "shape", "words"),
    [
        (0, 800, ClosShape(planes=1, tiers=2), "0 GPUs are not a fabric\n  use 2 or more"),
        (10**12, 800, ClosShape(planes=1, tiers=2), "1,000,000,000,000 GPUs are not a fabric"),
        (64, 0, ClosShape(planes=1, tiers=2), "a NIC of 0 Gb/s carries nothing"),
        (64, float("nan"), ClosShape(planes=1, tiers=2), "carries nothing"),
        (64, 800, ClosShape(planes=0, tiers=2), "0 planes\n  use 1, 2, 4 or 8"),
        (64, 800, ClosShape(planes=2, tiers=2), "2 planes make ports of 400 Gb/s of a 800 Gb/s NIC"),
        (64, 800, ClosShape(planes=1, tiers=5), "5 tiers"),
        (64, 800, ClosShape(planes=1, tiers=2, oversubscription=0.5), "more uplinks than hosts can fill"),
        (64, 800, ClosShape(planes=1, tiers=1, rails=8), "8 islands, not one fabric"),
        (63, 800, ClosShape(planes=1, tiers=2, rails=8), "use 56 or 64 GPUs"),
    ],
)
def test_bad_input(hosts: int, gbps: float, shape: ClosShape, words: str) -> None:
    with pytest.raises(UserError) as error:
        size_fabric(hosts, gbps, unnamed_switch(64, 800), shape)
    assert words in str(error.value)


def test_a_switch_that_cannot_branch() -> None:
    with pytest.raises(UserError, match="a switch of 2 ports cannot branch"):
        size_fabric(4, 800, unnamed_switch(2, 800), ClosShape(planes=1, tiers=2))


@pytest.mark.parametrize("radix", [64, 144, 256, 512])
def test_a_ratio_of_ports_splits_into_these_ports(radix: int) -> None:
    # 144 ports as 113 down and 31 up: 144 / (1 + 113/31) is a hair above 31 in floating point
    for up in range(1, radix // 2 + 1):
        assert split_t0(radix, 2, (radix - up) / up) == (radix - up, up)
