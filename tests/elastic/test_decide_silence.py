"""Hosts that say nothing, or do not come back, and pauses of the coordinator itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pure_coordinator import DEAD_S, PureRun


@pytest.mark.parametrize(
    ("before", "gaps", "first_silent", "lost_at"),
    [
        # Through four pauses and more than twice dead_after_s since the first of them.
        ([], [1.5] * 20, 1, 8),
        ([], [1.25] * 20, 1, 10),  # 10 s after the first are not yet more
        ([], [30.0] * 20, 1, 4),
        ([], [3.5] * 20, 1, 4),
        ([1.0, 0.75], [3.5] * 20, 1, 4),  # at any phase of the checks for silence
        ([1.0, 1.0, 0.5], [3.5] * 20, 1, 4),
        ([], [30.0] * 20, 2, 5),  # it spoke after the first
        ([], [1.5] * 20, 2, 9),
        ([], [3.5] * 20, 3, 6),
        ([30.0] * 9, [1.5] * 20, 1, 8),  # earlier pauses do not count
        ([1.5] * 9 + [1.0] * 20, [1.5] * 20, 1, 8),
        ([1.5] * 9, [1.5] * 20, 1, 8),
        ([1.5] * 9 + [1.0] * 20, [30.0] * 20, 1, 4),
        ([], [1.0] * 20, 1, 6),  # these are no pauses
        ([2.0], [1.0] * 20, 1, 6),
    ],
)  # fmt: skip
def test_a_host_is_given_up_that_is_silent_through_several_pauses_of_the_coordinator(
    before: Sequence[float], gaps: Sequence[float], first_silent: int, lost_at: int
) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    for gap in before:
        run.now_s += gap
        run.beat("a", "b")
        run.tick()
    assert run.lost == []
    for number, gap in enumerate(gaps, start=1):
        run.now_s += gap
        run.beat(*("a", "b")[: 1 if number >= first_silent else 2])
        run.tick()
        if run.lost:
            break
    assert (number, run.lost) == (lost_at, [("b", "stopped sending heartbeats")])


def test_silence_begins_at_the_word_that_ends_a_pause_of_the_coordinator() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.now_s += 30.0
    run.beat("b", "a")
    run.pass_time(DEAD_S, silent="b")
    assert run.lost == []
    run.pass_time(0.25, silent="b")
    assert run.lost == [("b", "stopped sending heartbeats")]


@pytest.mark.parametrize(
    ("first_after_s", "pause_s", "second_after_s", "is_found"),
    [
        (0.25, 0.0, 4.5, True),
        (0.25, 0.0, 5.25, False),
        (4.0, 0.0, 4.5, True),  # as long as hosts come
        (4.0, 0.0, 5.25, False),
        (0.25, 30.0, 4.5, True),  # a pause of the coordinator does not count
        (4.0, 30.0, 4.5, True),
        (4.0, 30.0, 5.25, False),
    ],
)
def test_hosts_are_waited_for_by_a_new_coordinator_as_long_as_others_come(
    first_after_s: float, pause_s: float, second_after_s: float, is_found: bool
) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.take_over()
    run.pass_time(first_after_s)
    run.join("a")
    if pause_s:
        run.tick(pause_s)
    run.pass_time(second_after_s)
    assert run.lost == ([] if is_found else [("b", "did not come back")])


def test_the_patience_of_a_new_coordinator_begins_after_its_own_pause() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.take_over()
    run.tick(30.0)
    run.pass_time(4.5)
    assert run.lost == []
    run.pass_time(0.5)
    assert [host for host, _ in run.lost] == ["a", "b"]


@pytest.mark.parametrize("what", ["nothing", "a rank is lost", "a rank lost its peer"])
def test_a_new_coordinator_that_hears_of_a_lost_rank_waits_only_a_second_for_hosts(what: str) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.take_over()
    run.join("a")
    if what == "a rank is lost":
        run.lose("a", 0)
    elif what == "a rank lost its peer":
        run.hear("a", "left", slot=0, epoch=1, step=7, why="RuntimeError: Connection closed by peer")
    run.pass_time(0.75)
    assert run.lost == []
    run.pass_time(0.25)
    assert run.lost == ([("b", "did not come back")] if what != "nothing" else [])


def test_a_pause_of_the_coordinator_is_no_part_of_the_duration_of_a_step() -> None:
    run = PureRun({"a": 4})
    run.start(step=7)
    run.pass_time(1.5)
    run.tick(30.0)
    run.pass_time(0.5)
    run.advance(8)
    assert run.state.step_s == pytest.approx(2.0)


def test_a_spare_host_is_not_taken_for_a_member_that_has_yet_to_come_back() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    run.take_over()
    run.join("a", "c")
    run.pass_time(4.75)
    assert (run.lost, run.generation) == ([], 1)
    run.pass_time(0.25)
    assert run.lost == [("b", "did not come back")]


def test_a_host_that_connects_and_does_not_say_which_processes_it_has_did_not_come_back() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.take_over()
    run.connect("b")
    run.join("a")
    run.pass_time(4.75)
    assert run.lost == []
    run.pass_time(0.25)
    assert run.lost == [("b", "did not come back")]


def test_a_run_goes_on_at_once_when_the_last_member_has_come_back() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.take_over()
    run.join("a")
    run.lose("a", 0)
    run.tick(0.25)
    assert run.generation == 1, "the others are still to come"
    run.join("b")
    run.tick(0.25)
    assert (run.generation, run.lost, run.places) == (2, [], "a0 a1 b0 b1")


@pytest.mark.parametrize("before_s", [0.0, 1.0, 2.0, 3.0, 4.0, 4.5])
@pytest.mark.parametrize(
    ("gone_after_s", "lost_after_s"),
    [(None, 5.25), (0.0, 1.25), (2.0, 3.25), (4.0, 5.25)],
    ids=["silent", "hung up", "hung up later", "hung up last"],
)
def test_a_host_is_given_up_after_a_silence_or_a_second_after_it_hung_up(
    before_s: float, gone_after_s: float | None, lost_after_s: float
) -> None:
    """At any phase of the checks for silence."""
    run = PureRun({"a": 2, "b": 2})
    run.start()
    run.pass_time(before_s)
    passed_s = 0.0
    while not run.lost and passed_s < 20.0:
        if passed_s == gone_after_s:
            run.hang_up("b")
        run.pass_time(0.25, silent="b")
        passed_s += 0.25
    reason = "stopped sending heartbeats" if gone_after_s is None else "is lost: its agent closed the connection"
    assert (passed_s, run.lost) == (lost_after_s, [("b", reason)])
    (incident,) = run.events_of("incident")
    assert (incident["cause"]["kind"], incident["cause"]["message"]) == ("HostLost", f"host b {reason}")


@pytest.mark.parametrize("has_hung_up", [False, True])
def test_a_host_that_hung_up_is_not_excused_by_every_pause_of_the_coordinator(has_hung_up: bool) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start()
    if has_hung_up:
        run.hang_up("b")
    for _ in range(4):
        assert run.lost == []
        run.now_s += 30.0
        run.beat("a")
        run.tick()
    reason = "is lost: its agent closed the connection" if has_hung_up else "stopped sending heartbeats"
    assert run.lost == [("b", reason)]


def test_a_host_without_a_rank_that_is_lost_is_no_incident() -> None:
    run = PureRun({"a": 4, "b": 2})
    run.start()
    run.hang_up("b")
    run.pass_time(2.0)
    assert (run.lost, run.generation) == ([("b", "is lost: its agent closed the connection")], 1)
    assert (run.events_of("incident"), "b" in run.state.hosts) == ([], False)


def test_a_host_that_is_lost_before_there_is_a_membership_is_only_recorded() -> None:
    run = PureRun({"a": 2, "b": 2})
    run.join("a")
    run.pass_time(6.0, silent="a")
    assert (run.lost, run.places, run.end) == ([("a", "stopped sending heartbeats")], "", None)


def test_hosts_that_fall_silent_one_after_another_are_given_up_one_after_another() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    run.pass_time(0.25, silent="b")
    run.pass_time(DEAD_S - 0.25, silent="bc")
    assert run.lost == []
    run.pass_time(0.25, silent="bc")
    assert [host for host, _ in run.lost] == ["b"], "the other has been silent for exactly as long as is allowed"
    run.pass_time(0.25, silent="bc")
    assert [host for host, _ in run.lost] == ["b", "c"]


def test_thousands_of_hosts_are_gone_through_only_when_one_of_them_may_be_due() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    run.tick(30.0)  # a pause of the coordinator itself
    run.state.check_hosts_s = run.now_s
    run.pass_time(0.25)
    checked_s = run.now_s
    assert run.state.check_hosts_s == pytest.approx(checked_s + DEAD_S)
    run.pass_time(1.0)
    assert run.state.check_hosts_s == pytest.approx(checked_s + DEAD_S), "not again before that"
    run.hang_up("b")
    assert run.state.check_hosts_s == pytest.approx(run.now_s + 1.0)
    run.pass_time(1.25)
    assert [host for host, _ in run.lost] == ["b"]
    assert run.state.check_hosts_s == pytest.approx(run.now_s + DEAD_S), "the lost one is not counted"
    run.pass_time(1.0, silent="c")
    run.hang_up("a")
    run.state.check_hosts_s = run.now_s
    run.pass_time(0.25, silent="c")
    assert run.state.check_hosts_s == pytest.approx(run.now_s - 0.25 + 1.0)
    run.join("a")
    run.state.check_hosts_s = run.now_s
    run.pass_time(0.25, silent="c")
    assert run.state.check_hosts_s == pytest.approx(run.now_s - 1.5 + DEAD_S)
