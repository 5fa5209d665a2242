"""Reading a communication call as torch dispatches it: what kind, how many bytes, which group, which peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# Part of an operator's name without underscores -> our word. The first that fits counts.
WORDS = (
    ("wait", ""),
    ("barrier", "barrier"),
    ("reducescatter", "reduce-scatter"),
    ("allreduce", "all-reduce"),
    ("allgather", "all-gather"),
    ("alltoall", "all-to-all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "receive"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)


@cache
def kind_of(op: Any) -> str:
    """Our word for a communication operator; empty for every other operator, and for waiting."""
    if op.namespace not in NAMESPACES:
        return ""
    name = op._opname.replace("_", "")
    return next((word for part, word in WORDS if part in name), "")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)


def payload_of(args: Sequence[Any], out: Any) -> tuple[int, str]:
    """Bytes and format of the larger side: a gather's output, a scatter's input."""
    sides = [list(tensors_of(side)) for side in (*args[:2], out)]
    sizes = [sum(one.numel() * one.element_size() for one in side) for side in sides]
    largest = max(range(len(sides)), key=lambda place: sizes[place])
    side = sides[largest]
    return sizes[largest], str(side[0].dtype).removeprefix("torch.") if side else ""


def group_of(op: Any, args: Sequence[Any]) -> ProcessGroup:
    """The group a call names: an object among the arguments of c10d calls, a name among those of functional ones."""
    if op.namespace == "c10d":
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        return ProcessGroup.unbox(boxed)
    names = [arg for arg in args if isinstance(arg, str)]
    return _resolve_process_group(names[-1])  # type: ignore[arg-type]


def peer_of(args: Sequence[Any], group: ProcessGroup) -> int:
    """The other rank of a send or receive, as rank of the job."""
    return int(dist.get_global_rank(group, int(args[2])))
