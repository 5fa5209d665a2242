"""Weights as the optimizer keeps them: in its own number format, and in host memory where the layout offloads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.rank_settings import Settings

if TYPE_CHECKING:
    from phalanx.train.model_stages import StageTensor


class MasterWeights:
    """A shard for each parameter of this rank: the model's own storage, or a copy where the optimizer wants another."""

    def __init__(self, parameters: Sequence[StageTensor], settings: Settings) -> None:
        self._offloaded = settings.layout.offload == "optimizer"
        masters = [self._master_copy(held, settings.master_dtype) for held in parameters]
        pairs = list(zip(parameters, masters, strict=True))
        self.copies = [(held.local, one) for held, one in pairs if one is not None]  # (the model's, the optimizer's)
        self.shards: list[TensorShard] = [held.shard(held.local if one is None else one) for held, one in pairs]
        # What the model reads where that is not the optimizer's own: no part of the state, but to be as it was left.
        self.model_copies = [
            replace(held.shard(held.local), name=f"{held.name}#model") for held, one in pairs if one is not None
        ]
        self._host_grads: list[torch.Tensor] = []

    def _master_copy(self, held: StageTensor, dtype: torch.dtype) -> torch.Tensor | None:
        """A copy of the weight in the format and place the optimizer wants it; None where that is its own storage."""
        used = held.local
        place = torch.device("cpu") if self._offloaded else used.device
        return None if used.dtype == dtype and used.device == place else _empty_at(used, dtype, place)

    def copy_to_model(self) -> None:
        """Copy the optimizer's weights to where the model reads them, where the two are not the same storage."""
        if self.copies:
            torch._foreach_copy_([target for target, _ in self.copies], [source for _, source in self.copies])

    def hand_over(self, shards: Sequence[TensorShard], grads: Sequence[torch.Tensor], device: torch.device) -> None:
        """Give the optimizer its gradients; where it works in host memory, through buffers that are made once."""
        if device.type != "cuda" or not self._offloaded:
            for shard, grad in zip(shards, grads, strict=True):
                shard.tensor.grad = grad.to(shard.tensor)
            return
        if not self._host_grads:
            self._host_grads = [
                _empty_at(grad, shard.tensor.dtype, shard.tensor.device)
                for shard, grad in zip(shards, grads, strict=True)
            ]
        for shard, host, grad in zip(shards, self._host_grads, grads, strict=True):
            host.copy_(grad, non_blocking=True)
            shard.tensor.grad = host
        torch.cuda.synchronize(device)


def _empty_at(like: torch.Tensor, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Room of the same shape; pinned in host memory where a GPU is to copy from it."""
    pinned = like.is_cuda and place.type == "cpu"
    return torch.empty_like(like, dtype=dtype, device=place, pin_memory=pinned)
