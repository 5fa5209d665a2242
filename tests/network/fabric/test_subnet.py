"""InfiniBand: 49,151 addresses a subnet, and a recovery of its own."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.decisions import fabric_decisions
from phalanx.network.fabric.decisions_text import show_decisions
from phalanx.network.fabric.design import DesignRequest, design_fabrics
from phalanx.network.fabric.design_verdict import choose_design, show_verdict
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_text import show_fabric
from phalanx.network.fabric.fabric_types import INFINIBAND, is_infiniband, needs_routers, plane_addresses
from phalanx.network.fabric.failure_budget import failure_budget
from phalanx.network.fabric.switch_catalogue import known_switches


def test_quantum_is_infiniband_and_nothing_else() -> None:
    assert {one.box for one in known_switches() if one.kind == INFINIBAND} == {"Quantum-2", "Quantum-X800"}


def test_a_plane_is_a_subnet() -> None:
    fabric = parse_fabric("clos3:46000x400G/2p/Quantum-2")
    assert plane_addresses(fabric) == 46000 + fabric.switches_per_plane
    assert is_infiniband(fabric)
    assert not needs_routers(fabric)
    large = parse_fabric("clos3:49000x400G/2p/Quantum-2")  # the switches make it too many
    assert needs_routers(large)
    assert "routers between subnets, which are not counted" in show_fabric(large)
    assert "InfiniBand" not in show_fabric(parse_fabric("mrc-131k"))


def test_designs_stay_within_a_subnet() -> None:
    boxes = {one.fabric.switch.kind for one in design_fabrics(DesignRequest(gpus=131072, nic_gbps=800))}
    assert boxes == {"ethernet"}
    assert INFINIBAND in {one.fabric.switch.kind for one in design_fabrics(DesignRequest(gpus=32768, nic_gbps=800))}
    with pytest.raises(UserError, match="do not fit into a subnet of InfiniBand") as refused:
        design_fabrics(DesignRequest(gpus=131072, nic_gbps=400, switch="Quantum-2"))
    assert "49,151" in str(refused.value)
    assert "--switch" in str(refused.value)


def test_a_nic_link_restarts_the_job_however_many_planes() -> None:
    ethernet, infiniband = (
        failure_budget(parse_fabric(f"clos2:4096x800G/4p/{box}")) for box in ("128x200G", "Quantum-2")
    )
    assert infiniband.edge.lost_share > 5 * ethernet.edge.lost_share
    assert infiniband.edge.lost_share <= infiniband.conventional.lost_share
    page = show_fabric(parse_fabric("clos2:4096x800G/4p/Quantum-2"))
    assert "leave a dead link in 3.00 ms, SHIELD" in page
    assert "with recovery at the edge" not in page
    assert "no sooner than 3.00 ms (SHIELD)" in show_decisions(fabric_decisions(4096, box="Quantum-2"))


def test_the_choice_says_infiniband_and_the_best_on_ethernet() -> None:
    found = choose_design(design_fabrics(DesignRequest(gpus=4096, nic_gbps=800)))
    assert found is not None
    assert found.pick.design.fabric.switch.kind == INFINIBAND
    said = " ".join(show_verdict(found).split())
    assert "the edge bypasses them" not in said
    assert "InfiniBand's switches bypass a dead link above T0 in 3.00 ms (SHIELD)" in said
    assert "Best on Ethernet (8 planes in 2 tiers of Spectrum-5 512x100G) comes to" in said
