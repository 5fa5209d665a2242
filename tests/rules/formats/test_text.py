"""The page for a terminal, word for word, and nothing in it that moves a cursor."""

from __future__ import annotations

from rules.kit import evidence
from rules.toy import bad, made, mixed, rule

from phalanx.errors import Problem
from phalanx.rules.evidence import Unmapped
from phalanx.rules.formats.text import render_text
from phalanx.rules.outcome import Impact, unknown

EXPECTED = """\
job.toml:16: E CKP901 toy-rule  7 toys lie about
  toys = 3 + 4 = 7
  7 > 0
  2.5 points of effective training time, about $1,234 of this {job} job: time lost falling
  fix (safe): checkpoint.keep = 3 (enough)
  explain: phalanx explain CKP901 job.toml; source: grandmother

runs/x y/events-00000.jsonl:7: W CKP902 toy-rule  a <b>bold</b> "word" & 50 % of [2J it next, line: ::error::
"""
REST = """\
? FLT901  nobody looked
    look

waived CKP903  waived one  (it is <my> birthday)

job.toml: 2 pass, 2 fail (1 error), 1 unknown, 1 waived; 1 remark; 1 does not apply
  edition 2026.1, nvidia-h100, 128 devices (S2); evidence: job, plan; at stake: 2.5 points of effective training time,\
 about $1,234 of this {job} job
  fixable: 2 with --fix; --diff shows the edits
"""


def test_the_page() -> None:
    from phalanx.units import format_money

    report = mixed()
    page, job = render_text([report]), format_money(report.usd or 0)
    assert page.startswith(EXPECTED.format(job=job))
    assert page.endswith(REST.format(job=job))
    assert "\x1b" not in page
    assert "FLT902" not in page
    assert "ok FLT902 toy-rule  good  [1 against 2 x]" in render_text([report], verbose=True)
    assert "-- FLT903 toy-rule  there is nothing" in render_text([report], verbose=True)


def test_rules_that_lack_the_same_evidence_share_a_line() -> None:
    report = made([rule(unknown("no log", fix="run it"), f"CKP90{number}") for number in range(3)])
    assert "? CKP900 CKP901 CKP902  no log\n    run it\n" in render_text([report])


def test_required_evidence_is_told_like_a_finding() -> None:
    page = render_text([made([rule(unknown("no log", fix="run it"))], require_evidence=True)])
    assert "? CKP901 toy-rule  no log\n" in page
    assert "  fix: run it\n" in page


def test_settings_that_were_not_checked_are_named() -> None:
    found = tuple(Unmapped(key=f"--flag-{number}", value="1", why="no word") for number in range(20))
    page = render_text([made([rule()], evidence(unmapped=found))])
    assert "20 settings have no counterpart" in page
    assert "    --flag-0 = 1  no word\n" in page
    assert "and 8 more: --json lists them" in page


def test_findings_that_one_edit_cures_are_at_stake_once() -> None:
    dear, other = bad(impact=Impact(points=4.0)), bad(edits=(), fix="by hand", impact=Impact(points=1.5))
    page = render_text([made([rule((bad(), dear), "TOP901"), rule((other, other), "TOP902")])])
    assert "at stake: 7.0 points" in page


def lost(points: float):
    return bad(edits=(), fix="by hand", impact=Impact(points=points))


def test_what_a_failure_costs_is_at_stake_once_however_many_rules_tell_it() -> None:
    failures = [
        rule(lost(points), name) for points, name in ((4, "CKP901"), (9, "FLT901"), (6, "EFF001"), (5, "COM004"))
    ]
    assert "at stake: 9.0 points" in render_text([made(failures)])
    assert "at stake: 11.0 points" in render_text([made([*failures, rule(lost(2), "COM003")])])


def test_a_rule_that_measures_the_whole_stands_for_its_parts() -> None:
    parts = [rule(lost(3), "TOP901"), rule(lost(2), "COM901")]
    assert "at stake: 8.0 points" in render_text([made([*parts, rule(lost(8), "EFF002")])])
    assert "at stake: 5.0 points" in render_text([made([*parts, rule(lost(4), "EFF002")])])


def test_a_size_that_nobody_knows_is_said_to_be_unknown() -> None:
    nowhere = evidence(plan=None)
    assert "number of devices not known (taken as S2)" in render_text([made([rule()], nowhere)])
    assert ", 24 devices (S2)" in render_text([made([rule()], evidence(plan=None, devices_said=24))])


def test_damaged_files_of_a_run_are_named() -> None:
    damage = {"P": Problem(where="plan.json", what="cannot be used: is not JSON", fix="put it back")}
    found = evidence(plan=None, target="runs/x", damaged=damage)
    page = render_text([made([rule(requires="P")], found)])
    assert "! runs/x/plan.json cannot be used: is not JSON\n" in page
    assert "? CKP901  no evidence from the plan: plan.json cannot be used: is not JSON\n    put it back\n" in page


def test_a_loss_too_small_to_round_is_still_said() -> None:
    assert "below 0.01 points" in render_text([made([rule(bad(impact=Impact(points=0.004)))])])
    assert "less than a cent" in render_text([made([rule(bad(impact=Impact(usd=0.004)))])])
    assert "nan" not in render_text([made([rule(bad(impact=Impact(points=float("nan"), usd=float("inf"))))])])
