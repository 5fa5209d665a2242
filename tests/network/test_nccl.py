"""NCCL's tuning model against the table of the specification's design (spec.md 1.4)."""

from __future__ import annotations

import math

import pytest

from phalanx.network import nccl

MIB = 2**20
H100_BUS, A100_BUS = 384e9, 192e9  # 8 x 400 and 8 x 200 Gb/s
NODES = (2, 4, 8, 16, 32, 64, 128)
# µs at 64 MiB on 8-GPU H100 nodes
RING_US = (434, 518, 668, 959, 1536, 2689, 4994)
TREE_US = (499, 516, 533, 550, 567, 584, 601)
# MiB above which the ring is faster
CROSSING_H100 = (23, 152, 1.7 * 1024, 4.8 * 1024, 9.5 * 1024, 23 * 1024, 45 * 1024)
CROSSING_A100 = (14, 19, 54, 181, 609, 1.4 * 1024, 2.8 * 1024)


def h100(nodes: int) -> nccl.Communicator:
    return nccl.Communicator(nodes=nodes, per_node=8, bus_bytes_per_s=H100_BUS)


def a100(nodes: int) -> nccl.Communicator:
    return nccl.Communicator(nodes=nodes, per_node=8, bus_bytes_per_s=A100_BUS, family="ampere")


def crossing_mib(group: nccl.Communicator) -> float:
    """The largest message for which the tree is still faster."""
    sizes = [2**16 * 1.01**step for step in range(1450)]
    wins = [size for size in sizes if nccl.seconds(group, "tree", size) < nccl.seconds(group, "ring", size)]
    return max(wins) / MIB


@pytest.mark.parametrize(("nodes", "ring_us", "tree_us"), list(zip(NODES, RING_US, TREE_US, strict=True)))
def test_the_table_at_64_mib(nodes: int, ring_us: float, tree_us: float) -> None:
    assert nccl.seconds(h100(nodes), "ring", 64 * MIB) * 1e6 == pytest.approx(ring_us, abs=0.6)
    assert nccl.seconds(h100(nodes), "tree", 64 * MIB) * 1e6 == pytest.approx(tree_us, abs=0.6)


def test_ring_and_tree_flip_between_two_and_eight_nodes() -> None:
    assert [nccl.fastest(h100(nodes), 64 * MIB) for nodes in (2, 8, 64)] == ["ring", "tree", "tree"]
    tie = nccl.seconds(h100(4), "ring", 64 * MIB) / nccl.seconds(h100(4), "tree", 64 * MIB)
    assert tie == pytest.approx(1.0, abs=0.01)
    gain = nccl.seconds(h100(64), "ring", 64 * MIB) / nccl.seconds(h100(64), "tree", 64 * MIB)
    assert gain == pytest.approx(4.6, abs=0.05)


@pytest.mark.parametrize(("nodes", "mib"), list(zip(NODES, CROSSING_H100, strict=True)))
def test_where_the_ring_overtakes_on_h100(nodes: int, mib: float) -> None:
    assert crossing_mib(h100(nodes)) == pytest.approx(mib, rel=0.16)


@pytest.mark.parametrize(("nodes", "mib"), list(zip(NODES, CROSSING_A100, strict=True)))
def test_where_the_ring_overtakes_on_a100(nodes: int, mib: float) -> None:
    assert crossing_mib(a100(nodes)) == pytest.approx(mib, rel=0.16)


def test_gathers_and_scatters_have_no_tree_and_half_the_steps() -> None:
    assert nccl.seconds(h100(8), "tree", 64 * MIB, operation="all-gather") == math.inf
    assert nccl.fastest(h100(128), MIB, operation="reduce-scatter") == "ring"
    latency, transfer = nccl.parts(h100(8), "ring", 1e9, operation="all-gather")
    assert latency == pytest.approx((14 + 56 * 2 + 7 * 4) * 1e-6)
    assert transfer == pytest.approx(1e9 * 63 / 64 / (0.92 * H100_BUS))


def test_one_rank_has_nothing_to_wait_for() -> None:
    alone = nccl.communicator(ranks=1, per_node=8, link_bytes_per_s=450e9, nic_bytes_per_s=50e9)
    assert nccl.seconds(alone, "ring", 1e9) == 0.0


def test_a_communicator_takes_its_bus_from_the_slower_of_link_and_cards() -> None:
    rates = {"link_bytes_per_s": 450e9, "nic_bytes_per_s": 25e9}
    assert nccl.communicator(ranks=64, per_node=8, **rates).bus_bytes_per_s == pytest.approx(192e9)
    assert nccl.communicator(ranks=8, per_node=8, **rates).bus_bytes_per_s == pytest.approx(369e9)
    rail = nccl.communicator(ranks=64, per_node=1, **rates)
    assert (rail.nodes, rail.bus_bytes_per_s) == (64, pytest.approx(24e9))


def test_two_levels_win_where_the_ring_is_long_and_the_message_short() -> None:
    rates = {"link_bytes_per_s": 450e9, "nic_bytes_per_s": 50e9, "operation": "all-gather"}
    long = nccl.communicator(ranks=4096, per_node=8, link_bytes_per_s=450e9, nic_bytes_per_s=50e9)
    flat = nccl.seconds(long, "ring", 16 * MIB, operation="all-gather")
    two = nccl.hierarchical_seconds(domains=512, per_domain=8, nbytes=16 * MIB, **rates)
    assert two < flat / 2
    assert nccl.hierarchical_seconds(domains=1, per_domain=8, nbytes=1.0, **rates) == math.inf
