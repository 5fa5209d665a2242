"""From a fault's note and the record: when it was noticed, when all were past it, and what it cost."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.train.drill.fault import parse_all
from phalanx.train.drill.fired import Fired
from phalanx.train.drill.history import History, build_history
from phalanx.train.drill.timing import Outcome, noticed, outcomes

Story = Any


def shot(t_s: float, kind: str = "kill", **fields: Any) -> Fired:
    return Fired(**{"id": 0, "kind": kind, "t_s": t_s, "monotonic_s": 0.0, "rank": 2, "epoch": 1, "step": 3, **fields})


def told(story: Story, fired: Fired, text: str = "kill:rank=2,step=3") -> tuple[History, Outcome]:
    history = build_history(story.supervisor, story.ranks)
    [outcome] = outcomes(history, parse_all([text]), [fired])
    return history, outcome


def time_of(story: Story, event: str, **wanted: Any) -> float:
    found = [
        one["t"]
        for one in [*story.ranks, *story.supervisor]
        if one["event"] == event and all(one.get(key) == value for key, value in wanted.items())
    ]
    return max(found)


def test_a_kill(survived: Story) -> None:
    at = time_of(survived, "step", epoch=1, step=3)
    _, outcome = told(survived, shot(at))
    assert outcome.detected_s == pytest.approx(time_of(survived, "incident") - at)
    assert outcome.recovered_s == pytest.approx(time_of(survived, "step", epoch=2, step=3) - at)
    assert (outcome.steps_lost, outcome.steps_redone, outcome.source, outcome.world) == (0, 0, "memory", 3)
    assert (outcome.blamed, outcome.fault) == (2, "kill:rank=2,step=3")


def test_when_it_was_noticed_counts_not_when_it_was_written(survived: Story) -> None:
    at = time_of(survived, "step", epoch=1, step=3)
    survived.supervisor[2]["waited_s"] = survived.supervisor[2]["t"] - at - 0.001
    assert told(survived, shot(at))[1].detected_s == pytest.approx(0.001)


def test_steps_that_were_held_and_lost_and_steps_that_were_only_done(story: Story) -> None:
    story.epoch(2, step=0, source="start")
    for step in range(6):
        story.step(step)  # each tells that memory held the steps before it: 5 at the end
    at = story.t
    story.incident(1)
    story.epoch(2, step=3, source="disk")
    story.step(3)
    outcome = told(story, shot(at))[1]
    assert (outcome.steps_lost, outcome.steps_redone, outcome.source) == (2, 3, "disk")


def test_an_epoch_in_which_nobody_stepped_is_no_recovery(survived: Story) -> None:
    """A second fault hits the recovery: the first is over only when a step is."""
    survived.ranks = [one for one in survived.ranks if one["epoch"] != 2]
    at = time_of(survived, "incident") - 0.001
    assert told(survived, shot(at))[1].world == 4


def test_what_needs_no_recovery_has_none(survived: Story) -> None:
    outcome = told(survived, shot(1000.0, kind="nan"), "nan:rank=2")[1]
    assert (outcome.detected_s, outcome.recovered_s) == (None, None)


def test_every_fault_is_noticed_or_the_verdict_falls(survived: Story) -> None:
    at = time_of(survived, "step", epoch=1, step=3)
    history, outcome = told(survived, shot(at))
    assert noticed(history, [outcome], asked=1, patience_s=0).ok
    history, outcome = told(survived, shot(at + 0.1, epoch=3), "kill:rank=2,step=3")
    verdict = noticed(history, [outcome], asked=1, patience_s=0)
    assert (verdict.ok, verdict.evidence) == (False, "0 of 1 faults: kill:rank=2,step=3 was not noticed")
    assert noticed(history, [outcome], asked=1, patience_s=100).ok  # the run was over before anybody could


def test_a_flip_must_be_blamed_on_its_rank(survived: Story) -> None:
    at = time_of(survived, "step", epoch=1, step=3)
    history, outcome = told(survived, shot(at, kind="flip", rank=0), "flip:rank=0")
    verdict = noticed(history, [outcome], asked=1, patience_s=0)
    assert (verdict.ok, verdict.evidence) == (False, "0 of 1 faults: flip:rank=0 was blamed on rank 2")


def test_a_drill_in_which_nothing_fired_proves_nothing(survived: Story) -> None:
    history = build_history(survived.supervisor, survived.ranks)
    verdict = noticed(history, [], asked=3, patience_s=0)
    assert (verdict.ok, verdict.evidence) == (False, "none of 3 faults fired: nothing was tried")
    assert noticed(history, [], asked=0, patience_s=0).ok


@pytest.mark.parametrize(
    ("kind", "text", "patience_s", "why"),
    [
        ("nan", "nan:rank=2", 0.0, "1 harmless"),
        ("mute", "mute:rank=2,for_s=1", 0.0, "1 passing by themselves"),
        ("kill", "kill:rank=2", 1000.0, "1 just before the end"),
    ],
)
def test_nothing_to_notice_is_said_and_not_counted(
    survived: Story, kind: str, text: str, patience_s: float, why: str
) -> None:
    history, outcome = told(survived, shot(time_of(survived, "step", epoch=1, step=3), kind=kind), text)
    verdict = noticed(history, [outcome], asked=1, patience_s=patience_s)
    assert (verdict.ok, verdict.evidence) == (True, f"no fault fired that needs noticing: {why}")
