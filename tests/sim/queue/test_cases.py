"""Queues small enough to be worked out by hand."""

from __future__ import annotations

from typing import Any

from phalanx.sim.queue.job_state import QueueOutcome
from phalanx.sim.queue.queue_job import QueueJob
from phalanx.sim.queue.queue_policy import Drain, QueuePolicy, QueueTeam
from phalanx.sim.queue.simulate_queue import simulate_jobs
from phalanx.sim.queue.simulated_cluster import JournalEntry


def job(name: str, submit_s: float, nodes: int, duration_s: float, limit_s: float = 0.0, **more: Any) -> QueueJob:
    return QueueJob(
        name=name, submit_s=submit_s, nodes=nodes, duration_s=duration_s, limit_s=limit_s or duration_s, **more
    )


def run(jobs: list[QueueJob], nodes: int, journal: list[JournalEntry] | None = None, **policy: Any) -> QueueOutcome:
    settings = {"restart_s": 10.0, "checkpoint_s": 30.0} | policy
    return simulate_jobs(jobs, nodes=nodes, policy=QueuePolicy(**settings), journal=journal)  # type: ignore[arg-type]


def starts(outcome: QueueOutcome) -> dict[str, float]:
    return {state.job.name: state.first_start_s for state in outcome.states}


def ends(outcome: QueueOutcome) -> dict[str, float]:
    return {state.job.name: state.end_s for state in outcome.states}


# Ten nodes. `long` has six of them until 100; `wide` needs eight, so that it is promised nodes at 100 and two are over.
BACKFILL = [
    job("long", 0, 6, 100),
    job("wide", 1, 8, 50),
    job("too-long", 2, 3, 99),  # would end at 101 and use three where two are over
    job("narrow", 3, 2, 500),  # uses exactly the two
    job("short", 4, 2, 96),  # ends when `wide` is to begin
]


def test_easy_starts_what_does_not_delay_the_first() -> None:
    assert starts(run(BACKFILL, 10)) == {"long": 0, "wide": 100, "too-long": 150, "narrow": 3, "short": 4}


def test_fifo_starts_in_order_of_submission() -> None:
    found = run(BACKFILL, 10, backfill="none")
    assert starts(found) == {"long": 0, "wide": 100, "too-long": 150, "narrow": 150, "short": 150}
    assert found.whole.idle_node_s["reserved for a larger job"] > 0


def test_conservative_delays_nobody_who_waits() -> None:
    """EASY lets `late` in, since it does not delay `wide`, and so delays `whole` to its end."""
    jobs = [job("long", 0, 6, 100), job("wide", 1, 8, 50), job("whole", 2, 10, 10), job("late", 3, 2, 300)]
    assert starts(run(jobs, 10)) == {"long": 0, "wide": 100, "whole": 303, "late": 3}
    assert starts(run(jobs, 10, backfill="conservative")) == {"long": 0, "wide": 100, "whole": 150, "late": 160}


def test_promises_move_forward_when_a_job_ends_before_its_limit() -> None:
    jobs = [job("early", 0, 6, 20, 100), job("wide", 1, 8, 50), job("small", 2, 4, 98)]
    assert starts(run(jobs, 10)) == {"early": 0, "wide": 100, "small": 2}  # small, until 100, has four of the ten
    assert starts(run(jobs[:2], 10)) == {"early": 0, "wide": 20}


def test_a_job_is_ended_at_its_limit() -> None:
    assert ends(run([job("a", 0, 1, 100, 60)], 1)) == {"a": 60}


def test_preemption_at_once_loses_what_no_checkpoint_saved() -> None:
    jobs = [job("low", 0, 4, 1000), job("high", 100, 2, 50, priority=1)]
    found = run(jobs, 4, preemption=True)
    low = found.states[0]
    assert starts(found) == {"low": 0, "high": 100}
    # 90 of 100 s were saved; it starts again at 150 and needs 10 s to come back.
    assert (low.end_s, low.lost_s, low.overhead_s, low.preemptions) == (150 + 10 + 910, 10, 10, 1)
    assert starts(run(jobs, 4)) == {"low": 0, "high": 1000}


def test_preemption_with_grace_saves_everything_and_waits_for_it() -> None:
    jobs = [job("low", 0, 4, 1000), job("high", 100, 2, 50, priority=1), job("other", 101, 2, 30)]
    found = run(jobs, 4, preemption=True, grace_s=20.0)
    low = found.states[0]
    # `other` comes after `low`, but fits beside `high` and ends before `low` could start.
    assert starts(found) == {"low": 0, "high": 120, "other": 120}
    assert (low.end_s, low.lost_s, low.overhead_s) == (170 + 10 + 900, 0, 30)


