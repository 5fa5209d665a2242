"""Rounds as a peer's ranks use them: rank 0 tries a round until it is committed, and broadcasts the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.job.sync_section import SyncSettings
from phalanx.network.slow_codecs import FEEDBACK_CODECS
from phalanx.peers.codecs import Sender
from phalanx.peers.facts import Address, MemberView, PeerProgress, PeerState, RoundResult, Vector
from phalanx.train.slow_links.peer_vector import VectorMap, spread_object

ATTEMPT_S = 3600.0  # limit of one wait for a round; any update takes less on a usable link
POLL_S = 0.1  # between checks for a stop request
LEAVE_S = 5.0  # time that a round may still take after a stop request


class GroupLink(Protocol):
    """The part of `peers.group.PeerGroup` that training uses."""

    @property
    def id(self) -> str: ...

    def join(
        self, addresses: Sequence[Address] = (), *, timeout_s: float = 30.0, first_round: int = 0
    ) -> MemberView: ...

    def view(self) -> MemberView: ...

    def report(self, progress: PeerProgress) -> None: ...

    def progress(self) -> dict[str, PeerProgress]: ...

    def average(
        self,
        round_number: int,
        vector: Vector,
        weight: float,
        codec: str | Sender = "fp32",
        *,
        timeout_s: float = 60.0,
        quorum: int | None = None,
        grace_s: float | None = None,
        weight_limits: Mapping[str, float] | None = None,
    ) -> RoundResult: ...

    def serve_state(self, provider: Callable[[], PeerState | None]) -> None: ...

    def expect_values(self, most_values: int) -> None: ...

    def fetch_state(
        self,
        into: Callable[[str, bytes], None],
        *,
        timeout_s: float = 600.0,
        most_bytes: Mapping[str, int] | None = None,
    ) -> int: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class BehindGroup(Exception):
    """The group continued without this peer, which must take the group's state before it continues."""


