"""Bookkeeping for mixtures of experts in a step: which sequences count, and how many tokens each expert received."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.train.models.moe import Moe
from phalanx.train.parallel.dims import Meshes


class ExpertBalance:
    """Counts the tokens of every expert and updates the routers' balance bias; does nothing without experts."""

    def __init__(self, models: Sequence[torch.nn.Module], meshes: Meshes, device: torch.device) -> None:
        self._meshes, self._device = meshes, device
        self._moes = [module for model in models for module in model.modules() if isinstance(module, Moe)]
        self._fillings = [BatchFilling(model) for model in models] if self._moes else []
        # Tokens of each expert in the last step, a row per layer held here.
        self.loads: torch.Tensor | None = None

    def begin(self, targets_BS: torch.Tensor, *, micro: int, ignored: int, scale: float) -> None:
        """Prepare a step. `targets_BS` are those of this data rank; `scale` is the factor of the balance loss."""
        for filling in self._fillings:
            filling.begin(targets_BS.to(self._device), micro=micro, ignored=ignored)
        for moe in self._moes:
            moe.aux_scale = scale

    @torch.no_grad()
    def finish(self, *, learn: bool) -> None:
        """Sum the counts over the ranks of this stage, which must all call this, and update the routers.

        Without `learn` (a skipped step) the routers stay as they were.
        """
        if not self._moes or self._meshes.stages is None:
            return
        counts = torch.stack([moe.counts_E for moe in self._moes])
        if self._meshes.dims.stage > 1:
            dist.all_reduce(counts, group=self._meshes.stages.get_group("stage"))
        for moe, load_E in zip(self._moes, counts, strict=True):
            # Equal counts change no bias, so a skipped step leaves the routers as they were.
            moe.update_bias(load_E if learn else torch.ones_like(load_E))
        self.loads = counts


class BatchFilling:
    """Marks the sequences of each micro-batch that only fill up the batch, for the mixtures of experts of a stage.

    Routers are not balanced on such sequences. A stage computes its micro-batches in order, under every schedule.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._moes = [module for module in model.modules() if isinstance(module, Moe)]
        self._real_NB: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._next_micro_batch)

    def begin(self, targets_BS: torch.Tensor, *, micro: int, ignored: int) -> None:
        """Prepare a step with the targets of all its micro-batches; filling sequences have only `ignored` targets."""
        self._real_NB = list(reversed((targets_BS != ignored).any(dim=1).long().split(micro)))

    def _next_micro_batch(self, model: torch.nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and self._real_NB:
            real_B = self._real_NB.pop()
            for moe in self._moes:
                moe.real_B = real_B
