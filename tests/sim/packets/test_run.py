"""Packets on small fabrics: every one delivered once, what the published simulator printed, and what breaks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from packet_fabrics import FAT_TREE, LEAF_SPINE, PLANES, SHUFFLE, clos

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.packets import kernel, roce_kernel
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.simulation_arrays import PacketBudget
from phalanx.sim.packets.transport import ECMP, HTSIM, MRC, ROCE, Roce, Transport
from phalanx.sim.traffic_matrix import Flows, make_flows, permutation


def conserved(result: PacketResult) -> bool:
    """Each packet was delivered once, and each sending of it was delivered, trimmed or lost."""
    whole = result.delivered == result.packets and result.sent == result.packets + result.trimmed + result.lost
    return whole and result.finished == len(result.fct_s)


def test_one_connection_takes_what_uet_htsim_prints() -> None:
    # validate_uec_sender.out, "Single Connection": 176.2 µs for 2 MB over six links of 100G and 1 µs.
    result = run_connections(FAT_TREE, make_flows([0], [15], 2e6), transport=HTSIM)
    assert result.tail_s * 1e6 == pytest.approx(176.2, rel=0.002)
    assert conserved(result)


@pytest.mark.parametrize("transport", [HTSIM, replace(HTSIM, paths=1), replace(HTSIM, spray="skip"), MRC, ECMP])
@pytest.mark.parametrize("fabric", [LEAF_SPINE, clos(64, 8, up=2), PLANES], ids=["full", "4:1", "4 planes"])
def test_every_packet_is_delivered_once(fabric: Fabric, transport: Transport) -> None:
    assert conserved(run_connections(fabric, SHUFFLE, transport=transport))


def test_seeds_repeat() -> None:
    first, second, other = (run_connections(LEAF_SPINE, SHUFFLE, transport=HTSIM, seed=seed) for seed in (4, 4, 5))
    assert np.array_equal(first.fct_s, second.fct_s)
    assert not np.array_equal(first.fct_s, other.fct_s)


def test_another_seed_places_paths_elsewhere() -> None:
    # With one path, who is slow is who shares a link. Without the seed in the hash the same are slow every time (0.99).
    first, second = (run_connections(LEAF_SPINE, SHUFFLE, transport=ECMP, seed=seed).fct_s for seed in (0, 1))
    assert np.corrcoef(first, second)[0, 1] < 0.5


def test_more_paths_shorten_the_tail() -> None:
    tails = [run_connections(LEAF_SPINE, SHUFFLE, transport=replace(HTSIM, paths=paths)).tail_s for paths in (1, 8, 64)]
    assert tails[0] > 1.5 * tails[1] > 1.5 * tails[2]


def test_incast_runs_at_line_rate() -> None:
    # validate_uec_sender.out, "Small 16 node incast": 2478.53 µs.
    result = run_connections(FAT_TREE, make_flows(range(1, 16), [0] * 15, 2e6), transport=HTSIM)
    assert result.tail_s * 1e6 == pytest.approx(2478.5, rel=0.05)
    assert result.trimmed > 0
    assert conserved(result)


def test_an_incast_is_shared_fairly_and_a_victim_beside_it_unharmed() -> None:
    # arXiv:2605.04333 section 5.2.8: an equal split, no impact. Shares wander: 12 % within 4 ms, 4 % over 25.
    fabric = clos(16, 8, gbps=400)
    traffic = make_flows([*range(8, 15), 15], [0] * 7 + [1], 4e9)  # the victim goes to another host of the same T0
    result = run_connections(fabric, traffic, transport=MRC, watch=tuple(range(8)), limit_s=28e-3, sample_s=1e-3)
    payload_gbps = 400 * MRC.payload_bytes / MRC.packet_bytes
    mean = result.watched_gbps[:, 3:].mean(axis=1)
    assert mean[:7] == pytest.approx(payload_gbps / 7, rel=0.05)
    assert mean[7] == pytest.approx(payload_gbps, rel=0.01)


def test_loss_everywhere_costs_most_when_it_retires_paths_faster_than_probes_return_them() -> None:
    # An eighth of MRC's paths and of its time between probes, so that it settles in an eighth of the time.
    fabric, traffic = clos(16, 4, planes=4), make_flows(range(16), [(host + 4) % 16 for host in range(16)], 125e6)
    quick = replace(MRC, paths=32, probe_s=MRC.probe_s / 8)

    def mean_s(loss: float, transport: Transport = quick) -> float:
        faults = (FabricFault(part="traffic", loss=loss),) if loss else ()
        return run_connections(fabric, traffic, transport=transport, faults=faults).mean_s

    healthy = mean_s(0.0)
    assert healthy / mean_s(0.001) > 0.85  # 0.87 to 0.94 over seeds
    assert healthy / mean_s(0.01) < 0.6
    assert healthy / mean_s(0.01, replace(quick, probe_s=1e-4)) > 0.85


def test_the_last_paths_are_never_retired() -> None:
    forever = FabricFault(part="transceiver", number=0, at_s=20e-6)
    few = replace(MRC, paths=16, least_paths=5)
    result = run_connections(LEAF_SPINE, make_flows([0], [63], 2e6), transport=few, faults=(forever,), limit_s=2e-3)
    assert result.retired_paths == 11


def test_a_stopped_t1_touches_the_connections_that_have_a_path_over_it() -> None:
    # 1 - (1 - 1/512)^n for n of 512 paths: 22 % with 128, 39 % with 256 (arXiv:2605.04333 section 5.1: a quarter).
    fabric = clos(256, 128, planes=4, gbps=200)
    traffic = make_flows(range(256), [(host + 128) % 256 for host in range(256)], 4e6)
    for paths, share in ((128, 0.22), (256, 0.39)):
        stop = FabricFault(part="t1", number=3, at_s=10e-6)
        result = run_connections(fabric, traffic, transport=replace(MRC, paths=paths), faults=(stop,))
        assert result.touched_by_loss / 256 == pytest.approx(share, abs=0.06)
        assert conserved(result)


OVERSUBSCRIBED = parse_fabric("clos2:96x400G/4p/32/3:1/wide")


@pytest.mark.parametrize("fabric", [PLANES, OVERSUBSCRIBED], ids=["full", "3:1"])
def test_one_plane_stands_for_all_that_are_alike(fabric: Fabric) -> None:
    # At 3:1 windows hold every sender: with planes served in one order the first took 41 % and means grew by 63 %.
    traffic = [permutation(fabric.hosts, 4e6, seed=seed) for seed in (1, 2)]
    once = [run_connections(fabric, one, transport=MRC, seed=seed) for seed, one in enumerate(traffic)]
    each = [run_connections(fabric, one, transport=MRC, seed=seed, each_plane=True) for seed, one in enumerate(traffic)]
    assert {(one.planes_simulated, all_.planes_simulated) for one, all_ in zip(once, each, strict=True)} == {(1, 4)}
    # Rounding up to whole packets on every plane may add three of them.
    assert 0 <= once[0].packets - each[0].packets <= 3 * fabric.hosts
    assert sum(all_.mean_s for all_ in each) == pytest.approx(sum(one.mean_s for one in once), rel=0.03)
    for result in (*once, *each):
        assert sum(result.sent_by_plane) == result.sent
        assert np.array(result.sent_by_plane) / result.sent == pytest.approx(0.25, rel=0.01)
    # What is hardly broken is hardly slower.
    slow = run_connections(fabric, traffic[0], transport=MRC, seed=0, faults=(FabricFault(part="link", left=0.99),))
    assert slow.mean_s == pytest.approx(once[0].mean_s, rel=0.04)
    assert slow.mean_s == pytest.approx(each[0].mean_s, rel=0.02)


def test_short_transfers_start_on_all_planes() -> None:
    result = run_connections(PLANES, permutation(64, 1e3, seed=1), transport=MRC)
    assert result.planes_simulated == 4
    assert sum(result.sent_by_plane) == 64
    assert min(result.sent_by_plane) >= 8  # 16 each, two standard deviations


def test_a_slow_plane_gets_less_and_a_dead_one_nothing() -> None:
    # One NIC at each end: the window, not the order of planes, decides.
    pair = make_flows([0], [63], 20e6)
    slow = run_connections(PLANES, pair, transport=MRC, faults=(FabricFault(part="nic", number=0, plane=0, left=0.5),))
    assert slow.sent_by_plane[0] / slow.sent == pytest.approx(0.5 / 3.5, rel=0.1)
    assert np.array(slow.sent_by_plane[1:]) / slow.sent == pytest.approx(1 / 3.5, rel=0.05)
    dead = run_connections(PLANES, pair, transport=MRC, denied=(FabricFault(part="nic", number=0, plane=2),))
    assert dead.sent_by_plane[2] == 0
    assert np.array(dead.sent_by_plane)[[0, 1, 3]] / dead.sent == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize("sources", [(1, 2), (2, 1), (3, 7), (8, 16)])
def test_neighbours_share_a_full_queue(sources: tuple[int, int]) -> None:
    # Windows that stay open fill it. Were the order within a slot a rotation alone, host 1 would get 80 %, host 2 15 %.
    always = replace(MRC, controlled=False)
    result = run_connections(
        LEAF_SPINE, make_flows(sources, [0, 0], 20e6), transport=always, watch=(0, 1), limit_s=2e-3
    )
    assert result.trimmed > 0.3 * result.sent
    first, second = result.watched_gbps[:, 10:].mean(axis=1)
    assert first == pytest.approx(second, rel=0.1)


FAULTS = {
    "link flap": FabricFault(part="link", number=2, port=3, at_s=20e-6, until_s=200e-6),
    "T1 reboot": FabricFault(part="t1", number=3, at_s=20e-6),
    "T0 loss": FabricFault(part="t0", number=2, at_s=20e-6),
    "NIC port": FabricFault(part="nic", number=5, at_s=20e-6),
    "transceiver": FabricFault(part="transceiver", number=5, at_s=20e-6, until_s=200e-6),
    "grey path": FabricFault(part="link", number=2, port=3, loss=0.2),
    "grey everywhere": FabricFault(part="traffic", loss=0.01),
    "slow": FabricFault(part="link", number=2, port=3, left=0.1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_edge_recovery_delivers_everything(name: str) -> None:
    fault = FAULTS[name]
    result = run_connections(PLANES, SHUFFLE, transport=MRC, faults=(fault,))
    assert conserved(result)
    assert (result.lost > 0) == (fault.left == 0)
    assert result.touched_by_loss <= result.touched <= 64


def test_a_dead_nic_port_costs_its_plane_and_others_little() -> None:
    long = permutation(64, 16e6, seed=1)
    healthy = run_connections(PLANES, long, transport=MRC)
    broken = run_connections(PLANES, long, transport=MRC, faults=(FabricFault(part="nic", number=5),))
    hit = (long.source == 5) | (long.target == 5)
    # Three of four planes are left, and the first losses have to be noticed.
    assert broken.fct_s[hit].mean() / healthy.mean_s == pytest.approx(4 / 3, rel=0.15)
    assert broken.fct_s[~hit].mean() / healthy.mean_s == pytest.approx(1, rel=0.05)


def test_routing_waits_for_convergence_where_the_edge_does_not() -> None:
    fault = FabricFault(part="t1", number=3, at_s=20e-6)
    edge = run_connections(LEAF_SPINE, SHUFFLE, transport=MRC, faults=(fault,))
    routed = run_connections(LEAF_SPINE, SHUFFLE, transport=replace(ECMP, converge_s=0.02), faults=(fault,))
    assert edge.tail_s < 0.001 < 0.02 < routed.tail_s < 0.03
    assert conserved(routed)


def test_routing_goes_around_dead_links_above_a_t1() -> None:
    fabric, across = clos(128, 4, tiers=3), make_flows(range(128), [(host + 64) % 128 for host in range(128)], 1e5)
    quick = replace(ECMP, converge_s=1e-3)
    some = [(t1, port) for t1 in range(8) for port in (0, 1)]
    whole = [(t1, port) for t1 in (0, 5) for port in range(4)]  # two T1s have no way up: their T0s must know it
    for links in (some, whole):
        dead = tuple(FabricFault(part="t1_link", number=t1, port=port, at_s=5e-6) for t1, port in links)
        result = run_connections(fabric, across, transport=quick, faults=dead)
        assert result.lost > 0
        assert 1e-3 < result.tail_s < 4e-3
        assert conserved(result)


def test_acknowledgements_load_the_plane_they_answer() -> None:
    # One connection each way on each of four planes: a quarter of a slot for each acknowledgement, on every plane.
    fabric, both = clos(2, 2, planes=4), make_flows([0] * 4 + [1] * 4, [1] * 4 + [0] * 4, 2e6)
    each = replace(MRC, ack_every=1, ack_bytes=MRC.packet_bytes // 4, paths=1, controlled=False)
    result = run_connections(fabric, both, transport=each)
    slot_s = 8 * MRC.packet_bytes / 100e9
    assert result.fct_s / (2e6 / MRC.payload_bytes * slot_s) == pytest.approx(1.25, rel=0.05)


def test_nothing_more_is_sent_on_a_path_that_lost_a_packet() -> None:
    lost = [
        run_connections(
            LEAF_SPINE,
            permutation(64, nbytes, seed=1),
            transport=MRC,
            faults=(FabricFault(part="t1", number=3, at_s=20e-6),),
        ).lost
        for nbytes in (2e6, 6e6)
    ]
    assert lost[1] < 1.5 * lost[0]


T1_OF_ONE_PLANE = FabricFault(part="t1", number=3, plane=1, at_s=20e-6)


@pytest.mark.parametrize("transport", [MRC, ECMP, replace(ROCE, qps=4)], ids=lambda transport: transport.name)
def test_nothing_takes_a_denied_part(transport: Transport | Roce) -> None:
    # It dies during the run, and nobody notices.
    denied = run_connections(PLANES, SHUFFLE, transport=transport, faults=(T1_OF_ONE_PLANE,), denied=(T1_OF_ONE_PLANE,))
    assert (denied.lost, denied.retired_paths, denied.finished) == (0, 0, 64)
    assert run_connections(PLANES, SHUFFLE, transport=transport, faults=(T1_OF_ONE_PLANE,), limit_s=5e-3).lost > 0


def test_denied_paths_are_those_over_the_part_and_no_probe_brings_them_back() -> None:
    across = make_flows(range(64), [(host + 8) % 64 for host in range(64)], 2e6)
    often = replace(MRC, probe_s=20e-6)
    result = run_connections(PLANES, across, transport=often, denied=(T1_OF_ONE_PLANE,))
    assert result.denied_paths / (64 * 256) == pytest.approx(1 / 32, rel=0.2)  # one of 8 T1s in one of 4 planes
    assert result.planes_simulated == 4
    assert result.summary()["paths_denied"] == result.denied_paths
    deep, t1_link = clos(128, 4, tiers=3), FabricFault(part="t1_link", number=0, port=1)
    over = run_connections(deep, make_flows([0], [127], 1e4), transport=MRC, denied=(t1_link,))
    assert 4 <= over.denied_paths <= 32  # of 256 over 16 pairs of a T1 and an uplink of it


@pytest.mark.parametrize(
    ("denied", "message"),
    [
        (
            [FabricFault(part="nic", number=5, plane=plane) for plane in range(4)],
            "without a path: 2, the first from host",
        ),
        ([FabricFault(part="traffic")], "all traffic was named"),
        ([FabricFault(part="t1", number=99)], "there is no"),
    ],
)
def test_what_cannot_be_denied_is_refused(denied: list[FabricFault], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_connections(PLANES, SHUFFLE, transport=MRC, denied=tuple(denied))


def test_less_than_a_packet_is_one_packet() -> None:
    assert [
        run_connections(PLANES, make_flows([0], [63], nbytes), transport=MRC).packets for nbytes in (1, 4097, 4e6)
    ] == [
        1,
        2,
        980,
    ]


def test_throughput_over_time_shows_the_outage() -> None:
    fault = FabricFault(part="transceiver", number=5, at_s=50e-6, until_s=150e-6)
    hit = int(np.flatnonzero(SHUFFLE.source == 5)[0])
    result = run_connections(LEAF_SPINE, SHUFFLE, transport=MRC, faults=(fault,), watch=(hit,))
    dark = (result.time_s > 80e-6) & (result.time_s < 150e-6)
    assert result.watched_gbps[0, dark].max() == 0
    assert np.isfinite(result.fct_s[hit])
    total = (result.throughput_gbps * np.diff(result.time_s, prepend=0)).sum() * 1e9 / 8
    assert total == pytest.approx(result.packets * MRC.payload_bytes)


def test_a_retired_path_returns_after_a_probe() -> None:
    flap = FabricFault(part="transceiver", number=0, at_s=0, until_s=300e-6)
    result = run_connections(
        LEAF_SPINE, make_flows([0], [63], 2e6), transport=replace(MRC, probe_s=100e-6), faults=(flap,)
    )
    assert result.retired_paths > 0
    assert 300e-6 < result.tail_s < 1e-3


def test_a_lost_connection_is_said() -> None:
    forever = FabricFault(part="transceiver", number=5, at_s=20e-6)
    result = run_connections(LEAF_SPINE, SHUFFLE, transport=MRC, faults=(forever,), limit_s=1e-3)
    assert (result.finished, result.stopped, result.tail_s) == (62, "time limit", math.inf)


def test_ctrl_c_returns_what_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = kernel.advance, []

    def advance(*args: object) -> int:
        calls.append(args)
        if len(calls) > 18:
            raise KeyboardInterrupt
        slot: int = real(*args)
        return slot

    monkeypatch.setattr(kernel, "advance", advance)
    result = run_connections(LEAF_SPINE, SHUFFLE, transport=MRC)
    assert result.stopped == "interrupted"
    assert 0 < result.finished < 64
    assert result.summary()["finished"] == result.finished


@pytest.mark.parametrize("transport", [MRC, ROCE], ids=lambda transport: transport.name)
def test_ctrl_c_in_the_loop_does_not_lose_its_time(
    monkeypatch: pytest.MonkeyPatch, transport: Transport | Roce
) -> None:
    # Python raises it when the loop returns, before the result has a name.
    module = kernel if isinstance(transport, Transport) else roce_kernel
    real = module.advance

    def advance(*args: object) -> int:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "advance", advance)
    result = run_connections(LEAF_SPINE, SHUFFLE, transport=transport, sample_s=50e-6)
    assert result.simulated_s == pytest.approx(50e-6, rel=0.01)
    assert result.time_s[-1] == pytest.approx(result.simulated_s)
    assert 0 < result.throughput_gbps[-1] < 64 * 100
    assert result.sent <= 64 * 100e9 * result.simulated_s / 8 / 4096


@pytest.mark.parametrize(
    ("traffic", "transport", "budget", "message"),
    [
        (SHUFFLE, MRC, PacketBudget(cpu_s=1e-4), "31,296 packets over 119,316 hops need about"),
        (SHUFFLE, MRC, PacketBudget(memory_bytes=1e3), "simulate fewer hosts"),
        (SHUFFLE, replace(MRC, paths=0), PacketBudget(), "0 paths per connection"),
        (SHUFFLE, replace(MRC, paths=10**9), PacketBudget(), "use 1 to 2,048"),
        (make_flows([0], [64], 1e6), MRC, PacketBudget(), "hosts are numbered from 0 to 63"),
        (make_flows([0], [1], 1e15), MRC, PacketBudget(), "the busiest NIC"),
        (permutation(64, 1e10), MRC, PacketBudget(cpu_s=10), "of the bytes"),
    ],
)
def test_what_cannot_run_is_refused(traffic: Flows, transport: Transport, budget: PacketBudget, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_connections(LEAF_SPINE, traffic, transport=transport, budget=budget)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FabricFault(part="t1", number=99), "there is no"),
        (FabricFault(part="link", at_s=2, until_s=1), "let it end after it begins"),
        (FabricFault(part="t1_link", number=0), "0 uplinks each"),
        (FabricFault(part="nic", loss=2), "both are shares"),
    ],
)
def test_faults_of_what_is_not_there_are_refused(fault: FabricFault, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_connections(LEAF_SPINE, SHUFFLE, transport=MRC, faults=(fault,))
