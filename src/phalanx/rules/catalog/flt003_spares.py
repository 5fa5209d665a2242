"""FLT003: there are enough spare hosts, or the job can continue on fewer hosts."""

from __future__ import annotations

import math

from phalanx.plan.plan import Plan
from phalanx.plan.reliability import Reliability, spare_hosts
from phalanx.rules.catalog.flt_shared import per_failure
from phalanx.rules.catalog.shared import failure_chance, job_s, site_interval, unmeasured_rate
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import DAY_S, HOUR_S, format_seconds, plural

# Seconds from the end of a job to the next step when a scheduler queues it again: 454 to 768 s (ByteRobust table 7).
REQUEUE_S = 600.0


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the spares with the 99th percentile of hosts down at once, else the devices that a shrink leaves
    idle.
    """
    plan, fault = evidence.the_plan, evidence.the_job.fault
    if (missing := unmeasured_rate(evidence)) is not None:
        return missing
    if fault.recovery == "stop" and evidence.stated("fault.recovery"):
        return _judge_stop(evidence, limits)
    need, formula = _needed_spares(plan, limits)
    if need == 0:
        return exempt(
            f"of {plural(plan.reliability.hosts, 'host')} none is down 99 % of the time: no spare host is needed"
        )
    if not evidence.stated("fault.spares") and not evidence.stated("fault.recovery"):
        trainer = evidence.practice.trainer
        return unknown(
            f"{trainer} has no setting for spare hosts: {need} are needed",
            fix="say how many are kept: --set fault.spares=N",
        )
    have = plan.reliability.spares
    message = f"{plural(have, 'spare host')} where {need} are down at once in 1 % of the time"
    if have >= need:
        return passed(message, formula=formula, value=have, threshold=need, unit="hosts", at="fault.spares")
    elastic = evidence.stated("fault.recovery") and fault.recovery in ("auto", "shrink")
    idle, line = _idle_share(plan, need)
    if elastic and idle <= limits.number("idle_share"):
        passed_message = f"without {plural(need, 'host')} the job goes on smaller, {idle:.1%} of it idle"
        threshold = limits.number("idle_share")
        return passed(passed_message, formula=(*formula, line), value=idle, threshold=threshold, at="fault.recovery")
    return failed(
        message if not elastic else f"{message}, and going on smaller would leave {idle:.0%} of the job idle",
        formula=(*formula, *((line,) if elastic else ())),
        value=have,
        threshold=need,
        unit="hosts",
        at="fault.spares",
        impact=_waiting_cost(evidence, limits.number("repair_h") * HOUR_S, have),
        edits=(Edit(key="fault.spares", value=need, safe=True, note="99th percentile of hosts down at once"),),
    )


def _judge_stop(evidence: Evidence, limits: Limits) -> Outcome:
    """Judge a job that ends at its first failure and so uses no spare, whatever `fault.spares` is."""
    mtbf_s, length_s, max_risk = (
        evidence.the_plan.reliability.mtbf_s,
        job_s(evidence.the_plan),
        limits.number("stop_risk"),
    )
    if not (mtbf_s > 0 and length_s >= 0):
        return unknown("a time in the plan is not a number", fix="plan the job again: phalanx plan JOB")
    risk = failure_chance(evidence.the_plan)
    length_text, mtbf_text = format_seconds(length_s), format_seconds(mtbf_s)
    formula = (f"1 - exp(-{length_text} / {mtbf_text} between failures) = {risk:.1%}; at most {max_risk:.0%}",)
    message = f"the first failure ends the job, and one comes with {risk:.0%}"
    if risk <= max_risk:
        return passed(message, formula=formula, value=risk, threshold=max_risk, at="fault.recovery")
    return failed(
        f'{message}: fault.recovery = "stop" uses no spare and does not shrink',
        formula=formula,
        value=risk,
        threshold=max_risk,
        at="fault.recovery",
        severity="error" if limits.flag("stop_is_error") else "warning",
        impact=per_failure(evidence, REQUEUE_S, "queued again at once; longer where somebody must notice first"),
        edits=(Edit(key="fault.recovery", value="auto", safe=True, note="a spare takes over, or the job shrinks"),),
    )


def _needed_spares(plan: Plan, limits: Limits) -> tuple[int, tuple[str, ...]]:
    r, repair_s = plan.reliability, limits.number("repair_h") * 3600
    # expm1 keeps the digits of a small probability, which 1 − exp(−x) loses.
    down = -math.expm1(-r.failures_per_host_day * repair_s / DAY_S)
    need = spare_hosts(r.hosts, min(1.0, max(0.0, down)))
    return need, (
        f"p = 1 - exp(-{r.failures_per_host_day:.3g} per host and day × {repair_s / 3600:g} h) = {down:.3g}",
        f"P99 Binomial({r.hosts:,} hosts, p) = {need}",
        *_at_other_sites(r, repair_s),
    )


def _at_other_sites(r: Reliability, repair_s: float) -> tuple[str, ...]:
    """Return a line with the need at both ends of the failure rates of published sites; empty with a known rate."""
    rates = site_interval(r.failures_per_host_day_interval)
    if rates is None:
        return ()
    low, high = (spare_hosts(r.hosts, -math.expm1(-rate * repair_s / DAY_S)) for rate in rates)
    return (f"at 80 % of published sites {low} to {high}: your own rate is fault.failures_per_host_day",)


def _idle_share(plan: Plan, need: int) -> tuple[float, str]:
    """Return the share of devices idle without `need` hosts: a lost host takes its whole replica along."""
    layout = plan.layout
    replica = layout.tensor * layout.context * layout.pipeline
    if layout.data < 2:
        return 1.0, "one replica: a job that lost a part of it cannot go on smaller"
    lost_devices = need * max(replica, plan.cluster.host_devices)
    share = min(1.0, lost_devices / layout.devices)
    return (
        share,
        f"{need} hosts × max({replica:,} per replica, {plan.cluster.host_devices} per host) = {lost_devices:,} devices",
    )


def _waiting_cost(evidence: Evidence, repair_s: float, have: int) -> Impact:
    """Return the cost of waiting for a repair: at every failure without spares, else when all spares are in use."""
    r = evidence.the_plan.reliability
    note = "waiting for a host to be repaired"
    if not (r.mtbf_s > 0 and math.isfinite(r.mtbf_s)):
        return Impact(note=f"{note}: {format_seconds(repair_s)} of all devices at every failure")
    # Average number of hosts that are down at a time.
    away = repair_s / r.mtbf_s
    wait_s = repair_s / (have + 1) * _at_least(have, away)
    mtbf_text = format_seconds(r.mtbf_s)
    return evidence.loses(
        wait_s / (r.mtbf_s + wait_s), f"{note}, {format_seconds(wait_s)} a failure, one every {mtbf_text}"
    )


def _at_least(count: int, mean: float) -> float:
    """Return the probability of `count` or more events, with `mean` expected (Poisson).

    >>> round(_at_least(0, 0.5), 3), round(_at_least(1, 0.5), 3), round(_at_least(4, 0.5), 4)
    (1.0, 0.393, 0.0018)
    """
    fewer_chance = (
        math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count)) if mean > 0 else 1
    )
    return max(0.0, 1.0 - fewer_chance) if count else 1.0


RULE = Rule(
    id="FLT003",
    slug="spares-or-elastic",
    severity="warning",
    requires="JP",
    requirement="Enough warm spare hosts for the failures to be expected at once, or a job that can go on smaller.",
    why="""
