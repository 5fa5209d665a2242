"""The sending side of a second copy: one connection to the buddy, kept as long as it answers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.elastic.channel import Channel, connect
from phalanx.elastic.replica_store import MemorySegment, NeededReplicas
from phalanx.train.state.memory_contents import decode

CONNECT_S = 2.0
ANSWER_S = 30.0  # for the other side to take what we sent; a dead one ends the connection long before
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0  # between two attempts


@dataclass(frozen=True, kw_only=True, slots=True)
class BuddyAddress:
    """Where the buddy's vault server listens, and our place among its host's guests."""

    host: str
    port: int
    slot: int


class Replica:
    """Sends segments to the buddy. `trouble` says why the last attempt failed, and is empty after one that did not."""

    def __init__(self, buddy: BuddyAddress, *, secret: bytes, hello: Mapping[str, Any], bind: str = "") -> None:
        self._buddy, self._secret, self._hello, self._bind = buddy, secret, dict(hello), bind
        self._channel: Channel | None = None
        self._closing = threading.Event()
        self.trouble = ""

    def send(self, segment: MemorySegment, needs: NeededReplicas) -> bool:
        """Until the buddy has it, trying again after failures; False when this side is closing or is fenced.

        It gives up no snapshot by itself: the step that all ranks hold cannot pass one that is missing here.
        """
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                answer = self._try(segment, needs)
            except (OSError, TimeoutError) as error:
                self.hang_up()
                self.trouble = f"{self._buddy.host} does not take a copy: {error}"
            else:
                self.trouble = "" if answer["op"] == "held" else str(answer.get("why"))
                if answer["op"] in ("held", "refused"):
                    return bool(answer["op"] == "held")
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return False

    def _try(self, segment: MemorySegment, needs: NeededReplicas) -> dict[str, Any]:
        header = segment.header()
        if header is None:
            return {"op": "refused", "why": f"{segment.name} was wiped before it was sent"}
        view = segment.view()
        text = bytes(view[header.index_at : header.end])
        channel = self._open()
        message = {"op": "put", "slot": self._buddy.slot, "header": asdict(header), "needs": asdict(needs)}
        channel.send(message, text, crc32=header.index_crc32)
        answer = channel.wait(ANSWER_S)
        if answer["op"] != "send":
            return answer
        for entry in decode(text, header.rank).entries:
            data = view[entry.offset : entry.offset + entry.size_bytes]
            channel.send({"op": "data", "offset": entry.offset}, data, crc32=int(entry.sha256, 16))
        return channel.wait(ANSWER_S)

    def _open(self) -> Channel:
        if self._channel is None:
            where = (self._buddy.host, self._buddy.port)
            self._channel = connect(where, self._secret, self._hello, timeout_s=CONNECT_S, bind=self._bind)
        return self._channel

    def hang_up(self) -> None:
        """End the connection; not while another thread sends."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def interrupt(self) -> None:
        """Have `send` return soon, wherever it is; for another thread than its own."""
        self._closing.set()
        if (channel := self._channel) is not None:
            interrupt(channel)


def interrupt(channel: Channel) -> None:
    """Wake a thread that waits on a channel, and leave it to that thread to close it: its number is then not reused."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(channel.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)
