"""Restore: fill this rank's shards from a checkpoint or from replicas, whatever layout and world size wrote it.

First it finds the route: which part of which stored shard fills which target shard. Indexes are read starting with
the rank that most likely holds the targets, and no further than needed: a rank that restarts in its old layout reads
its own and its owners', in another layout a few more, at worst all of them. Then every byte on the route is checked
against its digest, and only then are the targets changed.
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
    """Copy of `part` of a stored shard into a target shard of this rank."""

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
    """A restore whose source bytes have all been read and are intact; nothing has been changed yet."""

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
    """Fill every shard from a commit or another source.

    Raises what `prepare_restore` raises, and then changes nothing.
    """
    prepare_restore(where, shards, cast=cast, rank=rank, world=world).fill()


def prepare_restore(
    where: Location | StateSource, shards: Sequence[TensorShard], *, cast: bool = False, rank: int = 0, world: int = 1
) -> PreparedRestore:
    """Find and verify everything `shards` need, from the ranks that wrote a part of them and no others.

    `rank` and `world` are this process's, and only determine where to look first. Raises UserError if the checkpoint
    belongs to another model (a missing tensor, another shape, another dtype unless `cast`), DamagedCheckpoint if it
    is damaged or has a hole. On many ranks: prepare on each, synchronise that all are ready, then fill; otherwise all
    of them try the checkpoint before it.
    """
    targets = [shard for shard in shards if shard.tensor.numel()]
    route = find_restore_route(where, targets, cast=cast, rank=rank, world=world)

    def check(writer: int) -> None:
        needed = {copy.stored.name: copy.stored for copy in route.copies[writer]}
        with route.source.open(writer) as reader:
            reader.check(needed.values())

    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        for _ in pool.map(check, route.copies):
            pass  # raises the error of a check
    return PreparedRestore(route=route)


@dataclass(kw_only=True, slots=True)
class _WantedShard:
    """A target shard of this rank, and the parts found for it so far."""

    target: TensorShard
    region: Region
    missing: int
    parts: list[tuple[StoredShard, Region]] = field(default_factory=list)
    first: StoredShard | None = None  # any stored shard of the tensor, overlapping the target or not

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
    """Find the route to fill `shards` of a rank, whose world size may differ from the checkpoint's.

    Raises UserError if the checkpoint belongs to another model, DamagedCheckpoint if an index is damaged or a part is
    missing.
    """
    source = open_source(where)
    wanted_shards = [
        _WantedShard(target=shard, region=region_of(shard), missing=shard.tensor.numel()) for shard in shards
    ]
    indexes = _read_indexes(source, wanted_shards, rank, world)
    _refuse_other_model(source.where, wanted_shards, indexes, cast)
    copies: dict[int, list[ShardCopy]] = {}
    for shard in wanted_shards:
        check_coverage(shard.target.name, shard.region, shard.parts)
        for stored, part in shard.parts:
            copies.setdefault(stored.rank, []).append(ShardCopy(stored=stored, part=part, target=shard.target))
    return RestoreRoute(source=source, copies=copies, num_indexes_read=len(indexes))


def _read_indexes(source: StateSource, wanted: Sequence[_WantedShard], rank: int, world: int) -> dict[int, RankIndex]:
    by_name: dict[str, list[_WantedShard]] = {}
    for shard in wanted:
        by_name.setdefault(shard.target.name, []).append(shard)
    writers = [writer for writer in range(source.world) if source.count(writer)]
    indexes: dict[int, RankIndex] = {}
    missing = sum(shard.missing for shard in wanted)
    if not writers or not missing:
        return indexes
    order = search_writers(rank, world, writers=writers, copies=len(writers) < source.world)
    writer: int | None = next(order)
    while writer is not None and any(shard.missing > 0 for shard in wanted):
        indexes[writer] = source.index(writer)
        for stored in indexes[writer].shards:
            for shard in by_name.get(stored.name, ()):
                shard.offer(source.where, stored)
        previously_missing, missing = missing, sum(shard.missing for shard in wanted)
        try:
            writer = order.send(previously_missing - missing)
        except StopIteration:
            writer = None
    return indexes


def _refuse_other_model(where: str, wanted: Sequence[_WantedShard], indexes: dict[int, RankIndex], cast: bool) -> None:
    problems = []
    for shard in wanted:
        if shard.first is None:
            names = {stored.name for index in indexes.values() for stored in index.shards}
            suggestion = nearest(shard.target.name, names)
            reason = f"it holds {suggestion}" if suggestion else f"it holds {len(names)} tensors of other names"
            problems.append(Problem(where=where, what=f"holds no {shard.target.name}", why=reason))
        elif problem := _shard_mismatch(where, shard.first, shard.target, cast):
            problems.append(problem)
    if problems:
        raise UserError(problems)


def _shard_mismatch(where: str, stored: StoredShard, target: TensorShard, cast: bool) -> Problem | None:
    if stored.shape != tuple(target.shape):
        problem = f"{target.name} is {list(stored.shape)} there and {list(target.shape)} in this model"
        return Problem(where=where, what=problem, fix="resume with the job file of the run that wrote it")
    target_dtype = dtype_name(target.tensor.dtype)
    if stored.dtype == target_dtype or cast:
        return None
    problem = f"{target.name} is {stored.dtype} there and {target_dtype} in this model"
    fix = "load with cast=True if that is meant"
    return Problem(where=where, what=problem, why="values would be rounded", fix=fix)


# The order in which to read the indexes of the ranks that wrote a checkpoint: those that most likely hold this
# rank's shards first. Ranks are numbered stage by stage, then copy by copy, then shard by shard (parallel/dims.py),
# and of all copies only one writes. Given the number of ranks and of writers, the writer of this rank's shards is
# one of a few: one for each possible number of stages. Around it are the owners of what it shared with its
# neighbours. Reading from the middle outwards instead would read hundreds of indexes where a shard has many copies.


def guess_writers(rank: int, *, world: int, writers: int) -> list[int]:
    """Return the indices among the writers that may hold the shards of `rank` of `world`.

    Two stages of three copies of four shards: rank 17 is the second shard of the second copy of the second stage, and
    its writer the sixth of eight. With one stage it would be the second.

    >>> guess_writers(17, world=24, writers=8)
    [1, 5]
    """
    guesses = []
    for stages in range(1, writers + 1):
        if writers % stages == 0:
            shards = writers // stages
            guesses.append(rank * stages // world * shards + rank % shards)
    return list(dict.fromkeys(guesses))[:MOST_GUESSES]


def search_writers(rank: int, world: int, *, writers: Sequence[int], copies: bool) -> Generator[int, int, None]:
    """Yield the writers, likeliest first; `send` how many elements were found with each.

    After the guesses, the others follow by distance from the best guess. `rank` and `world` are the reader's; with
    `copies` there were ranks that wrote nothing.
    """
    best, max_found, tried = rank * len(writers) // world, 0, set()
    for guess in [best, *(guess_writers(rank, world=world, writers=len(writers)) if copies else ())]:
        if guess not in tried:
            tried.add(guess)
            num_found = yield writers[guess]
            if num_found > max_found:
                best, max_found = guess, num_found
    for place in places_outwards(best, len(writers)):
        if place not in tried:
            yield writers[place]


def places_outwards(middle: int, count: int) -> Iterator[int]:
    """Yield every index below `count`, those near `middle` first.

    >>> list(places_outwards(3, 5))
    [3, 4, 2, 1, 0]
    """
    middle = min(max(middle, 0), count - 1)
    yield middle
    for distance in range(1, count):
        yield from (place for place in (middle + distance, middle - distance) if 0 <= place < count)
