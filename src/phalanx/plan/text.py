"""A Plan as one page of plain text for a terminal of 100 columns, and a comparison of several plans."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from phalanx.io.tables import text_table, two_part_bar
from phalanx.job.model import TOKENS_PER_PARAMETER
from phalanx.plan.bill import Bill
from phalanx.plan.layout import Layout
from phalanx.plan.lean_step import drops_logits, drops_product, loss_chunk
from phalanx.plan.memory_profile import MemoryProfile
from phalanx.plan.model_replicas import ReplicaLoss
from phalanx.plan.parametrization import describe_parametrization
from phalanx.plan.plan import ParetoPoint, Plan
from phalanx.plan.reasons import Alternative, part_name
from phalanx.plan.reliability import Reliability
from phalanx.plan.request import memory_profile, trains_with_phalanx
from phalanx.plan.search import FULL_MEMORY
from phalanx.plan.site_text import site_sections
from phalanx.plan.trainable import splits_backward, why_not_left_out
from phalanx.units import DAY_S, HOUR_S, MINUTE_S, format_bytes, format_count, format_money, format_seconds, plural

WIDTH = 100
BAR = 30  # characters of a full bar
LEAST_LEAD = 0.0005  # below it, "0.0% faster" would be printed
SECONDS = {"years": 365.25 * DAY_S, "days": DAY_S, "h": HOUR_S, "min": MINUTE_S, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
SMALLEST_SHARE = 0.001  # parts of the step below a thousandth are omitted from the table


def plan_text(plan: Plan, *, top: int = 6) -> str:
    """Return the page of a plan; `top` limits the numbers of alternatives and Pareto points."""
    sections = [
        *(site_sections(plan.sites) if plan.sites is not None else ()),
        ("STEP TIME", _step_lines(plan)),
        ("MEMORY PER DEVICE", _memory_lines(plan)),
        ("COMMUNICATION BY AXIS", _mapping_lines(plan)),
        ("ALTERNATIVES", _alternative_lines(plan.alternatives[:top])),
        ("PARETO FRONT: TIME, COST AND MEMORY", _pareto_lines(plan, top)),
        ("FAILURES AND CHECKPOINTS", _failure_lines(plan)),
        ("COST AND ENERGY", _bill_lines(plan)),
        ("SEARCH", _search_lines(plan)),
        ("WARNINGS", [wrapped for text in plan.warnings for line in text.splitlines() for wrapped in _wrap_line(line)]),
    ]
    lines = [*_headline_lines(plan), *(f"  {line}" for line in _derived_lines(plan))]
    for title, body in sections:
        if body:
            lines += ["", title, *(f"  {line}".rstrip() for line in body)]
    return "\n".join(lines)


def _headline_lines(plan: Plan) -> list[str]:
    p, d = plan.prediction, plan.duration
    size = format_count(p.parameters)
    if p.active_parameters != p.parameters:
        size += f" ({format_count(p.active_parameters)} active)"
    money = "price unknown"
    if plan.bill.usd:
        low, middle, high = plan.bill.usd
        money = format_money(middle) + (f" ({format_money(low)} to {format_money(high)})" if low < high else "")
    left_column = [
        (
            "step",
            f"{format_seconds(p.step_s)} (80%: {format_seconds(p.step_s_low)} to {format_seconds(p.step_s_high)})",
        ),
        ("tokens/s", f"{format_count(p.tokens_per_s)} ({format_count(p.tokens_per_s_per_device)} per device)"),
        ("MFU", f"{p.mfu:.1%}"),
    ]
    right_column = [
        ("time", f"{_with_interval(d.wall_s_low, d.wall_s, d.wall_s_high)} for {format_count(d.tokens)} tokens"),
        ("cost", money),
        ("memory", f"{format_bytes(plan.memory.total_bytes)} of {format_bytes(plan.memory.usable_bytes)} usable"),
    ]
    devices, prefix = plural(plan.layout.devices, "device"), ""
    if plan.sites is not None:
        first = plan.sites.sites[0].name
        devices = f"{plural(sum(site.devices for site in plan.sites.sites), 'device')} at {len(plan.sites.sites)} sites"
        prefix = f"step, layout, memory and failures of site {first}: "
        left_column[1] = ("tokens/s", f"{format_count(plan.sites.row.prediction.tokens_per_s)} at all sites")
    head = [
        f"{plan.job.name}: {plan.job.model.name}, {size} parameters, on {plan.cluster.name} ({devices})",
        f"{prefix}{plan.layout.name}",
        *_simpler_lines(plan),
        "",
    ]
    return head + [
        f"  {a:<9}{b:<38}{c:<8}{e}".rstrip() for (a, b), (c, e) in zip(left_column, right_column, strict=True)
    ]


def _simpler_lines(plan: Plan) -> list[str]:
    """Return a note on a faster layout that was passed over, as its lead is only predicted; empty if there is none."""
    s = plan.search
    if s.fastest == plan.layout:
        return []
    lead = plan.prediction.step_s / s.fastest_step_s - 1.0
    pace = "as fast" if lead < LEAST_LEAD else f"{lead:.1%} faster"
    filled = s.fastest_memory_bytes / plan.memory.usable_bytes
    if filled > FULL_MEMORY >= 1.0 - plan.memory.headroom:
        return _wrap_line(
            f"{s.fastest.short} is {pace} on paper but fills {filled:.1%} of the memory; chose one with headroom", WIDTH
        )
    return _wrap_line(f"{s.fastest.short} is {pace} on paper; chose the simpler layout", WIDTH)


def _with_interval(low_s: float, middle_s: float, high_s: float) -> str:
    """Return a duration and its interval in one unit, such as `58.0 days (45.1 to 76.3)`."""
    middle = format_seconds(middle_s)
    if not low_s < high_s:
        return middle
    scale = SECONDS[middle.split()[-1]]
    low, high = (f"{v:,.{0 if v >= 100 else 1 if v >= 10 else 2}f}" for v in (low_s / scale, high_s / scale))
    return f"{middle} ({low} to {high})"


def _derived_lines(plan: Plan) -> list[str]:
    """Return the assumptions behind the numbers above, and derived values with their reasons."""
    lines = [_assumptions_line(plan)]
    if scaling := describe_parametrization(plan.job):
        lines.append(scaling)
    if isinstance(plan.job.data.tokens, str):
        lines.append(
            f"data.tokens = {plan.job.data.tokens}: {TOKENS_PER_PARAMETER} per parameter (Hoffmann et al. 2022) are "
            f"{plan.duration.tokens:,} tokens, {plural(plan.duration.steps, 'step')}"
        )
    if plan.calibration:
        scalars = ", ".join(f"{name} ×{value:.3g}" for name, value in plan.calibration.scalars.items())
        lines.append(f"calibrated with {plan.calibration.file}: {scalars}")
    return [wrapped for line in lines for wrapped in _wrap_line(line)]


def _assumptions_line(plan: Plan) -> str:
    """Return the line that states the assumed framework, price and failure rate, on which step time and cost depend."""
    price = "price unknown"
    if plan.bill.usd_per_device_hour:
        low, middle, high = plan.bill.usd_per_device_hour
        price_range = f" ({low:,.2f} to {high:,.2f})" if low < high else ""
        price = f"${middle:,.2f} per device-hour{price_range}"
    return (
        f"assumptions: speed and memory use of framework {plan.job.parallel.framework}, {price}, "
        f"{plan.reliability.failures_per_host_day:.2g} failures per host and day"
    )


def _step_lines(plan: Plan) -> list[str]:
    step_s = plan.prediction.step_s
    rows = []
    for name, seconds in plan.prediction.breakdown_s.items():
        if seconds >= SMALLEST_SHARE * step_s:
            bar = two_part_bar(max(1 / BAR, seconds / step_s), 0.0, BAR)
            rows.append((part_name(name, plan.layout), format_seconds(seconds), f"{seconds / step_s:.1%}", bar))
    lines = text_table(rows, right=(1, 2))
    layout = plan.layout
    count = plural(layout.accumulation, "micro-batch")
    note = f"{count} of {layout.micro_batch} × {plan.job.data.sequence:,} tokens per step"
    if layout.pipeline > 1:
        note += f", {layout.schedule} schedule"
    return [*lines, note, *_wrap_line(f"MFU counts {plan.prediction.mfu_convention}")]


def _memory_lines(plan: Plan) -> list[str]:
    m = plan.memory
    rows = [(name, format_bytes(size), f"{size / m.usable_bytes:.1%}") for name, size in m.parts_bytes.items() if size]
    rows.append(("total", format_bytes(m.total_bytes), f"{m.total_bytes / m.usable_bytes:.1%}"))
    lines = text_table(rows, right=(1, 2))
    return [
        *lines,
        f"{format_bytes(m.usable_bytes)} of {format_bytes(m.device_bytes)} are usable: {m.headroom:.1%} headroom",
        *_wrap_line("; ".join(_lean_notes(plan))),
    ]


def _lean_notes(plan: Plan) -> list[str]:
    """Return notes on large tensors that the step never holds whole, where the plan counts them."""
    job, layout = plan.job, plan.layout
    if not trains_with_phalanx(job):
        return []
    profile = memory_profile(job, MemoryProfile(), on_cpu=plan.cluster.accelerator.family == "cpu")
    tokens = layout.micro_batch * job.data.sequence // layout.context
    notes = []
    if profile.chunked_loss and drops_logits(tokens, job.model.vocab, tensor=layout.tensor, pipeline=layout.pipeline):
        chunk = int(loss_chunk(tokens, job.model.vocab))
        notes.append(
            f"logits of {chunk:,} of {tokens:,} tokens at a time"
            if chunk < tokens
            else "logits become their gradient in place"
        )
    keeps_product = layout.recompute != "none" or layout.precision == "fp8" or job.model.is_moe
    drops = drops_product(tokens, job.model.ffn, tensor=layout.tensor, splits_backward=splits_backward(layout))
    if profile.dropped_product and not keeps_product and drops:
        notes.append("backward makes the product of each MLP again")
    return notes


def _mapping_lines(plan: Plan) -> list[str]:
    if not plan.mapping:
        return ["one device: no communication"]
    head = ("axis", "size", "stride", "links", "operation", "algo", "sent", "on wire", "exposed")
    rows = [head]
    for use in plan.mapping:
        exposed = f"{format_seconds(use.shown_s)} ({use.exposed:.0%})"
        short_operation = (
            use.operation.replace("reduce-scatter", "scatter").replace("all-gather", "gather").replace(" + ", "+")
        )
        rows.append(
            (use.axis, str(use.size), str(use.stride), use.tier, short_operation, use.algorithm,
             format_bytes(use.bytes_per_step), format_seconds(use.wire_s), exposed)
        )  # fmt: skip
    notes = [f"{use.axis}: next best is {use.next_best}" for use in plan.mapping if use.next_best]
    order = "per device and step; rank order, fastest-varying first: " + ", ".join(plan.rank_order)
    if plan.layout.context > 1:
        notes.append("the data axis includes the context ranks: they share gradients")
    return [*text_table(rows, right=(1, 2, 6, 7)), *_wrap_line("; ".join([order, *notes]))]


def format_amount(value: float) -> str:
    """Return a count as text, including counts far below one."""
    return format_count(value) if value >= 1 else f"{value:.2g}"


def _alternative_lines(alternatives: Sequence[Alternative]) -> list[str]:
    lines = []
    for alternative in alternatives:
        lines += _wrap_line(f"{alternative.idea}: {alternative.layout.short}")
        pace = f"{format_seconds(alternative.step_s)} ({alternative.slower:+.1%})"
        lines += [f"  {line}" for line in _wrap_line(f"{pace}: {alternative.reason}; {alternative.wins_if}", WIDTH - 6)]
    return lines


def _pareto_lines(plan: Plan, top: int) -> list[str]:
    if len(plan.pareto) < 2:
        return []
    rows = [("devices", "step", "training", "cost", "memory", "layout")]
    for point in _pareto_choice(plan, max(2, top)):
        money = format_money(point.usd) if point.usd is not None else "-"
        rows.append(
            (f"{point.devices:,}", format_seconds(point.step_s), format_seconds(point.training_s), money,
             format_bytes(point.memory_bytes), point.layout.short)
        )  # fmt: skip
    notes = ["training time and cost without failures and spare hosts"]
    if all(point.layout != plan.layout for point in plan.pareto):
        notes.append("the chosen layout is not on the front: it is slightly slower and simpler")
    return [*text_table(rows, right=(0, 1, 2, 3, 4)), *_wrap_line("; ".join(notes))]


def _pareto_choice(plan: Plan, top: int) -> list[ParetoPoint]:
    """Return the fastest point of each device count, then the next ones in turn, at most `top`."""
    counts = sorted({point.devices for point in plan.pareto}, reverse=True)
    queues = [[point for point in plan.pareto if point.devices == count] for count in counts]
    points: list[ParetoPoint] = []
    while len(points) < top and any(queues):
        points += [queue.pop(0) for queue in queues if queue][: top - len(points)]
    return sorted(points, key=lambda point: (-point.devices, point.step_s))


def _failure_lines(plan: Plan) -> list[str]:
    r = plan.reliability
    if not math.isfinite(r.mtbf_s):
        return ["no failures expected (rate 0)"]
    costs = ", ".join(f"{factor:g}x {cost:.2%}" for factor, cost in r.interval_costs)
    chosen = "" if r.interval_s == r.optimal_interval_s else f" (optimum {format_seconds(r.optimal_interval_s)})"
    lines = [
        f"{r.failures_per_day:.3g} failures per day over {plural(r.hosts, 'host')} "
        f"({r.failures_per_host_day:.2g} per host and day): one every {format_seconds(r.mtbf_s)}",
        *_rate_range(r),
        f"checkpoint every {format_seconds(r.interval_s)}{chosen}: {format_bytes(r.checkpoint_bytes)}, training waits "
        f"{format_seconds(r.blocking_s)}, committed after {format_seconds(r.persist_s)}",
        *([_in_memory(r.memory_every, plan.prediction.step_s)] if r.memory_every else []),
        f"time lost at multiples of the optimal interval: {costs}",
        f"effective training time {r.effective_time:.1%}{_site_range(r)}; {plural(r.spares, 'spare host')} (enough "
        "on 99% of days)",
        *(_loss_lines(plan, r.replica_loss) if r.replica_loss is not None else []),
    ]
    return [wrapped for line in lines for wrapped in _wrap_line(line)]


def _loss_lines(plan: Plan, loss: ReplicaLoss) -> list[str]:
    """Return the lines on both recoveries from a lost rank, with the cost of each."""
    rebuild, leave_out = loss.rebuild, loss.leave_out
    chosen = plan.job.fault.on_loss
    if loss.break_even_per_day is None:
        verdict = "leaving out never pays here"
    else:
        pays = plan.reliability.failures_per_day > loss.break_even_per_day
        verdict = (
            f"leaving out {'pays' if pays else 'does not pay'} here: it loses less from {loss.break_even_per_day:.2g} "
            "failures per day on"
        )
    refusal = why_not_left_out(plan.job, plan.layout, plan.cluster) if trains_with_phalanx(plan.job) else ""
    return [
        f"a lost rank, of {loss.replicas:,} model replicas of {plural(loss.ranks, 'rank')} "
        f'(fault.on_loss = "{chosen}"):',
        f"rebuild all: every rank waits {format_seconds(rebuild.stall_s)}, {format_count(rebuild.lost_tokens)} tokens "
        "lost",
        f"leave the replica out: every rank waits {format_seconds(leave_out.stall_s)}, then "
        f"{format_seconds(leave_out.slow_s)} with a replica less, {format_count(leave_out.lost_tokens)} tokens lost; "
        f"adds at most {format_seconds(loss.exchange_s)} to each step, as replicas sum gradients after backward",
        verdict,
        *([refusal] if refusal else []),
    ]


def _rate_range(r: Reliability) -> list[str]:
    """Return the source of the failure rate and its spread over sites; empty for a plan older than these fields."""
    if not r.rate_source:
        return []
    if r.failures_per_host_day_interval is None:
        return [f"the rate is {r.rate_source}"]
    low, high = r.failures_per_host_day_interval
    return [
        f"the rate is that of {r.rate_source}; 80% of sites: {low:.2g} to {high:.2g} per host and day; your own: "
        "fault.failures_per_host_day"
    ]


def _site_range(r: Reliability) -> str:
    if r.effective_time_interval is None:
        return ""
    low, high = r.effective_time_interval
    return f" (80% of sites: {low:.1%} to {high:.1%})"


def _in_memory(every: int, step_s: float) -> str:
    steps = "every step" if every == 1 else f"every {every:,} steps ({format_seconds(every * step_s)})"
    return f"in-memory checkpoint {steps}, from which a lost rank is restored"


def _bill_lines(plan: Plan) -> list[str]:
    b = plan.bill
    lines = [
        f"{format_count(b.device_hours)} device-hours over {format_seconds(plan.duration.wall_s)} "
        f"(80%: {format_seconds(plan.duration.wall_s_low)} to {format_seconds(plan.duration.wall_s_high)}), "
        "failures included"
    ]
    if b.usd and b.usd_per_device_hour:
        low, middle, high = b.usd
        rate = " / ".join(f"{price:.2f}" for price in dict.fromkeys(b.usd_per_device_hour))
        ends = (
            "lowest price and fastest run to highest price and slowest"
            if len(set(b.usd_per_device_hour)) > 1
            else "80%"
        )
        range_text = f" ({format_money(low)} to {format_money(high)}: {ends})" if low < high else ""
        lines.append(
            f"{format_money(middle)}{range_text} at ${rate} per device-hour, spare hosts included; {b.price_source}"
        )
    else:
        lines.append(b.price_source)
    return [wrapped for line in (*lines, *_energy_lines(b)) for wrapped in _wrap_line(line)]


def _energy_lines(b: Bill) -> list[str]:
    if b.kwh is None or b.kgco2e is None or b.kwh_interval is None or b.watts_per_device is None:
        return [f"energy and carbon: {b.power_source}"]
    low, high = b.kwh_interval
    range_text = f" ({format_amount(low)} to {format_amount(high)})" if low < high else ""
    watts = f"{b.watts_per_device:.0f} W per device, PUE {b.pue:g} ({b.power_source})"
    return [
        f"{format_amount(b.kwh)} kWh{range_text}: {watts}",
        f"{format_amount(b.kgco2e)} kg CO2e at {b.grid_gco2_per_kwh:g} g/kWh ({b.grid_source})",
    ]


def _search_lines(plan: Plan) -> list[str]:
    s = plan.search
    profile = plan.job.parallel.framework
    return [
        f"{plural(s.legal, 'valid layout')}, {s.fitting:,} fit, in {format_seconds(s.seconds)}; framework {profile}"
    ]


def _wrap_line(text: str, width: int = WIDTH - 4) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# A comparison of several plans: the values that differ, and by how much from the first.


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDifference:
    """One line of a comparison; `ratios` are relative to the first plan, and empty for text."""

    name: str
    shown: tuple[str, ...]
    ratios: tuple[float, ...] = ()


# Label -> (the number, its format); the number is None where a plan has none.
NUMBERS: dict[str, tuple[Callable[[Plan], float | None], Callable[[float], str]]] = {
    "devices": (lambda p: p.layout.devices, lambda v: f"{v:,.0f}"),
    "step": (lambda p: p.prediction.step_s, format_seconds),
    "tokens/s": (lambda p: p.prediction.tokens_per_s, format_count),
    "tokens/s per device": (lambda p: p.prediction.tokens_per_s_per_device, format_count),
    "MFU": (lambda p: p.prediction.mfu, lambda v: f"{v:.1%}"),
    "memory per device": (lambda p: p.memory.total_bytes, format_bytes),
    "time to the token budget": (lambda p: p.duration.wall_s, format_seconds),
    "cost (middle price)": (lambda p: p.bill.usd[1] if p.bill.usd else None, format_money),
    "kWh": (lambda p: p.bill.kwh, format_amount),
    "kg CO2e": (lambda p: p.bill.kgco2e, format_amount),
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
    """Compare the names (of the files, if given), layouts and settings that differ, then every number."""
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
        rows.append(_number_difference(name, plans))
        if name in INTERVALS:
            shown = tuple(INTERVALS[name](plan) for plan in plans)
            rows.append(PlanDifference(name=f"{name}, 80%", shown=shown))
    return tuple(rows)


def _number_difference(name: str, plans: Sequence[Plan]) -> PlanDifference:
    get, format_value = NUMBERS[name]
    values = [get(plan) for plan in plans]
    first = values[0]
    shown = tuple("unknown" if value is None else format_value(value) for value in values)
    if not first or any(value is None for value in values):
        return PlanDifference(name=name, shown=shown)
    return PlanDifference(name=name, shown=shown, ratios=tuple((value or 0.0) / first for value in values))


def comparison_text(differences: Sequence[PlanDifference]) -> str:
    """Return the comparison as a table; each number after the first has its difference from the first."""
    rows = []
    for difference in differences:
        cells = [difference.name]
        for index, text in enumerate(difference.shown):
            ratio = difference.ratios[index] if difference.ratios and index else 1.0
            cells.append(text if ratio == 1.0 else f"{text} ({_change_text(ratio)})")
        rows.append(cells)
    return "\n".join(text_table(rows))


def _change_text(ratio: float) -> str:
    """Return a difference in percent, or as a factor where it is tenfold or more."""
    return f"{ratio - 1:+.1%}" if 0.1 < ratio < 10 else f"×{ratio:.3g}"
