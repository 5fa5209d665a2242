"""Steps to samples: the ramp, and that the global batch does not depend on who asks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.job.schema import Batch, RampStage
from phalanx.train.data.batches import IGNORED, Batches, BatchPlan, steady_ramp
from phalanx.train.data.sampler import GlobalSampler
from phalanx.train.data.token_samples import Tokens


class Counting:
    """A dataset whose sample i is i, i, i ..."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at

    def samples(self, indices: Tokens, length: int) -> Tokens:
        if self.fail_at in indices:
            raise OSError(5, "Input/output error")
        return np.repeat(indices[:, None], length + 1, axis=1) + np.arange(length + 1)


def plan_of(*ramp: RampStage, sequences: int = 8, tokens: int = 800, sequence: int = 10) -> BatchPlan:
    batch = Batch(global_sequences=sequences, global_tokens=sequences * sequence, ramp=ramp)
    return BatchPlan.of(batch, sequence=sequence, tokens=tokens)


def test_without_a_ramp() -> None:
    plan = plan_of(tokens=801)
    assert plan.steps == 11, "the last step reaches the tokens"
    assert [plan.at(step) for step in (0, 1, 10, 11)] == [(0, 8), (8, 8), (80, 8), (88, 8)]
    assert plan.tokens_before(3) == 240


def test_a_ramp_of_two_stages() -> None:
    plan = plan_of(RampStage(until_tokens=45, global_tokens=20), RampStage(until_tokens=100, global_tokens=40))
    # 2 sequences until 45 tokens (3 steps, 60 tokens), 4 until 100 (1 step), then 8 until 800 (9 steps)
    assert [plan.at(step) for step in range(6)] == [(0, 2), (2, 2), (4, 2), (6, 4), (10, 8), (18, 8)]
    assert plan.steps == 4 + 9
    assert plan.batch_sizes == (2, 4, 8)


def test_a_ramp_longer_than_the_run() -> None:
    plan = plan_of(RampStage(until_tokens=10**6, global_tokens=20), tokens=100)
    assert (plan.steps, plan.batch_sizes) == (5, (2,))


@given(
    sizes=st.lists(st.integers(1, 9), max_size=4),
    lasts=st.lists(st.integers(1, 300), min_size=4, max_size=4),
    full=st.integers(1, 12),
    tokens=st.integers(1, 3000),
)
@settings(max_examples=80, deadline=None)
def test_positions_follow_each_other_without_a_gap(sizes: list[int], lasts: list[int], full: int, tokens: int) -> None:
    ends = np.cumsum(lasts)
    ramp = [RampStage(until_tokens=int(end), global_tokens=10 * size) for end, size in zip(ends, sizes, strict=False)]
    plan = plan_of(*ramp, sequences=full, tokens=tokens)
    position = 0
    for step in range(plan.steps):
        first, count = plan.at(step)
        assert first == position
        assert plan.tokens_before(step) < tokens
        position += count
    assert plan.tokens_before(plan.steps) >= tokens


