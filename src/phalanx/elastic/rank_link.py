"""A rank's line to its agent: forms and orders in, answers out, and the heartbeat, in one thread.

When the membership that the rank is in is over, this thread gets the training out of it, wherever it waits: it aborts
the communicators (`abort`, which the training provides) and cuts the sockets.
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
LEAVING_S = 0.01  # between looks at a membership that is over, until the training is out of it
ABORT_S = 1.0  # for communicators to be aborted before their sockets are cut too
Message = dict[str, Any]


class Interrupted(Exception):
    """The membership this rank was in is over: a newer one is being made."""


class RankLink:
    """Made in a rank's process. Messages are JSON lines over a socket pair that nobody else can reach."""

    def __init__(self, line: socket.socket, board: HeartbeatBoard, slot: int) -> None:
        self._line, self.board, self.slot = line, board, slot
        self._forms: queue.Queue[Message | None] = queue.Queue()
        self._goes: queue.Queue[Message | None] = queue.Queue()
        self._lock = threading.Lock()
        self._generation = 0  # of the membership this rank is in
        self._newest = 0  # generation of the newest membership that has arrived
        self._kept: frozenset[str] = frozenset()
        self._ended = False
        self.step = NO_STEP  # the last one this rank told of
        self.may_beat: Callable[[], bool] = lambda: True  # drills silence a rank that lives
        self.record: Callable[[], None] = lambda: None  # write down which collectives this rank is in
        # Begins to abort the membership's communicators, and says whether all of them are; called again until the
        # training has left. Must not block: the line is read by the same thread.
        self.abort: Callable[[], bool] = lambda: True
        self._over_s: float | None = None  # when the membership this rank is in was found to be over
        # Which model replicas are present, told anew whenever that changes within a generation (train/regroup.py).
        self._rounds: queue.Queue[Message | None] = queue.Queue()
        self._round, self._newest_round, self._last_urgent = 0, 0, 0
        self._round_kept: frozenset[str] | None = None  # sockets that belong to no round; None outside of rounds
        self.store_port = 0  # of the store in this process: other replicas may be in the next round before we are
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
        """Sockets opened from now on belong to this generation, and are cut when it ends; raises if it has already."""
        self._kept = frozenset(open_sockets())
        with self._lock:
            self._generation, self._over_s = generation, None
            self._round_kept, self._round, self._newest_round, self._last_urgent = None, 0, 0, 0
            if self._newest > generation:
                raise Interrupted

    def leave(self) -> None:
        """Cut what the generation opened; peers that still wait for this rank wake up."""
        with self._lock:
            self._generation = 0
            self._round_kept = None
            shut_sockets(self._kept)

    def go(self, generation: int) -> Message:
        """Wait for the word to go for `generation`; raises Interrupted when a newer membership comes instead."""
        while True:
            message = self._goes.get()
            if self._newest > generation or self._ended:
                raise Interrupted
            if message is not None and int(message["epoch"]) == generation:
                return message

    def is_over(self, generation: int) -> bool:
        """Whether a newer membership was announced."""
        return self._newest > generation

    def next_round(self, generation: int, after: int, timeout_s: float) -> Message:
        """Wait to be told which replicas are present in a round after `after`, and enter it.

        Sockets opened from now on belong to the round, and are cut when a replica is lost in it. Raises Interrupted
        when the membership is over, and ConnectionError when nobody tells of a round in time.
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
            if int(message["round"]) < self._last_urgent:  # it lost a replica before it began
                continue
            self.enter_round(int(message["round"]))
            return message

    def enter_round(self, number: int) -> None:
        """Sockets opened from now on belong to this round."""
        with self._lock:
            self._round, self._round_kept = number, frozenset(open_sockets())

    def is_round_due(self) -> bool:
        """Whether another round than the present one was told of."""
        return self._round_kept is not None and self._newest_round > self._round

    def send(self, kind: str, **fields: Any) -> None:
        """Tell the agent; without an agent there is nobody to tell, and the kernel ends this process."""
        with suppress(OSError), self._lock:
            self._line.sendall(json.dumps({"kind": kind, "slot": self.slot, **fields}).encode() + b"\n")

    def progress(self, step: int, phase: Phase) -> None:
        """The training got somewhere."""
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
                self.record()  # before what it waits in is cut
            self._cut_old()
            self._goes.put(None)  # whoever waits to go, goes no longer
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
        """Out of a membership that is over; again and again, because the training may be opening more sockets.

        Communicators first: an abort in NCCL says goodbye to its own threads and to other ranks over sockets, and a
        socket that is cut under it is an error to torch's watchdog. One that is only being made cannot be aborted: it
        ends when its sockets are cut. Under the lock, so that nothing of the next membership is hit.
        """
        with self._lock:
            if not 0 < self._generation < self._newest:
                return
            self._over_s = time.monotonic() if self._over_s is None else self._over_s
            is_aborted = True
            with suppress(Exception):  # whatever it is: the sockets are still to be cut, and the line to be read
                is_aborted = self.abort()
            if is_aborted or time.monotonic() - self._over_s > ABORT_S:
                shut_sockets(self._kept)

    def _is_cutting(self) -> bool:
        return self._round_kept is not None and self._round < self._last_urgent

    def _cut_round(self) -> None:
        """Out of what waits for a replica that was lost: the groups of our own replica were made before, and stay."""
        with self._lock:
            if self._is_cutting() and self._round_kept is not None:
                shut_sockets(self._round_kept, spared_port=self.store_port)

    def _end(self) -> None:
        self._ended = True
        self._rounds.put(None)
        self._forms.put(None)
        self._goes.put(None)


# Leave a process group whose members are gone: shut its sockets.
#
# gloo ignores abort() while an operation is in flight, and a rank that is not a neighbour of the dead one waits for the
# whole timeout. Shutting the connected sockets wakes everybody within milliseconds (shared/feasibility/09). Listening
# sockets are left alone: shutting gloo's listener ends the process.


def open_sockets() -> dict[str, int]:
    """The sockets of this process, each by a name that no other has while this one lives, with its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is gone by now
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def shut_sockets(kept: Collection[str], *, spared_port: int = 0) -> int:
    """Shut every connected network socket but those kept, and those accepted at one port; returns how many."""
    count = 0
    for name, descriptor in open_sockets().items():
        if name in kept:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                if spared_port and one.getsockname()[1] == spared_port:
                    continue
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
