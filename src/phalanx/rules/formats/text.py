"""A report for a terminal: what is wrong and what it costs, then what nobody knows, then one line of counts.

Lines are (style, text): a style is a word of STYLES, and only a terminal sees it. The second half has the plain values
that `--json` prints and the words that every format shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.io.codec import json_values
from phalanx.io.values import printable
from phalanx.rules.outcome import Edit, Impact, Outcome, Scalar
from phalanx.rules.rule import LETTERS
from phalanx.rules.rule_page import unit_of
from phalanx.rules.run_rules import CheckReport, Finding, is_remark
from phalanx.units import format_money, plural

Line = tuple[str, str]
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan", "quiet": "dim", "head": "bold", "": ""}
LETTER = {"error": "E", "warning": "W", "info": "I"}
MOST_SHOWN = 12  # settings of another trainer that are named one by one
MOST_TEXT = 400  # letters of one line of somebody else's text


def render_text(reports: Sequence[CheckReport], *, verbose: bool = False) -> str:
    """The page as text."""
    return "".join(f"{text}\n" for _, text in report_lines(reports, verbose=verbose))


def report_lines(reports: Sequence[CheckReport], *, verbose: bool = False) -> Iterator[Line]:
    """The page, line by line; nothing in it moves a cursor."""
    for number, report in enumerate(reports):
        if number:
            yield "", ""
        brief = len(reports) > 1 and not verbose and report.trainer != "phalanx"
        for style, text in _page_lines(report, verbose=verbose, brief=brief):
            yield style, printable(text, most=MOST_TEXT)
    for style, text in _habit_lines(reports):
        yield style, printable(text, most=MOST_TEXT)


def _page_lines(report: CheckReport, *, verbose: bool, brief: bool) -> Iterator[Line]:
    """`brief` is for one of many files of other trainers: what nobody knows is mostly the same for each."""
    for one in report.problems:
        yield from finding_lines(one, report)
        yield "", ""
    yield from (("warning", f"! {line}") for line in report.notes)
    if report.notes:
        yield "", ""
    yield from _unknown_lines(report, brief=brief)
    yield from _waived_lines(report)
    if not brief:
        yield from _unmapped_lines(report)
    if verbose:
        yield from _passed_lines(report)
    yield "head", f"{report.target}: {summary_of(report)}"
    yield "quiet", _basis_text(report)
    if hint := _by_option(report):
        yield "quiet", hint


def finding_head(finding: Finding) -> str:
    """Place, severity, rule and what was found, in a line."""
    passes = "ok" if finding.outcome.applies else "--"
    marks = {"fail": LETTER[finding.severity], "pass": passes, "waived": "waived", "habit": "note"}
    mark, rule = marks.get(finding.verdict, "?"), finding.rule
    return f"{shown_place(finding)}: {mark} {rule.id} {rule.slug}  {finding.outcome.what}"


def finding_lines(finding: Finding, report: CheckReport) -> Iterator[Line]:
    """One finding in full."""
    rule, outcome = finding.rule, finding.outcome
    yield finding.severity, finding_head(finding)
    for line in outcome.formula:
        yield "", f"  {line}"
    if cost := shown_cost(outcome.impact, report.usd):
        yield "", f"  {cost}"
    yield from (("", f"  {line}") for line in fix_lines(outcome))
    if rule.origin:
        yield "quiet", f"  your own rule, from {rule.origin}"
    else:
        yield "quiet", f"  explain: phalanx explain {rule.id} {report.target}; source: {rule.references[0].text}"


def fix_lines(outcome: Outcome) -> Iterator[str]:
    """What to do: each edit with what it touches, then the rule's own words."""
    for edit in outcome.edits:
        kind = "safe" if edit.safe else "changes the training"
        yield f"fix ({kind}): {shown_setting(edit)}{f' ({edit.note})' if edit.note else ''}"
    if outcome.fix:
        yield f"fix: {outcome.fix}"


