"""Explanations of the alternatives: why each was not chosen, and what would have to change for it to win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from phalanx.plan.case_columns import build_cases, layout_columns
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.layout import Layout
from phalanx.plan.request import PlanRequest
from phalanx.plan.score import price_layouts, step_times
from phalanx.plan.search import FULL_MEMORY, SAME, Candidate
from phalanx.plan.step import StepTimes
from phalanx.units import format_bytes, format_seconds

# The parts of a step, in the order they are printed; they add up to the step.
PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "elementwise_s": "memory-bound work",
    "head_s": "output head and loss",
    "recompute_s": "recompute",
    "launch_s": "kernel launch gaps",
    "tensor_s": "tensor traffic",
    "context_s": "context traffic",
    "expert_s": "expert traffic",
    "pipeline_send_s": "pipeline sends",
    "bubble_s": "pipeline bubble",
    "shard_s": "ZeRO-3 traffic",
    "gradient_s": "gradient traffic",
    "optimizer_s": "optimizer",
    "overhead_s": "host overhead",
}
# The parts on which two layouts are compared. The head counts only where the last stage is the busiest, so a change of
# the busiest stage would look like a head that one of them does not have.
MATRICES = "matrix products and head"
COMPARED = tuple(name for name in PARTS if name != "head_s")
OFFLOADED = "host overhead and offload"  # the name of overhead_s where activations wait for the host link
FETCHED = "ZeRO-3 and host traffic"  # the name of shard_s where parameters come from host memory
NOTHING = 1e-3  # a part less than a thousandth of the other layout's is reported as "none"
# Largest factor, in either direction, by which one machine parameter is varied to find the crossing.
REACH = 8.0
GRID = 97
# column of the cost model -> (name, how the value is written)
LEVERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "nic_bytes_per_s": ("NIC", lambda value: f"{_three_digits(value * 8 / 1e9)} Gb/s per device"),
    "link_bytes_per_s": ("link", lambda value: f"{_three_digits(value / 1e9)} GB/s per device"),
    "memory_bytes_per_s": ("memory bandwidth", lambda value: f"{_three_digits(value / 1e9)} GB/s"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A layout that was not chosen, why, and what would change that."""

    layout: Layout
    idea: str
    step_s: float
    memory_bytes: float
    fits: bool
    slower: float  # step over the best step, minus one
    reason: str
    wins_if: str


def explain_alternative(request: PlanRequest, best: Layout, other: Candidate) -> Alternative:
    """Compare an alternative with the best layout and explain the difference."""
    _, times, memory = price_layouts(request, [best, other.layout])
    gap = float(memory.total[1] - memory.usable[1])
    slower = float(times.step_s[1] / times.step_s[0] - 1.0)
    if other.fits and slower <= 0:
        shares = tuple(float(total / usable) for total, usable in zip(memory.total, memory.usable, strict=True))
        reason, wins_if = _why_not_taken(request, other.layout, shares)
    elif other.fits:
        reason, wins_if = slowest_part(times, (best, other.layout)), crossing_point(request, best, other.layout)
    else:
        reason = f"does not fit: {format_bytes(float(memory.total[1]))} of {format_bytes(float(memory.usable[1]))}"
        wins_if = f"wins with {format_bytes(gap)} more memory per device"
    return Alternative(
        layout=other.layout,
        idea=other.idea,
        step_s=float(times.step_s[1]),
        memory_bytes=float(memory.total[1]),
        fits=other.fits,
        slower=slower,
        reason=reason,
        wins_if=wins_if,
    )


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def part_name(part: str, *layouts: Layout) -> str:
    """Return the name of a part of the step; offload that compute does not hide is part of its name."""
    offloads = {layout.offload for layout in layouts}
    if part == "overhead_s" and "activations" in offloads:
        return OFFLOADED
    return FETCHED if part == "shard_s" and "parameters" in offloads else PARTS[part]


def _why_not_taken(request: PlanRequest, layout: Layout, shares: tuple[float, ...]) -> tuple[str, str]:
    """Return why a layout that is as fast or faster was not taken, and when it would win.

    `shares` are the filled shares of memory of the best layout and of this one.
    """
    fixed = {"micro_batch" if name == "micro" else name: value for name, value in request.fixed.items()}
    conflicts = [f"{name} = {value}" for name, value in fixed.items() if getattr(layout, name) != value]
    if conflicts:
        return f"the job fixes {', '.join(conflicts)}", "wins if the planner may choose it"
    if shares[1] > FULL_MEMORY >= shares[0]:
        return (
            f"fills {shares[1]:.1%} of the usable memory, too close to the limit",
            "set it under [parallel] to use it",
        )
    return (
        f"too close to call (under {SAME - 1:.0%}), and the chosen layout is simpler",
        "set it under [parallel] to use it",
    )


