"""Values that a group of peers speaks in: who takes part, in which run, and how a round ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

Address = tuple[str, int]
MOST_MBPS = 1e9
# Limits of what comes from another peer; msgspec looks at them.
Speed = Annotated[float, Meta(gt=0.0, lt=MOST_MBPS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Claim = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Vector = npt.NDArray[Any]  # of float32 or float64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What two peers must agree on before they exchange anything; digests as hexadecimal text."""

    run_id: str
    model_digest: str
    tokenizer_digest: str = ""
    code_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """What a peer's link carries, in Mbit/s; measured or stated by its owner."""

    up_mbps: Speed
    down_mbps: Speed

    @property
    def slower_mbps(self) -> float:
        """A round moves as many bytes up as down: the slower way decides."""
        return min(self.up_mbps, self.down_mbps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One peer of a view. `instance` is new with every process: a peer that restarts is another member."""

    id: str
    name: str
    address: tuple[Annotated[str, Meta(max_length=253)], Annotated[int, Meta(ge=0, lt=2**16)]]
    instance: str
    bandwidth: Bandwidth | None = None
    client_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberView:
    """Who takes part, by a number that only grows; members in order of their id.

    `history` is drawn when the group is founded: views of two foundings are never compared.
    """

    number: Count
    members: tuple[Member, ...]
    next_round: Count
    history: str = ""
    first_round: Count = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the members, in order."""
        return tuple(member.id for member in self.members)

    @property
    def leader(self) -> str:
        """Id of the lowest member that others can connect to; empty before a view exists."""
        return next((member.id for member in self.members if not member.client_only), "")

    def member(self, peer: str) -> Member | None:
        """Of an id."""
        return next((member for member in self.members if member.id == peer), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerProgress:
    """How far a peer is: optimizer steps, samples gathered since the last committed round, and how fast it gathers."""

    step: Claim = 0
    samples: Claim = 0
    samples_per_s: float = 0.0  # 0: not known yet


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """How a round ended. Committed: `vector` is the aggregate, the same bytes on every member of the view.

    It is None where no member had a weight.

    `members_counted` are the ids whose updates are in it, `weights` what each counted. `dropped` names who was left
    out, and why. `behind`: the group went on without this peer, which must fetch the state before its next round.
    Bytes are those of the codec, of this round, without the few of TLS and of frames.
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
    paces: Mapping[str, float] = field(default_factory=dict)  # samples a second that each counted member said it learns
    aggregation: str = "mean"
    present: tuple[str, ...] = ()  # members that took part without a weight
    capped: Mapping[str, str] = field(default_factory=dict)  # whose claimed weight was cut, and why


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerEvent:
    """Something that happened in the group, for the run's record.

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
    """What a newcomer starts from: tensors by name as bytes, as of the state after `round_number` was committed.

    `round_number` is -1 before the first round. A provider hands out a copy that training does not change.
    """

    round_number: int
    tensors: Mapping[str, bytes]
