"""How fast a member's link is, measured with the others while nobody sends values: shares of a round follow from it.

The leader gives one member a turn before a round begins. That member sends bytes to all others and has them send it
bytes, at once and over the connections that carry values, as in a round, for a second or two. What its connections have
moved meanwhile the kernel counts: neither a processor that is busy elsewhere nor blocks that are read late and all at
once make a link look slower or faster. The sum over the others is what its link carries in this group: more than the
others can take is of no use to it. A speed that the owner of a peer stated is not measured.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.peers import messages as say
from phalanx.peers.facts import Bandwidth
from phalanx.peers.frames import PeerConnection
from phalanx.peers.messages import MOST_SPEED_S, PeerMessage

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

BLOCK_BYTES = 16 * 1024
MOST_BYTES = 8 * 2**20  # for each of the others and each way; faster links are known before their time is over
BEGIN_S, BEGIN_TRIPS = 0.4, 8  # that are left out: TCP begins slowly, and bytes of the turn before may be on their way
WINDOW_S, WINDOW_TRIPS = 0.8, 8  # the best of these counts: a pause of a machine or of TCP is not the link's
WINDOWS = 2.5  # that a turn lasts
LEAST_AHEAD_BYTES, AHEAD_S = 128 * 1024, 0.4  # that may wait for a link: the larger of both
EVERY_S = 0.05  # between two looks at the counters
CONNECT_S = 2.0
MOST_S = 8.0  # of one turn; whoever has not answered by then is left out
MOST_ASKED = 2  # times that a member is answered in so many seconds: nobody needs more than one turn
MOST_OTHERS = 8
MBIT = 125_000.0  # bytes
Sample = tuple[float, int]  # when, and bytes until then


class LinkSpeed:
    """Of one member: what it measured of its own link, and what others measured with it."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.measured_mbps: tuple[float, float] | None = None  # up and down, of this member
        self.measured: set[str] = set()  # members whose speed in the view was measured, not stated
        self._asked_at: dict[str, list[float]] = {}
        self._is_measuring = False

    def on_heartbeat(self, peer: str, mbps: tuple[float, float] | None) -> None:
        """A member says what it measured; the view has it from then on."""
        if mbps is None or not all(0.0 < one < 1e9 for one in mbps):
            return
        node, link = self._node, Bandwidth(up_mbps=mbps[0], down_mbps=mbps[1])
        member = node.view.member(peer)
        if member is None or member.bandwidth == link or (member.bandwidth is not None and peer not in self.measured):
            return
        self.measured.add(peer)
        members = tuple(replace(one, bandwidth=link) if one.id == peer else one for one in node.view.members)
        node.view = replace(node.view, members=members)
        node.tell("measured", f"its link carries {mbps[0]:g} Mbit/s up and {mbps[1]:g} down", peer=peer)
        node.leader.on_measured(peer)

    def on_message(self, peer: str, message: PeerMessage) -> None:
        """A turn from the leader, or a member whose turn it is."""
        node = self._node
        if isinstance(message, say.SpeedTurn) and peer == node.view.leader:
            self.take_turn()
        elif isinstance(message, say.SpeedRequest) and self._may_ask(peer):
            node.spawn(self._send(peer, message.seconds))

    def take_turn(self) -> None:
        """Measure now, unless the speed was stated or a turn is under way."""
        if self._node.settings.bandwidth is None and not self._is_measuring:
            self._is_measuring = True
            self._node.spawn(self._measure())

    async def _measure(self) -> None:
        node = self._node
        others = await self._links()
        trip_s = 2 * max((node.latency_s.get(peer, 0.0) for peer in others), default=0.0)
        begin_s, window_s = max(BEGIN_S, BEGIN_TRIPS * trip_s), max(WINDOW_S, WINDOW_TRIPS * trip_s)
        lasts_s = min(MOST_SPEED_S, begin_s + WINDOWS * window_s)
        up: list[list[Sample]] = [[] for _ in others]
        down: list[list[Sample]] = [[] for _ in others]
        try:
            for peer in others:
                node.links.post(peer, say.SpeedRequest(seconds=lasts_s))
            sending = [node.spawn(self._send(peer, lasts_s)) for peer in others]
            ends = time.monotonic() + lasts_s
            while (now := time.monotonic()) < ends and others and not _is_over(up, down):
                for link, sent, received in zip(others.values(), up, down, strict=True):
                    moved = link.moved_bytes()
                    sent.append((now, moved[0]))
                    received.append((now, moved[1]))
                await asyncio.sleep(EVERY_S)
            await asyncio.gather(*sending, return_exceptions=True)
        finally:
            self._is_measuring = False
        speeds = [steady_rate(streams, begin_s, window_s) for streams in (up, down)]
        if min(speeds) > 0.0:
            self.measured_mbps = (_three_digits(speeds[0] / MBIT), _three_digits(speeds[1] / MBIT))
            self.on_heartbeat(node.me, self.measured_mbps)
            node.send_heartbeats()

    async def _links(self) -> dict[str, PeerConnection]:
        """To the members to measure with, which may not be connected yet: without one a link looks slower."""
        node, others = self._node, [peer for peer in self._node.view.ids if peer != self._node.me][:MOST_OTHERS]
        waits = (node.links.data_link(peer, CONNECT_S) for peer in others)
        found = await asyncio.gather(*waits, return_exceptions=True)
        return {peer: link for peer, link in zip(others, found, strict=True) if isinstance(link, PeerConnection)}

    async def _send(self, peer: str, seconds: float) -> None:
        """Bytes for so long; those that wait are few when it is over, for they are in the way of the next turn.

        Nearly half a second's worth may wait, so that a link does not wait for a processor that is busy elsewhere.
        """
        began, sent = time.monotonic(), 0
        try:
            link = await self._node.links.data_link(peer, 1.0)
            before = link.moved_bytes()[0]
            while sent < MOST_BYTES and (passed_s := time.monotonic() - began) < seconds:
                moved = link.moved_bytes()[0] - before
                if sent - moved > max(LEAST_AHEAD_BYTES, AHEAD_S * moved / max(passed_s, EVERY_S)):
                    await asyncio.sleep(AHEAD_S / 40)
                    continue
                async with asyncio.timeout(seconds):
                    await link.send(say.SpeedBlock(), bytes(BLOCK_BYTES))
                sent += BLOCK_BYTES
        except (OSError, TimeoutError):
            return  # the turn ends without this member

    def _may_ask(self, peer: str) -> bool:
        now = time.monotonic()
        recent = [at for at in self._asked_at.get(peer, []) if now - at < MOST_S]
        self._asked_at[peer] = [*recent, now][-8:]
        return len(recent) < MOST_ASKED


