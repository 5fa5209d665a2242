"""The inside of one step now and then: forwards, backwards, the update, and every collective with its bytes.

A sampled step costs more than another: its collectives are listened to, and on a GPU its kernels are recorded. Samples
are far apart (`telemetry.timeline_every`), and put off when they would cost more than half a percent of the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.record.provenance import redact
from phalanx.train.parallel.dims import Meshes
from phalanx.train.telemetry.clock import StepPhase
from phalanx.train.telemetry.collective_tap import CollectiveTap, Kernel, TappedCollective, kernels_of, timed_by
from phalanx.train.tracing.recorder import axis_names, axis_of

MOST_SPANS = 2_000
TOUCHING_S = 20e-6  # neighbours of one kind that are nearer than this become one span
FIRST = 10  # the first sample is the so-many-th step since the rank was built: nothing is compiled any more
SHARE = 0.005  # of the time that samples may cost

Span = tuple[str, str, float, float, int | None, str | None]  # kind, name, start_s, duration_s, bytes, group


class Sample:
    """What one sampled step gave."""

    def __init__(
        self, calls: Sequence[TappedCollective], began_s: float, axes: Callable[[TappedCollective], str | None]
    ) -> None:
        self._calls, self._began_s, self._axes = calls, began_s, axes

    @property
    def collective_s(self) -> float:
        """Time in collectives, added up whether they ran side by side or not."""
        return sum(call.end_s - call.start_s for call in self._calls)

    @property
    def collective_bytes(self) -> int:
        """Bytes of the tensors that were gathered, reduced, exchanged or sent."""
        return sum(call.nbytes for call in self._calls)

    def fields(self, phases: Sequence[StepPhase], *, data_s: float, before_s: float) -> dict[str, Any]:
        """Of a `timeline` event. The step's first `before_s` were over when the engine began, `data_s` of it waiting
        for the batch.
        """
        spans: list[Span] = [("data", "batch", before_s - data_s, data_s, None, None)]
        for phase, name in zip(phases, _numbered_names(phases), strict=True):
            spans.append((phase.kind, name, before_s + phase.start_s, phase.duration_s, None, None))
        for call in self._calls:
            start_s = before_s + call.start_s - self._began_s
            spans.append(
                ("collective", call.op, start_s, call.end_s - call.start_s, call.nbytes or None, self._axes(call))
            )
        kept, dropped = longest_spans(merge_spans(sorted(spans, key=lambda span: span[2])))
        rounded = [[*span[:2], round(span[2], 6), round(span[3], 6), *span[4:]] for span in kept]
        return {"spans": rounded, "dropped": dropped, "collectives": self._collective_rows()}

    def _collective_rows(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str | None], dict[str, Any]] = {}
        for call in self._calls:
            key = call.op, self._axes(call)
            entry = found.setdefault(key, {"op": key[0], "group": key[1], "count": 0, "seconds": 0.0, "bytes": 0})
            entry["count"] += 1
            entry["seconds"] += call.end_s - call.start_s
            entry["bytes"] += call.nbytes
        return [entry | {"seconds": round(entry["seconds"], 6)} for entry in found.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """What is written of the inside of a step; nothing where it was not looked into."""

    collective_s: float | None = None
    collective_bytes: int | None = None
    timeline: dict[str, Any] | None = None  # fields of the event


def _numbered_names(phases: Sequence[StepPhase]) -> Iterator[str]:
    """forward 1, forward 2, …; what happens once has no number."""
    kinds = [phase.kind for phase in phases]
    seen: dict[str, int] = {}
    for kind in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        name = "gradients" if kind == "other" else kind
        yield f"{name} {seen[kind]}" if kinds.count(kind) > 1 else name


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of the same kind, name and group that all but touch, as one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and (last[0], last[1], last[5]) == (span[0], span[1], span[5]):
            gap_s = span[2] - (last[2] + last[3])
            if 0 <= gap_s < TOUCHING_S and span[3] < TOUCHING_S:
                nbytes = None if last[4] is None or span[4] is None else last[4] + span[4]
                found[-1] = (*last[:3], span[2] + span[3] - last[2], nbytes, last[5])
                continue
        found.append(span)
    return found


def longest_spans(spans: Sequence[Span], most: int = MOST_SPANS) -> tuple[list[Span], int]:
    """The longest of them in their order, and how many were left out."""
    if len(spans) <= most:
        return list(spans), 0
    least = sorted(range(len(spans)), key=lambda place: -spans[place][3])[:most]
    return [spans[place] for place in sorted(least)], len(spans) - most


class TimelineSampler:
    """Decides which steps are looked into, and looks. Whatever fails in here is told once and never again tried."""

    def __init__(
        self, meshes: Meshes, device: torch.device, *, every: int, compiled: bool, tell: Callable[[str], None]
    ) -> None:
        self._names = axis_names(meshes)
        self._device, self._every, self._compiled, self._tell = device, every, compiled, tell
        self._steps = 0
        self._began_s, self._spent_s = time.perf_counter(), 0.0
        self.opening_s = 0.0  # that the latest step was held up before it began, to be looked into

    @contextmanager
    def step(self, number: int) -> Iterator[list[Sample]]:
        """Around one step; when it is over, the list holds a sample if this step was one."""
        self._steps += 1
        self.opening_s = 0.0
        found: list[Sample] = []
        if not self._is_due(number):
            yield found
            return
        entered_s = time.perf_counter()
        tap = CollectiveTap(functional=not self._compiled)
        with ExitStack() as stack:
            kernels: list[Kernel] = []
            try:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # the last update: this step would wait for it anyway
                    entered_s = time.perf_counter()
                stack.enter_context(tap.listening())
                if self._device.type == "cuda":
                    kernels = stack.enter_context(kernels_of(self._device))
            except Exception as error:
                self._give_up(error)
            began_s = time.perf_counter()
            self.opening_s = began_s - entered_s
            yield found
            ended_s = time.perf_counter()
            try:
                stack.close()
            except Exception as error:
                self._give_up(error)
        try:
            if self._every:
                calls = timed_by(kernels, tap.calls, began_s=began_s) if self._device.type == "cuda" else tap.calls
                found.append(Sample(calls, began_s, self._axis_of))
        except Exception as error:
            self._give_up(error)
        self._spent_s += time.perf_counter() - ended_s + self.opening_s

    @property
    def spent_s(self) -> float:
        """What looking has held the training up by, since the beginning."""
        return self._spent_s

    def inside(
        self, samples: Sequence[Sample], phases: Sequence[StepPhase], *, data_s: float, before_s: float
    ) -> Inside:
        """What the samples of a step say, ready to be written; nothing where that cannot be had."""
        began_s = time.perf_counter()
        try:
            for sample in samples:
                return Inside(
                    collective_s=sample.collective_s,
                    collective_bytes=sample.collective_bytes,
                    timeline=sample.fields(phases, data_s=data_s, before_s=before_s),
                )
            return Inside()
        except Exception as error:
            self._give_up(error)
            return Inside()
        finally:
            self._spent_s += time.perf_counter() - began_s

    def _is_due(self, number: int) -> bool:
        if not self._every or not (self._steps == FIRST or (number and number % self._every == 0)):
            return False
        return self._spent_s <= SHARE * (time.perf_counter() - self._began_s)

    def _give_up(self, error: Exception) -> None:
        self._every = 0
        lines = redact(str(error), os.environ).splitlines()
        self._tell(f"no more timelines: {type(error).__name__}: {lines[0] if lines else 'no message'}")

    def _axis_of(self, call: TappedCollective) -> str | None:
        if not call.group:
            return None
        whole = str(dist.group.WORLD.group_name) if dist.group.WORLD is not None else ""
        found = axis_of(self._names.get(call.group, ()), call.op)
        return found or ("world" if call.group == whole else "ends")
