"""Verdicts, severities and exit codes, on rules that say what they are told to."""

from __future__ import annotations

from dataclasses import replace

from rules.kit import evidence
from rules.toy import bad, made, mixed, rule

from phalanx.rules.outcome import Impact, exempt, passed, unknown
from phalanx.rules.profiles import CLASSES


def test_the_verdict_of_a_rule_is_its_worst_answer() -> None:
    report = made([rule((passed("one part"), unknown("another"), bad()))])
    assert report.verdicts == {"CKP901": "fail"}
    assert [one.verdict for one in report.findings] == ["pass", "unknown", "fail"]
    assert made([rule((passed("one part"), unknown("another")))]).verdicts == {"CKP901": "unknown"}


def test_missing_evidence_is_unknown_and_says_how_to_get_it() -> None:
    report = made([rule(requires="JL"), rule(rule_id="CKP902", requires="D")])
    assert [one.verdict for one in report.findings] == ["unknown", "unknown"]
    assert report.findings[0].outcome.what == "no evidence from the run log"
    assert "phalanx check runs/NAME" in report.findings[0].outcome.fix
    assert report.exit_code == 0
    strict = made([rule(requires="JL")], require_evidence=True)
    assert (strict.exit_code, len(strict.problems)) == (1, 1)


def test_exit_code_is_that_of_the_worst_finding() -> None:
    assert made([rule()]).exit_code == 0
    assert made([rule(bad(severity="info"))]).exit_code == 0
    assert made([rule(bad(severity="warning"))]).exit_code == 1
    assert made([rule(bad())]).errors == 1


def test_errors_are_softer_in_small_classes_and_warnings_harder_in_large_ones() -> None:
    small, large = (replace(evidence(), scaling=CLASSES[number]) for number in (0, 4))
    soft, hard = rule(bad(), softer_in=("S1",)), rule(bad(severity="warning"), harder_from="S3")
    assert [made([soft], one).findings[0].severity for one in (small, large)] == ["warning", "error"]
    assert [made([hard], one).findings[0].severity for one in (small, large)] == ["warning", "error"]


def test_a_rule_that_breaks_is_unknown_and_hides_no_other() -> None:
    def broken(found, limits):
        raise ZeroDivisionError("by zero")

    report = made([rule(check=broken), rule(bad(), "CKP902")])
    assert report.verdicts == {"CKP901": "unknown", "CKP902": "fail"}
    assert "ZeroDivisionError" in report.findings[0].outcome.what


def test_rules_of_another_profile_do_not_apply() -> None:
    report = made([rule(bad(), profiles=("tpu",)), rule(rule_id="CKP902"), rule(exempt("nothing"), "CKP903")])
    assert report.exempt == {"CKP901", "CKP903"}
    assert report.exit_code == 0


def test_problems_come_worst_and_dearest_first() -> None:
    cheap, dear = (bad(impact=Impact(points=points)) for points in (0.5, 9.0))
    rules = [
        rule(bad(severity="warning", impact=Impact(points=50.0)), "CKP901"),
        rule(cheap, "CKP902"),
        rule(dear, "CKP903"),
    ]
    assert [one.rule.id for one in made(rules).problems] == ["CKP903", "CKP902", "CKP901"]


def test_a_finding_stands_at_the_line_of_its_key() -> None:
    places = {one.rule.id: (one.file.rpartition("/")[2], one.line) for one in mixed().findings}
    assert places["CKP901"] == ("job.toml", 16)
    assert places["CKP902"] == ("events-00000.jsonl", 7)
