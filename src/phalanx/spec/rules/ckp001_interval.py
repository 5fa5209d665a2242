"""CKP001: the checkpoint interval is near Daly's optimum."""

from __future__ import annotations

import math

from phalanx.plan.reliability import overhead
from phalanx.spec.evidence import Evidence
from phalanx.spec.outcome import Edit, Outcome, exempt, failed, passed
from phalanx.spec.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Interval over optimum, both from the plan."""
    r, wall_s = evidence.the_plan.reliability, evidence.the_plan.duration.wall_s
    best_s, interval_s = r.optimal_interval_s, r.interval_s
    if not math.isfinite(best_s) or wall_s <= best_s:
        return exempt(f"the job ends in {format_seconds(wall_s)}, before a checkpoint pays: the last one is enough")
    ratio = interval_s / best_s
    off = max(ratio, 1 / ratio)
    formula = (
        f"M = 86400 / ({r.hosts:,} hosts × {r.failures_per_host_day:.3g} failures per host and day) = {r.mtbf_s:,.0f} s",
        f"τ* = Daly(δ = {r.blocking_s:.3g} s, M) = {best_s:,.0f} s;  τ/τ* = {ratio:.2f}",
    )
    told = f"interval {interval_s:,.0f} s is {ratio:.2f}x the optimum {best_s:,.0f} s"
    if off <= limits.number("warn_ratio"):
        return passed(told, formula=formula, value=ratio, threshold=limits.number("warn_ratio"), unit="x")
    lost = overhead(r.blocking_s, interval_s, r.mtbf_s) - overhead(r.blocking_s, best_s, r.mtbf_s)
    wrong = off > limits.number("error_ratio")
    return failed(
        told,
        formula=formula,
        value=ratio,
        threshold=limits.number("error_ratio" if wrong else "warn_ratio"),
        unit="x",
        at="checkpoint.interval_s",
        severity="error" if wrong else "warning",
        impact=evidence.loses(lost, "checkpoints and work redone, beside those at the optimum"),
        edits=(Edit(key="checkpoint.interval_s", value=max(1, round(best_s)), safe=True, note="Daly's optimum"),),
    )


RULE = Rule(
    id="CKP001",
    slug="interval-daly",
    severity="error",
    requires="JP",
    uses="L",
    requirement="The interval between checkpoints is near the optimum for this hardware and this job.",
    why="""
Too often costs time to save, too rarely costs work redone after a failure. The optimum is √(2δM) to first order, with
δ the seconds that training stands still for a checkpoint and M the mean time between failures. The curve is flat: twice
the optimum costs 25 % more overhead, four times 112 % more, ((x + 1/x)/2).
""",
    how="""
`τ* = √(2δM)·[1 + ⅓√(δ/2M) + δ/(18M)] − δ`, `M = 86400 / (hosts · λ)`. A warning where τ/τ* leaves [½, 2], an error
where it leaves [¼, 4]; a job shorter than τ* needs its last checkpoint only.
""",
    limits={
        "warn_ratio": Limit(value=2.0, unit="x", note="25 % more overhead than at the optimum: computed"),
        "error_ratio": Limit(value=4.0, unit="x", note="112 % more overhead than at the optimum: computed"),
    },
    bad="""
[checkpoint]
interval_s = 86400
""",
    good="""
[checkpoint]
interval_s = "auto"
""",
    fix='`interval_s = "auto"` lets the plan compute it; `--fix` writes the optimum as a number.',
    waive="Storage that is shared and rationed, or a measured failure rate that the cluster file does not know.",
    references=(
        Reference(text="Young, CACM 1974; Daly, FGCS 2006", mark="recalled"),
        Reference(text="failure rates: Llama 3, arXiv:2407.21783 table 5; Meta RSC, arXiv:2410.21680", mark="read"),
    ),
    check=check,
    softer_in=("S1",),
)
