"""Which incidents reach which limit: tables of histories, without a coordinator."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from phalanx.elastic.decide_limits import MIN_LOST_S, WINDOW_S, cause_of, reached_limit
from phalanx.elastic.failure import by_signal, silence
from phalanx.elastic.incident_history import MAX_INCIDENTS, IncidentHistory, PastIncident
from phalanx.elastic.membership import HostSlot

START_S = 1_000_000.0


def history_of(
    places: str, *, cause: str = "Silence", outage_s: float = 25.0, trains_s: float = 1.0, step_s: float = 0.1
) -> IncidentHistory:
    """Incidents in the given slots ("a0 b1"), with steps for `trains_s` before each."""
    history, now_s, step = IncidentHistory().after_step(0, START_S), START_S, 0
    for word in places.split():
        now_s, step = now_s + trains_s, step + round(trains_s / step_s)
        place, _, own_cause = word.partition(":")
        slot = HostSlot(place[0], int(place[1:]))
        history = history.after_incident(slot, own_cause or cause, began_s=now_s, best_step=step)
        now_s, step = now_s + outage_s, step + 1
        history = history.after_step(step, now_s)
    return history


def measure(history: IncidentHistory, *, restarts: int = 3, max_lost: float = 0.8) -> str:
    limit = reached_limit(history, restarts=restarts, max_lost=max_lost)
    return limit.measure if limit is not None else ""


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ("a2 a2", ""),
        ("a2 a2 a2", "move"),
        ("a2 a2 a2:ValueError", ""),  # another cause
        ("a2 a2:ValueError a2 a2", "move"),
        ("a2 a3 a2 a3", ""),
        ("a0 a1 a2 a3 a4", ""),
        ("a0 a1 a2 a3 a4 a5", "exclude"),  # none of its slots three times
        ("a2 a2 a2 a3 a3", ""),
        ("a2 a2 a2 a3 a3 a3", "exclude"),
        ("a2 a2 a2 a2 a2 a2", "move"),  # one slot does not speak against its host
        ("a2 a2 a2 b1 b1", ""),
        ("a2 a2 a2 b1 b1 b1", "end"),
        ("a0 a1 a2 a3 a4 a5 b1 b1 b1", "end"),
        ("a2 a2 b2 b2 c2 c2", ""),
        ("a2 a2 a2 b1", ""),  # the first on another host
        ("b0 b1 b2 b3 b4 a2 a2 a2", "move"),  # five on another host
        ("b0 b1 b2 b3 b4 b5 a2 a2 a2", "end"),
        ("b0 b1 b1 b1 a2 a2 a2", "end"),  # one slot of another host is enough
        ("a0 a1 a2 b0 b1 b2 a3 a4 a0 b3 b4 b0", "end"),  # several slots of each
        ("a0:HostLost a0:HostLost", ""),
        ("a0:HostLost a0:HostLost a0:HostLost", "exclude"),
        ("a0:HostLost a0:HostLost a0:HostLost b0:HostLost b0:HostLost b0:HostLost", "exclude"),
        ("a0:Deadlock a0:Deadlock a0:Deadlock a0:Deadlock a0:Deadlock", ""),
        ("a0:Deadlock a0:Deadlock a0:Deadlock a0:Deadlock a0:Deadlock b1:Deadlock", "end"),
    ],
)
def test_the_order_of_the_limits(places: str, expected: str) -> None:
    assert measure(history_of(places)) == expected


@pytest.mark.parametrize(("restarts", "count"), [(1, 2), (2, 2), (3, 3), (5, 5), (10**9, MAX_INCIDENTS // 8)])
def test_the_count_of_a_limit_is_fault_restarts(restarts: int, count: int) -> None:
    assert measure(history_of("a2 " * (count - 1)), restarts=restarts) == ""
    assert measure(history_of("a2 " * count), restarts=restarts) == "move"
    assert measure(history_of("a2 b1"), restarts=restarts) == "", "one incident each is no limit"


@pytest.mark.parametrize(
    ("places", "is_exceeded"),
    [
        ("a2 a2 a2", False),
        ("a2 a2 a2 a2", True),
        ("a0 a1 a2 a3 a4 a5", False),
        ("a0 a1 a2 a3 a4 a5 a0", True),
        ("a0:HostLost a0:HostLost a0:HostLost", False),
        ("a0:HostLost a0:HostLost a0:HostLost a0:HostLost", True),
        ("a2 a2 a2 b1 b1 b1", False),  # the end needs no second look
    ],
)
def test_a_limit_is_exceeded_by_the_next_incident(places: str, is_exceeded: bool) -> None:
    limit = reached_limit(history_of(places), restarts=3, max_lost=0.8)
    assert limit is not None
    assert limit.is_exceeded == is_exceeded


def test_the_reason_says_what_incidents_cost_until_the_newest() -> None:
    limit = reached_limit(history_of("a2 a2 a2"), restarts=3, max_lost=0.8)
    assert limit is not None
    assert limit.reason == (
        "slot 2 of host a failed 3 times with Silence; incidents cost 49.8 s of the last 52.0 s (fault.max_lost = 0.8)"
    )


def test_the_reason_names_all_other_hosts_in_order() -> None:
    limit = reached_limit(history_of("e2 e2 e2 d1 d1 d1 c0 c0 c0 b0 b0 b0 a1 a1 a1"), restarts=3, max_lost=0.8)
    assert limit is not None
    assert "as others on b, c, d, e did: it is no fault of a host" in limit.reason


@pytest.mark.parametrize(
    ("incidents", "max_lost", "first"),
    [
        ([], 0.8, None),
        ([(0.0, 0.0)], 0.8, None),  # what the newest one costs is not known
        ([(0.0, 10.0), (12.0, None)], 0.8, 0),  # as much as `min_lost_s`, and 83 % of the time
        ([(0.0, 9.5), (11.0, None)], 0.8, None),  # less than `min_lost_s`
        ([(0.0, 10.0), (12.5, None)], 0.8, None),  # 80 % of the time, and no more
        ([(0.0, 10.0), (12.0, None)], 0.05, 0),  # more than 0.6 s
        ([(0.0, 9.5), (10.0, 0.0), (11.0, None)], 0.8, None),  # one that cost nothing adds nothing
        ([(0.0, 11.0), (11.0, 0.0), (12.0, None)], 0.8, 0),
        ([(0.0, 10.0), (0.0, None)], 0.8, None),  # the clock was set back: there is no time to be a share of
        ([(0.0, 12.0), (100.0, 12.0), (113.0, None)], 0.8, 1),  # with the time between, they cost 24 of 113 s
    ],
)
def test_the_oldest_incident_since_which_too_much_time_is_lost(
    incidents: list[tuple[float, float | None]], max_lost: float, first: int | None
) -> None:
    history = IncidentHistory(
        incidents=tuple(
            PastIncident(began_s=began_s, place=HostSlot("a", 2), cause="X", lost_s=lost_s)
            for began_s, lost_s in incidents
        )
    )
    assert history.costly_since(max_lost, min_lost_s=10.0) == first
    if first is not None:
        assert history.lost_s(first) == sum(lost_s for _, lost_s in incidents[first:-1] if lost_s)


@pytest.mark.parametrize(
    ("outage_s", "trains_s", "max_lost", "expected"),
    [
        (25.0, 5.0, 0.8, "move"),  # 24.9 of 30 s
        (25.0, 7.0, 0.8, ""),  # 24.9 of 32 s
        (25.0, 7.0, 0.7, "move"),
        (25.0, 1.0, 1.0, ""),
        (25.0, 86400.0, 0.8, ""),
        (MIN_LOST_S / 2 - 1, 0.1, 0.8, ""),  # twice: less than it takes to count
        (MIN_LOST_S / 2 + 1, 0.1, 0.8, "move"),
    ],
)
def test_incidents_count_where_they_cost_more_than_the_job_allows(
    outage_s: float, trains_s: float, max_lost: float, expected: str
) -> None:
    history = history_of("a2 a2 a2", outage_s=outage_s, trains_s=trains_s)
    assert measure(history, max_lost=max_lost) == expected


def test_the_step_that_ends_an_incident_is_useful_work() -> None:
    history = history_of("a2 a2 a2", outage_s=125.0, trains_s=100.0, step_s=100.0)
    assert [one.lost_s for one in history.incidents] == [25.0, 25.0, 25.0]
    assert measure(history) == ""


def test_incidents_before_a_long_time_of_training_are_not_counted() -> None:
    history = history_of("a2 a2 a2 a2")
    later_s = history.resumed_s + 86400.0
    history = history.after_incident(HostSlot("a", 2), "Silence", began_s=later_s, best_step=10**6)
    assert measure(history) == ""


@pytest.mark.parametrize(
    ("outage_s", "expected"), [(WINDOW_S / 3 - 2, ""), (WINDOW_S / 3 - 1, "end")]
)  # with 1 s of training
def test_an_hour_of_different_incidents_is_the_end(outage_s: float, expected: str) -> None:
    assert measure(history_of("a1 b2 c3 d4", outage_s=outage_s)) == expected
    assert measure(history_of("a1 b2 c3", outage_s=2 * outage_s)) == "", "the count of fault.restarts comes first"


def test_a_history_is_bounded_and_a_full_one_that_is_costly_is_the_end() -> None:
    places = [f"{host}{slot}" for slot in range(MAX_INCIDENTS) for host in "abcdefgh"]
    history = history_of(" ".join(places[: MAX_INCIDENTS - 1]), outage_s=MIN_LOST_S)
    assert measure(history, restarts=10**9) == ""
    history = history_of(" ".join(places[: MAX_INCIDENTS + 5]), outage_s=MIN_LOST_S)
    assert len(history.incidents) == MAX_INCIDENTS
    assert measure(history, restarts=10**9) == "end"


def test_incidents_without_a_step_between_cost_all_the_time() -> None:
    history, place = IncidentHistory().after_step(0, START_S), HostSlot("a", 2)
    for began_s in (START_S + 1, START_S + 21, START_S + 41):
        history = history.after_incident(place, "Silence", began_s=began_s, best_step=1)
    assert [one.lost_s for one in history.incidents] == [20.0, 20.0, None]
    assert measure(history) == "move"


def test_no_incident_costs_less_than_nothing_or_begins_before_the_last_new_step() -> None:
    assert history_of("a2 a2", outage_s=50.0, trains_s=200.0, step_s=100.0).incidents[1].lost_s == 0.0
    place = HostSlot("a", 2)
    history = IncidentHistory().after_step(0, START_S).after_incident(place, "X", began_s=START_S - 5, best_step=0)
    assert history.incidents[0].began_s == START_S
    later = replace(history, resumed_s=START_S - 9).after_incident(place, "X", began_s=START_S - 5, best_step=0)
    assert [(one.began_s, one.lost_s) for one in later.incidents] == [(START_S, 0.0), (START_S, None)]


def test_only_the_first_step_after_an_incident_ends_it() -> None:
    begun = IncidentHistory().after_step(0, START_S)
    assert begun.after_step(1, START_S + 1) is begun
    history = history_of("a2")
    assert history.after_step(99, history.resumed_s + 1000.0) is history


def test_an_incident_before_the_first_step_of_a_launch_costs_all_of_its_time() -> None:
    """A resumed launch has done no step itself: there is no duration of a step, however far the run is."""
    history = IncidentHistory().after_incident(HostSlot("a", 2), "X", began_s=START_S, best_step=100)
    assert history.after_step(101, START_S + 50.0).incidents[0].lost_s == 50.0


def test_a_clock_that_was_set_back_reaches_no_limit() -> None:
    history = history_of("a2 a2 a2")
    newest = replace(history.incidents[-1], began_s=START_S - 100)
    assert measure(replace(history, incidents=(*history.incidents[:-1], newest))) == ""


def test_a_history_is_the_same_after_json() -> None:
    history = replace(history_of("a2 b1"), excluded={"b": "its slots hang"})
    assert IncidentHistory.from_json(json.loads(json.dumps(history.to_json()))) == history
    is_open = history.after_incident(HostSlot("a", 1), "X", began_s=history.resumed_s, best_step=0)
    assert IncidentHistory.from_json(json.loads(json.dumps(is_open.to_json()))) == is_open
    assert IncidentHistory.from_json({}) == IncidentHistory()


def test_a_cause_is_a_kind_with_the_number_of_a_signal() -> None:
    assert cause_of(by_signal(1, 5, 9)) == "Signal 9"
    assert cause_of(silence(1, 5, silent_s=2, where="sleep")) == "Silence"
    assert len(cause_of(replace(silence(1, 5, silent_s=2, where=""), kind="X" * 10_000))) == 80
