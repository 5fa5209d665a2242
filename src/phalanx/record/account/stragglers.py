"""Ranks that hold up the others: the score of every rank, and the names of those that stand out.

The score of a rank in a step is its own time (`lag.work`) over the median of the other ranks that do the same work:
those of its pipeline stage. Over a window of the last 100 steps the median score counts, so that neither a pause nor
an unlucky step names anybody. What held a rank up without computing counts as its own time too, since the others wait
for it all the same; but ranks that share cores do not get them evenly, so it must be more before it names anybody.
Stages that differ by design are not compared: an uneven split is the plan's doing, and
of 3,079 jobs at ByteDance slow machines explained 1.7 % of those that straggled (arXiv:2505.05713).
"""

from __future__ import annotations

import bisect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, printable
from phalanx.record.account.memberships import LayoutSpan, layout_spans
from phalanx.record.events import Event
from phalanx.record.run import Run

if TYPE_CHECKING:
    from phalanx.record.archive.history import Mesh, RunHistory


WINDOW = 100  # steps
LEAST_STEPS = 5  # below it nobody is named
STRAGGLES = 1.1  # a rank at work for this much longer than its peers is worth naming
HELD_UP = 1.5  # the same where the difference is time without a core
SURE = 5.0  # standard errors by which a score must pass 1, so that noise names nobody
APART = 6.0  # spreads of the scores of its peers by which it must stand out, where there are enough of them
CLOSER = 16  # ranks that are looked at step by step, of many
MANY = 8  # ranks from which their scores have a spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    place: str
    host: str
    score: float  # own time over the median of its peers
    text: str
    reason: str = ""  # why, as far as the record tells


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Every rank's score, by rank; above 1 is slower than its peers."""

    score: dict[int, float]
    named: tuple[Straggler, ...]  # worst first
    steps: int  # behind each score


def stragglers(history: RunHistory) -> list[Straggler]:
    """Those that stand out in the last 100 steps, worst first."""
    return list(scores(history).named)


def scores(history: RunHistory, *, last: int | None = None) -> Scores:
    """The scores over the window that ends with step `last`, or with the newest."""
    end = history.last_step if last is None else last
    nobody = Scores(score={}, named=(), steps=0)
    if end is None or len(history.ranks) < 2:
        return nobody
    # Ranks of another layout do other work: the window does not reach back into it.
    piece = next((one for one in layout_spans(history.run, history) if one.first <= end <= one.last), None)
    began = piece.first if piece is not None else history.first_step or 0
    first, where = max(began, end - WINDOW + 1), _rank_places(history, piece)
    if history.is_sampled:
        return _scores_of_many(history, where, first=first, last=end, is_newest=end == history.last_step)
    known = work(history, columns=WINDOW, first=first, last=end, world=piece.world if piece is not None else None)
    if known is None:
        return nobody
    found = judge(known, where)
    if found.steps >= LEAST_STEPS or end - first + 1 < LEAST_STEPS:
        return _with_reasons(found, history, where, first=first, last=end)
    # Of many ranks the history draws means of whole blocks: whoever seems slow there is looked at step by step.
    closer = work_of(history, _slowest_ranks(found, where), first=first, last=end)
    if closer is None:
        return found
    sure = judge(closer, where)
    found = Scores(score=found.score | sure.score, named=sure.named, steps=sure.steps)
    return _with_reasons(found, history, where, first=first, last=end)


def _scores_of_many(history: RunHistory, where: Places, *, first: int, last: int, is_newest: bool) -> Scores:
    """Of so many ranks that not all are read: every rank by the newest block of its index, the slowest step by step.

    Of a window in the past, the ranks of the sample alone.
    """
    ranks = history.ranks
    if is_newest:
        newest = history.newest("duration_s", "wait_s", "compute_s")
        own = newest["duration_s"] - newest["wait_s"]
        own = np.where(np.isfinite(own), own, newest["compute_s"])
        table = np.where((own > 0.0) & (own < MOST_S), own, np.nan)[:, None]
        nothing = np.zeros(table.shape)
        glance = judge(Work(ranks=ranks, step=(first,), own_s=table, wait_s=nothing, held_s=nothing), where)
    else:
        known = work(history, columns=WINDOW, first=first, last=last)
        glance = judge(known, where) if known is not None else Scores(score={}, named=(), steps=0)
    closer = work_of(history, _slowest_ranks(glance, where), first=first, last=last) if glance.score else None
    if closer is None:
        return replace(glance, named=())
    sure = judge(closer, where)
    found = Scores(score=glance.score | sure.score, named=sure.named, steps=sure.steps)
    return _with_reasons(found, history, where, first=first, last=last)


