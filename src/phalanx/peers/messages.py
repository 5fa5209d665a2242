"""Everything peers say to each other, by type: msgspec reads it and refuses whatever is not of its type.

hello, welcome, refusal            who is there, on every connection
join, redirect                     a newcomer and any member
heartbeat, leaving                 between all members
prepare, promise, nack,            how the next view is agreed on (view_agreement.py)
propose, agreed, install
ready, withdraw, begin, trouble,   how a round is agreed on (rounds.py)
norms, have, harm, commit,
discard, want, whole, gone
piece, mean                        values, on the data connection only
speed-turn, speed-request,         how fast a member's link is (link_speed.py)
speed-block, speed-report
state-request, manifest, block     the state for a newcomer
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from phalanx.peers.facts import Count, Member, MemberView, PeerProgress, RunFacts

PROTOCOL = 4
MOST_SPEED_S = 5.0  # that a link is measured
MOST_SEGMENT_VALUES = 2**20  # that travel together
Text = Annotated[str, Meta(max_length=500)]
PeerId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Amount = Annotated[float, Meta(ge=0, le=1e300)]
Clock = Annotated[float, Meta(ge=-1e300, le=1e300)]  # of the sender: it may begin anywhere, and be wrong
MOST_NORM = 1e149  # its square is an amount still, and so is that of what owners tolerate
Norm = Annotated[float, Meta(ge=0, le=MOST_NORM)]
Number = Annotated[int, Meta(ge=-1, le=2**53)]  # of a round; -1 before the first
Ballot = tuple[Count, PeerId]
MOST_ACCUSED = 64  # in one vote; a third of the members at most can be liars that votes find
Accusations = Annotated[dict[PeerId, Text], Meta(max_length=MOST_ACCUSED)]


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all; a JSON object, which other versions of the protocol understand too."""


class CompactMessage(PeerMessage, frozen=True, kw_only=True, array_like=True):
    """What is said often: a JSON array of its kind and its values, without their names (a third of the bytes)."""


class Hello(PeerMessage, frozen=True, kw_only=True, tag="hello"):
    protocol: Annotated[int, Meta(ge=0, le=2**31)]
    purpose: Annotated[str, Meta(max_length=20)]
    run: RunFacts
    instance: Annotated[str, Meta(max_length=32)]


class Welcome(PeerMessage, frozen=True, kw_only=True, tag="welcome"):
    instance: Annotated[str, Meta(max_length=32)]


class PeerRefusal(PeerMessage, frozen=True, kw_only=True, tag="refusal"):
    what: Text
    fix: Text = ""


class Join(CompactMessage, frozen=True, kw_only=True, tag="join"):
    member: Member
    history: Text  # of the group it was in before: one that comes back has a state


