"""Host copies of what a rank owns, taken between two steps and used again for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.shards import owned_shards


class HostCopies:
    """One host copy of each tensor a rank owns. Memory: what the rank owns, once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, pieces: Sequence[TensorShard]) -> list[TensorShard]:
        """The owned pieces with the values of now; those handed out before are overwritten."""
        mine = owned_shards(pieces)
        old, self._tensors = self._tensors, {}
        for piece in mine:
            copy = _fitting(old.pop(piece.name, None), piece.tensor)
            copy.copy_(piece.tensor.detach(), non_blocking=copy.is_pinned())
            self._tensors[piece.name] = copy
        for device in {piece.tensor.device for piece in mine if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return [replace(piece, tensor=self._tensors[piece.name]) for piece in mine]

    def forget(self) -> None:
        """Leave the present copies to whoever still reads from them; the next are fresh."""
        self._tensors = {}


def _fitting(old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The buffer of the save before where it fits: touching fresh memory costs more than the copy into it."""
    if old is not None and old.shape == like.shape and old.dtype == like.dtype:
        return old
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
