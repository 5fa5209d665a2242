"""CKP005: copies in memory lie outside the failure domain of their owner."""

from __future__ import annotations

import math

from phalanx.rules.catalog.intervals import ALONE, interval_edits, planned_cost
from phalanx.rules.catalog.shared import capped_s, failure_chance, job_s
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Severity, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check whether there are copies in memory, where they lie, and whether the disk still gets checkpoints."""
    place, every = evidence.practice.memory_copies, evidence.the_plan.reliability.memory_every
    if place is None and evidence.practice.trainer == "phalanx" and every:
        place = "not known"
    if place is None:
        return (_unknown_copies(evidence),)
    if place == "none" or every <= 0:
        return (_without_copies(evidence, limits, "no copies in memory"),)
    if too_old := _too_old(evidence, limits, every):
        return (_goes_back(evidence, too_old, "error" if limits.flag("required") else "warning"),)
    return (
        _unknown_copies(evidence) if place == "not known" else _judge_placement(evidence, limits, place),
        _judge_persistence(evidence, limits),
    )


def _unknown_copies(evidence: Evidence) -> Outcome:
    return unknown(
        f"it is not known where {evidence.practice.trainer} keeps copies in memory",
        fix="look up whether a lost host's state is held by another host",
        at="checkpoint.memory_every",
    )


def _too_old(evidence: Evidence, limits: Limits, every: int) -> str:
    """Return why copies in memory are older than the checkpoint on disk and so of no use; empty if they are not."""
    interval_s, step_s = capped_s(evidence.the_plan), evidence.the_plan.prediction.step_s
    # "auto" chooses an interval that pays.
    is_number = evidence.the_job.checkpoint.memory_every != "auto"
    if not (is_number and every * step_s > limits.number("memory_ratio") * interval_s):
        return ""
    copied, saved = _span_text(every * step_s), _span_text(interval_s)
    return f"a copy in memory every {every:,} steps, {copied}, where the disk gets one every {saved}"


def _span_text(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 1e15 else "for ever"


def _without_copies(evidence: Evidence, limits: Limits, statement: str) -> Outcome:
    if not limits.flag("required"):
        return exempt(f"{statement}: not required of {plural(evidence.devices, 'device')}, the disk is enough")
    return _goes_back(evidence, statement, "error")


def _goes_back(evidence: Evidence, statement: str, severity: Severity) -> Outcome:
    r = evidence.the_plan.reliability
    interval_s = capped_s(evidence.the_plan)
    lost_share = interval_s / 2 / r.mtbf_s if math.isfinite(interval_s) and r.mtbf_s > 0 else 0.0
    is_phalanx = evidence.practice.trainer == "phalanx"
    return failed(
        f"{statement}: each failure of these {plural(r.hosts, 'host')} goes back to the disk",
        formula=(
            f"τ/2M = {_span_text(interval_s)} / (2 × {r.mtbf_s:,.0f} s) = {lost_share:.2%} of the time is done again",
        ),
        value="none",
        threshold="other host",
        at="checkpoint.memory_every",
        severity=severity,
        impact=evidence.loses(lost_share, "work since the last checkpoint on disk, at every failure"),
        fix=""
        if is_phalanx
        else f"a trainer, or an addition to {evidence.practice.trainer}, that keeps copies in memory",
        edits=(Edit(key="checkpoint.memory_every", value="auto", safe=True, note="at most 1 % of the time"),)
        if is_phalanx
        else (),
    )


def _judge_placement(evidence: Evidence, limits: Limits, place: str) -> Outcome:
    """Check the placement of the copies: a host is a failure domain, and in a rack-scale machine so is the rack."""
    plan, hosts = evidence.the_plan, evidence.the_plan.reliability.hosts
    racks = max(1, math.ceil(evidence.devices / max(1, plan.cluster.domain_devices)))
    where = f"{plural(hosts, 'host')} in {plural(racks, 'domain')} of {plural(plan.cluster.domain_devices, 'device')}"
    formula = (f"{where}; copies: {place}",)
    if hosts <= 1 and place in ("other process", "other host", "other rack"):
        return passed("one host: copies outlive every process of it, the disk outlives the host", formula=formula)
    if place == "other process":
        return _same_domain(f"copies lie on the host they protect, and there are {hosts:,}", formula, limits)
    rack_scale = plan.cluster.domain_devices >= limits.number("rack_devices") > plan.cluster.host_devices
    if rack_scale and racks > 1 and place != "other rack":
        message = f"copies lie on another host, mostly of the same rack of {plan.cluster.domain_devices} devices"
        return _same_domain(message, formula, limits)
    return passed(
        f"copies lie on another {'rack' if rack_scale and racks > 1 else 'host'}", formula=formula, value=place
    )


def _same_domain(statement: str, formula: tuple[str, ...], limits: Limits) -> Outcome:
    return failed(
        statement,
        formula=formula,
        at="checkpoint.memory_every",
        severity="error" if limits.flag("required") else None,
        impact=Impact(note="the loss of that domain goes back to the disk: half an interval and a restart, each time"),
        fix="keep the copy outside the domain, or count with the disk: CKP001's interval holds for that failure",
    )


def _judge_persistence(evidence: Evidence, limits: Limits) -> Outcome:
    r, max_ratio = evidence.the_plan.reliability, limits.number("persistent_ratio")
    best_s = r.optimal_interval_s
    if not math.isfinite(best_s + r.interval_s) or best_s <= 0 or job_s(evidence.the_plan) <= best_s:
        return exempt("the job ends before a checkpoint on disk pays: its last one is enough")
    # A job that ends earlier has its last checkpoint.
    interval_s = capped_s(evidence.the_plan)
    ratio = interval_s / best_s
    message = f"beside copies in memory the disk gets one every {_span_text(interval_s)}"
    formula = (f"τ/τ* = {_span_text(interval_s)} / {_span_text(best_s)} = {ratio:.1f}",)
    if ratio <= max_ratio:
        return passed(message, formula=formula, value=ratio, threshold=max_ratio, unit="x", at="checkpoint.interval_s")
    edits = interval_edits(evidence, planned_cost(evidence), "Daly's optimum without copies in memory")
    return failed(
        f"{message}, {ratio:.1f}x the optimum",
        formula=formula,
        value=ratio,
        threshold=max_ratio,
        unit="x",
        at="checkpoint.interval_s",
        severity="warning",
        impact=evidence.loses_once(
            failure_chance(evidence.the_plan) * interval_s / 2,
            "half an interval, times the chance of a failure, should memory once not hold every part",
        ),
        fix="" if edits else f"{ALONE}faster storage or a faster copy to host memory",
        edits=edits,
    )


RULE = Rule(
    id="CKP005",
    slug="replica-outside-domain",
    severity="warning",
    requires="JP",
    requirement="Copies of the state in memory lie outside the failure domain of their owner, and the disk "
    "still follows.",
    why="""
