"""Rules of the user's own: from objects, files, jobs and packages; what they say, and what happens when they break."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rules.kit import JOB as GOOD
from rules.kit import TODAY, evidence

from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.job.load import load
from phalanx.rules.edition import find_rule, select_rules
from phalanx.rules.explain import explain
from phalanx.rules.formats.registry import FORMATS, render_reports
from phalanx.rules.own_rules import RESERVED, collect_own_rules, installed_rules
from phalanx.rules.rule_page import rule_page, rule_pages
from phalanx.rules.specification import (
    Evidence,
    Limits,
    Outcome,
    Rule,
    check,
    check_evidence,
    check_plan,
    failed,
    own_rule,
    passed,
)

PAGE = Path(__file__).parents[2] / "docs/own-rules.md"
SOURCE = """
from pathlib import Path
from phalanx.rules.specification import failed, own_rule, passed

Path(__file__ + ".ran").touch()

@own_rule("ACME001", "Jobs are called after their team.", severity="warning")
def team_name(evidence, limits):
    if evidence.the_job.name.startswith("acme-"):
        return passed("well named")
    return failed(f"{evidence.the_job.name} names no team", fix="begin it with acme-", at="name")

@own_rule("ACME002", "Rules do not break.")
def broken(evidence, limits):
    return {}["nothing"]
