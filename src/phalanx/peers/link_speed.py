"""Measurement of a member's link speed with the other members before a round; shares of the round follow from it.

The leader gives one member a turn. That member sends bytes to all others and has them send bytes to it, at the same
time and over the connections that carry values in a round, for a second or two. The bytes moved are counted by the
kernel, so that neither a busy processor nor blocks that are read late and all at once change the result. The sum over
the others is what the link carries in this group; more than the others can take is useless to it. A link whose speed
its owner stated is not measured. See decisions 0051 and 0056.
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
# Per other member and direction; on fast links the measurement ends early.
MOST_BYTES = 8 * 2**20
# Start of a measurement that is left out, in seconds and round trips: TCP starts slowly, and bytes of the previous
# turn may still be under way.
BEGIN_S, BEGIN_TRIPS = 0.4, 8
# The best window counts: a pause of a machine or of TCP is not a property of the link.
WINDOW_S, WINDOW_TRIPS = 0.8, 8
WINDOWS = 2.5  # length of a measurement after its start, in windows
# Bytes that may wait for a link: the larger of the two.
LEAST_AHEAD_BYTES, AHEAD_S = 128 * 1024, 0.4
EVERY_S = 0.05  # between two readings of the counters
CONNECT_S = 2.0
MOST_S = 8.0  # of one turn; the round does not wait longer for it
# Requests of a member that are answered within MOST_S seconds; one turn needs one.
MOST_ASKED = 2
MOST_OTHERS = 8  # members that a link is measured with
MBIT = 125_000.0  # bytes in a megabit
Sample = tuple[float, int]  # time in seconds, and bytes moved until then


class LinkSpeed:
    """One member's measurements of its own link, and its part in the measurements of others."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.measured_mbps: tuple[float, float] | None = None  # up and down, of this member
        # Members whose speed in the view was measured, not stated.
        self.measured: set[str] = set()
        self._asked_at: dict[str, list[float]] = {}
        self._is_measuring = False

    def on_heartbeat(self, peer: str, mbps: tuple[float, float] | None) -> None:
        """Enter the speed that a member measured into the view, unless that member's owner stated one."""
        if mbps is None or not all(0.0 < rate < 1e9 for rate in mbps):
            return
        node, link = self._node, Bandwidth(up_mbps=mbps[0], down_mbps=mbps[1])
        member = node.view.member(peer)
        if member is None or member.bandwidth == link or (member.bandwidth is not None and peer not in self.measured):
            return
        self.measured.add(peer)
        members = tuple(
            replace(other_member, bandwidth=link) if other_member.id == peer else other_member
            for other_member in node.view.members
        )
        node.view = replace(node.view, members=members)
        node.tell("measured", f"its link carries {mbps[0]:g} Mbit/s up and {mbps[1]:g} down", peer=peer)
        node.leader.on_measured(peer)

    def on_message(self, peer: str, message: PeerMessage) -> None:
        """Handle a turn from the leader, or a request from the member whose turn it is."""
        node = self._node
        if isinstance(message, say.SpeedTurn) and peer == node.view.leader:
            self.take_turn()
        elif isinstance(message, say.SpeedRequest) and self._may_ask(peer):
            node.spawn(self._send(peer, message.seconds))

    def take_turn(self) -> None:
        """Start a measurement, unless this link's speed was stated or a measurement is under way."""
        if self._node.settings.bandwidth is None and not self._is_measuring:
            self._is_measuring = True
            self._node.spawn(self._measure())

    async def _measure(self) -> None:
        """Exchange bytes with up to `MOST_OTHERS` members at once, and publish the rates in both directions."""
        node = self._node
        links = await self._links()
        trip_s = 2 * max((node.latency_s.get(peer, 0.0) for peer in links), default=0.0)
        begin_s, window_s = max(BEGIN_S, BEGIN_TRIPS * trip_s), max(WINDOW_S, WINDOW_TRIPS * trip_s)
        lasts_s = min(MOST_SPEED_S, begin_s + WINDOWS * window_s)
        up: list[list[Sample]] = [[] for _ in links]
        down: list[list[Sample]] = [[] for _ in links]
        try:
            for peer in links:
                node.links.post(peer, say.SpeedRequest(seconds=lasts_s))
            sending = [node.spawn(self._send(peer, lasts_s)) for peer in links]
            ends = time.monotonic() + lasts_s
            while (now := time.monotonic()) < ends and links and not _is_over(up, down):
                for link, sent, received in zip(links.values(), up, down, strict=True):
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
        """Wait for connections to the members to measure with; with fewer of them the link would look slower."""
        node, peers = self._node, [peer for peer in self._node.view.ids if peer != self._node.me][:MOST_OTHERS]
        waits = (node.links.data_link(peer, CONNECT_S) for peer in peers)
        results = await asyncio.gather(*waits, return_exceptions=True)
        return {peer: link for peer, link in zip(peers, results, strict=True) if isinstance(link, PeerConnection)}

    async def _send(self, peer: str, seconds: float) -> None:
        """Send bytes to a peer for `seconds`, with at most `AHEAD_S` seconds' worth waiting for the link.

        So few bytes are left when the turn is over, which would delay the next turn, and the link still does not have
        to wait for a processor that is busy elsewhere.
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
        """Return True if a peer has made fewer than `MOST_ASKED` requests in the last `MOST_S` seconds."""
        now = time.monotonic()
        recent = [at for at in self._asked_at.get(peer, []) if now - at < MOST_S]
        self._asked_at[peer] = [*recent, now][-8:]
        return len(recent) < MOST_ASKED


def steady_rate(streams: Sequence[Sequence[Sample]], begin_s: float, window_s: float) -> float:
    """Return the bytes per second of several streams together, sampled at the same times: the best window's rate.

    The first `begin_s` seconds are left out. A stream ends when all of its bytes have come; from the first end on the
    remaining streams would share the link between fewer, so nothing after it counts. If no full window is left, the
    whole time until then is the window.

    >>> even = [(at / 10, 100 * at) for at in range(30)]
    >>> round(steady_rate([even, even], 0.4, 0.8)), round(steady_rate([even[:5], even], 0.4, 0.8))
    (2000, 2000)
    """
    flowing = [stream for stream in streams if len(stream) > 1 and stream[-1][1] > stream[0][1]]
    if not flowing:
        return 0.0
    least = min(map(len, flowing))
    # Index of the last sample at which all streams still moved bytes.
    ends = min(max(at for at in range(1, least) if stream[at][1] > stream[at - 1][1] or at == 1) for stream in flowing)
    times = [at for at, _ in flowing[0][: ends + 1]]
    total = [sum(stream[at][1] for stream in flowing) for at in range(ends + 1)]
    first = next((place for place, at in enumerate(times) if at - times[0] >= begin_s), ends)
    best, start = 0.0, first
    for place in range(first, ends + 1):
        while start + 1 < place and times[place] - times[start + 1] >= window_s:
            start += 1
        if times[place] - times[start] >= window_s:
            best = max(best, (total[place] - total[start]) / (times[place] - times[start]))
    return best or (total[-1] - total[0]) / max(1e-4, times[-1] - times[0])


def _is_over(up: list[list[Sample]], down: list[list[Sample]]) -> bool:
    """Return True if a stream has moved all the bytes that it may."""
    return any(stream and stream[-1][1] - stream[0][1] >= MOST_BYTES for stream in itertools.chain(up, down))


def _three_digits(value: float) -> float:
    return round(value, 2 - math.floor(math.log10(value))) if value > 0.0 else 0.0
