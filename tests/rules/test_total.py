"""Rules are total: whatever stands in the evidence, each of them answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rules.kit import evidence
from rules.logs import good_cpu_log, good_log

from phalanx.rules.edition import all_rules
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.run_rules import limits_of

ODD = (0.0, -1.0, float("nan"), float("inf"))


def changed(value: Any) -> Iterator[Any]:
    """A frozen value with one of its numbers made odd, or one of its optional parts taken out."""
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        if isinstance(old, bool | str):
            continue
        if isinstance(old, float):
            yield from (replace(value, **{field.name: odd}) for odd in ODD)
        elif isinstance(old, int):
            yield replace(value, **{field.name: 0})
        if "None" in str(field.type):
            yield replace(value, **{field.name: None})
        if isinstance(old, tuple):
            yield replace(value, **{field.name: ()})


def of_plan(found: Evidence) -> Iterator[Evidence]:
    for name in ("reliability", "memory", "prediction", "duration", "bill", "cluster"):
        for part in changed(getattr(found.the_plan, name)):
            yield replace(found, plan=replace(found.the_plan, **{name: part}))
    yield replace(found, plan=None)


def of_log(found: Evidence) -> Iterator[Evidence]:
    log = found.the_log
    for one in changed(log):
        yield replace(found, log=one)
    for name in ("steps", "digests", "noise", "monitor", "peers", "checkpoints", "grammar", "ledger"):
        for part in changed(getattr(log, name)):
            yield replace(found, log=replace(log, **{name: part}))


MAKERS = {
    "plan": lambda: of_plan(evidence()),
    "log": lambda: of_log(evidence(log=good_log())),
    "cpu log": lambda: of_log(evidence(log=good_cpu_log(), profile="cpu-gloo", plan=None)),
    "nothing": lambda: iter(
        [evidence(job=None, plan=None, practice=Practice(trainer="x")), evidence(plan=None, log=good_log())]
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_rule_answers_whatever_it_is_given(kind: str) -> None:
    """Straight from the rule: judge would turn what it raises into a finding."""
    for found in MAKERS[kind]():
        for rule in all_rules():
            if all(found.has(letter) for letter in rule.requires):
                assert rule.check(found, limits_of(rule, found)), rule.id
