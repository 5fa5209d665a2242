"""How long ranks wait for each other: when the timeout changes, and that it reaches every process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.plan.plan import Plan
from phalanx.train.collective_timeouts import WARM_UP_STEPS, CollectiveTimeouts, set_collective_timeouts
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[2] / "examples" / "first-run.toml"


class Told:
    """A patience, and every timeout it set."""

    def __init__(self, *, steady_s: float = 30.0, measured: bool = True) -> None:
        self.set: list[float] = []
        self.patience = CollectiveTimeouts(first_s=300.0, steady_s=steady_s, measured=measured, apply=self.set.append)

    def steps(self, count: int, seconds: float = 1.0) -> list[float]:
        for _ in range(count):
            self.patience.count_step(seconds)
        return self.set


def test_it_is_long_until_steps_are_steady() -> None:
    told = Told()
    told.patience.on_start(None)
    assert told.set == [300.0]  # torch has a default of its own for groups of some ranks
    told.set.clear()
    assert told.steps(WARM_UP_STEPS - 1) == []
    assert told.steps(1) == [30.0]
    assert told.steps(100) == [30.0]


def test_a_rest_is_long_until_the_next_step_is_done() -> None:
    told = Told()
    told.steps(10)
    told.patience.lengthen()
    told.patience.lengthen()  # evaluated, then saved
    assert told.set == [30.0, 300.0]
    assert told.steps(1) == [30.0, 300.0, 30.0]


def test_a_rest_before_steps_are_steady_changes_nothing() -> None:
    told = Told()
    told.steps(2)
    told.patience.lengthen()
    assert told.steps(1) == []


def test_slow_steps_count_more_than_a_prediction_that_is_too_low() -> None:
    assert Told().steps(WARM_UP_STEPS, 20.0) == [100.0]
    assert Told().steps(WARM_UP_STEPS, 200.0) == [200.0]  # less than a step would end a healthy pipeline
    compiled = Told()
    compiled.steps(1, 100.0)
    assert compiled.steps(WARM_UP_STEPS - 1) == [30.0]  # the first step says nothing about the others


def test_a_number_in_the_job_file_is_kept() -> None:
    assert Told(steady_s=45.0, measured=False).steps(WARM_UP_STEPS, 20.0) == [45.0]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for_run(load_job(str(JOB), overrides=[], cluster=None, steps=0))


def test_a_job_says_both_and_whoever_is_silent_is_found_first(plan: Plan) -> None:
    made = CollectiveTimeouts.of(plan)
    assert (made.timeout_s, made._steady_s) == (300.0, 30.0)
    slow = replace(plan, job=replace(plan.job, fault=replace(plan.job.fault, dead_after_s=60.0)))
    assert CollectiveTimeouts.of(slow)._steady_s == 60.0
    fixed = replace(slow, job=replace(slow.job, train=replace(slow.job.train, timeout_s=40.0)))
    assert CollectiveTimeouts.of(fixed)._steady_s == 40.0


@pytest.fixture
def groups() -> Iterator[list[dist.ProcessGroup]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=300))
    try:
        yield [dist.group.WORLD, dist.new_group([0])]
    finally:
        dist.destroy_process_group()


def test_every_group_hears_of_it(groups: list[dist.ProcessGroup]) -> None:
    def timeouts() -> list[timedelta]:
        return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]

    assert timeouts()[1] == timedelta(minutes=30)  # what torch gives it: not what the job says
    set_collective_timeouts(7.0)
    assert timeouts() == [timedelta(seconds=7)] * 2
