"""The time that peers on slow links take to average one vector: shares by bandwidth, rounds of messages, loss.

Every peer averages a share of the vector for all, and moves P · (1 + (n - 2) · share) bytes each way for a vector of P
bytes among n peers (network/slow_shares.py, which the peers use as well); with topk-2bit every peer gets what all
others sent. Pure arithmetic: the planner, the simulator and the rules use the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.hardware.types import Site
from phalanx.network.slow_codecs import GATHERED_CODECS, copies_per_share
from phalanx.network.slow_shares import water_filling

# Of the bytes on an Ethernet link, the share that TCP delivers: 1,448 of a 1,514-byte frame (timestamps on), and while
# data flows both ways a 66-byte acknowledgement for every second segment of the other direction. TLS adds 22 bytes to
# every 16,384.
SEGMENT_BYTES, FRAME_BYTES, ACK_BYTES = 1448, 1514, 66
PAYLOAD_SHARE = SEGMENT_BYTES / (FRAME_BYTES + ACK_BYTES / 2) * 16384 / (16384 + 22)
# Besides the values, a member sends to each other member in a round: ready, norms and digest (or begin and commit),
# the headers of its pieces, TLS records, and packets and acknowledgements for all these: 450 bytes and six packets.
# Every half second it sends a heartbeat of 160 bytes and acknowledges that of the peer (counted on 18 November 2026).
MESSAGE_BYTES, HEARTBEAT_BYTES = 450 + 6 * ACK_BYTES, 160 + 2 * ACK_BYTES
# Mathis, Semke, Mahdavi and Ott, "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", ACM CCR 27(3),
# 1997: rate = MSS / RTT · C / sqrt(p), with C = sqrt(3/2) where every segment grows the window, as Linux' byte
# counting does (RFC 3465). CUBIC keeps to the same rate where its own would be lower (RFC 9438, section 4.3), as it is
# at these rates. BBR does not react to loss, and keeps its rate over idle times (Cardwell et al., ACM Queue 14(5),
# 2016).
MATHIS_C = math.sqrt(3 / 2)
# RFC 6928; Linux returns to it after an idle second, as between exchanges.
INITIAL_WINDOW_BYTES = 10 * SEGMENT_BYTES
# Peers sum and send back in pieces of this size (peers/attempt.py); the last piece overlaps with nothing.
PIECE_BYTES = 32 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLink:
    """A peer's connection to the others: bytes per second in each direction at once, round trip, loss."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    loss: float = 0.0
    client_only: bool = False
    congestion: str = "cubic"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowExchange:
    """One average of a vector among all peers; the three parts add up to `seconds`."""

    seconds: float
    transfer_s: float  # bytes over bandwidth
    latency_s: float  # rounds of messages, slow start after idle times, packets sent again, the last piece
    codec_s: float  # encoding, summing and decoding
    shares: tuple[float, ...]  # of the vector, averaged by each peer
    bytes_sent: tuple[float, ...]  # by each peer; in total as many are received
    wire_bytes: tuple[float, ...]  # the same with all headers, acknowledgements and messages; without heartbeats
    slowest: str  # the peer that the others wait for
    limited_by: str  # "bandwidth", "packet loss" or "latency": the largest part


def peer_link(site: Site) -> PeerLink:
    """Return the link of a site."""
    return PeerLink(
        name=site.name,
        bytes_per_s=site.bytes_per_s,
        latency_s=site.latency_s,
        loss=site.loss,
        client_only=site.client_only,
        congestion=site.congestion,
    )


def connection_rate(latency_s: float, loss: float) -> float:
    """Return the bytes per second of one TCP connection on a path with loss, however fast the path (Mathis et al.).

    >>> round(connection_rate(0.1, 0.01) * 8 / 1e6, 2)  # Mbit/s
    1.42
    """
    if loss <= 0 or latency_s <= 0:
        return math.inf
    return SEGMENT_BYTES / latency_s * MATHIS_C / math.sqrt(loss)


def _path_loss(link: PeerLink, other: PeerLink) -> float:
    """Return the loss that slows TCP down between two peers: 0 only if both use BBR, because both of them send."""
    return 0.0 if link.congestion == other.congestion == "bbr" else max(link.loss, other.loss)


