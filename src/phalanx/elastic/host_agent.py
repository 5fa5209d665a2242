"""The agent of a host: a process in every slot, their heartbeats, and the connection to the coordinator.

One thread that never waits long: this process forks, so no other thread may run. The coordinator is notified of every
process that ends, and decides what follows. The processes themselves are in rank_slots.py.
"""

from __future__ import annotations

import random
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phalanx.elastic.channel import Address, Channel, Closed, Refused, connect
from phalanx.elastic.coordinator_memory import known_coordinator
from phalanx.elastic.coordinator_process import CoordinatorProcess
from phalanx.elastic.election import FILE, LEASE_S, RENEW_S, elected_by
from phalanx.elastic.file_election import Watched, read_sign
from phalanx.elastic.handshake import MAX_HELLO_BYTES, encode, read_secret
from phalanx.elastic.heartbeat_board import FIRST_MORE_S, MOST_SIGN_S, WATCHER_SIGN_S, WATCHERS, fold_progress
from phalanx.elastic.host_checks import HostChecks
from phalanx.elastic.local_launch import ENDED, StopSignals
from phalanx.elastic.membership import HostMembership
from phalanx.elastic.rank_process import Work, find_ranks
from phalanx.elastic.rank_slots import BUILDING_LEAVES_NCCL_S, RankSlots, Slot
from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import fold_held
from phalanx.errors import Problem, SystemFailure
from phalanx.plan.plan import Plan
from phalanx.record.run import Run

TICK_S = 0.01
# Between heartbeats, unless the coordinator of many hosts asks for fewer.
BEAT_S = 0.25
# Between attempts to reach the coordinator.
RETRY_S = 0.05
# Between reads of the coordinator's address in the run folder: thousands of hosts share that disk.
DISK_S = 1.0
CONNECT_S = 2.0  # for a coordinator to answer a hello
# Hellos that a coordinator surely answers in a second: after its loss, all hosts come at once.
SHAKES_PER_S = 8192
# After so long the next agents try to start a coordinator; the first does so at once.
TURN_S = 0.5
# Without a coordinator for so long, and without becoming one, an agent gives up.
LOST_S = 60.0
# Between two signs of life of the coordinator (decide.py), unless it sends another period.
SIGN_S = MOST_SIGN_S
# If a sign of life is late by so much, the agent looks for a new coordinator.
QUIET_S = 1.5
# Between two tries to replace a coordinator that is silent, but may live.
RESPAWN_S = 10.0
# A coordinator that sends nothing for so long is disconnected; starting one may take seconds.
DEAF_S = 10.0
# If two ticks of this agent are further apart, the agent itself did not listen.
PAUSE_S = 1.0
# Times as long for one that is starting: on a busy machine, killing it would begin the start anew.
START_PATIENCE = 6
# Exit code of a process that was asked to end: 128 + SIGINT.
STOPPED = 130
# Ranks of another host that may have a replica here; an empty place costs three descriptors.
MOST_GUESTS = 64
WRONG_CALL = 2
GRACE_S = 5.0  # between SIGTERM and SIGKILL
Message = dict[str, Any]


def turn_s(place: int) -> float:
    """Return the seconds before an agent starts a coordinator; each further delay is shared by twice as many hosts.

    However many of the first hosts are lost at once, some agent's turn comes long before any agent gives up.

    >>> [turn_s(place) for place in (0, 1, 2, 3, 4, 120, 16383)]
    [0.0, 0.5, 1.0, 1.0, 1.5, 3.5, 7.0]
    """
    return TURN_S * place.bit_length()


