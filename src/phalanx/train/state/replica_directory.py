"""Directory of in-memory replicas, in the store of a membership: hosts announce what they hold, readers look it up.

The places of all ranks are never sent to a rank: with an unchanged layout it looks up only its own copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from torch.distributed import Store  # type: ignore[attr-defined]

from phalanx.elastic.restore_point import KINDS, ReplicaInfo, ReplicaPlace


class ReplicaDirectory(Mapping[int, tuple[ReplicaPlace, ...]]):
    """The places of each rank's snapshot of one step, best first; a lookup waits until all `hosts` have announced."""

    def __init__(self, store: Store, *, generation: int, step: int, world: int, hosts: int) -> None:
        self._store, self._generation, self._step, self._world, self._hosts = store, generation, step, world, hosts
        self._known: dict[int, tuple[ReplicaPlace, ...]] = {}
        self.servers = ReplicaServers(store)

    def announce(self, host: str, server: tuple[str, int], held: Iterable[ReplicaInfo]) -> None:
        """Announce the snapshots of the step that a host holds, and its replica server.

        One rank of each host calls this.
        """
        self._store.set(f"replica-server/{host}", json.dumps(server))
        for info in held:
            if (info.generation, info.step, info.world) == (self._generation, self._step, self._world):
                place = ReplicaPlace(
                    host=host, slot=info.slot, kind=info.kind, buffer=info.buffer, tensors=info.tensors
                )
                self._store.set(f"replica/{info.kind}/{info.rank}", json.dumps(place.to_json()))
        if self._store.add("replica-hosts", 1) == self._hosts:
            self._store.set("replicas-told", "")

    def __getitem__(self, rank: int) -> tuple[ReplicaPlace, ...]:
        if rank not in self._known:
            self._store.wait(["replicas-told"])
            names = [f"replica/{kind}/{rank}" for kind in KINDS]
            entries = [self._store.get(name) for name in names if self._store.check([name])]
            if not entries:
                raise KeyError(rank)
            self._known[rank] = tuple(ReplicaPlace.from_json(json.loads(entry)) for entry in entries)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._world))

    def __len__(self) -> int:
        return self._world


class ReplicaServers(Mapping[str, tuple[str, int]]):
    """Addresses of the hosts' replica servers, looked up host by host and never listed."""

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
