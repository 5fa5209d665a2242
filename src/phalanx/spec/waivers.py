"""Waivers: rules a job breaks on purpose, with a reason and a last day. Old and idle ones are findings themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from phalanx.spec.evidence import Evidence
from phalanx.spec.outcome import Impact, Outcome, failed, passed
from phalanx.spec.rule import Rule
from phalanx.spec.rules import spc001_waivers

NO_TIME = Impact(note="costs no time by itself: it hides what does")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waived:
    """Reasons by rule id, and what is wrong with the waivers themselves."""

    reasons: Mapping[str, str]
    outcomes: tuple[Outcome, ...]
    rule: Rule


def settle(evidence: Evidence, open_rules: set[str], *, whole: bool) -> Waived:
    """Which rules are waived. `open_rules` failed or lack evidence; `whole` says that every rule was asked."""
    reasons: dict[str, str] = {}
    outcomes: list[Outcome] = []
    for index, waiver in enumerate(evidence.the_job.waiver):
        at = f"waiver.{index}.expires"
        if date.fromisoformat(waiver.expires) < evidence.today:
            outcomes.append(
                failed(
                    f"the waiver of {waiver.rule} expired on {waiver.expires}",
                    value=waiver.expires,
                    threshold=evidence.today.isoformat(),
                    impact=NO_TIME,
                    fix=f"meet {waiver.rule}, or decide again and give a new day",
                    at=at,
                )
            )
        elif waiver.rule in open_rules:
            reasons[waiver.rule] = waiver.reason
        elif whole:
            outcomes.append(
                failed(
                    f"the waiver of {waiver.rule} waives nothing",
                    value=waiver.rule,
                    impact=NO_TIME,
                    fix="take it out: the rule is met, or there is no such rule",
                    at=f"waiver.{index}.rule",
                )
            )
    if whole and not outcomes:
        count = len(evidence.the_job.waiver)
        outcomes.append(passed(f"{count} waiver{'s' * (count != 1)}, each with a reason and in force"))
    return Waived(reasons=reasons, outcomes=tuple(outcomes), rule=spc001_waivers.RULE)
