"""Snapshots of all ranks as one source of a restore: this host's read where they lie, others' over the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from phalanx.elastic.channel import Channel, connect
from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import ReplicaPlace, RestorePoint
from phalanx.train.state.boxes import Box
from phalanx.train.state.damage import damaged
from phalanx.train.state.index import Entry, Index
from phalanx.train.state.memory_contents import Contents, decode
from phalanx.train.state.memory_copies import Copy, LocalCopy, RemoteCopy, Unusable, Wanted

CONNECT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vaults:
    """How to read the vaults: this host's directly, another's through a server of its at (address, port)."""

    vault: ReplicaStore
    local_host: str
    servers: Mapping[str, tuple[str, int]]
    secret: bytes
    bind: str = ""  # our own address to speak from; "" is any

    def connect(self, host: str) -> Channel:
        """A connection to a vault server of another host; raises Unusable."""
        if host not in self.servers:
            raise Unusable("that host is not there any more")
        hello = {"role": "vault", "host": self.local_host}
        try:
            return connect(self.servers[host], self.secret, hello, timeout_s=CONNECT_S, bind=self.bind)
        except (OSError, TimeoutError) as error:
            raise Unusable(str(error)) from error


class MemorySource:
    """A step that the vaults hold in full; implements checkpoint.source.Source.

    `peers` tells where a vault server of each other host listens. Where there are two copies of a rank's snapshot and
    one is damaged or its host gone, the other is taken.
    """

    def __init__(
        self,
        choice: RestorePoint,
        *,
        vault: ReplicaStore,
        local_host: str,
        peers: Mapping[str, tuple[str, int]],
        secret: bytes,
        bind: str = "",
    ) -> None:
        self._choice = choice
        vaults = _Vaults(vault=vault, local_host=local_host, servers=peers, secret=secret, bind=bind)
        self._snapshots = {
            rank: Snapshot(self.where, places, Wanted(epoch=choice.epoch, step=choice.step, rank=rank), vaults)
            for rank, places in choice.places.items()
        }

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"memory of step {self._choice.step} (epoch {self._choice.epoch})"

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
        """What all ranks wanted to remember; raises Damaged."""
        # Any rank will do; a thousand ranks that all asked the host of rank 0 would keep it busy.
        return self._contents(next((rank for rank, one in self._snapshots.items() if one.is_near), 0)).meta

    def count(self, rank: int) -> int:
        """How many boxes a rank wrote."""
        return self._choice.places[rank][0].tensors

    def index(self, rank: int) -> Index:
        """What a rank wrote; raises Damaged."""
        found = self._contents(rank)
        return Index(rank=rank, header_bytes=0, header_sha256="", entries=found.entries, meta=found.rank_meta)

    def _contents(self, rank: int) -> Contents:
        with self.open(rank) as snapshot:
            return snapshot.contents()

    def open(self, rank: int) -> Snapshot:
        """The tensors of a rank; what is wrong with them is found when they are checked."""
        return self._snapshots[rank]


class Snapshot:
    """The snapshot of one rank, in all its copies. It remembers what it has read, so that nothing is sent twice."""

    def __init__(self, where: str, places: Sequence[ReplicaPlace], wanted: Wanted, vaults: _Vaults) -> None:
        self._where, self._wanted, self._vaults = where, wanted, vaults
        self._places = sorted(places, key=lambda place: place.host != vaults.local_host)  # ours first
        self._read: dict[str, torch.Tensor] = {}
        self._index: Contents | None = None
        self._channels: dict[str, Channel] = {}
        self._lock = threading.RLock()

    @property
    def is_near(self) -> bool:
        """Whether this host has a copy."""
        return self._places[0].host == self._vaults.local_host

    def contents(self) -> Contents:
        """The index, from the first copy of which that is sound; raises Damaged."""
        with self._lock:
            if self._index is None:
                self._index = decode(self._first("the index", lambda copy: copy.index()), self._wanted.rank)
            return self._index

    def check(self, entries: Iterable[Entry]) -> None:
        """Compare the bytes of these boxes with their checksums; raises Damaged when every copy of one is wrong."""
        for entry in entries:
            self._whole(entry)

    def read(self, entry: Entry, part: Box) -> torch.Tensor:
        """The elements of `part`, which lies inside the entry's box."""
        return self._whole(entry)[part.within(entry.box)]

    def _whole(self, entry: Entry) -> torch.Tensor:
        with self._lock:
            if entry.name not in self._read:
                self._read[entry.name] = self._first(entry.name, lambda copy: copy.tensor(entry))
            return self._read[entry.name]

    def _first(self, what: str, read: Callable[[Copy], T]) -> T:
        """What the first sound copy gives."""
        reasons = []
        for place in self._places:
            try:
                return read(self._copy(place))
            except Unusable as error:
                reasons.append(f"{place.host}: {error}")
        what = f"holds no sound copy of {what} of rank {self._wanted.rank}: {'; '.join(reasons)}"
        raise damaged(self._where, what, why="training would go on with wrong numbers")

    def _copy(self, place: ReplicaPlace) -> Copy:
        if place.host == self._vaults.local_host:
            return LocalCopy(self._vaults.vault.segment(place.kind, place.slot, place.generation), self._wanted)
        if place.host not in self._channels:
            self._channels[place.host] = self._vaults.connect(place.host)
        return RemoteCopy(self._channels[place.host], place, self._wanted)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
