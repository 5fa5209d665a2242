"""Rescue of a run's state at its end: write the newest step in memory to disk if it is newer than the disk's.

Hosts do this through the run folder, without the coordinator, which has ended. Each writes a list of what it holds;
the first host finds the newest step that memory holds in full and assigns each host the ranks to write; the host that
writes rank 0 waits for the others and commits.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import Kind, Lineage, ReplicaInfo, find_restore_points, kind_of
from phalanx.errors import PhalanxError, Problem, SystemFailure
from phalanx.io.files import load_json, replace_text
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.paths import Location, os_error_text
from phalanx.train.state.replica_reader import LocalReplica, SnapshotId, UnusableReplica
from phalanx.train.state.save import SavedCheckpoint, save_checkpoint
from phalanx.train.state.snapshot import decode_snapshot_index

# For the other hosts to list what they hold: all receive the end at the same time
OTHERS_S = 5.0
WRITE_S = 120.0  # for the slowest host to write its ranks
LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RescueOrder:
    """The information a host needs to write down what memory holds."""

    generation: int
    hosts: tuple[str, ...]
    lineage: Lineage
    at_most: int | None

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RescueOrder:
        """Decode the coordinator's last message."""
        at_most = message.get("at_most")
        return cls(
            generation=int(message["generation"]),
            hosts=tuple(map(str, message["hosts"])),
            lineage=Lineage.from_json(message["lineage"]),
            at_most=None if at_most is None else int(at_most),
        )


def rescue_state(
    run_folder: Path,
    order: RescueOrder,
    *,
    host: str,
    replica_store: ReplicaStore,
    places: Sequence[Location],
    keep: int,
    newer_than: int = 0,
) -> SavedCheckpoint | None:
    """Write this host's ranks of the newest step in memory; return what was committed, on the host that has rank 0.

    `places` are tried in turn, the checkpoint folder first; `newer_than` is the newest step on disk. Returns None if
    memory has no newer step, and on hosts without rank 0. Raises SystemFailure if there was a newer step that could
    not be written to any place.
    """
    copies = _copies_to_write(run_folder / "rescue", order, host, replica_store, newer_than)
    if not copies:
        return None
    reasons: list[Problem] = []
    is_alone = len(order.hosts) == 1
    # Several hosts need folders that they share.
    usable = [place for place in places if is_alone or not is_local_place(place, run_folder)]
    for number, place in enumerate(usable):
        saved = None
        try:
            claim_place(place, run_folder)
            saved = [_write_rank(place, copy, replica_store, keep=keep, generation=order.generation) for copy in copies]
        except PhalanxError as error:
            reasons += error.problems
        except (UnusableReplica, OSError) as error:
            problem = f"step {copies[0].wanted.step} is not saved: {error}"
            reasons.append(Problem(where=str(place), what=problem))
        if not is_alone and number + 1 < len(usable):
            verdict = run_folder / "rescue" / f"verdict-{order.generation}-{number}.json"
            if not _is_committed(verdict, copies, saved):
                continue
        if saved is not None:
            return saved[-1] if copies[-1].wanted.rank == 0 else None
        leave_place(place, run_folder)
    raise SystemFailure(reasons)


def _is_committed(verdict: Path, copies: Sequence[_RankCopy], saved: Sequence[SavedCheckpoint] | None) -> bool:
    """Return whether the host of rank 0, which commits, had every rank's part; if not, all hosts try the next place.

    A host that receives no verdict decides by its own part.
    """
    if copies[-1].wanted.rank == 0:
        replace_text(verdict, json.dumps(saved is not None))
        return saved is not None
    return bool(load_json(verdict)) if _wait_for([verdict], WRITE_S + OTHERS_S) else saved is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankCopy:
    """A snapshot of a rank that this host must write, and its location in memory."""

    wanted: SnapshotId
    world: int
    kind: Kind
    slot: int
    buffer: int


def _copies_to_write(
    folder: Path, order: RescueOrder, host: str, replica_store: ReplicaStore, newer_than: int
) -> list[_RankCopy]:
    """Return the copies this host must write, rank 0 last because its writer waits for all others."""
    if len(order.hosts) == 1:
        return _copies_by_host({host: replica_store.held()}, order, newer_than)[host]
    folder.mkdir(exist_ok=True)
    places = {name: index for index, name in enumerate(order.hosts)}
    replace_text(
        _rescue_file(folder, order, "held", places[host]), json.dumps([item.to_json() for item in replica_store.held()])
    )
    if host == order.hosts[0]:
        files = {name: _rescue_file(folder, order, "held", place) for name, place in places.items()}
        _wait_for(list(files.values()), OTHERS_S)
        infos_by_host = {
            name: [ReplicaInfo.from_json(row) for row in load_json(path)]
            for name, path in files.items()
            if path.exists()
        }
        for name, copies in _copies_by_host(infos_by_host, order, newer_than).items():
            replace_text(
                _rescue_file(folder, order, "write", places[name]), json.dumps([asdict(item) for item in copies])
            )
    own_file = _rescue_file(folder, order, "write", places[host])
    if not _wait_for([own_file], 2 * OTHERS_S):
        return []
    return [_decode_copy(row) for row in load_json(own_file)]


