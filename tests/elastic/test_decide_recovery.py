"""What becomes of a run whose ranks fail or come out of their loop, in pure decisions; more of it in test_decide.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pure_coordinator import DEAD_S, TIMEOUT_S, PureRun, data_layout

from phalanx.elastic.heartbeat_board import Phase

HANGS = {"kind": "Silence", "signal": 0, "message": "stopped answering 25 s ago"}


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


def test_one_of_two_lost_processes_that_is_still_to_come_is_waited_for() -> None:
    run = PureRun({"a": 4})
    run.start()
    run.lose("a", 1)
    run.lose("a", 2, is_replaced=False)
    run.tick()
    assert run.generation == 1
    run.fill("a", 2, 1200)
    run.tick()
    assert (run.generation, run.places) == (2, "a0 a1 a2 a3")


def test_slots_of_a_bad_host_are_not_waited_for_when_the_process_that_was_lost_is_there() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.hear("b", "unfit", epoch=1, problems=["disk: full"])
    run.lose("a", 1)
    run.tick()
    assert (run.generation, run.places) == (2, "a0 a1")


# ---- incidents -------------------------------------------------------------------------------------------------------


def test_an_incident_names_the_other_ranks_that_failed_and_the_wait() -> None:
    run = PureRun({"a": 4}, recovery="replace")
    run.start()
    for slot in (3, 1, 2):
        run.lose("a", slot, is_replaced=False, at_s=float(slot))
    run.pass_time(1.0)
    assert run.events_of("incident") == []
    for slot in (3, 1, 2):
        run.fill("a", slot, 2000 + slot)
    run.tick()
    (incident,) = run.events_of("incident")
    assert (incident["rank"], incident["others"], incident["waited_s"], incident["in_a_row"]) == (1, [2, 3], 1.0, 1)


def test_the_pause_before_each_restart_without_a_step() -> None:
    run, waits_s = PureRun({"a": 4}, recovery="replace", restarts=8), list[float]()
    run.start()
    for generation in range(2, 10):
        before_s = run.now_s
        run.lose("a", 1)
        while run.generation < generation:
            run.pass_time(0.0625, by_s=0.0625)
        waits_s.append(run.now_s - before_s)
        run.ready()
    assert waits_s == [0.0625, 0.0625, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert [one["in_a_row"] for one in run.events_of("incident")] == list(range(1, 9))


@pytest.mark.parametrize(("all_failed", "ends_s"), [(True, 0.0), (False, 0.75)])
def test_the_end_waits_half_a_second_for_what_others_say(all_failed: bool, ends_s: float) -> None:
    run = PureRun({"a": 2, "b": 2}, recovery="stop")
    run.start()
    run.lose("a", 1, is_replaced=False, at_s=1.0, kind="OSError", signal=0, message="no disk")
    run.hear("b", "left", slot=0, epoch=1, step=8, why="lost its peer")
    run.hear("b", "left", slot=1, epoch=1, step=8, state="done")
    if all_failed:
        run.lose("a", 0, is_replaced=False, at_s=2.0)
    run.tick()
    assert (run.end is not None) == all_failed
    run.pass_time(0.5)
    assert (run.end is not None) == all_failed
    run.pass_time(0.25)
    assert run.end is not None
    told = run.end.given_up
    assert told is not None
    assert (told.cause.rank, told.host, told.why, run.end.exit_code) == (1, "a", "", 3)
    assert [(one.rank, one.kind) for one in told.others] == ([(0, "Signal")] if all_failed else []) + [(2, "Left")]
    assert [one["rank"] for one in run.events_of("incident")] == [1]


@pytest.mark.parametrize(("failure", "exit_code"), [({"exit_code": 2}, 2), ({"is_final": True}, 3)])
def test_what_another_start_does_not_help_ends_the_run(failure: dict[str, Any], exit_code: int) -> None:
    run = PureRun({"a": 4})
    run.start()
    run.lose("a", 1, kind="Mistake", signal=0, message="no such file", **failure)
    run.pass_time(1.0)
    assert run.end is not None
    assert run.end.given_up is not None
    assert (run.end.exit_code, run.end.given_up.why, run.end.given_up.host) == (exit_code, "", "")


@pytest.mark.parametrize(
    ("incidents", "is_left_out"),
    [("1 1 1 1", True), ("1 2 1 2", False), ("2 1 1 1", False), ("1 1 1 12", False)],
)
def test_a_slot_that_alone_fails_in_a_row_is_left_out(incidents: str, is_left_out: bool) -> None:
    run = PureRun({"a": 4})
    run.start()
    for slots in incidents.split():
        for slot in slots:
            run.lose("a", int(slot))
        run.pass_time(2.0)
        run.ready()
    assert [one["slot"] for one in run.events_of("quarantine")] == ([1] if is_left_out else [])
    assert (run.end is None, len(run.events_of("incident"))) == (is_left_out, 4)
    if is_left_out:
        assert (run.places, run.state.saved.failures) == ("a0 a2 a3", 0)
    else:
        assert run.end is not None
        assert run.end.given_up is not None
        assert run.end.given_up.why == "4 failures in a row, without a new step between (fault.restarts = 3)"


def test_a_second_slot_that_fails_in_a_row_is_not_left_out() -> None:
    run, count = PureRun({"a": 4}), 0
    run.start()
    while run.end is None:
        count += 1
        place = run.state.membership.slots[1]
        run.lose(place.host, place.slot)
        run.pass_time(1.25)
        run.ready()
    assert (count, [one["slot"] for one in run.events_of("quarantine")]) == (8, [1])


def test_a_spare_slot_that_comes_before_the_last_restart_is_taken_and_one_slot_set_aside_once() -> None:
    run = PureRun({"a": 4, "b": 1})
    run.start("a")
    for count in range(4):
        if count == 3:
            run.join("b")
        run.lose("a", 2)
        run.pass_time(2.0)
        run.ready()
    assert [(one["slot"], one["reason"]) for one in run.events_of("quarantine")] == [(2, "failed 4 times in a row")]
    assert (run.places, run.end) == ("a0 a1 b0 a3", None)


# ---- limits on incidents that each let the run do a step -------------------------------------------------------------


def crawl(run: PureRun, is_bad: Callable[[str, int], bool], *, most: int) -> int:
    """Hang the first rank in a bad slot after every step; the number of incidents until none is left or the end."""
    for step in range(8, 8 + most):
        run.advance(step)
        place = next((one for one in run.state.membership.slots if is_bad(*one)), None)
        if place is None:
            return step - 8
        run.pass_time(25.0, by_s=0.5)
        run.lose(*place, **HANGS)
        run.pass_time(1.0)
        if run.end is not None:
            return step - 7
        run.ready()
        run.tick(0.25)
    return most


def why(run: PureRun) -> str:
    assert run.end is not None
    assert run.end.given_up is not None
    return run.end.given_up.why


def quarantined(run: PureRun) -> list[tuple[str, int | None]]:
    return [(one["host"], one.get("slot")) for one in run.events_of("quarantine")]


@pytest.mark.parametrize(
    ("hosts", "bad", "incidents", "aside", "places"),
    [
        ({"a": 5}, "a2", 3, [("a", 2)], "a0 a1 a4 a3"),
        ({"a": 4, "b": 4}, "a", 6, [("a", 0), ("a", None)], "b0 b1 b2 b3"),
        ({"a": 4}, "a3", 4, [("a", 3)], "a0 a1 a2"),  # one more chance, as the job has to shrink
        ({"a": 3, "b": 1}, "a", 7, [("a", 0), ("a", None)], "b0"),
    ],
)
def test_slots_that_hang_once_per_step_are_left(
    hosts: dict[str, int], bad: str, incidents: int, aside: list[tuple[str, int | None]], places: str
) -> None:
    run = PureRun(hosts)
    run.start()
    assert crawl(run, lambda host, slot: f"{host}{slot}".startswith(bad), most=20) == incidents
    assert (quarantined(run), run.places, run.end) == (aside, places, None)


@pytest.mark.parametrize(
    ("hosts", "recovery", "rank", "incidents", "reason", "ending"),
    [
        ("a4", "replace", 3, 4, "slot 3 of host a failed 4 times with Silence; ", "; no other slot is free"),
        ("a4", "auto", -1, 7, "host a failed 7 times with Silence, last in slot 2 of ", "; no other host is there"),
        ("a2 b2 c2 d2", "auto", 2, 6, "slot 0 of host c failed 3 times with Silence, as others on b did", " = 0.8)"),
    ],
)  # fmt: skip
def test_a_rank_that_hangs_once_per_step_in_every_slot_ends_the_run(
    hosts: str, recovery: str, rank: int, incidents: int, reason: str, ending: str
) -> None:
    run = PureRun({word[0]: int(word[1]) for word in hosts.split()}, recovery=recovery)
    run.start()
    assert crawl(run, lambda *place: place == run.state.membership.slots[rank], most=20) == incidents
    assert why(run).startswith(reason)
    assert why(run).endswith(ending)


def test_the_last_slot_of_all_that_hangs_ends_the_run() -> None:
    run = PureRun({"a": 1}, planned=data_layout(1))
    run.start()
    assert crawl(run, lambda *_: True, most=20) == 4
    first, second = why(run).splitlines()
    assert first.startswith("slot 0 of host a failed 4 times with Silence; incidents cost")
    assert first.endswith("(fault.max_lost = 0.8)")
    assert second == "    there are not enough slots left for any layout of this job"


@pytest.mark.parametrize("comes_s", [3.0, None])
def test_a_slot_at_its_limit_without_another_is_waited_for(comes_s: float | None) -> None:
    run = PureRun({"a": 4}, recovery="replace")
    run.start()
    assert crawl(run, lambda host, slot: slot == 3, most=2) == 2
    run.advance(10)
    run.pass_time(25.0, by_s=0.5)
    run.lose("a", 3, is_replaced=False, **HANGS)
    run.pass_time(comes_s or TIMEOUT_S + 1.0)
    if comes_s is None:
        assert why(run) == "there are not enough slots left for any layout of this job"
        return
    run.fill("a", 3, 3003)
    run.tick()
    assert (run.generation, run.places, run.end) == (4, "a0 a1 a2 a3", None)


def test_a_slot_that_reaches_two_limits_at_once_is_set_aside_once() -> None:
    run = PureRun({"a": 6})
    run.start()
    for _ in range(3):
        run.pass_time(25.0, by_s=0.5)
        run.lose("a", 2, **HANGS)
        run.pass_time(1.0)
        run.ready()
    assert [(one["slot"], one["reason"]) for one in run.events_of("quarantine")] == [(2, "failed 3 times in a row")]
    assert run.places == "a0 a1 a4 a3"


@pytest.mark.parametrize(("spare", "aside"), [(1, [("a", None)]), (0, [])])
def test_a_host_lost_three_times_is_excluded_with_as_many_slots_elsewhere(
    spare: int, aside: list[tuple[str, int | None]]
) -> None:
    run = PureRun({"a": 1, "b": 3, "c": spare} if spare else {"a": 1, "b": 3}, recovery="replace")
    run.start()
    step = 7
    while [one["host"] for one in run.events_of("incident")].count("a") < 3:
        step += 1
        run.advance(step)
        run.pass_time(25.0, by_s=0.5)
        host = run.state.membership.slots[0].host
        run.hang_up(host)
        run.pass_time(2.0)
        if not aside or [one["host"] for one in run.events_of("incident")].count("a") < 3:
            run.join(host, knows=False)
        run.tick()
        run.ready()
    assert (quarantined(run), run.end) == (aside, None)


def test_the_first_failure_at_a_limit_may_be_a_consequence() -> None:
    run = PureRun({"a": 5})
    run.start()
    assert crawl(run, lambda host, slot: slot == 2, most=2) == 2
    run.advance(10)
    run.pass_time(25.0, by_s=0.5)
    run.lose("a", 2, **HANGS, at_s=9.0)
    run.pass_time(0.5)
    run.lose("a", 3, at_s=1.0)
    run.pass_time(1.0)
    assert ([one["rank"] for one in run.events_of("incident")], quarantined(run)) == ([2, 2, 3], [])


# ---- ranks that came out of their loop -------------------------------------------------------------------------------


def leave(run: PureRun, *slots: int, host: str = "a", **fields: Any) -> None:
    """Ranks come out of their loop, all at the same step if none is named."""
    for slot in slots:
        run.hear(host, "left", slot=slot, epoch=run.generation, **({"step": 8} | fields))


@pytest.mark.parametrize(("state", "ends", "exit_code"), [("done", "done", 0), ("stopped", "stopped", 130)])
def test_a_run_ends_when_all_ranks_have_come_out(state: str, ends: str, exit_code: int) -> None:
    run = PureRun({"a": 4})
    run.start()
    leave(run, 0, 1, 2, state=state)
    run.pass_time(20.0)
    assert run.end is None
    leave(run, 3, state=state)
    run.tick()
    assert run.end is not None
    assert (run.end.state, run.end.exit_code) == (ends, exit_code)


def test_ranks_that_leave_as_planned_form_again_at_the_furthest_step() -> None:
    run = PureRun({"a": 4})
    run.start()
    for slot in range(4):
        leave(run, slot, step=6 + slot, state="reform")
    run.tick()
    assert (run.generation, run.state.saved.step, run.end, run.events_of("incident")) == (2, 9, None, [])


def test_no_membership_for_ranks_that_leave_as_planned_ends_the_run() -> None:
    run = PureRun({"a": 4}, recovery="replace")
    run.start()
    leave(run, 0, 1, 2, 3, state="reform")
    run.hear("a", "unfit", epoch=1, problems=["disk: full"])
    run.tick()
    assert run.end is not None
    assert (run.end.state, run.end.message) == ("failed", "run: no membership is left for step 8")


@pytest.mark.parametrize("reason", ["RuntimeError: Connection reset", ""])
def test_the_first_rank_that_gave_up_is_the_one_that_failed(reason: str) -> None:
    run = PureRun({"a": 4})
    run.start()
    leave(run, 1, state="done")
    leave(run, 3, 2, why=reason)
    run.pass_time(1.0)
    (incident,) = run.events_of("incident")
    assert (incident["rank"], incident["cause"]["message"]) == (2, reason or "left its membership")


def go_astray(run: PureRun, *, step: int = 9, suspects: tuple[int, ...] = (), **fields: Any) -> None:
    slots = [place.slot for place in run.state.membership.slots]
    leave(run, *slots, fault="diverged", why="ranks differ", sound=6, step=step, suspects=suspects, **fields)
    run.tick()


def test_a_state_that_goes_astray_at_the_same_step_again_ends_the_run() -> None:
    run = PureRun({"a": 4})
    run.start(step=9)
    go_astray(run, evidence={"step": 9})
    assert (run.generation, [(one.step, one.target) for one in run.rollbacks]) == (2, [(9, 6)])
    assert (run.state.saved.divergence, run.state.saved.at_most) == ({"step": 9}, 6)
    assert run.events_of("epoch")[-1]["reason"] == "roll back to step 6: ranks differ"
    run.ready()
    run.advance(9)
    go_astray(run)
    assert why(run) == "it happened again at the same step after going back"
    assert run.end is not None
    assert run.end.rollback is not None
    assert (run.end.rollback.generation, run.end.rollback.target, len(run.rollbacks)) == (2, 6, 1)


def test_another_suspect_at_the_same_step_is_set_aside_like_the_first() -> None:
    run = PureRun({"a": 6})
    run.start(step=9)
    for suspect in (1, 2):
        go_astray(run, suspects=(suspect,), evidence={"step": 9})
        run.ready()
        run.advance(9)
    assert (run.generation, run.places, run.end) == (3, "a0 a4 a5 a3", None)
    assert [one["rank"] for one in run.events_of("incident")] == [1, 2]
    assert (quarantined(run), run.state.saved.divergence) == ([("a", 1), ("a", 2)], None)


def test_going_astray_at_ever_other_steps_ends_the_run_after_its_restarts() -> None:
    run, step = PureRun({"a": 4}), 11
    run.start(step=20)
    while run.end is None:
        step += 1
        go_astray(run, step=step)
        run.ready()
        run.advance(step)
    assert (step, why(run)) == (15, "4 failures in a row, without a new step between (fault.restarts = 3)")


@pytest.mark.parametrize(
    ("recovery", "suspects", "reason"),
    [("stop", (), ""), ("replace", (2,), "there are not enough slots left for any layout of this job")],
)
def test_an_untrusted_state_without_a_way_on_ends_the_run(
    recovery: str, suspects: tuple[int, ...], reason: str
) -> None:
    run = PureRun({"a": 4}, recovery=recovery)
    run.start(step=9)
    go_astray(run, suspects=suspects)
    assert (why(run), run.generation, run.rollbacks) == (reason, 1, [])
    assert [one["waited_s"] for one in run.events_of("incident")] == [0.0]


def test_going_astray_again_and_again_after_new_steps_ends_the_run() -> None:
    run = PureRun({"a": 4})
    run.start(step=9)
    for step in range(10, 40):
        run.advance(step)
        run.pass_time(25.0, by_s=0.5)
        go_astray(run, step=step)
        if run.end is not None:
            break
        run.ready()
    assert why(run).startswith("6 failures with Astray, last of slot 0 of host a, and no rank is known to blame; ")


# ---- ranks that hang -------------------------------------------------------------------------------------------------


def stall(run: PureRun, age_s: float, *, phase: int = Phase.TRAINING) -> None:
    run.progress = {host: [7, phase, age_s] for host in run.here}
    run.pass_time(0.25)


def say_where(run: PureRun, *culprits: int, host: str = "a") -> None:
    ranks = {slot: [slot not in culprits, f"at {slot}"] for slot in run.pids[host]}
    run.hear(host, "where", ranks=ranks)
    run.tick()


@pytest.mark.parametrize(
    ("phase", "most_s", "what"),
    [
        (Phase.TRAINING, DEAD_S, ""),
        (Phase.RESTING, TIMEOUT_S + 10.0, "evaluating or saving"),
        (Phase.BUILDING, TIMEOUT_S + 10.0, "setting up (communicators, state, first step)"),
        (Phase.LOCKED, TIMEOUT_S + 10.0, "in native code that holds the interpreter lock"),
    ],
)
def test_a_rank_that_hangs_longer_than_its_phase_may_take_is_ended(phase: Phase, most_s: float, what: str) -> None:
    run = PureRun({"a": 4})
    run.start()
    run.state.step_s = 0.0
    stall(run, most_s, phase=phase)
    assert "where" not in run.kinds("a")
    stall(run, most_s + 0.5, phase=phase)
    assert run.kinds("a")[-1] == "where"
    run.pass_time(1.0)
    assert run.kinds("a")[-1] == "where", "it is waited for"
    say_where(run, 2, 3)
    patience = f", {what}, which may take comm.init_timeout_s + 10 s = 70 s" if what else ""
    told = run.last("a", "kill")
    assert (told["slot"], told["place"], told["silent_s"], told["epoch"]) == (2, "at 2", most_s + 0.5, 1)
    assert told["patience"] == patience
    run.pass_time(1.75)
    assert run.kinds("a").count("where") == 1, "its end is on its way"
    run.pass_time(0.25)
    assert run.kinds("a").count("where") == 2, "it was not"


def test_steps_may_take_three_times_the_longest_of_the_last() -> None:
    run = PureRun({"a": 4})
    run.start()
    run.pass_time(2.0)
    run.advance(8)
    slowest_s = run.state.step_s
    assert slowest_s >= 2.0
    stall(run, DEAD_S + 3 * slowest_s)
    assert "where" not in run.kinds("a")
    stall(run, DEAD_S + 3 * slowest_s + 0.5)
    assert run.kinds("a")[-1] == "where"


def test_ranks_that_move_meanwhile_are_not_ended() -> None:
    run = PureRun({"a": 4})
    run.start()
    stall(run, 100.0)
    stall(run, 0.0)
    say_where(run, 2)
    run.pass_time(3.0)
    assert (run.kinds("a").count("kill"), run.generation) == (0, 1)


def test_ranks_that_all_wait_for_each_other_form_again() -> None:
    run = PureRun({"a": 4})
    run.start()
    stall(run, 100.0)
    say_where(run)
    run.pass_time(1.0)
    (incident,) = run.events_of("incident")
    assert (incident["rank"], incident["cause"]["kind"], run.generation) == (0, "Deadlock", 2)


def test_a_host_that_does_not_answer_is_waited_for_two_seconds() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    stall(run, 100.0)
    say_where(run, 1, host="b")
    run.pass_time(2.0)
    assert "kill" not in run.kinds("b")
    run.pass_time(0.25)
    assert run.last("b", "kill")["slot"] == 1


@pytest.mark.parametrize(
    ("steps", "culprits", "ended"),
    [((7, 7), "a0 a1 b0 b1", "a0"), ((7, 6), "a0 a1 b0 b1", "b0"), ((6, 7), "b0 b1", "b0"), ((7, 7), "a1 b0", "a1")],
)
def test_the_rank_that_came_least_far_is_ended(steps: tuple[int, int], culprits: str, ended: str) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.progress = {host: [step, Phase.TRAINING, 100.0] for host, step in zip("ab", steps, strict=True)}
    run.pass_time(0.25)
    for host in "ba":
        say_where(run, *(int(word[1]) for word in culprits.split() if word[0] == host), host=host)
    assert [f"{host}{message['slot']}" for host, message in run.sent if message["kind"] == "kill"] == [ended]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_ranks_that_gave_up_point_at_the_one_that_did_not(is_waiting: bool) -> None:
    run = PureRun({"a": 4})
    run.start()
    stall(run, TIMEOUT_S, phase=Phase.RESTING)
    leave(run, 0, 1, 3, why="RuntimeError: Timed out")
    run.pass_time(1.0)
    assert run.kinds("a")[-1] == "where"
    say_where(run, 0, 1, 3, *([] if is_waiting else [2]))
    run.pass_time(1.0)
    assert [message["slot"] for _, message in run.sent if message["kind"] == "kill"] == ([] if is_waiting else [2])
    assert run.generation == (2 if is_waiting else 1)


@pytest.mark.parametrize("age_s", [DEAD_S, DEAD_S + 0.5])
def test_a_rank_that_moved_lately_is_not_looked_for_when_others_give_up(age_s: float) -> None:
    run = PureRun({"a": 4})
    run.start()
    stall(run, age_s, phase=Phase.RESTING)
    leave(run, 0, 1, 3, why="RuntimeError: Timed out")
    run.pass_time(1.0)
    assert ("where" in run.kinds("a")) == (age_s > DEAD_S)
    assert run.generation == (1 if age_s > DEAD_S else 2)


def test_ranks_that_give_up_while_another_is_ended_do_not_fail() -> None:
    run = PureRun({"a": 4})
    run.start()
    stall(run, 100.0)
    say_where(run, 2)
    assert run.last("a", "kill")["slot"] == 2
    leave(run, 0, 1, 3, why="RuntimeError: Connection reset")
    run.pass_time(1.5)
    assert (run.events_of("incident"), run.kinds("a").count("where")) == ([], 1)
    run.lose("a", 2, **HANGS)
    run.tick()
    assert [one["rank"] for one in run.events_of("incident")] == [2]
