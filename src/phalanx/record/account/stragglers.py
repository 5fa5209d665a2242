"""Stragglers: the score of every rank, and the names of the ranks that hold up the others.

The score of a rank in a step is its own time (rank_work.py) over the median of the other ranks with the same work,
those of its pipeline stage. Over a window of the last 100 steps the median score counts, so that a single pause or a
slow step names no rank. Time without computing counts as own time too, since the others wait for it all the same. But
ranks that share cores do not get them evenly, so such time must be longer before a rank is named. Stages that differ
by design are not compared: an uneven split is the plan's choice, and of 3,079 jobs at ByteDance slow machines
explained 1.7 % of those that straggled (arXiv:2505.05713).
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
LEAST_STEPS = 5  # with fewer steps no rank is named
# A rank whose own time is this many times its peers' is named.
STRAGGLES = 1.1
# The same if the difference is time without a core.
HELD_UP = 1.5
# Standard errors by which a score must exceed 1, so that noise names no rank.
SURE = 5.0
# Spreads of its peers' scores by which a rank's score must stand out, in groups of MANY ranks or more.
APART = 6.0
# Number of ranks that are examined step by step, in a large run.
CLOSER = 16
# From this number of ranks on, the spread of their scores is used.
MANY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    place: str
    host: str
    score: float  # own time over the median of its peers
    text: str
    reason: str = ""  # the cause, as far as the record shows


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerScores:
    """The score of every rank; above 1 is slower than its peers."""

    score: dict[int, float]
    named: tuple[Straggler, ...]  # worst first
    steps: int  # number of steps behind each score


def find_stragglers(history: RunHistory) -> list[Straggler]:
    """Return the stragglers of the last 100 steps, worst first."""
    return list(straggler_scores(history).named)


def straggler_scores(history: RunHistory, *, last: int | None = None) -> StragglerScores:
    """Return the scores over the window that ends with step `last`, or with the newest step."""
    end = history.last_step if last is None else last
    return history.once(("straggler scores", end), lambda: _scores_until(history, end))


def _scores_until(history: RunHistory, end: int | None) -> StragglerScores:
    no_scores = StragglerScores(score={}, named=(), steps=0)
    if end is None or len(history.ranks) < 2:
        return no_scores
    # Ranks of another layout do other work: the window does not extend back into it.
    span_of_window = next((span for span in layout_spans(history.run, history) if span.first <= end <= span.last), None)
    began = span_of_window.first if span_of_window is not None else history.first_step or 0
    first, where = max(began, end - WINDOW + 1), _rank_places(history, span_of_window)
    if history.is_sampled:
        return _scores_of_many(history, where, first=first, last=end, is_newest=end == history.last_step)
    rank_work = work_by_column(
        history,
        columns=WINDOW,
        first=first,
        last=end,
        world=span_of_window.world if span_of_window is not None else None,
    )
    if rank_work is None:
        return no_scores
    scores = score_ranks(rank_work, where)
    if scores.steps >= LEAST_STEPS or end - first + 1 < LEAST_STEPS:
        return _with_reasons(scores, history, where, first=first, last=end)
    # With many ranks the history returns means of whole blocks: ranks that seem slow there are read step by step.
    closer = work_by_step(history, _slowest_ranks(scores, where), first=first, last=end)
    if closer is None:
        return scores
    sure = score_ranks(closer, where)
    scores = StragglerScores(score=scores.score | sure.score, named=sure.named, steps=sure.steps)
    return _with_reasons(scores, history, where, first=first, last=end)


def _scores_of_many(
    history: RunHistory, where: RankPlaces, *, first: int, last: int, is_newest: bool
) -> StragglerScores:
    """Score the ranks of a run that is too large to read all of them.

    Every rank is scored by the newest block of its index, and the slowest ones step by step. For a window in the past,
    only the ranks of the sample are scored.
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
        rank_work = work_by_column(history, columns=WINDOW, first=first, last=last)
        glance = (
            score_ranks(rank_work, where) if rank_work is not None else StragglerScores(score={}, named=(), steps=0)
        )
    closer = work_by_step(history, _slowest_ranks(glance, where), first=first, last=last) if glance.score else None
    if closer is None:
        return replace(glance, named=())
    sure = score_ranks(closer, where)
    scores = StragglerScores(score=glance.score | sure.score, named=sure.named, steps=sure.steps)
    return _with_reasons(scores, history, where, first=first, last=last)


