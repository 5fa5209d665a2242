"""Drill checks of the checkpoint rules: whether a kind of fault was injected, and whether the run survived it."""

from __future__ import annotations

from phalanx.rules.catalog.flt_shared import newest_drill
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import why_none
from phalanx.rules.outcome import Impact, Outcome, failed, passed, unknown

SUITE = "phalanx drill JOB --suite"


def judge_drill(evidence: Evidence, kinds: tuple[str, ...], *, what: str, harm: Impact) -> Outcome:
    """Return the outcome of the newest drill with one of these faults; `what` describes the fault."""
    drill = newest_drill(evidence, *kinds)
    if drill is None:
        return drill_missing(evidence, what)
    if drill.clean:
        return passed(f"drilled: {what}, and nothing was lost or wrong: {drill.statement}", value=True, threshold=True)
    return failed(
        f"drilled: {what}, and it failed: {'; '.join(drill.wrong[:3]) or 'the oracle found a fault'}",
        value=False,
        threshold=True,
        impact=harm,
        fix=f"fix what the record {drill.statement} reports, then {SUITE}",
    )


def is_asked(evidence: Evidence, habit: Outcome) -> bool:
    """Return whether a drill is required: always of Phalanx, of another trainer only if its behaviour passes."""
    return evidence.practice.trainer == "phalanx" or habit.verdict == "pass"


def drill_missing(evidence: Evidence, what: str) -> Outcome:
    """Return the outcome for a missing drill."""
    trainer = evidence.practice.trainer
    if trainer != "phalanx":
        return unknown(
            f"no drill under {trainer} shows {what}", fix="drill it there, and waive the rule with the record"
        )
    why = why_none(evidence.drills, profile=evidence.profile.name)
    return unknown(f"no drill shows {what}" + (f": {why}" if why else ""), fix=f"{SUITE} on the hardware of the job")
