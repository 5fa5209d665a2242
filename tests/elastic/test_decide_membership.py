"""When a membership is announced and with whom, from which state its members go, and when it grows again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from pure_coordinator import TIMEOUT_S, UNIX_S, PureRun, data_layout

from phalanx.elastic import decide_membership
from phalanx.elastic.coordinator_state import CheckpointList, MarkRunning
from phalanx.elastic.decide import decide
from phalanx.elastic.decide_membership import REGROW_S, REPLACE_S, SPREAD_S
from phalanx.elastic.restore_point import ReplicaInfo, fold_held

# ---- the first membership --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "settings", "joins", "waited_s", "places"),
    [
        ({"a": 2, "b": 2}, {}, "ab", 0.0, "a0 a1 b0 b1"),
        ({"a": 2, "b": 2}, {}, "ba", 0.0, "a0 a1 b0 b1"),
        ({"a": 4, "b": 2}, {}, "a", 0.0, "a0 a1 a2 a3"),  # no slot is a spare one: the other is not waited for
        ({"a": 4, "b": 4}, {"first_spare": {"a": 2, "b": 2}}, "ab", 0.0, "a0 a1 b0 b1"),
        ({"a": 4, "b": 4}, {"first_spare": {"a": 2, "b": 2}}, "a", SPREAD_S, "a0 a1 a2 a3"),
        ({"a": 4, "b": 4}, {"first_spare": {"b": 2}}, "a", 0.0, "a0 a1 a2 a3"),
        ({"a": 2, "b": 2, "c": 2}, {"first_spare": {"c": 0}}, "ab", 0.0, "a0 a1 b0 b1"),
        ({"a": 2, "b": 2, "c": 2}, {"first_spare": {"b": 0}}, "ab", SPREAD_S, "a0 a1 b0 b1"),
        ({"a": 4}, {"first_spare": {"a": 2}}, "a", 0.0, "a0 a1 a2 a3"),  # all are here
        ({"a": 5}, {"first_spare": {"a": 2}}, "a", 0.0, "a0 a1 a2 a3"),
        ({"a": 4}, {"first_spare": {"a": 2}, "num_hosts": 2}, "a", SPREAD_S, "a0 a1 a2 a3"),  # one is to join
        ({"a": 4}, {"first_spare": {"a": 2}, "num_slots": 6}, "a", SPREAD_S, "a0 a1 a2 a3"),  # two are to start
        ({"a": 4}, {"first_spare": {"a": 2}, "num_slots": 0}, "a", 0.0, "a0 a1 a2 a3"),
    ],
)  # fmt: skip
def test_a_run_starts_at_once_unless_it_would_take_spare_slots_before_others_come(
    hosts: Mapping[str, int], settings: Mapping[str, Any], joins: str, waited_s: float, places: str
) -> None:
    run = PureRun(hosts, settings=settings)
    run.join(*joins)
    run.tick()
    if waited_s:
        run.pass_time(waited_s)
        assert run.places == ""
        run.pass_time(0.25)
    assert (run.places, run.events_of("epoch")[0]["reason"]) == (places, "start")


def test_spare_slots_are_waited_for_no_longer_than_the_time_limit_of_the_start() -> None:
    run = PureRun({"a": 4, "b": 4}, settings={"first_spare": {"a": 2, "b": 2}}, timeout_s=10.0)
    run.join("a")
    run.pass_time(10.0)
    assert run.places == ""
    run.pass_time(0.25)
    assert (run.places, run.events_of("epoch")[0]["reason"]) == ("a0 a1 a2 a3", "start")


@pytest.mark.parametrize(
    ("hosts", "joins", "recovery", "places", "here", "num_usable"),
    [
        ({"a": 2, "b": 2}, "a", "auto", "a0 a1", None, 2),
        ({"a": 2, "b": 2}, "a", "shrink", "a0 a1", None, 2),
        ({"a": 2, "b": 2}, "a", "replace", "", "a", 2),
        ({"a": 2, "b": 2}, "", "auto", "", "no host", 0),
        ({"a": 1, "b": 1, "c": 2}, "ba", "replace", "", "a, b", 2),
        ({"a": 3}, "a", "auto", "", "a", 3),  # with one host there is no other to wait for: it is a mistake
    ],
)
def test_hosts_that_do_not_arrive_are_done_without_where_the_job_may_shrink(
    hosts: Mapping[str, int], joins: str, recovery: str, places: str, here: str | None, num_usable: int
) -> None:
    run = PureRun(hosts, recovery=recovery)
    run.join(*joins)
    run.pass_time(TIMEOUT_S)
    assert (run.places, run.end) == ("", None)
    run.pass_time(0.25)
    assert run.places == places
    if here is None:
        assert (run.events_of("epoch")[0]["reason"], run.end) == ("some hosts did not arrive", None)
    else:
        assert run.end is not None
        assert (run.end.state, run.end.exit_code, run.end.generation) == ("failed", 3, 0)
        assert run.end.message == (
            f"run: {num_usable} of 4 ranks arrived within 60 s\n  here: {here}\n"
            "  look at the logs of the agents that are missing"
        )
        assert run.state.is_over


@pytest.mark.parametrize(
    ("hosts", "recovery", "places", "reason"),
    [
        ({"a": 2, "b": 2}, "auto", "a0 a1", "some hosts failed their preflight"),
        ({"a": 2, "b": 2}, "replace", "", None),
        ({"a": 4, "b": 2}, "replace", "a0 a1 a2 a3", "start"),  # enough without it
    ],
)
def test_a_bad_host_is_done_without_or_ends_the_run_once_all_have_arrived(
    hosts: Mapping[str, int], recovery: str, places: str, reason: str | None
) -> None:
    run = PureRun(hosts, recovery=recovery)
    run.join("b", problems=["b: its disk is full\n  delete something"])
    run.pass_time(5.0)
    assert (run.places, run.end) == ("", None), "the others have yet to come"
    run.join("a")
    run.tick()
    assert run.places == places
    if reason is not None:
        assert (run.generation, run.events_of("epoch")[0]["reason"], run.end) == (1, reason, None)
    else:
        assert run.end is not None
        assert (run.end.state, run.end.exit_code, run.end.how, run.end.at_most) == ("failed", 3, "unfit", None)
        assert run.end.message == "a host failed its preflight\n  b: its disk is full\n    delete something"


@pytest.mark.parametrize(("newest", "generation"), [(0, 1), (7, 8)])
def test_a_generation_that_ranks_were_fenced_with_is_not_used_again(newest: int, generation: int) -> None:
    run = PureRun({"a": 4}, settings={"newest_generation": newest})
    run.start()
    assert run.generation == generation
    run.lose("a", 1)
    run.tick()
    assert run.generation == generation + 1
    assert run.fenced == [generation, generation + 1]


# ---- later memberships -----------------------------------------------------------------------------------------------


def fail(run: PureRun, host: str, slot: int, *, is_replaced: bool = True) -> None:
    run.lose(host, slot, is_replaced=is_replaced)
    run.tick()


@pytest.mark.parametrize(
    ("hosts", "first_spare", "lost", "places"),
    [
        ({"a": 2, "b": 2, "c": 2}, {}, "b", "a0 a1 c0 c1"),
        ({"a": 3, "b": 2, "c": 2}, {"a": 2}, "b", "a0 a1 c0 c1"),  # spare slots last
        ({"a": 3, "b": 2, "c": 1}, {"a": 2}, "b", "a0 a1 c0 a2"),
        ({"a": 3, "b": 2}, {"a": 2}, "b", "a0 a1 a2"),  # too few
        ({"a": 2, "b": 2, "c": 1}, {}, "b", "a0 a1 c0"),
        ({"a": 2, "b": 2, "c": 2}, {}, "c", "a0 a1 b0 b1"),
        ({"a": 2, "b": 2, "c": 1, "d": 4}, {}, "b", "a0 a1 c0 d0"),
    ],
)
def test_ranks_of_a_lost_host_go_to_other_hosts(
    hosts: Mapping[str, int], first_spare: Mapping[str, int], lost: str, places: str
) -> None:
    run = PureRun(hosts, settings={"first_spare": first_spare})
    run.start()
    assert run.places == "a0 a1 b0 b1"
    run.hang_up(lost)
    run.pass_time(REPLACE_S + 2.0)
    assert run.places == places
    run.ready()
    assert run.state.saved.pids == tuple(run.pids[place[0]][int(place[1:])] for place in places.split())


def test_a_slot_in_quarantine_loses_its_rank_and_takes_no_other() -> None:
    run = PureRun({"a": 7})
    run.start()
    for suspect in (1, 4):  # the rank that is in this slot
        rank = run.places.split().index(f"a{suspect}")
        for slot in run.state.membership.ranks_on("a"):
            run.hear(
                "a", "left", slot=slot, epoch=run.generation, step=9, why="differs", fault="diverged",
                suspects=[rank], sound=8, evidence=None,
            )  # fmt: skip
        run.pass_time(1.0)
        run.ready()
        run.advance(9 + suspect)
    assert run.places == "a0 a5 a2 a3"
    for slot, is_replaced, places in ((0, True, "a0 a5 a2 a3"), (3, False, "a0 a5 a2 a6"), (6, False, "a0 a2 a5")):
        fail(run, "a", slot, is_replaced=is_replaced)
        run.pass_time(0.0 if is_replaced else REPLACE_S + 1.0)
        assert run.places == places, "neither of the two in quarantine is used"
        run.ready()
        run.advance(run.state.saved.best_step + 1)


def test_a_rank_whose_process_is_replaced_stays_where_it_is_though_other_slots_are_free() -> None:
    run = PureRun({"a": 4, "b": 4})
    run.start()
    fail(run, "a", 2)
    assert (run.generation, run.places) == (2, "a0 a1 a2 a3")


def test_a_host_that_has_just_hung_up_may_come_back_before_its_ranks_go_elsewhere() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    run.hang_up("b")
    fail(run, "a", 1)
    assert (run.generation, run.places) == (1, "a0 a1 b0 b1")
    run.pass_time(1.25)
    assert (run.generation, run.places) == (2, "a0 a1 c0 c1")


def test_a_host_that_hangs_up_when_all_form_again_keeps_no_rank_where_another_is_free() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    for host in "ab":
        for slot in (0, 1):
            run.hear(host, "left", slot=slot, epoch=1, step=8, state="reform", why="")
    run.hang_up("b")
    run.tick()
    assert (run.generation, run.places) == (2, "a0 a1 c0 c1")


def test_slots_of_a_host_are_taken_in_their_order_whenever_their_processes_started() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    run.lose("c", 0)
    run.hang_up("b")
    run.pass_time(2.0)
    assert run.places == "a0 a1 c0 c1"


def test_a_bad_host_takes_no_rank_of_a_lost_one() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2, "d": 2})
    run.join("a", "b", "d")
    run.join("c", problems=["c: its disk is full"])
    run.tick()
    run.ready()
    run.advance(7)
    run.hang_up("b")
    run.pass_time(2.0)
    assert run.places == "a0 a1 d0 d1"


def test_under_shrink_ranks_whose_processes_live_are_kept() -> None:
    run = PureRun({"a": 4}, recovery="shrink")
    run.start()
    for slot in range(4):
        run.hear("a", "left", slot=slot, epoch=1, step=7, why="RuntimeError: Connection reset by peer")
    run.pass_time(1.0)
    assert (run.generation, run.places) == (2, "a0 a1 a2 a3")


def test_the_only_host_is_waited_for_and_its_new_agent_makes_the_next_membership() -> None:
    run = PureRun({"a": 4})
    run.start()
    run.hang_up("a")
    run.pass_time(30.0)
    assert (run.generation, run.end) == (1, None)
    run.pids["a"] = {slot: 3000 + slot for slot in range(4)}
    run.join("a", knows=False)
    run.tick()
    assert (run.generation, run.state.saved.pids) == (2, (3000, 3001, 3002, 3003))


def test_what_is_said_to_all_hosts_is_a_sign_of_life() -> None:
    run = PureRun({"a": 4})
    run.join("a")
    run.pass_time(0.25)
    assert run.state.sign_s == run.now_s + 0.25, "they have just been told of a membership"
    run.now_s += 0.125
    run.ready()
    assert run.state.sign_s == run.now_s + 0.25, "and to go"


def test_hosts_whose_ranks_stay_hear_only_that() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    digest = run.state.membership.digest
    fail(run, "a", 1)
    for host in "abc":
        assert run.last(host, "form")["same_as"] == [1, digest]
        assert "ranks" not in run.last(host, "form")
    run.ready()
    run.advance(9)
    run.hang_up("b")
    run.pass_time(1.5)
    assert run.places == "a0 a1 c0 c1"
    assert run.last("a", "form")["same_as"] == [2, digest]
    assert run.last("c", "form")["ranks"] == {"0": 2, "1": 3}
    assert run.last("c", "form")["layout"] == asdict(data_layout(4))


def test_processes_are_looked_up_anew_where_they_changed_or_ranks_moved() -> None:
    run = PureRun({"a": 3, "b": 2})
    run.start()
    assert run.state.saved.pids == (1000, 1001, 1002, 2000)
    fail(run, "a", 1)
    assert run.state.saved.pids == (1000, 1101, 1002, 2000)
    run.ready()
    run.advance(9)
    fail(run, "a", 1, is_replaced=False)  # its rank goes to the spare slot
    assert (run.places, run.state.saved.pids) == ("a0 b1 a2 b0", (1000, 2001, 1002, 2000))
    run.ready()
    run.advance(10)
    run.take_over()
    run.pids["a"][1] = 1301
    run.join("a", "b")
    run.tick()
    fail(run, "b", 0)
    assert (run.places, run.state.saved.pids) == ("a0 b1 a2 b0", (1000, 2001, 1002, 2100))


@pytest.mark.parametrize(
    ("most", "hosts", "events"),
    [
        (4, {"a": 2, "b": 2}, [["a0", "a1", "b0", "b1"]]),
        (3, {"a": 2, "b": 2}, [["a0+2", "b0+2"]]),  # more ranks than that: in ranges
        (1, {"a": 2, "b": 2}, [["a0+2"], ["b0+2"]]),
        (2, {"a": 1, "b": 1, "c": 1, "d": 1}, [["a0+1", "b0+1"], ["c0+1", "d0+1"]]),
        (3, {"a": 1, "b": 1, "c": 1, "d": 1}, [["a0+1", "b0+1", "c0+1"], ["d0+1"]]),
    ],
)
def test_members_are_recorded_one_by_one_or_in_ranges(
    monkeypatch: pytest.MonkeyPatch, most: int, hosts: Mapping[str, int], events: Sequence[Sequence[str]]
) -> None:
    monkeypatch.setattr(decide_membership, "MOST_LISTED", most)
    run = PureRun(hosts)
    run.join(*hosts)
    run.tick()
    recorded = [one for one in run.events if one["event"] in ("epoch", "members")]
    assert [one["event"] for one in recorded] == ["epoch"] + ["members"] * (len(events) - 1)
    assert [
        [f"{one['host']}{one['slot']}" + (f"+{one['count']}" if "count" in one else "") for one in event["members"]]
        for event in recorded
    ] == events
    assert (recorded[0]["epoch"], recorded[0]["world"], recorded[0]["plan"]) == (1, 4, 1)
    assert recorded[0]["layout"] == asdict(data_layout(4))
    if "pid" in recorded[0]["members"][0]:
        assert [(one["rank"], one["pid"]) for one in recorded[0]["members"]] == [
            (0, 1000), (1, 1001), (2, 2000), (3, 2001)
        ]  # fmt: skip


# ---- while members get ready -----------------------------------------------------------------------------------------


def leave_late(run: PureRun, slot: int, *, is_replaced: bool = True) -> None:
    """A survivor that did not leave the membership before is ended."""
    run.lose("a", slot, is_replaced=is_replaced, leaving=True, kind="Silence", message="did not leave", signal=0)
    run.tick()


def test_a_member_lost_while_it_leaves_the_membership_before_is_replaced_in_its_slot() -> None:
    run = PureRun({"a": 4})
    run.start()
    fail(run, "a", 2)
    leave_late(run, 0, is_replaced=False)
    assert "seat" not in run.kinds("a")
    run.fill("a", 0, 1500)
    run.tick()
    assert (run.last("a", "seat")["epoch"], run.last("a", "seat")["slot"]) == (2, 0)
    assert run.state.saved.pids == (1500, 1001, 1102, 1003)
    (event,) = run.events_of("replacement")
    assert (event["rank"], event["host"], event["slot"], event["pid"], event["epoch"]) == (0, "a", 0, 1500, 2)
    assert event["cause"] == {"kind": "Silence", "message": "did not leave", "signal": 0}
    run.tick()
    assert len(run.events_of("replacement")) == 1
    run.ready()
    assert (run.generation, run.last("a", "go")["epoch"]) == (2, 2)


def test_a_member_lost_while_it_leaves_is_waited_for_no_longer_than_for_any_process() -> None:
    run = PureRun({"a": 4})
    run.start()
    fail(run, "a", 2)
    leave_late(run, 0, is_replaced=False)
    leave_late(run, 1, is_replaced=False)
    run.pass_time(REPLACE_S)
    assert (run.generation, len(run.state.replacing), len(run.state.failures)) == (2, 2, 0)
    run.fill("a", 1, 1500)  # too late: another membership is needed anyway
    run.pass_time(0.25)
    assert (run.events_of("replacement"), "seat" in run.kinds("a")) == ([], False)
    run.pass_time(REPLACE_S + 1.0)
    assert (run.generation, run.places, len(run.events_of("incident"))) == (3, "a1 a2 a3", 1)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_under_shrink_a_member_lost_while_it_leaves_is_done_without(is_replaced: bool) -> None:
    run = PureRun({"a": 4}, recovery="shrink")
    run.start()
    fail(run, "a", 2)
    assert run.places == "a0 a1 a3"
    leave_late(run, 0, is_replaced=is_replaced)
    run.pass_time(0.5)
    assert (run.generation, run.places, len(run.events_of("incident"))) == (3, "a1 a3", 1)
    assert run.events_of("replacement") == []


def test_a_member_is_not_replaced_on_a_host_that_hung_up_until_it_is_back() -> None:
    run = PureRun({"a": 4})
    run.start()
    fail(run, "a", 2)
    run.lose("a", 0, leaving=True, kind="Silence", signal=0)
    run.hang_up("a")
    run.pass_time(0.5)
    assert run.events_of("replacement") == []
    run.join("a")
    run.tick()
    assert [one["rank"] for one in run.events_of("replacement")] == [0]


def test_a_member_is_not_replaced_on_a_bad_host() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    fail(run, "a", 1)
    run.hear("b", "unfit", epoch=2, problems=["b: its disk is full"])
    run.lose("b", 0, leaving=True, kind="Silence", signal=0)
    run.pass_time(2 * REPLACE_S)
    assert (run.events_of("replacement"), run.places) == ([], "a0 a1 c0 c1")


def test_a_bad_host_is_replaced_by_another_before_the_members_go() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.join("a", "b", "c")
    run.tick()
    run.hear("b", "unfit", epoch=1, problems=["b: its disk is full"])
    run.tick()
    assert (run.generation, run.places) == (2, "a0 a1 c0 c1")
    assert run.events_of("epoch")[-1]["reason"] == "without host b: failed the preflight"


@pytest.mark.parametrize(("recovery", "waits_s"), [("auto", TIMEOUT_S), ("replace", TIMEOUT_S), ("shrink", 0.0)])
def test_slots_that_may_come_back_are_waited_for_only_for_a_time(recovery: str, waits_s: float) -> None:
    run = PureRun({"a": 2, "b": 2}, recovery=recovery)
    run.join("a", "b")
    run.tick()
    run.hang_up("a")
    run.connect("a")  # and does not say which processes it has
    run.hear("b", "unfit", epoch=1, problems=["b: its disk is full"])
    run.tick()
    if waits_s:
        assert run.end is None
        run.pass_time(waits_s)
        assert run.end is None
        run.pass_time(0.25)
    assert run.end is not None
    assert (run.end.how, run.end.generation) == ("unfit", 1)


def test_a_bad_host_ends_a_run_at_once_that_may_not_go_on_with_fewer_ranks() -> None:
    run = PureRun({"a": 2, "b": 2}, recovery="replace")
    run.join("a", "b")
    run.tick()
    run.hear("b", "unfit", epoch=1, problems=["b: its disk is full"])
    run.tick()
    assert run.end is not None
    assert (run.end.how, run.end.message) == ("unfit", "a host failed its preflight\n  b: its disk is full")


def test_a_bad_host_is_left_out_before_the_members_go() -> None:
    run = PureRun({"a": 1, "b": 1, "c": 1, "d": 1})
    run.join("a", "b", "c", "d")
    run.tick()
    for host in "dbc":
        run.hear(host, "unfit", epoch=1, problems=[f"{host}: its disk is full"])
    run.tick()
    assert (run.generation, run.places) == (2, "a0")
    assert run.events_of("epoch")[-1]["reason"] == "without hosts b, c, d: failed the preflight"
    assert run.events_of("incident") == []


def test_a_bad_host_without_a_rank_does_not_matter() -> None:
    run = PureRun({"a": 4, "b": 2})
    run.join("a", "b")
    run.tick()
    run.hear("b", "unfit", epoch=1, problems=["b: its disk is full"])
    run.tick()
    run.ready()
    assert (run.generation, run.last("a", "go")["epoch"]) == (1, 1)


def test_a_job_that_stops_at_a_failure_still_leaves_out_a_bad_host() -> None:
    run = PureRun({"a": 2, "b": 2}, recovery="stop")
    run.join("a", "b")
    run.tick()
    run.hear("b", "unfit", epoch=1, problems=["b: its disk is full"])
    run.tick()
    assert (run.generation, run.places, run.end) == (2, "a0 a1", None)


@pytest.mark.parametrize("comes_back", [True, False])
def test_with_no_slots_left_but_bad_ones_those_are_waited_for_that_may_come_back(comes_back: bool) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.join("a", "b")
    run.tick()
    run.hang_up("a")
    run.hear("b", "unfit", epoch=1, problems=["b: its disk is full"])
    run.tick()
    assert (run.generation, run.end) == (1, None)
    if comes_back:
        run.join("a")
        run.tick()
        assert (run.generation, run.places) == (2, "a0 a1")
    else:
        run.hear("b", "stop", count=1)
        run.tick()
        assert run.end is not None
        assert (run.end.state, run.end.exit_code, run.end.how) == ("stopped", 130, "killed")
        assert run.end.message == "stopped as asked, while not enough ranks were there to go on"


def test_members_go_once_every_one_of_them_is_ready() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 1})
    run.join("a", "b", "c")
    run.tick()
    run.ready("a")
    assert (run.asked_for_checkpoints, "go" in run.kinds("a")) == (0, False)
    run.ready("b")
    assert run.asked_for_checkpoints == 1
    assert [run.kinds(host)[-1] for host in "abc"] == ["go", "go", "go"]
    run.tick()
    assert run.asked_for_checkpoints == 1


@pytest.mark.parametrize(
    ("meanwhile", "goes"),
    [("nothing", True), ("a member failed", False), ("a member is to be replaced", False), ("asked twice", True)],
)
def test_members_do_not_go_when_one_is_lost_while_the_disk_is_read(meanwhile: str, goes: bool) -> None:
    run = PureRun({"a": 4})
    run.start()
    fail(run, "a", 2)
    run.does_disk_answer = False
    run.ready()
    assert run.kinds("a").count("go") == 1
    if meanwhile == "a member failed":
        fail(run, "a", 1)
        assert run.generation == 3
    elif meanwhile == "a member is to be replaced":
        run.lose("a", 1, leaving=True, kind="Silence", signal=0)
    elif meanwhile == "asked twice":
        run.list_checkpoints()
    run.list_checkpoints()
    assert run.kinds("a").count("go") == 1 + goes


# ---- from which state ------------------------------------------------------------------------------------------------


def held(*, generation: int, step: int, ranks: Mapping[int, int], world: int = 4) -> list[Any]:
    """What a host holds of a step, by slot -> rank, as its agent says it."""
    infos = [
        ReplicaInfo(
            rank=rank, world=world, generation=generation, step=step, slot=slot, kind="own", buffer=0, tensors=1,
            size_bytes=1,
        )
        for slot, rank in ranks.items()
    ]  # fmt: skip
    return [one.to_json() for one in fold_held(infos)]


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "restore", "step"),
    [
        (None, (), None, 0),
        (None, (0,), None, 0),
        (None, (4, 8), None, 8),
        (9, (4,), 9, 9),
        (9, (4, 9), 9, 9),  # memory is faster
        (9, (4, 10), None, 10),  # copies that were not renewed for long
    ],
)
def test_members_go_from_the_newest_step_in_memory_or_on_the_disk(
    in_memory: int | None, on_disk: tuple[int, ...], restore: int | None, step: int
) -> None:
    run = PureRun({"a": 2, "b": 2})
    run.start(step=12)
    fail(run, "b", 1)
    if in_memory is not None:
        run.held = {
            "a": held(generation=1, step=in_memory, ranks={0: 0, 1: 1}),
            "b": held(generation=1, step=in_memory, ranks={0: 2, 1: 3}),
        }
    run.checkpoints = on_disk
    run.ready()
    go = run.last("a", "go")
    if restore is None:
        assert go["restore"] is None
    else:
        assert go["restore"] == {"epoch": 1, "step": restore, "world": 4, "hosts": 2, "writers": [[0, 3]]}
    assert (run.state.saved.step, run.state.saved.best_step, run.state.awaited_restore) == (step, 12, step)
    assert run.state.saved.lineage.allows(1, step) == (restore is not None)
    assert run.state.saved.lineage.allows(2, step + 5)
    assert go["store"] == ["at-a", 7000]
    assert (go["epoch"], go["at_most"], go["case"], "stores" in go) == (2, None, None, False)


@pytest.mark.parametrize(("on_disk", "step"), [((4, 8), 8), ((4, 8, 9), 8), ((4, 9), 4), ((9,), 0)])
def test_what_came_after_a_state_that_was_sound_is_not_restored(on_disk: tuple[int, ...], step: int) -> None:
    run = PureRun({"a": 5})
    run.start(step=9)
    for slot in range(4):
        run.hear(
            "a", "left", slot=slot, epoch=1, step=9, why="rank 2 differs", fault="diverged", suspects=[2], sound=8,
            evidence=None,
        )  # fmt: skip
    run.pass_time(1.0)
    run.held = {"a": held(generation=1, step=9, ranks={0: 0, 1: 1, 2: 2, 3: 3})}
    run.checkpoints = on_disk
    run.ready()
    go = run.last("a", "go")
    assert (go["restore"], go["at_most"], run.state.saved.step) == (None, 8, step)


def test_ranks_meet_at_the_host_of_the_first_and_time_their_steps_anew() -> None:
    run = PureRun({"a": 1, "b": 3})
    run.start()
    run.pass_time(2.0)
    run.advance(8)
    assert (run.last("b", "go")["store"], run.state.step_s) == (["at-a", 7000], 2.0)
    fail(run, "b", 1)
    run.now_s += 0.5
    run.ready()
    assert (run.state.step_s, run.state.stepped_s) == (0.0, run.now_s)


def test_a_run_began_when_its_first_membership_went() -> None:
    run = PureRun({"a": 4})
    run.start()
    began_s = run.last("a", "go")["went_s"]
    assert began_s == UNIX_S + 100.0
    run.pass_time(5.0)
    fail(run, "a", 1)
    run.ready()
    assert run.last("a", "go")["went_s"] == run.state.saved.went_s == began_s


def test_members_are_told_who_takes_their_copies_and_spare_hosts_are_not() -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    assert run.last("a", "go")["peers"] == {"0": [0, "at-b", 8000], "1": [1, "at-b", 8001]}
    assert run.last("b", "go")["peers"] == {"0": [0, "at-a", 8000], "1": [1, "at-a", 8001]}
    assert run.last("c", "go") == {name: value for name, value in run.last("a", "go").items() if name != "peers"}
    run.take_over()
    run.sent.clear()
    for host in "abc":  # as if their go had been lost
        run.connect(host)
        digest = run.state.membership.digest
        run.hear(host, "status", slots=run.pids[host], epoch=1, digest=digest, went=0, wishes=0)
    assert run.last("a", "go")["peers"] == {"0": [0, "at-b", 8000], "1": [1, "at-b", 8001]}
    assert "go" not in run.kinds("c")


def test_the_only_host_has_nobody_to_take_its_copies() -> None:
    run = PureRun({"a": 4})
    run.start()
    assert "peers" not in run.last("a", "go")
    run.take_over()
    run.sent.clear()
    run.connect("a")
    run.hear("a", "status", slots=run.pids["a"], epoch=1, digest=run.state.membership.digest, went=0, wishes=0)
    assert "peers" not in run.last("a", "go")


@pytest.mark.parametrize(
    ("most", "by_agents", "by_ranks", "evidence"),
    [
        (9, {}, {}, {}),
        (9, {"a": {"x": [0, 1]}, "b": {"y": [0]}}, {}, {0: "x", 1: "x", 2: "y"}),
        (9, {"a": {"x": [0]}}, {3: "y"}, {0: "x", 3: "y"}),
        (9, {"a": {"x": [0, 7]}}, {}, {0: "x"}),  # there was no rank in slot 7
        (9, {"c": {"x": [0]}}, {}, {}),  # nor any on this host
        (2, {"a": {"x": [0, 1]}, "b": {"y": [0], "x": [1]}}, {}, {0: "x", 2: "y"}),  # the rarest first
        (1, {"a": {"x": [0, 1]}, "b": {"y": [0]}}, {}, {2: "y"}),
        (2, {"a": {"x": [0]}}, {2: "x", 3: "y"}, {2: "x", 3: "y"}),
        (3, {"a": {"x": [0, 1]}}, {3: "y"}, {0: "x", 1: "x", 3: "y"}),
        (1, {"a": {"y": [0]}, "b": {"x": [0]}}, {}, {2: "x"}),  # in order where equally many were in each
    ],
)
def test_of_collectives_that_ranks_were_in_the_rarest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    by_agents: dict[str, dict[str, list[int]]],
    by_ranks: Mapping[int, str],
    evidence: Mapping[int, str],
) -> None:
    run = PureRun({"a": 2, "b": 2, "c": 2})
    run.start()
    assert run.evidence == [{}]
    fail(run, "b", 1)
    for rank, text in by_ranks.items():
        host, slot = run.state.membership.slots[rank]
        run.hear(host, "left", slot=slot, epoch=1, step=7, why="", last_collective=text)
    run.collectives = by_agents
    monkeypatch.setattr(decide_membership, "MOST_LISTED", most)
    run.ready()
    assert run.evidence[-1] == evidence
    assert list(run.evidence[-1]) == sorted(evidence)
    run.collectives = {}
    run.advance(9)
    fail(run, "b", 1)
    run.ready()
    assert run.evidence[-1] == {}, "each generation leaves its own"


def test_a_run_is_marked_as_running_with_its_ranks_when_they_go() -> None:
    run = PureRun({"a": 4})
    run.join("a")
    run.tick()
    run.does_disk_answer = False
    run.ready()
    _, actions = decide(run.state, CheckpointList(now_s=run.now_s, unix_s=UNIX_S + run.now_s, steps=()))
    assert MarkRunning(world=4) in actions


# ---- growing again ---------------------------------------------------------------------------------------------------


def shrunk(*, recovery: str = "auto") -> PureRun:
    """A run of four ranks that goes on with three."""
    run = PureRun({"a": 4}, recovery=recovery)
    run.start()
    fail(run, "a", 2, is_replaced=False)
    run.pass_time(REPLACE_S + 0.5)
    assert run.places == "a0 a1 a3"
    run.ready()
    run.advance(9)
    return run


def test_a_run_that_shrank_asks_its_ranks_to_form_again_once_a_slot_has_stayed_for_a_second() -> None:
    run = shrunk()
    run.pass_time(5.0)
    assert "reform" not in run.kinds("a")
    run.fill("a", 2, 1200)
    run.tick()
    run.pass_time(REGROW_S)
    assert "reform" not in run.kinds("a")
    run.pass_time(0.25)
    assert run.kinds("a")[-1] == "reform"
    run.pass_time(5.0)
    assert run.kinds("a").count("reform") == 1
    for slot in (0, 1, 3):
        run.hear("a", "left", slot=slot, epoch=2, step=10, state="reform", why="")
    run.tick()
    assert (run.generation, run.places) == (3, "a0 a1 a2 a3")


def test_a_slot_that_goes_away_again_begins_its_second_anew() -> None:
    run = shrunk()
    run.fill("a", 2, 1200)
    run.pass_time(0.75)
    run.lose("a", 2, is_replaced=False)
    run.pass_time(0.5)
    run.fill("a", 2, 1300)
    run.pass_time(1.0)
    assert "reform" not in run.kinds("a")
    run.pass_time(0.5)
    assert run.kinds("a")[-1] == "reform"


def test_slots_that_make_no_larger_layout_are_no_reason_to_grow() -> None:
    planned = replace(data_layout(4), data=2, shard=2, tensor=2, accumulation=6)
    run = PureRun({"a": 4}, planned=planned)
    run.start()
    run.lose("a", 3, is_replaced=False)
    fail(run, "a", 2, is_replaced=False)
    run.pass_time(REPLACE_S + 0.5)
    assert run.places == "a0 a1"
    run.ready()
    run.advance(9)
    run.fill("a", 2, 1200)
    run.pass_time(5.0)
    assert "reform" not in run.kinds("a")
    run.fill("a", 3, 1300)
    run.pass_time(1.5)
    assert run.kinds("a")[-1] == "reform"


@pytest.mark.parametrize("why_not", ["as large as planned", "stopping", "shrink"])
def test_a_run_does_not_form_again_to_grow(why_not: str) -> None:
    if why_not == "as large as planned":
        run = PureRun({"a": 6})
        run.start()
    else:
        run = shrunk()
        if why_not == "stopping":
            run.hear("a", "stop", count=1)
        run.fill("a", 2, 1200)
    if why_not == "shrink":
        run = PureRun({"a": 4}, recovery="shrink")
        run.start()
        fail(run, "a", 2)
        assert run.places == "a0 a1 a3"
        run.ready()
        run.advance(9)
    run.pass_time(5.0)
    assert "reform" not in run.kinds("a")


@pytest.mark.parametrize(("count", "how"), [(2, "killed at once"), (1, "killed")])
def test_a_second_request_to_stop_kills_at_once_and_a_manager_s_limit_only_kills(count: int, how: str) -> None:
    run = PureRun({"a": 4}, grace_s=10.0)
    run.start()
    run.hear("a", "stop", count=count, hurry=True)
    run.pass_time(10.0)
    if count == 1:
        assert run.end is None
        run.pass_time(0.25)
    assert run.end is not None
    assert (run.end.how, run.end.state, run.end.exit_code, run.end.generation) == (how, "stopped", 130, 1)
