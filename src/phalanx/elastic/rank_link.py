"""A rank's connection to its agent: memberships and orders in, answers out, and the heartbeat, in one thread.

When the rank's membership is over, this thread gets the training out of it, wherever it waits: it aborts the
communicators (`abort`, which the training provides) and shuts the sockets.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from phalanx.elastic.heartbeat_board import NO_STEP, HeartbeatBoard, Phase

BEAT_S = 0.1
# Between checks while a membership is over, until the training has left it.
LEAVING_S = 0.01
# For communicators to be aborted before their sockets are shut too.
ABORT_S = 1.0
Message = dict[str, Any]


class Interrupted(Exception):
    """Raised when this rank's membership is over, because a newer one is forming."""


class RankLink:
    """The connection, made in a rank's process.

    Messages are JSON lines over a socket pair private to rank and agent.
    """

    def __init__(self, line: socket.socket, board: HeartbeatBoard, slot: int) -> None:
        self._line, self.board, self.slot = line, board, slot
        self._forms: queue.Queue[Message | None] = queue.Queue()
        self._goes: queue.Queue[Message | None] = queue.Queue()
        self._lock = threading.Lock()
        self._generation = 0  # of the membership this rank is in
        self._newest = 0  # generation of the newest membership that has arrived
        self._kept: frozenset[str] = frozenset()
        self._ended = False
        self.step = NO_STEP  # the last step this rank reported
        # Drills suppress the heartbeats of a living rank.
        self.may_beat: Callable[[], bool] = lambda: True
        # Writes the collectives that this rank is in.
        self.record: Callable[[], None] = lambda: None
        # Begins to abort the membership's communicators, and returns whether all of them are aborted; called again
        # until the training has left. Must not block: the same thread reads the messages.
        self.abort: Callable[[], bool] = lambda: True
        # When this rank's membership was found to be over.
        self._over_s: float | None = None
        # Which model replicas are present, sent whenever that changes within a generation (train/regroup.py).
        self._rounds: queue.Queue[Message | None] = queue.Queue()
        self._round, self._newest_round, self._last_urgent = 0, 0, 0
        # Sockets that belong to no round; None outside of rounds.
        self._round_kept: frozenset[str] | None = None
        # Of the store in this process: other replicas may enter the next round before this rank.
        self.store_port = 0
        threading.Thread(target=self._listen, name="link", daemon=True).start()

    # ---- the training's side ---------------------------------------------------------------------------------------

    def next_form(self) -> Message | None:
        """Wait for a place in a membership; None when the run is over."""
        self.progress(NO_STEP, Phase.IDLE)
        while True:
            form = self._forms.get()
            if form is None or int(form["epoch"]) == self._newest:
                return form

    def enter(self, generation: int) -> None:
        """Enter a generation: sockets opened from now on are shut when it ends.

        Raises Interrupted if it already has.
        """
        self._kept = frozenset(open_sockets())
        with self._lock:
            self._generation, self._over_s = generation, None
            self._round_kept, self._round, self._newest_round, self._last_urgent = None, 0, 0, 0
            if self._newest > generation:
                raise Interrupted

    def leave(self) -> None:
        """Leave the generation: shut its sockets, so that peers that still wait for this rank wake up."""
        with self._lock:
            self._generation = 0
            self._round_kept = None
            shut_sockets(self._kept)

    def go(self, generation: int) -> Message:
        """Wait for the "go" message of `generation`; raises Interrupted when a newer membership comes instead."""
        while True:
            message = self._goes.get()
            if self._newest > generation or self._ended:
                raise Interrupted
            if message is not None and int(message["epoch"]) == generation:
                return message

    def is_over(self, generation: int) -> bool:
        """True when a newer membership was announced."""
        return self._newest > generation

    def next_round(self, generation: int, after: int, timeout_s: float) -> Message:
        """Wait for the replicas that are present in a round after `after`, and enter that round.

        Sockets opened from now on belong to the round, and are shut when a replica is lost in it. Raises Interrupted
        when the membership is over, and ConnectionError when no round is announced in time.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            if self._newest > generation or self._ended:
                raise Interrupted
            try:
                message = self._rounds.get(timeout=max(0.0, min(0.5, until_s - time.monotonic())))
            except queue.Empty:
                if time.monotonic() < until_s:
                    continue
                text = f"connection to another replica was lost, and no replica was left out within {timeout_s:g} s"
                raise ConnectionError(text) from None
            if message is None or int(message["epoch"]) != generation or int(message["round"]) <= after:
                continue
            # It lost a replica before it began.
            if int(message["round"]) < self._last_urgent:
                continue
            self.enter_round(int(message["round"]))
            return message

    def enter_round(self, number: int) -> None:
        """Enter a round: sockets opened from now on belong to it."""
        with self._lock:
            self._round, self._round_kept = number, frozenset(open_sockets())

    def is_round_due(self) -> bool:
        """True when another round than the present one was announced."""
        return self._round_kept is not None and self._newest_round > self._round

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the agent; errors are ignored, because without its agent the kernel ends this process."""
        with suppress(OSError), self._lock:
            self._line.sendall(json.dumps({"kind": kind, "slot": self.slot, **fields}).encode() + b"\n")

    def progress(self, step: int, phase: Phase) -> None:
        """Note the step and phase of the training."""
        self.step = step
        self.board.progress(self.slot, generation=self._generation, step=step, phase=phase)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        pending = b""
        while True:
            if self.may_beat():
                self.board.answer(self.slot)
            else:
                self.board.mute(self.slot)
            self._cut_old()
            self._cut_round()
            wait_s = LEAVING_S if 0 < self._generation < self._newest or self._is_cutting() else BEAT_S
            if not select.select([self._line], [], [], wait_s)[0]:
                continue
            data = self._line.recv(1 << 16)
            if not data:
                self._end()
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: Message) -> None:
        if message["kind"] == "form":
            self._newest = max(self._newest, int(message["epoch"]))
            if 0 < self._generation < self._newest:
                # Before the collectives it waits in are aborted.
                self.record()
            self._cut_old()
            # A rank that waits to go in the old generation stops waiting.
            self._goes.put(None)
            self._rounds.put(None)
            self._forms.put(message)
        elif message["kind"] == "go":
            self._goes.put(message)
        elif message["kind"] == "regroup" and int(message["epoch"]) == self._generation:
            self._newest_round = int(message["round"])
            if message["urgent"]:
                self._last_urgent = self._newest_round
            self._rounds.put(message)
            self._cut_round()
        elif message["kind"] == "end":
            if self._generation:
                self.record()
            self._end()

    def _cut_old(self) -> None:
        """Get the training out of a membership that is over; repeated, because it may be opening more sockets.

        Communicators first: an abort in NCCL notifies its own threads and other ranks over sockets, and a socket that
        is shut under it is an error to torch's watchdog. A communicator that is only being made cannot be aborted: it
        ends when its sockets are shut. Under the lock, so that nothing of the next membership is hit.
        """
        with self._lock:
            if not 0 < self._generation < self._newest:
                return
            self._over_s = time.monotonic() if self._over_s is None else self._over_s
            is_aborted = True
            # After any error: the sockets must still be shut, and the messages read.
            with suppress(Exception):
                is_aborted = self.abort()
            if is_aborted or time.monotonic() - self._over_s > ABORT_S:
                shut_sockets(self._kept)

    def _is_cutting(self) -> bool:
        return self._round_kept is not None and self._round < self._last_urgent

    def _cut_round(self) -> None:
        """Wake what waits for a lost replica; the groups of this rank's own replica were made before, and stay open."""
        with self._lock:
            if self._is_cutting() and self._round_kept is not None:
                shut_sockets(self._round_kept, spared_port=self.store_port)

    def _end(self) -> None:
        self._ended = True
        self._rounds.put(None)
        self._forms.put(None)
        self._goes.put(None)


# Leave a process group whose members are gone: shut its sockets. gloo ignores abort() while an operation is in
# flight, and a rank that is not a neighbour of the dead one waits for the whole timeout. Shutting the connected
# sockets wakes all ranks within milliseconds (shared/feasibility/09). Listening sockets are left alone: shutting
# gloo's listener ends the process.


def open_sockets() -> dict[str, int]:
    """Return the sockets of this process with their descriptors, by a name that is unique while the socket lives."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed by now.
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                sockets[target] = int(name)
    return sockets


def shut_sockets(kept: Collection[str], *, spared_port: int = 0) -> int:
    """Shut every connected network socket except `kept` and those accepted at one port; returns how many were shut."""
    count = 0
    for name, descriptor in open_sockets().items():
        if name in kept:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()
                if spared_port and sock.getsockname()[1] == spared_port:
                    continue
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
