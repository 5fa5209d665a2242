"""EFF003: steps are steady, and little of their time is spent waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, still_reading, wall_s
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts, StepFacts

NOT_JUDGED = 1.0  # a share of 1, which nothing exceeds


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check spread, drift, waiting for data and imbalance, one outcome each."""
    log, steps = evidence.the_log, evidence.the_log.steps
    min_steps = limits.number("least_steps")
    if steps is None or steps.duration_s is None:
        missing = still_reading(log, "steady steps")
        if missing is None and steps is not None and steps.count > min_steps:
            missing = unknown("no step has a duration", fix="every rank writes duration_s with every step")
        return (missing or exempt("no steady steps yet"),)
    if steps.duration_s.count < min_steps:
        return (exempt(f"{plural(steps.duration_s.count, 'steady step')}: too few to judge (from {min_steps:g} on)"),)
    return (
        _judge_spread(evidence, steps, limits),
        _judge_drift(evidence, log, steps, limits),
        _judge_data(evidence, steps, limits),
        _judge_imbalance(evidence, log, limits),
    )


def _judge_spread(evidence: Evidence, steps: StepFacts, limits: Limits) -> Outcome:
    duration_s, max_spread = steps.duration_s, limits.number("spread")
    p50, p95 = (finite_value(duration_s.p50), finite_value(duration_s.p95)) if duration_s is not None else (None, None)
    if not p50 or p50 <= 0 or p95 is None or duration_s is None:
        return exempt("steps take no time on record")
    ratio = p95 / p50
    message = f"p95 of the steps is {ratio:.2f}x their median {format_seconds(p50)}"
    formula = (f"{p95:.4g} s / {p50:.4g} s = {ratio:.3f}; at most {max_spread:g}",)
    if ratio <= max_spread:
        return passed(message, formula=formula, value=ratio, threshold=max_spread, unit="x")
    mean = finite_value(duration_s.mean) or p50
    return failed(
        message,
        formula=formula,
        value=ratio,
        threshold=max_spread,
        unit="x",
        at=file_of(evidence.the_log),
        impact=evidence.loses(1 - p50 / mean if mean > p50 else 0.0, "mean step over the median one"),
        fix="look at slow steps in phalanx web, Step: data, garbage collection, checkpoints, a busy network or host",
    )


def _judge_drift(evidence: Evidence, log: LogFacts, steps: StepFacts, limits: Limits) -> Outcome:
    drift, max_drift = finite_value(steps.drift), limits.number("drift")
    if drift is None or max_drift >= NOT_JUDGED or wall_s(log) < limits.number("drift_wall_s"):
        statement = f"drift {drift:+.1%}: " if drift is not None else ""
        return exempt(f"{statement}not judged of {format_seconds(wall_s(log))}")
    statement = f"the last quarter's steps take {drift:+.1%} of the first quarter's"
    formula = (f"median of the last quarter / median of the first - 1 = {drift:+.4f}; at most {max_drift:g}",)
    if drift <= max_drift:
        return passed(statement, formula=formula, value=drift, threshold=max_drift)
    return failed(
        statement,
        formula=formula,
        value=drift,
        threshold=max_drift,
        at=file_of(evidence.the_log),
        impact=evidence.loses(drift / (1 + drift) / 2, "steps that became slower, half of it over the run"),
        fix="look for what grows: logs, caches, fragments in the allocator, clocks that were lowered by heat",
    )


def _judge_data(evidence: Evidence, steps: StepFacts, limits: Limits) -> Outcome:
    share, max_share = finite_value(steps.data_share), limits.number("data")
    if share is None:
        return exempt("the log does not say how long steps wait for data")
    message = f"{share:.1%} of the step time waits for data"
    formula = (f"{share:.4f}; at most {max_share:g}",)
    if share <= max_share:
        return passed(message, formula=formula, value=share, threshold=max_share)
    return failed(
        message,
        formula=formula,
        value=share,
        threshold=max_share,
        at=file_of(evidence.the_log),
        impact=evidence.loses(share - max_share, "waiting for batches"),
        fix="build the data where it is read fast (phalanx data build), on a local disk, in fewer and larger files",
    )


