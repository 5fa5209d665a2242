"""The series of a run: event fields drawn over time, with their units and their reduction to buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from phalanx.record.archive.blocks import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A numeric field of a frequent event. The unit is empty for counts and ratios."""

    name: str  # the name used by RunHistory.curve
    event: str
    field: str
    unit: str


def _step_series(field: str, unit: str = "") -> Series:
    return Series(name=field, event="step", field=field, unit=unit)


def _monitor_series(field: str, unit: str = "", *, name: str = "") -> Series:
    return Series(name=name or field, event="monitor", field=field, unit=unit)


# The order is that of the columns in index files, which contain their names: add new series at the end.
SERIES = (
    _step_series("loss", "nats/token"),
    _step_series("tokens", "tokens"),
    _step_series("duration_s", "s"),
    _step_series("grad_norm"),
    _step_series("lr"),
    _step_series("tokens_per_s", "tokens/s"),
    _step_series("memory_bytes", "bytes"),
    _step_series("compute_s", "s"),
    _step_series("wait_s", "s"),
    _step_series("bytes_sent", "bytes"),
    _step_series("expert_imbalance"),
    _step_series("data_s", "s"),
    _step_series("compile_s", "s"),
    _step_series("hold_s", "s"),
    _step_series("guard_s", "s"),
    _step_series("noise_scale", "samples"),
    _step_series("noise_trace"),
    _step_series("grad_squared"),
    _step_series("collective_s", "s"),
    _step_series("collective_bytes", "bytes"),
    _monitor_series("utilization"),
    # `memory_bytes` of a step event is the peak so far; this is the current use.
    _monitor_series("memory_bytes", "bytes", name="memory_used_bytes"),
    _monitor_series("memory_limit_bytes", "bytes"),
    _monitor_series("memory_pressure"),
    _monitor_series("allocation_retries"),
    _monitor_series("power_w", "W"),
    _monitor_series("energy_j", "J"),
    _monitor_series("temperature_c", "°C"),
    _step_series("cpu_s", "s"),
    _step_series("core_wait_s", "s"),
)
COLUMN = {series.name: number for number, series in enumerate(SERIES)}
# Not recorded: computed from tokens/s and the plan.
MFU = "mfu"
# Kinds whose places in the file are not indexed one by one.
FREQUENT = ("step", "monitor", "peers")
# Kinds added after the first indexes were written: add new ones at the end. An older index counts their events as
# unknown kinds, so they are looked for there too (`blocks.kind_bits`).
LATER = ("memory", "communicators", "compile_check", "regroup", "exchange", "peer")
# Every kind that a rank writes (docs/events.md), in the order of bits in index files: the order must not change.
KINDS = (
    *FREQUENT,
    "ready",
    "run_start",
    "evaluate",
    "checkpoint",
    "sample",
    "stop",
    "run_end",
    "timeline",
    "remark",
    *LATER,
)


def unit_of(name: str) -> str:
    """Return the unit of a series; empty if it has none or is unknown."""
    return SERIES[COLUMN[name]].unit if name in COLUMN else ""


