"""SARIF: valid against the schema of 2.1.0, and the same from run to run where a scanner compares."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from rules.kit import evidence
from rules.toy import bad, made, mixed, rule

from phalanx.rules.formats import machine
from phalanx.rules.specification import check_evidence

SCHEMA = Path(__file__).parent / "data" / "sarif-2.1.0.json"


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def log_of(*reports, root: str = "/src") -> dict:
    return json.loads(machine.render_sarif(reports, root=root, version="0.1.0"))


def test_every_verdict_validates(validator) -> None:
    found = list(validator.iter_errors(log_of(mixed(), mixed())))
    assert [error.message for error in found] == []


def test_all_real_rules_validate(validator) -> None:
    log = log_of(check_evidence(evidence("checkpoint.interval_s=864000", "checkpoint.keep=1")))
    assert [error.message for error in validator.iter_errors(log)] == []
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert len({one["id"] for one in rules}) == len(rules) >= 40
    results = log["runs"][0]["results"]
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in results)
    assert "CKP001" in {one["ruleId"] for one in results if one["kind"] == "fail"}


def test_the_schema_would_notice(validator) -> None:
    log = log_of(mixed())
    log["runs"][0]["results"][0]["kind"] = "open question"
    assert list(validator.iter_errors(log))


def test_kinds_levels_and_suppressions() -> None:
    results = {one["ruleId"]: one for one in log_of(mixed())["runs"][0]["results"]}
    told = {name: (one["kind"], one["level"]) for name, one in results.items()}
    assert told == {
        "CKP901": ("fail", "error"),
        "CKP902": ("fail", "warning"),
        "CKP903": ("fail", "error"),
        "FLT901": ("open", "none"),
        "FLT904": ("fail", "note"),
    }
    assert results["CKP903"]["suppressions"] == [
        {"kind": "inSource", "status": "accepted", "justification": "it is <my> birthday"}
    ]
    assert "suppressions" not in results["CKP901"]


def test_places_are_relative_and_have_their_line() -> None:
    results = {one["ruleId"]: one for one in log_of(mixed())["runs"][0]["results"]}
    place = results["CKP902"]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "runs/x%20y/events-00000.jsonl", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 7}
    assert "\x1b" not in results["CKP902"]["message"]["text"]


def test_fingerprints_do_not_change_with_values_and_lines_but_with_rules_and_keys() -> None:
    def prints(*outcomes) -> list[str]:
        report = made([rule(outcomes), rule(bad(), "CKP902")])
        results = log_of(report)["runs"][0]["results"]
        return [one["partialFingerprints"]["phalanxFinding/v1"] for one in results]

    first = prints(bad(), bad(at="checkpoint.path"), bad())
    assert len(set(first)) == 4
    assert prints(bad("8 toys lie about", value=8), bad(at="checkpoint.path"), bad("9 toys")) == first
