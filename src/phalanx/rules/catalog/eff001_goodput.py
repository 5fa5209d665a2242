"""EFF001: enough of the wall time is effective training time."""

from __future__ import annotations

from phalanx.plan.plan import Plan
from phalanx.plan.reliability import Reliability, effective_time
from phalanx.rules.catalog.shared import (
    MARGIN,
    capped_s,
    job_s,
    refusal_text,
    severity_below,
    site_interval,
    unmeasured_rate,
    unstated_key,
)
from phalanx.rules.catalog.tel_measured import file_of, finite_value, still_reading, wall_s
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Spot, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import HOUR_S, format_seconds

NOT_JUDGED = 0.0
FAILED = "failed"


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the predicted effective training time, the measured one, and that of the worst hour."""
    if evidence.plan is None and evidence.log is None:
        return (_no_plan(evidence),)
    planned = () if evidence.plan is None else (_judge_prediction(evidence, limits),)
    if evidence.log is None:
        return planned
    return (*planned, *_judge_end(evidence), _judge_measured(evidence, limits), _worst_hour(evidence, limits))


def _no_plan(evidence: Evidence) -> Outcome:
    if evidence.refusals:
        return unknown(
            f"there is no plan: {refusal_text(evidence.refusals[0])}", fix="fix that first: TOP001 and MEM001 say how"
        )
    return unknown(
        "neither a plan nor a run says how much of the time is spent training", fix="name a cluster, or a run"
    )


def _judge_end(evidence: Evidence) -> tuple[Outcome, ...]:
    """Return a failure for a run that failed: its share of effective time does not matter then."""
    log = evidence.the_log
    if log.state != FAILED:
        return ()
    return (
        failed(
            f"the run ended as failed: {log.message or 'its status does not say why'}",
            value=log.state,
            threshold="done",
            at=Spot(file=f"{log.folder}/status.json"),
            impact=Impact(note="the rest of the job was not done, and what was not saved is lost"),
            fix="fix what it reports; phalanx train --resume RUN goes on from the last checkpoint",
        ),
    )


def _judge_prediction(evidence: Evidence, limits: Limits) -> Outcome:
    r, target = evidence.the_plan.reliability, limits.number("target")
    value, formula = _expected_share(evidence.the_plan)
    if value is None:
        return unknown("the plan's effective time is not a number", fix="plan the job again: phalanx plan JOB")
    if target <= NOT_JUDGED:
        return exempt(f"{value:.1%} predicted: reported, not judged on {evidence.profile.name}")
    if (missing := unmeasured_rate(evidence)) is not None:
        return missing
    message = f"{value:.1%} of the time is predicted to train, {target:.0%} is the target of {evidence.scaling.name}"
    if evidence.the_plan.job.fault.recovery == "stop":
        message += "; somebody starts it again after each failure (FLT003)"
    if value >= target:
        reason = f"how often {evidence.practice.trainer} saves; at the optimum {value:.1%} of the time would train"
        missing = unstated_key(evidence, "checkpoint.interval_s", reason)
        return missing or passed(message, formula=formula, value=value, threshold=target)
    return failed(
        message,
        formula=formula,
        value=value,
        threshold=target,
        at="fault.restart_s",
        severity=severity_below(value, target, limits),
        impact=evidence.loses(target - value, "up to the target of the class"),
        fix=f"each failure costs {r.lost_s:,.0f} s and {capped_s(evidence.the_plan) / 2:,.0f} s of work redone: "
        f"{_cheaper_settings(evidence.the_plan)}",
    )


def _expected_share(plan: Plan) -> tuple[float | None, tuple[str, ...]]:
    """Return the plan's effective time and its formula; a job shorter than an interval has only its last save."""
    r, length_s = plan.reliability, job_s(plan)
    if not r.interval_s > length_s:
        formula = (
            f"(1 - (lost {r.lost_s:,.0f} s + interval {r.interval_s:,.0f} s / 2) / MTBF {r.mtbf_s:,.0f} s)"
            f" / (1 + blocked {r.blocking_s:.3g} s / {r.interval_s:,.0f} s) = {r.effective_time:.3f}"
        )
        return finite_value(r.effective_time), (formula, *_at_other_sites(r))
    if not (r.mtbf_s > 0 and length_s > 0):
        return finite_value(r.effective_time), ()
    value = effective_time(0.0, length_s, r.mtbf_s, lost_s=min(r.lost_s, length_s))
    loss_text = f"lost {r.lost_s:,.0f} s + job {length_s:,.0f} s / 2"
    return finite_value(value), (
        f"1 - ({loss_text}) / MTBF {r.mtbf_s:,.0f} s = {value:.3f}: it ends within an interval",
    )


def _at_other_sites(r: Reliability) -> tuple[str, ...]:
    """Return the range of the value at published sites; empty where the user gives failure rate and recovery time."""
    shares = site_interval(r.effective_time_interval)
    if shares is None:
        return ()
    low, high = shares
    return (
        f"at 80 % of published sites {low:.3f} to {high:.3f}: give fault.failures_per_host_day, detect_s, restart_s",
    )


def _cheaper_settings(plan: Plan) -> str:
    """Return the settings that make failures cheaper: interval, copies in memory, and detection."""
    r, advice = plan.reliability, []
    if r.interval_s > 2 * r.optimal_interval_s:
        advice.append(f"checkpoint every {r.optimal_interval_s:,.0f} s (CKP001)")
    if r.memory_every <= 0:
        advice.append("keep copies in memory (checkpoint.memory_every)")
    advice.append("lower fault.detect_s and fault.restart_s to what drills measure")
    return ", ".join(advice)


