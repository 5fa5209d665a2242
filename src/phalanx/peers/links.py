"""Persistent connections to the other members: one for control, which carries heartbeats, and one for values.

With two connections a heartbeat never waits behind megabytes of values. Of two members, exactly one dials: a
client-only member always, otherwise the one with the higher id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from phalanx.errors import UserError
from phalanx.peers.facts import Address, Member, MemberView
from phalanx.peers.frames import PeerConnection
from phalanx.peers.messages import PeerMessage
from phalanx.peers.tls_transport import PeerTransport

Handler = Callable[[PeerConnection, PeerMessage, bytes], Awaitable[None]]


class PeerLinks:
    """Control and data connections by peer id."""

    def __init__(
        self,
        transport: PeerTransport,
        *,
        on_message: dict[str, Handler],
        on_up: Callable[[str, PeerConnection], None],
        on_down: Callable[[str, str], None],
        on_refused: Callable[[str, str], None],
        routes: Mapping[str, Address],
        heartbeat_s: float,
    ) -> None:
        self.control: dict[str, PeerConnection] = {}
        self.data: dict[str, PeerConnection] = {}
        self.lost_at: dict[str, float] = {}  # since when a peer has no control connection
        self.absent: set[str] = set()  # members whose address refuses connections
        self._parted: set[str] = set()  # revoked peers, which are not dialled again
        self._transport, self._routes, self._heartbeat_s = transport, routes, heartbeat_s
        self._on_message, self._on_up, self._on_down, self._on_refused = on_message, on_up, on_down, on_refused
        self._dialing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def table(self, purpose: str) -> dict[str, PeerConnection]:
        """Return the connections of a purpose, "control" or "data", by peer id."""
        return self.control if purpose == "control" else self.data

    def address_of(self, member: Member) -> Address:
        """Return the address at which a member is dialled."""
        return self._routes.get(member.id, member.address)

    def maintain(self, me: Member, view: MemberView) -> None:
        """Dial members that this side has to dial and is not connected to; called at every heartbeat."""
        for member in view.members:
            if member.id == me.id or member.id in self._parted or not _dials(me, member):
                continue
            for purpose in ("control", "data"):
                key = (member.id, purpose)
                existing = self.table(purpose).get(member.id)
                fresh = existing is not None and existing.is_open and existing.instance == member.instance
                if not fresh and key not in self._dialing:
                    self._dialing[key] = asyncio.create_task(self._dial(member, purpose))

    async def run(self, connection: PeerConnection, purpose: str) -> None:
        """Add a connection to its table, and dispatch its messages until it ends."""
        table, peer = self.table(purpose), connection.peer
        older = table.get(peer)
        table[peer] = connection
        if older is not None:
            older.abort()
        if purpose == "control":
            self.lost_at.pop(peer, None)
            self.absent.discard(peer)
            self._on_up(peer, connection)
        self._changed.set()
        try:
            while True:
                message, data = await connection.receive()
                await self._on_message[purpose](connection, message, data)
        except (ConnectionError, ValueError):
            # The connection ended, or brought bytes that no peer sends: it is closed below.
            pass
        finally:
            connection.abort()
            if table.get(peer) is connection:
                del table[peer]
                if purpose == "control":
                    self.lost_at.setdefault(peer, time.monotonic())
                self._on_down(peer, purpose)

    async def data_link(self, peer: str, timeout_s: float) -> PeerConnection:
        """Wait for the data connection to a peer and return it; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while (connection := self.data.get(peer)) is None or not connection.is_open:
                self._changed.clear()
                await self._changed.wait()
            return connection

    def post(self, peer: str, message: PeerMessage, data: bytes = b"") -> None:
        """Send a control message, if there is a connection."""
        if (connection := self.control.get(peer)) is not None:
            connection.post(message, data)

    def drop(self, peer: str) -> None:
        """End both connections to a peer."""
        for table in (self.control, self.data):
            if (connection := table.get(peer)) is not None:
                connection.abort()

    def part(self, peer: str, message: PeerMessage, data: bytes, *, within_s: float) -> None:
        """End both connections to a peer for good; `message` and `data`, its last frame, state the reason.

        The peer has `within_s` seconds to read it.
        """
        self._parted.add(peer)
        control = self.control.pop(peer, None)  # no further message is sent to it
        self.lost_at.setdefault(peer, time.monotonic())
        if control is not None:
            control.part(message, data, within_s=within_s)
        self.drop(peer)

    async def probe(self, member: Member) -> None:
        """Check that a process still listens at a member's address, and mark the member as absent if not.

        A member that is dialled, and does not dial, learns only so that the other process is gone.
        """
        try:
            async with asyncio.timeout(self._heartbeat_s):
                _, writer = await asyncio.open_connection(*self.address_of(member))
            writer.transport.abort()
        except ConnectionRefusedError:
            self.absent.add(member.id)
        except (OSError, TimeoutError):
            pass  # no finding: the failure detector decides by the member's silence

    async def close(self) -> None:
        """End all connections and attempts to connect."""
        tasks = list(self._dialing.values())
        for task in tasks:
            task.cancel()
        for peer in {*self.control, *self.data}:
            self.drop(peer)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dial(self, member: Member, purpose: str) -> None:
        """Dial a member and run the connection; after a failure wait one heartbeat before `maintain` may dial again."""
        key = (member.id, purpose)
        try:
            connection = await self._transport.dial(self.address_of(member), purpose, peer=member.id, timeout_s=5.0)
        except ConnectionRefusedError:
            self.absent.add(member.id)
            await asyncio.sleep(self._heartbeat_s)
        except UserError as error:
            self._on_refused(member.id, str(error))
            await asyncio.sleep(self._heartbeat_s)
        except (OSError, TimeoutError):
            await asyncio.sleep(self._heartbeat_s)
        else:
            try:
                await self.run(connection, purpose)
            finally:
                connection.abort()
        finally:
            self._dialing.pop(key, None)


def _dials(me: Member, other: Member) -> bool:
    """Return True if this member is the one of the two that dials."""
    if me.client_only != other.client_only:
        return me.client_only
    return not me.client_only and me.id > other.id
