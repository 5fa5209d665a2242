"""A report as one HTML file: no scripts, no external files, light or dark as the reader's system is set."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.io.style import REPORT_CSS
from phalanx.io.tables import HtmlCell, html_table
from phalanx.io.values import printable
from phalanx.rules.formats.text import counts_of, fix_lines, shown_cost, shown_place, summary_of, total_at_stake
from phalanx.rules.rule import LETTERS
from phalanx.rules.run_rules import CheckReport, Finding
from phalanx.units import format_money, plural

MORE_CSS = """
.finding { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--quiet);
  border-radius: 10px; padding: 10px 14px; margin: 12px 0; overflow-wrap: anywhere; }
.finding.error { border-left-color: var(--alarm); } .finding.warning { border-left-color: var(--s2); }
.finding.info { border-left-color: var(--s1); }
.finding b { font-weight: 650; } .finding pre { background: none; border: 0; padding: 0; }
.verdict-fail { color: var(--alarm); } .verdict-pass { color: var(--good); } .verdict-unknown { color: var(--s2); }
"""
MOST_TEXT = 1000


def render_html(reports: Sequence[CheckReport]) -> str:
    """Return the HTML file for these reports."""
    body = "\n".join(_report_html(report) for report in reports)
    title = _escaped_text(f"phalanx check {reports[0].target}" if len(reports) == 1 else "phalanx check")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{REPORT_CSS}{MORE_CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def render_fragment(report: CheckReport) -> str:
    """Return one report for a notebook: summary and findings.

    It has no style sheet, which would affect the whole page.
    """
    items = "".join(f"<li>{_fragment_item(finding, report)}</li>" for finding in report.problems)
    notes = "".join(f"<p>{_escaped_text(note)}</p>" for note in report.notes)
    listing = f"<ul>{items}</ul>" if items else "<p>No findings.</p>"
    head = f"<p><b>{_escaped_text(report.target)}</b>: {_escaped_text(summary_of(report))}</p>"
    return f'<div class="phalanx-check">{head}{notes}{listing}</div>'


def _fragment_item(finding: Finding, report: CheckReport) -> str:
    outcome, rule = finding.outcome, finding.rule
    colour = {"error": "#c0392b", "warning": "#b7791f", "info": "#2b6cb0"}[finding.severity]
    texts = (shown_cost(outcome.impact, report.usd), *fix_lines(outcome))
    details = "".join(f"<br><small>{_escaped_text(text)}</small>" for text in texts if text)
    head = f'<b style="color:{colour}">{finding.severity} {rule.id}</b> {_escaped_text(rule.slug)}'
    return f"{head} <small>{_escaped_text(shown_place(finding))}</small><br>{_escaped_text(outcome.what)}{details}"


def _report_html(report: CheckReport) -> str:
    problems = "\n".join(_finding_html(finding, report) for finding in report.problems)
    rows = [_row_cells(finding) for finding in report.findings]
    table = f'<div class="scroll">{html_table(rows, head=("rule", "verdict", "what", "where"))}</div>'
    return "\n".join(
        (
            f"<h1>{_escaped_text(report.target)}</h1>",
            f'<p class="lead">{_escaped_text(summary_of(report))}</p>',
            _tiles_html(report),
            *(f"<p>{_escaped_text(note)}</p>" for note in report.notes),
            f"<h2>Findings</h2>\n{problems or '<p>None.</p>'}",
            f"<h2>Every rule</h2>\n{table}",
            _habits_html(report),
            _unmapped_html(report),
        )
    )


def _tiles_html(report: CheckReport) -> str:
    counts, stake = counts_of(report), total_at_stake(report)
    evidence = ", ".join(LETTERS[letter] for letter in report.evidence) or "nothing"
    tiles = {
        "rules met": str(counts["pass"]),
        "rules broken": str(counts["fail"]),
        "without evidence": str(counts["unknown"]),
        "of effective training time at stake": f"{stake.points or 0:.1f} points",
        "at stake": format_money(stake.usd) if stake.usd is not None else "no price known",
        f"{report.profile}, class {report.scaling}": (
            plural(report.devices, "device") if report.devices else "devices not known"
        ),
        "evidence": evidence,
    }
    inner = "".join(
        f'<div class="tile"><b>{_escaped_text(value)}</b><span>{_escaped_text(name)}</span></div>'
        for name, value in tiles.items()
    )
    return f'<div class="tiles">{inner}</div>'


def _finding_html(finding: Finding, report: CheckReport) -> str:
    outcome, rule = finding.outcome, finding.rule
    lines = "\n".join(printable(line, most=MOST_TEXT) for line in outcome.formula)
    place = f'<span class="quiet">{finding.severity}, {_escaped_text(shown_place(finding))}</span>'
    origin = f' <span class="quiet">(your own rule, from {_escaped_text(rule.origin)})</span>' if rule.origin else ""
    parts = [
        f"<p><b>{rule.id}</b> {_escaped_text(rule.slug)} {place}{origin}</p>",
        f"<p>{_escaped_text(outcome.what)}</p>",
        f"<pre>{escape(lines)}</pre>" if lines else "",
        *(
            f"<p>{_escaped_text(text)}</p>"
            for text in (shown_cost(outcome.impact, report.usd), *fix_lines(outcome))
            if text
        ),
    ]
    return f'<div class="finding {finding.severity}">{"".join(parts)}</div>'


def _row_cells(finding: Finding) -> tuple[HtmlCell, ...]:
    verdict = finding.verdict if finding.outcome.applies else "does not apply"
    reason = f" ({finding.reason})" if finding.reason else ""
    return (
        HtmlCell(f"{finding.rule.id} {_escaped_text(finding.rule.slug)}"),
        HtmlCell(verdict, f"verdict-{finding.verdict}"),
        HtmlCell(_escaped_text(finding.outcome.what + reason), "long"),
        HtmlCell(_escaped_text(shown_place(finding))),
    )


def _habits_html(report: CheckReport) -> str:
    if not report.habits:
        return ""
    rows = [
        (HtmlCell(finding.rule.id), HtmlCell(_escaped_text(finding.outcome.what), "long")) for finding in report.habits
    ]
    return f'<h2>About the trainer</h2>\n<div class="scroll">{html_table(rows)}</div>'


def _unmapped_html(report: CheckReport) -> str:
    if not report.unmapped:
        return ""
    rows = [
        [
            HtmlCell(_escaped_text(setting.key)),
            HtmlCell(_escaped_text(setting.value)),
            HtmlCell(_escaped_text(setting.why), "long"),
        ]
        for setting in report.unmapped
    ]
    return f'<h2>Not checked</h2>\n<div class="scroll">{html_table(rows)}</div>'


def _escaped_text(text: str) -> str:
    return escape(printable(text, most=MOST_TEXT))
