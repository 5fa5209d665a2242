"""Stages: fair shares of the layers, where each stands, and schedules that are refused before anything waits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.plan.schedules import layers_of_stages, my_stages
from phalanx.train.parallel.pipeline import check_micro_batches, home_of, schedule_class


def fullest(counts, embed, head):
    loads = list(counts)
    loads[0] += embed
    loads[-1] += head
    return max(loads)


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.4, 1.0, 3.5]))
def test_no_split_has_a_lighter_fullest_stage(layers, stages, embed, head):
    """Against every possible split."""
    if stages > layers:
        return
    parts = layers_of_stages(layers, stages, embed_cost=embed, head_cost=head)
    counts = [len(part) for part in parts]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert min(counts) >= 1
    every = (
        [b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)]
        for cuts in combinations(range(1, layers), stages - 1)
    )
    assert fullest(counts, embed, head) == min(fullest(one, embed, head) for one in every)


def test_more_stages_than_layers():
    with pytest.raises(UserError) as caught:
        layers_of_stages(4, 5)
    assert str(caught.value) == (
        "parallel.pipeline: 5 stages cannot share 4 layers\n"
        "  each stage holds at least one layer\n"
        "  use at most 4 stages (pipeline × virtual_pipeline)"
    )


@pytest.mark.parametrize(("chunks", "v_shaped"), [(1, False), (2, False), (3, False), (2, True)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_stage_has_one_home(ranks, chunks, v_shaped):
    for rank in range(ranks):
        for stage in my_stages(rank, ranks, chunks, v_shaped=v_shaped):
            assert home_of(stage, ranks, v_shaped=v_shaped) == rank
    held = [stage for rank in range(ranks) for stage in my_stages(rank, ranks, chunks, v_shaped=v_shaped)]
    assert sorted(held) == list(range(ranks * chunks))


@pytest.mark.parametrize(
    ("name", "chunks", "found"),
    [
        ("gpipe", 1, "ScheduleGPipe"),
        ("1f1b", 1, "Schedule1F1B"),
        ("interleaved", 1, "Schedule1F1B"),
        ("interleaved", 2, "ScheduleInterleaved1F1B"),
        ("zero-bubble", 1, "ScheduleInterleavedZeroBubble"),
        ("zero-bubble", 2, "ScheduleZBVZeroBubble"),
        ("zero-bubble", 3, "ScheduleInterleavedZeroBubble"),
    ],
)
def test_names_of_schedules(name, chunks, found):
    assert schedule_class(name, chunks).__name__ == found


def test_a_schedule_of_one_chunk_refuses_two():
    with pytest.raises(UserError, match='"1f1b" runs one chunk of layers per rank, virtual_pipeline is 2'):
        schedule_class("1f1b", 2)


def test_rounds():
    check_micro_batches("interleaved", 2, 4, 8)
    check_micro_batches("1f1b", 1, 4, 7)
    with pytest.raises(UserError, match="9 micro-batches do not make whole rounds of 4 pipeline ranks"):
        check_micro_batches("interleaved", 2, 4, 9)
