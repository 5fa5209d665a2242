"""Rules that say what a test wants, and reports made of them: formats are tested without the real rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rules.kit import evidence

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Spot, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Reference, Rule
from phalanx.rules.run_rules import CheckReport, judge

NASTY = 'a <b>bold</b> "word" & 50 % of\x1b[2J it\nnext, line: ::error::'


def rule(answer: Outcome | tuple[Outcome, ...] | None = None, rule_id: str = "CKP901", **changes: Any) -> Rule:
    """A rule with one answer, whatever it is asked."""
    outcome = passed("fine") if answer is None else answer
    made = Rule(
        id=rule_id,
        slug="toy-rule",
        severity="error",
        requires="J",
        requirement="Toys are put away.",
        why="Somebody falls over them: 3 of 4 times | measured.",
        how="`toys == 0`",
        limits={"toys": Limit(value=0, unit="toys", note="on the floor | our choice", classes={"S3": 1})},
        bad="[checkpoint]\nkeep = 1",
        good="[checkpoint]\nkeep = 3",
        fix="Put them away.",
        waive="On birthdays.",
        references=(Reference(text="grandmother", mark="recalled"),),
        check=lambda evidence, limits: outcome,
    )
    return replace(made, **changes)


def bad(what: str = "7 toys lie about", **changes: Any) -> Outcome:
    """A failure with everything a failure can have."""
    made = failed(
        what,
        formula=("toys = 3 + 4 = 7", "7 > 0"),
        value=7,
        threshold=0,
        unit="toys",
        at="checkpoint.keep",
        impact=Impact(points=2.5, usd=1234.5, note="time lost falling"),
        edits=(Edit(key="checkpoint.keep", value=3, safe=True, note="enough"),),
    )
    return replace(made, **changes)


def mixed(**changes: Any) -> CheckReport:
    """One report with every verdict in it, and hostile texts."""
    waiving = evidence(text=WAIVING)
    rules = [
        rule(bad(), "CKP901"),
        rule(bad(NASTY, at=Spot(file="runs/x y/events-00000.jsonl", line=7), severity="warning"), "CKP902"),
        rule(bad("waived one"), "CKP903"),
        rule(unknown("nobody looked", fix="look"), "FLT901"),
        rule((passed("good", value=1.0, threshold=2.0, unit="x"), passed("and good")), "FLT902"),
        rule(exempt("there is nothing"), "FLT903"),
        rule(bad("only said", severity="info", impact=Impact(note="no time"), edits=(), fix="nothing"), "FLT904"),
    ]
    report = made(rules, replace(waiving, target="job.toml"), **changes)
    here = [replace(one, file="job.toml") if one.file.endswith("job.toml") else one for one in report.findings]
    return replace(report, findings=tuple(here))


def made(rules: Sequence[Rule], found: Evidence | None = None, **changes: Any) -> CheckReport:
    """The report of some rules on the good job."""
    return judge(rules, found or evidence(), edition="2026.1", whole=False, **changes)


WAIVING = """\
spec = "2026.1"
name = "good"
[model]
preset = "llama-3-8b"
[data]
tokens = "1T"
sequence = 8192
[batch]
global_sequences = 512
[parallel]
tensor = 1
context = 1
pipeline = 1
zero = 3
[checkpoint]
keep = 2
[cluster]
spec = "8xH100:16"
[[waiver]]
rule = "CKP903"
reason = "it is <my> birthday"
expires = 2026-12-31
"""
