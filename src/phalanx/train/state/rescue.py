"""A run ends and memory holds a newer step than the disk: write that step to disk, before the memory is given back.

Every host does this by itself, with what lies in the run folder: the coordinator may be gone, and so may hosts. Each
says what it holds; when all have said so, or after a while, each knows the same newest step that memory holds in full,
and writes the ranks of it that are its own. The host that has rank 0 waits for the others and commits.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import Lineage, ReplicaInfo, RestorePoint, find_restore_points
from phalanx.errors import PhalanxError, Problem, SystemFailure
from phalanx.io.files import replace_text
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.paths import Location
from phalanx.train.state.replica_reader import LocalReplica, SnapshotId, UnusableReplica
from phalanx.train.state.save import SavedCheckpoint, save_checkpoint
from phalanx.train.state.snapshot import decode_snapshot_index

OTHERS_S = 5.0  # for the other hosts to say what they hold: they hear of the end at the same time
WRITE_S = 120.0  # for the slowest host to write its ranks
LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RescueOrder:
    """What a host must know to write down what memory holds. `newer_than` is the newest step on disk."""

    generation: int
    hosts: tuple[str, ...]
    lineage: Lineage
    at_most: int | None
    newer_than: int

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RescueOrder:
        """From the coordinator's last message."""
        at_most = message.get("at_most")
        return cls(
            generation=int(message["generation"]),
            hosts=tuple(map(str, message["hosts"])),
            lineage=Lineage.from_json(message["lineage"]),
            at_most=None if at_most is None else int(at_most),
            newer_than=int(message["newer_than"]),
        )


def rescue_state(
    run_folder: Path,
    order: RescueOrder,
    *,
    host: str,
    vault: ReplicaStore,
    places: Sequence[Location],
    keep: int,
) -> SavedCheckpoint | None:
    """Write this host's ranks of the newest step in memory; what was committed, on the host that has rank 0.

    `places` are tried in turn: the checkpoint folder first. None where memory has nothing newer than the disk, and on
    hosts that only helped. Raises SystemFailure where there was something, and it could not be written anywhere.
    """
    point = _newest_step(run_folder / "rescue", order, host, vault)
    if point is None or point.step <= order.newer_than:
        return None
    mine = [rank for rank in sorted(point.places, reverse=True) if point.places[rank][0].host == host]
    if not mine:
        return None
    reasons: list[Problem] = []
    # Hosts that share no other folder can only meet in the checkpoint folder.
    for place in places if len(order.hosts) == 1 else places[:1]:
        try:
            saved = [_write_rank(place, point, rank, vault, keep=keep, generation=order.generation) for rank in mine]
        except PhalanxError as error:
            reasons += error.problems
        except (UnusableReplica, OSError) as error:
            reasons.append(Problem(where=str(place), what=f"step {point.step} is not saved: {error}"))
        else:
            return saved[-1] if mine[-1] == 0 else None
    raise SystemFailure(reasons)


def _newest_step(folder: Path, order: RescueOrder, host: str, vault: ReplicaStore) -> RestorePoint | None:
    """The newest step that the hosts hold in full, as far as they say so."""
    if len(order.hosts) == 1:
        held: dict[str, list[ReplicaInfo]] = {host: vault.held()}
    else:
        held = _held_by_all(folder, order, host, vault)
    points = find_restore_points(held, lineage=order.lineage, at_most=order.at_most)
    return max(points, key=lambda point: (point.step, point.epoch), default=None)


def _held_by_all(folder: Path, order: RescueOrder, host: str, vault: ReplicaStore) -> dict[str, list[ReplicaInfo]]:
    folder.mkdir(exist_ok=True)
    files = {name: folder / f"{order.generation}-{index}.json" for index, name in enumerate(order.hosts)}
    replace_text(files[host], json.dumps([one.to_json() for one in vault.held()]))
    until_s = time.monotonic() + OTHERS_S
    while not all(path.exists() for path in files.values()) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return {
        name: [ReplicaInfo.from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))]
        for name, path in files.items()
        if path.exists()
    }


def _write_rank(
    place: Location, point: RestorePoint, rank: int, vault: ReplicaStore, *, keep: int, generation: int
) -> SavedCheckpoint:
    """One rank of the step, every tensor compared with its checksum."""
    where = point.places[rank][0]
    wanted = SnapshotId(epoch=point.epoch, step=point.step, rank=rank)
    replica = LocalReplica(vault.segment(where.kind, where.slot, where.generation), wanted)
    index = decode_snapshot_index(replica.index(), rank)
    shards = [
        TensorShard(
            name=one.name,
            tensor=replica.tensor(one),
            shape=one.shape,
            start=one.region.start,
            replicas=1,
            owner=True,
            groups={},
        )
        for one in index.shards
    ]
    return save_checkpoint(
        place,
        step=point.step,
        attempt=f"rescue{generation}.{point.step}",
        pieces=shards,
        meta=index.meta,
        rank=rank,
        world=point.world,
        keep=keep,
        epoch=generation,
        rank_meta=index.rank_meta,
        timeout_s=WRITE_S,
    )


def rescue_places(checkpoints: Location, run_folder: Path) -> list[Location]:
    """Where to try: the run's checkpoint folder, then beside temporary files and in the home folder."""
    name = f"phalanx-{run_folder.resolve().name}"
    others = [Path(tempfile.gettempdir()), Path.home()]
    return [checkpoints, *(one / name for one in others if os.access(one, os.W_OK))]
