"""From a fault's note and the record: when it was noticed, when all were past it, and what it cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.train.drill.faults import parse_faults
from phalanx.train.drill.firings import Firing
from phalanx.train.drill.outcomes import FaultOutcome, fault_outcomes, judge_noticed
from phalanx.train.drill.step_history import DrillHistory, build_history

Story = Any


def shot(t_s: float, kind: str = "kill", **fields: Any) -> Firing:
    return Firing(**{"id": 0, "kind": kind, "t_s": t_s, "monotonic_s": 0.0, "rank": 2, "epoch": 1, "step": 3, **fields})


def told(
    story: Story, fired: Firing, text: str = "kill:rank=2,step=3", patience_s: float = 0.0
) -> tuple[DrillHistory, FaultOutcome]:
    history = build_history(story.supervisor, story.ranks)
    [outcome] = fault_outcomes(history, parse_faults([text]), [fired], patience_s=patience_s)
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


def test_a_process_that_is_replaced_while_a_generation_is_made_is_back_in_that_one(story: Story) -> None:
    story.epoch(2, step=0, source="start")
    story.step(0)
    story.incident(1)
    at = story.t
    story.epoch(2, step=1, source="memory")
    *_, restore = story.supervisor
    story.supervisor[-1:] = [{**restore, "event": "replacement", "rank": 0, "host": "host0", "cause": {}}, restore]
    story.step(1)
    story.incident(0)
    story.epoch(2, step=2, source="memory")
    story.step(2)
    outcome = told(story, shot(at, rank=0), "kill:rank=0")[1]
    assert outcome.recovered_s == pytest.approx(time_of(story, "step", epoch=2, step=1) - at)


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
    # Had a frozen host been the only one, its copies would have gone with it, and no other held any.
    assert told(story, shot(at, "freeze", host="host0"))[1].steps_lost == 2, "its host went on"
    *_, formed, _ = story.supervisor
    formed["members"] = [{**one, "host": "another"} for one in formed["members"]]
    assert told(story, shot(at, "freeze", host="host0"))[1].steps_lost == 0


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
    _, outcome = told(survived, shot(at))
    assert judge_noticed([outcome], asked=1, patience_s=0).ok
    _, outcome = told(survived, shot(at + 0.1, epoch=3), "kill:rank=2,step=3")
    verdict = judge_noticed([outcome], asked=1, patience_s=0)
    assert (verdict.ok, verdict.judged, verdict.evidence) == (
        False,
        True,
        "0 of 1 fault: kill:rank=2,step=3 was not noticed",
    )


def test_a_fault_that_nobody_noticed_is_not_credited_with_a_later_one(story: Story) -> None:
    """Rank 1 falls silent and nobody minds; a minute later rank 2 is killed, which is noticed and recovered from."""
    story.epoch(4, step=0, source="start")
    story.step(0)
    silent = shot(story.t, kind="mute", id=0, rank=1, step=1)
    story.t += 60
    story.step(1)
    killed = shot(story.t, id=1, rank=2, step=2)
    story.incident(2)
    story.epoch(3, step=2, source="memory")
    story.step(2)
    story.t += 60
    story.end()
    faults = parse_faults(["mute:rank=1,step=1", "kill:rank=2,step=2"])
    history = build_history(story.supervisor, story.ranks)

    def seen(*fired: Firing) -> list[tuple[bool, bool]]:
        found = fault_outcomes(history, faults, fired, patience_s=15.0)
        return [(one.detected_s is not None, one.recovered_s is not None) for one in found]

    assert seen(silent, killed) == [(False, False), (True, True)]
    verdict = judge_noticed(
        fault_outcomes(history, faults, [silent, killed], patience_s=15.0), asked=2, patience_s=15.0
    )
    assert (verdict.ok, verdict.evidence) == (False, "1 of 2 faults: mute:step=1 was not noticed")
    # Of the same rank twice, the newer fault explains the incident that names it.
    assert seen(replace(silent, rank=2), killed) == [(False, False), (True, True)]
    # Both within the time in which they had to be noticed: whoever was named first, the recovery was from both.
    assert seen(replace(silent, t_s=killed.t_s - 1), killed) == [(True, True), (True, True)]
    # Nothing else explains the incident: it was noticed late, and perhaps blamed on another rank.
    assert seen(silent) == [(True, True)]


def test_a_fault_that_nobody_had_time_to_notice_is_not_judged(survived: Story) -> None:
    """The run was over before anybody had to: neither "ok" nor "FAILED", and no proof."""
    at = time_of(survived, "step", epoch=1, step=3)
    _, late = told(survived, shot(at + 0.1, epoch=3), "kill:rank=2,step=3", patience_s=100)
    verdict = judge_noticed([late], asked=1, patience_s=100)
    assert (verdict.ok, verdict.judged, verdict.word) == (False, False, "not judged")
    assert verdict.evidence.startswith(
        "kill:rank=2,step=3 fired less than 100 s before the end of the run and had not been noticed"
    )
    # Beside one that was noticed it still leaves the claim open, unless chance drew it.
    _, good = told(survived, shot(at), patience_s=100)
    assert judge_noticed([good, late], asked=2, patience_s=100).word == "not judged"
    drawn = judge_noticed([good, late], asked=2, patience_s=100, drawn=True)
    assert (drawn.ok, drawn.evidence) == (True, "1 of 1 fault; 1 more fired too late to be judged")
    assert judge_noticed([late], asked=1, patience_s=100, drawn=True).word == "not judged"


def test_a_fault_that_was_noticed_is_judged_however_late_it_came(survived: Story) -> None:
    _, outcome = told(survived, shot(time_of(survived, "step", epoch=1, step=3)), patience_s=1000.0)
    verdict = judge_noticed([outcome], asked=1, patience_s=1000.0)
    assert (verdict.ok, verdict.evidence) == (True, "1 of 1 fault")


def test_a_flip_must_be_blamed_on_its_rank(survived: Story) -> None:
    at = time_of(survived, "step", epoch=1, step=3)
    _, outcome = told(survived, shot(at, kind="flip", rank=0), "flip:rank=0")
    verdict = judge_noticed([outcome], asked=1, patience_s=0)
    assert (verdict.ok, verdict.evidence) == (False, "0 of 1 fault: flip:rank=0 was attributed to rank 2")


def test_a_drill_in_which_nothing_fired_proves_nothing() -> None:
    verdict = judge_noticed([], asked=3, patience_s=0)
    assert (verdict.ok, verdict.evidence) == (False, "0 of 3 faults fired: nothing was tried")
    assert judge_noticed([], asked=0, patience_s=0).ok


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [("nan", "nan:rank=2", "1 harmless"), ("mute", "mute:rank=2,for_s=1", "1 that pass by themselves")],
)
def test_nothing_to_notice_is_said_and_not_counted(survived: Story, kind: str, text: str, why: str) -> None:
    _, outcome = told(survived, shot(time_of(survived, "step", epoch=1, step=3), kind=kind), text)
    verdict = judge_noticed([outcome], asked=1, patience_s=0.0)
    assert (verdict.ok, verdict.evidence) == (True, f"no fault fired that needs noticing: {why}")


def test_a_rank_that_hangs_on_a_host_that_is_then_frozen_is_noticed_with_it(story: Story) -> None:
    """Its agent and the coordinator are frozen before they could tell; the loss of the host names one rank only."""
    story.epoch(4, step=0, source="start", hosts=2)
    story.step(0)
    hung_s, frozen_s = story.t, story.t + 3.0
    story.t += 14.0
    story.supervisor.append(
        {
            "v": 1,
            "event": "incident",
            "t": story.t,
            "rank": 2,
            "epoch": 1,
            "host": "host1",
            "cause": {"kind": "HostLost"},
        }
    )
    story.epoch(4, step=1, source="memory")
    story.step(1)
    story.end()
    history = build_history(story.supervisor, story.ranks)
    faults = parse_faults(["hang:rank=3,at_s=6", "freeze:how=coordinator,for_s=12,at_s=9"])
    frozen = shot(frozen_s, "freeze", id=1, rank=-1, host="host1")

    def noticed(hung: Firing) -> list[bool]:
        found = fault_outcomes(history, faults, [hung, frozen], patience_s=10.0)
        return [one.detected_s is not None for one in found]

    assert noticed(shot(hung_s, "hang", rank=3)) == [True, True]
    assert noticed(shot(hung_s, "hang", rank=1)) == [False, True]  # on the other host: somebody had to tell of it
    assert noticed(shot(hung_s - 9.0, "hang", rank=3)) == [False, True]  # its time was over before
