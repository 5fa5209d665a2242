"""What is picked, from where to where, and how long it takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from phalanx.network.collective_answer import collective_answers, pick_ranges
from phalanx.network.collective_fit import Point, fit_points
from phalanx.network.nccl_choice import choose_pair
from phalanx.network.nccl_system import build_system

MIB, GIB = 2**20, 2**30
H100 = build_system(nodes=16, per_node=8, family="hopper", nic_gbps=400)


def test_pairs_are_in_order_and_the_first_is_the_pick() -> None:
    (found,) = collective_answers(H100, "all-reduce", [64 * MIB], None)
    times = [one.seconds for one in found.pairs]
    assert times == sorted(times)
    assert found.pairs[0] == choose_pair(H100, 64 * MIB)
    assert len({(one.algorithm, one.protocol) for one in found.pairs}) == 7
    assert (found.fitted_s, found.fitted_bus_bytes_per_s) == (None, None)


def test_a_fit_speaks_from_16_mib_on_and_without_a_model() -> None:
    points = (Point(nbytes=16 * MIB, seconds=4e-4), Point(nbytes=GIB, seconds=6e-3))
    fit = fit_points(points, ranks=128, nodes=16)
    small, large = collective_answers(None, None, [8 * MIB, GIB], fit)
    assert (small.pairs, small.expected_s, small.fitted_s) == ((), None, None)
    assert large.fitted_s == pytest.approx(6e-3)
    assert large.fitted_bus_bytes_per_s == pytest.approx(2 * 127 / 128 * GIB / 6e-3)


def test_reigns_cover_the_range_and_their_borders_are_where_the_pick_changes() -> None:
    found = pick_ranges(H100, "all-reduce", 1024, 16 * GIB)
    names = [(one.algorithm, one.protocol) for one in found]
    assert names == [("Tree", "LL"), ("Tree", "LL128"), ("NVLSTree", "Simple"), ("Ring", "Simple")]
    assert (found[0].from_bytes, found[-1].to_bytes) == (1024, 16 * GIB)
    for one, then in pairwise(found):
        assert one.to_bytes == then.from_bytes
        assert choose_pair(H100, one.to_bytes * (1 - 1e-6)).algorithm == one.algorithm
        assert choose_pair(H100, one.to_bytes * (1 + 1e-6)).algorithm == then.algorithm


def test_one_size_has_one_reign() -> None:
    (only,) = pick_ranges(H100, "all-gather", GIB, GIB)
    assert (only.algorithm, only.from_bytes, only.to_bytes) == ("Ring", GIB, GIB)
