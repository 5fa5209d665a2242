"""The bad and good fragments that rules print are real: put into the good job, they fail and do not fail."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rules.kit import evidence, verdict

from phalanx.rules.edition import all_rules
from phalanx.rules.facts.trainers import PHALANX
from phalanx.rules.rule import Rule

# Their fragments speak of other hardware, of a run, or of waivers: their own cases show them.
ELSEWHERE = {"COM001", "COM003", "BAT003", "SPC001"}
RULES = [rule for rule in all_rules() if rule.bad.strip().startswith("[") and rule.id not in ELSEWHERE]


def sets(table: Mapping[str, Any], *above: str) -> Iterator[str]:
    """A TOML table as `--set` texts."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from sets(value, *above, key)
        else:
            yield ".".join((*above, key)) + "=" + (value if isinstance(value, str) else json.dumps(value))


def judged(rule: Rule, fragment: str) -> str:
    return verdict(rule.id, evidence(*sets(tomllib.loads(fragment)), practice=PHALANX))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_bad_fails_and_good_does_not(rule: Rule) -> None:
    assert judged(rule, rule.bad) == "fail"
    assert judged(rule, rule.good) != "fail"
