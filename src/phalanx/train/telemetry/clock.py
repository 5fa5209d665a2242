"""Clocks that split a rank's step into computing and waiting, and time its forwards and backwards.

On a CPU a rank waits while it is inside a wait for a collective, and all other time is its own, with or without a
core: a rank whose core is shared, or that is stopped, delays the others as much as one that computes slowly, also if
that happens inside a wait (standstill.py). The processor time of the same span is recorded too, so that the two can
be distinguished. Compiled code waits where no hook sees it: there the thread's processor time counts as work, and all
other time as waiting in which the process could have run.

A GPU computes asynchronously, so marks (CUDA events) are recorded in its stream and read after the step's one read of
numbers, when all of them have passed: nothing waits for a mark. Approximations on GPUs: the optimizer's time is that
of the previous step, whose marks are read a step later; copying a gathered weight into place counts as waiting; a
device that idles because the host is slow counts as working, since no other rank causes it.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch.distributed.pipelining import PipelineStage

from phalanx.train.telemetry.collective_tap import marked_waits
from phalanx.train.telemetry.standstill import Standstill

# Phases in which a rank computes; between them it waits
WORK = ("forward", "backward", "other", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPhase:
    """A span of a step, in seconds from the step's begin."""

    kind: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A clock's measurement of one step."""

    compute_s: float
    wait_s: float
    phases: tuple[StepPhase, ...]
    cpu_s: float | None = None  # processor time during `compute_s`; None where a device computes
    core_wait_s: float | None = None  # time in which the thread could have run but had no core


class StepClock(Protocol):
    """Interface of step clocks: begin, phases, settle, end, in this order in every step, inside `observe_waits`."""

    def observe_waits(self) -> AbstractContextManager[None]:
        """Return a context around a step that also counts waits without an explicit `stall`."""

    def begin(self) -> None:
        """Start the step."""

    def phase(self, kind: str) -> AbstractContextManager[None]:
        """Return a context around a piece of work."""

    def stall(self) -> AbstractContextManager[None]:
        """Return a context around a wait for other ranks inside a phase."""

    def settle(self) -> None:
        """Mark the point at which the step's numbers are about to be read."""

    def end(self) -> StepTime:
        """Finish the step, and return its measurement."""


class CoreWait:
    """Seconds that this thread was ready to run but had no core, as counted by Linux."""

    def __init__(self) -> None:
        self._file = -1
        # Missing on other systems, and in kernels built without it
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        except OSError:
            pass

    def __call__(self) -> float | None:
        """Return the seconds since the thread began; None if the kernel does not provide them."""
        try:
            return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None


class HostClock:
    """Step clock for CPUs."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        worked: Callable[[], float] = time.thread_time,
        *,
        compiled: bool = False,
        sees_standstill: bool = True,
    ) -> None:
        self._now, self._worked, self._compiled = now, worked, compiled
        self._core_wait = CoreWait()
        self._began_s = self._began_worked_s = self._waited_s = 0.0
        self._began_core_s: float | None = None
        self._phases: list[StepPhase] = []
        self._stall = _HostStall(self)
        self._standstill = Standstill(_is_waiting(self._stall, compiled=compiled)) if sees_standstill else None
        self._began_stood_s = 0.0

    def observe_waits(self) -> AbstractContextManager[None]:
        """Return a context around a step that counts waits for collectives."""
        return nullcontext() if self._compiled else marked_waits(self._stall)

    def begin(self) -> None:
        """Start the step."""
        self._phases, self._waited_s = [], 0.0
        if self._standstill is not None:
            self._standstill.begin()
        self._began_stood_s = self._stood_s()
        self._began_core_s = self._core_wait()
        self._began_s, self._began_worked_s = self._now(), self._worked()

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Time a piece of work."""
        start_s = self._now()
        try:
            yield
        finally:
            self._phases.append(StepPhase(kind=kind, start_s=start_s - self._began_s, duration_s=self._now() - start_s))

    def stall(self) -> AbstractContextManager[None]:
        """Return a context around a wait for other ranks, inside a phase or not."""
        return self._stall

    def settle(self) -> None:
        """Do nothing: no work runs asynchronously to the host."""

    def end(self) -> StepTime:
        """Finish the step, and return its measurement."""
        cpu_s, wall_s = self._worked() - self._began_worked_s, self._now() - self._began_s
        core_s, before_s = self._core_wait(), self._began_core_s
        wait_s = max(0.0, wall_s - cpu_s) if self._compiled else min(self._waited_s, wall_s)
        wait_s = max(0.0, wait_s - (self._stood_s() - self._began_stood_s))
        return StepTime(
            compute_s=wall_s - wait_s,
            wait_s=wait_s,
            phases=tuple(self._phases),
            cpu_s=cpu_s,
            core_wait_s=core_s - before_s if core_s is not None and before_s is not None else None,
        )

    def _stood_s(self) -> float:
        return self._standstill.stood_s if self._standstill is not None else 0.0


class _HostStall:
    """Sums the waiting time of a HostClock's rank; nested waits count once."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = weakref.proxy(clock)
        self._depth, self._began_s = 0, 0.0

    @property
    def is_open(self) -> bool:
        """True while the rank waits."""
        return self._depth > 0

    def __enter__(self) -> None:
        if not self._depth:
            self._began_s = self._clock._now()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._clock._waited_s += self._clock._now() - self._began_s


def _is_waiting(stall: _HostStall, *, compiled: bool) -> Callable[[], bool]:
    """Return a function that is true in a wait, and always for compiled code, where a standstill looks like one."""
    return lambda: compiled or stall.is_open


class Mark(Protocol):
    """Interface of a CUDA event, or of its replacement in tests."""

    def record(self) -> None:
        """Record the mark in the current stream."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds to another mark; both must have passed."""


