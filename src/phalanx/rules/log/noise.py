"""The gradient noise scale of a log: how often, how it grew, and whether it is what its parts give."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.record.event_schema import EventColumns
from phalanx.rules.facts.log import NoiseFacts
from phalanx.rules.log.sums import Histogram, Sample

# The trainer's own (train/telemetry/noise.py): decay of the running means, of the size that a step is weighed by, and
# how many times it a spike is.
NOISE_DECAY, SIZE_DECAY, SPIKE = 0.99, 0.9, 16.0
EVERY = (1, 4)  # steps of one estimate: one of four where micro-batches are compared
MOST_CHECKED = 5_000  # steps that are computed again: what a formula does in as many it does in all
KEPT = 512  # steps that a restart may go back by and still be followed

Floats = NDArray[np.float64]
State = tuple[float, float, float]  # running means of trace and squared norm, and the usual size


class Noise:
    """Takes the steps of the witness."""

    def __init__(self) -> None:
        self._gaps, self._values = Histogram(), Sample()
        self._count = 0
        self._last_step: float | None = None
        self._last: float | None = None
        self._parts = self._checked = 0
        self._means = [Means(decay=NOISE_DECAY**every) for every in EVERY]

    def begin(self) -> None:
        """A formation begins; the running means go on where its first step was."""
        self._last_step = None
        for means in self._means:
            means.is_begun = False

    def take(self, columns: EventColumns) -> None:
        """Some more steps."""
        if not columns.has("noise_scale"):
            return
        steps, scales = columns.get("step"), columns.get("noise_scale")
        told = columns.floats("noise_scale")
        known = ~np.isnan(told)
        if known.any():
            self._tell(columns.floats("step")[known], told[known])
        if self._checked < MOST_CHECKED and columns.has("noise_trace") and columns.has("grad_squared"):
            self._checked += len(columns)
            self._check(columns, steps, scales)

    def _tell(self, steps: Floats, scales: Floats) -> None:
        before = steps if self._last_step is None else np.concatenate([[self._last_step], steps])
        self._gaps.add(np.diff(before).tolist())
        self._values.add(scales)
        self._count += len(steps)
        self._last_step, self._last = float(steps[-1]), float(scales[-1])

    def _check(self, columns: EventColumns, steps: Sequence[int], scales: Sequence[Any]) -> None:
        traces, squares, norms = (columns.get(name) for name in ("noise_trace", "grad_squared", "grad_norm"))
        for step, scale, trace, squared, norm in zip(steps, scales, traces, squares, norms, strict=True):
            has_parts = trace is not None and squared is not None
            self._parts += has_parts
            for means in self._means:
                means.take(step, scale, (trace, squared) if has_parts else None, norm)

    def facts(self) -> NoiseFacts | None:
        """None where the log has no such number."""
        if not self._count:
            return None
        early = self._values.median(0.1, 0.1)
        errors = [means.error for means in self._means if means.compared]
        return NoiseFacts(
            count=self._count,
            gap_steps=_whole(self._gaps.quantile(0.99)),
            last=self._last,
            growth=self._last / early if early and self._last is not None else None,
            has_parts=self._parts > 0,
            error=min(errors) if self._parts and errors else None,
        )


class Means:
    """The quotient computed again, step by step, as the trainer does."""

    def __init__(self, *, decay: float) -> None:
        self._decay = decay
        self._state: State | None = (0.0, 0.0, 0.0)  # None: lost, by a restart that went back too far
        self._states: deque[tuple[int, State]] = deque(maxlen=KEPT)
        self.is_begun = False
        self.error, self.compared = 0.0, 0

    def take(self, step: int, scale: Any, parts: tuple[float, float] | None, norm: Any) -> None:
        """One step: what it says, and its parts."""
        if not self.is_begun:
            self._begin(step)
        if self._state is None:
            return
        if parts is not None and norm is not None and norm > 0.0:
            self._add(parts, norm * norm)
        self._states.append((step, self._state))
        trace, squared, _ = self._state
        if scale is not None and squared > 0.0:
            self.error, self.compared = max(self.error, _off(scale, trace / squared)), self.compared + 1

    def _begin(self, step: int) -> None:
        """Go on from the state after the step before, where it is remembered."""
        self.is_begun = True
        if step > 0:
            self._state = next((state for known, state in reversed(self._states) if known == step - 1), None)
        else:
            self._state = (0.0, 0.0, 0.0)

    def _add(self, parts: tuple[float, float], size: float) -> None:
        assert self._state is not None
        trace, squared, usual = self._state
        usual = usual or size
        sized = SIZE_DECAY * usual + (1 - SIZE_DECAY) * min(size, SPIKE * usual)
        if size <= SPIKE * usual:
            trace = self._decay * trace + (1 - self._decay) * parts[0] / usual
            squared = self._decay * squared + (1 - self._decay) * parts[1] / usual
        self._state = (trace, squared, sized)


def _whole(steps: float | None) -> float | None:
    """Steps are whole: a bin of the histogram is not."""
    return None if steps is None else float(round(steps))


def _off(told: float, computed: float) -> float:
    return abs(told - computed) / max(abs(computed), 1e-300)
