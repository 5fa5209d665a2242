"""How long a rank computes in a step and how long it waits, and when its forwards and backwards were.

On a CPU a rank waits while it is inside a wait for a collective, and all else is its own time, with or without a core:
a rank whose core is shared, or that is stopped, holds up the others as much as one that computes slowly, also where
that happens inside a wait (standstill.py). Beside it stands the processor time of the same stretch, so that the two can
be told apart. Compiled code waits where nobody hears it: there the thread's own time is the work, and all else is
waiting in which the process could have run. A GPU works while the host has long gone on, so
marks are laid into its stream (CUDA events) and read after the step's one read of numbers, when all of them have
passed: nothing waits for a mark. Approximate on GPUs: the optimizer's time is that of the step before, whose marks are
read a step later; a gathered weight's copy into place counts as waiting; a device that idles because the host is slow
counts as working, since no other rank is to blame.
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

WORK = ("forward", "backward", "other", "optimizer")  # phases in which a rank works; between them it waits


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPhase:
    """A stretch of a step, from the step's begin."""

    kind: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """What a clock says of a step."""

    compute_s: float
    wait_s: float
    phases: tuple[StepPhase, ...]
    cpu_s: float | None = None  # processor time of `compute_s`; None where a device computes
    core_wait_s: float | None = None  # for which the thread could have run and had no core


class StepClock(Protocol):
    """Begin, phases, settle, end: in this order in every step, inside `observe_waits`."""

    def observe_waits(self) -> AbstractContextManager[None]:
        """Around a step: also count waits that nobody marks."""

    def begin(self) -> None:
        """The step begins."""

    def phase(self, kind: str) -> AbstractContextManager[None]:
        """Around a piece of work."""

    def stall(self) -> AbstractContextManager[None]:
        """Around a wait for others inside a phase."""

    def settle(self) -> None:
        """Before the numbers of the step are read."""

    def end(self) -> StepTime:
        """After everything."""


class CoreWait:
    """Seconds that this thread was ready to run and another had the core, as Linux counts them."""

    def __init__(self) -> None:
        self._file = -1
        try:  # not there on other systems, nor in kernels built without it
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        except OSError:
            pass

    def __call__(self) -> float | None:
        """Since the thread began; None where the kernel does not say."""
        try:
            return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None


class HostClock:
    """For CPUs."""

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
        """Around a step."""
        return nullcontext() if self._compiled else marked_waits(self._stall)

    def begin(self) -> None:
        """The step begins."""
        self._phases, self._waited_s = [], 0.0
        if self._standstill is not None:
            self._standstill.begin()
        self._began_stood_s = self._stood_s()
        self._began_core_s = self._core_wait()
        self._began_s, self._began_worked_s = self._now(), self._worked()

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Around a piece of work."""
        start_s = self._now()
        try:
            yield
        finally:
            self._phases.append(StepPhase(kind=kind, start_s=start_s - self._began_s, duration_s=self._now() - start_s))

    def stall(self) -> AbstractContextManager[None]:
        """Around a wait for others, wherever it is."""
        return self._stall

    def settle(self) -> None:
        """Nothing runs behind the host's back."""

    def end(self) -> StepTime:
        """After everything."""
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
    """Adds up what a HostClock's rank waits; a wait inside a wait counts once."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = weakref.proxy(clock)
        self._depth, self._began_s = 0, 0.0

    @property
    def is_open(self) -> bool:
        """Whether the rank waits now."""
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
    """Whether a standstill would be taken for waiting: in a wait, and in compiled code anywhere."""
    return lambda: compiled or stall.is_open


class Mark(Protocol):
    """A CUDA event, or a stand-in."""

    def record(self) -> None:
        """Lay it into the stream."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another mark; both must have passed."""


