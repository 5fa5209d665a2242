"""The route of a load: which part of which file fills which piece.

Indexes are read from the rank that most likely holds our pieces on (search.py), and no further than needed: a rank that
starts again in its old layout reads its own and its owners', in another layout a few more, at worst all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from phalanx.errors import Problem, UserError, nearest
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.index import RankIndex, StoredShard
from phalanx.train.state.paths import Location
from phalanx.train.state.reader import StateSource, check_coverage, check_same_tensor, open_source
from phalanx.train.state.restore import search_writers
from phalanx.train.state.shards import Region, dtype_name, region_of, shared_region


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCopy:
    """`part` of an entry goes into a piece."""

    entry: StoredShard
    part: Region
    piece: TensorShard


@dataclass(kw_only=True, slots=True)
class _Need:
    """A piece, and what was found of it so far."""

    piece: TensorShard
    box: Region
    missing: int
    parts: list[tuple[StoredShard, Region]] = field(default_factory=list)
    first: StoredShard | None = None  # any box of the tensor, ours or not

    def offer(self, where: str, entry: StoredShard) -> None:
        self.first = self.first or entry
        check_same_tensor(where, self.first, entry)
        part = shared_region(entry.box, self.box) if entry.shape == tuple(self.piece.shape) else None
        if part is not None:
            self.parts.append((entry, part))
            self.missing -= part.volume


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreRoute:
    """All moves of a load, by the rank whose tensors they read."""

    source: StateSource
    moves: dict[int, list[ShardCopy]]
    num_indexes_read: int


def find_restore_route(
    where: Location | StateSource, pieces: Sequence[TensorShard], *, cast: bool, rank: int, world: int
) -> RestoreRoute:
    """How to fill `pieces` of a rank of a world, which need not be that of the checkpoint.

    Raises UserError when the checkpoint is of another model, Damaged when an index is, or a part is nowhere.
    """
    source = open_source(where)
    needs = [_Need(piece=piece, box=region_of(piece), missing=piece.tensor.numel()) for piece in pieces]
    indexes = _read_indexes(source, needs, rank, world)
    _refuse_other_model(source.where, needs, indexes, cast)
    return RestoreRoute(source=source, moves=_moves(needs), num_indexes_read=len(indexes))


def _read_indexes(source: StateSource, needs: Sequence[_Need], rank: int, world: int) -> dict[int, RankIndex]:
    by_name: dict[str, list[_Need]] = {}
    for need in needs:
        by_name.setdefault(need.piece.name, []).append(need)
    writers = [writer for writer in range(source.world) if source.count(writer)]
    indexes: dict[int, RankIndex] = {}
    missing = sum(need.missing for need in needs)
    if not writers or not missing:
        return indexes
    order = search_writers(rank, world, writers=writers, copies=len(writers) < source.world)
    writer: int | None = next(order)
    while writer is not None and any(need.missing > 0 for need in needs):
        indexes[writer] = source.index(writer)
        _offer(source.where, indexes[writer], by_name)
        before, missing = missing, sum(need.missing for need in needs)
        writer = _next(order, before - missing)
    return indexes


def _next(order: Generator[int, int, None], found: int) -> int | None:
    try:
        return order.send(found)
    except StopIteration:
        return None


def _offer(where: str, index: RankIndex, by_name: dict[str, list[_Need]]) -> None:
    for entry in index.entries:
        for need in by_name.get(entry.name, ()):
            need.offer(where, entry)


def _moves(needs: Sequence[_Need]) -> dict[int, list[ShardCopy]]:
    moves: dict[int, list[ShardCopy]] = {}
    for need in needs:
        check_coverage(need.piece.name, need.box, need.parts)
        for entry, part in need.parts:
            moves.setdefault(entry.rank, []).append(ShardCopy(entry=entry, part=part, piece=need.piece))
    return moves


def _refuse_other_model(where: str, needs: Sequence[_Need], indexes: dict[int, RankIndex], cast: bool) -> None:
    problems = []
    for need in needs:
        if need.first is None:
            problems.append(_absent(where, need.piece.name, indexes))
        elif problem := _mismatch(where, need.first, need.piece, cast):
            problems.append(problem)
    if problems:
        raise UserError(problems)


def _absent(where: str, name: str, indexes: dict[int, RankIndex]) -> Problem:
    known = {entry.name for index in indexes.values() for entry in index.entries}
    close = nearest(name, known)
    why = f"it holds {close}" if close else f"it holds {len(known)} tensors of other names"
    return Problem(where=where, what=f"holds no {name}", why=why)


def _mismatch(where: str, stored: StoredShard, piece: TensorShard, cast: bool) -> Problem | None:
    if stored.shape != tuple(piece.shape):
        what = f"{piece.name} is {list(stored.shape)} there and {list(piece.shape)} in this model"
        return Problem(where=where, what=what, fix="resume with the job file of the run that wrote it")
    mine = dtype_name(piece.tensor.dtype)
    if stored.dtype == mine or cast:
        return None
    what = f"{piece.name} is {stored.dtype} there and {mine} in this model"
    fix = "load with cast=True if that is meant"
    return Problem(where=where, what=what, why="values would be rounded", fix=fix)
