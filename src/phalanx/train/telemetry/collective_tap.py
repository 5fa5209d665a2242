"""Recording of every collective of one step: operation, size, group, begin and end.

Between steps nothing is installed. For a sampled step the methods of torch's process groups are wrapped, and with
them the functional collectives that DTensor calls; both still call the originals. On a CPU a collective ends when
torch reports it complete, or when the first wait for it returns. Compiled graphs call functional collectives without
passing through the wrappers.
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

# Method names of torch 2.11 to 2.13; those that a version lacks are skipped.
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
    """One collective, completed while it runs."""

    op: str
    nbytes: int
    group: str  # torch's name of the group
    start_s: float
    end_s: float


class CollectiveTap:
    """Records the collectives of a step.

    `functional` includes DTensor's, which must be off while torch.compile runs.
    """

    def __init__(self, *, functional: bool, now: Callable[[], float] = time.perf_counter) -> None:
        self._functional, self._now = functional, now
        self.calls: list[TappedCollective] = []
        self._waited: dict[
            int, TappedCollective
            # By identity of torch's work, or by address of the tensor that will be complete
        ] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record every collective inside the context; remove all wrappers afterwards."""
        originals: list[tuple[Any, str, Any]] = []

        def replace_attribute(place: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(place, name, None)
            if original is not None:
                # Not `original`: a method restored from it would no longer get its process group
                originals.append((place, name, vars(place)[name]))
                setattr(place, name, make(original))

        try:
            for name in METHODS:
                replace_attribute(ProcessGroup, name, partial(self._tap_method, _operation_name(name)))
            replace_attribute(Work, "wait", self._tap_wait)
            if self._functional:
                space = torch.ops._c10d_functional
                for name in FUNCTIONAL:
                    replace_attribute(space, name, partial(self._tap_function, _operation_name(name)))
                replace_attribute(space, "wait_tensor", self._wait_tensor)
            yield
        finally:
            for owner, name, original in reversed(originals):
                setattr(owner, name, original)
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
                # Sends and receives have no future: the wait for them ends the call
                with suppress(RuntimeError, ValueError):
                    work.get_future().add_done_callback(lambda _: self._end_call(call))
            return work

        return run

    def _tap_wait(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = whole(work, *args, **kwargs)
            call = self._waited.pop(id(work), None)
            if call is not None and call.op in ("send", "receive"):
                self._end_call(call)
            return result

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
            result = whole(tensor)
            call = self._waited.pop(tensor.data_ptr(), None)
            if call is not None:
                self._end_call(call)
            return result

        return _Packet(whole, run)


@contextmanager
def marked_waits(stall: AbstractContextManager[None]) -> Iterator[None]:
    """Enter `stall` around every wait of this thread for a collective inside the context; not for compiled code.

    Costs about a microsecond per wait. Waits of other threads are not marked, because they do not delay the step.
    """
    thread = threading.get_ident()

    def wrap_wait(whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return whole(*args, **kwargs)
            with stall:
                return whole(*args, **kwargs)

        return run

    space = torch.ops._c10d_functional
    methods = [
        (Work, "wait", wrap_wait(Work.wait)),
        (space, "wait_tensor", _Packet(space.wait_tensor, wrap_wait(space.wait_tensor))),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in methods]
    try:
        for owner, name, wrapped in methods:
            setattr(owner, name, wrapped)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class _Packet:
    """A replacement for one of torch's operators: calls go to the wrapper, attributes come from the operator."""

    def __init__(self, whole: Any, run: Callable[..., Any]) -> None:
        self._whole, self._run = whole, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _operation_name(name: str) -> str:
    letters = name.replace("_", "")
    return next(word for pattern, word in WORDS if pattern in letters)


# Times of NCCL's kernels in one step: on a GPU the host's clock does not show when a collective runs.


# Part of a kernel's name -> the name in events. NCCL runs sends, receives and all-to-alls with one kind of kernel.
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
    """Record the kernels that NCCL runs inside; the list is filled at the end. Begin and end synchronize the device."""
    from torch.profiler import ProfilerActivity, profile

    kernels: list[Kernel] = []
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        # The warning that events are not kept for the next recording, which is intended
        warnings.simplefilter("ignore")
        profiler = profile(
            activities=[ProfilerActivity.CUDA], acc_events=False
        )  # True costs half a second a step (H200)
    with profiler as recording:
        began_ns = time.time_ns()
        yield kernels
        torch.cuda.synchronize(device)
    results = recording.profiler.kineto_results if recording.profiler is not None else None
    for event in results.events() if results is not None else ():
        op = op_of(event.name())
        if op:
            start_s = (event.start_ns() - began_ns) / 1e9
            kernels.append(Kernel(op=op, start_s=start_s, duration_s=event.duration_ns() / 1e9))
    kernels.sort(key=lambda kernel: kernel.start_s)


def op_of(kernel: str) -> str:
    """Return the event name of an NCCL kernel; empty for every other kernel."""
    if not kernel.startswith("nccl"):
        return ""
    return next((word for pattern, word in KERNEL_WORDS if pattern in kernel), "other")


def timed_by(kernels: Sequence[Kernel], calls: Sequence[TappedCollective], *, began_s: float) -> list[TappedCollective]:
    """Return the host's calls with the times of their kernels: the n-th call of a kind is its n-th kernel.

    If their numbers differ (sends and receives posted together are one kernel, a group of one rank runs none), the
    kernels are listed separately, without bytes; the calls stay where the host made them and take no time.
    """
    timed: list[TappedCollective] = []
    for op in dict.fromkeys([_kernel_of(call) for call in calls] + [kernel.op for kernel in kernels]):
        matching_calls = [call for call in calls if _kernel_of(call) == op]
        matching_kernels = [kernel for kernel in kernels if kernel.op == op]
        spans = [
            (began_s + kernel.start_s, began_s + kernel.start_s + kernel.duration_s) for kernel in matching_kernels
        ]
        if len(matching_calls) == len(matching_kernels):
            timed += [
                replace(call, start_s=start_s, end_s=end_s)
                for call, (start_s, end_s) in zip(matching_calls, spans, strict=True)
            ]
        else:
            timed += [replace(call, end_s=call.start_s) for call in matching_calls]
            timed += [
                TappedCollective(op=op, nbytes=0, group="", start_s=start_s, end_s=end_s) for start_s, end_s in spans
            ]
    return timed


def _kernel_of(call: TappedCollective) -> str:
    return "exchange" if call.op in EXCHANGES else call.op
