"""Timelines of sampled steps: forwards, backwards, the update, and every collective with its bytes.

A sampled step costs more than another: its collectives are recorded, and on a GPU its kernels too. Samples are far
apart (`telemetry.timeline_every`), and skipped while they would cost more than half a percent of the run.
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
TOUCHING_S = 20e-6  # neighbours of one kind with a smaller gap become one span
# The first sample is this step since the rank was built: compilation is over by then
FIRST = 10
SHARE = 0.005  # share of the run's time that samples may cost

# Kind, name, start_s, duration_s, bytes, group
Span = tuple[str, str, float, float, int | None, str | None]


class Sample:
    """The recording of one sampled step."""

    def __init__(
        self, calls: Sequence[TappedCollective], began_s: float, axes: Callable[[TappedCollective], str | None]
    ) -> None:
        self._calls, self._began_s, self._axes = calls, began_s, axes

    @property
    def collective_s(self) -> float:
        """Seconds in collectives, summed whether they ran concurrently or not."""
        return sum(call.end_s - call.start_s for call in self._calls)

    @property
    def collective_bytes(self) -> int:
        """Bytes of the tensors that were gathered, reduced, exchanged or sent."""
        return sum(call.nbytes for call in self._calls)

    def fields(self, phases: Sequence[StepPhase], *, data_s: float, before_s: float) -> dict[str, Any]:
        """Return the fields of a `timeline` event.

        The first `before_s` of the step were over when the engine began, `data_s` of them spent waiting for the
        batch.
        """
        spans: list[Span] = [("data", "batch", before_s - data_s, data_s, None, None)]
        for phase, name in zip(phases, _numbered_names(phases), strict=True):
            spans.append((phase.kind, name, before_s + phase.start_s, phase.duration_s, None, None))
        for call in self._calls:
            start_s = before_s + call.start_s - self._began_s
            spans.append(
                ("collective", call.op, start_s, call.end_s - call.start_s, call.nbytes or None, self._axes(call))
            )
        spans_to_write, dropped = longest_spans(merge_spans(sorted(spans, key=lambda span: span[2])))
        rounded = [[*span[:2], round(span[2], 6), round(span[3], 6), *span[4:]] for span in spans_to_write]
        return {"spans": rounded, "dropped": dropped, "collectives": self._collective_rows()}

    def _collective_rows(self) -> list[dict[str, Any]]:
        rows: dict[tuple[str, str | None], dict[str, Any]] = {}
        for call in self._calls:
            key = call.op, self._axes(call)
            entry = rows.setdefault(key, {"op": key[0], "group": key[1], "count": 0, "seconds": 0.0, "bytes": 0})
            entry["count"] += 1
            entry["seconds"] += call.end_s - call.start_s
            entry["bytes"] += call.nbytes
        return [entry | {"seconds": round(entry["seconds"], 6)} for entry in rows.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """Written data of a sampled step's inside; all None for a step that was not sampled."""

    collective_s: float | None = None
    collective_bytes: int | None = None
    timeline: dict[str, Any] | None = None  # fields of the event


def _numbered_names(phases: Sequence[StepPhase]) -> Iterator[str]:
    """Yield forward 1, forward 2, …; a phase that happens once has no number."""
    kinds = [phase.kind for phase in phases]
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
        name = "gradients" if kind == "other" else kind
        yield f"{name} {counts[kind]}" if kinds.count(kind) > 1 else name


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Merge short neighbours of the same kind, name and group whose gap is below TOUCHING_S."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and (last[0], last[1], last[5]) == (span[0], span[1], span[5]):
            gap_s = span[2] - (last[2] + last[3])
            if 0 <= gap_s < TOUCHING_S and span[3] < TOUCHING_S:
                nbytes = None if last[4] is None or span[4] is None else last[4] + span[4]
                merged[-1] = (*last[:3], span[2] + span[3] - last[2], nbytes, last[5])
                continue
        merged.append(span)
    return merged


def longest_spans(spans: Sequence[Span], most: int = MOST_SPANS) -> tuple[list[Span], int]:
    """Return the longest spans in their order, and the number left out."""
    if len(spans) <= most:
        return list(spans), 0
    longest = sorted(range(len(spans)), key=lambda place: -spans[place][3])[:most]
    return [spans[place] for place in sorted(longest)], len(spans) - most


class TimelineSampler:
    """Decides which steps are sampled, and samples them. After any failure it reports once and stops sampling."""

    def __init__(
        self, meshes: Meshes, device: torch.device, *, every: int, compiled: bool, tell: Callable[[str], None]
    ) -> None:
        self._names = axis_names(meshes)
        self._device, self._every, self._compiled, self._tell = device, every, compiled, tell
        self._steps = 0
        self._began_s, self._spent_s = time.perf_counter(), 0.0
        # Seconds by which starting a sample delayed the latest step
        self.opening_s = 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[list[Sample]]:
        """Run one step; afterwards the list holds a sample if this step was sampled."""
        self._steps += 1
        self.opening_s = 0.0
        samples: list[Sample] = []
        if not self._is_due(number):
            yield samples
            return
        entered_s = time.perf_counter()
        tap = CollectiveTap(functional=not self._compiled)
        with ExitStack() as stack:
            kernels: list[Kernel] = []
            try:
                if self._device.type == "cuda":
                    # The last update, which this step would wait for anyway
                    torch.cuda.synchronize(self._device)
                    entered_s = time.perf_counter()
                stack.enter_context(tap.listening())
                if self._device.type == "cuda":
                    kernels = stack.enter_context(kernels_of(self._device))
            except Exception as error:
                self._give_up(error)
            began_s = time.perf_counter()
            self.opening_s = began_s - entered_s
            yield samples
            ended_s = time.perf_counter()
            try:
                stack.close()
            except Exception as error:
                self._give_up(error)
        try:
            if self._every:
                calls = timed_by(kernels, tap.calls, began_s=began_s) if self._device.type == "cuda" else tap.calls
                samples.append(Sample(calls, began_s, self._axis_of))
        except Exception as error:
            self._give_up(error)
        self._spent_s += time.perf_counter() - ended_s + self.opening_s

    @property
    def spent_s(self) -> float:
        """Seconds that sampling has delayed training since the beginning."""
        return self._spent_s

    def inside(
        self, samples: Sequence[Sample], phases: Sequence[StepPhase], *, data_s: float, before_s: float
    ) -> Inside:
        """Return what is written about a step's inside; empty if the step was not sampled or an error occurs."""
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
        world_name = str(dist.group.WORLD.group_name) if dist.group.WORLD is not None else ""
        axis = axis_of(self._names.get(call.group, ()), call.op)
        return axis or ("world" if call.group == world_name else "ends")
