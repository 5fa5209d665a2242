"""In-memory checkpoints: after a step a copy of a rank's state is kept in its host's memory and on another host."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from phalanx.elastic.channel import Channel, connect

# Used by the function below
from phalanx.elastic.replica_ring import ReplicaPeer as ReplicaPeer
from phalanx.elastic.replica_ring import ReplicaRing
from phalanx.elastic.replica_store import (
    BUFFERS,
    MemorySegment,
    NeededReplicas,
    ReplicaStore,
    next_free_buffer,
    next_sequence_number,
)
from phalanx.record.provenance import redact
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.memory_reservation import MemoryReservation
from phalanx.train.state.snapshot import (
    SnapshotDraft,
    decode_snapshot_index,
    device_of,
    reserve_segment,
    seal_snapshot,
    snapshot_bytes,
    take_snapshot,
)

CLOSE_S = 3.0  # the longest wait for a copy in transit to a host that may be dead
CONNECT_S = 2.0
# For the other side to receive a copy; a dead one ends the connection long before
ANSWER_S = 30.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0  # pauses between two attempts


class InMemoryCheckpointer:
    """In-memory checkpoints of one rank in one generation.

    All ranks put the same steps, in the same order, with the same `held`.

    Args:
        replica_store: The host's memory segments.
        slot: This rank's slot on its host.
        rank: This rank.
        world: World size.
        generation: Number of the membership.
        secret: The run's secret, which authenticates connections.
        peer: Address of the replica server that stores this rank's replicas; None without a peer.
        restored: The (generation, step) in memory that this generation began from, kept until all ranks hold a newer
            one.
        address: Local address to connect from.
        tell: Called with fields of an event when copying to the peer begins to fail or recovers.
        check: Called when a copy was made and does not count yet; raises if it must not count, because a collective
            that it waited for was cut short.
    """

    def __init__(
        self,
        replica_store: ReplicaStore,
        *,
        slot: int,
        rank: int,
        world: int,
        generation: int,
        secret: bytes,
        peer: ReplicaAddress | None,
        restored: tuple[int, int] | None = None,
        address: str = "",
        tell: Callable[..., object] = lambda **fields: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._world, self._generation, self._restored = rank, world, generation, restored
        self._segments = replica_store.buffers("own", slot)
        self._sequence = next_sequence_number(self._segments)
        # Steps that may be needed, the same on all ranks
        self._kept = [] if restored is None else [restored[1]]
        # Buffer by step, until the copy is complete here and on the peer
        self._busy: dict[int, int] = {}
        self._safe = -1
        self._reservation = MemoryReservation()
        self._sealer = JobThread("replica-seal")
        hello = {"role": "replica", "rank": rank, "generation": generation}
        self._replica = ReplicaSender(peer, secret=secret, hello=hello, bind=address) if peer is not None else None
        self._sender = JobThread("replica-send")
        self.skipped = 0
        self._tell, self._last_state, self._check = tell, ("", False), check

    @property
    def safe_step(self) -> int:
        """The newest step that is complete on this host and on the peer, if there is one; -1 while there is none."""
        return self._safe

    @property
    def trouble(self) -> str:
        """The reason why the peer lacks the newest snapshot; empty if it has it."""
        return self._replica.trouble if self._replica is not None else ""

    def reserve(self, shards: Sequence[TensorShard]) -> None:
        """Allocate two buffers in the background, so that the first snapshots do not block longer than others."""
        buffers: list[int] = []
        while len(buffers) < 2 and (buffer := self._free_segment(-1, busy=buffers)) is not None:
            buffers.append(buffer)
        size_bytes, device = snapshot_bytes(shards, self._rank), device_of(shards)

        def allocate() -> None:
            for buffer in buffers:
                reserve_segment(self._segments[buffer], size_bytes, device)

        self._reservation.begin(allocate, device)

    def put(
        self,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, Any],
        *,
        held: int,
        rank_meta: Mapping[str, Any] | None = None,
    ) -> float:
        """Copy the state after `step` steps; return the seconds that the caller was blocked.

        `held` is the smallest `safe_step` of all ranks, as last exchanged. While it is three snapshots behind, for
        example because a peer does not answer, no copy is made and `skipped` counts, on all ranks alike.
        """
        began_s = time.monotonic()
        self._reservation.wait()
        self._kept = [kept_step for kept_step in self._kept if kept_step >= held]
        is_full = len(self._kept) == BUFFERS
        self.skipped += is_full
        self._tell_changes(step, is_skipped=is_full)
        if is_full:
            return time.monotonic() - began_s
        buffer = self._free_segment(held, busy=tuple(self._busy.values()))
        assert buffer is not None, f"{len(self._kept)} snapshots are needed and {BUFFERS} fit"
        draft = self._take_copy(buffer, shards, meta, rank_meta or {})
        self._check()
        self._kept.append(step)
        self._busy[step] = buffer
        self._sequence += 1
        self._sealer.do(partial(self._seal_copy, draft, step, self._sequence, held))
        return time.monotonic() - began_s

    def _tell_changes(self, step: int, *, is_skipped: bool) -> None:
        """Report when copies begin to fail or to be skipped, and when they recover; not at every step in between."""
        state = (self.trouble, is_skipped)
        if state != self._last_state:
            self._last_state = state
            # The text may come from a library or from another host
            trouble = redact(state[0], os.environ)
            self._tell(step=step, trouble=trouble, is_skipped=is_skipped, skipped=self.skipped)

    def _free_segment(self, held: int, *, busy: Collection[int]) -> int | None:
        needs = NeededReplicas(generation=self._generation, restored=self._restored, held=held)
        return next_free_buffer(self._segments, needs, busy=busy)

    def _take_copy(
        self, buffer: int, shards: Sequence[TensorShard], meta: Mapping[str, Any], rank_meta: Mapping[str, Any]
    ) -> SnapshotDraft:
        return take_snapshot(self._segments[buffer], shards, rank=self._rank, meta=meta, rank_meta=rank_meta)

    def _seal_copy(self, draft: SnapshotDraft, step: int, sequence: int, held: int) -> None:
        seal_snapshot(
            draft, sequence=sequence, rank=self._rank, world=self._world, generation=self._generation, step=step
        )
        if self._replica is None:
            self._copy_done(step)
        else:
            self._sender.do(partial(self._send_copy, self._replica, draft.segment, step, held))

    def _send_copy(self, replica: ReplicaSender, segment: MemorySegment, step: int, held: int) -> None:
        needs = NeededReplicas(generation=self._generation, restored=self._restored, held=held)
        if replica.send(segment, needs):
            self._copy_done(step)

    def _copy_done(self, step: int) -> None:
        self._safe = step
        self._busy.pop(step, None)

    def close(self) -> None:
        """End the generation: local copies are completed; a copy in transit to the peer is given up."""
        self._reservation.wait()
        # Local work, as long as checksums take; in the next generation no other thread may write to the segments.
        self._sealer.close()
        if self._replica is not None:
            self._replica.interrupt()
        if self._sender.close(CLOSE_S) and self._replica is not None:
            self._replica.hang_up()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAddress:
    """Address of the peer's replica server, and this rank's slot among the replicas on that host."""

    host: str
    port: int
    slot: int


class ReplicaSender:
    """Sends segments to the peer. `trouble` is the reason why the last attempt failed, or empty."""

    def __init__(self, peer: ReplicaAddress, *, secret: bytes, hello: Mapping[str, Any], bind: str = "") -> None:
        self._peer, self._secret, self._hello, self._bind = peer, secret, dict(hello), bind
        self._channel: Channel | None = None
        self._closing = threading.Event()
        self.trouble = ""

    def send(self, segment: MemorySegment, needs: NeededReplicas) -> bool:
        """Send until the peer has the segment, with retries; return False if this side is closing or is fenced.

        It never gives up a snapshot by itself: the step that all ranks hold cannot pass one that is missing here.
        """
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                reply = self._try_send(segment, needs)
            except (OSError, TimeoutError) as error:
                self.hang_up()
                self.trouble = f"{self._peer.host} does not take a copy: {error}"
            else:
                self.trouble = "" if reply["op"] == "held" else str(reply.get("why"))
                if reply["op"] in ("held", "refused"):
                    return bool(reply["op"] == "held")
            self._closing.wait(pause_s)
            # Exponential back-off between attempts.
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return False

    def _try_send(self, segment: MemorySegment, needs: NeededReplicas) -> dict[str, Any]:
        header = segment.header()
        if header is None:
            return {"op": "refused", "why": f"{segment.name} was wiped before it was sent"}
        view = segment.view()
        text = bytes(view[header.index_at : header.end])
        channel = self._open()
        message = {"op": "put", "slot": self._peer.slot, "header": asdict(header), "needs": asdict(needs)}
        channel.send(message, text, crc32=header.index_crc32)
        reply = channel.wait(ANSWER_S)
        if reply["op"] != "send":
            return reply
        for shard in decode_snapshot_index(text, header.rank).shards:
            data = view[shard.offset : shard.offset + shard.size_bytes]
            channel.send({"op": "data", "offset": shard.offset}, data, crc32=int(shard.sha256, 16))
        return channel.wait(ANSWER_S)

    def _open(self) -> Channel:
        if self._channel is None:
            address = (self._peer.host, self._peer.port)
            self._channel = connect(address, self._secret, self._hello, timeout_s=CONNECT_S, bind=self._bind)
        return self._channel

    def hang_up(self) -> None:
        """Close the connection; must not be called while another thread sends."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def interrupt(self) -> None:
        """Make `send` return soon; call it from another thread."""
        self._closing.set()
        if (channel := self._channel) is not None:
            interrupt_channel(channel)


def interrupt_channel(channel: Channel) -> None:
    """Wake a thread that waits on a channel.

    That thread closes it, so that its file descriptor is not reused meanwhile.
    """
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(channel.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def replica_peer_of(rank: int, hosts: Mapping[int, str], *, rack_hosts: int = 1) -> ReplicaPeer | None:
    """Return the peer of a rank, given the host of every rank; None if all ranks are on one host."""
    ranks: dict[str, list[int]] = {}
    for host_rank in sorted(hosts):
        ranks.setdefault(hosts[host_rank], []).append(host_rank)
    return ReplicaRing(ranks, rack_hosts=rack_hosts).takers_of(hosts[rank]).get(rank)


class JobThread:
    """A daemon thread that runs jobs in the order they were given; a process that must exit does not wait for it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Queue a job; raise the error of an earlier job."""
        if self._error is not None:
            raise self._error
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all queued jobs are done."""
        with self._idle:
            self._idle.wait_for(lambda: not self._open)

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no further jobs; return whether the queued ones were done in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_thread(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            # Raised in the thread that queues the next job
            except BaseException as error:
                self._error = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
