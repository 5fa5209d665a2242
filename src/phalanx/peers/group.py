"""A group of peers as training sees it: join, average, fetch the state, leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from phalanx.peers.allowlist import AllowList
from phalanx.peers.codecs import Sender
from phalanx.peers.facts import (
    Address,
    Bandwidth,
    PeerEvent,
    PeerState,
    Progress,
    RoundResult,
    RunFacts,
    Vector,
    View,
)
from phalanx.peers.identity import PeerIdentity

LOOPBACK: Address = ("127.0.0.1", 0)


class PeerGroup:
    """This process as a peer of a run. All methods may be called from any thread; one thread of its own talks.

    `listen` takes port 0 for a free one (`address` says which). `advertise` is what others connect to where that is
    another address. `client_only` peers listen to nobody, own no share and never lead. `routes` are addresses by peer
    id that are taken instead of the advertised ones (a private link between two sites). `screen` is asked by the owner
    of a share for each update before it is summed, with the peer and a vector that is zero outside this share; a text
    in return drops the update, with the text as the reason. `events` is called on the group's own thread and must not
    block. `norm_limit` is how many times the round's median norm an update may have.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        run: RunFacts,
        *,
        allowed: AllowList,
        listen: Address = LOOPBACK,
        advertise: Address | None = None,
        bandwidth: Bandwidth | None = None,
        client_only: bool = False,
        events: Callable[[PeerEvent], None] | None = None,
        screen: Callable[[str, Vector], str | None] | None = None,
        norm_limit: float = 10.0,
        heartbeat_s: float = 0.5,
        dead_after_s: float = 5.0,
        samples_per_s: float | None = None,
        routes: Mapping[str, Address] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def id(self) -> str:
        """This peer's id: the first 16 digits of its certificate's fingerprint."""
        raise NotImplementedError

    @property
    def address(self) -> Address:
        """Where others connect to."""
        raise NotImplementedError

    def join(self, addresses: Sequence[Address] = (), *, timeout_s: float = 30.0) -> View:
        """Become a member through any live peer at `addresses`; without addresses, found the group.

        Raises UserError where a peer refuses (key, run, model, tokenizer or code), or something else answers there;
        SystemFailure where nobody answers in time.
        """
        raise NotImplementedError

    def view(self) -> View:
        """Current membership; never blocks. Number 0 and no members before `join`."""
        raise NotImplementedError

    def report(self, progress: Progress) -> None:
        """Say how far this peer is; rides on heartbeats."""
        raise NotImplementedError

    def progress(self) -> dict[str, Progress]:
        """How far each live member said it is, by id, this one among them."""
        raise NotImplementedError

    def links(self) -> dict[str, dict[str, float]]:
        """For a picture of links, by peer id: `latency_s`, `silent_s`, `sent_bytes`, `received_bytes`."""
        raise NotImplementedError

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
    ) -> RoundResult:
        """Weighted mean of the members' vectors; blocks until the round is committed, discarded, or has timed out.

        Every active member calls it with the same round number, length and codec. `Sender` carries what a codec loses
        from round to round; a name alone carries nothing. Take "fp64" for float64 vectors that must stay exact.
        With `quorum` the round begins `grace_s` after so many members are ready; without, when all are. A member that
        calls later gets the committed result at once, without being counted. After a discarded round call again with
        the same number; where `behind` is true, call `fetch_state` first. Weight 0 takes the result and adds nothing.
        """
        raise NotImplementedError

    def serve_state(self, provider: Callable[[], PeerState | None]) -> None:
        """Give newcomers this state; `provider` is called on a thread of the group's, once per newcomer."""
        raise NotImplementedError

    def fetch_state(self, into: Callable[[str, bytes], None], *, timeout_s: float = 600.0) -> int:
        """The newest committed state, from the nearest live peer that has it; returns its round number.

        `into` gets each tensor after its SHA-256 was found right. Names are those of a tensor, never of a path:
        letters, digits and `._-/`, without `..`. A peer that fails half way is replaced by the next. Then go on with
        round `returned + 1`: results that were committed meanwhile are handed out by `average` at once.
        """
        raise NotImplementedError

    def set_allowed(self, allowed: AllowList) -> None:
        """A newer allowlist of the run's owner: newcomers and revocations take effect here and spread to all."""
        raise NotImplementedError

    def leave(self) -> None:
        """Tell the others, so that nobody waits for this peer; then `close`."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up all connections and the thread; may be called twice."""
        raise NotImplementedError

    def __enter__(self) -> PeerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
