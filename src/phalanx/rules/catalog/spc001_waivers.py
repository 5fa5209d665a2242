"""SPC001: waivers are in force and in use. Judged by run_rules.settle_waivers, since it needs every other verdict."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, exempt
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Return an exempt outcome; this function is never used for the verdict."""
    return exempt("judged after all other rules")


RULE = Rule(
    id="SPC001",
    slug="waivers-current",
    severity="warning",
    requires="J",
    requirement="Every waiver names a rule that is really broken, gives a reason, and has not expired.",
    why="""
A waiver is a decision that somebody took for a time. One that outlives its reason hides the next fault of the same
kind; ruff reports unused suppressions (RUF100) for the same cause.
""",
    how="`expires >= today`, and the rule's verdict without the waiver is `fail` or `unknown`.",
    limits={"days_over": Limit(value=0, unit="days", note="days a waiver holds after its last day: none, our choice")},
    bad="""
[[waiver]]
rule = "CKP001"
reason = "cluster moves next month"
expires = 2025-01-31
""",
    good="""
[[waiver]]
rule = "CKP001"
reason = "cluster moves next month"
expires = 2027-01-31
""",
    fix="Take the waiver out, or decide again and set a new date.",
    waive="Never: take the old waiver out instead.",
    references=(Reference(text="ruff RUF100, unused suppressions", mark="read"),),
    check=check,
)
