"""Waivers hold until their day, cover what is open, and are findings when they are old or idle."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from rules.kit import evidence
from rules.toy import WAIVING, bad, rule

from phalanx.job.schema import Waiver
from phalanx.rules.catalog import spc001_waivers
from phalanx.rules.outcome import unknown
from phalanx.rules.run_rules import CheckReport, judge
from phalanx.rules.specification import check_evidence


def waiving(*waivers: Waiver, today: date = date(2026, 11, 15)):
    found = evidence(text=WAIVING)
    return replace(found, job=replace(found.the_job, waiver=waivers), today=today)


def waiver(rule_id: str = "CKP901", expires: str = "2026-12-31") -> Waiver:
    return Waiver(rule=rule_id, reason="a good reason", expires=expires)


def judged(found, *rules, whole: bool = True) -> CheckReport:
    return judge([*rules, spc001_waivers.RULE], found, edition="2026.1", whole=whole)


def of_waivers(report: CheckReport) -> list[tuple[str, str, str]]:
    return [(one.verdict, one.severity, one.outcome.what) for one in report.findings if one.rule.id == "SPC001"]


def test_waivers_from_a_file_also_cover_what_has_no_job() -> None:
    report = judged(replace(waiving(), job=None, waivers=(waiver(),)), rule(bad()))
    assert report.verdicts == {"CKP901": "waived", "SPC001": "pass"}


@pytest.mark.parametrize("outcome", [bad(), unknown("nobody looked")])
def test_a_waiver_covers_failures_and_missing_evidence(outcome) -> None:
    report = judged(waiving(waiver()), rule(outcome))
    assert report.verdicts == {"CKP901": "waived", "SPC001": "pass"}
    assert report.findings[0].reason == "a good reason"
    assert report.exit_code == 0


@pytest.mark.parametrize(("day", "verdict"), [(date(2026, 12, 31), "waived"), (date(2027, 1, 1), "fail")])
def test_a_waiver_holds_on_its_last_day_and_not_after_it(day: date, verdict: str) -> None:
    report = judged(waiving(waiver(), today=day), rule(bad()))
    assert report.verdicts["CKP901"] == verdict
    if verdict == "fail":
        assert of_waivers(report) == [("fail", "warning", "the waiver of CKP901 expired on 2026-12-31")]


def test_a_waiver_of_a_rule_that_is_met_waives_nothing() -> None:
    report = judged(waiving(waiver()), rule())
    assert of_waivers(report) == [("fail", "warning", "the waiver of CKP901 waives nothing: the rule is met")]
    assert report.exit_code == 1


def test_before_the_run_a_rule_that_reads_the_log_may_need_its_waiver_later() -> None:
    report = judged(waiving(waiver()), rule(uses="L"))
    assert of_waivers(report)[0][1] == "info"
    assert report.exit_code == 0


def test_a_waiver_of_no_rule_names_the_nearest() -> None:
    report = check_evidence(waiving(waiver("CKP010")))
    assert of_waivers(report)[0][2] == "the waiver of CKP010 waives nothing: CKP010 is no rule of edition 2026.1"
    told = next(one.outcome for one in report.findings if one.rule.id == "SPC001")
    assert "did you mean CKP0" in told.fix
    assert told.at == "waiver.0.rule"


def test_waivers_themselves_cannot_be_waived() -> None:
    report = check_evidence(waiving(waiver("SPC001")))
    assert "cannot be waived" in of_waivers(report)[0][2]


def test_with_a_selection_only_the_waivers_of_its_rules_are_told() -> None:
    found = waiving(waiver("CKP001"), waiver("COM001"), waiver("XXX001"))
    chosen = {what for _, _, what in of_waivers(check_evidence(found, select="CKP001"))}
    assert len(chosen) == 1
    assert "CKP001" in chosen.pop()
    assert of_waivers(check_evidence(found, select="CKP001", ignore="SPC")) == []
    assert any("XXX001" in what for _, _, what in of_waivers(check_evidence(found, select="SPC001")))


def test_the_days_that_a_waiver_holds_on_are_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flip of SPC001.days_over: it is judged beside the rules, not by them."""
    late = waiving(waiver(), today=date(2027, 1, 1))
    assert judged(late, rule(bad())).verdicts["CKP901"] == "fail"
    monkeypatch.setattr(spc001_waivers, "RULE", spc001_waivers.RULE.with_limit("days_over", 1))
    assert judged(late, rule(bad())).verdicts["CKP901"] == "waived"
