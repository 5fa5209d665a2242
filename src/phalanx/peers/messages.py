"""All messages between peers, by type; msgspec decodes them and refuses bytes that match none of the types.

hello, welcome, refusal            introduction, on every connection
join, redirect                     a newcomer and any member
heartbeat, leaving                 between all members
prepare, promise, nack,            agreement on the next view (view_agreement.py)
propose, agreed, install
ready, withdraw, begin, trouble,   agreement on a round (rounds.py)
norms, have, harm, commit,
discard, want, whole, gone
piece, mean                        values, on the data connection only
speed-turn, speed-request,         measurement of a member's link (link_speed.py)
speed-block, speed-report
state-request, manifest, block     the training state for a newcomer
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from phalanx.peers.facts import Count, Member, MemberView, PeerProgress, RunFacts

PROTOCOL = 4
MOST_SPEED_S = 5.0  # longest measurement of a link
MOST_SEGMENT_VALUES = 2**20  # values in one frame
Text = Annotated[str, Meta(max_length=500)]
PeerId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Amount = Annotated[float, Meta(ge=0, le=1e300)]
# The sender's own clock, in seconds: its zero is arbitrary, and it may be wrong.
Clock = Annotated[float, Meta(ge=-1e300, le=1e300)]
# Its square, also times the tolerance that owners allow, is still within the limit of `Amount`.
MOST_NORM = 1e149
Norm = Annotated[float, Meta(ge=0, le=MOST_NORM)]
Number = Annotated[int, Meta(ge=-1, le=2**53)]  # number of a round; -1 before the first
Ballot = tuple[Count, PeerId]
# Peers in one vote; votes can identify liars only up to a third of the members.
MOST_ACCUSED = 64
Accusations = Annotated[dict[PeerId, Text], Meta(max_length=MOST_ACCUSED)]


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages; encoded as a JSON object, which other versions of the protocol can read too."""


class CompactMessage(PeerMessage, frozen=True, kw_only=True, array_like=True):
    """Base of frequent messages: a JSON array of kind and values without field names, a third of the bytes."""


class Hello(PeerMessage, frozen=True, kw_only=True, tag="hello"):
    """First message of the side that dials: protocol version, purpose of the connection and the run's facts."""

    protocol: Annotated[int, Meta(ge=0, le=2**31)]
    purpose: Annotated[str, Meta(max_length=20)]
    run: RunFacts
    instance: Annotated[str, Meta(max_length=32)]


class Welcome(PeerMessage, frozen=True, kw_only=True, tag="welcome"):
    """Answer to an accepted hello."""

    instance: Annotated[str, Meta(max_length=32)]


class PeerRefusal(PeerMessage, frozen=True, kw_only=True, tag="refusal"):
    """Answer to a hello or a join that is refused, with the reason and a fix."""

    what: Text
    fix: Text = ""


class Join(CompactMessage, frozen=True, kw_only=True, tag="join"):
    """A newcomer's request to become a member."""

    member: Member
    # History of the view that it was in before, "" for none: a member that returns already has a state.
    history: Text


