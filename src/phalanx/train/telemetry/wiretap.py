"""Listens to every collective of one step: what it was, how large, on which group, from when to when.

Between steps nothing of it is in place. For the length of a sampled step the methods of torch's process groups are
wrapped, and with them the functional collectives that DTensor calls; both call on as before. On a CPU a collective ends
when torch says that it is done, or when the first wait for it returns. Compiled graphs call functional collectives
without coming by here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
class Call:
    """One collective; filled in while it runs."""

    op: str
    nbytes: int
    group: str  # torch's name of it
    start_s: float
    end_s: float


class Wiretap:
    """The calls of a step. `functional` also hears DTensor's, which must not be while something compiles."""

    def __init__(self, *, functional: bool, now: Callable[[], float] = time.perf_counter) -> None:
        self._functional, self._now = functional, now
        self.calls: list[Call] = []
        self._waited: dict[int, Call] = {}  # by identity of torch's work, or by address of the tensor that will be

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
                put(ProcessGroup, name, partial(self._method, _word(name)))
            put(Work, "wait", self._wait)
            if self._functional:
                space = torch.ops._c10d_functional
                for name in FUNCTIONAL:
                    put(space, name, partial(self._function, _word(name)))
                put(space, "wait_tensor", self._wait_tensor)
            yield
        finally:
            for place, name, whole in reversed(undo):
                setattr(place, name, whole)
            self._waited.clear()

    def _begin(self, op: str, group: str, args: Any, out: Any) -> Call:
        now_s = self._now()
        call = Call(op=op, nbytes=payload_of(args, out)[0], group=group, start_s=now_s, end_s=now_s)
        self.calls.append(call)
        return call

    def _end(self, call: Call) -> None:
        call.end_s = self._now()

    def _method(self, op: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = self._begin(op, group.group_name, args or tuple(kwargs.values()), None)
            work = whole(group, *args, **kwargs)
            self._end(call)
            if work is not None:
                self._waited[id(work)] = call
                with suppress(RuntimeError, ValueError):  # sends and receives have no future: their wait tells
                    work.get_future().add_done_callback(lambda _: self._end(call))
            return work

        return run

    def _wait(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            done = whole(work, *args, **kwargs)
            call = self._waited.pop(id(work), None)
            if call is not None and call.op in ("send", "receive"):
                self._end(call)
            return done

        return run

    def _function(self, op: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            names = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
            group = _resolve_process_group(names[-1]).group_name if names else ""  # type: ignore[arg-type]
            call = self._begin(op, group, args, None)
            out = whole(*args, **kwargs)
            call.nbytes = payload_of(args, out)[0]
            self._end(call)
            for tensor in tensors_of(out):
                self._waited[tensor.data_ptr()] = call
            return out

        return _Packet(whole, run)

    def _wait_tensor(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor) -> Any:
            done = whole(tensor)
            call = self._waited.pop(tensor.data_ptr(), None)
            if call is not None:
                self._end(call)
            return done

        return _Packet(whole, run)


class _Packet:
    """Stands in for one of torch's operators: called it is ours, looked into it is torch's."""

    def __init__(self, whole: Any, run: Callable[..., Any]) -> None:
        self._whole, self._run = whole, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _word(name: str) -> str:
    plain = name.replace("_", "")
    return next(word for part, word in WORDS if part in plain)
