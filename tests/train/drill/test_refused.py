"""Damaged checkpoints in the record: met and refused, taken, or never read."""

from __future__ import annotations

from typing import Any

from phalanx.train.drill.faults import parse_faults
from phalanx.train.drill.firings import Firing
from phalanx.train.drill.judge import Verdict
from phalanx.train.drill.outcomes import fault_outcomes, judge_refused
from phalanx.train.drill.step_history import build_history

Story = Any
NAME = "damaged files were refused"


def begin(story: Story) -> float:
    """Steps 0 to 5, saved after 3 and 5; the moment of the damage."""
    story.epoch(2, step=0, source="start")
    for step in range(6):
        story.step(step)
        if step in (2, 4):
            story.checkpoint(step + 1)
    return float(story.t)


def judge(story: Story, at_s: float, drawn: bool = False) -> list[Verdict]:
    shot = Firing(id=0, kind="damage", t_s=at_s, monotonic_s=0.0, epoch=1, step=5, note="step-00000005: flip")
    history = build_history(story.supervisor, story.ranks)
    return judge_refused(history, fault_outcomes(history, parse_faults(["damage:step=5"]), [shot]), drawn=drawn)


def test_a_restore_that_went_further_back(story: Story) -> None:
    at_s = begin(story)
    story.epoch(2, step=3, source="disk")
    story.write("ready", rank=1, step=3, source="disk", warnings=["another rank could not"])
    story.write("ready", rank=0, step=3, source="disk", warnings=["checkpoints/step-00000005: rank-00001 is damaged"])
    (verdict,) = judge(story, at_s)
    assert verdict == Verdict(name=NAME, ok=True, evidence="generation 2 refused step-00000005 and went back to step 3")


def test_a_restore_that_took_it(story: Story) -> None:
    at_s = begin(story)
    story.epoch(2, step=5, source="disk")
    story.write("ready", rank=0, step=5, source="disk")
    (verdict,) = judge(story, at_s)
    assert (verdict.ok, verdict.evidence) == (
        False,
        "no restore read one: generation 2 took step-00000005, which was damaged",
    )


def test_the_same_step_saved_anew_may_be_taken(story: Story) -> None:
    at_s = begin(story)
    story.checkpoint(5)
    story.epoch(2, step=5, source="disk")
    story.write("ready", rank=0, step=5, source="disk")
    assert judge(story, at_s)[0].word == "not judged"  # the damaged one is gone, and nobody read it


def test_what_nobody_read_proves_nothing(story: Story) -> None:
    at_s = begin(story)
    story.epoch(2, step=5, source="memory")
    story.write("ready", rank=0, step=5, source="memory")
    (verdict,) = judge(story, at_s)
    assert verdict.word == "not judged"
    assert verdict.evidence == "no restore read one; 1 of 1 never read, and so not judged"
    (drawn,) = judge(story, at_s, drawn=True)
    assert drawn.ok  # chance drew it: nobody asked for that proof


def test_without_damage_there_is_no_verdict(survived: Story) -> None:
    assert judge_refused(build_history(survived.supervisor, survived.ranks), []) == []
