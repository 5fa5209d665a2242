"""The timeline in letters: a line per stage, a column per slice of the step, the letter of what took most of it."""

from __future__ import annotations

from collections import defaultdict

from phalanx.sim.step.lanes import BUBBLE, DEVICE, Span
from phalanx.sim.step.timeline import Timeline

COLUMNS = 72
MOST_STAGES = 8  # lines; of more stages, some from first to last
LEGEND = "F forward, B backward, x both, W weight gradients, c traffic that shows, . bubble, o optimizer and host"
BOTH = 0.2  # of a column, from which forward beside backward is told


def picture(timeline: Timeline) -> list[str]:
    """Lines of a fixed width, with the legend last."""
    shown = chosen(len(timeline.device_s))
    taken: dict[int, list[dict[str, float]]] = {stage: [defaultdict(float) for _ in range(COLUMNS)] for stage in shown}
    for span in timeline.spans:
        if span.track == DEVICE and span.stage in taken:
            _paint(taken[span.stage], span, timeline.step_s / COLUMNS)
    width = len(str(shown[-1]))
    lines = [f"stage {stage:{width}}  {''.join(map(_most, taken[stage]))}" for stage in shown]
    return [*lines, LEGEND]


def chosen(stages: int) -> list[int]:
    """Stages to draw: all, or evenly chosen ones with the first and the last.

    >>> chosen(3), chosen(16)
    ([0, 1, 2], [0, 2, 4, 6, 9, 11, 13, 15])
    """
    if stages <= MOST_STAGES:
        return list(range(stages))
    return [round(index * (stages - 1) / (MOST_STAGES - 1)) for index in range(MOST_STAGES)]


def _paint(columns: list[dict[str, float]], span: Span, column_s: float) -> None:
    first, last = (min(int(at_s / column_s), COLUMNS - 1) for at_s in (span.start_s, span.end_s))
    for index in range(first, last + 1):
        inside_s = min(span.end_s, (index + 1) * column_s) - max(span.start_s, index * column_s)
        columns[index][_letter(span)] += inside_s


def _letter(span: Span) -> str:
    if span.part == "compute_s":
        return span.name[0] if span.name[0] in "FBW" else "B"  # the head, between forward and backward
    if span.part == BUBBLE:
        return "."
    return "o" if span.part in ("optimizer_s", "overhead_s") else "c"


def _most(column: dict[str, float]) -> str:
    if min(column.get("F", 0.0), column.get("B", 0.0)) > BOTH * sum(column.values()):
        return "x"
    return max(column, key=lambda letter: column[letter], default=" ")
