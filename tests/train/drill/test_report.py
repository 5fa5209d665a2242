"""The report of a drill: its text, and its signed record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.record.drill_record import check_record, key_path
from phalanx.record.run import Run
from phalanx.train.drill.drill_report import MOST_ROWS, drill_key, render_drill, write_record
from phalanx.train.drill.judge import Verdict
from phalanx.train.drill.outcomes import FaultOutcome
from phalanx.train.drill.perform import DrillNumbers, DrillResult

KILL = FaultOutcome(
    fault="kill:rank=2,step=5",
    kind="kill",
    fired_s=0.0,
    rank=2,
    generation=1,
    step=5,
    note="",
    detected_s=0.03,
    blamed=2,
    recovered_s=0.71,
    steps_lost=0,
    steps_redone=1,
    source="memory",
    world=3,
)
COORDINATOR = FaultOutcome(
    fault="coordinator",
    kind="coordinator",
    fired_s=0.0,
    rank=-1,
    generation=2,
    step=-1,
    note="",
    detected_s=None,
    blamed=None,
    recovered_s=None,
    steps_lost=None,
    steps_redone=None,
    source="",
    world=None,
)
RESULT = DrillResult(
    run=Run(path=Path("runs/x")),
    state="done",
    message="",
    outcomes=(KILL, COORDINATOR),
    not_fired=("hang:step=99",),
    verdicts=(
        Verdict(name="steps in order", ok=True, evidence="2 generations"),
        Verdict(name="every sample in one step", ok=False, evidence="step 3: 1 sample twice"),
    ),
    numbers=DrillNumbers(
        wall_s=12.0,
        steps=60,
        faults=2,
        recovery_s=0.71,
        recovery_worst_s=0.71,
        planned_recovery_s=1.0,
        effective=0.8,
        planned_effective=0.75,
    ),
)


def test_few_faults_are_told_one_by_one() -> None:
    assert render_drill(RESULT) == (
        """\
2 faults in 60 steps, 12.0 s; run state: done
  fault               where                         detected  recovered  steps lost  redone  restored from  ranks
  kill:rank=2,step=5  rank 2, generation 1, step 5   30.0 ms     710 ms           0       1  memory         3
  coordinator         generation 2
  not injected, because the run had ended: hang:step=99
verdicts
  ok      steps in order            2 generations
  FAILED  every sample in one step  step 3: 1 sample twice
recovery: 710 ms; the plan assumed 1.00 s
effective training time without start-up and shutdown: 80.0%; with the plan's assumptions these faults \
would have left 75.0%"""
    )
    assert not RESULT.ok


def test_many_faults_are_told_by_kind() -> None:
    slow = replace(KILL, recovered_s=3.0, steps_redone=0)
    many = replace(RESULT, outcomes=(*(KILL,) * MOST_ROWS, slow, COORDINATOR), not_fired=())
    assert render_drill(many).splitlines()[1:4] == [
        "  fault        injected  detected  recovered  at worst  steps lost  redone",
        "  kill         41×        30.0 ms     710 ms    3.00 s           0  40",
        "  coordinator  1×                                                0  0",
    ]


def test_without_a_fault_there_is_little_to_tell() -> None:
    numbers = replace(RESULT.numbers, recovery_s=None, recovery_worst_s=None, effective=None)
    quiet = replace(RESULT, outcomes=(), not_fired=(), numbers=numbers)
    assert render_drill(quiet).splitlines()[:2] == ["0 faults in 60 steps, 12.0 s; run state: done", "verdicts"]
    assert "recovery" not in render_drill(quiet)


BODY = {"faults": ["kill"], "verdicts": [{"name": "x", "ok": True, "evidence": ""}]}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "events-00000.jsonl").write_text('{"event":"step"}\n')
    (tmp_path / "supervisor.jsonl").write_text("")
    replay = tmp_path / "replay" / "again"
    replay.mkdir(parents=True)
    (replay / "events-00000.jsonl").write_text("")
    return Run(path=tmp_path)


def test_a_record_that_nobody_touched(run: Run) -> None:
    path = write_record(run, BODY, b"k" * 32)
    record, wrong = check_record(path, b"k" * 32)
    assert wrong == []
    assert list(record["files"]) == ["events-00000.jsonl", "replay/again/events-00000.jsonl", "supervisor.jsonl"]
    assert record["versions"]["torch"]


def test_every_change_is_found(run: Run, tmp_path: Path) -> None:
    path = write_record(run, BODY, b"k" * 32)
    changed = "the signature is not ours: the record was changed, or another user wrote it"
    assert check_record(path, b"x" * 32)[1] == [changed]
    (tmp_path / "events-00000.jsonl").write_text("")
    (tmp_path / "supervisor.jsonl").unlink()
    (tmp_path / "events-00007.jsonl").write_text("")
    assert check_record(path, b"k" * 32)[1] == [
        "events-00000.jsonl has changed",
        "supervisor.jsonl is missing",
        "events-00007.jsonl is new",
    ]
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "faults": []}))
    assert changed in check_record(path, b"k" * 32)[1]


def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = key_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    first = drill_key(path)
    assert drill_key(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(UserError):
        drill_key(path)


def test_another_file_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(UserError) as caught:
        check_record(path, b"")
    assert str(caught.value).startswith(f"{path}: is no record of a drill")