def slow_start_s(rate: float, latency_s: float, size_bytes: float) -> float:
    """Return the seconds an idle connection loses until its window, which doubles every round trip, fills the link."""
    window = min(rate * latency_s, size_bytes)
    if window <= INITIAL_WINDOW_BYTES:
        return 0.0
    return max(0.0, math.log2(window / INITIAL_WINDOW_BYTES)) * latency_s


def resend_s(rate: float, latency_s: float, loss: float, size_bytes: float) -> float:
    """Return the seconds that lost packets add to a leg in which both sides send `size_bytes`.

    Each lost packet is sent again a round trip later. Packets lost before the last round trip arrive while others are
    still sent. Losses in the last one are treated as random over its time (Poisson), and the latest of them counts.

    >>> round(resend_s(2.5e6, 0.1, 0.01, 354e3), 3), resend_s(2.5e6, 0.1, 0.0, 354e3)
    (0.072, 0.0)
    """
    lost_packets = 2 * loss * min(rate * latency_s, size_bytes) / SEGMENT_BYTES
    return latency_s * (1 + math.expm1(-lost_packets) / lost_packets) if lost_packets > 0 else 0.0


def exchange_time(
    links: Sequence[PeerLink],
    payload_bytes: float,
    *,
    round_trips: float,
    values: float = 0.0,
    values_per_s: float = math.inf,
    equal_shares: bool = False,
    codec: str = "fp32",
) -> SlowExchange:
    """Predict one average of `payload_bytes` (encoded, of each peer) among these peers.

    `round_trips` are the messages that wait for each other; `values` numbers are encoded and decoded at
    `values_per_s`. `equal_shares` is for comparison; a gathered `codec` always has them.
    """
    count = len(links)
    rates, loss_limited = [], []
    for index, link in enumerate(links):
        paths = [
            connection_rate(max(link.latency_s, peer.latency_s), _path_loss(link, peer))
            for place, peer in enumerate(links)
            if place != index
        ]
        link_rate = link.bytes_per_s * PAYLOAD_SHARE
        rates.append(min(link_rate, sum(paths)))
        loss_limited.append(sum(paths) < link_rate)
    are_owners = [not link.client_only for link in links]
    is_gathered = codec in GATHERED_CODECS
    if equal_shares or is_gathered:
        shares: tuple[float, ...] = tuple(is_owner / sum(are_owners) for is_owner in are_owners)
    else:
        shares = tuple(water_filling(rates, [not is_owner for is_owner in are_owners]))
    sent_bytes = tuple(payload_bytes * (1 + copies_per_share(codec, count) * share) for share in shares)
    # otherwise a peer receives as many bytes as it sends
    received_bytes = payload_bytes * (count - 1) if is_gathered else 0.0
    times = [max(size, received_bytes) / rate for size, rate in zip(sent_bytes, rates, strict=True)]
    slowest = max(range(count), key=times.__getitem__)
    trip_s = max(link.latency_s for link in links)
    start_s = 0.0
    if links[slowest].congestion != "bbr":
        start_s = slow_start_s(rates[slowest], trip_s, sent_bytes[slowest] / max(1, count - 1))
    else:  # a rate that follows from loss already includes this
        legs = 2 if count > 2 else 1
        start_s = legs * resend_s(rates[slowest], trip_s, max(link.loss for link in links), sent_bytes[slowest] / legs)
    # The last piece of a share is summed and sent back after everything else has been moved; two peers send none back.
    piece_s = min(PIECE_BYTES, max(shares) * payload_bytes) / rates[slowest] if count > 2 else 0.0
    latency_s = round_trips * trip_s + start_s + piece_s
    if count == 2:  # values are sent with the first message, while the plan travels
        latency_s -= min(trip_s, times[slowest])
    codec_s = values / values_per_s
    parts = {
        "packet loss" if loss_limited[slowest] else "bandwidth": times[slowest],
        "latency": latency_s,
        "encoding": codec_s,
    }
    return SlowExchange(
        seconds=times[slowest] + latency_s + codec_s,
        transfer_s=times[slowest],
        latency_s=latency_s,
        codec_s=codec_s,
        shares=shares,
        bytes_sent=sent_bytes,
        wire_bytes=tuple(size / PAYLOAD_SHARE + (count - 1) * MESSAGE_BYTES for size in sent_bytes),
        slowest=links[slowest].name,
        limited_by=max(parts, key=parts.__getitem__),
    )