def test_only_as_many_as_needed_are_preempted_the_youngest_first() -> None:
    jobs = [*(job(f"low {number}", number, 1, 500) for number in range(4)), job("high", 10, 2, 50, priority=1)]
    found = run(jobs, 4, preemption=True)
    assert [state.preemptions for state in found.states] == [0, 0, 1, 1, 0]
    assert found.states[4].first_start_s == 10


TEAMS = (QueueTeam(name="a", nodes=64), QueueTeam(name="b", nodes=192))


def test_borrowed_nodes_are_taken_back_as_kueue_did() -> None:
    """shared measurement: a team's large job borrows 192 of 256 nodes; the owner asks for 64 of its own, the job is
    evicted, the owner runs in exactly four racks, and the large job waits in the queue again."""
    jobs = [job("big", 0, 256, 1000, team="a"), job("own", 100, 64, 50, team="b")]
    journal: list[JournalEntry] = []
    found = run(jobs, 256, journal, team=TEAMS)
    assert starts(found) == {"big": 0, "own": 100}
    assert found.states[0].preemptions == 1
    given = next(nodes for time, begins, number, nodes in journal if begins and number == 1)
    assert len({node // 16 for node in given}) == 4
    assert found.states[0].end_s == 150 + 10 + 910  # it begins again when all its nodes are free
    kept = run(jobs, 256, team=TEAMS, reclaim=False)
    assert starts(kept) == {"big": 0, "own": 1000}


def test_a_team_borrows_no_more_than_it_may() -> None:
    teams = (QueueTeam(name="a", nodes=2, most_borrowed=1), QueueTeam(name="b", nodes=4))
    jobs = [job("one", 0, 2, 100, team="a"), job("two", 1, 2, 10, team="a"), job("three", 2, 1, 10, team="a")]
    found = run([*jobs, job("never", 3, 4, 10, team="a")], 6, team=teams)
    assert starts(found) == {"one": 0, "two": 100, "three": 2}
    assert [one.name for one in found.never_fit] == ["never"]
    assert found.whole.idle_node_s["quota"] > 0


def test_fair_share_serves_the_team_that_used_least() -> None:
    jobs = [job(f"a{number}", 0, 1, 100, team="a") for number in range(3)]
    jobs.append(job("b0", 1, 1, 100, team="b"))
    assert starts(run(jobs, 1))["b0"] == 300
    assert starts(run(jobs, 1, fair_share=True))["b0"] == 100


def test_drained_nodes_take_no_new_job_and_finish_the_old_one() -> None:
    drain = (Drain(start_h=0.01, hours=0.1, first_node=0, nodes=2),)  # from 36 s until 396 s
    jobs = [job("old", 0, 4, 100), job("wide", 1, 4, 10), job("small", 2, 2, 50)]
    found = run(jobs, 4, drain=drain)
    assert ends(found)["old"] == 100
    assert starts(found) == {"old": 0, "small": 100, "wide": 396}
    assert found.whole.away_node_s == 2 * (396 - 100)


def test_a_required_rack_waits_for_one_and_a_larger_job_never_starts() -> None:
    """Two racks of four, each with one node taken: three free nodes in each."""
    first = [job("x", 0, 3, 100, domain="rack"), job("y", 0, 3, 200, domain="rack")]
    jobs = [*first, job("rack", 1, 2, 10, domain="rack"), job("any", 2, 2, 10), job("never", 3, 5, 10, domain="rack")]
    found = run(jobs, 8, nodes_per_rack=4, racks_per_block=2)
    assert starts(found) == {"x": 0, "y": 0, "rack": 100, "any": 2}
    assert [one.name for one in found.never_fit] == ["never"]
    assert found.whole.idle_node_s["topology"] > 0


def test_packing_gives_the_fewest_racks() -> None:
    """As Kueue measured: 1,000 nodes of 7,500 in 63 racks of 16, and 16 nodes in one rack."""
    found = run([job("large", 0, 1000, 10), job("rack", 0, 16, 10), job("small", 0, 3, 10)], 7500)
    assert [state.racks for state in found.states] == [63, 1, 1]


def test_admissions_come_one_after_the_other() -> None:
    """200 small jobs at 0.35 s each took Kueue 71 s, measured."""
    found = run([job(f"{number}", 0, 2, 1000) for number in range(200)], 7500, admission_s=0.355)
    assert round(max(starts(found).values())) == 71
