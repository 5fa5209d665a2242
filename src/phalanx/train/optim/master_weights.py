"""The optimizer's copy of the weights: in its own number format, and in host memory if the layout offloads it."""

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
    """A shard for each parameter of this rank: the model's storage, or the optimizer's own copy."""

    def __init__(self, parameters: Sequence[StageTensor], settings: Settings) -> None:
        self._offloaded = settings.layout.offload == "optimizer"
        masters = [self._master_copy(stage_tensor, settings.master_dtype) for stage_tensor in parameters]
        pairs = list(zip(parameters, masters, strict=True))
        self.copies = [
            (stage_tensor.local, master) for stage_tensor, master in pairs if master is not None
        ]  # (the model's, the optimizer's)
        self.shards: list[TensorShard] = [
            stage_tensor.shard(stage_tensor.local if master is None else master) for stage_tensor, master in pairs
        ]
        # The model's tensors that differ from the optimizer's: not part of the state, but checked for unexpected
        # changes.
        self.model_copies = [
            replace(stage_tensor.shard(stage_tensor.local), name=f"{stage_tensor.name}#model")
            for stage_tensor, master in pairs
            if master is not None
        ]
        # Created at the first update
        self._transfers: HostTransfers | None = None

    def _master_copy(self, held: StageTensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate the optimizer's copy of a weight; None if it can use the model's own storage."""
        weight = held.local
        place = torch.device("cpu") if self._offloaded else weight.device
        return None if weight.dtype == dtype and weight.device == place else _empty_at(weight, dtype, place)

    def copy_to_model(self) -> None:
        """Copy the optimizer's weights to the model, where the two have different storage."""
        if self.copies:
            torch._foreach_copy_([target for target, _ in self.copies], [source for _, source in self.copies])

    def update(
        self, optimizer: Optimizer, shards: Sequence[TensorShard], grads: Sequence[torch.Tensor], lr: float
    ) -> None:
        """Update `shards`, which are all or some of this rank's, and the model's copies of them."""
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
            self._transfers = HostTransfers([weight_of[id(master)] for master in masters], masters)
        transfers = self._transfers
        transfers.send_gradients(grads)
        for shard, host in zip(shards, transfers.gradients, strict=True):
            shard.tensor.grad = host
        if isinstance(optimizer, AdamW):
            optimizer.step_each(lr, before=transfers.await_gradient, after=transfers.return_weight)
        # Another optimizer may need the gradients of several shards at once
        else:
            for place in range(len(shards)):
                transfers.await_gradient(place)
            optimizer.step(lr)
            for place in range(len(shards)):
                transfers.return_weight(place)
        transfers.finish()


def _empty_at(like: torch.Tensor, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Allocate a tensor of the same shape; pinned in host memory if a GPU copies from it."""
    pinned = like.is_cuda and place.type == "cpu"
    return torch.empty_like(like, dtype=dtype, device=place, pin_memory=pinned)
