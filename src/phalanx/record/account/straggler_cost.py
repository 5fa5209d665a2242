"""The cost of slow ranks: the seconds per step that all ranks would have saved, had none been slower than its peers.

The mean own time of each rank is taken over columns of 20 or more steps, so that jitter evens out. In each group of
ranks with the same work, the others waited for the slowest rank's time less the median of the others. The worst group
counts, because the step waits for it, but no more than the shortest wait of a rank that is not behind.
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
    """The seconds that each step lost to slow ranks."""

    def __init__(self, firsts: Sequence[int] = (), lag_s: Sequence[float] = ()) -> None:
        # 0 for steps before the first column.
        self._firsts, self._lag_s = firsts, [0.0, *lag_s]

    def of_step(self, step: int) -> float:
        """Return the seconds that one step lost."""
        return self._lag_s[bisect.bisect_right(self._firsts, step)]

    def of_steps(self, steps: NDArray[np.int64]) -> Table:
        """Return the seconds that each of many steps lost."""
        lag_s: Table = np.array(self._lag_s)[np.searchsorted(np.array(self._firsts, dtype=np.int64), steps, "right")]
        return lag_s


def straggler_time(run: Run, history: RunHistory | None = None) -> StragglerTime:
    """Return the time that the steps of a run lost to slow ranks."""
    lags = _lags_of_run(run, history)
    return StragglerTime() if lags is None else StragglerTime(*lags)


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
    # The groups with the same work depend on the layout.
    for span in layout_spans(run, history):
        columns = max(1, min(MOST_COLUMNS, span.steps // COLUMN_STEPS))
        rank_work = work_by_column(history, columns=columns, first=span.first, last=span.last, world=span.world)
        if rank_work is None:  # one rank, or no recorded durations: no waiting
            firsts, lost_s = [*firsts, span.first], [*lost_s, 0.0]
            continue
        firsts += rank_work.step
        lost_s += straggler_lags(rank_work, RankPlaces(layout=span.layout, hosts={})).tolist()
    return firsts, lost_s


def straggler_lags(known: RankWork, where: RankPlaces) -> Table:
    """Return the seconds per step lost to slow ranks, by column."""
    rows = {rank: row for row, rank in enumerate(known.ranks)}
    lag_behind_s = np.zeros(known.own_s.shape)  # each rank behind the median of its peers
    for group in where.same_work(known.ranks):
        own = known.own_s[[rows[rank] for rank in group]]
        lag_behind_s[[rows[rank] for rank in group]] = np.nan_to_num(own - median_of_others(own), nan=0.0)
    # A rank that is not behind waits at least as long as the slowest lags. If some rank hardly waits, because another
    # stage is busier still, a faster straggler would have saved no more than that.
    waits = np.where((lag_behind_s <= 0.0) & np.isfinite(known.wait_s), known.wait_s, np.inf).min(axis=0)
    lag_s: Table = np.maximum(np.minimum(lag_behind_s.max(axis=0), waits), 0.0)
    return lag_s
