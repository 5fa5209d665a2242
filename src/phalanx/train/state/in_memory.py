"""In-memory checkpoints: after a step a rank's state stays in its host's memory, and a replica goes to another host."""

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
from phalanx.elastic.replica_ring import ReplicaPeer as ReplicaPeer  # of the function below
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

CLOSE_S = 3.0  # the longest wait for a copy on its way to a host that may be dead
CONNECT_S = 2.0
ANSWER_S = 30.0  # for the other side to take what we sent; a dead one ends the connection long before
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0  # between two attempts


class InMemoryCheckpointer:
    """One rank in one generation. All ranks put the same steps, in the same order, with the same `held`.

    `restored` is the (generation, step) in memory that this one began from, kept until all ranks hold a newer step.
    `check` is asked when a copy is taken and does not count yet: it raises where the copy is not to count, because a
    collective that it waited for was cut short.
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
        self._kept = [] if restored is None else [restored[1]]  # steps that may be needed, the same on all ranks
        self._busy: dict[int, int] = {}  # buffer by step, until it counts here and with the peer
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
        """The newest step that is complete here and with the peer, if there is one; -1 while there is none."""
        return self._safe

    @property
    def trouble(self) -> str:
        """Why the peer does not have the newest snapshot; empty when all is well."""
        return self._replica.trouble if self._replica is not None else ""

    def reserve(self, shards: Sequence[TensorShard]) -> None:
        """Take the memory of two buffers beside the training, so that the first snapshots block as long as others."""
        taken: list[int] = []
        while len(taken) < 2 and (buffer := self._free_segment(-1, busy=taken)) is not None:
            taken.append(buffer)
        size_bytes, device = snapshot_bytes(shards, self._rank), device_of(shards)

        def take() -> None:
            for buffer in taken:
                reserve_segment(self._segments[buffer], size_bytes, device)

        self._reservation.begin(take, device)

    def put(
        self,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, Any],
        *,
        held: int,
        rank_meta: Mapping[str, Any] | None = None,
    ) -> float:
        """Copy the state after `step` steps and go on; returns the seconds the caller was held up.

        `held` is the smallest `safe_step` of all ranks, as they last agreed. While it is three snapshots behind (a
        peer that does not answer, say) nothing is put and `skipped` counts, on all ranks alike.
        """
        began_s = time.monotonic()
        self._reservation.wait()
        self._kept = [kept for kept in self._kept if kept >= held]
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
        """When copies begin to fail or to be left out, and when they are well again; not at every step between."""
        now = (self.trouble, is_skipped)
        if now != self._last_state:
            self._last_state = now
            trouble = redact(now[0], os.environ)  # the text of a library, or of another host
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
        """End of the generation: what is copied is completed here; a copy on its way to the peer is given up."""
        self._reservation.wait()
        self._sealer.close()  # local work, as long as summing up takes; the next generation must find nobody writing
        if self._replica is not None:
            self._replica.interrupt()
        if self._sender.close(CLOSE_S) and self._replica is not None:
            self._replica.hang_up()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAddress:
    """Where the peer's replica server listens, and our place among its host's guests."""

    host: str
    port: int
    slot: int


class ReplicaSender:
    """Sends segments to the peer. `trouble` says why the last attempt failed, and is empty after one that did not."""

    def __init__(self, peer: ReplicaAddress, *, secret: bytes, hello: Mapping[str, Any], bind: str = "") -> None:
        self._peer, self._secret, self._hello, self._bind = peer, secret, dict(hello), bind
        self._channel: Channel | None = None
        self._closing = threading.Event()
        self.trouble = ""

    def send(self, segment: MemorySegment, needs: NeededReplicas) -> bool:
        """Until the peer has it, trying again after failures; False when this side is closing or is fenced.

        It gives up no snapshot by itself: the step that all ranks hold cannot pass one that is missing here.
        """
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                answer = self._try_send(segment, needs)
            except (OSError, TimeoutError) as error:
                self.hang_up()
                self.trouble = f"{self._peer.host} does not take a copy: {error}"
            else:
                self.trouble = "" if answer["op"] == "held" else str(answer.get("why"))
                if answer["op"] in ("held", "refused"):
                    return bool(answer["op"] == "held")
            self._closing.wait(pause_s)
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
        answer = channel.wait(ANSWER_S)
        if answer["op"] != "send":
            return answer
        for shard in decode_snapshot_index(text, header.rank).shards:
            data = view[shard.offset : shard.offset + shard.size_bytes]
            channel.send({"op": "data", "offset": shard.offset}, data, crc32=int(shard.sha256, 16))
        return channel.wait(ANSWER_S)

    def _open(self) -> Channel:
        if self._channel is None:
            where = (self._peer.host, self._peer.port)
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
            interrupt_channel(channel)


def interrupt_channel(channel: Channel) -> None:
    """Wake a thread that waits on a channel, and leave it to that thread to close it: its number is then not reused."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(channel.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def replica_peer_of(rank: int, hosts: Mapping[int, str], *, rack_hosts: int = 1) -> ReplicaPeer | None:
    """The peer of a rank, where `hosts` has the host of every rank; None when all are on one host."""
    ranks: dict[str, list[int]] = {}
    for one in sorted(hosts):
        ranks.setdefault(hosts[one], []).append(one)
    return ReplicaRing(ranks, rack_hosts=rack_hosts).takers_of(hosts[rank]).get(rank)


class JobThread:
    """Jobs in the order they were given. A daemon: a process that must go does not wait for it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Have it done soon; raises what an earlier job failed with."""
        if self._error is not None:
            raise self._error
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Until nothing is left to do."""
        with self._idle:
            self._idle.wait_for(lambda: not self._open)

    def close(self, timeout_s: float | None = None) -> bool:
        """No further jobs; whether those given were done in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_thread(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # told to the thread that gives the next job
                self._error = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
