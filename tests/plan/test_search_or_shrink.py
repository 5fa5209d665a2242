"""A resumed run takes the layout that a membership of as many ranks would take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.job.load import ResolvedJob, load
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.plan.shrink_layout import shrink_layout

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"  # 16 sequences, shard 4


def job_on(ranks: int, *overrides: str) -> ResolvedJob:
    return load(str(JOB), overrides=[f'cluster.spec="local-cpu:{ranks}"', *overrides])


@pytest.fixture(scope="module")
def eight() -> Plan:
    return make_plan(job_on(8, "parallel.shard=8"))


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_as_many_ranks_have_the_same_layout_after_a_shrink_and_after_a_resume(eight: Plan, ranks: int) -> None:
    shrunk = shrink_layout(eight.layout, ranks=ranks, sequences=16)
    assert shrunk is not None
    plan = make_plan(job_on(ranks, "parallel.shard=8"), earlier=eight.layout)
    assert (plan.layout, plan.layout.devices) == (shrunk, ranks)
    (warning,) = [line for line in plan.warnings if "continues with" in line]
    padded = -(-16 // (ranks * shrunk.micro_batch)) * ranks * shrunk.micro_batch - 16
    assert f"continues with {ranks} data ranks, and its batch is padded with {padded} row" in warning


def test_a_layout_that_divides_the_batch_comes_from_the_search(eight: Plan) -> None:
    job = job_on(2, "parallel.shard=2")
    assert make_plan(job, earlier=eight.layout).layout == make_plan(job).layout


def test_a_resumed_run_may_also_grow_to_ranks_that_divide_nothing(eight: Plan) -> None:
    plan = make_plan(job_on(10, "parallel.shard=8"), earlier=replace(eight.layout, data=4, shard=4))
    assert (plan.layout.data, plan.layout.shard, plan.layout.accumulation) == (10, 5, 1)


def test_ranks_that_hold_no_model_replica_stay_idle(eight: Plan) -> None:
    earlier = replace(eight.layout, data=4, shard=1, zero=0, tensor=2)
    plan = make_plan(job_on(7, "parallel.tensor=2", "parallel.shard=1", "parallel.zero=0"), earlier=earlier)
    assert (plan.layout.tensor, plan.layout.data) == (2, 3)
    assert any("; 1 device left idle" in line for line in plan.warnings)


@pytest.mark.parametrize("reproducible", ["false", "true"])
def test_where_a_shrink_finds_no_layout_the_search_is_what_is_reported(eight: Plan, reproducible: str) -> None:
    job = job_on(3, "parallel.shard=8", "parallel.tensor=2", f"numerics.reproducible={reproducible}")
    with pytest.raises(UserError, match="does not divide"):
        make_plan(job, earlier=replace(eight.layout, tensor=4, data=2, shard=2))
    with pytest.raises(UserError):
        make_plan(job_on(6, "parallel.shard=8"))
