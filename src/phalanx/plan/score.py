"""Predicted time and memory of every layout of a space, and of layouts given one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from phalanx.plan.ask import Ask
from phalanx.plan.build import cases, layout_columns
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.layout import Layout
from phalanx.plan.memory import MemoryUse, predict_memory
from phalanx.plan.space import Bools, Ints, Space
from phalanx.plan.step import StepTimes, predict_step

# Layouts that need more than this many times the usable memory are counted but not kept: no such device is sold.
HOPELESS = 2.0

Part = TypeVar("Part", MemoryUse, StepTimes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """One row per layout of `space` that fits or comes near; `legal` counts all of them."""

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

    def column(self, name: str) -> Ints:
        """A layout column over all rows."""
        table = self.space.base if name in self.space.base else self.space.choice
        return table[name][self.base if name in self.space.base else self.choice]

    def layout(self, row: int) -> Layout:
        """The layout of a row."""
        return self.space.layout(int(self.base[row]), int(self.choice[row]))


def score(space: Space, *, hopeless: float = HOPELESS) -> Scores:
    """Price every legal layout: memory first, then the time of those that come near fitting."""
    parts: list[tuple[Ints, Ints, Floats, Floats]] = []
    legal, usable = 0, 0.0
    for base, choice, columns in space.chunks():
        table = cases(space.ask, columns)
        memory = memory_use(space.ask, table)
        usable, legal = float(np.max(memory.usable)), legal + int(memory.runs.sum())
        # The smallest of a chunk is kept in any case: an answer to "what is the least it needs?".
        least = np.min(memory.total, where=memory.runs, initial=np.inf)
        near = memory.runs & (memory.total <= max(hopeless * usable, least))
        times = step_times(space.ask, table.take(near))
        parts.append((base[near], choice[near], times.step_s, memory.total[near]))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    base, choice, step_s, total = (np.concatenate(column) for column in zip(empty, *parts, strict=True))
    return Scores(
        space=space, base=base, choice=choice, step_s=step_s, memory_bytes=total, usable_bytes=usable, legal=legal
    )


def price(
    ask: Ask, layouts: list[Layout], *, global_sequences: int = 0, machine: Mapping[str, Floats] | None = None
) -> tuple[Cases, StepTimes, MemoryUse]:
    """The full prediction for a few layouts; `machine` columns replace those of the cluster."""
    table = cases(ask, layout_columns(layouts), global_sequences=global_sequences)
    table = replace(table, **machine) if machine else table
    return table, step_times(ask, table), memory_use(ask, table)


def memory_use(ask: Ask, table: Cases) -> MemoryUse:
    """The bytes of every case; where only some layers recompute, between those of all and of none."""
    return _by_layer(ask, table, lambda cases: predict_memory(cases, ask.memory))


def _by_layer(ask: Ask, table: Cases, predict: Callable[[Cases], Part]) -> Part:
    """Every layer adds its own activations and its own time: mix the two predictions by the share that recomputes."""
    mixed = predict(table)
    if ask.recompute_layers is None:
        return mixed
    bare = predict(replace(table, recompute=np.zeros_like(table.recompute)))
    held = np.ceil(table.layers / table.pp)
    share = np.clip(ask.recompute_layers * np.maximum(table.vpp, 1.0) / held, 0.0, 1.0)
    parts = {
        item.name: getattr(mixed, item.name)
        if np.asarray(getattr(mixed, item.name)).dtype == bool
        else share * getattr(mixed, item.name) + (1.0 - share) * getattr(bare, item.name)
        for item in fields(mixed)
    }
    return replace(mixed, **parts)


def step_times(ask: Ask, table: Cases) -> StepTimes:
    """The step of every case, as calibrated where the question brings measured scalars."""
    times = _by_layer(ask, table, lambda cases: predict_step(cases, ask.physics, ask.profile))
    if ask.calibration is None:
        return times
    from phalanx.plan.calibrate import calibrated  # imports scipy: only when asked for

    # Parts that are the same in every case are scalars; the calibration adds them up row by row.
    parts = {item.name: np.broadcast_to(getattr(times, item.name), times.step_s.shape) for item in fields(StepTimes)}
    return calibrated(StepTimes(**parts), ask.calibration)
