"""FLT003: enough spare hosts, or a job that can go on smaller."""

from __future__ import annotations

import math

from phalanx.plan.plan import Plan
from phalanx.plan.reliability import REPAIR_S, spares
from phalanx.spec.evidence import Evidence
from phalanx.spec.outcome import Edit, Outcome, exempt, failed, passed, unknown
from phalanx.spec.rule import Limit, Limits, Reference, Rule
from phalanx.spec.rules.flt_shared import per_failure
from phalanx.units import DAY_S


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Spares against the 99th percentile of hosts that are down at once; else what shrinking leaves idle."""
    plan, fault = evidence.the_plan, evidence.the_job.fault
    need, formula = _need(plan, limits)
    if need == 0:
        return exempt(f"of {plan.reliability.hosts:,} hosts none is down in 99 % of the time: no spare is needed")
    if not evidence.stated("fault.spares") and not evidence.stated("fault.recovery"):
        trainer = evidence.practice.trainer
        return unknown(
            f"{trainer} has no word for spare hosts: {need} are needed",
            fix="say how many are kept: --set fault.spares=N",
        )
    have = plan.reliability.spares
    told = f"{have} spare hosts where {need} are down at once in 1 % of the time"
    if have >= need:
        return passed(told, formula=formula, value=have, threshold=need, unit="hosts", at="fault.spares")
    elastic = evidence.stated("fault.recovery") and fault.recovery in ("auto", "shrink")
    idle, line = _idle(plan, need)
    if elastic and idle <= limits.number("idle_share"):
        what = f"without {need} hosts the job goes on smaller, {idle:.1%} of it idle"
        threshold = limits.number("idle_share")
        return passed(what, formula=(*formula, line), value=idle, threshold=threshold, at="fault.recovery")
    return failed(
        told if not elastic else f"{told}, and going on smaller would leave {idle:.0%} of the job idle",
        formula=(*formula, *((line,) if elastic else ())),
        value=have,
        threshold=need,
        unit="hosts",
        at="fault.spares",
        impact=per_failure(evidence, _wait_s(plan, need, have), "waiting for a host to be repaired"),
        edits=(Edit(key="fault.spares", value=need, safe=True, note="99th percentile of hosts down at once"),),
    )


def _need(plan: Plan, limits: Limits) -> tuple[int, tuple[str, ...]]:
    r, repair_s = plan.reliability, limits.number("repair_h") * 3600
    down = -math.expm1(-r.failures_per_host_day * repair_s / DAY_S)
    need = spares(r.hosts, min(1.0, max(0.0, down)))
    return need, (
        f"p = 1 - exp(-{r.failures_per_host_day:.3g} per host and day × {repair_s / 3600:g} h) = {down:.3g}",
        f"P99 Binomial({r.hosts:,} hosts, p) = {need}",
    )


def _idle(plan: Plan, need: int) -> tuple[float, str]:
    """Share of the devices without work when so many hosts are gone: a lost host takes its whole replica along."""
    layout = plan.layout
    replica = layout.tensor * layout.context * layout.pipeline
    if layout.data < 2:
        return 1.0, "one replica: a job that lost a part of it cannot go on smaller"
    lost = need * max(replica, plan.cluster.host_devices)
    share = min(1.0, lost / layout.devices)
    return (
        share,
        f"{need} hosts × max({replica:,} per replica, {plan.cluster.host_devices} per host) = {lost:,} devices",
    )


def _wait_s(plan: Plan, need: int, have: int) -> float:
    """Seconds a failure waits for want of a spare: the repair, for the share of failures that find none."""
    return REPAIR_S * 0.01 if have else REPAIR_S * min(1.0, need / max(1, plan.reliability.hosts))


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
small: a lost host takes its whole replica along.
""",
    how="""
`s >= P99 Binomial(hosts, 1 - exp(-λ·T_repair))` with λ failures per host and day from the cluster (or measured,
`fault.failures_per_host_day`) and `T_repair` a day; `spares = "auto"` is that number. Otherwise `fault.recovery` is
"auto" or "shrink" and `P99 · max(replica, host) / devices <= 10 %`. An error from 1,025 devices on.
""",
    limits={
        "repair_h": Limit(
            value=24.0,
            unit="h",
            note="a host comes back after a day: house; a CPU process is started again in a minute",
            profiles={"cpu-gloo": 1 / 60},
        ),
        "idle_share": Limit(value=0.10, note="of the devices, idle while hosts are repaired: house"),
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
        Reference(text="repair in a day, 10 % idle", mark="house"),
    ),
    check=check,
    harder_from="S3",
)
