"""What became of a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

from phalanx.validate.network.table import Row

Status = Literal["reproduced", "range", "calibrated", "not attempted"]

# A published figure is rounded, and "12 %" stands for 12.5: what counts as the same number.
TOLERANCE = 0.05
_RANGE = re.compile(r"any value ([\d.]+)-([\d.]+) agrees")
_LEAST = re.compile(r"accept >=\s*([\d.]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Our number beside the row's, or the reason why there is none."""

    row: Row
    status: Status
    ours: float | None = None
    error: float | None = None  # ours / theirs - 1; their unit where theirs is 0
    tolerance: float | None = None  # none where the row itself says what agrees, and of a range
    within: bool | None = None  # the tolerance, the range the row itself allows, or `between`
    between: tuple[float, float] | None = None  # our numbers over what is not published
    note: str = ""  # how it was computed, or why not


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What a row needs simulated, and what that costs. Rows with the same key share one simulation."""

    key: Hashable
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a reader may look at beside its row. Other rows' values serve only to fit two points of a system."""

    rows: tuple[Row, ...]
    simulate: bool = False  # everything, whatever it costs
    allowed: frozenset[Hashable] = frozenset()  # simulations that are cheap enough without being asked for

    def refuses(self, one: Simulation) -> str:
        """Why a simulation is not run, or nothing."""
        if self.simulate or one.key in self.allowed:
            return ""
        return f"needs --simulate: about {max(one.cpu_s, 1):,.0f} s of CPU"


Reader = Callable[[Row, Context], Outcome | None]
Wanted = Callable[[Row], Simulation | None]


def reproduced(
    row: Row,
    ours: float,
    note: str,
    *,
    tolerance: float = TOLERANCE,
    inverse: bool = False,
) -> Outcome:
    """A number computed without the row's value; `inverse` judges 1/ours, as the time behind a rate."""
    return _judged(row, "reproduced", ours, note, tolerance, inverse=inverse)


def ranged(row: Row, ours: float, note: str, *, between: tuple[float, float]) -> Outcome:
    """Numbers over what an unpublished input may be; `ours` is the middle one, or the end that the row names.

    The row lies among them or does not. That is weaker than a number that agrees: the wider, the weaker.
    """
    if row.value is None:
        return skipped(row, "its value is no number")
    low, high = min(between), max(between)
    within = low - row.rounding <= row.value <= high + row.rounding
    error = ours / row.value - 1 if row.value else ours
    return Outcome(row=row, status="range", ours=ours, error=error, within=within, between=(low, high), note=note)


def calibrated(row: Row, ours: float, note: str, *, tolerance: float = TOLERANCE) -> Outcome:
    """A number of ours that was taken from this source: agreement is no evidence."""
    return _judged(row, "calibrated", ours, note, tolerance)


def skipped(row: Row, reason: str) -> Outcome:
    """No number."""
    return Outcome(row=row, status="not attempted", note=reason)


def _judged(
    row: Row,
    status: Status,
    ours: float,
    note: str,
    tolerance: float,
    *,
    inverse: bool = False,
) -> Outcome:
    if row.value is None:
        return skipped(row, "its value is no number")
    error = ours / row.value - 1 if row.value else ours
    judged = row.value / ours - 1 if inverse and ours else error
    within = abs(judged) <= tolerance + 1e-12 or abs(ours - row.value) <= row.rounding * (1 + 1e-9)
    held: float | None = tolerance
    if found := _RANGE.search(row.conditions):
        held = None
        within = float(found[1]) <= ours <= float(found[2])
    elif found := _LEAST.search(row.conditions):
        held = None
        within = ours >= float(found[1])
    return Outcome(row=row, status=status, ours=ours, error=error, tolerance=held, within=within, note=note)
