"""A report for a terminal: problems with their cost, then missing evidence, then one line of counts.

Lines are (style, text) pairs; a style is a key of STYLES and is applied only on a terminal. The second half of the
file holds the plain values of `--json` and the phrases that all formats share.
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
MOST_SHOWN = 12  # settings of another trainer that are listed
# Characters of one line; texts may come from other people's files.
MOST_TEXT = 400


def render_text(reports: Sequence[CheckReport], *, verbose: bool = False) -> str:
    """Return the reports as text."""
    return "".join(f"{text}\n" for _, text in report_lines(reports, verbose=verbose))


def report_lines(reports: Sequence[CheckReport], *, verbose: bool = False) -> Iterator[Line]:
    """Yield the lines of the reports; control characters are made visible, so that no line moves the cursor."""
    for number, report in enumerate(reports):
        if number:
            yield "", ""
        brief = len(reports) > 1 and not verbose and report.trainer != "phalanx"
        for style, text in _page_lines(report, verbose=verbose, brief=brief):
            yield style, printable(text, most=MOST_TEXT)
    for style, text in _habit_lines(reports):
        yield style, printable(text, most=MOST_TEXT)


def _page_lines(report: CheckReport, *, verbose: bool, brief: bool) -> Iterator[Line]:
    """Yield the lines of one report.

    `brief` is for one of many files of other trainers: most unknown verdicts are the same for each.
    """
    for finding in report.problems:
        yield from finding_lines(finding, report)
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
    """Return place, severity, rule and outcome of a finding in one line."""
    passes = "ok" if finding.outcome.applies else "--"
    marks = {"fail": LETTER[finding.severity], "pass": passes, "waived": "waived", "habit": "note"}
    mark, rule = marks.get(finding.verdict, "?"), finding.rule
    return f"{shown_place(finding)}: {mark} {rule.id} {rule.slug}  {finding.outcome.what}"


def finding_lines(finding: Finding, report: CheckReport) -> Iterator[Line]:
    """Yield the lines of one finding."""
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
    """Yield each edit with its kind, then the rule's advice."""
    for edit in outcome.edits:
        kind = "safe" if edit.safe else "changes the training"
        yield f"fix ({kind}): {shown_setting(edit)}{f' ({edit.note})' if edit.note else ''}"
    if outcome.fix:
        yield f"fix: {outcome.fix}"


def _unknown_lines(report: CheckReport, *, brief: bool) -> Iterator[Line]:
    """Yield the unknown verdicts, one line for all rules with the same reason; in brief mode only that of TOP001."""
    groups: dict[tuple[str, str], list[str]] = {}
    for finding in report.findings:
        # With require_evidence, each unknown verdict is a problem and was printed above.
        if finding.verdict == "unknown" and not report.require_evidence:
            rules = groups.setdefault((finding.outcome.what, finding.outcome.fix), [])
            rules += [finding.rule.id] if finding.rule.id not in rules else []
    printed_groups = {key: rules for key, rules in groups.items() if not brief or "TOP001" in rules}
    for (reason, fix), rules in printed_groups.items():
        yield "info", f"? {' '.join(rules)}  {reason}"
        if fix:
            yield "quiet", f"    {fix}"
    if more_rules := {rule for key, rules in groups.items() if key not in printed_groups for rule in rules}:
        yield (
            "quiet",
            f"? {plural(len(more_rules), 'rule')} more cannot be judged: phalanx check {report.target} says why",
        )
    if groups:
        yield "", ""


def _waived_lines(report: CheckReport) -> Iterator[Line]:
    waived = [finding for finding in report.findings if finding.verdict == "waived"]
    for finding in waived:
        yield "quiet", f"waived {finding.rule.id}  {finding.outcome.what}  ({finding.reason})"
    if waived:
        yield "", ""


def _unmapped_lines(report: CheckReport) -> Iterator[Line]:
    if not report.unmapped:
        return
    count = len(report.unmapped)
    have, were = ("setting has", "was") if count == 1 else ("settings have", "were")
    yield "info", f"{count} {have} no counterpart in the job schema and {were} not checked"
    for setting in report.unmapped[:MOST_SHOWN]:
        yield "quiet", f"    {setting.key} = {setting.value}  {setting.why}"
    if count > MOST_SHOWN:
        yield "quiet", f"    and {count - MOST_SHOWN} more: --json lists them"
    yield "", ""


