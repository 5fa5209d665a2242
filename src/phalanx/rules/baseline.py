"""A baseline: findings that a project knows. They are counted; only what is new fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import mistake
from phalanx.io.codec import json_text
from phalanx.io.files import write_text
from phalanx.io.path_probes import resolve_path
from phalanx.record.run_files import read_json
from phalanx.rules.formats.machine import finding_fingerprint, relative_path
from phalanx.rules.run_rules import CheckReport

SCHEMA = "phalanx.baseline/1"
KNOWN = "known: in the baseline"


def fingerprints(report: CheckReport, root: str) -> dict[int, str]:
    """Index of a finding that fails -> its fingerprint, of rule, file and setting: a moved line changes nothing."""
    seen: Counter[str] = Counter()
    return {
        number: finding_fingerprint(one, root, seen)
        for number, one in enumerate(report.findings)
        if one.verdict == "fail" and one.severity != "info"
    }


def write_baseline(path: Path, reports: Sequence[CheckReport]) -> int:
    """Write what fails now; returns how many findings."""
    root, known = str(resolve_path(path).parent), {}
    for report in reports:
        for number, mark in fingerprints(report, root).items():
            one = report.findings[number]
            # For the reader of a diff; the fingerprint alone decides.
            known[mark] = {
                "rule": one.rule.id,
                "file": relative_path(one.file, root),
                "what": one.outcome.what[:200],
            }
    ordered = dict(sorted(known.items(), key=lambda item: (item[1]["file"], item[1]["rule"], item[0])))
    write_text(path, json_text({"schema": SCHEMA, "findings": ordered}, indent=1) + "\n", fix="name another --baseline")
    return len(ordered)


def read_baseline(path: Path) -> frozenset[str]:
    """Fingerprints of the findings that are known; raises UserError for what is no baseline."""
    data: Any = read_json(path)
    findings = data.get("findings") if isinstance(data, dict) and data.get("schema") == SCHEMA else None
    if not isinstance(findings, dict):
        raise mistake(str(path), "is not a baseline", fix="write one: phalanx check . --baseline FILE --write-baseline")
    return frozenset(str(one) for one in findings)


def without_known(report: CheckReport, known: frozenset[str], *, baseline: Path) -> CheckReport:
    """The report with known findings as waived ones."""
    marks = fingerprints(report, str(resolve_path(baseline).parent))
    findings = [
        replace(one, verdict="waived", reason=KNOWN) if marks.get(number) in known else one
        for number, one in enumerate(report.findings)
    ]
    return replace(report, findings=tuple(findings))
