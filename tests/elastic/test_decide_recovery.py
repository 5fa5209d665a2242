"""What becomes of a run whose ranks fail or come out of their loop, in pure decisions; more of it in test_decide.py."""

from __future__ import annotations

import pytest
from pure_coordinator import PureRun


@pytest.mark.parametrize(("step", "recorded"), [(5, 7), (7, 7), (9, 9)])
def test_an_incident_is_at_the_furthest_step_that_is_known(step: int, recorded: int) -> None:
    run = PureRun({"a": 4})
    run.start(step=7)
    run.lose("a", 2, step=step)
    run.tick()
    assert [one["step"] for one in run.events_of("incident")] == [recorded]


@pytest.mark.parametrize(("recovery", "places"), [("shrink", "a0 a1 a3"), ("auto", "a0 a1 a2 a3")])
def test_under_shrink_a_new_process_is_not_waited_for(recovery: str, places: str) -> None:
    run = PureRun({"a": 4}, recovery=recovery)
    run.start()
    run.lose("a", 2, is_replaced=False)
    run.tick()
    assert run.generation == (2 if recovery == "shrink" else 1)
    run.fill("a", 2, 1200)
    run.tick()
    assert (run.generation, run.places) == (2, places)


def test_ranks_that_leave_in_different_states_form_again() -> None:
    run = PureRun({"a": 4})
    run.start()
    for slot in range(4):
        run.hear("a", "left", slot=slot, epoch=1, step=8, state="done" if slot < 2 else "stopped", why="")
    run.tick()
    run.pass_time(1.0)
    (incident,) = run.events_of("incident")
    assert (incident["rank"], incident["cause"]["kind"]) == (0, "Left")
    assert incident["cause"]["message"] == "ranks left in different states: done, stopped"
    assert (run.generation, run.end) == (2, None)