def other_trainers_ramp(start: int, increment: int, samples: int, full: int) -> dict[int, int]:
    """The rule of `--rampup-batch-size`, step by step: batch size -> first step with it."""
    share = samples / ((full - start) // increment)
    consumed = step = size = 0
    first: dict[int, int] = {}
    while size < full:
        size = full if consumed > samples else start + increment * int(consumed / share)
        first.setdefault(size, step)
        consumed, step = consumed + size, step + 1
    return first


def test_blooms_ramp() -> None:
    """16 16 9_765_625 to 2,048: the batch of 384 begins at step 17,948 and ends at 18,148.

    The design notes say "reaches GBS 384 at step 18,146": that is the continuous sum of samples / batch over the stages
    16 to 384, 18,146.9, which whole steps overshoot by one.
    """
    ramp = steady_ramp(start=16, increment=16, over_sequences=9_765_625, full=2048, sequence=2048)
    batch = Batch(global_sequences=2048, global_tokens=2048 * 2048, ramp=ramp)
    plan = BatchPlan.of(batch, sequence=2048, tokens=350 * 10**9)
    first = {stage.sequences: stage.first_step for stage in plan.stages}
    assert first == other_trainers_ramp(16, 16, 9_765_625, 2048)
    assert (first[384], first[400], first[2048]) == (17_948, 18_148, 26_076)
    continuous = sum(9_765_625 / 127 / size for size in range(16, 385, 16))
    assert int(continuous) == 18_146


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_global_batch_is_the_same_at_any_world_size(ranks: int) -> None:
    plan, sampler = plan_of(RampStage(until_tokens=300, global_tokens=80), sequences=16), GlobalSampler(37, 5)
    whole = Batches(Counting(), sampler, plan, sequence=10, data_rank=0, data_ranks=1)
    parts = [Batches(Counting(), sampler, plan, sequence=10, data_rank=rank, data_ranks=ranks) for rank in range(ranks)]
    try:
        for step in range(plan.steps):
            together = [np.concatenate(one) for one in zip(*(part.get(step) for part in parts), strict=True)]
            for mine, theirs in zip(whole.get(step), together, strict=True):
                assert mine.dtype == np.int64
                assert (mine == theirs).all()
    finally:
        for one in (whole, *parts):
            one.close()


def test_targets_are_the_inputs_moved_on() -> None:
    batches = Batches(Counting(), GlobalSampler(9, 0), plan_of(), sequence=10, data_rank=0, data_ranks=2)
    tokens, targets = batches.get(0)
    batches.close()
    assert tokens.shape == targets.shape == (4, 10)
    assert (tokens[:, 1:] == targets[:, :-1]).all()


def test_any_step_may_be_asked_for_as_after_a_resume() -> None:
    plan, sampler = plan_of(), GlobalSampler(1000, 2)
    through = Batches(Counting(), sampler, plan, sequence=10, data_rank=1, data_ranks=2)
    expected = [through.get(step)[0] for step in range(8)]
    through.close()
    resumed = Batches(Counting(), sampler, plan, sequence=10, data_rank=1, data_ranks=2)
    for step in (5, 6, 2, 3, 7):
        assert (resumed.get(step)[0] == expected[step]).all()
    resumed.close()


def test_reading_ahead_ends_its_thread() -> None:
    before = threading.active_count()
    batches = Batches(Counting(), GlobalSampler(9, 0), plan_of(), sequence=10, data_rank=0, data_ranks=1)
    batches.get(0)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def test_a_failing_disk_reaches_the_loop() -> None:
    plan, sampler = plan_of(), GlobalSampler(80, 0)
    bad = int(sampler.indices(*plan.at(3))[0])
    batches = Batches(Counting(fail_at=bad), sampler, plan, sequence=10, data_rank=0, data_ranks=1)
    for step in range(3):
        batches.get(step)
    with pytest.raises(OSError, match="Input/output error"):
        batches.get(3)
    batches.close()


@given(
    sequences=st.integers(1, 20), ranks=st.integers(1, 7), micro=st.integers(1, 3), rounds=st.sampled_from([1, 2, 4])
)
@settings(max_examples=60, deadline=None)
def test_any_number_of_ranks_deals_the_batch_once(sequences: int, ranks: int, micro: int, rounds: int) -> None:
    plan, sampler = plan_of(sequences=sequences, tokens=10**4), GlobalSampler(1000, 5)
    whole = sampler.indices(*plan.at(3))
    learnt, counts = [], set()
    for rank in range(ranks):
        batches = Batches(
            Counting(),
            sampler,
            plan,
            sequence=10,
            data_rank=rank,
            data_ranks=ranks,
            micro=micro,
            rounds=rounds,
        )
        tokens, targets = batches.get(3)
        batches.close()
        real = (targets != IGNORED).all(axis=1)
        assert ((targets == IGNORED).all(axis=1) == ~real).all(), "a row counts or it does not"
        assert (tokens[real, 0] == batches.indices(3)).all()
        assert (targets[real] == tokens[real] + 1).all()
        assert np.isin(tokens[:, 0], whole).all(), "what fills up is of the same batch"
        learnt += tokens[real, 0].tolist()
        counts.add(divmod(len(tokens), micro))
    assert learnt == whole.tolist()
    ((count, rest),) = counts
    assert rest == 0
    assert count % max(1, count // rounds) == 0


def test_what_fills_up_stands_last_and_leaves_the_tokens_alone() -> None:
    batches = Batches(Counting(), GlobalSampler(9, 0), plan_of(), sequence=10, data_rank=2, data_ranks=3)
    tokens, targets = batches.get(0)
    batches.close()
    assert (targets[:2] == tokens[:2] + 1).all()
    assert (targets[2] == IGNORED).all()
    assert (tokens[2] == tokens[1]).all()


def test_a_filled_tree_has_a_power_of_two() -> None:
    batches = Batches(
        Counting(), GlobalSampler(9, 0), plan_of(sequences=6), sequence=10, data_rank=0, data_ranks=2, powers=True
    )
    tokens, _ = batches.get(0)
    batches.close()
    assert len(tokens) == 4