# ---- why a rank is slow ----------------------------------------------------------------------------------------------

WAITS_FOR_CORE = "it waits for the processor: its core is shared"
STANDS_STILL = "it stands still without computing: stopped, swapped out or throttled"
WAITS_FOR_DATA = "it waits for data"
COMPUTES_LONGER = "it computes longer"


def _with_reasons(found: Scores, history: RunHistory, where: Places, *, first: int, last: int) -> Scores:
    """With what holds each of the named up, by the events of the window of it and of some of its peers."""
    groups = where.alike(sorted(found.score))
    named = []
    for one in found.named:
        peers = [rank for group in groups if one.rank in group for rank in group if rank != one.rank]
        mine, others = _parts(history, [one.rank], first, last), _parts(history, peers[:CLOSER], first, last)
        reason = reason_of(mine, others)
        named.append(replace(one, reason=reason, text=f"{one.text}: {reason}" if reason else one.text))
    return replace(found, named=tuple(named))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTime:
    """Medians over steps and ranks of what own time is made of, in seconds; None where it is not known."""

    computed_s: float | None
    held_s: float | None  # neither computing nor waiting for others
    core_wait_s: float | None  # of it, or on a GPU host, ready to run and without a core
    data_s: float | None


def _parts(history: RunHistory, ranks: Sequence[int], first: int, last: int) -> OwnTime:
    found: dict[str, list[float]] = {"computed_s": [], "held_s": [], "core_wait_s": [], "data_s": []}
    for rank in ranks:
        for event in history.steps(rank, first, last):
            compute_s, cpu_s = number(event, "compute_s"), number(event, "cpu_s")
            if compute_s is not None:
                found["computed_s"].append(compute_s if cpu_s is None else min(compute_s, cpu_s))
            if compute_s is not None and cpu_s is not None:
                found["held_s"].append(max(0.0, compute_s - cpu_s))
            for name in ("core_wait_s", "data_s"):
                if (value := number(event, name)) is not None:
                    found[name].append(value)
    return OwnTime(**{name: float(np.median(values)) if values else None for name, values in found.items()})


def reason_of(mine: OwnTime, others: OwnTime) -> str:
    """The part of a rank's own time by which it is furthest behind its peers, in words; empty where nobody knows.

    >>> alike = OwnTime(computed_s=1.0, held_s=0.1, core_wait_s=0.1, data_s=0.0)
    >>> reason_of(replace(alike, held_s=2.0, core_wait_s=1.9), alike)
    'it waits for the processor: its core is shared'
    """
    behind = {
        name: (getattr(mine, name) or 0.0) - (getattr(others, name) or 0.0)
        for name in ("computed_s", "held_s", "core_wait_s", "data_s")
    }
    shared = behind["core_wait_s"]
    # On a GPU host time without a core is inside what the device seems to compute.
    held = behind["held_s"] if mine.held_s is not None else shared
    parts = {WAITS_FOR_DATA: behind["data_s"], COMPUTES_LONGER: behind["computed_s"]}
    parts[WAITS_FOR_CORE if shared >= 0.5 * held else STANDS_STILL] = held
    reason, most = max(parts.items(), key=lambda part: part[1])
    return reason if most > 0.0 else ""


