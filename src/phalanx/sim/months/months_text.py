"""A forecast as one page of plain text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

from phalanx.io.tables import text_table
from phalanx.plan.plan import Plan
from phalanx.plan.request import trains_with_phalanx
from phalanx.plan.trainable import why_not_left_out
from phalanx.sim.months.causes import ALL_NETWORK
from phalanx.sim.months.forecast import Forecast, ForecastSpread, PhaseShare
from phalanx.sim.months.policy import MonthsPolicy
from phalanx.sim.months.simulate_run import PHASES
from phalanx.units import DAY_S, format_count, format_money, format_seconds, plural

WIDTH = 100
SMALLEST = 5e-5  # shares that would print as 0.00 % are left out
# This text in a rate's source marks a share of Llama 3's causes.
LLAMA = "interruptions of Llama 3"
# Share of the time without hosts above which that explains the difference.
IDLE = 0.05
NAMES = {
    "checkpoint": "checkpoints",
    "copies": "in-memory checkpoints",
    "detect": "detection",
    "restart": "restart",
    "redone": "work redone",
    "waiting": "waiting for hosts or switches",
    "stalled": "stalled by the network",
    "degraded": "running slower",
    "stopped": "stopped permanently",
}


def forecast_text(plan: Plan, policy: MonthsPolicy, made: Forecast) -> str:
    """Format the whole page."""
    sections = [
        ("WHERE THE TIME GOES", _ledger_lines(made)),
        ("COMPARED WITH THE PLANNER'S FORMULA", _formula_lines(policy, made)),
        ("FAILURES", _failure_lines(made)),
        ("A LOST RANK: REBUILD ALL, OR LEAVE ITS REPLICA OUT", _loss_lines(plan, made)),
        ("SPARES AND GAPS", _spare_lines(plan, policy, made)),
        ("MONEY", _money_lines(plan, made)),
        ("WHAT WOULD HELP, ONE CHANGE AT A TIME", _lever_lines(made)),
    ]
    lines = _headline_lines(plan, made)
    for title, body in sections:
        if body:
            lines += ["", title, *(f"  {wrapped}".rstrip() for line in body for wrapped in _wrap_line(line))]
    return "\n".join(lines)


def _headline_lines(plan: Plan, made: Forecast) -> list[str]:
    count = "one run" if made.runs == 1 else plural(made.runs, "run")
    e, stops, sites = made.effective, made.interruptions, made.sites
    return [
        f"{plan.job.name}: {plural(made.days, 'day')} on {plan.cluster.name} ({plural(made.devices, 'device')}), "
        f"{count}, seed {made.seed}",
        f"  effective training time {e.mean:.2%}{_ranges_text(e, sites.effective if sites else None, '.2%')}",
        f"  unexpected interruptions {stops.mean:,.1f}"
        f"{_ranges_text(stops, sites.interruptions if sites else None, ',.0f')}; planned {made.planned:.1f}",
        *(f"  {wrapped}" for wrapped in _wrap_line(_meaning_text(plan, made))),
        f"  network {_network_text(made)}",
    ]


def _network_text(made: Forecast) -> str:
    planes = plural(made.planes, "plane")
    name = f"{made.fabric}, {planes}" if made.fabric else "unspecified, at Llama 3's failure rate (see --fabric)"
    if made.fabric and all(rate.cause not in ALL_NETWORK for rate in made.rates):
        return f"{made.fabric}, unused: all traffic of this job stays inside a fast domain"
    if made.edge:
        return f"{name}; recovery at the edge{'' if made.fabric else f', {planes}'}"
    return f"{name}; conventional recovery (see --edge-recovery)"


def _ranges_text(one: ForecastSpread, sites: tuple[float, float] | None, form: str) -> str:
    """Format the range over sites, and the variation between runs in it; a single run shows no variation."""
    varied = "" if math.isnan(one.low) else f"run-to-run variation: {one.run_low:{form}} to {one.run_high:{form}}"
    if sites is None:
        return f" (80% of runs, {varied})" if varied else ""
    run_text = f"; of which {varied}" if varied else ""
    return f" (80% of sites: {sites[0]:{form}} to {sites[1]:{form}}{run_text})"


def _meaning_text(plan: Plan, made: Forecast) -> str:
    """Explain which uncertainties a range contains, and which settings would reduce them."""
    sites, r = made.sites, plan.reliability
    if sites is None and (r.failures_per_host_day_interval or r.recovery_s_interval) and made.failures:
        return "the ranges show run-to-run variation only: other sites were not simulated"
    if sites is None:
        return "failure rate and recovery time are your own, so the ranges show run-to-run variation only"
    spread_texts, keys = [], []
    for name, span, key in (
        ("failures per host and day", sites.failures_per_host_day, "fault.failures_per_host_day"),
        ("recovery", sites.recovery_s, "fault.detect_s and fault.restart_s"),
        ("repair", sites.repair_s, "--repair-hours"),
    ):
        if span is not None:
            low, high = (f"{end:.2g}" if name.startswith("failures") else format_seconds(end) for end in span)
            spread_texts.append(f"{name} {low} to {high}")
            keys.append(key)
    return (
        f"sites: {sites.count} simulated, spread like published ones ({', '.join(spread_texts)}); "
        f"set your own values for a narrower range: {', '.join(keys)}"
    )


def _ledger_lines(made: Forecast) -> list[str]:
    phases = [phase for phase in PHASES if any(row.get(phase, 0.0) >= SMALLEST for row in made.lost.values())]
    rows = [("lost to", *phases, "all")]
    for cause, row in made.lost.items():
        if sum(row.values()) >= SMALLEST:
            rows.append(
                (cause, *(_share_text(row.get(phase, 0.0)) for phase in phases), _share_text(sum(row.values())))
            )
    if len(rows) == 1:
        return ["nothing was lost"]
    totals = {phase: sum(row.get(phase, 0.0) for row in made.lost.values()) for phase in phases}
    rows.append(("all", *(_share_text(totals[phase]) for phase in phases), _share_text(1.0 - made.effective.mean)))
    return text_table(rows, right=range(1, len(phases) + 2))


def _share_text(value: float) -> str:
    if value > 1.0:
        return "all"
    return f"{value:.2%}" if value >= SMALLEST else "-"


def _formula_lines(policy: MonthsPolicy, made: Forecast) -> list[str]:
    rows = [("", "formula", "simulated", "difference", "")]
    for share in made.phases:
        if max(share.formula, share.simulated) >= SMALLEST:
            rows.append(
                (NAMES[share.phase], _share_text(share.formula), _share_text(share.simulated),
                 f"{share.simulated - share.formula:+.2%}", _why_different(share, policy, made))
            )  # fmt: skip
    simulated = made.effective.mean
    rows.append(("effective", f"{made.formula:.2%}", f"{simulated:.2%}", f"{simulated - made.formula:+.2%}", ""))
    return text_table(rows, right=(1, 2, 3))


def _why_different(one: PhaseShare, policy: MonthsPolicy, made: Forecast) -> str:
    """Explain a difference between the formula and the simulation by what the formula leaves out."""
    if abs(one.simulated - one.formula) < 5e-4:
        return ""
    reasons: Mapping[str, str] = {
        "checkpoint": "more time is spent training" if one.simulated > one.formula else "less time is spent training",
        "copies": "the formula leaves them out",
        "redone": _why_redone(policy, less=one.simulated < one.formula),
        "waiting": "spare hosts ran out, or a switch was down",
        "stalled": "until other paths took over",
        "degraded": "a smaller job or less bandwidth until repaired",
        "stopped": 'fault.recovery = "stop"',
    }
    return reasons.get(one.phase) or _why_recovery(made, less=one.simulated < one.formula)


def _why_redone(policy: MonthsPolicy, *, less: bool) -> str:
    if not less:
        return "corruption rolls back to a checkpoint from before it"
    if math.isfinite(policy.saving.copy_every_s):
        return f"{format_seconds(policy.saving.copy_every_s / 2)} lost with in-memory checkpoints"
    return "a failure while the job is down loses no work"


def _why_recovery(made: Forecast, *, less: bool) -> str:
    if not less:
        return plural(round(made.planned), "planned restart")
    if sum(share.simulated for share in made.phases if share.phase in ("waiting", "stopped")) > IDLE:
        return "a job that is stopped does not fail"
    borne = f"{plural(round(made.borne), 'network failure')} survived; " if made.borne else ""
    return f"{borne}failures in a recovery overlap"


def _failure_lines(made: Forecast) -> list[str]:
    rows = [("cause", "per day", "per unit and day", "units", "interruptions")]
    for rate in made.rates:
        unit_rate = f"{rate.per_unit_day:.2g} per {rate.unit}"
        rows.append(
            (rate.cause, f"{rate.per_day:.3g}", unit_rate, f"{rate.units:,.0f}", f"{made.by_cause[rate.cause]:,.1f}")
        )
    lines = text_table(rows, right=(1, 3, 4))
    if made.borne:
        lines.append(f"{made.borne:,.1f} link and switch failures caused no interruption")
    return lines + _source_lines(made)


def _source_lines(made: Forecast) -> list[str]:
    """Format the sources of the rates: the usual mix in one line, and a line for each source of a named fabric."""
    usual = [rate for rate in made.rates if LLAMA in rate.source]
    counts = ", ".join(f"{rate.cause} {rate.source.partition(' ')[0]}" for rate in usual)
    lines = [f"{counts} {usual[0].source.partition(' ')[2]}"] if usual else []
    fabric_sources = dict.fromkeys(rate.source for rate in made.rates if rate not in usual)
    return lines + [
        f"{', '.join(rate.cause for rate in made.rates if rate.source == source)}: {source}"
        for source in fabric_sources
    ]


def _loss_lines(plan: Plan, made: Forecast) -> list[str]:
    """Format the results of rebuilding all ranks and of leaving a model replica out."""
    if not made.losses:
        return []
    rows = [("fault.on_loss", "effective", "lost per interruption", "tokens lost", "")]
    for response in made.losses:
        chosen = "the job's" if response.is_chosen else ""
        rows.append(
            (
                response.on_loss,
                f"{response.effective.mean:.2%}",
                format_seconds(response.lost_s) if response.lost_s else "-",
                format_count(response.lost_tokens),
                chosen,
            )
        )
    loss = plan.reliability.replica_loss
    assert loss is not None
    refused = why_not_left_out(plan.job, plan.layout, plan.cluster) if trains_with_phalanx(plan.job) else ""
    return [
        *text_table(rows, right=(1, 2, 3)),
        f"{loss.replicas:,} model replicas of {plural(loss.ranks, 'rank')}; the same failures, without checkpoints; "
        f"leaving out slows every step by at most {format_seconds(loss.exchange_s)}, which is counted",
        *([refused] if refused else []),
    ]


def _spare_lines(plan: Plan, policy: MonthsPolicy, made: Forecast) -> list[str]:
    lines = ["no spare hosts", _gap_text(made)]
    if made.spares:
        lines[0] = (
            f"{plural(made.spares, 'spare host')}, used {made.spares_used.mean:,.1f} times; all in use at once in "
            f"{made.spares_short:.0%} of runs (a repair takes {format_seconds(policy.repair_s)})"
        )
    if made.gave_up:
        lines.append(
            f"{made.gave_up:,.1f} times a run, {policy.restarts} failures occurred in a row without a step in between: "
            f"fault.restarts = {policy.restarts} would end the run there; the simulation continues"
        )
    if plan.duration.wall_s < made.days * DAY_S:
        lines.append(
            f"the job's tokens take {format_seconds(plan.duration.wall_s)}; the simulation continues beyond that"
        )
    return lines


def _gap_text(made: Forecast) -> str:
    gap = made.longest_gap_s
    if not gap.mean:
        return "no gap: training never stopped"
    low, high = (format_seconds(value) if value else "none" for value in (gap.run_low, gap.run_high))
    span = f" (80% of runs {low} to {high})" if made.runs > 1 else ""
    return f"longest gap without a step {format_seconds(gap.mean)}{span}"


def _money_lines(plan: Plan, made: Forecast) -> list[str]:
    if made.lost_usd is None or made.spares_usd is None:
        return [plan.bill.price_source]
    low, middle, high = made.lost_usd
    span = f" ({format_money(low)} to {format_money(high)})" if low < high else ""
    spares = ", spare hosts included" if made.spares else ""
    lines = [f"{format_money(middle)}{span} for time without training progress{spares}; {plan.bill.price_source}"]
    if made.spares:
        lines.append(
            f"{format_money(made.spares_usd[1])} of the bill is for keeping {plural(made.spares, 'spare host')}"
        )
    return lines


def _lever_lines(made: Forecast) -> list[str]:
    if not made.levers:
        return []
    rows = [("change", "effective", "90% confidence", "worth")]
    for lever in made.levers:
        gain, usd = lever.gain, made.rent_usd[1] * lever.gain.mean if made.rent_usd else None
        interval = "-" if math.isnan(gain.low) else f"{gain.low:+.2%} to {gain.high:+.2%}"
        rows.append((lever.name, f"{gain.mean:+.2%}", interval, format_money(usd) if usd is not None else "-"))
    return [*text_table(rows, right=(1, 2, 3)), "the same failures with one change; worth at the median price"]


def _wrap_line(text: str) -> list[str]:
    # Lines with columns belong to a table.
    if text.startswith(" ") or "  " in text:
        return [text]
    return textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
