"""Several plans side by side: what differs, and by how much against the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from phalanx.io.tables import text_table
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.text import amount
from phalanx.units import format_bytes, format_count, format_money, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDifference:
    """One line of a comparison; `ratios` are against the first plan, empty for words."""

    name: str
    shown: tuple[str, ...]
    ratios: tuple[float, ...] = ()


# Label -> (the number, how it is written); None where a plan has none.
NUMBERS: dict[str, tuple[Callable[[Plan], float | None], Callable[[float], str]]] = {
    "devices": (lambda p: p.layout.devices, lambda v: f"{v:,.0f}"),
    "step": (lambda p: p.prediction.step_s, format_seconds),
    "tokens/s": (lambda p: p.prediction.tokens_per_s, format_count),
    "tokens/s per device": (lambda p: p.prediction.tokens_per_s_per_device, format_count),
    "MFU": (lambda p: p.prediction.mfu, lambda v: f"{v:.1%}"),
    "memory per device": (lambda p: p.memory.total_bytes, format_bytes),
    "time to the token budget": (lambda p: p.duration.wall_s, format_seconds),
    "money (middle price)": (lambda p: p.bill.usd[1] if p.bill.usd else None, format_money),
    "kWh": (lambda p: p.bill.kwh, amount),
    "kg CO2e": (lambda p: p.bill.kgco2e, amount),
    "failures per day": (lambda p: p.reliability.failures_per_day, lambda v: f"{v:.3g}"),
    "checkpoint interval": (lambda p: p.reliability.interval_s, format_seconds),
    "effective training time": (lambda p: p.reliability.effective_time, lambda v: f"{v:.1%}"),
}

# The number's label -> its 80 % interval, printed below it.
INTERVALS: dict[str, Callable[[Plan], str]] = {
    "step": lambda p: f"{format_seconds(p.prediction.step_s_low)} to {format_seconds(p.prediction.step_s_high)}",
    "time to the token budget": lambda p: (
        f"{format_seconds(p.duration.wall_s_low)} to {format_seconds(p.duration.wall_s_high)}"
    ),
}


def compare_plans(plans: Sequence[Plan], names: Sequence[str] = ()) -> tuple[PlanDifference, ...]:
    """Names (of the files, if given), layouts and the settings that differ, then every number."""
    rows = [
        *([PlanDifference(name="file", shown=tuple(names))] if names else []),
        PlanDifference(name="job", shown=tuple(plan.job.name for plan in plans)),
        PlanDifference(name="model", shown=tuple(plan.job.model.name for plan in plans)),
        PlanDifference(name="cluster", shown=tuple(plan.cluster.name for plan in plans)),
        PlanDifference(name="layout", shown=tuple(plan.layout.short for plan in plans)),
    ]
    for item in fields(Layout):
        shown = tuple(str(getattr(plan.layout, item.name)) for plan in plans)
        if len(set(shown)) > 1:
            rows.append(PlanDifference(name=f"layout {item.name}", shown=shown))
    for name in NUMBERS:
        rows.append(_number(name, plans))
        if name in INTERVALS:
            shown = tuple(INTERVALS[name](plan) for plan in plans)
            rows.append(PlanDifference(name=f"{name}, 80%", shown=shown))
    return tuple(rows)


def _number(name: str, plans: Sequence[Plan]) -> PlanDifference:
    read, written = NUMBERS[name]
    values = [read(plan) for plan in plans]
    first = values[0]
    shown = tuple("unknown" if value is None else written(value) for value in values)
    if not first or any(value is None for value in values):
        return PlanDifference(name=name, shown=shown)
    return PlanDifference(name=name, shown=shown, ratios=tuple((value or 0.0) / first for value in values))


def comparison_text(differences: Sequence[PlanDifference]) -> str:
    """A table; beside each number after the first, how it compares."""
    rows = []
    for one in differences:
        cells = [one.name]
        for index, text in enumerate(one.shown):
            ratio = one.ratios[index] if one.ratios and index else 1.0
            cells.append(text if ratio == 1.0 else f"{text} ({_change(ratio)})")
        rows.append(cells)
    return "\n".join(text_table(rows))


def _change(ratio: float) -> str:
    """A difference in percent, or as a factor where percents stop meaning anything."""
    return f"{ratio - 1:+.1%}" if 0.1 < ratio < 10 else f"×{ratio:.3g}"
