"""Pipeline orders: whatever is repaired runs, and the search finds what is known and more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.evolve.schedule_problem import ScheduleProblem, repair_orders
from phalanx.plan.pipeline_order import named_orders, order_mistake, play_orders, unit_times


@given(st.lists(st.text(alphabet="FBIW", max_size=12), min_size=1, max_size=4), st.integers(1, 4), st.booleans())
def test_whatever_is_repaired_can_run(orders, count, split):
    repaired = repair_orders(orders, count, split=split)
    assert not order_mistake(repaired)
    assert all(order.count("F") == count for order in repaired)
    assert split or not set("".join(repaired)) & set("IW")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_known_orders_are_left_alone_and_have_their_bubble(schedule, ranks):
    orders = named_orders(schedule, ranks, 8)
    assert repair_orders(orders, 8, split=True) == orders
    played = play_orders(orders, unit_times(ranks))
    hidden = 3 if schedule == "zero-bubble" else 1  # Qi et al.: a third of 1F1B's bubble is left
    assert played.makespan == pytest.approx(24 + 3 * (ranks - 1) / hidden)


def test_wrong_orders_are_told():
    assert "goes backward through a micro-batch that has not" in order_mistake(["FBB", "FBF"])
    assert "every I needs its W" in order_mistake(["FI", "FB"])
    assert "where rank 0 has 2 micro-batches" in order_mistake(["FFBB", "FB"])
    assert order_mistake(["FBFB", "FFBB"]) == (
        "the ranks wait for each other: rank 0 at action 2 (B of micro-batch 0), "
        "rank 1 at action 2 (F of micro-batch 1)"
    )


def test_the_search_finds_known_bubbles_and_beats_1f1b_on_uneven_stages():
    plain = phalanx.evolve.schedules(stages=4, micro_batches=8, split=False, evaluations=100)
    assert plain.best.bubble == pytest.approx(3 / 11)  # 1F1B's: (p - 1) / (m + p - 1)
    small = plain.rows[-1]  # found, with no more activations than 1F1B
    assert (small.bubble, small.activations) == (pytest.approx(3 / 11), 4.0)
    split = phalanx.evolve.schedules(stages=4, micro_batches=8, evaluations=150)
    assert split.best.bubble == pytest.approx(3 / 27)  # the least there is: the last stage waits for its first input
    uneven = phalanx.evolve.schedules(forward=(1, 1, 2, 1), micro_batches=8, send=0.2, evaluations=150)
    steps = {row.name: row.step for row in uneven.rows}
    assert steps["found"] < 0.92 * steps["1f1b"]
    assert 'schedule = "zero-bubble"' in uneven.toml()


def test_mutations_and_crossings_are_valid():
    problem, rng = ScheduleProblem(times=unit_times(3), micro_batches=4), np.random.default_rng(0)
    genome = problem.seeds()[0]
    for _ in range(200):
        genome = problem.cross(problem.mutate(genome, rng), problem.random_genome(rng), rng)
        assert not order_mistake(genome["orders"])
