"""The replica server: a thread in each rank's process that stores copies for other hosts and serves this host's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from phalanx.elastic.channel import Channel
from phalanx.elastic.listener import Listener
from phalanx.elastic.replica_store import (
    MemorySegment,
    NeededReplicas,
    ReplicaStore,
    SegmentHeader,
    next_free_buffer,
    next_sequence_number,
)
from phalanx.elastic.restore_point import kind_of
from phalanx.errors import SystemFailure
from phalanx.train.state.in_memory import interrupt_channel
from phalanx.train.state.snapshot import decode_snapshot_index

LOOK_S = 1.0  # seconds after which it notices that it must end, if nothing wakes it
# A connection may be silent, because the peer may be in a long step
IDLE_S = 3600.0
DATA_S = 30.0  # but not in the middle of a copy
MOST_INDEX_BYTES = 2**28
MOST_BYTES = 2**40  # of one snapshot; a larger number must be an error

Message = dict[str, Any]


class ReplicaServer:
    """Server of replicas that lives as long as its process, across generations; `admit` announces each new one."""

    def __init__(self, replica_store: ReplicaStore, *, secret: bytes, address: str, host: str = "") -> None:
        self._replica_store = replica_store
        self._listener = Listener(address, 0, secret, {"role": "replica", "host": host})
        self._address = self._listener.address
        self.port: int = self._address[1]
        self._generation = -1
        self._channels: set[Channel] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen_for_peers, name="replica-server", daemon=True)
        self._thread.start()

    def admit(self, generation: int) -> None:
        """Refuse copies of earlier generations from now on."""
        self._generation = max(self._generation, generation)

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        self._closing.set()
        for channel in tuple(self._channels):
            interrupt_channel(channel)
        with suppress(OSError), socket.create_connection(self._address, LOOK_S):
            pass  # wakes the thread
        self._thread.join()

    def _listen_for_peers(self) -> None:
        while not self._closing.is_set():
            for channel in self._listener.pump(LOOK_S):
                # A thread each: the peers are few (one that copies, some that restore) and each moves gigabytes.
                threading.Thread(target=self._serve_peer, args=(channel,), name="replica-peer", daemon=True).start()
        self._listener.close()

    def _serve_peer(self, channel: Channel) -> None:
        operations: dict[str, Callable[[Channel, Message], None]] = {
            "put": self._answer_put,
            "list": self._answer_list,
            "index": self._answer_index,
            "read": self._answer_read,
        }
        self._channels.add(channel)
        try:
            while not self._closing.is_set():
                message = channel.wait(IDLE_S)
                operations[message["op"]](channel, message)
        except (OSError, TimeoutError, ValueError, TypeError, KeyError):
            # A peer that left or uses another protocol; it notices the end of the connection
            pass
        finally:
            self._channels.discard(channel)
            channel.close()

    def _answer_list(self, channel: Channel, message: Message) -> None:
        channel.send({"op": "held", "held": [info.to_json() for info in self._replica_store.held()]})

    def _answer_index(self, channel: Channel, message: Message) -> None:
        segment, header = self._find_segment(message)
        if header is None:
            channel.send({"op": "gone"})
        else:
            text = segment.view()[header.index_at : header.end]
            channel.send({"op": "index", "index_crc32": header.index_crc32}, text)

    def _answer_read(self, channel: Channel, message: Message) -> None:
        segment, header = self._find_segment(message)
        begin, end = int(message["begin"]), int(message["begin"]) + int(message["bytes"])
        if header is None or not 0 <= begin <= end <= header.end:
            channel.send({"op": "gone"})
        else:
            channel.send({"op": "data"}, segment.view()[begin:end])

    def _find_segment(self, message: Message) -> tuple[MemorySegment, SegmentHeader | None]:
        """Return the requested segment, with its header if it still holds the requested snapshot."""
        segment = self._replica_store.segment(kind_of(message), int(message["slot"]), int(message["buffer"]))
        header = segment.header()
        if header is None or any(message[key] != getattr(header, key) for key in ("generation", "step", "rank")):
            return segment, None
        return segment, header

    def _answer_put(self, channel: Channel, message: Message) -> None:
        needs, header = _needed_replicas(message["needs"]), SegmentHeader(**message["header"])
        text = bytearray(_bounded_size(message["data_bytes"], MOST_INDEX_BYTES))
        channel.read_into(text)
        segments = self._replica_store.buffers("guest", int(message["slot"]))
        newest = max(
            [
                self._generation,
                *(
                    segment_header.generation
                    for segment in segments
                    if (segment_header := segment.header()) is not None
                ),
            ]
        )
        if needs.generation < newest:
            reason = f"a replica of generation {needs.generation} came after generation {newest} had begun"
            channel.send({"op": "refused", "why": reason})
            return
        with _claim_segment(segments, needs) as segment:
            if segment is None:
                channel.send({"op": "busy", "why": "another copy is being written in its place"})
            else:
                _receive_copy(channel, segment, header, bytes(text), next_sequence_number(segments))


def _needed_replicas(message: Message) -> NeededReplicas:
    restored = message["restored"]
    pair = None if restored is None else (int(restored[0]), int(restored[1]))
    return NeededReplicas(generation=int(message["generation"]), restored=pair, held=int(message["held"]))


def _bounded_size(size_bytes: int, most_bytes: int) -> int:
    if not 0 <= size_bytes <= most_bytes:
        raise ValueError(f"{size_bytes} bytes, and {most_bytes} are the most")
    return size_bytes


@contextmanager
def _claim_segment(segments: tuple[MemorySegment, ...], needs: NeededReplicas) -> Iterator[MemorySegment | None]:
    """Claim a buffer that is neither needed nor being written, during the block; yield None if there is none."""
    busy: set[int] = set()
    while (place := next_free_buffer(segments, needs, busy=busy)) is not None:
        with segments[place].claimed() as is_claimed:
            if is_claimed:
                yield segments[place]
                return
        busy.add(place)
    yield None


def _receive_copy(channel: Channel, segment: MemorySegment, header: SegmentHeader, text: bytes, sequence: int) -> None:
    """Receive the bytes of every tensor, check them, and only then make the copy count."""
    segment.wipe()
    try:
        view = segment.reserve(_bounded_size(header.end, MOST_BYTES))
    except SystemFailure as error:
        channel.send({"op": "busy", "why": error.problems[0].what})
        return
    channel.send({"op": "send"})
    for shard in decode_snapshot_index(text, header.rank).shards:
        message = channel.wait(DATA_S)
        if message["op"] != "data" or message["offset"] != shard.offset:
            raise ValueError(f"{message['op']!r} where {shard.name} was to come")
        crc32 = channel.read_into(view[shard.offset : shard.offset + shard.size_bytes])
        if f"{crc32:08x}" != shard.sha256:
            raise ValueError(f"{shard.name} is not what its owner had")
    view[header.index_at : header.end] = text
    segment.seal(replace(header, sequence=sequence))
    channel.send({"op": "held", "step": header.step})
