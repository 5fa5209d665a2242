"""Restoring from memory: snapshots on this host are read in place, those on other hosts over the network.

There may be two copies of each snapshot; if one is gone or damaged, the other is used.
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
    """This copy is gone or damaged; another one may be intact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotId:
    """The generation, step and rank that a snapshot must have."""

    generation: int
    step: int
    rank: int

    def refuse_other(self, header: SegmentHeader | None) -> SegmentHeader:
        """Return the header if it matches; raise UnusableReplica if not."""
        if header is None or (header.generation, header.step, header.rank) != (self.generation, self.step, self.rank):
            raise UnusableReplica("it is no longer there")
        return header


class SnapshotCopy(Protocol):
    """One copy of a snapshot."""

    def index(self) -> bytes:
        """Return the text of the snapshot's index; raise UnusableReplica."""

    def tensor(self, shard: StoredShard) -> torch.Tensor:
        """Return a full shard whose checksum matches; raise UnusableReplica."""


class LocalReplica:
    """A segment of this host, whose tensors are views of it, not copies."""

    def __init__(self, segment: MemorySegment, wanted: SnapshotId) -> None:
        self._segment, self._wanted = segment, wanted

    def index(self) -> bytes:
        """Return the text of the snapshot's index; raise UnusableReplica."""
        header = self._wanted.refuse_other(self._segment.header())
        text = self._segment.view()[header.index_at : header.end]
        check_crc32("its index", crc32_text(text), f"{header.index_crc32:08x}")
        return bytes(text)

    def tensor(self, shard: StoredShard) -> torch.Tensor:
        """Return a shard as a view of the segment; raise UnusableReplica."""
        self._wanted.refuse_other(self._segment.header())
        view = self._segment.view()
        check_crc32(shard.name, crc32_text(view[shard.offset : shard.offset + shard.size_bytes]), shard.sha256)
        return tensor_in_segment(view, shard)


class RemoteReplica:
    """A segment of another host, read through its replica server."""

    def __init__(self, channel: Channel, place: ReplicaPlace, wanted: SnapshotId) -> None:
        self._channel, self._place, self._wanted = channel, place, wanted

    def index(self) -> bytes:
        """Return the text of the snapshot's index; raise UnusableReplica."""
        message = self._ask_peer({"op": "index"})
        text = bytearray(message["data_bytes"])
        crc32 = self._read(text)
        check_crc32("its index", crc32, f"{message['index_crc32']:08x}")
        return bytes(text)

    def tensor(self, shard: StoredShard) -> torch.Tensor:
        """Return a shard in new memory; raise UnusableReplica."""
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
    """Raise UnusableReplica if a checksum differs."""
    if found != written:
        raise UnusableReplica(f"{what} is not what was written: its checksum is {found} instead of {written}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReplicaAccess:
    """Access to replicas: this host's directly, other hosts' through their servers at (address, port)."""

    replica_store: ReplicaStore
    local_host: str
    servers: Mapping[str, tuple[str, int]]
    secret: bytes
    bind: str = ""  # local address to connect from; "" is any

    def connect(self, host: str) -> Channel:
        """Connect to the replica server of another host; raise UnusableReplica."""
        if host not in self.servers:
            raise UnusableReplica("that host has left")
        hello = {"role": "replica", "host": self.local_host}
        try:
            return connect(self.servers[host], self.secret, hello, timeout_s=CONNECT_S, bind=self.bind)
        except (OSError, TimeoutError) as error:
            raise UnusableReplica(str(error)) from error


class ReplicaSource:
    """A step that the replica stores hold in full; a StateSource.

    `peers` are the addresses of the other hosts' replica servers, `writers` the ranks that wrote any tensor, if that
    is known without reading each index. If one of two copies of a snapshot is damaged or its host gone, the other is
    used. Places and peers are looked up on demand: of many ranks few are read.
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
        """The source's name in messages."""
        return f"memory of step {self._choice.step} (generation {self._choice.generation})"

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._choice.step

    @property
    def world(self) -> int:
        """Number of ranks that wrote it."""
        return self._choice.world

    @property
    def meta(self) -> Mapping[str, Any]:
        """The `meta` of the save; raises DamagedCheckpoint."""
        # Any rank has it; a thousand ranks that all read from the host of rank 0 would overload it.
        identity = (self._choice.generation, self._choice.step)
        local_ranks = (
            info.rank for info in self._access.replica_store.held() if (info.generation, info.step) == identity
        )
        return self._rank_contents(next(local_ranks, 0)).meta

    def count(self, rank: int) -> int:
        """Return the number of shards a rank wrote; 1 if only that it wrote some is known."""
        if self._writers is not None:
            return int(rank in self._writers)
        return self._choice.places[rank][0].tensors

    def index(self, rank: int) -> RankIndex:
        """Return the index of a rank; raise DamagedCheckpoint."""
        snapshot = self._rank_contents(rank)
        return RankIndex(rank=rank, header_bytes=0, header_sha256="", shards=snapshot.shards, meta=snapshot.rank_meta)

    def _rank_contents(self, rank: int) -> SnapshotIndex:
        with self.open(rank) as snapshot:
            return snapshot.contents()

    def open(self, rank: int) -> SnapshotReader:
        """Return the reader of a rank's snapshot; damage is found when shards are checked."""
        with self._lock:
            if rank not in self._snapshots:
                snapshot_id = SnapshotId(generation=self._choice.generation, step=self._choice.step, rank=rank)
                self._snapshots[rank] = SnapshotReader(self.where, self._choice.places[rank], snapshot_id, self._access)
            return self._snapshots[rank]


class SnapshotReader:
    """The snapshot of one rank, in all its copies; it caches what it has read, so that nothing is sent twice."""

    def __init__(self, where: str, places: Sequence[ReplicaPlace], wanted: SnapshotId, access: _ReplicaAccess) -> None:
        self._where, self._wanted, self._access = where, wanted, access
        # Copies on this host first
        self._places = sorted(places, key=lambda place: place.host != access.local_host)
        self._read: dict[str, torch.Tensor] = {}
        self._index: SnapshotIndex | None = None
        self._channels: dict[str, Channel] = {}
        self._lock = threading.RLock()

    @property
    def is_near(self) -> bool:
        """True if this host has a copy."""
        return self._places[0].host == self._access.local_host

    def contents(self) -> SnapshotIndex:
        """Return the index from the first intact copy; raise DamagedCheckpoint."""
        with self._lock:
            if self._index is None:
                self._index = decode_snapshot_index(
                    self._first_copy("the index", lambda copy: copy.index()), self._wanted.rank
                )
            return self._index

    def check(self, shards: Iterable[StoredShard]) -> None:
        """Compare these shards with their checksums; raise DamagedCheckpoint if every copy of one is damaged."""
        for shard in shards:
            self._whole_shard(shard)

    def read(self, shard: StoredShard, part: Region) -> torch.Tensor:
        """Return the elements of `part`, which is inside the shard's region."""
        return self._whole_shard(shard)[part.within(shard.region)]

    def _whole_shard(self, shard: StoredShard) -> torch.Tensor:
        with self._lock:
            if shard.name not in self._read:
                self._read[shard.name] = self._first_copy(shard.name, lambda copy: copy.tensor(shard))
            return self._read[shard.name]

    def _first_copy(self, what: str, read: Callable[[SnapshotCopy], T]) -> T:
        """Apply `read` to the copies in turn, and return the result of the first intact one.

        Raises DamagedCheckpoint.
        """
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
