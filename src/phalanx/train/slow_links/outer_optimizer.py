"""The outer optimizer of DiLoCo (arXiv:2311.08105): Nesterov momentum on how far the peers' weights have moved.

Each rank keeps its part of the weights that all peers share and of the momentum, as it does of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from phalanx.train.parallel.tensor_shard import TensorShard


class OuterOptimizer:
    """Shared weights and momentum of this rank's shards; `state` is what checkpoints keep of them."""

    def __init__(self, shards: Sequence[TensorShard], *, learning_rate: float, momentum: float) -> None:
        self._shards, self._lr, self._momentum = list(shards), learning_rate, momentum
        self.weights = [shard.tensor.detach().clone() for shard in shards]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]

    def state(self) -> list[TensorShard]:
        """As shards named "parameter#outer" and "parameter#outer_momentum"."""
        found = []
        for name, tensors in (("outer", self.weights), ("outer_momentum", self.momenta)):
            found += [
                replace(shard, name=f"{shard.name}#{name}", tensor=tensor)
                for shard, tensor in zip(self._shards, tensors, strict=True)
            ]
        return found

    @torch.no_grad()
    def reset(self) -> None:
        """The peers are equal, as after a synchronous step: share the weights as they are."""
        for weight, shard in zip(self.weights, self._shards, strict=True):
            weight.copy_(shard.tensor)

    @torch.no_grad()
    def pseudo_gradients(self) -> list[torch.Tensor]:
        """How far this peer's weights have moved from the shared ones, with the sign of a gradient."""
        return [weight - shard.tensor for weight, shard in zip(self.weights, self._shards, strict=True)]

    @torch.no_grad()
    def step(self, averages: Mapping[int, torch.Tensor], *, scale: float = 1.0) -> None:
        """One update of the shared weights at some places, from `scale` times the averages over the peers there."""
        for place, average in averages.items():
            weight, momentum = self.weights[place], self.momenta[place]
            average = scale * average.to(weight)
            momentum.mul_(self._momentum).add_(average)
            weight.sub_(average + self._momentum * momentum, alpha=self._lr)

    @torch.no_grad()
    def preview(self, averages: Mapping[int, torch.Tensor], *, scale: float = 1.0) -> dict[int, torch.Tensor]:
        """The shared weights at some places as `step` would leave them; nothing is changed."""
        found = {}
        for place, average in averages.items():
            weight = self.weights[place]
            average = scale * average.to(weight)
            momentum = self.momenta[place] * self._momentum + average
            found[place] = weight.sub(average + self._momentum * momentum, alpha=self._lr)
        return found

    @torch.no_grad()
    def mix_in(self, places: Sequence[int], *, local_share: float) -> None:
        """Go on from the shared weights, with `local_share` of the peer's own (arXiv:2501.18512)."""
        for place in places:
            own, weight = self._shards[place].tensor, self.weights[place]
            if local_share:
                own.lerp_(weight, 1.0 - local_share)
            else:
                own.copy_(weight)

    @torch.no_grad()
    def carry(self, before: Mapping[int, torch.Tensor]) -> None:
        """Follow the shared weights, which were `before`, and keep what this peer has learnt for the next round."""
        for place, old in before.items():
            self._shards[place].tensor.add_(self.weights[place] - old)