class LeavingGroup(Exception):
    """This peer was asked to stop while it waited for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedRound:
    """Facts of a committed round that all peers know alike."""

    number: int
    # Tokens of each peer that took part, by id; 0 for peers without an update.
    weights: dict[str, float]
    dropped: dict[str, str]
    # Samples per second that each peer reported.
    paces: dict[str, float] = field(default_factory=dict)
    # Part of the vector that each peer averaged.
    shares: dict[str, float] = field(default_factory=dict)
    aggregation: str = "mean"
    # Peers that claimed more tokens than they were dealt.
    capped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    digest: str = ""  # of the mean's bytes, which must be the same on every peer

    @property
    def members(self) -> tuple[str, ...]:
        """Peers that took part and were not dropped, in order of their ids."""
        return tuple(sorted(set(self.weights) - set(self.dropped)))

    @property
    def tokens(self) -> float:
        """Tokens of all updates in the mean."""
        return sum(self.weights.values())


class PeerExchange:
    """Rounds of one rank; `round`, the number of the next round, is the same on every peer.

    `link` is the group on rank 0, None on other ranks.
    """

    def __init__(
        self,
        link: GroupLink | None,
        sync: SyncSettings,
        *,
        stop: Callable[[], bool] = lambda: False,
        frozen: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._link, self._sync, self._stop, self._frozen = link, sync, stop, frozen
        self.round = 0
        self._senders: dict[object, Sender] = {}
        # One thread, so that rounds are done in order.
        self._thread = ThreadPoolExecutor(1, "peer-round")

    def average(
        self,
        vectors: VectorMap,
        tensors: Sequence[torch.Tensor],
        tokens: float,
        *,
        limits: Mapping[str, float] | None = None,
        sender: object = None,
        waits: bool = True,
    ) -> PendingRound:
        """Begin the next round with this peer's tensors; every rank of the peer calls this, and then `finish`.

        The update counts as `tokens`; with 0 tokens this peer is present and sends no update. `limits` are the tokens
        that each peer was dealt, by id, and the largest weights that updates can have. `sender` is the key under which
        codecs carry errors over: a fragment's number, or None for gradients. Without `waits`, training continues
        meanwhile.
        """
        vector = vectors.gather(tensors)
        future: Future[RoundResult] | None = None
        if vector is not None:
            codec = self._codec(vectors, sender)
            future = self._thread.submit(
                self._ask_until_committed, self.round, vector, float(tokens), codec, sender is not None, limits
            )
        return PendingRound(exchange=self, vectors=vectors, future=future, frozen=self._frozen if waits else None)

    def meet(self) -> AgreedRound:
        """Do a round without an update, which establishes the members present; every rank of the peer calls this."""
        future = None
        if self._link is not None:
            future = self._thread.submit(self._ask_until_committed, self.round, np.zeros(1, np.float32), 1.0, "fp32")
        return PendingRound(exchange=self, vectors=None, future=future, frozen=self._frozen).finish()[0]

    def sender_state(self, sender: object) -> dict[str, Vector] | None:
        """Return the loss that the codec carries for `sender`; None if it carries nothing."""
        return self._senders[sender].state() if sender in self._senders else None

    def load_sender(self, sender: object, state: dict[str, Vector] | None) -> None:
        """Restore the loss from `sender_state`; None forgets it."""
        self._senders.pop(sender, None)
        if state and self._link is not None and self._carries:
            self._new_sender(sender).load_state(state)

    @property
    def _carries(self) -> bool:
        return self._sync.codec in FEEDBACK_CODECS

    def _new_sender(self, sender: object) -> Sender:
        sync = self._sync
        self._senders[sender] = Sender(sync.codec, feedback=sync.feedback, top_share=sync.sent_share())
        return self._senders[sender]

    def _codec(self, vectors: VectorMap, sender: object) -> str | Sender:
        """Return the codec for an exchange, as a `Sender` if it carries errors over."""
        codec = self._sync.codec
        if codec == "fp32" and vectors.dtype == torch.float64:
            return "fp64"
        if not self._carries:
            return codec
        if sender is None:
            # Gradients of few bits spoil Adam's moments: a loss of 3.05 instead of 2.48 nats.
            return "int8"
        return self._senders.get(sender) or self._new_sender(sender)

    def _ask_until_committed(
        self,
        number: int,
        vector: Vector,
        weight: float,
        codec: str | Sender,
        may_be_late: bool = False,
        limits: Mapping[str, float] | None = None,
    ) -> RoundResult:
        """Repeat a round until it is committed, this peer is behind, or a stop is requested; rank 0 only."""
        link, sync = self._link, self._sync
        assert link is not None
        quorum, grace_s = None, None
        if sync.mode == "quorum" and sync.quorum and may_be_late:
            quorum, grace_s = sync.quorum, sync.grace_s
        while True:
            present = len(link.view().members)
            result = link.average(
                number,
                vector,
                weight,
                codec,
                timeout_s=ATTEMPT_S,
                quorum=min(quorum, present) if quorum and present else None,
                grace_s=grace_s,
                weight_limits=limits,
            )
            if result.committed or result.behind or self._stop():
                return result

    @property
    def is_stopping(self) -> bool:
        """True if this peer was asked to stop."""
        return self._stop()

    def wait_for(self, future: Future[RoundResult]) -> RoundResult:
        """Wait for a round's result; after a stop request, leave the group if that takes longer than `LEAVE_S`."""
        remaining_s, has_left = LEAVE_S, False
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                remaining_s -= POLL_S if self._stop() else 0.0
                if remaining_s < 0 and not has_left and self._link is not None:
                    has_left = True
                    self._link.leave()  # which ends the wait

    def close(self) -> None:
        """Cancel rounds that have not begun, without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRound:
    """A round that has begun; the next one may begin after its `finish`."""

    exchange: PeerExchange
    vectors: VectorMap | None
    future: Future[RoundResult] | None  # on rank 0
    frozen: Callable[[], AbstractContextManager[None]] | None

    def finish(self) -> tuple[AgreedRound, list[torch.Tensor] | None]:
        """Wait for the round; return its facts and this rank's shards of the mean, None if it has no update.

        Raises BehindGroup or LeavingGroup, the same on every rank of the peer.
        """
        answer: dict[str, Any] = {}
        vector: Vector | None = None
        if self.future is not None:
            with self.frozen() if self.frozen is not None else nullcontext():
                result = self.exchange.wait_for(self.future)
            vector = result.vector if result.committed else None
            # A peer that leaves needs no newer state.
            is_behind = result.behind and not self.exchange.is_stopping
            answer = {"committed": result.committed, "behind": is_behind, "has_vector": vector is not None}
            answer["reason"] = result.reason
            answer["round"] = asdict(_agreed_round(result))
        answer = spread_object(answer)
        if not answer["committed"]:
            raise (BehindGroup if answer["behind"] else LeavingGroup)(answer["reason"])
        self.exchange.round += 1
        agreed = AgreedRound(**answer["round"])
        if self.vectors is None or not answer["has_vector"] or not agreed.tokens:
            return agreed, None
        return agreed, self.vectors.spread(vector)


def _agreed_round(result: RoundResult) -> AgreedRound:
    weights = dict.fromkeys(result.present, 0.0) | {peer: float(weight) for peer, weight in result.weights.items()}
    return AgreedRound(
        number=result.round_number,
        weights=dict(sorted(weights.items())),
        dropped=dict(result.dropped),
        paces=dict(result.paces),
        shares={peer: round(share, 4) for peer, share in sorted(result.shares.items())},
        aggregation=result.aggregation,
        capped=dict(result.capped),
        seconds=result.seconds,
        bytes_sent=result.bytes_sent,
        bytes_received=result.bytes_received,
        digest=hashlib.sha256(result.vector.data).hexdigest()[:32] if result.vector is not None else "",
    )
