"""Parity of two runs: read from their folders, and refused where their losses cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.errors import UserError
from phalanx.record.run import Run
from phalanx.rules.facts.parity import parity_of


def changed(run: Run, section: str, **values: object) -> Run:
    plan = json.loads(run.plan_json.read_text(encoding="utf-8"))
    plan["job"][section].update(values)
    run.plan_json.write_text(json.dumps(plan), encoding="utf-8")
    return run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Run, Run]:
    narrow = write_run(tmp_path, name="narrow", ranks=2, steps=30, incidents=0, seed=1)
    wide = write_run(tmp_path, name="wide", ranks=2, steps=30, incidents=0, seed=2)
    return changed(narrow, "precision", compute="fp8"), changed(wide, "precision", compute="bf16")


def test_both_losses_are_read_in_either_order(pair: tuple[Run, Run]) -> None:
    found, turned = parity_of(*pair), parity_of(*reversed(pair))
    assert found == turned
    assert (found.narrow, found.wide) == ("narrow", "wide")
    assert (found.narrow_format, found.wide_format) == ("fp8", "bf16")
    assert found.tokens > 0
    assert found.gap == pytest.approx(found.narrow_loss / found.wide_loss - 1)


def test_runs_of_one_format_prove_nothing(pair: tuple[Run, Run]) -> None:
    with pytest.raises(UserError) as told:
        parity_of(pair[0], changed(pair[1], "precision", compute="fp8"))
    assert "compute in fp8 and fp8" in str(told.value)


def test_runs_of_different_trainings_are_refused(pair: tuple[Run, Run]) -> None:
    with pytest.raises(UserError) as told:
        parity_of(pair[0], changed(pair[1], "optim", lr=1e-9))
    assert "differ in [optim]" in str(told.value)


def test_runs_of_different_lengths_are_refused(pair: tuple[Run, Run], tmp_path: Path) -> None:
    short = changed(write_run(tmp_path, name="short", ranks=2, steps=20, incidents=0), "precision", compute="bf16")
    with pytest.raises(UserError) as told:
        parity_of(pair[0], short)
    assert "tokens" in str(told.value)
