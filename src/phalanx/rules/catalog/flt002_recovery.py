"""FLT002: after a failure the next step comes within a bound for the size of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.flt_shared import (
    counted_drills,
    high_percentile,
    how_to_see,
    no_drill,
    per_failure,
    which_drills,
    with_ranks,
)
from phalanx.rules.catalog.shared import MARGIN, severity_above
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Spot, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Judge the recovery times of the run's failures, or else of drills."""
    log = evidence.log
    if log is not None and _is_fatal(log):
        return _never_recovered(evidence, log)
    if log is not None and log.recovery_s is not None and log.recovery_s.count:
        count = log.recovery_s.count
        return _judge_recovery(evidence, log.recovery_s.p95, f"in {plural(count, 'failure')}", limits)
    drills = counted_drills(evidence)
    slow_s = high_percentile([value for drill in drills for value in drill.recovery_s])
    if slow_s is None:
        reason = _without_failures(log)
        return unknown(
            f"{reason}, and {no_drill(evidence)}: the recovery time was never measured", fix=how_to_see(evidence)
        )
    where = f"in {plural(len(drills), 'drill')}{with_ranks(evidence, drills)}"
    return _judge_recovery(
        evidence, slow_s, where, limits, which_drills([drill for drill in drills if drill.recovery_s])
    )


def _without_failures(log: LogFacts | None) -> str:
    if log is None:
        return "no evidence from the run log"
    return "no step was left to do after the failure" if log.incidents else "no failure in this run"


def _is_fatal(log: LogFacts) -> bool:
    """Return whether the last failure ended the run.

    A run that is done recovered from all failures; a run that was stopped on request did not have to.
    """
    ended = log.is_over and log.state not in ("done", "stopped")
    return ended and bool(log.incidents) and log.incidents[-1].recovery_s is None


def _recovery_bound(evidence: Evidence, limits: Limits) -> tuple[float, str]:
    """Return the bound in seconds, and the reason for it."""
    fault = evidence.job.fault if evidence.job is not None else None
    if fault is not None and fault.recovery == "stop" and fault.spares in ("auto", 0):
        return limits.number("alone_s"), 'fault.recovery = "stop": somebody else starts it again'
    many = limits.number("large_devices")
    if evidence.devices > many:
        return limits.number("large_s"), f"{evidence.devices:,} devices, more than {many:,.0f}"
    return limits.number("bound_s"), f"{evidence.devices:,} devices, with spares or a smaller layout to go on in"


def _judge_recovery(evidence: Evidence, value_s: float, where: str, limits: Limits, *more: str) -> Outcome:
    bound_s, because = _recovery_bound(evidence, limits)
    message = f"p95 of recovery {where} is {format_seconds(value_s)}"
    message = "; ".join([message, *more])
    formula = (f"p95(failure to the next step that stayed) = {value_s:.3g} s; bound {bound_s:g} s ({because})",)
    if value_s <= bound_s:
        return passed(message, formula=formula, value=value_s, threshold=bound_s, unit="s")
    return failed(
        message,
        formula=formula,
        value=value_s,
        threshold=bound_s,
        unit="s",
        at="fault.recovery",
        severity=severity_above(value_s, bound_s, limits) if limits.flag("late_is_error") else "warning",
        impact=per_failure(evidence, value_s - bound_s, "recovery beyond the bound"),
        fix="keep a spare place (phalanx train --spares 1) and copies in memory (checkpoint.memory_every); the "
        "incidents in phalanx report RUN say whether noticing, waiting or restoring took the time",
    )


def _never_recovered(evidence: Evidence, log: LogFacts) -> Outcome:
    count, last = len(log.incidents), log.incidents[-1]
    stops = evidence.job is not None and evidence.job.fault.recovery == "stop"
    advice = 'fault.recovery = "auto" would have gone on by itself' if stops else "first fix what it reports"
    return failed(
        f"the last of {plural(count, 'failure')} ended the run: {last.what or 'no cause is on record'}",
        value=count,
        threshold=0,
        unit="failures",
        at=Spot(file=f"{log.folder}/supervisor.jsonl"),
        impact=Impact(note="the rest of the job was not done, and what was not saved is lost"),
        fix=f"phalanx train --resume RUN goes on from the last checkpoint; {advice}",
    )


RULE = Rule(
    id="FLT002",
    slug="recovery-time",
    severity="error",
    requires="J",
    uses="PLD",
    requirement="A failure of a single device is over within 90 s (180 s beyond 16,384 devices).",
    why="""
Between a failure and the next step all devices wait. Requeueing a job takes 454 to 768 s on 2,000 to 16,000 GPUs,
going on in place 46 to 65 s (ByteRobust, arXiv:2509.16293 table 7); at 100,000 GPUs FT-HSDP brought 10 minutes down
to 3 and effective time from 44 to 80 % (arXiv:2602.00277). At one failure every three hours (16,384 GPUs) 600 s
instead of 90 s cost 4.5 points.
""",
    how="""
`p95(time from the failure to the end of the next step that stayed)` over the failures of the run; without a failure,
over drills of this code and profile (the answer says with how many ranks). The bound is 90 s up to 16,384 devices and
180 s beyond, 600 s where `fault.recovery = "stop"` leaves it to somebody else, 30 s on CPUs. Late is an error from 65
devices on and a warning below, and up to a tenth beyond the bound. A run that is over and whose last failure no step
followed is an error at any size. Neither a failure nor a drill: unknown.
""",
    limits={
        "bound_s": Limit(
            value=90.0,
            unit="s",
            note="in place 65 s at 16,384 GPUs (ByteRobust table 7) and noticing; CPU: measured 0.6 "
            "s, 30 s is our choice",
            profiles={"cpu-gloo": 30.0},
        ),
        "large_s": Limit(value=180.0, unit="s", note="FT-HSDP: 3 minutes at 100,000 GPUs", profiles={"cpu-gloo": 30.0}),
        "large_devices": Limit(value=16_384, unit="devices", note="the largest with published times in place"),
        "late_is_error": Limit(
            value=False, classes={"S2": True}, note="timing rules warn in class S1, spec.md 6.3: our choice"
        ),
        "margin": MARGIN,
        "alone_s": Limit(value=600.0, unit="s", note="requeueing: 454 to 768 s (ByteRobust table 7)"),
    },
    bad="""
{"event":"incident","t":1794750000.0,"rank":77,"epoch":3,"step":4000,"cause":{"signal":"SIGKILL"}}
{"event":"step","t":1794750240.0,"rank":0,"epoch":4,"step":4000}
""",
    good="""
{"event":"incident","t":1794750000.0,"rank":77,"epoch":3,"step":4000,"cause":{"signal":"SIGKILL"}}
{"event":"step","t":1794750041.0,"rank":0,"epoch":4,"step":4000}
""",
    fix="Spare places that are warm, copies of the state in memory, and a low `fault.dead_after_s`.",
    waive="Jobs that share their machines and wait for others to leave.",
    references=(
        Reference(text="ByteRobust, arXiv:2509.16293 tables 6 and 7", mark="read"),
        Reference(text="FT-HSDP, arXiv:2602.00277", mark="secondary"),
        Reference(text="30 s on CPUs; benchmarks/2026-11-15-recovery.md measures 0.6 s", mark="our choice"),
    ),
    check=check,
)
