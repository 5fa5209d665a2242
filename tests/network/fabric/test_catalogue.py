"""The shipped switches: consistent ports, named sources."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.catalogue import find_switches, named_fabrics, switches
from phalanx.network.fabric.parse import parse_fabric


def test_rows_are_consistent() -> None:
    names = [one.name for one in switches()]
    assert len(set(names)) == len(names)
    for one in switches():
        assert one.radix <= one.lanes
        assert one.watts > 0
        assert one.usd is not None
        assert 0 < one.usd[0] <= one.usd[1]
        assert one.source
        assert one.evidence in ("fair", "weak")


def test_a_box_never_has_more_bandwidth_than_its_silicon() -> None:
    for box in {one.box for one in switches()}:
        rates = {one.lanes * one.port_gbps for one in switches() if one.box == box}
        assert len(rates) == 1, box


def test_a_box_or_one_configuration_by_any_spelling() -> None:
    assert len(find_switches("tomahawk5", where="x")) == 4
    assert [one.radix for one in find_switches("Tomahawk 5 256x200G", where="x")] == [256]
    with pytest.raises(UserError, match='did you mean "Tomahawk 5"'):
        find_switches("Tomahawk 7", where="x")


def test_every_named_fabric_can_be_built() -> None:
    for name in named_fabrics():
        assert parse_fabric(name).name == name
    leaf_spine = parse_fabric("leaf-spine-1024")
    assert (leaf_spine.t0, leaf_spine.t1, leaf_spine.t0_down) == (32, 32, 32)
