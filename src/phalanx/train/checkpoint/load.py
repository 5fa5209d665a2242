"""Load: fill this rank's pieces from a checkpoint, whatever layout and world wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.train.checkpoint.reading import Shard
from phalanx.train.checkpoint.route import Route, find_route
from phalanx.train.checkpoint.shard import box_of
from phalanx.train.checkpoint.verify import THREADS
from phalanx.train.parallel.pieces import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A checkpoint of which all bytes this rank needs were read and are sound; nothing has been changed yet."""

    route: Route

    def fill(self) -> None:
        """Copy the values into the pieces, in place."""
        with torch.no_grad():
            for rank, moves in self.route.moves.items():
                with Shard(self.route.folder, self.route.indexes[rank]) as shard:
                    for move in moves:
                        target = move.piece.tensor[move.part.within(box_of(move.piece))]
                        target.copy_(shard.read(move.entry, move.part))


def load(folder: Path, pieces: Sequence[Piece], *, cast: bool = False, rank: int = 0, world: int = 1) -> None:
    """Fill every piece from a committed folder; see `prepare` for what is refused. On error no piece has changed."""
    prepare(folder, pieces, cast=cast, rank=rank, world=world).fill()


def prepare(folder: Path, pieces: Sequence[Piece], *, cast: bool = False, rank: int = 0, world: int = 1) -> Ready:
    """Find and verify everything `pieces` need, from the files that hold a part of them and no others.

    `rank` and `world` are this process's, and only tell where to look first. Raises UserError when the checkpoint is of
    another model (a tensor it lacks, another shape, another dtype unless `cast`), Damaged when it is not what was
    written or has a hole. On many ranks: prepare on each, agree that all are ready, then fill; or else all of them try
    the checkpoint before it.
    """
    wanted = [piece for piece in pieces if piece.tensor.numel()]
    route = find_route(folder, wanted, cast=cast, near=rank / world)
    _check(route)
    return Ready(route=route)


def _check(route: Route) -> None:
    def one(rank: int) -> None:
        needed = {move.entry.name: move.entry for move in route.moves[rank]}
        with Shard(route.folder, route.indexes[rank]) as shard:
            shard.check(needed.values())

    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        for _ in pool.map(one, route.moves):
            pass
