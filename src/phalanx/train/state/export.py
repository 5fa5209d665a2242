"""A checkpoint as whole tensors on one process, one at a time; and digests of a state that no layout can change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from phalanx.errors import mistake
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.boxes import whole
from phalanx.train.state.catalog import Catalog, Stored, read_catalog
from phalanx.train.state.dtypes import KINDS
from phalanx.train.state.private import is_private
from phalanx.train.state.reading import Shard
from phalanx.train.state.shard import raw
from phalanx.train.state.url import Place


def is_weight(name: str) -> bool:
    """Whether a tensor belongs to the model; the optimizer's state is named `parameter#state`."""
    return "#" not in name


def whole_tensors(folder: Place, select: Callable[[str], bool] = is_weight) -> Iterator[tuple[str, torch.Tensor]]:
    """Every selected tensor, whole, in name order; memory is that of one tensor. Raises Damaged before a wrong one."""
    catalog = read_catalog(folder)
    for stored in catalog.tensors.values():
        if select(stored.name):
            yield stored.name, _assemble(catalog, stored)


def read_state(folder: Place, select: Callable[[str], bool] = is_weight) -> dict[str, torch.Tensor]:
    """All selected tensors at once, for a model that fits one machine."""
    return dict(whole_tensors(folder, select))


def _assemble(catalog: Catalog, stored: Stored) -> torch.Tensor:
    stored.check_whole()  # first: a forged shape without the bytes to fill it costs no memory
    tensor = torch.empty(stored.shape, dtype=KINDS[stored.dtype].torch)
    for entry in stored.entries:
        with Shard(catalog.parts, catalog.indexes[entry.rank]) as shard:
            shard.check([entry])
            tensor[entry.box.within(whole(stored.shape))].copy_(shard.read(entry, entry.box))
    return tensor


def state_digest(folder: Place, select: Callable[[str], bool] = lambda name: not is_private(name)) -> str:
    """sha256 of the selected tensors of a checkpoint, whole and in name order: equal for equal values, any layout."""
    return tensors_digest(whole_tensors(folder, select))


def digest(pieces: Sequence[TensorShard]) -> str:
    """The same of pieces in memory; they must be whole, as they are on one process."""
    for piece in pieces:
        if not piece.whole:
            what = f"is {list(piece.tensor.shape)} of {list(piece.shape)} on this rank"
            raise mistake(
                piece.name, what, why="a digest of a part depends on the layout", fix="save, then state_digest"
            )
    return tensors_digest((piece.name, piece.tensor) for piece in sorted(pieces, key=lambda piece: piece.name))


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 over a line per tensor: name, dtype, shape and sha256 of its bytes. In the order given."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        values = hashlib.sha256(raw(tensor)).hexdigest()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)} {values}\n".encode())
    return total.hexdigest()
