"""Ranks that hold up the others: the score of every rank, and the names of those that stand out.

The score of a rank in a step is its own time (`lag.work`) over the median of the other ranks that do the same work:
those of its pipeline stage. Over a window of the last 100 steps the median score counts, so that neither a pause nor
an unlucky step names anybody. What held a rank up without computing counts as its own time too, since the others wait
for it all the same; but ranks that share cores do not get them evenly, so it must be more before it names anybody.
Stages that differ by design are not compared: an uneven split is the plan's doing, and
of 3,079 jobs at ByteDance slow machines explained 1.7 % of those that straggled (arXiv:2505.05713).
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.io.values import number
from phalanx.record.account.memberships import LayoutSpan, layout_spans
from phalanx.record.account.rank_places import RankPlaces, rank_places
from phalanx.record.account.rank_work import MOST_S, RankWork, Table, median_of_others, work_by_column, work_by_step

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory


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
class StragglerScores:
    """Every rank's score, by rank; above 1 is slower than its peers."""

    score: dict[int, float]
    named: tuple[Straggler, ...]  # worst first
    steps: int  # behind each score


def find_stragglers(history: RunHistory) -> list[Straggler]:
    """Those that stand out in the last 100 steps, worst first."""
    return list(straggler_scores(history).named)


def straggler_scores(history: RunHistory, *, last: int | None = None) -> StragglerScores:
    """The scores over the window that ends with step `last`, or with the newest."""
    end = history.last_step if last is None else last
    return history.once(("straggler scores", end), lambda: _scores_until(history, end))


def _scores_until(history: RunHistory, end: int | None) -> StragglerScores:
    nobody = StragglerScores(score={}, named=(), steps=0)
    if end is None or len(history.ranks) < 2:
        return nobody
    # Ranks of another layout do other work: the window does not reach back into it.
    piece = next((one for one in layout_spans(history.run, history) if one.first <= end <= one.last), None)
    began = piece.first if piece is not None else history.first_step or 0
    first, where = max(began, end - WINDOW + 1), _rank_places(history, piece)
    if history.is_sampled:
        return _scores_of_many(history, where, first=first, last=end, is_newest=end == history.last_step)
    known = work_by_column(
        history, columns=WINDOW, first=first, last=end, world=piece.world if piece is not None else None
    )
    if known is None:
        return nobody
    found = score_ranks(known, where)
    if found.steps >= LEAST_STEPS or end - first + 1 < LEAST_STEPS:
        return _with_reasons(found, history, where, first=first, last=end)
    # Of many ranks the history draws means of whole blocks: whoever seems slow there is looked at step by step.
    closer = work_by_step(history, _slowest_ranks(found, where), first=first, last=end)
    if closer is None:
        return found
    sure = score_ranks(closer, where)
    found = StragglerScores(score=found.score | sure.score, named=sure.named, steps=sure.steps)
    return _with_reasons(found, history, where, first=first, last=end)


def _scores_of_many(
    history: RunHistory, where: RankPlaces, *, first: int, last: int, is_newest: bool
) -> StragglerScores:
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
        glance = score_ranks(RankWork(ranks=ranks, step=(first,), own_s=table, wait_s=nothing, held_s=nothing), where)
    else:
        known = work_by_column(history, columns=WINDOW, first=first, last=last)
        glance = score_ranks(known, where) if known is not None else StragglerScores(score={}, named=(), steps=0)
    closer = work_by_step(history, _slowest_ranks(glance, where), first=first, last=last) if glance.score else None
    if closer is None:
        return replace(glance, named=())
    sure = score_ranks(closer, where)
    found = StragglerScores(score=glance.score | sure.score, named=sure.named, steps=sure.steps)
    return _with_reasons(found, history, where, first=first, last=last)


# ---- why a rank is slow ----------------------------------------------------------------------------------------------

WAITS_FOR_CORE = "it waits for the processor: its core is shared"
STANDS_STILL = "it stands still without computing: stopped, swapped out or throttled"
WAITS_FOR_DATA = "it waits for data"
COMPUTES_LONGER = "it computes longer"


def _with_reasons(
    found: StragglerScores, history: RunHistory, where: RankPlaces, *, first: int, last: int
) -> StragglerScores:
    """With what holds each of the named up, by the events of the window of it and of some of its peers."""
    groups = where.same_work(sorted(found.score))
    named = []
    for one in found.named:
        peers = [rank for group in groups if one.rank in group for rank in group if rank != one.rank]
        mine, others = _own_time(history, [one.rank], first, last), _own_time(history, peers[:CLOSER], first, last)
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


def _own_time(history: RunHistory, ranks: Sequence[int], first: int, last: int) -> OwnTime:
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


def _slowest_ranks(found: StragglerScores, where: RankPlaces) -> list[int]:
    """The slowest ranks of all, and beside each some of its peers, evenly spread."""
    slowest = heapq.nlargest(CLOSER, found.score, key=found.score.__getitem__)
    picked = set(slowest)
    for group in where.same_work(sorted(found.score)):
        if picked.intersection(group):
            picked.update(group[:: max(1, len(group) // CLOSER)])
    return sorted(picked)[: 8 * CLOSER]


def score_ranks(known: RankWork, where: RankPlaces) -> StragglerScores:
    """Score ranks whose work is known step by step."""
    rows = {rank: row for row, rank in enumerate(known.ranks)}
    score: dict[int, float] = {}
    named: list[Straggler] = []
    for group in where.same_work(known.ranks):
        at_rows = [rows[rank] for rank in group]
        own, held = known.own_s[at_rows], known.held_s[at_rows]
        medians, limits = _scores_and_limits(own, least=HELD_UP if held.any() else STRAGGLES)
        score |= {rank: value for rank, value in zip(group, medians.tolist(), strict=True) if math.isfinite(value)}
        if own.shape[1] >= LEAST_STEPS:
            slow = medians > limits
            if held.any():  # who is slow even when he has a core
                free, free_limits = _scores_and_limits(np.where(own > held, own - held, np.nan), least=STRAGGLES)
                slow |= free > free_limits
                medians = np.where(slow, np.fmax(medians, free), medians)
            named += [_named_straggler(rank, float(medians[at]), where) for at, rank in enumerate(group) if slow[at]]
    return StragglerScores(
        score=score, named=tuple(sorted(named, key=lambda one: -one.score)), steps=int(known.own_s.shape[1])
    )


def _scores_and_limits(own: Table, *, least: float) -> tuple[Table, Table]:
    """The score of each rank of a group, and what it must pass to be named."""
    ratios = own / median_of_others(own)
    medians = _column_median(ratios)
    return medians, np.maximum(least, 1.0 + np.maximum(SURE * _standard_error(ratios), APART * _median_spread(medians)))


def _named_straggler(rank: int, score: float, where: RankPlaces) -> Straggler:
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


def _rank_places(history: RunHistory, piece: LayoutSpan | None) -> RankPlaces:
    try:
        plan = history.run.plan()
    except PhalanxError:
        plan = {}
    newest = rank_places(plan, history.supervisor())
    return newest if piece is None or not piece.layout else replace(newest, layout=piece.layout)
