"""NCCL's tuning model against the table of the specification's design (spec.md 1.4): rings and trees, AMD hosts."""

from __future__ import annotations

import pytest

from phalanx.network.nccl_choice import possible_pairs
from phalanx.network.nccl_system import Channels, NcclSystem

MIB = 2**20
NODES = (2, 4, 8, 16, 32, 64, 128)
# µs at 64 MiB on 8-GPU H100 nodes
RING_US = (434, 518, 668, 959, 1536, 2689, 4994)
TREE_US = (499, 516, 533, 550, 567, 584, 601)
# MiB above which the ring is faster
CROSSING_H100 = (23, 152, 1.7 * 1024, 4.8 * 1024, 9.5 * 1024, 23 * 1024, 45 * 1024)
CROSSING_A100 = (14, 19, 54, 181, 609, 1.4 * 1024, 2.8 * 1024)


def board(nodes: int, channels: int, family: str = "hopper") -> NcclSystem:
    """Nodes of 8 with `channels` rings of 24 GB/s: 16 make the 384 GB/s of 8 x 400 Gb/s, 8 the 192 of 8 x 200."""
    ring = Channels(count=channels, inside_gb=24.0, across_gb=24.0)
    return NcclSystem(nodes=nodes, per_node=8, family=family, ring=ring, nvls=None, cpu="amd")


def microseconds(comm: NcclSystem, algorithm: str, nbytes: float) -> float:
    return 1e6 * min(one.seconds for one in possible_pairs(comm, nbytes) if one.algorithm == algorithm)


def crossing_mib(comm: NcclSystem) -> float:
    """The largest message for which the tree is still faster."""
    sizes = [2**16 * 1.02**step for step in range(730)]
    return max(n for n in sizes if microseconds(comm, "Tree", n) < microseconds(comm, "Ring", n)) / MIB


@pytest.mark.parametrize(("nodes", "ring_us", "tree_us"), list(zip(NODES, RING_US, TREE_US, strict=True)))
def test_the_table_at_64_mib(nodes: int, ring_us: float, tree_us: float) -> None:
    assert microseconds(board(nodes, 16), "Ring", 64 * MIB) == pytest.approx(ring_us, abs=0.6)
    assert microseconds(board(nodes, 16), "Tree", 64 * MIB) == pytest.approx(tree_us, abs=0.6)


@pytest.mark.parametrize(("nodes", "mib"), list(zip(NODES, CROSSING_H100, strict=True)))
def test_where_the_ring_overtakes_on_h100(nodes: int, mib: float) -> None:
    assert crossing_mib(board(nodes, 16)) == pytest.approx(mib, rel=0.16)


@pytest.mark.parametrize(("nodes", "mib"), list(zip(NODES, CROSSING_A100, strict=True)))
def test_where_the_ring_overtakes_on_a100(nodes: int, mib: float) -> None:
    assert crossing_mib(board(nodes, 8, "ampere")) == pytest.approx(mib, rel=0.16)
