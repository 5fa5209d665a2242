"""Gradients to host memory and weights back to the GPU while the optimizer works on the shards between.

An optimizer in host memory waits for the gradient of its first shard only: the others arrive while it works, and each
weight leaves as soon as it is new. So a step takes as long as the optimizer or the link, not both one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE_VALUES = 2**24  # of a weight on its way back: 64 MiB in fp32, which is all the GPU keeps for it


class HostTransfers:
    """One stream out and one back, each in the order of the shards.

    `weights` are what the model reads on the GPU, `masters` what the optimizer updates in pinned host memory.
    """

    def __init__(self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        self._weights, self._masters = list(weights), list(masters)
        self.gradients = [torch.empty_like(one, pin_memory=True) for one in self._masters]
        device = self._weights[0].device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in self._masters]
        largest = max((one.numel() for one in self._masters), default=0)
        self._piece = torch.empty(min(largest, PIECE_VALUES), dtype=self._masters[0].dtype, device=device)

    def send_gradients(self, grads: Sequence[torch.Tensor]) -> None:
        """Begin to copy every gradient to `gradients`, in order."""
        current = torch.cuda.current_stream(self._piece.device)
        self._out.wait_stream(current)
        self._back.wait_stream(current)  # nothing that still reads a weight is overtaken
        with torch.cuda.stream(self._out):
            for host, grad, arrived in zip(self.gradients, grads, self._arrived, strict=True):
                host.copy_(grad, non_blocking=True)
                arrived.record(self._out)

    def await_gradient(self, place: int) -> None:
        """Return when the gradient of the shard at `place` is here."""
        self._arrived[place].synchronize()

    def return_weight(self, place: int) -> None:
        """Begin to copy the shard at `place` to the model: as it is, and rounded on the GPU."""
        weight, master = self._weights[place], self._masters[place]
        with torch.cuda.stream(self._back):
            if not weight.is_contiguous():
                weight.copy_(master)
                return
            size = len(self._piece)
            for target, source in zip(weight.view(-1).split(size), master.view(-1).split(size), strict=True):
                piece = self._piece[: source.numel()]
                piece.copy_(source, non_blocking=True)
                target.copy_(piece)

    def finish(self) -> None:
        """Return when every weight is where the model reads it."""
        self._back.synchronize()
