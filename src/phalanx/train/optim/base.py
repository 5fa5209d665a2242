"""What every optimizer is to the loop and to checkpoints."""

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
        """One update with `shard.tensor.grad`; an absent gradient acts as zeros, so that every layout agrees."""

    def state(self) -> list[TensorShard]:
        """Every state tensor as a float shard named "parameter#state", in a form that no layout shows in."""

    def stored(self) -> list[TensorShard]:
        """The same as it lies in memory between two steps, in whatever format: to see whether it changes by itself."""

    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take the local tensors for exactly the shards of `state()`, after `steps` steps."""

    def state_bytes(self) -> int:
        """Bytes this rank keeps between steps, besides the weights."""


def shard_gradient(shard: TensorShard) -> torch.Tensor:
    """The gradient of a shard, zeros where it took no part."""
    grad = shard.tensor.grad
    return torch.zeros_like(shard.tensor) if grad is None else grad


def state_shard(shard: TensorShard, name: str, tensor: torch.Tensor) -> TensorShard:
    """A state tensor that is split as its parameter is."""
    return replace(shard, name=f"{shard.name}#{name}", tensor=tensor)


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes the tensors occupy."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