def steady_rate(streams: Sequence[Sequence[Sample]], begin_s: float, window_s: float) -> float:
    """Bytes a second of several streams together, looked at at the same times: the best window after the beginning.

    Streams end when all of their bytes have come. From the first end on others would have the link for themselves,
    so nothing after it counts. Where that leaves no whole window, all that was seen is one.

    >>> even = [(at / 10, 100 * at) for at in range(30)]
    >>> round(steady_rate([even, even], 0.4, 0.8)), round(steady_rate([even[:5], even], 0.4, 0.8))
    (2000, 2000)
    """
    flowing = [one for one in streams if len(one) > 1 and one[-1][1] > one[0][1]]
    if not flowing:
        return 0.0
    least = min(map(len, flowing))
    ends = min(max(at for at in range(1, least) if one[at][1] > one[at - 1][1] or at == 1) for one in flowing)
    times = [at for at, _ in flowing[0][: ends + 1]]
    total = [sum(one[at][1] for one in flowing) for at in range(ends + 1)]
    first = next((place for place, at in enumerate(times) if at - times[0] >= begin_s), ends)
    best, start = 0.0, first
    for place in range(first, ends + 1):
        while start + 1 < place and times[place] - times[start + 1] >= window_s:
            start += 1
        if times[place] - times[start] >= window_s:
            best = max(best, (total[place] - total[start]) / (times[place] - times[start]))
    return best or (total[-1] - total[0]) / max(1e-4, times[-1] - times[0])


def _is_over(up: list[list[Sample]], down: list[list[Sample]]) -> bool:
    """Whether a stream has moved all that it may."""
    return any(one and one[-1][1] - one[0][1] >= MOST_BYTES for one in itertools.chain(up, down))


def _three_digits(value: float) -> float:
    return round(value, 2 - math.floor(math.log10(value))) if value > 0.0 else 0.0
