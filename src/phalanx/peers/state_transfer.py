"""The state for a newcomer: a list of tensors with digests, then their bytes; from the nearest peer that has it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.peers.facts import PeerState
from phalanx.peers.frames import MOST_DATA_BYTES, PeerConnection
from phalanx.peers.messages import Manifest, ResultForgotten, StateBlock, StateRequest, TensorFacts
from phalanx.peers.node_settings import MOST_STATE_BYTES

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

BLOCK_BYTES = 2**20
STALL_S = 30.0  # without a block, after which another peer is asked
# A name is a key, never a path: no root, no way up, nothing that a shell or a terminal reads otherwise.
TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,299}")


class BadState(Exception):
    """A peer's state is not what it said, or cannot be."""


def is_tensor_name(name: str) -> bool:
    """Whether a name can be a tensor's.

    >>> [is_tensor_name(one) for one in ("layers.0/w", "../x", "/etc/passwd", "a//b", "")]
    [True, False, False, False, False]
    """
    parts = name.split("/")
    return bool(TENSOR_NAME.fullmatch(name)) and all(part not in ("", ".", "..") for part in parts)


async def serve_state_to(
    connection: PeerConnection, provider: Callable[[], PeerState | None] | None, served: Callable[[str, int], None]
) -> None:
    """Answer one newcomer."""
    request, _ = await asyncio.wait_for(connection.receive(), STALL_S)
    if not isinstance(request, StateRequest):
        raise ValueError("no request for the state")
    state = await asyncio.to_thread(provider) if provider is not None else None
    if state is None:
        await connection.send(ResultForgotten(round_number=0))
        await connection.close()
        return
    facts = await asyncio.to_thread(describe_state, state)
    listed = msgspec.json.encode(facts)
    if len(listed) > MOST_DATA_BYTES:
        raise ValueError("more tensors than a list of them may have")
    await connection.send(Manifest(round_number=state.round_number, tensors=len(facts)), listed)
    sent = 0
    for fact in facts:
        view = memoryview(state.tensors[fact.name])
        for at in range(0, len(view), BLOCK_BYTES):
            await connection.send(StateBlock(), bytes(view[at : at + BLOCK_BYTES]))
        sent += len(view)
    await connection.close()
    served(connection.peer, sent)


def describe_state(state: PeerState) -> list[TensorFacts]:
    """Names, sizes and digests; raises ValueError for a name that no newcomer would take."""
    if wrong := [name for name in state.tensors if not is_tensor_name(name)]:
        raise ValueError(f"{wrong[0]!r} is not a name for a tensor")
    return [
        TensorFacts(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in sorted(state.tensors.items())
    ]


def check_tensors(facts: Sequence[TensorFacts], most_bytes: Mapping[str, int] | None) -> int:
    """Bytes of a state that is offered; raises BadState unless it is what `most_bytes` allows, where that is known."""
    names, total = {fact.name for fact in facts}, sum(fact.size for fact in facts)
    if len(names) != len(facts) or total > MOST_STATE_BYTES:
        raise BadState("its list of tensors is impossible")
    if wrong := sorted(name for name in names if not is_tensor_name(name)):
        raise BadState(f"{wrong[0]!r} is not a name for a tensor")
    if most_bytes is None:
        return total
    if other := sorted(names ^ set(most_bytes)):
        raise BadState(f"its tensors are not those of this job ({other[0]} is in one of them alone)")
    for fact in facts:
        if fact.size > most_bytes[fact.name]:
            raise BadState(f"{fact.name} has {fact.size:,} bytes, in this job at most {most_bytes[fact.name]:,}")
    return total


async def fetch_state_from(node: PeerNode, into: Callable[[str, bytes], None]) -> int:
    """The newest state of the nearest peer; the next is asked where one fails."""
    tried: dict[str, str] = {}
    for _ in range(3):
        members = [one for one in node.view.members if one.id != node.me and not one.client_only]
        nearest = sorted(members, key=lambda one: (one.id in node.syncing, node.latency_s.get(one.id, 1e9), one.id))
        for member in nearest:
            try:
                address = node.links.address_of(member)
                connection = await node.transport.dial(address, "state", peer=member.id)
                try:
                    # Rounds may be committed meanwhile; older than the last ones that members keep is of no use.
                    number, size = await _receive_state(
                        connection,
                        into,
                        least_round=node.view.next_round - 2,
                        most_bytes=node.settings.limits.tensors,
                    )
                finally:
                    connection.abort()
            except (OSError, TimeoutError, ValueError, BadState, UserError) as error:
                tried[member.name] = str(error) or type(error).__name__
                continue
            node.tell("state-fetched", f"{size:,} bytes of state", peer=member.id, bytes=float(size))
            return number
        await asyncio.sleep(node.settings.heartbeat_s)
    what = "; ".join(f"{name}: {why}" for name, why in tried.items()) or "there is no other peer that can be reached"
    raise SystemFailure(Problem(where="fetch_state", what=f"no peer could give the state ({what})"))


async def _receive_state(
    connection: PeerConnection,
    into: Callable[[str, bytes], None],
    *,
    least_round: int,
    most_bytes: Mapping[str, int] | None,
) -> tuple[int, int]:
    await connection.send(StateRequest())
    answer, listed = await asyncio.wait_for(connection.receive(), 4 * STALL_S)  # it hashes all of its state first
    if isinstance(answer, ResultForgotten):
        raise BadState("it has no state to give")
    if not isinstance(answer, Manifest):
        raise BadState("it did not answer with a state")
    if answer.round_number < least_round:
        raise BadState(f"its state is of round {answer.round_number}, older than round {least_round}")
    facts = msgspec.json.decode(listed, type=list[TensorFacts])
    if len(facts) != answer.tensors:
        raise BadState("its list of tensors is impossible")
    total = check_tensors(facts, most_bytes)
    for fact in facts:
        data = bytearray()
        while len(data) < fact.size:
            block, more = await asyncio.wait_for(connection.receive(), STALL_S)
            # Whole blocks: else one byte in half a minute would be progress.
            if not isinstance(block, StateBlock) or len(more) != min(BLOCK_BYTES, fact.size - len(data)):
                raise BadState("it sent other bytes than it announced")
            data += more
        if hashlib.sha256(data).hexdigest() != fact.sha256:
            raise BadState(f"tensor {fact.name} does not have the SHA-256 that was announced")
        await asyncio.to_thread(into, fact.name, bytes(data))
    return answer.round_number, total
