"""Shared value types of the peers package: run facts, members, views, progress, results of rounds and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

Address = tuple[str, int]
MOST_MBPS = 1e9
# Limits of values that come from another peer; msgspec checks them.
Speed = Annotated[float, Meta(gt=0.0, lt=MOST_MBPS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Claim = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Vector = npt.NDArray[Any]  # of float32 or float64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts that must agree between two peers before they exchange anything; digests are hexadecimal text."""

    run_id: str
    model_digest: str
    tokenizer_digest: str = ""
    code_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Speed of a peer's link in Mbit/s, measured or stated by its owner."""

    up_mbps: Speed
    down_mbps: Speed

    @property
    def slower_mbps(self) -> float:
        """The slower direction, which decides: a round moves as many bytes up as down."""
        return min(self.up_mbps, self.down_mbps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A peer in a view. `instance` is new with every process, so a peer that restarts is a different member."""

    id: str
    name: str
    address: tuple[Annotated[str, Meta(max_length=253)], Annotated[int, Meta(ge=0, lt=2**16)]]
    instance: str
    bandwidth: Bandwidth | None = None
    client_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberView:
    """The peers' view of the membership, with a number that only grows; members are in order of their id.

    `history` is drawn when the group is founded: views with different histories are never compared.
    """

    number: Count
    members: tuple[Member, ...]
    next_round: Count
    history: str = ""
    first_round: Count = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the members, in order."""
        return tuple(member.id for member in self.members)

    @property
    def leader(self) -> str:
        """Id of the first member that others can connect to; empty before a view exists."""
        return next((member.id for member in self.members if not member.client_only), "")

    def member(self, peer: str) -> Member | None:
        """Return the member with an id, or None."""
        return next((member for member in self.members if member.id == peer), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerProgress:
    """A peer's progress: optimizer steps, samples since the last committed round, and samples per second."""

    step: Claim = 0
    samples: Claim = 0
    samples_per_s: float = 0.0  # 0: not known yet


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """The outcome of a round.

    If it is committed, `vector` is the aggregate, the same bytes on every member of the view; None if no member had a
    weight. `members_counted` are the ids whose updates are in it, `weights` their weights. `dropped` holds members
    that were left out, with the reason. `behind` means that the group continued without this peer, which must fetch
    the state before its next round. Bytes are those of the codec, for this round, without the overhead of TLS and
    frames.
    """

    round_number: int
    committed: bool
    vector: npt.NDArray[np.float32] | npt.NDArray[np.float64] | None = None
    members_counted: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    dropped: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    behind: bool = False
    view_number: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    # Samples per second, as counted members report them.
    paces: Mapping[str, float] = field(default_factory=dict)
    aggregation: str = "mean"
    present: tuple[str, ...] = ()  # members that took part without a weight
    # Members whose claimed weight was cut, with the reason.
    capped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerEvent:
    """An event in the group, for the run's record.

    kind: joined, left, lost, evicted, rejoined, no-majority, forced, view, committed, discarded, dropped, capped,
    aggregation, refused, revoked, harmful, excluded, measured, doubtful-progress, doubtful-update, state-served,
    state-fetched.
    """

    kind: str
    text: str
    peer: str = ""
    name: str = ""
    view_number: int = 0
    round_number: int = -1
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """The state that a newcomer starts from: tensors by name as bytes, after round `round_number` was committed.

    `round_number` is -1 before the first round. A provider hands out a copy that training does not change.
    """

    round_number: int
    tensors: Mapping[str, bytes]