# ---- the causes of slowness ------------------------------------------------------------------------------------------

WAITS_FOR_CORE = "it waits for the processor: its core is shared"
STANDS_STILL = "it stands still without computing: stopped, swapped out or throttled"
WAITS_FOR_DATA = "it waits for data"
COMPUTES_LONGER = "it computes longer"


def _with_reasons(
    found: StragglerScores, history: RunHistory, where: RankPlaces, *, first: int, last: int
) -> StragglerScores:
    """Add the cause to each straggler, from the events of the window of the rank and of some of its peers."""
    groups = where.same_work(sorted(found.score))
    named = []
    for straggler in found.named:
        peers = [rank for group in groups if straggler.rank in group for rank in group if rank != straggler.rank]
        rank_time, peer_time = (
            _own_time(history, [straggler.rank], first, last),
            _own_time(history, peers[:CLOSER], first, last),
        )
        reason = reason_of(rank_time, peer_time)
        named.append(
            replace(straggler, reason=reason, text=f"{straggler.text}: {reason}" if reason else straggler.text)
        )
    return replace(found, named=tuple(named))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTime:
    """The components of own time, in seconds, as medians over steps and ranks; None where unknown."""

    computed_s: float | None
    held_s: float | None  # neither computing nor waiting for other ranks
    core_wait_s: float | None  # part of it (on a GPU host, part of computed_s): ready to run without a core
    data_s: float | None


def _own_time(history: RunHistory, ranks: Sequence[int], first: int, last: int) -> OwnTime:
    samples: dict[str, list[float]] = {"computed_s": [], "held_s": [], "core_wait_s": [], "data_s": []}
    for rank in ranks:
        for event in history.steps(rank, first, last):
            compute_s, cpu_s = number(event, "compute_s"), number(event, "cpu_s")
            if compute_s is not None:
                samples["computed_s"].append(compute_s if cpu_s is None else min(compute_s, cpu_s))
            if compute_s is not None and cpu_s is not None:
                samples["held_s"].append(max(0.0, compute_s - cpu_s))
            for name in ("core_wait_s", "data_s"):
                if (value := number(event, name)) is not None:
                    samples[name].append(value)
    return OwnTime(**{name: float(np.median(values)) if values else None for name, values in samples.items()})


def reason_of(mine: OwnTime, others: OwnTime) -> str:
    """Return the component in which a rank is furthest behind its peers, in words; empty if it is behind in none.

    >>> alike = OwnTime(computed_s=1.0, held_s=0.1, core_wait_s=0.1, data_s=0.0)
    >>> reason_of(replace(alike, held_s=2.0, core_wait_s=1.9), alike)
    'it waits for the processor: its core is shared'
    """
    lag_s = {
        name: (getattr(mine, name) or 0.0) - (getattr(others, name) or 0.0)
        for name in ("computed_s", "held_s", "core_wait_s", "data_s")
    }
    shared = lag_s["core_wait_s"]
    # On a GPU host, time without a core is part of the time in which the device seems to compute.
    held_behind = lag_s["held_s"] if mine.held_s is not None else shared
    parts = {WAITS_FOR_DATA: lag_s["data_s"], COMPUTES_LONGER: lag_s["computed_s"]}
    parts[WAITS_FOR_CORE if shared >= 0.5 * held_behind else STANDS_STILL] = held_behind
    reason, most = max(parts.items(), key=lambda part: part[1])
    return reason if most > 0.0 else ""