def _unknown_lines(report: CheckReport, *, brief: bool) -> Iterator[Line]:
    """Missing evidence, by what is missing: one line for many rules; in brief, what the file leaves open."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in report.findings:
        if one.verdict == "unknown" and not report.require_evidence:  # else each is a problem, and told above
            rules = groups.setdefault((one.outcome.what, one.outcome.fix), [])
            rules += [one.rule.id] if one.rule.id not in rules else []
    shown = {key: rules for key, rules in groups.items() if not brief or "TOP001" in rules}
    for (what, fix), rules in shown.items():
        yield "info", f"? {' '.join(rules)}  {what}"
        if fix:
            yield "quiet", f"    {fix}"
    if others := {rule for key, rules in groups.items() if key not in shown for rule in rules}:
        yield "quiet", f"? {plural(len(others), 'rule')} more cannot be judged: phalanx check {report.target} says why"
    if groups:
        yield "", ""


def _waived_lines(report: CheckReport) -> Iterator[Line]:
    found = [one for one in report.findings if one.verdict == "waived"]
    for one in found:
        yield "quiet", f"waived {one.rule.id}  {one.outcome.what}  ({one.reason})"
    if found:
        yield "", ""


def _unmapped_lines(report: CheckReport) -> Iterator[Line]:
    if not report.unmapped:
        return
    count = len(report.unmapped)
    have, were = ("setting has", "was") if count == 1 else ("settings have", "were")
    yield "info", f"{count} {have} no counterpart in the job schema and {were} not checked"
    for one in report.unmapped[:MOST_SHOWN]:
        yield "quiet", f"    {one.key} = {one.value}  {one.why}"
    if count > MOST_SHOWN:
        yield "quiet", f"    and {count - MOST_SHOWN} more: --json lists them"
    yield "", ""


def _habit_lines(reports: Sequence[CheckReport]) -> Iterator[Line]:
    """What trainers do or lack, once for each of them and short; --json and phalanx explain have the rest."""
    for trainer in dict.fromkeys(one.trainer for one in reports if one.habits):
        lines: dict[str, str] = {}
        for report in reports:
            for one in report.habits if report.trainer == trainer else ():
                lines.setdefault(f"{one.rule.id} {one.outcome.at}", f"    {one.rule.id}  {one.outcome.what}")
        yield "", ""
        yield "info", f"notes about {trainer} itself, the same for every file; no effect on the exit code"
        yield from (("quiet", line) for line in lines.values())


def _passed_lines(report: CheckReport) -> Iterator[Line]:
    for one in report.findings:
        if one.verdict != "pass":
            continue
        mark = "ok" if one.outcome.applies else "--"
        yield "quiet", f"{mark} {one.rule.id} {one.rule.slug}  {one.outcome.what}{_bound_text(one.outcome)}"
    yield "", ""


def _bound_text(outcome: Outcome) -> str:
    """Value against threshold; yes and no need no figures."""
    value, limit = outcome.value, outcome.threshold
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(limit, int | float):
        return ""
    return f"  [{value:.4g} against {limit:.4g}{f' {unit_of(limit, outcome.unit)}' if outcome.unit else ''}]"


def _by_option(report: CheckReport) -> str:
    """How many findings an option mends; runs and plans are past mending, other trainers' files are not ours to."""
    if report.foreign or not report.target.endswith(".toml") or "L" in report.evidence:
        return ""
    edits = [one.outcome.edits for one in report.findings if one.verdict == "fail" and one.outcome.edits]
    safe = sum(all(edit.safe for edit in some) for some in edits)
    statement = [f"{safe} with --fix"] if safe else []
    statement += [f"{len(edits) - safe} with --unsafe-fixes"] if len(edits) > safe else []
    return f"  fixable: {', '.join(statement)}; --diff shows the edits" if statement else ""


