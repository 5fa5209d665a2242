"""Sequences that only fill a batch up: experts are not to be balanced by them.

B sequences, N micro-batches, S tokens of a sequence.
"""

from __future__ import annotations

import torch

from phalanx.train.models.moe import Moe


class Filling:
    """Tells the mixtures of experts of a stage which sequences of each micro-batch count, and which only fill it up.

    A stage sees its micro-batches in order, whatever the schedule.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._moes = [module for module in model.modules() if isinstance(module, Moe)]
        self._real_NB: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._next)

    def begin(self, targets_BS: torch.Tensor, *, micro: int, ignored: int) -> None:
        """Before a step, with the targets of all its micro-batches; those of filling are all `ignored`."""
        self._real_NB = list(reversed((targets_BS != ignored).any(dim=1).long().split(micro)))

    def _next(self, model: torch.nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and self._real_NB:
            real_B = self._real_NB.pop()
            for moe in self._moes:
                moe.real_B = real_B
