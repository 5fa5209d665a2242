"""The present values of all metrics of a run, from its folder; each reading reads only what is new."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, printable, text
from phalanx.metrics import names
from phalanx.metrics.names import Metric
from phalanx.record.account.cost import run_cost
from phalanx.record.account.ledger import Ledger, LedgerWalk, walk_ledger
from phalanx.record.account.memberships import measured_mfu
from phalanx.record.account.rank_places import RankPlaces, rank_places
from phalanx.record.account.stragglers import straggler_scores
from phalanx.record.account.time_accounts import from_trail
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import Event
from phalanx.record.run import Run

# Values that need more than the newest events are computed at most this often, and for at most this share of the time.
SELDOM_S = 15.0
SELDOM_SHARE = 0.05
# Ranks read for the aggregates, evenly spread: each takes 3 ms.
MOST_READ = 2048
TOKEN_POINTS = 2000  # buckets over which the tokens are summed


# Ranks with their own series; with more ranks, three aggregates replace them.
MOST_RANKS = 64
# Characters: labels come from files that may have been edited.
MOST_LABEL = 100
SPREAD: dict[str, Callable[[list[float]], float]] = {"min": min, "median": statistics.median, "max": max}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricPoint:
    """A value of a metric; `labels` are in the order of the metric's labels."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def metric_points(metric: Metric, value: float | None, **labels: object) -> Iterator[MetricPoint]:
    """Yield a point; nothing if the value is unknown or not finite."""
    if value is not None and math.isfinite(value):
        texts = tuple(printable(labels.get(name, ""), most=MOST_LABEL) for name in metric.labels)
        yield MetricPoint(metric=metric, labels=texts, value=float(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankValue:
    """A value that one rank measured, and its source."""

    rank: int
    value: float
    source: str = ""


def points_by_rank(
    metric: Metric, values: Iterable[RankValue], *, hosts: Mapping[int, str], most_ranks: int = MOST_RANKS
) -> Iterator[MetricPoint]:
    """Yield a point per rank; with more than `most_ranks`, the label `rank` is `min`, `median` and `max` instead."""
    known_values = list(values)
    if len(known_values) <= most_ranks:
        for rank_value in known_values:
            yield from metric_points(
                metric,
                rank_value.value,
                rank=rank_value.rank,
                host=hosts.get(rank_value.rank, ""),
                source=rank_value.source,
            )
        return
    for name, of in SPREAD.items():
        yield from metric_points(
            metric, of([rank_value.value for rank_value in known_values]), rank=name, source=known_values[0].source
        )


class Readings:
    """Reads the values of a run; call `points` at any rate, but not from two threads at once."""

    def __init__(self, run: Run, *, most_ranks: int = MOST_RANKS, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._history = RunHistory.open(run)
        self._most_ranks = most_ranks
        self._from_events, self._many = Seldom(clock), Seldom(clock)
        self._tokens, self._counted = 0.0, -1  # tokens of the steps up to `_counted`

    def points(self) -> list[MetricPoint]:
        """Return every series that has a value now."""
        self._history.refresh()
        plan = plan_of(self.run)
        places = rank_places(plan, self._history.supervisor())
        # Only ranks of the newest membership: a rank that was dropped would show its last values forever.
        supervised = self._history.supervisor()
        world = next((integer(event, "world") for event in reversed(supervised) if event["event"] == "epoch"), None)
        ranks = tuple(rank for rank in self._history.ranks if world is None or rank < world)
        points = [*self._run_points(plan, ranks), *self._newest_points(plan, len(ranks)), *rare_points(self._history)]
        if len(ranks) > self._most_ranks:
            points += self._many.points(lambda: self._by_rank(plan, places, _spread_ranks(ranks)))
        else:
            points += self._by_rank(plan, places, ranks)
        limit = self._most_ranks
        return points + self._from_events.points(
            lambda: list(event_points(self._history, self.run, hosts=places.hosts, most_ranks=limit))
        )

    def _by_rank(self, plan: Mapping[str, Any], there: RankPlaces, ranks: Sequence[int]) -> list[MetricPoint]:
        return [*self._rank_points(plan, there, ranks), *peer_points(self._history, ranks, most_ranks=self._most_ranks)]

    def _run_points(self, plan: Mapping[str, Any], ranks: Sequence[int]) -> Iterator[MetricPoint]:
        supervised, last = self._history.supervisor(), self._history.last_step
        state = text(self.run.status(), "state") or "unknown"
        yield from metric_points(names.INFO, 1.0, **_plan_labels(plan), state=state)
        yield from metric_points(names.DONE, 0 if last is None else last + 1)
        yield from metric_points(names.PLANNED, integer(at(plan, "duration"), "steps"))
        yield from metric_points(names.TOKENS, self._learnt_tokens(last))
        yield from metric_points(names.RANKS, len(ranks))
        yield from metric_points(names.INCIDENTS, sum(event["event"] == "incident" for event in supervised))
        yield from metric_points(names.DAMAGE, sum(damage.count for damage in self._history.damage()))
        for metric in names.PREDICTED:
            table, _, key = metric.field.partition(".")
            yield from metric_points(metric, number(at(plan, table), key))

    def _learnt_tokens(self, last: int | None) -> float:
        """Return the tokens of the steps that stayed.

        While a run repeats undone steps the value does not grow: a counter that fell would look like a restart to
        Prometheus, which would then count everything again.
        """
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

    def _newest_points(self, plan: Mapping[str, Any], world: int) -> Iterator[MetricPoint]:
        event = self._history.latest("step") or {}
        yield from metric_points(names.UPDATED, number(event, "t"))
        for metric in names.STEP:
            yield from metric_points(metric, number(event, metric.field))
        yield from metric_points(names.MFU, measured_mfu(plan, number(event, "tokens_per_s"), world=world))

    def _rank_points(self, plan: Mapping[str, Any], there: RankPlaces, ranks: Sequence[int]) -> Iterator[MetricPoint]:
        steps = {rank: self._history.latest("step", rank) or {} for rank in ranks}
        looks = {rank: self._history.latest("monitor", rank) or {} for rank in ranks}
        is_cpu = at(plan, "cluster", "accelerator").get("family") == "cpu"
        for metric in names.RANK_STEP:
            yield from self._metric_points(metric, steps, there)
        for metric in (*(names.CPU if is_cpu else names.GPU), *names.ANY_DEVICE, names.ENERGY):
            yield from self._metric_points(metric, looks, there)

    def _metric_points(
        self, metric: names.Metric, events: Mapping[int, Event], there: RankPlaces
    ) -> Iterator[MetricPoint]:
        """Yield one field of every rank's newest event; the source of `energy_j` is in `energy_source`, and so on."""
        stem = metric.field.removesuffix("_j")
        values = [
            RankValue(rank=rank, value=value, source=text(event, f"{stem}_source"))
            for rank, event in events.items()
            if (value := number(event, metric.field)) is not None
        ]
        return points_by_rank(metric, values, hosts=there.hosts, most_ranks=self._most_ranks)


class Seldom:
    """Caches points that are expensive to compute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: list[MetricPoint] = []
        self._due: float | None = None

    def points(self, make: Callable[[], list[MetricPoint]]) -> list[MetricPoint]:
        """Return the cached points, or new ones if they are due."""
        now = self._clock()
        if self._due is None or now >= self._due:
            self._kept = make()
            self._due = now + max(SELDOM_S, (self._clock() - now) / SELDOM_SHARE)
        return self._kept


def _spread_ranks(ranks: Sequence[int]) -> Sequence[int]:
    """Return at most MOST_READ of the ranks, evenly spread.

    >>> list(_spread_ranks(range(5000)))[:4], len(_spread_ranks(range(2048)))
    ([0, 3, 6, 9], 2048)
    """
    return ranks[:: -(-len(ranks) // MOST_READ)]


def plan_of(run: Run) -> Mapping[str, Any]:
    """Return plan.json; empty if it is missing or damaged."""
    try:
        return run.plan()
    except PhalanxError:
        return {}


def _plan_labels(plan: Mapping[str, Any]) -> dict[str, str]:
    layout = at(plan, "layout")
    axes = ("data", "tensor", "context", "pipeline", "expert")
    shape = " ".join(f"{axis}={size}" for axis in axes if (size := integer(layout, axis)))
    return {
        "model": text(at(plan, "job", "model"), "name"),
        "cluster": text(at(plan, "cluster"), "name"),
        "layout": shape,
    }


# ---- rare events: checkpoints, evaluations, timelines, pings ---------------------------------------------------------


MOST_COLLECTIVES = 64  # pairs of operation and group
# Neighbours of one rank: two per axis of the mesh, and a few more.
MOST_PAIRS = 16
PERCENTILES = (("50", "p50_s"), ("99", "p99_s"))


def rare_points(history: RunHistory) -> list[MetricPoint]:
    """Return the points of rank 0's rare events."""
    evaluated = history.latest("evaluate") or {}
    return [
        *metric_points(names.EVALUATION, number(evaluated, "loss")),
        *_checkpoint_points(history.events("checkpoint")),
        *_collective_points(history.latest("timeline") or {}),
    ]


def _checkpoint_points(events: list[Event]) -> Iterator[MetricPoint]:
    """Yield the points of the newest checkpoint, per phase; in older records the fields distinguish the phases."""
    good = [event for event in reversed(events) if not event.get("error")]
    staged = next((event for event in good if number(event, "blocked_s") is not None), {})
    saved = next((event for event in good if number(event, "seconds") is not None), {})
    yield from metric_points(names.CHECKPOINT, number(staged, "blocked_s"), phase="stage")
    yield from metric_points(names.CHECKPOINT, number(saved, "seconds"), phase="commit")
    yield from metric_points(names.CHECKPOINT_SIZE, number(saved, "bytes"))
    yield from metric_points(names.CHECKPOINT_STEP, integer(saved, "step"))
    yield from metric_points(names.CHECKPOINT_TIME, number(saved, "t"))


def _collective_points(event: Mapping[str, Any]) -> Iterator[MetricPoint]:
    """Yield sums by operation and group: a record may contain a pair several times, an exposition may not."""
    seconds: dict[tuple[str, str], float] = {}
    sizes: dict[tuple[str, str], float] = {}
    for collective in _mappings_of(event.get("collectives")):
        key = (text(collective, "op"), text(collective, "group"))
        if key in seconds or len(seconds) < MOST_COLLECTIVES:
            seconds[key] = seconds.get(key, 0.0) + (number(collective, "seconds") or 0.0)
            sizes[key] = sizes.get(key, 0.0) + (number(collective, "bytes") or 0.0)
    for op, group in seconds:
        yield from metric_points(names.COLLECTIVE, seconds[op, group], op=op, group=group)
        yield from metric_points(names.COLLECTIVE_SIZE, sizes[op, group], op=op, group=group)


def peer_points(history: RunHistory, ranks: Sequence[int], *, most_ranks: int) -> Iterator[MetricPoint]:
    """Yield the points of each pair of ranks; with many ranks, per axis the median of the medians and the worst p99."""
    pairs: dict[tuple[int, int, str], Mapping[str, Any]] = {}
    for rank in ranks:
        for pair in _mappings_of((history.latest("peers", rank) or {}).get("pairs"))[:MOST_PAIRS]:
            peer = integer(pair, "peer")
            if peer is not None:
                pairs[rank, peer, text(pair, "axis")] = pair
    if len(ranks) > most_ranks:
        yield from _axis_points(pairs)
        return
    for (rank, peer, axis), pair in pairs.items():
        for percentile, field in PERCENTILES:
            yield from metric_points(
                names.PEER_RTT, number(pair, field), src=rank, dst=peer, axis=axis, percentile=percentile
            )
        yield from metric_points(names.PEER_LOST, number(pair, "lost"), src=rank, dst=peer, axis=axis)


def _axis_points(pairs: Mapping[tuple[int, int, str], Mapping[str, Any]]) -> Iterator[MetricPoint]:
    for axis in sorted({axis for *_, axis in pairs})[:MOST_PAIRS]:
        axis_pairs = [pair for (*_, pair_axis), pair in pairs.items() if pair_axis == axis]
        usual = [value for pair in axis_pairs if (value := number(pair, "p50_s")) is not None]
        worst = [value for pair in axis_pairs if (value := number(pair, "p99_s")) is not None]
        lost_pings = sum(number(pair, "lost") or 0.0 for pair in axis_pairs)
        labels = {"src": "all", "dst": "all", "axis": axis}
        yield from metric_points(names.PEER_RTT, statistics.median(usual) if usual else None, **labels, percentile="50")
        yield from metric_points(names.PEER_RTT, max(worst, default=None), **labels, percentile="99")
        yield from metric_points(names.PEER_LOST, lost_pings, **labels)


def _mappings_of(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


# ---- computed from the complete record: goodput, ledger, stragglers, cost --------------------------------------------


T = TypeVar("T")


def event_points(history: RunHistory, run: Run, *, hosts: Mapping[int, str], most_ranks: int) -> Iterator[MetricPoint]:
    """Yield all of these points; those that a damaged record does not allow are left out."""
    walked = _value_or_none(lambda: walk_ledger(run, history))
    if walked is not None:
        yield from _time_points(walked)
        yield from _cost_points(run, history, walked.ledger)
    scored = _value_or_none(lambda: straggler_scores(history))
    if scored is not None:
        values = [RankValue(rank=rank, value=score) for rank, score in sorted(scored.score.items())]
        yield from points_by_rank(names.STRAGGLER, values, hosts=hosts, most_ranks=most_ranks)


def _time_points(walked: LedgerWalk) -> Iterator[MetricPoint]:
    for account, seconds in asdict(walked.ledger.accounts).items():
        yield from metric_points(names.TIME, seconds, account=account)
    effective = from_trail(walked.trail, 2)
    yield from metric_points(names.GOODPUT, effective.cumulative[-1] if effective.cumulative else None, window="run")
    yield from metric_points(names.GOODPUT, effective.last_hour[-1] if effective.last_hour else None, window="recent")


def _cost_points(run: Run, history: RunHistory, book: Ledger) -> Iterator[MetricPoint]:
    cost = _value_or_none(lambda: run_cost(run, history, book))
    for horizon in ("so_far", "projected", "predicted") if cost is not None else ():
        amount = getattr(cost, horizon)
        yield from metric_points(names.COST, amount.usd, horizon=horizon)
        yield from metric_points(names.CARBON, None if amount.kgco2e is None else 1000 * amount.kgco2e, horizon=horizon)
        yield from metric_points(names.RUN_ENERGY, amount.energy_j, horizon=horizon)


def _value_or_none(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (PhalanxError, OSError):
        return None
