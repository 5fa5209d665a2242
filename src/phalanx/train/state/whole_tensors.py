"""A checkpoint as full tensors on one process, one at a time.

And digests of a state that do not depend on the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from phalanx.errors import mistake
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.paths import Location
from phalanx.train.state.rank_state import is_private_tensor
from phalanx.train.state.reader import CheckpointReader
from phalanx.train.state.shards import STORED_DTYPES, tensor_bytes, whole_region


def is_weight(name: str) -> bool:
    """Return whether a tensor belongs to the model; the optimizer's state is named `parameter#state`."""
    return "#" not in name


def read_whole_tensors(
    location: Location, select: Callable[[str], bool] = is_weight
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every selected tensor, complete, in name order, with the memory of one tensor.

    Raises DamagedCheckpoint instead of yielding a wrong tensor.
    """
    reader = CheckpointReader(location)
    for stored in reader.tensors().values():
        if not select(stored.name):
            continue
        # First, so that a forged shape without the bytes to fill it costs no memory
        stored.check_whole()
        tensor = torch.empty(stored.shape, dtype=STORED_DTYPES[stored.dtype].torch)
        for shard in stored.shards:
            with reader.open(shard.rank) as file:
                # Its size and header; reading compares the shard itself
                file.check(())
                tensor[shard.region.within(whole_region(stored.shape))].copy_(file.read(shard, shard.region))
        yield stored.name, tensor


def read_state(location: Location, select: Callable[[str], bool] = is_weight) -> dict[str, torch.Tensor]:
    """Return all selected tensors at once, for a model that fits one machine."""
    return dict(read_whole_tensors(location, select))


def state_digest(location: Location, select: Callable[[str], bool] = lambda name: not is_private_tensor(name)) -> str:
    """Return the sha256 of the selected tensors in name order: equal for equal values, in any layout."""
    return tensors_digest(read_whole_tensors(location, select))


def shards_digest(shards: Sequence[TensorShard]) -> str:
    """Return the same digest of shards in memory; they must be full tensors, as they are on one process."""
    for shard in shards:
        if not shard.whole:
            problem = f"is {list(shard.tensor.shape)} of {list(shard.shape)} on this rank"
            reason = "a digest of a part depends on the layout"
            raise mistake(shard.name, problem, why=reason, fix="save, then state_digest")
    return tensors_digest((shard.name, shard.tensor) for shard in sorted(shards, key=lambda shard: shard.name))


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the sha256 over a line per tensor: name, dtype, shape and sha256 of its bytes, in the given order."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        values = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)} {values}\n".encode())
    return total.hexdigest()
