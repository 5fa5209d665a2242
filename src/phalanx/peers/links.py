"""Connections to the other members, kept up: one for control, which carries heartbeats, and one for values.

Two, so that a heartbeat never waits behind megabytes. Between two members the one that cannot be reached dials, and
otherwise the one with the higher id: never both.
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
        self.absent: set[str] = set()  # nobody listens at its address any more
        self._parted: set[str] = set()  # sent away for good: nobody dials them
        self._transport, self._routes, self._heartbeat_s = transport, routes, heartbeat_s
        self._on_message, self._on_up, self._on_down, self._on_refused = on_message, on_up, on_down, on_refused
        self._dialing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def table(self, purpose: str) -> dict[str, PeerConnection]:
        """Of control or data."""
        return self.control if purpose == "control" else self.data

    def address_of(self, member: Member) -> Address:
        """Where to dial a member."""
        return self._routes.get(member.id, member.address)

    def maintain(self, me: Member, view: MemberView) -> None:
        """Dial whom this side has to dial and has no connection to; called at every heartbeat."""
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
        """Take a connection into the table and read it until it ends."""
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
            pass  # the end, or bytes that no peer sends: both end the connection
        finally:
            connection.abort()
            if table.get(peer) is connection:
                del table[peer]
                if purpose == "control":
                    self.lost_at.setdefault(peer, time.monotonic())
                self._on_down(peer, purpose)

    async def data_link(self, peer: str, timeout_s: float) -> PeerConnection:
        """The data connection to a peer, waited for; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while (found := self.data.get(peer)) is None or not found.is_open:
                self._changed.clear()
                await self._changed.wait()
            return found

    def post(self, peer: str, message: PeerMessage, data: bytes = b"") -> None:
        """A control message, where there is a connection."""
        if (connection := self.control.get(peer)) is not None:
            connection.post(message, data)

    def drop(self, peer: str) -> None:
        """End both connections."""
        for table in (self.control, self.data):
            if (connection := table.get(peer)) is not None:
                connection.abort()

    def part(self, peer: str, message: PeerMessage, data: bytes, *, within_s: float) -> None:
        """End both connections for good; the peer is told why, as far as it reads it `within_s`."""
        self._parted.add(peer)
        control = self.control.pop(peer, None)  # nothing more is said to it
        self.lost_at.setdefault(peer, time.monotonic())
        if control is not None:
            control.part(message, data, within_s=within_s)
        self.drop(peer)

    async def probe(self, member: Member) -> None:
        """Find out whether a process still listens where a member did; the side that does not dial learns it so."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                _, writer = await asyncio.open_connection(*self.address_of(member))
            writer.transport.abort()
        except ConnectionRefusedError:
            self.absent.add(member.id)
        except (OSError, TimeoutError):
            pass  # nothing is known of it: silence decides

    async def close(self) -> None:
        """End all of them and what dials."""
        tasks = list(self._dialing.values())
        for task in tasks:
            task.cancel()
        for peer in {*self.control, *self.data}:
            self.drop(peer)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dial(self, member: Member, purpose: str) -> None:
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
    if me.client_only != other.client_only:
        return me.client_only
    return not me.client_only and me.id > other.id