def _judge_imbalance(evidence: Evidence, log: LogFacts, limits: Limits) -> Outcome:
    slowest, max_waste = finite_value(log.imbalance), limits.number("waste")
    if slowest is None or slowest <= 0:
        return exempt("the log does not compare the ranks' own times")
    waste = max(0.0, 1 - 1 / slowest)
    message = f"{waste:.1%} of the time is lost to uneven work (S = {slowest:.2f})"
    if max_waste >= NOT_JUDGED:
        return exempt(f"{message}: reported, not judged on {evidence.profile.name}, where ranks share cores")
    formula = (f"1 - 1/S = 1 - 1/{slowest:.3f} = {waste:.3f}; at most {max_waste:g}",)
    if waste <= max_waste:
        return passed(message, formula=formula, value=waste, threshold=max_waste)
    return failed(
        message,
        formula=formula,
        value=waste,
        threshold=max_waste,
        at=file_of(evidence.the_log),
        impact=evidence.loses(waste - max_waste, "ranks that wait for the slowest"),
        fix="first the plan (uneven stages, sequences of unequal length), then the machine that TEL004 names",
    )


RULE = Rule(
    id="EFF003",
    slug="steady-steps",
    severity="warning",
    requires="L",
    uses="P",
    requirement="Steps take the same time, do not become slower, and are not lost to data or to uneven work.",
    why="""
ByteDance measured S = T / T_ideal above 1.1 on 42.5 % of 3,079 jobs of 128 GPUs or more, 10.4 % of the device hours
(arXiv:2505.05713). Llama 3 saw 1 to 2 % over a day from heat alone. MegaScale found steps that became slower because
Python's garbage collection drifted apart between ranks.
""",
    how="""
Over steady steps (not the first five of a membership, not those that compiled; at least 100): `p95 / p50 <= 1.10`, on
cpu-gloo 1.5, since cores are shared with the rest of the machine; median of the last quarter over that of the first
`<= 1.05` (runs of a day or more; not judged on cpu-gloo); waiting for data `<= 2 %` of the step time; `1 - 1/S <= 10 %`
(not judged on cpu-gloo, where the scheduler decides who waits).
""",
    limits={
        "spread": Limit(
            value=1.10,
            unit="x",
            profiles={"cpu-gloo": 1.5},
            note="p95 over p50: OSDI'25's S, secondary; cpu 1.5: our choice",
        ),
        "drift": Limit(
            value=0.05,
            profiles={"cpu-gloo": NOT_JUDGED},
            note="over a day: our choice, above the 1 to 2 % that heat causes (Llama 3, read); 1 is not judged",
        ),
        "drift_wall_s": Limit(value=86400.0, unit="s", note="before which a drift is no trend: a day, for heat"),
        "data": Limit(value=0.02, note="of the step time: our choice"),
        "waste": Limit(
            value=0.10,
            profiles={"cpu-gloo": NOT_JUDGED},
            note="1 - 1/S of uneven work: OSDI'25, secondary; 1 is not judged",
        ),
        "least_steps": Limit(value=100, unit="steps", note="of fewer, p95 rests on a handful of steps: our choice"),
    },
    bad='{"steps": 1000, "p50_s": 4.3, "p95_s": 6.9, "data_share": 0.08}',
    good='{"steps": 1000, "p50_s": 4.3, "p95_s": 4.5, "data_share": 0.003}',
    fix="`phalanx web RUN`, Step and Mesh, show where slow steps spend their time and which ranks wait.",
    waive="Sequences of very unequal length on purpose: name the spread you expect.",
    references=(
        Reference(text="stragglers at ByteDance, arXiv:2505.05713", mark="secondary"),
        Reference(text="Llama 3, arXiv:2407.21783 section 3.3; MegaScale, arXiv:2402.15627 section 6.3", mark="read"),
    ),
    check=check,
)