def _habit_lines(reports: Sequence[CheckReport]) -> Iterator[Line]:
    """Yield the default behaviour of each trainer once, in short; `--json` and `phalanx explain` have the details."""
    for trainer in dict.fromkeys(report.trainer for report in reports if report.habits):
        lines: dict[str, str] = {}
        for report in reports:
            for finding in report.habits if report.trainer == trainer else ():
                lines.setdefault(
                    f"{finding.rule.id} {finding.outcome.at}", f"    {finding.rule.id}  {finding.outcome.what}"
                )
        yield "", ""
        yield "info", f"notes about {trainer} itself, the same for every file; no effect on the exit code"
        yield from (("quiet", line) for line in lines.values())


def _passed_lines(report: CheckReport) -> Iterator[Line]:
    for finding in report.findings:
        if finding.verdict != "pass":
            continue
        mark = "ok" if finding.outcome.applies else "--"
        yield (
            "quiet",
            f"{mark} {finding.rule.id} {finding.rule.slug}  {finding.outcome.what}{_bound_text(finding.outcome)}",
        )
    yield "", ""


def _bound_text(outcome: Outcome) -> str:
    """Return the value against the threshold; empty for booleans and texts."""
    value, limit = outcome.value, outcome.threshold
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(limit, int | float):
        return ""
    return f"  [{value:.4g} against {limit:.4g}{f' {unit_of(limit, outcome.unit)}' if outcome.unit else ''}]"


def _by_option(report: CheckReport) -> str:
    """Return a line with the number of findings that `--fix` can fix; empty where the target cannot be edited.

    Only job files can: not runs, plans, or other trainers' files.
    """
    if report.foreign or not report.target.endswith(".toml") or "L" in report.evidence:
        return ""
    edits = [
        finding.outcome.edits for finding in report.findings if finding.verdict == "fail" and finding.outcome.edits
    ]
    safe = sum(all(edit.safe for edit in finding_edits) for finding_edits in edits)
    options = [f"{safe} with --fix"] if safe else []
    options += [f"{len(edits) - safe} with --unsafe-fixes"] if len(edits) > safe else []
    return f"  fixable: {', '.join(options)}; --diff shows the edits" if options else ""


def _basis_text(report: CheckReport) -> str:
    """Return a line with the basis of the verdicts and the money at stake."""
    evidence = ", ".join(LETTERS[letter] for letter in report.evidence) or "nothing"
    own_count = len({finding.rule.id for finding in report.findings if finding.rule.origin})
    own_text = f" and {plural(own_count, 'rule')} of your own" if own_count else ""
    devices = f"number of devices not known (taken as {report.scaling})"
    if report.devices:
        devices = f"{plural(report.devices, 'device')} ({report.scaling})"
    basis = f"  edition {report.edition}{own_text}, {report.profile}, {devices}"
    stake = total_at_stake(report)
    stake_text = f"; at stake: {shown_cost(stake, report.usd)}" if stake.points or stake.usd else ""
    return f"{basis}; evidence: {evidence}{stake_text}"


# Plain values of a report for `--json`, and the phrases that all formats share.


def report_dict(report: CheckReport) -> dict[str, Any]:
    """Return the JSON form of one report; numbers that JSON cannot express become null."""
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
        "findings": [finding_dict(finding) for finding in report.findings if finding.verdict != "habit"],
        "trainer_notes": [finding_dict(finding) for finding in report.habits],
        "notes": list(report.notes),
        "unmapped": json_values(report.unmapped),
    }


def counts_of(report: CheckReport) -> dict[str, int]:
    """Return the number of rules by verdict; rules that do not apply are counted as `exempt`, not as passes."""
    counts = {verdict: report.counts[verdict] for verdict in ("pass", "fail", "unknown", "waived")}
    if report.habits:
        counts["habit"] = report.counts["habit"]
    return {**counts, "pass": counts["pass"] - len(report.exempt), "exempt": len(report.exempt)}


def finding_dict(finding: Finding) -> dict[str, Any]:
    """Return one finding as a dictionary with all its fields."""
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
    """Return findings as columns of equal length, for a data frame."""
    columns: dict[str, Any] = {
        "rule": lambda finding: finding.rule.id,
        "slug": lambda finding: finding.rule.slug,
        "verdict": lambda finding: finding.verdict,
        "severity": lambda finding: finding.severity,
        "what": lambda finding: finding.outcome.what,
        "value": lambda finding: finding.outcome.value,
        "threshold": lambda finding: finding.outcome.threshold,
        "unit": lambda finding: finding.outcome.unit,
        "file": lambda finding: finding.file,
        "line": lambda finding: finding.line,
        "points": lambda finding: math.nan if finding.outcome.impact.points is None else finding.outcome.impact.points,
        "usd": lambda finding: math.nan if finding.outcome.impact.usd is None else finding.outcome.impact.usd,
        "fix": lambda finding: fix_of(finding.outcome),
        "origin": lambda finding: finding.rule.origin,
    }
    return {name: [read(finding) for finding in findings] for name, read in columns.items()}


