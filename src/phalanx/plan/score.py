"""Predicted time and memory of every layout of a space, and of layouts given one by one."""

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

# Layouts that need more than this many times the usable memory are counted but not kept: no such device is sold.
MEMORY_CUTOFF = 2.0

Part = TypeVar("Part", MemoryUse, MostMemory, StepSum, StepTimes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutScores:
    """One row per layout of `space` that fits, or comes near and would be faster; `legal` counts all of them."""

    space: Space
    base: Ints
    choice: Ints
    step_s: Floats
    memory_bytes: Floats
    usable_bytes: float
    legal: int

    @property
    def fits(self) -> Bools:
        """Which layouts fit into memory."""
        return self.memory_bytes <= self.usable_bytes

    def column(self, name: str, rows: Ints | slice = slice(None)) -> Ints:
        """A layout column over all rows, or some."""
        if name in self.space.base:
            return self.space.base[name][self.base[rows]]
        return self.space.choice[name][self.choice[rows]]

    def layout(self, row: int) -> Layout:
        """The layout of a row."""
        return self.space.layout(int(self.base[row]), int(self.choice[row]))


def score_layouts(space: Space, *, memory_cutoff: float = MEMORY_CUTOFF) -> LayoutScores:
    """Price every legal layout: memory first, then the time of those that come near fitting."""
    parts: list[tuple[Ints, Ints, Floats, Floats]] = []
    legal, usable, bound = 0, 0.0, np.inf
    for grid in space.grids():
        table = build_cases(space.request, grid.columns)
        usable = float(np.max(table.memory_bytes * space.request.memory.usable))
        runs = np.broadcast_to(_may_run(space.request, table) & grid.legal, grid.shape)
        if not runs.any():
            continue
        if not runs.any(axis=(0, 1, 2, 3)).all():
            grid, runs = grid.around(runs)
            table = build_cases(space.request, grid.columns)
        legal += int(np.count_nonzero(runs))
        memory = most_memory(space.request, table, limit_bytes=memory_cutoff * usable)
        total = np.broadcast_to(memory.total, grid.shape)
        near = runs & (total <= memory_cutoff * usable)
        if near.any():
            bound = memory_cutoff * usable
        elif bound > memory_cutoff * usable:
            # The smallest of all is kept in any case: an answer to "what is the least it needs?".
            total = np.broadcast_to(most_memory(space.request, table).total, grid.shape)
            bound = min(bound, float(np.min(total, where=runs, initial=np.inf)))
            near = runs & (total <= bound)
        if near.any():
            parts.append(_price_rows(space, grid, near, total))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    base, choice, step_s, memory_bytes = (np.concatenate(column) for column in zip(empty, *parts, strict=True))
    kept = np.flatnonzero(memory_bytes <= bound)
    if np.ptp(space.choice["offload"][space.product]) == 0:
        # Of layouts that do not fit a search names those that would be faster than all that do.
        fits = memory_bytes <= usable
        kept = kept[(fits | (step_s < np.min(step_s, where=fits, initial=np.inf)))[kept]]
    order = kept[np.argsort(base[kept] * space.choice["zero"].size + choice[kept])]
    return LayoutScores(
        space=space,
        base=base[order],
        choice=choice[order],
        step_s=step_s[order],
        memory_bytes=memory_bytes[order],
        usable_bytes=usable,
        legal=legal,
    )


def _may_run(request: PlanRequest, table: Cases) -> Bools:
    """What can run, in host memory as well; an offload fixed by hand is taken at its word."""
    runs = can_run(table, request.memory)
    return runs & hosts_hold(request, table) if np.any(table.offload) and "offload" not in request.fixed else runs


def least_seconds(space: Space) -> Floats:
    """A step that no layout of a base row is faster than, however it shares, recomputes and offloads; inf if none runs.

    Sharing adds traffic and offload adds transfers to a step without either; what both may shorten, the update and the
    traffic of gradients, is left out.
    """
    zero = space.choice["zero"][space.product[:, 0, 0]]
    least = int(np.argmin(zero))
    bare = replace(space, product=space.product[least : least + 1, :1])
    seconds = np.full(space.base["tp"].size, np.inf)
    for grid in bare.grids():
        table = build_cases(space.request, grid.columns | {"offload": np.zeros(())})
        step_s = _least_step_s(space.request, table)
        runs = np.broadcast_to(grid.legal & can_run(table, space.request.memory), grid.shape)
        of_base = np.where(runs, step_s, np.inf).min(axis=(0, 1, 2))
        used = np.isfinite(of_base)
        seconds[grid.base[used]] = of_base[used]
    return seconds


def _least_step_s(request: PlanRequest, table: Cases) -> Floats:
    if request.calibration is None and request.cluster.cpu is None:
        return _by_layer(
            request, table, lambda cases: predict_least_step(cases, request.physics, request.profile)
        ).step_s
    times = step_times(request, table)
    return times.step_s - times.gradient_s - times.optimizer_s - times.shard_s


def join_scores(scores: LayoutScores, others: list[LayoutScores], *, limit_s: float) -> LayoutScores:
    """The rows of scores over parts of one space; of the others only those that fit and stay below a finite limit."""
    columns = [(scores.base, scores.choice, scores.step_s, scores.memory_bytes)]
    for other in others:
        rows = np.flatnonzero((other.step_s < limit_s) & (other.fits | ~np.isfinite(limit_s)))
        columns.append((other.base[rows], other.choice[rows], other.step_s[rows], other.memory_bytes[rows]))
    base, choice, step_s, memory_bytes = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(base * scores.space.choice["zero"].size + choice)
    return replace(
        scores,
        base=base[order],
        choice=choice[order],
        step_s=step_s[order],
        memory_bytes=memory_bytes[order],
        usable_bytes=max(one.usable_bytes for one in (scores, *others)),
        legal=scores.legal + sum(other.legal for other in others),
    )


def _price_rows(space: Space, grid: Grid, near: Bools, total: Floats) -> tuple[Ints, Ints, Floats, Floats]:
    """Base row, choice row, seconds and bytes of the layouts of a grid that come near fitting."""
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
    """The full prediction for a few layouts; `machine` columns replace those of the cluster."""
    table = build_cases(request, layout_columns(layouts), global_sequences=global_sequences)
    table = replace(table, **machine) if machine else table
    return table, step_times(request, table), memory_use(request, table)


def most_memory(request: PlanRequest, table: Cases, *, limit_bytes: float = np.inf) -> MostMemory:
    """The bytes of every case without their parts, as exact as `predict_most_memory` is beyond a limit."""
    if request.recompute_layers is not None:
        limit_bytes = np.inf  # the mean of two counts, of which one may be beyond it
    return _by_layer(request, table, lambda cases: predict_most_memory(cases, request.memory, limit_bytes=limit_bytes))


def memory_use(request: PlanRequest, table: Cases) -> MemoryUse:
    """The bytes of every case; where only some layers recompute, between those of all and of none."""
    return _by_layer(request, table, lambda cases: predict_memory(cases, request.memory))


def _by_layer(request: PlanRequest, table: Cases, predict: Callable[[Cases], Part]) -> Part:
    """Every layer adds its own activations and its own time: mix the two predictions by the share that recomputes."""
    mixed = predict(table)
    if request.recompute_layers is None:
        return mixed
    bare = predict(replace(table, recompute=np.zeros_like(table.recompute)))
    held = np.ceil(table.layers / table.pp)
    share = np.clip(request.recompute_layers * np.maximum(table.vpp, 1.0) / held, 0.0, 1.0)
    parts = {
        item.name: getattr(mixed, item.name)
        if np.asarray(getattr(mixed, item.name)).dtype == bool
        else share * getattr(mixed, item.name) + (1.0 - share) * getattr(bare, item.name)
        for item in fields(mixed)
    }
    return replace(mixed, **parts)


def _predict_step(request: PlanRequest, table: Cases) -> StepTimes:
    """By the constants of measured cores where this machine's are meant, else by the physics of accelerators."""
    if request.cluster.cpu is not None:
        return predict_cpu_step(table, request.cluster.cpu)
    return predict_step(table, request.physics, request.profile)


def step_seconds(request: PlanRequest, table: Cases) -> Floats:
    """`step_times` without its parts, unless they are needed to make the sum."""
    if request.calibration is not None or request.cluster.cpu is not None:
        return step_times(request, table).step_s
    return _by_layer(request, table, lambda cases: predict_step_sum(cases, request.physics, request.profile)).step_s


def step_times(request: PlanRequest, table: Cases) -> StepTimes:
    """The step of every case, as calibrated where the question brings measured scalars."""
    times = _by_layer(request, table, lambda cases: _predict_step(request, cases))
    if request.calibration is None:
        return times
    from phalanx.plan.calibrate import apply_calibration  # imports scipy: only when asked for

    # Parts that are the same in every case are scalars; the calibration adds them up row by row.
    parts = {item.name: np.broadcast_to(getattr(times, item.name), times.step_s.shape) for item in fields(StepTimes)}
    return apply_calibration(StepTimes(**parts), request.calibration)
