"""What holds for every queue: checked on the journal of random ones."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.sim.queue.queue_job import QueueJob
from phalanx.sim.queue.queue_policy import Drain, QueuePolicy, QueueTeam
from phalanx.sim.queue.simulate_queue import simulate_jobs
from phalanx.sim.queue.simulated_cluster import JournalEntry
from phalanx.sim.queue.synthetic import synthetic_jobs

NODES = 12
TEAMS = (QueueTeam(name="a", nodes=5), QueueTeam(name="b", nodes=7, most_borrowed=3))

jobs_strategy = st.lists(
    st.builds(
        lambda submit, nodes, run, slack, team, priority, domain: QueueJob(
            name="j",
            submit_s=float(submit),
            nodes=nodes,
            duration_s=float(run),
            limit_s=float(run * slack),
            team=team,
            priority=priority,
            domain=domain,
        ),
        st.integers(0, 300),
        st.integers(1, 10),
        st.integers(1, 200),
        st.integers(1, 3),
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.sampled_from(["", "", "any", "rack", "block"]),
    ),
    min_size=1,
    max_size=25,
).map(lambda jobs: sorted(jobs, key=lambda job: job.submit_s))

policy_strategy = st.builds(
    QueuePolicy,
    backfill=st.sampled_from(["none", "easy", "conservative"]),
    depth=st.sampled_from([2, 500]),
    backfill_every_s=st.sampled_from([0.0, 30.0]),
    preemption=st.booleans(),
    grace_s=st.sampled_from([0.0, 7.0]),
    save_on_signal=st.booleans(),
    fair_share=st.booleans(),
    half_life_h=st.sampled_from([0.0, 1.0]),
    packing=st.sampled_from(["first", "preferred", "required"]),
    nodes_per_rack=st.just(4),
    racks_per_block=st.just(2),
    on_failure=st.sampled_from(["requeue", "replace"]),
    repair_h=st.sampled_from([0.001, 0.1]),
    checkpoint_s=st.sampled_from([0.0, 20.0]),
    restart_s=st.just(3.0),
    admission_s=st.sampled_from([0.0, 0.5]),
    started_nodes_per_s=st.sampled_from([0.0, 2.0]),
    team=st.sampled_from([(), TEAMS]),
    drain=st.sampled_from([(), (Drain(start_h=0.01, hours=0.05, first_node=2, nodes=7),)]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs=jobs_strategy, policy=policy_strategy, failures=st.sampled_from([0.0, 20.0]), seed=st.integers(0, 5))
def test_no_node_is_given_twice_gangs_are_whole_and_work_is_conserved(
    jobs: list[QueueJob], policy: QueuePolicy, failures: float, seed: int
) -> None:
    journal: list[JournalEntry] = []
    found = simulate_jobs(jobs, nodes=NODES, policy=policy, failures_per_node_day=failures, seed=seed, journal=journal)
    held: dict[int, int] = {}
    running: set[int] = set()
    used: dict[str, int] = {}
    for time, begins, number, nodes in journal:
        job = found.states[number].job
        assert len(set(nodes)) == len(nodes) == job.nodes
        assert time >= job.submit_s
        used[job.team] = used.get(job.team, 0) + (job.nodes if begins else -job.nodes)
        if begins:
            assert number not in running
            assert not [node for node in nodes if node in held]
            assert all(0 <= node < NODES for node in nodes)
            assert not policy.team or used["b" if job.team == "b" else "a"] <= {"a": 12, "b": 10}[job.team]
            if job.domain in ("rack", "block"):
                size = 4 if job.domain == "rack" else 8
                assert len({node // size for node in nodes}) == 1
            held |= dict.fromkeys(nodes, number)
            running.add(number)
        else:
            assert all(held.pop(node) == number for node in nodes)
            running.remove(number)
    assert not running
    # Everything that can start does and ends, and busy nodes did work that stayed, work that was lost, or overhead.
    if not failures:
        assert all(state.end_s >= 0 and state.left_s == 0 for state in found.states)
    worked = sum(
        (state.job.run_s - state.left_s + state.lost_s + state.overhead_s) * state.job.nodes for state in found.states
    )
    assert worked == pytest.approx(found.whole.busy_node_s)
    whole = found.whole
    assert whole.busy_node_s + whole.away_node_s + sum(whole.idle_node_s.values()) == pytest.approx(
        NODES * whole.seconds
    )
    assert len(found.states) + len(found.never_fit) == len(jobs)


@settings(max_examples=60, deadline=None)
@given(jobs=jobs_strategy)
def test_without_backfill_nobody_overtakes(jobs: list[QueueJob]) -> None:
    plain = [replace(job, priority=0, domain="any") for job in jobs]
    found = simulate_jobs(plain, nodes=NODES, policy=QueuePolicy(backfill="none"))
    starts = [state.first_start_s for state in found.states]
    assert starts == sorted(starts)


@settings(max_examples=60, deadline=None)
@given(jobs=jobs_strategy)
def test_backfill_never_delays_the_first_that_waits(jobs: list[QueueJob]) -> None:
    """The job that is first in the line starts no later than its limit-based promise, whatever is backfilled."""
    exact = [replace(job, priority=0, domain="any", limit_s=job.duration_s) for job in jobs]
    for backfill in ("easy", "conservative"):
        found = simulate_jobs(exact, nodes=NODES, policy=QueuePolicy(backfill=backfill))
        fifo = simulate_jobs(exact, nodes=NODES, policy=QueuePolicy(backfill="none"))
        # Of the jobs that wait, the first one by submission starts as early as under FIFO.
        late = [number for number, state in enumerate(fifo.states) if state.first_start_s > state.job.submit_s]
        if late:
            assert found.states[late[0]].first_start_s <= fifo.states[late[0]].first_start_s


def test_the_same_seed_gives_the_same_outcome_and_another_does_not() -> None:
    def starts(seed: int) -> list[float]:
        trace = synthetic_jobs(nodes=64, jobs=150, days=2, load=0.9, seed=seed)
        found = simulate_jobs(trace.jobs, nodes=64, policy=QueuePolicy(), failures_per_node_day=0.05, seed=seed)
        return [state.end_s for state in found.states]

    assert starts(1) == starts(1)
    assert starts(1) != starts(2)


def test_synthetic_jobs_ask_for_the_load() -> None:
    trace = synthetic_jobs(nodes=500, jobs=2000, days=3, load=0.7, seed=3)
    asked = sum(job.nodes * job.duration_s for job in trace.jobs)
    assert asked == pytest.approx(0.7 * 500 * 3 * 86400)
    assert max(job.submit_s for job in trace.jobs) <= 3 * 86400
    assert all(job.limit_s >= job.duration_s for job in trace.jobs)


@pytest.mark.parametrize(
    ("policy", "digest"),
    [
        (QueuePolicy(backfill="conservative"), "b5c5100a6a12"),
        (QueuePolicy(backfill="conservative", packing="required", backfill_every_s=60.0), "35e30f98b399"),
        (QueuePolicy(backfill="conservative", fair_share=True, team=TEAMS), "64c2799e8468"),
        (QueuePolicy(backfill="easy", preemption=True, grace_s=30.0), "c3133cdc025a"),
    ],
)
def test_what_was_refused_once_is_remembered_without_changing_a_start(policy: QueuePolicy, digest: str) -> None:
    """Starts of a queue that is too long for its cluster, as found before anything was remembered (2026-11-18)."""
    chance = random.Random(7)
    jobs = []
    for number in range(400):
        nodes, run_s = chance.choice([1, 1, 2, 3, 4, 6, 8]), float(chance.randrange(60, 4000))
        priority, team = chance.choice([0, 0, 0, 1, 2]), chance.choice("ab")
        limit_s = run_s * chance.randrange(1, 5)
        jobs.append(QueueJob(name="j", submit_s=200.0 * number, nodes=nodes, duration_s=run_s, limit_s=limit_s,
                             priority=priority, team=team))  # fmt: skip
    found = simulate_jobs(jobs, nodes=NODES, policy=policy, failures_per_node_day=0.0, seed=0)
    starts = " ".join(f"{state.first_start_s:.3f}-{state.end_s:.3f}" for state in found.states)
    assert hashlib.sha256(starts.encode()).hexdigest()[:12] == digest


class BoundedJournal(list[JournalEntry]):
    """Raises instead of growing for ever."""

    def append(self, entry: JournalEntry) -> None:
        assert len(self) < 30_000, "jobs end each other again and again"
        super().append(entry)


@pytest.mark.parametrize("seed", [36, 127, 296])
def test_jobs_of_two_teams_do_not_end_each_other_for_ever(seed: int) -> None:
    """The first ended all running jobs every 7 s, the others two jobs in turn at one moment."""
    chance = random.Random(seed)
    nodes = chance.choice([12, 24, 48])
    teams = tuple(
        QueueTeam(name=name, nodes=nodes // 3, most_borrowed=chance.choice([None, 3, nodes])) for name in "abc"
    )
    jobs = []
    for _ in range(chance.randint(5, 120)):
        submit_s, size, duration_s = chance.randint(0, 600), chance.randint(1, nodes // 2), chance.randint(1, 200)
        jobs.append(
            QueueJob(
                name="j",
                submit_s=float(submit_s),
                nodes=size,
                duration_s=float(duration_s),
                limit_s=float(duration_s * chance.randint(1, 3)),
                team=chance.choice("abc"),
                priority=chance.randint(0, 2),
                domain=chance.choice(["", "", "any", "rack", "block"]),
            )
        )
    jobs.sort(key=lambda job: job.submit_s)
    policy = QueuePolicy(
        backfill=chance.choice(["none", "easy", "conservative"]),
        preemption=chance.random() < 0.6,
        grace_s=chance.choice([0.0, 0.0, 7.0]),
        fair_share=chance.random() < 0.4,
        packing=chance.choice(["first", "preferred", "required"]),
        nodes_per_rack=4,
        racks_per_block=2,
        team=teams if chance.random() < 0.8 else (),
        repair_h=0.01,
        on_failure=chance.choice(["requeue", "replace"]),
        checkpoint_s=20.0,
        restart_s=3.0,
    )
    failures = chance.choice([0.0, 20.0])
    journal = BoundedJournal()
    found = simulate_jobs(jobs, nodes=nodes, policy=policy, failures_per_node_day=failures, seed=seed, journal=journal)
    assert {begins for _, begins, _, _ in journal} == {True, False}
    assert max(state.preemptions for state in found.states) <= 100
