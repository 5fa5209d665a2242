"""When NCCL's kernels ran in one step: on a GPU the host's clock says nothing about a collective."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from phalanx.train.telemetry.wiretap import Call

# Part of a kernel's name -> what we call it. Sends, receives and all-to-alls are one kind of kernel to NCCL.
WORDS = (
    ("AllReduce", "all-reduce"),
    ("AllGather", "all-gather"),
    ("ReduceScatter", "reduce-scatter"),
    ("SendRecv", "exchange"),
    ("Broadcast", "broadcast"),
    ("Reduce", "reduce"),
)
EXCHANGES = ("send", "receive", "all-to-all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A communication kernel, in seconds from the begin of the recording."""

    op: str
    start_s: float
    duration_s: float


@contextmanager
def kernels_of(device: torch.device) -> Iterator[list[Kernel]]:
    """Records what NCCL runs inside; the list is filled at the end. Both ends wait for the device."""
    from torch.profiler import ProfilerActivity, profile

    found: list[Kernel] = []
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that events of one recording are not kept for the next, as we want it
        made = profile(activities=[ProfilerActivity.CUDA], acc_events=False)  # True costs half a second a step (H200)
    with made as recording:
        began_ns = time.time_ns()
        yield found
        torch.cuda.synchronize(device)
    results = recording.profiler.kineto_results if recording.profiler is not None else None
    for event in results.events() if results is not None else ():
        op = op_of(event.name())
        if op:
            start_s = (event.start_ns() - began_ns) / 1e9
            found.append(Kernel(op=op, start_s=start_s, duration_s=event.duration_ns() / 1e9))
    found.sort(key=lambda kernel: kernel.start_s)


def op_of(kernel: str) -> str:
    """Our word for a kernel of NCCL; empty for every other."""
    if not kernel.startswith("nccl"):
        return ""
    return next((word for part, word in WORDS if part in kernel), "other")


def timed_by(kernels: Sequence[Kernel], calls: Sequence[Call], *, began_s: float) -> list[Call]:
    """The host's calls with the times of their kernels: the n-th call of a kind is its n-th kernel.

    Where their numbers differ (sends and receives posted together are one kernel, a group of one runs none) the kernels
    stand for themselves, without bytes; the calls stay where the host made them and take no time.
    """
    timed: list[Call] = []
    for op in dict.fromkeys([_kernel_of(call) for call in calls] + [kernel.op for kernel in kernels]):
        asked = [call for call in calls if _kernel_of(call) == op]
        ran = [kernel for kernel in kernels if kernel.op == op]
        spans = [(began_s + kernel.start_s, began_s + kernel.start_s + kernel.duration_s) for kernel in ran]
        if len(asked) == len(ran):
            timed += [replace(call, start_s=s, end_s=e) for call, (s, e) in zip(asked, spans, strict=True)]
        else:
            timed += [replace(call, end_s=call.start_s) for call in asked]
            timed += [Call(op=op, nbytes=0, group="", start_s=s, end_s=e) for s, e in spans]
    return timed


def _kernel_of(call: Call) -> str:
    return "exchange" if call.op in EXCHANGES else call.op
