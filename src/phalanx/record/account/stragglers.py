"""Ranks that hold up the others: the score of every rank, and the names of those that stand out.

The score of a rank in a step is its own time (`lag.work`) over the median of the other ranks that do the same work:
those of its pipeline stage. Over a window of the last 100 steps the median score counts, so that neither a pause nor
an unlucky step names anybody. Stages that differ by design are not compared: an uneven split is the plan's doing, and
of 3,079 jobs at ByteDance slow machines explained 1.7 % of those that straggled (arXiv:2505.05713).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.record.account.lag import Table, Work, median_of_others, work, work_of
from phalanx.record.account.places import Places, places
from phalanx.record.account.segments import Segment, segments

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory

WINDOW = 100  # steps
LEAST_STEPS = 5  # below it nobody is named
STRAGGLES = 1.1  # a rank at work for this much longer than its peers is worth naming
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
    piece = next((one for one in segments(history.run, history) if one.first <= end <= one.last), None)
    began = piece.first if piece is not None else history.first_step or 0
    first, where = max(began, end - WINDOW + 1), _places(history, piece)
    known = work(history, columns=WINDOW, first=first, last=end, world=piece.world if piece is not None else None)
    if known is None:
        return nobody
    found = judge(known, where)
    if found.steps >= LEAST_STEPS or end - first + 1 < LEAST_STEPS:
        return found
    # Of many ranks the history draws means of whole blocks: whoever seems slow there is looked at step by step.
    closer = work_of(history, _suspects(found, where), first=first, last=end)
    if closer is None:
        return found
    sure = judge(closer, where)
    return Scores(score=found.score | sure.score, named=sure.named, steps=sure.steps)


def _suspects(found: Scores, where: Places) -> list[int]:
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
        own = known.own_s[[rows[rank] for rank in group]]
        ratios = own / median_of_others(own)
        medians, unsure = _median(ratios), _standard_error(ratios)
        score |= {rank: float(value) for rank, value in zip(group, medians, strict=True) if np.isfinite(value)}
        if ratios.shape[1] >= LEAST_STEPS:
            limits = np.maximum(STRAGGLES, 1.0 + np.maximum(SURE * unsure, APART * _spread(medians)))
            slow = [(float(medians[at]), rank) for at, rank in enumerate(group) if medians[at] > limits[at]]
            named += [_name(rank, value, where) for value, rank in slow]
    return Scores(score=score, named=tuple(sorted(named, key=lambda one: -one.score)), steps=int(known.own_s.shape[1]))


def _name(rank: int, score: float, where: Places) -> Straggler:
    place, host = where.place(rank), where.host(rank)
    parts = ", ".join(part for part in (place, f"on {host}" if host else "") if part)
    text = f"rank {rank}{f' ({parts})' if parts else ''} is at work {score - 1:.0%} longer than its peers"
    return Straggler(rank=rank, place=place, host=host, score=score, text=text)


def _median(table: Table) -> Table:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank that never said: NaN is the answer
        found: Table = np.nanmedian(table, axis=1)
    return found


def _standard_error(ratios: Table) -> Table:
    """Of each row's median: 1.25 standard deviations over √n, the deviation from the median one (1.48 of it)."""
    deviation = _median(np.abs(ratios - _median(ratios)[:, None]))
    counts = np.maximum(np.isfinite(ratios).sum(axis=1), 1)
    found: Table = np.nan_to_num(1.25 * 1.4826 * deviation / np.sqrt(counts), nan=np.inf)
    return found


def _spread(medians: Table) -> float:
    known = medians[np.isfinite(medians)]
    if len(known) < MANY:
        return 0.0
    return float(1.4826 * np.median(np.abs(known - np.median(known))))


def _places(history: RunHistory, piece: Segment | None) -> Places:
    try:
        plan = history.run.plan()
    except PhalanxError:
        plan = {}
    newest = places(plan, history.supervisor())
    return newest if piece is None or not piece.layout else replace(newest, layout=piece.layout)
