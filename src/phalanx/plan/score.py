"""Predicted time and memory of every layout of a space, and of single layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from phalanx.plan.case_columns import build_cases, layout_columns
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.cpu_step import predict_cpu_step
from phalanx.plan.host_memory import hosts_hold
from phalanx.plan.layout import Layout
from phalanx.plan.memory import MemoryUse, MostMemory, can_run, predict_memory, predict_most_memory
from phalanx.plan.request import PlanRequest
from phalanx.plan.space import Bools, Grid, Ints, Space
from phalanx.plan.step import StepSum, StepTimes, predict_least_step, predict_step, predict_step_sum

# Layouts that need more than this many times the usable memory are counted but not stored: no device is that much
# larger.
MEMORY_CUTOFF = 2.0

Part = TypeVar("Part", MemoryUse, MostMemory, StepSum, StepTimes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutScores:
    """Scores of the layouts of `space`, one row each.

    `legal` counts all legal layouts. Rows are those that fit, and those that nearly fit and would be faster.
    """

    space: Space
    base: Ints
    choice: Ints
    step_s: Floats
    memory_bytes: Floats
    usable_bytes: float
    legal: int

    @property
    def fits(self) -> Bools:
        """A mask of the layouts that fit into memory."""
        return self.memory_bytes <= self.usable_bytes

    def column(self, name: str, rows: Ints | slice = slice(None)) -> Ints:
        """Return a layout column over all rows, or over some."""
        if name in self.space.base:
            return self.space.base[name][self.base[rows]]
        return self.space.choice[name][self.choice[rows]]

    def layout(self, row: int) -> Layout:
        """Return the layout of a row."""
        return self.space.layout(int(self.base[row]), int(self.choice[row]))


def score_layouts(space: Space, *, memory_cutoff: float = MEMORY_CUTOFF) -> LayoutScores:
    """Score every legal layout: memory first, then the time of those that nearly fit."""
    row_groups: list[tuple[Ints, Ints, Floats, Floats]] = []
    legal, usable_bytes, bound_bytes = 0, 0.0, np.inf
    for grid in space.grids():
        table = build_cases(space.request, grid.columns)
        usable_bytes = float(np.max(table.memory_bytes * space.request.memory.usable))
        runs = np.broadcast_to(_may_run(space.request, table) & grid.legal, grid.shape)
        if not runs.any():
            continue
        if not runs.any(axis=(0, 1, 2, 3)).all():
            grid, runs = grid.around(runs)
            table = build_cases(space.request, grid.columns)
        legal += int(np.count_nonzero(runs))
        memory = most_memory(space.request, table, limit_bytes=memory_cutoff * usable_bytes)
        total = np.broadcast_to(memory.total, grid.shape)
        is_near = runs & (total <= memory_cutoff * usable_bytes)
        if is_near.any():
            bound_bytes = memory_cutoff * usable_bytes
        elif bound_bytes > memory_cutoff * usable_bytes:
            # The smallest layout is always kept, so that a message can state the least memory the job needs.
            total = np.broadcast_to(most_memory(space.request, table).total, grid.shape)
            bound_bytes = min(bound_bytes, float(np.min(total, where=runs, initial=np.inf)))
            is_near = runs & (total <= bound_bytes)
        if is_near.any():
            row_groups.append(_price_rows(space, grid, is_near, total))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    base, choice, step_s, memory_bytes = (np.concatenate(column) for column in zip(empty, *row_groups, strict=True))
    kept_rows = np.flatnonzero(memory_bytes <= bound_bytes)
    if np.ptp(space.choice["offload"][space.product]) == 0:
        # Of the layouts that do not fit, a search names only those that would be faster than all that do.
        is_fitting = memory_bytes <= usable_bytes
        kept_rows = kept_rows[(is_fitting | (step_s < np.min(step_s, where=is_fitting, initial=np.inf)))[kept_rows]]
    order = kept_rows[np.argsort(base[kept_rows] * space.choice["zero"].size + choice[kept_rows])]
    return LayoutScores(
        space=space,
        base=base[order],
        choice=choice[order],
        step_s=step_s[order],
        memory_bytes=memory_bytes[order],
        usable_bytes=usable_bytes,
        legal=legal,
    )


def _may_run(request: PlanRequest, table: Cases) -> Bools:
    """Return a mask of the layouts that can run, in host memory as well; an offload fixed by hand is not checked."""
    runs = can_run(table, request.memory)
    return runs & hosts_hold(request, table) if np.any(table.offload) and "offload" not in request.fixed else runs


def least_seconds(space: Space) -> Floats:
    """Return a lower bound on the step time of each base row, over all its ways to share, recompute and offload.

    It is inf where no layout of the row can run. Sharing adds traffic and offload adds transfers to a step without
    either; the two parts they may shorten, the update and the traffic of gradients, are left out.
    """
    zero = space.choice["zero"][space.product[:, 0, 0]]
    row = int(np.argmin(zero))
    bare_space = replace(space, product=space.product[row : row + 1, :1])
    seconds = np.full(space.base["tp"].size, np.inf)
    for grid in bare_space.grids():
        table = build_cases(space.request, grid.columns | {"offload": np.zeros(())})
        step_s = _least_step_s(space.request, table)
        runs = np.broadcast_to(grid.legal & can_run(table, space.request.memory), grid.shape)
        base_step_s = np.where(runs, step_s, np.inf).min(axis=(0, 1, 2))
        is_used = np.isfinite(base_step_s)
        seconds[grid.base[is_used]] = base_step_s[is_used]
    return seconds


def _least_step_s(request: PlanRequest, table: Cases) -> Floats:
    if request.calibration is None and request.cluster.cpu is None:
        return _by_layer(
            request, table, lambda cases: predict_least_step(cases, request.physics, request.profile)
        ).step_s
    times = step_times(request, table)
    return times.step_s - times.gradient_s - times.optimizer_s - times.shard_s


def join_scores(scores: LayoutScores, others: list[LayoutScores], *, limit_s: float) -> LayoutScores:
    """Join the scores of parts of one space.

    With a finite limit, only those rows of `others` are taken that fit and are faster than `limit_s`.
    """
    columns = [(scores.base, scores.choice, scores.step_s, scores.memory_bytes)]
    for part_scores in others:
        rows = np.flatnonzero((part_scores.step_s < limit_s) & (part_scores.fits | ~np.isfinite(limit_s)))
        columns.append(
            (part_scores.base[rows], part_scores.choice[rows], part_scores.step_s[rows], part_scores.memory_bytes[rows])
        )
    base, choice, step_s, memory_bytes = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(base * scores.space.choice["zero"].size + choice)
    return replace(
        scores,
        base=base[order],
        choice=choice[order],
        step_s=step_s[order],
        memory_bytes=memory_bytes[order],
        usable_bytes=max(part_scores.usable_bytes for part_scores in (scores, *others)),
        legal=scores.legal + sum(part_scores.legal for part_scores in others),
    )


def _price_rows(space: Space, grid: Grid, near: Bools, total: Floats) -> tuple[Ints, Ints, Floats, Floats]:
    """Return base row, choice row, seconds and bytes of the layouts of a grid that `near` selects."""
    small, inside = grid.around(near)
    step_s = step_seconds(space.request, build_cases(space.request, small.columns))
    return *small.rows(inside), np.broadcast_to(step_s, small.shape)[inside], total[near]


def price_layouts(
    request: PlanRequest,
    layouts: list[Layout],
    *,
    global_sequences: int = 0,
    machine: Mapping[str, Floats] | None = None,
) -> tuple[Cases, StepTimes, MemoryUse]:
    """Return the full prediction for a few layouts; `machine` columns replace those of the cluster."""
    table = build_cases(request, layout_columns(layouts), global_sequences=global_sequences)
    table = replace(table, **machine) if machine else table
    return table, step_times(request, table), memory_use(request, table)


def most_memory(request: PlanRequest, table: Cases, *, limit_bytes: float = np.inf) -> MostMemory:
    """Return the total bytes of every case; totals beyond `limit_bytes` may be rough (see `predict_most_memory`)."""
    if request.recompute_layers is not None:
        # The mean of two predictions, of which one may be beyond the limit.
        limit_bytes = np.inf
    return _by_layer(request, table, lambda cases: predict_most_memory(cases, request.memory, limit_bytes=limit_bytes))


def memory_use(request: PlanRequest, table: Cases) -> MemoryUse:
    """Return the bytes of every case by part; where only some layers recompute, between those of all and of none."""
    return _by_layer(request, table, lambda cases: predict_memory(cases, request.memory))


def _by_layer(request: PlanRequest, table: Cases, predict: Callable[[Cases], Part]) -> Part:
    """Predict with the share of layers that recompute, by mixing the predictions for all layers and for none.

    This is exact in so far as every layer adds its own activations and its own time.
    """
    mixed = predict(table)
    if request.recompute_layers is None:
        return mixed
    bare = predict(replace(table, recompute=np.zeros_like(table.recompute)))
    layers_per_stage = np.ceil(table.layers / table.pp)
    share = np.clip(request.recompute_layers * np.maximum(table.vpp, 1.0) / layers_per_stage, 0.0, 1.0)
    mixed_values = {
        item.name: getattr(mixed, item.name)
        if np.asarray(getattr(mixed, item.name)).dtype == bool
        else share * getattr(mixed, item.name) + (1.0 - share) * getattr(bare, item.name)
        for item in fields(mixed)
    }
    return replace(mixed, **mixed_values)


def _predict_step(request: PlanRequest, table: Cases) -> StepTimes:
    """Predict the step, on CPU cores with their measured rates, else with the accelerator model."""
    if request.cluster.cpu is not None:
        return predict_cpu_step(table, request.cluster.cpu)
    return predict_step(table, request.physics, request.profile)


def step_seconds(request: PlanRequest, table: Cases) -> Floats:
    """Return `step_times(…).step_s`, computing the parts only where the sum needs them."""
    if request.calibration is not None or request.cluster.cpu is not None:
        return step_times(request, table).step_s
    return _by_layer(request, table, lambda cases: predict_step_sum(cases, request.physics, request.profile)).step_s


def step_times(request: PlanRequest, table: Cases) -> StepTimes:
    """Return the step time of every case by part, calibrated where the request has measured factors."""
    times = _by_layer(request, table, lambda cases: _predict_step(request, cases))
    if request.calibration is None:
        return times
    # Imports scipy, so only where a calibration is used.
    from phalanx.plan.calibrate import apply_calibration

    # Parts that are the same in every case are scalars; the calibration adds them up row by row.
    parts = {item.name: np.broadcast_to(getattr(times, item.name), times.step_s.shape) for item in fields(StepTimes)}
    return apply_calibration(StepTimes(**parts), request.calibration)