def fix_of(outcome: Outcome) -> str:
    """Return the fix in one line: the rule's advice, else its edits."""
    return outcome.fix or "; ".join(shown_setting(edit) for edit in outcome.edits)


def shown_setting(edit: Edit) -> str:
    """Return an edit as a person types it.

    >>> shown_setting(Edit(key="checkpoint.interval_s", value=1418, safe=True))
    'checkpoint.interval_s = 1418'
    """
    return f"{edit.key} = {as_toml(edit.value)}"


def as_toml(value: Scalar) -> str:
    """Return a value as a job file writes it."""
    # Before numbers: bool is a subclass of int.
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def shown_place(finding: Finding) -> str:
    """Return file:line, or the file where no line is known."""
    return f"{finding.file}:{finding.line}" if finding.line else finding.file


def shown_cost(impact: Impact, job_usd: float | None) -> str:
    """Return the cost of a finding in one line; empty where it is not known."""
    parts = []
    if impact.points is not None and math.isfinite(impact.points):
        parts.append(f"{_points_text(impact.points)} of effective training time")
    if impact.usd is not None and math.isfinite(impact.usd):
        of = f" of this {format_money(job_usd)} job" if job_usd else ""
        dollars_text = "less than a cent" if 0 < impact.usd < 0.01 else f"about {format_money(impact.usd)}"
        parts.append(f"{dollars_text}{of}")
    cost = ", ".join(parts)
    return f"{cost}: {impact.note}" if cost and impact.note else cost or impact.note


def _points_text(points: float) -> str:
    """Return the points with one or two decimals; tiny ones are "below 0.01 points" rather than 0."""
    if 0 < points < 0.01:
        return "below 0.01 points"
    text = f"{points:.1f}" if points >= 1 else f"{points:.2f}"
    return f"{text} point{'s' * (text != '1.0')}"


# Several rules measure the cost of failures, each a part of it: detection, restart, repeated work, spares.
BY_FAILURES = ("CKP", "FLT", "COM004", "EFF001")
# Rules that measure a whole kind of loss, parts of which other rules measure.
WHOLES = ("EFF",)


def total_at_stake(report: CheckReport) -> Impact:
    """Return the total impact of all failing findings, at most everything, without counting a loss twice.

    Rules about failures and checkpoints measure the same seconds: only the largest of them counts. The other rules
    add up; of rules with the same edits only the largest counts. The sum is replaced by a rule that measures the
    whole loss, if that is larger.
    """
    failures = [finding for finding in report.findings if finding.verdict == "fail"]
    points, usd = (_summed_cost(failures, name) for name in ("points", "usd"))
    most = report.usd if report.usd is not None else math.inf
    return Impact(points=min(100.0, points or 0.0), usd=min(most, usd) if usd is not None else None)


def _summed_cost(findings: Sequence[Finding], name: str) -> float | None:
    by_failures = largest_whole = 0.0
    parts: dict[object, float] = {}
    costs = [(finding, getattr(finding.outcome.impact, name)) for finding in findings]
    known_costs = [(finding, value) for finding, value in costs if value is not None and math.isfinite(value)]
    for number, (finding, value) in enumerate(known_costs):
        if finding.rule.id.startswith(BY_FAILURES):
            by_failures = max(by_failures, value)
        elif finding.rule.id.startswith(WHOLES):
            largest_whole = max(largest_whole, value)
        else:
            edited_keys = tuple(edit.key for edit in finding.outcome.edits) or number
            parts[edited_keys] = max(value, parts.get(edited_keys, 0.0))
    return by_failures + max(largest_whole, sum(parts.values())) if known_costs else None


def summary_of(report: CheckReport) -> str:
    """Return one line with the counts of all verdicts."""
    counts: Mapping[str, int] = counts_of(report)
    errors = len(
        {finding.rule.id for finding in report.findings if finding.verdict == "fail" and finding.severity == "error"}
    )
    error_text = f" ({plural(errors, 'error')})" if errors else ""
    line = (
        f"{counts['pass']} pass, {counts['fail']} fail{error_text}, "
        f"{counts['unknown']} unknown, {counts['waived']} waived"
    )
    remarks = sum(is_remark(finding) for finding in report.findings)
    line += f"; {plural(remarks, 'remark')}" if remarks else ""
    line += f"; {plural(counts['habit'], 'rule')} about the trainer" if report.habits else ""
    return f"{line}; {counts['exempt']} do{'es' * (counts['exempt'] == 1)} not apply"
