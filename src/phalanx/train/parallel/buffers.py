"""Buffers of the user's own network that forward changes: running statistics, counters, codebooks.

Data ranks see different sequences, so their buffers part during a step; after it all must hold the same again. Batch
norm's statistics become what one process would have got from the same micro-batches in the same order. Of any other
buffer nobody but its author knows how to add two changes up: data rank 0's value counts, as in DistributedDataParallel.
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
    """Where a buffer is registered, and the storage that checkpoints and other ranks know it by."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    saved: bool  # in checkpoints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Statistics:
    """The running statistics of one batch norm, with what they were after the last step on all ranks."""

    norm: _BatchNorm
    slots: tuple[BufferSlot, ...]  # running_mean, running_var, num_batches_tracked
    before: tuple[torch.Tensor, ...]


class BufferExchange:
    """Makes the buffers of a stage the same on its data ranks after every step in which one of them changed."""

    def __init__(self, models: Iterable[nn.Module], group: ProcessGroup) -> None:
        self._group = group if group.size() > 1 else None
        self._slots = [slot for model in models for slot in _buffer_slots(model)]
        self._norms = list(_norms(self._slots)) if self._group is not None else []
        taken = {id(slot) for norm in self._norms for slot in norm.slots}
        self._others = [slot for slot in self._slots if id(slot) not in taken]
        self._digests: list[torch.Tensor] = []
        self._built: dict[str, torch.Tensor] = {}  # digests of what no checkpoint holds, as it was built

    def remember(self) -> None:
        """Take the buffers as they are for what all ranks have."""
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
        """Names of those that no checkpoint holds and that are not what they were built as."""
        return [
            slot.name
            for slot in self._slots
            if slot.name in self._built and not torch.equal(fold_tensor(slot.tensor), self._built[slot.name])
        ]

    def settle(self) -> None:
        """Put buffers that forward replaced (`self.count = self.count + 1`) back into the storage they are known by."""
        for slot in self._slots:
            now = slot.module._buffers.get(slot.key)
            if now is slot.tensor:
                continue
            if now is None or now.shape != slot.tensor.shape:
                raise mistake(
                    slot.name,
                    f"is a buffer of {list(slot.tensor.shape)}, and forward made it "
                    + ("None" if now is None else f"one of {list(now.shape)}"),
                    why="checkpoints and the other ranks expect the size it was built with",
                    fix="give it its largest size in the constructor, or keep it as an ordinary attribute",
                )
            with torch.no_grad():
                slot.tensor.copy_(now)
            slot.module._buffers[slot.key] = slot.tensor

    def changed(self, like: torch.Tensor) -> torch.Tensor:
        """Whether a buffer changed on this rank since `remember`: 0 or 1, as a number beside `like`, not waited for."""
        if not self._digests:
            return torch.zeros_like(like)
        found = [
            (fold_tensor(slot.tensor) != digest).any().to(like.device)
            for slot, digest in zip(self._slots, self._digests, strict=True)
        ]
        return torch.stack(found).any().to(like.dtype)

    @torch.no_grad()
    def exchange(self) -> list[str]:
        """Make them equal; names of those that are data rank 0's alone. Every data rank of the stage calls this."""
        if self._group is None or not self._digests:
            return []
        moved = self._moved_slots(self._others)
        _combine_statistics(self._norms, self._group)
        if moved:
            _send_first(moved, self._group)
        self.remember()
        return [slot.name for slot in moved]

    def _moved_slots(self, slots: Sequence[BufferSlot]) -> list[BufferSlot]:
        """Those that changed on some rank."""
        if not slots:
            return []
        digests = {id(slot): digest for slot, digest in zip(self._slots, self._digests, strict=True)}
        flags = torch.stack([(fold_tensor(slot.tensor) != digests[id(slot)]).any() for slot in slots]).to(torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [slot for slot, flag in zip(slots, flags.tolist(), strict=True) if flag]


def _buffer_slots(model: nn.Module) -> list[BufferSlot]:
    """Every buffer once, under its first name."""
    found: dict[int, BufferSlot] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name, saved = f"{prefix}.{key}" if prefix else key, key not in module._non_persistent_buffers_set
                found.setdefault(id(buffer), BufferSlot(name=name, module=module, key=key, tensor=buffer, saved=saved))
    return list(found.values())


def _norms(slots: Sequence[BufferSlot]) -> Iterable[Statistics]:
    """Batch norms that each data rank keeps for itself; SyncBatchNorm has already seen all ranks."""
    by_module: dict[int, dict[str, BufferSlot]] = {}
    for slot in slots:
        by_module.setdefault(id(slot.module), {})[slot.key] = slot
    for of_module in by_module.values():
        norm = next(iter(of_module.values())).module
        plain = isinstance(norm, _BatchNorm) and not isinstance(norm, nn.SyncBatchNorm)
        keys = ("running_mean", "running_var", "num_batches_tracked")
        if plain and all(key in of_module for key in keys):
            mine = tuple(of_module[key] for key in keys)
            assert isinstance(norm, _BatchNorm)
            yield Statistics(norm=norm, slots=mine, before=tuple(slot.tensor.clone() for slot in mine))


def _combine_statistics(norms: Sequence[Statistics], group: ProcessGroup) -> None:
    """Statistics as if one process had seen the micro-batches of rank 0, then those of rank 1, and so on.

    A rank's k batches turn a statistic s into a·s + b, with a = (1 - momentum)^k and b what is left: a chain of ranks
    is the chain of these. Without a momentum a statistic is the mean over all batches so far.
    """
    if not norms:
        return
    flat = torch.cat([slot.tensor.double().view(-1) for norm in norms for slot in norm.slots])
    everyone = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(everyone, flat, group=group)
    sizes = [slot.tensor.numel() for norm in norms for slot in norm.slots]
    rows = [iter(row.split(sizes)) for row in everyone]
    for norm in norms:
        mean, var, count = (before.double().view(-1) for before in norm.before)
        first, total = count.clone(), count.clone()
        for row in rows:
            their_mean, their_var, their_count = next(row), next(row), next(row)
            batches = their_count - first
            if norm.norm.momentum is None:
                after = (total + batches).clamp(min=1.0)
                mean = (mean * total + their_mean * their_count - norm.before[0].double() * first) / after
                var = (var * total + their_var * their_count - norm.before[1].double() * first) / after
            else:
                kept = (1.0 - norm.norm.momentum) ** batches
                mean = mean * kept + (their_mean - norm.before[0].double() * kept)
                var = var * kept + (their_var - norm.before[1].double() * kept)
            total = total + batches
        for slot, value in zip(norm.slots, (mean, var, total), strict=True):
            slot.tensor.copy_(value.view(slot.tensor.shape))


def _send_first(slots: Sequence[BufferSlot], group: ProcessGroup) -> None:
    """Data rank 0's buffers to all, as one message of bytes."""
    flat = torch.cat([slot.tensor.contiguous().view(-1).view(torch.uint8) for slot in slots])
    dist.broadcast(flat, group=group, group_src=0)
    sizes = [slot.tensor.numel() * slot.tensor.element_size() for slot in slots]
    for slot, part in zip(slots, flat.split(sizes), strict=True):
        slot.tensor.copy_(part.clone().view(slot.tensor.dtype).view(slot.tensor.shape))
