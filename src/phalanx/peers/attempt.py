"""One attempt at a round as one member sees it: pieces of updates come in, means go out; bytes only, no sockets.

A vector is cut into segments. The owner of a segment sums it as soon as every update's piece of it is there and sends
the mean to all at once, so that links carry both directions at the same time. All members decode the same encoded
means: their results are equal to the last bit. Of a gathered codec (topk-2bit), and between two peers, the "mean" is
all pieces as they came, one after the other in the order of ids; a member is sent those of the others, and puts its
own among them.
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

SEGMENT_BYTES = 32 * 1024  # a fortieth of a second at 10 Mbit/s: what waits for the last piece of a segment is short
DIRECT_SEGMENT_BYTES = 128 * 1024  # of two peers, where nothing waits for a piece: fewer heads and TLS records
MOST_NAMED = 4096  # peers in a plan of a round that is over
# A codec changes the norm a little (2-bit values by up to a tenth); the limit on norms is far above it.
NORM_TOLERANCE = 1.5


class BadUpdate(Exception):
    """What a peer sent cannot be summed."""

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
    """In float64; not finite where a value is not, or is too large.

    Not by BLAS: its threads wait for each other, 41 ms for one segment of int8 on two busy cores instead of 0.05 ms.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(values, dtype=np.float64).sum())


def segment_values(codec: str, top_share: float, *, is_direct: bool = False) -> int:
    """Values that travel together: about `SEGMENT_BYTES`, and a multiple of what every block divides.

    >>> segment_values("fp32", 0.03), segment_values("topk-2bit", 0.03), segment_values("fp32", 0.03, is_direct=True)
    (8192, 929792, 32768)
    """
    chunks = (DIRECT_SEGMENT_BYTES if is_direct else SEGMENT_BYTES) // max(
        1, encoded_bytes(codec, CUT_VALUES, top_share)
    )
    return min(MOST_SEGMENT_VALUES, max(1, chunks) * CUT_VALUES)


