"""Peer latency: every rank pings its next neighbour on each axis of the mesh during training.

A ping is a datagram of 64 bytes, signed with the run's secret; a rank that receives an authentic one of its
generation returns it with the time it held it. The kernel timestamps both arrivals, so neither the scheduler nor
Python's lock, which take milliseconds on a busy rank, are in the measured time:

    round trip = (answer arrived - ping sent) - (answer sent - ping arrived)      one clock in each bracket
"""

from __future__ import annotations

import hmac
import math
import secrets
import select
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.record.events import EventWriter
from phalanx.train.parallel.dims import ParallelDims

MAGIC = b"PHXp"
# Magic, kind, generation, from, to, nonce, nanoseconds that the other side held it; then the HMAC, cut to 16 bytes.
BODY = struct.Struct("!4sBQII16sQ3x")
MAC_BYTES = 16
PING, PONG = 0, 1
PACKET_BYTES = BODY.size + MAC_BYTES
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python does not define it
_TIMESPEC = struct.Struct("@qq")
PINGS = 30  # to each peer between two events
VOLLEY = 3  # pings sent together: waking a thread costs more than sending
LEAST_PAUSE_S = 0.1
LOST_S = 10.0  # seconds without an answer
BURST = 64  # datagrams received at a time
# Pause after a burst with unauthentic datagrams, which limits them to 1,280 per second
PENANCE_S = 0.05
# Seconds that the end of a membership waits for the thread, which a hanging store may block
LEAVE_S = 0.5
FIND_S = 60.0  # seconds for a neighbour to publish its address
AXES = ("tensor", "context", "data", "pipeline")


class Directory(Protocol):
    """Interface of the store in which ranks publish their addresses: torch's store of the membership."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist, without waiting."""

    def get(self, key: str, /) -> bytes:
        """Read an existing value."""


def ring_neighbours(rank: int, dims: ParallelDims) -> dict[str, int]:
    """Return the next rank on every axis with more than one rank, in ring order.

    >>> ring_neighbours(3, ParallelDims(pipeline=2, data=2))
    {'data': 2, 'pipeline': 1}
    """
    neighbours, stride = {}, 1
    for axis in AXES:  # fastest-varying first
        size: int = getattr(dims, axis)
        place = rank // stride % size
        if size > 1:
            neighbours[axis] = rank + ((place + 1) % size - place) * stride
        stride *= size
    return neighbours


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """The content of a ping or its answer."""

    kind: int
    generation: int
    source: int
    target: int
    nonce: bytes
    held_ns: int = 0

    def encode(self, key: bytes) -> bytes:
        """Return the signed bytes."""
        body = BODY.pack(MAGIC, self.kind, self.generation, self.source, self.target, self.nonce, self.held_ns)
        return body + _packet_mac(key, body)

    @classmethod
    def decode(cls, data: bytes, key: bytes) -> Packet | None:
        """Return the packet in authentic bytes, else None."""
        if len(data) != PACKET_BYTES or data[:4] != MAGIC:
            return None
        body, mac = data[: BODY.size], data[BODY.size :]
        if not hmac.compare_digest(mac, _packet_mac(key, body)):
            return None
        _, kind, generation, source, target, nonce, held_ns = BODY.unpack(body)
        return cls(kind=kind, generation=generation, source=source, target=target, nonce=nonce, held_ns=held_ns)


def _packet_mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")[:MAC_BYTES]


