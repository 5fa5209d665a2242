"""The outer optimizer of DiLoCo (arXiv:2311.08105): Nesterov momentum on the movement of the peers' weights.

Each rank holds its shards of the shared weights and of the momentum, as it does of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from phalanx.train.parallel.tensor_shard import TensorShard


class OuterOptimizer:
    """Shared weights and outer momentum of this rank's shards."""

    def __init__(self, shards: Sequence[TensorShard], *, learning_rate: float, momentum: float) -> None:
        self._shards, self._lr, self._momentum = list(shards), learning_rate, momentum
        self.weights = [shard.tensor.detach().clone() for shard in shards]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]

    def state(self) -> list[TensorShard]:
        """Return the state for checkpoints, as shards named "parameter#outer" and "parameter#outer_momentum"."""
        shards = []
        for name, tensors in (("outer", self.weights), ("outer_momentum", self.momenta)):
            shards += [
                replace(shard, name=f"{shard.name}#{name}", tensor=tensor)
                for shard, tensor in zip(self._shards, tensors, strict=True)
            ]
        return shards

    @torch.no_grad()
    def reset(self) -> None:
        """Set the shared weights to this peer's, when all peers are equal, as after a synchronous step."""
        for weight, shard in zip(self.weights, self._shards, strict=True):
            weight.copy_(shard.tensor)

    @torch.no_grad()
    def pseudo_gradients(self) -> list[torch.Tensor]:
        """Return the shared weights minus this peer's: its movement, with the sign of a gradient."""
        return [weight - shard.tensor for weight, shard in zip(self.weights, self._shards, strict=True)]

    @torch.no_grad()
    def step(self, averages: Mapping[int, torch.Tensor], *, scale: float = 1.0) -> None:
        """Update the shared weights at some places by `scale` times the averages over the peers."""
        for place, average in averages.items():
            weight, momentum = self.weights[place], self.momenta[place]
            average = scale * average.to(weight)
            momentum.mul_(self._momentum).add_(average)
            weight.sub_(average + self._momentum * momentum, alpha=self._lr)

    @torch.no_grad()
    def preview(self, averages: Mapping[int, torch.Tensor], *, scale: float = 1.0) -> dict[int, torch.Tensor]:
        """Return the shared weights at some places as `step` would set them, without changing anything."""
        weights = {}
        for place, average in averages.items():
            weight = self.weights[place]
            average = scale * average.to(weight)
            momentum = self.momenta[place] * self._momentum + average
            weights[place] = weight.sub(average + self._momentum * momentum, alpha=self._lr)
        return weights

    @torch.no_grad()
    def mix_in(self, places: Sequence[int], *, local_share: float) -> None:
        """Set this peer's weights to the shared ones, keeping `local_share` of its own (arXiv:2501.18512)."""
        for place in places:
            own, weight = self._shards[place].tensor, self.weights[place]
            if local_share:
                own.lerp_(weight, 1.0 - local_share)
            else:
                own.copy_(weight)

    @torch.no_grad()
    def carry(self, before: Mapping[int, torch.Tensor]) -> None:
        """Move this peer's weights by the change of the shared ones from `before`, keeping its own progress."""
        for place, old in before.items():
            self._shards[place].tensor.add_(self.weights[place] - old)
