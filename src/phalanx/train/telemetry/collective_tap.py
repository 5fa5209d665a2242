"""Listens to every collective of one step: what it was, how large, on which group, from when to when.

Between steps nothing of it is in place. For the length of a sampled step the methods of torch's process groups are
wrapped, and with them the functional collectives that DTensor calls; both call on as before. On a CPU a collective ends
when torch says that it is done, or when the first wait for it returns. Compiled graphs call functional collectives
without coming by here.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work, _resolve_process_group
from torch.distributed import ProcessGroup

from phalanx.train.tracing.operators import WORDS, payload_of, tensors_of

# Of torch 2.11 to 2.13; those a version lacks are left out.
METHODS = [
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
]
FUNCTIONAL = [
    "all_reduce",
    "all_reduce_",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
]


@dataclass(kw_only=True, slots=True)
class TappedCollective:
    """One collective; filled in while it runs."""

    op: str
    nbytes: int
    group: str  # torch's name of it
    start_s: float
    end_s: float


class CollectiveTap:
    """The calls of a step. `functional` also hears DTensor's, which must not be while something compiles."""

    def __init__(self, *, functional: bool, now: Callable[[], float] = time.perf_counter) -> None:
        self._functional, self._now = functional, now
        self.calls: list[TappedCollective] = []
        self._waited: dict[
            int, TappedCollective
        ] = {}  # by identity of torch's work, or by address of the tensor that will be

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear everything inside; everything is as it was afterwards."""
        undo: list[tuple[Any, str, Any]] = []

        def put(place: Any, name: str, make: Callable[[Any], Any]) -> None:
            whole = getattr(place, name, None)
            if whole is not None:
                undo.append((place, name, vars(place)[name]))  # not `whole`: put back, it would forget its group
                setattr(place, name, make(whole))

        try:
            for name in METHODS:
                put(ProcessGroup, name, partial(self._tap_method, _operation_name(name)))
            put(Work, "wait", self._tap_wait)
            if self._functional:
                space = torch.ops._c10d_functional
                for name in FUNCTIONAL:
                    put(space, name, partial(self._tap_function, _operation_name(name)))
                put(space, "wait_tensor", self._wait_tensor)
            yield
        finally:
            for place, name, whole in reversed(undo):
                setattr(place, name, whole)
            self._waited.clear()

    def _begin_call(self, op: str, group: str, args: Any, out: Any) -> TappedCollective:
        now_s = self._now()
        call = TappedCollective(op=op, nbytes=payload_of(args, out)[0], group=group, start_s=now_s, end_s=now_s)
        self.calls.append(call)
        return call

    def _end_call(self, call: TappedCollective) -> None:
        call.end_s = self._now()

    def _tap_method(self, op: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = self._begin_call(op, group.group_name, args or tuple(kwargs.values()), None)
            work = whole(group, *args, **kwargs)
            self._end_call(call)
            if work is not None:
                self._waited[id(work)] = call
                with suppress(RuntimeError, ValueError):  # sends and receives have no future: their wait tells
                    work.get_future().add_done_callback(lambda _: self._end_call(call))
            return work

        return run

    def _tap_wait(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            done = whole(work, *args, **kwargs)
            call = self._waited.pop(id(work), None)
            if call is not None and call.op in ("send", "receive"):
                self._end_call(call)
            return done

        return run

    def _tap_function(self, op: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            names = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
            group = _resolve_process_group(names[-1]).group_name if names else ""  # type: ignore[arg-type]
            call = self._begin_call(op, group, args, None)
            out = whole(*args, **kwargs)
            call.nbytes = payload_of(args, out)[0]
            self._end_call(call)
            for tensor in tensors_of(out):
                self._waited[tensor.data_ptr()] = call
            return out

        return _Packet(whole, run)

    def _wait_tensor(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor) -> Any:
            done = whole(tensor)
            call = self._waited.pop(tensor.data_ptr(), None)
            if call is not None:
                self._end_call(call)
            return done

        return _Packet(whole, run)


@contextmanager
def marked_waits(stall: AbstractContextManager[None]) -> Iterator[None]:
    """Put `stall` around every wait of this thread for a collective inside; not where something compiles.

    Costs about a microsecond a wait. Other threads wait unmarked: what they wait for does not hold the step up.
    """
    thread = threading.get_ident()

    def around(whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return whole(*args, **kwargs)
            with stall:
                return whole(*args, **kwargs)

        return run

    space = torch.ops._c10d_functional
    methods = [
        (Work, "wait", around(Work.wait)),
        (space, "wait_tensor", _Packet(space.wait_tensor, around(space.wait_tensor))),
    ]
    before = [(place, name, vars(place)[name]) for place, name, _ in methods]
    try:
        for place, name, marked in methods:
            setattr(place, name, marked)
        yield
    finally:
        for place, name, whole in before:
            setattr(place, name, whole)


class _Packet:
    """Stands in for one of torch's operators: called it is ours, looked into it is torch's."""

    def __init__(self, whole: Any, run: Callable[..., Any]) -> None:
        self._whole, self._run = whole, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _operation_name(name: str) -> str:
    plain = name.replace("_", "")
    return next(word for part, word in WORDS if part in plain)


# When NCCL's kernels ran in one step: on a GPU the host's clock says nothing about a collective.


# Part of a kernel's name -> what we call it. Sends, receives and all-to-alls are one kind of kernel to NCCL.
KERNEL_WORDS = (
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
    return next((word for part, word in KERNEL_WORDS if part in kernel), "other")


def timed_by(kernels: Sequence[Kernel], calls: Sequence[TappedCollective], *, began_s: float) -> list[TappedCollective]:
    """The host's calls with the times of their kernels: the n-th call of a kind is its n-th kernel.

    Where their numbers differ (sends and receives posted together are one kernel, a group of one runs none) the kernels
    stand for themselves, without bytes; the calls stay where the host made them and take no time.
    """
    timed: list[TappedCollective] = []
    for op in dict.fromkeys([_kernel_of(call) for call in calls] + [kernel.op for kernel in kernels]):
        asked = [call for call in calls if _kernel_of(call) == op]
        ran = [kernel for kernel in kernels if kernel.op == op]
        spans = [(began_s + kernel.start_s, began_s + kernel.start_s + kernel.duration_s) for kernel in ran]
        if len(asked) == len(ran):
            timed += [replace(call, start_s=s, end_s=e) for call, (s, e) in zip(asked, spans, strict=True)]
        else:
            timed += [replace(call, end_s=call.start_s) for call in asked]
            timed += [TappedCollective(op=op, nbytes=0, group="", start_s=s, end_s=e) for s, e in spans]
    return timed


def _kernel_of(call: TappedCollective) -> str:
    return "exchange" if call.op in EXCHANGES else call.op
