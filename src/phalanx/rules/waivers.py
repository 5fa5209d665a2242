"""Waivers: rules a job breaks on purpose, with a reason and a last day. Old and idle ones are findings themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from phalanx.errors import nearest
from phalanx.job.schema import Waiver
from phalanx.rules.catalog import spc001_waivers
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Severity, failed, passed
from phalanx.rules.rule import Rule
from phalanx.units import plural

NO_TIME = Impact(note="costs no time by itself: it hides what does")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waived:
    """Reasons by rule id, and what is wrong with the waivers themselves."""

    reasons: Mapping[str, str]
    outcomes: tuple[Outcome, ...]


def settle(evidence: Evidence, broken: set[str], *, asked: Sequence[Rule], whole: bool) -> Waived:
    """Which rules are waived. `broken` ones of those `asked` failed or lack evidence; `whole`: all rules were asked."""
    rules = {rule.id: rule for rule in asked}
    reasons: dict[str, str] = {}
    outcomes: list[Outcome] = []
    for index, waiver in enumerate(evidence.all_waivers):
        if waiver.rule not in rules:
            outcomes += [_nothing(waiver, index)] if whole else []
        elif _is_over(waiver, evidence.today):
            outcomes.append(_expired(waiver, index, evidence.today))
        elif waiver.rule in broken:
            reasons[waiver.rule] = waiver.reason
        else:
            outcomes.append(_unused(waiver, index, rules[waiver.rule], evidence))
    if whole and not outcomes:
        count = len(evidence.all_waivers)
        outcomes.append(passed(f"{plural(count, 'waiver')}, each with a reason and in force"))
    return Waived(reasons=reasons, outcomes=tuple(outcomes))


def _is_over(waiver: Waiver, today: date) -> bool:
    days_over = spc001_waivers.RULE.limits["days_over"].value
    assert isinstance(days_over, int)
    return today - date.fromisoformat(waiver.expires) > timedelta(days=days_over)


def _nothing(waiver: Waiver, index: int) -> Outcome:
    from phalanx.rules.edition import EDITION, all_rules  # at the top it would be a circle: an edition imports rules

    titles = {rule.id: rule.slug for rule in all_rules()}
    if waiver.rule == spc001_waivers.RULE.id:
        what, fix = f"{waiver.rule} cannot be waived: it is about waivers", "take the waiver out"
    else:
        close = nearest(waiver.rule, titles)
        what = f"{waiver.rule} is no rule of edition {EDITION}"
        fix = f"did you mean {close} ({titles[close]})?" if close else "phalanx rules lists them"
    return failed(
        f"the waiver of {waiver.rule} waives nothing: {what}",
        value=waiver.rule,
        impact=NO_TIME,
        fix=fix,
        at=f"waiver.{index}.rule",
    )


def _expired(waiver: Waiver, index: int, today: date) -> Outcome:
    return failed(
        f"the waiver of {waiver.rule} expired on {waiver.expires}",
        value=waiver.expires,
        threshold=today.isoformat(),
        impact=NO_TIME,
        fix=f"meet {waiver.rule}, or decide again and give a new day",
        at=f"waiver.{index}.expires",
    )


def _unused(waiver: Waiver, index: int, rule: Rule, evidence: Evidence) -> Outcome:
    """Before the run a rule that also looks at the log may still need its waiver: said, and not held against it."""
    later = "L" in rule.uses and not evidence.has("L")
    severity: Severity = "info" if later else "warning"
    told = "waives nothing so far: the rule is met before the run" if later else "waives nothing: the rule is met"
    fix = "take it out, unless the run is known to need it" if later else "take it out"
    return failed(
        f"the waiver of {waiver.rule} {told}",
        value=waiver.rule,
        severity=severity,
        impact=NO_TIME,
        fix=fix,
        at=f"waiver.{index}.rule",
    )
