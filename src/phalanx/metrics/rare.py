"""Points of the events that come now and then: checkpoints, evaluations, sampled timelines, pings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.io.values import integer, number, text
from phalanx.metrics import names
from phalanx.metrics.point import Point, point
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import Event

MOST_COLLECTIVES = 64  # pairs of operation and group
MOST_PAIRS = 16  # neighbours of one rank: two per axis of the mesh, and some more
PERCENTILES = (("50", "p50_s"), ("99", "p99_s"))


def rare_points(history: RunHistory) -> list[Point]:
    """Those of rank 0."""
    evaluated = history.latest("evaluate") or {}
    return [
        *point(names.EVALUATION, number(evaluated, "loss")),
        *_checkpoints(history.events("checkpoint")),
        *_collectives(history.latest("timeline") or {}),
    ]


def _checkpoints(events: list[Event]) -> Iterator[Point]:
    """The newest of each phase; older records tell the phases apart by what they hold."""
    good = [event for event in reversed(events) if not event.get("error")]
    staged = next((event for event in good if number(event, "blocked_s") is not None), {})
    saved = next((event for event in good if number(event, "seconds") is not None), {})
    yield from point(names.CHECKPOINT, number(staged, "blocked_s"), phase="stage")
    yield from point(names.CHECKPOINT, number(saved, "seconds"), phase="commit")
    yield from point(names.CHECKPOINT_SIZE, number(saved, "bytes"))
    yield from point(names.CHECKPOINT_STEP, integer(saved, "step"))
    yield from point(names.CHECKPOINT_TIME, number(saved, "t"))


def _collectives(event: Mapping[str, Any]) -> Iterator[Point]:
    """Summed by operation and group: a record may hold one of them several times, an exposition may not."""
    seconds: dict[tuple[str, str], float] = {}
    sizes: dict[tuple[str, str], float] = {}
    for one in _tables(event.get("collectives")):
        key = (text(one, "op"), text(one, "group"))
        if key in seconds or len(seconds) < MOST_COLLECTIVES:
            seconds[key] = seconds.get(key, 0.0) + (number(one, "seconds") or 0.0)
            sizes[key] = sizes.get(key, 0.0) + (number(one, "bytes") or 0.0)
    for op, group in seconds:
        yield from point(names.COLLECTIVE, seconds[op, group], op=op, group=group)
        yield from point(names.COLLECTIVE_SIZE, sizes[op, group], op=op, group=group)


def peer_points(history: RunHistory, ranks: Sequence[int], *, most_ranks: int) -> Iterator[Point]:
    """A pair each; of many ranks, per axis the median of the medians and the worst of the rest."""
    pairs: dict[tuple[int, int, str], Mapping[str, Any]] = {}
    for rank in ranks:
        for one in _tables((history.latest("peers", rank) or {}).get("pairs"))[:MOST_PAIRS]:
            peer = integer(one, "peer")
            if peer is not None:
                pairs[rank, peer, text(one, "axis")] = one
    if len(ranks) > most_ranks:
        yield from _axes(pairs)
        return
    for (rank, peer, axis), one in pairs.items():
        for percentile, field in PERCENTILES:
            yield from point(names.PEER_RTT, number(one, field), src=rank, dst=peer, axis=axis, percentile=percentile)
        yield from point(names.PEER_LOST, number(one, "lost"), src=rank, dst=peer, axis=axis)


def _axes(pairs: Mapping[tuple[int, int, str], Mapping[str, Any]]) -> Iterator[Point]:
    for axis in sorted({axis for *_, axis in pairs})[:MOST_PAIRS]:
        here = [one for (*_, named), one in pairs.items() if named == axis]
        usual = [value for one in here if (value := number(one, "p50_s")) is not None]
        worst = [value for one in here if (value := number(one, "p99_s")) is not None]
        lost = sum(number(one, "lost") or 0.0 for one in here)
        labels = {"src": "all", "dst": "all", "axis": axis}
        yield from point(names.PEER_RTT, statistics.median(usual) if usual else None, **labels, percentile="50")
        yield from point(names.PEER_RTT, max(worst, default=None), **labels, percentile="99")
        yield from point(names.PEER_LOST, lost, **labels)


def _tables(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
