"""Where replicas lie, in the store in which the ranks of a membership meet: told by who holds them, asked by who reads.

Nobody is sent the places of all ranks: a rank of an unchanged layout asks for its own copy and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from torch.distributed import Store  # type: ignore[attr-defined]

from phalanx.elastic.restore_point import KINDS, ReplicaInfo, ReplicaPlace


class ReplicaDirectory(Mapping[int, tuple[ReplicaPlace, ...]]):
    """The places of each rank's snapshot of one step, by rank, the best first; asking waits for all `hosts` to tell."""

    def __init__(self, store: Store, *, generation: int, step: int, world: int, hosts: int) -> None:
        self._store, self._generation, self._step, self._world, self._hosts = store, generation, step, world, hosts
        self._known: dict[int, tuple[ReplicaPlace, ...]] = {}
        self.servers = ReplicaServers(store)

    def announce(self, host: str, server: tuple[str, int], held: Iterable[ReplicaInfo]) -> None:
        """Tell what a host holds of the step, and where a replica server of it listens; one rank of each host does."""
        self._store.set(f"replica-server/{host}", json.dumps(server))
        for one in held:
            if (one.generation, one.step, one.world) == (self._generation, self._step, self._world):
                place = ReplicaPlace(host=host, slot=one.slot, kind=one.kind, buffer=one.buffer, tensors=one.tensors)
                self._store.set(f"replica/{one.kind}/{one.rank}", json.dumps(place.to_json()))
        if self._store.add("replica-hosts", 1) == self._hosts:
            self._store.set("replicas-told", "")

    def __getitem__(self, rank: int) -> tuple[ReplicaPlace, ...]:
        if rank not in self._known:
            self._store.wait(["replicas-told"])
            names = [f"replica/{kind}/{rank}" for kind in KINDS]
            told = [self._store.get(name) for name in names if self._store.check([name])]
            if not told:
                raise KeyError(rank)
            self._known[rank] = tuple(ReplicaPlace.from_json(json.loads(one)) for one in told)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._world))

    def __len__(self) -> int:
        return self._world


class ReplicaServers(Mapping[str, tuple[str, int]]):
    """Where a replica server of each host listens; asked host by host, never listed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, host: str) -> tuple[str, int]:
        name = f"replica-server/{host}"
        if not self._store.check([name]):
            raise KeyError(host)
        address, port = json.loads(self._store.get(name))
        return str(address), int(port)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
