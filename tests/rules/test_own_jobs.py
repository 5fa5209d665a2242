"""Our own example jobs meet the specification: no finding, and what is unknown needs a run, a drill or a host.

A real run is checked where the tests make one: tests/elastic/test_real_run.py.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from phalanx.job.load import load
from phalanx.rules.edition import find_rule
from phalanx.rules.specification import check

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
# What no job file can answer, beside the rules about the run: drills, cards of a host we are not on, parity runs.
NEEDS_MORE = {"CKP002", "CKP003", "CKP006", "FLT002", "TOP003", "PRC003"}
OURS = [path for path in EXAMPLES if load(path).job.parallel.framework == "phalanx"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drills that this user has on record."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_no_finding(path: Path) -> None:
    report = check(str(path), today=date(2026, 11, 15))
    assert [(one.rule.id, one.outcome.what) for one in report.problems if one.severity != "info"] == []
    assert not [one for one in report.findings if "the rule itself failed" in one.outcome.what]
    if path in OURS:
        unknown = {rule for rule, verdict in report.verdicts.items() if verdict == "unknown"}
        assert {rule for rule in unknown if not set(find_rule(rule).requires) & set("LDH")} <= NEEDS_MORE


def test_the_examples_were_found() -> None:
    assert len(EXAMPLES) >= 6
    assert len(OURS) >= 5
