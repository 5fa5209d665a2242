"""A peer's node: one event loop that handles all messages, watches which members are alive and sends heartbeats."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from phalanx.errors import UserError
from phalanx.io.values import printable
from phalanx.peers import messages as say
from phalanx.peers.allowlist import MOST_LIST_BYTES, AllowList
from phalanx.peers.facts import Address, Member, MemberView, PeerEvent, PeerProgress, PeerState, RunFacts
from phalanx.peers.frames import PeerConnection
from phalanx.peers.group_entry import GroupEntry
from phalanx.peers.identity import ID_DIGITS, PeerIdentity
from phalanx.peers.link_speed import LinkSpeed
from phalanx.peers.links import PeerLinks
from phalanx.peers.messages import PeerMessage
from phalanx.peers.node_settings import NodeSettings
from phalanx.peers.round_leader import RoundLeader
from phalanx.peers.rounds import RoundKeeper
from phalanx.peers.screening import ProgressCheck
from phalanx.peers.state_transfer import fetch_state_from, serve_state_to
from phalanx.peers.tls_transport import PeerTransport
from phalanx.peers.view_agreement import worst_complaints
from phalanx.peers.view_change import ViewKeeper

# Time that a revoked peer has to read the list; on the slowest links that takes seconds.
PARTING_S = 10.0
REVOKED = "this key was revoked by the run's owner"
EMPTY_VIEW = MemberView(number=0, members=(), next_round=0)


class PeerNode:
    """State and message handlers of one peer; all methods run on one event loop, so nothing is locked."""

    def __init__(self, identity: PeerIdentity, run: RunFacts, allowed: AllowList, settings: NodeSettings) -> None:
        self.identity, self.run, self.settings = identity, run, settings
        self.me = identity.id
        self.instance = secrets.token_hex(8)
        self.transport = PeerTransport(identity, run, allowed, self.instance)
        self.links = PeerLinks(
            self.transport,
            on_message={"control": self._on_control, "data": self._on_data},
            on_up=self._on_link_up,
            on_down=self._on_link_down,
            on_refused=self._on_refused,
            routes=settings.routes,
            heartbeat_s=settings.heartbeat_s,
        )
        self.view = EMPTY_VIEW
        self.member = Member(id=self.me, name=identity.name, address=("", 1), instance=self.instance)
        self.views = ViewKeeper(self)
        self.rounds = RoundKeeper(self)
        self.leader = RoundLeader(self)
        self.joining = GroupEntry(self)
        self.speed = LinkSpeed(self)
        self.progress: dict[str, PeerProgress] = {self.me: PeerProgress()}
        # Last committed round that each member reports in its heartbeats.
        self.committed: dict[str, int] = {}
        # Members that still fetch the state: rounds do not wait for them.
        self.syncing: set[str] = set()
        self.latency_s: dict[str, float] = {}
        self.provider: Callable[[], PeerState | None] | None = None
        self.leaving: set[str] = set()
        self.closing = False
        self._refused_by: set[str] = set()  # members that refuse this peer's key as revoked
        # Peers excluded by a vote, with the reason.
        self.excluded: dict[str, str] = dict(settings.excluded)
        self.revoked = {digest[:ID_DIGITS] for digest in allowed.revoked} | set(self.excluded)
        self.complaints: dict[tuple[str, str], float] = {}
        # By member: `sent_at` of its last heartbeat (its clock), and the time of arrival (this clock).
        self._heard: dict[str, tuple[float, float]] = {}
        # By member: instance of its process and the check of its claims, which starts anew with a new process.
        self._checks: dict[str, tuple[str, ProgressCheck]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticked_at = time.monotonic()
        self._view_since = time.monotonic()

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to listen, unless this peer is client-only, and start the heartbeat task."""
        # Placeholder of a client-only peer, which is never dialled.
        address: Address = ("0.0.0.0", 1)
        if not self.settings.client_only:
            address = await self.transport.listen(
                self.settings.listen, self._on_accept, lambda why: self.tell("refused", why)
            )
        self.member = Member(
            id=self.me,
            name=self.identity.name,
            address=self.settings.advertise or address,
            instance=self.instance,
            bandwidth=self.settings.bandwidth,
            client_only=self.settings.client_only,
        )
        self.spawn(self._tick_forever())

    async def stop(self) -> None:
        """End all tasks and connections; a waiting call of `average` returns a discarded round."""
        self.closing = True
        self.rounds.fail_pending("this peer was closed")
        tasks = [*self._tasks, *([self.joining.rejoining] if self.joining.rejoining else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()
        await self.transport.close()

    def spawn(self, coroutine: object) -> asyncio.Task[None]:
        """Start a task that is cancelled when the node stops."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def tell(self, kind: str, text: str, *, peer: str = "", round_number: int = -1, **values: float) -> None:
        """Record an event."""
        name = self.name_of(peer) if peer else ""
        self.settings.events(
            PeerEvent(
                kind=kind,
                text=printable(text),
                peer=peer,
                name=name,
                view_number=self.view.number,
                round_number=round_number,
                values=values,
            )
        )

    def name_of(self, peer: str) -> str:
        """Return the name of a peer in the view or on the allowlist, or ""."""
        if (member := self.view.member(peer)) is not None:
            return member.name
        names = (name for fingerprint, name in self.transport.fingerprints.items() if fingerprint[:ID_DIGITS] == peer)
        return next(names, "")

    # ---- links --------------------------------------------------------------------------------------------------

    async def _on_accept(self, connection: PeerConnection, hello: say.Hello) -> None:
        """Dispatch an authenticated incoming connection by its purpose."""
        if self.is_revoked:
            return
        if hello.purpose == "join":
            await self.joining.on_join(connection)
        elif hello.purpose == "state":
            await serve_state_to(connection, self.provider, self._state_served)
        else:
            await self.links.run(connection, hello.purpose)

    def link_facts(self) -> dict[str, dict[str, float]]:
        """Return statistics of the connections, as `PeerGroup.links` documents."""
        now, facts = time.monotonic(), {}
        for peer, control in self.links.control.items():
            connections = [control, *([self.links.data[peer]] if peer in self.links.data else [])]
            facts[peer] = {
                "latency_s": self.latency_s.get(peer, math.nan),
                "silent_s": now - control.heard_at,
                "sent_bytes": float(sum(connection.sent_bytes for connection in connections)),
                "received_bytes": float(sum(connection.received_bytes for connection in connections)),
            }
        return facts

    # ---- who is alive -----------------------------------------------------------------------------------------------

    def suspects(self) -> set[str]:
        """Return members of the view that have been silent for too long, or whose process is gone."""
        now, silent_ids = time.monotonic(), set()
        for member in self.view.members:
            if member.id == self.me or (member.client_only and self.settings.client_only):
                continue
            link = self.links.control.get(member.id)
            if link is not None and link.instance == member.instance:
                is_silent = now - link.heard_at > self.settings.dead_after_s
            elif member.id in self.links.lost_at:
                since = max(self.links.lost_at[member.id], self._view_since)
                is_absent = member.id in self.links.absent and now - since > self.settings.heartbeat_s
                is_silent = is_absent or now - since > self.settings.reconnect_s
            else:  # never connected in this view yet
                is_silent = now - self._view_since > self.settings.dead_after_s
            if is_silent:
                silent_ids.add(member.id)
        return silent_ids

    def view_changed(self) -> None:
        """Apply a new view: restart the time that members have to connect, and connect to them."""
        self._view_since = time.monotonic()
        departed = {*self.links.control, *self.links.data} - set(self.view.ids)
        for peer in departed:
            self.progress.pop(peer, None)
            self.committed.pop(peer, None)
        self.syncing &= set(self.view.ids)
        self.complaints.clear()
        self.links.maintain(self.member, self.view)

    async def _tick_forever(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(self.settings.heartbeat_s)

    def _tick(self) -> None:
        """Do the work of one heartbeat: connect, send heartbeats, and see if the view or a round has to change."""
        now = time.monotonic()
        late = now - self._ticked_at - self.settings.heartbeat_s
        if late > 2 * self.settings.heartbeat_s:
            # This process was stopped or starved: members are not to blame for the silence.
            for connection in self.links.control.values():
                connection.heard_at += late
            self.links.lost_at = {peer: at + late for peer, at in self.links.lost_at.items()}
            self._view_since += late
        self._ticked_at = now
        if self.view.number == 0 or self.is_revoked:
            return
        self.links.maintain(self.member, self.view)
        suspects = self.suspects()
        self._send_heartbeats(suspects, now)
        if not self.joining.is_rejoining:
            self.views.consider(suspects, self._complained(suspects, now))
            self.rounds.tick()
            self.leader.tick()

    def set_syncing(self, is_syncing: bool) -> None:
        """Set whether this peer fetches the state, so that rounds do not wait for it, and inform the others at once."""
        if is_syncing != (self.me in self.syncing):
            (self.syncing.add if is_syncing else self.syncing.discard)(self.me)
            self.send_heartbeats()

    def send_heartbeats(self) -> None:
        """Send heartbeats outside of the regular interval, when the others should know of a change at once."""
        self._send_heartbeats(self.suspects(), time.monotonic())

    def _send_heartbeats(self, suspects: set[str], now: float) -> None:
        """Send a heartbeat to every connected peer."""
        for peer, connection in self.links.control.items():
            last = self._heard.get(peer, (0.0, now))
            connection.post(
                say.PeerHeartbeat(
                    view_number=self.view.number,
                    history=self.view.history,
                    sent_at=round(now, 4),
                    echo=last[0],
                    held_s=round(now - last[1], 4),
                    progress=self.progress[self.me],
                    syncing=self.me in self.syncing,
                    suspects=sorted(suspects),
                    list_version=self.transport.allowed.version,
                    committed=self.view.next_round - 1,
                    measured_mbps=self.speed.measured_mbps,
                )
            )

    def _complained(self, suspects: set[str], now: float) -> set[str]:
        """Return members that others cannot reach though this peer can, for longer than detecting a dead peer takes."""
        old = [pair for pair, since in self.complaints.items() if now - since > self.settings.dead_after_s + 1.0]
        present = [pair for pair in old if not suspects & set(pair)]
        return set(worst_complaints(present)) - {self.me}

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _on_link_up(self, peer: str, connection: PeerConnection) -> None:
        """Greet a member on a new control connection; a revoked peer is sent the allowlist and disconnected."""
        self._heard.pop(peer, None)
        if peer in self.revoked:
            self.links.part(peer, say.AllowlistUpdate(), self._list_text(), within_s=PARTING_S)
            return
        if self.is_current(connection):
            self.views.greet(peer)
            self.leader.greet(peer)
            self.rounds.say_ready()

    def _on_link_down(self, peer: str, purpose: str) -> None:
        """Report values that may be lost, or start to check that the member is alive, and dial again."""
        if self.closing or self.is_revoked:
            return
        if purpose == "data":
            self.rounds.data_link_lost(peer)
        else:
            self.tell("lost", "its connection ended", peer=peer)
            self.spawn(self.views.look_after(peer))
        self.links.maintain(self.member, self.view)

    def _on_refused(self, peer: str, why: str) -> None:
        """Record that a dialled member refused the connection.

        This peer takes itself as revoked only if the owner or all other members refuse its key.
        """
        if self.is_revoked:
            return
        self.tell("refused", why, peer=peer)
        if REVOKED in why:
            self._refused_by.add(peer)
            owner = self.transport.allowed.owner_fingerprint[:ID_DIGITS]
            if owner in self._refused_by or self._refused_by >= set(self.view.ids) - {self.me}:
                self.revoked.add(self.me)
                self._end_as_revoked()

    def is_current(self, connection: PeerConnection) -> bool:
        """Return True if the other side is a member of this view, and still the process that was admitted."""
        member = self.view.member(connection.peer)
        return member is not None and member.instance == connection.instance

    async def _on_control(self, connection: PeerConnection, message: PeerMessage, data: bytes) -> None:
        """Dispatch a control message to the part of the node that handles it."""
        peer = connection.peer
        if isinstance(message, say.AllowlistUpdate):
            self._on_lists(data)
        elif peer in self.revoked or self.is_revoked:
            return  # a revoked peer, which may not have received the list yet
        elif isinstance(message, say.PeerHeartbeat):
            self._on_heartbeat(connection, message)
        elif not self.is_current(connection):
            # Only members of this view may send messages about it, or about its successor.
            return
        elif isinstance(message, say.Install):
            self.views.on_install(message.proposal)
        elif isinstance(message, say.Leaving):
            self.leaving.add(peer)
            self.views.consider(self.suspects(), set())
        elif isinstance(message, say.Prepare | say.Promise | say.Nack | say.Propose | say.Agreed):
            self.views.on_message(peer, message)
        elif isinstance(message, say.Ready | say.Withdraw | say.AttemptFailed | say.UpdateNorms | say.ResultDigest):
            self.leader.on_message(peer, message)
        elif isinstance(message, say.SpeedTurn | say.SpeedRequest):
            self.speed.on_message(peer, message)
        else:
            self.rounds.on_message(peer, message)

    async def _on_data(self, connection: PeerConnection, message: PeerMessage, data: bytes) -> None:
        if not isinstance(message, say.SpeedBlock):  # its bytes were counted by the kernel
            await self.rounds.on_data(connection, message, data)

    def _on_heartbeat(self, connection: PeerConnection, message: say.PeerHeartbeat) -> None:
        """Update the sender's state; send it the allowlist or view that it lacks."""
        peer, now = connection.peer, time.monotonic()
        self._heard[peer] = (message.sent_at, now)
        if message.echo:
            # `echo` is this peer's own clock, so the two clocks need not agree.
            trip = max(0.0, now - message.echo - message.held_s)
            self.latency_s[peer] = trip / 2
        if message.list_version < self.transport.allowed.version:
            connection.post(say.AllowlistUpdate(), self._list_text())
        if message.history != self.view.history or not self.is_current(connection):
            same = message.history == self.view.history and message.view_number <= self.view.number
            forced = self.views.forced is not None and message.history == self.views.forced.forced_from
            missed = self.views.forced if forced else self.views.installed if same else None
            if missed is not None:
                # The sender was left out of this view.
                connection.post(say.Install(proposal=missed))
            return
        if message.view_number < self.view.number and self.views.installed:
            connection.post(say.Install(proposal=self.views.installed))
        (self.syncing.add if message.syncing else self.syncing.discard)(peer)
        self.progress[peer] = message.progress
        self.committed[peer] = message.committed
        self.speed.on_heartbeat(peer, message.measured_mbps)
        instance, check = self._checks.get(peer, ("", None))
        if check is None or instance != connection.instance:
            check = ProgressCheck(samples_per_s=self.settings.samples_per_s)
            self._checks[peer] = connection.instance, check
        if doubt := check.doubt(message.progress, now):
            self.tell("doubtful-progress", doubt, peer=peer)
        for suspect in self.view.ids:
            pair = (peer, suspect)
            if suspect in message.suspects and suspect != self.me:
                self.complaints.setdefault(pair, now)
            else:
                self.complaints.pop(pair, None)

    @property
    def is_revoked(self) -> bool:
        """True if this peer itself was revoked or excluded; it then takes part in nothing more."""
        return self.me in self.revoked

    def _list_text(self) -> bytes:
        return json.dumps(self.transport.allowed.to_json()).encode()

    def set_allowed(self, allowed: AllowList) -> None:
        """Take over a newer list, send it to all members and to newly revoked peers, and form a view without those."""
        if not allowed.replaces(self.transport.allowed):
            return
        new = [digest[:ID_DIGITS] for digest in allowed.revoked - self.transport.allowed.revoked]
        self.revoked |= set(new)
        text = json.dumps(allowed.to_json()).encode()
        if not self.is_revoked:
            for peer in new:
                self.tell("revoked", "its key was revoked by the run's owner", peer=peer)
                self.leaving.add(peer)
                self.links.part(peer, say.AllowlistUpdate(), text, within_s=PARTING_S)
        self.transport.set_allowed(allowed)
        self.settings.keep_allowed(allowed)
        if self.is_revoked:
            self._end_as_revoked()
            return
        for connection in self.links.control.values():
            connection.post(say.AllowlistUpdate(), text)
        self.views.consider(self.suspects(), set())

    def exclude(self, peer: str, reason: str, *, round_number: int) -> None:
        """Exclude a peer after a vote: for good if this peer owns the run, else for the rest of this run."""
        if peer in self.excluded:
            return
        reason = printable(reason, most=400)
        self.excluded[peer] = reason
        self.tell("excluded", reason, peer=peer, round_number=round_number)
        if peer in self.revoked:  # the owner's list arrived before the votes
            return
        allowed = self.transport.allowed
        if peer == self.me:
            self.revoked.add(peer)
            self._end_as_revoked(f"excluded by a vote of the others: {reason}"[:500])
        elif self.identity.certificate_pem == allowed.certificates[0]:
            try:
                self.set_allowed(allowed.revoke(self.identity, peer))
            except UserError as error:  # the peer is no longer on the list
                self.tell("refused", str(error), peer=peer)
        else:
            self.revoked.add(peer)
            self.leaving.add(peer)
            self.views.consider(self.suspects(), set())

    def _end_as_revoked(self, reason: str = REVOKED) -> None:
        """Leave all rounds and connections for good, and fail the waiting call of `average` with the reason."""
        self.tell("revoked", reason, peer=self.me)
        for peer in {*self.links.control, *self.links.data}:
            self.links.drop(peer)
        self.rounds.fail_pending(reason)

    def _on_lists(self, data: bytes) -> None:
        """Take over a received allowlist, if its owner's signature is valid."""
        try:
            if len(data) > MOST_LIST_BYTES:
                raise ValueError("too long")
            owner = self.transport.allowed.owner_fingerprint
            self.set_allowed(AllowList.from_json(json.loads(data), where="allowlist", owner=owner))
        except (UserError, ValueError, RecursionError) as error:
            self.tell("refused", f"an allowlist was refused: {error}")

    # ---- state ------------------------------------------------------------------------------------------------------

    async def fetch_state(self, into: Callable[[str, bytes], None]) -> int:
        """Fetch the newest state from the nearest peer that has it; see `PeerGroup.fetch_state`."""
        self.set_syncing(True)
        number = await fetch_state_from(self, into)
        self.rounds.must_fetch = ""
        # The state includes rounds whose commit this peer did not receive.
        if number >= self.view.next_round:
            self.view = replace(self.view, next_round=number + 1)
        return number

    def _state_served(self, peer: str, size: int) -> None:
        self.tell("state-served", f"{size:,} bytes of state sent", peer=peer, bytes=float(size))
