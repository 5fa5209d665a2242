"""A report as Python sees it: text, one line, HTML, columns, iteration and filters."""

from __future__ import annotations

from pathlib import Path

import pytest
from rules.kit import JOB, TODAY, evidence
from rules.toy import NASTY, bad, made, mixed, rule
from synthetic import write_run

from phalanx.errors import UserError
from phalanx.io import notebook
from phalanx.job.load import load
from phalanx.record.run import open_run
from phalanx.rules.explain import explain
from phalanx.rules.formats.registry import render_reports
from phalanx.rules.specification import check, report_dict


def test_text_is_what_the_verb_prints() -> None:
    report = mixed()
    assert f"{report}\n" == render_reports("text", [report], root=".", version="")
    assert report.to_dict() == report_dict(report)
    assert (
        repr(report)
        == "<CheckReport: job.toml: 2 pass, 2 fail (1 error), 1 unknown, 1 waived; 1 remark; 1 does not apply>"
    )


def test_iteration_gives_what_speaks_against_it_the_worst_first() -> None:
    report = mixed()
    assert [one.rule.id for one in report] == [one.rule.id for one in report.problems] == ["CKP901", "CKP902", "FLT904"]
    assert len(report) == 3
    assert not report.is_clean
    assert made([rule()]).is_clean
    assert made([rule()]), "a clean report is a report"
    assert str(report.problems[0]).startswith("job.toml:16: E CKP901 toy-rule  7 toys lie about")


def test_filters_narrow_a_report() -> None:
    report = mixed()
    assert [one.rule.id for one in report.filter("error")] == ["CKP901"]
    assert [one.rule.id for one in report.filter("warning").findings] == ["CKP902"]
    assert [one.rule.id for one in report.filter(verdict="unknown").findings] == ["FLT901"]
    assert {one.rule.id for one in report.filter(rule="flt").findings} == {"FLT901", "FLT902", "FLT903", "FLT904"}
    assert "CKP902" not in str(report.filter("error"))


def test_html_for_a_notebook_holds_no_markup_of_others_and_no_style_sheet() -> None:
    text = made([rule(bad(NASTY))])._repr_html_()
    assert "<b>bold</b>" not in text
    assert "\x1b" not in text
    assert "<style" not in text
    assert "CKP901" in text


def test_columns_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    columns = mixed().frame()
    assert list(columns["rule"][:2]) == ["CKP901", "CKP902"]
    assert {len(column) for column in columns.values()} == {len(mixed().findings)}
    assert columns["points"].dtype == float


def test_a_frame_with_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = mixed().frame()
    assert isinstance(frame, pandas.DataFrame)
    assert set(frame[frame.verdict == "fail"].rule) == {"CKP901", "CKP902", "FLT904"}


def test_a_job_a_plan_and_a_path_are_checked_alike(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    resolved, plan = load(path), evidence().the_plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    by_path = check(path, select="CKP", today=TODAY)
    assert check(resolved, select=["CKP"], today=TODAY).verdicts == by_path.verdicts
    assert check(resolved.job, select="CKP", today=TODAY).verdicts == by_path.verdicts
    by_file = check(tmp_path / "plan.json", select="CKP", today=TODAY)
    assert check(plan, select="CKP", today=TODAY).verdicts == by_file.verdicts
    assert check(path, select="CKP", overrides=["checkpoint.interval_s=86400"], today=TODAY).exit_code == 1
    assert check(plan, profile="cpu-gloo", select="SPC002", today=TODAY).verdicts["SPC002"] == "fail"


def test_what_is_nothing_of_the_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="a path, a job, a plan or a run, not int"):
        check(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="there is no such file or folder"):
        check("nowhere.toml")
    with pytest.raises(UserError, match="did you mean CKP001"):
        explain("CKP0001")


def test_an_explanation_prints_and_has_one_line() -> None:
    found = explain("interval-daly", evidence().the_plan, today=TODAY)
    assert repr(found) == "<Explanation: CKP001 interval-daly on good>"
    assert str(found).startswith("# CKP001 on good\n")
    assert found.to_dict()["findings"][0]["verdict"] == "pass"
    assert list(explain("CKP001").to_dict()) == ["rule", "slug", "sections"]


def test_a_run_in_hand_is_checked_as_its_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=2, steps=3)
    by_path = check(run.path, select="TEL", today=TODAY)
    assert check(open_run(run.path), select="TEL", today=TODAY).verdicts == by_path.verdicts