def _judge_measured(evidence: Evidence, limits: Limits) -> Outcome:
    log, target = evidence.the_log, limits.number("target")
    value = finite_value(log.effective)
    if value is None:
        return still_reading(log, "the ledger's end") or unknown(
            "the log does not say how much of the time trained", fix="a run with a step and a readable launch.json does"
        )
    if target <= NOT_JUDGED:
        return exempt(f"{value:.1%} trained: reported, not judged on {evidence.profile.name}")
    if wall_s(log) < limits.number("least_wall_s"):
        lasted = format_seconds(wall_s(log))
        return exempt(f"{value:.1%} trained: reported, not judged, since {lasted} are mostly start and end")
    message = (
        f"{value:.1%} of {format_seconds(wall_s(log))} trained, {target:.0%} is the target of {evidence.scaling.name}"
    )
    formula = (f"seconds of steps that stayed / seconds on the clock = {value:.3f}; at least {target:g}",)
    if value >= target:
        return passed(message, formula=formula, value=value, threshold=target)
    return failed(
        message,
        formula=formula,
        value=value,
        threshold=target,
        at=file_of(log),
        severity=severity_below(value, target, limits),
        impact=evidence.loses(target - value, "up to the target of the class"),
        fix=f"the ledger names the accounts: {evidence.the_log.ledger or 'phalanx report RUN'}",
    )


def _worst_hour(evidence: Evidence, limits: Limits) -> Outcome:
    log, min_share = evidence.the_log, limits.number("hour")
    value = finite_value(log.lowest_hour)
    if value is None or min_share <= NOT_JUDGED or wall_s(log) < limits.number("least_wall_s"):
        return exempt("no full hour to judge by itself")
    if log.grammar.unclosed:
        return exempt(f"{value:.1%} in the worst hour: an incident is open, FLT002 judges it")
    message = f"{value:.1%} of the worst hour trained"
    formula = (f"{value:.3f}; at least {min_share:g}",)
    if value >= min_share:
        return passed(message, formula=formula, value=value, threshold=min_share)
    return failed(
        message,
        formula=formula,
        value=value,
        threshold=min_share,
        at=file_of(log),
        impact=evidence.loses_once((min_share - value) * HOUR_S, "in the worst hour, up to half of it"),
        fix="look at that hour in phalanx web, Run: effective training time over the last hour, with what happened",
    )


RULE = Rule(
    id="EFF001",
    slug="goodput",
    severity="error",
    requires="",
    uses="PL",
    requirement="Effective training time meets the target of the job's size.",
    why="""
Llama 3 trained more than 90 % of the time on 16,384 GPUs, MegaScale more than 90 % on 10,000, ByteRobust 97 % on 9,600,
and FT-HSDP reports 44 to 80 % on 100,000. Each point of a job of $10 million is $100,000. The mean hides what happened:
ByteRobust watches a sliding hour beside it.
""",
    how="""
Predicted: `E[ETTR] = (1 - (D + R + W + τ/2) / M) / (1 + δ/τ)` of the plan. Measured: seconds of steps that stayed over
the wall clock, from the ledger. Both at least 0.95 up to 4,096 devices, 0.90 up to 32,768, 0.80 beyond; 0.93 on TPUs. A
warning where at most a tenth more is lost than may be. A job that ends within a checkpoint interval is taken to have no
save but its last: `1 - (D + R + W + T/2) / M`. A run that ended as failed is an error, whatever its share and on any
hardware. No hour below 0.5, unless an incident is still open. Runs shorter than an hour are reported, not judged: their
start and end weigh too much. cpu-gloo is reported, not judged: these are machines to learn and to test on.
""",
    limits={
        "target": Limit(
            value=0.95,
            classes={"S4": 0.90, "S5": 0.80},
            profiles={"tpu": 0.93, "cpu-gloo": 0.0},
            note="least effective time: Llama 3, MegaScale, ByteRobust, FT-HSDP; TPU: Gemini 2.5; 0 is not judged",
        ),
        "margin": MARGIN,
        "hour": Limit(
            value=0.5, profiles={"cpu-gloo": 0.0}, note="least of any hour: our choice, after ByteRobust's sliding hour"
        ),
        "least_wall_s": Limit(value=3600.0, unit="s", note="before which start and end weigh too much: our choice"),
    },
    bad="""
[fault]
failures_per_host_day = 0.02   # as measured on this cluster
detect_s = 1800      # the timeout of a collective
restart_s = 21600    # somebody looks in the morning
""",
    good="""
[fault]
failures_per_host_day = 0.02   # as measured on this cluster
detect_s = 10
restart_s = 60
""",
    fix="Make failures cheaper: notice them sooner (FLT001), restart faster (FLT002), checkpoint near the optimum.",
    waive="A cluster with a failure rate that nobody on the job can change: give the measured rate in the reason.",
    references=(
        Reference(
            text="Llama 3, arXiv:2407.21783; MegaScale, arXiv:2402.15627; ByteRobust, arXiv:2509.16293", mark="read"
        ),
        Reference(text="FT-HSDP, arXiv:2602.00277: 44 to 80 % at 100,000", mark="secondary"),
        Reference(text="Gemini 2.5: 93 % goodput", mark="secondary"),
    ),
    check=check,
)
