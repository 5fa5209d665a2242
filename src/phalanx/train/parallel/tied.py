"""A tied embedding under a pipeline: the first and the last stage hold a copy each and must learn the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from phalanx.train.models.decoder import TIED
from phalanx.train.parallel.dims import Meshes

if TYPE_CHECKING:
    from phalanx.train.model_stages import StageTensor


class TiedTable:
    """Adds up the two gradients of the table, so that both copies take the same step."""

    def __init__(self, held: Sequence[StageTensor], meshes: Meshes, *, v_shaped: bool) -> None:
        mine = [one for one in held if one.name == TIED[0]]
        self._both_here = v_shaped and len(mine) == 2  # the pipeline's end comes back to its beginning
        self._pair: ProcessGroup | None = None
        ranks, last = meshes.dims.stage, meshes.dims.pipeline - 1
        if v_shaped:
            return
        for place in range(ranks):
            group = dist.new_group([place, last * ranks + place])
            if dist.get_rank() % ranks == place and mine:
                self._pair = group

    def sum(self, held: Sequence[StageTensor], grads: Sequence[torch.Tensor]) -> None:
        """In place."""
        found = [grad for one, grad in zip(held, grads, strict=True) if one.name == TIED[0]]
        if self._both_here:
            total = found[0] + found[1]
            for grad in found:
                grad.copy_(total)
        elif self._pair is not None and found:
            dist.all_reduce(found[0], group=self._pair)
