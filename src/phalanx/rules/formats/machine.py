"""Reports for other programs: JSON, SARIF 2.1.0 and GitHub workflow commands."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from phalanx.errors import PhalanxError, Problem
from phalanx.io.codec import json_text, json_values
from phalanx.io.values import printable
from phalanx.io.visible import visible_json
from phalanx.rules.formats.text import fix_lines, report_dict, shown_cost, summary_of
from phalanx.rules.outcome import Spot
from phalanx.rules.rule import LETTERS, Rule
from phalanx.rules.rule_page import rule_page
from phalanx.rules.run_rules import CheckReport, Finding


def relative_path(file: str, root: str) -> str:
    """Return a path relative to `root` for a file below it; for any other file the full path.

    >>> relative_path("/src/jobs/a.toml", "/src"), relative_path("a.toml", "/src"), relative_path("/etc/a.toml", "/src")
    ('jobs/a.toml', 'a.toml', '/etc/a.toml')
    """
    path = os.path.normpath(os.path.join(root, file))
    inside = os.path.relpath(path, root)
    return path if inside == ".." or inside.startswith(f"..{os.sep}") else Path(inside).as_posix()


def as_uri(file: str, root: str) -> str:
    """Return the path of `relative_path` as a URI reference: relative below `root`, else absolute.

    >>> as_uri("a b.toml", "/src"), as_uri("/etc/a.toml", "/src")
    ('a%20b.toml', 'file:///etc/a.toml')
    """
    name = relative_path(file, root)
    escaped = quote(name.encode("utf-8", "surrogateescape"), safe="/")
    return f"file://{escaped}" if name.startswith("/") else escaped


# JSON: one report is one document; several reports are a list under `reports`.


def render_json(reports: Sequence[CheckReport], failures: Sequence[PhalanxError] = ()) -> str:
    """Return the JSON document, with a final line break; `failures` lists targets that could not be read."""
    documents = [report_dict(report) for report in reports]
    document = documents[0] if len(documents) == 1 and not failures else {"reports": documents}
    if failures:
        document["failures"] = [json_values(problem) for error in failures for problem in error.problems]
    return visible_json(json_text(document, indent=2)) + "\n"


# SARIF 2.1.0, which code scanners show next to the lines of the job file. Rule ids, file names and fingerprints are
# the same in every run; otherwise a scanner would report an old finding as new.


SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
SARIF_LEVEL = {"error": "error", "warning": "warning", "info": "note"}
MOST_TEXT = 1000


def render_sarif(
    reports: Sequence[CheckReport], *, root: str, version: str, failures: Sequence[PhalanxError] = ()
) -> str:
    """Return the SARIF document.

    `root` is the checkout that file names are relative to; `version` is that of Phalanx.
    """
    run = _sarif_run(reports, root, version)
    if failures:
        notifications = [_sarif_notification(problem, root) for error in failures for problem in error.problems]
        run["invocations"] = [{"executionSuccessful": False, "toolExecutionNotifications": notifications}]
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return visible_json(json_text(log, indent=2)) + "\n"


def problem_place(problem: Problem) -> tuple[str, int]:
    """Return the file and line (0: none) of a problem.

    >>> problem_place(Problem(where="a/b.json:12", what="")), problem_place(Problem(where="b.json", what=""))
    (('a/b.json', 12), ('b.json', 0))
    """
    file, _, line = problem.where.rpartition(":")
    return (file, int(line)) if file and line.isdigit() and len(line) < 9 else (problem.where, 0)


def problem_text(problem: Problem) -> str:
    """Return what is wrong, why, and the fix, on one line each."""
    return "\n".join(printable(text, most=MOST_TEXT) for text in (problem.what, problem.why, problem.fix) if text)


def _sarif_notification(problem: Problem, root: str) -> dict[str, Any]:
    file, line = problem_place(problem)
    notification: dict[str, Any] = {"level": "error", "message": {"text": problem_text(problem)}}
    if file and os.path.exists(os.path.join(root, file)):
        uri = as_uri(file, root)
        artifact = {"uri": uri} if uri.startswith("file:") else {"uri": uri, "uriBaseId": "%SRCROOT%"}
        place = {"artifactLocation": artifact, "region": {"startLine": max(1, line)}}
        notification["locations"] = [{"physicalLocation": place}]
    return notification


def _sarif_run(reports: Sequence[CheckReport], root: str, version: str) -> dict[str, Any]:
    rules = {finding.rule.id: finding.rule for report in reports for finding in report.findings}
    index = {rule_id: number for number, rule_id in enumerate(rules)}
    repeats: Counter[str] = Counter()
    results = [
        _sarif_result(finding, report, root, index[finding.rule.id], repeats)
        for report in reports
        for finding in report.findings
        if finding.verdict not in ("pass", "habit")
    ]
    edition = reports[0].edition if reports else ""
    driver = {
        "name": "phalanx",
        "version": version,
        "shortDescription": {"text": f"Training specification {edition}."},
        "rules": [_sarif_rule(rule) for rule in rules.values()],
    }
    return {
        "tool": {"driver": driver},
        "automationDetails": {"id": "phalanx-check/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.slug.split("-")),
        "shortDescription": {"text": rule.requirement},
        "fullDescription": {"text": " ".join(rule.why.split())},
        "help": {"text": f"{rule.requirement}\n\n{rule.fix}", "markdown": rule_page(rule)},
        "defaultConfiguration": {"level": SARIF_LEVEL[rule.severity]},
        "properties": {
            "tags": [rule.group, rule.slug],
            "evidence": [LETTERS[letter] for letter in rule.requires],
            "sources": [reference.text for reference in rule.references],
            **({"origin": printable(rule.origin)} if rule.origin else {}),
        },
    }


def _sarif_result(finding: Finding, report: CheckReport, root: str, index: int, seen: Counter[str]) -> dict[str, Any]:
    is_open = finding.verdict == "unknown"
    kind, level = ("open", "none") if is_open else ("fail", SARIF_LEVEL[finding.severity])
    outcome = finding.outcome
    lines = [outcome.what, *outcome.formula, shown_cost(outcome.impact, report.usd), *fix_lines(outcome)]
    sarif_message = "\n".join(printable(line, most=MOST_TEXT) for line in lines if line)
    result = {
        "ruleId": finding.rule.id,
        "ruleIndex": index,
        "kind": kind,
        "level": level,
        "message": {"text": sarif_message},
        "locations": [_sarif_location(finding, root)],
        "partialFingerprints": {"phalanxFinding/v1": finding_fingerprint(finding, root, seen)},
        "properties": _sarif_properties(finding),
    }
    if finding.verdict == "waived":
        # A baseline is a separate file.
        kind = "external" if finding.reason.startswith("known: ") else "inSource"
        waiver = {"kind": kind, "status": "accepted", "justification": printable(finding.reason)}
        result["suppressions"] = [waiver]
    return result


def _sarif_location(finding: Finding, root: str) -> dict[str, Any]:
    uri = as_uri(finding.file, root)
    artifact = {"uri": uri} if uri.startswith("file:") else {"uri": uri, "uriBaseId": "%SRCROOT%"}
    # Line 1 for the whole file, since scanners require a line.
    line = max(1, finding.line)
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}


def finding_fingerprint(finding: Finding, root: str, seen: Counter[str]) -> str:
    """Return a digest of rule, file and setting; a moved line or a changed value does not change it.

    `seen` counts equal findings, so that each gets its own fingerprint.
    """
    at = finding.outcome.at
    place = "log" if isinstance(at, Spot) else at
    text = f"{finding.rule.id}\n{relative_path(finding.file, root)}\n{place}"
    seen[text] += 1
    return hashlib.sha256(f"{text}\n{seen[text]}".encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _sarif_properties(finding: Finding) -> dict[str, Any]:
    outcome = finding.outcome
    properties = {
        "value": json_values(outcome.value),
        "threshold": json_values(outcome.threshold),
        "unit": outcome.unit or None,
        "points": json_values(outcome.impact.points),
        "usd": json_values(outcome.impact.usd),
    }
    return {name: value for name, value in properties.items() if value is not None}


# GitHub workflow commands, which GitHub shows next to the lines of the job file.


GITHUB_LEVEL = {"error": "error", "warning": "warning", "info": "notice"}
MOST_GITHUB_TEXT = 400


def render_github(reports: Sequence[CheckReport], *, root: str, failures: Sequence[PhalanxError] = ()) -> str:
    """Return one command per finding and one notice per target; file names are relative to the folder `root`."""
    lines = [line for report in reports for line in _github_commands(report, root)]
    lines += [_github_failure(problem, root) for error in failures for problem in error.problems]
    return "".join(line + "\n" for line in lines)


def _github_failure(problem: Problem, root: str) -> str:
    file, line = problem_place(problem)
    place = {"file": relative_path(file, root) if file else "", "line": str(line) if line else ""}
    properties = {**place, "title": "phalanx check cannot read this"}
    property_list = ",".join(f"{name}={_github_property(value)}" for name, value in properties.items() if value)
    return f"::error {property_list}::{_github_data(problem_text(problem))}"


def _github_commands(report: CheckReport, root: str) -> list[str]:
    title = f"phalanx check {report.target}"
    commands = [_github_command(finding, report, root) for finding in report.problems]
    commands += [
        f"::warning title={_github_property(title)}::{_github_data(printable(note, most=MOST_GITHUB_TEXT))}"
        for note in report.notes
    ]
    return [*commands, f"::notice title={_github_property(title)}::{_github_data(summary_of(report))}"]


def _github_command(finding: Finding, report: CheckReport, root: str) -> str:
    outcome = finding.outcome
    place = {"file": relative_path(finding.file, root), "line": str(finding.line) if finding.line else ""}
    title = {"title": f"{finding.rule.id} {finding.rule.slug}"}
    property_list = ",".join(f"{name}={_github_property(value)}" for name, value in {**place, **title}.items() if value)
    lines = [outcome.what, *outcome.formula, shown_cost(outcome.impact, report.usd), *fix_lines(outcome)]
    lines += [f"explain: phalanx explain {finding.rule.id}"] if not finding.rule.origin else []
    message = "\n".join(printable(line, most=MOST_GITHUB_TEXT) for line in lines if line)
    return f"::{GITHUB_LEVEL[finding.severity]} {property_list}::{_github_data(message)}"


def _github_data(text: str) -> str:
    # The escapes of GitHub's workflow commands; "%" first, since the others insert it.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(printable(text)).replace(":", "%3A").replace(",", "%2C")