def cuda_mark() -> Mark:
    """An event that keeps its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


class DeviceClock:
    """For GPUs: marks in the stream of the step."""

    def __init__(self, mark: Callable[[], Mark] = cuda_mark) -> None:
        self._mark = mark
        self._begin = self._settled = self._lay_mark()
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._stalls: list[tuple[Mark, Mark]] = []
        self._late: list[tuple[str, Mark, Mark]] = []  # of this step's end, not passed when it is over
        self._before: list[tuple[str, Mark, Mark]] = []  # the same of the last step
        self._closing, self._depth = False, 0
        self._core_wait = CoreWait()
        self._began_core_s: float | None = None

    def observe_waits(self) -> AbstractContextManager[None]:
        """Nothing to count: the host's waits say nothing about the device."""
        return nullcontext()

    def _lay_mark(self) -> Mark:
        mark = self._mark()
        mark.record()
        return mark

    def begin(self) -> None:
        """The step begins."""
        self._phases, self._stalls, self._closing, self._depth = [], [], False, 0
        self._begin = self._lay_mark()
        self._began_core_s = self._core_wait()

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Around a piece of work; after `settle` its marks are read with the next step's."""
        into = self._late if self._closing else self._phases
        start = self._lay_mark()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            into.append((kind, start, self._lay_mark()))

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Around a wait for others inside a phase; between phases all is waiting anyway."""
        if not self._depth:
            yield
            return
        start = self._lay_mark()
        try:
            yield
        finally:
            self._stalls.append((start, self._lay_mark()))

    def settle(self) -> None:
        """Before the numbers of the step are read: everything before this mark has passed when they are there."""
        self._settled = self._lay_mark()
        self._before, self._late, self._closing = self._late, [], True

    def end(self) -> StepTime:
        """After the read."""
        phases = [
            StepPhase(kind=kind, start_s=_seconds_between(self._begin, start), duration_s=_seconds_between(start, end))
            for kind, start, end in self._phases
        ]
        stalls_s = sum(_seconds_between(start, end) for start, end in self._stalls)
        late_s = sum(_seconds_between(start, end) for _, start, end in self._before)
        total_s = _seconds_between(self._begin, self._settled)
        worked_s = max(0.0, sum(phase.duration_s for phase in phases) - stalls_s)
        phases += self._update_phases(total_s)
        core_s, before_s = self._core_wait(), self._began_core_s
        return StepTime(
            compute_s=worked_s + late_s,
            wait_s=max(0.0, total_s - worked_s),
            phases=tuple(phases),
            core_wait_s=core_s - before_s if core_s is not None and before_s is not None else None,
        )

    def _update_phases(self, from_s: float) -> Iterator[StepPhase]:
        """The last step's update, where this step's will be."""
        for kind, start, end in self._before:
            length_s = _seconds_between(start, end)
            yield StepPhase(kind=kind, start_s=from_s, duration_s=length_s)
            from_s += length_s


def _seconds_between(start: Mark, end: Mark) -> float:
    return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device, *, compiled: bool = False) -> StepClock:
    """The clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock(compiled=compiled)


def time_stage(stage: PipelineStage, clock: StepClock) -> None:
    """Mark the forwards and backwards that a pipeline's schedule calls."""
    for name, kind in (
        ("forward_one_chunk", "forward"),
        ("backward_one_chunk", "backward"),
        ("backward_weight_one_chunk", "backward"),
    ):
        _wrap_method(stage, name, partial(clock.phase, kind))


def time_gathers(groups: Iterable[Any], clock: StepClock) -> None:
    """Mark where FSDP2 waits for gathered weights."""
    for group in groups:
        _wrap_method(group, "wait_for_unshard", clock.stall)


def _wrap_method(owner: Any, name: str, mark: Callable[[], AbstractContextManager[None]]) -> None:
    """Put a mark around a method of one object.

    Weakly: an object that held itself would outlive its last user, a stage with all its receive buffers.
    """
    method = WeakMethod(getattr(owner, name))

    def run(*args: Any, **kwargs: Any) -> Any:
        work = method()
        assert work is not None
        with mark():
            return work(*args, **kwargs)

    setattr(owner, name, run)


# How long torch has compiled so far in this process.


PARTS = ("entire_frame_compile", "entire_backward_compile")  # what torch itself adds up to its whole (2.11 to 2.13)


def compiled_s() -> float:
    """Seconds since the process began; 0 where nothing was compiled, or torch counts in another way."""
    counters = sys.modules.get("torch._dynamo.utils")  # importing it costs seconds: whoever compiles has done so
    spent_ns = getattr(counters, "cumulative_time_spent_ns", {})
    return float(sum(spent_ns.get(part, 0) for part in PARTS)) / 1e9
