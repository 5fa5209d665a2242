"""FLT007: replicas are compared, so that a silent data corruption is noticed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.plan.auto_settings import digest_every
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Severity, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import HOUR_S, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

KEY = "fault.digest_every"


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Compare the steps between two digests with the checkpoint interval, and judge the differences found in a run."""
    if evidence.devices < 2:
        return (exempt("one device has no replica to be compared with"),)
    if not evidence.stated(KEY):
        trainer = evidence.practice.trainer
        return (
            unknown(
                f"whether {trainer} compares replicas is not known", fix="compare a digest of the weights in a callback"
            ),
        )
    log = evidence.log
    from_log = _judge_findings(evidence, log, limits) if log is not None else ()
    return (_judge_frequency(evidence, limits), *from_log)


def _judge_frequency(evidence: Evidence, limits: Limits) -> Outcome:
    plan, most_s, severity = evidence.the_plan, _most_s(evidence, limits), _severity_by_size(evidence, limits)
    every = digest_every(evidence.the_job.fault, plan.reliability, plan.prediction, wall_s=plan.duration.wall_s)
    step_s = plan.prediction.step_s
    if every <= 0:
        return failed(
            "replicas are never compared",
            formula=(f"K = 0; K · {step_s:.3g} s per step should be within (0, {most_s:,.0f}] s",),
            value=0,
            threshold=_best_spacing(step_s, most_s),
            unit="steps",
            at=KEY,
            severity=severity,
            impact=_unnoticed_cost(evidence),
            edits=(Edit(key=KEY, value="auto", safe=True, note="once in a checkpoint interval and in 100 steps"),),
        )
    span_s = every * step_s
    often = "step" if every == 1 else plural(every, "step")
    message = f"replicas are compared every {often}, {format_seconds(span_s)}"
    formula = (f"K · t_step = {every} × {step_s:.3g} s = {span_s:,.1f} s; checkpoint interval {most_s:,.0f} s",)
    if span_s <= most_s or every == 1:
        return passed(message, formula=formula, value=span_s, threshold=most_s, unit="s", at=KEY)
    return failed(
        f"{message}: less often than checkpoints are taken",
        formula=formula,
        value=span_s,
        threshold=most_s,
        unit="s",
        at=KEY,
        severity=severity,
        impact=_unnoticed_cost(evidence),
        edits=(Edit(key=KEY, value=_best_spacing(step_s, most_s), safe=True, note="once in a checkpoint interval"),),
    )


def _most_s(evidence: Evidence, limits: Limits) -> float:
    """Return the longest allowed time between comparisons: the checkpoint interval, or the job if that is shorter."""
    plan = evidence.the_plan
    durations_s = [
        seconds
        for seconds in (plan.reliability.interval_s, plan.duration.wall_s)
        if math.isfinite(seconds) and seconds > 0
    ]
    return limits.number("intervals") * min(durations_s, default=HOUR_S)


def _best_spacing(step_s: float, most_s: float) -> int:
    return max(1, math.floor(most_s / step_s)) if step_s > 0 else 1


def _severity_by_size(evidence: Evidence, limits: Limits) -> Severity:
    """Return the severity: an error from a million device-hours on, in which a silent error is almost certain."""
    wall_s = evidence.wall_s or 0.0
    hours = evidence.devices * wall_s / HOUR_S
    return "error" if math.isfinite(hours) and hours >= limits.number("device_hours") else "warning"


def _unnoticed_cost(evidence: Evidence) -> Impact:
    """Return the expected cost of silent errors, at the rate of Llama 3: six in 54 days of 16,384 GPUs."""
    wall_s = evidence.wall_s
    if not wall_s or not math.isfinite(wall_s):
        return Impact(note="weights that are wrong, and nobody knows since when")
    expected = evidence.devices * wall_s / HOUR_S * 6 / (16_384 * 54 * 24)
    days = min(wall_s, 86_400.0)
    return evidence.loses_once(
        expected * days, f"{expected:.2g} silent errors expected, each at least {format_seconds(days)} of work"
    )


def _judge_findings(evidence: Evidence, log: LogFacts, limits: Limits) -> tuple[Outcome, ...]:
    digests = log.digests
    if digests is None or not digests.compared:
        if digests is not None and digests.alone:
            message = f"nobody holds a copy of these weights: {plural(digests.alone, 'digest')}, none to compare with"
            return (exempt(f"{message}; each rank compares its own between two updates"),)
        # No comparison was due yet, or comparisons are off, which the other outcome reports.
        plan = evidence.the_plan
        every = digest_every(evidence.the_job.fault, plan.reliability, plan.prediction, wall_s=plan.duration.wall_s)
        if every <= 0 or log.steps is None or log.steps.count <= every:
            return ()
        due = "the log holds no comparison, though some were due"
        return (unknown(due, fix="look at the digests of events-*.jsonl"),)
    message = f"{plural(digests.compared, 'comparison')}, {digests.differing} with a difference"
    if digests.differing <= limits.number("differing"):
        return (passed(message, value=digests.differing, threshold=limits.number("differing"), unit="steps"),)
    return (
        failed(
            message,
            value=digests.differing,
            threshold=limits.number("differing"),
            unit="steps",
            at=digests.differing_spot or "",
            severity="error",
            impact=_unnoticed_cost(evidence),
            fix="the incident names the rank: take its device out of service, and go back to a checkpoint before it",
        ),
    )


RULE = Rule(
    id="FLT007",
    slug="sdc-guard",
    severity="warning",
    requires="JP",
    uses="L",
    requirement="Replicated weights are compared bit by bit, at least once in a checkpoint interval.",
    why="""
A device can compute wrongly without failing. Of Llama 3's 419 unexpected interruptions 6 were silent data corruption
(arXiv:2407.21783 table 5), and vendors' own tests find about 70 % of such devices (arXiv:2509.16293): the job has to
look itself. A difference found within a checkpoint interval costs that interval; later there may be no intact
checkpoint left.
""",
    how="""
`K · t_step <= τ`, with K = `fault.digest_every` ("auto" chooses it), t_step the predicted step and τ the checkpoint
interval (or the whole job, if that is shorter). Of a run: no comparison found a difference. An error from 4,097
devices on, and where the job takes 1,000,000 device-hours or more. Shards that one rank alone holds are compared with
themselves between two updates; an error inside their update is not seen.
""",
    limits={
        "intervals": Limit(value=1.0, unit="checkpoint intervals", note="an intact checkpoint must still be there"),
        "device_hours": Limit(value=1e6, unit="device-hours", note="from which it is an error: our choice"),
        "differing": Limit(value=0, unit="steps", note="comparisons with a difference: none"),
    },
    bad="""
[fault]
digest_every = 0
""",
    good="""
[fault]
digest_every = "auto"
""",
    fix='`fault.digest_every = "auto"`. 1 GB of weights takes 3.4 ms on an H200 '
    "(benchmarks/2026-11-15-in-memory-checkpoints.md).",
    waive="Kernels that are not deterministic between replicas, where every comparison would differ.",
    references=(
        Reference(text="Llama 3, arXiv:2407.21783 table 5: 6 of 419", mark="read"),
        Reference(text="ByteRobust, arXiv:2509.16293: EUD recall about 70 %", mark="read"),
        Reference(text="1,000,000 device-hours", mark="our choice"),
    ),
    check=check,
    harder_from="S4",
)
