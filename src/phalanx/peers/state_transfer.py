"""Transfer of the training state to a newcomer: a list of tensors with digests, then their bytes."""

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
STALL_S = 30.0  # time without a block after which another peer is asked
# Names become keys, never paths: no absolute or parent path, no character with a meaning in shells or terminals.
TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,299}")


class BadState(Exception):
    """A peer's state differs from its announcement, or is impossible."""


def is_tensor_name(name: str) -> bool:
    """Return True for a valid name of a tensor.

    >>> [is_tensor_name(one) for one in ("layers.0/w", "../x", "/etc/passwd", "a//b", "")]
    [True, False, False, False, False]
    """
    pieces = name.split("/")
    return bool(TENSOR_NAME.fullmatch(name)) and all(piece not in ("", ".", "..") for piece in pieces)


async def serve_state_to(
    connection: PeerConnection, provider: Callable[[], PeerState | None] | None, served: Callable[[str, int], None]
) -> None:
    """Send the state to one newcomer; `served` is called with its id and the bytes sent."""
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
    """Return names, sizes and digests of a state's tensors; raises ValueError for an invalid name."""
    if invalid := [name for name in state.tensors if not is_tensor_name(name)]:
        raise ValueError(f"{invalid[0]!r} is not a name for a tensor")
    return [
        TensorFacts(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in sorted(state.tensors.items())
    ]


def check_tensors(facts: Sequence[TensorFacts], most_bytes: Mapping[str, int] | None) -> int:
    """Return the size in bytes of an offered state; raises BadState unless it fits `most_bytes`, sizes by name.

    With `most_bytes` None, only names and the total size are checked.
    """
    names, total = {fact.name for fact in facts}, sum(fact.size for fact in facts)
    if len(names) != len(facts) or total > MOST_STATE_BYTES:
        raise BadState("its list of tensors is impossible")
    if invalid := sorted(name for name in names if not is_tensor_name(name)):
        raise BadState(f"{invalid[0]!r} is not a name for a tensor")
    if most_bytes is None:
        return total
    if differing := sorted(names ^ set(most_bytes)):
        raise BadState(f"its tensors are not those of this job ({differing[0]} is in one of them alone)")
    for fact in facts:
        if fact.size > most_bytes[fact.name]:
            raise BadState(f"{fact.name} has {fact.size:,} bytes, in this job at most {most_bytes[fact.name]:,}")
    return total


async def fetch_state_from(node: PeerNode, into: Callable[[str, bytes], None]) -> int:
    """Fetch the newest state from the nearest peer, and from the next one where a peer fails; return its round number.

    Raises SystemFailure after three passes over all members.
    """
    tried: dict[str, str] = {}
    for _ in range(3):
        members = [member for member in node.view.members if member.id != node.me and not member.client_only]
        nearest = sorted(
            members, key=lambda member: (member.id in node.syncing, node.latency_s.get(member.id, 1e9), member.id)
        )
        for member in nearest:
            try:
                address = node.links.address_of(member)
                connection = await node.transport.dial(address, "state", peer=member.id)
                try:
                    # Rounds may be committed during the transfer. Members keep the results of the last rounds only
                    # (`rounds.KEPT_ROUNDS`), so an older state is useless.
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
    failures = (
        "; ".join(f"{name}: {why}" for name, why in tried.items()) or "there is no other peer that can be reached"
    )
    raise SystemFailure(Problem(where="fetch_state", what=f"no peer could give the state ({failures})"))


async def _receive_state(
    connection: PeerConnection,
    into: Callable[[str, bytes], None],
    *,
    least_round: int,
    most_bytes: Mapping[str, int] | None,
) -> tuple[int, int]:
    """Receive a state on a new connection, and pass each verified tensor to `into`; return round number and bytes.

    Raises BadState for a state older than `least_round` or other than announced.
    """
    await connection.send(StateRequest())
    # Four times the usual time: the peer computes the digests of its whole state first.
    answer, listed = await asyncio.wait_for(connection.receive(), 4 * STALL_S)
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
            block, block_bytes = await asyncio.wait_for(connection.receive(), STALL_S)
            # Full blocks only; otherwise one byte in half a minute would count as progress.
            if not isinstance(block, StateBlock) or len(block_bytes) != min(BLOCK_BYTES, fact.size - len(data)):
                raise BadState("it sent other bytes than it announced")
            data += block_bytes
        if hashlib.sha256(data).hexdigest() != fact.sha256:
            raise BadState(f"tensor {fact.name} does not have the SHA-256 that was announced")
        await asyncio.to_thread(into, fact.name, bytes(data))
    return answer.round_number, total
