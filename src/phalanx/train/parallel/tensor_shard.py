"""A piece: this rank's part of one named tensor, with its place in the whole. What optimizers and checkpoints see."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorShard:
    """A box of one tensor of the whole, unsplit model.

    `tensor` is plain and local: what the optimizer updates in place. `replicas` ranks of the world hold the same box;
    exactly one of them, the one with `owner`, writes it to a checkpoint. `groups` maps a dimension that is split to
    the process groups that together hold it, outermost first; a dimension that is whole is not in it. `moves` is told
    of buffers that forward may change: their values between two updates are no sign of bad memory.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    replicas: int
    owner: bool
    groups: dict[int, tuple[ProcessGroup, ...]]
    moves: bool = False

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of the tensor."""
        return tuple(self.tensor.shape) == self.shape

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)
