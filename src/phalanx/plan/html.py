"""A Plan for notebooks: its main numbers, step and memory as bars, and the Pareto front.

HTML and SVG without scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from phalanx.io.svg import coloured_bar
from phalanx.io.tables import html_table
from phalanx.plan.plan import Plan
from phalanx.plan.reasons import part_name
from phalanx.plan.site_text import site_html
from phalanx.units import format_bytes, format_count, format_money, format_seconds, plural

# Okabe and Ito's palette: colour-blind readers can distinguish it, on light and dark pages.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
SMALLEST_SHARE = 0.005  # parts below are joined as "other"
MOST_POINTS = 8


def plan_html(plan: Plan) -> str:
    """Return the plan as HTML: the main numbers, the parts of the step and of the memory, and the Pareto front."""
    p, memory = plan.prediction, plan.memory
    cost = format_money(plan.bill.usd[1]) if plan.bill.usd else "price unknown"
    figures = {
        "layout": plan.layout.name,
        "step": f"{format_seconds(p.step_s)} (80 %: {format_seconds(p.step_s_low)} to {format_seconds(p.step_s_high)})",
        "tokens/s": f"{format_count(p.tokens_per_s)} ({format_count(p.tokens_per_s_per_device)} per device)",
        "MFU": f"{p.mfu:.1%}",
        "time": f"{format_seconds(plan.duration.wall_s)} for {format_count(plan.duration.tokens)} tokens",
        "cost": cost,
        "memory": f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.usable_bytes)} usable",
    }
    step = {part_name(name, plan.layout): seconds for name, seconds in p.breakdown_s.items()}
    memory_parts = {**memory.parts_bytes, "headroom": max(0.0, memory.usable_bytes - memory.total_bytes)}
    devices = plural(plan.layout.devices, "device")
    title = f"{plan.job.name}: {plan.job.model.name} on {plan.cluster.name} ({devices})"
    front = [
        (f"{row.devices:,}", format_seconds(row.step_s), format_seconds(row.training_s),
         format_money(row.usd) if row.usd is not None else "-", format_bytes(row.memory_bytes), row.layout.short)
        for row in plan.pareto[:MOST_POINTS]
    ]  # fmt: skip
    return "\n".join(
        [
            f"<div><h4>{escape(title)}</h4>",
            html_table(list(figures.items())),
            *(site_html(plan.sites) if plan.sites is not None else ()),
            f"<h5>Step time</h5>{_stacked_bar(step, format_seconds)}",
            f"<h5>Memory per device</h5>{_stacked_bar(memory_parts, format_bytes)}",
            "<h5>Pareto front: time, cost and memory</h5>",
            html_table(front, head=("devices", "step", "training", "cost", "memory", "layout")),
            *(f"<p><b>warning</b> {escape(text)}</p>" for text in plan.warnings),
            "</div>",
        ]
    )


def _stacked_bar(parts: Mapping[str, float], written: Callable[[float], str]) -> str:
    """Return one bar with its parts in order, and a key below."""
    total = sum(parts.values()) or 1.0
    visible = {name: value for name, value in parts.items() if value >= SMALLEST_SHARE * total}
    rest_value = total - sum(visible.values())
    if rest_value > 1e-9 * total:
        visible["other"] = rest_value
    labels = [(f"{name}: {written(value)} ({value / total:.1%})", value) for name, value in visible.items()]
    keys = [
        f'<span style="white-space:nowrap"><span style="color:{COLOURS[index % len(COLOURS)]}">■</span> {escape(text)}'
        "</span>"
        for index, (text, _) in enumerate(labels)
    ]
    return f"{coloured_bar(labels, colours=COLOURS)}<div>{' &nbsp; '.join(keys)}</div>"
