"""What a step does for the mixtures of experts of this rank: what counts of its batch, and who got how many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.train.models.moe import Moe
from phalanx.train.parallel.dims import Meshes


class ExpertBalance:
    """Counts the tokens of every expert, and lets the routers learn from it; nothing in a model without experts."""

    def __init__(self, models: Sequence[torch.nn.Module], meshes: Meshes, device: torch.device) -> None:
        self._meshes, self._device = meshes, device
        self._moes = [module for model in models for module in model.modules() if isinstance(module, Moe)]
        self._fillings = [BatchFilling(model) for model in models] if self._moes else []
        self.loads: torch.Tensor | None = None  # tokens of each expert in the last step, a row per layer held here

    def begin(self, targets_BS: torch.Tensor, *, micro: int, ignored: int, scale: float) -> None:
        """Before a step, with the targets of this data rank's sequences; `scale` is that of the balance loss."""
        for filling in self._fillings:
            filling.begin(targets_BS.to(self._device), micro=micro, ignored=ignored)
        for moe in self._moes:
            moe.aux_scale = scale

    @torch.no_grad()
    def finish(self, *, learn: bool) -> None:
        """Count over the ranks of this stage, which must all call this; the routers learn where the step did."""
        if not self._moes or self._meshes.stages is None:
            return
        counts = torch.stack([moe.counts_E for moe in self._moes])
        if self._meshes.dims.stage > 1:
            dist.all_reduce(counts, group=self._meshes.stages.get_group("stage"))
        for moe, load_E in zip(self._moes, counts, strict=True):
            # Even counts move no bias: a step that was skipped leaves the routers as they were.
            moe.update_bias(load_E if learn else torch.ones_like(load_E))
        self.loads = counts


class BatchFilling:
    """Tells the mixtures of experts of a stage which sequences of each micro-batch count, and which only fill it up.

    Experts are not to be balanced by sequences that only fill a batch up.
    A stage sees its micro-batches in order, whatever the schedule.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._moes = [module for module in model.modules() if isinstance(module, Moe)]
        self._real_NB: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._next_micro_batch)

    def begin(self, targets_BS: torch.Tensor, *, micro: int, ignored: int) -> None:
        """Before a step, with the targets of all its micro-batches; those of filling are all `ignored`."""
        self._real_NB = list(reversed((targets_BS != ignored).any(dim=1).long().split(micro)))

    def _next_micro_batch(self, model: torch.nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and self._real_NB:
            real_B = self._real_NB.pop()
            for moe in self._moes:
                moe.real_B = real_B
