"""Channels that NCCL's search finds."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.nccl_system import Channels, NcclSystem, build_system, unrounded_system


@pytest.mark.parametrize(
    ("gpus", "nic_gbps", "channels", "gb"),
    [(8, 400, 8, 48.0), (8, 800, 7, 96.0), (72, 400, 16, 45.1), (1, 400, 1, 48.0), (4, 200, 4, 24.0)],
)
def test_rings_between_nodes_fill_nics_or_nvlinks(gpus: int, nic_gbps: float, channels: int, gb: float) -> None:
    """One channel per NIC, as many as a GPU's 722 GB/s of NVLink carry."""
    found = build_system(nodes=4, per_node=gpus, family="blackwell", nic_gbps=nic_gbps).ring
    assert (found.count, found.across_gb) == (channels, gb)


def test_fewer_links_give_slower_rings() -> None:
    """H800 has 8 of the 18 links of an H100."""
    full, half = (build_system(nodes=1, per_node=8, family="hopper", links=links).ring for links in (0, 8))
    assert full.count * full.inside_gb == 360.0
    assert half.count * half.inside_gb == 160.0


def test_the_wire_leaves_alone_what_it_does_not_know() -> None:
    ring = Channels(count=8, inside_gb=40.0, across_gb=40.0)
    bare = NcclSystem(nodes=1, per_node=8, family="hopper", ring=ring, nvls=ring)
    rack = build_system(nodes=1, per_node=72, family="blackwell")
    without = build_system(nodes=1, per_node=8, family="hopper", nvls=False)
    assert (unrounded_system(bare), unrounded_system(rack), unrounded_system(without)) == (bare, rack, without)
    board = unrounded_system(build_system(nodes=2, per_node=8, family="blackwell", nic_gbps=400)).nvls
    assert board is not None
    assert (board.inside_gb, board.across_gb) == pytest.approx((40.1 * 18 / 9, 48.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0, "per_node": 8, "family": "hopper"}, "NCCL: 0 nodes of 8 GPUs"),
        ({"nodes": 10**12, "per_node": 8, "family": "hopper"}, "NCCL: 1,000,000,000,000 nodes of 8 GPUs"),
        ({"nodes": 2, "per_node": 8, "family": "hopper"}, "NCCL: 2 nodes with NICs of 0 Gb/s"),
        ({"nodes": 1, "per_node": 8, "family": "mi300"}, 'NCCL: there is no family "mi300"'),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}\n  use "):
        build_system(**options)  # type: ignore[arg-type]
