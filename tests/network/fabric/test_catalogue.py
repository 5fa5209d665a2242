"""The shipped switches: consistent ports, named sources."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.switch_catalogue import find_switches, known_switches, named_fabrics


def test_rows_are_consistent() -> None:
    names = [one.name for one in known_switches()]
    assert len(set(names)) == len(names)
    for one in known_switches():
        assert one.radix <= one.lanes
        assert one.source
        if one.box == "Tomahawk 4":  # nothing with a source was found: left empty, not guessed
            assert (one.watts, one.usd) == (0, None)
            continue
        assert one.watts > 0
        assert one.usd is not None
        assert 0 < one.usd[0] <= one.usd[1]
        assert one.evidence in ("fair", "weak")


def test_a_box_never_has_more_bandwidth_than_its_silicon() -> None:
    for box in {one.box for one in known_switches()}:
        rates = {one.lanes * one.port_gbps for one in known_switches() if one.box == box}
        assert len(rates) == 1, box


def test_a_box_or_one_configuration_by_any_spelling() -> None:
    assert len(find_switches("tomahawk5", where="x")) == 4
    assert [one.radix for one in find_switches("Tomahawk 5 256x200G", where="x")] == [256]
    with pytest.raises(UserError, match='did you mean "Silicon One G200"'):
        find_switches("Silicone G200", where="x")
    with pytest.raises(UserError, match=r"the catalogue has Spectrum-4, .* bare ports are written as 512x100G"):
        find_switches("abacus", where="x")


def test_a_product_or_bare_ports() -> None:
    assert {one.box for one in find_switches("QM9700", where="x")} == {"Quantum-2"}
    assert {one.box for one in find_switches("Nexus 9364E-SG2", where="x")} == {"Silicon One G200"}
    boxes = {one.box for one in find_switches("512x100G", where="x")}
    assert {"Spectrum-5", "7060X6-64PE-B"} <= boxes
    assert "Tomahawk 5" not in boxes  # 320 logical ports
    (own,) = find_switches("1024x50g", where="x")
    assert (own.radix, own.port_gbps, own.usd) == (1024, 50, None)


@pytest.mark.parametrize("name", ["", "0x0G", "0x100G", "64x0G"])
def test_nothing_is_no_switch(name: str) -> None:
    with pytest.raises(UserError, match=f'there is no switch "{name}"'):
        find_switches(name, where="x")


def test_every_named_fabric_can_be_built() -> None:
    for name in named_fabrics():
        assert parse_fabric(name).name == name
    leaf_spine = parse_fabric("leaf-spine-1024")
    assert (leaf_spine.t0, leaf_spine.t1, leaf_spine.t0_down) == (32, 32, 32)
