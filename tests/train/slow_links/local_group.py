"""A group of peers inside one process: what `peers.group.PeerGroup` does, without sockets; peers are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from phalanx.peers.codecs import Sender, decode, encode
from phalanx.peers.facts import Member, MemberView, PeerProgress, PeerState, RoundResult


@dataclass
class LocalHub:
    """What the members share."""

    lock: threading.Condition = field(default_factory=threading.Condition)
    members: dict[str, LocalGroup] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    calls: dict[int, dict[str, tuple[np.ndarray, float]]] = field(default_factory=dict)
    committed: dict[int, RoundResult] = field(default_factory=dict)
    limits: dict[int, dict[str, float]] = field(default_factory=dict)
    next_round: int = 0
    first_round: int = 0
    view_number: int = 0

    def remove(self, peer: str) -> None:
        """A peer dies: its round, if it is in one, goes on without it."""
        with self.lock:
            self.members.pop(peer, None)
            self.active.discard(peer)
            for calls in self.calls.values():
                calls.pop(peer, None)
            self.view_number += 1
            self.lock.notify_all()


class LocalGroup:
    """One member. `poison` may change what it sends, and tells nobody."""

    def __init__(self, hub: LocalHub, name: str) -> None:
        self.hub, self.id, self._said, self._provider = hub, name, PeerProgress(), None
        self.poison: Callable[[int, np.ndarray], np.ndarray] = lambda number, vector: vector
        self.before_round: Callable[[int], None] = lambda number: None
        self.pace = 0.0  # samples a second that it says it learns from
        self.has_left = False
        self.is_awaited = True  # while it fetches the state; the group learns of that with the next heartbeat only

    def join(self, addresses: Sequence[object] = (), *, timeout_s: float = 30.0, first_round: int = 0) -> MemberView:
        with self.hub.lock:
            if not self.hub.members:
                self.hub.next_round = self.hub.first_round = first_round
            self.hub.members[self.id] = self
            if self.hub.next_round == self.hub.first_round:
                self.hub.active.add(self.id)
            self.hub.view_number += 1
            self.hub.lock.notify_all()
        return self.view()

    def view(self) -> MemberView:
        members = tuple(
            Member(id=one, name=one, address=("local", 1), instance=one) for one in sorted(self.hub.members)
        )
        return MemberView(number=self.hub.view_number, members=members, next_round=self.hub.next_round)

    def report(self, progress: PeerProgress) -> None:
        self._said = progress

    def progress(self) -> dict[str, PeerProgress]:
        return {one: group._said for one, group in list(self.hub.members.items())}

    def average(
        self,
        round_number,
        vector,
        weight,
        codec="fp32",
        *,
        timeout_s=60.0,
        quorum=None,
        grace_s=None,
        weight_limits=None,
    ) -> RoundResult:
        assert not self.has_left
        self.before_round(round_number)
        hub = self.hub
        # No honest peer learns from more than it was dealt, as every other peer derives it too.
        assert weight_limits is None or weight <= weight_limits.get(self.id, 0.0), (round_number, weight, weight_limits)
        if weight_limits is not None:
            with hub.lock:
                assert hub.limits.setdefault(round_number, dict(weight_limits)) == weight_limits, round_number
        with hub.lock:
            if self.id not in hub.members:
                return RoundResult(round_number=round_number, committed=False, behind=True)
            if round_number in hub.committed:
                return _fitting(hub.committed[round_number], vector)
            if hub.committed and round_number < hub.next_round:
                return RoundResult(round_number=round_number, committed=False, behind=True)
            hub.active.add(self.id)
            calls = hub.calls.setdefault(round_number, {})
            sent = np.array(vector)
            if isinstance(codec, Sender):  # its own share is lost of, as on the wire; sums are exact here
                sent = codec.outgoing(sent)
                on_wire = decode(codec.codec, encode(codec.codec, sent, codec.top_share), sent.size, codec.top_share)
                codec.settle(sent - on_wire, np.zeros_like(sent))
                sent = on_wire
            calls[self.id] = (self.poison(round_number, sent), float(weight))
            hub.lock.notify_all()

            def is_ready() -> bool:
                ready = len(calls) >= quorum if quorum else hub.active <= set(calls)
                return round_number in hub.committed or ready or self.id not in hub.members

            if not hub.lock.wait_for(is_ready, timeout=timeout_s):
                return RoundResult(round_number=round_number, committed=False, reason="timeout")
            if self.id not in hub.members:
                return RoundResult(round_number=round_number, committed=False, behind=True)
            if round_number not in hub.committed:
                hub.committed[round_number] = _mean_of(round_number, calls)
                paces = {one: hub.members[one].pace for one in calls if one in hub.members and hub.members[one].pace}
                hub.committed[round_number] = replace(hub.committed[round_number], paces=paces)
                hub.next_round = round_number + 1
                hub.lock.notify_all()
            return _fitting(hub.committed[round_number], vector)

    def serve_state(self, provider: Callable[[], PeerState | None]) -> None:
        self._provider = provider

    def expect_values(self, most_values: int) -> None:
        self.most_values = most_values

    def fetch_state(self, into, *, timeout_s: float = 600.0, most_bytes=None) -> int:
        if not self.is_awaited:
            with self.hub.lock:
                self.hub.active.discard(self.id)
                self.hub.lock.notify_all()
        for group in list(self.hub.members.values()):
            if group is not self and group._provider is not None and (state := group._provider()) is not None:
                assert most_bytes is None or state.tensors.keys() == most_bytes.keys()
                for name, data in state.tensors.items():
                    assert most_bytes is None or len(data) <= most_bytes[name]
                    into(name, data)
                return state.round_number
        raise AssertionError("nobody has a state")

    def leave(self) -> None:
        self.has_left = True
        self.hub.remove(self.id)

    def close(self) -> None:
        self.hub.remove(self.id)


def _fitting(result: RoundResult, sent: np.ndarray) -> RoundResult:
    """The result for a member that sent a vector: of another length it is none of its."""
    if result.vector is None or len(result.vector) == len(sent):
        return result
    return RoundResult(round_number=result.round_number, committed=False, behind=True, reason="another length")


def _mean_of(number: int, calls: dict[str, tuple[np.ndarray, float]]) -> RoundResult:
    lengths = [len(vector) for vector, _ in calls.values()]
    length = max(set(lengths), key=lambda one: (lengths.count(one), one))
    dropped = {one: "its update is not finite" for one, (vector, _) in calls.items() if not np.isfinite(vector).all()}
    dropped |= {one: "its update has another length" for one, (vector, _) in calls.items() if len(vector) != length}
    kept = {one: call for one, call in sorted(calls.items()) if one not in dropped}
    total = sum(weight for _, weight in kept.values())
    vector = None
    if total:
        vector = sum(one * (weight / total) for one, weight in kept.values() if weight)
        vector = np.asarray(vector, dtype=next(iter(kept.values()))[0].dtype)
    return RoundResult(
        round_number=number,
        committed=True,
        vector=vector,
        members_counted=tuple(one for one, (_, weight) in kept.items() if weight),
        weights={one: weight for one, (_, weight) in kept.items()},
        dropped=dropped,
    )
