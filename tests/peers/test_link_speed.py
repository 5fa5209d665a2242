"""Links are measured in the run: shares follow from what they carry, without anybody stating it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crew import Crew, together
from hypothesis import given
from hypothesis import strategies as st
from relay import Address, Relay

from phalanx.peers import messages as say
from phalanx.peers.facts import Bandwidth, Member, MemberView, RoundResult
from phalanx.peers.group import PeerGroup
from phalanx.peers.link_speed import steady_rate
from phalanx.peers.round_leader import plan_shares
from phalanx.peers.speed_turns import AGAIN_S, SpeedTurns

SLOW_MBPS = 8.0


class SlowRelay(Relay):
    """Both directions of all its connections together carry so much each."""

    def __init__(self, target: Address) -> None:
        up = threading.Event()
        up.set()
        self._turn = {False: threading.Lock(), True: threading.Lock()}
        super().__init__(target, up)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            away = source.getsockname()[:2] == self.address
            while data := source.recv(16384):
                with self._turn[away]:
                    time.sleep(len(data) / (SLOW_MBPS * 125_000))
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def average(groups: list[PeerGroup], number: int) -> list[RoundResult]:
    vector = np.ones(70_000, np.float32)
    return together([lambda group=group: group.average(number, vector, 1.0, timeout_s=50.0) for group in groups])


def test_a_slow_link_is_measured_and_its_peer_sums_less() -> None:
    with Crew(4) as crew, contextlib.ExitStack() as relays:
        groups = [crew.start(0), crew.start(1)]
        # The third dials the others, having the highest id: all its connections are slow.
        slow = {group.id: SlowRelay(group.address) for group in groups}
        for relay in slow.values():
            relays.callback(relay.close)
        groups.append(crew.start(2, routes={peer: relay.address for peer, relay in slow.items()}))
        groups[0].join()
        groups[1].join([groups[0].address], timeout_s=20.0)
        groups[2].join([slow[groups[0].id].address], timeout_s=20.0)
        crew.wait_for(lambda: all(len(group.view().members) == 3 for group in groups))
        results = average(groups, 0)
        assert all(result.committed for result in results), [result.reason for result in results]
        found = [member.bandwidth for member in groups[0].view().members]
        speeds = [one.slower_mbps for one in found if one is not None]
        assert len(speeds) == 3, "everybody was measured"
        assert speeds[2] < 2.5 * SLOW_MBPS  # two connections, each behind a relay of its own
        assert speeds[2] < min(speeds[:2])
        shares = [results[0].shares.get(group.id, 0.0) for group in groups]
        assert shares[2] < 0.2 < max(shares)
        assert sum(shares) == 1.0
        assert average(groups, 1)[0].committed
        assert crew.kinds(0).count("measured") == 3, "nobody is measured twice"


def test_a_link_that_has_become_slow_is_measured_again_and_a_stated_one_never() -> None:
    ids = [f"{place:016x}" for place in range(3)]
    stated, known = Bandwidth(up_mbps=10.0, down_mbps=10.0), Bandwidth(up_mbps=20.0, down_mbps=20.0)
    members = tuple(
        Member(id=peer, name="p", address=("h", 1), instance=f"i{place}", bandwidth=None if place else stated)
        for place, peer in enumerate(ids)
    )
    turns: list[str] = []
    node: Any = SimpleNamespace(
        me=ids[0],
        view=MemberView(number=1, members=members, next_round=0),
        links=SimpleNamespace(post=lambda peer, message: turns.append(peer)),
    )
    speed_turns, now = SpeedTurns(node), time.monotonic()
    ready: Any = {peer: SimpleNamespace(codec="fp32", values=2**20) for peer in ids}

    def measure_all(now: float) -> list[str]:
        turns.clear()
        while speed_turns.wait_s(ready, now):
            speed_turns.on_measured(turns[-1])
        return turns

    assert measure_all(now) == ids[1:]
    assert measure_all(now) == []
    assert speed_turns.measured == set(ids[1:])
    members = tuple(Member(**{**_fields(one), "bandwidth": one.bandwidth or known}) for one in members)
    node.view = MemberView(number=1, members=members, next_round=0)
    plan = say.RoundPlan(
        view_number=1,
        round_number=0,
        attempt=1,
        values=2**20,
        codec="fp32",
        top_share=0.03,
        segment=8192,
        weights=dict.fromkeys(ids, 1.0),
        norms=dict.fromkeys(ids, 1.0),
        owners={ids[1]: (0, 2**20)},
        dropped={},
    )
    speed_turns.on_committed(plan, 100.0)
    assert measure_all(now) == [], "not so soon"
    speed_turns._again_at = now - AGAIN_S
    speed_turns.on_committed(plan, 3.5)  # 4.2 MB at 10 Mbit/s take 3.4 s
    assert measure_all(now) == []
    speed_turns.on_committed(plan, 100.0)
    assert measure_all(now) == ids[1:]


def test_one_that_takes_all_that_the_others_send_is_not_limited_by_its_own_link() -> None:
    def shares(speeds: list[float], measured: set[str]) -> list[float]:
        members = [
            Member(id=str(p), name="p", address=("h", 1), instance="i", bandwidth=Bandwidth(up_mbps=one, down_mbps=one))
            for p, one in enumerate(speeds)
        ]
        return plan_shares(members, measured=measured)

    noisy = [27.2, 11.9, 9.5, 11.7]  # of links of 80, 10, 10 and 10 Mbit/s
    assert shares(noisy, {"0", "1", "2", "3"})[0] > 0.98
    assert shares(noisy, set())[0] < 0.85  # stated speeds are taken for what they are
    assert shares([10.0, 10.0, 10.0], {"0", "1", "2"}) == pytest.approx([1 / 3] * 3)
    assert shares([219.0, 397.0, 218.0], {"0", "1", "2"}) == pytest.approx([1 / 3] * 3)  # a fast network, busy machines
    assert shares([219.0, 397.0, 218.0], set())[1] > 0.4


@given(rates=st.lists(st.integers(1, 10_000), min_size=1, max_size=5), pause=st.integers(0, 10))
def test_the_best_steady_window_counts_and_neither_a_pause_nor_what_follows_it(rates: list[int], pause: int) -> None:
    """Of one that does nothing for up to half a second, and then reads all that waits, no more than that is wrong."""

    def stream(rate: int) -> list[tuple[float, int]]:
        waits = range(30, 30 + pause)
        return [(at / 20, rate * (29 if at in waits else at)) for at in range(60)]

    found = steady_rate([stream(rate) for rate in rates], 0.4, 0.8)
    assert 20 * sum(rates) <= found * 1.0001
    assert found <= 20 * sum(rates) * (1 + pause / 16) * 1.0001
    shorter = [(at / 20, rates[0] * min(at, 40)) for at in range(60)]  # it has ended after two seconds
    longer = [(at / 20, rates[0] * (at if at <= 41 else 3 * at)) for at in range(60)]  # and left it the link
    assert steady_rate([shorter, longer], 0.4, 0.8) == pytest.approx(40 * rates[0])
    assert steady_rate([[], [(0.0, 5)], [(0.0, 5), (1.0, 5)]], 0.4, 0.8) == 0.0


def _fields(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in Member.__slots__}
