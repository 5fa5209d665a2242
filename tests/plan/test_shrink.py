"""Fewer ranks, the same job: every layout that shrinking gives can be run, and deals the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.plan.shrink_layout import BatchDeal, shrink_layout
from phalanx.train.parallel.pipeline import check_micro_batches
from phalanx.train.rank_settings import Settings, check_layout

FSDP = Layout(
    data=4, shard=4, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=3, sequence_parallel=False,
    micro_batch=1, accumulation=2, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
SHAPE = ModelShape(
    name="moe", layers=64, hidden=64, heads=16, kv_heads=16, head_dim=4, ffn=64, vocab=64, experts=32,
    experts_per_token=2, expert_ffn=32,
)  # fmt: skip


def settings_of(layout: Layout, *, reproducible: bool = False) -> Settings:
    return Settings(layout=layout, sequence=64, reproducible=reproducible)


@pytest.mark.parametrize(
    ("ranks", "data", "accumulation"), [(9, 4, 2), (4, 4, 2), (3, 3, 3), (2, 2, 4), (1, 1, 8), (0, None, None)]
)
def test_full_shards_stay_full(ranks: int, data: int | None, accumulation: int | None) -> None:
    found = shrink_layout(FSDP, ranks=ranks, sequences=8)
    expected = None if data is None else replace(FSDP, data=data, shard=data, accumulation=accumulation)
    assert found == expected


def test_replicas_stay_replicas() -> None:
    found = shrink_layout(replace(FSDP, zero=0, shard=1), ranks=3, sequences=8)
    assert found is not None
    assert (found.data, found.shard, found.zero) == (3, 1, 0)


@pytest.mark.parametrize(("ranks", "shard"), [(15, 5), (14, 7), (13, 13), (12, 4), (10, 5), (6, 6), (5, 5), (3, 3)])
def test_groups_never_share_a_copy_between_fewer_ranks(ranks: int, shard: int) -> None:
    """Groups of 4 of 16: each rank would hold more than was planned if its group became smaller than it has to."""
    found = shrink_layout(replace(FSDP, data=16, shard=4), ranks=ranks, sequences=16)
    assert found is not None
    assert (found.data, found.shard) == (ranks, shard)


def test_a_whole_replica_goes_with_one_of_its_ranks() -> None:
    layout = replace(FSDP, data=4, shard=8, tensor=2, context=2, pipeline=2)
    found = shrink_layout(layout, ranks=31, sequences=8)
    assert found is not None
    assert (found.data, found.shard, found.devices) == (3, 6, 24)
    assert shrink_layout(layout, ranks=7, sequences=8) is None


def test_experts_must_still_be_shared_out_evenly() -> None:
    layout = replace(FSDP, data=8, shard=8, expert=4)
    found = shrink_layout(layout, ranks=7, sequences=8)
    assert found is not None
    assert found.data == 4
    assert shrink_layout(layout, ranks=3, sequences=8) is None


def test_same_bits_ask_for_powers_of_two() -> None:
    layout = replace(FSDP, data=8, zero=0, shard=1)
    found = shrink_layout(layout, ranks=7, sequences=24, reproducible=True)
    assert found is not None
    assert (found.data, found.accumulation) == (4, 8)


def test_growing_again_gives_the_planned_layout() -> None:
    planned = replace(FSDP, data=16, shard=4, accumulation=1)
    assert shrink_layout(planned, ranks=16, sequences=16) == planned == shrink_layout(planned, ranks=40, sequences=16)


LAYOUTS = st.builds(
    lambda data, groups, tensor, context, pipeline, chunks, expert, zero, schedule, micro: replace(
        FSDP,
        data=data,
        shard=max(1, data * context // groups) if zero else 1,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        virtual_pipeline=chunks if pipeline > 1 and schedule in ("interleaved", "zero-bubble") else 1,
        expert=expert,
        zero=zero,
        schedule=schedule,
        micro_batch=micro,
    ),
    st.integers(1, 24),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.integers(1, 3),
)


@given(planned=LAYOUTS, lost=st.integers(0, 60), sequences=st.integers(1, 200), reproducible=st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_is_left_can_be_run(planned: Layout, lost: int, sequences: int, reproducible: bool) -> None:
    count = BatchDeal.of(planned, reproducible=reproducible).micro_batches(sequences)
    planned = replace(planned, accumulation=count)
    assume(not check_layout(SHAPE, settings_of(planned, reproducible=reproducible)))
    ranks = max(planned.devices - lost, 0)
    found = shrink_layout(planned, ranks=ranks, sequences=sequences, reproducible=reproducible)
    if found is None:
        return
    assert found.devices <= ranks
    assert check_layout(SHAPE, settings_of(found, reproducible=reproducible)) == []
    if found.pipeline > 1:
        check_micro_batches(found.schedule, found.virtual_pipeline, found.pipeline, found.accumulation)
    assert replace(found, data=0, shard=0, accumulation=0) == replace(planned, data=0, shard=0, accumulation=0)
    dealing = BatchDeal.of(found, reproducible=reproducible)
    dealt = [row for rank in range(found.data) for row in dealing.real(rank, sequences)]
    assert dealt == list(range(sequences))
    assert (
        max(len(dealing.real(rank, sequences)) for rank in range(found.data)) <= found.accumulation * found.micro_batch
    )
    if found.data < planned.data:
        more = replace(found, data=found.data + 1)
        stage = more.data * more.context * more.tensor
        power = more.data & (more.data - 1) == 0
        assert more.devices > ranks or stage % more.expert or (reproducible and not power), "the most data ranks"


def test_no_ramp_stage_needs_to_divide() -> None:
    """Any size has a number of micro-batches that the schedule can order."""
    layout = replace(FSDP, pipeline=4, virtual_pipeline=2, schedule="interleaved")
    for size in range(1, 200):
        check_micro_batches("interleaved", 2, 4, BatchDeal.of(layout).micro_batches(size))
