"""Step events of one rank: durations, tokens, skipped steps, jumps, and the gradient noise scale."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.io.files import Spot
from phalanx.record.event_schema import EventColumns, Floats
from phalanx.rules.facts.log_facts import NoiseFacts, StepFacts
from phalanx.rules.log.sums import Histogram, SeriesSample

# First steps of a membership that do not count for timings: NVRx leaves out as many.
WARM_UP = 5
MOST_SIZES = 256  # different batch sizes
# Decay of the running means that jumps are measured against: they cover about 100 steps.
DECAY = 0.99
# Values whose running mean is computed at once: dⁿ stays far from 0.
BLOCK = 512
SETTLED = 4_096  # steps after which 1 − dⁿ is 1
# Steps before the first jump is reported: norms drop fast at the start of a run.
FIRST = 16


class Steps:
    """Sums up the steps of one rank in the order of its file."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self._reported = self._again = 0
        self._settling = 0  # steps of this membership so far, up to WARM_UP
        self.begin_layout()
        self._not_finite = self._skipped = self._row = self._most_in_row = 0
        self._not_finite_spot: Spot | None = None
        self._zero_norm = 0
        self._zero_norm_spot: Spot | None = None
        self._jumps = (Jump("loss"), Jump("grad_norm"))
        self._noise = NoiseSteps()

    def begin_layout(self) -> None:
        """Begin a new layout: step durations and batch sizes are counted anew."""
        self._durations, self._drift = Histogram(), SeriesSample()
        self._steady_s = self._data_s = self._tokens_steady = 0.0
        self._sizes: dict[int, int] | None = {}
        self._size_lines: dict[int, Spot] = {}

    def begin(self) -> None:
        """Begin a membership: its first steps may be repeats."""
        self._settling = 0
        self._noise.begin()

    def take(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        """Add step events."""
        steps = columns.get("step")
        self._count(steps)
        durations_s = columns.floats("duration_s")
        steady = self._steady_steps(columns, durations_s)
        self._take_times(columns, durations_s, steady)
        self._take_batches(columns, file, lines)
        skipped = columns.get("skipped")
        if any(skipped) or self._row:
            for is_skipped in skipped:
                self._row = self._row + 1 if is_skipped is True else 0
                self._skipped += is_skipped is True
                self._most_in_row = max(self._most_in_row, self._row)
        self._check_finite(columns, skipped, file, lines)
        self._check_norms(columns, skipped, file, lines)
        for jump in self._jumps:
            jump.take(columns.floats(jump.field), skipped, file, lines)
        self._noise.take(columns)

    def _count(self, steps: Sequence[int]) -> None:
        self._reported += len(steps)
        before = self.last
        for step in (steps[0],) if _is_run(steps) else steps:
            if before is not None and step <= before:
                self._again += before - step + 1
            before = step
        self.first = steps[0] if self.first is None else min(self.first, min(steps))
        self.last = steps[-1]

    def _steady_steps(self, columns: EventColumns, taken_s: Any) -> Any:
        """Return a mask of the steps that count for timings: not the first of a membership, nor those that
        compiled.
        """
        steady = (taken_s >= 0.0) & (taken_s < 1e9)  # false for NaN too
        if self._settling < WARM_UP:
            steady[: WARM_UP - self._settling] = False
            self._settling = min(WARM_UP, self._settling + len(columns))
        compiled = columns.get("compile_s")
        if any(compiled):
            steady &= ~(np.nan_to_num(columns.floats("compile_s")) > 0.0)
        return steady

    def _take_times(self, columns: EventColumns, taken_s: Any, steady: Any) -> None:
        known_s = taken_s[steady]
        self._durations.add(known_s.tolist())
        self._drift.add(known_s)
        self._steady_s += float(known_s.sum())
        self._data_s += _sum_steady(columns.floats("data_s"), steady)
        self._tokens_steady += _sum_steady(columns.floats("tokens"), steady)

    def _take_batches(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        if self._sizes is None:
            return
        column = columns.get("tokens")
        for size in set(column):
            if size is None:
                continue
            if size not in self._sizes:
                if len(self._sizes) >= MOST_SIZES:
                    self._sizes = None
                    return
                self._sizes[size] = 0
                self._size_lines[size] = Spot(file=file, line=lines[column.index(size)])
            self._sizes[size] += column.count(size)

    def _check_finite(self, columns: EventColumns, skipped: Sequence[Any], file: str, lines: Sequence[int]) -> None:
        """Count steps with a loss or norm that is not finite (written as null) and that were not skipped."""
        for name in ("loss", "grad_norm"):
            column = columns.get(name)
            if not columns.has(name) or not np.isnan(columns.floats(name)).any():
                continue
            places = [
                place
                for place, value in enumerate(column)
                if value is None and skipped[place] is not True and columns.tells(place, name)
            ]
            if places:
                self._not_finite += len(places)
                self._not_finite_spot = self._not_finite_spot or Spot(file=file, line=lines[places[0]])

    def _check_norms(self, columns: EventColumns, skipped: Sequence[Any], file: str, lines: Sequence[int]) -> None:
        """Count steps with a norm of exactly 0, which move no weight."""
        if not columns.has("grad_norm"):
            return
        zero_places = np.flatnonzero(columns.floats("grad_norm") == 0.0).tolist()
        places = [place for place in zero_places if skipped[place] is not True]
        if places:
            self._zero_norm += len(places)
            self._zero_norm_spot = self._zero_norm_spot or Spot(file=file, line=lines[places[0]])

    def facts(self) -> StepFacts | None:
        """Return the facts; None before the first step."""
        if self.first is None or self.last is None:
            return None
        early, late = self._drift.median(0.0, 0.25), self._drift.median(0.75, 1.0)
        enough = len(self._drift.values) >= 4 * WARM_UP and early and late
        rarest = min(self._sizes, key=lambda size: (self._sizes or {})[size]) if self._sizes else None
        worst = max(self._jumps, key=lambda jump: jump.worst)
        return StepFacts(
            first=self.first,
            last=self.last,
            count=max(0, self._reported - self._again),
            again=self._again,
            duration_s=self._durations.spread(),
            drift=late / early - 1.0 if enough and early and late else None,
            data_share=self._data_s / self._steady_s if self._steady_s else None,
            tokens=dict(self._sizes) if self._sizes else None,
            tokens_spot=self._size_lines.get(rarest) if rarest is not None else None,
            tokens_per_s=self._tokens_steady / self._steady_s if self._steady_s and self._tokens_steady else None,
            not_finite=self._not_finite,
            not_finite_spot=self._not_finite_spot,
            zero_norm=self._zero_norm,
            zero_norm_spot=self._zero_norm_spot,
            skipped=self._skipped,
            skipped_in_a_row=self._most_in_row,
            worst_jump=worst.worst or None,
            worst_jump_spot=worst.spot,
            worst_loss_jump=self._jumps[0].worst or None,
            worst_loss_jump_spot=self._jumps[0].spot,
        )

    def noise(self) -> NoiseFacts | None:
        """Return the facts about gradient noise; None where no step has them."""
        return self._noise.facts()


class Jump:
    """The largest ratio of a value to its running mean, over steps that were not skipped."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.worst = 0.0
        self.spot: Spot | None = None
        self._mean, self._count = 0.0, 0

    def take(self, values: Floats, skipped: Sequence[Any], file: str, lines: Sequence[int]) -> None:
        """Add values.

        The running mean of all of them is computed at once: m·dⁿ + (1 − d)·Σ v·dⁿ⁻ⁱ.
        """
        places = np.arange(len(values))
        usual = (values >= 0.0) & (values < 1e150)
        if any(skipped):
            usual &= np.array([is_skipped is not True for is_skipped in skipped])
        values, places = values[usual], places[usual]
        for begin in range(0, len(values), BLOCK):
            self._take_block(values[begin : begin + BLOCK], places[begin : begin + BLOCK], file, lines)

    def _take_block(self, values: Any, places: Any, file: str, lines: Sequence[int]) -> None:
        count = len(values)
        powers = _decay_powers()[: count + 1]
        added = np.concatenate([[0.0], np.cumsum(values / powers[1:])])
        means = powers * (self._mean + (1 - DECAY) * added)
        # 1 − dⁿ corrects the bias of a running mean that starts at 0, as in Adam.
        weights = 1.0 - DECAY ** (self._count + np.arange(count)) if self._count < SETTLED else 1.0
        early = max(0, FIRST - self._count)
        ratios = np.where(means[:-1] > 0.0, values * weights / np.maximum(means[:-1], 1e-300), 0.0)[early:]
        if len(ratios) and ratios.max() > self.worst:
            self.worst = float(ratios.max())
            self.spot = Spot(file=file, line=lines[int(places[early + int(ratios.argmax())])])
        self._mean, self._count = float(means[-1]), self._count + count


def _is_run(steps: Sequence[int]) -> bool:
    return steps[-1] - steps[0] == len(steps) - 1 and steps == tuple(range(steps[0], steps[-1] + 1))


def _sum_steady(column: Floats, steady: Any) -> float:
    """Return the sum of the steady values that are plausible as seconds or tokens."""
    values = column[steady]
    return float(values[(values >= 0.0) & (values < 1e15)].sum())


@functools.cache
def _decay_powers() -> Floats:
    return np.power(DECAY, np.arange(BLOCK + 1), dtype=np.float64)


# The gradient noise scale of a log: how often it is logged, how it grew, and whether it agrees with its parts.


# The same values as in the trainer (train/telemetry/noise.py): decay of the running means, decay of the usual size
# that weighs a step, and the multiple of that size from which a step is a spike.
NOISE_DECAY, SIZE_DECAY, SPIKE = 0.99, 0.9, 16.0
# Steps per estimate: one of four where micro-batches are compared.
EVERY = (1, 4)
# Steps that are computed again: a formula that is right in so many is right in all.
MOST_CHECKED = 5_000
KEPT = 512  # steps that a restart may go back by and still be followed

# Running means of trace and squared norm, and the usual size.
State = tuple[float, float, float]


class NoiseSteps:
    """Sums up the noise scale over the steps of the observer, the lowest rank on record."""

    def __init__(self) -> None:
        self._gaps, self._values = Histogram(), SeriesSample()
        self._count = 0
        self._last_step: float | None = None
        self._last: float | None = None
        self._parts = self._checked = 0
        self._means = [Means(decay=NOISE_DECAY**every) for every in EVERY]

    def begin(self) -> None:
        """Begin a membership; the running means continue from the state before its first step."""
        self._last_step = None
        for means in self._means:
            means.is_begun = False

    def take(self, columns: EventColumns) -> None:
        """Add step events."""
        if not columns.has("noise_scale"):
            return
        steps, scales = columns.get("step"), columns.get("noise_scale")
        noise_scales = columns.floats("noise_scale")
        is_known = ~np.isnan(noise_scales)
        if is_known.any():
            self._take_scales(columns.floats("step")[is_known], noise_scales[is_known])
        if self._checked < MOST_CHECKED and columns.has("noise_trace") and columns.has("grad_squared"):
            self._checked += len(columns)
            self._check_scales(columns, steps, scales)

    def _take_scales(self, steps: Floats, scales: Floats) -> None:
        before = steps if self._last_step is None else np.concatenate([[self._last_step], steps])
        self._gaps.add(np.diff(before).tolist())
        self._values.add(scales)
        self._count += len(steps)
        self._last_step, self._last = float(steps[-1]), float(scales[-1])

    def _check_scales(self, columns: EventColumns, steps: Sequence[int], scales: Sequence[Any]) -> None:
        traces, squares, norms = (columns.get(name) for name in ("noise_trace", "grad_squared", "grad_norm"))
        for step, scale, trace, squared, norm in zip(steps, scales, traces, squares, norms, strict=True):
            has_parts = trace is not None and squared is not None
            self._parts += has_parts
            for means in self._means:
                means.take(step, scale, (trace, squared) if has_parts else None, norm)

    def facts(self) -> NoiseFacts | None:
        """Return the facts; None where the log has no noise scale."""
        if not self._count:
            return None
        early = self._values.median(0.1, 0.1)
        # The log does not contain the trainer's interval: the candidate that fits better counts.
        errors = [means.error for means in self._means if means.compared]
        return NoiseFacts(
            count=self._count,
            # Steps are whole numbers; a bin of the histogram is not.
            gap_steps=None if (gap := self._gaps.quantile(0.99)) is None else float(round(gap)),
            last=self._last,
            growth=self._last / early if early and self._last is not None else None,
            has_parts=self._parts > 0,
            error=min(errors) if self._parts and errors else None,
        )


class Means:
    """Recomputes the noise scale from its parts, step by step, as the trainer does."""

    def __init__(self, *, decay: float) -> None:
        self._decay = decay
        # None: lost, by a restart that went back too far.
        self._state: State | None = (0.0, 0.0, 0.0)
        self._states: deque[tuple[int, State]] = deque(maxlen=KEPT)
        self.is_begun = False
        self.error, self.compared = 0.0, 0

    def take(self, step: int, scale: Any, parts: tuple[float, float] | None, norm: Any) -> None:
        """Add one step: its logged noise scale and the parts."""
        if not self.is_begun:
            self._begin_at(step)
        if self._state is None:
            return
        if parts is not None and norm is not None and norm > 0.0:
            self._add_parts(parts, norm * norm)
        self._states.append((step, self._state))
        trace, squared, _ = self._state
        if scale is not None and squared > 0.0:
            error = abs(scale - trace / squared) / max(abs(trace / squared), 1e-300)
            self.error, self.compared = max(self.error, error), self.compared + 1

    def _begin_at(self, step: int) -> None:
        """Continue from the state after the preceding step, where it is remembered."""
        self.is_begun = True
        if step > 0:
            self._state = next((state for known, state in reversed(self._states) if known == step - 1), None)
        else:
            self._state = (0.0, 0.0, 0.0)

    def _add_parts(self, parts: tuple[float, float], size: float) -> None:
        assert self._state is not None
        trace, squared, usual_size = self._state
        usual_size = usual_size or size
        sized = SIZE_DECAY * usual_size + (1 - SIZE_DECAY) * min(size, SPIKE * usual_size)
        if size <= SPIKE * usual_size:
            trace = self._decay * trace + (1 - self._decay) * parts[0] / usual_size
            squared = self._decay * squared + (1 - self._decay) * parts[1] / usual_size
        self._state = (trace, squared, sized)
