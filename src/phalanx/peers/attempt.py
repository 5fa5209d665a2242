"""One attempt at a round as one member holds it: segments of updates come in, means go out; bytes only, no sockets.

A vector is divided into segments. The owner of a segment sums it as soon as every update's values of it have arrived,
and sends the mean to all at once, so that links carry both directions at the same time. All members decode the same
encoded means, so their results are equal to the last bit. With a gathered codec (topk-2bit), and between two peers,
the "mean" consists of all updates' bytes as they arrived, concatenated in the order of ids; a member is sent those of
the others, and inserts its own.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.network.slow_codecs import CUT_VALUES, GATHERED_CODECS, encoded_bytes
from phalanx.peers.aggregation import AGGREGATIONS, aggregate, mean_factors
from phalanx.peers.codecs import BadBytes, Sender, decode, encode
from phalanx.peers.facts import MemberView, RoundResult, Vector
from phalanx.peers.harm_causes import SKETCH_VALUES, sketch_of
from phalanx.peers.messages import MOST_SEGMENT_VALUES, RoundPlan
from phalanx.peers.node_settings import MOST_VALUES

# A fortieth of a second at 10 Mbit/s, so that the mean of a segment is complete soon after its first bytes.
SEGMENT_BYTES = 32 * 1024
# Between two peers, where no sum waits for a segment: fewer headers and TLS records.
DIRECT_SEGMENT_BYTES = 128 * 1024
MOST_NAMED = 4096  # peers in a plan, also of a round of an earlier view
# Allowed ratio of measured to stated norm: a codec changes the norm a little (2-bit values by up to a tenth).
NORM_TOLERANCE = 1.5


class BadUpdate(Exception):
    """Values from a peer cannot be summed."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason


@dataclass(slots=True)
class PendingAverage:
    """A call of `average` that waits for its round."""

    round_number: int
    outgoing: Vector
    kind: np.dtype[Any]
    weight: float
    sender: Sender
    timeout_s: float
    quorum: int
    grace_s: float
    future: asyncio.Future[RoundResult]
    began: float
    call: int
    weight_limits: Mapping[str, float] | None = None
    bytes_sent: int = 0
    bytes_received: int = 0