class PeerRedirect(CompactMessage, frozen=True, kw_only=True, tag="redirect"):
    leader: PeerId
    host: Annotated[str, Meta(max_length=253)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class Wait(CompactMessage, frozen=True, kw_only=True, tag="wait"):
    """The member knows of no leader now; ask again."""


class PeerHeartbeat(CompactMessage, frozen=True, kw_only=True, tag="heartbeat"):
    view_number: Count
    history: Text
    sent_at: Clock
    echo: Clock  # sent_at of the last heartbeat heard from the other side, 0 for none
    held_s: Amount  # how long it was held before this answer
    progress: PeerProgress
    syncing: bool
    suspects: Annotated[list[PeerId], Meta(max_length=4096)]
    list_version: Count
    committed: Number
    measured_mbps: tuple[Amount, Amount] | None = None  # up and down, of a link whose speed its owner did not state


class AllowlistUpdate(CompactMessage, frozen=True, kw_only=True, tag="lists"):
    """An allowlist goes with it as data."""


class Leaving(CompactMessage, frozen=True, kw_only=True, tag="leaving"):
    pass


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who adds what to a round, and who sums which values; the key of an attempt is (view, round, attempt)."""

    view_number: Count
    round_number: Count
    attempt: Count
    values: Count
    codec: Annotated[str, Meta(max_length=20)]
    top_share: Annotated[float, Meta(gt=0, le=1)]
    segment: Annotated[int, Meta(ge=4096, le=MOST_SEGMENT_VALUES)]
    weights: dict[PeerId, Amount]
    norms: dict[PeerId, Norm]
    owners: dict[PeerId, tuple[Count, Count]]  # begin and end of each owner's values
    dropped: dict[PeerId, Text]
    paces: dict[PeerId, Amount] = {}  # samples a second that members said they learn from: the next deal follows them
    aggregation: Annotated[str, Meta(max_length=20)] = "mean"
    present: Annotated[list[PeerId], Meta(max_length=4096)] = []  # ready, and without a weight: they send no update
    capped: dict[PeerId, Text] = {}  # whose claimed weight is more than theirs can be, and why
    gathered: bool = False  # every member receives all contributions and can leave each of them out
    judged: bool = False  # members evaluate the result and vote on it before it is committed

    @property
    def key(self) -> tuple[int, int, int]:
        """Orders attempts."""
        return (self.view_number, self.round_number, self.attempt)


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt whose result a member holds whole, and its digest."""

    plan: RoundPlan
    digest: Digest


class NextView(msgspec.Struct, frozen=True, kw_only=True):
    """A view that is proposed; `outcome` is a round that is committed with it, and who holds its result."""

    view: MemberView
    outcome: Accepted | None = None
    holders: Annotated[list[PeerId], Meta(max_length=4096)] = []
    forced_from: Text = ""  # the history that this view leaves, where it was made without a majority


class Prepare(CompactMessage, frozen=True, kw_only=True, tag="prepare"):
    view_number: Count
    ballot: Ballot


class Promise(CompactMessage, frozen=True, kw_only=True, tag="promise"):
    view_number: Count
    ballot: Ballot
    committed: Number
    accepted: Accepted | None = None
    proposal: NextView | None = None
    proposal_ballot: Ballot | None = None


class Nack(CompactMessage, frozen=True, kw_only=True, tag="nack"):
    view_number: Count
    ballot: Ballot
    promised: Ballot | None = None


class Propose(CompactMessage, frozen=True, kw_only=True, tag="propose"):
    view_number: Count
    ballot: Ballot
    proposal: NextView


class Agreed(CompactMessage, frozen=True, kw_only=True, tag="agreed"):
    view_number: Count
    ballot: Ballot


class Install(CompactMessage, frozen=True, kw_only=True, tag="install"):
    proposal: NextView


class Ready(CompactMessage, frozen=True, kw_only=True, tag="ready"):
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
    call: Count  # of `average`, counted by the member: an answer to an earlier call is not for this one
    pace: Amount = 0.0  # samples a second


class Withdraw(CompactMessage, frozen=True, kw_only=True, tag="withdraw"):
    view_number: Count
    round_number: Count


class Begin(CompactMessage, frozen=True, kw_only=True, tag="begin"):
    plan: RoundPlan


class AttemptFailed(CompactMessage, frozen=True, kw_only=True, tag="trouble"):
    """An attempt cannot go on: `peer` was not reached, or sent what cannot be summed (`drop`)."""

    key: tuple[Count, Count, Count]
    peer: PeerId
    reason: Text
    drop: bool


class UpdateNorms(CompactMessage, frozen=True, kw_only=True, tag="norms"):
    """Sums of squares that an owner found in its share of each update."""

    key: tuple[Count, Count, Count]
    squares: dict[PeerId, Amount]


class ResultDigest(CompactMessage, frozen=True, kw_only=True, tag="have"):
    key: tuple[Count, Count, Count]
    digest: Digest
    parts: dict[PeerId, Digest]  # by owner, to name one that tells two stories
    harms: bool | None = None  # whether the round raises the held-out loss beyond chance; None: not judged
    accused: Accusations = {}


class HarmVote(CompactMessage, frozen=True, kw_only=True, tag="harm"):
    """A member's vote on a round to all members; only one that accuses a peer is sent."""

    key: tuple[Count, Count, Count]
    accused: Accusations


class Commit(CompactMessage, frozen=True, kw_only=True, tag="commit"):
    key: tuple[Count, Count, Count]
    digest: Digest


class Discard(CompactMessage, frozen=True, kw_only=True, tag="discard"):
    view_number: Count
    round_number: Count
    call: Count  # the one that said it was ready
    reason: Text


class ResultRequest(CompactMessage, frozen=True, kw_only=True, tag="want"):
    """The result of a committed round, please."""

    round_number: Count


class ResultPlan(CompactMessage, frozen=True, kw_only=True, tag="whole"):
    """Its plan; the means follow on the data connection."""

    result: Accepted


class ResultForgotten(CompactMessage, frozen=True, kw_only=True, tag="gone"):
    round_number: Count


class UpdateChunk(CompactMessage, frozen=True, kw_only=True, tag="piece"):
    key: tuple[Count, Count, Count]
    start: Count


class MeanChunk(CompactMessage, frozen=True, kw_only=True, tag="mean"):
    key: tuple[Count, Count, Count]
    start: Count


class SpeedTurn(CompactMessage, frozen=True, kw_only=True, tag="speed-turn"):
    """From the leader, while nobody sends values: measure your link now."""


class SpeedRequest(CompactMessage, frozen=True, kw_only=True, tag="speed-request"):
    """Send to me for so long, as fast as the link takes it."""

    seconds: Annotated[float, Meta(gt=0.0, le=MOST_SPEED_S)]


class SpeedBlock(CompactMessage, frozen=True, kw_only=True, tag="speed-block"):
    """Bytes that only show how fast they come, on the data connection."""


class StateRequest(CompactMessage, frozen=True, kw_only=True, tag="state-request"):
    pass


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a state."""

    name: Annotated[str, Meta(max_length=300)]
    size: Annotated[int, Meta(ge=0, le=2**40)]
    sha256: Digest


class Manifest(CompactMessage, frozen=True, kw_only=True, tag="manifest"):
    """Its list of tensors goes with it as data; `tensors` of them."""

    round_number: Number
    tensors: Annotated[int, Meta(ge=0, le=2**20)]


class StateBlock(CompactMessage, frozen=True, kw_only=True, tag="block"):
    """The next bytes of the state go with it."""


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
    """As JSON."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> PeerMessage:
    """A message of ours; raises ValueError for anything else."""
    try:
        decoder: msgspec.json.Decoder[PeerMessage] = _opening_decoder if data[:1] == b"{" else _later_decoder
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"not a message of a peer: {error}") from error
