"""The text of an allocation, as `phalanx scale allocate` prints it."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.io.tables import text_table
from phalanx.scale.allocate_budget import Allocation
from phalanx.scale.fit_result import FitEstimate
from phalanx.scale.points import COUNTED
from phalanx.units import format_count, format_energy, format_money, format_seconds, plural


def allocation_text(found: Allocation) -> str:
    """Format the whole page."""
    best = found.best
    lines = [
        f"{found.flops:.3g} FLOP ({found.budget_source}), by a scaling law fitted with {found.method}",
        f"parameters: {COUNTED[found.params_counted]}",
        "",
        "COMPUTE-OPTIMAL MODEL",
        *_optimum_table(found),
    ]
    for off in found.off:
        lines.append(
            f"  at {off.factor:g}x the size: {format_count(off.params)} on {format_count(off.tokens)} tokens, loss "
            f"{off.loss:.4f} ({100 * (off.loss / best['loss'].value - 1):+.2f} %), wastes {off.wasted_compute:.0%} "
            "of the budget"
        )
    if found.serving is not None:
        served = found.serving
        lines += [
            "",
            f"FOR {format_count(served.inference_tokens)} SERVED TOKENS",
            f"  {format_count(served.params)} parameters on {format_count(served.tokens)} tokens "
            f"({served.tokens / served.params:.0f} per parameter) reach the same loss",
            f"  training {served.training_flops:.3g} FLOP ({_above_budget(served.training_flops / found.flops)} "
            f"the budget), with serving {served.total_flops:.3g}: {served.saved:.1%} less than with the "
            "compute-optimal model",
        ]
    shape = found.shape
    lines += [
        "",
        "MODEL",
        f"  {plural(shape.layers, 'layer')}, hidden {shape.hidden:,}, {plural(shape.heads, 'head')} "
        f"({shape.kv_heads} for keys and values), MLP {shape.ffn:,}, vocabulary {shape.vocab:,}",
        f"  {format_count(found.shape_params)} parameters on {format_count(found.tokens)} tokens: predicted loss "
        f"{found.predicted_loss:.4f}",
        f"  peak learning rate {found.lr:.2e}, batch {format_count(found.batch_tokens)} tokens "
        f"(Step Law: {found.step_law_lr:.2e}, {format_count(found.step_law_batch_tokens)})",
    ]
    if found.plan is not None:
        lines += ["", "ON THE CLUSTER", *_plan_lines(found)]
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def _above_budget(ratio: float) -> str:
    """Format a ratio in per cent above 1, or as a factor from 10 on."""
    return f"{ratio - 1:.0%} above" if ratio < 10 else f"{format_count(ratio)} times"


def _plan_lines(found: Allocation) -> list[str]:
    plan = found.plan
    assert plan is not None
    time, bill = plan.duration, plan.bill
    cost = "price not known"
    if bill.usd is not None:
        low, middle, high = sorted(bill.usd)
        cost = f"{format_money(middle)} ({format_money(low)} to {format_money(high)})"
    energy = format_energy(bill.kwh * 3.6e6) if bill.kwh is not None else "energy not known"
    return [
        f"  {plan.layout.name} on {found.cluster_spec} ({plural(plan.cluster.devices, 'device')})",
        f"  MFU {plan.prediction.mfu:.1%}, {format_count(plan.prediction.tokens_per_s)} tokens/s",
        f"  {format_seconds(time.wall_s)} ({format_seconds(time.wall_s_low)} to {format_seconds(time.wall_s_high)}), "
        f"{format_count(bill.device_hours)} device-hours, {cost}, {energy}",
    ]


def _optimum_table(found: Allocation) -> list[str]:
    rule = ""
    if found.chinchilla_rule_inside is not None:
        rule = f"Chinchilla's 20 is {'inside' if found.chinchilla_rule_inside else 'outside'} the interval"
    rows = [
        ("", "", "80 % interval", ""),
        _optimum_row("parameters N*", found.best["params"], format_count, ""),
        _optimum_row("tokens D*", found.best["tokens"], format_count, ""),
        _optimum_row("tokens per parameter", found.best["tokens_per_param"], format_count, rule),
        _optimum_row("loss", found.best["loss"], "{:.4f}".format, "nats per token"),
    ]
    return text_table(rows, right=(1,), indent=2)


def _optimum_row(name: str, one: FitEstimate, show: Callable[[float], str], note: str) -> tuple[str, str, str, str]:
    interval = f"{show(one.low)} to {show(one.high)}" if one.low is not None and one.high is not None else ""
    return name, show(one.value), interval, note
