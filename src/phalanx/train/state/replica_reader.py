"""Restoring from memory: the snapshots of all ranks, this host's read where they lie, others' over the network.

Of each snapshot there may be two copies; one that is gone or damaged is passed over for the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from phalanx.elastic.channel import Channel, connect
from phalanx.elastic.replica_store import MemorySegment, ReplicaStore, SegmentHeader
from phalanx.elastic.restore_point import ReplicaPlace, RestorePoint
from phalanx.train.state.checkpoint_index import RankIndex, damaged_checkpoint
from phalanx.train.state.shards import STORED_DTYPES, Region, StoredShard
from phalanx.train.state.snapshot import SnapshotIndex, crc32_text, decode_snapshot_index, tensor_in_segment

CONNECT_S = 5.0
ANSWER_S = 30.0
T = TypeVar("T")


class UnusableReplica(Exception):
    """This copy is gone or not what was written; another may be sound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotId:
    """Whose snapshot of which step it must be."""

    generation: int
    step: int
    rank: int

    def refuse_other(self, header: SegmentHeader | None) -> SegmentHeader:
        """The header, if it is the right one."""
        if header is None or (header.generation, header.step, header.rank) != (self.generation, self.step, self.rank):
            raise UnusableReplica("it is no longer there")
        return header


class SnapshotCopy(Protocol):
    """One copy of a snapshot."""

    def index(self) -> bytes:
        """The text of its index; raises UnusableReplica."""

    def tensor(self, shard: StoredShard) -> torch.Tensor:
        """A whole shard, after comparing it with its checksum; raises UnusableReplica."""


class LocalReplica:
    """A segment of this host: tensors are views of it, not copies."""

    def __init__(self, segment: MemorySegment, wanted: SnapshotId) -> None:
        self._segment, self._wanted = segment, wanted

    def index(self) -> bytes:
        """The text of its index; raises UnusableReplica."""
        header = self._wanted.refuse_other(self._segment.header())
        text = self._segment.view()[header.index_at : header.end]
        check_crc32("its index", crc32_text(text), f"{header.index_crc32:08x}")
        return bytes(text)

    def tensor(self, shard: StoredShard) -> torch.Tensor:
        """A shard as it lies in memory; raises UnusableReplica."""
        self._wanted.refuse_other(self._segment.header())
        view = self._segment.view()
        check_crc32(shard.name, crc32_text(view[shard.offset : shard.offset + shard.size_bytes]), shard.sha256)
        return tensor_in_segment(view, shard)


class RemoteReplica:
    """A segment of another host, through its replica server."""

    def __init__(self, channel: Channel, place: ReplicaPlace, wanted: SnapshotId) -> None:
        self._channel, self._place, self._wanted = channel, place, wanted

    def index(self) -> bytes:
        """The text of its index; raises UnusableReplica."""
        message = self._ask_peer({"op": "index"})
        text = bytearray(message["data_bytes"])
        crc32 = self._read(text)
        check_crc32("its index", crc32, f"{message['index_crc32']:08x}")
        return bytes(text)

    def tensor(self, shard: StoredShard) -> torch.Tensor:
        """A shard in fresh memory; raises UnusableReplica."""
        data = torch.empty(shard.size_bytes, dtype=torch.uint8)
        message = self._ask_peer({"op": "read", "begin": shard.offset, "bytes": shard.size_bytes})
        if message.get("data_bytes") != shard.size_bytes:
            raise UnusableReplica(
                f"{shard.name} came with {message.get('data_bytes')} bytes instead of {shard.size_bytes}"
            )
        check_crc32(shard.name, self._read(data.numpy().data), shard.sha256)
        return data.view(STORED_DTYPES[shard.dtype].torch).view(shard.region.size)

    def _ask_peer(self, question: dict[str, Any]) -> dict[str, Any]:
        place = {"kind": self._place.kind, "slot": self._place.slot, "buffer": self._place.buffer}
        wanted = {"generation": self._wanted.generation, "step": self._wanted.step, "rank": self._wanted.rank}
        try:
            self._channel.send({**question, **place, **wanted})
            message = self._channel.wait(ANSWER_S)
        except (OSError, TimeoutError) as error:
            raise UnusableReplica(str(error)) from error
        if message["op"] == "gone":
            raise UnusableReplica("it is no longer there")
        return message

    def _read(self, buffer: bytearray | memoryview) -> str:
        try:
            return f"{self._channel.read_into(buffer):08x}"
        except OSError as error:
            raise UnusableReplica(str(error)) from error


