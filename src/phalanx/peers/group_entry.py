"""Entering and leaving a group: found it, join through a member, admit newcomers, rejoin after an eviction."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.errors import UserError, mistake
from phalanx.io.values import printable
from phalanx.peers import messages as say
from phalanx.peers.allowlist import MOST_LIST_BYTES, AllowList
from phalanx.peers.facts import Address, Member, MemberView
from phalanx.peers.frames import PeerConnection
from phalanx.peers.identity import NAME
from phalanx.peers.tls_transport import NoWelcomeError, first_refusal, unknown_key, unreachable

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode


# A peer that requests a result again and again cannot keep another from leaving for longer.
MAX_HAND_OVER_S = 600.0


class GroupEntry:
    """Entering and leaving of one peer."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.known_addresses: list[Address] = []
        self.left = False  # a view without this peer was formed, as it requested
        self.rejoining: asyncio.Task[None] | None = None

    def found(self, first_round: int) -> None:
        """Found a new group with this peer as the only member."""
        if self._node.settings.client_only:
            fix = "found the group with a peer that accepts connections"
            raise mistake("join", "a client-only peer cannot found a group", fix=fix)
        view = MemberView(
            number=1,
            members=(self._node.member,),
            next_round=first_round,
            first_round=first_round,
            history=secrets.token_hex(8),
        )
        self._node.views.install(say.NextView(view=view))

    async def join(self, addresses: Sequence[Address], timeout_s: float) -> None:
        """Join through one of the addresses, repeatedly until `timeout_s`; raises as `PeerGroup.join` documents."""
        self.known_addresses = list(dict.fromkeys([*addresses, *self.known_addresses]))
        why: dict[Address, str] = {}
        refusals: list[BaseException] = []
        unwelcome: dict[Address, int] = {}
        is_reported = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    refusals.clear()
                    for address in list(addresses):
                        try:
                            if await self._join_through(address):
                                return
                        except UserError as error:
                            refusals.append(error)
                        except NoWelcomeError:
                            unwelcome[address] = unwelcome.get(address, 0) + 1
                            # A peer that dies ends the connection once, a peer that refuses the key each time.
                            if unwelcome[address] >= 3:
                                refusals.append(unknown_key(address, self._node.identity.name))
                        except (OSError, TimeoutError, ValueError) as error:
                            why[address] = printable(str(error) or type(error).__name__, most=100)
                    if why and not refusals and not self._node.view.number and not is_reported:
                        is_reported = True
                        tried = "; ".join(f"{printable(host)}:{port}: {reason}" for (host, port), reason in why.items())
                        self._node.tell("no-answer", f"no peer of the run answers yet ({tried}); asking again")
                    if len(refusals) == len(addresses) and (refusal := first_refusal(refusals)):
                        raise refusal
                    await asyncio.sleep(self._node.settings.heartbeat_s)
        except TimeoutError:
            raise first_refusal(refusals) or unreachable(list(addresses), why) from None

    async def _join_through(self, address: Address) -> bool:
        """Ask the member at `address`, follow it to the leader, and wait for the view; return True once it has this
        peer.
        """
        # Several redirects, because the leader may change in the meantime.
        for _ in range(4):
            connection = await self._node.transport.dial(address, "join")
            try:
                connection.post(say.Join(member=self._node.member, history=self._node.view.history))
                patience_s = 4 * self._node.settings.dead_after_s + 5.0
                answer, data = await asyncio.wait_for(connection.receive(), patience_s)
                # The invitation's list lacks peers that were invited later.
                if isinstance(answer, say.AllowlistUpdate):
                    self._learn_list(data)
                    answer, _ = await asyncio.wait_for(connection.receive(), patience_s)
            finally:
                connection.abort()
            if isinstance(answer, say.Install) and answer.proposal.view.member(self._node.me):
                return self._node.views.install(answer.proposal)
            if isinstance(answer, say.PeerRefusal):
                raise mistake(f"peer at {printable(address[0])}:{address[1]}", printable(answer.what), fix=answer.fix)
            if not isinstance(answer, say.PeerRedirect):
                return False
            address = self._node.settings.routes.get(answer.leader, (answer.host, answer.port))
        return False

    def _learn_list(self, data: bytes) -> None:
        """Take over a newer allowlist of the same owner before this peer is a member."""
        if len(data) > MOST_LIST_BYTES:
            return
        allowed = self._node.transport.allowed
        self._node.set_allowed(
            AllowList.from_json(json.loads(data), where="allowlist", owner=allowed.owner_fingerprint)
        )

    async def on_join(self, connection: PeerConnection) -> None:
        """Answer a newcomer: admit it if this peer leads, else redirect it to the leader or ask it to wait."""
        message, _ = await asyncio.wait_for(connection.receive(), self._node.settings.dead_after_s)
        if not isinstance(message, say.Join) or message.member.id != connection.peer:
            raise ValueError("a join for somebody else")
        member = message.member
        if member.instance != connection.instance or not _is_member(member):
            raise ValueError("a join with impossible facts")
        if reason := self._node.excluded.get(member.id):
            await connection.send(
                say.PeerRefusal(what=f"excluded by a vote: {reason}"[:500], fix="ask the run's owner")
            )
            await connection.close()
            return
        leader = self._node.view.member(self._node.view.leader)
        if leader is None or self._node.closing or self._node.views.is_stuck:
            await connection.send(say.Wait())
        elif leader.id == self._node.me:
            installed = await self._node.views.admit(member, is_new=message.history != self._node.view.history)
            await connection.send(say.Install(proposal=installed) if installed else say.Wait())
        else:
            host, port = leader.address
            await connection.send(say.AllowlistUpdate(), json.dumps(self._node.transport.allowed.to_json()).encode())
            await connection.send(say.PeerRedirect(leader=leader.id, host=host, port=port))
        await connection.close()

    def evicted(self, why: str) -> None:
        """Rejoin the group, which continued without this peer, as soon as it answers; unless this peer is leaving."""
        if self._node.me in self._node.leaving:
            self.left = True
        if self.rejoining is not None or self._node.closing or self._node.me in self._node.leaving:
            return
        self._node.tell("evicted", why)
        node = self._node
        addresses = [node.links.address_of(member) for member in node.view.members if member.id != node.me]
        addresses = [*addresses, *self.known_addresses]

        async def rejoin() -> None:
            while not self._node.closing:
                try:
                    await self.join(list(dict.fromkeys(addresses)), 60.0)
                    node.tell("rejoined", f"back in view {node.view.number}, next round {node.view.next_round}")
                    break
                except UserError as error:
                    self._node.tell("refused", str(error))
                    self._node.rounds.fail_pending(str(error), behind=True)
                    break
                except Exception as error:
                    self._node.tell("refused", f"cannot rejoin yet: {error}")
            self.rejoining = None

        self.rejoining = asyncio.get_running_loop().create_task(rejoin())

    @property
    def is_rejoining(self) -> bool:
        """True while this peer tries to come back after an eviction."""
        return self.rejoining is not None

    async def leave(self) -> None:
        """Announce that this peer leaves, and wait until a view without it is formed, at most `dead_after_s`."""
        await self._hand_over()
        self._node.leaving.add(self._node.me)
        for connection in self._node.links.control.values():
            connection.post(say.Leaving())
        self._node.views.consider(self._node.suspects(), set())
        deadline = time.monotonic() + self._node.settings.dead_after_s
        while time.monotonic() < deadline and not self.left:
            if self._node.view.member(self._node.me) is None or len(self._node.view.members) < 2:
                return
            await asyncio.sleep(min(0.05, self._node.settings.heartbeat_s))

    async def _hand_over(self) -> None:
        """Wait until another member has the last committed result, for as long as bytes are sent to one.

        In a view of two, the member with the lower id commits a round alone. If it left before the other had the
        result, the other could neither repeat the round nor fetch the result or the state from any peer.
        """
        node, moved_bytes = self._node, -1
        end = time.monotonic() + MAX_HAND_OVER_S
        deadline = 0.0
        while node.rounds.committed >= node.view.first_round:
            remaining = set(node.view.ids) - node.suspects() - node.leaving - node.revoked - {node.me}
            if not remaining or any(node.committed.get(peer, -1) >= node.rounds.committed for peer in remaining):
                return
            links = [link for peer in remaining if (link := node.links.data.get(peer)) is not None]
            if (sent_bytes := sum(link.moved_bytes()[0] for link in links)) != moved_bytes:
                moved_bytes, deadline = sent_bytes, min(end, time.monotonic() + node.settings.dead_after_s)
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(min(0.05, node.settings.heartbeat_s))


def _is_member(member: Member) -> bool:
    """Return True if the facts that a newcomer states of itself are possible; they are passed on to all members."""
    link = member.bandwidth
    fast = link is None or (0.0 < link.up_mbps < 1e9 and 0.0 < link.down_mbps < 1e9)
    host, port = member.address
    reachable = 0 < len(host) <= 253 and host.isascii() and host.isprintable() and 0 < port < 2**16
    return bool(NAME.fullmatch(member.name)) and fast and reachable and 0 < len(member.instance) <= 32