A host that failed is away for hours. With s spares a job goes on at once as long as at most s hosts are down
together; ByteRobust keeps the 99th percentile, 2 to 4 spares for 128 to 1,024 machines, which a binomial with p =
1.25e-3 reproduces exactly (arXiv:2509.16293 table 5). A job that can shrink needs none, if what it leaves idle is
small: a lost host takes its whole replica along. A job that stops at its first failure uses neither.
""",
    how="""
`s >= P99 Binomial(hosts, 1 - exp(-λ·T_repair))` with λ failures per host and day from the cluster (or measured,
`fault.failures_per_host_day`) and `T_repair` a day; `spares = "auto"` is that number. Otherwise `fault.recovery` is
"auto" or "shrink" and `P99 · max(replica, host) / devices <= 10 %`. An error from 1,025 devices on. With
`fault.recovery = "stop"` only the chance of a failure counts: `1 - exp(-T_job / M) <= 10 %`, else an error from 65
devices on.
""",
    limits={
        "repair_h": Limit(
            value=24.0,
            unit="h",
            note="a host comes back after a day: our choice; a CPU process is started again in a minute",
            profiles={"cpu-gloo": 1 / 60},
        ),
        "stop_risk": Limit(value=0.10, note="chance that a job which stops at its first failure meets one: our choice"),
        "stop_is_error": Limit(value=False, classes={"S2": True}, note="in class S1 it warns, spec.md 6.3: our choice"),
        "idle_share": Limit(value=0.10, note="of the devices, idle while hosts are repaired: our choice"),
    },
    bad="""
[fault]
spares = 0
recovery = "replace"
""",
    good="""
[fault]
spares = "auto"
""",
    fix='`fault.spares = "auto"`, or a number of your own with a measured failure rate beside it.',
    waive="A cloud that replaces a host within minutes: then also set fault.restart_s to that.",
    references=(
        Reference(text="ByteRobust, arXiv:2509.16293 section 6.2 and table 5", mark="read"),
        Reference(text="P99 of the binomial reproduces the table", mark="computed"),
        Reference(text="repair in a day, 10 % idle", mark="our choice"),
    ),
    check=check,
    harder_from="S3",
)
