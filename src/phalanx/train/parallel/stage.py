"""A pipeline stage whose memory does not grow with the number of micro-batches.

torch's own stage (2.11 to 2.13) allocates a receive buffer per micro-batch and direction before the first step and
keeps them between steps, and its schedules keep every message sent until the step ends: 50 MB per micro-batch for
Llama 3 8B in TP2·CP2·PP2·VPP2, 13 GB at the 256 micro-batches of a large job (benchmarks/2026-11-16-memory.md). Here
a buffer is allocated when its message is requested and freed with the activations it became; a sent message is freed
when a few newer ones have left.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

# Messages of a stage that may be in transit at once. torch orders receives like the other rank's sends in one
# global order, so even waiting for every send at once could not deadlock; a few let the ranks drift apart.
MOST_UNDER_WAY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """Shape, strides and dtype of a receive buffer."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Form:
        return cls(size=buffer.size(), stride=buffer.stride(), dtype=buffer.dtype, requires_grad=buffer.requires_grad)

    def make(self, device: torch.device) -> torch.Tensor:
        buffer = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return buffer.requires_grad_(self.requires_grad)


class LeanStage(PipelineStage):
    """torch's manual stage with receive buffers that live only as long as their micro-batch.

    `sends_alone` is for schedules that start sends separately and wait for them at the end of the step; 1F1B joins
    sends with receives and waits for both at once.
    """

    def __init__(self, *args: Any, sends_alone: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sends_alone = sends_alone
        self._forward_forms: list[_Form | None] = []
        self._backward_forms: list[_Form | None] = []
        self._under_way: deque[list[dist.Work]] = deque()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        infra = super()._prepare_forward_infra(1, *args, **kwargs)
        self._forward_forms = _take_buffers(self.args_recv_info, num_microbatches)
        return infra

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        infra = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        self._backward_forms = _take_buffers(self.grad_recv_info, num_microbatches)
        return infra

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a forward, into newly allocated buffers."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id], self._forward_forms)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a backward, into newly allocated buffers."""
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id], self._backward_forms)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's forward, and drop the reference to its input, which then only the autograd graph holds."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _drop_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Run torch's backward, or its first half, and drop the received gradient."""
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if self.has_backward:
            _drop_buffers(self.grad_recv_info[bwd_chunk_id])
        if loss is not None:
            # The schedule keeps every loss, whose graph would keep the input of the last stage
            loss.detach_()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a forward that the schedule must start; none if this stage starts them itself."""
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a backward that the schedule must start; none if this stage starts them itself."""
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def finish_sends(self) -> None:
        """Wait for every message still in transit."""
        while self._under_way:
            schedules._wait_batch_p2p(self._under_way.popleft())

    def clear_runtime_states(self) -> None:
        """Clear caches between steps. Buffers are new each time, so there are no gradients of old ones to clear."""
        self.fwd_cache.clear()
        self.output_chunks.clear()

    def _send(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self._sends_alone or not ops:
            return ops
        while len(self._under_way) >= MOST_UNDER_WAY:
            schedules._wait_batch_p2p(self._under_way.popleft())
        # Started as the schedule would, because NCCL does not pair batched with single operations
        self._under_way.append(schedules._batch_p2p(ops))
        return []

    def _make_buffers(self, infos: Iterable[Any], forms: list[_Form | None]) -> None:
        for info, form in zip(infos, forms, strict=True):
            if form is not None:
                info.buffer = form.make(self.device)


def _take_buffers(known: dict[int, tuple[Any, ...]], count: int) -> list[_Form | None]:
    """Describe micro-batch 0's buffers, drop them, and give every micro-batch its own receive info.

    Returns the form of each buffer, or None for an info without a buffer.
    """
    first = known[0]
    # The first stage's tokens have no buffer (torch 2.11: no such field)
    buffers = [getattr(info, "buffer", None) for info in first]
    _drop_buffers(first)
    for chunk in range(1, count):
        known[chunk] = tuple(copy.copy(info) for info in first)
    return [None if buffer is None else _Form.of(buffer) for buffer in buffers]


def _drop_buffers(infos: Iterable[Any]) -> None:
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = None