def check_crc32(what: str, found: str, written: str) -> None:
    """Raises UnusableReplica where a checksum differs."""
    if found != written:
        raise UnusableReplica(f"{what} is not what was written: its checksum is {found} instead of {written}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReplicaAccess:
    """How to read replicas: this host's directly, another's through a server of its at (address, port)."""

    replica_store: ReplicaStore
    local_host: str
    servers: Mapping[str, tuple[str, int]]
    secret: bytes
    bind: str = ""  # our own address to speak from; "" is any

    def connect(self, host: str) -> Channel:
        """A connection to a replica server of another host; raises UnusableReplica."""
        if host not in self.servers:
            raise UnusableReplica("that host has left")
        hello = {"role": "replica", "host": self.local_host}
        try:
            return connect(self.servers[host], self.secret, hello, timeout_s=CONNECT_S, bind=self.bind)
        except (OSError, TimeoutError) as error:
            raise UnusableReplica(str(error)) from error


class ReplicaSource:
    """A step that the replica stores hold in full; a StateSource.

    `peers` tells where a replica server of each other host listens, `writers` which ranks wrote any tensor, where that
    is known without looking at each. Where there are two copies of a rank's snapshot and one is damaged or its host
    gone, the other is taken. Places and peers are looked up when they are needed: of many ranks few are read.
    """

    def __init__(
        self,
        choice: RestorePoint,
        *,
        replica_store: ReplicaStore,
        local_host: str,
        peers: Mapping[str, tuple[str, int]],
        secret: bytes,
        bind: str = "",
        writers: Container[int] | None = None,
    ) -> None:
        self._choice, self._writers = choice, writers
        self._access = _ReplicaAccess(
            replica_store=replica_store, local_host=local_host, servers=peers, secret=secret, bind=bind
        )
        self._snapshots: dict[int, SnapshotReader] = {}
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"memory of step {self._choice.step} (generation {self._choice.generation})"

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self._choice.step

    @property
    def world(self) -> int:
        """How many ranks wrote it."""
        return self._choice.world

    @property
    def meta(self) -> Mapping[str, Any]:
        """The `meta` of the save; raises DamagedCheckpoint."""
        # Any rank will do; a thousand ranks that all asked the host of rank 0 would keep it busy.
        wanted = (self._choice.generation, self._choice.step)
        near = (one.rank for one in self._access.replica_store.held() if (one.generation, one.step) == wanted)
        return self._rank_contents(next(near, 0)).meta

    def count(self, rank: int) -> int:
        """How many shards a rank wrote; 1 where only that it did is known."""
        if self._writers is not None:
            return int(rank in self._writers)
        return self._choice.places[rank][0].tensors

    def index(self, rank: int) -> RankIndex:
        """What a rank wrote; raises DamagedCheckpoint."""
        found = self._rank_contents(rank)
        return RankIndex(rank=rank, header_bytes=0, header_sha256="", shards=found.shards, meta=found.rank_meta)

    def _rank_contents(self, rank: int) -> SnapshotIndex:
        with self.open(rank) as snapshot:
            return snapshot.contents()

    def open(self, rank: int) -> SnapshotReader:
        """The tensors of a rank; what is wrong with them is found when they are checked."""
        with self._lock:
            if rank not in self._snapshots:
                wanted = SnapshotId(generation=self._choice.generation, step=self._choice.step, rank=rank)
                self._snapshots[rank] = SnapshotReader(self.where, self._choice.places[rank], wanted, self._access)
            return self._snapshots[rank]


class SnapshotReader:
    """The snapshot of one rank, in all its copies. It remembers what it has read, so that nothing is sent twice."""

    def __init__(self, where: str, places: Sequence[ReplicaPlace], wanted: SnapshotId, access: _ReplicaAccess) -> None:
        self._where, self._wanted, self._access = where, wanted, access
        self._places = sorted(places, key=lambda place: place.host != access.local_host)  # ours first
        self._read: dict[str, torch.Tensor] = {}
        self._index: SnapshotIndex | None = None
        self._channels: dict[str, Channel] = {}
        self._lock = threading.RLock()

    @property
    def is_near(self) -> bool:
        """Whether this host has a copy."""
        return self._places[0].host == self._access.local_host

    def contents(self) -> SnapshotIndex:
        """The index, from the first copy of which that is sound; raises DamagedCheckpoint."""
        with self._lock:
            if self._index is None:
                self._index = decode_snapshot_index(
                    self._first_copy("the index", lambda copy: copy.index()), self._wanted.rank
                )
            return self._index

    def check(self, shards: Iterable[StoredShard]) -> None:
        """Compare these shards with their checksums; raises DamagedCheckpoint when every copy of one is wrong."""
        for shard in shards:
            self._whole_shard(shard)

    def read(self, shard: StoredShard, part: Region) -> torch.Tensor:
        """The elements of `part`, which lies inside the shard's region."""
        return self._whole_shard(shard)[part.within(shard.region)]

    def _whole_shard(self, shard: StoredShard) -> torch.Tensor:
        with self._lock:
            if shard.name not in self._read:
                self._read[shard.name] = self._first_copy(shard.name, lambda copy: copy.tensor(shard))
            return self._read[shard.name]

    def _first_copy(self, what: str, read: Callable[[SnapshotCopy], T]) -> T:
        """What the first sound copy gives."""
        reasons = []
        for place in self._places:
            try:
                return read(self._open_copy(place))
            except UnusableReplica as error:
                reasons.append(f"{place.host}: {error}")
        what = f"holds no intact copy of {what} of rank {self._wanted.rank}: {'; '.join(reasons)}"
        raise damaged_checkpoint(self._where, what, why="training would go on with wrong numbers")

    def _open_copy(self, place: ReplicaPlace) -> SnapshotCopy:
        if place.host == self._access.local_host:
            return LocalReplica(self._access.replica_store.segment(place.kind, place.slot, place.buffer), self._wanted)
        if place.host not in self._channels:
            self._channels[place.host] = self._access.connect(place.host)
        return RemoteReplica(self._channels[place.host], place, self._wanted)

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
