"""Links are measured in the run: shares follow from what they carry, without anybody stating it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from crew import Crew, together
from relay import Address, Relay

from phalanx.network.slow_shares import water_filling
from phalanx.peers import messages as say
from phalanx.peers.facts import Bandwidth, Member, MemberView, RoundResult
from phalanx.peers.group import PeerGroup
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
        assert shares[2] < min(shares[:2])
        assert np.allclose(shares, water_filling(speeds), atol=0.1)
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
        speed=SimpleNamespace(measured=set()),
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
    node.speed.measured = set(ids[1:])
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


def _fields(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in Member.__slots__}
