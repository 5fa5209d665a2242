"""The conventional transport: go-back-N, pauses from switch to switch and who suffers them, rates that follow marks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from packet_fabrics import FAT_TREE, LEAF_SPINE, PLANES, SHUFFLE, clos

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import links_of
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.roce_run import roce_routes, switch_at_end
from phalanx.sim.packets.simulation_arrays import PacketBudget
from phalanx.sim.packets.transport import ROCE, ROCE_LOSSY, ROCE_PFC, Roce
from phalanx.sim.traffic_matrix import make_flows, permutation

FAST = clos(64, 8, gbps=400)
INCAST = make_flows(
    [*range(8, 64, 8), 15], [0] * 7 + [1], [1e9] * 8
)  # the last is the victim, under the T0 of a sender
LINE_GBPS = 400 * ROCE.payload_bytes / ROCE.packet_bytes


@pytest.mark.parametrize("roce", [ROCE, replace(ROCE_PFC, qps=4), ROCE_LOSSY], ids=["all", "4 QPs", "no PFC"])
@pytest.mark.parametrize("fabric", [LEAF_SPINE, clos(64, 8, up=2), PLANES], ids=["full", "4:1", "4 planes"])
def test_everything_arrives_and_only_without_pfc_is_it_dropped(fabric: Fabric, roce: Roce) -> None:
    result = run_connections(fabric, SHUFFLE, transport=roce)
    assert result.finished == 64
    assert result.delivered == result.packets
    crowded = fabric.t0_up < fabric.t0_down
    assert (result.dropped > 0) == (crowded and not roce.pfc)
    assert (result.sent > result.packets) == (result.dropped > 0)
    assert roce.pfc or result.paused_share == 0
    assert result.paused_share > 0 or not (crowded and roce.pfc)


def test_three_tiers_and_seeds() -> None:
    first, second, other = (
        run_connections(FAT_TREE, permutation(16, 2e6), transport=ROCE, seed=seed) for seed in (4, 4, 5)
    )
    assert first.delivered == first.packets
    assert np.array_equal(first.fct_s, second.fct_s)
    assert not np.array_equal(first.fct_s, other.fct_s)


def test_a_connection_alone_runs_at_line_rate() -> None:
    result = run_connections(LEAF_SPINE, make_flows([0], [63], 20e6), transport=ROCE)
    assert 20e6 * 8e-9 / result.tail_s == pytest.approx(100 * 4096 / 4178, rel=0.01)
    assert (result.marked, result.paused_share) == (0, 0)


def test_a_gap_sends_everything_after_it_again() -> None:
    blink = FabricFault(part="nic", number=0, at_s=50e-6, until_s=51e-6)  # three packets of 0.33 µs
    result = run_connections(LEAF_SPINE, make_flows([0], [63], 2e6), transport=ROCE, faults=(blink,))
    round_trip = 4 * (2 * 3 + 1) + 11  # slots
    assert 1 <= result.lost <= 4
    assert result.sent - result.packets == pytest.approx(round_trip, abs=8)
    assert result.tail_s < 300e-6


def test_a_lost_end_waits_for_the_timer() -> None:
    alone = run_connections(LEAF_SPINE, make_flows([0], [63], 2e6), transport=ROCE)
    sent_s = alone.packets * 8e-11 * ROCE.packet_bytes
    dark = FabricFault(part="nic", number=0, at_s=sent_s - 2e-6, until_s=sent_s + 20e-6)
    result = run_connections(LEAF_SPINE, make_flows([0], [63], 2e6), transport=ROCE, faults=(dark,))
    assert result.tail_s == pytest.approx(ROCE.timeout_s, rel=0.02)


def test_one_percent_loss_makes_it_unusable() -> None:
    grey = FabricFault(part="traffic", loss=0.01)
    result = run_connections(LEAF_SPINE, permutation(64, 8e6, seed=1), transport=ROCE, faults=(grey,), limit_s=0.02)
    assert result.throughput_gbps.mean() < 0.1 * 64 * 96


def shares_a_link(seed: int) -> bool:
    routes, _ = roce_routes(links_of(FAST), INCAST, ROCE, seed, None)
    return bool(np.isin(routes[7, 1:3], routes[:7, 1:3]).any())


def victim_gbps(roce: Roce, seed: int) -> float:
    result = run_connections(FAST, INCAST, transport=roce, watch=(7,), limit_s=3e-3, sample_s=1e-4, seed=seed)
    assert result.dropped == 0
    return float(result.watched_gbps[0, 5:].mean())


def test_pauses_reach_a_victim_that_shares_a_link_with_the_incast() -> None:
    # arXiv:2605.04333, appendix: 30 to 100 Gb/s of 400 with PFC alone.
    beside, apart = (next(seed for seed in range(20) if shares_a_link(seed) == shared) for shared in (True, False))
    assert victim_gbps(ROCE_PFC, beside) < 0.25 * LINE_GBPS
    assert victim_gbps(ROCE_PFC, apart) == pytest.approx(LINE_GBPS, rel=0.01)


def test_rates_follow_marks_until_nobody_is_paused() -> None:
    fabric, three = clos(16, 8, gbps=100), make_flows([8, 9, 10], [0, 0, 0], 1e9)
    runs = [
        run_connections(fabric, three, transport=ROCE, watch=(0, 1, 2), limit_s=30e-3, sample_s=1e-3, seed=n)
        for n in range(4)
    ]
    result = runs[0]
    late = np.array([one.watched_gbps[:, 20:].mean(axis=1) for one in runs])
    assert result.marked > 0
    assert late.sum(axis=1) == pytest.approx(100 * 4096 / 4178, rel=0.1)
    # DCQCN settles slowly: one run differs by up to half over these 10 ms, the mean over seeds favours nobody.
    assert late.mean(axis=0).max() < 1.3 * late.mean(axis=0).min()
    # Without rates the switches pause the senders all the time.
    unruled = run_connections(fabric, three, transport=ROCE_PFC, limit_s=3e-3)
    assert unruled.paused_share > 5 * result.paused_share


def test_routing_leaves_a_dead_link_when_it_has_converged() -> None:
    fault = FabricFault(part="t1", number=3, at_s=20e-6)
    quick = replace(ROCE, timeout_s=200e-6, converge_s=2e-3)
    routed = run_connections(LEAF_SPINE, SHUFFLE, transport=quick, faults=(fault,))
    waiting = run_connections(
        LEAF_SPINE, SHUFFLE, transport=replace(quick, converge_s=np.inf), faults=(fault,), limit_s=5e-3
    )
    assert routed.finished == 64
    assert 2e-3 < routed.tail_s < 10e-3
    assert waiting.stopped == "time limit"
    assert 0 < waiting.touched == 64 - waiting.finished


def test_every_used_port_of_a_switch_ends_there() -> None:
    # Of a T0 all, of a T1 one to each T0 (or T2).
    for fabric, t0_ports, upper_ports in ((LEAF_SPINE, 16, 8), (PLANES, 16, 8), (FAT_TREE, 4, 4)):
        node = switch_at_end(links_of(fabric))
        ports = np.bincount(node[node >= 0]).reshape(fabric.planes, -1)
        assert (ports[:, : fabric.t0] == t0_ports).all()
        assert (ports[:, fabric.t0 :] == upper_ports).all()


@pytest.mark.parametrize(
    ("roce", "budget", "message"),
    [
        (replace(ROCE, qps=0), PacketBudget(), "0 queue pairs per connection"),
        (replace(ROCE, qps=1000), PacketBudget(), "use 1 to 64"),
        (replace(ROCE, buffer_bytes=1000), PacketBudget(), "at least 64 packets"),
        (replace(ROCE, timeout_s=0), PacketBudget(), "a timeout of 0 s"),
        (replace(ROCE, ack_every=0), PacketBudget(), "acknowledged every 0"),
        (ROCE, PacketBudget(cpu_s=1e-4), "31,296 packets"),
        (ROCE, PacketBudget(memory_bytes=1e3), "simulate fewer hosts"),
    ],
)
def test_what_cannot_run_is_refused(roce: Roce, budget: PacketBudget, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_connections(LEAF_SPINE, SHUFFLE, transport=roce, budget=budget)
