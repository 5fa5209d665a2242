"""Command lines of uet-htsim: connections, fabric and transport out of their words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.sim.packets.packet_run import run_connections
from phalanx.validate import network_htsim
from phalanx.validate.network_claims import Claim, ClaimContext
from phalanx.validate.network_htsim import PacketCase, fabric_of, flows_of, read_case, rows_of, schedule_of, shuffled

PERMUTATION = "./htsim_uec -tm connection_matrices/perm_1024n_1024c_0u_2000000b.cm -sender_cc_only"


def case(command: str) -> PacketCase:
    found = read_case(command)
    assert isinstance(found, PacketCase), found
    return found


def test_options_become_a_transport() -> None:
    plain = case(PERMUTATION)
    assert (plain.paths, plain.spray, plain.ack_every, plain.credits) == (64, "recycle", 4, False)
    made = case(
        "-tm perm_1024n_1024c_0u_2000000b.cm -receiver_cc_only -load_balancing_algo bitmap -sack_threshold 4000 "
        "-paths 16 -q 500 -cwnd 50 -hop_latency 0.5 -mtu 2048 -failed 8 -end 400"
    )
    assert (made.paths, made.spray, made.ack_every, made.credits, made.failed) == (16, "skip", 2, True, 8)
    assert (made.queue, made.window) == (500, 50)
    assert (made.hop_s, made.end_s) == pytest.approx((0.5e-6, 400e-6))


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ("", (3, 100.0, 8, 8, 128, 128)),
        ("-linkspeed 400000", (3, 400.0, 8, 8, 128, 128)),
        ("-topo topologies/leaf_spine_1024.topo", (2, 100.0, 32, 32, 32, 32)),
        ("-topo leaf_spine_1024_oversub.topo", (2, 100.0, 32, 8, 32, 8)),
        ("-topo leaf_spine_1024_oversub_8-1.topo", (2, 100.0, 32, 4, 32, 4)),
        ("-topo leaf_spine_1024_400g_4_to_1.topo", (2, 400.0, 32, 8, 32, 8)),
        ("-topo fat_tree_1024_1os_3t_800g.topo", (3, 800.0, 8, 8, 128, 128)),
    ],
)
def test_fabrics(words: str, shape: tuple[float, ...]) -> None:
    made = fabric_of(case(f"{PERMUTATION} {words}"))
    assert (made.tiers, made.port_gbps, made.t0_down, made.t0_up, made.t0, made.t1) == shape


def test_fabrics_that_their_names_do_not_give() -> None:
    for words in ("-topo secret.topo", "-topo fat_tree_1024_4os.topo", "-topo leaf_spine_2048.topo", "-tiers 2"):
        assert "no full fat tree" in str(read_case(f"{PERMUTATION} {words}"))
    assert fabric_of(case("-tm perm_128n_128c_2MB.cm -tiers 2")).t0 == 16


def test_connections_are_those_of_the_public_files() -> None:
    # the first and the 437th line of perm_1024n_1024c_0u_2000000b.cm (Broadcom/csg-htsim)
    rows = shuffled(1024, 1024, 13)
    assert (rows[:2], rows[436]) == ([(334, 395), (404, 414)], (137, 470))
    assert rows_of(case(PERMUTATION).sent)[0] == (334, 395, 2_000_000, 0.0)
    assert {a for a, _ in rows} == {b for _, b in rows} == set(range(1024))
    assert all(a != b for a, b in rows)
    part = case("-tm perm_1024n_200c_1MB_seed4.cm").sent
    assert (len(flows_of(part)), part.nbytes, part.seed) == (200, 1_000_000, 4)
    crowd = rows_of(case("-tm outcast_incast.cm").sent)
    assert (len(crowd), sum(target == 0 for _, target, _, _ in crowd)) == (21, 3)
    assert len({target for _, target, _, _ in crowd}) == 19
    late = case("-tm incast_3-1_overlapped.tm").sent
    assert schedule_of(late).start_s.tolist() == [0, pytest.approx(40e-6), pytest.approx(40e-6)]
    many = flows_of(case("-tm incast_128_100K.cm").sent)
    assert (len(many), set(many.target.tolist()), many.nbytes[0]) == (127, {127}, 100_000)


def row(quantity: str, command: str, value: float) -> Claim:
    return Claim(line=2, source="uet-htsim", quantity=quantity, value=value, unit="us", conditions=command)


@pytest.mark.parametrize(
    ("quantity", "command", "value"),
    [
        # uet-htsim@40ccb05 validate_outputs, as in the table
        ("tail FCT", "-tm incast_3-1_overlapped.tm -sender_cc_only -cwnd 50", 221.731),
        ("min FCT", "-tm incast_3-1_overlapped.tm -sender_cc_only -cwnd 50", 114.098),
        ("tail FCT", "-tm perm_16n_16c_2MB.cm -sender_cc_only -paths 128", 194.022),
        ("tail FCT", "-tm perm_16n_16c_2MB.cm -sender_cc_only -failed 1 -paths 128", 238.218),
    ],
)
def test_small_runs(quantity: str, command: str, value: float) -> None:
    one = row(quantity, command, value)
    found = network_htsim.completion(one, ClaimContext(rows=(one,), simulate=True))
    assert (found.status, found.within) == ("reproduced", True)


def test_a_slow_link_makes_the_tail_later_and_only_what_ends_in_time_counts() -> None:
    def ours(words: str) -> float:
        one = row("tail FCT", f"-tm perm_16n_16c_2MB.cm -sender_cc_only -paths 128 {words}", 1.0)
        return network_htsim.completion(one, ClaimContext(rows=(one,), simulate=True)).ours or 0.0

    whole, slow, cut = ours(""), ours("-failed 4"), ours("-end 190")
    assert slow > 1.2 * whole
    assert whole > 190 >= cut > 180


def test_a_slow_link_has_a_short_queue_as_in_uet_htsim() -> None:
    made = case("-tm perm_16n_16c_2MB.cm -sender_cc_only -paths 128 -failed 1")
    faults = network_htsim._case_faults(made)
    assert [(one.part, one.number, one.port, one.left) for one in faults] == [("t1_fall", 0, 0, 0.25)]
    long = tuple(replace(one, short=False) for one in faults)
    whole, short = (
        run_connections(
            fabric_of(made), flows_of(made.sent), transport=network_htsim._case_transport(made), faults=some
        )
        for some in (long, faults)
    )
    assert short.trimmed > whole.trimmed
    assert short.tail_s < whole.tail_s


def test_two_tiers_have_slow_t1s() -> None:
    made = case(f"{PERMUTATION} -topo leaf_spine_1024.topo -failed 3")
    assert [(one.part, one.number) for one in network_htsim._case_faults(made)] == [("t1", 0), ("t1", 1), ("t1", 2)]


def test_credits_of_several_senders_have_a_last_end_only() -> None:
    one = row("min FCT", "-tm incast.cm -receiver_cc_only", 1.0)
    found = network_htsim.completion(one, ClaimContext(rows=(one,), simulate=True))
    assert found.note == "in which order a receiver grants credits to several senders is not modelled"
