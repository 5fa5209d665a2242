"""What slow ranks cost: the seconds of a step that all would have saved, had none been slower than its peers.

Over columns of some 20 steps or more the mean own time of each rank is taken (jitter evens out: it is no straggling).
In each group of ranks that do the same work, the slowest less the median of the others is what the others stood still
for; the worst group counts, since the step waits for it, and no more of it than every rank that is not behind waited.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phalanx.record.account.memberships import layout_spans
from phalanx.record.account.rank_places import RankPlaces
from phalanx.record.account.rank_work import RankWork, Table, median_of_others, work_by_column
from phalanx.record.run import Run

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory

COLUMN_STEPS = 20
MOST_COLUMNS = 256


class StragglerTime:
    """The seconds that steps lost to slow ranks, by their numbers."""

    def __init__(self, firsts: Sequence[int] = (), lag_s: Sequence[float] = ()) -> None:
        self._firsts, self._lag_s = firsts, [0.0, *lag_s]  # 0 before the first

    def of_step(self, step: int) -> float:
        """Of one step."""
        return self._lag_s[bisect.bisect_right(self._firsts, step)]

    def of_steps(self, steps: NDArray[np.int64]) -> Table:
        """Of many."""
        found: Table = np.array(self._lag_s)[np.searchsorted(np.array(self._firsts, dtype=np.int64), steps, "right")]
        return found


def straggler_time(run: Run, history: RunHistory | None = None) -> StragglerTime:
    """What the steps of a run lost."""
    found = _lags_of_run(run, history)
    return StragglerTime() if found is None else StragglerTime(*found)


def _lags_of_run(run: Run, history: RunHistory | None) -> tuple[list[int], list[float]] | None:
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
        known = work_by_column(history, columns=columns, first=piece.first, last=piece.last, world=piece.world)
        if known is None:  # one rank, or none that says: nobody waits
            firsts, lost_s = [*firsts, piece.first], [*lost_s, 0.0]
            continue
        firsts += known.step
        lost_s += straggler_lags(known, RankPlaces(layout=piece.layout, hosts={})).tolist()
    return firsts, lost_s


def straggler_lags(known: RankWork, where: RankPlaces) -> Table:
    """Seconds per step lost to slow ranks, by column."""
    rows = {rank: row for row, rank in enumerate(known.ranks)}
    behind = np.zeros(known.own_s.shape)  # each rank behind the median of its peers
    for group in where.same_work(known.ranks):
        own = known.own_s[[rows[rank] for rank in group]]
        behind[[rows[rank] for rank in group]] = np.nan_to_num(own - median_of_others(own), nan=0.0)
    # Whoever is not behind waits at least as long as the slowest is: where somebody hardly waits, because another
    # stage is busier still, a quicker straggler would have saved no more than that.
    waits = np.where((behind <= 0.0) & np.isfinite(known.wait_s), known.wait_s, np.inf).min(axis=0)
    found: Table = np.maximum(np.minimum(behind.max(axis=0), waits), 0.0)
    return found
