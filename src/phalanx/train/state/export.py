"""A checkpoint as whole tensors on one process, one at a time; and digests of a state that no layout can change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from phalanx.errors import mistake
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.paths import Location
from phalanx.train.state.rank_state import is_private_tensor
from phalanx.train.state.reader import Catalog, RankFileReader, StoredTensor, read_catalog
from phalanx.train.state.shards import STORED_DTYPES, tensor_bytes, whole_region


def is_weight(name: str) -> bool:
    """Whether a tensor belongs to the model; the optimizer's state is named `parameter#state`."""
    return "#" not in name


def read_whole_tensors(
    folder: Location, select: Callable[[str], bool] = is_weight
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every selected tensor, whole, in name order; memory is that of one tensor. Raises Damaged before a wrong one."""
    catalog = read_catalog(folder)
    for stored in catalog.tensors.values():
        if select(stored.name):
            yield stored.name, _assemble(catalog, stored)


def read_state(folder: Location, select: Callable[[str], bool] = is_weight) -> dict[str, torch.Tensor]:
    """All selected tensors at once, for a model that fits one machine."""
    return dict(read_whole_tensors(folder, select))


def _assemble(catalog: Catalog, stored: StoredTensor) -> torch.Tensor:
    stored.check_whole()  # first: a forged shape without the bytes to fill it costs no memory
    tensor = torch.empty(stored.shape, dtype=STORED_DTYPES[stored.dtype].torch)
    for entry in stored.entries:
        with RankFileReader(catalog.parts, catalog.indexes[entry.rank]) as shard:
            shard.check([entry])
            tensor[entry.box.within(whole_region(stored.shape))].copy_(shard.read(entry, entry.box))
    return tensor


def state_digest(folder: Location, select: Callable[[str], bool] = lambda name: not is_private_tensor(name)) -> str:
    """sha256 of the selected tensors of a checkpoint, whole and in name order: equal for equal values, any layout."""
    return tensors_digest(read_whole_tensors(folder, select))


def shards_digest(pieces: Sequence[TensorShard]) -> str:
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
        values = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)} {values}\n".encode())
    return total.hexdigest()
