"""Collectives for context, expert and compressed exchange, uniform over torch 2.11 to 2.13, gloo and NCCL.

Only c10d calls with sizes known as Python integers, so that the same code runs on fake tensors and a fake group.

While torch.compile traces them they are functional collectives, which return their result instead of filling a tensor
that was allocated for it. torch 2.11 loses the gradient of a tensor filled inside an autograd function: compiled
Ulysses trained with zero gradients for queries, keys and values (H200, 2026-11-16; torch 2.13 is right).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Called on flat tensors here: gloo takes (ranks, *shape) for ragged parts where there is one rank. torch 2.13
# renamed these two and warns about the old names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FUNCTIONAL = torch.ops._c10d_functional


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return every rank's `x`, stacked along a new first dimension in rank order."""
    if torch.compiler.is_compiling():
        gathered = _FUNCTIONAL.all_gather_into_tensor(x.reshape(-1), group.size(), group.group_name)
        return _FUNCTIONAL.wait_tensor(gathered).view(group.size(), *x.shape)
    out = x.new_empty((group.size(), *x.shape))
    _GATHER(out.view(-1), x.reshape(-1), group=group)
    return out


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all ranks of this rank's entry of the first dimension, whose length is the group's size."""
    if torch.compiler.is_compiling():
        reduced = _FUNCTIONAL.reduce_scatter_tensor(x.reshape(-1), "sum", group.size(), group.group_name)
        return _FUNCTIONAL.wait_tensor(reduced).view(x.shape[1:])
    out = x.new_empty(x.shape[1:])
    _REDUCE_SCATTER(out.view(-1), x.reshape(-1), group=group)
    return out


def all_to_all(
    x: Tensor, group: ProcessGroup, *, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
) -> Tensor:
    """Send part j of the first dimension to rank j. `send` and `receive` are rows per rank; None means equal parts."""
    rows = x.shape[0] if receive is None else sum(receive)
    if torch.compiler.is_compiling():
        even = [x.shape[0] // group.size()] * group.size()
        splits = [list(even if counts is None else counts) for counts in (receive, send)]
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_to_all_single(x.contiguous(), *splits, group.group_name))
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(
        out,
        x.contiguous(),
        output_split_sizes=None if receive is None else list(receive),
        input_split_sizes=None if send is None else list(send),
        group=group,
    )
    return out


class _Exchange(torch.autograd.Function):
    """`all_to_all` with a backward that sends gradients the reverse way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, send: Sequence[int] | None, receive: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return all_to_all(x, group, send=send, receive=receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, send=ctx.receive, receive=ctx.send), None, None, None


def exchange_rows(
    x: Tensor, group: ProcessGroup, *, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
) -> Tensor:
    """`all_to_all` with gradients."""
    out: Tensor = _Exchange.apply(x, group, send, receive)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hop:
    """A message in transit round the ring. `sent` keeps a reference so that its memory outlives the transfer."""

    sent: Tensor
    received: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """Wait for the transfer, and return the message of the previous rank."""
        for work in self.works:
            work.wait()
        return self.received


def pass_on(x: Tensor, group: ProcessGroup) -> Hop:
    """Start sending `x` to the next rank of the ring and receiving its counterpart from the previous one."""
    rank, ranks = group.rank(), group.size()
    x = x.contiguous()
    received = torch.empty_like(x)
    # One batch for send and receive: NCCL would deadlock on two ranks that both send first.
    ops = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
    ]
    return Hop(sent=x, received=received, works=list(dist.batch_isend_irecv(ops)))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group).flatten(0, 1), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(_per_rank(grad, ctx.group), ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(_per_rank(x, group), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group).flatten(0, 1), None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _per_rank(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view(group.size(), -1, *x.shape[1:])


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all ranks as a new tensor."""
    if torch.compiler.is_compiling():
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_reduce(x.contiguous(), "sum", group.group_name))
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


# Two states of a tensor that every rank of a group uses. Replicated: all ranks hold all of it and its full
# gradient. Split: each rank holds some rows and their gradient.


def split_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Turn a replicated tensor into this rank's rows."""
    out: Tensor = _Split.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def join_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Turn this rank's rows into the replicated tensor."""
    out: Tensor = _Join.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather all rows on every rank, each of which then does a different part of the work: gradients are summed."""
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum partial results of all rows over the ranks, and return this rank's rows."""
    out: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def share_input(x: Tensor, group: ProcessGroup) -> Tensor:
    """Pass on a replicated tensor of which each rank uses a different part of the work: gradients are summed."""
    out: Tensor = _Shared.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def add_up(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum partial results over the ranks; the sum is replicated, and its gradient passes unchanged."""
    out: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return out
