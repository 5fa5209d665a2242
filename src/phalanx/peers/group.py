"""The group of peers as training uses it: join, average, fetch the state, leave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.peers.allowlist import AllowList
from phalanx.peers.codecs import Sender
from phalanx.peers.facts import (
    MOST_MBPS,
    Address,
    Bandwidth,
    MemberView,
    PeerEvent,
    PeerProgress,
    PeerState,
    RoundResult,
    RunFacts,
    Vector,
)
from phalanx.peers.harm_votes import Judgement, RoundTrial
from phalanx.peers.identity import PeerIdentity
from phalanx.peers.node_settings import NodeSettings
from phalanx.peers.peer_node import REVOKED, PeerNode

LOOPBACK: Address = ("127.0.0.1", 0)
T = TypeVar("T")


class PeerGroup:
    """This process as a peer of a run; all methods may be called from any thread, and one thread does the networking.

    `listen` with port 0 takes a free port, which `address` returns. `advertise` is the address that others connect to,
    if it differs. `client_only` peers accept no connections, own no share and never lead. `routes` are addresses by
    peer id that replace the advertised ones (a private link between two sites). `screen` is called by the owner of a
    share for each update before it is summed, with the peer's id and a vector that is zero outside of this share; a
    returned text drops the update, with the text as the reason. It runs on a worker thread and may take its time.
    `events` is called on the group's thread and must not block. `norm_limit` is the largest norm of an update in
    multiples of the round's median norm; `samples_per_s` is a rate that no peer of the run can exceed. `aggregation`,
    one of `aggregation.AGGREGATIONS`, must be the same on all members: a plan with another kind is refused.
    `keep_allowed` is called with every newer allowlist that is taken over, so that the caller can store it for the
    next start. `judge` evaluates every round before it is committed, on a worker thread (`harm_votes`); `excluded` are
    peers that a vote has excluded, with the reason, as the property `excluded` returned them in an earlier process.
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
        aggregation: str = "mean",
        keep_allowed: Callable[[AllowList], None] | None = None,
        judge: Callable[[RoundTrial], Judgement] | None = None,
        excluded: Mapping[str, str] | None = None,
    ) -> None:
        _check_settings(identity, run, allowed, bandwidth, norm_limit, heartbeat_s, dead_after_s)
        settings = NodeSettings(
            listen=listen,
            advertise=advertise,
            bandwidth=bandwidth,
            client_only=client_only,
            events=events or (lambda event: None),
            screen=screen,
            norm_limit=norm_limit,
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
            samples_per_s=samples_per_s,
            routes=dict(routes or {}),
            aggregation=aggregation,
            keep_allowed=keep_allowed or (lambda allowed: None),
            judge=judge,
            excluded=dict(excluded or {}),
        )
        self._loop = asyncio.new_event_loop()
        # Broken handshakes of strangers would be logged as unhandled errors.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, name="phalanx-peers", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._node = self._call(_make_node(identity, run, allowed, settings))
        except BaseException:
            self._end_loop()
            raise

    @property
    def id(self) -> str:
        """This peer's id: the first 16 digits of its certificate's fingerprint."""
        return self._node.me

    @property
    def address(self) -> Address:
        """The address that others connect to."""
        return self._node.member.address

    def join(self, addresses: Sequence[Address] = (), *, timeout_s: float = 30.0, first_round: int = 0) -> MemberView:
        """Join through any live peer at `addresses`; without addresses, found the group. Return the first view.

        Exactly one peer founds a group; `first_round` is the round at which it continues after a checkpoint.

        Raises UserError where a peer refuses (key, run, model, tokenizer or code), or another program answers there;
        SystemFailure where no peer answers within `timeout_s`.
        """
        if self._node.view.number:
            raise mistake("join", "this peer is in the group already")
        self._check_revoked()
        if addresses:
            self._call(self._node.joining.join(list(addresses), timeout_s))
        else:
            self._call(_run_soon(lambda: self._node.joining.found(first_round)))
        self._check_revoked()
        return self._node.view

    def view(self) -> MemberView:
        """Return the current membership without blocking; before `join` its number is 0 and it has no members."""
        return self._node.view

    def report(self, progress: PeerProgress) -> None:
        """Set this peer's progress, which its heartbeats carry to the others."""
        # Replacing a value in a dict needs no lock.
        self._node.progress[self._node.me] = progress

    def progress(self) -> dict[str, PeerProgress]:
        """Return the progress that each live member reports, by id, including this one."""
        return dict(self._node.progress)

    def links(self) -> dict[str, dict[str, float]]:
        """Return statistics of the connections, by peer id.

        `latency_s` is one way, `silent_s` the time since the last frame; `sent_bytes` and `received_bytes` count both
        the control and the data connection.
        """
        return self._call(_run_soon(self._node.link_facts))

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
    ) -> RoundResult:
        """Return the aggregate of the members' vectors; blocks until the round is committed, discarded or timed out.

        Every active member calls it with the same round number, length and codec. A `Sender` carries what a codec
        loses from round to round; the name of a codec carries nothing. Use "fp64" for float64 vectors that must stay
        exact. With `quorum`, the round begins `grace_s` after that many members are ready; without, when all are. A
        member that calls later gets the committed result at once, without being counted. After a discarded round, call
        again with the same number; if the result's `behind` is true, call `fetch_state` first. Weight 0 takes the
        result and adds nothing. `weight_limits` are the largest weights that members can have, by id, the same on all;
        the leader reduces larger claims to them (0 for a member without a limit) and names the member, and others
        refuse a plan above them.

        Raises UserError where this peer's key was revoked, before the call or during it.
        """
        self._check_revoked()
        try:
            sender = Sender(codec, feedback=0.0) if isinstance(codec, str) else codec
        except ValueError as error:
            raise mistake("codec", str(error)) from error
        if self._node.view.number == 0:
            raise mistake("average", "this peer has not joined the group", fix="call join first")
        if vector.ndim != 1 or vector.dtype not in (np.float32, np.float64):
            raise mistake(
                "average", f"a vector of {vector.ndim} dimensions of {vector.dtype}", fix="flat, float32 or 64"
            )
        if not (math.isfinite(weight) and weight >= 0.0):
            raise mistake("average", f"a weight of {weight:g}", fix="weights are finite and not negative")
        if quorum is not None and quorum < 1:
            raise mistake("average", f"a quorum of {quorum}", fix="1 or more; None waits for all")
        result = self._call(
            self._node.rounds.average(
                round_number,
                vector,
                float(weight),  # an int has other bytes on the wire
                sender,
                timeout_s=timeout_s,
                quorum=quorum or 0,
                grace_s=grace_s or 0.0,
                weight_limits=weight_limits,
            )
        )
        self._check_revoked()
        return result

    def _check_revoked(self) -> None:
        if reason := self._node.excluded.get(self._node.me):
            problem = f"this peer was excluded by a vote of the others: {reason}"
            raise mistake(self._node.identity.name, problem, fix="ask the run's owner")
        if self._node.is_revoked:
            raise mistake(self._node.identity.name, REVOKED, fix="ask for a new invitation")

    def serve_state(self, provider: Callable[[], PeerState | None]) -> None:
        """Offer the state to newcomers; `provider` is called on a worker thread, once per newcomer."""
        self._node.provider = provider

    def expect_values(self, most_values: int) -> None:
        """Set the length of the run's longest vector, before `join`; plans with longer vectors are refused."""
        self._node.settings.limits.values = most_values

    def fetch_state(
        self,
        into: Callable[[str, bytes], None],
        *,
        timeout_s: float = 600.0,
        most_bytes: Mapping[str, int] | None = None,
    ) -> int:
        """Fetch the newest committed state from the nearest live peer that has it; return its round number.

        `into` is called with each tensor after its SHA-256 was verified. Names are keys, never paths: letters, digits
        and `._-/`, without `..`. If a peer fails half way, the next one is asked. Continue with round `returned + 1`:
        results that were committed in the meantime are returned by `average` at once. A state with other tensors than
        `most_bytes` names, or larger ones, is refused before any of it is received.
        """
        self._check_revoked()
        self._node.settings.limits.tensors = most_bytes
        try:
            return self._call(asyncio.wait_for(self._node.fetch_state(into), timeout_s))
        except TimeoutError:
            raise SystemFailure(Problem(where="fetch_state", what=f"no state within {timeout_s:g} s")) from None

    def set_allowed(self, allowed: AllowList) -> None:
        """Take over a newer allowlist of the run's owner; it takes effect here and spreads to all members."""
        if allowed.version > self._node.transport.allowed.version and not allowed.replaces(
            self._node.transport.allowed
        ):
            raise mistake("allowlist", "is of another run or another owner, or forgets who was revoked")
        self._call(_run_soon(lambda: self._node.set_allowed(allowed)))

    @property
    def has_majority(self) -> bool:
        """True if enough members are alive to commit a round."""
        return not self._node.views.is_stuck

    def go_on_without_lost(self) -> MemberView:
        """Continue with the members that remain although they are not a majority, and give up the lost ones.

        Only for an operator who knows that the lost members are gone. If they live on behind a broken network, they
        may continue as well, and the training of one of the two sides is lost: a lost peer that meets this side takes
        its state.

        Raises UserError if a majority is present, or the remaining members do not all agree.
        """
        self._call(self._node.views.go_on_without_lost())
        return self._node.view

    @property
    def excluded(self) -> dict[str, str]:
        """Peers that a vote of the others has excluded from this run, by id, with the reason."""
        return dict(self._node.excluded)

    def leave(self) -> None:
        """Announce that this peer leaves, so that the others do not wait for it; then `close`."""
        if not self._closed and self._node.view.number and not self._node.is_revoked:
            with contextlib.suppress(TimeoutError):
                self._call(self._node.joining.leave())
        self.close()

    def close(self) -> None:
        """Close all connections and stop the thread; may be called twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._node.stop(), self._loop).result(5.0)
        self._end_loop()

    def __enter__(self) -> PeerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the group's own thread and wait for its result."""
        if self._closed:
            coroutine.close()
            raise mistake("peers", "the group is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise mistake("peers", "the group was closed meanwhile") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        async def cancel_all() -> None:
            # Several passes, because a handshake that has just ended starts a new task and a new transport.
            for _ in range(5):
                tasks = asyncio.all_tasks() - {asyncio.current_task()}
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                # Connections in the middle of a TLS handshake are known only to the loop, which does not close them.
                for transport in list(getattr(self._loop, "_transports", {}).values()):
                    transport.abort()
                # Aborted transports are freed in the next iteration of the loop.
                await asyncio.sleep(0)
            await self._loop.shutdown_default_executor()

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _make_node(identity: PeerIdentity, run: RunFacts, allowed: AllowList, settings: NodeSettings) -> PeerNode:
    node = PeerNode(identity, run, allowed, settings)
    await node.start()
    return node


async def _run_soon(call: Callable[[], T]) -> T:
    return call()


def _check_settings(
    identity: PeerIdentity,
    run: RunFacts,
    allowed: AllowList,
    bandwidth: Bandwidth | None,
    norm_limit: float,
    heartbeat_s: float,
    dead_after_s: float,
) -> None:
    """Raises UserError for settings that are known to be wrong before a socket is opened."""
    if identity.fingerprint in allowed.revoked:
        raise mistake(identity.name, "this identity was revoked by the run's owner", fix="ask for a new invitation")
    if identity.fingerprint not in allowed.fingerprints():
        raise mistake(identity.name, "is not on the run's allowlist", fix="ask the run's owner for an invitation")
    if allowed.run_id != run.run_id:
        problem = f"the allowlist is of run {allowed.run_id}, this is run {run.run_id}"
        raise mistake("allowlist", problem, fix="take the invitation of this run")
    if bandwidth is not None and not all(0.0 < speed < MOST_MBPS for speed in (bandwidth.up_mbps, bandwidth.down_mbps)):
        problem = f"{bandwidth.up_mbps:g} Mbit/s up and {bandwidth.down_mbps:g} down"
        raise mistake(
            "bandwidth", problem, why=f"both must be above 0, or nothing can be sent, and below {MOST_MBPS:g}"
        )
    if not 0.0 < heartbeat_s < dead_after_s:
        problem = f"heartbeat_s = {heartbeat_s:g} and dead_after_s = {dead_after_s:g}"
        raise mistake("sync", problem, fix="a peer is dead after several heartbeats: 0.5 and 5, for instance")
    if not norm_limit > 1.0:
        raise mistake("norm_limit", f"{norm_limit:g} drops ordinary updates", fix="take 10")