@dataclass(kw_only=True, slots=True)
class PeerPair:
    """Measurements between this rank and one neighbour since the last event."""

    peer: int
    axis: str
    where: tuple[Any, ...] | None = None
    sent_ns: dict[bytes, int] = field(default_factory=dict)  # by nonce: pings without an answer so far
    round_trips_s: list[float] = field(default_factory=list)
    lost: int = 0

    def answered(self, nonce: bytes, arrived_ns: int, held_ns: int) -> None:
        """Count an answer to one of this rank's pings, once."""
        sent_ns = self.sent_ns.pop(nonce, None)
        if sent_ns is None:
            return
        taken_s = (arrived_ns - sent_ns - held_ns) / 1e9
        # Otherwise a clock was set in between
        if 0 <= taken_s < LOST_S:
            self.round_trips_s.append(taken_s)

    def give_up(self, before_ns: int) -> None:
        """Count unanswered pings sent before `before_ns` as lost."""
        for nonce in [nonce for nonce, sent_ns in self.sent_ns.items() if sent_ns < before_ns]:
            del self.sent_ns[nonce]
            self.lost += 1

    def report(self) -> dict[str, Any]:
        """Return the measurements for JSON, and reset them; unanswered pings count in the next report."""
        times, lost = sorted(self.round_trips_s), self.lost
        self.round_trips_s, self.lost = [], 0
        p50_s, p99_s, count = round_trip_quantile(times, 0.5), round_trip_quantile(times, 0.99), len(times)
        return {"peer": self.peer, "axis": self.axis, "count": count, "p50_s": p50_s, "p99_s": p99_s, "lost": lost}