"""


@own_rule("ACME009", "Jobs keep five checkpoints.", severity="warning", requires="J")
def five_checkpoints(evidence: Evidence, limits: Limits) -> Outcome:
    """checkpoint.keep >= 5"""
    keep = evidence.the_job.checkpoint.keep
    if keep >= 5:
        return passed(f"{keep} are kept")
    return failed(f"{keep} are kept, not five", fix="checkpoint.keep = 5", at="checkpoint.keep")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "acme_rules.py").write_text(SOURCE)
    path = tmp_path / "job.toml"
    path.write_text(GOOD.replace('name = "good"', 'name = "good"\nrules = ["acme_rules.py:team_name"]'))
    return path


def verdicts(report) -> dict[str, str]:
    return {rule: verdict for rule, verdict in report.verdicts.items() if rule.startswith(("ACME", "SPC003"))}


def test_an_object_is_asked_and_shown_as_the_users() -> None:
    report = check_evidence(evidence(), rules=[five_checkpoints])
    assert verdicts(report) == {"ACME009": "fail", "SPC003": "pass"}
    (found,) = report.filter("warning", rule="ACME")
    assert found.line == 0 or found.file.endswith("job.toml")
    text = str(report)
    assert "W ACME009 five-checkpoints  3 are kept, not five" in text
    assert re.search(r"your own rule, from .*five_checkpoints", text)
    assert "edition 2026.1 and 1 rule of your own" in text
    assert report.exit_code == 1


def test_rules_of_the_specification_are_asked_as_before() -> None:
    alone, beside = check_evidence(evidence()), check_evidence(evidence(), rules=[five_checkpoints])
    assert not verdicts(alone)
    ours = [one for one in beside.findings if not one.rule.origin and one.rule.id != "SPC003"]
    assert [(one.rule.id, one.verdict) for one in ours] == [(one.rule.id, one.verdict) for one in alone.findings]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_it(name: str) -> None:
    report = check_evidence(evidence(), rules=[five_checkpoints], select="ACME")
    text = render_reports(name, [report], root="/", version="1")
    assert "ACME009" in text
    assert "five_checkpoints" in text or name in ("github", "junit")


def test_a_rule_that_raises_fails_and_the_others_are_asked(job: Path) -> None:
    report = check(str(job), rules=[f"{job.parent}/acme_rules.py", five_checkpoints], select="ACME,CKP", today=TODAY)
    assert verdicts(report) == {"ACME001": "fail", "ACME002": "fail", "ACME009": "fail", "SPC003": "unknown"}
    assert report.verdicts["CKP001"] == "pass"
    (found,) = report.filter(rule="ACME002").findings
    assert found.outcome.what == "the rule raised KeyError: 'nothing'"
    assert found.outcome.fix == f"correct the rule, at {job.parent}/acme_rules.py:15"
    assert found.severity == "error"


@pytest.mark.parametrize("answer", [True, None, [passed("one"), 3]])
def test_an_answer_that_is_no_outcome_fails(answer: object) -> None:
    rule = replace(five_checkpoints, check=lambda evidence, limits: answer)
    (found,) = check_evidence(evidence(), rules=[rule], select="ACME").filter("warning").findings
    assert "not an outcome" in found.outcome.what


def test_a_rule_that_leaves_does_not_end_the_check() -> None:
    def leave(evidence: Evidence, limits: Limits) -> Outcome:
        raise SystemExit(3)

    report = check_evidence(evidence(), rules=[replace(five_checkpoints, check=leave)])
    assert report.verdicts["ACME009"] == "fail"
    assert report.verdicts["CKP001"] == "pass"


def test_code_of_a_job_file_runs_only_with_consent(job: Path) -> None:
    report = check(str(job), today=TODAY)
    assert verdicts(report) == {"SPC003": "unknown"}
    (asked,) = report.filter(rule="SPC003").findings
    assert "acme_rules.py:team_name was not run" in asked.outcome.what
    assert asked.outcome.fix == "read it, then give --allow-code (allow_code=True in Python)"
    assert (asked.file, asked.line) == (str(job), 4)
    assert not (job.parent / "acme_rules.py.ran").exists()
    allowed = check(str(job), allow_code=True, select="ACME", today=TODAY)
    assert verdicts(allowed) == {"ACME001": "fail", "SPC003": "pass"}
    assert (job.parent / "acme_rules.py.ran").exists()
    assert allowed.filter("warning").findings[0].line == 3
    given = check(str(job), rules=f"{job.parent}/acme_rules.py:team_name", select="ACME001", today=TODAY)
    assert given.verdicts["ACME001"] == "fail", "one reference is a list of one"
    with pytest.raises(UserError) as caught:
        check(str(job), rules=["nowhere_at_all.rules:mine"], today=TODAY)
    assert str(caught.value).startswith("nowhere_at_all.rules:mine cannot be imported: ModuleNotFoundError")


def test_before_a_run_the_jobs_own_rules_are_asked_with_consent(job: Path) -> None:
    resolved = load(job)
    plan = evidence().the_plan
    assert verdicts(check_plan(resolved, plan)) == {"SPC003": "unknown"}
    assert verdicts(check_plan(resolved, plan, allow_code=True)) == {"ACME001": "fail", "SPC003": "pass"}


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("gone.py:rule", "there is no file"),
        ("acme_rules.py:team", "did you mean team_name?"),
        ("acme_rules.py:failed", "is function, not a rule"),
        ("no_such_package_of_anybody:rule", "cannot be imported: ModuleNotFoundError"),
        ("bad.py:rule", "bad.py:2: bad.py:rule cannot be run: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_loaded_is_named(job: Path, named: str, says: str) -> None:
    (job.parent / "bad.py").write_text("\n1 / 0\n")
    job.write_text(job.read_text().replace("acme_rules.py:team_name", named))
    report = check(str(job), rules=[five_checkpoints], allow_code=True, today=TODAY)
    (found,) = report.filter(rule="SPC003").findings
    assert found.verdict == "fail"
    assert named in found.outcome.what
    assert says in f"{found.outcome.what} {found.outcome.fix}"
    assert verdicts(report)["ACME009"] == "fail"
    with pytest.raises(UserError, match=re.escape(named)):  # in the call it is a mistake of the call
        collect_own_rules([named if ".py" not in named else f"{job.parent}/{named}"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": "CKP009"}, "begins with CKP, which belongs to the specification"),
        ({"id": "acme1"}, "has the wrong form"),
        ({"slug": "Five Checkpoints"}, "the slug 'Five Checkpoints' has the wrong form"),
        ({"severity": "fatal"}, "'fatal' is no severity"),
        ({"requires": "X"}, "requires = 'X' names no evidence"),
    ],
)
def test_a_rule_that_reports_cannot_show_is_refused(changes: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        collect_own_rules([replace(five_checkpoints, **changes)])


def test_two_rules_of_one_id_are_refused() -> None:
    other = replace(five_checkpoints, check=lambda evidence, limits: passed("fine"))
    with pytest.raises(UserError, match="the id ACME009 is also that of"):
        collect_own_rules([five_checkpoints, other])
    assert collect_own_rules([five_checkpoints, five_checkpoints]).rules


def test_waivers_cover_own_rules_also_where_they_were_not_run(job: Path) -> None:
    job.write_text(job.read_text() + '\n[[waiver]]\nrule = "ACME001"\nreason = "an old job"\nexpires = 2026-12-31\n')
    assert check(str(job), today=TODAY).verdicts.get("SPC001", "pass") == "pass"
    assert check(str(job), allow_code=True, today=TODAY).verdicts["ACME001"] == "waived"


def test_explain_and_list_show_it() -> None:
    assert find_rule("five-checkpoints", [five_checkpoints]) is five_checkpoints
    assert five_checkpoints in select_rules("ACME", own=[five_checkpoints])
    told = str(explain(five_checkpoints))
    assert told.startswith("# ACME009 five-checkpoints")
    assert "your own rule" in told.lower()
    assert "checkpoint.keep >= 5" in told
    assert not any("ACME" in text for text in rule_pages([*select_rules(), five_checkpoints]).values())


def test_explain_puts_the_jobs_numbers_before_the_page(job: Path) -> None:
    told = str(explain("ACME009", str(job), rules=[five_checkpoints], today=TODAY))
    assert "**fail** (warning)" in told
    assert "3 are kept, not five" in told
    assert told.endswith(rule_page(collect_own_rules([five_checkpoints]).rules[0]).removesuffix("\n"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with an entry point for rules, as pip leaves it."""
    (tmp_path / "acme_installed.py").write_text(SOURCE.replace("ACME00", "PKG00"))
    info = tmp_path / "acme_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.rules]\nacme = acme_installed:team_name\ngone = acme_gone:rules\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_rules.cache_clear()
    yield tmp_path
    installed_rules.cache_clear()
    sys.modules.pop("acme_installed", None)


