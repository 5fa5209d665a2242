"""A report for a terminal: what is wrong and what it costs, then what nobody knows, then one line of counts.

Lines are (style, text): a style is a word of STYLES, and only a terminal sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.io.values import printable
from phalanx.rules.formats.text import shown_cost, shown_place, shown_setting, summary_of, total_at_stake
from phalanx.rules.judge import CheckReport, Finding
from phalanx.rules.outcome import Outcome
from phalanx.rules.rule import LETTERS
from phalanx.units import plural

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
        for style, text in _page(report, verbose=verbose):
            yield style, printable(text, most=MOST_TEXT)


def _page(report: CheckReport, *, verbose: bool) -> Iterator[Line]:
    for one in report.problems:
        yield from finding_lines(one, report)
        yield "", ""
    yield from (("warning", f"! {line}") for line in report.notes)
    if report.notes:
        yield "", ""
    yield from _unknown(report)
    yield from _waived(report)
    yield from _unmapped(report)
    if verbose:
        yield from _passed(report)
    yield "head", f"{report.target}: {summary_of(report)}"
    yield "quiet", _basis(report)
    if hint := _by_option(report):
        yield "quiet", hint


def finding_lines(finding: Finding, report: CheckReport) -> Iterator[Line]:
    """One finding in full."""
    rule, outcome = finding.rule, finding.outcome
    mark = LETTER[finding.severity] if finding.verdict == "fail" else "?"
    yield finding.severity, f"{shown_place(finding)}: {mark} {rule.id} {rule.slug}  {outcome.what}"
    for line in outcome.formula:
        yield "", f"  {line}"
    if cost := shown_cost(outcome.impact, report.usd):
        yield "", f"  {cost}"
    yield from (("", f"  {line}") for line in fix_lines(outcome))
    yield "quiet", f"  explain: phalanx explain {rule.id} {report.target}; source: {rule.references[0].text}"


def fix_lines(outcome: Outcome) -> Iterator[str]:
    """What to do: each edit with what it touches, then the rule's own words."""
    for edit in outcome.edits:
        kind = "safe" if edit.safe else "changes the training"
        yield f"fix ({kind}): {shown_setting(edit)}{f' ({edit.note})' if edit.note else ''}"
    if outcome.fix:
        yield f"fix: {outcome.fix}"


def _unknown(report: CheckReport) -> Iterator[Line]:
    """Missing evidence, by what is missing: one line for many rules."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in report.findings:
        if one.verdict == "unknown" and not report.require_evidence:  # else each is a problem, and told above
            rules = groups.setdefault((one.outcome.what, one.outcome.fix), [])
            rules += [one.rule.id] if one.rule.id not in rules else []
    for (what, fix), rules in groups.items():
        yield "info", f"? {' '.join(rules)}  {what}"
        if fix:
            yield "quiet", f"    {fix}"
    if groups:
        yield "", ""


def _waived(report: CheckReport) -> Iterator[Line]:
    found = [one for one in report.findings if one.verdict == "waived"]
    for one in found:
        yield "quiet", f"waived {one.rule.id}  {one.outcome.what}  ({one.reason})"
    if found:
        yield "", ""


def _unmapped(report: CheckReport) -> Iterator[Line]:
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


def _passed(report: CheckReport) -> Iterator[Line]:
    for one in report.findings:
        if one.verdict != "pass":
            continue
        mark = "ok" if one.outcome.applies else "--"
        yield "quiet", f"{mark} {one.rule.id} {one.rule.slug}  {one.outcome.what}{_bound(one.outcome)}"
    yield "", ""


def _bound(outcome: Outcome) -> str:
    """Value against threshold; yes and no need no figures."""
    value, limit = outcome.value, outcome.threshold
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(limit, int | float):
        return ""
    return f"  [{value:.4g} against {limit:.4g}{f' {outcome.unit}' if outcome.unit else ''}]"


def _by_option(report: CheckReport) -> str:
    """How many findings an option mends; runs and plans are past mending, other trainers' files are not ours to."""
    if report.foreign or not report.target.endswith(".toml") or "L" in report.evidence:
        return ""
    edits = [one.outcome.edits for one in report.findings if one.verdict == "fail" and one.outcome.edits]
    safe = sum(all(edit.safe for edit in some) for some in edits)
    told = [f"{safe} with --fix"] if safe else []
    told += [f"{len(edits) - safe} with --unsafe-fixes"] if len(edits) > safe else []
    return f"  can be mended: {', '.join(told)}; --diff shows the edits" if told else ""


def _devices(report: CheckReport) -> str:
    if not report.devices:
        return f"number of devices not known (taken as {report.scaling})"
    return f"{plural(report.devices, 'device')} ({report.scaling})"


def _basis(report: CheckReport) -> str:
    """What the verdicts rest on, and the money in question."""
    seen = ", ".join(LETTERS[letter] for letter in report.evidence) or "nothing"
    basis = f"  edition {report.edition}, {report.profile}, {_devices(report)}"
    stake = total_at_stake(report)
    told = f"; at stake: {shown_cost(stake, report.usd)}" if stake.points or stake.usd else ""
    return f"{basis}; looked at: {seen}{told}"