A copy in memory makes a failure cost a step in place of half an interval, but only if it outlives the failure: Gemini
recovers over 13 times faster from the memory of other machines. Hosts die whole, and in a rack-scale machine (72 GPUs
behind one set of switches) so does a rack. ByteRobust keeps the copy outside the machine and outside the owner's
tensor, pipeline and data groups, since it evicts whole groups.
""",
    how="""
The trainer keeps copies on another host (its documentation or code) where there are several hosts, on another rack
where fast domains of 32 devices and more span several hosts and the job has several of them; on one host a process
that outlives the rank is enough. From 1,025 devices on having no copies, copies inside the domain, or copies that are
older than the disk's (`memory_every · step > τ`), is an error: τ/2M of the time is done again.
The disk gets a checkpoint at least every 10 · τ*. Whether the peer is outside the owner's parallel groups is not
checked: Phalanx replaces single ranks.
""",
    limits={
        "required": Limit(
            value=False,
            note="whether a job must keep copies in memory, outside the domain: from class S3 on (over 1,024 devices), "
            "spec.md 6.3: our choice",
            classes={"S3": True},
        ),
        "rack_devices": Limit(
            value=32,
            unit="devices",
            note="a fast domain of so many, in several hosts, fails as one (NVL36, NVL72): our choice",
        ),
        "memory_ratio": Limit(
            value=1.0,
            unit="x",
            note="age of a copy in memory over the disk's interval, beyond which it is none: computed",
        ),
        "persistent_ratio": Limit(value=10.0, unit="x", note="of the disk's interval over Daly's optimum: our choice"),
    },
    bad="""
[checkpoint]
interval_s = 200000
""",
    good="""
[checkpoint]
memory_every = "auto"
""",
    fix='`memory_every = "auto"`; a peer on another host, or another rack.',
    waive="A job of one rack whose owner accepts to go back to the disk when it fails.",
    references=(
        Reference(text="ByteRobust, arXiv:2509.16293 section 6.3", mark="read"),
        Reference(text="Gemini, doi 10.1145/3600006.3613145", mark="secondary"),
        Reference(text="10 τ*, and from which size", mark="our choice"),
    ),
    check=check,
)