def test_a_package_brings_rules(package: Path) -> None:
    report = check_evidence(evidence())
    assert report.verdicts["PKG001"] == "fail"
    assert "PKG002" not in report.verdicts
    (broken,) = report.filter("error", rule="SPC003").findings
    assert "gone of acme-rules cannot be imported: ModuleNotFoundError" in broken.outcome.what
    assert "your own rule, from package acme-rules" in str(report)
    assert find_rule("pkg001").origin == "package acme-rules"
    assert "PKG001" not in check_evidence(evidence(), ignore="PKG").verdicts


def test_the_command_line_lists_and_explains_it(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    told = capsys.readouterr().out
    assert "PKG  your own rules" in told
    assert "PKG001 W J   team-name" in told
    assert main(["explain", "team-name"]) == 0
    assert "Your own rule, from package acme-rules." in capsys.readouterr().out


def test_the_page_says_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/own-rules.md, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "acme_rules.py").write_text(blocks[0])
    (tmp_path / "job.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    report = check("job.toml", rules=["acme_rules.py:job_budget"], select=["ACME"], today=TODAY)
    (found,) = report.filter("error").findings
    assert isinstance(found.rule, Rule)
    assert found.file == "job.toml"
    assert "is expected to cost $" in found.outcome.what
    assert "your own rule, from acme_rules.py:job_budget" in str(report)
    (groups,) = re.findall(r"a group of the specification \((.*?)\)", " ".join(PAGE.read_text().split()))
    assert groups == ", ".join(RESERVED)