def sum_of_squares(values: Vector) -> float:
    """Return the sum of squares in float64; not finite if a value is not, or is too large.

    Computed without BLAS, whose threads wait for each other: 41 ms instead of 0.05 ms for one segment of int8 on two
    busy cores.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(values, dtype=np.float64).sum())


def segment_values(codec: str, top_share: float, *, is_direct: bool = False) -> int:
    """Return the number of values in a segment: about `SEGMENT_BYTES`, and a multiple of every codec's block.

    >>> segment_values("fp32", 0.03), segment_values("topk-2bit", 0.03), segment_values("fp32", 0.03, is_direct=True)
    (8192, 929792, 32768)
    """
    chunks = (DIRECT_SEGMENT_BYTES if is_direct else SEGMENT_BYTES) // max(
        1, encoded_bytes(codec, CUT_VALUES, top_share)
    )
    return min(MOST_SEGMENT_VALUES, max(1, chunks) * CUT_VALUES)


def check_plan(plan: RoundPlan, view: MemberView | None, *, most_values: int = MOST_VALUES) -> str:
    """Return what is wrong with a received plan, or "".

    `view` is None for a plan of an earlier view's round. No vector of the run has more than `most_values` values.
    """
    if plan.values > most_values:
        return f"it is of {plan.values:,} values, and no vector of this run has more than {most_values:,}"
    named = {*plan.owners, *plan.weights, *plan.dropped, *plan.paces, *plan.present, *plan.capped}
    if view is not None and not named <= set(view.ids):
        return "it names peers that are not in the view"
    if set(plan.weights) != set(plan.norms):
        return "it lacks norms"
    if plan.gathered and not plan.judged:
        return "it keeps contributions apart, and no member judges them"
    # A round in which no member has a weight still needs members that are present, and has no values.
    is_counted = min(plan.weights.values()) > 0.0 if plan.weights else bool(plan.present) and plan.values == 0
    if plan.segment % CUT_VALUES or len(named) > MOST_NAMED or not is_counted or set(plan.present) & set(plan.weights):
        return "its sizes or weights are impossible"
    if plan.aggregation not in AGGREGATIONS:
        return f"its aggregation is none of {', '.join(AGGREGATIONS)}"
    at = 0
    for begin, end in sorted(plan.owners.values()):
        if begin != at or end < begin or (end % CUT_VALUES and end != plan.values):
            return "its shares do not make up the vector"
        at = end
    try:
        encoded_bytes(plan.codec, 1, plan.top_share)
    except ValueError as error:
        return str(error)
    return "" if at == plan.values else "its shares do not make up the vector"


def check_derived(plan: RoundPlan, *, aggregation: str, weight_limits: Mapping[str, float] | None) -> str:
    """Return how a plan differs from values that every member derives itself, or "": a leader may lie too."""
    if plan.weights and plan.aggregation != aggregation:
        return f'its aggregation is "{plan.aggregation}", here it is "{aggregation}"'
    for peer, weight in plan.weights.items() if weight_limits is not None else ():
        if weight_limits is not None and weight > (dealt := weight_limits.get(peer, 0.0)):
            return f"it gives {peer} a weight of {weight:.6g}, and {dealt:.6g} was dealt"
    return ""


def has_same_layout(plan: RoundPlan, other: RoundPlan) -> bool:
    """Return True if both plans move the same values between the same members in the same attempt."""

    def layout(one: RoundPlan) -> tuple[object, ...]:
        return one.key, one.values, one.codec, one.top_share, one.segment, set(one.weights), one.owners, one.gathered

    return layout(plan) == layout(other)


class Attempt:
    """A member's data of one attempt. `outgoing` is the member's own update, None if it adds none."""

    def __init__(
        self,
        plan: RoundPlan,
        me: str,
        *,
        outgoing: Vector | None = None,
        sender: Sender | None = None,
        screen: Callable[[str, Vector], str | None] | None = None,
    ) -> None:
        self.plan, self.me = plan, me
        self.outgoing = outgoing if me in plan.weights else None
        self.commit_digest = ""  # digest of the committed result, once the commit is known
        self.bytes_sent = self.bytes_received = 0
        self.screening = asyncio.Lock()
        self.squares = dict.fromkeys(plan.weights, 0.0)
        # Sketches of this member's share of each update.
        self.sketches = dict.fromkeys(plan.weights, np.zeros(SKETCH_VALUES))
        self._sender, self._screen = sender, screen
        # No memory is reserved per segment before its first bytes arrive: a small plan can announce a huge vector.
        self._shares = sorted((begin, end, owner) for owner, (begin, end) in plan.owners.items() if begin < end)
        self._means: dict[int, bytes] = {}
        # Values of this member's share, by start of segment and peer.
        self._pieces: dict[int, dict[str, Vector]] = {}
        self._own_segments = self.segments_of(me)
        self._own_missing = len(self._own_segments)
        self._missing = self._segment_count()
        self._counted = sorted(plan.weights)
        self._factors = mean_factors(plan.aggregation, plan.weights, plan.norms) if plan.weights else {}
        # With two peers, exchanging the updates moves as many bytes as exchanging sums: so each sends the other its
        # values, nothing is rounded a second time, and no segment waits for another.
        self._gathers = (
            plan.gathered
            or plan.codec in GATHERED_CODECS
            or (len(plan.weights) == 2 and set(plan.owners) <= set(plan.weights))
        )
        self.is_judging = False  # this member evaluates the result and has not reported it yet
        self._own: dict[int, bytes] = {}
        # Encoded values that are gathered, by start of segment and peer.
        self._encoded: dict[int, dict[str, bytes]] = {}
        carries = sender is not None and sender.carries and self.outgoing is not None
        self._lost = np.array(self.outgoing, copy=True) if carries else None
        self._lost_sums = np.zeros_like(self._lost) if self._lost is not None else None

    @property
    def has_screen(self) -> bool:
        """True if updates are screened: taking the last piece may then be slow, as the loss may be evaluated."""
        return self._screen is not None

    def segments_of(self, owner: str) -> range:
        """Return the starts of an owner's segments, in order."""
        begin, end = self.plan.owners.get(owner, (0, 0))
        return range(begin, end, self.plan.segment)

    def encode_piece(self, start: int) -> bytes:
        """Return the encoded values of this member's update in a segment; the same bytes at every call."""
        assert self.outgoing is not None
        if start in self._own:
            return self._own[start]
        end = self._end(start)
        values = self.outgoing[start:end]
        data = encode(self.plan.codec, values, self.plan.top_share)
        if self._lost is not None:
            self._lost[start:end] -= self._decode(start, data)
        if self._gathers:
            self._own[start] = data
        return data

    def take_own_pieces(self) -> Iterator[tuple[int, bytes]]:
        """Add this member's update to its own share; yields the means that this completes, with their starts."""
        if self.outgoing is not None:
            for start in self.segments_of(self.me):
                yield from self.take_piece(self.me, start, self.encode_piece(start))

    def take_piece(self, peer: str, start: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add a peer's values of a segment that this member owns; yields the means that this completes.

        Raises BadUpdate for values that cannot be summed.
        """
        pieces = self._pieces.get(start, {})
        is_wanted = start in self._own_segments and start not in self._means
        if not is_wanted or peer not in self.plan.weights or peer in pieces:
            raise BadUpdate(peer, "it sent values that nobody asked it for")
        try:
            values = self._decode(start, data)
        except BadBytes as error:
            raise BadUpdate(peer, f"it sent bytes that are no {self.plan.codec} vector: {error}") from error
        square = sum_of_squares(values)
        self.squares[peer] += square
        if self.plan.judged:
            self.sketches[peer] = self.sketches[peer] + sketch_of(values, start)
        if not math.isfinite(square):
            raise BadUpdate(peer, "its update is not finite (NaN or infinity)")
        if self.squares[peer] > (NORM_TOLERANCE * self.plan.norms[peer]) ** 2 + 1e-30:
            raise BadUpdate(peer, f"its update has a larger norm than the {self.plan.norms[peer]:.3g} that it stated")
        self._pieces.setdefault(start, pieces)[peer] = values
        if self._gathers:
            self._encoded.setdefault(start, {})[peer] = data
        if len(pieces) < len(self.plan.weights):
            return
        if self._screen is None:
            yield start, self._sum(start, pieces)
        elif len(self._pieces) == len(self._own_segments) and all(
            len(segment_pieces) == len(self.plan.weights) for segment_pieces in self._pieces.values()
        ):
            # The screen takes complete shares, so nothing is summed before the last piece.
            self._check_screen(self._screen)
            for place, place_pieces in self._pieces.items():
                yield place, self._sum(place, place_pieces)

    def take_mean(self, peer: str, start: int, data: bytes) -> bool:
        """Store the mean of a segment from its owner; return True if that completes the result.

        The mean of a committed attempt may come from any member, because the digest shows if it is right.
        """
        owner = self._owner_of(start)
        if not owner or start in self._means or (peer != owner and not self.commit_digest):
            return False
        received = len(data)
        size = encoded_bytes(self.plan.codec, self._end(start) - start, self.plan.top_share)
        if self._gathers and received == size * (len(self._counted) - 1) and self.outgoing is not None:
            at = size * self._counted.index(self.me)
            data = b"".join((data[:at], self.encode_piece(start), data[at:]))
        if len(data) != size * (len(self._counted) if self._gathers else 1):
            return False
        self._keep(start, data)
        self.bytes_received += received
        return self.is_whole

    def adopt(self, plan: RoundPlan) -> bool:
        """Take over the leader's plan if the values sent before it was known match it; return True if they do."""
        if not has_same_layout(self.plan, plan):
            return False
        self.plan = plan
        self._factors = mean_factors(plan.aggregation, plan.weights, plan.norms)
        return True

    def is_direct(self, peer: str) -> bool:
        """Return True if a peer is sent this member's own values as the mean, which wait for no other peer."""
        return self._gathers and self.outgoing is not None and {self.me, peer} == set(self.plan.weights)

    def mean_for(self, peer: str, start: int) -> bytes:
        """Return the bytes of a completed segment for a member: without its own values if the codec is gathered."""
        data = self._means[start]
        if not self._gathers or peer not in self.plan.weights:
            return data
        size = len(data) // len(self._counted)
        at = size * self._counted.index(peer)
        return data[:at] + data[at + size :]

    @property
    def has_summed_its_share(self) -> bool:
        """True if this member has nothing left to sum."""
        return self._own_missing == 0

    @property
    def is_whole(self) -> bool:
        """True if every mean is there."""
        return self._missing == 0

    def means(self) -> list[tuple[int, bytes]]:
        """Return the starts and bytes of all segments in order, for a member that requests a committed result."""
        return sorted(self._means.items())

    def forget_means(self) -> None:
        """Drop all means, which turned out to be wrong."""
        self._means, self._missing, self._own_missing = {}, self._segment_count(), len(self._own_segments)

    def part_digests(self) -> dict[str, str]:
        """Return the SHA-256 of each owner's means."""
        digests = {}
        for owner in self.plan.owners:
            digest = hashlib.sha256()
            for start in self.segments_of(owner):
                digest.update(self._means[start])
            digests[owner] = digest.hexdigest()
        return digests

    def digest(self) -> str:
        """Return the digest of the whole result, including the members counted in it."""
        plan = self.plan
        counted = (sorted(plan.weights.items()), sorted(plan.norms.items()), plan.aggregation, sorted(plan.present))
        digest = hashlib.sha256(repr(counted).encode())
        for _, data in self.means():
            digest.update(data)
        return digest.hexdigest()

    def result(self) -> Vector:
        """Return the result as every member decodes it; raises BadBytes for undecodable bytes from an owner."""
        vector = np.empty(self.plan.values, dtype=self._value_type)
        for start, data in self._means.items():
            vector[start : self._end(start)] = self._decode_mean(start, data)
        return vector

    def contributions(self) -> dict[str, Vector]:
        """Return each counted member's update as it was sent; {} if only means were exchanged."""
        if not self._gathers:
            return {}
        vectors = {peer: np.empty(self.plan.values, dtype=self._value_type) for peer in self._counted}
        for start, data in self._means.items():
            for peer, values in self._decode_pieces(start, data).items():
                vectors[peer][start : self._end(start)] = values
        return vectors

    def mean_without(self, removed: Collection[str]) -> Vector:
        """Return the weighted mean of the updates of all members except `removed`; needs their contributions.

        It is the weighted mean whatever the plan's aggregation: one that leaves a liar out would show no cause.
        """
        counted = [peer for peer in self._counted if peer not in removed]
        factors = mean_factors("mean", {peer: self.plan.weights[peer] for peer in counted}, self.plan.norms)
        vector = np.empty(self.plan.values, dtype=self._value_type)
        for start, data in self._means.items():
            pieces = self._decode_pieces(start, data)
            mean = aggregate("mean", [pieces[peer] for peer in counted], [factors[peer] for peer in counted])
            vector[start : self._end(start)] = mean
        return vector

    def settle(self) -> None:
        """Carry what the codec lost of this update to the next one, as the round was committed."""
        if self._sender is not None and self._lost is not None and self._lost_sums is not None:
            self._sender.settle(self._lost, self._lost_sums)

    def mean_sketch(self) -> Vector:
        """Return the sketch of this member's share of the mean; sketches add up as the vectors do."""
        sketch = np.zeros(SKETCH_VALUES)
        for start in self._own_segments:
            sketch += sketch_of(self._decode_mean(start, self._means[start]), start)
        return sketch

    def _share_at(self, start: int) -> tuple[int, int, str]:
        """Return begin, end and owner of the share that contains a value."""
        return self._shares[bisect.bisect_right(self._shares, start, key=lambda share: share[0]) - 1]

    def _end(self, start: int) -> int:
        return min(start + self.plan.segment, self._share_at(start)[1])

    def _owner_of(self, start: int) -> str:
        """Return the owner of the segment that begins at `start`, "" if no segment begins there."""
        if start >= self.plan.values:
            return ""
        begin, _, owner = self._share_at(start)
        return owner if (start - begin) % self.plan.segment == 0 else ""

    def _segment_count(self) -> int:
        return sum(len(self.segments_of(owner)) for owner in self.plan.owners)

    def _sum(self, start: int, pieces: dict[str, Vector]) -> bytes:
        """Return the bytes of a segment whose updates are complete: concatenated if gathered, else the encoded mean."""
        if self._gathers:
            encoded = self._encoded.pop(start)
            data = b"".join(encoded[peer] for peer in self._counted)
        else:
            mean = self._mean(pieces)
            if self._sender is not None:
                mean = self._sender.outgoing_sum(start, mean, self.plan.values)
            data = encode(self.plan.codec, mean, self.plan.top_share)
            if self._lost_sums is not None:
                self._lost_sums[start : self._end(start)] = mean - self._decode(start, data)
        pieces.clear()
        self._keep(start, data)
        return data

    def _mean(self, pieces: dict[str, Vector]) -> Vector:
        counted, factors = self._counted, self._factors
        return aggregate(self.plan.aggregation, [pieces[peer] for peer in counted], [factors[peer] for peer in counted])

    def _check_screen(self, screen: Callable[[str, Vector], str | None]) -> None:
        """Screen every update of this member's share; raises BadUpdate."""
        for peer in sorted(self.plan.weights):
            vector = np.zeros(self.plan.values, dtype=self._value_type)
            for start, pieces in self._pieces.items():
                vector[start : self._end(start)] = pieces[peer]
            if peer != self.me and (reason := screen(peer, vector)):
                raise BadUpdate(peer, reason[:400])

    def _keep(self, start: int, data: bytes) -> None:
        self._means[start] = data
        self._missing -= 1
        self._own_missing -= start in self._own_segments

    def _decode(self, start: int, data: bytes) -> Vector:
        return decode(self.plan.codec, data, self._end(start) - start, self.plan.top_share)

    def _decode_mean(self, start: int, data: bytes) -> Vector:
        if not self._gathers:
            return self._decode(start, data)
        return self._mean(self._decode_pieces(start, data))

    @property
    def _value_type(self) -> type[np.floating[Any]]:
        return np.float64 if self.plan.codec == "fp64" else np.float32

    def _decode_pieces(self, start: int, data: bytes) -> dict[str, Vector]:
        """Decode the concatenated updates of a gathered segment, by peer."""
        size = len(data) // len(self._counted)
        view = memoryview(data)
        return {
            peer: decode(
                self.plan.codec,
                view[place * size : (place + 1) * size],
                self._end(start) - start,
                self.plan.top_share,
            )
            for place, peer in enumerate(self._counted)
        }
