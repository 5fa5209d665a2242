"""The processes in an agent's slots: fork them, read their messages, watch them from outside, and end them.

Whether a process runs is checked from outside (/proc), so that no lock of its own can hide it: one that is stopped for
`dead_after_s` is killed. One that runs and does not answer holds its interpreter lock in native code; that is reported
to the coordinator, which has more patience with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.elastic import failure as failing
from phalanx.elastic.failure import Failure
from phalanx.elastic.heartbeat_board import NO_STEP, Heartbeat, HeartbeatBoard, Phase, Progress
from phalanx.elastic.rank_process import Work, fork_rank, read_stack, state_of
from phalanx.record.run import Run

TICK_S = 0.01
HAND_S = 0.5  # for a rank to read an order
# Pause before a slot gets another process, doubled while they die young.
REFORK_S, MOST_REFORK_S = 0.0, 5.0
YOUNG_S = 2.0  # a process that ends earlier died young
# A rank answers ten times a second; after so long without an answer its state is read from /proc.
ANSWER_S = 0.5
# Longest time between two checks that counts as a rank's silence: the agent may have been stopped too.
TURN_S_MOST = 0.5
# A running process that has not answered for so long holds its interpreter lock; less for a short dead_after_s.
LOCKED_S = 1.0
# A process that makes communicators when its membership ends cannot be woken, and has computed nothing yet that
# another would have to repeat: it is replaced after so long, not after dead_after_s. gloo's sockets can be shut,
# which wakes it within milliseconds unless the machine is busy; NCCL waits on in spite of that, and waiting for it
# is lost time.
BUILDING_LEAVES_S = 2.5
BUILDING_LEAVES_NCCL_S = 0.3
# Stopped, stopped by a debugger, and unknown.
STOPPED_STATES = ("T", "t", "")
Message = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Slot:
    """A slot and the process in it."""

    number: int
    pid: int = 0
    line: socket.socket | None = None
    pending: bytes = b""
    generation: int = 0
    rank: int = -1
    ready: tuple[int, int] | None = None  # ports of the store and of the replica server
    asked_s: float = 0.0  # when it was asked to join a membership
    forked_s: float = 0.0
    pause_s: float = REFORK_S
    fork_at_s: float = 0.0
    killed: Failure | None = None  # why the agent killed it
    seen_s: float = 0.0  # when it was last known to run
    # Seconds for which it did not run, counted only while the agent itself ran.
    silent_s: float = 0.0
    # When it was last seen to hold its interpreter lock.
    locked_s: float = 0.0
    # Generation of the membership that its process is in, until it reports that it has left.
    member_of: int = 0
    left: Message | None = None  # the message with which it left the present membership
    seated: bool = False  # this process was a member before
    # Some process here was a member: the replicas of its state have their memory.
    used: bool = False

    @property
    def is_leaving(self) -> bool:
        """True when its process is still in a membership that is over."""
        return 0 < self.member_of < self.generation


class RankSlots:
    """The slots of a host.

    `say` sends to the coordinator, `forget` closes in a child what belongs to the agent alone.
    """

    def __init__(
        self,
        run: Run,
        count: int,
        selector: selectors.BaseSelector,
        *,
        dead_after_s: float,
        joins_within_s: float,
        say: Callable[..., None],
        forget: Callable[[], None],
    ) -> None:
        self.run, self.board = run, HeartbeatBoard(count)
        self.slots = [Slot(number=number) for number in range(count)]
        self.work: Work | None = None
        self.locked_s = min(LOCKED_S, dead_after_s / 2)
        self.building_leaves_s = BUILDING_LEAVES_S
        self._selector, self._say, self._forget_agent = selector, say, forget
        self._dead_after_s, self._joins_within_s = dead_after_s, joins_within_s
        # Collectives in which ranks were when they left the membership before, with their slots: sent with the
        # report that this host is ready.
        self.collectives: dict[str, list[int]] = {}
        # Messages of ranks that left the present membership, not yet sent.
        self._leaving: list[Message] = []
        self._watched_s = time.monotonic()
        self._oom_kills = failing.oom_kills()

    def hand_to_all(self, message: Message) -> None:
        """Send a message to the process of every slot."""
        for slot in self.slots:
            self.hand(slot, message)

    def hand(self, slot: Slot, message: Message) -> None:
        """Send a message to the process of a slot, if it has one."""
        if slot.line is not None:
            # A stopped process does not read; it will be killed for its silence.
            with contextlib.suppress(OSError):
                slot.line.sendall(json.dumps(message).encode() + b"\n")

    def progress_at(self, now_s: float) -> dict[int, Progress | None]:
        """Return step, phase and age of every rank here, by slot; None where one has not reported."""
        progress: dict[int, Progress | None] = {}
        for slot in self.slots:
            if slot.rank < 0:
                continue
            beat, progress[slot.number] = self.board.last(slot.number), None
            if slot.pid and beat.generation == slot.generation:
                is_locked = now_s - beat.answered_s > self.locked_s
                slot.locked_s = now_s if is_locked else slot.locked_s
                # Once the lock is free again, the rank has as much time as any other for its present work.
                since_s = beat.progress_s if is_locked else max(beat.progress_s, slot.locked_s)
                phase = Phase.LOCKED if is_locked else beat.phase
                progress[slot.number] = beat.step, int(phase), round(now_s - since_s, 3)
        return progress

    def fill(self) -> None:
        """Fork a process in every empty slot; after one that died young only once a pause is over."""
        now = time.monotonic()
        empty = [slot for slot in self.slots if slot.pid == 0 and now >= slot.fork_at_s]
        for slot in empty:
            self._fork(slot)
        # In one message, so that no membership forms with half of them.
        if empty:
            self._say("up", slots={slot.number: slot.pid for slot in empty})

    def _fork(self, slot: Slot) -> None:
        assert self.work is not None
        slot.pid, slot.line = fork_rank(self.work, run=self.run, slot=slot.number, board=self.board, forget=self.forget)
        slot.line.settimeout(HAND_S)
        slot.pending, slot.forked_s, slot.killed = b"", time.monotonic(), None
        slot.rank, slot.ready, slot.left, slot.seated = -1, None, None, False
        slot.seen_s, slot.silent_s, slot.locked_s, slot.member_of = slot.forked_s, 0.0, 0.0, 0
        self._selector.register(slot.line, selectors.EVENT_READ, slot)

    def forget(self) -> None:
        """Close, in the child, what belongs to the agent alone."""
        self._forget_agent()
        for slot in self.slots:
            if slot.line is not None:
                slot.line.close()
        self._selector.close()

    def listen(self, slot: Slot) -> None:
        """Read the messages of a slot's process."""
        assert slot.line is not None
        try:
            data = slot.line.recv(1 << 16)
        except OSError:
            data = b""
        # The process is ending: its exit status follows.
        if not data:
            self._selector.unregister(slot.line)
            slot.line.close()
            slot.line = None
            return
        *lines, slot.pending = (slot.pending + data).split(b"\n")
        for line in lines:
            self._answer(slot, json.loads(line))

    def _answer(self, slot: Slot, message: Message) -> None:
        present = int(message["epoch"]) == slot.generation
        if message["kind"] == "ready" and present:
            slot.ready, slot.member_of = (int(message["port"]), int(message["replica_port"])), slot.generation
        elif message["kind"] == "built" and present:
            self._say("built", epoch=slot.generation, slot=slot.number)
        elif message["kind"] == "connected" and present:
            self._say("connected", epoch=slot.generation, slot=slot.number, round=int(message["round"]))
        elif message["kind"] == "restored" and present:
            self._say(
                "restored",
                epoch=slot.generation,
                slot=slot.number,
                step=int(message["step"]),
                source=str(message["source"]),
            )
        elif message["kind"] == "left":
            slot.member_of = slot.generation if slot.rank >= 0 and not present else 0
            slot.left = message if present else slot.left
            if present:
                self._leaving.append(message)
            elif message.get("last_collective"):
                self.collectives.setdefault(str(message["last_collective"]), []).append(slot.number)

    def tell_left(self) -> None:
        """Report ranks that left the present membership since the last turn: ranks of a host mostly leave together."""
        messages, self._leaving = self._leaving, []
        if len(messages) == 1:
            self._say(**messages[0])
        elif messages:
            self._say("left", ranks=messages)

    def reap(self) -> None:
        """Note the processes that have ended, and report them to the coordinator."""
        for slot in self.slots:
            if not slot.pid:
                continue
            ended, status = os.waitpid(slot.pid, os.WNOHANG)
            if ended:
                self._lost(slot, os.waitstatus_to_exitcode(status))

    def _lost(self, slot: Slot, code: int) -> None:
        if slot.line is not None:
            self._selector.unregister(slot.line)
            slot.line.close()
            slot.line = None
        now = time.monotonic()
        is_young = now - slot.forked_s < YOUNG_S
        slot.pause_s = min(max(2 * slot.pause_s, 0.25), MOST_REFORK_S) if is_young else REFORK_S
        slot.fork_at_s = now + slot.pause_s
        kills, self._oom_kills = self._oom_kills, failing.oom_kills()
        pid, slot.pid = slot.pid, 0
        self._say(
            "lost",
            slot=slot.number,
            pid=pid,
            epoch=slot.generation,
            leaving=slot.is_leaving,
            failure=asdict(self._failure(slot, code)),
            out_of_memory=self._oom_kills > kills,
        )

    def _failure(self, slot: Slot, code: int) -> Failure:
        step = self.board.last(slot.number).step
        if slot.killed is not None:
            return slot.killed
        if code < 0:
            return failing.by_signal(slot.rank, step, -code)
        failure = failing.read_error(self.run, slot.rank) if slot.rank >= 0 else None
        return failure or failing.unexplained(slot.rank, step, code)

    def watch(self) -> None:
        """Kill processes that do not run, do not leave a membership that is over, or do not join the next one."""
        now = time.monotonic()
        turn_s, self._watched_s = min(now - self._watched_s, TURN_S_MOST), now
        for slot in self.slots:
            if not slot.pid or slot.killed is not None:
                continue
            beat = self.board.last(slot.number)
            seen_s = _seen_s(slot.pid, beat, now)
            if seen_s is not None:
                slot.seen_s, slot.silent_s = seen_s, 0.0
            else:
                slot.silent_s = slot.silent_s + turn_s if slot.silent_s else min(now - slot.seen_s, 2 * ANSWER_S)
            # This includes a process without a rank in the next membership: it would stay, and keep the memory of
            # its device.
            is_awaited = slot.ready is None and (slot.rank >= 0 or slot.is_leaving)
            asked_s = now - slot.asked_s if is_awaited else 0.0
            if slot.silent_s > self._dead_after_s:
                from phalanx.units import format_seconds

                stopped = " in a stopped process (state T)" if state_of(slot.pid) == "T" else ""
                self._kill(slot, f"stopped answering {format_seconds(slot.silent_s)} ago{stopped}")
            elif slot.is_leaving and asked_s > (bound_s := self._leaves_within_s(beat)):
                lock_text = " (native code holds its interpreter lock)" if now - beat.answered_s > self.locked_s else ""
                bound = f"{bound_s:g} s" if bound_s < self._dead_after_s else f"fault.dead_after_s = {bound_s:g} s"
                self._kill(slot, f"did not leave its membership within {bound}{lock_text}")
            elif asked_s > self._joins_within_s:
                self._kill(slot, f"was not ready to join within {self._joins_within_s:g} s (comm.init_timeout_s)")

    def _leaves_within_s(self, beat: Heartbeat) -> float:
        joins = beat.phase == Phase.BUILDING and beat.step == NO_STEP
        return min(self.building_leaves_s, self._dead_after_s) if joins else self._dead_after_s

    def kill_hung(self, slot: Slot, message: Message) -> None:
        """Kill the rank for which, as the coordinator found, all others wait."""
        if slot.pid and slot.rank >= 0 and slot.killed is None:
            where = str(message.get("place") or "")
            silence = failing.silence(slot.rank, 0, silent_s=float(message["silent_s"]), where=where)
            self._kill(slot, f"{silence.message}{message.get('patience') or ''}")

    def end_lost(self, slot: Slot) -> None:
        """Kill a rank whose model replica lost another rank and is built again by new processes."""
        if slot.pid and slot.killed is None:
            self._kill(slot, "ended with the rest of its model replica")

    def _kill(self, slot: Slot, what: str) -> None:
        beat = self.board.last(slot.number)
        stack = read_stack(self.run, max(slot.rank, 0), slot.pid)[-4000:]
        slot.killed = Failure(
            rank=slot.rank, step=beat.step, at_s=time.time(), kind="Silence", message=what, stack=stack
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(slot.pid, signal.SIGKILL)

    def end_ranks(self, grace_s: float) -> None:
        """End all ranks: by message, then SIGTERM, then SIGKILL.

        Ranks that wait for a membership leave at the message.
        """
        for slot in self.slots:
            self.hand(slot, {"kind": "end"})
        for number, wait_s in ((0, min(grace_s, 1.0)), (signal.SIGTERM, grace_s), (signal.SIGKILL, 60.0)):
            for slot in self.slots:
                if slot.pid and number:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(slot.pid, number)
                        # A stopped process ends only once it continues.
                        os.kill(slot.pid, signal.SIGCONT)
            until = time.monotonic() + wait_s
            while any(slot.pid for slot in self.slots) and time.monotonic() < until:
                for slot in self.slots:
                    if slot.pid and os.waitpid(slot.pid, os.WNOHANG)[0]:
                        slot.pid = 0
                time.sleep(TICK_S)


def _seen_s(pid: int, beat: Heartbeat, now_s: float) -> float | None:
    """Return when a process is known to have run last, whatever it waits for; None when it does not run now.

    /proc is read only for a process that has not answered for a while.
    """
    if beat.is_muted:
        return None
    if now_s - beat.answered_s < ANSWER_S:
        return beat.answered_s
    return now_s if state_of(pid) not in STOPPED_STATES else None