def _basis_text(report: CheckReport) -> str:
    """What the verdicts rest on, and the money in question."""
    seen = ", ".join(LETTERS[letter] for letter in report.evidence) or "nothing"
    own = len({one.rule.id for one in report.findings if one.rule.origin})
    mine = f" and {plural(own, 'rule')} of your own" if own else ""
    devices = f"number of devices not known (taken as {report.scaling})"
    if report.devices:
        devices = f"{plural(report.devices, 'device')} ({report.scaling})"
    basis = f"  edition {report.edition}{mine}, {report.profile}, {devices}"
    stake = total_at_stake(report)
    statement = f"; at stake: {shown_cost(stake, report.usd)}" if stake.points or stake.usd else ""
    return f"{basis}; evidence: {seen}{statement}"


# A report as plain values: what `--json` prints, and the few words that every format shares.


def report_dict(report: CheckReport) -> dict[str, Any]:
    """The JSON form of one report; numbers that JSON has no word for become null."""
    return {
        "edition": report.edition,
        "target": report.target,
        "profile": report.profile,
        "scaling": report.scaling,
        "devices": report.devices,
        "evidence": report.evidence,
        "usd": json_values(report.usd),
        "counts": counts_of(report),
        "errors": report.errors,
        "exit_code": report.exit_code,
        "findings": [finding_dict(one) for one in report.findings if one.verdict != "habit"],
        "trainer_notes": [finding_dict(one) for one in report.habits],
        "notes": list(report.notes),
        "unmapped": json_values(report.unmapped),
    }


def counts_of(report: CheckReport) -> dict[str, int]:
    """Rules by verdict; those that have nothing to say about this job are no passes."""
    counts = {verdict: report.counts[verdict] for verdict in ("pass", "fail", "unknown", "waived")}
    if report.habits:
        counts["habit"] = report.counts["habit"]
    return {**counts, "pass": counts["pass"] - len(report.exempt), "exempt": len(report.exempt)}


def finding_dict(finding: Finding) -> dict[str, Any]:
    """One finding, with every field there."""
    outcome = finding.outcome
    return {
        "rule": finding.rule.id,
        "slug": finding.rule.slug,
        "group": finding.rule.group,
        "origin": finding.rule.origin,
        "verdict": finding.verdict,
        "severity": finding.severity,
        "what": outcome.what,
        "formula": list(outcome.formula),
        "value": json_values(outcome.value),
        "threshold": json_values(outcome.threshold),
        "unit": outcome.unit,
        "file": finding.file,
        "line": finding.line,
        "impact": json_values(outcome.impact),
        "fix": fix_of(outcome),
        "edits": json_values(outcome.edits),
        "reason": finding.reason,
        "applies": outcome.applies,
    }


def findings_columns(findings: Sequence[Finding]) -> dict[str, list[Any]]:
    """Findings as columns of equal length, for a data frame."""
    columns: dict[str, Any] = {
        "rule": lambda one: one.rule.id,
        "slug": lambda one: one.rule.slug,
        "verdict": lambda one: one.verdict,
        "severity": lambda one: one.severity,
        "what": lambda one: one.outcome.what,
        "value": lambda one: one.outcome.value,
        "threshold": lambda one: one.outcome.threshold,
        "unit": lambda one: one.outcome.unit,
        "file": lambda one: one.file,
        "line": lambda one: one.line,
        "points": lambda one: math.nan if one.outcome.impact.points is None else one.outcome.impact.points,
        "usd": lambda one: math.nan if one.outcome.impact.usd is None else one.outcome.impact.usd,
        "fix": lambda one: fix_of(one.outcome),
        "origin": lambda one: one.rule.origin,
    }
    return {name: [read(one) for one in findings] for name, read in columns.items()}


def fix_of(outcome: Outcome) -> str:
    """What to do, in one line: the rule's own words, else its edits."""
    return outcome.fix or "; ".join(shown_setting(one) for one in outcome.edits)


