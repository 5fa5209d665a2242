"""The bad example of every page really fails, and the good one does not: put into the good job, and judged.

Once for a trainer of whom nothing is known, and once for our own.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest
import tomlkit
from rules.kit import JOB, evidence, verdict

from phalanx.job.draft import EXCLUSIVE
from phalanx.rules.edition import all_rules
from phalanx.rules.facts.trainers import PHALANX
from phalanx.rules.rule import Rule

OF_OTHER_HARDWARE = {"COM001", "COM003"}  # their cases show what they say of our trainer
ELSEWHERE = {
    "SPC001": "waivers are judged after all rules: test_waivers.py",
    "SPC003": "rules of the user: test_own_rules.py",
    "BAT003": "needs a run log",
    "TOP006": "needs a cluster of sites: cases/slow_links.py",
    "EFF006": "needs a cluster of sites: cases/slow_links.py",
}


def fragment(text: str) -> dict[str, Any]:
    """The part of a job file that an example is; empty for a part of a log."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def with_fragment(part: dict[str, Any]) -> str:
    table = tomllib.loads(JOB)
    for name, value in part.items():
        if isinstance(value, dict):
            table[name] = {**table.get(name, {}), **value}
            for key, partner in [*EXCLUSIVE, *((b, a) for a, b in EXCLUSIVE)]:
                section, _, short = key.partition(".")
                if section == name and short in value:
                    table[name].pop(partner.partition(".")[2], None)
        else:
            table[name] = value
    return tomlkit.dumps(table)


CHECKED = [rule for rule in all_rules() if fragment(rule.bad) and rule.id not in ELSEWHERE]


@pytest.mark.parametrize("rule", CHECKED, ids=lambda rule: rule.id)
def test_bad_fails_and_good_does_not(rule: Rule) -> None:
    bad, good = (evidence(text=with_fragment(fragment(text))) for text in (rule.bad, rule.good))
    assert verdict(rule.id, bad) == "fail"
    assert verdict(rule.id, good) != "fail"
    if rule.id not in OF_OTHER_HARDWARE:
        assert verdict(rule.id, replace(bad, practice=PHALANX)) == "fail"
        assert verdict(rule.id, replace(good, practice=PHALANX)) != "fail"


def test_most_examples_are_job_files() -> None:
    assert len(CHECKED) >= 20
