"""One number of a run as it is now, and how the numbers of many ranks stay few."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from phalanx.io.values import printable
from phalanx.metrics.names import Metric

MOST_RANKS = 64  # ranks with series of their own; of more, three aggregates take their place
MOST_LABEL = 100  # characters: labels come from files that anybody may have written
SPREAD: dict[str, Callable[[list[float]], float]] = {"min": min, "median": statistics.median, "max": max}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A value of a metric; `labels` in the order of the metric's own."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def point(metric: Metric, value: float | None, **labels: object) -> Iterator[Point]:
    """The point, or nothing where the value is not known or cannot be."""
    if value is not None and math.isfinite(value):
        texts = tuple(printable(labels.get(name, ""), most=MOST_LABEL) for name in metric.labels)
        yield Point(metric=metric, labels=texts, value=float(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankValue:
    """What one rank measured, and by which means."""

    rank: int
    value: float
    source: str = ""


def by_rank(
    metric: Metric, values: Iterable[RankValue], *, hosts: Mapping[int, str], most_ranks: int = MOST_RANKS
) -> Iterator[Point]:
    """A point per rank; beyond `most_ranks` the label `rank` is `min`, `median` and `max` instead."""
    known = list(values)
    if len(known) <= most_ranks:
        for one in known:
            yield from point(metric, one.value, rank=one.rank, host=hosts.get(one.rank, ""), source=one.source)
        return
    for name, of in SPREAD.items():
        yield from point(metric, of([one.value for one in known]), rank=name, source=known[0].source)
