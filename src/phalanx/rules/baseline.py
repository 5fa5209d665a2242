"""A baseline file: findings that a project already knows, so that `phalanx check` fails only on new ones."""

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
    """Map the index of each failing finding to its fingerprint, of rule, file and setting.

    A moved line does not change the fingerprint.
    """
    repeats: Counter[str] = Counter()
    return {
        number: finding_fingerprint(finding, root, repeats)
        for number, finding in enumerate(report.findings)
        if finding.verdict == "fail" and finding.severity != "info"
    }


def write_baseline(path: Path, reports: Sequence[CheckReport]) -> int:
    """Write the fingerprints of all failing findings; returns their number."""
    root, findings = str(resolve_path(path).parent), {}
    for report in reports:
        for number, fingerprint in fingerprints(report, root).items():
            finding = report.findings[number]
            # The values help a person who reads a diff; only the fingerprint is compared.
            findings[fingerprint] = {
                "rule": finding.rule.id,
                "file": relative_path(finding.file, root),
                "what": finding.outcome.what[:200],
            }
    ordered = dict(sorted(findings.items(), key=lambda item: (item[1]["file"], item[1]["rule"], item[0])))
    write_text(path, json_text({"schema": SCHEMA, "findings": ordered}, indent=1) + "\n", fix="name another --baseline")
    return len(ordered)


def read_baseline(path: Path) -> frozenset[str]:
    """Return the fingerprints in a baseline file; raises UserError when the file is not a baseline."""
    data: Any = read_json(path)
    findings = data.get("findings") if isinstance(data, dict) and data.get("schema") == SCHEMA else None
    if not isinstance(findings, dict):
        raise mistake(str(path), "is not a baseline", fix="write one: phalanx check . --baseline FILE --write-baseline")
    return frozenset(str(fingerprint) for fingerprint in findings)


def without_known(report: CheckReport, known: frozenset[str], *, baseline: Path) -> CheckReport:
    """Return the report with findings of the baseline marked as waived."""
    fingerprint_of = fingerprints(report, str(resolve_path(baseline).parent))
    findings = [
        replace(finding, verdict="waived", reason=KNOWN) if fingerprint_of.get(number) in known else finding
        for number, finding in enumerate(report.findings)
    ]
    return replace(report, findings=tuple(findings))