class PeerRedirect(CompactMessage, frozen=True, kw_only=True, tag="redirect"):
    """Answer to a join from a member that is not the leader: the leader's address."""

    leader: PeerId
    host: Annotated[str, Meta(max_length=253)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class Wait(CompactMessage, frozen=True, kw_only=True, tag="wait"):
    """Answer to a join when the member knows of no leader; the newcomer asks again later."""


class PeerHeartbeat(CompactMessage, frozen=True, kw_only=True, tag="heartbeat"):
    """A member's state, sent to all others every `heartbeat_s` seconds and whenever something changed."""

    view_number: Count
    history: Text
    sent_at: Clock
    echo: Clock  # sent_at of the last heartbeat received from the other side, 0 for none
    held_s: Amount  # seconds between receiving that heartbeat and sending this one
    progress: PeerProgress
    syncing: bool
    suspects: Annotated[list[PeerId], Meta(max_length=4096)]
    list_version: Count
    committed: Number
    # Up and down; None where the link was not measured, as where its owner stated the speed.
    measured_mbps: tuple[Amount, Amount] | None = None


class AllowlistUpdate(CompactMessage, frozen=True, kw_only=True, tag="lists"):
    """A new allowlist, which travels as the frame's data."""


class Leaving(CompactMessage, frozen=True, kw_only=True, tag="leaving"):
    """The sender leaves the group: the next view is formed without it."""


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The leader's plan of an attempt at a round: who contributes, with which weight, and who sums which values.

    The key of an attempt is (view, round, attempt).
    """

    view_number: Count
    round_number: Count
    attempt: Count
    values: Count
    codec: Annotated[str, Meta(max_length=20)]
    top_share: Annotated[float, Meta(gt=0, le=1)]
    segment: Annotated[int, Meta(ge=4096, le=MOST_SEGMENT_VALUES)]
    weights: dict[PeerId, Amount]
    norms: dict[PeerId, Norm]
    # Begin and end of each owner's share of the vector.
    owners: dict[PeerId, tuple[Count, Count]]
    dropped: dict[PeerId, Text]
    # Samples per second that members report; the next samples are dealt by them.
    paces: dict[PeerId, Amount] = {}
    aggregation: Annotated[str, Meta(max_length=20)] = "mean"
    # Members that are ready and have no weight: they send no update and receive the result.
    present: Annotated[list[PeerId], Meta(max_length=4096)] = []
    capped: dict[PeerId, Text] = {}  # members whose claimed weight was cut, with the reason
    # Every member receives all contributions and can leave each of them out.
    gathered: bool = False
    judged: bool = False  # members evaluate the result and vote on it before it is committed

    @property
    def key(self) -> tuple[int, int, int]:
        """Key of the attempt; later attempts have larger keys."""
        return (self.view_number, self.round_number, self.attempt)


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt whose complete result a member holds, with the result's digest."""

    plan: RoundPlan
    digest: Digest


class NextView(msgspec.Struct, frozen=True, kw_only=True):
    """A proposed view; `outcome` is the round that is committed with it, `holders` the members that have its result."""

    view: MemberView
    outcome: Accepted | None = None
    holders: Annotated[list[PeerId], Meta(max_length=4096)] = []
    # The history that this view replaces, if it was formed without a majority.
    forced_from: Text = ""


class Prepare(CompactMessage, frozen=True, kw_only=True, tag="prepare"):
    """A candidate's request for promises; first phase of the agreement on the next view."""

    view_number: Count
    ballot: Ballot


class Promise(CompactMessage, frozen=True, kw_only=True, tag="promise"):
    """A member's promise to accept no lower ballot, with what it has committed, accepted and agreed to."""

    view_number: Count
    ballot: Ballot
    committed: Number
    accepted: Accepted | None = None
    proposal: NextView | None = None
    proposal_ballot: Ballot | None = None


class Nack(CompactMessage, frozen=True, kw_only=True, tag="nack"):
    """Rejection of a ballot."""

    view_number: Count
    ballot: Ballot
    promised: Ballot | None = None


class Propose(CompactMessage, frozen=True, kw_only=True, tag="propose"):
    """A candidate's proposal of the next view; second phase of the agreement."""

    view_number: Count
    ballot: Ballot
    proposal: NextView


class Agreed(CompactMessage, frozen=True, kw_only=True, tag="agreed"):
    """A member's agreement to a proposal."""

    view_number: Count
    ballot: Ballot


class Install(CompactMessage, frozen=True, kw_only=True, tag="install"):
    """A decided view."""

    proposal: NextView


class Ready(CompactMessage, frozen=True, kw_only=True, tag="ready"):
    """A member is ready for a round: its update's weight, norm and form, and its conditions for beginning."""

    view_number: Count
    round_number: Count
    weight: Amount
    norm: Norm | None  # None: not finite
    values: Count
    codec: Annotated[str, Meta(max_length=20)]
    top_share: Annotated[float, Meta(gt=0, le=1)]
    quorum: Count
    grace_s: Amount
    timeout_s: Amount
    # Number of the member's call of `average`, so that it can ignore answers to an earlier call.
    call: Count
    pace: Amount = 0.0  # samples per second


class Withdraw(CompactMessage, frozen=True, kw_only=True, tag="withdraw"):
    """A member no longer takes part in the round for which it was ready."""

    view_number: Count
    round_number: Count


class Begin(CompactMessage, frozen=True, kw_only=True, tag="begin"):
    """The leader begins an attempt."""

    plan: RoundPlan


class AttemptFailed(CompactMessage, frozen=True, kw_only=True, tag="trouble"):
    """An attempt cannot continue: `peer` was not reached or, with `drop`, sent values that cannot be summed."""

    key: tuple[Count, Count, Count]
    peer: PeerId
    reason: Text
    drop: bool


class UpdateNorms(CompactMessage, frozen=True, kw_only=True, tag="norms"):
    """Sums of squares that an owner computed over its share of each update."""

    key: tuple[Count, Count, Count]
    squares: dict[PeerId, Amount]


class ResultDigest(CompactMessage, frozen=True, kw_only=True, tag="have"):
    """A member holds the whole result of an attempt; its digest, and the member's vote where the round is judged."""

    key: tuple[Count, Count, Count]
    digest: Digest
    # By owner, to identify an owner that sent different sums to different members.
    parts: dict[PeerId, Digest]
    # True if the round raises the held-out loss beyond chance; None: not judged.
    harms: bool | None = None
    accused: Accusations = {}


class HarmVote(CompactMessage, frozen=True, kw_only=True, tag="harm"):
    """A member's vote on a round, to all members; sent only if it accuses a peer."""

    key: tuple[Count, Count, Count]
    accused: Accusations


class Commit(CompactMessage, frozen=True, kw_only=True, tag="commit"):
    """The leader commits an attempt."""

    key: tuple[Count, Count, Count]
    digest: Digest


class Discard(CompactMessage, frozen=True, kw_only=True, tag="discard"):
    """The leader discards a round, which ends the call of `average` that `call` names."""

    view_number: Count
    round_number: Count
    call: Count  # number from the member's `Ready`
    reason: Text


class ResultRequest(CompactMessage, frozen=True, kw_only=True, tag="want"):
    """A request for the result of a committed round."""

    round_number: Count


class ResultPlan(CompactMessage, frozen=True, kw_only=True, tag="whole"):
    """Answer to a request for a result: its plan and digest; the means follow on the data connection."""

    result: Accepted


class ResultForgotten(CompactMessage, frozen=True, kw_only=True, tag="gone"):
    """Answer to a request for a result or a state that the sender does not have."""

    round_number: Count


class UpdateChunk(CompactMessage, frozen=True, kw_only=True, tag="piece"):
    """A segment of the sender's update, as the frame's data, for the owner of that segment."""

    key: tuple[Count, Count, Count]
    start: Count


class MeanChunk(CompactMessage, frozen=True, kw_only=True, tag="mean"):
    """A segment of the result, as the frame's data."""

    key: tuple[Count, Count, Count]
    start: Count


class SpeedTurn(CompactMessage, frozen=True, kw_only=True, tag="speed-turn"):
    """From the leader, before a round begins: measure your link now."""


class SpeedRequest(CompactMessage, frozen=True, kw_only=True, tag="speed-request"):
    """Request to send bytes for `seconds`, as fast as the link takes them."""

    seconds: Annotated[float, Meta(gt=0.0, le=MOST_SPEED_S)]


class SpeedBlock(CompactMessage, frozen=True, kw_only=True, tag="speed-block"):
    """Bytes without content on the data connection, sent only to measure its speed."""


class StateRequest(CompactMessage, frozen=True, kw_only=True, tag="state-request"):
    """A newcomer's request for the training state."""


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Name, size in bytes and digest of one tensor of a state."""

    name: Annotated[str, Meta(max_length=300)]
    size: Annotated[int, Meta(ge=0, le=2**40)]
    sha256: Digest


class Manifest(CompactMessage, frozen=True, kw_only=True, tag="manifest"):
    """Answer to a state request; the list of `tensors` tensors travels as the frame's data."""

    round_number: Number
    tensors: Annotated[int, Meta(ge=0, le=2**20)]


class StateBlock(CompactMessage, frozen=True, kw_only=True, tag="block"):
    """The next bytes of the state, as the frame's data."""


OpeningMessage = Hello | Welcome | PeerRefusal
LaterMessage = (
    Join
    | PeerRedirect
    | Wait
    | PeerHeartbeat
    | AllowlistUpdate
    | Leaving
    | Prepare
    | Promise
    | Nack
    | Propose
    | Agreed
    | Install
    | Ready
    | Withdraw
    | Begin
    | AttemptFailed
    | UpdateNorms
    | ResultDigest
    | HarmVote
    | Commit
    | Discard
    | ResultRequest
    | ResultPlan
    | ResultForgotten
    | UpdateChunk
    | MeanChunk
    | SpeedTurn
    | SpeedRequest
    | SpeedBlock
    | StateRequest
    | Manifest
    | StateBlock
)
_opening_decoder = msgspec.json.Decoder(OpeningMessage)
_later_decoder = msgspec.json.Decoder(LaterMessage)
_encoder = msgspec.json.Encoder()


def encode_message(message: PeerMessage) -> bytes:
    """Return a message as JSON."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> PeerMessage:
    """Decode a peer's message; raises ValueError for any other bytes."""
    try:
        decoder: msgspec.json.Decoder[PeerMessage] = _opening_decoder if data[:1] == b"{" else _later_decoder
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"not a message of a peer: {error}") from error
