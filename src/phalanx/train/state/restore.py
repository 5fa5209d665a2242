"""Restore: fill this rank's shards from a checkpoint or from replicas, whatever layout and world size wrote it.

First the route: which part of which stored shard fills which of ours. Indexes are read from the rank on that most
likely holds our shards, and no further than needed: a rank that starts again in its old layout reads its own and its
owners', in another layout a few more, at worst all of them. Then every byte on the route is checked against its
digest, and only then is anything changed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from phalanx.errors import Problem, UserError, nearest
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.checkpoint_index import RankIndex, check_coverage, check_same_tensor
from phalanx.train.state.paths import Location
from phalanx.train.state.reader import HASH_THREADS, StateSource, open_source
from phalanx.train.state.shards import Region, StoredShard, dtype_name, region_of, shared_region

MOST_GUESSES = 16  # 4,096 writers have 13 divisors; those of few stages come first


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCopy:
    """`part` of a stored shard goes into a shard of ours."""

    stored: StoredShard
    part: Region
    target: TensorShard


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreRoute:
    """All copies of a restore, by the rank whose shards they read."""

    source: StateSource
    copies: dict[int, list[ShardCopy]]
    num_indexes_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRestore:
    """A source of which all bytes this rank needs were read and are sound; nothing has been changed yet."""

    route: RestoreRoute

    def fill(self) -> None:
        """Copy the values into the shards, in place."""
        with torch.no_grad():
            for rank, copies in self.route.copies.items():
                with self.route.source.open(rank) as reader:
                    for copy in copies:
                        target = copy.target.tensor[copy.part.within(region_of(copy.target))]
                        target.copy_(reader.read(copy.stored, copy.part))


def load_shards(
    where: Location | StateSource, shards: Sequence[TensorShard], *, cast: bool = False, rank: int = 0, world: int = 1
) -> None:
    """Fill every shard from a commit or another source; `prepare_restore` says what is refused, and changes nothing."""
    prepare_restore(where, shards, cast=cast, rank=rank, world=world).fill()


def prepare_restore(
    where: Location | StateSource, shards: Sequence[TensorShard], *, cast: bool = False, rank: int = 0, world: int = 1
) -> PreparedRestore:
    """Find and verify everything `shards` need, from the ranks that wrote a part of them and no others.

    `rank` and `world` are this process's, and only tell where to look first. Raises UserError when the checkpoint is of
    another model (a tensor it lacks, another shape, another dtype unless `cast`), DamagedCheckpoint when it is not what
    was written or has a hole. On many ranks: prepare on each, agree that all are ready, then fill; or else all of them
    try the checkpoint before it.
    """
    wanted = [shard for shard in shards if shard.tensor.numel()]
    route = find_restore_route(where, wanted, cast=cast, rank=rank, world=world)

    def check(writer: int) -> None:
        needed = {copy.stored.name: copy.stored for copy in route.copies[writer]}
        with route.source.open(writer) as reader:
            reader.check(needed.values())

    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        for _ in pool.map(check, route.copies):
            pass  # raises what a check raised
    return PreparedRestore(route=route)


@dataclass(kw_only=True, slots=True)
class _WantedShard:
    """A shard of ours, and what was found of it so far."""

    target: TensorShard
    region: Region
    missing: int
    parts: list[tuple[StoredShard, Region]] = field(default_factory=list)
    first: StoredShard | None = None  # any stored shard of the tensor, overlapping ours or not

    def offer(self, where: str, stored: StoredShard) -> None:
        self.first = self.first or stored
        check_same_tensor(where, self.first, stored)
        part = shared_region(stored.region, self.region) if stored.shape == tuple(self.target.shape) else None
        if part is not None:
            self.parts.append((stored, part))
            self.missing -= part.volume


def find_restore_route(
    where: Location | StateSource, shards: Sequence[TensorShard], *, cast: bool, rank: int, world: int
) -> RestoreRoute:
    """How to fill `shards` of a rank of a world size, which need not be that of the checkpoint.

    Raises UserError when the checkpoint is of another model, DamagedCheckpoint when an index is damaged, or a part is
    nowhere.
    """
    source = open_source(where)
    wanted = [_WantedShard(target=one, region=region_of(one), missing=one.tensor.numel()) for one in shards]
    indexes = _read_indexes(source, wanted, rank, world)
    _refuse_other_model(source.where, wanted, indexes, cast)
    copies: dict[int, list[ShardCopy]] = {}
    for one in wanted:
        check_coverage(one.target.name, one.region, one.parts)
        for stored, part in one.parts:
            copies.setdefault(stored.rank, []).append(ShardCopy(stored=stored, part=part, target=one.target))
    return RestoreRoute(source=source, copies=copies, num_indexes_read=len(indexes))


def _read_indexes(source: StateSource, wanted: Sequence[_WantedShard], rank: int, world: int) -> dict[int, RankIndex]:
    by_name: dict[str, list[_WantedShard]] = {}
    for one in wanted:
        by_name.setdefault(one.target.name, []).append(one)
    writers = [writer for writer in range(source.world) if source.count(writer)]
    indexes: dict[int, RankIndex] = {}
    missing = sum(one.missing for one in wanted)
    if not writers or not missing:
        return indexes
    order = search_writers(rank, world, writers=writers, copies=len(writers) < source.world)
    writer: int | None = next(order)
    while writer is not None and any(one.missing > 0 for one in wanted):
        indexes[writer] = source.index(writer)
        for stored in indexes[writer].shards:
            for one in by_name.get(stored.name, ()):
                one.offer(source.where, stored)
        before, missing = missing, sum(one.missing for one in wanted)
        try:
            writer = order.send(before - missing)
        except StopIteration:
            writer = None
    return indexes


def _refuse_other_model(where: str, wanted: Sequence[_WantedShard], indexes: dict[int, RankIndex], cast: bool) -> None:
    problems = []
    for one in wanted:
        if one.first is None:
            known = {stored.name for index in indexes.values() for stored in index.shards}
            close = nearest(one.target.name, known)
            why = f"it holds {close}" if close else f"it holds {len(known)} tensors of other names"
            problems.append(Problem(where=where, what=f"holds no {one.target.name}", why=why))
        elif problem := _shard_mismatch(where, one.first, one.target, cast):
            problems.append(problem)
    if problems:
        raise UserError(problems)


def _shard_mismatch(where: str, stored: StoredShard, target: TensorShard, cast: bool) -> Problem | None:
    if stored.shape != tuple(target.shape):
        what = f"{target.name} is {list(stored.shape)} there and {list(target.shape)} in this model"
        return Problem(where=where, what=what, fix="resume with the job file of the run that wrote it")
    mine = dtype_name(target.tensor.dtype)
    if stored.dtype == mine or cast:
        return None
    what = f"{target.name} is {stored.dtype} there and {mine} in this model"
    fix = "load with cast=True if that is meant"
    return Problem(where=where, what=what, why="values would be rounded", fix=fix)


# In which order to ask the ranks that wrote a checkpoint for their indexes: those that most likely hold ours first.
# Ranks are numbered stage by stage, then copy by copy, then shard by shard (parallel/dims.py), and of all copies only
# one writes. From the number of ranks and of writers alone, the writer of our own shards is one of a few: one for each
# number of stages that may have been. Around it are the owners of what it shared with its neighbours. Asking from the
# middle outwards instead would read hundreds of indexes where a shard has many copies.


def guess_writers(rank: int, *, world: int, writers: int) -> list[int]:
    """Places among the writers at which the shards of `rank` of `world` may lie.

    Two stages of three copies of four shards: rank 17 is the second shard of the second copy of the second stage, and
    its writer the sixth of eight. One stage would make it the second.

    >>> guess_writers(17, world=24, writers=8)
    [1, 5]
    """
    found = []
    for stages in range(1, writers + 1):
        if writers % stages == 0:
            shards = writers // stages
            found.append(rank * stages // world * shards + rank % shards)
    return list(dict.fromkeys(found))[:MOST_GUESSES]


def search_writers(rank: int, world: int, *, writers: Sequence[int], copies: bool) -> Generator[int, int, None]:
    """The writers, likeliest first; `send` how much was found with each. Around the best of them the rest follow.

    `rank` and `world` are the reader's; with `copies` there were ranks that wrote nothing.
    """
    best, most, asked = rank * len(writers) // world, 0, set()
    for guess in [best, *(guess_writers(rank, world=world, writers=len(writers)) if copies else ())]:
        if guess not in asked:
            asked.add(guess)
            found = yield writers[guess]
            if found > most:
                best, most = guess, found
    for place in places_outwards(best, len(writers)):
        if place not in asked:
            yield writers[place]


def places_outwards(middle: int, count: int) -> Iterator[int]:
    """Every place below `count`, those near `middle` first.

    >>> list(places_outwards(3, 5))
    [3, 4, 2, 1, 0]
    """
    middle = min(max(middle, 0), count - 1)
    yield middle
    for distance in range(1, count):
        yield from (place for place in (middle + distance, middle - distance) if 0 <= place < count)
