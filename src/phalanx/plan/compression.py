"""Whether the plan says that compressing gradients is worth its rounding."""

from __future__ import annotations

from dataclasses import replace

from phalanx.errors import Problem
from phalanx.plan.ask import Ask
from phalanx.plan.layout import Layout
from phalanx.plan.score import price
from phalanx.units import format_seconds

# Least share of the step that compression must save: below it the plan cannot tell, as it does not count the packing.
WORTH = 0.02


def pays(ask: Ask, layout: Layout, *, where: str = "parallel.compression") -> Problem | None:
    """A warning where the step is predicted to gain less than 2 % from its compression; None where it pays."""
    if layout.compression == "none":
        return None
    rows = [replace(layout, compression=kind) for kind in (layout.compression, "none")]
    _, times, _ = price(ask, rows)
    with_s, without_s = (float(one) for one in times.step_s)
    saved = 1.0 - with_s / without_s
    if saved >= WORTH:
        return None
    return Problem(
        where=where,
        what=f"{layout.compression} gradients save {max(saved, 0.0):.1%} of the predicted step: "
        f"{format_seconds(with_s)} instead of {format_seconds(without_s)}",
        why="gradients travel behind the backward pass already, and rounding them is not free",
        fix='use compression = "none"',
    )