def shown_setting(edit: Edit) -> str:
    """An edit as a person types it.

    >>> shown_setting(Edit(key="checkpoint.interval_s", value=1418, safe=True))
    'checkpoint.interval_s = 1418'
    """
    return f"{edit.key} = {as_toml(edit.value)}"


def as_toml(value: Scalar) -> str:
    """A value as a job file writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def shown_place(finding: Finding) -> str:
    """file:line, or the file where no line is known."""
    return f"{finding.file}:{finding.line}" if finding.line else finding.file


def shown_cost(impact: Impact, job_usd: float | None) -> str:
    """What a finding costs, in one line; empty where nothing can be told."""
    parts = []
    if impact.points is not None and math.isfinite(impact.points):
        parts.append(f"{_points_text(impact.points)} of effective training time")
    if impact.usd is not None and math.isfinite(impact.usd):
        of = f" of this {format_money(job_usd)} job" if job_usd else ""
        dollars_text = "less than a cent" if 0 < impact.usd < 0.01 else f"about {format_money(impact.usd)}"
        parts.append(f"{dollars_text}{of}")
    statement = ", ".join(parts)
    return f"{statement}: {impact.note}" if statement and impact.note else statement or impact.note


def _points_text(points: float) -> str:
    """Hundredths of the time; tiny ones are said to be so rather than rounded to nothing."""
    if 0 < points < 0.01:
        return "below 0.01 points"
    text = f"{points:.1f}" if points >= 1 else f"{points:.2f}"
    return f"{text} point{'s' * (text != '1.0')}"


# What a failure costs is told by several rules, each in its own words: notice, restart, redone work, spares.
BY_FAILURES = ("CKP", "FLT", "COM004", "EFF001")
WHOLES = ("EFF",)  # measure all of a kind of loss, of which other rules tell the parts


def total_at_stake(report: CheckReport) -> Impact:
    """All failures together, no more than everything, and nothing counted twice where that can be told.

    Rules about failures and checkpoints lose the same seconds: the dearest of them stands for all. The others add up,
    those that one edit cures as the dearest of them; but a rule that measures the whole stands for its parts where it
    is dearer.
    """
    bad = [one for one in report.findings if one.verdict == "fail"]
    points, usd = (_summed_cost(bad, name) for name in ("points", "usd"))
    most = report.usd if report.usd is not None else math.inf
    return Impact(points=min(100.0, points or 0.0), usd=min(most, usd) if usd is not None else None)


def _summed_cost(findings: Sequence[Finding], name: str) -> float | None:
    by_failures = whole = 0.0
    parts: dict[object, float] = {}
    costs = [(one, getattr(one.outcome.impact, name)) for one in findings]
    known = [(one, value) for one, value in costs if value is not None and math.isfinite(value)]
    for number, (one, value) in enumerate(known):
        if one.rule.id.startswith(BY_FAILURES):
            by_failures = max(by_failures, value)
        elif one.rule.id.startswith(WHOLES):
            whole = max(whole, value)
        else:
            cure = tuple(edit.key for edit in one.outcome.edits) or number
            parts[cure] = max(value, parts.get(cure, 0.0))
    return by_failures + max(whole, sum(parts.values())) if known else None


def summary_of(report: CheckReport) -> str:
    """One line with every count."""
    counts: Mapping[str, int] = counts_of(report)
    errors = len({one.rule.id for one in report.findings if one.verdict == "fail" and one.severity == "error"})
    bad = f" ({plural(errors, 'error')})" if errors else ""
    line = f"{counts['pass']} pass, {counts['fail']} fail{bad}, {counts['unknown']} unknown, {counts['waived']} waived"
    remarks = sum(is_remark(one) for one in report.findings)
    line += f"; {plural(remarks, 'remark')}" if remarks else ""
    line += f"; {plural(counts['habit'], 'rule')} about the trainer" if report.habits else ""
    return f"{line}; {counts['exempt']} do{'es' * (counts['exempt'] == 1)} not apply"