def _copies_by_host(
    held: Mapping[str, Sequence[ReplicaInfo]], order: RescueOrder, newer_than: int
) -> dict[str, list[_RankCopy]]:
    """Find the newest step that these hosts hold in full, and assign its ranks to hosts that have the copies."""
    copies: dict[str, list[_RankCopy]] = {name: [] for name in order.hosts}
    points = find_restore_points(held, lineage=order.lineage, at_most=order.at_most)
    point = max(points, key=lambda restore_point: (restore_point.step, restore_point.generation), default=None)
    if point is None or point.step <= newer_than:
        return copies
    for rank in sorted(point.places, reverse=True):
        place = point.places[rank][0]
        snapshot_id = SnapshotId(generation=point.generation, step=point.step, rank=rank)
        copies[place.host].append(
            _RankCopy(wanted=snapshot_id, world=point.world, kind=place.kind, slot=place.slot, buffer=place.buffer)
        )
    return copies


def _decode_copy(row: Mapping[str, Any]) -> _RankCopy:
    numbers = {name: int(row[name]) for name in ("world", "slot", "buffer")}
    return _RankCopy(
        wanted=SnapshotId(**{key: int(row["wanted"][key]) for key in ("generation", "step", "rank")}),
        kind=kind_of(row),
        **numbers,
    )


def _rescue_file(folder: Path, order: RescueOrder, what: str, place: int) -> Path:
    return folder / f"{what}-{order.generation}-{place}.json"


def _wait_for(paths: Sequence[Path], seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_S)
    return True


def _write_rank(
    place: Location, copy: _RankCopy, replica_store: ReplicaStore, *, keep: int, generation: int
) -> SavedCheckpoint:
    """Write one rank of the step, with every tensor's checksum verified."""
    replica = LocalReplica(replica_store.segment(copy.kind, copy.slot, copy.buffer), copy.wanted)
    index = decode_snapshot_index(replica.index(), copy.wanted.rank)
    shards = [
        TensorShard(
            name=stored.name,
            tensor=replica.tensor(stored),
            shape=stored.shape,
            start=stored.region.start,
            replicas=1,
            owner=True,
            groups={},
        )
        for stored in index.shards
    ]
    return save_checkpoint(
        place,
        step=copy.wanted.step,
        attempt=f"rescue{generation}.{copy.wanted.step}",
        shards=shards,
        meta=index.meta,
        rank=copy.wanted.rank,
        world=copy.world,
        keep=keep,
        generation=generation,
        rank_meta=index.rank_meta,
        timeout_s=WRITE_S,
    )


def rescue_places(checkpoints: Location, run_folder: Path) -> list[Location]:
    """Return the places to try, first those that all hosts share.

    They are the checkpoint folder, the run folder, and for each host alone a folder for temporary files and the home
    folder.
    """
    name, run_checkpoints = _local_name(run_folder), run_folder / "checkpoints"
    local_places = [
        parent / name for parent in (Path(tempfile.gettempdir()), Path.home()) if os.access(parent, os.W_OK)
    ]
    return [checkpoints, *([run_checkpoints] if checkpoints != run_checkpoints else []), *local_places]


def is_local_place(place: Location, run_folder: Path) -> bool:
    """Return whether only the processes of one host can use the place."""
    return isinstance(place, Path) and place.name == _local_name(run_folder)


def claim_place(place: Location, run_folder: Path) -> None:
    """Create a local folder, and make it private; raise SystemFailure if another user owns it."""
    if not isinstance(place, Path) or not is_local_place(place, run_folder):
        return
    try:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        folder_stat = place.lstat()
        if stat.S_ISDIR(folder_stat.st_mode) and folder_stat.st_uid == os.geteuid():
            place.chmod(0o700)
            return
        problem = "it belongs to somebody else, or is no folder"
    except OSError as error:
        problem = os_error_text(error)
    raise SystemFailure(Problem(where=str(place), what=problem))


def leave_place(place: Location, run_folder: Path) -> None:
    """Delete the empty folder of a place that could not be written to."""
    if isinstance(place, Path) and is_local_place(place, run_folder):
        with suppress(OSError):
            place.rmdir()


def _local_name(run_folder: Path) -> str:
    return f"phalanx-{run_folder.resolve().name}"
