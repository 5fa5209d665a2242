"""The page for a terminal, word for word, and nothing in it that moves a cursor."""

from __future__ import annotations

from spec.kit import evidence
from spec.toy import bad, made, mixed, rule

from phalanx.spec.evidence import Unmapped
from phalanx.spec.formats.text import render
from phalanx.spec.outcome import Impact, unknown

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
  edition 2026.1, nvidia-h100, 128 devices (S2); looked at: job, plan; at stake: 2.5 points of effective training time,\
 about $1,234 of this {job} job
  can be mended: 2 with --fix; --diff shows the edits
"""


def test_the_page() -> None:
    from phalanx.units import format_money

    report = mixed()
    page, job = render([report]), format_money(report.usd or 0)
    assert page.startswith(EXPECTED.format(job=job))
    assert page.endswith(REST.format(job=job))
    assert "\x1b" not in page
    assert "FLT902" not in page
    assert "ok FLT902 toy-rule  good  [1 against 2 x]" in render([report], verbose=True)
    assert "-- FLT903 toy-rule  there is nothing" in render([report], verbose=True)


def test_rules_that_lack_the_same_evidence_share_a_line() -> None:
    report = made([rule(unknown("no log", fix="run it"), f"CKP90{number}") for number in range(3)])
    assert "? CKP900 CKP901 CKP902  no log\n    run it\n" in render([report])


def test_required_evidence_is_told_like_a_finding() -> None:
    page = render([made([rule(unknown("no log", fix="run it"))], require_evidence=True)])
    assert "? CKP901 toy-rule  no log\n" in page
    assert "  fix: run it\n" in page


def test_settings_that_were_not_checked_are_named() -> None:
    found = tuple(Unmapped(key=f"--flag-{number}", value="1", why="no word") for number in range(20))
    page = render([made([rule()], evidence(unmapped=found))])
    assert "20 settings have no counterpart" in page
    assert "    --flag-0 = 1  no word\n" in page
    assert "and 8 more: --json lists them" in page


def test_findings_that_one_edit_cures_are_at_stake_once() -> None:
    dear, other = bad(impact=Impact(points=4.0)), bad(edits=(), fix="by hand", impact=Impact(points=1.5))
    page = render([made([rule((bad(), dear)), rule((other, other), "CKP902")])])
    assert "at stake: 7.0 points" in page


def test_a_loss_too_small_to_round_is_still_said() -> None:
    assert "below 0.01 points" in render([made([rule(bad(impact=Impact(points=0.004)))])])
    assert "less than a cent" in render([made([rule(bad(impact=Impact(usd=0.004)))])])
    assert "nan" not in render([made([rule(bad(impact=Impact(points=float("nan"), usd=float("inf"))))])])
