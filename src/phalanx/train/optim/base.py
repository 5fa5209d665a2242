"""The interface of every optimizer to the training loop and to checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from phalanx.train.parallel.tensor_shard import TensorShard


class Optimizer(Protocol):
    """Updates this rank's shards in place from their gradients. Ranks that share a tensor must call it together."""

    steps: int

    def step(self, lr: float) -> None:
        """Update once with `shard.tensor.grad`; a missing gradient counts as zeros, so that every layout agrees."""

    def state(self) -> list[TensorShard]:
        """Return every state tensor as a float shard named "parameter#state", independent of the layout."""

    def stored(self) -> list[TensorShard]:
        """Return the state as it is stored between two steps, in any format, to detect whether it changes by itself."""

    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Load the local tensors of exactly the shards of `state()`, after `steps` steps."""

    def state_bytes(self) -> int:
        """Return the bytes this rank holds between steps in addition to the weights."""


def shard_gradient(shard: TensorShard) -> torch.Tensor:
    """Return the gradient of a shard, zeros if it has none."""
    grad = shard.tensor.grad
    return torch.zeros_like(shard.tensor) if grad is None else grad


def state_shard(shard: TensorShard, name: str, tensor: torch.Tensor) -> TensorShard:
    """Return the shard of a state tensor that is split as its parameter is."""
    return replace(shard, name=f"{shard.name}#{name}", tensor=tensor)


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes the tensors occupy."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
