"""Verdicts on a run that grows: read on piece by piece, and the same in the end as of one reading."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
from rules.kit import TODAY
from synthetic import write_run

from phalanx.record.run import Run
from phalanx.rules import live_check
from phalanx.rules.live_check import LiveCheck
from phalanx.rules.specification import check, report_dict


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path, ranks=4, steps=40, straggler=2)


def verdicts(report: live_check.Report) -> dict[str, str]:
    return {one.rule.id: one.verdict for one in report.problems}


def test_pieces_come_to_the_same_as_one_reading(run: Run) -> None:
    growing = LiveCheck(run, today=lambda: TODAY)
    looks = [growing.look(budget_bytes=30_000)]
    while not looks[-1].is_settled:
        looks.append(growing.look(budget_bytes=30_000))
    assert len(looks) > 2
    assert [one.is_last for one in looks] == [False] * (len(looks) - 1) + [True]
    whole = check(str(run.path), today=TODAY)
    assert report_dict(looks[-1].report)["counts"] == report_dict(whole)["counts"]
    assert verdicts(looks[-1].report) == verdicts(whole)


def test_a_plan_that_comes_later_is_read(run: Run) -> None:
    kept = run.plan_json.read_bytes()
    run.plan_json.write_bytes(b"{")
    growing = LiveCheck(run, today=lambda: TODAY)
    assert "P" not in growing.look().report.evidence
    run.plan_json.write_bytes(kept)
    assert "P" in growing.look().report.evidence


def test_a_waiver_ends_with_its_last_day(run: Run) -> None:
    waiver = {"rule": "TEL004", "reason": "rank 2 is known to be slow", "expires": "2026-11-15"}
    plan = run.plan()
    plan["job"]["waiver"] = [waiver]
    run.plan_json.write_text(json.dumps(plan))
    run.job_toml.unlink()
    days = [date(2026, 11, 15), date(2026, 11, 16)]
    growing = LiveCheck(run, today=lambda: days[0])
    assert growing.look().report.verdicts["TEL004"] == "waived"
    days.pop(0)
    after = growing.look().report.verdicts
    assert (after["TEL004"], after["SPC001"]) == ("fail", "fail")