# ---- buckets: reduce many values without losing peaks ----------------------------------------------------------------


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A series as spans of steps: one per event, or one per block."""

    first: Integers
    last: Integers
    t: Floats  # at the end of the span
    low: Floats
    high: Floats
    total: Floats
    count: Integers

    @classmethod
    def none(cls) -> Spans:
        """Return an empty series."""
        no_steps, no_values = np.zeros(0, np.int64), np.zeros(0)
        return cls(
            first=no_steps, last=no_steps, t=no_values, low=no_values, high=no_values, total=no_values, count=no_steps
        )

    @classmethod
    def of_rows(cls, rows: Rows, column: int, span: tuple[int, int]) -> Spans:
        """Return a span for each event that has the number."""
        values = rows.values[:, column]
        used = ~np.isnan(values) & (rows.step >= span[0]) & (rows.step <= span[1])
        step, value = rows.step[used], values[used]
        count = np.ones(len(step), np.int64)
        return cls(first=step, last=step, t=rows.t[used], low=value, high=value, total=value, count=count)

    def merged(self) -> Spans:
        """Return all spans merged into one."""
        if len(self.first) < 2:
            return self
        fields = {"count": self.count.sum(), "total": self.total.sum(), "low": self.low.min(), "high": self.high.max()}
        fields |= {"first": self.first[0], "last": self.last[-1], "t": self.t[-1]}
        return Spans(**{name: np.array([value]) for name, value in fields.items()})

    @classmethod
    def of_blocks(cls, blocks: NDArray[np.void], column: int, below: Integers, inside: NDArray[np.bool_]) -> Spans:
        """Return a span for each block `inside` that has the number; its steps end where they were undone."""
        column_values = blocks["series"][:, column]
        used = inside & (column_values["count"] > 0)
        column_values = column_values[used]
        count = column_values["count"].astype(np.int64)
        return cls(
            first=blocks["first"][used],
            last=np.minimum(blocks["last"], below - 1)[used],
            t=blocks["t_last"][used],
            low=column_values["low"].astype(np.float64),
            high=column_values["high"].astype(np.float64),
            total=column_values["mean"].astype(np.float64) * count,
            count=count,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """A curve: one entry per bucket."""

    first: Integers
    t: Floats
    low: Floats
    high: Floats
    mean: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """A mesh: `values[row, column]`, NaN where unknown."""

    first: Integers
    t: Floats
    values: Floats


def join_spans(parts: Sequence[Spans]) -> Spans:
    """Return all spans in order of their steps."""
    if not parts:
        return Spans.none()
    # The usual case, worth a shortcut: a mesh has thousands of ranks.
    if len(parts) == 1 and (parts[0].first[1:] >= parts[0].first[:-1]).all():
        return parts[0]
    fields = ("first", "last", "t", "low", "high", "total", "count")
    joined = {name: np.concatenate([getattr(spans, name) for spans in parts]) for name in fields}
    order = np.argsort(joined["first"], kind="stable")
    return Spans(**{name: values[order] for name, values in joined.items()})


def bucket_spans(spans: Spans, points: int) -> Buckets:
    """Return at most `points` non-empty buckets of equally many steps; of few spans, one bucket each."""
    if not len(spans.first):
        empty = np.zeros(0)
        return Buckets(first=spans.first, t=empty, low=empty, high=empty, mean=empty)
    starts = np.arange(len(spans.first))
    if len(starts) > points:
        since = spans.first - spans.first[0]
        starts = np.flatnonzero(np.diff(since * points // (since[-1] + 1), prepend=-1))
    ends = np.append(starts[1:], len(spans.first)) - 1
    return Buckets(
        first=spans.first[starts],
        t=spans.t[ends],
        low=np.minimum.reduceat(spans.low, starts),
        high=np.maximum.reduceat(spans.high, starts),
        mean=np.add.reduceat(spans.total, starts) / np.add.reduceat(spans.count, starts),
    )


def columns_of(rows: Sequence[Spans], most: int) -> Columns:
    """Return the rows over common columns of equally many steps, none narrower than the median span of any row."""
    filled_rows = [row for row in rows if len(row.first)]
    if not filled_rows:
        return Columns(first=np.zeros(0, np.int64), t=np.zeros(0), values=np.zeros((len(rows), 0)))
    first, last = min(int(row.first[0]) for row in filled_rows), max(int(row.last.max()) for row in filled_rows)
    widest = max(1, *(int(np.median(row.last - row.first)) + 1 for row in filled_rows))
    count = max(1, min(most, -(-(last - first + 1) // widest)))
    edges = first + (np.arange(count + 1) * (last - first + 1)) // count
    values = np.stack([_row_means(row, edges) for row in rows])
    used = ~np.isnan(values).all(axis=0)
    longest = max(filled_rows, key=lambda row: len(row.first))
    ends = np.searchsorted(longest.first, edges[1:], side="left") - 1
    t = longest.t[np.clip(ends, 0, None)]
    return Columns(first=edges[:-1][used], t=t[used], values=values[:, used])


def _row_means(row: Spans, edges: Integers) -> Floats:
    """Return the means of one row; a span counts in the column of its middle step."""
    column = np.searchsorted(edges, (row.first + row.last) // 2, side="right") - 1
    count = len(edges) - 1
    inside = (column >= 0) & (column < count)
    total = np.bincount(column[inside], weights=row.total[inside], minlength=count)
    number = np.bincount(column[inside], weights=row.count[inside], minlength=count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
