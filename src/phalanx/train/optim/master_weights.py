"""Weights as the optimizer keeps them: in its own number format, and in host memory where the layout offloads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from phalanx.train.optim.adamw import AdamW
from phalanx.train.optim.base import Optimizer
from phalanx.train.optim.host_transfers import HostTransfers
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
        self._transfers: HostTransfers | None = None  # made with the first update

    def _master_copy(self, held: StageTensor, dtype: torch.dtype) -> torch.Tensor | None:
        """A copy of the weight in the format and place the optimizer wants it; None where that is its own storage."""
        used = held.local
        place = torch.device("cpu") if self._offloaded else used.device
        return None if used.dtype == dtype and used.device == place else _empty_at(used, dtype, place)

    def copy_to_model(self) -> None:
        """Copy the optimizer's weights to where the model reads them, where the two are not the same storage."""
        if self.copies:
            torch._foreach_copy_([target for target, _ in self.copies], [source for _, source in self.copies])

    def update(
        self, optimizer: Optimizer, shards: Sequence[TensorShard], grads: Sequence[torch.Tensor], lr: float
    ) -> None:
        """One update of `shards`, which are all or some of ours, and of what the model reads."""
        if grads and grads[0].is_cuda and self._offloaded:
            self._update_on_host(optimizer, shards, grads, lr)
            return
        for shard, grad in zip(shards, grads, strict=True):
            shard.tensor.grad = grad.to(shard.tensor)
        optimizer.step(lr)
        self.copy_to_model()

    def _update_on_host(
        self, optimizer: Optimizer, shards: Sequence[TensorShard], grads: Sequence[torch.Tensor], lr: float
    ) -> None:
        if self._transfers is None:
            weight_of = {id(master): weight for weight, master in self.copies}
            masters = [shard.tensor for shard in shards]
            self._transfers = HostTransfers([weight_of[id(one)] for one in masters], masters)
        moving = self._transfers
        moving.send_gradients(grads)
        for shard, host in zip(shards, moving.gradients, strict=True):
            shard.tensor.grad = host
        if isinstance(optimizer, AdamW):
            optimizer.step_each(lr, before=moving.await_gradient, after=moving.return_weight)
        else:  # it may need the gradients of other shards
            for place in range(len(shards)):
                moving.await_gradient(place)
            optimizer.step(lr)
            for place in range(len(shards)):
                moving.return_weight(place)
        moving.finish()


def _empty_at(like: torch.Tensor, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Room of the same shape; pinned in host memory where a GPU is to copy from it."""
    pinned = like.is_cuda and place.type == "cpu"
    return torch.empty_like(like, dtype=dtype, device=place, pin_memory=pinned)
