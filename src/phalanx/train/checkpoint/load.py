"""Load: fill this rank's pieces from a checkpoint, whatever layout and world wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.errors import Problem, UserError, nearest
from phalanx.train.checkpoint.boxes import Box
from phalanx.train.checkpoint.catalog import Catalog, Stored, read_catalog
from phalanx.train.checkpoint.dtypes import dtype_name
from phalanx.train.checkpoint.index import Entry
from phalanx.train.checkpoint.reading import Shard
from phalanx.train.checkpoint.shard import box_of
from phalanx.train.checkpoint.verify import THREADS
from phalanx.train.parallel.pieces import Piece

# Where a part goes: the entry it comes from, the box both share, the piece it fills.
Move = tuple[Entry, Box, Piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A checkpoint of which all bytes this rank needs were read and are sound; nothing has been changed yet."""

    catalog: Catalog
    moves: dict[int, list[Move]]  # by the rank whose file is read

    @property
    def files(self) -> int:
        """How many ranks' files this rank reads."""
        return len(self.moves)

    def fill(self) -> None:
        """Copy the values into the pieces, in place."""
        with torch.no_grad():
            for rank, moves in self.moves.items():
                with Shard(self.catalog.folder, self.catalog.indexes[rank]) as shard:
                    for entry, part, piece in moves:
                        piece.tensor[part.within(box_of(piece))].copy_(shard.read(entry, part))


def load(folder: Path, pieces: Sequence[Piece], *, cast: bool = False) -> None:
    """Fill every piece from a committed folder; see `prepare` for what is refused. On error no piece has changed."""
    prepare(folder, pieces, cast=cast).fill()


def prepare(folder: Path, pieces: Sequence[Piece], *, cast: bool = False) -> Ready:
    """Find and verify everything `pieces` need, from the files that hold a part of them and no others.

    Raises UserError when the checkpoint is of another model (a tensor it lacks, another shape, another dtype unless
    `cast`), Damaged when it is not what was written or has a hole. On many ranks: prepare on each, agree that all are
    ready, then fill; or else all try the checkpoint before it.
    """
    wanted = [piece for piece in pieces if piece.tensor.numel()]
    catalog = read_catalog(folder, only={piece.name for piece in wanted})
    problems = [found for piece in wanted if (found := _problem(catalog, piece, cast))]
    if problems:
        raise UserError(problems)
    moves: dict[int, list[Move]] = {}
    for piece in wanted:
        for entry, part in catalog.tensors[piece.name].covering(box_of(piece)):
            moves.setdefault(entry.rank, []).append((entry, part, piece))
    _check(catalog, moves)
    return Ready(catalog=catalog, moves=moves)


def _problem(catalog: Catalog, piece: Piece, cast: bool) -> Problem | None:
    stored, where = catalog.tensors.get(piece.name), str(catalog.folder)
    if stored is None:
        return Problem(where=where, what=f"holds no {piece.name}", why=_almost(catalog, piece.name))
    if stored.shape != tuple(piece.shape):
        what = f"{piece.name} is {list(stored.shape)} there and {list(piece.shape)} in this model"
        return Problem(where=where, what=what, fix="resume with the job file of the run that wrote it")
    return None if cast else _other_dtype(stored, piece, where)


def _other_dtype(stored: Stored, piece: Piece, where: str) -> Problem | None:
    mine = dtype_name(piece.tensor.dtype)
    if stored.dtype == mine:
        return None
    what = f"{piece.name} is {stored.dtype} there and {mine} in this model"
    return Problem(where=where, what=what, why="values would be rounded", fix="load with cast=True if that is meant")


def _almost(catalog: Catalog, name: str) -> str:
    """What the checkpoint holds instead; the catalog was read for our names only, so look at the indexes."""
    known = {entry.name for index in catalog.indexes for entry in index.entries}
    close = nearest(name, known)
    return f"it holds {close}" if close else f"it holds {len(known)} tensors of other names"


def _check(catalog: Catalog, moves: dict[int, list[Move]]) -> None:
    def one(rank: int) -> None:
        needed = {entry.name: entry for entry, _, _ in moves[rank]}
        with Shard(catalog.folder, catalog.indexes[rank]) as shard:
            shard.check(needed.values())

    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        for _ in pool.map(one, moves):
            pass
