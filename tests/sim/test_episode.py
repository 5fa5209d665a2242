"""Failures in time, against arithmetic by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim import routes, traffic_matrix
from phalanx.sim.episode import Episode, Manner, run_episode
from phalanx.sim.fluid import IDEAL, MRC, Wire
from phalanx.sim.packets.link_faults import FabricFault

FABRIC = parse_fabric("clos2:64x800G/8p/16/wide")
ALONE = traffic_matrix.make_flows([0], [60], 20e6)  # 200 µs at line rate
QPS = routes.Routing(spread="qp", paths=8, planes="equal", recovery="conventional")
ROCE = Manner(name="RoCE", routing=QPS, react_s=1.0, go_back=True)
EDGE = Manner(name="MRC", routing=routes.spray_routing(256), react_s=30e-6)
PORT = FabricFault(part="nic", number=0, at_s=50e-6)


def run(manner: Manner, *faults: FabricFault, flows: traffic_matrix.Flows = ALONE, over: Wire = IDEAL) -> Episode:
    return run_episode(FABRIC, flows, manner=manner, faults=faults, wire=over)


def _met_t1() -> int:
    """A T1 of plane 0 on the path of the queue pair there."""
    return next(number for number in range(8) if run(ROCE, FabricFault(part="t1", number=number, at_s=50e-6)).touched)


def test_nothing_broken_is_line_rate() -> None:
    for manner in (ROCE, EDGE):
        found = run(manner)
        assert found.times_s == pytest.approx([200e-6])
        assert found.bits.sum() == pytest.approx(8 * 20e6)
        assert (found.lost_packets, found.touched) == (0, 0)


def test_a_port_at_the_edge_takes_an_eighth_and_what_was_sent_before_it_was_known() -> None:
    """50 µs whole, 30 µs in which 7/8 arrive and 1/8 is lost, then 7/8 of line rate: 12.5 % less."""
    found = run(EDGE, PORT)
    whole, blind = 50e-6 * 800e9, 30e-6 * 700e9
    assert found.times_s == pytest.approx([80e-6 + (160e6 - whole - blind) / 700e9])
    assert found.lost_packets == pytest.approx(30e-6 * 100e9 / 8 / 4096)
    assert found.touched == 1


def test_a_part_that_is_slow_keeps_its_share() -> None:
    """A port at a tenth from 50 µs on: 7.1 of 8 planes for what sprays, a tenth of its own eighth for a queue pair."""
    slow = replace(PORT, left=0.1)
    assert run(EDGE, slow).times_s == pytest.approx([50e-6 + 120e6 / 710e9])
    assert run(ROCE, slow).times_s == pytest.approx([50e-6 + 150e-6 / 0.1])
    assert run(EDGE, slow).lost_packets == 0


def test_two_grey_parts_on_a_path_lose_more_than_one() -> None:
    both = (replace(PORT, loss=0.1), FabricFault(part="nic", number=60, at_s=50e-6, loss=0.1))
    again = (*both, replace(both[0], part="transceiver"))  # the same port twice, and the other seven
    once, twice = run(ROCE, *both), run(ROCE, *again)
    # Over the remaining 150 µs a plane delivers 15 Mb; a path that keeps s of its packets sends 1/s as many.
    assert once.lost_packets == pytest.approx(15e6 / 8 / 4096 * (1 / 0.81 - 1), rel=1e-6)
    expected = 15e6 / 8 / 4096 * ((1 / (0.81 * 0.9) - 1) + 7 * (1 / 0.9 - 1))
    assert twice.lost_packets == pytest.approx(expected, rel=1e-6)


def test_a_flow_that_is_done_is_not_touched() -> None:
    flows = traffic_matrix.make_flows([0, 0], [60, 61], [1e6, 20e6])
    assert run(EDGE, replace(PORT, at_s=100e-6), flows=flows).touched == 1
    assert run(EDGE, PORT, flows=traffic_matrix.make_flows([0, 0], [60, 61], [20e6, 20e6])).touched == 2


def test_a_port_that_returns_lets_a_queue_pair_go_on_where_it_was() -> None:
    """Its eighth has 15 MB/8 left after 50 µs, and 2 ms later still."""
    found = run(ROCE, replace(PORT, until_s=2e-3))
    assert found.times_s == pytest.approx([2e-3 + 150e-6])
    assert found.lost_packets == pytest.approx(15e6 / 8 / 4096)  # it sends what it has, and no more
    blink = run(ROCE, replace(PORT, until_s=60e-6))
    assert blink.lost_packets == pytest.approx(10e-6 * 100e9 / 8 / 4096)
    assert blink.times_s == pytest.approx([210e-6])
    assert math.isinf(run(ROCE, PORT).times_s[0])  # no other port in that plane
    assert run(ROCE, PORT).bits.sum() == pytest.approx(160e6 * 7 / 8 + 20e6 / 4)


def test_a_queue_pair_that_lost_all_waits_for_its_timer() -> None:
    """Down for 950 µs; the timer of 5 ms ends at 5.05 ms, and the part of 2.5 MB still takes its time."""
    patient = replace(ROCE, timeout_s=5e-3)
    flap = replace(PORT, until_s=1e-3)
    found = run(patient, flap)
    assert found.times_s[0] == pytest.approx(50e-6 + 5e-3 + 150e-6, rel=1e-3)
    assert found.lost_packets == run(ROCE, flap).lost_packets
    # Two failures: the second while it waits is not lost again, and what it waits for is the first timer that works.
    again = run(patient, flap, replace(PORT, at_s=2e-3, until_s=8e-3))
    assert again.times_s[0] == pytest.approx(50e-6 + 10e-3 + 150e-6, rel=1e-3)
    assert again.lost_packets == found.lost_packets
    quick = run(replace(patient, react_s=12e-3), FabricFault(part="t1", number=_met_t1(), at_s=50e-6))
    assert quick.times_s[0] == pytest.approx(50e-6 + 15e-3 + 150e-6, rel=1e-3)


def test_routing_goes_around_a_switch_when_it_has_converged() -> None:
    dead = FabricFault(part="t1", number=_met_t1(), at_s=50e-6)
    assert run(ROCE, dead).times_s == pytest.approx([50e-6 + 1.0 + 150e-6])
    assert run(replace(ROCE, react_s=math.inf), dead).times_s[0] == math.inf
    found = run(ROCE, dead)
    assert found.end_s[-2:] == pytest.approx([1 + 50e-6, 1 + 200e-6])
    assert found.bits[-2:] == pytest.approx([0.0, 15e6])  # nothing while it waits, then what was left: 15 Mb


def test_connections_touched_are_those_with_a_path_there() -> None:
    """1-(1-1/n)^k with n = 8 T1s and k = 32 or 8 paths in the plane."""
    flows = traffic_matrix.shift(64, 20e6)
    for paths in (64, 256):
        found = run(
            replace(EDGE, routing=routes.spray_routing(paths)),
            FabricFault(part="t1", number=3, at_s=50e-6),
            flows=flows,
        )
        expected = 64 * (1 - (1 - 1 / 8) ** (paths / 8))
        assert found.touched == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected / 64.001)) + 1)


def test_loss_on_a_link_is_left_by_senders_and_never_by_routing() -> None:
    """Go-back-N with n packets under way gets 0.8/(0.8 + 0.2·n) through a port that loses a fifth."""
    grey = FabricFault(part="nic", number=0, at_s=50e-6, loss=0.2)
    edge, conventional = run(EDGE, grey, over=MRC), run(ROCE, grey, over=MRC)
    whole_s = run(ROCE, over=MRC).times_s[0]
    assert edge.times_s[0] == pytest.approx(50e-6 + (whole_s - 50e-6) * 8 / 7, rel=0.02)
    # 38 packets of 4,262 B on 100 Gb/s in the 13.1 µs of a round trip.
    under_way = 2 * (3.64e-6 + 4 * 0.725e-6) * 100e9 / 8 / 4262
    share = 0.8 / (0.8 + 0.2 * under_way)
    assert conventional.times_s[0] == pytest.approx(50e-6 + (whole_s - 50e-6) / share, rel=0.05)
    assert 0 < edge.lost_packets < conventional.lost_packets
    # However fast routing is: it could leave this switch, but its ports are up.
    switch = replace(grey, part="t1", number=_met_t1())
    quick, slow = run(replace(ROCE, react_s=1e-6), switch), run(ROCE, switch)
    assert quick.times_s == slow.times_s
    assert quick.lost_packets == slow.lost_packets > 0


def test_loss_everywhere_dries_up_the_paths_of_long_transfers() -> None:
    """A packet in a hundred retires a path, probes bring back 1 in 10 ms: after 1 ms four paths are left, of eight."""
    sender = replace(EDGE, least_paths=4, probe_s=10e-3)
    grey = FabricFault(part="traffic", loss=0.01)
    short, long = run(sender, grey), run(sender, grey, flows=traffic_matrix.make_flows([0], [60], 2e9))
    assert short.times_s[0] == pytest.approx(200e-6 / 0.99, rel=0.01)
    assert long.times_s[0] == pytest.approx(20e-3 / 0.5 / 0.99, rel=0.03)
    rare = run(sender, replace(grey, loss=0.001), flows=traffic_matrix.make_flows([0], [60], 2e9))
    assert rare.times_s[0] == pytest.approx(20e-3, rel=0.01)


def test_losses_and_probes_balance_between_dry_and_all_paths() -> None:
    """800 Gb/s lose 0.001 of 23.5 million packets a second; 128 paths that return after 10 ms can spare 124 of 235: the
    rate falls to 0.53 of the line, which is four of eight planes, and with 0.0007 to 0.75, which is six."""
    sender = replace(EDGE, routing=routes.spray_routing(128), least_paths=4, probe_s=10e-3)
    for loss, planes in ((0.01, 4), (0.001, 4), (0.0007, 6), (0.0005, 8)):
        found = run(sender, FabricFault(part="traffic", loss=loss), flows=traffic_matrix.make_flows([0], [60], 40e9))
        assert found.times_s[0] == pytest.approx(0.4 * 8 / planes / (1 - loss), rel=0.05), loss


def test_a_queue_pair_waits_for_its_timer_where_a_packet_is_lost_twice() -> None:
    """The packet engine, one queue pair at 100G, 100 MB (24,415 packets), seed 1: 8.2 ms without loss, 211 ms with 1 %
    (three timers of 67 ms), 1,423 ms with 3 %: n·p² timers, 2.4 and 22 of them, beside which going back is little."""
    one = replace(parse_fabric("clos2:4x100G/1p/8"))
    sent = traffic_matrix.make_flows([0], [3], 100e6)
    for loss, expected in ((0.01, 2.44), (0.03, 21.97)):
        times = [
            run_episode(
                one,
                sent,
                manner=replace(ROCE, routing=replace(ROCE.routing, paths=1, seed=seed), timeout_s=67e-3),
                faults=(FabricFault(part="traffic", loss=loss),),
            ).times_s[0]
            for seed in range(40)
        ]
        # 40 draws of so many timers on average, and the last packet's; 8 to 18 ms are the sending itself.
        spread = 3 * math.sqrt(expected / 40)
        assert (np.mean(times) - 12e-3) / 67e-3 == pytest.approx(expected + loss, abs=spread + 0.1)


def test_what_is_denied_is_never_used() -> None:
    """A dead NIC port that senders were told of costs its eighth from the start, and not a packet."""
    port = FabricFault(part="nic", number=0)
    flows = traffic_matrix.make_flows([0], [60], 20e6)
    for denied in ((), (port,)):
        found = run_episode(FABRIC, flows, manner=EDGE, faults=(port,), denied=denied, wire=IDEAL)
        assert (found.lost_packets == 0) == (found.touched == 0) == bool(denied)
    assert found.times_s[0] == pytest.approx(200e-6 * 8 / 7, rel=1e-3)
    grey = FabricFault(part="t1", number=_met_t1(), loss=0.2)
    hashed = run_episode(FABRIC, flows, manner=ROCE, faults=(grey,), denied=(grey,), wire=IDEAL)
    assert hashed.lost_packets == 0  # routing had been told


def test_nothing_waits_for_a_failure_after_the_end() -> None:
    found = run(EDGE, FabricFault(part="t1", number=0, at_s=5.0))
    assert found.end_s[-1] == pytest.approx(200e-6, rel=0.05)


def test_ctrl_c_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, advance = [], run_episode.__globals__["_advance_stage"]

    def stop_in_the_second(*args: object) -> None:
        stages.append(1)
        if len(stages) == 2:
            raise KeyboardInterrupt
        advance(*args)

    monkeypatch.setattr("phalanx.sim.episode._advance_stage", stop_in_the_second)
    found = run(EDGE, replace(PORT, at_s=1e-3), flows=traffic_matrix.make_flows([0, 1], [60, 61], [1e6, 2e9]))
    assert found.stopped == "interrupted"
    assert np.isfinite(found.times_s).tolist() == [True, False]
