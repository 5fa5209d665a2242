"""Own time: the seconds per step in which each rank worked itself, and in which it waited for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.io.values import integer, number

if TYPE_CHECKING:
    from phalanx.record.archive.history import Mesh, RunHistory

MOST_S = 1e9  # 30 years: a longer step is a damaged record
# [rank][column of steps], seconds, NaN where unknown.
Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Seconds per step in which ranks worked and waited, by columns of steps."""

    ranks: tuple[int, ...]
    step: tuple[int, ...]  # first step of each column
    own_s: Table
    wait_s: Table
    held_s: Table  # part of `own_s` without computing; 0 where unknown


def work_by_column(
    history: RunHistory,
    *,
    columns: int,
    first: int | None = None,
    last: int | None = None,
    world: int | None = None,
) -> RankWork | None:
    """Return the own time of every rank below `world`; None if fewer than two ranks recorded it.

    Own time is the time a rank spent in the step without waiting for others: `duration_s` less `wait_s`. So a rank
    that sleeps, swaps, has no core or loads data counts as slow like one that computes slowly. Where `wait_s` is
    unknown, `compute_s` is used.
    """
    span: dict[str, Any] = {"columns": columns, "first": first, "last": last}
    waits, took = history.meshes(("wait_s", "duration_s"), **span)
    own, wait = _mesh_table(took), _mesh_table(waits)
    if took.ranks != waits.ranks or own.shape != wait.shape or not np.isfinite(own - wait).any():
        computed = history.mesh("compute_s", **span)
        took, own, wait = computed, _mesh_table(computed), np.full(_mesh_table(computed).shape, np.nan)
    else:
        own = own - wait
    own = np.where(own > 0.0, own, np.nan)
    held_s = np.zeros(own.shape)
    if "cpu_s" in history.names():
        compute_s, cpu_s = (_mesh_table(mesh) for mesh in history.meshes(("compute_s", "cpu_s"), **span))
        if compute_s.shape == cpu_s.shape == own.shape:
            held_s = np.nan_to_num(np.maximum(compute_s - cpu_s, 0.0), nan=0.0)
    rows_kept = [row for row, rank in enumerate(took.ranks) if world is None or rank < world]
    own, wait, held_s = own[rows_kept], wait[rows_kept], held_s[rows_kept]
    if own.shape[1] == 0 or int(np.isfinite(own).any(axis=1).sum()) < 2:
        return None
    ranks = tuple(took.ranks[row] for row in rows_kept)
    wait = np.where(wait >= 0.0, wait, np.nan)
    return RankWork(ranks=ranks, step=took.step, own_s=own, wait_s=wait, held_s=held_s)


def work_by_step(history: RunHistory, ranks: Sequence[int], *, first: int, last: int) -> RankWork | None:
    """Return the same for some ranks, step by step, from their events."""
    steps = tuple(range(first, last + 1))
    own, wait, held_s = (np.full((len(ranks), len(steps)), value) for value in (np.nan, np.nan, 0.0))
    for row, rank in enumerate(ranks):
        for event in history.steps(rank, first, last):
            step, took_s, waited_s = integer(event, "step"), number(event, "duration_s"), number(event, "wait_s")
            computed_s = number(event, "compute_s") if took_s is None or waited_s is None else took_s - waited_s
            if step is not None and first <= step <= last and computed_s is not None and 0.0 < computed_s < MOST_S:
                own[row, step - first] = computed_s
                wait[row, step - first] = np.nan if waited_s is None else waited_s
                if (cpu_s := number(event, "cpu_s")) is not None:
                    held_s[row, step - first] = max(0.0, (number(event, "compute_s") or 0.0) - cpu_s)
    if int(np.isfinite(own).any(axis=1).sum()) < 2:
        return None
    return RankWork(ranks=tuple(ranks), step=steps, own_s=own, wait_s=wait, held_s=held_s)


def _mesh_table(mesh: Mesh) -> Table:
    """Return the mesh's values as an array, with NaN for values that cannot be durations.

    The mesh may lack ranks or columns.
    """
    rows = [[np.nan if value is None else value for value in row] for row in mesh.values]
    values = np.array(rows, dtype=np.float64).reshape(len(mesh.ranks), len(mesh.step))
    return np.where(np.abs(values) < MOST_S, values, np.nan)


def median_of_others(values: Table) -> Table:
    """Return, for each row of a table, the median of the other rows, column by column; NaN where there are none.

    >>> median_of_others(np.array([[1.0], [2.0], [9.0]])).ravel().tolist()
    [5.5, 5.0, 1.5]
    """
    order = np.argsort(values, axis=0)  # NaN last
    ranked = np.take_along_axis(values, order, axis=0)
    place = np.argsort(order, axis=0)
    is_known = np.isfinite(values)
    others_count = np.broadcast_to(is_known.sum(axis=0), values.shape) - is_known
    return 0.5 * (
        _nth_value(ranked, place, (others_count - 1) // 2, others_count)
        + _nth_value(ranked, place, others_count // 2, others_count)
    )


def _nth_value(ranked: Table, place: Any, count: Any, others: Any) -> Table:
    """Return the n-th smallest of the other values of a column."""
    index = np.clip(count + (count >= place), 0, ranked.shape[0] - 1)
    values: Table = np.where(others > 0, np.take_along_axis(ranked, index, axis=0), np.nan)
    return values