def check_plan(plan: RoundPlan, view: MemberView | None, *, most_values: int = MOST_VALUES) -> str:
    """What is wrong with a plan that came over the wire, or nothing; without a view, of a round of an earlier one.

    No vector of the run is longer than `most_values`.
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
    """Return how a plan differs from what its members derive themselves, or nothing: a leader may lie too."""
    if plan.weights and plan.aggregation != aggregation:
        return f'its aggregation is "{plan.aggregation}", here it is "{aggregation}"'
    for peer, weight in plan.weights.items() if weight_limits is not None else ():
        if weight_limits is not None and weight > (dealt := weight_limits.get(peer, 0.0)):
            return f"it gives {peer} a weight of {weight:.6g}, and {dealt:.6g} was dealt"
    return ""


def has_same_layout(plan: RoundPlan, other: RoundPlan) -> bool:
    """Whether the same attempt moves the same values between the same members."""

    def layout(one: RoundPlan) -> tuple[object, ...]:
        return one.key, one.values, one.codec, one.top_share, one.segment, set(one.weights), one.owners, one.gathered

    return layout(plan) == layout(other)


class Attempt:
    """What this member has of an attempt. `outgoing` is its own update, None where it adds none."""

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
        self.commit_digest = ""  # of the committed result, once that is known
        self.bytes_sent = self.bytes_received = 0
        self.screening = asyncio.Lock()
        self.squares = dict.fromkeys(plan.weights, 0.0)
        self.sketches = dict.fromkeys(plan.weights, np.zeros(SKETCH_VALUES))  # of this member's share of each update
        self._sender, self._screen = sender, screen
        # Nothing is kept for each segment before something of it is here: a plan is small, whatever it speaks of.
        self._shares = sorted((begin, end, owner) for owner, (begin, end) in plan.owners.items() if begin < end)
        self._means: dict[int, bytes] = {}
        self._pieces: dict[int, dict[str, Vector]] = {}  # of this member's share
        self._own_segments = self.segments_of(me)
        self._own_missing = len(self._own_segments)
        self._missing = self._segment_count()
        self._counted = sorted(plan.weights)
        self._factors = mean_factors(plan.aggregation, plan.weights, plan.norms) if plan.weights else {}
        # Two peers move as many bytes either way: each sends the other its values, nothing is rounded a second time,
        # and no piece waits for another.
        self._gathers = (
            plan.gathered
            or plan.codec in GATHERED_CODECS
            or (len(plan.weights) == 2 and set(plan.owners) <= set(plan.weights))
        )
        self.is_judging = False  # this member evaluates the result: it is not yet reported
        self._own: dict[int, bytes] = {}
        self._encoded: dict[int, dict[str, bytes]] = {}  # of gathered pieces: by segment and peer
        carries = sender is not None and sender.carries and self.outgoing is not None
        self._lost = np.array(self.outgoing, copy=True) if carries else None
        self._lost_sums = np.zeros_like(self._lost) if self._lost is not None else None

    @property
    def has_screen(self) -> bool:
        """Whether taking the last piece may take long: the loss may be evaluated."""
        return self._screen is not None

    def segments_of(self, owner: str) -> range:
        """Where the segments of an owner start, in order."""
        begin, end = self.plan.owners.get(owner, (0, 0))
        return range(begin, end, self.plan.segment)

    def encode_piece(self, start: int) -> bytes:
        """This member's own values of a segment; the same bytes whenever it is asked."""
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
        """Add this member's update to its own share; yields the means that are whole by it."""
        if self.outgoing is not None:
            for start in self.segments_of(self.me):
                yield from self.take_piece(self.me, start, self.encode_piece(start))

    def take_piece(self, peer: str, start: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """A peer's values of a segment that this member owns; yields the mean if it was the last.

        Raises BadUpdate for what cannot be summed.
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
            len(one) == len(self.plan.weights) for one in self._pieces.values()
        ):
            # Whoever screens sees whole shares, so nothing may be summed before the last piece.
            self._check_screen(self._screen)
            for place, each in self._pieces.items():
                yield place, self._sum(place, each)

    def take_mean(self, peer: str, start: int, data: bytes) -> bool:
        """The mean of a segment, from its owner; whether that makes the result whole.

        Of a committed attempt it may come from anybody: the digest shows whether it is right.
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
        """Whether values that were sent before the plan was known are those of this plan, which then holds."""
        if not has_same_layout(self.plan, plan):
            return False
        self.plan = plan
        self._factors = mean_factors(plan.aggregation, plan.weights, plan.norms)
        return True

    def is_direct(self, peer: str) -> bool:
        """Whether what a peer is sent of this member's share is its own values, which wait for nobody."""
        return self._gathers and self.outgoing is not None and {self.me, peer} == set(self.plan.weights)

    def mean_for(self, peer: str, start: int) -> bytes:
        """What a member is sent of a segment that is whole here: of a gathered codec, all but what it sent itself."""
        data = self._means[start]
        if not self._gathers or peer not in self.plan.weights:
            return data
        size = len(data) // len(self._counted)
        at = size * self._counted.index(peer)
        return data[:at] + data[at + size :]

    @property
    def has_summed_its_share(self) -> bool:
        """Whether this member has nothing more to sum."""
        return self._own_missing == 0

    @property
    def is_whole(self) -> bool:
        """Whether every mean is there."""
        return self._missing == 0

    def means(self) -> list[tuple[int, bytes]]:
        """In order, for a member that asks for a committed result."""
        return sorted(self._means.items())

    def forget_means(self) -> None:
        """They were wrong."""
        self._means, self._missing, self._own_missing = {}, self._segment_count(), len(self._own_segments)

    def part_digests(self) -> dict[str, str]:
        """SHA-256 of each owner's means."""
        found = {}
        for owner in self.plan.owners:
            digest = hashlib.sha256()
            for start in self.segments_of(owner):
                digest.update(self._means[start])
            found[owner] = digest.hexdigest()
        return found

    def digest(self) -> str:
        """Of the whole result, and of who is counted in it."""
        plan = self.plan
        counted = (sorted(plan.weights.items()), sorted(plan.norms.items()), plan.aggregation, sorted(plan.present))
        digest = hashlib.sha256(repr(counted).encode())
        for _, data in self.means():
            digest.update(data)
        return digest.hexdigest()

    def result(self) -> Vector:
        """The mean, as every member decodes it; raises BadBytes where an owner sent nonsense."""
        found = np.empty(self.plan.values, dtype=self._value_type)
        for start, data in self._means.items():
            found[start : self._end(start)] = self._decode_mean(start, data)
        return found

    def contributions(self) -> dict[str, Vector]:
        """Each counted member's update as it was sent; empty where only means were exchanged."""
        if not self._gathers:
            return {}
        found = {peer: np.empty(self.plan.values, dtype=self._value_type) for peer in self._counted}
        for start, data in self._means.items():
            for peer, values in self._decode_pieces(start, data).items():
                found[peer][start : self._end(start)] = values
        return found

    def mean_without(self, removed: Collection[str]) -> Vector:
        """The weighted mean of the other members' updates, of a round whose contributions are here.

        Whatever the plan's aggregation: one that leaves a liar out of the result would show no cause.
        """
        counted = [peer for peer in self._counted if peer not in removed]
        factors = mean_factors("mean", {peer: self.plan.weights[peer] for peer in counted}, self.plan.norms)
        found = np.empty(self.plan.values, dtype=self._value_type)
        for start, data in self._means.items():
            pieces = self._decode_pieces(start, data)
            mean = aggregate("mean", [pieces[peer] for peer in counted], [factors[peer] for peer in counted])
            found[start : self._end(start)] = mean
        return found

    def settle(self) -> None:
        """The round was committed: what the codec lost is sent with the next."""
        if self._sender is not None and self._lost is not None and self._lost_sums is not None:
            self._sender.settle(self._lost, self._lost_sums)

    def mean_sketch(self) -> Vector:
        """Sketch of this member's share of the mean: sketches add up as the vectors do."""
        sketch = np.zeros(SKETCH_VALUES)
        for start in self._own_segments:
            sketch += sketch_of(self._decode_mean(start, self._means[start]), start)
        return sketch

    def _share_at(self, start: int) -> tuple[int, int, str]:
        """Begin, end and owner of the share that a value is in."""
        return self._shares[bisect.bisect_right(self._shares, start, key=lambda share: share[0]) - 1]

    def _end(self, start: int) -> int:
        return min(start + self.plan.segment, self._share_at(start)[1])

    def _owner_of(self, start: int) -> str:
        """Whose segment starts there; nobody's where none does."""
        if start >= self.plan.values:
            return ""
        begin, _, owner = self._share_at(start)
        return owner if (start - begin) % self.plan.segment == 0 else ""

    def _segment_count(self) -> int:
        return sum(len(self.segments_of(owner)) for owner in self.plan.owners)

    def _sum(self, start: int, pieces: dict[str, Vector]) -> bytes:
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
