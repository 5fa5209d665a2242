"""Load: fill this rank's pieces from a checkpoint, whatever layout and world wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.paths import Location
from phalanx.train.state.reader import HASH_THREADS, StateSource
from phalanx.train.state.restore import RestoreRoute, find_restore_route
from phalanx.train.state.shards import region_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRestore:
    """A checkpoint of which all bytes this rank needs were read and are sound; nothing has been changed yet."""

    route: RestoreRoute

    def fill(self) -> None:
        """Copy the values into the pieces, in place."""
        with torch.no_grad():
            for rank, moves in self.route.moves.items():
                with self.route.source.open(rank) as tensors:
                    for move in moves:
                        target = move.piece.tensor[move.part.within(region_of(move.piece))]
                        target.copy_(tensors.read(move.entry, move.part))


def load_shards(
    where: Location | StateSource, pieces: Sequence[TensorShard], *, cast: bool = False, rank: int = 0, world: int = 1
) -> None:
    """Fill every piece from a commit or another source; see `prepare` for what is refused. An error changes nothing."""
    prepare_restore(where, pieces, cast=cast, rank=rank, world=world).fill()


def prepare_restore(
    where: Location | StateSource, pieces: Sequence[TensorShard], *, cast: bool = False, rank: int = 0, world: int = 1
) -> PreparedRestore:
    """Find and verify everything `pieces` need, from the ranks that wrote a part of them and no others.

    `rank` and `world` are this process's, and only tell where to look first. Raises UserError when the checkpoint is of
    another model (a tensor it lacks, another shape, another dtype unless `cast`), Damaged when it is not what was
    written or has a hole. On many ranks: prepare on each, agree that all are ready, then fill; or else all of them try
    the checkpoint before it.
    """
    wanted = [piece for piece in pieces if piece.tensor.numel()]
    route = find_restore_route(where, wanted, cast=cast, rank=rank, world=world)
    _check_bytes(route)
    return PreparedRestore(route=route)


def _check_bytes(route: RestoreRoute) -> None:
    def one(rank: int) -> None:
        needed = {move.entry.name: move.entry for move in route.moves[rank]}
        with route.source.open(rank) as tensors:
            tensors.check(needed.values())

    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        for _ in pool.map(one, route.moves):
            pass
