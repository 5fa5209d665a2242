"""View changes: the conditions for a new view, this peer's candidature, and its answers to other candidates."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from phalanx.errors import mistake
from phalanx.peers import messages as say
from phalanx.peers.facts import Member
from phalanx.peers.messages import NextView, PeerMessage
from phalanx.peers.view_agreement import Acceptor, choose_proposal, may_decide

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode


class _Ballot:
    """Answers to a candidature of this peer."""

    def __init__(self, ballot: say.Ballot, deciders: set[str] | None = None) -> None:
        self.ballot = ballot
        self.deciders = deciders  # peers that must all agree; None: a majority of the view
        self.promises: dict[str, say.Promise] = {}
        self.agreed: set[str] = set()
        self.is_lost = False
        # Recipients and content of the last request.
        self.asked: tuple[set[str], PeerMessage] | None = None
        self.changed = asyncio.Event()


class ViewKeeper:
    """The acceptor of the current view, and this peer's candidature when it is its turn."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.acceptor = Acceptor(node.view)
        self.installed: NextView | None = None
        self.forced: NextView | None = None  # the last view that was formed without a majority
        self.is_stuck = False  # too few members are alive to decide anything
        self._joining: dict[str, tuple[Member, bool, asyncio.Future[NextView | None]]] = {}
        self._ballot: _Ballot | None = None
        self._highest = 0  # counter of the highest ballot in this view
        self._task: asyncio.Task[None] | None = None

    def consider(self, suspects: set[str], complained: set[str]) -> None:
        """Start a candidature if a member is gone, leaves or wants to join, and this peer is the one to do it."""
        node = self._node
        view, leaving = node.view, node.leaving | node.revoked
        if view.member(node.me) is None or node.is_revoked:
            return
        alive = set(view.ids) - suspects - node.revoked
        stuck = not self._decides(alive)
        if stuck and not self.is_stuck:
            remedy = "rounds wait until more return; phalanx peers go-on-alone RUN gives up the lost ones"
            node.tell("no-majority", f"{self._describe_lost(suspects)}: {remedy}")
        self.is_stuck = stuck
        reachable = [member.id for member in view.members if not member.client_only and member.id in alive]
        stays = [peer for peer in reachable if peer not in leaving] or reachable
        needed = suspects | complained | (leaving & set(view.ids)) | set(self._joining)
        if stuck or not stays or min(stays) != node.me or not (needed or self.acceptor.is_frozen):
            return
        if view.ids == (node.me,) and not self._joining:
            return
        if self._task is None or self._task.done():
            self._task = node.spawn(self._change(suspects, complained))

    def _decides(self, present: set[str]) -> bool:
        return may_decide(self._node.view.ids, present, self._node.revoked)

    async def look_after(self, peer: str) -> None:
        """Decide on a member whose connection has ended as soon as possible, without waiting for a heartbeat."""
        node = self._node
        member = node.view.member(peer)
        if member is None or peer in node.leaving:
            return
        began = time.monotonic()
        if not member.client_only:
            await node.links.probe(member)
        for after_s in (node.settings.heartbeat_s, node.settings.reconnect_s):
            await asyncio.sleep(max(0.0, began + after_s - time.monotonic()) + 0.01)
            if peer in (suspects := node.suspects()) and not node.joining.is_rejoining:
                self.consider(suspects, set())
                return

    def _describe_lost(self, suspects: set[str]) -> str:
        node, view = self._node, self._node.view
        voters = set(view.ids) - node.revoked
        lost = ", ".join(sorted(node.name_of(peer) or peer for peer in suspects & voters))
        return f"{len(voters - suspects)} of {len(voters)} peers are left, which is no majority (lost: {lost})"

    async def go_on_without_lost(self) -> None:
        """Form a view without a majority, as `PeerGroup.go_on_without_lost` documents.

        The new view has a new history, so that it is never compared with views of the old one.
        """
        node, suspects = self._node, self._node.suspects() | self._node.revoked
        if node.view.member(node.me) is None or self._decides(set(node.view.ids) - suspects):
            raise mistake("peers", "a majority of the peers is here: nobody has to be given up")
        if all(member.client_only for member in node.view.members if member.id not in suspects):
            raise mistake("peers", "no peer that accepts connections is left", fix="wait until one returns")
        text = self._describe_lost(suspects)
        before = node.view.history
        if self._task is not None and not self._task.done():
            await self._task
        await self._change(suspects, set(), is_forced=True)
        if node.view.history == before:
            raise mistake("peers", "the peers that are left did not all agree", fix="try again")
        node.tell("forced", f"{text}: they go on alone, as was asked for at {node.identity.name}")

    async def admit(self, member: Member, *, is_new: bool) -> NextView | None:
        """Admit a newcomer with the next view, and return that; None if it did not come about in time."""
        future: asyncio.Future[NextView | None] = asyncio.get_running_loop().create_future()
        older = self._joining.get(member.id)
        if older is not None and not older[2].done():
            older[2].set_result(None)
        self._joining[member.id] = (member, is_new, future)
        self.consider(self._node.suspects(), set())
        try:
            return await asyncio.wait_for(future, 4 * self._node.settings.dead_after_s)
        except TimeoutError:
            return None
        finally:
            if self._joining.get(member.id, (None, None, None))[2] is future:
                del self._joining[member.id]

    async def _change(self, suspects: set[str], complained: set[str], *, is_forced: bool = False) -> None:
        """Run one candidature: collect promises, propose, collect agreement, and install the view.

        With `is_forced` the remaining members are too few for a majority, and all of them must agree instead.
        """
        node, view = self._node, self._node.view
        self._highest += 1
        voters = set(view.ids) - suspects - complained - node.revoked
        candidature = self._ballot = _Ballot((self._highest, node.me), deciders=voters if is_forced else None)
        self._send(voters, say.Prepare(view_number=view.number, ballot=candidature.ballot))
        # A newcomer may have the id of a member: of its earlier process, which no longer answers.
        await self._collect(candidature, lambda: voters - set(self._joining) - {node.me} <= set(candidature.promises))
        # After a failure a random pause, so that two candidates do not reject each other again and again.
        if not self._may_go_on(candidature, set(candidature.promises)):
            await asyncio.sleep(random.uniform(0.0, node.settings.heartbeat_s))
            return
        joining = [member for member, _, _ in self._joining.values()]
        # Without suspects: those that promised are alive, and the others are left out because they did not promise.
        leaving = node.leaving | node.revoked | complained
        proposal = choose_proposal(
            view, candidature.promises, joining=joining, leaving=leaving - {newcomer.id for newcomer in joining}
        )
        promised = set(candidature.promises)
        if is_forced:
            members = tuple(member for member in proposal.view.members if member.id in promised)
            own = replace(proposal.view, members=members, history=secrets.token_hex(8))
            proposal = msgspec.structs.replace(proposal, view=own, forced_from=view.history)
        if not proposal.view.leader:
            return
        self._send(promised, say.Propose(view_number=view.number, ballot=candidature.ballot, proposal=proposal))
        await self._collect(candidature, lambda: self._may_go_on(candidature, candidature.agreed))
        if not self._may_go_on(candidature, candidature.agreed):
            await asyncio.sleep(random.uniform(0.0, node.settings.heartbeat_s))
            return
        for peer in {*view.ids, *proposal.view.ids} - {node.me}:
            node.links.post(peer, say.Install(proposal=proposal))
        self.install(proposal)

    def _may_go_on(self, mine: _Ballot, present: set[str]) -> bool:
        """Return True if a candidature is still valid and the peers in `present` are enough to decide it."""
        enough = self._decides(present) if mine.deciders is None else mine.deciders <= present
        # `install` sets `_ballot` to None, which ends the candidature.
        return self._ballot is mine and not mine.is_lost and enough

    async def _collect(self, mine: _Ballot, is_enough: object) -> None:
        """Wait until `is_enough()` returns True, the candidature is lost, or `dead_after_s` has passed."""
        assert callable(is_enough)
        try:
            async with asyncio.timeout(self._node.settings.dead_after_s):
                while not mine.is_lost and self._ballot is mine and not is_enough():
                    mine.changed.clear()
                    await mine.changed.wait()
        except TimeoutError:
            pass  # the answers that have arrived by now count

    def greet(self, peer: str) -> None:
        """Repeat the last request of a candidature on a new connection, for a peer that could not be reached before."""
        if self._ballot is not None and self._ballot.asked is not None and peer in self._ballot.asked[0]:
            self._node.links.post(peer, self._ballot.asked[1])

    def _send(self, peers: set[str], message: say.Prepare | say.Propose) -> None:
        if self._ballot is not None:
            self._ballot.asked = (peers, message)
        for peer in sorted(peers - {self._node.me}):
            self._node.links.post(peer, message)
        if self._node.me in peers:
            self.on_message(self._node.me, message)

    def on_message(self, peer: str, message: PeerMessage) -> None:
        """Handle a message of the agreement, as acceptor and as candidate."""
        assert isinstance(message, say.Prepare | say.Promise | say.Nack | say.Propose | say.Agreed)
        node = self._node
        if message.view_number != node.view.number:
            if message.view_number < node.view.number and self.installed:
                node.links.post(peer, say.Install(proposal=self.installed))
            return
        self._highest = max(self._highest, message.ballot[0])
        if isinstance(message, say.Prepare):
            self._reply(peer, self._on_prepare(peer, message))
        elif isinstance(message, say.Propose):
            self._reply(peer, self.acceptor.propose(message))
        elif self._ballot is not None and message.ballot == self._ballot.ballot:
            if isinstance(message, say.Promise):
                self._ballot.promises[peer] = message
            elif isinstance(message, say.Agreed):
                self._ballot.agreed.add(peer)
            else:
                self._ballot.is_lost = True
                self._highest = max(self._highest, message.promised[0] if message.promised else 0)
            self._ballot.changed.set()

    def _on_prepare(self, peer: str, message: say.Prepare) -> say.Promise | say.Nack:
        """Answer a candidate with a promise; reject it if it is not the leader and the leader is alive and stays."""
        node = self._node
        leader = node.view.leader
        # While the leader is alive no other member may freeze the view: one bad link must not stop the group.
        is_gone = leader in node.suspects() or (leader in node.links.absent and leader not in node.links.control)
        leads = not is_gone and leader not in node.leaving | node.revoked and not (leader == node.me and node.closing)
        if peer != leader and leads:
            return say.Nack(view_number=node.view.number, ballot=message.ballot, promised=self.acceptor.promised)
        committed, accepted = node.rounds.committed, node.rounds.accepted
        return self.acceptor.prepare(message, committed=committed, accepted=accepted)

    def _reply(self, peer: str, answer: PeerMessage) -> None:
        if peer == self._node.me:
            self.on_message(peer, answer)
        else:
            self._node.links.post(peer, answer)

    def on_install(self, proposal: NextView) -> None:
        """Install a decided view that any member sent, if it is newer; rejoin if this peer is not in it."""
        node, view = self._node, proposal.view
        if proposal.forced_from and proposal.forced_from == node.view.history:
            self._on_forced(proposal)
            return
        if view.history != node.view.history or view.number <= node.view.number:
            return
        if (member := view.member(node.me)) is not None and member.instance == node.instance:
            self.install(proposal)
        else:
            node.joining.evicted(f"view {view.number} was formed without this peer")

    def _on_forced(self, proposal: NextView) -> None:
        """Handle a view that some members formed without a majority.

        A peer in it installs it unless it sees a majority itself. Members that were left out rejoin, unless they are
        more than half of the view: then they continue the run, without those that formed the new view.
        """
        node, view = self._node, self._node.view
        excluded = set(view.ids) - set(proposal.view.ids)
        if node.me not in excluded:
            if self.is_stuck:
                self.install(proposal)
        elif 2 * len(excluded) > len(view.ids):  # more than half were given up: they continue the run
            node.leaving |= set(proposal.view.ids)
            self.consider(node.suspects(), set())
        else:
            node.joining.evicted("the others went on without this peer, as was asked for there")

    def install(self, proposal: NextView) -> bool:
        """Switch to a decided view, and inform node, rounds and leader; return True if this peer is in it."""
        node, before = self._node, self._node.view
        view = proposal.view
        if view.history == before.history and view.number <= before.number:
            return before.member(node.me) is not None
        if before.number and view.history not in (before.history, "") and proposal.forced_from != before.history:
            # This peer may have committed rounds that the others do not have since they gave it up.
            node.rounds.fetch_first("the group went on from another state than this peer's")
        node.view, self.installed = view, proposal
        self.forced = proposal if proposal.forced_from else self.forced
        if self._ballot is not None:
            self._ballot.changed.set()  # wakes a candidature in the old view, which then ends
        self.acceptor, self._ballot, self._highest, self.is_stuck = Acceptor(view), None, 0, False
        node.leaving &= {*view.ids} | {node.me}
        for member in view.members:
            if before.member(member.id) is None:
                node.tell("joined", f"{member.name} is a member since view {view.number}", peer=member.id)
                node.leaving.discard(member.id)
        for member in before.members:
            if view.member(member.id) is None:
                node.tell("left", f"{member.name} is no member since view {view.number}", peer=member.id)
        text = f"view {view.number}: {len(view.members)} members, next round {view.next_round}"
        node.tell("view", text, members=float(len(view.members)))
        for peer, (member, is_new, future) in list(self._joining.items()):
            admitted = view.member(peer)
            if admitted is not None and admitted.instance == member.instance and not future.done():
                future.set_result(proposal)
                del self._joining[peer]
                if is_new and view.next_round > view.first_round:
                    node.syncing.add(peer)  # a newcomer has to fetch the state first
        if before.member(node.me) is None and view.next_round > view.first_round and before.history != view.history:
            node.syncing.add(node.me)
        node.leader.on_view()
        node.view_changed()
        node.rounds.on_view(proposal)
        return view.member(node.me) is not None
