"""The report of a drill, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.record.run import Run
from phalanx.train.drill.judge import Verdict
from phalanx.train.drill.outcomes import FaultOutcome
from phalanx.train.drill.perform import DrillNumbers, DrillResult
from phalanx.train.drill.report import MOST_ROWS, render_drill

KILL = FaultOutcome(
    fault="kill:rank=2,step=5",
    kind="kill",
    fired_s=0.0,
    rank=2,
    epoch=1,
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
    epoch=2,
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
        Verdict(name="steps in order", ok=True, evidence="2 epochs"),
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
2 faults in 60 steps, 12.0 s; the run is done
  fault               hit                      detected  recovered  lost  redone  from    ranks
  kill:rank=2,step=5  rank 2, epoch 1, step 5   30.0 ms     710 ms     0       1  memory  3
  coordinator         epoch 2
  not fired, the run had ended: hang:step=99
verdicts
  ok     steps in order                2 epochs
  WRONG  every sample in one step      step 3: 1 sample twice
recovery: 710 ms, at worst 710 ms; the plan assumed 1.00 s
effective training time: 80.0%; the plan predicts 75.0% at this failure rate"""
    )
    assert not RESULT.ok


def test_many_faults_are_told_by_kind() -> None:
    slow = replace(KILL, recovered_s=3.0, steps_redone=0)
    many = replace(RESULT, outcomes=(*(KILL,) * MOST_ROWS, slow, COORDINATOR), not_fired=())
    assert render_drill(many).splitlines()[1:4] == [
        "  fault        fired  detected  recovered  at worst  lost  redone",
        "  kill         41×     30.0 ms     710 ms    3.00 s     0  40",
        "  coordinator  1×                                       0  0",
    ]


def test_without_a_fault_there_is_little_to_tell() -> None:
    numbers = replace(RESULT.numbers, recovery_s=None, recovery_worst_s=None, effective=None)
    quiet = replace(RESULT, outcomes=(), not_fired=(), numbers=numbers)
    assert render_drill(quiet).splitlines()[:2] == ["0 faults in 60 steps, 12.0 s; the run is done", "verdicts"]
    assert "recovery" not in render_drill(quiet)
