"""A report as JUnit XML: a suite per target, a case per rule; missing evidence is a skipped case."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Tree

from phalanx.errors import PhalanxError
from phalanx.io.values import printable
from phalanx.rules.formats.machine import MOST_TEXT, problem_text
from phalanx.rules.formats.text import fix_lines, shown_cost, shown_place
from phalanx.rules.run_rules import CheckReport, Finding


def render_junit(reports: Sequence[CheckReport], failures: Sequence[PhalanxError] = ()) -> str:
    """Return the XML document, with a final line break."""
    root = Tree.Element("testsuites", name="phalanx check")
    for report in reports:
        root.append(_junit_suite(report))
    for problem in (problem for error in failures for problem in error.problems):
        suite = Tree.SubElement(root, "testsuite", name=printable(problem.where), tests="1", failures="0", errors="1")
        case = Tree.SubElement(suite, "testcase", classname="phalanx", name="can be read", time="0")
        Tree.SubElement(case, "error", message=printable(problem.what, most=MOST_TEXT)).text = problem_text(problem)
    Tree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"


def _junit_suite(report: CheckReport) -> Tree.Element:
    by_rule: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if finding.verdict == "habit":
            continue
        by_rule.setdefault(finding.rule.id, []).append(finding)
    cases = [_junit_case(rule_findings, report) for rule_findings in by_rule.values()]
    suite = Tree.Element(
        "testsuite",
        name=printable(report.target),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors="0",
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        time="0",
    )
    suite.extend(cases)
    return suite


def _junit_case(found: Sequence[Finding], report: CheckReport) -> Tree.Element:
    """Return the test case of one rule. Findings of severity info go to its output and do not fail it."""
    rule = found[0].rule
    case = Tree.Element("testcase", classname=f"phalanx.{rule.group}", name=f"{rule.id} {rule.slug}", time="0")
    failures = [finding for finding in report.problems if finding.rule.id == rule.id and finding.severity != "info"]
    skipped = [finding for finding in found if finding.verdict in ("unknown", "waived")]
    if failures:
        kind, message = failures[0].severity, printable(failures[0].outcome.what, most=MOST_TEXT)
        Tree.SubElement(case, "failure", type=kind, message=message).text = _junit_text(failures, report)
    elif skipped:
        Tree.SubElement(case, "skipped", message="; ".join(_skip_reason(finding) for finding in skipped))
    else:
        Tree.SubElement(case, "system-out").text = _junit_text(found, report)
    return case


def _skip_reason(finding: Finding) -> str:
    if finding.verdict == "waived":
        return printable(f"waived: {finding.reason}")
    fix = f" ({finding.outcome.fix})" if finding.outcome.fix else ""
    return printable(f"unknown: {finding.outcome.what}{fix}", most=MOST_TEXT)


def _junit_text(found: Sequence[Finding], report: CheckReport) -> str:
    lines: list[str] = []
    for finding in found:
        cost = shown_cost(finding.outcome.impact, report.usd)
        lines += [
            f"{shown_place(finding)}: {finding.outcome.what}",
            *finding.outcome.formula,
            cost,
            *fix_lines(finding.outcome),
        ]
    return "\n".join(printable(line, most=MOST_TEXT) for line in lines if line)
