"""A report as SARIF 2.1.0, which code scanners show beside the lines of the job file.

Rule ids, file names and fingerprints are the same in every run, or a scanner takes an old finding for a new one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from phalanx.io.values import printable
from phalanx.io.visible import visible_json
from phalanx.rules.formats.machine import as_uri, relative
from phalanx.rules.formats.text import finite, fix_lines, shown_cost
from phalanx.rules.judge import CheckReport, Finding
from phalanx.rules.outcome import Spot
from phalanx.rules.rule import LETTERS, Rule
from phalanx.rules.rule_page import rule_page

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
GITHUB_LEVEL = {"error": "error", "warning": "warning", "info": "note"}
MOST_GITHUB_TEXT = 1000


def render_github(reports: Sequence[CheckReport], *, root: str, version: str) -> str:
    """The document. `root` is the checkout that file names are told from; `version` is that of Phalanx."""
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(reports, root, version)]}
    return visible_json(json.dumps(log, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def _run(reports: Sequence[CheckReport], root: str, version: str) -> dict[str, Any]:
    rules = {one.rule.id: one.rule for report in reports for one in report.findings}
    index = {rule_id: number for number, rule_id in enumerate(rules)}
    seen: Counter[str] = Counter()
    results = [
        _result(one, report, root, index[one.rule.id], seen)
        for report in reports
        for one in report.findings
        if one.verdict != "pass"
    ]
    edition = reports[0].edition if reports else ""
    driver = {
        "name": "phalanx",
        "version": version,
        "shortDescription": {"text": f"Training specification {edition}."},
        "rules": [_rule(rule) for rule in rules.values()],
    }
    return {
        "tool": {"driver": driver},
        "automationDetails": {"id": "phalanx-check/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.slug.split("-")),
        "shortDescription": {"text": rule.requirement},
        "fullDescription": {"text": " ".join(rule.why.split())},
        "help": {"text": f"{rule.requirement}\n\n{rule.fix}", "markdown": rule_page(rule)},
        "defaultConfiguration": {"level": GITHUB_LEVEL[rule.severity]},
        "properties": {
            "tags": [rule.group, rule.slug],
            "evidence": [LETTERS[letter] for letter in rule.requires],
            "sources": [one.text for one in rule.references],
        },
    }


def _result(finding: Finding, report: CheckReport, root: str, index: int, seen: Counter[str]) -> dict[str, Any]:
    is_open = finding.verdict == "unknown"
    kind, level = ("open", "none") if is_open else ("fail", GITHUB_LEVEL[finding.severity])
    result = {
        "ruleId": finding.rule.id,
        "ruleIndex": index,
        "kind": kind,
        "level": level,
        "message": {"text": _message(finding, report)},
        "locations": [_location(finding, root)],
        "partialFingerprints": {"phalanxFinding/v1": _fingerprint(finding, root, seen)},
        "properties": _properties(finding),
    }
    if finding.verdict == "waived":
        waiver = {"kind": "inSource", "status": "accepted", "justification": printable(finding.reason)}
        result["suppressions"] = [waiver]
    return result


def _message(finding: Finding, report: CheckReport) -> str:
    outcome = finding.outcome
    lines = [outcome.what, *outcome.formula, shown_cost(outcome.impact, report.usd), *fix_lines(outcome)]
    return "\n".join(printable(line, most=MOST_GITHUB_TEXT) for line in lines if line)


def _location(finding: Finding, root: str) -> dict[str, Any]:
    uri = as_uri(finding.file, root)
    artifact = {"uri": uri} if uri.startswith("file:") else {"uri": uri, "uriBaseId": "%SRCROOT%"}
    line = max(1, finding.line)  # of the file as a whole: its first, since scanners ask for one
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}


def _fingerprint(finding: Finding, root: str, seen: Counter[str]) -> str:
    """Of rule, file and setting: neither a moved line nor another value makes another finding of it."""
    at = finding.outcome.at
    what = "log" if isinstance(at, Spot) else at
    text = f"{finding.rule.id}\n{relative(finding.file, root)}\n{what}"
    seen[text] += 1
    return hashlib.sha256(f"{text}\n{seen[text]}".encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _properties(finding: Finding) -> dict[str, Any]:
    outcome = finding.outcome
    found = {
        "value": finite(outcome.value),
        "threshold": finite(outcome.threshold),
        "unit": outcome.unit or None,
        "points": finite(outcome.impact.points),
        "usd": finite(outcome.impact.usd),
    }
    return {name: value for name, value in found.items() if value is not None}
