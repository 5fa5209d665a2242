"""A report as workflow commands, which GitHub shows beside the lines of the job file."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.io.values import printable
from phalanx.rules.formats.machine import relative
from phalanx.rules.formats.text import fix_lines, shown_cost, summary_of
from phalanx.rules.judge import CheckReport, Finding

GITHUB_LEVEL = {"error": "error", "warning": "warning", "info": "notice"}
MOST_GITHUB_TEXT = 400


def render_github(reports: Sequence[CheckReport], *, root: str) -> str:
    """One command per finding, one notice per target; `root` is the folder that file names are told from."""
    return "".join(line + "\n" for report in reports for line in _commands(report, root))


def _commands(report: CheckReport, root: str) -> list[str]:
    title = f"phalanx check {report.target}"
    found = [_command(one, report, root) for one in report.problems]
    found += [
        f"::warning title={_property(title)}::{_data(printable(one, most=MOST_GITHUB_TEXT))}" for one in report.notes
    ]
    return [*found, f"::notice title={_property(title)}::{_data(summary_of(report))}"]


def _command(finding: Finding, report: CheckReport, root: str) -> str:
    outcome = finding.outcome
    place = {"file": relative(finding.file, root), "line": str(finding.line) if finding.line else ""}
    title = {"title": f"{finding.rule.id} {finding.rule.slug}"}
    told = ",".join(f"{name}={_property(value)}" for name, value in {**place, **title}.items() if value)
    lines = [outcome.what, *outcome.formula, shown_cost(outcome.impact, report.usd), *fix_lines(outcome)]
    message = "\n".join(printable(line, most=MOST_GITHUB_TEXT) for line in lines if line)
    return f"::{GITHUB_LEVEL[finding.severity]} {told}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(printable(text)).replace(":", "%3A").replace(",", "%2C")
