"""One rule on one target: its verdict, the formula with the numbers in it, and the limits that hold there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.io.values import printable
from phalanx.rules.api import check_evidence
from phalanx.rules.evidence import Evidence
from phalanx.rules.formats.text import fix_lines, shown_cost, shown_place
from phalanx.rules.judge import Finding, limits_of
from phalanx.rules.rule import Limits, Rule
from phalanx.rules.rule_page import shown_limit
from phalanx.units import plural

MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rule says of some evidence, and by which limits."""

    rule: Rule
    evidence: Evidence
    limits: Limits
    findings: tuple[Finding, ...]


def answer(rule: Rule, evidence: Evidence) -> Answer:
    """Judge one rule; its waivers count as in a check."""
    report = check_evidence(evidence, select=rule.id)
    mine = tuple(one for one in report.findings if one.rule.id == rule.id)
    return Answer(rule=rule, evidence=evidence, limits=limits_of(rule, evidence), findings=mine)


def here(found: Answer) -> str:
    """The first part of the page, in Markdown."""
    lines = [f"# {found.rule.id} on {found.evidence.target}", ""]
    for one in found.findings:
        lines += [*_finding(one, found.evidence.usd), ""]
    devices = plural(found.evidence.devices, "device")
    size = f"{found.evidence.profile.name}, {devices}, class {found.evidence.scaling.name}"
    lines += [f"Limits for {size}:", ""]
    for name, value in found.limits.values.items():
        limit = found.rule.limits[name]
        lines.append(f"- `{name}` = {shown_limit(value, limit.unit)}: {limit.note}")
    return "\n".join(printable(line, most=MOST_TEXT) for line in lines) + "\n"


def _finding(finding: Finding, usd: float | None) -> Iterator[str]:
    outcome = finding.outcome
    word = finding.verdict if outcome.applies else "does not apply"
    level = f" ({finding.severity})" if finding.verdict == "fail" else f" ({finding.reason})" * bool(finding.reason)
    place = f", {shown_place(finding)}" if finding.verdict == "fail" else ""
    yield f"**{word}**{level}{place}: {outcome.what}"
    yield from (f"    {line}" for line in outcome.formula)
    if cost := shown_cost(outcome.impact, usd):
        yield f"- {cost}"
    yield from (f"- {line}" for line in fix_lines(outcome))