def _slowest_ranks(found: StragglerScores, where: RankPlaces) -> list[int]:
    """Return the slowest ranks of all, and some of the peers of each, evenly spread."""
    slowest = heapq.nlargest(CLOSER, found.score, key=found.score.__getitem__)
    picked = set(slowest)
    for group in where.same_work(sorted(found.score)):
        if picked.intersection(group):
            picked.update(group[:: max(1, len(group) // CLOSER)])
    return sorted(picked)[: 8 * CLOSER]


def score_ranks(known: RankWork, where: RankPlaces) -> StragglerScores:
    """Score the ranks of a table of own times by step."""
    rows = {rank: row for row, rank in enumerate(known.ranks)}
    score: dict[int, float] = {}
    named: list[Straggler] = []
    for group in where.same_work(known.ranks):
        at_rows = [rows[rank] for rank in group]
        own, held_s = known.own_s[at_rows], known.held_s[at_rows]
        medians, limits = _scores_and_limits(own, least=HELD_UP if held_s.any() else STRAGGLES)
        score |= {rank: value for rank, value in zip(group, medians.tolist(), strict=True) if math.isfinite(value)}
        if own.shape[1] >= LEAST_STEPS:
            slow = medians > limits
            # Ranks that are slow even in the time that they have a core.
            if held_s.any():
                free, free_limits = _scores_and_limits(np.where(own > held_s, own - held_s, np.nan), least=STRAGGLES)
                slow |= free > free_limits
                medians = np.where(slow, np.fmax(medians, free), medians)
            named += [_named_straggler(rank, float(medians[at]), where) for at, rank in enumerate(group) if slow[at]]
    return StragglerScores(
        score=score, named=tuple(sorted(named, key=lambda straggler: -straggler.score)), steps=int(known.own_s.shape[1])
    )


def _scores_and_limits(own: Table, *, least: float) -> tuple[Table, Table]:
    """Return the score of each rank of a group, and the limit above which it is named."""
    ratios = own / median_of_others(own)
    medians = _column_median(ratios)
    return medians, np.maximum(least, 1.0 + np.maximum(SURE * _standard_error(ratios), APART * _median_spread(medians)))


def _named_straggler(rank: int, score: float, where: RankPlaces) -> Straggler:
    place, host = where.place(rank), where.host(rank)
    parts = ", ".join(detail for detail in (place, f"on {host}" if host else "") if detail)
    text = f"rank {rank}{f' ({parts})' if parts else ''} is at work {score - 1:.0%} longer than its peers"
    return Straggler(rank=rank, place=place, host=host, score=score, text=text)


def _column_median(table: Table) -> Table:
    with warnings.catch_warnings():
        # A rank without any value gives NaN, as intended.
        warnings.simplefilter("ignore", RuntimeWarning)
        medians: Table = np.nanmedian(table, axis=1)
    return medians


def _standard_error(ratios: Table) -> Table:
    """Return the standard error of each row's median: 1.25 σ/√n, where σ is 1.4826 median absolute deviations."""
    deviation = _column_median(np.abs(ratios - _column_median(ratios)[:, None]))
    counts = np.maximum(np.isfinite(ratios).sum(axis=1), 1)
    errors: Table = np.nan_to_num(1.25 * 1.4826 * deviation / np.sqrt(counts), nan=np.inf)
    return errors


def _median_spread(medians: Table) -> float:
    finite_medians = medians[np.isfinite(medians)]
    if len(finite_medians) < MANY:
        return 0.0
    return float(1.4826 * np.median(np.abs(finite_medians - np.median(finite_medians))))


def _rank_places(history: RunHistory, piece: LayoutSpan | None) -> RankPlaces:
    try:
        plan = history.run.plan()
    except PhalanxError:
        plan = {}
    newest = rank_places(plan, history.supervisor())
    return newest if piece is None or not piece.layout else replace(newest, layout=piece.layout)
