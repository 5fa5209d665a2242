"""Data parallelism without sharding: gradients are collected in flat buckets and summed while backward still runs.

DistributedDataParallel does not fit: it averages where Phalanx sums, it does not take tensor-parallel parameters or
pipeline stages without help, and its hooks launch collectives from callbacks, which deadlocks gloo as soon as there
are two buckets (docs/decisions/0009). Here buckets are launched in one fixed order on every rank, also when some
never fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from phalanx.train.parallel.compress import Codec

# DDP's default: large enough for bandwidth, small enough to start early
BUCKET_BYTES = 25 * 2**20


class LocalGradientWatcher(Protocol):
    """Observer that receives this rank's own gradients before those of other ranks are added; it changes nothing."""

    def counts(self, param: torch.Tensor) -> bool:
        """Return whether the observer wants the gradients of a parameter."""

    def hear(self, key: object, grads: Sequence[torch.Tensor]) -> None:
        """Receive the gradients identified by `key`, of one more part of the batch."""

    def miss(self) -> None:
        """Note that some gradients did not reach the observer."""


class Bucket:
    """A flat gradient buffer and the parameters whose gradients it holds."""

    def __init__(self, params: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self.params = list(params)
        sizes = [local_tensor(param).numel() for param in params]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=local_tensor(params[0]).device)
        flat_parts = self.flat.split(sizes)
        self.views = [
            flat_part.view(local_tensor(param).shape) for flat_part, param in zip(flat_parts, params, strict=True)
        ]
        self.waiting = 0
        self.filled = [False] * len(self.views)

    def add(self, place: int) -> torch.Tensor | None:
        """Move the gradient of one parameter into the buffer and return it.

        The first of a step overwrites the old content.
        """
        param, view = self.params[place], self.views[place]
        grad = local_gradient(param)
        if grad is None:
            return None
        if self.filled[place]:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.filled[place] = True
        param.grad = None
        return grad

    def heard(self, ear: LocalGradientWatcher) -> list[torch.Tensor]:
        """Return the gradients an observer wants: the flat buffer if it wants them all, otherwise views."""
        views = [view for view, param in zip(self.views, self.params, strict=True) if ear.counts(param)]
        return [self.flat] if len(views) == len(self.views) else views

    def close(self) -> bool:
        """Add gradients that came without a hook call, and zero missing ones; return whether there were any.

        Zero-bubble schedules write gradients without calling hooks, and an idle expert has no gradient.
        """
        has_unannounced = any(param.grad is not None for param in self.params)
        for place, view in enumerate(self.views):
            self.add(place)
            if not self.filled[place]:
                view.zero_()
        return has_unannounced


class Replicas:
    """Sums the gradients of parameters of which every rank of a group holds a full copy."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        group: ProcessGroup | None,
        *,
        reduce: torch.dtype,
        codec: Codec | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._codec = codec
        self.buckets = _fill_buckets(params, reduce, bucket_bytes)
        self._home = {
            id(param): (bucket_index, place)
            for bucket_index, bucket in enumerate(self.buckets)
            for place, param in enumerate(bucket.params)
        }
        self._launched = 0
        self._ear: LocalGradientWatcher | None = None
        self._hears_each = False
        self._pending: list[dist.Work | Future[None] | None] = []
        # One thread, so that compressed buckets keep their order; it overlaps with backward because gloo releases
        # the GIL.
        self._thread = ThreadPoolExecutor(1, "gradients") if codec is not None else None
        if codec is not None:
            for key, bucket in enumerate(self.buckets):
                codec.prepare(key, [view.shape for view in bucket.views])
        for param in params:
            param.register_post_accumulate_grad_hook(self._gradient_arrived)

    def listen(self, ear: LocalGradientWatcher, *, each: bool) -> bool:
        """Pass every bucket to `ear` before it is summed, or with `each` every gradient of every micro-batch."""
        self._ear, self._hears_each = ear, each
        return each

    def begin(self, micro_batches: int) -> None:
        """Prepare a step, before its first backward."""
        self._launched = 0
        for bucket in self.buckets:
            bucket.waiting = micro_batches * len(bucket.params)
            bucket.filled = [False] * len(bucket.views)

    def micro_batch_done(self) -> None:
        """Do nothing: gradients were already added as they arrived."""

    def finish(self) -> None:
        """Complete all sums, after the last backward of the step."""
        unannounced = [bucket.close() for bucket in self.buckets[self._launched :]]
        if self._ear is not None and self._hears_each and any(unannounced):
            self._ear.miss()
        self._launch_buckets(everything=True)
        for work in self._pending:
            if isinstance(work, Future):
                work.result()
            elif work is not None:
                work.wait()
        self._pending.clear()

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return the summed gradient of a parameter, as a view into its bucket."""
        bucket, place = self._home[id(param)]
        return self.buckets[bucket].views[place]

    def _gradient_arrived(self, param: torch.Tensor) -> None:
        index, place = self._home[id(param)]
        bucket = self.buckets[index]
        grad = bucket.add(place)
        if grad is not None and self._ear is not None and self._hears_each and self._ear.counts(param):
            self._ear.hear(id(param), [grad])
        bucket.waiting -= 1
        if bucket.waiting == 0:
            self._launch_buckets(everything=False)

    def _launch_buckets(self, *, everything: bool) -> None:
        # Strictly in order: a bucket that fills early waits for its predecessors, or ranks would pair different
        # buckets.
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            if bucket.waiting > 0 and not everything:
                return
            if self._ear is not None and not self._hears_each:
                self._ear.hear(id(bucket), bucket.heard(self._ear))
            if self._group is not None:
                self._pending.append(self._sum_bucket(bucket.flat, self._group, self._launched))
            self._launched += 1

    def _sum_bucket(self, flat: torch.Tensor, group: ProcessGroup, key: int) -> Any:
        if self._codec is not None and flat.is_cuda:
            # Asynchronous on GPUs: the collective runs in the CUDA stream
            return self._codec.all_reduce(flat, group, key)
        if self._codec is not None and self._thread is not None:
            return self._thread.submit(self._codec.all_reduce, flat, group, key)
        return dist.all_reduce(flat, group=group, async_op=True)


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind a parameter."""
    return param._local_tensor if isinstance(param, DTensor) else param.detach()


def _fill_buckets(params: Sequence[torch.Tensor], dtype: torch.dtype, bucket_bytes: int) -> list[Bucket]:
    """Group parameters into buckets, last parameters first because their gradients are ready first."""
    groups: list[list[torch.Tensor]] = []
    room = 0
    for param in reversed(params):
        size = local_tensor(param).numel() * dtype.itemsize
        if not groups or size > room or local_tensor(param).device != local_tensor(groups[-1][0]).device:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(param)
        room -= size
    return [Bucket(group, dtype) for group in groups]


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the plain tensor of a parameter's gradient, split as the parameter is."""
    grad = param.grad
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(param, DTensor)
    # The gradient of a replicated weight used on split activations is a partial sum over the tensor group.
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad._local_tensor
