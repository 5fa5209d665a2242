"""A run's numbers at this moment, from its folder: read what is new, give every series of the table its value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, text
from phalanx.metrics import names
from phalanx.metrics.point import MOST_RANKS, Point, RankValue, by_rank, point
from phalanx.metrics.rare import peer_points, rare_points
from phalanx.metrics.story import story_points
from phalanx.record.account.memberships import measured_mfu
from phalanx.record.account.stragglers import Places, places
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import Event
from phalanx.record.run import Run

SELDOM_S = 15.0  # what costs more than a look at the newest events is worked out at most this often …
SELDOM_SHARE = 0.05  # … and for at most this share of the time
MOST_READ = 2048  # ranks looked at for the aggregates, evenly spread: a look takes 3 ms each
TOKEN_POINTS = 2000  # buckets over which the tokens are added up


class Readings:
    """Ask `points` as often as you like; not from two threads at once."""

    def __init__(self, run: Run, *, most_ranks: int = MOST_RANKS, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._history = RunHistory.open(run)
        self._most_ranks = most_ranks
        self._story, self._many = Seldom(clock), Seldom(clock)
        self._tokens, self._counted = 0.0, -1  # tokens of the steps up to that one

    def points(self) -> list[Point]:
        """Every series that has a value now."""
        self._history.refresh()
        plan = plan_of(self.run)
        there = places(plan, self._history.supervisor())
        ranks = self._here()
        found = [*self._run(plan, ranks), *self._newest(plan, len(ranks)), *rare_points(self._history)]
        if len(ranks) > self._most_ranks:
            found += self._many.points(lambda: self._by_rank(plan, there, _spread(ranks)))
        else:
            found += self._by_rank(plan, there, ranks)
        limit = self._most_ranks
        return found + self._story.points(
            lambda: list(story_points(self._history, self.run, hosts=there.hosts, most_ranks=limit))
        )

    def _by_rank(self, plan: Mapping[str, Any], there: Places, ranks: Sequence[int]) -> list[Point]:
        return [*self._ranks(plan, there, ranks), *peer_points(self._history, ranks, most_ranks=self._most_ranks)]

    def _here(self) -> tuple[int, ...]:
        """Ranks of the newest formation: one that was left behind would show its last numbers for ever."""
        told = self._history.supervisor()
        world = next((integer(one, "world") for one in reversed(told) if one["event"] == "epoch"), None)
        return tuple(rank for rank in self._history.ranks if world is None or rank < world)

    def _run(self, plan: Mapping[str, Any], ranks: Sequence[int]) -> Iterator[Point]:
        told, last = self._history.supervisor(), self._history.last_step
        state = text(self.run.status(), "state") or "unknown"
        yield from point(names.INFO, 1.0, **_described(plan), state=state)
        yield from point(names.DONE, 0 if last is None else last + 1)
        yield from point(names.PLANNED, integer(at(plan, "duration"), "steps"))
        yield from point(names.TOKENS, self._learnt(last))
        yield from point(names.RANKS, len(ranks))
        yield from point(names.INCIDENTS, sum(one["event"] == "incident" for one in told))
        yield from point(names.DAMAGE, sum(one.count for one in self._history.damage()))
        for metric in names.PREDICTED:
            table, _, key = metric.field.partition(".")
            yield from point(metric, number(at(plan, table), key))

    def _learnt(self, last: int | None) -> float:
        """Tokens of the steps that stayed. While a run makes up for undone steps the count stands still: a counter
        that fell would look like a fresh start to Prometheus, which then counts everything once more."""
        if last is not None and last != self._counted:
            self._counted = last
            curve = self._history.curve("tokens", points=TOKEN_POINTS)
            ends = (*curve.step[1:], last + 1)
            sums = (
                mean * (end - first) for first, end, mean in zip(curve.step, ends, curve.mean, strict=False) if mean
            )
            total = sum(sums)
            self._tokens = max(self._tokens, round(total) if math.isfinite(total) else 0)
        return self._tokens

    def _newest(self, plan: Mapping[str, Any], world: int) -> Iterator[Point]:
        event = self._history.latest("step") or {}
        yield from point(names.UPDATED, number(event, "t"))
        for metric in names.STEP:
            yield from point(metric, number(event, metric.field))
        yield from point(names.MFU, measured_mfu(plan, number(event, "tokens_per_s"), world=world))

    def _ranks(self, plan: Mapping[str, Any], there: Places, ranks: Sequence[int]) -> Iterator[Point]:
        steps = {rank: self._history.latest("step", rank) or {} for rank in ranks}
        looks = {rank: self._history.latest("monitor", rank) or {} for rank in ranks}
        is_cpu = at(plan, "cluster", "accelerator").get("family") == "cpu"
        for metric in names.RANK_STEP:
            yield from self._of(metric, steps, there)
        for metric in (*(names.CPU if is_cpu else names.GPU), *names.ANY_DEVICE, names.ENERGY):
            yield from self._of(metric, looks, there)

    def _of(self, metric: names.Metric, events: Mapping[int, Event], there: Places) -> Iterator[Point]:
        """One field of every rank's newest event; `energy_j` has its source in `energy_source`, and so on."""
        stem = metric.field.removesuffix("_j")
        values = [
            RankValue(rank=rank, value=value, source=text(event, f"{stem}_source"))
            for rank, event in events.items()
            if (value := number(event, metric.field)) is not None
        ]
        return by_rank(metric, values, hosts=there.hosts, most_ranks=self._most_ranks)


class Seldom:
    """Points that are kept for a while, since they cost much to work out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: list[Point] = []
        self._due: float | None = None

    def points(self, make: Callable[[], list[Point]]) -> list[Point]:
        """The kept ones, or new ones if it is time."""
        now = self._clock()
        if self._due is None or now >= self._due:
            self._kept = make()
            self._due = now + max(SELDOM_S, (self._clock() - now) / SELDOM_SHARE)
        return self._kept


def _spread(ranks: Sequence[int]) -> Sequence[int]:
    """At most MOST_READ of them.

    >>> list(_spread(range(5000)))[:4], len(_spread(range(2048)))
    ([0, 3, 6, 9], 2048)
    """
    return ranks[:: -(-len(ranks) // MOST_READ)]


def plan_of(run: Run) -> Mapping[str, Any]:
    """plan.json; empty when it is missing or damaged."""
    try:
        return run.plan()
    except PhalanxError:
        return {}


def _described(plan: Mapping[str, Any]) -> dict[str, str]:
    layout = at(plan, "layout")
    axes = ("data", "tensor", "context", "pipeline", "expert")
    shape = " ".join(f"{axis}={size}" for axis in axes if (size := integer(layout, axis)))
    return {
        "model": text(at(plan, "job", "model"), "name"),
        "cluster": text(at(plan, "cluster"), "name"),
        "layout": shape,
    }
