"""Every rule has its text, its cases and its flips, and they come out as written."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from rules import cases
from rules.kit import SEVERITIES, Case, Flip, answers, judge_one, severity, verdict

from phalanx.rules.edition import all_rules
from phalanx.rules.outcome import Spot

MODULES = [importlib.import_module(f"rules.cases.{one.name}") for one in pkgutil.iter_modules(cases.__path__)]
CASES: list[Case] = [case for module in MODULES for case in module.CASES]
FLIPS: list[Flip] = [flip for module in MODULES for flip in module.FLIPS]
SEPARATE = {"SPC001", "SPC003"}  # judged beside the others: test_waivers.py, test_own_rules.py
# Limits that decide neither a verdict nor a severity: they weigh an impact, or stand in the arithmetic that is shown.
WEIGHING = {
    ("TOP003", "far_rate"): "the impact of a card far away",
    ("CKP001", "small_devices"): "whom the rate of small jobs is told",
    ("CKP001", "small_factor"): "that rate",
    ("PRC002", "small_loss"): "when another trainer's sum is a remark",
}
RULES = [rule for rule in all_rules() if rule.id not in SEPARATE]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.name}")
def test_verdict(case: Case) -> None:
    found = answers(case.rule, case.evidence())
    told = [f"{one.verdict} {one.severity}: {one.outcome.what}" for one in found]
    assert judge_one(found) == case.verdict, told
    worst = [one for one in found if one.verdict == case.verdict]
    assert not case.severity or case.severity in {one.severity for one in worst}, told
    assert case.says in " | ".join(one.outcome.what for one in worst)
    spots = {one.outcome.at.file if isinstance(one.outcome.at, Spot) else one.outcome.at for one in worst}
    assert not case.at or case.at in spots, spots
    costs = [one.outcome.impact for one in worst]
    assert case.points is None or pytest.approx(case.points, rel=0.01) in [one.points for one in costs], costs
    for one in worst:
        if one.verdict == "fail":
            assert one.outcome.fix or one.outcome.edits
            assert one.outcome.impact.points is not None or one.outcome.impact.note


@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: f"{flip.rule}-{flip.limit}")
def test_a_changed_constant_turns_the_verdict(flip: Flip) -> None:
    found, ask = flip.evidence(), severity if flip.before in SEVERITIES else verdict
    assert ask(flip.rule, found) == flip.before
    assert ask(flip.rule, found, **{flip.limit: flip.value}) == flip.after
    assert flip.before != flip.after


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_is_proved(rule) -> None:
    mine = [case for case in CASES if case.rule == rule.id]
    verdicts = {case.verdict for case in mine}
    assert {"pass", "fail"} <= verdicts, "needs a passing and a failing case"
    assert any(case.boundary for case in mine), "needs a case on the boundary"
    flipped = {flip.limit for flip in FLIPS if flip.rule == rule.id}
    decisive = {name for name in rule.limits if (rule.id, name) not in WEIGHING}
    assert decisive, "needs a limit that decides"
    assert decisive <= flipped, f"needs a flip of {', '.join(sorted(decisive - flipped))}"


def test_limits_that_only_weigh_are_there_and_decide_nothing() -> None:
    known = {(rule.id, name) for rule in RULES for name in rule.limits}
    assert WEIGHING.keys() <= known
    assert not WEIGHING.keys() & {(flip.rule, flip.limit) for flip in FLIPS}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_every_section_is_written(rule) -> None:
    for name in ("requirement", "why", "how", "bad", "good", "fix", "waive", "history"):
        assert getattr(rule, name).strip(), f"{rule.id} lacks {name}"
    assert rule.references
    assert rule.limits
    assert all(limit.note for limit in rule.limits.values())
    assert set(rule.requires + rule.uses) <= set("JPLHD")