def round_trip_quantile(ordered: list[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed.

    >>> round_trip_quantile([1.0, 2.0, 3.0, 4.0], 0.5), round_trip_quantile([], 0.5)
    (2.0, None)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


class Peers:
    """Socket and thread of one rank in one membership: answers pings, sends its own, and writes `peers` events."""

    def __init__(
        self,
        events: EventWriter,
        directory: Directory,
        *,
        rank: int,
        dims: ParallelDims,
        generation: int,
        secret: bytes,
        address: str,
        every_s: float,
    ) -> None:
        self._events, self._directory, self._rank, self._generation = events, directory, rank, generation
        self._every_s, self._pause_s = every_s, max(LEAST_PAUSE_S, every_s * VOLLEY / PINGS)
        # A separate key: a ping proves nothing elsewhere
        self._key = hmac.digest(secret, b"peers", "sha256")
        self._pairs = {peer: PeerPair(peer=peer, axis=axis) for axis, peer in ring_neighbours(rank, dims).items()}
        self._sock = _open_socket(address)
        self._ours, self._wake = socket.socketpair()
        self._until_s = time.monotonic() + FIND_S
        self._closing, self._abandoned = threading.Event(), False
        self.strangers = 0  # datagrams that were not authentic
        self._thread = threading.Thread(target=self._run_thread, name="peers", daemon=True)

    def start(self) -> None:
        """Publish this rank's address, and start the thread."""
        host, port = self._sock.getsockname()[:2]
        self._directory.set(f"peers/{self._rank}", f"{port} {host}")
        self._thread.start()

    def close(self) -> None:
        """Write the last measurements, and close thread and socket; may be called twice."""
        self._closing.set()
        with suppress(OSError):
            self._wake.send(b"x")
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)
        self._abandoned = True
        for sock in (self._sock, self._ours, self._wake):
            sock.close()

    def _run_thread(self) -> None:
        try:
            self._serve_until_closed()
        # The store or the socket is gone, usually because the membership ended
        except Exception as error:
            if not self._closing.is_set():
                print(f"peers: latency is not measured any more ({error}); training goes on", file=sys.stderr)

    def _serve_until_closed(self) -> None:
        poll = select.poll()
        for sock in (self._sock, self._ours):
            poll.register(sock, select.POLLIN)
        began_s = time.monotonic()
        next_ping_s, next_event_s = began_s + self._pause_s, began_s + self._every_s
        while not self._closing.is_set():
            poll.poll(max(0.0, min(next_ping_s, next_event_s) - time.monotonic()) * 1000)
            self._take_packets()
            now_s = time.monotonic()
            if now_s >= next_ping_s:
                self._ping_peers()
                next_ping_s = now_s + self._pause_s
            if now_s >= next_event_s and not self._closing.is_set():
                self._write_report()
                next_event_s = now_s + self._every_s
        if any(pair.round_trips_s for pair in self._pairs.values()):
            self._write_report()

    def _write_report(self) -> None:
        pairs = [pair.report() for pair in self._pairs.values()]
        if not self._abandoned:
            self._events.write("peers", epoch=self._generation, pairs=pairs)

    def _ping_peers(self) -> None:
        self._find_peers()
        late_ns = time.time_ns() - int(LOST_S * 1e9)
        for pair in self._pairs.values():
            pair.give_up(late_ns)
            if pair.where is None:
                continue
            for _ in range(VOLLEY):
                nonce = secrets.token_bytes(16)
                packet = self._make_packet(PING, pair.peer, nonce).encode(self._key)
                pair.sent_ns[nonce] = time.time_ns()
                # No route, or a full buffer: counted as an answer that never comes
                with suppress(OSError):
                    self._sock.sendto(packet, pair.where)

    def _find_peers(self) -> None:
        """Look up neighbours that have published their address, without waiting: training shares the store."""
        if time.monotonic() > self._until_s:
            return
        for pair in self._pairs.values():
            key = f"peers/{pair.peer}"
            if pair.where is None and self._directory.check([key]):
                pair.where = _parse_address(self._directory.get(key).decode("ascii", "replace"))

    def _take_packets(self) -> None:
        """Answer pings and count answers, at most a burst of them; pause after unauthentic datagrams."""
        strangers = self.strangers
        for _ in range(BURST):
            try:
                data, notes, _, sender = self._sock.recvmsg(PACKET_BYTES + 1, socket.CMSG_SPACE(_TIMESPEC.size))
            except BlockingIOError:
                break
            # A port closed by a peer can appear as an error of this socket
            except OSError:
                continue
            packet = Packet.decode(data, self._key)
            if packet is None or packet.generation != self._generation or packet.target != self._rank:
                self.strangers += 1
                continue
            self._handle_packet(packet, _arrival_ns(notes), sender)
        if self.strangers > strangers:
            self._closing.wait(PENANCE_S)

    def _handle_packet(self, packet: Packet, arrived_ns: int, sender: Any) -> None:
        if packet.kind == PING:
            reply = self._make_packet(PONG, packet.source, packet.nonce, held_ns=max(0, time.time_ns() - arrived_ns))
            with suppress(OSError):
                self._sock.sendto(reply.encode(self._key), sender)
        elif packet.source in self._pairs:
            self._pairs[packet.source].answered(packet.nonce, arrived_ns, packet.held_ns)

    def _make_packet(self, kind: int, target: int, nonce: bytes, *, held_ns: int = 0) -> Packet:
        return Packet(
            kind=kind, generation=self._generation, source=self._rank, target=target, nonce=nonce, held_ns=held_ns
        )


def _open_socket(address: str) -> socket.socket:
    """Open a socket on this rank's address only, with kernel timestamps of arriving datagrams."""
    family, _, _, _, local_address = socket.getaddrinfo(address or "127.0.0.1", 0, type=socket.SOCK_DGRAM)[0]
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.bind(local_address)
    sock.setblocking(False)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return sock


def _arrival_ns(notes: list[tuple[int, int, bytes]]) -> int:
    """Return when the kernel received a datagram, in ns of Unix time; without a timestamp, the present time."""
    for level, kind, data in notes:
        if (level, kind, len(data)) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS, _TIMESPEC.size):
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return int(seconds) * 10**9 + int(nanoseconds)
    return time.time_ns()


def _parse_address(text: str) -> tuple[Any, ...] | None:
    """Parse an address from the store for a socket; None if it is invalid."""
    port, _, host = text.partition(" ")
    if not port.isdigit() or not 0 < int(port) < 65536:
        return None
    try:
        return socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0][4]
    except OSError:
        return None
