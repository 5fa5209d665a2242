"""Overlap of optimizer and transfers: gradients to host memory and weights back while the optimizer works.

An optimizer in host memory waits for the gradient of its first shard only: the others arrive while it works, and each
weight leaves as soon as it is updated. So a step takes as long as the optimizer or the link, not the sum of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Values of a weight per transfer back: 64 MiB in fp32, which is all the GPU allocates for it
PIECE_VALUES = 2**24


class HostTransfers:
    """One CUDA stream out and one back, each in the order of the shards.

    `weights` are what the model reads on the GPU, `masters` what the optimizer updates in pinned host memory.
    """

    def __init__(self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        self._weights, self._masters = list(weights), list(masters)
        self.gradients = [torch.empty_like(master, pin_memory=True) for master in self._masters]
        device = self._weights[0].device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in self._masters]
        largest = max((master.numel() for master in self._masters), default=0)
        self._piece = torch.empty(min(largest, PIECE_VALUES), dtype=self._masters[0].dtype, device=device)

    def send_gradients(self, grads: Sequence[torch.Tensor]) -> None:
        """Start copying every gradient to `gradients`, in order."""
        current = torch.cuda.current_stream(self._piece.device)
        self._out.wait_stream(current)
        # Do not overwrite a weight that is still being read
        self._back.wait_stream(current)
        with torch.cuda.stream(self._out):
            for host, grad, arrived in zip(self.gradients, grads, self._arrived, strict=True):
                host.copy_(grad, non_blocking=True)
                arrived.record(self._out)

    def await_gradient(self, place: int) -> None:
        """Wait until the gradient of the shard at index `place` is in host memory."""
        self._arrived[place].synchronize()

    def return_weight(self, place: int) -> None:
        """Start copying the shard at index `place` to the model.

        Values are rounded to the weight's format on the GPU.
        """
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
        """Wait until every weight has been copied to the model."""
        self._back.synchronize()
