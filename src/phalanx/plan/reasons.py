"""Why a runner-up lost, and what would have to change for it to win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.plan.ask import Ask
from phalanx.plan.cases import Floats
from phalanx.plan.layout import Layout
from phalanx.plan.score import price
from phalanx.plan.search import Candidate
from phalanx.plan.step import StepTimes
from phalanx.units import format_bytes, format_seconds

# The parts of a step, in the order they are printed; together they are the step.
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
NOTHING = 1e-3  # a part a thousand times smaller than its rival is called none
REACH = 8.0  # how far, in either direction, one machine parameter is turned to find the crossing
GRID = 97
# column of the cost model -> (name, how the value is written)
LEVERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "nic_bytes_per_s": ("NIC", lambda value: f"{value * 8 / 1e9:,.0f} Gb/s per device"),
    "link_bytes_per_s": ("link", lambda value: f"{value / 1e9:,.0f} GB/s per device"),
    "memory_bytes_per_s": ("memory bandwidth", lambda value: f"{value / 1e12:,.2f} TB/s"),
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


def explain(ask: Ask, best: Layout, other: Candidate) -> Alternative:
    """Hold a runner-up against the best layout."""
    _, times, memory = price(ask, [best, other.layout])
    gap = float(memory.total[1] - memory.usable[1])
    slower = float(times.step_s[1] / times.step_s[0] - 1.0)
    if other.fits:
        reason, wins_if = slowest_part(times), crossing(ask, best, other.layout)
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


def slowest_part(times: StepTimes) -> str:
    """The part of the step where row 1 loses most against row 0; the next one too if it matters."""
    lost = {name: float(getattr(times, name)[1] - getattr(times, name)[0]) for name in PARTS}
    worst = sorted(lost, key=lambda name: -lost[name])[:2]
    if lost[worst[0]] <= 0:
        return "as fast, but more machinery"
    words = [_against(times, worst[0])]
    if lost[worst[1]] > 0.5 * lost[worst[0]]:
        words.append(_against(times, worst[1]))
    return "; ".join(words)


def _against(times: StepTimes, name: str) -> str:
    ours, theirs = (float(getattr(times, name)[row]) for row in (1, 0))
    against = f"against {format_seconds(theirs)}" if theirs > NOTHING * ours else "against none"
    return f"{PARTS[name]} {format_seconds(ours)} {against}"


def crossing(ask: Ask, best: Layout, other: Layout) -> str:
    """The smallest change of one machine parameter, up to 8x either way, at which the runner-up is as fast."""
    found: list[tuple[float, str]] = []
    table, _, _ = price(ask, [best])
    for column, (name, written) in LEVERS.items():
        value = float(getattr(table, column))
        factor = _turn(ask, best, other, column, value)
        if factor is not None:
            sign = "≥" if factor > 1 else "≤"
            found.append((abs(np.log(factor)), f"wins with a {name} {sign} {written(value * factor)}"))
    if not found:
        return f"no change of NIC, link or memory speed within {REACH:.0f}x makes it win"
    return min(found)[1]


def _turn(ask: Ask, best: Layout, other: Layout, column: str, value: float) -> float | None:
    """The factor nearest to 1 at which `other` overtakes `best`: a grid finds the side, bisection the place."""
    factors = np.exp(np.linspace(-np.log(REACH), np.log(REACH), GRID))
    lead = _lead(ask, best, other, column, value * factors)
    wins = np.flatnonzero(lead <= 0)
    if not wins.size:
        return None
    nearest = int(wins[np.argmin(np.abs(np.log(factors[wins])))])
    low, high = np.log(factors[nearest + (-1 if factors[nearest] > 1 else 1)]), np.log(factors[nearest])
    for _ in range(20):
        middle = (low + high) / 2
        if float(_lead(ask, best, other, column, np.array([value * np.exp(middle)]))[0]) <= 0:
            high = middle
        else:
            low = middle
    return float(np.exp(high))


def _lead(ask: Ask, best: Layout, other: Layout, column: str, values: Floats) -> Floats:
    """Seconds by which `best` is ahead, for each value of one machine column."""
    steps = []
    for layout in (other, best):
        _, times, _ = price(ask, [layout], machine={column: values})
        steps.append(times.step_s)
    return steps[0] - steps[1]