def slowest_part(times: StepTimes, layouts: tuple[Layout, Layout]) -> str:
    """Describe the part of the step where row 1 loses most to row 0, and the next one if it matters."""
    lost_s = {name: seconds_of(times, name, 1) - seconds_of(times, name, 0) for name in COMPARED}
    worst_parts = sorted(lost_s, key=lambda name: -lost_s[name])[:2]
    if lost_s[worst_parts[0]] <= 0:
        return "as fast, but more complex"
    words = [_part_against(times, worst_parts[0], layouts)]
    if lost_s[worst_parts[1]] > 0.5 * lost_s[worst_parts[0]]:
        words.append(_part_against(times, worst_parts[1], layouts))
    return "; ".join(words)


def _part_against(times: StepTimes, name: str, layouts: tuple[Layout, Layout]) -> str:
    other_s, best_s = (seconds_of(times, name, row) for row in (1, 0))
    against = f"against {format_seconds(best_s)}" if best_s > NOTHING * other_s else "against none"
    name_text = MATRICES if name == "matmul_s" else part_name(name, *layouts)
    return f"{name_text} {format_seconds(other_s)} {against}"


def seconds_of(times: StepTimes, name: str, row: int) -> float:
    """Return the seconds of one part in one row; the head counts as a matrix product."""
    names = ("matmul_s", "head_s") if name == "matmul_s" else (name,)
    return sum(float(getattr(times, field)[row]) for field in names)


def crossing_point(request: PlanRequest, best: Layout, other: Layout) -> str:
    """Describe the smallest change of one machine parameter, up to 8x either way, that makes the alternative as fast.

    One grid over all parameters finds the direction, a finer one the value.
    """
    columns = layout_columns([other, best])
    table = build_cases(request, {name: value[:, None] for name, value in columns.items()})
    full_grid = np.linspace(-np.log(REACH), np.log(REACH), GRID)
    sides = [_nearest_win(lead, full_grid) for lead in _lead_seconds(request, table, [full_grid] * len(LEVERS))]
    if all(side is None for side in sides):
        return f"no change of NIC, link or memory speed within {REACH:.0f}x makes it win"
    finer = [
        full_grid if side is None else np.linspace(side, side + _grid_step(side, full_grid), GRID) for side in sides
    ]
    crossings: list[tuple[float, str]] = []
    leads = _lead_seconds(request, table, finer)
    for side, logs, lead, (column, (name, write)) in zip(sides, finer, leads, LEVERS.items(), strict=True):
        if side is not None:
            crossing = _nearest_win(lead, logs)
            factor = float(np.exp(side if crossing is None else crossing))
            sign = "≥" if factor > 1 else "≤"
            value = float(getattr(table, column)) * factor
            crossings.append((abs(np.log(factor)), f"wins with a {name} {sign} {write(value)}"))
    return min(crossings)[1]


def _grid_step(side: float, logs: Floats) -> float:
    """Return one step of the grid towards factor 1, where the best layout still leads."""
    return float(logs[1] - logs[0] if side < 0 else logs[0] - logs[1])


def _nearest_win(lead: Floats, logs: Floats) -> float | None:
    winning_logs = logs[lead <= 0]
    return float(winning_logs[np.argmin(np.abs(winning_logs))]) if winning_logs.size else None


def _lead_seconds(request: PlanRequest, table: Cases, logs: list[Floats]) -> Floats:
    """Return the seconds by which row 1 is ahead of row 0, one row per machine parameter in LEVERS.

    Each parameter is varied alone, by the factors whose logarithms are in `logs`.
    """
    varied = {}
    for index, column in enumerate(LEVERS):
        value = getattr(table, column)
        varied[column] = np.full((len(LEVERS), 1, GRID), value)
        varied[column][index, 0] = value * np.exp(logs[index])
    step_s = step_times(request, replace(table, **varied)).step_s
    return step_s[:, 0] - step_s[:, 1]
