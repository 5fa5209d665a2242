"""Explanation of one rule: its page and, for a target, its findings with the formula and the limits that apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from phalanx.io.notebook import text_as_html
from phalanx.io.values import printable
from phalanx.rules.edition import find_rule
from phalanx.rules.evidence import Evidence
from phalanx.rules.formats.text import finding_dict, fix_lines, shown_cost, shown_place
from phalanx.rules.gather import Progress, Request
from phalanx.rules.own_rules import RuleSource, collect_own_rules
from phalanx.rules.rule import Limits, Rule
from phalanx.rules.rule_page import rule_page, rule_sections, shown_limit
from phalanx.rules.run_rules import Finding, limits_of
from phalanx.rules.specification import Target, check_evidence, evidence_of, own_rules_of
from phalanx.units import plural

MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation:
    """A rule's page, preceded by its findings on a target; `str()` is the output of `phalanx explain`."""

    rule: Rule
    evidence: Evidence | None = None
    limits: Limits = field(default_factory=lambda: Limits(values={}))  # those that apply to the target
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        text = f"{target_section(self)}\n{rule_page(self.rule)}" if self.evidence is not None else rule_page(self.rule)
        return text.removesuffix("\n")

    def __repr__(self) -> str:
        about = f" on {self.evidence.target}" if self.evidence is not None else ""
        return f"<Explanation: {self.rule.id} {self.rule.slug}{about}>"

    def _repr_html_(self) -> str:
        return text_as_html(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as `phalanx explain --json` prints it."""
        fields: dict[str, Any] = {"rule": self.rule.id, "slug": self.rule.slug}
        if self.evidence is not None:
            fields |= {
                "limits": dict(self.limits.values),
                "findings": [finding_dict(finding) for finding in self.findings],
            }
        return {**fields, "sections": rule_sections(self.rule)}


def explain(
    rule: str | Rule,
    what: Target | None = None,
    *,
    rules: Iterable[RuleSource] = (),
    allow_code: bool = False,
    request: Request | None = None,
    today: date | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Return the page of a rule, by id or slug; with a target, also the rule's findings on it.

    `rules`, `allow_code` and `request` are as for `check`. Raises UserError for a name that is not a rule.
    """
    sources = (rules,) if isinstance(rules, str) else rules
    own_rules = collect_own_rules([*sources, *([rule] if isinstance(rule, Rule) and rule.origin else [])])
    name = rule.id if isinstance(rule, Rule) else rule
    if what is None:
        return Explanation(rule=find_rule(name, own_rules.rules))
    # With consent to run code, the job may define the rule.
    if not allow_code:
        # Before the evidence is gathered: a misspelt name must not cost the reading of a log.
        find_rule(name, own_rules.rules)
    evidence = evidence_of(what, request or Request(), today=today, progress=progress)
    own_rules = own_rules_of(evidence, own_rules.rules, allow_code=allow_code)
    return explain_evidence(find_rule(name, own_rules.rules), evidence)


def explain_evidence(rule: Rule, evidence: Evidence) -> Explanation:
    """Judge one rule on the evidence; waivers count as in a check."""
    report = check_evidence(evidence, select=rule.id, rules=(rule,) if rule.origin else ())
    findings = tuple(finding for finding in report.findings if finding.rule.id == rule.id)
    return Explanation(rule=rule, evidence=evidence, limits=limits_of(rule, evidence), findings=findings)


def target_section(found: Explanation) -> str:
    """Return the first part of the page, in Markdown: the rule's findings on the target."""
    assert found.evidence is not None
    lines = [f"# {found.rule.id} on {found.evidence.target}", ""]
    for finding in found.findings:
        lines += [*_finding_lines(finding, found.evidence.usd), ""]
    devices = plural(found.evidence.devices, "device")
    size = f"{found.evidence.profile.name}, {devices}, class {found.evidence.scaling.name}"
    lines += [f"Limits for {size}:", ""] if found.limits.values else []
    for name, value in found.limits.values.items():
        limit = found.rule.limits[name]
        lines.append(f"- `{name}` = {shown_limit(value, limit.unit)}: {limit.note}")
    return "\n".join(printable(line, most=MOST_TEXT) for line in lines) + "\n"


def _finding_lines(finding: Finding, usd: float | None) -> Iterator[str]:
    outcome = finding.outcome
    word = finding.verdict if outcome.applies else "does not apply"
    level = f" ({finding.severity})" if finding.verdict == "fail" else f" ({finding.reason})" * bool(finding.reason)
    place = f", {shown_place(finding)}" if finding.verdict == "fail" else ""
    yield f"**{word}**{level}{place}: {outcome.what}"
    yield from (f"    {line}" for line in outcome.formula)
    if cost := shown_cost(outcome.impact, usd):
        yield f"- {cost}"
    yield from (f"- {line}" for line in fix_lines(outcome))