class HostAgent:
    """The agent of one host of a run."""

    def __init__(
        self,
        run: Run,
        *,
        host: str,
        slots: int,
        address: str,
        stop_requests: StopSignals,
        by_hand: bool = False,
        election: str = "",
    ) -> None:
        self.run, self.host, self.slots, self.address, self.stop_requests = run, host, slots, address, stop_requests
        # `phalanx agent`: no coordinator waits for a report of an end before this host joined.
        self._by_hand = by_hand
        launch, job = run.launch(), run.plan()["job"]
        self._order = [str(name) for name in launch.get("hosts", ())] or [host]
        self._place = self._order.index(host) if host in self._order else len(self._order)
        self._election = election or elected_by(run)
        self._dead_after_s = float(job["fault"]["dead_after_s"])
        # Distinguishes this agent from another one of the same name.
        self._id = secrets.token_hex(8)
        self.checks = HostChecks(run, host=host, slots=slots, address=address)
        # True once any coordinator has accepted this agent.
        self._joined = False
        self.replica_store = ReplicaStore(slots, guests=max(slots, min(int(launch.get("world", slots)), MOST_GUESTS)))
        self._secret = read_secret(run.path / "secret")
        self._selector = selectors.DefaultSelector()
        self._ranks = RankSlots(
            run,
            slots,
            self._selector,
            dead_after_s=self._dead_after_s,
            joins_within_s=max(self._dead_after_s, float(job["comm"]["init_timeout_s"])),
            say=self._say,
            forget=self._forget,
        )
        self._slots, self.board = self._ranks.slots, self._ranks.board
        self._channel: Channel | None = None
        self._own = CoordinatorProcess(run, address=address, election=self._election)
        self._lost_s = self._tried_s = self._heard_s = self._ticked_s = time.monotonic()
        # Between two signs of life of the coordinator: agents whose turn to start one comes first get them sooner.
        self._most_sign_s = WATCHER_SIGN_S if self._place < WATCHERS else SIGN_S + FIRST_MORE_S
        self._sign_every_s = min(SIGN_S, self._most_sign_s)
        # The last observation of the coordinator's term file.
        self._watched = Watched(term=0, count=0, since_s=self._lost_s)
        self._looked_s = -1e9
        # Address of the coordinator, as last read from the run folder.
        self._where: Address | None = None
        self._where_term = 0  # the term of that coordinator
        self._connected_to: Address | None = None
        # The newest term of a coordinator that this agent has met: one of an older term is over.
        self._term = 0
        self._beat_s, self._beat_every_s = 0.0, BEAT_S
        self._form: Message | None = None  # the newest membership message, as the ranks get it
        self._membership: HostMembership | None = None  # the same, parsed
        self._rescue_order: Message | None = None
        # Writes a step that only memory holds, when the run failed.
        self.rescue: Callable[[Message], None] | None = None
        self._reported_stop_requests = 0
        # Of the newest membership, and of the newest that was sent "go".
        self._generation = self._went = 0
        self._reported_ready = 0
        # Ends of processes that no coordinator has been notified of.
        self._unsaid: list[Message] = []
        self._over: int | None = None

    def begin(self) -> None:
        """Start a coordinator if this is the first host.

        Called before torch is imported, so that it starts meanwhile.
        """
        if self._order[0] == self.host:
            self._spawn_coordinator()

    def look(self, plan: Plan, *, quick: bool = False) -> None:
        """Run the preflight; the problems it finds go to the coordinator with this agent's hello.

        `quick` leaves out measurements that need the machine alone: another agent on it makes them.
        """
        self.checks.look(plan, quick=quick)
        if plan.cluster.accelerator.family != "cpu":
            self._ranks.building_leaves_s = BUILDING_LEAVES_NCCL_S

    def serve(self, work: Work) -> int:
        """Run the slots until the coordinator ends the run; returns the exit code."""
        self._ranks.work = work
        try:
            while self._over is None:
                self._tick()
            return self._over
        finally:
            self.checks.end()
            self._ranks.end_ranks(0.0 if self.stop_requests.count >= 2 else GRACE_S)
            if self.rescue is not None and self._rescue_order is not None and self.stop_requests.count < 2:
                self.rescue(self._rescue_order)
            if self._channel is not None:
                self._channel.close()
            self._own.await_end()

    def _tick(self) -> None:
        self._excuse_own_pause()
        self._watch_coordinator()
        self._reach_coordinator()
        # Before there is a process to form with.
        self._report_stop_requests()
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._hear()
            else:
                self._ranks.listen(key.data)
        # Before the coordinator is notified that their processes ended.
        self._ranks.tell_left()
        self._ranks.reap()
        if not self.stop_requests.count or self._generation:
            # Otherwise a process here might let the coordinator begin a run that is asked to stop.
            self._ranks.fill()
        self._ranks.watch()
        self._tell_ready()
        self._tell_beat()

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _excuse_own_pause(self) -> None:
        """Do not count the time when this agent itself did not run (a paused machine) as silence of the coordinator."""
        now = time.monotonic()
        paused_s, self._ticked_s = now - self._ticked_s, now
        if paused_s > PAUSE_S:
            self._heard_s, self._lost_s = self._heard_s + paused_s, self._lost_s + paused_s
            self._watched = replace(self._watched, since_s=self._watched.since_s + paused_s)

    def _watch_coordinator(self) -> None:
        """Watch the connected coordinator: a silent one may be frozen, or its host may have vanished.

        A coordinator that is silent and has not renewed its term for a lease has lost it. When it is this agent's turn
        it starts another one, which waits for the rest of the lease; where another agent was faster, it connects to
        that coordinator.
        """
        if self._channel is None:
            return
        now = time.monotonic()
        silent_s = now - self._heard_s
        quiet_s = silent_s - self._sign_every_s - QUIET_S
        if now - self._looked_s >= DISK_S and (quiet_s > 0 or self._place < min(WATCHERS, len(self._order) - 1)):
            self._look_at_disk(now)
        if quiet_s <= 0:
            return
        own_address = self._own.read_address()
        if self._where_term > self._term or own_address not in (None, self._connected_to):
            self._hang_up()
            return
        unchanged_s = now - self._watched.since_s if self._election == FILE else silent_s
        if own_address is not None:
            # This agent's own coordinator is frozen: once it is killed, no process need wait for its lease.
            if unchanged_s > LEASE_S:
                self._hang_up()
                self._own.kill()
                return
        elif quiet_s > turn_s(self._place) and now - self._own.started_s > RESPAWN_S and unchanged_s > 2 * RENEW_S:
            self._spawn_coordinator()
        if silent_s > max(DEAF_S, self._dead_after_s):
            self._hang_up()
            self._own.kill()

    def _look_at_disk(self, now: float) -> None:
        """Read the coordinator's address and term from the run folder; at most once in `DISK_S`."""
        self._looked_s = now
        known = known_coordinator(self.run)
        self._where, self._where_term = known if known is not None else (None, 0)
        if self._election == FILE:
            term, count = read_sign(self.run)
            if (term, count) != (self._watched.term, self._watched.count):
                self._watched = Watched(term=term, count=count, since_s=now)

    def _reach_coordinator(self) -> None:
        now = time.monotonic()
        if self._channel is not None or now - self._tried_s < RETRY_S:
            return
        self._tried_s = now
        if now - self._looked_s >= DISK_S:
            status = self.run.status()
            # The message about the end did not reach this agent.
            if status.get("state") in ENDED:
                self._over = int(status.get("exit_code", 3))
                return
            self._look_at_disk(now)
        for where in dict.fromkeys((self._own.read_address(), self._where)):
            if where is not None and self._connect(where):
                return
        alone_s, own_turn_s = now - self._lost_s, turn_s(self._place)
        # The first agent has started one; as long as that may still be importing, more would only slow it down.
        patience_s = own_turn_s + (DEAF_S if own_turn_s and not self._joined else 0.0)
        if alone_s > patience_s and now - self._own.started_s > TURN_S:
            self._spawn_coordinator()
        # One that this agent has started may take long to come up next to ranks that use every core, then waits for
        # the lease.
        if alone_s > LOST_S * (3 if self._own.is_running else 1):
            message = f"host {self.host}: no coordinator can be reached or started for {LOST_S:g} s"
            raise SystemFailure(
                Problem(where=str(self.run.path), what=message, fix="phalanx train --resume continues the run")
            )

    def _connect(self, where: tuple[str, int]) -> bool:
        if not self._joined:
            self.checks.measure_link(where, self._secret, is_off=lambda: self.stop_requests.count > 0)
        hello = {
            "role": "agent",
            "host": self.host,
            "id": self._id,
            "address": self.address,
            "epoch": self._generation,
            "time": time.time(),
            # A hello is short.
            "problems": [text[:500] for text in self.checks.problems[:4]],
            "link_bytes_per_s": self.checks.link_bytes_per_s,
        }
        # With the hello where it fits in: after a lost coordinator thousands of hosts send it at once.
        status, stop_requests = self._status(), self.stop_requests.count
        is_short = len(encode({**hello, "status": status})) <= MAX_HELLO_BYTES
        try:
            timeout_s = CONNECT_S + len(self._order) / SHAKES_PER_S
            full_hello = {**hello, "status": status} if is_short else hello
            self._channel = connect(where, self._secret, full_hello, timeout_s=timeout_s, bind="")
        except (OSError, TimeoutError, Refused):
            # Not a pause of this agent: the kernel of a frozen coordinator accepts the connection, and no answer
            # comes.
            self._ticked_s = time.monotonic()
            return False
        term = int(self._channel.peer.get("term", 0))
        # It was frozen, and has not noticed yet that its term is over.
        if term < self._term:
            self._channel.close()
            self._channel = None
            return False
        self._term, self._connected_to = term, where
        self._joined = True
        self._selector.register(self._channel, selectors.EVENT_READ, None)
        self._heard_s = time.monotonic()
        if "every_s" in self._channel.peer:
            self._take_rhythm(float(self._channel.peer["every_s"]), float(self._channel.peer.get("sign_s", SIGN_S)))
        self._reported_ready, self._reported_stop_requests = 0, stop_requests
        if not is_short:
            self._say("status", **status)
        # The hello showed that this agent lives: no heartbeat while thousands of others send theirs.
        self._beat_s = self._heard_s - random.uniform(0.0, self._beat_every_s / 2)
        unsent, self._unsaid = self._unsaid, []
        for message in [*unsent, *(slot.left for slot in self._slots if slot.left is not None)]:
            self._say(**message)
        return True

    def _status(self) -> Message:
        """Return this agent's status for a new coordinator: its processes, and the membership they are in."""
        slots = {str(slot.number): slot.pid for slot in self._slots if slot.pid}
        digest = self._membership.digest if self._membership is not None else ""
        fields = {"epoch": self._generation, "digest": digest, "went": self._went, "wishes": self.stop_requests.count}
        return {"slots": slots, **fields}

    def _spawn_coordinator(self) -> None:
        """Start a coordinator, unless this agent's own still runs.

        It exits by itself when another process coordinates.
        """
        own = self._own
        if not own.is_running:
            own.start(self._watched)
            return
        silent_s = time.monotonic() - max(own.started_s, self._lost_s)
        # It may still be starting.
        patience = START_PATIENCE if own.started_s >= self._lost_s else 1
        if silent_s > max(DEAF_S, self._dead_after_s) * patience:
            own.kill()

    def _hear(self) -> None:
        # The connection broke while this agent sent something.
        if self._channel is None:
            return
        try:
            messages = self._channel.receive()
        except (Closed, Refused, OSError):
            self._hang_up()
            return
        self._heard_s = time.monotonic()
        for message in messages:
            self._obey(message)

    def _hang_up(self) -> None:
        assert self._channel is not None
        self._selector.unregister(self._channel)
        self._channel.close()
        self._channel = None
        self._lost_s = time.monotonic()

    def _obey(self, message: Message) -> None:
        kind = message.get("kind")
        if kind == "form":
            self._take_form(message)
        elif kind in ("go", "rejoin", "clear") and "slots" in message:
            if int(message["epoch"]) == self._generation:
                self._tend_replica(str(kind), message)
        elif kind == "regroup" and int(message["epoch"]) == self._generation:
            self._ranks.hand_to_all(message)
        elif kind == "go" and int(message["epoch"]) == self._generation > self._went:
            self._went = self._generation
            self._ranks.collectives.clear()
            self._ranks.hand_to_all(message)
        elif kind == "beat":
            self._take_rhythm(float(message.get("every_s", BEAT_S)), float(message.get("sign_s", SIGN_S)))
        elif kind == "taken":
            print(f"another agent is host {self.host} of this run: give --host NAME", file=sys.stderr, flush=True)
            self._over = WRONG_CALL
        elif kind == "stop":
            self.board.ask_to_stop()
        elif kind == "reform":
            self.board.ask_to_reform(True)
        elif kind == "where":
            ranks = {slot.rank: slot for slot in self._slots if slot.pid and slot.rank >= 0}
            places = find_ranks(self.run, {rank: slot.pid for rank, slot in ranks.items()}, host=self.host)
            self._say("where", ranks={ranks[rank].number: [place.waits, place.place] for rank, place in places.items()})
        elif kind == "kill" and int(message["epoch"]) == self._generation:
            self._ranks.kill_hung(self._slots[int(message["slot"])], message)
        elif kind == "seat" and int(message["epoch"]) == self._generation > self._went:
            self._assign_rank(self._slots[int(message["slot"])])
        elif kind == "again" and self._channel is not None:
            self._hang_up()
        elif kind == "end":
            self._over, self._rescue_order = int(message["code"]), message.get("rescue")

    def _take_rhythm(self, every_s: float, sign_s: float) -> None:
        """Set how often this agent sends heartbeats, and how often the coordinator sends signs of life."""
        # Thousands of hosts got this within a second: they must not all begin at once.
        if every_s > self._beat_every_s:
            self._beat_s = time.monotonic() - random.uniform(0.0, every_s)
        self._beat_every_s, self._sign_every_s = every_s, min(sign_s, self._most_sign_s)

    def _take_form(self, message: Message) -> None:
        # The message came twice.
        if int(message["epoch"]) <= self._generation:
            return
        if "same_as" in message:
            known = self._membership
            if known is None or [known.generation, known.digest] != message["same_as"]:
                # The membership that it builds on never arrived: after a new hello the coordinator sends it in
                # full.
                self._hang_up()
                return
            ranks = {str(slot): rank for slot, rank in known.ranks.items()}
            message = {key: value for key, value in message.items() if key != "same_as"} | {"ranks": ranks}
        membership = HostMembership.from_json(message)
        self._generation, self._form, self._membership = membership.generation, message, membership
        self.board.ask_to_reform(False)
        now = time.monotonic()
        for slot in self._slots:
            slot.generation, slot.ready, slot.left, slot.asked_s = membership.generation, None, None, now
            slot.rank = membership.ranks.get(slot.number, -1)
            if slot.pid and slot.rank >= 0 and not slot.member_of:
                slot.member_of = membership.generation
        self._ranks.hand_to_all(message)
        self.checks.begin([slot for slot in self._slots if slot.rank >= 0], forget=self._ranks.forget)

    def _assign_rank(self, slot: Slot) -> None:
        """Give the new process of a slot the rank that the forming membership has there."""
        assert self._form is not None
        assert self._membership is not None
        rank = self._membership.ranks.get(slot.number)
        if slot.pid and rank is not None and slot.rank < 0:
            slot.rank, slot.generation, slot.asked_s = rank, self._generation, time.monotonic()
            slot.member_of, slot.seated = self._generation, True
            # The report that was sent without it does not count.
            self._reported_ready = 0
            self._ranks.hand(slot, self._form)

    def _tend_replica(self, kind: str, message: Message) -> None:
        """Handle ranks of a model replica that is left out: end them, let them join again, or let them go."""
        if kind == "rejoin" and "ranks" in message:
            self._take_moved(message)
        for number in message["slots"]:
            slot = self._slots[int(number)]
            if kind == "clear":
                self._ranks.end_lost(slot)
            elif kind == "rejoin":
                self._assign_rank(slot)
            else:
                self._ranks.hand(slot, message)

    def _take_moved(self, message: Message) -> None:
        """Take ranks of a lost host that move here within the generation: the membership known so far has changed."""
        assert self._form is not None
        assert self._membership is not None
        ranks = {int(slot): int(rank) for slot, rank in message["ranks"].items()}
        # Already received as a membership of this host.
        if ranks == self._membership.ranks:
            return
        self._membership = replace(self._membership, ranks=ranks, digest=str(message["digest"]))
        self._form = {**self._form, "ranks": message["ranks"], "digest": message["digest"]}
        moved = [self._slots[int(number)] for number in message["slots"]]
        for slot in moved:
            # This host was cut off, and its process was a rank of the same generation.
            if slot.rank >= 0:
                self._ranks.end_lost(slot)
        self.checks.begin(moved, forget=self._ranks.forget)

    def _say(self, kind: str, **fields: Any) -> None:
        message = {"kind": kind, **fields}
        if self._channel is not None:
            try:
                self._channel.send(message)
                return
            except (Closed, OSError, TimeoutError):
                self._hang_up()
        # The next coordinator has no other way to know.
        if kind in ("lost", "restored"):
            self._unsaid.append(message)

    def _tell_ready(self) -> None:
        """Report the members of this host as ready, once the host was checked and all left the membership before."""
        members = [slot for slot in self._slots if slot.rank >= 0]
        if self._reported_ready == self._generation or not self._generation or not self.checks.is_done():
            return
        if self.checks.problems and members:
            self._reported_ready = self._generation
            self._say("unfit", epoch=self._generation, problems=self.checks.problems)
            return
        if any(slot.ready is None for slot in members):
            return
        self._reported_ready = self._generation
        if time.monotonic() - self._beat_s > self._beat_every_s / 2:
            # The report is a sign of life too: of thousands of agents half need not send both now.
            self._beat_s += self._beat_every_s
        self._say(
            "ready",
            epoch=self._generation,
            ports={str(slot.number): slot.ready for slot in members},
            held=[step.to_json() for step in fold_held(self.replica_store.held())],
            collectives=self._ranks.collectives,
            time=time.time(),
        )

    def _tell_beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_s < self._beat_every_s:
            return
        self._beat_s = now
        self._say("beat", epoch=self._generation, **fold_progress(self._ranks.progress_at(now)))

    def _report_stop_requests(self) -> None:
        count = self.stop_requests.count
        if not count:
            return
        self.board.ask_to_stop()
        if count > self._reported_stop_requests and self._channel is not None:
            self._reported_stop_requests = count
            self._say("stop", count=count, hurry=self.stop_requests.first == signal.SIGTERM)
        if count >= 2 or (self._by_hand and not self._joined):
            self._over = STOPPED

    def _forget(self) -> None:
        """Close, in a forked child, what belongs to the agent alone."""
        self._own.close_pipe()
        if self._channel is not None:
            self._channel.forget()
        self.checks.forget()
