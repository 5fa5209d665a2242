"""Synchronisation of buffers that forward changes in a user's own network: running statistics, counters, codebooks.

Data ranks see different sequences, so their buffers diverge during a step and must be made equal after it. The
statistics of batch norm become what one process would have computed from the same micro-batches in the same order.
For any other buffer there is no general way to combine two changes: the value of data rank 0 is used, as in
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.errors import mistake
from phalanx.train.guard.divergence import fold_tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BufferSlot:
    """A registered buffer: its module and key, and the storage by which checkpoints and other ranks know it."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    saved: bool  # whether checkpoints contain it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Statistics:
    """The running statistics of one batch norm, and their values after the last step, which all ranks share."""

    norm: _BatchNorm
    slots: tuple[BufferSlot, ...]  # running_mean, running_var, num_batches_tracked
    before: tuple[torch.Tensor, ...]


class BufferExchange:
    """Makes the buffers of a pipeline stage equal on its data ranks after every step in which one of them changed."""

    def __init__(self, models: Iterable[nn.Module], group: ProcessGroup) -> None:
        self._group = group if group.size() > 1 else None
        self._slots = [slot for model in models for slot in _buffer_slots(model)]
        self._norms = list(_norms(self._slots)) if self._group is not None else []
        norm_slots = {id(slot) for norm in self._norms for slot in norm.slots}
        self._others = [slot for slot in self._slots if id(slot) not in norm_slots]
        self._digests: list[torch.Tensor] = []
        # Digests at construction of the buffers that no checkpoint contains
        self._built: dict[str, torch.Tensor] = {}

    def remember(self) -> None:
        """Record the buffers' present values as those that all ranks share."""
        if not self._slots or isinstance(self._slots[0].tensor, FakeTensor):
            return
        if not self._built:
            self._built = {slot.name: fold_tensor(slot.tensor) for slot in self._slots if not slot.saved}
        if self._group is None:
            return
        self._digests = [fold_tensor(slot.tensor) for slot in self._slots]
        for norm in self._norms:
            for before, slot in zip(norm.before, norm.slots, strict=True):
                before.copy_(slot.tensor)

    def changed_unsaved(self) -> list[str]:
        """Return the names of buffers that no checkpoint contains and that have changed since construction."""
        return [
            slot.name
            for slot in self._slots
            if slot.name in self._built and not torch.equal(fold_tensor(slot.tensor), self._built[slot.name])
        ]

    def settle(self) -> None:
        """Copy buffers that forward replaced (`self.count = self.count + 1`) back into their registered storage.

        Raises UserError if forward changed a buffer's shape or set it to None.
        """
        for slot in self._slots:
            current = slot.module._buffers.get(slot.key)
            if current is slot.tensor:
                continue
            if current is None or current.shape != slot.tensor.shape:
                raise mistake(
                    slot.name,
                    f"is a buffer of {list(slot.tensor.shape)}, and forward made it "
                    + ("None" if current is None else f"one of {list(current.shape)}"),
                    why="checkpoints and the other ranks expect the size it was built with",
                    fix="give it its largest size in the constructor, or keep it as an ordinary attribute",
                )
            with torch.no_grad():
                slot.tensor.copy_(current)
            slot.module._buffers[slot.key] = slot.tensor

    def changed(self, like: torch.Tensor) -> torch.Tensor:
        """Return 1 if a buffer changed on this rank since `remember`, else 0.

        The result is a tensor like `like`, computed without a GPU sync.
        """
        if not self._digests:
            return torch.zeros_like(like)
        changes = [
            (fold_tensor(slot.tensor) != digest).any().to(like.device)
            for slot, digest in zip(self._slots, self._digests, strict=True)
        ]
        return torch.stack(changes).any().to(like.dtype)

    @torch.no_grad()
    def exchange(self) -> list[str]:
        """Make the buffers equal; every data rank of the stage calls this.

        Returns the names of the buffers that took data rank 0's value.
        """
        if self._group is None or not self._digests:
            return []
        moved = self._moved_slots(self._others)
        _combine_statistics(self._norms, self._group)
        if moved:
            _send_first(moved, self._group)
        self.remember()
        return [slot.name for slot in moved]

    def _moved_slots(self, slots: Sequence[BufferSlot]) -> list[BufferSlot]:
        """Return the slots whose buffer changed on any data rank."""
        if not slots:
            return []
        digests = {id(slot): digest for slot, digest in zip(self._slots, self._digests, strict=True)}
        flags = torch.stack([(fold_tensor(slot.tensor) != digests[id(slot)]).any() for slot in slots]).to(torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [slot for slot, flag in zip(slots, flags.tolist(), strict=True) if flag]


def _buffer_slots(model: nn.Module) -> list[BufferSlot]:
    """Return every distinct buffer of the model, under the first name it is registered by."""
    slots: dict[int, BufferSlot] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name, saved = f"{prefix}.{key}" if prefix else key, key not in module._non_persistent_buffers_set
                slots.setdefault(id(buffer), BufferSlot(name=name, module=module, key=key, tensor=buffer, saved=saved))
    return list(slots.values())


def _norms(slots: Sequence[BufferSlot]) -> Iterable[Statistics]:
    """Yield the batch norms whose statistics each data rank computes alone; SyncBatchNorm already covers all ranks."""
    by_module: dict[int, dict[str, BufferSlot]] = {}
    for slot in slots:
        by_module.setdefault(id(slot.module), {})[slot.key] = slot
    for module_slots in by_module.values():
        norm = next(iter(module_slots.values())).module
        plain = isinstance(norm, _BatchNorm) and not isinstance(norm, nn.SyncBatchNorm)
        keys = ("running_mean", "running_var", "num_batches_tracked")
        if plain and all(key in module_slots for key in keys):
            statistics = tuple(module_slots[key] for key in keys)
            assert isinstance(norm, _BatchNorm)
            yield Statistics(norm=norm, slots=statistics, before=tuple(slot.tensor.clone() for slot in statistics))


def _combine_statistics(norms: Sequence[Statistics], group: ProcessGroup) -> None:
    """Combine statistics as if one process had seen the micro-batches of rank 0, then those of rank 1, and so on.

    The k batches of one rank turn a statistic s into a·s + b, with a = (1 - momentum)^k and b independent of s; the
    ranks' updates are applied one after another. Without a momentum a statistic is the mean over all batches so far.
    """
    if not norms:
        return
    flat = torch.cat([slot.tensor.double().view(-1) for norm in norms for slot in norm.slots])
    all_ranks = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(all_ranks, flat, group=group)
    sizes = [slot.tensor.numel() for norm in norms for slot in norm.slots]
    rows = [iter(row.split(sizes)) for row in all_ranks]
    for norm in norms:
        mean, var, count = (old_value.double().view(-1) for old_value in norm.before)
        first, total = count.clone(), count.clone()
        for row in rows:
            their_mean, their_var, their_count = next(row), next(row), next(row)
            batches = their_count - first
            if norm.norm.momentum is None:
                batches_after = (total + batches).clamp(min=1.0)
                mean = (mean * total + their_mean * their_count - norm.before[0].double() * first) / batches_after
                var = (var * total + their_var * their_count - norm.before[1].double() * first) / batches_after
            else:
                decay = (1.0 - norm.norm.momentum) ** batches
                mean = mean * decay + (their_mean - norm.before[0].double() * decay)
                var = var * decay + (their_var - norm.before[1].double() * decay)
            total = total + batches
        for slot, value in zip(norm.slots, (mean, var, total), strict=True):
            slot.tensor.copy_(value.view(slot.tensor.shape))


def _send_first(slots: Sequence[BufferSlot], group: ProcessGroup) -> None:
    """Broadcast data rank 0's buffers to all data ranks as one message of bytes."""
    flat = torch.cat([slot.tensor.contiguous().view(-1).view(torch.uint8) for slot in slots])
    dist.broadcast(flat, group=group, group_src=0)
    sizes = [slot.tensor.numel() * slot.tensor.element_size() for slot in slots]
    for slot, buffer_bytes in zip(slots, flat.split(sizes), strict=True):
        slot.tensor.copy_(buffer_bytes.clone().view(slot.tensor.dtype).view(slot.tensor.shape))