def cuda_mark() -> Mark:
    """Return a CUDA event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


class DeviceClock:
    """Step clock for GPUs, by marks in the stream of the step."""

    def __init__(self, mark: Callable[[], Mark] = cuda_mark) -> None:
        self._mark = mark
        self._begin = self._settled = self._lay_mark()
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._stalls: list[tuple[Mark, Mark]] = []
        # Phases after `settle`, which have not passed at the step's end
        self._late: list[tuple[str, Mark, Mark]] = []
        # Such phases of the previous step
        self._before: list[tuple[str, Mark, Mark]] = []
        self._closing, self._depth = False, 0
        self._core_wait = CoreWait()
        self._began_core_s: float | None = None

    def observe_waits(self) -> AbstractContextManager[None]:
        """Return an empty context: waits of the host do not show waits of the device."""
        return nullcontext()

    def _lay_mark(self) -> Mark:
        mark = self._mark()
        mark.record()
        return mark

    def begin(self) -> None:
        """Start the step."""
        self._phases, self._stalls, self._closing, self._depth = [], [], False, 0
        self._begin = self._lay_mark()
        self._began_core_s = self._core_wait()

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Mark a piece of work; the marks of phases after `settle` are read with the next step's."""
        marks = self._late if self._closing else self._phases
        start = self._lay_mark()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            marks.append((kind, start, self._lay_mark()))

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Mark a wait for other ranks inside a phase; time between phases counts as waiting anyway."""
        if not self._depth:
            yield
            return
        start = self._lay_mark()
        try:
            yield
        finally:
            self._stalls.append((start, self._lay_mark()))

    def settle(self) -> None:
        """Record a mark; when the step's numbers have been read, everything before it has passed."""
        self._settled = self._lay_mark()
        self._before, self._late, self._closing = self._late, [], True

    def end(self) -> StepTime:
        """Read the marks, and return the step's measurement; call it after the read of numbers."""
        phases = [
            StepPhase(kind=kind, start_s=_seconds_between(self._begin, start), duration_s=_seconds_between(start, end))
            for kind, start, end in self._phases
        ]
        stalls_s = sum(_seconds_between(start, end) for start, end in self._stalls)
        previous_update_s = sum(_seconds_between(start, end) for _, start, end in self._before)
        total_s = _seconds_between(self._begin, self._settled)
        worked_s = max(0.0, sum(phase.duration_s for phase in phases) - stalls_s)
        phases += self._update_phases(total_s)
        core_s, before_s = self._core_wait(), self._began_core_s
        return StepTime(
            compute_s=worked_s + previous_update_s,
            wait_s=max(0.0, total_s - worked_s),
            phases=tuple(phases),
            core_wait_s=core_s - before_s if core_s is not None and before_s is not None else None,
        )

    def _update_phases(self, from_s: float) -> Iterator[StepPhase]:
        """Yield the phases of the previous step's update, placed where this step's will be."""
        for kind, start, end in self._before:
            length_s = _seconds_between(start, end)
            yield StepPhase(kind=kind, start_s=from_s, duration_s=length_s)
            from_s += length_s


def _seconds_between(start: Mark, end: Mark) -> float:
    return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device, *, compiled: bool = False) -> StepClock:
    """Return the clock for a device."""
    return DeviceClock() if device.type == "cuda" else HostClock(compiled=compiled)


def time_stage(stage: PipelineStage, clock: StepClock) -> None:
    """Time the forwards and backwards that a pipeline's schedule calls."""
    for name, kind in (
        ("forward_one_chunk", "forward"),
        ("backward_one_chunk", "backward"),
        ("backward_weight_one_chunk", "backward"),
    ):
        _wrap_method(stage, name, partial(clock.phase, kind))


def time_gathers(groups: Iterable[Any], clock: StepClock) -> None:
    """Count FSDP2's waits for gathered weights as stalls."""
    for group in groups:
        _wrap_method(group, "wait_for_unshard", clock.stall)


def _wrap_method(owner: Any, name: str, mark: Callable[[], AbstractContextManager[None]]) -> None:
    """Wrap a method of one object in the context that `mark` returns.

    The reference is weak, because a cycle would keep the object alive, such as a stage with all its receive buffers.
    """
    method = WeakMethod(getattr(owner, name))

    def run(*args: Any, **kwargs: Any) -> Any:
        work = method()
        assert work is not None
        with mark():
            return work(*args, **kwargs)

    setattr(owner, name, run)


# Time that torch has spent compiling in this process.


PARTS = (
    "entire_frame_compile",
    "entire_backward_compile",
)  # the parts of which torch computes its total (2.11 to 2.13)


def compiled_s() -> float:
    """Return the seconds of compilation in this process; 0 if none, or if torch's counters differ."""
    # Importing it takes seconds, and any code that compiles has imported it
    counters = sys.modules.get("torch._dynamo.utils")
    spent_ns = getattr(counters, "cumulative_time_spent_ns", {})
    return float(sum(spent_ns.get(phase, 0) for phase in PARTS)) / 1e9