def _slowest_ranks(found: Scores, where: Places) -> list[int]:
    """The slowest ranks of all, and beside each some of its peers, evenly spread."""
    slowest = sorted(found.score, key=lambda rank: -found.score[rank])[:CLOSER]
    picked = set(slowest)
    for group in where.alike(sorted(found.score)):
        if picked.intersection(group):
            picked.update(group[:: max(1, len(group) // CLOSER)])
    return sorted(picked)[: 8 * CLOSER]


def judge(known: Work, where: Places) -> Scores:
    """Score ranks whose work is known step by step."""
    rows = {rank: row for row, rank in enumerate(known.ranks)}
    score: dict[int, float] = {}
    named: list[Straggler] = []
    for group in where.alike(known.ranks):
        at_rows = [rows[rank] for rank in group]
        own, held = known.own_s[at_rows], known.held_s[at_rows]
        medians, limits = _standing(own, least=HELD_UP if held.any() else STRAGGLES)
        score |= {rank: float(value) for rank, value in zip(group, medians, strict=True) if np.isfinite(value)}
        if own.shape[1] >= LEAST_STEPS:
            slow = medians > limits
            if held.any():  # who is slow even when he has a core
                free, free_limits = _standing(np.where(own > held, own - held, np.nan), least=STRAGGLES)
                slow |= free > free_limits
                medians = np.where(slow, np.fmax(medians, free), medians)
            named += [_named_straggler(rank, float(medians[at]), where) for at, rank in enumerate(group) if slow[at]]
    return Scores(score=score, named=tuple(sorted(named, key=lambda one: -one.score)), steps=int(known.own_s.shape[1]))


def _standing(own: Table, *, least: float) -> tuple[Table, Table]:
    """The score of each rank of a group, and what it must pass to be named."""
    ratios = own / median_of_others(own)
    medians = _column_median(ratios)
    return medians, np.maximum(least, 1.0 + np.maximum(SURE * _standard_error(ratios), APART * _median_spread(medians)))


def _named_straggler(rank: int, score: float, where: Places) -> Straggler:
    place, host = where.place(rank), where.host(rank)
    parts = ", ".join(part for part in (place, f"on {host}" if host else "") if part)
    text = f"rank {rank}{f' ({parts})' if parts else ''} is at work {score - 1:.0%} longer than its peers"
    return Straggler(rank=rank, place=place, host=host, score=score, text=text)


def _column_median(table: Table) -> Table:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank that never said: NaN is the answer
        found: Table = np.nanmedian(table, axis=1)
    return found


def _standard_error(ratios: Table) -> Table:
    """Of each row's median: 1.25 standard deviations over √n, the deviation from the median one (1.48 of it)."""
    deviation = _column_median(np.abs(ratios - _column_median(ratios)[:, None]))
    counts = np.maximum(np.isfinite(ratios).sum(axis=1), 1)
    found: Table = np.nan_to_num(1.25 * 1.4826 * deviation / np.sqrt(counts), nan=np.inf)
    return found


def _median_spread(medians: Table) -> float:
    known = medians[np.isfinite(medians)]
    if len(known) < MANY:
        return 0.0
    return float(1.4826 * np.median(np.abs(known - np.median(known))))


def _rank_places(history: RunHistory, piece: LayoutSpan | None) -> Places:
    try:
        plan = history.run.plan()
    except PhalanxError:
        plan = {}
    newest = places(plan, history.supervisor())
    return newest if piece is None or not piece.layout else replace(newest, layout=piece.layout)


# ---- where ranks stand -----------------------------------------------------------------------------------------------


AXES = ("tensor", "context", "data", "pipeline")  # neighbours first


def place(rank: int, layout: Mapping[str, Any]) -> str:
    """Where a rank stands on the axes that are split; tensor peers are neighbours.

    >>> place(5, {"pipeline": 2, "data": 2, "context": 1, "tensor": 2})
    'pipeline 1, data 0, tensor 1'
    """
    words = []
    for axis in AXES:
        size = max(1, integer(layout, axis) or 1)
        if size > 1:
            words.append(f"{axis} {rank % size}")
        rank //= size
    return ", ".join(reversed(words))


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The ranks of the newest membership."""

    layout: Mapping[str, Any]
    hosts: Mapping[int, str]

    def place(self, rank: int) -> str:
        """Such as "data 1, tensor 0"; empty where nothing is split."""
        return place(rank, self.layout)

    def host(self, rank: int) -> str:
        """The host's name; empty when it is not known."""
        return self.hosts.get(rank, "")

    def stage(self, rank: int) -> int:
        """The pipeline stage: ranks of one stage do the same work."""
        return rank // self._stage_size

    @property
    def _stage_size(self) -> int:
        return math.prod(max(1, integer(self.layout, axis) or 1) for axis in AXES[:3])

    def alike(self, ranks: Iterable[int]) -> list[list[int]]:
        """Ranks in groups that do the same work."""
        groups: dict[int, list[int]] = {}
        size = self._stage_size
        for rank in ranks:
            groups.setdefault(rank // size, []).append(rank)
        return list(groups.values())


MOST_SLOTS = 4096  # ranks of one entry of a membership: no host has more


def places(plan: Mapping[str, Any], supervisor: Sequence[Event]) -> Places:
    """From the newest `epoch` event; before there is one, from the plan."""
    hosts: dict[int, str] = {}
    for event in reversed(supervisor):  # members of many hosts follow the event in others, and later who has moved
        if event.get("event") in ("epoch", "members"):
            hosts = _rank_hosts(event.get("members")) | hosts
        if event.get("event") == "epoch":
            return Places(layout=at(event, "layout") or at(plan, "layout"), hosts=hosts)
    return Places(layout=at(plan, "layout"), hosts={})


def _rank_hosts(members: Any) -> dict[int, str]:
    found = {}
    for one in members if isinstance(members, list) else ():
        rank = integer(one, "rank") if isinstance(one, Mapping) else None
        if rank is not None and isinstance(one.get("host"), str):
            host, count = printable(one["host"], most=100), integer(one, "count") or 1
            found.update(dict.fromkeys(range(rank, rank + min(max(count, 1), MOST_SLOTS)), host))
    return found


# ---- own time of each rank, and how far it lags behind others with the same work -------------------------------------


MOST_S = 1e9  # 30 years: no step, a damaged record
Table = np.ndarray[Any, np.dtype[np.float64]]  # [rank][column of steps], seconds, NaN where not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds per step that ranks worked and waited, by columns of steps."""

    ranks: tuple[int, ...]
    step: tuple[int, ...]  # first of each column
    own_s: Table
    wait_s: Table
    held_s: Table  # of `own_s` without computing; 0 where that is not known


def work(
    history: RunHistory,
    *,
    columns: int,
    first: int | None = None,
    last: int | None = None,
    world: int | None = None,
) -> Work | None:
    """What every rank below `world` did itself; None where fewer than two ranks say so.

    Own time is what a rank was in the step and did not wait: `duration_s` less `wait_s`. So a rank that sleeps, swaps,
    has no core or looks for its data is as slow as one that computes slowly; `compute_s` is taken where `wait_s` is not
    known.
    """
    span: dict[str, Any] = {"columns": columns, "first": first, "last": last}
    waits, took = history.meshes(("wait_s", "duration_s"), **span)
    own, wait = _table(took), _table(waits)
    if took.ranks != waits.ranks or own.shape != wait.shape or not np.isfinite(own - wait).any():
        computed = history.mesh("compute_s", **span)
        took, own, wait = computed, _table(computed), np.full(_table(computed).shape, np.nan)
    else:
        own = own - wait
    own = np.where(own > 0.0, own, np.nan)
    held = np.zeros(own.shape)
    if "cpu_s" in history.names():
        in_all, spent = (_table(one) for one in history.meshes(("compute_s", "cpu_s"), **span))
        if in_all.shape == spent.shape == own.shape:
            held = np.nan_to_num(np.maximum(in_all - spent, 0.0), nan=0.0)
    there = [row for row, rank in enumerate(took.ranks) if world is None or rank < world]
    own, wait, held = own[there], wait[there], held[there]
    if own.shape[1] == 0 or int(np.isfinite(own).any(axis=1).sum()) < 2:
        return None
    ranks = tuple(took.ranks[row] for row in there)
    wait = np.where(wait >= 0.0, wait, np.nan)
    return Work(ranks=ranks, step=took.step, own_s=own, wait_s=wait, held_s=held)


def work_of(history: RunHistory, ranks: Sequence[int], *, first: int, last: int) -> Work | None:
    """The same of some ranks, step by step from their events."""
    steps = tuple(range(first, last + 1))
    own, wait, held = (np.full((len(ranks), len(steps)), value) for value in (np.nan, np.nan, 0.0))
    for row, rank in enumerate(ranks):
        for event in history.steps(rank, first, last):
            step, took_s, waited_s = integer(event, "step"), number(event, "duration_s"), number(event, "wait_s")
            computed_s = number(event, "compute_s") if took_s is None or waited_s is None else took_s - waited_s
            if step is not None and first <= step <= last and computed_s is not None and 0.0 < computed_s < MOST_S:
                own[row, step - first] = computed_s
                wait[row, step - first] = np.nan if waited_s is None else waited_s
                if (cpu_s := number(event, "cpu_s")) is not None:
                    held[row, step - first] = max(0.0, (number(event, "compute_s") or 0.0) - cpu_s)
    if int(np.isfinite(own).any(axis=1).sum()) < 2:
        return None
    return Work(ranks=tuple(ranks), step=steps, own_s=own, wait_s=wait, held_s=held)


def _table(mesh: Mesh) -> Table:
    """The mesh's values, also of a mesh without ranks or columns; what cannot be a duration is not known."""
    rows = [[np.nan if value is None else value for value in row] for row in mesh.values]
    found = np.array(rows, dtype=np.float64).reshape(len(mesh.ranks), len(mesh.step))
    return np.where(np.abs(found) < MOST_S, found, np.nan)


def median_of_others(values: Table) -> Table:
    """For each row of a table, the median of the other rows, column by column; NaN where there are none.

    >>> median_of_others(np.array([[1.0], [2.0], [9.0]])).ravel().tolist()
    [5.5, 5.0, 1.5]
    """
    order = np.argsort(values, axis=0)  # NaN last
    ranked = np.take_along_axis(values, order, axis=0)
    place = np.argsort(order, axis=0)
    known = np.isfinite(values)
    others = np.broadcast_to(known.sum(axis=0), values.shape) - known
    return 0.5 * (_nth_value(ranked, place, (others - 1) // 2, others) + _nth_value(ranked, place, others // 2, others))


def _nth_value(ranked: Table, place: Any, count: Any, others: Any) -> Table:
    """The value at a position of a sorted column from which one's own was taken out."""
    index = np.clip(count + (count >= place), 0, ranked.shape[0] - 1)
    found: Table = np.where(others > 0, np.take_along_axis(ranked, index, axis=0), np.nan)
    return found


# ---- what slow ranks cost --------------------------------------------------------------------------------------------
# The seconds of a step that all would have saved, had none been slower than its peers. Over columns of some 20 steps or
# more the mean own time of each rank is taken (jitter evens out: it is no straggling). In each group of ranks that do
# the same work, the slowest less the median of the others is what the others stood still for; the worst group counts,
# since the step waits for it, and no more of it than every rank that is not behind waited.


COLUMN_STEPS = 20
MOST_COLUMNS = 256


class Waited:
    """The seconds that steps lost to slow ranks, by their numbers."""

    def __init__(self, firsts: Sequence[int] = (), lag_s: Sequence[float] = ()) -> None:
        self._firsts, self._lag_s = firsts, [0.0, *lag_s]  # 0 before the first

    def of(self, step: int) -> float:
        """Of one step."""
        return self._lag_s[bisect.bisect_right(self._firsts, step)]

    def of_all(self, steps: NDArray[np.int64]) -> Table:
        """Of many."""
        found: Table = np.array(self._lag_s)[np.searchsorted(np.array(self._firsts, dtype=np.int64), steps, "right")]
        return found


def waited(run: Run, history: RunHistory | None = None) -> Waited:
    """What the steps of a run lost."""
    found = _lags(run, history)
    return Waited() if found is None else Waited(*found)


def _lags(run: Run, history: RunHistory | None) -> tuple[list[int], list[float]] | None:
    if history is None:
        if len(run.event_files()) < 2:
            return None
        from phalanx.record.archive.history import RunHistory

        history = RunHistory.open(run)
    if history.last_step is None or len(history.ranks) < 2:
        return None
    firsts: list[int] = []
    lost_s: list[float] = []
    for piece in layout_spans(run, history):  # who does the same work is another question in another layout
        columns = max(1, min(MOST_COLUMNS, piece.steps // COLUMN_STEPS))
        known = work(history, columns=columns, first=piece.first, last=piece.last, world=piece.world)
        if known is None:  # one rank, or none that says: nobody waits
            firsts, lost_s = [*firsts, piece.first], [*lost_s, 0.0]
            continue
        firsts += known.step
        lost_s += lags(known, Places(layout=piece.layout, hosts={})).tolist()
    return firsts, lost_s


def lags(known: Work, where: Places) -> Table:
    """Seconds per step lost to slow ranks, by column."""
    rows = {rank: row for row, rank in enumerate(known.ranks)}
    behind = np.zeros(known.own_s.shape)  # each rank behind the median of its peers
    for group in where.alike(known.ranks):
        own = known.own_s[[rows[rank] for rank in group]]
        behind[[rows[rank] for rank in group]] = np.nan_to_num(own - median_of_others(own), nan=0.0)
    # Whoever is not behind waits at least as long as the slowest is: where somebody hardly waits, because another
    # stage is busier still, a quicker straggler would have saved no more than that.
    waits = np.where((behind <= 0.0) & np.isfinite(known.wait_s), known.wait_s, np.inf).min(axis=0)
    found: Table = np.maximum(np.minimum(behind.max(axis=0), waits), 0.0)
    return found
